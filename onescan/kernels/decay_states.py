"""States of linear attention with one decay per head or per key channel.

    S_t = exp(a_t) S_{t-1} + k_t v_t^T,   z_t = exp(a_t) z_{t-1} + k_t
    o_t = S_t^T q_t, normalized by the row sum z_t . q_t              step: token by token
    S_n = the state before chunk n, of each direction                 states: chunk by chunk

`decay_scalar` and `decay_diagonal` read the states between chunks and compute gradients.

Source: LION, arXiv:2502.16249, Eq. 5; states carried in both directions are not in the paper.
"""

import triton.language as tl

from onescan.kernels.common import (
    Blocks,
    Case,
    Example,
    jit,
    kernel,
    power_of_two,
    product,
    valid_tokens,
)
from onescan.kernels.feature_maps import features

MIN_LOG_DECAY = tl.constexpr(-800.0)  # exp of anything smaller is 0 in every dtype
MIN_DIVISOR = tl.constexpr(1e-30)  # as in onescan.ops.numerics

# How outputs are normalized by their row sum.
NORMALIZERS = {"none": 0, "sum": 1, "max_one": 2, "absolute_max_one": 3}


def examples(*, diagonal: bool) -> tuple[Example, ...]:
    """Return the cases that `make check-kernels` compiles for one kind of decay."""
    given = {"HAS_KEEP": True, "HAS_KV_IN": True, "HAS_SCALE": True}
    return (
        Example(64, 64, diagonal=diagonal),
        Example(96, 128, diagonal=diagonal, flags=given),
        Example(128, 128, diagonal=diagonal, flags={"HAS_SCALE": True}),
    )


EXAMPLES = examples(diagonal=False) + examples(diagonal=True)


def state_blocks(case: Case) -> Blocks:
    """Return the blocks of `states`: the scores of a tile and two sums must fit in registers."""
    widest = 64 if case.data == "bf16" and not case.diagonal else 32  # others multiply in 32 bits
    keys, values = (min(power_of_two(x), widest) for x in (case.key_width, case.value_width))
    return Blocks(widest, keys, values, warps=4, stages=1 if case.diagonal else 2)


def scale_blocks(case: Case) -> Blocks:
    """Return the blocks of `scales`."""
    return Blocks(32, 1, power_of_two(case.value_width), warps=4, stages=1)


