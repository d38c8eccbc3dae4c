"""Finding labeled data on disk or on the Hugging Face Hub, and opening it with datasets."""

import json
import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from onescan.checkpoint.hub import without_retries
from onescan.checks import HUB_NAME
from onescan.experiments.data.base import HELD_OUT, SPLITS, listed
from onescan.inputs.image_files import is_image_name
from onescan.messages import missing_package, plural, printable

Chosen = dict[str, str]  # the split in each role, "train" and "test"

# Raised by the datasets library for damaged rows and for a state that is not its own.
UNREADABLE = (AttributeError, LookupError, OSError, TypeError, ValueError)
HIDDEN = (".", "__")  # prefixes of the names of files and folders that are left out
MAX_LOGGED = 10  # messages on unreadable rows
UNLABELED = "image"  # name of the only class
GROUP = 64  # rows fetched at once; the datasets library is much slower one by one

log = logging.getLogger("onescan")


def import_datasets(extra: str = "vision") -> ModuleType:
    """Import the datasets library, which is large and optional.

    Raises:
        ImportError: If it is not installed; names the extra to install.
    """
    try:
        import datasets
    except ImportError as error:
        raise missing_package("data on disk or on a hub", "datasets", extra, error) from error
    return datasets


@contextmanager
def quiet() -> Iterator[None]:
    """Disable logging and progress bars of the datasets library."""
    datasets = import_datasets()
    level, were_disabled = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if not were_disabled:
            datasets.enable_progress_bars()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line.replace("OfflineModeIsEnabled", "no connection, or HF_HUB_OFFLINE is set")


def report_unreadable(source: str, failures: Sequence[str]) -> None:
    """Log the first messages on the unreadable rows of a dataset, and their number, once each."""
    for failure in failures[:MAX_LOGGED]:
        _warn(failure)
    if failures:
        rows, verb = plural(len(failures), "row"), "is" if len(failures) == 1 else "are"
        _warn(f"{source}: {rows} could not be read and {verb} left out")


def read_groups(
    shard: Any, name: str, *, first: int, state: Any
) -> Iterator[tuple[int, dict[str, list[Any]], Any]]:
    """Yield groups of `GROUP` rows of an iterable dataset of the datasets library.

    Args:
        shard: The dataset.
        name: Its name, for messages.
        first: Number of rows before `state`.
        state: State of the dataset to begin at; None is its beginning.

    Yields:
        The number of rows before the group, its columns, and the state before it.

    Raises:
        ValueError: If a row cannot be read, or the state is not one of this dataset.
    """
    try:
        if state is not None:
            shard.load_state_dict(state)
        for columns in shard.iter(batch_size=GROUP):
            yield first, columns, state
            first, state = first + len(next(iter(columns.values()))), shard.state_dict()
    except UNREADABLE as error:
        raise ValueError(f"{name} cannot be read: {first_line(error)}") from error


# Folders


def walk(
    folder: str, above: frozenset[str] = frozenset(), *, with_hidden: bool = False
) -> Iterator[str]:
    """Yield the files below a folder in order, except hidden ones.

    Links are followed unless they lead back to a folder above them.

    Args:
        folder: Where to begin.
        above: Folders not to enter again.
        with_hidden: Whether to yield hidden files, and those in hidden folders, too.
    """
    here = os.path.realpath(folder)
    if here in above:
        return
    above = above | {here, *map(str, Path(here).parents)}
    for entry in _entries(folder, with_hidden=with_hidden):
        if _is_folder(entry):
            yield from walk(entry.path, above, with_hidden=with_hidden)
        else:
            yield entry.path


def _entries(folder: str, *, with_hidden: bool = False) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        shown = [entry for entry in entries if with_hidden or not entry.name.startswith(HIDDEN)]
    return sorted(shown, key=lambda entry: entry.name)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    # A DirEntry needs no disk access. Path handles broken links.
    return Path(entry).is_dir() if entry.is_symlink() else entry.is_dir()


@cache
def _warn(message: str) -> None:
    """Log a warning, once per process, because a run opens its data several times."""
    log.warning("%s", message)


