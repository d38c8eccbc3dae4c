"""Images encoded once by a VAE: their files, and a dataset that samples from their posteriors.

latents.json                   the format, the classes, what was encoded, the size of each shard
train-00000.safetensors ...    mean, std and label of each image, and mean and std when flipped
test-00000.safetensors ...
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from onescan import configs
from onescan.experiments.data.base import DataConfig, DataSet, Example, LoadedBatch, Splits
from onescan.inputs.latents import LatentFormat
from onescan.messages import named_type

Latent = Float[Tensor, "channels height width"]
Split = Literal["train", "test"]
LatentDtype = Literal["float16", "bfloat16", "float32"]

VERSION = 1  # of the files
NOTES = "latents.json"
SPLITS: tuple[Split, ...] = get_args(Split)
DTYPES: dict[LatentDtype, str] = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
MEAN, STD, LABELS = "mean", "std", "labels"
FLIPPED_MEAN, FLIPPED_STD = "mirrored_mean", "mirrored_std"  # names in the files
REMEDY = "remove it and run the same onescan encode again"


# Files


@dataclass(frozen=True, kw_only=True)
class ShardSizes:
    """Number of images in each shard of a split."""

    train: tuple[int, ...]
    test: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LatentNotes:
    """The part of latents.json that is needed to read latents."""

    onescan: str
    """Version of onescan that wrote it."""
    version: int = VERSION
    format: LatentFormat
    class_names: tuple[str, ...]
    dtype: LatentDtype
    flip: bool
    """Whether training images were also encoded flipped."""
    shards: ShardSizes | None = None
    """None until encoding has finished."""
    notes: tuple[str, ...] = ()
    """What was left out or converted, as in `Splits`."""

    def parts(self, split: Split) -> tuple[str, ...]:
        """Return the names of the tensors in a shard, except labels."""
        flipped = (FLIPPED_MEAN, FLIPPED_STD) if self.flip and split == "train" else ()
        return (MEAN, STD, *flipped)


def shard_path(folder: Path, split: Split, index: int) -> Path:
    """Return the path of a shard.

    >>> shard_path(Path("a"), "test", 3).name
    'test-00003.safetensors'
    """
    return folder / f"{split}-{index:05d}.safetensors"


def read_json(folder: Path) -> dict[str, Any]:
    """Read all of latents.json, including what is needed only to encode.

    Raises:
        ValueError: If it is missing or not a JSON object.
    """
    path = folder / NOTES
    if not path.is_file():
        raise ValueError(f"{folder} has no {NOTES}, expected a folder written by onescan encode")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): restore it from a copy") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} is damaged: it holds {named_type(data)}, expected an object")
    return data


def read_notes(folder: Path) -> LatentNotes:
    """Read the part of latents.json that is needed to read latents.

    Raises:
        ValueError: If it is missing, damaged, or of another version.
    """
    data = read_json(folder)
    known = {name: data[name] for name in LatentNotes.__dataclass_fields__ if name in data}
    if known.get("version") != VERSION:
        raise ValueError(
            f"{folder / NOTES} has version {known.get('version')!r}, expected {VERSION}: encode "
            "again into another folder"
        )
    try:
        return configs.from_dict(LatentNotes, known)
    except ValueError as error:
        raise ValueError(f"{folder / NOTES} is damaged: {error}") from error


class LatentShard:
    """One shard, mapped into memory by each process when it first reads it.

    Attributes:
        path: Its file.
        size: Number of images.

    Raises:
        ValueError: If the file is missing, damaged, or of another encoding.
    """

    def __init__(self, folder: Path, split: Split, index: int, notes: LatentNotes) -> None:
        self.path = shard_path(folder, split, index)
        self._notes, self._parts = notes, notes.parts(split)
        self._file: Any = None
        self.size = int(self._open().get_slice(LABELS).get_shape()[0])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None}  # another process maps the file itself

    def read(self, name: str, row: int) -> Tensor:
        """Read one row of a tensor, as it is stored.

        Raises:
            ValueError: If the file is missing, damaged, or has changed.
        """
        if self._file is None:
            self._file = self._open()
        try:
            return self._file.get_slice(name)[row]
        except (SafetensorError, IndexError) as error:
            raise ValueError(f"{self.path} is damaged ({error}): {REMEDY}") from error

    def label(self, row: int) -> int:
        """Read the class index of one image.

        Raises:
            ValueError: As `read`, or if there is no such class.
        """
        label, classes = int(self.read(LABELS, row)), len(self._notes.class_names)
        if not 0 <= label < classes:
            raise ValueError(
                f"{self.path} is damaged: image {row} has class {label}, expected 0 to "
                f"{classes - 1}"
            )
        return label

    def _open(self) -> Any:
        """Open the file and check that it holds the tensors that latents.json describes."""
        try:
            file = safe_open(self.path, framework="pt")
        except FileNotFoundError:
            raise ValueError(f"{self.path} is missing: run the same onescan encode again") from None
        except SafetensorError as error:
            raise ValueError(f"{self.path} is damaged ({error}): {REMEDY}") from error
        if missing := {LABELS, *self._parts} - set(file.keys()):
            raise ValueError(f"{self.path} has no tensor {min(missing)!r}: {REMEDY}")
        labels, format = file.get_slice(LABELS), self._notes.format
        size = labels.get_shape()[0] if labels.get_shape() else 0
        latents = (DTYPES[self._notes.dtype], [size, format.channels, format.height, format.width])
        for name in (LABELS, *self._parts):
            expected = ("I64", [size]) if name == LABELS else latents
            part = file.get_slice(name)
            if (actual := (part.get_dtype(), part.get_shape())) != expected:
                raise ValueError(
                    f"{self.path}: {name} is {actual[0]} {actual[1]}, expected {expected[0]} "
                    f"{expected[1]}: {REMEDY}"
                )
        return file


# The dataset


@dataclass(frozen=True, kw_only=True)
class LatentsConfig(DataConfig):
    """Latents written by `onescan encode`."""

    path: str
    """Folder of the latents."""
    sample: bool = True
    """Sample each training latent from the VAE's posterior; otherwise use its mean."""
    flip: bool | None = None
    """Randomly flip training images; None does so if flipped images were encoded."""
    vae: str | None = None
    """VAE to decode with, if it has moved since encoding; None uses the recorded one."""

    def build(self) -> "LatentSplits":
        """Open the latents, which are read when a batch needs them.

        Raises:
            ValueError: If the folder does not exist, encoding has not finished, a file is missing
                or damaged, or `flip` is on and flipped images were not encoded.
        """
        folder = Path(self.path).expanduser()
        if not folder.is_dir():
            raise ValueError(f"data.path is {self.path!r}: there is no such folder")
        notes = read_notes(folder)
        if notes.shards is None:
            raise ValueError(
                f"data.path is {self.path!r}, whose encoding has not finished: run the same "
                "onescan encode again to resume it"
            )
        if self.flip and not notes.flip:
            raise ValueError(
                f"data.flip is on, but {self.path} was encoded without flipped images: turn it "
                "off, or encode again with flipped images"
            )
        format = notes.format if self.vae is None else replace(notes.format, vae=self.vae)
        train, test = (
            LatentSet(
                shards=_open_shards(folder, split, notes, getattr(notes.shards, split)),
                format=format,
                sample=self.sample,
                flip=split == "train" and (notes.flip if self.flip is None else self.flip),
            )
            for split in SPLITS
        )
        return LatentSplits(
            train=train, test=test, class_names=notes.class_names, format=format, notes=notes.notes
        )


