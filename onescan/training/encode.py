"""Images encoded once by a VAE, so that training reads latents and never sees the VAE."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from tqdm import tqdm

from onescan import __version__, configs
from onescan.checkpoint.weights import save_weights
from onescan.checks import check_choice, check_positive
from onescan.data import (
    DataSet,
    Example,
    ImageDatasetConfig,
    ImageFormat,
    ImageSet,
    ImageStream,
    LoadedBatch,
    batched,
)
from onescan.data.latents.shards import (
    DTYPES,
    LABELS,
    MEAN,
    MIRRORED_MEAN,
    MIRRORED_STD,
    NOTES,
    SPLITS,
    STD,
    LatentDtype,
    LatentNotes,
    LatentShard,
    Split,
    read_notes,
    shard_path,
)
from onescan.data.latents.vae import load_vae
from onescan.tasks import BatchPlan
from onescan.training.folder import write_json
from onescan.training.latents_folder import alone, check_folder, claim, identity
from onescan.training.loader import Loader, choose_workers
from onescan.training.ranks import Ranks, choose_device
from onescan.training.run import Precision
from onescan.training.vae import Encoder, digest, latent_format


@dataclass(frozen=True, kw_only=True)
class EncodeConfig:
    """How images are encoded to latents."""

    vae: str
    """Folder or hub name of a diffusers AutoencoderKL."""
    flip: bool = True
    """Also encode the horizontally flipped training images."""
    dtype: LatentDtype = "float16"
    """Data type of the latents on disk."""
    precision: Precision = "float32"
    """Precision of the VAE's matrix products."""
    shard_size: int = 4096
    """Images per file."""
    batch_size: int = 32
    """Images per batch; affects memory, and results only by rounding."""

    def check(self) -> None:
        """Raise ValueError for a field out of range."""
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("precision", self.precision, get_args(Precision))
        check_positive(shard_size=self.shard_size, batch_size=self.batch_size)


def encode(
    data: ImageDatasetConfig,
    asked: EncodeConfig,
    out: Path,
    *,
    device: str = "auto",
    workers: int | None = None,
    progress: bool = False,
) -> LatentNotes:
    """Encode training and held-out images into a folder, or go on where that was interrupted.

    Each file is whole or not there, and those that are there are kept. On a CPU, an encoding that
    was interrupted gives the bits of one that was not.

    Args:
        data: the images; training images are read as those that are judged, without a random crop.
        asked: by which VAE, and how.
        out: the folder, for `LatentsConfig`.
        device: as `choose_device` has it.
        workers: processes that read images; None is one per core.
        progress: draw bars on stderr.

    Raises:
        ImportError: diffusers is not installed, or datasets.
        ValueError: a field is out of range; the folder holds something else, or another process is
            at work in it; the images or the VAE cannot be read, or do not fit each other; latents
            are not finite.
        OSError: the folder cannot be written to.
    """
    asked.check()
    check_folder(out)
    splits = data.build()
    if isinstance(splits.train, ImageStream):
        raise ValueError("data.streaming is on, expected it off: images are looked up by place")
    sets = {split: getattr(splits, split) for split in SPLITS}
    vae = load_vae(asked.vae)
    notes = LatentNotes(
        onescan=__version__,
        format=latent_format(vae, asked.vae, splits.format),
        class_names=splits.class_names,
        dtype=asked.dtype,
        flip=asked.flip,
    )
    encoded = identity(
        data,
        vae_digest=digest(vae),
        precision=asked.precision,
        shard_size=asked.shard_size,
        images={split: len(images) for split, images in sets.items()},
    )
    written = configs.to_dict(notes) | {"encoded": encoded}
    encoder = Encoder(vae, asked.precision, choose_device(device, Ranks()))
    with alone(out):
        claim(out, written)
        sizes = {}
        for split, images in sets.items():
            readable = _Readable(images, splits.format, skip=data.on_error == "skip")
            work = _Work(split, readable, notes, asked, out)
            with _bar(work, shown=progress) as bar:
                work.encode(encoder, choose_workers(workers, readable), bar)
            sizes[split] = [work.count(shard) for shard in range(work.shards)]
            if not sum(sizes[split]):
                raise ValueError(f"none of the images of {split} can be read")
        write_json(out / NOTES, written | {"shards": sizes})
    return read_notes(out)


