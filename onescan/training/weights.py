"""model.safetensors: the weights alone, in a format whose reading runs nobody's code."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from onescan.training.files import parse_json, write_atomically

WEIGHTS, BEST = "model.safetensors", "best.safetensors"
NOTES = "onescan"  # one entry of the header: several would come in no fixed order


def whole_weights(model: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """Copy the weights to the CPU; all processes call it where they are split, and one keeps it."""
    whole = {}
    for name, tensor in _distinct(model).items():
        gather = getattr(tensor, "full_tensor", None)  # DTensor's, whose import is slow
        tensor = gather() if gather else tensor
        if keep:
            whole[name] = tensor.detach().to("cpu", copy=True)
    return whole


def save_weights(path: Path, weights: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
    """Write weights to a file, in place of older ones, with notes in its header.

    Raises:
        OSError: they cannot be written; the older ones are intact.
    """

    def write(partial: Path) -> None:
        partial.touch()
        mode = partial.stat().st_mode  # as the user has files made, which safetensors does not ask
        try:
            contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
            save_file(contiguous, partial, metadata={NOTES: json.dumps(notes)})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        partial.chmod(mode)

    write_atomically(path, write)


def read_notes(path: Path) -> dict[str, Any]:
    """Read what `save_weights` noted in the header of a file of whole weights.

    Raises:
        ValueError: the notes are damaged.
    """
    with safe_open(path, framework="pt") as file:
        notes = (file.metadata() or {}).get(NOTES, "{}")
    return dict(parse_json(notes.encode(), path, "bring it back from a copy"))


def load_weights(path: Path, model: nn.Module) -> None:
    """Fill the model with the weights in a file.

    Raises:
        FileNotFoundError: there are none.
        ValueError: they are damaged, or of another model; names the first tensor that differs.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path.parent} has no {path.name}: no checkpoint has been saved there"
        )
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    check_sizes(tensors, _distinct(model), path)
    model.load_state_dict(tensors, strict=False)  # not strict: tied weights are stored once


def check_sizes(stored: Mapping[str, Tensor], wanted: Mapping[str, Tensor], path: Path) -> None:
    """Raise ValueError naming the first tensor that is missing, left over, or of another size."""
    for name in [*wanted, *stored]:
        there, here = (_size(tensors, name) for tensors in (stored, wanted))
        if there != here:
            raise ValueError(f"{path} is of another model: {name} is {there} there and {here} here")


def _size(tensors: Mapping[str, Tensor], name: str) -> str:
    return str(tuple(tensors[name].shape)) if name in tensors else "missing"


def _distinct(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors, those that are one under two names only under the first."""
    tensors = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: tensor for name, tensor in tensors.items() if first[id(tensor)] == name}
