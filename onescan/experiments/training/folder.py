"""The folder of a run: its files, and checks before it is written to.

config.json         the run's config, input format and classes, and the environments it ran in
tokenizer/          the tokenizer, for text
metrics.jsonl       one line per step and evaluation
state/step_N/       the training state after N steps, to resume from
model.safetensors   the weights of the last checkpoint
best.safetensors    the weights of the best evaluation so far
ema.safetensors     the EMA of the last checkpoint, in runs that report the raw weights
tensorboard/, ...   files of metric trackers
pictures/step_N.png pictures of evaluations, for tasks that make them
evaluation.safetensors, result.json   the final evaluation of a finished run; result.json is last
lock                held by the process that writes
"""

import dataclasses
import json
import operator
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onescan import __version__, configs
from onescan.checkpoint.files import (
    PARTIAL,
    check_regular,
    damaged,
    finite,
    from_json,
    numbers,
    partial_of,
    remove,
    remove_from,
    to_json,
    write_text_atomically,
    writing,
)
from onescan.checkpoint.run_folder import (
    CONFIG,
    TOKENIZER,
    holds_only_model,
    read_config,
    write_config,
)
from onescan.checkpoint.weights import AVERAGE, BEST, WEIGHTS, read_weights, save_weights
from onescan.experiments.locks import LOCK
from onescan.experiments.tasks import Evaluation, Task
from onescan.experiments.training.config import AUTO, Precision, RunConfig, RunResult
from onescan.experiments.training.logging import (
    EVENTS,
    METRICS,
    PICTURES,
    TENSORBOARD,
    TRACKER_ID,
    WANDB,
)
from onescan.experiments.training.state import STATE, STEP, last_state
from onescan.inputs import Format, GridFormat
from onescan.inputs.targets import CLASSES, Target
from onescan.ops.backend import default_kernels

EVALUATION, RESULT = "evaluation.safetensors", "result.json"
FINISHED = (RESULT, EVALUATION, WEIGHTS, METRICS, CONFIG)  # the state may have been removed
# in order of removal: config.json, which marks the folder as a run's, is last
CONTENTS = (
    *(RESULT, EVALUATION, STATE, WEIGHTS, BEST, AVERAGE, METRICS, PICTURES, TENSORBOARD, WANDB),
    *(TRACKER_ID, TOKENIZER, CONFIG),
)
# names of the files that runs write in subfolders; others are never removed
RUN_FILES = {
    STATE: STEP,
    PICTURES: re.compile(r"step_\d+\.png"),
    TENSORBOARD: EVENTS,
    WANDB: re.compile(r"(offline-)?run-.*|latest-run|debug.*\.log|settings|wandb-resume\.json"),
    TOKENIZER: re.compile(r".*\.(json|txt|model|jinja|tiktoken)"),
}
MACHINE = "machine."  # a resumed run may have other settings below this
CONTINUED = ("training.", "data.")  # settings of a run that starts from the weights of another
MAX_SHOWN = 3  # differences
ROUNDING = 1e-5  # of constants that standardize, as a fraction of the standard deviation
RECREATE = "remove it and start the run again to recreate it"


class OtherRunError(ValueError):
    """The folder holds a run that differs in `fields`, which are dotted names."""

    def __init__(self, message: str, fields: tuple[str, ...]) -> None:
        super().__init__(message)
        self.fields = fields


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The software and hardware of a run from some step on, for the record."""

    since_step: int
    onescan: str
    python: str
    torch: str
    platform: str
    device: str
    processes: int
    commit: str | None  # of the working directory; with "-dirty" if it had changes
    backend: str = "auto"
    kernels: tuple[str, ...] = ()  # ops that backend "auto" runs as kernels on the device
    matmul_precision: str = "highest"
    sequence_parallel: int = 1  # processes per sequence


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of config.json."""

    onescan: str
    run: RunConfig
    format: Format
    class_names: tuple[str, ...]
    target: Target = CLASSES
    examples: int
    """Number of training examples."""
    notes: tuple[str, ...] = ()
    """Notes of the data; see `Splits`."""
    precision: Precision | None = None
    """Precision of matrix products, which the run keeps on every device. None in older versions,
    where it is that of the config."""
    environments: tuple[Environment, ...]
    """The first one, and another for each change when the run was resumed."""

    @property
    def used_precision(self) -> Precision:
        """Precision of matrix products."""
        requested = self.run.training.precision
        return self.precision or ("float32" if requested == AUTO else requested)