@dataclass(frozen=True)
class _Readable(DataSet):
    """Images, of which those that cannot be read are left out, even where none of a batch can be.

    Attributes:
        images: all of them.
        format: theirs.
        skip: whether any may be left out.
    """

    images: ImageSet
    format: ImageFormat
    skip: bool
    decodes = True

    def __len__(self) -> int:
        return len(self.images)

    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        try:
            return self.images.read(examples)
        except ValueError as error:
            if not self.skip:
                raise
            form = self.format
            none = torch.zeros(0, form.channels, form.height, form.width, dtype=torch.uint8)
            return LoadedBatch((none, torch.zeros(0, dtype=torch.long)), (str(error),))


@dataclass(frozen=True)
class _Work:
    """What is to be done for one split.

    Attributes:
        split: which.
        images: to be encoded, in their stored order.
        notes: what is to be in a shard.
        asked: how it is to be done.
        out: where shards go.
    """

    split: Split
    images: _Readable
    notes: LatentNotes
    asked: EncodeConfig
    out: Path

    @property
    def shards(self) -> int:
        return -(-len(self.images) // self.asked.shard_size)

    def path(self, shard: int) -> Path:
        return shard_path(self.out, self.split, shard)

    def count(self, shard: int) -> int:
        """Count the images in a shard; raises ValueError for one that is damaged."""
        return LatentShard(self.out, self.split, shard, self.notes).size

    def batches(self, shard: int) -> Iterator[list[Example]]:
        """Yield a shard's examples; batches end with their shard, so each is encoded alike."""
        first, size = shard * self.asked.shard_size, self.asked.shard_size
        examples = (e for e, _ in self.images.examples(seed=None, start=first))
        yield from batched(islice(examples, size), self.asked.batch_size)

    def encode(self, encoder: Encoder, workers: int, bar: "tqdm[Any]") -> None:
        """Write the shards that are missing."""
        missing = self._missing()
        plan = (BatchPlan(batch, None) for shard in missing for batch in self.batches(shard))
        done = self.shards - len(missing)
        bar.update(min(done * self.asked.shard_size, len(self.images)))
        loader = Loader(self.images, plan, workers=workers, pin=encoder.device.type == "cuda")
        with closing(loader):
            for shard in missing:
                parts = []
                for batch in self.batches(shard):
                    images, labels = next(loader)
                    parts.append(self._encoded(encoder, images, labels))
                    bar.update(min(len(batch), len(self.images) - bar.n))
                self._write(shard, parts)

    def _missing(self) -> list[int]:
        """Find the shards to be written; those that are there had better be whole."""
        there = {shard for shard in range(self.shards) if self.path(shard).exists()}
        for shard in there:
            self.count(shard)
        return [shard for shard in range(self.shards) if shard not in there]

    def _encoded(self, encoder: Encoder, images: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        if not len(labels):  # none can be read
            return self._nothing()
        said = dict(zip((MEAN, STD), encoder(images), strict=True))
        if MIRRORED_MEAN in self.notes.parts(self.split):
            mirrored = encoder(images.flip(-1))
            said |= dict(zip((MIRRORED_MEAN, MIRRORED_STD), mirrored, strict=True))
        dtype = getattr(torch, self.notes.dtype)
        return {LABELS: labels} | {name: x.to(dtype).cpu() for name, x in said.items()}

    def _nothing(self) -> Mapping[str, Tensor]:
        form, dtype = self.notes.format, getattr(torch, self.notes.dtype)
        latents = torch.zeros(0, form.channels, form.height, form.width, dtype=dtype)
        parts = self.notes.parts(self.split)
        return {LABELS: torch.zeros(0, dtype=torch.long), **dict.fromkeys(parts, latents)}

    def _write(self, shard: int, parts: list[Mapping[str, Tensor]]) -> None:
        tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        for name, values in tensors.items():
            if not values.isfinite().all():
                raise ValueError(
                    f"dtype is {self.notes.dtype!r}, expected one of larger range: {name} does not "
                    "fit into it"
                )
        save_weights(self.path(shard), tensors, {})


@contextmanager
def _bar(work: _Work, *, shown: bool) -> Iterator["tqdm[Any]"]:
    # where stderr is no screen there is none: a log would keep every line of it
    with tqdm(
        total=len(work.images),
        unit=" images",
        desc=f"encoding {work.split}",
        disable=None if shown else True,
    ) as bar:
        yield bar
