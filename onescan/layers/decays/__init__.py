"""Every decay there is."""

from collections.abc import Mapping
from types import MappingProxyType

from onescan.layers.decays.contract import Decay, DecayConfig, Gates, LogDecay
from onescan.layers.decays.fixed import FixedDecay, FixedDecayConfig
from onescan.layers.decays.gla import GLADecay, GLADecayConfig
from onescan.layers.decays.hgrn2 import HGRN2Decay, HGRN2DecayConfig
from onescan.layers.decays.hippo import HippoDecay, HippoDecayConfig
from onescan.layers.decays.mamba import MambaDecay, MambaDecayConfig
from onescan.layers.decays.mamba2 import Mamba2Decay, Mamba2DecayConfig
from onescan.layers.decays.none import NoDecay, NoDecayConfig
from onescan.layers.decays.rwkv6 import RWKV6Decay, RWKV6DecayConfig
from onescan.layers.decays.selective import SelectiveDecay, SelectiveDecayConfig
from onescan.layers.decays.xlstm import XLSTMDecay, XLSTMDecayConfig

__all__ = [
    "DECAYS",
    "Decay",
    "DecayConfig",
    "FixedDecay",
    "FixedDecayConfig",
    "GLADecay",
    "GLADecayConfig",
    "Gates",
    "HGRN2Decay",
    "HGRN2DecayConfig",
    "HippoDecay",
    "HippoDecayConfig",
    "LogDecay",
    "Mamba2Decay",
    "Mamba2DecayConfig",
    "MambaDecay",
    "MambaDecayConfig",
    "NoDecay",
    "NoDecayConfig",
    "RWKV6Decay",
    "RWKV6DecayConfig",
    "SelectiveDecay",
    "SelectiveDecayConfig",
    "XLSTMDecay",
    "XLSTMDecayConfig",
]

DECAYS: Mapping[str, type[DecayConfig]] = MappingProxyType(
    {
        "none": NoDecayConfig,
        "fixed": FixedDecayConfig,
        "selective": SelectiveDecayConfig,
        "mamba": MambaDecayConfig,
        "mamba2": Mamba2DecayConfig,
        "xlstm": XLSTMDecayConfig,
        "gla": GLADecayConfig,
        "rwkv6": RWKV6DecayConfig,
        "hgrn2": HGRN2DecayConfig,
        "hippo": HippoDecayConfig,
    }
)
