"""Presets for every model size in the papers, with published parameter counts, and ablations.

A preset is a row of `_ROWS`: a family, whose config it changes, and the sizes given in its paper.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from onescan.allocation import build_model
from onescan.checks import check_choice
from onescan.configs import ModelConfig, replace
from onescan.layers.basic import GLUConfig, MLPConfig
from onescan.layers.decays import (
    FixedDecayConfig,
    HGRN2DecayConfig,
    KDADecayConfig,
    NoDecayConfig,
    SelectiveDecayConfig,
)
from onescan.layers.mixers import (
    LINEAR_TRANSFORMERS,
    GatedDeltaNetMixerConfig,
    HGRNMixerConfig,
    HybridMixerConfig,
    HydraMixerConfig,
    KDAMixerConfig,
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
    LionMixerConfig,
    Mamba2MixerConfig,
    MambaMixerConfig,
    MixerConfig,
    SoftmaxMixerConfig,
    VisionRWKVMixerConfig,
)
from onescan.layers.position import (
    AbsolutePositionConfig,
    SinusoidalPositionConfig,
    ToeplitzPositionConfig,
    TokenPositionConfig,
)
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.denoiser import DenoiserConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.models.masked_lm import MaskedLMConfig

BERT_MAX_TOKENS, GPT2_MAX_TOKENS, WIKITEXT_MAX_TOKENS = 512, 1024, 512
DENOISER_PATCHES = (2, 4, 8)
# Columns of LightNet's Tables 1 and 7 with parameter counts: keys of `LIGHTNET_ABLATIONS`.
PRINTED_ABLATIONS = (
    "without_tpe",
    "without_lrpe",
    "without_decay",
    "without_norm",
    "full_rank_gate",
)
LION_NAMES = {
    "lit": "LION-lit",
    "d": "LION-d",
    "s": "LION-s",
    "d_natural": "LION-d natural, along rows and columns",
    "s_natural": "LION-s natural, along rows and columns",
}


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named config, and the figures published in its paper."""

    config: ModelConfig
    printed_millions: float | int | None
    """Published number of parameters in millions. An int means that the paper truncates it, a float
    that the paper rounds it; None if no count is published."""
    source: str
    printed_gmacs: float | None = None
    """Published multiply-accumulates of one forward pass in billions; None if not published."""
    printed_ablations: Mapping[str, float] = field(default_factory=dict)
    """Published number of parameters in millions, for some keys of `ABLATIONS`."""


class _Family(NamedTuple):
    """The config shared by models of one kind, except for sizes, and its source."""

    config: ModelConfig
    source: str


class _Row(NamedTuple):
    """A preset: a family with sizes, other changed fields, and published figures."""

    name: str
    family: _Family
    depth: int
    width: int
    num_heads: int
    printed_millions: float | int | None
    changes: Mapping[str, Any] = MappingProxyType({})
    printed_gmacs: float | None = None
    printed_ablations: Mapping[str, float] = MappingProxyType({})


_LIGHTNET = _Family(ImageClassifierConfig(), "LightNet, arXiv:2405.21022, Tables 1, 7 and 15")
_DEIT = _Family(
    ImageClassifierConfig(
        mixer=SoftmaxMixerConfig(), mlp=MLPConfig(), position=AbsolutePositionConfig()
    ),
    "LightNet, arXiv:2405.21022, Table 1",
)


# The multi-scan baselines of LightNet's Table 1. All scan rows from left to right and back.
# HGRN and HGRN2: no class token, biases everywhere, and the widths of GLUs that give the published
# counts: 2 and 3 times the width. HGRN uses patches of 14 x 14; with them, HGRN2 would not have
# 23.8 million parameters. HGRN2 counts a token once, where its code counts it in both scans.
_HGRN = _Family(
    ImageClassifierConfig(
        patch_size=(14, 14),
        mixer=HGRNMixerConfig(),
        mlp=GLUConfig(ratio=2.0, bias=True),
        position=None,
        pool="mean",
        drop_path=0.0,
    ),
    "LightNet, arXiv:2405.21022, Table 1; HGRN, arXiv:2311.04823",
)
_HGRN2 = _Family(
    ImageClassifierConfig(
        mixer=LionMixerConfig(
            feature_map="sigmoid",
            value_map="silu",
            decay=HGRN2DecayConfig(learned_lower_bound=True),
            normalize="none",
            norm="layer",
        ),
        mlp=GLUConfig(ratio=3.0, bias=True),
        position=None,
        pool="mean",
        drop_path=0.0,
    ),
    "LightNet, arXiv:2405.21022, Table 1; HGRN2, arXiv:2404.07904",
)
# TransNormerLLM (TNL) with RetNet's decays and without rotations. The published counts fit
# LightNet's gate of rank 64 and norms, and biases in the GLU only.
_TNL_MIXER = LionMixerConfig(
    feature_map="silu",
    decay=FixedDecayConfig(init="retnet", learnable=False),
    normalize="none",
    norm="layer",
    gate="sigmoid",
    gate_rank=64,
    bias=False,
)
_TNL = _Family(
    ImageClassifierConfig(mixer=_TNL_MIXER, mlp=GLUConfig(bias=True), position=None),
    "LightNet, arXiv:2405.21022, Table 1; TNL, arXiv:2307.14995",
)


