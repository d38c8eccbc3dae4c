"""Chunks of attention: scores inside each, and states passed from chunk to chunk.

    o_t = sum_s score_ts v_s + sum over directions of  before_n^T (enter_t q_t)
    before_{n+1} = through_n before_n + sum_s (leave_s k_s) v_s^T

Where row sums or states are wanted, values have a last column of ones, and states a row more. They
are [V + 1, K] here: on a CPU a product with one column more than vectors hold is slow, and one with
a row more is not. So outputs and row sums are made apart.
"""

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onescan.ops.chunks import Room, carried, in_turns, is_known, take_turns
from onescan.ops.decay_attention.directions import Matrices, with_ones
from onescan.ops.decay_attention.reach import Reach
from onescan.ops.decay_attention.scores import Out, Scores, plus, plus_product, product
from onescan.ops.numerics import applied, full_precision, inner

BACKWARD = (False, True)  # the states from the left, and those from the right


class Attended(NamedTuple):
    """What tokens read.

    Attributes:
        o: the sum of values, [B, H, N, C, V].
        row_sum: that of scores, if wanted, [B, H, N, C, 1].
        leaves: the states that leave on either side, if wanted, [B, H, K, V + 1].
    """

    o: Tensor
    row_sum: Tensor | None
    leaves: Matrices


class _Plan(NamedTuple):
    """What is no tensor.

    Attributes:
        scores: how scores come about.
        others: how many tensors they depend on beside queries and keys.
        directions: how many states are passed on.
        with_sum: whether row sums are wanted.
        with_ones: whether values have a column of ones.
    """

    scores: Scores
    others: int
    directions: int
    with_sum: bool
    with_ones: bool

    def parted(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], "_Passing"]:
        """What scores depend on, and what passing does."""
        return tensors[: self.others], _Passing(*_by(self.directions, tensors[self.others :]))

    def made(self, tensors: Sequence[Any]) -> list[list[Any]]:
        """Sort what a forward returns, or the gradients of it.

        That is outputs; row sums, if wanted; the states that leave; and what gradients need: values
        with ones, if there are, and the states before chunks.
        """
        counts = 1, self.with_sum, self.directions, self.with_ones, self.directions
        rest = iter(tensors)
        return [[*islice(rest, count)] for count in counts]


class _Passing(NamedTuple):
    """Of each direction its reach, and the state that enters, [B, H, V or V + 1, K]."""

    enter: tuple[Tensor, ...] = ()
    leave: tuple[Tensor, ...] = ()
    through: tuple[Tensor, ...] = ()
    state: tuple[Tensor, ...] = ()


def attended(
    scores: Scores,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    others: Sequence[Tensor],
    reaches: Sequence[Reach],
    enters: Matrices,
    *,
    with_sum: bool,
    return_state: bool,
) -> Attended:
    """Let every query meet the keys of its chunk, and the states that enter it.

    Args:
        scores: how scores come about.
        q: queries in chunks, [B, H, N, C, K].
        k: keys, likewise.
        v: values, [B, H, N, C, V].
        others: what else scores depend on, [B, H, N, C, .].
        reaches: from the left and, unless causal, from the right, how much of a state gets to each
            token, and of a token to the end of its chunk, [B, H, N, ., X].
        enters: the states that enter the first chunk and the last one, [B, H, K, V + 1].
        with_sum: whether row sums are wanted.
        return_state: whether the states that leave are wanted.
    """
    states = enters[: len(reaches)]
    # one chunk reads no state, and what it adds is the state that leaves
    alone = is_known(k.shape[2]) and k.shape[2] == 1 and all(x is None for x in states)
    has_ones = with_sum or (return_state and not alone)
    plan = _Plan(scores, len(others), 0 if alone else len(reaches), with_sum, has_ones)
    v = v if has_ones else v.contiguous()
    tensors = [*others]
    if not alone:
        # each of its own, as compilers want the tensors that a function of autograd is given
        entering = (_entering(x, k, v, with_ones=has_ones) for x in states)
        tensors += [x for each in (*zip(*reaches, strict=True), entering) for x in each]
    is_learning = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *tensors))
    if torch.compiler.is_exporting() or (torch.compiler.is_compiling() and not is_learning):
        made = _in_a_program(plan, q, k, v, *tensors)
    else:
        made = applied(_Attended, plan, q, k, v, *tensors)
    (o,), row_sum, lasts, *_ = plan.made(made)
    leaves = lasts if return_state else []
    if alone and return_state:
        added = _added(k, with_ones(v), *(reach.leave for reach in reaches))
        leaves = [x[:, :, 0] for x in added]
    left, right = [*(x.mT for x in leaves), None, None][:2]
    return Attended(o, row_sum[0] if with_sum else None, Matrices(left, right))


