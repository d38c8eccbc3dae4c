"""Labeled images: datasets in memory, readers of encoded images, random crops."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import UInt8
from torch import Tensor

from onescan.checks import check_positive
from onescan.experiments.data.base import (
    DataConfig,
    DataSet,
    Example,
    LoadedBatch,
    OnError,
    Splits,
    stratified_split,
)
from onescan.inputs.image_files import AnyPixels, Box, center_box
from onescan.inputs.images import ImageFormat, to_bytes
from onescan.inputs.targets import CLASSES, Target
from onescan.shapes import Labels

CROP_ATTEMPTS = 10


@dataclass(frozen=True, kw_only=True)
class RandomCropConfig:
    """Random resized crop of training images."""

    scale: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest area of the crop, as a fraction of the image's area."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest aspect ratio (width over height) of the crop."""

    def build(self) -> "RandomCrop":
        """Check the ranges and return the crop.

        Raises:
            ValueError: If a range is empty, or `scale` exceeds 1.
        """
        for name, highest in (("scale", 1.0), ("ratio", math.inf)):
            low, high = getattr(self, name)
            if not (0 < low <= high <= highest and high < math.inf):
                raise ValueError(
                    f"data.train_crop.{name} is {(low, high)}, expected two numbers, "
                    f"above 0{' and at most 1' if name == 'scale' else ''}, the smaller first"
                )
        return RandomCrop(self)


class RandomCrop:
    """Draws a box of random area, aspect ratio and position; centers it if no drawn box fits.

    Like torchvision's RandomResizedCrop, except that corners may lie between pixels.
    """

    def __init__(self, config: RandomCropConfig) -> None:
        self.config = config

    def __call__(self, width: int, height: int, seed: int) -> Box:
        random = Random(seed)
        narrowest, widest = self.config.ratio
        for _ in range(CROP_ATTEMPTS):
            area = random.uniform(*self.config.scale) * width * height
            aspect = math.exp(random.uniform(math.log(narrowest), math.log(widest)))
            box_width, box_height = math.sqrt(area * aspect), math.sqrt(area / aspect)
            if box_width <= width and box_height <= height:
                left = random.uniform(0, width - box_width)
                upper = random.uniform(0, height - box_height)
                return left, upper, left + box_width, upper + box_height
        aspect = min(max(width / height, narrowest), widest)
        return center_box(width, height, aspect=aspect, part=1.0)


class EncodedImage(NamedTuple):
    """One image before it is decoded.

    Attributes:
        content: Its bytes or the path of its file; None if the data has neither.
        label: Index of its class.
        name: Where it is, for error messages.
    """

    content: bytes | str | None
    label: int
    name: str

    def open(self) -> BytesIO | Path:
        """Return what `decode` reads; downloads the file if it is on a hub."""
        if self.content is None:
            raise ValueError("holds no image")
        if isinstance(self.content, bytes):
            return BytesIO(self.content)
        if "://" not in self.content:
            return Path(self.content)
        import fsspec  # installed with torch

        with fsspec.open(self.content, "rb") as file:
            return BytesIO(file.read())


@dataclass(frozen=True, kw_only=True)
class ImageReader:
    """Decodes batches of images and applies the policy for unreadable ones.

    Attributes:
        format: Format of the images.
        crop: Random crop of images that come with a seed, if any.
        on_error: What to do with an unreadable image.
    """

    format: ImageFormat
    crop: RandomCrop | None
    on_error: OnError

    def read(self, images: Sequence[EncodedImage], seeds: Sequence[int | None]) -> LoadedBatch:
        """Read a batch: pixels as bytes, and labels.

        With `on_error="skip"`, an unreadable image with a seed is replaced by the next readable
        one of the batch, so that a training batch keeps its size. One without a seed is left out,
        even if no image of the batch remains.

        Raises:
            ValueError: If an image cannot be read and `on_error` is "raise", or if no image of a
                training batch can be read.
        """
        decoded: dict[int, UInt8[Tensor, "channels height width"]] = {}
        failures = []
        for index, (image, seed) in enumerate(zip(images, seeds, strict=True)):
            crop = None if self.crop is None or seed is None else partial(self.crop, seed=seed)
            try:
                decoded[index] = to_bytes(self.format.decode(image.open(), crop))
            except (OSError, ValueError) as error:
                failures.append(f"{image.name} {error}")
                if self.on_error == "raise":
                    raise ValueError(failures[-1]) from error
        if not decoded and any(seed is not None for seed in seeds):
            raise ValueError(f"none of a batch's {len(images)} images can be read: {failures[0]}")
        readable = list(decoded)
        used = [
            next((other for other in readable if other >= index), readable[0])
            for index, seed in enumerate(seeds)
            if index in decoded or seed is not None
        ]
        size = (self.format.channels, self.format.height, self.format.width)
        pixels = torch.empty(len(used), *size, dtype=torch.uint8)
        for row, index in enumerate(used):
            pixels[row] = decoded[index]
        labels = torch.tensor([images[index].label for index in used], dtype=torch.long)
        return LoadedBatch((pixels, labels), tuple(failures))


class ImageSet(DataSet):
    """Labeled images: a batch is (pixels, labels), pixels as bytes or as floats from 0 to 1."""

    def windowed(self, window: tuple[int, ...]) -> "ImageSet":
        """Return a data set that may read only a random window of each example with a seed.

        By default, whole examples are read, and the task cuts windows out of them.

        Args:
            window: Size along each axis; () for whole examples.
        """
        del window
        return self


@dataclass(frozen=True, kw_only=True)
class ImageTensors(ImageSet):
    """Images in memory."""

    images: AnyPixels
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        indices = torch.tensor([example.source for example in examples])
        return LoadedBatch((self.images[indices], self.labels[indices]))


@dataclass(frozen=True, kw_only=True)
class ImageSplits(Splits):
    """Training and held-out images, and how to read both."""

    train: ImageSet
    test: ImageSet
    class_names: tuple[str, ...]
    format: ImageFormat
    target: Target = CLASSES


@dataclass(frozen=True, kw_only=True)
class DigitsConfig(DataConfig):
    """Handwritten digits of scikit-learn: 1797 grayscale images of 8 x 8, without a download."""

    test_fraction: float = 0.2
    """Fraction of each class held out for testing, between 0 and 1."""
    split_seed: int = 0
    """Random seed of the train-test split."""
    mean: float = 0.305
    """Mean brightness, subtracted; 0 is black, 1 is white."""
    std: float = 0.376
    """Standard deviation of the brightness, divided by."""

    def build(self) -> ImageSplits:
        """Read and split the images.

        Raises:
            ValueError: If `test_fraction` is not between 0 and 1, or leaves fewer images than
                classes in either part, or if `std` is not above 0.
        """
        from sklearn.datasets import load_digits  # imported on use: half a second

        check_positive(**{"data.std": self.std})
        digits = load_digits()
        format = ImageFormat(channels=1, height=8, width=8, mean=(self.mean,), std=(self.std,))
        pixels = rearrange(torch.from_numpy(digits.images).float() / 16, "n h w -> n 1 h w")
        labels = torch.from_numpy(digits.target).long()
        train, test = stratified_split(labels, fraction=self.test_fraction, seed=self.split_seed)
        return ImageSplits(
            train=ImageTensors(images=pixels[train], labels=labels[train]),
            test=ImageTensors(images=pixels[test], labels=labels[test]),
            class_names=tuple(str(name) for name in digits.target_names),
            format=format,
        )
