"""Random augmentation of training images, in batches on the training device."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample
from torch.nn.functional import pad as pad_sides

from onescan.messages import missing_package
from onescan.shapes import Grids, Images

PerImage = Float[Tensor, " B"]
Labels = Float[Tensor, "B classes"]  # fraction of each class in an image; rows sum to 1
Augment = Callable[[Grids, int], Grids]
"""Augments images with pixels from 0 to 1 on any device, depending only on them and on the seed."""
Mix = Callable[[Grids, Labels, int], tuple[Grids, Labels]]


@dataclass(frozen=True, kw_only=True)
class AugmentConfig(ABC):
    """Random augmentation of training images."""

    @abstractmethod
    def build(self) -> Augment:
        """Check the fields and return the augmentation.

        Raises:
            ValueError: If a field is out of range.
        """


def check_ranges(path: str, config: object, **maxima: int | float) -> None:
    """Raise ValueError if a field is not finite, or not from 0 to its maximum.

    Args:
        path: Path of the config, as the user writes it.
        config: Holds the fields.
        maxima: Maximum of each field, which may be infinity.

    >>> check_ranges("point", 3 + 4j, real=2)
    Traceback (most recent call last):
    ValueError: point.real is 3.0, expected 0 to 2
    """
    for name, maximum in maxima.items():
        value = getattr(config, name)
        if not (0 <= value <= maximum and value < math.inf):
            expected = "0 or more" if maximum == math.inf else f"0 to {maximum}"
            raise ValueError(f"{path}.{name} is {value}, expected {expected}")


# Random affine maps


@dataclass(frozen=True, kw_only=True)
class AffineConfig(AugmentConfig):
    """Random rotation, translation and scaling of training images, and changes of color."""

    degrees: float = 10.0
    """Largest rotation in either direction, in degrees."""
    translate: float = 0.1
    """Largest translation along each axis, as a fraction of the side."""
    scale: float = 0.1
    """Largest change of scale: 0.1 scales by 0.9 to 1.1."""
    fill: float = 0.0
    """Brightness outside the image: 0 is black, 1 is white."""
    color_jitter: float = 0.0
    """Largest change of each channel's brightness, and of its contrast as a fraction."""

    def build(self) -> "RandomAffine":
        check_ranges(
            "task.augment",
            self,
            degrees=math.inf,
            translate=math.inf,
            scale=math.inf,
            fill=1,
            color_jitter=1,
        )
        if self.scale >= 1:
            raise ValueError(f"task.augment.scale is {self.scale}, expected less than 1")
        return RandomAffine(self)


class RandomAffine:
    """Rotates, shifts and scales each image of a batch by random amounts.

    A point X of the result, in pixels from the center, shows the source's point
    R(angle) X / zoom - shift, where R is the rotation by the angle.
    """

    def __init__(self, config: AffineConfig) -> None:
        self.config = config

    def __call__(self, images: Grids, seed: int) -> Grids:
        _check_two_axes(images)
        generator = torch.Generator().manual_seed(seed)
        angle, zoom, shift_x, shift_y = 2 * torch.rand(4, len(images), generator=generator) - 1
        matrices = affine_matrices(
            angle=torch.deg2rad(self.config.degrees * angle),
            zoom=1 + self.config.scale * zoom,
            shift_x=self.config.translate * shift_x,
            shift_y=self.config.translate * shift_y,
            aspect=images.shape[-1] / images.shape[-2],
        )
        # float32 throughout: coordinates in bfloat16 would be off by pixels
        matrices = matrices.to(images.device, non_blocking=True)
        grid = affine_grid(matrices, list(images.shape), align_corners=False)
        # grid_sample fills with zeros, so subtract the fill and add it again
        fill = self.config.fill
        moved = grid_sample(images.float() - fill, grid, align_corners=False) + fill
        if self.config.color_jitter:
            moved = self._jittered(moved, generator)
        return moved.to(images.dtype)

    def _jittered(self, images: Images, generator: torch.Generator) -> Images:
        """Change brightness and contrast of each channel of each image."""
        draws = 2 * torch.rand(2, *images.shape[:2], 1, 1, generator=generator) - 1
        contrast, brightness = (self.config.color_jitter * draws).to(images.device)
        mean = images.mean(dim=(2, 3), keepdim=True)
        return ((images - mean) * (1 + contrast) + mean + brightness).clamp(0, 1)


