"""Image generation: digits, CIFAR-10, and the papers' denoisers of ImageNet latents."""

from dataclasses import replace
from functools import partial

from onescan.experiments.data import DeitAugmentConfig, DigitsConfig, ImageDatasetConfig
from onescan.experiments.data.latents import LatentsConfig
from onescan.experiments.recipes import Recipe, row, table
from onescan.experiments.recipes.images import CIFAR10_CLASSES
from onescan.experiments.tasks import ImageGenerationConfig
from onescan.experiments.training import RunConfig, TrainingConfig
from onescan.layers.basic import MLPConfig
from onescan.layers.mixers import LightNetMixerConfig, SoftmaxMixerConfig
from onescan.layers.position import SinusoidalPositionConfig, ToeplitzPositionConfig
from onescan.models.denoiser import DenoiserConfig, NoiseConfig, SamplerConfig
from onescan.models.presets import preset

HALF = 0.5  # mean and standard deviation that map pixels from [0, 1] to [-1, 1]
FLOW = NoiseConfig(prediction="flow")

# 12 blocks of LightNet and 9 larger ones of DiT: equal numbers of parameters within 1%
CIFAR10_LIGHTNET = DenoiserConfig(
    channels=3,
    num_classes=10,
    width=256,
    depth=12,
    mixer=LightNetMixerConfig(num_heads=4),
    position=ToeplitzPositionConfig(hidden_states=32, bidirectional=True),
    learn_sigma=False,
    init_std=0.06,
)
CIFAR10_DIT = replace(
    CIFAR10_LIGHTNET,
    depth=9,
    mixer=SoftmaxMixerConfig(num_heads=4),
    mlp=MLPConfig(),
    position=SinusoidalPositionConfig(),
    condition="adaln_zero",
)
# LightNet, arXiv:2405.21022, Table 12, column IG: 80 epochs are 400,000 steps, without
# warm-up, schedule or clipping. EMA as in DiT.
LIGHTNET = TrainingConfig(
    steps=400_000,
    batch_size=256,
    learning_rate=1e-4,
    betas=(0.9, 0.98),
    weight_decay=0.0,
    warmup=0.0,
    schedule="constant",
    max_grad_norm=None,
    ema_decay=0.9999,
    precision="auto",
    evaluate_every=10.0,
)
# LightNet, Sec. 6.1: the largest model, which Table 3 evaluates, is trained twice as long
LIGHTNET_TABLE_3 = replace(LIGHTNET, steps=800_000, batch_size=1024)
# DiT, arXiv:2212.09748, Sec. 4, with as many steps as LightNet
DIT = replace(LIGHTNET, betas=(0.9, 0.999))


def digits_denoiser() -> RunConfig:
    """LightNet denoiser that generates handwritten digits of a requested class, 8 x 8 pixels.

    onescan train digits_denoiser
    onescan sample runs/digits_denoiser/seed-0 --labels 3 --guidance-scale 2 --out three.png

    With --task.classifier runs/digits/seed-0, trained by onescan train digits, the classifier
    scores generated digits at every evaluation.
    """
    return RunConfig(
        name="digits_denoiser",
        data=DigitsConfig(mean=HALF, std=HALF),
        task=ImageGenerationConfig(
            noise=FLOW, sampler=SamplerConfig(steps=50, guidance_scale=2.0), evaluation_images=360
        ),
        model=DenoiserConfig(
            image_size=(8, 8),
            channels=1,
            num_classes=10,
            width=128,
            depth=6,
            mixer=LightNetMixerConfig(num_heads=4, gate_rank=16),
            position=ToeplitzPositionConfig(hidden_states=16, bidirectional=True),
            learn_sigma=False,
            init_std=0.08,
        ),
        training=TrainingConfig(
            epochs=100,
            learning_rate=2e-3,
            weight_decay=0.0,
            ema_decay=0.995,
            evaluate_every=10.0,
            checkpoint_every=10.0,
        ),
    )


def cifar10_denoiser_lightnet() -> RunConfig:
    """LightNet denoiser, 10.8 million parameters, on CIFAR-10, 16 x 16 patches of 2 x 2 pixels.

    onescan train cifar10_denoiser_lightnet --data.path FOLDER --task.classifier runs/NAME/seed-0

    FOLDER contains the data as parquet files; by default it is loaded from the hub. The classifier,
    from any run on CIFAR-10, measures the distance of generated images from test images. The 400
    epochs have not been run yet.
    """
    return _cifar10("cifar10_denoiser_lightnet", CIFAR10_LIGHTNET)


