"""Learning to tell each next token of a text."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from onescan.checks import check_positive
from onescan.data.text import TextSplits, Tokenizer
from onescan.models.causal_lm import IGNORE_INDEX, perplexity
from onescan.shapes import Tokens
from onescan.tasks.base import Batch, Evaluation, Metrics, Rows, Task, TaskConfig


@dataclass(frozen=True, kw_only=True)
class LanguageModellingConfig(TaskConfig):
    """Causal language modelling with a `CausalLM`."""

    evaluation_batch_size: int = 32
    """Sequences per evaluation batch; affects memory, not results."""

    def build(self, data: TextSplits) -> "LanguageModelling":
        """Build the task for a text data set.

        Raises:
            ValueError: If a number is not positive, or ``data.add_special_tokens`` is set.
        """
        if data.is_framed:
            raise ValueError(
                "data.add_special_tokens is True, expected False: a causal model would learn to "
                "predict [SEP] in the middle of documents"
            )
        check_positive(**{"task.evaluation_batch_size": self.evaluation_batch_size})
        return LanguageModelling(self, data)


class LanguageModelling(Task):
    """The next token from those before it, of the same document."""

    unit = "rows"

    def __init__(self, config: LanguageModellingConfig, data: TextSplits) -> None:
        self.train, self.test, self.format = data.train, data.test, data.format
        self.tokenizer = data.tokenizer
        self.test_batch_size = config.evaluation_batch_size

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Float[Tensor, ""], Metrics]:
        logits, labels = self._told(model, batch)
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        right = (logits.argmax(-1) == labels).sum() / (labels != IGNORE_INDEX).sum()
        return loss, {"accuracy": right}

    def predict(self, model: nn.Module, batch: Batch) -> Rows:
        return scored(*self._told(model, batch), self.tokenizer)

    def judge(self, rows: Rows) -> Evaluation:
        return judged(rows)

    def score(self, metrics: dict[str, float]) -> float:
        return -metrics["loss"]

    def _told(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tokens]:
        """Scores of each token but a row's last, and what follows it: nothing at a text's end."""
        tokens, documents = batch
        logits, _ = model(tokens[:, :-1], documents=per_document(documents[:, :-1]))
        goes_on = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
        self.tokenizer.check_vocabulary(logits.shape[-1])
        return logits.float(), tokens[:, 1:].where(goes_on, IGNORE_INDEX)


def per_document(documents: Tokens) -> Tokens | None:
    """Return the documents of a batch; None if each row has only one, which is faster."""
    return documents if bool((documents != documents[:, :1]).any()) else None


def scored(logits: Float[Tensor, "B T vocabulary"], labels: Tokens, tokenizer: Tokenizer) -> Rows:
    """What there is to say of each row: sums over its labels, their number and their bytes."""
    told = labels != IGNORE_INDEX
    losses = cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    ids = [row[row != IGNORE_INDEX].tolist() for row in labels]
    return {
        "losses": losses.sum(dim=1),
        "right": ((logits.argmax(-1) == labels) & told).sum(dim=1),
        "tokens": told.sum(dim=1),
        "bytes": torch.tensor([tokenizer.count_bytes(row) for row in ids]),
    }


def judged(rows: Rows) -> Evaluation:
    """Means over all tokens, in nats and as perplexity, and bits per byte of text."""
    tokens = rows["tokens"].sum().item()
    if not tokens:
        raise ValueError("the held-out text has no token to tell")
    nats = rows["losses"].double().sum().item()
    metrics = {
        "loss": nats / tokens,
        "perplexity": perplexity(nats / tokens),
        "bits_per_byte": nats / math.log(2) / max(rows["bytes"].sum().item(), 1),
        "accuracy": rows["right"].sum().item() / tokens,
    }
    return Evaluation(metrics=metrics, arrays=rows)
