"""Save native models to folders and to the Hugging Face Hub, and load them by class."""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onescan import __version__, configs
from onescan.checkpoint.files import write_atomically
from onescan.checkpoint.hub import is_hub_name, upload
from onescan.checkpoint.run_folder import write_config
from onescan.checkpoint.weights import WEIGHTS, save_weights, whole_weights
from onescan.configs import ModelConfig
from onescan.inference.loading import load
from onescan.inputs.format import Format, UnknownFormat
from onescan.inputs.images import GridFormat
from onescan.inputs.latents import LatentFormat
from onescan.inputs.sequences import SequenceFormat
from onescan.inputs.targets import CLASSES, Target
from onescan.inputs.tokenizer import TextFormat
from onescan.integrations.card import write_model_card
from onescan.messages import named_type, plural


def load_as(kind: type[nn.Module], name: str | Path, **options: Any) -> nn.Module:
    """Load a model of a class; see `onescan.models.pretrained.Pretrained.from_pretrained`."""
    model = load(name, **options).model
    if not isinstance(model, kind):
        raise ValueError(f"{str(name)!r} holds {named_type(model)}, expected {kind.__name__}")
    return model


def save_model(
    model: Any,
    folder: str | Path,
    *,
    format: Any = None,
    class_names: Any = (),
    target: Any = CLASSES,
) -> None:
    """Save a model; see `onescan.models.pretrained.Pretrained.save_pretrained`."""
    path = Path(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"folder {str(folder)!r} exists and is not empty, expected a new folder")
    for name, value, kind in (("format", format, Format), ("target", target, Target)):
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name} is {named_type(value)}, expected a {kind.__name__}")
    if isinstance(class_names, str) or not isinstance(class_names, Iterable):
        raise ValueError(f"class_names is {class_names!r}, expected a sequence of strings")
    class_names = tuple(class_names)
    if not all(isinstance(name, str) for name in class_names):
        raise ValueError(f"class_names is {class_names!r}, expected a sequence of strings")
    config: ModelConfig = model.config
    format = UnknownFormat() if format is None else format
    _check_outputs(model, class_names=class_names, target=target)
    _check_format(model, format)
    if any(parameter.dtype == torch.float64 for parameter in model.parameters()):
        raise ValueError(
            "the weights are float64, expected float32, float16 or bfloat16; model.float() "
            "converts them"
        )
    data = {
        "onescan": __version__,
        "run": {"model": {"type": type(config).__name__} | configs.to_dict(config)},
        "format": {"type": type(format).__name__} | configs.to_dict(format),
        "class_names": list(class_names),
        "target": configs.to_dict(target),
    }

    def write(partial: Path) -> None:
        partial.mkdir()
        save_weights(partial / WEIGHTS, whole_weights(model), {})
        format.save(partial)
        write_config(partial, data)
        write_model_card(
            partial,
            config,
            title=type(model).__name__,
            usage="import onescan\n\n"
            f'model = onescan.{type(model).__name__}.from_pretrained("path/to/folder")',
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            metadata={"library_name": "onescan"},
        )

    if path.exists():
        path.rmdir()
    write_atomically(path, write)


def _check_outputs(model: Any, *, class_names: Any, target: Target) -> None:
    """Raise ValueError if class names or a target do not match a model's number of outputs."""
    names = [name for name in ("num_classes", "out_channels") if hasattr(model.config, name)]
    for setting, noun, count in (
        ("class_names", "name", len(class_names)),
        ("target.mean", "number", len(target.mean)),
    ):
        for name in names:
            outputs = getattr(model.config, name)
            if count and outputs and count != outputs:
                raise ValueError(
                    f"{setting} has {plural(count, noun)}, but the model's {name} is {outputs}"
                )


def _check_format(model: Any, format: Format) -> None:
    """Raise ValueError if a model cannot read inputs of a format."""
    if isinstance(format, GridFormat | LatentFormat):
        name, noun = "channels", "channel"
    elif isinstance(format, SequenceFormat | TextFormat):
        name, noun = "vocab_size", "token"
    else:
        return
    config = model.config
    given, expected = getattr(format, name), getattr(config, name, None)
    if expected is None:
        if hasattr(config, "channels") or hasattr(config, "vocab_size"):  # not a user's own model
            raise ValueError(
                f"format is {named_type(format)}, which {named_type(model)} cannot read"
            )
        return
    if given > expected or (name == "channels" and given < expected):
        raise ValueError(f"format has {plural(given, noun)}, but the model has {expected}")
    if isinstance(format, GridFormat) and hasattr(config, "image_size"):
        axes = len(config.image_size)
        if format.axes != axes:
            raise ValueError(f"format has {plural(format.axes, 'axis')}, but the model has {axes}")


def push_model(
    model: Any,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload model",
    **details: Any,
) -> str:
    """Upload a model; see `onescan.models.pretrained.Pretrained.push_to_hub`."""
    if not is_hub_name(repo_id):  # before anything is written
        raise ValueError(f"repo_id is {repo_id!r}, expected a name such as 'user/model'")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        save_model(model, folder, **details)
        return upload(
            folder,
            repo_id,
            private=private,
            token=token,
            revision=revision,
            commit_message=commit_message,
        )
