"""Rows packed while documents come, from files or a hub too large to keep tokenized."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from onescan.data.base import DataSet, DataState, Example, LoadedBatch, check_data_state
from onescan.data.image_reader import OnError
from onescan.data.order import derive_seed, epoch_order
from onescan.data.text.corpus_reader import LongDocuments, refuse_long
from onescan.data.text.documents import Document, Mark
from onescan.data.text.encode import encode_documents
from onescan.data.text.rows import padding_id, stack_rows, text_length
from onescan.data.text.shards import Shard
from onescan.data.text.tokenizer import Frame, Ids, Tokenizer

BLOCK: DataState = {"block": 0, "turn": 0, "mark": {}, "document": 0, "token": 0}  # a round's first
BEGINNING: DataState = {"row": 0, "round": 0, **BLOCK}
MARK: Mark = {"row": 0, "offset": 0, "line": 0, "group": 0, "state": None}  # some of it, by shard


class StreamedRow(NamedTuple):
    """A row, and what could not be read on the way to it.

    Attributes:
        parts: ids of each document, or of the part of it that is in the row.
        failures: a sentence for each document that was left out.
    """

    parts: tuple[Ids, ...]
    failures: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TextStream(DataSet):
    """Documents packed into rows as they come, shuffled shard by shard and in blocks.

    When all shards have been read, they are read again in another order, so a pass may have any
    number of rows; in the stored order it ends where they do, and its last row is filled up.

    A data_state tells how many rows of the pass came before, which round of the shards it is, which
    of its blocks is being read, where that begins (the turn of its shard, and the shard's mark),
    and how far it has been read: which document is in hand, and how many tokens of that are gone.

    Attributes:
        shards: of documents.
        tokenizer: what encodes them.
        length: tokens of a row.
        count: rows of a pass.
        block: how many neighbours are shuffled with each other.
        on_error: whether a document that cannot be read ends the run, or is left out.
        long_documents: whether one longer than a row goes on in the next, or ends the run.
        frame: ids to add around each part of a document in a row, if any.
    """

    shards: tuple[Shard, ...]
    tokenizer: Tokenizer
    length: int
    count: int
    block: int
    on_error: OnError
    long_documents: LongDocuments
    frame: Frame | None = None

    def __len__(self) -> int:
        return self.count

    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        rows = [example.source.parts for example in examples]
        padding = padding_id(self.tokenizer)
        batch = stack_rows(rows, length=self.length, padding=padding, frame=self.frame)
        return LoadedBatch(batch, tuple(said for e in examples for said in e.source.failures))

    def examples(
        self,
        *,
        seed: int | None,
        epoch: int = 0,
        start: int = 0,
        repeats: int = 1,
        data_state: DataState | None = None,
    ) -> Iterator[tuple[Example, DataState | None]]:
        here, most = data_state or BEGINNING, None if seed is None else self.count
        check_data_state(here, BEGINNING)
        check_data_state({**MARK, **here["mark"]}, MARK)
        for row, after in self._rows(here, seed, epoch):
            first = here["row"] * repeats
            end = first + repeats
            for now in range(max(first, start), end if most is None else min(end, most)):
                chance = None if seed is None else derive_seed(seed, "example", epoch, now)
                yield Example(row, chance), after if now + 1 == end else here
            if most is not None and end >= most:
                return
            here = after

    def _rows(
        self, here: DataState, seed: int | None, epoch: int
    ) -> Iterator[tuple[StreamedRow, DataState]]:
        """Yield rows from a place on, each with the place after it."""
        parts: list[Ids] = []
        failures: list[str] = []
        size = text_length(self.length, self.frame)
        number, room = here["row"], size
        for ids, spot, failed in self._encoded(here, seed, epoch):
            failures += failed
            used = spot["token"]
            while used < len(ids):
                parts.append(ids[used : used + room])
                used, room = used + len(parts[-1]), room - len(parts[-1])
                if not room:
                    number += 1
                    after = {**spot, "row": number, "token": used}
                    yield StreamedRow(tuple(parts), tuple(failures)), after
                    parts, failures, room = [], [], size
        if parts:
            end = {**spot, "row": number + 1, "token": used}
            yield StreamedRow(tuple(parts), tuple(failures)), end

    def _encoded(
        self, here: DataState, seed: int | None, epoch: int
    ) -> Iterator[tuple[Ids, DataState, list[str]]]:
        """Yield the ids of documents, each with its spot, and the failures before it."""
        failures: list[str] = []
        for block, spot in self._blocks(here, seed, epoch):
            order = _order(len(block), seed, "block", spot["round"], spot["block"], epoch=epoch)
            known: list[tuple[int, Document, list[str]]] = []
            for place in range(spot["document"], len(block)):
                document = block[order[place]]
                if self.on_error == "raise":
                    document.check()
                if document.fault:
                    failures.append(document.complaint)
                else:
                    known.append((place, document, failures))
                    failures = []
            texts = (document.text for _, document, _ in known)
            encoded = encode_documents(texts, self.tokenizer, frame=self.frame)
            for (place, document, failed), ids in zip(known, encoded, strict=True):
                if self.long_documents == "raise" and len(ids) > self.length:
                    refuse_long(document, len(ids), self.length)
                token = spot["token"] if place == spot["document"] else 0
                yield ids, {**spot, "document": place, "token": token}, failed

    def _blocks(
        self, here: DataState, seed: int | None, epoch: int
    ) -> Iterator[tuple[list[Document], DataState]]:
        """Yield blocks of documents, each with where it begins and how far it has been read."""
        fresh = {"document": 0, "token": 0}
        for number in count(here["round"]) if seed is not None else [0]:
            spot = here if number == here["round"] else {"round": number, **BLOCK}
            is_empty, block = spot["turn"] == 0 and not spot["mark"], []
            for document, turn, mark in self._documents(spot, seed, epoch):
                is_empty = is_empty and bool(document.fault) and self.on_error == "skip"
                block.append(document)
                if len(block) == self.block:
                    yield block, spot
                    spot = {**spot, "block": spot["block"] + 1, "turn": turn, "mark": mark, **fresh}
                    block = []
            if block:
                yield block, spot
            if is_empty:
                raise ValueError("there is no text in what is streamed")

    def _documents(
        self, spot: DataState, seed: int | None, epoch: int
    ) -> Iterator[tuple[Document, int, Mark]]:
        """Yield a round's documents, each with the turn of its shard and the mark after it."""
        order = _order(len(self.shards), seed, "shards", spot["round"], epoch=epoch)
        mark = spot["mark"]
        for turn in range(spot["turn"], len(order)):
            for document, after in self.shards[order[turn]].read(mark):
                if not document.is_blank:
                    yield document, turn, after
            mark = {}


def _order(count: int, seed: int | None, *purpose: int | str, epoch: int) -> list[int]:
    if seed is None:
        return list(range(count))
    return epoch_order(count, seed=derive_seed(seed, *purpose), epoch=epoch).tolist()
