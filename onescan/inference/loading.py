"""Load trained models: a run, or a language model with its tokenizer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onescan import __version__, configs, zoo
from onescan.checkpoint.files import damaged, numbers
from onescan.checkpoint.hub import download, is_hub_name
from onescan.checkpoint.run_folder import (
    CONFIG,
    has_run_config,
    is_linearized,
    locate,
    read_config,
)
from onescan.checkpoint.weights import REMEDY, load_model, missing
from onescan.configs import ModelConfig
from onescan.inputs import Format
from onescan.inputs.targets import CLASSES, Target
from onescan.messages import named_type

if TYPE_CHECKING:
    from onescan.inputs.tokenizer import Tokenizer
    from onescan.models.causal_lm import CausalLM
    from onescan.models.masked_lm import MaskedLM


TOKENIZER_FILE = re.compile(r"tokenizer|vocab|spiece|.*\.model$")
REPOSITORY_PARTS = 2  # of a name on the hub: user and model


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A trained model, with its input format and classes."""

    folder: Path
    run: Mapping[str, Any]
    """The section ``run`` of config.json as JSON types: the configs of the model, the data, the
    task and the training. `onescan.experiments.training.run_config` reads it as a `RunConfig`."""
    model: nn.Module
    """On the CPU, in evaluation mode."""
    format: Format
    """How to convert raw input to the model's input: ``format.model_input(images)`` for images and
    arrays; ``format.model_input(texts)`` returns the tokens and their padding mask."""
    class_names: tuple[str, ...]
    """Names of the classes, or of the labels or values that the model predicts."""
    target: Target = CLASSES
    """What the outputs of the model mean: ``target.predictions(model(inputs))`` are the
    probabilities of classes or labels, or the values in their original units."""
    metrics: dict[str, float]
    """Metrics of these weights on held-out data; empty if they were not evaluated."""


def load(
    path: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
) -> Checkpoint:
    """Load a trained model from its run's folder, from any file in that folder, or from the hub.

    "user/name" loads a model from the Hugging Face Hub, unless there is a local path of that name.
    Only configs, tokenizers and safetensors files are downloaded, and they are checked like local
    ones.

    The weights are those of the last checkpoint; for best.safetensors, of the best evaluation.
    "zoo/NAME" loads weights that come with the package, unless there is a local path of that name.
    The model is in float32, even if the weights are stored in float16 or bfloat16.

    Nothing is unpickled, and no module outside the package is imported: import the module of a
    custom model first.

    Args:
        path: Folder, file, "zoo/NAME" or name on the hub.
        revision: Branch, tag or commit on the hub; None for local paths.
        token: Access token of the hub; by default the saved one, if any.
        cache_dir: Folder for downloads; by default that of huggingface_hub.

    Raises:
        FileNotFoundError: If there is no such path and it cannot be downloaded, or the run has not
            saved these weights.
        ValueError: If `path` is not a path, the folder holds no run or was written by an
            unsupported version, `revision` is given for a local path, or if the weights are damaged
            (names the file), do not match the model or do not fit into memory.
    """
    options: dict[str, Any] = {"revision": revision, "token": token, "cache_dir": cache_dir}
    folder, weights, data, header = _read(path, **options)
    with torch.random.fork_rng(devices=[]):  # keep the caller's random state
        model, notes = load_model(weights, header.run.model)
    return Checkpoint(
        folder=folder,
        run=data["run"],
        model=model,
        format=header.format.saved_in(folder),
        class_names=header.class_names,
        target=header.target,
        metrics=_metrics(notes, weights),
    )


@dataclass(frozen=True, kw_only=True)
class _Run:
    model: ModelConfig


@dataclass(frozen=True, kw_only=True)
class _Header:
    """The part of config.json that a model needs; `Manifest` is all of it."""

    run: _Run
    format: Format
    class_names: tuple[str, ...]
    target: Target = CLASSES


def _read(
    path: str | Path, *, revision: str | None = None, **hub: Any
) -> tuple[Path, Path, dict[str, Any], _Header]:
    """Return a run's folder, the file of the weights that a path selects, and its config.json.

    Raises:
        FileNotFoundError: If there is no such path.
        ValueError: As `load`, except for the weights.
    """
    if not isinstance(path, str | PathLike):
        raise ValueError(f"path is {path!r}, expected the folder of a run")
    path = zoo.resolve(Path(path))
    if path.exists():
        if revision is not None:
            raise ValueError(f"revision is {revision!r}, but {path} is a local path")
    else:
        if (path.parent / CONFIG).is_file():
            raise missing(path)
        if not _is_repository(path):
            raise FileNotFoundError(f"there is no run at {path}")
        path = download(path.as_posix(), revision=revision, **hub)
    folder, weights = locate(path)
    if path != folder and not (folder / CONFIG).is_file():
        raise ValueError(f"'{path}' is not a file of a run: its folder has no {CONFIG}")
    data = read_config(folder)
    return folder, weights, data, _parse(data, folder / CONFIG)


def _parse(data: dict[str, Any], path: Path) -> _Header:
    """Read the parts of config.json that belong to the model.

    Raises:
        ValueError: If one of them is missing or damaged, or names a class that is not imported.
    """
    parts: dict[str, Any] = {
        field.name: data[field.name] for field in fields(_Header) if field.name in data
    }
    if isinstance(run := data.get("run"), dict):
        parts["run"] = {"model": run["model"]} if "model" in run else {}
    try:
        return configs.from_dict(_Header, parts)
    except ValueError as error:
        versions = f"written by onescan {data['onescan']}, read by {__version__}"
        raise ValueError(f"{path}: {error} ({versions})") from error


