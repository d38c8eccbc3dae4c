"""MD-LRPE: angles against a loop, and dot products that see differences alone."""

import itertools
import math
from inspect import unwrap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairwise import pairwise

from onescan.ops.additive_decay import additive_decay
from onescan.ops.lrpe import lrpe, lrpe_angles, lrpe_frequencies

SHAPES = [(7,), (1,), (64,), (131,), (3, 4), (1, 5), (2, 3, 4), (2, 1, 3, 2)]
over_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def normal(*shape, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)


def definition(shape, theta, prefix=0):
    """The angles one by one: feature j turns by theta_j per step along axis j // ceil(K / axes)."""
    heads, width = theta.shape
    angles = torch.zeros(prefix + math.prod(shape), heads, width, dtype=theta.dtype)
    for t, place in enumerate(itertools.product(*(range(n) for n in shape))):
        for h in range(heads):
            for j in range(width):
                angles[prefix + t, h, j] = place[j // math.ceil(width / len(shape))] * theta[h, j]
    return angles


@pairwise({"shape": SHAPES, "width": [1, 4, 5, 8], "prefix": [0, 2]}, rest_is_slow=True, ids=str)
def test_angles_are_the_definition(shape, width, prefix):
    theta = normal(3, width)
    turns = (lrpe_angles(shape, theta, prefix=prefix) - definition(shape, theta, prefix)) / math.tau
    torch.testing.assert_close(turns, turns.round(), atol=1e-10, rtol=0)


@over_shapes
def test_rotation_is_the_definition(shape):
    angles = lrpe_angles(shape, normal(3, 5))
    x = normal(2, len(angles), 3, 5, seed=1)
    got = lrpe(x, angles)
    for index in itertools.product(*(range(n) for n in x.shape)):
        b, t, h, j = index
        angle = angles[t, h, j].item()
        assert got[b, t, h, j] == pytest.approx(x[index].item() * math.cos(angle), abs=1e-9)
        assert got[b, t, h, 5 + j] == pytest.approx(x[index].item() * math.sin(angle), abs=1e-9)


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    width=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_dot_products_depend_on_differences_alone(sizes, width, seed):
    q, k = normal(2, width, seed=seed)
    theta = normal(1, width, seed=seed + 1)
    angles = lrpe_angles(tuple(sizes), theta)
    tokens = len(angles)
    rotated_q, rotated_k = (lrpe(x.expand(1, tokens, 1, width), angles)[0, :, 0] for x in (q, k))
    places = torch.tensor(list(itertools.product(*(range(n) for n in sizes))))
    difference = (places[:, None] - places).double()  # T T axes
    axis = torch.arange(width) // math.ceil(width / len(sizes))
    want = (q * k * (difference[..., axis] * theta[0]).cos()).sum(-1)
    torch.testing.assert_close(rotated_q @ rotated_k.mT, want, atol=1e-9, rtol=0)


@pytest.mark.parametrize("shape", [(5,), (2, 3)], ids=str)
def test_gradcheck(shape):
    theta = normal(2, 5).requires_grad_()
    x = normal(2, 1 + math.prod(shape), 2, 5, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, theta: lrpe(x, lrpe_angles(shape, theta, prefix=1)), (x, theta)
    )


@pytest.mark.parametrize("cut", range(10))
def test_a_sequence_continues(cut):
    theta = normal(2, 4)
    assert torch.equal(lrpe_angles((10 - cut,), theta, start=cut), lrpe_angles((10,), theta)[cut:])


FAR = 100_000_000
FORMS = {
    "one scan": (False, "one_scan", 0.0),
    "full, both ways": (False, "full", 0.0),
    "chunk": (True, "chunk", 0.0),
    "chunk, rising logits": (True, "chunk", 3.0),
    "full": (True, "full", 0.0),
    "recurrent": (True, "recurrent", 0.0),
}


@pytest.mark.parametrize(("causal", "form", "rise"), FORMS.values(), ids=FORMS)
def test_shifting_all_positions_changes_no_output(causal, form, rise):
    q, k, v = (normal(2, 70, 2, 8, dtype=torch.float32, seed=seed) for seed in range(3))
    k = k + rise * torch.arange(70.0)[:, None, None]
    theta = lrpe_frequencies(8, axes=1) * (1 + 0.1 * normal(2, 8, dtype=torch.float32))

    def output(start):
        angles = lrpe_angles((70,), theta, start=start)
        return additive_decay(q, k, v, angles=angles, causal=causal, form=form, chunk_size=16)[0]

    near, far = output(0), output(FAR)
    assert (far - near).norm() <= 2e-6 * near.norm()
    assert torch.equal(output(torch.tensor(FAR)), far)


def test_rotating_pairs_of_channels_is_not_relative_under_additive_decay():
    """App. A.2: RoPE's rotations do not commute with the decay of each channel; LRPE's do."""
    q, k, v = (normal(1, 9, 1, 8, seed=seed) for seed in range(3))
    theta = torch.tensor([1.0, 0.1], dtype=torch.float64)

    def output(start):
        kv, z, outputs = k.new_zeros(4, 8), k.new_full((4,), -torch.inf), []
        for t in range(9):
            angle = torch.block_diag(*(_rotation((start + t) * each) for each in theta))
            new_z = torch.logaddexp(z, k[0, t, 0, :4])
            share = (k[0, t, 0, :4] - new_z).exp()
            kv = (z - new_z).exp()[:, None] * kv + torch.outer(angle @ share, v[0, t, 0])
            z = new_z
            outputs.append(kv.T @ angle @ q[0, t, 0, :4])
        return torch.stack(outputs)

    assert (output(5) - output(0)).abs().amax(dim=1)[1:].min() > 1e-3


def _rotation(angle):
    return torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)


