"""A denoiser in a few sentences."""

import math

from onescan.models.denoiser import Denoiser
from onescan.report.runs import RunGroup
from onescan.report.words import TIMES, plural
from onescan.tasks import ImageGeneration

TOLD = {
    "noise": "the noise that was mixed in",
    "v": "the way from image to noise, at the same distance from both",
    "flow": "the straight way from image to noise",
}


def lead(study: RunGroup) -> str:
    """Say what was trained on what, for a reader who has never heard of it."""
    task, model = study.task, study.model
    assert isinstance(task, ImageGeneration)
    told = TOLD[task.config.noise.prediction]
    data = (
        f"makes images of noise by freeing it of noise, step by step. It learnt from "
        f"{len(task.train):,} images in {len(task.class_names):,} classes, with "
        f"more or less noise in them, to tell {told}."
    )
    if not isinstance(model, Denoiser):
        return f"This model {data}"
    config = model.config
    mixer = type(config.mixer).__name__.removesuffix("MixerConfig")
    grid = model.patchify.grid_shape((config.channels, *config.image_size))
    size, patch = (
        f" {TIMES} ".join(map(str, side)) for side in (config.image_size, config.patch_size)
    )
    return (
        f"This denoiser {data} It cuts {size} places into {math.prod(grid)} patches of {patch}, "
        f"which exchange what they know in {plural(config.depth, 'block')} with {mixer} mixers of "
        f"{plural(config.mixer.num_heads, 'head')}, {config.width} numbers to a patch."
    )
