"""Rows of tokens, with packed documents or one each, tokenized beforehand or while streaming."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from onescan.experiments.data.base import (
    DataSet,
    DataState,
    Example,
    LoadedBatch,
    OnError,
    check_data_state,
)
from onescan.experiments.data.order import BlockStart, Mark, derive_seed, epoch_order, read_blocks
from onescan.experiments.data.share import WHOLE, Share
from onescan.experiments.data.text.corpus import (
    Corpus,
    LongDocuments,
    encode_documents,
    raise_long_document,
)
from onescan.experiments.data.text.lines import Document, Documents
from onescan.experiments.data.text.source import Shard
from onescan.inputs.tokenizer import Frame, Ids, Tokenizer
from onescan.shapes import Tokens

Spans = tuple[tuple[int, int], ...]  # of a corpus' tokens, each within one document

PADDING = -1  # document number of padding
FIRST: DataState = {
    "row": 0,
    "round": 0,
    "block": 0,
    "turn": 0,
    "mark": {},
    "document": 0,
    "token": 0,
}
MARK: Mark = {"row": 0, "offset": 0, "line": 0, "group": 0, "state": None}  # fields of all shards


def padding_id(tokenizer: Tokenizer) -> int:
    """Return the id of padding."""
    return 0 if tokenizer.end is None else tokenizer.end


def text_length(length: int, frame: Frame | None) -> int:
    """Return how many tokens of documents fit into a row: two fewer if it may need a frame."""
    return length if frame is None else length - len(frame)


def first_tokens(ids: Ids, length: int, frame: Frame | None) -> Ids:
    """Return the first tokens of a document, at most `length` with the end of the frame."""
    return ids if len(ids) <= length else ids[: length if frame is None else length - 1]


def stack_rows(
    rows: Sequence[Sequence[Ids]],
    *,
    length: int,
    padding: int,
    frame: Frame | None = None,
    share: Share = WHOLE,
) -> tuple[Tokens, Int[Tensor, "B row"]]:
    """Stack rows, each given as parts of documents, and pad them.

    With a share, each row contains only the input tokens of that shard and the token after them,
    which is the label of the last one. If parts are memory-mapped, no other tokens are read.

    Args:
        rows: Parts of documents, at most `length` tokens per row with their frame.
        length: Tokens per row.
        padding: Id of padding.
        frame: Ids to add before and after each part, unless it already starts or ends with them.
        share: Shard of the T - 1 inputs of each row to return. The default is all of them.

    Returns:
        Ids, [B, T], or with a share of n inputs, [B, n + 1]; and document numbers of whole rows,
        [B, T], counted from 0 in each row, -1 for padding.
    """
    shard = share.slice(length - 1)
    tokens = np.full((len(rows), shard.stop + 1 - shard.start), padding, np.int64)
    documents = np.full((len(rows), length), PADDING, np.int64)
    for i, parts in enumerate(rows):
        if frame is not None:
            parts = [_framed(part, frame) for part in parts]
        ends = np.cumsum([len(part) for part in parts])
        if share.size > 1:
            parts = [
                part[
                    max(shard.start + len(part) - end, 0) : max(shard.stop + 1 + len(part) - end, 0)
                ]
                for part, end in zip(parts, ends, strict=True)
            ]
        ids = np.concatenate(parts)
        tokens[i, : len(ids)] = ids
        documents[i, : ends[-1]] = np.repeat(np.arange(len(parts)), np.diff(ends, prepend=0))
    return torch.from_numpy(tokens), torch.from_numpy(documents)


def _framed(part: Ids, frame: Frame) -> Ids:
    before = [] if part[0] == frame.begin else [frame.begin]
    after = [] if part[-1] == frame.end else [frame.end]
    return np.concatenate([np.array(before, part.dtype), part, np.array(after, part.dtype)])


@dataclass(frozen=True, kw_only=True)
class TextRows(DataSet):
    """Rows of tokenized documents.

    Attributes:
        corpus: The documents.
        length: Tokens per row.
        padding: Id of padding.
        frame: Ids to add around each part of a document in a row, if any.
        share: Shard of each row to read; see `stack_rows`.
    """

    corpus: Corpus
    length: int
    padding: int
    frame: Frame | None = None
    share: Share = WHOLE

    def shared(self, share: Share) -> "TextRows":
        return replace(self, share=share)

    def examples(
        self,
        *,
        seed: int | None,
        epoch: int = 0,
        start: int = 0,
        repeats: int = 1,
        data_state: DataState | None = None,
    ) -> Iterator[tuple[Example, DataState | None]]:
        del data_state  # rows have random access
        cut = self._cutter(seed, epoch)
        rows = range(len(self)) if seed is None else _order(len(self), seed, "rows", epoch)
        for index in range(start, len(self)):
            example_seed = None if seed is None else derive_seed(seed, "example", epoch, index)
            yield Example(cut(int(rows[index // repeats])), example_seed), None

    @abstractmethod
    def _cutter(self, seed: int | None, epoch: int) -> Callable[[int], Spans]:
        """Return a function from the index of a row to its spans in an epoch."""

    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        rows = [
            [self.corpus.tokens[begin:end] for begin, end in example.source] for example in examples
        ]
        batch = stack_rows(
            rows, length=self.length, padding=self.padding, frame=self.frame, share=self.share
        )
        return LoadedBatch(batch)


class TruncatedText(TextRows):
    """Rows with the first tokens of one document each, padded; shuffled in every epoch."""

    def __len__(self) -> int:
        return int(np.count_nonzero(self.corpus.lengths))

    @property
    def truncated(self) -> tuple[int, int]:
        """Number of documents that are longer than a row, and of their tokens that are cut off."""
        longer = self.corpus.lengths[self.corpus.lengths > self.length]
        kept = self.length if self.frame is None else self.length - 1  # and the frame's end
        return len(longer), int(longer.sum()) - kept * len(longer)

    def _cutter(self, seed: int | None, epoch: int) -> Callable[[int], Spans]:
        lengths, ends = self.corpus.lengths, self.corpus.ends
        documents = np.flatnonzero(lengths)

        def cut(row: int) -> Spans:
            end = int(ends[documents[row]])
            begin = end - int(lengths[documents[row]])
            tokens = first_tokens(self.corpus.tokens[begin:end], self.length, self.frame)
            return ((begin, begin + len(tokens)),)

        return cut


class PackedText(TextRows):
    """Documents packed into rows.

    In each epoch, documents are shuffled and concatenated into a circle, which is cut into rows at
    a random offset; then the rows are shuffled. Thus every token is in one row of every epoch, and
    rows differ between epochs, even for a single document. A document cut off at the end of a row
    continues at the beginning of another. In the stored order, rows are cut from the beginning.
    The last row is padded.
    """

    def __len__(self) -> int:
        return -(-len(self.corpus.tokens) // text_length(self.length, self.frame))

    def _cutter(self, seed: int | None, epoch: int) -> Callable[[int], Spans]:
        circle, size = _Circle.of(self.corpus, seed, epoch), text_length(self.length, self.frame)
        return lambda row: circle.cut(row * size, (row + 1) * size)


@dataclass(frozen=True, kw_only=True)
class _Circle:
    """Documents in the order of an epoch, joined into a circle: the first follows the last.

    Attributes:
        begins: Where each document begins in the corpus.
        ends: Where each ends on the circle.
        offset: Where rows begin on the circle.
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
        """Return the spans from `begin` to `end`, relative to the offset, at most once around."""
        total = int(self.ends[-1])
        position, left = (self.offset + begin) % total, min(end, total) - begin
        document = int(np.searchsorted(self.ends, position, side="right"))
        spans = []
        while left:
            previous_end = int(self.ends[document - 1]) if document else 0
            first = int(self.begins[document]) + position - previous_end
            taken = min(left, int(self.ends[document]) - position)
            if taken:  # a document may have no tokens
                spans.append((first, first + taken))
            position, left, document = position + taken, left - taken, document + 1
            if document == len(self.ends):
                position = document = 0
        return tuple(spans)


