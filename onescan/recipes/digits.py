"""Classification of handwritten digits, still or moving, which trains within minutes on a CPU."""

from typing import Any

from onescan import configs
from onescan.data import ArrayDatasetConfig, DataConfig, DigitsConfig, MovingDigitsConfig
from onescan.layers.mixers import LightNetMixerConfig
from onescan.layers.position import ToeplitzPositionConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.recipes import table
from onescan.tasks import ImageClassificationConfig
from onescan.training import RunConfig, TrainingConfig


def digits() -> RunConfig:
    """LightNet on scikit-learn's 1,797 handwritten digits of 8 x 8 pixels.

    onescan train digits --seeds 0 1 2
    """
    return RunConfig(
        name="digits",
        data=DigitsConfig(),
        task=ImageClassificationConfig(label_smoothing=0.1),
        model=ImageClassifierConfig(
            image_size=(8, 8),
            channels=1,
            patch_size=(2, 2),
            num_classes=10,
            width=64,
            depth=4,
            mixer=LightNetMixerConfig(num_heads=4, gate_rank=16),
            position=ToeplitzPositionConfig(hidden_states=16, bidirectional=True),
            drop_path=0.0,
            init_std=0.1,
        ),
        training=TrainingConfig(
            epochs=40, batch_size=32, learning_rate=2e-3, checkpoint_every=10.0
        ),
    )


def moving_digits() -> RunConfig:
    """LightNet on videos of 8 x 16 x 16 pixels in which scikit-learn's digits move.

    onescan train moving_digits --seeds 0 1 2

    The 40 classes are pairs of digit and direction, such as "3 left". Digits of the test videos are
    not in the training videos. Positions and attention extend along all three axes.
    """
    sizes = {"image_size": (8, 16, 16), "patch_size": (2, 4, 4), "num_classes": 40}
    return _grids("moving_digits", MovingDigitsConfig(), sizes, epochs=15)


def signal_classifier() -> RunConfig:
    """LightNet on your own labeled signals, an .npz file with x [N, samples] and y [N].

    onescan train signal_classifier --data.path signals.npz --model.image-size 1000

    Set --model.num-classes to the number of classes, and --model.patch-size to a divisor of the
    number of samples.

    With several channels, x has shape [N, samples, channels], and --model.channels is their number.
    With --data.axes 3 and three sizes each, the same command trains on video or volumes.
    """
    sizes = {"image_size": (1000,), "patch_size": (10,), "num_classes": 2}
    return _grids("signal_classifier", ArrayDatasetConfig(path="signals.npz", axes=1), sizes)


def _grids(name: str, data: DataConfig, sizes: dict[str, Any], *, epochs: int = 40) -> RunConfig:
    """Return the run of `digits` with other data and sizes, without augmentation."""
    run = digits()
    return RunConfig(
        name=name,
        data=data,
        task=configs.replace(run.task, {"augment": None}),
        model=configs.replace(run.model, sizes),
        training=configs.replace(run.training, {"epochs": epochs}),
    )


RECIPES = table(digits, moving_digits, signal_classifier)
