"""Which form is cheapest: a count of multiplications for each token and head.

    full:   T (K + V)                  scores with all tokens, and their values
    chunk:  C (K + V) + (3 + D) K V    the same inside the chunk, and D states, one a direction

with T and C filled up as `padded` says where decays are diagonal. Of K V, 2 are products with a
state and the rest what else a state costs: fitted by eye to the lengths at which both forms took
equal time on a CPU, forward, for selective decays, K = V = 32, 64 and 128, C = 64, one direction
and both. Measured again in both directions for K = V = 64, where the count says 224, these lie
between 196 and 256 tokens, forward and with gradients: `onescan bench decay --names full chunk
--tokens 96 128 160 196 256 320 400`. The device is left out, as no other was measured.
"""

from typing import NamedTuple

from onescan.ops.chunks import is_known
from onescan.ops.decay_attention.diagonal import padded


class Call(NamedTuple):
    """What the choice depends on.

    Attributes:
        tokens: T.
        key_width: K.
        value_width: V.
        directions: D, 1 where causal, else 2.
        chunk_size: C.
        is_diagonal: whether each key channel has a decay of its own.
        is_learning: whether a gradient is wanted.
    """

    tokens: int
    key_width: int
    value_width: int
    directions: int
    chunk_size: int
    is_diagonal: bool
    is_learning: bool = False


def cheapest(call: Call) -> tuple[str, str]:
    """The form of the lowest count, and the reason in a few words.

    >>> image = Call(
    ...     tokens=197,
    ...     key_width=64,
    ...     value_width=64,
    ...     directions=2,
    ...     chunk_size=64,
    ...     is_diagonal=False,
    ... )
    >>> cheapest(image)
    ('full', '25216 multiplications a token and head, 28672 in chunks')
    >>> cheapest(image._replace(tokens=512))
    ('chunk', '28672 multiplications a token and head, 65536 in full')
    """
    if not is_known(call.tokens):
        return "chunk", "fits any length"
    if call.tokens == 1:
        return "recurrent", "one token"
    all_tokens, chunk_tokens = (
        padded(tokens) if call.is_diagonal else tokens
        for tokens in (call.tokens, min(call.chunk_size, call.tokens))
    )
    states = (3 + call.directions) * call.key_width * call.value_width
    full = all_tokens * (call.key_width + call.value_width)
    chunk = chunk_tokens * (call.key_width + call.value_width) + states
    if full <= chunk:
        return "full", f"{full} multiplications a token and head, {chunk} in chunks"
    return "chunk", f"{chunk} multiplications a token and head, {full} in full"


def cheapest_kernel(call: Call) -> tuple[str, str]:
    """The same among kernels, which hold no scores of all tokens, and whose steps do not learn."""
    if is_known(call.tokens) and call.tokens == 1 and call.directions == 1 and not call.is_learning:
        return "recurrent", "one token"
    return "chunk", "one launch fits any length"
