"""The whole state of a run after a step, from which it goes on as if it had never stopped.

One folder per step, written by torch.distributed.checkpoint, so that runs on many processes
can write and read the same layout.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onescan.training.files import remove, write_atomically
from onescan.training.weights import check_tensors

STATE = "state"


@dataclass(kw_only=True)
class TrainingState:
    """Everything that training changes."""

    model: nn.Module
    optimizer: Optimizer
    step: int = 0
    """Updates made so far."""


def last_state(folder: Path) -> Path | None:
    """Find the newest whole state of the run in `folder`: state/step_N."""
    whole = [path for path in (folder / STATE).glob("step_*") if path.name[5:].isdigit()]
    return max(whole, key=lambda path: int(path.name[5:]), default=None)


def save_state(folder: Path, state: TrainingState) -> None:
    """Write the state; the one before goes once this one is whole.

    Raises:
        OSError: it cannot be written; the one before is intact.
    """
    place = folder / STATE / f"step_{state.step}"
    if not place.exists():
        write_atomically(place, lambda partial: _write(partial, _flat(state)))
    for other in list((folder / STATE).iterdir()):
        if other != place:
            remove(other)


def restore_state(folder: Path, state: TrainingState) -> None:
    """Bring a new state to where the last whole one in `folder` was, if there is one.

    Raises:
        ValueError: it is damaged, or of another model, or its metadata names what could run code.
    """
    place = last_state(folder)
    if place is None:
        return
    step, stored = _read(place)
    weights = _below(stored, "model.")
    check_tensors(weights, state.model.state_dict(), place)
    state.model.load_state_dict(weights)
    _restore_optimizer(state, _below(stored, "optimizer."))
    state.step = step


def _restore_optimizer(state: TrainingState, stored: dict[str, Tensor]) -> None:
    moments: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in stored.items():
        name, _, kind = key.rpartition(":")
        moments[name][kind] = tensor
    names = _names(state.model)
    order = [names[p] for group in state.optimizer.param_groups for p in group["params"]]
    known = {place: moments[name] for place, name in enumerate(order) if name in moments}
    groups = state.optimizer.state_dict()["param_groups"]
    state.optimizer.load_state_dict({"state": known, "param_groups": groups})


def _flat(state: TrainingState) -> dict[str, Tensor]:
    """The state as tensors by name: model.NAME, optimizer.NAME:MOMENT, step."""
    names = _names(state.model)
    flat = {f"model.{name}": tensor for name, tensor in state.model.state_dict().items()}
    for parameter, moments in state.optimizer.state.items():
        flat |= {f"optimizer.{names[parameter]}:{kind}": t for kind, t in moments.items()}
    return flat | {"step": torch.tensor(state.step)}


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}


def _write(place: Path, tensors: dict[str, Tensor]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException  # on use: half a second
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        with _in_one_process():
            save(tensors, checkpoint_id=place)
    except CheckpointException as error:  # no Exception: it would pass every other handler
        raise OSError(_cause(error.failures[0][0])) from error


def _read(place: Path) -> tuple[int, dict[str, Tensor]]:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    from onescan.training.reader import StateReader, UnknownNameError

    reader = StateReader(place)
    try:
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        with _in_one_process():
            load(tensors, storage_reader=reader)
        return int(tensors.pop("step")), tensors
    except UnknownNameError as error:
        raise ValueError(f"{place}: {error}: do not trust this folder") from error
    except (CheckpointException, Exception) as error:  # a damaged pickle may end in any error
        raise ValueError(f"{place} is damaged: remove it to train from the beginning") from error


@contextmanager
def _in_one_process() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _cause(error: BaseException | None) -> str:
    """The disk's own words, which torch wraps in an error about its file format."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error.strerror if error and error.strerror else "the disk may be full"
