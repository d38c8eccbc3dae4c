"""Gates in kernels, run by Triton in Python or on a GPU, and both gradients."""

import functools

import pytest
import torch
from kernel_device import (
    BRAIN,
    DEVICE,
    HALF,
    MARKS,
    SINGLE,
    assert_errors_like_torch,
    interpreted,
    over_dtypes,
)

from onescan.layers.basic import GLUConfig
from onescan.ops.backend import use_backend
from onescan.ops.gating import gated

pytest.importorskip("triton")
launches = pytest.importorskip("onescan.ops.gating_launch")

pytestmark = MARKS
over_activations = pytest.mark.parametrize("activation", ["sigmoid", "silu"])


def with_gradients(x, gate, slope, **options):
    x, gate = (t.detach().requires_grad_() for t in (x, gate))
    y = gated(x, gate, **options)
    gradients = torch.autograd.grad(y, (x, gate), slope.to(y))
    return [t.detach().double().cpu() for t in (y, *gradients)]


@over_dtypes
@over_activations
@pytest.mark.parametrize("sizes", [(2, 5, 48), (1,), (3, 1024), (0, 4)], ids=str)
def test_kernels_err_at_most_twice_as_much_as_plain_torch(sizes, activation, dtype):
    x, gate, slope = (t.to(DEVICE, dtype) for t in (3 * torch.randn(3, *sizes)))
    call = functools.partial(with_gradients, activation=activation)
    exact = call(*(t.double() for t in (x, gate, slope)), backend="torch")
    usual = call(x, gate, slope, backend="torch")
    found = call(x, gate, slope, backend="triton")
    if x.numel():
        assert_errors_like_torch(found, usual, exact, dtype)
    assert [t.shape for t in found] == [x.shape] * 3


@over_activations
def test_views_and_other_dtypes_are_converted(activation):
    x = torch.randn(6, 10, device=DEVICE)[:, ::2]
    gate = torch.randn(5, 6, device=DEVICE).to(HALF).T
    found, want = (gated(x, gate, activation, backend=name) for name in ("triton", "torch"))
    assert found.dtype == want.dtype == SINGLE
    torch.testing.assert_close(found, want, atol=1e-3, rtol=1e-3)


@over_activations
def test_large_gates_do_not_overflow_and_nan_stays_nan(activation):
    gate = torch.tensor([1e4, -1e4, torch.nan], device=DEVICE)
    found = with_gradients(torch.ones_like(gate), gate, gate.sign(), activation=activation)
    torch.testing.assert_close(
        [t[:2] for t in found],
        [t[:2] for t in with_gradients(
            torch.ones_like(gate), gate, gate.sign(), activation=activation, backend="triton"
        )],
    )  # fmt: skip
    assert gated(gate, gate, activation, backend="triton")[2].isnan()


@interpreted
def test_types_without_kernels_run_in_torch():
    for dtype in (torch.float64, BRAIN):
        x = torch.randn(4, dtype=dtype)
        with use_backend("triton"):
            assert gated(x, x, "silu").dtype == dtype


def test_layers_run_the_kernel(monkeypatch):
    glu = GLUConfig().build(width=8).to(DEVICE)
    x = torch.randn(1, 2, 8, device=DEVICE)
    want = glu(x)
    launched = []
    launch = launches.launch
    monkeypatch.setattr(
        launches,
        "launch",
        lambda kernel, *a, **f: (launched.append(kernel), launch(kernel, *a, **f)),
    )
    with use_backend("triton"):
        found = glu(x)
    assert [kernel.name for kernel in launched] == ["gated"]
    torch.testing.assert_close(found, want)


def test_the_op_is_declared_rightly():
    x, gate = (torch.randn(2, 3, device=DEVICE).requires_grad_() for _ in range(2))
    torch.library.opcheck(torch.ops.onescan.gated.default, (x, gate, True))


@over_activations
def test_inputs_are_unchanged_without_gradients(activation):
    x, gate = torch.randn(2, 3, 5).unbind()
    before = x.clone(), gate.clone()
    y = gated(x, gate, activation, backend="torch")
    assert torch.equal(y, gated(x.requires_grad_(), gate, activation, backend="torch"))
    assert torch.equal(x, before[0])
    assert torch.equal(gate, before[1])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_gate_of_another_shape_is_refused(backend):
    x = torch.ones(2, 3, device=DEVICE)
    with pytest.raises(ValueError, match=r"gate has shape \(3,\), expected \(2, 3\)"):
        gated(x, x[0], "silu", backend=backend)
