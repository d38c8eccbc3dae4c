"""Encode images once with a VAE, so that training reads latents and does not need the VAE."""

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from onescan import __version__, configs
from onescan.checkpoint.files import PARTIAL, check_writable
from onescan.checkpoint.weights import save_weights
from onescan.checks import check_choice, check_positive
from onescan.experiments.data import (
    Example,
    ImageDatasetConfig,
    ImageSet,
    ImageStream,
    batched,
)
from onescan.experiments.data.latents import (
    DTYPES,
    FLIPPED_MEAN,
    LABELS,
    NOTES,
    SPLITS,
    LatentDtype,
    LatentNotes,
    LatentShard,
    Split,
    read_json,
    read_notes,
    shard_path,
)
from onescan.experiments.locks import LOCK, locked
from onescan.experiments.tasks import BatchPlan
from onescan.experiments.training.config import Precision
from onescan.experiments.training.data import Loader, choose_workers
from onescan.experiments.training.distributed import Ranks, choose_device
from onescan.experiments.training.folder import write_json
from onescan.experiments.training.optim import autocast
from onescan.inputs import ImageFormat
from onescan.inputs.image_files import AnyPixels
from onescan.inputs.images import unit_pixels
from onescan.inputs.latents import LatentFormat, load_vae
from onescan.progress import progress_bar

# Fields of the images' config that do not affect latents, or that latents.json records elsewhere.
IRRELEVANT = (
    *("mean", "std", "train_crop", "on_error", "class_names"),
    *("streaming", "train_examples", "shuffle_block"),
)
IRRELEVANT_NOTES = ("onescan", "shards", "notes")
MAX_DIFFERENCES = 3  # in an error message


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
        """Raise ValueError if a field is out of range."""
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("precision", self.precision, get_args(Precision))
        check_positive(shard_size=self.shard_size, batch_size=self.batch_size)


def encode(
    data: ImageDatasetConfig,
    config: EncodeConfig,
    out: Path,
    *,
    device: str = "auto",
    workers: int | None = None,
    progress: bool = False,
) -> LatentNotes:
    """Encode training and held-out images into a folder, or resume an interrupted encoding.

    Files are written atomically, and existing ones are kept. On a CPU, a resumed encoding gives
    the same bits as an uninterrupted one.

    Args:
        data: The images. Training images are read like test images, without a random crop.
        config: VAE and settings.
        out: Folder for `LatentsConfig`.
        device: Device, as for `choose_device`.
        workers: Processes that read images; None starts one per core.
        progress: Whether to draw progress bars on stderr.

    Raises:
        ImportError: If diffusers or datasets is not installed.
        ValueError: If a field is out of range; if the folder holds something else, or another
            process is encoding into it; if the images or the VAE cannot be read or do not fit each
            other; or if latents are not finite.
        OSError: If the folder cannot be written to.
    """
    config.check()
    _check_folder(out)
    splits = data.build()
    if isinstance(splits.train, ImageStream):
        raise ValueError("data.streaming is on, expected off, because images are read by index")
    sets = {split: getattr(splits, split) for split in SPLITS}
    vae = load_vae(config.vae)
    noted = list(splits.notes)
    notes = LatentNotes(
        onescan=__version__,
        format=_latent_format(vae, config.vae, splits.format),
        class_names=splits.class_names,
        dtype=config.dtype,
        flip=config.flip,
    )
    contents = configs.to_dict(notes)
    contents["encoded"] = {
        "source": _source(data),
        "vae_digest": _digest(vae),
        "precision": config.precision,
        "shard_size": config.shard_size,
        "images": {split: len(images) for split, images in sets.items()},
    }
    encoder = Encoder(vae, config.precision, choose_device(device, Ranks()))
    with _locked(out):
        _claim(out, contents)
        shards = {}
        for split, images in sets.items():
            work = _SplitEncoder(images, split, notes, config, out)
            work.encode(encoder, choose_workers(workers, images), progress=progress)
            shards[split] = work.sizes(range(work.shards))
            if not sum(shards[split]):
                raise ValueError(f"none of the images in the split {split} can be read")
            if unreadable := len(images) - sum(shards[split]):
                noted.append(
                    f"{unreadable:,} of {len(images):,} images in the split {split} cannot be read"
                )
        write_json(out / NOTES, contents | {"shards": shards, "notes": noted})
    return read_notes(out)


