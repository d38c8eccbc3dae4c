"""Batches read ahead by other processes, and how long one waited for them."""

import logging
import os
import signal
from collections import deque
from collections.abc import Iterator
from time import perf_counter

from torch.utils.data import DataLoader, Dataset

from onescan.data import DataSet, DataState, Example, LoadedBatch
from onescan.tasks import Batch, BatchPlan

ENOUGH_WORKERS = 8
MOST_TOLD = 10  # examples that cannot be read, each once

log = logging.getLogger("onescan")


class Loader:
    """An iterator over planned batches, read."""

    data_state: DataState | None = None
    """Where the batch after the last one begins."""
    waiting_s = 0.0
    """Seconds that the last batch was waited for."""
    failures = 0
    """Examples of the last batch that could not be read."""

    def __init__(
        self, data: DataSet, plan: Iterator[BatchPlan], *, workers: int, pin: bool = False
    ) -> None:
        self._told: set[str] = set()
        self._data_states: deque[DataState | None] = deque()
        loader = DataLoader(
            _Reader(data),
            sampler=_Order(plan, self._data_states),
            batch_size=None,
            num_workers=workers,
            collate_fn=_unchanged,  # type: ignore[arg-type]  # without a batch_size, one item
            pin_memory=pin,
            worker_init_fn=_ignore_signals,
        )
        self._loaded: Iterator[LoadedBatch | Exception] = iter(loader)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Read the next batch.

        Raises:
            ValueError: an example cannot be read, and none is to be left out.
        """
        begin = perf_counter()
        loaded = self._next()
        if isinstance(loaded, Exception):
            raise loaded
        self.data_state = self._data_states.popleft()
        self.waiting_s = perf_counter() - begin
        self.failures = len(loaded.failures)
        for failure in loaded.failures:
            self._tell(failure)
        return loaded.batch

    def _next(self) -> LoadedBatch | Exception:
        try:
            return next(self._loaded)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise OSError(
                "a process that read data has been killed, perhaps for want of memory: try fewer "
                "machine.workers"
            ) from error

    def close(self) -> None:
        """End the processes that read."""
        self._loaded = iter(())  # they live as long as torch's iterator

    def _tell(self, failure: str) -> None:
        if failure in self._told or len(self._told) == MOST_TOLD:
            return
        self._told.add(failure)
        log.warning("%s", failure)
        if len(self._told) == MOST_TOLD:
            log.warning("further examples that cannot be read are only counted")


def choose_workers(asked: int | None, data: DataSet) -> int:
    """How many processes read: as asked; else none for what is in memory, or one per core."""
    if asked is not None:
        return asked
    if not data.decodes:
        return 0
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    linux = hasattr(os, "sched_getaffinity")  # which counts the cores that this process may use
    cores = len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1
    return max(1, min(ENOUGH_WORKERS, cores // here))


class _Reader(Dataset[LoadedBatch | Exception]):
    """Reads in the worker; an error travels as a value, or torch would wrap it in a traceback."""

    def __init__(self, data: DataSet) -> None:
        self.data = data

    def __getitem__(self, examples: list[Example]) -> LoadedBatch | Exception:
        try:
            return self.data.read(examples)
        except (ValueError, OSError) as error:
            return error


class _Order:
    """What the workers are to read, taken from the plan a few batches ahead."""

    def __init__(self, plan: Iterator[BatchPlan], data_states: deque[DataState | None]) -> None:
        self.plan = plan
        self.data_states = data_states

    def __iter__(self) -> Iterator[list[Example]]:
        for examples, data_state in self.plan:
            self.data_states.append(data_state)
            yield examples


def _unchanged(loaded: LoadedBatch | Exception) -> LoadedBatch | Exception:
    return loaded


def _ignore_signals(_worker: int) -> None:
    """The process that trains decides when a run ends; launchers signal its readers too."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
