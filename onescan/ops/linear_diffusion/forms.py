"""One explicit step of diffusion in plain torch, in several forms.

Source: LDN, arXiv:2502.12381, Sec. 3.3. K is a Toeplitz matrix with one kernel per head, shared by
all sequences and channels. An explicit step multiplies by K: as a dense matrix in O(T^2), as a
band in O(T R), or by FFT in O(T log T). `crank_nicolson.py` has the implicit step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onescan.checks import can_look_at_values
from onescan.ops.chunks import number_of_chunks
from onescan.ops.numerics import accumulation_dtype, row_dot, to_float64
from onescan.shapes import (
    DiffusionKernel,
    DiffusionKernels,
    Keep,
    LastColumns,
    LastTokens,
    Toeplitz2d,
    TokenColumns,
    Values,
)

BAND_BLOCK = 64  # matrix products with fewer rows are no faster

Product = Callable[[TokenColumns, DiffusionKernel, int], LastColumns]


# The explicit step, h' = (1 - dt K 1) h + dt K h.


def explicit(
    product: Product, x: Values, rates: DiffusionKernels, keep: Keep | None, rows: int
) -> LastTokens:
    """Compute the explicit step for the last `rows` tokens; `rates` is dt K.

    Up to the stable step it is a weighted mean of tokens, Sec. 4.4. Products of bfloat16 tokens are
    bfloat16; row sums are float32, of the same rounded weights.
    """
    factors = rates.to(x.dtype)
    row_sums = row_sums_of(product, factors.to(rates.dtype), keep, rows)
    mixed, tokens = _products(product, x, factors, rows), x[:, -rows:]
    if torch.compiler.is_compiling():  # the compiler cannot trace a function with a jvp
        return torch.addcmul(mixed, 1 - row_sums, tokens)
    if can_look_at_values(mixed) and not mixed.requires_grad:
        # in place, because on a CPU allocating another result takes as long as a product
        return mixed.addcmul_(1 - row_sums, tokens)
    return _WeightedMean.apply(mixed, 1 - row_sums, tokens)


def _products(product: Product, x: Values, weights: DiffusionKernels, rows: int) -> LastTokens:
    """Multiply the tokens of each head by its kernel."""
    heads = [
        product(_columns(head), kernel, rows).unflatten(1, (x.shape[0], x.shape[3]))
        for head, kernel in zip(_heads(x), weights, strict=True)
    ]
    stacked = heads[0].unsqueeze(2) if len(heads) == 1 else torch.stack(heads, dim=2)
    return stacked.transpose(0, 1)


def _heads(x: Values) -> Sequence[Tensor]:
    """Return the tokens of each head, [B, T, V].

    A single head is squeezed, because the gradient of unbind would take memory.
    """
    return [x.squeeze(2)] if x.shape[2] == 1 else x.unbind(2)


def _columns(head: Tensor) -> TokenColumns:
    """Reshape [B, T, V] to [T, B V], so that all sequences share one matrix product."""
    return head.transpose(0, 1).flatten(1)


def row_sums_of(
    product: Product, weights: DiffusionKernels, keep: Keep | None, rows: int
) -> Tensor:
    """Sum K_ts over the real tokens s, for the last rows: [1 or B, rows, H, 1]."""
    if keep is not None:
        ones = keep.to(weights.dtype)[:, :, None, None].expand(-1, -1, weights.shape[0], 1)
        return _products(product, ones, weights, rows)
    radius = weights.shape[1] // 2
    # sums over 0, 1, ... rows - 1 lags on each side, of which at most R are not zero
    past, future = weights[:, radius + 1 :], weights[:, :radius].flip(1)
    past, future = (F.pad(x, (1, rows - 1 - radius)).cumsum(1) for x in (past, future))
    row_sums = past + future.flip(1)
    return row_sums.mT[None, :, :, None]


class _WeightedMean(torch.autograd.Function):
    """Compute mixed + weight * tokens, with a gradient of `weight` that needs less memory."""

    generate_vmap_rule = True

    @staticmethod
    def forward(mixed: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
        return torch.addcmul(mixed, weight, tokens)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def jvp(ctx: Any, dmixed: Tensor, dweight: Tensor, dtokens: Tensor) -> Tensor:
        weight, tokens = ctx.saved_tensors
        return dmixed + dweight * tokens + weight * dtokens

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight, tokens = ctx.saved_tensors
        dots = row_dot(gradient, tokens.to(gradient.dtype))  # B rows H 1
        return gradient, dots.sum_to_size(weight.shape), gradient * weight


def packed_explicit(
    form: str, x: Values, rates: DiffusionKernels, keep: Keep | None, sequence: Tensor
) -> Values:
    """Compute the explicit step of packed sequences, given the sequence of each token, [B, T].

    Blocks of C tokens read windows as in `banded_product`, or all tokens if the form is "dense",
    through a copy of K that is zero between different sequences and for masked tokens.
    """
    tokens, middle = x.shape[1], rates.shape[1] // 2
    radius = min(middle, tokens - 1)  # longer lags connect no tokens
    rates = rates[:, middle - radius : middle + radius + 1]
    size = tokens if form == "dense" else band_block_size(radius)
    padding = number_of_chunks(tokens, size) * size - tokens
    if keep is not None:
        sequence = sequence.masked_fill(~keep, -1)
    blocks = F.pad(sequence, (0, padding), value=-1).unflatten(1, (-1, size))
    windows = F.pad(sequence, (radius, radius + padding), value=-2).unfold(
        1, size + 2 * radius, size
    )
    is_same = blocks.unsqueeze(-1) == windows.unsqueeze(-2)  # B N C C+2R
    outputs = []
    for head, kernel in zip(_heads(x), rates, strict=True):
        band = _band(kernel, size) * is_same
        around = F.pad(head, (0, 0, radius, radius + padding)).unfold(1, size + 2 * radius, size)
        mixed = (band @ around.mT).flatten(1, 2)[:, :tokens]  # B T V
        row_sums = band.sum(-1).flatten(1, 2)[:, :tokens].unsqueeze(-1)
        outputs.append(torch.addcmul(mixed, 1 - row_sums, head))
    return torch.stack(outputs, dim=2)


# Products with K. Each returns the last `rows` rows of K x.


def dense_product(x: TokenColumns, weights: DiffusionKernel, rows: int) -> LastColumns:
    """Multiply by K as a matrix, O(T^2). The gradient of a lag is summed in float32 or wider."""
    wide = weights.to(accumulation_dtype(weights.dtype))
    return toeplitz_matrix(wide, rows, x.shape[0]).to(x.dtype) @ x


def toeplitz_matrix(weights: DiffusionKernel, rows: int, columns: int) -> Toeplitz2d:
    """Return the last rows of K for `columns` tokens, zero beyond the radius."""
    radius = weights.shape[0] // 2
    # lags from 1 - rows, of the first row and the last column, to columns - 1
    lags = F.pad(weights, (rows - 1 - radius, columns - 1 - radius))
    # each row begins one lag later; unfold does not accept symbolic lengths
    return lags.as_strided((rows, columns), (1, 1)).flip(1)


def fft_product(x: TokenColumns, weights: DiffusionKernel, rows: int) -> LastColumns:
    """Multiply the spectra of kernel and tokens, O(T log T) for any radius."""
    if not x.shape[1]:
        return x[:rows]  # the FFT does not accept an empty batch
    tokens, middle = x.shape[0], weights.shape[0] // 2
    radius = min(middle, tokens - 1)
    lags = weights[middle - radius : middle + radius + 1]  # longer lags connect no tokens
    period = tokens + radius  # the shortest in which no lag wraps around
    if not torch.compiler.is_compiling():  # lengths may be symbolic there
        period = 1 << (period - 1).bit_length()  # powers of two are fast
    # float64: each frequency mixes all tokens, so rounding errors of large tokens affect small ones
    kernel = torch.fft.rfft(to_float64(lags), n=period)
    spectrum = torch.fft.rfft(to_float64(x).mT, n=period) * kernel
    y = torch.fft.irfft(spectrum, n=period)[:, radius : radius + tokens]
    return y[:, tokens - rows :].mT.to(x.dtype)


def banded_product(x: TokenColumns, weights: DiffusionKernel, rows: int) -> LastColumns:
    """Multiply block by block, O(T R): C tokens read a window that is R wider on both sides."""
    # compilers plan gradients and memory themselves, and cannot trace a function with a jvp
    multiply = _padded_product if torch.compiler.is_compiling() else _Banded.apply
    y = multiply(x, weights)
    tokens = x.shape[0]
    return y if rows == tokens else y.narrow(0, tokens - rows, rows)


def band_block_size(radius: int) -> int:
    """Return C, the block size for which windows span at most three blocks."""
    return max(BAND_BLOCK, radius)


class _Banded(torch.autograd.Function):
    """Compute y = K x, with dx = K^T dy, a product with the flipped kernel, and dK = dy x^T.

    Autograd would add the gradients of overlapping windows, which is several times slower.
    """

    @staticmethod
    def forward(x: Tensor, weights: Tensor) -> Tensor:
        return _banded_product(x, weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dweights: Tensor | None) -> Tensor:
        x, weights = ctx.saved_tensors
        dx = torch.zeros_like(x) if dx is None else dx
        dweights = torch.zeros_like(weights) if dweights is None else dweights
        return _Banded.apply(dx, weights) + _Banded.apply(x, dweights)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, int | None], x: Tensor, weights: Tensor
    ) -> tuple[Tensor, int]:
        if in_dims[1] is None:  # more columns with the same kernel
            columns = x.movedim(in_dims[0] or 0, 1).flatten(1)
            return _Banded.apply(columns, weights).unflatten(1, (info.batch_size, -1)), 1
        kernels = weights.unbind(in_dims[1])
        tokens = [x] * len(kernels) if in_dims[0] is None else x.unbind(in_dims[0])
        return torch.stack([_Banded.apply(*pair) for pair in zip(tokens, kernels, strict=True)]), 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weights = ctx.saved_tensors
        dx = _Banded.apply(gradient, weights.flip(0)) if ctx.needs_input_grad[0] else None
        return dx, correlation(gradient, x, weights) if ctx.needs_input_grad[1] else None


def _banded_product(x: Tensor, weights: Tensor) -> Tensor:
    """Compute K x without temporary memory, because page faults take as long as the products."""
    radius = len(weights) // 2
    size = band_block_size(radius)
    count = _unpadded_blocks(len(x), size, radius)
    if count < 1:
        return _padded_product(x, weights).clone()  # forward mode refuses a part of a storage
    y, band, end = torch.empty_like(x), _band(weights, size), (count + 1) * size
    middle = y[size:end].unflatten(0, (count, size))
    windows = _unpadded_windows(x, count, size, radius)
    torch.bmm(band.expand(count, -1, -1), windows.mT, out=middle)
    y[:size] = band[:, radius:] @ x[: size + radius]
    y[end:] = _padded_product(x[end - radius :], weights)[radius:]
    return y


def _padded_product(x: Tensor, weights: Tensor) -> Tensor:
    radius = weights.shape[0] // 2
    size = band_block_size(radius)
    y = _band(weights, size).unsqueeze(0) @ _padded_windows(x, size, radius).mT
    return y.flatten(0, 1).narrow(0, 0, x.shape[0])


def _unpadded_blocks(tokens: int, size: int, radius: int) -> int:
    """Count the blocks, from the second on, whose windows lie within the tokens."""
    return (tokens - radius) // size - 1


def _unpadded_windows(x: Tensor, count: int, size: int, radius: int) -> Tensor:
    """Return a view of these blocks' windows, `blocks columns window`."""
    return x[size - radius :].unfold(0, size + 2 * radius, size)[:count]


