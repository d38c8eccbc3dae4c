"""Documents of text from files, folders, saved datasets or the Hugging Face hub; rows of tables.

Plain text, JSON and tables on disk are read here and not by the datasets library, which does
not report the file and line of an error, cannot skip a damaged document, and first copies
everything to its cache. All sources are read from their beginning or from a mark, so that a
stream can resume.
"""

import csv
import gzip
import json
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BufferedIOBase
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from onescan.data.base import HELD_OUT, SPLITS
from onescan.data.order import Mark
from onescan.data.sources import (
    GROUP,
    first_line,
    import_datasets,
    is_hub_name,
    quiet,
    read_groups,
    walk,
    without_retries,
)
from onescan.messages import named_type

SampleBy = Literal["file", "line", "paragraph"]

ROWS = 256  # of a parquet file, read at once
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SAVED = ("dataset_dict.json", "dataset_info.json")  # written by `save_to_disk` of datasets


class Document(NamedTuple):
    """One text.

    Attributes:
        text: The text; empty if it cannot be read.
        place: Its location, for messages.
        fault: Why it cannot be read, if it cannot.
    """

    text: str
    place: str
    fault: str = ""

    @property
    def is_blank(self) -> bool:
        """Whether it is readable and empty or white space."""
        return not self.fault and (not self.text or self.text.isspace())

    @property
    def message(self) -> str:
        """The location and the fault."""
        return f"{self.place}: {self.fault}"

    def check(self) -> None:
        """Raise ValueError if it cannot be read."""
        if self.fault:
            raise ValueError(self.message)


class Row(NamedTuple):
    """One row of a table.

    Attributes:
        cells: Its values by column; empty if it cannot be read.
        place: Its file and line, or the number of the row in a file without lines.
        fault: Why it cannot be read, if it cannot.
    """

    cells: Mapping[str, Any]
    place: str
    fault: str = ""

    def document(self, column: str) -> Document:
        """Return the text in a column. It has a fault if there is none."""
        if self.fault:
            return Document("", self.place, self.fault)
        if column not in self.cells:
            return Document("", self.place, _missing_column(column, self.cells))
        text = self.cells[column]
        if not isinstance(text, str):
            found = "nothing" if text is None else type(text).__name__
            fault = f"the column {column!r} holds {found}, expected text"
            return Document("", self.place, fault)
        if not is_unicode(text):
            return Document("", self.place, f"the column {column!r} holds half of a surrogate pair")
        return Document(text, self.place)


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode a text. JSON may contain escaped surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _missing_column(column: str, columns: Iterable[str]) -> str:
    return f"there is no column {column!r}, expected one of: {', '.join(columns) or 'none'}"


# Each document or row comes with the mark of the position after it.
Documents = Iterator[tuple[Document, Mark]]
Rows = Iterator[tuple[Row, Mark]]
# Reads a table from a mark on. If a column is given, it reads only this one, and checks at once
# that there is one, if the type of file has a list of columns.
TableReader = Callable[[Path, Mark, str | None], Rows]


# Files


class Lines:
    """Iterator over the lines of a file, as bytes, that records its position."""

    def __init__(self, file: BufferedIOBase, mark: Mark) -> None:
        self.file = file
        self.offset, self.number = mark.get("offset", 0), mark.get("line", 0)
        file.seek(self.offset)

    def __iter__(self) -> "Lines":
        return self

    def __next__(self) -> bytes:
        line = self.file.readline()
        if not line:
            raise StopIteration
        is_first = not self.offset
        self.offset, self.number = self.offset + len(line), self.number + 1
        return line.removeprefix(BYTE_ORDER_MARK) if is_first else line

    @property
    def mark(self) -> Mark:
        """Where the next line begins."""
        return {"offset": self.offset, "line": self.number}


