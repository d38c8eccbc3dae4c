"""Language models of every kind, so small that a test takes no time."""

import pytest
import torch

from onescan.layers.basic import GLUConfig, MLPConfig
from onescan.layers.decays import FixedDecayConfig, GatedDeltaNetDecayConfig
from onescan.layers.mixers import (
    DeltaProductMixerConfig,
    DeltaRuleMixerConfig,
    GatedDeltaNetMixerConfig,
    HybridMixerConfig,
    HydraMixerConfig,
    KDAMixerConfig,
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
    LionMixerConfig,
    Mamba2MixerConfig,
    MambaMixerConfig,
    RWKV6MixerConfig,
    SoftmaxMixerConfig,
)
from onescan.layers.position import ToeplitzPositionConfig, TokenPositionConfig
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.masked_lm import MaskedLMConfig

VOCABULARY, WIDTH, TOKENS = 13, 24, 9
SMALL = {"vocab_size": VOCABULARY, "width": WIDTH, "depth": 2, "init_std": 0.2}
TPE = ToeplitzPositionConfig(hidden_states=4)
PLACES = TokenPositionConfig(max_tokens=40)
CAUSAL = {
    "lightnet": {"mixer": LightNetMixerConfig(num_heads=3, direction="forward"), "position": TPE},
    "lightnet own decay": {
        "mixer": LightNetMixerConfig(
            num_heads=3, direction="forward", decay_logits="offset", decay_rank=4
        ),
        "position": None,
    },
    "lion": {"mixer": LionMixerConfig(num_heads=3, direction="forward"), "position": None},
    "delta": {"mixer": DeltaRuleMixerConfig(num_heads=3, direction="forward"), "position": TPE},
    "rwkv6": {"mixer": RWKV6MixerConfig(num_heads=3, direction="forward"), "position": None},
    "mamba": {"mixer": MambaMixerConfig(direction="forward", state_size=4), "position": None},
    "mamba2": {
        "mixer": Mamba2MixerConfig(num_heads=3, direction="forward", key_width=4),
        "position": None,
    },
    "ldn": {
        "mixer": LinearDiffusionMixerConfig(
            num_heads=3, direction="forward", sigmas=(1.0,), max_sigma=2.0
        ),
        "mlp": None,
        "position": PLACES,
    },
    "gpt2": {
        "mixer": SoftmaxMixerConfig(num_heads=3, direction="forward"),
        "mlp": MLPConfig(),
        "position": PLACES,
    },
}
# options of mixers, with parts of their own in the state
OPTIONS = {
    "deltanet": {
        "mixer": DeltaRuleMixerConfig(
            num_heads=3, direction="forward", conv_size=4, value_map="silu", gate="silu"
        ),
        "position": None,
    },
    "kda": {
        "mixer": KDAMixerConfig(num_heads=3, direction="forward", gate_rank=4),
        "position": None,
    },
    "gated_delta_product": {
        "mixer": DeltaProductMixerConfig(
            num_heads=3, direction="forward", decay=GatedDeltaNetDecayConfig(), conv_size=None
        ),
        "position": None,
    },
    "retnet": {
        "mixer": LionMixerConfig(
            num_heads=3,
            direction="forward",
            feature_map="identity",
            decay=FixedDecayConfig(),
            normalize="none",
            norm="rms",
            value_width=16,
            gate="silu",
            rotary=True,
        ),
        "position": None,
    },
    "ldn, free kernels": {
        "mixer": LinearDiffusionMixerConfig(
            num_heads=3,
            direction="forward",
            kernel="free",
            kernels=None,
            sigmas=(1.0,),
            max_sigma=2.0,
        ),
        "mlp": None,
        "position": PLACES,
    },
    "hybrid": {
        "mixer": HybridMixerConfig(
            linear=LightNetMixerConfig(num_heads=3, direction="forward", leak=(2.0, 8.0)),
            attention=SoftmaxMixerConfig(num_heads=2, direction="forward", window=3, rotary=True),
            period=2,
        ),
        "position": None,
    },
}
BOTH = {
    "lightnet": {
        "mixer": LightNetMixerConfig(num_heads=3),
        "position": ToeplitzPositionConfig(hidden_states=4, bidirectional=True),
    },
    "lion": {"mixer": LionMixerConfig(num_heads=3), "position": None},
    "gated_deltanet": {"mixer": GatedDeltaNetMixerConfig(num_heads=3), "position": None},
    "vim": {"mixer": MambaMixerConfig(state_size=4), "position": None},
    "hydra": {"mixer": HydraMixerConfig(num_heads=3, state_size=4), "position": None},
    "ldn": {
        "mixer": LinearDiffusionMixerConfig(num_heads=3),
        "mlp": None,
        "position": PLACES,
        "norm": "layer",
    },
    "hybrid": {
        "mixer": HybridMixerConfig(
            linear=LionMixerConfig(num_heads=3),
            attention=SoftmaxMixerConfig(num_heads=2, window=3, rotary=True),
            period=2,
        ),
        "position": None,
    },
    "bert": {
        "mixer": SoftmaxMixerConfig(num_heads=3, dropout=0.1),
        "mlp": MLPConfig(),
        "position": PLACES,
        "segment_types": 2,
        "embedding_norm": True,
        "norm_position": "post",
        "norm_eps": 1e-12,
    },
}
over_causal = pytest.mark.parametrize("change", CAUSAL.values(), ids=CAUSAL)
over_all_causal = pytest.mark.parametrize(
    "change", [*CAUSAL.values(), *OPTIONS.values()], ids=[*CAUSAL, *OPTIONS]
)
over_both = pytest.mark.parametrize("change", BOTH.values(), ids=BOTH)


def ids(*shape, seed=0):
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def built(config):
    """A model as after training: no parameter is where it starts."""
    model = config.build().double().eval()
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=g, dtype=torch.float64)
            parameter.add_(0.2 * noise)
    return model


def causal(change, **more):
    return built(CausalLMConfig(**{**SMALL, "mlp": GLUConfig(), **change, **more}))


def padded(tokens, lengths, side):
    """Each row cut to its length and filled up with what must not matter; and what is real."""
    rows, keep = torch.full_like(tokens, 5), torch.zeros_like(tokens, dtype=torch.bool)
    for row, real, source, n in zip(rows, keep, tokens, lengths, strict=True):
        part = slice(len(row) - n, None) if side == "left" else slice(n)
        row[part], real[part] = source[:n], True
    return rows, keep


def writer(**more):
    vocabulary = {**SMALL, "vocab_size": 258, **CAUSAL["lightnet"], **more}
    return CausalLMConfig(**vocabulary).build().eval()


def masked(change, **more):
    return built(MaskedLMConfig(**{**SMALL, **change, **more}))
