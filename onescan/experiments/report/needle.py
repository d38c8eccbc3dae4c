"""Needle-in-a-haystack evaluation: a table in text, and a page with two heat maps."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onescan.experiments.report.format import percent, plain_table
from onescan.experiments.report.page import Card, Figure, Page, Section
from onescan.experiments.report.plots import Axis, heat_map
from onescan.messages import plural

if TYPE_CHECKING:
    from onescan.experiments.evaluation.needle import NeedleGrid

LEAD = (
    "A fact is hidden in a long text, and a question at the end asks for it. Whether a model "
    "recalls it depends on the length of the text and on the position of the fact."
)
FOUND = (
    "Share of needles for which greedy decoding returns the right number. At depth 0%, the needle "
    "is at the start of the haystack; at 100%, right before the question."
)
GAIN = (
    "How much more likely the number is with the needle in the text than without it, in nats; 0 "
    "means no recall. It shows recall even in models that never generate the whole number, but "
    "part of the gain may come from having seen any number."
)
NARROW = 4  # more lengths do not fit beside each other in one column of the page
FULL_COLOR = 1.0  # nats; in grids of smaller gains, all cells stay pale


def needle_table(grid: "NeedleGrid") -> str:
    """Format the share of needles found and the gain as plain text, one line for each depth."""
    rows = [["depth", *(f"{length:,}" for length in grid.lengths)]]
    for depth, shares, gains in zip(
        sorted(grid.config.depths), grid.accuracy(), grid.gain(), strict=True
    ):
        cells = zip(shares, gains, strict=True)
        rows.append([f"{depth:.0%}", *(f"{percent(x, 0)}, {gain:+.2f}" for x, gain in cells)])
    return plain_table(rows, left=0)


def write_needles(grid: "NeedleGrid", path: Path) -> Path:
    """Write a self-contained page that shows which needles were found, by length and depth.

    Args:
        grid: Result of `measure_needles`.
        path: HTML file. An existing page of onescan is replaced.

    Returns:
        The path.

    Raises:
        ValueError: If another file exists at the path.
        OSError: If the page cannot be written. An existing page stays intact.
    """
    depth = Axis("depth", [f"{depth:.0%}" for depth in sorted(grid.config.depths)])
    length = Axis("tokens", [f"{length:,}" for length in grid.lengths])
    gain = grid.gain()
    accuracy_map = heat_map(
        grid.accuracy(), rows=depth, columns=length, format=lambda x: percent(x, 0), high=1.0
    )
    gain_map = heat_map(
        gain,
        rows=depth,
        columns=length,
        format="{:.2f}".format,
        diverging=True,
        high=float(np.nanmax(np.abs(gain), initial=FULL_COLOR)),
    )
    columns = 1 if len(grid.lengths) <= NARROW else 3
    figures = [
        Figure("Found", accuracy_map, FOUND, columns),
        Figure("Gain in log-probability", gain_map, GAIN, columns),
    ]
    page = Page(
        kind="needle in a haystack",
        title=grid.name,
        lead=LEAD,
        cards=_cards(grid),
        facts=[
            ("Needle", grid.config.needle),
            ("Question", grid.config.question),
            ("Numbers", f"of {plural(grid.config.digits, 'digit')}"),
            ("Haystack", grid.haystack),
            ("Version", f"onescan {grid.onescan}"),
        ],
        sections=[Section("Needles by length and depth", figures)],
    )
    return page.write(path)


def _cards(grid: "NeedleGrid") -> list[Card]:
    accuracy, gain, longest = grid.accuracy(), grid.gain(), grid.lengths[-1]
    return [
        Card(percent(float(accuracy.mean())), "found", f"of {len(grid.outcomes):,} needles"),
        Card(f"{gain.mean():+.2f}", "nats gained", "mean gain in log-probability"),
        Card(
            percent(float(accuracy[:, -1].mean())),
            "found",
            f"in the longest text, {longest:,} tokens",
        ),
        Card(f"{gain[:, -1].mean():+.2f}", "nats gained", f"in {longest:,} tokens"),
    ]
