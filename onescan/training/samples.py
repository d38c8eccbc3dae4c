"""Images that a denoiser makes, on the disk: one grid, a file for each, or one array."""

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL.Image import Image
from tqdm import tqdm

from onescan.checkpoint.files import write_atomically
from onescan.checks import check_positive
from onescan.data.image_grid import ImageBytes, as_image, grid_columns, grid_of_bytes, image_bytes
from onescan.data.order import batched, derive_seed
from onescan.models.denoiser import STEPS

if TYPE_CHECKING:
    from onescan.integrations.diffusers import DenoiserPipeline

GRID, ARRAY = ".png", ".npz"
LONGEST_NAME = 80  # of a class, in a file's name
UNFIT = r"[^\w.-]+"  # for a file's name


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """What images to generate."""

    labels: tuple[int, ...] = ()
    """Class numbers to generate; empty cycles through all classes."""
    num_images: int = 16
    """Images per label, or images in total if labels is empty."""
    steps: int = 50
    """Denoising steps per image."""
    guidance_scale: float = 1.0
    """Scale of classifier-free guidance; 1 disables it."""
    seed: int = 0
    """Random seed."""
    size: tuple[int, int] | None = None
    """Height and width of the images; None uses the training size."""
    batch_size: int = 64
    """Images per batch; affects memory, and results only by rounding."""

    def check(self) -> None:
        """Raise ValueError for a number out of range."""
        check_positive(num_images=self.num_images, batch_size=self.batch_size)
        if not 1 <= self.steps <= STEPS:
            raise ValueError(f"steps is {self.steps}, expected 1 to {STEPS}")
        if not 0 <= self.guidance_scale < math.inf:
            raise ValueError(f"guidance_scale is {self.guidance_scale}, expected 0 or more")
        if self.size is not None and min(self.size) < 1:
            raise ValueError(f"size is {self.size}, expected a height and a width above 0")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}, expected 0 or more")


def check_out(out: Path) -> None:
    """Raise ValueError for a name that says nothing that could be written, or is taken.

    Raises:
        ValueError: it is one, or nothing can be written where it says.
    """
    if out.suffix not in ("", GRID, ARRAY):
        raise ValueError(
            f"out is '{out}', expected a name that ends in {GRID} for one grid or in {ARRAY} for "
            "an array, or a folder for one file each"
        )
    if out.suffix and out.is_dir():
        raise ValueError(f"out is '{out}', which is a folder, expected a file's name")
    if not out.suffix and out.exists() and not out.is_dir():
        raise ValueError(f"out is '{out}', which is a file, expected a folder")
    above = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    above = above.parent if out.suffix and above == out else above
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ValueError(f"out is '{out}', but nothing can be written to {above}")


def sample_seed(seed: int, index: int) -> int:
    """What the chance of one image comes from, however many are made."""
    return derive_seed(seed, "sample", index)


def write_samples(
    pipeline: "DenoiserPipeline", asked: SampleConfig, out: Path, *, progress: bool = False
) -> int:
    """Make images and write them; no file is ever there in part.

    Image i comes from (seed, i) and its label alone.

    Args:
        pipeline: on its device.
        asked: what to make.
        out: x.png for one grid; x.npz for "arr_0", bytes [N, height, width, channels], and where
            there are classes "arr_1", their numbers; or a folder for one PNG each.
        progress: draw a bar on stderr.

    Returns:
        How many were made.

    Raises:
        ValueError: what `check_out`, the config and the pipeline refuse.
        OSError: it cannot be written.
    """
    check_out(out)
    asked.check()
    labels = list(asked.labels) or list(range(pipeline.num_classes))  # in turn
    count = asked.num_images * max(1, len(asked.labels))
    batches = _made(pipeline, asked, labels, count, progress=progress)
    if not out.suffix:
        for first, images in batches:
            _write_each(out, first, images, labels, pipeline.names, seed=asked.seed)
        return count
    images = _together(batches, count)
    if out.suffix == GRID:
        _write_png(out, grid_of_bytes(images, grid_columns(count, max(1, len(labels)))))
        return count
    arrays = {"arr_0": images.numpy()}
    if labels:
        arrays["arr_1"] = np.array([labels[i % len(labels)] for i in range(count)])
    write_atomically(out, lambda partial: _write_arrays(partial, arrays))
    return count


def _made(
    pipeline: Any, asked: SampleConfig, labels: list[int], count: int, *, progress: bool
) -> Iterator[tuple[int, ImageBytes]]:
    """Yield each batch with the number of its first image."""
    height, width = asked.size or (None, None)
    in_batches = -(-count // asked.batch_size)
    interval_s = 0.5 if sys.stderr.isatty() else 30  # a log keeps every line, a screen the last
    with tqdm(
        total=in_batches * asked.steps,
        unit=" steps",
        mininterval=interval_s,
        maxinterval=interval_s,
        disable=not progress,
    ) as bar:
        for numbers in batched(range(count), asked.batch_size):
            pixels = pipeline(
                class_labels=[labels[i % len(labels)] for i in numbers] if labels else None,
                num_inference_steps=asked.steps,
                guidance_scale=asked.guidance_scale,
                generator=[_generator(asked.seed, i) for i in numbers],
                height=height,
                width=width,
                output_type="pt",
                callback=lambda _: bar.update(),
            ).images
            yield numbers[0], image_bytes(pixels)


def _together(batches: Iterator[tuple[int, ImageBytes]], count: int) -> ImageBytes:
    """All batches as one tensor, of which memory holds no second one."""
    first, images = next(batches)
    together = images.new_empty(count, *images.shape[1:])
    together[first : first + len(images)] = images
    for first, images in batches:
        together[first : first + len(images)] = images
    return together


def _generator(seed: int, index: int) -> torch.Generator:
    return torch.Generator().manual_seed(sample_seed(seed, index))


def _write_each(
    folder: Path,
    first: int,
    images: ImageBytes,
    labels: list[int],
    names: dict[int, str],
    *,
    seed: int,
) -> None:
    for i, image in enumerate(images, first):
        label = labels[i % len(labels)] if labels else None
        name = "image" if label is None else names.get(label, str(label))
        spelt = re.sub(UNFIT, "_", name)[:LONGEST_NAME]
        _write_png(folder / f"{spelt}-seed-{seed}-{i:05}.png", as_image(image))


def _write_png(path: Path, image: Image) -> None:
    write_atomically(path, lambda partial: image.save(partial, format="png"))


def _write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    with path.open("wb") as file:  # given a name, numpy would end it in .npz
        np.savez(file, **arrays)
