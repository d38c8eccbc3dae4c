"""Image files to tensors: crop, decode, resize, standardize; and labelled images in memory."""

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, Shaped, UInt8
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor

from onescan.checks import check_positive
from onescan.data.base import (
    DataConfig,
    DataSet,
    Example,
    Format,
    LoadedBatch,
    OnError,
    Splits,
    stratified_split,
)
from onescan.shapes import Labels

Pixels = Float[Tensor, "*batch channels height width"]  # 0 is black, 1 is white
BytePixels = UInt8[Tensor, "*batch channels height width"]  # 0 is black, 255 is white
AnyPixels = Pixels | BytePixels
AnyGrid = Shaped[Tensor, "*batch_channels_axes"]
Box = tuple[float, float, float, float]  # left, upper, right, lower; in pixels
Crop = Callable[[int, int], Box]  # of an image's width and height

MAX_PIXELS = 1 << 28  # of a model's input: 3 GiB in float32
CROP_ATTEMPTS = 10
# Image.open tries all formats by default, and opening EPS starts Ghostscript.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
JPEG_SCALE = 2  # decode a JPEG at least this much larger than needed, since resizing is sharper
# Pillow's own exif_transpose rewrites the EXIF data and fails if they are damaged.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = {UPRIGHT[orientation] for orientation in (5, 6, 7, 8)}
# Raised by Pillow for truncated or corrupt files.
DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    RuntimeError,
    OverflowError,
    struct.error,
    Image.DecompressionBombError,
)


