"""All documents of a data set as one row of ids, in memory or mapped from a disk."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from onescan.data.text.tokenizer import Ids


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents that have been tokenized.

    Attributes:
        tokens: ids of all documents, one after the other.
        ends: where each document ends in them.
        left_out: of the first documents that could not be read, where each is and why.
        left_out_count: how many there are of those.
    """

    tokens: Ids
    ends: NDArray[np.int64]
    left_out: tuple[str, ...] = ()
    left_out_count: int = 0

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document."""
        return np.diff(self.ends, prepend=0)

    def part(self, begin: int, end: int) -> "Corpus":
        """Take the tokens from `begin` up to `end`, and the documents that they are of."""
        first = int(np.searchsorted(self.ends, begin, side="right"))
        last = int(np.searchsorted(self.ends, end, side="left"))
        ends = np.minimum(self.ends[first : last + 1], end) - begin
        return replace(self, tokens=self.tokens[begin:end], ends=ends)

    def ended(self, end: int) -> "Corpus":
        """Append `end` to the last document, unless it already ends with it."""
        if self.tokens[-1] == end:
            return self
        ends = self.ends.copy()
        ends[-1] += 1
        return replace(self, tokens=np.append(self.tokens, self.tokens.dtype.type(end)), ends=ends)
