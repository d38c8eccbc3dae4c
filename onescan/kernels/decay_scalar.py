"""Linear attention with one decay per head and token, in chunks, both directions at once.

    S_n = the state before chunk n, of each direction                 decay_states.states
    O   = ((Q K^T) * M) V + enter_f (Q S_f) + enter_b (Q S_b)         read, then / row sum

In the backward pass, with dS the gradient of the state after a chunk and D = dO V^T + dc:

    dS_n, carried in the opposite direction                           decay_states.states
    dV = ((Q K^T) * M)^T dO + leave_f (K dS_f) + leave_b (K dS_b)     read, TRANSPOSED
    dQ = (D * M) K + enter_f (dO S_f^T) + enter_b (dO S_b^T)          query_gradients
    dK = (D * M)^T Q + leave_f (V dS_f^T) + leave_b (V dS_b^T)        key_gradients

The gradient of a log-decay is the sum of the gradients of all exponents that contain it: those of
M_ij, enter_i, leave_j and of the decay of the whole chunk. It is computed as this sum, not as a
difference of larger sums, and is exactly 0 if no exponent contains the log-decay.

P is the cumulative log-decay of one direction: M_ij is exp(P_i - P_j) in the forward and
exp(P_j - P_i) in the backward direction; enter and leave are exp(P) or exp(end - P). P is summed in
float64 and stored as two float32 numbers, because a difference of float32 sums would lose the decay
between two tokens.

Source: LION, arXiv:2502.16249, Sec. 3.3; states carried in both directions are not in the paper.
"""

import triton.language as tl

from onescan.kernels.chips import reads_operands_from_shared
from onescan.kernels.common import Blocks, Case, jit, kernel, product
from onescan.kernels.decay_states import (
    chunk_of,
    cumulative_decay,
    examples,
    exponential,
    load_state,
    load_tile,
    scale_of,
    scores_of,
    state_blocks,
    state_gradient,
)

EXAMPLES = examples(diagonal=False)
read_blocks = state_blocks


def gradient_blocks(case: Case) -> Blocks:
    """Return the blocks of gradients, which hold more tiles: more threads or fewer channels."""
    blocks = state_blocks(case)
    if not case.chip.startswith("sm_"):
        return blocks
    if case.data != "bf16":
        return Blocks(blocks.tokens, 16, 16, warps=8, stages=1 if case.data == "fp32" else 2)
    values = blocks.values if reads_operands_from_shared(case.chip) else 32
    return blocks._replace(values=min(blocks.values, values), warps=8)


@jit
def difference(x, y):
    """Compute x_i - y_j of float64 sums, [i, j], in float32 without cancellation errors."""
    x_high, y_high = x.to(tl.float32), y.to(tl.float32)
    x_low, y_low = (x - x_high).to(tl.float32), (y - y_high).to(tl.float32)
    return (x_high[:, None] - y_high[None, :]) + (x_low[:, None] - y_low[None, :])


@jit
def decay_mask(below, above, BELOW: tl.constexpr, ABOVE: tl.constexpr, BLOCK_T: tl.constexpr):
    """Compute M from cumulative log-decays: 1 on the diagonal, 0 on a side that is excluded."""
    i = tl.arange(0, BLOCK_T)[:, None]
    j = tl.arange(0, BLOCK_T)[None, :]
    logs = tl.full([BLOCK_T, BLOCK_T], float("-inf"), tl.float32)
    if BELOW:
        logs = tl.where(i > j, difference(below, below), logs)
    if ABOVE:
        logs = tl.where(i < j, -difference(above, above), logs)
    return tl.exp(tl.where(i == j, 0.0, logs))


