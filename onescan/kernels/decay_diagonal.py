"""Decayed attention in chunks, one decay a key channel, both directions at once.

What `decay_scalar` has as a mask of scores is here a factor of queries and keys, of each channel.
Two tokens of a chunk first lie in two halves of a block of 2, 4, ... tokens: a level. Between them
is what has decayed from the key to the middle, a factor of the key, and from there to the query, a
factor of the query, both at most 1:

    score_ij = sum_c q_ic exp(middle to i) k_jc exp(j to middle)

A sum of decays is a product of ones and zeros with them, so it has no difference and loses
nothing; its transpose takes gradients back to them.

Source: LION, arXiv:2502.16249, Theorem B.1; `onescan.ops.decay_attention.tile` for the levels.
"""

from collections.abc import Iterator
from typing import Any

import triton.language as tl

from onescan.kernels import decay_scalar
from onescan.kernels.common import (
    Blocks,
    Build,
    jit,
    live_tokens,
    multiplication,
    power_of_two,
    product,
)
from onescan.kernels.decay_scalar import (
    BUILT,
    VANISHED,
    met_by,
    parts_of,
    scores_of,
    share_of,
    state_of,
    tile_of,
)


def blocks_of(key_width: int, value_width: int, data: str, chip: str) -> Blocks:
    """Of states, and of all the chunks: 32 tokens, five levels."""
    keys, values = (min(power_of_two(width), 32) for width in (key_width, value_width))
    return Blocks(32, keys, values, warps=4, stages=1)


def read_blocks(key_width: int, value_width: int, data: str, chip: str) -> Blocks:
    """Of what is read: all values at once, as factors of keys are dear, where registers last."""
    values = power_of_two(value_width)
    return Blocks(32, 16, min(values, 64) if data == "fp32" else values, warps=8, stages=1)


def slope_blocks(key_width: int, value_width: int, data: str, chip: str) -> Blocks:
    """Of slopes: few channels, as queries and keys have gradients beside them."""
    blocks = blocks_of(key_width, value_width, data, chip)
    return blocks._replace(keys=16, warps=8 if chip.startswith("sm_") else 4)


def constants_of(
    heads: int,
    key_width: int,
    value_width: int,
    data: str,
    chip: str,
    blocks: Blocks,
    *,
    keep: bool,
) -> dict[str, Any]:
    """What all kernels are compiled for."""
    return {
        **decay_scalar.constants_of(heads, key_width, value_width, data, chip, blocks, keep=keep),
        "EXACT": multiplication("fp32", chip)["PRECISION"],
        "LEVELS": blocks.tokens.bit_length() - 1,
    }


def builds(data: str, chip: str) -> Iterator[Build]:
    """What `make check-kernels` compiles."""
    carried = "data" if data == "bf16" else "fp32"
    sizes = "i32 i32 i32"
    of_states = f"data data fp32 fp32 fp32 i1 fp32 fp32 {carried} fp32 fp32 fp32 {sizes}"
    read_from = f"data data data fp32 fp32 i1 {carried} fp32"
    of_read, of_turned = f"{read_from} fp32 fp32 {sizes}", f"{read_from} data fp32 {sizes}"
    inputs = f"data data data data fp32 fp32 fp32 i1 {carried} fp32 {carried} fp32"
    for widths in BUILT:
        name = "{} {}".format(*widths)
        several = [f(*widths, data, chip) for f in (blocks_of, read_blocks, slope_blocks)]
        keep, rows = widths[0] == 96, {"ROWS": widths[0] != 64}
        given, wide, sloped = (constants_of(8, *widths, data, chip, x, keep=keep) for x in several)
        side = {**given, **rows, "ENTERS": keep, "GRADIENT": False}
        yield Build(name, states, of_states, side, several[0])
        yield Build(f"{name} gradient", states, of_states, {**side, "GRADIENT": True}, several[0])
        shut = {**wide, "BELOW": True, "ABOVE": False, "TURNED": False, "NORMALIZER": 1}
        yield Build(f"{name} causal", read, of_read, shut, several[1])
        both = {**shut, "ABOVE": True}
        yield Build(name, read, of_read, both, several[1])
        yield Build(f"{name} turned", read, of_turned, {**both, "TURNED": True}, several[1])
        for kind, above in (("", True), (" causal", False)):
            sides = {**sloped, **rows, "ABOVE": above}
            yield Build(name + kind, slopes, f"{inputs} data data fp32 {sizes}", sides, several[2])


