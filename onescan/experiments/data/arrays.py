"""Labeled arrays of any number of axes, from `.npz` and `.npy` files: signals, images, volumes."""

import math
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import SEEK_CUR
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from jaxtyping import Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from onescan.checks import NotFiniteError
from onescan.experiments.data.array_maps import Maps, map_note, read_maps
from onescan.experiments.data.array_targets import (
    fit_target,
    kind_note,
    read_kind,
    read_rows,
    target_notes,
)
from onescan.experiments.data.base import (
    DataConfig,
    Example,
    LoadedBatch,
    Splits,
    class_range,
    held_out_note,
    listed,
    random_split,
    similar_names_note,
    stratified_split,
)
from onescan.experiments.data.images import ImageSet, ImageSplits
from onescan.experiments.data.ragged import Sizes, read_sizes, real_positions
from onescan.experiments.data.share import WHOLE, Share
from onescan.experiments.data.statistics import divisors, mean_and_std
from onescan.inputs.arrays import IMAGE_AXES, MAX_AXES, ArrayFormat
from onescan.inputs.images import (
    GridFormat,
    ImageFormat,
    check_constants,
    native_type,
)
from onescan.inputs.targets import CLASSES, Target, TargetKind
from onescan.shapes import Labels

Array = Shaped[np.ndarray, "N *_"]  # any type
# class indices, or labels or values as float64; or maps
Targets = Shaped[Tensor, "N *outputs"] | Maps

LENGTHS = "lengths"  # name of the array of sizes
SPLITS = ("train", "test")
MIN_CLASSES, MAX_CLASSES = 2, 1_000_000
MAX_CHANNELS = 4  # longer axes are not channels
FEW = 9  # an axis that is shorter, or this much shorter than another one, may hold channels
SIGNAL_AXES = 2  # of an example with channels
CHUNK = 1 << 24  # values that are standardized or checked at once
EXACT = 2**53  # float64 represents all smaller integers
MIN_SPREAD = 2.0**-43  # standard deviation of larger integers, as a fraction of their mean
# Raised by numpy and zipfile for damaged, encrypted or unsupported files.
DAMAGE = (
    OSError,
    ValueError,
    EOFError,
    RuntimeError,
    OverflowError,
    SyntaxError,
    TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True, kw_only=True)
