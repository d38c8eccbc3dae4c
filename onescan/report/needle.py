"""Which needles a model found in a haystack: a table in text, and a page with two heat maps."""

from collections.abc import Callable
from pathlib import Path

from onescan.evaluation.needle import Cells, NeedleGrid
from onescan.report.cards import big_numbers, fact_list
from onescan.report.heat_map import SHARES, Axis, Shades, around_zero, heat_map
from onescan.report.section import Figure, Section
from onescan.report.template import fill, save
from onescan.report.words import percent, plural

LEAD = (
    "A fact is hidden in a long text, and a question at the end asks for it. What a model recalls "
    "depends on how long the text is, and on how deep in it the fact lies."
)


def write_needles(grid: NeedleGrid, path: Path) -> Path:
    """Write a page that needs no other file: which needles were found, by length and depth.

    Args:
        grid: as `measure_needles` returned it.
        path: where to write; a page of onescan's that is there is replaced.

    Returns:
        The path.

    Raises:
        ValueError: at the path is something else.
        OSError: the page cannot be written; one that was there is intact.
    """
    page = fill(
        kind="needle in a haystack",
        title=grid.name,
        lead=LEAD,
        summary=f"{_cards(grid)}\n{_facts(grid)}",
        sections=(_pictures(grid),),
    )
    return save(page, path)


def needle_table(grid: NeedleGrid) -> str:
    """Spell the grid in text: the share that was found and the gain, a line for each depth."""
    lines = ["depth" + "".join(f"{length:>18,}" for length in grid.lengths)]
    for depth, shares, gains in zip(
        sorted(grid.asked.depths), grid.accuracy(), grid.gain(), strict=True
    ):
        cells = (
            f"{percent(share, 0)}, {gain:+.2f}" for share, gain in zip(shares, gains, strict=True)
        )
        lines.append(f"{depth:>5.0%}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def _pictures(grid: NeedleGrid) -> Section:
    accuracy, gain = grid.accuracy(), grid.gain()
    found = Figure(
        "Found",
        _drawn(grid, accuracy, "share of needles found", SHARES, lambda share: percent(share, 0)),
        "The share of needles whose number the model writes out, taking the likeliest token each "
        "time. At depth 0% the needle is before the haystack, at 100% right before the question.",
    )
    gained = Figure(
        "Gain in log-probability",
        _drawn(grid, gain, "gain in log-probability", around_zero(gain), "{:.2f}".format),
        "How much likelier the number is after the question than where the needle is taken out, in "
        "nats: 0 where nothing is recalled. It shows recall in models that find no number whole; a "
        "part of it may be that any number was read.",
    )
    return Section("Needles by length and depth", (found, gained))


def _drawn(
    grid: NeedleGrid, cells: Cells, what: str, shades: Shades, spell: Callable[[float], str]
) -> str:
    return heat_map(
        cells,
        down=Axis("depth of the needle", [f"{depth:.0%}" for depth in sorted(grid.asked.depths)]),
        along=Axis("tokens of the text", [f"{length:,}" for length in grid.lengths]),
        shades=shades,
        spell=spell,
        alt=f"Heat map of the {what} by depth and length, {spell(float(cells.mean()))} on average",
    )


def _cards(grid: NeedleGrid) -> str:
    accuracy, gain, longest = grid.accuracy(), grid.gain(), grid.lengths[-1]
    cards = [
        (percent(float(accuracy.mean())), "found", f"of {plural(len(grid.outcomes), 'needle')}"),
        (f"{gain.mean():+.2f}", "nats gained", "in a number's log-probability, on average"),
        (percent(float(accuracy[:, -1].mean())), "found", f"in {longest:,} tokens, the longest"),
        (f"{gain[:, -1].mean():+.2f}", "nats gained", f"in {longest:,} tokens"),
    ]
    return big_numbers(cards)


def _facts(grid: NeedleGrid) -> str:
    asked = grid.asked
    facts = [
        ("Needle", asked.needle),
        ("Question", asked.question),
        ("Numbers", f"of {plural(asked.digits, 'digit')}"),
        ("Haystack", grid.haystack),
        ("Version", f"onescan {grid.onescan}"),
    ]
    return fact_list(facts)
