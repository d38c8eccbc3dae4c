"""Layers for one's own networks: self-attention, cross-attention, padding, states, positions."""

from inspect import unwrap

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import onescan
from onescan import Grid, ops
from onescan.nn import (
    MDLRPE,
    MDTPE,
    DeltaAttention,
    LightNetAttention,
    LinearDiffusion,
    LionAttention,
    MultiheadAttention,
)
from onescan.nn.arguments import grid_of

LAYERS = [LightNetAttention, LionAttention, DeltaAttention, LinearDiffusion]
DIM, HEADS = 18, 3


def tokens(batch, count):
    return torch.randn(batch, count, DIM, dtype=torch.float64)


def build(kind, **options):
    return kind(DIM, HEADS, **options).double()


def heads(x):
    return x.unflatten(-1, (HEADS, -1))


def test_the_package_exposes_its_layers():
    assert onescan.nn.LightNetAttention is LightNetAttention
    assert set(onescan.nn.__all__) == {kind.__name__ for kind in (*LAYERS, MDTPE, MDLRPE)} | {
        "MultiheadAttention",
        "replace_attention",
    }
    with pytest.raises(AttributeError, match="LightNet'"):
        _ = onescan.nn.LightNet


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(("shape", "prefix"), [((1,), 0), ((7,), 1), ((3, 5), 1), ((2, 3, 2), 0)])
def test_self_attention_equals_the_mixer(kind, shape, prefix):
    layer, grid = build(kind, axes=len(shape)), Grid(shape, prefix)
    x = tokens(2, grid.tokens)
    expected, _ = layer.mixer(x, grid)
    assert torch.equal(layer(x, shape, prefix=prefix), expected)


@pytest.mark.parametrize("kind", LAYERS)
def test_padding_is_not_read(kind):
    layer, x = build(kind), tokens(2, 9)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[:, 6:] = True
    o = layer(x.masked_fill(padding.unsqueeze(-1), torch.nan), key_padding_mask=padding)
    torch.testing.assert_close(o[:, :6], layer(x[:, :6]))
    assert not o[:, 6:].any()


@pytest.mark.parametrize(
    ("kind", "options"),
    [(LightNetAttention, {}), (LionAttention, {"decay": "none"}), (DeltaAttention, {})],
)
@pytest.mark.parametrize("crossed", [True, False])
def test_padding_of_nan_reaches_no_gradient(kind, options, crossed):
    layer, x, y = build(kind, **options), tokens(2, 7), tokens(2, 3)
    padding = torch.tensor([[False] * 5 + [True] * 2, [True] * 7])
    outcomes = []
    for value in (0.0, torch.nan):
        inputs = x.masked_fill(padding.unsqueeze(-1), value).requires_grad_()
        read = {"x": y, "context": inputs} if crossed else {"x": inputs}
        o = layer(**read, key_padding_mask=padding)
        gradients = torch.autograd.grad(
            o.square().sum(), [inputs, *layer.parameters()], allow_unused=True
        )
        outcomes.append([o, *(g for g in gradients if g is not None)])
    for got, want in zip(*outcomes, strict=True):
        assert want.isfinite().all()
        assert torch.equal(got, want)
    assert not outcomes[1][1][padding].any()


@pytest.mark.parametrize("kind", LAYERS)
def test_two_causal_calls_equal_one(kind):
    layer, x = build(kind, causal=True), tokens(2, 7)
    expected = layer(x)
    for cut in range(1, 7):
        first, state = layer(x[:, :cut], return_state=True)
        second = layer(x[:, cut:], state=state)
        torch.testing.assert_close(torch.cat([first, second], 1), expected)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 3), (1, 3, 2)])
def test_a_grid_continues_only_along_its_first_axis(shape):
    layer = LightNetAttention(24, num_heads=2, axes=3, causal=True)
    _, state = layer(torch.randn(1, 12, 24), (2, 2, 3), return_state=True)
    with pytest.raises(ValueError, match=r"^shape is \(1, .* sizes \(2, 3\) after the first axis"):
        layer(torch.randn(1, Grid(shape).tokens, 24), shape, state=state)


@pytest.mark.parametrize("shape", [(5,), (2, 3)])
def test_lightnet_reads_itself_as_context(shape):
    layer = build(LightNetAttention, axes=len(shape))
    x = tokens(2, Grid(shape).tokens)
    crossed = layer(x, shape, context=x, context_shape=shape)
    torch.testing.assert_close(crossed, layer(x, shape))


@pytest.mark.parametrize(
    ("kind", "options"), [(LightNetAttention, {"lrpe": False}), (LionAttention, {"decay": "none"})]
)
def test_layers_without_positions_read_themselves_as_context(kind, options):
    layer, x = build(kind, **options), tokens(2, 5)
    torch.testing.assert_close(layer(x, context=x), layer(x))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("queries", [1, 5])
