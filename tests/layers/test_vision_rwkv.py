"""Vision-RWKV: its attention against the paper's sums, its shift, and its two kinds of blocks."""

import math

import pytest
import torch

from onescan.layers.mixers import MIXERS, VisionRWKVMixerConfig
from onescan.layers.mixers.vision_rwkv import bi_wkv, quad_shift
from onescan.models.presets import preset
from onescan.shapes import Grid

WIDTH, HEADS = 24, 3
over_parts = pytest.mark.parametrize("part", ["spatial", "channel"])
over_forms = pytest.mark.parametrize("form", ["auto", "full", "chunk", "recurrent"])


def tokens(*shape):
    return torch.randn(*shape, WIDTH, dtype=torch.float64)


def trained(part, **fields):
    """Return a mixer with weights as training may leave them, in float64."""
    config = VisionRWKVMixerConfig(num_heads=HEADS, part=part, **fields)
    mixer = config.build(width=WIDTH, axes=2).double()
    for parameter in mixer.parameters():
        with torch.no_grad():
            parameter += 0.3 * torch.randn_like(parameter)
    return mixer


def logits(k, w, u):
    """Return k_i - (|t - i| - 1) w / T, and k_t + u on the diagonal, [T, T, D]."""
    count = len(k)
    lag = (torch.arange(count)[:, None] - torch.arange(count)[None, :]).abs()
    apart = k[None] - (lag[..., None] - 1) * w / count
    return torch.where(lag[..., None] == 0, k[None] + u, apart)


def by_the_paper(k, v, w, u):
    """Bi-WKV of one sequence [T, D], as a softmax."""
    return torch.einsum("tid,id->td", logits(k, w, u).softmax(dim=1), v)


@over_forms
@pytest.mark.parametrize("count", [1, 2, 9, 33])
def test_bi_wkv_is_the_papers_sum(form, count):
    inputs = [tokens(2, count), tokens(2, count), 4 * tokens(), tokens()]  # w of both signs
    for tensor in inputs:
        tensor.requires_grad_()
    k, v, w, u = inputs
    o = bi_wkv(*inputs, form=form, chunk_size=4)
    want = torch.stack([by_the_paper(*rows, w, u) for rows in zip(k, v, strict=True)])
    torch.testing.assert_close(o, want, rtol=1e-9, atol=1e-9)
    slope = torch.randn_like(o)
    got = torch.autograd.grad(o, inputs, slope)
    for one, two in zip(got, torch.autograd.grad(want, inputs, slope), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-8)


def test_masked_tokens_are_not_counted():
    k, v, w, u = tokens(3, 8), tokens(3, 8), 4 * tokens(), tokens()
    keep = torch.rand(3, 8) < 0.6
    keep[2] = False
    o = bi_wkv(k, v, w, u, keep=keep, chunk_size=4)
    for got, mask, *rows in zip(o, keep, k, v, strict=True):
        short_k, short_v = (row[mask] for row in rows)
        if len(short_k):
            torch.testing.assert_close(got[mask], by_the_paper(short_k, short_v, w, u))
    assert o.isfinite().all()


@over_forms
@pytest.mark.parametrize("offset", [-1e4, 0, 1e4])
def test_large_keys_do_not_overflow_in_float32(form, offset):
    k, v, w, u = 10 * tokens(1, 20) + offset, tokens(1, 20), 8 * tokens(), tokens()
    inputs = [x.float() for x in (k, v, w, u)]
    want = by_the_paper(*(x.double() for x in (inputs[0][0], inputs[1][0], *inputs[2:])))
    inputs[0].requires_grad_()
    o = bi_wkv(*inputs, form=form)
    torch.testing.assert_close(o[0].double(), want, rtol=1e-4, atol=1e-4)
    o.sum().backward()
    assert inputs[0].grad.isfinite().all()


def test_decays_beyond_the_range_of_exp_are_finite():
    k, v, u = (tokens(1, 20).float(), tokens(1, 20).float(), tokens().float())
    for w in (-1000.0, 1000.0):
        decay = torch.full((WIDTH,), w, requires_grad=True)
        o = bi_wkv(k, v, decay, u)
        o.sum().backward()
        assert o.isfinite().all()
        assert decay.grad.isfinite().all()
        assert o.abs().max() <= v.abs().max() * 1.0001


def test_the_quad_shift_takes_a_quarter_from_each_neighbor():
    x = torch.arange(1.0, 7).reshape(1, 6, 1).expand(1, 6, 9)  # a grid of 2 x 3
    left, right, up, down, rest = quad_shift(x, Grid((2, 3)))[0].split([2, 2, 2, 2, 1], dim=-1)
    for part, want in (
        (left, [0, 1, 2, 0, 4, 5]),
        (right, [2, 3, 0, 5, 6, 0]),
        (up, [0, 0, 0, 1, 2, 3]),
        (down, [4, 5, 6, 0, 0, 0]),
        (rest, [1, 2, 3, 4, 5, 6]),
    ):
        assert (part == torch.tensor(want).unsqueeze(-1)).all()


def test_the_quad_shift_along_a_line_and_around_a_prefix():
    x = torch.arange(1.0, 5).reshape(1, 4, 1).expand(1, 4, 4)
    before, after = quad_shift(x, Grid((3,), prefix=1))[0].split(2, dim=-1)
    assert before[:, 0].tolist() == [1, 0, 2, 3]
    assert after[:, 0].tolist() == [1, 3, 4, 0]


