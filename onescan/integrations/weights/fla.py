"""Language models of flash-linear-attention (fla): LightNet, GLA and DeltaNet, as `CausalLM`.

Names of tensors and settings are those of https://github.com/fla-org/flash-linear-attention.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from onescan.configs import ModelConfig
from onescan.integrations.weights.source import Foreign, Source, Tensors
from onescan.layers.basic import GLUConfig, NormName
from onescan.layers.decays import GLADecayConfig
from onescan.layers.mixers import (
    DeltaRuleMixerConfig,
    LightNetMixerConfig,
    LionMixerConfig,
    MixerConfig,
)
from onescan.models.causal_lm import CausalLMConfig

# The fused norm and gate of fla's LightNet ignores the `norm_eps` of the config.
LIGHTNET_EPS = 1e-6
ATTENTION = "model.layers.0.attn"
# Settings of all models, with the only supported values; see `Foreign.expect`.
COMMON = {
    "attn": None,
    "attnres_block_size": None,
    "use_short_conv": False,
    "hidden_act": ("swish", "silu"),
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How to convert one of fla's models."""

    mixer: Callable[[Foreign], MixerConfig]
    """Return the mixer, from the config and the shapes of the first layer."""
    in_proj: tuple[str, ...]
    """Linear layers whose rows `in_proj` merges, in order; a gate (g_proj) is optional."""
    renamed: Mapping[str, str]
    """Name of each other module of the layer, if present -> native name."""
    expected: Mapping[str, Any] = field(default_factory=dict)
    """Further settings with the only supported values."""


def _config(foreign: Foreign) -> ModelConfig:
    name = foreign.fields["model_type"]
    if name in DIFFERENCES:
        raise ValueError(f"model_type is {name!r}: {DIFFERENCES[name]}")
    architecture = ARCHITECTURES[name]
    foreign.expect(**COMMON, **architecture.expected)
    tensors = foreign.tensors
    vocab_size, width = tensors.shape("model.embeddings.weight")
    hidden = tensors.shape("model.layers.0.mlp.down_proj.weight")[1]
    return CausalLMConfig(
        vocab_size=vocab_size,
        width=width,
        depth=tensors.count("model.layers."),
        mixer=architecture.mixer(foreign),
        mlp=GLUConfig(ratio=hidden / width),
        position=None,
        norm="rms",
        norm_eps=foreign.need("norm_eps"),
        tie_embeddings=_is_tied(foreign),
    )


