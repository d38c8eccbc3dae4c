"""How well a causal language model tells a text, read in pieces, so that memory stays bounded."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from onescan.models.causal_lm import CausalLM
from onescan.models.token_network import NetworkState
from onescan.shapes import Keep, TokenLogits, Tokens

AT_ONCE = 2048  # tokens of a batch whose logits are held at a time
MOST_NATS = 700  # beyond, their exponential is no float any more
UNTOLD = -100  # a label that is not scored


class Told(NamedTuple):
    """How well each token was told.

    Attributes:
        losses: in nats; 0 where there was nothing to tell.
        right: whether it was the likeliest.
    """

    losses: Float[Tensor, "B T"]
    right: Bool[Tensor, "B T"]


@torch.no_grad()
def tell(
    model: CausalLM,
    tokens: Tokens,
    labels: Tokens,
    state: NetworkState | None = None,
    *,
    keep: Keep | None = None,
    at_once: int = AT_ONCE,
) -> Told:
    """Tell what follows each token; the same as in one call, but for rounding.

    Args:
        model: in evaluation mode.
        tokens: ids, those after the state's; there may be none.
        labels: what follows each of them; -100 is not scored.
        state: what a call of the model returned.
        keep: True for real tokens; padding is on the right.
        at_once: tokens of all rows whose logits are held at a time.
    """
    step = max(1, at_once // max(1, len(tokens)))
    parts = [_nothing(labels)]
    for begin in range(0, tokens.shape[1], step):
        piece = slice(begin, begin + step)
        real = None if keep is None else keep[:, piece]
        logits, state = model(tokens[:, piece], state, keep=real)
        parts.append(compare(logits, labels[:, piece]))
    return Told(*(torch.cat(pieces, dim=1) for pieces in zip(*parts, strict=True)))


def compare(logits: TokenLogits, labels: Tokens) -> Told:
    """Hold scores against what was to be told."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=UNTOLD)
    return Told(losses, logits.argmax(dim=-1) == labels)


def perplexity(loss: float) -> float:
    """Of a mean loss in nats: among how many equally likely tokens it is as hard to choose.

    >>> perplexity(0.0), perplexity(9999.0) < float("inf")
    (1.0, True)
    """
    return math.exp(min(loss, MOST_NATS))


def _nothing(labels: Tokens) -> Told:
    none = labels[:, :0]
    return Told(none.float(), none.bool())