def _lion(mixer: LionMixerConfig) -> _Family:
    """DeiT with another mixer, pooled by the mean of all tokens; with positions if no decay."""
    position = AbsolutePositionConfig() if isinstance(mixer.decay, NoDecayConfig) else None
    return _Family(
        ImageClassifierConfig(
            mixer=mixer, mlp=MLPConfig(), position=position, pool="mean_with_class_token"
        ),
        "LION, arXiv:2502.16249, Tables 2 and 12",
    )


_D, _S = LionMixerConfig(decay=FixedDecayConfig()), LionMixerConfig(decay=SelectiveDecayConfig())
_LION_LIT, _LION_D, _LION_S = _lion(LionMixerConfig(decay=NoDecayConfig())), _lion(_D), _lion(_S)
_LION_D_NATURAL, _LION_S_NATURAL = (
    _lion(replace(mixer, {"scan": "natural"})) for mixer in (_D, _S)
)
# The shapes are ViT's. Each block consists of the mixer only, without an MLP.
_LDN = _Family(
    ImageClassifierConfig(
        mixer=LinearDiffusionMixerConfig(),
        mlp=None,
        position=AbsolutePositionConfig(),
        pool="mean",
        drop_path=0.0,
    ),
    "LDN, arXiv:2502.12381, Table 1",
)
# LDN's baseline, whose figures are those of ViT, arXiv:2010.11929. No patch that divides 224 gives
# ViT-H the 120.5 GMACs of the table: patches of 16 x 16, as in LDN's own rows, give 127.3, and the
# 14 x 14 of ViT-H/14 give 167.3; both have 632 million parameters. ViT-L has 304.3 of the printed
# 307 million.
_VIT = _Family(replace(_DEIT.config, {"drop_path": 0.0}), "LDN, arXiv:2502.12381, Table 1")
# Each layer consists of two blocks: spatial and channel mixing.
_VISION_RWKV = _Family(
    ImageClassifierConfig(
        mixer=VisionRWKVMixerConfig(part="alternating"),
        mlp=None,
        position=AbsolutePositionConfig(),
        pool="mean",
    ),
    "Vision-RWKV, arXiv:2403.02308; LightNet, arXiv:2405.21022, Table 1",
)
# Vim as in LightNet's and LION's tables, with a class token between the halves of the patches.
_VIM = _Family(
    ImageClassifierConfig(
        mixer=MambaMixerConfig(prefix_position="middle"),
        mlp=None,
        position=AbsolutePositionConfig(),
        norm="rms",
    ),
    "Vim, arXiv:2401.09417, Table 1; LightNet, Table 1; LION, Tables 2 and 12",
)
# Hydra replaces the attention and the MLP of ViT and has no positions. Its paper gives 24 blocks
# and 91M for the base size: 24 blocks have 90.8 million parameters if both directions share B and
# C, as in its pseudocode, and 93.2 million otherwise. LION gives no shape for 22M, which 22 blocks
# match.
_HYDRA = _Family(
    ImageClassifierConfig(
        mixer=HydraMixerConfig(shared_keys=True), mlp=None, position=None, drop_path=0.5
    ),
    "Hydra, arXiv:2407.09941, Table 5 and App. D.2; LION, Table 2",
)
# Signals, such as one second at 1 kHz, and video of 16 frames. No paper describes such models.
_SIGNAL = {"image_size": (1000,), "patch_size": (10,), "channels": 1}
_VIDEO = {"image_size": (16, 224, 224), "patch_size": (2, 16, 16)}
_NO_PAPER = "the blocks of {0}, with patches along {1}; no paper describes this model"


def _with_axes(family: _Family, sizes: Mapping[str, Any], model: str, axes: str) -> _Family:
    return _Family(replace(family.config, sizes), _NO_PAPER.format(model, axes))


