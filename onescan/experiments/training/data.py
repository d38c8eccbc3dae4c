"""Batches for training and evaluation, read ahead by worker processes."""

import logging
import os
import signal
from collections import deque
from collections.abc import Iterator
from time import perf_counter

from torch.utils.data import DataLoader, Dataset

from onescan.experiments.data import DataSet, DataState, Example, LoadedBatch
from onescan.experiments.tasks import Batch, BatchPlan
from onescan.experiments.training.config import MachineConfig, TrainingConfig
from onescan.experiments.training.distributed import Ranks

MAX_DEFAULT_WORKERS = 8
MAX_WARNINGS = 10  # about unreadable examples

log = logging.getLogger("onescan")


class Loader:
    """An iterator over batches, read in the order of a plan."""

    data_state: DataState | None = None
    """Position of the batch after the last one."""
    waiting_s = 0.0
    """Seconds spent waiting for the last batch."""
    unreadable = 0
    """Unreadable examples of the last batch."""

    def __init__(
        self, data: DataSet, plan: Iterator[BatchPlan], *, workers: int, pin: bool = False
    ) -> None:
        self._warned: set[str] = set()
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
        self._batches: Iterator[LoadedBatch | Exception] = iter(loader)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Read the next batch.

        Raises:
            ValueError: If an example cannot be read and unreadable examples are not skipped.
            OSError: If a worker process was killed.
        """
        begin = perf_counter()
        try:
            loaded = next(self._batches)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise OSError(
                "a data loading process was killed, perhaps because memory ran out: try fewer "
                "machine.workers"
            ) from error
        if isinstance(loaded, Exception):
            raise loaded
        self.data_state = self._data_states.popleft()
        self.waiting_s = perf_counter() - begin
        self.unreadable = len(loaded.failures)
        for failure in loaded.failures:
            self._warn(failure)
        return loaded.batch

    def close(self) -> None:
        """End the worker processes."""
        self._batches = iter(())  # they live as long as torch's iterator

    def _warn(self, failure: str) -> None:
        if failure in self._warned or len(self._warned) == MAX_WARNINGS:
            return
        self._warned.add(failure)
        log.warning("%s", failure)
        if len(self._warned) == MAX_WARNINGS:
            log.warning("further unreadable examples are counted without a warning")


def choose_workers(workers: int | None, data: DataSet) -> int:
    """Return the number of worker processes; None is one per core, or 0 for data in memory."""
    if workers is not None:
        return workers
    if not data.decodes:
        return 0
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    linux = hasattr(os, "sched_getaffinity")  # counts the cores that this process may use
    cores = len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1
    return max(1, min(MAX_DEFAULT_WORKERS, cores // processes))


def share_of_batch(settings: TrainingConfig, machine: MachineConfig, ranks: Ranks) -> slice:
    """Return the range of examples in every micro-batch that this process, or its group, reads.

    Raises:
        ValueError: If a micro-batch cannot be split into equal parts.
    """
    parts, size = ranks.data_size * machine.gradient_accumulation_steps, settings.micro_batch_size
    if size % parts:
        name = "batch_size" if settings.initial_batch_size is None else "initial_batch_size"
        groups = f"groups of {ranks.sequence} processes" if ranks.sequence > 1 else "processes"
        raise ValueError(
            f"training.{name} is {size}, expected a multiple of {parts}: "
            f"{ranks.data_size} {groups} times machine.gradient_accumulation_steps "
            f"{machine.gradient_accumulation_steps}"
        )
    share = size // ranks.data_size
    return slice(ranks.data_rank * share, (ranks.data_rank + 1) * share)


class _Reader(Dataset[LoadedBatch | Exception]):
    """Reads in the worker. Returns errors, because torch would add a traceback to raised ones."""

    def __init__(self, data: DataSet) -> None:
        self.data = data

    def __getitem__(self, examples: list[Example]) -> LoadedBatch | Exception:
        try:
            return self.data.read(examples)
        except (ValueError, OSError) as error:
            return error


class _Order:
    """A sampler that follows the plan, and keeps the data state of each batch read ahead."""

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
    """Let the training process decide when to stop; launchers signal its workers too."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
