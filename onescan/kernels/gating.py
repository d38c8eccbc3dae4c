"""The product of x and the activation of a gate, and its gradients.

    y = x a(g),   dx = dy a(g),   dg = dy x a'(g)         a = silu or sigmoid

The backward pass recomputes the activation, so that only x and g are stored.
"""

import triton.language as tl

from onescan.kernels.common import Blocks, Case, Example, jit, kernel
from onescan.kernels.feature_maps import sigmoid

EXAMPLES = (Example(1, 1),)


def blocks_of(case: Case) -> Blocks:
    """Return blocks of 1,024 numbers, at 8 per thread."""
    return Blocks(tokens=1, keys=1024, values=1, warps=4, stages=1)


@jit
def load_gate(gate, i, mask, SILU: tl.constexpr):
    """Return the activation of a block of gates, and its derivative."""
    g = tl.load(gate + i, mask=mask, other=0).to(tl.float32)
    activation = sigmoid(g)
    slope = activation * (1 - activation)
    if SILU:
        slope = activation + g * slope
        activation *= g
    return activation, slope


@kernel(blocks_of, {"SILU": False}, {"SILU": True})
def gated(
    x, gate,
    y,
    length,
    SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write y for `length` numbers."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < length
    activation, _ = load_gate(gate, i, mask, SILU)
    values = tl.load(x + i, mask=mask, other=0).to(tl.float32)
    tl.store(y + i, values * activation, mask=mask)


@kernel(blocks_of, {"SILU": False}, {"SILU": True})
def gated_backward(
    dy, x, gate,
    dx, dgate,
    length,
    SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write dx and dgate for `length` numbers."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < length
    activation, slope = load_gate(gate, i, mask, SILU)
    values = tl.load(x + i, mask=mask, other=0).to(tl.float32)
    gradient = tl.load(dy + i, mask=mask, other=0).to(tl.float32)
    tl.store(dx + i, gradient * activation, mask=mask)
    tl.store(dgate + i, gradient * values * slope, mask=mask)
