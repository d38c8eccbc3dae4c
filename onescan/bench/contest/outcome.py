"""What was measured, as the JSON file of a benchmark holds it."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from onescan import configs
from onescan.bench.contests import ContestOptions
from onescan.checkpoint.files import damaged, parse_json

ANEW = "remove it to measure anew, or choose another folder"
ADDS = ("gradients", "device")  # options that may change; the machine has the device's name


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Of several values."""

    low: float
    """a quarter of them is below"""
    median: float
    high: float
    """a quarter of them is above"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one contestant in a heat."""

    name: str
    rounds_ms: tuple[float, ...]
    """Of each turn the median of its calls, in milliseconds."""
    time_ms: Spread
    ratio: Spread | None
    """Round by round to the first contestant's; the median is that of medians. None without it."""
    peak_mib: float
    """The most held in a call beyond what was held before it."""
    state_mib: float
    """Carried from call to call."""
    parameters: int
    per_second: float
    """Tokens or images; 0 where none are counted."""
    floor_bytes: int
    """What a call must read and write at least; 0 where nobody has counted."""
    copy_share: float | None
    """Of the bandwidth at which the machine copies: floor_bytes over the time."""
    macs: int
    """Multiply-accumulates of a call's matrix products; 0 where nobody has counted."""
    matmul_share: float | None
    """Of the rate at which the machine multiplies large matrices."""


@dataclass(frozen=True, kw_only=True)
class Missing:
    """What was not measured."""

    name: str
    why: str
    is_last: bool
    """Whether nothing larger is tried either."""
    again: bool = False
    """Whether the next command tries it again."""


@dataclass(frozen=True, kw_only=True)
class Yardsticks:
    """What the machine could do while a heat was measured; None where that was not measured."""

    copy_gb_per_s: float | None = None
    """10^9 bytes a second, read and written, of a large copy."""
    matmul_tflop_per_s: float | None = None
    """10^12 operations a second, two for each multiply-accumulate."""
    matmul_dtype: str = ""


@dataclass(frozen=True, kw_only=True)
class Heat:
    """All contestants that did the same work at the same size, in turn."""

    work: str
    size: int
    yardsticks: Yardsticks
    outcomes: tuple[Outcome, ...]
    missing: tuple[Missing, ...]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What compares only with itself."""

    device: str
    """cpu, or the GPU's name."""
    cpu: str
    cores: int
    threads: int
    memory_mib: float
    """Of the device."""
    allocator: str = ""
    """Environment variables that affect how memory is allocated on a CPU."""
    platform: str
    python: str
    onescan: str
    torch: str
    triton: str | None
    fla: str | None
    timm: str | None


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How a contestant's time and memory grow with the size."""

    name: str
    work: str
    time_exponent: float
    memory_exponent: float | None
    """None where a call hardly takes memory."""


@dataclass(frozen=True, kw_only=True)
class Results:
    """What the JSON file of a benchmark holds."""

    benchmark: str
    names: tuple[str, ...]
    options: ContestOptions
    machine: Machine
    heats: tuple[Heat, ...] = ()
    growth: tuple[Growth, ...] = ()

    @property
    def works(self) -> list[str]:
        """What was measured, in the order in which it was."""
        return list(dict.fromkeys(heat.work for heat in self.heats))

    @property
    def has_outcomes(self) -> bool:
        """Whether anybody could be measured."""
        return any(heat.outcomes for heat in self.heats)

    def heat(self, work: str, size: int) -> Heat | None:
        """What is known of one size."""
        return next((h for h in self.heats if (h.work, h.size) == (work, size)), None)

    def of(self, name: str, work: str) -> dict[int, Outcome]:
        """What a contestant took, from the smallest size to the largest."""
        heats = sorted((h for h in self.heats if h.work == work), key=lambda heat: heat.size)
        return {h.size: outcome for h in heats for outcome in h.outcomes if outcome.name == name}


def going_on(path: Path, fresh: Results) -> Results:
    """What is known before the first measurement: `fresh`, with what the file holds of it.

    Raises:
        ValueError: the file is damaged, or holds measurements with other options or of another
            machine.
    """
    if not path.exists():
        return fresh
    there = _read(path)
    for where, x, y in configs.differences(_lasting(there), _lasting(fresh)):
        raise ValueError(
            f"{path} holds what was measured with {where} {x!r}, and not {y!r}: choose another "
            "folder"
        )
    return dataclasses.replace(fresh, heats=there.heats, growth=there.growth)


def _lasting(results: Results) -> Results:
    """What must not change from one call to the next."""
    options = results.options
    usual = {name: getattr(type(options), name) for name in (options.axis, *ADDS)}
    options = dataclasses.replace(options, **usual)
    return dataclasses.replace(results, options=options, heats=(), growth=())


def _read(path: Path) -> Results:
    try:
        data = parse_json(path.read_bytes(), path, ANEW)
    except RecursionError as error:
        raise damaged(path, error, ANEW) from error
    if not isinstance(data, dict):
        raise damaged(path, data, ANEW)
    try:
        results = configs.from_dict(Results, data)
        check_sound(results)
    except (ValueError, OverflowError) as error:
        raise damaged(path, error, ANEW) from error
    return results


def check_sound(results: Results) -> None:
    """Raise ValueError for what no measurement gives."""
    places = [(heat.work, heat.size) for heat in results.heats]
    if len(set(places)) < len(places):
        raise ValueError("a size is there twice")
    for heat in results.heats:
        if heat.size < 1:
            raise ValueError(f"a size is {heat.size}, expected a number above 0")
        names = [*(each.name for each in heat.outcomes), *(each.name for each in heat.missing)]
        if len(set(names)) < len(names) or not set(names) <= set(results.names):
            raise ValueError(f"at {heat.size} are {names}, expected each of {results.names} once")
        _check_numbers(f"at {heat.size}, yardsticks", heat.yardsticks)
        for outcome in heat.outcomes:
            _check_outcome(f"at {heat.size}, {outcome.name}", outcome)
    for growth in results.growth:
        if growth.name not in results.names:
            raise ValueError(f"growth is of {growth.name!r}, expected one of {results.names}")
        if not all(map(math.isfinite, (growth.time_exponent, growth.memory_exponent or 0))):
            raise ValueError(f"growth of {growth.name} is {growth}, expected numbers")


def _check_outcome(where: str, outcome: Outcome) -> None:
    _check_numbers(where, outcome)
    if not outcome.rounds_ms:
        raise ValueError(f"{where}, rounds_ms is empty")
    _check_above_0(where, "rounds_ms", outcome.rounds_ms)
    for name in ("time_ms", "ratio"):
        spread = getattr(outcome, name)
        if spread is not None:
            _check_above_0(where, name, (spread.low, spread.median, spread.high))


def _check_numbers(where: str, counted: Outcome | Yardsticks) -> None:
    """What is counted may be 0 where nothing was."""
    for field in dataclasses.fields(counted):
        number = getattr(counted, field.name)
        if isinstance(number, int | float) and not 0 <= number < math.inf:
            raise ValueError(f"{where}, {field.name} is {number}, expected 0 or more")


def _check_above_0(where: str, name: str, numbers: tuple[float, ...]) -> None:
    for number in numbers:
        if not 0 < number < math.inf:
            raise ValueError(f"{where}, {name} has {number}, expected numbers above 0")
