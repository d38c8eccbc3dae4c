"""Texts, and pairs of texts, as a classifier's input."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from onescan.inputs.sequences import Ids, SequenceFormat, check_texts
from onescan.inputs.tokenizer import TextFormat, Tokenizer, load_tokenizer
from onescan.shapes import Keep, Tokens


class PairEncoder:
    """Encodes one or two texts as one sequence of at most `length` tokens.

    The sequence starts and ends with the tokens that the tokenizer puts around a text. Its end
    token separates two texts: BERT's [CLS] a [SEP] b [SEP], and a 256 b of bytes. RoBERTa, which
    has two separators, gets one.

    Args:
        tokenizer: Tokenizer of both texts, which are read without special tokens.
        length: Maximum number of tokens.

    Raises:
        ValueError: If `length` is too small for a token of each text.
    """

    def __init__(self, tokenizer: Tokenizer, length: int) -> None:
        self.tokenizer, self.length = tokenizer, length
        self.before, self.after = _frame(tokenizer)
        least = len(self.before) + len(self.after) + 3  # a token of each text, and the separator
        if length < least:
            raise ValueError(f"data.length is {length}, expected {least} or more")

    def encode(self, first: str, second: str | None = None) -> tuple[Ids, int | None]:
        """Encode one text or two, truncated at the end, the longer text first.

        Returns:
            The tokens and, for two texts, the number of tokens before the second one.

        Raises:
            ValueError: If there are no tokens, or the tokenizer has no end token to separate two
                texts.
        """
        budget = self.length - len(self.before) - len(self.after)
        if second is None:
            (ids,) = self.tokenizer.encode_many([first])
            return self._join(self.before, ids[:budget], self.after), None
        if self.tokenizer.end is None:
            raise ValueError(
                f"tokenizer {self.tokenizer.name!r} has no token to put between two texts"
            )
        ids, other = self.tokenizer.encode_many([first, second])
        ids, other = truncate_pair(ids, other, budget - 1)
        tokens = self._join(self.before, ids, [self.tokenizer.end], other, self.after)
        return tokens, len(self.before) + len(ids) + 1

    def encode_texts(self, texts: Sequence[str]) -> tuple[list[Ids], list[bool]]:
        """Encode each text as `encode` does, in one call of the tokenizer.

        Returns:
            The tokens of each text, and whether its end was left out.

        Raises:
            ValueError: If a text has no tokens. The message names its index.
        """
        budget = self.length - len(self.before) - len(self.after)
        sequences = self.tokenizer.encode_many(texts)
        for index, ids in enumerate(sequences):
            if not len(ids):
                raise ValueError(f"inputs[{index}] is {texts[index]!r}, which has no tokens")
        tokens = [self._join(self.before, ids[:budget], self.after) for ids in sequences]
        return tokens, [len(ids) > budget for ids in sequences]

    def is_truncated(self, rows: Sequence[Sequence[str]]) -> list[bool]:
        """Return whether each of these texts or pairs of texts is longer than `length`."""
        sizes = [len(ids) for ids in self.tokenizer.encode_many([x for row in rows for x in row])]
        added = len(self.before) + len(self.after)
        truncated, begin = [], 0
        for row in rows:
            tokens = sum(sizes[begin : begin + len(row)]) + added + len(row) - 1
            truncated.append(tokens > self.length)
            begin += len(row)
        return truncated

    def _join(self, *parts: list[int] | Ids) -> Ids:
        tokens = np.concatenate([np.asarray(part, self.tokenizer.dtype) for part in parts])
        if not len(tokens):
            raise ValueError("the text has no tokens")
        return tokens


def _frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer puts before and after a text."""
    text, framed = tokenizer.encode("a"), tokenizer.encode("a", framed=True)
    for begin in range(len(framed) - len(text) + 1):
        if framed[begin : begin + len(text)] == text:
            return framed[:begin], framed[begin + len(text) :]
    raise ValueError(
        f"tokenizer {tokenizer.name!r} encodes a text differently when it adds special tokens"
    )


def truncate_pair(first: Ids, second: Ids, length: int) -> tuple[Ids, Ids]:
    """Truncate two texts to `length` tokens in total, removing them from the longer text.

    >>> [len(part) for part in truncate_pair(np.arange(9), np.arange(3), 8)]
    [5, 3]
    >>> [len(part) for part in truncate_pair(np.arange(9), np.arange(6), 7)]
    [4, 3]
    """
    return (
        first[: max(length - len(second), (length + 1) // 2)],
        second[: max(length - len(first), length // 2)],
    )


@dataclass(frozen=True, kw_only=True)
class PairFormat(SequenceFormat):
    """Texts, or pairs of them, as tokens."""

    text: TextFormat
    """The tokenizer."""
    length: int
    """Maximum number of tokens of a sequence, including special tokens."""

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size

    def encode(self, raw: str | tuple[str, str]) -> Ids:
        return self._encoder.encode(*((raw,) if isinstance(raw, str) else raw))[0]

    def model_input(self, inputs: Sequence[str]) -> tuple[Tokens, Keep]:
        """Convert texts to what the model takes: ``model(*format.model_input(texts))``.

        Returns:
            The tokens, truncated to `length` and padded on the right, and a mask that is False for
            padding, both [B, T].

        Raises:
            ValueError: If there are no texts, one is not a string, or one has no tokens.
            ImportError: If transformers is needed and not installed.
        """
        return super().model_input(check_texts(inputs))

    def save(self, folder: Path) -> None:
        self.text.save(folder)

    def open(self, folder: Path) -> PairEncoder:
        """Return an encoder with the tokenizer saved in a run's folder.

        Raises:
            ValueError: If it is missing or damaged.
            ImportError: If transformers is needed and not installed.
        """
        return PairEncoder(self.text.open(folder), self.length)

    @cached_property
    def _encoder(self) -> PairEncoder:
        if self._folder is not None:
            return self.open(self._folder)
        return PairEncoder(load_tokenizer(self.text.tokenizer), self.length)
