"""Held-out images: those the runs were judged on, as pixels and as small pictures in the page."""

import io
from base64 import b64encode
from html import escape
from itertools import islice

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Int, UInt8
from PIL import Image
from torch import Tensor

from onescan.data import DataSet, Example
from onescan.data.images import unit_pixels
from onescan.report.runs import RunGroup
from onescan.shapes import Images, Labels
from onescan.tasks import ImageClassification

LONGEST_SIDE = 112
COARSE = 48  # images with shorter sides are enlarged as crisp squares

Pixels = UInt8[np.ndarray, "height width rgb"]


def held_out_labels(study: RunGroup) -> Labels:
    """The true classes of the held-out images, in the order of the evaluations' rows.

    Raises:
        ValueError: the runs were not judged on the same images.
    """
    labels = study.array("labels")
    if (labels != labels[0]).any():
        raise ValueError("the runs were judged on different images: their labels differ")
    return labels[0]


def left_out(study: RunGroup) -> str:
    """Say so where some held-out images could not be read, so that rows tell no places.

    Empty where all could.
    """
    rows, images = len(held_out_labels(study)), len(study.task.test)
    if rows == images:
        return ""
    return f"Only {rows:,} of {images:,} held-out images could be read, so none can be told by row."


def held_out_pixels(study: RunGroup, places: Int[Tensor, " B"]) -> Images:
    """Read some of the held-out images: pixels from 0 to 1.

    Raises:
        ValueError: the data is not that which the runs were judged on, or cannot be read.
    """
    assert isinstance(study.task, ImageClassification)
    examples = _examples_at(study.task.test, places.tolist())
    if len(examples) == len(places):
        pixels, labels = study.task.test.read(examples).batch
        if torch.equal(labels, held_out_labels(study)[places]):
            return unit_pixels(pixels)
    raise ValueError("the held-out images have changed since the runs were judged on them")


def _examples_at(data: DataSet, places: list[int]) -> list[Example]:
    """Walk to the last of them, since a stream cannot be looked up."""
    wanted = set(places)
    walk = enumerate(islice(data.examples(seed=None), max(places) + 1))
    found = {place: example for place, (example, _) in walk if place in wanted}
    return [found[place] for place in places if place in found]


def to_bytes(pixels: Images) -> UInt8[np.ndarray, "B height width rgb"]:
    """Turn pixels from 0 to 1 into bytes; grey images become red, green and blue."""
    if pixels.shape[1] not in (1, 3):  # neither grey nor colour: show the mean
        pixels = pixels.mean(dim=1, keepdim=True)
    pixels = (pixels.clamp(0, 1) * 255).expand(-1, 3, -1, -1).round().to(torch.uint8)
    return rearrange(pixels, "b c h w -> b h w c").numpy()


def picture(pixels: Pixels, *, alt: str) -> str:
    """An `<img>` that needs no other file, shrunk where it is large."""
    image = Image.fromarray(pixels)
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    kind, format = ("coarse", "png") if max(image.size) < COARSE else ("fine", "jpeg")
    file = io.BytesIO()
    image.save(file, format=format, optimize=True)
    data = b64encode(file.getvalue()).decode()
    return f'<img class="{kind}" alt="{escape(alt)}" src="data:image/{format};base64,{data}">'
