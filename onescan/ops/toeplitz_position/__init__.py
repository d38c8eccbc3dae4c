"""LightNet's Toeplitz position encoding, MD-TPE: arguments, state and choice of form.

y_n = sum over axes of sum_{m <= n} t_{n-m} x_m         m and n along the axis, per channel
t_n = sum_e weight_e exp(n log_decay_e)                 kernel   (E terms per channel and axis)

or jointly over all axes, y_n = sum_{m <= n} t_{n-m} x_m with an entry of m and n for every axis and
t_n = sum_e weight_e exp(sum over axes of n_axis log_decay_{axis,e}).
"""

import math
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from onescan.checks import (
    as_grid_shape,
    can_look_at_values,
    check_choice,
    check_devices,
    check_floating,
    check_no_nan,
    check_positive,
    check_shapes,
    check_supported,
    is_known,
)
from onescan.messages import named_type, unsupported
from onescan.ops.backend import BACKENDS, Backend, resolved_backend
from onescan.ops.layout import layout_of
from onescan.ops.numerics import disable_autocast, to_accumulation_dtype
from onescan.ops.packing import Chunks, Packing
from onescan.ops.parallel import (
    Group,
    SequenceGroup,
    is_empty_grid,
    refuse_group,
)
from onescan.ops.toeplitz_position import forms
from onescan.ops.toeplitz_position.ranks import by_channels, carried, moves_less_by_channels
from onescan.shapes import (
    ChannelsFirst,
    Hidden,
    HiddenStates,
    JointWeights,
    LineStates,
    ToeplitzCoefficients,
)

__all__ = ["IMPLEMENTATIONS", "ToeplitzState", "choose", "toeplitz_position"]

Form = Literal["auto", "dense", "scan", "fft"]

IMPLEMENTATIONS = forms.FORMS
KERNELS = ("scan",)  # forms with Triton kernels, which take all axes at once


class ToeplitzState(NamedTuple):
    """Decayed sums of the tokens of each channel, one for each of its decays.

    Attributes:
        hidden: ``[B, D, E]``, sum_m exp((T-1-m) log_decay) x_m over the T tokens so far, in
            float32, or float64 for float64 inputs. Zeros before any token. For several axes, one
            for each line along the first axis, with the sizes of the other axes after B.
    """

    hidden: HiddenStates


