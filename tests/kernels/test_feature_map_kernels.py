"""LION's feature map in kernels, run by Triton in Python or on a GPU, and its gradient."""

import pytest
import torch
import torch.nn.functional as F
from kernel_device import (
    BRAIN,
    DEVICE,
    MARKS,
    SINGLE,
    assert_errors_like_torch,
    interpreted,
    over_dtypes,
)

from onescan.ops.backend import use_backend
from onescan.ops.feature_maps import shifted_silu

pytest.importorskip("triton")
launches = pytest.importorskip("onescan.ops.feature_map_launch")

pytestmark = MARKS


def plain(x):
    u = F.silu(x) + 0.5
    return u / u.square().sum(-1, keepdim=True).sqrt()


def with_gradient(function, x, slope):
    x = x.detach().requires_grad_()
    y = function(x)
    return y.detach().double().cpu(), torch.autograd.grad(y, x, slope.to(y))[0].double().cpu()


def in_kernels(x):
    with use_backend("triton"):
        return shifted_silu(x)


@over_dtypes
@pytest.mark.parametrize("sizes", [(2, 5, 3, 8), (1, 1, 1, 1), (3, 11, 2, 48), (2, 9, 2, 128)])
def test_kernels_err_at_most_twice_as_much_as_plain_torch(sizes, dtype):
    x = (4 * torch.randn(sizes)).to(DEVICE, dtype)
    slope = torch.randn(sizes).to(DEVICE, dtype)
    exact = with_gradient(plain, x.double(), slope)
    usual = with_gradient(plain, x, slope)
    assert_errors_like_torch(with_gradient(in_kernels, x, slope), usual, exact, dtype)


def test_heads_of_a_wider_projection_are_read_in_place(monkeypatch):
    """A copy would take as long as the feature map itself."""
    projected = torch.randn(2, 5, 3 * 16, device=DEVICE)
    slope = torch.randn(2, 5, 2, 8, device=DEVICE)
    read = []
    launch = launches.launch
    monkeypatch.setattr(
        launches, "launch", lambda *given: (read.append(given[3].data_ptr()), launch(*given))
    )
    for first in (0, 16, 32):
        part = projected[..., first : first + 16].unflatten(-1, (2, 8))
        y = in_kernels(part)
        assert read.pop() == part.data_ptr()
        assert y.is_contiguous()
        torch.testing.assert_close(y, plain(part))
        found, want = (with_gradient(f, part, slope)[1] for f in (in_kernels, plain))
        torch.testing.assert_close(found, want, atol=1e-6, rtol=1e-5)


def test_other_layouts_are_copied():
    x = torch.randn(2, 5, 3, 8, device=DEVICE)
    views = x.transpose(0, 1), x.transpose(1, 2), x.mT, x[:1].expand(4, -1, -1, -1), x[..., ::2]
    for view in views:
        torch.testing.assert_close(in_kernels(view), plain(view))


def test_nan_stays_nan_and_large_numbers_do_not_overflow():
    x = torch.tensor([torch.nan, 1e4, -1e4]).reshape(3, 1, 1, 1).to(DEVICE)
    y = in_kernels(x.expand(3, 1, 1, 4))
    assert y[0].isnan().all()
    torch.testing.assert_close(y[1:], torch.full_like(y[1:], 0.5))


@interpreted
def test_types_without_kernels_run_in_torch():
    for dtype in (torch.float64, BRAIN):
        x = torch.randn(1, 2, 1, 4, dtype=dtype)
        assert in_kernels(x).dtype == dtype


def test_no_samples_give_no_features():
    assert in_kernels(torch.randn(0, 5, 2, 8, device=DEVICE)).shape == (0, 5, 2, 8)


def test_operators_are_as_torch_wants_them():
    x = torch.randn(2, 3, 2, 4, device=DEVICE, dtype=SINGLE).requires_grad_()
    torch.library.opcheck(torch.ops.onescan.shifted_silu.default, (x,))
