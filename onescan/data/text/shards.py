"""Parts of a text data set, each read from its beginning or from a mark: files, or a hub's."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onescan.data.sources import UNREADABLE, first_line
from onescan.data.text.documents import (
    Document,
    Mark,
    Read,
    SampleBy,
    check_text,
    read_documents,
)

GROUP = 64  # rows asked for at once: one by one, the datasets library takes much longer


class Shard(ABC):
    """One part of a text data set, in the order in which it is stored."""

    @abstractmethod
    def read(self, mark: Mark) -> Read:
        """Yield documents from a mark on, {} being the beginning, with marks of where each ends.

        Raises:
            ValueError: it cannot be read, or has no such column; says where.
            OSError: likewise.
        """

    @property
    def stamp(self) -> list[int | str] | None:
        """What is another when the text is; None where nothing tells."""
        return None

    @property
    def size(self) -> int | None:
        """Its bytes on disk; None where nothing tells."""
        return None


@dataclass(frozen=True)
class FileShard(Shard):
    """One file.

    Attributes:
        path: where it is.
        column: where the text of a table or an object is.
        sample_by: what one document of plain text is.
    """

    path: Path
    column: str
    sample_by: SampleBy

    def read(self, mark: Mark) -> Read:
        return read_documents(self.path, mark, self.column, self.sample_by)

    @property
    def stamp(self) -> list[int | str]:
        stat = self.path.stat()
        return [str(self.path.absolute()), stat.st_mtime_ns, stat.st_size]

    @property
    def size(self) -> int:
        return self.path.stat().st_size


@dataclass(frozen=True)
class RowsShard(Shard):
    """Rows that the datasets library can look up.

    Attributes:
        rows: a data set of the library.
        name: what it is called, to tell a user.
        column: where the text is.
    """

    rows: Any
    name: str
    column: str

    def read(self, mark: Mark) -> Read:
        for first in range(mark.get("row", 0), len(self.rows), GROUP):
            for number, text in enumerate(self.rows[first : first + GROUP][self.column], first):
                yield (
                    _document(text, f"{self.name}, row {number}", self.column),
                    {"row": number + 1},
                )

    @property
    def stamp(self) -> list[int | str]:
        return [str(self.rows._fingerprint), len(self.rows)]

    @property
    def size(self) -> int | None:
        return self.rows.size_in_bytes


@dataclass(frozen=True)
class StreamShard(Shard):
    """A part of a stream of the datasets library.

    Attributes:
        rows: the stream.
        index: which of its shards.
        name: what the stream is called, to tell a user.
        column: where the text is.
    """

    rows: Any
    index: int
    name: str
    column: str

    def read(self, mark: Mark) -> Read:
        """Yield as the others do; a mark tells what the library knows of where a group begins."""
        shard = self.rows.shard(num_shards=self.rows.num_shards, index=self.index)
        row, group, state = mark.get("row", 0), mark.get("group", 0), mark.get("state")
        name = f"{self.name}, shard {self.index}"
        try:
            if state is not None:
                shard.load_state_dict(state)
            for columns in shard.iter(batch_size=GROUP):
                texts = columns[self.column]
                for number in range(max(row, group), group + len(texts)):
                    document = _document(
                        texts[number - group], f"{name}, row {number}", self.column
                    )
                    yield document, {"row": number + 1, "group": group, "state": state}
                group, state = group + len(texts), shard.state_dict()
        except UNREADABLE as error:
            raise ValueError(f"{name} cannot be read: {first_line(error)}") from error


def read_all(shards: Iterable[Shard]) -> Iterator[Document]:
    """Read shards one after the other, without documents in which nothing is written."""
    for shard in shards:
        yield from (document for document, _ in shard.read({}) if not document.is_blank)


def _document(text: Any, place: str, column: str) -> Document:
    fault = check_text(text, column)
    return Document("" if fault else text, place, fault)
