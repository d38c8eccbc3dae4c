"""Recipes: complete runs by name, in the table RECIPES."""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from onescan import configs
from onescan.checks import check_choice
from onescan.experiments.recipes.files import function_in
from onescan.experiments.training.config import RunConfig
from onescan.layers.position import AbsolutePositionConfig, TokenPositionConfig

# file of this folder -> kind of its recipes
KINDS = {
    "digits": "Image classification",
    "segmentation": "Segmentation",
    "own_data": "Your own data",
    "forecasting": "Forecasting",
    "images": "Image classification",
    "generation": "Image generation",
    "long_range": "Long-range sequence classification",
    "language": "Language modeling",
    "linearize": "From softmax to linear attention",
    "recall": "Associative recall",
}


Infer = Callable[[RunConfig, Collection[str]], tuple[RunConfig, list[str]]]


@dataclass(frozen=True)
class Recipe:
    """A complete run. Calling it returns its config."""

    name: str
    description: str
    """Summary in one line, the command that trains it, and notes."""
    config: Callable[[], RunConfig]
    infer: Infer | None = None
    """Infers settings from the data: takes the config and the names of the options that the user
    gave, and returns the config and lines that describe it."""
    inferred: frozenset[str] = frozenset()
    """Names of the fields that it infers, without the names of their groups."""
    adapt: Callable[[RunConfig, Mapping[str, str]], RunConfig] | None = None
    """Adapts the config to the options of `onescan train`, by dotted name, that determine the
    defaults of other options."""

    def __call__(self) -> RunConfig:
        return self.config()


def table(*recipes: Recipe | Callable[[], RunConfig]) -> dict[str, Recipe]:
    """Return recipes by name. A function is described by its docstring."""
    rows = [
        recipe
        if isinstance(recipe, Recipe)
        else Recipe(recipe.__name__, inspect.getdoc(recipe) or "", recipe)
        for recipe in recipes
    ]
    return {row.name: row for row in rows}


def row(name: str, config: Callable[[], RunConfig], *paragraphs: str) -> Recipe:
    """Return a recipe whose description is the non-empty paragraphs."""
    return Recipe(name, "\n\n".join(filter(None, paragraphs)), config)


class _Recipes(Mapping[str, Recipe]):
    """All recipes by name; a lookup imports only the files up to the one that has the name."""

    def __getitem__(self, name: str) -> Recipe:
        for file in KINDS:
            if name in (recipes := _recipes_in(file)):
                return recipes[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        for file in KINDS:
            yield from _recipes_in(file)

    def __len__(self) -> int:
        return sum(len(_recipes_in(file)) for file in KINDS)


def _recipes_in(file: str) -> dict[str, Recipe]:
    recipes: dict[str, Recipe] = import_module(f"onescan.experiments.recipes.{file}").RECIPES
    return recipes


RECIPES: Mapping[str, Recipe] = _Recipes()


def kinds() -> dict[str, str]:
    """Return the kind of each recipe, by the recipe's name."""
    return {name: kind for file, kind in KINDS.items() for name in _recipes_in(file)}


def summary(recipe: Recipe) -> str:
    """Return the first line of a recipe's description."""
    return recipe.description.partition("\n")[0]


def find_recipe(name: str) -> Recipe:
    """Return the recipe of a name.

    Args:
        name: A key of `RECIPES`; ``digits/without_tpe`` for a recipe with a row of `ABLATIONS`;
            ``my_run.py:function`` for a function in a file of your own.

    Raises:
        ValueError: If there is no such name (states the closest), file or function, or the file
            cannot be imported.
    """
    base, slash, ablation = name.rpartition("/")
    if slash and not ablation.endswith(".py") and ":" not in ablation:
        return ablated(find_recipe(base), ablation)
    if ".py:" in name:
        file, _, function = name.rpartition(":")
        config = function_in(file, function)
        return Recipe(function, inspect.getdoc(config) or "", config)
    if name.endswith(".py"):
        raise ValueError(f"recipe {name!r} is a file, expected a function in it: {name}:NAME")
    if name not in RECIPES:
        check_choice("recipe", name, RECIPES, listed_by="onescan recipes")
    return RECIPES[name]


def ablated(recipe: Recipe, ablation: str) -> Recipe:
    """Return a variant of the recipe, with one row of `ABLATIONS` applied to its model.

    If the row adds grid positions, text models get learned token positions instead. Calling the
    variant raises ValueError if the ablation does not fit the model.
    """
    from onescan.models.presets import ABLATIONS  # slow

    check_choice("ablation", ablation, ABLATIONS)

    def changed(run: RunConfig) -> RunConfig:
        try:
            model = _ablated_model(run, ablation)
        except ValueError as error:
            fitting = ", ".join(name for name in ABLATIONS if _fits(run, name))
            raise ValueError(
                f"ablation {ablation!r} does not fit the model of {run.name}; available: {fitting}"
            ) from error
        return dataclasses.replace(run, name=f"{run.name}/{ablation}", model=model)

    adapt = recipe.adapt
    return dataclasses.replace(
        recipe,
        name=f"{recipe.name}/{ablation}",
        description=f"{summary(recipe)} Ablation: {ablation}.",
        config=lambda: changed(recipe()),
        adapt=None if adapt is None else lambda _, given: changed(adapt(recipe(), given)),
    )


def _ablated_model(run: RunConfig, ablation: str) -> Any:
    from onescan.models.presets import ABLATIONS
    from onescan.models.token_network import TokenNetworkConfig

    changes = dict(ABLATIONS[ablation])
    adds_grid_positions = isinstance(changes.get("position"), AbsolutePositionConfig)
    if adds_grid_positions and isinstance(run.model, TokenNetworkConfig):
        changes["position"] = _text_positions(run)
    return configs.replace(run.model, changes)


def _fits(run: RunConfig, ablation: str) -> bool:
    try:
        _ablated_model(run, ablation)
    except ValueError:
        return False
    return True


def _text_positions(run: RunConfig) -> TokenPositionConfig:
    """Return learned positions for a text model.

    Language models get at least as many as BERT (512) or GPT-2 (1024), because fine-tuning and
    generation may use longer sequences than pre-training.
    """
    from onescan.models.presets import BERT_MAX_TOKENS, GPT2_MAX_TOKENS

    minimum = {"MaskedLMConfig": BERT_MAX_TOKENS, "CausalLMConfig": GPT2_MAX_TOKENS}
    longest = run.data.max_tokens or TokenPositionConfig().max_tokens
    return TokenPositionConfig(max_tokens=max(longest, minimum.get(type(run.model).__name__, 1)))
