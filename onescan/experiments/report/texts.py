"""Sections about text: what a language model generates, GLUE's hardest texts, and recall."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Bool, Int

from onescan.experiments.data import DataSet
from onescan.experiments.report.format import percent
from onescan.experiments.report.page import Figure, Section, fragment
from onescan.experiments.report.plots import Axis, heat_map
from onescan.experiments.report.runs import RunGroup
from onescan.experiments.tasks import (
    Batch,
    Glue,
    LanguageModelling,
    MaskedLanguageModelling,
    Recall,
)
from onescan.inference.text_generation import generate_text
from onescan.inputs.tokenizer import REPLACEMENT_CHARACTER
from onescan.layers.position import TokenPositionConfig
from onescan.messages import plural
from onescan.models.causal_lm import IGNORE_INDEX, CausalLM, Sampling
from onescan.models.masked_lm import MaskedLM

TEXTS, PROMPT, NEW_TOKENS = 3, 64, 200  # number of texts; tokens of each prompt and after it
SAMPLING = Sampling(temperature=0.8, top_p=0.95)
HARDEST = 12  # texts of GLUE
LONGEST_TEXT = 300  # characters
DISTANCES = 8  # columns of the recall heat map

Distances = Int[np.ndarray, "sequences T"]
Correct = Bool[np.ndarray, "sequences T"]


@torch.no_grad()
def generated(group: RunGroup) -> Section:
    """Texts that the first run's model generates, or masked tokens that it predicts."""
    task, model, lead = group.task, group.model, f"Model of seed {group.runs[0].seed}."
    if isinstance(task, LanguageModelling) and isinstance(model, CausalLM):
        return Section("Generated text", _continuations(task, model), lead)
    if isinstance(task, MaskedLanguageModelling) and isinstance(model, MaskedLM):
        return Section("Predicted tokens", _filled_masks(task, model), lead)
    return Section("Generated text", lead="Not shown: this model does not generate text.")


