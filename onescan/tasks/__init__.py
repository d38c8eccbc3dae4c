"""Tasks: one problem each, its training batches, its loss and its evaluation."""

from onescan.tasks.base import (
    Batch,
    BatchPlan,
    Evaluation,
    Metrics,
    Rows,
    Task,
    TaskConfig,
)
from onescan.tasks.distillation import DistillationConfig
from onescan.tasks.glue import Glue, GlueConfig
from onescan.tasks.image_classification import (
    ImageClassification,
    ImageClassificationConfig,
    classify,
)
from onescan.tasks.image_generation import ImageGeneration, ImageGenerationConfig
from onescan.tasks.language_modelling import LanguageModelling, LanguageModellingConfig
from onescan.tasks.masked_language_modelling import (
    MaskedLanguageModelling,
    MaskedLanguageModellingConfig,
)
from onescan.tasks.recall import Recall, RecallTaskConfig
from onescan.tasks.sequence_classification import (
    SequenceClassification,
    SequenceClassificationConfig,
)

__all__ = [
    "Batch",
    "BatchPlan",
    "DistillationConfig",
    "Evaluation",
    "Glue",
    "GlueConfig",
    "ImageClassification",
    "ImageClassificationConfig",
    "ImageGeneration",
    "ImageGenerationConfig",
    "LanguageModelling",
    "LanguageModellingConfig",
    "MaskedLanguageModelling",
    "MaskedLanguageModellingConfig",
    "Metrics",
    "Recall",
    "RecallTaskConfig",
    "Rows",
    "SequenceClassification",
    "SequenceClassificationConfig",
    "Task",
    "TaskConfig",
    "classify",
]
