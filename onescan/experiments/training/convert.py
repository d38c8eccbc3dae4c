"""Convert models from and to other libraries, and save the results."""

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

from PIL import Image
from torch import nn

from onescan import __version__, configs, zoo
from onescan.checkpoint.files import write_atomically
from onescan.checkpoint.run_folder import NATIVE, is_linearized, linearized_error, write_config
from onescan.checkpoint.weights import WEIGHTS, save_weights, whole_weights
from onescan.checks import check_choice, check_positive, in_a_line
from onescan.experiments.data import ImageDatasetConfig
from onescan.experiments.tasks.image_classification import ImageClassificationConfig
from onescan.experiments.training.config import RunConfig
from onescan.experiments.training.folder import Manifest
from onescan.experiments.training.sampling import INDEX, load_pipeline
from onescan.inference.loading import downloaded, is_run, load, load_language_model
from onescan.inputs import ImageFormat
from onescan.inputs.images import processor_constants
from onescan.inputs.pairs import PairFormat
from onescan.inputs.tokenizer import TextFormat, Tokenizer, load_tokenizer
from onescan.integrations.weights import convert_back, convert_model, read
from onescan.integrations.weights.source import CONFIG, find, read_json
from onescan.messages import named_type
from onescan.models.denoiser import Denoiser
from onescan.models.image_classifier import ImageClassifier, ImageClassifierConfig

log = logging.getLogger("onescan")

PREPROCESSOR = "preprocessor_config.json"  # of transformers' image models
TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model")
Library = Literal["onescan", "transformers", "diffusers"]
Write = Callable[..., object]  # writes a folder, given its temporary path and its name
NO_DATA = "unknown"  # path of the data that a converted model was trained on


def convert(
    source: str | Path | nn.Module,
    out: str | Path | None = None,
    *,
    to: Library = "onescan",
    num_heads: int | None = None,
) -> nn.Module:
    """Convert a model of another library with its weights to a native model, or back.

    See the guide "Convert weights from other libraries" for the supported models. Only safetensors
    files are read, nothing is unpickled, and no code of the source is executed.

    Args:
        source: A folder with config.json and safetensors files, a safetensors file, a name on the
            Hugging Face Hub, or a model in memory. If `to` is another library: a native model, or a
            name that `onescan.load`, ``onescan generate`` or ``onescan sample`` accepts.
        out: Folder to write, or ``None``. It contains an image classifier as a run for `load`, a
            language model with its tokenizer for transformers' ``from_pretrained``, or a denoiser
            as a pipeline of diffusers. If `to` is another library, the folder is for the
            ``from_pretrained`` of that library and includes the tokenizer or image processor.
        to: "onescan"; or "transformers" or "diffusers", to convert a native model. If the library
            has the same architecture (ViT, DeiT, GPT-2, BERT or DiT), the result is of its own
            class; otherwise of a class of `onescan.integrations`, such as `OnescanForCausalLM` or
            `DenoiserModel`.
        num_heads: Number of attention heads, for tensors without a config. Default: that of the
            published model of the same width.

    Returns:
        The model on the CPU, in evaluation mode and in the source's dtype. `out` is in float32 for
        image classifiers.

    Raises:
        FileNotFoundError: If there is no such file or folder.
        ValueError: If the architecture or a setting is not supported, a tensor is missing, unused
            or of another shape (names it), `out` exists and is not empty, or `source` cannot be
            read; if `to` is another library, also if there is no class for the model.
        ImportError: If transformers or diffusers is required and not installed.
    """
    check_choice("to", to, get_args(Library))
    if not isinstance(source, str | Path | nn.Module):
        raise ValueError(
            f"source is {named_type(source)}, expected a name or a model, such as "
            "onescan.load(...).model"
        )
    if out is not None and Path(out).exists() and not _is_empty(Path(out)):
        raise ValueError(f"out is {str(out)!r}, which is not empty, expected a new folder")
    if to != "onescan" and num_heads is not None:
        raise ValueError(f"num_heads is {num_heads} with to={to!r}, expected None")
    model, write = _import(source, num_heads) if to == "onescan" else _export(source, to)
    if out is not None:
        out = Path(out)
        if out.exists():
            out.rmdir()
        write_atomically(out, partial(write, name=out.name))
    return model


def _import(source: str | Path | nn.Module, num_heads: int | None) -> tuple[nn.Module, Write]:
    model_or_path = source if isinstance(source, nn.Module) else find(source)
    if not isinstance(model_or_path, nn.Module) and is_run(model_or_path):
        raise ValueError(
            f"source is {str(source)!r}, which is a run; to='transformers' or to='diffusers' "
            "converts it to another library"
        )
    if not isinstance(model_or_path, nn.Module) and is_linearized(model_or_path):
        raise linearized_error(model_or_path)
    foreign = read(model_or_path, num_heads=num_heads)
    if is_native(foreign.fields):
        raise ValueError(
            f"source is {str(source)!r}, which is a model of onescan; in Python, to_onescan() of "
            "the loaded model returns the native model, and to='transformers' or to='diffusers' "
            "converts it to another library"
        )
    model, folder = convert_model(foreign), None
    config: Any = model.config
    heads = config.mixer.num_heads
    if num_heads not in (None, heads):
        raise ValueError(f"num_heads is {num_heads}, but the source has {heads} heads")
    if not isinstance(model_or_path, nn.Module):
        folder = model_or_path if model_or_path.is_dir() else model_or_path.parent
    return model, partial(_write, model=model, fields=foreign.fields, folder=folder)


