"""Format numbers, durations and names for tables, captions and axes."""

import math
from collections.abc import Sequence

TIMES = "\N{MULTIPLICATION SIGN}"
ARROW = "\N{RIGHTWARDS ARROW}"
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
LONGEST_LABEL = 24
MINUTE, HOUR = 60, 3600
GIB = 1024  # MiB
SPELLED = {
    "top5": "top-5",
    "mae": "MAE",
    "mase": "MASE",
    "rmse": "RMSE",
    "r2": "R\N{SUPERSCRIPT TWO}",
    "f1": "F1",
    "iou": "IoU",
    "dice": "Dice",
}
ACCURACY = "accuracy"  # suffix of metrics that are shares; higher is better


def percent(share: float, digits: int = 1) -> str:
    """Format a share as a percentage; only 1 itself becomes 100%.

    >>> percent(0.98611), percent(0.99999), percent(1.0)
    ('98.6%', '99.9%', '100%')
    >>> percent(math.nan), percent(-math.inf)
    ('nan%', '-inf%')
    """
    if share == 1:
        return "100%"
    scale = 10 ** (digits + 2)
    if not math.isfinite(share * scale):
        return f"{share:.{digits}%}"
    return f"{min(round(share * scale), scale - 1) / scale:.{digits}%}"


def large(number: int | float) -> str:
    """Format a count with three significant digits.

    >>> large(466_000), large(6_009_832), large(36)
    ('466 k', '6.01 M', '36')
    """
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.3g}"


def memory(mib: int | float) -> str:
    """Format an amount of memory.

    >>> memory(512), memory(25_600), memory(math.nan)
    ('512 MiB', '25 GiB', 'not known')
    """
    if math.isnan(mib):
        return "not known"
    return f"{mib / GIB:.3g} GiB" if mib >= GIB else f"{mib:.0f} MiB"


def metric_name(name: str) -> str:
    """Format the name of a metric.

    >>> metric_name("top5_accuracy")
    'top-5 accuracy'
    >>> metric_name("ema_accuracy")
    'EMA accuracy'
    >>> metric_name("speed_rmse")
    'speed RMSE'
    """
    words = [SPELLED.get(word, word) for word in name.split("_")]
    label = " ".join(words)
    return f"EMA {label[4:]}" if label.startswith("ema ") else label


def metric_value(name: str, value: float) -> str:
    """Format the value of a metric.

    >>> metric_value("accuracy", 0.5), metric_value("loss", 0.5), metric_value("loss", 0.00021)
    ('50.00%', '0.500', '0.0002')
    """
    if name.endswith(ACCURACY):
        return percent(value, 2)
    return f"{value:.1g}" if 0 < abs(value) < 0.0005 else f"{value:.3f}"  # noqa: PLR2004


def duration(seconds: int | float) -> str:
    """Format a time.

    >>> duration(0.25), duration(53.8), duration(83), duration(8000)
    ('0.2 s', '54 s', '1 min 23 s', '2 h 13 min')
    """
    if seconds < MINUTE:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"  # noqa: PLR2004
    if seconds < HOUR:
        return f"{seconds // MINUTE:.0f} min {seconds % MINUTE:.0f} s"
    return f"{seconds // HOUR:.0f} h {seconds % HOUR // MINUTE:.0f} min"


def label(name: str) -> str:
    r"""Shorten a name to fit beside an axis, on one line and without control characters.

    >>> label("a\tname"), len(label("a name that goes on and on and on"))
    ('a name', 24)
    """
    line = "".join(c if c.isprintable() else " " for c in name)
    return line if len(line) <= LONGEST_LABEL else line[: LONGEST_LABEL - 1] + ELLIPSIS


def significant(number: float) -> str:
    """Format a number on an axis, without powers of ten where possible.

    >>> significant(0.001), significant(20.0)
    ('0.001', '20')
    """
    return f"{number:g}" if math.isfinite(number) else ""


def plain_table(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Align the cells of a table in columns of text.

    Args:
        rows: Equally many cells each.
        left: Number of columns that are aligned to the left; the others are to the right.

    >>> print(plain_table([["run", "loss"], ["a", "0.1"]]))
    run  loss
    a     0.1
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        names = [cell.ljust(width) for cell, width in zip(row[:left], widths, strict=False)]
        numbers = zip(row[left:], widths[left:], strict=True)
        lines.append("  ".join([*names, *(cell.rjust(width) for cell, width in numbers)]).rstrip())
    return "\n".join(lines)
