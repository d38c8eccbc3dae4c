"""Use a trained language model: generate text after a prompt, and fill in masked words."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from onescan.checks import check_positive
from onescan.data.text import Tokenizer
from onescan.models.causal_lm import CausalLM, Sampling
from onescan.models.masked_lm import MaskedLM
from onescan.shapes import Tokens


class Guess(NamedTuple):
    """A word that may stand where one is masked.

    Attributes:
        text: the word, or the part of a word that one token is.
        share: its probability.
    """

    text: str
    share: float


def generate_text(
    model: CausalLM,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: Sampling | None = None,
    *,
    max_new_tokens: int,
    generator: torch.Generator | None = None,
) -> Iterator[str]:
    """Yield the text that the model generates after a prompt, piece by piece, until its end.

    Args:
        model: Model in evaluation mode.
        tokenizer: The tokenizer that it was trained with.
        prompt: Beginning of the text. If it is empty, the model starts a new text.
        sampling: How to choose the next token. ``None`` takes the most likely one.
        max_new_tokens: Maximum number of tokens to generate.
        generator: Source of randomness. ``None`` is torch's global generator.

    Raises:
        ValueError: If the tokenizer belongs to another model, or the prompt has no tokens.
    """
    tokenizer.check_vocabulary(model.config.vocab_size)
    _check_text("prompt", prompt)
    tokens = model.stream(
        _batch(tokenizer.begin(prompt), model),
        sampling,
        max_new_tokens=max_new_tokens,
        end=tokenizer.end,
        vocab_size=tokenizer.size,
        generator=generator,
    )
    yield from tokenizer.stream(int(token) for token, _ in tokens)


@torch.no_grad()
def fill_masks(
    model: MaskedLM, tokenizer: Tokenizer, text: str, *, top: int = 5
) -> list[list[Guess]]:
    """The likeliest words for each mask in a text, likeliest first.

    Args:
        model: in evaluation mode.
        tokenizer: the one that it was trained with.
        text: with the tokenizer's mask in it, "[MASK]" or "<mask>".
        top: guesses for each.

    Raises:
        ValueError: the tokenizer is of another model, or there is no mask.
    """
    check_positive(top=top)
    tokenizer.check_vocabulary(model.config.vocab_size)
    if tokenizer.mask is None:
        raise ValueError(f"tokenizer {tokenizer.name!r} has no mask")
    _check_text("text", text)
    tokens = _batch(tokenizer.encode(text, framed=True), model)
    places = (tokens[0] == tokenizer.mask).nonzero()[:, 0]
    if not len(places):
        raise ValueError(f"text has no {tokenizer.mask_text} to be filled in: {text!r}")
    shares = model(tokens)[0, places, : tokenizer.size].softmax(-1)
    return [
        [
            Guess(tokenizer.format_token(token), share)
            for share, token in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
        for best in (row.topk(min(top, len(row))) for row in shares)
    ]


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is no text in UTF-8, from character {error.start} on") from error


def _batch(ids: list[int], model: CausalLM | MaskedLM) -> Tokens:
    return torch.tensor([ids], device=model.network.device)
