"""Additive decay that is not causal: one pass over keys and values, one over queries.

    KV = sum_t R_t(exp(k_t) / n) v_t^T,   n = sum_t exp(k_t)       summarize, merge
    o_t = KV^T R_t(q_t)                                            read_out

and backwards, with G = dKV the gradient of KV and <.,.> a sum over values and both halves:

    dq_t = R_t^T(KV do_t),   G = sum_t R_t(q_t) do_t^T             spread
    w_t = exp(k_t) / n,      dv_t = G^T R_t(w_t)                   collect
    dk_t = w_t (R_t^T(G v_t) - <KV, G> + dz)

where R_t(x) = [x cos, x sin] and R_t^T([x, y]) = x cos + y sin. Sums over tokens are taken in
parts, each under its own maximum, and merged as `merge_states` merges.

Source: LightNet, arXiv:2405.21022, Eq. 14 and App. A.2.
"""

from collections.abc import Iterator
from typing import Any

import triton.language as tl

from onescan.kernels.chips import reads_operands_from_shared
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


def sum_blocks(key_width: int, value_width: int, data: str, chip: str, *, lrpe: bool) -> Blocks:
    """Of kernels whose sums stay in registers: BLOCK_K x BLOCK_V, of cosines and of sines."""
    values = power_of_two(value_width)
    tokens, room = {"bf16": (32, 2048), "fp16": (32, 2048), "fp32": (16, 512)}[data]
    if data == "bf16" and reads_operands_from_shared(chip):
        room = 4096
    keys = min(power_of_two(key_width), max(16, room // values))
    warps = 8 if keys * values >= 4096 or (values > 64 and data != "bf16") else 4
    return Blocks(tokens, keys, values, warps, stages=2)


def read_blocks(key_width: int, value_width: int, data: str, chip: str, *, lrpe: bool) -> Blocks:
    """Of `read_out`: all keys at once where kv fits beside tiles, and is held from one to the next.

    It is as many bytes as 128 tokens of a head of 64 and, under LRPE, twice as many.
    """
    blocks = _tile_blocks(key_width, value_width, data, chip)
    held = _held_bytes(key_width, value_width, data, lrpe=lrpe)
    if data == "fp32" or not reads_operands_from_shared(chip) or held > 2**16:
        return blocks
    return blocks._replace(tokens=64 if data == "bf16" else 32, keys=power_of_two(key_width))


def collect_blocks(key_width: int, value_width: int, data: str, chip: str, *, lrpe: bool) -> Blocks:
    """Of `collect`, which has more beside it."""
    blocks = _tile_blocks(key_width, value_width, data, chip)
    held = _held_bytes(key_width, value_width, data, lrpe=lrpe)
    if data != "bf16" or not reads_operands_from_shared(chip) or held > 2**14:
        return blocks
    return Blocks(64, power_of_two(key_width), blocks.values, warps=8, stages=2)


def _tile_blocks(key_width: int, value_width: int, data: str, chip: str) -> Blocks:
    """Of kernels that visit tiles of tokens: BLOCK_T x BLOCK_K, several at once."""
    values = power_of_two(value_width)
    keys = min(power_of_two(key_width), 32 if data == "bf16" else 16)
    few = values <= 64 or chip.startswith("gfx")  # whose warps have 64 threads
    tokens = 32 if data == "bf16" or (values <= 64 and data == "fp16") else 16
    return Blocks(tokens, keys, values, warps=4 if few else 8, stages=2)


def _held_bytes(key_width: int, value_width: int, data: str, *, lrpe: bool) -> int:
    """Of kv as it is multiplied."""
    numbers = power_of_two(key_width) * power_of_two(value_width) * (2 if lrpe else 1)
    return numbers * (2 if data == "bf16" else 4)


def holds(blocks: Blocks, key_width: int, data: str) -> bool:
    """Whether a kernel that visits tiles of tokens holds kv from one to the next."""
    return blocks.keys >= key_width and width_at_once(blocks.values, data) == blocks.values


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
    """What all kernels but `merge` are compiled for; some want ANGLES or HOLDS too."""
    return {
        "H": heads,
        "K": key_width,
        "V": value_width,
        "LRPE": lrpe,
        "KEEP": keep,
        "BLOCK_T": blocks.tokens,
        "BLOCK_K": blocks.keys,
        "BLOCK_V": blocks.values,
        **multiplication(data, chip),
    }


def builds(data: str, chip: str) -> Iterator[Build]:
    """What `make check-kernels` compiles."""
    table, operand = "fp32" if data == "fp32" else "fp16", "bf16" if data == "bf16" else "fp32"
    for width, lrpe, keep in BUILT:
        sums, reads, collects = (
            f(width, width, data, chip, lrpe=lrpe)
            for f in (sum_blocks, read_blocks, collect_blocks)
        )
        of_sums, of_reads, of_collects = (
            constants_of(8, width, width, data, chip, blocks, lrpe=lrpe, keep=keep)
            for blocks in (sums, reads, collects)
        )
        merged = {
            "H": 8,
            "K": width,
            "V": width,
            "F": width * (2 if lrpe else 1),
            "STATE": keep,
            "BLOCK_F": sums.keys,
            "BLOCK_V": sums.values,
        }
        slopes = {"ANGLES": lrpe, "BLOCK_W": width_at_once(sums.values, data)}
        name = f"{width}{' lrpe' if lrpe else ''}{' keep' if keep else ''}"
        head, tail = f"data data {table} i1", "i32 i32"
        for kernel, types, constants, blocks in (
            (summarize, f"{head} fp32 fp32 fp32 {tail} i32", of_sums, sums),
            (merge, f"fp32 fp32 fp32 fp64 fp32 fp32 fp32 fp64 fp32 {tail}", merged, sums),
            (
                read_out,
                f"data {table} i1 {operand} data {tail} i32",
                {**of_reads, "HOLDS": holds(reads, width, data)},
                reads,
            ),
            (spread, f"{head} {operand} data fp32 fp32 {tail} i32", {**of_sums, **slopes}, sums),
            (
                collect,
                f"{head} fp32 fp32 {operand} fp32 data data fp32 {tail} i32",
                {**of_collects, **slopes, "HOLDS": holds(collects, width, data)},
                collects,
            ),
        ):
            yield Build(name, kernel, types, constants, blocks)


# head width, LRPE, keep
BUILT = (
    (16, True, False),
    (32, True, True),
    (64, True, False),
    (64, False, True),
    (96, True, True),
    (128, True, False),
)


@jit
def summarize(
    k, v, turn, keep,
    peak, mass, sums,
    batch, tokens, split,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LRPE: tl.constexpr, KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the tokens of one part weigh and sum up to, under the largest of their own logits.

    Their weights are peak and mass, [P, B, H, K], their sums [P, B, H, F, V].
    """
    program = tl.program_id(0).to(tl.int64)
    sample, head, part = program % batch, program // batch % H, program // batch // H
    c = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    e = tl.arange(0, BLOCK_V)
    r = tl.arange(0, BLOCK_T)[:, None]
    here, there = (c < K)[None, :], (e < V)[None, :]
    m = tl.full([BLOCK_K], float("-inf"), tl.float32)
    n = tl.zeros([BLOCK_K], tl.float32)
    straight = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)  # of cosines, where there is LRPE
    across = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)  # of sines
    stop = tl.minimum((part + 1) * split, tokens)
    for start in range(part * split, stop, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        live = live_tokens(keep, sample, t, tokens, KEEP) & (t < stop)
        row = (sample * tokens + start) * H + head
        place = k + row * K + r * (H * K) + c[None, :]
        logits = tl.load(place, mask=live[:, None] & here, other=float("-inf")).to(tl.float32)
        place = v + row * V + r * (H * V) + e[None, :]
        values = tl.load(place, mask=live[:, None] & there, other=0)
        higher = tl.maximum(m, tl.max(logits, 0))
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp(m - reference)
        w = tl.exp(logits - reference[None, :])
        m, n = higher, n * kept + tl.sum(w, 0)
        if LRPE:
            cos, sin = turn_of(turn, start, r, head, c, tokens, H, K)
            own = product(tl.trans(w * sin), values, OPERAND, PRECISION)
            across = across * kept[:, None] + own
            w *= cos
        straight = straight * kept[:, None] + product(tl.trans(w), values, OPERAND, PRECISION)
    row = (part * batch + sample) * H + head
    tl.store(peak + row * K + c, m, mask=c < K)
    tl.store(mass + row * K + c, n, mask=c < K)
    place = c[:, None] * V + e[None, :]
    inside = (c < K)[:, None] & there
    if LRPE:
        tl.store(sums + row * (2 * K * V) + place, straight, mask=inside)
        tl.store(sums + row * (2 * K * V) + K * V + place, across, mask=inside)
    else:
        tl.store(sums + row * (K * V) + place, straight, mask=inside)


@jit
def merge(
    peak, mass, sums, z_in, kv_in,
    reference, total, z, kv,
    batch, parts,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    F: tl.constexpr, STATE: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """All parts, and what came in, under one normalizer: z in float64, kv divided by it.

    z = reference + log(total), each as float32 has it, which is what `collect` reads.
    """
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    c = f % K
    e = tl.arange(0, BLOCK_V)
    inside = (f < F)[:, None] & (e < V)[None, :]
    place = row * (F * V) + f[:, None] * V + e[None, :]
    m = tl.full([BLOCK_F], float("-inf"), tl.float64)
    n = tl.zeros([BLOCK_F], tl.float32)
    acc = tl.zeros([BLOCK_F, BLOCK_V], tl.float32)
    if STATE:
        m = tl.load(z_in + row * K + c)
        n += tl.where(m > LOG_ZERO, 1.0, 0.0)
        acc = tl.load(kv_in + place, mask=inside, other=0) * n[:, None]
    stride = (batch * H).to(tl.int64)
    for part in range(parts):
        there = part * stride + row
        own_m = tl.load(peak + there * K + c).to(tl.float64)
        own_n = tl.load(mass + there * K + c)
        own = tl.load(sums + there * (F * V) + f[:, None] * V + e[None, :], mask=inside, other=0)
        higher = tl.maximum(m, own_m)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        before, now = tl.exp((m - finite).to(tl.float32)), tl.exp((own_m - finite).to(tl.float32))
        acc = acc * before[:, None] + own * now[:, None]
        m, n = higher, n * before + own_n * now
    weighs = n > 0
    # what is left of a logit in float64 goes into the total: float32 has the reference exactly
    finite = tl.where(weighs, m, LOG_ZERO)
    rounded = finite.to(tl.float32)
    rest = tl.exp((finite - rounded.to(tl.float64)).to(tl.float32))
    n = tl.where(weighs, n * rest, 1.0)
    tl.store(kv + place, acc * (rest / n)[:, None], mask=inside)
    first = f < K
    tl.store(reference + row * K + c, rounded, mask=first)
    tl.store(total + row * K + c, n, mask=first)
    exact = tl.where(weighs, rounded.to(tl.float64) + tl.log(n.to(tl.float64)), LOG_ZERO)
    tl.store(z + row * K + c, exact, mask=first)


@jit
def halves_of(
    kv, c, e, half: tl.constexpr, K: tl.constexpr, V: tl.constexpr, LRPE: tl.constexpr
):  # fmt: skip
    """Some keys of a kv, [K, V]: of cosines and of sines, which without LRPE are the same."""
    place = kv + c[:, None] * V + e[None, :]
    inside = (c < K)[:, None] & (e < V)[None, :]
    straight = tl.load(place, mask=inside, other=0)
    across = straight
    if LRPE:
        across = tl.load(place + half, mask=inside, other=0)
    return straight, across


@jit
def read_out(
    q, turn, keep, kv,
    o,
    batch, tokens, split,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LRPE: tl.constexpr, KEEP: tl.constexpr, HOLDS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O = R(q) kv, of the tokens of one part."""
    program = tl.program_id(0).to(tl.int64)
    sample, head, part = program % batch, program // batch % H, program // batch // H
    e = tl.arange(0, BLOCK_V)
    r = tl.arange(0, BLOCK_T)[:, None]
    half: tl.constexpr = K * V
    kv += (sample * H + head) * (half * (2 if LRPE else 1))
    if HOLDS:  # kv, from tile to tile
        straight, across = halves_of(kv, tl.arange(0, BLOCK_K), e, half, K, V, LRPE)
    for start in range(part * split, tl.minimum((part + 1) * split, tokens), BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        live = live_tokens(keep, sample, t, tokens, KEEP)
        row = (sample * tokens + start) * H + head
        acc = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
        for first in range(0, K, BLOCK_K):
            c = first + tl.arange(0, BLOCK_K)
            if not HOLDS:
                straight, across = halves_of(kv, c, e, half, K, V, LRPE)
            place = q + row * K + r * (H * K) + c[None, :]
            queries = tl.load(place, mask=live[:, None] & (c < K)[None, :], other=0).to(tl.float32)
            if LRPE:
                cos, sin = turn_of(turn, start, r, head, c, tokens, H, K)
                acc += product(queries * sin, across, OPERAND, PRECISION)
                queries *= cos
            acc += product(queries, straight, OPERAND, PRECISION)
        # a token that is not kept has no queries, so its output is 0
        place = o + row * V + r * (H * V) + e[None, :]
        tl.store(place, acc, mask=(t < tokens)[:, None] & (e < V)[None, :])


@jit
def spread(
    q, do, turn, keep, kv,
    dq, dangles, sums,
    batch, tokens, split,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LRPE: tl.constexpr, KEEP: tl.constexpr, ANGLES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, and what one part adds to that of kv: sums [P, B, H, F, V]."""
    program = tl.program_id(0).to(tl.int64)
    sample, head, part = program % batch, program // batch % H, program // batch // H
    c = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    e = tl.arange(0, BLOCK_V)
    half: tl.constexpr = K * V
    r = tl.arange(0, BLOCK_T)[:, None]
    place = c[:, None] * V + e[None, :]
    inside = (c < K)[:, None] & (e < V)[None, :]
    width: tl.constexpr = half * (2 if LRPE else 1)
    kv += (sample * H + head) * width
    HOLDS: tl.constexpr = BLOCK_W == BLOCK_V  # kv, from tile to tile
    if HOLDS:
        of_straight = tl.trans(tl.load(kv + place, mask=inside, other=0))
        if LRPE:
            of_across = tl.trans(tl.load(kv + half + place, mask=inside, other=0))
    straight = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    across = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    stop = tl.minimum((part + 1) * split, tokens)
    whole = sums + ((part * batch + sample) * H + head) * width + place
    for start in range(part * split, stop, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        live = live_tokens(keep, sample, t, tokens, KEEP) & (t < stop)
        row = (sample * tokens + start) * H + head
        at = row * K + r * (H * K) + c[None, :]
        here = live[:, None] & (c < K)[None, :]
        queries = tl.load(q + at, mask=here, other=0).to(tl.float32)
        at_v = row * V + r * (H * V) + e[None, :]
        slope = tl.load(do + at_v, mask=live[:, None] & (e < V)[None, :], other=0)
        if HOLDS:
            gradient = product(slope, of_straight, OPERAND, PRECISION)
        else:
            gradient = slopes_of(
                do, row, kv, r, c, live[:, None], H, K, V, BLOCK_T, BLOCK_K, BLOCK_W,
                OPERAND, PRECISION,
            )  # fmt: skip
        if LRPE:
            cos, sin = turn_of(turn, start, r, head, c, tokens, H, K)
            if HOLDS:
                of_sin = product(slope, of_across, OPERAND, PRECISION)
            else:
                of_sin = slopes_of(
                    do, row, kv + half, r, c, live[:, None], H, K, V, BLOCK_T, BLOCK_K, BLOCK_W,
                    OPERAND, PRECISION,
                )  # fmt: skip
            across += product(tl.trans(queries * sin), slope, OPERAND, PRECISION)
            if ANGLES:
                da = queries * (of_sin * cos - gradient * sin)
                written = (t < stop)[:, None] & (c < K)[None, :]
                tl.store(dangles + at, da, mask=written)
            gradient = gradient * cos + of_sin * sin
            queries *= cos
        straight += product(tl.trans(queries), slope, OPERAND, PRECISION)
        written = (t < stop)[:, None] & (c < K)[None, :]
        tl.store(dq + at, gradient, mask=written)
    tl.store(whole, straight, mask=inside)
    if LRPE:
        tl.store(whole + half, across, mask=inside)


@jit
def collect(
    k, v, turn, keep, reference, total, dkv, offset,
    dk, dv, dangles,
    batch, tokens, split,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LRPE: tl.constexpr, KEEP: tl.constexpr, ANGLES: tl.constexpr, HOLDS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values, of the tokens of one part; one tile, unless dkv is held.

    What the angles had from queries is added to.
    """
    program = tl.program_id(0).to(tl.int64)
    sample, head, part = program % batch, program // batch % H, program // batch // H
    of_head = sample * H + head
    half: tl.constexpr = K * V
    dkv += of_head * (half * (2 if LRPE else 1))
    reference += of_head * K
    total += of_head * K
    offset += of_head * K
    if HOLDS:  # dkv, from tile to tile
        held = halves_of(dkv, tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V), half, K, V, LRPE)
        for start in range(part * split, tl.minimum((part + 1) * split, tokens), BLOCK_T):
            collect_tile(
                k, v, turn, keep, reference, total, dkv, offset, held, dk, dv, dangles,
                sample, head, start, tokens, H, K, V, LRPE, KEEP, ANGLES, HOLDS,
                BLOCK_T, BLOCK_K, BLOCK_V, BLOCK_W, OPERAND, PRECISION,
            )  # fmt: skip
    else:
        collect_tile(
            k, v, turn, keep, reference, total, dkv, offset, (dkv, dkv), dk, dv, dangles,
            sample, head, part * split, tokens, H, K, V, LRPE, KEEP, ANGLES, HOLDS,
            BLOCK_T, BLOCK_K, BLOCK_V, BLOCK_W, OPERAND, PRECISION,
        )  # fmt: skip


@jit
def collect_tile(
    k, v, turn, keep, reference, total, dkv, offset, held,
    dk, dv, dangles,
    sample, head, start, tokens,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LRPE: tl.constexpr, KEEP: tl.constexpr, ANGLES: tl.constexpr, HOLDS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Those of the tokens from `start` on; `held` are the halves of dkv, where it is.

    Else keys come first, then values: both at once would be more than a program's registers hold.
    """
    half: tl.constexpr = K * V
    t = start + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_V)
    live = live_tokens(keep, sample, t, tokens, KEEP)[:, None]
    r = tl.arange(0, BLOCK_T)[:, None]
    row = (sample * tokens + start) * H + head
    there = (e < V)[None, :]
    at_v = row * V + r * (H * V) + e[None, :]
    if HOLDS:
        straight, across = held
        values = tl.load(v + at_v, mask=live & there, other=0)
    acc = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    for first in range(0, K, BLOCK_K):
        c = first + tl.arange(0, BLOCK_K)
        at = row * K + r * (H * K) + c[None, :]
        if HOLDS:
            of_cos = product(values, tl.trans(straight), OPERAND, PRECISION)
        else:
            of_cos = slopes_of(
                v, row, dkv, r, c, live, H, K, V, BLOCK_T, BLOCK_K, BLOCK_W, OPERAND, PRECISION
            )
        w = weights_of(k + at, live, reference, total, c, K)
        written = (t < tokens)[:, None] & (c < K)[None, :]
        if LRPE:
            if HOLDS:
                of_sin = product(values, tl.trans(across), OPERAND, PRECISION)
            else:
                of_sin = slopes_of(
                    v, row, dkv + half, r, c, live, H, K, V, BLOCK_T, BLOCK_K, BLOCK_W,
                    OPERAND, PRECISION,
                )  # fmt: skip
            cos, sin = turn_of(turn, start, r, head, c, tokens, H, K)
            if ANGLES:
                da = tl.load(dangles + at, mask=written, other=0)
                tl.store(dangles + at, da + w * (of_sin * cos - of_cos * sin), mask=written)
            of_cos = of_cos * cos + of_sin * sin
        away = tl.load(offset + c, mask=c < K, other=0)
        tl.store(dk + at, w * (of_cos - away[None, :]), mask=written)
        if HOLDS:
            if LRPE:
                acc += product(w * sin, across, OPERAND, PRECISION)
                w *= cos
            acc += product(w, straight, OPERAND, PRECISION)
    if not HOLDS:
        for first in range(0, K, BLOCK_K):
            c = first + tl.arange(0, BLOCK_K)
            straight, across = halves_of(dkv, c, e, half, K, V, LRPE)
            at = row * K + r * (H * K) + c[None, :]
            w = weights_of(k + at, live, reference, total, c, K)
            if LRPE:
                cos, sin = turn_of(turn, start, r, head, c, tokens, H, K)
                acc += product(w * sin, across, OPERAND, PRECISION)
                w *= cos
            acc += product(w, straight, OPERAND, PRECISION)
    acc = tl.where(live, acc, 0.0)
    tl.store(dv + at_v, acc, mask=(t < tokens)[:, None] & there)


@jit
def weights_of(place, live, reference, total, c, K: tl.constexpr):
    """exp(k) / n of a tile; `reference` and `total` are n's, of one head."""
    logits = tl.load(place, mask=live & (c < K)[None, :], other=float("-inf")).to(tl.float32)
    m = tl.load(reference + c, mask=c < K, other=0)
    n = tl.load(total + c, mask=c < K, other=1)
    return tl.exp(logits - m[None, :]) * (1 / n)[None, :]
