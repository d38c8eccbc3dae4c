"""Image classification: CIFAR-10, and the papers' ImageNet-1k experiments."""

from dataclasses import replace
from functools import partial

from onescan import configs
from onescan.configs import ModelConfig
from onescan.experiments.data import DeitAugmentConfig, ImageDatasetConfig, MixConfig
from onescan.experiments.recipes import Recipe, row, table
from onescan.experiments.tasks import ImageClassificationConfig
from onescan.experiments.training import RunConfig, TrainingConfig
from onescan.layers.basic import MLPConfig
from onescan.layers.decays import KDADecayConfig
from onescan.layers.mixers import (
    GatedDeltaNetMixerConfig,
    KDAMixerConfig,
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
    MixerConfig,
    SoftmaxMixerConfig,
)
from onescan.layers.position import AbsolutePositionConfig, ToeplitzPositionConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.models.presets import LION_NAMES, preset

# CIFAR-10: LightNet, LION and DeiT of equal size, and LDN and ViT of equal size.

CIFAR10_CLASSES = (
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
NOT_RUN = "It has not been run yet."
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


def _cifar10_lion(kind: str) -> RunConfig:
    """Return a recipe with six blocks of LION-T and the wider MLP of the DeiT."""
    model = preset(
        f"lion_{kind}_tiny", num_classes=10, image_size=32, patch_size=4, depth=MODEL.depth
    )
    return _cifar10(f"cifar10_lion_{kind}", configs.replace(model, {"mlp.ratio": RATIO}))


def _cifar10_delta(name: str, mixer: MixerConfig, ratio: float) -> RunConfig:
    """Return a recipe with the blocks of LION, another mixer, and as many parameters."""
    model = preset(
        "gated_deltanet_tiny", num_classes=10, image_size=32, patch_size=4, depth=MODEL.depth
    )
    return _cifar10(name, configs.replace(model, {"mixer": mixer, "mlp.ratio": ratio}))


def cifar10_gated_deltanet() -> RunConfig:
    """Gated DeltaNet in both directions, of the same size, on CIFAR-10.

    onescan train cifar10_gated_deltanet --data.path FOLDER

    Trained like cifar10_lightnet; --model.mixer.scan natural scans along rows and columns. The 50
    epochs have not been run yet.
    """
    mixer = GatedDeltaNetMixerConfig(num_heads=3)
    return _cifar10_delta("cifar10_gated_deltanet", mixer, RATIO - 2)


def cifar10_kda() -> RunConfig:
    """Kimi Delta Attention (KDA) in both directions, of the same size, on CIFAR-10.

    onescan train cifar10_kda --data.path FOLDER

    Trained like cifar10_lightnet. Ranks are the width of a head, as in the original. The 50 epochs
    have not been run yet.
    """
    rank = 64
    mixer = KDAMixerConfig(num_heads=3, decay=KDADecayConfig(rank=rank), gate_rank=rank)
    return _cifar10_delta("cifar10_kda", mixer, RATIO - 2 / 3)


def _cifar10(name: str, model: ModelConfig, task: ImageClassificationConfig = TASK) -> RunConfig:
    return RunConfig(
        name=name,
        model=model,
        data=ImageDatasetConfig(
            path="uoft-cs/cifar10",
            class_names=CIFAR10_CLASSES,
            image_size=(32, 32),
            mean=(0.491, 0.482, 0.447),
            std=(0.247, 0.243, 0.262),
            train_crop=None,
            test_crop=None,
        ),
        task=task,
        training=TrainingConfig(epochs=50, batch_size=128, learning_rate=1e-3),
    )


# ImageNet-1k: the papers' classification experiments. In the commands, FOLDER contains
# train/CLASS/*.JPEG and val/CLASS/*.JPEG, or parquet files of both splits; by default, the data is
# loaded from the hub. These recipes have not been run yet.

# LightNet, arXiv:2405.21022, Table 12, column IM; the paper's base model uses twice the
# weight decay. The paper does not state the final learning rate: 1e-5 is DeiT's.
LIGHTNET_TRAINING = TrainingConfig(
    epochs=300,
    batch_size=2048,
    learning_rate=5e-4,
    betas=(0.9, 0.98),
    weight_decay=0.05,
    warmup=20 / 300,
    final_lr_ratio=0.02,
    max_grad_norm=5.0,
    precision="auto",
)
# The baselines of LightNet's Table 1. TransNormerLLM (TNL) is trained like LightNet. HGRN and
# HGRN2 differ by the settings of the scripts in OpenNLPLab/HGRN and OpenNLPLab/HGRN2.
HGRN_TRAINING = replace(LIGHTNET_TRAINING, warmup=10 / 300)
HGRN2_TINY_TRAINING = replace(LIGHTNET_TRAINING, batch_size=1024, learning_rate=7.5e-4)
HGRN2_SMALL_TRAINING = replace(HGRN_TRAINING, learning_rate=7.5e-4, weight_decay=0.1)
# DeiT, arXiv:2012.12877, Table 9: 5e-4 for 512 images is 1e-3 for 1024.
DEIT_TRAINING = TrainingConfig(
    epochs=300,
    batch_size=1024,
    learning_rate=1e-3,
    weight_decay=0.05,
    warmup=5 / 300,
    final_lr_ratio=0.01,
    max_grad_norm=None,
    precision="auto",
)
# LION, arXiv:2502.16249, App. C.11: the recipe of ViT, with code adapted from DeiT's, which uses
# this EMA; batches of 1024 images. The paper does not mention an EMA, so the raw weights are
# reported, and the EMA is evaluated in addition.
LION_TRAINING = replace(DEIT_TRAINING, ema_decay=0.99996, reported_weights="raw")
# Vim, arXiv:2401.09417, Sec. 4.1: AdamW, 1024 images, weight decay 0.05, a cosine from 1e-3 and an
# EMA; most settings are DeiT's.
VIM_TRAINING = replace(DEIT_TRAINING, ema_decay=0.99996)
# LDN, arXiv:2502.12381, Sec. 5.1: "standard", Adam with a cosine schedule. Settings that
# it does not state are DeiT's: batches of 1024 images, weight decay, 300 epochs.
LDN_TRAINING = DEIT_TRAINING


def _imagenet(model: str, training: TrainingConfig, name: str | None = None) -> RunConfig:
    """Return a run with DeiT's augmentation, arXiv:2012.12877, Table 9, as in LightNet's paper."""
    return RunConfig(
        name=f"imagenet_{name or model}",
        model=preset(model),
        data=ImageDatasetConfig(path="ILSVRC/imagenet-1k"),
        task=ImageClassificationConfig(
            label_smoothing=0.1, augment=DeitAugmentConfig(), mix=MixConfig(), augment_repeats=3
        ),
        training=training,
    )


def imagenet_lion_s_tiny_distilled() -> RunConfig:
    """LION-s, tiny, on ImageNet-1k, distilled from a RegNet as in LION's Table 15.

    torchrun --nproc-per-node 8 -m onescan train imagenet_lion_s_tiny_distilled --data.path FOLDER

    Hard distillation with a distillation token from RegNetY-16GF, as in DeiT's paper, whose recipe
    LION follows. The teacher has the weights that DeiT's code uses, and requires timm. The same
    network without timm is --task.teacher facebook/regnet-y-160. It has not been run yet.
    """
    run = _imagenet("lion_s_tiny", LION_TRAINING)
    return replace(
        run,
        name="imagenet_lion_s_tiny_distilled",
        model=configs.replace(run.model, {"distillation_token": True}),
        task=configs.replace(run.task, {"teacher": "timm/regnety_160.deit_in1k"}),
    )


def _cifar100(name: str, model: str) -> RunConfig:
    """Return a run of LION's App. C.10 to C.15: a tiny model on CIFAR-100.

    The paper states that it uses ViT's recipe and code adapted from DeiT's. The other settings are
    the defaults of that code for CIFAR-100, which enlarges the images.
    """
    run = _imagenet(model, LION_TRAINING)
    return replace(
        run,
        name=f"cifar100_{name}",
        model=configs.replace(run.model, {"num_classes": 100}),
        data=ImageDatasetConfig(path="uoft-cs/cifar100", label_column="fine_label"),
    )


def _imagenet_row(
    model: str, summary: str, training: TrainingConfig, note: str = "", name: str | None = None
) -> Recipe:
    recipe = f"imagenet_{name or model}"
    command = f"torchrun --nproc-per-node 8 -m onescan train {recipe} --data.path FOLDER"
    return row(recipe, partial(_imagenet, model, training, name), summary, command, note)


RECIPES = table(
    cifar10_lightnet,
    *(
        row(
            f"cifar10_lion_{kind}",
            partial(_cifar10_lion, kind),
            f"{title}, of the same size, on CIFAR-10.",
            f"onescan train cifar10_lion_{kind} --data.path FOLDER",
            "Trained like cifar10_lightnet. The 50 epochs have not been run yet.",
        )
        for kind, title in LION_NAMES.items()
    ),
    cifar10_gated_deltanet,
    cifar10_kda,
    cifar10_deit,
    cifar10_ldn,
    cifar10_vit,
    *(
        _imagenet_row(
            f"lightnet_{size}",
            f"LightNet-{size[0].upper()}, {millions} million parameters, on ImageNet-1k as in the "
            "paper.",
            replace(LIGHTNET_TRAINING, weight_decay=weight_decay),
        )
        for size, millions, weight_decay in (
            ("tiny", 6.0, 0.05),
            ("small", 22.6, 0.05),
            ("base", 87.7, 0.1),
        )
    ),
    *(
        _imagenet_row(
            f"{model}_{size}",
            f"{title}, {size}, {millions} million parameters, on ImageNet-1k: two scans, as in "
            "LightNet's Table 1.",
            training,
        )
        for model, title, size, millions, training in (
            ("hgrn", "HGRN", "tiny", 6.1, HGRN_TRAINING),
            ("hgrn", "HGRN", "small", 23.7, HGRN_TRAINING),
            ("tnl", "TransNormerLLM", "tiny", 6.0, LIGHTNET_TRAINING),
            ("tnl", "TransNormerLLM", "small", 22.6, LIGHTNET_TRAINING),
            ("tnl", "TransNormerLLM", "base", 87.6, replace(LIGHTNET_TRAINING, weight_decay=0.1)),
            ("hgrn2", "HGRN2", "tiny", 6.1, HGRN2_TINY_TRAINING),
            ("hgrn2", "HGRN2", "small", 23.8, HGRN2_SMALL_TRAINING),
        )
    ),
    *(
        _imagenet_row(
            f"deit_{size}",
            f"{name}, {millions} million parameters, on ImageNet-1k as in its own paper.",
            DEIT_TRAINING,
        )
        for size, name, millions in (
            ("tiny", "DeiT-Ti", 5.7),
            ("small", "DeiT-S", 22.1),
            ("base", "DeiT-B", 86.6),
        )
    ),
    *(
        _imagenet_row(
            f"lion_{kind}_{size}",
            f"{title}, {size}, on ImageNet-1k as in the paper.",
            LION_TRAINING,
        )
        for size in ("tiny", "small", "base")
        for kind, title in LION_NAMES.items()
    ),
    *(
        _imagenet_row(
            f"deit_{size}",
            f"ViT, {size}, on ImageNet-1k, trained like LION: the baseline of LION's {table}.",
            LION_TRAINING,
            "LION's App. C.11 says that ViT's recipe is used, but states none of its settings. The "
            f"model has DeiT's\nshape. {NOT_RUN}",
            f"lion_vit_{size}",
        )
        for size, table in (("tiny", "Table 12"), ("small", "Table 2"), ("base", "Table 2"))
    ),
    *(
        _imagenet_row(
            f"vim_{size}",
            f"Vim, {size}, {millions} million parameters, on ImageNet-1k as in its own paper.",
            VIM_TRAINING,
            NOT_RUN,
        )
        for size, millions in (("tiny", 7.1), ("small", 25.8), ("base", 97.6))
    ),
    *(
        _imagenet_row(
            f"vision_rwkv_{size}",
            f"Vision-RWKV, {size}, {millions} million parameters, on ImageNet-1k, as in LightNet's "
            "Table 1.",
            DEIT_TRAINING,
            "Its paper, arXiv:2403.02308, follows DeiT, with 1024 images and a base learning rate "
            f"of 5e-4, which\nDeiT uses for 512 images. {NOT_RUN}",
        )
        for size, millions in (("tiny", 6.2), ("small", 23.8), ("base", 93.6))
    ),
    *(
        _imagenet_row(
            f"hydra_{size}",
            f"Hydra, {size}, {millions} million parameters, on ImageNet-1k, as in LION's Table 2.",
            DEIT_TRAINING,
            "LION uses Hydra's training recipe, but does not state it. Except for the model's drop "
            f"path rate,\nthese settings are DeiT's. {NOT_RUN}",
        )
        for size, millions in (("small", 21.8), ("base", 90.8))
    ),
    imagenet_lion_s_tiny_distilled,
    *(
        row(
            f"cifar100_{name}",
            partial(_cifar100, name, model),
            f"{title}, tiny, on CIFAR-100, as in LION's {tables}.",
            f"onescan train cifar100_{name} --data.path FOLDER",
            "The paper states neither image size nor patches and epochs. Those of DeiT's code are "
            "used: images\nenlarged to 224 x 224, patches of 16 x 16, 300 epochs. Labels are the "
            f"100 fine ones. {NOT_RUN}",
        )
        for name, model, title, tables in (
            ("vit", "deit_tiny", "ViT", "Table 14"),
            ("lion_lit", "lion_lit_tiny", "LION-lit", "Table 14"),
            ("lion_s", "lion_s_tiny", "LION-s", "Tables 13, 14 and 16"),
            ("lion_s_natural", "lion_s_natural_tiny", "LION-s natural", "Table 16"),
        )
    ),
    *(
        _imagenet_row(
            f"vit_{size}", f"ViT, {size}, on ImageNet-1k, trained as LDN is.", LDN_TRAINING
        )
        for size in ("base", "large", "huge")
    ),
    *(
        _imagenet_row(
            f"ldn_{size}", f"LDN, {size}, on ImageNet-1k, trained as DeiT is.", LDN_TRAINING
        )
        for size in ("base", "large", "huge")
    ),
)
