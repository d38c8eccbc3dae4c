"""Decoder from the tokens of several blocks to a grid at full resolution, in small steps."""

from collections.abc import Sequence
from itertools import accumulate, pairwise, zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from onescan.layers.tokens import masked_grid, whole_patches
from onescan.shapes import GridFeatures, GridKeep, GridOutputs, Grids

Factors = tuple[int, ...]  # per axis

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
MIN_CHANNELS = 16  # at full resolution
KERNEL_SIZE = 3


def upsampling_steps(patch_size: Factors) -> tuple[Factors, ...]:
    """Return the factors of each upsampling step, whose product is the patch size.

    Each step multiplies the sides by prime factors; the last steps change all axes. For patches of
    a single position, there is one step, with factors of 1.

    >>> upsampling_steps((16, 4)), upsampling_steps((10,)), upsampling_steps((1, 1))
    (((2, 1), (2, 1), (2, 2), (2, 2)), ((5,), (2,)), ((1, 1),))
    """
    reverse = zip_longest(*map(_prime_factors, patch_size), fillvalue=1)
    return tuple(reverse)[::-1] or ((1,) * len(patch_size),)


def _prime_factors(number: int) -> list[int]:
    """Return the prime factors in increasing order."""
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors


class PyramidDecoder(nn.Module):
    """Upsample patches step by step, with skip connections from earlier blocks and the input.

    Each step multiplies the sides by small factors and halves the channels. Its result is
    concatenated with the patches of an earlier block at the same resolution, or with the input in
    the last step, and passes through two convolutions. Channels are normalized at each position,
    so that outputs do not depend on padding.

    Source: UNETR, arXiv:2103.10504, Fig. 2, for any patch size, with normalized channels instead of
    instance norm, and one transposed convolution per skip connection.

    Args:
        width: Channels of the patches.
        channels: Channels of the input.
        out_channels: Channels of the output.
        patch_size: Size of a patch along each axis, up to three.

    Raises:
        ValueError: If there are more than three axes.
    """

    def __init__(
        self, width: int, channels: int, out_channels: int, patch_size: tuple[int, ...]
    ) -> None:
        super().__init__()
        axes = len(patch_size)
        if axes not in CONVOLUTIONS:
            raise ValueError(
                f"decoder is 'pyramid' with {axes} axes, but convolutions support at most "
                f"{max(CONVOLUTIONS)}; expected decoder='linear'"
            )
        self.patch_size = patch_size
        self.steps = upsampling_steps(patch_size)
        min_channels = min(width, MIN_CHANNELS)
        widths = [max(width >> step, min_channels) for step in range(len(self.steps) + 1)]
        self.upsample = nn.ModuleList(
            _upsampling(a, b, step)
            for (a, b), step in zip(pairwise(widths), self.steps, strict=True)
        )
        patch_sizes = accumulate(self.steps, _product)  # size of a patch after each step
        self.skips = nn.ModuleList(
            _upsampling(width, channels, factors)
            for channels, factors in zip(widths[1:-1], patch_sizes, strict=False)
        )
        self.stem = CONVOLUTIONS[axes](channels, widths[-1], KERNEL_SIZE, padding="same")
        self.merge = nn.ModuleList(ConvolutionBlock(axes, 2 * out, out) for out in widths[1:])
        self.head = CONVOLUTIONS[axes](widths[-1], out_channels, 1)

    @property
    def levels(self) -> int:
        """Number of blocks that are read: the last one, and one for each step but the last."""
        return len(self.steps)

    def forward(
        self, features: Sequence[GridFeatures], images: Grids, keep: GridKeep | None
    ) -> GridOutputs:
        """Return a grid of whole patches, [B, out_channels, *sides].

        Args:
            features: Patches after `levels` blocks as grids, [B, width, *grid]; the last one first.
            images: The input, which is padded with zeros to whole patches.
            keep: True for real patches, [B, *grid]; None if all are.
        """
        x, *earlier = features
        stem = self.stem(whole_patches(images, self.patch_size))
        skips = [skip(y) for skip, y in zip(self.skips, earlier, strict=True)]
        levels = zip(self.steps, self.upsample, [*skips, stem], self.merge, strict=True)
        for factors, upsample, skip, merge in levels:
            keep = None if keep is None else repeated(keep, factors)
            x = merge(torch.cat([upsample(x), skip], dim=1), keep)
        return self.head(x)


class ConvolutionBlock(nn.Module):
    """Two convolutions with normalized channels, and a linear skip connection.

    Args:
        axes: Number of axes of the grid.
        channels: Channels of the input.
        out_channels: Channels of the output.
    """

    def __init__(self, axes: int, channels: int, out_channels: int) -> None:
        super().__init__()
        convolution = CONVOLUTIONS[axes]
        self.first = convolution(channels, out_channels, KERNEL_SIZE, padding="same")
        self.second = convolution(out_channels, out_channels, KERNEL_SIZE, padding="same")
        self.first_norm, self.second_norm = (ChannelNorm(out_channels) for _ in range(2))
        self.around = convolution(channels, out_channels, 1)

    def forward(self, x: Grids, keep: GridKeep | None) -> GridOutputs:
        """Return zeros where `keep`, [B, *sides], is False, and do not read these positions."""
        x = masked_grid(x, keep)
        y = masked_grid(F.gelu(self.first_norm(self.first(x))), keep)
        y = self.second_norm(self.second(y))
        return masked_grid(F.gelu(y + self.around(x)), keep)


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of each position of a grid, [B, channels, *sides]."""

    def forward(self, x: Grids) -> Grids:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


def repeated(keep: GridKeep, factors: Factors) -> GridKeep:
    """Repeat each position along each axis.

    >>> repeated(torch.tensor([[True, False]]), (2,)).tolist()
    [[True, True, False, False]]
    """
    for axis, factor in enumerate(factors, start=1):
        keep = keep.repeat_interleave(factor, dim=axis)
    return keep


def _product(a: Factors, b: Factors) -> Factors:
    return tuple(x * y for x, y in zip(a, b, strict=True))


def _upsampling(channels: int, out_channels: int, factors: Factors) -> nn.Module:
    """Return a linear map from each position to a box of positions."""
    kind: Any = TRANSPOSED[len(factors)]
    return kind(channels, out_channels, kernel_size=factors, stride=factors)
