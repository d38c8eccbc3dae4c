"""A trained classifier to learn from, or to be judged by: a run's, or one of transformers'."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import interpolate

from onescan.checkpoint.config import CONFIG, read_config
from onescan.checkpoint.weights import BEST, WEIGHTS, load_model
from onescan.configs import ModelConfig, from_dict
from onescan.data import ImageFormat
from onescan.data.image_source import HUB_NAME
from onescan.shapes import Images, Logits

EXPECTED = "expected a run's folder, its weights, or a classifier of transformers"


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A trained classifier, and what it was trained on."""

    name: str
    """As the user spells it."""
    model: nn.Module
    """In evaluation mode and without gradients: standardized images in, scores out."""
    format: ImageFormat
    class_names: tuple[str, ...]
    field: str = "task.teacher"
    """Where the user named it."""
    is_run: bool = True
    """Whether it was trained on a data set as the student is, with its names of the classes."""

    @torch.no_grad()
    def scores(self, pixels: Images) -> Logits:
        """Score images, pixels from 0 to 1, which are stretched to the size it was trained on."""
        size = (self.format.height, self.format.width)
        if pixels.shape[-2:] != size:
            pixels = interpolate(pixels, size, mode="bilinear", antialias=True)
        scores: Logits = self.model(self.format.standardize(pixels))
        return scores.float()

    def check(self, format: ImageFormat, class_names: tuple[str, ...]) -> None:
        """Make sure that it reads a student's images and tells the same classes apart.

        Others than runs may spell all names in their own way; one that is shared stands in for
        a common spelling, and then the order has to be the same.

        Raises:
            ValueError: the channels, the number of classes, or their names differ.
        """
        ours, theirs = len(class_names), len(self.class_names)
        if theirs != ours:
            raise self._misfit(f"tells {theirs} classes apart, the data has {ours}")
        one_spelling = self.is_run or not {*self.class_names}.isdisjoint(class_names)
        for i, (its, own) in enumerate(zip(self.class_names, class_names, strict=True)):
            if one_spelling and its != own:
                raise self._misfit(f"calls class {i} {its!r}, the data calls it {own!r}")
        if self.format.channels != format.channels:
            channels = f"{self.format.channels} channels, the data has {format.channels}"
            raise self._misfit(f"reads images of {channels}")

    def _misfit(self, what: str) -> ValueError:
        return ValueError(f"{self.field} {self.name!r} {what}")


@dataclass(frozen=True, kw_only=True)
class _Record:
    """What a run's config.json says of its model."""

    model: ModelConfig
    format: ImageFormat
    class_names: tuple[str, ...]


def load_teacher(name: str, field: str = "task.teacher") -> Teacher:
    """Load a teacher on the CPU, without changing torch's random state.

    Nothing is unpickled, and no code that comes with the weights is run.

    Args:
        name: The folder of a run or any file in it: best.safetensors selects the weights of the
            best evaluation, all others those of the last checkpoint. Or a folder or Hugging Face
            Hub name of a transformers image classifier.
        field: Config field that contains `name`, for error messages.

    Raises:
        FileNotFoundError: If there is no such path, and it cannot be a Hub name.
        ValueError: If the folder holds something else, or the weights are damaged.
        ImportError: If transformers is required and not installed.
    """
    path = Path(name).expanduser()
    with torch.random.fork_rng(devices=[]):
        if path.exists():
            teacher = _on_disk(name, field, path)
        elif re.fullmatch(HUB_NAME, name):
            teacher = _of_transformers(name, field, name)
        else:
            raise FileNotFoundError(f"{field} is {name!r}: there is no such file or folder")
    teacher.model.eval().requires_grad_(False)
    return teacher


def _on_disk(name: str, field: str, path: Path) -> Teacher:
    folder = path if path.is_dir() else path.parent
    try:
        config: dict[str, Any] = dict(json.loads((folder / CONFIG).read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{field} is {name!r}, without a {CONFIG}: {EXPECTED}") from error
    if "onescan" in config:
        return _of_run(name, field, path if path.name == BEST else folder / WEIGHTS)
    if path != folder:
        raise ValueError(f"{field} is {name!r}, a file of no run: {EXPECTED}")
    return _of_transformers(name, field, str(folder))


def _of_run(name: str, field: str, weights: Path) -> Teacher:
    if not weights.exists():
        raise FileNotFoundError(f"{field} is {name!r}: no checkpoint has been saved there")
    try:
        config = read_config(weights.parent)
        known = {key: config[key] for key in ("format", "class_names")}
        record = from_dict(_Record, known | {"model": config["run"]["model"]})
        model, _ = load_model(weights, record.model)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{field} is {name!r}, which cannot be read: {error}") from error
    return Teacher(
        name=name, field=field, model=model, format=record.format, class_names=record.class_names
    )


def _of_transformers(name: str, field: str, place: str) -> Teacher:
    try:
        from transformers import (  # type: ignore[import-not-found, unused-ignore]
            AutoImageProcessor,
            AutoModelForImageClassification,
        )

        import onescan.integrations.transformers  # noqa: F401  # registers our classifiers
    except ImportError as error:
        raise ImportError(
            f"{field} is {name!r}, no run but perhaps a classifier of transformers, which is "
            "missing: pip install 'onescan[text]'"
        ) from error
    model = AutoModelForImageClassification.from_pretrained(
        place, use_safetensors=True, dtype=torch.float32, trust_remote_code=False
    )
    processor = AutoImageProcessor.from_pretrained(place, trust_remote_code=False)
    names: dict[int, str] = model.config.id2label
    return Teacher(
        name=name,
        field=field,
        model=_Scores(model),
        format=_format(f"{field} {name!r}", processor),
        class_names=tuple(names[i] for i in range(len(names))),
        is_run=False,
    )


def _format(teacher: str, processor: Any) -> ImageFormat:
    if not processor.do_normalize:
        raise ValueError(f"{teacher} reads images that are not standardized")
    size = getattr(processor, "crop_size", None) or processor.size
    height, width = (size.get(side) or size.get("shortest_edge") for side in ("height", "width"))
    return ImageFormat(
        channels=len(processor.image_mean),
        height=height,
        width=width,
        mean=tuple(processor.image_mean),
        std=tuple(processor.image_std),
    )


class _Scores(nn.Module):
    """Of what a model of transformers returns, the scores alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Images) -> Logits:
        scores: Logits = self.model(pixel_values=images).logits
        return scores
