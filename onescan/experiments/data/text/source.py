"""Documents of text from files, folders, saved datasets or the Hugging Face Hub.

Plain text, JSON and tables on disk are read by onescan and not by the datasets library. The library
does not report the file and line of an error, cannot skip a damaged document and count it, and
changes texts: in CSV files, "NA" becomes None and "007" a number, and in JSON files, "2024-01-01"
becomes a datetime. All sources are read from their beginning or from a mark, so that a stream can
resume.
"""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from onescan.checkpoint.hub import without_retries
from onescan.experiments.data.base import HELD_OUT, SPLITS
from onescan.experiments.data.order import Mark
from onescan.experiments.data.sources import (
    GROUP,
    first_line,
    import_datasets,
    is_hub_name,
    quiet,
    read_groups,
    walk,
)
from onescan.experiments.data.text.files import READERS, SampleBy, read_file
from onescan.experiments.data.text.lines import Document, Documents, Row, file_type, missing_column

SAVED = ("dataset_dict.json", "dataset_info.json")  # written by `save_to_disk` of datasets
# Suffixes of files that are not text, which are left out in a folder of plain text.
NOT_TEXT = (
    *(".7z", ".avi", ".bin", ".bz2", ".doc", ".docx", ".epub", ".gif", ".jpeg", ".jpg", ".mp3"),
    *(".mp4", ".npy", ".npz", ".odt", ".pdf", ".png", ".ppt", ".pptx", ".pt", ".rar", ".rtf"),
    *(".safetensors", ".sqlite", ".tar", ".webp", ".xls", ".xlsx", ".xz", ".zip", ".zst"),
)


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
                raise ValueError(f"{name}: {missing_column(self.column, columns)}")
            texts = columns[self.column]
            for row in range(max(first, group), group + len(texts)):
                found = Row({self.column: texts[row - group]}, f"{name}, row {row}")
                after = {"row": row + 1, "group": group, "state": state}
                yield found.document(self.column), after


def read_documents(shards: Iterable[Shard]) -> Iterator[Document]:
    """Yield the documents of shards in order, including blank ones."""
    for shard in shards:
        yield from (document for document, _ in shard.read({}))


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
        notes: What was left out in the folder, for the user.
    """

    path: str
    field: str
    splits: Mapping[str, Callable[[], Sequence[Shard]]]
    notes: tuple[str, ...] = ()

    @property
    def location(self) -> str:
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
    """Find text on disk, else on the Hugging Face Hub.

    Args:
        path: File, folder, or name of a hub dataset.
        query: What to look for in it.
        field: Name of the setting, for messages.

    Raises:
        ValueError: If it is in neither place, or contains nothing that can be read.
        ImportError: If the datasets library is required and not installed.
    """
    location = Path(path).expanduser()
    if not location.exists():
        if not is_hub_name(path):  # a mistyped path must not wait for the network
            raise ValueError(f"{field} is {path!r}: there is no such file or folder")
        problem = "is not on disk and cannot be read from the Hugging Face Hub"
        with _loading(path, field, problem) as datasets, without_retries(datasets.config):
            names = datasets.get_dataset_split_names(path, query.name)
        splits = {split: partial(_open_hub, path, split, query, field) for split in names}
        return TextSource(path=path, field=field, splits=splits)
    if query.name is not None:
        raise ValueError(
            f"data.name is {query.name!r}, expected None, because {field} {path!r} is on disk"
        )
    if any((location / name).is_file() for name in SAVED):
        with _loading(path, field, "cannot be read") as datasets:
            saved = datasets.load_from_disk(str(location))
        found = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
        splits = {
            split: partial(_shards_of, rows, f"{path}, {split}", path, query)
            for split, rows in found.items()
        }
        return TextSource(path=path, field=field, splits=splits)
    files, left_out = _files_of(location, field) if location.is_dir() else ([location], [])
    if location.is_file() and file_type(location) in NOT_TEXT:
        raise ValueError(
            f"{field} is {path!r}, which is not text, expected text in UTF-8 or a table"
        )
    grouped = _by_split(location, files, field) if location.is_dir() else {"train": files}
    splits = {split: partial(_open_files, paths, query) for split, paths in grouped.items()}
    notes = (left_out_note(path, left_out),) if left_out else ()
    return TextSource(path=path, field=field, splits=splits, notes=notes)


def left_out_note(path: str, files: Sequence[Path]) -> str:
    """Return a note that counts the files that are left out, by type.

    >>> left_out_note("texts", [Path("a.md"), Path("b.md"), Path("c")])
    'left out 3 files of other types in texts: 2 .md, 1 without a suffix'
    """
    counts = Counter(file_type(file) or "without a suffix" for file in files)
    listed = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    plural = "file" if len(files) == 1 else "files"
    return f"left out {len(files)} {plural} of other types in {path}: {listed}"


def read_texts(source: TextSource, split: str) -> Iterator[str]:
    """Yield the documents of a split, except blank ones.

    Raises:
        ValueError: If there is no such split, or a document cannot be read. The message names its
            location.
    """
    source.check_split("split", split)
    for document in read_documents(source.open(split)):
        document.check()
        if not document.is_blank:
            yield document.text


def _open_files(paths: Sequence[Path], query: Query) -> Sequence[Shard]:
    return [FileShard(path, query.column, query.sample_by) for path in paths]


def _files_of(folder: Path, field: str) -> tuple[list[Path], list[Path]]:
    """Return the files of a folder to read, and the others.

    If there are tables, the files to read are those of the first table type in `READERS` that
    occurs; otherwise, all files that may be text.
    """
    found = [Path(file) for file in walk(str(folder))]
    types = {file_type(file) for file in found}
    table = next((type_ for type_ in READERS if type_ in types), None)

    def is_read(file: Path) -> bool:
        return file_type(file) not in NOT_TEXT if table is None else file_type(file) == table

    files = [file for file in found if is_read(file)]
    if not files:
        raise ValueError(f"{field} is {str(folder)!r}, a folder without text files")
    return files, [file for file in found if not is_read(file)]


def _by_split(folder: Path, files: list[Path], field: str) -> dict[str, list[Path]]:
    """Group files by split. There are splits only if a file or folder is called train."""
    splits: dict[str, list[Path]] = {}
    for file in files:
        *above, name = file.relative_to(folder).parts  # such as wiki.test.txt or train/0.jsonl
        words = [word.lower() for word in (*above, *re.split(r"[._-]", name))]
        split = next((word for word in reversed(words) if word in SPLITS), "")
        splits.setdefault(split, []).append(file)
    if "train" not in splits:
        return {"train": files}
    if unnamed := splits.get(""):
        raise ValueError(
            f"{field} is {str(folder)!r}, where {unnamed[0]} names no split, but other files do; "
            f"expected one of {', '.join(SPLITS)} in the name of the file or its folder"
        )
    return splits


@contextmanager
def _loading(path: str, field: str, problem: str) -> Iterator[ModuleType]:
    """Import the datasets library, and re-raise its errors in one line."""
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
        raise ValueError(f"{path}: {missing_column(query.column, columns)}")
    if columns:  # do not let the library decode other columns, such as images of any format
        rows = rows.select_columns([query.column])
    if isinstance(rows, import_datasets("text").Dataset):
        return [RowsShard(rows, name, query.column)]
    indices = range(rows.num_shards)
    return [StreamShard(rows, index, name, query.column) for index in indices]