def step_blocks(case: Case) -> Blocks:
    """Return the blocks of `step`: few values per program, to get enough programs when decoding."""
    keys = power_of_two(case.key_width)
    values = min(power_of_two(case.value_width), max(16, 2048 // keys))
    return Blocks(1, keys, values, warps=4, stages=1)


@jit
def position(program, batch, H: tl.constexpr):
    """Return a program's head and sample, in 64 bits for large offsets, and its chunk."""
    row = program // H
    return (program % H).to(tl.int64), (row % batch).to(tl.int64), row // batch


@jit
def chunk_of(
    keep, batch, tokens, H: tl.constexpr, HAS_KEEP: tl.constexpr, BLOCK_T: tl.constexpr
):  # fmt: skip
    """Return a program's head, sample, chunk, tokens, validity of tokens, and first row."""
    head, sample, chunk = position(tl.program_id(0), batch, H)
    t = chunk * BLOCK_T + tl.arange(0, BLOCK_T)
    valid = valid_tokens(keep, sample, t, tokens, HAS_KEEP)
    return head, sample, chunk, t, valid, (sample * tokens + chunk * BLOCK_T) * H + head


@jit
def load_tile(x, rows, valid, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load a block of channels of a tile, 0 for invalid tokens; x points to the tile."""
    c = first + tl.arange(0, BLOCK)
    return tl.load(
        x + rows * WIDTH + c[None, :], mask=valid[:, None] & (c < WIDTH)[None, :], other=0
    )


@jit
def load_state(
    x, row, first, start, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Load a block of keys and values of a state."""
    c = first + tl.arange(0, BLOCK_K)
    e = start + tl.arange(0, BLOCK_V)
    inside = (c < K)[:, None] & (e < V)[None, :]
    return tl.load(x + row * (K * V) + c[:, None] * V + e[None, :], mask=inside, other=0)


@jit
def scores_of(
    q, k, rows, valid, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the scores of a tile, q k^T."""
    scores = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    for first in range(0, K, BLOCK_K):
        queries = load_tile(q, rows, valid, first, K, BLOCK_K)
        keys = load_tile(k, rows, valid, first, K, BLOCK_K)
        scores += product(queries, tl.trans(keys), OPERAND, PRECISION)
    return scores


@jit
def cumulative_decay(decays, row, t, tokens, head, H: tl.constexpr):
    """Return the log-decay of each token, the cumulative sums and the total, in float64."""
    logs = tl.load(decays + (row * tokens + t) * H + head, mask=t < tokens, other=0).to(tl.float64)
    logs = tl.where(logs < MIN_LOG_DECAY, MIN_LOG_DECAY, logs)
    return logs, tl.cumsum(logs, 0), tl.sum(logs, 0)


@jit
def exponential(x):
    """Compute exp(x) of a float64 x <= 0 in float32."""
    return tl.exp(x.to(tl.float32))


@jit
def load_decays(decays, begin, rows, mask, first, K: tl.constexpr, BLOCK: tl.constexpr):
    """Load log-decays of a block of channels, clamped so that their sums stay finite."""
    logs = load_tile(decays + begin * K, rows, mask, first, K, BLOCK)
    return tl.where(logs < MIN_LOG_DECAY, MIN_LOG_DECAY, logs)


@jit
def sums_of(ones, x, EXACT: tl.constexpr):
    """Sum the rows of x where a 0/1 mask is 1, without rounding x."""
    return tl.dot(ones, x, input_precision=EXACT, out_dtype=tl.float32)


@jit
def passed_in_chunk(RIGHTWARD: tl.constexpr, AFTER: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return a 0/1 matrix [x, y] that marks the decays y between the start of the chunk and x.

    AFTER: mark the decays between x and the end of the chunk instead.
    """
    x, y = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_T)[None, :]
    if RIGHTWARD:
        return tl.where(y > x if AFTER else y <= x, 1.0, 0.0)
    return tl.where(y < x if AFTER else y >= x, 1.0, 0.0)


@jit
def scale_of(c, NORMALIZER: tl.constexpr):
    """Return the reciprocal of the divisor for a row sum c, and the divisor's derivative."""
    if NORMALIZER == 1:
        tiny = tl.abs(c) < MIN_DIVISOR
        divisor, derivative = tl.where(tiny, 1.0, c), tl.where(tiny, 0.0, 1.0)
    else:
        size, sign = c, 1.0
        if NORMALIZER > 2:
            size, sign = tl.abs(c), tl.where(c < 0, -1.0, 1.0)
        # like torch.clamp: NaN is kept, and the derivative at 1 is not 0
        divisor, derivative = tl.where(size < 1, 1.0, size), tl.where(size < 1, 0.0, sign)
    return 1 / divisor, derivative


@kernel(state_blocks, {"GRADIENT": False}, {"GRADIENT": True})
def states(
    k, v, scale, dc, decays, keep, kv_in, sum_in,
    before, before_sum, kv_out, sum_out,
    batch, tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, DIAGONAL: tl.constexpr,
    HAS_KV_IN: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_KEEP: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Compute the state before each chunk, with separate programs for each direction.

    before: [D, B, H, N, K, V]; before_sum: [D, B, H, N, K]; kv_out: [D, B, H, K, V]; sum_out:
    [D, B, H, K]. decays: [D, B, T, H], or [D, B, T, H, K] if DIAGONAL.
    GRADIENT: compute gradients of states instead, with q and dO in place of k and v, visiting
    chunks in the opposite order.
    """
    line = tl.program_id(0).to(tl.int64)
    head, sample, direction = position(tl.program_id(0), batch, H)
    first, start = tl.program_id(1) * BLOCK_K, tl.program_id(2) * BLOCK_V
    c = first + tl.arange(0, BLOCK_K)
    e = start + tl.arange(0, BLOCK_V)
    inside = (c < K)[:, None] & (e < V)[None, :]
    offsets = c[:, None] * V + e[None, :]
    # only one of the programs that share these keys stores the sum
    sum_mask = (c < K) & (start == 0)
    rightward = (direction == 0) != GRADIENT
    acc = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_K], tl.float32)
    if HAS_KV_IN:
        acc += tl.load(kv_in + line * (K * V) + offsets, mask=inside, other=0)
        total += tl.load(sum_in + line * K + c, mask=c < K, other=0)
    if DIAGONAL:  # states need the decays after each token, gradients the decays up to it
        passed = tl.where(
            direction == 0,
            passed_in_chunk(True, not GRADIENT, BLOCK_T),
            passed_in_chunk(False, not GRADIENT, BLOCK_T),
        )
    rows = (tl.arange(0, BLOCK_T) * H)[:, None]
    for visited in range(chunks):
        chunk = tl.where(rightward, visited, chunks - 1 - visited)
        t = chunk * BLOCK_T + tl.arange(0, BLOCK_T)
        valid = valid_tokens(keep, sample, t, tokens, HAS_KEEP)
        begin = (sample * tokens + chunk * BLOCK_T) * H + head
        chunk_index = line * chunks + chunk
        tl.store(before + chunk_index * (K * V) + offsets, acc, mask=inside)
        tl.store(before_sum + chunk_index * K + c, total, mask=sum_mask)
        if DIAGONAL:
            of_direction = direction * (batch * H).to(tl.int64) * tokens
            logs = load_decays(decays, of_direction + begin, rows, t < tokens, first, K, BLOCK_K)
            weights = tl.exp(sums_of(passed, logs, EXACT))
            through = tl.exp(tl.sum(logs, 0))
            acc *= through[:, None]
        else:
            row = direction * batch + sample
            logs, sums, end = cumulative_decay(decays, row, t, tokens, head, H)
            sums = tl.where(direction == 0, sums, sums - logs)
            weights = exponential(tl.where(rightward, end - sums, sums))[:, None]
            through = exponential(end)
            acc *= through
        total *= through
        keys = load_tile(k + begin * K, rows, valid, first, K, BLOCK_K).to(tl.float32) * weights
        values = load_tile(v + begin * V, rows, valid, start, V, BLOCK_V)
        if not GRADIENT:
            total += tl.sum(keys, 0)
        elif HAS_SCALE:
            of_sum = tl.load(dc + begin + rows, mask=valid[:, None], other=0)
            total += tl.sum(keys * of_sum, 0)
            keys *= tl.load(scale + begin + rows, mask=valid[:, None], other=0)
        acc += product(tl.trans(keys), values, OPERAND, PRECISION)
    tl.store(kv_out + line * (K * V) + offsets, acc, mask=inside)
    tl.store(sum_out + line * K + c, total, mask=sum_mask)


@kernel(
    step_blocks,
    {"HAS_KEEP": False, "HAS_KV_IN": True},
    {"HAS_KEEP": True, "HAS_KV_IN": True, "NORMALIZER": 1, "MAP": 2},
)
def step(
    q, k, v, decays, keep, kv_in, sum_in,
    o, kv_out, sum_out,
    tokens, q_stride, k_stride, v_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    DIAGONAL: tl.constexpr, NORMALIZER: tl.constexpr, MAP: tl.constexpr,
    HAS_KV_IN: tl.constexpr, HAS_KEEP: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of all tokens, and the state and sum of keys after the last token.

    q_stride, k_stride and v_stride are the distances between tokens, which are read where a
    projection wrote them. MAP is the feature map of queries and keys.
    """
    program = tl.program_id(0)
    head, sample, line = program % H, (program // H).to(tl.int64), program.to(tl.int64)
    start = tl.program_id(1) * BLOCK_V
    c = tl.arange(0, BLOCK_K)
    e = start + tl.arange(0, BLOCK_V)
    inside = (c < K)[:, None] & (e < V)[None, :]
    offsets = line * (K * V) + c[:, None] * V + e[None, :]
    kv = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    z = tl.zeros([BLOCK_K], tl.float32)
    if HAS_KV_IN:
        kv += tl.load(kv_in + offsets, mask=inside, other=0)
        z += tl.load(sum_in + line * K + c, mask=c < K, other=0)
    for t in range(tokens):
        token = sample * tokens + t
        row = token * H + head
        key_mask, value_mask = c < K, e < V
        if HAS_KEEP:
            is_real = tl.load(keep + token) != 0
            key_mask &= is_real
            value_mask &= is_real
        query = tl.load(q + token * q_stride + head * K + c, mask=key_mask, other=0)
        query = features(query.to(tl.float32), key_mask, MAP)
        key = tl.load(k + token * k_stride + head * K + c, mask=key_mask, other=0)
        key = features(key.to(tl.float32), key_mask, MAP)
        value = tl.load(v + token * v_stride + head * V + e, mask=value_mask, other=0)
        value = value.to(tl.float32)
        if DIAGONAL:
            decay = tl.exp(tl.load(decays + row * K + c, mask=c < K, other=0))
            kv *= decay[:, None]
        else:
            decay = tl.exp(tl.load(decays + row))
            kv *= decay
        z = z * decay + key
        kv += key[:, None] * value[None, :]
        output = tl.sum(kv * query[:, None], 0)
        if NORMALIZER:
            factor, _ = scale_of(tl.sum(z * query, 0), NORMALIZER)
            output *= factor
        tl.store(o + row * V + e, output, mask=e < V)
    tl.store(kv_out + offsets, kv, mask=inside)
    tl.store(sum_out + line * K + c, z, mask=(c < K) & (start == 0))


@kernel(scale_blocks, {"NORMALIZER": 1, "o": "*fp32"})
def scales(
    o, do, c,
    scale, dc,
    lines,
    V: tl.constexpr, NORMALIZER: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute the reciprocal divisors of outputs and gradients of row sums, for lines [B T H]."""
    line = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_V)
    mask = (line < lines)[:, None] & (e < V)[None, :]
    offsets = line[:, None] * V + e[None, :]
    outputs = tl.load(o + offsets, mask=mask, other=0).to(tl.float32)
    gradients = tl.load(do + offsets, mask=mask, other=0).to(tl.float32)
    total = tl.load(c + line, mask=line < lines, other=1)
    factor, derivative = scale_of(total, NORMALIZER)
    tl.store(scale + line, factor, mask=line < lines)
    tl.store(dc + line, -tl.sum(outputs * gradients, 1) * factor * derivative, mask=line < lines)


@jit
def state_gradient(
    v, state, state_sum, scale, dc, row, rows, valid, first,
    K: tl.constexpr, V: tl.constexpr, SUMS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a block of keys of scale v S^T + dc z^T, where z is the state's sum of keys."""
    acc = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for start in range(0, V, BLOCK_V):
        values = load_tile(v, rows, valid, start, V, BLOCK_V)
        kv = load_state(state, row, first, start, K, V, BLOCK_K, BLOCK_V)
        acc += product(values, tl.trans(kv), OPERAND, PRECISION)
    acc *= scale[:, None]
    if SUMS:
        f = first + tl.arange(0, BLOCK_K)
        z = tl.load(state_sum + row * K + f, mask=f < K, other=0)
        acc += dc[:, None] * z[None, :]
    return acc
