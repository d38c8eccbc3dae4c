"""Sequence classification: predict the class, or a number, of a sequence of tokens."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from onescan.checks import check_positive
from onescan.experiments.data.sequences import SequenceSplits
from onescan.experiments.data.share import Share
from onescan.experiments.tasks.base import Batch, Evaluation, Metrics, Rows, Task, TaskConfig
from onescan.shapes import Logits

Numbers = Float[Tensor, " B"]


@dataclass(frozen=True, kw_only=True)
class SequenceClassificationConfig(TaskConfig):
    """Sequence classification, or regression if the data has no classes."""

    label_smoothing: float = 0.0
    """Label smoothing: share of each label spread over all classes, below 1."""
    evaluation_batch_size: int = 64
    """Sequences per evaluation batch; affects memory, not results."""

    def build(self, data: SequenceSplits) -> "SequenceClassification":
        """Build the task for a data set of sequences.

        Raises:
            ValueError: If label_smoothing is out of range, or set for labels that are numbers; or
                if evaluation_batch_size is not positive.
        """
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"task.label_smoothing is {self.label_smoothing}, expected 0 to below 1"
            )
        if self.label_smoothing and not data.class_names:
            raise ValueError(
                f"task.label_smoothing is {self.label_smoothing}, expected 0, because the "
                "labels of the data are numbers"
            )
        check_positive(**{"task.evaluation_batch_size": self.evaluation_batch_size})
        return SequenceClassification(self, data)


class SequenceClassification(Task):
    """Classification, or regression, on one data set."""

    unit = "sequences"

    def __init__(self, config: SequenceClassificationConfig, data: SequenceSplits) -> None:
        self.config = config
        self.train, self.test = data.train, data.test
        self.format = data.format
        self.class_names = data.class_names
        self.test_batch_size = config.evaluation_batch_size

    def shard(self, share: Share) -> None:
        self.share = share

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Float[Tensor, ""], Metrics]:
        scores, labels = self.scores(model, batch), batch[2]
        if not self.class_names:
            return mse_loss(scores[:, 0], labels.float()), {}
        loss = cross_entropy(scores, labels, label_smoothing=self.config.label_smoothing)
        return loss, {"accuracy": (scores.argmax(dim=1) == labels).float().mean()}

    def predict(self, model: nn.Module, batch: Batch) -> Rows:
        scores, labels = self.scores(model, batch), batch[2]
        if not self.class_names:
            estimates, numbers = scores[:, 0], labels.float()
            losses = mse_loss(estimates, numbers, reduction="none")
            return {"labels": numbers, "predictions": estimates, "losses": losses}
        return {
            "labels": labels,
            "predictions": scores.argmax(dim=1),
            "confidence": scores.softmax(dim=1).amax(dim=1),
            "losses": cross_entropy(scores, labels, reduction="none"),
        }

    def evaluate(self, rows: Rows) -> Evaluation:
        loss = rows["losses"].mean().item()
        if self.class_names:
            accuracy = (rows["predictions"] == rows["labels"]).double().mean().item()
            return Evaluation(metrics={"accuracy": accuracy, "loss": loss}, arrays=rows)
        correlation = _correlation(rows["predictions"], rows["labels"])
        return Evaluation(metrics={"correlation": correlation, "loss": loss}, arrays=rows)

    def score(self, metrics: dict[str, float]) -> float:
        return metrics["accuracy" if self.class_names else "correlation"]

    def scores(self, model: nn.Module, batch: Batch) -> Logits:
        """Apply the model to a batch.

        Raises:
            ValueError: If the number of scores is not the number of classes.
        """
        tokens, keep, *segments = (self.share.cut(x, axis=1) for x in (*batch[:2], *batch[3:]))
        scores = model(tokens, keep, segments=segments[0] if segments else None)
        classes = len(self.class_names) or 1
        if scores.shape != (len(tokens), classes):
            what = f"of {classes} classes" if self.class_names else "to estimate one number of each"
            raise ValueError(
                f"the model gives scores of shape {tuple(scores.shape)} for {len(tokens)} "
                f"sequences {what}; expected model.num_classes {classes}"
            )
        return scores.float()


def _correlation(estimates: Numbers, numbers: Numbers) -> float:
    """Return Pearson's correlation, or 0 if either tensor is constant."""
    x, y = (each.double() - each.double().mean() for each in (estimates, numbers))
    lengths = torch.linalg.vector_norm(x) * torch.linalg.vector_norm(y)
    return float(x @ y / lengths) if lengths > 0 else 0.0
