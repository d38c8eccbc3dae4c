"""Pathfinder as a data set: images drawn when they are read, or those of a published folder."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from jaxtyping import Int
from torch import Tensor

from onescan.checks import check_choice, check_positive
from onescan.data.base import DataConfig
from onescan.data.long_range.pathfinder import LRA_COUNTS, Pathfinder, PathfinderConfig
from onescan.data.long_range.pathfinder_files import PathfinderFolder
from onescan.data.long_range.pixels import PixelFormat
from onescan.data.order import epoch_order
from onescan.data.sequences import LabelledSequence, SequenceSet, SequenceSplits

HeldOut = Literal["val", "test"]
CLASS_NAMES = ("apart", "joined")
TENTHS = {"train": (0, 8), "val": (8, 9), "test": (9, 10)}  # of a published folder


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
        """Make ready to draw, or list a folder's images.

        Raises:
            FileNotFoundError: the folder or an image in it is missing.
            ValueError: a number is out of range; or a path is given together with what is drawn, or
                its metadata is malformed: says the file and the line.
        """
        check_choice("data.test_split", self.test_split, get_args(HeldOut))
        check_positive(
            **{
                "data.train_examples": self.train_examples,
                "data.test_examples": self.test_examples,
            }
        )
        side = self.images.side
        format = PixelFormat(height=side, width=side)
        train, test = self._drawn(format) if self.path is None else self._listed(self.path, format)
        return SequenceSplits(train=train, test=test, class_names=CLASS_NAMES, format=format)

    def _drawn(self, format: PixelFormat) -> tuple[SequenceSet, SequenceSet]:
        generator, counts = (
            Pathfinder(self.images),
            {"train": self.train_examples, self.test_split: self.test_examples},
        )
        train, test = (
            DrawnPathfinder(generator=generator, split=split, count=count, format=format)
            for split, count in counts.items()
        )
        return train, test

    def _listed(self, path: str, format: PixelFormat) -> tuple[SequenceSet, SequenceSet]:
        drawn = PathfinderConfig(side=self.images.side, seed=self.images.seed)
        if self != PathfinderDataConfig(path=path, images=drawn, test_split=self.test_split):
            raise ValueError(
                f"data.path is {path!r}, whose images are as they are; expected no "
                "data.images.contour_length, data.train_examples or data.test_examples with it"
            )
        folder = PathfinderFolder(Path(path))
        order = epoch_order(len(folder), seed=self.images.seed, epoch=0)
        train, test = (
            PathfinderFiles(folder=folder, places=_part(order, split), format=format)
            for split in ("train", self.test_split)
        )
        if not len(train) or not len(test):
            raise ValueError(f"data.path is {path!r}, which holds too few images: {len(folder)}")
        return train, test


@dataclass(frozen=True, kw_only=True)
class DrawnPathfinder(SequenceSet):
    """Images that are drawn whenever they are read, the same each time."""

    generator: Pathfinder
    split: str
    count: int
    format: PixelFormat

    def __len__(self) -> int:
        return self.count

    def example(self, place: int) -> LabelledSequence:
        image, label = self.generator.example(self.split, place)
        return LabelledSequence(self.format.encode(image), label)


@dataclass(frozen=True, kw_only=True)
class PathfinderFiles(SequenceSet):
    """Some of a folder's images."""

    folder: PathfinderFolder
    places: Int[Tensor, " places"]
    format: PixelFormat

    def __len__(self) -> int:
        return len(self.places)

    def example(self, place: int) -> LabelledSequence:
        listed = int(self.places[place])
        image, label = self.folder.example(listed)
        try:
            return LabelledSequence(self.format.encode(image), label)
        except ValueError as error:
            raise ValueError(
                f"{self.folder.listed[listed][0]}: {error}; is data.images.side right?"
            ) from error


def _part(order: Int[Tensor, " places"], split: str) -> Int[Tensor, " part"]:
    begin, end = (len(order) * tenths // 10 for tenths in TENTHS[split])
    return order[begin:end]
