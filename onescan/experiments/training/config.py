"""The config of a run and its result."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from onescan.checks import check_choice, check_positive
from onescan.configs import ModelConfig
from onescan.experiments.data import DataConfig, Splits
from onescan.experiments.tasks import Evaluation, Task, TaskConfig
from onescan.ops.backend import BACKENDS, Backend

Precision = Literal["float32", "bfloat16", "float16"]
RunPrecision = Literal["auto", "float32", "bfloat16", "float16"]
MatmulPrecision = Literal["highest", "high", "medium"]
Schedule = Literal["cosine", "linear", "constant", "inverse_sqrt"]
AUTO: Literal["auto"] = "auto"
MAX_WORKERS = 1024
TrackerName = Literal["tensorboard", "trackio", "wandb"]
ReportedWeights = Literal["ema", "raw"]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Training settings that do not depend on the model or the task."""

    epochs: int = 60
    """Passes over the training data."""
    steps: int | None = None
    """Number of optimizer steps; overrides epochs. Not with initial_batch_size."""
    batch_size: int = 64
    """Examples per optimizer step, summed over all processes."""
    initial_batch_size: int | None = None
    """Batch size of the first step, if it grows: linearly with the examples seen, in multiples of
    this, up to batch_size. Larger batches are accumulated from batches of this size. None keeps
    the batch size constant."""
    batch_size_ramp: float = 0.5
    """Fraction of the run's examples after which a growing batch size reaches batch_size."""
    precision: RunPrecision = "float32"
    """Precision of matrix products (mixed precision). Weights, reductions and the loss stay in
    float32. auto is bfloat16 if the device has instructions for it, and otherwise float32; a
    resumed run keeps the precision it began with."""
    learning_rate: float = 1e-3
    """Peak learning rate, reached after the warm-up."""
    weight_decay: float = 0.05
    """Weight decay of matrices. Norms, biases and other vectors are not decayed."""
    decoupled_weight_decay: bool = False
    """Multiply weight_decay by the schedule alone, not by the learning rate, as MosaicML's
    DecoupledAdamW does. By default the decay per step is learning rate times weight_decay, as in
    torch.optim.AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the running means of the gradient and its square."""
    eps: float = 1e-8
    """Term that AdamW adds to the denominator for numerical stability."""
    warmup: float = 0.05
    """Length of the linear warm-up: a fraction of all steps if below 1, otherwise a number of
    steps, or of batches of initial_batch_size if the batch size grows."""
    initial_lr_ratio: float = 0.0
    """Learning rate at the beginning of the warm-up, as a fraction of the peak."""
    schedule: Schedule = "cosine"
    """Learning rate schedule after the warm-up. inverse_sqrt decays with one over the square root
    of the step."""
    final_lr_ratio: float = 0.01
    """Final learning rate as a fraction of the peak. Not used by inverse_sqrt."""
    max_grad_norm: float | None = 1.0
    """Gradient norm above which gradients are clipped; None disables clipping."""
    ema_decay: float | None = None
    """Decay rate of an exponential moving average (EMA) of the weights, which is then evaluated and
    saved in their place (see reported_weights); None disables it."""
    reported_weights: ReportedWeights = "ema"
    """Weights to report if ema_decay is set. ema evaluates and saves only the EMA. raw evaluates
    both: the metrics, model.safetensors and best.safetensors are those of the raw weights, and the
    EMA has its own metrics, such as ema_accuracy, and ema.safetensors."""
    seed: int = 0
    """Random seed for initial weights, data order, augmentation and dropped paths."""
    evaluate_every: float = 1.0
    """Epochs between evaluations. The end of the run is always evaluated."""
    checkpoint_every: float = 1.0
    """Epochs between checkpoints, which limits how much a killed run loses. The end of the run is
    always saved."""
    patience: int | None = None
    """Early stopping: evaluations without improvement after which the run ends; None disables
    it."""

    def __post_init__(self) -> None:
        """Raise ValueError for a setting out of range."""
        sizes = ["epochs", "steps", "batch_size", "evaluate_every", "checkpoint_every", "patience"]
        for name in [*sizes, "initial_batch_size", "learning_rate", "eps", "max_grad_norm"]:
            if getattr(self, name) is not None:
                check_positive(**{f"training.{name}": getattr(self, name)})
        for name in ("weight_decay", "warmup", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"training.{name} is {getattr(self, name)}, expected 0 or more")
        for name in ("initial_lr_ratio", "final_lr_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"training.{name} is {getattr(self, name)}, expected 0 to 1")
        if not 0 < self.batch_size_ramp <= 1:
            raise ValueError(
                f"training.batch_size_ramp is {self.batch_size_ramp}, expected above 0 and at most "
                "1"
            )
        if self.initial_batch_size is not None:
            self._check_ramp(self.initial_batch_size)
        elif self.batch_size_ramp != type(self).batch_size_ramp:
            raise ValueError(
                f"training.batch_size_ramp is {self.batch_size_ramp}, which requires "
                "training.initial_batch_size"
            )
        check_choice("training.precision", self.precision, get_args(RunPrecision))
        check_choice("training.schedule", self.schedule, get_args(Schedule))
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(
                f"training.betas is {self.betas}, expected two numbers from 0 to below 1"
            )
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"training.ema_decay is {self.ema_decay}, expected between 0 and 1")
        check_choice("training.reported_weights", self.reported_weights, get_args(ReportedWeights))
        if self.reported_weights == "raw" and self.ema_decay is None:
            raise ValueError("training.reported_weights is raw, which requires training.ema_decay")

    @property
    def micro_batch_size(self) -> int:
        """Examples read at a time. If the batch size grows, a step reads several micro-batches."""
        return self.batch_size if self.initial_batch_size is None else self.initial_batch_size

    def _check_ramp(self, initial: int) -> None:
        if self.batch_size % initial:
            raise ValueError(
                f"training.initial_batch_size is {initial}, expected a divisor of "
                f"training.batch_size {self.batch_size}"
            )
        if self.steps is not None:
            raise ValueError(
                f"training.steps is {self.steps}, expected None with training.initial_batch_size: "
                "training.epochs determines the length of a run whose batch size grows"
            )


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """Attention transfer, the first phase of a run whose mixers are new; see `AttentionTransfer`.

    Each phase runs through the whole learning rate schedule, including warm-up.
    """

    steps: float = 0.3
    """Length of the phase: a fraction of all steps if below 1, otherwise a number of steps, or of
    batches of initial_batch_size if the batch size grows."""
    learning_rate: float | None = None
    """Peak learning rate of the phase; None uses training.learning_rate."""

    def __post_init__(self) -> None:
        """Raise ValueError for a setting out of range."""
        check_positive(**{"transfer.steps": self.steps})
        if self.learning_rate is not None:
            check_positive(**{"transfer.learning_rate": self.learning_rate})


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """Hardware settings, which may change when a run is resumed without changing its results.

    On one CPU, results are bit-identical for any `workers` and `gradient_checkpointing`. The other
    settings change them by rounding only, except that dropped paths and augmentation are drawn
    separately in each gradient accumulation step and each process. With `sequence_parallel`, they
    are drawn once per group of processes, and only dropout is drawn in each process.
    """

    device: str = "auto"
    """Device to train on: cpu, cuda, cuda:1, ...; auto uses a GPU if there is one."""
    workers: int | None = None
    """Data loading processes per training process; None chooses a number that suits the data."""
    gradient_accumulation_steps: int = 1
    """Number of parts that each batch is split into, processed one after the other to save
    memory."""
    gradient_checkpointing: bool = False
    """Recompute the activations of each block in the backward pass instead of storing them, to save
    memory."""
    compile: bool = False
    """Compile each block with torch.compile."""
    backend: Backend = "auto"
    """Backend of the ops: torch, triton (kernels, for all calls that they support), or auto, which
    uses kernels on NVIDIA GPUs once they have passed their tests on one; so far, they have not
    been run on any."""
    matmul_precision: MatmulPrecision = "highest"
    """Precision of float32 matrix products, as in torch.set_float32_matmul_precision: highest is
    float32, high TensorFloat-32 and medium bfloat16, where the hardware supports them."""
    fsdp: bool = False
    """With several processes, shard weights, gradients and optimizer state (FSDP2) instead of
    replicating them (DDP)."""
    sequence_parallel: int = 1
    """Number of processes across which each sequence is sharded: rows of an image, frames of a
    video or tokens of a text. Must divide the number of processes that torchrun starts."""
    timeout: float = 1800.0
    """Seconds after which a run stops if one of its processes does not respond."""
    trackers: tuple[TrackerName, ...] | None = None
    """Experiment trackers that receive the metrics; None uses tensorboard if it is installed."""

    def __post_init__(self) -> None:
        """Raise ValueError for a setting out of range."""
        for name in ("gradient_accumulation_steps", "sequence_parallel", "timeout"):
            check_positive(**{f"machine.{name}": getattr(self, name)})
        check_choice("machine.backend", self.backend, BACKENDS)
        check_choice("machine.matmul_precision", self.matmul_precision, get_args(MatmulPrecision))
        for name in self.trackers or ():
            check_choice("machine.trackers", name, get_args(TrackerName))
        if self.workers is not None and not 0 <= self.workers <= MAX_WORKERS:
            raise ValueError(f"machine.workers is {self.workers}, expected 0 to {MAX_WORKERS}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Config of a complete run. Equal configs on equal machines give equal results."""

    name: str
    """Name of the run, used as its folder below runs/."""
    model: ModelConfig
    data: DataConfig
    task: TaskConfig
    init_from: str | None = None
    """Pre-trained weights to start from: a run's folder, its best.safetensors, or a model saved by
    transformers. All weights but the head must match; mixers may be of another class. None
    initializes randomly."""
    transfer: TransferConfig | None = None
    """Attention transfer: before training on the task, train only the mixers, to reproduce those of
    init_from. None trains on the task only."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)

    def __post_init__(self) -> None:
        """Raise ValueError for a name that is not a relative path, or settings that do not fit."""
        path = Path(self.name) if isinstance(self.name, str) else Path()
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise ValueError(f"name is {self.name!r}, expected a relative path below runs/")
        self.task.check_model(self.model)
        if self.transfer is not None and self.init_from is None:
            raise ValueError("transfer is set, but init_from is None, expected the teacher")
        if self.transfer is not None and self.machine.fsdp:
            raise ValueError(
                "machine.fsdp is True with transfer, expected False, because attention transfer "
                "calls mixers outside their blocks"
            )

    def build_task(self, data: DataConfig | None = None) -> Task:
        """Open the data, by default the run's own, and build the task on it.

        Raises:
            ValueError: If the data cannot be read or does not fit the task.
        """
        splits = (data or self.data).build()
        task = self.task.build(splits)
        if isinstance(splits, Splits):
            task.notes = splits.notes
        task.check_model(self.model)
        return task


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Result of a finished run."""

    folder: Path
    evaluation: Evaluation
    """The last evaluation."""
    steps: int
    """Number of optimizer steps."""
    reused: bool = False
    """Whether the run had finished before, so that nothing was trained now."""

    @property
    def metrics(self) -> dict[str, float]:
        """The last evaluation's numbers."""
        return self.evaluation.metrics
