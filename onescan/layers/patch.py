"""Cut a signal, an image or a video into patches, and embed each as one token."""

import math

from einops import rearrange
from torch import nn

from onescan.shapes import Grids, Hidden


class Patchify(nn.Module):
    """One linear map of each patch, for any number of axes.

    Args:
        channels: of the input.
        patch_size: the side along each axis: (p,) for signals, (p, p) for images.
        width: of a token.
    """

    def __init__(self, channels: int, patch_size: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.channels, self.patch_size = channels, patch_size
        self.to_token = nn.Linear(channels * math.prod(patch_size), width)
        axes = range(len(patch_size))
        cut = " ".join(f"(n{i} p{i})" for i in axes)
        tokens, inside = " ".join(f"n{i}" for i in axes), " ".join(f"p{i}" for i in axes)
        self.pattern = f"b c {cut} -> b ({tokens}) (c {inside})"

    def forward(self, x: Grids) -> tuple[Hidden, tuple[int, ...]]:
        """The tokens in row-major order, and their number along each axis.

        Raises:
            ValueError: another number of axes or channels, or a side that patches do not divide.
        """
        shape = self.grid_shape(tuple(x.shape[1:]))
        sizes = {f"p{i}": size for i, size in enumerate(self.patch_size)}
        return self.to_token(rearrange(x, self.pattern, **sizes)), shape

    def grid_shape(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """Patches along each axis of an input of this size (channels first)."""
        channels, *sides = size
        if len(sides) != len(self.patch_size) or channels != self.channels:
            raise ValueError(
                f"input has {channels} channels and {len(sides)} axes {tuple(sides)}, "
                f"expected {self.channels} channels and {len(self.patch_size)} axes"
            )
        if any(side < p or side % p for side, p in zip(sides, self.patch_size, strict=True)):
            raise ValueError(
                f"input of size {' x '.join(map(str, sides))} cannot be cut into patches of "
                f"{' x '.join(map(str, self.patch_size))}: each side must be a multiple"
            )
        return tuple(side // p for side, p in zip(sides, self.patch_size, strict=True))


class Unpatchify(nn.Module):
    """One linear map of each token to its patch, 0 at first: what `Patchify` cut, put together.

    Args:
        width: of a token.
        channels: of the output.
        patch_size: the side along each axis.
    """

    def __init__(self, width: int, channels: int, patch_size: tuple[int, ...]) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.to_patch = nn.Linear(width, channels * math.prod(patch_size))
        axes = range(len(patch_size))
        whole = " ".join(f"(n{i} p{i})" for i in axes)
        tokens, inside = " ".join(f"n{i}" for i in axes), " ".join(f"p{i}" for i in axes)
        self.pattern = f"b ({tokens}) (c {inside}) -> b c {whole}"

    def forward(self, x: Hidden, shape: tuple[int, ...]) -> Grids:
        """Tokens in row-major order, so many along each axis, as one grid."""
        sizes = {f"n{i}": size for i, size in enumerate(shape)}
        sizes |= {f"p{i}": size for i, size in enumerate(self.patch_size)}
        return rearrange(self.to_patch(x), self.pattern, **sizes)

    def init_weights(self) -> None:
        """Let the output be 0 at first."""
        nn.init.zeros_(self.to_patch.weight)
        nn.init.zeros_(self.to_patch.bias)
