"""The states of an op that runs from the first token, or from both ends."""

from typing import Any

from torch import Tensor


def sides_of(state: Any, kind: type, *, causal: bool) -> tuple[Any, Any]:
    """What enters from the left and what from the right, each of this kind or None.

    Args:
        state: what a user passed; not causal, a pair.
        kind: of one side's state, say DecayState; the pair's is called DecayStates.
        causal: whether nothing enters from the right.

    Raises:
        ValueError: a state of the other direction, or what is none.
    """
    pair = (state, None) if causal else (None, None) if state is None else state
    if isinstance(pair, tuple) and [isinstance(x, kind | None) for x in pair] == [True, True]:
        left, right = pair
        return left, right
    what = f"a {kind.__name__}" if causal else f"{kind.__name__}s"
    meaning = "" if causal else ": what enters from the left and what enters from the right"
    raise ValueError(
        f"state is a {type(state).__name__}, expected {what}, as causal={causal} returns{meaning}"
    )


def tensors_of(sides: tuple[Any, Any], *, causal: bool) -> dict[str, Tensor]:
    """The tensors by the names that messages give them: state.kv, state.forward.kv."""
    return {
        f"state.{part}" if causal else f"state.{name}.{part}": tensor
        for name, side in zip(("forward", "backward"), sides, strict=True)
        if side is not None
        for part, tensor in side._asdict().items()
    }
