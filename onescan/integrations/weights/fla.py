"""Language models of flash-linear-attention (fla), as `CausalLM`.

These are LightNet, GLA, RetNet, DeltaNet, Gated DeltaNet and Gated DeltaProduct. Names of tensors
and settings are those of https://github.com/fla-org/flash-linear-attention.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from onescan.checks import check_choice
from onescan.configs import ModelConfig
from onescan.integrations.weights.source import Foreign, Source, Tensors
from onescan.layers.basic import GLUConfig, NormName
from onescan.layers.decays import (
    FixedDecayConfig,
    GatedDeltaNetDecayConfig,
    GLADecayConfig,
    NoDecayConfig,
    retnet_logits,
)
from onescan.layers.mixers import (
    DeltaRuleMixerConfig,
    LightNetMixerConfig,
    LionMixerConfig,
    MixerConfig,
)
from onescan.models.causal_lm import CausalLMConfig
from onescan.ops.feature_maps import FeatureMapName

# The fused norm and gate of fla's LightNet ignores the `norm_eps` of the config.
LIGHTNET_EPS = 1e-6
ATTENTION = "model.layers.0.attn"
FEATURE_MAPS: dict[str, FeatureMapName] = {
    "identity": "identity",
    "relu": "relu",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "swish": "silu",
}
QK_ACTIVATIONS: dict[str, FeatureMapName] = {
    "silu": "silu",
    "relu": "relu",
    "elu": "elu_plus_one",
    "identity": "identity",
}
# Settings of all models, with the only supported values; see `Foreign.expect`.
COMMON = {
    "attn": None,
    "attnres_block_size": None,
    "hidden_act": ("swish", "silu"),
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How to convert one of fla's models."""

    mixer: Callable[[Foreign], MixerConfig]
    """Return the mixer, from the config and the shapes of the first layer."""
    renamed: Mapping[str, str]
    """Name of a module or a parameter of the layer, if present -> native name."""
    gate: str = "g_proj"
    """Linear layer of the output gate, or the first of two, if present. `in_proj` merges its rows
    with those of q_proj, k_proj and v_proj."""
    expected: Mapping[str, Any] = field(default_factory=dict)
    """Further settings with the only supported values."""
    heads: tuple[str, str] = ("num_heads", "num_kv_heads")
    """Settings: the number of heads, and the smaller number of heads that share parameters."""
    shared: re.Pattern[str] = re.compile(r"\.(k_proj|v_proj|k_conv1d|v_conv1d|gk_proj\.1)\.")
    """Tensors with rows for each of the shared heads."""


