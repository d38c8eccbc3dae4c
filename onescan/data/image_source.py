"""Where the datasets library finds images: on disk or on the hub, and in which splits."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging import CRITICAL
from pathlib import Path
from types import ModuleType
from typing import Any

from onescan.data.image_folder import HELD_OUT, SPLITS, folder_tables, split_folders, walk
from onescan.data.image_parquet import (
    check_parquet,
    count_rows,
    find_fault,
    first_line,
    parquet_splits,
)

Chosen = dict[str, str]  # by role, train and test, the split that plays it

HUB_NAME = r"(\w[\w.-]*/)?\w[\w.-]*"


def import_datasets() -> ModuleType:
    """Import the datasets library, which is large and optional.

    Raises:
        ImportError: it is not installed; says how to.
    """
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            "images on disk or on a hub need datasets: pip install 'onescan[vision]'"
        ) from error
    return datasets


@contextmanager
def quiet() -> Iterator[None]:
    """Let the datasets library neither log nor draw progress bars."""
    datasets = import_datasets()
    level, are_off = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if not are_off:
            datasets.enable_progress_bars()


@dataclass(frozen=True, kw_only=True)
class ImageSource:
    """Data that the datasets library can open.

    Attributes:
        path: as the user spelled it.
        builder: what the library opens it with: parquet, imagefolder, or a name on a hub.
        name: the hub's configuration.
        files: of each split, for what is on disk; or the folder of its class folders.
        splits: there are these.
    """

    path: str
    builder: str
    name: str | None = None
    files: dict[str, list[str]] | None = None
    splits: tuple[str, ...]

    def choose(self, train: str, test: str | None) -> Chosen:
        """Say which splits to open as train and, if there is one to be judged on, as test.

        Raises:
            ValueError: a split that was asked for does not exist, or plays both roles.
        """
        for field, split in (("train_split", train), ("test_split", test)):
            if split is not None and split not in self.splits:
                raise ValueError(
                    f"data.{field} is {split!r}, but {self.path} has: {', '.join(self.splits)}"
                    + self._why_splits()
                )
        if test == train:
            raise ValueError(f"data.test_split is {test!r}, expected another than data.train_split")
        others = [split for split in HELD_OUT if split in self.splits and split != train]
        test = test or next(iter(others), None)
        return {"train": train, "test": test} if test else {"train": train}

    def open(self, chosen: Chosen, *, streaming: bool) -> dict[str, Any]:
        """Open the splits chosen, as data sets or as streams of the datasets library.

        Raises:
            ValueError: one is empty, or cannot be read; names the file that is damaged.
        """
        datasets = import_datasets()
        if self.files and self.builder == "imagefolder":
            folders = {role: self.files[split][0] for role, split in chosen.items()}
            return folder_tables(self.path, folders)
        if self.files:
            check_parquet(self.path, {split: self.files[split] for split in chosen.values()})
        try:
            with quiet():
                return self._load(datasets.load_dataset, chosen, streaming)
        except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
            files = [file for split in chosen.values() for file in self.parquet_files(split)]
            reason = find_fault(files) or first_line(error.__cause__ or error)
            raise ValueError(
                f"data.path is {self.path!r}, which cannot be read: {reason}"
            ) from error

    def parquet_files(self, split: str) -> list[str]:
        """List the parquet files of a split, for what is on disk."""
        return self.files[split] if self.files and self.builder == "parquet" else []

    def count(self, split: str, stream: Any) -> int | None:
        """Count the rows of a split that was opened as a stream; None where nothing tells.

        Raises:
            ValueError: a parquet file is damaged; names it.
        """
        if files := self.parquet_files(split):
            return count_rows(files)
        told = (stream.info.splits or {}).get(split)
        return told.num_examples or None if told else None

    def _load(self, load: Callable[..., Any], chosen: Chosen, streaming: bool) -> dict[str, Any]:
        if self.files is None:
            return {
                role: load(self.builder, self.name, split=split, streaming=streaming)
                for role, split in chosen.items()
            }
        files = {role: self.files[split] for role, split in chosen.items()}
        return dict(load(self.builder, data_files=files, streaming=streaming))

    def _why_splits(self) -> str:
        """Say what makes splits of folders that may have been meant as classes."""
        named = [split for split in self.splits if split in SPLITS]
        if self.builder != "imagefolder" or len(named) == len(self.splits):
            return ""
        return f"; the folder called {named[0]!r} makes those beside it splits"


def find_source(path: str, name: str | None) -> ImageSource:
    """Look for data on disk, else on the hub.

    Raises:
        ValueError: it is in neither place, or there is nothing in it that could be read.
    """
    place = Path(path).expanduser()
    if not place.exists():
        if not re.fullmatch(HUB_NAME, path):  # else a slip of the pen would wait for the network
            raise ValueError(f"data.path is {path!r}: there is no such file or folder")
        return _on_hub(path, name)
    if name is not None:
        raise ValueError(f"data.name is {name!r}, expected none: data.path {path!r} is on disk")
    if place.is_file() and place.suffix == ".parquet":
        return _source(path, "parquet", {"train": [str(place)]})
    if not place.is_dir():
        raise ValueError(f"data.path is {path!r}, expected a folder or a parquet file")
    if parquet := sorted(Path(file) for file in walk(str(place)) if file.endswith(".parquet")):
        return _source(path, "parquet", parquet_splits(place, parquet))
    folders = split_folders(str(place.absolute()))
    return _source(path, "imagefolder", {split: [folder] for split, folder in folders.items()})


def _source(path: str, builder: str, files: dict[str, list[str]]) -> ImageSource:
    if not files:
        raise ValueError(f"data.path is {path!r}, a folder without images or parquet files")
    return ImageSource(path=path, builder=builder, files=files, splits=tuple(files))


def _on_hub(path: str, name: str | None) -> ImageSource:
    datasets = import_datasets()
    try:
        with quiet():
            splits = datasets.get_dataset_split_names(path, name)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise ValueError(
            f"data.path is {path!r}, which is not on disk, nor on the Hugging Face hub: "
            f"{first_line(error)}"
        ) from error
    return ImageSource(path=path, builder=path, name=name, splits=tuple(splits))
