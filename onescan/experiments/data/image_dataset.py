"""Labeled images that the datasets library opens, by random access or as a stream."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from onescan.checks import check_positive
from onescan.experiments.data.base import (
    DataConfig,
    DataState,
    Example,
    LoadedBatch,
    OnError,
    check_data_state,
    held_out_note,
    listed,
    missing_classes_note,
    similar_names_note,
    stratified_split,
)
from onescan.experiments.data.images import (
    EncodedImage,
    ImageReader,
    ImageSet,
    ImageSplits,
    RandomCropConfig,
)
from onescan.experiments.data.order import Block, BlockStart, Mark, derive_seed, read_blocks
from onescan.experiments.data.sources import (
    GROUP,
    Chosen,
    DatasetSource,
    find_source,
    import_datasets,
    read_groups,
)
from onescan.inputs.image_files import read_header
from onescan.inputs.images import ImageFormat, check_constants
from onescan.shapes import Labels

LABEL_NAMES = ("label", "labels", "class", "fine_label", "target")
MIN_CLASSES = 2
MAX_CLASSES = 1_000_000  # more are a mistake, such as a column of other numbers
SURVEYED = 1_000  # images whose headers are read to describe how they are converted
SHARP = 0.01  # fraction of a side that may be cropped or stretched without a note
OTHER_COLORS = ("CMYK", "YCbCr", "LAB", "HSV")  # modes that are converted to RGB
FIRST: DataState = {"block": 0, "turn": 0, "row": 0, "state": None}


@dataclass(frozen=True, kw_only=True)
class ImageDatasetConfig(DataConfig):
    """Labeled images: a folder with one subfolder per class, parquet files, or a hub dataset.

    Images are FOLDER/CLASS/IMAGE or, if a folder is called train, validation, valid, val or test,
    FOLDER/SPLIT/CLASS/IMAGE. The folder of a class may contain subfolders. Links are followed;
    names that start with a dot or two underscores are left out. Parquet files are assigned to
    splits by their own and their folders' names.

    Parquet files are copied once into the cache of the datasets library for random access; with
    `streaming`, they are read in place.
    """

    path: str
    """Folder, parquet file, or name of a dataset on the Hugging Face Hub."""
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
    labeled: bool = True
    """Whether images have classes. With False, which is for denoisers and folders of images, all
    images of a folder and its subfolders are of one class."""
    image_size: tuple[int, int] = (224, 224)
    """Height and width of the model's input, in pixels."""
    channels: Literal[1, 3] = 3
    """1 for grayscale, 3 for color."""
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
        """Find the data and read its labels.

        Raises:
            ImportError: If the datasets library is not installed.
            ValueError: If a field is out of range; if the data does not exist, is damaged, lacks a
                split or a column, or has a single class or a label out of range; or if it cannot
                be streamed.
        """
        reader = self.reader()
        source = find_source(self.path, self.name)
        chosen = source.choose(self.train_split, self.test_split)
        open_sets = self._open_streams if self.streaming else self._open_tables
        notes = [*source.notes]
        if unused := [split for split in source.splits if split not in chosen.values()]:
            notes.append(f"splits not used: {listed(unused)}")
        sets, classes = open_sets(source, chosen, reader, notes)
        notes += similar_names_note(classes.names)
        if isinstance(train := sets["train"], ImageDataset):
            for part, data in (("training", train), ("test", sets["test"])):
                if isinstance(data, ImageDataset):
                    labels = data.labels[data.indices]
                    notes += missing_classes_note(labels, classes.names, part=part)
            notes += describe_images(train)
        return ImageSplits(
            train=train,
            test=sets["test"],
            class_names=classes.names,
            format=reader.format,
            notes=tuple(notes),
        )

    def reader(self) -> ImageReader:
        """Check the fields and return what decodes the images.

        Raises:
            ValueError: If a field is out of range.
        """
        height, width = self.image_size
        sizes = {"data.image_size": min(height, width), "data.shuffle_block": self.shuffle_block}
        check_positive(**sizes)
        check_constants(self.channels, **{"data.mean": self.mean, "data.std": self.std})
        if self.test_crop is not None and not 0 < self.test_crop <= 1:
            raise ValueError(f"data.test_crop is {self.test_crop}, expected above 0 and at most 1")
        if self.train_examples is not None:
            check_positive(**{"data.train_examples": self.train_examples})
            if not self.streaming:
                raise ValueError("data.train_examples is for streams, but data.streaming is off")
        format = ImageFormat(
            channels=self.channels,
            height=height,
            width=width,
            mean=self.mean,
            std=self.std,
            crop=self.test_crop,
        )
        crop = self.train_crop.build() if self.train_crop else None
        return ImageReader(format=format, crop=crop, on_error=self.on_error)

    def _tables(
        self, source: DatasetSource, chosen: Chosen, notes: list[str], *, streaming: bool
    ) -> dict[str, "ImageTable"]:
        opened = source.open(chosen, streaming=streaming, notes=notes, labeled=self.labeled)
        tables = {
            role: image_table(rows, self.image_column, self.label_column)
            for role, rows in opened.items()
        }
        train = tables["train"]
        columns = [
            name for name in opened["train"].features if name not in (train.image, train.label)
        ]
        if columns:
            notes.append(f"columns not used: {listed(columns)}")
        return tables

    def _open_tables(
        self, source: DatasetSource, chosen: Chosen, reader: ImageReader, notes: list[str]
    ) -> tuple[dict[str, ImageSet], "Classes"]:
        tables = self._tables(source, chosen, notes, streaming=False)
        labels = {role: table.labels() for role, table in tables.items()}
        kind = tables["train"].label_type
        least = MIN_CLASSES if self.labeled else 1
        classes = find_classes(self.path, kind, self.class_names, labels["train"], least=least)
        if not (self.class_names or classes.are_text or getattr(kind, "names", None)):
            notes.append("classes are numbered, because the labels have no names")
        sets = {
            role: ImageDataset(
                table=table,
                labels=classes.encode(labels[role], chosen[role]),
                indices=torch.arange(len(labels[role])),
                split=chosen[role],
                reader=reader,
            )
            for role, table in tables.items()
        }
        if "test" not in sets:
            train = sets["train"]
            parts = stratified_split(
                train.labels,
                fraction=self.test_fraction,
                seed=self.split_seed,
                names=classes.names,
            )
            sets = {
                role: replace(train, indices=indices)
                for role, indices in zip(("train", "test"), parts, strict=True)
            }
            notes.append(held_out_note(len(sets["test"]), len(train)))
        return {**sets}, classes

    def _open_streams(
        self, source: DatasetSource, chosen: Chosen, reader: ImageReader, notes: list[str]
    ) -> tuple[dict[str, ImageSet], "Classes"]:
        """Open streams, whose labels are read with their images."""
        if source.builder == "imagefolder":
            raise ValueError(
                f"data.streaming is on, but {self.path} is a folder of image files: turn it off; "
                "files are read when needed anyway, and a stream would be sorted by class"
            )
        if "test" not in chosen:
            raise ValueError(
                f"data.streaming is on, but {self.path} has no split to evaluate on: set "
                "data.test_split, because nothing can be held out of a stream"
            )
        tables = self._tables(source, chosen, notes, streaming=True)
        classes = find_classes(self.path, tables["train"].label_type, self.class_names, None)
        counts = {role: source.count(chosen[role], tables[role].rows) for role in tables}
        train = self.train_examples or counts["train"]
        if train is None:
            raise ValueError(
                f"data.train_examples is None, expected a number, because {self.path} does not "
                "record how many images it has"
            )
        test = tables["test"].count() if counts["test"] is None else counts["test"]
        sets = {
            role: ImageStream(
                table=tables[role],
                classes=classes,
                split=chosen[role],
                files=source.parquet_files(chosen[role]),
                count=count,
                block=self.shuffle_block,
                reader=reader,
            )
            for role, count in (("train", train), ("test", test))
        }
        return {**sets}, classes


