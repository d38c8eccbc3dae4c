"""What a run is: the config a recipe returns, and what comes out of it."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from onescan.checks import check_positive
from onescan.configs import ModelConfig
from onescan.data import DataConfig
from onescan.tasks import Evaluation, TaskConfig


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a model is trained, whatever it is and whatever it learns."""

    epochs: int = 60
    """Passes over the training data."""
    steps: int | None = None
    """Updates of the weights; where given, it stands in for epochs."""
    batch_size: int = 64
    """Examples per update."""
    learning_rate: float = 1e-3
    """Learning rate after the warm-up."""
    weight_decay: float = 0.05
    """Decay of matrices; norms, biases and the like have none."""
    betas: tuple[float, float] = (0.9, 0.999)
    """How much AdamW's two running means keep at every step."""
    eps: float = 1e-8
    """AdamW's guard against division by zero"""
    warmup: float = 0.05
    """Rise of the learning rate: below 1 a part of all steps, from 1 on a number of steps."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""
    final_fraction: float = 0.01
    """Learning rate at the end, as a part of the highest."""
    clip_norm: float | None = 1.0
    """Longest gradient; a longer one is shortened to it."""
    seed: int = 0
    """What all chance comes from: first weights, order, augmentation, dropped paths."""
    device: str = "auto"
    """Where to train: cpu, cuda, cuda:1, ...; auto is a GPU where there is one."""
    evaluate_every: float = 1.0
    """Epochs between evaluations; the end of the run is always evaluated."""
    checkpoint_every: float = 1.0
    """Epochs between checkpoints: what a killed run loses at most; the end is always saved."""

    def __post_init__(self) -> None:
        """Raise ValueError for a number that no run can have."""
        sizes = ["epochs", "steps", "batch_size", "evaluate_every", "checkpoint_every"]
        for name in [*sizes, "learning_rate", "eps", "clip_norm"]:
            if getattr(self, name) is not None:
                check_positive(**{f"training.{name}": getattr(self, name)})
        for name in ("weight_decay", "warmup", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"training.{name} is {getattr(self, name)}, expected 0 or more")
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(f"training.final_fraction is {self.final_fraction}, expected 0 to 1")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"training.betas is {self.betas}, expected two from 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A complete run: equal configs on equal machines give equal numbers."""

    name: str
    """What the run is called."""
    model: ModelConfig
    data: DataConfig
    task: TaskConfig
    training: TrainingConfig = field(default_factory=TrainingConfig)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a finished run left in its folder."""

    folder: Path
    evaluation: Evaluation
    """The last one."""
    steps: int
    """Updates of the weights."""
    reused: bool = False
    """Whether the run had been finished before, so that nothing was trained now."""

    @property
    def metrics(self) -> dict[str, float]:
        """The last evaluation's numbers."""
        return self.evaluation.metrics
