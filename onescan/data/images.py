"""Image files to tensors: crop, decode, resize, standardize; and labelled images in memory."""

import math
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from numbers import Real
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, Shaped, UInt8
from PIL import ExifTags, Image, TiffTags, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile
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
AnyArray = Shaped[np.ndarray, "*batch_channels_axes"]
Box = tuple[float, float, float, float]  # left, upper, right, lower; in pixels
Crop = Callable[[int, int], Box]  # of an image's width and height

MAX_PIXELS = 1 << 28  # of a model's input: 3 GiB in float32
CROP_ATTEMPTS = 10
LUMA = (0.299, 0.587, 0.114)  # of ITU-R 601, as in Pillow's conversion to grayscale
# Image.open tries all formats by default, and opening EPS starts Ghostscript.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
# Names of files in these formats. MPO files are JPEG files that hold several images.
SUFFIXES = (
    *(".apng", ".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".mpo", ".pbm", ".pfm", ".pgm"),
    *(".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"),
)
# Smallest number of bytes of a PNG file's transparent color, by its color type.
KEY_SIZES, MAX_COLORS = {0: 2, 2: 6}, 256
PNG_SIGNATURE, JPEG_SIGNATURE = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
# Besides the pixels, a JPEG file needs its EXIF data and the colors of its Adobe segment.
JPEG_METADATA = {0xE0, *range(0xE2, 0xEE), 0xEF, 0xFE}
JPEG_ADOBE, ADOBE_SIZE = b"\xff\xee", 16  # marker, and smallest number of bytes
JPEG_SCAN = b"\xda"  # begins the compressed pixels
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
# Factor of the transparent value of a PNG file, which Pillow leaves in the file's own range.
KEY_SCALES = {"L;2": 85, "L;4": 17, "RGB;16B": 1 / 256}
TIFF_TAGS = {tag.name: number for number, tag in TiffTags.TAGS_V2.items()}
SIGNED = 2  # sample format
LARGEST = {torch.uint8: 255, torch.uint16: 65535, torch.bool: 1}  # value of white
PIXEL_STEP = 0.01  # by which pixels may exceed their range, such as by rounding
# Raised by Pillow for truncated or corrupt files.
DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    LookupError,
    EOFError,
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


def is_image_name(name: str) -> bool:
    """Return whether a file name ends like that of an image in one of `FORMATS`.

    >>> is_image_name("a/B.JPG"), is_image_name("a.jpg.bak"), is_image_name("a")
    (True, False, False)
    """
    return name.lower().endswith(SUFFIXES)


def open_image(file: Path | BytesIO) -> Image.Image:
    """Open an image file in one of `FORMATS`, regardless of its name.

    Damaged metadata in PNG and JPEG files is ignored.

    Raises:
        UnidentifiedImageError: If it has another format.
        OSError: If it cannot be read.
    """
    if isinstance(file, Path) and file.exists() and not file.is_file():  # a pipe would block
        raise UnidentifiedImageError(f"{file} is not a file")
    try:
        image: Image.Image = Image.open(file, formats=FORMATS)
    except DAMAGE as error:
        try:
            image = Image.open(_without_metadata(file), formats=FORMATS)
        except DAMAGE:
            raise error from None
    key, tile = image.info.get("transparency"), getattr(image, "tile", None)
    if key is not None and image.format == "PNG" and tile and tile[0][3] in KEY_SCALES:
        scale = KEY_SCALES[tile[0][3]]
        scaled = tuple(int(value * scale) for value in (key if isinstance(key, tuple) else (key,)))
        image.info["transparency"] = scaled if isinstance(key, tuple) else scaled[0]
    return image


def _without_metadata(file: Path | BytesIO) -> BytesIO:
    """Return a PNG or JPEG file with only what is needed to decode its pixels upright.

    Raises:
        UnidentifiedImageError: If it has another format.
        OSError: If it cannot be read.
    """
    with file.open("rb") if isinstance(file, Path) else BytesIO(file.getvalue()) as stream:
        signature = stream.read(len(PNG_SIGNATURE))
        if signature == PNG_SIGNATURE:
            return BytesIO(_needed_of_png(signature + stream.read()))
        if signature.startswith(JPEG_SIGNATURE):
            return BytesIO(_needed_of_jpeg(signature + stream.read()))
    raise UnidentifiedImageError("not a PNG or JPEG file")


def _needed_of_png(content: bytes) -> bytes:
    """Return the critical chunks, and the transparent color and EXIF data if they are intact."""
    kind = content[25:26]  # color type
    key_size = KEY_SIZES.get(kind[0], 0) if kind else 0
    begin, needed = len(PNG_SIGNATURE), [content[: len(PNG_SIGNATURE)]]
    while begin < len(content):
        end = begin + 12 + int.from_bytes(content[begin : begin + 4])
        name, checked = content[begin + 4 : begin + 8], content[begin + 4 : end - 4]
        is_intact = zlib.crc32(checked) == int.from_bytes(content[end - 4 : end])
        has_key = name == b"tRNS" and key_size <= len(checked) - 4 <= MAX_COLORS
        if name[:1].isupper() or (is_intact and (has_key or name == b"eXIf")):
            needed.append(content[begin:end])
        begin = end
    return b"".join(needed)


def _needed_of_jpeg(content: bytes) -> bytes:
    """Return the segments that are needed for the pixels, and EXIF data."""
    begin, needed = 2, [content[:2]]
    while (marker := content[begin : begin + 2])[:1] == b"\xff" and marker[1:] != JPEG_SCAN:
        end = begin + 2 + int.from_bytes(content[begin + 2 : begin + 4])
        is_short = marker == JPEG_ADOBE and end - begin < ADOBE_SIZE
        if marker[-1] not in JPEG_METADATA and not is_short:
            needed.append(content[begin:end])
        begin = end
    return b"".join([*needed, content[begin:]])


def _upright_transpose(image: Image.Image, *, decodes: bool = True) -> Image.Transpose | None:
    """Return how to turn an image upright; None if it is upright, or its metadata are damaged.

    Metadata may follow the pixels of a PNG file. They are only found if `decodes` is True.
    """
    try:
        exif = image.getexif() if decodes else Image.Image.getexif(image)
        return UPRIGHT.get(exif.get(ExifTags.Base.Orientation, 1))
    except Exception:  # Pillow raises errors of many types
        return None


class ImageHeader(NamedTuple):
    """What is known about an image before its pixels are decoded.

    Attributes:
        width: Of the upright image, in pixels.
        height: Of the upright image, in pixels.
        mode: Pillow's name of the pixel format.
        is_upright: Whether the stored image is upright.
        has_alpha: Whether pixels may be transparent.
        has_16_bits: Whether a channel has more than 8 bits.
        has_frames: Whether there are more images in the file, such as frames or pages.
    """

    width: int
    height: int
    mode: str
    is_upright: bool
    has_alpha: bool
    has_16_bits: bool
    has_frames: bool

    @property
    def is_gray(self) -> bool:
        """Whether it is grayscale, with or without transparency."""
        return self.mode in ("1", "L", "LA", "La", "F") or self.mode.startswith("I")


def read_header(file: Path | BytesIO, *, decodes: bool = True) -> ImageHeader:
    """Read the size and kind of an image file.

    Args:
        file: Path of the file, or its bytes.
        decodes: Whether to find an orientation that follows the pixels of a PNG file, which decodes
            them.

    Raises:
        ValueError: If it is not an image, or is damaged. The message continues a sentence that
            starts with the file's name.
    """
    try:
        with open_image(file) as image:
            mode, has_alpha = image.mode, image.has_transparency_data
            tile = getattr(image, "tile", None)
            stored = str(tile[0][3]) if tile else ""
            is_deep = mode.startswith("I") or (";16" in stored and "BGR;16" not in stored)
            has_frames = bool(getattr(image, "is_animated", False))
            transpose = _upright_transpose(image, decodes=decodes)
            # Pillow swaps the sides of a TIFF file by its tag, but by its XMP data only on loading.
            tags = getattr(image, "tag_v2", {})
            is_swapped = transpose in SIDEWAYS and ExifTags.Base.Orientation not in tags
            width, height = image.size[::-1] if is_swapped else image.size
            return ImageHeader(
                width, height, mode, transpose is None, has_alpha, is_deep, has_frames
            )
    except UnidentifiedImageError:
        raise ValueError(f"is not an image in one of the formats {', '.join(FORMATS)}") from None
    except DAMAGE as error:
        raise ValueError(f"cannot be read as an image: {error}") from error


def decode(
    file: Path | BytesIO, *, channels: int, height: int, width: int, crop: Crop
) -> AnyPixels:
    """Decode an image, crop it and resize it.

    Transparent parts become black. Grayscale of 9 to 16 bits becomes floats at full precision;
    other modes are converted to RGB or to 8-bit grayscale. Only the first frame or page is read. A
    JPEG is decoded at reduced size where possible.

    Args:
        file: Path of the file, or its bytes.
        channels: 1 for grayscale, 3 for RGB.
        height: Height of the result in pixels.
        width: Width of the result in pixels.
        crop: Returns the box to read, given the size of the upright image.

    Raises:
        ValueError: If it is not an image, is damaged, or has pixels of unknown range: floats,
            signed or 32-bit integers. The message continues a sentence that starts with the file's
            name.
    """

    def decoded(source: Path | BytesIO) -> AnyPixels:
        with open_image(source) as image:
            return to_pixels(
                image, channels=channels, height=height, width=width, crop=crop, reduce=True
            )

    try:
        try:
            return decoded(file)
        except DAMAGE as error:  # perhaps only of metadata that follow the pixels
            try:
                return decoded(_without_metadata(file))
            except DAMAGE:
                raise error from None
    except UnidentifiedImageError:
        raise ValueError(f"is not an image in one of the formats {', '.join(FORMATS)}") from None
    except DAMAGE as error:
        raise ValueError(f"cannot be read as an image: {error}") from error


def to_pixels(
    image: Image.Image,
    *,
    channels: int,
    height: int,
    width: int,
    crop: Crop,
    reduce: bool = False,
) -> AnyPixels:
    """Crop and resize an opened image; see `decode`.

    If `reduce` is True, a JPEG may be decoded at reduced size, which changes the opened image.
    """
    mode = "L" if channels == 1 else "RGB"
    resized = _resize(image, mode, (width, height), crop, reduce=reduce)
    values = torch.from_numpy(np.array(resized))
    if resized.mode == "RGB":
        return rearrange(values, "height width channels -> channels height width")
    if resized.mode == "F":
        values = values.clamp(0, 1)  # resizing overshoots at edges
    return values.expand(channels, height, width)


def _resize(
    image: Image.Image, mode: str, size: tuple[int, int], crop: Crop, *, reduce: bool
) -> Image.Image:
    """Crop and resize, in the given mode or, for more than 8 bits, in floats from 0 to 1."""
    if not isinstance(image, JpegImageFile):
        if image.format == "TIFF":
            # Pillow reads metadata once, so damaged metadata raise no error while loading.
            _upright_transpose(image)
        image.load()  # also turns TIFF files upright
    transpose = _upright_transpose(image)
    width, height = image.size[::-1] if transpose in SIDEWAYS else image.size
    left, upper, right, lower = crop(width, height)
    if reduce:
        needed = JPEG_SCALE * max(size[0] / (right - left), size[1] / (lower - upper))
        image.draft(None, (math.ceil(needed * image.width), math.ceil(needed * image.height)))
    image = _with_range(image)
    upright = _convert(image if transpose is None else image.transpose(transpose), mode)
    across, down = upright.width / width, upright.height / height
    return _cut(upright, size, (left * across, upper * down, right * across, lower * down))


def _cut(image: Image.Image, size: tuple[int, int], box: Box) -> Image.Image:
    """Resize a box of an image, which rounding may have put partly outside."""
    left, upper, right, lower = box
    inside = max(left, 0), max(upper, 0), min(right, image.width), min(lower, image.height)
    return image.resize(size, Image.Resampling.BICUBIC, box=inside)


def resize_pixels(
    pixels: Float[Tensor, "C H W"], *, channels: int, height: int, width: int, crop: Crop
) -> Pixels:
    """Crop and resize floats from 0 to 1 as `to_pixels` does images, without rounding to bytes."""
    if channels == 1 and len(pixels) > 1:
        pixels = torch.einsum("c,chw->hw", pixels.new_tensor(LUMA), pixels)[None]
    box = crop(pixels.shape[-1], pixels.shape[-2])
    planes = [Image.fromarray(plane.float().numpy()) for plane in pixels]
    resized = [np.array(_cut(plane, (width, height), box)) for plane in planes]
    return torch.from_numpy(np.stack(resized)).clamp(0, 1).expand(channels, height, width)


def _with_range(image: Image.Image) -> Image.Image:
    """Convert grayscale of more than 8 bits to floats from 0 to 1, by the range of its file.

    Raises:
        ValueError: If the file does not tell the range.
    """
    tags: Any = getattr(image, "tag_v2", {})
    if SIGNED in tags.get(TIFF_TAGS["SampleFormat"], ()):
        raise ValueError("its pixels are signed integers, so their range is unknown")
    if image.mode == "F":
        raise ValueError("its pixels are floating point, so their range is unknown")
    if not image.mode.startswith("I"):
        return image
    if image.mode == "I" and image.format not in ("PNG", "PPM"):  # these have 16 bits
        raise ValueError("its pixels are 32-bit integers, so their range is unknown")
    (bits,) = tags.get(TIFF_TAGS["BitsPerSample"], (16,))
    stored = np.asarray(image)
    values = stored.astype(np.float32) / (2**bits - 1)
    if tags.get(TIFF_TAGS["PhotometricInterpretation"]) == 0:  # 0 is white
        values = 1 - values
    if (key := image.info.get("transparency")) is not None:
        values[stored == key] = 0
    return Image.fromarray(values)


def _convert(image: Image.Image, mode: str) -> Image.Image:
    """Convert to a mode, except floats, with transparent parts in black."""
    if image.mode == "F":
        return image
    if image.mode == "La":  # which Pillow converts to nothing else
        image = image.convert("LA")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "black"), image)
    if image.mode == "LAB":
        image = image.convert("RGB")
    return image if image.mode == mode else image.convert(mode)


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
    """Raise ValueError if pixels are NaN or outside 0 to 1, up to rounding."""
    low, high = (bound.item() for bound in torch.aminmax(pixels)) if pixels.numel() else (0, 1)
    if not (low >= -PIXEL_STEP and high <= 1 + PIXEL_STEP):  # also true for NaN
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
            raise ValueError(f"{name} is {numbers}, expected {channels} numbers: one per channel")
        if not all(isinstance(number, Real) and math.isfinite(number) for number in numbers):
            raise ValueError(f"{name} is {numbers}, expected finite numbers")
        if name.endswith("std") and min(numbers) <= 0:
            raise ValueError(f"{name} is {numbers}, expected finite numbers above 0")


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
        """Standardize values, such as pixels from 0 to 1.

        float64 and integers are standardized in float64 and then rounded to float32, so that a
        large mean costs no precision. Other floats keep their type.

        >>> grey = ImageFormat(channels=1, height=1, width=2, mean=(0.5,), std=(0.5,))
        >>> grey.standardize(torch.tensor([[[0.0, 1.0]]])).tolist()
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
            ValueError: If images have a type of unknown range.
        """
        if isinstance(values, np.ndarray):
            dtype = native_type(values.dtype)
            dtype = np.promote_types(dtype, np.float32) if dtype.kind == "f" else dtype
            values = torch.from_numpy(values.astype(dtype))
        return self.standardize(self._in_training_range(values))

    @property
    def reads_pixels(self) -> bool:
        """Whether the range of the training data is that of pixels, 0 to 1."""
        return True

    def _in_training_range(self, values: AnyGrid) -> AnyGrid:
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
        pixels = to_pixels(
            image, channels=self.channels, height=self.height, width=self.width, crop=self.box
        )
        return self.model_input(pixels)

    def from_pixels(self, pixels: Float[Tensor, "C H W"]) -> Pixels:
        """Convert floats from 0 to 1 to the model's input: cropped, resized, standardized."""
        shape = {"channels": self.channels, "height": self.height, "width": self.width}
        return self.model_input(resize_pixels(pixels, **shape, crop=self.box))

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
