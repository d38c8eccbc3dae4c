"""The gradient of logcumsumexp: exact, finite for extreme logits, and without a step per token."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onescan.ops.numerics import LOG_ZERO, logcumsumexp

LENGTHS = (1, 2, 63, 64, 65, 130, 4097)


def gradient_by_token(x, dz):
    """dx_s = exp(x_s) sum_{t >= s} dz_t exp(-z_t), from the last token to the first."""
    z = x.logcumsumexp(-2)
    dx, later = torch.empty_like(x), torch.zeros_like(x[..., 0, :])
    for s in reversed(range(x.shape[-2])):
        if s + 1 < x.shape[-2]:
            later = later * (z[..., s, :] - z[..., s + 1, :]).exp()
        later = later + dz[..., s, :]
        dx[..., s, :] = (x[..., s, :] - z[..., s, :]).exp() * later
    return dx


LOGITS = {
    "normal": torch.randn,
    "large": lambda *shape, **options: 1e4 * (2 * torch.rand(*shape, **options) - 1),
    "rising": lambda *shape, **options: torch.linspace(-1e4, 1e4, shape[-2], **options)[:, None],
    "falling": lambda *shape, **options: torch.linspace(1e4, -1e4, shape[-2], **options)[:, None],
    "masked": lambda *shape, **options: torch.where(torch.rand(shape) < 0.5, LOG_ZERO, 1.0).to(
        **options
    ),
    "all masked": lambda *shape, **options: torch.full(shape, LOG_ZERO, **options),
}


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS)
def test_the_gradient_equals_that_of_single_tokens(tokens, logits):
    shape = (2, tokens, 3)
    x = logits(*shape, dtype=torch.float64).expand(shape).clone().requires_grad_()
    dz = torch.randn(shape, dtype=torch.float64)
    z = logcumsumexp(x)
    (dx,) = torch.autograd.grad(z, x, dz)
    want = gradient_by_token(x.detach(), dz)
    torch.testing.assert_close(dx, want, rtol=1e-11, atol=1e-13)
    _, tangent = torch.func.jvp(logcumsumexp, (x.detach(),), (dz,))
    torch.testing.assert_close((tangent * dz).sum(), (want * dz).sum(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tokens", [1, 5, 65])
def test_derivatives_of_first_and_second_order(tokens):
    x = torch.randn(tokens, 2, dtype=torch.float64, requires_grad=True)
    x.data[1:2] = LOG_ZERO
    assert torch.autograd.gradcheck(logcumsumexp, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(logcumsumexp, x)


class CountedCalls(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))


def test_the_gradient_has_no_step_per_token():
    x = torch.randn(4096, 2, requires_grad=True)
    z = logcumsumexp(x).sum()
    with CountedCalls() as counted:
        z.backward()
    assert counted.calls < 400
