"""Labelled texts, byte by byte: files in class folders, tables with tabs, or parquet files."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onescan.checks import check_positive
from onescan.data.base import HELD_OUT, SPLITS, DataConfig
from onescan.data.image_dataset import MIN_CLASSES, Classes, find_classes
from onescan.data.long_range.byte_format import ByteFormat
from onescan.data.long_range.lines import LineTable
from onescan.data.sequences import LabelledSequence, SequenceSet, SequenceSplits
from onescan.data.sources import Chosen, DatasetSource, find_source, parquet_splits, walk
from onescan.shapes import Labels

TABLE, TEXT = ".tsv", ".txt"
UNLABELLED = "unsup"  # the folder of IMDB that has no labels


class Texts(ABC):
    """Labelled texts of one split, looked up one by one."""

    labels: Sequence[Any]
    """Of each text, as the data spells it."""
    feature: Any = None
    """What the datasets library knows of the labels; None where they are words."""

    @abstractmethod
    def text(self, row: int) -> str | bytes:
        """Read one text."""

    @abstractmethod
    def place(self, row: int) -> str:
        """Say where a text is, to tell a user."""


class TextFiles(Texts):
    """A file for each text, in a folder for each class; other files are passed over."""

    def __init__(self, folder: Path) -> None:
        files = (Path(file) for file in walk(str(folder)) if file.endswith(TEXT))
        parts = ((file, file.relative_to(folder).parts) for file in files)
        listed = [
            (file, above[0]) for file, (*above, _) in parts if above and above[0] != UNLABELLED
        ]
        self.files, self.labels = [file for file, _ in listed], [name for _, name in listed]

    def text(self, row: int) -> bytes:
        return self.files[row].read_bytes()

    def place(self, row: int) -> str:
        return str(self.files[row])


class TextLines(Texts):
    """A line for each text, in a table with tabs between cells."""

    def __init__(self, path: Path, config: "ByteTextConfig") -> None:
        self.table = LineTable(path)
        self.column = config.text_column
        _check_columns(str(path), self.table.columns, config)
        label = config.label_column
        self.labels = [row[label].decode(errors="replace") for row in self.table.rows()]

    def text(self, row: int) -> bytes:
        return self.table.row(row)[self.column]

    def place(self, row: int) -> str:
        return self.table.place(row)


class TextRows(Texts):
    """A row for each text, of what the datasets library opened."""

    def __init__(self, rows: Any, split: str, config: "ByteTextConfig") -> None:
        _check_columns(f"{config.path}, split {split}", tuple(rows.column_names), config)
        self.rows, self.split, self.column = rows, split, config.text_column
        self.labels = rows.select_columns([config.label_column])[:][config.label_column]
        self.feature = rows.features[config.label_column]

    def text(self, row: int) -> str:
        return self.rows[row][self.column] or ""

    def place(self, row: int) -> str:
        return f"row {row} of {self.split}"


@dataclass(frozen=True, kw_only=True)
class ByteTextConfig(DataConfig):
    """Labelled texts, byte by byte, such as the IMDB reviews of the Long Range Arena.

    Reads FOLDER/SPLIT/CLASS/TEXT.txt, as in the IMDB archive, whose unlabelled reviews, `unsup`,
    are ignored; FOLDER/SPLIT.tsv with column names in the first line; parquet files with splits in
    their names; and datasets on the Hugging Face hub.
    """

    path: str
    """Folder, or name of a dataset on the Hugging Face hub."""
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
        """Find the texts, and read their labels.

        Raises:
            ImportError: the datasets library is needed, and not installed.
            ValueError: max_length is not above 0; the data is not there, lacks a split or a column,
                has a single class or a label out of range: says where. An empty text is told when
                it is read.
        """
        check_positive(**{"data.max_length": self.max_length})
        found = self._find()
        classes = self._classes(found["train"])
        format = ByteFormat(max_length=self.max_length)
        sets = {
            role: ByteTexts(texts=texts, labels=_places(texts, classes), format=format)
            for role, texts in found.items()
        }
        return SequenceSplits(**sets, class_names=classes.names, format=format)

    def _find(self) -> dict[str, Texts]:
        folder = Path(self.path).expanduser()
        tables = sorted(folder.glob(f"*{TABLE}"))
        if tables:
            lines = parquet_splits(folder, tables)
            chosen = self._choose(lines)
            _check_single(self.path, lines)
            return {role: TextLines(Path(lines[split][0]), self) for role, split in chosen.items()}
        folders = {name: [str(folder / name)] for name in SPLITS if (folder / name).is_dir()}
        if any(file.endswith(TEXT) for name in folders for file in walk(folders[name][0])):
            chosen = self._choose(folders)
            return {role: TextFiles(folder / split) for role, split in chosen.items()}
        source = find_source(self.path, None)
        chosen = self._held_out(source.choose(self.train_split, self.test_split))
        opened = source.open(chosen, streaming=False)
        return {role: TextRows(rows, chosen[role], self) for role, rows in opened.items()}

    def _choose(self, files: dict[str, list[str]]) -> Chosen:
        source = DatasetSource(path=self.path, builder="text", files=files, splits=tuple(files))
        return self._held_out(source.choose(self.train_split, self.test_split))

    def _held_out(self, chosen: Chosen) -> Chosen:
        if "test" not in chosen:
            raise ValueError(
                f"data.path is {self.path!r}, which has no split to be judged on, expected one of "
                f"{', '.join(HELD_OUT)}"
            )
        return chosen

    def _classes(self, train: Texts) -> Classes:
        if train.feature is not None:
            return find_classes(self.path, train.feature, self.class_names, train.labels)
        names = self.class_names or tuple(sorted(set(train.labels)))
        if len(names) < MIN_CLASSES:
            raise ValueError(
                f"data.path is {self.path!r}, where the texts are of {len(names)} classes, "
                "expected two or more"
            )
        return Classes(names, are_text=True)


@dataclass(frozen=True, kw_only=True)
class ByteTexts(SequenceSet):
    """Texts of one split as sequences of bytes."""

    texts: Texts
    labels: Labels
    format: ByteFormat

    def __len__(self) -> int:
        return len(self.labels)

    def example(self, place: int) -> LabelledSequence:
        try:
            tokens = self.format.encode(self.texts.text(place))
        except ValueError as error:
            raise ValueError(f"{self.texts.place(place)}: {error}") from error
        return LabelledSequence(tokens, int(self.labels[place]))


def _places(texts: Texts, classes: Classes) -> Labels:
    return torch.tensor(
        [classes.place(label, texts.place(row)) for row, label in enumerate(texts.labels)]
    )


def _check_single(path: str, tables: dict[str, list[str]]) -> None:
    for split, files in tables.items():
        if len(files) > 1:
            raise ValueError(
                f"data.path is {path!r}, where {len(files)} tables are of {split}, expected one: "
                f"{' and '.join(files[:2])}"
            )


def _check_columns(where: str, columns: tuple[str, ...], config: ByteTextConfig) -> None:
    for field in ("text_column", "label_column"):
        if getattr(config, field) not in columns:
            raise ValueError(
                f"data.{field} is {getattr(config, field)!r}, but {where} has: {', '.join(columns)}"
            )
