"""The kernel as one Toeplitz matrix, multiplied: O(T^2).

Source: LDN, arXiv:2502.12381, Sec. 3.3, K H.
"""

import torch.nn.functional as F

from onescan.shapes import DiffusionKernel, MovedColumns, Toeplitz2d, TokenColumns


def product(x: TokenColumns, weights: DiffusionKernel, rows: int) -> MovedColumns:
    """The last rows of K x."""
    return matrix(weights, rows, x.shape[0]) @ x


def matrix(weights: DiffusionKernel, rows: int, columns: int) -> Toeplitz2d:
    """K_ts for the last rows of so many tokens; 0 beyond the kernel's radius."""
    radius = weights.shape[0] // 2
    # lags from 1 - rows, of the first row and the last column, to columns - 1
    lags = F.pad(weights, (rows - 1 - radius, columns - 1 - radius))
    # each row begins one lag later; as_strided, and not unfold, as it takes a compiler's lengths
    return lags.as_strided((rows, columns), (1, 1)).flip(1)
