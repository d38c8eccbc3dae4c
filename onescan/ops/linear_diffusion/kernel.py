"""The diffusion kernel: its weights, its largest stable step, and when all tokens interact.

Source: LDN, arXiv:2502.12381, Sec. 3.3 (the kernel), 4.2 (interaction) and 4.4 (the step).
"""

import math
from typing import Any

import torch
from torch import Tensor

from onescan.checks import (
    can_look_at_values,
    check_devices,
    check_floating,
    check_positive,
    check_shapes,
    check_whole,
)
from onescan.ops.numerics import to_accumulation_dtype
from onescan.shapes import DiffusionKernels, StepSizes

MIN_ROW_SUM = 1e-18  # a gradient divides by its square, which must not be 0 in float32


def gaussian_kernel(past: Tensor, future: Tensor, sigma: Tensor, radius: int) -> DiffusionKernels:
    """Compute the weights of the lags t - s = -R ... R, `K_ts = phi(t - s) g(|t - s|)`.

    phi is `past` for positive lags and `future` for negative ones; g is a Gaussian. The weight of
    lag 0 is zero. Source: LDN, arXiv:2502.12381, Sec. 3.3.

    Args:
        past: [H], weight of earlier tokens, at least 0.
        future: [H], weight of later tokens, at least 0; 0 makes the kernel causal.
        sigma: [H], standard deviation of the Gaussian in tokens, above 0.
        radius: Largest lag, R.

    Returns:
        Kernels [H, 2R+1].

    Raises:
        ValueError: If shapes, dtypes or devices do not match, radius is not an integer of at least
            0 or, on a CPU, a value is out of its range.

    >>> one = torch.ones(1)
    >>> gaussian_kernel(past=one, future=one / 2, sigma=one, radius=2).mul(100).round().tolist()
    [[7.0, 30.0, 0.0, 61.0, 14.0]]
    """
    given = {"past": past, "future": future, "sigma": sigma}
    check_floating(**given)
    check_devices(**given)
    check_shapes(past=(past, "H"), future=(future, "H"), sigma=(sigma, "H"))
    check_whole(0, radius=radius)
    for name, tensor in given.items():
        if can_look_at_values(tensor) and tensor.numel():
            low, high = (x.item() for x in torch.aminmax(tensor.detach()))
            if not low >= 0 or (name == "sigma" and low == 0):  # also rejects NaN
                least = "above 0" if name == "sigma" else "at least 0"
                raise ValueError(f"{name} has minimum {low:.6g}, expected {least}")
            if high == math.inf:
                raise ValueError(f"{name} has maximum inf, expected finite values")
    lags = torch.arange(-radius, radius + 1, dtype=sigma.dtype, device=sigma.device)
    gaussian = (-0.5 * (lags / sigma.unsqueeze(-1)).square()).exp()  # H 2R+1
    phi = past.unsqueeze(-1) * (lags > 0) + future.unsqueeze(-1) * (lags < 0)
    return phi * gaussian


def gaussian_radius(sigma: float, epsilon: float) -> int:
    """Return the lag beyond which a Gaussian is below epsilon: ceil(sigma sqrt(2 ln(1/epsilon))).

    With a stable step, cutting the kernel there changes a token by at most epsilon times the
    range of the tokens.

    Raises:
        ValueError: If sigma is not positive and finite, or epsilon not between 0 and 1.

    >>> gaussian_radius(sigma=8.0, epsilon=1e-4)
    35
    """
    check_positive(sigma=sigma)
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon is {epsilon}, expected a number between 0 and 1")
    return math.ceil(sigma * math.sqrt(-2 * math.log(epsilon)))


def stable_step(weights: DiffusionKernels) -> StepSizes:
    """Return the largest stable step, 1 / sum_r K_r, which makes each output a weighted mean.

    It does not depend on the number of tokens. It equals the paper's bound, 1 / max_t sum_s K_ts,
    if any token is at least R from both ends; otherwise, the paper allows a longer step. It
    is reduced by the rounding error of the sum, so that no weight is negative.

    Args:
        weights: Kernels [H, 2R+1], as in `linear_diffusion`.

    Returns:
        Step sizes [H], in float32 or wider.

    Raises:
        ValueError: If the shape or dtype is invalid or, on a CPU, a number is negative.
    """
    check_kernels(weights)
    (weights,) = to_accumulation_dtype(weights)
    middle = weights.shape[-1] // 2
    row_sum = weights[..., :middle].sum(-1) + weights[..., middle + 1 :].sum(-1)
    return longest_step(row_sum, terms=weights.shape[-1])


def longest_step(row_sum: StepSizes, *, terms: int) -> StepSizes:
    """Return 1 / row_sum, reduced by the rounding error of the sum of this number of terms."""
    rounding = (terms + 2) * torch.finfo(row_sum.dtype).eps
    return (1 - rounding) / row_sum.clamp(min=MIN_ROW_SUM)


def check_kernels(weights: Any) -> None:
    """Raise ValueError if the shape or dtype is invalid or, on a CPU, a weight is negative."""
    check_floating(weights=weights)
    sizes = check_shapes(weights=(weights, "H lags"))
    if sizes["lags"] % 2 == 0:
        raise ValueError(
            f"weights has shape {tuple(weights.shape)}, expected 'H 2R+1', an odd number of lags"
        )
    if can_look_at_values(weights) and weights.numel():
        lowest = weights.detach().amin().item()
        if lowest < 0:
            raise ValueError(f"weights has minimum {lowest:.6g}, expected at least 0")


def smallest_positive_power(operator: Tensor) -> int | None:
    """Return the smallest L for which A^L has no zero: the depth at which all tokens interact.

    Source: LDN, arXiv:2502.12381, Theorem 1, which requires a strongly connected graph. That alone
    is not sufficient: A = [[0, 1], [1, 0]], where two tokens swap, never mixes. It is sufficient
    if each token keeps a fraction of itself, as it does for any step below `stable_step`.

    Args:
        operator: Matrix A [T, T] of non-negative numbers. Do not use form="fft", which has rounding
            errors instead of zeros.

    Returns:
        L, or None if every power of A has a zero.

    Raises:
        ValueError: If A is not square, or has a negative number.

    >>> smallest_positive_power(torch.tensor([[0.0, 1.0], [1.0, 0.0]])) is None  # they swap
    True
    >>> smallest_positive_power(torch.tensor([[0.5, 0.5], [0.5, 0.5]]))
    1
    """
    check_shapes(operator=(operator, "T T"))
    if not (operator >= 0).all():
        raise ValueError("operator contains numbers below 0 or NaN, expected 0 or more")
    tokens = len(operator)
    step = (operator > 0).double()
    if not step.any(dim=1).all():
        return None  # a row of zeros stays zero
    # Wielandt: if any power of a T x T matrix is positive, the power (T - 1)^2 + 1 is. As no row is
    # zero, all powers after the first positive one are positive, so a binary search finds it.
    squares = [step]
    while not squares[-1].all():
        if 2 ** (len(squares) - 1) > (tokens - 1) ** 2 + 1:
            return None
        squares.append(_pattern(squares[-1], squares[-1]))
    below, reached = 0, torch.eye(tokens, dtype=step.dtype, device=step.device)
    for k in reversed(range(len(squares) - 1)):
        further = _pattern(reached, squares[k])
        if not further.all():
            below, reached = below + 2**k, further
    return below + 1


def _pattern(a: Tensor, b: Tensor) -> Tensor:
    """Return 1 where the product of two matrices of zeros and ones is not 0."""
    return (a @ b > 0).double()
