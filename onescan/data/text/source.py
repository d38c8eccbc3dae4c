"""Where text is found: on disk, in a folder of the datasets library, or on the hub."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from onescan.data.base import HELD_OUT, SPLITS
from onescan.data.sources import HUB_NAME, first_line, quiet, walk
from onescan.data.text.documents import READERS, SampleBy, file_kind, missing_column
from onescan.data.text.shards import FileShard, RowsShard, Shard, StreamShard, read_all

SAVED = ("dataset_dict.json", "dataset_info.json")  # of the datasets library's `save_to_disk`

Open = Callable[[], Sequence[Shard]]


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """Text that can be opened.

    Attributes:
        path: as the user spelled it.
        field: the setting in which it was spelled.
        splits: how to open each.
    """

    path: str
    field: str
    splits: Mapping[str, Open]

    @property
    def place(self) -> str:
        """Where it is, wherever one looks from."""
        path = Path(self.path).expanduser()
        return str(path.absolute()) if path.exists() else self.path

    def open(self, split: str) -> tuple[Shard, ...]:
        """Open one of the splits.

        Raises:
            ValueError: it cannot be opened, or has no such column.
        """
        return tuple(self.splits[split]())

    def check_split(self, field: str, split: str) -> None:
        """Raise ValueError where there is no such split."""
        if split not in self.splits:
            raise ValueError(f"{field} is {split!r}, but {self.path} has: {', '.join(self.splits)}")

    def held_out(self, train: str) -> str | None:
        """Say which split a model is judged on, if there is one for it."""
        return next((name for name in HELD_OUT if name in self.splits and name != train), None)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to look for.

    Attributes:
        column: where the text of a table or an object is.
        sample_by: what one document of plain text is.
        name: which of a hub data set's configurations.
        streaming: whether what is on the hub is read as it comes.
    """

    column: str = "text"
    sample_by: SampleBy = "file"
    name: str | None = None
    streaming: bool = False


def find_source(path: str, wanted: Wanted, *, field: str = "data.path") -> TextSource:
    """Look for text on disk, else on the hub.

    Args:
        path: a file, a folder or a name.
        wanted: what to look for in it.
        field: what the path is called, to tell a user.

    Raises:
        ValueError: it is in neither place, or there is nothing in it that could be read.
        ImportError: the datasets library is needed and not installed.
    """
    place = Path(path).expanduser()
    if not place.exists():
        if not re.fullmatch(HUB_NAME, path):  # else a slip of the pen would wait for the network
            raise ValueError(f"{field} is {path!r}: there is no such file or folder")
        return TextSource(path=path, field=field, splits=_on_hub(path, wanted, field))
    if wanted.name is not None:
        raise ValueError(
            f"data.name is {wanted.name!r}, expected none: {field} {path!r} is on disk"
        )
    if any((place / name).is_file() for name in SAVED):
        return TextSource(path=path, field=field, splits=_saved(path, wanted, field))
    files = _split_files(place, field) if place.is_dir() else {"train": [place]}
    return TextSource(
        path=path,
        field=field,
        splits={split: _opens_files(paths, wanted) for split, paths in files.items()},
    )


def read_texts(source: TextSource, split: str) -> Iterator[str]:
    """Yield every document of a split, without those in which nothing is written.

    Raises:
        ValueError: there is no such split, or a document cannot be read; says where.
    """
    source.check_split("split", split)
    for document in read_all(source.open(split)):
        document.check()
        yield document.text


def import_datasets() -> ModuleType:
    """Import the datasets library, which is large and optional.

    Raises:
        ImportError: it is not installed; says how to.
    """
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            "text of a hub or a folder of the datasets library needs it: "
            "pip install 'onescan[text]'"
        ) from error
    return datasets


def _opens_files(paths: Sequence[Path], wanted: Wanted) -> Open:
    return lambda: [FileShard(path, wanted.column, wanted.sample_by) for path in paths]


def _split_files(folder: Path, field: str) -> dict[str, list[Path]]:
    """Sort the files of a folder by split: those of the first kind of table, else all of them.

    They are split only where a file or a folder is called train.
    """
    files = [Path(file) for file in walk(str(folder))]
    kinds = {file_kind(file) for file in files}
    kind = next((table for table in READERS if table in kinds), None)
    files = [file for file in files if kind is None or file_kind(file) == kind]
    if not files:
        raise ValueError(f"{field} is {str(folder)!r}, a folder without files")
    splits: dict[str, list[Path]] = {}
    for file in files:
        splits.setdefault(_split_of(file.relative_to(folder)), []).append(file)
    if "train" not in splits:
        return {"train": files}
    if nameless := splits.get(""):
        raise ValueError(
            f"{field} is {str(folder)!r}, where {nameless[0]} names no split and others do, "
            f"expected one of {', '.join(SPLITS)} in its name or its folder's"
        )
    return splits


def _split_of(file: Path) -> str:
    """The split that a file's name speaks of, or its folder's: wiki.test.txt, train/0.jsonl."""
    words = [*file.parts[:-1], *re.split(r"[._-]", file.name)]
    return next((word for word in reversed(words) if word in SPLITS), "")


def _saved(path: str, wanted: Wanted, field: str) -> dict[str, Open]:
    datasets = import_datasets()
    try:
        with quiet():
            saved = datasets.load_from_disk(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{field} is {path!r}, which cannot be read: {first_line(error)}"
        ) from error
    splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    return {split: _opens_rows(rows, split, path, wanted) for split, rows in splits.items()}


def _opens_rows(rows: Any, split: str, path: str, wanted: Wanted) -> Open:
    def opened() -> Sequence[Shard]:
        _check_column(rows, path, wanted.column)
        # Otherwise, the library decodes image columns, in any format that pillow supports.
        texts = rows.select_columns([wanted.column]) if rows.features else rows
        name = f"{path}, {split}"
        if isinstance(texts, import_datasets().Dataset):
            return [RowsShard(texts, name, wanted.column)]
        indices = range(texts.num_shards)
        return [StreamShard(texts, index, name, wanted.column) for index in indices]

    return opened


def _on_hub(path: str, wanted: Wanted, field: str) -> dict[str, Open]:
    datasets = import_datasets()
    try:
        with quiet():
            splits = datasets.get_dataset_split_names(path, wanted.name)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise ValueError(
            f"{field} is {path!r}, which is not on disk, nor on the Hugging Face hub: "
            f"{first_line(error)}"
        ) from error
    return {split: _opens_hub(path, split, wanted, field) for split in splits}


def _opens_hub(path: str, split: str, wanted: Wanted, field: str) -> Open:
    def opened() -> Sequence[Shard]:
        datasets = import_datasets()
        try:
            with quiet():
                options = {"split": split, "streaming": wanted.streaming}
                rows = datasets.load_dataset(path, wanted.name, **options)
        except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
            reason = first_line(error.__cause__ or error)
            raise ValueError(f"{field} is {path!r}, which cannot be read: {reason}") from error
        return _opens_rows(rows, split, path, wanted)()

    return opened


def _check_column(rows: Any, path: str, column: str) -> None:
    columns = list(rows.features or [])
    if columns and column not in columns:
        raise ValueError(f"{path}: {missing_column(column, columns)}")
