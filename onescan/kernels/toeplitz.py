"""MD-TPE along one axis: E decaying sums in registers, token by token.

    h_t = lambda h_{t-1} + x_t,   y_t = sum_e weight_e h_t,e             lags from 0
    c_t = lambda h_{t-1},   y_t = sum_e weight_e c_t,e,   h_t = c_t + x_t        lags from 1

For the gradient of log_decay, each term is multiplied by its lag:

    k_t = lambda (k_{t-1} + h_{t-1}) = sum_m (t - m) lambda^(t-m) x_m
    dweight = sum_t dy_t h_t,   dlog_decay = weight sum_t dy_t k_t

dx is the same sum over dy, in the opposite direction.

The recurrence takes 2 E multiplications per number. So would a form with matrix products:
E to write the states of chunks and E to read them. As each channel has its own matrix, it would
also need x transposed. The recurrence reads x in place, [B, T, D], and stores only y.

A line is a sequence along the axis: the whole sequence, or a row or column of a grid. A strip is a
part of a line. The parts of a long line are processed in parallel, each starting from the sums
before it. A program is one warp with few channels, whose sums over E stay within one or two
threads. It visits several strips, and loads decays and weights once for all of them.

With packed sequences, a part holds tokens of one sequence, and sums pass only within a sequence.

lambda is rounded, and the relative error of lambda^n is n times as large, so the rounding error is
corrected every `REFRESH` tokens.

Source: LightNet, arXiv:2405.21022, Eq. 17.
"""

import triton.language as tl

from onescan.kernels.common import Blocks, Case, Example, jit, kernel, power_of_two, span_of

REFRESH = 4  # tokens; the tile size of these kernels

EXAMPLES = (
    Example(64, 768, flags={"HAS_ENTERING": True, "HAS_H_IN": True, "HAS_LAST": True}),
    Example(64, 768, flags={"HAS_ENTERING": True, "BACKWARD": True, "LAG": 1, "HAS_PARTIAL": True}),
    Example(16, 768, flags={"HAS_ENTERING": True}),
    Example(64, 768, flags={"HAS_ENTERING": True, "HAS_SPANS": True}),
    Example(64, 768, flags={"HAS_ENTERING": True, "HAS_SPANS": True, "BACKWARD": True}),
)


def scan_blocks(case: Case) -> Blocks:
    """Return the blocks of scans: one warp, 16 channels, and 32 numbers per thread and table."""
    return Blocks(REFRESH, min(power_of_two(case.key_width, 4), 64), 16, warps=1, stages=1)


def gradient_blocks(case: Case) -> Blocks:
    """Return the blocks of gradients: 16 numbers per thread for each of six tables."""
    return Blocks(REFRESH, min(power_of_two(case.key_width, 4), 32), 16, warps=1, stages=1)


def carry_blocks(case: Case) -> Blocks:
    """Return the blocks of the kernel that carries states from part to part."""
    return Blocks(1, 256, 1, warps=4, stages=1)


@jit
def decays_of(log_decay, offsets, mask, REFRESH: tl.constexpr):
    """Return lambda, and `REFRESH` times its relative rounding error."""
    exact = tl.exp(tl.load(log_decay + offsets, mask=mask, other=float("-inf")).to(tl.float64))
    decay = exact.to(tl.float32)
    correction = (exact - decay.to(tl.float64)).to(tl.float32) / tl.maximum(decay, 1e-30)
    return decay, correction * REFRESH


@jit
def tile_of(c, e, D: tl.constexpr, E: tl.constexpr):
    """Return a mask of channels, and the offsets and mask [E, D] of a tile of a table [D, E]."""
    mask = (e < E)[:, None] & (c < D)[None, :]
    return c < D, c[None, :] * E + e[:, None], mask


@jit
def row_of(line, step, length, stride, BACKWARD: tl.constexpr):
    """Return the index into [B T] of a step along a line."""
    position = length - 1 - step if BACKWARD else step
    return line // stride * (length * stride) + line % stride + position * stride


@jit
def steps_of(
    spans, line, part, parts, split, length, BACKWARD: tl.constexpr, HAS_SPANS: tl.constexpr
):  # fmt: skip
    """Return the first step of a part along its line, and the step after its last one."""
    if HAS_SPANS and BACKWARD:  # spans are in the order of tokens
        part = parts - 1 - part
    first, stop, _, _ = span_of(spans, line, part, parts, split, length, HAS_SPANS)
    if HAS_SPANS and BACKWARD:
        first, stop = length - stop, length - first
    return first, stop