def is_native(fields: Mapping[str, Any]) -> bool:
    """Return whether the config of a folder of transformers or diffusers is a native model's."""
    return str(fields.get("model_type")).startswith(NATIVE) or (
        fields.get("_class_name") == "DenoiserModel"
    )


def _export(source: str | Path | nn.Module, library: str) -> tuple[nn.Module, Write]:
    native = _load(source)
    fields, processor = native.fields, None
    if native.tokenizer is not None:
        from onescan.integrations.transformers.convert import special_ids

        processor = native.tokenizer.to_transformers()
        fields = fields | special_ids(processor)
    try:
        model = convert_back(native.model, library, **fields)
    except ValueError:  # the library has no such architecture
        return _wrapped(native, library)
    if native.image_format is not None:
        processor = image_processor(native.image_format)

    def write(out: Path, name: str) -> None:
        _save(model, out)
        if processor is not None:
            processor.save_pretrained(out)

    return model, write


def _wrapped(native: "_Native", library: str) -> tuple[nn.Module, Write]:
    """Return a model of onescan's classes for the library, which contains the native model."""
    if library == "diffusers":
        from onescan.integrations.diffusers import to_diffusers

        pipeline = to_diffusers(native.model) if native.pipeline is None else native.pipeline()
        return pipeline.transformer, lambda out, name: pipeline.save_pretrained(out)
    from onescan.integrations.transformers import to_transformers

    model = to_transformers(
        native.model,
        image_format=native.image_format,
        tokenizer=native.tokenizer,
        **native.fields,
    )
    if native.max_length is not None:
        model.processor.model_max_length = native.max_length
    return model, lambda out, name: _save(model, out)


def _save(model: Any, out: Path) -> None:
    """Save a model of transformers or diffusers, without transformers' progress bar."""
    if "transformers" not in sys.modules:  # which diffusers does not need
        model.save_pretrained(out)
        return
    from transformers.utils import logging

    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(out)
    finally:
        if had_bars:
            logging.enable_progress_bar()


@dataclass(frozen=True, kw_only=True)
class _Native:
    """A native model, and what a folder of another library contains beside it."""

    model: nn.Module
    fields: dict[str, Any] = field(default_factory=dict)
    """Names of classes, as fields of transformers' configs."""
    tokenizer: Tokenizer | None = None
    max_length: int | None = None
    """Tokens of the longest text, if the model was trained to truncate texts."""
    image_format: ImageFormat | None = None
    pipeline: Callable[[], Any] | None = None
    """Loads the pipeline of a denoiser."""


def _load(source: str | Path | nn.Module) -> _Native:
    if isinstance(source, nn.Module):
        return _Native(model=source)
    name = downloaded(str(source))
    path = zoo.resolve(Path(name))
    if (path / INDEX).is_file():
        pipeline = load_pipeline(path)
        return _Native(model=pipeline.transformer.to_onescan(), pipeline=lambda: pipeline)
    run = load(path) if is_run(path) else None
    if run is None or isinstance(run.format, TextFormat):
        model, tokenizer = load_language_model(name)
        return _Native(model=model, tokenizer=tokenizer)
    if (kind := run.target.kind) not in ("class", "class_map"):
        raise ValueError(
            f"'{source}' predicts targets of kind {kind}, expected classes: other libraries would "
            "not convert its outputs to values or probabilities"
        )
    if isinstance(run.model, Denoiser):
        return _Native(model=run.model, pipeline=partial(load_pipeline, path))
    names = dict(enumerate(run.class_names))
    fields = {"id2label": names, "label2id": {name: i for i, name in names.items()}}
    native = _Native(model=run.model, fields=fields if names else {})
    if isinstance(run.format, PairFormat):
        encoder = run.format.open(run.folder)
        return replace(native, tokenizer=encoder.tokenizer, max_length=encoder.length)
    if isinstance(run.format, ImageFormat):
        return replace(native, image_format=run.format)
    return native


