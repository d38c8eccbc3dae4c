"""A denoiser as a diffusers model, and as a pipeline with a scheduler and a VAE for latents."""

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from difflib import get_close_matches
from typing import Any, ClassVar

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders.peft import PeftAdapterMixin
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline, ImagePipelineOutput
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils.import_utils import is_accelerate_available
from torch import Tensor, nn

from onescan.checks import check_choice
from onescan.configs import from_dict, to_dict
from onescan.inputs.images import check_constants
from onescan.integrations import REMOTE_MODULE, check_not_native, write_remote_module
from onescan.integrations.card import write_model_card
from onescan.integrations.diffusers.sampling import (
    Callback,
    build_scheduler,
    check_scheduler,
    prepare_scheduler,
    sample,
)
from onescan.layers.block import Block
from onescan.messages import expected_model, hint, plural
from onescan.models.denoiser import (
    Denoiser,
    DenoiserConfig,
    NoiseConfig,
    SamplerConfig,
    SamplerName,
    max_pixel,
)
from onescan.shapes import DenoiserOutput, Grids, Labels, Pictures

Generators = torch.Generator | list[torch.Generator] | None
ClassLabels = int | str | Tensor | Sequence[Any]
StepEndCallback = Callable[["DenoiserPipeline", int, Tensor, dict[str, Any]], dict[str, Any] | None]
OUTPUTS = ("pil", "np", "pt", "latent")
PIXEL_CHANNELS, IMAGE_AXES = (1, 3), 2
MAX_SEED = 2**63 - 1
DECODE_BATCH = 8  # latents
MAX_NAMES = 20  # classes listed in an error message


class _SavedWithModule(ConfigMixin):
    """A config that is saved together with the module that ``trust_remote_code=True`` imports.

    The saved fields refer to that module. When a class of onescan loads the folder, it replaces
    them, so that the module is not executed.
    """

    saved_fields: ClassVar[dict[str, Any]]
    loaded_fields: ClassVar[dict[str, Any]]

    def save_config(self, save_directory: Any, *rest: Any, **options: Any) -> None:
        """Save the config and the module."""
        classes = ("DenoiserModel", "DenoiserPipeline")
        write_remote_module(save_directory, "onescan.integrations.diffusers", classes)
        super().save_config(save_directory, *rest, **options)

    def to_json_string(self) -> str:
        """Return the config in its saved form."""
        saved = json.loads(super().to_json_string()) | self.saved_fields
        return json.dumps(saved, indent=2, sort_keys=True) + "\n"

    @classmethod
    def load_config(cls, pretrained_model_name_or_path: Any, *rest: Any, **options: Any) -> Any:
        """Read a saved config."""
        check_not_native(pretrained_model_name_or_path, "diffusers")
        loaded = super().load_config(pretrained_model_name_or_path, *rest, **options)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        for name in cls.saved_fields:
            config.pop(name, None)
        config.update(cls.loaded_fields)
        return loaded