def _padded_windows(x: Tensor, size: int, radius: int) -> Tensor:
    """Return the windows of all blocks, `blocks columns window`, with zeros around x."""
    length = number_of_chunks(x.shape[0], size) * size
    x = F.pad(x, (0, 0, radius, radius + length - x.shape[0]))
    return x.unfold(0, size + 2 * radius, size)


def _band(weights: Tensor, size: int) -> Tensor:
    """Return K between a block and its window, [C, C+2R]: row t, column j has lag t + R - j."""
    window = size + weights.shape[0] - 1
    return F.pad(weights, (size - 1, size - 1)).unfold(0, window, 1).flip(1)


def correlation(y: Tensor, x: Tensor, weights: Tensor) -> Tensor:
    """Compute the gradient of the kernel: the sum of y_t x_{t-r} over tokens and columns."""
    radius = len(weights) // 2
    size = band_block_size(radius)
    count = _unpadded_blocks(len(x), size, radius)
    if count < 1:
        return diagonal_sums(_padded_outer_products(y, x, size, radius), radius)
    end = (count + 1) * size
    first = F.pad(y[:size] @ x[: size + radius].mT, (radius, 0))
    # the last tokens also read R tokens before them, whose own rows are zero here
    y_end = F.pad(y[end:], (0, 0, radius, 0))
    last = _padded_outer_products(y_end, x[end - radius :], size, radius)
    blocks = y[size:end].unflatten(0, (count, size))
    band = torch.addbmm(first + last, blocks, _unpadded_windows(x, count, size, radius))
    return diagonal_sums(band, radius)


def _padded_outer_products(y: Tensor, x: Tensor, size: int, radius: int) -> Tensor:
    """Sum y x^T between a block and its window over all blocks, [C, C+2R]."""
    blocks = F.pad(y, (0, 0, 0, -len(y) % size)).unflatten(0, (-1, size))
    return (blocks @ _padded_windows(x, size, radius)).sum(0)


def diagonal_sums(band: Tensor, radius: int) -> Tensor:
    """Sum over each lag r, found in column j = t + R - r of row t.

    Padding each row by one column shifts row t by t, which turns diagonals into columns.
    """
    size = len(band)
    diagonals = F.pad(band.flatten(), (0, size)).unflatten(0, (size, -1))
    return diagonals.sum(0)[: 2 * radius + 1].flip(0)


PRODUCTS: dict[str, Product] = {
    "dense": dense_product,
    "banded": banded_product,
    "fft": fft_product,
}
