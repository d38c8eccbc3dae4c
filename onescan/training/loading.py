"""Load trained models: a run, a language model with its tokenizer, or weights to start from."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from onescan import zoo
from onescan.checkpoint.files import damaged, is_number
from onescan.checkpoint.run_folder import CONFIG, has_run_config, locate
from onescan.checkpoint.weights import REMEDY, load_model
from onescan.data import Format
from onescan.data.sources import HUB_NAME
from onescan.layers.mixers import LowerBounds, Mixer
from onescan.layers.mixers.projections import copy_projection, projection_weights
from onescan.messages import named_type
from onescan.tasks import Task
from onescan.training.config import RunConfig
from onescan.training.folder import check_same_data, read_manifest

if TYPE_CHECKING:
    from onescan.data.text import Tokenizer
    from onescan.models.causal_lm import CausalLM
    from onescan.models.masked_lm import MaskedLM

HEAD = "head."  # prefix of the weights that belong to one task
MAX_SHOWN = 3  # weights that do not match


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A trained model, with its config, input format and classes."""

    folder: Path
    config: RunConfig
    model: nn.Module
    """On the CPU, in evaluation mode."""
    format: Format
    """How to convert raw input to the model's input: ``format.model_input(images)`` for grids."""
    class_names: tuple[str, ...]
    metrics: dict[str, float]
    """Metrics of these weights on held-out data; empty if they were not evaluated."""

    def build_task(self, split: str | None = None) -> Task:
        """Open the run's data again and build its task, to evaluate the model.

        Args:
            split: Split to evaluate on instead of the run's own.

        Raises:
            ValueError: If the data cannot be read, or its classes, their order or its format have
                changed since the run began.
        """
        data: Any = self.config.data
        if split is not None and not hasattr(data, "test_split"):
            raise ValueError(f"split is {split!r}, but {type(data).__name__} has no named splits")
        try:
            changed = data if split is None else replace(data, test_split=split)
            task = self.config.build_task(changed)
        except ValueError as error:
            if split is None:
                raise
            raise ValueError(str(error).replace("data.test_split", "split")) from error
        check_same_data(read_manifest(self.folder), task, self.folder)
        return task


def load(path: str | Path) -> Checkpoint:
    """Load a trained model from its run's folder, or from any file in that folder.

    The weights are those of the last checkpoint; for best.safetensors, of the best evaluation.
    "zoo/NAME" loads weights that come with the package, unless there is a local path of that name.
    The model is in float32, even if the weights are stored in float16.

    Nothing is unpickled, and no module outside the package is imported: import the module of a
    custom model first.

    Raises:
        FileNotFoundError: If there is no such path, or the run has not saved any weights yet.
        ValueError: If `path` is not a path, the folder holds no run or was written by an
            unsupported version, or if the weights are damaged (names the file), do not match the
            model or do not fit into memory.
    """
    if not isinstance(path, str | PathLike):
        raise ValueError(f"path is {path!r}, expected the folder of a run")
    path = zoo.resolve(Path(path))
    if not path.exists():
        raise FileNotFoundError(f"there is no run at {path}")
    folder, weights = locate(path)
    if path != folder and not (folder / CONFIG).is_file():
        raise ValueError(f"'{path}' is not a file of a run: its folder has no {CONFIG}")
    manifest = read_manifest(folder)
    with torch.random.fork_rng(devices=[]):  # keep the caller's random state
        model, notes = load_model(weights, manifest.run.model)
    return Checkpoint(
        folder=folder,
        config=manifest.run,
        model=model,
        format=manifest.format,
        class_names=manifest.class_names,
        metrics=_metrics(notes, weights),
    )


def _metrics(notes: dict[str, Any], path: Path) -> dict[str, float]:
    metrics = notes.get("metrics", {})
    if isinstance(metrics, dict) and all(map(is_number, metrics.values())):
        return metrics
    raise damaged(path, metrics, REMEDY)


def is_run(path: Path) -> bool:
    """Return whether a path is a run's folder, or a file in one."""
    try:
        return has_run_config(path if path.is_dir() else path.parent)
    except (OSError, ValueError):
        return False


def run_of(checkpoint: str | Path) -> RunConfig | None:
    """Return the config of the run that trained a model; None if it is not a run."""
    path = zoo.resolve(Path(checkpoint))
    return read_manifest(locate(path)[0]).run if is_run(path) else None


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
    from onescan.data.text import TextFormat, load_tokenizer
    from onescan.models.causal_lm import CausalLM
    from onescan.models.masked_lm import MaskedLM

    if _is_pretrained(name):
        try:
            model = _load_pretrained(name)  # first, because its errors name what the folder holds
        except ImportError:
            load_tokenizer(name)  # explains what is missing
            raise
        tokenizer = load_tokenizer(name)
    else:
        run = load(name)
        if not isinstance(run.model, CausalLM | MaskedLM):
            kind = named_type(run.model)
            raise ValueError(f"{name!r} holds {kind}, expected a CausalLM or MaskedLM")
        if not isinstance(run.format, TextFormat):
            raise ValueError(f"{name!r} was trained on {type(run.format).__name__}, not on text")
        tokenizer, model = run.format.open(run.folder), run.model
    tokenizer.check_vocabulary(model.config.vocab_size)
    return model, tokenizer


