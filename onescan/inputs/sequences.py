"""Token sequences as a classifier's input: bytes, pixels, symbols."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Integer, UInt8

from onescan.inputs.format import Format
from onescan.messages import named_type
from onescan.shapes import Keep, Tokens

Ids = Integer[np.ndarray, " _"]  # of one sequence
GrayPixels = UInt8[np.ndarray, "height width"]
PADDING = 0


class SequenceFormat(Format, ABC):
    """How raw input becomes tokens; one subclass per kind of data."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of token ids."""

    @abstractmethod
    def encode(self, raw: Any) -> Ids:
        """Convert one input to tokens.

        Raises:
            ValueError: If the input is not of this format.
        """

    def model_input(self, inputs: Sequence[Any]) -> tuple[Tokens, Keep]:
        """Convert a batch of inputs, such as texts, to what the model takes: tokens and a mask.

        Returns:
            The tokens, padded on the right, and a mask that is False for padding, both [B, T].

        Raises:
            ValueError: If there are no inputs, or one is not of this format.
        """
        return pad_tokens([self.encode(each) for each in check_batch(inputs)])


SEPARATOR = 256  # between the texts of a pair


@dataclass(frozen=True, kw_only=True)
class ByteFormat(SequenceFormat):
    """Texts as bytes of UTF-8, truncated, with a separator between the two texts of a pair."""

    max_length: int
    """Maximum number of bytes of a text."""

    @property
    def vocab_size(self) -> int:
        return SEPARATOR + 1

    def encode(self, raw: str | bytes) -> Ids:
        content = raw.encode() if isinstance(raw, str) else raw
        if not content:
            raise ValueError("the text is empty")
        return np.frombuffer(content[: self.max_length], dtype=np.uint8)

    def encode_pair(self, first: str | bytes, second: str | bytes) -> tuple[Ids, int]:
        """Encode two texts as one sequence.

        Returns:
            Tokens, and how many of them belong to the first text and the separator.

        Raises:
            ValueError: If a text is empty.

        >>> ByteFormat(max_length=2).encode_pair("abc", "d")
        (array([ 97,  98, 256, 100], dtype=int16), 3)
        """
        parts = self.encode(first), np.array([SEPARATOR], dtype=np.int16), self.encode(second)
        return np.concatenate(parts), len(parts[0]) + 1


LEVELS = 256


@dataclass(frozen=True, kw_only=True)
class PixelFormat(SequenceFormat):
    """Grayscale images of one size: one token per pixel, from 0 for black to 255 for white."""

    height: int
    width: int

    @property
    def vocab_size(self) -> int:
        return LEVELS

    def encode(self, raw: GrayPixels) -> Ids:
        if raw.shape != (self.height, self.width):
            raise ValueError(
                f"an image has {raw.shape[1]} x {raw.shape[0]} pixels, expected "
                f"{self.width} x {self.height}"
            )
        return raw.reshape(-1)


@dataclass(frozen=True, kw_only=True)
class RecallFormat(Format):
    """Token ids: 0 is blank, followed by the keys and then the values."""

    keys: int
    values: int

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return 1 + self.keys + self.values


def check_batch(inputs: Any) -> Any:
    """Return a batch of inputs. Raise ValueError if it is empty, or a single text.

    >>> check_batch("good soup")
    Traceback (most recent call last):
    ValueError: inputs is a single string, expected a list, such as ['good soup']
    """
    if isinstance(inputs, str | bytes):
        kind = "string" if isinstance(inputs, str) else "bytes object"
        raise ValueError(f"inputs is a single {kind}, expected a list, such as [{inputs[:40]!r}]")
    if not len(inputs):
        raise ValueError("inputs is empty, expected at least one")
    return inputs


def check_texts(inputs: Sequence[str]) -> Sequence[str]:
    """Return a batch of texts. Raise ValueError if it is empty, or one is not a Unicode string."""
    for index, text in enumerate(check_batch(inputs)):
        if not isinstance(text, str):
            raise ValueError(f"inputs[{index}] is {named_type(text)}, expected a string")
        check_unicode(f"inputs[{index}]", text)
    return inputs


def check_unicode(name: str, text: str) -> None:
    r"""Raise ValueError if a text has a lone surrogate, which UTF-8 and tokenizers cannot encode.

    >>> check_unicode("prompt", "a\ud800")
    Traceback (most recent call last):
    ValueError: prompt is 'a\ud800', expected Unicode text without lone surrogates
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is {text[:40]!r}, expected Unicode text without lone surrogates"
        ) from error


def pad_tokens(sequences: Sequence[Ids]) -> tuple[Tokens, Keep]:
    """Stack sequences of tokens, padded on the right; also return a mask, False for padding.

    >>> [part.tolist() for part in pad_tokens([np.array([7]), np.array([8, 9])])]
    [[[7, 0], [8, 9]], [[True, False], [True, True]]]
    """
    lengths = torch.tensor([len(tokens) for tokens in sequences])
    positions = torch.arange(int(lengths.max()))
    padded = torch.full((len(sequences), len(positions)), PADDING)
    for row, tokens in zip(padded, sequences, strict=True):
        row[: len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
    return padded, positions < lengths[:, None]
