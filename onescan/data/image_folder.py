"""Image files on disk in a folder for each class, listed in tables of the datasets library."""

import logging
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

HELD_OUT = ("validation", "valid", "val", "test")  # a hub's test split may have no labels
SPLITS = ("train", *HELD_OUT)

log = logging.getLogger("onescan")


def walk(folder: str, above: frozenset[str] = frozenset()) -> Iterator[str]:
    """Find the files below a folder, in order, but none that are hidden.

    Links are followed, unless they lead back to where one came from.

    Args:
        folder: where to begin.
        above: the folders that are not entered again.
    """
    here = os.path.realpath(folder)
    if here in above:
        return
    above = above | {here, *map(str, Path(here).parents)}
    for entry in _entries(folder):
        if _is_folder(entry):
            yield from walk(entry.path, above)
        else:
            yield entry.path


def split_folders(folder: str) -> dict[str, str]:
    """Take each folder for a split if one is called so, else all of it for one split."""
    below = {entry.name: entry.path for entry in _entries(folder) if _is_folder(entry)}
    splits = below if any(name in SPLITS for name in below) else {"train": folder}
    return {name: place for name, place in splits.items() if any(_images(place))}


def folder_tables(path: str, folders: Mapping[str, str]) -> dict[str, Any]:
    """List the images of each split; the classes are those of train.

    Args:
        path: as the user spelled it.
        folders: of the splits, by role.

    Raises:
        ValueError: an image is in no class folder, or its name is no text; or a class is not in
            train.
    """
    images = {role: _by_class(path, folder) for role, folder in folders.items()}
    names = sorted(images["train"])
    for role, classes in images.items():
        if new := sorted(set(classes) - set(names)):
            raise ValueError(
                f"data.path is {path!r}, where {folders[role]} has a folder of the class "
                f"{new[0]!r}, and {folders['train']} has none"
            )
    return {role: _table(classes, names) for role, classes in images.items()}


def _by_class(path: str, folder: str) -> dict[str, list[str]]:
    """Sort the images of a split by the first folder that they are in."""
    classes: dict[str, list[str]] = defaultdict(list)
    for file in _images(folder):
        name, *below = file[len(folder) :].lstrip(os.sep).split(os.sep, maxsplit=1)
        if not below:
            raise ValueError(
                f"data.path is {path!r}, where {file} is in no class folder, expected "
                "FOLDER/CLASS/IMAGE, or FOLDER/SPLIT/CLASS/IMAGE where the name of a folder is "
                f"one of {', '.join(SPLITS)}"
            )
        if not _is_text(file):
            raise ValueError(f"data.path is {path!r}, where the name of {file!r} is not UTF-8")
        classes[name].append(file)
    for entry in _entries(folder):
        if _is_folder(entry) and entry.name not in classes:
            log.warning("%r holds no images, and is left out", entry.path)
    return classes


def _table(images: Mapping[str, list[str]], names: list[str]) -> Any:
    import datasets

    places = {name: place for place, name in enumerate(names)}
    rows = {
        "image": [file for files in images.values() for file in files],
        "label": [places[name] for name, files in images.items() for _ in files],
    }
    features = {"image": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
    table = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    return table.cast_column("image", datasets.Image(decode=False))


def _images(folder: str) -> Iterator[str]:
    kinds = tuple(Image.registered_extensions())
    return (file for file in walk(folder) if file.lower().endswith(kinds))


def _entries(folder: str) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        visible = [entry for entry in entries if not entry.name.startswith((".", "__"))]
    return sorted(visible, key=lambda entry: entry.name)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Tell without a look at the disk, but for links, which may lead nowhere."""
    return Path(entry).is_dir() if entry.is_symlink() else entry.is_dir()


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
