"""Grids of images, in which small images are enlarged."""

import math

import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from onescan.inputs.image_files import AnyPixels
from onescan.inputs.images import to_bytes

ImageBytes = UInt8[Tensor, "N height width channels"]

GAP = 2  # pixels between images
MIN_SIDE = 64  # pixels; smaller images are enlarged
BACKGROUND = 255


def image_bytes(pixels: AnyPixels) -> ImageBytes:
    """Round images to bytes, channels last, on the CPU.

    Args:
        pixels: Floats from 0 to 1, or bytes. Shape [N, channels, height, width].

    >>> image_bytes(torch.tensor([[[[0.0, 0.5, 1.0]]]])).flatten().tolist()
    [0, 128, 255]
    """
    return to_bytes(pixels).cpu().permute(0, 2, 3, 1).contiguous()


def as_image(pixels: UInt8[Tensor, "height width channels"]) -> Image.Image:
    """Convert to a Pillow image, grayscale or RGB.

    Raises:
        ValueError: If the number of channels is neither 1 nor 3.
    """
    channels = pixels.shape[-1]
    if channels not in (1, 3):
        raise ValueError(f"images have {channels} channels, expected 1 or 3")
    return Image.fromarray((pixels[..., 0] if channels == 1 else pixels).numpy())


def image_grid(pixels: AnyPixels, columns: int) -> Image.Image:
    """Arrange images row by row; the end of an incomplete last row is white.

    Args:
        pixels: At least one image.
        columns: Images per row.

    Raises:
        ValueError: If there is no image or column, or the number of channels is neither 1 nor 3.

    >>> image_grid(torch.zeros(3, 1, 8, 8), columns=2).size  # 64 x 64 each, with a gap of 2
    (130, 130)
    """
    if columns < 1 or not len(pixels):
        raise ValueError(
            f"columns is {columns} for {len(pixels)} images, expected at least 1 of each"
        )
    return grid_of_bytes(image_bytes(pixels), columns)


def grid_of_bytes(images: ImageBytes, columns: int) -> Image.Image:
    """Arrange images like `image_grid`, from bytes with channels last."""
    count, height, width, channels = images.shape
    columns = min(columns, count)
    scale = max(1, math.ceil(MIN_SIDE / max(height, width)))
    large = images.repeat_interleave(scale, dim=1).repeat_interleave(scale, dim=2)
    tall, wide = height * scale + GAP, width * scale + GAP
    rows = math.ceil(count / columns)
    grid = torch.full(
        (rows * tall - GAP, columns * wide - GAP, channels), BACKGROUND, dtype=torch.uint8
    )
    for index, image in enumerate(large):
        top, left = index // columns * tall, index % columns * wide
        grid[top : top + tall - GAP, left : left + wide - GAP] = image
    return as_image(grid)


def grid_columns(count: int, classes: int = 1) -> int:
    """Return the columns of a nearly square grid; with alternating classes, each shows one class.

    >>> grid_columns(16), grid_columns(100, classes=10), grid_columns(32, classes=2)
    (4, 10, 6)
    """
    side = math.sqrt(count)
    return math.ceil(side) if classes >= count else classes * max(1, round(side / classes))
