"""What diffuses in a model, and how far it reaches block after block."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import nn

from onescan.layers.mixers.linear_diffusion import Diffusion, LinearDiffusionMixer
from onescan.models.image_classifier import ImageClassifier
from onescan.ops.linear_diffusion import diffusion_operator
from onescan.shapes import Operators

Lags = Int[np.ndarray, " lags"]  # places back; negative ones lie ahead
PerBlock = Float[np.ndarray, "blocks H"]
Influence = Float[np.ndarray, "blocks H _"]  # each line has its own number of tokens
Reach = Int[np.ndarray, "blocks H sides"]  # back, ahead


class Line(NamedTuple):
    """What diffuses: all tokens in their order, or the patches along an axis of the grid.

    Attributes:
        name: above its pictures; empty where there is only one.
        noun: what lies along it.
        nouns: several of them.
        back: where lags above 0 lie.
        tokens: how many there are.
        learnt: block by block.
        initial: the same before training.
    """

    name: str
    noun: str
    nouns: str
    back: str
    tokens: int
    learnt: list[Diffusion]
    initial: list[Diffusion]

    @property
    def kernels(self) -> int:
        """How many each block has."""
        return len(self.learnt[0].raw_past)

    @property
    def implicit(self) -> bool:
        """Whether a step hears by way of others, too."""
        return self.learnt[0].scheme != "explicit"

    @property
    def middle(self) -> int:
        """The place of the token in the middle."""
        return self.tokens // 2

    @property
    def lags(self) -> Lags:
        """How far back each lies of the one in the middle."""
        return self.middle - np.arange(self.tokens)

    @property
    def heard_lags(self) -> Lags:
        """Those of places that can be heard of."""
        return self.lags[self.lags >= 0] if self.learnt[0].raw_future is None else self.lags


def diffusion_mixers(model: nn.Module) -> list[LinearDiffusionMixer]:
    """Find the model's LDN mixers, from the first block to the last."""
    return [module for module in model.modules() if isinstance(module, LinearDiffusionMixer)]


def diffusing_lines(model: ImageClassifier) -> list[Line]:
    """What the model's tokens diffuse along, with every block's diffusion there."""
    mixers, (rows, columns) = diffusion_mixers(model), grid_shape(model)
    places = [("", "token", "tokens", "tokens before it", model.prefix + rows * columns)]
    if mixers[0].config.separable:
        places = [
            ("Along columns", "patch", "patches", "patches above", rows),
            ("Along rows", "patch", "patches", "patches to the left", columns),
        ]
    initial = [_initial(mixer, model.config.width, len(places)) for mixer in mixers]
    return [
        Line(*place, learnt=_along(axis, mixers), initial=_along(axis, initial))
        for axis, place in enumerate(places)
    ]


def grid_shape(model: ImageClassifier) -> tuple[int, ...]:
    """Rows and columns of patches at the model's usual image size."""
    config = model.config
    return model.patchify.grid_shape((config.channels, *config.image_size))


@torch.no_grad()
def influence(line: Line, token: int) -> Influence:
    """What part of a token is of which other after each block: its row of A_1, of A_2 A_1, ...

    Source: LDN, arXiv:2502.12381, Sec. 4.1.
    """
    itself = torch.zeros(line.kernels, 1, line.tokens, dtype=torch.float64)
    itself[..., token] = 1
    rows = itself[:, :0]
    for diffusion in reversed(line.learnt):
        rows = torch.cat([itself, rows], dim=1) @ _operators(diffusion, line.tokens)
    return rows.transpose(0, 1).numpy()


def distance(shares: Influence, lags: Lags) -> PerBlock:
    """How far what a token consists of lies from it: root mean square, in places.

    >>> distance(np.array([[[0.25, 0.5, 0.25]]]), np.array([2, 0, -2])).round(3).tolist()
    [[1.414]]
    """
    weights = np.abs(shares)  # an implicit step's may be below 0
    mean_square: PerBlock = (weights * np.square(lags)).sum(axis=-1) / weights.sum(axis=-1)
    return np.sqrt(mean_square)


@torch.no_grad()
def reach(line: Line) -> Reach:
    """How many places back and ahead a token has heard of after each block, however little.

    A token keeps a share of itself, and all weights up to a kernel's furthest are above 0: so what
    the blocks reach adds up. An implicit step hears by way of those between.
    """
    sides = []
    for diffusion in line.learnt:
        weights = diffusion.weights()
        taken = weights * diffusion.dt(weights).unsqueeze(1)
        ahead, _, back = taken.tensor_split((diffusion.radius, diffusion.radius + 1), dim=1)
        heard = torch.stack([(back > 0).sum(1), (ahead > 0).sum(1)], dim=1)  # H sides
        sides.append((heard > 0) * line.tokens if line.implicit else heard)
    total: Reach = torch.stack(sides).cumsum(0).numpy()
    return total


def nearest(line: Line) -> Int[np.ndarray, " blocks"]:
    """How many places away a token has heard of all others after each block, in all channels."""
    sides = slice(None) if line.learnt[0].raw_future is not None else slice(1)
    places: Int[np.ndarray, " blocks"] = reach(line)[..., sides].min(axis=(1, 2))
    return places


def blocks_to_hear_all(lines: list[Line]) -> int | None:
    """After how many blocks every token has heard of every other, in all channels.

    Of every one before it, where none looks ahead; None where the model has too few blocks.
    """
    heard = np.stack([nearest(line) >= line.tokens - 1 for line in lines]).all(axis=0)
    return int(heard.argmax()) + 1 if heard.any() else None


def _initial(mixer: LinearDiffusionMixer, width: int, axes: int) -> LinearDiffusionMixer:
    """The mixer's diffusion before training, in which chance has no part."""
    config = replace(mixer.config, local_update=False, linear_attention=False)
    return config.build(width=width, axes=axes)


def _along(axis: int, mixers: list[LinearDiffusionMixer]) -> list[Diffusion]:
    """Each mixer's diffusion along an axis."""
    diffusions = []
    for mixer in mixers:
        diffusion = mixer.diffusions[axis]
        assert isinstance(diffusion, Diffusion)
        diffusions.append(diffusion)
    return diffusions


def _operators(diffusion: Diffusion, tokens: int) -> Operators:
    weights = diffusion.weights()
    step = diffusion.dt(weights)
    return diffusion_operator(weights.double(), step.double(), tokens, scheme=diffusion.scheme)
