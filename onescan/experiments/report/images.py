"""Sections about images: predictions on held-out images, and images that a denoiser generates."""

import math
from collections import Counter
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int, UInt8
from markupsafe import Markup
from sklearn.metrics import confusion_matrix
from torch import Tensor

from onescan.experiments.data import DataSet, Example
from onescan.experiments.report.format import ARROW, TIMES, percent
from onescan.experiments.report.page import Figure, Section, fragment
from onescan.experiments.report.plots import (
    BLUE,
    SMALLEST,
    Line,
    Picture,
    cell_classes,
    dot_chart,
    line_chart,
    percent_tick,
    picture,
    series,
)
from onescan.experiments.report.runs import FinishedRun, RunGroup
from onescan.experiments.tasks import ImageClassification, ImageGeneration
from onescan.experiments.tasks.grid import GridTask
from onescan.experiments.training.logging import read_pictures
from onescan.inputs.image_files import open_image
from onescan.inputs.images import unit_pixels
from onescan.messages import plural
from onescan.models.denoiser import Denoiser
from onescan.models.dense_predictor import DensePredictor
from onescan.models.image_classifier import ImageClassifier
from onescan.shapes import Grids, Images, Labels, Pictures

MATRIX_CLASSES = 30  # with more classes, the most frequent confusions are listed instead
NARROW_CLASSES = 14  # a matrix of at most so many classes leaves room for a figure beside it
SHORT_NAME = 4  # letters; longer class names are written upright
PAIRS = 20  # listed confusions
ENDS = 15  # of many classes, the hardest and easiest that are shown
MISTAKES, CORRECT = 60, 20  # shown images
VIDEO_AXES, MAX_DRAWN_AXES = 3, 3
MAX_FRAMES, GAP = 16, 1  # shown frames of a video, and pixels between them
SIGNAL_SIZE = 36, 112  # height and width of a drawn signal, small enough to stay sharp
TITLE = "Generated images"
EARLIER = 6  # evaluations whose images are shown, besides the last
LARGE, SMALL = 1280, 448  # pixels of the longer side of their images
NOISE_BINS = 20

Accuracies = Float[np.ndarray, "seeds classes"]


# Held-out images


def held_out_labels(group: RunGroup) -> Labels:
    """Return the true classes of the held-out images, in the order of the evaluations' rows.

    Raises:
        ValueError: If the runs were evaluated on different images.
    """
    labels = group.array("labels")
    if (labels != labels[0]).any():
        raise ValueError("the runs were evaluated on different images: their labels differ")
    return labels[0]


def noun(group: RunGroup) -> str:
    """Return what an example of the task is called, such as "image"."""
    return group.task.unit.removesuffix("s")


def unknown_rows(group: RunGroup) -> str:
    """Return why rows of the evaluation cannot be shown with images, or an empty string."""
    if isinstance(group.task, GridTask) and group.task.format.is_ragged:
        return f"Not shown: the {group.task.unit} have different sizes."
    rows, count = len(held_out_labels(group)), len(group.task.test)
    if rows == count:
        return ""
    return f"Not shown: only {rows:,} of {count:,} held-out {group.task.unit} could be read."


def held_out_pixels(group: RunGroup, rows: Int[Tensor, " B"]) -> Grids:
    """Read some of the held-out images, as pixels from 0 to 1.

    Raises:
        ValueError: If the images are not those of the evaluation.
    """
    assert isinstance(group.task, ImageClassification)
    examples = examples_at(group.task.test, rows.tolist())
    if len(examples) == len(rows):
        pixels, labels = group.task.test.read(examples).batch
        if torch.equal(labels, held_out_labels(group)[rows]):
            return unit_pixels(pixels)
    raise ValueError("the held-out images have changed since the evaluation of the runs")


