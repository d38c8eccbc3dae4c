"""MD-LRPE's kernels, run by Triton in Python or on a GPU: the rotation and both gradients."""

import functools
import inspect

import pytest
import torch
from kernel_device import (
    BRAIN,
    DEVICE,
    HALF,
    LONGEST,
    MARKS,
    SINGLE,
    assert_a_graph_repeats,
    drawn,
    over_dtypes,
    over_seeds,
)

from onescan.ops.backend import use_backend
from onescan.ops.lrpe import lrpe, lrpe_angles, lrpe_frequencies

pytest.importorskip("triton")
lrpe_launch = pytest.importorskip("onescan.ops.lrpe_launch")

rotate = functools.partial(lrpe, backend="triton")
pytestmark = MARKS


def inputs(batch, tokens, heads, width, *, dtype, reach=4.0):
    """Queries, and angles of up to 10^reach radians."""
    x = torch.randn(batch, tokens, heads, width).to(DEVICE, dtype)
    return x, (torch.randn(tokens, heads, width) * torch.logspace(0, reach, width)).to(DEVICE)


def rotated_with_gradients(function, x, angles, slope):
    x, angles = (t.detach().clone().requires_grad_() for t in (x, angles))
    y = function(x, angles)
    return y.detach(), *torch.autograd.grad(y, (x, angles), slope.to(y))


def exactly(x, angles):
    expected = torch.stack([angles.cos(), angles.sin()], dim=-2)
    return (x.unsqueeze(-2) * expected).flatten(-2)


def errors(got, want):
    return torch.tensor(
        [(x.double().cpu() - y).norm() / y.norm() for x, y in zip(got, want, strict=True)]
    )


def assert_within_twice_plain(x, angles):
    """The kernels' errors, at most twice those of plain torch."""
    slope = torch.randn(*x.shape[:3], 2 * x.shape[3]).to(x.dtype)
    got = rotated_with_gradients(rotate, x, angles, slope)
    plain = rotated_with_gradients(functools.partial(lrpe, backend="torch"), x, angles, slope)
    want = rotated_with_gradients(exactly, x.double().cpu(), angles.double().cpu(), slope)
    smallest = torch.finfo(SINGLE).eps
    assert (errors(got, want) <= 2 * errors(plain, want) + smallest).all()


SIZES = [(2, 30, 2, 9), (1, 1, 1, 5), (3, 50, 3, 16), (40, 3, 1, 64)]


@over_dtypes
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_kernels_err_at_most_twice_as_much_as_plain_torch(sizes, dtype):
    assert_within_twice_plain(*inputs(*sizes, dtype=dtype))


WIDTHS = (1, 16, 33, 64, 96, 128)  # few, as kernels are compiled anew for each


@over_dtypes
@over_seeds
def test_random_shapes(seed, dtype):
    batch, tokens, heads = drawn(seed, 20, LONGEST, 4)
    width = WIDTHS[seed % len(WIDTHS)]
    assert_within_twice_plain(*inputs(batch, tokens, heads, width, dtype=dtype))


def test_samples_are_dealt_to_few_programs(monkeypatch):
    monkeypatch.setattr(lrpe_launch, "target_programs", lambda _: 4)
    assert_within_twice_plain(*inputs(13, 3, 1, 64, dtype=SINGLE))


@pytest.mark.gpu
def test_a_cuda_graph_repeats_a_call():
    x, angles = inputs(2, 30, 4, 64, dtype=BRAIN)
    assert_a_graph_repeats(lambda: rotate(x, angles))


@pytest.mark.parametrize("reach", [0.0, 7.0])
def test_sines_of_large_angles_are_those_of_float64(reach):
    angles = torch.linspace(-1, 1, 999).reshape(3, 3, 111) * 10**reach
    y = rotate(torch.ones(1, 3, 3, 111, device=DEVICE), angles.to(DEVICE))
    want = torch.cat([angles.double().cos(), angles.double().sin()], dim=-1)
    torch.testing.assert_close(y[0].double().cpu(), want, atol=1.5e-7, rtol=0)


def test_a_rotation_by_nan_is_nan():
    angles = torch.tensor([0.0, torch.nan]).reshape(2, 1, 1)
    y = rotate(torch.ones(1, 2, 1, 1, device=DEVICE), angles.to(DEVICE))
    assert y[0, 0].isfinite().all()
    assert y[0, 1].isnan().all()


def test_angles_that_want_no_gradient_get_none():
    x, angles = inputs(2, 5, 1, 4, dtype=SINGLE)
    x.requires_grad_()
    rotate(x, angles).sum().backward()
    torch.testing.assert_close(x.grad[0], angles.cos() + angles.sin(), atol=1e-6, rtol=1e-5)
    assert angles.grad is None


def test_views_are_rotated_as_copies_are():
    x, angles = inputs(2, 6, 3, 4, dtype=SINGLE)
    turned = rotate(x.mT.contiguous().mT, angles.mT.contiguous().mT)
    assert torch.equal(turned, rotate(x, angles))


def test_no_samples_give_no_rotations():
    x, angles = inputs(0, 5, 1, 4, dtype=SINGLE)
    assert rotate(x, angles).shape == (0, 5, 1, 8)


