"""Every size in the papers by name, with the parameters they print, and their ablations."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import nn

from onescan.checks import check_choice
from onescan.configs import ModelConfig, replace
from onescan.layers.mixers import LightNetMixerConfig, SoftmaxMixerConfig
from onescan.layers.mlp import MLPConfig
from onescan.layers.position import AbsolutePositionConfig
from onescan.models.image_classifier import ImageClassifierConfig


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named config, and what its paper prints of it."""

    config: ModelConfig
    printed_millions: float
    """Parameters as printed, in millions."""
    source: str
    printed_ablations: Mapping[str, float] = field(default_factory=dict)
    """Rows of `ABLATIONS` that the paper prints parameters of, in millions."""


# What a row of the papers' ablation tables changes: LightNet, Tables 1, 7 and 6.
ABLATIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "without_tpe": {"position": None},
        "without_lrpe": {"mixer.lrpe": False},
        "without_decay": {"mixer.decay": False},
        "without_norm": {"mixer.norm": "none"},
        "full_rank_gate": {"mixer.gate_rank": None},
        "separate_decay": {"mixer.separate_decay_rank": 128},
    }
)
# The rows that Tables 1 and 7 print parameters of: all but "no share".
PRINTED_ROWS = ("without_tpe", "without_lrpe", "without_decay", "without_norm", "full_rank_gate")


def _lightnet(width: int, num_heads: int, printed_millions: float, *ablations: float) -> Preset:
    return Preset(
        config=ImageClassifierConfig(width=width, mixer=LightNetMixerConfig(num_heads=num_heads)),
        printed_millions=printed_millions,
        source="LightNet, arXiv:2405.21022, Tables 1, 7 and 15",
        printed_ablations=dict(zip(PRINTED_ROWS, ablations, strict=True)),
    )


def _deit(width: int, num_heads: int, printed_millions: float) -> Preset:
    return Preset(
        config=ImageClassifierConfig(
            width=width,
            mixer=SoftmaxMixerConfig(num_heads=num_heads),
            mlp=MLPConfig(),
            position=AbsolutePositionConfig(),
        ),
        printed_millions=printed_millions,
        source="LightNet, arXiv:2405.21022, Table 1",
    )


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "lightnet_tiny": _lightnet(192, 6, 6.0, 6.0, 6.0, 6.0, 6.0, 6.16),
        "lightnet_small": _lightnet(384, 16, 22.64, 22.54, 22.63, 22.64, 22.63, 23.82),
        "lightnet_base": _lightnet(768, 16, 87.74, 87.54, 87.69, 87.74, 87.72, 93.64),
        "deit_tiny": _deit(192, 3, 5.7),
        "deit_small": _deit(384, 6, 22.0),
        "deit_base": _deit(768, 12, 86.0),
    }
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
    """The model of a preset, with fresh weights; see `preset` for the changes.

    >>> build("lightnet_tiny", num_classes=10, image_size=32, patch_size=4).head.out_features
    10
    """
    return preset(name, **changes).build()
