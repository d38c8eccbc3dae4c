"""The numbers of a benchmark in columns, for a terminal."""

from collections.abc import Iterator

from onescan.bench.contest.outcome import Results
from onescan.bench.contests import Contest
from onescan.report.contest.figures import absent, columns, machine_facts
from onescan.report.contest.titles import titled
from onescan.report.words import TIMES


def contest_table(results: Results, contest: Contest) -> str:
    """A table for each work, how each contestant grows, and what was not measured; in ASCII."""
    contest = titled(results, contest)
    lines = [f"{name}: {fact}" for name, fact in machine_facts(results)]
    for work in results.works:
        lines += ["", f"{contest.title}, {work}", *_aligned(_rows(results, contest, work))]
    grown = [_grown(each.name, each.work, results) for each in results.growth]
    lines += ["", *grown] if grown else []
    missing = absent(results, contest)
    lines += ["", "not measured:", *(f"  {line}" for line in missing)] if missing else []
    return "\n".join(lines).replace(TIMES, "x")


def _rows(results: Results, contest: Contest, work: str) -> Iterator[list[str]]:
    shown = columns(results, contest)
    yield ["", contest.axis, *(column.name for column in shown)]
    for name in results.names:
        for size, outcome in results.of(name, work).items():
            yield [name, str(size), *(column.spell(outcome) for column in shown)]


def _aligned(rows: Iterator[list[str]]) -> list[str]:
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def _grown(name: str, work: str, results: Results) -> str:
    (growth,) = [g for g in results.growth if (g.name, g.work) == (name, work)]
    memory = growth.memory_exponent
    of_memory = "" if memory is None else f", memory as its power {memory:.2f}"
    return f"{name}, {work}: time grows as the size's power {growth.time_exponent:.2f}{of_memory}"
