"""Multi-query associative recall: key-value pairs, then keys whose values the model must recall.

After the description in arXiv:2312.04927, Sec. 3: each key is queried once, among blanks, so one
pass over a sequence answers all queries. There, the positions of queries follow a power law; here
they are uniform, so that all distances are evaluated equally.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import torch

from onescan.checks import check_positive, check_whole
from onescan.experiments.data.base import DataConfig, DataSet, Example, LoadedBatch, Splits
from onescan.experiments.data.long_range.rng import example_rng, random_below
from onescan.inputs.sequences import RecallFormat

BLANK = 0
TOKENS_PER_PAIR = 3  # a key, its value, and the query


class RecallSequence(NamedTuple):
    """One sequence, as three lists of the same length.

    Attributes:
        tokens: Pairs, then keys among blanks.
        answers: The value at each query; blank elsewhere.
        distances: Number of tokens from a key to its query; 0 elsewhere.
    """

    tokens: list[int]
    answers: list[int]
    distances: list[int]


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
        """Set up the generator.

        Raises:
            ValueError: If a number is out of range, or the pairs exceed the keys or the length.
        """
        self._check()
        train, test = (
            RecallSet(config=self, split=split, pairs=pairs, count=count)
            for split, pairs, count in (
                ("train", self.pairs, self.train_examples),
                ("test", self.test_pairs, self.test_examples),
            )
        )
        return RecallSplits(
            train=train, test=test, format=RecallFormat(keys=self.keys, values=self.values)
        )

    def _check(self) -> None:
        for name in ("keys", "values", "length", "train_examples", "test_examples"):
            check_positive(**{f"data.{name}": getattr(self, name)})
        for name in ("pairs", "test_pairs"):
            numbers = getattr(self, name)
            if not numbers:
                raise ValueError(f"data.{name} is empty, expected at least one number")
            check_whole(1, **{f"data.{name}[{i}]": number for i, number in enumerate(numbers)})
            highest = max(numbers)
            if highest > self.keys or TOKENS_PER_PAIR * highest > self.length:
                raise ValueError(
                    f"data.{name} contains {highest}, expected at most data.keys {self.keys} and "
                    f"at most a third of data.length {self.length}"
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

    def sequence(self, index: int) -> RecallSequence:
        """Generate one sequence, which depends only on the config, the split and the index."""
        config = self.config
        rng = example_rng("recall", seed=config.seed, split=self.split, index=index)
        pairs = self.pairs[index % len(self.pairs)]
        keys = _sample(rng, pairs, range(1, 1 + config.keys))
        values = [1 + config.keys + random_below(rng, config.values) for _ in keys]
        queries = _sample(rng, pairs, range(2 * pairs, config.length))
        tokens = [token for pair in zip(keys, values, strict=True) for token in pair]
        tokens += [BLANK] * (config.length - len(tokens))
        answers, distances = ([BLANK] * config.length for _ in range(2))
        for i, (query, key, value) in enumerate(zip(queries, keys, values, strict=True)):
            tokens[query], answers[query], distances[query] = key, value, query - 2 * i
        return RecallSequence(tokens, answers, distances)


@dataclass(frozen=True, kw_only=True)
class RecallSplits(Splits):
    """Training and test sequences, and their format."""

    train: RecallSet
    test: RecallSet
    format: RecallFormat


def _sample(rng: Random, count: int, population: range) -> list[int]:
    """Draw distinct numbers in random order."""
    numbers = list(population)
    for i in range(count):
        other = i + random_below(rng, len(numbers) - i)
        numbers[i], numbers[other] = numbers[other], numbers[i]
    return numbers[:count]
