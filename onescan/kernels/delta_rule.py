"""The delta rule in chunks, causal or in both directions, with one decay per head or without.

    S_t = exp(g_t) S_{t-1} + beta_t k_t e_t^T      e_t = v_t - exp(g_t) S_{t-1}^T k_t
    o_t = S_t^T q_t                                both directions: the sum - beta_t (q_t . k_t) v_t

For a chunk with incoming state S, let P_t be the sum of g up to token t, M_ts = exp(P_t - P_s),
B = diag(beta), and let `enter` = exp(P) and `leave` = exp(P_C - P) multiply rows:

    A = strictly lower part of (K K^T * M) B
    (I + A) [W, U] = [enter K, V]                                            solve
    E  = U - W S                       S' = exp(P_C) S + (leave K)^T B E     states
    O  = enter Q S + lower(Q K^T * M) B E                                    read

In the backward pass, with N = B E and the gradient dS' of the state after the chunk:

    dN = lower(Q K^T * M)^T dO + leave K dS'                                 solve, then states
    dS = exp(P_C) dS' + (enter Q)^T dO - W^T B dN                            states
    R  = (I + A)^-T B dN               dV = R                                pair_gradients
    X  = lower(dO E^T * M) B           Y  = -strictly lower(R E^T * M)
    dbeta = row sums of dN * E + column sums of Y * K K^T
    dQ = X K + enter dO S^T                                                  gradients
    dK = X^T Q + (Y B + B Y^T) K + leave N dS'^T - enter R S^T

The gradient of a log-decay is the sum of the gradients of all exponents that contain it, as in
`decay_scalar`: those of M_ts, X * Q K^T + Y B * K K^T, of enter and leave, and of exp(P_C).

The backward direction visits tokens in the opposite order, so "lower" is "upper" there. Chunks are
the same for both directions, and tokens are read in their order. Packed sequences are separated by
log-decays of -inf.

Sources: DeltaNet, arXiv:2406.06484, Eq. 8 to 11; Gated DeltaNet, arXiv:2412.06464; both directions,
LION, arXiv:2502.16249, App. B.7. The gradients are derived here.
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
from onescan.kernels.decay_scalar import difference, read_state
from onescan.kernels.decay_states import (
    chunk_of,
    cumulative_decay,
    exponential,
    load_state,
    load_tile,
    position,
    scores_of,
)

EXAMPLES = (
    Example(64, 64),
    Example(96, 128, flags={"HAS_KEEP": True, "HAS_DECAYS": True, "HAS_DDECAYS": True}),
    Example(128, 128, flags={"HAS_DECAYS": True}),
)
DIRECTIONS = ({"BOTH": False}, {"BOTH": True})


def chunk_length(case: Case) -> int:
    """Return the number of tokens per chunk; other types than bf16 multiply in 32 bits."""
    if case.data == "fp32" and case.key_width > 64:
        return 16
    return 64 if case.data == "bf16" else 32


def solve_blocks(case: Case) -> Blocks:
    """Return the blocks of `solve`: 256 threads, to hold several C x C matrices."""
    warps = 8 if case.chip.startswith("sm_") else 4
    return Blocks(chunk_length(case), 32, 32, warps, stages=1)


def pair_blocks(case: Case) -> Blocks:
    """Return the blocks of `pair_gradients`, narrower for short chunks, whose operands are wide."""
    blocks = solve_blocks(case)
    return blocks._replace(keys=16, values=16) if blocks.tokens == 16 else blocks


def state_blocks(case: Case) -> Blocks:
    """Return the blocks of `states`, which hold all key channels of a state."""
    widest = 32 if case.data == "bf16" else 16
    keys, values = power_of_two(case.key_width), min(power_of_two(case.value_width), widest)
    stages = 1 if case.data == "fp32" else 2
    return solve_blocks(case)._replace(keys=keys, values=values, stages=stages)


def read_blocks(case: Case) -> Blocks:
    """Return the blocks of `read`."""
    widest = 64 if case.data == "bf16" else 16
    keys, values = (min(power_of_two(x), widest) for x in (case.key_width, case.value_width))
    return solve_blocks(case)._replace(keys=keys, values=values, stages=2)


def gradient_blocks(case: Case) -> Blocks:
    """Return the blocks of `gradients`, narrower where operands take more registers."""
    blocks = solve_blocks(case)
    if blocks.tokens == 16:
        return blocks._replace(values=16, warps=4)
    is_wide = case.data == "bf16" and not case.chip.startswith("sm_8")
    keys, values = 32 if is_wide else 16, 32 if is_wide or case.data == "fp16" else 16
    return blocks._replace(keys=keys, values=values)


@jit
def passed_decay(
    decays, direction, batch, sample, t, tokens, head,
    H: tl.constexpr, HAS_DECAYS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Return P, the sums of log-decays visited up to each token of a chunk, and the total."""
    passed = tl.zeros([BLOCK_T], tl.float64)
    if HAS_DECAYS:
        row = direction * batch + sample
        log_decay, sums, end = cumulative_decay(decays, row, t, tokens, head, H)
        passed = tl.where(direction == 0, sums, end - sums + log_decay)
    else:
        end = tl.sum(passed, 0)
    return passed, end


