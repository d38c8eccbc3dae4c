"""Dense prediction: a value, or a score per class, for each position of a grid."""

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import nn

from onescan.checks import check_choice, check_floating, check_positive
from onescan.configs import ModelConfig
from onescan.layers.basic import EPS, GLUConfig, MLPConfig, NormName, build_norm
from onescan.layers.block import init_weights
from onescan.layers.mixers import LightNetMixerConfig, MixerConfig
from onescan.layers.position import PositionConfig, ToeplitzPositionConfig, check_masked_position
from onescan.layers.pyramid import PyramidDecoder
from onescan.layers.stack import apply_blocks, build_blocks
from onescan.layers.tokens import Patchify, Unpatchify, check_sizes, masked_grid, masked_pixels
from onescan.models.pretrained import Pretrained
from onescan.ops.parallel import refuse_group, sequence_group
from onescan.shapes import Grid, GridFeatures, GridKeep, GridOutputs, Grids, Hidden

DecoderName = Literal["pyramid", "linear"]


@dataclass(frozen=True, kw_only=True)
class DensePredictorConfig(ModelConfig):
    """Config of networks that map a grid to a grid, for segmentation or dense regression."""

    image_size: tuple[int, ...] = (224, 224)
    """Default size along each axis: one axis for signals, two for images, three for video and
    volumes. Most models accept any size."""
    channels: int = 3
    """Channels of the input: 3 for color, 1 for grayscale."""
    out_channels: int = 1
    """Channels of the output: one per class, or per predicted value."""
    patch_size: tuple[int, ...] = (16, 16)
    """Size of the patch that becomes one token, along each axis of image_size."""
    width: int = 192
    """Features per token."""
    depth: int = 12
    """Number of blocks."""
    mixer: MixerConfig = field(default_factory=LightNetMixerConfig)
    """Layer that mixes information between tokens."""
    mlp: MLPConfig | None = field(default_factory=GLUConfig)
    """MLP after the mixer, applied to each token; None for mixers that need none."""
    position: PositionConfig | None = field(
        default_factory=lambda: ToeplitzPositionConfig(bidirectional=True)
    )
    """Position encoding after the embedding; None for no encoding. Unlike in classifiers, MD-TPE
    reads both directions by default."""
    norm: NormName = "layer"
    """Norm of every block, except before mixers that normalize their input, and before the
    decoder."""
    norm_eps: float = EPS
    """Epsilon added to the variance in every norm of the blocks."""
    decoder: DecoderName = "pyramid"
    """How tokens become positions: a linear map from each token to its patch ("linear"), or
    convolutions at increasing resolutions, which also read earlier blocks and the input
    ("pyramid", for up to three axes)."""
    drop_path: float = 0.1
    """Stochastic depth: drop rate of the last block; it increases linearly from 0."""
    init_std: float = 0.02
    """Standard deviation of the initial weights of linear layers in the blocks."""

    def check(self) -> None:
        """Raise ValueError if a number is out of range, or fields contradict each other."""
        check_positive(
            channels=self.channels,
            out_channels=self.out_channels,
            width=self.width,
            depth=self.depth,
            norm_eps=self.norm_eps,
            init_std=self.init_std,
        )
        check_sizes(self.image_size, self.patch_size)
        check_choice("decoder", self.decoder, get_args(DecoderName))
        if not 0 <= self.drop_path < 1:
            raise ValueError(f"drop_path is {self.drop_path}, expected 0 or more and less than 1")

    def check_padding(self) -> None:
        """Raise ValueError if the network cannot read grids of mixed sizes in one batch."""
        check_masked_position(self.position)
        self.mixer.check_padding(Grid((1,) * len(self.patch_size)))

    def build(self) -> "DensePredictor":
        """Build the network with new weights from torch's global generator.

        Raises:
            ValueError: If `check` raises it, or the mixer, the norm, the position or the decoder
                rejects its config.
        """
        self.check()
        return DensePredictor(self)

    def example_inputs(self) -> tuple[Grids]:
        """Return one grid of zeros of the default size."""
        return (torch.zeros(1, self.channels, *self.image_size),)