def mixed(mixer, x, grid):
    other = quad_shift(x, grid)
    return [x * mix + other * (1 - mix) for mix in mixer.shift_mix]


@over_parts
def test_blocks_are_the_papers_equations(part):
    mixer, grid = trained(part), Grid((3, 4))
    x = tokens(2, 12)
    if part == "spatial":
        r, k, v = mixed(mixer, x, grid)
        k, v = k @ mixer.k_proj.weight.T, v @ mixer.v_proj.weight.T
        rows = zip(k, v, strict=True)
        o = torch.stack([by_the_paper(*row, mixer.decay, mixer.bonus) for row in rows])
        want = (torch.sigmoid(r @ mixer.gate_proj.weight.T) * o) @ mixer.out_proj.weight.T
    else:
        r, k = mixed(mixer, x, grid)
        k = (k @ mixer.up_proj.weight.T).clamp(min=0) ** 2
        want = torch.sigmoid(r @ mixer.gate_proj.weight.T) * (k @ mixer.down_proj.weight.T)
    torch.testing.assert_close(mixer(x, grid)[0], want)


@over_parts
def test_masked_rows_equal_removed_ones(part):
    mixer, x = trained(part), tokens(1, 12)
    keep = torch.arange(12)[None] < 8  # without the last of three rows
    x[~keep] = torch.nan
    y, _ = mixer(x, Grid((3, 4)), keep=keep)
    torch.testing.assert_close(y[:, :8], mixer(x[:, :8], Grid((2, 4)))[0])
    assert (y[:, 8:] == 0).all()


def test_models_alternate_between_spatial_and_channel_mixing():
    model = preset("vision_rwkv_tiny", image_size=32, depth=4, num_classes=5).build().eval()
    parts = [block.mixer.config.part for block in model.blocks]
    assert parts == ["spatial", "channel", "spatial", "channel"]
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 5)
    assert model.blocks[0].mlp is None


def test_initial_values_depend_on_the_layer_as_in_rwkv4():
    """In the third of three layers, each of two blocks: arXiv:2305.13048, App. E."""
    spatial, channel = preset("vision_rwkv_tiny", image_size=32, depth=6).build().blocks[-2:]
    width = spatial.mixer.decay.shape[0]
    share = torch.arange(width) / width
    r, k, v = spatial.mixer.shift_mix
    torch.testing.assert_close(r, share ** (0.5 / 3))
    torch.testing.assert_close(k, share ** (1 / 3))
    torch.testing.assert_close(v, share ** (1 / 3) + 0.3)
    assert all(torch.equal(mix, k) for mix in channel.mixer.shift_mix)
    steps = torch.arange(width) / (width - 1)
    torch.testing.assert_close(spatial.mixer.decay, 8 * steps**2 - 5)
    first = preset("vision_rwkv_tiny", image_size=32, depth=6).build().blocks[0].mixer
    assert not torch.equal(first.decay, spatial.mixer.decay)
    assert torch.equal(first.bonus, spatial.mixer.bonus)


@over_parts
def test_initial_values_are_those_of_the_originals_first_block(part):
    mixer = MIXERS["vision_rwkv"](num_heads=HEADS, part=part).build(width=WIDTH, axes=2)
    share = torch.arange(WIDTH) / WIDTH
    r, *others = mixer.shift_mix
    torch.testing.assert_close(r, share.sqrt() if part == "spatial" else share)
    assert all(torch.equal(mix, share) for mix in others)
    if part == "spatial":
        assert [mixer.decay[0], mixer.decay[-1]] == [-5, 3]
        near = torch.tensor([0.0, 0.5, -0.5]) + math.log(0.3)
        torch.testing.assert_close(mixer.bonus[:3], near, atol=0.005, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@over_parts
def test_mixed_precision_is_close_to_float32(part, dtype):
    mixer, x, grid = trained(part).float(), torch.randn(2, 36, WIDTH), Grid((6, 6))
    want, _ = mixer(x, grid)
    with torch.autocast("cpu", dtype):
        found, _ = mixer(x, grid)
    assert (found - want).norm() < 0.05 * want.norm()
    half, _ = mixer.to(dtype)(x.to(dtype), grid)
    assert half.dtype == dtype
    assert (half.float() - want).norm() < 0.1 * want.norm()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"part": "alternating"}, "part is 'alternating', which describes a whole model"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"ratio": 0.0}, "ratio is 0.0"),
        ({"num_heads": 5}, "width 24 is not a multiple of num_heads 5"),
    ],
)
def test_invalid_fields_are_rejected(fields, message):
    config = MIXERS["vision_rwkv"](**{"num_heads": HEADS, **fields})
    with pytest.raises(ValueError, match=message):
        config.build(width=WIDTH, axes=2)


@over_parts
def test_grids_of_another_size_are_rejected(part):
    with pytest.raises(ValueError, match=r"x has 12 tokens, but Grid\(.* has 20"):
        trained(part)(tokens(1, 12), Grid((4, 5)))


@pytest.mark.compile
def test_a_vision_rwkv_classifier_compiles_whole():
    model = preset("vision_rwkv_tiny", image_size=32, depth=2, num_classes=5).build().eval()
    images = torch.randn(2, 3, 32, 32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images), model(images))