def toeplitz_position(
    x: Hidden,
    log_decay: ToeplitzCoefficients,
    weight: ToeplitzCoefficients | JointWeights,
    shape: tuple[int, ...],
    *,
    bidirectional: bool = False,
    joint: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    state: ToeplitzState | None = None,
    return_state: bool = False,
    form: Form = "auto",
    backend: Backend = "auto",
    group: Group | None = None,
) -> tuple[Hidden, ToeplitzState | None]:
    """Mix tokens along each axis of their grid with weights that depend on distance only.

    Source: LightNet, arXiv:2405.21022, Eq. 17, and Eq. 16 if joint. The paper's kernel of Eq. 17 is
    sum_e exp(n log_decay_e); for Eq. 16 it gives none. Extensions: weights, decays per channel and
    axis, the second direction, and the kernel of Eq. 16, whose exponentials decay along all axes.

    Args:
        x: Tokens ``[B, T, D]``, the grid in row-major order.
        log_decay: Log of the decay factors, finite and at most 0: ``[axes, D, E]``, or
            ``[axes, 2, D, E]`` if bidirectional.
        weight: Weight of each exponential, in the shape of log_decay. If joint, all axes share it:
            ``[D, E]``, or ``[2, ..., 2, D, E]`` with a size of 2 per axis if bidirectional.
        shape: Number of tokens along each axis; ``(T,)`` for a sequence.
        bidirectional: Whether a token also reads later ones. The axis of size 2 holds the forward
            direction, lags from 0, and the backward direction, lags from 1.
        joint: Whether one kernel spans all axes (Eq. 16), so that a token also reads tokens that
            differ in several coordinates: ``t_n = sum_e weight_e exp(sum over axes s of
            n_s log_decay_se)``. By FFT, in O(N log N) for N tokens. For one axis, the results and
            forms are those without `joint`.
        cu_seqlens: Offsets of several sequences packed in one row, as in flash-attention: int32,
            ``[S + 1]``, from 0 to T, on the CPU or the device of x. With several rows, offsets
            count the tokens of all rows, up to B * T, and every row begins with a new sequence.
            For one axis, with the forms "dense" and "scan", and not with a state.
        state: State returned by a previous call, to continue a sequence, or a grid along its first
            axis. In one direction only, and for one axis if joint.
        return_state: Return the state for several axes as well, at the cost of E numbers per
            channel and line along the first axis, and without kernels.
        form: Algorithm. For N tokens along an axis, "dense" is O(N^2), "scan" O(N E) in chunks and
            "fft" O(N log N). Joint kernels over several axes have "fft" only.
        backend: "torch" runs anywhere; "triton" runs on a GPU, for the scan only, and has first
            derivatives only; "auto" chooses, see `use_backend`.
        group: Process group across which the first axis is sharded in rank order; `shape` is then
            that of this rank's part of the grid. See `onescan.ops.parallel`. None uses the group of
            `sequence_parallel`, if any. Only with the forms "dense" and "scan", and without joint
            kernels; cu_seqlens then requires torch.

    Returns:
        The mixed tokens ``[B, T, D]`` in the dtype of x, and the state after the last token, or
        None for both directions, with cu_seqlens, and for several axes without `state` and
        `return_state`.

    Raises:
        ValueError: If shapes or devices do not match, a dtype is wrong, the form or backend is
            unknown or cannot run, a state cannot be continued, cu_seqlens is invalid, the call does
            not support cu_seqlens or a group or, on a CPU, log_decay is positive or x, weight or
            state contains NaN.

    >>> x = torch.tensor([1.0, 0.0, 0.0, 4.0]).reshape(1, 4, 1)
    >>> halving = torch.full((1, 1, 1), 0.5).log()
    >>> y, state = toeplitz_position(x, halving, torch.ones(1, 1, 1), (4,))
    >>> y.flatten().tolist(), state.hidden.item()
    ([1.0, 0.5, 0.25, 4.125], 4.125)
    """
    layout = layout_of(x, "B T D", name="x", cu_seqlens=cu_seqlens, state=state, group=group)
    ranks, packing, local_x = layout.ranks, layout.packing, x
    if empty := layout.is_empty and is_empty_grid(ranks, shape):
        shape = as_grid_shape((1, *shape[1:]))  # of zeros, whose outputs are dropped
        x = layout.pad_if_empty(x)[0].expand(-1, math.prod(shape), -1)
    shape = as_grid_shape(shape)
    _check(x, log_decay, weight, shape, bidirectional, joint, state, return_state)
    if joint and len(shape) == 1:
        joint, weight = False, weight.unsqueeze(0)
    if ranks is not None:
        _refuse_ranks(ranks, form, joint=joint)
    if packing is not None:
        _check_packed(shape, form, return_state=return_state)
        if ranks is not None:
            _check_in_torch(backend, "cu_seqlens and group")
            backend = "torch"
    mix = partial(
        _mix, bidirectional=bidirectional, joint=joint, packing=packing, form=form, backend=backend
    )
    if ranks is None:
        return mix(x, log_decay, weight, shape, state=state, return_state=return_state)

    def mix_here(*inputs: Any) -> Hidden:
        return mix(*inputs, state=None, return_state=False)[0]

    returns_state = not bidirectional and (len(shape) == 1 or return_state or state is not None)
    returns_state = returns_state and packing is None
    lines = math.prod(shape[1:])
    if not returns_state and packing is None:
        lengths = ranks.lengths(local_x)
        if moves_less_by_channels(ranks, lengths, lines, log_decay):
            return by_channels(mix_here, ranks, local_x, log_decay, weight, shape, lengths), None
    local = partial(mix_here, x, log_decay, weight, shape)
    with disable_autocast(x):
        wide_x, decay, wide_weight = to_accumulation_dtype(x, log_decay[0], weight[0])
        if not bidirectional:
            decay, wide_weight = decay.unsqueeze(0), wide_weight.unsqueeze(0)
        hidden = _hidden_before(wide_x, decay, state, shape)
        length = 0 if empty else shape[0]
        y, hidden = carried(
            local, ranks, wide_x, decay, wide_weight, shape, hidden, length=length, packing=packing
        )
        y = y.to(x.dtype)
    return layout.unpad_if_empty(y), _as_state(hidden, x, shape) if returns_state else None


