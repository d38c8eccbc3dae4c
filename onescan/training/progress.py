"""What can be seen of a run while it lasts."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tqdm import tqdm

from onescan.tasks import Batch, Task
from onescan.training.ranks import Ranks


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
    waiting: float = 0.0
    """Share of the time so far that was spent waiting for data."""


Show = Callable[[Progress], object]


def judging(batches: Iterable[Batch], task: Task, ranks: Ranks) -> Iterator[Batch]:
    """Yield the batches of an evaluation, and draw a bar on stderr that goes when it is done."""
    size, in_all = task.test_batch_size * ranks.size, len(task.test)
    # disabled where stderr is no screen: a log would keep every line of it
    with tqdm(total=in_all, unit=f" {task.unit}", desc="judging", leave=False, disable=None) as bar:
        for batch in batches:
            yield batch
            bar.update(min(size, in_all - bar.n))


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
            bar.set_postfix(now.metrics | {"waiting": f"{now.waiting:.1%}"}, refresh=False)
            bar.update(now.step * size - bar.n)

        yield show
