"""The interface between tasks and the training loop."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor, nn

from onescan.configs import ModelConfig
from onescan.experiments.data import DataSet, DataState, Example, batched
from onescan.experiments.data.share import WHOLE, Share
from onescan.inputs import Format
from onescan.inputs.targets import CLASSES, Target
from onescan.messages import named_type, plural

Batch = tuple[Tensor, ...]
Metrics = dict[str, Float[Tensor, ""]]
Rows = dict[str, Tensor]


class BatchPlan(NamedTuple):
    """A batch before it is read.

    Attributes:
        examples: The examples it consists of.
        data_state: Where the next batch begins.
    """

    examples: list[Example]
    data_state: DataState | None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Results of a model on the test examples."""

    metrics: dict[str, float]
    """Numbers, by name."""
    arrays: dict[str, Tensor]
    """Tensors with one row per example, by name, for the report."""
    left_out: int = 0
    """Number of examples that could not be read and have no rows."""


def fitting_batch_size(examples: int, limit: int = 64) -> int:
    """Return a batch size, at most `limit`, that gives at least six steps per epoch if possible.

    >>> fitting_batch_size(216), fitting_batch_size(10_000), fitting_batch_size(3)
    (32, 64, 1)
    """
    return min(limit, 2 ** int(math.log2(max(1, examples / 6))))


class Task(ABC):
    """One problem on one data set."""

    train: DataSet
    """The training examples."""
    test: DataSet
    """The test examples."""
    format: Format
    """Converts raw input to the model's input; saved with the model."""
    class_names: tuple[str, ...] = ()
    """Names of the classes, labels or values that the model scores, if any."""
    target: Target = CLASSES
    """What the model's outputs mean; saved with the model."""
    notes: tuple[str, ...] = ()
    """What was left out, converted or inferred when the data was opened; see `Splits`."""
    unit: str = "examples"
    """What a batch contains, for messages."""
    test_batch_size: int = 256
    """Examples per evaluation batch; affects memory, not results."""
    repeats: int = 1
    """Number of consecutive copies of each example, each with its own augmentation."""
    share: Share = WHOLE
    """The shard of every sequence that this process computes; set by `shard`."""

    def shard(self, share: Share) -> None:
        """Apply the model to a shard of every sequence from now on, inside `sequence_parallel`.

        The loss and metrics of `loss`, averaged over the ranks, are then those of whole sequences,
        and `count_labels` and `predict` return the same on every rank. Tasks that support sharding
        override this method.

        Raises:
            ValueError: If there are several shards, but the task does not support sharding.
        """
        if share.size > 1:
            raise ValueError(
                f"machine.sequence_parallel is {share.size}, but {named_type(self)} does not "
                "support it, expected 1"
            )
        self.share = share

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Float[Tensor, ""], Metrics]:
        """Return the training loss, and metrics to log. The model is in training mode.

        The loss and metrics are means over the labels that `count_labels` counts, and 0 if there
        are none.
        """

    def count_labels(self, batch: Batch) -> int:
        """Return the number of labels that `loss` averages over, by default one per example.

        The loss of an optimizer step is the mean over all its labels: if a batch is split, over
        processes or gradient accumulation steps, each part is weighted by its number of labels.
        The number is needed before the forward pass, so count on the CPU.
        """
        return len(batch[0])

    @abstractmethod
    def predict(self, model: nn.Module, batch: Batch) -> Rows:
        """Apply the model, in evaluation mode, to test examples; return one row per example."""

    @abstractmethod
    def evaluate(self, rows: Rows) -> Evaluation:
        """Compute metrics from the predictions for all test examples, in their order."""

    @abstractmethod
    def score(self, metrics: dict[str, float]) -> float:
        """Return the number by which evaluations are compared: higher is better."""

    def picture(self, model: nn.Module) -> Image | None:
        """Return a picture of the model's outputs, or None if the task has none.

        The model is in evaluation mode. All processes return the same picture.
        """
        del model
        return None

    def check_model(self, model: ModelConfig) -> None:
        """Raise ValueError if the model cannot read the examples."""
        del model

    def prepare_training(self, device: torch.device) -> None:
        """Load what only training needs, before the folder of the run is created."""
        del device

    def to_device(self, batch: Batch, device: torch.device) -> Batch:
        """Move a batch to the device; tasks may keep parts on the CPU that they read there."""
        return tuple(part.to(device, non_blocking=True) for part in batch)

    def augment(self, batch: Batch, seed: int) -> Batch:
        """Change a training batch at random on its device; equal seeds give equal results.

        Each process has its own seed, so the results depend on the number of processes.
        """
        del seed
        return batch

    def corrupt(self, batch: Batch, seed: int, rows: Share = WHOLE) -> Batch:
        """Draw masks or noise for an augmented training batch; equal seeds give equal results.

        All processes have the same seed. They draw for all rows of the batch and use their own, so
        the results do not depend on the number of processes.

        Args:
            batch: The rows of this process.
            seed: Random seed, also of torch's global generators at the time of the call.
            rows: Which part of the whole batch these rows are.
        """
        del seed, rows
        return batch

    def steps_per_epoch(self, batch_size: int) -> int:
        """Return the number of full batches in an epoch. Epochs drop different remaining examples.

        Raises:
            ValueError: If there are fewer examples than one batch contains.
        """
        count = len(self.train)
        if batch_size > count:
            are, examples = "is" if count == 1 else "are", self.unit.removesuffix("s")
            raise ValueError(
                f"training.batch_size is {batch_size}, but there {are} "
                f"{plural(count, f'training {examples}')}: "
                f"pass a smaller one, such as --training.batch-size {fitting_batch_size(count)}"
            )
        return count // batch_size

    def batches(
        self, *, step: int, batch_size: int, seed: int, data_state: DataState | None = None
    ) -> Iterator[BatchPlan]:
        """Yield the plans of all batches from `step` on, without end.

        Args:
            step: Number of batches before the first one.
            batch_size: Examples per batch.
            seed: Random seed.
            data_state: The data state that came with the batch before `step`.

        Raises:
            ValueError: If there are fewer examples than one batch contains, or than the data set's
                length.
        """
        per_epoch = self.steps_per_epoch(batch_size)
        epoch, index = divmod(step, per_epoch)
        while True:
            examples = self.train.examples(
                seed=seed,
                epoch=epoch,
                start=index * batch_size,
                repeats=self.repeats,
                data_state=data_state if index else None,
            )
            for _ in range(index, per_epoch):
                group = list(islice(examples, batch_size))
                if len(group) < batch_size:
                    raise ValueError(
                        f"epoch {epoch} ended early, expected {len(self.train)} {self.unit}"
                    )
                yield BatchPlan([example for example, _ in group], group[-1][1])
            epoch, index = epoch + 1, 0

    def test_batches(self) -> Iterator[BatchPlan]:
        """Yield the plans of the batches of one evaluation, in the stored order."""
        for group in batched(self.test.examples(seed=None), self.test_batch_size):
            yield BatchPlan([example for example, _ in group], group[-1][1])


class TaskConfig(ABC):
    """Config of a task. Subclasses are frozen dataclasses."""

    @abstractmethod
    def build(self, data: Any) -> Task:
        """Build the task for the output of `DataConfig.build`."""

    def check_model(self, model: ModelConfig) -> None:
        """Raise ValueError if a setting of the task does not fit the model."""
        del model
