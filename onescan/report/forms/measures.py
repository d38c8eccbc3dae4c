"""What the page tells of a forward, and the colours of its forms."""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from onescan.bench.form_costs import Cost, FormCosts, Variant
from onescan.report.palette import series, tint
from onescan.report.words import memory

SECOND = 1000  # milliseconds
LEAST_MIB = 0.01  # so that no memory at all has a place on a logarithmic axis
FAINTEST = 0.55  # of a form's colour, for its smallest chunk


class Measure(NamedTuple):
    """One of the things that a forward costs.

    Attributes:
        axis: what stands along an axis.
        of: a cost, on that axis.
        spell: the same in words.
    """

    axis: str
    of: Callable[[Cost], float]
    spell: Callable[[Cost], str]


def time_per_image(costs: FormCosts) -> Measure:
    """The median time of a forward, shared out among its images."""

    def milliseconds(cost: Cost) -> float:
        return cost.median_ms / costs.batch_size

    return Measure("milliseconds per image", milliseconds, lambda cost: _time(milliseconds(cost)))


def memory_held() -> Measure:
    """The most that a forward holds at once."""
    return Measure(
        "MiB", lambda cost: max(cost.peak_mib, LEAST_MIB), lambda cost: memory(cost.peak_mib)
    )


def most_measured(costs: FormCosts) -> int:
    """The largest size of those at which most was measured."""
    counts = Counter(cost.size for cost in costs.costs)
    return max(counts, key=lambda size: (counts[size], size))


def colors(costs: FormCosts) -> dict[Variant, str]:
    """What was measured, in one colour for each form; the smaller a chunk, the fainter."""
    chunks: dict[str, list[int]] = {}
    for form, chunk in sorted({(c.variant.form, c.variant.chunk_size or 0) for c in costs.costs}):
        chunks.setdefault(form, []).append(chunk)
    return {
        Variant(form=form, chunk_size=size or None): tint(series(i), _strength(place, len(sizes)))
        for i, (form, sizes) in enumerate(chunks.items())
        for place, size in enumerate(sizes, 1)
    }


def _strength(place: int, of: int) -> float:
    """From the faintest, the first of many, to 1, the last."""
    return 1.0 if of == 1 else FAINTEST + (1 - FAINTEST) * (place - 1) / (of - 1)


def _time(ms: float) -> str:
    """Spell a time with three figures.

    >>> _time(0.1234), _time(1500.0)
    ('0.123 ms', '1.5 s')
    """
    return f"{ms / SECOND:.3g} s" if ms >= SECOND else f"{ms:.3g} ms"
