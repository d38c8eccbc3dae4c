"""Associative recall: pairs of a key and a value, then keys whose values are to be told.

Multi-query associative recall, from its description in arXiv:2312.04927, Sec. 3: each key is asked
once, among blanks, so one pass over a sequence answers all of its queries. Theirs come sooner
rather than later, by a power law; here all places are equally likely, so each distance is judged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import torch

from onescan.checks import check_positive
from onescan.data.base import DataConfig, DataSet, Example, Format, LoadedBatch
from onescan.data.long_range.chance import below, check_whole, example_chance

BLANK = 0
PARTS = 3  # a key, its value, and the key again


class RecallSequence(NamedTuple):
    """One sequence; all three lists are of its length.

    Attributes:
        tokens: pairs, then keys among blanks.
        answers: the value at each query; blank elsewhere.
        distances: tokens from a key to its query; 0 elsewhere.
    """

    tokens: list[int]
    answers: list[int]
    distances: list[int]


@dataclass(frozen=True, kw_only=True)
class RecallFormat(Format):
    """A blank is 0, keys come after it, values after them."""

    keys: int
    values: int

    @property
    def vocab_size(self) -> int:
        """Kinds of tokens."""
        return 1 + self.keys + self.values


@dataclass(frozen=True, kw_only=True)
class RecallConfig(DataConfig):
    """Multi-query associative recall, generated on the fly."""

    keys: int = 32
    """Number of distinct keys."""
    values: int = 32
    """Number of distinct values."""
    length: int = 64
    """Tokens per sequence."""
    pairs: tuple[int, ...] = (1, 2, 4, 8)
    """Key-value pairs per training sequence; cycles through these numbers. Including small numbers
    makes training easier."""
    test_pairs: tuple[int, ...] = (4, 8, 16)
    """Key-value pairs per test sequence; cycles through these numbers."""
    train_examples: int = 64_000
    """Number of training sequences."""
    test_examples: int = 1_536
    """Number of test sequences."""
    seed: int = 0
    """Random seed of all sequences."""

    @property
    def max_tokens(self) -> int:
        return self.length

    def build(self) -> "RecallSplits":
        """Make ready to draw.

        Raises:
            ValueError: a number is out of range, or the pairs do not fit keys or length.
        """
        self._check()
        return RecallSplits(
            train=RecallSet(
                config=self, split="train", pairs=self.pairs, count=self.train_examples
            ),
            test=RecallSet(
                config=self, split="test", pairs=self.test_pairs, count=self.test_examples
            ),
            format=RecallFormat(keys=self.keys, values=self.values),
        )

    def _check(self) -> None:
        for name in ("keys", "values", "length", "train_examples", "test_examples"):
            check_positive(**{f"data.{name}": getattr(self, name)})
        for name in ("pairs", "test_pairs"):
            numbers = getattr(self, name)
            if not numbers:
                raise ValueError(f"data.{name} is empty, expected at least one number")
            check_whole(1, **{f"data.{name}[{i}]": number for i, number in enumerate(numbers)})
            most = max(numbers)
            if most > self.keys or PARTS * most > self.length:
                raise ValueError(
                    f"data.{name} has {most}, expected at most data.keys, {self.keys}, and a third "
                    f"of data.length, {self.length}"
                )


@dataclass(frozen=True, kw_only=True)
class RecallSet(DataSet):
    """Sequences of one split: a batch is (tokens, answers, distances), each [B, T].

    See `RecallSequence`.
    """

    config: RecallConfig
    split: str
    pairs: tuple[int, ...]
    count: int

    def __len__(self) -> int:
        return self.count

    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        rows = [self.sequence(example.source) for example in examples]
        return LoadedBatch(tuple(torch.tensor(part) for part in zip(*rows, strict=True)))

    def sequence(self, place: int) -> RecallSequence:
        """Draw one sequence: a function of the config, the split and the place alone."""
        config = self.config
        chance = example_chance("recall", seed=config.seed, split=self.split, index=place)
        pairs = self.pairs[place % len(self.pairs)]
        keys = _some(chance, pairs, range(1, 1 + config.keys))
        values = [1 + config.keys + below(chance, config.values) for _ in keys]
        queries = _some(chance, pairs, range(2 * pairs, config.length))
        tokens = [token for pair in zip(keys, values, strict=True) for token in pair]
        tokens += [BLANK] * (config.length - len(tokens))
        answers, distances = ([BLANK] * config.length for _ in range(2))
        for i, (query, key, value) in enumerate(zip(queries, keys, values, strict=True)):
            tokens[query], answers[query], distances[query] = key, value, query - 2 * i
        return RecallSequence(tokens, answers, distances)


@dataclass(frozen=True, kw_only=True)
class RecallSplits:
    """Sequences to learn from, others to be judged on, and their tokens."""

    train: RecallSet
    test: RecallSet
    format: RecallFormat


def _some(chance: Random, count: int, among: range) -> list[int]:
    """Draw different numbers, in an order of chance."""
    numbers = list(among)
    for i in range(count):
        other = i + below(chance, len(numbers) - i)
        numbers[i], numbers[other] = numbers[other], numbers[i]
    return numbers[:count]