def test_the_preferred_backend_is_taken():
    x, angles = inputs(1, 4, 1, 3, dtype=SINGLE)
    with use_backend("triton"):
        preferred = lrpe(x, angles)
    assert torch.equal(preferred, rotate(x, angles))
    with use_backend("triton"):  # there is no kernel for it, so torch runs
        assert lrpe(x.double(), angles).dtype == torch.float64


GRIDS = [((7,), 0, 5), ((700,), 2, 0), ((3, 4), 1, 0), ((2, 3, 4), 0, 100_000_000), ((1, 5), 0, 0)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("shape", "prefix", "start"), GRIDS, ids=str)
@pytest.mark.parametrize("width", [1, 5, 70])
def test_angles_of_a_grid_are_those_of_float64(shape, prefix, start, width):
    def with_gradient(theta, backend):
        theta = theta.clone().requires_grad_()
        with use_backend(backend):
            angles = lrpe_angles(shape, theta, prefix=prefix, start=start)
        slope = torch.cos(torch.arange(angles.numel())).view_as(angles)
        return angles.detach().double().cpu(), torch.autograd.grad(angles, theta, slope.to(angles))

    theta = torch.randn(3, width, device=DEVICE)
    (found, gradient), (want, exact) = (
        with_gradient(theta, "triton"), with_gradient(theta.double(), "torch"),
    )  # fmt: skip
    assert found.abs().max() <= torch.pi + 1e-6
    turns = (found - want) / torch.pi / 2
    torch.testing.assert_close(turns, turns.round(), atol=1e-7, rtol=0)
    assert (gradient[0].double() - exact[0]).abs().max() <= 1e-6 * exact[0].abs().max()


def test_angles_take_no_kernel_for_a_start_on_the_device():
    theta = torch.randn(2, 4, device=DEVICE)
    with use_backend("triton"):
        found = lrpe_angles((6,), theta, start=torch.tensor(3, device=DEVICE))
        want = lrpe_angles((6,), theta, start=3)
    torch.testing.assert_close(found.cos(), want.cos())


@over_dtypes
@pytest.mark.parametrize("wide", [SINGLE, torch.float64])
def test_a_table_has_the_cosines_and_sines_of_angles_with_gaps(wide, dtype):
    _, angles = inputs(1, 5, 3, 70, dtype=dtype)
    angles = angles.to(wide).mT.contiguous().mT
    table = lrpe_launch.rotary_table(angles, dtype)
    assert table.dtype == (SINGLE if dtype is SINGLE else HALF)
    want = torch.stack([angles.double().cos(), angles.double().sin()], dim=-2)
    assert table.shape == want.shape
    assert (table - want).abs().max() <= torch.finfo(table.dtype).eps


def test_rotary_tables_of_far_positions_are_exact():
    far, tokens = 100_000_000, 70
    theta = lrpe_frequencies(8, axes=1).repeat(2, 1).to(DEVICE)
    x = torch.randn(1, tokens, 2, 8, device=DEVICE).requires_grad_()
    near, angles = (lrpe_angles((tokens,), theta, start=start) for start in (0, far))
    places = torch.arange(far, far + tokens).double()[:, None, None]
    exact = places * theta.double().cpu()
    expected = torch.stack([exact.cos(), exact.sin()], dim=-2)
    torch.testing.assert_close(
        lrpe_launch.rotary_table(angles, SINGLE).double().cpu(), expected, atol=6e-7, rtol=0
    )

    def scores(angles):
        y = rotate(x, angles)[0].transpose(0, 1)
        return y @ y.mT

    for found, expected in ((scores(angles), scores(near)), slopes(scores, x, angles, near)):
        assert (found - expected).norm() <= 2e-6 * expected.norm()


def slopes(function, x, *several):
    """Return the gradient of x for each table of angles."""
    return [torch.autograd.grad(function(angles).square().sum(), x)[0] for angles in several]


@pytest.mark.parametrize("backend", ["tritn", "cuda"])
def test_an_unknown_backend_is_named(backend):
    x, angles = inputs(1, 4, 1, 3, dtype=SINGLE)
    with pytest.raises(ValueError, match=f"backend '{backend}' is unknown"):
        inspect.unwrap(lrpe)(x, angles, backend=backend)


def test_types_without_kernels_are_refused():
    x, angles = inputs(1, 4, 1, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="backend is 'triton', but kernels take float32"):
        rotate(x, angles)


def test_the_op_is_declared_rightly():
    x, angles = (t.requires_grad_() for t in inputs(2, 5, 2, 3, dtype=SINGLE))
    torch.library.opcheck(torch.ops.onescan.lrpe.default, (x, angles))
    theta = torch.randn(2, 3, device=DEVICE, requires_grad=True)
    torch.library.opcheck(torch.ops.onescan.lrpe_angles.default, (theta, [2, 3], 1, 0))


@pytest.mark.compile
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_without_a_graph_break(dynamic):
    torch.compiler.reset()

    def turned(x, theta):
        with use_backend("triton"):
            return lrpe(x, lrpe_angles((x.shape[1],), theta))

    compiled = torch.compile(turned, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (7, 9):
        x, theta = torch.randn(2, tokens, 2, 3).to(DEVICE), torch.randn(2, 3).to(DEVICE)
        slope = torch.randn(2, tokens, 2, 6)
        got, want = (rotated_with_gradients(f, x, theta, slope) for f in (compiled, turned))
        torch.testing.assert_close(got, want)
