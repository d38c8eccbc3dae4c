"""Held-out images: those the runs were judged on, as pixels and as small pictures in the page."""

import io
from base64 import b64encode
from html import escape

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Int, UInt8
from PIL import Image
from torch import Tensor

from onescan.data import ImageFormat
from onescan.report.study import Study
from onescan.shapes import Images, Labels
from onescan.tasks import ImageClassification

LONGEST_SIDE = 80
COARSE = 48  # images with shorter sides are enlarged as crisp squares

Pixels = UInt8[np.ndarray, "height width rgb"]


def held_out_labels(study: Study) -> Labels:
    """The true classes of the held-out images, in the order of the evaluations' rows.

    Raises:
        ValueError: the runs were not judged on the same images.
    """
    labels = study.array("labels")
    if (labels != labels[0]).any():
        raise ValueError("the runs were judged on different images: their labels differ")
    return labels[0]


def held_out_images(study: Study, indices: Int[Tensor, " B"]) -> Images:
    """Read some of the held-out images, as the model does.

    Raises:
        ValueError: the data is not that which the runs were judged on.
    """
    assert isinstance(study.task, ImageClassification)
    images, labels = study.task.data.test.batch(indices)
    if not torch.equal(labels, held_out_labels(study)[indices]):
        raise ValueError("the held-out images have changed since the runs were judged on them")
    return images


def to_pixels(study: Study, images: Images) -> UInt8[np.ndarray, "B height width rgb"]:
    """Turn what the model reads into pixels; grey images become red, green and blue."""
    assert isinstance(study.task.format, ImageFormat)
    pixels = study.task.format.to_pixels(images).clamp(0, 1) * 255
    if pixels.shape[1] not in (1, 3):  # neither grey nor colour: show the mean
        pixels = pixels.mean(dim=1, keepdim=True)
    pixels = pixels.expand(-1, 3, -1, -1).round().to(torch.uint8)
    return rearrange(pixels, "b c h w -> b h w c").numpy()


def picture(pixels: Pixels, *, alt: str) -> str:
    """An `<img>` that needs no other file, shrunk where it is large."""
    image = Image.fromarray(pixels)
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    png = io.BytesIO()
    image.save(png, format="png", optimize=True)
    kind = "coarse" if max(image.size) < COARSE else "fine"
    data = b64encode(png.getvalue()).decode()
    return f'<img class="{kind}" alt="{escape(alt)}" src="data:image/png;base64,{data}">'
