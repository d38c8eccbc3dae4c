"""The whole state of a run after a step, from which it goes on as if it had never stopped.

One folder per step, written by torch.distributed.checkpoint, so that runs on many processes
can write and read the same layout.
"""

import json
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onescan.data import Bookmark
from onescan.training.ema import WeightMean
from onescan.training.files import begin, finish, remove, writing
from onescan.training.precision import LossScale
from onescan.training.ranks import Ranks
from onescan.training.weights import check_sizes

STATE = "state"
MODEL, MEAN, OPTIMIZER = "model.", "mean.", "optimizer."  # what the names of tensors begin with
STEP, SCALE, BOOKMARK, BEST = "step", "scale", "bookmark", "best"


@dataclass(kw_only=True)
class TrainingState:
    """Everything that training changes."""

    model: nn.Module
    optimizer: Optimizer
    mean: WeightMean | None = None
    scale: LossScale | None = None
    step: int = 0
    """Updates made so far."""
    bookmark: Bookmark | None = None
    """Where the next batch begins, for data whose places cannot be looked up."""
    best: float = -math.inf
    """The best evaluation's score."""
    stale: int = 0
    """Evaluations since then."""
    judged: int = 0
    """The step of the last evaluation."""

    def judge(self, score: float) -> bool:
        """Take note of an evaluation, and tell whether it is the best so far."""
        score = -math.inf if math.isnan(score) else score
        is_best = score > self.best or self.best == -math.inf
        self.best, self.stale = (score, 0) if is_best else (self.best, self.stale + 1)
        self.judged = self.step
        return is_best

    def judged_weights(self) -> AbstractContextManager[None]:
        """Where the model has the weights that are judged and used: the running mean, if any."""
        return self.mean.worn_by(self.model) if self.mean else nullcontext()


def last_state(folder: Path) -> Path | None:
    """Find the newest whole state of the run in `folder`: state/step_N."""
    whole = [path for path in (folder / STATE).glob("step_*") if path.name[5:].isdigit()]
    return max(whole, key=lambda path: int(path.name[5:]), default=None)


def save_state(folder: Path, state: TrainingState, ranks: Ranks) -> None:
    """Write the state; the one before goes once this one is whole.

    Raises:
        OSError: it cannot be written; the one before is intact.
    """
    place = folder / STATE / f"step_{state.step}"
    with writing(place.parent):
        if not ranks.first(place.exists):
            partial = ranks.first(lambda: begin(place))
            try:
                _write(partial, _flat(state))
            except OSError:
                ranks.first(lambda: remove(partial))
                raise
            ranks.first(lambda: finish(place))
        ranks.first(lambda: _remove_others(place))


def restore_state(place: Path, state: TrainingState) -> None:
    """Bring a new state to where the one at `place` was.

    It may have been written by another number of processes.

    Raises:
        ValueError: it is damaged, or of another model, or its metadata names what could run code.
        OSError: it cannot be read.
    """
    stored = _read(place, state)
    state.model.load_state_dict(_below(stored, MODEL))
    _restore_optimizer(state, _below(stored, OPTIMIZER))
    if state.mean:
        state.mean.tensors = _below(stored, MEAN)
    if state.scale and SCALE in stored:
        state.scale.restore(stored[SCALE])
    if BOOKMARK in stored:
        state.bookmark = json.loads(bytes(stored[BOOKMARK].tolist()))
    best, stale, judged = stored[BEST].tolist()
    state.best, state.stale, state.judged = best, int(stale), int(judged)
    state.step = int(stored[STEP])


def _remove_others(place: Path) -> None:
    for other in list(place.parent.iterdir()):
        if other != place:
            remove(other)


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
    """The state as tensors by name: model.NAME, mean.NAME, optimizer.NAME:MOMENT, step ..."""
    names = _names(state.model)
    flat = {MODEL + name: tensor for name, tensor in state.model.state_dict().items()}
    for parameter, moments in state.optimizer.state.items():
        flat |= {f"{OPTIMIZER}{names[parameter]}:{kind}": t for kind, t in moments.items()}
    if state.mean:
        flat |= {MEAN + name: tensor for name, tensor in state.mean.tensors.items()}
    if state.scale:
        flat[SCALE] = state.scale.state()
    if state.bookmark is not None:
        written = json.dumps(state.bookmark).encode()
        flat[BOOKMARK] = torch.tensor(list(written), dtype=torch.uint8)
    best = torch.tensor([state.best, state.stale, state.judged], dtype=torch.float64)
    return flat | {BEST: best, STEP: torch.tensor(state.step)}


def _room(model: Mapping[str, Tensor], name: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """An empty tensor to read one of the state's into, split over processes as the model is."""
    bare = name.removeprefix(MODEL).removeprefix(MEAN).removeprefix(OPTIMIZER).partition(":")[0]
    like = model.get(bare)
    if like is not None and like.shape == size:
        return torch.empty_like(like, dtype=dtype)
    return torch.empty(size, dtype=dtype)


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}


def _write(place: Path, tensors: dict[str, Tensor]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException  # on use: half a second
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        with _in_one_process():
            save(tensors, checkpoint_id=place)
    except CheckpointException as error:  # no Exception: it would pass every other handler
        disk = _disk_error(error)
        raise OSError((disk and disk.strerror) or "the disk may be full") from error


def _read(place: Path, state: TrainingState) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    from onescan.training.reader import StateReader, UnknownNameError

    reader = StateReader(place)
    try:
        stored = {
            name: entry
            for name, entry in reader.read_metadata().state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        model = state.model.state_dict()
        tensors = {
            name: _room(model, name, entry.size, entry.properties.dtype)
            for name, entry in stored.items()
        }
        with _in_one_process():
            load(tensors, storage_reader=reader)
    except UnknownNameError as error:
        raise ValueError(f"{place}: {error}: do not trust this folder") from error
    except torch.OutOfMemoryError:
        raise
    except (CheckpointException, Exception) as error:  # a damaged pickle may end in any error
        disk = _disk_error(error)
        if disk and not isinstance(disk, FileNotFoundError):
            raise OSError(f"cannot read {place}: {disk.strerror or disk}") from error
        raise _damaged(place, f"{type(error).__name__}: {error}") from error
    check_sizes(_below(tensors, MODEL), model, place)
    if state.mean:
        check_sizes(_below(tensors, MEAN), state.mean.tensors, place)
    if not {STEP, BEST} <= tensors.keys():
        raise _damaged(place, "it has no step")
    return tensors


def _damaged(place: Path, reason: str) -> ValueError:
    first = reason.partition("\n")[0]
    return ValueError(
        f"{place} is damaged: remove it to train from the beginning; the weights beside it may "
        f"still be whole ({first})"
    )


@contextmanager
def _in_one_process() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _disk_error(error: BaseException | None) -> OSError | None:
    """The disk's own error, which torch wraps in others of its own."""
    failures = getattr(error, "failures", None)  # of each process
    if failures:
        error = next(iter(failures.values()))[0]
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
