"""Noise schedules, and the training target and variance loss of a denoiser.

Sources: DDPM, arXiv:2006.11239, Eq. 4 to 7; learned variances, arXiv:2102.09672, Sec. 3.1; v,
arXiv:2202.00512, App. D; flow matching, arXiv:2210.02747, Eq. 22, with time reversed.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from onescan.models.denoiser import STEPS, NoiseConfig
from onescan.shapes import Grids, Timesteps

LINEAR = (1e-4, 0.02)  # betas of the first and last step
COSINE_OFFSET, MAX_BETA = 0.008, 0.999
HALF_BIN = 1 / 255  # half the distance of 8-bit pixel values, which range from -1 to 1
OUTERMOST = 0.999  # pixel values beyond it are in bins that extend to infinity

PerImage = Float[Tensor, " B"]
Table = Float[Tensor, " steps"]


def make_betas(config: NoiseConfig) -> Table:
    """Return the variance of the noise that each step adds, in float64."""
    if config.betas == "linear":
        return torch.linspace(*LINEAR, STEPS, dtype=torch.float64)
    t = torch.arange(STEPS + 1, dtype=torch.float64) / STEPS
    alphas = ((t + COSINE_OFFSET) / (1 + COSINE_OFFSET) * math.pi / 2).cos() ** 2
    return (1 - alphas[1:] / alphas[:-1]).clamp(max=MAX_BETA)


class Noising:
    """The forward process x_t = a_t x_0 + s_t noise, and the targets of its reversal.

    Timesteps are whole numbers from 0 to 999; for flow matching, any numbers up to 1000.
    """

    def __init__(self, config: NoiseConfig) -> None:
        config.check()
        self.config, self.is_flow = config, config.prediction == "flow"
        betas = make_betas(config)
        alphas = (1 - betas).cumprod(0)  # of all steps up to each
        previous = torch.cat([torch.ones(1, dtype=torch.float64), alphas[:-1]])
        # Variance of q(x_{t-1} | x_t, x_0). It is 0 at the first step, where the logarithm uses
        # that of the second step.
        min_variance = betas * (1 - previous) / (1 - alphas)
        min_variance[0] = min_variance[1]
        self.tables = {
            "a": alphas.sqrt(),
            "s": (1 - alphas).sqrt(),
            "x0_coefficient": betas * previous.sqrt() / (1 - alphas),
            "noisy_coefficient": (1 - betas).sqrt() * (1 - previous) / (1 - alphas),
            "min_log_variance": min_variance.log(),
            "max_log_variance": betas.log(),
        }
        self._tables_on: dict[tuple[str, torch.device, torch.dtype], Table] = {}

    def timesteps(self, fractions: PerImage) -> Timesteps:
        """Return the timesteps at fractions, from 0 to below 1, of their range.

        >>> Noising(NoiseConfig()).timesteps(torch.tensor([0.0, 0.9999])).tolist()
        [0, 999]
        """
        if self.is_flow:
            return fractions * STEPS
        return (fractions * STEPS).long().clamp(max=STEPS - 1)

    def mix(self, x0: Grids, noise: Grids, t: Timesteps) -> Grids:
        """Return noisy samples, of any number of axes."""
        a, s = self._coefficients(t, x0)
        return a * x0 + s * noise

    def target(self, x0: Grids, noise: Grids, t: Timesteps) -> Grids:
        """Return what the model should predict."""
        if self.config.prediction == "noise":
            return noise
        if self.is_flow:
            return noise - x0
        a, s = self._coefficients(t, x0)
        return a * noise - s * x0

    def denoised(self, noisy: Grids, prediction: Grids, t: Timesteps) -> Grids:
        """Return the x_0 that a prediction of the target implies."""
        a, s = self._coefficients(t, noisy)
        if self.config.prediction == "noise":
            return (noisy - s * prediction) / a
        return noisy - s * prediction if self.is_flow else a * noisy - s * prediction

    def variance_loss(
        self,
        x0: Grids,
        noisy: Grids,
        prediction: Grids,
        variance: Grids,
        t: Timesteps,
        *,
        count: float | None = None,
    ) -> PerImage:
        """Return the variational bound of one step, in bits per pixel; it trains the variance only.

        This is the KL divergence from q(x_{t-1} | x_t, x_0), or at the first step the negative log
        likelihood of the image in 8 bits.

        Args:
            x0: Images, signals or volumes, from -1 to 1.
            noisy: The same with noise.
            prediction: The model's prediction of the target, which receives no gradient.
            variance: The model's log variances, between their minimum, -1, and their maximum, 1.
            t: Timesteps.
            count: Divisor of the sum over the values of an image. None for the number of values.
        """
        count = x0[0].numel() if count is None else count
        denoised = self.denoised(noisy, prediction.detach(), t)
        for_x0, for_noisy = (self._at(f"{x}_coefficient", t, x0) for x in ("x0", "noisy"))
        mean, true_mean = (for_x0 * x + for_noisy * noisy for x in (denoised, x0))
        low, high = (self._at(f"{end}_log_variance", t, x0) for end in ("min", "max"))
        log_variance = low + (variance + 1) / 2 * (high - low)
        divergence = _divergence(true_mean, low, mean, log_variance).flatten(1).sum(dim=1)
        likelihood = _log_likelihood(x0, mean, log_variance).flatten(1).sum(dim=1)
        return torch.where(t == 0, -likelihood, divergence) / count / math.log(2)

    def _coefficients(self, t: Timesteps, like: Grids) -> tuple[Tensor, Tensor]:
        if self.is_flow:
            s = _per_sample((t / STEPS).to(like.dtype), like)
            return 1 - s, s
        return self._at("a", t, like), self._at("s", t, like)

    def _at(self, name: str, t: Timesteps, like: Grids) -> Tensor:
        """Return the entries of a table at timesteps. Tables are copied to a device once."""
        key = (name, like.device, like.dtype)
        if key not in self._tables_on:
            self._tables_on[key] = self.tables[name].to(device=like.device, dtype=like.dtype)
        return _per_sample(self._tables_on[key][t.long()], like)


def _per_sample(x: Tensor, like: Tensor) -> Tensor:
    """Reshape one number per sample, [B], so that it broadcasts over the axes of a batch."""
    return x.view(-1, *(1,) * (like.ndim - 1))


def _divergence(mean_1: Tensor, log_1: Tensor, mean_2: Tensor, log_2: Tensor) -> Tensor:
    """Return the elementwise KL divergence of two normal distributions."""
    ratio = (log_1 - log_2).exp() + (mean_1 - mean_2) ** 2 * (-log_2).exp()
    return (log_2 - log_1 - 1 + ratio) / 2


def _log_likelihood(x: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """Return the log probability of an 8-bit pixel's bin: Eq. 13 of arXiv:2006.11239."""
    precision = (-log_variance / 2).exp()
    above = torch.special.ndtr((x - mean + HALF_BIN) * precision)
    below = torch.special.ndtr((x - mean - HALF_BIN) * precision)
    above = above.where(x <= OUTERMOST, 1)
    below = below.where(x >= -OUTERMOST, 0)
    return (above - below).clamp(min=1e-12).log()
