"""What came of fine-tuning on several tasks: every measure of every seed, and the averages."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from onescan.data.glue import PROBLEMS, GlueTask
from onescan.report.study import FinishedRun, check_seeds, read_run
from onescan.report.summary import spread
from onescan.tasks.glue import LOSS, glue_score
from onescan.training.config import RunResult


class OverSeeds(NamedTuple):
    """A number over seeds.

    Attributes:
        values: one a seed.
    """

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over seeds."""
        return statistics.mean(self.values)

    @property
    def spread(self) -> float | None:
        """Standard deviation of the sample; one seed has none."""
        return spread(list(self.values))

    def spell(self, scale: int | float = 1, digits: int = 3) -> str:
        """Mean and spread in words.

        >>> OverSeeds((0.5, 0.7)).spell(100, 1), OverSeeds((0.5,)).spell()
        ('60.0 ± 14.1', '0.500')
        """
        about = "" if self.spread is None else f" \u00b1 {scale * self.spread:.{digits}f}"
        return f"{scale * self.mean:.{digits}f}{about}"

    def to_dict(self) -> dict[str, Any]:
        """In JSON types."""
        return {"mean": self.mean, "spread": self.spread, "values": list(self.values)}


@dataclass(frozen=True, kw_only=True)
class GlueOutcome:
    """Finished runs of several tasks, all with the same seeds."""

    checkpoint: str
    """What the runs began with, themselves or by way of MNLI."""
    recipe: str
    runs: Mapping[GlueTask, tuple[FinishedRun, ...]]
    """One a seed, of each task."""

    @property
    def seeds(self) -> list[int]:
        """In the order of all values."""
        return [run.seed for run in next(iter(self.runs.values()))]

    def metrics(self, task: GlueTask) -> dict[str, OverSeeds]:
        """A task's measures, without the loss."""
        results = [run.result.metrics for run in self.runs[task]]
        names = [name for name in results[0] if name != LOSS]
        return {name: OverSeeds(tuple(each[name] for each in results)) for name in names}

    def score(self, task: GlueTask) -> OverSeeds:
        """The mean of a task's measures."""
        return OverSeeds(tuple(glue_score(run.result.metrics) for run in self.runs[task]))

    def average(self) -> OverSeeds:
        """The mean of all tasks' scores, seed by seed."""
        scores = (self.score(task).values for task in self.runs)
        return OverSeeds(tuple(map(statistics.mean, zip(*scores, strict=True))))

    def to_dict(self) -> dict[str, Any]:
        """All numbers, in JSON types."""
        tasks = {
            task: {name: each.to_dict() for name, each in self.metrics(task).items()}
            | {"score": self.score(task).to_dict()}
            for task in self.runs
        }
        return {
            "checkpoint": self.checkpoint,
            "recipe": self.recipe,
            "seeds": self.seeds,
            "tasks": tasks,
            "average": self.average().to_dict(),
        }


def read_glue(
    results: Mapping[GlueTask, Iterable[RunResult]], *, checkpoint: str, recipe: str
) -> GlueOutcome:
    """Read finished runs from their folders.

    Args:
        results: of each task, one a seed.
        checkpoint: what the runs began with.
        recipe: which one they followed.

    Raises:
        ValueError: those of a task are no seeds of one recipe.
    """
    runs = {task: tuple(map(read_run, results[task])) for task in PROBLEMS if task in results}
    for each in runs.values():
        check_seeds(each)
    return GlueOutcome(checkpoint=checkpoint, recipe=recipe, runs=runs)
