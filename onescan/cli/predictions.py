"""Predictions of classifiers: the texts on a command line, and the file of all predictions."""

import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from onescan.training.loading import Checkpoint

PREDICTION_FILES = (".csv", ".json")


class Prediction(NamedTuple):
    """The most probable classes of one image or text, with their probabilities, best first."""

    input: str  # path or text
    top: list[tuple[str, float]]


def text_probabilities(
    checkpoint: "Checkpoint", arguments: Sequence[str], unreadable: list[str]
) -> "Iterator[tuple[str, Tensor]]":
    """Yield each text, and the probabilities of its classes.

    Args:
        checkpoint: A text classifier.
        arguments: Texts, and tables of texts, whose column is that of the training data.
        unreadable: Messages on the rows that cannot be read are added to it.

    Raises:
        ValueError: If a table does not exist or an argument is another file.
    """
    from onescan.data import PairFormat, TextTableConfig
    from onescan.data.text.source import is_table, read_rows
    from onescan.data.text_table import read_text
    from onescan.tasks.sequence_classification import classify_texts

    if not (isinstance(checkpoint.format, PairFormat) and checkpoint.class_names):
        raise ValueError(f"{checkpoint.folder} holds no text classifier")
    data = checkpoint.config.data
    column = data.text_column if isinstance(data, TextTableConfig) else "text"
    texts = []
    for argument in arguments:
        is_file_name = is_table(Path(argument)) and len(argument.split()) == 1
        if not (is_file_name or _is_file(argument)):
            if not argument.strip():
                raise ValueError("inputs has an empty text")
            texts.append(argument)
            continue
        for row in read_rows(Path(argument)):
            try:
                texts.append(read_text(row, column))
            except ValueError as error:
                unreadable.append(str(error))
    if texts:
        encoder = checkpoint.format.open(checkpoint.folder)
        yield from zip(texts, classify_texts(checkpoint.model, texts, encoder), strict=True)


def _is_file(argument: str) -> bool:
    with suppress(OSError, ValueError):  # such as for a text longer than file names may be
        return Path(argument).is_file()
    return False


def write_predictions(
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
