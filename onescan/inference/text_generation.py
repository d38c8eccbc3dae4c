"""Use a trained language model: generate text after a prompt, and predict masked tokens."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from onescan.checks import check_whole
from onescan.inputs.sequences import check_unicode
from onescan.inputs.tokenizer import Tokenizer
from onescan.models.causal_lm import CausalLM, Sampling
from onescan.models.masked_lm import MaskedLM
from onescan.shapes import Tokens


class Guess(NamedTuple):
    """A predicted token, as text, and its probability."""

    text: str
    probability: float


def generate_text(
    model: CausalLM,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: Sampling | None = None,
    *,
    max_new_tokens: int,
    generator: torch.Generator | None = None,
) -> Iterator[str]:
    """Yield the text that the model generates after a prompt, piece by piece.

    The prompt followed by the pieces is the decoded text of all tokens.

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
    check_unicode("prompt", prompt)
    context = tokenizer.begin(prompt)
    tokens = model.stream(
        _batch(context, model),
        sampling,
        max_new_tokens=max_new_tokens,
        end=tokenizer.end,
        vocab_size=tokenizer.size,
        generator=generator,
    )
    pieces = tokenizer.stream((int(token) for token, _ in tokens), context)
    first = next(pieces, "")
    # The tokens of a prompt may lack its final spaces, and the first piece then begins with one.
    final = prompt.removeprefix(tokenizer.decode(context))
    yield first.removeprefix(final) if final.isspace() else first
    yield from pieces


@torch.no_grad()
def fill_masks(
    model: MaskedLM, tokenizer: Tokenizer, text: str, *, top_k: int = 5
) -> list[list[Guess]]:
    """Return the most likely tokens for each mask in a text, most likely first.

    Args:
        model: Model in evaluation mode.
        tokenizer: The tokenizer that it was trained with.
        text: Text with mask tokens, "[MASK]" or "<mask>".
        top_k: Number of predictions per mask.

    Raises:
        ValueError: If the tokenizer belongs to another model or has no mask token, or the text
            contains no mask.
    """
    check_whole(1, top_k=top_k)
    tokenizer.check_vocabulary(model.config.vocab_size)
    if tokenizer.mask is None:
        raise ValueError(f"tokenizer {tokenizer.name!r} has no mask token")
    check_unicode("text", text)
    tokens = _batch(tokenizer.encode(text, framed=True), model)
    masked = tokens[0] == tokenizer.mask
    if not masked.any():
        raise ValueError(f"text has no {tokenizer.mask_text} to be filled in: {text!r}")
    probabilities = model(tokens)[0, masked, : tokenizer.size].softmax(-1)
    top = probabilities.topk(min(top_k, tokenizer.size))
    return [
        [Guess(tokenizer.format_token(token), p) for p, token in zip(row, tokens, strict=True)]
        for row, tokens in zip(top.values.tolist(), top.indices.tolist(), strict=True)
    ]


def _batch(ids: list[int], model: CausalLM | MaskedLM) -> Tokens:
    return torch.tensor([ids], device=model.network.device)
