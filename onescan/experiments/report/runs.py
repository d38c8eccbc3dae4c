"""Finished runs, read from their folders."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import nn

from onescan import configs
from onescan.experiments.tasks import ImageClassificationConfig, Task
from onescan.experiments.training.config import RunConfig, RunResult
from onescan.experiments.training.folder import (
    MACHINE,
    Manifest,
    check_same_data,
    read_manifest,
    read_result,
)
from onescan.experiments.training.logging import METRICS, Split, read_metrics
from onescan.inference.loading import load

SEED, INIT_FROM = "training.seed", "init_from"
SHOWN_DIFFERENCES = 3

Column = Float[np.ndarray, " _"]


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """One run: its config, its recorded metrics and its result."""

    manifest: Manifest
    result: RunResult
    records: list[dict[str, Any]]

    @property
    def seed(self) -> int:
        """Random seed."""
        return self.manifest.run.training.seed

    @property
    def seconds(self) -> float:
        """Time spent on training steps, without evaluations and checkpoints."""
        return float(self._all_steps("seconds").sum())

    @property
    def has_transfer(self) -> bool:
        """Whether the run began with attention transfer."""
        return any(line["split"] == "transfer" for line in self.records)

    @property
    def throughput(self) -> float:
        """Examples per second at the median step, since the first steps are slower."""
        return 1 / float(np.median(self.column("train", "seconds") / self.batch_sizes))

    @property
    def batch_sizes(self) -> Column:
        """Examples of each step."""
        training = self.manifest.run.training
        if training.initial_batch_size is not None:
            return self.column("train", "batch_size")
        return np.full(len(self.column("train", "seconds")), float(training.batch_size))

    @property
    def waiting(self) -> float:
        """Share of the training time that was spent waiting for data."""
        return float(self._all_steps("waiting_seconds").sum()) / self.seconds

    @property
    def memory_mib(self) -> float:
        """Peak memory of the GPU, or of the CPU where there is no GPU."""
        return float(self._all_steps("memory_mib").max())

    def best(self, score: Callable[[dict[str, float]], float]) -> dict[str, Any]:
        """Return the record of the best evaluation, the first of several equal ones.

        Args:
            score: Returns the number by which metrics are compared; higher is better.
        """

        def score_of(record: dict[str, Any]) -> float:
            value = score({name: record[name] for name in self.result.metrics})
            return -math.inf if math.isnan(value) else value

        return max((line for line in self.records if line["split"] == "test"), key=score_of)

    def column(self, split: Split, name: str) -> Column:
        """Return all values of a recorded metric, in the order of steps."""
        lines = [line for line in self.records if line["split"] == split]
        if not lines or not all(name in line for line in lines):
            path = self.result.folder / METRICS
            raise ValueError(f"{path} is damaged: it lacks {name!r} in lines of the split {split}")
        return np.array([line[name] for line in lines], float)

    def _all_steps(self, name: str) -> Column:
        """Return all values of a metric of the training steps, including attention transfer."""
        splits: list[Split] = ["transfer", "train"] if self.has_transfer else ["train"]
        return np.concatenate([self.column(split, name) for split in splits])


@dataclass(frozen=True, kw_only=True)
class RunGroup:
    """Runs of one recipe with different seeds."""

    runs: tuple[FinishedRun, ...]
    task: Task
    model: nn.Module
    """Model of the first run, on the CPU and in evaluation mode."""

    @property
    def config(self) -> RunConfig:
        """Config of the first run; the others differ from it only in their seed and machine."""
        return self.runs[0].manifest.run

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the model's classes."""
        return self.runs[0].manifest.class_names

    def metric(self, name: str) -> list[float]:
        """Return a metric of the final evaluation of each run."""
        for run in self.runs:
            if name not in run.result.metrics:
                raise ValueError(f"{run.result.folder}: the result has no metric {name!r}")
        return [run.result.metrics[name] for run in self.runs]

    def array(self, name: str) -> torch.Tensor:
        """Return an array of the final evaluation, stacked over runs."""
        return torch.stack([run.result.evaluation.arrays[name] for run in self.runs])


