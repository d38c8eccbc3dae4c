"""What LION's decays learnt: how long each head of each block remembers."""

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn

from onescan.layers.mixers.lion import LionMixer, MeanDecays
from onescan.models.image_classifier import ImageClassifier
from onescan.report.chart import chart
from onescan.report.palette import BLUE, MUTED
from onescan.report.pictures import held_out_labels, held_out_pixels, left_out
from onescan.report.runs import RunGroup
from onescan.report.scales import log_scale
from onescan.report.section import Figure, Section
from onescan.report.words import plural
from onescan.shapes import Images
from onescan.tasks import ImageClassification

TITLE = "Learnt decays"
MOST_IMAGES = 32
SCANS = ("Along rows", "Along columns")  # the last axis is scanned first
LEAST, MOST = 0.001, 0.99999  # a decay beyond is drawn as if it were this
LAMBDAS = (0.001, 0.1, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9999)
MARGIN = 1.4  # by which factor the axis goes on below and above
MOST_TICKS = 24
SPREAD = 0.7  # of a block's place, for its heads
QUANTILES = (0.05, 0.5, 0.95)
WIDE, HALF = 784, 560  # CSS pixels: two of the page's columns; half of all three

HalfLives = Float[np.ndarray, "blocks H channels"]  # in tokens


def section(study: RunGroup) -> Section:
    """The half-life of what each head of each block has read, scan by scan."""
    model, mixers = study.model, lion_mixers(study.model)
    if not mixers or not isinstance(model, ImageClassifier):
        return Section(TITLE, lead="Not shown: this is no image classifier of LION mixers.")
    if not any(list(mixer.decays.parameters()) for mixer in mixers):
        return Section(TITLE, lead="Not shown: this model's decays are none, or constant.")
    if why := left_out(study):
        return Section(TITLE, lead=why)
    images = _images(study)
    scans = [half_lives(scan) for scan in zip(*mean_decays(model, images), strict=True)]
    lead = (
        "From one token to the next along its scan, a head keeps the part lambda of what it has "
        "read, so that after a half-life half of it is left; 1 would forget nothing. "
        f"Seed {study.runs[0].seed}'s model; where tokens choose lambda, this is its geometric "
        "mean over "
        f"{plural(len(images), 'test image')}."
    )
    return Section(TITLE, (_figure(scans),), lead)


def lion_mixers(model: nn.Module) -> list[LionMixer]:
    """Find the model's LION mixers, from the first block to the last."""
    return [module for module in model.modules() if isinstance(module, LionMixer)]


def mean_decays(model: nn.Module, images: Images) -> list[MeanDecays]:
    """What each head keeps from one token to the next, mixer by mixer."""
    decays: list[MeanDecays] = []

    def catch(mixer: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(mixer, LionMixer)
        decays.append(mixer.mean_decays(*arguments))

    hooks = [mixer.register_forward_pre_hook(catch) for mixer in lion_mixers(model)]
    try:
        with torch.no_grad():
            model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return decays


def half_lives(decays: tuple[Tensor, ...]) -> HalfLives:
    """Tokens after which half is left, of each block's decays, [H] or [H, K].

    >>> half_lives((torch.tensor([0.5, 0.5**0.1]),)).round(3).tolist()
    [[[1.0], [10.0]]]
    """
    stacked = torch.stack(decays).double().clamp(LEAST, MOST)  # blocks H (K)
    lives: HalfLives = (math.log(0.5) / stacked.log()).numpy()
    return lives if lives.ndim > 2 else lives[..., None]  # noqa: PLR2004


def _images(study: RunGroup) -> Images:
    """Test images at even distances, as a data set may be in the order of its classes."""
    assert isinstance(study.task, ImageClassification)
    last = len(held_out_labels(study)) - 1
    places = torch.linspace(0, last, min(last + 1, MOST_IMAGES)).round().int()
    return study.task.format.model_input(held_out_pixels(study, places))


def _figure(scans: list[HalfLives]) -> Figure:
    shown = [np.quantile(scan, QUANTILES, axis=-1) for scan in scans]
    limits = min(each.min() for each in shown) / MARGIN, max(each.max() for each in shown) * MARGIN
    diagonal = scans[0].shape[-1] > 1
    width = WIDE if len(scans) == 1 else HALF
    panels = "".join(
        f"<div>{f'<h4>{name}</h4>' * (len(scans) > 1)}{_dots(scan, limits, width)}</div>"
        for name, scan in zip(SCANS, shown, strict=False)
    )
    channels = " A line spans the middle 90% of a head's channels; the dot is their median."
    edge = " What is below 0.001 or above 0.99999 is drawn there."
    beyond = any((scan <= _life(LEAST)).any() or (scan >= _life(MOST)).any() for scan in scans)
    return Figure(
        "Half-life, block by block",
        f'<div class="panels" style="--panel:{width}px">{panels}</div>',
        "A dot is a head, in the order of heads within its block. The higher, the longer it "
        "remembers; numbers on the right are lambda."
        f"{channels * diagonal}{edge * beyond}",
        columns=2 if len(scans) == 1 else 3,
    )


def _dots(scan: Float[np.ndarray, "3 blocks H"], limits: tuple[float, float], width: int) -> str:
    low, median, high = scan
    blocks, heads = median.shape
    within = SPREAD * ((np.arange(heads) + 0.5) / heads - 0.5)
    places = np.arange(1, blocks + 1)[:, None] + within

    def draw(figure: Drawing) -> None:
        axes = figure.add_subplot(xlabel="block", ylabel="half-life, tokens", ylim=limits)
        axes.set_xlim(0.5, blocks + 0.5)
        axes.vlines(places, low, high, color=BLUE, alpha=0.35, linewidth=1.2)
        axes.plot(places, median, ".", color=BLUE, markersize=6)
        axes.xaxis.set_major_locator(MaxNLocator(MOST_TICKS, integer=True))
        log_scale(axes)
        axes.grid(visible=False, axis="x")
        for between in range(1, blocks):
            axes.axvline(between + 0.5, color=MUTED, alpha=0.15, linewidth=0.8)
        _lambdas(axes)

    alt = f"Dot chart of the half-lives of {heads} heads in each of {blocks} blocks"
    return chart(draw, alt=alt, width=width)


def _lambdas(axes: Axes) -> None:
    """Write on the right which lambda a half-life is."""
    low, high = axes.get_ylim()
    right = axes.twinx()
    right.set_yscale("log")
    right.set_ylim(low, high)
    right.minorticks_off()
    known = [each for each in LAMBDAS if low <= _life(each) <= high]
    right.set_yticks([_life(each) for each in known], [str(each) for each in known])
    right.set_ylabel("lambda")
    right.grid(visible=False)
    right.spines["left"].set_visible(False)


def _life(decay: float) -> float:
    return math.log(0.5) / math.log(decay)