class FolderCount:
    """Counts the files of a folder, and those that are left out, by suffix.

    >>> count = FolderCount()
    >>> [count.keeps(name, name.endswith(".png")) for name in ("a.png", "b.HEIC", "b")]
    [True, False, False]
    >>> count.describe("cats")
    "2 of 3 files in 'cats' are left out: 1 .heic, 1 without a suffix"
    """

    def __init__(self) -> None:
        self.files = 0
        self.left_out: Counter[str] = Counter()

    def keeps(self, file: str, is_used: bool, *, is_hidden: bool = False) -> bool:
        """Count a file, and return whether it is used. Hidden files are not used.

        Hidden files are counted only if they would otherwise be used.
        """
        if is_hidden:
            self.files += is_used
            self.left_out["hidden"] += is_used
            return False
        self.files += 1
        if not is_used:
            stem, _, suffix = file.rpartition(os.sep)[2].rpartition(".")
            self.left_out[f".{suffix.lower()}" if stem else "without a suffix"] += 1
        return is_used

    def describe(self, folder: str) -> str:
        """Return how many files are left out, in words; an empty string if none are."""
        if not self.left_out.total():
            return ""
        kinds = listed(
            [f"{count} {suffix}" for suffix, count in self.left_out.most_common() if count]
        )
        are = "is" if self.left_out.total() == 1 else "are"
        files = f"{self.left_out.total():,} of {self.files:,} file{'s' * (self.files != 1)}"
        return printable(f"{files} in {folder!r} {are} left out: {kinds}")


def walk_all(folder: str) -> Iterator[tuple[str, bool]]:
    """Yield the files below a folder, and whether they or a folder on the way are hidden."""
    for file in walk(folder, with_hidden=True):
        parts = Path(file[len(folder) :]).parts
        yield file, any(part.startswith(HIDDEN) for part in parts)


def images_below(folder: str) -> list[str]:
    """Return the files below a folder that have the name of an image; log what is left out."""
    count = FolderCount()
    images = [
        file
        for file, is_hidden in walk_all(folder)
        if count.keeps(file, is_image_name(file), is_hidden=is_hidden)
    ]
    report_left_out({folder: count})
    return images


def report_left_out(counts: Mapping[str, FolderCount]) -> list[str]:
    """Log the files that are left out of each folder, and return the messages.

    If there are more than `MAX_LOGGED` folders, the rest are combined in one message.
    """
    notes = [note for folder, count in counts.items() if (note := count.describe(folder))]
    if len(notes) > MAX_LOGGED:
        rest = [count for count in counts.values() if count.left_out.total()][MAX_LOGGED:]
        files = sum(count.left_out.total() for count in rest)
        notes[MAX_LOGGED:] = [f"{files:,} files in {len(rest):,} other folders are left out"]
    for note in notes:
        _warn(note)
    return notes


def _split_folders(folder: str) -> tuple[dict[str, list[str]], tuple[str, ...]]:
    """Treat subfolders as splits if one is named like a split, or else the folder as one.

    Returns:
        The folder of each split, and notes on what is left out.
    """
    entries = _entries(folder)
    below: dict[str, str] = {}
    for entry in filter(_is_folder, entries):
        name = entry.name.lower() if entry.name.lower() in SPLITS else entry.name
        if name in below:
            raise ValueError(
                f"data.path is {folder!r}, which has two folders for the split {name}: "
                f"{Path(below[name]).name} and {entry.name}"
            )
        below[name] = entry.path
    if not any(name in SPLITS for name in below):
        return ({"train": [folder]} if _has_images(folder) else {}), ()
    splits = {name: [path] for name, path in below.items() if _has_images(path)}
    count = FolderCount()
    for entry in entries:
        if not _is_folder(entry):
            count.keeps(entry.name, False)
    notes = report_left_out({folder: count})
    notes += [_without_images(path) for name, path in below.items() if name not in splits]
    return splits, tuple(notes)


def _has_images(folder: str) -> bool:
    return any(is_image_name(file) for file in walk(folder))


