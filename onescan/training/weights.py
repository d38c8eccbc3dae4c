"""model.safetensors: the weights alone, in a format whose reading runs nobody's code."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from onescan.training.files import write_atomically

WEIGHTS = "model.safetensors"


def save_weights(folder: Path, model: nn.Module) -> None:
    """Write the model's weights to `folder`, in place of older ones.

    Raises:
        OSError: they cannot be written; the older ones are intact.
    """
    tensors = {name: tensor.contiguous() for name, tensor in _distinct(model).items()}

    def write(path: Path) -> None:
        try:
            save_file(tensors, path)
        except SafetensorError as error:
            raise OSError(str(error)) from error

    write_atomically(folder / WEIGHTS, write)


def load_weights(folder: Path, model: nn.Module) -> None:
    """Fill the model with the weights in `folder`.

    Raises:
        FileNotFoundError: there are none.
        ValueError: they are damaged, or of another model; names the first tensor that differs.
    """
    path = folder / WEIGHTS
    if not path.exists():
        raise FileNotFoundError(f"{folder} has no {WEIGHTS}: no checkpoint has been saved there")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    check_tensors(tensors, _distinct(model), path)
    model.load_state_dict(tensors, strict=False)  # not strict: tied weights are stored once


def check_tensors(stored: Mapping[str, Tensor], wanted: Mapping[str, Tensor], path: Path) -> None:
    """Raise ValueError naming the first tensor that is missing, left over, or of another size."""
    for name in [*wanted, *stored]:
        there, here = (_size(tensors, name) for tensors in (stored, wanted))
        if there != here:
            raise ValueError(f"{path} is of another model: {name} is {there} there and {here} here")


def _size(tensors: Mapping[str, Tensor], name: str) -> str:
    return str(tuple(tensors[name].shape)) if name in tensors else "missing"


def _distinct(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors, those that share memory only under their first name."""
    tensors = model.state_dict()
    first = {(tensor.data_ptr(), tensor.shape): name for name, tensor in reversed(tensors.items())}
    return {name: t for name, t in tensors.items() if first[t.data_ptr(), t.shape] == name}
