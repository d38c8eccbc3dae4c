"""States passed from chunk to chunk, and what tokens read of them: D directions side by side."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from onescan.checks import can_look_at_values
from onescan.ops.chunks import carried, is_known, turned
from onescan.ops.decay_attention.directions import Matrices
from onescan.ops.decay_attention.tile import Reach

BACKWARD = (False, True)  # the states from the left, and those from the right
TOGETHER = 1 << 23  # numbers weighed at once: 32 MiB in float32, above which memory is always new


def with_passed(
    o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    from_left: Reach,
    from_right: Reach | None,
    enters: Matrices,
    *,
    return_state: bool,
) -> tuple[Tensor, Matrices]:
    """Add to outputs [B, H, N, C, V] what tokens read of the states that enter their chunks.

    Args:
        o: outputs so far.
        q: queries in chunks, [B, H, N, C, K].
        k: keys, likewise.
        v: values, [B, H, N, C, V].
        from_left: how much of a state gets to each token, and of a token to the end of its chunk.
        from_right: the same from the right; None where causal.
        enters: the states that enter the first chunk and the last one, [B, H, K, V].
        return_state: whether the states that leave are wanted where nothing else needs them.

    Returns:
        The outputs, and the states that leave on either side, if wanted or needed.
    """
    reaches = [from_left] if from_right is None else [from_left, from_right]
    states = enters[: len(reaches)]
    alone = is_known(k.shape[2]) and k.shape[2] == 1 and all(x is None for x in states)
    if alone and not return_state:
        return o, Matrices(None, None)
    if alone:
        return o, _sides(((k * reach.leave).mT @ v)[:, :, 0] for reach in reaches)
    empty = v.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    given = [empty if x is None else x for x in states]
    sides = list(zip(reaches, given, BACKWARD[: len(given)], strict=True))
    apart = can_look_at_values(k) and k.numel() * len(sides) >= TOGETHER
    leaves: list[Tensor] = []
    for some in [[side] for side in sides] if apart else [sides]:
        o, last = _passed(o, q, k, v, *map(list, zip(*some, strict=True)))
        leaves += last.unbind(2)
    return o, _sides(leaves)


def _passed(
    o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reaches: list[Reach],
    states: list[Tensor],
    backward: list[bool],
) -> tuple[Tensor, Tensor]:
    """The same for directions side by side; the states are one tensor, [B, H, D, K, V]."""
    enter, leave = (_side_by_side([*x], dim=-2) for x in list(zip(*reaches, strict=True))[:2])
    kept = _side_by_side([reach.through.mT for reach in reaches], dim=3)  # B H N D X 1
    state = _side_by_side(states, dim=2)
    ways = tuple(backward)
    if torch.compiler.is_compiling():
        before, last = carried(state, _added(k, leave, v), kept, backward=ways)
        return o + _weighed(q, enter) @ before.flatten(3, 4), last
    o, last, _ = _Passed.apply(o, q, k, v, enter, leave, kept, state, ways)
    return o, last


def _sides(leaves: Iterable[Tensor]) -> Matrices:
    left, right = [*leaves, None][:2]
    return Matrices(left, right)


def _side_by_side(tensors: list[Tensor], dim: int) -> Tensor:
    return tensors[0].unsqueeze(dim) if len(tensors) == 1 else torch.stack(tensors, dim)


def _weighed(x: Tensor, by: Tensor) -> Tensor:
    """Queries or keys times the decays of each direction, [B, H, N, C, D K]."""
    return (x.unsqueeze(-2) * by).flatten(-2)


def _gathered(x: Tensor, by: Tensor) -> Tensor:
    """The sum over directions of what is weighed, [..., D, K], by the decays of each."""
    first, *others = zip(x.unbind(-2), by.unbind(-2), strict=True)
    total = torch.mul(*first)
    for each in others:
        total.addcmul_(*each)
    return total


def _added(k: Tensor, leave: Tensor, v: Tensor) -> Tensor:
    """What each chunk adds to the states, [B, H, N, D, K, V]."""
    return (_weighed(k, leave).mT @ v).unflatten(3, (-1, k.shape[-1]))


class _Passed(torch.autograd.Function):
    """Products with decays are not kept for the backward, but made again there."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        o: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        enter: Tensor,
        leave: Tensor,
        kept: Tensor,
        state: Tensor,
        ways: tuple[bool, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        before, last = carried(state, _added(k, leave, v), kept, backward=ways)
        factors = o, _weighed(q, enter), before.flatten(3, 4)
        read = torch.baddbmm(*(x.flatten(0, 2) for x in factors))
        return read.view(o.shape), last, before

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, *tensors, ctx.ways = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*tensors, output[2])

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlast: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, enter, leave, kept, state, before = ctx.saved_tensors
        of_key = -1, k.shape[-1]
        do = do.contiguous()  # once, for all products with it, here and inside the chunks
        if torch.is_grad_enabled():  # for gradients of gradients
            before, _ = carried(state, _added(k, leave, v), kept, backward=ctx.ways)
        down, dstate = carried(dlast, _added(q, enter, do), kept, backward=turned(ctx.ways))
        read = (do @ before.flatten(3, 4).mT).unflatten(-1, of_key)
        left = (v @ down.flatten(3, 4).mT).unflatten(-1, of_key)
        of_decays: tuple[Tensor | None, ...] = (None, None, None)
        if any(ctx.needs_input_grad[4:7]):
            of_decays = (
                (read * q.unsqueeze(-2)).sum_to_size(enter.shape),
                (left * k.unsqueeze(-2)).sum_to_size(leave.shape),
                (down * before).sum_to_size(kept.shape),
            )
        dv = _weighed(k, leave) @ down.flatten(3, 4)
        return do, _gathered(read, enter), _gathered(left, leave), dv, *of_decays, dstate, None
