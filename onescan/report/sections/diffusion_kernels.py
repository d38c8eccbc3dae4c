"""What LDN's diffusion learnt: whom each block listens to, and how far that reaches in the end."""

import torch

from onescan.models.image_classifier import ImageClassifier
from onescan.report.diffusion.dots import step_figure, width_figure
from onescan.report.diffusion.kernels import kernel_figure
from onescan.report.diffusion.lines import (
    Line,
    blocks_to_hear_all,
    diffusing_lines,
    diffusion_mixers,
    grid_shape,
    nearest,
)
from onescan.report.diffusion.reached import reached_figures
from onescan.report.runs import RunGroup
from onescan.report.section import Section
from onescan.report.words import TIMES, percent, plural

TITLE = "How far diffusion reaches"


@torch.no_grad()
def section(study: RunGroup) -> Section:
    """Each block's kernels, and what they make of a token in the middle, block after block."""
    model, mixers = study.model, diffusion_mixers(study.model)
    if not mixers or not isinstance(model, ImageClassifier):
        return Section(TITLE, lead="Not shown: this is no image classifier of LDN mixers.")
    if not mixers[0].config.diffusion:
        return Section(TITLE, lead="Not shown: this model was built without diffusion.")
    lines, (rows, columns) = diffusing_lines(model), grid_shape(model)
    lead = (
        "In each block a token gives up a part of itself and takes in as much of those nearby, "
        "the nearer the more: it diffuses. The blocks' other parts are not in these pictures. "
        f"Seed {study.runs[0].seed}'s model, at its usual image size of {rows} {TIMES} {columns} "
        f"patches. {_order(model)} {_hearing(model, lines)}{_dropped(model)}"
    )
    figures = (
        kernel_figure(lines),
        width_figure(lines),
        step_figure(lines),
        *reached_figures(lines),
    )
    return Section(TITLE, figures, lead)


def _order(model: ImageClassifier) -> str:
    """What a distance means."""
    if diffusion_mixers(model)[0].config.separable:
        without = " Tokens that are no patches take no part." * bool(model.prefix)
        return f"Patches diffuse along their columns, and then along their rows.{without}"
    rows, columns = grid_shape(model)
    if rows == 1:
        return "Tokens are the patches from left to right."
    before = f", after {plural(model.prefix, 'token')} of another kind" * bool(model.prefix)
    return (
        f"Tokens are the patches row by row{before}: "
        f"{plural(columns, 'token')} back lies the patch right above."
    )


def _dropped(model: ImageClassifier) -> str:
    """What the pictures leave out of a model that drops paths."""
    rate = model.config.drop_path
    if not rate:
        return ""
    return (
        " As paths are dropped in training, a block changes tokens by less than this when they are "
        f"judged: by {percent(rate)} less in the last."
    )


def _hearing(model: ImageClassifier, lines: list[Line]) -> str:
    """Whether all have heard of all in the end, and by what."""
    config, noun = diffusion_mixers(model)[0].config, lines[0].noun
    others = f"every {noun} before it" if config.causal else f"every other {noun}"
    depth, enough = len(lines[0].learnt), blocks_to_hear_all(lines)
    if enough is not None:
        when = "in the first block" if enough == 1 else f"after {enough} of {depth} blocks"
        said = f"By diffusion alone each {noun} has heard of {others}, however little, {when}."
    else:
        said = (
            f"Diffusion alone does not let each {noun} hear of {others} within "
            f"{plural(depth, 'block')}: {_unheard(lines)}."
        )
    before = " before it" * config.causal
    attention = f" Linear attention hears of all tokens{before} in every block anyway."
    return said + attention * config.linear_attention


def _unheard(lines: list[Line]) -> str:
    """From which distance on some have not heard of each other."""
    said = []
    for line in lines:
        apart, where = int(nearest(line)[-1]), f"{line.name.lower()} " * bool(line.name)
        if apart < line.tokens - 1:
            said.append(f"{where}not all {line.nouns} more than {apart} apart do")
    return ", and ".join(said)
