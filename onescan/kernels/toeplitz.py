"""MD-TPE along one axis: E decaying sums in registers, token by token.

    h_t = lambda h_{t-1} + x_t,   y_t = sum_e weight_e h_t,e             lags from 0
    c_t = lambda h_{t-1},   y_t = sum_e weight_e c_t,e,   h_t = c_t + x_t        lags from 1

and, for the gradient of log_decay, what each lag adds to once more, times the lag:

    k_t = lambda (k_{t-1} + h_{t-1}) = sum_m (t - m) lambda^(t-m) x_m
    dweight = sum_t dy_t h_t,   dlog_decay = weight sum_t dy_t k_t

dx is the same sum, taken of dy from the other end.

Why a recurrence. It takes 2 E multiplications a number, and so does a matrix form: within a chunk
the matrix of each channel is another, so matrix units would want x by channels, which costs a
transposition, and what chunks leave and read are E multiplications each as before. Here x is read
where it lies, [B, T, D], tokens in order, and nothing is between it and y but registers.

A line is what lies along the axis: a sequence, or a row or column of a grid. A strip is a part of
a line: the parts of a long one are read at once, each from what those before it leave behind. A
program is one warp, of few channels, whose sums over E stay within a thread or two; it has every
so many strips, and reads decays and weights once for all of them.

lambda is rounded, and lambda^n is n times as wrong: what the rounding left out is made good every
`REFRESH` tokens.

Source: LightNet, arXiv:2405.21022, Eq. 17.
"""

from collections.abc import Iterator
from typing import Any

import triton.language as tl

from onescan.kernels.common import Blocks, Build, jit, power_of_two

REFRESH = 4  # tokens
CARRIES = 256  # numbers of a program that carries
CARRY_BLOCKS = Blocks(1, 1, 1, warps=4, stages=1)


def blocks_of(width: int, *, gradients: bool = False) -> Blocks:
    """One warp with 16 channels, and so many of E: 32 numbers a thread and table, 16 of six."""
    return Blocks(1, min(power_of_two(width, 4), 32 if gradients else 64), 16, warps=1, stages=1)


def constants_of(
    channels: int, width: int, *, backward: bool, gradients: bool = False
) -> dict[str, Any]:
    """What all kernels but `carry` are compiled for."""
    blocks = blocks_of(width, gradients=gradients)
    return {
        "D": channels,
        "E": width,
        "BACKWARD": backward,
        "REFRESH": REFRESH,
        "BLOCK_E": blocks.keys,
        "BLOCK_D": blocks.values,
    }


def builds(data: str, chip: str) -> Iterator[Build]:
    """What `make check-kernels` compiles."""
    for width, backward, state in ((64, False, True), (64, True, False), (16, False, False)):
        name = f"{width}{' backward' if backward else ''}{' state' if state else ''}"
        constants = constants_of(768, width, backward=backward)
        blocks = blocks_of(width)
        of_line = "i32 i32 i32 i32 i32 i32"
        for weighed in (False, True)[: 1 + state]:
            kind = f"{name}{' weighed' if weighed else ''}"
            of_pass = {**constants, "WEIGHED": weighed}
            given = {**of_pass, "AGED": not weighed}
            yield Build(kind, leave, f"data fp32 fp32 fp32 {of_line}", given, blocks)
            of_pass |= {"LAG": int(backward), "FIRST_E": 0, "START": True}
            given = {**of_pass, "ADD": backward, "LAST": state}
            types = f"data fp32 fp32 fp32 fp32 data fp32 {of_line}"
            yield Build(kind, outputs, types, given, blocks)
            given = {"D": 768, "E": width, "STATE": state, "WEIGHED": weighed, "BLOCK": CARRIES}
            types = "fp32 fp32 fp32 i32 i32 i32"
            yield Build(kind, carry, types, {**given, "AGED": not weighed}, CARRY_BLOCKS)
        given = {
            **constants_of(768, width, backward=backward, gradients=True),
            "LAG": int(backward),
            "START": True,
            "AGED": True,
            "LAST": state,
        }
        types = f"data data fp32 fp32 fp32 fp32 fp32 fp32 {of_line}"
        yield Build(name, coefficients, types, given, blocks_of(width, gradients=True))


