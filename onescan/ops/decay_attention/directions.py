"""What all forms compute: two directions, each with the decay that it applies at every token.

    forward:   S_t = exp(forward_t) S_{t-1} + k_t v_t^T      and o_t reads S_t
    backward:  S_t = exp(backward_t) S_{t+1} + k_t v_t^T     and o_t reads exp(backward_t) S_{t+1}

The two conventions differ by a shift outside: the decay of "target" is the token's own, that of
"source" the one of the token visited before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from onescan.shapes import DecayedKeyValue, LogDecays, Values


class Directions(NamedTuple):
    """Log-decays as the recurrences apply them.

    Attributes:
        forward: from the left.
        backward: from the right; None is causal.
    """

    forward: LogDecays
    backward: LogDecays | None

    @property
    def is_diagonal(self) -> bool:
        """Whether each key channel has a decay of its own."""
        return self.forward.shape[-1] > 1


class Matrices(NamedTuple):
    """A state on each side, entering or leaving; None is empty, or shut by causality."""

    left: DecayedKeyValue | None
    right: DecayedKeyValue | None


@dataclass(frozen=True)
class Divide:
    """Division of outputs by row sums, which are the outputs for values of 1.

    Attributes:
        function: Divides outputs by row sums.
        cancels: Whether terms of a row sum may cancel, so that it must be summed more precisely.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    cancels: bool = False

    def __call__(self, o: Tensor, row_sum: Tensor) -> Tensor:
        return self.function(o, row_sum)


class Results(NamedTuple):
    """What every form returns.

    Attributes:
        o: outputs, divided if so, [B, T, H, V].
        leaves: the states.
    """

    o: Values
    leaves: Matrices


def with_ones(v: Tensor) -> Tensor:
    """Append a column of ones, whose output is the row sum."""
    return F.pad(v, (0, 1), value=1.0)


def parted(o: Tensor, divide: Divide | None) -> Tensor:
    """Part outputs from their last column, the row sum, and divide by it, if so."""
    if divide is None:
        return o[..., :-1]
    return divide(*o.split([o.shape[-1] - 1, 1], dim=-1))  # the gradient of which is one tensor


def directed(
    log_decay: LogDecays, decay_at: Literal["source", "target"], *, causal: bool
) -> Directions:
    """Shift each token's decay to where the recurrences apply it."""
    if decay_at == "target":
        return Directions(log_decay, None if causal else log_decay)
    forward = F.pad(log_decay, (0, 0, 0, 0, 1, -1))
    return Directions(forward, None if causal else F.pad(log_decay, (0, 0, 0, 0, -1, 1)))


def entering(matrix: Tensor | None, k: Tensor, v: Tensor) -> Tensor:
    """A state, zeros where none was given, for keys and values [B, T, H, .]."""
    if matrix is None:
        return v.new_zeros(k.shape[0], *k.shape[2:], v.shape[-1])
    return matrix
