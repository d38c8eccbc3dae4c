"""What every data set's config is, and what a trained model needs to know of its data."""

from abc import ABC, abstractmethod
from typing import Any


class DataConfig(ABC):
    """Where a run's data comes from. Subclasses are frozen dataclasses."""

    @abstractmethod
    def build(self) -> Any:
        """Open the data: training and held-out examples, in the form the task reads."""


class Format:
    """How raw input becomes a model's input; saved with the model. Subclasses are configs."""