class DenoiserModel(ModelMixin, _SavedWithModule, PeftAdapterMixin):  # type: ignore[misc]
    """A `Denoiser` with the interface of diffusers' transformers, including LoRA adapters.

    `DenoiserModel.from_onescan(native)` shares the weights of a native model, and `to_onescan()`
    returns the native model.
    """

    _supports_gradient_checkpointing = True
    # LRPE multiplies these angles and their rounding errors by the position of a token. Without
    # accelerate, diffusers cannot load a model that keeps modules in float32.
    _keep_in_fp32_modules = ["theta"] if is_accelerate_available() else None  # type: ignore[assignment]
    _no_split_modules = ["Block", "ConditionedBlock"]  # type: ignore[assignment]  # noqa: RUF012
    saved_fields = {"auto_map": {"AutoModel": f"{REMOTE_MODULE}.DenoiserModel"}}  # noqa: RUF012
    loaded_fields = {}  # noqa: RUF012

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self, denoiser: dict[str, Any]) -> None:
        """Build the network.

        Args:
            denoiser: A `DenoiserConfig` as plain data, which is the only content of config.json.

        Raises:
            ValueError: If a field is unknown, invalid or has the wrong type.
        """
        super().__init__()
        self.network = from_dict(DenoiserConfig, denoiser).build()
        self.gradient_checkpointing = False

    @classmethod
    def from_onescan(cls, native: Denoiser) -> "DenoiserModel":
        """Convert a native model. Both share their weights."""
        with torch.device("meta"):
            model = cls(denoiser=to_dict(native.config))
        model.network = native
        return model.train(native.training)

    def to_onescan(self) -> Denoiser:
        """Return the native model contained in this one."""
        return self.network

    def forward(
        self,
        hidden_states: Grids,
        timestep: Tensor | float | int,
        class_labels: Labels | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """Predict the target that the model was trained on, as in `Denoiser.forward`.

        Args:
            hidden_states: Noisy images [B, channels, height, width], of any size that patches
                divide.
            timestep: One timestep per image, or one for all images.
            class_labels: One class per image, or num_classes for no class. None means no class for
                all images.
            return_dict: Whether to return an object instead of a tuple.
        """
        times = torch.as_tensor(timestep, device=hidden_states.device)
        if times.numel() == 1:
            times = times.reshape(1).expand(len(hidden_states))
        predicted = self.network(hidden_states, times, class_labels)
        return Transformer2DModelOutput(sample=predicted) if return_dict else (predicted,)

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None
    ) -> None:
        """Make the blocks recompute their activations, without reentrant autograd."""
        for module in self.modules():
            if isinstance(module, Block):
                module.recompute = enable
        self.gradient_checkpointing = enable  # read by is_gradient_checkpointing