def examples_at(data: DataSet, rows: list[int]) -> list[Example]:
    """Return the examples of some rows, reading to the last, as a stream has no random access."""
    requested = set(rows)
    start = enumerate(islice(data.examples(seed=None), max(rows) + 1))
    examples = {row: example for row, (example, _) in start if row in requested}
    return [examples[row] for row in rows if row in examples]


def as_pictures(values: Grids) -> Pictures:
    """Draw grids of one to three axes as images, with values from 0 to 1.

    An image remains as it is. The frames of a video, or slices of a volume, are arranged row by
    row, at most `MAX_FRAMES` of them. A signal is drawn as a line, scaled to its own range.
    """
    axes = values.ndim - 2
    if axes == 1:
        return torch.stack([_line_drawing(signal) for signal in values])
    if axes == VIDEO_AXES:
        count = values.shape[2]
        chosen = torch.linspace(0, count - 1, min(count, MAX_FRAMES)).round().long()
        frames = values[:, :, chosen]
        columns = math.ceil(math.sqrt(len(chosen)))
        missing = -len(chosen) % columns
        frames = F.pad(frames, (0, GAP, 0, GAP, 0, missing), value=1.0)
        return rearrange(
            frames, "b c (rows columns) h w -> b c (rows h) (columns w)", columns=columns
        )
    return values


def _line_drawing(signal: Float[Tensor, "channels samples"]) -> Float[Tensor, "1 height width"]:
    """Draw the channels of a signal as dark lines; each column spans neighboring samples."""
    samples = F.interpolate(signal[None].double(), SIGNAL_SIZE[1] + 1, mode="linear")[0]
    low, high = samples.min(), samples.max()
    rows = (high - samples) / (high - low).clamp(min=1e-12) * (SIGNAL_SIZE[0] - 1)
    top, bottom = torch.minimum(rows[:, :-1], rows[:, 1:]), torch.maximum(rows[:, :-1], rows[:, 1:])
    at = torch.arange(SIGNAL_SIZE[0])[:, None, None]
    drawn = (at >= top.floor()) & (at <= bottom.ceil())  # height channels width
    return 1 - drawn.any(dim=1)[None].float()


def to_bytes(pixels: Images) -> UInt8[np.ndarray, "B height width rgb"]:
    """Convert pixels from 0 to 1 to RGB bytes; other channels are averaged."""
    if pixels.shape[1] not in (1, 3):
        pixels = pixels.mean(dim=1, keepdim=True)
    pixels = (pixels.clamp(0, 1) * 255).expand(-1, 3, -1, -1).round().to(torch.uint8)
    return rearrange(pixels, "b c h w -> b h w c").numpy()


def patch_grid(model: ImageClassifier | Denoiser | DensePredictor) -> tuple[int, ...]:
    """Return the number of patches along each axis at the model's usual image size."""
    config = model.config
    return model.patchify.grid_shape((config.channels, *config.image_size))


# Confusions


def confusion(group: RunGroup) -> Section:
    """The confusion matrix over all seeds, and the accuracy of each class."""
    labels, names = held_out_labels(group), group.class_names
    counts = sum(
        confusion_matrix(labels, predictions, labels=range(len(names)))
        for predictions in group.array("predictions")
    )
    assert isinstance(counts, np.ndarray)
    over = f"{plural(len(group.runs), 'seed')} {TIMES} {plural(len(labels), f'test {noun(group)}')}"
    figure = confusion_figure if len(names) <= MATRIX_CLASSES else _pairs
    by_class = class_accuracy(accuracy_by_class(group), names)
    return Section("Confusions", [figure(counts, names, over), *by_class])


