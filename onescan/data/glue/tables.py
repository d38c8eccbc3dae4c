"""The tables of GLUE's published archive: tabs between cells, and quotes that are text."""

import logging
from pathlib import Path

from onescan.data.base import OnError
from onescan.data.glue.problems import GlueProblem, GlueTask
from onescan.data.glue.rows import GlueRow, check_texts, read_label

TAB, NEWLINE, MARK = "\t", "\r\n", "\ufeff"  # of byte order, which may begin a file
TRAIN, ENDING = "train", ".tsv"
MOST_TOLD = 10  # lines that cannot be read

log = logging.getLogger("onescan")


def find_folder(path: Path, task: GlueTask, problem: GlueProblem) -> Path:
    """Find a task's folder in the archive's, by either name; or the folder that is itself one.

    Raises:
        ValueError: there is none.
    """
    names = (problem.title.lower(), task)
    found = [each for each in sorted(path.iterdir()) if each.name.lower() in names]
    for folder in [*found, path]:
        if (folder / f"{TRAIN}{ENDING}").is_file():
            return folder
    raise ValueError(
        f"data.path is {str(path)!r}, which has no tables of {problem.title}: expected "
        f"{problem.title}/{TRAIN}{ENDING} in it, or {TRAIN}{ENDING}"
    )


def read_table(path: Path, problem: GlueProblem, on_error: OnError) -> list[GlueRow]:
    """Read a table.

    Args:
        path: of the file.
        problem: what its columns hold.
        on_error: whether a line that cannot be read ends the run, or is skipped and told.

    Raises:
        ValueError: there is no such file, it lacks a column, no rows are in it, or a line cannot
            be read: says the file and the line.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    rows, faults = [], []
    with path.open("rb") as file:
        columns = problem.columns or _heading(path, file.readline(), problem)
        for number, line in enumerate(file, start=1 if problem.columns else 2):
            try:
                rows.append(_row(line, columns, problem))
            except ValueError as error:
                faults.append(f"{path}, line {number}: {error}")
                if on_error == "raise":
                    raise ValueError(faults[-1]) from error
    if not rows:
        raise ValueError(f"{path} holds no rows")
    _tell(path, faults)
    return rows


def _heading(path: Path, line: bytes, problem: GlueProblem) -> tuple[str, ...]:
    if not line:
        raise ValueError(f"{path} is empty")
    try:
        columns = tuple(_cells(line))
    except ValueError as error:
        raise ValueError(f"{path}, line 1: {error}") from error
    for name in (*problem.texts, problem.label):
        if name not in columns:
            raise ValueError(
                f"{path}, line 1: the column {name!r} is missing; there are: {', '.join(columns)}"
            )
    return columns


def _row(line: bytes, columns: tuple[str, ...], problem: GlueProblem) -> GlueRow:
    cells = _cells(line)
    if len(cells) != len(columns):
        raise ValueError(
            f"{len(cells)} cells between tabs, expected {len(columns)}: {', '.join(columns)}"
        )
    named = dict(zip(columns, cells, strict=True))
    texts = check_texts([named[name] for name in problem.texts])
    return GlueRow(texts, read_label(problem, named[problem.label]))


def _cells(line: bytes) -> list[str]:
    try:
        return line.decode().removeprefix(MARK).rstrip(NEWLINE).split(TAB)
    except UnicodeDecodeError:
        raise ValueError("is not text in UTF-8") from None


def _tell(path: Path, faults: list[str]) -> None:
    for fault in faults[:MOST_TOLD]:
        log.warning("%s", fault)
    if faults:
        log.warning("%s: %s lines could not be read and are left out", path, len(faults))