def _check_two_axes(images: Tensor) -> None:
    """Raise ValueError for signals, videos and volumes."""
    if (axes := images.ndim - 2) != 2:  # noqa: PLR2004
        raise ValueError(f"task.augment needs images, which have 2 axes, but the data has {axes}")


def affine_matrices(
    *, angle: PerImage, zoom: PerImage, shift_x: PerImage, shift_y: PerImage, aspect: float
) -> Float[Tensor, "B 2 3"]:
    """Map the result's coordinates to the source's, both from -1 to 1 along each side.

    Args:
        angle: Rotation in radians.
        zoom: Scale; above 1 enlarges.
        shift_x: Shift to the right before the rotation, as a fraction of the width.
        shift_y: Shift downwards before the rotation, as a fraction of the height.
        aspect: Width over height, so that a rotation does not shear the image.
    """
    cos, sin = angle.cos() / zoom, angle.sin() / zoom
    rows = [cos, -sin / aspect, -2 * shift_x, sin * aspect, cos, -2 * shift_y]
    return rearrange(torch.stack(rows), "(row column) B -> B row column", row=2)


# DeiT's augmentation

NEED_KORNIA = ("num_ops", "color_jitter", "random_erasing")
ERASED_AREA = (0.02, 1 / 3)
ERASED_ASPECT = (0.3, 1 / 0.3)  # height over width
NOISE_MEAN, NOISE_STD = 0.5, 0.25  # about those of photographs; DeiT erases after standardization


@dataclass(frozen=True, kw_only=True)
class DeitAugmentConfig(AugmentConfig):
    """DeiT's augmentation. A value of 0 disables the respective step."""

    pad: int = 0
    """Padding in pixels before a random crop to the original size; CIFAR images commonly use 4."""
    flip: float = 0.5
    """Probability of a horizontal flip."""
    num_ops: int = 2
    """RandAugment: operations drawn for each image, each applied with probability 1/2."""
    magnitude: float = 9.0
    """RandAugment: mean magnitude of an operation, 0 to 10."""
    magnitude_std: float = 0.5
    """RandAugment: standard deviation of the magnitude, which stays within 0 to 10."""
    color_jitter: float = 0.0
    """Largest change of brightness, contrast and saturation; DeiT uses 0.3 in place of
    RandAugment."""
    random_erasing: float = 0.25
    """Probability of replacing a rectangle of 2 to 33 percent of the image by noise."""

    def build(self) -> "DeitAugment":
        """Check the fields and return the augmentation.

        Raises:
            ValueError: If a field is out of range.
            ImportError: If kornia is not installed, which all steps but padding and flips need.
        """
        check_ranges(
            "task.augment",
            self,
            pad=math.inf,
            flip=1,
            num_ops=math.inf,
            magnitude=10,
            magnitude_std=math.inf,
            color_jitter=1,
            random_erasing=1,
        )
        names = [name for name in NEED_KORNIA if getattr(self, name)]
        try:
            if names:
                import kornia  # noqa: F401 - check that it is installed
        except ImportError as error:
            what = f"task.augment.{names[0]} is {getattr(self, names[0])}, which"
            raise missing_package(what, "kornia", "vision", error) from error
        return DeitAugment(self)


class DeitAugment:
    """Crop, flip, RandAugment or color jitter, and erasing; each image independently.

    Source: arXiv:2012.12877, Table 9, with timm's definitions and order, on which DeiT was built.
    Its random resized crop is part of decoding, where it is cheaper: `RandomCropConfig`.
    """

    def __init__(self, config: DeitAugmentConfig) -> None:
        self.steps = list(_deit_steps(config))

    @torch.no_grad()
    def __call__(self, images: Grids, seed: int) -> Grids:
        """Augment images in float32, whatever their type.

        Raises:
            ValueError: If the images are neither grayscale nor RGB.
        """
        _check_two_axes(images)
        if images.shape[1] not in (1, 3):
            raise ValueError(
                "task.augment needs grayscale or RGB images, with 1 or 3 channels, but these have "
                f"{images.shape[1]}"
            )
        changed = images.float()
        with torch.random.fork_rng(devices=[]):  # kornia draws from the global CPU generator only
            torch.default_generator.manual_seed(seed)
            for step in self.steps:
                changed = step(changed)
        return changed.to(images.dtype)