def _without_images(folder: str) -> str:
    message = f"{folder!r} contains no images and is left out"
    _warn(message)
    return message


def _folder_tables(
    path: str, folders: Mapping[str, str], notes: list[str], *, labeled: bool
) -> dict[str, Any]:
    """List the images of each role's folder as a table. Train defines the classes.

    The imagefolder builder of datasets is not used: it labels by the innermost folder, follows no
    links and copies the list of files into its cache. What is left out is added to `notes`.
    """
    group = partial(_images_by_class, path, notes=notes, labeled=labeled)
    images = {role: group(folder) for role, folder in folders.items()}
    names = sorted(images["train"])
    for role, classes in images.items():
        if new := sorted(set(classes) - set(names)):
            raise ValueError(
                f"data.path is {path!r}, where {folders[role]} has a folder of the class "
                f"{new[0]!r}, but {folders['train']} has none"
            )
    return {role: _table(classes, names) for role, classes in images.items()}


def _images_by_class(
    path: str, folder: str, *, notes: list[str], labeled: bool
) -> dict[str, list[str]]:
    """Group the images of a split by the first folder that they are in, if they have labels."""
    classes: dict[str, list[str]] = defaultdict(list)
    counts: dict[str, FolderCount] = defaultdict(FolderCount)
    for file, is_hidden in walk_all(folder):
        name, *below = file[len(folder) :].lstrip(os.sep).split(os.sep, maxsplit=1)
        count = counts[name if below else ""]
        if not count.keeps(file, is_image_name(file), is_hidden=is_hidden):
            continue
        if not labeled:
            name = UNLABELED
        elif not below:
            raise ValueError(
                f"data.path is {path!r}, where {file} is in no class folder, expected "
                "FOLDER/CLASS/IMAGE, or FOLDER/SPLIT/CLASS/IMAGE where the name of a folder is "
                f"one of {', '.join(SPLITS)}"
            )
        try:
            file.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"data.path is {path!r}, where the name of {file!r} is not UTF-8"
            ) from None
        classes[name].append(file)
    if labeled and classes.keys() == {"images", "masks"}:
        raise ValueError(
            f"data.path is {path!r}, whose folders are images and masks instead of one for each "
            "class: use the recipe segmenter for segmentation"
        )
    notes += report_left_out({str(Path(folder) / name): count for name, count in counts.items()})
    for entry in _entries(folder):
        if labeled and _is_folder(entry) and entry.name not in classes:
            notes.append(_without_images(entry.path))
    return classes