class DenoiserPipeline(_SavedWithModule, DiffusionPipeline):
    """Generate images from noise, conditioned on a class or unconditionally.

    Load a saved folder with `DenoiserPipeline.from_pretrained(folder)`, or without importing
    onescan with `DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)`. The scheduler
    can be replaced by a DDPM, DDIM, DPMSolverMultistep or FlowMatchEulerDiscrete scheduler that
    matches the noise used in training.
    """

    model_cpu_offload_seq = "transformer->vae"  # type: ignore[assignment]
    _optional_components = ["vae"]  # noqa: RUF012
    _callback_tensor_inputs = ["latents"]  # noqa: RUF012
    saved_fields = {  # noqa: RUF012
        "_class_name": [REMOTE_MODULE, "DenoiserPipeline"],
        "transformer": [REMOTE_MODULE, "DenoiserModel"],
    }
    loaded_fields = {  # noqa: RUF012
        "_class_name": "DenoiserPipeline",
        "transformer": [DenoiserModel.__module__, "DenoiserModel"],
    }

    transformer: DenoiserModel
    scheduler: Any
    vae: Any

    def __init__(
        self,
        transformer: DenoiserModel,
        scheduler: SchedulerMixin,
        vae: AutoencoderKL | None = None,
        noise: dict | None = None,  # type: ignore[type-arg]  # diffusers reads these types
        pixels: dict | None = None,  # type: ignore[type-arg]
        id2label: dict | None = None,  # type: ignore[type-arg]
    ) -> None:
        """Combine the components.

        Args:
            transformer: The model.
            scheduler: A scheduler that fits the noise.
            vae: Decoder of latents; None for a model of pixels.
            noise: Fields of the `NoiseConfig` with which the model was trained.
            pixels: "mean" and "std" per channel, as lists, with which pixels are standardized; None
                for a model of latents.
            id2label: Names of classes by their numbers.

        Raises:
            ValueError: If components do not match each other.
        """
        super().__init__()
        self._guidance_scale, self._num_timesteps = 1.0, 0
        trained = from_dict(NoiseConfig, noise or {})
        trained.check()
        check_scheduler(scheduler, trained)
        channels = transformer.network.config.channels
        if vae is not None and vae.config["latent_channels"] != channels:
            raise ValueError(
                f"vae has latents of {vae.config['latent_channels']} channels, but the model has "
                f"{channels}"
            )
        if vae is not None and pixels is not None:
            raise ValueError("vae and pixels are given, expected one of them")
        if pixels is not None:
            constants = {f"pixels.{name}": tuple(pixels[name]) for name in ("mean", "std")}
            check_constants(len(pixels["mean"]), **constants)
        self.register_modules(transformer=transformer, scheduler=scheduler, vae=vae)
        self.register_to_config(
            noise=to_dict(trained),
            pixels=pixels,
            # JSON does not support numbers as keys
            id2label={str(number): name for number, name in (id2label or {}).items()},
        )

    def save_pretrained(self, save_directory: Any, *rest: Any, **options: Any) -> None:
        """Save all components, with a model card if the folder has no README.md."""
        super().save_pretrained(save_directory, *rest, **options)
        config, name = self.transformer.network.config, type(self).__name__
        is_image = len(config.image_size) == IMAGE_AXES
        arguments = "[0]" if config.num_classes else "batch_size=1"
        if self.vae is None and self.config["pixels"] is None:
            arguments += ', output_type="latent"'
        elif not is_image:
            arguments += ', output_type="np"'
        tag = "unconditional-image-generation" if is_image and not config.num_classes else None
        write_model_card(
            save_directory,
            config,
            title=name,
            usage=f"from onescan.integrations.diffusers import {name}\n\n"
            f'pipeline = {name}.from_pretrained("path/to/folder")\n'
            f"image = pipeline({arguments}).images[0]",
            parameters=self.transformer.num_parameters(),
            metadata={"library_name": "diffusers", "pipeline_tag": tag},
        )

    @property
    def noise(self) -> NoiseConfig:
        """Noise config with which the model was trained."""
        return from_dict(NoiseConfig, self.config["noise"])

    @property
    def names(self) -> dict[int, str]:
        """Names of classes by their numbers."""
        return {int(number): name for number, name in self.config["id2label"].items()}

    @property
    def guidance_scale(self) -> float:
        """Guidance scale of the next step. callback_on_step_end may set `_guidance_scale`."""
        return float(self._guidance_scale)

    @property
    def num_timesteps(self) -> int:
        """Number of steps of the last call."""
        return self._num_timesteps

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 for an unconditional model."""
        return self.transformer.network.config.num_classes

    @property
    def image_size(self) -> tuple[int, ...]:
        """Default height and width of images, or the size along each axis of signals and video."""
        return tuple(side * self._stride for side in self.transformer.network.config.image_size)

    def use_sampler(self, name: SamplerName | None) -> None:
        """Replace the scheduler by that of a sampler; None selects the default sampler.

        Raises:
            ValueError: If the sampler does not match the noise used in training.
        """
        self.scheduler = build_scheduler(
            self.noise,
            SamplerConfig(sampler=name),
            clip=clip_range(self.config["pixels"]),
            learn_sigma=self.transformer.network.config.learn_sigma,
        )

    @torch.no_grad()
    def __call__(
        self,
        class_labels: ClassLabels | None = None,
        num_inference_steps: int = 50,
        guidance_scale: float = 1.0,
        generator: Generators = None,
        height: int | None = None,
        width: int | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        batch_size: int | None = None,
        callback: Callback | None = None,
        num_images_per_prompt: int = 1,
        latents: Grids | None = None,
        callback_on_step_end: StepEndCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
    ) -> ImagePipelineOutput | tuple[Any]:
        """Generate images.

        Args:
            class_labels: One class per image, by number or name, or one class for a single image.
                Nested lists are flattened. None for images of any class.
            num_inference_steps: Number of sampling steps.
            guidance_scale: Scale of classifier-free guidance; 1 disables it.
            generator: One generator per image, so that an image does not depend on the others; or
                one for all images, used sequentially; None for torch's global generator.
            height: Height of the images in pixels; None for the size used in training.
            width: Width of the images in pixels; None for the size used in training.
            output_type: "pil", if the model has two axes; "np", [B, height, width, channels] from 0
                to 1; "pt", [B, channels, height, width] from 0 to 1; or "latent", the output of the
                model.
            return_dict: Whether to return an object with `images` instead of a tuple.
            batch_size: Number of images if class_labels is None. None uses the number of
                generators, or 1.
            callback: Called after each step with the number of completed steps; replaces the
                progress bar.
            num_images_per_prompt: Number of consecutive images per class, or per image of
                batch_size.
            latents: Initial noise [B, channels, height, width] in the size of the model's sample;
                None draws it from the generators.
            callback_on_step_end: Called after each step with the pipeline, the index of the step,
                its timestep and a dict of tensors. It may return a dict with new "latents", and set
                the pipeline's `_guidance_scale` for the next steps.
            callback_on_step_end_tensor_inputs: Names of the tensors for callback_on_step_end; only
                "latents" exists.

        Raises:
            ValueError: If the scheduler does not match the noise used in training, a class is
                unknown, the size is not possible, or `sample` raises it.
        """
        check_choice("output_type", output_type, OUTPUTS)
        config = self.transformer.network.config
        if output_type == "pil" and (axes := len(config.image_size)) != IMAGE_AXES:
            raise ValueError(
                f"output_type is 'pil', but the model has {plural(axes, 'axis')}, expected 'np', "
                "'pt' or 'latent'"
            )
        if output_type != "latent" and self.vae is None and self.config["pixels"] is None:
            raise ValueError(
                f"output_type is {output_type!r}, but there is no vae to decode the model's "
                "latents, expected 'latent'"
            )
        check_scheduler(self.scheduler, self.noise)
        if num_images_per_prompt < 1:
            raise ValueError(
                f"num_images_per_prompt is {num_images_per_prompt}, expected 1 or more"
            )
        for name in callback_on_step_end_tensor_inputs:
            check_choice("callback_on_step_end_tensor_inputs", name, self._callback_tensor_inputs)
        labels, count = None, batch_size
        if class_labels is not None:
            plain = _flat(class_labels)
            labels = find_labels(plain, self.names, num_classes=config.num_classes)
            labels = [label for label in labels for _ in range(num_images_per_prompt)]
            count = len(labels)
        elif batch_size is not None or num_images_per_prompt > 1:
            count = (batch_size or 1) * num_images_per_prompt
        elif latents is not None and not isinstance(generator, list):
            count = len(latents)

        def on_step_end(step: int, timestep: Tensor, sampled: Grids) -> Grids:
            if callback_on_step_end is None:
                return sampled
            tensors = dict.fromkeys(callback_on_step_end_tensor_inputs, sampled)
            return (callback_on_step_end(self, step, timestep, tensors) or {}).get(
                "latents", sampled
            )

        self._guidance_scale = float(guidance_scale)
        self._num_timesteps = len(prepare_scheduler(self.scheduler, num_inference_steps).timesteps)
        bar: Any = nullcontext() if callback else self.progress_bar(total=self.num_timesteps)
        with bar:
            sampled = sample(
                _AsDenoiser(self.transformer),
                self.scheduler,
                labels=labels,
                size=self._model_size(height, width),
                seeds=_generators(generator, count),
                steps=num_inference_steps,
                guidance=lambda: self.guidance_scale,
                device=self._execution_device,
                callback=callback or (lambda _: bar.update()),
                latents=latents,
                on_step_end=on_step_end,
            )
        images: Any = sampled if output_type == "latent" else self.decode(sampled)
        if output_type in ("np", "pil"):
            images = images.movedim(1, -1).cpu().numpy()
        if output_type == "pil":
            images = self.numpy_to_pil(images)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    @torch.no_grad()
    def decode(self, sampled: Grids) -> Pictures:
        """Convert the output of the model to pixels from 0 to 1."""
        if self.vae is not None:
            config = self.vae.config
            latents = sampled / config.scaling_factor + (config.shift_factor or 0)
            parts = latents.to(self.vae.dtype).split(DECODE_BATCH)
            pixels = torch.cat([self.vae.decode(part).sample for part in parts]).float() / 2 + 0.5
        else:
            mean, std = (sampled.new_tensor(self.config["pixels"][key]) for key in ("mean", "std"))
            mean, std = (x.reshape(-1, *[1] * (sampled.ndim - 2)) for x in (mean, std))
            pixels = sampled * std + mean
        return pixels.float().clamp(0, 1)

    @property
    def _stride(self) -> int:
        """Number of image pixels per model pixel, along each side."""
        return 1 if self.vae is None else 2 ** (len(self.vae.config.block_out_channels) - 1)

    def _model_size(self, height: int | None, width: int | None) -> tuple[int, ...]:
        """Return the size of the model's sample for an image of this size."""
        default = self.image_size
        if len(default) != IMAGE_AXES:
            if height is not None or width is not None:
                raise ValueError(
                    f"height is {height} and width is {width}, expected None for both, because the "
                    f"model has {plural(len(default), 'axis')}"
                )
            return self.transformer.network.config.image_size
        size = (default[0] if height is None else height, default[1] if width is None else width)
        stride = self._stride
        if any(side < 1 or side % stride for side in size):
            expected = "positive numbers" if stride == 1 else f"positive multiples of {stride}"
            raise ValueError(f"height and width are {size[0]} and {size[1]}, expected {expected}")
        return size[0] // stride, size[1] // stride