def _mix(
    x: Hidden,
    log_decay: ToeplitzCoefficients,
    weight: ToeplitzCoefficients | JointWeights,
    shape: tuple[int, ...],
    *,
    bidirectional: bool,
    joint: bool,
    packing: Packing | None,
    state: ToeplitzState | None,
    return_state: bool,
    form: str,
    backend: str,
) -> tuple[Hidden, ToeplitzState | None]:
    """Compute a call on one process, with checked arguments."""
    if joint:
        check_supported("form", form, ["auto", "fft"], known=IMPLEMENTATIONS, what="joint=True")
        _check_in_torch(backend, "joint=True")
        return _jointly(x, log_decay, weight, shape, bidirectional=bidirectional), None
    returns_lines = len(shape) > 1 and (return_state or state is not None)
    if returns_lines:
        _check_in_torch(backend, "a state of several axes")
        backend = "torch"
    if _backend(form, backend, x, log_decay, weight, state) == "triton":
        from onescan.ops.toeplitz_position import launch

        before = None if state is None else state.hidden
        y, after = launch.scan(
            x, log_decay, weight, shape, before, bidirectional=bidirectional, packing=packing
        )
        return y, None if after is None else ToeplitzState(after)
    axis_forms = [IMPLEMENTATIONS[choose(form, positions=n)] for n in shape]
    # sums stay in float32 or wider under autocast too
    with disable_autocast(x):
        wide_x, decay, wide_weight = to_accumulation_dtype(x, log_decay, weight)
        if not bidirectional:
            decay, wide_weight = decay.unsqueeze(1), wide_weight.unsqueeze(1)
        if packing is not None:
            size = shape[0] if form == "dense" else forms.CHUNK
            y = _packed(wide_x, decay, wide_weight, packing.chunks(size), size)
            check_no_nan(y, x=x, weight=weight)
            return y.to(x.dtype), None
        returns_state = not bidirectional and (len(shape) == 1 or returns_lines)
        hidden = _hidden_before(wide_x, decay, state, shape) if returns_state else None
        lines = forms.channels_first(wide_x, shape)
        y, hidden = _along_axes(axis_forms, lines, decay, wide_weight, hidden)
        y = forms.channels_last(y)
    named = {} if state is None else {"state.hidden": state.hidden}
    check_no_nan(y, x=x, weight=weight, **named)
    return y.to(x.dtype), None if hidden is None else _as_state(hidden, x, shape)


def _as_state(hidden: LineStates, x: Hidden, shape: tuple[int, ...]) -> ToeplitzState:
    """Return the state of a call, given the hidden state of each line, channels first."""
    return ToeplitzState(hidden.unflatten(1, (x.shape[0], *shape[1:])).movedim(0, -2))


def _packed(x: Hidden, log_decay: Tensor, weight: Tensor, chunks: Chunks, size: int) -> Hidden:
    """Mix packed sequences along one axis, in chunks of up to `size` tokens."""
    x = chunks.from_tokens(x)
    lines = forms.channels_first(x, (x.shape[1],))
    y, _ = forms.scan(lines, log_decay[0], weight[0], None, chunk_size=size, begins=chunks.begins)
    return chunks.to_tokens(forms.channels_last(y))


def _refuse_ranks(ranks: SequenceGroup, form: str, *, joint: bool) -> None:
    """Raise ValueError for a call that needs all tokens in one process."""
    if joint:
        refuse_group(ranks, "a joint kernel", "its FFT needs all tokens; expected joint=False")
    if form == "fft":
        refuse_group(ranks, "form 'fft'", "an FFT needs all tokens; expected 'dense' or 'scan'")


def _check_packed(shape: tuple[int, ...], form: str, *, return_state: bool) -> None:
    """Raise ValueError for a call that does not take packed sequences."""
    if len(shape) > 1:
        raise ValueError(f"cu_seqlens was given with shape {shape}, expected one axis")
    if return_state:
        raise ValueError("return_state is True with cu_seqlens, expected False")
    choices = ["auto", "dense", "scan"]
    check_supported("form", form, choices, known=IMPLEMENTATIONS, what="cu_seqlens")


def _check_in_torch(backend: str, what: str) -> None:
    """Raise ValueError if a call that kernels do not support names another backend than torch."""
    check_supported("backend", backend, ["auto", "torch"], known=BACKENDS, what=what)


def _jointly(
    x: Hidden,
    log_decay: ToeplitzCoefficients,
    weight: JointWeights,
    shape: tuple[int, ...],
    *,
    bidirectional: bool,
) -> Hidden:
    with disable_autocast(x):
        wide_x, decay, wide_weight = to_accumulation_dtype(x, log_decay, weight)
        if not bidirectional:
            decay, wide_weight = decay.unsqueeze(1), wide_weight[(None,) * len(shape)]
        lines = forms.channels_first(wide_x, shape)
        y = forms.channels_last(forms.joint_fft(lines, decay, wide_weight))
    check_no_nan(y, x=x, weight=weight)
    return y.to(x.dtype)


