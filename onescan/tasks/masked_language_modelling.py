"""Learning to tell what stands where a text is masked."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from onescan.checks import check_positive
from onescan.data.text import TextSplits
from onescan.data.text.tokenizer import word_boundaries
from onescan.models.causal_lm import IGNORE_INDEX
from onescan.shapes import Tokens
from onescan.tasks.base import Batch, Evaluation, Metrics, Rows, Task, TaskConfig
from onescan.tasks.language_modelling import judged, per_document, scored


@dataclass(frozen=True, kw_only=True)
class MaskedLanguageModellingConfig(TaskConfig):
    """Masked language modelling with a `MaskedLM`."""

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
                f"is {self.random_replace_prob}, expected two probabilities of at most 1 in sum"
            )
        if data.tokenizer.mask is None:
            raise ValueError(f"data.tokenizer {data.tokenizer.name!r} has no mask")
        return MaskedLanguageModelling(self, data)


class MaskedLanguageModelling(Task):
    """What stands at some places, from what is around them in the same document.

    Which places is drawn anew for each batch of training; held-out text has the same ones always.
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

    def augment(self, batch: Batch, seed: int) -> Batch:
        """Mask tokens for training.

        Returns:
            Masked tokens, document numbers, and labels.
        """
        return self._masked(batch, seed, self.config.mask_rate)

    def masked_for_evaluation(self, batch: Batch) -> Batch:
        """Mask tokens for evaluation, at its own rate and with the same masks at every call."""
        rate = self.config.evaluation_mask_rate
        return self._masked(batch, 0, self.config.mask_rate if rate is None else rate)

    def _masked(self, batch: Batch, seed: int, rate: float) -> Batch:
        tokens, documents = batch
        generator = torch.Generator(tokens.device).manual_seed(seed)
        chosen = self._chosen(tokens, documents, generator, rate)
        share = torch.rand(tokens.shape, generator=generator, device=tokens.device)
        others = torch.randint(
            self.tokenizer.size, tokens.shape, generator=generator, device=tokens.device
        )
        is_masked = chosen & (share < self.config.mask_replace_prob)
        is_exchanged = (
            chosen
            & ~is_masked
            & (share < self.config.mask_replace_prob + self.config.random_replace_prob)
        )
        shown = others.where(is_exchanged, tokens).masked_fill(is_masked, self.mask)
        return shown, documents, tokens.where(chosen, IGNORE_INDEX)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Float[Tensor, ""], Metrics]:
        shown, documents, labels = batch
        positions, read_outs = labels != IGNORE_INDEX, self.config.supervised_blocks
        logits = model(
            shown, documents=per_document(documents), read_outs=read_outs, positions=positions
        )
        self.tokenizer.check_vocabulary(logits.shape[-1])
        logits, wanted = logits[0].float(), labels[positions]
        count = max(len(wanted), 1)
        loss = cross_entropy(logits, wanted.repeat(read_outs), reduction="sum")
        right = logits[len(logits) - len(wanted) :].argmax(-1) == wanted
        return loss / (read_outs * count), {"accuracy": right.sum() / count}

    def predict(self, model: nn.Module, batch: Batch) -> Rows:
        shown, documents, labels = self.masked_for_evaluation(batch)
        logits = model(shown, documents=per_document(documents))
        self.tokenizer.check_vocabulary(logits.shape[-1])
        return scored(logits.float(), labels, self.tokenizer)

    def judge(self, rows: Rows) -> Evaluation:
        return judged(rows)

    def score(self, metrics: dict[str, float]) -> float:
        return -metrics["loss"]

    def _chosen(
        self, tokens: Tokens, documents: Tokens, generator: torch.Generator, rate: float
    ) -> Bool[Tensor, "B T"]:
        draw = torch.rand(tokens.shape, generator=generator, device=tokens.device)
        if self.words is not None:
            begins = self.words.word_starts(tokens)
            begins[:, 1:] |= documents[:, 1:] != documents[:, :-1]
            places = torch.arange(tokens.shape[1], device=tokens.device)
            first = places.where(begins, 0).cummax(dim=1).values
            draw = draw.gather(1, first)  # a word's first token draws for all of it
        real = documents >= 0
        for special in {self.tokenizer.end, *(self.tokenizer.frame or ())} - {None}:
            real = real & (tokens != special)
        return real & (draw < rate)
