"""Images that a denoiser makes: the last ones large, and how they came about."""

import io
from base64 import b64encode
from html import escape
from pathlib import Path

import numpy as np

from onescan.data.images import open_image
from onescan.models.denoiser import Denoiser
from onescan.report.section import Figure, Section
from onescan.report.study import Study
from onescan.tasks import ImageGeneration
from onescan.training.logging import read_pictures

TITLE = "Images that it makes"
EARLIER = 6  # pictures before the last
LARGE, SMALL = 1280, 448  # pixels of a picture's longer side


def section(study: Study) -> Section:
    """The first run's pictures: of the last evaluation, and of some before it."""
    task, model, run = study.task, study.model, study.runs[0]
    assert isinstance(task, ImageGeneration)
    pictures = read_pictures(run.result.folder)
    if not pictures:
        return Section(TITLE, lead="Not shown: task.samples_per_class is 0.")
    steps = list(pictures)
    figures = [
        Figure(
            f"After {steps[-1]:,} updates",
            _image(pictures[steps[-1]], LARGE, f"Images made after {steps[-1]:,} updates"),
            _caption(task, asks=isinstance(model, Denoiser) and model.config.num_classes > 0),
            columns=3,
        )
    ]
    figures += [
        Figure(
            f"After {step:,} updates",
            _image(pictures[step], SMALL, f"Images made after {step:,} updates"),
            "From the same noise.",
        )
        for step in _some(steps[:-1])
    ]
    return Section(TITLE, tuple(figures), f"Seed {run.seed}'s model, as chance has them.")


def _caption(task: ImageGeneration, *, asks: bool) -> str:
    sampler = task.config.sampler
    names = ", ".join(task.class_names[place] for place in task.shown_classes())
    columns = f"A column for each class: {names}. " if asks else ""
    guidance = f", with guidance {sampler.guidance_scale:g}" if sampler.guidance_scale != 1 else ""
    return (
        f"{columns}None is chosen by hand. Made in {sampler.steps} steps by "
        f"{sampler.resolved(task.config.noise)}{guidance}."
    )


def _some(steps: list[int]) -> list[int]:
    """A few of them, closer together at first, when most happens."""
    if len(steps) <= EARLIER:
        return steps
    places = np.geomspace(1, len(steps), EARLIER).round().astype(int) - 1
    return [steps[place] for place in dict.fromkeys(places.tolist())]


def _image(path: Path, most: int, alt: str) -> str:
    """An `<img>` that needs no other file, shrunk where a side is longer."""
    kind, file = "png", io.BytesIO()
    with open_image(path) as opened:
        picture = opened.copy()
    if max(picture.size) > most:
        picture.thumbnail((most, most))
        kind = "jpeg"
    picture.save(file, format=kind)
    data = b64encode(file.getvalue()).decode()
    return f'<img class="chart" alt="{escape(alt)}" src="data:image/{kind};base64,{data}">'
