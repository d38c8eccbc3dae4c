"""Denoisers for image generation, and the configs of noise and sampling."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from onescan.checks import can_look_at_values, check_choice, check_floating, check_positive
from onescan.configs import ModelConfig, check_types
from onescan.layers.basic import EPS, GLUConfig, MLPConfig, NormName, build_norm
from onescan.layers.block import (
    Block,
    ConditionedBlock,
    LabelEmbedding,
    Modulation,
    TimestepEmbedding,
    init_weights,
    modulate,
)
from onescan.layers.mixers import LightNetMixerConfig, MixerConfig
from onescan.layers.position import PositionConfig, ToeplitzPositionConfig
from onescan.layers.stack import apply_blocks, build_blocks
from onescan.layers.tokens import Patchify, Unpatchify, check_sizes
from onescan.messages import named_type
from onescan.models.pretrained import Pretrained
from onescan.ops.parallel import is_first_rank
from onescan.shapes import DenoiserOutput, Grid, Grids, Labels, Timesteps

Condition = Literal["tokens", "adaln_zero"]
Prediction = Literal["noise", "v", "flow"]
Betas = Literal["linear", "cosine"]
SamplerName = Literal["ddpm", "ddim", "dpm", "euler"]
STEPS = 1000  # timesteps, from the image (0) to pure noise


@dataclass(frozen=True, kw_only=True)
class DenoiserConfig(ModelConfig):
    """Config of denoisers: LightNet by default; DiT and the ablations by changing fields."""

    image_size: tuple[int, ...] = (32, 32)
    """Default size along each axis of the image, or of its latents, which are 8 times smaller: one
    axis for signals, two for images, three for video and volumes. Most models accept any size."""
    channels: int = 4
    """Channels of the image or latents: 4 for latents, 3 for color, 1 for grayscale."""
    patch_size: tuple[int, ...] = (2, 2)
    """Size of the patch that becomes one token, along each axis of image_size."""
    num_classes: int = 1000
    """Number of classes; 0 for an unconditional model."""
    width: int = 384
    """Features per token."""
    depth: int = 18
    """Number of blocks."""
    mixer: MixerConfig = field(default_factory=LightNetMixerConfig)
    """Layer that mixes information between tokens."""
    mlp: MLPConfig | None = field(default_factory=lambda: GLUConfig(multiple_of=128))
    """MLP after the mixer, applied to each token; None for mixers that need none."""
    position: PositionConfig | None = field(default_factory=ToeplitzPositionConfig)
    """Position encoding after the embedding; None for no encoding."""
    norm: NormName = "layer"
    """Norm of every block, except before mixers that normalize their input, and before the head."""
    mlp_norm_eps: float = EPS
    """Epsilon added to the variance in the norms before MLPs; 1e-5 in diffusers' DiT."""
    inclusive_frequencies: bool = False
    """The last frequency of the timestep embedding is exactly 1/10000, as in diffusers' DiT; with
    False it is 10000^(-127/128), as in the original."""
    condition: Condition = "tokens"
    """How to condition on timestep and class: "tokens" adds them as tokens before the patches;
    "adaln_zero" modulates every norm, as in DiT."""
    learn_sigma: bool = True
    """Also predict the variance of each step, which doubles the number of output channels."""
    label_dropout: float = 0.1
    """Probability of dropping the class in training, for classifier-free guidance."""
    init_std: float = 0.02
    """Standard deviation of the initial weights of linear layers. Narrow models learn faster with a
    larger value."""

    def check(self) -> None:
        """Raise ValueError if a number is out of range, or fields contradict each other."""
        check_positive(
            channels=self.channels,
            width=self.width,
            depth=self.depth,
            mlp_norm_eps=self.mlp_norm_eps,
            init_std=self.init_std,
        )
        check_sizes(self.image_size, self.patch_size)
        check_choice("condition", self.condition, get_args(Condition))
        if self.num_classes < 0:
            raise ValueError(f"num_classes is {self.num_classes}, expected 0 or more")

    def build(self) -> "Denoiser":
        """Build the network with new weights from torch's global generator.

        Raises:
            ValueError: If `check` raises it, or the mixer, the norm or the position rejects its
                config.
        """
        self.check()
        return Denoiser(self)

    def example_inputs(self) -> tuple[Grids, Timesteps, Labels | None]:
        """Return an image of zeros of the default size, timestep 0 and, if conditional, class 0."""
        image = torch.zeros(1, self.channels, *self.image_size)
        label = torch.zeros(1, dtype=torch.long) if self.num_classes else None
        return image, torch.zeros(1), label


