"""Labelled images in memory, the format a classifier was trained on, and image files in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from onescan.data.base import DataSet, Example, Format, LoadedBatch
from onescan.data.crop import Box, Crop, centre_box
from onescan.data.decode import AnyPixels, Pixels, decode
from onescan.shapes import Labels

MOST_PIXELS = 1 << 28  # of an image that a model reads: 3 GiB in floats


def unit_pixels(pixels: AnyPixels) -> Pixels:
    """Turn bytes into floats from 0 to 1; leave floats as they are."""
    return pixels if pixels.is_floating_point() else pixels.float() / 255


@dataclass(frozen=True, kw_only=True)
class ImageFormat(Format):
    """The images a model was trained on: their size, and the constants that standardize them."""

    channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: float | None = None
    """Part of the shorter side that a new image's middle keeps; None stretches all of it."""

    def __post_init__(self) -> None:
        size = (self.height, self.width)
        if min(size) < 1 or self.height * self.width > MOST_PIXELS:
            raise ValueError(
                f"the image size is {size}, expected a height and a width above 0 and at most "
                f"{MOST_PIXELS:,} pixels"
            )
        if self.channels not in (1, 3):
            raise ValueError(f"channels is {self.channels}, expected 1 or 3")
        for name in ("mean", "std"):
            if len(numbers := getattr(self, name)) != self.channels:
                raise ValueError(f"{name} is {numbers}, expected {self.channels} number(s)")
        if min(self.std) <= 0:
            raise ValueError(f"std is {self.std}, expected numbers above 0")
        if self.crop is not None and not 0 < self.crop <= 1:
            raise ValueError(f"crop is {self.crop}, expected above 0 and at most 1, or None")

    def box(self, width: int, height: int) -> Box:
        """Say which part of an image is shown to a model that is judged or used."""
        if self.crop is None:
            return 0.0, 0.0, float(width), float(height)
        return centre_box(width, height, aspect=self.width / self.height, part=self.crop)

    def decode(self, file: Path | BytesIO, crop: Crop | None = None) -> AnyPixels:
        """Read an image file, as `decode` does; without a crop, the part that `box` says."""
        return decode(
            file,
            channels=self.channels,
            height=self.height,
            width=self.width,
            crop=crop or self.box,
        )

    def standardize(self, pixels: Pixels) -> Pixels:
        """Turn pixels from 0 to 1 into what the model reads.

        >>> grey = ImageFormat(channels=1, height=1, width=2, mean=(0.5,), std=(0.5,))
        >>> grey.standardize(torch.tensor([[[0.0, 1.0]]])).tolist()
        [[[-1.0, 1.0]]]
        """
        return (pixels - _per_channel(self.mean, pixels)) / _per_channel(self.std, pixels)

    def model_input(self, pixels: AnyPixels) -> Pixels:
        """Turn a data set's pixels, bytes or floats from 0 to 1, into what the model reads."""
        return self.standardize(unit_pixels(pixels))

    def pixels(self, made: Pixels) -> Pixels:
        """Turn what a model makes, standardized as what it reads, into pixels from 0 to 1."""
        pixels = made * _per_channel(self.std, made) + _per_channel(self.mean, made)
        return pixels.clamp(0, 1)


class ImageSet(DataSet):
    """Labelled images: a batch is (pixels, labels), pixels as bytes or as floats from 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class ImageTensors(ImageSet):
    """Images that are in memory already."""

    images: AnyPixels
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        places = torch.tensor([example.source for example in examples])
        return LoadedBatch((self.images[places], self.labels[places]))


@dataclass(frozen=True, kw_only=True)
class ImageSplits:
    """Images to learn from, held-out images to be judged on, and how to read both."""

    train: ImageSet
    test: ImageSet
    class_names: tuple[str, ...]
    format: ImageFormat


def read_image(path: str | Path, format: ImageFormat) -> Float[Tensor, "channels height width"]:
    """Read one image file as a model's input: upright, cropped, resized, standardized.

    What becomes of other modes and sizes is said in `decode`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not an image file, is damaged, or its pixels have no known white.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no image file {path}")
    if not path.is_file():  # a pipe would be waited for
        raise ValueError(f"{path} is not an image file, nor any file")
    try:
        return format.model_input(format.decode(path))
    except ValueError as error:
        raise ValueError(f"{path} {error}") from error


def _per_channel(constants: tuple[float, ...], like: Tensor) -> Tensor:
    return rearrange(like.new_tensor(constants), "channels -> channels 1 1")
