"""Classification of handwritten digits, which trains within minutes on a CPU."""

from onescan import configs
from onescan.experiments.data import CanvasDigitsConfig, DigitsConfig, MovingDigitsConfig
from onescan.experiments.recipes import table
from onescan.experiments.tasks import ImageClassificationConfig
from onescan.experiments.training import RunConfig, TrainingConfig
from onescan.layers.mixers import LightNetMixerConfig
from onescan.layers.position import ToeplitzPositionConfig
from onescan.models.image_classifier import ImageClassifierConfig


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


def canvas_digits() -> RunConfig:
    """LightNet on 128 x 128 images (4,096 tokens), each with a digit at a random position.

    onescan train canvas_digits --seeds 0 1 2

    The digits are from scikit-learn, on random textures. Digits of the test images are not in the
    training images. For images and digits of half the height and width (1,024 tokens), add
    --data.size 64 --data.scale 4 --model.image-size 64 64.
    """
    run = digits()
    changes = {"image_size": (128, 128), "width": 48, "depth": 2, "pool": "mean"}
    settings = {"epochs": 10, "batch_size": 16, "checkpoint_every": 1.0}
    return RunConfig(
        name="canvas_digits",
        data=CanvasDigitsConfig(),
        task=configs.replace(run.task, {"augment": None}),
        model=configs.replace(run.model, changes),
        training=configs.replace(run.training, settings),
    )


RECIPES = table(digits, moving_digits, canvas_digits)
