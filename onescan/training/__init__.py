"""Training: `train` trains the model of a `RunConfig`, and `load` loads it afterwards."""

from onescan.training.config import (
    MachineConfig,
    RunConfig,
    RunResult,
    TrainingConfig,
    TransferConfig,
)
from onescan.training.distributed import Ranks, joined
from onescan.training.evaluation import evaluate
from onescan.training.loading import Checkpoint, load
from onescan.training.logging import Progress, read_metrics
from onescan.training.loop import train
from onescan.training.optim import learning_rate, parameter_groups

__all__ = [
    "Checkpoint",
    "MachineConfig",
    "Progress",
    "Ranks",
    "RunConfig",
    "RunResult",
    "TrainingConfig",
    "TransferConfig",
    "evaluate",
    "joined",
    "learning_rate",
    "load",
    "parameter_groups",
    "read_metrics",
    "train",
]
