"""Texts as bytes: a token for each byte of UTF-8, and one between two texts."""

from dataclasses import dataclass

import numpy as np

from onescan.data.sequences import Ids, SequenceFormat

SEPARATOR = 256


@dataclass(frozen=True, kw_only=True)
class ByteFormat(SequenceFormat):
    """Texts byte by byte, cut at the end; between two texts of a pair stands a separator."""

    max_length: int
    """Most bytes of a text that are read."""

    @property
    def vocab_size(self) -> int:
        return SEPARATOR + 1

    def encode(self, raw: str | bytes) -> Ids:
        content = raw.encode() if isinstance(raw, str) else raw
        if not content:
            raise ValueError("the text is empty")
        return np.frombuffer(content[: self.max_length], dtype=np.uint8)

    def encode_pair(self, first: str | bytes, second: str | bytes) -> tuple[Ids, int]:
        """Turn two texts into one sequence.

        Returns:
            The tokens, and how many of them are the first text's and the separator's.

        Raises:
            ValueError: one is empty.

        >>> ByteFormat(max_length=2).encode_pair("abc", "d")
        (array([ 97,  98, 256, 100], dtype=int16), 3)
        """
        parts = self.encode(first), np.array([SEPARATOR], dtype=np.int16), self.encode(second)
        return np.concatenate(parts), len(parts[0]) + 1
