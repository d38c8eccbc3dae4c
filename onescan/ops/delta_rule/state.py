"""All that the delta rule remembers of the tokens on one side: a matrix that maps keys to values.

kv = (I - beta_t k_t k_t^T) kv + beta_t k_t v_t^T     (K, V)
"""

from typing import Any, NamedTuple

from torch import Tensor

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


def sides_of(state: Any, *, causal: bool) -> DeltaStates:
    """The states that enter from both sides, whichever kind was given.

    Raises:
        ValueError: a state of the other direction, or what is none.
    """
    if causal and isinstance(state, DeltaState | None):
        return DeltaStates(state, None)
    if causal:
        raise ValueError(
            f"state is a {type(state).__name__}, expected a DeltaState, as causal=True returns"
        )
    pair = (None, None) if state is None else state
    if not (
        isinstance(pair, tuple)
        and [isinstance(side, DeltaState | None) for side in pair] == [True, True]
    ):
        raise ValueError(
            f"state is a {type(state).__name__}, expected DeltaStates, as causal=False returns: "
            "the state entering from the left and the one from the right"
        )
    return DeltaStates(*pair)


def tensors_of(state: DeltaState | Sides | None) -> dict[str, Tensor]:
    """A state's tensors by the names that messages give them: state.kv, state.forward.kv."""
    if state is None:
        return {}
    if isinstance(state, DeltaState):
        return {"state.kv": state.kv}
    sides = DeltaStates(*state)._asdict().items()
    return {f"state.{name}.kv": side.kv for name, side in sides if side is not None}
