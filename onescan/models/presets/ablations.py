"""The rows of the papers' ablation tables: what each changes in a config."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from onescan.layers.decays import FixedDecayConfig, SelectiveDecayConfig
from onescan.layers.position import AbsolutePositionConfig

# Rows of LightNet's ablation tables, Tables 1, 7 and 6. Either of the last two may be "no share" in
# Table 6: the text describes independent parameters, but the 385M parameters match rank 128.
LIGHTNET_ABLATIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "without_tpe": {"position": None},
        "without_lrpe": {"mixer.lrpe": False},
        "without_decay": {"mixer.decay": False},
        "without_norm": {"mixer.norm": "none"},
        "full_rank_gate": {"mixer.gate_rank": None},
        "separate_decay": {"mixer.decay_logits": "offset"},
        "independent_decay": {"mixer.decay_logits": "independent", "mixer.decay_rank": None},
    }
)
# The same of LION's, Tables 13, 14 and 16, for LION-s; the last row is ours.
LION_ABLATIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "fixed_decay": {"mixer.decay": FixedDecayConfig()},
        "diagonal_decay": {"mixer.decay.diagonal": True},
        "without_feature_map": {"mixer.feature_map": "identity"},
        "with_positions": {"position": AbsolutePositionConfig()},
        "forward": {"mixer.direction": "forward"},
        "backward": {"mixer.direction": "backward"},
        "alternating": {"mixer.direction": "alternating"},
        "without_positions": {"position": None},
    }
)
# The same of LDN's, Table 4; the last row is ours.
LDN_ABLATIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "without_diffusion": {"mixer.diffusion": False},
        "without_local_update": {"mixer.local_update": False},
        "without_linear_attention": {"mixer.linear_attention": False},
        "separable_diffusion": {"mixer.separable": True},
    }
)
# The same of LION's on the Long Range Arena: the rows of Table 6, and Table 5's without HiPPO, for
# LION-s. Row 3's decay, one for each head, is LION-s's own, as HiPPO's are of channels.
LONG_RANGE_ABLATIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "sigmoid_without_scaling": {"mixer.feature_map": "sigmoid", "mixer.normalize": "none"},
        "relu": {"mixer.feature_map": "relu"},
        "scalar_decay": {"mixer.decay": SelectiveDecayConfig()},
        "without_scaling": {"mixer.normalize": "none"},
        "scaling_before_mask": {"mixer.normalize": "sum_before_mask"},
        "without_selectivity": {"mixer.decay.selective": False},
        "softplus_decay": {"mixer.decay.activation": "softplus"},
        "without_hippo": {"mixer.decay": SelectiveDecayConfig(diagonal=True)},
    }
)
ABLATIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {**LIGHTNET_ABLATIONS, **LION_ABLATIONS, **LDN_ABLATIONS, **LONG_RANGE_ABLATIONS}
)
