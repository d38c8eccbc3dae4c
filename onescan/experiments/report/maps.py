"""Sections about maps: a table per class or value, and held-out examples with their predictions."""

import math

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from onescan.experiments.report.format import percent
from onescan.experiments.report.images import (
    LARGE,
    MAX_DRAWN_AXES,
    as_pictures,
    examples_at,
    noun,
    to_bytes,
)
from onescan.experiments.report.page import Figure, Section, fragment
from onescan.experiments.report.plots import picture
from onescan.experiments.report.runs import RunGroup
from onescan.experiments.report.targets import errors_table, over_seeds, spread
from onescan.experiments.tasks import DenseRegression, Segmentation
from onescan.experiments.tasks.dense import DenseTask
from onescan.experiments.tasks.dense_regression import map_scores
from onescan.experiments.tasks.segmentation import class_scores
from onescan.experiments.training.evaluation import eval_mode
from onescan.inference.dense import class_colors
from onescan.messages import plural
from onescan.shapes import Grids, Pictures

SHOWN = 6  # examples
OPACITY = 0.6  # of the colors of classes over an example
SMALLEST_SIDE = 64  # pixels; smaller examples are enlarged
GAP = 2  # pixels between pictures
RGB = 3

Table = list[tuple[object, ...]]


def classes(group: RunGroup) -> Section:
    """Scores of each class, and examples with the true and the predicted classes."""
    scores = [class_scores(run.result.evaluation.arrays) for run in group.runs]
    total = sum(score.positions for score in scores[0])
    rows: Table = [("class", "positions", "IoU", "Dice", "precision", "recall")]
    for i, name in enumerate(group.class_names):
        of_seeds = [score[i] for score in scores]
        cells = (
            over_seeds((getattr(score, key) for score in of_seeds), percent)
            for key in ("iou", "dice", "precision", "recall")
        )
        rows.append((name, percent(of_seeds[0].positions / total), *cells))
    caption = (
        f"Over all positions of the held-out {group.task.unit} that have a class. IoU is the "
        "intersection of the predicted and the true positions over their union; Dice is the "
        "harmonic mean of precision and recall. The second column is the class's share of the "
        f"positions.{spread(group)}"
    )
    table = Figure("Scores of each class", fragment("table", rows, "numbers lined"), caption, 3)
    return Section("Classes", [table, *_examples(group)])


def values(group: RunGroup) -> Section:
    """Errors of each value, and examples with the true and the predicted values."""
    target = group.task.target
    scores = [map_scores(run.result.evaluation.arrays, target.std) for run in group.runs]
    table = errors_table(group, scores, target.std, "of the training values")
    return Section("Predicted values", [table, *_examples(group)])


def _examples(group: RunGroup) -> list[Figure]:
    """Show examples from the largest to the smallest loss: input, truth and prediction."""
    task, unit = group.task, group.task.unit
    assert isinstance(task, DenseTask)
    losses = group.runs[0].result.evaluation.arrays["losses"]
    if task.format.axes > MAX_DRAWN_AXES or len(losses) != len(task.test):
        return []
    order = losses.argsort(descending=True, stable=True)
    chosen = order[torch.linspace(0, len(order) - 1, min(SHOWN, len(order))).round().long()]
    rows = [_row(group, example) for example in chosen.tolist()]
    width = max(row.shape[-1] for row in rows)
    padded = [torch.nn.functional.pad(row, (0, width - row.shape[-1], 0, GAP)) for row in rows]
    body = fragment(
        "image_grid",
        picture(to_bytes(torch.cat(padded, dim=2))[0], LARGE),
        ("input", "true", "predicted"),
        f"{plural(len(rows), noun(group))} with true and predicted {_what(task)}",
    )
    which = f" of seed {group.runs[0].seed}" * (len(group.runs) > 1)
    slices = " Slices of a volume are arranged row by row." * (task.format.axes == MAX_DRAWN_AXES)
    caption = (
        f"Held-out {unit}, their true {_what(task)}, and predictions{which}. The first one has the "
        f"largest loss, the last one the smallest.{slices}"
    )
    return [Figure(f"Held-out {unit}", body, caption, 3)]


def _what(task: DenseTask) -> str:
    return "classes" if isinstance(task, Segmentation) else "values"


def _row(group: RunGroup, row: int) -> Pictures:
    """Draw one example, its true and its predicted classes or values side by side."""
    task = group.task
    assert isinstance(task, DenseTask)
    batch = task.test.read(examples_at(task.test, [row])).batch
    with torch.no_grad(), eval_mode(group.model):
        predicted = task.predicted_maps(group.model, batch)
    grids, maps = batch[:2]
    values = task.format.in_training_range(grids).double()
    low, high = values.min(), values.max()
    example = as_pictures((values - low) / (high - low).clamp(min=1e-12))
    if example.shape[1] not in (1, RGB):
        example = example.mean(dim=1, keepdim=True)
    example = example.expand(-1, RGB, -1, -1)
    pictures = [example, *_drawn(task, example, maps, predicted)]
    scale = max(1, math.ceil(SMALLEST_SIDE / min(example.shape[2:])))
    enlarged = (interpolate(each, scale_factor=scale, mode="nearest") for each in pictures)
    return torch.cat([torch.nn.functional.pad(each, (0, GAP), value=1.0) for each in enlarged], 3)


def _drawn(task: DenseTask, example: Pictures, maps: Tensor, predicted: Tensor) -> list[Pictures]:
    """Draw true and predicted classes as colors over the example, or values from dark to bright."""
    size = tuple(example.shape[2:])
    if isinstance(task, DenseRegression):
        known = ~maps[:, :1].isnan()
        truth = torch.where(known, maps[:, :1].double(), predicted[:, :1])
        low, high = truth.min(), truth.max()
        drawn = [
            _like(((each[:, :1].double() - low) / (high - low).clamp(min=1e-12)).clamp(0, 1), size)
            for each in (torch.where(known, truth, low), predicted)
        ]
        return [each.expand(-1, RGB, -1, -1) for each in drawn]
    colors = class_colors(len(task.class_names)).double() / 255
    pictures = []
    for classes in (maps, predicted):
        of_position: Grids = colors[classes.clamp(min=0)].movedim(-1, 1)
        is_foreground = _like((classes > 0).double().unsqueeze(1), size)
        mix = OPACITY * is_foreground
        pictures.append(example * (1 - mix) + _like(of_position, size) * mix)
    return pictures


def _like(grid: Grids, size: tuple[int, ...]) -> Pictures:
    """Arrange a grid as `as_pictures` does; a signal becomes a strip of colors of a size."""
    if grid.ndim == 3:  # noqa: PLR2004
        strip = interpolate(grid, size[1], mode="nearest")
        return strip.unsqueeze(2).expand(-1, -1, size[0], -1)
    return as_pictures(grid)
