"""Patches, positions, norms, MLPs and blocks."""

import math
from dataclasses import replace
from inspect import unwrap

import pytest
import torch

from onescan.layers.basic import GLU, MLP, GLUConfig, MLPConfig, build_norm
from onescan.layers.block import Block, DropPath
from onescan.layers.mixers import (
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
    SoftmaxMixerConfig,
)
from onescan.layers.position import AbsolutePositionConfig, ToeplitzPositionConfig
from onescan.layers.tokens import Documents, Patchify
from onescan.ops.packing import Packing
from onescan.shapes import Grid


@pytest.mark.parametrize(
    ("sides", "patch", "shape"),
    [((12,), (3,), (4,)), ((6, 8), (3, 2), (2, 4)), ((4, 6, 8), (2, 3, 4), (2, 2, 2))],
)
def test_patches_of_any_number_of_axes(sides, patch, shape):
    patchify = Patchify(2, patch, 5)
    x = torch.randn(3, 2, *sides)
    y, got = patchify(x)
    assert got == shape
    assert y.shape == (3, torch.Size(shape).numel(), 5)
    last = x[(..., *(slice(-p, None) for p in patch))].flatten(1)
    torch.testing.assert_close(y[:, -1], patchify.proj(last))


def test_patches_are_what_a_strided_convolution_reads():
    patchify = Patchify(3, (4, 4), 6)
    x = torch.randn(2, 3, 8, 12)
    weight = patchify.proj.weight.reshape(6, 3, 4, 4)
    want = torch.nn.functional.conv2d(x, weight, patchify.proj.bias, stride=4)
    torch.testing.assert_close(patchify(x)[0], want.flatten(2).mT)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 3, 8, 0), "input has size 8 x 0, expected at least 1 along each axis"),
        (
            (1, 1, 8, 8),
            r"1 channels and sides \(8, 8\), expected 3 channels and one side for each of 2",
        ),
        ((1, 3, 8), r"3 channels and sides \(8,\), .*batch dimension if it is missing: x\[None\]$"),
    ],
)
def test_what_patches_cannot_cover_is_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        Patchify(3, (4, 4), 6)(torch.ones(shape))


