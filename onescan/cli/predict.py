"""The command that applies a model to images, arrays, texts and time series: predict."""

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import tyro

from onescan.cli.forecast import forecast_rows
from onescan.cli.options import (
    COMMANDS_BY_MODEL,
    Argv,
    Checkpoint,
    Compute,
    Device,
    Imports,
    echo,
    import_files,
    parse,
)
from onescan.cli.readers import (
    Sizes,
    check_no_column,
    data_setting,
    nothing_readable,
    read_batches,
    read_texts,
    report_skipped,
)
from onescan.messages import named_type, printable

if TYPE_CHECKING:
    from torch import Tensor

    from onescan.inference.loading import Checkpoint as TrainedModel
    from onescan.inputs.targets import Target, TargetKind

HALF = 0.5  # probability above which a label is predicted
SEPARATOR = ";"  # between labels in a cell
PREDICTION_FILES = (".csv", ".json")


class Prediction(NamedTuple):
    """What a model predicts for one input.

    Attributes:
        input: The input, by column: its path, with the row of an array; or the text after its file
            and row, if any.
        outputs: Names and numbers: the most probable classes with their probabilities, best first;
            or all labels with their probabilities; or all values.
    """

    input: dict[str, object]
    outputs: list[tuple[str, float]]

    @property
    def labels(self) -> list[str]:
        """The labels that more probably apply than not."""
        return [name for name, probability in self.outputs if probability > HALF]


