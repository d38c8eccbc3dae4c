"""Linear attention with one decay per key channel, in chunks, both directions at once.

The mask of scores in `decay_scalar` is replaced by factors of queries and keys, per channel. Any
two tokens of a chunk are in different halves of the same block of 2, 4, ... tokens at exactly one
level. The factor of the key is the decay from the key to the middle of the block, and the factor of
the query is the decay from the middle to the query. Both are at most 1:

    score_ij = sum_c q_ic exp(middle to i) k_jc exp(j to middle)

Sums of decays are computed as products with a 0/1 matrix, without differences, so they do not lose
precision. The transposed matrix maps gradients back to decays.

Source: LION, arXiv:2502.16249, Theorem B.1.
"""

import triton.language as tl

from onescan.kernels.common import Blocks, Case, jit, kernel, power_of_two, product
from onescan.kernels.decay_states import (
    chunk_of,
    examples,
    load_decays,
    load_state,
    load_tile,
    passed_in_chunk,
    scale_of,
    scores_of,
    state_blocks,
    state_gradient,
    sums_of,
)

EXAMPLES = examples(diagonal=True)


def read_blocks(case: Case) -> Blocks:
    """Return the blocks of outputs: all values at once if registers suffice.

    The factors of keys are expensive and would otherwise be computed for each block of values.
    """
    values = power_of_two(case.value_width)
    values = min(values, 64) if case.data == "fp32" else values
    return Blocks(32, 16, values, warps=8, stages=1)


def gradient_blocks(case: Case) -> Blocks:
    """Return the blocks of gradients: few channels, because gradients stay in registers too."""
    return state_blocks(case)._replace(keys=16, warps=8 if case.chip.startswith("sm_") else 4)


@jit
def chunk_sums(
    decays, begin, rows, t, tokens, first, H: tl.constexpr, K: tl.constexpr,
    RIGHTWARD: tl.constexpr, AFTER: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the sums of `passed_in_chunk` without its mask, which would occupy registers."""
    x = tl.arange(0, BLOCK_T)
    mask = t < tokens
    if AFTER:
        step: tl.constexpr = 1 if RIGHTWARD else -1
        begin += step * H
        mask = (t + step < tokens) & (x + step >= 0) & (x + step < BLOCK_T)
    log_decays = load_decays(decays, begin, rows, mask, first, K, BLOCK_K)
    return tl.cumsum(log_decays, 0, reverse=RIGHTWARD == AFTER)


@jit
def passed_in_level(level, RIGHTWARD: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return a 0/1 matrix [x, y] that marks the decays y between x and the middle of its block.

    Queries are in the half that is visited second, keys in the half visited first.
    """
    x, y = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_T)[None, :]
    second = ((x >> level) & 1) == (1 if RIGHTWARD else 0)
    if RIGHTWARD:
        passed = (second & (y <= x)) | (~second & (y > x))
    else:
        passed = (second & (y >= x)) | (~second & (y < x))
    return tl.where(passed & ((x >> level) == (y >> level)), 1.0, 0.0)


