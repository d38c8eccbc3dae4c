"""Images mixed with noise, and the two losses of a denoiser: its target, and its variance.

Sources: DDPM, arXiv:2006.11239, Eq. 4 to 7; learnt variances, arXiv:2102.09672, Sec. 3.1; v,
arXiv:2202.00512, App. D; flow matching, arXiv:2210.02747, Eq. 22, with its t turned around.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from onescan.models.denoiser import STEPS, NoiseConfig
from onescan.shapes import Images, Timesteps

LINEAR = (1e-4, 0.02)  # betas of the first and of the last step
COSINE_OFFSET, MOST_BETA = 0.008, 0.999
PIXEL_BIN = 1 / 255  # half a step of 8 bits, where black is -1 and white is 1
SURE = 0.999  # of a pixel from here on, the bin reaches on without end

PerImage = Float[Tensor, " B"]
Table = Float[Tensor, " steps"]


def make_betas(config: NoiseConfig) -> Table:
    """The variance of the noise that each step adds, in float64."""
    if config.betas == "linear":
        return torch.linspace(*LINEAR, STEPS, dtype=torch.float64)
    place = torch.arange(STEPS + 1, dtype=torch.float64) / STEPS
    kept = ((place + COSINE_OFFSET) / (1 + COSINE_OFFSET) * math.pi / 2).cos() ** 2
    return (1 - kept[1:] / kept[:-1]).clamp(max=MOST_BETA)


class Noising:
    """x_t = a_t x_0 + s_t noise, and what is told of it.

    Steps are 0 to 999 and whole but for flow matching, where they are any number up to 1000.
    """

    def __init__(self, config: NoiseConfig) -> None:
        config.check()
        self.config, self.is_flow = config, config.prediction == "flow"
        betas = make_betas(config)
        kept = (1 - betas).cumprod(0)
        before = torch.cat([torch.ones(1, dtype=torch.float64), kept[:-1]])
        # of q(x_{t-1} | x_t, x_0); its variance at the first step is 0, and the second's stands in
        least = betas * (1 - before) / (1 - kept)
        least[0] = least[1]
        self.tables = {
            "a": kept.sqrt(),
            "s": (1 - kept).sqrt(),
            "of_x0": betas * before.sqrt() / (1 - kept),
            "of_noisy": (1 - betas).sqrt() * (1 - before) / (1 - kept),
            "log_least": least.log(),
            "log_greatest": betas.log(),
        }
        self._moved: dict[tuple[str, torch.device, torch.dtype], Table] = {}

    def timesteps(self, places: PerImage) -> Timesteps:
        """The steps at places from 0 to below 1 of all there are.

        >>> Noising(NoiseConfig()).timesteps(torch.tensor([0.0, 0.9999])).tolist()
        [0, 999]
        """
        return places * STEPS if self.is_flow else (places * STEPS).long().clamp(max=STEPS - 1)

    def mix(self, x0: Images, noise: Images, t: Timesteps) -> Images:
        """The noisy images."""
        a, s = self._shares(t, x0)
        return a * x0 + s * noise

    def target(self, x0: Images, noise: Images, t: Timesteps) -> Images:
        """What the model is to tell of them."""
        if self.config.prediction == "noise":
            return noise
        if self.is_flow:
            return noise - x0
        a, s = self._shares(t, x0)
        return a * noise - s * x0

    def image(self, noisy: Images, told: Images, t: Timesteps) -> Images:
        """The x_0 that follows from what is told: what `target` told, undone."""
        a, s = self._shares(t, noisy)
        if self.config.prediction == "noise":
            return (noisy - s * told) / a
        return noisy - s * told if self.is_flow else a * noisy - s * told

    def variance_loss(
        self, x0: Images, noisy: Images, told: Images, share: Images, t: Timesteps
    ) -> PerImage:
        """How badly a step back is told, in bits a number: the variance alone learns from it.

        The divergence of the step from q(x_{t-1} | x_t, x_0), or at the first step how improbable
        the image is in 8 bits.

        Args:
            x0: the images, -1 to 1.
            noisy: what they became.
            told: what the model tells of them; it gets no gradient from here.
            share: where log variances lie between their least, -1, and their greatest, 1.
            t: the steps.
        """
        image = self.image(noisy, told.detach(), t)
        of_x0, of_noisy = self._at("of_x0", t, x0), self._at("of_noisy", t, x0)
        mean, wanted = (of_x0 * x + of_noisy * noisy for x in (image, x0))
        least = self._at("log_least", t, x0)
        greatest = self._at("log_greatest", t, x0)
        log_variance = least + (share + 1) / 2 * (greatest - least)
        apart = _divergence(wanted, least, mean, log_variance).flatten(1).mean(dim=1)
        improbable = -_log_likelihood(x0, mean, log_variance).flatten(1).mean(dim=1)
        return torch.where(t == 0, improbable, apart) / math.log(2)

    def _shares(self, t: Timesteps, like: Images) -> tuple[Tensor, Tensor]:
        if self.is_flow:
            s = (t / STEPS).to(like.dtype)[:, None, None, None]
            return 1 - s, s
        return self._at("a", t, like), self._at("s", t, like)

    def _at(self, name: str, t: Timesteps, like: Images) -> Tensor:
        """Of a table, what belongs to each step; it is brought to a device once."""
        key = (name, like.device, like.dtype)
        if key not in self._moved:
            self._moved[key] = self.tables[name].to(device=like.device, dtype=like.dtype)
        return self._moved[key][t.long()][:, None, None, None]


def _divergence(mean_1: Tensor, log_1: Tensor, mean_2: Tensor, log_2: Tensor) -> Tensor:
    """KL of two normal distributions with these log variances, number by number."""
    spread = (log_1 - log_2).exp() + (mean_1 - mean_2) ** 2 * (-log_2).exp()
    return (log_2 - log_1 - 1 + spread) / 2


def _log_likelihood(x: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """Log of the probability of an 8 bit pixel's bin: Eq. 13 of arXiv:2006.11239."""
    precision = (-log_variance / 2).exp()
    above = torch.special.ndtr((x - mean + PIXEL_BIN) * precision)
    below = torch.special.ndtr((x - mean - PIXEL_BIN) * precision)
    above = above.where(x <= SURE, 1)
    below = below.where(x >= -SURE, 0)
    return (above - below).clamp(min=1e-12).log()
