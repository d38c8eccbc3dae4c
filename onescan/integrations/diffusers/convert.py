"""A denoiser of onescan as a pipeline of diffusers, to be saved, shared and used there."""

from collections.abc import Sequence
from typing import Any

from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import nn

from onescan.configs import to_dict
from onescan.integrations.diffusers.model import DenoiserModel
from onescan.integrations.diffusers.pipeline import DenoiserPipeline, clip_range
from onescan.integrations.diffusers.schedulers import build_scheduler
from onescan.models.denoiser import Denoiser, NoiseConfig, SamplerConfig

SHOWN = (1, 3)  # channels of pixels


def to_diffusers(
    model: nn.Module,
    *,
    noise: NoiseConfig | None = None,
    sampler: SamplerConfig | None = None,
    format: Any = None,
    class_names: Sequence[str] = (),
    vae: AutoencoderKL | None = None,
) -> DenoiserPipeline:
    """The model as a pipeline of diffusers; both share their weights.

    `to_diffusers(model).save_pretrained(folder)` makes a folder that its `from_pretrained` loads
    wherever onescan is imported. Of a run that `load` loaded: noise is `run.config.task.noise`, and
    format and class_names are its own.

    Args:
        model: a denoiser.
        noise: what it was trained with; None is DDPM's.
        sampler: which scheduler the pipeline begins with; None is the usual one.
        format: what the model was trained on; of pixels, it has their mean and std by channel.
            None is pixels from -1 to 1 where there are 1 or 3 channels and no vae, else latents.
        class_names: one for each class, if they have names.
        vae: what decodes latents.

    Raises:
        ValueError: it is no denoiser, or parts do not fit each other.
    """
    if not isinstance(model, Denoiser):
        raise ValueError(f"model is a {type(model).__name__}, expected a Denoiser")
    noise, sampler = noise or NoiseConfig(), sampler or SamplerConfig()
    if class_names and len(class_names) != model.config.num_classes:
        raise ValueError(
            f"class_names has {len(class_names)} names, expected one for each of "
            f"{model.config.num_classes} classes"
        )
    pixels = None
    if hasattr(format, "mean") and hasattr(format, "std"):
        pixels = {"mean": list(format.mean), "std": list(format.std)}
    elif format is None and vae is None and model.config.channels in SHOWN:
        pixels = {"mean": [0.5], "std": [0.5]}
    return DenoiserPipeline(
        transformer=DenoiserModel.of(model),
        scheduler=build_scheduler(
            noise, sampler, clip=clip_range(pixels), learnt_sigma=model.config.learn_sigma
        ),
        vae=vae,
        noise=to_dict(noise),
        pixels=pixels,
        id2label=dict(enumerate(class_names)),
    )
