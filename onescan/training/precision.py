"""Matrix products in half precision, and what keeps small gradients from vanishing in float16."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from onescan.training.run import Precision

LEAST_SCALE = 1.0  # below it no gradient is rescued any more
GROWTH_INTERVAL = 2000


def computing(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Where torch takes matrix products in that precision; what needs more keeps float32."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision))


@dataclass
class LossScale:
    """A factor on the loss that keeps float16 gradients in range: it falls fast and rises slowly.

    Source: mixed precision training, arXiv:1710.03740, Sec. 3.2, with the dynamic choice of the
    factor that became the custom.
    """

    scale: float = 65536.0
    good: int = 0
    """Updates since it last changed."""

    def update(self, *, finite: bool) -> None:
        """Take note of a gradient."""
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good == GROWTH_INTERVAL:
            self.scale, self.good = 2 * self.scale, 0

    @property
    def is_spent(self) -> bool:
        """Whether gradients are not finite however small the factor."""
        return self.scale < LEAST_SCALE
