"""Image generation: train a denoiser by DDPM, v-prediction or flow matching, and sample from it."""

import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor, nn

from onescan.checks import check_positive
from onescan.experiments.data import ArraySplits, AugmentConfig, ImageSplits, derive_seed
from onescan.experiments.data.base import Subset
from onescan.experiments.data.image_grid import image_grid
from onescan.experiments.data.latents import LatentSplits
from onescan.experiments.data.share import WHOLE, Share
from onescan.experiments.tasks.base import Batch, Evaluation, Metrics, Rows, Task, TaskConfig
from onescan.experiments.tasks.feature_distance import (
    SampleClassifier,
    feature_distance,
    load_sample_classifier,
)
from onescan.experiments.tasks.noising import Noising
from onescan.inputs import ImageFormat
from onescan.inputs.image_files import AnyPixels
from onescan.inputs.images import unit_pixels
from onescan.inputs.latents import LatentFormat, load_vae
from onescan.messages import named_type
from onescan.models.denoiser import DenoiserConfig, NoiseConfig, SamplerConfig, max_pixel
from onescan.ops.collectives import gather_tokens, sum_over_ranks
from onescan.ops.parallel import sequence_group, sequence_parallel
from onescan.shapes import DenoiserOutput, Images, Labels, Timesteps

PARTS = 4  # of the range of timesteps; each test image is denoised once in each part
MAX_COLUMNS = 10  # classes in a picture
DECODE_BATCH = 8  # latents that are decoded together

Decoded = Float[Tensor, "B _ _ _"]  # pixels, whose size and channels differ from latents
Seeds = list[int]


@dataclass(frozen=True, kw_only=True)
class ImageGenerationConfig(TaskConfig):
    """Image generation with a `Denoiser`."""

    noise: NoiseConfig = field(default_factory=NoiseConfig)
    """Noise schedule and prediction target."""
    augment: AugmentConfig | None = None
    """Augmentation of training images; not available for latents."""
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    """Sampler settings for evaluation."""
    samples_per_class: int = 8
    """Images per class, for at most 10 classes, in the sample grid of an evaluation; 0 disables
    it."""
    classifier: str | None = None
    """Run folder of a trained classifier that scores the generated images."""
    evaluation_images: int = 1024
    """Maximum number of test images per evaluation and, with a classifier, of generated images."""
    evaluation_batch_size: int = 256
    """Images per evaluation batch; affects memory, not results."""

    def build(self, data: ImageSplits | ArraySplits | LatentSplits) -> "ImageGeneration":
        """Build the task for a data set of images or latents.

        Raises:
            ValueError: If a number is out of range, the sampler does not support the kind of noise,
                or an option is set that latents do not support.
            ImportError: If diffusers, which samples the images, is not installed.
        """
        if isinstance(data, ArraySplits):
            kind = "bytes" if data.format.is_bytes else "numbers"
            raise ValueError(
                f"data has {kind} of shape {(data.format.channels, *data.format.shape)}, expected "
                "images of 1 or 3 channels in bytes"
            )
        if isinstance(data, ImageSplits) and data.target.kind != "class":
            raise ValueError(
                f"data.target is {data.target.kind}, expected class, which a denoiser generates"
            )
        self.noise.check()
        self.sampler.check(self.noise)
        for name in ("evaluation_images", "evaluation_batch_size"):
            check_positive(**{f"task.{name}": getattr(self, name)})
        if self.samples_per_class < 0:
            raise ValueError(
                f"task.samples_per_class is {self.samples_per_class}, expected 0 or more"
            )
        if self.samples_per_class or self.classifier is not None:
            import onescan.integrations.diffusers  # noqa: F401  # check early that it is installed
        if isinstance(data.format, LatentFormat):
            for name in ("augment", "classifier"):
                if getattr(self, name) is not None:
                    raise ValueError(f"task.{name} is set, but the data are latents, expected None")
        return ImageGeneration(self, data)


