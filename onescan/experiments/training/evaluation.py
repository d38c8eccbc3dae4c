"""Evaluation of a model on held-out examples, in one process or several."""

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager

import torch
from PIL.Image import Image
from torch import nn

from onescan.experiments.data import batched
from onescan.experiments.tasks import Batch, BatchPlan, Evaluation, Rows, Task
from onescan.experiments.training.config import Precision
from onescan.experiments.training.data import Loader
from onescan.experiments.training.distributed import Ranks
from onescan.experiments.training.optim import autocast
from onescan.progress import progress_bar


@torch.no_grad()
def evaluate(
    model: nn.Module,
    task: Task,
    *,
    precision: Precision = "float32",
    workers: int = 0,
    ranks: Ranks | None = None,
    progress: bool = False,
) -> Evaluation:
    """Evaluate a model on the task's held-out examples. The model's mode does not change.

    Args:
        model: Model, on the device to evaluate it on.
        task: Task with the held-out examples and the metrics.
        precision: Precision of matrix products.
        workers: Data loading processes.
        ranks: Processes that share the batches. All return the same evaluation, which is that of
            a single process.
        progress: Show a progress bar on stderr.

    Raises:
        ValueError: If there are no held-out examples, if none can be read, or if one cannot be read
            and unreadable examples are not skipped.
    """
    ranks = ranks or Ranks()
    sizes: list[int] = []  # examples of each batch, of all processes

    def rank_batches() -> Iterator[BatchPlan]:
        for group in batched(task.test_batches(), ranks.data_size):
            sizes.extend(len(batch.examples) for batch in group)
            # in the last round, processes without a batch of their own repeat one
            yield group[min(ranks.data_rank, len(group) - 1)]

    device = next(model.parameters()).device
    loader = Loader(task.test, rank_batches(), workers=workers, pin=device.type == "cuda")
    with closing(loader), eval_mode(model):
        batches = _with_progress(loader, task, ranks) if progress else loader
        parts = [_predict(model, task, batch, precision, device) for batch in batches]
    all_parts = ranks.gather(parts)[:: ranks.sequence]  # equal on the ranks of a sequence
    ordered = [all_parts[i % ranks.data_size][i // ranks.data_size] for i in range(len(sizes))]
    if not ordered:
        raise ValueError("there are no held-out examples to evaluate the model on")
    rows = {name: torch.cat([part[name] for part in ordered]) for name in ordered[0]}
    readable = len(next(iter(rows.values())))
    if not readable:
        raise ValueError(f"none of the {sum(sizes):,} held-out {task.unit} can be read")
    evaluation = ranks.first(lambda: task.evaluate(rows))  # bit-identical in all processes
    return dataclasses.replace(evaluation, left_out=sum(sizes) - readable)


@torch.no_grad()
def make_picture(model: nn.Module, task: Task, *, precision: Precision = "float32") -> Image | None:
    """Return the task's picture of the model's outputs, or ``None`` if it has none."""
    device = next(model.parameters()).device
    with eval_mode(model), autocast(precision, device):
        return task.picture(model)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside the context."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _predict(
    model: nn.Module, task: Task, batch: Batch, precision: Precision, device: torch.device
) -> Rows:
    count = len(batch[0])
    if not count:  # no example could be read; apply the model anyway, as other processes may wait
        batch = tuple(x.new_full((1, *x.shape[1:]), x.dtype == torch.bool) for x in batch)
    with autocast(precision, device):
        rows = task.predict(model, task.to_device(batch, device))
    return {name: row[:count].cpu() for name, row in rows.items()}


def _with_progress(batches: Iterable[Batch], task: Task, ranks: Ranks) -> Iterator[Batch]:
    size, total = task.test_batch_size * ranks.data_size, len(task.test)
    with progress_bar(total, unit=f" {task.unit}", desc="evaluating", leave=False) as bar:
        for batch in batches:
            yield batch
            bar.update(min(size, total - bar.n))