def _metrics(notes: dict[str, Any], path: Path) -> dict[str, float]:
    stored = notes.get("metrics", {})
    metrics = numbers(stored)
    if metrics is None:
        raise damaged(path, stored, REMEDY)
    return metrics


def _is_repository(path: Path) -> bool:
    """Return whether a path that does not exist has the form of a name on the hub, USER/NAME."""
    return len(path.parts) == REPOSITORY_PARTS and is_hub_name(path.as_posix())


def is_run(path: Path) -> bool:
    """Return whether a path is a run's folder, or a file in one."""
    try:
        return has_run_config(path if path.is_dir() else path.parent)
    except (OSError, ValueError):
        return False


def load_language_model(name: str) -> "tuple[CausalLM | MaskedLM, Tokenizer]":
    """Load a language model, on the CPU in evaluation mode, and its tokenizer.

    No code from the folder is executed.

    Args:
        name: A run's folder or its best.safetensors; "zoo/NAME" for weights that come with the
            package; or a folder or hub name of a model and a tokenizer saved by transformers'
            `save_pretrained`.

    Raises:
        ValueError: If there is no such model, it is of another class, or has no tokenizer.
        FileNotFoundError: If there is no such path, or the run has not saved any weights.
        ImportError: If transformers is needed and not installed.
    """
    from onescan.inputs.tokenizer import TextFormat, load_tokenizer
    from onescan.models.causal_lm import CausalLM
    from onescan.models.masked_lm import MaskedLM

    path = downloaded(name)
    if is_pretrained(path):
        try:
            model = _load_pretrained(path)  # first, because its errors name what the folder holds
        except ImportError:
            load_tokenizer(path)  # explains what is missing
            raise
        files = zoo.resolve(Path(path)).iterdir()
        if not any(TOKENIZER_FILE.match(file.name) for file in files):
            raise ValueError(
                f"{name!r} has no tokenizer: its folder must contain the files of the model's "
                "tokenizer, such as tokenizer.json and tokenizer_config.json"
            )
        tokenizer = load_tokenizer(path)
    else:
        run = load(path)
        if not isinstance(run.model, CausalLM | MaskedLM):
            kind = named_type(run.model)
            raise ValueError(f"{name!r} holds {kind}, expected a CausalLM or MaskedLM")
        if not isinstance(run.format, TextFormat):
            raise ValueError(f"{name!r} was trained on {type(run.format).__name__}, not on text")
        tokenizer, model = run.format.open(run.folder), run.model
    tokenizer.check_vocabulary(model.config.vocab_size)
    return model, tokenizer


def load_language_config(name: str) -> "tuple[ModelConfig, Tokenizer]":
    """Load the config of a language model and its tokenizer; a run's weights are not read.

    Args:
        name: As in `load_language_model`.

    Raises:
        ValueError: If there is no such model, or it has no tokenizer.
        FileNotFoundError: If there is no such path.
        ImportError: If transformers is needed and not installed.
    """
    from onescan.inputs.tokenizer import TextFormat

    path = downloaded(name)
    if is_pretrained(path):
        model, tokenizer = load_language_model(path)
        return model.config, tokenizer
    folder, _, _, header = _read(path)
    if not isinstance(header.format, TextFormat):
        raise ValueError(f"{name!r} was trained on {type(header.format).__name__}, not on text")
    return header.run.model, header.format.open(folder)


def downloaded(name: str) -> str:
    """Return the name of a local path, or the folder of a model that is downloaded from the hub."""
    path = zoo.resolve(Path(name))
    if path.exists() or not is_hub_name(name):
        return name
    return str(download(name))


def is_pretrained(name: str) -> bool:
    """Return whether a name is that of a local folder in transformers' format.

    False for linearized models, because they are not native models.
    """
    path = zoo.resolve(Path(name))
    has_config = path.is_dir() and (path / CONFIG).is_file()
    return has_config and not is_run(path) and not is_linearized(path)


def _load_pretrained(name: str) -> "CausalLM | MaskedLM":
    from onescan.integrations.transformers import load_pretrained  # slow

    return load_pretrained(name)


@dataclass(frozen=True, kw_only=True)
class PretrainedModel:
    """A trained model to start from."""

    name: str
    """Path or name, as given by the user."""
    model: nn.Module
    """On the CPU, in evaluation mode."""
    format: Format | None
    """Input format of a run; None for a model of transformers."""
    class_names: tuple[str, ...] = ()
    """Class names of a run; empty for a model of transformers."""


def load_pretrained_model(name: str) -> PretrainedModel:
    """Load a model to start from. Nothing is unpickled, and no code from its folder is executed.

    Args:
        name: A run's folder or its best.safetensors; "zoo/NAME" for weights that come with the
            package; or a folder or hub name of a language model that onescan wrote with
            transformers' `save_pretrained`.

    Raises:
        ValueError: If there is no such model, or it is damaged.
        FileNotFoundError: If the run has not saved any weights.
        ImportError: If transformers is needed and not installed.
    """
    path = downloaded(name)
    if is_pretrained(path):
        return PretrainedModel(name=name, model=_load_pretrained(path), format=None)
    run = load(path)
    return PretrainedModel(
        name=name, model=run.model, format=run.format, class_names=run.class_names
    )
