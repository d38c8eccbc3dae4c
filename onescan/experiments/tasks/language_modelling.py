"""Language modeling: predict the next token (causal), or masked tokens."""

import math
import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from onescan.checks import check_positive
from onescan.configs import ModelConfig
from onescan.experiments.data.share import WHOLE, Share
from onescan.experiments.data.text import TextSplits
from onescan.experiments.tasks.base import Batch, Evaluation, Metrics, Rows, Task, TaskConfig
from onescan.inputs.tokenizer import Tokenizer, word_boundaries
from onescan.models.causal_lm import IGNORE_INDEX, perplexity
from onescan.ops.collectives import sum_over_ranks
from onescan.ops.cross_entropy import cross_entropy
from onescan.ops.packing import Packing, document_offsets
from onescan.shapes import Tokens


@dataclass(frozen=True, kw_only=True)
class LanguageModellingConfig(TaskConfig):
    """Causal language modeling with a `CausalLM`."""

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
    """Predict each token from the tokens before it in the same document."""

    unit = "rows"

    def __init__(self, config: LanguageModellingConfig, data: TextSplits) -> None:
        self.train, self.test, self.format = data.train, data.test, data.format
        self.tokenizer = data.tokenizer
        self.test_batch_size = config.evaluation_batch_size

    def shard(self, share: Share) -> None:
        """Read only this rank's tokens of training text. Test text is read whole to count bytes."""
        self.share, self.train = share, self.train.shared(share)

    def to_device(self, batch: Batch, device: torch.device) -> Batch:
        """Move the tokens; offsets of documents are computed on the CPU."""
        tokens, documents = batch
        return tokens.to(device, non_blocking=True), documents

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Float[Tensor, ""], Metrics]:
        logits, labels = self._logits(model, batch)
        count = max(self.count_labels(batch), 1) / self.share.size
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
        return loss, {"accuracy": (logits.argmax(-1) == labels).sum() / count}

    def count_labels(self, batch: Batch) -> int:
        return int(_has_label(batch[1]).sum())

    def predict(self, model: nn.Module, batch: Batch) -> Rows:
        logits, labels = self._logits(model, batch)
        tokens, documents = batch
        text = tokens[:, 1:].cpu().where(_has_label(documents), IGNORE_INDEX)
        return token_rows(logits.float(), labels, text, self.tokenizer)

    def evaluate(self, rows: Rows) -> Evaluation:
        return evaluate_tokens(rows)

    def score(self, metrics: dict[str, float]) -> float:
        return -metrics["loss"]

    def _logits(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tokens]:
        """Return logits and labels of all tokens but the last; a document's end has no label.

        With a share, return only those of its tokens. The batch may contain only these tokens.
        """
        tokens, documents = batch
        shard = self.share.slice(documents.shape[1] - 1)
        if tokens.shape == documents.shape:
            tokens = tokens[:, shard.start : shard.stop + 1]
        packing = packing_of_documents(documents[:, :-1], tokens.device)
        logits, _ = model(tokens[:, :-1], cu_seqlens=packing)
        has_label = _has_label(documents)[:, shard].to(tokens.device, non_blocking=True)
        self.tokenizer.check_vocabulary(logits.shape[-1])
        return logits, tokens[:, 1:].where(has_label, IGNORE_INDEX)


def _has_label(documents: Tokens) -> Bool[Tensor, "B labels"]:
    """Return whether each token except the first continues a document, and thus is a label."""
    return (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)


