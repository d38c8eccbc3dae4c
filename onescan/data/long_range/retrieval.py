"""Pairs of documents, byte by byte: does one cite the other?"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from jaxtyping import Int
from torch import Tensor, tensor

from onescan.checks import check_choice, check_positive
from onescan.data.base import DataConfig
from onescan.data.long_range.byte_format import ByteFormat
from onescan.data.long_range.lines import LineTable
from onescan.data.sequences import LabelledSequence, SequenceSet, SequenceSplits

HeldOut = Literal["eval", "test"]
COLUMNS = ("label", "id1", "id2", "text1", "text2")
LABELS = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}
CLASS_NAMES = ("unrelated", "related")


@dataclass(frozen=True, kw_only=True)
class RetrievalConfig(DataConfig):
    """AAN document matching of the Long Range Arena, from its published tables.

    The tables are new_aan_pairs.{train,eval,test}.tsv.

    Each line holds a label, two document numbers and the two documents, separated by tabs. Both
    documents are read as one sequence with a separator between them and segment ids. (The arena's
    models encode each document separately and compare the results.)
    """

    path: str
    """Folder of the tables."""
    max_length: int = 4000
    """Maximum bytes of a document; longer ones are truncated."""
    test_split: HeldOut = "test"
    """Split to evaluate on: test, or eval for model selection."""

    @property
    def max_tokens(self) -> int:
        return 2 * self.max_length + 1  # a separator between the documents

    def build(self) -> SequenceSplits:
        """Look through the tables.

        Raises:
            ValueError: a number is out of range, a table is not there, or a line of it is wrong:
                says the file and the line.
        """
        check_choice("data.test_split", self.test_split, get_args(HeldOut))
        check_positive(**{"data.max_length": self.max_length})
        format = ByteFormat(max_length=self.max_length)
        train, test = (
            _pairs(Path(self.path) / f"new_aan_pairs.{split}.tsv", format)
            for split in ("train", self.test_split)
        )
        return SequenceSplits(train=train, test=test, class_names=CLASS_NAMES, format=format)


@dataclass(frozen=True, kw_only=True)
class DocumentPairs(SequenceSet):
    """Pairs of documents of a table."""

    table: LineTable
    labels: Int[Tensor, " rows"]
    format: ByteFormat

    def __len__(self) -> int:
        return len(self.table)

    def example(self, place: int) -> LabelledSequence:
        row = self.table.row(place)
        tokens, first = self.format.encode_pair(row["text1"], row["text2"])
        return LabelledSequence(tokens, int(self.labels[place]), first)


def _pairs(path: Path, format: ByteFormat) -> DocumentPairs:
    table = LineTable(path, COLUMNS)
    labels = [_label(row, table.place(place)) for place, row in enumerate(table.rows())]
    return DocumentPairs(table=table, labels=tensor(labels), format=format)


def _label(row: dict[str, bytes], place: str) -> int:
    if row["label"] not in LABELS:
        label = row["label"].decode(errors="replace")
        raise ValueError(f"{place}: the label is {label!r}, expected 0 or 1")
    for name in ("text1", "text2"):
        if not row[name]:
            raise ValueError(f"{place}: {name} is empty")
    return LABELS[row["label"]]
