"""Short videos of moving handwritten digits, generated without a download."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from onescan.checks import check_positive
from onescan.experiments.data.arrays import ArrayDataset, ArraySplits
from onescan.experiments.data.base import DataConfig, stratified_split
from onescan.inputs.arrays import ArrayFormat
from onescan.shapes import Labels

SIDE = 8  # pixels of a digit
MIN_FRAMES = 2  # a single frame shows no direction
# name -> pixels per frame along height and width
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}


@dataclass(frozen=True, kw_only=True)
class MovingDigitsConfig(DataConfig):
    """Videos of scikit-learn's handwritten digits that move by one pixel per frame.

    Each digit moves left, right, up and down, in one video each, across a black canvas. A class
    consists of a digit and a direction, such as "3 left". Digits of the test split are not in the
    training split. Videos have shape [1, frames, size, size], as bytes.
    """

    frames: int = 8
    """Frames per video."""
    size: int = 16
    """Height and width of the canvas in pixels. Digits have 8 x 8 and stay inside."""
    test_fraction: float = 0.2
    """Fraction of the digits of each class held out for testing, between 0 and 1."""
    split_seed: int = 0
    """Random seed of the train-test split."""
    position_seed: int = 0
    """Random seed of the positions at which digits start."""

    def build(self) -> ArraySplits:
        """Read and split the digits, and generate the videos.

        Raises:
            ValueError: If `frames` is below 2, if a digit leaves the canvas, or if `test_fraction`
                is not between 0 and 1 or leaves fewer digits than classes in either part.
        """
        from sklearn.datasets import load_digits  # imported on use: half a second

        check_positive(**{"data.frames": self.frames, "data.size": self.size})
        if self.frames < MIN_FRAMES:
            raise ValueError(f"data.frames is {self.frames}, expected {MIN_FRAMES} or more")
        if self.size < SIDE + self.frames - 1:
            raise ValueError(
                f"data.size is {self.size}, expected {SIDE + self.frames - 1} or more for digits "
                f"of {SIDE} x {SIDE} pixels that move for {self.frames} frames"
            )
        digits = load_digits()
        pixels = (digits.images * (255 / 16)).round().astype(np.uint8)
        classes = torch.from_numpy(digits.target).long()
        generator = torch.Generator().manual_seed(self.position_seed)
        videos = torch.stack(
            [
                self._videos(torch.from_numpy(pixels), step, generator)
                for step in DIRECTIONS.values()
            ]
        )  # direction N frames height width
        x = videos.transpose(0, 1).flatten(0, 1).numpy()
        labels = (classes[:, None] * len(DIRECTIONS) + torch.arange(len(DIRECTIONS))).flatten()
        parts = stratified_split(classes, fraction=self.test_fraction, seed=self.split_seed)
        train, test = (_dataset(x, labels, digits=part) for part in parts)
        mean, std = train.statistics()
        return ArraySplits(
            train=train,
            test=test,
            class_names=tuple(f"{d} {way}" for d in digits.target_names for way in DIRECTIONS),
            format=ArrayFormat(
                channels=1, shape=train.shape[1:], mean=mean, std=std, is_bytes=True
            ),
        )

    def _videos(
        self,
        pixels: UInt8[Tensor, "N 8 8"],
        step: tuple[int, int],
        generator: torch.Generator,
    ) -> UInt8[Tensor, "N frames height width"]:
        """Move each digit by `step` per frame, from a random position."""
        count, size = len(pixels), self.size
        videos = torch.zeros(count, self.frames, size, size, dtype=torch.uint8)
        row, column = (self._positions(count, move, generator) for move in step)  # N frames
        video = torch.arange(count)[:, None, None, None]
        frame = torch.arange(self.frames)[None, :, None, None]
        inside = torch.arange(SIDE)
        rows = row[:, :, None, None] + inside[:, None]
        columns = column[:, :, None, None] + inside
        videos[video, frame, rows, columns] = pixels[:, None]
        return videos

    def _positions(
        self, count: int, move: int, generator: torch.Generator
    ) -> Int[Tensor, "N frames"]:
        """Return positions along one axis that stay on the canvas."""
        moved = move * torch.arange(self.frames)
        starts = self.size - SIDE - (self.frames - 1) * abs(move) + 1
        start = torch.randint(starts, (count, 1), generator=generator)
        return start + moved - moved.min()


def _dataset(
    x: UInt8[np.ndarray, "N frames height width"],
    labels: Labels,
    digits: Int[Tensor, " digits"],
) -> ArrayDataset:
    """Return the videos of some digits."""
    indices = (digits[:, None] * len(DIRECTIONS) + torch.arange(len(DIRECTIONS))).flatten()
    return ArrayDataset(x=x, labels=labels, indices=indices, axes=3)