@jit
def decays_of(decays, begin, rows, there, first, K: tl.constexpr, BLOCK: tl.constexpr):
    """Log-decays of a tile of some channels, so low at most that a sum of them stays finite."""
    own = tile_of(decays + begin * K, rows, there, first, K, BLOCK)
    return tl.where(own < VANISHED, VANISHED, own)


@jit
def exact(ones, x, EXACT: tl.constexpr):
    """Sums of some rows of x, those where there is a one, in all their digits."""
    return tl.dot(ones, x, input_precision=EXACT, out_dtype=tl.float32)


@jit
def passed_to(RIGHTWARD: tl.constexpr, AFTER: tl.constexpr, BLOCK_T: tl.constexpr):
    """Which decays are passed, [x, y] of the one at y, by what enters a chunk and gets to x.

    AFTER: by what leaves x and gets to the end of the chunk.
    """
    x, y = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_T)[None, :]
    if RIGHTWARD:
        return tl.where(y > x if AFTER else y <= x, 1.0, 0.0)
    return tl.where(y < x if AFTER else y >= x, 1.0, 0.0)


@jit
def sums_to(
    decays, begin, rows, t, tokens, first, H: tl.constexpr, K: tl.constexpr,
    RIGHTWARD: tl.constexpr, AFTER: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What `passed_to` adds up, where a loop over keys would hold it all the time."""
    x = tl.arange(0, BLOCK_T)
    there = t < tokens
    if AFTER:
        step: tl.constexpr = 1 if RIGHTWARD else -1
        begin += step * H
        there = (t + step < tokens) & (x + step >= 0) & (x + step < BLOCK_T)
    own = decays_of(decays, begin, rows, there, first, K, BLOCK_K)
    return tl.cumsum(own, 0, reverse=RIGHTWARD == AFTER)


@jit
def passed_in(level, RIGHTWARD: tl.constexpr, BLOCK_T: tl.constexpr):
    """Which decays are passed, [x, y] of the one at y, between x and the middle of its block.

    A query is in the half visited second, a key in the other.
    """
    x, y = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_T)[None, :]
    second = ((x >> level) & 1) == (1 if RIGHTWARD else 0)
    if RIGHTWARD:
        passed = (second & (y <= x)) | (~second & (y > x))
    else:
        passed = (second & (y >= x)) | (~second & (y < x))
    return tl.where(passed & ((x >> level) == (y >> level)), 1.0, 0.0)


@jit
def met_in(level, BELOW: tl.constexpr, ABOVE: tl.constexpr, BLOCK_T: tl.constexpr):
    """[i, j]: whether two tokens are in different halves of one block."""
    i, j = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_T)[None, :]
    together = (i >> (level + 1)) == (j >> (level + 1))
    below = (i >> level) > (j >> level)
    above = (i >> level) < (j >> level)
    return together & ((below & BELOW) | (above & ABOVE))


@jit
def factors_of(
    forward, backward, level, BOTH: tl.constexpr, BLOCK_T: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Factors of queries and of keys at a level, of their channels."""
    right = tl.exp(exact(passed_in(level, True, BLOCK_T), forward, EXACT))
    if not BOTH:
        return right, right
    left = tl.exp(exact(passed_in(level, False, BLOCK_T), backward, EXACT))
    upper = ((tl.arange(0, BLOCK_T)[:, None] >> level) & 1) == 1
    return tl.where(upper, right, left), tl.where(upper, left, right)


@jit
def states(
    k, v, share, dc, decays, keep, enter, enter_sum,
    before, before_sum, last, last_sum,
    batch, tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    ENTERS: tl.constexpr, GRADIENT: tl.constexpr, ROWS: tl.constexpr, KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """As in `decay_scalar`, with decays [D, B, T, H, K]."""
    line = tl.program_id(0).to(tl.int64)
    head, sample, direction = parts_of(tl.program_id(0), batch, H)
    first, start = tl.program_id(1) * BLOCK_K, tl.program_id(2) * BLOCK_V
    c = first + tl.arange(0, BLOCK_K)
    e = start + tl.arange(0, BLOCK_V)
    inside = (c < K)[:, None] & (e < V)[None, :]
    place = c[:, None] * V + e[None, :]
    alone = (c < K) & (start == 0)
    rightward = (direction == 0) != GRADIENT
    acc = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_K], tl.float32)
    if ENTERS:
        acc += tl.load(enter + line * (K * V) + place, mask=inside, other=0)
        total += tl.load(enter_sum + line * K + c, mask=c < K, other=0)
    # of states what leaves a token, of gradients what gets to it
    passed = tl.where(
        direction == 0,
        passed_to(True, not GRADIENT, BLOCK_T),
        passed_to(False, not GRADIENT, BLOCK_T),
    )
    rows = (tl.arange(0, BLOCK_T) * H)[:, None]
    for visited in range(chunks):
        chunk = tl.where(rightward, visited, chunks - 1 - visited)
        t = chunk * BLOCK_T + tl.arange(0, BLOCK_T)
        live = live_tokens(keep, sample, t, tokens, KEEP)
        here = line * chunks + chunk
        tl.store(before + here * (K * V) + place, acc, mask=inside)
        tl.store(before_sum + here * K + c, total, mask=alone)
        begin = (sample * tokens + chunk * BLOCK_T) * H + head
        of_direction = direction * (batch * H).to(tl.int64) * tokens
        own = decays_of(decays, of_direction + begin, rows, t < tokens, first, K, BLOCK_K)
        weights = tl.exp(exact(passed, own, EXACT))
        keys = tile_of(k + begin * K, rows, live, first, K, BLOCK_K).to(tl.float32) * weights
        values = tile_of(v + begin * V, rows, live, start, V, BLOCK_V)
        through = tl.exp(tl.sum(own, 0))
        acc *= through[:, None]
        total *= through
        if GRADIENT:
            if ROWS:
                of_sum = tl.load(dc + begin + rows, mask=live[:, None], other=0)
                total += tl.sum(keys * of_sum, 0)
                keys *= tl.load(share + begin + rows, mask=live[:, None], other=0)
        else:
            total += tl.sum(keys, 0)
        acc += product(tl.trans(keys), values, OPERAND, PRECISION)
    tl.store(last + line * (K * V) + place, acc, mask=inside)
    tl.store(last_sum + line * K + c, total, mask=alone)