class ImageGeneration(Task):
    """Image generation on one data set."""

    unit = "images"

    def __init__(self, config: ImageGenerationConfig, data: ImageSplits | LatentSplits) -> None:
        self.config, self.format, self.class_names = config, data.format, data.class_names
        self.train = data.train
        self.test = Subset(whole=data.test, max_examples=config.evaluation_images)
        self.test_batch_size = config.evaluation_batch_size
        self.noising = Noising(config.noise)
        self.codec: Codec
        if isinstance(data.format, LatentFormat):
            self.codec = LatentCodec(data.format)
        else:
            self.codec = PixelCodec(data.format)
        self.augmentation = config.augment.build() if config.augment else None

    def shard(self, share: Share) -> None:
        """Shard images after augmentation and noise."""
        self.share = share

    @cached_property
    def sample_classifier(self) -> SampleClassifier | None:
        """The classifier that scores generated images, loaded on first use."""
        if self.config.classifier is None:
            return None
        assert isinstance(self.format, ImageFormat)
        return load_sample_classifier(self.config.classifier, self.format, self.class_names)

    def augment(self, batch: Batch, seed: int) -> Batch:
        images, labels = batch
        if self.augmentation:
            images = self.augmentation(unit_pixels(images), derive_seed(seed, "augment"))
        return images, labels

    def corrupt(self, batch: Batch, seed: int, rows: Share = WHOLE) -> Batch:
        """Draw timesteps and noise from the global generator of the device.

        Returns:
            Images, labels, timesteps, and the noise to add.
        """
        del seed
        images, labels = batch
        device, batch_size = images.device, rows.size * len(images)
        fractions = torch.rand(batch_size, device=device)
        noise = torch.randn(batch_size, *images.shape[1:], device=device)
        if rows.size > 1:
            fractions, noise = (rows.cut(x, axis=0).clone() for x in (fractions, noise))
        return images, labels, self.noising.timesteps(fractions), noise

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Float[Tensor, ""], Metrics]:
        self._load_evaluators()
        images, labels, t, noise = batch
        x0 = self.codec.model_input(images)
        count = x0[0].numel() / self.share.size
        x0, noise = (self.share.cut(x, axis=2) for x in (x0, noise))
        noisy = self.noising.mix(x0, noise, t)
        prediction, variance = self._predict(model, noisy, t, labels)
        squares = (prediction - self.noising.target(x0, noise, t)) ** 2
        error = squares.sum() / (len(x0) * count)
        if variance is None:
            return error, {}
        variance_bits = self.noising.variance_loss(
            x0, noisy, prediction, variance, t, count=count
        ).mean()
        return error + variance_bits, {"error": error, "variance_bits": variance_bits}

    def predict(self, model: nn.Module, batch: Batch) -> Rows:
        images, labels = batch
        inputs = self.codec.model_input(images)
        x0, seeds = self.share.cut(inputs, axis=2), _seeds_of(inputs)
        timesteps, errors = [], []
        for part, (fraction, noise) in enumerate(_random_noise(seeds, inputs)):
            noise = self.share.cut(noise, axis=2)
            t = self.noising.timesteps((part + fraction) / PARTS)
            prediction, _ = self._predict(model, self.noising.mix(x0, noise, t), t, labels)
            error = (prediction - self.noising.target(x0, noise, t)) ** 2
            timesteps.append(t.float())
            errors.append(error.flatten(1).sum(dim=1) / inputs[0].numel())
        (sums,) = sum_over_ranks(torch.stack(errors, dim=1))
        rows = {
            "labels": labels,
            "timesteps": torch.stack(timesteps, dim=1),
            "errors": sums,
        }
        return (
            rows
            if self.sample_classifier is None
            else rows | self._classify_samples(model, batch, seeds)
        )

    def evaluate(self, rows: Rows) -> Evaluation:
        metrics = {"loss": rows["errors"].double().mean().item()}
        if "predictions" in rows:
            right = rows["predictions"] == rows["labels"]
            metrics["label_accuracy"] = right.double().mean().item()
        if "features" in rows:
            metrics["feature_distance"] = feature_distance(rows["features"], rows["made_features"])
        return Evaluation(metrics=metrics, arrays=rows)

    def score(self, metrics: dict[str, float]) -> float:
        return -metrics.get("feature_distance", metrics["loss"])

    def picture(self, model: nn.Module) -> Image | None:
        images_per_class = self.config.samples_per_class
        if not images_per_class:
            return None
        classes = self.shown_classes()
        columns = len(classes)
        labels = torch.tensor(classes * images_per_class, device=next(model.parameters()).device)
        seeds = [derive_seed(0, "picture", i) for i in range(columns * images_per_class)]
        return image_grid(self.generate(model, labels, seeds), columns=columns)

    def shown_classes(self) -> list[int]:
        """Return the classes in a picture, one per column."""
        count = len(self.class_names)
        columns = min(count, MAX_COLUMNS)
        return [i * count // columns for i in range(columns)]

    def generate(self, model: nn.Module, labels: Labels | None, seeds: Seeds) -> Images:
        """Generate one image per seed, with pixels from 0 to 1."""
        from onescan.integrations.diffusers import build_scheduler, sample  # slow

        sampler, config = self.config.sampler, model.config
        if not isinstance(config, DenoiserConfig):
            raise ValueError(
                f"the model is {named_type(model)}, which does not generate images: expected "
                "a Denoiser, or task.samples_per_class=0 without a classifier"
            )
        scheduler = build_scheduler(
            self.config.noise, sampler, clip=self.codec.clip, learn_sigma=config.learn_sigma
        )
        generated = sample(
            model if self.share.size == 1 else _WholeImages(model, self.share),
            scheduler,
            size=self.codec.size,
            seeds=seeds,
            labels=labels if config.num_classes else None,
            steps=sampler.steps,
            guidance=sampler.guidance_scale,
        )
        return self.codec.pixels(generated)

    def _load_evaluators(self) -> None:
        """Load what the first evaluation needs, so that errors occur at the start of training."""
        _ = self.sample_classifier
        if self.config.samples_per_class and isinstance(self.codec, LatentCodec):
            _ = self.codec.vae

    def _predict(
        self, model: nn.Module, noisy: Images, t: Timesteps, labels: Labels
    ) -> tuple[Images, Images | None]:
        """Return the predictions of the target, and of the variances if the model learns them."""
        config = getattr(getattr(model, "module", model), "config", None)  # DDP wraps the model
        if isinstance(config, DenoiserConfig):
            self._check_model(config)
        output = model(noisy, t, labels if _is_conditional(config) else None).float()
        channels = noisy.shape[1]
        if output.shape == noisy.shape:
            return output, None
        if output.shape != (len(noisy), 2 * channels, *noisy.shape[2:]):
            raise ValueError(
                f"the model returns shape {tuple(output.shape)} for noisy images of shape "
                f"{tuple(noisy.shape)}, expected the same shape, or twice the channels"
            )
        if self.noising.is_flow:
            raise ValueError(
                "model.learn_sigma is True, but task.noise.prediction is 'flow', which has no "
                "variances; expected False"
            )
        return output[:, :channels], output[:, channels:]

    def _check_model(self, config: DenoiserConfig) -> None:
        classes = len(self.class_names)
        if config.num_classes not in (0, classes):
            raise ValueError(
                f"model.num_classes is {config.num_classes}, but the data has {classes} classes, "
                f"expected {classes}, or 0 to ignore them"
            )
        guidance = self.config.sampler.guidance_scale
        samples = self.config.samples_per_class > 0 or self.sample_classifier is not None
        for name in ("num_classes", "label_dropout"):
            if samples and guidance != 1 and not getattr(config, name):
                raise ValueError(
                    f"task.sampler.guidance_scale is {guidance}, but model.{name} is 0, so the "
                    "model has no unconditional prediction; expected 1"
                )

    def _classify_samples(self, model: nn.Module, batch: Batch, seeds: Seeds) -> Rows:
        """Classify the test images, and as many generated images of the same classes."""
        assert self.sample_classifier is not None
        images, labels = batch
        samples = self.generate(model, labels, seeds)
        with sequence_parallel(None):  # the classifier reads whole images
            sample_features, image_features = (
                self.sample_classifier(x) for x in (samples, unit_pixels(images))
            )
        rows = {"features": image_features.pooled, "made_features": sample_features.pooled}
        if _is_conditional(model.config):
            rows["predictions"] = sample_features.probabilities.argmax(dim=1)
        return rows


class _WholeImages(nn.Module):
    """A denoiser that takes and returns whole images, of which each rank computes a shard."""

    def __init__(self, model: nn.Module, share: Share) -> None:
        super().__init__()
        self.model, self.share, self.config = model, share, model.config

    def forward(self, noisy: Images, timesteps: Timesteps, labels: Labels | None) -> DenoiserOutput:
        output = self.model(self.share.cut(noisy, axis=2), timesteps, labels)
        group = sequence_group(None)
        assert group is not None
        rows = output.transpose(1, 2)
        return gather_tokens(group, rows, group.lengths(rows)).transpose(1, 2)


class Codec(ABC):
    """Converts between a data set's images, what a denoiser works on, and pixels."""

    size: tuple[int, int]
    """Height and width of what is denoised."""
    clip: float | None
    """Maximum absolute value, or None if it is unknown."""

    @abstractmethod
    def model_input(self, images: AnyPixels) -> Images:
        """Convert a data set's images to the model's input."""

    @abstractmethod
    def pixels(self, generated: Images) -> Decoded:
        """Convert the model's output to pixels from 0 to 1."""


class PixelCodec(Codec):
    """Standardized pixels."""

    def __init__(self, format: ImageFormat) -> None:
        self.format, self.size = format, (format.height, format.width)
        self.clip = max_pixel(format.mean, format.std)

    def model_input(self, images: AnyPixels) -> Images:
        return self.format.standardize(unit_pixels(images))  # augmented ones in any range

    def pixels(self, generated: Images) -> Decoded:
        return self.format.pixels(generated)


class LatentCodec(Codec):
    """Latents, decoded by a VAE that is loaded on first use."""

    def __init__(self, format: LatentFormat) -> None:
        self.format, self.size, self.clip = format, (format.height, format.width), None

    @cached_property
    def vae(self) -> Any:
        """The VAE.

        Raises:
            ValueError: If it cannot be loaded.
            ImportError: If diffusers is not installed.
        """
        return load_vae(self.format.vae)

    def model_input(self, images: AnyPixels) -> Images:
        return images.float()

    def pixels(self, generated: Images) -> Decoded:
        vae = self.vae.to(generated.device)
        with torch.autocast(generated.device.type, enabled=False):  # float16 would overflow
            latents = self.format.unscaled(generated.float())
            parts = [vae.decode(part).sample for part in latents.split(DECODE_BATCH)]
        return (torch.cat(parts) / 2 + 0.5).clamp(0, 1)


def _is_conditional(config: object) -> bool:
    """Return whether the model takes labels."""
    return not (isinstance(config, DenoiserConfig) and config.num_classes == 0)


def _seeds_of(x0: Images) -> Seeds:
    """Return a seed for each image that depends only on the image, not on its batch."""
    return [zlib.crc32(image.numpy().tobytes()) for image in x0.float().cpu()]


def _random_noise(seeds: Seeds, x0: Images) -> list[tuple[Float[Tensor, " B"], Images]]:
    """Return a random fraction and noise for each part of the timesteps."""
    fractions, noises = [], []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        fractions.append(torch.rand(PARTS, generator=generator))
        noises.append(torch.randn(PARTS, *x0.shape[1:], generator=generator))
    parts = zip(torch.stack(fractions, dim=1), torch.stack(noises, dim=1), strict=True)
    return [(fraction.to(x0.device), noise.to(x0)) for fraction, noise in parts]
