"""Associative recall: predict the value of each queried key, evaluated by number of pairs."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from onescan.checks import check_positive
from onescan.experiments.data.recall import BLANK, RecallSplits
from onescan.experiments.data.share import Share
from onescan.experiments.tasks.base import Batch, Evaluation, Metrics, Rows, Task, TaskConfig
from onescan.inputs.sequences import RecallFormat
from onescan.ops.collectives import gather_tokens, sum_over_ranks
from onescan.ops.parallel import sequence_group
from onescan.shapes import TokenLogits


@dataclass(frozen=True, kw_only=True)
class RecallTaskConfig(TaskConfig):
    """Associative recall with a `CausalLM` or a `MaskedLM`."""

    evaluation_batch_size: int = 256
    """Sequences per evaluation batch; affects memory, not results."""

    def build(self, data: RecallSplits) -> "Recall":
        """Build the task for sequences of key-value pairs and queries.

        Raises:
            ValueError: If a number is not positive.
        """
        check_positive(**{"task.evaluation_batch_size": self.evaluation_batch_size})
        return Recall(self, data)


class Recall(Task):
    """Prediction of the value at each query; no other token is scored."""

    format: RecallFormat
    unit = "sequences"

    def __init__(self, config: RecallTaskConfig, data: RecallSplits) -> None:
        self.train, self.test, self.format = data.train, data.test, data.format
        self.test_batch_size = config.evaluation_batch_size

    def shard(self, share: Share) -> None:
        self.share = share

    def to_device(self, batch: Batch, device: torch.device) -> Batch:
        """Move the tokens; queries are counted on the CPU."""
        tokens, answers, distances = batch
        return tokens.to(device, non_blocking=True), answers, distances

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Float[Tensor, ""], Metrics]:
        count = max(self.count_labels(batch), 1) / self.share.size
        logits, answers = self._scores(model, batch), self.share.cut(batch[1], axis=1).flatten()
        queries = (answers != BLANK).nonzero()[:, 0]
        answers = answers[queries].to(logits.device, non_blocking=True)
        logits = logits.flatten(0, 1)[queries.to(logits.device, non_blocking=True)]
        loss = cross_entropy(logits, answers, reduction="sum") / count
        return loss, {"accuracy": (logits.argmax(-1) == answers).sum() / count}

    def count_labels(self, batch: Batch) -> int:
        return int((batch[1] != BLANK).sum())

    def predict(self, model: nn.Module, batch: Batch) -> Rows:
        logits = self._scores(model, batch)
        answers = self.share.cut(batch[1], axis=1).to(logits.device, non_blocking=True)
        losses = cross_entropy(logits.transpose(1, 2), answers, reduction="none")
        right = (logits.argmax(-1) == answers) & (answers != BLANK)
        if (group := sequence_group(None)) is not None:
            right = gather_tokens(group, right, group.lengths(right))
        (losses,) = sum_over_ranks(losses.where(answers != BLANK, 0).sum(dim=1))
        return {"losses": losses, "right": right, "distances": batch[2]}

    def evaluate(self, rows: Rows) -> Evaluation:
        right, pairs = rows["right"].sum(dim=1), (rows["distances"] > 0).sum(dim=1)
        metrics = {
            "accuracy": (right.sum() / pairs.sum()).item(),
            "loss": (rows["losses"].double().sum() / pairs.sum()).item(),
        }
        for number in pairs.unique().tolist():
            is_selected = pairs == number
            accuracy = right[is_selected].sum() / pairs[is_selected].sum()
            metrics[f"{number}_pairs_accuracy"] = accuracy.item()
        return Evaluation(metrics=metrics, arrays=rows)

    def score(self, metrics: dict[str, float]) -> float:
        return metrics["accuracy"]

    def _scores(self, model: nn.Module, batch: Batch) -> TokenLogits:
        output = model(self.share.cut(batch[0], axis=1))
        logits: TokenLogits = (output if isinstance(output, Tensor) else output[0]).float()
        if logits.shape[-1] < self.format.vocab_size:
            raise ValueError(
                f"the model scores {logits.shape[-1]} tokens, but the data has "
                f"{self.format.vocab_size}: is model.vocab_size right?"
            )
        return logits