def read_file(path: Path, mark: Mark, column: str, sample_by: SampleBy) -> Documents:
    """Yield the documents of a file. Those that cannot be read have a fault.

    Args:
        path: File, whose suffix defines its type.
        mark: Where to begin; {} is the beginning.
        column: Column of the text, in tables and JSON objects.
        sample_by: What counts as one document of plain text.

    Raises:
        ValueError: If the file is damaged or has no such column.
        OSError: If it cannot be read.
    """
    if reader := READERS.get(file_type(path)):
        for row, after in reader(path, mark, column):
            yield row.document(column), after
    else:
        yield from _read_plain(path, mark, sample_by)


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a table with all columns. Those that cannot be read have a fault.

    Raises:
        ValueError: If there is no such file, it is not a table, or it is damaged.
        ImportError: If it is a parquet file, and the datasets library is not installed.
        OSError: If it cannot be read.
    """
    if not is_table(path):
        raise ValueError(
            f"{path} is not a table, expected a name ending in {', '.join(READERS)}, or one of "
            "these and .gz"
        )
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    for row, _ in READERS[file_type(path)](path, {}, None):
        yield row


def is_table(path: Path) -> bool:
    """Return whether a file has the name of a table."""
    return file_type(path) in READERS


def file_type(path: Path) -> str:
    """Return the suffix of a file's name, without .gz."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _read_plain(path: Path, mark: Mark, sample_by: SampleBy) -> Documents:
    with _open(path) as file:
        lines = Lines(file, mark)
        for number, content in _split(lines, sample_by):
            try:
                place = str(path) if sample_by == "file" else f"{path}, line {number}"
                document = Document(content.decode(), place)
            except UnicodeDecodeError as error:
                number += content.count(b"\n", 0, error.start)
                fault = f"this is not UTF-8: {error.reason}"
                document = Document("", f"{path}, line {number}", fault)
            yield document, lines.mark


def _split(lines: Lines, sample_by: SampleBy) -> Iterator[tuple[int, bytes]]:
    """Yield documents of plain text, each with the number of its first line."""
    if sample_by == "line":
        for line in lines:
            yield lines.number, line.rstrip(b"\r\n")
    elif sample_by == "paragraph":
        for has_text, group in groupby(lines, lambda line: bool(line.strip())):
            number = lines.number
            if has_text:
                yield number, b"".join(group).rstrip(b"\r\n")
    elif content := b"".join(lines):
        yield 1, content


def _read_json_lines(path: Path, mark: Mark, _column: str | None) -> Rows:
    with _open(path) as file:
        lines = Lines(file, mark)
        for line in lines:
            if line.strip():
                yield _parse_json_line(line, f"{path}, line {lines.number}"), lines.mark


def _parse_json_line(line: bytes, place: str) -> Row:
    try:
        return _from_object(json.loads(line), place)
    except json.JSONDecodeError as error:
        return Row({}, place, f"this is not JSON: {error.msg} at column {error.colno}")
    except UnicodeDecodeError as error:
        return Row({}, place, f"this is not UTF-8: {error.reason}")
    except (ValueError, RecursionError) as error:  # a number too long, or nesting too deep
        return Row({}, place, f"this is not JSON: {first_line(error)}")


def _read_json(path: Path, mark: Mark, column: str | None) -> Rows:
    """Read a list of objects, or one object per line."""
    with _open(path) as file:
        if not file.read(64).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"["):
            yield from _read_json_lines(path, mark, column)
            return
        file.seek(0)
        try:
            rows = json.loads(file.read().decode("utf-8-sig"))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {error.lineno}: this is not JSON: {error.msg}"
            ) from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error.reason}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: this is not JSON: {first_line(error)}") from error
    for number in range(mark.get("row", 0), len(rows)):
        yield _from_object(rows[number], f"{path}, row {number}"), {"row": number + 1}


def _from_object(value: Any, place: str) -> Row:
    if isinstance(value, dict):
        return Row(value, place)
    return Row({}, place, f"this is {named_type(value)}, expected an object")


