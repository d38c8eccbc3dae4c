"""Tasks: one problem each, its training batches, its loss and its evaluation."""

from onescan.tasks.base import Batch, Evaluation, Metrics, Planned, Rows, Task, TaskConfig
from onescan.tasks.distillation import DistillationConfig
from onescan.tasks.image_classification import (
    ImageClassification,
    ImageClassificationConfig,
    classify,
)

__all__ = [
    "Batch",
    "DistillationConfig",
    "Evaluation",
    "ImageClassification",
    "ImageClassificationConfig",
    "Metrics",
    "Planned",
    "Rows",
    "Task",
    "TaskConfig",
    "classify",
]
