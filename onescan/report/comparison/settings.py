"""Where recipes differ, setting by setting."""

import dataclasses
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from onescan.report.study import FinishedRun, settings_apart
from onescan.training.config import RunConfig
from onescan.training.folder import MACHINE

NAME = "name"  # a recipe's name is no setting
DATA = "data"
READING = frozenset(  # fields of data configs that say how images are read, not which
    {"channels", "image_size", "mean", "on_error", "shuffle_block", "std", "streaming"}
    | {"test_crop", "train_crop"}
)
ABSENT = "\N{EM DASH}"


def differing(recipes: Sequence[RunConfig]) -> list[str]:
    """List the dotted paths at which any two recipes differ, their names apart."""
    found = {
        path: None for a, b in combinations(recipes, 2) for path, *_ in settings_apart(a, b)
    }  # in order, each once
    return [path for path in found if path != NAME]


def differing_machines(runs: Sequence[FinishedRun]) -> list[str]:
    """Name what tells runs of one recipe apart, of all that `machine` holds."""
    found = {
        name: None
        for a, b in combinations(runs, 2)
        if not settings_apart(a.manifest.run, b.manifest.run)
        for name, fact in machine(a).items()
        if fact != machine(b)[name]
    }
    return list(found)


def machine(run: FinishedRun) -> dict[str, str]:
    """Spell what a run was carried out on: its settings, and what they came to."""
    config, places = run.manifest.run, run.manifest.environments
    paths = [MACHINE + field.name for field in dataclasses.fields(config.machine)]
    return {
        **{path: spell(config, path) for path in paths},
        "device": ", ".join(dict.fromkeys(place.device for place in places)),
        "processes": ", ".join(dict.fromkeys(str(place.processes) for place in places)),
    }


def caution(recipes: Sequence[RunConfig]) -> str:
    """Say so where the recipes are of different data; empty where they are not."""
    paths = [path.split(".") for path in differing(recipes)]
    apart = [".".join(path) for path in paths if path[0] == DATA and path[1] not in READING]
    if not apart:
        return ""
    return (
        f"These runs learnt from different data ({', '.join(apart)}), so their accuracies do not "
        "compare."
    )


def spell(recipe: RunConfig, path: str) -> str:
    """Spell one setting; a dash where the recipe's parts have no such field."""
    value: Any = recipe
    for name in path.split("."):
        value = type(value) if name == "type" else getattr(value, name, ABSENT)
    if dataclasses.is_dataclass(value):
        value = value if isinstance(value, type) else type(value)
        return value.__name__.removesuffix("Config")
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "none" if value is None else str(value)
