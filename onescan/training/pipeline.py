"""What makes images, from wherever it was saved: a run, or a pipeline of diffusers."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from onescan.checks import check_choice
from onescan.data import ImageFormat
from onescan.data.latents import LatentFormat, load_vae
from onescan.models.denoiser import Denoiser, SamplerConfig, SamplerName
from onescan.tasks.image_generation import ImageGenerationConfig
from onescan.training.folder import read_manifest
from onescan.training.loading import is_run, load

if TYPE_CHECKING:
    from onescan.integrations.diffusers import DenoiserPipeline

INDEX = "model_index.json"  # of a pipeline that diffusers saved


def load_pipeline(
    path: str | Path, *, sampler: str | None = None, vae: str | None = None
) -> "DenoiserPipeline":
    """Load a pipeline, in evaluation mode on the CPU; nobody's code is run.

    Args:
        path: a run's folder, or best.safetensors in it; or a folder that
            `DenoiserPipeline.save_pretrained` wrote.
        sampler: by which to make images; None is the run's own, or the saved scheduler.
        vae: the folder or the hub name of what decodes latents; None is where it was when they
            were encoded, or the one that was saved.

    Raises:
        ImportError: diffusers is not installed.
        FileNotFoundError: there is no such path, or the run has not saved any weights.
        ValueError: it makes no images, is damaged, or its noise is of another kind than the
            sampler's; or the VAE is not there, or does not fit.
    """
    path = Path(path)
    chosen: Any = sampler
    if sampler is not None:
        check_choice("sampler", sampler, get_args(SamplerName))
    if path.is_dir() and (path / INDEX).is_file():
        return _of_diffusers(path, chosen, vae)
    return _of_run(path, chosen, vae)


def usual_sampler(path: str | Path) -> SamplerConfig:
    """How images of a model are made where nothing else is asked for: of a run, as it says itself.

    Raises:
        ValueError: it is a run that makes no images.
    """
    path = Path(path)
    if not is_run(path):
        return SamplerConfig()
    task = read_manifest(path if path.is_dir() else path.parent).run.task
    if not isinstance(task, ImageGenerationConfig):
        raise ValueError(f"'{path}' is a run of {type(task).__name__}, which makes no images")
    return task.sampler


def _of_run(path: Path, sampler: SamplerName | None, vae: str | None) -> "DenoiserPipeline":
    from onescan.integrations.diffusers import to_diffusers  # slow

    run = load(path)
    task, model, form = run.config.task, run.model, run.format
    if not isinstance(model, Denoiser) or not isinstance(task, ImageGenerationConfig):
        kinds = f"{type(model).__name__}, trained by {type(task).__name__}"
        raise ValueError(f"'{path}' holds {kinds}, expected a Denoiser that makes images")
    if not isinstance(form, ImageFormat | LatentFormat):
        raise ValueError(f"'{path}' was trained on {type(form).__name__}, not on images")
    if vae is not None and isinstance(form, ImageFormat):
        raise ValueError(f"vae is {vae!r}, but '{path}' was trained on pixels, expected None")
    decoder = None
    if isinstance(form, LatentFormat):
        decoder = load_vae(vae or form.vae)
        told = (float(decoder.config.scaling_factor), float(decoder.config.shift_factor or 0))
        if told != (form.scale, form.shift):
            raise ValueError(
                f"vae is {vae or form.vae!r}, which scales and shifts latents by {told}, but "
                f"'{path}' was trained with {(form.scale, form.shift)}"
            )
    own = task.sampler
    return to_diffusers(
        model,
        noise=task.noise,
        sampler=own if sampler is None else dataclasses.replace(own, sampler=sampler),
        format=form,
        class_names=run.class_names if model.config.num_classes else (),
        vae=decoder,
    )


def _of_diffusers(path: Path, sampler: SamplerName | None, vae: str | None) -> "DenoiserPipeline":
    from onescan.integrations.diffusers import load_pretrained  # slow

    pipeline = load_pretrained(path, vae=None if vae is None else load_vae(vae))
    if sampler is not None:
        pipeline.use_sampler(sampler)
    return pipeline
