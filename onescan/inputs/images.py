"""Images and grids as a model's input: their size, and the constants that standardize them."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from io import BytesIO
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from PIL import Image
from torch import Tensor

from onescan.checks import can_look_at_values, check_positive
from onescan.inputs.format import Format
from onescan.inputs.image_files import (
    AnyPixels,
    Box,
    BytePixels,
    Crop,
    Pixels,
    center_box,
    decode,
    resize_pixels,
    to_pixels,
)
from onescan.messages import named_type, plural

AnyGrid = Shaped[Tensor, "*batch_channels_axes"]
AnyArray = Shaped[np.ndarray, "*batch_channels_axes"]
MAX_PIXELS = 1 << 28  # of a model's input: 3 GiB in float32
LARGEST = {torch.uint8: 255, torch.uint16: 65535, torch.bool: 1}  # value of white
OVERSHOOT = 0.45  # of bicubic interpolation: the most by which it exceeds 0 to 1


def native_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in the machine's byte order, which torch needs; float64 for long doubles.

    >>> native_type(np.dtype(">f4")), native_type(np.dtype(np.longdouble))
    (dtype('float32'), dtype('float64'))
    """
    return np.dtype(np.float64) if dtype == np.longdouble else dtype.newbyteorder("=")


def unit_pixels(pixels: AnyGrid) -> AnyGrid:
    """Convert pixels to floats from 0 to 1, by their type.

    Bytes are divided by 255 and 16-bit unsigned integers by 65,535. Booleans become 0 and 1, and
    floats are unchanged.

    Raises:
        ValueError: If they are other integers, whose range is unknown.
    """
    if pixels.is_floating_point():
        return pixels
    if pixels.dtype not in LARGEST:
        raise ValueError(
            f"pixels have type {pixels.dtype}, expected uint8 (0 to 255), uint16 (0 to 65535), "
            "bool, or floats from 0 to 1"
        )
    return pixels.float() / LARGEST[pixels.dtype]


def to_bytes(pixels: AnyGrid) -> BytePixels:
    """Round pixels, as for `unit_pixels`, to bytes; leave bytes unchanged."""
    if pixels.dtype == torch.uint8:
        return pixels
    return (unit_pixels(pixels).float() * 255).round().clamp(0, 255).byte()


def check_unit_range(pixels: AnyGrid) -> None:
    """Raise ValueError if pixels are NaN, or outside the range that bicubic resizing can reach."""
    low, high = (bound.item() for bound in torch.aminmax(pixels)) if pixels.numel() else (0, 1)
    if not (low >= -OVERSHOOT and high <= 1 + OVERSHOOT):  # also true for NaN
        raise ValueError(
            f"pixels are floats from {low:.4g} to {high:.4g}, expected floats from 0 to 1, or uint8"
        )


def check_constants(channels: int, **constants: tuple[float, ...]) -> None:
    """Raise ValueError unless constants have a finite number for each channel, and std above 0.

    >>> check_constants(1, **{"data.mean": (0.5,), "data.std": (0.0,)})
    Traceback (most recent call last):
    ValueError: data.std is (0.0,), expected finite numbers above 0
    """
    for name, numbers in constants.items():
        if len(numbers) != channels:
            raise ValueError(
                f"{name} is {numbers}, expected {plural(channels, 'number')}: one per channel"
            )
        if not all(isinstance(number, Real) and math.isfinite(number) for number in numbers):
            raise ValueError(f"{name} is {numbers}, expected finite numbers")
        if name.endswith("std") and min(numbers) <= 0:
            raise ValueError(f"{name} is {numbers}, expected finite numbers above 0")


