"""Random rotation, shift and zoom of a batch of images, each image its own.

A point X of the result, in pixels from the centre, shows the source's point
R(angle) X / zoom - shift, where R is the rotation by the angle.
"""

import math
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from onescan.data.augment.base import AugmentConfig, check_ranges
from onescan.shapes import Images

PerImage = Float[Tensor, " B"]


@dataclass(frozen=True, kw_only=True)
class AffineConfig(AugmentConfig):
    """Random rotation, translation and scaling of training images."""

    degrees: float = 10.0
    """Largest rotation in either direction, in degrees."""
    translate: float = 0.1
    """Largest translation along each axis, as a fraction of the side."""
    scale: float = 0.1
    """Largest change of scale: 0.1 scales by 0.9 to 1.1."""
    fill: float = 0.0
    """Brightness outside the image: 0 is black, 1 is white."""

    def build(self) -> "RandomAffine":
        """Prepare.

        Raises:
            ValueError: a range is negative or not finite, scale not below 1, or fill above 1.
        """
        check_ranges(
            "task.augment", self, degrees=math.inf, translate=math.inf, scale=math.inf, fill=1
        )
        if self.scale >= 1:
            raise ValueError(f"task.augment.scale is {self.scale}, expected less than 1")
        return RandomAffine(self)


class RandomAffine:
    """A batch of images, each turned, moved and zoomed by its own random amount."""

    def __init__(self, config: AffineConfig) -> None:
        self.config = config

    def __call__(self, images: Images, seed: int) -> Images:
        generator = torch.Generator().manual_seed(seed)
        angle, zoom, shift_x, shift_y = 2 * torch.rand(4, len(images), generator=generator) - 1
        matrices = affine_matrices(
            angle=torch.deg2rad(self.config.degrees * angle),
            zoom=1 + self.config.scale * zoom,
            shift_x=self.config.translate * shift_x,
            shift_y=self.config.translate * shift_y,
            aspect=images.shape[-1] / images.shape[-2],
        )
        # float32 throughout: places in bfloat16 would be off by pixels
        matrices = matrices.to(images.device, non_blocking=True)
        grid = affine_grid(matrices, list(images.shape), align_corners=False)
        # grid_sample fills with zeros, so the fill is made zero while it runs
        fill = self.config.fill
        moved = grid_sample(images.float() - fill, grid, align_corners=False) + fill
        return moved.to(images.dtype)


def affine_matrices(
    *, angle: PerImage, zoom: PerImage, shift_x: PerImage, shift_y: PerImage, aspect: float
) -> Float[Tensor, "B 2 3"]:
    """Map the result's coordinates to the source's, both from -1 to 1 along each side.

    Args:
        angle: rotation, in radians.
        zoom: above 1 enlarges.
        shift_x: shift to the right before the rotation, as a part of the width.
        shift_y: shift downwards before the rotation, as a part of the height.
        aspect: width over height, without which a rotation would shear.
    """
    cos, sin = angle.cos() / zoom, angle.sin() / zoom
    rows = [cos, -sin / aspect, -2 * shift_x, sin * aspect, cos, -2 * shift_y]
    return rearrange(torch.stack(rows), "(row column) B -> B row column", row=2)