@dataclass(frozen=True, kw_only=True)
class MaskedLanguageModellingConfig(TaskConfig):
    """Masked language modeling with a `MaskedLM`."""

    mask_rate: float = 0.15
    """Fraction of tokens, or of words, to predict in training."""
    evaluation_mask_rate: float | None = None
    """Fraction to predict in evaluation; None uses mask_rate."""
    whole_word_mask: bool = False
    """Choose whole words, with all their tokens, instead of single tokens."""
    mask_replace_prob: float = 0.8
    """Probability that a token to predict is replaced by the mask token."""
    random_replace_prob: float = 0.1
    """Probability that a token to predict is replaced by a random token. Otherwise it is
    unchanged."""
    supervised_blocks: int = 1
    """Number of final blocks whose outputs predict the masked tokens; the loss is their mean. More
    than 1 is LDN's objective, arXiv:2502.12381, which refines tokens from block to block."""
    evaluation_batch_size: int = 32
    """Sequences per evaluation batch; affects memory, not results."""

    def build(self, data: TextSplits) -> "MaskedLanguageModelling":
        """Build the task for a text data set.

        Raises:
            ValueError: If a number is out of range, or the tokenizer has no mask token.
        """
        for name in ("evaluation_batch_size", "supervised_blocks"):
            check_positive(**{f"task.{name}": getattr(self, name)})
        for name in ("mask_rate", "evaluation_mask_rate"):
            rate = getattr(self, name)
            if rate is not None and not 0 < rate <= 1:
                raise ValueError(f"task.{name} is {rate}, expected above 0 and at most 1")
        if (
            min(self.mask_replace_prob, self.random_replace_prob) < 0
            or self.mask_replace_prob + self.random_replace_prob > 1
        ):
            raise ValueError(
                f"task.mask_replace_prob is {self.mask_replace_prob} and task.random_replace_prob "
                f"is {self.random_replace_prob}, expected two probabilities whose sum is at most 1"
            )
        if data.tokenizer.mask is None:
            raise ValueError(f"data.tokenizer {data.tokenizer.name!r} has no mask token")
        return MaskedLanguageModelling(self, data)

    def check_model(self, model: ModelConfig) -> None:
        count = self.supervised_blocks
        depth = getattr(model, "depth", count)
        if count > depth:
            raise ValueError(
                f"task.supervised_blocks is {count}, expected 1 to {depth}, the depth of the model"
            )


class MaskedLanguageModelling(Task):
    """Predict masked tokens from the tokens around them in the same document.

    Each training batch is masked anew; a row of test text always has the same masks.
    """

    unit = "rows"

    def __init__(self, config: MaskedLanguageModellingConfig, data: TextSplits) -> None:
        self.config = config
        self.train, self.test, self.format = data.train, data.test, data.format
        self.tokenizer = data.tokenizer
        assert self.tokenizer.mask is not None
        self.mask: int = self.tokenizer.mask
        self.test_batch_size = config.evaluation_batch_size
        self.words = word_boundaries(self.tokenizer) if config.whole_word_mask else None

    def to_device(self, batch: Batch, device: torch.device) -> Batch:
        """Keep the batch on the CPU, where masks are drawn and counted; the model's input moves."""
        del device
        return batch

    def corrupt(self, batch: Batch, seed: int, rows: Share = WHOLE) -> Batch:
        """Mask tokens for training.

        Returns:
            Masked tokens, document numbers, and labels.
        """
        return self._mask(batch, seed, self.config.mask_rate, rows)

    def masked_for_evaluation(self, batch: Batch) -> Batch:
        """Mask tokens for evaluation, at its own rate.

        Masks of a row depend on its tokens alone, not on the other rows of the batch.
        """
        rate = self.config.evaluation_mask_rate
        rate = self.config.mask_rate if rate is None else rate
        masked = []
        for tokens, documents in zip(*batch, strict=True):
            seed = zlib.crc32(tokens.long().numpy().tobytes())
            masked.append(self._mask((tokens[None], documents[None]), seed, rate))
        tokens, documents, labels = (torch.cat(x) for x in zip(*masked, strict=True))
        return tokens, documents, labels

    def _mask(self, batch: Batch, seed: int, rate: float, rows: Share = WHOLE) -> Batch:
        tokens, documents = batch
        generator = torch.Generator(tokens.device).manual_seed(seed)
        shape = (rows.size * len(tokens), tokens.shape[1])
        options: Any = {"generator": generator, "device": tokens.device}
        choice, draw, random_tokens = (
            rows.cut(x, axis=0)
            for x in (
                torch.rand(shape, **options),
                torch.rand(shape, **options),
                torch.randint(self.tokenizer.size, shape, **options),
            )
        )
        is_selected = self._choose(tokens, documents, choice, rate)
        is_masked = is_selected & (draw < self.config.mask_replace_prob)
        is_replaced = (
            is_selected
            & ~is_masked
            & (draw < self.config.mask_replace_prob + self.config.random_replace_prob)
        )
        masked = random_tokens.where(is_replaced, tokens).masked_fill(is_masked, self.mask)
        return masked, documents, tokens.where(is_selected, IGNORE_INDEX)

    def shard(self, share: Share) -> None:
        """Shard rows after masking."""
        self.share = share

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Float[Tensor, ""], Metrics]:
        masked, documents, labels = batch
        count = max(self.count_labels(batch), 1) / self.share.size
        masked, labels = (self.share.cut(x, axis=1) for x in (masked, labels))
        positions = (labels != IGNORE_INDEX).flatten().nonzero()[:, 0]
        targets = _to_model(labels.flatten()[positions], model)
        read_outs = self.config.supervised_blocks
        logits = self.apply(
            model,
            masked,
            documents,
            read_outs=read_outs,
            positions=_to_model(positions, model),
        )
        self.tokenizer.check_vocabulary(logits.shape[-1])
        logits = logits[0]
        loss = cross_entropy(logits, targets.repeat(read_outs), reduction="sum")
        right = logits[len(logits) - len(targets) :].argmax(-1) == targets
        return loss / (read_outs * count), {"accuracy": right.sum() / count}

    def count_labels(self, batch: Batch) -> int:
        return int((batch[2] != IGNORE_INDEX).sum())

    def predict(self, model: nn.Module, batch: Batch) -> Rows:
        masked, documents, text = self.masked_for_evaluation(batch)
        masked, labels = (self.share.cut(x, axis=1) for x in (masked, text))
        logits = self.apply(model, masked, documents)
        self.tokenizer.check_vocabulary(logits.shape[-1])
        return token_rows(logits.float(), labels.to(logits.device), text, self.tokenizer)

    def apply(
        self, model: nn.Module, masked: Tokens, documents: Int[Tensor, "B row"], **options: Any
    ) -> Any:
        """Compute logits from masked tokens and document numbers, which are below 0 for padding.

        The document numbers are those of whole rows, even if the tokens are a shard of them.
        """
        tokens = _to_model(masked, model)
        return model(tokens, cu_seqlens=packing_of_documents(documents, tokens.device), **options)

    def evaluate(self, rows: Rows) -> Evaluation:
        return evaluate_tokens(rows)

    def score(self, metrics: dict[str, float]) -> float:
        return -metrics["loss"]

    def _choose(
        self, tokens: Tokens, documents: Tokens, draw: Float[Tensor, "B T"], rate: float
    ) -> Bool[Tensor, "B T"]:
        """Choose the tokens to predict, given a number from 0 to 1 for each."""
        if self.words is not None:
            is_start = self.words.word_starts(tokens)
            is_start[:, 1:] |= documents[:, 1:] != documents[:, :-1]
            indices = torch.arange(tokens.shape[1], device=tokens.device)
            first = indices.where(is_start, 0).cummax(dim=1).values
            draw = draw.gather(1, first)  # one draw per word, that of its first token
        is_text = documents >= 0
        for special in {self.tokenizer.end, *(self.tokenizer.frame or ())} - {None}:
            is_text = is_text & (tokens != special)
        return is_text & (draw < rate)


