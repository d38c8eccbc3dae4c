"""ListOps as a data set: expressions drawn when they are read, or those of published tables."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from onescan.checks import check_choice, check_positive
from onescan.data.base import DataConfig
from onescan.data.long_range.expressions import VOCABULARY, encode
from onescan.data.long_range.listops import LRA_COUNTS, ListOps, ListOpsConfig
from onescan.data.long_range.listops_files import read_listops
from onescan.data.sequences import (
    Ids,
    LabelledSequence,
    SequenceFormat,
    SequenceList,
    SequenceSet,
    SequenceSplits,
)

HeldOut = Literal["val", "test"]
CLASS_NAMES = tuple("0123456789")


@dataclass(frozen=True, kw_only=True)
class ListOpsFormat(SequenceFormat):
    """Written expressions, as `[MAX 2 9 ]`: a token for each symbol."""

    @property
    def vocab_size(self) -> int:
        return len(VOCABULARY)

    def encode(self, raw: str) -> Ids:
        return np.array(encode(raw), dtype=np.uint8)


@dataclass(frozen=True, kw_only=True)
class ListOpsDataConfig(DataConfig):
    """ListOps of the Long Range Arena or of other sizes: expressions and their values.

    Expressions are never truncated, because truncation would change their value.
    """

    path: str | None = None
    """Folder with the published basic_train.tsv and basic_test.tsv; None generates expressions."""
    expressions: ListOpsConfig = field(default_factory=ListOpsConfig)
    """Size of generated expressions."""
    train_examples: int = LRA_COUNTS["train"]
    """Number of generated training examples."""
    test_examples: int = LRA_COUNTS["test"]
    """Number of generated test examples."""
    test_split: HeldOut = "test"
    """Split to evaluate on: test, or val for model selection."""

    @property
    def max_tokens(self) -> int:
        return self.expressions.max_length

    def build(self) -> SequenceSplits:
        """Make ready to draw, or read the tables.

        Raises:
            ValueError: a number is out of range; or a path is given together with what is drawn, a
                table is not there, or a line of it is wrong: says the file and the line.
        """
        check_choice("data.test_split", self.test_split, get_args(HeldOut))
        check_positive(
            **{
                "data.train_examples": self.train_examples,
                "data.test_examples": self.test_examples,
            }
        )
        train, test = self._drawn() if self.path is None else self._read(Path(self.path))
        return SequenceSplits(
            train=train, test=test, class_names=CLASS_NAMES, format=ListOpsFormat()
        )

    def _drawn(self) -> tuple[SequenceSet, SequenceSet]:
        generator = ListOps(self.expressions)
        return (
            DrawnListOps(generator=generator, split="train", count=self.train_examples),
            DrawnListOps(generator=generator, split=self.test_split, count=self.test_examples),
        )

    def _read(self, folder: Path) -> tuple[SequenceSet, SequenceSet]:
        plain = ListOpsDataConfig(path=self.path, test_split=self.test_split)
        if self != plain:
            raise ValueError(
                f"data.path is {self.path!r}, whose tables have their own sizes; expected no "
                "data.expressions, data.train_examples or data.test_examples with it"
            )
        return _table(folder, "train"), _table(folder, self.test_split)


@dataclass(frozen=True, kw_only=True)
class DrawnListOps(SequenceSet):
    """Expressions that are drawn whenever they are read, the same each time."""

    generator: ListOps
    split: str
    count: int

    def __len__(self) -> int:
        return self.count

    def example(self, place: int) -> LabelledSequence:
        tokens, label = self.generator.example(self.split, place)
        return LabelledSequence(np.array(tokens, dtype=np.uint8), label)


def _table(folder: Path, split: str) -> SequenceList:
    path = folder / f"basic_{split}.tsv"
    if not path.is_file():
        raise ValueError(f"data.path is {str(folder)!r}, where there is no {path.name}")
    rows = [
        LabelledSequence(np.array(tokens, dtype=np.uint8), label)
        for tokens, label in read_listops(path)
    ]
    if not rows:
        raise ValueError(f"{path} holds no expressions")
    return SequenceList(sequences=rows)