class ArrayDatasetConfig(DataConfig):
    """Labeled arrays: a `.npz` file, or a folder of `.npy` files.

    The arrays are called x and y, of which a part is held out, or x_train, y_train, x_test and
    y_test. x has shape [N, *axes] or, with channels, [N, *axes, C], or [N, C, *axes] with
    channels_first. y of shape [N] holds class indices from 0, or strings, which name the classes;
    floats of shape [N] or [N, V] are values, and 0 and 1 of shape [N, L] are labels, of which each
    example may have any number. If y has the axes of x, it holds a class at each position
    (integers), or values (floats, NaN where they are not known), of shape [N, *axes, V] or [N, V,
    *axes] if there are several. Bytes are scaled to 0 to 1. Other types are standardized in float64
    if their mean is large compared with their standard deviation, as with Unix times, and otherwise
    in float32. Files that are not compressed are mapped into memory instead of being read.

    Examples of different sizes must be padded at the end to one size, with any numbers. An array
    lengths, or lengths_train and lengths_test, then holds the sizes of the examples: along each
    axis with shape [N, axes], or along the first axis with shape [N].
    """

    path: str
    """A .npz file, or a folder of .npy files."""
    axes: int = 2
    """Number of axes of an example: 1 for signals, 2 for images, 3 for volumes and video."""
    channels_first: bool = False
    """Whether axis 1 of x, instead of its last axis, holds the channels, if there are any."""
    target: TargetKind | None = None
    """Whether y holds a class, several labels (multilabel) or real values (value) of each example,
    or a class (class_map) or real values (value_map) at each position; None infers it from the type
    and shape of y."""
    ignore_index: int | None = None
    """In a map of classes, the value of y at positions without a class, such as 255. They are left
    out of the loss and all scores."""
    test_fraction: float = 0.1
    """Fraction of the examples, or of each class, held out if there is no x_test."""
    split_seed: int = 0
    """Random seed of the train-test split."""
    class_names: tuple[str, ...] = ()
    """Names of the classes, labels or values in order; () numbers them or, if y holds strings,
    sorts these."""
    mean: tuple[float, ...] | None = None
    """Mean of each channel, subtracted; None computes it from the training examples."""
    std: tuple[float, ...] | None = None
    """Standard deviation of each channel, divided by; None computes it from the training
    examples."""

    def build(self) -> "ImageSplits | ArraySplits":
        """Open the arrays and check their shapes, types and labels.

        Returns:
            ImageSplits for bytes with two axes and 1 or 3 channels, if all examples have the same
            size; otherwise ArraySplits.

        Raises:
            ValueError: If a field is out of range; if the data does not exist, is damaged, or lacks
                an array; if an array has another shape or type than expected; if a label belongs to
                no class; or if a value is not finite.
        """
        if not 1 <= self.axes <= MAX_AXES:
            raise ValueError(f"data.axes is {self.axes}, expected 1 to {MAX_AXES}")
        arrays = _open(self.path)
        has_splits = "x_train" in arrays
        names = SPLITS if has_splits else ("",)
        suffixes = [f"_{name}" if name else "" for name in names]
        pairs = [self._examples(arrays, suffix) for suffix in suffixes]
        labels_by_name = {f"y{end}": y for end, (_, y) in zip(suffixes, pairs, strict=True)}
        where = f"data.path is {self.path!r}, where"
        axis_sizes = _axis_sizes(
            pairs[0][0].shape[1:], self.axes, channels_first=self.channels_first
        )
        kind = read_kind(where, f"y{suffixes[0]}", pairs[0][1], self.target, axis_sizes)
        sizes = self._sizes(arrays, suffixes, [x for x, _ in pairs])
        outputs, labels = self._targets(labels_by_name, kind, axis_sizes, sizes)
        layout: dict[str, Any] = {"axes": self.axes, "channels_first": self.channels_first}
        sets = [
            ArrayDataset(
                x=x,
                labels=each,
                indices=torch.arange(len(x)),
                name=f"x{suffix}",
                sizes=size,
                **layout,
            )
            for suffix, (x, _), each, size in zip(suffixes, pairs, labels, sizes, strict=True)
        ]
        notes = self._notes(arrays, suffixes, kind)
        if pairs[0][1].dtype.kind == "U":
            notes += similar_names_note(outputs)
        if kind != "class" and self.target is None:
            is_map = isinstance(labels[0], Maps)
            notes.append(
                map_note(len(outputs), labels)
                if is_map
                else kind_note(kind, len(outputs), labels_by_name)
            )
        if has_splits:
            train, test = sets
            if (train.x.dtype == np.uint8) != (test.x.dtype == np.uint8):
                raise ValueError(
                    f"data.path is {self.path!r}, where x_test holds {test.x.dtype}, but x_train "
                    f"holds {train.x.dtype}; expected uint8 in both or in neither, because only "
                    "uint8 is scaled to 0 to 1"
                )
            compared = None if train.sizes is None else 1  # only the channels
            if train.shape[:compared] != test.shape[:compared]:
                raise ValueError(
                    f"data.path is {self.path!r}, where x_test has examples of shape {test.shape}, "
                    f"expected {train.shape} as in x_train"
                )
        else:
            options: dict[str, Any] = {"fraction": self.test_fraction, "seed": self.split_seed}
            classes = labels[0] if kind == "class" else None
            parts = (
                random_split(len(sets[0]), **options)
                if classes is None
                else stratified_split(classes, **options)
            )
            train, test = (replace(sets[0], indices=indices) for indices in parts)
            notes.append(held_out_note(len(test), len(sets[0])))
        try:
            format = self._format(train, sets)
            if is_float64 := isinstance(format, ArrayFormat) and format.needs_float64:
                train, test = (replace(part, dtype=np.float64) for part in (train, test))
            test.check_finite()  # the statistics have read the training examples
        except NotFiniteError as error:
            raise ValueError(f"data.path is {self.path!r}, where {error}") from error
        target = fit_target(kind, train.labels, train.indices)
        for part, data in (("training", train), ("test", test)):
            notes += target_notes(kind, data.labels, data.indices, outputs, part)
        common: dict[str, Any] = {"class_names": outputs, "target": target}
        if isinstance(format, ImageFormat):
            return ImageSplits(train=train, test=test, format=format, notes=tuple(notes), **common)
        if is_float64:
            notes.append("x is standardized in float64, because float32 would round its values")
        return ArraySplits(train=train, test=test, format=format, notes=tuple(notes), **common)

    def infer_target(self) -> TargetKind:
        """Infer from y whether the targets are classes, labels or values, unless `target` is set.

        Raises:
            ValueError: If the data does not exist, is damaged or lacks an array, or y holds none of
                them.
        """
        arrays = _open(self.path)
        name = "y_train" if "y_train" in arrays else "y"
        if self.target is not None or name not in arrays:  # `build` reports a missing one
            return self.target or "class"
        where = f"data.path is {self.path!r}, where"
        config, _ = self.infer_layout()
        shape = self._array(arrays, "x_train" if "x_train" in arrays else "x").shape[1:]
        axis_sizes = _axis_sizes(shape, config.axes, channels_first=config.channels_first)
        return read_kind(where, name, self._array(arrays, name), None, axis_sizes)

    def _targets(
        self,
        labels: Mapping[str, Array],
        kind: TargetKind,
        axis_sizes: tuple[int, ...],
        sizes: Sequence[Sizes | None],
    ) -> tuple[tuple[str, ...], list[Any]]:
        """Check the targets of each split; return the names of the outputs, and the targets."""
        where = f"data.path is {self.path!r}, where"
        if self.ignore_index is not None and kind != "class_map":
            raise ValueError(
                f"data.ignore_index is {self.ignore_index}, expected None unless y holds a class "
                f"at each position, as integers; it holds {next(iter(labels.values())).dtype}"
            )
        if kind == "class":
            self._check_classes(labels)
            return self._classes(labels)
        if kind == "class_map" or kind == "value_map":
            return read_maps(
                where,
                labels,
                kind,
                axis_sizes=axis_sizes,
                sizes=sizes,
                channels_first=self.channels_first,
                names=self.class_names,
                ignore_index=self.ignore_index,
            )
        return read_rows(where, labels, kind, self.class_names)

    def _notes(
        self, arrays: Mapping[str, "_OpenArray"], suffixes: Sequence[str], kind: TargetKind
    ) -> list[str]:
        """Describe arrays and files that are not used, and labels that are converted."""
        used = {f"{name}{suffix}" for name in ("x", "y", LENGTHS) for suffix in suffixes}
        path = Path(self.path).expanduser()
        files = [file.name for file in path.iterdir()] if path.is_dir() else []
        others = [name for name in files if not name.startswith(".") and name[-4:] != ".npy"]
        notes = [
            f"{source} not used: {listed(sorted(names))}"
            for source, names in (("arrays", set(arrays) - used), ("files", others))
            if names
        ]
        are_bools = any(self._array(arrays, f"y{suffix}").dtype == bool for suffix in suffixes)
        if kind == "class" and are_bools:
            notes.append("labels are booleans: False is class 0, and True is class 1")
        return notes

    def infer_layout(self, given: Collection[str] = ()) -> tuple["ArrayDatasetConfig", str]:
        """Infer the number of axes and the position of the channel axis from the shape of x.

        If y has the shape of x, or of x without one axis, that axis holds the channels. Otherwise,
        if `axes` is 1 and x has shape [N, A, B], the shorter of A and B is taken to be the
        channels, or B if they are equal. In all other cases, the channels are an axis of up to 4
        values: the last one or else, before at least one more axis, axis 1.

        Args:
            given: "axes" and "channels_first" if these fields are to be kept.

        Returns:
            The config, and a description of the layout.

        Raises:
            ValueError: If the data does not exist, is damaged or lacks an array.
        """
        arrays = _open(self.path)
        name = "x_train" if "x_train" in arrays else "x"
        if name not in arrays:
            folders = [f"the folder {x.name}" for x in Path(self.path).glob("*/")]
            names = ", ".join(sorted(arrays) + sorted(folders)) or "none"
            raise ValueError(
                f"data.path is {self.path!r}, which has no array x; found: {names}. A folder holds "
                "x.npy and y.npy or, for segmentation, folders images and masks"
            )
        shape = self._array(arrays, name).shape[1:]
        axes, channels_first = self.axes, self.channels_first
        is_signal = axes == 1 and len(shape) == SIGNAL_AXES
        is_last = len(shape) > 1 and shape[-1] <= (shape[0] if is_signal else MAX_CHANNELS)
        is_first = not is_last and len(shape) > 1 and (is_signal or shape[0] <= MAX_CHANNELS)
        if len(axis_sizes := self._map_axis_sizes(arrays, name)) > 1:
            is_signal = False
            is_last, is_first = (
                shape[:-1] == axis_sizes,
                shape[1:] == axis_sizes and shape[:-1] != axis_sizes,
            )
        if "channels_first" not in given:
            channels_first = is_first
        elif channels_first:
            is_first, is_last = len(shape) > 1, False
        else:
            is_first, is_last = False, is_last or is_signal
        if "axes" not in given:
            axes = max(1, len(shape) - (is_first or is_last))
        config = replace(self, axes=axes, channels_first=channels_first)
        if len(shape) == axes + 1:
            layout = "channels first" if channels_first else "channels last"
            if is_signal and "channels_first" not in given:
                flag = "no-channels-first" if channels_first else "channels-first"
                layout += f" (the shorter axis; if this is wrong, pass --data.{flag})"
            return config, layout
        hint = "no axis of channels"
        if "axes" not in given and len(shape) > 1:
            few = next((i for i in (-1, 0) if shape[i] < FEW or shape[i] * FEW <= max(shape)), None)
            if few is not None:
                channel_axis = "last axis" if few else "first axis"
                flag = "" if few else " --data.channels-first"
                hint += f"; if the {channel_axis} holds channels, pass --data.axes {axes - 1}{flag}"
        return config, hint

    def _map_axis_sizes(self, arrays: Mapping[str, "_OpenArray"], name: str) -> tuple[int, ...]:
        """Return the shape of y's examples if it tells where the channels of x are, or ()."""
        other = f"y{name[1:]}"
        if other not in arrays:
            return ()
        shape, axis_sizes = (
            self._array(arrays, name).shape[1:],
            self._array(arrays, other).shape[1:],
        )
        return axis_sizes if axis_sizes in (shape, shape[:-1], shape[1:]) else ()

    def _examples(self, arrays: Mapping[str, "_OpenArray"], suffix: str) -> tuple[Array, Array]:
        """Open x and y of a split, and check x and the length of y."""
        for name in (f"x{suffix}", f"y{suffix}"):
            if name not in arrays:
                names = ", ".join(sorted(arrays)) or "none"
                raise ValueError(
                    f"data.path is {self.path!r}, which has no array {name}, expected x and y, or "
                    f"x_train, y_train, x_test and y_test; found: {names}"
                )
        x, y = (self._array(arrays, f"{name}{suffix}") for name in "xy")
        where = f"data.path is {self.path!r}, where"
        with_channels = "[N, C, *axes]" if self.channels_first else "[N, *axes, C]"
        if x.ndim - self.axes not in (1, 2) or 0 in x.shape:
            raise ValueError(
                f"{where} x{suffix} has shape {x.shape}, expected [N, *axes] or {with_channels} "
                f"with data.axes={self.axes}, and no size 0"
            )
        if x.dtype.kind not in "fiub":
            raise ValueError(f"{where} x{suffix} holds {x.dtype}, expected real numbers")
        if y.shape[:1] != (len(x),):
            expected = (len(x), *y.shape[1:])
            raise ValueError(f"{where} y{suffix} has shape {y.shape}, expected {expected}")
        return x, y

    def _sizes(
        self, arrays: Mapping[str, "_OpenArray"], suffixes: Sequence[str], inputs: Sequence[Any]
    ) -> list[Sizes | None]:
        """Return the sizes of the examples of each split; None if there are no lengths."""
        names = [f"{LENGTHS}{suffix}" for suffix in suffixes]
        allowed = (LENGTHS, *(f"{LENGTHS}_{split}" for split in SPLITS))
        given = [name for name in allowed if name in arrays]
        if not given:
            return [None] * len(inputs)
        where = f"data.path is {self.path!r}, where"
        if set(given) != set(names):
            examples = " and ".join(f"x{suffix}" for suffix in suffixes)
            raise ValueError(
                f"{where} the sizes of the examples in {examples} must be in "
                f"{' and '.join(names)}, but there is {' and '.join(given)}"
            )
        axis_sizes = [
            _axis_sizes(x.shape[1:], self.axes, channels_first=self.channels_first) for x in inputs
        ]
        return [
            read_sizes(where, name, self._array(arrays, name), len(x), shape)
            for name, x, shape in zip(names, inputs, axis_sizes, strict=True)
        ]

    def _check_classes(self, labels: Mapping[str, Array]) -> None:
        """Check the shapes and types of labels that are classes."""
        where = f"data.path is {self.path!r}, where"
        for name, y in labels.items():
            if y.dtype.kind not in "iubU":
                raise ValueError(f"{where} {name} holds {y.dtype}, expected integers or strings")
            if y.ndim != 1:
                raise ValueError(f"{where} {name} has shape {y.shape}, expected ({len(y)},)")
            if y.dtype.kind != "U" and (y.min() < 0 or y.max() >= MAX_CLASSES):
                row = int(np.argmax((y < 0) | (y >= MAX_CLASSES)))
                raise ValueError(
                    f"{where} {name}[{row}] is {y[row]}, expected 0 to {MAX_CLASSES - 1}"
                )

    def _array(self, arrays: Mapping[str, "_OpenArray"], name: str) -> Array:
        try:
            return arrays[name]()
        except DAMAGE as error:
            raise ValueError(
                f"data.path is {self.path!r}, where {name} cannot be read: {error}"
            ) from error

    def _classes(self, labels: Mapping[str, Array]) -> tuple[tuple[str, ...], list[Labels]]:
        """Name the classes and check that all labels belong to them. Training data defines them.

        Args:
            labels: Labels of each split, by the name of the array, training data first.

        Returns:
            The names, and the labels as class indices.
        """
        where = f"data.path is {self.path!r}, where"
        names, first = self.class_names, next(iter(labels.values()))
        if first.dtype.kind == "U":
            names = names or tuple(sorted(set(first.tolist())))
            labels = {name: self._indices(name, y, names) for name, y in labels.items()}
        for name, y in labels.items():
            if y.dtype.kind == "U":
                raise ValueError(f"{where} {name} holds strings, expected integers as in y_train")
        lowest = min(int(y.min()) for y in labels.values())
        if lowest > 0 and not names:
            raise ValueError(
                f"{where} the lowest label is {lowest}, but labels start at 0: save y - {lowest} "
                "instead of y, or name all classes, from class 0 on, with --data.class-names"
            )
        count = len(names) or int(next(iter(labels.values())).max()) + 1
        if count < MIN_CLASSES:
            raise ValueError(
                f"data.path is {self.path!r}, which has one class, expected at least two"
            )
        for name, y in labels.items():
            if (high := y >= count).any():
                row = int(high.argmax())
                expected = class_range(count, has_names=bool(names))
                raise ValueError(f"{where} {name}[{row}] is {y[row]}, expected {expected}")
        indices = [torch.from_numpy(np.array(y, dtype=np.int64)) for y in labels.values()]
        return names or tuple(str(number) for number in range(count)), indices

    def _indices(self, name: str, y: Array, classes: Sequence[str]) -> Array:
        """Convert the names of classes to their indices."""
        where = f"data.path is {self.path!r}, where {name}"
        if y.dtype.kind != "U":
            raise ValueError(f"{where} holds {y.dtype}, expected strings as in y_train")
        indices = {label: index for index, label in enumerate(classes)}
        for row, label in enumerate(y.tolist()):
            if not label.strip():
                raise ValueError(f"{where}[{row}] is {label!r}, expected the name of a class")
            if label not in indices:
                known = listed(list(map(repr, classes)))
                raise ValueError(f"{where}[{row}] is {label!r}, expected one of {known}")
        return np.array([indices[label] for label in y.tolist()])

    def _format(
        self, train: "ArrayDataset", sets: Sequence["ArrayDataset"]
    ) -> "ImageFormat | ArrayFormat":
        """Return the format of training examples; its shape holds the largest sizes of `sets`."""
        channels, *shape = train.shape
        given = {"data.mean": self.mean, "data.std": self.std}
        check_constants(channels, **{name: x for name, x in given.items() if x is not None})
        mean, std = self.mean, self.std
        if mean is None or std is None:
            computed = train.statistics()
            mean, std = mean or computed[0], std or computed[1]
        sizes = [data.sizes for data in sets if data.sizes is not None]
        is_bytes = train.x.dtype == np.uint8
        if self.axes == IMAGE_AXES and channels in (1, 3) and is_bytes and not sizes:
            height, width = shape
            return ImageFormat(channels=channels, height=height, width=width, mean=mean, std=std)
        if sizes:
            shape = np.concatenate(sizes).max(axis=0).tolist()
        return ArrayFormat(
            channels=channels,
            shape=tuple(shape),
            mean=mean,
            std=std,
            is_bytes=is_bytes,
            is_ragged=bool(sizes),
        )