class _AsDenoiser(nn.Module):
    """Wraps the transformer to take the arguments of a `Denoiser`, keeping diffusers' hooks."""

    def __init__(self, transformer: DenoiserModel) -> None:
        super().__init__()
        self.config, self.transformer = transformer.network.config, transformer

    def forward(self, noisy: Grids, timesteps: Tensor, labels: Tensor | None) -> DenoiserOutput:
        return self.transformer(noisy, timesteps, labels, return_dict=False)[0]


def to_diffusers(
    model: nn.Module,
    *,
    noise: NoiseConfig | None = None,
    sampler: SamplerConfig | None = None,
    format: Any = None,
    class_names: Sequence[str] = (),
    vae: AutoencoderKL | None = None,
) -> DenoiserPipeline:
    """Convert a denoiser to a pipeline of diffusers. Both share their weights.

    For a checkpoint that `onescan.load` returned, pass its format and class_names, and as noise
    ``run_config(checkpoint.folder).task.noise``, with `onescan.experiments.training.run_config`.

    Args:
        model: A `Denoiser`.
        noise: Noise config with which the model was trained; None for that of DDPM.
        sampler: Sampler of the pipeline's scheduler; None for the default sampler.
        format: Format of the training data, with the mean and std of pixels. None means pixels from
            -1 to 1 for 1 or 3 channels without a vae, and otherwise latents.
        class_names: One name per class, or none.
        vae: Decoder of latents.

    Raises:
        ValueError: If the model is not a denoiser, or arguments do not match each other.
    """
    if not isinstance(model, Denoiser):
        raise expected_model(model, "a Denoiser")
    noise, sampler = noise or NoiseConfig(), sampler or SamplerConfig()
    if vae is not None and (axes := len(model.config.image_size)) != IMAGE_AXES:
        raise ValueError(
            f"vae is given, but the model has {plural(axes, 'axis')}, expected {IMAGE_AXES}"
        )
    if class_names and len(class_names) != model.config.num_classes:
        raise ValueError(
            f"class_names has {len(class_names)} names, expected one for each of "
            f"{model.config.num_classes} classes"
        )
    pixels = None
    if hasattr(format, "mean") and hasattr(format, "std"):
        pixels = {"mean": list(format.mean), "std": list(format.std)}
    elif format is None and vae is None and model.config.channels in PIXEL_CHANNELS:
        pixels = {"mean": [0.5], "std": [0.5]}
    return DenoiserPipeline(
        transformer=DenoiserModel.from_onescan(model),
        scheduler=build_scheduler(
            noise, sampler, clip=clip_range(pixels), learn_sigma=model.config.learn_sigma
        ),
        vae=vae,
        noise=to_dict(noise),
        pixels=pixels,
        id2label=dict(enumerate(class_names)),
    )


