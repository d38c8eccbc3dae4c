"""Rows of tables with cells between commas or tabs.

Tables with commas follow RFC 4180: a cell in quotation marks may contain commas, line breaks and
doubled quotation marks. Tables with tabs are written either with such cells, as by pandas, or
without, as in GLUE, where quotation marks are part of the text. A cell that is completely enclosed
in quotation marks is read in the first way, and all others in the second.
"""

import csv
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from onescan.experiments.data.order import Mark
from onescan.experiments.data.text.lines import (
    HEADER,
    Lines,
    Row,
    Rows,
    decode,
    file_type,
    missing_column,
    open_text,
)
from onescan.messages import plural

SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons"}
QUOTED = re.compile(r'"(?:[^"]|"")*+"')  # a cell in quotation marks
CLOSED = re.compile(r'"(?=\t|$)')  # possible end of a quoted cell
MAX_QUOTED = 1 << 24  # characters of a cell between tabs that may be quoted


class Parsed(NamedTuple):
    """A row of a table.

    Attributes:
        cells: Its cells, in which surrogates stand for bytes that are not UTF-8.
        line: Number of its first line.
        mark: Where the next row begins.
        fault: Why it cannot be read, if it cannot.
    """

    cells: list[str]
    line: int
    mark: Mark
    fault: str = ""


def read_table(path: Path, mark: Mark, column: str | None) -> Rows:
    """Read a table with a header. See `TableReader`."""
    csv.field_size_limit(2**31 - 1)  # for the whole process; a document may be long
    separator = "\t" if file_type(path) == ".tsv" else ","
    with open_text(path) as file:
        lines = Lines(file, {})
        header = _read_header(path, lines, separator, column)
        columns = dict.fromkeys(header) if column is None else [column]
        indices = {name: header.index(name) for name in columns}
        lines = Lines(file, mark or lines.mark)
        rows = _split_tabs(lines, len(header)) if separator == "\t" else _split_commas(lines)
        for cells, line, after, fault in rows:
            fault = fault or _fault(cells)
            if not fault and cells and len(cells) != len(header):
                fault = f"the row has {plural(len(cells), 'cell')}, expected {len(header)}"
            is_read = bool(cells) and not fault
            named = {name: cells[index] for name, index in indices.items()} if is_read else {}
            yield Row(named, f"{path}, line {line}", fault, not (cells or fault)), after


def _read_header(path: Path, lines: Lines, separator: str, column: str | None) -> list[str]:
    """Read the names of the columns.

    Raises:
        ValueError: If they cannot be read, a name occurs twice, or one is not among them.
    """
    location = f"{path}, line 1"
    rows = _split_commas(lines) if separator == "," else (_tab_header(line) for line in lines)
    header, _, _, fault = next(rows, Parsed([], 1, {}))
    if fault := fault or _fault(header):
        raise ValueError(
            f"{location}: invalid header: {fault}; expected UTF-8 text, with cells separated by "
            f"{SEPARATORS[separator]}"
        )
    for other in [each for each in SEPARATORS if each != separator]:
        if len(header) == 1 and other in header[0] and column != header[0]:
            raise ValueError(
                f"{location}: the cells are separated by {SEPARATORS[other]}, expected "
                f"{SEPARATORS[separator]}"
            )
    for name in header:
        if name and header.count(name) > 1:
            raise ValueError(f"{location}: there are {header.count(name)} columns {name!r}")
    if column is not None and column not in header:
        raise ValueError(f"{location}: {missing_column(column, header)}; {HEADER}")
    return header


def _fault(cells: list[str]) -> str:
    """Return why cells are not text; empty if they are."""
    text = "\n".join(cells)
    if "\0" in text:
        return "invalid table row: it contains the control character '\\x00'"
    return decode(text.encode(errors="surrogateescape")).fault


def _text(line: bytes) -> str:
    return line.decode(errors="surrogateescape")


# Commas


