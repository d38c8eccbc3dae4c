"""A task of GLUE, judged by the measures that the benchmark has for it."""

import statistics
from dataclasses import dataclass

from torch import nn

from onescan.checks import check_positive
from onescan.data.glue import GlueSplits
from onescan.shapes import Logits
from onescan.tasks.base import Batch, Evaluation, Rows, TaskConfig
from onescan.tasks.glue_metrics import measure
from onescan.tasks.sequence_classification import (
    SequenceClassification,
    SequenceClassificationConfig,
)

LOSS = "loss"


@dataclass(frozen=True, kw_only=True)
class GlueConfig(TaskConfig):
    """GLUE fine-tuning: cross-entropy for classes, squared error for the scores of STS-B."""

    segments: bool = True
    """Pass segment ids (token types) that distinguish the two texts of a pair, if the model has
    segment_types."""
    evaluation_batch_size: int = 64
    """Sequences per evaluation batch; affects memory, not results."""

    def build(self, data: GlueSplits) -> "Glue":
        """Pose the task that the data is of.

        Raises:
            ValueError: evaluation_batch_size is not above 0.
        """
        check_positive(**{"task.evaluation_batch_size": self.evaluation_batch_size})
        return Glue(self, data)


class Glue(SequenceClassification):
    """One of GLUE's tasks."""

    def __init__(self, config: GlueConfig, data: GlueSplits) -> None:
        size = config.evaluation_batch_size
        super().__init__(SequenceClassificationConfig(evaluation_batch_size=size), data)
        self.problem, self.counts = data.problem, data.counts
        self.held_out = data.test.rows
        self.segments = config.segments

    def scores(self, model: nn.Module, batch: Batch) -> Logits:
        return super().scores(model, batch if self.segments else batch[:3])

    def judge(self, rows: Rows) -> Evaluation:
        """Judge each held-out part by each of the task's measures."""
        labels, predictions = (rows[name].split(self.counts) for name in ("labels", "predictions"))
        metrics = {
            f"{part.prefix}{name}": measure(name, truth, said)
            for part, truth, said in zip(self.problem.held_out, labels, predictions, strict=True)
            for name in self.problem.metrics
        }
        loss = {LOSS: rows["losses"].mean().item()}
        return Evaluation(metrics=metrics | loss, arrays=rows)

    def texts(self, place: int) -> tuple[str, ...]:
        """One text or two of a held-out example, by its place in an evaluation's rows."""
        return self.held_out[place].texts

    def score(self, metrics: dict[str, float]) -> float:
        """The mean of the task's measures, as the benchmark averages them."""
        return glue_score(metrics)


def glue_score(metrics: dict[str, float]) -> float:
    """The mean of a task's measures, whose loss is none.

    >>> glue_score({"accuracy": 0.75, "f1": 0.25, "loss": 9.0})
    0.5
    """
    return statistics.mean(value for name, value in metrics.items() if name != LOSS)