def processor_constants(
    processor: Any, channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return by which mean and standard deviation transformers standardizes pixels from 0 to 1.

    Args:
        processor: An image processor. Steps that it does not mention are those of most processors.
        channels: Number of channels.

    Raises:
        ValueError: If rescale_factor is not positive, or there is not one constant per channel.

    >>> from types import SimpleNamespace
    >>> processor = SimpleNamespace(image_mean=[127.5], image_std=[51.0], do_rescale=False)
    >>> processor_constants(processor, channels=1)
    ((0.5,), (0.2,))
    """
    rescales = getattr(processor, "do_rescale", True)
    factor = getattr(processor, "rescale_factor", 1 / 255) if rescales else 1
    check_positive(rescale_factor=factor)
    normalizes = getattr(processor, "do_normalize", True)
    mean, std = (processor.image_mean, processor.image_std) if normalizes else (0.0, 1.0)
    mean, std = (
        tuple(x / (255 * factor) for x in np.broadcast_to(constants, channels).tolist())
        for constants in (mean, std)
    )
    return mean, std


class GridFormat(Format, ABC):
    """Inputs on a grid of any number of axes, standardized per channel.

    Attributes:
        channels: Number of channels.
        mean: Mean of each channel, subtracted.
        std: Standard deviation of each channel, divided by.
        is_ragged: Whether examples have different sizes, padded and masked in a batch.
    """

    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    is_ragged: bool = False

    @property
    @abstractmethod
    def axes(self) -> int:
        """Number of axes."""

    def standardize(self, values: AnyGrid) -> AnyGrid:
        """Standardize values, such as pixels from 0 to 1.

        float64 and integers are standardized in float64 and then rounded to float32, so that a
        large mean costs no precision. Other floats keep their type.

        >>> gray = ImageFormat(channels=1, height=1, width=2, mean=(0.5,), std=(0.5,))
        >>> gray.standardize(torch.tensor([[[0.0, 1.0]]])).tolist()
        [[[-1.0, 1.0]]]
        """
        is_narrow = values.is_floating_point() and values.dtype != torch.float64
        wide = values.float() if is_narrow else values.double()
        mean, std = (self._per_channel(numbers, wide) for numbers in (self.mean, self.std))
        return ((wide - mean) / std).to(values.dtype if is_narrow else torch.float32)

    def model_input(self, values: AnyGrid | AnyArray) -> AnyGrid:
        """Standardize examples for the model.

        Args:
            values: Images as for `unit_pixels`: floats from 0 to 1, or bytes, which are scaled to
                that range. Arrays in the range of the training data. Shape [..., C, *axes].

        Raises:
            ValueError: If the values are neither an array nor a tensor, or their shape does not
                match; or if images have a type of unknown range or, on the CPU, floats below -0.45
                or above 1.45, the limits of what bicubic resizing returns.
        """
        if isinstance(values, np.ndarray):
            dtype = native_type(values.dtype)
            dtype = np.promote_types(dtype, np.float32) if dtype.kind == "f" else dtype
            values = torch.from_numpy(values.astype(dtype))
        if not isinstance(values, Tensor):
            hint = ""
            if isinstance(self, ImageFormat):
                hint = "; onescan.inputs.read_image(path, format) reads an image file"
            raise ValueError(f"values is {named_type(values)}, expected an array or a tensor{hint}")
        if values.ndim <= self.axes or values.shape[-1 - self.axes] != self.channels:
            raise ValueError(
                f"values has shape {tuple(values.shape)}, expected [..., {self.channels}, *axes] "
                f"with {plural(self.axes, 'axis')}"
            )
        if self.reads_pixels and values.is_floating_point() and can_look_at_values(values):
            check_unit_range(values)
        return self.standardize(self.in_training_range(values))

    @property
    def reads_pixels(self) -> bool:
        """Whether the range of the training data is that of pixels, 0 to 1."""
        return True

    def in_training_range(self, values: AnyGrid) -> AnyGrid:
        """Convert values as for `model_input` to the range that is standardized."""
        return unit_pixels(values)

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
        return center_box(width, height, aspect=self.width / self.height, part=self.crop)

    def decode(self, file: Path | BytesIO, crop: Crop | None = None) -> AnyPixels:
        """Read an image file as `decode` does, by default the part that `box` returns."""
        return decode(
            file,
            channels=self.channels,
            height=self.height,
            width=self.width,
            crop=crop or self.box,
        )

    def model_input(self, values: AnyGrid | AnyArray | Image.Image) -> AnyGrid:
        """Standardize pixels (floats from 0 to 1, or bytes) or, with `from_pil`, a PIL image."""
        return (
            self.from_pil(values)
            if isinstance(values, Image.Image)
            else super().model_input(values)
        )

    def from_pil(self, image: Image.Image) -> Pixels:
        """Convert an opened image to the model's input: upright, cropped, resized, standardized."""
        pixels = to_pixels(
            image, channels=self.channels, height=self.height, width=self.width, crop=self.box
        )
        return self.model_input(pixels)

    def from_pixels(self, pixels: Float[Tensor, "C H W"]) -> Pixels:
        """Convert floats from 0 to 1 to the model's input: cropped, resized, standardized."""
        shape = {"channels": self.channels, "height": self.height, "width": self.width}
        return self.model_input(resize_pixels(pixels, **shape, crop=self.box))

    def pixels(self, generated: Pixels) -> Pixels:
        """Convert what a model generates, standardized as its input, to pixels from 0 to 1."""
        mean, std = (self._per_channel(numbers, generated) for numbers in (self.mean, self.std))
        return (generated * std + mean).clamp(0, 1)


def read_image(path: str | Path, format: ImageFormat) -> Float[Tensor, "channels height width"]:
    """Read one image file as a model's input: upright, cropped, resized, standardized.

    `decode` describes how other modes and sizes are converted.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not an image file, is damaged, or has floating point pixels.
    """
    if not isinstance(path, str | PathLike):
        raise ValueError(
            f"path is {named_type(path)}, expected the path of an image file; "
            "format.model_input(image) converts PIL images, arrays and tensors"
        )
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no image file {path}")
    if not path.is_file():  # reading a pipe would block
        raise ValueError(f"{path} is not an image file")
    try:
        return format.model_input(format.decode(path))
    except ValueError as error:
        raise ValueError(f"{path} {error}") from error
