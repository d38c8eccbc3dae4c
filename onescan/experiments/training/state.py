"""Save and restore the full training state of a run.

Each checkpoint is a folder. torch.distributed.checkpoint writes the tensors, one safetensors file
per process, which any number of processes can read. A JSON manifest, written last, contains the
remaining values and the SHA-256 of each file.
"""

import math
import re
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from onescan.checkpoint.files import (
    begin,
    check_digests,
    check_regular,
    damaged,
    digests,
    finish,
    from_json,
    is_own_file,
    remove,
    remove_from,
    to_json,
    writing,
)
from onescan.checkpoint.weights import TensorSize, check_sizes, distinct, sizes_of
from onescan.experiments.data import DataState
from onescan.experiments.training.distributed import Ranks, lost_process
from onescan.experiments.training.optim import EMA

STATE, MANIFEST = "state", "manifest.json"
MODEL, AVERAGE, OPTIMIZER = "model.", "mean.", "optimizer."  # prefixes of tensor names
MOMENTS = f"{OPTIMIZER}state."
STEP = re.compile(r"step_(0|[1-9]\d{0,17})")
SHARD = re.compile(r"[\w-]+\.safetensors")
INDENT = 2
REMEDY = "remove the state folder to train from scratch; model.safetensors may still be intact"


