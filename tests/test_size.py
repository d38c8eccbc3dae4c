"""Sizes of models: blocks that are built alike are counted without running them all."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from onescan.models.presets import preset
from onescan.models.size import _macs, model_size

SMALL = {
    "images": preset("lion_s_natural_tiny", depth=3),
    "texts": preset("lightnet_lm_45m", depth=3),
    "masked texts": preset("ldn_mlm_base", depth=3),
    "noise": preset("lightnet_dit_s_8", depth=3),
}


def every_block_run(model, inputs):
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(*inputs)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("config", SMALL.values(), ids=SMALL)
def test_the_count_is_that_of_every_block(config):
    with torch.device("meta"):
        inputs, model = config.example_inputs(), config.build()
    assert model_size(config).macs == every_block_run(model, inputs)


class Blocks(nn.Module):
    """Two that are alike, given one row and then three, and a third of another width."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 5)])

    def forward(self, x):
        first, second, third = self.blocks
        return third(second(first(x).repeat(3, 1)))


def test_blocks_alike_run_again_where_they_are_given_something_else():
    with torch.device("meta"):
        assert _macs(Blocks(), (torch.zeros(1, 4),)) == 16 + 3 * 16 + 3 * 20


def test_blocks_within_blocks_count_every_time():
    with torch.device("meta"):
        model = Rows(*(Rows(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3)))
        assert _macs(model, (torch.zeros(1, 2),)) == 6 * 4


class Rows(nn.Module):
    """Blocks one after the other."""

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