def _deit_steps(config: DeitAugmentConfig) -> Iterator[Callable[[Images], Images]]:
    if config.pad:
        yield lambda images: _shift(images, config.pad)
    if config.flip:
        yield lambda images: _flip(images, config.flip)
    if config.num_ops:
        yield RandAugment(config.num_ops, config.magnitude, config.magnitude_std)
    if config.color_jitter:
        from kornia.augmentation import ColorJitter

        yield ColorJitter(*[config.color_jitter] * 3)
    if config.random_erasing:
        yield lambda images: _erase(images, config.random_erasing)


def _shift(images: Images, pad: int) -> Images:
    """Pad with zeros, and crop each image at random; the draws are those of kornia's RandomCrop."""
    height, width = images.shape[-2:]
    columns, rows = (torch.rand(2, len(images)) * (2 * pad + 1)).long().tolist()
    padded = pad_sides(images, [pad] * 4)
    cropped = [
        image[:, row : row + height, column : column + width]
        for image, row, column in zip(padded, rows, columns, strict=True)
    ]
    return torch.stack(cropped)


def _flip(images: Images, probability: float) -> Images:
    """Mirror some images; the draws are those of kornia's RandomHorizontalFlip."""
    if probability == 1:
        return images.flip(-1)
    is_flipped = (torch.rand(len(images)) < probability).to(images.device, non_blocking=True)
    return torch.where(is_flipped[:, None, None, None], images.flip(-1), images)


def _erase(images: Images, probability: float) -> Images:
    """Replace a rectangle of some images by noise; kornia would fill it with one value."""
    from kornia.augmentation import RandomErasing

    draw = RandomErasing(ERASED_AREA, ERASED_ASPECT, value=1.0, p=probability)
    erased = draw(torch.zeros_like(images[:, :1])).bool()
    generator = torch.Generator(images.device)  # leaves a GPU's global generator unchanged
    generator.manual_seed(int(torch.randint(2**62, ())))
    noise = torch.empty_like(images).normal_(NOISE_MEAN, NOISE_STD, generator=generator)
    return torch.where(erased, noise.clamp(0, 1), images)


# RandAugment

Strengths = Float[Tensor, " B"]  # from -1 to 1; without a direction, the absolute value
Operation = Callable[[Images, Strengths], Images]

APPLY_PROBABILITY = 0.5
MAX_MAGNITUDE = 10.0  # corresponds to a strength of 1
OUTSIDE = 0.5  # brightness outside the image
DARK = 0.5  # solarize_add brightens pixels below
SHARPNESS_KERNEL = 3  # side in pixels


class RandAugment:
    """Applies randomly drawn operations to each image, at randomly drawn strengths.

    Draws from the global CPU generator. Source: arXiv:1909.13719, as timm's `rand-m9-mstd0.5-inc1`
    defines it, where a larger magnitude is always a larger change. kornia's own RandAugment draws
    operations and strength once for the whole batch, and its small magnitudes darken, fade and
    blur an image, so only its operations are used here.
    """

    def __init__(self, operations: int, magnitude: float, magnitude_std: float) -> None:
        self.operations = operations
        self.magnitude = magnitude
        self.magnitude_std = magnitude_std
        self.table = list(operation_table().values())

    def __call__(self, images: Images) -> Images:
        images = images.clone()
        for _ in range(self.operations):
            self._apply_one(images)
        return images

    def _apply_one(self, images: Images) -> None:
        """Apply one operation to each image in place, grouped by operation."""
        count, none = len(images), len(self.table)
        drawn = torch.randint(none, (count,))
        drawn[torch.rand(count) >= APPLY_PROBABILITY] = none
        # one asynchronous copy each, so the CPU need not wait for the GPU
        strengths = self._strengths(count).to(images, non_blocking=True)
        order = drawn.argsort().to(images.device, non_blocking=True)
        groups = order.split(drawn.bincount(minlength=none + 1).tolist())
        for operation, rows in zip(self.table, groups[:none], strict=True):
            if len(rows):
                images[rows] = operation(images[rows], strengths[rows])

    def _strengths(self, count: int) -> Strengths:
        magnitudes = self.magnitude + self.magnitude_std * torch.randn(count)
        signs = 2 * torch.randint(2, (count,)) - 1
        return signs * magnitudes.clamp(0, MAX_MAGNITUDE) / MAX_MAGNITUDE


def operation_table() -> dict[str, Operation]:
    """Return every operation by name; needs kornia."""
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
    """Move images over gray; kornia's transforms fill with zeros."""
    moved = move(images - OUTSIDE, amounts) + OUTSIDE
    return moved.clamp(0, 1)  # rounding may exceed the range