def image_processor(format: ImageFormat) -> Any:
    """Return an image processor of transformers that prepares color images according to a format.

    Raises:
        ValueError: If images are grayscale, or cropped and not square.
    """
    from transformers import CLIPImageProcessor, ViTImageProcessor  # slow

    if format.channels != 3:  # noqa: PLR2004
        raise ValueError(
            f"the images have {format.channels} channel, expected 3: transformers' image "
            "processors read color images"
        )
    size = {"height": format.height, "width": format.width}
    options: dict[str, Any] = {
        "resample": Image.Resampling.BICUBIC,
        "image_mean": list(format.mean),
        "image_std": list(format.std),
    }
    if format.crop is None:
        return ViTImageProcessor(size=size, **options)
    if format.height != format.width:
        raise ValueError(
            f"the images have crop {format.crop} and size {tuple(size.values())}, expected crop "
            "None or a square"
        )
    shorter = round(format.height / format.crop)
    return CLIPImageProcessor(size={"shortest_edge": shorter}, crop_size=size, **options)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _write(
    out: Path, *, name: str, model: nn.Module, fields: Mapping[str, Any], folder: Path | None
) -> None:
    if isinstance(model, ImageClassifier):
        _write_run(out, name, model, fields, folder)
    elif isinstance(model, Denoiser):
        from onescan.integrations.diffusers import to_diffusers

        to_diffusers(model).save_pretrained(out)
    else:
        from onescan.integrations.transformers.convert import TOKEN_IDS, to_transformers

        ids = {name: fields[name] for name in TOKEN_IDS if fields.get(name) is not None}
        _save(to_transformers(model, **ids), out)
        if folder is not None and any((folder / file).is_file() for file in TOKENIZERS):
            load_tokenizer(str(folder)).save(out)


def _write_run(
    out: Path, name: str, model: ImageClassifier, fields: Mapping[str, Any], folder: Path | None
) -> None:
    format = _image_format(model.config, fields, folder)
    names = fields.get("id2label") or fields.get("label_names") or range(model.config.num_classes)
    if isinstance(names, Mapping):
        names = [label for _, label in sorted(names.items(), key=lambda item: int(item[0]))]
    class_names = tuple(map(str, names))
    data = ImageDatasetConfig(
        path=NO_DATA,
        class_names=class_names,
        image_size=(format.height, format.width),
        channels=1 if format.channels == 1 else 3,
        mean=format.mean,
        std=format.std,
        test_crop=format.crop,
    )
    task = ImageClassificationConfig()
    manifest = Manifest(
        onescan=__version__,
        run=RunConfig(name=name, model=model.config, data=data, task=task),
        format=format,
        class_names=class_names,
        examples=0,
        environments=(),
    )
    out.mkdir()
    weights = {name: tensor.float() for name, tensor in whole_weights(model).items()}
    save_weights(out / WEIGHTS, weights, {})
    write_config(out, configs.to_dict(manifest))


def _image_format(
    config: ImageClassifierConfig, fields: Mapping[str, Any], folder: Path | None
) -> ImageFormat:
    """Return the format of the source's images, with ImageNet's mean and std by default.

    Raises:
        ValueError: If the source's settings are invalid; names the file.
    """
    timm = fields.get("pretrained_cfg")
    path = (folder or Path()) / (PREPROCESSOR if timm is None else CONFIG)
    settings = read_json(path) if timm is None and folder is not None and path.is_file() else {}
    height, width = config.image_size
    try:
        pixels = _processor_pixels(settings, config) if timm is None else _timm_pixels(timm)
        return ImageFormat(channels=config.channels, height=height, width=width, **pixels)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has invalid settings for images: {in_a_line(error)}") from error


def _timm_pixels(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Read the mean, the standard deviation and the crop of images from a pretrained_cfg."""
    _note_interpolation(settings.get("interpolation", "bicubic"))
    return {
        "mean": tuple(settings.get("mean", ImageDatasetConfig.mean)),
        "std": tuple(settings.get("std", ImageDatasetConfig.std)),
        "crop": settings.get("crop_pct"),
    }


def _processor_pixels(settings: Mapping[str, Any], config: ImageClassifierConfig) -> dict[str, Any]:
    """Read the same from the settings of an image processor of transformers."""
    if settings.get("do_normalize", True) and not {"image_mean", "image_std"} <= settings.keys():
        if config.channels != len(ImageDatasetConfig.mean):
            raise ValueError(
                f"the source has {config.channels} channel, but no image_mean and image_std with "
                "one number per channel"
            )
        log.warning(
            "note: the source does not state the mean and standard deviation of its images, so "
            "those of ImageNet are used; to set others, add a %s to its folder",
            PREPROCESSOR,
        )
    _note_interpolation(
        Image.Resampling(settings.get("resample", Image.Resampling.BICUBIC)).name.lower()
    )
    constants = {"image_mean": ImageDatasetConfig.mean, "image_std": ImageDatasetConfig.std}
    processor = SimpleNamespace(**{**constants, **settings})
    mean, std = processor_constants(processor, config.channels)
    pixels: dict[str, Any] = {"mean": mean, "std": std}
    size = settings.get("size")
    if settings.get("do_center_crop") and size is not None:
        side = min(size.values()) if isinstance(size, Mapping) else size
        check_positive(size=side)
        pixels["crop"] = min(1.0, config.image_size[0] / side)
    return pixels


def _note_interpolation(name: str) -> None:
    if name != "bicubic":
        log.warning(
            "note: the source resizes images with %s interpolation, but onescan uses bicubic "
            "interpolation, so predictions for images of other sizes differ slightly",
            name,
        )