class DensePredictor(Pretrained, nn.Module):
    """Patches -> position encoding -> blocks -> norm -> decoder.

    Modules up to the norm have the names of `ImageClassifier`, whose weights they can load.

    >>> config = DensePredictorConfig(
    ...     image_size=(64,), patch_size=(4,), channels=2, out_channels=3, width=24, depth=2
    ... )
    >>> model = config.build()
    >>> model(torch.zeros(5, 2, 61)).shape  # any size
    torch.Size([5, 3, 61])
    """

    def __init__(self, config: DensePredictorConfig) -> None:
        super().__init__()
        self.config = config
        width, patch_size = config.width, config.patch_size
        self.patchify = Patchify(config.channels, patch_size, width)
        grid = Grid(self.patchify.grid_shape((config.channels, *config.image_size)))
        self.position = None
        if config.position is not None:
            self.position = config.position.build(width=width, grid=grid)
        self.blocks, self.lower_bounds = build_blocks(
            config.depth, width, axes=len(grid.shape), mixer=config.mixer.for_grid(grid),
            mlp=config.mlp, norm=config.norm, norm_eps=config.norm_eps, drop_path=config.drop_path,
        )  # fmt: skip
        self.norm = build_norm(config.norm, width, eps=config.norm_eps)
        self.blocks.apply(lambda module: init_weights(module, std=config.init_std))
        self.decoder: PyramidDecoder | Unpatchify
        if config.decoder == "linear":
            self.decoder = Unpatchify(width, config.out_channels, patch_size)
        else:
            self.decoder = PyramidDecoder(width, config.channels, config.out_channels, patch_size)

    def forward(self, images: Grids, keep: GridKeep | None = None) -> GridOutputs:
        """Predict a value of each output channel at each position.

        Args:
            images: Grids of any size, of shape [B, channels, *sides]. If a side is not a
                multiple of the patch size, it is padded with zeros.
            keep: True for real positions and False for padding, of shape [B, *sides], for grids of
                mixed sizes in one batch; `onescan.inputs.pad_images` returns it. The real positions
                of a grid must form a box that begins at index 0. The outputs equal those of each
                grid alone at its own size. Padding may hold any values, even NaN; its outputs are
                zero.

        Returns:
            Outputs of shape [B, out_channels, *sides].

        Raises:
            ValueError: If the number of channels differs, a side is 0, the model cannot read
                padding (absolute positions, or diffusion in row-major order) or, on a CPU, the real
                positions do not form such a box.
        """
        check_floating(images=images)
        if (group := sequence_group(None)) is not None:
            refuse_group(group, "DensePredictor", "its decoder reads neighboring positions")
        real = None
        if keep is not None:
            self.config.check_padding()
            images, real = masked_pixels(images, keep, self.config.patch_size)
        x, shape = self.patchify(images)
        grid = Grid(shape)
        if self.position is not None:
            x, _ = self.position(x, grid, keep=real)
        read_blocks = self._blocks_read
        x, _, selected = apply_blocks(
            self.blocks, self.lower_bounds, x, grid, keep=real, selected=sorted(set(read_blocks))
        )
        x, size = self.norm(x), tuple(images.shape[2:])
        if isinstance(self.decoder, Unpatchify):
            return masked_grid(self.decoder(x, shape, size), keep)
        by_block = dict(zip(sorted(set(read_blocks)), selected, strict=True))
        features = [_as_grid(y, shape) for y in (x, *(by_block[i] for i in read_blocks))]
        patches = None if real is None else real.unflatten(1, shape)
        y = self.decoder(features, images, patches)
        return masked_grid(y[(..., *map(slice, size))], keep)

    @property
    def _blocks_read(self) -> list[int]:
        """Blocks that the decoder reads besides the last one, evenly spaced, the last one first."""
        if isinstance(self.decoder, Unpatchify):
            return []
        levels, depth = self.decoder.levels, self.config.depth
        return [max(round(depth * (levels - i) / levels) - 1, 0) for i in range(1, levels)]


def _as_grid(x: Hidden, shape: tuple[int, ...]) -> GridFeatures:
    """Return tokens in row-major order as a grid, [B, width, *shape]."""
    return x.mT.unflatten(-1, shape)