def confusion_figure(
    counts: Int[np.ndarray, "C C"], names: tuple[str, ...], over: str, rows: str = "true"
) -> Figure:
    """A confusion matrix.

    Args:
        counts: Counts of true and predicted classes.
        names: Names of the classes.
        over: What is counted.
        rows: What the classes of the rows are.
    """
    mistakes = counts - np.diag(counts.diagonal())
    levels = np.where(mistakes > 0, 0.2 + 0.8 * mistakes / max(mistakes.max(), 1), 0)
    np.fill_diagonal(levels, 0.18)
    cells = [
        [
            (str(count), level, cell_classes(level, warm=i != j))
            for j, (count, level) in enumerate(zip(*row, strict=True))
        ]
        for i, row in enumerate(zip(counts.tolist(), levels.tolist(), strict=True))
    ]
    kind = "upright " * (max(map(len, names)) > SHORT_NAME)
    kind += "dense" * (len(names) > NARROW_CLASSES)
    return Figure(
        "Confusion matrix",
        fragment("cells", cells, names, names, f"{rows} \\ predicted", kind=kind),
        f"Rows are {rows} classes, columns are predictions ({over}). Blue cells are correct; "
        "darker orange cells are more frequent mistakes.",
        columns=2 if len(names) <= NARROW_CLASSES else 3,
    )


def _pairs(counts: Int[np.ndarray, "C C"], names: tuple[str, ...], over: str) -> Figure:
    mistakes, shown = counts - np.diag(counts.diagonal()), counts.sum(axis=1)
    order = np.argsort(-mistakes, axis=None, kind="stable")[:PAIRS]
    pairs = [divmod(cell, len(names)) for cell in order.tolist() if mistakes.flat[cell]]
    rows: list[tuple[object, ...]] = [("true", "predicted", "count", "share of the class")]
    for i, j in pairs:
        share = fragment("share", percent(mistakes[i, j] / shown[i]))
        rows.append((names[i], names[j], mistakes[i, j], share))
    return Figure(
        "Most frequent confusions",
        fragment("table", rows, "wraps"),
        f"True classes and wrong predictions ({over}), each with its share of the true class. "
        f"{plural(int((mistakes > 0).sum()), 'pair')} of classes were confused at least once; "
        f"{len(rows)} are listed.",
        columns=3,
    )


def class_accuracy(accuracies: Accuracies, names: tuple[str, ...]) -> list[Figure]:
    """Accuracy of each class, lowest first; of many classes the hardest and easiest."""
    known = np.flatnonzero(np.isfinite(accuracies[0]))
    order = known[np.argsort(accuracies.mean(axis=0)[known], kind="stable")]
    if len(order) <= MATRIX_CLASSES:
        which = "Accuracy of each class, hardest first"
        return [_class_dots(accuracies, names, order, "Accuracy by class", which)]
    hardest, easiest = order[:ENDS], order[::-1][:ENDS]
    lowest = f"The {ENDS} classes of the lowest accuracy, lowest first"
    highest = f"The {ENDS} classes of the highest accuracy, highest first"
    return [
        _sorted_accuracy(accuracies.mean(axis=0)[order]),
        _class_dots(accuracies, names, hardest, "Hardest classes", lowest),
        _class_dots(accuracies, names, easiest, "Easiest classes", highest),
    ]


def accuracy_by_class(group: RunGroup) -> Accuracies:
    """Return the accuracy of each run on each class; NaN for classes without images."""
    labels, classes = held_out_labels(group).numpy(), len(group.class_names)
    shown = np.bincount(labels, minlength=classes)
    predictions = group.array("predictions").numpy()
    correct = [np.bincount(labels[row == labels], minlength=classes) for row in predictions]
    return np.where(shown > 0, np.stack(correct) / np.maximum(shown, 1), np.nan)


def _class_dots(
    accuracies: Accuracies,
    names: tuple[str, ...],
    order: Int[np.ndarray, " n"],
    title: str,
    which: str,
) -> Figure:
    dots = " (small dots: single seeds; large: their mean)" * (len(accuracies) > 1)
    chart = dot_chart([names[i] for i in order], accuracies[:, order], x="accuracy")
    return Figure(title, chart, f"{which}{dots}. The axis need not start at 0%.")


