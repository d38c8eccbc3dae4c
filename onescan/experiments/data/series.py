"""Time series from tables with a column per series, and from arrays."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from onescan.experiments.data.arrays import DAMAGE
from onescan.experiments.data.base import listed
from onescan.experiments.data.text.files import is_table, read_rows
from onescan.experiments.data.text.lines import Row
from onescan.experiments.data.times import Times, is_date, read_times
from onescan.messages import hint, plural

# Weekly CO2 at Mauna Loa in ppm, in the public domain: Keeling and Whorf, 2004, "Atmospheric CO2
# concentrations derived from flask air samples at sites in the SIO network", in Trends, Carbon
# Dioxide Information Analysis Center; as in statsmodels, with dates as in ISO 8601.
EMBEDDED = {"co2": Path(__file__).with_name("co2.csv")}
MISSING = {"", "nan", "na", "n/a", "null", "none", "nat"}
TIME_NAMES = {"", "time", "date", "datetime", "timestamp", "ds", "year", "index"}
LARGEST = 1e150  # whose square is within the range of float64
MAX_FILL_FACTOR = 10  # filling gaps may lengthen a table by this factor
AXES = (1, 2, 3)  # of arrays: [T], [T, channels] or [N, T, channels]


@dataclass(frozen=True, kw_only=True)
class SeriesTable:
    """Time series of one length."""

    values: Float64[Tensor, "N channels time"]
    """Their values; NaN where they are missing."""
    names: tuple[tuple[str, ...], ...]
    """Name of each channel of each series."""
    times: Times | None = None
    """The time of each step, if it is known."""
    has_columns: bool = False
    """Whether the names are those of the columns of a table."""
    notes: tuple[str, ...] = ()
    """What was filled or is missing."""

    def separate(self) -> "SeriesTable":
        """Return the channels as series of one channel each."""
        names = tuple((name,) for series in self.names for name in series)
        return replace(self, values=self.values.flatten(0, 1)[:, None], names=names)

    def select(self, columns: Sequence[str]) -> "SeriesTable":
        """Return some columns of a table.

        Raises:
            ValueError: If one does not exist.
        """
        (names,) = self.names
        for column in columns:
            if column not in names:
                raise ValueError(f"there is no column {column!r}{hint(column, names)}")
        values = self.values[:, [names.index(column) for column in columns]]
        return replace(self, values=values, names=(tuple(columns),))


def read_series(path: str, time_column: str | None = None) -> SeriesTable:
    """Read time series.

    A table has a column per channel, all of one series, and optionally a column of times; empty
    cells are missing values. An array x has shape [T], [T, channels] or [N, T, channels], in a
    ``.npz`` or ``.npy`` file.

    Args:
        path: The file; or "co2" for the embedded series, unless there is a file of that name.
        time_column: Column of the times. None uses the first column if it is called time, date or
            the like, or holds dates.

    Raises:
        ValueError: If there is no such file or column, a cell is neither a number nor empty (names
            the file and the line), or times are not regular.
    """
    file = Path(path).expanduser()
    if path in EMBEDDED and not file.is_file():
        file = EMBEDDED[path]
    table = _read_table(file, time_column) if is_table(file) else _read_array(file)
    size, gaps = table.values.numel(), int(table.values.isnan().sum())
    if gaps == size:
        raise ValueError(f"{path} has no values: all are missing")
    note = f"{gaps:,} of {size:,} values are missing ({gaps / size:.1%})"
    return replace(table, notes=(*table.notes, note)) if gaps else table


def _read_table(path: Path, time_column: str | None) -> SeriesTable:
    rows = list(read_rows(path))
    for row in rows:
        if row.fault:
            raise ValueError(f"{row.location}: {row.fault}")
    columns = list(dict.fromkeys(str(name) for row in rows for name in row.cells))
    while rows and rows[-1].is_empty_line:
        rows.pop()
    if len(columns) > 1:  # in a single column, an empty line is an empty cell
        rows = [row for row in rows if not row.is_empty_line]
    if len(rows) < 2:  # noqa: PLR2004
        raise ValueError(f"{path} has {plural(len(rows), 'row')}, expected at least 2 steps")
    time = _time_column(path, columns, rows[0], time_column)
    names = tuple(name for name in columns if name != time)
    if not names:
        raise ValueError(f"{path} has no column of values besides {time!r}")
    cells = np.array([[_number(row, name) for name in names] for row in rows])
    table = SeriesTable(values=_series(cells), names=(names,), has_columns=True)
    if time is None:
        return table
    texts = [str(row.cells.get(time, "")).strip() for row in rows]
    times, steps = read_times(texts, [row.location for row in rows])
    length, name = steps[-1] + 1, f"column {time!r}"
    if length > MAX_FILL_FACTOR * len(rows):
        raise ValueError(
            f"{path}: the times in {name} are {times.every} apart, but gaps between the "
            f"{len(rows):,} rows amount to {length - len(rows):,} steps, expected smaller gaps"
        )
    filled = np.full((length, len(names)), np.nan)
    filled[steps] = cells
    notes = [f"times are read from {name}, with a step of {times.every}"]
    if length > len(rows):
        notes.append(f"filled gaps in time with {plural(length - len(rows), 'missing step')}")
    return replace(table, values=_series(filled), times=times, notes=tuple(notes))


def _time_column(path: Path, columns: Sequence[str], row: Row, given: str | None) -> str | None:
    """Return the column of the times, or None if there is none."""
    if given is not None:
        if given not in columns:
            raise ValueError(f"{path} has no column {given!r} of times{hint(given, columns)}")
        return given
    is_time = columns[0].strip().lower() in TIME_NAMES
    return columns[0] if is_time or is_date(str(row.cells.get(columns[0], "")).strip()) else None


def _number(row: Row, column: str) -> float:
    cell = row.cells.get(column)
    text = "" if cell is None else str(cell).strip()
    if text.lower() in MISSING:
        return math.nan
    try:
        value = float(text)
    except ValueError:
        value = math.inf
    if not abs(value) <= LARGEST:
        most = f" up to {LARGEST:g}" if math.isfinite(value) else ""
        raise ValueError(
            f"{row.location}: the value in column {column!r} is {text!r}, expected a number{most}, "
            "or an empty cell if it is missing (times are written as in 2020-01-31)"
        )
    return value


def _series(cells: Any) -> Float64[Tensor, "1 channels time"]:
    return torch.from_numpy(np.ascontiguousarray(cells.T))[None]


def _read_array(path: Path) -> SeriesTable:
    if path.suffix not in (".npz", ".npy"):
        raise ValueError(
            f"'{path}' is not a file of time series, expected a table (.csv, .tsv, .jsonl or "
            ".parquet) or arrays (.npz or .npy)"
        )
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        loaded = np.load(path, allow_pickle=False)
        arrays = {"x": loaded} if path.suffix == ".npy" else dict(loaded)
    except DAMAGE as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    name = next(iter(arrays)) if len(arrays) == 1 else "x"
    if name not in arrays:
        raise ValueError(f"{path} has no array x; found: {listed(sorted(arrays)) or 'none'}")
    x = arrays[name]
    if x.dtype.kind not in "fiub" or x.ndim not in AXES or 0 in x.shape:
        raise ValueError(
            f"{path}: {name} holds {x.dtype} of shape {x.shape}, expected real numbers of shape "
            "[T], [T, channels] or [N, T, channels]"
        )
    for index in np.argwhere(np.abs(x.astype(np.float64)) > LARGEST)[:1].tolist():
        raise ValueError(
            f"{path}: {name}{index} is {x[tuple(index)]}, expected a number up to {LARGEST:g}, or "
            "NaN if it is missing"
        )
    with_channels = x[:, None] if x.ndim == 1 else x
    series = (with_channels if x.ndim == max(AXES) else with_channels[None]).astype(np.float64)
    names = tuple(
        tuple(_label(name, x.ndim, n, channel) for channel in range(series.shape[2]))
        for n in range(len(series))
    )
    return SeriesTable(values=torch.from_numpy(series).mT.contiguous(), names=names)


def _label(name: str, axes: int, series: int, channel: int) -> str:
    return (name, f"{name}[:, {channel}]", f"{name}[{series}, :, {channel}]")[axes - 1]
