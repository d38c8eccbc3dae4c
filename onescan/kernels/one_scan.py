"""Non-causal additive decay: one pass over keys and values, and one over queries.

    KV = sum_t R_t(exp(k_t) / n) v_t^T,   n = sum_t exp(k_t)       summarize, merge
    o_t = KV^T R_t(q_t)                                            read_out

In the backward pass, with G = dKV the gradient of KV and <.,.> a sum over values and both halves:

    dq_t = R_t^T(KV do_t),   G = sum_t R_t(q_t) do_t^T             spread
    w_t = exp(k_t) / n,      dv_t = G^T R_t(w_t)                   collect
    dk_t = w_t (R_t^T(G v_t) - <KV, G> + dz)

Here R_t(x) = [x cos, x sin] and R_t^T([x, y]) = x cos + y sin. Tokens are summed in parts, each
relative to its own maximum, and the parts are merged as in `merge_states`.

With packed sequences, a part holds tokens of one sequence, and KV, n and G are those of a sequence.

Source: LightNet, arXiv:2405.21022, Eq. 14 and App. A.2.
"""

import triton.language as tl

from onescan.kernels.chips import reads_operands_from_shared
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

PACKED = {"HAS_SPANS": True, "HAS_FIRSTS": True}
EXAMPLES = (
    Example(16, 16, lrpe=True, flags={"HAS_DANGLES": True}),
    Example(32, 32, lrpe=True, flags={"HAS_KEEP": True, "HAS_KV_IN": True, "HAS_DANGLES": True}),
    Example(64, 64, lrpe=True, flags={"HAS_DANGLES": True}),
    Example(64, 64, flags={"HAS_KEEP": True, "HAS_KV_IN": True}),
    Example(96, 96, lrpe=True, flags={"HAS_KEEP": True, "HAS_KV_IN": True, "HAS_DANGLES": True}),
    Example(128, 128, lrpe=True, flags={"HAS_DANGLES": True}),
    Example(64, 64, lrpe=True, flags={"HAS_DANGLES": True, **PACKED}),
    Example(128, 128, lrpe=True, flags={"HAS_DANGLES": True, **PACKED}),
)


