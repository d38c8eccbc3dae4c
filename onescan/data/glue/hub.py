"""GLUE as the hub has it, read by the datasets library."""

from typing import Any

from onescan.data.glue.problems import GlueProblem, GlueTask
from onescan.data.glue.rows import GlueRow, check_label, check_texts
from onescan.data.sources import first_line, quiet
from onescan.data.text.source import import_datasets

LABEL = "label"


def read_hub(name: str, task: GlueTask, problem: GlueProblem, split: str) -> list[GlueRow]:
    """Read a split of a task.

    Raises:
        ImportError: the datasets library is not installed.
        ValueError: there is no such data set or split, it lacks a column, or a row cannot be read.
    """
    table = _opened(name, task, split)
    columns = problem.hub_texts or problem.texts
    for column in (*columns, LABEL):
        if column not in table.column_names:
            raise ValueError(
                f"{name}, {task}, {split}: the column {column!r} is missing; there are: "
                f"{', '.join(table.column_names)}"
            )
    cells = zip(*(table[column][:] for column in (*columns, LABEL)), strict=True)
    rows = []
    for place, (*texts, label) in enumerate(cells):
        try:
            rows.append(
                GlueRow(check_texts([text or "" for text in texts]), check_label(problem, label))
            )
        except ValueError as error:
            raise ValueError(f"{name}, {task}, row {place} of {split}: {error}") from error
    return rows


def _opened(name: str, task: GlueTask, split: str) -> Any:
    datasets = import_datasets()
    try:
        with quiet():
            return datasets.load_dataset(name, task, split=split)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        reason = first_line(error.__cause__ or error)
        raise ValueError(
            f"data.path is {name!r}, which is not on disk, and of which the hub gives no {split} "
            f"of {task}: {reason}"
        ) from error
