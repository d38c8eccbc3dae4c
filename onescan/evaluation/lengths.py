"""Loss over context lengths."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from onescan import __version__
from onescan.data import DataConfig
from onescan.data.text import PackedText, TextDatasetConfig, TextFormat, TextSplits, Tokenizer
from onescan.data.text.corpus import Corpus
from onescan.data.text.corpus_reader import CorpusReader
from onescan.data.text.rows import padding_id
from onescan.data.text.source import Wanted, find_source
from onescan.data.text.tokenizer import Ids
from onescan.evaluation.config import LengthsConfig, short_name
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
from onescan.shapes import Tokens
from onescan.tasks import Batch
from onescan.tasks.masked_language_modelling import MaskedLanguageModellingConfig
from onescan.training.folder import read_manifest
from onescan.training.language_model import is_run, load_language_model
from onescan.training.precision import computing
from onescan.training.ranks import Ranks, choose_device
from onescan.training.run import Precision, RunConfig


@dataclass(frozen=True, kw_only=True)
class PlaceScore:
    """Of what is told after more than `begin` tokens of a row, and up to `end`."""

    begin: int
    end: int
    loss: float
    """Nats per token."""


@dataclass(frozen=True, kw_only=True)
class LengthScore:
    """Of rows of one length."""

    length: int
    loss: float
    """Nats per token."""
    perplexity: float
    accuracy: float
    places: tuple[PlaceScore, ...] = ()
    """What more context gives: by how much was read of a row before; of causal models."""


@dataclass(frozen=True, kw_only=True)
class LeftOutLength:
    """A length that was asked for and not measured."""

    length: int
    why: str


@dataclass(frozen=True, kw_only=True)
class LengthScores:
    """One model on one text."""

    name: str
    """Of the model."""
    is_causal: bool
    """Whether it tells next tokens, or masked ones."""
    trained_length: int | None
    """Tokens of a row in training; None where that is not known."""
    text: str
    """Where the text is from."""
    tokens: int
    """Tokens of the text that rows were cut from."""
    told: int
    """How many of them were told, the same ones at every length."""
    onescan: str
    """Version."""
    scores: tuple[LengthScore, ...]
    """From the shortest to the longest."""
    left_out: tuple[LeftOutLength, ...] = ()


def held_out_tokens(checkpoint: str, data: DataConfig) -> Ids:
    """All of its documents, end to end.

    Args:
        checkpoint: what the user calls the run.
        data: what the run was trained on.

    Raises:
        ValueError: it was not trained on text, or its text is no longer there.
    """
    splits = data.build()
    if not (isinstance(splits, TextSplits) and isinstance(splits.test, PackedText)):
        raise ValueError(f"{checkpoint!r} was trained on {type(data).__name__}, which has no text")
    return splits.test.corpus.tokens


HELD_OUT = "the run's held-out text"


@dataclass(frozen=True, kw_only=True)
class LongText:
    """A model, and documents laid end to end, each with the tokenizer's end behind it.

    Attributes:
        name: of the model.
        model: in evaluation mode on the CPU.
        tokenizer: the one that it was trained with.
        ids: of all documents.
        text: where they are from.
        trained_length: tokens of a row in training, where that is known.
        precision: of the matrix products in training.
        masks: how masks are drawn.
    """

    name: str
    model: CausalLM | MaskedLM
    tokenizer: Tokenizer
    ids: Tokens
    text: str
    trained_length: int | None
    precision: Precision
    masks: MaskedLanguageModellingConfig

    def masked(self) -> tuple[Tokens, Tokens]:
        """Mask the text as in evaluation; for masked language models.

        Returns:
            Masked tokens, and labels.

        Raises:
            ValueError: If the tokenizer has no mask token.
        """
        ids = self.ids[0].numpy().astype(self.tokenizer.dtype)
        corpus = Corpus(tokens=ids, ends=np.array([len(ids)]))
        rows = PackedText(corpus=corpus, length=1, padding=padding_id(self.tokenizer))
        format = TextFormat.of(self.tokenizer)
        splits = TextSplits(train=rows, test=rows, tokenizer=self.tokenizer, format=format)
        batch: Batch = (self.ids, torch.zeros_like(self.ids))
        shown, _, labels = self.masks.build(splits).masked_for_evaluation(batch)
        return shown, labels


def open_long_text(checkpoint: str, text: str | None, most: int | None = None) -> LongText:
    """Load a model, and a text to judge it on.

    Args:
        checkpoint: what `load_language_model` takes.
        text: a file or a folder, or a name on the hub; None is the held-out text of a run.
        most: tokens of it to take, the first ones; None is all.

    Raises:
        ValueError: there is no such model or no such text, or it cannot be read.
    """
    model, tokenizer = load_language_model(checkpoint)
    run = _run_of(checkpoint)
    data = run.data if run and isinstance(run.data, TextDatasetConfig) else None
    ids = _held_out(checkpoint, data) if text is None else _read(text, data, tokenizer, most)
    task = run.task if run else None
    return LongText(
        name=short_name(checkpoint),
        model=model,
        tokenizer=tokenizer,
        ids=torch.from_numpy(ids[:most].astype(np.int64)).unsqueeze(0),
        text=HELD_OUT if text is None else text,
        trained_length=data.length if data else None,
        precision=run.training.precision if run else "float32",
        masks=task
        if isinstance(task, MaskedLanguageModellingConfig)
        else MaskedLanguageModellingConfig(),
    )


def _run_of(checkpoint: str) -> RunConfig | None:
    """The run that trained a model; None where the folder is another library's."""
    path = Path(checkpoint)
    return read_manifest(path if path.is_dir() else path.parent).run if is_run(path) else None