@jit
def pairs_in_level(level, BELOW: tl.constexpr, ABOVE: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return whether tokens [i, j] are in different halves of one block."""
    i, j = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_T)[None, :]
    together = (i >> (level + 1)) == (j >> (level + 1))
    below = (i >> level) > (j >> level)
    above = (i >> level) < (j >> level)
    return together & ((below & BELOW) | (above & ABOVE))


@jit
def level_factors(
    forward, backward, level, BOTH: tl.constexpr, BLOCK_T: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Compute the factors of queries and of keys at a level, per channel."""
    right = tl.exp(sums_of(passed_in_level(level, True, BLOCK_T), forward, EXACT))
    if not BOTH:
        return right, right
    left = tl.exp(sums_of(passed_in_level(level, False, BLOCK_T), backward, EXACT))
    upper = ((tl.arange(0, BLOCK_T)[:, None] >> level) & 1) == 1
    return tl.where(upper, right, left), tl.where(upper, left, right)


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
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Compute a block of values of the outputs, and the row sums, as in `decay_scalar.read`."""
    head, sample, chunk, t, valid, begin = chunk_of(keep, batch, tokens, H, HAS_KEEP, BLOCK_T)
    start = tl.program_id(1) * BLOCK_V
    lower: tl.constexpr = 1 if TRANSPOSED else 0
    BOTH: tl.constexpr = BELOW and ABOVE
    line = tl.arange(0, BLOCK_T) * H
    rows = line[:, None]
    q, k, v = q + begin * K, k + begin * K, v + begin * V
    o, wide_o = o + begin * V, wide_o + begin * V
    of_right = (batch * H).to(tl.int64) * tokens * (1 if BOTH else 0)
    below_line = ((lower * batch + sample) * H + head) * chunks + chunk
    above_line = (((1 - lower) * batch + sample) * H + head) * chunks + chunk
    i, j = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_T)[None, :]
    e = start + tl.arange(0, BLOCK_V)
    weights = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    acc = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    for first in range(0, K, BLOCK_K):
        queries = load_tile(q, rows, valid, first, K, BLOCK_K).to(tl.float32)
        keys = load_tile(k, rows, valid, first, K, BLOCK_K).to(tl.float32)
        forward = load_decays(decays, begin, rows, t < tokens, first, K, BLOCK_K)
        backward = load_decays(decays, begin + of_right, rows, t < tokens, first, K, BLOCK_K)
        weights += tl.where(i == j, tl.sum(queries * keys, 1)[:, None], 0.0)
        for level in range(LEVELS):  # not unrolled: masks of all levels at once would not fit
            near, far = level_factors(forward, backward, level, BOTH, BLOCK_T, EXACT)
            if TRANSPOSED:
                scores = product(queries * far, tl.trans(keys * near), OPERAND, PRECISION)
            else:
                scores = product(queries * near, tl.trans(keys * far), OPERAND, PRECISION)
            weights += tl.where(pairs_in_level(level, BELOW, ABOVE, BLOCK_T), scores, 0.0)
        f = first + tl.arange(0, BLOCK_K)
        if BELOW:
            passed = chunk_sums(
                decays, begin + of_right if TRANSPOSED else begin, rows, t, tokens, first,
                H, K, not TRANSPOSED, TRANSPOSED, BLOCK_T, BLOCK_K,
            )  # fmt: skip
            decayed_queries = queries * tl.exp(passed)
            kv = load_state(before, below_line, first, start, K, V, BLOCK_K, BLOCK_V)
            acc += product(decayed_queries, kv, OPERAND, PRECISION)
            if NORMALIZER and not TRANSPOSED:
                z = tl.load(before_sum + below_line * K + f, mask=f < K, other=0)
                total += tl.sum(decayed_queries * z[None, :], 1)
        if ABOVE:
            passed = chunk_sums(
                decays, begin if TRANSPOSED else begin + of_right, rows, t, tokens, first,
                H, K, TRANSPOSED, TRANSPOSED, BLOCK_T, BLOCK_K,
            )  # fmt: skip
            decayed_queries = queries * tl.exp(passed)
            kv = load_state(before, above_line, first, start, K, V, BLOCK_K, BLOCK_V)
            acc += product(decayed_queries, kv, OPERAND, PRECISION)
            if NORMALIZER and not TRANSPOSED:
                z = tl.load(before_sum + above_line * K + f, mask=f < K, other=0)
                total += tl.sum(decayed_queries * z[None, :], 1)
    factor = tl.full([BLOCK_T], 1.0, tl.float32)
    if NORMALIZER:
        if TRANSPOSED:
            weights *= tl.load(scale + begin + line, mask=valid, other=0)[None, :]
        else:
            total += tl.sum(weights, 1)
            tl.store(c + begin + line, total, mask=(t < tokens) & (start == 0))
            factor, _ = scale_of(total, NORMALIZER)
    values = load_tile(v, rows, valid, start, V, BLOCK_V)
    acc += product(weights, values, OPERAND, PRECISION)
    acc *= factor[:, None]
    mask = (t < tokens)[:, None] & (e < V)[None, :]
    tl.store(o + rows * V + e[None, :], acc, mask=mask)
    if HAS_WIDE_O:
        tl.store(wide_o + rows * V + e[None, :], acc, mask=mask)


@jit
def inner_products(
    x, x_sum, y, y_sum, row, first, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute <x, y> for each key channel of two states, including their sums of keys."""
    f = first + tl.arange(0, BLOCK_K)
    z = tl.load(x_sum + row * K + f, mask=f < K, other=0)
    acc = z * tl.load(y_sum + row * K + f, mask=f < K, other=0)
    for start in range(0, V, BLOCK_V):
        kv = load_state(x, row, first, start, K, V, BLOCK_K, BLOCK_V).to(tl.float32)
        acc += tl.sum(kv * load_state(y, row, first, start, K, V, BLOCK_K, BLOCK_V), 1)
    return acc


@jit
def state_gradients(
    q, k, do, v, log_decays, leaving, scale, dc, before, before_sum, after, after_sum,
    line, rows, valid, first,
    K: tl.constexpr, V: tl.constexpr, RIGHTWARD: tl.constexpr, HAS_SCALE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of queries, keys and decays through the states of one direction.

    log_decays: those of the tile; leaving: their sums after each token; q, k: tiles.
    """
    one = tl.full([BLOCK_T], 1.0, tl.float32)
    through = tl.exp(tl.sum(log_decays, 0))
    through *= inner_products(
        before, before_sum, after, after_sum, line, first, K, V, BLOCK_K, BLOCK_V
    )  # fmt: skip
    dq = tl.exp(tl.cumsum(log_decays, 0, reverse=not RIGHTWARD)) * state_gradient(
        do, before, before_sum, scale, dc, line, rows, valid, first, K, V, HAS_SCALE,
        BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION,
    )  # fmt: skip
    dk = tl.exp(leaving) * state_gradient(
        v, after, after_sum, one, one, line, rows, valid, first, K, V, True,
        BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION,
    )  # fmt: skip
    # each decay applies to reads of the incoming state at its own and later tokens, and to earlier
    # tokens in the outgoing state
    change = tl.cumsum(dq * q, 0, reverse=RIGHTWARD) + through[None, :]
    leaves = passed_in_chunk(not RIGHTWARD, True, BLOCK_T)
    return dq, dk, change + sums_of(leaves, dk * k, EXACT)


@kernel(gradient_blocks, {"ABOVE": True}, {"ABOVE": False})
def gradients(
    k, q, v, do, scale, dc, decays, keep, before, before_sum, after, after_sum,
    dq, dk, ddecays,
    batch, tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    ABOVE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a chunk's queries, keys and log-decays for a block of key channels.

    before: the states before each chunk; after: the gradients of the states after each chunk.
    ddecays: [D, B, T, H, K].
    """
    head, sample, chunk, t, valid, begin = chunk_of(keep, batch, tokens, H, HAS_KEEP, BLOCK_T)
    first = tl.program_id(1) * BLOCK_K
    line = tl.arange(0, BLOCK_T) * H
    rows = line[:, None]
    across = (batch * H).to(tl.int64)
    left = (sample * H + head) * chunks + chunk
    v, do = v + begin * V, do + begin * V
    queries = load_tile(q + begin * K, rows, valid, first, K, BLOCK_K).to(tl.float32)
    keys = load_tile(k + begin * K, rows, valid, first, K, BLOCK_K).to(tl.float32)
    mask = t < tokens
    forward = load_decays(decays, begin, rows, mask, first, K, BLOCK_K)
    of_right = across * tokens * ABOVE
    backward = load_decays(decays, begin + of_right, rows, mask, first, K, BLOCK_K)
    factor = tl.full([BLOCK_T], 1.0, tl.float32)
    of_sum = tl.zeros([BLOCK_T], tl.float32)
    if HAS_SCALE:
        factor = tl.load(scale + begin + line, mask=valid, other=0)
        of_sum = tl.load(dc + begin + line, mask=valid, other=0)
    dscores = scores_of(do, v, rows, valid, V, BLOCK_T, BLOCK_V, OPERAND, PRECISION)
    dscores = dscores * factor[:, None] + of_sum[:, None]
    i, j = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_T)[None, :]
    diagonal = tl.sum(tl.where(i == j, dscores, 0.0), 1)[:, None]
    leaving = chunk_sums(
        decays, begin, rows, t, tokens, first, H, K, True, True, BLOCK_T, BLOCK_K
    )  # fmt: skip
    of_queries, of_keys, of_forward = state_gradients(
        queries, keys, do, v, forward, leaving, factor, of_sum,
        before, before_sum, after, after_sum, left, rows, valid, first, K, V, True, HAS_SCALE,
        BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION, EXACT,
    )  # fmt: skip
    of_queries += diagonal * keys
    of_keys += diagonal * queries
    of_backward = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    if ABOVE:
        leaving = chunk_sums(
            decays, begin + of_right, rows, t, tokens, first, H, K, False, True, BLOCK_T, BLOCK_K
        )  # fmt: skip
        more_queries, more_keys, of_backward = state_gradients(
            queries, keys, do, v, backward, leaving, factor, of_sum,
            before, before_sum, after, after_sum, left + across * chunks, rows, valid, first,
            K, V, False, HAS_SCALE,
            BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION, EXACT,
        )  # fmt: skip
        of_queries += more_queries
        of_keys += more_keys
    for level in range(LEVELS):  # not unrolled: masks of all levels at once would not fit
        near, far = level_factors(forward, backward, level, ABOVE, BLOCK_T, EXACT)
        level_dscores = tl.where(pairs_in_level(level, True, ABOVE, BLOCK_T), dscores, 0.0)
        more_queries = near * product(level_dscores, keys * far, OPERAND, PRECISION)
        more_keys = far * product(tl.trans(level_dscores), queries * near, OPERAND, PRECISION)
        of_queries += more_queries
        of_keys += more_keys
        more_queries *= queries
        more_keys *= keys
        upper = ((i >> level) & 1) == 1
        passed = tl.trans(passed_in_level(level, True, BLOCK_T))
        of_forward += sums_of(passed, tl.where(upper, more_queries, more_keys), EXACT)
        if ABOVE:
            passed = tl.trans(passed_in_level(level, False, BLOCK_T))
            of_backward += sums_of(passed, tl.where(upper, more_keys, more_queries), EXACT)
    c = first + tl.arange(0, BLOCK_K)
    offsets = begin * K + rows * K + c[None, :]
    inside = mask[:, None] & (c < K)[None, :]
    tl.store(dq + offsets, of_queries, mask=inside)
    tl.store(dk + offsets, tl.where(valid[:, None], of_keys, 0.0), mask=inside)
    tl.store(ddecays + offsets, of_forward, mask=inside)
    if ABOVE:
        tl.store(ddecays + of_right * K + offsets, of_backward, mask=inside)