# Columns and classes


@dataclass(frozen=True, kw_only=True)
class ImageTable:
    """The image and label columns of a dataset of the datasets library, images undecoded.

    Attributes:
        rows: A Dataset, or an IterableDataset.
        image: Name of the image column.
        label: Name of the label column.
        label_type: Feature of the label column.
    """

    rows: Any
    image: str
    label: str
    label_type: Any

    def labels(self) -> list[Any]:
        """Read all labels of a Dataset."""
        labels: list[Any] = self.rows.select_columns([self.label])[:][self.label]
        return labels

    def count(self) -> int:
        """Count the rows of an IterableDataset by reading through it."""
        return sum(1 for _ in self.rows.select_columns([self.label]))


def image_table(
    rows: Any, image_column: str | None = None, label_column: str | None = None
) -> ImageTable:
    """Select the columns of images and labels.

    Args:
        rows: A Dataset or IterableDataset.
        image_column: Name of the column; None for the only one that holds images.
        label_column: Name of the column; None for the only one that can be the labels.

    Raises:
        ValueError: If a column does not exist, has another type, or is not the only candidate.
    """
    datasets, features = import_datasets(), rows.features
    if features is None:
        raise ValueError("data.streaming is on, but this stream does not declare its columns")
    images = [name for name, feature in features.items() if _holds_images(feature)]
    classes = [name for name in features if isinstance(features[name], datasets.ClassLabel)]
    labels = classes or [name for name in LABEL_NAMES if name in features]
    image = _choose_column("image_column", image_column, images, features)
    label = _choose_column("label_column", label_column, labels, features)
    if image not in images:
        raise ValueError(f"data.image_column is {image!r}, which holds no images")
    kind = str(getattr(features[label], "dtype", type(features[label]).__name__))
    if not re.fullmatch(r"u?int\d+|(large_)?string", kind):
        raise ValueError(
            f"data.label_column is {label!r}, which holds {kind}, expected whole numbers or strings"
        )
    undecoded = rows.select_columns([image, label]).cast_column(image, datasets.Image(decode=False))
    return ImageTable(rows=undecoded, image=image, label=label, label_type=features[label])