def _entering(state: Tensor | None, k: Tensor, v: Tensor, *, with_ones: bool) -> Tensor:
    """A state [B, H, V or V + 1, K], zeros where there is none."""
    if state is None:
        return v.new_zeros(()).expand(*k.shape[:2], v.shape[-1] + with_ones, k.shape[-1])
    return state.mT if with_ones else state.mT[..., :-1, :]


def _by(count: int, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """So many at a time."""
    return [(*tensors[i : i + count],) for i in range(0, len(tensors), max(1, count))]


def _in_a_program(plan: _Plan, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> list[Tensor]:
    """What an export reads along, and a compiler where nobody asks for gradients."""
    others, passing = plan.parted(rest)
    v = with_ones(v) if plan.with_ones else v
    befores, lasts = _passed(k, v, passing.leave, passing.through, passing.state)
    tensors = *plan.scores.prepared(q, *others), *passing.enter, *befores
    return [*_outputs(q, k, v, *tensors, plan=plan), *lasts]


def _passed(
    k: Tensor,
    v: Tensor,
    leave: Sequence[Tensor],
    through: Sequence[Tensor],
    states: Sequence[Tensor],
    *,
    turned: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """Of each direction the states before chunks, and the one that leaves the last one visited.

    Args:
        k: keys; or queries, where the states are gradients.
        v: values, and ones if so; or gradients of outputs.
        leave: of each direction, how much of a key a chunk adds.
        through: how much of a state a chunk keeps.
        states: those that enter, [B, H, V or V + 1, K].
        turned: whether directions are turned round, as gradients go.
    """
    ways = [way != turned for way in BACKWARD[: len(leave)]]
    befores, lasts = [], []
    if ways and take_turns(k, v, *leave, *through) and take_turns(*states):
        size = v.shape[-1], k.shape[-1]
        rooms = [Room(k, size, backward=way) for way in ways]
        in_turns(_added, k, v, *leave, into=[room.own for room in rooms])
        for room, state, kept in zip(rooms, states, through, strict=True):
            lasts.append(room.carry(state, kept))
            befores.append(room.before)
        return befores, lasts
    added = _added(k, v, *leave)
    for state, own, kept, backward in zip(states, added, through, ways, strict=True):
        before, last = carried(state, own, kept, backward=backward)
        befores.append(before)
        lasts.append(last)
    return befores, lasts


def _added(k: Tensor, v: Tensor, *leave: Tensor, out: Out = ()) -> tuple[Tensor, ...]:
    """What each chunk adds to the state of each direction, [B, H, N, V or V + 1, K]."""
    room = torch.empty_like(k) if out else None
    into = out or [None] * len(leave)
    pairs = zip(leave, into, strict=True)
    return tuple(product(v.mT, torch.mul(k, x, out=room), o) for x, o in pairs)


def _outputs(
    q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor, plan: _Plan, out: Out = ()
) -> tuple[Tensor, ...]:
    """Outputs of chunks and, if wanted, row sums.

    Args:
        q: queries.
        k: keys.
        v: values, and ones if so.
        tensors: those prepared for scores; then of all directions how much of a state queries
            read; then the states.
        plan: what is no tensor.
        out: where results are written, if so.
    """
    in_place = bool(out)
    width = v.shape[-1] - plan.with_ones
    of_scores = len(tensors) - 2 * plan.directions
    weights = plan.scores.weights(q, k, *tensors[:of_scores], in_place=in_place)
    o = product(weights, v[..., :width], out[0] if out else None)
    row_sum = [weights.sum(-1, keepdim=True)] if plan.with_sum else []
    room = torch.empty_like(q) if in_place else None
    for enter, before in zip(*_by(plan.directions, tensors[of_scores:]), strict=True):
        reads = torch.mul(q, enter, out=room)
        o = plus_product(o, reads, before[..., :width, :].mT, in_place=in_place)
        row_sum = [x + (before[..., width:, :] @ reads.mT).mT for x in row_sum]
    return o, *row_sum


def _slopes(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *tensors: Tensor,
    plan: _Plan,
    of_others: bool,
    of_reach: bool,
    out: Out = (),
) -> tuple[Tensor, ...]:
    """Gradients of queries, keys and values; if wanted, of what scores depend on, and of reach.

    Args:
        do: the gradient of outputs and, where values have ones, of row sums.
        q: queries.
        k: keys.
        v: values, and ones if so.
        tensors: those prepared for scores; then of all directions enter, then leave, then through;
            then the states before chunks, and the gradients of what chunks add to them.
        plan: what is no tensor.
        of_others: whether gradients of what scores depend on are wanted.
        of_reach: whether those of reach are.
        out: where the first three are written, if so.
    """
    in_place = bool(out)
    into = out or (None, None, None)
    width = v.shape[-1] - plan.with_ones
    of_scores = len(tensors) - 5 * plan.directions
    weights, dq, dk, *dothers = plan.scores.slopes(
        do @ v.mT,
        q,
        k,
        *tensors[:of_scores],
        of_others=of_others,
        in_place=in_place,
        out=into[:2],
    )
    dv = product(weights.mT, do[..., :width], into[2])
    room = torch.empty_like(q) if in_place else None  # for one after another
    of_sides = []
    for side in zip(*_by(plan.directions, tensors[of_scores:]), strict=True):
        enter, leave, through, before, down = side
        leaves = torch.mul(k, leave, out=room)
        dv = plus_product(dv, leaves, down[..., :width, :].mT, in_place=in_place)
        read = product(do, before, room)
        dq = plus(dq, read, enter, in_place=in_place)
        of_enter = _products(read, q, enter) if of_reach else None
        left = product(v, down, room)
        dk = plus(dk, left, leave, in_place=in_place)
        if of_enter is not None:
            of_through = _products(down, before, through).sum(-2, keepdim=True)
            of_sides.append((of_enter, _products(left, k, leave), of_through))
    return dq, dk, dv, *dothers, *(x for each in zip(*of_sides, strict=True) for x in each)


def _products(x: Tensor, y: Tensor, like: Tensor) -> Tensor:
    """What each row has of both, summed up where all channels have one decay."""
    return x * y if like.shape[-1] == x.shape[-1] else inner(x, y)


class _Attended(torch.autograd.Function):
    """Scores, and what is multiplied by decays, are not kept but made again in the backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(plan: _Plan, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        others, passing = plan.parted(rest)
        like = [v, v[..., :1]] if plan.with_sum else [v]
        v = with_ones(v) if plan.with_ones else v
        befores, lasts = _passed(k, v, passing.leave, passing.through, passing.state)
        tensors = *plan.scores.prepared(q, *others), *passing.enter, *befores
        made = in_turns(partial(_outputs, plan=plan), q, k, v, *tensors, like=like)
        return *made, *lasts, *[v] * plan.with_ones, *befores

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.plan, q, k, v, *rest = inputs
        *_, of_ones, befores = ctx.plan.made(output)
        ctx.mark_non_differentiable(*befores)
        ctx.set_materialize_grads(False)  # those of states before chunks would be large
        ctx.save_for_backward(q, k, *(of_ones or [v]), *rest, *befores)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, *rest = ctx.saved_tensors
        plan: _Plan = ctx.plan
        count = plan.directions
        befores = rest[len(rest) - count :]
        of_outputs, of_sums, of_lasts, of_v, _ = plan.made(slopes)
        others, passing = plan.parted(rest[: len(rest) - count])
        with full_precision(q):
            of_lasts = [
                x.new_zeros(()).expand_as(x[:, :, 0]) if dlast is None else dlast
                for x, dlast in zip(befores, of_lasts, strict=True)
            ]
            do = _slopes_of_outputs(v, plan, *of_outputs, *of_sums)
            if torch.is_grad_enabled():  # for gradients of gradients
                befores, _ = _passed(k, v, passing.leave, passing.through, passing.state)
            downs, of_states = _passed(q, do, passing.enter, passing.through, of_lasts, turned=True)
            reach = [x for each in passing[:3] for x in each]
            _, _, _, _, *needs = ctx.needs_input_grad
            of_others = any(needs[: plan.others])
            of_reach = any(needs[plan.others : plan.others + len(reach)])
            wanted = [
                q,
                k,
                v[..., :-1] if plan.with_ones else v,
                *(others if of_others else ()),
                *(reach if of_reach else ()),
            ]
            function = partial(_slopes, plan=plan, of_others=of_others, of_reach=of_reach)
            tensors = *plan.scores.prepared(q, *others), *reach, *befores, *downs
            dq, dk, dv, *made = in_turns(function, do, q, k, v, *tensors, like=wanted)
        dv = sum((x[..., :-1] for x in of_v if x is not None), start=dv)
        dothers = made[: plan.others] if of_others else [None] * plan.others
        dreach = made[len(made) - len(reach) :] if of_reach else [None] * len(reach)
        return None, dq, dk, dv, *dothers, *dreach, *of_states


def _slopes_of_outputs(
    v: Tensor, plan: _Plan, do: Tensor | None, dsum: Tensor | None = None
) -> Tensor:
    """As if outputs were of all columns of v."""
    width = v.shape[-1] - plan.with_ones
    if do is None:
        do = torch.zeros_like(v[..., :width])
    if not plan.with_ones:
        return do.contiguous()
    if dsum is None:
        return F.pad(do, (0, 1)).contiguous()
    return torch.cat([do, dsum], dim=-1)
