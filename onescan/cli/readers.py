"""Read the images, arrays and texts to which a command applies a model."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from onescan.messages import printable

if TYPE_CHECKING:
    from onescan.inference.loading import Checkpoint as TrainedModel

ARRAY_FILES = (".npz", ".npy")
LINE_FILE = ".txt"
MAX_SKIPPED = 10  # messages about inputs that cannot be read
OutputT = TypeVar("OutputT")
SettingT = TypeVar("SettingT")


class GivenText(NamedTuple):
    """A text and its name: its file and line, or the text itself if it is an argument."""

    text: str
    name: str


def read_grids(
    checkpoint: "TrainedModel",
    paths: Sequence[str],
    unreadable: list[str],
    *,
    read_arrays: Callable[[Any], Iterable[OutputT]],
    read_file: Callable[[Path], OutputT],
) -> Iterator[tuple[str, OutputT]]:
    """Yield the path of each image or the row of each array, and the output for it.

    Args:
        checkpoint: A model that takes images or arrays.
        paths: Array files, which are read first, image files, and folders of images.
        unreadable: List to which messages about unreadable images in folders are added.
        read_arrays: Returns the outputs for the examples of an array file, an `ArrayDataset`.
        read_file: Returns the output for an image file.

    Raises:
        ValueError: If a file of arrays, or an image that is not in a folder, cannot be read.
        OSError: Likewise.
    """
    from onescan.experiments.data.arrays import read_inputs
    from onescan.inputs import GridFormat, ImageFormat

    format = checkpoint.format
    arrays = [path for path in paths if Path(path).suffix in ARRAY_FILES]
    if arrays and isinstance(format, GridFormat):
        layout = data_setting(checkpoint, "channels_first", default=False)
        paths = [path for path in paths if path not in arrays]
        for path in arrays:
            data = read_inputs(path, format, channels_first=layout)
            try:
                for row, output in enumerate(read_arrays(data)):
                    yield f"{path}[{row}]", output
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
    is_image_model = isinstance(format, ImageFormat)
    for file, is_in_folder in images_at([Path(path) for path in paths], walk=is_image_model):
        try:
            output = read_file(file)
        except (OSError, ValueError) as error:
            if not is_in_folder or str(file) not in str(error):
                raise
            unreadable.append(str(error))
            continue
        yield str(file), output


def images_at(paths: Sequence[Path], *, walk: bool = True) -> Iterator[tuple[Path, bool]]:
    """Yield files and, if `walk`, the images in folders, each with whether it is in a folder."""
    for path in paths:
        if not (walk and path.is_dir()):
            yield path, False
            continue
        from onescan.experiments.data.sources import images_below

        for file in images_below(str(path)):
            yield Path(file), True


def read_texts(arguments: Sequence[str], column: str, unreadable: list[str]) -> list[GivenText]:
    """Read texts from the command line, from tables, and from the lines of .txt files.

    Args:
        arguments: Texts, and names of files.
        column: Column of the texts in tables.
        unreadable: List to which messages about unreadable rows and lines are added.

    Raises:
        ValueError: If a file does not exist, is of another type, or has no such column; or if an
            argument is a folder.
    """
    from onescan.experiments.data.text.files import READERS, is_table
    from onescan.experiments.data.text.lines import file_type
    from onescan.inputs.sequences import check_unicode

    types = ", ".join((LINE_FILE, *READERS))
    texts: list[GivenText] = []
    for index, argument in enumerate(arguments):
        path = Path(argument)
        has_lines = file_type(path) == LINE_FILE
        is_file_name = (is_table(path) or has_lines) and len(argument.split()) == 1
        if argument.strip() and _path_is(Path.is_dir, argument):
            raise ValueError(
                f"{argument} is a folder, expected a text or a file of texts ({types}); to pass "
                f"the text {argument!r} itself, write it to such a file"
            )
        check_unicode(f"inputs[{index}]", argument)
        if is_file_name or _path_is(Path.is_file, argument):
            if not (has_lines or is_table(path)):
                raise ValueError(
                    f"{argument} is not a file of texts, expected a name ending in {types}"
                )
            texts += (_lines_of if has_lines else _rows_of)(argument, column, unreadable)
        elif argument.strip():
            texts.append(GivenText(argument, argument))
        else:
            raise ValueError("inputs contains an empty text")
    return texts


def _rows_of(argument: str, column: str, unreadable: list[str]) -> Iterator[GivenText]:
    """Yield the texts of a table; messages about unreadable rows are added to `unreadable`."""
    from onescan.experiments.data.text.files import read_rows
    from onescan.experiments.data.text.lines import HEADER
    from onescan.experiments.data.text_table import read_text

    rows = [row for row in read_rows(Path(argument)) if not row.is_empty_line]
    columns = dict.fromkeys(str(name) for row in rows for name in row.cells)
    if columns and column not in columns:
        raise ValueError(
            f"{argument} has no column {column!r}; available: {', '.join(columns)} "
            f"(--text-column selects one); {HEADER}"
        )
    for row in rows:
        try:
            yield GivenText(read_text(row, column), row.location)
        except ValueError as error:
            unreadable.append(str(error))


def _lines_of(argument: str, column: str, unreadable: list[str]) -> Iterator[GivenText]:
    """Yield the lines of a file; messages about unreadable ones are added to `unreadable`."""
    from onescan.experiments.data.text.files import read_file

    if not Path(argument).is_file():
        raise ValueError(f"there is no file {argument}")
    for document, _ in read_file(Path(argument), {}, column, "line"):
        if document.is_blank:
            unreadable.append(f"{document.location}: the text is empty")
        elif document.fault:
            unreadable.append(document.message)
        else:
            yield GivenText(document.text, document.location)


def _path_is(kind: Callable[[Path], bool], argument: str) -> bool:
    """Return whether an argument is the path of a file or a folder."""
    with suppress(OSError, ValueError):  # for example, if a text is too long for a file name
        return kind(Path(argument))
    return False


def data_setting(checkpoint: "TrainedModel", name: str, *, default: SettingT) -> SettingT:
    """Return a setting of the training data; the default if the data has no such setting."""
    data = checkpoint.run.get("data")
    value = data.get(name) if isinstance(data, dict) else None
    return value if isinstance(value, type(default)) else default


def check_no_column(column: str | None) -> None:
    """Raise ValueError if a column of texts is given for a model of other inputs."""
    if column is not None:
        raise ValueError(f"text_column is {column!r}, but the model does not read texts")


def report_skipped(unreadable: Sequence[str]) -> None:
    """Print the first messages about unreadable inputs, and the number of further ones."""
    for message in unreadable[:MAX_SKIPPED]:
        print(printable(f"skipped: {message}"), file=sys.stderr)
    if len(unreadable) > MAX_SKIPPED:
        print(f"skipped: {len(unreadable) - MAX_SKIPPED} more", file=sys.stderr)


def nothing_readable(what: str, inputs: Sequence[str], unreadable: Sequence[str]) -> ValueError:
    """Return the error to raise if none of the inputs can be read."""
    reason = f": {unreadable[0]}" if unreadable else ""
    return ValueError(f"there is no readable {what} in {', '.join(inputs)}{reason}")