def centre_box(width: int, height: int, *, aspect: float, part: float) -> Box:
    """Return the largest centered box of an aspect ratio, each side scaled by `part`.

    >>> centre_box(40, 20, aspect=1.0, part=0.5)
    (15.0, 5.0, 25.0, 15.0)
    """
    box_height = part * min(height, width / aspect)
    box_width = box_height * aspect
    left, upper = (width - box_width) / 2, (height - box_height) / 2
    return left, upper, left + box_width, upper + box_height


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
    """A box of random area, aspect ratio and position; centered if no drawn box fits.

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
        return centre_box(width, height, aspect=aspect, part=1.0)


def open_image(file: Path | BytesIO) -> Image.Image:
    """Open an image file in one of `FORMATS`, regardless of its name.

    Raises:
        UnidentifiedImageError: If it has another format.
        OSError: If it cannot be read.
    """
    return Image.open(file, formats=FORMATS)


def decode(
    file: Path | BytesIO, *, channels: int, height: int, width: int, crop: Crop
) -> AnyPixels:
    """Decode an image, crop it and resize it.

    Transparent parts become black. 16-bit grayscale becomes floats at full precision; other modes
    are converted to RGB or to 8-bit grayscale. A JPEG is decoded at reduced size where possible.

    Args:
        file: Path of the file, or its bytes.
        channels: 1 for grayscale, 3 for RGB.
        height: Height of the result in pixels.
        width: Width of the result in pixels.
        crop: Returns the box to read, given the size of the upright image.

    Raises:
        ValueError: If it is not an image, is damaged, or has floating point pixels. The message
            continues a sentence that starts with the file's name.
    """
    try:
        with open_image(file) as image:
            return to_pixels(image, channels=channels, height=height, width=width, crop=crop)
    except UnidentifiedImageError:
        raise ValueError(f"is not an image in one of the formats {', '.join(FORMATS)}") from None
    except DAMAGE as error:
        raise ValueError(f"cannot be read as an image: {error}") from error


def to_pixels(
    image: Image.Image, *, channels: int, height: int, width: int, crop: Crop
) -> AnyPixels:
    """Crop and resize an opened image; see `decode`."""
    resized = _resize(image, "L" if channels == 1 else "RGB", (width, height), crop)
    values = torch.from_numpy(np.array(resized))
    if resized.mode == "RGB":
        return rearrange(values, "height width channels -> channels height width")
    if resized.mode == "F":
        values = (values / 65535).clamp(0, 1)  # resizing overshoots at edges
    return values.expand(channels, height, width)


def _resize(image: Image.Image, mode: str, size: tuple[int, int], crop: Crop) -> Image.Image:
    """Crop and resize, in the given mode or, for 16-bit images, in floats up to 65535."""
    transpose = UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    width, height = image.size[::-1] if transpose in SIDEWAYS else image.size
    left, upper, right, lower = crop(width, height)
    needed = JPEG_SCALE * max(size[0] / (right - left), size[1] / (lower - upper))
    image.draft(None, (math.ceil(needed * image.width), math.ceil(needed * image.height)))
    upright = _convert(image if transpose is None else image.transpose(transpose), mode)
    across, down = upright.width / width, upright.height / height
    box = (
        max(left * across, 0),
        max(upper * down, 0),
        min(right * across, upright.width),
        min(lower * down, upright.height),
    )
    return upright.resize(size, Image.Resampling.BICUBIC, box=box)


def _convert(image: Image.Image, mode: str) -> Image.Image:
    if image.mode == "F":
        raise ValueError("its pixels are floating point, so their range is unknown")
    if image.mode.startswith("I"):  # Pillow's own conversion clips 16 bits to 8
        return Image.fromarray(np.asarray(image, dtype=np.float32))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "black"), image)
    return image if image.mode == mode else image.convert(mode)


def unit_pixels(pixels: AnyGrid) -> AnyGrid:
    """Convert bytes to floats from 0 to 1; leave floats unchanged."""
    return pixels if pixels.is_floating_point() else pixels.float() / 255


def to_bytes(pixels: AnyPixels) -> BytePixels:
    """Round floats from 0 to 1 to bytes; leave bytes unchanged."""
    return (pixels * 255).round().byte() if pixels.is_floating_point() else pixels


def check_constants(channels: int, **constants: tuple[float, ...]) -> None:
    """Raise ValueError unless constants, by name, have a number for each channel, and std above 0.

    >>> check_constants(1, **{"data.mean": (0.5,), "data.std": (0.0,)})
    Traceback (most recent call last):
    ValueError: data.std is (0.0,), expected numbers above 0
    """
    for name, numbers in constants.items():
        if len(numbers) != channels:
            raise ValueError(f"{name} is {numbers}, expected {channels} numbers: one per channel")
        if name.endswith("std") and min(numbers) <= 0:
            raise ValueError(f"{name} is {numbers}, expected numbers above 0")


class GridFormat(Format, ABC):
    """Inputs on a grid of any number of axes, standardized per channel.

    Attributes:
        channels: Number of channels.
        mean: Mean of each channel, subtracted.
        std: Standard deviation of each channel, divided by.
    """

    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    @abstractmethod
    def axes(self) -> int:
        """Number of axes."""

    def standardize(self, values: AnyGrid) -> AnyGrid:
        """Standardize floats, such as pixels from 0 to 1.

        >>> grey = ImageFormat(channels=1, height=1, width=2, mean=(0.5,), std=(0.5,))
        >>> grey.standardize(torch.tensor([[[0.0, 1.0]]])).tolist()
        [[[-1.0, 1.0]]]
        """
        return (values - self._per_channel(self.mean, values)) / self._per_channel(self.std, values)

    def model_input(self, values: AnyGrid) -> AnyGrid:
        """Standardize examples for the model.

        Floats must have the range of the training data, which is 0 to 1 for images. Bytes are
        scaled to that range.
        """
        return self.standardize(unit_pixels(values))

    def _per_channel(self, constants: tuple[float, ...], like: Tensor) -> Tensor:
        return like.new_tensor(constants).reshape(-1, *[1] * self.axes)


@dataclass(frozen=True, kw_only=True)
class ImageFormat(GridFormat):
    """The images a model was trained on: their size, and the constants that standardize them."""

    channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: float | None = None
    """Center crop, as a fraction of the shorter side; None resizes the whole image."""

    def __post_init__(self) -> None:
        size = (self.height, self.width)
        if min(size) < 1 or self.height * self.width > MAX_PIXELS:
            raise ValueError(
                f"the image size is {size}, expected a height and a width above 0 and at most "
                f"{MAX_PIXELS:,} pixels"
            )
        if self.channels not in (1, 3):
            raise ValueError(f"channels is {self.channels}, expected 1 or 3")
        check_constants(self.channels, mean=self.mean, std=self.std)
        if self.crop is not None and not 0 < self.crop <= 1:
            raise ValueError(f"crop is {self.crop}, expected above 0 and at most 1, or None")

    @property
    def axes(self) -> int:
        return 2

    def box(self, width: int, height: int) -> Box:
        """Return the part of an image that the model sees in evaluation."""
        if self.crop is None:
            return 0.0, 0.0, float(width), float(height)
        return centre_box(width, height, aspect=self.width / self.height, part=self.crop)

    def decode(self, file: Path | BytesIO, crop: Crop | None = None) -> AnyPixels:
        """Read an image file as `decode` does, by default the part that `box` returns."""
        return decode(
            file,
            channels=self.channels,
            height=self.height,
            width=self.width,
            crop=crop or self.box,
        )

    def from_pil(self, image: Image.Image) -> Pixels:
        """Convert an opened image to the model's input: upright, cropped, resized, standardized."""
        shape = {"channels": self.channels, "height": self.height, "width": self.width}
        return self.model_input(to_pixels(image, **shape, crop=self.box))

    def pixels(self, made: Pixels) -> Pixels:
        """Convert what a model generates, standardized as its input, to pixels from 0 to 1."""
        pixels = made * self._per_channel(self.std, made) + self._per_channel(self.mean, made)
        return pixels.clamp(0, 1)


