"""Linear attention with decay in plain PyTorch: full, chunk, recurrent, and without decay.

    S_t = diag(exp(a_t)) S_{t-1} + k_t v_t^T     state of one direction     (K, V)
    o_t = sum over directions of S_t^T q_t       the token itself is counted once

A column of ones is appended to the values. The extra output column is then the row sum, which is
needed for normalization, and the extra column of the state is the sum of keys.

Source: LION, arXiv:2502.16249, Eq. 4 to 6 and 14, Theorem B.1 (diagonal decay), Sec. 3.3 (chunks).
Carrying states from chunk to chunk in both directions is not in the paper, where each chunk attends
to all others (Eq. 81).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onescan.checks import is_known
from onescan.ops.backend import wants_gradient
from onescan.ops.chunks import (
    length_of_chunks,
    linear_scan,
    needs_plain_functions,
    number_of_chunks,
)
from onescan.ops.decay_factors import decay_factors, decayed_scores, halves, padded
from onescan.ops.numerics import (
    MIN_DIVISOR,
    accumulation_dtype,
    apply_function,
    broadcast_divide,
    disable_autocast,
    row_dot,
    to_float64,
)
from onescan.shapes import Keys, LogDecays, Queries, Starts, Values

BLOCK = 1 << 21  # scores of the samples and heads that a CPU works on at a time
BATCH = 1 << 18  # scores that fit into a CPU's caches
FEW = 1 << 18  # scores of a call up to which plain functions are fastest

Sides = tuple[Tensor | None, Tensor | None]  # a state, [B, H, K, V + 1], or decay per direction


class Directions(NamedTuple):
    """Log-decays as the recurrences apply them.

        forward:   S_t = exp(forward_t) S_{t-1} + k_t v_t^T,   o_t reads S_t
        backward:  S_t = exp(backward_t) S_{t+1} + k_t v_t^T,  o_t reads exp(backward_t) S_{t+1}

    Attributes:
        forward: Log-decays of the forward direction.
        backward: Log-decays of the backward direction; None for causal calls.
    """

    forward: LogDecays
    backward: LogDecays | None

    @property
    def is_diagonal(self) -> bool:
        """Whether each key channel has its own decay."""
        return self.forward.shape[-1] > 1


def directed(
    log_decay: LogDecays, decay_at: Literal["source", "target", "symmetric"], *, causal: bool
) -> tuple[Directions, Sides]:
    """Shift the decays to the tokens at which the recurrences apply them.

    At each token, "target" applies its own decay (Eq. 5) and "source" the decay of the token
    visited before it (Eq. 14). "symmetric" is "target" forward and "source" backward (Table 1).

    Returns:
        The shifted decays, and for each direction the decay of the last token visited, which
        "source" applies to the outgoing state; otherwise None.
    """
    forward = backward = log_decay
    last = first = None
    if decay_at == "source":
        forward, last = F.pad(log_decay, (0, 0, 0, 0, 1, -1)), log_decay[:, -1]
    if decay_at != "target":
        backward, first = F.pad(log_decay, (0, 0, 0, 0, -1, 1)), log_decay[:, 0]
    return Directions(forward, None if causal else backward), (last, first)


def separated(decays: Directions, starts: Starts | None, ends: Starts | None) -> Directions:
    """Reset the state at some tokens with log-decays of -inf.

    Args:
        decays: The log-decays.
        starts: True where the forward direction restarts, [B, T]; None for nowhere.
        ends: True where the backward direction restarts, [B, T]; None for nowhere.
    """
    forward, backward = decays
    if starts is not None:
        forward = forward.masked_fill(starts[:, :, None, None], -torch.inf)
    if backward is not None and ends is not None:
        backward = backward.masked_fill(ends[:, :, None, None], -torch.inf)
    return Directions(forward, backward)


class Options(NamedTuple):
    """Options of every form, as in `decay_attention`.

    Each form returns the normalized outputs and the outgoing states of the forward and the
    backward direction.
    """

    normalize: str
    chunk_size: int
    return_state: bool


def full(
    q: Queries, k: Keys, v: Values, decays: Directions, enters: Sides, options: Options
) -> tuple[Values, Sides]:
    """Compute attention between all pairs of tokens, O(T^2), as a single chunk."""
    return chunk(q, k, v, decays, enters, options._replace(chunk_size=k.shape[1]))


def recurrent(
    q: Queries, k: Keys, v: Values, decays: Directions, enters: Sides, options: Options
) -> tuple[Values, Sides]:
    """Visit one token at a time (Eq. 5, Theorem B.2), in constant memory besides the outputs."""
    v = F.pad(v, (0, 1), value=1.0)
    outputs: list[Tensor] = []
    leaves: list[Tensor | None] = [None, None]
    for backward, (log_decay, state) in enumerate(zip(decays, enters, strict=True)):
        if log_decay is None:
            continue
        if state is None:
            state = v.new_zeros(k.shape[0], *k.shape[2:], v.shape[-1])
        o, leaves[backward] = _visit(q, k, v, log_decay, state, backward=bool(backward))
        outputs.append(o)
    o = sum(outputs[1:], start=outputs[0])
    return _divided(o, options.normalize, causal=len(outputs) == 1), (leaves[0], leaves[1])


def _visit(
    q: Queries, k: Keys, v: Values, log_decay: LogDecays, kv: Tensor, *, backward: bool
) -> tuple[Values, Tensor]:
    """Visit all tokens in one direction. Backward, each token reads the state without itself."""
    rows, columns = (x.unsqueeze(-2) for x in (q, v))
    parts = (x.unbind(1) for x in (rows, k.unsqueeze(-1), columns, log_decay.exp().unsqueeze(-1)))
    order = -1 if backward else 1
    outputs = []
    for query, key, value, decay in list(zip(*parts, strict=True))[::order]:
        decayed = decay * kv
        kv = decayed + key * value
        outputs.append(query @ (decayed if backward else kv))  # B H 1 V
    return torch.cat(outputs[::order], dim=-2).transpose(1, 2), kv


def one_scan(
    q: Queries, k: Keys, v: Values, decays: Directions, enters: Sides, options: Options
) -> tuple[Values, Sides]:
    """Compute Q (K^T V) without decay, in both directions at once (LION-lit, Eq. 181 to 183).

    Products of bfloat16 inputs are bfloat16; states and row sums are float32.
    """
    own = _total(k, v)
    left, right = (own if side is None else own + side for side in enters)
    total = left if enters[1] is None else left + enters[1]
    normalize = options.normalize
    if normalize != "max_one" and total.dtype == q.dtype:
        o = torch.einsum("bthk,bhkv->bthv", q, total)
        return _divided(o, normalize, causal=False), (left, right)
    o = torch.einsum("bthk,bhkv->bthv", q, total[..., :-1].to(q.dtype))
    if normalize == "none":
        return o, (left, right)
    k_sum, wide_q = total[..., -1], q.to(total.dtype)
    if normalize == "max_one":
        # float64, because terms of opposite sign may cancel to a row sum near 1
        k_sum = to_float64(k).sum(dim=1) + sum(side[..., -1] for side in enters if side is not None)
        wide_q = to_float64(q)
    row_sum = torch.einsum("bthk,bhk->bth", wide_q, k_sum).to(total.dtype).unsqueeze(-1)
    divisor, _ = _divisor(row_sum, normalize, causal=False)
    return broadcast_divide(o, divisor.to(o.dtype), overwrite=True), (left, right)


def _total(k: Keys, v: Values) -> Tensor:
    """Sum k v^T, and k in an additional column, over all tokens: [B, H, K, V + 1]."""
    wide = accumulation_dtype(k.dtype)
    if k.dtype == wide:
        return torch.einsum("bthk,bthv->bhkv", k, F.pad(v, (0, 1), value=1.0))
    kv, k_sum = torch.einsum("bthk,bthv->bhkv", k, v), k.sum(dim=1, dtype=wide)
    return torch.cat([kv.to(wide), k_sum.unsqueeze(-1)], dim=-1)


def _divided(o: Tensor, normalize: str, *, causal: bool) -> Tensor:
    """Normalize the outputs by their last column, which is the row sum."""
    if normalize == "none":
        return o[..., :-1]
    o, row_sum = o.split([o.shape[-1] - 1, 1], dim=-1)  # the gradient of a split is one tensor
    return broadcast_divide(o, _divisor(row_sum, normalize, causal=causal)[0], overwrite=True)


def _divisor(row_sum: Tensor, normalize: str, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the divisor of the outputs and its derivative with respect to the row sum."""
    if normalize == "sum":
        is_zero = row_sum.abs() < MIN_DIVISOR
        return torch.where(is_zero, 1, row_sum), (~is_zero).to(row_sum.dtype)
    size = row_sum.abs() if causal else row_sum
    slope = row_sum.sign() if causal else torch.ones_like(row_sum)
    return size.clamp(min=1), slope * (size >= 1)