def _order(count: int, seed: int, purpose: str, epoch: int) -> NDArray[np.int64]:
    return epoch_order(count, seed=derive_seed(seed, purpose), epoch=epoch).numpy()


class StreamedRow(NamedTuple):
    """A row of a stream, and what could not be read before it.

    Attributes:
        parts: Ids of each document, or of its part in this row.
        failures: A message for each document that was skipped.
    """

    parts: tuple[Ids, ...]
    failures: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TextStream(DataSet):
    """Rows of documents that are tokenized as they are read, shuffled by shards and in blocks.

    After the last shard, all are read again in another order, in rounds, so an epoch may have any
    number of rows. In the stored order, the stream ends with the last shard, and its last row is
    padded.

    A DataState is the number of rows of the epoch (`row`); the round of the shards (`round`); the
    number of the current block (`block`), the position of its first shard in the shuffled order
    (`turn`), and its beginning in that shard (`mark`); and the current document of the block
    (`document`) with the number of its tokens that are already used (`token`).

    Attributes:
        shards: Shards of documents.
        tokenizer: Tokenizer to use.
        length: Tokens per row.
        count: Rows per epoch.
        block: Number of consecutive documents that are shuffled with each other.
        on_error: Whether an unreadable document raises an error or is skipped.
        long_documents: Whether a document longer than a row continues in the next, or raises an
            error.
        frame: Ids to add around each part of a document in a row, if any.
        packing: Whether to pack documents; otherwise, each row contains the first tokens of one.
        share: Shard of each row to return; see `stack_rows`.
    """

    shards: tuple[Shard, ...]
    tokenizer: Tokenizer
    length: int
    count: int
    block: int
    on_error: OnError
    long_documents: LongDocuments
    frame: Frame | None = None
    packing: bool = True
    share: Share = WHOLE

    def __len__(self) -> int:
        return self.count

    def shared(self, share: Share) -> "TextStream":
        return replace(self, share=share)

    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        rows = [example.source.parts for example in examples]
        padding = padding_id(self.tokenizer)
        batch = stack_rows(
            rows, length=self.length, padding=padding, frame=self.frame, share=self.share
        )
        return LoadedBatch(batch, tuple(message for e in examples for message in e.source.failures))

    def examples(
        self,
        *,
        seed: int | None,
        epoch: int = 0,
        start: int = 0,
        repeats: int = 1,
        data_state: DataState | None = None,
    ) -> Iterator[tuple[Example, DataState | None]]:
        state, limit = data_state or FIRST, None if seed is None else self.count
        check_data_state(state, FIRST)
        check_data_state({**MARK, **state["mark"]}, MARK)
        find_rows = self._rows if self.packing else self._truncated_rows
        for row, after in find_rows(state, seed, epoch):
            begin = state["row"] * repeats
            end = begin + repeats
            for index in range(max(begin, start), end if limit is None else min(end, limit)):
                example_seed = None if seed is None else derive_seed(seed, "example", epoch, index)
                yield Example(row, example_seed), after if index + 1 == end else state
            if limit is not None and end >= limit:
                return
            state = after

    def _rows(
        self, state: DataState, seed: int | None, epoch: int
    ) -> Iterator[tuple[StreamedRow, DataState]]:
        """Yield rows, each with the state after it."""
        size = text_length(self.length, self.frame)
        number, remaining = state["row"], size
        parts: list[Ids] = []
        failures: list[str] = []
        for ids, position, failed in self._documents(state, seed, epoch):
            failures += failed
            used = position["token"]
            while used < len(ids):
                parts.append(ids[used : used + remaining])
                used, remaining = used + len(parts[-1]), remaining - len(parts[-1])
                if not remaining:
                    number += 1
                    after = {**position, "row": number, "token": used}
                    yield StreamedRow(tuple(parts), tuple(failures)), after
                    parts, failures, remaining = [], [], size
        if parts:
            after = {**position, "row": number + 1, "token": used}
            yield StreamedRow(tuple(parts), tuple(failures)), after

    def _truncated_rows(
        self, state: DataState, seed: int | None, epoch: int
    ) -> Iterator[tuple[StreamedRow, DataState]]:
        """Yield one row per document, with the state after it."""
        number = state["row"]
        failures: list[str] = []
        for ids, position, failed in self._documents(state, seed, epoch):
            failures += failed
            if position["token"] or not len(ids):  # already used
                continue
            number += 1
            row = StreamedRow((first_tokens(ids, self.length, self.frame),), tuple(failures))
            yield row, {**position, "row": number, "token": len(ids)}
            failures = []

    def _documents(
        self, state: DataState, seed: int | None, epoch: int
    ) -> Iterator[tuple[Ids, DataState, list[str]]]:
        """Yield the ids of documents, each with its state and the failures before it."""
        failures: list[str] = []
        for round in count(state["round"]) if seed is not None else [0]:
            if round != state["round"]:
                state = {**FIRST, "round": round}
            has_text = state["turn"] > 0 or bool(state["mark"])  # then an earlier block had text
            blocks = read_blocks(
                self._read_shard,
                shards=len(self.shards),
                size=self.block,
                start=BlockStart(state["block"], state["turn"], state["mark"]),
                seed=seed,
                epoch=epoch,
                round=round,
            )
            for block in blocks:
                readable: list[tuple[int, Document, list[str]]] = []
                for index in range(state["document"], len(block.items)):
                    document = block.items[index]
                    if self.on_error == "raise":
                        document.check()
                    if document.fault:
                        failures.append(document.message)
                    else:
                        readable.append((index, document, failures))
                        failures = []
                has_text = has_text or bool(readable)
                texts = (document.text for _, document, _ in readable)
                encoded = encode_documents(texts, self.tokenizer, frame=self.frame)
                for (index, document, failed), ids in zip(readable, encoded, strict=True):
                    if self.long_documents == "raise" and len(ids) > self.length:
                        raise_long_document(document, len(ids), self.length)
                    token = state["token"] if index == state["document"] else 0
                    yield ids, {**state, "document": index, "token": token}, failed
                end = block.end
                state = {
                    **FIRST,
                    "round": round,
                    "block": end.block,
                    "turn": end.shard,
                    "mark": end.mark,
                }
            if not has_text:
                raise ValueError("there is no text in the stream")

    def _read_shard(self, index: int, mark: Mark) -> Documents:
        pairs = self.shards[index].read(mark)
        return ((document, after) for document, after in pairs if not document.is_blank)
