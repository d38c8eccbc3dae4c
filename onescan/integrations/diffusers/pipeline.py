"""A denoiser with its scheduler, and a VAE where it makes latents, as a pipeline of diffusers."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import diffusers
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.pipelines.pipeline_utils import DiffusionPipeline, ImagePipelineOutput
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from jaxtyping import Float
from torch import Tensor, nn

from onescan.checks import check_choice
from onescan.configs import from_dict, to_dict
from onescan.integrations.diffusers.labels import find_labels
from onescan.integrations.diffusers.model import DenoiserModel
from onescan.integrations.diffusers.sampling import Show, draw
from onescan.integrations.diffusers.schedulers import build_scheduler, check_scheduler
from onescan.models.denoiser import NoiseConfig, SamplerConfig, SamplerName, max_pixel
from onescan.shapes import DenoiserOutput, Images

Generators = torch.Generator | list[torch.Generator] | None
OUTPUTS = ("pil", "np", "pt", "latent")
MOST_SEEDS = 2**63
AT_ONCE = 8  # latents that are decoded together


class DenoiserPipeline(DiffusionPipeline):
    """Images of classes, or of none, from noise.

    `DiffusionPipeline.from_pretrained` knows it once onescan is imported. The scheduler may be
    replaced by any of DDPM, DDIM, DPMSolverMultistep and FlowMatchEulerDiscrete that fits the noise
    which the model was trained with.
    """

    model_cpu_offload_seq = "transformer->vae"  # type: ignore[assignment]
    _optional_components = ["vae"]  # noqa: RUF012

    transformer: DenoiserModel
    scheduler: Any
    vae: Any

    def __init__(
        self,
        transformer: DenoiserModel,
        scheduler: SchedulerMixin,
        vae: AutoencoderKL | None = None,
        noise: dict | None = None,  # type: ignore[type-arg]  # diffusers looks at these types
        pixels: dict | None = None,  # type: ignore[type-arg]
        id2label: dict | None = None,  # type: ignore[type-arg]
    ) -> None:
        """Put the parts together.

        Args:
            transformer: the model.
            scheduler: one that fits the noise.
            vae: what decodes latents; None for a model of pixels.
            noise: the fields of the `NoiseConfig` that the model was trained with.
            pixels: "mean" and "std" by channel, as lists, which standardize a model's pixels; None
                for a model of latents.
            id2label: names of classes by their numbers.

        Raises:
            ValueError: parts that do not fit each other.
        """
        super().__init__()
        trained = from_dict(NoiseConfig, noise or {})
        trained.check()
        check_scheduler(scheduler, trained)
        channels = transformer.network.config.channels
        if vae is not None and vae.config["latent_channels"] != channels:
            raise ValueError(
                f"vae makes latents of {vae.config['latent_channels']} channels, but the model has "
                f"{channels}"
            )
        if vae is not None and pixels is not None:
            raise ValueError("vae and pixels are given, expected one of them")
        self.register_modules(transformer=transformer, scheduler=scheduler, vae=vae)
        self.register_to_config(
            noise=to_dict(trained),
            pixels=pixels,
            # JSON has no numbers as keys
            id2label={str(number): name for number, name in (id2label or {}).items()},
        )

    @property
    def noise(self) -> NoiseConfig:
        """What the model was trained with."""
        return from_dict(NoiseConfig, self.config["noise"])

    @property
    def names(self) -> dict[int, str]:
        """Names of classes by their numbers."""
        return {int(number): name for number, name in self.config["id2label"].items()}

    @property
    def num_classes(self) -> int:
        """Classes that can be asked for; 0 for a model that is told none."""
        return self.transformer.network.config.num_classes

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of images, where none are asked for."""
        height, width = self.transformer.network.config.image_size
        return height * self._stride, width * self._stride

    def use_sampler(self, name: SamplerName | None) -> None:
        """Put another scheduler in place, by the name of its sampler; None is the usual one.

        Raises:
            ValueError: it is of another kind of noise.
        """
        self.scheduler = build_scheduler(
            self.noise,
            SamplerConfig(sampler=name),
            clip=clip_range(self.config["pixels"]),
            learnt_sigma=self.transformer.network.config.learn_sigma,
        )

    @torch.no_grad()
    def __call__(
        self,
        class_labels: Sequence[int | str] | Tensor | None = None,
        num_inference_steps: int = 50,
        guidance_scale: float = 1.0,
        generator: Generators = None,
        height: int | None = None,
        width: int | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        batch_size: int | None = None,
        show: Show | None = None,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Make images.

        Args:
            class_labels: a class for each image, by number or name; None for images of any class.
            num_inference_steps: calls of the model.
            guidance_scale: see `draw`; 1 is without.
            generator: one for each image, by which an image is the same whatever is made beside it;
                or one for all, which they draw from in turn; None is torch's global chance.
            height: of the images in pixels; None is what the model was trained on.
            width: the same.
            output_type: "pil"; "np", [B, height, width, channels] from 0 to 1; "pt", [B, channels,
                height, width] from 0 to 1; or "latent", what the model makes.
            return_dict: whether an object with `images` is returned, or a tuple.
            batch_size: images where class_labels is None; None is as many as generators, or 1.
            show: called after each step, with the number of steps done, in place of a bar.

        Raises:
            ValueError: a scheduler that does not fit the model's noise; a class that there is not;
                a size that cannot be made; and what `draw` refuses.
        """
        check_choice("output_type", output_type, OUTPUTS)
        config = self.transformer.network.config
        if output_type != "latent" and self.vae is None and self.config["pixels"] is None:
            raise ValueError(
                f"output_type is {output_type!r}, but there is no vae that decodes what the model "
                "makes, expected 'latent'"
            )
        check_scheduler(self.scheduler, self.noise)
        labels = None
        if class_labels is not None:
            asked = class_labels.tolist() if isinstance(class_labels, Tensor) else class_labels
            labels = find_labels(asked, self.names, num_classes=config.num_classes)
        device = self._execution_device
        bar: Any = nullcontext() if show else self.progress_bar(total=num_inference_steps)
        with bar:
            made = draw(
                _Called(self.transformer),
                self.scheduler,
                labels=labels,
                size=self._size(height, width),
                seeds=_generators(generator, len(labels) if labels is not None else batch_size),
                steps=num_inference_steps,
                guidance=float(guidance_scale),
                device=device,
                show=show or (lambda _: bar.update()),
            )
        images: Any = made if output_type == "latent" else self.decode(made)
        if output_type in ("np", "pil"):
            images = images.permute(0, 2, 3, 1).cpu().numpy()
        if output_type == "pil":
            images = self.numpy_to_pil(images)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    @torch.no_grad()
    def decode(self, made: Images) -> Float[Tensor, "B _ _ _"]:
        """Turn what the model makes into pixels from 0 to 1."""
        if self.vae is not None:
            config = self.vae.config
            latents = made / config.scaling_factor + (config.shift_factor or 0)
            parts = latents.to(self.vae.dtype).split(AT_ONCE)
            pixels = torch.cat([self.vae.decode(part).sample for part in parts]).float() / 2 + 0.5
        else:
            mean, std = (made.new_tensor(self.config["pixels"][name]) for name in ("mean", "std"))
            pixels = made * std[:, None, None] + mean[:, None, None]
        return pixels.float().clamp(0, 1)

    @property
    def _stride(self) -> int:
        """Pixels along a side of one place of what is denoised."""
        return 1 if self.vae is None else 2 ** (len(self.vae.config.block_out_channels) - 1)

    def _size(self, height: int | None, width: int | None) -> tuple[int, int]:
        """Of what is denoised."""
        usual = self.image_size
        asked = (usual[0] if height is None else height, usual[1] if width is None else width)
        patches = self.transformer.network.config.patch_size
        places = [p * self._stride for p in patches]
        if any(side < p or side % p for side, p in zip(asked, places, strict=True)):
            raise ValueError(
                f"height and width are {asked[0]} and {asked[1]}, expected multiples of "
                f"{places[0]} and {places[1]}"
            )
        return asked[0] // self._stride, asked[1] // self._stride


class _Called(nn.Module):
    """The transformer called as a `Denoiser` is, with all that diffusers has hung on it."""

    def __init__(self, transformer: DenoiserModel) -> None:
        super().__init__()
        self.config, self.transformer = transformer.network.config, transformer

    def forward(self, noisy: Images, timesteps: Tensor, labels: Tensor | None) -> DenoiserOutput:
        return self.transformer(noisy, timesteps, labels, return_dict=False)[0]


def clip_range(pixels: dict[str, Any] | None) -> float | None:
    """How far from 0 standardized pixels reach; None for latents."""
    return None if pixels is None else max_pixel(pixels["mean"], pixels["std"])


def _generators(given: Generators, count: int | None) -> list[torch.Generator]:
    """One for each image."""
    if isinstance(given, list):
        if count not in (None, len(given)):
            raise ValueError(f"generator has {len(given)}, expected one for each of {count} images")
        return given
    count = 1 if count is None else count
    if given is not None:
        return [given] * count
    seeds = torch.randint(MOST_SEEDS - 1, (count,)).tolist()
    return [torch.Generator().manual_seed(seed) for seed in seeds]


# where DiffusionPipeline.from_pretrained looks for the class that a folder names
setattr(diffusers, DenoiserPipeline.__name__, DenoiserPipeline)
