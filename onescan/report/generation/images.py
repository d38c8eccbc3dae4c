"""The first images that were judged, class by class, at each guidance scale."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

import torch

from onescan.data.images import unit_pixels
from onescan.evaluation.generation import GenerationScores, Shown, class_by_class
from onescan.report.generation.words import best
from onescan.report.pictures import Pixels, picture, to_bytes
from onescan.report.section import Figure, Section
from onescan.report.words import plural

MOST_OTHERS = 30  # images at scales that are not the best
EACH = 10  # of a class


def images(scores: GenerationScores, shown: Mapping[float | None, Shown | None]) -> list[Section]:
    """A gallery for each scale, the best one first and largest."""
    nearest = best(scores)
    order = sorted(scores.scores, key=lambda score: score is not nearest)
    figures = []
    for score in order:
        kept = shown.get(score.guidance)
        if kept is None or not len(kept.images):
            continue
        if score is not nearest:
            kept = Shown(kept.images[:MOST_OTHERS], kept.labels[:MOST_OTHERS])
        at = "" if score.guidance is None else f" at guidance {score.guidance:g}"
        count = plural(len(kept.images), "image")
        figures.append(
            Figure(
                f"The first {count}{at}",
                _galleries(scores, class_by_class(kept)),
                _caption(kept, is_same=score is not nearest),
                columns=3,
            )
        )
    return [Section("Images", tuple(figures))] if figures else []


def _caption(kept: Shown, *, is_same: bool) -> str:
    asked = "As they came, not chosen"
    asked += ", beside the class that was asked for" if int(kept.labels.max()) >= 0 else ""
    same = " They come from the same seeds as those above." if is_same else ""
    return f"{asked}.{same}"


def _galleries(scores: GenerationScores, kept: Shown) -> str:
    """One below the other, for each class; all in one where there is one of each, or none."""
    pixels = list(to_bytes(unit_pixels(kept.images)))
    labels, counts = kept.labels.unique(return_counts=True)
    if len(labels) == 1 and int(labels[0]) < 0:
        return _gallery([_item(image, "") for image in pixels])
    names = [_name(scores, int(label)) for label in kept.labels]
    if int(counts.max()) == 1:
        return _gallery([_item(*each) for each in zip(pixels, names, strict=True)])
    return "".join(_each_class(scores, pixels, kept))


def _each_class(scores: GenerationScores, pixels: Sequence[Pixels], kept: Shown) -> Iterator[str]:
    for label in kept.labels.unique().tolist():
        places = torch.nonzero(kept.labels == label).flatten().tolist()[:EACH]
        yield f"<h4>{escape(_name(scores, label))}</h4>"
        yield _gallery([_item(pixels[place], "", _name(scores, label)) for place in places])


def _gallery(items: list[str]) -> str:
    return f'<ul class="gallery">{"".join(items)}</ul>'


def _item(image: Pixels, name: str, alt: str = "") -> str:
    shows = alt or name
    drawn = picture(image, alt=f"Generated image{f', asked for {shows}' if shows else ''}")
    return f"<li>{drawn}{f'<div>{escape(name)}</div>' if name else ''}</li>"


def _name(scores: GenerationScores, label: int) -> str:
    return scores.class_names[label] if label < len(scores.class_names) else str(label)
