"""Causal additive decay in chunks: matrix products within, a state carried between them.

The normalizer is n_t = sum_{s <= t} exp(k_s). Within a chunk, normalizers are relative to the same
reference r, the largest logit up to the end of the chunk, so that no decay is needed:

    w_s = exp(k_s - r),  p_t = q_t / n_t
    o_t = sum_{s <= t} <R(p_t), R(w_s)> v_s + (n_c / n_t) KV_c^T R(q_t)        read_chunks

with the normalizer n_c and the state KV_c before the chunk (carry_forward). In the backward pass,
with H_c the gradient of the state after a chunk and D_c the gradient of its log-normalizer, both
through later tokens:

    dq_t = R^T of the factor of R(q_t) above                                   query_gradients
    dz_t = -q_t dq_t                                                           for log n_t
    H_{c-1} = (n_{c-1} / n_c) H_c + sum_t R(q_t n_{c-1} / n_t) do_t^T          carry_backward
    D_{c-1} = (n_{c-1} / n_c) D_c + sum_t dz_t n_{c-1} / n_t
    dk_s = (exp(k_s) / n_t) dz_t summed over t >= s, plus R^T of R(w_s)'s      key_gradients
    dv_s = the transpose of o_t as a function of v_s, of do                    read_chunks

If logits rise by more than 40 within a chunk, 1 / n_t exceeds the range of float32. In such a
chunk, each token has its own reference, computed row by row, which is slower and equally exact.

With packed sequences, a chunk holds tokens of one sequence. n_{c-1} is 0 in the first chunk of a
sequence, so that neither the state nor a gradient passes from one sequence to another.

Source: LightNet, arXiv:2405.21022, Eq. 13 and App. A.2.
"""

import triton.language as tl

from onescan.kernels.chips import reads_operands_from_shared, widest_causal_head
from onescan.kernels.common import (
    LOG_ZERO,
    Blocks,
    Case,
    Example,
    jit,
    kernel,
    load_halves,
    load_rotary,
    power_of_two,
    product,
    rows_by_keys,
    span_of,
    store_halves,
    valid_tokens,
)

MIN_MASS = tl.constexpr(4e-18)  # exp(-40)
SHORTEST_CHUNK = 16  # tokens, the smallest size of a matrix product

EXAMPLES = (
    Example(64, 64, lrpe=True, flags={"HAS_DANGLES": True}),
    Example(64, 64, flags={"HAS_KEEP": True, "HAS_KV_IN": True}),
    Example(96, 96, lrpe=True, flags={"HAS_KEEP": True, "HAS_KV_IN": True, "HAS_DANGLES": True}),
    Example(128, 128, lrpe=True, flags={"HAS_DANGLES": True}),
    Example(64, 64, lrpe=True, flags={"HAS_DANGLES": True, "HAS_SPANS": True}),
    Example(128, 128, lrpe=True, flags={"HAS_KEEP": True, "HAS_DANGLES": True, "HAS_SPANS": True}),
)


def fits(case: Case) -> bool:
    """Return whether a chip has enough registers for a head."""
    return case.key_width <= widest_causal_head(case.data, case.chip)


def chunk_length(case: Case) -> int:
    """Return the largest power of two, at most `chunk_size`, whose scores fit in registers."""
    if case.data == "fp32":  # its tf32 parts need registers too
        longest = SHORTEST_CHUNK
    else:
        longest = 64 if case.data == "bf16" and reads_operands_from_shared(case.chip) else 32
    return max(SHORTEST_CHUNK, min(1 << (case.chunk_size.bit_length() - 1), longest))