@kernel(scan_blocks, {"DERIVATIVE": True}, {"WEIGHED": True})
def leave(
    x, log_decay, weight,
    left,
    spans, lines, length, split, parts, groups, stride,
    D: tl.constexpr, E: tl.constexpr, BACKWARD: tl.constexpr, REFRESH: tl.constexpr,
    WEIGHED: tl.constexpr, DERIVATIVE: tl.constexpr, HAS_SPANS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute the sums h and k over all but the last part, [1 + DERIVATIVE, parts, lines, D, E]."""
    program = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    across: tl.constexpr = blocks * ((E + BLOCK_E - 1) // BLOCK_E)
    c = program % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    e = program % across // blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    channel_mask, table_offsets, table_mask = tile_of(c, e, D, E)
    decay, correction = decays_of(log_decay, table_offsets, table_mask, REFRESH)
    if WEIGHED:
        w = tl.load(weight + table_offsets, mask=table_mask, other=0)
    ahead = (-stride if BACKWARD else stride) * D
    for strip in range(program // across, lines * (parts - 1), groups):
        line = strip % lines
        first, stop = steps_of(
            spans, line, strip // lines, parts, split, length, BACKWARD, HAS_SPANS
        )
        h = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
        k = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
        row_offsets = row_of(line, first, length, stride, BACKWARD) * D + c
        x_now = tl.load(x + row_offsets, mask=channel_mask & (first < stop), other=0)
        for step in range(first, stop):
            row_offsets += ahead
            x_next = tl.load(x + row_offsets, mask=channel_mask & (step + 1 < stop), other=0)
            if DERIVATIVE:
                k = decay * (k + h)
            values = x_now.to(tl.float32)[None, :]
            if WEIGHED:
                values = w * values
            h = decay * h + values
            if (step + 1 - first) % REFRESH == 0:
                h += correction * h
                if DERIVATIVE:
                    k += correction * k
            x_now = x_next
        to = left + strip * (D * E) + table_offsets
        tl.store(to, h, mask=table_mask)
        if DERIVATIVE:
            tl.store(to + lines.to(tl.int64) * parts * (D * E), k, mask=table_mask)


@kernel(carry_blocks, {"DERIVATIVE": True}, {"WEIGHED": True})
def carry(
    left, h_in, log_decay,
    spans, lines, split, parts,
    D: tl.constexpr, E: tl.constexpr, BACKWARD: tl.constexpr,
    HAS_H_IN: tl.constexpr, WEIGHED: tl.constexpr, DERIVATIVE: tl.constexpr,
    HAS_SPANS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace the sums over each part by the sums over the state and all parts before it.

    If WEIGHED, the incoming state is aligned with the first token, not with the token before it.
    A part that is followed by another part of its sequence has `split` tokens; if BACKWARD, a part
    that follows another one.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    width: tl.constexpr = D * E
    size = lines.to(tl.int64) * width
    mask = i < size
    log = tl.load(log_decay + i % width, mask=mask, other=0)
    through = tl.exp(split * log)
    h = tl.zeros([BLOCK], tl.float32)
    k = tl.zeros([BLOCK], tl.float32)
    if HAS_H_IN:
        h = tl.load(h_in + i, mask=mask, other=0)
    for part in range(parts):
        if HAS_SPANS:
            later = parts - part if BACKWARD else part  # of this part and the previous one
            span_pointer = spans + (i // width * parts + later) * 4 + 2
            continues = tl.load(span_pointer, mask=mask & (later < parts), other=0) != 0
            h = tl.where(continues, h, 0.0)
            k = tl.where(continues, k, 0.0)
        pointers = left + part * size + i
        inner = mask & (part < parts - 1)
        part_sum = tl.load(pointers, mask=inner, other=0)
        tl.store(pointers, h, mask=mask)
        if DERIVATIVE:
            pointers += parts * size
            part_k = tl.load(pointers, mask=inner, other=0)
            tl.store(pointers, k, mask=mask)
            k = through * (k + split * h) + part_k
        factor = through
        if HAS_H_IN and WEIGHED:
            factor = tl.where(part == 0, tl.exp((split - 1) * log), through)
        h = factor * h + part_sum


@kernel(scan_blocks, {}, {"WEIGHED": True})
def outputs(
    x, partial, log_decay, weight, entering,
    y, last,
    spans, lines, length, split, parts, groups, stride,
    D: tl.constexpr, E: tl.constexpr, BACKWARD: tl.constexpr, REFRESH: tl.constexpr,
    LAG: tl.constexpr, WEIGHED: tl.constexpr, FIRST_E: tl.constexpr, HAS_ENTERING: tl.constexpr,
    HAS_PARTIAL: tl.constexpr, HAS_LAST: tl.constexpr, HAS_SPANS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute the sum y, added to `partial`, and the sums after the last token, [lines, D, E].

    entering: the sums h before each part, [parts, lines, D, E]. WEIGHED: the weights are inside the
    sums, and entering is aligned with the first token: h_0 = state + weight x_0, y_t = sum_e h_t,e.
    """
    program = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    c = program % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    e = FIRST_E + tl.arange(0, BLOCK_E)
    channel_mask, table_offsets, table_mask = tile_of(c, e, D, E)
    decay, correction = decays_of(log_decay, table_offsets, table_mask, REFRESH)
    w = tl.load(weight + table_offsets, mask=table_mask, other=0)
    ahead = (-stride if BACKWARD else stride) * D
    for strip in range(program // blocks, lines * parts, groups):
        line = strip % lines
        first, stop = steps_of(
            spans, line, strip // lines, parts, split, length, BACKWARD, HAS_SPANS
        )
        h = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
        if HAS_ENTERING:
            h = tl.load(entering + strip * (D * E) + table_offsets, mask=table_mask, other=0)
        row_offsets = row_of(line, first, length, stride, BACKWARD) * D + c
        x_now = tl.load(x + row_offsets, mask=channel_mask & (first < stop), other=0)
        for step in range(first, stop):
            x_next = tl.load(
                x + row_offsets + ahead, mask=channel_mask & (step + 1 < stop), other=0
            )
            values = x_now.to(tl.float32)[None, :]
            if WEIGHED:
                decayed = decay * h
                if HAS_ENTERING:
                    if step == 0:
                        decayed = h
                h = decayed + w * values
                out = tl.sum(h, 0)
            else:
                decayed = decay * h
                h = decayed + values
                out = tl.sum(w * (h if LAG == 0 else decayed), 0)
            if (step + 1 - first) % REFRESH == 0:
                h += correction * h
            if HAS_PARTIAL:
                out += tl.load(partial + row_offsets, mask=channel_mask, other=0)
            tl.store(y + row_offsets, out, mask=channel_mask)
            row_offsets += ahead
            x_now = x_next
        if HAS_LAST:
            if stop == length:
                tl.store(last + line * (D * E) + table_offsets, h, mask=table_mask)


@kernel(gradient_blocks, {"DERIVATIVE": True, "HAS_DLAST": True}, {"DERIVATIVE": True})
def coefficients(
    x, dy, log_decay, weight, entering, dlast,
    dlog_decay, dweight,
    spans, lines, length, split, parts, groups, stride,
    D: tl.constexpr, E: tl.constexpr, BACKWARD: tl.constexpr, REFRESH: tl.constexpr,
    LAG: tl.constexpr, DERIVATIVE: tl.constexpr,
    HAS_ENTERING: tl.constexpr, HAS_DLAST: tl.constexpr, HAS_SPANS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of both tables, summed over one group of strips, [groups, D, E].

    entering: the sums h, and with DERIVATIVE also k, before each part,
    [1 + DERIVATIVE, parts, lines, D, E]; k is 0 without DERIVATIVE. dlast: gradient of the sums
    after the last token.
    """
    program = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    across: tl.constexpr = blocks * ((E + BLOCK_E - 1) // BLOCK_E)
    c = program % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    e = program % across // blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    channel_mask, table_offsets, table_mask = tile_of(c, e, D, E)
    decay, correction = decays_of(log_decay, table_offsets, table_mask, REFRESH)
    ahead = (-stride if BACKWARD else stride) * D
    of_weight = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    of_age = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)  # to be multiplied by the weight
    of_state = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    group = program // across
    for strip in range(group, lines * parts, groups):
        line = strip % lines
        first, stop = steps_of(
            spans, line, strip // lines, parts, split, length, BACKWARD, HAS_SPANS
        )
        h = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
        k = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
        if HAS_ENTERING:
            h = tl.load(entering + strip * (D * E) + table_offsets, mask=table_mask, other=0)
        if DERIVATIVE:
            derivative = entering + lines.to(tl.int64) * parts * (D * E)
            k = tl.load(derivative + strip * (D * E) + table_offsets, mask=table_mask, other=0)
        row_offsets = row_of(line, first, length, stride, BACKWARD) * D + c
        mask = channel_mask & (first < stop)
        x_now, dy_now = (
            tl.load(x + row_offsets, mask=mask, other=0),
            tl.load(dy + row_offsets, mask=mask, other=0),
        )
        for step in range(first, stop):
            row_offsets += ahead
            further = channel_mask & (step + 1 < stop)
            x_next = tl.load(x + row_offsets, mask=further, other=0)
            dy_next = tl.load(dy + row_offsets, mask=further, other=0)
            gradient = dy_now.to(tl.float32)[None, :]
            k = decay * (k + h)
            decayed = decay * h
            h = decayed + x_now.to(tl.float32)[None, :]
            of_weight += gradient * (h if LAG == 0 else decayed)
            of_age += gradient * k
            if (step + 1 - first) % REFRESH == 0:
                h += correction * h
                k += correction * k
            x_now, dy_now = x_next, dy_next
        if HAS_DLAST:
            if stop == length:
                of_state += k * tl.load(
                    dlast + line * (D * E) + table_offsets, mask=table_mask, other=0
                )
    to = group * (D * E) + table_offsets
    tl.store(dweight + to, of_weight, mask=table_mask)
    w = tl.load(weight + table_offsets, mask=table_mask, other=0)
    tl.store(dlog_decay + to, w * of_age + of_state, mask=table_mask)
