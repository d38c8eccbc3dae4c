"""Regular times of a table: parse a column, find its step and gaps, and continue it."""

from calendar import monthrange
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from fractions import Fraction
from itertools import pairwise
from typing import Literal

from onescan.messages import plural

FORMATS = (
    "%Y-%m-%d",
    "%Y-%m-%d %H:%M:%S",
    "%Y-%m-%dT%H:%M:%S",
    "%Y-%m-%d %H:%M",
    "%Y-%m-%dT%H:%M",
    "%Y-%m-%d %H:%M:%S+00:00",
    "%Y-%m-%dT%H:%M:%SZ",
    "%Y-%m",
    "%Y/%m/%d",
    "%Y%m%d",
)
EPOCH = datetime(1970, 1, 1)
MINUTE, HOUR, DAY, WEEK = 60, 3600, 86_400, 604_800  # seconds
YEAR = 12  # months
DAILY, WEEKLY = 7, 52  # steps per season
MAX_DAILY_STEPS = 1440

Unit = Literal["months", "seconds", ""]
Ticks = Sequence[Fraction]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Times with a constant step."""

    first: Fraction
    """First time: months since year 0, seconds since 1970, or a number."""
    step: Fraction
    """Difference between successive times."""
    unit: Unit
    """What `first` and `step` count; empty for plain numbers."""
    format: str = ""
    """How dates are written, for strftime; empty for plain numbers."""
    day: datetime = EPOCH
    """For months: day of the month and time of day; day 31 stands for the last day."""

    def text(self, index: int) -> str:
        """Return the time of a step, written as in the table.

        >>> month = Times(first=Fraction(24_000), step=Fraction(1), unit="months", format="%Y-%m")
        >>> month.text(13)
        '2001-02'
        """
        time = self.first + index * self.step
        if self.unit == "months":
            year, month = divmod(int(time), YEAR)
            day = min(self.day.day, monthrange(year, month + 1)[1])
            return self.day.replace(year=year, month=month + 1, day=day).strftime(self.format)
        if self.unit == "seconds":
            return (EPOCH + timedelta(seconds=int(time))).strftime(self.format)
        return str(time) if time.denominator == 1 else f"{float(time):.12g}"

    @property
    def seasonality(self) -> int:
        """Steps per year for months and weeks, per week for days, or per day for shorter steps."""
        if self.unit == "months":
            return int(YEAR / self.step) if YEAR % self.step == 0 else 1
        if self.unit == "seconds" and self.step >= DAY:
            return {DAY: DAILY, WEEK: WEEKLY}.get(int(self.step), 1)
        if self.unit == "seconds" and DAY % self.step == 0 and DAY / self.step <= MAX_DAILY_STEPS:
            return int(DAY / self.step)
        return 1

    @property
    def every(self) -> str:
        """Describe the step.

        >>> Times(first=Fraction(0), step=Fraction(604_800), unit="seconds").every
        '7 days'
        """
        if self.unit == "months":
            return plural(int(self.step), "month")
        if self.unit == "seconds":
            sizes = {"day": DAY, "hour": HOUR, "minute": MINUTE, "second": 1}
            noun = next(noun for noun, size in sizes.items() if self.step % size == 0)
            return plural(int(self.step / sizes[noun]), noun)
        return f"{float(self.step):.12g}"


def is_date(text: str) -> bool:
    """Return whether a text is a date or time in a known format with separators.

    >>> is_date("2020-01-31"), is_date("20200131")
    (True, False)
    """
    return not text.isdigit() and bool(_format_of(text))


def read_times(cells: Sequence[str], locations: Sequence[str]) -> tuple[Times, list[int]]:
    """Find the step of times: the most frequent difference. All others must be multiples of it.

    Args:
        cells: The times of at least two rows.
        locations: File and line of each row, for messages.

    Returns:
        The times, and the step of each row from 0. Numbers that are left out are gaps.

    Raises:
        ValueError: If a cell is not a time, or the times do not increase in regular steps; names
            the file and the line.
    """
    format = _format_of(cells[0])
    parsed = [_parse(*pair, format=format) for pair in zip(cells, locations, strict=True)]
    ticks, unit, day = _ticks(parsed, format)
    distances = [after - before for before, after in pairwise(ticks)]
    for i, distance in enumerate(distances, start=1):
        if distance <= 0:
            raise ValueError(
                f"{locations[i]}: the time {cells[i]!r} is not after {cells[i - 1]!r} in the "
                "previous row, expected increasing times"
            )
    step = Counter(distances).most_common(1)[0][0]
    times = Times(first=ticks[0], step=step, unit=unit, format=format, day=day)
    for i, distance in enumerate(distances, start=1):
        if distance % step:
            raise ValueError(
                f"{locations[i]}: the time {cells[i]!r} follows {cells[i - 1]!r}, expected regular "
                f"steps: most times are {times.every} apart, and gaps must be multiples of that"
            )
    return times, [int((tick - ticks[0]) / step) for tick in ticks]


def _format_of(text: str) -> str:
    """Return the format of a date; empty if it has none of the known formats."""
    for format in FORMATS:
        with suppress(ValueError):
            if datetime.strptime(text, format).strftime(format) == text:
                return format
    return ""


def _parse(text: str, location: str, *, format: str) -> datetime | Fraction:
    with suppress(ValueError, ZeroDivisionError):
        return datetime.strptime(text, format) if format else Fraction(text)
    known = f"a date such as {EPOCH.strftime(format)}" if format else "a number, or a date"
    example = " such as 2020-01-31 or 2020-01-31 12:00:00" * (not format)
    raise ValueError(f"{location}: the time is {text!r}, expected {known}{example}")


def _ticks(
    parsed: Sequence[datetime | Fraction], format: str
) -> tuple[list[Fraction], Unit, datetime]:
    """Count months if all dates are on the same day of a month or on its last, or else seconds."""
    dates = [time for time in parsed if isinstance(time, datetime)]
    if not format:
        return [time for time in parsed if isinstance(time, Fraction)], "", EPOCH
    same_time = len({time.time() for time in dates}) == 1
    is_last = all(time.day == monthrange(time.year, time.month)[1] for time in dates)
    if same_time and (is_last or len({time.day for time in dates}) == 1):
        months = [Fraction(YEAR * time.year + time.month - 1) for time in dates]
        if all(before < after for before, after in pairwise(months)):
            day = dates[0].replace(year=2000, month=1, day=31 if is_last else dates[0].day)
            return months, "months", day
    return [Fraction((time - EPOCH) // timedelta(seconds=1)) for time in dates], "seconds", EPOCH