def carry_blocks(case: Case) -> Blocks:
    """Return the blocks of kernels that carry a state, with BLOCK_K x BLOCK_V for each half."""
    values = power_of_two(case.value_width)
    size = 4096 if case.data == "bf16" and reads_operands_from_shared(case.chip) else 2048
    keys = min(power_of_two(case.key_width), max(16, size // values))
    return Blocks(chunk_length(case), keys, values, warps=8 if size == 4096 else 4, stages=2)


def chunk_blocks(case: Case) -> Blocks:
    """Return the blocks of kernels that process one chunk per program."""
    values, chunk = power_of_two(case.value_width), chunk_length(case)
    wide = case.data == "bf16" and reads_operands_from_shared(case.chip)
    keys = min(power_of_two(case.key_width), 32 if wide else 16)
    few = (values <= 64 and chunk <= 32) or case.data == "fp32" or case.chip.startswith("gfx")
    return Blocks(
        chunk, keys, values, warps=4 if few else 8, stages=1 if case.data == "fp32" else 2
    )


@kernel(carry_blocks)
def carry_forward(
    k, v, rotary, keep, z_in, kv_in,
    reference, mass, before, z, kv,
    spans, tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LRPE: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_KV_IN: tl.constexpr, HAS_SPANS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the state before each chunk, and the state after the last one.

    before: [B, N, H, F, V]. Its normalizer is given by reference and mass, [B, N + 1, H, K].
    """
    of_head = tl.program_id(0).to(tl.int64)
    sample, head = of_head // H, of_head % H
    c = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    e = tl.arange(0, BLOCK_V)
    r = tl.arange(0, CHUNK)[:, None]
    width: tl.constexpr = K * V * (2 if LRPE else 1)
    m = tl.full([BLOCK_K], float("-inf"), tl.float32)
    n = tl.zeros([BLOCK_K], tl.float32)
    cos_half = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    sin_half = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if HAS_KV_IN:
        exact = tl.load(z_in + of_head * K + c, mask=c < K, other=LOG_ZERO)
        has_tokens = exact > LOG_ZERO / 2  # LOG_ZERO may be rounded to float32, but z_in is not
        m = tl.where(has_tokens, exact.to(tl.float32), float("-inf"))
        n = tl.where(has_tokens, tl.exp((exact - tl.where(has_tokens, m, 0.0)).to(tl.float32)), 0.0)
        cos_half, sin_half = load_halves(kv_in + of_head * width, c, e, K, V, LRPE)
        cos_half, sin_half = cos_half * n[:, None], sin_half * n[:, None]
    for chunk in range(chunks):
        start, stop, continues, _ = span_of(spans, sample, chunk, chunks, CHUNK, tokens, HAS_SPANS)
        offsets = ((sample * (chunks + 1) + chunk) * H + head) * K + c
        finite = tl.where(n > 0, m, LOG_ZERO)
        tl.store(reference + offsets, finite, mask=c < K)
        tl.store(mass + offsets, n, mask=c < K)
        scale = (1 / tl.where(n > 0, n, 1.0))[:, None]
        state_pointers = before + ((sample * chunks + chunk) * H + head) * width
        store_halves(state_pointers, c, e, cos_half * scale, sin_half * scale, K, V, LRPE)
        if HAS_SPANS:  # without tokens so far, the state and the normalizer are multiplied by 0
            m = tl.where(continues, m, float("-inf"))
        t = start + tl.arange(0, CHUNK)
        valid = (valid_tokens(keep, sample, t, tokens, HAS_KEEP) & (t < stop))[:, None]
        row = (sample * tokens + start) * H + head
        at_k = row * K + r * (H * K) + c[None, :]
        logits = tl.load(k + at_k, mask=valid & (c < K)[None, :], other=float("-inf"))
        logits = logits.to(tl.float32)
        at_v = row * V + r * (H * V) + e[None, :]
        values = tl.load(v + at_v, mask=valid & (e < V)[None, :], other=0)
        higher = tl.maximum(m, tl.max(logits, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        decay = tl.exp(m - base)
        w = tl.exp(logits - base[None, :])
        m, n = higher, n * decay + tl.sum(w, 0)
        if LRPE:
            cos, sin = load_rotary(rotary, start, r, head, c, tokens, H, K)
            added = product(tl.trans(w * sin), values, OPERAND, PRECISION)
            sin_half = sin_half * decay[:, None] + added
            w *= cos
        cos_half = cos_half * decay[:, None] + product(tl.trans(w), values, OPERAND, PRECISION)
    offsets = ((sample * (chunks + 1) + chunks) * H + head) * K + c
    finite = tl.where(n > 0, m, LOG_ZERO)
    n = tl.where(n > 0, n, 1.0)
    tl.store(reference + offsets, finite, mask=c < K)
    tl.store(mass + offsets, n, mask=c < K)
    exact = finite.to(tl.float64) + tl.log(n.to(tl.float64))
    tl.store(z + of_head * K + c, exact, mask=c < K)
    cos_half, sin_half = cos_half / n[:, None], sin_half / n[:, None]
    store_halves(kv + of_head * width, c, e, cos_half, sin_half, K, V, LRPE)


@jit
def chunk_of(
    keep, spans, tokens, chunks,
    H: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_SPANS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return a program's head and tokens, whether a state enters, and the offsets of its data.

    The tokens are given by the first one, and by which exist and which are real, both [C, 1].
    `row` is an index into [B, T, H], `normalizer` into [B, N + 1, H] and `state` into [B, N, H].
    """
    program = tl.program_id(0).to(tl.int64)
    chunk, head, sample = program % chunks, program // chunks % H, program // chunks // H
    start, stop, continues, _ = span_of(spans, sample, chunk, chunks, CHUNK, tokens, HAS_SPANS)
    t = start + tl.arange(0, CHUNK)
    exists = (t < stop)[:, None]
    valid = valid_tokens(keep, sample, t, tokens, HAS_KEEP)[:, None] & exists
    row = (sample * tokens + start) * H + head
    normalizer = (sample * (chunks + 1) + chunk) * H + head
    state = (sample * chunks + chunk) * H + head
    return head, start, exists, valid, continues, row, normalizer, state


@jit
def load_logits(
    k, reference, mass, key_mask, inside, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Load the logits of a tile [C, K], and the normalizers of the incoming state and all tokens.

    The normalizer of a token is exp(peak) * total, and that of the state is exp(r_in) * n_in, which
    is 0 unless `inside`.
    Logits are `steep` if they rise too much for all tokens to share one peak.
    """
    logits = tl.load(k, mask=key_mask, other=float("-inf")).to(tl.float32)
    r_in = tl.load(reference, mask=inside, other=LOG_ZERO)
    n_in = tl.load(mass, mask=inside, other=0)
    m = tl.maximum(r_in, tl.max(logits, 0))
    w = tl.exp(logits - m[None, :])
    total = tl.cumsum(w, 0) + (n_in * tl.exp(r_in - m))[None, :]
    count = (n_in > 0).to(tl.float32)[None, :] + tl.cumsum((logits > LOG_ZERO).to(tl.float32), 0)
    reads = count > 0
    steep = tl.max(tl.max((reads & (total < MIN_MASS)).to(tl.int32), 1), 0) > 0
    peak = tl.zeros([CHUNK, BLOCK_K], tl.float32) + m[None, :]
    if steep:
        token = tl.arange(0, CHUNK)[:, None]
        high, sum_so_far = r_in, n_in
        for t in range(CHUNK):
            logit = tl.max(tl.where(token == t, logits, float("-inf")), 0)
            higher = tl.maximum(high, logit)
            sum_so_far = sum_so_far * tl.exp(high - higher) + tl.exp(logit - higher)
            high = higher
            peak = tl.where(token == t, high[None, :], peak)
            total = tl.where(token == t, sum_so_far[None, :], total)
    return logits, r_in, n_in, peak, tl.where(reads, total, 1.0), steep


@jit
def state_share(peak, total, r_in, n_in):
    """Compute the state's fraction of each token's normalizer, n_c / n_t, which is at most 1."""
    return n_in[None, :] * tl.exp(r_in[None, :] - peak) / total


@jit
def row_of(tile, t, CHUNK: tl.constexpr):
    """Return row t of a tile in registers."""
    return tl.sum(tl.where(tl.arange(0, CHUNK)[:, None] == t, tile, 0.0), 0)


@jit
def weights_of(t, logits, peak, total, CHUNK: tl.constexpr):
    """Compute the weights of a chunk's tokens for token t, [C, K]: at most 1, and 0 after t."""
    exponent = logits - row_of(peak, t, CHUNK)[None, :]
    earlier = tl.arange(0, CHUNK)[:, None] <= t
    w = tl.exp(tl.where(earlier, exponent, float("-inf")))
    return w / row_of(total, t, CHUNK)[None, :]


@jit
def scores_of(
    queries, logits, peak, total, steep, cos, sin,
    LRPE: tl.constexpr, CHUNK: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the contribution of a block of channels to the scores [C, C], before masking."""
    if steep:
        scores = tl.zeros([CHUNK, CHUNK], tl.float32)
        token = tl.arange(0, CHUNK)[:, None]
        for t in range(CHUNK):
            w = weights_of(t, logits, peak, total, CHUNK) * row_of(queries, t, CHUNK)[None, :]
            if LRPE:
                w *= cos * row_of(cos, t, CHUNK)[None, :] + sin * row_of(sin, t, CHUNK)[None, :]
            scores = tl.where(token == t, tl.sum(w, 1)[None, :], scores)
    else:
        p, w = queries / total, tl.exp(logits - peak)
        if LRPE:
            scores = product(p * cos, tl.trans(w * cos), OPERAND, PRECISION)
            scores += product(p * sin, tl.trans(w * sin), OPERAND, PRECISION)
        else:
            scores = product(p, tl.trans(w), OPERAND, PRECISION)
    return scores


@jit
def pair_products(
    x, y, row, r, valid,
    H: tl.constexpr, V: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute x_t . y_s for all pairs of tokens of a chunk, [C, C]; x and y are [T, H, V]."""
    acc = tl.zeros([CHUNK, CHUNK], tl.float32)
    for left in range(0, V, BLOCK_W):
        e = left + tl.arange(0, BLOCK_W)
        offsets = row * V + r * (H * V) + e[None, :]
        value_mask = valid & (e < V)[None, :]
        right = tl.trans(tl.load(y + offsets, mask=value_mask, other=0))
        acc += product(tl.load(x + offsets, mask=value_mask, other=0), right, OPERAND, PRECISION)
    return acc


@jit
def weights_after(logits, reference, mass, mask):
    """Compute each token's weight in the state after its chunk, given its normalizer."""
    r_out = tl.load(reference, mask=mask, other=LOG_ZERO)
    n_out = tl.load(mass, mask=mask, other=1)
    return tl.exp(logits - r_out[None, :]) * (1 / tl.where(n_out > 0, n_out, 1.0))[None, :]


@kernel(chunk_blocks, {"TRANSPOSED": False}, {"TRANSPOSED": True})
def read_chunks(
    q, k, v, rotary, keep, reference, mass, before,
    o,
    spans, tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LRPE: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_SPANS: tl.constexpr, TRANSPOSED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of one chunk from its own tokens and the state before it.

    TRANSPOSED: compute gradients of values instead. Pass dO as v, the gradient of the state after
    the chunk as before, and dV as o.
    """
    head, start, exists, valid, continues, row, normalizer, state = chunk_of(
        keep, spans, tokens, chunks, H, HAS_KEEP, HAS_SPANS, CHUNK
    )
    r, e = tl.arange(0, CHUNK)[:, None], tl.arange(0, BLOCK_V)
    half: tl.constexpr = K * V
    reference, mass = reference + normalizer * K, mass + normalizer * K
    before += state * (half * (2 if LRPE else 1))
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    acc = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    for first in range(0, K, BLOCK_K):
        c = first + tl.arange(0, BLOCK_K)
        offsets = row * K + r * (H * K) + c[None, :]
        key_mask = valid & (c < K)[None, :]
        queries = tl.load(q + offsets, mask=key_mask, other=0).to(tl.float32)
        logits, r_in, n_in, peak, total, steep = load_logits(
            k + offsets, reference + c, mass + c, key_mask, (c < K) & continues, CHUNK, BLOCK_K
        )
        cos, sin = queries, queries
        if LRPE:
            cos, sin = load_rotary(rotary, start, r, head, c, tokens, H, K)
        scores += scores_of(
            queries, logits, peak, total, steep, cos, sin, LRPE, CHUNK, OPERAND, PRECISION
        )
        if TRANSPOSED:
            w = weights_after(logits, reference + H * K + c, mass + H * K + c, c < K)
        else:
            w = queries * state_share(peak, total, r_in, n_in)
        pointers = before + c[:, None] * V + e[None, :]
        inside = (c < K)[:, None] & (e < V)[None, :]
        if LRPE:
            sin_half = tl.load(pointers + half, mask=inside, other=0)
            acc += product(w * sin, sin_half, OPERAND, PRECISION)
            w *= cos
        acc += product(w, tl.load(pointers, mask=inside, other=0), OPERAND, PRECISION)
    scores = tl.where(r >= tl.arange(0, CHUNK)[None, :], scores, 0.0)
    at_v = row * V + r * (H * V) + e[None, :]
    values = tl.load(v + at_v, mask=valid & (e < V)[None, :], other=0)
    if TRANSPOSED:
        acc += product(tl.trans(scores), values, OPERAND, PRECISION)
        acc = tl.where(valid, acc, 0.0)
    else:
        acc += product(scores, values, OPERAND, PRECISION)
    tl.store(o + at_v, acc, mask=exists & (e < V)[None, :])


@kernel(chunk_blocks)
def query_gradients(
    q, k, v, rotary, keep, reference, mass, before, do,
    dq, dangles,
    spans, tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LRPE: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_DANGLES: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the queries of one chunk, and of the angles through queries."""
    head, start, exists, valid, continues, row, normalizer, state = chunk_of(
        keep, spans, tokens, chunks, H, HAS_KEEP, HAS_SPANS, CHUNK
    )
    r = tl.arange(0, CHUNK)[:, None]
    half: tl.constexpr = K * V
    reference, mass = reference + normalizer * K, mass + normalizer * K
    before += state * (half * (2 if LRPE else 1))
    dscores = pair_products(do, v, row, r, valid, H, V, CHUNK, BLOCK_W, OPERAND, PRECISION)
    dscores = tl.where(r >= tl.arange(0, CHUNK)[None, :], dscores, 0.0)
    for first in range(0, K, BLOCK_K):
        c = first + tl.arange(0, BLOCK_K)
        offsets = row * K + r * (H * K) + c[None, :]
        key_mask = valid & (c < K)[None, :]
        logits, r_in, n_in, peak, total, steep = load_logits(
            k + offsets, reference + c, mass + c, key_mask, (c < K) & continues, CHUNK, BLOCK_K
        )
        share = state_share(peak, total, r_in, n_in)
        dq_cos = share * rows_by_keys(
            do, row, before, r, c, valid, H, K, V, CHUNK, BLOCK_K, BLOCK_W, OPERAND, PRECISION
        )
        cos, sin, dq_sin = share, share, share
        if LRPE:
            cos, sin = load_rotary(rotary, start, r, head, c, tokens, H, K)
            dq_sin = share * rows_by_keys(
                do, row, before + half, r, c, valid, H, K, V, CHUNK, BLOCK_K, BLOCK_W,
                OPERAND, PRECISION,
            )  # fmt: skip
        if steep:
            for t in range(CHUNK):
                w = weights_of(t, logits, peak, total, CHUNK) * row_of(dscores, t, CHUNK)[:, None]
                if LRPE:
                    dq_sin = tl.where(r == t, dq_sin + tl.sum(w * sin, 0)[None, :], dq_sin)
                    w *= cos
                dq_cos = tl.where(r == t, dq_cos + tl.sum(w, 0)[None, :], dq_cos)
        else:
            w = tl.exp(logits - peak)
            if LRPE:
                dq_sin += product(dscores, w * sin, OPERAND, PRECISION) / total
                w *= cos
            dq_cos += product(dscores, w, OPERAND, PRECISION) / total
        written = exists & (c < K)[None, :]
        if LRPE:
            if HAS_DANGLES:
                queries = tl.load(q + offsets, mask=key_mask, other=0).to(tl.float32)
                tl.store(dangles + offsets, queries * (dq_sin * cos - dq_cos * sin), mask=written)
            dq_cos = dq_cos * cos + dq_sin * sin
        tl.store(dq + offsets, dq_cos, mask=written)


@kernel(carry_blocks, {"HAS_DKV_OUT": False}, {"HAS_DKV_OUT": True})
def carry_backward(
    q, k, rotary, keep, reference, mass, do, dq, dz_out, dkv_out,
    after, dmass, dz_in, dkv_in,
    spans, tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LRPE: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_DKV_OUT: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the state after each chunk, and of the state before the first one.

    after: gradients of states, [B, N, H, F, V]; dmass: gradients of their log-normalizers,
    [B, N, H, K]; dz_out: gradient of the last log-normalizer through the outgoing state.
    """
    of_head = tl.program_id(0).to(tl.int64)
    sample, head = of_head // H, of_head % H
    c = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    e = tl.arange(0, BLOCK_V)
    r = tl.arange(0, CHUNK)[:, None]
    width: tl.constexpr = K * V * (2 if LRPE else 1)
    d = tl.zeros([BLOCK_K], tl.float32)
    cos_half = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    sin_half = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if HAS_DKV_OUT:
        d = tl.load(dz_out + of_head * K + c, mask=c < K, other=0)
        cos_half, sin_half = load_halves(dkv_out + of_head * width, c, e, K, V, LRPE)
    offsets = ((sample * (chunks + 1) + chunks) * H + head) * K + c
    r_out = tl.load(reference + offsets, mask=c < K, other=LOG_ZERO)
    n_out = tl.load(mass + offsets, mask=c < K, other=1)
    for back in range(chunks):
        chunk = chunks - 1 - back
        start, stop, continues, _ = span_of(spans, sample, chunk, chunks, CHUNK, tokens, HAS_SPANS)
        state_pointers = after + ((sample * chunks + chunk) * H + head) * width
        store_halves(state_pointers, c, e, cos_half, sin_half, K, V, LRPE)
        tl.store(dmass + ((sample * chunks + chunk) * H + head) * K + c, d, mask=c < K)
        t = start + tl.arange(0, CHUNK)
        valid = (valid_tokens(keep, sample, t, tokens, HAS_KEEP) & (t < stop))[:, None]
        row = (sample * tokens + start) * H + head
        at_k = row * K + r * (H * K) + c[None, :]
        key_mask = valid & (c < K)[None, :]
        offsets = ((sample * (chunks + 1) + chunk) * H + head) * K + c
        if HAS_SPANS:  # the next chunk may not have read the state after this one
            r_out = tl.load(reference + offsets + H * K, mask=c < K, other=LOG_ZERO)
            n_out = tl.load(mass + offsets + H * K, mask=c < K, other=1)
        _, r_in, n_in, peak, total, _ = load_logits(
            k + at_k,
            reference + offsets,
            mass + offsets,
            key_mask,
            (c < K) & continues,
            CHUNK,
            BLOCK_K,
        )
        decay = n_in * tl.exp(r_in - r_out) / tl.where(n_out > 0, n_out, 1.0)
        queries = tl.load(q + at_k, mask=key_mask, other=0).to(tl.float32)
        queries *= state_share(peak, total, r_in, n_in)
        gradients = tl.load(dq + at_k, mask=key_mask, other=0).to(tl.float32)
        d = d * decay - tl.sum(queries * gradients, 0)
        at_v = row * V + r * (H * V) + e[None, :]
        gradient = tl.load(do + at_v, mask=valid & (e < V)[None, :], other=0)
        if LRPE:
            cos, sin = load_rotary(rotary, start, r, head, c, tokens, H, K)
            added = product(tl.trans(queries * sin), gradient, OPERAND, PRECISION)
            sin_half = sin_half * decay[:, None] + added
            queries *= cos
        added = product(tl.trans(queries), gradient, OPERAND, PRECISION)
        cos_half = cos_half * decay[:, None] + added
        r_out, n_out = r_in, n_in
    tl.store(dz_in + of_head * K + c, d, mask=c < K)
    store_halves(dkv_in + of_head * width, c, e, cos_half, sin_half, K, V, LRPE)


@kernel(chunk_blocks)
def key_gradients(
    q, k, v, rotary, keep, reference, mass, after, dmass, do, dq,
    dk, dangles,
    spans, tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LRPE: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_DANGLES: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the keys of one chunk, and add to the gradients of the angles."""
    head, start, exists, valid, continues, row, normalizer, state = chunk_of(
        keep, spans, tokens, chunks, H, HAS_KEEP, HAS_SPANS, CHUNK
    )
    r = tl.arange(0, CHUNK)[:, None]
    half: tl.constexpr = K * V
    reference, mass = reference + normalizer * K, mass + normalizer * K
    after += state * (half * (2 if LRPE else 1))
    dmass += state * K
    earlier = r <= tl.arange(0, CHUNK)[None, :]  # rows are keys, columns are queries
    dscores = pair_products(v, do, row, r, valid, H, V, CHUNK, BLOCK_W, OPERAND, PRECISION)
    dscores = tl.where(earlier, dscores, 0.0)
    for first in range(0, K, BLOCK_K):
        c = first + tl.arange(0, BLOCK_K)
        offsets = row * K + r * (H * K) + c[None, :]
        key_mask = valid & (c < K)[None, :]
        queries = tl.load(q + offsets, mask=key_mask, other=0).to(tl.float32)
        logits, _, _, peak, total, steep = load_logits(
            k + offsets, reference + c, mass + c, key_mask, (c < K) & continues, CHUNK, BLOCK_K
        )
        cos, sin = queries, queries
        if LRPE:
            cos, sin = load_rotary(rotary, start, r, head, c, tokens, H, K)
        # gradients of the log-normalizers of the chunk's tokens
        dz = -queries * tl.load(dq + offsets, mask=key_mask, other=0).to(tl.float32)
        if steep:
            dlogits = tl.zeros([CHUNK, BLOCK_K], tl.float32)  # gradient of log w through scores
            dangle = tl.zeros([CHUNK, BLOCK_K], tl.float32)  # gradient of the angle
            for t in range(CHUNK):
                w = weights_of(t, logits, peak, total, CHUNK)
                is_column = tl.arange(0, CHUNK)[None, :] == t
                column = tl.sum(tl.where(is_column, dscores, 0.0), 1)[:, None]
                query = column * row_of(queries, t, CHUNK)[None, :]
                dscore = query
                if LRPE:
                    cos_t, sin_t = row_of(cos, t, CHUNK)[None, :], row_of(sin, t, CHUNK)[None, :]
                    dscore = query * (cos * cos_t + sin * sin_t)
                    dangle += w * query * (sin_t * cos - cos_t * sin)
                dlogits += w * (dscore + row_of(dz, t, CHUNK)[None, :])
        else:
            p, w = queries / total, tl.exp(logits - peak)
            dangle = w
            if LRPE:
                of_sin = product(dscores, p * sin, OPERAND, PRECISION)
                of_cos = product(dscores, p * cos, OPERAND, PRECISION)
                dangle = w * (of_sin * cos - of_cos * sin)
                dlogits = of_cos * cos + of_sin * sin
            else:
                dlogits = product(dscores, p, OPERAND, PRECISION)
            dlogits = w * (dlogits + tl.cumsum(dz / total, 0, reverse=True))
        # contributions through the state that later chunks read
        w = weights_after(logits, reference + H * K + c, mass + H * K + c, c < K)
        of_cos = rows_by_keys(
            v, row, after, r, c, valid, H, K, V, CHUNK, BLOCK_K, BLOCK_W, OPERAND, PRECISION
        )
        later = tl.load(dmass + c, mask=c < K, other=0)[None, :]
        written = exists & (c < K)[None, :]
        if LRPE:
            of_sin = rows_by_keys(
                v, row, after + half, r, c, valid, H, K, V, CHUNK, BLOCK_K, BLOCK_W,
                OPERAND, PRECISION,
            )  # fmt: skip
            if HAS_DANGLES:
                da = tl.load(dangles + offsets, mask=written, other=0).to(tl.float32)
                da += dangle + w * (of_sin * cos - of_cos * sin)
                tl.store(dangles + offsets, da, mask=written)
            of_cos = of_cos * cos + of_sin * sin
        tl.store(dk + offsets, dlogits + w * (of_cos + later), mask=written)