class Denoiser(Pretrained, nn.Module):
    """Patches -> position encoding -> blocks -> patches, given a timestep and a class.

    The condition is added as two tokens before the patches, which matches LightNet's published
    sizes (arXiv:2405.21022, Table 14), or modulates every norm, as in DiT (arXiv:2212.09748).

    >>> model = DenoiserConfig(width=48, depth=2, num_classes=10, learn_sigma=False).build()
    >>> noisy = torch.randn(2, 4, 32, 15)  # any size
    >>> model(noisy, torch.tensor([10, 999]), torch.tensor([3, 7])).shape
    torch.Size([2, 4, 32, 15])
    """

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.patchify = Patchify(config.channels, config.patch_size, width)
        shape = self.patchify.grid_shape((config.channels, *config.image_size))
        self.time = TimestepEmbedding(width, inclusive=config.inclusive_frequencies)
        self.label = None
        if config.num_classes:
            self.label = LabelEmbedding(config.num_classes, width, dropout=config.label_dropout)
        self.position = None
        grid = Grid(shape, prefix=self.prefix)
        if config.position is not None:
            self.position = config.position.build(width=width, grid=grid)
        modulates_norms = config.condition == "adaln_zero"
        kind: type[Block] = ConditionedBlock if modulates_norms else Block
        self.blocks, self.lower_bounds = build_blocks(
            config.depth, width, kind=kind, axes=len(shape), mixer=config.mixer.for_grid(grid),
            mlp=config.mlp, norm=config.norm, mlp_norm_eps=config.mlp_norm_eps,
        )  # fmt: skip
        self.norm = build_norm(config.norm, width, affine=not modulates_norms)
        self.modulation = Modulation(width, 2) if modulates_norms else None
        self.unpatchify = Unpatchify(width, self.out_channels, config.patch_size)
        for part in (self.time, self.label, self.blocks):
            if part is not None:
                part.apply(lambda module: init_weights(module, std=config.init_std))
        for module in self.modules():
            if isinstance(module, Modulation | Unpatchify):
                module.init_weights()

    @property
    def prefix(self) -> int:
        """Tokens before the patches."""
        return 1 + (self.label is not None) if self.config.condition == "tokens" else 0

    @property
    def out_channels(self) -> int:
        """Number of output channels: the image's, or twice as many with `learn_sigma`."""
        return self.config.channels * (2 if self.config.learn_sigma else 1)

    def forward(
        self, noisy: Grids, timesteps: Timesteps, labels: Labels | None = None
    ) -> DenoiserOutput:
        """Predict the target that the model was trained on; see `NoiseConfig.prediction`.

        Args:
            noisy: Noisy images of any size. If `patch_size` does not divide a side, zeros complete
                its last patch.
            timesteps: Noise level of each image, from 0 (no noise) to 1000; may be fractional.
            labels: Class of each image, or `num_classes` for no class. ``None`` means no class for
                all images.

        Returns:
            A tensor of the images' shape, or with twice the channels with `learn_sigma`. The second
            half is the position of each variance on a logarithmic scale, from -1 at its lower bound
            to 1 at its upper bound (arXiv:2102.09672, Eq. 15).

        Raises:
            ValueError: If the number of channels differs, a side is 0, the number of timesteps or
                labels differs from that of images, or one is out of range.
        """
        self._check(noisy, timesteps, labels)
        with self.patchify.known_lengths(noisy, prefix=self.prefix):
            return self._predict(noisy, timesteps, labels)

    def _predict(self, noisy: Grids, timesteps: Timesteps, labels: Labels | None) -> DenoiserOutput:
        """Predict the target from checked arguments."""
        x, shape = self.patchify(noisy)  # B T D
        conditions = [self.time(timesteps, x.dtype)]
        if self.label is not None:
            if labels is None:
                labels = torch.full_like(timesteps, self.config.num_classes, dtype=torch.long)
            conditions.append(self.label(labels))
        grid = Grid(shape, prefix=self.prefix if is_first_rank() else 0)
        condition = None
        if self.modulation is None:
            tokens = torch.stack(conditions, dim=1)
            tokens = tokens if is_first_rank() else tokens[:, :0]
            x = torch.cat([tokens, x], dim=1)  # B 2+T D
        else:
            condition = sum(conditions[1:], start=conditions[0])  # B D
        if self.position is not None:
            x, _ = self.position(x, grid)
        x = apply_blocks(self.blocks, self.lower_bounds, x, grid, condition=condition).x
        x = self.norm(x[:, grid.prefix :])
        if self.modulation is not None:
            x = modulate(x, *self.modulation(condition))
        return self.unpatchify(x, shape, tuple(noisy.shape[2:]))

    def _check(self, noisy: Tensor, timesteps: Tensor, labels: Tensor | None) -> None:
        check_floating(noisy=noisy)
        for name, value in (("timesteps", timesteps), ("labels", labels)):
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise ValueError(f"{name} is {named_type(value)}, expected a tensor [B]")
            if value.shape != noisy.shape[:1]:
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}, expected ({len(noisy)},), one for "
                    "each image"
                )
        if labels is not None and self.label is None:
            raise ValueError("labels were given, but num_classes is 0, expected None")
        if timesteps.numel() and can_look_at_values(timesteps):
            low, high = (float(bound) for bound in torch.aminmax(timesteps))
            if not 0 <= low <= high <= STEPS:
                raise ValueError(f"timesteps range from {low:g} to {high:g}, expected 0 to {STEPS}")


