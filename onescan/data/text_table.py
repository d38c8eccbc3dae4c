"""Labelled texts in your own tables: CSV, TSV, JSON or parquet."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from onescan.checks import check_choice
from onescan.data.base import HELD_OUT, SPLITS, DataConfig, OnError, stratified_split
from onescan.data.glue import GlueRow, GlueSet, PairEncoder, PairFormat
from onescan.data.sequences import SequenceSplits
from onescan.data.sources import parquet_splits, report_unreadable, walk
from onescan.data.text import TextFormat, load_tokenizer
from onescan.data.text.source import READERS, Row, file_type, is_table, is_unicode, read_rows
from onescan.data.text.tokenizer import BYTES

SPLIT_COLUMN = "split"
MIN_CLASSES = 2


class LabelledText(NamedTuple):
    """One text, the name of its class, and its file and line."""

    text: str
    label: str
    place: str


# Rows


def read_text(row: Row, column: str) -> str:
    """Return the text of a row.

    Raises:
        ValueError: If the row cannot be read or has no text; names the file and the line.
    """
    if not row.fault:
        _cell(row, column, "data.text_column")
    document = row.document(column)
    document.check()
    if document.is_blank:
        raise ValueError(f"{row.place}: the text is empty")
    return document.text


def _read_label(row: Row, column: str) -> str:
    label = _cell(row, column, "data.label_column")
    if isinstance(label, float) and label.is_integer():  # such as of a column with gaps
        label = int(label)
    name = str(label).strip()
    if not (isinstance(label, str | int) and name and is_unicode(name)):
        shown = "empty" if label is None or not name else repr(label)
        raise ValueError(f"{row.place}: the label is {shown}, expected a string or an integer")
    return name


def _cell(row: Row, column: str, field: str) -> Any:
    if column not in row.cells:
        names = ", ".join(map(str, row.cells)) or "none"
        raise ValueError(
            f"{field} is {column!r}, but {row.place}, has no such column; available: {names}"
        )
    return row.cells[column]


# The dataset


@dataclass(frozen=True, kw_only=True)
class TextTableConfig(DataConfig):
    """Texts with one label each, in a CSV, TSV, JSON or parquet file, or a folder of them.

    JSON files hold one object per line, or a list of objects. Files may be compressed (.gz).
    """

    path: str
    """The file, or a folder of files. Files named train.csv and test.csv, for example, are the
    training and test parts."""
    text_column: str = "text"
    """Column of the texts."""
    label_column: str = "label"
    """Column of the labels: strings or integers."""
    split_column: str = SPLIT_COLUMN
    """Column of the parts: train, and validation, valid, val or test. It is optional; without one,
    a part of each class is held out."""
    test_fraction: float = 0.1
    """Fraction of each class held out if there is no test part."""
    split_seed: int = 0
    """Random seed of the held-out part."""
    tokenizer: str = BYTES
    """bytes, or a tokenizer: a folder, a tokenizer.json, or a name on the Hugging Face hub."""
    length: int = 512
    """Maximum tokens per text. Longer texts are truncated at the end."""
    on_error: OnError = "raise"
    """On an unreadable row, end the run (raise), or skip and report it (skip)."""

    @property
    def max_tokens(self) -> int:
        return self.length

    def build(self) -> SequenceSplits:
        """Read the texts. Classes are those of the training part, in order.

        Raises:
            ImportError: If the datasets library or transformers is needed and not installed.
            ValueError: If there is no such file, column or tokenizer, if a row cannot be read
                (names the file and the line), or if there are too few examples to hold some out.
        """
        check_choice("data.on_error", self.on_error, get_args(OnError))
        tokenizer = load_tokenizer(self.tokenizer)
        encoder = PairEncoder(tokenizer, self.length)
        failures: list[str] = []
        parts = self._read(failures)
        if not (train := parts.get("train")):
            reason = f": {failures[0]}" if failures else ""
            raise ValueError(f"data.path is {self.path!r}, which has no texts to train on{reason}")
        names = _class_names(train)
        if len(names) < MIN_CLASSES:
            raise ValueError(
                f"data.path is {self.path!r}, where all labels are {names[0]!r}, expected two "
                "classes or more"
            )
        held_out = next((name for name in HELD_OUT if parts.get(name)), None)
        if held_out is None:
            train, test = self._held_out(train, names)
        else:
            test = list(self._of_classes(parts[held_out], names, failures))
        report_unreadable(self.path, failures)
        if not test:
            raise ValueError(f"data.path is {self.path!r}, which has no texts to evaluate on")
        classes = {name: place for place, name in enumerate(names)}
        train_set, test_set = (
            GlueSet(rows=[GlueRow((x.text,), classes[x.label]) for x in part], encoder=encoder)
            for part in (train, test)
        )
        return SequenceSplits(
            train=train_set,
            test=test_set,
            class_names=names,
            format=PairFormat(text=TextFormat.of(tokenizer), length=self.length),
        )

    def _files(self) -> dict[str, list[str]]:
        """Return the files of each part."""
        place = Path(self.path).expanduser()
        if not place.is_dir():
            return {"train": [str(place)]}
        tables = sorted(file for file in map(Path, walk(str(place))) if is_table(file))
        if not tables:
            raise ValueError(
                f"data.path is {self.path!r}, a folder without {', '.join(READERS)} files"
            )
        # A .json file next to other tables often describes them.
        files = [file for file in tables if file_type(file) != ".json"] or tables
        return parquet_splits(place, files)

    def _read(self, failures: list[str]) -> dict[str, list[LabelledText]]:
        """Read the texts of each part; add unreadable rows to `failures`."""
        parts: dict[str, list[LabelledText]] = {}
        files = self._files()
        for split, names in files.items():
            for name in names:
                for row in read_rows(Path(name)):
                    try:
                        text = read_text(row, self.text_column)
                        is_named = len(files) > 1 or split != "train"
                        part = split if is_named else self._part(row)
                        label = _read_label(row, self.label_column)
                    except ValueError as error:
                        if self.on_error == "raise":
                            raise
                        failures.append(str(error))
                        continue
                    parts.setdefault(part, []).append(LabelledText(text, label, row.place))
        return parts

    def _part(self, row: Row) -> str:
        if self.split_column == SPLIT_COLUMN and SPLIT_COLUMN not in row.cells:
            return "train"
        part = str(_cell(row, self.split_column, "data.split_column")).strip().lower()
        if part not in SPLITS:
            raise ValueError(
                f"{row.place}: {self.split_column} is {part!r}, expected one of {', '.join(SPLITS)}"
            )
        return part

    def _held_out(
        self, train: list[LabelledText], names: tuple[str, ...]
    ) -> tuple[list[LabelledText], list[LabelledText]]:
        counts = Counter(example.label for example in train)
        for example in train:
            if counts[example.label] == 1:
                raise ValueError(
                    f"{example.place}: no other text has the label {example.label!r}, expected two "
                    "or more, because a part of each class is held out"
                )
        classes = {name: place for place, name in enumerate(names)}
        labels = torch.tensor([classes[example.label] for example in train])
        parts = stratified_split(labels, fraction=self.test_fraction, seed=self.split_seed)
        rows, held_out = ([train[place] for place in part.tolist()] for part in parts)
        return rows, held_out

    def _of_classes(
        self, test: Iterable[LabelledText], names: tuple[str, ...], failures: list[str]
    ) -> Iterator[LabelledText]:
        for example in test:
            if example.label in names:
                yield example
                continue
            problem = f"{example.place}: the label {example.label!r} is not in the training part"
            if self.on_error == "raise":
                raise ValueError(problem)
            failures.append(problem)


def _class_names(examples: Iterable[LabelledText]) -> tuple[str, ...]:
    """Return the labels in order; integers by value."""
    names = {example.label for example in examples}
    try:
        return tuple(sorted(names, key=int))
    except ValueError:
        return tuple(sorted(names))
