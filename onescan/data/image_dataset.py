"""Images of anything that the datasets library reads, each read when a batch needs it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from onescan.checks import check_positive
from onescan.data.base import DataConfig, Example, LoadedBatch, stratified_split
from onescan.data.crop import RandomCropConfig
from onescan.data.image_columns import ColumnNames, ImageTable, find_classes, image_table
from onescan.data.image_reader import EncodedImage, ImageReader, OnError
from onescan.data.image_source import Chosen, ImageSource, find_source
from onescan.data.image_stream import ImageStream
from onescan.data.images import ImageFormat, ImageSet, ImageSplits
from onescan.shapes import Labels


@dataclass(frozen=True, kw_only=True)
class ImageDatasetConfig(DataConfig):
    """Labelled images: a folder with one subfolder per class, parquet files, or a hub dataset.

    Images are FOLDER/CLASS/IMAGE or, if a folder is called train, validation, valid, val or test,
    FOLDER/SPLIT/CLASS/IMAGE. The folder of a class may contain subfolders. Links are followed;
    names that start with a dot or two underscores are ignored. Parquet files are assigned to splits
    by their own and their folders' names.

    Parquet files are copied once into the cache of the datasets library for random access; with
    `streaming`, they are read in place.
    """

    path: str
    """Folder, parquet file, or name of a dataset on the Hugging Face hub."""
    name: str | None = None
    """Configuration of a hub dataset."""
    train_split: str = "train"
    """Split to train on."""
    test_split: str | None = None
    """Split to evaluate on; None uses validation or test, or else holds out a part of
    train_split."""
    test_fraction: float = 0.1
    """Fraction of each class held out if there is no test split."""
    split_seed: int = 0
    """Random seed of the train-test split."""
    image_column: str | None = None
    """Column of the images; None uses the only image column."""
    label_column: str | None = None
    """Column of the labels; None uses the only column of class labels, or the one named label."""
    class_names: tuple[str, ...] = ()
    """Names of the classes in order, if the data does not define them."""
    image_size: tuple[int, int] = (224, 224)
    """Height and width of the model's input, in pixels."""
    channels: Literal[1, 3] = 3
    """1 for grayscale, 3 for colour."""
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    """Mean of each channel, subtracted; pixel values are 0 to 1."""
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    """Standard deviation of each channel, divided by."""
    train_crop: RandomCropConfig | None = field(default_factory=RandomCropConfig)
    """Random resized crop of training images; None treats them like test images."""
    test_crop: float | None = 0.875
    """Center crop of test images, as a fraction of the shorter side; None resizes the whole
    image."""
    on_error: OnError = "raise"
    """On an unreadable image, end the run (raise), or skip and count it (skip)."""
    streaming: bool = False
    """Read images in stored order, shuffled in blocks, for data too large to copy and access at
    random.

    With several processes, each reads the bytes of every image and decodes its own part of a batch.
    """
    train_examples: int | None = None
    """Images per epoch of a stream, which may hold more; None takes the number from the data."""
    shuffle_block: int = 1024
    """Consecutive images of a stream that are shuffled together, held in memory."""

    def build(self) -> ImageSplits:
        """Find the data, and read its labels.

        Raises:
            ImportError: the datasets library is not installed.
            ValueError: a field is out of range; the data is not there, is damaged, lacks a split or
                a column, has a single class or a label out of range; or it cannot be streamed.
        """
        self._check()
        source = find_source(self.path, self.name)
        chosen = source.choose(self.train_split, self.test_split)
        return _stream(self, source, chosen) if self.streaming else _look_up(self, source, chosen)

    def columns(self) -> ColumnNames:
        """Say what the user called the columns."""
        return ColumnNames(self.image_column, self.label_column)

    def format(self) -> ImageFormat:
        """Say what the model reads."""
        height, width = self.image_size
        return ImageFormat(
            channels=self.channels,
            height=height,
            width=width,
            mean=self.mean,
            std=self.std,
            crop=self.test_crop,
        )

    def reader(self) -> ImageReader:
        """Say how images are read."""
        crop = self.train_crop.build() if self.train_crop else None
        return ImageReader(format=self.format(), crop=crop, on_error=self.on_error)

    def _check(self) -> None:
        height, width = self.image_size
        check_positive(**{"data.image_size": min(height, width)})
        for name in ("mean", "std"):
            if len(getattr(self, name)) != self.channels:
                raise ValueError(
                    f"data.{name} is {getattr(self, name)}, expected {self.channels} numbers: "
                    f"data.channels is {self.channels}"
                )
        check_positive(**{"data.std": min(self.std), "data.shuffle_block": self.shuffle_block})
        if self.test_crop is not None and not 0 < self.test_crop <= 1:
            raise ValueError(f"data.test_crop is {self.test_crop}, expected above 0 and at most 1")
        if self.train_examples is not None:
            check_positive(**{"data.train_examples": self.train_examples})
            if not self.streaming:
                raise ValueError("data.train_examples is for streams, but data.streaming is off")