def _continuations(task: LanguageModelling, model: CausalLM) -> list[Figure]:
    figures = []
    position = model.config.position
    limit = position.max_tokens if isinstance(position, TokenPositionConfig) else None
    for row, (tokens, _) in _rows(task.test):
        length = PROMPT if limit is None else min(PROMPT, limit // 2)
        prompt = task.tokenizer.decode(tokens[0, :length].tolist())
        prompt = prompt.strip(REPLACEMENT_CHARACTER)  # from characters that are cut off
        new = NEW_TOKENS
        if limit is not None:
            new = max(1, min(NEW_TOKENS, limit - len(task.tokenizer.begin(prompt))))
        generator = torch.Generator().manual_seed(row)
        pieces = generate_text(
            model, task.tokenizer, prompt, SAMPLING, max_new_tokens=new, generator=generator
        )
        body = fragment("text", [(prompt, "b"), ("".join(pieces), "")])
        caption = (
            "Bold: the prompt, from held-out text. Then the model's continuation, sampled at "
            f"temperature {SAMPLING.temperature:g} with top-p {SAMPLING.top_p:g}."
        )
        figures.append(Figure(f"Row {row}", body, caption))
    return figures


def _filled_masks(task: MaskedLanguageModelling, model: MaskedLM) -> list[Figure]:
    figures = []
    for row, batch in _rows(task.test):
        tokens, documents, labels = task.masked_for_evaluation(batch)
        predicted = model(tokens, documents=documents)[0].argmax(-1)
        masked = labels[0] != IGNORE_INDEX
        filled = predicted.to(tokens.device).where(masked, tokens[0])
        marks = zip(masked.tolist(), (filled == labels[0]).tolist(), strict=True)
        tags = [("b" if right else "s") if is_masked else "" for is_masked, right in marks]
        # The last piece is the rest of an incomplete character.
        parts = list(zip(task.tokenizer.pieces(filled.tolist()), [*tags, ""], strict=True))
        caption = "Predictions for masked tokens: bold if correct, struck through if wrong."
        figures.append(Figure(f"Row {row}", fragment("text", parts), caption))
    return figures


def _rows(test: DataSet) -> Iterator[tuple[int, Batch]]:
    """Yield a few evenly spaced rows with their indices."""
    chosen = {i * len(test) // TEXTS for i in range(TEXTS)}
    for row, (example, _) in enumerate(test.examples(seed=None)):
        if row in chosen:
            yield row, test.read([example]).batch


def glue_errors(group: RunGroup) -> Section:
    """The held-out texts of the highest loss, for the first run."""
    title, losses = "Largest errors", group.array("losses")[0]
    if len(losses) != len(group.task.test):
        return Section(title, lead="Not shown: the held-out texts have changed since evaluation.")
    hardest = losses.topk(min(HARDEST, len(losses))).indices.tolist()
    rows = [("texts", "label", "prediction"), *(_glue_row(group, row) for row in hardest)]
    caption = (
        f"Predictions and their probabilities for the texts of the highest loss; model of seed "
        f"{group.runs[0].seed}. Some labels may be debatable."
    )
    table = fragment("table", rows, "wraps lined")
    return Section(title, [Figure("Held-out texts of the highest loss", table, caption, columns=3)])


def _glue_row(group: RunGroup, row: int) -> tuple[str, str, str]:
    assert isinstance(group.task, Glue)
    texts = " \N{EM DASH} ".join(_shortened(text) for text in group.task.texts(row))
    label, predicted = (group.array(name)[0, row].item() for name in ("labels", "predictions"))
    if not group.class_names:
        return texts, f"{label:.1f}", f"{predicted:.1f}"
    share = percent(group.array("confidence")[0, row].item())
    return texts, group.class_names[int(label)], f"{group.class_names[int(predicted)]} {share}"


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ..."


def recall(group: RunGroup) -> Section:
    """Accuracy by number of pairs and by distance, over all seeds."""
    assert isinstance(group.task, Recall)
    distances = group.array("distances").flatten(0, 1).numpy()
    correct = group.array("right").flatten(0, 1).numpy()
    pairs = (distances > 0).sum(axis=1)
    counts, ranges = np.unique(pairs).tolist(), distance_ranges(int(distances.max()))
    cells = [
        [_accuracy(distances[pairs == count], correct[pairs == count], each) for each in ranges]
        for count in counts
    ]
    names = [str(low) if low == high else f"{low}-{high}" for low, high in ranges]
    chart = heat_map(
        np.array(cells),
        rows=Axis("pairs", [str(count) for count in counts]),
        columns=Axis("tokens from pair to query", names),
        format=lambda share: percent(share, 0),
        high=1.0,
    )
    caption = (
        f"Share of correct answers by the number of pairs in the sequence and by the distance from "
        f"a pair to its query ({plural(len(group.runs), 'seed')}, {len(distances[0])} tokens). "
        f"Cells without queries are empty. Random guesses among all values are correct "
        f"once in {group.task.format.values:,}, those among the values of the sequence once in the "
        "number of pairs."
    )
    return Section("Recall", [Figure("Accuracy by number of pairs", chart, caption, columns=2)])


def distance_ranges(furthest: int) -> list[tuple[int, int]]:
    """Divide distances into ranges of equal width.

    >>> distance_ranges(62)[0], distance_ranges(62)[-1], distance_ranges(5)[-1]
    ((1, 8), (57, 64), (5, 5))
    """
    step = -(-furthest // DISTANCES)
    return [(low + 1, high) for low, high in pairwise(range(0, furthest + step, step))]


def _accuracy(distances: Distances, correct: Correct, between: tuple[int, int]) -> float:
    """Share of correct answers at these distances; NaN if there are none."""
    low, high = between
    is_between = (low <= distances) & (distances <= high)
    return float(correct[is_between].mean()) if is_between.any() else np.nan
