"""Language models: LightNet's, LION's and LDN's sizes, and BERT's and GPT-2's."""

from onescan.configs import replace
from onescan.layers.basic import MLPConfig
from onescan.layers.decays import FixedDecayConfig, NoDecayConfig, SelectiveDecayConfig
from onescan.layers.mixers import (
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
    LionMixerConfig,
    MixerConfig,
    SoftmaxMixerConfig,
)
from onescan.layers.position import TokenPositionConfig
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.masked_lm import MaskedLMConfig
from onescan.models.presets.contract import Preset

GPT2_VOCABULARY, BERT_PLACES, GPT2_PLACES = 50257, 512, 1024
BERT_SIZES = {"base": (768, 12, 12, 110.0), "large": (1024, 24, 16, 334.0)}


def _lightnet_lm(
    width: int,
    depth: int,
    num_heads: int,
    gate_rank: int,
    vocab_size: int,
    printed_millions: float,
    source: str,
) -> Preset:
    """Norms without parameters, as only they make the 45.07 million of WikiText-103's model."""
    return Preset(
        config=CausalLMConfig(
            vocab_size=vocab_size,
            width=width,
            depth=depth,
            mixer=LightNetMixerConfig(num_heads=num_heads, causal=True, gate_rank=gate_rank),
            norm="simple_rms",
        ),
        printed_millions=printed_millions,
        source=f"LightNet, arXiv:2405.21022, {source}",
    )


def _gpt2(mixer: MixerConfig, position: TokenPositionConfig | None, source: str) -> Preset:
    return Preset(
        config=CausalLMConfig(
            vocab_size=GPT2_VOCABULARY,
            width=768,
            depth=12,
            mixer=mixer,
            mlp=MLPConfig(),
            position=position,
        ),
        printed_millions=124.0,
        source=source,
    )


def _bert(mixer: MixerConfig, size: str, *, has_positions: bool) -> Preset:
    """BERT, arXiv:1810.04805, with its sizes, vocabulary, post-norm blocks, dropout and eps.

    LION replaces only the attention. It has no attention dropout, because its chunk and recurrent
    forms do not compute attention weights.
    """
    width, depth, num_heads, printed_millions = BERT_SIZES[size]
    return Preset(
        config=MaskedLMConfig(
            width=width,
            depth=depth,
            mixer=replace(mixer, {"num_heads": num_heads}),
            mlp=MLPConfig(),
            position=TokenPositionConfig(max_tokens=BERT_PLACES) if has_positions else None,
            segment_types=2,
            embedding_norm=True,
            norm_position="post",
            norm_eps=1e-12,
            dropout=0.1,
        ),
        printed_millions=printed_millions,
        source="LION, arXiv:2502.16249, App. C.5",
    )


# LION-lit has a norm after its attention, App. C.5, and places, as nothing else tells them
LIT = LionMixerConfig(decay=NoDecayConfig(), norm="layer")
D = LionMixerConfig(decay=FixedDecayConfig())
S = LionMixerConfig(decay=SelectiveDecayConfig())

LANGUAGE_PRESETS = {
    "lightnet_lm_45m": _lightnet_lm(512, 6, 8, 64, 50265, 45.07, "WikiText-103"),
    "lightnet_lm_150m": _lightnet_lm(768, 15, 12, 128, 50272, 150.0, "v1, Table 10"),
    "lightnet_lm_380m": _lightnet_lm(1024, 26, 8, 128, 50272, 385.0, "v1, Table 10"),
    "lightnet_lm_1b": _lightnet_lm(2048, 18, 16, 128, 50272, 1000.0, "Table 13"),
    "lightnet_lm_3b": _lightnet_lm(2560, 36, 20, 128, 50272, 3000.0, "Table 13"),
    "lion_s_lm_124m": _gpt2(
        LionMixerConfig(num_heads=12, direction="forward"),
        None,
        "LION, arXiv:2502.16249, causal language modelling",
    ),
    "gpt2_small": _gpt2(
        SoftmaxMixerConfig(num_heads=12, causal=True),
        TokenPositionConfig(max_tokens=GPT2_PLACES),
        "LION, arXiv:2502.16249, causal language modelling",
    ),
    "lightnet_mlm_base": Preset(
        config=MaskedLMConfig(vocab_size=32768, mixer=LightNetMixerConfig(num_heads=12)),
        printed_millions=None,
        source="LightNet, arXiv:2405.21022, Table 2, in the Cramming setting",
    ),
    **{
        f"{name}_{size}": _bert(mixer, size, has_positions=has_positions)
        for name, mixer, has_positions in (
            ("lion_lit_mlm", LIT, True),
            ("lion_d_mlm", D, False),
            ("lion_s_mlm", S, False),
            ("bert", SoftmaxMixerConfig(dropout=0.1), True),
        )
        for size in BERT_SIZES
    },
    "ldn_mlm_base": Preset(
        config=MaskedLMConfig(
            depth=24,
            mixer=LinearDiffusionMixerConfig(num_heads=12, dropout=0.1),
            mlp=None,
            position=TokenPositionConfig(max_tokens=BERT_PLACES),
        ),
        printed_millions=125.0,
        source="LDN, arXiv:2502.12381, Sec. 5.1, which tells no shape",
    ),
}
