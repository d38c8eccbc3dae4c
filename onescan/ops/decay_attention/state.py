"""All that decayed attention remembers of the tokens on one side: a matrix and a row.

kv    = sum_s decay_s k_s v_s^T   (K, V)
k_sum = sum_s decay_s k_s         (K,)    what a query's row sum is read from

Both are one matrix inside: the row sum is the output for a value of 1, so a column of ones at the
end of the values leaves k_sum as the last column of kv.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from onescan.shapes import DecayedKeys, DecayedKeyValue


class DecayState(NamedTuple):
    """The decayed sum of all keys and values on one side.

    Attributes:
        kv: sum of k v^T, [B, H, K, V]; float32, or float64 for float64 inputs.
        k_sum: sum of k, [B, H, K], for `normalize`.
    """

    kv: DecayedKeyValue
    k_sum: DecayedKeys


class DecayStates(NamedTuple):
    """What a call that is not causal takes from both sides, and leaves for them.

    Attributes:
        forward: coming in, of the tokens to the left; going out, up to and with the last token.
        backward: coming in, of the tokens to the right; going out, down to and with the first.
    """

    forward: DecayState | None
    backward: DecayState | None


def joined(state: DecayState | None, dtype: torch.dtype) -> Tensor | None:
    """Both parts as one matrix, [B, H, K, V + 1]."""
    if state is None:
        return None
    return torch.cat([state.kv.to(dtype), state.k_sum.to(dtype).unsqueeze(-1)], dim=-1)


def split(matrix: Tensor | None, log_decay: Tensor | None) -> DecayState | None:
    """The parts of such a matrix, after a last decay, [., H or 1, K or 1], if there is one."""
    if matrix is None:
        return None
    if log_decay is not None:
        matrix = matrix * log_decay.exp().unsqueeze(-1)
    return DecayState(matrix[..., :-1], matrix[..., -1])