_LIGHTNET_SIGNAL = _with_axes(_LIGHTNET, _SIGNAL, "LightNet's image models", "one axis")
_LIGHTNET_VIDEO = _with_axes(_LIGHTNET, _VIDEO, "LightNet's image models", "three axes")
_LION_S_NATURAL_VIDEO = _with_axes(
    _LION_S_NATURAL, _VIDEO, "LION-s", "three axes, each with its own scan order"
)
# Two hybrids. Three of four layers are linear in Kimi Linear, arXiv:2510.26692; two of three in
# Griffin, arXiv:2402.19427, whose attention is local with rotary positions.
_LIGHTNET_HYBRID = _Family(
    replace(_LIGHTNET.config, {"mixer": HybridMixerConfig()}),
    "LightNet's image models with softmax attention in every fourth block; no paper describes "
    "this model",
)
# Gated DeltaNet in both directions, along rows and columns.
_GATED_DELTANET = _Family(
    replace(_LION_S.config, {"mixer": GatedDeltaNetMixerConfig(scan="natural")}),
    "Gated DeltaNet, arXiv:2412.06464, in the blocks of LION's image models; no paper describes "
    "this model",
)
# The condition is added as tokens. With adaLN-Zero in each block, no published size matches.
_LIGHTNET_DIT = _Family(DenoiserConfig(), "LightNet, arXiv:2405.21022, Table 14")
# Table 3 gives XL/2 672M parameters, but Table 14 680M: the difference is the output gate.
_LIGHTNET_DIT_NO_GATE = _Family(
    replace(DenoiserConfig(), {"mixer.gate": "none"}), "LightNet, arXiv:2405.21022, Table 3"
)
_DIT = _Family(
    DenoiserConfig(
        mixer=SoftmaxMixerConfig(),
        mlp=MLPConfig(),
        position=SinusoidalPositionConfig(),
        condition="adaln_zero",
    ),
    "DiT, arXiv:2212.09748, Table 4",
)


def _two_scans(family: _Family) -> _Family:
    """Return LightNet's denoiser with the mixer and the MLP of a classifier, without MD-TPE."""
    changes = {field: getattr(family.config, field) for field in ("mixer", "mlp")}
    config = replace(DenoiserConfig(position=None), changes)
    return _Family(config, "LightNet, arXiv:2405.21022, Table 10")


def _lightnet_lm(source: str) -> _Family:
    """Norms have no parameters; otherwise WikiText-103's model would not have 45.07 million."""
    mixer = LightNetMixerConfig(direction="forward", gate_rank=128)
    return _Family(
        CausalLMConfig(vocab_size=50272, mixer=mixer, norm="simple_rms"),
        f"LightNet, arXiv:2405.21022, {source}",
    )


_LM_WIKITEXT, _LM_V1, _LM, _LM_PILE, _LM_SPEED = map(
    _lightnet_lm, ("Table 5", "v1, Table 10", "Table 13", "Table 6", "Table 4")
)
_HYBRID_LM = _Family(
    replace(
        _LM_WIKITEXT.config,
        {
            "mixer": HybridMixerConfig(
                linear=LightNetMixerConfig(direction="forward"),
                attention=SoftmaxMixerConfig(
                    direction="forward", window=256, bias=False, rotary=True
                ),
                period=3,
            )
        },
    ),
    "the blocks of LightNet's Table 5, with sliding-window attention in every third block; no "
    "paper describes this model",
)
# Table 6 prints 379M, and 385M for "no share". LLaMA's 385M, 26 layers and the vocabulary 50272 fix
# the shape, but an MLP of width 8/3 * 1024 = 2730 and a gate of rank 128 make 385.6M even without
# separate decays. Closest to 379M is the image models' gate of rank 64 and an MLP of width 2688,
# which is 8/3 * 1024 rounded down to a multiple of 128.
_LM_379M = {"mixer.gate_rank": 64, "mlp.ratio": 2688 / 1024}


# The baselines of LightNet's Tables 5 and 6. HGRN's configuration for WikiText-103 is a Transformer
# of 6 x 512 with tied embeddings; for Table 6, the width of TNL's GLU gives the published count.
_HGRN_LM = _Family(
    CausalLMConfig(
        mixer=HGRNMixerConfig(direction="forward"),
        mlp=GLUConfig(ratio=2.0, bias=True),
        position=None,
        dropout=0.1,
    ),
    "LightNet, arXiv:2405.21022, Table 5; HGRN, arXiv:2311.04823",
)


def _wikitext(mixer: MixerConfig) -> _Family:
    position = TokenPositionConfig(max_tokens=WIKITEXT_MAX_TOKENS, learned=False)
    return _Family(
        CausalLMConfig(mixer=mixer, mlp=MLPConfig(), position=position, dropout=0.1),
        "LightNet, arXiv:2405.21022, Table 5",
    )


