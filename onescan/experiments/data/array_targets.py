"""Targets of arrays: their kind, inferred from y, and the checks of labels and values."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from onescan.checks import check_choice, check_distinct
from onescan.experiments.data.array_maps import Maps, map_layout
from onescan.experiments.data.base import listed, missing_classes_note
from onescan.inputs.targets import Target, TargetKind, value_target
from onescan.messages import plural

Array = Shaped[np.ndarray, "N *_"]  # any type
Indices = Int[Tensor, " part"]
Rows = Float[Tensor, "rows outputs"]  # float64 values, or labels of 0 and 1

COLUMNS = ("path", "labels")
OTHER_TARGET = "if this is wrong, pass --data.target"


def infer_kind(y: Array, axis_sizes: tuple[int, ...]) -> TargetKind:
    """Infer what y holds from its type and shape, and the size of an example along each axis.

    >>> infer_kind(np.array([0, 2]), (9,)), infer_kind(np.eye(2, dtype=int), (9,))
    ('class', 'multilabel')
    >>> infer_kind(np.eye(2), (9,)), infer_kind(np.zeros((2, 9), int), (9,))
    ('value', 'class_map')
    """
    if y.ndim > len(axis_sizes) and map_layout(y, axis_sizes, channels_first=True):
        return "value_map" if y.dtype.kind == "f" else "class_map"
    if y.dtype.kind == "f":
        return "value"
    is_table = y.ndim == 2 and y.shape[1] > 1  # noqa: PLR2004
    if is_table and y.dtype.kind in "iub" and _first_not_binary(y) is None:
        return "multilabel"
    return "class"


def read_kind(
    where: str, name: str, y: Array, kind: TargetKind | None, axis_sizes: tuple[int, ...]
) -> TargetKind:
    """Return the kind of target that y holds.

    Args:
        where: Beginning of error messages.
        name: Name of the array.
        y: Labels or values of the training examples.
        kind: What the user expects, if anything.
        axis_sizes: Size of an example along each axis.

    Raises:
        ValueError: If the kind is unknown, or the shape of y fits no kind of target.
    """
    if kind is not None:
        check_choice("data.target", kind, get_args(TargetKind))
        return kind
    inferred = infer_kind(y, axis_sizes)
    if inferred in ("class", "value") and y.ndim > 2:  # noqa: PLR2004
        raise ValueError(
            f"{where} {name} has shape {y.shape}, expected a target for each example, or for each "
            f"position: {(len(y), *axis_sizes)}"
        )
    is_table = y.ndim == 2 and y.shape[1] > 1  # noqa: PLR2004
    if inferred == "class" and is_table and (odd := _first_not_binary(y)) is not None:
        raise ValueError(
            f"{where} {name} has shape {y.shape}, and {_at(name, odd)} is {y[odd]}; expected one "
            "class per example, 0 and 1 for several labels, or floats for values (--data.target "
            "value reads integers as values)"
        )
    return inferred


def kind_note(kind: TargetKind, outputs: int, arrays: Mapping[str, Array]) -> str:
    """Describe how y is read, if it holds labels or values."""
    read = "real value" if kind == "value" else "binary label"
    note = f"y is read as {plural(outputs, read)} per example"
    if outputs > 1 and all(_is_one_hot(y) for y in arrays.values()):
        return f"{note}, although each has a single 1; if they are classes, save y.argmax(1)"
    if kind == "multilabel":
        return f"{note}; {OTHER_TARGET} value"
    if outputs > 1 and all(_first_not_binary(y) is None for y in arrays.values()):
        return f"{note}, although all are 0 or 1; {OTHER_TARGET} multilabel"
    if outputs == 1 and all((y == np.floor(y)).all() for y in arrays.values()):
        return f"{note}, although all are whole numbers; if they are classes, save y.astype(int)"
    return f"{note}; {OTHER_TARGET} class or multilabel" if outputs > 1 else note


def read_rows(
    where: str,
    arrays: Mapping[str, Array],
    kind: TargetKind,
    names: tuple[str, ...],
) -> tuple[tuple[str, ...], list[Rows]]:
    """Check labels or values, and return them with one row per example.

    Args:
        where: Beginning of error messages.
        arrays: y of each split, by name, training data first.
        kind: "multilabel" or "value".
        names: Names of the labels or values; () numbers them.

    Returns:
        The names, and the rows of each split.

    Raises:
        ValueError: If an array has another shape or type than expected, a label is neither 0 nor 1,
            or a value is not finite; names the first one.
    """
    first = next(iter(arrays))
    rows = []
    for name, y in arrays.items():
        expected = "numbers" if kind == "value" else "booleans, or 0 and 1"
        if y.dtype.kind not in "fiub":
            raise ValueError(
                f"{where} {name} holds {y.dtype}, expected {expected} for data.target {kind}"
            )
        count = len(y)
        shapes = f"({count},) or ({count}, values)" if kind == "value" else f"({count}, labels)"
        if y.ndim not in ((1, 2) if kind == "value" else (2,)) or 0 in y.shape:
            raise ValueError(f"{where} {name} has shape {y.shape}, expected {shapes}")
        if y.shape[1:] != arrays[first].shape[1:]:
            raise ValueError(
                f"{where} {name} has shape {y.shape}, but {first} has {arrays[first].shape}"
            )
        values = np.asarray(y, dtype=np.float64)
        if not (finite := np.isfinite(values)).all():
            index = tuple(np.argwhere(~finite)[0].tolist())
            raise ValueError(
                f"{where} {_at(name, index)} is {values[index]}, expected a finite number; remove "
                "examples whose values or labels are missing"
            )
        if kind == "multilabel" and (odd := _first_not_binary(y)) is not None:
            raise ValueError(f"{where} {_at(name, odd)} is {y[odd]}, expected 0 or 1")
        rows.append(torch.from_numpy(values.reshape(count, -1).copy()))
    outputs = rows[0].shape[1]
    return _names(kind, outputs, names), rows


def _names(kind: TargetKind, outputs: int, names: tuple[str, ...]) -> tuple[str, ...]:
    noun = "value" if kind == "value" else "label"
    if not names:
        return (noun,) if outputs == 1 else tuple(f"{noun}_{i}" for i in range(outputs))
    if len(names) != outputs:
        raise ValueError(
            f"data.class_names has {plural(len(names), 'name')} ({listed(names)}), but y has "
            f"{plural(outputs, noun)}"
        )
    check_distinct(**{"data.class_names": names})
    if taken := [name for name in names if name in COLUMNS]:
        raise ValueError(
            f"data.class_names contains {taken[0]!r}, but files of predictions already have a "
            "column of this name, expected another name"
        )
    return names


def fit_target(kind: TargetKind, labels: Any, indices: Indices) -> Target:
    """Return a target of a kind; values are standardized with the statistics of given examples."""
    if isinstance(labels, Maps):
        return labels.fit(indices) if kind == "value_map" else Target(kind=kind)
    return value_target(labels[indices]) if kind == "value" else Target(kind=kind)


def target_notes(
    kind: TargetKind, labels: Any, indices: Indices, names: Sequence[str], part: str
) -> list[str]:
    """Return notes on missing classes, labels or values among the targets of some examples.

    Args:
        kind: Kind of the targets.
        labels: Targets of all examples, as `ArrayDataset` has them.
        indices: The examples.
        names: Names of the outputs.
        part: What the examples are called: "training" or "test".

    Raises:
        ValueError: If they are maps in which no position has a class or value.
    """
    if isinstance(labels, Maps):
        return _map_notes(labels, indices, names, part)
    of_part = labels[indices]
    if kind == "class":
        return missing_classes_note(of_part, names, part=part)
    note = constant_values_notes if kind == "value" else missing_labels_notes
    return note(of_part, names, part)


def _map_notes(labels: Maps, indices: Indices, names: Sequence[str], part: str) -> list[str]:
    """Return notes on the positions without a class or value, and on classes without positions."""
    is_class = labels.kind == "class_map"
    counts, what = labels.count(indices, len(names)), "class" if is_class else "value"
    known, total = int(counts.sum()), labels.positions(indices) * (1 if is_class else len(names))
    if not known:
        raise ValueError(f"no position of the {part} examples has a {what}, expected at least one")
    share = f"{part} positions without a {what}: {1 - known / total:.1%}"
    missing = [name for name, count in zip(names, counts, strict=True) if not count]
    without = f"{'classes' if is_class else 'values'} without {part} positions: {listed(missing)}"
    return [share] * (known < total) + [without] * bool(missing)


def missing_labels_notes(rows: Rows, names: Sequence[str], part: str) -> list[str]:
    """Return a note on the labels that no example of a part has, if there are any."""
    occurs = rows.any(dim=0).tolist()
    missing = [name for name, has_examples in zip(names, occurs, strict=True) if not has_examples]
    return [f"labels without {part} examples: {listed(missing)}"] if missing else []


def constant_values_notes(rows: Rows, names: Sequence[str], part: str) -> list[str]:
    """Return a note on the values that are the same in all examples of a part, if there are any."""
    constant = (rows == rows[:1]).all(dim=0).tolist()
    constant_names = [
        name for name, is_constant in zip(names, constant, strict=True) if is_constant
    ]
    return (
        [f"values that are the same in all {part} examples: {listed(constant_names)}"]
        if constant_names
        else []
    )


def _is_one_hot(y: Array) -> bool:
    """Return whether each row is 0 except for a single 1."""
    return _first_not_binary(y) is None and bool((y.sum(axis=1) == 1).all())


def _first_not_binary(y: Array) -> tuple[Any, ...] | None:
    """Return the index of the first entry that is neither 0 nor 1, if there is one."""
    odd = np.argwhere((y != 0) & (y != 1))
    return tuple(odd[0].tolist()) if len(odd) else None


def _at(name: str, index: Sequence[int]) -> str:
    return f"{name}[{', '.join(map(str, index))}]"
