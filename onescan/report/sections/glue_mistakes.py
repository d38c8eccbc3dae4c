"""The held-out texts of GLUE on which a model errs most."""

from html import escape

from onescan.report.runs import RunGroup
from onescan.report.section import Figure, Section
from onescan.report.words import percent
from onescan.tasks import Glue

MOST = 12  # texts
LONGEST = 300  # characters of one
SEPARATOR = " \N{EM DASH} "  # between two texts


def section(study: RunGroup) -> Section:
    """The texts of the highest loss, of the first run."""
    title = "Where it errs most"
    losses = study.array("losses")[0]
    if len(losses) != len(study.task.test):
        return Section(title, lead="The held-out texts have changed since the runs were judged.")
    places = losses.topk(min(MOST, len(losses))).indices.tolist()
    rows = ["<tr><th>texts</th><th>label</th><th>said</th></tr>"]
    rows += [f"<tr>{_cells(study, place)}</tr>" for place in places]
    figure = Figure(
        "Held-out texts of the highest loss",
        f'<div class="scroll"><table class="pairs">{"".join(rows)}</table></div>',
        "What the first seed's model says, and how sure it is, where its loss is highest. Some of "
        "these may be labels that a reader would not give either.",
        columns=3,
    )
    return Section(title, (figure,))


def _cells(study: RunGroup, place: int) -> str:
    assert isinstance(study.task, Glue)
    texts = SEPARATOR.join(_short(text) for text in study.task.texts(place))
    label, said = (study.array(name)[0, place].item() for name in ("labels", "predictions"))
    if study.class_names:
        sure = percent(study.array("confidence")[0, place].item())
        words = study.class_names[int(label)], f"{study.class_names[int(said)]} {sure}"
    else:
        words = f"{label:.1f}", f"{said:.1f}"
    return "".join(f"<td>{escape(cell)}</td>" for cell in (texts, *words))


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
