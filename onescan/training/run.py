"""What a run is: the config a recipe returns, and what comes out of it."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from onescan.checks import check_choice, check_positive
from onescan.configs import ModelConfig
from onescan.data import DataConfig
from onescan.tasks import Evaluation, TaskConfig

Precision = Literal["float32", "bfloat16", "float16"]
Schedule = Literal["cosine", "linear", "constant", "inverse_sqrt"]
MOST_WORKERS = 1024
TrackerName = Literal["tensorboard", "trackio", "wandb"]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a model is trained, whatever it is and whatever it learns."""

    epochs: int = 60
    """Passes over the training data."""
    steps: int | None = None
    """Updates of the weights; where given, it stands in for epochs."""
    batch_size: int = 64
    """Examples per update, over all processes."""
    precision: Precision = "float32"
    """Of the matrix products; weights, sums and the loss stay in float32."""
    learning_rate: float = 1e-3
    """Learning rate after the warm-up."""
    weight_decay: float = 0.05
    """Decay of matrices; norms, biases and the like have none."""
    decoupled_weight_decay: bool = False
    """Decay by weight_decay at the highest learning rate, whatever that is, and by less as it is
    lower, as MosaicML's DecoupledAdamW; else by the learning rate times weight_decay, as torch's.
    """
    betas: tuple[float, float] = (0.9, 0.999)
    """How much AdamW's two running means keep at every step."""
    eps: float = 1e-8
    """AdamW's guard against division by zero"""
    warmup: float = 0.05
    """Rise of the learning rate: below 1 a part of all steps, from 1 on a number of steps."""
    schedule: Schedule = "cosine"
    """How the learning rate falls after the warm-up; inverse_sqrt as one over the root of steps."""
    final_lr_ratio: float = 0.01
    """Learning rate at the end, as a part of the highest; inverse_sqrt has its own."""
    max_grad_norm: float | None = 1.0
    """Longest gradient; a longer one is shortened to it."""
    ema_decay: float | None = None
    """What a running mean of the weights keeps at every step; the mean is judged and saved."""
    seed: int = 0
    """What all chance comes from: first weights, order, augmentation, dropped paths."""
    evaluate_every: float = 1.0
    """Epochs between evaluations; the end of the run is always evaluated."""
    checkpoint_every: float = 1.0
    """Epochs between checkpoints: what a killed run loses at most; the end is always saved."""
    patience: int | None = None
    """Evaluations without a new best after which the run ends early; None trains to the end."""

    def __post_init__(self) -> None:
        """Raise ValueError for a number that no run can have."""
        sizes = ["epochs", "steps", "batch_size", "evaluate_every", "checkpoint_every", "patience"]
        for name in [*sizes, "learning_rate", "eps", "max_grad_norm"]:
            if getattr(self, name) is not None:
                check_positive(**{f"training.{name}": getattr(self, name)})
        for name in ("weight_decay", "warmup", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"training.{name} is {getattr(self, name)}, expected 0 or more")
        if not 0 <= self.final_lr_ratio <= 1:
            raise ValueError(f"training.final_lr_ratio is {self.final_lr_ratio}, expected 0 to 1")
        check_choice("training.precision", self.precision, get_args(Precision))
        check_choice("training.schedule", self.schedule, get_args(Schedule))
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"training.betas is {self.betas}, expected two from 0 to below 1")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"training.ema_decay is {self.ema_decay}, expected between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """On what a run is carried out: it may change when a run goes on, and its numbers stay.

    To the last bit on one CPU, whatever the readers and `recompute`; to rounding for the rest, and
    apart from dropped paths and augmentation, of which each process and each part that a batch is
    cut into draws its own.
    """

    device: str = "auto"
    """Where to train: cpu, cuda, cuda:1, ...; auto is a GPU where there is one."""
    workers: int | None = None
    """Processes that read data, for each that trains; None is as many as the data is worth."""
    gradient_accumulation_steps: int = 1
    """Parts that a batch is cut into, one after the other, for less memory."""
    gradient_checkpointing: bool = False
    """Forget what is inside each block and compute it again for the gradient, for less memory."""
    compile: bool = False
    """Compile each block with torch.compile."""
    fsdp: bool = False
    """Over several processes, split weights and moments between them (FSDP2); else copy (DDP)."""
    trackers: tuple[TrackerName, ...] | None = None
    """Who else gets the metrics; None is tensorboard where it is installed."""

    def __post_init__(self) -> None:
        """Raise ValueError for a number that no machine can have."""
        check_positive(**{"machine.gradient_accumulation_steps": self.gradient_accumulation_steps})
        for name in self.trackers or ():
            check_choice("machine.trackers", name, get_args(TrackerName))
        if self.workers is not None and not 0 <= self.workers <= MOST_WORKERS:
            raise ValueError(f"machine.workers is {self.workers}, expected 0 to {MOST_WORKERS}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A complete run: equal configs on equal machines give equal numbers."""

    name: str
    """What the run is called."""
    model: ModelConfig
    data: DataConfig
    task: TaskConfig
    init_from: str | None = None
    """Weights to begin with, where the model has the same parts: a run's folder, or
    best.safetensors in it, or what transformers saved; None draws fresh ones."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)

    def __post_init__(self) -> None:
        """Raise ValueError for a name that is no path below runs/, as digits/without_tpe is."""
        path = Path(self.name) if isinstance(self.name, str) else Path()
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise ValueError(f"the run's name is {self.name!r}, expected a folder's, inside runs")


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
