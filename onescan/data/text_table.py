"""Labelled texts in your own tables: CSV, TSV, JSON lines or parquet."""

import csv
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from onescan.checks import check_choice
from onescan.data.base import HELD_OUT, SPLITS, DataConfig, OnError, stratified_split
from onescan.data.glue import MAX_LOGGED, GlueRow, GlueSet, PairEncoder, PairFormat
from onescan.data.sequences import SequenceSplits
from onescan.data.sources import first_line, import_datasets, parquet_splits, walk
from onescan.data.text import TextFormat, load_tokenizer
from onescan.data.text.tokenizer import BYTES

DELIMITERS = {".csv": ",", ".tsv": "\t"}
KINDS = (*DELIMITERS, ".jsonl", ".parquet")
MAX_CELL = 1 << 30  # characters of a CSV cell; the default of the csv module is 131,072
SPLIT_COLUMN = "split"
MIN_CLASSES = 2

log = logging.getLogger("onescan")


class Record(NamedTuple):
    """One row of a table.

    Attributes:
        place: Its file and line, or row of a parquet file.
        cells: Its cells by column.
        problem: Why it cannot be read; empty if it can.
    """

    place: str
    cells: Mapping[str, Any]
    problem: str = ""


class LabelledText(NamedTuple):
    """One text, the name of its class, and its file and line."""

    text: str
    label: str
    place: str


# Files


def read_records(file: Path) -> Iterator[Record]:
    """Read the rows of a table; a row that cannot be read has a problem.

    Raises:
        ValueError: If the file does not exist, is of another kind, or cannot be read.
        ImportError: If it is a parquet file, and datasets is not installed.
    """
    if file.suffix not in KINDS:
        raise ValueError(f"{file} is not a table, expected a name ending in {', '.join(KINDS)}")
    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    if file.suffix == ".parquet":
        yield from _parquet(file)
        return
    # Bytes that are not UTF-8 become surrogates, so that the rows around them can be read.
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        yield from _json_lines(file, lines) if file.suffix == ".jsonl" else _csv(file, lines)


def _csv(file: Path, lines: Iterable[str]) -> Iterator[Record]:
    reader = csv.reader(lines, delimiter=DELIMITERS[file.suffix], strict=True)
    columns: list[str] | None = None
    while True:
        line = reader.line_num + 1
        place = f"{file}, line {line}"
        limit = csv.field_size_limit(MAX_CELL)  # of the whole process
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield Record(place, {}, str(error))
            continue
        finally:
            csv.field_size_limit(limit)
        if columns is None:
            columns = cells
        elif len(cells) == len(columns):
            yield Record(place, dict(zip(columns, cells, strict=True)))
        elif cells:  # not an empty line
            yield Record(place, {}, f"{len(cells)} cells, expected {len(columns)}")


def _json_lines(file: Path, lines: Iterable[str]) -> Iterator[Record]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        try:
            cells = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield Record(place, {}, f"is not JSON: {error}")
            continue
        is_object = isinstance(cells, dict)
        yield Record(place, cells if is_object else {}, "" if is_object else "is not an object")


def _parquet(file: Path) -> Iterator[Record]:
    import_datasets("text")  # requires pyarrow
    from pyarrow import parquet

    try:
        number = 0
        for batch in parquet.ParquetFile(file).iter_batches():
            for cells in batch.to_pylist():
                yield Record(f"{file}, row {number}", cells)
                number += 1
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is not a complete parquet file: {first_line(error)}") from error


def read_text(record: Record, column: str) -> str:
    """Return the text of a row.

    Raises:
        ValueError: If the row cannot be read or has no text; names the file and the line.
    """
    problem, text = record.problem, None
    if not problem:
        text = _cell(record, column, "data.text_column")
        if not isinstance(text, str):
            problem = f"the text is {text!r}, expected a string"
        elif not text.strip():
            problem = "the text is empty"
        elif not _is_unicode(text):
            problem = "the text is not UTF-8"
    if problem:
        raise ValueError(f"{record.place}: {problem}")
    return str(text)


def _read_label(record: Record, column: str) -> str:
    label = _cell(record, column, "data.label_column")
    if isinstance(label, float) and label.is_integer():  # such as of a column with gaps
        label = int(label)
    name = str(label).strip()
    if not (isinstance(label, str | int) and name and _is_unicode(name)):
        shown = "empty" if label is None or not name else repr(label)
        raise ValueError(f"{record.place}: the label is {shown}, expected a string or an integer")
    return name


def _cell(record: Record, column: str, field: str) -> Any:
    if column not in record.cells:
        names = ", ".join(map(str, record.cells)) or "none"
        raise ValueError(
            f"{field} is {column!r}, but {record.place}, has no such column; available: {names}"
        )
    return record.cells[column]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# The dataset


@dataclass(frozen=True, kw_only=True)
class TextTableConfig(DataConfig):
    """Texts with one label each, in a .csv, .tsv, .jsonl or .parquet file, or a folder of them."""

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
        self._report(failures)
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
        files = [Path(file) for file in walk(str(place)) if file.endswith(KINDS)]
        if not files:
            raise ValueError(
                f"data.path is {self.path!r}, a folder without {', '.join(KINDS)} files"
            )
        return parquet_splits(place, sorted(files))

    def _read(self, failures: list[str]) -> dict[str, list[LabelledText]]:
        """Read the texts of each part; add unreadable rows to `failures`."""
        parts: dict[str, list[LabelledText]] = {}
        files = self._files()
        for split, names in files.items():
            for name in names:
                for record in read_records(Path(name)):
                    try:
                        text = read_text(record, self.text_column)
                        is_named = len(files) > 1 or split != "train"
                        part = split if is_named else self._part(record)
                        label = _read_label(record, self.label_column)
                    except ValueError as error:
                        if self.on_error == "raise":
                            raise
                        failures.append(str(error))
                        continue
                    parts.setdefault(part, []).append(LabelledText(text, label, record.place))
        return parts

    def _part(self, record: Record) -> str:
        if self.split_column == SPLIT_COLUMN and SPLIT_COLUMN not in record.cells:
            return "train"
        part = str(_cell(record, self.split_column, "data.split_column")).strip().lower()
        if part not in SPLITS:
            raise ValueError(
                f"{record.place}: {self.split_column} is {part!r}, expected one of "
                f"{', '.join(SPLITS)}"
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

    def _report(self, failures: list[str]) -> None:
        for failure in failures[:MAX_LOGGED]:
            log.warning("%s", failure)
        if failures:
            log.warning("%s: %s rows could not be read and are left out", self.path, len(failures))


def _class_names(examples: Iterable[LabelledText]) -> tuple[str, ...]:
    """Return the labels in order; integers by value."""
    names = {example.label for example in examples}
    try:
        return tuple(sorted(names, key=int))
    except ValueError:
        return tuple(sorted(names))
