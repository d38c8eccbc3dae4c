"""How near generated images come to real ones: a page, and a table."""

from pathlib import Path

from onescan.evaluation.generation import GenerationScores, first_images
from onescan.report.generation.page import generation_table, render_generation
from onescan.report.template import save

__all__ = ["generation_table", "write_generation"]

PAGE = "report.html"


def write_generation(scores: GenerationScores, out: Path) -> Path:
    """Write a page that needs no other file: numbers, curves over guidance, images, classes.

    Args:
        scores: as `measure_generation` returned them.
        out: the folder that it kept the images in; a page of onescan's that is there is replaced.

    Returns:
        The page's path.

    Raises:
        ValueError: at the path is something that is not a page of onescan's, or what was kept of
            the images is damaged.
        OSError: the page cannot be written; one that was there is intact.
    """
    shown = {score.guidance: first_images(out / score.folder) for score in scores.scores}
    return save(render_generation(scores, shown), out / PAGE)