def _sorted_accuracy(mean: Float[np.ndarray, " n"]) -> Figure:
    ranks = np.arange(1.0, len(mean) + 1)
    low, middle, high = (percent(share, 0) for share in np.quantile(mean, (0.1, 0.5, 0.9)))

    chart = line_chart(
        [Line("", BLUE, ranks, mean, band=(np.zeros_like(mean), mean))],
        x="classes, hardest first",
        y="accuracy",
        format=percent_tick,
        limits=(0, 1),
        threshold=float(np.median(mean)),
        description=f"Line chart of the accuracy of {len(mean)} classes; the median is {middle}",
    )
    return Figure(
        "Accuracy of all classes",
        chart,
        f"All {len(mean):,} classes, sorted by accuracy (mean over seeds). The median, dashed, is "
        f"{middle}. One class in ten is at {low} or below, one in ten at {high} or above.",
    )


# Predictions


class Answer(NamedTuple):
    """What the gallery shows of one image.

    Attributes:
        image: The image.
        alt: Its description.
        truth: Name of its class.
        prediction: Name of the wrong class that most runs predict, or empty.
        note: Probability, and how many runs are wrong.
    """

    image: Picture
    alt: str
    truth: str
    prediction: str = ""
    note: str = ""


def predictions(group: RunGroup) -> Section:
    """Mistakes, and a sample of correct predictions."""
    assert isinstance(group.task, ImageClassification)
    title = f"Test {group.task.unit}"
    if reason := unknown_rows(group):
        return Section(title, lead=reason)
    if (axes := group.task.format.axes) > MAX_DRAWN_AXES:
        return Section(title, lead=f"Not shown: the examples have {axes} axes.")
    wrong = group.array("predictions") != held_out_labels(group)  # seeds images
    mistakes = _worst_first(wrong, group.array("confidence"))
    correct = (~wrong.any(dim=0)).nonzero().flatten().tolist()
    figures = [_mistakes(group, mistakes)] if mistakes else []
    figures += [_correct(group, correct)] if correct else []
    return Section(title, figures)


def _worst_first(
    wrong: Bool[Tensor, "seeds images"], confidence: Float[Tensor, "seeds images"]
) -> list[int]:
    """Sort the mistakes by the number of wrong runs, and then by their mean confidence."""
    runs = wrong.sum(dim=0)
    mean = (confidence * wrong).sum(dim=0) / runs.clamp(min=1)
    return (runs + mean).argsort(descending=True, stable=True)[: int((runs > 0).sum())].tolist()


def _mistakes(group: RunGroup, rows: list[int]) -> Figure:
    shown, seeds = rows[:MISTAKES], len(group.runs)
    which = "All" if len(shown) == len(rows) else f"The first {len(shown)} of"
    who = "at least one seed" if seeds > 1 else "the model"
    several = f", the number of the {seeds} seeds that are wrong" * (seeds > 1)
    return Figure(
        plural(len(rows), "mistake"),
        _gallery(group, shown),
        f"{which} {plural(len(rows), noun(group))} that {who} misclassifies: true class {ARROW} "
        f"prediction{several}, and the predicted probability. The most consistent and most "
        "confident mistakes come first.",
        columns=3,
    )