def chunk(
    q: Queries, k: Keys, v: Values, decays: Directions, enters: Sides, options: Options
) -> tuple[Values, Sides]:
    """Compute attention within chunks of C tokens, and carry a state per direction between them.

        o_i = sum_j W_ij v_j + sum over directions d of S_d^T (enter_di q_i)
        W_ij = q_i . k_j exp(sum of forward over j < l <= i)      for j <= i
        W_ij = q_i . k_j exp(sum of backward over i <= l < j)     for j > i; 0 if causal
        S_d' = through_d S_d + sum_j (leave_dj k_j) v_j^T         from chunk to chunk

    Both directions together are O(T). The code stores states transposed, as [V + 1, K]: on a CPU,
    an extra column beyond a multiple of the vector width makes a product slow, and an extra row
    does not. For the same reason row sums are computed separately from the outputs.

    Products of bfloat16 inputs are bfloat16; states, row sums and gradients of log-decays are
    added up in float32.
    """
    size = length_of_chunks(options.chunk_size, k.shape[1])
    if decays.is_diagonal:
        size = padded(size)
    heads = k.shape[0], -1, k.shape[2], -1
    forward = decays.forward.expand(heads)
    backward = None if decays.backward is None else decays.backward.expand(heads)
    state = None
    if enters != (None, None):
        shape = k.shape[0], k.shape[2], v.shape[-1] + 1, k.shape[-1]
        empty = v.new_zeros(shape, dtype=accumulation_dtype(v.dtype))
        sides = enters[:1] if backward is None else enters
        state = torch.stack([empty if x is None else x.mT for x in sides], dim=2)
    inputs = _Inputs(q, k, v, forward, backward, state)
    rest = options.normalize, size, options.return_state
    if needs_plain_functions(*inputs) or _is_small(k, size):
        o, _, leaves, _ = _attend(inputs, *rest)
    else:
        run = _operator if torch.compiler.is_compiling() else _run_eagerly
        o, _, leaves, _ = run(*inputs, *rest, wants_gradient(*inputs))
    if o.requires_grad and options.normalize != "none":
        o = o.clone()  # the backward reads o, and a caller may modify the returned copy in place
    if not options.return_state:
        return o, (None, None)
    return o, (leaves[:, :, 0].mT, None if backward is None else leaves[:, :, 1].mT)