@jit
def decay_between(
    passed, direction, SAME: tl.constexpr, HAS_DECAYS: tl.constexpr, BLOCK_T: tl.constexpr
):  # fmt: skip
    """Return M, [T, S], which is 0 unless s is visited before t, or is t and SAME."""
    t, s = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_T)[None, :]
    earlier = tl.where(direction == 0, s < t, s > t)
    if SAME:
        earlier |= s == t
    if HAS_DECAYS:
        return tl.exp(tl.where(earlier, difference(passed, passed), float("-inf")))
    return tl.where(earlier, 1.0, 0.0)


@jit
def self_scores(q, k, rows, valid, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr):
    """Compute q_t . k_t for the tokens of a tile."""
    scores = tl.zeros([BLOCK_T], tl.float32)
    for first in range(0, K, BLOCK_K):
        queries = load_tile(q, rows, valid, first, K, BLOCK_K).to(tl.float32)
        scores += tl.sum(queries * load_tile(k, rows, valid, first, K, BLOCK_K), 1)
    return scores


@jit
def inverse_of(
    a, LEVELS: tl.constexpr, BLOCK_T: tl.constexpr, FLOAT_PRECISION: tl.constexpr
):  # fmt: skip
    """Compute the inverse of I + a for a strictly triangular a, summed in float32.

    The inverse of the diagonal blocks of one size gives that of twice the size:
    [[I + a, 0], [c, I + b]]^-1 = [[X, 0], [-Y c X, Y]] for the inverses X and Y of the blocks.
    """
    i, j = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_T)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, a, 0.0)
    for level in tl.static_range(1, LEVELS):
        is_corner = ((i >> level) != (j >> level)) & ((i >> (level + 1)) == (j >> (level + 1)))
        corner = tl.where(is_corner, a, 0.0)
        left = product(inverse, corner, tl.float32, FLOAT_PRECISION)
        inverse -= product(left, inverse, tl.float32, FLOAT_PRECISION)
    return inverse