def choose(form: str, *, positions: int) -> str:
    """Return the form to use for an axis of this length.

    Measured on a CPU, forward and backward, with E = 64 and 1 to 256 lines: dense is the fastest
    up to 128 positions and scan from 256 on; between them it depends on the number of lines. FFT is
    never the fastest.
    """
    if form == "auto":
        form = "dense" if is_known(positions) and positions <= 2 * forms.CHUNK else "scan"
    check_choice("form", form, IMPLEMENTATIONS)
    return form


def _backend(
    form: str, backend: str, x: Tensor, log_decay: Tensor, weight: Tensor, state: Any
) -> str:
    """Return the backend of a call; kernels support any width."""
    tensors = (x, log_decay, weight, *(() if state is None else state))
    has_kernel = form == "auto" or form in KERNELS
    resolved = resolved_backend(backend, has_kernel, *tensors, widest=None)
    if resolved == "triton" and not has_kernel:
        pairs = [f"{name}/triton" for name in ("auto", *KERNELS)]
        raise unsupported("backend", resolved, f"form {form!r}", pairs)
    return resolved


def _along_axes(
    axis_forms: list[forms.Form],
    x: ChannelsFirst,
    log_decay: Tensor,
    weight: Tensor,
    hidden: LineStates | None,
) -> tuple[ChannelsFirst, LineStates | None]:
    """Sum over axes. The hidden state is that of the first axis."""
    results, states = [], []
    for axis, (form, a, w) in enumerate(zip(axis_forms, log_decay, weight, strict=True)):
        lines = x.movedim(2 + axis, -1)
        y, after = form(lines.flatten(1, -2), a, w, hidden if axis == 0 else None)
        results.append(y.view(lines.shape).movedim(-1, 2 + axis))
        states.append(after)
    return sum(results[1:], start=results[0]), states[0]


def _hidden_before(
    x: Hidden, log_decay: Tensor, state: ToeplitzState | None, shape: tuple[int, ...]
) -> LineStates:
    """Return the hidden state before x of each line along the first axis, channels first."""
    if state is None:
        channels, width = log_decay.shape[-2:]
        return x.new_zeros(channels, x.shape[0] * math.prod(shape[1:]), width)
    return state.hidden.to(x.dtype).movedim(-2, 0).flatten(1, -2)


def _check(
    x: Tensor,
    log_decay: Tensor,
    weight: Tensor,
    shape: tuple[int, ...],
    bidirectional: Any,
    joint: Any,
    state: object,
    return_state: Any,
) -> None:
    flags = {"bidirectional": bidirectional, "joint": joint, "return_state": return_state}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{name} is {flag!r}, expected True or False")
    pattern = f"{len(shape)} 2 D E" if bidirectional else f"{len(shape)} D E"
    joint_pattern = "2 " * len(shape) * bidirectional + "D E"
    if (return_state or state is not None) and (bidirectional or (joint and len(shape) > 1)):
        name = "return_state is True" if state is None else "state was given"
        raise ValueError(
            f"{name} with bidirectional={bidirectional} and joint={joint}, expected both False"
        )
    parts: dict[str, tuple[Tensor | None, str]] = {}
    if state is not None:
        if not isinstance(state, ToeplitzState):
            raise ValueError(f"state is {named_type(state)}, expected a ToeplitzState")
        lines = " ".join(["B", *map(str, shape[1:]), "D", "E"])
        parts["state.hidden"] = (state.hidden, lines)
    carried = {name: x for name, (x, _) in parts.items()}
    check_floating(x=x, log_decay=log_decay, weight=weight, **carried)
    check_devices(x=x, log_decay=log_decay, weight=weight, **carried)
    sizes = check_shapes(
        x=(x, "B T D"),
        log_decay=(log_decay, pattern),
        weight=(weight, joint_pattern if joint else pattern),
        **parts,
    )
    check_positive(T=sizes["T"], D=sizes["D"], E=sizes["E"])
    if math.prod(shape) != sizes["T"]:
        raise ValueError(f"shape is {shape}, expected sizes whose product is T={sizes['T']}")
    if can_look_at_values(log_decay):
        low, high = torch.aminmax(log_decay.detach())
        if not (-math.inf < low and high <= 0):  # also rejects NaN
            raise ValueError(
                f"log_decay ranges from {low} to {high}, expected finite values of at most 0"
            )
