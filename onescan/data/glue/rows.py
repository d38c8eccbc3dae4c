"""One example of GLUE: its texts, and its label as a class or a number."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from onescan.data.glue.problems import MOST_ALIKE, GlueProblem


class GlueRow(NamedTuple):
    """One example, before it is tokenized.

    Attributes:
        texts: one or two.
        label: the place of its class, or a number.
    """

    texts: tuple[str, ...]
    label: int | float


def check_texts(texts: Sequence[str]) -> tuple[str, ...]:
    """Give texts back if anything is written in one of them.

    Raises:
        ValueError: nothing is.
    """
    if not any(text.strip() for text in texts):
        raise ValueError("no text is written in it")
    return tuple(texts)


def read_label(problem: GlueProblem, label: str) -> int | float:
    """Read a label as the published tables spell it.

    Raises:
        ValueError: it is none of the task's.
    """
    if not problem.class_names:
        return check_score(label)
    if label not in problem.spelt:
        expected = " or ".join(problem.spelt)
        raise ValueError(f"the label is {label!r}, expected {expected}")
    return problem.spelt.index(label)


def check_label(problem: GlueProblem, label: int | float | None) -> int | float:
    """Give a label back as the hub numbers it.

    Raises:
        ValueError: it is none of the task's.
    """
    if not problem.class_names:
        return check_score(label)
    if label is None or label not in range(len(problem.class_names)):
        raise ValueError(f"the label is {label!r}, expected 0 to {len(problem.class_names) - 1}")
    return int(label)


def check_score(score: str | float | None) -> float:
    """Give a score of STS-B back.

    Raises:
        ValueError: it is no number, or out of range.
    """
    try:
        number = math.nan if score is None else float(score)
    except ValueError:
        number = math.nan
    if not 0 <= number <= MOST_ALIKE:
        raise ValueError(f"the score is {score!r}, expected a number from 0 to {MOST_ALIKE:g}")
    return number
