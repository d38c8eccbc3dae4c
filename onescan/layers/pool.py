"""What a head reads of many tokens: one vector."""

import torch
from torch import Tensor, nn

from onescan.ops.numerics import widened
from onescan.shapes import Hidden, Keep, Pooled


def mean_pool(x: Hidden, keep: Keep | None = None) -> Pooled:
    """The mean of all tokens that are real; zeros where none is.

    >>> x = torch.tensor([[[1.0], [3.0], [8.0]]])
    >>> mean_pool(x).item(), mean_pool(x, torch.tensor([[True, True, False]])).item()
    (4.0, 2.0)
    """
    if keep is None:
        return x.mean(dim=1)
    (wide,) = widened(x.masked_fill(~keep.unsqueeze(-1), 0))  # sums outgrow float16
    mean = wide.sum(dim=1) / keep.sum(dim=1, keepdim=True).clamp(min=1)
    return mean.to(x.dtype)


def max_pool(x: Hidden, keep: Keep | None = None) -> Pooled:
    """The largest of all real tokens, channel by channel; zeros where none is real."""
    if keep is None:
        return x.amax(dim=1)
    largest = x.masked_fill(~keep.unsqueeze(-1), -torch.inf).amax(dim=1)
    return largest.masked_fill(~keep.any(dim=1, keepdim=True), 0)


class AttentionPool(nn.Module):
    """sum_t a_t x_t, a = softmax over real tokens of x_t . w; w, which is learnt, starts at 0.

    At first all tokens weigh the same: it is their mean. Where no token is real it is zeros.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(width))

    def forward(self, x: Hidden, keep: Keep | None = None) -> Pooled:
        if keep is not None:
            x = x.masked_fill(~keep.unsqueeze(-1), 0)  # 0 times NaN is NaN
        logits = x @ self.query  # B T
        if keep is None:
            return _weighted(x, logits.softmax(dim=1))
        # of a row of nothing but -inf the softmax is NaN
        none = ~keep.any(dim=1, keepdim=True)
        shares = logits.masked_fill(~(keep | none), -torch.inf).softmax(dim=1)
        return _weighted(x, shares.masked_fill(none, 0))


def _weighted(x: Hidden, shares: Tensor) -> Pooled:
    return torch.einsum("bt,btd->bd", shares, x)