def _choose_column(
    field: str, name: str | None, candidates: Collection[str], features: Mapping[str, Any]
) -> str:
    if name is None and len(candidates) == 1:
        return next(iter(candidates))
    if name is None or name not in features:
        found = f"found {' and '.join(candidates) or 'none'}; " if name is None else ""
        raise ValueError(f"data.{field} is {name!r}, {found}expected one of: {', '.join(features)}")
    return name


def _holds_images(feature: Any) -> bool:
    """Whether a feature is an image, its bytes, or its bytes and path."""
    datasets = import_datasets()
    if isinstance(feature, Mapping):
        return "bytes" in feature and set(feature) <= {"bytes", "path"}
    is_bytes = isinstance(feature, datasets.Value) and feature.dtype.endswith("binary")
    return isinstance(feature, datasets.Image) or is_bytes


@dataclass(frozen=True)
class Classes:
    """The classes of a dataset.

    Attributes:
        names: Names of the classes, in order.
        are_text: Whether labels are these names; else they are indices.
    """

    names: tuple[str, ...]
    are_text: bool = False

    @cached_property
    def indices(self) -> dict[Any, int]:
        """The class index of each possible label."""
        numbers = range(len(self.names))
        return dict(zip(self.names if self.are_text else numbers, numbers, strict=True))

    def index(self, label: Any, row: str) -> int:
        """Return the class index of a row's label.

        Raises:
            ValueError: If there is no label, or it belongs to no class.
        """
        if label in self.indices:
            return self.indices[label]
        if label is None:
            raise ValueError(f"{row} has no label")
        expected = (
            f"one of {', '.join(self.names)}" if self.are_text else f"0 to {len(self.names) - 1}"
        )
        raise ValueError(f"{row} has the label {label!r}, expected {expected}")

    def encode(self, labels: Iterable[Any], split: str) -> Labels:
        """Return the class index of each label of a split.

        Raises:
            ValueError: If a label is missing or belongs to no class; names the row.
        """
        indices = (self.index(label, f"row {row} of {split}") for row, label in enumerate(labels))
        return torch.tensor(list(indices), dtype=torch.long)


