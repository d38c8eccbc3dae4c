"""The step as a matrix A, and when its powers connect every token with every other.

Source: LDN, arXiv:2502.12381, Sec. 4. Theorem 1 asks of the kernel that its graph be strongly
connected. That is not enough: two tokens that swap, A = [[0, 1], [1, 0]], never mix. Where each
token keeps a share of itself, which any step below `stable_step` leaves it, it is.
"""

import torch
from torch import Tensor

from onescan.checks import check_shapes
from onescan.ops.linear_diffusion import Form, Scheme, linear_diffusion
from onescan.shapes import DiffusionKernels, Operators, StepSizes


def diffusion_operator(
    weights: DiffusionKernels,
    dt: StepSizes,
    tokens: int,
    *,
    scheme: Scheme = "explicit",
    form: Form = "auto",
) -> Operators:
    """A with h' = A h, for so many tokens: explicit, I + dt (K - diag(K 1)), Sec. 4.1.

    >>> A = diffusion_operator(torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor([0.25]), 3)
    >>> A.tolist()
    [[[0.75, 0.25, 0.0], [0.25, 0.5, 0.25], [0.0, 0.25, 0.75]]]
    """
    one = torch.eye(tokens, dtype=weights.dtype, device=weights.device)
    each = one[None, :, None].expand(1, -1, weights.shape[0], -1)
    return linear_diffusion(each, weights, dt, scheme=scheme, form=form)[0].transpose(0, 1)


def smallest_positive_power(operator: Tensor) -> int | None:
    """Return the smallest L for which A^L has no zero: the depth at which all tokens interact.

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
        raise ValueError("operator holds numbers below 0 or NaN, expected 0 or more")
    tokens = len(operator)
    step = (operator > 0).double()
    if not step.any(dim=1).all():
        return None  # a row of zeros stays one
    # Wielandt: if any power of a T x T matrix is positive, the power (T - 1)^2 + 1 is. As no row is
    # zero, so are all after the first that is: look for it among the powers of two, then between.
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
    """1 where the product of two matrices of zeros and ones is not 0."""
    return (a @ b > 0).double()
