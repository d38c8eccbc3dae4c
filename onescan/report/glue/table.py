"""Every task's measures and score, and their average: as text, and in HTML."""

from html import escape

from onescan.data.glue import PROBLEMS
from onescan.report.glue.outcome import GlueOutcome
from onescan.report.words import metric_name, plural

BETWEEN = "  "  # columns of the plain table
HEADS = ["task", "measure", "value", "score"]

Row = list[str]


def table_rows(outcome: GlueOutcome) -> list[Row]:
    """A row for each measure; the first of a task has its name and its score, in percent."""
    rows = []
    for task in outcome.runs:
        opening = [PROBLEMS[task].title, outcome.score(task).spell(100, 2)]
        for name, value in outcome.metrics(task).items():
            title, score = opening
            rows.append([title, metric_name(name), value.spell(digits=4), score])
            opening = ["", ""]
    return rows


def average_row(outcome: GlueOutcome) -> Row:
    """The last row."""
    over = f"average of {plural(len(outcome.runs), 'task')}"
    return [over, "", "", outcome.average().spell(100, 2)]


def glue_table(outcome: GlueOutcome) -> str:
    """The table in columns of text: names to the left, numbers to the right."""
    rows = [HEADS, *table_rows(outcome), average_row(outcome)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join(
        BETWEEN.join(
            cell.ljust(width) if place < 2 else cell.rjust(width)  # noqa: PLR2004 - names
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def html_table(outcome: GlueOutcome) -> str:
    """The table in HTML, with the average in bold."""
    lines = ["".join(f"<th>{head}</th>" for head in HEADS)]
    for title, *cells in table_rows(outcome):
        values = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f"<th>{escape(title)}</th>{values}")
    title, *_, value = average_row(outcome)
    lines.append(f'<th>{title}</th><td></td><td></td><td class="best"><b>{value}</b></td>')
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table class="groups">{body}</table></div>'