@dataclass(kw_only=True)
class TrainingState:
    """Everything that a training step changes."""

    model: nn.Module
    optimizer: Optimizer
    ema: EMA | None = None
    reports_ema: bool = True
    """Whether the EMA, if any, is evaluated and saved in place of the raw weights."""
    scaler: GradScaler | None = None
    step: int = 0
    """Optimizer steps so far."""
    data_state: DataState | None = None
    """Position of the next batch in the data, for data without random access."""
    best: float = -math.inf
    """Score of the best evaluation."""
    evaluations_without_improvement: int = 0
    """Evaluations since the best one."""
    evaluated_step: int = 0
    """Step of the last evaluation."""

    def add_score(self, score: float) -> bool:
        """Record the score of an evaluation, and return whether it is the best so far."""
        score = -math.inf if math.isnan(score) else score
        is_best = score > self.best or self.best == -math.inf
        self.best = score if is_best else self.best
        self.evaluations_without_improvement += 1
        if is_best:
            self.evaluations_without_improvement = 0
        self.evaluated_step = self.step
        return is_best

    def eval_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights to report, raw or EMA."""
        return self.ema.swapped_into(self.model) if self.ema and self.reports_ema else nullcontext()

    @property
    def additional_ema(self) -> EMA | None:
        """The EMA, if it is evaluated and saved in addition to the raw weights."""
        return None if self.reports_ema else self.ema

    def numbers(self) -> dict[str, Any]:
        """Return all values other than tensors, ready for JSON."""
        scale = self.scaler.state_dict() if self.scaler else None
        return {
            "step": self.step,
            "best": None if self.best == -math.inf else self.best,  # JSON has no infinity
            "evaluations_without_improvement": self.evaluations_without_improvement,
            "evaluated_step": self.evaluated_step,
            "data_state": self.data_state,
            "loss_scale": scale and [scale["scale"], scale["_growth_tracker"]],
        }

    def restore_numbers(self, numbers: dict[str, Any]) -> None:
        """Restore the values that `numbers` returned.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: If a value is missing or invalid.
        """
        self.step = int(numbers["step"])
        self.evaluations_without_improvement = int(numbers["evaluations_without_improvement"])
        self.evaluated_step = int(numbers["evaluated_step"])
        self.best = -math.inf if numbers["best"] is None else float(numbers["best"])
        self.data_state = numbers["data_state"] and dict(numbers["data_state"])
        if self.scaler and numbers["loss_scale"]:
            scale, growth = numbers["loss_scale"]
            restored = {"scale": float(scale), "_growth_tracker": int(growth)}
            self.scaler.load_state_dict(self.scaler.state_dict() | restored)


def last_state(folder: Path) -> Path | None:
    """Return the newest complete state, ``folder/state/step_N``, or ``None``.

    Raises:
        ValueError: If the state folder or the newest step in it is a symbolic link.
    """
    check_regular(folder / STATE, folder=True)
    complete = [path for path in (folder / STATE).glob("step_*") if STEP.fullmatch(path.name)]
    last = max(complete, key=lambda path: int(path.name[5:]), default=None)
    if last:
        check_regular(last, folder=True)
    return last


def save_state(folder: Path, state: TrainingState, ranks: Ranks) -> None:
    """Write the state, then remove older ones.

    Raises:
        OSError: If it cannot be written. The previous state is intact.
        ValueError: If the state folder is a symbolic link.
    """
    path = folder / STATE / f"step_{state.step}"
    ranks.first(lambda: check_regular(path.parent, folder=True))
    with writing(path.parent):
        if not ranks.first(path.exists):
            partial = ranks.first(lambda: begin(path))
            try:
                _write(partial, _tensors(state, moments=bool(state.optimizer.state)))
                ranks.first(lambda: _write_manifest(partial, state))
            except OSError:
                ranks.first(lambda: remove(partial))
                raise
            ranks.first(lambda: finish(path))
        ranks.first(lambda: remove_from(path.parent, STEP, but=path))


def restore_state(path: Path, state: TrainingState, ranks: Ranks) -> None:
    """Load the state saved in the folder `path` into `state`.

    The number of processes may differ from that of the run that wrote it.

    Raises:
        ValueError: If a file is damaged (names it), or the tensors do not match the model.
        OSError: If a file cannot be read.
    """
    manifest = ranks.first(lambda: _read_manifest(path))
    sizes = _read_sizes(path)
    moments = {name for name in sizes if name.startswith(MOMENTS)}
    tensors = _tensors(state, moments=bool(moments))
    expected = {n: x for n, x in tensors.items() if n in moments or not n.startswith(MOMENTS)}
    check_sizes(sizes, sizes_of(expected), path)
    _read(path, expected)  # in place
    for name, parameter in state.model.named_parameters():
        if not any(moment.startswith(f"{MOMENTS}{name}.") for moment in moments):
            state.optimizer.state.pop(parameter, None)  # it had no gradient, so no state was saved
    try:
        state.restore_numbers(manifest)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise damaged(path / MANIFEST, error, REMEDY) from error


def _tensors(state: TrainingState, *, moments: bool) -> dict[str, Tensor]:
    """Return all tensors by name: model.NAME, mean.NAME, optimizer.state.NAME.MOMENT.

    They share memory with the model and the optimizer. With `moments`, the state of a new optimizer
    is initialized with zeros.
    """
    from torch.distributed.checkpoint.state_dict import (  # slow: half a second
        StateDictOptions,
        get_state_dict,
    )

    model, optimizer = state.model.state_dict(), dict[str, Any]()
    if moments:
        flat_moments = StateDictOptions(flatten_optimizer_state_dict=True)
        model, optimizer = get_state_dict(state.model, state.optimizer, options=flat_moments)
    distinct_names = distinct(state.model)
    flat = {MODEL + name: tensor for name, tensor in model.items() if name in distinct_names}
    flat |= {OPTIMIZER + name: x for name, x in optimizer.items() if isinstance(x, Tensor)}
    if state.ema:
        flat |= {AVERAGE + name: tensor for name, tensor in state.ema.tensors.items()}
    return flat


def _write_manifest(path: Path, state: TrainingState) -> None:
    text = to_json({**state.numbers(), "files": digests(path)}, indent=INDENT)
    (path / MANIFEST).write_bytes(text.encode())


def _read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest, and verify the names and checksums of the files."""
    file = path / MANIFEST
    try:
        if not is_own_file(file):
            raise damaged(path, ValueError(f"it has no {MANIFEST}"), REMEDY)
        manifest = dict(from_json(file.read_bytes(), file, REMEDY, indent=INDENT))
        files = manifest.get("files")
        if not isinstance(files, dict) or not all(SHARD.fullmatch(name) for name in files):
            raise damaged(file, files, REMEDY)
        if manifest.get("step") != int(path.name[5:]):
            raise damaged(file, ValueError(f"it holds step {manifest.get('step')}"), REMEDY)
        check_digests(path, files, REMEDY, but=MANIFEST)
    except OSError as error:
        raise OSError(f"cannot read {path}: {error.strerror or error}") from error
    return manifest


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        with _in_one_process():
            writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
            save(contiguous, storage_writer=writer)
    except CheckpointException as error:  # not a subclass of Exception
        disk = _disk_error(error)
        raise OSError((disk and disk.strerror) or "the disk may be full") from error


def _read_sizes(path: Path) -> dict[str, TensorSize]:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    with _reading(path):
        sizes = {}
        metadata = HuggingFaceStorageReader(str(path)).read_metadata()
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
                raise ValueError(f"parts of {name} are missing")
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            sizes[name] = TensorSize(tuple(entry.size), dtype)
        return sizes


def _read(path: Path, tensors: dict[str, Tensor]) -> None:
    """Read tensors from disk, in place."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with _reading(path), _in_one_process():
        load(tensors, storage_reader=HuggingFaceStorageReader(str(path)))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (CheckpointException, Exception) as error:  # a hostile file can raise any error
        if lost_process(error):
            raise
        disk = _disk_error(error)
        if disk and not isinstance(disk, FileNotFoundError):
            raise OSError(f"cannot read {path}: {disk.strerror or disk}") from error
        raise damaged(path, ValueError(f"{type(error).__name__}: {error}"), REMEDY) from error


@contextmanager
def _in_one_process() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _disk_error(error: BaseException | None) -> OSError | None:
    """Return the OSError that torch has wrapped in its own exceptions, if any."""
    failures = getattr(error, "failures", None)  # of each process
    if failures:
        error = next(iter(failures.values()))[0]
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
