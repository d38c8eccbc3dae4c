"""Decayed attention in chunks, one decay a head and token, both directions at once.

    S_n = the state that enters chunk n, of each direction            states
    O   = ((Q K^T) * M) V + enter_f (Q S_f) + enter_b (Q S_b)         read, then / row sum

and backwards, with dS the gradient of the state that leaves a chunk and D = dO V^T + dc:

    dS_n likewise, from the last chunk visited to the first           states
    dV = ((Q K^T) * M)^T dO + leave_f (K dS_f) + leave_b (K dS_b)     read, turned
    dQ = (D * M) K + enter_f (dO S_f^T) + enter_b (dO S_b^T)          slopes_of_queries
    dK = (D * M)^T Q + leave_f (V dS_f^T) + leave_b (V dS_b^T)        slopes_of_keys

A decay lies in M_ij, enter_i, leave_j or through wherever it lies between what meets there, so its
gradient is a sum over those alone: it takes no difference, and a decay of nothing has exactly 0.

P is what has decayed up to a token, of one direction: M_ij = exp(P_i - P_j) from the left and
exp(P_j - P_i) from the right, enter and leave exp(P) or exp(end - P). It is summed in float64 and
kept as two float32, as a difference of sums would lose what lies between two tokens.

Source: LION, arXiv:2502.16249, Sec. 3.4; states carried both ways are not in the paper.
"""

from collections.abc import Iterator
from typing import Any

import triton.language as tl

from onescan.kernels.chips import reads_operands_from_shared
from onescan.kernels.common import (
    Blocks,
    Build,
    jit,
    live_tokens,
    multiplication,
    power_of_two,
    product,
)

VANISHED = tl.constexpr(-800.0)  # exp of less is 0 in every type
LEAST_WEIGHT = tl.constexpr(1e-30)  # as onescan.ops.numerics has it

# What outputs are divided by: a row sum c as one of these says.
NORMALIZERS = {"none": 0, "sum": 1, "max_one": 2, "absolute_max_one": 3}


# Widths that `make check-kernels` compiles: of keys, of values.
BUILT = ((64, 64), (96, 128), (128, 128))


def blocks_of(key_width: int, value_width: int, data: str, chip: str) -> Blocks:
    """Of states, and of all the chunks: scores, and two sums beside them, stay in registers."""
    widest = 64 if data == "bf16" else 32  # others multiply as 32 bits
    keys, values = (min(power_of_two(width), widest) for width in (key_width, value_width))
    return Blocks(widest, keys, values, warps=4, stages=2)


def read_blocks(key_width: int, value_width: int, data: str, chip: str) -> Blocks:
    """Of what is read, as of states."""
    return blocks_of(key_width, value_width, data, chip)


def slope_blocks(key_width: int, value_width: int, data: str, chip: str) -> Blocks:
    """Of slopes: more threads or fewer channels, as they hold more besides."""
    blocks = blocks_of(key_width, value_width, data, chip)
    if not chip.startswith("sm_"):
        return blocks
    if data != "bf16":
        return Blocks(blocks.tokens, 16, 16, warps=8, stages=1 if data == "fp32" else 2)
    values = blocks.values if reads_operands_from_shared(chip) else 32
    return blocks._replace(values=min(blocks.values, values), warps=8)


def share_blocks(value_width: int) -> Blocks:
    """Of `shares`."""
    return Blocks(32, 0, power_of_two(value_width), warps=4, stages=1)


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
    """What all kernels but `shares` are compiled for."""
    return {
        "H": heads,
        "K": key_width,
        "V": value_width,
        "KEEP": keep,
        "BLOCK_T": blocks.tokens,
        "BLOCK_K": blocks.keys,
        "BLOCK_V": blocks.values,
        **multiplication(data, chip),
    }