_TRANSFORMER_LM = _wikitext(SoftmaxMixerConfig(direction="forward"))
_LINEAR_LM = _wikitext(
    LionMixerConfig(feature_map="elu_plus_one", decay=NoDecayConfig(), direction="forward")
)
_TNL_LM = _Family(
    CausalLMConfig(
        vocab_size=50272,
        mixer=replace(_TNL_MIXER, {"direction": "forward", "norm": "simple_rms"}),
        mlp=GLUConfig(ratio=21 / 8),
        position=None,
        norm="simple_rms",
    ),
    "LightNet, arXiv:2405.21022, Table 6; TNL, arXiv:2307.14995",
)
_LLAMA = _Family(
    CausalLMConfig(
        vocab_size=50272,
        mixer=SoftmaxMixerConfig(direction="forward", bias=False, rotary=True),
        mlp=GLUConfig(multiple_of=256),
        position=None,
        norm="rms",
    ),
    "LightNet, arXiv:2405.21022, Table 6; LLaMA, arXiv:2302.13971",
)


def _gpt2(mixer: MixerConfig, position: TokenPositionConfig | None) -> _Family:
    return _Family(
        CausalLMConfig(vocab_size=50257, mixer=mixer, mlp=MLPConfig(), position=position),
        "LION, arXiv:2502.16249, causal language modeling",
    )


_LION_LM = _gpt2(LionMixerConfig(direction="forward"), None)
_GPT2 = _gpt2(
    SoftmaxMixerConfig(direction="forward"), TokenPositionConfig(max_tokens=GPT2_MAX_TOKENS)
)
# Linear attention, arXiv:2006.16236, has no decay to encode positions with.
_LINEAR_GPT2 = _gpt2(
    replace(LINEAR_TRANSFORMERS["linear_attention_scaled"], {"direction": "forward"}),
    TokenPositionConfig(max_tokens=GPT2_MAX_TOKENS),
)
# LightNet prints 385M for Mamba and no shape. With Mamba's own width of 1024, 50 blocks have 384.8
# million parameters; Mamba's 370M model has 48 blocks.
_MAMBA_LM = _Family(
    CausalLMConfig(
        vocab_size=50272,
        mixer=MambaMixerConfig(direction="forward"),
        mlp=None,
        position=None,
        norm="rms",
        norm_eps=1e-5,
    ),
    "Mamba, arXiv:2312.00752; LightNet, arXiv:2405.21022, Table 6",
)


# Mamba-2's 1.3B model: 48 blocks of width 2048, with heads of 64 value channels. LightNet gives no
# shape for the model of its Figure 5.
_MAMBA2_LM = _Family(
    CausalLMConfig(
        vocab_size=50272,
        mixer=Mamba2MixerConfig(direction="forward"),
        mlp=None,
        position=None,
        norm="rms",
        norm_eps=1e-5,
    ),
    "Mamba-2, arXiv:2405.21060, Table 10; LightNet, arXiv:2405.21022, Figure 5",
)


def _delta_lm(mixer: MixerConfig, source: str) -> _Family:
    """LLaMA's blocks with another mixer, whose ranks are the width of a head of 64, as in KDA."""
    return _Family(
        CausalLMConfig(
            vocab_size=50265, mixer=mixer, mlp=GLUConfig(multiple_of=256), position=None, norm="rms"
        ),
        f"{source}; no paper describes this model",
    )


_GATED_DELTANET_LM = _delta_lm(
    GatedDeltaNetMixerConfig(direction="forward"), "Gated DeltaNet, arXiv:2412.06464"
)
_KDA_LM = _delta_lm(
    KDAMixerConfig(direction="forward", decay=KDADecayConfig(rank=64), gate_rank=64),
    "Kimi Linear, arXiv:2510.26692, without its softmax attention",
)
# Table 2 gives no size. The vocabulary, depth, embedding norm and head are Cramming's,
# arXiv:2212.14034, with LightNet's blocks and positions. Positions are one-sided (Eq. 17), as in
# the image models: the paper mentions no other form of TPE.
_LIGHTNET_MLM = _Family(
    MaskedLMConfig(
        vocab_size=32768,
        position=ToeplitzPositionConfig(),
        embedding_norm=True,
        head_transform=False,
    ),
    "LightNet, arXiv:2405.21022, Table 2, in the Cramming setting, arXiv:2212.14034; one-sided "
    "TPE, as in Eq. 17",
)

# Crammed BERT, the baseline of Table 2: GELU in gated units of 1536, no biases in attention, and
# sines and cosines as positions, which Cramming scales by a learned factor.
_CRAMMED_BERT = _Family(
    MaskedLMConfig(
        vocab_size=32768,
        mixer=SoftmaxMixerConfig(bias=False),
        mlp=GLUConfig(ratio=2.0, activation="gelu"),
        position=TokenPositionConfig(max_tokens=BERT_MAX_TOKENS, learned=False),
        embedding_norm=True,
        norm_eps=1e-12,
        head_transform=False,
    ),
    "Cramming, arXiv:2212.14034; LightNet, arXiv:2405.21022, Table 2",
)


