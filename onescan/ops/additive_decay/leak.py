"""Leak: weights that also decay with the number of tokens between a key and a query.

    z_t = logaddexp(z_{t-1} - leak, k_t)
    weight of token s for token t: exp(k_s - leak (t - s) - z_t)

Let n_t be the number of real tokens of a call up to token t. If logits and log-normalizers are
shifted by leak n_t, they obey the recurrence without a leak:

    k'_t = k_t + leak n_t,    z'_t = z_t + leak n_t = logaddexp(z'_{t-1}, k'_t)

Forms therefore receive k', and the shift is subtracted from the log-normalizer of the last state.

Calls with a leak compute in float64. The gradient of the leak is the sum of n_t times the gradient
of k'_t, in which large numbers cancel: in float32, at a half-life of one token among 2,048 tokens,
its relative error would be 400 times that of the recurrence.

Rates are limited to `MAX_LEAK`, which is exact: at this rate, each token reads only itself, or the
last token before it that has a weight, unless logits differ by 1e5.
"""

import math
from typing import Any

import torch
from torch import Tensor

from onescan.checks import can_look_at_values
from onescan.ops.collectives import gather
from onescan.ops.layout import Layout
from onescan.ops.recurrence import check_tensors
from onescan.shapes import Keys, Leak

MAX_LEAK = 1e5  # exp(2e4 - MAX_LEAK) is 0, and leak n stays accurate for a million tokens


def check_leak(leak: Any, k: Any, layout: Layout) -> None:
    """Raise ValueError if a call does not support a leak, or its shape or values are invalid."""
    if layout.causal_block is not None:
        raise ValueError(
            "leak was given with causal_block, expected causal=True without causal_block"
        )
    if not layout.causal:
        raise ValueError(
            "leak requires causal=True: with causal=False, all tokens read the same state, so a "
            "leak would only give the first tokens less weight"
        )
    check_tensors(k=(k, "B T H K"), leak=(leak, ("H", "H K")))
    if can_look_at_values(leak):
        low, high = (x.item() for x in leak.detach().aminmax())
        if not 0 <= low <= high < math.inf:
            raise ValueError(
                f"leak ranges from {low:.6g} to {high:.6g}, expected finite rates of at least 0"
            )


def add_leak(k: Keys, leak: Leak, layout: Layout) -> tuple[Keys, Tensor]:
    """Return k + leak n in float64, and leak n after the last token, [1 or B, H, 1 or K]."""
    batch, tokens = k.shape[:2]
    if layout.keep is None:
        count = torch.arange(1, tokens + 1, device=k.device).unsqueeze(0)
    else:
        count = layout.keep.cumsum(dim=1)
    total = count[:, -1:]
    if layout.ranks is not None:
        (totals,) = gather(layout.ranks, total.expand(batch, 1))  # W B 1
        count, total = count + totals[: layout.ranks.rank].sum(dim=0), totals.sum(dim=0)
    rate = (leak if leak.ndim > 1 else leak.unsqueeze(-1)).double()  # H K or H 1
    rate = rate.clamp(max=MAX_LEAK)
    return k.double() + rate * count[:, :, None, None], rate * total.unsqueeze(-1)
