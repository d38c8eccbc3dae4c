"""Sizes of models: blocks that are built alike are counted without running them all."""

import json

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from onescan.layers.mixers import LionMixerConfig, SoftmaxMixerConfig
from onescan.models.presets import PRESETS, preset
from onescan.models.size import (
    SIZES,
    Size,
    _macs,
    attention_flops,
    fingerprint,
    known_size,
    listed_configs,
    model_size,
    recurrence_flops,
)
from onescan.ops import decay_attention
from onescan.shapes import Grid

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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("config", SMALL.values(), ids=SMALL)
def test_the_count_is_that_of_every_block(config):
    with torch.device("meta"):
        inputs, model = config.example_inputs(), config.build()
    assert model_size(config).macs == every_block_run(model, inputs)


# Sizes in sizes.json


STALE = "sizes.json is out of date; run `python docs/counts.py`"
STORED = json.loads(SIZES.read_text())


def test_every_listed_config_is_in_the_file():
    configs = {name: fingerprint(config) for name, config in listed_configs().items()}
    assert {name: row["config"] for name, row in STORED.items()} == configs, STALE


def assert_stored(names):
    configs = listed_configs()
    sizes = {name: model_size(configs[name])._asdict() for name in names}
    assert {name: {**row, "config": STORED[name]["config"]} for name, row in sizes.items()} == {
        name: STORED[name] for name in names
    }, STALE


def test_stored_sizes_are_those_of_a_recount():
    """For one preset of each class of models, and an ablation."""
    one_of_each = {type(row.config): name for name, row in reversed(PRESETS.items())}
    assert_stored([*one_of_each.values(), "lightnet_tiny/without_tpe"])


@pytest.mark.slow
def test_all_stored_sizes_are_those_of_a_recount():
    assert_stored(STORED)


def test_other_configs_are_counted(monkeypatch):
    known, other = preset("lightnet_tiny"), preset("lightnet_tiny", depth=1, num_classes=10)
    expected = Size(*(STORED["lightnet_tiny"][key] for key in Size._fields))
    counted = model_size(other)
    assert known_size(other) == counted
    monkeypatch.setattr("onescan.models.size.model_size", {other: counted}.get)
    assert known_size(known) == expected  # without counting
    assert known_size(other) == counted


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


class Counter:
    """Vector operations that count one FLOP per multiplication, addition and nonlinearity."""

    def __init__(self):
        self.flops = 0

    def each(self, function, *inputs):
        result = function(*torch.broadcast_tensors(*inputs))
        self.flops += result.numel()
        return result

    def mul(self, x, y):
        return self.each(torch.mul, x, y)

    def add(self, x, y):
        return self.each(torch.add, x, y)

    def sub(self, x, y):
        return self.each(torch.sub, x, y)

    def matmul(self, x, y):
        """Count 2 FLOPs per product, as the paper does."""
        self.flops += 2 * y.numel() * (x.shape[0] if x.ndim > 1 else 1)
        return x @ y


LENGTHS_AND_WIDTHS = [(1, 1), (5, 3), (7, 4), (12, 16)]
over_sizes = pytest.mark.parametrize(("tokens", "width"), LENGTHS_AND_WIDTHS)


@over_sizes
def test_attention_flops_are_counted_one_by_one(tokens, width):
    """LION, App. C.12, item by item."""
    count = Counter()
    x = torch.randn(tokens, width, dtype=torch.float64) / width
    q, k, v = (count.matmul(x, torch.randn(width, width, dtype=x.dtype)) for _ in range(3))
    assert count.flops == 6 * tokens * width**2
    scores = count.matmul(q, k.mT)
    weights = count.each(torch.exp, scores)
    count.flops += tokens**2  # the division, as the paper counts no row sums
    o = count.matmul(weights / weights.sum(dim=-1, keepdim=True), v)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0)
    torch.testing.assert_close(o, want)
    assert count.flops == attention_flops(tokens, width)


@over_sizes
def test_recurrence_flops_are_counted_one_by_one(tokens, width):
    """LION, App. C.12, item by item, on the recurrence of Eq. 79."""
    count = Counter()
    x = torch.randn(tokens, width, dtype=torch.float64) / width
    q, k, v = (count.matmul(x, torch.randn(width, width, dtype=x.dtype)).exp() for _ in range(3))
    decay = torch.sigmoid(count.matmul(x, torch.randn(width, 1, dtype=x.dtype)))[:, 0]
    assert count.flops == 6 * tokens * width**2 + 2 * tokens * width
    directions, half = [], torch.tensor(0.5, dtype=x.dtype)
    for order in (range(tokens), range(tokens - 1, -1, -1)):
        s, z = x.new_zeros(width, width), x.new_zeros(width)
        reads = {}
        for t in order:
            before = count.flops
            s = count.add(count.mul(decay[t], s), count.mul(k[t].unsqueeze(-1), v[t]))
            z = count.add(count.mul(decay[t], z), k[t])
            own = count.mul(half, count.matmul(q[t], k[t]))
            c = count.sub(count.matmul(q[t], z), own)
            own = count.mul(half, count.matmul(q[t], k[t]))
            y = count.sub(count.matmul(q[t], s), count.mul(own, v[t]))
            reads[t] = y, c
            assert count.flops - before == 5 * width**2 + 10 * width + 3
        directions.append(reads)
    o = []
    for t in range(tokens):
        (y_forward, c_forward), (y_backward, c_backward) = (reads[t] for reads in directions)
        y, c = count.add(y_forward, y_backward), count.add(c_forward, c_backward)
        o.append(count.each(torch.div, y, c))
    one_head = (y[None, :, None] for y in (q, k, v))
    want, _ = decay_attention(
        *one_head, decay.log()[None, :, None], decay_at="target", normalize="sum"
    )
    torch.testing.assert_close(torch.stack(o), want[0, :, 0])
    assert count.flops == recurrence_flops(tokens, width)


@pytest.mark.sampled
@pytest.mark.parametrize("tokens", [64, 197])
def test_flops_of_the_formulas_are_those_of_our_forms(tokens):
    """PyTorch counts the matrix products, without elementwise work; C.12 has no output layer."""
    width = 64

    def matmul_flops(config):
        with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
            mixer = config.build(width=width, axes=1)
            mixer(torch.zeros(1, tokens, width), Grid((tokens,)))
        return counter.get_total_flops() - 2 * tokens * width**2

    attention = attention_flops(tokens, width) - 2 * tokens**2  # softmax
    assert matmul_flops(SoftmaxMixerConfig(num_heads=1)) == attention
    full = LionMixerConfig(num_heads=1, form="full")
    assert matmul_flops(full) == attention + 2 * tokens * width  # decay
    recurrent = LionMixerConfig(num_heads=1, form="recurrent")
    elementwise = tokens * (20 * width + 7 + 6 * width**2)  # 6 D^2 for the two states
    # row sums are one more column of the values
    assert matmul_flops(recurrent) == (
        recurrence_flops(tokens, width) - elementwise - 2 * tokens * width + 4 * tokens * width
    )


def test_the_recurrence_is_cheaper_for_long_sequences():
    cheaper = [n for n in range(1, 400) if recurrence_flops(n, 64) < attention_flops(n, 64)]
    assert cheaper == list(range(165, 400))  # from (10 D^2 + 24 D + 7) / (4 D + 2) = 164.7 on


@pytest.mark.parametrize("flops", [attention_flops, recurrence_flops])
def test_flops_need_positive_sizes(flops):
    for sizes, message in (((0, 64), "tokens is 0"), ((5, -1), "head_width is -1")):
        with pytest.raises(ValueError, match=message):
            flops(*sizes)