@pytest.mark.parametrize("shape", [(9,), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("joint", [False, True])
def test_toeplitz_position_starts_at_the_inputs_scale_and_spares_the_prefix(
    shape, bidirectional, joint
):
    grid = Grid(shape, prefix=2)
    config = ToeplitzPositionConfig(bidirectional=bidirectional, joint=joint, hidden_states=8)
    position = config.build(width=64, grid=grid)
    x = torch.randn(4, grid.tokens, 64)
    y, _ = position(x, grid)
    assert torch.equal(y[:, :2], x[:, :2])
    assert 0.3 < y[:, 2:].std() / x.std() < 3
    other = Grid((5, 7, 6)[: len(shape)], prefix=0)
    assert position(torch.randn(1, other.tokens, 64), other)[0].shape == (1, other.tokens, 64)


def test_toeplitz_kernels_are_what_an_impulse_leaves():
    grid = Grid((6,))
    position = ToeplitzPositionConfig(hidden_states=4).build(width=3, grid=grid)
    impulse = torch.zeros(1, 6, 3)
    impulse[:, 0] = 1
    torch.testing.assert_close(position(impulse, grid)[0][0].mT, position.kernels(6)[0])
    assert (position.kernels(6) > 0).all()


def test_toeplitz_parameters_per_channel():
    one = ToeplitzPositionConfig().build(width=10, grid=Grid((4, 4)))
    two = ToeplitzPositionConfig(hidden_states=32, bidirectional=True)
    assert sum(p.numel() for p in one.parameters()) == 256 * 10
    assert sum(p.numel() for p in two.build(width=10, grid=Grid((4, 4))).parameters()) == 256 * 10


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("shape", [(4,), (4, 4), (4, 4, 4)])
def test_joint_toeplitz_parameters_per_channel(shape, bidirectional):
    """A decay per axis and direction, and a weight per combination of directions."""
    config = ToeplitzPositionConfig(hidden_states=8, bidirectional=bidirectional, joint=True)
    position = config.build(width=10, grid=Grid(shape))
    directions = 1 + bidirectional
    weights = directions ** len(shape)
    expected = (directions * len(shape) + weights) * 8 * 10
    assert sum(p.numel() for p in position.parameters()) == expected


def half_lives(position):
    return (math.log(2) / position.log_rate.exp()).aminmax()


def test_half_lives_start_up_to_the_initial_length_if_it_is_set():
    config = ToeplitzPositionConfig(hidden_states=8)
    for built, longest in (
        (config.build(width=3, grid=Grid((6, 9))), 9),
        (replace(config, init_length=64).build(width=3, grid=Grid((6, 9))), 64),
    ):
        low, high = half_lives(built)
        assert low.item() == pytest.approx(0.5)
        assert high.item() == pytest.approx(longest)
    with pytest.raises(ValueError, match=r"position\.init_length is 1, expected .* at least 2"):
        replace(config, init_length=1).build(width=3, grid=Grid((6,)))


@pytest.mark.parametrize("joint", [False, True])
def test_toeplitz_position_goes_on_from_a_state(joint):
    config = ToeplitzPositionConfig(hidden_states=4, joint=joint)
    position = config.build(width=3, grid=Grid((8,)))
    x = torch.randn(2, 8, 3)
    want, _ = position(x, Grid((8,)))
    for cut in range(1, 8):
        first, state = position(x[:, :cut], Grid((cut,)))
        rest, _ = position(x[:, cut:], Grid((8 - cut,)), state)
        torch.testing.assert_close(torch.cat([first, rest], dim=1), want)


@pytest.mark.parametrize("shape", [(8,), (4, 6), (2, 4, 4)])
def test_absolute_positions_interpolate(shape):
    grid = Grid(shape, prefix=1)
    position = AbsolutePositionConfig().build(width=5, grid=grid)
    zeros = torch.zeros(1, grid.tokens, 5)
    assert torch.equal(position(zeros, grid)[0][0], position.table)
    larger = Grid(tuple(2 * n for n in shape), prefix=1)
    y = position(torch.zeros(1, larger.tokens, 5), larger)[0]
    assert torch.equal(y[0, 0], position.table[0])
    torch.nn.init.ones_(position.table)
    y = position(torch.zeros(1, larger.tokens, 5), larger)[0]
    torch.testing.assert_close(y, torch.ones_like(y))


@pytest.mark.parametrize(
    ("name", "count"), [("layer", 14), ("rms", 7), ("simple_rms", 0), ("none", 0)]
)
def test_norms(name, count):
    norm = build_norm(name, 7)
    assert sum(p.numel() for p in norm.parameters()) == count
    y = norm(torch.randn(3, 7) * 50)
    if name != "none":
        torch.testing.assert_close(y.square().mean(-1), torch.ones(3), atol=1e-3, rtol=0)


def test_an_unknown_norm_is_refused():
    with pytest.raises(ValueError, match="norm 'batch' is unknown; available: layer, rms"):
        unwrap(build_norm)("batch", 7)


def test_mlps():
    x = torch.randn(2, 3, 6)
    glu, mlp = GLUConfig().build(width=6), MLPConfig(ratio=2.0, multiple_of=8).build(width=6)
    assert isinstance(glu, GLU)
    assert isinstance(mlp, MLP)
    assert glu.up_proj.out_features == 16
    assert mlp.up_proj.out_features == 16
    gate = glu.gate_proj(x)
    torch.testing.assert_close(glu(x), glu.down_proj(gate * torch.sigmoid(gate) * glu.up_proj(x)))
    want = mlp.down_proj(torch.nn.functional.gelu(mlp.up_proj(x)))
    torch.testing.assert_close(mlp(x), want)


@pytest.mark.parametrize(
    ("field", "value"), [("multiple_of", 0), ("ratio", -1.0), ("ratio", float("nan"))]
)
def test_hidden_widths_are_positive(field, value):
    with pytest.raises(ValueError, match=rf"mlp\.{field} is {value}, expected a number above 0"):
        GLUConfig(**{field: value}).build(width=6)


def test_drop_path_keeps_the_mean_and_drops_whole_samples():
    drop = DropPath(0.25)
    y = drop(torch.ones(20_000, 1, 3))
    torch.testing.assert_close(y.unique(), torch.tensor([0, 4 / 3]))
    assert torch.equal(y[..., 0], y[..., 2])
    assert y.mean().item() == pytest.approx(1, abs=0.02)
    assert torch.equal(drop.eval()(y), y)
    with pytest.raises(ValueError, match=r"drop_path is 1.0"):
        DropPath(1.0)


def test_post_norm_blocks_normalize_each_residual_sum():
    mixer = SoftmaxMixerConfig(num_heads=2)
    options = {"axes": 1, "mlp": MLPConfig(), "norm": "layer", "norm_position": "post"}
    block, grid, x = Block(12, mixer=mixer, **options), Grid((6,)), torch.randn(2, 6, 12)
    y = block.mixer_norm(x + block.mixer(x, grid)[0])
    want = block.mlp_norm(y + block.mlp(y))
    torch.testing.assert_close(block(x, grid)[0], want)
    with pytest.raises(ValueError, match="norm_position is 'post' with a LinearDiffusionMixer"):
        Block(12, mixer=LinearDiffusionMixerConfig(num_heads=2), **options)
    with pytest.raises(ValueError, match="norm_position 'middle' is unknown"):
        unwrap(Block.__init__)(block, 12, mixer=mixer, **{**options, "norm_position": "middle"})


def test_attention_dropout_applies_to_attention_weights():
    mixer = SoftmaxMixerConfig(num_heads=1, dropout=0.25).build(width=1, axes=1)
    grid, x = Grid((2000,)), torch.ones(1, 2000, 1)
    with torch.no_grad():
        mixer.in_proj.weight.zero_()
        mixer.in_proj.bias.copy_(torch.tensor([0.0, 0.0, 1.0]))  # equal weights, values of 1
        mixer.out_proj.weight.fill_(1)
        mixer.out_proj.bias.zero_()
        y = mixer(x, grid)[0]
        # each output is a mean of 2000 weights that are 0 or 4/3
        assert y.mean().item() == pytest.approx(1, abs=0.005)
        assert y.var().item() == pytest.approx(0.25 / 0.75 / 2000, rel=0.2)
        torch.testing.assert_close(mixer.eval()(x, grid)[0], torch.ones_like(x))
    with pytest.raises(ValueError, match=r"mixer\.dropout is 1\.0"):
        SoftmaxMixerConfig(num_heads=1, dropout=1.0).build(width=1, axes=1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
def test_softmax_of_feature_maps_is_the_formula(causal, tokens):
    config = SoftmaxMixerConfig(
        num_heads=2, direction="forward" if causal else "both", feature_map="shifted_silu"
    )
    mixer = config.build(width=12, axes=1).double()
    x = torch.randn(2, tokens, 12, dtype=torch.float64)
    q, k, v = (y.unflatten(-1, (2, 6)) for y in mixer.in_proj(x).chunk(3, dim=-1))
    q, k = (torch.nn.functional.silu(y) + 0.5 for y in (q, k))
    q, k = (y / y.square().sum(-1, keepdim=True).sqrt() for y in (q, k))
    scores = torch.einsum("bthk,bshk->bhts", q, k) / 6**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
    o = torch.einsum("bhts,bshv->bthv", scores.softmax(-1), v)
    torch.testing.assert_close(mixer(x, Grid((tokens,)))[0], mixer.out_proj(o.flatten(-2)))
    object.__setattr__(config, "feature_map", "gelu")  # the tests check types
    with pytest.raises(ValueError, match="feature_map 'gelu' is unknown"):
        config.build(width=12, axes=1)


def test_block_is_two_shortcuts():
    block = Block(12, axes=2, mixer=LightNetMixerConfig(num_heads=2), mlp=GLUConfig(), norm="layer")
    grid = Grid((2, 3))
    x = torch.randn(2, 6, 12)
    y = x + block.mixer(block.mixer_norm(x), grid)[0]
    torch.testing.assert_close(block(x, grid)[0], y + block.mlp(block.mlp_norm(y)))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: x, "Plain.forward returned a Tensor, expected a pair of outputs and state"),
        (lambda x: (x, None, None), "Plain.forward returned a tuple of length 3, expected a pair"),
    ],
)
def test_a_mixer_returns_outputs_and_state(wrong, message, packed):
    class Plain(torch.nn.Module):
        def forward(self, x, grid, **_):
            return wrong(x)

    mixer = SoftmaxMixerConfig(num_heads=2)
    block = Block(4, axes=1, mixer=mixer, mlp=None, norm="layer")
    block.mixer = Plain()
    x = torch.randn(2, 6, 4)  # two sequences, so that a tensor can be unpacked as a pair
    packing = Packing(torch.tensor([0, 2, 6, 12]), batch=2, tokens=6)
    documents = Documents(packing) if packed else None
    with pytest.raises(ValueError, match=message):
        block(x, Grid((6,)), documents=documents)


def test_kernels_of_positions_are_on_their_device():
    with torch.device("meta"):
        position = ToeplitzPositionConfig().build(width=8, grid=Grid((4,)))
    assert position.kernels(4).device.type == "meta"