def _bert(mixer: MixerConfig, position: TokenPositionConfig | None) -> _Family:
    """BERT (arXiv:1810.04805), with its vocabulary, post-norm blocks, dropout and eps.

    LION replaces only the attention. It has no attention dropout, because its chunk and recurrent
    forms do not compute attention weights.
    """
    return _Family(
        MaskedLMConfig(
            mixer=mixer,
            mlp=MLPConfig(),
            position=position,
            segment_types=2,
            embedding_norm=True,
            norm_position="post",
            norm_eps=1e-12,
            dropout=0.1,
        ),
        "LION, arXiv:2502.16249, App. C.5",
    )


_BERT_POSITION = TokenPositionConfig(max_tokens=BERT_MAX_TOKENS)
_BERT = _bert(SoftmaxMixerConfig(dropout=0.1), _BERT_POSITION)
# RoBERTa, arXiv:1907.11692, which does not use the first two of its 514 positions.
_ROBERTA = _Family(
    replace(
        _BERT.config,
        {"vocab_size": 50265, "position.max_tokens": 514, "segment_types": 1, "norm_eps": 1e-5},
    ),
    "LDN, arXiv:2502.12381, Sec. 5.1 and Table 3",
)
# App. C.5 adds a norm after LION-lit's attention. LION-lit needs positions, as it has no decay.
_BERT_LIT = _bert(LionMixerConfig(decay=NoDecayConfig(), norm="layer"), _BERT_POSITION)
_BERT_D, _BERT_S = _bert(_D, None), _bert(_S, None)
_GATED_DELTANET_MLM = _Family(
    _bert(GatedDeltaNetMixerConfig(), None).config,
    "Gated DeltaNet, arXiv:2412.06464, in the blocks of BERT; no paper describes this model",
)
# Hydra's blocks replace those of BERT. Only its embedding has dropout, which this config cannot
# express, so there is none. The large size has 45 blocks, as in LION's App. C.5.
_HYDRA_MLM = _Family(
    MaskedLMConfig(
        mixer=HydraMixerConfig(),
        mlp=None,
        position=None,
        segment_types=2,
        embedding_norm=True,
        norm_position="post",
        norm_eps=1e-5,
    ),
    "Hydra, arXiv:2407.09941, Table 4 and App. D.2; LION, Table 3",
)
_LDN_MLM = _Family(
    MaskedLMConfig(
        mixer=LinearDiffusionMixerConfig(dropout=0.1), mlp=None, position=_BERT_POSITION
    ),
    "LDN, arXiv:2502.12381, Sec. 5.1, which gives no shape",
)


def _printed(*millions: float) -> Mapping[str, float]:
    return dict(zip(PRINTED_ABLATIONS, millions, strict=True))


