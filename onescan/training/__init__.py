"""Training: a run is a config, `train` carries it out, `load` gives back what it learnt."""

from onescan.training.checkpoint import Checkpoint, load
from onescan.training.loop import train
from onescan.training.optimizer import parameter_groups
from onescan.training.progress import Progress
from onescan.training.records import read_metrics
from onescan.training.run import RunConfig, RunResult, TrainingConfig
from onescan.training.schedule import learning_rate

__all__ = [
    "Checkpoint",
    "Progress",
    "RunConfig",
    "RunResult",
    "TrainingConfig",
    "learning_rate",
    "load",
    "parameter_groups",
    "read_metrics",
    "train",
]