def clip_range(pixels: dict[str, Any] | None) -> float | None:
    """Return the largest absolute value of standardized pixels; None for latents."""
    return None if pixels is None else max_pixel(pixels["mean"], pixels["std"])


def _generators(generator: Generators, count: int | None) -> list[torch.Generator]:
    """Return one generator per image."""
    if isinstance(generator, list):
        if count not in (None, len(generator)):
            raise ValueError(
                f"generator is a list of {len(generator)}, expected one for each of "
                f"{plural(count or 0, 'image')}"
            )
        return generator
    count = 1 if count is None else count
    if generator is not None:
        return [generator] * count
    seeds = torch.randint(MAX_SEED, (count,)).tolist()
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def _flat(labels: ClassLabels) -> list[Any]:
    """Return labels as one list, in order: a single label, a tensor, or nested lists of them."""
    if isinstance(labels, Tensor):
        return labels.reshape(-1).tolist()
    if isinstance(labels, str) or not isinstance(labels, Sequence):
        return [labels]
    return [label for part in labels for label in _flat(part)]


def find_labels(
    labels: Sequence[int | str], names: Mapping[int, str], *, num_classes: int
) -> list[int]:
    """Return the numbers of classes.

    Args:
        labels: Numbers or names of classes.
        names: Names of classes by their numbers; classes without a name are allowed.
        num_classes: Number of classes, which is also the label for no class.

    Raises:
        ValueError: If a class does not exist, or several classes have the same name.

    >>> find_labels([1, "cat"], {0: "cat", 1: "dog"}, num_classes=2)
    [1, 0]
    """
    if isinstance(labels, str) or not isinstance(labels, Sequence):
        raise ValueError(f"class_labels is {labels!r}, expected a list, such as [{labels!r}]")
    if not labels:
        raise ValueError("class_labels is empty, expected a class for each image, or None")
    if num_classes == 0:
        raise ValueError(f"labels {list(labels)} are given, but the model has no classes")
    return [_find_label(label, names, num_classes) for label in labels]