# name, family, depth, width, heads, published parameters in millions
_IMAGE_ROWS = (
    _Row(
        *("lightnet_tiny", _LIGHTNET, 12, 192, 6, 6.0),
        printed_ablations=_printed(6.0, 6.0, 6.0, 6.0, 6.16),
    ),
    _Row(
        *("lightnet_small", _LIGHTNET, 12, 384, 16, 22.64),
        printed_ablations=_printed(22.54, 22.63, 22.64, 22.63, 23.82),
    ),
    _Row(
        *("lightnet_base", _LIGHTNET, 12, 768, 16, 87.74),
        printed_ablations=_printed(87.54, 87.69, 87.74, 87.72, 93.64),
    ),
    _Row("hgrn_tiny", _HGRN, 12, 192, 3, 6.1),
    _Row("hgrn_small", _HGRN, 12, 384, 6, 23.7),
    _Row("tnl_tiny", _TNL, 12, 192, 3, 6.0),
    _Row("tnl_small", _TNL, 12, 384, 6, 22.56),
    _Row("tnl_base", _TNL, 12, 768, 12, 87.59),
    _Row("hgrn2_tiny", _HGRN2, 12, 192, 3, 6.1),
    _Row("hgrn2_small", _HGRN2, 12, 384, 6, 23.8),
    _Row("deit_tiny", _DEIT, 12, 192, 3, 5.7),
    _Row("deit_small", _DEIT, 12, 384, 6, 22.0),
    _Row("deit_base", _DEIT, 12, 768, 12, 86.0),
    _Row("lion_lit_tiny", _LION_LIT, 12, 192, 3, 5),
    _Row("lion_lit_small", _LION_LIT, 12, 384, 6, 22),
    _Row("lion_lit_base", _LION_LIT, 12, 768, 12, 86),
    _Row("lion_d_tiny", _LION_D, 12, 192, 3, 5),
    _Row("lion_d_small", _LION_D, 12, 384, 6, 22),
    _Row("lion_d_base", _LION_D, 12, 768, 12, 86),
    _Row("lion_s_tiny", _LION_S, 12, 192, 3, 5),
    _Row("lion_s_small", _LION_S, 12, 384, 6, 22),
    _Row("lion_s_base", _LION_S, 12, 768, 12, 86),
    _Row("lion_d_natural_tiny", _LION_D_NATURAL, 12, 192, 3, 5),
    _Row("lion_d_natural_small", _LION_D_NATURAL, 12, 384, 6, 22),
    _Row("lion_d_natural_base", _LION_D_NATURAL, 12, 768, 12, 86),
    _Row("lion_s_natural_tiny", _LION_S_NATURAL, 12, 192, 3, 5),
    _Row("lion_s_natural_small", _LION_S_NATURAL, 12, 384, 6, 22),
    _Row("lion_s_natural_base", _LION_S_NATURAL, 12, 768, 12, 86),
    _Row("vit_base", _VIT, 12, 768, 12, 86, printed_gmacs=17.6),
    _Row("vit_large", _VIT, 24, 1024, 16, 307.0, printed_gmacs=61.6),
    _Row("vit_huge", _VIT, 32, 1280, 16, 632.0, printed_gmacs=120.5),
    _Row("vision_rwkv_tiny", _VISION_RWKV, 24, 192, 1, 6.2, printed_gmacs=1.2),
    _Row("vision_rwkv_small", _VISION_RWKV, 24, 384, 1, 23.8, printed_gmacs=4.6),
    _Row("vision_rwkv_base", _VISION_RWKV, 24, 768, 1, 93.7, printed_gmacs=18.2),
    _Row(
        *("ldn_base", _LDN, 12, 768, 12, 52.0),
        printed_gmacs=10.6,
        printed_ablations={"dense_kernel": 52.0},
    ),
    _Row(
        *("ldn_large", _LDN, 24, 1024, 16, 181.0),
        printed_gmacs=36.7,
        printed_ablations={"dense_kernel": 181.0},
    ),
    _Row(
        *("ldn_huge", _LDN, 32, 1280, 16, 373.0),
        printed_gmacs=75.4,
        printed_ablations={"dense_kernel": 373.0},
    ),
    _Row("vim_tiny", _VIM, 24, 192, 1, 7),
    _Row("vim_small", _VIM, 24, 384, 1, 26.0, changes={"drop_path": 0.05}),
    _Row("vim_base", _VIM, 24, 768, 1, 98.0),
    _Row("hydra_small", _HYDRA, 22, 384, 12, 22.0),
    _Row("hydra_base", _HYDRA, 24, 768, 24, 91.0),
    _Row("lightnet_hybrid_tiny", _LIGHTNET_HYBRID, 12, 192, 6, None),
    _Row("gated_deltanet_tiny", _GATED_DELTANET, 12, 192, 3, None),
    _Row("lightnet_signal_tiny", _LIGHTNET_SIGNAL, 12, 192, 6, None),
    _Row("lightnet_video_tiny", _LIGHTNET_VIDEO, 12, 192, 6, None),
    _Row("lightnet_video_small", _LIGHTNET_VIDEO, 12, 384, 16, None),
    _Row("lion_s_natural_video_tiny", _LION_S_NATURAL_VIDEO, 12, 192, 3, None),
)
# Parameter counts are for patches of 2 x 2. Each size is available with every patch size, such as
# lightnet_dit_s_2. The published 33M of LightNet-S and DiT-S are 33.53, truncated, and 32.87,
# rounded.
_DENOISER_ROWS = (
    _Row("lightnet_dit_s", _LIGHTNET_DIT, 18, 384, 6, 33),
    _Row("lightnet_dit_b", _LIGHTNET_DIT, 18, 768, 6, 131.0),
    _Row("lightnet_dit_l", _LIGHTNET_DIT, 36, 1024, 16, 470.0),
    _Row("lightnet_dit_xl", _LIGHTNET_DIT, 42, 1152, 16, 680.0),
    _Row("dit_s", _DIT, 12, 384, 6, 33.0),
    _Row("dit_b", _DIT, 12, 768, 12, 130.0),
    _Row("dit_l", _DIT, 24, 1024, 16, 458.0),
    _Row("dit_xl", _DIT, 28, 1152, 16, 675.0),
)
# Table 10 compares LightNet-B/8 with RetNet and HGRN2 of size "S/8", and gives neither shapes nor
# parameters. Its FIDs, which are close to those of LightNet-B/8 and far from those of LightNet-S/8
# in Table 11, fit size B. These are both sizes, with the shapes of LightNet-S and LightNet-B.
_TWO_SCAN_ROWS = tuple(
    _Row(f"{name}_dit_{size}_8", _two_scans(family), 18, width, 6, None, {"patch_size": (8, 8)})
    for size, width in (("s", 384), ("b", 768))
    for name, family in (("retnet", _TNL), ("hgrn2", _HGRN2))
)
_LANGUAGE_ROWS = (
    _Row(
        *("lightnet_lm_45m", _LM_WIKITEXT, 6, 512, 8, 45.07),
        changes={"mixer.gate_rank": 64, "vocab_size": 50265},
    ),
    _Row(
        *("lightnet_hybrid_lm_45m", _HYBRID_LM, 6, 512, 8, None),
        changes={"vocab_size": 50265},
    ),
    _Row("lightnet_lm_150m", _LM_V1, 15, 768, 12, 150.0),
    _Row(
        *("lightnet_lm_379m", _LM_PILE, 26, 1024, 8, 379.0),
        changes=_LM_379M,
        printed_ablations={"without_tpe": 379.0, "without_lrpe": 379.0, "without_decay": 379.0},
    ),
    _Row(
        *("lightnet_lm_no_share", _LM_PILE, 26, 1024, 8, 385),
        changes={**_LM_379M, "mixer.decay_logits": "independent"},
    ),
    _Row("lightnet_lm_380m", _LM_V1, 26, 1024, 8, 385.0),
    _Row("lightnet_lm_1b", _LM, 18, 2048, 16, 1000.0),
    _Row(
        *("lightnet_lm_1450m", _LM_SPEED, 24, 2048, 16, 1450.0),
        changes={"mlp.multiple_of": 256, "tie_embeddings": False},
    ),
    _Row("lightnet_lm_3b", _LM, 36, 2560, 20, 3000.0),
    _Row("transformer_lm_45m", _TRANSFORMER_LM, 6, 512, 8, 44.65),
    _Row("linear_lm_45m", _LINEAR_LM, 6, 512, 8, 44.65),
    _Row("hgrn_lm_46m", _HGRN_LM, 6, 512, 8, 46.25),
    _Row("tnl_lm_379m", _TNL_LM, 26, 1024, 8, 379.0),
    _Row("llama_385m", _LLAMA, 26, 1024, 8, 385),
    _Row("lion_s_lm_124m", _LION_LM, 12, 768, 12, 124.0),
    _Row("linear_attention_lm_124m", _LINEAR_GPT2, 12, 768, 12, 124.0),
    _Row("gpt2_small", _GPT2, 12, 768, 12, 124.0),
    _Row("mamba_lm_385m", _MAMBA_LM, 50, 1024, 1, 385.0),
    _Row("mamba2_lm_1300m", _MAMBA2_LM, 48, 2048, 64, None),
    _Row("gated_deltanet_lm_53m", _GATED_DELTANET_LM, 6, 512, 8, None),
    _Row("kda_lm_47m", _KDA_LM, 6, 512, 8, None),
    _Row("lightnet_mlm_base", _LIGHTNET_MLM, 16, 768, 12, None),
    _Row("crammed_bert", _CRAMMED_BERT, 16, 768, 12, None),
    _Row("lion_lit_mlm_base", _BERT_LIT, 12, 768, 12, 110.0),
    _Row("lion_lit_mlm_large", _BERT_LIT, 24, 1024, 16, 334.0),
    _Row("lion_d_mlm_base", _BERT_D, 12, 768, 12, 110.0),
    _Row("lion_d_mlm_large", _BERT_D, 24, 1024, 16, 334.0),
    _Row("lion_s_mlm_base", _BERT_S, 12, 768, 12, 110.0),
    _Row("lion_s_mlm_large", _BERT_S, 24, 1024, 16, 334.0),
    _Row("gated_deltanet_mlm_small", _GATED_DELTANET_MLM, 6, 512, 8, None),
    _Row("bert_base", _BERT, 12, 768, 12, 110.0),
    _Row("bert_large", _BERT, 24, 1024, 16, 334.0),
    _Row("roberta_base", _ROBERTA, 12, 768, 12, 125.0),
    _Row("hydra_mlm_base", _HYDRA_MLM, 23, 768, 24, 112.0),
    _Row("hydra_mlm_large", _HYDRA_MLM, 45, 1024, 32, 334.0),
    _Row("ldn_mlm_base", _LDN_MLM, 24, 768, 12, 125.0),
)
_ROWS = (
    *_IMAGE_ROWS,
    *(
        row._replace(name=f"{row.name}_{patch}", changes={"patch_size": (patch, patch)})
        for row in _DENOISER_ROWS
        for patch in DENOISER_PATCHES
    ),
    _Row("lightnet_dit_xl_672m", _LIGHTNET_DIT_NO_GATE, 42, 1152, 16, 672.0),
    *_TWO_SCAN_ROWS,
    *_LANGUAGE_ROWS,
)


