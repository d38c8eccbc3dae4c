"""The documents of a file: plain text, JSON, tables; any of them can be gone on from."""

import csv
import gzip
import json
from collections.abc import Callable, Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Literal, NamedTuple

from onescan.data.sources import first_line

SampleBy = Literal["file", "line", "paragraph"]
Mark = dict[str, Any]  # JSON types: how far a file has been read
Read = Iterator[tuple["Document", Mark]]
Reader = Callable[[Path, Mark, str, SampleBy], Read]

ROWS = 256  # of a table, read at once
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Document(NamedTuple):
    """One text.

    Attributes:
        text: what it says.
        place: where it is, to tell a user.
        fault: why it cannot be read, if it cannot.
    """

    text: str
    place: str
    fault: str = ""

    @property
    def is_blank(self) -> bool:
        """Whether nothing is written there."""
        return not self.fault and (not self.text or self.text.isspace())

    def check(self) -> None:
        """Raise ValueError where it cannot be read; says why."""
        if self.fault:
            raise ValueError(self.complaint)

    @property
    def complaint(self) -> str:
        """Where it is, and why it cannot be read."""
        return f"{self.place}: {self.fault}"


class Lines:
    """The lines of a file as bytes, and how far they have been read."""

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


def read_documents(path: Path, mark: Mark, column: str, sample_by: SampleBy) -> Read:
    """Yield the documents of a file, each with a mark of the place after it.

    What cannot be read comes as a document with a fault.

    Args:
        path: of the file; what it holds is told by its name.
        mark: where to begin; {} is the beginning.
        column: where the text of a table or an object is.
        sample_by: what one document of a file of plain text is.

    Raises:
        ValueError: the file is no table, or has no such column.
        OSError: it cannot be read.
    """
    try:
        yield from READERS.get(file_kind(path), _read_plain)(path, mark, column, sample_by)
    except (EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged: {first_line(error)}") from error


def file_kind(path: Path) -> str:
    """The ending of a file's name, without that of packing."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def missing_column(column: str, columns: list[str]) -> str:
    """Say that a column is missing, and which there are."""
    return f"there is no column {column!r}, expected one of: {', '.join(columns) or 'none'}"


def check_text(text: Any, column: str) -> str:
    """Say what is wrong with the text of a row, if anything."""
    if isinstance(text, str):
        return ""
    found = "nothing" if text is None else type(text).__name__
    return f"the column {column!r} holds {found}, expected text"


def _read_plain(path: Path, mark: Mark, _column: str, sample_by: SampleBy) -> Read:
    with _open(path) as file:
        lines = Lines(file, mark)
        if sample_by == "line":
            for line in lines:
                yield _decode(line.rstrip(b"\r\n"), path, lines.number), lines.mark
        elif sample_by == "paragraph":
            yield from _read_paragraphs(lines, path)
        elif whole := b"".join(lines):
            yield _decode(whole, path, 1, place=str(path)), lines.mark


def _read_paragraphs(lines: Lines, path: Path) -> Read:
    block: list[bytes] = []
    for line in lines:
        if line.strip():
            block.append(line)
        elif block:
            yield (
                _decode(b"".join(block).rstrip(b"\r\n"), path, lines.number - len(block)),
                (lines.mark),
            )
            block = []
    if block:
        first = lines.number - len(block) + 1
        yield _decode(b"".join(block).rstrip(b"\r\n"), path, first), lines.mark


def _read_json_lines(path: Path, mark: Mark, column: str, _sample_by: SampleBy) -> Read:
    with _open(path) as file:
        lines = Lines(file, mark)
        for line in lines:
            if line.strip():
                yield _parse_line(line, f"{path}, line {lines.number}", column), lines.mark


def _read_json(path: Path, mark: Mark, column: str, sample_by: SampleBy) -> Read:
    """Read one list of objects, or an object a line."""
    with _open(path) as file:
        if not file.read(64).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"["):
            yield from _read_json_lines(path, mark, column, sample_by)
            return
        file.seek(0)
        try:
            rows = json.loads(file.read().decode("utf-8-sig"))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {error.lineno}: this is no JSON: {error.msg}"
            ) from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error.reason}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: this is no JSON: {first_line(error)}") from error
    for number in range(mark.get("row", 0), len(rows)):
        yield _of_object(rows[number], f"{path}, row {number}", column), {"row": number + 1}


def _read_csv(path: Path, mark: Mark, column: str, _sample_by: SampleBy) -> Read:
    """Read a table with a header; a field in quotes may hold line breaks."""
    csv.field_size_limit(2**31 - 1)  # of all tables in this process; a document may be long
    dialect = csv.excel_tab if file_kind(path) == ".tsv" else csv.excel
    with _open(path) as file:
        lines = Lines(file, {})
        header = next(csv.reader((line.decode() for line in lines), dialect, strict=True), [])
        if column not in header:
            raise ValueError(f"{path}, line 1: {missing_column(column, header)}")
        lines = Lines(file, mark or lines.mark)
        rows = csv.reader((line.decode() for line in lines), dialect, strict=True)
        while True:
            place = f"{path}, line {lines.number + 1}"
            try:
                row = next(rows)
            except StopIteration:
                return
            except (csv.Error, UnicodeDecodeError) as error:
                yield Document("", place, f"this is no row of a table: {error}"), lines.mark
                continue
            if row:  # an empty line is none
                yield _of_row(row, header, column, place), lines.mark


def _of_row(row: list[str], header: list[str], column: str, place: str) -> Document:
    if len(row) != len(header):
        return Document("", place, f"there are {len(row)} cells, expected {len(header)}")
    return Document(row[header.index(column)], place)


def _read_parquet(path: Path, mark: Mark, column: str, _sample_by: SampleBy) -> Read:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError("parquet files need datasets: pip install 'onescan[text]'") from error
    number = mark.get("row", 0)
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if column not in columns:
                raise ValueError(missing_column(column, columns))
            for text in _parquet_rows(file, number, column):
                place = f"{path}, row {number}"
                fault = check_text(text, column)
                number += 1
                yield Document("" if fault else text, place, fault), {"row": number}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {first_line(error)}") from error


def _parquet_rows(file: Any, first: int, column: str) -> Iterator[Any]:
    """Yield one column's cells from a row on, without a look at the row groups before."""
    group, before = 0, 0
    while group < file.num_row_groups and before + file.metadata.row_group(group).num_rows <= first:
        before += file.metadata.row_group(group).num_rows
        group += 1
    groups = list(range(group, file.num_row_groups))
    skip = first - before
    for batch in file.iter_batches(batch_size=ROWS, row_groups=groups, columns=[column]):
        cells = batch.column(0).slice(skip)
        skip -= min(skip, len(batch))
        yield from cells.to_pylist()


def _parse_line(line: bytes, place: str, column: str) -> Document:
    try:
        return _of_object(json.loads(line), place, column)
    except json.JSONDecodeError as error:
        return Document("", place, f"this is no JSON: {error.msg} at column {error.colno}")
    except UnicodeDecodeError as error:
        return Document("", place, f"this is not UTF-8: {error.reason}")
    except (ValueError, RecursionError) as error:  # too long a number, or nested too deeply
        return Document("", place, f"this is no JSON: {first_line(error)}")


def _of_object(row: Any, place: str, column: str) -> Document:
    if not isinstance(row, dict):
        return Document("", place, f"this is a {type(row).__name__}, expected an object")
    if column not in row:
        return Document("", place, missing_column(column, list(row)))
    text = row[column]
    fault = check_text(text, column)
    if not fault and not _is_whole(text):
        fault = f"the column {column!r} holds half a character"
    return Document("" if fault else text, place, fault)


def _is_whole(text: str) -> bool:
    """Whether UTF-8 can spell it, as JSON can what is no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _decode(content: bytes, path: Path, line: int, *, place: str | None = None) -> Document:
    """Decode lines, of which the first has this number."""
    try:
        return Document(content.decode(), place or f"{path}, line {line}")
    except UnicodeDecodeError as error:
        wrong = line + content.count(b"\n", 0, error.start)
        return Document("", f"{path}, line {wrong}", f"this is not UTF-8: {error.reason}")


def _open(path: Path) -> BufferedIOBase:
    return gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb")


READERS: dict[str, Reader] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
}
