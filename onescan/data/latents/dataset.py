"""Latents to learn from: a fresh sample of each image's posterior whenever it is read."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from onescan.data.base import DataConfig, DataSet, Example, LoadedBatch
from onescan.data.latents.format import LatentFormat
from onescan.data.latents.shards import (
    MEAN,
    MIRRORED_MEAN,
    MIRRORED_STD,
    STD,
    LatentNotes,
    LatentShard,
    Split,
    read_notes,
    shard_path,
)

Latent = Float[Tensor, "channels height width"]


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
        """Open the latents; they are read when a batch needs them.

        Raises:
            ValueError: there are none, not all are there, a file is missing or damaged, or flip
                images are asked for and were not encoded.
        """
        folder = Path(self.path).expanduser()
        if not folder.is_dir():
            raise ValueError(f"data.path is {self.path!r}: there is no such folder")
        notes = read_notes(folder)
        if notes.shards is None:
            raise ValueError(
                f"data.path is {self.path!r}, which is not encoded to its end: the same "
                "onescan encode goes on with it"
            )
        if self.flip and not notes.flip:
            raise ValueError(
                f"data.flip is on, but {self.path} was encoded without mirror images, "
                "expected None or off"
            )
        form = notes.format if self.vae is None else replace(notes.format, vae=self.vae)
        train = LatentSet(
            shards=_open(folder, "train", notes, notes.shards.train),
            format=form,
            sample=self.sample,
            mirror=notes.flip if self.flip is None else self.flip,
        )
        test = replace(train, shards=_open(folder, "test", notes, notes.shards.test), mirror=False)
        return LatentSplits(train=train, test=test, class_names=notes.class_names, format=form)


@dataclass(frozen=True, kw_only=True)
class LatentSet(DataSet):
    """Latents with classes: a batch is (latents, labels), latents scaled as the model reads them.

    An example with a seed is a sample of its image's posterior, or of its mirror image's, both
    drawn from the seed; one without is the posterior's mean.

    Attributes:
        shards: where they are.
        format: of the latents.
        sample: whether a seed draws a sample; else it is the mean too.
        mirror: whether a seed chooses between the image and its mirror image.
    """

    decodes = True  # from a disk, as they seldom fit into memory
    shards: tuple[LatentShard, ...]
    format: LatentFormat
    sample: bool
    mirror: bool

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        """Read a batch.

        Raises:
            ValueError: a shard is missing or damaged; names it.
        """
        read = [self._read(example) for example in examples]
        latents = torch.stack([latent for latent, _ in read])
        return LoadedBatch(
            (self.format.scaled(latents), torch.tensor([label for _, label in read]))
        )

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(shard.size for shard in self.shards))

    def _read(self, example: Example) -> tuple[Latent, int]:
        index = bisect_right(self._ends, example.source)
        shard = self.shards[index]
        row = example.source - (self._ends[index] - shard.size)
        if example.seed is None:
            return shard.latents(MEAN, row).float(), shard.label(row)
        chance = torch.Generator().manual_seed(example.seed)
        mirrored = bool(torch.randint(2, (), generator=chance)) and self.mirror
        mean, std = (MIRRORED_MEAN, MIRRORED_STD) if mirrored else (MEAN, STD)
        latent = shard.latents(mean, row).float()
        if self.sample:
            noise = torch.randn(latent.shape, generator=chance)
            latent = latent + shard.latents(std, row).float() * noise
        return latent, shard.label(row)


@dataclass(frozen=True, kw_only=True)
class LatentSplits:
    """Latents to learn from, held-out latents to be judged on, and how to read both."""

    train: LatentSet
    test: LatentSet
    class_names: tuple[str, ...]
    format: LatentFormat


def _open(
    folder: Path, split: Split, notes: LatentNotes, sizes: Sequence[int]
) -> tuple[LatentShard, ...]:
    shards = tuple(LatentShard(folder, split, index, notes) for index in range(len(sizes)))
    for index, (shard, size) in enumerate(zip(shards, sizes, strict=True)):
        if shard.size != size:
            raise ValueError(
                f"{shard_path(folder, split, index)} holds {shard.size} images, expected {size}: "
                "it is of another encoding"
            )
    return shards