@dataclass(frozen=True, kw_only=True)
class NoiseConfig:
    """How noise is added to images, x_t = a_t x_0 + s_t noise, and what the model predicts.

    Sources: DDPM, arXiv:2006.11239; v, arXiv:2202.00512; flow matching, arXiv:2210.02747.
    """

    prediction: Prediction = "noise"
    """Prediction target: noise; v = a noise - s x_0; or flow, the velocity noise - x_0 along the
    straight line between image and noise, with a = 1 - t / 1000 and s = t / 1000, without betas."""
    betas: Betas = "linear"
    """Schedule of the variance of the noise added at each of 1000 steps: linear, from 0.0001 to
    0.02 as in DDPM; or cosine, with which a decreases as a cosine (arXiv:2102.09672, Eq. 17)."""

    def check(self) -> None:
        """Raise ValueError if a name is unknown, or `betas` is set for flow matching."""
        check_choice("noise.prediction", self.prediction, get_args(Prediction))
        check_choice("noise.betas", self.betas, get_args(Betas))
        if self.prediction == "flow" and self.betas != "linear":
            raise ValueError(
                f"noise.betas is {self.betas!r}, but noise.prediction is 'flow', which does not "
                "use betas"
            )


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """How to sample images from a denoiser."""

    sampler: SamplerName | None = None
    """ddpm, which adds noise at every step; ddim; dpm, which is DPM-Solver++; or euler, for flow
    matching. None is euler for flow matching and ddim otherwise."""
    steps: int = 50
    """Number of steps; each calls the model once, or twice with guidance."""
    guidance_scale: float = 1.0
    """Scale of classifier-free guidance, which extrapolates from the unconditional prediction to
    the conditional one. 1 uses the conditional prediction, without guidance."""

    def check(self, noise: NoiseConfig) -> None:
        """Raise ValueError if a field is invalid, or the sampler does not fit the noise."""
        check_types(self)
        check_positive(steps=self.steps)
        if self.steps > STEPS:
            raise ValueError(f"steps is {self.steps}, expected 1 to {STEPS}")
        if not 0 <= self.guidance_scale < float("inf"):
            raise ValueError(f"guidance_scale is {self.guidance_scale}, expected 0 or more")
        sampler = self.resolved(noise)
        check_choice("sampler", sampler, get_args(SamplerName))
        if (sampler == "euler") != (noise.prediction == "flow"):
            expected = "euler" if noise.prediction == "flow" else "ddpm, ddim or dpm"
            raise ValueError(
                f"sampler is {self.sampler!r}, but the model was trained with "
                f"noise.prediction={noise.prediction!r}, expected {expected}"
            )
        if sampler == "ddim" and STEPS % self.steps:
            divisors = [number for number in range(1, STEPS + 1) if STEPS % number == 0]
            below = max(number for number in divisors if number < self.steps)
            above = min(number for number in divisors if number > self.steps)
            raise ValueError(
                f"steps is {self.steps}, but ddim divides {STEPS} timesteps into equal steps, "
                f"expected {below} or {above}, or another sampler"
            )

    def resolved(self, noise: NoiseConfig) -> SamplerName:
        """Return the sampler's name, with the default filled in."""
        return self.sampler or ("euler" if noise.prediction == "flow" else "ddim")


def max_pixel(mean: Sequence[float], std: Sequence[float]) -> float:
    """Return the largest absolute value of standardized pixels.

    Args:
        mean: Mean per channel, which is subtracted from pixels between 0 and 1.
        std: Standard deviation per channel, by which they are divided.

    >>> max_pixel(mean=(0.5,), std=(0.5,))
    1.0
    """
    channels = zip(mean, std, strict=True)
    return max(max(abs(center), abs(1 - center)) / scale for center, scale in channels)
