"""The stack of blocks with states, conditions and selected outputs."""

import pytest
import torch

from onescan.layers.basic import MLPConfig
from onescan.layers.block import Block, ConditionedBlock
from onescan.layers.mixers import HGRNMixerConfig, LightNetMixerConfig, LinearDiffusionMixerConfig
from onescan.layers.stack import apply_blocks, build_blocks
from onescan.shapes import Grid

MIXERS = {
    "lightnet": LightNetMixerConfig(num_heads=2, direction="forward"),
    "embedding": LinearDiffusionMixerConfig(num_heads=2, direction="forward"),
    "lower bound": HGRNMixerConfig(num_heads=2, direction="forward"),
}


@pytest.mark.parametrize("kind", [Block, ConditionedBlock])
@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_two_calls_equal_one(mixer, kind):
    options = {"axes": 1, "mlp": MLPConfig(), "norm": "layer"}
    blocks, bounds = build_blocks(3, 8, mixer=mixer, kind=kind, **options)
    blocks.double()
    x, condition = torch.randn(2, 7, 8).double(), None
    if kind is ConditionedBlock:
        condition = torch.randn(2, 8).double()

    def apply(x, states=None):
        grid, options = Grid((x.shape[1],)), {"states": states, "condition": condition}
        return apply_blocks(blocks, bounds, x, grid, selected=[2, 0], **options)

    whole = apply(x)
    assert whole.states == ()
    assert whole.selected[1] is whole.x
    first = apply(x[:, :3], [None] * 3)
    last = apply(x[:, 3:], first.states)
    for *parts, expected in zip(first.selected, last.selected, whole.selected, strict=True):
        torch.testing.assert_close(torch.cat(parts, dim=1), expected)


@pytest.mark.parametrize(
    "options", [{"dropout": 0.1}, {"drop_path": 0.1}, {"norm_position": "post"}]
)
def test_a_conditioned_block_refuses_what_it_would_ignore(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} is .* which a ConditionedBlock does not support"):
        ConditionedBlock(
            8, axes=1, mixer=MIXERS["lightnet"], mlp=MLPConfig(), norm="layer", **options
        )