def find_classes(
    path: str,
    feature: Any,
    names: tuple[str, ...],
    labels: Collection[Any] | None,
    *,
    least: int = MIN_CLASSES,
) -> Classes:
    """Determine the classes from the data or the config.

    Args:
        path: Path of the data, as the user wrote it.
        feature: Type of the label column.
        names: Names in the config; () takes them from the data.
        labels: All training labels; None if they are not known yet, as in a stream.
        least: Smallest number of classes.

    Raises:
        ValueError: If neither gives names, they give different names, there are too few classes, or
            a label is too large for a class.
    """
    declared = tuple(getattr(feature, "names", None) or ())
    if declared and names and declared != names:
        raise ValueError(
            f"data.class_names is {names}, but the classes of the data are {declared}; an empty "
            "data.class_names takes them from the data, and onescan train image_classifier infers "
            "all such settings"
        )
    if labels is None and not (declared or names):
        raise ValueError(
            "data.class_names is (), expected names, because this stream does not declare its "
            "classes"
        )
    present = set(declared or names) if labels is None else set(labels) - {None}
    are_text = getattr(feature, "dtype", "") in ("string", "large_string")
    classes = Classes(declared or names or _names_of(present), are_text)
    if min(len(classes.names), len(present)) < least:
        raise ValueError(
            f"data.path is {path!r}, where the training images are all of one class, expected two "
            "or more"
        )
    return classes


def _names_of(labels: Collection[Any]) -> tuple[str, ...]:
    """Name classes by their labels, which are names or numbers from 0."""
    if all(isinstance(label, str) for label in labels):
        return tuple(sorted(labels))
    if max(labels) >= MAX_CLASSES:
        raise ValueError(
            f"the training images have labels up to {max(labels)}, expected less than "
            f"{MAX_CLASSES}: is data.label_column right?"
        )
    return tuple(str(number) for number in range(max(labels) + 1))


# Datasets


@dataclass(frozen=True, kw_only=True)
class ImageDataset(ImageSet):
    """Rows of a Dataset, read by index.

    Attributes:
        table: All rows of a split.
        labels: Class index of each row.
        indices: Rows that belong to this dataset, in its order.
        split: Name of the split.
        reader: Decodes the images.
    """

    decodes = True
    table: ImageTable
    labels: Labels
    indices: Int[Tensor, " examples"]
    split: str
    reader: ImageReader

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        images = self.encoded([example.source for example in examples])
        return self.reader.read(images, [example.seed for example in examples])

    def encoded(self, examples: Sequence[int]) -> list[EncodedImage]:
        """Return undecoded images by their index in this dataset."""
        rows = [int(self.indices[example]) for example in examples]
        return [
            _encoded(image, int(self.labels[row]), f"row {row} of {self.split}")
            for image, row in zip(self.table.rows[rows][self.table.image], rows, strict=True)
        ]


