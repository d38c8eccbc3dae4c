"""Labeled token sequences of different lengths, and the input format of a classifier."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from onescan.experiments.data.base import DataSet, Example, LoadedBatch, Splits
from onescan.inputs.sequences import Ids, SequenceFormat, pad_tokens


class LabeledSequence(NamedTuple):
    """One sequence and its label.

    Attributes:
        tokens: At least one token.
        label: Index of its class, or the target of a regression.
        first: For a pair of texts, the number of tokens of the first text and the separator. None
            for a single text.
    """

    tokens: Ids
    label: int | float
    first: int | None = None


class SequenceSet(DataSet):
    """Labeled sequences: a batch is (tokens, keep, labels), or (tokens, keep, labels, segments).

    tokens [B, T] are padded on the right to the longest of the batch; keep [B, T] is False for
    padding; segments [B, T], for pairs, are 1 from the second text on.
    """

    decodes = True

    @abstractmethod
    def example(self, index: int) -> LabeledSequence:
        """Read one sequence, which depends only on its index.

        Raises:
            ValueError: If it cannot be read. The message names its location.
        """

    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        return LoadedBatch(padded([self.example(example.source) for example in examples]))


@dataclass(frozen=True, kw_only=True)
class SequenceList(SequenceSet):
    """Sequences in memory."""

    decodes = False
    sequences: Sequence[LabeledSequence]

    def __len__(self) -> int:
        return len(self.sequences)

    def example(self, index: int) -> LabeledSequence:
        return self.sequences[index]


@runtime_checkable
class Generator(Protocol):
    """Generates labeled sequences, or images to be read row by row."""

    def example(self, split: str, index: int) -> tuple[ArrayLike, int]:
        """Generate one example: tokens from 0 to 255, and the index of its class."""


@dataclass(frozen=True, kw_only=True)
class GeneratedSequences(SequenceSet):
    """Sequences generated whenever they are read, identical each time."""

    generator: Generator
    split: str
    count: int

    def __len__(self) -> int:
        return self.count

    def example(self, index: int) -> LabeledSequence:
        tokens, label = self.generator.example(self.split, index)
        return LabeledSequence(np.asarray(tokens, dtype=np.uint8).reshape(-1), label)


@dataclass(frozen=True, kw_only=True)
class SequenceSplits(Splits):
    """Training and test sequences, and their format."""

    train: SequenceSet
    test: SequenceSet
    class_names: tuple[str, ...]
    """Names of the labels, in order; empty for regression."""
    format: SequenceFormat


def padded(sequences: Sequence[LabeledSequence]) -> tuple[Tensor, ...]:
    """Pad sequences to a batch, as described in `SequenceSet`.

    >>> two = [LabeledSequence(np.array([7]), 1), LabeledSequence(np.array([8, 9]), 0)]
    >>> [part.tolist() for part in padded(two)]
    [[[7, 0], [8, 9]], [[True, False], [True, True]], [1, 0]]
    """
    tokens, keep = pad_tokens([sequence.tokens for sequence in sequences])
    labels = torch.tensor([sequence.label for sequence in sequences])
    batch = (tokens, keep, labels)
    if sequences[0].first is None:
        return batch
    firsts = torch.tensor([sequence.first for sequence in sequences])
    positions = torch.arange(tokens.shape[1])
    return (*batch, ((positions >= firsts[:, None]) & keep).long())