def sum_blocks(case: Case) -> Blocks:
    """Return the blocks of kernels whose sums, BLOCK_K x BLOCK_V, stay in registers."""
    values = power_of_two(case.value_width)
    tokens, size = {"bf16": (32, 2048), "fp16": (32, 2048), "fp32": (16, 512)}[case.data]
    if case.data == "bf16" and reads_operands_from_shared(case.chip):
        size = 4096
    keys = min(power_of_two(case.key_width), max(16, size // values))
    warps = 8 if keys * values >= 4096 or (values > 64 and case.data != "bf16") else 4
    return Blocks(tokens, keys, values, warps, stages=2)


def read_blocks(case: Case) -> Blocks:
    """Return the blocks of `read_out`: all keys at once if kv fits in shared memory with the tiles.

    With K = V = 64, kv is as large as 128 tokens; with LRPE, it is twice as large.
    """
    blocks = _tile_blocks(case)
    held = _kv_bytes(case)
    if case.data == "fp32" or not reads_operands_from_shared(case.chip) or held > 2**16:
        return blocks
    tokens = 64 if case.data == "bf16" else 32
    return blocks._replace(tokens=tokens, keys=power_of_two(case.key_width))


def collect_blocks(case: Case) -> Blocks:
    """Return the blocks of `collect`, which needs more memory in addition to kv."""
    blocks = _tile_blocks(case)
    held = _kv_bytes(case)
    if case.data != "bf16" or not reads_operands_from_shared(case.chip) or held > 2**14:
        return blocks
    return Blocks(64, power_of_two(case.key_width), blocks.values, warps=8, stages=2)


def _tile_blocks(case: Case) -> Blocks:
    """Return the blocks of kernels that visit tiles of tokens."""
    data, values = case.data, power_of_two(case.value_width)
    keys = min(power_of_two(case.key_width), 32 if data == "bf16" else 16)
    few = values <= 64 or case.chip.startswith("gfx")  # AMD warps have 64 threads
    tokens = 32 if data == "bf16" or (values <= 64 and data == "fp16") else 16
    return Blocks(tokens, keys, values, warps=4 if few else 8, stages=2)


def _kv_bytes(case: Case) -> int:
    """Return the size of kv in bytes, in the dtype of products."""
    numbers = power_of_two(case.key_width) * power_of_two(case.value_width)
    return numbers * (2 if case.lrpe else 1) * (2 if case.data == "bf16" else 4)


@kernel(sum_blocks)
def summarize(
    k, v, rotary, keep,
    peak, mass, sums,
    spans, batch, tokens, split, parts,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LRPE: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_SPANS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the tokens of one part, with weights relative to the largest logit of the part.

    The sum of weights is exp(peak) * mass, [B, P, H, K]; sums are [B, P, H, F, V].
    """
    program = tl.program_id(0).to(tl.int64)
    sample, head, part = program % batch, program // batch % H, program // batch // H
    begin, stop, _, _ = span_of(spans, sample, part, parts, split, tokens, HAS_SPANS)
    c = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    e = tl.arange(0, BLOCK_V)
    r = tl.arange(0, BLOCK_T)[:, None]
    key_mask, value_mask = (c < K)[None, :], (e < V)[None, :]
    m = tl.full([BLOCK_K], float("-inf"), tl.float32)
    n = tl.zeros([BLOCK_K], tl.float32)
    cos_half = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)  # kv for cosines; the only one without LRPE
    sin_half = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)  # kv for sines
    for start in range(begin, stop, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        valid = valid_tokens(keep, sample, t, tokens, HAS_KEEP) & (t < stop)
        row = (sample * tokens + start) * H + head
        pointers = k + row * K + r * (H * K) + c[None, :]
        logits = tl.load(pointers, mask=valid[:, None] & key_mask, other=float("-inf")).to(
            tl.float32
        )
        pointers = v + row * V + r * (H * V) + e[None, :]
        values = tl.load(pointers, mask=valid[:, None] & value_mask, other=0)
        higher = tl.maximum(m, tl.max(logits, 0))
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        decay = tl.exp(m - reference)
        w = tl.exp(logits - reference[None, :])
        m, n = higher, n * decay + tl.sum(w, 0)
        if LRPE:
            cos, sin = load_rotary(rotary, start, r, head, c, tokens, H, K)
            added = product(tl.trans(w * sin), values, OPERAND, PRECISION)
            sin_half = sin_half * decay[:, None] + added
            w *= cos
        cos_half = cos_half * decay[:, None] + product(tl.trans(w), values, OPERAND, PRECISION)
    row = (sample * parts + part) * H + head
    tl.store(peak + row * K + c, m, mask=c < K)
    tl.store(mass + row * K + c, n, mask=c < K)
    sums += row * (K * V * (2 if LRPE else 1))
    store_halves(sums, c, e, cos_half, sin_half, K, V, LRPE)


@kernel(sum_blocks)
def merge(
    peak, mass, sums, z_in, kv_in,
    reference, total, z, kv,
    firsts, parts,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    F: tl.constexpr, HAS_KV_IN: tl.constexpr, HAS_FIRSTS: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Merge all parts of a sequence and the incoming state, with one log-normalizer z in float64.

    firsts: the first part of each packed sequence, and the end of the last one.
    z = reference + log(total), with both numbers rounded to float32, as `collect` reads them.
    """
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    c = f % K
    e = tl.arange(0, BLOCK_V)
    inside = (f < F)[:, None] & (e < V)[None, :]
    offsets = row * (F * V) + f[:, None] * V + e[None, :]
    m = tl.full([BLOCK_F], float("-inf"), tl.float64)
    n = tl.zeros([BLOCK_F], tl.float32)
    acc = tl.zeros([BLOCK_F, BLOCK_V], tl.float32)
    if HAS_KV_IN:
        m = tl.load(z_in + row * K + c)
        n += tl.where(m > LOG_ZERO, 1.0, 0.0)
        acc = tl.load(kv_in + offsets, mask=inside, other=0) * n[:, None]
    group, head = row // H, row % H
    first, last = group * parts, (group + 1) * parts
    if HAS_FIRSTS:
        first = tl.load(firsts + group).to(tl.int64)
        last = tl.load(firsts + group + 1).to(tl.int64)
    for part in range(first, last):
        part_row = part * H + head
        part_m = tl.load(peak + part_row * K + c).to(tl.float64)
        part_n = tl.load(mass + part_row * K + c)
        part_sums = tl.load(
            sums + part_row * (F * V) + f[:, None] * V + e[None, :], mask=inside, other=0
        )
        higher = tl.maximum(m, part_m)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        old_scale = tl.exp((m - finite).to(tl.float32))
        part_scale = tl.exp((part_m - finite).to(tl.float32))
        acc = acc * old_scale[:, None] + part_sums * part_scale[:, None]
        m, n = higher, n * old_scale + part_n * part_scale
    has_weight = n > 0
    # round the reference to float32, and move its rounding error into the total
    finite = tl.where(has_weight, m, 0.0)
    rounded = finite.to(tl.float32)
    correction = tl.exp((finite - rounded.to(tl.float64)).to(tl.float32))
    n = tl.where(has_weight, n * correction, 1.0)
    tl.store(kv + offsets, acc * (correction / n)[:, None], mask=inside)
    is_first_half = f < K
    tl.store(reference + row * K + c, rounded, mask=is_first_half)
    tl.store(total + row * K + c, n, mask=is_first_half)
    exact = tl.where(has_weight, rounded.to(tl.float64) + tl.log(n.to(tl.float64)), LOG_ZERO)
    tl.store(z + row * K + c, exact, mask=is_first_half)


@kernel(read_blocks)
def read_out(
    q, rotary, keep, kv_rounded,
    o,
    spans, batch, tokens, split, parts,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LRPE: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_SPANS: tl.constexpr, HOLDS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute O = R(q) kv for the tokens of one part."""
    program = tl.program_id(0).to(tl.int64)
    sample, head, part = program % batch, program // batch % H, program // batch // H
    begin, stop, _, group = span_of(spans, sample, part, parts, split, tokens, HAS_SPANS)
    e = tl.arange(0, BLOCK_V)
    r = tl.arange(0, BLOCK_T)[:, None]
    half: tl.constexpr = K * V
    kv_rounded += (group * H + head) * (half * (2 if LRPE else 1))
    if HOLDS:  # keep kv in registers from tile to tile
        cos_half, sin_half = load_halves(kv_rounded, tl.arange(0, BLOCK_K), e, K, V, LRPE)
    for start in range(begin, stop, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        valid = valid_tokens(keep, sample, t, tokens, HAS_KEEP)
        row = (sample * tokens + start) * H + head
        acc = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
        for first in range(0, K, BLOCK_K):
            c = first + tl.arange(0, BLOCK_K)
            if not HOLDS:
                cos_half, sin_half = load_halves(kv_rounded, c, e, K, V, LRPE)
            pointers = q + row * K + r * (H * K) + c[None, :]
            queries = tl.load(pointers, mask=valid[:, None] & (c < K)[None, :], other=0).to(
                tl.float32
            )
            if LRPE:
                cos, sin = load_rotary(rotary, start, r, head, c, tokens, H, K)
                acc += product(queries * sin, sin_half, OPERAND, PRECISION)
                queries *= cos
            acc += product(queries, cos_half, OPERAND, PRECISION)
        # queries of masked tokens are loaded as 0, so their outputs are 0
        pointers = o + row * V + r * (H * V) + e[None, :]
        tl.store(pointers, acc, mask=(t < stop)[:, None] & (e < V)[None, :])


@kernel(sum_blocks)
def spread(
    q, do, rotary, keep, kv_rounded,
    dq, dangles, sums,
    spans, batch, tokens, split, parts,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LRPE: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_DANGLES: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute gradients of queries, and the sum of one part for that of kv, [B, P, H, F, V]."""
    program = tl.program_id(0).to(tl.int64)
    sample, head, part = program % batch, program // batch % H, program // batch // H
    begin, stop, _, group = span_of(spans, sample, part, parts, split, tokens, HAS_SPANS)
    c = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    e = tl.arange(0, BLOCK_V)
    half: tl.constexpr = K * V
    r = tl.arange(0, BLOCK_T)[:, None]
    width: tl.constexpr = half * (2 if LRPE else 1)
    kv_rounded += (group * H + head) * width
    HOLDS: tl.constexpr = BLOCK_W == BLOCK_V  # keep kv in registers from tile to tile
    if HOLDS:
        kv_cos, kv_sin = load_halves(kv_rounded, c, e, K, V, LRPE)
        kv_cos, kv_sin = tl.trans(kv_cos), tl.trans(kv_sin)
    cos_half = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    sin_half = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    for start in range(begin, stop, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        valid = valid_tokens(keep, sample, t, tokens, HAS_KEEP) & (t < stop)
        row = (sample * tokens + start) * H + head
        offsets = row * K + r * (H * K) + c[None, :]
        key_mask = valid[:, None] & (c < K)[None, :]
        queries = tl.load(q + offsets, mask=key_mask, other=0).to(tl.float32)
        at_v = row * V + r * (H * V) + e[None, :]
        gradient_o = tl.load(do + at_v, mask=valid[:, None] & (e < V)[None, :], other=0)
        if HOLDS:
            gradient = product(gradient_o, kv_cos, OPERAND, PRECISION)
        else:
            gradient = rows_by_keys(
                do, row, kv_rounded, r, c, valid[:, None], H, K, V,
                BLOCK_T, BLOCK_K, BLOCK_W, OPERAND, PRECISION,
            )  # fmt: skip
        if LRPE:
            cos, sin = load_rotary(rotary, start, r, head, c, tokens, H, K)
            if HOLDS:
                of_sin = product(gradient_o, kv_sin, OPERAND, PRECISION)
            else:
                of_sin = rows_by_keys(
                    do, row, kv_rounded + half, r, c, valid[:, None], H, K, V,
                    BLOCK_T, BLOCK_K, BLOCK_W, OPERAND, PRECISION,
                )  # fmt: skip
            sin_half += product(tl.trans(queries * sin), gradient_o, OPERAND, PRECISION)
            if HAS_DANGLES:
                da = queries * (of_sin * cos - gradient * sin)
                written = (t < stop)[:, None] & (c < K)[None, :]
                tl.store(dangles + offsets, da, mask=written)
            gradient = gradient * cos + of_sin * sin
            queries *= cos
        cos_half += product(tl.trans(queries), gradient_o, OPERAND, PRECISION)
        written = (t < stop)[:, None] & (c < K)[None, :]
        tl.store(dq + offsets, gradient, mask=written)
    sums += ((sample * parts + part) * H + head) * width
    store_halves(sums, c, e, cos_half, sin_half, K, V, LRPE)


@kernel(collect_blocks)
def collect(
    k, v, rotary, keep, reference, total, dkv_rounded, offset,
    dk, dv, dangles,
    spans, batch, tokens, split, parts,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LRPE: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_DANGLES: tl.constexpr,
    HAS_SPANS: tl.constexpr, HOLDS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys and values of one part, and add to the gradients of angles.

    A part is a single tile, unless dkv stays in registers from tile to tile. With packed sequences,
    a part has as many tiles as the second axis of the grid, with one program each.
    """
    program = tl.program_id(0).to(tl.int64)
    sample, head, part = program % batch, program // batch % H, program // batch // H
    begin, stop, _, group = span_of(spans, sample, part, parts, split, tokens, HAS_SPANS)
    of_head = group * H + head
    half: tl.constexpr = K * V
    dkv_rounded += of_head * (half * (2 if LRPE else 1))
    reference += of_head * K
    total += of_head * K
    offset += of_head * K
    held = (dkv_rounded, dkv_rounded)
    if HOLDS:  # keep dkv in registers from tile to tile
        held = load_halves(dkv_rounded, tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V), K, V, LRPE)
        for start in range(begin, stop, BLOCK_T):
            collect_tile(
                k, v, rotary, keep, reference, total, dkv_rounded, offset, held, dk, dv, dangles,
                sample, head, start, stop, tokens, H, K, V, LRPE, HAS_KEEP, HAS_DANGLES, HOLDS,
                BLOCK_T, BLOCK_K, BLOCK_V, BLOCK_W, OPERAND, PRECISION,
            )  # fmt: skip
    else:
        if HAS_SPANS:
            begin += tl.program_id(1) * BLOCK_T
            if begin >= stop:
                return
        else:
            stop = tokens
        collect_tile(
            k, v, rotary, keep, reference, total, dkv_rounded, offset, held, dk, dv, dangles,
            sample, head, begin, stop, tokens, H, K, V, LRPE, HAS_KEEP, HAS_DANGLES, HOLDS,
            BLOCK_T, BLOCK_K, BLOCK_V, BLOCK_W, OPERAND, PRECISION,
        )  # fmt: skip


@jit
def collect_tile(
    k, v, rotary, keep, reference, total, dkv_rounded, offset, held,
    dk, dv, dangles,
    sample, head, start, stop, tokens,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LRPE: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_DANGLES: tl.constexpr, HOLDS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the tile that begins at `start`, in a part that ends at `stop`.

    If HOLDS, `held` contains the halves of dkv. Otherwise gradients of keys are computed before
    gradients of values, because registers cannot hold both.
    """
    half: tl.constexpr = K * V
    t = start + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_V)
    valid = valid_tokens(keep + sample * tokens, 0, t, stop, HAS_KEEP)[:, None]
    r = tl.arange(0, BLOCK_T)[:, None]
    row = (sample * tokens + start) * H + head
    value_mask = (e < V)[None, :]
    at_v = row * V + r * (H * V) + e[None, :]
    if HOLDS:
        cos_half, sin_half = held
        values = tl.load(v + at_v, mask=valid & value_mask, other=0)
    acc = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    for first in range(0, K, BLOCK_K):
        c = first + tl.arange(0, BLOCK_K)
        offsets = row * K + r * (H * K) + c[None, :]
        if HOLDS:
            of_cos = product(values, tl.trans(cos_half), OPERAND, PRECISION)
        else:
            of_cos = rows_by_keys(
                v,
                row,
                dkv_rounded,
                r,
                c,
                valid,
                H,
                K,
                V,
                BLOCK_T,
                BLOCK_K,
                BLOCK_W,
                OPERAND,
                PRECISION,
            )
        w = weights_of(k + offsets, valid, reference, total, c, K)
        written = (t < stop)[:, None] & (c < K)[None, :]
        if LRPE:
            if HOLDS:
                of_sin = product(values, tl.trans(sin_half), OPERAND, PRECISION)
            else:
                of_sin = rows_by_keys(
                    v, row, dkv_rounded + half, r, c, valid, H, K, V, BLOCK_T, BLOCK_K, BLOCK_W,
                    OPERAND, PRECISION,
                )  # fmt: skip
            cos, sin = load_rotary(rotary, start, r, head, c, tokens, H, K)
            if HAS_DANGLES:
                da = tl.load(dangles + offsets, mask=written, other=0).to(tl.float32)
                tl.store(dangles + offsets, da + w * (of_sin * cos - of_cos * sin), mask=written)
            of_cos = of_cos * cos + of_sin * sin
        offset_tile = tl.load(offset + c, mask=c < K, other=0)
        tl.store(dk + offsets, w * (of_cos - offset_tile[None, :]), mask=written)
        if HOLDS:
            if LRPE:
                acc += product(w * sin, sin_half, OPERAND, PRECISION)
                w *= cos
            acc += product(w, cos_half, OPERAND, PRECISION)
    if not HOLDS:
        for first in range(0, K, BLOCK_K):
            c = first + tl.arange(0, BLOCK_K)
            cos_half, sin_half = load_halves(dkv_rounded, c, e, K, V, LRPE)
            offsets = row * K + r * (H * K) + c[None, :]
            w = weights_of(k + offsets, valid, reference, total, c, K)
            if LRPE:
                cos, sin = load_rotary(rotary, start, r, head, c, tokens, H, K)
                acc += product(w * sin, sin_half, OPERAND, PRECISION)
                w *= cos
            acc += product(w, cos_half, OPERAND, PRECISION)
    acc = tl.where(valid, acc, 0.0)
    tl.store(dv + at_v, acc, mask=(t < stop)[:, None] & value_mask)


@jit
def weights_of(pointers, valid, reference, total, c, K: tl.constexpr):
    """Compute exp(k) / n of a tile; `reference` and `total` represent the n of one head."""
    logits = tl.load(pointers, mask=valid & (c < K)[None, :], other=float("-inf")).to(tl.float32)
    m = tl.load(reference + c, mask=c < K, other=0)
    n = tl.load(total + c, mask=c < K, other=1)
    return tl.exp(logits - m[None, :]) * (1 / n)[None, :]
