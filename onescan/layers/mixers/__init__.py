"""Every mixer; `MIXERS` lists their configs by name."""

from onescan.layers.mixers.contract import Mixer, MixerConfig
from onescan.layers.mixers.delta_rule import DeltaRuleMixer, DeltaRuleMixerConfig
from onescan.layers.mixers.hgrn import (
    HGRNMixer,
    HGRNMixerConfig,
    LowerBounds,
    build_lower_bounds,
)
from onescan.layers.mixers.lightnet import LightNetMixer, LightNetMixerConfig, LightNetState
from onescan.layers.mixers.linear_diffusion import (
    LinearDiffusionMixer,
    LinearDiffusionMixerConfig,
    LinearDiffusionState,
)
from onescan.layers.mixers.lion import LINEAR_TRANSFORMERS, LionMixer, LionMixerConfig
from onescan.layers.mixers.softmax import SoftmaxMixer, SoftmaxMixerConfig, SoftmaxState

__all__ = [
    "LINEAR_TRANSFORMERS",
    "MIXERS",
    "DeltaRuleMixer",
    "DeltaRuleMixerConfig",
    "HGRNMixer",
    "HGRNMixerConfig",
    "LightNetMixer",
    "LightNetMixerConfig",
    "LightNetState",
    "LinearDiffusionMixer",
    "LinearDiffusionMixerConfig",
    "LinearDiffusionState",
    "LionMixer",
    "LionMixerConfig",
    "LowerBounds",
    "Mixer",
    "MixerConfig",
    "SoftmaxMixer",
    "SoftmaxMixerConfig",
    "SoftmaxState",
    "build_lower_bounds",
]

MIXERS: dict[str, type[MixerConfig]] = {
    "lightnet": LightNetMixerConfig,
    "lion": LionMixerConfig,
    "delta_rule": DeltaRuleMixerConfig,
    "hgrn": HGRNMixerConfig,
    "linear_diffusion": LinearDiffusionMixerConfig,
    "softmax": SoftmaxMixerConfig,
}
