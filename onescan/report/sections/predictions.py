"""Held-out images with what the model says: all mistakes first, then some that are right."""

from collections import Counter
from html import escape
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from onescan.report.pictures import held_out_labels, held_out_pixels, left_out, picture, to_bytes
from onescan.report.runs import RunGroup
from onescan.report.section import Figure, Section
from onescan.report.words import ARROW, percent, plural

MOST_MISTAKES = 60
MOST_RIGHT = 20


class Answer(NamedTuple):
    """What the runs say of one image.

    Attributes:
        image: the image's place among the held-out ones.
        truth: its class.
        said: what is said; by most of the runs that are wrong, if any is.
        share: the probability that the runs which say so give it, on average.
        wrong: how many runs are wrong.
    """

    image: int
    truth: int
    said: int
    share: float
    wrong: int


def section(study: RunGroup) -> Section:
    """Mistakes and a sample of the rest."""
    if why := left_out(study):
        return Section("Test images", lead=why)
    errs = study.array("predictions") != held_out_labels(study)  # seeds images
    seldom_right = _worst_first(errs, study.array("confidence"))
    right = (~errs.any(dim=0)).nonzero().flatten().tolist()
    figures = [_mistakes(study, seldom_right)] if seldom_right else []
    figures += [_right_answers(study, right)] if right else []
    return Section("Test images", tuple(figures))


def _worst_first(
    errs: Bool[Tensor, "seeds images"], confidence: Float[Tensor, "seeds images"]
) -> list[int]:
    """The images that any run gets wrong, by how many do, and then by how sure those are."""
    times = errs.sum(dim=0)
    sure = (confidence * errs).sum(dim=0) / times.clamp(min=1)
    return (times + sure).argsort(descending=True, stable=True)[: int((times > 0).sum())].tolist()


def _mistakes(study: RunGroup, wrong: list[int]) -> Figure:
    shown = [_answer(study, image) for image in wrong[:MOST_MISTAKES]]
    seeds = len(study.runs)
    which = "All" if len(shown) == len(wrong) else f"The first {len(shown)} of"
    who = "at least one seed" if seeds > 1 else "the model"
    several = f"below it, how many of the {seeds} seeds err, and " if seeds > 1 else ""
    return Figure(
        plural(len(wrong), "mistake"),
        _gallery(study, shown),
        f"{which} {plural(len(wrong), 'image')} that {who} gets wrong: true class {ARROW} "
        f"prediction, {several}the probability given to that prediction. Those at the top are "
        "the most consistent and the most confident.",
        columns=3,
    )


def _right_answers(study: RunGroup, right: list[int]) -> Figure:
    every = -(-len(right) // MOST_RIGHT)
    which = f"One in {every:,} of" if every > 1 else "All"
    who = "all seeds get" if len(study.runs) > 1 else "the model gets"
    return Figure(
        "Right answers",
        _gallery(study, [_answer(study, image) for image in right[::every]]),
        f"{which} the {plural(len(right), 'image')} that {who} right, with the probability given "
        "to the right class.",
        columns=3,
    )


def _answer(study: RunGroup, image: int) -> Answer:
    arrays = [run.result.evaluation.arrays for run in study.runs]
    truth = int(arrays[0]["labels"][image])
    said = [int(array["predictions"][image]) for array in arrays]
    errors = Counter(name for name in said if name != truth)
    chosen = errors.most_common(1)[0][0] if errors else truth
    shares = [
        array["confidence"][image]
        for array, name in zip(arrays, said, strict=True)
        if name == chosen
    ]
    return Answer(image, truth, chosen, float(torch.stack(shares).mean()), errors.total())


def _gallery(study: RunGroup, answers: list[Answer]) -> str:
    pixels = held_out_pixels(study, torch.tensor([answer.image for answer in answers]))
    cards = [
        _card(study, answer, picture(image, alt=_alt(study, answer)))
        for answer, image in zip(answers, to_bytes(pixels), strict=True)
    ]
    return f'<ul class="gallery">{"".join(cards)}</ul>'


def _card(study: RunGroup, answer: Answer, image: str) -> str:
    truth, said = (escape(study.class_names[i]) for i in (answer.truth, answer.said))
    words = f"{truth} &rarr; <b>{said}</b>" if answer.wrong else f"<b>{truth}</b>"
    share = percent(answer.share, 0 if answer.wrong else 1)
    seeds = len(study.runs)
    errs = f"{answer.wrong}/{seeds} &middot; " if answer.wrong and seeds > 1 else ""
    kind = "wrong" if answer.wrong else "right"
    return f'<li class="{kind}">{image}<div>{words}</div><small>{errs}{share}</small></li>'


def _alt(study: RunGroup, answer: Answer) -> str:
    truth, said = (study.class_names[i] for i in (answer.truth, answer.said))
    return f"Test image {answer.image}, which shows {truth}, predicted as {said}"
