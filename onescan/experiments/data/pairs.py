"""Files in pairs: images and their masks, in the folders images and masks of each split."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from onescan.experiments.data.base import held_out_note, random_split

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
    train_folder, test_folder = (
        next((root / name for name in names if (root / name).is_dir()), None)
        for names in (TRAINING, TESTING)
    )
    pairs = _pairs(train_folder or root, stem, suffix)
    if test_folder is not None:
        notes = [f"the test images are those in {test_folder.name}"]
        return pairs, _pairs(test_folder, stem, suffix), notes
    parts = random_split(len(pairs), fraction=fraction, seed=seed)
    train, test = ([pairs[index] for index in part.tolist()] for part in parts)
    return train, test, [held_out_note(len(test), len(pairs))]


def paired_images(path: str) -> Path | None:
    """Return the folder of the training images, or None if there are no folders of pairs."""
    root = Path(path).expanduser()
    for folder in (root, *(root / name for name in TRAINING)):
        if (folder / IMAGES).is_dir() and any((folder / name).is_dir() for name in MASKS):
            return folder / IMAGES
    return None


def _pairs(folder: Path, stem: Stem, suffix: str) -> list[Pair]:
    """Return the images in a folder with their masks."""
    mask_folder = next((name for name in MASKS if (folder / name).is_dir()), MASKS[0])
    images, masks = (_files(folder / name, stem) for name in (IMAGES, mask_folder))
    if missing := [file for name, file in images.items() if name not in masks]:
        raise ValueError(
            f"{missing[0]} has no mask "
            f"{folder / mask_folder / (stem(missing[0].name) or '')}{suffix}"
            f"{f'; {len(missing)} images have no mask' * (len(missing) > 1)}"
        )
    if not images:
        raise ValueError(f"{folder / IMAGES} holds no images")
    return [Pair(image, masks[name]) for name, image in images.items()]


def _files(folder: Path, stem: Stem) -> dict[str, Path]:
    """Return the files in a folder by their name without the suffix, in order."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}, expected folders {IMAGES} and {MASKS[0]}")
    files: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        name = stem(file.name)
        if name is None or name.startswith("."):  # macOS adds hidden files
            continue
        if name in files:
            raise ValueError(
                f"{folder} has {files[name].name} and {file.name}, whose names differ only in the "
                "suffix"
            )
        files[name] = file
    return files
