"""All mixers. `MIXERS` lists their configs by name, except for hybrids of two mixers."""

from onescan.layers.mixers.conformance import check_mixer
from onescan.layers.mixers.contract import DirectedMixerConfig, Mixer, MixerConfig
from onescan.layers.mixers.delta_rule import (
    DeltaProductMixerConfig,
    DeltaRuleMixer,
    DeltaRuleMixerConfig,
    GatedDeltaNetMixerConfig,
    KDAMixerConfig,
)
from onescan.layers.mixers.hgrn import (
    HGRNMixer,
    HGRNMixerConfig,
    LowerBounds,
    build_lower_bounds,
)
from onescan.layers.mixers.hybrid import HybridMixerConfig
from onescan.layers.mixers.hydra import HydraMixer, HydraMixerConfig
from onescan.layers.mixers.lightnet import LightNetMixer, LightNetMixerConfig
from onescan.layers.mixers.linear_attention import (
    LinearAttention,
    LinearAttentionConfig,
    LinearAttentionState,
)
from onescan.layers.mixers.linear_diffusion import (
    LinearDiffusionMixer,
    LinearDiffusionMixerConfig,
    LinearDiffusionState,
)
from onescan.layers.mixers.lion import LINEAR_TRANSFORMERS, LionMixer, LionMixerConfig
from onescan.layers.mixers.mamba import MambaMixer, MambaMixerConfig, MambaState
from onescan.layers.mixers.mamba2 import Mamba2Mixer, Mamba2MixerConfig
from onescan.layers.mixers.registry import mixer_named, mixer_names, register_mixer
from onescan.layers.mixers.rwkv6 import RWKV6Mixer, RWKV6MixerConfig, RWKV6State
from onescan.layers.mixers.softmax import SoftmaxMixer, SoftmaxMixerConfig, SoftmaxState
from onescan.layers.mixers.vision_rwkv import VisionRWKVMixerConfig

__all__ = [
    "LINEAR_TRANSFORMERS",
    "MIXERS",
    "DeltaProductMixerConfig",
    "DeltaRuleMixer",
    "DeltaRuleMixerConfig",
    "DirectedMixerConfig",
    "GatedDeltaNetMixerConfig",
    "HGRNMixer",
    "HGRNMixerConfig",
    "HybridMixerConfig",
    "HydraMixer",
    "HydraMixerConfig",
    "KDAMixerConfig",
    "LightNetMixer",
    "LightNetMixerConfig",
    "LinearAttention",
    "LinearAttentionConfig",
    "LinearAttentionState",
    "LinearDiffusionMixer",
    "LinearDiffusionMixerConfig",
    "LinearDiffusionState",
    "LionMixer",
    "LionMixerConfig",
    "LowerBounds",
    "Mamba2Mixer",
    "Mamba2MixerConfig",
    "MambaMixer",
    "MambaMixerConfig",
    "MambaState",
    "Mixer",
    "MixerConfig",
    "RWKV6Mixer",
    "RWKV6MixerConfig",
    "RWKV6State",
    "SoftmaxMixer",
    "SoftmaxMixerConfig",
    "SoftmaxState",
    "VisionRWKVMixerConfig",
    "build_lower_bounds",
    "check_mixer",
    "mixer_named",
    "mixer_names",
    "register_mixer",
]

MIXERS: dict[str, type[MixerConfig]] = {
    "lightnet": LightNetMixerConfig,
    "lion": LionMixerConfig,
    "delta_rule": DeltaRuleMixerConfig,
    "gated_deltanet": GatedDeltaNetMixerConfig,
    "kda": KDAMixerConfig,
    "delta_product": DeltaProductMixerConfig,
    "hgrn": HGRNMixerConfig,
    "rwkv6": RWKV6MixerConfig,
    "vision_rwkv": VisionRWKVMixerConfig,
    "linear_diffusion": LinearDiffusionMixerConfig,
    "mamba": MambaMixerConfig,
    "mamba2": Mamba2MixerConfig,
    "hydra": HydraMixerConfig,
    "softmax": SoftmaxMixerConfig,
}
