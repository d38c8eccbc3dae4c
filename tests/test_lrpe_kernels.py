"""MD-LRPE's kernels, run by Triton in Python or on a GPU: the rotation and both gradients."""

import functools

import pytest
import torch

from onescan.ops.backend import use_backend
from onescan.ops.lrpe import lrpe, lrpe_angles

pytest.importorskip("triton")
triton_lrpe = pytest.importorskip("onescan.ops.triton_lrpe")

rotate = functools.partial(lrpe, backend="triton")
gpu = pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)
on_every_device = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        ("cpu", torch.float16),
        gpu,
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, marks=pytest.mark.gpu),
    ],
)


@pytest.fixture(autouse=True)
def _interpreted_or_on_a_gpu(request):
    is_gpu = request.node.get_closest_marker("gpu") is not None
    if is_gpu != torch.cuda.is_available():
        pytest.skip("kernels are interpreted where there is no GPU")


def inputs(batch, tokens, heads, width, *, dtype, device="cpu", reach=4.0):
    """Queries, and angles of up to 10^reach radians."""
    x = torch.randn(batch, tokens, heads, width).to(device, dtype)
    return x, (torch.randn(tokens, heads, width) * torch.logspace(0, reach, width)).to(device)


def rotated_with_gradients(function, x, angles):
    x, angles = (t.detach().clone().requires_grad_() for t in (x, angles))
    y = function(x, angles)
    slope = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y)
    return y.detach(), *torch.autograd.grad(y, (x, angles), slope)


def errors(got, want):
    return torch.tensor(
        [(x.double() - y).norm() / y.norm() for x, y in zip(got, want, strict=True)]
    )


SIZES = [(2, 30, 2, 9), (1, 1, 1, 5), (3, 50, 3, 16), (40, 3, 1, 64)]


@on_every_device
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_kernels_err_at_most_twice_as_much_as_plain_torch(sizes, device, dtype):
    x, angles = inputs(*sizes, dtype=dtype, device=device)
    slope_as_rounded = rotated_with_gradients(rotate, x, angles)
    plain = rotated_with_gradients(functools.partial(lrpe, backend="torch"), x, angles)

    def exactly(wide_x, wide_angles):
        turn = torch.stack([wide_angles.cos(), wide_angles.sin()], dim=-2)
        return (wide_x.unsqueeze(-2) * turn).flatten(-2)

    exact_x, exact_angles = (t.double().requires_grad_() for t in (x, angles))
    y = exactly(exact_x, exact_angles)
    slope = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(plain[0]).double()
    want = (y.detach(), *torch.autograd.grad(y, (exact_x, exact_angles), slope))
    smallest = torch.finfo(torch.float32).eps
    assert (errors(slope_as_rounded, want) <= 2 * errors(plain, want) + smallest).all()


@pytest.mark.parametrize("reach", [0.0, 7.0])
def test_sines_of_large_angles_are_those_of_float64(reach):
    angles = torch.linspace(-1, 1, 999).reshape(3, 3, 111) * 10**reach
    y = rotate(torch.ones(1, 3, 3, 111), angles)
    want = torch.cat([angles.double().cos(), angles.double().sin()], dim=-1)
    torch.testing.assert_close(y[0].double(), want, atol=1.5e-7, rtol=0)


def test_a_rotation_by_nan_is_nan():
    y = rotate(torch.ones(1, 2, 1, 1), torch.tensor([0.0, torch.nan]).reshape(2, 1, 1))
    assert y[0, 0].isfinite().all()
    assert y[0, 1].isnan().all()


def test_angles_that_want_no_gradient_get_none():
    x, angles = inputs(2, 5, 1, 4, dtype=torch.float32)
    x.requires_grad_()
    rotate(x, angles).sum().backward()
    torch.testing.assert_close(x.grad[0], angles.cos() + angles.sin(), atol=1e-6, rtol=1e-5)
    assert angles.grad is None


def test_views_are_rotated_as_copies_are():
    x, angles = inputs(2, 6, 3, 4, dtype=torch.float32)
    turned = rotate(x.mT.contiguous().mT, angles.mT.contiguous().mT)
    assert torch.equal(turned, rotate(x, angles))


def test_no_samples_give_no_rotations():
    x, angles = inputs(0, 5, 1, 4, dtype=torch.float32)
    assert rotate(x, angles).shape == (0, 5, 1, 8)


def test_the_preferred_backend_is_taken():
    x, angles = inputs(1, 4, 1, 3, dtype=torch.float32)
    with use_backend("triton"):
        preferred = lrpe(x, angles)
    assert torch.equal(preferred, rotate(x, angles))
    with use_backend("triton"):  # there is no kernel for it, so torch runs
        assert lrpe(x.double(), angles).dtype == torch.float64


@pytest.mark.parametrize("backend", ["tritn", "cuda"])
def test_an_unknown_backend_is_named(backend):
    x, angles = inputs(1, 4, 1, 3, dtype=torch.float32)
    with pytest.raises(ValueError, match=f"backend '{backend}' is unknown"):
        lrpe.__wrapped__(x, angles, backend=backend)


def test_types_without_kernels_are_refused():
    x, angles = inputs(1, 4, 1, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="backend is 'triton', but kernels take float32"):
        rotate(x, angles)


def test_the_op_is_declared_rightly():
    x, angles = (t.requires_grad_() for t in inputs(2, 5, 2, 3, dtype=torch.float32))
    torch.library.opcheck(torch.ops.onescan.lrpe.default, (x, angles))


@pytest.mark.compile
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_without_a_graph_break(dynamic):
    torch.compiler.reset()

    def turned(x, theta):
        return lrpe(x, lrpe_angles((x.shape[1],), theta), backend="triton")

    compiled = torch.compile(turned, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (7, 9):
        x, theta = torch.randn(2, tokens, 2, 3), torch.randn(2, 3)
        want = rotated_with_gradients(turned, x, theta)
        for got, expected in zip(rotated_with_gradients(compiled, x, theta), want, strict=True):
            torch.testing.assert_close(got, expected)
