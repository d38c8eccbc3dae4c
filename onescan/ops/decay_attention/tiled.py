"""The chunk form of linear attention with decay, in tiles that fit the caches of a CPU.

The results are those of `forms.chunk`. The backward pass is written by hand: it recomputes scores,
but not states. On a CPU one block of samples and heads is processed at a time, so that memory is
reused, and within a block one batch of chunks that fits the caches.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onescan.ops.backend import wants_gradient
from onescan.ops.chunks import join_chunks, needs_plain_functions, split_chunks
from onescan.ops.decay_attention import forms
from onescan.ops.decay_attention.forms import (
    ChunkInputs,
    Directions,
    Options,
    PerDirection,
    by_direction,
    chunk_inputs,
    chunk_states,
    row_divisor,
)
from onescan.ops.decay_factors import decay_factors, decayed_scores, halves
from onescan.ops.numerics import (
    accumulation_dtype,
    apply_function,
    disable_autocast,
    row_dot,
)
from onescan.shapes import Keys, Queries, Values

BLOCK = 1 << 21  # scores of the samples and heads that a CPU works on at a time
BATCH = 1 << 18  # scores that fit into a CPU's caches
MAX_PLAIN_SCORES = 1 << 18  # scores of a call up to which plain functions are fastest


def full(
    q: Queries, k: Keys, v: Values, decays: Directions, states_in: PerDirection, options: Options
) -> tuple[Values, PerDirection]:
    """Compute attention between all pairs of tokens, O(T^2), as a single chunk."""
    return chunk(q, k, v, decays, states_in, options._replace(chunk_size=k.shape[1]))


def chunk(
    q: Queries, k: Keys, v: Values, decays: Directions, states_in: PerDirection, options: Options
) -> tuple[Values, PerDirection]:
    """Compute `forms.chunk`, in tiles unless a call is small or needs plain functions."""
    inputs, size = chunk_inputs(q, k, v, decays, states_in, options)
    rest = options.normalize, size, options.return_state
    if needs_plain_functions(*inputs) or _is_small(inputs, size):
        o, _, states_out, _ = forms.chunk(inputs, *rest)
    else:
        run = _operator if torch.compiler.is_compiling() else _run_eagerly
        o, _, states_out, _ = run(*inputs, *rest, wants_gradient(*inputs))
    if o.requires_grad and options.normalize != "none":
        o = o.clone()  # the backward pass reads o, and a caller may modify the copy in place
    return o, by_direction(states_out)


def _is_small(inputs: ChunkInputs, size: int) -> bool:
    """Return whether a CPU computes the chunks at once, which is faster for few scores.

    Measured for selective decay, K = V = 64 and 3 heads: 1.8 times as fast for 2 samples of 64
    tokens, 1.3 times for 2 of 197, half as fast for 8 of 197, and a third for 2 of 512. Gradients
    are left to tiles, because those of differences of sums lose precision.
    """
    if torch.compiler.is_compiling() or inputs.k.device.type != "cpu":
        return False
    return inputs.k[..., 0].numel() * size <= MAX_PLAIN_SCORES and not wants_gradient(*inputs)


def _decay_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forward: Tensor,
    backward: Tensor | None,
    states_in: Tensor | None,
    normalize: str,
    size: int,
    return_state: bool,
    saves_states: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `forms.chunk` block by block; the states before chunks are one tensor."""
    inputs = ChunkInputs(q, k, v, forward, backward, states_in)
    o, row_sum, states_out, states = _results(inputs, normalize, size, return_state, saves_states)
    for index, state_index in _blocks(v, size):
        with disable_autocast(q):  # a compiled program may call this under autocast
            part = inputs.block(index, state_index)
            results = forms.chunk(part, normalize, size, return_state, over_chunks=_in_batches)
        o[index] = results[0]
        if normalize != "none":
            row_sum[index] = results[1]
        if return_state:
            states_out[state_index] = results[2]
        if states.numel():
            for saved, before in zip(states, results[3], strict=True):
                saved[state_index] = before
    return o, row_sum, states_out, states


