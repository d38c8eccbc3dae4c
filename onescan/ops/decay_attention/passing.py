"""States passed from chunk to chunk, and what tokens read of them: D directions side by side."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onescan.checks import can_look_at_values
from onescan.ops.chunks import carried, in_turns, is_known, turned
from onescan.ops.decay_attention.directions import Matrices
from onescan.ops.decay_attention.tile import Reach
from onescan.ops.numerics import full_precision

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
    empty = v.new_zeros(()).expand(*k.shape[:2], k.shape[-1], v.shape[-1])
    given = [empty if x is None else x for x in states]
    sides = list(zip(reaches, given, BACKWARD[: len(given)], strict=True))
    apart = can_look_at_values(k) and k.numel() * len(sides) >= TOGETHER
    leaves: list[Tensor] = []
    for some in [[side] for side in sides] if apart else [sides]:
        o, last = _passed(o, q, k, v, *map(list, zip(*some, strict=True)))
        leaves += [last.select(2, side) for side in range(len(some))]  # users may change them
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
        (own,) = _added(k, leave, v)
        before, last = carried(state, own, kept, backward=ways)
        (o,) = _read(o, q, enter, before)
        return o, last
    o, last, _ = _Passed.apply(o, q, k, v, enter, leave, kept, state, ways)
    return o, last


def _sides(leaves: Iterable[Tensor]) -> Matrices:
    left, right = [*leaves, None][:2]
    return Matrices(left, right)


def _side_by_side(tensors: list[Tensor], dim: int) -> Tensor:
    return tensors[0].unsqueeze(dim) if len(tensors) == 1 else torch.stack(tensors, dim)


def _weighed(x: Tensor, by: Tensor, *, in_place: bool = False) -> Tensor:
    """Queries or keys times the decays of each direction, [B, H, N, C, D K].

    In place is twice as fast on a CPU, and where nobody else sees what is computed.
    """
    if not in_place:
        return (x.unsqueeze(-2) * by).flatten(-2)
    weighed = x.new_empty(*x.shape[:-1], by.shape[-2], x.shape[-1])
    for into, one in zip(weighed.unbind(-2), by.unbind(-2), strict=True):
        torch.mul(x, one, out=into)
    return weighed.flatten(-2)


def _multiplied(x: Tensor, by: Tensor, *, in_place: bool) -> Tensor:
    """What lies by directions, [..., D, K], times what is the same in each."""
    if not in_place:
        return x * by.unsqueeze(-2)
    for one in x.unbind(-2):
        one.mul_(by)
    return x


def _gathered(x: Tensor, by: Tensor, out: Tensor | None = None) -> Tensor:
    """The sum over directions of what is weighed, [..., D, K], by the decays of each."""
    first, *others = zip(x.unbind(-2), by.unbind(-2), strict=True)
    total = torch.mul(*first, out=out)
    for each in others:
        total.addcmul_(*each)
    return total


def _added(k: Tensor, leave: Tensor, v: Tensor, out: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
    """What each chunk adds to the states, [B, H, N, D, K, V]."""
    weighed = _weighed(k, leave, in_place=bool(out)).mT
    if not out:
        return ((weighed @ v).unflatten(3, (-1, k.shape[-1])),)
    torch.matmul(weighed, v, out=out[0].flatten(3, 4))
    return out


def _read(
    o: Tensor, q: Tensor, enter: Tensor, before: Tensor, out: tuple[Tensor, ...] = ()
) -> tuple[Tensor, ...]:
    """Outputs, with what queries read of the states before their chunks."""
    weighed, before = _weighed(q, enter, in_place=bool(out)), before.flatten(3, 4)
    if not out:
        return (o + weighed @ before,)  # no view, so users may change it
    o, weighed, before, into = (x.flatten(0, 2) for x in (o, weighed, before, *out))
    torch.baddbmm(o, weighed, before, out=into)
    return out


def _slopes(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    enter: Tensor,
    leave: Tensor,
    before: Tensor,
    down: Tensor,
    of_kept: int = 0,
    out: tuple[Tensor, ...] = (),
) -> tuple[Tensor, ...]:
    """Gradients of queries, keys and values; where wanted, of both decays and of what is kept.

    Args:
        do: the gradient of the outputs.
        q: queries.
        k: keys.
        v: values.
        enter: how much of the states before each chunk queries read.
        leave: how much of keys reaches the states after it.
        before: the states before each chunk.
        down: the gradient of what each chunk adds.
        of_kept: key channels of the decays, 1 or K; 0 where their gradients are not wanted.
        out: where the first gradients are written, if so.
    """
    of_key = -1, k.shape[-1]
    read = (do @ before.flatten(3, 4).mT).unflatten(-1, of_key)
    left = (v @ down.flatten(3, 4).mT).unflatten(-1, of_key)
    weighed = _weighed(k, leave, in_place=bool(out))
    into: tuple[Tensor | None, ...] = out or (None, None, None)
    slopes = (
        _gathered(read, enter, out=into[0]),
        _gathered(left, leave, out=into[1]),
        torch.matmul(weighed, down.flatten(3, 4), out=into[2]),
    )
    if not of_kept:
        return slopes
    denter = _multiplied(read, q, in_place=bool(out))  # M C D K, behind 1, 1
    dleave = _multiplied(left, k, in_place=bool(out))
    dkept = (down * before).sum(-1, keepdim=True)  # M D K 1
    if of_kept == 1:
        denter, dleave = (x.sum(-1, keepdim=True) for x in (denter, dleave))
        dkept = dkept.sum(-2, keepdim=True)
    return *slopes, denter, dleave, dkept


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
        (own,) = in_turns(_added, k, leave, v, sizes=[state.shape[2:]])
        before, last = carried(state, own, kept, backward=ways)
        del own  # whose memory the outputs can have
        (o,) = in_turns(_read, o, q, enter, before, sizes=[o.shape[3:]])
        return o, last, before

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, *tensors, ctx.ways = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)  # the one of the states before chunks would be large
        ctx.save_for_backward(*tensors, output[2])

    @staticmethod
    def backward(
        ctx: Any, do: Tensor | None, dlast: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, enter, leave, kept, state, before = ctx.saved_tensors
        with full_precision(q):
            # contiguous once, for all products with it, here and inside the chunks
            do = torch.zeros_like(v) if do is None else do.contiguous()
            dlast = before.new_zeros(()).expand_as(before[:, :, 0]) if dlast is None else dlast
            if torch.is_grad_enabled():  # for gradients of gradients
                (own,) = _added(k, leave, v)
                before = carried(state, own, kept, backward=ctx.ways)[0]
            (own,) = in_turns(_added, q, enter, do, sizes=[before.shape[3:]])
            down, dstate = carried(dlast, own, kept, backward=turned(ctx.ways))
            del own
            tensors = do, q, k, v, enter, leave, before, down
            sizes = [x.shape[3:] for x in (q, k, v, enter, leave, kept)]
            if not any(ctx.needs_input_grad[4:7]):
                slopes = in_turns(_slopes, *tensors, sizes=sizes[:3])
                return do, *slopes, None, None, None, dstate, None
            with_decays = partial(_slopes, of_kept=kept.shape[-2])
            return do, *in_turns(with_decays, *tensors, sizes=sizes), dstate, None