def test_lightnet_cross_attention_is_a_softmax_over_the_context(queries, padded):
    layer, x, context = build(LightNetAttention), tokens(2, queries), tokens(2, 7)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = padded
    q, _, _, gate = layer.mixer.in_proj(x).split(layer.mixer.in_widths, -1)
    _, k, v, _ = layer.mixer.in_proj(context).split(layer.mixer.in_widths, -1)
    weight = heads(k).masked_fill(padding[:, :, None, None], -torch.inf).softmax(1)
    o = torch.einsum("bthk,bshk,bshv->bthv", heads(F.silu(q)), weight, heads(v)).flatten(2)
    expected = layer.mixer.norm(o) * torch.sigmoid(layer.mixer.gate_proj(gate))
    output = layer(x, context=context, key_padding_mask=padding)
    torch.testing.assert_close(output, layer.mixer.out_proj(expected))
    output.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)


@pytest.mark.parametrize("queries", [1, 5])
def test_lion_cross_attention_is_linear_attention(queries):
    layer, x, context = build(LionAttention, decay="none"), tokens(2, queries), tokens(2, 7)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    mixer = layer.mixer
    q, _, _ = map(heads, mixer.in_proj(x).chunk(3, -1))
    _, k, v = map(heads, mixer.in_proj(context).chunk(3, -1))
    scores = torch.einsum("bthk,bshk->bhts", mixer.feature_map(q), mixer.feature_map(k))
    scores = scores * ~padding[:, None, None]
    scores = scores / scores.sum(-1, keepdim=True)
    expected = mixer.out_proj(torch.einsum("bhts,bshv->bthv", scores, v).flatten(2))
    output = layer(x, context=context, key_padding_mask=padding)
    torch.testing.assert_close(output, expected)


def test_delta_cross_attention_reads_the_final_state():
    layer, causal = build(DeltaAttention), build(DeltaAttention, causal=True)
    causal.load_state_dict(layer.state_dict())
    context = tokens(2, 7)
    expected = causal(context)[:, -1:]
    torch.testing.assert_close(layer(context[:, -1:], context=context), expected)
    padded = torch.cat([context, tokens(2, 2)], 1)
    padding = torch.arange(9).expand(2, 9) >= 7
    output = layer(context[:, -1:], context=padded, key_padding_mask=padding)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize(
    ("kind", "options", "match"),
    [
        (LionAttention, {}, "decay='none'"),
        (LightNetAttention, {"causal": True}, "context was given to a causal layer"),
        (LionAttention, {"decay": "none", "scan": "natural"}, "scan='natural'"),
        (LinearDiffusion, {}, "LightNetAttention"),
    ],
)
@pytest.mark.parametrize("context_shape", [None, (4,)])
def test_undefined_cross_attention_is_refused(kind, options, match, context_shape):
    x = tokens(1, 4)
    with pytest.raises(ValueError, match=match):
        build(kind, **options)(x, context=x, context_shape=context_shape)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(LightNetAttention, {}), (LionAttention, {"decay": "none"}), (DeltaAttention, {})],
)
def test_empty_inputs_are_refused(kind, options):
    layer, x = build(kind, **options), tokens(1, 4)
    with pytest.raises(ValueError, match=r"^context has 0 tokens, expected at least 1"):
        layer(x, context=x[:, :0])
    with pytest.raises(ValueError, match="0 tokens with prefix=0, expected at least 1"):
        layer(x[:, :0])
    with pytest.raises(ValueError, match="4 tokens with prefix=10, expected at least 11"):
        layer(x, prefix=10)


@pytest.mark.parametrize("kind", LAYERS)
def test_states_need_a_causal_layer(kind):
    layer, x = build(kind), tokens(1, 4)
    with pytest.raises(
        ValueError, match=r"^return_state is True, expected a layer with causal=True"
    ):
        layer(x, return_state=True)
    with pytest.raises(ValueError, match=r"^state was given, expected a layer with causal=True"):
        layer(x, state=object())


@pytest.mark.parametrize("options", [{}, {"causal": True, "joint": True}])
def test_states_of_mdtpe_need_one_direction_and_separate_axes(options):
    layer, x = MDTPE(DIM, axes=2, **options).double(), tokens(1, 4)
    with pytest.raises(ValueError, match=r"^return_state is True, expected a layer with causal=T"):
        layer(x, (2, 2), return_state=True)


