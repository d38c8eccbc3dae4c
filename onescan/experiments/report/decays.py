"""The section about the decays that the layers of LION learned."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from markupsafe import Markup
from matplotlib.axes import Axes
from torch import Tensor, nn

from onescan.experiments.report.images import examples_at
from onescan.experiments.report.mixers import (
    directions,
    evenly_spaced,
    find,
    other_mixers,
    run_hooked,
)
from onescan.experiments.report.page import Figure, Section, fragment
from onescan.experiments.report.plots import BLUE, MUTED, log_scale, positions_in_blocks, to_svg
from onescan.experiments.report.runs import RunGroup
from onescan.layers.mixers.lion import LionMixer, MeanDecays

DECAYS = "Learned decays"
DECAY_EXAMPLES = 32
MIN_DECAY, MAX_DECAY = 0.001, 0.99999  # values outside are drawn at the edge
LAMBDAS = (0.001, 0.1, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9999)
DECAY_MARGIN = 1.4  # factor by which the axis extends beyond the values
HALF_WIDTH, TWO_THIRDS = 560, 768  # CSS pixels

HalfLives = Float[np.ndarray, "blocks H channels"]  # in tokens


def learned_decays(group: RunGroup) -> Section:
    """The half-life of each head of each block of LION, scan by scan."""
    model, task, mixers = group.model, group.task, find(group.model, LionMixer)
    if not mixers:
        return Section(DECAYS, lead="Not shown: this model has no LION mixers.")
    if not any(list(mixer.decays.parameters()) for mixer in mixers):
        return Section(DECAYS, lead="Not shown: this model has no decays, or constant ones.")
    rows = evenly_spaced(len(task.test), min(DECAY_EXAMPLES, task.test_batch_size))
    batch = task.test.read(examples_at(task.test, rows)).batch
    means = mean_decays(model, partial(task.predict, model, batch))
    scans = [half_lives(scan) for scan in zip(*means, strict=True)]
    lead = (
        "From one token to the next, a head keeps the fraction lambda of its state. After the "
        "half-life, half of it is left; with lambda = 1 nothing would be forgotten. Where lambda "
        f"depends on the token, this is its geometric mean over {len(batch[0])} held-out "
        f"{task.unit}. Model of seed {group.runs[0].seed}.{other_mixers(model, mixers)}"
    )
    return Section(DECAYS, [_decay_figure(scans)], lead, folded=True)


def mean_decays(model: nn.Module, run: Callable[[], object]) -> list[MeanDecays]:
    """Return the mean decay of each head while `run` applies the model, per LION mixer.

    A mixer may be called once for each group of documents of a batch; calls are averaged
    geometrically, weighted by their numbers of tokens.
    """
    calls: dict[nn.Module, list[tuple[int, MeanDecays]]] = {
        mixer: [] for mixer in find(model, LionMixer)
    }

    def record(mixer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        assert isinstance(mixer, LionMixer)
        (x, grid), keep = arguments, options.get("keep")
        mean = mixer.mean_decays(x, grid, keep=keep, lower_bound=options.get("lower_bound"))
        tokens = x[..., 0].numel() if keep is None else int(keep.sum())
        calls[mixer].append((tokens, mean))

    run_hooked(model, LionMixer, record, run)
    return [
        torch.stack([tokens * mean.log() for tokens, mean in of_mixer])
        .sum(dim=0)
        .div(sum(tokens for tokens, _ in of_mixer))
        .exp()
        for of_mixer in calls.values()
    ]


def half_lives(decays: tuple[Tensor, ...]) -> HalfLives:
    """Return the half-lives in tokens of each block's decays, [H] or [H, K].

    >>> half_lives((torch.tensor([0.5, 0.5**0.1]),)).round(3).tolist()
    [[[1.0], [10.0]]]
    """
    stacked = torch.stack(decays).double().clamp(MIN_DECAY, MAX_DECAY)  # blocks H (K)
    lives: HalfLives = (math.log(0.5) / stacked.log()).numpy()
    return lives if lives.ndim > 2 else lives[..., None]  # noqa: PLR2004


def _decay_figure(scans: Sequence[HalfLives]) -> Figure:
    shown = [np.quantile(scan, (0.05, 0.5, 0.95), axis=-1) for scan in scans]
    limits = (
        min(each.min() for each in shown) / DECAY_MARGIN,
        max(each.max() for each in shown) * DECAY_MARGIN,
    )
    single = len(scans) == 1
    names = [""] if single else [name for name, _ in directions(len(scans))[::-1]]
    panels = [  # the last axis is scanned first
        (name, decay_dots(each, limits, TWO_THIRDS if single else HALF_WIDTH))
        for name, each in zip(names, shown, strict=True)
    ]
    channels = " A line spans the middle 90% of a head's channels, the dot is their median."
    edge = f" Values below {MIN_DECAY} or above {MAX_DECAY} are drawn at the edge."
    beyond = any(
        (scan <= _half_life(MIN_DECAY)).any() or (scan >= _half_life(MAX_DECAY)).any()
        for scan in scans
    )
    return Figure(
        "Half-life by block",
        fragment("panels", panels, panel=HALF_WIDTH),
        "Each dot is a head, in the order of heads within the block. The axis on the right shows "
        f"lambda.{channels * (scans[0].shape[-1] > 1)}{edge * beyond}",
        columns=2 if single else 3,
    )


def decay_dots(
    quantiles: Float[np.ndarray, "3 blocks H"], limits: tuple[float, float], width: int
) -> Markup:
    """Draw the half-lives of heads, block by block.

    Args:
        quantiles: Low, median and high half-life over a head's channels, in tokens.
        limits: Limits of the vertical axis.
        width: Width in CSS pixels.
    """
    low, median, high = quantiles
    blocks, heads = median.shape

    def draw(axes: Axes) -> None:
        x = positions_in_blocks(axes, median, spread=0.7)
        axes.set_ylim(limits)
        axes.vlines(x, low, high, color=BLUE, alpha=0.35, linewidth=1.2)
        axes.plot(x, median, ".", color=BLUE, markersize=6)
        axes.set_ylabel("half-life, tokens" + log_scale(axes))
        for between in range(1, blocks):
            axes.axvline(between + 0.5, color=MUTED, alpha=0.15, linewidth=0.8)
        _lambda_axis(axes)

    description = f"Dot chart of the half-lives of {heads} heads in each of {blocks} blocks"
    return to_svg(draw, description=description, width=width)


def _lambda_axis(axes: Axes) -> None:
    """Add an axis on the right with the lambda of each half-life."""
    low, high = axes.get_ylim()
    right = axes.twinx()
    right.set_yscale(axes.get_yscale())
    right.set_ylim(low, high)
    right.minorticks_off()
    ticks = [each for each in LAMBDAS if low <= _half_life(each) <= high]
    right.set_yticks([_half_life(each) for each in ticks], [str(each) for each in ticks])
    right.set_ylabel("lambda")
    right.grid(visible=False)
    right.spines["left"].set_visible(False)


def _half_life(decay: float) -> float:
    return math.log(0.5) / math.log(decay)
