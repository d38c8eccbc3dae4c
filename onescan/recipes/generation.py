"""Image generation: digits, CIFAR-10, and the papers' denoisers of ImageNet's latents."""

from collections.abc import Callable
from dataclasses import replace

from onescan.data import DeitAugmentConfig, DigitsConfig, ImageDatasetConfig
from onescan.data.latents import LatentsConfig
from onescan.layers.basic import MLPConfig
from onescan.layers.mixers import LightNetMixerConfig, SoftmaxMixerConfig
from onescan.layers.position import SinusoidalPositionConfig, ToeplitzPositionConfig
from onescan.models.denoiser import DenoiserConfig, NoiseConfig, SamplerConfig
from onescan.models.presets import preset
from onescan.recipes.cifar10 import CLASSES
from onescan.tasks import ImageGenerationConfig
from onescan.training import RunConfig, TrainingConfig

HALF = 0.5  # mean and spread by which pixels from 0 to 1 become -1 to 1
FLOW = NoiseConfig(prediction="flow")

# equal in parameters to a percent: LightNet's 12 blocks, and 9 of DiT's, which are larger
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
# LightNet, arXiv:2405.21022, Table 12, column IG: 80 epochs are 400,000 updates. Of warm-up,
# schedule and clipping it has none; the mean of the weights is DiT's.
LIGHTNET = TrainingConfig(
    steps=400_000,
    batch_size=256,
    learning_rate=1e-4,
    betas=(0.9, 0.98),
    weight_decay=0.0,
    warmup=0.0,
    schedule="constant",
    clip_norm=None,
    ema_decay=0.9999,
    precision="bfloat16",
    evaluate_every=10.0,
)
# DiT, arXiv:2212.09748, Sec. 4, for as many updates as LightNet
DIT = replace(LIGHTNET, betas=(0.9, 0.999))


def digits_denoiser() -> RunConfig:
    """LightNet that draws handwritten digits of 8 x 8 pixels, the one that is asked for.

    onescan train digits_denoiser
    onescan sample runs/digits_denoiser/seed-0 --label 3 --guidance 2 --out three.png

    With --task.classifier runs/digits/seed-0, of onescan train digits, that classifier judges what
    it draws at every evaluation.
    """
    return RunConfig(
        name="digits_denoiser",
        data=DigitsConfig(mean=HALF, std=HALF),
        task=ImageGenerationConfig(
            noise=FLOW, sampler=SamplerConfig(steps=50, guidance=2.0), evaluation_images=360
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
    """LightNet of 10.8 million parameters that paints CIFAR-10, 16 x 16 patches of 2 x 2 pixels.

    onescan train cifar10_denoiser_lightnet --data.path FOLDER --task.classifier runs/NAME/seed-0

    FOLDER holds the data as parquet files; without it, it comes from the hub. The classifier, of
    any run on CIFAR-10, measures how far what is painted is from what was held out. Its 400 epochs
    have not been run yet.
    """
    return _cifar10("cifar10_denoiser_lightnet", CIFAR10_LIGHTNET)


def cifar10_denoiser_dit() -> RunConfig:
    """DiT of the same size that paints CIFAR-10: softmax attention, and adaLN-Zero.

    onescan train cifar10_denoiser_dit --data.path FOLDER --task.classifier runs/NAME/seed-0

    Trained as cifar10_denoiser_lightnet is. Its 400 epochs have not been run yet.
    """
    return _cifar10("cifar10_denoiser_dit", CIFAR10_DIT)


def _cifar10(name: str, model: DenoiserConfig) -> RunConfig:
    return RunConfig(
        name=name,
        model=model,
        data=ImageDatasetConfig(
            path="uoft-cs/cifar10",
            class_names=CLASSES,
            image_size=(32, 32),
            mean=(HALF, HALF, HALF),
            std=(HALF, HALF, HALF),
            train_crop=None,
            test_crop=None,
        ),
        task=ImageGenerationConfig(
            noise=FLOW,
            augment=DeitAugmentConfig(operations=0, erasing=0.0),  # flips alone
            sampler=SamplerConfig(steps=50, guidance=1.5),
        ),
        training=TrainingConfig(
            epochs=400,
            batch_size=256,
            learning_rate=5e-4,
            weight_decay=0.0,
            ema_decay=0.9999,
            precision="bfloat16",
            evaluate_every=10.0,
            checkpoint_every=5.0,
        ),
    )


def _imagenet(name: str, model: str, training: TrainingConfig) -> Callable[[], RunConfig]:
    """ImageNet-1k at 256 x 256 as the latents of a VAE, 32 x 32 numbers in 4 channels."""

    def recipe() -> RunConfig:
        return RunConfig(
            name=f"imagenet_{model}",
            model=preset(model),
            data=LatentsConfig(path="imagenet-latents"),
            task=ImageGenerationConfig(sampler=SamplerConfig(sampler="ddpm", steps=250)),
            training=training,
        )

    recipe.__doc__ = f"""{name} on ImageNet-1k's latents, as in the paper; not run yet.

    onescan encode FOLDER --vae stabilityai/sd-vae-ft-ema --out imagenet-latents
    torchrun --nproc-per-node 8 -m onescan train imagenet_{model} --data.path imagenet-latents
    """
    return recipe


IMAGENET_DENOISERS = {
    f"imagenet_{prefix}_{size}_{patch}": _imagenet(
        f"{name}-{size.upper()}/{patch}", f"{prefix}_{size}_{patch}", training
    )
    for prefix, name, training in (("lightnet_dit", "LightNet", LIGHTNET), ("dit", "DiT", DIT))
    for size in ("s", "b", "l", "xl")
    for patch in (2, 4, 8)
}
GENERATION = {
    "digits_denoiser": digits_denoiser,
    "cifar10_denoiser_lightnet": cifar10_denoiser_lightnet,
    "cifar10_denoiser_dit": cifar10_denoiser_dit,
    **IMAGENET_DENOISERS,
}
