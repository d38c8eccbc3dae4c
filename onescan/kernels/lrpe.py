"""MD-LRPE: [x cos, x sin], and both gradients, with a sine and a cosine taken once for all samples.

    y_bt = [x_bt cos(a_t), x_bt sin(a_t)]                      rotate
    dx_bt = dc cos(a_t) + ds sin(a_t),   [dc, ds] = dy_bt      rotate_back
    da_t = sum_b x_bt (ds cos(a_t) - dc sin(a_t))
    [cos(a_t), sin(a_t)], for kernels that turn what they read                 tabulate

Angles [T, H, K] are cut into blocks of so many numbers, whatever K is. A program has one block of
every so many samples: angles are read once where samples are few, and x and y once always.

Source: LightNet, arXiv:2405.21022, App. A.2 and App. B.
"""

from collections.abc import Iterator

import triton.language as tl

from onescan.kernels.common import Blocks, Build, jit

BLOCKS = Blocks(tokens=1, keys=512, values=1, warps=4, stages=1)

QUARTERS = tl.constexpr(0.6366197723675814)  # of a turn in a radian, 2 / pi
RADIANS = tl.constexpr(1.5707963267948966)


def builds(data: str, chip: str) -> Iterator[Build]:
    """What `make check-kernels` compiles."""
    table = "fp32" if data == "fp32" else "fp16"
    for width in (64, 96):
        constants = {"K": width, "BLOCK": BLOCKS.keys}
        yield Build(f"{width}", tabulate, f"fp32 {table} i32", constants, BLOCKS)
        yield Build(f"{width}", rotate, "data fp32 data i32 i32 i32", constants, BLOCKS)
        for angles in (False, True):
            name = f"{width}{' angles' if angles else ''}"
            types = "data data fp32 data fp32 i32 i32 i32"
            given = {**constants, "ANGLES": angles}
            yield Build(name, rotate_back, types, given, BLOCKS)


@jit
def cosine_and_sine(angle):
    """Of radians in float32, with its rounding, up to 1e9 of them.

    The compiler's own keep a table in memory, for larger ones. Quarter turns are taken off in
    float64; of what is left, at most pi / 4, these are the Taylor series.
    """
    turned = angle.to(tl.float64) * QUARTERS
    whole = tl.floor(turned + 0.5)
    x = ((turned - whole) * RADIANS).to(tl.float32)
    s = x * x
    odd = s * (-1 / 6 + s * (1 / 120 + s * (-1 / 5040 + s * (1 / 362880))))
    sin = x + x * odd
    even = 1 / 24 + s * (-1 / 720 + s * (1 / 40320 + s * (-1 / 3628800)))
    cos = 1 - (0.5 * s - s * s * even)
    quarter = whole - 4 * tl.floor(whole * 0.25)  # a float, as NaN is no whole number
    from_cos = (quarter == 0) | (quarter == 2)
    first, second = tl.where(from_cos, cos, sin), tl.where(from_cos, sin, cos)
    cos_falls, sin_falls = (quarter == 1) | (quarter == 2), quarter >= 2
    return tl.where(cos_falls, -first, first), tl.where(sin_falls, -second, second)


@jit
def tabulate(
    angles,
    table,
    length,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a table [T, H, 2, K] of cosines and sines; length is T H K."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = i < length
    cos, sin = cosine_and_sine(tl.load(angles + i, mask=there, other=0))
    place = table + i // K * (2 * K) + i % K
    tl.store(place, cos, mask=there)
    tl.store(place + K, sin, mask=there)


@jit
def rotate(
    x, angles,
    y,
    batch, length, parts,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write y [B, T, H, 2K] for the samples of one part; length is T H K."""
    program = tl.program_id(0).to(tl.int64)
    i = program // parts * BLOCK + tl.arange(0, BLOCK)
    there = i < length
    cos, sin = cosine_and_sine(tl.load(angles + i, mask=there, other=0))
    place = i // K * (2 * K) + i % K
    for sample in range(program % parts, batch, parts):
        values = tl.load(x + sample * length + i, mask=there, other=0).to(tl.float32)
        to = y + sample * (2 * length) + place
        tl.store(to, values * cos, mask=there)
        tl.store(to + K, values * sin, mask=there)


@jit
def rotate_back(
    dy, x, angles,
    dx, dangles,
    batch, length, parts,
    K: tl.constexpr, ANGLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write dx, and what the samples of one part add to dangles, [parts, T, H, K]."""
    program = tl.program_id(0).to(tl.int64)
    part = program % parts
    i = program // parts * BLOCK + tl.arange(0, BLOCK)
    there = i < length
    cos, sin = cosine_and_sine(tl.load(angles + i, mask=there, other=0))
    place = i // K * (2 * K) + i % K
    turned = tl.zeros([BLOCK], tl.float32)
    for sample in range(part, batch, parts):
        slope = dy + sample * (2 * length) + place
        of_cos = tl.load(slope, mask=there, other=0).to(tl.float32)
        of_sin = tl.load(slope + K, mask=there, other=0).to(tl.float32)
        tl.store(dx + sample * length + i, of_cos * cos + of_sin * sin, mask=there)
        if ANGLES:
            values = tl.load(x + sample * length + i, mask=there, other=0).to(tl.float32)
            turned += values * (of_sin * cos - of_cos * sin)
    if ANGLES:
        tl.store(dangles + part * length + i, turned, mask=there)
