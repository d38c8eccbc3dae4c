"""Losses of n-gram models, as baselines for small language models.

python benchmarks/language.py FILE             predict the next byte, as shakespeare_* do
python benchmarks/language.py FILE --masked    predict masked bytes, as wikitext2_mlm_* do

The models learn from the training part of the recipes' split, and are evaluated on the same bytes
and the same sequences as the recipes' models. n-grams are interpolated by the Witten-Bell rule:
p(x | h) = (c(hx) + u(h) p(x | h')) / (c(h) + u(h)), where c counts, u(h) is the number of different
bytes seen after h, and h' is h without its first byte. Masked bytes are predicted by unigrams.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from matplotlib.figure import Figure
from results import environment, write

from onescan import configs
from onescan.experiments.data.text import PackedText
from onescan.experiments.recipes import find_recipe
from onescan.experiments.tasks import MaskedLanguageModelling, Task
from onescan.models.causal_lm import IGNORE_INDEX

CAUSAL, MASKED = "shakespeare_lightnet", "wikitext2_mlm_lightnet"
BYTES = 256


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the benchmark."""

    path: Annotated[str, tyro.conf.Positional]
    """Text file."""
    masked: bool = False
    """Predict masked bytes by their frequency."""
    orders: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    """Orders of n-grams: order 4 predicts a byte from the 3 before it."""
    out: Path = Path("bench/language")
    """Folder for the results."""


class NGrams:
    """Counts of the bytes that follow each context of up to order - 1 bytes."""

    def __init__(self, tokens: list[int], order: int) -> None:
        self.order = order
        self.follows: list[defaultdict[tuple[int, ...], Counter[int]]] = [
            defaultdict(Counter) for _ in range(order)
        ]
        for end, token in enumerate(tokens):
            for length in range(min(order - 1, end) + 1):
                self.follows[length][tuple(tokens[end - length : end])][token] += 1
        self.sums = [
            {context: (counts.total(), len(counts)) for context, counts in follows.items()}
            for follows in self.follows
        ]

    def probability(self, context: list[int], token: int) -> float:
        p = 1 / BYTES
        for length in range(min(self.order - 1, len(context)) + 1):
            known = tuple(context[len(context) - length :])
            if known not in self.sums[length]:
                break
            total, different = self.sums[length][known]
            p = (self.follows[length][known][token] + different * p) / (total + different)
        return p


def build_task(name: str, path: str) -> Task:
    return configs.replace(find_recipe(name)(), {"data.path": path}).build_task()


def training_tokens(task: Task) -> list[int]:
    assert isinstance(task.train, PackedText)
    return task.train.corpus.tokens.tolist()


def test_rows(task: Task) -> Iterator[list[int]]:
    """Yield test sequences without padding."""
    for plan in task.test_batches():
        tokens, documents = task.test.read(plan.examples).batch
        for row, document in zip(tokens, documents, strict=True):
            yield row[document >= 0].tolist()


def ngram_losses(options: Options) -> dict[str, float]:
    """Return the loss in nats per byte of each order."""
    task = build_task(CAUSAL, options.path)
    training, rows = training_tokens(task), list(test_rows(task))
    count = sum(len(row) - 1 for row in rows)
    print(f"{len(training)} training bytes, {count} test bytes")
    losses = {}
    for order in options.orders:
        model = NGrams(training, order)
        losses[f"{order}-gram"] = -sum(
            math.log(model.probability(row[max(0, i - order + 1) : i], row[i])) / count
            for row in rows
            for i in range(1, len(row))
        )
    return losses


def masked_losses(options: Options) -> dict[str, float]:
    """Return the loss of unigrams in nats per byte, and the accuracy of the most frequent byte."""
    task = build_task(MASKED, options.path)
    assert isinstance(task, MaskedLanguageModelling)
    counts = Counter(training_tokens(task))
    total, (most_frequent, _) = counts.total() + BYTES, counts.most_common(1)[0]
    labels: list[int] = []
    for plan in task.test_batches():
        batch = task.corrupt(task.test.read(plan.examples).batch, seed=0)
        labels += batch[2][batch[2] != IGNORE_INDEX].tolist()
    print(f"{counts.total()} training bytes, {len(labels)} masked test bytes")
    loss = -sum(math.log((counts[label] + 1) / total) for label in labels) / len(labels)
    accuracy = labels.count(most_frequent) / len(labels)
    return {"unigram": loss, f"accuracy of {chr(most_frequent)!r}": accuracy}


def main(options: Options) -> None:
    losses = masked_losses(options) if options.masked else ngram_losses(options)
    for name, value in losses.items():
        print(f"{name}: {value:.4f}" + ("" if "accuracy" in name else " nats per byte"))
    name = "masked" if options.masked else "ngrams"
    figure = Figure(figsize=(6, 4), layout="constrained")
    figure.subplots().bar(list(losses), list(losses.values()))
    figure.axes[0].set_ylabel("nats per byte")
    results = {"options": options, "environment": environment(torch.device("cpu"))}
    write(options.out, name, figure, **results, losses=losses)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