def read_image(path: str | Path, format: ImageFormat) -> Float[Tensor, "channels height width"]:
    """Read one image file as a model's input: upright, cropped, resized, standardized.

    `decode` describes how other modes and sizes are converted.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not an image file, is damaged, or has floating point pixels.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no image file {path}")
    if not path.is_file():  # reading a pipe would block
        raise ValueError(f"{path} is not an image file, nor any file")
    try:
        return format.model_input(format.decode(path))
    except ValueError as error:
        raise ValueError(f"{path} {error}") from error


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
        one of the batch, so that a training batch keeps its size. One without a seed is left out.

        Raises:
            ValueError: If an image cannot be read and `on_error` is "raise", or if no image of the
                batch can be read.
        """
        decoded: dict[int, UInt8[Tensor, "channels height width"]] = {}
        failures = []
        for place, (image, seed) in enumerate(zip(images, seeds, strict=True)):
            crop = None if self.crop is None or seed is None else partial(self.crop, seed=seed)
            try:
                decoded[place] = to_bytes(self.format.decode(image.open(), crop))
            except (OSError, ValueError) as error:
                failures.append(f"{image.name} {error}")
                if self.on_error == "raise":
                    raise ValueError(failures[-1]) from error
        if not decoded:
            raise ValueError(f"none of a batch's {len(images)} images can be read: {failures[0]}")
        readable = list(decoded)
        shown = [
            next((other for other in readable if other >= place), readable[0])
            for place, seed in enumerate(seeds)
            if place in decoded or seed is not None
        ]
        labels = torch.tensor([images[place].label for place in shown])
        return LoadedBatch((torch.stack([decoded[i] for i in shown]), labels), tuple(failures))


class ImageSet(DataSet):
    """Labelled images: a batch is (pixels, labels), pixels as bytes or as floats from 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class ImageTensors(ImageSet):
    """Images in memory."""

    images: AnyPixels
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        places = torch.tensor([example.source for example in examples])
        return LoadedBatch((self.images[places], self.labels[places]))


@dataclass(frozen=True, kw_only=True)
class ImageSplits(Splits):
    """Training and held-out images, and how to read both."""

    train: ImageSet
    test: ImageSet
    class_names: tuple[str, ...]
    format: ImageFormat


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
