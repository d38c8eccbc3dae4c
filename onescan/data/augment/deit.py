"""The random changes DeiT was trained with: crop, flip, RandAugment or colour jitter, erasing.

Source: arXiv:2012.12877, Table 9, in the meaning and the order of timm, on which DeiT was built.
Its random resized crop is not here: that is cheaper while an image is decoded.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from onescan.data.augment.base import AugmentConfig, check_ranges
from onescan.data.augment.rand_augment import RandAugment
from onescan.shapes import Images

ERASED_AREA = (0.02, 1 / 3)
ERASED_ASPECT = (0.3, 1 / 0.3)  # height over width; wider and taller ones are equally likely
NOISE_MEAN, NOISE_STD = 0.5, 0.25  # about those of photographs; DeiT's noise is standardized


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
        """Prepare.

        Raises:
            ValueError: a number is out of its range.
            ImportError: kornia is not installed.
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
        try:
            import kornia  # noqa: F401 - to learn whether it is there
        except ImportError as error:
            raise ImportError(
                "DeiT's augmentations need kornia: pip install 'onescan[vision]'"
            ) from error
        return DeitAugment(self)


class DeitAugment:
    """A batch of images, each changed by its own chance."""

    def __init__(self, config: DeitAugmentConfig) -> None:
        self.steps = list(_steps(config))

    @torch.no_grad()
    def __call__(self, images: Images, seed: int) -> Images:
        """Change them, in float32 whatever their type.

        Raises:
            ValueError: the images are neither grey nor RGB.
        """
        if images.shape[1] not in (1, 3):
            raise ValueError(
                f"task.augment reads grey and RGB images, with 1 or 3 channels, "
                f"and these have {images.shape[1]}"
            )
        changed = images.float()
        with torch.random.fork_rng(devices=[]):  # kornia draws from the global CPU generator alone
            torch.default_generator.manual_seed(seed)
            for step in self.steps:
                changed = step(changed)
        return changed.to(images.dtype)


def _steps(config: DeitAugmentConfig) -> Iterator[Callable[[Images], Images]]:
    from kornia.augmentation import ColorJitter, RandomHorizontalFlip

    if config.pad:
        yield lambda images: _shift(images, config.pad)
    if config.flip:
        yield RandomHorizontalFlip(p=config.flip)
    if config.num_ops:
        yield RandAugment(config.num_ops, config.magnitude, config.magnitude_std)
    if config.color_jitter:
        yield ColorJitter(*[config.color_jitter] * 3)
    if config.random_erasing:
        yield lambda images: _erase(images, config.random_erasing)


def _shift(images: Images, pad: int) -> Images:
    from kornia.augmentation import RandomCrop

    return RandomCrop(tuple(images.shape[-2:]), padding=pad)(images)


def _erase(images: Images, chance: float) -> Images:
    """Turn a rectangle of some images into noise: kornia draws it, but fills it with one value."""
    from kornia.augmentation import RandomErasing

    draw = RandomErasing(ERASED_AREA, ERASED_ASPECT, value=1.0, p=chance)
    erased = draw(torch.zeros_like(images[:, :1])).bool()
    generator = torch.Generator(images.device)  # its own, so a GPU's global one is left alone
    generator.manual_seed(int(torch.randint(2**62, ())))
    noise = torch.empty_like(images).normal_(NOISE_MEAN, NOISE_STD, generator=generator)
    return torch.where(erased, noise.clamp(0, 1), images)
