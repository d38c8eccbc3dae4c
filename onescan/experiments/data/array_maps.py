"""Targets of arrays that have a class or values at each position: masks and maps."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from onescan.checks import check_distinct
from onescan.experiments.data.base import class_range, listed
from onescan.experiments.data.ragged import Sizes, real_positions
from onescan.experiments.data.statistics import divisors, mean_and_std
from onescan.inputs.images import native_type
from onescan.inputs.targets import MapKind, Target
from onescan.messages import plural

Array = Shaped[np.ndarray, "_ *_"]  # any type
Counts = Int[Tensor, " outputs"]

IGNORED = -100  # class of positions without one, as in torch's cross_entropy
WHITE = 255  # often the foreground of a mask, or marks positions without a class
MAX_CLASSES = 4096
CHUNK = 1 << 24  # positions that are read at once
Layout = Literal["alone", "first", "last"]  # position of the axis of values, if any


@dataclass(frozen=True, kw_only=True)
class Maps:
    """A class, or values, at each position of each example, read when they are indexed.

    Attributes:
        y: Classes or values, of shape [N, *axes], [N, V, *axes] or [N, *axes, V].
        kind: Kind of the targets.
        layout: Where the axis V is, if there is one.
        ignore_index: Value of y at positions without a class, if any.
        sizes: Size of each example along each axis; None if it is that of y.
    """

    y: Array
    kind: MapKind
    layout: Layout
    ignore_index: int | None = None
    sizes: Sizes | None = None

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, indices: Int[Tensor, " B"]) -> Shaped[Tensor, "B *_"]:
        """Read the maps of some examples.

        Returns:
            Classes [B, *axes] as integers, -100 at positions without a class; or values
            [B, V, *axes] as floats, NaN where they are not known. If examples have different
            sizes, each axis has the largest of the batch.
        """
        maps = self._stored(self.y[indices.numpy()])
        if self.sizes is None:
            return maps
        real = torch.from_numpy(real_positions(self.sizes[indices.numpy()]))
        inside: Any = (..., *map(slice, real.shape[1:]))
        maps = maps[inside]
        if self.kind == "class_map":
            return torch.where(real, maps, IGNORED)
        return torch.where(real.unsqueeze(1), maps, torch.nan)

    def _stored(self, y: Array) -> Shaped[Tensor, "B *_"]:
        """Convert stored maps, padding included."""
        if self.kind == "class_map":
            classes = torch.from_numpy(y.astype(np.int64))
            if self.layout != "alone":
                classes = classes.squeeze(1 if self.layout == "first" else -1)
            if self.ignore_index is not None:
                classes[classes == self.ignore_index] = IGNORED
            return classes
        dtype = native_type(y.dtype) if y.dtype.kind == "f" else np.dtype(np.float64)
        values = torch.from_numpy(y.astype(np.promote_types(dtype, np.float32)))
        if self.layout == "alone":
            return values.unsqueeze(1)
        return values if self.layout == "first" else values.movedim(-1, 1).contiguous()

    def chunks(self, indices: Int[Tensor, " part"]) -> Iterator[Shaped[Tensor, "B *_"]]:
        """Yield the maps of some examples, in parts that fit into memory."""
        size = max(1, CHUNK // max(self.y[0].size, 1))
        for first in range(0, len(indices), size):
            yield self[indices[first : first + size]]

    def count(self, indices: Int[Tensor, " part"], outputs: int) -> Counts:
        """Count the positions of each class, or those where each value is known."""
        total = torch.zeros(outputs, dtype=torch.long)
        for chunk in self.chunks(indices):
            total += (
                chunk[chunk != IGNORED].bincount(minlength=outputs)
                if self.kind == "class_map"
                else (~chunk.isnan()).transpose(0, 1).flatten(1).sum(dim=1)
            )
        return total

    def positions(self, indices: Int[Tensor, " part"]) -> int:
        """Count the positions of some examples, without padding."""
        if self.sizes is not None:
            return int(self.sizes[indices.numpy()].prod(axis=1).sum())
        values = {"alone": 1, "first": self.y.shape[1], "last": self.y.shape[-1]}[self.layout]
        return len(indices) * math.prod(self.y.shape[1:]) // values

    def fit(self, indices: Int[Tensor, " part"]) -> Target:
        """Return the target that standardizes the known values of some examples.

        Constant values are only centered, and values that are never known are left as they are.
        """
        mean, std = mean_and_std(x.transpose(0, 1).flatten(1) for x in self.chunks(indices))
        std = divisors(mean, std)
        return Target(kind="value_map", mean=tuple(mean.tolist()), std=tuple(std.tolist()))


def map_layout(y: Array, axis_sizes: tuple[int, ...], *, channels_first: bool) -> Layout | None:
    """Return where y has an axis of values, if any; None if y does not have the axes of x.

    >>> y = np.zeros((5, 2, 30))
    >>> map_layout(y, (30,), channels_first=False), map_layout(y, (20,), channels_first=False)
    ('first', None)
    """
    if y.shape[1:] == axis_sizes:
        return "alone"
    if y.ndim == len(axis_sizes) + 2:
        for layout in ("first", "last") if channels_first else ("last", "first"):
            if (y.shape[2:] if layout == "first" else y.shape[1:-1]) == axis_sizes:
                return layout
    return None


def read_maps(
    where: str,
    arrays: Mapping[str, Array],
    kind: MapKind,
    *,
    axis_sizes: tuple[int, ...],
    sizes: Sequence[Sizes | None],
    channels_first: bool,
    names: tuple[str, ...],
    ignore_index: int | None,
) -> tuple[tuple[str, ...], list[Maps]]:
    """Check targets that have a class or values at each position.

    Args:
        where: Beginning of error messages.
        arrays: y of each split, by name, training data first.
        kind: "class_map" or "value_map".
        axis_sizes: Size of an example along each axis, padding included.
        sizes: Sizes of the examples of each split; None without padding.
        channels_first: Whether y may have an axis of values before the others.
        names: Names of the classes or values; () numbers them.
        ignore_index: Value of y at positions without a class.

    Returns:
        The names, and the maps of each split.

    Raises:
        ValueError: If an array has another shape or type than expected, a class is out of range
            (names its position), or a value is infinite (names the example).
    """
    is_class = kind == "class_map"
    noun, expected = ("class", "integers") if is_class else ("value", "numbers")
    maps = {}
    for (name, y), size in zip(arrays.items(), sizes, strict=True):
        if y.dtype.kind not in ("iub" if is_class else "fiub"):
            hints = {"f": "; save y.astype(int)", "U": "; numpy.unique can number strings"}
            raise ValueError(
                f"{where} {name} holds {y.dtype}, expected {expected} for data.target {kind}"
                f"{hints.get(y.dtype.kind, '') * is_class}"
            )
        layout = map_layout(y, axis_sizes, channels_first=channels_first)
        values = y.size // (len(y) * math.prod(axis_sizes))
        if layout is None or (is_class and values > 1):
            raise ValueError(
                f"{where} {name} has shape {y.shape}, expected {(len(y), *axis_sizes)}, one {noun} "
                "for each position of x"
            )
        maps[name] = Maps(y=y, kind=kind, layout=layout, ignore_index=ignore_index, sizes=size)
    if is_class:
        found = {name: _classes(f"{where} {name}", part) for name, part in maps.items()}
        (what, training), *tests = found.items()
        hint = f", and if it is the second class, save y // {WHITE}"
        try:
            count = count_classes(what, training, dict(tests), named=len(names), hint=hint)
        except ValueError as error:
            raise ValueError(f"{where} {error}") from error
    else:
        count = _count_values(where, maps)
    if not names:
        numbers = [str(i) for i in range(count)]
        of_values = ["value"] if count == 1 else [f"value_{number}" for number in numbers]
        return tuple(numbers if is_class else of_values), list(maps.values())
    if len(names) != count:
        raise ValueError(
            f"data.class_names has {plural(len(names), 'name')} ({listed(names)}), but y has "
            f"{plural(count, noun)}"
        )
    check_distinct(**{"data.class_names": names})
    return names, list(maps.values())


def count_classes(
    what: str,
    training: Collection[int],
    tests: Mapping[str, Collection[int]],
    *,
    named: int = 0,
    hint: str = "",
) -> int:
    """Return the number of classes: that of their names, or else the largest class plus one.

    Args:
        what: What holds the classes, for messages, such as "the masks in scans".
        training: Classes that occur in the training data.
        tests: Classes that occur in other data, by what holds them.
        named: Number of classes with a name; 0 if they have none.
        hint: What else classes of 0 and 255 may mean.

    Raises:
        ValueError: If there is no class, or one; if classes without names have gaps of more than
            half of all numbers, such as of a mask with 0 and 255; or if a class is too large.
    """
    if not training:
        raise ValueError(f"no position of {what} has a class")
    largest = max(training)
    if not named and 2 * len(training) <= largest:
        hints = f"; if {WHITE} marks positions without a class, pass --data.ignore-index {WHITE}"
        raise ValueError(
            f"the classes of {what} are {listed(list(map(str, sorted(training))))}, expected 0 to "
            f"{len(training) - 1}, or {largest + 1} names in --data.class-names"
            f"{(hints + hint) * (WHITE in training)}"
        )
    count = named or largest + 1
    if count == 1:
        raise ValueError(f"all positions of {what} have class 0, expected at least two classes")
    for name, classes in {what: training, **tests}.items():
        if max(classes, default=0) >= count:
            expected = class_range(count, has_names=bool(named))
            raise ValueError(f"{name} has class {max(classes)}, expected {expected}")
    return count


def _classes(where: str, maps: Maps) -> list[int]:
    """Return the classes that occur."""
    present: set[int] = set()
    for start, chunk in _indexed(maps):
        wrong = (chunk != IGNORED) & ((chunk < 0) | (chunk >= MAX_CLASSES))
        if bool(wrong.any()):
            row, *position = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"{where}[{', '.join(map(str, (start + row, *position)))}] is "
                f"{int(chunk[(row, *position)])}, expected classes from 0 to {MAX_CLASSES - 1}; "
                "--data.ignore-index sets the value of positions without a class"
            )
        present |= set(chunk[chunk != IGNORED].bincount().nonzero().flatten().tolist())
    return sorted(present)


def _count_values(where: str, maps: Mapping[str, Maps]) -> int:
    """Return the number of values at each position."""
    sizes = {}
    for name, part in maps.items():
        is_known = False
        for start, chunk in _indexed(part):
            if bool((infinite := chunk.isinf()).any()):
                row = start + int(infinite.nonzero()[0, 0])
                raise ValueError(
                    f"{where} {name}[{row}] has infinite values, expected finite values, or NaN "
                    "where the value is unknown"
                )
            is_known = is_known or not bool(chunk.isnan().all())
            sizes[name] = chunk.shape[1]
        if not is_known:
            raise ValueError(f"{where} {name} holds only NaN, expected at least one value")
    if len(set(sizes.values())) > 1:
        described = " and ".join(f"{count} in {name}" for name, count in sizes.items())
        raise ValueError(f"{where} the number of values per position differs: {described}")
    return next(iter(sizes.values()))


def _indexed(part: Maps) -> Iterator[tuple[int, Tensor]]:
    """Yield all maps in parts, each with the index of its first example."""
    start = 0
    for chunk in part.chunks(torch.arange(len(part))):
        yield start, chunk
        start += len(chunk)


def map_note(outputs: int, maps: Sequence[Maps]) -> str:
    """Describe how y is read."""
    if maps[0].kind == "class_map":
        note = f"y is read as one of {plural(outputs, 'class')} at each position"
        is_table = maps[0].y.ndim == 2  # noqa: PLR2004
        return f"{note}; if this is wrong, pass --data.target multilabel" if is_table else note
    note = f"y is read as {plural(outputs, 'real value')} at each position"
    if all(_are_whole(chunk) for part in maps for _, chunk in _indexed(part)):
        note += ", although all are whole numbers; if they are classes, save y.astype(int)"
    return note


def _are_whole(values: Float[Tensor, "B V *axes"]) -> bool:
    return bool((values.isnan() | (values == values.floor())).all())
