"""Lines of files, which are checked to be text in UTF-8, and the documents and rows read from them.

The ends of lines are line feeds, carriage returns, or both. Byte order marks are removed.
"""

import gzip
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NamedTuple

from onescan.experiments.data.order import Mark
from onescan.experiments.data.sources import first_line

HEADER = "the first line of .csv and .tsv files must name the columns"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LINE_END = re.compile(rb"\r\n|\r|\n")
HEAD = 4096  # bytes of a file that show what it is
CONTROLS = bytes({*range(32), 127} - set(b"\b\t\n\v\f\r\x1b"))
MAX_CONTROLS = 0.1  # fraction of control characters in text
NOT_TEXT = re.compile(rb"\0|\x1b[$(]")  # also escapes of encodings such as ISO-2022-JP
MAGIC = {
    b"\xff\xfe\0\0": "text in UTF-32",
    b"\0\0\xfe\xff": "text in UTF-32",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
    b"\x1f\x8b": "compressed with gzip",
    b"BZh91AY&SY": "compressed with bzip2",
    b"\xfd7zXZ": "compressed with xz",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"7z\xbc\xaf": "a 7z archive",
    b"PK\3\4": "a zip archive or an office document",
    b"PK\5\6": "an empty zip archive",
    b"Rar!": "a rar archive",
    b"%PDF-": "a PDF document",
    b"%!PS": "a PostScript document",
    b"{\\rtf": "a document in the rich text format",
    b"\xd0\xcf\x11\xe0": "an office document",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF87a": "a GIF image",
    b"GIF89a": "a GIF image",
    b"PAR1": "a parquet file",
    b"SQLite format 3": "an SQLite database",
}


class Document(NamedTuple):
    """One text.

    Attributes:
        text: The text; empty if it cannot be read.
        location: Its location, for messages.
        fault: Why it cannot be read, if it cannot.
    """

    text: str
    location: str
    fault: str = ""

    @property
    def is_blank(self) -> bool:
        """Whether it is readable and empty or white space."""
        return not self.fault and (not self.text or self.text.isspace())

    @property
    def message(self) -> str:
        """The location and the fault."""
        return f"{self.location}: {self.fault}"

    def check(self) -> None:
        """Raise ValueError if it cannot be read."""
        if self.fault:
            raise ValueError(self.message)


class Row(NamedTuple):
    """One row of a table.

    Attributes:
        cells: Its values by column; empty if it cannot be read.
        location: Its file and line, or the number of the row in a file without lines.
        fault: Why it cannot be read, if it cannot.
        is_empty_line: Whether it is an empty line of a table with commas or tabs.
    """

    cells: Mapping[str, Any]
    location: str
    fault: str = ""
    is_empty_line: bool = False

    def document(self, column: str) -> Document:
        """Return the text in a column. It has a fault if there is none."""
        if self.fault or self.is_empty_line:
            return Document("", self.location, self.fault)
        if column not in self.cells:
            return Document("", self.location, missing_column(column, self.cells))
        text = self.cells[column]
        if not isinstance(text, str):
            found = "nothing" if text is None else type(text).__name__
            fault = f"the column {column!r} holds {found}, expected text"
            return Document("", self.location, fault)
        if not is_unicode(text):
            return Document(
                "", self.location, f"the column {column!r} holds half of a surrogate pair"
            )
        if "\0" in text:
            return Document("", self.location, f"the column {column!r} holds a NUL character")
        return Document(text, self.location)


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode a text. JSON may contain escaped surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def missing_column(column: str, columns: Iterable[str]) -> str:
    """Return the message for a column that does not exist."""
    names = ", ".join(columns) or "none"
    return f"there is no column {column!r}, expected one of: {names} (text_column selects one)"


# Each document or row comes with the mark of the position after it.
Documents = Iterator[tuple[Document, Mark]]
Rows = Iterator[tuple[Row, Mark]]
# Reads a table, starting at a mark. If a column is given, only this one is read; if the file type
# has a list of columns, it must contain the column.
TableReader = Callable[[Path, Mark, str | None], Rows]


class Lines:
    """Iterator over the lines of a file, as bytes, that records its position."""

    def __init__(self, file: BufferedIOBase, mark: Mark) -> None:
        self.file = file
        self.offset, self.number = mark.get("offset", 0), mark.get("line", 0)
        self._parts: deque[bytes] = deque()  # lines that end in carriage returns
        file.seek(self.offset)

    def __iter__(self) -> "Lines":
        return self

    def __next__(self) -> bytes:
        if not self._parts:
            self._parts.extend(self.file.readline().splitlines(keepends=True))
        if not self._parts:
            raise StopIteration
        line = self._parts.popleft()
        self.offset, self.number = self.offset + len(line), self.number + 1
        return line.replace(BYTE_ORDER_MARK, b"")

    @property
    def mark(self) -> Mark:
        """Where the next line begins."""
        return {"offset": self.offset, "line": self.number}


class Decoded(NamedTuple):
    """Decoded bytes.

    Attributes:
        text: The text; empty if they are not text.
        fault: Why they are not text, if they are not.
        offset: Index of the first byte that is not text.
    """

    text: str
    fault: str = ""
    offset: int = 0


def decode(content: bytes) -> Decoded:
    """Decode text in UTF-8."""
    if found := NOT_TEXT.search(content):
        fault = f"this is not text in UTF-8: it contains the control characters {found[0]!r}"
        return Decoded("", fault.replace("b'", "'"), found.start())
    try:
        return Decoded(content.decode())
    except UnicodeDecodeError as error:
        advice = "convert the file, for example with `iconv -f latin1 -t utf-8`"
        return Decoded("", f"this is not UTF-8: {error.reason}; {advice}", error.start)


def file_type(path: Path) -> str:
    """Return the suffix of a file's name, without .gz."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


@contextmanager
def open_text(path: Path) -> Iterator[BufferedIOBase]:
    """Open a text file, which may be compressed. Decompression errors name the file.

    Raises:
        ValueError: If it is damaged, or is not text.
        OSError: If it cannot be read.
    """
    is_compressed = path.name.lower().endswith(".gz")
    with gzip.open(path) if is_compressed else path.open("rb") as file:
        try:
            if kind := _other_kind(file.read(HEAD)):
                raise ValueError(f"{path} is {kind}, expected text in UTF-8")
            file.seek(0)
            yield file
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is damaged: {first_line(error)}") from error


def _other_kind(head: bytes) -> str:
    """Describe the type of a file that begins with these bytes; empty if it may be UTF-8 text."""
    for magic, kind in MAGIC.items():
        if head.startswith(magic):
            return kind
    if len(head.translate(None, CONTROLS)) < (1 - MAX_CONTROLS) * len(head):
        return "full of control characters"
    return ""


def read_text_file(path: Path) -> str:
    """Read a file as one text.

    Raises:
        ValueError: If it is damaged, or is not text in UTF-8. The message names the line.
        OSError: If it cannot be read.
    """
    with open_text(path) as file:
        content = b"".join(Lines(file, {}))
    text, fault, offset = decode(content)
    if fault:
        raise ValueError(f"{path}, line {line_number(content, offset)}: {fault}")
    return text


def line_number(content: bytes, offset: int) -> int:
    """Return the number of the line at an offset, counted from 1."""
    return len(LINE_END.findall(content, 0, offset)) + 1
