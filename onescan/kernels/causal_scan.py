"""Causal additive decay in chunks: matrix products inside, one sum carried from chunk to chunk.

With n_t = sum_{s <= t} exp(k_s), every normalizer under a reference r of its chunk, the largest
logit up to its end, so that no gate is needed inside it:

    w_s = exp(k_s - r),  p_t = q_t / n_t
    o_t = sum_{s <= t} <R(p_t), R(w_s)> v_s + (n_c / n_t) KV_c^T R(q_t)        read_chunks

with n_c and KV_c of the state before the chunk (carry_forward). Backwards, with H_c the gradient of
the state after a chunk and D_c that of its log-normalizer, both of what comes later:

    dq_t = R^T of what R(q_t) was multiplied with above                        query_gradients
    dz_t = -q_t dq_t                                                           of log n_t
    H_{c-1} = (n_{c-1} / n_c) H_c + sum_t R(q_t n_{c-1} / n_t) do_t^T          carry_backward
    D_{c-1} = (n_{c-1} / n_c) D_c + sum_t dz_t n_{c-1} / n_t
    dk_s = (exp(k_s) / n_t) dz_t summed over t >= s, and what R^T gives        key_gradients
    dv_s = what o has from v_s, of do                                          value_gradients

Logits that climb by more than MOST_CLIMB inside a chunk leave 1 / n_t too little of float32's
range. Such a chunk takes each token under a maximum of its own, row by row: slower, and as exact.

Source: LightNet, arXiv:2405.21022, Eq. 13 and App. A.2.
"""

from collections.abc import Iterator
from typing import Any

import triton.language as tl

from onescan.kernels.chips import reads_operands_from_shared, widest_causal_head
from onescan.kernels.common import (
    LOG_ZERO,
    Blocks,
    Build,
    jit,
    live_tokens,
    multiplication,
    power_of_two,
    product,
    slopes_of,
    turn_of,
    width_at_once,
)

LEAST_MASS = tl.constexpr(4e-18)  # exp(-40)
SHORTEST_CHUNK = 16  # tokens, a side of the smallest matrix product