def _is_small(k: Keys, size: int) -> bool:
    """Return whether a CPU computes the chunks at once, which is faster for few scores.

    Measured forward and backward, for selective decay, K = V = 64 and 3 heads: 1.8 times as fast
    for 2 samples of 64 tokens, 1.3 times for 2 of 197, as fast for 8 of 197, and 2 to 3 times
    slower for 2 of 512.
    """
    if torch.compiler.is_compiling() or k.device.type != "cpu":
        return False
    return k[..., 0].numel() * size <= FEW


class _Inputs(NamedTuple):
    """Tensor inputs of the chunk form.

    Attributes:
        q: Queries.
        k: Keys.
        v: Values.
        forward: Log-decays of the forward direction, [B, T, H, 1 or K].
        backward: Log-decays of the backward direction; None for causal calls.
        enters: Incoming state of each direction, [B, H, D, V + 1, K]; None for zeros.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    forward: Tensor
    backward: Tensor | None
    enters: Tensor | None

    def block(self, at: Any, states_at: Any) -> "_Inputs":
        """Select a block of samples and heads."""
        q, k, v, forward = (x[at] for x in self[:4])
        backward = None if self.backward is None else self.backward[at]
        enters = None if self.enters is None else self.enters[states_at]
        return _Inputs(q, k, v, forward, backward, enters)

    def chunks(self, size: int) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Split q, k, v with appended ones, and all log-decays into chunks [B, H, N, C, .]."""
        count = number_of_chunks(self.k.shape[1], size)
        q, k, v = (_chunks(x, count, size) for x in self[:3])
        logs = [_chunks(x, count, size) for x in self[3:5] if x is not None]
        return q.contiguous(), k.contiguous(), F.pad(v, (0, 1), value=1.0), logs