def describe_images(data: ImageDataset) -> list[str]:
    """Describe how images are converted, from the headers of at most `SURVEYED` of them.

    Images that would have to be downloaded are not read.
    """
    count = min(len(data), SURVEYED)
    indices = [i * len(data) // count for i in range(count)]
    conversions: Counter[str] = Counter()
    visible, stretched, format = 1.0, 1.0, data.reader.format
    for begin in range(0, count, GROUP):
        for image in data.encoded(indices[begin : begin + GROUP]):
            if isinstance(image.content, str) and "://" in image.content:
                return []
            try:
                header = read_header(image.open(), decodes=False)
            except (OSError, ValueError):
                conversions["cannot be read"] += 1
                continue
            left, upper, right, lower = format.box(header.width, header.height)
            visible = min(visible, (right - left) / header.width, (lower - upper) / header.height)
            ratio = (right - left) * format.height / ((lower - upper) * format.width)
            stretched = max(stretched, ratio, 1 / ratio)
            conversions["are turned upright by their EXIF orientation"] += not header.is_upright
            conversions["can be transparent; transparent parts become black"] += header.has_alpha
            conversions["have 16 bits per channel, which are rounded to 8"] += header.has_16_bits
            conversions["have several frames or pages, of which the first is read"] += (
                header.has_frames
            )
            if format.channels == 1 and not header.is_gray:
                conversions["are converted to grayscale"] += 1
            elif header.mode in OTHER_COLORS:
                conversions[f"are converted from {header.mode} to RGB"] += 1
    measured = f"{count:,} training images"
    if count < len(data):
        measured = f"a sample of {count:,} training images"
    notes = [f"{number:,} of {measured} {what}" for what, number in conversions.items() if number]
    if 1 - visible > SHARP:
        where = " in evaluation" if data.reader.crop else ""
        notes.append(
            f"images are cropped to the center: up to {1 - visible:.0%} of a side is cut off{where}"
        )
    if stretched - 1 > SHARP:
        notes.append(
            f"images are stretched to another aspect ratio, by a factor of up to {stretched:.2f}; "
            "--data.test-crop 1 crops them to the center instead"
        )
    return notes


@dataclass(frozen=True, kw_only=True)
class ImageStream(ImageSet):
    """Rows of an IterableDataset, read shard by shard and shuffled in blocks.

    A DataState describes where the current block begins: `block` is its number, `turn` its shard's
    position in the shuffled order, `row` its first row in that shard, and `state` the position of
    the datasets library before the group of rows that the previous row is in.

    Attributes:
        table: The stream.
        classes: Its classes.
        split: Name of the split.
        files: The file of each shard, if known.
        count: Rows per epoch. In stored order, the stream is read to its end regardless.
        block: Consecutive rows that are shuffled with each other.
        reader: Decodes the images.
    """

    decodes = True
    table: ImageTable
    classes: Classes
    split: str
    files: Sequence[str]
    count: int
    block: int
    reader: ImageReader

    def __len__(self) -> int:
        return self.count

    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        return self.reader.read(
            [example.source for example in examples], [example.seed for example in examples]
        )

    def examples(
        self,
        *,
        seed: int | None,
        epoch: int = 0,
        start: int = 0,
        repeats: int = 1,
        data_state: DataState | None = None,
    ) -> Iterator[tuple[Example, DataState | None]]:
        first, limit = data_state or FIRST, None if seed is None else self.count
        check_data_state(first, FIRST)
        mark = {"row": first["row"], "state": first["state"]}
        blocks = read_blocks(
            self._read_shard,
            shards=self.table.rows.num_shards,
            size=self.block,
            start=BlockStart(first["block"], first["turn"], mark),
            seed=seed,
            epoch=epoch,
        )
        begin = first["block"] * self.block * repeats
        for block in blocks:
            end = begin + len(block.items) * repeats
            for index in range(max(begin, start), end if limit is None else min(end, limit)):
                example_seed = None if seed is None else derive_seed(seed, "example", epoch, index)
                image = block.items[(index - begin) // repeats]
                yield Example(image, example_seed), _state(block, is_last=index + 1 == end)
            begin = end
            if limit is not None and end >= limit:
                return
        if limit is not None and begin < limit:
            raise ValueError(
                f"the stream {self.split} ended after {begin // repeats} images, expected "
                f"{math.ceil(limit / repeats)}: is data.train_examples right?"
            )

    def _read_shard(self, index: int, mark: Mark) -> Iterator[tuple[EncodedImage, Mark]]:
        rows = self.table.rows
        name = self.files[index] if self.files else f"shard {index} of {self.split}"
        shard = rows.shard(num_shards=rows.num_shards, index=index)
        first = mark.get("row", 0)
        saved = max(first - 1, 0) // GROUP * GROUP  # start of the previous row's group
        groups = read_groups(shard, name, first=saved, state=mark.get("state"))
        for begin, columns, state in groups:
            images, labels = columns[self.table.image], columns[self.table.label]
            for row in range(max(first, begin), begin + len(labels)):
                location = f"row {row} of {name}"
                label = self.classes.index(labels[row - begin], location)
                image = _encoded(images[row - begin], label, location)
                yield image, {"row": row + 1, "state": state}


def _state(block: Block[EncodedImage], *, is_last: bool) -> DataState:
    """Return the state after an example: the start of its block or, if it is the last, the next."""
    start = block.end if is_last else block.start
    return {**FIRST, "block": start.block, "turn": start.shard, **start.mark}


def _encoded(image: dict[str, Any] | None, label: int, row: str) -> EncodedImage:
    """Convert an undecoded image of the datasets library."""
    content, path = (image or {}).get("bytes"), (image or {}).get("path")
    name = f"{row} ({path})" if path else row
    return EncodedImage(path if content is None else content, label, name)