def _read_csv(path: Path, mark: Mark, column: str | None) -> Rows:
    """Read a table with a header. A quoted field may contain line breaks."""
    csv.field_size_limit(2**31 - 1)  # for the whole process; a document may be long
    dialect = csv.excel_tab if file_type(path) == ".tsv" else csv.excel
    with _open(path) as file:
        lines = Lines(file, {})
        try:
            header = next(_parse_csv(lines, dialect), [])
            _check_utf8(header)
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path}, line 1: invalid header: {error}; expected UTF-8 text, with cells "
                f"separated by {'tabs' if dialect is csv.excel_tab else 'commas'}"
            ) from error
        if len(header) == 1 and ";" in header[0] and column != header[0]:
            raise ValueError(
                f"{path}, line 1: the cells are separated by semicolons, expected commas"
            )
        if column is not None and column not in header:
            raise ValueError(f"{path}, line 1: {_missing_column(column, header)}")
        columns = dict.fromkeys(header) if column is None else [column]
        places = {name: header.index(name) for name in columns}
        lines = Lines(file, mark or lines.mark)
        rows = _parse_csv(lines, dialect)
        while True:
            place = f"{path}, line {lines.number + 1}"
            try:
                row = next(rows)
                _check_utf8(row)
            except StopIteration:
                return
            except (csv.Error, UnicodeDecodeError) as error:
                yield Row({}, place, f"invalid table row: {error}"), lines.mark
                continue
            if len(row) == len(header):
                cells = {name: row[index] for name, index in places.items()}
                yield Row(cells, place), lines.mark
            elif row:  # otherwise, the line is empty
                fault = f"there are {len(row)} cells, expected {len(header)}"
                yield Row({}, place, fault), lines.mark


def _parse_csv(lines: Lines, dialect: type[csv.Dialect]) -> Iterator[list[str]]:
    """Parse rows, in which surrogates stand for bytes that are not UTF-8.

    An error in the middle of a row of several lines would make the reader begin a new row there.
    """
    decoded = (line.decode(errors="surrogateescape") for line in lines)
    return csv.reader(decoded, dialect, strict=True)


def _check_utf8(row: list[str]) -> None:
    """Raise UnicodeDecodeError if bytes of a parsed row were not UTF-8."""
    "\n".join(row).encode(errors="surrogateescape").decode()


def _read_parquet(path: Path, mark: Mark, column: str | None) -> Rows:
    import_datasets("text")  # which depends on pyarrow
    from pyarrow import parquet

    first, row = mark.get("row", 0), 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column is not None and column not in names:
                raise ValueError(_missing_column(column, names))
            columns = None if column is None else [column]
            groups = list(range(file.num_row_groups))
            while groups and row + file.metadata.row_group(groups[0]).num_rows <= first:
                row += file.metadata.row_group(groups.pop(0)).num_rows
            for batch in file.iter_batches(batch_size=ROWS, row_groups=groups, columns=columns):
                cells = batch.slice(max(first - row, 0)).to_pylist()
                row += len(batch)
                for index, values in enumerate(cells, row - len(cells)):
                    yield Row(values, f"{path}, row {index}"), {"row": index + 1}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {first_line(error)}") from error


@contextmanager
def _open(path: Path) -> Iterator[BufferedIOBase]:
    """Open a file, which may be compressed, and name it in errors of its compression."""
    is_compressed = path.name.lower().endswith(".gz")
    with gzip.open(path) if is_compressed else path.open("rb") as file:
        try:
            yield file
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is damaged: {first_line(error)}") from error


READERS: dict[str, TableReader] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
}


# Shards


class Shard(ABC):
    """One part of a text dataset, in its stored order."""

    @abstractmethod
    def read(self, mark: Mark) -> Documents:
        """Yield documents from a mark on, each with the mark after it; {} is the beginning.

        Raises:
            ValueError: If it cannot be read, or has no such column. The message names the location.
            OSError: Likewise.
        """

    @property
    def cache_key(self) -> list[int | str] | None:
        """Something that changes with the text; None if unknown."""
        return None

    @property
    def size(self) -> int | None:
        """Bytes on disk; None if unknown."""
        return None


@dataclass(frozen=True)
class FileShard(Shard):
    """One file. See `read_file` for its attributes."""

    path: Path
    column: str
    sample_by: SampleBy

    def read(self, mark: Mark) -> Documents:
        return read_file(self.path, mark, self.column, self.sample_by)

    @property
    def cache_key(self) -> list[int | str]:
        stat = self.path.stat()
        return [str(self.path.absolute()), stat.st_mtime_ns, stat.st_size]

    @property
    def size(self) -> int:
        return self.path.stat().st_size