def _held_out(checkpoint: str, data: TextDatasetConfig | None) -> np.ndarray:
    if data is None:
        raise ValueError(f"{checkpoint!r} tells no held-out text, expected text to be given")
    return np.asarray(held_out_tokens(checkpoint, data))


def _read(
    text: str, data: TextDatasetConfig | None, tokenizer: Tokenizer, most: int | None
) -> np.ndarray:
    """Tokenize a text in the way of the run's, its held-out part where there is one."""
    wanted = data.wanted(streaming=False) if data else Wanted()
    source = find_source(text, wanted, field="text")
    split = source.held_out("train") or next(iter(source.splits))
    frame = tokenizer.frame if data and data.add_special_tokens else None
    reader = CorpusReader(tokenizer=tokenizer, on_error="raise", keeps=False, frame=frame)
    ids = reader.read(source.open(split), text, split, most=most).tokens
    if not len(ids):
        raise ValueError(f"text is {text!r}, where {split} holds no text")
    return np.asarray(ids)


Stream = Int[Tensor, " tokens"]
Sums = Float[Tensor, " length"]


def measure_lengths(
    checkpoint: str, asked: LengthsConfig, *, device: str = "auto", progress: bool = False
) -> LengthScores:
    """Judge a model on one text at each length.

    Args:
        checkpoint: what `load_language_model` takes.
        asked: which lengths, and on what.
        device: as `choose_device` has it.
        progress: draw a bar on stderr.

    Raises:
        ValueError: a length that is not positive, no text, or none that a length can be measured
            on; says why.
    """
    asked.check()
    opened = open_long_text(checkpoint, asked.text, asked.max_tokens)
    model = opened.model.to(choose_device(device, Ranks()))
    stream, labels = _posed(opened)
    told = int((labels != IGNORE_INDEX).sum())
    lengths, left_out = _possible(sorted(asked.lengths), len(stream), model)
    if not lengths or not told:
        reasons = "; ".join(f"not {left.length}, as {left.why}" for left in left_out)
        raise ValueError(f"lengths is {asked.lengths}: {reasons or 'there is nothing to tell'}")
    scores = []
    with tqdm(
        total=len(lengths) * len(stream), unit=" tokens", unit_scale=True, disable=not progress
    ) as bar:
        for length in lengths:
            bar.set_description(f"rows of {length}")
            scores.append(_score(model, opened, stream, labels, length, bar))
    return LengthScores(
        name=opened.name,
        is_causal=isinstance(model, CausalLM),
        trained_length=opened.trained_length,
        text=opened.text,
        tokens=opened.ids.shape[1],
        told=told,
        onescan=__version__,
        scores=tuple(scores),
        left_out=tuple(left_out),
    )


