"""Read image files: decode, turn upright, crop and resize them."""

import math
import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, UInt8
from PIL import ExifTags, Image, TiffTags, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile
from torch import Tensor

Pixels = Float[Tensor, "*batch channels height width"]  # 0 is black, 1 is white
BytePixels = UInt8[Tensor, "*batch channels height width"]  # 0 is black, 255 is white
AnyPixels = Pixels | BytePixels
Box = tuple[float, float, float, float]  # left, upper, right, lower; in pixels
Crop = Callable[[int, int], Box]  # of an image's width and height
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


def center_box(width: int, height: int, *, aspect: float, part: float) -> Box:
    """Return the largest centered box of an aspect ratio, each side scaled by `part`.

    >>> center_box(40, 20, aspect=1.0, part=0.5)
    (15.0, 5.0, 25.0, 15.0)
    """
    box_height = part * min(height, width / aspect)
    box_width = box_height * aspect
    left, upper = (width - box_width) / 2, (height - box_height) / 2
    return left, upper, left + box_width, upper + box_height


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
