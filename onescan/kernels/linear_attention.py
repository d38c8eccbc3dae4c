"""Linear attention without decay in both directions: one pass over keys and one over queries.

    S = sum_t k_t v_t^T,   z = sum_t k_t                               sums
    o_t = s_t S^T q_t,     s_t = 1 / divisor of the row sum z . q_t    read

In the backward pass, with c_t the gradient of the row sum z . q_t:

    dq_t = s_t S do_t + c_t z,   c_t = -s_t s'_t o_t . do_t            gradients
    dS = sum_t s_t q_t do_t^T,   dz = sum_t c_t q_t                    sums, of queries
    dk_t = dS v_t + dz                                                 gradients, of keys
    dv_t = dS^T k_t                                                    read, of keys

where s'_t is the derivative of the divisor. `gradients` computes row sums and o_t . do_t again, so
that the forward pass keeps only S and z, and o_t is not rounded.

Source: LION, arXiv:2502.16249, Eq. 181 to 183.
"""

import triton.language as tl

from onescan.kernels.common import jit, kernel, product, valid_tokens
from onescan.kernels.decay_scalar import gradient_blocks, read_blocks, read_state
from onescan.kernels.decay_states import (
    chunk_of,
    examples,
    load_tile,
    position,
    scale_of,
    state_blocks,
    state_gradient,
)

EXAMPLES = examples(diagonal=False)
sum_blocks = state_blocks


@kernel(sum_blocks)
def sums(
    k, v, scale, dc, keep,
    kv, k_sum,
    batch, tokens, split,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum k v^T and k over the tokens of one part, [P, B, H, K, V] and [P, B, H, K].

    scale: sum scale k v^T and dc k instead, with q and dO in place of k and v.
    """
    line = tl.program_id(0).to(tl.int64)
    head, sample, part = position(tl.program_id(0), batch, H)
    first, start = tl.program_id(1) * BLOCK_K, tl.program_id(2) * BLOCK_V
    acc = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_K], tl.float32)
    rows = (tl.arange(0, BLOCK_T) * H)[:, None]
    for begin in range(part * split, tl.minimum((part + 1) * split, tokens), BLOCK_T):
        valid = valid_tokens(keep, sample, begin + tl.arange(0, BLOCK_T), tokens, HAS_KEEP)
        row = (sample * tokens + begin) * H + head
        keys = load_tile(k + row * K, rows, valid, first, K, BLOCK_K).to(tl.float32)
        values = load_tile(v + row * V, rows, valid, start, V, BLOCK_V)
        if HAS_SCALE:
            of_sum = tl.load(dc + row + rows, mask=valid[:, None], other=0)
            total += tl.sum(keys * of_sum, 0)
            keys *= tl.load(scale + row + rows, mask=valid[:, None], other=0)
        else:
            total += tl.sum(keys, 0)
        acc += product(tl.trans(keys), values, OPERAND, PRECISION)
    c = first + tl.arange(0, BLOCK_K)
    e = start + tl.arange(0, BLOCK_V)
    offsets = line * (K * V) + c[:, None] * V + e[None, :]
    tl.store(kv + offsets, acc, mask=(c < K)[:, None] & (e < V)[None, :])
    tl.store(k_sum + line * K + c, total, mask=(c < K) & (start == 0))


@jit
def row_sums(
    q, k_sum, line, rows, valid, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Compute z . q_t for a tile."""
    total = tl.zeros([BLOCK_T], tl.float32)
    for first in range(0, K, BLOCK_K):
        queries = load_tile(q, rows, valid, first, K, BLOCK_K).to(tl.float32)
        c = first + tl.arange(0, BLOCK_K)
        z = tl.load(k_sum + line * K + c, mask=c < K, other=0)
        total += tl.sum(queries * z[None, :], 1)
    return total


@kernel(read_blocks, {"NORMALIZER": 1})
def read(
    q, kv, k_sum, keep,
    o,
    batch, tokens,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    NORMALIZER: tl.constexpr, HAS_KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of a tile from its queries, or gradients of values from its keys."""
    head, sample, _, t, valid, begin = chunk_of(keep, batch, tokens, H, HAS_KEEP, BLOCK_T)
    line = sample * H + head
    rows = (tl.arange(0, BLOCK_T) * H)[:, None]
    q, o = q + begin * K, o + begin * V
    factor = tl.full([BLOCK_T], 1.0, tl.float32)
    if NORMALIZER:
        total = row_sums(q, k_sum, line, rows, valid, K, BLOCK_T, BLOCK_K)
        factor, _ = scale_of(total, NORMALIZER)
    for start in range(0, V, BLOCK_V):
        acc = read_state(
            q, kv, line, rows, valid, start, K, V,
            BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION,
        )  # fmt: skip
        e = start + tl.arange(0, BLOCK_V)
        mask = (t < tokens)[:, None] & (e < V)[None, :]
        tl.store(o + rows * V + e[None, :], acc * factor[:, None], mask=mask)


@kernel(gradient_blocks, {"NORMALIZER": 1}, {"KEYS": True})
def gradients(
    q, do, kv, k_sum, keep,
    dq, scale, dc,
    batch, tokens,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    NORMALIZER: tl.constexpr, KEYS: tl.constexpr, HAS_KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile's queries and, with normalization, s_t and c_t [B, T, H].

    KEYS: compute the gradients of keys instead, with v in place of dO, dS and dz; q is not read.
    """
    head, sample, _, t, valid, begin = chunk_of(keep, batch, tokens, H, HAS_KEEP, BLOCK_T)
    line = sample * H + head
    of_token = tl.arange(0, BLOCK_T) * H
    rows = of_token[:, None]
    q, do, dq = q + begin * K, do + begin * V, dq + begin * K
    factor = tl.full([BLOCK_T], 1.0, tl.float32)
    of_sum = tl.full([BLOCK_T], 1.0, tl.float32)
    if NORMALIZER:
        total = row_sums(q, k_sum, line, rows, valid, K, BLOCK_T, BLOCK_K)
        factor, derivative = scale_of(total, NORMALIZER)
        dot = tl.zeros([BLOCK_T], tl.float32)  # o . do
        for first in range(0, K, BLOCK_K):
            acc = state_gradient(
                do, kv, k_sum, factor, of_sum, line, rows, valid, first, K, V, False,
                BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION,
            )  # fmt: skip
            dot += tl.sum(acc * load_tile(q, rows, valid, first, K, BLOCK_K).to(tl.float32), 1)
        of_sum = -dot * factor * derivative
        tl.store(scale + begin + of_token, factor, mask=t < tokens)
        tl.store(dc + begin + of_token, of_sum, mask=t < tokens)
    for first in range(0, K, BLOCK_K):
        acc = state_gradient(
            do, kv, k_sum, factor, of_sum, line, rows, valid, first, K, V, KEYS or NORMALIZER > 0,
            BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION,
        )  # fmt: skip
        c = first + tl.arange(0, BLOCK_K)
        mask = (t < tokens)[:, None] & (c < K)[None, :]
        tl.store(dq + rows * K + c[None, :], tl.where(valid[:, None], acc, 0.0), mask=mask)
