"""Finished runs of one recipe, read from their folders."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import nn

from onescan import configs
from onescan.tasks import Task
from onescan.training.config import RunConfig, RunResult
from onescan.training.folder import MACHINE, Manifest, read_manifest, read_result
from onescan.training.loading import load
from onescan.training.logging import METRICS, Split, read_metrics

SEED, INIT_FROM = "training.seed", "init_from"
SHOWN_DIFFERENCES = 3

Column = Float[np.ndarray, " _"]


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """One run: what it was asked for, what it recorded, what came out."""

    manifest: Manifest
    result: RunResult
    records: list[dict[str, Any]]

    @property
    def seed(self) -> int:
        """What the run's chance came from."""
        return self.manifest.run.training.seed

    @property
    def seconds(self) -> float:
        """Time spent on updates; evaluations and checkpoints are not in it."""
        return float(self.column("train", "seconds").sum())

    @property
    def throughput(self) -> float:
        """Examples per second of the median update: the first ones warm up."""
        seconds = float(np.median(self.column("train", "seconds")))
        return self.manifest.run.training.batch_size / seconds

    @property
    def waiting(self) -> float:
        """The part of that time that was spent waiting for data."""
        return float(self.column("train", "waiting_seconds").sum()) / self.seconds

    @property
    def memory_mib(self) -> float:
        """The most that was in use, of a CPU's or of a GPU's memory."""
        return float(self.column("train", "memory_mib").max())

    def column(self, split: Split, name: str) -> Column:
        """A recorded number, in the order of steps."""
        lines = [line for line in self.records if line["split"] == split]
        if not lines or not all(name in line for line in lines):
            path = self.result.folder / METRICS
            raise ValueError(f"{path} is damaged: it lacks {name!r} of {split} lines")
        return np.array([line[name] for line in lines], float)


@dataclass(frozen=True, kw_only=True)
class Study:
    """Runs that differ in nothing but the seed, and what they ran on."""

    runs: tuple[FinishedRun, ...]
    task: Task
    model: nn.Module
    """Of the first run, on the CPU, in evaluation mode."""

    @property
    def config(self) -> RunConfig:
        """What the runs have in common."""
        return self.runs[0].manifest.run

    @property
    def class_names(self) -> tuple[str, ...]:
        """What the model's scores stand for."""
        return self.runs[0].manifest.class_names

    def metric(self, name: str) -> list[float]:
        """The last evaluation's number, run by run."""
        for run in self.runs:
            if name not in run.result.metrics:
                raise ValueError(f"{run.result.folder}: the result has no metric {name!r}")
        return [run.result.metrics[name] for run in self.runs]

    def array(self, name: str) -> torch.Tensor:
        """The last evaluation's array, all runs stacked."""
        return torch.stack([run.result.evaluation.arrays[name] for run in self.runs])


def read_study(runs: Sequence[Path | RunResult]) -> Study:
    """Read finished runs of one recipe.

    Raises:
        ValueError: there are none, one is not finished, or two differ in more or in less than
            their seed.
    """
    if not runs:
        raise ValueError("runs is empty, expected at least one finished run")
    finished = tuple(read_run(run) for run in runs)
    check_seeds(finished)
    first = finished[0].manifest.run
    return Study(
        runs=finished,
        task=first.task.build(first.data.build()),
        model=load(finished[0].result.folder).model,
    )


def read_run(run: Path | RunResult) -> FinishedRun:
    """Read one finished run.

    Raises:
        ValueError: the folder holds none, or one that is not finished.
    """
    folder = run.folder if isinstance(run, RunResult) else run
    manifest = read_manifest(folder)
    result = run if isinstance(run, RunResult) else read_result(folder)
    if result is None:
        raise ValueError(f"{folder} holds a run that is not finished: train it to its end first")
    return FinishedRun(manifest=manifest, result=result, records=read_metrics(folder))


def settings_apart(a: RunConfig, b: RunConfig) -> list[tuple[str, Any, Any]]:
    """List where two recipes differ: dotted path, value in `a`, value in `b`.

    That each began with the run of its own seed is no difference.
    """
    ignored = {SEED, INIT_FROM} if _init_from(a) == _init_from(b) else {SEED}
    return [
        (path, x, y)
        for path, x, y in configs.differences(a, b)
        if path not in ignored and not path.startswith(MACHINE)
    ]


def check_seeds(runs: Sequence[FinishedRun]) -> None:
    """Raise ValueError unless runs are different seeds of one recipe.

    Raises:
        ValueError: two differ in more than their seed, or not in their seed.
    """
    for a, b in combinations(runs, 2):
        folders = f"{a.result.folder} and {b.result.folder}"
        found = [
            f"{path} ({x!r} and {y!r})"
            for path, x, y in settings_apart(a.manifest.run, b.manifest.run)
        ]
        if found:
            more = f" and {len(found) - SHOWN_DIFFERENCES} more" * (len(found) > SHOWN_DIFFERENCES)
            raise ValueError(
                f"{folders} are runs of different recipes, which differ in "
                f"{', '.join(found[:SHOWN_DIFFERENCES])}{more}; expected seeds of one recipe"
            )
        if a.seed == b.seed:
            raise ValueError(f"{folders} hold the same run, seed {a.seed}: expected distinct seeds")


def _init_from(run: RunConfig) -> str | None:
    """Where the weights are that a run began with, its own seed left open."""
    return run.init_from and run.init_from.replace(f"seed-{run.training.seed}", "seed-*")
