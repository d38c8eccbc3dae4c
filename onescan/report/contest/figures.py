"""What the table and the page tell of an outcome, and in what words."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from onescan.bench.contest.outcome import Heat, Machine, Outcome, Results, Spread
from onescan.bench.contests import Contest
from onescan.report.contest.titles import has_gradients
from onescan.report.words import TIMES, large, percent, plural

SECOND, GIB, MILLION = 1000, 1024, 1e6


class Column(NamedTuple):
    """One figure of an outcome.

    Attributes:
        name: at the head of the column.
        spell: an outcome's; "" where it has none.
    """

    name: str
    spell: Callable[[Outcome], str]


def columns(results: Results, contest: Contest) -> list[Column]:
    """Those figures that some outcome has."""
    items = contest.items
    known = [
        Column("time", lambda o: milliseconds(o.time_ms.median)),
        Column("quartiles", lambda o: between(o.time_ms, milliseconds)),
        Column("ratio", lambda o: "" if o.ratio is None else times(o.ratio.median)),
        Column("its quartiles", _ratio_quartiles),
        Column("memory", lambda o: mib(o.peak_mib)),
        Column("state", lambda o: mib(o.state_mib) if o.state_mib else ""),
        Column(f"{items}/s", lambda o: large(o.per_second) if items else ""),
        Column("of copying", lambda o: "" if o.copy_share is None else share(o.copy_share)),
        Column("of matmul", lambda o: "" if o.matmul_share is None else share(o.matmul_share)),
        Column("weights", lambda o: large(o.parameters) if o.parameters else ""),
    ]
    outcomes = [outcome for heat in results.heats for outcome in heat.outcomes]
    return [column for column in known if any(map(column.spell, outcomes))]


def milliseconds(ms: float) -> str:
    """Spell a time with three figures.

    >>> milliseconds(0.01234), milliseconds(12345.0)
    ('0.0123 ms', '12.3 s')
    """
    return f"{ms / SECOND:.3g} s" if ms >= SECOND else f"{ms:.3g} ms"


def times(ratio: float) -> str:
    """Spell a ratio with three figures.

    >>> times(21.98) == f"22 {TIMES}"
    True
    """
    return f"{ratio:.0f} {TIMES}" if ratio >= SECOND else f"{ratio:.3g} {TIMES}"


def mib(amount: float) -> str:
    """Spell an amount of memory with three figures, also a small one.

    >>> mib(0.1234), mib(1600.0), mib(2048.0)
    ('0.123 MiB', '1.56 GiB', '2 GiB')
    """
    return f"{amount / GIB:.3g} GiB" if amount >= GIB else f"{amount:.3g} MiB"


def share(part: float) -> str:
    """Spell a share of what the machine can do; caches may make it more than all.

    >>> share(0.801), share(1.5)
    ('80.1%', '150%')
    """
    return percent(part) if part < 1 else f"{part:.0%}"


def between(spread: Spread, spell: Callable[[float], str]) -> str:
    """Spell the quartiles.

    >>> between(Spread(low=1.0, median=2.0, high=3.0), milliseconds)
    '1 to 3 ms'
    """
    low, high = spell(spread.low), spell(spread.high)
    number, _, unit = low.rpartition(" ")
    return f"{number if high.endswith(f' {unit}') else low} to {high}"


def _ratio_quartiles(outcome: Outcome) -> str:
    """Nothing for the first contestant, whose ratio to itself is 1 in every round."""
    ratio = outcome.ratio
    return "" if ratio is None or ratio.low == ratio.high == 1 else between(ratio, times)


def largest(results: Results, work: str) -> Heat:
    """The heat to look at first: the largest of those that most contestants finished."""
    heats = [heat for heat in results.heats if heat.work == work]
    return max(heats, key=lambda heat: (len(heat.outcomes), heat.size))


def absent(results: Results, contest: Contest) -> list[str]:
    """What was not measured, a line for each contestant and reason."""
    before, _, _ = contest.at.partition("{}")
    at: dict[tuple[str, str, str], list[int]] = {}
    for heat in sorted(results.heats, key=lambda heat: heat.size):
        for missing in heat.missing:
            at.setdefault((missing.name, heat.work, missing.why), []).append(heat.size)
    return [
        f"{name}, {work}, {before}{', '.join(f'{size}' for size in sizes)}: {why}"
        for (name, work, why), sizes in at.items()
    ]


def machine_facts(results: Results) -> list[tuple[str, str]]:
    """What was measured on, with what, and how."""
    machine = results.machine
    others = {"triton": machine.triton, "flash-linear-attention": machine.fla, "timm": machine.timm}
    packages = [f"{name} {version or 'not installed'}" for name, version in others.items()]
    versions = [f"onescan {machine.onescan}", f"torch {machine.torch}", *packages]
    threads = f"{plural(machine.threads, 'thread')} of {plural(machine.cores, 'core')}"
    is_cpu = machine.device == "cpu"
    return [
        ("Device", machine.cpu if is_cpu else f"{machine.device}, beside {machine.cpu}"),
        ("Threads", threads),
        ("Memory", _memory(machine)),
        ("System", f"{machine.platform}, Python {machine.python}"),
        ("Versions", ", ".join(versions)),
        ("Measured", how_measured(results)),
        ("Options", spelt_options(results)),
        *yardsticks(results),
    ]


def _memory(machine: Machine) -> str:
    allocator = f", with {machine.allocator}" if machine.allocator else ""
    return f"{mib(machine.memory_mib)}{allocator}"


def spelt_options(results: Results) -> str:
    """All of them, as they are called where they are typed; sizes and gradients as measured."""
    options = results.options
    asked = dataclasses.asdict(options)
    asked[options.axis] = sorted({heat.size for heat in results.heats})
    asked["gradients"] = has_gradients(results)
    return ", ".join(
        f"{name.replace('_', ' ')} {_spelt_value(value)}"
        for name, value in asked.items()
        if name != "candidates"
    )


def _spelt_value(value: object) -> str:
    """Spell an option's value.

    >>> _spelt_value((256, 1024)), _spelt_value(True), _spelt_value(None), _spelt_value(2.0)
    ('256 1024', 'yes', 'none', '2')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return " ".join(map(_spelt_value, value)) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value in (None, "") else str(value)


def how_measured(results: Results) -> str:
    """The protocol in a sentence."""
    rounds, seconds = results.options.rounds, results.options.seconds
    return (
        "each contestant in a process of its own, called in turn, backwards every other round; at "
        f"least {plural(rounds, 'round')} and {seconds:g} s"
    )


def yardsticks(results: Results) -> list[tuple[str, str]]:
    """What the machine could do meanwhile, over all heats."""
    copies = [h.yardsticks.copy_gb_per_s for h in results.heats if h.yardsticks.copy_gb_per_s]
    products = [
        h.yardsticks.matmul_tflop_per_s for h in results.heats if h.yardsticks.matmul_tflop_per_s
    ]
    facts = []
    if copies:
        facts.append(("Copying", f"{_range(copies)} GB/s, read and written"))
    if products:
        dtype = results.heats[-1].yardsticks.matmul_dtype
        facts.append(("Matmul", f"{_range(products)} TFLOP/s in {dtype}"))
    return facts


def _range(values: Sequence[float]) -> str:
    """Spell the least and the most.

    >>> _range([2.0, 3.0]), _range([2.0])
    ('2 to 3', '2')
    """
    least, most = f"{min(values):.3g}", f"{max(values):.3g}"
    return least if least == most else f"{least} to {most}"
