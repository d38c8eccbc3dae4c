"""Where LightNet's heads look: the share of its context that a head takes from each patch."""

from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from onescan.models.image_classifier import ImageClassifier
from onescan.report.lightnet import key_shares, lightnet_mixers
from onescan.report.pictures import held_out_images, held_out_labels, to_pixels
from onescan.report.section import Figure, Section
from onescan.report.study import Study
from onescan.report.tiles import Picture, Row, tiles, tiles_width
from onescan.report.words import percent, plural
from onescan.shapes import Images

TITLE = "Where each head looks"
MOST_EXAMPLES, MOST_TILES = 10, 80
SHRUNK = 0.8  # tiles may become smaller than they are drawn, so that blocks stand side by side
MOST_AVERAGED = 200


def section(study: Study) -> Section:
    """The first, middle and last block's shares, over one image of each class."""
    model, mixers = study.model, lightnet_mixers(study.model)
    if not mixers or not isinstance(model, ImageClassifier):
        return Section(TITLE, lead="Not shown: this is no image classifier of LightNet mixers.")
    if not mixers[0].config.decay:
        return Section(TITLE, lead="Not shown: without decay, keys are no shares of a whole.")
    looks = [*_examples(study, model), _average(study, model)]
    blocks = sorted({0, len(mixers) // 2, len(mixers) - 1})
    tokens = looks[0].shares[0].shape[1]
    numbers = " The number below is the class token's share, in the same unit." * bool(model.prefix)
    figure = Figure(
        "Key importance, as a multiple of the uniform share",
        _panels(model, looks, blocks),
        "A row is an image, a column a head; colour, shaded by the image, says how much of the "
        f"head's context comes from a patch: white is 1/{tokens} ({percent(1 / tokens)}), which "
        f"all would have if keys were equal, orange is more and blue less.{numbers}",
        columns=3,
    )
    lead = (
        "A LightNet head reads one summary of all tokens, to which each contributes by the weight "
        f"of its key. These are the weights of seed {study.runs[0].seed}'s model. The last row is "
        f"the mean over {plural(len(_spread(study)), 'test image')}: what a head prefers whatever "
        "the image shows."
    )
    return Section(TITLE, (figure,), lead)


class Look(NamedTuple):
    """What is looked at, and each layer's shares of it."""

    name: str
    image: Picture
    shares: list[Float[Tensor, "H T"]]


def _examples(study: Study, model: ImageClassifier) -> list[Look]:
    """One image of each class: the first that the model knows, if it knows any."""
    labels, predictions = held_out_labels(study), study.array("predictions")[0]
    known = (labels == predictions).int()
    heads = lightnet_mixers(model)[0].config.num_heads
    present = labels.unique()[: min(MOST_EXAMPLES, max(MOST_TILES // heads, 3))]
    chosen = torch.stack([((labels == i) * (1 + known)).argmax() for i in present])
    images = held_out_images(study, chosen)
    shares = key_shares(model, images)
    return [
        Look(study.class_names[int(name)], image, [layer[i] for layer in shares])
        for i, (name, image) in enumerate(zip(present, _shown(study, images), strict=True))
    ]


def _average(study: Study, model: ImageClassifier) -> Look:
    images = held_out_images(study, _spread(study))
    means = [layer.mean(dim=0) for layer in key_shares(model, images)]
    return Look("mean", _shown(study, images).mean(dim=0), means)


def _spread(study: Study) -> Int[Tensor, " images"]:
    """Images at even distances, since a data set may be in the order of its classes."""
    every = -(-len(held_out_labels(study)) // MOST_AVERAGED)
    return torch.arange(0, len(held_out_labels(study)), every)


def _shown(study: Study, images: Images) -> Float[Tensor, "B height width rgb"]:
    return torch.from_numpy(to_pixels(study, images)).float() / 255


def _panels(model: ImageClassifier, looks: list[Look], blocks: list[int]) -> str:
    panels, width = "", 0.0
    for block in blocks:
        rows = [_row(model, look, block) for look in looks]
        alt = f"Heat maps of the importance that each head of block {block + 1} gives to patches"
        picture = tiles(rows, column="head", unit="the uniform share", alt=alt)
        panels += f"<div><h4>Block {block + 1} of {len(looks[0].shares)}</h4>{picture}</div>"
        width = SHRUNK * tiles_width(rows)
    return f'<div class="panels" style="--panel:{width:.0f}px">{panels}</div>'


def _row(model: ImageClassifier, look: Look, block: int) -> Row:
    times = look.shares[block] * look.shares[block].shape[1]  # H T, of the uniform share
    grid = model.patchify.grid_shape((model.config.channels, *look.image.shape[:2]))
    maps = rearrange(times[:, model.prefix :], "h (y x) -> h y x", x=grid[1])
    numbers = times[:, : model.prefix].sum(dim=1) if model.prefix else None
    return Row(look.name, look.image, maps, numbers)