def _attend(
    inputs: _Inputs, normalize: str, size: int, return_state: bool, *, in_batches: bool = False
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Compute the chunk form with differentiable functions.

    Args:
        inputs: The inputs of a call, or a block of them.
        normalize: As in `decay_attention`.
        size: Tokens per chunk.
        return_state: Whether to return the outgoing states.
        in_batches: Whether to process chunks in batches that fit a CPU's caches.

    Returns:
        The outputs, the row sums [B, T, H, 1] (empty without normalization), the outgoing states
        (empty if not requested), and the states before each chunk, as `_states` returns them.
    """
    tokens = inputs.v.shape[1]
    q, k, v, logs = inputs.chunks(size)
    befores, leaves = _states(k, v, logs, inputs.enters, return_states=return_state)
    read = partial(_read, normalize=normalize, causal=inputs.backward is None)
    if in_batches:
        read = partial(_in_batches, read)
    o, *row_sums = (_tokens(x, tokens) for x in read([q, k, v], logs, befores))
    return o, row_sums[0] if row_sums else o.new_empty(0), leaves, befores


def _chunks(x: Tensor, count: int, size: int) -> Tensor:
    """Split [B, T, H, X] into chunks [B, H, N, C, X]; the last one is padded with zeros."""
    x, missing = x.transpose(1, 2), count * size - x.shape[1]
    if not is_known(missing) or missing:
        x = F.pad(x, (0, 0, 0, missing))
    return x.unflatten(2, (count, size))


def _tokens(x: Tensor, tokens: int) -> Tensor:
    """Join chunks [B, H, N, C, X] to [B, T, H, X]."""
    return x.flatten(2, 3).transpose(1, 2).narrow(1, 0, tokens)


def _states(
    k: Tensor,
    v: Tensor,
    logs: Sequence[Tensor],
    enters: Tensor | None,
    *,
    return_states: bool = True,
    of_gradients: bool = False,
) -> tuple[list[Tensor], Tensor]:
    """Compute the states before each chunk, for each direction, and the outgoing states.

    Args:
        k: Keys, [B, H, N, C, K]; queries if `of_gradients`.
        v: Values with appended ones, [B, H, N, C, V + 1]; gradients of outputs and row sums if
            `of_gradients`.
        logs: Log-decays of each direction.
        enters: Incoming state of each direction, [B, H, D, V + 1, K]; None for zeros.
        return_states: Whether to return the outgoing states.
        of_gradients: Whether to compute the gradients of states, which are carried in the opposite
            direction.

    Returns:
        For each direction, the states [B, H, N, V + 1, K] before each chunk, or an empty list if
        there is only one chunk and no incoming state; and the outgoing states [B, H, D, V + 1, K],
        empty if not `return_states`.
    """
    is_read = enters is not None or not is_known(k.shape[2]) or k.shape[2] > 1
    if not is_read and not return_states:
        return [], v.new_empty(0)
    befores, leaves = [], []
    for d, log_decay in enumerate(logs):
        enter, leave, through = decay_factors(log_decay, k.dtype, backward=bool(d))
        added = (v.mT @ (k * (enter if of_gradients else leave))).to(through.dtype)
        state = added.new_zeros(added[:, :, 0].shape) if enters is None else enters[:, :, d]
        before, last = linear_scan(state, added, through, backward=bool(d) != of_gradients)
        befores.append(before)
        leaves.append(last)
    outgoing = torch.stack(leaves, dim=2) if return_states else v.new_empty(0)
    return befores if is_read else [], outgoing


def _read(
    tokens: Sequence[Tensor],
    logs: Sequence[Tensor],
    befores: Sequence[Tensor],
    *,
    normalize: str,
    causal: bool,
) -> list[Tensor]:
    """Compute outputs of chunks, from attention within them and from states, and their row sums.

    There are no row sums without normalization.
    """
    q, k, v = tokens
    weights, *_ = decayed_scores(q, k, logs)
    reads = [
        q * decay_factors(log_decay, q.dtype, backward=bool(d)).enter
        for d, log_decay in enumerate(logs[: len(befores)])
    ]
    wide = accumulation_dtype(v.dtype)
    o = (weights @ v[..., :-1]).to(wide)
    for read, before in zip(reads, befores, strict=True):
        o = o + read @ before[..., :-1, :].mT.to(v.dtype)
    if normalize == "none":
        return [o.to(v.dtype)]
    row_sum = weights.sum(-1, keepdim=True, dtype=wide)
    for read, before in zip(reads, befores, strict=True):
        row_sum = row_sum + (before[..., -1:, :] @ read.mT.to(wide)).mT
    return [(o / _divisor(row_sum, normalize, causal=causal)[0]).to(v.dtype), row_sum]


# The chunk form has its own backward, which recomputes scores but not states, unless
# `needs_plain_functions` returns True. On a CPU it processes one block of samples and heads at a
# time, so that memory is reused, and within a block one batch of chunks that fits the caches.


def _decay_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forward: Tensor,
    backward: Tensor | None,
    enters: Tensor | None,
    normalize: str,
    size: int,
    return_state: bool,
    saves_states: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the same as `_attend`, block by block; the states before chunks are one tensor."""
    inputs = _Inputs(q, k, v, forward, backward, enters)
    o, row_sum, leaves, states = _results(inputs, normalize, size, return_state, saves_states)
    for where in _blocks(v, size):
        at, states_at = where
        with disable_autocast(q):  # a compiled program may call this under autocast
            part = inputs.block(*where)
            made = _attend(part, normalize, size, return_state, in_batches=True)
        o[at] = made[0]
        if normalize != "none":
            row_sum[at] = made[1]
        if return_state:
            leaves[states_at] = made[2]
        if states.numel():
            for place, before in zip(states, made[3], strict=True):
                place[states_at] = before
    return o, row_sum, leaves, states


def _results(
    inputs: _Inputs, normalize: str, size: int, return_state: bool, saves_states: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate outputs, row sums, outgoing states and the states before chunks."""
    v = inputs.v
    batch, tokens, heads, width = v.shape
    sums = (batch, tokens, heads, 1) if normalize != "none" else (0,)
    directions = 1 if inputs.backward is None else 2
    state = (width + 1, inputs.k.shape[-1])
    leaves = (batch, heads, directions, *state) if return_state else (0,)
    chunks = -(-tokens // size)
    is_read = saves_states and (chunks > 1 or inputs.enters is not None)
    states = (directions, batch, heads, chunks, *state) if is_read else (0,)
    wide = partial(v.new_empty, dtype=accumulation_dtype(v.dtype))
    return v.new_empty(v.shape), wide(sums), wide(leaves), wide(states)


def _blocks(v: Tensor, size: int) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield the indices of each block in [B, T, H, .] and in [B, H, .].

    A block contains some heads of one sample, or all heads of some samples. On devices other than
    a CPU, there is a single block.
    """
    batch, tokens, heads, width = v.shape
    fit = max(1, BLOCK // (tokens * max(size, width)))
    if v.device.type != "cpu":
        fit = max(1, batch * heads)
    samples, some = max(1, fit // heads), min(heads, fit)
    for b in range(0, batch, samples):
        for h in range(0, heads, some):
            where = slice(b, b + samples), slice(h, h + some)
            yield (where[0], slice(None), where[1]), where


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
    whole = parts[0] if len(parts) == 1 else [torch.cat(x) for x in zip(*parts, strict=True)]
    return [x.unflatten(0, first.shape[:3]) for x in whole]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.normalize, ctx.size, ctx.return_state, _ = inputs
    o, row_sum, _, states = output
    ctx.save_for_backward(*tensors, None if ctx.normalize == "none" else o, row_sum, states)
    ctx.set_materialize_grads(False)  # zeros for the states before chunks would be as large


def _differentiate(ctx: Any, *slopes: Any, of_operator: bool = False) -> tuple[Tensor | None, ...]:
    do, _, dleaves, _ = slopes
    *inputs, o, row_sum, states = ctx.saved_tensors
    do = torch.zeros_like(inputs[2]) if do is None else do
    if torch.is_grad_enabled():  # second derivatives come from the plain functions
        given: list[Any] = [None if x is None else x.view_as(x) for x in inputs]
        learnt = [x for x in given if x is not None and x.requires_grad]
        o, _, leaves, _ = _attend(_Inputs(*given), ctx.normalize, ctx.size, ctx.return_state)
        made, dmade = ([o], [do]) if dleaves is None else ([o, leaves], [do, dleaves])
        found = torch.autograd.grad(made, learnt, dmade, create_graph=True, materialize_grads=True)
        rest = iter(found)
        gradients = [None if x is None or not x.requires_grad else next(rest) for x in given]
    else:
        differentiate: Any = _backward_operator if of_operator else _decay_chunks_backward
        with_decays = any(ctx.needs_input_grad[3:5])
        options = ctx.normalize, ctx.size, with_decays
        dleaves = do.new_empty(0) if dleaves is None else dleaves
        o = do if o is None else o
        results = differentiate(do, dleaves, *inputs, o, row_sum, states, *options)
        gradients = [None if x is None else g for x, g in zip(inputs, results, strict=True)]
    return *gradients, None, None, None, None


def _decay_chunks_backward(
    do: Tensor,
    dleaves: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forward: Tensor,
    backward: Tensor | None,
    enters: Tensor | None,
    o: Tensor,
    row_sum: Tensor,
    states: Tensor,
    normalize: str,
    size: int,
    with_decays: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, both log-decays and the incoming states."""
    inputs = _Inputs(q, k, v, forward, backward, enters)
    whole = _gradients_like(*inputs)
    for where in _blocks(v, size):
        at, states_at = where
        sums = row_sum if normalize == "none" else row_sum[at]
        with disable_autocast(q):  # a backward may run under autocast
            slope = _slope(do[at], o[at], sums, normalize, causal=backward is None)
            dleave = dleaves[states_at] if dleaves.numel() else None
            part = inputs.block(*where)
            befores = [x[states_at] for x in states] if states.numel() else []
            made, denters = _block_gradients(slope, dleave, part, befores, size, with_decays)
        for place, gradient in zip(whole, made, strict=False):
            place[at] = _tokens(gradient, v.shape[1])
        if enters is not None:
            whole[-1][states_at] = denters
    return whole


def _slope(do: Tensor, o: Tensor, row_sum: Tensor, normalize: str, *, causal: bool) -> Tensor:
    """Return the gradient of outputs and row sums before normalization, [B, T, H, V + 1]."""
    if normalize == "none":
        return F.pad(do, (0, 1))
    divisor, slope = _divisor(row_sum, normalize, causal=causal)
    wide = do / divisor
    return torch.cat([wide, -slope * row_dot(wide, o.to(wide.dtype))], dim=-1).to(do.dtype)


def _block_gradients(
    slope: Tensor,
    dleaves: Tensor | None,
    inputs: _Inputs,
    befores: Sequence[Tensor],
    size: int,
    with_decays: bool,
) -> tuple[list[Tensor], Tensor]:
    """Return the gradients of q, k, v and log-decays in chunks, and of the states that enter."""
    q, k, v, logs = inputs.chunks(size)
    slope = _chunks(slope, q.shape[2], size).contiguous()
    return_states = inputs.enters is not None
    downs, denters = _states(
        q, slope, logs, dleaves, return_states=return_states, of_gradients=True
    )
    of_chunks = partial(_chunk_gradients, with_decays=with_decays)
    return _in_batches(of_chunks, [slope, q, k, v], logs, befores, downs), denters


def _gradients_like(*inputs: Any) -> Any:
    q = inputs[0]
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _chunk_gradients(
    tokens: Sequence[Tensor],
    logs: Sequence[Tensor],
    befores: Sequence[Tensor],
    downs: Sequence[Tensor],
    *,
    with_decays: bool,
) -> list[Tensor]:
    """Return the gradients of q, k, v and of each direction's log-decays in chunks [M, C, .].

    Args:
        tokens: Gradient of outputs and row sums, q, k, and v with appended ones.
        logs: Log-decays of each direction.
        befores: States before each chunk, [M, V + 1, K], for each direction; empty for zeros.
        downs: Gradients of the states after each chunk, in the same layout.
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
        itself = dweights.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        dq, dk = itself * k, itself * q

    # gradients of the exponents of each direction's decay factors: enter, leave, through
    exponents = [
        [torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x[:, :1])] for x in logs
    ]
    for d, log_decay in enumerate(logs):
        enter, leave, through = decay_factors(log_decay, q.dtype, backward=bool(d))
        if befores:
            reads = torch.bmm(do, befores[d].to(do.dtype)).mul_(enter)
            dq += reads
            exponents[d][0] = _by_channel(reads.mul_(q), is_scalar).to(through.dtype)
        if downs:
            down = downs[d].to(v.dtype)
            dv.baddbmm_(k * leave, down[:, :-1].mT)
            writes = torch.bmm(v, down).mul_(leave)
            dk += writes
            exponents[d][1] = _by_channel(writes.mul_(k), is_scalar).to(through.dtype)
        if befores and downs:
            kept = (befores[d] * downs[d]).sum(1, keepdim=True).mul_(through)
            exponents[d][2] = _by_channel(kept, is_scalar)

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
        (_, queries), (keys, _), (_, dqueries), (dkeys, _), (_, entered), (left, _) = (
            halves(x, length, backward=backward) for x in (q, k, dq, dk, of_enter, of_leave)
        )
        first, second = (of_through + x.sum(-2, keepdim=True) for x in (entered, left))
        of_halves = (second, first) if backward else (first, second)
        of_through = torch.stack(of_halves, dim=2).flatten(1, 2)
        dblock = _beside(dweights, length, backward=backward)
        drows = (dblock @ (keys * leave)).mul_(enter)
        dcolumns = (dblock.mT @ (queries * enter)).mul_(leave)
        dqueries += drows
        dkeys += dcolumns
        entered.addcmul_(drows, queries)
        left.addcmul_(dcolumns, keys)
    return of_enter + of_through.squeeze(2)


def _beside(x: Tensor, length: int, *, backward: bool) -> Tensor:
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
    return _results(_Inputs(*arguments[:6]), *arguments[6:])


@_backward_operator.register_fake
def _(do: Tensor, dleaves: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _gradients_like(*rest[:6])