def _split_commas(lines: Lines) -> Iterator[Parsed]:
    """Parse rows.

    Decoding errors are found afterwards, because an error in the middle of a row of several lines
    would make the reader start a new row there.
    """
    rows = csv.reader(map(_text, lines), strict=True)
    while True:
        line = lines.number + 1
        try:
            cells, fault = next(rows), ""
        except StopIteration:
            return
        except csv.Error as error:
            cells, fault = [], f"invalid table row: {error}"
            if "unexpected end" in fault:
                fault = "invalid table row: a quotation mark is not closed"
            if lines.number > line:
                fault += f"; it extends to line {lines.number}"
        yield Parsed(cells, line, lines.mark, fault)


# Tabs


class _Line(NamedTuple):
    """A line ahead: its text without its end, its end, its number, and where the next begins."""

    text: str
    end: str
    number: int
    mark: Mark


class _LinesAhead:
    """Lines that can be read in advance."""

    def __init__(self, lines: Lines) -> None:
        self.lines, self.ahead = lines, deque[_Line]()
        self.may_close = True  # whether a quoted cell may end in a later line

    def get(self, index: int) -> _Line | None:
        """Return a line after the current one; None after the last line."""
        while len(self.ahead) <= index:
            if (line := next(self.lines, None)) is None:
                return None
            whole = _text(line)
            text = whole.rstrip("\r\n")
            self.ahead.append(_Line(text, whole[len(text) :], self.lines.number, self.lines.mark))
        return self.ahead[index]

    def skip(self, count: int) -> None:
        for _ in range(count):
            self.ahead.popleft()


def _tab_header(line: bytes) -> Parsed:
    text = _text(line).rstrip("\r\n")
    return Parsed(_quoted_cells(text) or _literal_cells(text), 1, {})


def _literal_cells(text: str) -> list[str]:
    """Split a line at each tab. Quotation marks are removed only from cells within them."""
    return [_unquoted(cell) for cell in text.split("\t")]


def _unquoted(cell: str) -> str:
    return cell[1:-1].replace('""', '"') if QUOTED.fullmatch(cell) else cell


def _quoted_cells(text: str) -> list[str] | None:
    """Split a text at tabs outside of quoted cells.

    Returns:
        The cells; None if a quoted cell is not closed, and [] if an unquoted one has a line break.
    """
    cells, begin = [], 0
    while True:
        quoted = QUOTED.match(text, begin)
        if quoted is None and text.startswith('"', begin):
            return None
        if quoted and text[quoted.end() : quoted.end() + 1] in ("", "\t"):
            end = quoted.end()
        else:
            end = text.find("\t", begin)
            end = len(text) if end < 0 else end
            if "\n" in text[begin:end] or "\r" in text[begin:end]:
                return []
        cells.append(_unquoted(text[begin:end]))
        if end == len(text):
            return cells
        begin = end + 1


def _split_tabs(lines: Lines, count: int) -> Iterator[Parsed]:
    """Parse rows of `count` cells."""
    ahead = _LinesAhead(lines)
    while line := ahead.get(0):
        literal, quoted = _literal_cells(line.text), _quoted_cells(line.text)
        size, fault = 1, ""
        cells = literal if quoted is None or len(literal) == count else quoted
        if quoted is None and (spanned := _span(ahead)):
            several, length = spanned
            last = ahead.ahead[length - 1]
            if len(several) == count:
                cells, size = several, length
                whole = [each.text for each in list(ahead.ahead)[:length] if each.text]
                if all(len(_literal_cells(text)) == count for text in whole):
                    fault = (
                        "invalid table row: it is unclear whether quotation marks enclose the text "
                        f"up to line {last.number} or belong to the text; write the table as .csv "
                        "or .jsonl"
                    )
        mark = ahead.ahead[size - 1].mark
        ahead.skip(size)
        yield Parsed(cells if line.text or size > 1 else [], line.number, mark, fault)


def _span(ahead: _LinesAhead) -> tuple[list[str], int] | None:
    """Parse a row that begins with the current line and contains a cell of several lines.

    Returns:
        Its cells and its number of lines; None if a quotation mark is not closed.
    """
    if not ahead.may_close:
        return None
    text, index, closes = "", 0, False
    while (line := ahead.get(index)) and len(text) < MAX_QUOTED:
        text += line.text
        index += 1
        if index > 1 and CLOSED.search(line.text):
            closes = True
            if (cells := _quoted_cells(text)) is not None:
                return cells, index
        text += line.end
    ahead.may_close = closes or line is not None
    return None
