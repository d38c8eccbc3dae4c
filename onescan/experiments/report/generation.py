"""Scores of generated images: a table for the terminal, and a page."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from markupsafe import Markup

from onescan.experiments.data.image_grid import image_grid
from onescan.experiments.report.format import percent, plain_table, significant
from onescan.experiments.report.images import Answer, class_accuracy, confusion_figure
from onescan.experiments.report.page import (
    Card,
    Figure,
    Page,
    Section,
    best,
    check_report_path,
    fragment,
)
from onescan.experiments.report.plots import (
    Line,
    Picture,
    line_figure,
    percent_tick,
    picture,
    series,
)
from onescan.inputs.images import unit_pixels
from onescan.messages import plural

if TYPE_CHECKING:
    from onescan.experiments.evaluation.generation import GenerationScore, GenerationScores, Shown
    from onescan.shapes import Images

PAGE = "report.html"
SHARES = ("precision", "recall", "class_accuracy")
MAX_OTHERS = 30  # images shown of guidance scales other than the best
MAX_OF_CLASS = 10
MAX_COLUMNS = 10  # of images
LONGEST_SIDE = 1280  # pixels of a grid of images

LEAD = (
    "Generated images compared with real ones: how similar the two sets are in the features of a "
    "classifier, whether each image looks real, and whether they cover the variety of real images."
)
INCEPTION = (
    "The features come from a TorchScript file of Inception-v3. The scores are comparable with "
    "published ones only if the file has the original weights."
)
NOT_INCEPTION = (
    "The features come from a classifier trained with onescan, so the Frechet distance is not an "
    "FID. It is comparable only with distances in features of the same classifier. The class score "
    "is the formula of the Inception Score with the classes of this classifier."
)
SINGULAR = (
    "The number of images does not exceed the number of features. Distances then depend strongly "
    "on the number of images, and are comparable only for equal numbers."
)


def generation_table(scores: "GenerationScores") -> str:
    """Format the scores at every guidance scale as a plain-text table."""
    title = f"{scores.distance_name}, {plural(scores.samples, 'image')}"
    table = plain_table(table_rows(scores))
    return "\n".join([title, table, *[SINGULAR] * scores.is_singular])


def write_generation(scores: "GenerationScores", out: Path) -> Path:
    """Write a self-contained page: scores, curves over guidance, images and classes.

    Args:
        scores: Result of `measure_generation`.
        out: Folder in which it saved the images. An existing page of onescan is replaced.

    Returns:
        The page's path.

    Raises:
        ValueError: If another file exists at the page's path, or kept images are damaged.
        OSError: If the page cannot be written. An existing page stays intact.
    """
    from onescan.experiments.evaluation.generation import first_images

    check_report_path(out / PAGE)
    images = {score.guidance: first_images(out / score.folder) for score in scores.scores}
    page = Page(
        kind="image generation",
        title=scores.name,
        lead=LEAD,
        cards=list(_cards(scores)),
        facts=list(_facts(scores)),
        sections=[
            _numbers(scores),
            *_curves(scores),
            *_images(scores, images),
            *_classes(scores),
        ],
    )
    return page.write(out / PAGE)


# Numbers


def best_score(scores: "GenerationScores") -> "GenerationScore":
    """Return the guidance scale with the smallest distance to the real images."""
    return min(scores.scores, key=lambda score: score.distance)


def column_names(scores: "GenerationScores") -> dict[str, str]:
    """Return the titles of columns by field, without fields that were not measured."""
    return {
        field: name
        for field, name in scores.short_names.items()
        if any(getattr(score, field) is not None for score in scores.scores)
    }


def format_score(score: "GenerationScore", field: str) -> str:
    """Format a number; an empty string if it was not measured."""
    number = getattr(score, field)
    if number is None:
        return ""
    if field in SHARES:
        return percent(number)
    if field == "class_score":
        return f"{number:.2f} \N{PLUS-MINUS SIGN} {score.class_score_std:.2f}"
    return f"{number:.2f}" if number >= 1 else f"{number:.4f}"


def _guidance(score: "GenerationScore") -> str:
    return "-" if score.guidance is None else f"{score.guidance:g}"


def _at(score: "GenerationScore") -> str:
    return "" if score.guidance is None else f" at guidance {score.guidance:g}"


def table_rows(scores: "GenerationScores") -> list[list[str]]:
    """Return the header, a row per guidance scale and, if known, one for the real images."""
    fields = column_names(scores)
    rows = [["guidance", *fields.values()]]
    rows += [
        [_guidance(score), *(format_score(score, field) for field in fields)]
        for score in scores.scores
    ]
    real = scores.real
    known = {
        "class_score": "" if real.class_score is None else f"{real.class_score:.2f}",
        "class_accuracy": "" if real.class_accuracy is None else percent(real.class_accuracy),
    }
    cells = [known.get(field, "") for field in fields]
    return [*rows, ["real images", *cells]] if any(cells) else rows


def _cards(scores: "GenerationScores") -> Iterator[Card]:
    """Yield the scores of the best guidance scale."""
    score, names = best_score(scores), column_names(scores)
    of = f"of {plural(scores.samples, 'image')}{_at(score)}"
    yield Card(f"{score.distance:.2f}", names["distance"], of)
    if score.precision is not None and score.recall is not None:
        yield Card(percent(score.precision), "precision", "share of images that look real")
        yield Card(percent(score.recall), "recall", "share of real images that are covered")
    if score.class_accuracy is not None:
        note = "share of images classified as the requested class"
        yield Card(percent(score.class_accuracy), names["class_accuracy"], note)
    elif score.class_score is not None:
        name, spread = names["class_score"], f"{score.class_score_std:.2f}"
        yield Card(f"{score.class_score:.2f}", name, "over ten parts of the images", spread)


def _facts(scores: "GenerationScores") -> Iterator[tuple[str, str]]:
    real = scores.real
    count = "statistics only" if real.count is None else plural(real.count, "image")
    yield "Real images", f"{real.name}, {count}"
    yield "Features", scores.features
    if scores.sampler is not None and scores.steps is not None:
        yield "Sampler", f"{scores.sampler}, {plural(scores.steps, 'step')}"
    if scores.labels is not None:
        uniform = scores.labels == "uniform"
        frequency = "all equally often" if uniform else "as often as in the real images"
        yield "Classes", f"{len(scores.class_names):,}, {frequency}"
    if scores.seed is not None:
        yield "Seed", str(scores.seed)
    yield "Version", f"onescan {scores.onescan}"


def _numbers(scores: "GenerationScores") -> Section:
    columns, rows = column_names(scores), table_rows(scores)
    if len(scores.scores) > 1:
        i = 1 + scores.scores.index(best_score(scores))
        rows[i] = [best(cell) for cell in rows[i]]
    table = fragment("table", rows, "numbers lined")
    names = {
        field: name if scores.is_inception else name.capitalize()
        for field, name in scores.short_names.items()
    }
    sentences = {
        "distance": f"{names['distance']}: distance between the features of both sets, modeled as "
        "normal distributions. Lower is better; it is 0 for the real images themselves.",
        "spatial_distance": f"{names['spatial_distance']}: the same for features that depend on "
        "the location in an image.",
        "class_score": f"{names['class_score']}: high if each image is clearly of one class and "
        "all classes appear; \N{PLUS-MINUS SIGN} is its standard deviation over ten parts.",
        "class_accuracy": f"{names['class_accuracy'].capitalize()}: share of images that the "
        "classifier assigns to the requested class, or for real images to their own class.",
    }
    caption = " ".join(sentence for field, sentence in sentences.items() if field in columns)
    lead = INCEPTION if scores.is_inception else NOT_INCEPTION
    lead = f"{lead} {SINGULAR * scores.is_singular}".strip()
    return Section("Scores", [Figure("All scores", table, caption, columns=3)], lead)


# Curves over guidance


def _curves(scores: "GenerationScores") -> list[Section]:
    """Return one section if there are several guidance scales, else none."""
    if len(scores.scores) <= 1:
        return []
    names = column_names(scores)
    name = names["distance"]
    caption = (
        "Lower is better. With more guidance, images become clearer and more alike, so the curve "
        "has a minimum."
    )
    figures = [_curve(scores, ["distance"], caption, y=name, title=name)]
    if _values(scores, "precision") and _values(scores, "recall"):
        caption = (
            "Precision: share of images that look real. Recall: share of real images that are "
            "covered. Guidance usually trades recall for precision."
        )
        title, fields = "Precision and recall", ["precision", "recall"]
        figures.append(_curve(scores, fields, caption, y="share of images", title=title))
    if _values(scores, "class_accuracy"):
        caption = "Share of images that the classifier assigns to the requested class."
        figures.append(_curve(scores, ["class_accuracy"], caption, y=names["class_accuracy"]))
    elif _values(scores, "class_score"):
        caption = "Band: standard deviation over ten parts of the images."
        figures.append(_curve(scores, ["class_score"], caption, y=names["class_score"]))
    return [Section("Over guidance", figures)]


def _values(scores: "GenerationScores", field: str) -> list[float]:
    """Return a number at each guidance scale; an empty list if one is missing."""
    values = [getattr(score, field) for score in scores.scores]
    return [] if None in values else values


def _curve(
    scores: "GenerationScores", fields: Sequence[str], caption: str, *, y: str, title: str = ""
) -> Figure:
    guidance = np.array([score.guidance or 0.0 for score in scores.scores])
    lines = []
    for i, field in enumerate(fields):
        values = np.array(_values(scores, field))
        band = None
        if field == "class_score":
            std = np.array(_values(scores, "class_score_std"))
            band = values - std, values + std
        last = format_score(scores.scores[-1], field)
        name = f"{field} {last}" if len(fields) > 1 else last
        lines.append(Line(name, series(i), guidance, values, band=band, dots=True))
    are_shares = fields[0] in SHARES
    return line_figure(
        lines,
        caption,
        x="guidance",
        format_x=significant,
        y=y,
        title=title,
        scale="zero" if are_shares else "linear",
        format=percent_tick if are_shares else significant,
        at_least=1.0 if are_shares else 0.0,
    )


# Images


def _images(
    scores: "GenerationScores", images: Mapping[float | None, "Shown | None"]
) -> list[Section]:
    """Return a section with the first images of each guidance scale, starting with the best."""
    chosen, figures = best_score(scores), []
    for score in sorted(scores.scores, key=lambda score: score is not chosen):
        shown = images[score.guidance]
        if shown is None or not len(shown.images):
            continue
        count = len(shown.images) if score is chosen else MAX_OTHERS
        labels = shown.labels[:count].tolist()
        grid = _image_grid(unit_pixels(shown.images[:count]), labels, scores.class_names)
        caption = "Unselected samples" + ", by requested class" * (max(labels) >= 0) + "."
        if score is not chosen:
            caption += " They start from the same noise as those above."
        title = f"The first {plural(len(labels), 'image')}{_at(score)}"
        figures.append(Figure(title, grid, caption, columns=3))
    return [Section("Images", figures)] if figures else []


def _image_grid(images: "Images", labels: Sequence[int], class_names: Sequence[str]) -> Markup:
    """Arrange images in a column for each class; many classes are named below each image."""
    classes = sorted(set(labels))
    names = {k: class_names[k] if 0 <= k < len(class_names) else str(k) for k in classes}
    rows_of = {k: [i for i, label in enumerate(labels) if label == k] for k in classes}
    if classes == [-1]:
        return fragment("image_grid", _picture(images, MAX_COLUMNS), [], "Generated images")
    if len(classes) <= MAX_COLUMNS:
        blank = torch.ones_like(images[0])
        table = zip_longest(*(rows_of[k][:MAX_OF_CLASS] for k in classes))
        cells = [blank if i is None else images[i] for row in table for i in row]
        headings = list(names.values())
        alt = "Generated images, one column per class"
        return fragment("image_grid", _picture(torch.stack(cells), len(classes)), headings, alt)
    answers = [
        Answer(_picture(images[i : i + 1], 1), f"Generated image of {names[k]}", names[k])
        for k in classes
        for i in rows_of[k]
    ]
    return fragment("gallery", answers)


def _picture(images: "Images", columns: int) -> Picture:
    return picture(np.asarray(image_grid(images, columns).convert("RGB")), LONGEST_SIDE)


# Classes


def _classes(scores: "GenerationScores") -> list[Section]:
    """Return one section about the best guidance scale if its images were classified."""
    score, names = best_score(scores), scores.class_names
    if not score.requested:
        return []
    requested = np.array(score.requested)
    accuracies = np.where(requested > 0, np.array(score.right) / np.maximum(requested, 1), np.nan)
    figures = class_accuracy(accuracies[None], names)
    if score.confusion:
        over = plural(scores.samples, "image")
        counts = np.array(score.confusion)
        figures.insert(0, confusion_figure(counts, names, over, rows="requested"))
    real = scores.real.class_accuracy
    lead = f"Classes predicted by {scores.features} for the images{_at(score)}."
    if real is not None:
        lead += f" It classifies {percent(real)} of real images correctly."
    return [Section("Requested and predicted classes", figures, lead)]
