"""Expressions of ListOps as tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onescan.inputs.sequences import Ids, SequenceFormat

PADDING = 0
DIGITS = tuple(range(1, 11))  # the token of digit d is 1 + d
OPERATORS = MAX, MIN, MED, SM = 11, 12, 13, 14
END = 15
VOCABULARY = ("<pad>", *"0123456789", "[MAX", "[MIN", "[MED", "[SM", "]")
"""Symbol of each token."""


TOKENS = {symbol: token for token, symbol in enumerate(VOCABULARY) if token != PADDING}
WITHOUT_PARENTHESES = str.maketrans("()", "  ")


def encode(text: str) -> list[int]:
    """Convert an expression, written with spaces between symbols, to tokens.

    Published files also contain parentheses. They are redundant and are ignored.

    Raises:
        ValueError: If a symbol is unknown. The message names it and its position.

    >>> encode("( ( ( [MAX 2 ) 9 ) ] )")
    [11, 3, 10, 15]
    """
    symbols = text.translate(WITHOUT_PARENTHESES).split()
    try:
        return [TOKENS[symbol] for symbol in symbols]
    except KeyError as error:
        unknown = str(error.args[0])
        raise ValueError(
            f"symbol {symbols.index(unknown)} of the expression is {unknown!r}, expected one of "
            f"{' '.join(TOKENS)}"
        ) from None


def decode(tokens: Sequence[int]) -> str:
    """Convert tokens to text, without padding.

    Raises:
        ValueError: If a token is not in the vocabulary. The message names it and its position.

    >>> decode([11, 3, 10, 15, 0, 0])
    '[MAX 2 9 ]'
    """
    for index, token in enumerate(tokens):
        if not PADDING <= token <= END:
            raise ValueError(f"tokens[{index}] is {token}, expected {PADDING} to {END}")
    return " ".join(VOCABULARY[token] for token in tokens if token != PADDING)


@dataclass(frozen=True, kw_only=True)
class ListOpsFormat(SequenceFormat):
    """Written expressions such as `[MAX 2 9 ]`, one token per symbol."""

    @property
    def vocab_size(self) -> int:
        return len(VOCABULARY)

    def encode(self, raw: str) -> Ids:
        return np.array(encode(raw), dtype=np.uint8)
