"""Training: a run is a config, `train` carries it out, `load` gives back what it learnt."""

from onescan.training.checkpoint import Checkpoint, load
from onescan.training.evaluation import evaluate
from onescan.training.loop import train
from onescan.training.optimizer import parameter_groups
from onescan.training.progress import Progress
from onescan.training.ranks import Ranks, joined
from onescan.training.records import read_metrics
from onescan.training.run import MachineConfig, RunConfig, RunResult, TrainingConfig
from onescan.training.schedule import learning_rate

__all__ = [
    "Checkpoint",
    "MachineConfig",
    "Progress",
    "Ranks",
    "RunConfig",
    "RunResult",
    "TrainingConfig",
    "evaluate",
    "joined",
    "learning_rate",
    "load",
    "parameter_groups",
    "read_metrics",
    "train",
]
