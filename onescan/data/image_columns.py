"""Which columns of a table hold images and labels, and what the labels stand for."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from onescan.data.image_source import import_datasets
from onescan.shapes import Labels

LABEL_NAMES = ("label", "labels", "class", "fine_label", "target")
FEW = 2  # classes that make a problem
MANY = 1_000_000  # classes, more than which are a slip: labels that are numbers of something else


class ColumnNames(NamedTuple):
    """What a user called the columns; None for the only one that it could be."""

    image: str | None
    label: str | None


@dataclass(frozen=True, kw_only=True)
class ImageTable:
    """A table or a stream of images that the datasets library does not decode, and their labels."""

    rows: Any
    image: str
    label: str
    label_type: Any

    def labels(self) -> list[Any]:
        """Read all labels of a table."""
        labels: list[Any] = self.rows.select_columns([self.label])[:][self.label]
        return labels

    def count(self) -> int:
        """Read through a stream, to see how long it is."""
        return sum(1 for _ in self.rows.select_columns([self.label]))


def image_table(rows: Any, names: ColumnNames) -> ImageTable:
    """Narrow what the datasets library opened to images and labels.

    Raises:
        ValueError: a column does not exist, is of another type, or is not the only one.
    """
    datasets, features = import_datasets(), rows.features
    if features is None:
        raise ValueError("data.streaming is on, but this stream does not tell its columns")
    images = [name for name, feature in features.items() if _holds_images(feature)]
    classes = [name for name in features if isinstance(features[name], datasets.ClassLabel)]
    labels = classes or [name for name in LABEL_NAMES if name in features]
    image = _choose("image_column", names.image, images, features)
    label = _choose("label_column", names.label, labels, features)
    if image not in images:
        raise ValueError(f"data.image_column is {image!r}, which holds no images")
    if not _is_text(features[label]) and not _is_whole(features[label]):
        held = getattr(features[label], "dtype", type(features[label]).__name__)
        raise ValueError(
            f"data.label_column is {label!r}, which holds {held}, expected whole numbers or strings"
        )
    undecoded = rows.select_columns([image, label]).cast_column(image, datasets.Image(decode=False))
    return ImageTable(rows=undecoded, image=image, label=label, label_type=features[label])


@dataclass(frozen=True)
class Classes:
    """The classes of a data set.

    Attributes:
        names: of the classes, in order.
        are_text: whether labels are these names; else they are places among them.
    """

    names: tuple[str, ...]
    are_text: bool = False

    @cached_property
    def places(self) -> dict[Any, int]:
        """The class of each label that may occur."""
        numbers = range(len(self.names))
        return dict(zip(self.names if self.are_text else numbers, numbers, strict=True))

    def place(self, label: Any, row: str) -> int:
        """Find the class of the label in a row.

        Raises:
            ValueError: there is no label, or none of these classes has it.
        """
        if label in self.places:
            return self.places[label]
        if label is None:
            raise ValueError(f"{row} has no label")
        expected = (
            f"one of {', '.join(self.names)}" if self.are_text else f"0 to {len(self.names) - 1}"
        )
        raise ValueError(f"{row} has the label {label!r}, expected {expected}")

    def encode(self, labels: Iterable[Any], split: str) -> Labels:
        """Find the class of each label of a split.

        Raises:
            ValueError: as `place` does, for the first row that is wrong.
        """
        places = (self.place(label, f"row {row} of {split}") for row, label in enumerate(labels))
        return torch.tensor(list(places), dtype=torch.long)


def find_classes(
    path: str, feature: Any, names: tuple[str, ...], labels: Collection[Any] | None
) -> Classes:
    """Say which classes there are.

    Args:
        path: of the data, as the user spelled it.
        feature: the type of the labels' column.
        names: as the user gave them; () asks the data.
        labels: all of them; None where they are not known yet, as in a stream.

    Raises:
        ValueError: names are given by nobody, or others than the data's own; there are fewer than
            two classes, or a label is so large that it is none.
    """
    known = tuple(getattr(feature, "names", None) or ())
    if known and names and known != names:
        raise ValueError(f"data.class_names is {names}, but the data calls its classes {known}")
    if labels is None and not (known or names):
        raise ValueError(
            "data.class_names is (), expected names: a stream does not tell its classes"
        )
    present = set(known or names) if labels is None else set(labels) - {None}
    classes = Classes(known or names or _names(present), are_text=_is_text(feature))
    if min(len(classes.names), len(present)) < FEW:
        raise ValueError(
            f"data.path is {path!r}, where the training images are all of one class, expected two "
            "or more"
        )
    return classes


def _names(labels: Collection[Any]) -> tuple[str, ...]:
    """Call classes what their labels say, or as many as the highest number asks for 0, 1, ..."""
    if all(isinstance(label, str) for label in labels):
        return tuple(sorted(labels))
    if max(labels) >= MANY:
        raise ValueError(
            f"the training images have labels up to {max(labels)}, expected less than {MANY}: "
            "is data.label_column right?"
        )
    return tuple(str(number) for number in range(max(labels) + 1))


def _choose(
    field: str, name: str | None, candidates: Collection[str], features: Mapping[str, Any]
) -> str:
    if name is None and len(candidates) == 1:
        return next(iter(candidates))
    if name is None or name not in features:
        found = f"found {' and '.join(candidates) or 'none'}; " if name is None else ""
        raise ValueError(f"data.{field} is {name!r}, {found}expected one of: {', '.join(features)}")
    return name


def _holds_images(feature: Any) -> bool:
    """Whether it is images, or bytes and the path of each, or bytes."""
    datasets = import_datasets()
    if isinstance(feature, Mapping):
        return "bytes" in feature and set(feature) <= {"bytes", "path"}
    is_bytes = isinstance(feature, datasets.Value) and feature.dtype.endswith("binary")
    return isinstance(feature, datasets.Image) or is_bytes


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", "") in ("string", "large_string")


def _is_whole(feature: Any) -> bool:
    return re.fullmatch(r"u?int\d+", str(getattr(feature, "dtype", ""))) is not None