def check_run_dir(folder: Path, run: RunConfig, *, overwrite: bool) -> bool:
    """Return whether the folder holds a run to replace, or raise if `run` may not use it.

    A run without a checkpoint may always be replaced.

    Raises:
        ValueError: If the folder holds other files, another run (states how they differ), or a
            symbolic link under a name that a run writes to.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, expected a folder for the run")
    for name in (*CONTENTS, LOCK):
        check_regular(folder / name, folder=name in RUN_FILES)
    for path in (folder / TOKENIZER).glob("*"):  # these are not written atomically
        check_regular(path)
    if not folder.exists() or all(p.suffix == PARTIAL or p.name == LOCK for p in folder.iterdir()):
        return False
    existing = _manifest_in(folder)
    if overwrite or not _has_checkpoint(folder):
        return True
    _check_same_run(folder, existing, run)
    return False


def prepare_run_dir(folder: Path, run: RunConfig, *, overwrite: bool) -> None:
    """Remove a run that is replaced, and unfinished files of a killed one.

    Raises:
        ValueError: See `check_run_dir`.
    """
    is_replaced = check_run_dir(folder, run, overwrite=overwrite)
    with writing(folder):
        for name in CONTENTS:
            if name not in RUN_FILES:
                remove(partial_of(folder / name))
            if is_replaced and name in RUN_FILES:
                remove_from(folder / name, RUN_FILES[name])
            elif is_replaced:
                remove(folder / name)


def write_manifest(
    folder: Path,
    run: RunConfig,
    task: Task,
    device: torch.device,
    *,
    step: int,
    processes: int,
    precision: Precision,
) -> tuple[str, ...]:
    """Write config.json and the files of the format; for a resumed run, add the environment.

    Returns:
        How the environment of a resumed run differs from that of its last start.

    Raises:
        ValueError: If the data has changed since the run began.
    """
    environment = Environment(
        since_step=step,
        onescan=__version__,
        python=platform.python_version(),
        torch=str(torch.__version__),
        platform=platform.platform(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        processes=processes,
        commit=_commit(),
        backend=run.machine.backend,
        kernels=default_kernels(device),
        matmul_precision=run.machine.matmul_precision,
        sequence_parallel=run.machine.sequence_parallel,
    )
    environments: tuple[Environment, ...] = ()
    if step > 0:
        saved = read_manifest(folder)
        check_same_data(saved, task, folder, resume=True)
        environments = tuple(e for e in saved.environments if e.since_step < step)
    changes = _changes(environments[-1], environment) if environments else ()
    is_unchanged = environments and not changes
    manifest = Manifest(
        onescan=__version__,
        run=run,
        format=task.format,
        class_names=task.class_names,
        target=task.target,
        examples=len(task.train),
        notes=task.notes,
        precision=precision,
        environments=environments if is_unchanged else (*environments, environment),
    )
    write_config(folder, configs.to_dict(manifest))
    if step == 0:
        with writing(folder):
            task.format.save(folder)
    return changes


def _changes(before: Environment, now: Environment) -> tuple[str, ...]:
    """Describe the fields in which two environments differ, except for their first step."""
    pairs = {
        field.name: (getattr(before, field.name), getattr(now, field.name))
        for field in dataclasses.fields(Environment)
        if field.name != "since_step"
    }
    return tuple(
        f"{name} was {_shown(old)} and is now {_shown(new)}"
        for name, (old, new) in pairs.items()
        if old != new
    )


def _shown(value: object) -> str:
    """Return a field of an environment as text.

    >>> _shown(("lrpe", "toeplitz_position")), _shown(()), _shown(2)
    ('lrpe, toeplitz_position', 'none', '2')
    """
    text = ", ".join(value) if isinstance(value, tuple) else str(value)
    return text or "none"


def read_manifest(folder: Path) -> Manifest:
    """Read config.json.

    Raises:
        ValueError: If it is missing or damaged, contains unknown fields or classes, or has no data
            and no task.
    """
    data = read_config(folder)
    if holds_only_model(data):
        raise ValueError(
            f"{folder} holds a model without the data and the task of a run, as save_pretrained "
            "writes it, expected a run's folder"
        )
    try:
        return configs.from_dict(Manifest, data)
    except (ValueError, RecursionError) as error:
        versions = f"written by onescan {data['onescan']}, read by {__version__}"
        raise ValueError(f"{folder / CONFIG}: {error} ({versions})") from error


def write_result(folder: Path, evaluation: Evaluation, step: int) -> None:
    """Mark the run as finished."""
    save_weights(folder / EVALUATION, evaluation.arrays, {})
    text = to_json({"steps": step, "metrics": evaluation.metrics})
    write_text_atomically(folder / RESULT, text)


def read_result(folder: Path) -> RunResult | None:
    """Read a finished run's result; None if the run is not finished.

    Raises:
        ValueError: If one of its files is damaged.
    """
    if not all((folder / name).exists() for name in FINISHED):
        return None
    path = folder / RESULT
    check_regular(path)
    data = from_json(path.read_bytes(), path, RECREATE)
    match data:
        case {"steps": int(steps), "metrics": stored} if metrics := numbers(stored):
            arrays, _ = read_weights(folder / EVALUATION, RECREATE)
            evaluation = Evaluation(metrics=metrics, arrays=arrays)
            return RunResult(folder=folder, evaluation=evaluation, steps=steps, reused=True)
    raise damaged(path, data, RECREATE)


def check_same_data(manifest: Manifest, task: Task, folder: Path, *, resume: bool = False) -> None:
    """Check that a run's task, built again, has the same classes in order, target and format.

    Args:
        manifest: Manifest of the run.
        task: Task on the data as it is now.
        folder: Folder of the run, for the message.
        resume: Whether the run is to be resumed, which also requires the same number of training
            examples.

    Raises:
        ValueError: If something differs.
    """
    changes = [_class_change(manifest.class_names, task.class_names)]
    is_same_format = operator.eq if resume else _is_near
    if not is_same_format(manifest.format, task.format):
        changes.append(f"format was {manifest.format!r} and is now {task.format!r}")
    if manifest.target != task.target:
        changes.append(f"target was {manifest.target!r} and is now {task.target!r}")
    if resume and manifest.examples != len(task.train):
        changes.append(
            f"there were {manifest.examples:,} training examples, now there are {len(task.train):,}"
        )
    if differences := [change for change in changes if change]:
        remedy = ", or start in another folder" if resume else ""
        raise ValueError(
            f"the data has changed since the run in {folder} began: {differences[0]}; restore the "
            f"old data{remedy}"
        )


def _is_near(a: Format, b: Format) -> bool:
    """Whether formats are equal, except for rounding of the constants that standardize grids.

    Constants are computed from the data, not in the same way by all versions.
    """
    if not (isinstance(a, GridFormat) and isinstance(b, GridFormat)) or len(a.std) != len(b.std):
        return a == b
    is_close = all(
        max(abs(m - n), abs(s - t)) <= ROUNDING * s
        for m, n, s, t in zip(a.mean, b.mean, a.std, b.std, strict=True)
    )
    other: Any = b
    return is_close and dataclasses.replace(other, mean=a.mean, std=a.std) == a


def _class_change(before: tuple[str, ...], now: tuple[str, ...]) -> str:
    """Describe the first difference between class names; empty if there is none.

    >>> _class_change(("cat", "dog"), ("dog", "cat"))
    "class 0 was 'cat' and is now 'dog'"
    """
    if len(before) != len(now):
        return f"there were {len(before)} classes, now there are {len(now)}"
    pairs = enumerate(zip(before, now, strict=True))
    return next((f"class {i} was {a!r} and is now {b!r}" for i, (a, b) in pairs if a != b), "")


def _manifest_in(folder: Path) -> Manifest:
    try:
        return read_manifest(folder)
    except ValueError as error:
        raise ValueError(
            f"{error}; choose another folder, because this one is not empty"
        ) from error


def _has_checkpoint(folder: Path) -> bool:
    return last_state(folder) is not None or (folder / WEIGHTS).exists()


def _check_same_run(folder: Path, manifest: Manifest, run: RunConfig) -> None:
    differences = [
        d for d in configs.differences(manifest.run, run) if not d[0].startswith(MACHINE)
    ]
    if run.training.precision in (AUTO, manifest.used_precision):
        differences = [d for d in differences if d[0] != "training.precision"]
    if not differences:
        return
    listed = [
        f"{path} is {a!r} in the folder and {b!r} in this run"
        for path, a, b in differences[:MAX_SHOWN]
    ]
    more = f", and {len(differences) - len(listed)} more" if len(differences) > len(listed) else ""
    hint = ""
    if all(path.startswith(CONTINUED) for path, *_ in differences) and (folder / WEIGHTS).exists():
        hint = f"; to continue from its weights, choose another folder and set init_from='{folder}'"
    raise OtherRunError(
        f"{folder} holds another run: {', '.join(listed)}{more}; choose another folder, "
        f"or pass overwrite=True to remove the run in it{hint}",
        fields=tuple(path for path, *_ in differences),
    )


def write_json(path: Path, data: object) -> None:
    """Write JSON types to a file atomically, replacing an older file.

    Numbers that are not finite become null.
    """
    text = json.dumps(finite(data), indent=2) + "\n"
    write_text_atomically(path, text)


def _commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