def packing_of_documents(documents: Tokens, device: torch.device) -> Packing | None:
    """Return the offsets of the documents of a batch; None if each row has only one.

    A `Packing` keeps them on the CPU, while wrappers of the model move tensors to the device.
    """
    batch, tokens = documents.shape
    packing = Packing(document_offsets(documents), batch=batch, tokens=tokens, device=device)
    return packing if packing.sequences > batch else None


def _to_model(x: Tensor, model: nn.Module) -> Tensor:
    """Copy a tensor to the device of the model, without waiting for it."""
    return x.to(next(model.parameters(), x).device, non_blocking=True)


def token_rows(
    logits: Float[Tensor, "B T vocabulary"],
    labels: Tokens,
    text: Int[Tensor, "B row"],
    tokenizer: Tokenizer,
) -> Rows:
    """Return sums over the labels of each row: losses, correct predictions, tokens and bytes.

    Args:
        logits: Logits of this rank's tokens, [B, T, vocabulary].
        labels: Labels of this rank's tokens, [B, T].
        text: Labels of whole rows, on all ranks, to count bytes.
        tokenizer: Tokenizer of the text.
    """
    is_label = labels != IGNORE_INDEX
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    right = (logits.argmax(-1) == labels) & is_label
    sums = sum_over_ranks(*(x.sum(dim=1) for x in (losses, right, is_label)))
    ids = [row[row != IGNORE_INDEX].tolist() for row in text]
    counts = torch.tensor([tokenizer.count_bytes(row) for row in ids])
    return dict(zip(("losses", "right", "tokens", "bytes"), (*sums, counts), strict=True))


def evaluate_tokens(rows: Rows) -> Evaluation:
    """Compute means over all tokens, in nats and as perplexity, and bits per byte of text.

    Raises:
        ValueError: If there are no tokens.
    """
    tokens = rows["tokens"].sum().item()
    if not tokens:
        raise ValueError("the test text has no token to predict")
    nats = rows["losses"].double().sum().item()
    metrics = {
        "loss": nats / tokens,
        "perplexity": perplexity(nats / tokens),
        "bits_per_byte": nats / math.log(2) / max(rows["bytes"].sum().item(), 1),
        "accuracy": rows["right"].sum().item() / tokens,
    }
    return Evaluation(metrics=metrics, arrays=rows)
