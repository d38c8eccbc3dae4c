"""Image classifiers."""

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import nn

from onescan.checks import check_choice, check_floating, check_positive
from onescan.configs import ModelConfig
from onescan.layers.basic import GLUConfig, MLPConfig, NormName, build_norm
from onescan.layers.block import Block, init_weights, lower_bound_of_each
from onescan.layers.mixers import LightNetMixerConfig, MixerConfig, build_lower_bounds
from onescan.layers.position import PositionConfig, ToeplitzPositionConfig
from onescan.layers.tokens import AttentionPool, Patchify, check_sizes, max_pool, mean_pool
from onescan.shapes import Grid, Grids, Hidden, Logits, Pooled

Pool = Literal["class_token", "mean", "mean_with_class_token", "max", "attention"]
WITH_CLASS_TOKEN = ("class_token", "mean_with_class_token")


@dataclass(frozen=True, kw_only=True)
class ImageClassifierConfig(ModelConfig):
    """Config of image classifiers: LightNet by default; DeiT and ablations by changing fields."""

    image_size: tuple[int, ...] = (224, 224)
    """Default size along each axis: one axis for signals, two for images, three for video and
    volumes. Most models accept any size that patch_size divides."""
    channels: int = 3
    """Channels of the image: 3 for color, 1 for grayscale."""
    patch_size: tuple[int, ...] = (16, 16)
    """Size of the patch that becomes one token, along each axis of image_size."""
    num_classes: int = 1000
    """Number of classes."""
    width: int = 192
    """Features per token."""
    depth: int = 12
    """Number of blocks."""
    mixer: MixerConfig = field(default_factory=LightNetMixerConfig)
    """Layer that mixes information between tokens."""
    mlp: MLPConfig | None = field(default_factory=GLUConfig)
    """MLP after the mixer, applied to each token; None for mixers that need none."""
    position: PositionConfig | None = field(default_factory=ToeplitzPositionConfig)
    """Position encoding after the embedding; None for no encoding."""
    norm: NormName = "layer"
    """Norm of every block, except before mixers that normalize their input, and before the head."""
    pool: Pool = "class_token"
    """Input of the head: a learned extra token; the mean or the maximum over patches; their mean
    weighted by learned attention; or the mean of all tokens, the extra one included."""
    distillation_token: bool = False
    """Add a second learned token and a second head that learns from a teacher."""
    drop_path: float = 0.1
    """Stochastic depth: drop rate of the last block; it increases linearly from 0."""
    init_std: float = 0.02
    """Standard deviation of the initial weights of linear layers; 0.02 in DeiT. Narrow models learn
    faster with a larger value."""

    def check(self) -> None:
        """Raise ValueError if a number is out of range, or fields contradict each other."""
        check_positive(
            channels=self.channels,
            num_classes=self.num_classes,
            width=self.width,
            depth=self.depth,
            init_std=self.init_std,
        )
        check_sizes(self.image_size, self.patch_size)
        if not 0 <= self.drop_path < 1:
            raise ValueError(f"drop_path is {self.drop_path}, expected 0 or more and less than 1")
        check_choice("pool", self.pool, get_args(Pool))
        # Directions may alternate between blocks.
        mixers = (self.mixer.for_layer(i) for i in range(min(self.depth, 2)))
        if self.pool == "class_token" and not any(mixer.prefix_reads_grid for mixer in mixers):
            raise ValueError(
                "pool is 'class_token', but with this mixer the class token reads no patch; "
                "expected pool='mean'"
            )
        if self.distillation_token and self.pool not in WITH_CLASS_TOKEN:
            raise ValueError(
                f"distillation_token is True with pool={self.pool!r}, which has no class token; "
                "expected pool='class_token' or 'mean_with_class_token'"
            )

    def build(self) -> "ImageClassifier":
        """Build the network with new weights from torch's global generator.

        Raises:
            ValueError: If `check` raises it, patches do not divide the image, or the mixer, the
                norm or the position rejects its config.
        """
        self.check()
        return ImageClassifier(self)

    def example_inputs(self) -> tuple[Grids]:
        """Return one black image of the default size."""
        return (torch.zeros(1, self.channels, *self.image_size),)