def _axis_sizes(shape: tuple[int, ...], axes: int, *, channels_first: bool) -> tuple[int, ...]:
    """Return the size of an example along each axis, without its channels."""
    if len(shape) == axes:
        return shape
    return shape[1:] if channels_first else shape[:-1]


@dataclass(frozen=True, kw_only=True)
class ArrayDataset(ImageSet):
    """Examples of an array with labels: a batch is (x, labels), x [B, C, *axes].

    If examples have different sizes, x is cut to the largest of the batch along each axis, and zero
    after the end of an example; a third tensor, [B, *axes], is True for its real positions.

    Attributes:
        x: All examples, with or without channels.
        labels: Class index of each example; or its labels or values, as float64 [N, outputs]; or
            maps.
        indices: Examples that belong to this dataset, in its order.
        axes: Number of axes of an example.
        channels_first: Whether axis 1 of x, instead of its last axis, holds the channels, if any.
        dtype: Type to convert x to, except bytes; None keeps its own.
        share: Shard of the first axis of each example to read.
        name: Name of x, for messages.
        sizes: Size of each example along each axis; None if it is that of x.
    """

    x: Array
    labels: Targets
    indices: Int[Tensor, " examples"]
    axes: int
    channels_first: bool = False
    dtype: Any = np.float32
    share: Share = WHOLE
    name: str = "x"
    sizes: Sizes | None = None

    def shared(self, share: Share) -> "ArrayDataset":
        if share.size > 1 and self.sizes is not None:
            raise ValueError(
                f"machine.sequence_parallel is {share.size}, but the examples have different "
                "sizes, expected 1"
            )
        return replace(self, share=share)

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels and size of each axis, padding included."""
        shape = self.x.shape[1:]
        axis_sizes = _axis_sizes(shape, self.axes, channels_first=self.channels_first)
        return math.prod(shape) // math.prod(axis_sizes), *axis_sizes

    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        """Read a batch.

        Raises:
            ValueError: If a value is not finite; names the example.
        """
        indices = self.indices[[example.source for example in examples]]
        values, *keep = self._values(indices.numpy())
        return LoadedBatch((values, self.labels[indices], *keep))

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and standard deviation of each channel; 1 for a constant channel.

        Raises:
            ValueError: If a value is not finite (names the example), or x holds large integers that
                differ by too little.
        """
        data = self if self.x.dtype == np.uint8 else replace(self, dtype=np.float64)

        def channels() -> Iterator[Tensor]:
            for chunk in self._chunks():
                values, *keep = data._values(self.indices[chunk.start : chunk.stop].numpy())
                by_channel = values.double().transpose(0, 1)
                yield by_channel[:, keep[0]] if keep else by_channel.flatten(1)

        mean, std = mean_and_std(channels())
        scale = 255 if self.x.dtype == np.uint8 else 1
        is_large = mean.abs() > EXACT
        if self.x.dtype.kind in "iu" and (is_large & (std < MIN_SPREAD * mean.abs())).any():
            raise ValueError(
                f"x holds integers near {mean[is_large][0].item():.4g} that are too close together "
                "for float64: subtract a constant from x"
            )
        mean, std = mean / scale, std / scale
        return tuple(mean.tolist()), tuple(divisors(mean, std).tolist())

    def check_finite(self) -> None:
        """Raise NotFiniteError if a value is not finite as it is read; names the example."""
        if self.x.dtype.kind == "f":
            for chunk in self._chunks():
                self._values(self.indices[chunk.start : chunk.stop].numpy())

    def _chunks(self) -> list[range]:
        size = max(1, CHUNK // self.x[0].size)
        return [range(start, min(start + size, len(self))) for start in range(0, len(self), size)]

    def _values(self, indices: NDArray[np.int64]) -> tuple[Tensor, ...]:
        """Read examples with channels first: bytes as they are, other types as `dtype`.

        Returns:
            The examples; and which of their positions are real, if they have different sizes.

        Raises:
            ValueError: If a value is not finite; names the example.
        """
        shard = self.share.slice(self.shape[1])
        if self.share.size == 1:
            values = self.x[indices]  # faster than with slices
        elif self.channels_first and self.x.ndim == self.axes + 2:
            values = self.x[indices, :, shard]
        else:
            values = self.x[indices, shard]
        if values.ndim == self.axes + 1:
            values = values[:, None]
        elif not self.channels_first:
            values = np.moveaxis(values, -1, 1)
        keep: tuple[Tensor, ...] = ()
        if self.sizes is not None:
            real = real_positions(self.sizes[indices])
            inside: Any = (..., *map(slice, real.shape[1:]))
            values = np.where(real[:, None], values[inside], values.dtype.type(0))
            keep = (torch.from_numpy(real),)
        if values.dtype != np.uint8:
            values = values.astype(self.dtype or native_type(values.dtype))
        tensor = torch.from_numpy(values)
        if tensor.is_floating_point() and not tensor.isfinite().all():
            row = int(indices[tensor.flatten(1).isfinite().all(dim=1).int().argmin()])
            raise NotFiniteError(
                f"example {row} of {self.name} has values that are not finite (NaN or infinite): "
                "replace them, or remove the example"
            )
        return tensor.contiguous(), *keep


@dataclass(frozen=True, kw_only=True)
class ArraySplits(Splits):
    """Training and held-out arrays, and how to read both."""

    train: ImageSet
    test: ImageSet
    class_names: tuple[str, ...]
    format: ArrayFormat
    target: Target = CLASSES


def read_inputs(
    path: str, format: GridFormat, *, channels_first: bool = False, any_size: bool = False
) -> ArrayDataset:
    """Open the examples to classify: the array x of a `.npz` file, or a `.npy` file.

    Args:
        path: The file. If a `.npz` file holds a single array besides lengths, it may have any
            name. Without lengths, all examples have the size of the array.
        format: Format that the model was trained on.
        channels_first: Layout to prefer if x fits with channels first and with channels last.
        any_size: Accept examples of other sizes than those of the training data.

    Returns:
        The examples, with labels 0.

    Raises:
        ValueError: If there is no such file, it is damaged, or x has another shape or type.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"there is no file {path}")
    arrays = {"x": _file_opener(file)} if file.suffix == ".npy" else _open(path)
    others = arrays.keys() - {LENGTHS}
    name = next(iter(others)) if len(others) == 1 else "x"
    if name not in arrays:
        raise ValueError(f"{path} has no array x; found: {', '.join(sorted(arrays)) or 'none'}")
    try:
        x = arrays[name]()
        lengths = arrays[LENGTHS]() if LENGTHS in arrays else None
    except DAMAGE as error:
        raise ValueError(f"{path}: {name} cannot be read: {error}") from error
    if x.dtype.kind not in "fiub":
        raise ValueError(f"{path}: {name} holds {x.dtype}, expected real numbers")
    shape = format.shape if isinstance(format, ArrayFormat) else _image_size(format)
    any_size = any_size or format.is_ragged
    rows = torch.arange(len(x) if x.ndim else 0)
    for is_first in (channels_first, not channels_first):
        data = ArrayDataset(
            x=x,
            labels=rows * 0,
            indices=rows,
            axes=len(shape),
            channels_first=is_first,
            dtype=_read_as(format),
            name=name,
        )
        if x.ndim - len(shape) in (1, 2) and 0 not in x.shape:
            channels, *axis_sizes = data.shape
            if channels == format.channels and (any_size or tuple(axis_sizes) == shape):
                if lengths is None:
                    return data
                example_sizes = read_sizes(f"{path}:", LENGTHS, lengths, len(x), axis_sizes)
                return replace(data, sizes=example_sizes)
    sizes = ", ".join("any size" if any_size else str(size) for size in shape)
    expected = f"[N, {format.channels}, {sizes}] or [N, {sizes}, {format.channels}]"
    if format.channels == 1:
        expected = f"[N, {sizes}]"
    raise ValueError(f"{path}: {name} has shape {x.shape}, expected {expected}")


def _read_as(format: GridFormat) -> Any:
    """Return the dtype for `ArrayDataset`; None if the format must see the stored dtype."""
    if not isinstance(format, ArrayFormat) or format.reads_pixels:
        return None
    return np.float64 if format.needs_float64 else np.float32


def _image_size(format: GridFormat) -> tuple[int, ...]:
    if not isinstance(format, ImageFormat):
        raise ValueError(f"the model was trained on {type(format).__name__}, not on arrays")
    return format.height, format.width


# Files

_OpenArray = Callable[[], Array]


def _open(path: str) -> dict[str, _OpenArray]:
    """Return functions that open the arrays of a file or folder, by name."""
    source = Path(path).expanduser()
    if not source.exists():
        raise ValueError(f"data.path is {path!r}: there is no such file or folder")
    if source.is_dir():
        return {file.stem: _file_opener(file) for file in sorted(source.glob("*.npy"))}
    if source.suffix != ".npz":
        raise ValueError(
            f"data.path is {path!r}, expected a .npz file or a folder of .npy files; "
            "docs/howto/own_arrays.md shows how to convert CSV files"
        )
    try:
        with zipfile.ZipFile(source) as archive:
            members = archive.infolist()
    except DAMAGE as error:
        raise ValueError(f"data.path is {path!r}, which cannot be read: {error}") from error
    return {
        info.filename.removesuffix(".npy"): _member_opener(source, info)
        for info in members
        if info.filename.endswith(".npy")
    }


def _file_opener(file: Path) -> _OpenArray:
    return lambda: np.load(file, mmap_mode="r", allow_pickle=False)


def _member_opener(file: Path, info: zipfile.ZipInfo) -> _OpenArray:
    def open_member() -> Array:
        with zipfile.ZipFile(file) as archive, archive.open(info) as member:
            if info.compress_type != zipfile.ZIP_STORED:
                return np.lib.format.read_array(member, allow_pickle=False)
        with file.open("rb") as stream:  # a stored member is a .npy file inside the archive
            stream.seek(info.header_offset + 26)
            name, extra = np.frombuffer(stream.read(4), "<u2").tolist()  # of the local header
            stream.seek(info.header_offset + 30 + name + extra)
            return _map(file, stream)

    return open_member


def _map(file: Path, stream: BinaryIO) -> Array:
    """Map the `.npy` data that begin at a stream's position into memory."""
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0
    if version != (1, 0):
        read = np.lib.format.read_array_header_2_0
    shape, fortran_order, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, expected numbers")
    order: Literal["F", "C"] = "F" if fortran_order else "C"
    return np.memmap(
        file, dtype, mode="r", offset=stream.seek(0, SEEK_CUR), shape=shape, order=order
    )
