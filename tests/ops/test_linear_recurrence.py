"""LightNet, Sec. 4.2 and 4.3: which weighted sums are linear recurrences, and their bounds."""

import pytest
import torch

from onescan.ops import additive_decay, decay_attention

T = 23


def recurrence(a, x):
    """Eq. 3: y_t = a_t y_{t-1} + x_t, one token at a time."""
    y, outputs = torch.zeros(()), []
    for decay, value in zip(a, x, strict=True):
        y = decay * y + value
        outputs.append(y)
    return torch.stack(outputs)


def ratios(g):
    """Return c_ts = g_s / g_t for s <= t, and 0 for later s."""
    return (g.unsqueeze(0) / g.unsqueeze(1)).tril()


def decays(g):
    """Return a_t = g_{t-1} / g_t; the first one, which multiplies y_0 = 0, is 1."""
    return torch.cat([torch.ones(1, dtype=g.dtype), g[:-1] / g[1:]])


@pytest.fixture(params=["multiplicative", "additive"])
def scores(request):
    """Proposition 4.2: increments delta_t >= 0, and g_t that adds them, to its log or itself."""
    delta = torch.rand(T, dtype=torch.float64) + 0.01
    sums = delta.cumsum(0)
    return request.param, delta, sums.exp() if request.param == "multiplicative" else sums


def test_a_recurrence_is_a_sum_with_ratios_as_weights():
    """Theorem 4.1, "only if", by Eq. 4: c_ts = A_s / A_t with A_t = 1 / (a_1 ... a_t)."""
    a, x = torch.rand(2, T, dtype=torch.float64) + 0.1
    torch.testing.assert_close(recurrence(a, x), ratios(1 / a.cumprod(0)) @ x)


def test_a_sum_with_ratios_as_weights_is_a_recurrence():
    """Theorem 4.1, "if": a_t = g_{t-1} / g_t, for scores that need not be monotonic."""
    g, x = torch.rand(2, T, dtype=torch.float64) + 0.1
    torch.testing.assert_close(recurrence(decays(g), x), ratios(g) @ x)


def test_a_sum_with_other_weights_is_none():
    """Weights 1 / (t - s + 1) are no ratios, so even the only candidate a_t = c_{t,t-1} fails."""
    position = torch.arange(T, dtype=torch.float64)
    weights = 1 / ((position.unsqueeze(1) - position).clamp(min=0) + 1)
    x = torch.rand(T, dtype=torch.float64)
    got, want = recurrence(torch.full((T,), 0.5), x), weights.tril() @ x
    torch.testing.assert_close(got[:2], want[:2])
    assert (got - want)[2:].abs().min() > 1e-3


def test_both_kinds_of_decay_are_at_most_1(scores):
    kind, delta, g = scores
    a = decays(g)
    assert ((a >= 0) & (a <= 1)).all()
    sums = delta.cumsum(0)
    want = (-delta).exp() if kind == "multiplicative" else (sums - delta) / sums
    torch.testing.assert_close(a[1:], want[1:])


def test_the_ops_are_these_recurrences(scores):
    """With one channel and q = 1. LightNet scales x_t by delta_t / g_t (Eq. 13)."""
    kind, delta, g = scores
    x = torch.randn(T, dtype=torch.float64)
    column, ones = x.view(1, T, 1, 1), torch.ones(1, T, 1, 1, dtype=x.dtype)
    if kind == "multiplicative":
        got, _ = decay_attention(ones, ones, column, -delta.view(1, T, 1), causal=True)
        want = recurrence(decays(g), x)
    else:
        got, _ = additive_decay(ones, delta.log().view(1, T, 1, 1), column, causal=True)
        want = recurrence(decays(g), x * delta / g)
    torch.testing.assert_close(got.flatten(), want)


def test_weights_are_bounded_by_the_distance_or_by_both_positions(scores):
    """Eq. 8 and 9 for multiplicative decay, Eq. 11 and 12 for additive decay."""
    kind, delta, g = scores
    s, t = torch.tril_indices(T, T, offset=-1).flip(0)
    c = ratios(g)[t, s]
    low, high = delta.min(), delta.max()
    if kind == "multiplicative":
        least, most = (-high * (t - s)).exp(), (-low * (t - s)).exp()
    else:
        share = (s + 1) / (t + 1)
        least, most = share * low / high, share * high / low
    assert ((least <= c) & (c <= most)).all()