def _preset_of(row: _Row) -> Preset:
    sizes = {"depth": row.depth, "width": row.width, "mixer.num_heads": row.num_heads}
    return Preset(
        config=replace(row.family.config, {**sizes, **row.changes}),
        printed_millions=row.printed_millions,
        source=row.family.source,
        printed_gmacs=row.printed_gmacs,
        printed_ablations=dict(row.printed_ablations),
    )


PRESETS: Mapping[str, Preset] = MappingProxyType({row.name: _preset_of(row) for row in _ROWS})

# The mappings below contain the rows of the papers' ablation tables, as changes of a config.
# LightNet, Tables 1, 7 and 6. "separate_decay" or "independent_decay" may be the "no share" of
# Table 6: the text describes independent parameters, but the 385M parameters match rank 128. The
# paper prints no results for "joint_tpe", which is its Eq. 16; the last row is ours.
LIGHTNET_ABLATIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "without_tpe": {"position": None},
        "joint_tpe": {"position.joint": True},
        "without_lrpe": {"mixer.lrpe": False},
        "without_decay": {"mixer.decay": False},
        "without_norm": {"mixer.norm": "none"},
        "full_rank_gate": {"mixer.gate_rank": None},
        "separate_decay": {"mixer.decay_logits": "offset"},
        "independent_decay": {"mixer.decay_logits": "independent", "mixer.decay_rank": None},
        "without_tpe_and_lrpe": {"mixer.lrpe": False, "position": None},
    }
)
# Not in the paper; for causal LightNet models.
CAUSAL_LIGHTNET_ABLATIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"with_leak": {"mixer.leak": (16.0, 4096.0)}}
)
# LION, Tables 13, 14 and 16, for LION-s; with_feature_map and without_positions are for the rows of
# Table 14 that change ViT or LION-lit.
LION_ABLATIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "fixed_decay": {"mixer.decay": FixedDecayConfig()},
        "diagonal_decay": {"mixer.decay.diagonal": True},
        "without_feature_map": {"mixer.feature_map": "identity"},
        "with_feature_map": {"mixer.feature_map": "shifted_silu"},
        "with_positions": {"position": AbsolutePositionConfig()},
        "forward": {"mixer.direction": "forward"},
        "backward": {"mixer.direction": "backward"},
        "alternating": {"mixer.direction": "alternating"},
        "without_positions": {"position": None},
    }
)
# LDN, Table 4; the last three rows are ours. The text leaves the kernel open. Models with Gaussians
# have fewer parameters than printed in Table 1; three dense kernels per block match all sizes.
LDN_ABLATIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "without_diffusion": {"mixer.diffusion": False},
        "without_local_update": {"mixer.local_update": False},
        "without_linear_attention": {"mixer.linear_attention": False},
        "separable_diffusion": {"mixer.separable": True},
        "free_kernel": {"mixer.kernel": "free", "mixer.kernels": None},
        "dense_kernel": {"mixer.kernel": "dense", "mixer.kernels": 3},
    }
)
# LION on the Long Range Arena: the rows of Table 6, and the rows of Table 5 without HiPPO, for
# LION-s. Row 3 has one decay per head, which is LION-s's own decay, as HiPPO's is per channel.
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
    {
        **LIGHTNET_ABLATIONS,
        **CAUSAL_LIGHTNET_ABLATIONS,
        **LION_ABLATIONS,
        **LDN_ABLATIONS,
        **LONG_RANGE_ABLATIONS,
    }
)