@jit
def read_state(
    q, before, row, rows, valid, start, K: tl.constexpr, V: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a block of values of q S."""
    acc = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    for first in range(0, K, BLOCK_K):
        queries = load_tile(q, rows, valid, first, K, BLOCK_K)
        kv = load_state(before, row, first, start, K, V, BLOCK_K, BLOCK_V)
        acc += product(queries, kv, OPERAND, PRECISION)
    return acc


@kernel(
    read_blocks,
    {"BELOW": True, "NORMALIZER": 1, "HAS_WIDE_O": True},
    {"BELOW": True, "ABOVE": True, "NORMALIZER": 1, "HAS_WIDE_O": True},
    {"BELOW": True, "ABOVE": True, "NORMALIZER": 1, "TRANSPOSED": True},
)
def read(
    q, k, v, scale, decays, keep, before, before_sum,
    o, wide_o, c,
    batch, tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BELOW: tl.constexpr, ABOVE: tl.constexpr, TRANSPOSED: tl.constexpr,
    NORMALIZER: tl.constexpr, HAS_WIDE_O: tl.constexpr, HAS_KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of a chunk and, with normalization, its row sums c [B, T, H].

    wide_o: the same outputs in float32, for the backward pass.
    TRANSPOSED: compute gradients of values instead. Pass keys as q, queries as k, dO as v, and
    gradients of states as states. The triangles above and below the diagonal are swapped.
    """
    head, sample, chunk, t, valid, begin = chunk_of(keep, batch, tokens, H, HAS_KEEP, BLOCK_T)
    lower: tl.constexpr = 1 if TRANSPOSED else 0  # direction of the scores below the diagonal
    q, k, v = q + begin * K, k + begin * K, v + begin * V
    o, wide_o = o + begin * V, wide_o + begin * V
    line = tl.arange(0, BLOCK_T) * H
    rows = line[:, None]
    log_decay, below, _ = cumulative_decay(
        decays, lower * BELOW * batch + sample, t, tokens, head, H
    )
    below = below - log_decay if TRANSPOSED else below
    log_decay, above, end = cumulative_decay(
        decays, (1 - lower) * ABOVE * batch + sample, t, tokens, head, H
    )
    above = above if TRANSPOSED else above - log_decay
    near = exponential(below)
    far = exponential(end - above)
    # indices of states, [D, B, H, N]
    below_line = ((lower * batch + sample) * H + head) * chunks + chunk
    above_line = (((1 - lower) * batch + sample) * H + head) * chunks + chunk
    weights = scores_of(q, k, rows, valid, K, BLOCK_T, BLOCK_K, OPERAND, PRECISION)
    weights *= decay_mask(below, above, BELOW, ABOVE, BLOCK_T)
    factor = tl.full([BLOCK_T], 1.0, tl.float32)
    if NORMALIZER:
        if TRANSPOSED:
            weights *= tl.load(scale + begin + line, mask=valid, other=0)[None, :]
        else:
            total = tl.sum(weights, 1)
            for first in range(0, K, BLOCK_K):
                queries = load_tile(q, rows, valid, first, K, BLOCK_K).to(tl.float32)
                f = first + tl.arange(0, BLOCK_K)
                if BELOW:
                    z = tl.load(before_sum + below_line * K + f, mask=f < K, other=0)
                    total += near * tl.sum(queries * z[None, :], 1)
                if ABOVE:
                    z = tl.load(before_sum + above_line * K + f, mask=f < K, other=0)
                    total += far * tl.sum(queries * z[None, :], 1)
            tl.store(c + begin + line, total, mask=t < tokens)
            factor, _ = scale_of(total, NORMALIZER)
    for start in range(0, V, BLOCK_V):
        values = load_tile(v, rows, valid, start, V, BLOCK_V)
        acc = product(weights, values, OPERAND, PRECISION)
        if BELOW:
            acc += near[:, None] * read_state(
                q, before, below_line, rows, valid, start, K, V,
                BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION,
            )  # fmt: skip
        if ABOVE:
            acc += far[:, None] * read_state(
                q, before, above_line, rows, valid, start, K, V,
                BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION,
            )  # fmt: skip
        e = start + tl.arange(0, BLOCK_V)
        mask = (t < tokens)[:, None] & (e < V)[None, :]
        acc *= factor[:, None]
        tl.store(o + rows * V + e[None, :], acc, mask=mask)
        if HAS_WIDE_O:
            tl.store(wide_o + rows * V + e[None, :], acc, mask=mask)


@jit
def inner_product(
    x, x_sum, y, y_sum, row, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute <x, y> for two states, including their sums of keys."""
    acc = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_K], tl.float32)
    for first in range(0, K, BLOCK_K):
        for start in range(0, V, BLOCK_V):
            kv = load_state(x, row, first, start, K, V, BLOCK_K, BLOCK_V).to(tl.float32)
            acc += kv * load_state(y, row, first, start, K, V, BLOCK_K, BLOCK_V).to(tl.float32)
        f = first + tl.arange(0, BLOCK_K)
        z = tl.load(x_sum + row * K + f, mask=f < K, other=0)
        total += z * tl.load(y_sum + row * K + f, mask=f < K, other=0)
    return tl.sum(tl.sum(acc, 1) + total, 0)


@kernel(gradient_blocks, {"ABOVE": True}, {"ABOVE": False})
def query_gradients(
    k, q, v, do, scale, dc, decays, keep, before, before_sum, after, after_sum,
    dq, ddecays,
    batch, tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    ABOVE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a chunk's queries, and of log-decays through the incoming states.

    before: the states before each chunk; after: the gradients of the states after each chunk.
    ddecays: [D, B, T, H].
    """
    head, sample, chunk, t, valid, begin = chunk_of(keep, batch, tokens, H, HAS_KEEP, BLOCK_T)
    q, k, dq = q + begin * K, k + begin * K, dq + begin * K
    v, do, ddecays = v + begin * V, do + begin * V, ddecays + begin
    line = tl.arange(0, BLOCK_T) * H
    rows = line[:, None]
    left = (sample * H + head) * chunks + chunk
    across = (batch * H).to(tl.int64)
    right = left + across * chunks
    _, forward, forward_end = cumulative_decay(decays, sample, t, tokens, head, H)
    log_decay, backward, backward_end = cumulative_decay(
        decays, ABOVE * batch + sample, t, tokens, head, H
    )
    backward -= log_decay
    near, far = exponential(forward), exponential(backward_end - backward)
    factor = tl.full([BLOCK_T], 1.0, tl.float32)
    of_sum = tl.zeros([BLOCK_T], tl.float32)
    if HAS_SCALE:
        factor = tl.load(scale + begin + line, mask=valid, other=0)
        of_sum = tl.load(dc + begin + line, mask=valid, other=0)
    dscores = scores_of(do, v, rows, valid, V, BLOCK_T, BLOCK_V, OPERAND, PRECISION)
    dscores = dscores * factor[:, None] + of_sum[:, None]
    dscores *= decay_mask(forward, backward, True, ABOVE, BLOCK_T)
    from_left = tl.zeros([BLOCK_T], tl.float32)
    from_right = tl.zeros([BLOCK_T], tl.float32)
    for first in range(0, K, BLOCK_K):
        queries = load_tile(q, rows, valid, first, K, BLOCK_K).to(tl.float32)
        keys = load_tile(k, rows, valid, first, K, BLOCK_K)
        acc = product(dscores, keys, OPERAND, PRECISION)
        part = near[:, None] * state_gradient(
            do, before, before_sum, factor, of_sum, left, rows, valid, first, K, V, HAS_SCALE,
            BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION,
        )  # fmt: skip
        from_left += tl.sum(part * queries, 1)
        acc += part
        if ABOVE:
            part = far[:, None] * state_gradient(
                do, before, before_sum, factor, of_sum, right, rows, valid, first, K, V, HAS_SCALE,
                BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION,
            )  # fmt: skip
            from_right += tl.sum(part * queries, 1)
            acc += part
        c = first + tl.arange(0, BLOCK_K)
        mask = (t < tokens)[:, None] & (c < K)[None, :]
        tl.store(dq + rows * K + c[None, :], acc, mask=mask)
    # the incoming state reaches a token through its own decay and all decays visited before it
    of_state = exponential(forward_end) * inner_product(
        before, before_sum, after, after_sum, left, K, V, BLOCK_K, BLOCK_V
    )
    change = tl.cumsum(from_left, 0, reverse=True) + of_state
    tl.store(ddecays + line, change, mask=t < tokens)
    if ABOVE:
        of_state = exponential(backward_end) * inner_product(
            before, before_sum, after, after_sum, right, K, V, BLOCK_K, BLOCK_V
        )
        change = tl.cumsum(from_right, 0) + of_state
        tl.store(ddecays + across * tokens + line, change, mask=t < tokens)


@kernel(gradient_blocks, {"ABOVE": True}, {"ABOVE": False})
def key_gradients(
    k, q, v, do, scale, dc, decays, keep, after, after_sum,
    dk, ddecays,
    batch, tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    ABOVE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a chunk's keys, and add their part of the log-decay gradients."""
    head, sample, chunk, t, valid, begin = chunk_of(keep, batch, tokens, H, HAS_KEEP, BLOCK_T)
    q, k, dk = q + begin * K, k + begin * K, dk + begin * K
    v, do, ddecays = v + begin * V, do + begin * V, ddecays + begin
    line = tl.arange(0, BLOCK_T) * H
    rows = line[:, None]
    left = (sample * H + head) * chunks + chunk
    across = (batch * H).to(tl.int64)
    right = left + across * chunks
    _, forward, forward_end = cumulative_decay(decays, sample, t, tokens, head, H)
    log_decay, backward, _ = cumulative_decay(decays, ABOVE * batch + sample, t, tokens, head, H)
    backward -= log_decay
    near, far = exponential(backward), exponential(forward_end - forward)
    # rows are keys, so the scores of the forward direction are above the diagonal
    dscores = scores_of(v, do, rows, valid, V, BLOCK_T, BLOCK_V, OPERAND, PRECISION)
    if HAS_SCALE:
        dscores *= tl.load(scale + begin + line, mask=valid, other=0)[None, :]
        dscores += tl.load(dc + begin + line, mask=valid, other=0)[None, :]
    dscores *= decay_mask(backward, forward, ABOVE, True, BLOCK_T)
    pair_gradients = dscores * scores_of(k, q, rows, valid, K, BLOCK_T, BLOCK_K, OPERAND, PRECISION)
    j = tl.arange(0, BLOCK_T)[:, None]
    i = tl.arange(0, BLOCK_T)[None, :]
    # a decay applies between each key before it and each query at its own token or later
    crossing = product(
        tl.where(j < i, pair_gradients, 0.0), tl.where(j >= i, 1.0, 0.0), OPERAND, PRECISION
    )
    to_right = tl.sum(tl.where(j < i, crossing, 0.0), 0)
    if ABOVE:
        pair_gradients = tl.where(j > i, pair_gradients, 0.0)
        crossing = product(pair_gradients, tl.where(j <= i, 1.0, 0.0), OPERAND, PRECISION)
        to_left = tl.sum(tl.where(j > i, crossing, 0.0), 0)
    one = tl.full([BLOCK_T], 1.0, tl.float32)
    gives_right = tl.zeros([BLOCK_T], tl.float32)
    gives_left = tl.zeros([BLOCK_T], tl.float32)
    for first in range(0, K, BLOCK_K):
        keys = load_tile(k, rows, valid, first, K, BLOCK_K).to(tl.float32)
        queries = load_tile(q, rows, valid, first, K, BLOCK_K)
        acc = product(dscores, queries, OPERAND, PRECISION)
        part = far[:, None] * state_gradient(
            v, after, after_sum, one, one, left, rows, valid, first, K, V, True,
            BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION,
        )  # fmt: skip
        gives_right += tl.sum(part * keys, 1)
        acc += part
        if ABOVE:
            part = near[:, None] * state_gradient(
                v, after, after_sum, one, one, right, rows, valid, first, K, V, True,
                BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION,
            )  # fmt: skip
            gives_left += tl.sum(part * keys, 1)
            acc += part
        c = first + tl.arange(0, BLOCK_K)
        mask = (t < tokens)[:, None] & (c < K)[None, :]
        tl.store(dk + rows * K + c[None, :], tl.where(valid[:, None], acc, 0.0), mask=mask)
    to_right += tl.sum(tl.where(j < i, gives_right[:, None], 0.0), 0)
    change = tl.load(ddecays + line, mask=t < tokens, other=0)
    tl.store(ddecays + line, change + to_right, mask=t < tokens)
    if ABOVE:
        to_left += tl.sum(tl.where(j > i, gives_left[:, None], 0.0), 0)
        ddecays += across * tokens
        change = tl.load(ddecays + line, mask=t < tokens, other=0)
        tl.store(ddecays + line, change + to_left, mask=t < tokens)
