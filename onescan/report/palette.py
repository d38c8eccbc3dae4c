"""One palette for the whole page; its colours differ for colour-blind readers too.

Source: Okabe and Ito, Color Universal Design.
"""

from matplotlib.colors import LinearSegmentedColormap

INK, MUTED, GRID = "#1b1f24", "#646c75", "#e4e7eb"
BLUE, VERMILION = "#0072b2", "#d55e00"
SERIES = (BLUE, VERMILION, "#009e73", "#cc79a7", "#e69f00", "#56b4e9")

DIVERGING = LinearSegmentedColormap.from_list(
    "blue to vermilion", ["#00395a", BLUE, "#9ccbe8", "#ffffff", "#f7bd93", VERMILION, "#6d3000"]
)
DEPTH = LinearSegmentedColormap.from_list("first to last", ["#9ccbe8", BLUE, "#00263d"])


def series(index: int) -> str:
    """The colour of one of several things that are alike."""
    return SERIES[index % len(SERIES)]


def tint(color: str, strength: float) -> str:
    """Mix a colour with white: 0 is white, 1 the colour.

    >>> tint("#0072b2", 0.5)
    '#80b9d9'
    """
    channels = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{255 - int(strength * (255 - c)):02x}" for c in channels)