def _config(foreign: Foreign) -> ModelConfig:
    name = foreign.fields["model_type"]
    if name in UNSUPPORTED:
        raise ValueError(f"model_type is {name!r}: {UNSUPPORTED[name]}")
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
    renamed |= {"attn.o_proj": "mixer.out_proj", "attn_norm": "mixer_norm", "mlp_norm": "mlp_norm"}
    renamed |= {f"mlp.{part}_proj": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    for i in range(tensors.count("model.layers.")):
        layer, block = f"model.layers.{i}", f"network.blocks.{i}"
        weights |= _merged(foreign, f"{layer}.attn", f"{block}.mixer", architecture.gate)
        for name, native in renamed.items():
            for part in (".weight", ".bias", ""):
                if f"{layer}.{name}{part}" in tensors:
                    weights[f"{block}.{native}{part}"] = _taken(foreign, f"{layer}.{name}{part}")
        if foreign.fields["model_type"] == "retnet":
            logits = retnet_logits(foreign.need("num_heads"))
            weights[f"{block}.mixer.decays.0.logit"] = logits.to(embedding.dtype)
    return weights


def _merged(foreign: Foreign, attn: str, mixer: str, gate: str) -> dict[str, Tensor]:
    """Return the merged projection and, if present, the merged convolution."""
    tensors = foreign.tensors
    rows = [_taken(foreign, f"{attn}.{x}_proj.weight") for x in "qkv"]
    if f"{attn}.{gate}.weight" in tensors:
        rows.append(tensors.take(f"{attn}.{gate}.weight"))
    weights = {f"{mixer}.in_proj.weight": torch.cat(rows)}
    for part in ("weight", "bias"):
        if f"{attn}.q_conv1d.{part}" in tensors:
            filters = [_taken(foreign, f"{attn}.{x}_conv1d.{part}") for x in "qkv"]
            weights[f"{mixer}.conv.{part}"] = torch.cat(filters)
    return weights


def _taken(foreign: Foreign, name: str) -> Tensor:
    """Return and use a tensor; rows that several heads share are repeated for each."""
    tensor = foreign.tensors.take(name)
    heads, shared = _heads(foreign)
    if shared == heads or not ARCHITECTURES[foreign.fields["model_type"]].shared.search(name):
        return tensor
    if len(tensor) % shared:
        raise ValueError(f"{name} has {len(tensor)} rows, expected a multiple of {shared} heads")
    return tensor.unflatten(0, (shared, -1)).repeat_interleave(heads // shared, 0).flatten(0, 1)


def _heads(foreign: Foreign) -> tuple[Any, Any]:
    """Return the number of heads, and the number of heads with parameters of their own.

    Both are None in some LightNets, which share nothing.

    Raises:
        ValueError: If the second number does not divide the first.
    """
    names = ARCHITECTURES[foreign.fields["model_type"]].heads
    heads, shared = (foreign.fields.get(name) for name in names)
    heads, shared = heads or shared, shared or heads
    if heads is not None and heads % shared:
        raise ValueError(f"{names[1]} is {shared}, expected a divisor of {names[0]} {heads}")
    return heads, shared


def _is_tied(foreign: Foreign) -> bool:
    tied = foreign.fields.get("tie_word_embeddings", False)
    return bool(tied) or "lm_head.weight" not in foreign.tensors


def _lightnet(foreign: Foreign) -> MixerConfig:
    tensors = foreign.tensors
    keys, width = tensors.shape(f"{ATTENTION}.q_proj.weight")
    num_heads = foreign.fields.get("num_heads") or width // foreign.need("expand_ratio")
    return LightNetMixerConfig(
        num_heads=num_heads,
        key_width=_head_width(keys, width, num_heads),
        direction="forward",
        lrpe=False,
        norm=_norm(tensors, "g_norm"),
        # fla divides scores by the square root of the key width, onescan does not
        norm_eps=LIGHTNET_EPS * (keys // num_heads),
        gate="silu",
        gate_rank=tensors.shape(f"{ATTENTION}.g_proj.0.weight")[0],
        **_convolution(foreign),
    )


def _gla(foreign: Foreign) -> MixerConfig:
    rank = foreign.tensors.shape(f"{ATTENTION}.gk_proj.0.weight")[0]
    return _linear_attention(foreign, decay=GLADecayConfig(rank=rank))


def _retnet(foreign: Foreign) -> MixerConfig:
    decay = FixedDecayConfig(init="retnet", learnable=False)
    return _linear_attention(foreign, decay=decay, rotary=True)


def _linear_attention(foreign: Foreign, **fields: Any) -> MixerConfig:
    tensors, num_heads = foreign.tensors, foreign.need("num_heads")
    keys, width = tensors.shape(f"{ATTENTION}.q_proj.weight")
    values = tensors.shape(f"{ATTENTION}.o_proj.weight")[1]
    convolution, norm = _convolution(foreign), "g_norm_swish_gate"
    if convolution:  # fla's convolutions include SiLU
        foreign.expect(feature_map=None)
    feature_map = foreign.fields.get("feature_map") or "identity"
    check_choice("feature_map", feature_map, FEATURE_MAPS)
    return LionMixerConfig(
        num_heads=num_heads,
        key_width=_head_width(keys, width, num_heads),
        value_width=_head_width(values, width, num_heads),
        direction="forward",
        feature_map="silu" if convolution else FEATURE_MAPS[feature_map],
        value_map="silu" if convolution else "identity",
        normalize="none",
        norm=_norm(tensors, norm if f"{ATTENTION}.{norm}.weight" in tensors else "g_norm"),
        norm_heads=True,
        norm_eps=foreign.need("norm_eps"),
        gate="silu" if f"{ATTENTION}.g_proj.weight" in tensors else "none",
        bias=False,
        **convolution,
        **fields,
    )


def _delta_net(foreign: Foreign) -> MixerConfig:
    activation = foreign.fields.get("qk_activation", "silu")
    check_choice("qk_activation", activation, QK_ACTIVATIONS)
    return _delta_rule(
        foreign,
        feature_map=QK_ACTIVATIONS[activation],
        qk_norm=foreign.fields.get("qk_norm", "l2"),
        beta=foreign.fields.get("use_beta", True),
    )


def _gated_delta_net(foreign: Foreign) -> MixerConfig:
    has_decay = f"{ATTENTION}.a_proj.weight" in foreign.tensors
    return _delta_rule(
        foreign,
        updates=foreign.fields.get("num_householder", 1),
        decay=GatedDeltaNetDecayConfig() if has_decay else NoDecayConfig(),
    )


def _delta_rule(foreign: Foreign, **fields: Any) -> MixerConfig:
    foreign.need("num_heads")
    tensors, (num_heads, shared) = foreign.tensors, _heads(foreign)
    keys = tensors.shape(f"{ATTENTION}.q_proj.weight")[0]
    values = tensors.shape(f"{ATTENTION}.o_proj.weight")[1]
    return DeltaRuleMixerConfig(
        num_heads=num_heads,
        key_width=keys // shared,
        value_width=values // num_heads,
        direction="forward",
        value_map="silu",
        negative_eigenvalues=foreign.fields.get("allow_neg_eigval", False),
        norm="rms",
        norm_heads=True,
        # fla divides scores by the square root of the key width, onescan does not
        norm_eps=foreign.need("norm_eps") * (keys // shared),
        gate="silu" if f"{ATTENTION}.g_proj.weight" in tensors else "none",
        **_convolution(foreign),
        **fields,
    )


def _convolution(foreign: Foreign) -> dict[str, Any]:
    """Return the settings of short convolutions; none if there are no convolutions."""
    name = f"{ATTENTION}.q_conv1d"
    if f"{name}.weight" not in foreign.tensors:
        if foreign.fields["model_type"] != "retnet":  # which ignores the setting
            foreign.expect(use_short_conv=False)
        return {}
    size = foreign.tensors.shape(f"{name}.weight")[-1]
    return {"conv_size": size, "conv_bias": f"{name}.bias" in foreign.tensors}


def _norm(tensors: Tensors, name: str) -> NormName:
    return "rms" if f"{ATTENTION}.{name}.weight" in tensors else "simple_rms"


def _head_width(channels: int, width: int, num_heads: int) -> int | None:
    """Return the width of heads with this number of channels in total, None if it is default."""
    return None if channels == width else channels // num_heads


GATED_DELTA_RULE = {
    "a_proj": "decay.proj",
    "A_log": "decay.log_rate",
    "dt_bias": "decay.dt_bias",
    "b_proj": "beta_proj",
    "o_norm": "norm",
}
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "lightnet": Architecture(
            mixer=_lightnet, gate="g_proj.0", renamed={"g_proj.1": "gate_proj", "g_norm": "norm"}
        ),
        "gla": Architecture(
            mixer=_gla,
            renamed={
                "gk_proj.0": "decays.0.down_proj",
                "gk_proj.1": "decays.0.up_proj",
                "g_norm_swish_gate": "norm",
                "g_norm": "norm",
            },
            expected={"clamp_min": None, "use_gk": True, "use_gv": False},
        ),
        "retnet": Architecture(
            mixer=_retnet, renamed={"g_norm_swish_gate": "norm", "g_norm": "norm"}
        ),
        "delta_net": Architecture(
            mixer=_delta_net,
            renamed={"b_proj": "beta_proj", "o_norm": "norm"},
            expected={
                "qk_norm": ("l2", "sum"),
                "use_beta": (True, False),
                "allow_neg_eigval": (True, False),
            },
        ),
        "gated_deltanet": Architecture(
            mixer=_gated_delta_net,
            renamed=GATED_DELTA_RULE,
            heads=("num_v_heads", "num_heads"),
            shared=re.compile(r"\.(q|k)_(proj|conv1d)\."),
        ),
        "gated_deltaproduct": Architecture(
            mixer=_gated_delta_net,
            renamed=GATED_DELTA_RULE,
            expected={"num_v_heads": None},
        ),
    }
)
# model_type -> why it is not supported
UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {"kda": "its output gate has a bias, which KDAMixerConfig cannot represent"}
)


FLA_SOURCES = (
    Source(
        name=(
            "flash-linear-attention LightNet, GLA, RetNet, DeltaNet, Gated DeltaNet and "
            "Gated DeltaProduct"
        ),
        matches=lambda foreign: (
            foreign.fields.get("model_type") in (*ARCHITECTURES, *UNSUPPORTED)
            and "model.embeddings.weight" in foreign.tensors
        ),
        config=_config,
        weights=_weights,
    ),
)