def builds(data: str, chip: str) -> Iterator[Build]:
    """What `make check-kernels` compiles."""
    carried = "data" if data == "bf16" else "fp32"
    sizes = "i32 i32 i32"
    of_states = f"data data fp32 fp32 fp32 i1 fp32 fp32 {carried} fp32 fp32 fp32 {sizes}"
    read_from = f"data data data fp32 fp32 i1 {carried} fp32"
    of_read, of_turned = f"{read_from} fp32 fp32 {sizes}", f"{read_from} data fp32 {sizes}"
    inputs = f"data data data data fp32 fp32 fp32 i1 {carried} fp32"
    of_queries = f"{inputs} {carried} fp32 data fp32 {sizes}"
    of_keys = f"{inputs} data fp32 {sizes}"
    for widths in BUILT:
        name = "{} {}".format(*widths)
        blocks, wide = (f(*widths, data, chip) for f in (blocks_of, slope_blocks))
        keep, rows = widths[0] == 96, {"ROWS": widths[0] != 64}
        given, slopes = (constants_of(8, *widths, data, chip, x, keep=keep) for x in (blocks, wide))
        side = {**given, **rows, "ENTERS": keep, "GRADIENT": False}
        yield Build(name, states, of_states, side, blocks)
        yield Build(f"{name} gradient", states, of_states, {**side, "GRADIENT": True}, blocks)
        shut = {**given, "BELOW": True, "ABOVE": False, "TURNED": False, "NORMALIZER": 1}
        yield Build(f"{name} causal", read, of_read, shut, blocks)
        both = {**shut, "ABOVE": True}
        yield Build(name, read, of_read, both, blocks)
        yield Build(f"{name} turned", read, of_turned, {**both, "TURNED": True}, blocks)
        for kind, above in (("", True), (" causal", False)):
            sides = {**slopes, **rows, "ABOVE": above}
            yield Build(name + kind, slopes_of_queries, of_queries, sides, wide)
            yield Build(name + kind, slopes_of_keys, of_keys, sides, wide)
        lines = share_blocks(widths[1])
        line = {"BLOCK_T": lines.tokens, "BLOCK_V": lines.values, "V": widths[1], "NORMALIZER": 1}
        yield Build(name, shares, "fp32 data fp32 fp32 fp32 i32", line, lines)


@jit
def parts_of(program, batch, H: tl.constexpr):
    """Head and sample of a program, wide enough for what is far away, and its chunk."""
    row = program // H
    return (program % H).to(tl.int64), (row % batch).to(tl.int64), row // batch


@jit
def decayed(decays, row, t, tokens, head, H: tl.constexpr):
    """Each token's log-decay and their sums up to it, in float64, and the sum of all."""
    own = tl.load(decays + (row * tokens + t) * H + head, mask=t < tokens, other=0).to(tl.float64)
    own = tl.where(own < VANISHED, VANISHED, own)
    return own, tl.cumsum(own, 0), tl.sum(own, 0)


@jit
def exponential(x):
    """exp(x), 0 < exp(x) <= 1, of a float64 in float32."""
    return tl.exp(x.to(tl.float32))


@jit
def gap(x, y):
    """x_i - y_j of float64 sums, [i, j], in float32 without what cancels."""
    x_high, y_high = x.to(tl.float32), y.to(tl.float32)
    x_low, y_low = (x - x_high).to(tl.float32), (y - y_high).to(tl.float32)
    return (x_high[:, None] - y_high[None, :]) + (x_low[:, None] - y_low[None, :])


@jit
def mask_between(below, above, BELOW: tl.constexpr, ABOVE: tl.constexpr, BLOCK_T: tl.constexpr):
    """M, of sums that fall from token to token: 1 on the diagonal, 0 on a side that is shut."""
    i = tl.arange(0, BLOCK_T)[:, None]
    j = tl.arange(0, BLOCK_T)[None, :]
    logs = tl.full([BLOCK_T, BLOCK_T], float("-inf"), tl.float32)
    if BELOW:
        logs = tl.where(i > j, gap(below, below), logs)
    if ABOVE:
        logs = tl.where(i < j, -gap(above, above), logs)
    return tl.exp(tl.where(i == j, 0.0, logs))