def _is_pretrained(name: str) -> bool:
    """Return whether a name is for transformers: a folder with its config, or a hub name."""
    path = zoo.resolve(Path(name))
    if path.exists():
        return path.is_dir() and (path / CONFIG).is_file() and not is_run(path)
    return re.fullmatch(HUB_NAME, name) is not None


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
    if _is_pretrained(name):
        return PretrainedModel(name=name, model=_load_pretrained(name), format=None)
    run = load(name)
    return PretrainedModel(
        name=name, model=run.model, format=run.format, class_names=run.class_names
    )


def init_from(name: str, model: nn.Module, class_names: tuple[str, ...] = ()) -> str:
    """Initialize a model with the weights of another one.

    All weights but those of the head must match. The head keeps its random weights, unless the
    other head is of the same class: then its weights of matching shape are loaded too. For
    classifiers with different numbers of classes, these are all but the output layer.

    Mixers may be of another class, such as LION in place of softmax attention. The projections of
    queries, keys, values and outputs that both mixers have, with the same shape and number of
    heads, are then copied; see `Mixer.projections`. Biases that the source lacks are set to zero.
    All other weights of the new mixer keep their random values.

    Args:
        name: See `load_pretrained_model`.
        model: Model on the CPU.
        class_names: Names of its classes, if known.

    Returns:
        What was copied and what is new, in one line.

    Raises:
        ValueError: If there is no such model, weights are missing or of another shape (names them),
            or it has the same classes in another order.
        FileNotFoundError: If the run has not saved any weights.
        ImportError: If transformers is needed and not installed.
    """
    source = load_pretrained_model(name)
    other = source.model
    if source.class_names != class_names and set(source.class_names) == set(class_names):
        raise ValueError(
            f"init_from is {name!r}, whose classes are in another order than the data: "
            f"{', '.join(source.class_names)} instead of {', '.join(class_names)}"
        )
    there, here = other.state_dict(), model.state_dict()
    theirs, ours = _mixers(other), _mixers(model)
    replaced = [key for key in ours if key in theirs and type(ours[key]) is not type(theirs[key])]
    inside = tuple(f"{key}." for key in replaced)
    bounds = [f"{key}." for each in (other, model) for key in _lower_bounds(each)]
    separate = (HEAD, *inside, *(bounds if replaced else ()))
    loaded, kept = (
        {key: weight for key, weight in weights.items() if not key.startswith(separate)}
        for weights in (there, here)
    )
    _check_match(name, loaded, kept)
    if _head_class(other) is _head_class(model):
        shared = [key for key in here if key.startswith(HEAD) and key in there]
        loaded |= {key: there[key] for key in shared if there[key].shape == here[key].shape}
    model.load_state_dict(loaded, strict=False)
    mixers = Counter(_copy_projections(theirs[key], ours[key]) for key in replaced)
    new = [key for key in here if key not in loaded and not key.startswith(inside)]
    return "; ".join(
        [
            f"copied from {name}: {len(loaded)} tensors",
            *(f"{count} mixers, {described}" for described, count in mixers.items()),
            *([f"new: {', '.join(new)}"] if new else []),
        ]
    )


def _copy_projections(source: Mixer, target: Mixer) -> str:
    """Copy the projections that two mixers have in common; describe what is copied and new."""
    copied: list[str] = []
    rows: Counter[str] = Counter()
    for role, projection in target.projections.items():
        if role not in source.projections:
            continue
        theirs = projection_weights(source, source.projections[role])
        ours = projection_weights(target, projection)
        if not ours.corresponds_to(theirs):
            continue
        copy_projection(theirs, ours)
        has_no_bias = theirs.bias is not None and ours.bias is None
        copied.append(f"{role} (without bias)" if has_no_bias else role)
        rows[projection.layer] += projection.stop - projection.start
    new = []
    for name, tensor in target.state_dict().items():
        left = len(tensor) - rows[name.rpartition(".")[0]] if tensor.ndim else 1
        if left:
            is_part = tensor.ndim and left < len(tensor)
            new.append(f"{left} rows of {name}" if is_part else name)
    return (
        f"{type(target).__name__} in place of {type(source).__name__}: "
        f"copied {', '.join(copied) or 'nothing'}, new {', '.join(new) or 'nothing'}"
    )


def _mixers(model: nn.Module) -> dict[str, Mixer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Mixer)}


def _lower_bounds(model: nn.Module) -> list[str]:
    """Return the names of the lower bounds of decays, which belong to the mixers of all blocks."""
    return [name for name, module in model.named_modules() if isinstance(module, LowerBounds)]


def _head_class(model: nn.Module) -> type | None:
    head = getattr(model, "head", None)
    return type(head) if isinstance(head, nn.Module) else None


def _check_match(name: str, there: Mapping[str, Tensor], here: Mapping[str, Tensor]) -> None:
    def shape(weights: Mapping[str, Tensor], key: str) -> str:
        return str(tuple(weights[key].shape)) if key in weights else "missing"

    wrong = [
        f"{key} is {shape(there, key)} in the file and {shape(here, key)} in the model"
        for key in dict.fromkeys([*here, *there])
        if shape(there, key) != shape(here, key)
    ]
    if wrong:
        more = f", and {len(wrong) - MAX_SHOWN} more" * (len(wrong) > MAX_SHOWN)
        raise ValueError(
            f"init_from is {name!r}, whose weights do not match the model: "
            f"{', '.join(wrong[:MAX_SHOWN])}{more}"
        )