@dataclass(frozen=True)
class RowsShard(Shard):
    """A dataset of the datasets library with random access.

    Attributes:
        rows: The dataset.
        name: Its name, for messages.
        column: Column of the text.
    """

    rows: Any
    name: str
    column: str

    def read(self, mark: Mark) -> Documents:
        for first in range(mark.get("row", 0), len(self.rows), GROUP):
            for row, text in enumerate(self.rows[first : first + GROUP][self.column], first):
                found = Row({self.column: text}, f"{self.name}, row {row}")
                yield found.document(self.column), {"row": row + 1}

    @property
    def cache_key(self) -> list[int | str]:
        return [str(self.rows._fingerprint), len(self.rows)]

    @property
    def size(self) -> int | None:
        return self.rows.size_in_bytes


@dataclass(frozen=True)
class StreamShard(Shard):
    """One shard of an iterable dataset of the datasets library.

    A mark is the number of rows read, and the number of rows and the state of the library at the
    beginning of their last group.

    Attributes:
        rows: The iterable dataset.
        index: Index of the shard.
        name: Name of the dataset, for messages.
        column: Column of the text.
    """

    rows: Any
    index: int
    name: str
    column: str

    def read(self, mark: Mark) -> Documents:
        shard = self.rows.shard(num_shards=self.rows.num_shards, index=self.index)
        name = f"{self.name}, shard {self.index}"
        first = mark.get("row", 0)
        groups = read_groups(shard, name, first=mark.get("group", 0), state=mark.get("state"))
        for group, columns, state in groups:
            if self.column not in columns:  # the dataset does not declare its columns
                raise ValueError(f"{name}: {_missing_column(self.column, columns)}")
            texts = columns[self.column]
            for row in range(max(first, group), group + len(texts)):
                found = Row({self.column: texts[row - group]}, f"{name}, row {row}")
                after = {"row": row + 1, "group": group, "state": state}
                yield found.document(self.column), after


def read_documents(shards: Iterable[Shard]) -> Iterator[Document]:
    """Yield the documents of shards in order, except blank ones."""
    for shard in shards:
        yield from (document for document, _ in shard.read({}) if not document.is_blank)


# Sources


@dataclass(frozen=True, kw_only=True)
class Query:
    """Where to find the text of a dataset.

    Attributes:
        column: Column of the text, in tables and JSON objects.
        sample_by: What counts as one document of plain text.
        name: Configuration of a hub dataset.
        streaming: Whether to stream hub datasets instead of downloading them.
    """

    column: str = "text"
    sample_by: SampleBy = "file"
    name: str | None = None
    streaming: bool = False


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """Text that can be opened.

    Attributes:
        path: As the user wrote it.
        field: Name of the setting, for messages.
        splits: Functions that open each split.
    """

    path: str
    field: str
    splits: Mapping[str, Callable[[], Sequence[Shard]]]

    @property
    def place(self) -> str:
        """The absolute path, or the name on a hub."""
        path = Path(self.path).expanduser()
        return str(path.absolute()) if path.exists() else self.path

    def open(self, split: str) -> tuple[Shard, ...]:
        """Open one of the splits.

        Raises:
            ValueError: If it cannot be opened, or has no such column.
        """
        return tuple(self.splits[split]())

    def check_split(self, field: str, split: str) -> None:
        """Raise ValueError if there is no such split."""
        if split not in self.splits:
            raise ValueError(f"{field} is {split!r}, but {self.path} has: {', '.join(self.splits)}")

    def held_out(self, train: str) -> str | None:
        """Return the split to evaluate on, if there is one besides `train`."""
        return next((name for name in HELD_OUT if name in self.splits and name != train), None)