def _open_shards(
    folder: Path, split: Split, notes: LatentNotes, sizes: Sequence[int]
) -> tuple[LatentShard, ...]:
    shards = tuple(LatentShard(folder, split, index, notes) for index in range(len(sizes)))
    for shard, size in zip(shards, sizes, strict=True):
        if shard.size != size:
            raise ValueError(
                f"{shard.path} holds {shard.size} images, expected {size}: it belongs to another "
                "encoding"
            )
    return shards


@dataclass(frozen=True, kw_only=True)
class LatentSet(DataSet):
    """Latents with classes: a batch is (latents, labels), latents scaled as the model reads them.

    An example with a seed is sampled from the posterior of its image or of the flipped image; one
    without a seed is the posterior's mean.

    Attributes:
        shards: The files.
        format: Format of the latents.
        sample: Whether to sample; else an example with a seed is a mean too.
        flip: Whether an example with a seed may be of the flipped image.
    """

    decodes = True  # reads from disk, as latents rarely fit into memory
    shards: tuple[LatentShard, ...]
    format: LatentFormat
    sample: bool
    flip: bool

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        """Read a batch.

        Raises:
            ValueError: If a shard is missing or damaged; names it.
        """
        latents, labels = zip(*map(self._read, examples), strict=True)
        return LoadedBatch((self.format.scaled(torch.stack(latents)), torch.tensor(labels)))

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(shard.size for shard in self.shards))

    def _read(self, example: Example) -> tuple[Latent, int]:
        index = bisect_right(self._ends, example.source)
        shard = self.shards[index]
        row = example.source - (self._ends[index] - shard.size)
        if example.seed is None:
            return shard.read(MEAN, row).float(), shard.label(row)
        generator = torch.Generator().manual_seed(example.seed)
        flipped = bool(torch.randint(2, (), generator=generator)) and self.flip
        mean, std = (FLIPPED_MEAN, FLIPPED_STD) if flipped else (MEAN, STD)
        latent = shard.read(mean, row).float()
        if self.sample:
            noise = torch.randn(latent.shape, generator=generator)
            latent = latent + shard.read(std, row).float() * noise
        return latent, shard.label(row)


@dataclass(frozen=True, kw_only=True)
class LatentSplits(Splits):
    """Training and held-out latents, and how to read both."""

    train: LatentSet
    test: LatentSet
    class_names: tuple[str, ...]
    format: LatentFormat
