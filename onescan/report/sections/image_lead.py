"""An image classifier in a few sentences."""

import math

from onescan.models.image_classifier import ImageClassifier
from onescan.report.pictures import held_out_labels
from onescan.report.runs import RunGroup
from onescan.report.words import TIMES, plural
from onescan.tasks import ImageClassification


def lead(study: RunGroup) -> str:
    """Say what was trained on what, for a reader who has never heard of it."""
    task, model = study.task, study.model
    assert isinstance(task, ImageClassification)
    judged = len(held_out_labels(study))
    data = (
        f"learnt from {len(task.train):,} images in {len(study.class_names):,} classes and is "
        f"judged on {judged:,} held-out images that it never saw while learning."
    )
    if not isinstance(model, ImageClassifier):
        return f"This model {data}"
    config = model.config
    mixer = type(config.mixer).__name__.removesuffix("MixerConfig")
    grid = model.patchify.grid_shape((config.channels, *config.image_size))
    size, patch = (
        f" {TIMES} ".join(map(str, side)) for side in (config.image_size, config.patch_size)
    )
    return (
        f"This image classifier {data} It cuts an image of {size} pixels into "
        f"{math.prod(grid)} patches of {patch}, which exchange what they know in "
        f"{plural(config.depth, 'block')} with {mixer} mixers of "
        f"{plural(config.mixer.num_heads, 'head')}, {config.width} numbers to a patch."
    )
