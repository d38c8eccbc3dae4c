"""One text or two as one sequence of tokens, framed as the tokenizer frames a text."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from onescan.data.sequences import SequenceFormat
from onescan.data.text import TextFormat, Tokenizer, load_tokenizer

Ids = Integer[np.ndarray, " _"]


class PairEncoder:
    """Texts to tokens, at most `length` of them.

    What the tokenizer puts before and after a text stands there too, and the token that it ends a
    text with between two of them: [CLS] a [SEP] b [SEP] of BERT's, and a 256 b of bytes. RoBERTa's
    tokenizer, which has two in the middle, gets one.

    Args:
        tokenizer: of both texts; what is special to it is text in them.
        length: tokens of a sequence.

    Raises:
        ValueError: a sequence is too short to hold a token of each text.
    """

    def __init__(self, tokenizer: Tokenizer, length: int) -> None:
        self.tokenizer, self.length = tokenizer, length
        self.before, self.after = _frame(tokenizer)
        # a token of each text, and one between them
        least = len(self.before) + len(self.after) + 3
        if length < least:
            raise ValueError(f"data.length is {length}, expected {least} or more")

    def encode(self, first: str, second: str | None = None) -> tuple[Ids, int | None]:
        """Make a sequence; texts that are too long lose their last tokens, the longer text first.

        Returns:
            The tokens, and of two texts how many are before the second one.

        Raises:
            ValueError: it has no tokens, or the tokenizer has none to put between two texts.
        """
        if second is None:
            (ids,) = self.tokenizer.encode_many([first])
            kept = ids[: self.length - len(self.before) - len(self.after)]
            return self._joined(self.before, kept, self.after), None
        ours, theirs = self.tokenizer.encode_many([first, second])
        separator = [self._separator()]
        room = self.length - len(self.before) - len(separator) - len(self.after)
        ours, theirs = shortened(ours, theirs, room)
        tokens = self._joined(self.before, ours, separator, theirs, self.after)
        return tokens, len(self.before) + len(ours) + len(separator)

    def _separator(self) -> int:
        if self.tokenizer.end is None:
            raise ValueError(
                f"tokenizer {self.tokenizer.name!r} has no token to put between two texts"
            )
        return self.tokenizer.end

    def _joined(self, *parts: list[int] | Ids) -> Ids:
        tokens = np.concatenate([np.asarray(part, self.tokenizer.dtype) for part in parts])
        if not len(tokens):
            raise ValueError("the text has no tokens")
        return tokens


@dataclass(frozen=True, kw_only=True)
class PairFormat(SequenceFormat):
    """Texts, or pairs of them, as tokens."""

    text: TextFormat
    """The tokenizer."""
    length: int
    """Tokens of a sequence, the tokenizer's own among them."""

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size

    def encode(self, raw: str | tuple[str, str]) -> Ids:
        return self._encoder.encode(*((raw,) if isinstance(raw, str) else raw))[0]

    def save(self, folder: Path) -> None:
        self.text.save(folder)

    def open(self, folder: Path) -> PairEncoder:
        """Encode with the tokenizer that was saved in a run's folder.

        Raises:
            ValueError: it is missing or damaged.
            ImportError: transformers is needed and not installed.
        """
        return PairEncoder(self.text.open(folder), self.length)

    @cached_property
    def _encoder(self) -> PairEncoder:
        return PairEncoder(load_tokenizer(self.text.tokenizer), self.length)


def _frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and after a text."""
    text, framed = tokenizer.encode("a"), tokenizer.encode("a", framed=True)
    for begin in range(len(framed) - len(text) + 1):
        if framed[begin : begin + len(text)] == text:
            return framed[:begin], framed[begin + len(text) :]
    raise ValueError(f"tokenizer {tokenizer.name!r} frames a text by changing it")


def shortened(first: Ids, second: Ids, most: int) -> tuple[Ids, Ids]:
    """Cut two texts to `most` tokens in all, as by taking one off the longer again and again.

    >>> [len(part) for part in shortened(np.arange(9), np.arange(3), 8)]
    [5, 3]
    >>> [len(part) for part in shortened(np.arange(9), np.arange(6), 7)]
    [4, 3]
    """
    return (
        first[: max(most - len(second), (most + 1) // 2)],
        second[: max(most - len(first), most // 2)],
    )
