"""Arithmetic of times: medians and quartiles, ratios round by round, powers of the size."""

import statistics
from collections.abc import Mapping, Sequence

from onescan.bench.contest.outcome import Growth, Outcome, Spread
from onescan.bench.timing import exponent

LEAST_MIB = 0.5  # less is no measure of how memory grows


def spread(values: Sequence[float]) -> Spread:
    """The median, with the quartiles around it.

    >>> spread([1.0, 2.0, 3.0, 4.0, 5.0])
    Spread(low=2.0, median=3.0, high=4.0)
    """
    if len(values) == 1:
        return Spread(low=values[0], median=values[0], high=values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(low=low, median=median, high=high)


def ratio(times: Sequence[float], first: Sequence[float]) -> Spread:
    """How many times as long as the first: of medians, with the quartiles over rounds.

    >>> ratio([2.0, 6.0, 4.0], [1.0, 2.0, 4.0])
    Spread(low=1.5, median=2.0, high=2.5)
    """
    by_round = spread([a / b for a, b in zip(times, first, strict=True)])
    of_medians = statistics.median(times) / statistics.median(first)
    return Spread(low=by_round.low, median=of_medians, high=by_round.high)


def growth(name: str, work: str, outcomes: Mapping[int, Outcome]) -> Growth | None:
    """The powers of the size that time and memory grow with; None for a single size."""
    if len(outcomes) <= 1:
        return None
    times = [outcome.time_ms.median for outcome in outcomes.values()]
    peaks = {size: o.peak_mib for size, o in outcomes.items() if o.peak_mib >= LEAST_MIB}
    memory = exponent(list(peaks), list(peaks.values())) if len(peaks) > 1 else None
    return Growth(
        name=name,
        work=work,
        time_exponent=exponent(list(outcomes), times),
        memory_exponent=memory,
    )


def forecast_mib(outcomes: Mapping[int, Outcome], size: int) -> float:
    """The memory that a call at a larger size will take, from the last two; 0 without two.

    It grows as between those two, and at least in proportion to the size.
    """
    if len(outcomes) <= 1:
        return 0.0
    (a, first), (b, last) = list(outcomes.items())[-2:]
    if min(first.peak_mib, last.peak_mib) < LEAST_MIB:
        return 0.0
    power = max(1.0, exponent([a, b], [first.peak_mib, last.peak_mib]))
    return last.peak_mib * (size / b) ** power
