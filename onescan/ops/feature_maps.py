"""Feature maps, which linear attention applies to queries and keys."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import torch
import torch.nn.functional as F

from onescan.ops.backend import Backend, resolved_backend
from onescan.ops.numerics import disable_autocast
from onescan.shapes import Queries

FeatureMapName = Literal["identity", "silu", "relu", "elu_plus_one", "sigmoid", "shifted_silu"]


def identity(x: Queries) -> Queries:
    """Return x."""
    return x


def elu_plus_one(x: Queries) -> Queries:
    """Return x + 1 above 0 and exp(x) below, which is positive.

    Source: linear attention, arXiv:2006.16236, Eq. 7.
    """
    return F.elu(x) + 1


def shifted_silu(x: Queries, *, backend: Backend = "auto") -> Queries:
    """Return (silu(x) + 0.5) / ||silu(x) + 0.5|| over the channels of a head, which is positive.

    silu is never below -0.28, so the norm is never 0. The result has the dtype of x, even under
    autocast. The backend "triton" computes it in one kernel, with first derivatives only.
    Source: LION, arXiv:2502.16249, Sec. 3.2.

    >>> shifted_silu(torch.zeros(1, 1, 1, 4)).flatten().tolist()
    [0.5, 0.5, 0.5, 0.5]
    """
    if resolved_backend(backend, True, x) == "triton":
        from onescan.ops import feature_map_launch  # imports Triton

        return feature_map_launch.shifted_silu(x)
    with disable_autocast(x):
        wide = x.float() if x.dtype == torch.float16 else x  # the norm may overflow float16
        return F.normalize(F.silu(wide) + 0.5, dim=-1).to(x.dtype)


# Feature maps that decoding kernels can apply, and their numbers in the kernels.
KERNEL_MAPS: Mapping[str, int] = MappingProxyType({"identity": 0, "silu": 1, "shifted_silu": 2})

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
