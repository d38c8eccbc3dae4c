"""Labelled images in memory, the format a classifier was trained on, and image files in it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from onescan.data.base import Format
from onescan.shapes import Images, Labels

Pixels = Float[Tensor, "*batch channels height width"]  # 0 is black, 1 is white


@dataclass(frozen=True, kw_only=True)
class ImageFormat(Format):
    """The images a model was trained on: their size, and the constants that standardize them."""

    channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def standardize(self, pixels: Pixels) -> Pixels:
        """Turn pixels from 0 to 1 into what the model reads.

        >>> grey = ImageFormat(channels=1, height=1, width=2, mean=(0.5,), std=(0.5,))
        >>> grey.standardize(torch.tensor([[[0.0, 1.0]]])).tolist()
        [[[-1.0, 1.0]]]
        """
        return (pixels - _per_channel(self.mean, pixels)) / _per_channel(self.std, pixels)

    def to_pixels(self, images: Pixels) -> Pixels:
        """Turn what the model reads back into pixels from 0 to 1, to look at."""
        return images * _per_channel(self.std, images) + _per_channel(self.mean, images)


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    """Standardized images and their labels. A data set read on demand has these two methods."""

    images: Images
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor | slice) -> tuple[Images, Labels]:
        """Read the images and labels at these places."""
        return self.images[indices], self.labels[indices]


@dataclass(frozen=True, kw_only=True)
class ImageSplits:
    """Images to learn from, held-out images to be judged on, and how to read both."""

    train: ImageSet
    test: ImageSet
    class_names: tuple[str, ...]
    format: ImageFormat


def read_image(path: str | Path, format: ImageFormat) -> Float[Tensor, "channels height width"]:
    """Read one image file as a model's input: turned upright, resized, standardized.

    Any mode that pillow reads: transparent parts become black, 16 bits of grey keep their
    precision, other modes go through RGB.

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
        with Image.open(path) as image:
            pixels = _pixels(ImageOps.exif_transpose(image), format)
    except UnidentifiedImageError:
        raise ValueError(f"{path} is not an image, or of a kind unknown to pillow") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from error
    return format.standardize(pixels)


def _pixels(image: Image.Image, format: ImageFormat) -> Float[Tensor, "channels height width"]:
    """Values from 0 to 1, in the format's size and number of channels."""
    if image.mode == "F":
        raise ValueError("its pixels are floating point, so what is white is not known")
    if image.mode.startswith("I"):  # pillow's own conversion would clip 16 bits to 8
        image, white = Image.fromarray(np.asarray(image, dtype=np.float32)), 65535
    else:
        image, white = _on_black(image).convert("L" if format.channels == 1 else "RGB"), 255
    resized = image.resize((format.width, format.height), Image.Resampling.BILINEAR)
    values = torch.from_numpy(np.array(resized, dtype=np.float32) / white)
    if resized.mode != "RGB":
        return values.expand(format.channels, format.height, format.width)
    return rearrange(values, "height width channels -> channels height width")


def _on_black(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "black"), image)


def _per_channel(constants: tuple[float, ...], like: Tensor) -> Tensor:
    return rearrange(like.new_tensor(constants), "channels -> channels 1 1")
