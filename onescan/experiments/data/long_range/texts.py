"""Labeled texts and pairs of texts as sequences of bytes, read from files or a hub."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from onescan.checks import check_choice, check_positive
from onescan.experiments.data.base import HELD_OUT, SPLITS, DataConfig
from onescan.experiments.data.image_dataset import MIN_CLASSES, Classes, find_classes
from onescan.experiments.data.sequences import LabeledSequence, SequenceSet, SequenceSplits
from onescan.experiments.data.sources import (
    Chosen,
    DatasetSource,
    find_source,
    parquet_splits,
    walk,
)
from onescan.experiments.data.text.source import left_out_note
from onescan.inputs.sequences import ByteFormat
from onescan.messages import plural
from onescan.shapes import Labels

TABLE, TEXT = ".tsv", ".txt"
UNLABELED = "unsup"  # folder of IMDB without labels
PAIR_COLUMNS = ("label", "id1", "id2", "text1", "text2")
PAIR_LABELS = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}
PAIR_CLASSES = ("unrelated", "related")


class LineTable:
    """Table with one row per line and tabs between cells, which stays on disk.

    Only the offset of each line is in memory.

    Args:
        path: File of the table.
        columns: Names of the columns; None reads them from the first line.

    Raises:
        ValueError: If there is no such file, it has no rows, or a line has the wrong number of
            cells. The message names the file and the line.
    """

    def __init__(self, path: Path, columns: tuple[str, ...] | None = None) -> None:
        if not path.is_file():
            raise ValueError(f"there is no file {path}")
        self.path = path
        self.header_lines = 0 if columns else 1
        with path.open("rb") as file:
            header = b"" if columns else file.readline()
            self.columns = columns or self._parse_header(header)
            starts = [len(header)]
            for line in file:
                cells = line.count(b"\t") + 1
                if cells != len(self.columns):
                    raise ValueError(
                        f"{self.location(len(starts) - 1)}: {plural(cells, 'cell')} separated by "
                        f"tabs, expected {len(self.columns)}: {', '.join(self.columns)}"
                    )
                starts.append(starts[-1] + len(line))
        self.starts = np.array(starts[:-1], dtype=np.int64)
        if not len(self.starts):
            raise ValueError(f"{path} holds no rows")

    def __len__(self) -> int:
        return len(self.starts)

    def location(self, row: int) -> str:
        """Return the file and line of a row, for error messages."""
        return f"{self.path}, line {row + 1 + self.header_lines}"

    def row(self, row: int) -> dict[str, bytes]:
        """Read one row: cells by the names of their columns."""
        with self.path.open("rb") as file:
            file.seek(int(self.starts[row]))
            return self._split(file.readline())

    def rows(self) -> Iterator[dict[str, bytes]]:
        """Read all rows in order."""
        with self.path.open("rb") as file:
            file.seek(int(self.starts[0]))
            yield from map(self._split, file)

    def _split(self, line: bytes) -> dict[str, bytes]:
        return dict(zip(self.columns, line.rstrip(b"\r\n").split(b"\t"), strict=True))

    def _parse_header(self, line: bytes) -> tuple[str, ...]:
        try:
            return tuple(line.decode().removeprefix("\ufeff").rstrip("\r\n").split("\t"))
        except UnicodeDecodeError:
            raise ValueError(f"{self.path}, line 1 is not UTF-8 text") from None


# Single texts


class Texts(ABC):
    """Labeled texts of one split, read one at a time."""

    notes: tuple[str, ...] = ()
    """What was left out."""

    labels: Sequence[Any]
    """Label of each text, as stored."""
    feature: Any = None
    """Feature of the labels in the datasets library; None if labels are class names."""

    @abstractmethod
    def text(self, row: int) -> str | bytes:
        """Read the text of a row."""

    @abstractmethod
    def location(self, row: int) -> str:
        """Return the location of a row, for error messages."""


class TextFiles(Texts):
    """One text per file, in one folder per class; other files are left out."""

    def __init__(self, folder: Path) -> None:
        self.files: list[Path] = []
        self.labels: list[str] = []
        others: list[Path] = []
        for file in map(Path, walk(str(folder))):
            class_name, *below = file.relative_to(folder).parts
            if file.name.endswith(TEXT) and below and class_name != UNLABELED:
                self.files.append(file)
                self.labels.append(class_name)
            elif class_name != UNLABELED:
                others.append(file)
        self.notes = (left_out_note(str(folder), others),) if others else ()

    def text(self, row: int) -> bytes:
        return self.files[row].read_bytes()

    def location(self, row: int) -> str:
        return str(self.files[row])


class TextLines(Texts):
    """One text per line of a table."""

    def __init__(self, path: Path, config: "ByteTextConfig") -> None:
        self.table = LineTable(path)
        self.column = config.text_column
        config.check_columns(str(path), self.table.columns)
        label = config.label_column
        self.labels = [row[label].decode(errors="replace") for row in self.table.rows()]

    def text(self, row: int) -> bytes:
        return self.table.row(row)[self.column]

    def location(self, row: int) -> str:
        return self.table.location(row)


class TextRows(Texts):
    """One text per row of a dataset of the datasets library."""

    def __init__(self, rows: Any, split: str, config: "ByteTextConfig") -> None:
        config.check_columns(f"{config.path}, split {split}", tuple(rows.column_names))
        self.rows, self.split, self.column = rows, split, config.text_column
        self.labels = rows.select_columns([config.label_column])[:][config.label_column]
        self.feature = rows.features[config.label_column]

    def text(self, row: int) -> str:
        return self.rows[row][self.column] or ""

    def location(self, row: int) -> str:
        return f"row {row} of {self.split}"


@dataclass(frozen=True, kw_only=True)
class ByteTextConfig(DataConfig):
    """Labeled texts, byte by byte, such as the IMDB reviews of the Long Range Arena.

    Reads FOLDER/SPLIT/CLASS/TEXT.txt, as in the IMDB archive, whose unlabeled reviews, `unsup`,
    are ignored; FOLDER/SPLIT.tsv with column names in the first line; parquet files with splits in
    their names; and datasets on the Hugging Face Hub.
    """

    path: str
    """Folder, or name of a dataset on the Hugging Face Hub."""
    max_length: int = 4096
    """Maximum bytes of a text; longer ones are truncated."""
    train_split: str = "train"
    """Split to train on."""
    test_split: str | None = None
    """Split to evaluate on; None uses validation or test."""
    text_column: str = "text"
    """Column of the texts, in tables."""
    label_column: str = "label"
    """Column of the labels, in tables."""
    class_names: tuple[str, ...] = ()
    """Names of the classes in order, if the data does not define them."""

    @property
    def max_tokens(self) -> int:
        return self.max_length

    def build(self) -> SequenceSplits:
        """Find the texts and read their labels.

        Raises:
            ImportError: If the datasets library is required and not installed.
            ValueError: If max_length is not above 0; or the data is missing, lacks a split or a
                column, has a single class, or has a label out of range. The message names the
                location. Empty texts are reported when they are read.
        """
        check_positive(**{"data.max_length": self.max_length})
        texts_by_role = self._find()
        classes = self._classes(texts_by_role["train"])
        format = ByteFormat(max_length=self.max_length)
        train, test = (
            ByteTexts(texts=texts, labels=_class_indices(texts, classes), format=format)
            for texts in (texts_by_role["train"], texts_by_role["test"])
        )
        return SequenceSplits(
            notes=(*texts_by_role["train"].notes, *texts_by_role["test"].notes),
            train=train,
            test=test,
            class_names=classes.names,
            format=format,
        )

    def _find(self) -> dict[str, Texts]:
        folder = Path(self.path).expanduser()
        if tables := sorted(folder.glob(f"*{TABLE}")):
            files = parquet_splits(folder, tables)
            chosen = self._choose(files)
            for split, paths in files.items():
                if len(paths) > 1:
                    raise ValueError(
                        f"data.path is {self.path!r}, where {len(paths)} tables belong to the "
                        f"split {split}, expected one: {' and '.join(paths[:2])}"
                    )
            return {role: TextLines(Path(files[split][0]), self) for role, split in chosen.items()}
        folders = {name: [str(folder / name)] for name in SPLITS if (folder / name).is_dir()}
        if any(file.endswith(TEXT) for name in folders for file in walk(folders[name][0])):
            chosen = self._choose(folders)
            return {role: TextFiles(folder / split) for role, split in chosen.items()}
        source = find_source(self.path, None)
        chosen = self._check_test(source.choose(self.train_split, self.test_split))
        opened = source.open(chosen, streaming=False)
        return {role: TextRows(rows, chosen[role], self) for role, rows in opened.items()}

    def _choose(self, files: dict[str, list[str]]) -> Chosen:
        source = DatasetSource(path=self.path, builder="text", files=files, splits=tuple(files))
        return self._check_test(source.choose(self.train_split, self.test_split))

    def _check_test(self, chosen: Chosen) -> Chosen:
        if "test" not in chosen:
            raise ValueError(
                f"data.path is {self.path!r}, which has no test split, expected one of "
                f"{', '.join(HELD_OUT)}"
            )
        return chosen

    def _classes(self, train: Texts) -> Classes:
        if train.feature is not None:
            return find_classes(self.path, train.feature, self.class_names, train.labels)
        names = self.class_names or tuple(sorted(set(train.labels)))
        if len(names) < MIN_CLASSES:
            raise ValueError(
                f"data.path is {self.path!r}, whose texts have {plural(len(names), 'class')}, "
                "expected at least two"
            )
        return Classes(names, are_text=True)

    def check_columns(self, where: str, columns: tuple[str, ...]) -> None:
        """Raise ValueError if a table lacks the text or label column."""
        for field in ("text_column", "label_column"):
            column = getattr(self, field)
            if column not in columns:
                raise ValueError(
                    f"data.{field} is {column!r}, but {where} has: {', '.join(columns)}"
                )


@dataclass(frozen=True, kw_only=True)
class ByteTexts(SequenceSet):
    """Texts of one split as sequences of bytes."""

    texts: Texts
    labels: Labels
    format: ByteFormat

    def __len__(self) -> int:
        return len(self.labels)

    def example(self, index: int) -> LabeledSequence:
        try:
            tokens = self.format.encode(self.texts.text(index))
        except ValueError as error:
            raise ValueError(f"{self.texts.location(index)}: {error}") from error
        return LabeledSequence(tokens, int(self.labels[index]))


def _class_indices(texts: Texts, classes: Classes) -> Labels:
    return torch.tensor(
        [classes.index(label, texts.location(row)) for row, label in enumerate(texts.labels)]
    )


# Pairs of texts


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
    test_split: Literal["eval", "test"] = "test"
    """Split to evaluate on: test, or eval for model selection."""

    @property
    def max_tokens(self) -> int:
        return 2 * self.max_length + 1  # a separator between the documents

    def build(self) -> SequenceSplits:
        """Check the tables and read their labels.

        Raises:
            ValueError: If max_length is not above 0, a table is missing, or one of its lines is
                wrong. The message names the file and the line.
        """
        check_choice("data.test_split", self.test_split, ("eval", "test"))
        check_positive(**{"data.max_length": self.max_length})
        format = ByteFormat(max_length=self.max_length)
        train, test = (
            _read_pairs(Path(self.path) / f"new_aan_pairs.{split}.tsv", format)
            for split in ("train", self.test_split)
        )
        return SequenceSplits(train=train, test=test, class_names=PAIR_CLASSES, format=format)


@dataclass(frozen=True, kw_only=True)
class DocumentPairs(SequenceSet):
    """Pairs of documents of one table."""

    table: LineTable
    labels: Labels
    format: ByteFormat

    def __len__(self) -> int:
        return len(self.table)

    def example(self, index: int) -> LabeledSequence:
        row = self.table.row(index)
        tokens, first = self.format.encode_pair(row["text1"], row["text2"])
        return LabeledSequence(tokens, int(self.labels[index]), first)


def _read_pairs(path: Path, format: ByteFormat) -> DocumentPairs:
    table, labels = LineTable(path, PAIR_COLUMNS), []
    for number, row in enumerate(table.rows()):
        if row["label"] not in PAIR_LABELS:
            label = row["label"].decode(errors="replace")
            raise ValueError(f"{table.location(number)}: the label is {label!r}, expected 0 or 1")
        for name in ("text1", "text2"):
            if not row[name]:
                raise ValueError(f"{table.location(number)}: {name} is empty")
        labels.append(PAIR_LABELS[row["label"]])
    return DocumentPairs(table=table, labels=torch.tensor(labels), format=format)
