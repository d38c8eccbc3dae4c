"""Trained image classifiers, of runs or of transformers, for distillation and evaluation."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import interpolate

from onescan import zoo
from onescan.checkpoint.run_folder import CONFIG, has_run_config, locate, read_config
from onescan.checkpoint.weights import load_model
from onescan.checks import HUB_NAME, LOAD_ERRORS, in_a_line
from onescan.configs import ModelConfig, from_dict
from onescan.inputs import Format, ImageFormat
from onescan.inputs.images import processor_constants
from onescan.inputs.targets import CLASSES, Target
from onescan.messages import missing_package, named_type
from onescan.models.denoiser import Denoiser
from onescan.shapes import Images, Logits

EXPECTED = "expected a run's folder, its weights, or a classifier of transformers"


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A trained classifier, with its input format and class names."""

    name: str
    """Path or Hub name, as given by the user."""
    model: nn.Module
    """Maps standardized images to logits; in evaluation mode, without gradients."""
    format: ImageFormat
    class_names: tuple[str, ...]
    field: str = "task.teacher"
    """Config field that contains `name`, for error messages."""
    is_run: bool = True
    """Whether it comes from a run, so that its class names must equal the data's."""

    @torch.no_grad()
    def scores(self, pixels: Images) -> Logits:
        """Compute logits of images with pixels from 0 to 1, resized to the training size."""
        size = (self.format.height, self.format.width)
        if pixels.shape[-2:] != size:
            pixels = interpolate(pixels, size, mode="bilinear", antialias=True)
        scores: Logits = self.model(self.format.standardize(pixels))
        return scores.float()

    def check(self, format: ImageFormat, class_names: tuple[str, ...]) -> None:
        """Check that the teacher reads the student's images and has the same classes.

        Models of transformers may name all classes differently from the data. If any name is
        equal, all have to be, in the same order.

        Raises:
            ValueError: If the channels, the number of classes, or their names differ.
        """
        data_classes, teacher_classes = len(class_names), len(self.class_names)
        if teacher_classes != data_classes:
            raise self._mismatch(f"has {teacher_classes} classes, but the data has {data_classes}")
        same_names = self.is_run or not {*self.class_names}.isdisjoint(class_names)
        for i, (teacher_name, data_name) in enumerate(
            zip(self.class_names, class_names, strict=True)
        ):
            if same_names and teacher_name != data_name:
                raise self._mismatch(
                    f"calls class {i} {teacher_name!r}, but the data calls it {data_name!r}"
                )
        if self.format.channels != format.channels:
            channels = f"{self.format.channels} channels, but the data has {format.channels}"
            raise self._mismatch(f"reads images of {channels}")

    def _mismatch(self, problem: str) -> ValueError:
        return ValueError(f"{self.field} {self.name!r} {problem}")


@dataclass(frozen=True, kw_only=True)
class _Record:
    """The entries of a run's config.json that using its model requires."""

    format: Format
    class_names: tuple[str, ...]
    target: Target = CLASSES
    model: ModelConfig


def load_teacher(name: str, field: str = "task.teacher") -> Teacher:
    """Load a teacher on the CPU, without changing torch's random state.

    Nothing is unpickled, and no code that comes with the weights is run.

    Args:
        name: The folder of a run or any file in it: best.safetensors selects the weights of the
            best evaluation, all others those of the last checkpoint. Or "zoo/NAME", or a folder or
            Hugging Face Hub name of a transformers image classifier.
        field: Config field that contains `name`, for error messages.

    Raises:
        FileNotFoundError: If there is no such path, and it cannot be a Hub name.
        ValueError: If the folder holds something else, or the weights are damaged.
        ImportError: If transformers is required and not installed.
    """
    path = zoo.resolve(Path(name).expanduser())
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
    folder, weights = locate(path)
    try:
        of_run = has_run_config(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"{field} is {name!r}, without a valid {CONFIG}: {EXPECTED}") from error
    if of_run:
        return _of_run(name, field, weights)
    if path != folder:
        raise ValueError(f"{field} is {name!r}, a file that does not belong to a run: {EXPECTED}")
    return _of_transformers(name, field, str(folder))


def _of_run(name: str, field: str, weights: Path) -> Teacher:
    if not weights.exists():
        raise FileNotFoundError(f"{field} is {name!r}: no checkpoint has been saved there")
    try:
        config = read_config(weights.parent)
        entries = {key: config[key] for key in ("format", "class_names", "target") if key in config}
        record = from_dict(_Record, entries | {"model": config["run"]["model"]})
        if (kind := record.target.kind) != "class":
            raise ValueError(f"it predicts targets of kind {kind}, expected classes")
        if not isinstance(record.format, ImageFormat):
            raise ValueError(f"its format is {named_type(record.format)}, expected an ImageFormat")
        model, _ = load_model(weights, record.model)
        if isinstance(model, Denoiser):
            raise ValueError(f"its model is {named_type(model)}, expected an image classifier")
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{field} is {name!r}, which cannot be read: {error}") from error
    return Teacher(
        name=name, field=field, model=model, format=record.format, class_names=record.class_names
    )


def _of_transformers(name: str, field: str, path: str) -> Teacher:
    try:
        from transformers import (  # type: ignore[import-not-found, unused-ignore]
            AutoImageProcessor,
            AutoModelForImageClassification,
        )

        import onescan.integrations.transformers  # noqa: F401  # registers our classifiers
    except ImportError as error:
        purpose = f"{field} is {name!r}, which is not a run; loading it as a classifier"
        raise missing_package(purpose, "transformers", "text", error) from error
    try:
        model = AutoModelForImageClassification.from_pretrained(
            path, use_safetensors=True, dtype=torch.float32, trust_remote_code=False
        )
        # The image processor of timm's models has other fields and needs torchvision.
        source = getattr(model.config, "pretrained_cfg", None)
        if source is None:
            source = AutoImageProcessor.from_pretrained(path, trust_remote_code=False)
    except LOAD_ERRORS as error:
        raise ValueError(
            f"{field} is {name!r}, which is neither a run nor an image classifier that "
            f"transformers can load: {in_a_line(error)}"
        ) from error
    names: dict[int, str] = model.config.id2label
    return Teacher(
        name=name,
        field=field,
        model=_Scores(model),
        format=_format(f"{field} {name!r}", source),
        class_names=tuple(names[i] for i in range(len(names))),
        is_run=False,
    )


def _format(teacher: str, source: Any) -> ImageFormat:
    """Read the input format from an image processor, or from the pretrained_cfg of a timm model."""
    if isinstance(source, Mapping):
        if missing := {"input_size", "mean", "std"} - source.keys():
            names = ", ".join(sorted(missing))
            raise ValueError(f"{teacher} has a pretrained_cfg without {names}, which timm requires")
        _, height, width = source["input_size"]
        mean, std = source["mean"], source["std"]
    else:
        if not source.do_normalize:
            raise ValueError(f"{teacher} does not standardize its images")
        size = getattr(source, "crop_size", None) or source.size
        height, width = (
            size.get(side) or size.get("shortest_edge") for side in ("height", "width")
        )
        mean, std = processor_constants(source, channels=len(source.image_mean))
    return ImageFormat(
        channels=len(mean), height=height, width=width, mean=tuple(mean), std=tuple(std)
    )


class _Scores(nn.Module):
    """A model of transformers that returns only its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Images) -> Logits:
        scores: Logits = self.model(pixel_values=images).logits
        return scores
