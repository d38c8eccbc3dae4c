"""The contract between a problem and the training loop, which knows nothing else of it."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor, nn

from onescan.data import DataSet, DataState, Example, Format, batched

Batch = tuple[Tensor, ...]
Metrics = dict[str, Float[Tensor, ""]]
Rows = dict[str, Tensor]


class BatchPlan(NamedTuple):
    """A batch before it is read.

    Attributes:
        examples: what it is made of.
        data_state: where the next batch begins.
    """

    examples: list[Example]
    data_state: DataState | None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a model did on held-out examples."""

    metrics: dict[str, float]
    """Single numbers, by name."""
    arrays: dict[str, Tensor]
    """One row an example, by name: what a report draws."""
    left_out: int = 0
    """Examples that could not be read, of which there are no rows."""


class Task(ABC):
    """One problem on one data set."""

    train: DataSet
    """The examples to learn from."""
    test: DataSet
    """The examples to be judged on."""
    format: Format
    """How raw input becomes the model's input; saved with the model."""
    class_names: tuple[str, ...] = ()
    """What the model's scores stand for, if they stand for classes."""
    unit: str = "examples"
    """What a batch is counted in."""
    test_batch_size: int = 256
    """Examples at once when evaluating; changes the memory, not the result."""
    repeats: int = 1
    """How often in a row each example is shown, with chance of its own each time."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Float[Tensor, ""], Metrics]:
        """Return what training lowers, and numbers to show. The model is in training mode."""

    @abstractmethod
    def predict(self, model: nn.Module, batch: Batch) -> Rows:
        """Apply the model, in evaluation mode, to held-out examples: one row each, by name."""

    @abstractmethod
    def judge(self, rows: Rows) -> Evaluation:
        """Judge what the model predicted of all held-out examples, in their order."""

    @abstractmethod
    def score(self, metrics: dict[str, float]) -> float:
        """Say how good an evaluation is: of two, the higher is better."""

    def picture(self, model: nn.Module) -> Image | None:
        """Draw what the model does, in evaluation mode, if there is anything to see: no chance.

        Of several processes each makes the same one.
        """
        del model
        return None

    def augment(self, batch: Batch, seed: int) -> Batch:
        """Change a training batch at random, on the device that trains; gives the same again."""
        del seed
        return batch

    def steps_per_epoch(self, batch_size: int) -> int:
        """Count the whole batches in one pass; what is left over is in another pass' batches.

        Raises:
            ValueError: there are fewer examples than one batch needs.
        """
        count = len(self.train)
        if batch_size > count:
            raise ValueError(
                f"training.batch_size is {batch_size}, but there are {count} {self.unit}"
            )
        return count // batch_size

    def batches(
        self, *, step: int, batch_size: int, seed: int, data_state: DataState | None = None
    ) -> Iterator[BatchPlan]:
        """Plan batch after batch from `step` on, without end.

        Args:
            step: batches before the first one yielded.
            batch_size: examples in each.
            seed: what all chance comes from.
            data_state: what came with the batch before `step`.

        Raises:
            ValueError: there are fewer examples than one batch needs, or than the data promised.
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
        """Plan the batches of one evaluation, in the stored order."""
        for group in batched(self.test.examples(seed=None), self.test_batch_size):
            yield BatchPlan([example for example, _ in group], group[-1][1])


class TaskConfig(ABC):
    """How a problem is posed. Subclasses are frozen dataclasses."""

    @abstractmethod
    def build(self, data: Any) -> Task:
        """Pose the problem on what a `DataConfig` built."""
