"""Mean and standard deviation of data that do not fit into memory."""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

EPSILON = 2.0**-52  # of float64

PerChannel = Float[Tensor, " channels"]


def mean_and_std(parts: Iterable[Float[Tensor, "channels _"]]) -> tuple[PerChannel, PerChannel]:
    """Return the mean and standard deviation of each channel over all parts, in float64.

    The parts are read once. The result is accurate for values that are close together compared with
    their mean, and for values whose squares are out of range.

    Args:
        parts: Values of each channel, of shape [channels, values]; NaN where they are not known.

    Returns:
        Mean and standard deviation, both 0 for channels without a known value.

    >>> mean, std = mean_and_std([torch.tensor([[1.0, 5.0]]), torch.tensor([[torch.nan, 3.0]])])
    >>> mean.item(), round(std.item(), 4)
    (3.0, 1.633)
    """
    origin = count = mean = norm = torch.zeros(0, dtype=torch.float64)
    for part in parts:
        values = part.double()
        known = ~values.isnan()
        if not len(origin):
            origin = torch.full_like(values[:, 0], torch.nan)
            count, mean, norm = torch.zeros(3, len(values), dtype=torch.float64)
        # Differences from a known value are exact where values are close together.
        first = values.gather(1, known.int().argmax(dim=1, keepdim=True)).squeeze(1)
        origin = torch.where(origin.isnan(), first, origin)
        shifted = torch.where(known, values - origin[:, None], 0)
        added = known.sum(dim=1)
        part_mean = shifted.sum(dim=1) / added.clamp(min=1)
        rest = torch.where(known, shifted - part_mean[:, None], 0)
        # Divide before squaring, because squares of very large or small values are out of range.
        largest = rest.abs().amax(dim=1)
        scaled = rest / torch.where(largest > 0, largest, 1)[:, None]
        total = (count + added).clamp(min=1)
        between = (part_mean - mean).abs() * (count * added / total).sqrt()
        within = largest * torch.linalg.vector_norm(scaled, dim=1)
        norm = torch.hypot(torch.hypot(norm, within), between)
        mean = mean + (part_mean - mean) * (added / total)
        count = count + added
    return origin.nan_to_num(nan=0.0) + mean, norm / count.clamp(min=1).sqrt()


def divisors(mean: PerChannel, std: PerChannel) -> PerChannel:
    """Return the standard deviations, or 1 for channels that are constant up to rounding."""
    return torch.where(std > EPSILON * mean.abs(), std, 1.0)
