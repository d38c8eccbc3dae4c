"""All that the delta rule remembers of the tokens on one side: a matrix that maps keys to values.

kv = (I - beta_t k_t k_t^T) kv + beta_t k_t v_t^T     (K, V)
"""

from typing import NamedTuple

from onescan.shapes import KeyValue


class DeltaState(NamedTuple):
    """What the tokens on one side have written, each over what was stored under its key.

    Attributes:
        kv: [B, H, K, V]; float32, or float64 for float64 inputs. No tokens at all is zeros.
    """

    kv: KeyValue


class DeltaStates(NamedTuple):
    """What a call that is not causal takes from both sides, and leaves for them.

    Attributes:
        forward: coming in, of the tokens to the left; going out, up to and with the last token.
        backward: coming in, of the tokens to the right; going out, down to and with the first.
    """

    forward: DeltaState | None
    backward: DeltaState | None


Sides = tuple[DeltaState | None, DeltaState | None]  # DeltaStates, or a plain pair
