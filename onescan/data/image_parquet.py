"""Parquet files on disk: which splits they are of, and whether they belong together."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onescan.data.image_folder import SPLITS

# what the datasets library raises on rows that are damaged, or on a state that is none of its own
UNREADABLE = (AttributeError, LookupError, OSError, TypeError, ValueError)


def first_line(error: BaseException) -> str:
    """Cut short what a library says about an error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def parquet_splits(folder: Path, files: Sequence[Path]) -> dict[str, list[str]]:
    """Sort files by the split that their names, or their folders', speak of."""
    splits: dict[str, list[str]] = {}
    for file in files:
        words = re.findall("[a-z]+", str(file.relative_to(folder)).lower())
        named = [word for word in words if word in SPLITS]
        splits.setdefault(named[-1] if named else "", []).append(str(file))
    nameless = splits.pop("", [])
    if nameless and splits:
        raise ValueError(
            f"data.path is {str(folder)!r}, where {nameless[0]} names no split and others do, "
            f"expected one of {', '.join(SPLITS)} in its name or its folder's"
        )
    return splits or {"train": nameless}


def check_parquet(path: str, splits: Mapping[str, Sequence[str]]) -> None:
    """See to it that each split has rows, and that the library can put all files below the first.

    Raises:
        ValueError: it is not so, or a file is damaged; names it.
    """
    footers = {file: _footer(file) for files in splits.values() for file in files}
    for split, files in splits.items():
        if not any(footers[file].num_rows for file in files):
            raise ValueError(f"data.path is {path!r}, whose split {split} is empty")
    columns = {file: footer.schema.to_arrow_schema().names for file, footer in footers.items()}
    first = next(iter(columns))
    for file, names in columns.items():
        if new := [name for name in names if name not in columns[first]]:
            raise ValueError(
                f"data.path is {path!r}, where {file} has columns that {first} has not: "
                f"{', '.join(new)}"
            )


def count_rows(files: Sequence[str]) -> int:
    """Count the rows of all files.

    Raises:
        ValueError: one is damaged; names it.
    """
    return sum(_footer(file).num_rows for file in files)


def find_fault(files: Sequence[str]) -> str | None:
    """Name the first file that cannot be read to its end, or holds other types than the first."""
    from pyarrow import parquet

    for file in files:
        try:
            for _ in parquet.ParquetFile(file).iter_batches():
                pass
        except (OSError, ValueError) as error:
            return f"{file} is no whole parquet file: {first_line(error)}"
    schemas = {file: _footer(file).schema.to_arrow_schema() for file in files}
    for file, schema in schemas.items():
        for name, kind in zip(schema.names, schema.types, strict=True):
            expected = schemas[files[0]].field(name).type
            if kind != expected:
                return f"the column {name} of {file} holds {kind}, of {files[0]} {expected}"
    return None


def _footer(file: str) -> Any:
    from pyarrow import parquet

    try:
        return parquet.read_metadata(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is no whole parquet file: {first_line(error)}") from error
