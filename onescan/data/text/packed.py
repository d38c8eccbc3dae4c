"""Rows cut from documents that lie end to end, in another order and elsewhere in each epoch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onescan.data.base import DataSet, DataState, Example, LoadedBatch
from onescan.data.order import derive_seed, epoch_order
from onescan.data.text.corpus import Corpus
from onescan.data.text.rows import stack_rows, text_length
from onescan.data.text.tokenizer import Frame

Spans = tuple[tuple[int, int], ...]  # of a corpus' tokens, each of one document


@dataclass(frozen=True, kw_only=True)
class PackedText(DataSet):
    """Tokenized documents packed into rows.

    In an epoch, documents are shuffled and laid end to end in a circle, which is cut into rows from
    a random place on; then the rows are shuffled. So every token is in one row of every epoch, and
    no two epochs cut alike, be there many documents or one. What is cut goes on at the beginning of
    another row. In the stored order, rows are cut from the beginning on. The last row that is cut
    is filled up with padding.

    Attributes:
        corpus: the documents.
        length: tokens of a row.
        padding: the id where a row is over.
        frame: ids to add around each part of a document in a row, if any.
    """

    corpus: Corpus
    length: int
    padding: int
    frame: Frame | None = None

    def __len__(self) -> int:
        return -(-len(self.corpus.tokens) // text_length(self.length, self.frame))

    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        rows = [
            [self.corpus.tokens[begin:end] for begin, end in example.source] for example in examples
        ]
        batch = stack_rows(rows, length=self.length, padding=self.padding, frame=self.frame)
        return LoadedBatch(batch)

    def examples(
        self,
        *,
        seed: int | None,
        epoch: int = 0,
        start: int = 0,
        repeats: int = 1,
        data_state: DataState | None = None,
    ) -> Iterator[tuple[Example, DataState | None]]:
        del data_state  # every row's place can be looked up
        circle = _Circle.of(self.corpus, seed, epoch)
        size = text_length(self.length, self.frame)
        rows = range(len(self)) if seed is None else _order(len(self), seed, "rows", epoch)
        for turn in range(start, len(self)):
            row = int(rows[turn // repeats])
            chance = None if seed is None else derive_seed(seed, "example", epoch, turn)
            yield Example(circle.cut(row * size, (row + 1) * size), chance), None


@dataclass(frozen=True, kw_only=True)
class _Circle:
    """Documents end to end, the last one before the first.

    Attributes:
        begins: where each document begins in the corpus, in the order of the circle.
        ends: where each ends on the circle.
        offset: where on the circle rows begin.
    """

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    offset: int

    @classmethod
    def of(cls, corpus: Corpus, seed: int | None, epoch: int) -> "_Circle":
        lengths, total = corpus.lengths, len(corpus.tokens)
        begins = corpus.ends - lengths
        if seed is None:
            return cls(begins=begins, ends=np.asarray(corpus.ends), offset=0)
        order = _order(len(lengths), seed, "documents", epoch)
        return cls(
            begins=begins[order],
            ends=lengths[order].cumsum(),
            offset=derive_seed(seed, "offset", epoch) % total,
        )

    def cut(self, begin: int, end: int) -> Spans:
        """Say what lies from `begin` to `end` after the offset, or until the circle is closed."""
        total = int(self.ends[-1])
        place, left = (self.offset + begin) % total, min(end, total) - begin
        document = int(np.searchsorted(self.ends, place, side="right"))
        spans = []
        while left:
            last = int(self.ends[document - 1]) if document else 0
            first = int(self.begins[document]) + place - last
            taken = min(left, int(self.ends[document]) - place)
            if taken:  # a document may be without tokens
                spans.append((first, first + taken))
            place, left, document = place + taken, left - taken, document + 1
            if document == len(self.ends):
                place = document = 0
        return tuple(spans)


def _order(count: int, seed: int, purpose: str, epoch: int) -> NDArray[np.int64]:
    return epoch_order(count, seed=derive_seed(seed, purpose), epoch=epoch).numpy()
