"""A run's folder: what lies in it, and who may write to it.

config.json         the run, the input's format, the classes, the versions
metrics.jsonl       one line per step and evaluation
state/step_N/       everything that resuming needs, after N steps
model.safetensors   the weights of the last checkpoint
evaluation.safetensors, result.json   of a finished run: the last evaluation; result.json is last
"""

import json
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from onescan import __version__, configs
from onescan.data import Format
from onescan.tasks import Evaluation, Task
from onescan.training.files import (
    PARTIAL,
    damaged,
    parse_json,
    partial_of,
    remove,
    write_atomically,
    writing,
)
from onescan.training.records import METRICS
from onescan.training.run import RunConfig, RunResult
from onescan.training.state import STATE, last_state
from onescan.training.weights import WEIGHTS

CONFIG, EVALUATION, RESULT = "config.json", "evaluation.safetensors", "result.json"
# in the order in which they may be removed: the folder stays a run's folder to the end
CONTENTS = (RESULT, EVALUATION, STATE, WEIGHTS, METRICS, CONFIG)
SHOWN_DIFFERENCES = 3
MADE_ANEW = "remove it and start the run again, which makes it anew"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where a run was started, for the record."""

    python: str
    torch: str
    platform: str
    device: str
    commit: str | None  # of the working directory; with "-dirty" where it had changes


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What config.json holds."""

    onescan: str
    run: RunConfig
    format: Format
    class_names: tuple[str, ...]
    environment: Environment


def claim(folder: Path, run: RunConfig, *, overwrite: bool) -> None:
    """Make sure that `run` may write to `folder`; with `overwrite`, remove the run in it.

    A run without a checkpoint counts for nothing: any other takes its place.

    Raises:
        ValueError: the folder holds something else, or another run; says where they differ.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, expected a folder for the run")
    contents = [p for p in folder.iterdir() if p.suffix != PARTIAL] if folder.exists() else []
    if contents:
        there = _run_in(folder)
        overwrite = overwrite or not _has_checkpoint(folder)
        if not overwrite:
            _refuse_another(folder, there, run)
    with writing(folder):
        for path in [folder / name for name in CONTENTS]:
            remove(partial_of(path))
            if overwrite:
                remove(path)


def write_manifest(folder: Path, run: RunConfig, task: Task, device: torch.device) -> None:
    """Write config.json, unless an earlier start of the same run has."""
    if (folder / CONFIG).exists():
        return
    environment = Environment(
        python=platform.python_version(),
        torch=str(torch.__version__),
        platform=platform.platform(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        commit=_commit(),
    )
    manifest = Manifest(
        onescan=__version__,
        run=run,
        format=task.format,
        class_names=task.class_names,
        environment=environment,
    )
    _write_json(folder / CONFIG, configs.to_dict(manifest))


def read_manifest(folder: Path) -> Manifest:
    """Read config.json.

    Raises:
        ValueError: it is missing, damaged, or holds what this version does not know.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} holds no run: it has no {CONFIG}")
    data = parse_json(path.read_bytes(), path, "bring it back from a copy")
    if not (isinstance(data, dict) and isinstance(data.get("onescan"), str)):
        raise ValueError(f"{folder} holds no run: its {CONFIG} is not of onescan's")
    try:
        return configs.from_dict(Manifest, data)
    except ValueError as error:
        versions = f"written by onescan {data['onescan']}, read by {__version__}"
        raise ValueError(f"{path}: {error} ({versions})") from error


def write_result(folder: Path, evaluation: Evaluation, step: int) -> None:
    """Mark the run as finished."""
    write_atomically(folder / EVALUATION, lambda path: save_file(evaluation.arrays, path))
    _write_json(folder / RESULT, {"steps": step, "metrics": evaluation.metrics})


def read_result(folder: Path) -> RunResult | None:
    """Read a finished run's result; None if the run is not finished.

    Raises:
        ValueError: a file of it is damaged.
    """
    if not all((folder / name).exists() for name in CONTENTS):
        return None
    steps, metrics = read_outcome(folder)
    path = folder / EVALUATION
    try:
        evaluation = Evaluation(metrics=metrics, arrays=load_file(path))
    except SafetensorError as error:
        raise damaged(path, error, MADE_ANEW) from error
    return RunResult(folder=folder, evaluation=evaluation, steps=steps, reused=True)


def read_outcome(folder: Path) -> tuple[int, dict[str, float]]:
    """Read a finished run's steps and metrics, which are 0 and none if it is not finished.

    Raises:
        ValueError: result.json is damaged.
    """
    path = folder / RESULT
    if not path.exists():
        return 0, {}
    data = parse_json(path.read_bytes(), path, MADE_ANEW)
    match data:
        case {"steps": int(steps), "metrics": dict(metrics)}:
            if metrics and all(isinstance(number, int | float) for number in metrics.values()):
                return steps, metrics
    raise damaged(path, data, MADE_ANEW)


def _run_in(folder: Path) -> RunConfig:
    try:
        return read_manifest(folder).run
    except ValueError as error:
        raise ValueError(f"{error}; choose another folder, for this one is not empty") from error


def _has_checkpoint(folder: Path) -> bool:
    return last_state(folder) is not None or (folder / WEIGHTS).exists()


def _refuse_another(folder: Path, there: RunConfig, run: RunConfig) -> None:
    found = configs.differences(there, run)
    if not found:
        return
    listed = [f"{path} is {a!r} there and {b!r} here" for path, a, b in found[:SHOWN_DIFFERENCES]]
    more = f", and {len(found) - len(listed)} more" if len(found) > len(listed) else ""
    raise ValueError(
        f"{folder} holds another run: {', '.join(listed)}{more}; choose another folder, "
        "or pass overwrite (--overwrite) to remove the run in it"
    )


def _write_json(path: Path, data: object) -> None:
    text = json.dumps(data, indent=2) + "\n"
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def _commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
