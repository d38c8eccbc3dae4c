"""A model judged on held-out examples, by one process or by many."""

import dataclasses
from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch
from PIL.Image import Image
from torch import nn

from onescan.data import batched
from onescan.tasks import Batch, BatchPlan, Evaluation, Rows, Task
from onescan.training.loader import Loader
from onescan.training.precision import computing
from onescan.training.progress import judging
from onescan.training.ranks import Ranks
from onescan.training.run import Precision


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
    """Judge the model on the task's held-out examples; it is left in the mode it was in.

    Args:
        model: on the device that is to judge it.
        task: whose held-out examples and measure.
        precision: of the matrix products.
        workers: processes that read.
        ranks: the processes among which the batches are dealt out; all return the evaluation, which
            is that of one process.
        progress: draw a bar on stderr.

    Raises:
        ValueError: there are no held-out examples, or one cannot be read.
    """
    ranks = ranks or Ranks()
    planned: list[int] = []  # examples of each batch

    def mine() -> Iterator[BatchPlan]:
        for group in batched(task.test_batches(), ranks.size):
            planned.extend(len(batch.examples) for batch in group)
            # who has no batch of its own in the last round repeats one
            yield group[min(ranks.rank, len(group) - 1)]

    device = next(model.parameters()).device
    loader = Loader(task.test, mine(), workers=workers, pin=device.type == "cuda")
    with closing(loader), evaluating(model):
        batches = judging(loader, task, ranks) if progress else loader
        parts = [_predict(model, task, batch, precision, device) for batch in batches]
    everyone = ranks.gather(parts)
    ordered = [everyone[i % ranks.size][i // ranks.size] for i in range(len(planned))]
    if not ordered:
        raise ValueError("there are no held-out examples to judge the model on")
    rows = {name: torch.cat([part[name] for part in ordered]) for name in ordered[0]}
    left_out = sum(planned) - len(next(iter(rows.values())))
    evaluation = ranks.first(lambda: task.judge(rows))  # one answer, to the last bit
    return dataclasses.replace(evaluation, left_out=left_out)


@torch.no_grad()
def draw(model: nn.Module, task: Task, *, precision: Precision = "float32") -> Image | None:
    """The task's picture of what the model does, if it makes one."""
    device = next(model.parameters()).device
    with evaluating(model), computing(precision, device):
        return task.picture(model)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode for a while."""
    was = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in was.items():
            module.training = training


def _predict(
    model: nn.Module, task: Task, batch: Batch, precision: Precision, device: torch.device
) -> Rows:
    on_device = tuple(part.to(device, non_blocking=True) for part in batch)
    with computing(precision, device):
        rows = task.predict(model, on_device)
    return {name: row.cpu() for name, row in rows.items()}
