"""Generate images with a trained denoiser: load it as a pipeline, and write images to files."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from PIL.Image import Image

from onescan.checkpoint.files import check_writable, write_atomically
from onescan.checks import check_choice, check_positive
from onescan.experiments.data import batched, derive_seed
from onescan.experiments.data.image_grid import (
    ImageBytes,
    as_image,
    grid_columns,
    grid_of_bytes,
    image_bytes,
)
from onescan.experiments.tasks.image_generation import ImageGenerationConfig
from onescan.experiments.training.runs import run_config
from onescan.inference.loading import load
from onescan.inputs import ImageFormat
from onescan.inputs.latents import LatentFormat, load_vae
from onescan.messages import with_article
from onescan.models.denoiser import STEPS, Denoiser, SamplerConfig, SamplerName
from onescan.progress import progress_bar

if TYPE_CHECKING:
    from onescan.integrations.diffusers import DenoiserPipeline

INDEX = "model_index.json"  # file of a pipeline saved by diffusers
GRID, ARRAY = ".png", ".npz"
MAX_NAME = 80  # characters of a class name in a file name
NOT_IN_NAMES = r"[^\w.-]+"  # characters that are replaced in file names


def load_pipeline(
    path: str | Path, *, sampler: str | None = None, vae: str | None = None
) -> "DenoiserPipeline":
    """Load a pipeline, in evaluation mode on the CPU, without running code that comes with it.

    Args:
        path: A run's folder, or its best.safetensors; "zoo/NAME"; or a folder saved by
            `DenoiserPipeline.save_pretrained`.
        sampler: Name of the sampler. ``None`` uses the run's own, or the saved scheduler.
        vae: Folder or hub name of the VAE that decodes latents. ``None`` uses the one that encoded
            them, or the saved one.

    Raises:
        ImportError: If diffusers is not installed.
        FileNotFoundError: If there is no such path, or the run has no saved weights.
        ValueError: If it does not generate images, is damaged, or was trained with a kind of noise
            that the sampler does not support; or if the VAE cannot be loaded or does not fit.
    """
    path = Path(path)
    name: Any = sampler
    if sampler is not None:
        check_choice("sampler", sampler, get_args(SamplerName))
    if path.is_dir() and (path / INDEX).is_file():
        return _load_from_diffusers(path, name, vae)
    return _load_from_run(path, name, vae)


def default_sampler(path: str | Path) -> SamplerConfig:
    """Return the sampler settings of a run, or the defaults for other models.

    Raises:
        ValueError: If it is a run that does not generate images.
    """
    run = run_config(path)
    if run is None:
        return SamplerConfig()
    if not isinstance(run.task, ImageGenerationConfig):
        kind = with_article(type(run.model).__name__.removesuffix("Config"))
        raise ValueError(f"'{path}' is a run of {kind}, which does not generate images")
    return run.task.sampler


def _load_from_run(path: Path, sampler: SamplerName | None, vae: str | None) -> "DenoiserPipeline":
    from onescan.integrations.diffusers import to_diffusers  # slow

    run = load(path)
    config = run_config(run.folder)
    if config is None:
        raise ValueError(
            f"'{path}' was saved without its noise and sampler, expected a run or a folder of "
            "diffusers"
        )
    task, model, format = config.task, run.model, run.format
    if not isinstance(model, Denoiser) or not isinstance(task, ImageGenerationConfig):
        kinds = f"{type(model).__name__}, trained by {type(task).__name__}"
        raise ValueError(f"'{path}' holds {kinds}, expected a Denoiser that generates images")
    if not isinstance(format, ImageFormat | LatentFormat):
        raise ValueError(f"'{path}' was trained on {type(format).__name__}, not on images")
    if vae is not None and isinstance(format, ImageFormat):
        raise ValueError(f"vae is {vae!r}, but '{path}' was trained on pixels, expected None")
    decoder = None
    if isinstance(format, LatentFormat):
        decoder = load_vae(vae or format.vae)
        scaling = float(decoder.config.scaling_factor), float(decoder.config.shift_factor or 0)
        if scaling != (format.scale, format.shift):
            raise ValueError(
                f"vae is {vae or format.vae!r}, which scales and shifts latents by {scaling}, but "
                f"'{path}' was trained with {(format.scale, format.shift)}"
            )
    run_sampler = task.sampler
    return to_diffusers(
        model,
        noise=task.noise,
        sampler=run_sampler
        if sampler is None
        else dataclasses.replace(run_sampler, sampler=sampler),
        format=format,
        class_names=run.class_names if model.config.num_classes else (),
        vae=decoder,
    )


def _load_from_diffusers(
    path: Path, sampler: SamplerName | None, vae: str | None
) -> "DenoiserPipeline":
    from onescan.integrations.diffusers import load_pretrained  # slow

    pipeline = load_pretrained(path, vae=None if vae is None else load_vae(vae))
    if sampler is not None:
        pipeline.use_sampler(sampler)
    return pipeline


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """What images to generate."""

    labels: tuple[int, ...] = ()
    """Class numbers to generate; empty cycles through all classes."""
    num_images: int = 16
    """Images per label, or images in total if labels is empty."""
    steps: int = 50
    """Denoising steps per image."""
    guidance_scale: float = 1.0
    """Scale of classifier-free guidance; 1 disables it."""
    seed: int = 0
    """Random seed."""
    size: tuple[int, int] | None = None
    """Height and width of the images; None uses the training size."""
    batch_size: int = 64
    """Images per batch; affects memory, and results only by rounding."""

    def check(self) -> None:
        """Raise ValueError for a number out of range."""
        check_positive(num_images=self.num_images, batch_size=self.batch_size)
        if not 1 <= self.steps <= STEPS:
            raise ValueError(f"steps is {self.steps}, expected 1 to {STEPS}")
        if not 0 <= self.guidance_scale < math.inf:
            raise ValueError(f"guidance_scale is {self.guidance_scale}, expected 0 or more")
        if self.size is not None and min(self.size) < 1:
            raise ValueError(f"size is {self.size}, expected a height and a width above 0")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}, expected 0 or more")


def check_out(out: Path) -> None:
    """Raise ValueError if images cannot be written to this path."""
    if out.suffix not in ("", GRID, ARRAY):
        raise ValueError(
            f"out is '{out}', expected a name that ends in {GRID} for one grid or in {ARRAY} for "
            "an array, or a folder for one file each"
        )
    check_writable("out", out, folder=not out.suffix)


def sample_seed(seed: int, index: int) -> int:
    """Return the seed of one image, which does not depend on the number of images."""
    return derive_seed(seed, "sample", index)


def write_samples(
    pipeline: "DenoiserPipeline", config: SampleConfig, out: Path, *, progress: bool = False
) -> int:
    """Generate images and write them to files. Writes are atomic.

    Image i depends only on the seed, i and its label.

    Args:
        pipeline: Pipeline on its device.
        config: What to generate.
        out: ``x.png`` for one grid; ``x.npz`` for "arr_0", uint8 of shape [N, height, width,
            channels], and if there are classes "arr_1", their numbers; or a folder for one PNG per
            image.
        progress: Show a progress bar on stderr.

    Returns:
        Number of images.

    Raises:
        ValueError: See `check_out`; or if the config or the pipeline rejects a value.
        OSError: If a file cannot be written.
    """
    check_out(out)
    config.check()
    labels = list(config.labels) or list(range(pipeline.num_classes))
    count = config.num_images * max(1, len(config.labels))
    batches = _generate(pipeline, config, labels, count, progress=progress)
    if not out.suffix:
        for first, images in batches:
            for i, image in enumerate(images, first):
                name = "image"
                if labels:
                    label = labels[i % len(labels)]
                    name = re.sub(NOT_IN_NAMES, "_", pipeline.names.get(label, str(label)))
                file = f"{name[:MAX_NAME]}-seed-{config.seed}-{i:05}.png"
                _write_png(out / file, as_image(image))
        return count
    images = _join(batches, count)
    if out.suffix == GRID:
        _write_png(out, grid_of_bytes(images, grid_columns(count, max(1, len(labels)))))
        return count
    arrays = {"arr_0": images.numpy()}
    if labels:
        arrays["arr_1"] = np.array([labels[i % len(labels)] for i in range(count)])
    write_atomically(out, lambda partial: _write_arrays(partial, arrays))
    return count


def _generate(
    pipeline: Any, config: SampleConfig, labels: list[int], count: int, *, progress: bool
) -> Iterator[tuple[int, ImageBytes]]:
    """Yield each batch with the number of its first image."""
    height, width = config.size or (None, None)
    total = -(-count // config.batch_size) * config.steps
    with progress_bar(total, unit=" steps", disable=not progress) as bar:
        for numbers in batched(range(count), config.batch_size):
            seeds = [sample_seed(config.seed, i) for i in numbers]
            pixels = pipeline(
                class_labels=[labels[i % len(labels)] for i in numbers] if labels else None,
                num_inference_steps=config.steps,
                guidance_scale=config.guidance_scale,
                generator=[torch.Generator().manual_seed(seed) for seed in seeds],
                height=height,
                width=width,
                output_type="pt",
                callback=lambda _: bar.update(),
            ).images
            yield numbers[0], image_bytes(pixels)


def _join(batches: Iterator[tuple[int, ImageBytes]], count: int) -> ImageBytes:
    """Join all batches into one tensor without holding them in memory twice."""
    first, images = next(batches)
    joined = images.new_empty(count, *images.shape[1:])
    joined[first : first + len(images)] = images
    for first, images in batches:
        joined[first : first + len(images)] = images
    return joined


def _write_png(path: Path, image: Image) -> None:
    write_atomically(path, lambda partial: image.save(partial, format="png"))


def _write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    with path.open("wb") as file:  # numpy appends .npz to a file name, but not to a file
        np.savez(file, **arrays)
