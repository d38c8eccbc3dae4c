"""Images of a data set, or of a folder of files."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from PIL import Image

from onescan.checks import in_a_line
from onescan.data import DataSet, Example, ImageDataset, ImageFormat
from onescan.data.image_dataset import find_classes, image_table
from onescan.data.images import ImageReader, Pixels, centre_box, decode, open_image, unit_pixels
from onescan.data.sources import find_source, walk
from onescan.evaluation.generation.source import Source
from onescan.evaluation.generation.stamp import digest, stamp
from onescan.shapes import Images, Labels

READERS = 8  # threads


class DataSource(Source):
    """The images of a data set, in its stored order."""

    def __init__(
        self,
        data: DataSet,
        *,
        name: str,
        stamp: str,
        size: tuple[int, int],
        class_names: tuple[str, ...],
    ) -> None:
        self.data, self.name, self.stamp = data, name, stamp
        self.size, self.class_names = size, class_names
        self._next: tuple[int, Iterator[Example]] = (-1, iter(()))

    def __len__(self) -> int:
        return len(self.data)

    def images(self, start: int, stop: int) -> tuple[Images, Labels | None]:
        place, rest = self._next
        if place != start:  # a stream cannot be looked up
            rest = (example for example, _ in islice(self.data.examples(seed=None), start, None))
        examples = list(islice(rest, stop - start))
        self._next = (stop, rest)
        if not examples:
            raise ValueError(f"{self.name} ends after {start} images, expected {len(self)}")
        size = -(-len(examples) // READERS) if self.data.decodes else len(examples)
        pieces = [examples[at : at + size] for at in range(0, len(examples), max(size, 1))]
        with ThreadPoolExecutor(READERS) as readers:
            batches = [loaded.batch for loaded in readers.map(self.data.read, pieces)]
        pixels = torch.cat([unit_pixels(batch[0]) for batch in batches])
        return pixels, torch.cat([batch[1] for batch in batches])


class FolderSource(Source):
    """Image files of a folder and those below it, in the order of their names."""

    def __init__(self, folder: Path, size: tuple[int, int] | None = None) -> None:
        kinds = tuple(Image.registered_extensions())
        self.files = [Path(file) for file in walk(str(folder)) if file.lower().endswith(kinds)]
        if not self.files:
            raise ValueError(f"{folder} holds no images")
        self.name, self.stamp = str(folder), digest([stamp(folder), size])
        self.size = size or _size(self.files[0])
        self.is_exact = size is None

    def __len__(self) -> int:
        return len(self.files)

    def images(self, start: int, stop: int) -> tuple[Images, Labels | None]:
        with ThreadPoolExecutor(READERS) as readers:
            return torch.stack(list(readers.map(self._read, self.files[start:stop]))), None

    def _read(self, file: Path) -> Pixels:
        """An image as it is if no size was asked for; else its middle, in that size."""
        height, width = self.size
        if self.is_exact and (size := _size(file)) != self.size:
            raise ValueError(
                f"{file} has {size[0]} x {size[1]} pixels, and {self.files[0]} has "
                f"{height} x {width}, expected images of one size"
            )
        crop = partial(centre_box, aspect=width / height, part=1.0)
        try:
            return unit_pixels(decode(file, channels=3, height=height, width=width, crop=crop))
        except ValueError as error:
            raise ValueError(f"{file} {error}") from error


def data_at(path: str, size: tuple[int, int]) -> Source:
    """Open all images at a path: class folders, parquet files, or images in no folder of a class.

    Of data with splits it is what is called train, or else the first. The middle of an image is
    brought to `size`, as is the custom for reference statistics.

    Raises:
        ValueError: nothing is there that could be read.
    """
    if Path(path).is_dir() and not _has_classes(Path(path)):
        return FolderSource(Path(path), size)
    source = find_source(path, None)
    split = "train" if "train" in source.splits else source.splits[0]
    opened = source.open({"train": split}, streaming=False)["train"]
    table = image_table(opened)
    raw = table.labels()
    classes = find_classes(path, table.label_type, (), raw)
    middle = ImageFormat(
        channels=3, height=size[0], width=size[1], mean=(0.0,) * 3, std=(1.0,) * 3, crop=1.0
    )
    data = ImageDataset(
        table=table,
        labels=classes.encode(raw, split),
        places=torch.arange(len(raw)),
        split=split,
        reader=ImageReader(format=middle, crop=None, on_error="raise"),
    )
    where = stamp(Path(path)) if Path(path).exists() else path
    name = path if len(source.splits) == 1 else f"{path}, {split}"
    return DataSource(
        data,
        name=name,
        stamp=digest([where, split, size]),
        size=size,
        class_names=classes.names,
    )


def _has_classes(folder: Path) -> bool:
    """Whether images are not right in the folder, or there are parquet files."""
    kinds = tuple(Image.registered_extensions())
    return not any(
        each.is_file() and each.name.lower().endswith(kinds) for each in folder.iterdir()
    )


def _size(file: Path) -> tuple[int, int]:
    try:
        with open_image(file) as image:
            return image.height, image.width
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as an image: {in_a_line(error)}") from error
