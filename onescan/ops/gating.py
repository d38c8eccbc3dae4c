"""Gates, which multiply the output of a mixer or the hidden units of an MLP."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from onescan.checks import check_choice
from onescan.ops.backend import Backend, resolved_backend
from onescan.ops.numerics import needs_derivatives

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"sigmoid": torch.sigmoid, "silu": F.silu}
)


def gated(x: Tensor, gate: Tensor, activation: str, *, backend: Backend = "auto") -> Tensor:
    """Return x * activation(gate).

    Args:
        x: Tensor of any shape.
        gate: Gate before its activation, in the shape of x.
        activation: One of `ACTIVATIONS`.
        backend: "torch" runs on any device. "triton" runs on a GPU, as a single kernel that
            computes in float32 and has first derivatives only. "auto" chooses; see `use_backend`.

    Raises:
        ValueError: If the activation or the backend is unknown, the gate has another shape than x,
            or "triton" cannot run on these inputs.

    >>> gated(torch.ones(2), torch.zeros(2), "sigmoid").tolist()
    [0.5, 0.5]
    """
    check_choice("activation", activation, ACTIVATIONS)
    if gate.shape != x.shape:
        raise ValueError(
            f"gate has shape {tuple(gate.shape)}, expected {tuple(x.shape)}, the shape of x"
        )
    if resolved_backend(backend, True, x, gate, widest=None) == "triton":
        from onescan.ops import gating_launch  # imports Triton

        return gating_launch.gated(x, gate, is_silu=activation == "silu")
    y = ACTIVATIONS[activation](gate)
    if torch.compiler.is_compiling() or x.dtype != y.dtype or needs_derivatives(x, gate):
        return x * y
    return y.mul_(x)