def cifar10_denoiser_dit() -> RunConfig:
    """DiT denoiser of the same size on CIFAR-10: softmax attention and adaLN-Zero.

    onescan train cifar10_denoiser_dit --data.path FOLDER --task.classifier runs/NAME/seed-0

    Trained like cifar10_denoiser_lightnet. The 400 epochs have not been run yet.
    """
    return _cifar10("cifar10_denoiser_dit", CIFAR10_DIT)


def _cifar10(name: str, model: DenoiserConfig) -> RunConfig:
    return RunConfig(
        name=name,
        model=model,
        data=ImageDatasetConfig(
            path="uoft-cs/cifar10",
            class_names=CIFAR10_CLASSES,
            image_size=(32, 32),
            mean=(HALF, HALF, HALF),
            std=(HALF, HALF, HALF),
            train_crop=None,
            test_crop=None,
        ),
        task=ImageGenerationConfig(
            noise=FLOW,
            augment=DeitAugmentConfig(num_ops=0, random_erasing=0.0),  # flips only
            sampler=SamplerConfig(steps=50, guidance_scale=1.5),
        ),
        training=TrainingConfig(
            epochs=400,
            batch_size=256,
            learning_rate=5e-4,
            weight_decay=0.0,
            ema_decay=0.9999,
            precision="auto",
            evaluate_every=10.0,
            checkpoint_every=5.0,
        ),
    )


def imagenet_lightnet_dit_xl_672m() -> RunConfig:
    r"""LightNet-XL/2 denoiser on ImageNet-1k latents, as in LightNet's Table 3; not run yet.

    onescan encode FOLDER --vae stabilityai/sd-vae-ft-ema --out imagenet-latents
    torchrun --nproc-per-node 8 -m onescan train imagenet_lightnet_dit_xl_672m \
        --data.path imagenet-latents

    0.8 million steps of 1024 images, by Sec. 6.1. Without output gates, the model has the 672M
    parameters of Table 3; imagenet_lightnet_dit_xl_2 has the gates and the 680M of Table 14. The
    other settings are those of Table 12. The paper does not state the sampler; it is DiT's.
    """
    return _imagenet("lightnet_dit_xl_672m", LIGHTNET_TABLE_3)


def _imagenet(model: str, training: TrainingConfig) -> RunConfig:
    """Return a run on VAE latents of ImageNet-1k at 256 x 256: 4 channels of 32 x 32."""
    return RunConfig(
        name=f"imagenet_{model}",
        model=preset(model),
        data=LatentsConfig(path="imagenet-latents"),
        task=ImageGenerationConfig(sampler=SamplerConfig(sampler="ddpm", steps=250)),
        training=training,
    )


def _imagenet_row(model: str, summary: str, training: TrainingConfig) -> Recipe:
    return row(
        f"imagenet_{model}",
        partial(_imagenet, model, training),
        summary,
        "onescan encode FOLDER --vae stabilityai/sd-vae-ft-ema --out imagenet-latents\n"
        f"torchrun --nproc-per-node 8 -m onescan train imagenet_{model} "
        "--data.path imagenet-latents",
    )


RECIPES = table(
    digits_denoiser,
    cifar10_denoiser_lightnet,
    cifar10_denoiser_dit,
    *(
        _imagenet_row(
            f"{kind}_{size}_{patch}",
            f"{title}-{size.upper()}/{patch} denoiser on ImageNet-1k latents, as in the paper; "
            "not run yet.",
            training,
        )
        for kind, title, training in (("lightnet_dit", "LightNet", LIGHTNET), ("dit", "DiT", DIT))
        for size in ("s", "b", "l", "xl")
        for patch in (2, 4, 8)
    ),
    imagenet_lightnet_dit_xl_672m,
    *(
        _imagenet_row(
            f"{kind}_dit_{size}_8",
            f"{title}-{size.upper()}/8 denoiser with two scans on ImageNet-1k latents, as in "
            "LightNet's Table 10; not run yet.",
            LIGHTNET,
        )
        for size in ("s", "b")
        for kind, title in (("retnet", "RetNet"), ("hgrn2", "HGRN2"))
    ),
)