@kernel(solve_blocks, {"GRADIENT": False}, {"GRADIENT": True})
def solve(
    k, v, beta, decays, keep, q, do,
    w, errors, inverse, derrors,
    batch, tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, GRADIENT: tl.constexpr,
    HAS_DECAYS: tl.constexpr, HAS_KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, LEVELS: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, FLOAT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute W, [D, B, T, H, K], and U, [D, B, T, H, V], as `errors`, of a chunk and direction.

    GRADIENT: also store the inverse of I + A, [D, B, T, H, C], and in `derrors` the part of dN that
    comes from dO.
    """
    head, sample, _, t, valid, begin = chunk_of(keep, batch, tokens, H, HAS_KEEP, BLOCK_T)
    direction = tl.program_id(1)
    first_row = begin + direction * (batch * H).to(tl.int64) * tokens
    q, k, v, do = q + begin * K, k + begin * K, v + begin * V, do + begin * V
    w, inverse = w + first_row * K, inverse + first_row * BLOCK_T
    errors, derrors = errors + first_row * V, derrors + first_row * V
    line = tl.arange(0, BLOCK_T) * H
    rows = line[:, None]
    inside = (t < tokens)[:, None]
    passed, _ = passed_decay(
        decays, direction, batch, sample, t, tokens, head, H, HAS_DECAYS, BLOCK_T
    )
    a = scores_of(k, k, rows, valid, K, BLOCK_T, BLOCK_K, OPERAND, PRECISION)
    a *= decay_between(passed, direction, False, HAS_DECAYS, BLOCK_T)
    a *= tl.load(beta + begin + line, mask=valid, other=0)[None, :]
    solved = inverse_of(a, LEVELS, BLOCK_T, FLOAT_PRECISION)
    for first in range(0, K, BLOCK_K):
        c = first + tl.arange(0, BLOCK_K)[None, :]
        keys = load_tile(k, rows, valid, first, K, BLOCK_K) * exponential(passed)[:, None]
        tile = product(solved, keys, OPERAND, PRECISION)
        tl.store(w + rows * K + c, tile, mask=inside & (c < K))
    for start in range(0, V, BLOCK_V):
        e = start + tl.arange(0, BLOCK_V)[None, :]
        values = load_tile(v, rows, valid, start, V, BLOCK_V)
        tile = product(solved, values, OPERAND, PRECISION)
        tl.store(errors + rows * V + e, tile, mask=inside & (e < V))
    if GRADIENT:
        s = tl.arange(0, BLOCK_T)[None, :]
        tl.store(inverse + rows * BLOCK_T + s, solved, mask=inside)
        scores = scores_of(q, k, rows, valid, K, BLOCK_T, BLOCK_K, OPERAND, PRECISION)
        scores *= decay_between(passed, direction, True, HAS_DECAYS, BLOCK_T)
        for start in range(0, V, BLOCK_V):
            e = start + tl.arange(0, BLOCK_V)[None, :]
            do_tile = load_tile(do, rows, valid, start, V, BLOCK_V)
            tile = product(tl.trans(scores), do_tile, OPERAND, PRECISION)
            tl.store(derrors + rows * V + e, tile, mask=inside & (e < V))


@kernel(state_blocks, {"GRADIENT": False}, {"GRADIENT": True})
def states(
    k, w, beta, decays, keep, kv_in, q, do,
    errors, before, kv_out,
    batch, tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    HAS_KV_IN: tl.constexpr, HAS_DECAYS: tl.constexpr, HAS_KEEP: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the state before each chunk, [D, B, H, N, K, V], and replace U by E in `errors`.

    GRADIENT: visit chunks in the opposite order, compute the gradients of the states after each
    chunk, and add their contribution to dN, which is passed as `errors`.
    """
    program = tl.program_id(0).to(tl.int64)
    head, sample, direction = position(tl.program_id(0), batch, H)
    start = tl.program_id(1) * BLOCK_V
    c = tl.arange(0, BLOCK_K)
    e = start + tl.arange(0, BLOCK_V)
    inside = (c < K)[:, None] & (e < V)[None, :]
    state_offsets = c[:, None] * V + e[None, :]
    acc = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if HAS_KV_IN:
        acc += tl.load(kv_in + program * (K * V) + state_offsets, mask=inside, other=0)
    line = tl.arange(0, BLOCK_T) * H
    rows = line[:, None]
    for visited in range(chunks):
        chunk = tl.where((direction == 0) != GRADIENT, visited, chunks - 1 - visited)
        t = chunk * BLOCK_T + tl.arange(0, BLOCK_T)
        valid = valid_tokens(keep, sample, t, tokens, HAS_KEEP)
        begin = (sample * tokens + chunk * BLOCK_T) * H + head
        first_row = begin + direction * (batch * H).to(tl.int64) * tokens
        tl.store(before + (program * chunks + chunk) * (K * V) + state_offsets, acc, mask=inside)
        passed, end = passed_decay(
            decays, direction, batch, sample, t, tokens, head, H, HAS_DECAYS, BLOCK_T
        )
        leave = exponential(end - passed)[:, None]
        strength = tl.load(beta + begin + line, mask=valid, other=0)[:, None]
        mask = (t < tokens)[:, None] & (e < V)[None, :]
        error_pointers = errors + first_row * V + rows * V + e[None, :]
        tile = tl.load(error_pointers, mask=mask, other=0).to(tl.float32)
        solved = load_tile(w + first_row * K, rows, t < tokens, 0, K, BLOCK_K)
        if GRADIENT:
            keys = load_tile(k + begin * K, rows, valid, 0, K, BLOCK_K)
            tile += leave * product(keys, acc, OPERAND, PRECISION)
            acc *= exponential(end)
            queries = load_tile(q + begin * K, rows, valid, 0, K, BLOCK_K)
            queries *= exponential(passed)[:, None]
            do_tile = load_tile(do + begin * V, rows, valid, start, V, BLOCK_V)
            acc += product(tl.trans(queries), do_tile, OPERAND, PRECISION)
            acc -= product(tl.trans(solved), strength * tile, OPERAND, PRECISION)
        else:
            tile -= product(solved, acc, OPERAND, PRECISION)
            acc *= exponential(end)
            keys = load_tile(k + begin * K, rows, valid, 0, K, BLOCK_K) * leave
            acc += product(tl.trans(keys), strength * tile, OPERAND, PRECISION)
        tl.store(error_pointers, tile, mask=mask)
    tl.store(kv_out + program * (K * V) + state_offsets, acc, mask=inside)


@jit
def read_direction(
    scores, q, errors, before, strength, decays, direction, batch, tokens, chunks, sample, head,
    chunk, t, valid, start,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, HAS_DECAYS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a block of values of the outputs of one direction."""
    rows = (tl.arange(0, BLOCK_T) * H)[:, None]
    passed, _ = passed_decay(
        decays, direction, batch, sample, t, tokens, head, H, HAS_DECAYS, BLOCK_T
    )
    begin = ((direction * batch + sample) * tokens + chunk * BLOCK_T) * H + head
    row = ((direction * batch + sample) * H + head) * chunks + chunk
    weights = scores * decay_between(passed, direction, True, HAS_DECAYS, BLOCK_T)
    error_tile = load_tile(errors + begin * V, rows, t < tokens, start, V, BLOCK_V)
    acc = product(weights * strength[None, :], error_tile, OPERAND, PRECISION)
    return acc + exponential(passed)[:, None] * read_state(
        q, before, row, rows, valid, start, K, V,
        BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION,
    )  # fmt: skip


@kernel(read_blocks, *DIRECTIONS)
def read(
    q, k, v, beta, decays, keep, errors, before,
    o,
    batch, tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BOTH: tl.constexpr,
    HAS_DECAYS: tl.constexpr, HAS_KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of a chunk."""
    head, sample, chunk, t, valid, begin = chunk_of(keep, batch, tokens, H, HAS_KEEP, BLOCK_T)
    q, k, v, o = q + begin * K, k + begin * K, v + begin * V, o + begin * V
    i = tl.arange(0, BLOCK_T)
    rows = (i * H)[:, None]
    strength = tl.load(beta + begin + i * H, mask=valid, other=0)
    scores = scores_of(q, k, rows, valid, K, BLOCK_T, BLOCK_K, OPERAND, PRECISION)
    self_weights = strength * self_scores(q, k, rows, valid, K, BLOCK_T, BLOCK_K)
    for start in range(0, V, BLOCK_V):
        acc = read_direction(
            scores, q, errors, before, strength, decays, 0, batch, tokens, chunks, sample, head,
            chunk, t, valid, start, H, K, V, HAS_DECAYS,
            BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION,
        )  # fmt: skip
        if BOTH:
            acc += read_direction(
                scores, q, errors, before, strength, decays, 1, batch, tokens, chunks, sample,
                head, chunk, t, valid, start, H, K, V, HAS_DECAYS,
                BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION,
            )  # fmt: skip
            acc -= self_weights[:, None] * load_tile(v, rows, valid, start, V, BLOCK_V)
        e = start + tl.arange(0, BLOCK_V)
        mask = (t < tokens)[:, None] & (e < V)[None, :]
        tl.store(o + rows * V + e[None, :], acc, mask=mask)


@kernel(pair_blocks)
def pair_gradients(
    q, k, beta, decays, keep, do, errors, inverse, derrors,
    dbetas, ddecays, pairs, key_pairs,
    batch, tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    HAS_DECAYS: tl.constexpr, HAS_DDECAYS: tl.constexpr, HAS_KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute R, X and Y B + B Y^T of a chunk and direction, and the gradients of beta.

    derrors: dN, which is replaced by R. dbetas: [D, B, T, H]. ddecays: the part of the gradients of
    log-decays that passes through M, [D, B, T, H].
    pairs, key_pairs: X and Y B + B Y^T, [D, B, T, H, C].
    """
    head, sample, _, t, valid, begin = chunk_of(keep, batch, tokens, H, HAS_KEEP, BLOCK_T)
    direction = tl.program_id(1)
    first_row = begin + direction * (batch * H).to(tl.int64) * tokens
    q, k, do = q + begin * K, k + begin * K, do + begin * V
    errors, derrors = errors + first_row * V, derrors + first_row * V
    line = tl.arange(0, BLOCK_T) * H
    rows = line[:, None]
    strength = tl.load(beta + begin + line, mask=valid, other=0)
    solved = load_tile(inverse + first_row * BLOCK_T, rows, t < tokens, 0, BLOCK_T, BLOCK_T)
    x = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    y = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    of_beta = tl.zeros([BLOCK_T], tl.float32)
    for start in range(0, V, BLOCK_V):
        e = start + tl.arange(0, BLOCK_V)[None, :]
        mask = (t < tokens)[:, None] & (e < V)
        do_tile = load_tile(do, rows, valid, start, V, BLOCK_V)
        error_tile = load_tile(errors, rows, t < tokens, start, V, BLOCK_V)
        derror_tile = tl.load(derrors + rows * V + e, mask=mask, other=0).to(tl.float32)
        of_v = product(tl.trans(solved), strength[:, None] * derror_tile, OPERAND, PRECISION)
        tl.store(derrors + rows * V + e, of_v, mask=mask)
        x += product(do_tile, tl.trans(error_tile), OPERAND, PRECISION)
        y += product(of_v, tl.trans(error_tile), OPERAND, PRECISION)
        of_beta += tl.sum(derror_tile * error_tile.to(tl.float32), 1)
    passed, _ = passed_decay(
        decays, direction, batch, sample, t, tokens, head, H, HAS_DECAYS, BLOCK_T
    )
    x *= decay_between(passed, direction, True, HAS_DECAYS, BLOCK_T) * strength[None, :]
    y *= -decay_between(passed, direction, False, HAS_DECAYS, BLOCK_T)
    gram = scores_of(k, k, rows, valid, K, BLOCK_T, BLOCK_K, OPERAND, PRECISION)
    of_beta += tl.sum(y * gram, 0)
    tl.store(dbetas + first_row + line, of_beta, mask=t < tokens)
    y *= strength[None, :]
    i, j = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_T)[None, :]
    if HAS_DDECAYS:  # a decay applies between the tokens visited before it and all others
        scores = scores_of(q, k, rows, valid, K, BLOCK_T, BLOCK_K, OPERAND, PRECISION)
        before = tl.where(direction == 0, i < j, i > j)
        pair_products = tl.where(i == j, 0.0, x * scores + y * gram)
        crossing = product(pair_products, tl.where(before, 1.0, 0.0), OPERAND, PRECISION)
        change = tl.sum(tl.where(before, 0.0, crossing), 0)
        tl.store(ddecays + first_row + line, change, mask=t < tokens)
    pair_offsets = first_row * BLOCK_T + rows * BLOCK_T + j
    tl.store(pairs + pair_offsets, x, mask=(t < tokens)[:, None])
    tl.store(key_pairs + pair_offsets, y + tl.trans(y), mask=(t < tokens)[:, None])


@jit
def through_states(
    q, k, do, errors, derrors, before, after, strength, decays, direction, batch, tokens, chunks,
    sample, head, chunk, t, valid, first,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, HAS_DECAYS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the parts of dq, dk and dg that pass through the states of one direction."""
    rows = (tl.arange(0, BLOCK_T) * H)[:, None]
    passed, end = passed_decay(
        decays, direction, batch, sample, t, tokens, head, H, HAS_DECAYS, BLOCK_T
    )
    first_row = ((direction * batch + sample) * tokens + chunk * BLOCK_T) * H + head
    row = ((direction * batch + sample) * H + head) * chunks + chunk
    of_q = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    of_read = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    of_write = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    products = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    for start in range(0, V, BLOCK_V):
        do_tile = load_tile(do, rows, valid, start, V, BLOCK_V)
        of_v = load_tile(derrors + first_row * V, rows, t < tokens, start, V, BLOCK_V)
        error_tile = load_tile(errors + first_row * V, rows, t < tokens, start, V, BLOCK_V)
        kv = load_state(before, row, first, start, K, V, BLOCK_K, BLOCK_V)
        dkv = load_state(after, row, first, start, K, V, BLOCK_K, BLOCK_V)
        of_q += product(do_tile, tl.trans(kv), OPERAND, PRECISION)
        of_read += product(of_v, tl.trans(kv), OPERAND, PRECISION)
        of_write += product(error_tile, tl.trans(dkv), OPERAND, PRECISION)
        if HAS_DECAYS:
            products += kv.to(tl.float32) * dkv.to(tl.float32)
    enter = exponential(passed)[:, None]
    of_q *= enter
    of_read *= enter
    of_write *= (strength * exponential(end - passed))[:, None]
    queries = load_tile(q, rows, valid, first, K, BLOCK_K).to(tl.float32)
    keys = load_tile(k, rows, valid, first, K, BLOCK_K).to(tl.float32)
    entered = tl.sum(of_q * queries - of_read * keys, 1)
    left = tl.sum(of_write * keys, 1)
    if direction == 0:
        of_decay = tl.cumsum(entered, 0, reverse=True) + tl.cumsum(left, 0) - left
    else:
        of_decay = tl.cumsum(entered, 0) + tl.cumsum(left, 0, reverse=True) - left
    of_decay += exponential(end) * tl.sum(tl.sum(products, 1), 0)
    return of_q, of_write - of_read, of_decay


@kernel(gradient_blocks, *DIRECTIONS)
def gradients(
    q, k, v, beta, decays, keep, do, errors, derrors, before, after, pairs, key_pairs, dbetas,
    dq, dk, dv, dbeta, ddecays,
    batch, tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BOTH: tl.constexpr,
    HAS_DECAYS: tl.constexpr, HAS_DDECAYS: tl.constexpr, HAS_KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of queries and keys, and add the states' part of those of log-decays.

    BOTH: also sum the gradients of values and beta over directions, and subtract the contribution
    of each token's own output, which is counted twice.
    """
    head, sample, chunk, t, valid, begin = chunk_of(keep, batch, tokens, H, HAS_KEEP, BLOCK_T)
    across = (batch * H).to(tl.int64) * tokens
    q, k, v, do, dv = q + begin * K, k + begin * K, v + begin * V, do + begin * V, dv + begin * V
    line = tl.arange(0, BLOCK_T) * H
    rows = line[:, None]
    strength = tl.load(beta + begin + line, mask=valid, other=0)
    if BOTH:
        self_weights = self_scores(q, k, rows, valid, K, BLOCK_T, BLOCK_K)
        of_self = tl.zeros([BLOCK_T], tl.float32)
        for start in range(0, V, BLOCK_V):
            e = start + tl.arange(0, BLOCK_V)[None, :]
            do_tile = load_tile(do, rows, valid, start, V, BLOCK_V).to(tl.float32)
            of_self += tl.sum(do_tile * load_tile(v, rows, valid, start, V, BLOCK_V), 1)
            left = load_tile(derrors + begin * V, rows, t < tokens, start, V, BLOCK_V)
            right = load_tile(derrors + (begin + across) * V, rows, t < tokens, start, V, BLOCK_V)
            of_v = left.to(tl.float32) + right - (strength * self_weights)[:, None] * do_tile
            tl.store(dv + rows * V + e, of_v, mask=(t < tokens)[:, None] & (e < V))
        left = tl.load(dbetas + begin + line, mask=t < tokens, other=0)
        right = tl.load(dbetas + across + begin + line, mask=t < tokens, other=0)
        tl.store(dbeta + begin + line, left + right - self_weights * of_self, mask=t < tokens)
    to_right = tl.zeros([BLOCK_T], tl.float32)
    to_left = tl.zeros([BLOCK_T], tl.float32)
    for first in range(0, K, BLOCK_K):
        queries = load_tile(q, rows, valid, first, K, BLOCK_K)
        keys = load_tile(k, rows, valid, first, K, BLOCK_K)
        of_q = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
        of_k = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
        if BOTH:
            of_q -= (strength * of_self)[:, None] * keys
            of_k -= (strength * of_self)[:, None] * queries
        for direction in range(2 if BOTH else 1):
            pair_offset = (begin + direction * across) * BLOCK_T
            x = load_tile(pairs + pair_offset, rows, t < tokens, 0, BLOCK_T, BLOCK_T)
            y = load_tile(key_pairs + pair_offset, rows, t < tokens, 0, BLOCK_T, BLOCK_T)
            of_q += product(x, keys, OPERAND, PRECISION)
            of_k += product(tl.trans(x), queries, OPERAND, PRECISION)
            of_k += product(y, keys, OPERAND, PRECISION)
            q_part, k_part, change = through_states(
                q, k, do, errors, derrors, before, after, strength, decays, direction, batch,
                tokens, chunks, sample, head, chunk, t, valid, first, H, K, V, HAS_DECAYS,
                BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION,
            )  # fmt: skip
            of_q += q_part
            of_k += k_part
            to_right += tl.where(direction == 0, change, 0.0)
            to_left += tl.where(direction == 0, 0.0, change)
        c = first + tl.arange(0, BLOCK_K)[None, :]
        mask = (t < tokens)[:, None] & (c < K)
        offsets = begin * K + rows * K + c
        tl.store(dq + offsets, of_q, mask=mask)
        tl.store(dk + offsets, tl.where(valid[:, None], of_k, 0.0), mask=mask)
    if HAS_DDECAYS:
        pointers = ddecays + begin + line
        tl.store(pointers, tl.load(pointers, mask=t < tokens, other=0) + to_right, mask=t < tokens)
        if BOTH:
            pointers += across
            tl.store(
                pointers, tl.load(pointers, mask=t < tokens, other=0) + to_left, mask=t < tokens
            )
