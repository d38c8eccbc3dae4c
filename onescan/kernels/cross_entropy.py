"""Cross-entropy of logits and labels, and its gradient, without writing logits in float32.

    loss = z - logits[label],   z = log sum exp(logits)        losses
    dlogits = (exp(logits - z) - onehot(label)) dloss          losses_back

Each row of logits is read once per pass. Rows whose label is `ignored` have no loss.
"""

import triton.language as tl

from onescan.kernels.common import Blocks, Case, Example, kernel

EXAMPLES = (Example(1, 1),)


def blocks_of(case: Case) -> Blocks:
    """Return blocks of 4,096 classes, at 16 per thread."""
    return Blocks(tokens=1, keys=4096, values=1, warps=8, stages=2)


@kernel(blocks_of)
def losses(
    logits, labels,
    loss, peak, mass,
    classes, ignored,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the loss of one row, which is NaN if the label is out of range, and its peak and mass.

    exp(z) = exp(peak) mass. z itself would be rounded relative to the largest logit.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * classes
    m, n = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    for first in range(0, classes, BLOCK):
        c = first + tl.arange(0, BLOCK)
        x = tl.load(logits + c, mask=c < classes, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(m, tl.max(x, 0))
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        n = n * tl.exp(m - reference) + tl.sum(tl.exp(x - reference), 0)
        m = higher
    label = tl.load(labels + row)
    is_valid = (label >= 0) & (label < classes)
    label_logit = tl.load(logits + label, mask=is_valid, other=float("nan")).to(tl.float32)
    tl.store(peak + row, m)
    tl.store(mass + row, n)
    tl.store(loss + row, tl.where(label == ignored, 0.0, tl.log(n) + (m - label_logit)))


@kernel(blocks_of)
def losses_back(
    dloss, logits, labels, peak, mass,
    dlogits,
    classes, ignored,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one block of classes of one row."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < classes
    label = tl.load(labels + row)
    offsets = row * classes + c
    x = tl.load(logits + offsets, mask=mask, other=float("-inf")).to(tl.float32)
    probability = tl.exp(x - tl.load(peak + row)) / tl.load(mass + row)
    gradient = probability - tl.where(c == label, 1.0, 0.0)
    gradient = tl.where(label == ignored, 0.0, gradient * tl.load(dloss + row))
    tl.store(dlogits + offsets, gradient, mask=mask)