def preset(name: str, **changes: Any) -> ModelConfig:
    """Return the config of a preset, with some fields changed.

    Args:
        name: A key of `PRESETS`.
        changes: Fields and their new values. A dotted name changes a field of a nested config, as
            in `preset("lightnet_tiny", **{"mixer.lrpe": False})`. `image_size` and `patch_size` may
            be one number for a square.

    Raises:
        ValueError: If the name or a field is unknown (names the closest match), or a value has the
            wrong type.

    >>> preset("lightnet_tiny", num_classes=10, image_size=32, patch_size=4).image_size
    (32, 32)
    >>> preset("lightnet_tiny", image_size=(8, 32, 32), patch_size=(2, 8, 8)).patch_size
    (2, 8, 8)
    """
    check_choice("model", name, PRESETS, listed_by="onescan models")
    config = PRESETS[name].config
    sizes = {key: changes[key] for key in ("image_size", "patch_size") if key in changes}
    axis_counts = [len(size) for size in sizes.values() if not isinstance(size, int)]
    axes = axis_counts[0] if axis_counts else len(getattr(config, "image_size", ()))
    expanded: dict[str, Any] = {
        key: (size,) * axes for key, size in sizes.items() if isinstance(size, int)
    }
    return replace(config, {**changes, **expanded})


def build(name: str, **changes: Any) -> nn.Module:
    """Build the model of a preset with new weights; see `preset` for the arguments.

    Raises:
        ValueError: If `preset` raises it, or the model does not fit into memory.

    >>> build("lightnet_tiny", num_classes=10, image_size=32, patch_size=4).head.out_features
    10
    """
    return build_model(preset(name, **changes))
