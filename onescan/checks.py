"""Argument checks. Error messages name the argument, its value and the expected value."""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from numbers import Integral
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from onescan.messages import named_type, plural, unknown_choice, unsupported

MAX_MESSAGE = 300  # characters
HUB_NAME = r"(\w[\w.-]*/)?\w[\w.-]*"  # of a model or dataset
INTEGERS = (Integral, torch.SymInt)  # NumPy's too, and SymInt during export
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
    r"""Return another library's error message on one line, truncated if it is long.

    >>> in_a_line(ValueError("no such\n  thing"))
    'no such thing'
    """
    words = " ".join(str(error).split())
    return words if len(words) <= MAX_MESSAGE else f"{words[:MAX_MESSAGE]} ..."


def check_choice(
    name: str, value: object, choices: Iterable[object], *, listed_by: str | None = None
) -> None:
    """Raise ValueError if `value` is not one of `choices`; names the closest match.

    >>> check_choice("form", "chunks", ["full", "chunk"])
    Traceback (most recent call last):
    ValueError: form 'chunks' is unknown (perhaps you meant 'chunk'); available: full, chunk
    """
    known = list(choices)
    if value not in known:
        raise unknown_choice(name, value, known, listed_by=listed_by)


def check_supported(
    name: str, value: object, choices: Collection[str], *, known: Iterable[str], what: str
) -> None:
    """Raise ValueError if `value` is unknown, or is known but does not support an option.

    Args:
        name: Name of the argument.
        value: Its value.
        choices: The values that support the option.
        known: All values.
        what: The option.

    >>> check_supported("form", "fft", ["dense"], known=["dense", "fft"], what="cu_seqlens")
    Traceback (most recent call last):
    ValueError: form is 'fft', which does not support cu_seqlens; available: dense
    """
    if value not in choices and value in list(known):
        raise unsupported(name, value, what, choices)
    check_choice(name, value, choices)


def check_shapes(**arguments: tuple[Any, str]) -> dict[str, int]:
    """Check that the shapes of tensors match their patterns and each other.

    Args:
        arguments: name=(tensor, pattern). A pattern consists of letters as in `onescan.shapes`,
            which represent the same size in all patterns, and of numbers. None is skipped.

    Returns:
        The size of each letter.

    Raises:
        ValueError: If an argument is not a tensor, or its shape does not match.

    >>> check_shapes(q=(torch.ones(2, 5), "B T"), k=(torch.ones(2, 4), "B T"))
    Traceback (most recent call last):
    ValueError: k has shape (2, 4), expected 'B T' with B=2, T=5
    """
    sizes: dict[str, int] = {}
    for name, (tensor, pattern) in arguments.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is {named_type(tensor)}, expected a tensor {pattern!r}")
        letters, shape, before = pattern.split(), tensor.shape, len(sizes)
        fits = len(letters) == len(shape)
        for letter, size in zip(letters, shape, strict=False):
            expected = int(letter) if letter.isdigit() else sizes.setdefault(letter, size)
            fits = fits and size == expected
        if not fits:
            # formatted only here, because formatting a size would make torch.compile specialize it
            given = dict(list(sizes.items())[:before])  # by earlier arguments
            known = ", ".join(f"{each}={given[each]}" for each in letters if each in given)
            with_known = f" with {known}" if known else ""
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, expected {pattern!r}{with_known}"
            )
    return sizes


def check_positive(**numbers: int | float) -> None:
    """Raise ValueError if a number is not above 0 and finite.

    >>> check_positive(chunk_size=0)
    Traceback (most recent call last):
    ValueError: chunk_size is 0, expected a number above 0
    """
    for name, number in numbers.items():
        if isinstance(number, str | None) or not 0 < number < float("inf"):  # also true for NaN
            raise ValueError(f"{name} is {number!r}, expected a number above 0")


def check_whole(least: int, **numbers: Any) -> None:
    """Raise ValueError if an argument is not a whole number of at least `least`.

    >>> check_whole(1, top_k=1.5)
    Traceback (most recent call last):
    ValueError: top_k is 1.5, expected a whole number of at least 1

    Integers of NumPy are whole numbers too:

    >>> import numpy as np
    >>> check_whole(1, top_k=np.int64(2))
    """
    for name, number in numbers.items():
        is_whole = isinstance(number, INTEGERS) and not isinstance(number, bool)
        if not is_whole or number < least:
            raise ValueError(f"{name} is {number!r}, expected a whole number of at least {least}")


def check_distinct(**sequences: Collection[object]) -> None:
    """Raise ValueError if a sequence is empty or contains a value more than once.

    >>> check_distinct(seeds=(1, 0, 1))
    Traceback (most recent call last):
    ValueError: seeds contains 1 more than once
    """
    for name, values in sequences.items():
        if not values:
            raise ValueError(f"{name} is empty, expected at least one value")
        value, count = Counter(values).most_common(1)[0]
        if count > 1:
            raise ValueError(f"{name} contains {value!r} more than once")


