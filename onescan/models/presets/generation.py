"""Denoisers of latents: LightNet's sizes, and DiT's."""

from typing import NamedTuple

from onescan.layers.basic import MLPConfig
from onescan.layers.mixers import LightNetMixerConfig, SoftmaxMixerConfig
from onescan.layers.position import SinusoidalPositionConfig
from onescan.models.denoiser import DenoiserConfig
from onescan.models.presets.contract import Preset

PATCHES = (2, 4, 8)


class Size(NamedTuple):
    """A row of a table of sizes; millions as printed, of patches of 2 x 2."""

    depth: int
    width: int
    num_heads: int
    printed_millions: float | int


# the 33M of LightNet-S and DiT-S are 33.53 and 32.96: one is cut off, the other is rounded
LIGHTNET_SIZES = {
    "s": Size(18, 384, 6, 33),
    "b": Size(18, 768, 6, 131.0),
    "l": Size(36, 1024, 16, 470.0),
    "xl": Size(42, 1152, 16, 680.0),
}
DIT_SIZES = {
    "s": Size(12, 384, 6, 33.0),
    "b": Size(12, 768, 12, 130.0),
    "l": Size(24, 1024, 16, 458.0),
    "xl": Size(28, 1152, 16, 675.0),
}


def _lightnet(size: Size, patch: int) -> Preset:
    """The condition as tokens: with adaLN-Zero in each block no size would be as printed."""
    return Preset(
        config=DenoiserConfig(
            patch_size=(patch, patch),
            width=size.width,
            depth=size.depth,
            mixer=LightNetMixerConfig(num_heads=size.num_heads),
        ),
        printed_millions=size.printed_millions,
        source="LightNet, arXiv:2405.21022, Table 14",
    )


def _dit(size: Size, patch: int) -> Preset:
    return Preset(
        config=DenoiserConfig(
            patch_size=(patch, patch),
            width=size.width,
            depth=size.depth,
            mixer=SoftmaxMixerConfig(num_heads=size.num_heads),
            mlp=MLPConfig(),
            position=SinusoidalPositionConfig(),
            condition="adaln_zero",
        ),
        printed_millions=size.printed_millions,
        source="DiT, arXiv:2212.09748, Table 4",
    )


GENERATION_PRESETS = {
    f"{name}_{size}_{patch}": make(sizes[size], patch)
    for name, make, sizes in (
        ("lightnet_dit", _lightnet, LIGHTNET_SIZES),
        ("dit", _dit, DIT_SIZES),
    )
    for size in sizes
    for patch in PATCHES
}