@jit
def read(
    q, k, v, share, decays, keep, state, state_sum,
    o, c,
    batch, tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BELOW: tl.constexpr, ABOVE: tl.constexpr, TURNED: tl.constexpr,
    NORMALIZER: tl.constexpr, KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """As in `decay_scalar`, some values; TURNED, keys are in q's place and queries in k's."""
    head, sample, chunk = parts_of(tl.program_id(0), batch, H)
    start = tl.program_id(1) * BLOCK_V
    lower: tl.constexpr = 1 if TURNED else 0
    BOTH: tl.constexpr = BELOW and ABOVE
    t = chunk * BLOCK_T + tl.arange(0, BLOCK_T)
    live = live_tokens(keep, sample, t, tokens, KEEP)
    begin = (sample * tokens + chunk * BLOCK_T) * H + head
    line = tl.arange(0, BLOCK_T) * H
    rows = line[:, None]
    q, k, v, o = q + begin * K, k + begin * K, v + begin * V, o + begin * V
    of_right = (batch * H).to(tl.int64) * tokens * (1 if BOTH else 0)
    beneath = ((lower * batch + sample) * H + head) * chunks + chunk
    over = (((1 - lower) * batch + sample) * H + head) * chunks + chunk
    i, j = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_T)[None, :]
    e = start + tl.arange(0, BLOCK_V)
    weights = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    acc = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    for first in range(0, K, BLOCK_K):
        queries = tile_of(q, rows, live, first, K, BLOCK_K).to(tl.float32)
        keys = tile_of(k, rows, live, first, K, BLOCK_K).to(tl.float32)
        forward = decays_of(decays, begin, rows, t < tokens, first, K, BLOCK_K)
        backward = decays_of(decays, begin + of_right, rows, t < tokens, first, K, BLOCK_K)
        weights += tl.where(i == j, tl.sum(queries * keys, 1)[:, None], 0.0)
        for level in range(LEVELS):  # not unrolled: masks of all levels at once would not fit
            near, far = factors_of(forward, backward, level, BOTH, BLOCK_T, EXACT)
            if TURNED:
                scores = product(queries * far, tl.trans(keys * near), OPERAND, PRECISION)
            else:
                scores = product(queries * near, tl.trans(keys * far), OPERAND, PRECISION)
            weights += tl.where(met_in(level, BELOW, ABOVE, BLOCK_T), scores, 0.0)
        f = first + tl.arange(0, BLOCK_K)
        if BELOW:
            passed = sums_to(
                decays, begin + of_right if TURNED else begin, rows, t, tokens, first,
                H, K, not TURNED, TURNED, BLOCK_T, BLOCK_K,
            )  # fmt: skip
            met = queries * tl.exp(passed)
            kv = state_of(state, beneath, first, start, K, V, BLOCK_K, BLOCK_V)
            acc += product(met, kv, OPERAND, PRECISION)
            if NORMALIZER and not TURNED:
                z = tl.load(state_sum + beneath * K + f, mask=f < K, other=0)
                total += tl.sum(met * z[None, :], 1)
        if ABOVE:
            passed = sums_to(
                decays, begin if TURNED else begin + of_right, rows, t, tokens, first,
                H, K, TURNED, TURNED, BLOCK_T, BLOCK_K,
            )  # fmt: skip
            met = queries * tl.exp(passed)
            kv = state_of(state, over, first, start, K, V, BLOCK_K, BLOCK_V)
            acc += product(met, kv, OPERAND, PRECISION)
            if NORMALIZER and not TURNED:
                z = tl.load(state_sum + over * K + f, mask=f < K, other=0)
                total += tl.sum(met * z[None, :], 1)
    factor = tl.full([BLOCK_T], 1.0, tl.float32)
    if NORMALIZER:
        if TURNED:
            weights *= tl.load(share + begin + line, mask=live, other=0)[None, :]
        else:
            total += tl.sum(weights, 1)
            tl.store(c + begin + line, total, mask=(t < tokens) & (start == 0))
            factor, _ = share_of(total, NORMALIZER)
    values = tile_of(v, rows, live, start, V, BLOCK_V)
    acc += product(weights, values, OPERAND, PRECISION)
    there = (t < tokens)[:, None] & (e < V)[None, :]
    tl.store(o + rows * V + e[None, :], acc * factor[:, None], mask=there)


