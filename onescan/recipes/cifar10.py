"""CIFAR-10: LightNet, LION and DeiT of equal size, and LDN and ViT of equal size."""

from collections.abc import Callable
from dataclasses import replace

from onescan import configs
from onescan.configs import ModelConfig
from onescan.data import DeitAugmentConfig, ImageDatasetConfig
from onescan.layers.basic import MLPConfig
from onescan.layers.mixers import (
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
    SoftmaxMixerConfig,
)
from onescan.layers.position import AbsolutePositionConfig, ToeplitzPositionConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.models.presets import LION_NAMES, preset
from onescan.tasks import ImageClassificationConfig
from onescan.training import RunConfig, TrainingConfig

CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)

MODEL = ImageClassifierConfig(image_size=(32, 32), patch_size=(4, 4), num_classes=10, depth=6)
TASK = ImageClassificationConfig(label_smoothing=0.1, augment=DeitAugmentConfig(pad=4))
# LDN, arXiv:2502.12381: added positions (Sec. 3.2), a mean over tokens (3.6), crops and flips (5.1)
LDN = replace(MODEL, width=256, position=AbsolutePositionConfig(), pool="mean", drop_path=0.0)
LDN_TASK = ImageClassificationConfig(
    augment=DeitAugmentConfig(pad=4, num_ops=0, random_erasing=0.0)
)
RATIO = 13 / 3  # MLP ratio that gives as many parameters as LightNet


def cifar10_lightnet() -> RunConfig:
    """LightNet, 2.9 million parameters, on CIFAR-10, 8 x 8 patches of 4 x 4 pixels.

    onescan train cifar10_lightnet --data.path FOLDER

    FOLDER contains the data as parquet files; by default it is loaded from the hub. The 50 epochs
    have not been run yet.
    """
    mixer = LightNetMixerConfig(num_heads=6)
    position = ToeplitzPositionConfig(hidden_states=32, bidirectional=True)
    return _cifar10("cifar10_lightnet", replace(MODEL, mixer=mixer, position=position))


def cifar10_deit() -> RunConfig:
    """DeiT of the same size (wider MLP) on CIFAR-10: softmax attention, absolute positions.

    onescan train cifar10_deit --data.path FOLDER

    Trained like cifar10_lightnet. The 50 epochs have not been run yet.
    """
    mixer, mlp = SoftmaxMixerConfig(num_heads=3), MLPConfig(ratio=RATIO)
    model = replace(MODEL, mixer=mixer, mlp=mlp, position=AbsolutePositionConfig())
    return _cifar10("cifar10_deit", model)


def cifar10_ldn() -> RunConfig:
    """LDN, 2.8 million parameters, on CIFAR-10, 8 x 8 patches of 4 x 4 pixels.

    onescan train cifar10_ldn --data.path FOLDER

    The ablations without_diffusion, without_local_update and without_linear_attention are those of
    the paper's Table 4, which states neither sizes nor epochs. The 50 epochs have not been run yet.
    """
    model = replace(LDN, mixer=LinearDiffusionMixerConfig(num_heads=4), mlp=None)
    return _cifar10("cifar10_ldn", model, LDN_TASK)


def cifar10_vit() -> RunConfig:
    """ViT of the same size (narrower MLP) on CIFAR-10, otherwise equal: softmax attention.

    onescan train cifar10_vit --data.path FOLDER

    Trained like cifar10_ldn. The 50 epochs have not been run yet.
    """
    mixer, mlp = SoftmaxMixerConfig(num_heads=4), MLPConfig(ratio=1.5)
    return _cifar10("cifar10_vit", replace(LDN, mixer=mixer, mlp=mlp), LDN_TASK)


def _cifar10_lion(kind: str, name: str) -> Callable[[], RunConfig]:
    """Return a recipe with six blocks of LION-T and the wider MLP of the DeiT."""

    def recipe() -> RunConfig:
        model = preset(
            f"lion_{kind}_tiny", num_classes=10, image_size=32, patch_size=4, depth=MODEL.depth
        )
        return _cifar10(f"cifar10_lion_{kind}", configs.replace(model, {"mlp.ratio": RATIO}))

    recipe.__doc__ = f"""{name} of the same size on CIFAR-10.

    onescan train cifar10_lion_{kind} --data.path FOLDER

    Trained like cifar10_lightnet. The 50 epochs have not been run yet.
    """
    return recipe


def _cifar10(name: str, model: ModelConfig, task: ImageClassificationConfig = TASK) -> RunConfig:
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
        task=task,
        training=TrainingConfig(epochs=50, batch_size=128, learning_rate=1e-3),
    )


CIFAR10_LION = {
    f"cifar10_lion_{kind}": _cifar10_lion(kind, name) for kind, name in LION_NAMES.items()
}
