"""The page: the best guidance scale in big numbers, all numbers, curves, images, classes."""

from collections.abc import Mapping
from html import escape

from onescan.evaluation.generation import GenerationScore, GenerationScores, Shown
from onescan.report.cards import Card, big_numbers, fact_list
from onescan.report.generation.classes import classes
from onescan.report.generation.curves import curves
from onescan.report.generation.images import images
from onescan.report.generation.words import best, cell, guidance_name, short_names
from onescan.report.section import Figure, Section
from onescan.report.template import fill
from onescan.report.words import percent, plural

LEAD = (
    "Generated images beside real ones: how near their features come as a whole, whether each "
    "looks real, and whether together they cover what is real."
)
INCEPTION = (
    "The features are those of a file that stands for Inception-v3; only with its original weights "
    "are the numbers those of papers."
)
OWN = (
    "The features are a classifier's of our own, so the Frechet distance is no FID, and compares "
    "only with others in features of the same classifier; the class score is the Inception Score's "
    "formula with the classes that it knows."
)


def render_generation(scores: GenerationScores, shown: Mapping[float | None, Shown | None]) -> str:
    """Spell the page in HTML.

    Args:
        scores: what was measured.
        shown: some images, by guidance scale.
    """
    sections = [_numbers(scores), *curves(scores), *images(scores, shown), *classes(scores)]
    return fill(
        kind="image generation",
        title=scores.name,
        lead=LEAD,
        summary=f"{_cards(scores)}\n{_facts(scores)}",
        sections=sections,
    )


def generation_table(scores: GenerationScores) -> str:
    """The numbers in columns, for a terminal."""
    names = short_names(scores)
    heads = [f"{'guidance':<10}", *(f"{name:>{_width(name)}}" for name in names.values())]
    lines = [f"{scores.distance_name}, {plural(scores.samples, 'image')}", "".join(heads)]
    for score in scores.scores:
        cells = [f"{cell(score, field):>{_width(name)}}" for field, name in names.items()]
        lines.append(f"{guidance_name(score):<10}" + "".join(cells))
    return "\n".join([*lines, *_warnings(scores)])


def _width(name: str) -> int:
    return max(len(name) + 2, 11)


def _warnings(scores: GenerationScores) -> list[str]:
    if not scores.is_singular:
        return []
    return [
        "There are no more images than features on a side: distances depend much on how many there "
        "are, and compare only with those of as many."
    ]


def _cards(scores: GenerationScores) -> str:
    """Of the guidance scale that comes nearest."""
    score = best(scores)
    at = "" if score.guidance is None else f" at guidance {score.guidance:g}"
    name = scores.short_names["distance"]
    cards: list[Card] = [
        (f"{score.distance:.2f}", name, f"of {plural(scores.samples, 'image')}{at}"),
    ]
    if score.precision is not None and score.recall is not None:
        cards += [
            (percent(score.precision), "precision", "share of the images that look real"),
            (percent(score.recall), "recall", "share of the real images that are covered"),
        ]
    if score.as_asked is not None:
        cards.append((percent(score.as_asked), "as asked", "told to be of the class asked for"))
    elif score.class_score is not None:
        spread = f"{score.class_score:.2f} <small>&plusmn; {score.class_score_spread:.2f}</small>"
        cards.append((spread, scores.short_names["class_score"], "over ten parts of the images"))
    return big_numbers(cards)


def _facts(scores: GenerationScores) -> str:
    real = scores.real
    count = "statistics of them" if real.count is None else plural(real.count, "image")
    facts = [("Real images", f"{real.name}, {count}"), ("Features", scores.features)]
    if scores.sampler is not None and scores.steps is not None:
        facts.append(("Sampler", f"{scores.sampler}, {plural(scores.steps, 'step')}"))
    if scores.labels is not None:
        asked = (
            "each equally often" if scores.labels == "uniform" else "as often as in the real ones"
        )
        facts.append(("Classes", f"{len(scores.class_names):,}, {asked}"))
    if scores.seed is not None:
        facts.append(("Seed", str(scores.seed)))
    facts.append(("Version", f"onescan {scores.onescan}"))
    return fact_list(facts)


def _numbers(scores: GenerationScores) -> Section:
    names = short_names(scores)
    rows = ["<th>guidance</th>" + "".join(f"<th>{escape(name)}</th>" for name in names.values())]
    nearest = best(scores)
    for score in scores.scores:
        marked = score is nearest and len(scores.scores) > 1
        cells = "".join(_cell(score, field, marked=marked) for field in names)
        rows.append(f"<th>{escape(guidance_name(score))}</th>{cells}")
    rows += _real_row(scores, list(names))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    table = f'<div class="scroll"><table class="groups">{body}</table></div>'
    return Section(
        "Numbers",
        (Figure("Every guidance scale", table, _caption(scores), columns=3),),
        " ".join([INCEPTION if scores.is_inception else OWN, *_warnings(scores)]),
    )


def _cell(score: GenerationScore, field: str, *, marked: bool) -> str:
    text = escape(cell(score, field))
    return f'<td class="best"><b>{text}</b></td>' if marked else f"<td>{text}</td>"


def _real_row(scores: GenerationScores, fields: list[str]) -> list[str]:
    """The real images beside, as far as a number is of them alone."""
    known = {"class_score": scores.real.class_score, "as_asked": scores.real.as_labelled}
    if all(known.get(field) is None for field in fields):
        return []
    spelt = {
        "class_score": "" if known["class_score"] is None else f"{known['class_score']:.2f}",
        "as_asked": "" if known["as_asked"] is None else percent(known["as_asked"]),
    }
    return ["<th>real images</th>" + "".join(f"<td>{spelt.get(f, '')}</td>" for f in fields)]


def _caption(scores: GenerationScores) -> str:
    names = scores.short_names
    parts = [
        f"{names['distance']}: how far the features lie apart, as normal distributions; the lower, "
        "the better. It is 0 for the real images themselves."
    ]
    if any(score.spatial_distance is not None for score in scores.scores):
        parts.append(
            f"{names['spatial_distance']}: the same of features that know where something is."
        )
    if any(score.class_score is not None for score in scores.scores):
        parts.append(
            f"{names['class_score']}: high where each image is clearly of one class and all "
            "classes are there; spread over ten parts."
        )
    if any(score.as_asked is not None for score in scores.scores):
        parts.append(
            "As asked: the share of the images that the classifier tells to be of the class asked "
            "for; of the real images, of the class that they are of."
        )
    return " ".join(parts)
