"""One scan in plain torch, all samples at once: for any device, compilers and any derivative.

Source: LightNet, arXiv:2405.21022, Eq. 14 and App. A.2.
"""

import torch

from onescan.ops.numerics import LOG_ZERO
from onescan.shapes import Angles as Table  # of cosines, of sines
from onescan.shapes import Keys, KeyValue, LogNormalizer, Queries, Values


def summary(
    k: Keys, v: Values, cos: Table | None, sin: Table | None
) -> tuple[LogNormalizer, KeyValue]:
    """The log-normalizer and kv of these tokens alone."""
    # the result does not depend on the maximum, so no gradient flows through it
    peak = k.detach().amax(dim=1).clamp(min=LOG_ZERO)  # B H K
    weight = (k - peak.unsqueeze(1)).exp_()
    total = weight.sum(dim=1)  # B H K
    total = torch.where(total > 0, total, 1)  # all logits -inf: the mean of nothing is 0
    total_f = total
    if cos is not None and sin is not None:
        weight, total_f = torch.cat([weight * cos, weight * sin], -1), torch.cat([total, total], -1)
    kv = torch.einsum("bthf,bthv->bhfv", weight, v)
    return peak.double() + total.double().log(), kv / total_f.unsqueeze(-1)


def read_out(q: Queries, kv: KeyValue, cos: Table | None, sin: Table | None) -> Values:
    """R(q) kv."""
    if cos is not None and sin is not None:
        q = torch.cat([q * cos, q * sin], dim=-1)
    return torch.einsum("bthf,bhfv->bthv", q, kv)
