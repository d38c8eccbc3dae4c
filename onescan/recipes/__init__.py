"""Complete runs as functions without arguments, and the table of them."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType

from onescan import configs
from onescan.checks import check_choice
from onescan.layers.position import AbsolutePositionConfig
from onescan.models.presets import ABLATIONS
from onescan.models.token_network import TokenNetworkConfig
from onescan.recipes.cifar10 import (
    CIFAR10_LION,
    cifar10_deit,
    cifar10_ldn,
    cifar10_lightnet,
    cifar10_vit,
)
from onescan.recipes.digits import digits
from onescan.recipes.files import recipe_in
from onescan.recipes.generation import GENERATION
from onescan.recipes.imagenet import (
    IMAGENET_LDN,
    IMAGENET_LION,
    imagenet_deit_base,
    imagenet_deit_small,
    imagenet_deit_tiny,
    imagenet_lightnet_base,
    imagenet_lightnet_small,
    imagenet_lightnet_tiny,
)
from onescan.recipes.language import LANGUAGE
from onescan.recipes.long_range import LONG_RANGE
from onescan.recipes.positions import text_positions
from onescan.recipes.recall import RECALL
from onescan.training.config import RunConfig

Recipe = Callable[[], RunConfig]

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "digits": digits,
        "cifar10_lightnet": cifar10_lightnet,
        **CIFAR10_LION,
        "cifar10_deit": cifar10_deit,
        "cifar10_ldn": cifar10_ldn,
        "cifar10_vit": cifar10_vit,
        "imagenet_lightnet_tiny": imagenet_lightnet_tiny,
        "imagenet_lightnet_small": imagenet_lightnet_small,
        "imagenet_lightnet_base": imagenet_lightnet_base,
        "imagenet_deit_tiny": imagenet_deit_tiny,
        "imagenet_deit_small": imagenet_deit_small,
        "imagenet_deit_base": imagenet_deit_base,
        **IMAGENET_LION,
        **IMAGENET_LDN,
        **GENERATION,
        **LONG_RANGE,
        **LANGUAGE,
        **RECALL,
    }
)


def find_recipe(name: str) -> Recipe:
    """The recipe of that name.

    Args:
        name: a key of `RECIPES`; `digits/without_tpe` for a recipe with a row of `ABLATIONS`;
            `my_run.py:function` for a function in a file of your own.

    Raises:
        ValueError: no such name (says the nearest), file or function, or the file fails.
    """
    base, slash, row = name.rpartition("/")
    if slash and not row.endswith(".py") and ":" not in row:
        return ablated(find_recipe(base), row)
    if ".py:" not in name:
        check_choice("recipe", name, RECIPES)
        return RECIPES[name]
    file, _, function = name.rpartition(":")
    return recipe_in(file, function)


def ablated(recipe: Recipe, row: str) -> Recipe:
    """Return a variant of the recipe, with one row of `ABLATIONS` applied to its model.

    If the row adds grid positions, text models get learned token positions instead.
    """
    check_choice("ablation", row, ABLATIONS)

    def variant() -> RunConfig:
        run = recipe()
        changes = dict(ABLATIONS[row])
        adds_grid_positions = isinstance(changes.get("position"), AbsolutePositionConfig)
        if adds_grid_positions and isinstance(run.model, TokenNetworkConfig):
            changes["position"] = text_positions(run.model, run.data)
        model = configs.replace(run.model, changes)
        return dataclasses.replace(run, name=f"{run.name}/{row}", model=model)

    variant.__doc__ = f"{summary(recipe)} Ablation: {row}."
    return variant


def summary(recipe: Recipe) -> str:
    """The first line of a recipe's docstring."""
    return (inspect.getdoc(recipe) or "").partition("\n")[0]
