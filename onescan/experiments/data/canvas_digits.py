"""Handwritten digits at random positions in large textured images, generated without a download."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Int, Int32, UInt8
from torch import Tensor

from onescan.checks import check_positive, check_whole
from onescan.experiments.data.base import DataConfig, Example, LoadedBatch, stratified_split
from onescan.experiments.data.images import ImageSet, ImageSplits
from onescan.experiments.data.order import derive_seed
from onescan.inputs.image_files import BytePixels
from onescan.inputs.images import ImageFormat
from onescan.inputs.targets import CLASSES, Target
from onescan.shapes import Labels

SIDE, INK = 8, 16  # side of a digit in pixels before it is enlarged, and its largest pixel value
WHITE = 255
MASK_CLASSES = ("background", "stroke")
GRATINGS = 4  # plane waves per texture
PERIOD = 1024  # phase steps in a full cycle, a power of 2
MAX_FREQUENCY = PERIOD // 8  # phase steps per pixel along an axis, for periods of at least 8 pixels
AMPLITUDE = 64  # of each plane wave and of the noise
LEVELS = 2 * AMPLITUDE * (GRATINGS + 1)  # largest sum of waves and noise; the smallest is 0
# Textures are computed with integers, so that they are identical on all machines.
WAVE = torch.from_numpy(np.rint(AMPLITUDE * np.cos(np.arange(PERIOD) * (2 * math.pi / PERIOD))))
WAVE = WAVE.int()


@dataclass(frozen=True, kw_only=True)
class CanvasDigitsConfig(DataConfig):
    """Scikit-learn's handwritten digits, each at a random position in a large textured image.

    The class is the digit. Each image has its own texture, which is a sum of plane waves and noise.
    The strokes of the digit are brighter than the texture behind them. Images are generated when
    they are read, as bytes of shape [1, size, size]. Training images have a new position and
    texture in every epoch, while test images stay the same. Digits of the test split are not in
    the training split.
    """

    size: int = 128
    """Height and width of the images in pixels."""
    scale: int = 8
    """Factor by which the digits, which have 8 x 8 pixels, are enlarged."""
    texture_contrast: float = 0.4
    """Largest brightness of the texture, from 0 (a black background) to less than 1 (white).
    Strokes add up to one minus this value, so larger values make the digits harder to recognize."""
    test_fraction: float = 0.2
    """Fraction of the digits of each class held out for testing, between 0 and 1."""
    split_seed: int = 0
    """Random seed of the train-test split."""
    validate: bool = False
    """Leave out the test digits, and hold out part of the training digits in their place. For
    choosing hyperparameters."""
    masks: bool = False
    """Whether the target is the class of each pixel instead of the digit: "stroke" where the ink of
    the digit has at least half of its largest value, and "background" elsewhere."""
    background_seed: int = 0
    """Random seed of the positions and textures of test images. Those of training images depend on
    `training.seed`."""
    mean: float = 0.244
    """Mean brightness, which is subtracted from images; 0 is black, 1 is white. The default was
    measured with the default values of the other fields."""
    std: float = 0.151
    """Standard deviation of the brightness, by which images are divided. The default was measured
    with the default values of the other fields."""

    def build(self) -> ImageSplits:
        """Read and split the digits.

        Raises:
            ValueError: If a field is out of range, if an enlarged digit is larger than the image,
                or if `test_fraction` leaves fewer digits than classes in either split.
        """
        from sklearn.datasets import load_digits  # imported on use: half a second

        self._check()
        format = ImageFormat(
            channels=1, height=self.size, width=self.size, mean=(self.mean,), std=(self.std,)
        )
        digits = load_digits()
        ink = torch.from_numpy(digits.images.astype(np.uint8))
        labels = torch.from_numpy(digits.target).long()
        split = partial(stratified_split, fraction=self.test_fraction, seed=self.split_seed)
        train, test = split(labels)
        if self.validate:
            train, test = (train[part] for part in split(labels[train]))
        sets = [
            DigitImages(config=self, ink=ink[part], labels=labels[part], digits=part)
            for part in (train, test)
        ]
        names = tuple(str(name) for name in digits.target_names)
        return ImageSplits(
            train=sets[0],
            test=sets[1],
            class_names=MASK_CLASSES if self.masks else names,
            format=format,
            target=Target(kind="class_map") if self.masks else CLASSES,
        )

    def _check(self) -> None:
        for name, least in (("size", 1), ("scale", 1), ("split_seed", 0), ("background_seed", 0)):
            check_whole(least, **{f"data.{name}": getattr(self, name)})
        if self.size < self.digit_size:
            raise ValueError(
                f"data.size is {self.size}, expected at least {self.digit_size} for digits of "
                f"{SIDE} x {SIDE} pixels enlarged by a data.scale of {self.scale}"
            )
        if not 0 <= self.texture_contrast < 1:  # also true for NaN
            raise ValueError(
                f"data.texture_contrast is {self.texture_contrast}, expected at least 0 and less "
                "than 1"
            )
        check_positive(**{"data.std": self.std})

    @property
    def digit_size(self) -> int:
        """Height and width of an enlarged digit in pixels."""
        return SIDE * self.scale


class Background(NamedTuple):
    """Textures of a batch of images, and the positions of the digits.

    Attributes:
        texture: Brightness of each pixel, from 0 to at most 255 times `texture_contrast`.
        top: Index of the first row of each digit.
        left: Index of the first column of each digit.
    """

    texture: Int32[Tensor, "B height width"]
    top: Int[Tensor, " B"]
    left: Int[Tensor, " B"]


@dataclass(frozen=True, kw_only=True)
class DigitImages(ImageSet):
    """Images of one split, generated when they are read.

    Attributes:
        config: Image size, scale, contrast and random seed.
        ink: Pixels of the digits, from 0 (no ink) to 16.
        labels: Classes of the digits.
        digits: Index of each digit in scikit-learn's data set.
    """

    config: CanvasDigitsConfig
    ink: UInt8[Tensor, "N 8 8"]
    labels: Labels
    digits: Int[Tensor, " N"]

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        indices = torch.tensor([example.source for example in examples], dtype=torch.long)
        background, ink = self.backgrounds(examples), self.ink[indices]
        labels = self.labels[indices]
        target = self._masks(ink, background) if self.config.masks else labels
        return LoadedBatch((self._draw(ink, background), target))

    def backgrounds(self, examples: Sequence[Example]) -> Background:
        """Generate a position and a texture for each example, which do not depend on the batch."""
        size, free = self.config.size, self.config.size - self.config.digit_size + 1
        drawn = []
        for example in examples:
            generator = torch.Generator().manual_seed(self._seed(example))
            draw = partial(torch.randint, generator=generator)
            corner = draw(free, (2,))
            frequencies = draw(-MAX_FREQUENCY, MAX_FREQUENCY + 1, (GRATINGS, 2))
            phases = draw(PERIOD, (GRATINGS,))
            noise = draw(2 * AMPLITUDE + 1, (size, size), dtype=torch.int32)
            drawn.append((corner, frequencies, phases, noise))
        corners, frequencies, phases, noise = map(torch.stack, zip(*drawn, strict=True))
        levels = self._gratings(frequencies, phases) + noise
        brightest = round(self.config.texture_contrast * WHITE)
        top, left = corners.unbind(1)
        return Background(texture=levels * brightest // LEVELS, top=top, left=left)

    def _seed(self, example: Example) -> int:
        if example.seed is not None:
            return derive_seed("canvas", example.seed)
        digit = int(self.digits[example.source])
        return derive_seed("test canvas", self.config.background_seed, digit)

    def _gratings(
        self, frequencies: Int[Tensor, "B gratings 2"], phases: Int[Tensor, "B gratings"]
    ) -> Int32[Tensor, "B height width"]:
        """Return the sum of the plane waves, each shifted so that its smallest value is 0."""
        rows, columns = (frequencies[..., None] * torch.arange(self.config.size)).unbind(2)
        rows = rows + phases[..., None]  # B gratings height
        size = (len(phases), self.config.size, self.config.size)
        levels = torch.full(size, GRATINGS * AMPLITUDE, dtype=torch.int32)
        for row, column in zip(rows.unbind(1), columns.unbind(1), strict=True):
            levels += WAVE[(row[:, :, None] + column[:, None, :]) % PERIOD]
        return levels

    def _draw(self, ink: UInt8[Tensor, "B 8 8"], background: Background) -> BytePixels:
        """Draw the digits on the textures by adding the brightness of their strokes."""
        brightest = WHITE - round(self.config.texture_contrast * WHITE)
        texture = background.texture.clone()
        texture[self._digit_pixels(background)] += self._enlarged(ink.int() * brightest // INK)
        return rearrange(texture.byte(), "b h w -> b 1 h w")

    def _masks(
        self, ink: UInt8[Tensor, "B 8 8"], background: Background
    ) -> Int[Tensor, "B height width"]:
        """Return 1 for pixels of strokes, and 0 for those of the background."""
        masks = torch.zeros(background.texture.shape, dtype=torch.long)
        masks[self._digit_pixels(background)] = self._enlarged((2 * ink.int() >= INK).int()).long()
        return masks

    def _enlarged(self, digits: Int32[Tensor, "B 8 8"]) -> Int32[Tensor, "B size size"]:
        scale = self.config.scale
        return digits.repeat_interleave(scale, dim=1).repeat_interleave(scale, dim=2)

    def _digit_pixels(self, background: Background) -> tuple[Tensor, Tensor, Tensor]:
        """Return the indices of the pixels that the digits cover."""
        inside = torch.arange(self.config.digit_size)
        rows = background.top[:, None, None] + inside[:, None]
        columns = background.left[:, None, None] + inside
        return torch.arange(len(rows))[:, None, None], rows, columns
