"""The convolution theorem: K x is a product of two spectra, O(T log T) for any radius.

Source: LDN, arXiv:2502.12381, Sec. 3.3, K H.
"""

import torch

from onescan.ops.numerics import doubled
from onescan.shapes import DiffusionKernel, MovedColumns, TokenColumns


def product(x: TokenColumns, weights: DiffusionKernel, rows: int) -> MovedColumns:
    """The last rows of K x."""
    if not x.shape[1]:
        return x[:rows]  # no sequence has a spectrum
    tokens = x.shape[0]
    radius = min(weights.shape[0] // 2, tokens - 1)
    middle = weights.shape[0] // 2
    lags = weights[middle - radius : middle + radius + 1]  # what lies further reaches no token
    period = tokens + radius  # from here on no lag wraps onto another
    if not torch.compiler.is_compiling():  # whose lengths may be symbols
        period = 1 << (period - 1).bit_length()  # powers of two are fast
    # double: a spectrum mixes all tokens, and the rounding of a large one drowns the small ones
    kernel = torch.fft.rfft(doubled(lags), n=period)
    spectrum = torch.fft.rfft(doubled(x).mT, n=period) * kernel
    y = torch.fft.irfft(spectrum, n=period)[:, radius : radius + tokens]
    return y[:, tokens - rows :].mT.to(x.dtype)
