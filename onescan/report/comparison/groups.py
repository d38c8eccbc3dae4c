"""Finished runs, put into groups that are seeds of one recipe."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from string import ascii_uppercase

from torch import nn

from onescan.checkpoint.run_folder import CONFIG
from onescan.report.comparison.settings import differing, differing_machines, machine, spell
from onescan.report.palette import SERIES, series
from onescan.report.study import FinishedRun, read_run, settings_apart
from onescan.training.config import RunConfig
from onescan.training.loading import load

NAMED_BY = 3  # settings that tell recipes of one name apart
STYLES = ("-", "--", ":")  # of lines, where colours come again


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ in nothing but the seed, and what they ran on."""

    name: str
    place: int
    """Among the groups."""
    runs: tuple[FinishedRun, ...]
    parameters: int

    @property
    def config(self) -> RunConfig:
        """What the runs have in common."""
        return self.runs[0].manifest.run

    @property
    def letter(self) -> str:
        """What stands for the group in charts: A to Z, then A2 and so on."""
        again, index = divmod(self.place, len(ascii_uppercase))
        return ascii_uppercase[index] + (str(again + 1) if again else "")

    @property
    def color(self) -> str:
        """Of its lines."""
        return series(self.place)

    @property
    def style(self) -> str:
        """Of its lines."""
        return STYLES[self.place // len(SERIES) % len(STYLES)]

    def mean(self, number: Callable[[FinishedRun], float]) -> float:
        """Of a number of each run."""
        return statistics.mean(map(number, self.runs))


def read_groups(paths: Sequence[Path]) -> list[Group]:
    """Read finished runs and put together what are seeds of one recipe, in the order they came.

    Where a recipe has a seed twice, on different machines, each machine has its own group.

    Raises:
        ValueError: there are none, a folder holds none, one is not finished, two are the same, or
            they are of different tasks.
    """
    if not paths:
        raise ValueError("runs is empty, expected at least one finished run")
    found = [read_run(folder) for path in paths for folder in _folders(path)]
    recipes = _together(found, _is_seed_of)
    together = [group for recipe in recipes for group in _seeds(recipe)]
    for group in together:
        _check_distinct(group)
        _check_task(together[0][0], group[0])
    names = _names([group[0] for group in together])
    return [
        Group(
            name=name,
            place=place,
            runs=tuple(sorted(runs, key=lambda run: run.seed)),
            parameters=_parameters(load(runs[0].result.folder).model),
        )
        for place, (name, runs) in enumerate(zip(names, together, strict=True))
    ]


def _folders(path: Path) -> list[Path]:
    """The run's folder itself, or those of its seeds."""
    if (path / CONFIG).is_file():
        return [path]
    seeds = sorted(folder for folder in path.glob("seed-*") if folder.is_dir())
    if not seeds:
        raise ValueError(f"{path} holds no run: it has neither {CONFIG} nor folders seed-*")
    return seeds


def _together(
    runs: Sequence[FinishedRun], alike: Callable[[FinishedRun, FinishedRun], bool]
) -> list[list[FinishedRun]]:
    groups: list[list[FinishedRun]] = []
    for run in runs:
        home = next((group for group in groups if alike(group[0], run)), None)
        if home is None:
            groups.append([run])
        else:
            home.append(run)
    return groups


def _seeds(recipe: list[FinishedRun]) -> list[list[FinishedRun]]:
    """All runs of a recipe, or those of each machine where a seed comes twice."""
    if len({run.seed for run in recipe}) == len(recipe):
        return [recipe]
    return _together(recipe, lambda a, b: machine(a) == machine(b))


def _check_distinct(runs: list[FinishedRun]) -> None:
    for a, b in combinations(runs, 2):
        if a.seed == b.seed:
            raise ValueError(
                f"{a.result.folder} and {b.result.folder} hold the same run, seed {a.seed}, with "
                "equal settings on equal machines: expected it once"
            )


def _is_seed_of(a: FinishedRun, b: FinishedRun) -> bool:
    return not settings_apart(a.manifest.run, b.manifest.run)


def _check_task(a: FinishedRun, b: FinishedRun) -> None:
    folders = f"{a.result.folder} and {b.result.folder}"
    tasks = [type(run.manifest.run.task).__name__ for run in (a, b)]
    if tasks[0] != tasks[1]:
        raise ValueError(f"{folders} are runs of different tasks, {tasks[0]} and {tasks[1]}")
    if a.manifest.class_names != b.manifest.class_names:
        raise ValueError(f"{folders} are runs of different tasks: they tell other classes apart")


def _names(runs: list[FinishedRun]) -> list[str]:
    """Each recipe's name, and what tells it from others of the same name."""
    named = []
    for run in runs:
        recipe = run.manifest.run
        alike = [other.manifest.run for other in runs if other.manifest.run.name == recipe.name]
        told = [f"{path} {spell(recipe, path)}" for path in differing(alike)[:NAMED_BY]]
        twins = [other for other in runs if _is_seed_of(run, other)]
        told += [f"{name} {machine(run)[name]}" for name in differing_machines(twins)[:NAMED_BY]]
        named.append(f"{recipe.name} ({', '.join(told)})" if told else recipe.name)
    return named


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