@jit
def decays_of(log_decay, place, there, REFRESH: tl.constexpr):
    """Each lambda, and what `REFRESH` of its roundings leave out, as a share of it."""
    exact = tl.exp(tl.load(log_decay + place, mask=there, other=float("-inf")).to(tl.float64))
    decay = exact.to(tl.float32)
    short = (exact - decay.to(tl.float64)).to(tl.float32) / tl.maximum(decay, 1e-30)
    return decay, short * REFRESH


@jit
def row_of(line, step, length, stride, BACKWARD: tl.constexpr):
    """Where in [B T] a step of the way along a line is."""
    place = length - 1 - step if BACKWARD else step
    return line // stride * (length * stride) + line % stride + place * stride


@jit
def leave(
    x, log_decay, weight,
    left,
    lines, length, split, parts, groups, stride,
    D: tl.constexpr, E: tl.constexpr, BACKWARD: tl.constexpr, REFRESH: tl.constexpr,
    WEIGHED: tl.constexpr, AGED: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What each part but the last leaves alone, [1 + AGED, parts, lines, D, E]: h, and k."""
    program = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    across: tl.constexpr = blocks * ((E + BLOCK_E - 1) // BLOCK_E)
    c = program % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    e = program % across // blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    here = c < D
    there = (e < E)[:, None] & here[None, :]
    place = c[None, :] * E + e[:, None]
    decay, short = decays_of(log_decay, place, there, REFRESH)
    if WEIGHED:
        w = tl.load(weight + place, mask=there, other=0)
    ahead = (-stride if BACKWARD else stride) * D
    for strip in range(program // across, lines * (parts - 1), groups):
        line, first = strip % lines, strip // lines * split
        h = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
        k = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
        at = row_of(line, first, length, stride, BACKWARD) * D + c
        now = tl.load(x + at, mask=here, other=0)
        for step in range(first, first + split):
            at += ahead  # there is another part, so another token
            coming = tl.load(x + at, mask=here, other=0)
            if AGED:
                k = decay * (k + h)
            values = now.to(tl.float32)[None, :]
            if WEIGHED:
                values = w * values
            h = decay * h + values
            if (step + 1) % REFRESH == 0:
                h += short * h
                if AGED:
                    k += short * k
            now = coming
        to = left + strip * (D * E) + place
        tl.store(to, h, mask=there)
        if AGED:
            tl.store(to + lines.to(tl.int64) * parts * (D * E), k, mask=there)


@jit
def carry(
    left, state, log_decay,
    lines, split, parts,
    D: tl.constexpr, E: tl.constexpr,
    STATE: tl.constexpr, WEIGHED: tl.constexpr, AGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In place of what each part leaves alone, what enters it from all before: first the state.

    Where sums are WEIGHED, the state belongs to the first token, and not to one before it.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    width: tl.constexpr = D * E
    size = lines.to(tl.int64) * width
    there = i < size
    log = tl.load(log_decay + i % width, mask=there, other=0)
    through = tl.exp(split * log)
    h = tl.zeros([BLOCK], tl.float32)
    k = tl.zeros([BLOCK], tl.float32)
    if STATE:
        h = tl.load(state + i, mask=there, other=0)
    for part in range(parts):
        at = left + part * size + i
        inner = there & (part < parts - 1)
        own = tl.load(at, mask=inner, other=0)
        tl.store(at, h, mask=there)
        if AGED:
            at += parts * size
            own_k = tl.load(at, mask=inner, other=0)
            tl.store(at, k, mask=there)
            k = through * (k + split * h) + own_k
        kept = through
        if STATE and WEIGHED:
            kept = tl.where(part == 0, tl.exp((split - 1) * log), through)
        h = kept * h + own


@jit
def outputs(
    x, before, log_decay, weight, entering,
    y, last,
    lines, length, split, parts, groups, stride,
    D: tl.constexpr, E: tl.constexpr, BACKWARD: tl.constexpr, REFRESH: tl.constexpr,
    LAG: tl.constexpr, WEIGHED: tl.constexpr, FIRST_E: tl.constexpr, START: tl.constexpr,
    ADD: tl.constexpr, LAST: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The sum y, added to what was there before, and the sums after the last token, [lines, D, E].

    What enters is [parts, lines, D, E], h. WEIGHED has weights inside the sums, and what enters
    belongs to the first token: h_0 = state + weight x_0, y_t = sum_e h_t,e.
    """
    program = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    c = program % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    e = FIRST_E + tl.arange(0, BLOCK_E)
    here = c < D
    there = (e < E)[:, None] & here[None, :]
    place = c[None, :] * E + e[:, None]
    decay, short = decays_of(log_decay, place, there, REFRESH)
    w = tl.load(weight + place, mask=there, other=0)
    ahead = (-stride if BACKWARD else stride) * D
    for strip in range(program // blocks, lines * parts, groups):
        line, first = strip % lines, strip // lines * split
        stop = tl.minimum(first + split, length)
        h = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
        if START:
            h = tl.load(entering + strip * (D * E) + place, mask=there, other=0)
        at = row_of(line, first, length, stride, BACKWARD) * D + c
        now = tl.load(x + at, mask=here, other=0)
        for step in range(first, stop):
            coming = tl.load(x + at + ahead, mask=here & (step + 1 < stop), other=0)
            values = now.to(tl.float32)[None, :]
            if WEIGHED:
                kept = decay * h
                if START:
                    if step == 0:
                        kept = h
                h = kept + w * values
                out = tl.sum(h, 0)
            else:
                kept = decay * h
                h = kept + values
                out = tl.sum(w * (h if LAG == 0 else kept), 0)
            if (step + 1) % REFRESH == 0:
                h += short * h
            if ADD:
                out += tl.load(before + at, mask=here, other=0)
            tl.store(y + at, out, mask=here)
            at += ahead
            now = coming
        if LAST:
            if stop == length:
                tl.store(last + line * (D * E) + place, h, mask=there)


@jit
def coefficients(
    x, dy, log_decay, weight, entering, dlast,
    dlog_decay, dweight,
    lines, length, split, parts, groups, stride,
    D: tl.constexpr, E: tl.constexpr, BACKWARD: tl.constexpr, REFRESH: tl.constexpr,
    LAG: tl.constexpr, START: tl.constexpr, AGED: tl.constexpr, LAST: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What the strips of one group add to the gradients of both tables, each [groups, D, E].

    What enters a strip is [1 + AGED, parts, lines, D, E]: h, and k, 0 where it is not AGED. dlast
    is the gradient of the sums after the last token.
    """
    program = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    across: tl.constexpr = blocks * ((E + BLOCK_E - 1) // BLOCK_E)
    c = program % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    e = program % across // blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    here = c < D
    there = (e < E)[:, None] & here[None, :]
    place = c[None, :] * E + e[:, None]
    decay, short = decays_of(log_decay, place, there, REFRESH)
    ahead = (-stride if BACKWARD else stride) * D
    of_weight = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    of_age = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)  # but for the weight
    of_state = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    group = program // across
    for strip in range(group, lines * parts, groups):
        line, first = strip % lines, strip // lines * split
        stop = tl.minimum(first + split, length)
        h = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
        k = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
        if START:
            h = tl.load(entering + strip * (D * E) + place, mask=there, other=0)
        if AGED:
            aged = entering + lines.to(tl.int64) * parts * (D * E)
            k = tl.load(aged + strip * (D * E) + place, mask=there, other=0)
        at = row_of(line, first, length, stride, BACKWARD) * D + c
        now, slope = tl.load(x + at, mask=here, other=0), tl.load(dy + at, mask=here, other=0)
        for step in range(first, stop):
            at += ahead
            further = here & (step + 1 < stop)
            coming = tl.load(x + at, mask=further, other=0)
            coming_slope = tl.load(dy + at, mask=further, other=0)
            gradient = slope.to(tl.float32)[None, :]
            k = decay * (k + h)
            kept = decay * h
            h = kept + now.to(tl.float32)[None, :]
            of_weight += gradient * (h if LAG == 0 else kept)
            of_age += gradient * k
            if (step + 1) % REFRESH == 0:
                h += short * h
                k += short * k
            now, slope = coming, coming_slope
        if LAST:
            if stop == length:
                of_state += k * tl.load(dlast + line * (D * E) + place, mask=there, other=0)
    to = group * (D * E) + place
    tl.store(dweight + to, of_weight, mask=there)
    w = tl.load(weight + place, mask=there, other=0)
    tl.store(dlog_decay + to, w * of_age + of_state, mask=there)
