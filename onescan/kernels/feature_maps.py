"""The feature map of LION, [silu(x) + 1/2] / ||silu(x) + 1/2||, and its gradient.

    u = silu(x) + 1/2,   y = u / ||u||,   dx = silu'(x) (dy - (y . dy) y) / ||u||

x is read where the projection wrote it, among other channels of the same token. u is recomputed in
the backward pass. `features` applies feature maps inside decoding kernels.

Source: LION, arXiv:2502.16249, Sec. 3.2.
"""

import triton.language as tl

from onescan.kernels.common import Blocks, Case, Example, jit, kernel, power_of_two

EXAMPLES = (Example(64, 64), Example(96, 96))


def blocks_of(case: Case) -> Blocks:
    """Return the blocks: about 2,048 numbers of whole heads."""
    keys = power_of_two(case.key_width)
    return Blocks(tokens=max(1, 2048 // keys), keys=keys, values=1, warps=4, stages=1)


@jit
def load_rows(x, row, c, lines, stride, H: tl.constexpr, K: tl.constexpr):
    """Load heads of x [tokens, H, K], whose tokens are `stride` apart, and a mask of valid ones."""
    mask = (row < lines)[:, None] & (c < K)[None, :]
    offsets = row // H * stride + row % H * K
    return tl.load(x + offsets[:, None] + c[None, :], mask=mask, other=0).to(tl.float32), mask


@jit
def sigmoid(x):
    """Compute 1 / (1 + exp(-x)) without overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0, small, 1.0) / (1 + small)


@jit
def features(x, mask, MAP: tl.constexpr):
    """Apply a feature map to the channels of one head; masked channels are 0.

    MAP is its number in onescan.ops.feature_maps.KERNEL_MAPS.
    """
    if MAP == 1:
        x *= sigmoid(x)
    elif MAP == 2:
        unit, _, _ = normalized(x[None, :], mask[None, :])
        x = tl.sum(unit, 0)  # of a single row
    return x


@jit
def normalized(values, mask):
    """Return silu(x) + 1/2 divided by its norm, the norm, and sigmoid(x)."""
    gate = sigmoid(values)
    u = tl.where(mask, values * gate + 0.5, 0.0)
    norm = tl.sqrt(tl.sum(u * u, 1))[:, None]
    norm = tl.where(norm == 0, 1.0, norm)  # heads beyond the last
    return u / norm, norm, gate


@kernel(blocks_of)
def shifted_silu(
    x,
    y,
    lines, stride,
    H: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write y [tokens, H, K]; lines is tokens * H."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.arange(0, BLOCK_K)
    values, mask = load_rows(x, row, c, lines, stride, H, K)
    unit, _, _ = normalized(values, mask)
    tl.store(y + row[:, None] * K + c[None, :], unit, mask=mask)


@kernel(blocks_of)
def shifted_silu_backward(
    dy, x,
    dx,
    lines, stride,
    H: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write dx [tokens, H, K]."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.arange(0, BLOCK_K)
    values, mask = load_rows(x, row, c, lines, stride, H, K)
    unit, norm, gate = normalized(values, mask)
    offsets = row[:, None] * K + c[None, :]
    slope = tl.load(dy + offsets, mask=mask, other=0).to(tl.float32)
    of_silu = (slope - unit * tl.sum(unit * slope, 1)[:, None]) / norm
    tl.store(dx + offsets, of_silu * gate * (1 + values * (1 - gate)), mask=mask)
