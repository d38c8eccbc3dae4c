"""Labeled texts in your own tables: CSV, TSV, JSON or parquet."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from onescan.checks import check_choice
from onescan.experiments.data.base import (
    HELD_OUT,
    SKIP_ROWS,
    SPLITS,
    DataConfig,
    OnError,
    held_out_note,
    listed,
    similar_names_note,
    stratified_split,
)
from onescan.experiments.data.glue import GlueRow, GlueSet, truncation_notes
from onescan.experiments.data.sequences import SequenceSplits
from onescan.experiments.data.sources import parquet_splits, report_unreadable, walk
from onescan.experiments.data.text.files import READERS, is_table, read_rows
from onescan.experiments.data.text.lines import HEADER, Row, file_type, is_unicode
from onescan.experiments.data.text.source import left_out_note
from onescan.inputs.pairs import PairEncoder, PairFormat
from onescan.inputs.tokenizer import BYTES, TextFormat, load_tokenizer
from onescan.messages import plural

SPLIT_COLUMN = "split"
MIN_CLASSES = 2


class LabeledText(NamedTuple):
    """One text, the name of its class, and its file and line."""

    text: str
    label: str
    location: str


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
        raise ValueError(f"{row.location}: the text is empty")
    return document.text


def _read_label(row: Row, column: str) -> str:
    label = _cell(row, column, "data.label_column")
    if isinstance(label, float) and label.is_integer():  # such as of a column with gaps
        label = int(label)
    name = str(label).strip()
    if not (isinstance(label, str | int) and name and is_unicode(name)):
        shown = "empty" if label is None or not name else repr(label)
        raise ValueError(f"{row.location}: the label is {shown}, expected a string or an integer")
    return name


class Labels:
    """Reads labels, and records which ones become the same class.

    Attributes:
        forms: For each class, the labels that stand for it, as they are written, with their counts.
    """

    def __init__(self) -> None:
        self.forms: dict[str, Counter[str]] = defaultdict(Counter)

    def read(self, row: Row, column: str) -> str:
        """Return the name of a row's class.

        Raises:
            ValueError: If there is no label, or it is neither a string nor an integer.
        """
        name = _read_label(row, column)
        self.forms[name][repr(row.cells[column])] += 1
        return name

    def notes(self) -> Iterator[str]:
        """Describe the classes whose labels are written in several ways."""
        for name, forms in sorted(self.forms.items()):
            if len(forms) > 1:
                listed = ", ".join(f"{count} {form}" for form, count in sorted(forms.items()))
                yield f"labels read as the class {name!r}: {listed}"


class _MissingColumnError(ValueError):
    """A row without a column, which other rows are likely to lack, too."""


def _cell(row: Row, column: str, field: str) -> Any:
    if column not in row.cells:
        names = ", ".join(map(str, row.cells)) or "none"
        raise _MissingColumnError(
            f"{field} is {column!r}, but {row.location}, has no such column; available: {names} "
            f"({field} selects one); {HEADER}"
        )
    return row.cells[column]


# The dataset


@dataclass(frozen=True, kw_only=True)
class TextTableConfig(DataConfig):
    """Texts with one label each, in a CSV, TSV, JSON or parquet file, or a folder of them.

    JSON files hold one object per line, or a list of objects. Files may be compressed (.gz). Empty
    lines are left out. In .tsv files, quotation marks are part of the text, except around a whole
    cell. Labels are read without white space around them, and those that are
    numbers in JSON and parquet files, such as 1.0, as 1.
    """

    path: str
    """The file, or a folder of files. Files named train.csv and test.csv, for example, are the
    training and test parts."""
    text_column: str = "text"
    """Column of the texts."""
    label_column: str = "label"
    """Column of the labels: strings or integers."""
    split_column: str = SPLIT_COLUMN
    """Column that names the part of each row: train, and validation, valid, val or test. It is
    optional; without one, a part of each class is held out."""
    test_fraction: float = 0.1
    """Fraction of each class held out if there is no test part."""
    split_seed: int = 0
    """Random seed of the held-out part."""
    tokenizer: str = BYTES
    """bytes, or a tokenizer: a folder, a tokenizer.json, or a name on the Hugging Face Hub."""
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
        notes: list[str] = []
        parts = self._read(failures, notes)
        if not (train := parts.get("train")):
            reason = f": {failures[0]}" if failures else ""
            raise ValueError(f"data.path is {self.path!r}, which has no texts to train on{reason}")
        names = _class_names(train)
        if len(names) < MIN_CLASSES:
            raise ValueError(
                f"data.path is {self.path!r}, where all labels are {names[0]!r}, expected at "
                "least two classes"
            )
        notes += similar_names_note(names)
        held_out = next((name for name in HELD_OUT if parts.get(name)), None)
        if held_out is None:
            train, test = self._held_out(train, names)
            notes.append(held_out_note(len(test), len(train) + len(test)))
        else:
            test = list(self._of_classes(parts[held_out], names, failures))
        if unused := [
            f"{name} ({len(rows):,} rows)"
            for name, rows in parts.items()
            if name not in ("train", held_out)
        ]:
            notes.append(f"splits not used: {listed(unused)}")
        report_unreadable(self.path, failures)
        if failures:
            left_out = plural(len(failures), "row")
            notes.append(f"left out {left_out} of {self.path} that cannot be read")
        if not test:
            raise ValueError(f"data.path is {self.path!r}, which has no texts to evaluate on")
        classes = {name: index for index, name in enumerate(names)}
        train_set, test_set = (
            GlueSet(rows=[GlueRow((x.text,), classes[x.label]) for x in part], encoder=encoder)
            for part in (train, test)
        )
        for name, part in (("training", train_set), ("test", test_set)):
            notes += truncation_notes(part, name)
        return SequenceSplits(
            notes=tuple(notes),
            train=train_set,
            test=test_set,
            class_names=names,
            format=PairFormat(text=TextFormat.of(tokenizer), length=self.length),
        )

    def _files(self, notes: list[str]) -> dict[str, list[str]]:
        """Return the files of each part; add a note on the other files of a folder."""
        path = Path(self.path).expanduser()
        if not path.is_dir():
            return {"train": [str(path)]}
        found = list(map(Path, walk(str(path))))
        tables = sorted(file for file in found if is_table(file))
        if not tables:
            raise ValueError(
                f"data.path is {self.path!r}, a folder without {', '.join(READERS)} files"
            )
        # A .json file next to other tables often describes them.
        files = [file for file in tables if file_type(file) != ".json"] or tables
        if others := [file for file in found if file not in files]:
            notes.append(left_out_note(self.path, others))
        return parquet_splits(path, files)

    def _read(self, failures: list[str], notes: list[str]) -> dict[str, list[LabeledText]]:
        """Read the texts of each part; add unreadable rows to `failures`, and others to `notes`."""
        parts: dict[str, list[LabeledText]] = {}
        files, labels, empty = self._files(notes), Labels(), 0
        for split, names in files.items():
            for name in names:
                for row in read_rows(Path(name)):
                    if row.is_empty_line:
                        empty += 1
                        continue
                    try:
                        text = read_text(row, self.text_column)
                        is_named = len(files) > 1 or split != "train"
                        part = split if is_named else self._part(row)
                        label = labels.read(row, self.label_column)
                    except ValueError as error:
                        if self.on_error == "raise":
                            if isinstance(error, _MissingColumnError):
                                raise
                            raise ValueError(f"{error} ({SKIP_ROWS})") from error
                        failures.append(str(error))
                        continue
                    parts.setdefault(part, []).append(LabeledText(text, label, row.location))
        if empty:
            notes.append(f"left out {plural(empty, 'empty line')} of {self.path}")
        notes += labels.notes()
        return parts

    def _part(self, row: Row) -> str:
        if self.split_column == SPLIT_COLUMN and SPLIT_COLUMN not in row.cells:
            return "train"
        part = str(_cell(row, self.split_column, "data.split_column")).strip().lower()
        if part not in SPLITS:
            raise ValueError(
                f"{row.location}: {self.split_column} is {part!r}, expected one of "
                f"{', '.join(SPLITS)}"
            )
        return part

    def _held_out(
        self, train: list[LabeledText], names: tuple[str, ...]
    ) -> tuple[list[LabeledText], list[LabeledText]]:
        counts = Counter(example.label for example in train)
        for example in train:
            if counts[example.label] == 1:
                raise ValueError(
                    f"{example.location}: no other text has the label {example.label!r}, expected "
                    "at least two, because a part of each class is held out"
                )
        classes = {name: index for index, name in enumerate(names)}
        labels = torch.tensor([classes[example.label] for example in train])
        parts = stratified_split(labels, fraction=self.test_fraction, seed=self.split_seed)
        rows, held_out = ([train[index] for index in part.tolist()] for part in parts)
        return rows, held_out

    def _of_classes(
        self, test: Iterable[LabeledText], names: tuple[str, ...], failures: list[str]
    ) -> Iterator[LabeledText]:
        for example in test:
            if example.label in names:
                yield example
                continue
            problem = f"{example.location}: the label {example.label!r} is not in the training part"
            if self.on_error == "raise":
                raise ValueError(f"{problem} ({SKIP_ROWS})")
            failures.append(problem)


def _class_names(examples: Iterable[LabeledText]) -> tuple[str, ...]:
    """Return the labels in order; integers by value, and those of equal value as strings."""
    names = {example.label for example in examples}
    if all(re.fullmatch(r"[+-]?[0-9]{1,4000}", name) for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))
