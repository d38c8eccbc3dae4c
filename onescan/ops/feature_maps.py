"""What queries and keys pass through before linear attention multiplies them: plain functions."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import torch
import torch.nn.functional as F

from onescan.shapes import Queries

FeatureMapName = Literal["identity", "silu", "relu", "elu_plus_one", "sigmoid", "shifted_silu"]


def identity(x: Queries) -> Queries:
    """Return x."""
    return x


def elu_plus_one(x: Queries) -> Queries:
    """Positive: x + 1 above 0, exp(x) below. Linear attention's own, arXiv:2006.16236, Eq. 7."""
    return F.elu(x) + 1


def shifted_silu(x: Queries) -> Queries:
    """(silu(x) + 0.5) / ||silu(x) + 0.5|| over a head's channels: positive, and of length 1.

    silu is nowhere below -0.28, so no length is 0. Source: LION, arXiv:2502.16249, Sec. 3.2.

    >>> shifted_silu(torch.zeros(1, 1, 1, 4)).flatten().tolist()
    [0.5, 0.5, 0.5, 0.5]
    """
    return F.normalize(F.silu(x) + 0.5, dim=-1)


FEATURE_MAPS: Mapping[FeatureMapName, Callable[[Queries], Queries]] = MappingProxyType(
    {
        "identity": identity,
        "silu": F.silu,
        "relu": F.relu,
        "elu_plus_one": elu_plus_one,
        "sigmoid": torch.sigmoid,
        "shifted_silu": shifted_silu,
    }
)