SIZES = {
    **{kind: {"dim": DIM, "num_heads": HEADS, "axes": 1} for kind in LAYERS},
    MDTPE: {"dim": DIM, "axes": 1, "hidden_states": 4, "length": 8},
    MDLRPE: {"head_dim": 4, "num_heads": HEADS, "axes": 1},
    MultiheadAttention: {"embed_dim": DIM, "num_heads": HEADS},
}


@pytest.mark.parametrize("value", [0, -1, True])
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in SIZES for name in SIZES[kind]])
def test_sizes_are_positive_whole_numbers(kind, name, value):
    with pytest.raises(
        ValueError, match=f"^{name} is {value}, expected a whole number of at least"
    ):
        kind(**SIZES[kind] | {name: value})


@pytest.mark.parametrize(
    "layer", [lambda: MDLRPE(4, 2, axes=3), lambda: LightNetAttention(8, 2, axes=3)]
)
def test_each_axis_needs_rotary_features(layer):
    with pytest.raises(
        ValueError, match=r"head_?.* 4 .*leaves the last of 3 axes without features"
    ):
        layer()


@pytest.mark.parametrize("shape", [[3, 4], tuple(np.array([3, 4]))])
def test_shapes_are_sequences_of_whole_numbers(shape):
    assert unwrap(grid_of)(12, shape, 2, 0) == Grid((3, 4))
    theta = torch.ones(1, 2)
    angles = unwrap(ops.lrpe_angles)(shape, theta)
    assert torch.equal(angles, ops.lrpe_angles((3, 4), theta))
    x, decay, weight = torch.randn(1, 12, 2), -torch.ones(2, 2, 3), torch.ones(2, 2, 3)
    y, _ = unwrap(ops.toeplitz_position)(x, decay, weight, shape)
    assert torch.equal(y, ops.toeplitz_position(x, decay, weight, (3, 4))[0])


def test_a_tensor_as_shape_is_not_printed():
    message = "shape is a Tensor, expected one positive whole number per axis"
    with pytest.raises(ValueError, match=message):
        unwrap(grid_of)(6, tokens(1, 6), 1, 0)


def test_wrong_arguments_are_named():
    layer, x = build(LightNetAttention, axes=2), tokens(1, 6)
    with pytest.raises(ValueError, match="shape is None"):
        layer(x)
    with pytest.raises(ValueError, match="6 tokens, but shape \\(2, 4\\) with prefix=0 has 8"):
        layer(x, (2, 4))
    with pytest.raises(ValueError, match="expected 1 axis, as in the layer"):
        build(LightNetAttention)(x, (2, 3))
    with pytest.raises(ValueError, match="key_padding_mask has dtype"):
        layer(x, (2, 3), key_padding_mask=torch.zeros(1, 6))
    with pytest.raises(ValueError, match="context has 2 sequences"):
        layer(x, (2, 3), context=tokens(2, 6))
    with pytest.raises(ValueError, match="context_shape"):
        layer(x, (2, 3), context_shape=(2, 3))


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 4), (2, 3, 2)])
def test_mdtpe_equals_its_layer_on_any_grid(shape):
    layer, grid = MDTPE(DIM, axes=len(shape)).double(), Grid(shape, 1)
    x = tokens(2, grid.tokens)
    y = layer(x, shape, prefix=1)
    assert torch.equal(y, layer.position(x, grid)[0])
    assert torch.equal(y[:, 0], x[:, 0])


def test_two_causal_calls_of_mdtpe_equal_one():
    layer, x = MDTPE(DIM, causal=True).double(), tokens(2, 7)
    first, state = layer(x[:, :3], return_state=True)
    second = layer(x[:, 3:], state=state)
    torch.testing.assert_close(torch.cat([first, second], 1), layer(x))


def test_mdlrpe_products_depend_on_relative_positions():
    layer = MDLRPE(4, HEADS, axes=2).double()
    q = torch.randn(1, 1, HEADS, 4, dtype=torch.float64).expand(1, 12, HEADS, 4)
    rotated, keys = layer(q, q, (3, 4))
    scores = torch.einsum("bthf,bshf->hts", rotated, keys)
    scores = scores.unflatten(1, (3, 4)).unflatten(3, (3, 4))
    torch.testing.assert_close(scores[:, 0, 0, 1, 2], scores[:, 1, 1, 2, 3])


@pytest.mark.parametrize(
    "op",
    [
        ops.additive_decay, ops.decay_attention, ops.delta_rule, ops.linear_diffusion, ops.lrpe,
    ],
)  # fmt: skip
def test_ops_document_their_layout_first(op):
    summary, arguments = op.__doc__.split("Args:")
    assert "``[B, T, H, " in summary
    assert "scaled_dot_product_attention" in summary
    assert op is ops.lrpe or "opposite of ``key_padding_mask``" in arguments
