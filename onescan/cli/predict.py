"""The command that classifies images and texts: predict."""

import csv
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

import tyro

from onescan.cli.options import Argv, Checkpoint, Imports, echo, import_files, parse
from onescan.messages import printable

if TYPE_CHECKING:
    from torch import Tensor

    from onescan.inference.loading import Checkpoint as TrainedModel

ARRAY_FILES = (".npz", ".npy")
MAX_SKIPPED = 10  # messages on inputs that cannot be read
PREDICTION_FILES = (".csv", ".json")
SettingT = TypeVar("SettingT")


class Prediction(NamedTuple):
    """The most probable classes of one input, with their probabilities, best first."""

    input: str  # path, path and row of an array, or text
    top: list[tuple[str, float]]


def predict(argv: Argv) -> None:
    """Classify image files and folders, arrays, or texts and tables of texts."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        checkpoint: Checkpoint
        """Run folder, such as runs/digits/seed-0, or zoo/NAME (see `onescan zoo`)."""
        inputs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT...")]
        """For images: files of any size (PNG, JPEG, WebP, GIF, BMP, TIFF or PPM), and folders,
        whose images are found at any depth and skipped if they cannot be read. For arrays (signals,
        video): .npz files with an array x, and .npy files, of the shape and type of the training
        data. For texts: texts in quotes, and tables (.csv, .tsv, .jsonl, .ndjson, .json or
        .parquet), whose unreadable rows are skipped."""
        top_k: int = 3
        """Number of classes to print per input."""
        text_column: str | None = None
        """Column of the texts in tables; by default that of the training data."""
        out: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
        """Also write the predictions to a .csv or .json file."""
        imports: Imports = ()

    options = parse(Options, predict, argv)
    if not options.inputs:
        raise ValueError("inputs is empty, expected at least one image, folder, array or text")
    if options.top_k < 1:
        raise ValueError(f"top_k is {options.top_k}, expected at least 1")
    if options.out is not None and Path(options.out).suffix not in PREDICTION_FILES:
        raise ValueError(f"out is {options.out!r}, expected a name ending in .csv or .json")
    from onescan.inference.loading import load
    from onescan.inputs import PairFormat

    import_files(options.imports)
    checkpoint = load(options.checkpoint)
    names = checkpoint.class_names
    of_texts = isinstance(checkpoint.format, PairFormat)
    read = (
        partial(_text_probabilities, column=options.text_column)
        if of_texts
        else _image_probabilities
    )
    predictions: list[Prediction] = []
    unreadable: list[str] = []
    for given, row in read(checkpoint, options.inputs, unreadable):
        if len(names) != len(row):
            raise ValueError(
                f"{checkpoint.folder}: class_names has {len(names)} names, expected {len(row)}, "
                "one for each class of the model"
            )
        top = row.topk(min(options.top_k, len(row)))
        guesses = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        predictions.append(Prediction(given, [(names[index], part) for index, part in guesses]))
        shown = ", ".join(f"{printable(name)} {part:.1%}" for name, part in predictions[-1].top)
        echo(f"{printable(given)}: {shown}")
    for message in unreadable[:MAX_SKIPPED]:
        print(printable(f"skipped: {message}"), file=sys.stderr)
    if len(unreadable) > MAX_SKIPPED:
        print(f"skipped: {len(unreadable) - MAX_SKIPPED} more", file=sys.stderr)
    if not predictions:
        reason = f": {unreadable[0]}" if unreadable else ""
        kind, places = "text" if of_texts else "image", ", ".join(options.inputs)
        raise ValueError(f"there is no readable {kind} in {places}{reason}")
    if options.out is not None:
        from onescan.checkpoint.files import write_atomically

        out, column = Path(options.out), "text" if of_texts else "path"
        write_atomically(
            out, lambda partial: _write_predictions(partial, out.suffix, column, predictions)
        )
        echo(f"{out}: {len(predictions)} predictions")


def _image_probabilities(
    checkpoint: "TrainedModel", paths: Sequence[str], unreadable: list[str]
) -> "Iterator[tuple[str, Tensor]]":
    """Yield the path of each image or the row of an array, and the probabilities of its classes.

    Images in folders that cannot be read are skipped; messages on them are added to `unreadable`.
    """
    from onescan.experiments.data.arrays import read_inputs
    from onescan.experiments.tasks.image_classification import classify_arrays
    from onescan.inference.classification import classify
    from onescan.inputs import GridFormat, ImageFormat

    format = checkpoint.format
    arrays = [path for path in paths if Path(path).suffix in ARRAY_FILES]
    if arrays and isinstance(format, GridFormat):
        layout = _data_setting(checkpoint, "channels_first", default=False)
        paths = [path for path in paths if path not in arrays]
        for path in arrays:
            data = read_inputs(path, format, channels_first=layout)
            try:
                for row, scores in enumerate(classify_arrays(checkpoint.model, data, format)):
                    yield f"{path}[{row}]", scores
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
    is_image_model = isinstance(format, ImageFormat)
    for file, is_in_folder in _images_at([Path(path) for path in paths], walk=is_image_model):
        try:
            (scores,) = classify(checkpoint.model, [file], format)
        except (OSError, ValueError) as error:
            if not is_in_folder or str(file) not in str(error):
                raise
            unreadable.append(str(error))
            continue
        yield str(file), scores


def _data_setting(checkpoint: "TrainedModel", name: str, *, default: SettingT) -> SettingT:
    """Return a setting of the training data; the default if the data has no such setting."""
    data = checkpoint.run.get("data")
    value = data.get(name) if isinstance(data, dict) else None
    return value if isinstance(value, type(default)) else default


def _images_at(paths: Sequence[Path], *, walk: bool = True) -> Iterator[tuple[Path, bool]]:
    """Yield files and, if `walk`, the images in folders, and whether they are in a folder."""
    for path in paths:
        if not (walk and path.is_dir()):
            yield path, False
            continue
        from onescan.experiments.data.sources import images_below

        for file in images_below(str(path)):
            yield Path(file), True


def _text_probabilities(
    checkpoint: "TrainedModel", arguments: Sequence[str], unreadable: list[str], column: str | None
) -> "Iterator[tuple[str, Tensor]]":
    """Yield each text, and the probabilities of its classes.

    Args:
        checkpoint: A text classifier.
        arguments: Texts, and tables of texts.
        unreadable: Messages on the rows that cannot be read are added to it.
        column: Column of the texts in tables; None is that of the training data.

    Raises:
        ValueError: If a table does not exist or has no such column, or an argument is another file.
    """
    from onescan.experiments.data.text.files import is_table, read_rows
    from onescan.experiments.data.text_table import read_text
    from onescan.inference.classification import classify_texts
    from onescan.inputs import PairFormat

    if not (isinstance(checkpoint.format, PairFormat) and checkpoint.class_names):
        raise ValueError(f"{checkpoint.folder} holds no text classifier")
    if column is None:
        column = _data_setting(checkpoint, "text_column", default="text")
    texts = []
    for argument in arguments:
        is_file_name = is_table(Path(argument)) and len(argument.split()) == 1
        if not (is_file_name or _exists(argument)):
            if not argument.strip():
                raise ValueError("inputs has an empty text")
            texts.append(argument)
            continue
        rows = [row for row in read_rows(Path(argument)) if not row.is_empty_line]
        columns = dict.fromkeys(str(name) for row in rows for name in row.cells)
        if columns and column not in columns:
            raise ValueError(
                f"{argument} has no column {column!r}; available: {', '.join(columns)} "
                "(--text-column selects one)"
            )
        for row in rows:
            try:
                texts.append(read_text(row, column))
            except ValueError as error:
                unreadable.append(str(error))
    if texts:
        encoder = checkpoint.format.open(checkpoint.folder)
        yield from zip(texts, classify_texts(checkpoint.model, texts, encoder), strict=True)


def _exists(argument: str) -> bool:
    """Return whether there is a file of this name, or a folder of this path."""
    with suppress(OSError, ValueError):  # such as for a text longer than file names may be
        path = Path(argument)
        return path.is_file() or (os.sep in argument and path.is_dir())
    return False


def _write_predictions(
    file: Path, suffix: str, column: str, predictions: Sequence[Prediction]
) -> None:
    """Write a row per input: itself, its class, confidence, and the other most probable classes.

    Args:
        file: File to write.
        suffix: Its format, .csv or .json.
        column: Name of the column of the inputs.
        predictions: One or more predictions, with the same number of classes.
    """
    rows = []
    for given, top in predictions:
        row: dict[str, object] = {column: given}
        for place, (name, part) in enumerate(top, start=1):
            number = "" if place == 1 else f"_{place}"
            row |= {f"class{number}": name, f"confidence{number}": round(part, 6)}
        rows.append(row)
    with file.open("w", encoding="utf-8", newline="") as stream:
        if suffix == ".json":
            json.dump(rows, stream, indent=1, ensure_ascii=False)
            return
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
