"""Where LightNet's heads look: the share of its context that a head takes from each patch."""

from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from onescan.models.image_classifier import ImageClassifier
from onescan.report.lightnet import Shares, key_shares, lightnet_mixers
from onescan.report.pictures import held_out_labels, held_out_pixels, left_out, to_bytes
from onescan.report.runs import RunGroup
from onescan.report.section import Figure, Section
from onescan.report.tiles import Picture, Row, tiles, tiles_width
from onescan.report.words import percent, plural
from onescan.shapes import Images
from onescan.tasks import ImageClassification

TITLE = "Where each head looks"
MOST_EXAMPLES, MOST_TILES = 10, 80
MOST_BLOCKS, MOST_HEADS = 24, 16
SHRUNK = 0.8  # tiles may become smaller than they are drawn, so that blocks stand side by side
MOST_AVERAGED, AT_ONCE = 100, 20  # images


def section(study: RunGroup) -> Section:
    """Shares over one image of each class in three blocks, and on average in every block."""
    model, mixers = study.model, lightnet_mixers(study.model)
    if not mixers or not isinstance(model, ImageClassifier):
        return Section(TITLE, lead="Not shown: this is no image classifier of LightNet mixers.")
    if why := left_out(study):
        return Section(TITLE, lead=why)
    if not mixers[0].config.decay:
        return Section(TITLE, lead="Not shown: without decay, keys are no shares of a whole.")
    lead = (
        "A LightNet head reads one summary of all tokens, to which each contributes by the weight "
        f"of its key. These are the weights of seed {study.runs[0].seed}'s model."
    )
    return Section(TITLE, (_by_image(study, model), _by_block(study, model)), lead)


def _by_image(study: RunGroup, model: ImageClassifier) -> Figure:
    looks, depth = _examples(study, model), len(model.blocks)
    blocks = sorted({0, depth // 2, depth - 1})
    panels, width = "", 0.0
    for block in blocks:
        rows = [_row(model, look, look.name, block) for look in looks]
        alt = f"Heat maps of the importance that each head of block {block + 1} gives to patches"
        panels += f"<div><h4>Block {block + 1} of {depth}</h4>{_tiles(model, rows, alt)}</div>"
        width = SHRUNK * tiles_width(rows)
    tokens = looks[0].shares[0].shape[1]
    number = " The number below is the class token's share, in the same unit." * model.prefix
    left_out = depth - len(blocks)
    some = f" Left out: {plural(left_out, 'block')} between them." * (left_out > 0)
    return Figure(
        "Key importance, as a multiple of the uniform share",
        f'<div class="panels" style="--panel:{width:.0f}px">{panels}</div>',
        "A row is an image, a column a head; colour, shaded by the image, says how much of the "
        f"head's context comes from a patch: white is 1/{tokens} ({percent(1 / tokens, 2)}), which "
        f"all would have if keys were equal, orange is more and blue less.{number}{some}"
        f"{_heads_left_out(model)}",
        columns=3,
    )


def _by_block(study: RunGroup, model: ImageClassifier) -> Figure:
    look, depth = _average(study, model), len(model.blocks)
    blocks = _spread(depth, MOST_BLOCKS)
    rows = [_row(model, look, f"block {block + 1}", block) for block in blocks]
    some = f" {len(blocks)} of {depth} blocks are shown." * (len(blocks) < depth)
    alt = "Heat maps of the mean importance that each head gives to patches"
    drawn = _tiles(model, rows, alt, with_images=False)
    return Figure(
        "Every block, on average over images",
        f'<div class="panels" style="--panel:{SHRUNK * tiles_width(rows):.0f}px">'
        f"<div>{drawn}</div></div>",
        "A row is a block, a column a head; the same colours, as the mean over "
        f"{plural(_averaged(study), 'test image')}: what a head prefers whatever the image shows. "
        "A white tile is a head that has no preferred place."
        f"{some}{_heads_left_out(model)}",
        columns=3,
    )


class Look(NamedTuple):
    """What is looked at, and each layer's shares of it."""

    name: str
    image: Picture
    shares: list[Float[Tensor, "H T"]]


def _examples(study: RunGroup, model: ImageClassifier) -> list[Look]:
    """One image of each class, or of some: the first that the model knows, if it knows any."""
    labels, predictions = held_out_labels(study), study.array("predictions")[0]
    known = (labels == predictions).int()
    present, heads = labels.unique(), len(_heads(model))
    present = present[_spread(len(present), min(MOST_EXAMPLES, max(MOST_TILES // heads, 3)))]
    chosen = torch.stack([((labels == i) * (1 + known)).argmax() for i in present])
    pixels = held_out_pixels(study, chosen)
    shares = _shares(study, model, pixels)
    return [
        Look(study.class_names[int(name)], image, [layer[i] for layer in shares])
        for i, (name, image) in enumerate(zip(present, _shown(pixels), strict=True))
    ]


def _average(study: RunGroup, model: ImageClassifier) -> Look:
    """Over images at even distances, as a data set may be in the order of its classes; on white."""
    places = _spread(len(held_out_labels(study)), MOST_AVERAGED)
    pixels = held_out_pixels(study, torch.tensor(places))
    parts = [_shares(study, model, some) for some in pixels.split(AT_ONCE)]
    means = [torch.cat(layer).mean(dim=0) for layer in zip(*parts, strict=True)]
    return Look("mean", torch.ones_like(_shown(pixels[:1])[0]), means)


def _averaged(study: RunGroup) -> int:
    return min(len(held_out_labels(study)), MOST_AVERAGED)


def _spread(count: int, most: int) -> list[int]:
    """At most so many of 0 to count - 1, at even distances, both ends among them.

    >>> _spread(3, 5), _spread(10, 4)
    ([0, 1, 2], [0, 3, 6, 9])
    """
    return torch.linspace(0, count - 1, min(count, most)).round().int().tolist()


def _shares(study: RunGroup, model: ImageClassifier, pixels: Images) -> list[Shares]:
    assert isinstance(study.task, ImageClassification)
    return key_shares(model, study.task.format.model_input(pixels))


def _shown(pixels: Images) -> Float[Tensor, "B height width rgb"]:
    return torch.from_numpy(to_bytes(pixels)).float() / 255


def _heads(model: ImageClassifier) -> list[int]:
    return _spread(model.config.mixer.num_heads, MOST_HEADS)


def _heads_left_out(model: ImageClassifier) -> str:
    shown, heads = len(_heads(model)), model.config.mixer.num_heads
    return f" {shown} of {heads} heads are shown." * (shown < heads)


def _tiles(model: ImageClassifier, rows: list[Row], alt: str, *, with_images: bool = True) -> str:
    names = [f"{'head ' * (i == 0)}{head + 1}" for i, head in enumerate(_heads(model))]
    unit = "the uniform share"
    return tiles(rows, columns=names, unit=unit, alt=alt, with_images=with_images)


def _row(model: ImageClassifier, look: Look, name: str, block: int) -> Row:
    shares = look.shares[block][_heads(model)]
    times = shares * shares.shape[1]  # H T, of the uniform share
    grid = model.patchify.grid_shape((model.config.channels, *look.image.shape[:2]))
    maps = rearrange(times[:, model.prefix :], "h (y x) -> h y x", x=grid[1])
    numbers = times[:, : model.prefix].sum(dim=1) if model.prefix else None
    return Row(name, look.image, maps, numbers)