def _correct(group: RunGroup, rows: list[int]) -> Figure:
    every = -(-len(rows) // CORRECT)
    which = f"One in {every:,} of" if every > 1 else "All"
    who = "all seeds classify" if len(group.runs) > 1 else "the model classifies"
    return Figure(
        "Correct predictions",
        _gallery(group, rows[::every]),
        f"{which} the {plural(len(rows), noun(group))} that {who} correctly, with the predicted "
        "probability.",
        columns=3,
    )


def _gallery(group: RunGroup, rows: list[int]) -> Markup:
    pixels = to_bytes(as_pictures(held_out_pixels(group, torch.tensor(rows))))
    answers = [_answer(group, row, image) for row, image in zip(rows, pixels, strict=True)]
    return fragment("gallery", answers)


def _answer(group: RunGroup, row: int, pixels: UInt8[np.ndarray, "height width rgb"]) -> Answer:
    truth, predicted = int(held_out_labels(group)[row]), group.array("predictions")[:, row]
    mistakes = Counter(predicted[predicted != truth].tolist())
    chosen = mistakes.most_common(1)[0][0] if mistakes else truth
    share = float(group.array("confidence")[:, row][predicted == chosen].mean())
    count = f"{mistakes.total()}/{len(group.runs)} \N{MIDDLE DOT} "
    names = group.class_names
    return Answer(
        picture(pixels),
        f"Test {noun(group)} {row} of class {names[truth]}, predicted as {names[chosen]}",
        names[truth],
        names[chosen] if mistakes else "",
        count * bool(mistakes and len(group.runs) > 1) + percent(share, 0 if mistakes else 1),
    )


# Generated images


def generated(group: RunGroup) -> Section:
    """The first run's images of the last evaluation, and of some before it."""
    task, run = group.task, group.runs[0]
    assert isinstance(task, ImageGeneration)
    pictures = read_pictures(run.result.folder)
    if not pictures:
        return Section(TITLE, lead="Not shown: task.samples_per_class is 0.")
    steps = list(pictures)
    conditional = isinstance(group.model, Denoiser) and group.model.config.num_classes > 0
    classes = [task.class_names[i] for i in task.shown_classes()] if conditional else []
    sampler = task.config.sampler
    scale = sampler.guidance_scale
    guidance = f" and guidance scale {scale:g}" * (scale != 1)
    caption = (
        f"Unselected samples{', one column per class' * conditional}, generated in "
        f"{plural(sampler.steps, 'step')} with {sampler.resolved(task.config.noise)}{guidance}."
    )

    def figure(step: int, longest: int, caption: str, columns: int) -> Figure:
        with open_image(pictures[step]) as image:
            pixels = np.asarray(image.convert("RGB"))
        alt = f"Images generated after {step:,} steps"
        body = fragment("image_grid", picture(pixels, longest), classes, alt)
        return Figure(f"After {step:,} steps", body, caption, columns)

    figures = [figure(steps[-1], LARGE, caption, columns=3)]
    figures += [
        figure(step, SMALL, "From the same noise.", columns=1) for step in _some(steps[:-1])
    ]
    return Section(TITLE, figures, f"Model of seed {run.seed}.")


def _some(steps: list[int]) -> list[int]:
    """Return a few of the steps, denser at first, when images change most."""
    if len(steps) <= EARLIER:
        return steps
    indices = np.geomspace(1, len(steps), EARLIER).round().astype(int) - 1
    return [steps[i] for i in dict.fromkeys(indices.tolist())]


def noise_errors(group: RunGroup) -> Section:
    """The error of the last evaluation over timesteps."""
    lines = [_error_line(run, series(i)) for i, run in enumerate(group.runs)]
    chart = line_chart(
        lines, x="timestep (0: image, 1000: noise)", y="mean squared error", scale="log"
    )
    caption = (
        f"Mean squared error on held-out images in {NOISE_BINS} ranges of timesteps. Each image is "
        "evaluated at one timestep per quarter, always with the same noise."
    )
    return Section("Error by noise level", [Figure("Error over timesteps", chart, caption)])


def _error_line(run: FinishedRun, color: str) -> Line:
    arrays: Any = run.result.evaluation.arrays
    steps, errors = (arrays[name].flatten().double().numpy() for name in ("timesteps", "errors"))
    bins = np.minimum(steps * NOISE_BINS // 1000, NOISE_BINS - 1).astype(int)
    counts = np.bincount(bins, minlength=NOISE_BINS)
    means = np.bincount(bins, errors, minlength=NOISE_BINS)[counts > 0] / counts[counts > 0]
    x = (np.flatnonzero(counts) + 0.5) * 1000 / NOISE_BINS
    return Line(f"seed {run.seed}, mean {errors.mean():.3f}", color, x, np.maximum(means, SMALLEST))
