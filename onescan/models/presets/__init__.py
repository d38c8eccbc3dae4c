"""Every size in the papers by name, with the parameters they print, and their ablations."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from onescan.allocation import build_model
from onescan.checks import check_choice
from onescan.configs import ModelConfig, replace
from onescan.models.presets.ablations import (
    ABLATIONS,
    LDN_ABLATIONS,
    LIGHTNET_ABLATIONS,
    LION_ABLATIONS,
    LONG_RANGE_ABLATIONS,
)
from onescan.models.presets.contract import Preset
from onescan.models.presets.generation import GENERATION_PRESETS
from onescan.models.presets.images import IMAGE_PRESETS, LION_NAMES
from onescan.models.presets.language import LANGUAGE_PRESETS

__all__ = [
    "ABLATIONS",
    "LDN_ABLATIONS",
    "LIGHTNET_ABLATIONS",
    "LION_ABLATIONS",
    "LION_NAMES",
    "LONG_RANGE_ABLATIONS",
    "PRESETS",
    "Preset",
    "build",
    "preset",
]

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {**IMAGE_PRESETS, **GENERATION_PRESETS, **LANGUAGE_PRESETS}
)


def preset(name: str, **changes: Any) -> ModelConfig:
    """The config of a preset, with fields changed by name.

    Args:
        name: a key of `PRESETS`.
        changes: field=value; a dotted name reaches a nested config, as in
            `preset("lightnet_tiny", **{"mixer.lrpe": False})`. `image_size` and `patch_size`
            may be one number for a square.

    Raises:
        ValueError: an unknown name or field (says the nearest), or a value of another type.

    >>> preset("lightnet_tiny", num_classes=10, image_size=32, patch_size=4).num_classes
    10
    """
    check_choice("model", name, PRESETS)
    squares = {
        key: (value, value)
        for key, value in changes.items()
        if key in ("image_size", "patch_size") and isinstance(value, int)
    }
    return replace(PRESETS[name].config, {**changes, **squares})


def build(name: str, **changes: Any) -> nn.Module:
    """Build the model of a preset with new weights; see `preset` for the arguments.

    Raises:
        ValueError: If `preset` raises it, or the model does not fit into memory.

    >>> build("lightnet_tiny", num_classes=10, image_size=32, patch_size=4).head.out_features
    10
    """
    return build_model(preset(name, **changes))
