"""Tasks: the training batches, loss and evaluation of each problem.

The tasks are imported on first use. `onescan.configs` finds the class that a config names here.
"""

from typing import TYPE_CHECKING

from onescan.experiments.tasks.base import Batch as Batch
from onescan.experiments.tasks.base import BatchPlan as BatchPlan
from onescan.experiments.tasks.base import Evaluation as Evaluation
from onescan.experiments.tasks.base import Metrics as Metrics
from onescan.experiments.tasks.base import Rows as Rows
from onescan.experiments.tasks.base import Task as Task
from onescan.experiments.tasks.base import TaskConfig as TaskConfig
from onescan.lazy import lazy_attributes

if TYPE_CHECKING:
    from onescan.experiments.tasks.dense_regression import DenseRegression as DenseRegression
    from onescan.experiments.tasks.dense_regression import (
        DenseRegressionConfig as DenseRegressionConfig,
    )
    from onescan.experiments.tasks.distillation import DistillationConfig as DistillationConfig
    from onescan.experiments.tasks.forecasting import Forecasting as Forecasting
    from onescan.experiments.tasks.forecasting import ForecastingConfig as ForecastingConfig
    from onescan.experiments.tasks.glue import Glue as Glue
    from onescan.experiments.tasks.glue import GlueConfig as GlueConfig
    from onescan.experiments.tasks.image_classification import (
        ImageClassification as ImageClassification,
    )
    from onescan.experiments.tasks.image_classification import (
        ImageClassificationConfig as ImageClassificationConfig,
    )
    from onescan.experiments.tasks.image_generation import ImageGeneration as ImageGeneration
    from onescan.experiments.tasks.image_generation import (
        ImageGenerationConfig as ImageGenerationConfig,
    )
    from onescan.experiments.tasks.language_modelling import LanguageModelling as LanguageModelling
    from onescan.experiments.tasks.language_modelling import (
        LanguageModellingConfig as LanguageModellingConfig,
    )
    from onescan.experiments.tasks.language_modelling import (
        MaskedLanguageModelling as MaskedLanguageModelling,
    )
    from onescan.experiments.tasks.language_modelling import (
        MaskedLanguageModellingConfig as MaskedLanguageModellingConfig,
    )
    from onescan.experiments.tasks.multilabel import (
        MultilabelClassification as MultilabelClassification,
    )
    from onescan.experiments.tasks.multilabel import (
        MultilabelClassificationConfig as MultilabelClassificationConfig,
    )
    from onescan.experiments.tasks.recall import Recall as Recall
    from onescan.experiments.tasks.recall import RecallTaskConfig as RecallTaskConfig
    from onescan.experiments.tasks.regression import Regression as Regression
    from onescan.experiments.tasks.regression import RegressionConfig as RegressionConfig
    from onescan.experiments.tasks.segmentation import Segmentation as Segmentation
    from onescan.experiments.tasks.segmentation import SegmentationConfig as SegmentationConfig
    from onescan.experiments.tasks.sequence_classification import (
        SequenceClassification as SequenceClassification,
    )
    from onescan.experiments.tasks.sequence_classification import (
        SequenceClassificationConfig as SequenceClassificationConfig,
    )

# name -> module of this folder that defines it
_MODULES = {
    "Batch": "base",
    "BatchPlan": "base",
    "DenseRegression": "dense_regression",
    "DenseRegressionConfig": "dense_regression",
    "DistillationConfig": "distillation",
    "Evaluation": "base",
    "Forecasting": "forecasting",
    "ForecastingConfig": "forecasting",
    "Glue": "glue",
    "GlueConfig": "glue",
    "ImageClassification": "image_classification",
    "ImageClassificationConfig": "image_classification",
    "ImageGeneration": "image_generation",
    "ImageGenerationConfig": "image_generation",
    "LanguageModelling": "language_modelling",
    "LanguageModellingConfig": "language_modelling",
    "MaskedLanguageModelling": "language_modelling",
    "MaskedLanguageModellingConfig": "language_modelling",
    "Metrics": "base",
    "MultilabelClassification": "multilabel",
    "MultilabelClassificationConfig": "multilabel",
    "Recall": "recall",
    "RecallTaskConfig": "recall",
    "Regression": "regression",
    "RegressionConfig": "regression",
    "Rows": "base",
    "Segmentation": "segmentation",
    "SegmentationConfig": "segmentation",
    "SequenceClassification": "sequence_classification",
    "SequenceClassificationConfig": "sequence_classification",
    "Task": "base",
    "TaskConfig": "base",
}

__all__ = list(_MODULES)
__getattr__ = lazy_attributes(__name__, _MODULES)