def predict(argv: Argv) -> None:
    """Classify images, arrays or texts, predict labels, values or maps, or forecast series."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        checkpoint: Checkpoint
        """Run folder, such as runs/digits/seed-0, or zoo/NAME (see `onescan zoo`)."""
        inputs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT...")]
        """For images: files of any size (PNG, JPEG, WebP, GIF, BMP, TIFF or PPM), and folders,
        whose images are found at any depth and skipped if they cannot be read. For arrays (signals,
        video): .npz files with an array x, and .npy files, of the shape and type of the training
        data. For texts: texts in quotes, .txt files with one text per line, and tables (.csv, .tsv,
        .jsonl, .ndjson, .json or .parquet). Empty lines and unreadable rows are skipped. For time
        series: tables with a column per series, and .npz or .npy files. For volumes: NIfTI files,
        and folders of them."""
        top_k: int = 3
        """Number of classes to print per input. All labels and values are printed; for a map, the
        share of each class, or the range of each value."""
        text_column: str | None = None
        """Column of the texts in tables; by default that of the training data. Only for text
        models."""
        out: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
        """Also write the predictions to a .csv or .json file, with the file and the row of each
        text, counted from 0. A model that predicts a class or values at each position writes a .npz
        or .npy file for arrays, or a folder of .png files for images, or of .nii.gz files for
        volumes."""
        batch_size: int | None = None
        """Images, arrays, texts or series per batch, or windows of large maps; affects memory, and
        results only by rounding. By default 64, 256 series, or 4 windows."""
        device: Device = "auto"
        compute: Compute
        imports: Imports = ()

    options = parse(Options, predict, argv)
    if not options.inputs:
        raise ValueError("inputs is empty, expected at least one image, folder, array or text")
    if options.top_k < 1:
        raise ValueError(f"top_k is {options.top_k}, expected at least 1")
    from onescan.checks import check_whole
    from onescan.cli.maps import predict_maps
    from onescan.experiments.training.distributed import Ranks, choose_device
    from onescan.inference.loading import load
    from onescan.inputs import ForecastFormat, PairFormat

    sizes: Sizes = {} if options.batch_size is None else {"batch_size": options.batch_size}
    check_whole(1, **sizes)
    device = choose_device(options.device, Ranks())
    import_files(options.imports)
    checkpoint = load(options.checkpoint)
    if command := COMMANDS_BY_MODEL.get(type(checkpoint.model).__name__):
        raise ValueError(
            f"the model is {named_type(checkpoint.model)}, which predicts no classes or values; "
            f"use `onescan {command}`"
        )
    checkpoint.model.to(device)
    format, out = checkpoint.format, options.out
    if not isinstance(format, PairFormat):
        check_no_column(options.text_column)
    if not checkpoint.target.is_map:
        _check_out(out)
    with options.compute.applied():
        if checkpoint.target.is_map:
            predict_maps(checkpoint, options.inputs, None if out is None else Path(out), sizes)
        elif isinstance(format, ForecastFormat):
            column = data_setting(checkpoint, "time_column", default="") or None
            forecasts = [
                forecast_rows(checkpoint.model, format, path, column, sizes)
                for path in options.inputs
            ]
            _write(out, [row for rows in forecasts for row in rows], "forecast steps")
        else:
            _predict_rows(checkpoint, options, sizes)


def _predict_rows(checkpoint: "TrainedModel", options: Any, sizes: Sizes) -> None:
    """Predict the classes, labels or values of images, arrays or texts; print and write them."""
    from onescan.inputs import PairFormat

    names, kind = checkpoint.class_names, checkpoint.target.kind
    of_texts = isinstance(checkpoint.format, PairFormat)
    read = partial(_text_probabilities, column=options.text_column) if of_texts else _grid_outputs
    predictions: list[Prediction] = []
    unreadable: list[str] = []
    for source, row in read(checkpoint, options.inputs, unreadable, sizes):
        if len(names) != len(row):
            raise ValueError(
                f"{checkpoint.folder}: class_names has {len(names)} names, expected {len(row)}, "
                "one for each class of the model"
            )
        count, is_class = len(row), kind == "class"
        chosen = row.topk(min(options.top_k, count)).indices.tolist() if is_class else range(count)
        prediction = Prediction(source, [(names[i], row[i].item()) for i in chosen])
        predictions.append(prediction)
        *_, shown = source.values()
        echo(f"{printable(shown)}: {printable(_described(prediction, checkpoint.target))}")
    report_skipped(unreadable)
    if not predictions:
        raise nothing_readable("text" if of_texts else "image", options.inputs, unreadable)
    _write(options.out, [_cells(each, kind) for each in predictions], "predictions")


def _check_out(out: str | None) -> None:
    from onescan.checkpoint.files import check_writable

    if out is not None:
        if Path(out).suffix not in PREDICTION_FILES:
            raise ValueError(f"out is {out!r}, expected a name ending in .csv or .json")
        check_writable("out", Path(out))


def _described(prediction: Prediction, target: "Target") -> str:
    """Return the line that shows a prediction; `rounded` formats values.

    >>> from onescan.inputs.targets import Target
    >>> target = Target(kind="value", mean=(0.0, 1e9), std=(1.0, 10.0))
    >>> values = Prediction({"path": "a.npz[0]"}, [("speed", 12.34567), ("time", 1e9 + 1)])
    >>> _described(values, target)
    'speed 12.346, time 1000000001'
    >>> target = Target(kind="multilabel")
    >>> labels = Prediction({"path": "a.npz[0]"}, [("cat", 0.9), ("dog", 0.25)])
    >>> _described(labels, target)
    'cat (cat 90.0%, dog 25.0%)'
    """
    kind = target.kind
    if kind == "value":
        pairs = zip(prediction.outputs, target.std, strict=True)
        return ", ".join(f"{name} {rounded(value, std)}" for (name, value), std in pairs)
    shown = ", ".join(f"{name} {part:.1%}" for name, part in prediction.outputs)
    if kind == "multilabel":
        return f"{', '.join(prediction.labels) or 'no label'} ({shown})"
    return shown


def rounded(value: float, std: float) -> str:
    """Format a value, rounded to about a thousandth of its standard deviation.

    >>> rounded(1234.5678, 10.0), rounded(0.0, 1.0)
    ('1234.57', '0')
    """
    digits = math.ceil(math.log10(max(abs(value) / std, 1))) + 3
    return f"{value:.{min(digits, 17)}g}"


def _grid_outputs(
    checkpoint: "TrainedModel", paths: Sequence[str], unreadable: list[str], sizes: Sizes
) -> "Iterator[tuple[dict[str, object], Tensor]]":
    """Yield the path of each image or array, and its probabilities or values.

    Unreadable images in folders are skipped, and messages about them are added to `unreadable`.
    """
    import torch

    model = checkpoint.model
    device = next(model.parameters()).device
    for names, values, keep in read_batches(checkpoint, paths, unreadable, **sizes):
        masks = {} if keep is None else {"keep": keep.to(device)}
        with torch.no_grad():
            outputs = checkpoint.target.predictions(model(values.to(device), **masks)).cpu()
        yield from zip(({"path": name} for name in names), outputs, strict=True)


def _text_probabilities(
    checkpoint: "TrainedModel",
    arguments: Sequence[str],
    unreadable: list[str],
    sizes: Sizes,
    *,
    column: str | None,
) -> "Iterator[tuple[dict[str, object], Tensor]]":
    """Yield the file, the row and the text of each text, and the probabilities of its classes.

    Args:
        checkpoint: A text classifier.
        arguments: Texts, and files of texts.
        unreadable: List to which messages about unreadable lines and rows are added.
        sizes: The batch size, if it is given.
        column: Column of the texts in tables; None is that of the training data.

    Raises:
        ValueError: If a file does not exist, is of another type or has no such column.
    """
    from onescan.inference.classification import classify_texts
    from onescan.inputs import PairFormat

    if not (isinstance(checkpoint.format, PairFormat) and checkpoint.class_names):
        raise ValueError(f"{checkpoint.folder} holds no text classifier")
    if column is None:
        column = data_setting(checkpoint, "text_column", default="text")
    given = read_texts(arguments, column, unreadable)
    if given:
        encoder = checkpoint.format.open(checkpoint.folder)
        texts = [each.text for each in given]
        rows = classify_texts(checkpoint.model, texts, encoder, **sizes)
        sources = ({"path": each.path, "row": each.row, "text": each.text} for each in given)
        yield from zip(sources, rows, strict=True)


def _cells(prediction: Prediction, kind: "TargetKind") -> dict[str, object]:
    """Return the cells of a prediction, by column.

    Args:
        prediction: The prediction.
        kind: What is predicted. Classes have a column for the class, its confidence, and the other
            most probable classes; labels have one for those that are predicted, and one for the
            probability of each label; values have one for each value.

    >>> _cells(Prediction({"path": "a.npz[0]"}, [("cat", 0.9), ("dog", 0.25)]), "multilabel")
    {'path': 'a.npz[0]', 'labels': 'cat', 'cat': 0.9, 'dog': 0.25}
    """
    row = dict(prediction.input)
    if kind == "value":
        return row | dict(prediction.outputs)
    if kind == "multilabel":
        row["labels"] = SEPARATOR.join(prediction.labels)
        return row | {name: round(part, 6) for name, part in prediction.outputs}
    for rank, (name, part) in enumerate(prediction.outputs, start=1):
        number = "" if rank == 1 else f"_{rank}"
        row |= {f"class{number}": name, f"confidence{number}": round(part, 6)}
    return row


def _write(out: str | None, rows: Sequence[dict[str, object]], noun: str) -> None:
    """Write rows to a .csv or .json file, if there is one."""
    if out is not None:
        from onescan.checkpoint.files import write_atomically

        file = Path(out)
        write_atomically(file, lambda partial: _write_rows(partial, file.suffix, rows))
        echo(f"{out}: {len(rows)} {noun}")


def _write_rows(file: Path, suffix: str, rows: Sequence[dict[str, object]]) -> None:
    """Write one or more rows with the same columns as .csv or .json, according to the suffix."""
    from onescan.checkpoint.files import finite

    with file.open("w", encoding="utf-8", newline="") as stream:
        if suffix == ".json":
            json.dump(finite(rows), stream, indent=1, ensure_ascii=False)
            return
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
