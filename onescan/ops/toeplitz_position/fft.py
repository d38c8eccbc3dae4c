"""The convolution theorem: y is the product of two spectra, O(N log N).

Source: LightNet, arXiv:2405.21022, Eq. 17, along one axis.
"""

import torch
import torch.nn.functional as F

from onescan.ops.toeplitz_position.exponentials import kernel
from onescan.ops.toeplitz_position.state import with_state
from onescan.shapes import DirectedDecays, Lines, LineStates


def forward(
    x: Lines, log_decay: DirectedDecays, weight: DirectedDecays, hidden: LineStates | None
) -> tuple[Lines, LineStates | None]:
    length = x.shape[-1]
    # from 2 N on no lag wraps onto another; powers of two are fast
    period = 1 << (2 * length - 1).bit_length()
    t = torch.fft.rfft(kernel(log_decay, weight, length).double(), n=period).unsqueeze(1)
    # double: a spectrum mixes all tokens, and the rounding of a large one drowns the small ones;
    # flat: of more axes, compiled gradients read the strides wrongly (pytorch issue 106623)
    lines = x if x.shape[1] else F.pad(x, (0, 0, 0, 1))  # MKL refuses an empty batch
    spectrum = torch.fft.rfft(lines.double().flatten(0, 1), n=period).unflatten(0, lines.shape[:2])
    y = torch.fft.irfft(spectrum * t, n=period)[:, : x.shape[1], length - 1 : 2 * length - 1]
    y = y.to(x.dtype)
    return with_state(y, x, log_decay, weight, hidden)
