"""Segmentation of generated images and volumes, which trains within minutes on a CPU."""

from dataclasses import replace

from onescan.experiments.data import CanvasDigitsConfig, SolidsConfig
from onescan.experiments.recipes import table
from onescan.experiments.recipes.infer import DENSE_MODEL
from onescan.experiments.tasks import SegmentationConfig
from onescan.experiments.training import RunConfig, TrainingConfig


def canvas_segmentation() -> RunConfig:
    """LightNet that finds the strokes of digits in textured images of 64 x 64 pixels.

    onescan train canvas_segmentation --seeds 0 1

    Scikit-learn's digits lie at random positions on random textures, as for canvas_digits, but with
    a stronger texture, so that the brightness of a pixel does not reveal its class. The digits of
    the test images do not occur in the training images.
    """
    return RunConfig(
        name="canvas_segmentation",
        data=CanvasDigitsConfig(
            size=64, scale=4, texture_contrast=0.7, masks=True, mean=0.37, std=0.126
        ),
        task=SegmentationConfig(),
        model=replace(
            DENSE_MODEL,
            image_size=(64, 64),
            channels=1,
            out_channels=2,
            patch_size=(4, 4),
        ),
        training=TrainingConfig(epochs=4, batch_size=16, learning_rate=2e-3, checkpoint_every=2.0),
    )


def solids() -> RunConfig:
    """LightNet that segments spheres and cubes in noisy volumes of 20 x 20 x 20 voxels.

    onescan train solids --seeds 0 1

    Volumes are generated. A single voxel does not reveal its class: solids and background overlap
    in brightness, and spheres and cubes differ only in their outline.
    """
    return RunConfig(
        name="solids",
        data=SolidsConfig(),
        task=SegmentationConfig(flip_axes=(0, 1, 2)),
        model=replace(
            DENSE_MODEL,
            image_size=(20, 20, 20),
            channels=1,
            out_channels=3,
            patch_size=(4, 4, 4),
            width=48,
        ),
        training=TrainingConfig(epochs=12, batch_size=8, learning_rate=2e-3, checkpoint_every=5.0),
    )


RECIPES = table(canvas_segmentation, solids)
