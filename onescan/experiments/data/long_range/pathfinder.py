"""Pathfinder of the Long Range Arena: are two discs connected by a dashed curve?

Images follow the published description (arXiv:1805.08315, arXiv:1906.01558, in the sizes of
arXiv:2011.04006). Each contains two long curves of equal length, two discs at their tips, and short
distractor curves. A scene is drawn independently of its label, around a tip for which two other
tips, the other end of its own curve and one end of the other curve, are about equally far from it
and from the image's center. Only then does the label decide which of the two gets the second disc.
So the positions of the discs and the number of white pixels reveal almost nothing about the label.
(The published generator starts both curves near each other.)
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Complex, Float, Int
from torch import Tensor

from onescan.checks import check_choice, check_positive
from onescan.experiments.data.base import DataConfig
from onescan.experiments.data.long_range.curves import (
    DIMENSIONS,
    Curve,
    FreeSpace,
    GrayImage,
    Scene,
    draw,
)
from onescan.experiments.data.long_range.rng import example_rng, random_below
from onescan.experiments.data.order import epoch_order
from onescan.experiments.data.sequences import (
    GeneratedSequences,
    LabeledSequence,
    SequenceSet,
    SequenceSplits,
)
from onescan.inputs.image_files import DAMAGE, open_image
from onescan.inputs.sequences import PixelFormat

Tips = Complex[np.ndarray, " cuts"]
Mismatch = Float[np.ndarray, "cuts cuts"]
HeldOut = Literal["val", "test"]

CONTOUR_LENGTHS = {"curv_baseline": 6, "curv_contour_length_9": 9, "curv_contour_length_14": 14}
"""Dashes of a long curve, by the name of the published set: easy, intermediate, hard."""

LRA_COUNTS = {"train": 160_000, "val": 20_000, "test": 20_000}
"""Number of examples per split in the Long Range Arena, for each size and length."""

CLASS_NAMES = ("apart", "joined")
TENTHS = {"train": (0, 8), "val": (8, 9), "test": (9, 10)}  # of a published folder
COLUMNS = 4  # read from a line of metadata: folder, name, number, label
LABELS = {"0": 0, "1": 1}

EXTRA_DASHES = 2  # drawn for a long curve and then cut off
ATTEMPTS = 4  # per dash of a curve
TOLERANCE = 1 / 16  # of the distances between discs, relative to the side

log = logging.getLogger("onescan")


class CurvePair(NamedTuple):
    """Two long curves, and three of their tips where discs may lie."""

    curves: tuple[Curve, Curve]
    anchor: complex
    joined: complex  # the other tip of the same curve
    separate: complex  # a tip of the other curve


@dataclass(frozen=True, kw_only=True)
class PathfinderConfig:
    """Variant of Pathfinder in the Long Range Arena; Path-X is side 128."""

    side: int = 32
    """Side of the image, in pixels: 32, 64, 128 or 256."""
    contour_length: int = 14
    """Dashes of a long curve: 6, 9 or 14. Distractor curves have a third of it."""
    seed: int = 0
    """Random seed of all examples."""


class Pathfinder:
    """Generator of random images and their labels.

    Of examples 0 and 1, 2 and 3, and so on, one is joined and one is not, in random order.

    Raises:
        ValueError: If side or contour_length is not a published one.

    >>> image, label = Pathfinder(PathfinderConfig(contour_length=6)).example("train", 0)
    >>> image.shape
    (32, 32)
    """

    def __init__(self, config: PathfinderConfig | None = None) -> None:
        self.config = config or PathfinderConfig()
        check_choice("side", self.config.side, DIMENSIONS)
        check_choice("contour_length", self.config.contour_length, CONTOUR_LENGTHS.values())
        self.dimensions = DIMENSIONS[self.config.side]

    def example(self, split: str, index: int) -> tuple[GrayImage, int]:
        """Generate one example, which depends only on the config, the split and the index.

        Args:
            split: train, val or test.
            index: Any whole number of at least 0.

        Returns:
            The image, and 1 if its discs are joined, else 0.

        Raises:
            ValueError: If split is unknown, or index is not a whole number of at least 0.
        """
        scene = self.scene(split, index)
        return draw(scene), scene.label

    def scene(self, split: str, index: int) -> Scene:
        """Return the contents of the image of an example."""
        rng = self._rng("scene", split, index)
        first = random_below(self._rng("label", split, index // 2), 2)
        label = (first + index) % 2
        space, pair = self._long_curves(rng)
        return Scene(
            side=self.config.side,
            curves=(*pair.curves, *self._short_curves(space, rng)),
            discs=(pair.anchor, pair.joined if label else pair.separate),
            label=label,
        )

    def _rng(self, name: str, split: str, index: int) -> Random:
        return example_rng(f"pathfinder {name}", seed=self.config.seed, split=split, index=index)

    def _long_curves(self, rng: Random) -> tuple[FreeSpace, CurvePair]:
        """Draw two long curves, until there are tips for the discs."""
        dashes = self.config.contour_length + EXTRA_DASHES
        while True:
            space = FreeSpace(
                side=self.config.side,
                margin=self.dimensions.radius + 0.5,
                style=self.dimensions.style,
            )
            first = space.grow(dashes, rng, attempts=ATTEMPTS * dashes)
            second = space.grow(dashes, rng, attempts=ATTEMPTS * dashes) if first else None
            pair = self._cut(first, second) if first and second else None
            if pair:
                return space, pair

    def _cut(self, *curves: Curve) -> CurvePair | None:
        """Cut two curves to their length where the tips match best; None if they match nowhere."""
        length = self.config.contour_length
        cuts = [[curve[at : at + length] for at in range(EXTRA_DASHES + 1)] for curve in curves]
        tips = [
            np.array([(cut[0].start, cut[-1].end) for cut in curve_cuts]).T for curve_cuts in cuts
        ]
        pair, lowest = None, TOLERANCE * self.config.side
        for one, end, far in product(range(2), repeat=3):
            mismatch = self._mismatch(tips[one][end], tips[one][1 - end], tips[1 - one][far])
            row, column = np.unravel_index(mismatch.argmin(), mismatch.shape)
            if mismatch[row, column] <= lowest:
                lowest = mismatch[row, column]
                pair = CurvePair(
                    curves=(cuts[one][row], cuts[1 - one][column]),
                    anchor=complex(tips[one][end, row]),
                    joined=complex(tips[one][1 - end, row]),
                    separate=complex(tips[1 - one][far, column]),
                )
        return pair

    def _mismatch(self, anchor: Tips, joined: Tips, separate: Tips) -> Mismatch:
        """Compare two tips by their distances from a third tip and from the image's center.

        Args:
            anchor: The third tip, for each cut of one curve.
            joined: The other tip of the same cut.
            separate: A tip of the other curve, for each of its cuts.

        Returns:
            Pixels, for each cut of one curve and each of the other; infinite where discs would be
            too close.
        """
        center = complex(self.config.side, self.config.side) / 2
        near, far = abs(joined - anchor)[:, None], abs(separate - anchor[:, None])
        difference = np.maximum(
            abs(near - far), abs(abs(joined - center)[:, None] - abs(separate - center))
        )
        min_distance = 2 * self.dimensions.radius + self.dimensions.style.clearance
        return np.where(np.minimum(near, far) < min_distance, np.inf, difference)

    def _short_curves(self, space: FreeSpace, rng: Random) -> list[Curve]:
        """Draw the distractor curves, except those for which there is no room."""
        dashes = self.config.contour_length // 3
        curves = [
            space.grow(dashes, rng, attempts=ATTEMPTS * dashes)
            for _ in range(self.dimensions.distractor_dashes // dashes)
        ]
        return [curve for curve in curves if curve is not None]


class PathfinderFolder:
    """Published images and their labels, in the order of the metadata.

    A folder such as `pathfinder32/curv_contour_length_14` contains `imgs/<n>/sample_<i>.png` and
    `metadata/<n>.npy`, which are text files despite their names. Each of their lines describes an
    image: its folder, its name, its number, its label, and measures that are ignored, separated by
    spaces.

    Empty image files, which the published sets contain, are skipped with a warning.

    Args:
        folder: Folder that contains `imgs` and `metadata`.

    Raises:
        FileNotFoundError: If there is no metadata, or an image is missing.
        ValueError: If a line of the metadata is malformed. The message names the file and the line.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        files = sorted(self.folder.glob("metadata/*.npy"), key=lambda file: (len(file.name), file))
        if not files:
            raise FileNotFoundError(f"there is no metadata/*.npy in {self.folder}")
        self.images = [row for file in files for row in self._read_metadata(file)]

    def __len__(self) -> int:
        return len(self.images)

    def example(self, index: int) -> tuple[GrayImage, int]:
        """Read one example.

        Returns:
            The image, and 1 if its discs are joined, else 0.

        Raises:
            ValueError: If the file is not an image, is damaged, or not square.
        """
        path, label = self.images[index]
        try:
            with open_image(path) as image:
                pixels = np.asarray(image.convert("L"))
        except DAMAGE as error:
            raise ValueError(f"{path} cannot be read as an image: {error}") from error
        if pixels.shape[0] != pixels.shape[1]:
            raise ValueError(
                f"{path} has {pixels.shape[1]} x {pixels.shape[0]} pixels, expected a square"
            )
        return pixels, label

    def _read_metadata(self, file: Path) -> Iterator[tuple[Path, int]]:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            raise ValueError(f"{file} is not text, expected the published metadata") from None
        for number, line in enumerate(lines, start=1):
            cells = line.split(" ")
            if len(cells) < COLUMNS or cells[COLUMNS - 1] not in LABELS:
                raise ValueError(
                    f"{file}, line {number} is {line!r}, expected a folder, a name, a number, and "
                    "0 or 1, separated by spaces"
                )
            image = self.folder / cells[0] / cells[1]
            if image.stat().st_size:
                yield image, LABELS[cells[COLUMNS - 1]]
            else:
                log.warning("skipped %s, which is empty", image)


