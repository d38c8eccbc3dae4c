"""Convert a model of another library, and write it as a folder that the commands read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from onescan import __version__, configs
from onescan.checkpoint.files import write_atomically
from onescan.checkpoint.run_folder import write_config
from onescan.checkpoint.weights import WEIGHTS, save_weights, whole_weights
from onescan.data import ImageDatasetConfig, ImageFormat
from onescan.integrations.weights import convert_model, read
from onescan.integrations.weights.source import find
from onescan.models.denoiser import Denoiser
from onescan.models.image_classifier import ImageClassifier
from onescan.tasks.image_classification import ImageClassificationConfig
from onescan.training.config import RunConfig
from onescan.training.folder import Manifest

PREPROCESSOR = "preprocessor_config.json"  # of transformers' image models
TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
NO_DATA = "unknown"  # path of the data that a converted model was trained on


def convert(
    source: str | Path | nn.Module,
    out: str | Path | None = None,
    *,
    num_heads: int | None = None,
) -> nn.Module:
    """Convert a model of another library, with its weights, to a native model.

    See the guide "Convert weights of other libraries" for the supported models. Only safetensors
    files are read, nothing is unpickled, and no code of the source is executed.

    Args:
        source: A folder with config.json and safetensors files, a safetensors file, a name on the
            Hugging Face Hub, or a model in memory.
        out: Folder to write, or ``None``. It contains an image classifier as a run for `load`, a
            language model with its tokenizer for transformers' ``from_pretrained``, or a denoiser
            as a pipeline of diffusers.
        num_heads: Number of attention heads, for tensors without a config; by default that of the
            published model of the same width.

    Returns:
        The model on the CPU, in evaluation mode and in the source's dtype. `out` is in float32 for
        image classifiers.

    Raises:
        FileNotFoundError: If there is no such file or folder.
        ValueError: If the architecture or a setting is not supported, a tensor is missing, unused
            or of another shape (names it), `out` exists and is not empty, or `source` cannot be
            read.
        ImportError: If transformers or diffusers is required to write `out` and not installed.
    """
    if out is not None and Path(out).exists() and not _is_empty(Path(out)):
        raise ValueError(f"out is {str(out)!r}, which exists, expected a new folder")
    place = source if isinstance(source, nn.Module) else find(source)
    foreign = read(place, num_heads=num_heads)
    model = convert_model(foreign)
    if out is not None:
        out, folder = Path(out), None
        if not isinstance(place, nn.Module):
            folder = place if place.is_dir() else place.parent
        if out.exists():
            out.rmdir()
        write_atomically(out, lambda path: _write(path, out.name, model, foreign.fields, folder))
    return model


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _write(
    out: Path, name: str, model: nn.Module, fields: Mapping[str, Any], folder: Path | None
) -> None:
    if isinstance(model, ImageClassifier):
        _write_run(out, name, model, fields, folder)
    elif isinstance(model, Denoiser):
        from onescan.integrations.diffusers import to_diffusers

        to_diffusers(model).save_pretrained(out)
    else:
        from onescan.integrations.transformers import to_transformers

        ids = {name: fields[name] for name in TOKEN_IDS if fields.get(name) is not None}
        to_transformers(model, **ids).save_pretrained(out)
        if folder is not None and any((folder / file).is_file() for file in TOKENIZERS):
            from onescan.data.text import load_tokenizer

            load_tokenizer(str(folder)).save(out)


def _write_run(
    out: Path, name: str, model: ImageClassifier, fields: Mapping[str, Any], folder: Path | None
) -> None:
    height, width = model.config.image_size
    pixels = _pixels(fields, folder, height)
    names = fields.get("id2label") or fields.get("label_names") or range(model.config.num_classes)
    if isinstance(names, Mapping):
        names = [label for _, label in sorted(names.items(), key=lambda item: int(item[0]))]
    class_names = tuple(map(str, names))
    form = ImageFormat(channels=model.config.channels, height=height, width=width, **pixels)
    data = ImageDatasetConfig(
        path=NO_DATA,
        class_names=class_names,
        image_size=(height, width),
        channels=1 if form.channels == 1 else 3,
        mean=form.mean,
        std=form.std,
        test_crop=form.crop,
    )
    task = ImageClassificationConfig()
    manifest = Manifest(
        onescan=__version__,
        run=RunConfig(name=name, model=model.config, data=data, task=task),
        format=form,
        class_names=class_names,
        examples=0,
        environments=(),
    )
    out.mkdir()
    weights = {name: tensor.float() for name, tensor in whole_weights(model).items()}
    save_weights(out / WEIGHTS, weights, {})
    write_config(out, configs.to_dict(manifest))


def _pixels(fields: Mapping[str, Any], folder: Path | None, height: int) -> dict[str, Any]:
    """Return the mean, the standard deviation and the crop of images; ImageNet's by default."""
    found: dict[str, Any] = {"mean": ImageDatasetConfig.mean, "std": ImageDatasetConfig.std}
    if (timm := fields.get("pretrained_cfg")) is not None:
        return {
            "mean": tuple(timm.get("mean", found["mean"])),
            "std": tuple(timm.get("std", found["std"])),
            "crop": timm.get("crop_pct"),
        }
    if folder is None or not (folder / PREPROCESSOR).is_file():
        return found
    settings = json.loads((folder / PREPROCESSOR).read_bytes())
    found["mean"] = tuple(settings.get("image_mean", found["mean"]))
    found["std"] = tuple(settings.get("image_std", found["std"]))
    size = settings.get("size")
    if settings.get("do_center_crop") and size is not None:
        side = min(size.values()) if isinstance(size, Mapping) else size
        found["crop"] = min(1.0, height / side)
    return found
