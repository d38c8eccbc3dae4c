"""A noisy image in, and what it is to be freed of out."""

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from onescan.checks import can_look_at_values, check_choice, check_floating, check_positive
from onescan.configs import ModelConfig
from onescan.layers.basic import GLUConfig, MLPConfig, NormName, build_norm
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
from onescan.layers.tokens import Patchify, Unpatchify
from onescan.models.noise import STEPS
from onescan.shapes import Grid, Images, Labels, Timesteps, Told

Condition = Literal["tokens", "adaln_zero"]


@dataclass(frozen=True, kw_only=True)
class DenoiserConfig(ModelConfig):
    """LightNet's denoiser by default; DiT's and every ablation by changing fields."""

    image_size: tuple[int, int] = (32, 32)
    """Usual height and width of what is denoised: an image's, or a latent's, which is 8 times
    smaller than its image. A model takes any size that its patches divide."""
    channels: int = 4
    """Of what is denoised: 4 for latents, 3 for colour, 1 for grey."""
    patch_size: tuple[int, int] = (2, 2)
    """Height and width of the square that becomes one token."""
    num_classes: int = 1000
    """Classes that can be asked for; 0 for a model that is told none."""
    width: int = 384
    """Of a token."""
    depth: int = 18
    """Blocks."""
    mixer: MixerConfig = field(default_factory=LightNetMixerConfig)
    """How tokens exchange what they know."""
    mlp: MLPConfig | None = field(default_factory=lambda: GLUConfig(multiple_of=128))
    """What each token does on its own, after the mixer; None where the mixer sees to that too."""
    position: PositionConfig | None = field(default_factory=ToeplitzPositionConfig)
    """How tokens learn where they are, once, after the embedding; None leaves it out."""
    norm: NormName = "layer"
    """Of every block, but before mixers that normalize what they read, and before the head."""
    condition: Condition = "tokens"
    """How timestep and class are told: as two tokens before the patches, or in every norm."""
    learn_sigma: bool = True
    """Whether the variance of a step is told too, by as many channels again."""
    label_dropout: float = 0.1
    """Chance that a training image's class is withheld, for guidance."""
    init_std: float = 0.02
    """Spread of the first weights of linear maps; narrow models learn faster with more."""

    def check(self) -> None:
        """Raise ValueError for sizes that no network has, or fields that do not go together."""
        check_positive(
            channels=self.channels,
            width=self.width,
            depth=self.depth,
            init_std=self.init_std,
            **{f"patch_size[{i}]": size for i, size in enumerate(self.patch_size)},
        )
        check_choice("condition", self.condition, get_args(Condition))
        if self.num_classes < 0:
            raise ValueError(f"num_classes is {self.num_classes}, expected 0 or more")

    def build(self) -> "Denoiser":
        """Build the network, with fresh weights from torch's global generator.

        Raises:
            ValueError: what `check` refuses, patches that do not divide the image, or what the
                mixer, the norms and the position refuse.
        """
        self.check()
        return Denoiser(self)

    def example_inputs(self) -> tuple[Images, Timesteps, Labels | None]:
        """One empty image of the usual size, at step 0, of the first class if there are any."""
        image = torch.zeros(1, self.channels, *self.image_size)
        label = torch.zeros(1, dtype=torch.long) if self.num_classes else None
        return image, torch.zeros(1), label


class Denoiser(nn.Module):
    """Patches -> position -> blocks -> patches, told a timestep and a class.

    The condition enters as two tokens before the patches, which is what LightNet's printed sizes
    demand (arXiv:2405.21022, Table 14), or in every norm, as in DiT (arXiv:2212.09748).

    >>> model = DenoiserConfig(width=48, depth=2, num_classes=10, learn_sigma=False).build()
    >>> noisy = torch.randn(2, 4, 32, 16)  # any size that 2 divides
    >>> model(noisy, torch.tensor([10, 999]), torch.tensor([3, 7])).shape
    torch.Size([2, 4, 32, 16])
    """

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.patchify = Patchify(config.channels, config.patch_size, width)
        shape = self.patchify.grid_shape((config.channels, *config.image_size))
        self.time = TimestepEmbedding(width)
        self.label = None
        if config.num_classes:
            self.label = LabelEmbedding(config.num_classes, width, dropout=config.label_dropout)
        self.position = None
        if config.position is not None:
            grid = Grid(shape, prefix=self.prefix)
            self.position = config.position.build(width=width, grid=grid)
        kind = Block if config.condition == "tokens" else ConditionedBlock
        self.blocks = nn.ModuleList(
            kind(
                width,
                axes=len(shape),
                mixer=config.mixer.for_layer(i),
                mlp=config.mlp,
                norm=config.norm,
            )
            for i in range(config.depth)
        )
        in_norms = config.condition == "adaln_zero"
        self.norm = build_norm(config.norm, width, affine=not in_norms)
        self.modulation = Modulation(width, 2) if in_norms else None
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
        """Those of the image, and with `learn_sigma` as many again."""
        return self.config.channels * (2 if self.config.learn_sigma else 1)

    def forward(self, noisy: Images, timesteps: Timesteps, labels: Labels | None = None) -> Told:
        """What the model makes of noisy images: [B, channels, height, width], or twice as many.

        With `learn_sigma` the second half of the channels tells where each variance lies between
        its least, -1, and its greatest, 1, on a logarithmic scale (arXiv:2102.09672, Eq. 15).

        Args:
            noisy: images of any size that patches divide.
            timesteps: how far each has become noise, from 0, not at all, to 1000; not only whole.
            labels: what each shall show: a class, or `num_classes` for none; None for none in all.

        Raises:
            ValueError: another number of channels, or a side that patches do not divide; fewer or
                more timesteps or labels than images; labels that there are not.
        """
        self._check(noisy, timesteps, labels)
        x, shape = self.patchify(noisy)  # B T D
        told = [self.time(timesteps, x.dtype)]
        if self.label is not None:
            if labels is None:
                labels = torch.full_like(timesteps, self.config.num_classes, dtype=torch.long)
            told.append(self.label(labels))
        grid = Grid(shape, prefix=self.prefix)
        beside = {}
        if self.modulation is None:
            x = torch.cat([torch.stack(told, dim=1), x], dim=1)  # B 2+T D
        else:
            beside["condition"] = condition = sum(told[1:], start=told[0])  # B D
        if self.position is not None:
            x, _ = self.position(x, grid)
        embedding = x
        for block in self.blocks:
            x, _ = block(x, grid, embedding=embedding, **beside)
        x = self.norm(x[:, grid.prefix :])
        if self.modulation is not None:
            x = modulate(x, *self.modulation(condition))
        return self.unpatchify(x, shape)

    def _check(self, noisy: Tensor, timesteps: Tensor, labels: Tensor | None) -> None:
        check_floating(noisy=noisy)
        for name, given in (("timesteps", timesteps), ("labels", labels)):
            if given is not None and given.shape != noisy.shape[:1]:
                raise ValueError(
                    f"{name} has shape {tuple(given.shape)}, expected ({len(noisy)},), one for "
                    "each image"
                )
        if labels is not None and self.label is None:
            raise ValueError("labels are given, but num_classes is 0, expected None")
        if timesteps.numel() and can_look_at_values(timesteps):
            low, high = (float(bound) for bound in torch.aminmax(timesteps))
            if not 0 <= low <= high <= STEPS:
                raise ValueError(f"timesteps reach from {low:g} to {high:g}, expected 0 to {STEPS}")
