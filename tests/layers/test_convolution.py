"""The short convolution against a loop over tokens: masks, windows and both kinds."""

import pytest
import torch
from pairwise import pairwise

from onescan.layers.convolution import ShortConvolution

D = 3
SIZES = [1, 2, 4, 5]


def built(size, **options):
    return ShortConvolution(D, size, **options).double()


def tokens(count):
    return torch.randn(2, count, D, dtype=torch.float64, requires_grad=True)


def loop(conv, x, keep, *, causal):
    """y_t as a sum over the real tokens around t, channel by channel; zero for the others."""
    size = conv.kernel_size[0]
    first = -(size - 1) if causal else -(size // 2)
    y = torch.zeros_like(x)
    for row in range(len(x)):
        real = [t for t in range(x.shape[1]) if keep[row, t]]
        for n, t in enumerate(real):
            y[row, t] = conv.bias if conv.bias is not None else 0
            for i in range(size):
                if 0 <= n + first + i < len(real):
                    y[row, t] += conv.weight[:, 0, i] * x[row, real[n + first + i]]
    return y


def gradients(y, x, conv):
    return torch.autograd.grad((y * y.detach().cos()).sum(), [x, *conv.parameters()])


@pairwise(
    {
        "causal, size": [*((True, n) for n in SIZES), *((False, n) for n in (1, 3, 7))],
        "count": [1, 2, 9],
        "masked": [False, True],
    },
    rest_is_slow=True,
)
def test_it_is_the_sum_over_the_real_tokens_around(causal, size, count, masked):
    conv, x = built(size, causal=causal), tokens(count)
    keep = torch.rand(2, count) < 0.6 if masked else torch.ones(2, count, dtype=torch.bool)
    y, _ = conv(x, keep=keep if masked else None)
    y = y * keep.unsqueeze(-1)
    expected = loop(conv, x, keep, causal=causal)
    torch.testing.assert_close(y, expected)
    if keep.any():
        torch.testing.assert_close(gradients(y, x, conv), gradients(expected, x, conv))


@pairwise({"size": SIZES, "masked": [False, True], "cut": range(1, 7)}, rest_is_slow=True)
def test_two_calls_equal_one(size, masked, cut):
    conv, x = built(size, bias=False), tokens(7)
    keep = torch.rand(2, 7) < 0.6 if masked else torch.ones(2, 7, dtype=torch.bool)
    first, rest = (keep[:, :cut], keep[:, cut:]) if masked else (None, None)
    whole, last = conv(x, keep=keep if masked else None)
    a, state = conv(x[:, :cut], keep=first)
    b, state = conv(x[:, cut:], keep=rest, state=state)
    y = torch.cat([a, b], dim=1) * keep.unsqueeze(-1)
    torch.testing.assert_close(y, whole * keep.unsqueeze(-1))
    torch.testing.assert_close(state, last)
    assert state.shape == (2, size - 1, D)


def test_masked_nans_are_not_read():
    conv, x = built(4), tokens(6).detach()
    keep = torch.tensor([[True, False, True, True, False, True]] * 2)
    y, state = conv(torch.where(keep.unsqueeze(-1), x, torch.nan), keep=keep)
    assert y.isfinite().all()
    assert state.isfinite().all()


@pytest.mark.parametrize(
    ("size", "causal", "message"),
    [
        (0, True, "conv_size is 0"),
        (4, False, "conv_size is 4, expected an odd number"),
    ],
)
def test_impossible_sizes_are_errors(size, causal, message):
    with pytest.raises(ValueError, match=message):
        ShortConvolution(D, size, causal=causal)
