"""Handwritten digits: 1797 grey images of 8 x 8 that come with scikit-learn, no download."""

from dataclasses import dataclass

import torch
from einops import rearrange

from onescan.checks import check_positive
from onescan.data.base import DataConfig, stratified_split
from onescan.data.images import ImageFormat, ImageSplits, ImageTensors


@dataclass(frozen=True, kw_only=True)
class DigitsConfig(DataConfig):
    """Handwritten digits of scikit-learn."""

    test_fraction: float = 0.2
    """Fraction of each class held out for testing, between 0 and 1."""
    split_seed: int = 0
    """Random seed of the train-test split."""
    mean: float = 0.305
    """Mean brightness, subtracted; 0 is black, 1 is white."""
    std: float = 0.376
    """Standard deviation of the brightness, divided by."""

    def build(self) -> ImageSplits:
        """Read and split the images.

        Raises:
            ValueError: test_fraction is not between 0 and 1, or leaves too few images on a side for
                every class; or std is not above 0.
        """
        from sklearn.datasets import load_digits  # imported on use: half a second

        check_positive(**{"data.std": self.std})
        digits = load_digits()
        format = ImageFormat(channels=1, height=8, width=8, mean=(self.mean,), std=(self.std,))
        pixels = rearrange(torch.from_numpy(digits.images).float() / 16, "n h w -> n 1 h w")
        labels = torch.from_numpy(digits.target).long()
        train, test = stratified_split(labels, fraction=self.test_fraction, seed=self.split_seed)
        return ImageSplits(
            train=ImageTensors(images=pixels[train], labels=labels[train]),
            test=ImageTensors(images=pixels[test], labels=labels[test]),
            class_names=tuple(str(name) for name in digits.target_names),
            format=format,
        )
