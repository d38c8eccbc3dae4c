"""Every size in the papers by name, with the parameters they print, and their ablations."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import nn

from onescan.checks import check_choice
from onescan.configs import ModelConfig, replace
from onescan.layers.decays import FixedDecayConfig, NoDecayConfig, SelectiveDecayConfig
from onescan.layers.mixers import LightNetMixerConfig, LionMixerConfig, SoftmaxMixerConfig
from onescan.layers.mlp import MLPConfig
from onescan.layers.position import AbsolutePositionConfig
from onescan.models.image_classifier import ImageClassifierConfig


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named config, and what its paper prints of it."""

    config: ModelConfig
    printed_millions: float | int
    """Parameters as printed, in millions; an int where those are whole."""
    source: str
    printed_ablations: Mapping[str, float] = field(default_factory=dict)
    """Rows of `ABLATIONS` that the paper prints parameters of, in millions."""


# What a row of LightNet's ablation tables changes, Tables 1, 7 and 6.
LIGHTNET_ABLATIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "without_tpe": {"position": None},
        "without_lrpe": {"mixer.lrpe": False},
        "without_decay": {"mixer.decay": False},
        "without_norm": {"mixer.norm": "none"},
        "full_rank_gate": {"mixer.gate_rank": None},
        "separate_decay": {"mixer.separate_decay_rank": 128},
    }
)
# The same of LION's, Tables 13, 14 and 16, for LION-s.
LION_ABLATIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "fixed_decay": {"mixer.decay": FixedDecayConfig()},
        "diagonal_decay": {"mixer.decay.diagonal": True},
        "without_feature_map": {"mixer.feature_map": "identity"},
        "with_positions": {"position": AbsolutePositionConfig()},
        "forward": {"mixer.direction": "forward"},
        "backward": {"mixer.direction": "backward"},
        "alternating": {"mixer.direction": "alternating"},
    }
)
ABLATIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {**LIGHTNET_ABLATIONS, **LION_ABLATIONS}
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


def _lion(mixer: LionMixerConfig, width: int, num_heads: int, printed_millions: int) -> Preset:
    """DeiT with another mixer, and the mean of all tokens; without a decay it needs positions."""
    is_lit = isinstance(mixer.decay, NoDecayConfig)
    return Preset(
        config=ImageClassifierConfig(
            width=width,
            mixer=replace(mixer, {"num_heads": num_heads}),
            mlp=MLPConfig(),
            position=AbsolutePositionConfig() if is_lit else None,
            pool="mean_with_class_token",
        ),
        printed_millions=printed_millions,
        source="LION, arXiv:2502.16249, Tables 2 and 12",
    )


LIT = LionMixerConfig(decay=NoDecayConfig())
D = LionMixerConfig(decay=FixedDecayConfig())
S = LionMixerConfig(decay=SelectiveDecayConfig())
D_NATURAL, S_NATURAL = (replace(mixer, {"scan": "natural"}) for mixer in (D, S))

LION_NAMES = {
    "lit": "LION-lit",
    "d": "LION-d",
    "s": "LION-s",
    "d_natural": "LION-d natural, along rows and columns",
    "s_natural": "LION-s natural, along rows and columns",
}

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "lightnet_tiny": _lightnet(192, 6, 6.0, 6.0, 6.0, 6.0, 6.0, 6.16),
        "lightnet_small": _lightnet(384, 16, 22.64, 22.54, 22.63, 22.64, 22.63, 23.82),
        "lightnet_base": _lightnet(768, 16, 87.74, 87.54, 87.69, 87.74, 87.72, 93.64),
        "deit_tiny": _deit(192, 3, 5.7),
        "deit_small": _deit(384, 6, 22.0),
        "deit_base": _deit(768, 12, 86.0),
        "lion_lit_tiny": _lion(LIT, 192, 3, 5),
        "lion_lit_small": _lion(LIT, 384, 6, 22),
        "lion_lit_base": _lion(LIT, 768, 12, 86),
        "lion_d_tiny": _lion(D, 192, 3, 5),
        "lion_d_small": _lion(D, 384, 6, 22),
        "lion_d_base": _lion(D, 768, 12, 86),
        "lion_s_tiny": _lion(S, 192, 3, 5),
        "lion_s_small": _lion(S, 384, 6, 22),
        "lion_s_base": _lion(S, 768, 12, 86),
        "lion_d_natural_tiny": _lion(D_NATURAL, 192, 3, 5),
        "lion_d_natural_small": _lion(D_NATURAL, 384, 6, 22),
        "lion_d_natural_base": _lion(D_NATURAL, 768, 12, 86),
        "lion_s_natural_tiny": _lion(S_NATURAL, 192, 3, 5),
        "lion_s_natural_small": _lion(S_NATURAL, 384, 6, 22),
        "lion_s_natural_base": _lion(S_NATURAL, 768, 12, 86),
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
