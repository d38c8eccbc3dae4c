"""RandAugment: each image goes through a few operations drawn from fifteen, at a drawn strength.

Source: arXiv:1909.13719, as timm's `rand-m9-mstd0.5-inc1` has it, in which more strength is
always more change. kornia's own RandAugment draws the operations once for the whole batch and
one strength for all, and takes a small strength for a dark, pale and blurred image, so only
its operations are used here.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from onescan.shapes import Images

Strengths = Float[Tensor, " B"]  # from -1 to 1; what has no direction reads the size alone
Operation = Callable[[Images, Strengths], Images]

CHANCE = 0.5  # of a drawn operation to be carried out
LARGEST = 10.0  # a magnitude of which stands for a strength of 1
OUTSIDE = 0.5  # brightness of what comes in from outside the image
DARK = 0.5  # below this is what solarize_add brightens
KERNEL = 3  # side of what sharpness filters with


class RandAugment:
    """A batch of images, each through its own operations; draws from the global CPU generator."""

    def __init__(self, operations: int, magnitude: float, magnitude_std: float) -> None:
        self.operations = operations
        self.magnitude = magnitude
        self.magnitude_std = magnitude_std
        self.table = list(operation_table().values())

    def __call__(self, images: Images) -> Images:
        images = images.clone()
        for _ in range(self.operations):
            self._change(images)
        return images

    def _change(self, images: Images) -> None:
        """Carry out one operation on each image, in place, those with the same one together."""
        count, none = len(images), len(self.table)
        drawn = torch.randint(none, (count,))
        drawn[torch.rand(count) >= CHANCE] = none
        # one copy each, that waits for nothing a GPU is still at
        strengths = self._strengths(count).to(images, non_blocking=True)
        order = drawn.argsort().to(images.device, non_blocking=True)
        groups = order.split(drawn.bincount(minlength=none + 1).tolist())
        for operation, rows in zip(self.table, groups[:none], strict=True):
            if len(rows):
                images[rows] = operation(images[rows], strengths[rows])

    def _strengths(self, count: int) -> Strengths:
        magnitudes = self.magnitude + self.magnitude_std * torch.randn(count)
        signs = 2 * torch.randint(2, (count,)) - 1
        return signs * magnitudes.clamp(0, LARGEST) / LARGEST


def operation_table() -> dict[str, Operation]:
    """Name every operation there is; needs kornia."""
    from kornia import enhance
    from kornia.geometry import transform

    return {
        "auto_contrast": lambda images, _: _auto_contrast(images),
        "equalize": lambda images, _: enhance.equalize(images),
        "invert": lambda images, _: enhance.invert(images),
        "rotate": lambda images, s: _moved(transform.rotate, images, 30 * s),
        "posterize": lambda images, s: enhance.posterize(images, 4 - (4 * s.abs()).int()),
        "solarize": lambda images, s: enhance.solarize(images, 256 / 255 * (1 - s.abs())),
        "solarize_add": _solarize_add,
        "color": lambda images, s: enhance.adjust_saturation_with_gray_subtraction(
            images, 1 + 0.9 * s
        ),
        "contrast": lambda images, s: enhance.adjust_contrast_with_mean_subtraction(
            images, 1 + 0.9 * s
        ),
        "brightness": lambda images, s: enhance.adjust_brightness_accumulative(images, 1 + 0.9 * s),
        "sharpness": _sharpness,
        "shear_x": lambda images, s: _moved(transform.shear, images, _along_x(0.3 * s)),
        "shear_y": lambda images, s: _moved(transform.shear, images, _along_y(0.3 * s)),
        "translate_x": lambda images, s: _moved(
            transform.translate, images, _along_x(0.45 * images.shape[-1] * s)
        ),
        "translate_y": lambda images, s: _moved(
            transform.translate, images, _along_y(0.45 * images.shape[-2] * s)
        ),
    }


def _moved(move: Callable[[Images, Tensor], Images], images: Images, amounts: Tensor) -> Images:
    """Fill with grey what comes in from outside, where kornia's moves fill with zeros."""
    moved = move(images - OUTSIDE, amounts) + OUTSIDE
    return moved.clamp(0, 1)  # of rounding


def _along_x(amounts: Strengths) -> Float[Tensor, "B 2"]:
    return torch.stack([amounts, torch.zeros_like(amounts)], dim=1)


def _along_y(amounts: Strengths) -> Float[Tensor, "B 2"]:
    return _along_x(amounts).flip(1)


def _auto_contrast(images: Images) -> Images:
    """Stretch each channel to 0 to 1; kornia's turns a channel of one value black."""
    low, high = images.amin((-2, -1), keepdim=True), images.amax((-2, -1), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low), images)


def _solarize_add(images: Images, strengths: Strengths) -> Images:
    """Brighten the darker half; kornia's brightens all and then inverts what is bright."""
    brighter = images + 110 / 255 * strengths.abs()[:, None, None, None]
    return torch.where(images < DARK, brighter, images)


def _sharpness(images: Images, strengths: Strengths) -> Images:
    """Sharpen or blur all but the outermost pixels, if there are any others."""
    from kornia import enhance

    if min(images.shape[-2:]) < KERNEL:
        return images
    return enhance.sharpness(images, 1 + 0.9 * strengths)
