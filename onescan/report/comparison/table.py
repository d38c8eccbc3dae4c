"""One row for each recipe: what came out, and what it took."""

import math
import statistics
from collections.abc import Callable, Iterable
from html import escape
from typing import NamedTuple

from onescan.report.comparison.groups import Group
from onescan.report.summary import spread
from onescan.report.words import (
    ACCURACY,
    duration,
    large,
    memory,
    metric_name,
    metric_value,
    percent,
)

BETWEEN = "  "  # columns of the plain table


class Measure(NamedTuple):
    """One column.

    Attributes:
        head: what is measured.
        value: of a group.
        spell: the value in words.
        best: which of several values is best; None where neither end is.
    """

    head: str
    value: Callable[[Group], float]
    spell: Callable[[Group], str]
    best: Callable[[Iterable[float]], float] | None


def measures(groups: list[Group]) -> list[Measure]:
    """The columns, after those that name the group."""
    updates = {run.result.steps for group in groups for run in group.runs}
    shorter = min if len(updates) == 1 else None  # to do less is not to be quicker
    return [
        *(_metric(name) for name in groups[0].runs[0].result.metrics),
        _measure("parameters", lambda group: group.parameters, large, None),
        _measure("examples/s", lambda group: group.mean(lambda run: run.throughput), large, max),
        _measure("training", lambda group: group.mean(lambda run: run.seconds), duration, shorter),
        _measure("waiting", lambda group: group.mean(lambda run: run.waiting), percent, min),
        _measure("memory", lambda group: group.mean(lambda run: run.memory_mib), memory, min),
    ]


def plain_table(groups: list[Group]) -> str:
    """The table in columns of text: names to the left, numbers to the right."""
    columns = measures(groups)
    rows = [["", "seeds", *(column.head for column in columns)]]
    rows += [
        [group.name, str(len(group.runs)), *(column.spell(group) for column in columns)]
        for group in groups
    ]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join(
        BETWEEN.join(
            [name.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))]
        )
        for name, *cells in rows
    )


def html_table(groups: list[Group]) -> str:
    """The table in HTML, with the best of each column in bold."""
    columns = measures(groups)
    heads = ["", "seeds", *(column.head for column in columns)]
    rows = ["".join(f"<th>{escape(head)}</th>" for head in heads)]
    for group in groups:
        seeds = f"{len(group.runs)} ({', '.join(str(run.seed) for run in group.runs)})"
        cells = "".join(_cell(column, group, groups) for column in columns)
        rows.append(f"<th>{badge(group)}{escape(group.name)}</th><td>{seeds}</td>{cells}")
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="scroll"><table class="groups">{body}</table></div>'


def badge(group: Group) -> str:
    """A group's letter in the colour of its lines."""
    return f'<i class="badge" style="background:{group.color}">{group.letter}</i>'


def _cell(column: Measure, group: Group, groups: list[Group]) -> str:
    values = [column.value(each) for each in groups]
    text = column.spell(group)
    known = {value for value in values if not math.isnan(value)}
    if column.best and len(known) > 1 and column.value(group) == column.best(known):
        return f'<td class="best"><b>{text}</b></td>'
    return f"<td>{text}</td>"


def _measure(
    head: str,
    value: Callable[[Group], float],
    spell: Callable[[float], str],
    best: Callable[[Iterable[float]], float] | None,
) -> Measure:
    return Measure(head, value, lambda group: spell(value(group)), best)


def _metric(name: str) -> Measure:
    """A test metric, as its mean and standard deviation over seeds."""

    def values(group: Group) -> list[float]:
        return [run.result.metrics[name] for run in group.runs]

    def spell(group: Group) -> str:
        deviation = spread(values(group))
        about = "" if deviation is None else f" \u00b1 {metric_value(name, deviation)}"
        return f"{metric_value(name, statistics.mean(values(group)))}{about}"

    best = max if name.endswith(ACCURACY) else min if name.endswith("loss") else None
    return Measure(
        f"test {metric_name(name)}", lambda group: statistics.mean(values(group)), spell, best
    )
