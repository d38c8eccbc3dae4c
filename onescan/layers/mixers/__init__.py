"""Every mixer there is."""

from onescan.layers.mixers.contract import Mixer, MixerConfig
from onescan.layers.mixers.lightnet import LightNetMixer, LightNetMixerConfig, LightNetState
from onescan.layers.mixers.softmax import SoftmaxMixer, SoftmaxMixerConfig

__all__ = [
    "MIXERS",
    "LightNetMixer",
    "LightNetMixerConfig",
    "LightNetState",
    "Mixer",
    "MixerConfig",
    "SoftmaxMixer",
    "SoftmaxMixerConfig",
]

MIXERS: dict[str, type[MixerConfig]] = {
    "lightnet": LightNetMixerConfig,
    "softmax": SoftmaxMixerConfig,
}
