"""LION's Table 1: every linear transformer in it as a mixer, causal or in both directions."""

from collections.abc import Mapping
from types import MappingProxyType

from onescan.layers.decays import (
    FixedDecayConfig,
    GLADecayConfig,
    HGRN2DecayConfig,
    Mamba2DecayConfig,
    MambaDecayConfig,
    NoDecayConfig,
    RWKV6DecayConfig,
    SelectiveDecayConfig,
    XLSTMDecayConfig,
)
from onescan.layers.mixers.delta_rule import DeltaRuleMixerConfig
from onescan.layers.mixers.directed import DirectedMixerConfig
from onescan.layers.mixers.lion import LionMixerConfig

RETNET = FixedDecayConfig(start="retnet", learnt=False)

# Bidirectional; direction="forward" gives the causal recurrences of the table, which contains only
# recurrences. Feature maps are those of the original models, except gated RFA's random features.
# Convolutions, output gates, token shifts, RetNet's rotation, RWKV-6's bonus and Mamba's skip
# connection D x are omitted. RWKV-6 itself reads before it decays. Unscaled outputs grow with the
# number of tokens, hence the norm. All originals apply the decay of the reading token, "target",
# which is the default of diagonal decays.
LINEAR_TRANSFORMERS: Mapping[str, DirectedMixerConfig] = MappingProxyType(
    {
        "linear_attention": LionMixerConfig(
            feature_map="elu_plus_one", decay=NoDecayConfig(), normalize="none", norm="rms"
        ),
        "linear_attention_scaled": LionMixerConfig(
            feature_map="elu_plus_one", decay=NoDecayConfig()
        ),
        "retnet": LionMixerConfig(
            feature_map="identity", decay=RETNET, normalize="none", norm="rms"
        ),
        "retnet_scaled": LionMixerConfig(decay=RETNET),  # a scale needs features above 0
        "gated_rfa": LionMixerConfig(
            feature_map="elu_plus_one",
            decay=SelectiveDecayConfig(couple_key=True),
            decay_at="target",
        ),
        "mamba2": LionMixerConfig(
            feature_map="silu",
            decay=Mamba2DecayConfig(),
            normalize="none",
            decay_at="target",
            norm="rms",
        ),
        "rwkv6": LionMixerConfig(
            feature_map="identity", decay=RWKV6DecayConfig(), normalize="none", norm="rms"
        ),
        "mamba": LionMixerConfig(
            num_heads=1,
            state_size=16,
            feature_map="identity",
            decay=MambaDecayConfig(),
            normalize="none",
            norm="rms",
        ),
        "gla": LionMixerConfig(
            feature_map="identity", decay=GLADecayConfig(), normalize="none", norm="rms"
        ),
        "hgrn2": LionMixerConfig(
            feature_map="silu",
            decay=HGRN2DecayConfig(),
            normalize="none",
            decay_at="target",
            norm="rms",
        ),
        "xlstm": LionMixerConfig(
            feature_map="identity",
            decay=XLSTMDecayConfig(),
            normalize="max_one",
            decay_at="target",
        ),
        "deltanet": DeltaRuleMixerConfig(),
    }
)
