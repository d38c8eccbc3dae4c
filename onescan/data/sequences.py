"""Labelled token sequences of different lengths, and the format a classifier was trained on."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Integer
from torch import Tensor

from onescan.data.base import DataSet, Example, Format, LoadedBatch

Ids = Integer[np.ndarray, " T"]

PADDING = 0


class SequenceFormat(Format, ABC):
    """How raw input becomes the tokens a model was trained on: one subclass for each kind."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Kinds of tokens."""

    @abstractmethod
    def encode(self, raw: Any) -> Ids:
        """Turn one input into tokens.

        Raises:
            ValueError: it is none that the model was trained on.
        """


class LabelledSequence(NamedTuple):
    """One sequence and what is to be said of it.

    Attributes:
        tokens: at least one.
        label: the place of its class, or a number.
        first: of a pair of texts in one sequence, how many tokens are the first one's, and the
            separator's; None for a single text.
    """

    tokens: Ids
    label: int | float
    first: int | None = None


class SequenceSet(DataSet):
    """Labelled sequences: a batch is (tokens, keep, labels), or (tokens, keep, labels, segments).

    tokens [B, T] are padded on the right, up to the longest of the batch; keep [B, T] is False for
    padding; segments [B, T], of pairs, are 1 from the second text on.
    """

    decodes = True

    @abstractmethod
    def example(self, place: int) -> LabelledSequence:
        """Read one sequence: a function of its place alone.

        Raises:
            ValueError: it cannot be read; says where it is.
        """

    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        return LoadedBatch(padded([self.example(example.source) for example in examples]))


@dataclass(frozen=True, kw_only=True)
class SequenceList(SequenceSet):
    """Sequences that are in memory already."""

    decodes = False
    sequences: Sequence[LabelledSequence]

    def __len__(self) -> int:
        return len(self.sequences)

    def example(self, place: int) -> LabelledSequence:
        return self.sequences[place]


@dataclass(frozen=True, kw_only=True)
class SequenceSplits:
    """Sequences to learn from, held-out ones to be judged on, and how to read both."""

    train: SequenceSet
    test: SequenceSet
    class_names: tuple[str, ...]
    """Of the labels, in order; none where labels are numbers to be estimated."""
    format: SequenceFormat


def padded(sequences: Sequence[LabelledSequence]) -> tuple[Tensor, ...]:
    """Make a batch of sequences, as `SequenceSet` says.

    >>> two = [LabelledSequence(np.array([7]), 1), LabelledSequence(np.array([8, 9]), 0)]
    >>> [part.tolist() for part in padded(two)]
    [[[7, 0], [8, 9]], [[True, False], [True, True]], [1, 0]]
    """
    lengths = torch.tensor([len(sequence.tokens) for sequence in sequences])
    places = torch.arange(int(lengths.max()))
    tokens = torch.full((len(sequences), len(places)), PADDING)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence.tokens)] = torch.from_numpy(sequence.tokens.astype(np.int64))
    labels = torch.tensor([sequence.label for sequence in sequences])
    batch = (tokens, places < lengths[:, None], labels)
    if sequences[0].first is None:
        return batch
    firsts = torch.tensor([sequence.first for sequence in sequences])
    return (*batch, ((places >= firsts[:, None]) & batch[1]).long())