def find_source(path: str, query: Query, *, field: str = "data.path") -> TextSource:
    """Find text on disk, else on the Hugging Face hub.

    Args:
        path: File, folder, or name of a hub dataset.
        query: What to look for in it.
        field: Name of the setting, for messages.

    Raises:
        ValueError: If it is in neither place, or contains nothing that can be read.
        ImportError: If the datasets library is required and not installed.
    """
    place = Path(path).expanduser()
    if not place.exists():
        if not is_hub_name(path):  # a mistyped path must not wait for the network
            raise ValueError(f"{field} is {path!r}: there is no such file or folder")
        problem = "is not on disk, nor on the Hugging Face hub"
        with _loading(path, field, problem) as datasets, without_retries():
            names = datasets.get_dataset_split_names(path, query.name)
        splits = {split: partial(_open_hub, path, split, query, field) for split in names}
        return TextSource(path=path, field=field, splits=splits)
    if query.name is not None:
        raise ValueError(f"data.name is {query.name!r}, expected none: {field} {path!r} is on disk")
    if any((place / name).is_file() for name in SAVED):
        with _loading(path, field, "cannot be read") as datasets:
            saved = datasets.load_from_disk(str(place))
        found = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
        splits = {
            split: partial(_shards_of, rows, f"{path}, {split}", path, query)
            for split, rows in found.items()
        }
        return TextSource(path=path, field=field, splits=splits)
    files = _files_by_split(place, field) if place.is_dir() else {"train": [place]}
    splits = {split: partial(_open_files, paths, query) for split, paths in files.items()}
    return TextSource(path=path, field=field, splits=splits)


def read_texts(source: TextSource, split: str) -> Iterator[str]:
    """Yield the documents of a split, except blank ones.

    Raises:
        ValueError: If there is no such split, or a document cannot be read. The message names its
            location.
    """
    source.check_split("split", split)
    for document in read_documents(source.open(split)):
        document.check()
        yield document.text


def _open_files(paths: Sequence[Path], query: Query) -> Sequence[Shard]:
    return [FileShard(path, query.column, query.sample_by) for path in paths]


def _files_by_split(folder: Path, field: str) -> dict[str, list[Path]]:
    """Group the files of a folder by split: those of the first type of table, else all of them.

    There are splits only if a file or folder is called train.
    """
    files = [Path(file) for file in walk(str(folder))]
    types = {file_type(file) for file in files}
    table = next((type_ for type_ in READERS if type_ in types), None)
    files = [file for file in files if table is None or file_type(file) == table]
    if not files:
        raise ValueError(f"{field} is {str(folder)!r}, a folder without files")
    splits: dict[str, list[Path]] = {}
    for file in files:
        *above, name = file.relative_to(folder).parts  # such as wiki.test.txt or train/0.jsonl
        words = [*above, *re.split(r"[._-]", name)]
        split = next((word for word in reversed(words) if word in SPLITS), "")
        splits.setdefault(split, []).append(file)
    if "train" not in splits:
        return {"train": files}
    if unnamed := splits.get(""):
        raise ValueError(
            f"{field} is {str(folder)!r}, where {unnamed[0]} names no split and others do, "
            f"expected one of {', '.join(SPLITS)} in its name or its folder's"
        )
    return splits


@contextmanager
def _loading(path: str, field: str, problem: str) -> Iterator[ModuleType]:
    """Import the datasets library, and raise its errors again as one line."""
    datasets = import_datasets("text")
    try:
        with quiet():
            yield datasets
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        reason = first_line(error.__cause__ or error)
        raise ValueError(f"{field} is {path!r}, which {problem}: {reason}") from error


def _open_hub(path: str, split: str, query: Query, field: str) -> Sequence[Shard]:
    with _loading(path, field, "cannot be read") as datasets:
        rows = datasets.load_dataset(path, query.name, split=split, streaming=query.streaming)
    return _shards_of(rows, f"{path}, {split}", path, query)


def _shards_of(rows: Any, name: str, path: str, query: Query) -> Sequence[Shard]:
    columns = list(rows.features or [])
    if columns and query.column not in columns:
        raise ValueError(f"{path}: {_missing_column(query.column, columns)}")
    if columns:  # do not let the library decode other columns, such as images of any format
        rows = rows.select_columns([query.column])
    if isinstance(rows, import_datasets("text").Dataset):
        return [RowsShard(rows, name, query.column)]
    indices = range(rows.num_shards)
    return [StreamShard(rows, index, name, query.column) for index in indices]