@dataclass(frozen=True, kw_only=True)
class PathfinderDataConfig(DataConfig):
    """Pathfinder of the Long Range Arena: are two discs connected by a curve?

    The model reads the image's pixels row by row.
    """

    path: str | None = None
    """Folder of the published data, such as pathfinder32/curv_contour_length_14; None generates
    images.

    It is shuffled with images.seed and split into 80% train, 10% val and 10% test.
    """
    images: PathfinderConfig = field(default_factory=PathfinderConfig)
    """Variant of generated images; side 128 is Path-X. With path, side must match the images
    there."""
    train_examples: int = LRA_COUNTS["train"]
    """Number of generated training examples."""
    test_examples: int = LRA_COUNTS["test"]
    """Number of generated test examples."""
    test_split: HeldOut = "test"
    """Split to evaluate on: test, or val for model selection."""

    @property
    def max_tokens(self) -> int:
        return self.images.side**2

    def build(self) -> SequenceSplits:
        """Set up the generator, or list a folder's images.

        Raises:
            FileNotFoundError: If the folder or an image in it is missing.
            ValueError: If a number is out of range, path is combined with settings of generated
                images, or the metadata is malformed. The message names the file and the line.
        """
        check_choice("data.test_split", self.test_split, get_args(HeldOut))
        for name in ("train_examples", "test_examples"):
            check_positive(**{f"data.{name}": getattr(self, name)})
        format = PixelFormat(height=self.images.side, width=self.images.side)
        train, test = self._generated() if self.path is None else self._read(format)
        return SequenceSplits(train=train, test=test, class_names=CLASS_NAMES, format=format)

    def _generated(self) -> tuple[SequenceSet, SequenceSet]:
        generator = Pathfinder(self.images)
        return (
            GeneratedSequences(generator=generator, split="train", count=self.train_examples),
            GeneratedSequences(
                generator=generator, split=self.test_split, count=self.test_examples
            ),
        )

    def _read(self, format: PixelFormat) -> tuple[SequenceSet, SequenceSet]:
        images = PathfinderConfig(side=self.images.side, seed=self.images.seed)
        if self != PathfinderDataConfig(path=self.path, images=images, test_split=self.test_split):
            raise ValueError(
                f"data.path is {self.path!r}, but data.images.contour_length, data.train_examples "
                "or data.test_examples is set too; they are only for generated images"
            )
        folder = PathfinderFolder(Path(str(self.path)))
        order = epoch_order(len(folder), seed=self.images.seed, epoch=0)
        train, test = (
            PathfinderFiles(folder=folder, indices=_part(order, split), format=format)
            for split in ("train", self.test_split)
        )
        if not len(train) or not len(test):
            raise ValueError(f"data.path is {self.path!r}, which has too few images: {len(folder)}")
        return train, test


@dataclass(frozen=True, kw_only=True)
class PathfinderFiles(SequenceSet):
    """Some of the images of a folder."""

    folder: PathfinderFolder
    indices: Int[Tensor, " examples"]
    format: PixelFormat

    def __len__(self) -> int:
        return len(self.indices)

    def example(self, index: int) -> LabeledSequence:
        row = int(self.indices[index])
        image, label = self.folder.example(row)
        try:
            return LabeledSequence(self.format.encode(image), label)
        except ValueError as error:
            path, _ = self.folder.images[row]
            raise ValueError(f"{path}: {error}; is data.images.side right?") from error


def _part(order: Int[Tensor, " images"], split: str) -> Int[Tensor, " part"]:
    begin, end = (len(order) * tenths // 10 for tenths in TENTHS[split])
    return order[begin:end]
