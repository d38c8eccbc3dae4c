"""Files in pairs: images and their masks, in the folders images and masks of each split."""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from onescan.experiments.data.base import held_out_note, listed, random_split
from onescan.experiments.data.sources import FolderCount, report_left_out, walk_all

IMAGES, MASKS = "images", ("masks", "labels")
TRAINING = ("train", "training")
TESTING = ("val", "valid", "validation", "test", "testing")

Stem = Callable[[str], str | None]
"""Returns the name of a file without its suffix, or None for files of other types."""


class Pair(NamedTuple):
    """An image file and the file of its mask."""

    image: Path
    mask: Path


def split_pairs(
    path: str, stem: Stem, suffix: str, *, fraction: float, seed: int
) -> tuple[list[Pair], list[Pair], list[str]]:
    """Find images and their masks, in a folder or in its folders train and val (or test).

    All other files are left out, such as those in subfolders of images. Except for hidden files of
    other types, they are counted, logged and noted.

    Args:
        path: The folder.
        stem: Tells which files are read. An image and its mask have the same stem.
        suffix: Suffix of a mask, for messages.
        fraction: Fraction of the images held out if there is no val or test folder.
        seed: Random seed of the split.

    Returns:
        The training pairs, the test pairs, and notes on the split.

    Raises:
        ValueError: If a folder or a mask is missing, two files have the same name, or `fraction` is
            out of range.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise ValueError(f"data.path is {path!r}: there is no such folder")
    train_folder, test_folder = (_subfolder(root, names) for names in (TRAINING, TESTING))
    notes: list[str] = []
    train = _pairs(train_folder or root, stem, suffix, notes)
    if test_folder is not None:
        test = _pairs(test_folder, stem, suffix, notes)
        notes.append(f"the test images are those in {test_folder.name}")
    else:
        count = len(train)
        parts = random_split(count, fraction=fraction, seed=seed)
        train, test = ([train[index] for index in part.tolist()] for part in parts)
        notes.append(held_out_note(len(test), count))
    used = {file for pair in (*train, *test) for file in pair}
    return train, test, notes + _left_out(root, used, stem)


def paired_images(path: str) -> Path | None:
    """Return the folder of the training images, or None if there are no folders of pairs."""
    root = Path(path).expanduser()
    for folder in (root, _subfolder(root, TRAINING)):
        if folder and (images := _subfolder(folder, (IMAGES,))) and _subfolder(folder, MASKS):
            return images
    return None


def _subfolder(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the subfolder with the first of the names that exists, in any case."""
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    folders = {entry.name.lower(): entry for entry in entries if entry.is_dir()}
    return next((folders[name] for name in names if name in folders), None)


def _pairs(folder: Path, stem: Stem, suffix: str, notes: list[str]) -> list[Pair]:
    """Return the images in a folder with their masks; add a note on masks without an image."""
    image_folder = _subfolder(folder, (IMAGES,)) or folder / IMAGES
    mask_folder = _subfolder(folder, MASKS) or folder / MASKS[0]
    images, masks = (_files(each, stem) for each in (image_folder, mask_folder))
    if missing := [file for name, file in images.items() if name not in masks]:
        raise ValueError(
            f"{missing[0]} has no mask {mask_folder / (stem(missing[0].name) or '')}{suffix}"
            f"{f'; {len(missing)} images have no mask' * (len(missing) > 1)}"
        )
    if not images:
        raise ValueError(f"{image_folder} holds no images")
    if others := [str(file) for name, file in masks.items() if name not in images]:
        notes.append(f"masks without an image: {listed(others)}")
    return [Pair(image, masks[name]) for name, image in images.items()]


def _files(folder: Path, stem: Stem) -> dict[str, Path]:
    """Return the files in a folder by their name without the suffix, in order."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}, expected folders {IMAGES} and {MASKS[0]}")
    files: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        name = stem(file.name)
        if name is None or name.startswith(".") or file.is_dir():  # macOS adds hidden files
            continue
        if name in files:
            raise ValueError(
                f"{folder} has {files[name].name} and {file.name}, whose names differ only in the "
                "suffix"
            )
        files[name] = file
    return files


def _left_out(root: Path, used: Collection[Path], stem: Stem) -> list[str]:
    """Log the files below a folder that are not used, by folder, and return the messages."""
    counts: dict[str, FolderCount] = defaultdict(FolderCount)
    for path, in_hidden in walk_all(str(root)):
        file = Path(path)
        is_hidden = in_hidden and file not in used
        is_used = stem(file.name) is not None if is_hidden else file in used
        counts[str(file.parent)].keeps(path, is_used, is_hidden=is_hidden)
    return report_left_out(counts)