class ImageClassifier(nn.Module):
    """Patches -> position encoding -> blocks -> pool -> head, as in LightNet, Fig. 3.

    >>> model = ImageClassifierConfig(width=48, depth=2, num_classes=10).build()
    >>> model(torch.zeros(2, 3, 224, 160)).shape  # any size that 16 divides
    torch.Size([2, 10])

    `image_size` and `patch_size` set the number of axes, here frames, height and width:

    >>> sizes = {"image_size": (8, 32, 32), "patch_size": (2, 8, 8)}
    >>> video = ImageClassifierConfig(**sizes, width=48, depth=2, num_classes=10).build()
    >>> video(torch.zeros(2, 3, 8, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, config: ImageClassifierConfig) -> None:
        super().__init__()
        self.config = config
        width, depth = config.width, config.depth
        self.patchify = Patchify(config.channels, config.patch_size, width)
        shape = self.patchify.grid_shape((config.channels, *config.image_size))
        self.class_token = _token(width) if config.pool in WITH_CLASS_TOKEN else None
        self.position = None
        if config.position is not None:
            grid = Grid(shape, prefix=self.prefix)
            self.position = config.position.build(width=width, grid=grid)
        self.blocks = nn.ModuleList(
            Block(
                width,
                axes=len(shape),
                mixer=config.mixer.for_layer(i),
                mlp=config.mlp,
                norm=config.norm,
                drop_path=config.drop_path * i / max(depth - 1, 1),
            )
            for i in range(depth)
        )
        self.lower_bounds = build_lower_bounds(config.mixer, depth=depth, width=width)
        self.norm = build_norm(config.norm, width)
        self.attention_pool = AttentionPool(width) if config.pool == "attention" else None
        self.head = nn.Linear(width, config.num_classes)
        for part in (self.blocks, self.head):
            part.apply(self._init_weights)
        self.distillation_token = self.distillation_head = None
        if config.distillation_token:
            self.distillation_token = _token(width)
            self.distillation_head = nn.Linear(width, config.num_classes)
            self._init_weights(self.distillation_head)

    @property
    def prefix(self) -> int:
        """Number of tokens before the patches."""
        return (self.config.pool in WITH_CLASS_TOKEN) + self.config.distillation_token

    def forward(self, images: Grids) -> Logits | tuple[Logits, Logits]:
        """Compute class logits; see `forward_head` for the return value.

        Args:
            images: Grids of any size that `patch_size` divides.

        Raises:
            ValueError: If the number of channels differs, or `patch_size` does not divide a side.
        """
        check_floating(images=images)
        return self.forward_head(self.forward_features(images))

    def forward_features(self, images: Grids) -> Hidden:
        """Return the normalized tokens of the last block: class, distillation, then patches."""
        x, grid = self.embed(images)
        embedding = x
        bounds = lower_bound_of_each(self.blocks, self.lower_bounds)
        for block, bound in zip(self.blocks, bounds, strict=True):
            x, _ = block(x, grid, embedding=embedding, lower_bound=bound)
        return self.norm(x)

    def embed(self, images: Grids) -> tuple[Hidden, Grid]:
        """Return the tokens before the first block, and their grid."""
        x, shape = self.patchify(images)  # B T D
        grid = Grid(shape, prefix=self.prefix)
        for token in (self.distillation_token, self.class_token):
            if token is not None:
                x = torch.cat([token.expand(x.shape[0], 1, -1), x], dim=1)  # B 1+T D
        if self.position is not None:
            x, _ = self.position(x, grid)
        return x, grid

    def forward_head(self, tokens: Hidden) -> Logits | tuple[Logits, Logits]:
        """Compute class logits from the tokens of `forward_features`.

        With a distillation token, return the logits of both heads in training, and their mean
        otherwise, as in DeiT's code. DeiT's paper, arXiv:2012.12877, Sec. 4, adds the softmax
        outputs instead.
        """
        scores = self.head(self.pooled(tokens))
        if self.distillation_head is None:
            return scores
        distilled = self.distillation_head(tokens[:, 1])
        return (scores, distilled) if self.training else (scores + distilled) / 2

    def pooled(self, tokens: Hidden) -> Pooled:
        """Pool tokens into the input of the class head."""
        if self.config.pool == "class_token":
            return tokens[:, 0]
        if self.config.distillation_token:  # only the distillation head reads this token
            tokens = torch.cat([tokens[:, :1], tokens[:, 2:]], dim=1)
        if self.attention_pool is not None:
            return self.attention_pool(tokens)
        return max_pool(tokens) if self.config.pool == "max" else mean_pool(tokens)

    def _init_weights(self, module: nn.Module) -> None:
        init_weights(module, std=self.config.init_std)


def _token(width: int) -> nn.Parameter:
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(width), std=0.02))
