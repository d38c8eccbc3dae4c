"""How images turn into noise, what a denoiser tells of it, and how it is turned back: configs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from onescan.checks import check_choice, check_positive

Prediction = Literal["noise", "v", "flow"]
Betas = Literal["linear", "cosine"]
SamplerName = Literal["ddpm", "ddim", "dpm", "euler"]
STEPS = 1000  # from the image, 0, to pure noise


def pixel_reach(mean: Sequence[float], std: Sequence[float]) -> float:
    """How far from 0 pixels reach that had a mean subtracted and were divided by a spread.

    >>> pixel_reach(mean=(0.5,), std=(0.5,))
    1.0
    """
    ends = zip(mean, std, strict=True)
    return max(max(abs(middle), abs(1 - middle)) / spread for middle, spread in ends)


@dataclass(frozen=True, kw_only=True)
class NoiseConfig:
    """What is mixed with an image, x_t = a_t x_0 + s_t noise, and what is told of the mixture.

    Sources: DDPM, arXiv:2006.11239; v, arXiv:2202.00512; flow matching, arXiv:2210.02747.
    """

    prediction: Prediction = "noise"
    """noise; v = a noise - s x_0; or flow: the velocity noise - x_0 on the straight line between
    both, a = 1 - t / 1000 and s = t / 1000, which has no betas."""
    betas: Betas = "linear"
    """Variance of the noise added at each of 1000 steps: DDPM's 0.0001 to 0.02, or such that a
    falls as a cosine (arXiv:2102.09672, Eq. 17)."""

    def check(self) -> None:
        """Raise ValueError for what there is not."""
        check_choice("noise.prediction", self.prediction, get_args(Prediction))
        check_choice("noise.betas", self.betas, get_args(Betas))
        if self.prediction == "flow" and self.betas != "linear":
            raise ValueError(
                f"noise.betas is {self.betas!r}, but noise.prediction is 'flow', which has none"
            )


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """How noise is turned into images."""

    sampler: SamplerName | None = None
    """ddpm, which adds noise at every step; ddim; dpm, DPM-Solver++; or euler, of flow matching.
    None is ddim, and euler for flow matching."""
    steps: int = 50
    """Calls of the model for each image, or pairs of calls with guidance."""
    guidance_scale: float = 1.0
    """How far to go from what the model tells of any class toward what it tells of the one asked
    for (classifier-free guidance): 1 is as far as it tells, without asking for any class."""

    def check(self, noise: NoiseConfig) -> None:
        """Raise ValueError for numbers out of range, or a sampler of another kind of noise."""
        check_positive(steps=self.steps)
        if self.steps > STEPS:
            raise ValueError(f"steps is {self.steps}, expected 1 to {STEPS}")
        if not 0 <= self.guidance_scale < float("inf"):
            raise ValueError(f"guidance_scale is {self.guidance_scale}, expected 0 or more")
        check_choice("sampler", self.chosen(noise), get_args(SamplerName))
        if (self.chosen(noise) == "euler") != (noise.prediction == "flow"):
            expected = "euler" if noise.prediction == "flow" else "ddpm, ddim or dpm"
            raise ValueError(
                f"sampler is {self.sampler!r}, but the model was trained with "
                f"noise.prediction={noise.prediction!r}, expected {expected}"
            )

        if self.chosen(noise) == "ddim" and STEPS % self.steps:
            fitting = [number for number in range(1, STEPS + 1) if STEPS % number == 0]
            below = max(number for number in fitting if number < self.steps)
            above = min(number for number in fitting if number > self.steps)
            raise ValueError(
                f"steps is {self.steps}, but ddim goes {STEPS} timesteps in equal strides, "
                f"expected {below} or {above}, or another sampler"
            )

    def chosen(self, noise: NoiseConfig) -> SamplerName:
        """The sampler that is meant."""
        return self.sampler or ("euler" if noise.prediction == "flow" else "ddim")
