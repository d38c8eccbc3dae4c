"""GLUE fine-tuning, evaluated by the metrics of the benchmark."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from onescan.checks import check_positive
from onescan.experiments.data.glue import GlueSplits, Metric
from onescan.experiments.tasks.base import Batch, Evaluation, Rows, TaskConfig
from onescan.experiments.tasks.sequence_classification import (
    SequenceClassification,
    SequenceClassificationConfig,
)
from onescan.shapes import Logits

LOSS = "loss"
Scoring = Literal["tasks", "columns"]
ONE_OF_TWO = ("f1", "pearson")  # the metric to use for tasks with two metrics and one column


@dataclass(frozen=True, kw_only=True)
class GlueConfig(TaskConfig):
    """GLUE fine-tuning: cross-entropy for classes, squared error for the scores of STS-B."""

    segments: bool = True
    """Pass segment ids (token types) that distinguish the two texts of a pair, if the model has
    segment_types."""
    evaluation_batch_size: int = 64
    """Sequences per evaluation batch; affects memory, not results."""

    def build(self, data: GlueSplits) -> "Glue":
        """Build the task for a data set of GLUE.

        Raises:
            ValueError: If evaluation_batch_size is not positive.
        """
        check_positive(**{"task.evaluation_batch_size": self.evaluation_batch_size})
        return Glue(self, data)


class Glue(SequenceClassification):
    """One task of GLUE."""

    def __init__(self, config: GlueConfig, data: GlueSplits) -> None:
        size = config.evaluation_batch_size
        super().__init__(SequenceClassificationConfig(evaluation_batch_size=size), data)
        self.problem, self.counts = data.problem, data.counts
        self.held_out = data.test.rows
        self.segments = config.segments

    def scores(self, model: nn.Module, batch: Batch) -> Logits:
        return super().scores(model, batch if self.segments else batch[:3])

    def evaluate(self, rows: Rows) -> Evaluation:
        """Compute each of the task's metrics on each test set."""
        labels, predictions = (rows[name].split(self.counts) for name in ("labels", "predictions"))
        metrics = {
            f"{part.prefix}{name}": compute_metric(name, truth, predicted)
            for part, truth, predicted in zip(
                self.problem.held_out, labels, predictions, strict=True
            )
            for name in self.problem.metrics
        }
        loss = {LOSS: rows["losses"].mean().item()}
        return Evaluation(metrics=metrics | loss, arrays=rows)

    def texts(self, row: int) -> tuple[str, ...]:
        """Return the one or two texts of the test example in a row of an evaluation."""
        return self.held_out[row].texts

    def score(self, metrics: dict[str, float]) -> float:
        """Return the mean of the task's metrics, as the benchmark does."""
        return glue_score(metrics)


def glue_score(metrics: dict[str, float]) -> float:
    """Return the mean of a task's metrics, without the loss.

    >>> glue_score({"accuracy": 0.75, "f1": 0.25, "loss": 9.0})
    0.5
    """
    return statistics.mean(value for name, value in metrics.items() if name != LOSS)


def glue_columns(metrics: dict[str, float], scoring: Scoring) -> dict[str, float]:
    """Return the numbers that one task contributes to the average, by name of the metric.

    Args:
        metrics: Metrics of the task; the loss is ignored.
        scoring: "tasks" returns one number, the mean of the task's metrics, under the name of the
            first one, as in LION's tables. "columns" returns one number for each column of
            LightNet's Table 2: both accuracies of MNLI, and one metric of each other task, which is
            F1 for QQP and MRPC and Pearson's correlation for STS-B.

    >>> glue_columns({"accuracy": 0.75, "f1": 0.25, "loss": 9.0}, "columns")
    {'f1': 0.25}
    >>> glue_columns({"accuracy": 0.75, "f1": 0.25, "loss": 9.0}, "tasks")
    {'accuracy': 0.5}
    """
    names = [name for name in metrics if name != LOSS]
    if scoring == "tasks":
        return {names[0]: glue_score(metrics)}
    chosen = [name for name in names if name in ONE_OF_TWO]
    return {name: metrics[name] for name in chosen or names}


def compute_metric(metric: Metric, labels: Tensor, predictions: Tensor) -> float:
    """Compare predictions with labels.

    Args:
        metric: Name of the metric. f1 is that of class 1; 0 if it never occurs.
        labels: Classes or numbers, of shape [B].
        predictions: Classes or numbers, of shape [B].
    """
    from sklearn import metrics  # slow

    classes: dict[Metric, Callable[..., Any]] = {
        "accuracy": metrics.accuracy_score,
        "f1": lambda *pair: metrics.f1_score(*pair, zero_division=0.0),
        "matthews_correlation": metrics.matthews_corrcoef,
    }
    pair = labels.numpy(), predictions.numpy()
    if metric in classes:
        return float(classes[metric](*pair))
    return _correlation(metric, labels, predictions)


def _correlation(metric: Metric, labels: Tensor, estimates: Tensor) -> float:
    """Return Pearson's or Spearman's correlation, or 0 if either tensor is constant."""
    from scipy import stats  # type: ignore[import-untyped]

    if any((x == x[0]).all() for x in (labels, estimates)):
        return 0.0
    correlate = stats.pearsonr if metric == "pearson" else stats.spearmanr
    return float(correlate(labels.double().numpy(), estimates.double().numpy()).statistic)
