"""Read documents from files by their type: plain text, JSON, parquet, and tables of text."""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from onescan.experiments.data.order import Mark
from onescan.experiments.data.sources import first_line, import_datasets
from onescan.experiments.data.text.lines import (
    BYTE_ORDER_MARK,
    Document,
    Documents,
    Lines,
    Row,
    Rows,
    TableReader,
    decode,
    file_type,
    line_number,
    missing_column,
    open_text,
)
from onescan.experiments.data.text.tables import read_table
from onescan.messages import named_type

SampleBy = Literal["file", "line", "paragraph"]

ROWS = 256  # of a parquet file, read at once


def read_file(path: Path, mark: Mark, column: str, sample_by: SampleBy) -> Documents:
    """Yield the documents of a file. Those that cannot be read have a fault.

    Args:
        path: File, whose suffix defines its type.
        mark: Where to begin; {} is the beginning.
        column: Column of the text, in tables and JSON objects.
        sample_by: What counts as one document of plain text.

    Raises:
        ValueError: If the file is damaged, is not text, or has no such column.
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
            "these followed by .gz"
        )
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    for row, _ in READERS[file_type(path)](path, {}, None):
        yield row


def is_table(path: Path) -> bool:
    """Return whether a file has the name of a table."""
    return file_type(path) in READERS


def _read_plain(path: Path, mark: Mark, sample_by: SampleBy) -> Documents:
    with open_text(path) as file:
        lines = Lines(file, mark)
        for number, content in _split(lines, sample_by):
            text, fault, offset = decode(content)
            if sample_by == "file" and not fault:
                location = str(path)
            else:
                location = f"{path}, line {number + line_number(content, offset) - 1}"
            yield Document(text, location, fault), lines.mark


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
    elif not lines.offset:  # otherwise, it has been read
        yield 1, b"".join(lines)


def _read_json_lines(path: Path, mark: Mark, _column: str | None) -> Rows:
    with open_text(path) as file:
        lines = Lines(file, mark)
        for line in lines:
            if line.strip():
                yield _parse_json_line(line, f"{path}, line {lines.number}"), lines.mark


def _parse_json_line(line: bytes, location: str) -> Row:
    text, fault, _ = decode(line)
    if fault:
        return Row({}, location, fault)
    try:
        return _from_object(json.loads(text, object_pairs_hook=_unique), location)
    except json.JSONDecodeError as error:
        return Row({}, location, f"this is not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # a long number, deep nesting or a repeated name
        return Row({}, location, f"this cannot be read as JSON: {first_line(error)}")


def _read_json(path: Path, mark: Mark, column: str | None) -> Rows:
    """Read a list of objects, or one object per line."""
    with open_text(path) as file:
        if not file.read(64).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"["):
            yield from _read_json_lines(path, mark, column)
            return
        file.seek(0)
        content = b"".join(Lines(file, {}))
    text, fault, offset = decode(content)
    if fault:
        raise ValueError(f"{path}, line {line_number(content, offset)}: {fault}")
    try:
        rows = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        line = line_number(text[: error.pos].encode(), len(content))
        raise ValueError(f"{path}, line {line}: this is not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {first_line(error)}") from error
    for number in range(mark.get("row", 0), len(rows)):
        yield _from_object(rows[number], f"{path}, row {number}"), {"row": number + 1}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, in which no name may occur twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {name!r} occurs more than once in an object")
    return values


def _from_object(value: Any, location: str) -> Row:
    if isinstance(value, dict):
        return Row(value, location)
    return Row({}, location, f"this is {named_type(value)}, expected an object")


def _read_parquet(path: Path, mark: Mark, column: str | None) -> Rows:
    import_datasets("text")  # which depends on pyarrow
    from pyarrow import parquet

    first, row = mark.get("row", 0), 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column is not None and column not in names:
                raise ValueError(missing_column(column, names))
            for name in names if column is None else [column]:
                if names.count(name) > 1:
                    raise ValueError(f"there are {names.count(name)} columns {name!r}")
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


READERS: dict[str, TableReader] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".csv": read_table,
    ".tsv": read_table,
}