def carry_blocks(key_width: int, value_width: int, data: str, chip: str, chunk: int) -> Blocks:
    """Of kernels that carry a sum: BLOCK_K x BLOCK_V, of cosines and of sines."""
    values = power_of_two(value_width)
    room = 4096 if data == "bf16" and reads_operands_from_shared(chip) else 2048
    keys = min(power_of_two(key_width), max(16, room // values))
    return Blocks(chunk, keys, values, warps=8 if room == 4096 else 4, stages=2)


def chunk_blocks(key_width: int, value_width: int, data: str, chip: str, chunk: int) -> Blocks:
    """Of kernels whose programs have a chunk each."""
    values = power_of_two(value_width)
    roomy = data == "bf16" and reads_operands_from_shared(chip)
    keys = min(power_of_two(key_width), 32 if roomy else 16)
    few = (values <= 64 and chunk <= 32) or data == "fp32" or chip.startswith("gfx")
    return Blocks(chunk, keys, values, warps=4 if few else 8, stages=1 if data == "fp32" else 2)


def longest_chunk(data: str, chip: str) -> int:
    """Tokens whose scores fit the registers."""
    if data == "fp32":  # is multiplied in pieces, which are held too
        return SHORTEST_CHUNK
    return 64 if data == "bf16" and reads_operands_from_shared(chip) else 32


def with_slopes(constants: dict[str, Any], blocks: Blocks, data: str) -> dict[str, Any]:
    """Constants of the kernels that sum over value channels, some at once."""
    values = {"BLOCK_W": width_at_once(blocks.values, data)}
    return {name: x for name, x in constants.items() if name != "BLOCK_V"} | values


def constants_of(
    heads: int,
    key_width: int,
    value_width: int,
    data: str,
    chip: str,
    blocks: Blocks,
    *,
    lrpe: bool,
    keep: bool,
) -> dict[str, Any]:
    """What all kernels are compiled for; some want STATE or ANGLES too."""
    return {
        "H": heads,
        "K": key_width,
        "V": value_width,
        "LRPE": lrpe,
        "KEEP": keep,
        "CHUNK": blocks.tokens,
        "BLOCK_K": blocks.keys,
        "BLOCK_V": blocks.values,
        **multiplication(data, chip),
    }


# head width, LRPE, keep
BUILT = ((64, True, False), (64, False, True), (96, True, True), (128, True, False))


def builds(data: str, chip: str) -> Iterator[Build]:
    """What `make check-kernels` compiles."""
    table, wide = "fp32" if data == "fp32" else "fp16", "bf16" if data == "bf16" else "fp32"
    chunk = longest_chunk(data, chip)
    for width, lrpe, keep in BUILT:
        if width > widest_causal_head(data, chip):
            continue
        carry, own = (f(width, width, data, chip, chunk) for f in (carry_blocks, chunk_blocks))
        carried, inside = (
            constants_of(8, width, width, data, chip, blocks, lrpe=lrpe, keep=keep)
            for blocks in (carry, own)
        )
        angles = {"ANGLES": lrpe}
        name = f"{width}{' lrpe' if lrpe else ''}{' keep' if keep else ''}"
        qkv, scale = f"data data data {table} i1", "fp32 fp32"
        for kernel, types, constants, blocks in (
            (
                carry_forward,
                f"data data {table} i1 fp64 fp32 {scale} {wide} fp64 fp32 i32 i32",
                {**carried, "STATE": keep},
                carry,
            ),
            (read_chunks, f"{qkv} {scale} {wide} data i32 i32", inside, own),
            (
                query_gradients,
                f"{qkv} {scale} {wide} data data fp32 i32 i32",
                {**with_slopes(inside, own, data), **angles},
                own,
            ),
            (
                carry_backward,
                f"data data {table} i1 {scale} data data fp32 fp32 {wide} fp32 fp32 fp32 i32 i32",
                carried,
                carry,
            ),
            (
                key_gradients,
                f"{qkv} {scale} {wide} fp32 data data data fp32 i32 i32",
                {**with_slopes(inside, own, data), **angles},
                own,
            ),
            (
                value_gradients,
                f"data data {table} i1 {scale} {wide} data data i32 i32",
                inside,
                own,
            ),
        ):
            yield Build(name, kernel, types, constants, blocks)


@jit
def carry_forward(
    k, v, turn, keep, z_in, kv_in,
    reference, mass, before, z, kv,
    tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LRPE: tl.constexpr, KEEP: tl.constexpr, STATE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the state before each chunk, and the one after the last.

    The former is before [B, N, H, F, V], its normalizer reference and mass, [B, N + 1, H, K].
    """
    of_head = tl.program_id(0).to(tl.int64)
    sample, head = of_head // H, of_head % H
    c = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    e = tl.arange(0, BLOCK_V)
    r = tl.arange(0, CHUNK)[:, None]
    half: tl.constexpr = K * V
    width: tl.constexpr = half * (2 if LRPE else 1)
    inside = (c < K)[:, None] & (e < V)[None, :]
    matrix = c[:, None] * V + e[None, :]
    m = tl.full([BLOCK_K], float("-inf"), tl.float32)
    n = tl.zeros([BLOCK_K], tl.float32)
    straight = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    across = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if STATE:
        exact = tl.load(z_in + of_head * K + c, mask=c < K, other=LOG_ZERO)
        some = exact > LOG_ZERO
        m = tl.where(some, exact.to(tl.float32), float("-inf"))
        n = tl.where(some, tl.exp((exact - tl.where(some, m, 0.0)).to(tl.float32)), 0.0)
        place = kv_in + of_head * width + matrix
        straight = tl.load(place, mask=inside, other=0) * n[:, None]
        if LRPE:
            across = tl.load(place + half, mask=inside, other=0) * n[:, None]
    for chunk in range(chunks):
        start = chunk * CHUNK
        at = ((sample * (chunks + 1) + chunk) * H + head) * K + c
        finite = tl.where(n > 0, m, LOG_ZERO)
        tl.store(reference + at, finite, mask=c < K)
        tl.store(mass + at, n, mask=c < K)
        scale = (1 / tl.where(n > 0, n, 1.0))[:, None]
        there = before + ((sample * chunks + chunk) * H + head) * width + matrix
        tl.store(there, straight * scale, mask=inside)
        if LRPE:
            tl.store(there + half, across * scale, mask=inside)
        live = live_tokens(keep, sample, start + tl.arange(0, CHUNK), tokens, KEEP)[:, None]
        row = (sample * tokens + start) * H + head
        at_k = row * K + r * (H * K) + c[None, :]
        logits = tl.load(k + at_k, mask=live & (c < K)[None, :], other=float("-inf"))
        logits = logits.to(tl.float32)
        at_v = row * V + r * (H * V) + e[None, :]
        values = tl.load(v + at_v, mask=live & (e < V)[None, :], other=0)
        higher = tl.maximum(m, tl.max(logits, 0))
        under = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp(m - under)
        w = tl.exp(logits - under[None, :])
        m, n = higher, n * kept + tl.sum(w, 0)
        if LRPE:
            cos, sin = turn_of(turn, start, r, head, c, tokens, H, K)
            own = product(tl.trans(w * sin), values, OPERAND, PRECISION)
            across = across * kept[:, None] + own
            w *= cos
        straight = straight * kept[:, None] + product(tl.trans(w), values, OPERAND, PRECISION)
    at = ((sample * (chunks + 1) + chunks) * H + head) * K + c
    finite = tl.where(n > 0, m, LOG_ZERO)
    n = tl.where(n > 0, n, 1.0)
    tl.store(reference + at, finite, mask=c < K)
    tl.store(mass + at, n, mask=c < K)
    exact = finite.to(tl.float64) + tl.log(n.to(tl.float64))
    tl.store(z + of_head * K + c, exact, mask=c < K)
    place = kv + of_head * width + matrix
    tl.store(place, straight / n[:, None], mask=inside)
    if LRPE:
        tl.store(place + half, across / n[:, None], mask=inside)


@jit
def normalizers(logits, r_in, n_in, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Each token's normalizer, exp(peak) total, of tiles [C, K]; and whether logits are steep.

    They are where they climb too far for all tokens to be under one peak. `r_in` and `n_in` are
    the normalizer of the state before.
    """
    m = tl.maximum(r_in, tl.max(logits, 0))
    w = tl.exp(logits - m[None, :])
    total = tl.cumsum(w, 0) + (n_in * tl.exp(r_in - m))[None, :]
    some = (n_in > 0).to(tl.float32)[None, :] + tl.cumsum((logits > LOG_ZERO).to(tl.float32), 0)
    reads = some > 0
    steep = tl.max(tl.max((reads & (total < LEAST_MASS)).to(tl.int32), 1), 0) > 0
    peak = tl.zeros([CHUNK, BLOCK_K], tl.float32) + m[None, :]
    if steep:
        token = tl.arange(0, CHUNK)[:, None]
        high, sum_so_far = r_in, n_in
        for t in range(CHUNK):
            own = tl.max(tl.where(token == t, logits, float("-inf")), 0)
            higher = tl.maximum(high, own)
            sum_so_far = sum_so_far * tl.exp(high - higher) + tl.exp(own - higher)
            high = higher
            peak = tl.where(token == t, high[None, :], peak)
            total = tl.where(token == t, sum_so_far[None, :], total)
    return peak, tl.where(reads, total, 1.0), steep


@jit
def shares(peak, total, r_in, n_in):
    """How much of each token's normalizer the state before has, n_c / n_t: at most 1."""
    return n_in[None, :] * tl.exp(r_in[None, :] - peak) / total


@jit
def pick(tile, t, CHUNK: tl.constexpr):
    """Row t of a tile in registers."""
    return tl.sum(tl.where(tl.arange(0, CHUNK)[:, None] == t, tile, 0.0), 0)


@jit
def weights_of(t, logits, peak, total, CHUNK: tl.constexpr):
    """What token t weighs those of its chunk with up to itself, [C, K]: none is above 1."""
    exponent = logits - pick(peak, t, CHUNK)[None, :]
    earlier = tl.arange(0, CHUNK)[:, None] <= t
    w = tl.exp(tl.where(earlier, exponent, float("-inf")))
    return w / pick(total, t, CHUNK)[None, :]


@jit
def scores_of(
    queries, logits, peak, total, steep, cos, sin,
    LRPE: tl.constexpr, CHUNK: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a block of channels adds to the scores of a chunk, [C, C]; not masked."""
    if steep:
        scores = tl.zeros([CHUNK, CHUNK], tl.float32)
        token = tl.arange(0, CHUNK)[:, None]
        for t in range(CHUNK):
            w = weights_of(t, logits, peak, total, CHUNK) * pick(queries, t, CHUNK)[None, :]
            if LRPE:
                w *= cos * pick(cos, t, CHUNK)[None, :] + sin * pick(sin, t, CHUNK)[None, :]
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
def meetings(
    x, y, row, r, live,
    H: tl.constexpr, V: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x_t . y_s of all tokens of a chunk, [C, C]; x and y are [T, H, V]."""
    acc = tl.zeros([CHUNK, CHUNK], tl.float32)
    for left in range(0, V, BLOCK_W):
        e = left + tl.arange(0, BLOCK_W)
        at = row * V + r * (H * V) + e[None, :]
        there = live & (e < V)[None, :]
        right = tl.trans(tl.load(y + at, mask=there, other=0))
        acc += product(tl.load(x + at, mask=there, other=0), right, OPERAND, PRECISION)
    return acc


@jit
def weights_after(logits, reference, mass, at, mask):
    """What each token weighs in the state after its chunk, whose normalizer is at `at`."""
    r_out = tl.load(reference + at, mask=mask, other=LOG_ZERO)
    n_out = tl.load(mass + at, mask=mask, other=1)
    return tl.exp(logits - r_out[None, :]) * (1 / tl.where(n_out > 0, n_out, 1.0))[None, :]


@jit
def read_chunks(
    q, k, v, turn, keep, reference, mass, before,
    o,
    tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LRPE: tl.constexpr, KEEP: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs of one chunk: what its own tokens hold, and the state before it."""
    program = tl.program_id(0).to(tl.int64)
    chunk, head, sample = program % chunks, program // chunks % H, program // chunks // H
    start = chunk * CHUNK
    r, e = tl.arange(0, CHUNK)[:, None], tl.arange(0, BLOCK_V)
    half: tl.constexpr = K * V
    width: tl.constexpr = half * (2 if LRPE else 1)
    live = live_tokens(keep, sample, start + tl.arange(0, CHUNK), tokens, KEEP)[:, None]
    row = (sample * tokens + start) * H + head
    state = ((sample * (chunks + 1) + chunk) * H + head) * K
    before += ((sample * chunks + chunk) * H + head) * width
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    acc = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    for first in range(0, K, BLOCK_K):
        c = first + tl.arange(0, BLOCK_K)
        at = row * K + r * (H * K) + c[None, :]
        here = live & (c < K)[None, :]
        queries = tl.load(q + at, mask=here, other=0).to(tl.float32)
        logits = tl.load(k + at, mask=here, other=float("-inf")).to(tl.float32)
        r_in = tl.load(reference + state + c, mask=c < K, other=LOG_ZERO)
        n_in = tl.load(mass + state + c, mask=c < K, other=0)
        peak, total, steep = normalizers(logits, r_in, n_in, CHUNK, BLOCK_K)
        cos, sin = queries, queries
        if LRPE:
            cos, sin = turn_of(turn, start, r, head, c, tokens, H, K)
        scores += scores_of(
            queries, logits, peak, total, steep, cos, sin, LRPE, CHUNK, OPERAND, PRECISION
        )
        queries *= shares(peak, total, r_in, n_in)
        place = before + c[:, None] * V + e[None, :]
        inside = (c < K)[:, None] & (e < V)[None, :]
        if LRPE:
            across = tl.load(place + half, mask=inside, other=0)
            acc += product(queries * sin, across, OPERAND, PRECISION)
            queries *= cos
        acc += product(queries, tl.load(place, mask=inside, other=0), OPERAND, PRECISION)
    scores = tl.where(r >= tl.arange(0, CHUNK)[None, :], scores, 0.0)
    at_v = row * V + r * (H * V) + e[None, :]
    values = tl.load(v + at_v, mask=live & (e < V)[None, :], other=0)
    acc += product(scores, values, OPERAND, PRECISION)
    written = (start + r < tokens) & (e < V)[None, :]
    tl.store(o + at_v, acc, mask=written)


@jit
def query_gradients(
    q, k, v, turn, keep, reference, mass, before, do,
    dq, dangles,
    tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LRPE: tl.constexpr, KEEP: tl.constexpr, ANGLES: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries of one chunk, and what the angles have from them."""
    program = tl.program_id(0).to(tl.int64)
    chunk, head, sample = program % chunks, program // chunks % H, program // chunks // H
    start = chunk * CHUNK
    r = tl.arange(0, CHUNK)[:, None]
    half: tl.constexpr = K * V
    width: tl.constexpr = half * (2 if LRPE else 1)
    live = live_tokens(keep, sample, start + tl.arange(0, CHUNK), tokens, KEEP)[:, None]
    row = (sample * tokens + start) * H + head
    state = ((sample * (chunks + 1) + chunk) * H + head) * K
    before += ((sample * chunks + chunk) * H + head) * width
    dscores = meetings(do, v, row, r, live, H, V, CHUNK, BLOCK_W, OPERAND, PRECISION)
    dscores = tl.where(r >= tl.arange(0, CHUNK)[None, :], dscores, 0.0)
    for first in range(0, K, BLOCK_K):
        c = first + tl.arange(0, BLOCK_K)
        at = row * K + r * (H * K) + c[None, :]
        here = live & (c < K)[None, :]
        logits = tl.load(k + at, mask=here, other=float("-inf")).to(tl.float32)
        r_in = tl.load(reference + state + c, mask=c < K, other=LOG_ZERO)
        n_in = tl.load(mass + state + c, mask=c < K, other=0)
        peak, total, steep = normalizers(logits, r_in, n_in, CHUNK, BLOCK_K)
        share = shares(peak, total, r_in, n_in)
        straight = share * slopes_of(
            do, row, before, r, c, live, H, K, V, CHUNK, BLOCK_K, BLOCK_W, OPERAND, PRECISION
        )
        cos, sin, across = share, share, share
        if LRPE:
            cos, sin = turn_of(turn, start, r, head, c, tokens, H, K)
            across = share * slopes_of(
                do, row, before + half, r, c, live, H, K, V, CHUNK, BLOCK_K, BLOCK_W,
                OPERAND, PRECISION,
            )  # fmt: skip
        if steep:
            for t in range(CHUNK):
                w = weights_of(t, logits, peak, total, CHUNK) * pick(dscores, t, CHUNK)[:, None]
                if LRPE:
                    across = tl.where(r == t, across + tl.sum(w * sin, 0)[None, :], across)
                    w *= cos
                straight = tl.where(r == t, straight + tl.sum(w, 0)[None, :], straight)
        else:
            w = tl.exp(logits - peak)
            if LRPE:
                across += product(dscores, w * sin, OPERAND, PRECISION) / total
                w *= cos
            straight += product(dscores, w, OPERAND, PRECISION) / total
        written = (start + r < tokens) & (c < K)[None, :]
        if LRPE:
            if ANGLES:
                queries = tl.load(q + at, mask=here, other=0).to(tl.float32)
                tl.store(dangles + at, queries * (across * cos - straight * sin), mask=written)
            straight = straight * cos + across * sin
        tl.store(dq + at, straight, mask=written)


@jit
def carry_backward(
    q, k, turn, keep, reference, mass, do, dq, dz_out, dkv_out,
    after, dmass, dz_in, dkv_in,
    tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LRPE: tl.constexpr, KEEP: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the state after each chunk, and of the one before the first.

    The former is after [B, N, H, F, V], and dmass [B, N, H, K] of its log-normalizer. `dz_out` is
    what the last log-normalizer has from the state that goes out.
    """
    of_head = tl.program_id(0).to(tl.int64)
    sample, head = of_head // H, of_head % H
    c = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    e = tl.arange(0, BLOCK_V)
    r = tl.arange(0, CHUNK)[:, None]
    half: tl.constexpr = K * V
    width: tl.constexpr = half * (2 if LRPE else 1)
    inside = (c < K)[:, None] & (e < V)[None, :]
    matrix = c[:, None] * V + e[None, :]
    d = tl.load(dz_out + of_head * K + c, mask=c < K, other=0)
    place = dkv_out + of_head * width + matrix
    straight = tl.load(place, mask=inside, other=0)
    across = straight
    if LRPE:
        across = tl.load(place + half, mask=inside, other=0)
    at = ((sample * (chunks + 1) + chunks) * H + head) * K + c
    r_out = tl.load(reference + at, mask=c < K, other=LOG_ZERO)
    n_out = tl.load(mass + at, mask=c < K, other=1)
    for back in range(chunks):
        chunk = chunks - 1 - back
        start = chunk * CHUNK
        there = after + ((sample * chunks + chunk) * H + head) * width + matrix
        tl.store(there, straight, mask=inside)
        if LRPE:
            tl.store(there + half, across, mask=inside)
        tl.store(dmass + ((sample * chunks + chunk) * H + head) * K + c, d, mask=c < K)
        live = live_tokens(keep, sample, start + tl.arange(0, CHUNK), tokens, KEEP)[:, None]
        row = (sample * tokens + start) * H + head
        at_k = row * K + r * (H * K) + c[None, :]
        here = live & (c < K)[None, :]
        logits = tl.load(k + at_k, mask=here, other=float("-inf")).to(tl.float32)
        at = ((sample * (chunks + 1) + chunk) * H + head) * K + c
        r_in = tl.load(reference + at, mask=c < K, other=LOG_ZERO)
        n_in = tl.load(mass + at, mask=c < K, other=0)
        peak, total, _ = normalizers(logits, r_in, n_in, CHUNK, BLOCK_K)
        kept = n_in * tl.exp(r_in - r_out) / tl.where(n_out > 0, n_out, 1.0)
        queries = tl.load(q + at_k, mask=here, other=0).to(tl.float32)
        queries *= shares(peak, total, r_in, n_in)
        slopes = tl.load(dq + at_k, mask=here, other=0).to(tl.float32)
        d = d * kept - tl.sum(queries * slopes, 0)
        at_v = row * V + r * (H * V) + e[None, :]
        slope = tl.load(do + at_v, mask=live & (e < V)[None, :], other=0)
        if LRPE:
            cos, sin = turn_of(turn, start, r, head, c, tokens, H, K)
            own = product(tl.trans(queries * sin), slope, OPERAND, PRECISION)
            across = across * kept[:, None] + own
            queries *= cos
        own = product(tl.trans(queries), slope, OPERAND, PRECISION)
        straight = straight * kept[:, None] + own
        r_out, n_out = r_in, n_in
    tl.store(dz_in + of_head * K + c, d, mask=c < K)
    place = dkv_in + of_head * width + matrix
    tl.store(place, straight, mask=inside)
    if LRPE:
        tl.store(place + half, across, mask=inside)


@jit
def value_gradients(
    q, k, turn, keep, reference, mass, after, do,
    dv,
    tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LRPE: tl.constexpr, KEEP: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the values of one chunk."""
    program = tl.program_id(0).to(tl.int64)
    chunk, head, sample = program % chunks, program // chunks % H, program // chunks // H
    start = chunk * CHUNK
    r, e = tl.arange(0, CHUNK)[:, None], tl.arange(0, BLOCK_V)
    half: tl.constexpr = K * V
    width: tl.constexpr = half * (2 if LRPE else 1)
    live = live_tokens(keep, sample, start + tl.arange(0, CHUNK), tokens, KEEP)[:, None]
    row = (sample * tokens + start) * H + head
    state = ((sample * (chunks + 1) + chunk) * H + head) * K
    after += ((sample * chunks + chunk) * H + head) * width
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    acc = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    for first in range(0, K, BLOCK_K):
        c = first + tl.arange(0, BLOCK_K)
        at = row * K + r * (H * K) + c[None, :]
        here = live & (c < K)[None, :]
        queries = tl.load(q + at, mask=here, other=0).to(tl.float32)
        logits = tl.load(k + at, mask=here, other=float("-inf")).to(tl.float32)
        r_in = tl.load(reference + state + c, mask=c < K, other=LOG_ZERO)
        n_in = tl.load(mass + state + c, mask=c < K, other=0)
        peak, total, steep = normalizers(logits, r_in, n_in, CHUNK, BLOCK_K)
        cos, sin = queries, queries
        if LRPE:
            cos, sin = turn_of(turn, start, r, head, c, tokens, H, K)
        scores += scores_of(
            queries, logits, peak, total, steep, cos, sin, LRPE, CHUNK, OPERAND, PRECISION
        )
        w = weights_after(logits, reference, mass, state + H * K + c, c < K)
        place = after + c[:, None] * V + e[None, :]
        inside = (c < K)[:, None] & (e < V)[None, :]
        if LRPE:
            across = tl.load(place + half, mask=inside, other=0)
            acc += product(w * sin, across, OPERAND, PRECISION)
            w *= cos
        acc += product(w, tl.load(place, mask=inside, other=0), OPERAND, PRECISION)
    scores = tl.where(r >= tl.arange(0, CHUNK)[None, :], scores, 0.0)
    at_v = row * V + r * (H * V) + e[None, :]
    slope = tl.load(do + at_v, mask=live & (e < V)[None, :], other=0)
    acc += product(tl.trans(scores), slope, OPERAND, PRECISION)
    acc = tl.where(live, acc, 0.0)
    tl.store(dv + at_v, acc, mask=(start + r < tokens) & (e < V)[None, :])


@jit
def key_gradients(
    q, k, v, turn, keep, reference, mass, after, dmass, do, dq,
    dk, dangles,
    tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LRPE: tl.constexpr, KEEP: tl.constexpr, ANGLES: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys of one chunk; to those of the angles theirs are added."""
    program = tl.program_id(0).to(tl.int64)
    chunk, head, sample = program % chunks, program // chunks % H, program // chunks // H
    start = chunk * CHUNK
    r = tl.arange(0, CHUNK)[:, None]
    half: tl.constexpr = K * V
    width: tl.constexpr = half * (2 if LRPE else 1)
    live = live_tokens(keep, sample, start + tl.arange(0, CHUNK), tokens, KEEP)[:, None]
    row = (sample * tokens + start) * H + head
    state = ((sample * (chunks + 1) + chunk) * H + head) * K
    after += ((sample * chunks + chunk) * H + head) * width
    dmass += ((sample * chunks + chunk) * H + head) * K
    earlier = r <= tl.arange(0, CHUNK)[None, :]  # keys down, queries across
    dscores = meetings(v, do, row, r, live, H, V, CHUNK, BLOCK_W, OPERAND, PRECISION)
    dscores = tl.where(earlier, dscores, 0.0)
    for first in range(0, K, BLOCK_K):
        c = first + tl.arange(0, BLOCK_K)
        at = row * K + r * (H * K) + c[None, :]
        here = live & (c < K)[None, :]
        queries = tl.load(q + at, mask=here, other=0).to(tl.float32)
        logits = tl.load(k + at, mask=here, other=float("-inf")).to(tl.float32)
        r_in = tl.load(reference + state + c, mask=c < K, other=LOG_ZERO)
        n_in = tl.load(mass + state + c, mask=c < K, other=0)
        peak, total, steep = normalizers(logits, r_in, n_in, CHUNK, BLOCK_K)
        cos, sin = queries, queries
        if LRPE:
            cos, sin = turn_of(turn, start, r, head, c, tokens, H, K)
        # of the normalizers of the chunk's tokens
        dz = -queries * tl.load(dq + at, mask=here, other=0).to(tl.float32)
        if steep:
            straight = tl.zeros([CHUNK, BLOCK_K], tl.float32)  # of log w, through scores
            across = tl.zeros([CHUNK, BLOCK_K], tl.float32)  # of the angle
            for t in range(CHUNK):
                w = weights_of(t, logits, peak, total, CHUNK)
                chosen = tl.arange(0, CHUNK)[None, :] == t
                column = tl.sum(tl.where(chosen, dscores, 0.0), 1)[:, None]
                query = column * pick(queries, t, CHUNK)[None, :]
                along = query
                if LRPE:
                    cos_t, sin_t = pick(cos, t, CHUNK)[None, :], pick(sin, t, CHUNK)[None, :]
                    along = query * (cos * cos_t + sin * sin_t)
                    across += w * query * (sin_t * cos - cos_t * sin)
                straight += w * (along + pick(dz, t, CHUNK)[None, :])
        else:
            p, w = queries / total, tl.exp(logits - peak)
            across = w
            if LRPE:
                of_sin = product(dscores, p * sin, OPERAND, PRECISION)
                of_cos = product(dscores, p * cos, OPERAND, PRECISION)
                across = w * (of_sin * cos - of_cos * sin)
                straight = of_cos * cos + of_sin * sin
            else:
                straight = product(dscores, p, OPERAND, PRECISION)
            straight = w * (straight + tl.cumsum(dz / total, 0, reverse=True))
        # what later chunks read
        w = weights_after(logits, reference, mass, state + H * K + c, c < K)
        of_cos = slopes_of(
            v, row, after, r, c, live, H, K, V, CHUNK, BLOCK_K, BLOCK_W, OPERAND, PRECISION
        )
        later = tl.load(dmass + c, mask=c < K, other=0)[None, :]
        written = (start + r < tokens) & (c < K)[None, :]
        if LRPE:
            of_sin = slopes_of(
                v, row, after + half, r, c, live, H, K, V, CHUNK, BLOCK_K, BLOCK_W,
                OPERAND, PRECISION,
            )  # fmt: skip
            if ANGLES:
                da = tl.load(dangles + at, mask=written, other=0)
                da += across + w * (of_sin * cos - of_cos * sin)
                tl.store(dangles + at, da, mask=written)
            of_cos = of_cos * cos + of_sin * sin
        tl.store(dk + at, straight + w * (of_cos + later), mask=written)
