"""Errors a user can act on: shapes with names and sizes, NaN with the argument's name."""

from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from onescan.choices import check_choice as check_choice

LONGEST_MESSAGE = 300
# raised by transformers, diffusers and safetensors for damaged folders
LOAD_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    SafetensorError,
)


def in_a_line(error: Exception) -> str:
    r"""What another library says, without its line breaks, and not at any length.

    >>> in_a_line(ValueError("no such\n  thing"))
    'no such thing'
    """
    words = " ".join(str(error).split())
    return words if len(words) <= LONGEST_MESSAGE else f"{words[:LONGEST_MESSAGE]} ..."


def check_shapes(**arguments: tuple[Any, str]) -> dict[str, int]:
    """Bind the letters of each argument's pattern to its sizes, or say which one disagrees.

    Args:
        arguments: name=(tensor, pattern), the pattern as in `onescan.shapes`: letters bind,
            numbers are exact. An argument that is None is passed over.

    Returns:
        The size of each letter.

    Raises:
        ValueError: an argument that is no tensor, has another rank, or a size that disagrees.

    >>> check_shapes(q=(torch.ones(2, 5), "B T"), k=(torch.ones(2, 4), "B T"))
    Traceback (most recent call last):
    ValueError: k has shape (2, 4), expected 'B T' with B=2, T=5
    """
    sizes: dict[str, int] = {}
    for name, (tensor, pattern) in arguments.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}, expected a tensor {pattern!r}")
        letters = pattern.split()
        known = ", ".join(f"{letter}={sizes[letter]}" for letter in letters if letter in sizes)
        if tensor.ndim != len(letters) or any(
            size != (int(letter) if letter.isdigit() else sizes.setdefault(letter, size))
            for letter, size in zip(letters, tensor.shape, strict=True)
        ):
            with_known = f" with {known}" if known else ""
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, expected {pattern!r}{with_known}"
            )
    return sizes


def check_positive(**numbers: int | float) -> None:
    """Raise ValueError for a number that is not above 0 and finite.

    >>> check_positive(chunk_size=0)
    Traceback (most recent call last):
    ValueError: chunk_size is 0, expected a number above 0
    """
    for name, number in numbers.items():
        if not 0 < number < float("inf"):  # NaN fails this too
            raise ValueError(f"{name} is {number}, expected a number above 0")


def check_floating(**tensors: Any) -> None:
    """Raise ValueError for what is no tensor, or not of a floating point type."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}, expected a tensor")
        if not tensor.is_floating_point():
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected a floating point type")


def check_sequence_options(*, causal: Any, keep: Any, chunk_size: Any) -> None:
    """Raise ValueError for options that ops over sequences share.

    >>> check_sequence_options(causal=True, keep=None, chunk_size=0.5)
    Traceback (most recent call last):
    ValueError: chunk_size is 0.5, expected a whole number above 0
    """
    if not isinstance(causal, bool):
        raise ValueError(f"causal is {causal!r}, expected True or False")
    if isinstance(keep, Tensor) and keep.dtype != torch.bool:
        raise ValueError(f"keep has dtype {keep.dtype}, expected torch.bool, True for real tokens")
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size!r}, expected a whole number above 0")


def check_token_ids(tokens: Any, vocab_size: int, *, name: str = "tokens") -> None:
    """Raise ValueError for what is no id of a vocabulary, where values may be looked at.

    >>> check_token_ids(torch.tensor([[3, 7]]), vocab_size=5)
    Traceback (most recent call last):
    ValueError: tokens hold the ids 3 to 7, expected 0 to 4
    """
    if not isinstance(tokens, Tensor):
        raise ValueError(f"{name} is a {type(tokens).__name__}, expected a tensor")
    if tokens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} has dtype {tokens.dtype}, expected torch.int64")
    if not tokens.numel() or not can_look_at_values(tokens):
        return
    low, high = torch.aminmax(tokens)
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{name} hold the ids {low.item()} to {high.item()}, expected 0 to {vocab_size - 1}"
        )


def check_grid_shape(shape: Any) -> None:
    """Raise ValueError for what is no tuple of whole numbers above 0.

    >>> check_grid_shape((3, 2.5))
    Traceback (most recent call last):
    ValueError: shape is (3, 2.5), expected one positive whole number per axis
    """
    whole = (int, torch.SymInt)  # SymInt while a model is exported
    if not (
        isinstance(shape, tuple) and shape and all(isinstance(n, whole) and n > 0 for n in shape)
    ):
        raise ValueError(f"shape is {shape!r}, expected one positive whole number per axis")


def check_devices(**tensors: Any) -> None:
    """Raise ValueError for what is no tensor, or on another device than the first."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor | None):
            raise ValueError(f"{name} is a {type(tensor).__name__}, expected a tensor")
    given = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    first, device = next(iter(given.items()))
    for name, other in given.items():
        if other != device:
            raise ValueError(f"{name} is on {other} and {first} on {device}, expected one device")


