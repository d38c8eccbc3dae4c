"""CIFAR-10: a small LightNet, and LIONs and a DeiT of its size, trained alike."""

from dataclasses import replace

from onescan import configs
from onescan.configs import ModelConfig
from onescan.data import DeitAugmentConfig, ImageDatasetConfig
from onescan.layers.mixers import LightNetMixerConfig, SoftmaxMixerConfig
from onescan.layers.mlp import MLPConfig
from onescan.layers.position import AbsolutePositionConfig, ToeplitzPositionConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.models.presets import preset
from onescan.tasks import ImageClassificationConfig
from onescan.training import RunConfig, TrainingConfig

CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)

MODEL = ImageClassifierConfig(image_size=(32, 32), patch_size=(4, 4), num_classes=10, depth=6)
RATIO = 13 / 3  # of an MLP's hidden width, for as many parameters as LightNet has


def cifar10_lightnet() -> RunConfig:
    """LightNet of 2.9 million parameters on CIFAR-10, 8 x 8 patches of 4 x 4 pixels.

    onescan train cifar10_lightnet --data.path FOLDER

    FOLDER holds the data as parquet files; without it, it comes from the hub. Its 50 epochs have
    not been run yet.
    """
    mixer = LightNetMixerConfig(num_heads=6)
    position = ToeplitzPositionConfig(hidden_states=32, bidirectional=True)
    return _cifar10("cifar10_lightnet", replace(MODEL, mixer=mixer, position=position))


def cifar10_deit() -> RunConfig:
    """DeiT of the same size, by a wider MLP: softmax attention, absolute positions, CIFAR-10.

    onescan train cifar10_deit --data.path FOLDER

    Trained as cifar10_lightnet is. Its 50 epochs have not been run yet.
    """
    mixer, mlp = SoftmaxMixerConfig(num_heads=3), MLPConfig(ratio=RATIO)
    model = replace(MODEL, mixer=mixer, mlp=mlp, position=AbsolutePositionConfig())
    return _cifar10("cifar10_deit", model)


def cifar10_lion_lit() -> RunConfig:
    """LION-lit of the same size, no decay and absolute positions, on CIFAR-10.

    onescan train cifar10_lion_lit --data.path FOLDER

    Trained as cifar10_lightnet is. Its 50 epochs have not been run yet.
    """
    return _cifar10_lion("lit")


def cifar10_lion_d() -> RunConfig:
    """LION-d of the same size, a learnt decay per head, on CIFAR-10.

    onescan train cifar10_lion_d --data.path FOLDER

    Trained as cifar10_lightnet is. Its 50 epochs have not been run yet.
    """
    return _cifar10_lion("d")


def cifar10_lion_s() -> RunConfig:
    """LION-s of the same size, decays that each token chooses, on CIFAR-10.

    onescan train cifar10_lion_s --data.path FOLDER

    Trained as cifar10_lightnet is. Its 50 epochs have not been run yet.
    """
    return _cifar10_lion("s")


def cifar10_lion_d_natural() -> RunConfig:
    """LION-d of the same size along rows and columns, on CIFAR-10.

    onescan train cifar10_lion_d_natural --data.path FOLDER

    Trained as cifar10_lightnet is. Its 50 epochs have not been run yet.
    """
    return _cifar10_lion("d_natural")


def cifar10_lion_s_natural() -> RunConfig:
    """LION-s of the same size along rows and columns, on CIFAR-10.

    onescan train cifar10_lion_s_natural --data.path FOLDER

    Trained as cifar10_lightnet is. Its 50 epochs have not been run yet.
    """
    return _cifar10_lion("s_natural")


def _cifar10_lion(kind: str) -> RunConfig:
    """LION-T's blocks, six of them, with the DeiT's wider MLP."""
    model = preset(f"lion_{kind}_tiny")
    changes = {
        "num_classes": 10,
        "image_size": (32, 32),
        "patch_size": (4, 4),
        "depth": MODEL.depth,
    }
    return _cifar10(f"cifar10_lion_{kind}", configs.replace(model, changes | {"mlp.ratio": RATIO}))


def _cifar10(name: str, model: ModelConfig) -> RunConfig:
    return RunConfig(
        name=name,
        model=model,
        data=ImageDatasetConfig(
            path="uoft-cs/cifar10",
            class_names=CLASSES,
            image_size=(32, 32),
            mean=(0.491, 0.482, 0.447),
            std=(0.247, 0.243, 0.262),
            train_crop=None,
            test_crop=None,
        ),
        task=ImageClassificationConfig(label_smoothing=0.1, augment=DeitAugmentConfig(pad=4)),
        training=TrainingConfig(epochs=50, batch_size=128, learning_rate=1e-3),
    )
