"""One run of the study: train it to the end, resume it after an interruption, write its result."""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import study_queue as queue
import torch
from results import environment
from study_queue import Result, StudyRun

import onescan
from onescan import configs
from onescan.checkpoint.files import remove, write_atomically
from onescan.experiments.evaluation.config import LengthsConfig
from onescan.experiments.evaluation.lengths import measure_lengths
from onescan.experiments.locks import locked
from onescan.experiments.training import RunConfig, read_metrics, train

ROOT = Path(__file__).parents[1]
DATA_FILES = {
    "images": ("cifar10-train.parquet", "cifar10-test.parquet"),
    "text": (queue.SHAKESPEARE,),
}
DATA_KINDS = {
    queue.CIFAR10: "images",
    queue.CIFAR10_TRAIN: "images",
    queue.SHAKESPEARE: "text",
    queue.SHAKESPEARE_TRAIN: "text",
}
HELD_OUT = 0.1  # fraction of the text, as in the recipes
NICENESS = 19
INTERRUPTED, BUSY = 130, 75  # exit codes
MAX_TOKENS = 2**16 + 1  # of the test text, for perplexities by length


def train_run(run: StudyRun, data: Path, results: Path, folder: Path) -> None:
    """Train one run in this process, which then exits with a code if it did not finish."""
    check_writable(results)
    torch.set_num_threads(1)
    os.nice(NICENESS)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder))
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(BUSY)
        try:
            finish(run, data, results, folder)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)


@dataclass(kw_only=True)
class Progress:
    """What an unfinished run has used so far; saved beside its folder when it is interrupted."""

    commit: str
    data: dict[str, str]
    """SHA-256 hash of each data file."""
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    start: tuple[float, float] = field(
        default_factory=lambda: (time.perf_counter(), time.process_time())
    )

    def stop(self) -> None:
        """Add the time since the start."""
        wall_start, cpu_start = self.start
        self.start = time.perf_counter(), time.process_time()
        self.wall_seconds += self.start[0] - wall_start
        self.cpu_seconds += self.start[1] - cpu_start

    def save(self, file: Path) -> None:
        """Write the file."""
        saved = {name: value for name, value in asdict(self).items() if name != "start"}
        write_atomically(file, lambda path: path.write_text(json.dumps(saved), encoding="utf-8"))

    def resume(self, file: Path) -> bool:
        """Continue from the file, if it exists and belongs to the same commit and data."""
        if not file.exists():
            return False
        saved = json.loads(file.read_text(encoding="utf-8"))
        if (saved["commit"], saved["data"]) != (self.commit, self.data):
            return False
        for name in ("wall_seconds", "cpu_seconds"):
            setattr(self, name, saved[name])
        return True


def finish(run: StudyRun, data: Path, results: Path, folder: Path) -> Result:
    """Train a run to the end and write its result. Resume it if it was interrupted.

    A run starts over if its process was killed, or if the commit or the data has changed.

    Raises:
        KeyboardInterrupt: If the run is interrupted. It can be resumed later.
        ValueError: If data files are missing, or if the code has changed during the run.
        OSError: If the result cannot be written. The run is kept.
    """
    run_folder, file = folder / run.name, folder / f"{run.name}.progress.json"
    folder.mkdir(parents=True, exist_ok=True)
    config, hashes = with_data(run.config, data, folder)
    progress = Progress(commit=clean_commit(), data=hashes)
    if not progress.resume(file):
        remove(run_folder)
    try:
        file.unlink(missing_ok=True)  # if this process is killed, the run starts over
        result = train_or_resume(run, config, run_folder, progress)
        if clean_commit() != progress.commit:
            raise ValueError(f"{ROOT} was changed while {run.name} was trained")
        write_result(result, results)
    except BaseException:
        if run_folder.exists():
            progress.stop()
            progress.save(file)
        raise
    remove(run_folder)
    return result


def train_or_resume(
    run: StudyRun, config: RunConfig, run_folder: Path, progress: Progress
) -> Result:
    """Train a run in its folder, or continue it, and return its result."""
    error, lines, perplexities = "", [], {}
    try:
        train(config, run_folder)
        lines = read_metrics(run_folder)
        if not run.is_sweep:
            perplexities = perplexities_by_length(run_folder, queue.find_suite(run.suite).lengths)
    except FloatingPointError as reason:
        error = str(reason)
    evaluations = evaluations_of(lines)
    if evaluations and not all(map(math.isfinite, evaluations[-1].values())):
        error, evaluations = "the last evaluation is not finite", []
    progress.stop()
    return Result(
        name=run.name,
        suite=run.suite,
        variant=run.variant,
        family=run.family,
        seed=run.seed,
        is_sweep=run.is_sweep,
        learning_rate=config.training.learning_rate,
        parameters=queue.parameters(config.model),
        steps=max((line["step"] for line in lines), default=0),
        evaluations=evaluations,
        error=error,
        perplexities=perplexities,
        wall_seconds=round(progress.wall_seconds, 1),
        cpu_seconds=round(progress.cpu_seconds, 1),
        commit=progress.commit,
        config=configs.to_dict(run.config),
        data=progress.data,
        environment=environment(torch.device("cpu")),
    )


