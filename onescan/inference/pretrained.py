"""Save native models to folders and to the Hugging Face Hub, and load them by class."""

import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from onescan import __version__, configs
from onescan.checkpoint.files import write_atomically
from onescan.checkpoint.hub import is_hub_name, upload
from onescan.checkpoint.run_folder import write_config
from onescan.checkpoint.weights import WEIGHTS, save_weights, whole_weights
from onescan.configs import ModelConfig
from onescan.inference.loading import load
from onescan.inputs.format import Format, UnknownFormat
from onescan.inputs.targets import CLASSES, Target
from onescan.integrations.card import write_model_card
from onescan.messages import named_type


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
        raise ValueError(f"folder {str(folder)!r} exists and is not empty")
    for name, value, kind in (("format", format, Format), ("target", target, Target)):
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name} is {named_type(value)}, expected a {kind.__name__}")
    if isinstance(class_names, str) or not all(isinstance(name, str) for name in class_names):
        raise ValueError(f"class_names is {class_names!r}, expected a sequence of strings")
    config: ModelConfig = model.config
    format = UnknownFormat() if format is None else format
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