def _weights(foreign: Foreign) -> dict[str, Tensor]:
    architecture, tensors = ARCHITECTURES[foreign.fields["model_type"]], foreign.tensors
    embedding = tensors.take("model.embeddings.weight")
    weights = {
        "network.embedding.weight": embedding,
        "network.norm.weight": tensors.take("model.norm.weight"),
    }
    if _is_tied(foreign):
        tensors.take_equal("lm_head.weight", embedding)
    else:
        weights["head.weight"] = tensors.take("lm_head.weight")
    renamed = {f"attn.{name}": f"mixer.{native}" for name, native in architecture.renamed.items()}
    renamed |= {"attn_norm": "mixer_norm", "mlp_norm": "mlp_norm"}
    renamed |= {f"mlp.{part}_proj": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    for i in range(tensors.count("model.layers.")):
        layer, block = f"model.layers.{i}", f"network.blocks.{i}"
        merged = [f"{layer}.attn.{name}.weight" for name in architecture.in_proj]
        rows = [tensors.take(name) for name in merged if name in tensors or "g_proj" not in name]
        weights[f"{block}.mixer.in_proj.weight"] = torch.cat(rows)
        for name, native in renamed.items():
            for part in ("weight", "bias"):
                if f"{layer}.{name}.{part}" in tensors:
                    weights[f"{block}.{native}.{part}"] = tensors.take(f"{layer}.{name}.{part}")
    return weights


def _is_tied(foreign: Foreign) -> bool:
    tied = foreign.fields.get("tie_word_embeddings", False)
    return bool(tied) or "lm_head.weight" not in foreign.tensors


def _lightnet(foreign: Foreign) -> MixerConfig:
    tensors = foreign.tensors
    keys, width = tensors.shape(f"{ATTENTION}.q_proj.weight")
    num_heads = foreign.fields.get("num_heads") or width // foreign.need("expand_ratio")
    key_width = keys // num_heads
    return LightNetMixerConfig(
        num_heads=num_heads,
        key_width=_key_width(keys, width, num_heads),
        causal=True,
        lrpe=False,
        norm=_norm(tensors, "g_norm"),
        # fla divides scores by the square root of the key width, onescan does not
        norm_eps=LIGHTNET_EPS * key_width,
        gate_activation="silu",
        gate_rank=tensors.shape(f"{ATTENTION}.g_proj.0.weight")[0],
    )


def _gla(foreign: Foreign) -> MixerConfig:
    tensors, num_heads = foreign.tensors, foreign.need("num_heads")
    keys, width = tensors.shape(f"{ATTENTION}.q_proj.weight")
    foreign.expect(num_kv_heads=(None, num_heads))
    _check_rows(tensors, "v_proj", width)
    has_gate = f"{ATTENTION}.g_proj.weight" in tensors
    norm = "g_norm_swish_gate"
    return LionMixerConfig(
        num_heads=num_heads,
        key_width=_key_width(keys, width, num_heads),
        direction="forward",
        feature_map="identity",
        decay=GLADecayConfig(rank=tensors.shape(f"{ATTENTION}.gk_proj.0.weight")[0]),
        normalize="none",
        norm=_norm(tensors, norm if f"{ATTENTION}.{norm}.weight" in tensors else "g_norm"),
        norm_heads=True,
        norm_eps=foreign.need("norm_eps"),
        gate="silu" if has_gate else "none",
        bias=False,
    )


def _delta_net(foreign: Foreign) -> MixerConfig:
    tensors, num_heads = foreign.tensors, foreign.need("num_heads")
    _, width = tensors.shape(f"{ATTENTION}.q_proj.weight")
    for name in ("q_proj", "v_proj"):
        _check_rows(tensors, name, width)
    return DeltaRuleMixerConfig(
        num_heads=num_heads,
        direction="forward",
        value_map="silu",
        norm="rms",
        norm_heads=True,
        # fla divides scores by the square root of the key width, onescan does not
        norm_eps=foreign.need("norm_eps") * (width // num_heads),
    )


def _norm(tensors: Tensors, name: str) -> NormName:
    return "rms" if f"{ATTENTION}.{name}.weight" in tensors else "simple_rms"


def _key_width(keys: int, width: int, num_heads: int) -> int | None:
    """Return the key width, None if it is the default."""
    return None if keys == width else keys // num_heads


def _check_rows(tensors: Tensors, name: str, width: int) -> None:
    rows, _ = tensors.shape(f"{ATTENTION}.{name}.weight")
    if rows != width:
        raise ValueError(
            f"{name} has {rows} rows, expected {width}, the width of the model: expand_k and "
            "expand_v of this architecture must be 1"
        )


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "lightnet": Architecture(
            mixer=_lightnet,
            in_proj=("q_proj", "k_proj", "v_proj", "g_proj.0"),
            renamed={"g_proj.1": "gate_proj", "g_norm": "norm", "o_proj": "out_proj"},
        ),
        "gla": Architecture(
            mixer=_gla,
            in_proj=("q_proj", "k_proj", "v_proj", "g_proj"),
            renamed={
                "gk_proj.0": "decays.0.down_proj",
                "gk_proj.1": "decays.0.up_proj",
                "g_norm_swish_gate": "norm",
                "g_norm": "norm",
                "o_proj": "out_proj",
            },
            expected={"feature_map": None, "clamp_min": None, "use_gk": True, "use_gv": False},
        ),
        "delta_net": Architecture(
            mixer=_delta_net,
            in_proj=("q_proj", "k_proj", "v_proj"),
            renamed={"b_proj": "beta_proj", "o_norm": "norm", "o_proj": "out_proj"},
            expected={
                "use_gate": False,
                "use_beta": True,
                "qk_activation": "silu",
                "qk_norm": "l2",
                "allow_neg_eigval": False,
            },
        ),
    }
)
# Models that are refused, and what the native layer lacks.
DIFFERENCES: Mapping[str, str] = MappingProxyType(
    {
        "retnet": "its queries and keys are rotated, which LionMixerConfig does not support",
        "gated_deltanet": "its layers have short convolutions and an output gate, which "
        "DeltaRuleMixerConfig does not support",
    }
)


FLA_SOURCES = (
    Source(
        name="flash-linear-attention LightNet, GLA and DeltaNet",
        matches=lambda foreign: (
            foreign.fields.get("model_type") in (*ARCHITECTURES, *DIFFERENCES)
            and "model.embeddings.weight" in foreign.tensors
        ),
        config=_config,
        weights=_weights,
    ),
)
