"""What can be seen of a run while it lasts."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tqdm import tqdm


class Progress(NamedTuple):
    """Where a run stands."""

    step: int
    """Updates made."""
    steps: int
    """Updates in the whole run."""
    batch_size: int
    """Examples per update."""
    unit: str
    """What the examples are, in the plural."""
    metrics: dict[str, float]
    """Of the last batch; of the last evaluation as "test_..."."""


Show = Callable[[Progress], object]


@contextmanager
def shown(progress: bool | Show, start: Progress) -> Iterator[Show]:
    """Yield what is called after every update: the caller's own, a bar on stderr, or nothing."""
    if progress is not True:
        yield progress or (lambda _: None)
        return
    size = start.batch_size
    interval_s = 0.5 if sys.stderr.isatty() else 30  # a log keeps every line, a screen the last
    with tqdm(
        total=start.steps * size,
        initial=start.step * size,
        unit=f" {start.unit}",
        mininterval=interval_s,
        maxinterval=interval_s,
    ) as bar:

        def show(now: Progress) -> None:
            bar.set_postfix(now.metrics, refresh=False)
            bar.update(now.step * size - bar.n)

        yield show
