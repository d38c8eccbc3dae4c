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
from safetensors.torch import load_file, save_file

from onescan import __version__, configs
from onescan.data import Format
from onescan.tasks import Evaluation, Task
from onescan.training.files import PARTIAL, partial_of, remove, write_atomically, writing
from onescan.training.records import METRICS
from onescan.training.run import RunConfig, RunResult
from onescan.training.state import STATE
from onescan.training.weights import WEIGHTS

CONFIG, EVALUATION, RESULT = "config.json", "evaluation.safetensors", "result.json"
# in the order in which they may be removed: the folder stays a run's folder to the end
CONTENTS = (RESULT, EVALUATION, STATE, WEIGHTS, METRICS, CONFIG)
SHOWN_DIFFERENCES = 3


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

    Raises:
        ValueError: the folder holds something else, or another run; says where they differ.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, expected a folder for the run")
    contents = [p for p in folder.iterdir() if p.suffix != PARTIAL] if folder.exists() else []
    if contents and not _is_run(folder):
        raise ValueError(f"{folder} is not empty and holds no run: choose another folder")
    if contents and not overwrite:
        _refuse_another(folder, run)
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
    if not _is_run(folder):
        raise ValueError(f"{folder} holds no run: it has no {CONFIG} of onescan's")
    data = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    try:
        return configs.from_dict(Manifest, data)
    except ValueError as error:
        versions = f"written by onescan {data['onescan']}, read by {__version__}"
        raise ValueError(f"{folder / CONFIG}: {error} ({versions})") from error


def write_result(folder: Path, evaluation: Evaluation, step: int) -> None:
    """Mark the run as finished."""
    write_atomically(folder / EVALUATION, lambda path: save_file(evaluation.arrays, path))
    _write_json(folder / RESULT, {"steps": step, "metrics": evaluation.metrics})


def read_result(folder: Path) -> RunResult | None:
    """Read a finished run's result; None if the run is not finished."""
    if not all((folder / name).exists() for name in CONTENTS):
        return None
    result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    evaluation = Evaluation(metrics=result["metrics"], arrays=load_file(folder / EVALUATION))
    return RunResult(folder=folder, evaluation=evaluation, steps=result["steps"], reused=True)


def _is_run(folder: Path) -> bool:
    try:
        data = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    return isinstance(data, dict) and isinstance(data.get("onescan"), str)


def _refuse_another(folder: Path, run: RunConfig) -> None:
    found = configs.differences(read_manifest(folder).run, run)
    if not found:
        return
    listed = [f"{path} is {a!r} there and {b!r} here" for path, a, b in found[:SHOWN_DIFFERENCES]]
    more = f", and {len(found) - len(listed)} more" if len(found) > len(listed) else ""
    raise ValueError(
        f"{folder} holds another run: {', '.join(listed)}{more}; choose another folder, "
        "or pass overwrite to remove the run in it"
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