def _along_x(amounts: Strengths) -> Float[Tensor, "B 2"]:
    return torch.stack([amounts, torch.zeros_like(amounts)], dim=1)


def _along_y(amounts: Strengths) -> Float[Tensor, "B 2"]:
    return _along_x(amounts).flip(1)


def _auto_contrast(images: Images) -> Images:
    """Stretch each channel to 0 to 1; kornia's turns a constant channel black."""
    low, high = images.amin((-2, -1), keepdim=True), images.amax((-2, -1), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low), images)


def _solarize_add(images: Images, strengths: Strengths) -> Images:
    """Brighten the darker half; kornia's brightens all pixels and then inverts bright ones."""
    brighter = images + 110 / 255 * strengths.abs()[:, None, None, None]
    return torch.where(images < DARK, brighter, images)


def _sharpness(images: Images, strengths: Strengths) -> Images:
    """Sharpen or blur all but the outermost pixels, if there are any others."""
    from kornia import enhance

    if min(images.shape[-2:]) < SHARPNESS_KERNEL:
        return images
    return enhance.sharpness(images, 1 + 0.9 * strengths)


# MixUp and CutMix


@dataclass(frozen=True, kw_only=True)
class MixConfig:
    """MixUp and CutMix, by default as in DeiT."""

    mixup_alpha: float = 0.8
    """MixUp's alpha: both parameters of the Beta distribution; 0 disables MixUp."""
    cutmix_alpha: float = 1.0
    """CutMix's alpha: both parameters of the Beta distribution; 0 disables CutMix."""
    probability: float = 1.0
    """Probability of mixing a batch."""
    switch_probability: float = 0.5
    """Probability of choosing CutMix over MixUp if both are enabled."""

    def build(self) -> Mix:
        """Check the fields and return the mixing.

        Raises:
            ValueError: If a field is out of range, or both methods are disabled.
        """
        check_ranges(
            "task.mix",
            self,
            mixup_alpha=math.inf,
            cutmix_alpha=math.inf,
            probability=1,
            switch_probability=1,
        )
        if not self.mixup_alpha + self.cutmix_alpha:
            raise ValueError(
                "task.mix.mixup_alpha and task.mix.cutmix_alpha are 0, expected one of them above 0"
            )
        return RandomMix(self)


class RandomMix:
    """Mixes a batch of images, signals or volumes and labels with itself in reverse order.

    Sources: MixUp, arXiv:1710.09412; CutMix, arXiv:1905.04899; both as in timm, which applies one
    of the two to a whole batch. kornia's MixUp draws uniformly, not from a Beta distribution, and
    does not return soft labels.
    """

    def __init__(self, config: MixConfig) -> None:
        self.config = config
        if config.mixup_alpha and config.cutmix_alpha:
            self.cutmix_probability = config.switch_probability
        else:
            self.cutmix_probability = float(config.cutmix_alpha > 0)

    def __call__(self, images: Grids, labels: Labels, seed: int) -> tuple[Grids, Labels]:
        rng = np.random.default_rng(seed)
        if rng.random() >= self.config.probability:
            return images, labels
        if rng.random() < self.cutmix_probability:
            images, other = _cutmix(images, self.config.cutmix_alpha, rng)
        else:
            other = rng.beta(self.config.mixup_alpha, self.config.mixup_alpha)
            images = images.lerp(images.flip(0), other)
        return images, labels.lerp(labels.flip(0), other)


def _cutmix(images: Grids, alpha: float, rng: np.random.Generator) -> tuple[Grids, float]:
    """Paste a box of each image's partner; return the fraction of the image that it covers.

    The box has the proportions of the image and is clipped at the edges.
    """
    sizes = images.shape[2:]
    fraction = rng.beta(alpha, alpha) ** (1 / len(sizes))
    intervals = [_interval(length, fraction, rng) for length in sizes]
    box: Any = (..., *intervals)
    mixed = images.clone()
    mixed[box] = images[box].flip(0)
    return mixed, math.prod(x.stop - x.start for x in intervals) / math.prod(sizes)


def _interval(length: int, fraction: float, rng: np.random.Generator) -> slice:
    half = int(length * fraction) // 2
    center = int(rng.integers(length))
    return slice(max(center - half, 0), min(center + half, length))
