"""ImageNet-1k: the papers' classification experiments, LightNet's, LION's, LDN's and DeiT's.

In the commands, FOLDER contains train/CLASS/*.JPEG and val/CLASS/*.JPEG, or parquet files of both
splits; by default, the data is loaded from the hub. These recipes have not been run yet.
"""

import dataclasses
from collections.abc import Callable

from onescan.data import DeitAugmentConfig, ImageDatasetConfig, MixConfig
from onescan.models.presets import LION_NAMES, preset
from onescan.tasks import ImageClassificationConfig
from onescan.training import RunConfig, TrainingConfig

# LightNet, arXiv:2405.21022, Table 12, column IM; the paper's base model uses twice the
# weight decay. The paper does not state the final learning rate: 1e-5 is DeiT's.
LIGHTNET = TrainingConfig(
    epochs=300,
    batch_size=2048,
    learning_rate=5e-4,
    betas=(0.9, 0.98),
    weight_decay=0.05,
    warmup=20 / 300,
    final_lr_ratio=0.02,
    max_grad_norm=5.0,
    precision="bfloat16",
)
# DeiT, arXiv:2012.12877, Table 9: 5e-4 for 512 images is 1e-3 for 1024.
DEIT = TrainingConfig(
    epochs=300,
    batch_size=1024,
    learning_rate=1e-3,
    weight_decay=0.05,
    warmup=5 / 300,
    final_lr_ratio=0.01,
    max_grad_norm=None,
    precision="bfloat16",
)


# LION, arXiv:2502.16249, App. C.11: the recipe of ViT, with code adapted from DeiT's, which uses
# this EMA; batches of 1024 images.
LION = dataclasses.replace(DEIT, ema_decay=0.99996)


# LDN, arXiv:2502.12381, Sec. 5.1: "standard", Adam with a cosine schedule. Settings that
# it does not state are DeiT's: batches of 1024 images, weight decay, 300 epochs.
LDN = DEIT


def imagenet_lightnet_tiny() -> RunConfig:
    """LightNet-T, 6.0 million parameters, on ImageNet-1k as in the paper.

    torchrun --nproc-per-node 8 -m onescan train imagenet_lightnet_tiny --data.path FOLDER
    """
    return _imagenet("lightnet_tiny", LIGHTNET)


def imagenet_lightnet_small() -> RunConfig:
    """LightNet-S, 22.6 million parameters, on ImageNet-1k as in the paper.

    torchrun --nproc-per-node 8 -m onescan train imagenet_lightnet_small --data.path FOLDER
    """
    return _imagenet("lightnet_small", LIGHTNET)


def imagenet_lightnet_base() -> RunConfig:
    """LightNet-B, 87.7 million parameters, on ImageNet-1k as in the paper.

    torchrun --nproc-per-node 8 -m onescan train imagenet_lightnet_base --data.path FOLDER
    """
    return _imagenet("lightnet_base", dataclasses.replace(LIGHTNET, weight_decay=0.1))


def imagenet_deit_tiny() -> RunConfig:
    """DeiT-Ti, 5.7 million parameters, on ImageNet-1k as in its own paper.

    torchrun --nproc-per-node 8 -m onescan train imagenet_deit_tiny --data.path FOLDER
    """
    return _imagenet("deit_tiny", DEIT)


def imagenet_deit_small() -> RunConfig:
    """DeiT-S, 22.1 million parameters, on ImageNet-1k as in its own paper.

    torchrun --nproc-per-node 8 -m onescan train imagenet_deit_small --data.path FOLDER
    """
    return _imagenet("deit_small", DEIT)


def imagenet_deit_base() -> RunConfig:
    """DeiT-B, 86.6 million parameters, on ImageNet-1k as in its own paper.

    torchrun --nproc-per-node 8 -m onescan train imagenet_deit_base --data.path FOLDER
    """
    return _imagenet("deit_base", DEIT)


def _imagenet_lion(kind: str, size: str) -> Callable[[], RunConfig]:
    def recipe() -> RunConfig:
        return _imagenet(f"lion_{kind}_{size}", LION)

    recipe.__doc__ = f"""{LION_NAMES[kind]}, {size}, on ImageNet-1k as in the paper.

    torchrun --nproc-per-node 8 -m onescan train imagenet_lion_{kind}_{size} --data.path FOLDER
    """
    return recipe


def _imagenet_ldn(size: str) -> Callable[[], RunConfig]:
    def recipe() -> RunConfig:
        return _imagenet(f"ldn_{size}", LDN)

    recipe.__doc__ = f"""LDN, {size}, on ImageNet-1k, trained as DeiT is.

    torchrun --nproc-per-node 8 -m onescan train imagenet_ldn_{size} --data.path FOLDER
    """
    return recipe


def _imagenet(model: str, training: TrainingConfig) -> RunConfig:
    """Augmented as DeiT is, which LightNet's paper follows: arXiv:2012.12877, Table 9."""
    return RunConfig(
        name=f"imagenet_{model}",
        model=preset(model),
        data=ImageDatasetConfig(path="ILSVRC/imagenet-1k"),
        task=ImageClassificationConfig(
            label_smoothing=0.1, augment=DeitAugmentConfig(), mix=MixConfig(), augment_repeats=3
        ),
        training=training,
    )


IMAGENET_LION = {
    f"imagenet_lion_{kind}_{size}": _imagenet_lion(kind, size)
    for size in ("tiny", "small", "base")
    for kind in LION_NAMES
}
IMAGENET_LDN = {f"imagenet_ldn_{size}": _imagenet_ldn(size) for size in ("base", "large", "huge")}
