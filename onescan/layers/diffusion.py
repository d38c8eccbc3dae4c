"""Diffusion along a sequence, with a kernel and a step in time that are learnt."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from onescan.checks import check_positive
from onescan.ops.linear_diffusion import (
    DiffusionState,
    Form,
    Scheme,
    following,
    gaussian_kernel,
    gaussian_radius,
    linear_diffusion,
    stable_step,
)
from onescan.ops.numerics import widened
from onescan.shapes import DiffusionKernels, Hidden, Keep, StepSizes

LEAST_SIGMA = 0.25  # a neighbour's share of exp(-8): less would be no diffusion at all
# Of the longest stable step. The rest stays with the token: two that swap would never mix.
MOST_OF_STEP = 0.999
MOST_LAGS = 1 << 20  # on a side: more tokens than any sequence has
STEEPEST = 5.0


class Diffusion(nn.Module):
    """h + dt (K h - diag(K 1) h), K_ts = phi(t - s) exp(-(t - s)^2 / 2 sigma^2).

    Source: LDN, arXiv:2502.12381, Sec. 3.3. phi = softplus(past) for t > s, softplus(future) for
    t < s; LEAST_SIGMA < sigma < max_sigma, and an explicit step lies between 0 and the bound of
    Sec. 4.4, whatever is learnt. Each kernel moves its share of the channels.

    Args:
        sigmas: first standard deviation of each kernel, in tokens.
        max_sigma: none grows beyond; with epsilon it says how far a kernel reaches.
        epsilon: what a Gaussian is cut off at.
        causal: whether a token takes in only of those before it.
        scheme: as in `linear_diffusion`.
        form: likewise.
    """

    def __init__(
        self,
        sigmas: Sequence[float],
        *,
        max_sigma: float,
        epsilon: float,
        causal: bool,
        scheme: Scheme,
        form: Form,
    ) -> None:
        super().__init__()
        self.max_sigma, self.scheme, self.form = max_sigma, scheme, form
        places = [log_place(sigma, max_sigma) for sigma in sigmas]
        self.radius = gaussian_radius(max_sigma, epsilon)
        if self.radius > MOST_LAGS:
            raise ValueError(
                f"max_sigma is {max_sigma}, of which a kernel reaches {self.radius} tokens far; "
                f"expected at most {MOST_LAGS}"
            )
        # where a sigmoid is all but flat nothing would be learnt
        logits = torch.tensor(places, dtype=torch.float64).logit().clamp(-STEEPEST, STEEPEST)
        self.sigma_logit = nn.Parameter(logits.to(torch.get_default_dtype()))
        one = math.log(math.e - 1)  # where softplus is 1
        self.past = nn.Parameter(torch.full((len(sigmas),), one))
        self.future = None if causal else nn.Parameter(torch.full((len(sigmas),), one))
        # at first half of the longest stable step
        self.step = nn.Parameter(torch.zeros(len(sigmas)))

    def forward(
        self, x: Hidden, *, keep: Keep | None = None, state: DiffusionState | None = None
    ) -> Hidden:
        """The tokens after one step."""
        weights = self.weights()
        heads = rearrange(x, "b t (h v) -> b t h v", h=len(weights))
        moved = linear_diffusion(
            heads, weights, self.dt(weights),
            scheme=self.scheme, keep=keep, state=state, form=self.form,
        )  # fmt: skip
        return moved.flatten(-2)

    def following(
        self, x: Hidden, *, keep: Keep | None = None, state: DiffusionState | None = None
    ) -> DiffusionState:
        """What the next call needs of these tokens and those before them."""
        heads = rearrange(x, "b t (h v) -> b t h v", h=len(self.past))
        return following(state, heads, keep, radius=self.radius)

    def weights(self) -> DiffusionKernels:
        """The kernels as they are now, for the lags t - s = -R ... R."""
        (past,) = widened(self.past)
        future = torch.zeros_like(past)
        if self.future is not None:
            (future,) = widened(self.future)
            future = F.softplus(future)
        return gaussian_kernel(F.softplus(past), future, self.sigma(), self.radius)

    def sigma(self) -> StepSizes:
        """Each Gaussian's standard deviation, in tokens."""
        (logit,) = widened(self.sigma_logit)
        return LEAST_SIGMA * (self.max_sigma / LEAST_SIGMA) ** torch.sigmoid(logit)

    def dt(self, weights: DiffusionKernels) -> StepSizes:
        """Each kernel's step: a share of the longest stable one; implicit, any multiple of it."""
        (step,) = widened(self.step)
        if self.scheme == "explicit":
            return MOST_OF_STEP * torch.sigmoid(step) * stable_step(weights)
        return F.softplus(step) * stable_step(weights)


def log_place(sigma: float, max_sigma: float) -> float:
    """Where sigma lies between its bounds, on a logarithmic scale from 0 to 1.

    Raises:
        ValueError: it lies on a bound or beyond.
    """
    check_positive(max_sigma=max_sigma)
    if not LEAST_SIGMA < sigma < max_sigma:
        raise ValueError(
            f"sigmas has {sigma}, expected more than {LEAST_SIGMA} and less than max_sigma, "
            f"{max_sigma}"
        )
    return math.log(sigma / LEAST_SIGMA) / math.log(max_sigma / LEAST_SIGMA)