def test_far_angles_are_right_and_have_the_gradient_of_theta():
    theta = normal(2, 5, dtype=torch.float32).requires_grad_()
    slope = normal(130, 2, 5, dtype=torch.float32, seed=1)
    angles = lrpe_angles((130,), theta, start=FAR)
    angles.backward(slope)
    places = torch.arange(FAR, FAR + 130).double()[:, None, None]
    want = places * theta.detach().double()
    assert angles.abs().max() <= math.tau + 1e-6
    torch.testing.assert_close(angles.detach().double().sin(), want.sin(), atol=6e-7, rtol=0)
    torch.testing.assert_close(angles.detach().double().cos(), want.cos(), atol=6e-7, rtol=0)
    error = theta.grad.double() - (places * slope).sum(0)
    assert (error.abs() <= 2e-7 * (places * slope).abs().sum(0)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_angles_are_wide_and_the_result_is_of_the_inputs_type(dtype):
    theta, x = normal(2, 4, dtype=dtype), normal(1, 300, 2, 4, dtype=dtype)
    angles = lrpe_angles((300,), theta)
    assert angles.dtype == torch.promote_types(dtype, torch.float32)
    got = lrpe(x, angles)
    assert got.dtype == dtype
    wide = angles.double()
    exact = torch.cat([x.double() * wide.cos(), x.double() * wide.sin()], dim=-1)
    # one rounding to x's type, after sines and products rounded in the wide one
    rounding = torch.finfo(dtype).eps / 2 + 2 * torch.finfo(angles.dtype).eps
    torch.testing.assert_close(got.double(), exact, rtol=rounding, atol=torch.finfo(dtype).tiny)


def test_frequencies_restart_for_each_axis():
    got = lrpe_frequencies(5, axes=2, base=100.0)
    want = torch.tensor([100.0 ** (-2 * j / 5) for j in (0, 1, 2, 0, 1)])
    torch.testing.assert_close(got, want)
    assert lrpe_frequencies(8, axes=1)[0] == 1


@pytest.mark.parametrize(
    ("default", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
    ids=["bfloat16", "float64"],
)
def test_frequencies_have_at_least_float32(default, expected):
    torch.set_default_dtype(default)
    try:
        got = lrpe_frequencies(16, axes=1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert got.dtype == expected
    torch.testing.assert_close(got.float(), lrpe_frequencies(16, axes=1))


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"shape": (2, 0)}, r"shape is \(2, 0\)"),
        ({"shape": (2.5,)}, r"shape is \(2.5,\)"),
        ({"shape": ()}, r"shape is \(\)"),
        ({"prefix": -1}, "prefix is -1"),
        ({"start": -2}, "start is -2"),
        ({"start": 1.5}, "start is 1.5"),
        ({"theta": torch.full((1, 2), torch.nan)}, "theta contains NaN"),
        ({"start": 1, "prefix": 1}, "start is 1 with prefix=1"),
        ({"theta": torch.ones(3)}, r"theta has shape \(3,\)"),
        ({"theta": torch.ones(3, 2, dtype=torch.int64)}, "theta has dtype torch.int64"),
    ],
)
def test_errors_of_angles_name_the_argument(named, message):
    with pytest.raises(ValueError, match=message):
        unwrap(lrpe_angles)(**{"shape": (4,), "theta": torch.ones(3, 2), **named})


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(1, 4, 2, 2), r"angles has shape \(4, 3, 2\)"),
        (torch.ones(4, 3, 2), r"x has shape \(4, 3, 2\)"),
        (torch.ones(1, 4, 3, 2, dtype=torch.int64), "x has dtype torch.int64"),
    ],
)
def test_errors_of_rotation_name_the_argument(x, message):
    with pytest.raises(ValueError, match=message):
        unwrap(lrpe)(x, torch.ones(4, 3, 2))


@pytest.mark.parametrize(
    "named", [{"width": 0}, {"width": 2.5}, {"axes": 0}, {"base": -1.0}, {"base": float("nan")}]
)
def test_errors_of_frequencies_name_the_argument(named):
    with pytest.raises(ValueError, match=f"{next(iter(named))} is .* expected a .*number"):
        unwrap(lrpe_frequencies)(**{"width": 4, "axes": 1, **named})


@pytest.mark.compile
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_without_a_graph_break(dynamic):
    def rotate(x, theta):
        return lrpe(x, lrpe_angles((3, 4), theta, prefix=1))

    x, theta = normal(2, 13, 3, 5), normal(3, 5, seed=1)
    compiled = torch.compile(rotate, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    torch.testing.assert_close(compiled(x, theta), rotate(x, theta))
