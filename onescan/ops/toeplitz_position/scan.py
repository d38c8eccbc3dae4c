"""Linear time: a Toeplitz matrix inside each chunk, E decaying sums from chunk to chunk.

Source: LightNet, arXiv:2405.21022, Eq. 17, along one axis.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from onescan.ops.chunks import is_known, linear_scan, number_of_chunks
from onescan.ops.toeplitz_position import dense
from onescan.ops.toeplitz_position.exponentials import powers
from onescan.ops.toeplitz_position.state import advance
from onescan.shapes import Decays, DirectedDecays, Lines, LineStates

CHUNK = 64


def forward(
    x: Lines,
    log_decay: DirectedDecays,
    weight: DirectedDecays,
    hidden: LineStates | None,
    *,
    chunk_size: int = CHUNK,
) -> tuple[Lines, LineStates | None]:
    channels, lines, length = x.shape
    if is_known(length) and length <= chunk_size:
        return dense.forward(x, log_decay, weight, hidden)
    count = number_of_chunks(length, chunk_size)
    chunks = F.pad(x, (0, count * chunk_size - length)).reshape(channels, lines * count, chunk_size)
    y = chunks @ dense.matrix(log_decay, weight, chunk_size)
    for backward, (a, w) in enumerate(zip(log_decay, weight, strict=True)):
        decays = powers(a, chunk_size + 1)  # D 1+C E
        leave, read = decays[:, :-1], w.unsqueeze(1) * decays[:, 1:]
        leave, read = (leave, read.flip(1)) if backward else (leave.flip(1), read)
        left = (chunks @ leave).unflatten(1, (lines, count))  # D lines chunks E
        first = torch.zeros_like(left[:, :, 0]) if hidden is None else hidden
        entering = _entering(left, chunk_size * a, first, backward=bool(backward))
        y = torch.baddbmm(y, entering.flatten(1, 2), read.mT)
    y = y.view(channels, lines, count * chunk_size).narrow(-1, 0, length)
    if hidden is None:
        return y, None
    before = (count - 1) * chunk_size
    last = x.narrow(-1, before, length - before)
    if not is_known(length):  # zeros in front leave nothing behind
        last = F.pad(last, (chunk_size - last.shape[-1], 0))
    return y, advance(entering[:, :, -1], last, log_decay[0], length - before)


def _entering(left: Tensor, log_decay: Decays, first: LineStates, *, backward: bool) -> Tensor:
    """The state that enters each chunk, from what each chunk alone leaves, `D lines chunks E`.

    Chunks join in pairs, and pairs in pairs: work grows with their number, rounding with its log.
    """
    count = left.shape[2]
    if not is_known(count):
        return linear_scan(first, left, log_decay.exp()[:, None, None], backward=backward)[0]
    if count == 1:
        return first.unsqueeze(2)
    if count % 2:
        left = F.pad(left, (0, 0, 0, 1))
    near, far = left.unflatten(2, (-1, 2)).unbind(3)
    if backward:
        near, far = far, near
    decay = log_decay.exp()[:, None, None]
    pairs = _entering(torch.addcmul(far, decay, near), 2 * log_decay, first, backward=backward)
    inside = torch.addcmul(near, decay, pairs)
    states = torch.stack([inside, pairs] if backward else [pairs, inside], dim=3)
    return states.flatten(2, 3)[:, :, :count]