@jit
def tile_of(x, rows, live, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Some channels of a tile's tokens, 0 where a token is not; x begins at the tile."""
    c = first + tl.arange(0, BLOCK)
    return tl.load(
        x + rows * WIDTH + c[None, :], mask=live[:, None] & (c < WIDTH)[None, :], other=0
    )


@jit
def state_of(
    x, row, first, start, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Some keys and values of a state."""
    c = first + tl.arange(0, BLOCK_K)
    e = start + tl.arange(0, BLOCK_V)
    inside = (c < K)[:, None] & (e < V)[None, :]
    return tl.load(x + row * (K * V) + c[:, None] * V + e[None, :], mask=inside, other=0)


@jit
def scores_of(
    q, k, rows, live, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of a tile, q k^T."""
    scores = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    for first in range(0, K, BLOCK_K):
        queries = tile_of(q, rows, live, first, K, BLOCK_K)
        keys = tile_of(k, rows, live, first, K, BLOCK_K)
        scores += product(queries, tl.trans(keys), OPERAND, PRECISION)
    return scores


@jit
def read_of(
    q, state, row, rows, live, start, K: tl.constexpr, V: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some values of q S."""
    acc = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    for first in range(0, K, BLOCK_K):
        queries = tile_of(q, rows, live, first, K, BLOCK_K)
        kv = state_of(state, row, first, start, K, V, BLOCK_K, BLOCK_V)
        acc += product(queries, kv, OPERAND, PRECISION)
    return acc


@jit
def states(
    k, v, share, dc, decays, keep, enter, enter_sum,
    before, before_sum, last, last_sum,
    batch, tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    ENTERS: tl.constexpr, GRADIENT: tl.constexpr, ROWS: tl.constexpr, KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state before each chunk, of each direction in a program of its own.

    before, before_sum: [D, B, H, N, K, V] and without V; last, last_sum likewise without N.
    GRADIENT: of the states instead, with q and dO in place of k and v, visited the other way.
    """
    line = tl.program_id(0).to(tl.int64)
    head, sample, direction = parts_of(tl.program_id(0), batch, H)
    first, start = tl.program_id(1) * BLOCK_K, tl.program_id(2) * BLOCK_V
    c = first + tl.arange(0, BLOCK_K)
    e = start + tl.arange(0, BLOCK_V)
    inside = (c < K)[:, None] & (e < V)[None, :]
    place = c[:, None] * V + e[None, :]
    alone = (c < K) & (start == 0)  # one of those that share these keys writes their sum
    rightward = (direction == 0) != GRADIENT
    acc = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_K], tl.float32)
    if ENTERS:
        acc += tl.load(enter + line * (K * V) + place, mask=inside, other=0)
        total += tl.load(enter_sum + line * K + c, mask=c < K, other=0)
    rows = tl.arange(0, BLOCK_T) * H
    for visited in range(chunks):
        chunk = tl.where(rightward, visited, chunks - 1 - visited)
        t = chunk * BLOCK_T + tl.arange(0, BLOCK_T)
        live = live_tokens(keep, sample, t, tokens, KEEP)
        begin = (sample * tokens + chunk * BLOCK_T) * H + head
        here = line * chunks + chunk
        tl.store(before + here * (K * V) + place, acc, mask=inside)
        tl.store(before_sum + here * K + c, total, mask=alone)
        own, sums, end = decayed(decays, direction * batch + sample, t, tokens, head, H)
        sums = tl.where(direction == 0, sums, sums - own)
        weights = exponential(tl.where(rightward, end - sums, sums))
        keys = tile_of(k + begin * K, rows[:, None], live, first, K, BLOCK_K).to(tl.float32)
        values = tile_of(v + begin * V, rows[:, None], live, start, V, BLOCK_V)
        through = exponential(end)
        acc *= through
        total *= through
        added = weights
        if GRADIENT:
            if ROWS:
                added *= tl.load(dc + begin + rows, mask=live, other=0)
                weights *= tl.load(share + begin + rows, mask=live, other=0)
                total += tl.sum(keys * added[:, None], 0)
        else:
            total += tl.sum(keys * added[:, None], 0)
        weighted = tl.trans(keys * weights[:, None])
        acc += product(weighted, values, OPERAND, PRECISION)
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
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs of a chunk, and its row sums c [B, T, H] where they are divided by them.

    TURNED: gradients of values instead. Keys are in q's place, queries in k's, dO in v's and the
    gradients of states in theirs: what was above the diagonal is below it.
    """
    head, sample, chunk = parts_of(tl.program_id(0), batch, H)
    lower: tl.constexpr = 1 if TURNED else 0  # direction of what is below the diagonal
    t = chunk * BLOCK_T + tl.arange(0, BLOCK_T)
    live = live_tokens(keep, sample, t, tokens, KEEP)
    begin = (sample * tokens + chunk * BLOCK_T) * H + head
    q, k, v, o = q + begin * K, k + begin * K, v + begin * V, o + begin * V
    line = tl.arange(0, BLOCK_T) * H
    rows = line[:, None]
    own, below, _ = decayed(decays, lower * BELOW * batch + sample, t, tokens, head, H)
    below = below - own if TURNED else below
    own, above, end = decayed(decays, (1 - lower) * ABOVE * batch + sample, t, tokens, head, H)
    above = above if TURNED else above - own
    near = exponential(below)
    far = exponential(end - above)
    # lines of states, [D, B, H, N]
    beneath = ((lower * batch + sample) * H + head) * chunks + chunk
    over = (((1 - lower) * batch + sample) * H + head) * chunks + chunk
    weights = scores_of(q, k, rows, live, K, BLOCK_T, BLOCK_K, OPERAND, PRECISION)
    weights *= mask_between(below, above, BELOW, ABOVE, BLOCK_T)
    factor = tl.full([BLOCK_T], 1.0, tl.float32)
    if NORMALIZER:
        if TURNED:
            weights *= tl.load(share + begin + line, mask=live, other=0)[None, :]
        else:
            total = tl.sum(weights, 1)
            for first in range(0, K, BLOCK_K):
                queries = tile_of(q, rows, live, first, K, BLOCK_K).to(tl.float32)
                f = first + tl.arange(0, BLOCK_K)
                if BELOW:
                    z = tl.load(state_sum + beneath * K + f, mask=f < K, other=0)
                    total += near * tl.sum(queries * z[None, :], 1)
                if ABOVE:
                    z = tl.load(state_sum + over * K + f, mask=f < K, other=0)
                    total += far * tl.sum(queries * z[None, :], 1)
            tl.store(c + begin + line, total, mask=t < tokens)
            factor, _ = share_of(total, NORMALIZER)
    for start in range(0, V, BLOCK_V):
        values = tile_of(v, rows, live, start, V, BLOCK_V)
        acc = product(weights, values, OPERAND, PRECISION)
        if BELOW:
            acc += near[:, None] * read_of(
                q, state, beneath, rows, live, start, K, V,
                BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION,
            )  # fmt: skip
        if ABOVE:
            acc += far[:, None] * read_of(
                q, state, over, rows, live, start, K, V,
                BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION,
            )  # fmt: skip
        e = start + tl.arange(0, BLOCK_V)
        there = (t < tokens)[:, None] & (e < V)[None, :]
        tl.store(o + rows * V + e[None, :], acc * factor[:, None], mask=there)


@jit
def share_of(c, NORMALIZER: tl.constexpr):
    """What outputs are multiplied by, 1 / divisor(c), and the divisor's slope."""
    if NORMALIZER == 1:
        tiny = tl.abs(c) < LEAST_WEIGHT
        divisor, slope = tl.where(tiny, 1.0, c), tl.where(tiny, 0.0, 1.0)
    else:
        size, sign = c, 1.0
        if NORMALIZER > 2:
            size, sign = tl.abs(c), tl.where(c < 0, -1.0, 1.0)
        # as torch.clamp has it: NaN stays, and 1 itself has a slope
        divisor, slope = tl.where(size < 1, 1.0, size), tl.where(size < 1, 0.0, sign)
    return 1 / divisor, slope


@jit
def shares(
    o, do, c,
    share, dc,
    lines,
    V: tl.constexpr, NORMALIZER: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """What outputs were multiplied by, and gradients of row sums, of lines [B T H]."""
    line = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_V)
    there = (line < lines)[:, None] & (e < V)[None, :]
    place = line[:, None] * V + e[None, :]
    outputs = tl.load(o + place, mask=there, other=0).to(tl.float32)
    gradients = tl.load(do + place, mask=there, other=0).to(tl.float32)
    total = tl.load(c + line, mask=line < lines, other=1)
    factor, slope = share_of(total, NORMALIZER)
    tl.store(share + line, factor, mask=line < lines)
    tl.store(dc + line, -tl.sum(outputs * gradients, 1) * factor * slope, mask=line < lines)


@jit
def met_by(
    v, state, state_sum, share, dc, row, rows, live, first,
    K: tl.constexpr, V: tl.constexpr, SUMS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some keys of share v S^T + dc z^T, z the state's sum of keys."""
    acc = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for start in range(0, V, BLOCK_V):
        values = tile_of(v, rows, live, start, V, BLOCK_V)
        kv = state_of(state, row, first, start, K, V, BLOCK_K, BLOCK_V)
        acc += product(values, tl.trans(kv), OPERAND, PRECISION)
    acc *= share[:, None]
    if SUMS:
        f = first + tl.arange(0, BLOCK_K)
        z = tl.load(state_sum + row * K + f, mask=f < K, other=0)
        acc += dc[:, None] * z[None, :]
    return acc


@jit
def both_sums(
    x, x_sum, y, y_sum, row, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """<x, y> of two states with their sums of keys."""
    acc = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_K], tl.float32)
    for first in range(0, K, BLOCK_K):
        for start in range(0, V, BLOCK_V):
            kv = state_of(x, row, first, start, K, V, BLOCK_K, BLOCK_V).to(tl.float32)
            acc += kv * state_of(y, row, first, start, K, V, BLOCK_K, BLOCK_V).to(tl.float32)
        f = first + tl.arange(0, BLOCK_K)
        z = tl.load(x_sum + row * K + f, mask=f < K, other=0)
        total += z * tl.load(y_sum + row * K + f, mask=f < K, other=0)
    return tl.sum(tl.sum(acc, 1) + total, 0)


@jit
def slopes_of_queries(
    k, q, v, do, share, dc, decays, keep, before, before_sum, after, after_sum,
    dq, ddecays,
    batch, tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    ABOVE: tl.constexpr, ROWS: tl.constexpr, KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk's queries, and of log-decays as what enters the chunk has them.

    before: the states that enter each chunk; after: the gradients of those that leave it.
    ddecays: [D, B, T, H].
    """
    head, sample, chunk = parts_of(tl.program_id(0), batch, H)
    t = chunk * BLOCK_T + tl.arange(0, BLOCK_T)
    live = live_tokens(keep, sample, t, tokens, KEEP)
    begin = (sample * tokens + chunk * BLOCK_T) * H + head
    q, k, dq = q + begin * K, k + begin * K, dq + begin * K
    v, do, ddecays = v + begin * V, do + begin * V, ddecays + begin
    line = tl.arange(0, BLOCK_T) * H
    rows = line[:, None]
    left = (sample * H + head) * chunks + chunk
    across = (batch * H).to(tl.int64)
    right = left + across * chunks
    _, forward, forward_end = decayed(decays, sample, t, tokens, head, H)
    own, backward, backward_end = decayed(decays, ABOVE * batch + sample, t, tokens, head, H)
    backward -= own
    near, far = exponential(forward), exponential(backward_end - backward)
    factor = tl.full([BLOCK_T], 1.0, tl.float32)
    of_sum = tl.zeros([BLOCK_T], tl.float32)
    if ROWS:
        factor = tl.load(share + begin + line, mask=live, other=0)
        of_sum = tl.load(dc + begin + line, mask=live, other=0)
    slope = scores_of(do, v, rows, live, V, BLOCK_T, BLOCK_V, OPERAND, PRECISION)
    slope = slope * factor[:, None] + of_sum[:, None]
    slope *= mask_between(forward, backward, True, ABOVE, BLOCK_T)
    from_left = tl.zeros([BLOCK_T], tl.float32)
    from_right = tl.zeros([BLOCK_T], tl.float32)
    for first in range(0, K, BLOCK_K):
        queries = tile_of(q, rows, live, first, K, BLOCK_K).to(tl.float32)
        keys = tile_of(k, rows, live, first, K, BLOCK_K)
        acc = product(slope, keys, OPERAND, PRECISION)
        part = near[:, None] * met_by(
            do, before, before_sum, factor, of_sum, left, rows, live, first, K, V, ROWS,
            BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION,
        )  # fmt: skip
        from_left += tl.sum(part * queries, 1)
        acc += part
        if ABOVE:
            part = far[:, None] * met_by(
                do, before, before_sum, factor, of_sum, right, rows, live, first, K, V, ROWS,
                BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION,
            )  # fmt: skip
            from_right += tl.sum(part * queries, 1)
            acc += part
        c = first + tl.arange(0, BLOCK_K)
        there = (t < tokens)[:, None] & (c < K)[None, :]
        tl.store(dq + rows * K + c[None, :], acc, mask=there)
    # what enters reaches a token through its own decay, and those of all visited before it
    passing = exponential(forward_end) * both_sums(
        before, before_sum, after, after_sum, left, K, V, BLOCK_K, BLOCK_V
    )
    change = tl.cumsum(from_left, 0, reverse=True) + passing
    tl.store(ddecays + line, change, mask=t < tokens)
    if ABOVE:
        passing = exponential(backward_end) * both_sums(
            before, before_sum, after, after_sum, right, K, V, BLOCK_K, BLOCK_V
        )
        change = tl.cumsum(from_right, 0) + passing
        tl.store(ddecays + across * tokens + line, change, mask=t < tokens)


@jit
def slopes_of_keys(
    k, q, v, do, share, dc, decays, keep, after, after_sum,
    dk, ddecays,
    batch, tokens, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    ABOVE: tl.constexpr, ROWS: tl.constexpr, KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk's keys; those of log-decays are added to."""
    head, sample, chunk = parts_of(tl.program_id(0), batch, H)
    t = chunk * BLOCK_T + tl.arange(0, BLOCK_T)
    live = live_tokens(keep, sample, t, tokens, KEEP)
    begin = (sample * tokens + chunk * BLOCK_T) * H + head
    q, k, dk = q + begin * K, k + begin * K, dk + begin * K
    v, do, ddecays = v + begin * V, do + begin * V, ddecays + begin
    line = tl.arange(0, BLOCK_T) * H
    rows = line[:, None]
    left = (sample * H + head) * chunks + chunk
    across = (batch * H).to(tl.int64)
    right = left + across * chunks
    _, forward, forward_end = decayed(decays, sample, t, tokens, head, H)
    own, backward, _ = decayed(decays, ABOVE * batch + sample, t, tokens, head, H)
    backward -= own
    near, far = exponential(backward), exponential(forward_end - forward)
    # rows are keys: what the left gives is above the diagonal
    slope = scores_of(v, do, rows, live, V, BLOCK_T, BLOCK_V, OPERAND, PRECISION)
    if ROWS:
        slope *= tl.load(share + begin + line, mask=live, other=0)[None, :]
        slope += tl.load(dc + begin + line, mask=live, other=0)[None, :]
    slope *= mask_between(backward, forward, ABOVE, True, BLOCK_T)
    met = slope * scores_of(k, q, rows, live, K, BLOCK_T, BLOCK_K, OPERAND, PRECISION)
    j = tl.arange(0, BLOCK_T)[:, None]
    i = tl.arange(0, BLOCK_T)[None, :]
    # a decay lies between every key before it and all queries from its own on
    crossing = product(tl.where(j < i, met, 0.0), tl.where(j >= i, 1.0, 0.0), OPERAND, PRECISION)
    to_right = tl.sum(tl.where(j < i, crossing, 0.0), 0)
    if ABOVE:
        met = tl.where(j > i, met, 0.0)
        crossing = product(met, tl.where(j <= i, 1.0, 0.0), OPERAND, PRECISION)
        to_left = tl.sum(tl.where(j > i, crossing, 0.0), 0)
    one = tl.full([BLOCK_T], 1.0, tl.float32)
    gives_right = tl.zeros([BLOCK_T], tl.float32)
    gives_left = tl.zeros([BLOCK_T], tl.float32)
    for first in range(0, K, BLOCK_K):
        keys = tile_of(k, rows, live, first, K, BLOCK_K).to(tl.float32)
        queries = tile_of(q, rows, live, first, K, BLOCK_K)
        acc = product(slope, queries, OPERAND, PRECISION)
        part = far[:, None] * met_by(
            v, after, after_sum, one, one, left, rows, live, first, K, V, True,
            BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION,
        )  # fmt: skip
        gives_right += tl.sum(part * keys, 1)
        acc += part
        if ABOVE:
            part = near[:, None] * met_by(
                v, after, after_sum, one, one, right, rows, live, first, K, V, True,
                BLOCK_T, BLOCK_K, BLOCK_V, OPERAND, PRECISION,
            )  # fmt: skip
            gives_left += tl.sum(part * keys, 1)
            acc += part
        c = first + tl.arange(0, BLOCK_K)
        there = (t < tokens)[:, None] & (c < K)[None, :]
        tl.store(dk + rows * K + c[None, :], tl.where(live[:, None], acc, 0.0), mask=there)
    to_right += tl.sum(tl.where(j < i, gives_right[:, None], 0.0), 0)
    change = tl.load(ddecays + line, mask=t < tokens, other=0)
    tl.store(ddecays + line, change + to_right, mask=t < tokens)
    if ABOVE:
        to_left += tl.sum(tl.where(j > i, gives_left[:, None], 0.0), 0)
        ddecays += across * tokens
        change = tl.load(ddecays + line, mask=t < tokens, other=0)
        tl.store(ddecays + line, change + to_left, mask=t < tokens)
