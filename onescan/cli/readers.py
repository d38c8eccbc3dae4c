"""Read the images, arrays and texts to which a command applies a model."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from onescan.messages import printable

if TYPE_CHECKING:
    from torch import Tensor

    from onescan.inference.loading import Checkpoint as TrainedModel

    Example = tuple[Tensor, Tensor | None]  # values, and which of them are real

ARRAY_FILES = (".npz", ".npy")
LINE_FILE = ".txt"
MAX_SKIPPED = 10  # messages about inputs that cannot be read
SettingT = TypeVar("SettingT")
Sizes = dict[str, int]  # the batch size, if it is given


class GivenText(NamedTuple):
    """A text and where it comes from.

    Attributes:
        text: The text.
        name: Its file and line, or the text itself if it is an argument.
        path: Its file, if any.
        row: Its index in the file: among the rows of a table, or the lines of a .txt file.
    """

    text: str
    name: str
    path: str | None = None
    row: int | None = None


def read_batches(
    checkpoint: "TrainedModel", paths: Sequence[str], unreadable: list[str], *, batch_size: int = 64
) -> "Iterator[tuple[list[str], Tensor, Tensor | None]]":
    """Yield batches of images or arrays of one shape: names, standardized values, and masks.

    Args:
        checkpoint: A model that takes images or arrays.
        paths: Array files, which are read first, image files, and folders of images.
        unreadable: List to which messages about unreadable images in folders are added.
        batch_size: Maximum number of images or arrays per batch.

    Yields:
        The path of each image, or the file and row of each array; the model's input; and which of
        its values are real, or None if all are.

    Raises:
        ValueError: If a file of arrays, or an image that is not in a folder, cannot be read.
        OSError: Likewise.
    """
    import torch

    for (_, is_masked), group in groupby(
        _examples(checkpoint, paths, unreadable),
        lambda each: (each[1][0].shape, each[1][1] is not None),
    ):
        while batch := list(islice(group, batch_size)):
            values, masks = zip(*(example for _, example in batch), strict=True)
            keep = torch.stack(masks) if is_masked else None
            yield [name for name, _ in batch], torch.stack(values), keep


def _examples(
    checkpoint: "TrainedModel", paths: Sequence[str], unreadable: list[str]
) -> "Iterator[tuple[str, Example]]":
    """Yield the name, the standardized values and the mask of each image or array."""
    from onescan.experiments.data.arrays import read_inputs
    from onescan.experiments.tasks.image_classification import read_arrays
    from onescan.inference.classification import image_format
    from onescan.inputs import GridFormat, ImageFormat, read_image

    format = checkpoint.format
    arrays = [path for path in paths if Path(path).suffix in ARRAY_FILES]
    if arrays and isinstance(format, GridFormat):
        layout = data_setting(checkpoint, "channels_first", default=False)
        paths = [path for path in paths if path not in arrays]
        for path in arrays:
            data, row = read_inputs(path, format, channels_first=layout), 0
            try:
                for values, keep in read_arrays(data, format):
                    masks = [None] * len(values) if keep is None else keep
                    for example in zip(values, masks, strict=True):
                        yield f"{path}[{row}]", example
                        row += 1
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
    is_image_model = isinstance(format, ImageFormat)
    for file, is_in_folder in images_at([Path(path) for path in paths], walk=is_image_model):
        try:
            image = read_image(file, image_format(format, file))
        except (OSError, ValueError) as error:
            if not is_in_folder or str(file) not in str(error):
                raise
            unreadable.append(str(error))
            continue
        yield str(file), (image, None)


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
    for index, row in enumerate(rows):
        try:
            yield GivenText(read_text(row, column), row.location, argument, index)
        except ValueError as error:
            unreadable.append(str(error))


def _lines_of(argument: str, column: str, unreadable: list[str]) -> Iterator[GivenText]:
    """Yield the lines of a file; messages about unreadable ones are added to `unreadable`."""
    from onescan.experiments.data.text.files import read_file

    if not Path(argument).is_file():
        raise ValueError(f"there is no file {argument}")
    for index, (document, _) in enumerate(read_file(Path(argument), {}, column, "line")):
        if document.is_blank:
            unreadable.append(f"{document.location}: the text is empty")
        elif document.fault:
            unreadable.append(document.message)
        else:
            yield GivenText(document.text, document.location, argument, index)


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