def can_look_at_values(tensor: Tensor) -> bool:
    """Whether a value may steer Python here: on a CPU, in plain eager mode.

    On a GPU it would wait for the device; while compiling, exporting or under vmap there is
    no value yet.
    """
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and is_plain(tensor)


def is_plain(tensor: Tensor) -> bool:
    """Whether what it holds is numbers: neither torch.func nor a class of its own comes between."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not is_wrapped and type(tensor) in (Tensor, torch.nn.Parameter)


def fingerprint(o: Tensor, *summed: Tensor) -> Tensor:
    """A small tensor that a NaN in any input reaches: through a column of o, or through a sum."""
    return sum((x.detach().sum() for x in summed), start=o[..., 0].detach().sum())


def check_no_nan(result: Tensor, **arguments: Tensor | None) -> None:
    """Blame the argument that put a NaN into `result`, a small tensor that they all reach.

    Looking at a small result keeps the check's cost far below the call's. It looks only where
    `can_look_at_values` allows.

    Raises:
        ValueError: result holds NaN, and an argument NaN or infinity; says which, and how many.
    """
    if not can_look_at_values(result) or not bool(torch.isnan(result.detach().sum())):
        return
    for what, holds in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        for name, tensor in arguments.items():
            count = 0 if tensor is None else int(holds(tensor.detach()).sum())
            if tensor is not None and count:
                raise ValueError(f"{name} holds {count} {what} of {tensor.numel()} values")


def unpack_states(state: Any, kind: type, *, causal: bool) -> tuple[Any, Any]:
    """Return the forward and the backward state of a call, each a `kind` or None.

    Args:
        state: What the caller passed: a `kind` if causal, otherwise a pair; or None.
        kind: State class of one direction, such as DecayState. The pair's class is named
            DecayStates.
        causal: Whether there is no backward state.

    Raises:
        ValueError: If state is of the other direction or of another type.
    """
    pair = (state, None) if causal else (None, None) if state is None else state
    if isinstance(pair, tuple) and [isinstance(x, kind | None) for x in pair] == [True, True]:
        forward, backward = pair
        return forward, backward
    what = f"a {kind.__name__}" if causal else f"{kind.__name__}s"
    meaning = "" if causal else ", or a pair of a forward and a backward state"
    raise ValueError(
        f"state is a {type(state).__name__}, expected {what}, as causal={causal} returns{meaning}"
    )


def named_state_tensors(states: tuple[Any, Any], *, causal: bool) -> dict[str, Tensor]:
    """Return the tensors of `unpack_states`'s result, named as in messages: state.forward.kv."""
    return {
        f"state.{field}" if causal else f"state.{direction}.{field}": tensor
        for direction, state in zip(("forward", "backward"), states, strict=True)
        if state is not None
        for field, tensor in state._asdict().items()
    }
