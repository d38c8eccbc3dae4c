"""Chunks of a sequence: how long they are, and the state that each passes on to the next.

While a model is exported its lengths are symbols. Then the number of chunks is not known, and what
else would be a loop over them becomes a scan, which the program that comes out runs.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onescan.checks import can_look_at_values
from onescan.ops.numerics import applied

# Chosen on a CPU:
TURN = 1 << 20  # numbers of the largest tensor that a function of chunks is given at a time
MANY = 64  # chunks from which on they are visited in stretches side by side, a pass more
STEP = 1 << 16  # numbers from which on another thread helps; so many stretches are side by side
FEWEST = 8  # stretches: fewer save less than the further pass costs

Step = Callable[..., Tensor]  # from the state before a chunk and its parts, the one after it


def is_known(length: Any) -> bool:
    """Whether a length is a number: while a model is exported it is a symbol.

    >>> is_known(3)
    True
    """
    return not isinstance(length, torch.SymInt)


def length_of_chunks(chunk_size: int, tokens: int) -> int:
    """No longer than the sequence, where its length is known.

    >>> length_of_chunks(64, 9)
    9
    """
    return min(chunk_size, tokens) if is_known(tokens) else chunk_size


def number_of_chunks(tokens: int, size: int) -> int:
    """How many chunks hold all tokens.

    Of a length that is a symbol it is a new symbol: what torch derives from the old one it would
    want to know more about, such as whether there is more than one chunk.

    >>> number_of_chunks(9, 4)
    3
    """
    if is_known(tokens):
        return -(-tokens // size)
    count: Any = ((torch.scalar_tensor(tokens, dtype=torch.int64) + (size - 1)) // size).item()
    torch._check(count >= 1)
    torch._check(count * size >= tokens)
    torch._check(count * size - tokens < size)
    return count


def take_turns(*tensors: Tensor) -> bool:
    """Whether chunks of tensors, [B, H, N, ...], can be taken some at a time.

    Not where these axes differ among them, values cannot be looked at, or a gradient is wanted.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    return all(can_look_at_values(x) and x.shape[:3] == tensors[0].shape[:3] for x in tensors)


