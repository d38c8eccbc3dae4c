"""Loss of language models over context lengths, which may exceed the training length.

The documents of a text are concatenated, each followed by the tokenizer's end-of-text token, and
cut into rows of equal length. A row is one context, across documents. The same tokens are predicted
at every length.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from onescan import __version__
from onescan.experiments.data import DataConfig
from onescan.experiments.data.text import PackedText, TextDatasetConfig, TextRows, TextSplits
from onescan.experiments.data.text.corpus import Corpus, CorpusReader
from onescan.experiments.data.text.packing import padding_id
from onescan.experiments.data.text.source import Query, find_source
from onescan.experiments.evaluation.config import LengthsConfig, short_name
from onescan.experiments.tasks.language_modelling import MaskedLanguageModellingConfig
from onescan.experiments.training.config import Precision, RunConfig
from onescan.experiments.training.distributed import Ranks, choose_device
from onescan.experiments.training.optim import autocast
from onescan.experiments.training.precision import choose_precision
from onescan.experiments.training.runs import run_config
from onescan.inference.loading import load_language_model
from onescan.inputs.tokenizer import Ids, TextFormat, Tokenizer
from onescan.layers.position import TokenPositionConfig
from onescan.models.causal_lm import (
    CHUNK_TOKENS,
    IGNORE_INDEX,
    CausalLM,
    TokenScores,
    perplexity,
    score_logits,
    token_losses,
)
from onescan.models.masked_lm import MaskedLM
from onescan.progress import progress_bar
from onescan.shapes import Tokens

Stream = Int[Tensor, " tokens"]
Sums = Float[Tensor, " length"]


@dataclass(frozen=True, kw_only=True)
class PlaceScore:
    """Loss of tokens predicted from more than `begin` and at most `end` tokens of a row."""

    begin: int
    end: int
    loss: float
    """Nats per token."""


@dataclass(frozen=True, kw_only=True)
class LengthScore:
    """Scores of rows of one length."""

    length: int
    loss: float
    """Nats per token."""
    perplexity: float
    accuracy: float
    places: tuple[PlaceScore, ...] = ()
    """Loss by context length within the rows; of causal models."""


@dataclass(frozen=True, kw_only=True)
class LeftOutLength:
    """A requested length that cannot be evaluated."""

    length: int
    why: str


@dataclass(frozen=True, kw_only=True)
class LengthScores:
    """Scores of one model on one text."""

    name: str
    """Name of the model."""
    is_causal: bool
    """Whether it predicts next tokens, or masked ones."""
    trained_length: int | None
    """Tokens per row in training; None if unknown."""
    text: str
    """Where the text is from."""
    tokens: int
    """Tokens of the text."""
    predicted_tokens: int
    """Number of predicted tokens, the same at every length."""
    onescan: str
    """Version."""
    scores: tuple[LengthScore, ...]
    """By increasing length."""
    left_out: tuple[LeftOutLength, ...] = ()


def measure_lengths(
    checkpoint: str, config: LengthsConfig, *, device: str = "auto", progress: bool = False
) -> LengthScores:
    """Evaluate a model on one text at each length.

    Args:
        checkpoint: Model, as for `load_language_model`.
        config: Lengths and text.
        device: As for `choose_device`.
        progress: Whether to show a progress bar on stderr.

    Raises:
        ValueError: If a setting is out of range, there is no text, or no length can be evaluated.
    """
    config.check()
    model, tokenizer = load_language_model(checkpoint)
    run = run_config(checkpoint)
    ids = read_tokens(checkpoint, run, tokenizer, config)
    inputs, labels = inputs_and_labels(model, tokenizer, ids, run)
    chosen_device = choose_device(device, Ranks())
    model = model.to(chosen_device)
    precision = choose_precision(run.training.precision if run else "float32", chosen_device)
    predicted = int((labels != IGNORE_INDEX).sum())
    position = model.config.position
    max_tokens = position.max_tokens if isinstance(position, TokenPositionConfig) else math.inf
    lengths, left_out = [], []
    for length in sorted(config.lengths):
        if length > max_tokens:
            why = f"the model is limited to {max_tokens} tokens"
            left_out.append(LeftOutLength(length=length, why=why))
        elif length > len(inputs):
            why = f"the text has {len(inputs)} tokens"
            left_out.append(LeftOutLength(length=length, why=why))
        else:
            lengths.append(length)
    if not lengths or not predicted:
        reasons = "; ".join(f"{each.length}: {each.why}" for each in left_out)
        raise ValueError(f"lengths is {config.lengths}, but {reasons or 'no token is predicted'}")
    total = len(lengths) * len(inputs)
    with progress_bar(total, unit=" tokens", unit_scale=True, disable=not progress) as bar:
        scores = [_score(model, precision, inputs, labels, length, bar) for length in lengths]
    return LengthScores(
        name=short_name(checkpoint),
        is_causal=isinstance(model, CausalLM),
        trained_length=run.data.length if run and isinstance(run.data, TextDatasetConfig) else None,
        text="the run's held-out text" if config.text is None else config.text,
        tokens=len(ids),
        predicted_tokens=predicted,
        onescan=__version__,
        scores=tuple(scores),
        left_out=tuple(left_out),
    )


def _score(
    model: CausalLM | MaskedLM,
    precision: Precision,
    inputs: Stream,
    labels: Stream,
    length: int,
    bar: "tqdm[NoReturn]",
) -> LengthScore:
    """Evaluate the model on rows of one length."""
    device, is_causal = model.network.device, isinstance(model, CausalLM)
    loss_sums, counts = torch.zeros(2, length, dtype=torch.float64)
    nats = correct = predicted = 0.0
    bar.set_description(f"rows of {length}")
    for row_inputs, row_labels in zip(_rows(inputs, length), _rows(labels, length), strict=True):
        with torch.no_grad(), autocast(precision, device):
            scores = _score_tokens(model, row_inputs.to(device), row_labels.to(device))
        losses = scores.losses.double().cpu()
        nats, correct = nats + losses.sum().item(), correct + scores.correct.sum().item()
        predicted += (row_labels != IGNORE_INDEX).sum().item()
        if is_causal:
            loss_sums[: row_inputs.shape[1]] += losses.sum(dim=0)
            counts[: row_inputs.shape[1]] += len(row_inputs)
        bar.update(row_inputs.numel())
    return LengthScore(
        length=length,
        loss=nats / predicted,
        perplexity=perplexity(nats / predicted),
        accuracy=correct / predicted,
        places=tuple(_mean_by_position(loss_sums, counts)) if is_causal else (),
    )


def _score_tokens(model: CausalLM | MaskedLM, inputs: Tokens, labels: Tokens) -> TokenScores:
    """Score the labels, in chunks so that the memory for logits is bounded."""
    if isinstance(model, CausalLM):
        return token_losses(model, inputs, labels)
    is_labeled = labels != IGNORE_INDEX
    hidden, _ = model.network(inputs)
    parts = zip(
        hidden[is_labeled].split(CHUNK_TOKENS),
        labels[is_labeled].split(CHUNK_TOKENS),
        strict=True,
    )
    scores = [score_logits(model.head(x.unsqueeze(0)), label.unsqueeze(0)) for x, label in parts]
    return TokenScores(*(torch.cat(pieces, dim=1) for pieces in zip(*scores, strict=True)))


def _rows(stream: Stream, length: int) -> Iterator[Tokens]:
    """Yield batches of rows; the last row may be shorter."""
    full_rows = len(stream) - len(stream) % length
    yield from stream[:full_rows].view(-1, length).split(max(1, CHUNK_TOKENS // length))
    if full_rows < len(stream):
        yield stream[full_rows:].unsqueeze(0)


def _mean_by_position(loss_sums: Sums, counts: Sums) -> Iterator[PlaceScore]:
    """Average the losses over ranges of positions: 1, then 1, 2, 4, ... positions."""
    begin, end = 0, 1
    while begin < len(counts):
        end = min(end, len(counts))
        loss = loss_sums[begin:end].sum() / counts[begin:end].sum()
        yield PlaceScore(begin=begin, end=end, loss=loss.item())
        begin, end = end, 2 * end


def read_tokens(
    checkpoint: str, run: RunConfig | None, tokenizer: Tokenizer, config: LengthsConfig
) -> Stream:
    """Return the concatenated documents of a text, each followed by the end-of-text token.

    A text is tokenized like the run's, and its test split is used if it has one.

    Raises:
        ValueError: If there is no such text, or it cannot be read.
    """
    data = run.data if run and isinstance(run.data, TextDatasetConfig) else None
    text, max_tokens = config.text, config.max_tokens
    if text is None:
        if data is None:
            raise ValueError(
                f"text is None, but {checkpoint!r} has no test text, expected a file, folder or "
                "dataset"
            )
        ids = held_out_tokens(checkpoint, data)
    else:
        source = find_source(text, data.query() if data else Query(), field="text")
        split = source.held_out("train") or next(iter(source.splits))
        frame = tokenizer.frame if data and data.add_special_tokens else None
        reader = CorpusReader(tokenizer=tokenizer, on_error="raise", cache=False, frame=frame)
        ids = reader.read(source.open(split), text, split, max_tokens=max_tokens).tokens
        if not len(ids):
            raise ValueError(f"text is {text!r}, whose split {split} is empty")
    return torch.from_numpy(ids[:max_tokens].astype(np.int64))


def inputs_and_labels(
    model: CausalLM | MaskedLM,
    tokenizer: Tokenizer,
    ids: Int[Tensor, " _"],
    run: RunConfig | None,
) -> tuple[Stream, Stream]:
    """Return the tokens to read and those to predict: the next tokens, or masked ones.

    Tokens are masked as in the evaluation of the run, or else in the default way.

    Raises:
        ValueError: If tokens are to be masked but the tokenizer has no mask token.
    """
    if isinstance(model, CausalLM):
        return ids[:-1], ids[1:]
    masks = MaskedLanguageModellingConfig()
    if run is not None and isinstance(run.task, MaskedLanguageModellingConfig):
        masks = run.task
    corpus = Corpus(tokens=ids.numpy().astype(tokenizer.dtype), ends=np.array([len(ids)]))
    rows = PackedText(corpus=corpus, length=1, padding=padding_id(tokenizer))
    format = TextFormat.of(tokenizer)
    task = masks.build(TextSplits(train=rows, test=rows, tokenizer=tokenizer, format=format))
    row = ids.unsqueeze(0)
    inputs, _, labels = task.masked_for_evaluation((row, torch.zeros_like(row)))
    return inputs[0], labels[0]


def held_out_tokens(checkpoint: str, data: DataConfig) -> Ids:
    """Return the concatenated test documents of a run.

    Args:
        checkpoint: Name of the run, for the error message.
        data: Data of the run.

    Raises:
        ValueError: If the data is not text, or no longer exists.
    """
    splits = data.build()
    if not (isinstance(splits, TextSplits) and isinstance(splits.test, TextRows)):
        raise ValueError(f"{checkpoint!r} was trained on {type(data).__name__}, expected text")
    return splits.test.corpus.tokens