def parse_label(text: str, names: Mapping[int, str]) -> int | str:
    """Parse a label on a command line: the name of a class, or otherwise a number.

    >>> parse_label("7", {0: "7"}), parse_label("1", {0: "7"})
    ('7', 1)
    """
    return int(text) if text.isdecimal() and text not in names.values() else text


def _find_label(label: Any, names: Mapping[int, str], num_classes: int) -> int:
    if not isinstance(label, str):
        try:
            number = operator.index(label)
        except TypeError as error:
            raise ValueError(f"label {label!r} is neither a number nor a name") from error
        if isinstance(label, bool):
            raise ValueError(f"label {label!r} is neither a number nor a name")
        if not 0 <= number <= num_classes:
            raise ValueError(
                f"label {number} is not a class, expected 0 to {num_classes - 1}, or {num_classes} "
                "for none"
            )
        return number
    numbers = [number for number, name in names.items() if name == label]
    if len(numbers) > 1:
        raise ValueError(
            f"label {label!r} is the name of several classes, expected one of their numbers "
            f"{numbers}"
        )
    if not numbers:
        class_names = list(dict.fromkeys(names.values()))
        if len(class_names) > MAX_NAMES:
            similar = get_close_matches(label, class_names, n=3)
            suffix = (
                f"; similar: {', '.join(similar)}"
                if similar
                else f"; the model has {len(class_names):,} class names"
            )
        else:
            suffix = hint(label, class_names)
        raise ValueError(f"label {label!r} is unknown{suffix}")
    return numbers[0]
