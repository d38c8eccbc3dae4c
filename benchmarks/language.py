"""What counting alone knows of a text: the losses that a small language model has to beat.

python benchmarks/language.py FILE             n-grams: the held-out bytes of FILE told one by one
python benchmarks/language.py FILE --masked    unigrams: the bytes that wikitext2_mlm_* are to tell

Both learn from the split of the recipes, and are judged on the very bytes that the recipes' models
are judged on, with the same rows as context. N-grams are interpolated by Witten and Bell's rule:
p(x | h) = (c(hx) + u(h) p(x | h')) / (c(h) + u(h)), where c counts, u(h) is the number of kinds of
bytes seen after h, and h' is h without its first byte.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import tyro

from onescan import configs
from onescan.data.text import PackedText
from onescan.models.causal_lm import IGNORE_INDEX
from onescan.recipes import find_recipe
from onescan.tasks import MaskedLanguageModelling, Task

CAUSAL, MASKED = "shakespeare_lightnet", "wikitext2_mlm_lightnet"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to judge."""

    path: Annotated[str, tyro.conf.Positional]
    """A file of text."""
    masked: bool = False
    """Tell masked bytes, by how often each byte comes at all."""
    orders: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    """Of n-grams: an order of 4 tells a byte from the 3 before it."""


class NGrams:
    """Counts of what follows each context of up to order - 1 bytes."""

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

    def probability(self, context: list[int], token: int, kinds: int) -> float:
        p = 1 / kinds
        for length in range(min(self.order - 1, len(context)) + 1):
            known = tuple(context[len(context) - length :])
            if known not in self.sums[length]:
                break
            total, seen = self.sums[length][known]
            p = (self.follows[length][known][token] + seen * p) / (total + seen)
        return p


def pose(name: str, path: str) -> Task:
    run = configs.replace(find_recipe(name)(), {"data.path": path})
    return run.task.build(run.data.build())


def tokens_of(task: Task) -> list[int]:
    assert isinstance(task.train, PackedText)
    return task.train.corpus.tokens.tolist()


def rows(task: Task) -> Iterator[list[int]]:
    """Held-out rows, without their padding."""
    for planned in task.test_batches():
        tokens, documents = task.test.read(planned.examples).batch
        for row, document in zip(tokens, documents, strict=True):
            yield row[document >= 0].tolist()


def judge_ngrams(path: str, orders: tuple[int, ...]) -> None:
    task = pose(CAUSAL, path)
    known, held_out = tokens_of(task), list(rows(task))
    count = sum(len(row) - 1 for row in held_out)
    print(f"{count} held-out bytes; {len(known)} to learn from")
    for order in orders:
        grams = NGrams(known, order)
        nats = -sum(
            math.log(grams.probability(row[max(0, i - order + 1) : i], row[i], kinds=256))
            for row in held_out
            for i in range(1, len(row))
        )
        print(f"order {order}: {nats / count:.4f} nats a byte")


def judge_unigrams(path: str) -> None:
    task = pose(MASKED, path)
    assert isinstance(task, MaskedLanguageModelling)
    counts = Counter(tokens_of(task))
    total, (likeliest, _) = counts.total() + 256, counts.most_common(1)[0]
    labels: list[int] = []
    for planned in task.test_batches():
        batch = task.augment(task.test.read(planned.examples).batch, seed=0)
        labels += batch[2][batch[2] != IGNORE_INDEX].tolist()
    nats = -sum(math.log((counts[label] + 1) / total) for label in labels)
    print(f"{len(labels)} masked bytes; {counts.total()} to learn from")
    print(f"unigrams: {nats / len(labels):.4f} nats a byte", end=", ")
    print(f"{labels.count(likeliest) / len(labels):.4f} of them told by {chr(likeliest)!r}")


if __name__ == "__main__":
    options = tyro.cli(Options, description=__doc__)
    if options.masked:
        judge_unigrams(options.path)
    else:
        judge_ngrams(options.path, options.orders)
