"""LDN's kernel, K_ts = phi(t - s) g(|t - s|), and the longest stable step: plain functions.

Source: LDN, arXiv:2502.12381, Sec. 3.3 (the kernel) and 4.4 (the step).
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
)
from onescan.ops.numerics import widened
from onescan.shapes import DiffusionKernels, StepSizes

LEAST_ROW_SUM = 1e-18  # of less, the square, which a gradient divides by, is 0 in float32


def gaussian_kernel(past: Tensor, future: Tensor, sigma: Tensor, radius: int) -> DiffusionKernels:
    """Weights of lags t - s = -R ... R: phi is `past` above 0 and `future` below, g a Gaussian.

    Args:
        past: [H], how much a token takes in of those before it, at least 0.
        future: [H], of those after it; 0 is causal.
        sigma: [H], the Gaussian's standard deviation in tokens, above 0.
        radius: R.

    Raises:
        ValueError: shapes, types or devices disagree, a radius that is no whole number from 0 on,
            or, on a CPU, numbers out of their range.

    >>> one = torch.ones(1)
    >>> gaussian_kernel(past=one, future=one / 2, sigma=one, radius=2).mul(100).round().tolist()
    [[7.0, 30.0, 0.0, 61.0, 14.0]]
    """
    given = {"past": past, "future": future, "sigma": sigma}
    check_floating(**given)
    check_devices(**given)
    check_shapes(past=(past, "H"), future=(future, "H"), sigma=(sigma, "H"))
    if isinstance(radius, bool) or not isinstance(radius, int) or radius < 0:
        raise ValueError(f"radius is {radius!r}, expected a whole number from 0 on")
    for name, tensor in given.items():
        if can_look_at_values(tensor) and tensor.numel():
            lowest = tensor.detach().amin().item()
            if not lowest >= 0 or (name == "sigma" and lowest == 0):  # NaN fails this too
                least = "above 0" if name == "sigma" else "at least 0"
                raise ValueError(f"{name} reaches {lowest:.6g}, expected {least}")
    lags = torch.arange(-radius, radius + 1, dtype=sigma.dtype, device=sigma.device)
    gaussian = (-0.5 * (lags / sigma.unsqueeze(-1)).square()).exp()  # H 2R+1
    # a token takes nothing in of itself
    phi = past.unsqueeze(-1) * (lags > 0) + future.unsqueeze(-1) * (lags < 0)
    return phi * gaussian


def gaussian_radius(sigma: float, epsilon: float) -> int:
    """The lag beyond which a Gaussian is below epsilon: ceil(sigma sqrt(2 ln(1 / epsilon))).

    With a stable step, what lies beyond moves no token by more than epsilon times the distance
    between the largest and the smallest.

    Raises:
        ValueError: sigma is not above 0 and finite, or epsilon not between 0 and 1.

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
    (weights,) = widened(weights)
    middle = weights.shape[-1] // 2
    row_sum = weights[..., :middle].sum(-1) + weights[..., middle + 1 :].sum(-1)
    rounding = (weights.shape[-1] + 2) * torch.finfo(weights.dtype).eps
    return (1 - rounding) / row_sum.clamp(min=LEAST_ROW_SUM)


def check_kernels(weights: Any) -> None:
    """Raise ValueError for what is no kernels: another shape or type, or numbers below 0."""
    check_floating(weights=weights)
    sizes = check_shapes(weights=(weights, "H lags"))
    if sizes["lags"] % 2 == 0:
        raise ValueError(
            f"weights has shape {tuple(weights.shape)}, expected 'H 2R+1', an odd number of lags"
        )
    if can_look_at_values(weights) and weights.numel():
        lowest = weights.detach().amin().item()
        if lowest < 0:
            raise ValueError(f"weights reaches {lowest:.6g}, expected at least 0")