def _table(images: Mapping[str, list[str]], names: list[str]) -> Any:
    datasets = import_datasets()
    rows = {
        "image": [file for files in images.values() for file in files],
        "label": [index for name in images for index in [names.index(name)] * len(images[name])],
    }
    features = {"image": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
    table = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    return table.cast_column("image", datasets.Image(decode=False))


# Parquet files


def parquet_splits(folder: Path, files: Sequence[Path]) -> dict[str, list[str]]:
    """Group files by the split that their names, or their folders' names, contain.

    Raises:
        ValueError: If only some of the files name a split.
    """
    splits: dict[str, list[str]] = {}
    for file in files:
        words = re.findall("[a-z]+", str(file.relative_to(folder)).lower())
        named = [word for word in words if word in SPLITS]
        splits.setdefault(named[-1] if named else "", []).append(str(file))
    unnamed = splits.pop("", [])
    if unnamed and splits:
        raise ValueError(
            f"data.path is {str(folder)!r}, where {unnamed[0]} names no split, but other files do; "
            f"expected one of {', '.join(SPLITS)} in the name of the file or its folder"
        )
    return splits or {"train": unnamed}


def _footer(file: str) -> Any:
    from pyarrow import parquet

    try:
        return parquet.read_metadata(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is not a complete parquet file: {first_line(error)}") from error


def _check_parquet(path: str, splits: Mapping[str, Sequence[str]]) -> None:
    """Check that each split has rows, and that all files have the same columns and classes.

    A file may lack columns of the first one. Classes are those that the datasets library stored.
    """
    footers = {file: _footer(file) for files in splits.values() for file in files}
    for split, files in splits.items():
        if not any(footers[file].num_rows for file in files):
            raise ValueError(f"data.path is {path!r}, whose split {split} is empty")
    columns = {file: footer.schema.to_arrow_schema().names for file, footer in footers.items()}
    first = next(iter(columns))
    for file, names in columns.items():
        if new := [name for name in names if name not in columns[first]]:
            raise ValueError(
                f"data.path is {path!r}, where {file} has columns that {first} lacks: "
                f"{', '.join(new)}"
            )
    classes: dict[str, tuple[str, list[str]]] = {}  # of each column, and the file that names them
    for file, footer in footers.items():
        for column, names in _stored_classes(footer).items():
            known, expected = classes.setdefault(column, (file, names))
            if names != expected:
                raise ValueError(
                    f"data.path is {path!r}, where the classes of the column {column} are "
                    f"{listed(names)} in {file}, but {listed(expected)} in {known}; expected the "
                    "same classes in the same order"
                )


def _stored_classes(footer: Any) -> dict[str, list[str]]:
    """Return the names of the classes that the datasets library stored for each column."""
    try:
        features = json.loads(footer.metadata[b"huggingface"])["info"]["features"]
        return {column: kind["names"] for column, kind in features.items() if "names" in kind}
    except UNREADABLE:  # nothing stored
        return {}


def _find_damage(files: Sequence[str]) -> str | None:
    """Describe the first file that cannot be read to its end, or differs in type from the first."""
    from pyarrow import parquet

    for file in files:
        try:
            for _ in parquet.ParquetFile(file).iter_batches():
                pass
        except (OSError, ValueError) as error:
            return f"{file} is not a complete parquet file: {first_line(error)}"
    schemas = {file: _footer(file).schema.to_arrow_schema() for file in files}
    for file, schema in schemas.items():
        for name, kind in zip(schema.names, schema.types, strict=True):
            expected = schemas[files[0]].field(name).type
            if kind != expected:
                return f"the column {name} holds {kind} in {file}, but {expected} in {files[0]}"
    return None


# Sources


@dataclass(frozen=True, kw_only=True)
class DatasetSource:
    """Data that the datasets library can open.

    Attributes:
        path: As the user wrote it.
        builder: What opens it: parquet, imagefolder, or the name of a hub dataset.
        name: Configuration of a hub dataset.
        files: Parquet files of each split, or the folder of its class folders; None for a hub.
        splits: Names of the splits.
        notes: What was left out when the data was found.
    """

    path: str
    builder: str
    name: str | None = None
    files: dict[str, list[str]] | None = None
    splits: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def choose(self, train: str, test: str | None) -> Chosen:
        """Return the splits to train on and, if there is one, to evaluate on.

        Raises:
            ValueError: If a requested split does not exist, or both are the same.
        """
        for field, split in (("train_split", train), ("test_split", test)):
            if split is not None and split not in self.splits:
                raise ValueError(
                    f"data.{field} is {split!r}, but {self.path} has: {', '.join(self.splits)}"
                    + self._hint()
                )
        if test == train:
            raise ValueError(
                f"data.test_split is {test!r}, expected a different split than data.train_split"
            )
        others = [split for split in HELD_OUT if split in self.splits and split != train]
        test = test or next(iter(others), None)
        return {"train": train, "test": test} if test else {"train": train}

    def _hint(self) -> str:
        """Explain why folders that may be classes are treated as splits."""
        named = [split for split in self.splits if split in SPLITS]
        if self.builder != "imagefolder" or len(named) == len(self.splits):
            return ""
        return f"; its subfolders are treated as splits, because one is called {named[0]!r}"

    def open(
        self,
        chosen: Chosen,
        *,
        streaming: bool,
        notes: list[str] | None = None,
        labeled: bool = True,
    ) -> dict[str, Any]:
        """Open splits as datasets or iterable datasets of the datasets library, by role.

        What is left out is added to `notes`. Without `labeled`, which is for folders of images,
        subfolders are not classes.

        Raises:
            ValueError: If a split is empty or cannot be read; names the damaged file.
        """
        datasets = import_datasets()
        if self.files and self.builder == "imagefolder":
            folders = {role: self.files[split][0] for role, split in chosen.items()}
            notes = [] if notes is None else notes
            return _folder_tables(self.path, folders, notes, labeled=labeled)
        if not labeled:
            raise ValueError(
                f"data.labeled is False, but {self.path} is not a folder of image files, expected "
                "True"
            )
        files = {role: self.files[split] for role, split in chosen.items()} if self.files else {}
        if files:
            _check_parquet(self.path, {split: files[role] for role, split in chosen.items()})
        try:
            with quiet():
                if files:
                    opened = datasets.load_dataset("parquet", data_files=files, streaming=streaming)
                    return dict(opened)
                return {
                    role: datasets.load_dataset(
                        self.builder, self.name, split=split, streaming=streaming
                    )
                    for role, split in chosen.items()
                }
        except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
            reason = _find_damage([file for group in files.values() for file in group])
            raise ValueError(
                f"data.path is {self.path!r}, which cannot be read: "
                f"{reason or first_line(error.__cause__ or error)}"
            ) from error

    def parquet_files(self, split: str) -> list[str]:
        """Return the parquet files of a split on disk."""
        return self.files[split] if self.files and self.builder == "parquet" else []

    def count(self, split: str, stream: Any) -> int | None:
        """Count the rows of a split opened as a stream; None if the data does not record it.

        Raises:
            ValueError: If a parquet file is damaged; names it.
        """
        if files := self.parquet_files(split):
            return sum(_footer(file).num_rows for file in files)
        info = (stream.info.splits or {}).get(split)
        return info.num_examples or None if info else None


def is_hub_name(path: str) -> bool:
    """Return whether a path that does not exist may name data on a hub.

    A path in an existing folder, or with the suffix of a data file, is a mistyped path.
    """
    is_in_folder = "/" in path and Path(path).parent.is_dir()
    has_suffix = path.endswith((".parquet", ".csv", ".json", ".jsonl", ".txt", ".zip"))
    return bool(re.fullmatch(HUB_NAME, path)) and not is_in_folder and not has_suffix


def find_source(path: str, name: str | None) -> DatasetSource:
    """Find data on disk, else on the Hugging Face Hub.

    Raises:
        ValueError: If it is in neither place, or contains nothing that can be read.
    """
    source = Path(path).expanduser()
    if not source.exists():
        if not is_hub_name(path):  # a mistyped path must not wait for the network
            raise ValueError(f"data.path is {path!r}: there is no such file or folder")
        return _find_on_hub(path, name)
    if name is not None:
        raise ValueError(
            f"data.name is {name!r}, expected None, because data.path {path!r} is on disk"
        )
    builder, notes = "parquet", tuple[str, ...]()
    if source.is_file() and source.suffix == ".parquet":
        files = {"train": [str(source)]}
    elif not source.is_dir():
        raise ValueError(f"data.path is {path!r}, expected a folder or a parquet file")
    elif found := [Path(file) for file in walk(str(source)) if file.endswith(".parquet")]:
        files = parquet_splits(source, sorted(found))
        count = FolderCount()
        for file, is_hidden in walk_all(str(source)):
            count.keeps(file, file.endswith(".parquet"), is_hidden=is_hidden)
        notes = tuple(report_left_out({path: count}))
    else:
        builder, (files, notes) = "imagefolder", _split_folders(str(source.absolute()))
    if not files:
        raise ValueError(f"data.path is {path!r}, a folder without images or parquet files")
    return DatasetSource(path=path, builder=builder, files=files, splits=tuple(files), notes=notes)


def _find_on_hub(path: str, name: str | None) -> DatasetSource:
    datasets = import_datasets()
    try:
        with quiet(), without_retries(datasets.config):
            splits = datasets.get_dataset_split_names(path, name)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise ValueError(
            f"data.path is {path!r}, which is not on disk and cannot be read from the Hugging Face "
            f"Hub: {first_line(error)}"
        ) from error
    return DatasetSource(path=path, builder=path, name=name, splits=tuple(splits))
