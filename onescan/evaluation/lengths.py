"""How well a language model tells a text in rows of several lengths, far longer than in training.

The text's documents are joined to one stream, each with the tokenizer's end behind it, and the
stream is cut into rows; a row is one context, whatever documents it is of. The same tokens are told
at every length.
"""

import math
from collections.abc import Iterator
from typing import NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from onescan import __version__
from onescan.evaluation.asked import LengthsConfig
from onescan.evaluation.length_scores import LeftOutLength, LengthScore, LengthScores, PlaceScore
from onescan.evaluation.long_text import LongText, open_long_text
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
from onescan.training.distributed import Ranks, choose_device
from onescan.training.optim import autocast

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
        with torch.no_grad(), autocast(opened.precision, device):
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