def check_floating(**tensors: Any) -> None:
    """Raise ValueError if an argument is not a tensor with a floating point type."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is {named_type(tensor)}, expected a tensor")
        if not tensor.is_floating_point():
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected a floating point type")


def check_token_ids(tokens: Any, vocab_size: int, *, name: str = "tokens") -> None:
    """Raise ValueError if token ids have the wrong type or, on a CPU, are outside the vocabulary.

    >>> check_token_ids(torch.tensor([[3, 7]]), vocab_size=5)
    Traceback (most recent call last):
    ValueError: tokens contains ids from 3 to 7, expected 0 to 4
    """
    if not isinstance(tokens, Tensor):
        raise ValueError(f"{name} is {named_type(tokens)}, expected a tensor")
    if tokens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} has dtype {tokens.dtype}, expected torch.int64")
    if not tokens.numel() or not can_look_at_values(tokens):
        return
    low, high = (bound.item() for bound in torch.aminmax(tokens))
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{name} contains ids from {low} to {high}, expected 0 to {vocab_size - 1}"
        )


def as_grid_shape(shape: Any, *, name: str = "shape") -> tuple[int, ...]:
    """Return the shape of a grid as a tuple, from a tuple or list of positive whole numbers.

    >>> as_grid_shape([3, 4])
    (3, 4)
    >>> as_grid_shape((3, 2.5))
    Traceback (most recent call last):
    ValueError: shape is (3, 2.5), expected one positive whole number per axis
    """
    sizes: Any = shape if isinstance(shape, list | tuple) else ()
    whole = all(isinstance(n, INTEGERS) for n in sizes)
    if not (sizes and whole and all(n > 0 for n in sizes)):
        # Name the type of a tensor or array instead of printing its values.
        shown = named_type(shape) if hasattr(shape, "ndim") else repr(shape)
        raise ValueError(f"{name} is {shown}, expected one positive whole number per axis")
    # NumPy's integers become Python's, but SymInt must stay symbolic.
    converted: list[Any] = [n if isinstance(n, torch.SymInt) else int(n) for n in sizes]
    return tuple(converted)


def check_devices(**tensors: Any) -> None:
    """Raise ValueError if an argument is not a tensor, or is on another device than the first."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor | None):
            raise ValueError(f"{name} is {named_type(tensor)}, expected a tensor")
    given = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    first, device = next(iter(given.items()))
    for name, other in given.items():
        if other != device:
            raise ValueError(
                f"{name} is on {other} and {first} on {device}, expected the same device"
            )


def is_known(length: Any) -> bool:
    """Return whether a length is a number, and not a symbol as during export.

    >>> is_known(3)
    True
    """
    return not isinstance(length, torch.SymInt)


def can_look_at_values(tensor: Tensor) -> bool:
    """Return whether Python may read a tensor's values: on a CPU, in eager mode.

    On a GPU, reading would synchronize with the device. During compilation and export, and under
    vmap, there are no values yet.
    """
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and is_plain(tensor)


def is_plain(tensor: Tensor) -> bool:
    """Return whether this is a plain tensor, neither wrapped by torch.func nor a subclass."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not is_wrapped and type(tensor) in (Tensor, torch.nn.Parameter)


def holds_nan(*tensors: Tensor) -> bool:
    """Return whether the sum of a tensor is NaN; False if values cannot be read.

    >>> holds_nan(torch.ones(2), torch.tensor([1.0, torch.nan]))
    True
    """
    readable = all(can_look_at_values(x) for x in tensors)
    return readable and any(math.isnan(x.detach().sum().item()) for x in tensors)


class NotFiniteError(ValueError):
    """A value is NaN or infinite."""


def check_no_nan(*results: Tensor, **arguments: Tensor | None) -> None:
    """Raise an error that names the argument with NaN or infinity, if a result contains NaN.

    Only sums of the results are read, so these should depend on all arguments. The check is skipped
    if `can_look_at_values` returns False.

    Raises:
        NotFiniteError: If a result contains NaN, and an argument contains NaN or infinity.
    """
    if not holds_nan(*results):
        return
    for what, holds in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        for name, tensor in arguments.items():
            count = 0 if tensor is None else int(holds(tensor.detach()).sum())
            if tensor is not None and count:
                values = plural(count, f"{what} value")
                raise NotFiniteError(f"{name} holds {values} out of {tensor.numel():,}")


def check_log_decay(log_decay: Tensor) -> None:
    """Raise ValueError for NaN or positive values, if the values can be read.

    >>> check_log_decay(torch.tensor([-1.0, 0.5]))
    Traceback (most recent call last):
    ValueError: log_decay reaches 0.5, expected at most 0 (a decay factor of 1)
    """
    if not can_look_at_values(log_decay) or not log_decay.numel():
        return
    highest = log_decay.detach().amax().item()
    if highest != highest:
        check_no_nan(log_decay, log_decay=log_decay)
    if highest > 0:
        raise ValueError(
            f"log_decay reaches {highest:.6g}, expected at most 0 (a decay factor of 1)"
        )


def unpack_states(state: Any, kind: type, *, causal: bool) -> tuple[Any, Any]:
    """Return the forward and the backward state of a call, each a `kind` or None.

    Args:
        state: The state passed by the caller: a `kind` if causal, otherwise a pair; or None.
        kind: State class of one direction, such as DecayState. The class of the pair has the same
            name with an s, such as DecayStates.
        causal: Whether there is only a forward state.

    Raises:
        ValueError: If state is for the other value of `causal`, or has another type.
    """
    pair = (state, None) if causal else (None, None) if state is None else state
    if isinstance(pair, tuple) and [isinstance(x, kind | None) for x in pair] == [True, True]:
        forward, backward = pair
        return forward, backward
    what = f"a {kind.__name__}" if causal else f"{kind.__name__}s"
    meaning = "" if causal else ", or a pair of a forward and a backward state"
    raise ValueError(
        f"state is {named_type(state)}, expected {what}, as causal={causal} returns{meaning}"
    )


def named_state_tensors(states: tuple[Any, ...], *, causal: bool) -> dict[str, Tensor]:
    """Return the tensors of the states by the names used in errors, such as state.forward.kv."""
    return {
        f"state.{field}" if causal else f"state.{direction}.{field}": tensor
        for direction, state in zip(("forward", "backward"), states, strict=False)
        if state is not None
        for field, tensor in state._asdict().items()
    }