def evaluations_of(lines: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Return the evaluations of a run, each with the training time so far in seconds."""
    evaluations, seconds = [], 0.0
    for line in lines:
        if line["split"] == "train":
            seconds += line["seconds"]
        elif line["split"] == "test":
            values = {name: value for name, value in line.items() if name != "split"}
            evaluations.append(values | {"seconds": round(seconds, 1)})
    return evaluations


def perplexities_by_length(run_folder: Path, lengths: tuple[int, ...]) -> dict[str, float]:
    """Return the perplexity of a language model at each context length that it supports."""
    if not lengths:
        return {}
    config = LengthsConfig(lengths=lengths, max_tokens=MAX_TOKENS)
    evaluation = measure_lengths(str(run_folder), config, device="cpu")
    return {str(score.length): score.perplexity for score in evaluation.scores}


# Equal time


def step_seconds(config: RunConfig, steps: int, folder: Path) -> list[float]:
    """Train for a few steps and return the time of each. The first third is left out."""
    training = replace(config.training, steps=steps, evaluate_every=1e6, checkpoint_every=1e6)
    config = configs.replace(config, {"training": training, "data.test_fraction": 0.02})
    train(config, folder)
    lines = [line for line in read_metrics(folder) if line["split"] == "train"]
    return [line["seconds"] for line in lines[steps // 3 :]]


# Data and results


def check_data(data: Path, kind: str) -> None:
    """Raise ValueError if a data file is missing; the message names it."""
    for name in DATA_FILES[kind]:
        if not (data / name).is_file():
            raise ValueError(f"data is '{data}', which does not contain {name}")


def with_data(config: RunConfig, data: Path, folder: Path) -> tuple[RunConfig, dict[str, str]]:
    """Return the run with the actual path of its data, and the SHA-256 hash of each file.

    Raises:
        ValueError: If a file is missing. The message names it.
    """
    path = getattr(config.data, "path", None)
    if path is None:  # generated data
        return config, {}
    kind = DATA_KINDS[path]
    names = DATA_FILES[kind]
    check_data(data, kind)
    hashes = {name: sha256((data / name).read_bytes()).hexdigest() for name in names}
    data_folder = folder.absolute() / "data"
    (data_folder / queue.CIFAR10).mkdir(parents=True, exist_ok=True)
    for name in names:
        for link in (
            data_folder / name,
            *[data_folder / queue.CIFAR10 / name] * (kind == "images"),
        ):
            link.unlink(missing_ok=True)
            link.symlink_to((data / name).absolute())
    if kind == "text":
        text = (data / queue.SHAKESPEARE).read_bytes()
        (data_folder / queue.SHAKESPEARE_TRAIN).write_bytes(
            text[: round(len(text) * (1 - HELD_OUT))]
        )
    return configs.replace(config, {"data.path": str(data_folder / path)}), hashes


def check_writable(results: Path) -> None:
    """Raise OSError if no file can be written to the folder of the results; create the folder."""
    results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=results):
        pass


def read_results(folder: Path) -> dict[str, Result]:
    """Read all results of a folder by name.

    Raises:
        ValueError: If a file is not a result. The message names it.
    """
    results = {}
    for file in sorted(folder.glob("*.json")):
        try:
            result = Result(**json.loads(file.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file} is not a result of the study: {error}") from error
        if result.name != file.stem:
            raise ValueError(f"{file} contains the result of {result.name}")
        results[result.name] = result
    return results


def write_result(result: Result, folder: Path) -> None:
    """Write the file of a result atomically, and create the folder if necessary."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(result), indent=1) + "\n"
    write_atomically(folder / f"{result.name}.json", lambda path: path.write_text(text, "utf-8"))


# The commit


def clean_commit() -> str:
    """Return the hash of the commit that this code is.

    Raises:
        ValueError: If the imported package belongs to another tree, or the tree has changes.
    """
    package = Path(onescan.__file__).parents[1]
    if package != ROOT:
        raise ValueError(f"onescan is imported from {package}, expected {ROOT}: set PYTHONPATH=.")
    if git("status", "--porcelain", "--", "onescan", "benchmarks"):
        raise ValueError(
            f"{ROOT} has uncommitted changes in onescan or benchmarks: commit them, or use a git "
            "worktree"
        )
    return git("rev-parse", "HEAD")


def git(*arguments: str) -> str:
    """Return the output of a git command in this working tree."""
    try:
        completed = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"{ROOT} is not a git repository, or git is not installed") from error
    return completed.stdout.strip()
