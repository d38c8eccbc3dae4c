"""LightNet's Toeplitz position encoding, MD-TPE: the front door, and nothing else.

y_n = sum over axes of sum_{m <= n} t_{n-m} x_m         m and n along the axis, per channel
t_n = sum_e weight_e exp(n log_decay_e)                 kernel   (E terms per channel and axis)
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from onescan.checks import (
    can_look_at_values,
    check_choice,
    check_devices,
    check_floating,
    check_grid_shape,
    check_no_nan,
    check_positive,
    check_shapes,
)
from onescan.ops.backend import Backend, resolved_backend
from onescan.ops.chunks import is_known
from onescan.ops.numerics import full_precision, widened
from onescan.ops.toeplitz_position import dense, fft, scan
from onescan.ops.toeplitz_position.layout import channels_first, channels_last
from onescan.ops.toeplitz_position.state import ToeplitzState
from onescan.shapes import (
    ChannelsFirst,
    DirectedDecays,
    Hidden,
    Lines,
    LineStates,
    ToeplitzCoefficients,
)

__all__ = ["IMPLEMENTATIONS", "ToeplitzState", "choose", "toeplitz_position"]

Form = Literal["auto", "dense", "scan", "fft"]
Forward = Callable[
    [Lines, DirectedDecays, DirectedDecays, LineStates | None], tuple[Lines, LineStates | None]
]

# Every form there is, along one axis.
IMPLEMENTATIONS: dict[str, Forward] = {
    "dense": dense.forward,
    "scan": scan.forward,
    "fft": fft.forward,
}

KERNELS = ("scan",)  # forms that have them, along all axes at once


def toeplitz_position(
    x: Hidden,
    log_decay: ToeplitzCoefficients,
    weight: ToeplitzCoefficients,
    shape: tuple[int, ...],
    *,
    bidirectional: bool = False,
    state: ToeplitzState | None = None,
    form: Form = "auto",
    backend: Backend = "auto",
) -> tuple[Hidden, ToeplitzState | None]:
    """Mix tokens along each axis of their grid by weights that depend on distance alone.

    Source: LightNet, arXiv:2405.21022, Eq. 17. The paper's kernel is sum_e exp(n log_decay_e);
    the weights, and decays of each channel and axis of its own, are ours, and so is the second
    direction.

    Args:
        x: tokens, row by row of the grid.
        log_decay: natural logarithm of the decays, finite and at most 0; 0 never forgets.
        weight: what each decay contributes to the kernel.
        shape: tokens along each axis; (T,) for a sequence.
        bidirectional: whether a token also reads those after it; `log_decay` and `weight` then
            hold a forward half, lags from 0, and a backward half, lags from 1.
        state: what came before, for one axis read forward; None is nothing.
        form: how the same sum is evaluated. For N tokens along an axis "dense" is O(N^2), "scan"
            O(N E) in chunks, "fft" O(N log N).
        backend: "torch" runs anywhere, "triton" on a GPU: the scan alone, with gradients once;
            "auto" is as `use_backend` says.

    Returns:
        The mixed tokens, in x's dtype, and the state after the last one; the state is None for
        several axes or both directions.

    Raises:
        ValueError: shapes disagree, there is no such form or backend, a kernel was asked for that
            cannot run, a state that cannot be continued, or, on a CPU, a log_decay above 0, or NaN
            in x, weight or state.

    >>> x = torch.tensor([1.0, 0.0, 0.0, 4.0]).reshape(1, 4, 1)
    >>> halving = torch.full((1, 1, 1), 0.5).log()
    >>> y, state = toeplitz_position(x, halving, torch.ones(1, 1, 1), (4,))
    >>> y.flatten().tolist(), state.hidden.item()
    ([1.0, 0.5, 0.25, 4.125], 4.125)
    """
    _check(x, log_decay, weight, shape, bidirectional, state)
    if _backend(form, backend, x, log_decay, weight, state) == "triton":
        from onescan.ops.toeplitz_position import launch

        before = None if state is None else state.hidden
        y, after = launch.scan(x, log_decay, weight, shape, before, bidirectional=bidirectional)
        return y, None if after is None else ToeplitzState(after)
    forwards = [IMPLEMENTATIONS[choose(form, positions=n)] for n in shape]
    # sums stay in float32 or wider under autocast too
    with full_precision(x):
        wide_x, decay, wide_weight = widened(x, log_decay, weight)
        if not bidirectional:
            decay, wide_weight = decay.unsqueeze(1), wide_weight.unsqueeze(1)
        hidden = _incoming(wide_x, decay, state)
        lines = channels_first(wide_x, shape)
        y, hidden = _along_axes(forwards, lines, decay, wide_weight, hidden)
        y = channels_last(y)
    named = {} if state is None else {"state.hidden": state.hidden}
    check_no_nan(y, x=x, weight=weight, **named)
    return y.to(x.dtype), None if hidden is None else ToeplitzState(hidden.transpose(0, 1))


def choose(form: str, *, positions: int) -> str:
    """Name the form an axis of so many positions would run: the whole policy is these lines.

    Measured on a CPU, forward and backward, with E = 64 and 1 to 256 lines: dense is the fastest
    up to 128 positions, scan no slower from 256 on, between them it depends on the number of
    lines; fft is the fastest nowhere.
    """
    if form == "auto":
        form = "dense" if is_known(positions) and positions <= 2 * scan.CHUNK else "scan"
    check_choice("form", form, IMPLEMENTATIONS)
    return form


def _backend(
    form: str, backend: str, x: Tensor, log_decay: Tensor, weight: Tensor, state: Any
) -> str:
    """What runs the call; its kernels take any width."""
    tensors = (x, log_decay, weight, *(() if state is None else state))
    has_kernel = form == "auto" or form in KERNELS
    resolved = resolved_backend(backend, has_kernel, *tensors, widest=None)
    if resolved == "triton":
        known = [f"{name}/triton" for name in ("auto", *KERNELS)]
        check_choice("form/backend", f"{form}/{resolved}", known)
    return resolved


def _along_axes(
    forwards: list[Forward],
    x: ChannelsFirst,
    log_decay: Tensor,
    weight: Tensor,
    hidden: LineStates | None,
) -> tuple[ChannelsFirst, LineStates | None]:
    """The sum over axes; hidden is for the only one, or None."""
    results = []
    for axis, (forward, a, w) in enumerate(zip(forwards, log_decay, weight, strict=True), start=2):
        lines = x.movedim(axis, -1)
        y, hidden = forward(lines.flatten(1, -2), a, w, hidden)
        results.append(y.view(lines.shape).movedim(-1, axis))
    return sum(results[1:], start=results[0]), hidden


def _incoming(x: Hidden, log_decay: Tensor, state: ToeplitzState | None) -> LineStates | None:
    """The hidden state before x, channels first; None where none can be carried."""
    axes, directions, channels, width = log_decay.shape
    if axes > 1 or directions > 1:
        return None
    if state is None:
        return x.new_zeros(channels, x.shape[0], width)
    return state.hidden.to(x.dtype).transpose(0, 1)


def _check(
    x: Tensor,
    log_decay: Tensor,
    weight: Tensor,
    shape: tuple[int, ...],
    bidirectional: bool,
    state: object,
) -> None:
    check_grid_shape(shape)
    pattern = f"{len(shape)} 2 D E" if bidirectional else f"{len(shape)} D E"
    parts: dict[str, tuple[Tensor | None, str]] = {}
    if state is not None:
        if not isinstance(state, ToeplitzState):
            raise ValueError(f"state is a {type(state).__name__}, expected a ToeplitzState")
        if len(shape) > 1 or bidirectional:
            raise ValueError(
                f"a state came with shape {shape} and bidirectional={bidirectional}; only one axis "
                "read forward can be continued"
            )
        parts["state.hidden"] = (state.hidden, "B D E")
    carried = {name: x for name, (x, _) in parts.items()}
    check_floating(x=x, log_decay=log_decay, weight=weight, **carried)
    check_devices(x=x, log_decay=log_decay, weight=weight, **carried)
    sizes = check_shapes(
        x=(x, "B T D"), log_decay=(log_decay, pattern), weight=(weight, pattern), **parts
    )
    check_positive(T=sizes["T"], D=sizes["D"], E=sizes["E"])
    if math.prod(shape) != sizes["T"]:
        raise ValueError(f"shape is {shape}, expected sizes whose product is T={sizes['T']}")
    if can_look_at_values(log_decay):
        low, high = torch.aminmax(log_decay.detach())
        if not (-math.inf < low and high <= 0):  # NaN fails this too
            raise ValueError(
                f"log_decay spans {low} to {high}, expected finite values of at most 0"
            )