def in_turns(
    function: Callable[..., tuple[Tensor, ...]],
    *tensors: Tensor,
    like: Sequence[Tensor] = (),
    into: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:
    """What a function makes of chunks, as many at a time as a CPU's caches hold.

    Args:
        function: takes tensors of chunks, and as `out` tensors of the results' shapes or nothing;
            returns results, in which each chunk depends on itself alone. It may return `out`, with
            the results in it, in place of new tensors, which are copied there.
        tensors: [B, H, N, ...]. Where they can take turns the function gets M chunks of them,
            [1, 1, M, ...], unless one turn is enough.
        like: of each result, a tensor of its shape and type.
        into: where results are written, if not in new memory; then `like` is not needed.

    Returns:
        What the function does, [B, H, N, ...].

    >>> def added(x, y, out=()):
    ...     return (torch.add(x, y),)
    >>> x = torch.ones(1, 2, 3)
    >>> in_turns(added, x, x, like=[x])[0].tolist()
    [[[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]]
    """
    if not take_turns(*tensors):
        return function(*tensors)
    whole = (*into,) or tuple(x.new_empty(x.shape) for x in like)
    all_at_once = (*tensors, *whole)
    turns = -(-max(x.numel() for x in all_at_once) // TURN)
    if turns > 1:
        count = max(1, -(-tensors[0].shape[:3].numel() // turns))
        flat = (x.flatten(0, 2)[None, None].split(count, dim=2) for x in all_at_once)
        each = list(zip(*flat, strict=True))
    else:
        each = [all_at_once]
    for parts in each:
        given, out = parts[: len(tensors)], parts[len(tensors) :]
        for place, made in zip(out, function(*given, out=out), strict=True):
            if made is not place:
                place.copy_(made)
    return whole


def passed_on(
    step: Step, state: Tensor, *parts: Tensor, backward: bool = False
) -> tuple[Tensor, Tensor]:
    """Pass a state from chunk to chunk.

    Args:
        step: takes the state and one chunk's parts, and returns the state after it.
        state: what enters the first chunk visited, [B, H, ...].
        parts: what the steps read, [B, H, N, ...].
        backward: whether the last chunk is visited first.

    Returns:
        The state before each chunk, [B, H, N, ...], and the one after the last chunk visited.

    >>> added = torch.tensor([1.0, 2.0, 3.0]).reshape(1, 1, 3)
    >>> before, last = passed_on(torch.add, torch.zeros(1, 1), added)
    >>> before.tolist(), last.tolist()
    ([[[0.0, 1.0, 3.0]]], [[6.0]])
    """
    if not is_known(parts[0].shape[2]):
        return _scanned(step, state, parts, backward)
    order = -1 if backward else 1
    before = []
    for each in list(zip(*(x.unbind(2) for x in parts), strict=True))[::order]:
        before.append(state)
        state = step(state, *each)
    return torch.stack(before[::order], dim=2), state


def carried(
    state: Tensor, own: Tensor, kept: Tensor | None = None, *, backward: bool = False
) -> tuple[Tensor, Tensor]:
    """Pass on the usual state, S_n = kept_n S_{n-1} + own_n, with a backward of as little memory.

    Args:
        state: what enters the first chunk visited, [B, H, ...].
        own: what each chunk adds, [B, H, N, ...].
        kept: what each keeps of a state, with as many axes as `own`, of its size or 1; None is all.
        backward: whether the last chunk is visited first.

    Returns:
        As `passed_on`.

    >>> added, half = torch.tensor([1.0, 2.0, 3.0]).reshape(1, 1, 3), torch.tensor([[[0.5]]])
    >>> before, last = carried(torch.zeros(1, 1), added, half)
    >>> before.tolist(), last.tolist()
    ([[[0.0, 1.0, 2.5]]], [[4.25]])
    """
    if not torch.compiler.is_compiling():
        return applied(_Carried, state, own, kept, backward)
    if not torch.compiler.is_exporting():
        return _one_step(state, own, kept, backward)
    parts = (
        [own]
        if kept is None
        else [own, kept.expand(*kept.shape[:2], own.shape[2], *kept.shape[3:])]
    )
    return passed_on(_carry, state, *parts, backward=backward)


class Room:
    """Memory of what chunks add to states, which becomes that of the states before them.

    It has a slot more than there are chunks. Shifted by a slot, the state after a chunk is the one
    before the next, and nothing is copied; what enters a sample or head is written last.

    Attributes:
        own: what each chunk adds, [B, H, N, ...], for others to write.
        before: once carried, the states before each chunk, likewise.

    Args:
        like: whose chunks, [B, H, N, ...].
        size: of a state.
        backward: whether the last chunk is visited first.
    """

    def __init__(self, like: Tensor, size: Sequence[int], *, backward: bool) -> None:
        shape = like.shape[:3]
        slots = like.new_empty(shape.numel() + 1, *size)
        shifted = slots[1:].view(*shape, *size), slots[:-1].view(*shape, *size)
        self.before, self.own = shifted if backward else shifted[::-1]
        self.backward = backward

    def carry(self, state: Tensor, kept: Tensor) -> Tensor:
        """As `carried`, of `own`; returns the state after the last chunk visited.

        Args:
            state: what enters the first chunk visited, [B, H, ...].
            kept: what each chunk keeps of a state, [B, H, N, ...].
        """
        _carry_in_place(self.own, state, kept, backward=self.backward)
        first, last = (-1, 0) if self.backward else (0, -1)
        leaves = self.own.select(2, last).clone()
        self.before.select(2, first).copy_(state)
        return leaves


def _carry(state: Tensor, own: Tensor, kept: Tensor | None = None) -> Tensor:
    return own + state if kept is None else torch.addcmul(own, kept, state)


class _Carried(torch.autograd.Function):
    """Gradients are a state too, carried the other way: G_n = kept_n G_{n+1} + dbefore_n."""

    @staticmethod
    def forward(
        state: Tensor, own: Tensor, kept: Tensor | None, backward: bool
    ) -> tuple[Tensor, Tensor]:
        before, last = own.new_empty(own.shape), own.new_empty(own.select(2, 0).shape)
        if kept is not None:
            kept = kept.expand(*kept.shape[:2], own.shape[2], *kept.shape[3:])
        _carry_into(before, last, state, own, kept, backward)
        return before, last

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        state, _, kept, ctx.way = inputs
        ctx.of_state = state.shape
        ctx.save_for_backward(output[0], kept)
        ctx.save_for_forward(output[0], kept)

    @staticmethod
    def backward(ctx: Any, dbefore: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, partial(carried, backward=not ctx.way), dbefore, dlast)

    @staticmethod
    def jvp(
        ctx: Any, dstate: Tensor, down: Tensor, dkept: Tensor | None, _: Any
    ) -> tuple[Tensor, Tensor]:
        before, kept = ctx.saved_tensors
        if dkept is not None:
            down = torch.addcmul(down, dkept, before)
        return carried(dstate, down, kept, backward=ctx.way)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        state: Tensor,
        own: Tensor,
        kept: Tensor | None,
        backward: bool,
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """The axis becomes the last one."""
        made = _Carried.apply(*_axis_last(info, in_dims, state, own, kept), backward)
        return made, tuple(x.ndim - 1 for x in made)


def _gradients(
    ctx: Any, carry: Callable[..., tuple[Tensor, Tensor]], dbefore: Tensor, dlast: Tensor
) -> tuple[Tensor | None, ...]:
    """Of a state, what chunks add, what they keep and the way, by what carries the other way."""
    before, kept = ctx.saved_tensors
    down, up = carry(dlast, dbefore, kept)
    of_kept = None
    if kept is not None and ctx.needs_input_grad[2]:
        of_kept = (down * before).sum_to_size(kept.shape)
    return up.sum_to_size(ctx.of_state), down, of_kept, None


def _axis_last(info: Any, in_dims: tuple[Any, ...], *tensors: Tensor | None) -> list[Any]:
    """A state, what chunks add and what they keep, with the axis of torch.func.vmap."""
    moved: list[Any] = [
        x if x is None else x.unsqueeze(-1) if axis is None else x.movedim(axis, -1)
        for axis, x in zip(in_dims, tensors, strict=False)
    ]
    moved[1] = moved[1].expand(*moved[1].shape[:-1], info.batch_size)
    return moved


@torch.library.custom_op("onescan::carried", mutates_args=())
def _one_step(
    state: Tensor, own: Tensor, kept: Tensor | None, backward: bool
) -> tuple[Tensor, Tensor]:
    """`carried`, which compiled programs call: else they would be as long as N."""
    return _Carried.forward(state, own, kept, backward)


@_one_step.register_fake
def _(state: Tensor, own: Tensor, kept: Tensor | None, backward: bool) -> tuple[Tensor, Tensor]:
    return own.new_empty(own.shape), own.new_empty(own.select(2, 0).shape)


@_one_step.register_vmap
def _(
    info: Any, in_dims: tuple[Any, ...], *inputs: Any
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    *tensors, backward = inputs
    made = _one_step(*_axis_last(info, in_dims, *tensors), backward)
    return made, tuple(x.ndim - 1 for x in made)


def _backward(ctx: Any, dbefore: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
    carry = partial(_one_step, backward=not ctx.way)
    return _gradients(ctx, carry, dbefore, dlast)


_one_step.register_autograd(_backward, setup_context=_Carried.setup_context)


def _carry_into(
    before: Tensor,
    last: Tensor,
    state: Tensor,
    own: Tensor,
    kept: Tensor | None,
    backward: bool,
) -> None:
    """Visit one chunk after another, or where they are many and small, many stretches at a time."""
    stretches = _stretches(own)
    if not stretches:
        _visit_into(before, last, state, own, kept, axis=2, backward=backward)
        return
    whole, rest = _whole_and_rest(own.shape[2], stretches, backward=backward)

    # 1. in each stretch, from nothing
    states = before[:, :, whole].unflatten(2, (stretches, -1))  # B H S L ...
    added = torch.empty_like(states.select(3, 0))
    nothing = state.new_zeros(()).expand_as(added)
    keeps = None if kept is None else kept[:, :, whole].unflatten(2, (stretches, -1))
    owns = own[:, :, whole].unflatten(2, (stretches, -1))
    _visit_into(states, added, nothing, owns, keeps, axis=3, backward=backward)

    # 2. from stretch to stretch
    within, through = (None, None) if keeps is None else _products(keeps, backward=backward)
    enters, leaves = torch.empty_like(added), torch.empty_like(last)
    _visit_into(enters, leaves, state, added, through, axis=2, backward=backward)

    # 3. what entered a stretch, at each of its chunks
    enters = enters.unsqueeze(3)
    states.add_(enters) if within is None else states.addcmul_(within, enters)

    others = before[:, :, rest], last, leaves, own[:, :, rest]
    _visit_into(*others, None if kept is None else kept[:, :, rest], axis=2, backward=backward)


def _carry_in_place(own: Tensor, state: Tensor, kept: Tensor, *, backward: bool) -> None:
    """Write the state after each chunk over what it adds, in stretches where `_carry_into` does."""
    stretches = _stretches(own)
    if not stretches:
        _visit_in_place(own, state, kept, axis=2, backward=backward)
        return
    whole, rest = _whole_and_rest(own.shape[2], stretches, backward=backward)

    # 1. in each stretch, from nothing
    states, keeps = (x[:, :, whole].unflatten(2, (stretches, -1)) for x in (own, kept))
    _visit_in_place(states, None, keeps, axis=3, backward=backward)

    # 2. from stretch to stretch, at the chunk of each that is visited last
    others, last = (slice(1, None), 0) if backward else (slice(-1), -1)
    up_to = keeps.flip(3).cumprod(3).flip(3) if backward else keeps.cumprod(3)
    # what has left the normal range would make a CPU slow, and is next to nothing
    up_to = up_to.masked_fill(up_to.abs() < torch.finfo(up_to.dtype).tiny, 0)
    ends = states.select(3, last)
    _visit_in_place(ends, state, up_to.select(3, last), axis=2, backward=backward)

    # 3. what entered a stretch, at all others of its chunks
    later, before, first = slice(1, None), slice(-1), slice(1)
    if backward:
        later, before, first = before, later, slice(-1, None)
    for some, entered in ((later, ends[:, :, before]), (first, state.unsqueeze(2))):
        states[:, :, some, others].addcmul_(up_to[:, :, some, others], entered.unsqueeze(3))

    _visit_in_place(
        own[:, :, rest], ends.select(2, last), kept[:, :, rest], axis=2, backward=backward
    )


def _stretches(own: Tensor) -> int:
    """In how many stretches chunks [B, H, N, ...] are visited side by side; 0 is in none."""
    chunks = own.shape[2]
    stretches = min(STEP // max(1, own.select(2, 0).numel()), math.isqrt(chunks))
    return 0 if chunks < MANY or stretches < FEWEST else stretches


def _whole_and_rest(chunks: int, stretches: int, *, backward: bool) -> tuple[slice, slice]:
    """Chunks in stretches of one length, and those over, which are visited last."""
    over = chunks % stretches
    if backward:
        return slice(over, None), slice(over)
    return slice(chunks - over), slice(chunks - over, None)


def _products(kept: Tensor, *, backward: bool) -> tuple[Tensor, Tensor]:
    """What is kept up to each chunk of a stretch, along axis 3, and through all of it."""
    if backward:
        kept = kept.flip(3)
    up_to = kept.cumprod(3)
    before = torch.cat([torch.ones_like(up_to[:, :, :, :1]), up_to[:, :, :, :-1]], dim=3)
    return before.flip(3) if backward else before, up_to.select(3, -1)


def _visit_into(
    before: Tensor,
    last: Tensor,
    state: Tensor,
    own: Tensor,
    kept: Tensor | None,
    *,
    axis: int,
    backward: bool,
) -> None:
    """Visit what lies along an axis, one after another."""
    order = -1 if backward else 1
    states = [*before.unbind(axis)[::order], last]
    adds = own.unbind(axis)[::order]
    keeps = [None] * len(adds) if kept is None else kept.unbind(axis)[::order]
    states[0].copy_(state)
    for add, keep, here, after in zip(adds, keeps, states[:-1], states[1:], strict=True):
        if keep is None:
            torch.add(add, here, out=after)
        else:
            torch.addcmul(add, keep, here, out=after)


def _visit_in_place(
    own: Tensor, state: Tensor | None, kept: Tensor, *, axis: int, backward: bool
) -> None:
    """Visit what lies along an axis, and write the state after each over what it adds.

    Without a state there is nothing before the first.
    """
    order = -1 if backward else 1
    steps = list(zip(own.unbind(axis), kept.unbind(axis), strict=True))[::order]
    if state is None:
        state = steps.pop(0)[0]
    for after, keep in steps:
        torch.addcmul(after, keep, state, out=after)
        state = after


def _scanned(
    step: Step, state: Tensor, parts: tuple[Tensor, ...], backward: bool
) -> tuple[Tensor, Tensor]:
    from torch._higher_order_ops.scan import scan_op

    chunks = [x.movedim(2, 0) for x in parts]
    if backward:
        chunks = [x.flip(0) for x in chunks]

    def visit(state: Tensor, *each: Tensor) -> list[Tensor]:
        return [step(state, *each), state.clone()]

    # in memory as what a step makes of it, which a scan asks for
    last, before = scan_op(visit, [state.contiguous()], chunks, ())
    return (before.flip(0) if backward else before).movedim(0, 2), last