@jit
def products_of(
    x, x_sum, y, y_sum, row, first, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """<x, y> of each key channel of two states with their sums of keys."""
    f = first + tl.arange(0, BLOCK_K)
    z = tl.load(x_sum + row * K + f, mask=f < K, other=0)
    acc = z * tl.load(y_sum + row * K + f, mask=f < K, other=0)
    for start in range(0, V, BLOCK_V):
        kv = state_of(x, row, first, start, K, V, BLOCK_K, BLOCK_V).to(tl.float32)
        acc += tl.sum(kv * state_of(y, row, first, start, K, V, BLOCK_K, BLOCK_V), 1)
    return acc


@jit
def passing_slopes(
    q, k, do, v, own, leaving, share, dc, before, before_sum, after, after_sum,
    line, rows, live, first,
    K: tl.constexpr, V: tl.constexpr, RIGHTWARD: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """What the states of one direction give to queries and keys (tiles q, k) and its decays.

    own: decays; leaving: their sums after each token.
    """
    one = tl.full([BLOCK_T], 1.0, tl.float32)
    through = tl.exp(tl.sum(own, 0))
    through *= products_of(
        before, before_sum, after, after_sum, line, first, K, V, BLOCK_K, BLOCK_V
    )  # fmt: skip
    dq = tl.exp(tl.cumsum(own, 0, reverse=not RIGHTWARD)) * met_by(
        do, before, before_sum, share, dc, line, rows, live, first, K, V, ROWS,
        BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION,
    )  # fmt: skip
    dk = tl.exp(leaving) * met_by(
        v, after, after_sum, one, one, line, rows, live, first, K, V, True,
        BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION,
    )  # fmt: skip
    # a decay is passed before it by what enters, and by what leaves the tokens before its own
    change = tl.cumsum(dq * q, 0, reverse=RIGHTWARD) + through[None, :]
    leaves = passed_to(not RIGHTWARD, True, BLOCK_T)
    return dq, dk, change + exact(leaves, dk * k, EXACT)


@jit
def slopes(
    k, q, v, do, share, dc, decays, keep, before, before_sum, after, after_sum,
    dq, dk, ddecays,
    batch, tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    ABOVE: tl.constexpr, ROWS: tl.constexpr, KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk's queries, keys and log-decays, ddecays [D, B, T, H, K], of some keys.

    before: the states that enter each chunk; after: the gradients of those that leave it.
    """
    head, sample, chunk = parts_of(tl.program_id(0), batch, H)
    first = tl.program_id(1) * BLOCK_K
    t = chunk * BLOCK_T + tl.arange(0, BLOCK_T)
    live = live_tokens(keep, sample, t, tokens, KEEP)
    begin = (sample * tokens + chunk * BLOCK_T) * H + head
    line = tl.arange(0, BLOCK_T) * H
    rows = line[:, None]
    across = (batch * H).to(tl.int64)
    left = (sample * H + head) * chunks + chunk
    v, do = v + begin * V, do + begin * V
    queries = tile_of(q + begin * K, rows, live, first, K, BLOCK_K).to(tl.float32)
    keys = tile_of(k + begin * K, rows, live, first, K, BLOCK_K).to(tl.float32)
    there = t < tokens
    forward = decays_of(decays, begin, rows, there, first, K, BLOCK_K)
    of_right = across * tokens * ABOVE
    backward = decays_of(decays, begin + of_right, rows, there, first, K, BLOCK_K)
    factor = tl.full([BLOCK_T], 1.0, tl.float32)
    of_sum = tl.zeros([BLOCK_T], tl.float32)
    if ROWS:
        factor = tl.load(share + begin + line, mask=live, other=0)
        of_sum = tl.load(dc + begin + line, mask=live, other=0)
    slope = scores_of(do, v, rows, live, V, BLOCK_T, BLOCK_V, OPERAND, PRECISION)
    slope = slope * factor[:, None] + of_sum[:, None]
    i, j = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_T)[None, :]
    own = tl.sum(tl.where(i == j, slope, 0.0), 1)[:, None]
    leaving = sums_to(
        decays, begin, rows, t, tokens, first, H, K, True, True, BLOCK_T, BLOCK_K
    )  # fmt: skip
    of_queries, of_keys, of_forward = passing_slopes(
        queries, keys, do, v, forward, leaving, factor, of_sum,
        before, before_sum, after, after_sum, left, rows, live, first, K, V, True, ROWS,
        BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION, EXACT,
    )  # fmt: skip
    of_queries += own * keys
    of_keys += own * queries
    of_backward = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    if ABOVE:
        leaving = sums_to(
            decays, begin + of_right, rows, t, tokens, first, H, K, False, True, BLOCK_T, BLOCK_K
        )  # fmt: skip
        more_queries, more_keys, of_backward = passing_slopes(
            queries, keys, do, v, backward, leaving, factor, of_sum,
            before, before_sum, after, after_sum, left + across * chunks, rows, live, first,
            K, V, False, ROWS,
            BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION, EXACT,
        )  # fmt: skip
        of_queries += more_queries
        of_keys += more_keys
    for level in range(LEVELS):  # not unrolled: masks of all levels at once would not fit
        near, far = factors_of(forward, backward, level, ABOVE, BLOCK_T, EXACT)
        met = tl.where(met_in(level, True, ABOVE, BLOCK_T), slope, 0.0)
        more_queries = near * product(met, keys * far, OPERAND, PRECISION)
        more_keys = far * product(tl.trans(met), queries * near, OPERAND, PRECISION)
        of_queries += more_queries
        of_keys += more_keys
        more_queries *= queries
        more_keys *= keys
        upper = ((i >> level) & 1) == 1
        passed = tl.trans(passed_in(level, True, BLOCK_T))
        of_forward += exact(passed, tl.where(upper, more_queries, more_keys), EXACT)
        if ABOVE:
            passed = tl.trans(passed_in(level, False, BLOCK_T))
            of_backward += exact(passed, tl.where(upper, more_keys, more_queries), EXACT)
    c = first + tl.arange(0, BLOCK_K)
    place = begin * K + rows * K + c[None, :]
    inside = there[:, None] & (c < K)[None, :]
    tl.store(dq + place, of_queries, mask=inside)
    tl.store(dk + place, tl.where(live[:, None], of_keys, 0.0), mask=inside)
    tl.store(ddecays + place, of_forward, mask=inside)
    if ABOVE:
        tl.store(ddecays + of_right * K + place, of_backward, mask=inside)