@dataclass(frozen=True)
class _SplitEncoder:
    """Encodes one split in its stored order, shard by shard."""

    images: ImageSet
    split: Split
    notes: LatentNotes
    config: EncodeConfig
    out: Path

    @property
    def shards(self) -> int:
        return -(-len(self.images) // self.config.shard_size)

    def sizes(self, shards: Sequence[int]) -> list[int]:
        """Count the images in shards; raises ValueError if one is damaged."""
        return [LatentShard(self.out, self.split, shard, self.notes).size for shard in shards]

    def encode(self, encoder: "Encoder", workers: int, *, progress: bool) -> None:
        """Write the shards that are missing, after checking those that exist."""
        exists = [shard_path(self.out, self.split, shard).exists() for shard in range(self.shards)]
        self.sizes([shard for shard in range(self.shards) if exists[shard]])
        missing = [shard for shard in range(self.shards) if not exists[shard]]
        plan = (BatchPlan(batch, None) for shard in missing for batch in self._batches(shard))
        loader = Loader(self.images, plan, workers=workers, pin=encoder.device.type == "cuda")
        bar = progress_bar(
            len(self.images),
            initial=min(sum(exists) * self.config.shard_size, len(self.images)),
            unit=" images",
            desc=f"encoding {self.split}",
            disable=not progress,
        )
        with closing(loader), bar:
            for shard in missing:
                parts = []
                for batch in self._batches(shard):
                    parts.append(self._encode_batch(encoder, *next(loader)))
                    bar.update(min(len(batch), len(self.images) - bar.n))
                self._write(shard, parts)

    def _batches(self, shard: int) -> Iterator[list[Example]]:
        """Yield a shard's batches, which never span shards, so that a resumed one is the same."""
        size = self.config.shard_size
        examples = (e for e, _ in self.images.examples(seed=None, start=shard * size))
        return batched(islice(examples, size), self.config.batch_size)

    def _encode_batch(
        self, encoder: "Encoder", images: Tensor, labels: Tensor
    ) -> Mapping[str, Tensor]:
        names, format = self.notes.parts(self.split), self.notes.format
        if len(labels):
            values = encoder(images)
            if FLIPPED_MEAN in names:
                values = (*values, *encoder(images.flip(-1)))
        else:  # no image of the batch could be read
            values = (torch.zeros(0, format.channels, format.height, format.width),) * len(names)
        dtype = getattr(torch, self.notes.dtype)
        encoded = {name: x.to(dtype).cpu() for name, x in zip(names, values, strict=True)}
        return {LABELS: labels} | encoded

    def _write(self, shard: int, parts: Sequence[Mapping[str, Tensor]]) -> None:
        tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        for name, values in tensors.items():
            if not values.isfinite().all():
                raise ValueError(
                    f"dtype is {self.notes.dtype!r}, which cannot represent all values of {name}, "
                    "expected one with a larger range"
                )
        save_weights(shard_path(self.out, self.split, shard), tensors, {})


# The VAE


class Encoder:
    """A VAE on its device, which returns mean and standard deviation of the posterior."""

    def __init__(self, vae: Any, precision: Precision, device: torch.device) -> None:
        self.vae = vae.to(device)
        self.precision = precision
        self.device = device

    @torch.no_grad()
    def __call__(self, images: AnyPixels) -> tuple[Tensor, ...]:
        """Encode a batch of bytes, or of floats from 0 to 1, to float32.

        Raises:
            ValueError: If the latents are not finite.
        """
        pixels = 2 * unit_pixels(images.to(self.device, non_blocking=True)) - 1
        with autocast(self.precision, self.device):
            posterior = self.vae.encode(pixels).latent_dist
        mean, std = posterior.mean.float(), (posterior.logvar.float() / 2).exp()
        if not (mean.isfinite().all() and std.isfinite().all()):
            raise ValueError(
                f"precision is {self.precision}, in which the latents are not finite"
                + ("; try float32" if self.precision != "float32" else "; check the VAE's weights")
            )
        return mean, std


def _latent_format(vae: Any, name: str, images: ImageFormat) -> LatentFormat:
    """Return the format of a VAE's latents of images; a local VAE by its absolute path.

    Raises:
        ValueError: If the VAE expects other channels, or its stride does not divide a side.
    """
    channels, stride = vae.config.in_channels, 2 ** (len(vae.config.block_out_channels) - 1)
    if images.channels != channels:
        raise ValueError(
            f"data.channels is {images.channels}, expected {channels}, the input channels of {name}"
        )
    if images.height % stride or images.width % stride:
        raise ValueError(
            f"data.image_size is {(images.height, images.width)}, expected multiples of {stride}, "
            f"the stride of {name}"
        )
    path = Path(name).expanduser()
    return LatentFormat(
        channels=vae.config.latent_channels,
        height=images.height // stride,
        width=images.width // stride,
        scale=float(vae.config.scaling_factor),
        shift=float(vae.config.shift_factor or 0),
        vae=str(path.absolute()) if path.is_dir() else name,
    )


def _digest(vae: Any) -> str:
    """Return a checksum of a VAE's weights."""
    total = blake2b(digest_size=16)
    for name, weight in sorted(vae.state_dict().items()):
        total.update(name.encode())
        total.update(weight.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


# The folder


def _source(data: ImageDatasetConfig) -> dict[str, Any]:
    """Return the fields of the images' config that determine the latents."""
    source = {name: x for name, x in configs.to_dict(data).items() if name not in IRRELEVANT}
    path = Path(data.path).expanduser()
    return source | ({"path": str(path.absolute())} if path.exists() else {})


def _check_folder(out: Path) -> None:
    """Raise ValueError if a path cannot be written, or is a folder of anything but latents."""
    check_writable("out", out, folder=True)
    if not out.exists() or (out / NOTES).exists():
        return
    if others := [p.name for p in out.iterdir() if p.name != LOCK and p.suffix != PARTIAL]:
        raise ValueError(
            f"out is '{out}', which holds {min(others)!r} and no latents; choose another folder"
        )


def _claim(out: Path, contents: dict[str, Any]) -> None:
    """Write latents.json, unless the folder has shards; these must be of the same encoding.

    Raises:
        ValueError: If they are of another encoding; names the differences.
    """
    if not any(out.glob("*.safetensors")):
        write_json(out / NOTES, contents)
        return
    saved, current = (_flatten(notes) for notes in (read_json(out), contents))
    differences = [
        f"{name} is {reprlib.repr(saved.get(name))} in the folder and "
        f"{reprlib.repr(current.get(name))} in this call"
        for name in {**saved, **current}
        if saved.get(name) != current.get(name) and name.partition(".")[0] not in IRRELEVANT_NOTES
    ]
    if differences:
        more = len(differences) - MAX_DIFFERENCES
        raise ValueError(
            f"{out} holds other latents: {', '.join(differences[:MAX_DIFFERENCES])}"
            + (f", and {more} more" if more > 0 else "")
            + "; choose another folder"
        )


def _flatten(data: Any, path: str = "") -> dict[str, Any]:
    """Flatten nested JSON objects to one with dotted names."""
    if not isinstance(data, dict):
        return {path: data}
    parts = [_flatten(value, f"{path}.{name}" if path else name) for name, value in data.items()]
    return {name: value for part in parts for name, value in part.items()}


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Hold the lock of a folder.

    Raises:
        ValueError: If another process holds it.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(out))
        except ValueError as error:
            raise ValueError(
                f"another process is encoding into {out}: wait until it has finished, or choose "
                "another folder"
            ) from error
        yield