@dataclass(frozen=True, kw_only=True)
class ImageDataset(ImageSet):
    """Rows of a table that the datasets library can look up.

    Attributes:
        table: all rows of a split, with images undecoded.
        labels: the class of each row.
        places: the rows that are this data set's, in its order.
        split: what the rows are called.
        reader: what decodes them.
    """

    decodes = True
    table: ImageTable
    labels: Labels
    places: Int[Tensor, " places"]
    split: str
    reader: ImageReader

    def __len__(self) -> int:
        return len(self.places)

    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        rows = [int(self.places[example.source]) for example in examples]
        images = [
            EncodedImage.of(image, int(self.labels[row]), f"row {row} of {self.split}")
            for image, row in zip(self.table.rows[rows][self.table.image], rows, strict=True)
        ]
        return self.reader.read(images, [example.seed for example in examples])


def _look_up(config: ImageDatasetConfig, source: ImageSource, chosen: Chosen) -> ImageSplits:
    """Open tables, and read their labels."""
    reader, opened = config.reader(), source.open(chosen, streaming=False)
    tables = {role: image_table(rows, config.columns()) for role, rows in opened.items()}
    raw = {role: table.labels() for role, table in tables.items()}
    classes = find_classes(
        config.path, tables["train"].label_type, config.class_names, raw["train"]
    )
    sets = {
        role: ImageDataset(
            table=table,
            labels=classes.encode(raw[role], chosen[role]),
            places=torch.arange(len(raw[role])),
            split=chosen[role],
            reader=reader,
        )
        for role, table in tables.items()
    }
    if "test" not in sets:
        places = stratified_split(
            sets["train"].labels, fraction=config.test_fraction, seed=config.split_seed
        )
        learnt, held = (replace(sets["train"], places=part) for part in places)
        sets = {"train": learnt, "test": held}
    return ImageSplits(**sets, class_names=classes.names, format=config.format())


def _stream(config: ImageDatasetConfig, source: ImageSource, chosen: Chosen) -> ImageSplits:
    """Open streams, whose labels are read with their images."""
    if source.builder == "imagefolder":
        raise ValueError(
            f"data.streaming is on, but {config.path} is a folder of image files, expected it off: "
            "each file is read when it is needed anyway, and a stream would come class by class"
        )
    if "test" not in chosen:
        raise ValueError(
            f"data.streaming is on, but {config.path} has no split to be judged on, expected "
            "data.test_split: a stream holds nothing out"
        )
    reader, streams = config.reader(), source.open(chosen, streaming=True)
    tables = {role: image_table(rows, config.columns()) for role, rows in streams.items()}
    classes = find_classes(config.path, tables["train"].label_type, config.class_names, None)
    train, test = (source.count(chosen[role], streams[role]) for role in ("train", "test"))
    train = config.train_examples or train
    if train is None:
        raise ValueError(
            f"data.train_examples is None, expected a number: {config.path} does not tell its own"
        )
    counts = {"train": train, "test": tables["test"].count() if test is None else test}
    sets = {
        role: ImageStream(
            table=table,
            classes=classes,
            split=chosen[role],
            files=source.parquet_files(chosen[role]),
            count=counts[role],
            block=config.shuffle_block,
            reader=reader,
        )
        for role, table in tables.items()
    }
    return ImageSplits(**sets, class_names=classes.names, format=config.format())
