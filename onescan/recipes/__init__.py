"""Complete runs as functions without arguments, and the table of them."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import MappingProxyType

from onescan import configs
from onescan.choices import check_choice
from onescan.models.presets import ABLATIONS
from onescan.recipes.digits import digits
from onescan.training.run import RunConfig

Recipe = Callable[[], RunConfig]

RECIPES: Mapping[str, Recipe] = MappingProxyType({"digits": digits})


def find_recipe(name: str) -> Recipe:
    """The recipe of that name.

    Args:
        name: a key of `RECIPES`; `digits/without_tpe` for a recipe with a row of `ABLATIONS`;
            `my_run.py:function` for a function in a file of your own.

    Raises:
        ValueError: no such name (says the nearest), file or function.
    """
    base, slash, row = name.rpartition("/")
    if slash and not row.endswith(".py") and ":" not in row:
        return ablated(find_recipe(base), row)
    if ".py:" not in name:
        check_choice("recipe", name, RECIPES)
        return RECIPES[name]
    file, _, function = name.rpartition(":")
    if not Path(file).is_file():
        raise ValueError(f"recipe {name!r}: there is no file {file}")
    spec = spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    defined = [n for n, _ in inspect.getmembers(module, inspect.isfunction)]
    check_choice(f"function in {file}", function, defined)
    recipe: Recipe = getattr(module, function)
    return recipe


def ablated(recipe: Recipe, row: str) -> Recipe:
    """The recipe with one row of `ABLATIONS` changed in its model."""
    check_choice("ablation", row, ABLATIONS)

    def variant() -> RunConfig:
        run = recipe()
        model = configs.replace(run.model, ABLATIONS[row])
        return dataclasses.replace(run, name=f"{run.name}/{row}", model=model)

    variant.__doc__ = f"{summary(recipe)} Ablation: {row}."
    return variant


def summary(recipe: Recipe) -> str:
    """The first line of a recipe's docstring."""
    return (inspect.getdoc(recipe) or "").partition("\n")[0]
