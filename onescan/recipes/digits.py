"""Classification of handwritten digits, still or moving, which trains within minutes on a CPU."""

from onescan import configs
from onescan.data import DigitsConfig, MovingDigitsConfig
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
    run = digits()
    sizes = {"image_size": (8, 16, 16), "patch_size": (2, 4, 4), "num_classes": 40}
    return RunConfig(
        name="moving_digits",
        data=MovingDigitsConfig(),
        task=configs.replace(run.task, {"augment": None}),
        model=configs.replace(run.model, sizes),
        training=configs.replace(run.training, {"epochs": 15}),
    )


RECIPES = table(digits, moving_digits)