class SeedValues(NamedTuple):
    """A number of each seed, with their mean and standard deviation."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return statistics.mean(self.values)

    @property
    def std(self) -> float | None:
        """Sample standard deviation; None for one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def format(self, digits: int = 3, *, scale: int = 1) -> str:
        """Format the mean and the standard deviation.

        >>> SeedValues((0.5, 0.7)).format(1, scale=100), SeedValues((0.5,)).format()
        ('60.0 ± 14.1', '0.500')
        """
        spread = "" if self.std is None else f" \u00b1 {scale * self.std:.{digits}f}"
        return f"{scale * self.mean:.{digits}f}{spread}"


def read_run_group(runs: Sequence[str | Path | RunResult]) -> RunGroup:
    """Read finished runs of one recipe.

    Raises:
        ValueError: If `runs` is empty, a run is not finished, the runs are not different seeds of
            one recipe, or the classes or the format of their data have changed.
    """
    if not runs:
        raise ValueError("runs is empty, expected at least one finished run")
    finished = tuple(read_run(run) for run in runs)
    check_seeds(finished)
    first = finished[0].manifest.run
    task = first.build_task()
    check_same_data(finished[0].manifest, task, finished[0].result.folder)
    return RunGroup(
        runs=finished,
        task=task,
        model=load(finished[0].result.folder).model,
    )


def read_run(run: str | Path | RunResult) -> FinishedRun:
    """Read one finished run.

    Raises:
        ValueError: If the folder holds no run, or one that is not finished.
    """
    folder = run.folder if isinstance(run, RunResult) else Path(run)
    manifest = read_manifest(folder)
    result = run if isinstance(run, RunResult) else read_result(folder)
    if result is None:
        raise ValueError(f"{folder} holds a run that is not finished: finish training it first")
    return FinishedRun(manifest=manifest, result=result, records=read_metrics(folder))


def config_differences(a: RunConfig, b: RunConfig) -> list[tuple[str, Any, Any]]:
    """List the settings in which two recipes differ: dotted path, value in `a`, value in `b`.

    Seeds and machine settings are ignored, as are initial weights from runs of the same seed.
    """
    ignored = {SEED, INIT_FROM} if _init_from(a) == _init_from(b) else {SEED}
    return [
        (path, x, y)
        for path, x, y in configs.differences(a, b)
        if path not in ignored and not path.startswith(MACHINE)
    ]


def has_training_accuracy(run: RunConfig) -> bool:
    """Return whether training batches have an accuracy: MixUp and CutMix mix classes."""
    return isinstance(run.task, ImageClassificationConfig) and run.task.mix is None


def check_seeds(runs: Sequence[FinishedRun]) -> None:
    """Check that runs are different seeds of one recipe.

    Raises:
        ValueError: If two runs differ in more than their seed, or have the same seed.
    """
    for a, b in combinations(runs, 2):
        folders = f"{a.result.folder} and {b.result.folder}"
        differences = [
            f"{path} ({x!r} and {y!r})"
            for path, x, y in config_differences(a.manifest.run, b.manifest.run)
        ]
        if differences:
            more = f" and {len(differences) - SHOWN_DIFFERENCES} more" * (
                len(differences) > SHOWN_DIFFERENCES
            )
            raise ValueError(
                f"{folders} are runs of different recipes, which differ in "
                f"{', '.join(differences[:SHOWN_DIFFERENCES])}{more}; expected seeds of one recipe"
            )
        if a.seed == b.seed:
            raise ValueError(f"{folders} hold the same run, seed {a.seed}: expected distinct seeds")


def _init_from(run: RunConfig) -> str | None:
    """Return the folder of the initial weights, with the run's own seed replaced by a star."""
    return run.init_from and run.init_from.replace(f"seed-{run.training.seed}", "seed-*")
