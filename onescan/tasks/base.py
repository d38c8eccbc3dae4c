"""The contract between a problem and the training loop, which knows nothing else of it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from onescan.data import Format

Batch = tuple[Tensor, ...]
Metrics = dict[str, Float[Tensor, ""]]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a model did on held-out examples."""

    metrics: dict[str, float]
    """Single numbers, by name."""
    arrays: dict[str, Tensor]
    """One row an example, by name: what a report draws."""


class Task(ABC):
    """One problem on one data set."""

    format: Format
    """How raw input becomes the model's input; saved with the model."""
    class_names: tuple[str, ...] = ()
    """What the model's scores stand for, if they stand for classes."""
    unit: str = "examples"
    """What a batch is counted in."""

    @abstractmethod
    def steps_per_epoch(self, batch_size: int) -> int:
        """Count the whole batches in one pass over the training examples."""

    @abstractmethod
    def batch(self, *, epoch: int, index: int, batch_size: int, seed: int) -> Batch:
        """Make one training batch: a pure function of its arguments, noise included.

        So a run that goes on at step N neither reads nor draws what came before it.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Float[Tensor, ""], Metrics]:
        """Return what training lowers, and numbers to show. The model is in training mode."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> Evaluation:
        """Judge the model on the held-out examples; leaves it in the mode it was in."""


class TaskConfig(ABC):
    """How a problem is posed. Subclasses are frozen dataclasses."""

    @abstractmethod
    def build(self, data: Any) -> Task:
        """Pose the problem on what a `DataConfig` built."""
