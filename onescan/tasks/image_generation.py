"""Learning to free images of noise, by which images are made: DDPM, v-prediction, flow matching."""

import zlib
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor, nn

from onescan.checks import check_positive
from onescan.data import ArraySplits, AugmentConfig, ImageFormat, ImageSplits, derive_seed
from onescan.data.base import Subset
from onescan.data.image_grid import image_grid
from onescan.data.images import unit_pixels
from onescan.data.latents import LatentFormat, LatentSplits
from onescan.models.denoiser import DenoiserConfig, NoiseConfig, SamplerConfig
from onescan.shapes import Images, Labels, Timesteps
from onescan.tasks.base import Batch, Evaluation, Metrics, Rows, Task, TaskConfig
from onescan.tasks.canvas import Canvas, LatentCanvas, PixelCanvas
from onescan.tasks.classifier_features import SampleJudge, load_judge
from onescan.tasks.feature_distance import feature_distance
from onescan.tasks.noising import Noising

PARTS = 4  # of all timesteps: a held-out image is looked at once in each
MOST_SHOWN = 10  # classes in a picture

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
        """Pose the problem on these images.

        Raises:
            ValueError: a number out of range; a sampler of another kind of noise; or a classifier
                that there is not, or of other classes.
            ImportError: diffusers, which makes the images, is not installed.
        """
        if isinstance(data, ArraySplits):
            raise ValueError(
                f"data has shape {data.train.shape} and type {data.train.x.dtype}, expected images "
                "of 1 or 3 channels in bytes"
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
            import onescan.integrations.diffusers  # noqa: F401  # or say now that it is missing
        if isinstance(data.format, LatentFormat):
            for name in ("augment", "classifier"):
                if getattr(self, name) is not None:
                    raise ValueError(f"task.{name} is given, but the data are latents, no images")
        return ImageGeneration(self, data)


class ImageGeneration(Task):
    """Image generation after one data set."""

    unit = "images"

    def __init__(self, config: ImageGenerationConfig, data: ImageSplits | LatentSplits) -> None:
        self.config, self.format, self.class_names = config, data.format, data.class_names
        self.train = data.train
        self.test = Subset(whole=data.test, max_examples=config.evaluation_images)
        self.test_batch_size = config.evaluation_batch_size
        self.noising = Noising(config.noise)
        self.canvas: Canvas
        if isinstance(data.format, LatentFormat):
            self.canvas = LatentCanvas(data.format)
        else:
            self.canvas = PixelCanvas(data.format)
        self.augmentation = config.augment.build() if config.augment else None

    @cached_property
    def judge_images(self) -> SampleJudge | None:
        """The classifier that judges, loaded when it is first needed; a page does without."""
        if self.config.classifier is None:
            return None
        assert isinstance(self.format, ImageFormat)
        return load_judge(self.config.classifier, self.format, self.class_names)

    def augment(self, batch: Batch, seed: int) -> Batch:
        images, labels = batch
        if self.augmentation:
            images = self.augmentation(unit_pixels(images), derive_seed(seed, "augment"))
        return images, labels

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Float[Tensor, ""], Metrics]:
        self._open_judges()
        images, labels = batch
        x0 = self.canvas.model_input(images)
        t = self.noising.timesteps(torch.rand(len(x0), device=x0.device))
        noise = torch.randn_like(x0)
        noisy = self.noising.mix(x0, noise, t)
        told, share = self._told(model, noisy, t, labels)
        error = ((told - self.noising.target(x0, noise, t)) ** 2).mean()
        if share is None:
            return error, {}
        variance = self.noising.variance_loss(x0, noisy, told, share, t).mean()
        return error + variance, {"error": error, "variance_bits": variance}

    def predict(self, model: nn.Module, batch: Batch) -> Rows:
        images, labels = batch
        x0 = self.canvas.model_input(images)
        seeds = _seeds_of(x0)
        timesteps, errors = [], []
        for part, (place, noise) in enumerate(_chance(seeds, x0)):
            t = self.noising.timesteps((part + place) / PARTS)
            told, _ = self._told(model, self.noising.mix(x0, noise, t), t, labels)
            error = (told - self.noising.target(x0, noise, t)) ** 2
            timesteps.append(t.float())
            errors.append(error.flatten(1).mean(dim=1))
        rows = {
            "labels": labels,
            "timesteps": torch.stack(timesteps, dim=1),
            "errors": torch.stack(errors, dim=1),
        }
        return rows if self.judge_images is None else rows | self._judged(model, batch, seeds)

    def judge(self, rows: Rows) -> Evaluation:
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
        each = self.config.samples_per_class
        if not each:
            return None
        shown = self.shown_classes()
        columns = len(shown)
        labels = torch.tensor(shown * each, device=next(model.parameters()).device)
        seeds = [derive_seed(0, "picture", i) for i in range(columns * each)]
        return image_grid(self.make(model, labels, seeds), columns=columns)

    def shown_classes(self) -> list[int]:
        """The classes in a picture, one a column."""
        count = len(self.class_names)
        shown = min(count, MOST_SHOWN)
        return [i * count // shown for i in range(shown)]

    def make(self, model: nn.Module, labels: Labels | None, seeds: Seeds) -> Images:
        """Make images, one a seed: pixels from 0 to 1."""
        from onescan.integrations.diffusers import build_scheduler, sample  # slow

        sampler, config = self.config.sampler, model.config
        if not isinstance(config, DenoiserConfig):
            raise ValueError(
                f"the model is a {type(model).__name__}, by which no images are made: expected a "
                "Denoiser, or task.samples_per_class=0 without a classifier"
            )
        scheduler = build_scheduler(
            self.config.noise, sampler, clip=self.canvas.clip, learn_sigma=config.learn_sigma
        )
        made = sample(
            model,
            scheduler,
            size=self.canvas.size,
            seeds=seeds,
            labels=labels if config.num_classes else None,
            steps=sampler.steps,
            guidance=sampler.guidance_scale,
        )
        return self.canvas.pixels(made)

    def _open_judges(self) -> None:
        """Load what the first evaluation needs, so that what is missing is told before it."""
        _ = self.judge_images
        if self.config.samples_per_class and isinstance(self.canvas, LatentCanvas):
            _ = self.canvas.vae

    def _told(
        self, model: nn.Module, noisy: Images, t: Timesteps, labels: Labels
    ) -> tuple[Images, Images | None]:
        """What the model tells of the target, and of the variances if it tells those."""
        config = getattr(getattr(model, "module", model), "config", None)  # DDP has one inside
        if isinstance(config, DenoiserConfig):
            self._check_model(config)
        told = model(noisy, t, labels if _asks(config) else None).float()
        channels = noisy.shape[1]
        if told.shape == noisy.shape:
            return told, None
        if told.shape != (len(noisy), 2 * channels, *noisy.shape[2:]):
            raise ValueError(
                f"the model gives {tuple(told.shape)} for noisy images of {tuple(noisy.shape)}, "
                "expected the same shape, or twice the channels"
            )
        if self.noising.is_flow:
            raise ValueError(
                "model.learn_sigma is True, but task.noise.prediction is 'flow', which has no "
                "variances; expected False"
            )
        return told[:, :channels], told[:, channels:]

    def _check_model(self, config: DenoiserConfig) -> None:
        classes = len(self.class_names)
        if config.num_classes not in (0, classes):
            raise ValueError(
                f"model.num_classes is {config.num_classes}, but the data has {classes} classes, "
                "expected as many, or 0"
            )
        guidance = self.config.sampler.guidance_scale
        draws = self.config.samples_per_class > 0 or self.judge_images is not None
        for name in ("num_classes", "label_dropout"):
            if draws and guidance != 1 and not getattr(config, name):
                raise ValueError(
                    f"task.sampler.guidance_scale is {guidance}, but model.{name} is 0, so the "
                    "model has no unconditional prediction; expected 1"
                )

    def _judged(self, model: nn.Module, batch: Batch, seeds: Seeds) -> Rows:
        """What the classifier makes of held-out images, and of as many made of the same classes."""
        assert self.judge_images is not None
        images, labels = batch
        seen = self.judge_images(self.make(model, labels, seeds))
        real = self.judge_images(unit_pixels(images))
        rows = {"features": real.pooled, "made_features": seen.pooled}
        if _asks(model.config):
            rows["predictions"] = seen.probabilities.argmax(dim=1)
        return rows


def _asks(config: object) -> bool:
    """Whether the model takes labels."""
    return not (isinstance(config, DenoiserConfig) and config.num_classes == 0)


def _seeds_of(x0: Images) -> Seeds:
    """A seed for each image that comes from the image itself, whatever batch it is in."""
    return [zlib.crc32(image.numpy().tobytes()) for image in x0.float().cpu()]


def _chance(seeds: Seeds, x0: Images) -> list[tuple[Float[Tensor, " B"], Images]]:
    """For each part of the timesteps a place in it, and noise."""
    places, noises = [], []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        places.append(torch.rand(PARTS, generator=generator))
        noises.append(torch.randn(PARTS, *x0.shape[1:], generator=generator))
    chance = zip(torch.stack(places, dim=1), torch.stack(noises, dim=1), strict=True)
    return [(place.to(x0.device), noise.to(x0)) for place, noise in chance]
