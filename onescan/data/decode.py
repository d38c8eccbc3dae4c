"""From an image file to pixels: the one way, whatever its kind, mode, size and orientation."""

import math
import struct
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, UInt8
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor

from onescan.data.crop import Crop

Pixels = Float[Tensor, "*batch channels height width"]  # 0 is black, 1 is white
BytePixels = UInt8[Tensor, "*batch channels height width"]  # 0 is black, 255 is white
AnyPixels = Pixels | BytePixels

# Image.open tries all formats by default, and opening EPS starts Ghostscript.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
GAP = 2  # how much larger than needed a JPEG is decoded at least: resizing does the rest better
UPRIGHT = {  # pillow's own turning writes EXIF data again, and fails where they are garbled
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = {UPRIGHT[orientation] for orientation in (5, 6, 7, 8)}
# what pillow raises on files that are cut or garbled
DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    RuntimeError,
    OverflowError,
    struct.error,
    Image.DecompressionBombError,
)


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
    """Read a part of an image in the size asked for.

    Transparent parts become black, 16 bits of grey become floats and keep their precision, other
    modes go through RGB or 8 bits of grey. A JPEG file is decoded smaller where that is enough.

    Args:
        file: the file, or its bytes.
        channels: 1 for grey, 3 for red, green and blue.
        height: of the result.
        width: of the result.
        crop: which part to read, of the image as it stands upright.

    Raises:
        ValueError: it is not an image file, is damaged, or its pixels have no known white; to be
            read after the file's name.
    """
    try:
        with open_image(file) as image:
            resized = _resize(image, "L" if channels == 1 else "RGB", (width, height), crop)
    except UnidentifiedImageError:
        raise ValueError(f"is not an image in one of the formats {', '.join(FORMATS)}") from None
    except DAMAGE as error:
        raise ValueError(f"cannot be read as an image: {error}") from error
    values = torch.from_numpy(np.array(resized))
    if resized.mode == "RGB":
        return rearrange(values, "height width channels -> channels height width")
    if resized.mode == "F":
        values = (values / 65535).clamp(0, 1)  # resizing overshoots at edges
    return values.expand(channels, height, width)


def to_bytes(pixels: AnyPixels) -> BytePixels:
    """Round floats from 0 to 1 to bytes; leave bytes as they are."""
    return (pixels * 255).round().byte() if pixels.is_floating_point() else pixels


def _resize(image: Image.Image, mode: str, size: tuple[int, int], crop: Crop) -> Image.Image:
    """Cut and resize, in the mode or, what has 16 bits, in floats up to 65535."""
    turn = UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    width, height = image.size[::-1] if turn in SIDEWAYS else image.size
    left, upper, right, lower = crop(width, height)
    needed = GAP * max(size[0] / (right - left), size[1] / (lower - upper))
    image.draft(None, (math.ceil(needed * image.width), math.ceil(needed * image.height)))
    upright = _in_mode(image if turn is None else image.transpose(turn), mode)
    across, down = upright.width / width, upright.height / height
    box = (
        max(left * across, 0),
        max(upper * down, 0),
        min(right * across, upright.width),
        min(lower * down, upright.height),
    )
    return upright.resize(size, Image.Resampling.BICUBIC, box=box)


def _in_mode(image: Image.Image, mode: str) -> Image.Image:
    if image.mode == "F":
        raise ValueError("its pixels are floating point, so what is white is not known")
    if image.mode.startswith("I"):  # pillow's own conversion would clip 16 bits to 8
        return Image.fromarray(np.asarray(image, dtype=np.float32))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "black"), image)
    return image if image.mode == mode else image.convert(mode)
