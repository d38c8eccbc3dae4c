"""Training: `train` trains the model of a `RunConfig`, and `run_config` reads that of a run."""

from onescan.experiments.training.config import (
    MachineConfig,
    RunConfig,
    RunResult,
    TrainingConfig,
    TransferConfig,
)
from onescan.experiments.training.distributed import Ranks, joined
from onescan.experiments.training.evaluation import evaluate
from onescan.experiments.training.logging import Progress, read_metrics
from onescan.experiments.training.loop import train
from onescan.experiments.training.optim import learning_rate, parameter_groups
from onescan.experiments.training.runs import build_task, run_config

__all__ = [
    "MachineConfig",
    "Progress",
    "Ranks",
    "RunConfig",
    "RunResult",
    "TrainingConfig",
    "TransferConfig",
    "build_task",
    "evaluate",
    "joined",
    "learning_rate",
    "parameter_groups",
    "read_metrics",
    "run_config",
    "train",
]
