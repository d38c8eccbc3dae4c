"""Data sets: what a task draws its batches from, and the format its model was trained on."""

from onescan.data.augment import AffineConfig, RandomAffine
from onescan.data.base import DataConfig, Format
from onescan.data.digits import DigitsConfig
from onescan.data.images import ImageFormat, ImageSet, ImageSplits, read_image
from onescan.data.order import derive_seed, epoch_order

__all__ = [
    "AffineConfig",
    "DataConfig",
    "DigitsConfig",
    "Format",
    "ImageFormat",
    "ImageSet",
    "ImageSplits",
    "RandomAffine",
    "derive_seed",
    "epoch_order",
    "read_image",
]
