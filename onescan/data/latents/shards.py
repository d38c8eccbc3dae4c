"""Encoded images on disk: latents.json says what they are, safetensors files hold them.

latents.json                   the format, the classes, what was encoded, the shards' sizes
train-00000.safetensors ...    of each image mean, std and label, and its mirror image's two
test-00000.safetensors ...
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from safetensors import SafetensorError, safe_open
from torch import Tensor

from onescan import configs
from onescan.data.latents.format import LatentFormat

VERSION = 1  # of how latents are kept
NOTES = "latents.json"
MEAN, STD, LABELS = "mean", "std", "labels"
MIRRORED_MEAN, MIRRORED_STD = "mirrored_mean", "mirrored_std"

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
LatentDtype = Literal["float16", "bfloat16", "float32"]
ANEW = "remove it, and the same encoding makes it anew"
DTYPES: dict[LatentDtype, str] = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}


@dataclass(frozen=True, kw_only=True)
class ShardSizes:
    """Images in each shard of a split."""

    train: tuple[int, ...]
    test: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LatentNotes:
    """What latents.json tells a reader."""

    onescan: str
    """The version that wrote it."""
    version: int = VERSION
    format: LatentFormat
    class_names: tuple[str, ...]
    dtype: LatentDtype
    flip: bool
    """Whether training images are there mirrored too."""
    shards: ShardSizes | None = None
    """None until all are there."""

    def parts(self, split: Split) -> tuple[str, ...]:
        """Name the tensors in a shard."""
        mirrored = (MIRRORED_MEAN, MIRRORED_STD) if self.flip and split == "train" else ()
        return (MEAN, STD, *mirrored)


def shard_path(folder: Path, split: Split, index: int) -> Path:
    """Where a shard is.

    >>> shard_path(Path("a"), "test", 3).name
    'test-00003.safetensors'
    """
    return folder / f"{split}-{index:05d}.safetensors"


def read_notes(folder: Path) -> LatentNotes:
    """Read latents.json.

    Raises:
        ValueError: it is missing, damaged, or of another version.
    """
    data = read_json(folder)
    known = {name: data[name] for name in LatentNotes.__dataclass_fields__ if name in data}
    if known.get("version") != VERSION:
        raise ValueError(
            f"{folder / NOTES} is of version {known.get('version')!r}, expected {VERSION}: "
            "encode again, in another folder"
        )
    try:
        return configs.from_dict(LatentNotes, known)
    except ValueError as error:
        raise ValueError(f"{folder / NOTES} is damaged: {error}") from error


def read_json(folder: Path) -> dict[str, Any]:
    """Read all of latents.json, also what only encoding asks for.

    Raises:
        ValueError: it is missing, or no JSON object.
    """
    path = folder / NOTES
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no latents: it has no {NOTES}, expected what onescan encode writes"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): bring it back from a copy") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} is damaged: it holds a {type(data).__name__}, expected an object")
    return data


class LatentShard:
    """One shard, mapped into memory when it is first read, by each process anew.

    Attributes:
        path: where it is.
        size: images in it.
    """

    def __init__(self, folder: Path, split: Split, index: int, notes: LatentNotes) -> None:
        self.path = shard_path(folder, split, index)
        self._notes, self._parts = notes, notes.parts(split)
        self._file: Any = None
        self.size = int(self._opened().get_slice(LABELS).get_shape()[0])
        self._file = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None}  # a map is no other process' concern

    def latents(self, name: str, row: int) -> Tensor:
        """Read one image's mean or spread, as it is stored.

        Raises:
            ValueError: the file is missing, damaged, or another than it was.
        """
        return self._row(name, row)

    def label(self, row: int) -> int:
        """Read one image's class.

        Raises:
            ValueError: as `latents`; or there is no such class.
        """
        label, classes = int(self._row(LABELS, row)), len(self._notes.class_names)
        if not 0 <= label < classes:
            raise ValueError(
                f"{self.path} is damaged: image {row} is of class {label}, expected 0 to "
                f"{classes - 1}"
            )
        return label

    def _row(self, name: str, row: int) -> Tensor:
        if self._file is None:
            self._file = self._opened()
        try:
            return self._file.get_slice(name)[row]
        except (SafetensorError, IndexError) as error:
            raise ValueError(f"{self.path} is damaged ({error}): {ANEW}") from error

    def _opened(self) -> Any:
        try:
            file = safe_open(self.path, framework="pt")
        except FileNotFoundError:
            raise ValueError(f"{self.path} is missing: the same encoding makes it anew") from None
        except SafetensorError as error:
            raise ValueError(f"{self.path} is damaged ({error}): {ANEW}") from error
        self._check(file)
        return file

    def _check(self, file: Any) -> None:
        """Raise ValueError unless the tensors are there, and as the notes have it."""
        there = set(file.keys())
        if missing := {LABELS, *self._parts} - there:
            raise ValueError(f"{self.path} has no {min(missing)!r}: {ANEW}")
        labels, form = file.get_slice(LABELS), self._notes.format
        size = labels.get_shape()[0] if labels.get_shape() else 0
        wanted = {LABELS: ("I64", [size])} | {
            name: (DTYPES[self._notes.dtype], [size, form.channels, form.height, form.width])
            for name in self._parts
        }
        for name, expected in wanted.items():
            part = file.get_slice(name)
            if (found := (part.get_dtype(), part.get_shape())) != expected:
                raise ValueError(
                    f"{self.path}: {name} is {found[0]} {found[1]}, expected {expected[0]} "
                    f"{expected[1]}: {ANEW}"
                )
