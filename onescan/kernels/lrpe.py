"""MD-LRPE: [x cos, x sin], and both gradients, with sines and cosines computed once per batch.

    y_bt = [x_bt cos(a_t), x_bt sin(a_t)]                      rotate
    dx_bt = dc cos(a_t) + ds sin(a_t),   [dc, ds] = dy_bt      rotate_back
    da_t = sum_b x_bt (ds cos(a_t) - dc sin(a_t))
    [cos(a_t), sin(a_t)], for kernels that apply the rotation  tabulate

    a_t = n_t theta modulo 2 pi, n_t along the axis of the feature      grid_angles
    dtheta = sum_t n_t da_t                                             grid_angles_back

Angles [T, H, K] are divided into blocks of 512 numbers, for any K. Each program processes one block
for one part of the samples. x and y are read or written once, and so are angles if samples are few.

Source: LightNet, arXiv:2405.21022, App. A.2 and App. B.
"""

import triton.language as tl

from onescan.kernels.common import Blocks, Case, Example, jit, kernel

EXAMPLES = (Example(64, 64), Example(96, 96))

QUARTERS = tl.constexpr(0.6366197723675814)  # right angles per radian, 2 / pi
RADIANS = tl.constexpr(1.5707963267948966)
PERIOD = tl.constexpr(6.283185307179586)
TOKENS = 32  # per program that sums gradients of theta


def blocks_of(case: Case) -> Blocks:
    """Return blocks of 512 angles per program, for any head width."""
    return Blocks(tokens=1, keys=512, values=1, warps=4, stages=1)


@jit
def cosine_and_sine(angle):
    """Compute float32 cosines and sines of angles up to 1e9 radians, in float32 or float64.

    The compiler's own functions use a table in memory for large angles. Here multiples of pi / 2
    are subtracted in float64, and Taylor series are evaluated at the remainder, at most pi / 4.
    """
    quarters = angle.to(tl.float64) * QUARTERS
    whole = tl.floor(quarters + 0.5)
    x = ((quarters - whole) * RADIANS).to(tl.float32)
    s = x * x
    odd = s * (-1 / 6 + s * (1 / 120 + s * (-1 / 5040 + s * (1 / 362880))))
    sin = x + x * odd
    even = 1 / 24 + s * (-1 / 720 + s * (1 / 40320 + s * (-1 / 3628800)))
    cos = 1 - (0.5 * s - s * s * even)
    quarter = whole - 4 * tl.floor(whole * 0.25)  # a float, because NaN cannot be an integer
    from_cos = (quarter == 0) | (quarter == 2)
    first, second = tl.where(from_cos, cos, sin), tl.where(from_cos, sin, cos)
    cos_falls, sin_falls = (quarter == 1) | (quarter == 2), quarter >= 2
    return tl.where(cos_falls, -first, first), tl.where(sin_falls, -second, second)


@jit
def positions_of(t, prefix, origin, size, stride):
    """Return the positions of tokens along an axis, which are 0 before the grid."""
    position = origin + (t - prefix) // stride % size
    return tl.where(t < prefix, 0, position).to(tl.float64)


@kernel(blocks_of)
def grid_angles(
    frequencies,
    angles,
    tokens, prefix, origin, size, stride, feature, features,
    H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the angles [T, H, K] of one axis, which has `features` features from `feature` on.

    The axis has `size` positions from `origin` on. Neighbors along it are `stride` tokens apart.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < tokens.to(tl.int64) * (H * features)
    row, c = i // features, feature + i % features
    frequency = tl.load(frequencies + row % H * K + c, mask=mask, other=0).to(tl.float64)
    angle = positions_of(row // H, prefix, origin, size, stride) * frequency
    angle -= tl.floor(angle / PERIOD + 0.5) * PERIOD
    tl.store(angles + row * K + c, angle, mask=mask)


@kernel(blocks_of)
def grid_angles_back(
    dangles,
    theta_sums,
    tokens, split, prefix, origin, size, stride, feature, features,
    H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of theta from each part of `split` tokens, [parts, H, K]."""
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < H * features
    offsets = i // features * K + feature + i % features
    part = tl.program_id(0).to(tl.int64)
    acc = tl.zeros([BLOCK], tl.float64)
    for t in range(part * split, tl.minimum((part + 1) * split, tokens)):
        gradient = tl.load(dangles + t * (H * K) + offsets, mask=mask, other=0).to(tl.float64)
        acc += positions_of(t, prefix, origin, size, stride) * gradient
    tl.store(theta_sums + part * (H * K) + offsets, acc, mask=mask)


@kernel(blocks_of)
def tabulate(
    angles,
    rotary,
    length,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a table [T, H, 2, K] of cosines and sines; length is T H K."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < length
    cos, sin = cosine_and_sine(tl.load(angles + i, mask=mask, other=0))
    pointers = rotary + i // K * (2 * K) + i % K
    tl.store(pointers, cos, mask=mask)
    tl.store(pointers + K, sin, mask=mask)


@kernel(blocks_of)
def rotate(
    x, angles,
    y,
    batch, length, parts,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write y [B, T, H, 2K] for the samples of one part; length is T H K."""
    program = tl.program_id(0).to(tl.int64)
    i = program // parts * BLOCK + tl.arange(0, BLOCK)
    mask = i < length
    cos, sin = cosine_and_sine(tl.load(angles + i, mask=mask, other=0))
    offsets = i // K * (2 * K) + i % K
    for sample in range(program % parts, batch, parts):
        values = tl.load(x + sample * length + i, mask=mask, other=0).to(tl.float32)
        to = y + sample * (2 * length) + offsets
        tl.store(to, values * cos, mask=mask)
        tl.store(to + K, values * sin, mask=mask)


@kernel(blocks_of, {"HAS_ANGLE_SUMS": False}, {"HAS_ANGLE_SUMS": True})
def rotate_back(
    dy, x, angles,
    dx, angle_sums,
    batch, length, parts,
    K: tl.constexpr, HAS_ANGLE_SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write dx, and the sum of da over each part of the samples, [parts, T, H, K]."""
    program = tl.program_id(0).to(tl.int64)
    part = program % parts
    i = program // parts * BLOCK + tl.arange(0, BLOCK)
    mask = i < length
    cos, sin = cosine_and_sine(tl.load(angles + i, mask=mask, other=0))
    offsets = i // K * (2 * K) + i % K
    angle_sum = tl.zeros([BLOCK], tl.float32)
    for sample in range(part, batch, parts):
        gradient = dy + sample * (2 * length) + offsets
        of_cos = tl.load(gradient, mask=mask, other=0).to(tl.float32)
        of_sin = tl.load(gradient + K, mask=mask, other=0).to(tl.float32)
        tl.store(dx + sample * length + i, of_cos * cos + of_sin * sin, mask=mask)
        if HAS_ANGLE_SUMS:
            values = tl.load(x + sample * length + i, mask=mask, other=0).to(tl.float32)
            angle_sum += values * (of_sin * cos - of_cos * sin)
    if HAS_ANGLE_SUMS:
        tl.store(angle_sums + part * length + i, angle_sum, mask=mask)
