"""Random changes of training images, each a config of its own."""

from onescan.data.augment.affine import AffineConfig
from onescan.data.augment.base import Augment, AugmentConfig
from onescan.data.augment.deit import DeitAugmentConfig
from onescan.data.augment.mix import Mix, MixConfig, Shares

__all__ = [
    "AffineConfig",
    "Augment",
    "AugmentConfig",
    "DeitAugmentConfig",
    "Mix",
    "MixConfig",
    "Shares",
]
