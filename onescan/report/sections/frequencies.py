"""What LRPE learnt: how fast each key feature turns with position."""

import numpy as np
import torch
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import MaxNLocator

from onescan.models.denoiser import Denoiser
from onescan.models.image_classifier import ImageClassifier
from onescan.ops.lrpe import lrpe_frequencies
from onescan.report.chart import chart
from onescan.report.lightnet import lightnet_mixers
from onescan.report.palette import DEPTH, VERMILION
from onescan.report.runs import RunGroup
from onescan.report.section import Figure, Section
from onescan.report.words import TIMES, plural

TITLE = "How keys turn with position"
DIRECTIONS = ("Along columns", "Along rows")


def section(study: RunGroup) -> Section:
    """Learnt against initial frequencies of MD-LRPE, axis by axis."""
    mixers = [mixer for mixer in lightnet_mixers(study.model) if mixer.config.lrpe]
    if not mixers or not isinstance(study.model, ImageClassifier | Denoiser):
        return Section(TITLE, lead="Not shown: this model has no learnt rotations (MD-LRPE).")
    theta = torch.stack([mixer.theta.detach() for mixer in mixers])  # blocks H K
    width = theta.shape[-1]
    initial = lrpe_frequencies(width, axes=len(DIRECTIONS))
    per_axis = -(-width // len(DIRECTIONS))
    panels = "".join(
        f"<div><h4>{direction}</h4>{_dots(learnt.numpy(), start.numpy(), direction)}</div>"
        for direction, learnt, start in zip(
            DIRECTIONS, theta.split(per_axis, dim=-1), initial.split(per_axis), strict=True
        )
    )
    figure = Figure(
        "Frequencies, learnt and initial",
        f'<div class="panels">{panels}</div>',
        "A column is one key feature, a dot is one head of one block (the darker, the later the "
        "block), an orange dash is where all started. At 0 a feature ignores position, at 1 "
        "or -1 it turns a sixth of a circle from one patch to the next.",
        columns=2,
    )
    lead = (
        f"MD-LRPE turns feature j of queries and keys by the angle position {TIMES} theta_j, so "
        "that their product depends on how two patches lie to each other; half of the features "
        "follow each axis. "
        f"{plural(theta[..., 0].numel(), 'head')} in {plural(len(theta), 'block')}, "
        f"seed {study.runs[0].seed}'s model."
    )
    return Section(TITLE, (figure,), lead)


def _dots(learnt: np.ndarray, initial: np.ndarray, direction: str) -> str:
    blocks, heads, features = learnt.shape
    places = np.arange(features) + np.linspace(-0.25, 0.25, blocks * heads).reshape(
        blocks, heads, 1
    )

    def draw(figure: Drawing) -> None:
        axes = figure.add_subplot(xlabel="key feature", ylabel="theta, radians per patch")
        for block in range(blocks):
            color = DEPTH(block / max(blocks - 1, 1))
            axes.plot(places[block].T, learnt[block].T, ".", color=color, markersize=4)
        left = np.arange(features) - 0.45
        axes.hlines(initial, left, left + 0.9, color=VERMILION, linewidth=1.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    alt = f"Dot chart of the frequencies of {features} key features {direction.lower()}"
    return chart(draw, alt=alt)
