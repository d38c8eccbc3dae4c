"""Image classifiers: LightNet's, LION's and LDN's sizes, and DeiT's."""

from onescan.configs import replace
from onescan.layers.basic import MLPConfig
from onescan.layers.decays import FixedDecayConfig, NoDecayConfig, SelectiveDecayConfig
from onescan.layers.mixers import (
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
    LionMixerConfig,
    SoftmaxMixerConfig,
)
from onescan.layers.position import AbsolutePositionConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.models.presets.contract import Preset

# The rows that Tables 1 and 7 print parameters of: all but "no share".
PRINTED_ROWS = ("without_tpe", "without_lrpe", "without_decay", "without_norm", "full_rank_gate")


def _lightnet(width: int, num_heads: int, printed_millions: float, *ablations: float) -> Preset:
    return Preset(
        config=ImageClassifierConfig(width=width, mixer=LightNetMixerConfig(num_heads=num_heads)),
        printed_millions=printed_millions,
        source="LightNet, arXiv:2405.21022, Tables 1, 7 and 15",
        printed_ablations=dict(zip(PRINTED_ROWS, ablations, strict=True)),
    )


def _deit(width: int, num_heads: int, printed_millions: float) -> Preset:
    return Preset(
        config=ImageClassifierConfig(
            width=width,
            mixer=SoftmaxMixerConfig(num_heads=num_heads),
            mlp=MLPConfig(),
            position=AbsolutePositionConfig(),
        ),
        printed_millions=printed_millions,
        source="LightNet, arXiv:2405.21022, Table 1",
    )


def _lion(mixer: LionMixerConfig, width: int, num_heads: int, printed_millions: int) -> Preset:
    """DeiT with another mixer, and the mean of all tokens; without a decay it needs positions."""
    is_lit = isinstance(mixer.decay, NoDecayConfig)
    return Preset(
        config=ImageClassifierConfig(
            width=width,
            mixer=replace(mixer, {"num_heads": num_heads}),
            mlp=MLPConfig(),
            position=AbsolutePositionConfig() if is_lit else None,
            pool="mean_with_class_token",
        ),
        printed_millions=printed_millions,
        source="LION, arXiv:2502.16249, Tables 2 and 12",
    )


def _ldn(
    width: int, depth: int, num_heads: int, printed_millions: float, printed_gmacs: float
) -> Preset:
    """ViT's shapes; a layer is its mixer, and nothing follows it."""
    return Preset(
        config=ImageClassifierConfig(
            width=width,
            depth=depth,
            mixer=LinearDiffusionMixerConfig(num_heads=num_heads),
            mlp=None,
            position=AbsolutePositionConfig(),
            pool="mean",
            drop_path=0.0,
        ),
        printed_millions=printed_millions,
        printed_gmacs=printed_gmacs,
        source="LDN, arXiv:2502.12381, Table 1",
    )


LIT = LionMixerConfig(decay=NoDecayConfig())
D = LionMixerConfig(decay=FixedDecayConfig())
S = LionMixerConfig(decay=SelectiveDecayConfig())
D_NATURAL, S_NATURAL = (replace(mixer, {"scan": "natural"}) for mixer in (D, S))

LION_NAMES = {
    "lit": "LION-lit",
    "d": "LION-d",
    "s": "LION-s",
    "d_natural": "LION-d natural, along rows and columns",
    "s_natural": "LION-s natural, along rows and columns",
}

IMAGE_PRESETS = {
    "lightnet_tiny": _lightnet(192, 6, 6.0, 6.0, 6.0, 6.0, 6.0, 6.16),
    "lightnet_small": _lightnet(384, 16, 22.64, 22.54, 22.63, 22.64, 22.63, 23.82),
    "lightnet_base": _lightnet(768, 16, 87.74, 87.54, 87.69, 87.74, 87.72, 93.64),
    "deit_tiny": _deit(192, 3, 5.7),
    "deit_small": _deit(384, 6, 22.0),
    "deit_base": _deit(768, 12, 86.0),
    "lion_lit_tiny": _lion(LIT, 192, 3, 5),
    "lion_lit_small": _lion(LIT, 384, 6, 22),
    "lion_lit_base": _lion(LIT, 768, 12, 86),
    "lion_d_tiny": _lion(D, 192, 3, 5),
    "lion_d_small": _lion(D, 384, 6, 22),
    "lion_d_base": _lion(D, 768, 12, 86),
    "lion_s_tiny": _lion(S, 192, 3, 5),
    "lion_s_small": _lion(S, 384, 6, 22),
    "lion_s_base": _lion(S, 768, 12, 86),
    "lion_d_natural_tiny": _lion(D_NATURAL, 192, 3, 5),
    "lion_d_natural_small": _lion(D_NATURAL, 384, 6, 22),
    "lion_d_natural_base": _lion(D_NATURAL, 768, 12, 86),
    "lion_s_natural_tiny": _lion(S_NATURAL, 192, 3, 5),
    "lion_s_natural_small": _lion(S_NATURAL, 384, 6, 22),
    "lion_s_natural_base": _lion(S_NATURAL, 768, 12, 86),
    "ldn_base": _ldn(768, 12, 12, 52.0, 10.6),
    "ldn_large": _ldn(1024, 24, 16, 181.0, 36.7),
    "ldn_huge": _ldn(1280, 32, 16, 373.0, 75.4),
}