def _posed(opened: LongText) -> tuple[Stream, Stream]:
    """What the model is shown, and what it is to tell at each token."""
    if isinstance(opened.model, MaskedLM):
        shown, labels = opened.masked()
        return shown[0], labels[0]
    return opened.ids[0, :-1], opened.ids[0, 1:]


def _possible(
    lengths: list[int], tokens: int, model: CausalLM | MaskedLM
) -> tuple[list[int], list[LeftOutLength]]:
    """The lengths that can be measured, and the others."""
    position = model.config.position
    places = position.max_tokens if isinstance(position, TokenPositionConfig) else math.inf
    left_out = []
    for length in lengths:
        if length > places:
            why = f"the model has {places} places"
        elif length > tokens:
            why = f"there are {tokens} tokens of text to read"
        else:
            continue
        left_out.append(LeftOutLength(length=length, why=why))
    return [length for length in lengths if length <= min(places, tokens)], left_out


def _score(
    model: CausalLM | MaskedLM,
    opened: LongText,
    stream: Stream,
    labels: Stream,
    length: int,
    bar: "tqdm[NoReturn]",
) -> LengthScore:
    """Judge the model on rows of one length."""
    device = model.network.device
    by_place, counts = torch.zeros(2, length, dtype=torch.float64)
    nats = right = told = 0.0
    for shown, wanted in zip(_rows(stream, length), _rows(labels, length), strict=True):
        with torch.no_grad(), computing(opened.precision, device):
            found = _score_tokens(model, shown.to(device), wanted.to(device))
        losses = found.losses.double().cpu()
        nats, right = nats + losses.sum().item(), right + found.correct.sum().item()
        told += (wanted != IGNORE_INDEX).sum().item()
        if isinstance(model, CausalLM):
            by_place[: shown.shape[1]] += losses.sum(dim=0)
            counts[: shown.shape[1]] += len(shown)
        bar.update(shown.numel())
    return LengthScore(
        length=length,
        loss=nats / told,
        perplexity=perplexity(nats / told),
        accuracy=right / told,
        places=tuple(_places(by_place, counts)) if isinstance(model, CausalLM) else (),
    )


def _score_tokens(model: CausalLM | MaskedLM, shown: Tokens, labels: Tokens) -> TokenScores:
    """Score the labels, in chunks, so that memory for logits stays bounded."""
    if isinstance(model, CausalLM):
        return token_losses(model, shown, labels)
    chosen = labels != IGNORE_INDEX
    hidden, _ = model.network(shown)
    parts = zip(hidden[chosen].split(CHUNK_TOKENS), labels[chosen].split(CHUNK_TOKENS), strict=True)
    told = [score_logits(model.head(x.unsqueeze(0)), label.unsqueeze(0)) for x, label in parts]
    return TokenScores(*(torch.cat(pieces, dim=1) for pieces in zip(*told, strict=True)))


def _rows(stream: Stream, length: int) -> Iterator[Tokens]:
    """Batches of rows; the last one is a row of what is left."""
    whole = len(stream) - len(stream) % length
    yield from stream[:whole].view(-1, length).split(max(1, CHUNK_TOKENS // length))
    if whole < len(stream):
        yield stream[whole:].unsqueeze(0)


def _places(by_place: Sums, counts: Sums) -> Iterator[PlaceScore]:
    """Means over the first place, the second, and then over twice as many each time."""
    begin, end = 0, 1
    while begin < len(counts):
        end = min(end, len(counts))
        loss = by_place[begin:end].sum() / counts[begin:end].sum()
        yield PlaceScore(begin=begin, end=end, loss=loss.item())
        begin, end = end, 2 * end