def _results(
    inputs: ChunkInputs, normalize: str, size: int, return_state: bool, saves_states: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate outputs, row sums, outgoing states and the states before chunks."""
    v = inputs.v
    batch, tokens, heads, width = v.shape
    sums = (batch, tokens, heads, 1) if normalize != "none" else (0,)
    directions = 1 if inputs.backward is None else 2
    state = (width + 1, inputs.k.shape[-1])
    states_out = (batch, heads, directions, *state) if return_state else (0,)
    chunks = -(-tokens // size)
    is_read = saves_states and (chunks > 1 or inputs.states_in is not None)
    states = (directions, batch, heads, chunks, *state) if is_read else (0,)
    wide = partial(v.new_empty, dtype=accumulation_dtype(v.dtype))
    return v.new_empty(v.shape), wide(sums), wide(states_out), wide(states)


def _blocks(v: Tensor, size: int) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield the indices of each block in [B, T, H, .] and in [B, H, .].

    A block contains some heads of one sample, or all heads of some samples. On devices other than
    a CPU, there is a single block.
    """
    batch, tokens, heads, width = v.shape
    fit = max(1, BLOCK // (tokens * max(size, width)))
    if v.device.type != "cpu":
        fit = max(1, batch * heads)
    samples_per_block, heads_per_block = max(1, fit // heads), min(heads, fit)
    for b in range(0, batch, samples_per_block):
        for h in range(0, heads, heads_per_block):
            block = slice(b, b + samples_per_block), slice(h, h + heads_per_block)
            yield (block[0], slice(None), block[1]), block


def _in_batches(
    function: Callable[..., Sequence[Tensor]], *groups: Sequence[Tensor]
) -> list[Tensor]:
    """Apply a function to groups of tensors [B, H, N, C, .], one batch of chunks at a time."""
    first = groups[0][0]
    size, width = first.shape[-2:]
    count = max(1, BATCH // (size * max(size, width)))
    if first.device.type != "cpu":
        count = max(1, first.shape[:3].numel())
    split = [[x.flatten(0, 2).split(count) for x in group] for group in groups]
    parts = [function(*([x[i] for x in group] for group in split)) for i in range(len(split[0][0]))]
    results = parts[0] if len(parts) == 1 else [torch.cat(x) for x in zip(*parts, strict=True)]
    return [x.unflatten(0, first.shape[:3]) for x in results]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.normalize, ctx.size, ctx.return_state, _ = inputs
    o, row_sum, _, states = output
    ctx.save_for_backward(*tensors, None if ctx.normalize == "none" else o, row_sum, states)
    ctx.set_materialize_grads(False)  # zeros for the states before chunks would be as large


def _differentiate(
    ctx: Any, *output_gradients: Any, of_operator: bool = False
) -> tuple[Tensor | None, ...]:
    do, _, dstates_out, _ = output_gradients
    *inputs, o, row_sum, states = ctx.saved_tensors
    do = torch.zeros_like(inputs[2]) if do is None else do
    if torch.is_grad_enabled():  # second derivatives come from the plain functions
        copies: list[Any] = [None if x is None else x.view_as(x) for x in inputs]
        differentiable = [x for x in copies if x is not None and x.requires_grad]
        o, _, states_out, _ = forms.chunk(
            ChunkInputs(*copies), ctx.normalize, ctx.size, ctx.return_state
        )
        outputs, doutputs = (
            ([o], [do]) if dstates_out is None else ([o, states_out], [do, dstates_out])
        )
        results = torch.autograd.grad(
            outputs, differentiable, doutputs, create_graph=True, materialize_grads=True
        )
        rest = iter(results)
        gradients = [None if x is None or not x.requires_grad else next(rest) for x in copies]
    else:
        differentiate: Any = _backward_operator if of_operator else _decay_chunks_backward
        with_decays = any(ctx.needs_input_grad[3:5])
        options = ctx.normalize, ctx.size, with_decays
        dstates_out = do.new_empty(0) if dstates_out is None else dstates_out
        o = do if o is None else o
        results = differentiate(do, dstates_out, *inputs, o, row_sum, states, *options)
        gradients = [None if x is None else g for x, g in zip(inputs, results, strict=True)]
    return *gradients, None, None, None, None


def _decay_chunks_backward(
    do: Tensor,
    dstates_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forward: Tensor,
    backward: Tensor | None,
    states_in: Tensor | None,
    o: Tensor,
    row_sum: Tensor,
    states: Tensor,
    normalize: str,
    size: int,
    with_decays: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, both log-decays and the incoming states."""
    inputs = ChunkInputs(q, k, v, forward, backward, states_in)
    results = _gradients_like(*inputs)
    for index, state_index in _blocks(v, size):
        sums = row_sum if normalize == "none" else row_sum[index]
        with disable_autocast(q):  # a backward pass may run under autocast
            grad = _output_gradient(do[index], o[index], sums, normalize, causal=backward is None)
            dstate_out = dstates_out[state_index] if dstates_out.numel() else None
            part = inputs.block(index, state_index)
            states_before = [x[state_index] for x in states] if states.numel() else []
            gradients, dstates_in = _block_gradients(
                grad, dstate_out, part, states_before, size, with_decays
            )
        for result, gradient in zip(results, gradients, strict=False):
            result[index] = join_chunks(gradient, v.shape[1])
        if states_in is not None:
            results[-1][state_index] = dstates_in
    return results


def _output_gradient(
    do: Tensor, o: Tensor, row_sum: Tensor, normalize: str, *, causal: bool
) -> Tensor:
    """Return the gradient of outputs and row sums before normalization, [B, T, H, V + 1]."""
    if normalize == "none":
        return F.pad(do, (0, 1))
    divisor, derivative = row_divisor(row_sum, normalize, causal=causal)
    wide = do / divisor
    return torch.cat([wide, -derivative * row_dot(wide, o.to(wide.dtype))], dim=-1).to(do.dtype)


def _block_gradients(
    grad: Tensor,
    dstates_out: Tensor | None,
    inputs: ChunkInputs,
    states_before: Sequence[Tensor],
    size: int,
    with_decays: bool,
) -> tuple[list[Tensor], Tensor]:
    """Return the gradients of q, k, v and log-decays in chunks, and of the states that enter."""
    q, k, v, logs = inputs.chunks(size)
    grad = split_chunks(grad, q.shape[2], size).contiguous()
    return_states = inputs.states_in is not None
    dstates_after, dstates_in = chunk_states(
        q, grad, logs, dstates_out, return_states=return_states, of_gradients=True
    )
    of_chunks = partial(_chunk_gradients, with_decays=with_decays)
    return _in_batches(of_chunks, [grad, q, k, v], logs, states_before, dstates_after), dstates_in


def _gradients_like(*inputs: Any) -> Any:
    q = inputs[0]
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _chunk_gradients(
    tokens: Sequence[Tensor],
    logs: Sequence[Tensor],
    states_before: Sequence[Tensor],
    dstates_after: Sequence[Tensor],
    *,
    with_decays: bool,
) -> list[Tensor]:
    """Return the gradients of q, k, v and of each direction's log-decays in chunks [M, C, .].

    Args:
        tokens: Gradient of outputs and row sums, q, k, and v with appended ones.
        logs: Log-decays of each direction.
        states_before: States before each chunk, [M, V + 1, K], for each direction; empty for zeros.
        dstates_after: Gradients of the states after each chunk, in the same layout.
        with_decays: Whether to compute the gradients of scalar log-decays.
    """
    do, q, k, v = tokens
    is_scalar = logs[0].shape[-1] == 1
    weights, decays = decayed_scores(q, k, logs)
    dweights = torch.bmm(do, v.mT)
    dv = torch.bmm(weights.mT, do[..., :-1])
    if is_scalar:
        dscores = decays.mul_(dweights)
        dq, dk = torch.bmm(dscores, k), torch.bmm(dscores.mT, q)
    else:
        diagonal = dweights.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        dq, dk = diagonal * k, diagonal * q

    # gradients of the exponents of each direction's decay factors: enter, leave, through
    exponents = [
        [torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x[:, :1])] for x in logs
    ]
    for d, log_decay in enumerate(logs):
        enter, leave, through = decay_factors(log_decay, q.dtype, backward=bool(d))
        if states_before:
            reads = torch.bmm(do, states_before[d].to(do.dtype)).mul_(enter)
            dq += reads
            exponents[d][0] = _by_channel(reads.mul_(q), is_scalar).to(through.dtype)
        if dstates_after:
            dstate = dstates_after[d].to(v.dtype)
            dv.baddbmm_(k * leave, dstate[:, :-1].mT)
            writes = torch.bmm(v, dstate).mul_(leave)
            dk += writes
            exponents[d][1] = _by_channel(writes.mul_(k), is_scalar).to(through.dtype)
        if states_before and dstates_after:
            dthrough = (states_before[d] * dstates_after[d]).sum(1, keepdim=True).mul_(through)
            exponents[d][2] = _by_channel(dthrough, is_scalar)

    if is_scalar:
        if not with_decays:
            return [dq, dk, dv]
        pairs = dweights.mul_(weights)
        dlogs = [
            _scalar_decay_gradient(pairs, *x, backward=bool(d)) for d, x in enumerate(exponents)
        ]
    else:
        dlogs = [
            _diagonal_gradient(dweights, q, k, dq, dk, levels, *x, backward=bool(d))
            for d, (levels, x) in enumerate(zip(decays, exponents, strict=True))
        ]
    return [dq, dk, dv, *dlogs]


def _by_channel(x: Tensor, is_scalar: bool) -> Tensor:
    return x.sum(-1, keepdim=True) if is_scalar else x


def _scalar_decay_gradient(
    pairs: Tensor, enter: Tensor, leave: Tensor, through: Tensor, *, backward: bool
) -> Tensor:
    """Return the gradient of scalar log-decays, [M, C, 1].

    Each log-decay receives the sum of the gradients of all exponents that contain it. In the
    forward direction, log-decay l is contained in the exponents of scores with j < l <= i, of the
    incoming state at tokens i >= l, and of tokens j < l in the outgoing state. These terms are
    summed directly, because a difference of cumulative sums would lose precision.

    Args:
        pairs: Gradient of the exponent of each score, [M, C, C].
        enter: Gradient of the exponents of the factors `enter`, [M, C, 1].
        leave: Gradient of the exponents of the factors `leave`, [M, C, 1].
        through: Gradient of the exponent of the factor `through`, [M, 1, 1].
        backward: Whether this is the backward direction.
    """
    if backward:
        crossing = pairs.cumsum(1, dtype=enter.dtype).triu_(1).sum(2).unsqueeze(-1)
        return crossing + enter.cumsum(1) + F.pad(_suffix_sum(leave), (0, 0, -1, 1)) + through
    crossing = pairs.cumsum(2, dtype=enter.dtype).tril_(-1).sum(1).unsqueeze(-1)
    return F.pad(crossing + leave.cumsum(1), (0, 0, 1, -1)) + _suffix_sum(enter) + through


def _suffix_sum(x: Tensor) -> Tensor:
    return x.flip(1).cumsum(1).flip(1)


def _diagonal_gradient(
    dweights: Tensor,
    q: Tensor,
    k: Tensor,
    dq: Tensor,
    dk: Tensor,
    levels: Sequence[tuple[Tensor, Tensor]],
    of_enter: Tensor,
    of_leave: Tensor,
    of_through: Tensor,
    *,
    backward: bool,
) -> Tensor:
    """Add one direction's gradients to dq and dk, and return the gradient of its log-decays.

    Tiles are visited from the whole chunk down to single tokens. A state that enters a tile passes
    through the first half to reach the second, and tokens of the first half pass through the second
    half to leave the tile.
    """
    of_through = of_through.unsqueeze(1)  # M S 1 K
    for enter, leave in reversed(levels):
        length = enter.shape[-2]
        (_, queries), (keys, _), (_, dqueries), (dkeys, _), (_, enter_second), (leave_first, _) = (
            halves(x, length, backward=backward) for x in (q, k, dq, dk, of_enter, of_leave)
        )
        first, second = (of_through + x.sum(-2, keepdim=True) for x in (enter_second, leave_first))
        of_halves = (second, first) if backward else (first, second)
        of_through = torch.stack(of_halves, dim=2).flatten(1, 2)
        dblock = _off_diagonal_blocks(dweights, length, backward=backward)
        drows = (dblock @ (keys * leave)).mul_(enter)
        dcolumns = (dblock.mT @ (queries * enter)).mul_(leave)
        dqueries += drows
        dkeys += dcolumns
        enter_second.addcmul_(drows, queries)
        leave_first.addcmul_(dcolumns, keys)
    return of_enter + of_through.squeeze(2)


def _off_diagonal_blocks(x: Tensor, length: int, *, backward: bool) -> Tensor:
    """View the blocks of [M, C, C] between second and first halves of tiles, [M, S, L, L]."""
    tiles = x.unflatten(2, (-1, 2, length)).unflatten(1, (-1, 2, length))
    blocks = tiles[:, :, int(not backward), :, :, int(backward)]
    return blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1)


class _ChunkAttention(torch.autograd.Function):
    forward = staticmethod(_decay_chunks)
    setup_context = staticmethod(_save)
    backward = staticmethod(_differentiate)


def _run_eagerly(*arguments: Any) -> tuple[Tensor, ...]:
    return apply_function(_ChunkAttention, *arguments)


# Compiled programs call operators. Eager calls do not, as the first of them would import sympy.
_operator = torch.library.custom_op(
    "onescan::decay_attention_chunks", _decay_chunks, mutates_args=()
)
_backward_operator = torch.library.custom_op(
    "onescan::decay_attention_chunks_backward", _decay_chunks_backward, mutates_args=()
)
_operator.register_autograd(partial(_differentiate, of_operator=True), setup_context=_save)


@_operator.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return _results(ChunkInputs(*arguments[:6]), *arguments[6:])


@_backward_operator.register_fake
def _(do: Tensor, dstates_out: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _gradients_like(*rest[:6])
