"""Text made a corpus: tokenized, or taken from what was kept of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np
from tqdm import tqdm

from onescan.data.base import OnError
from onescan.data.order import batched
from onescan.data.text.cache import Entry, keep, open_kept
from onescan.data.text.corpus import Corpus
from onescan.data.text.documents import Document
from onescan.data.text.encode import encode_documents
from onescan.data.text.shards import Shard, read_all
from onescan.data.text.tokenizer import Frame, Ids, Tokenizer

LongDocuments = Literal["continue", "raise"]

SMALL = 1 << 22  # bytes of text, which are tokenized in seconds and not worth keeping
PATIENCE_S = 2  # before a bar is drawn
MOST_TOLD = 10  # documents that cannot be read
GROUP = 4096  # documents put together at once, so that many short ones take little memory


@dataclass(frozen=True, kw_only=True)
class CorpusReader:
    """How documents become a corpus.

    Attributes:
        tokenizer: what encodes them.
        on_error: whether a document that cannot be read ends the run, or is left out.
        keeps: whether what was tokenized is kept on disk.
        frame: ids to add before and after each document, if any.
    """

    tokenizer: Tokenizer
    on_error: OnError
    keeps: bool
    frame: Frame | None = None

    def read(self, shards: tuple[Shard, ...], *what: str, most: int | None = None) -> Corpus:
        """Tokenize shards, or take what was kept of them.

        Args:
            shards: in their order.
            what: words that tell this data from another.
            most: tokens, after which no more is read.

        Raises:
            ValueError: a document cannot be read, and none is to be left out; or there is no text.
        """
        sizes, stamps = [shard.size for shard in shards], [shard.stamp for shard in shards]
        is_small = None not in sizes and sum(size or 0 for size in sizes) < SMALL
        if not self.keeps or is_small or None in stamps:
            return self._tokenize(shards, most)
        tokenizer = self.tokenizer
        entry = Entry.of(
            name=[*what, tokenizer.name, self.on_error, most, self.frame],
            stamp=[stamps, tokenizer.fingerprint(), tokenizer.end],
        )
        with entry.alone():
            kept = open_kept(entry)
            return kept or keep(entry, self._tokenize(shards, most))

    def check_lengths(self, corpus: Corpus, shards: tuple[Shard, ...], length: int) -> None:
        """Raise ValueError for a document longer than a row; says where it is."""
        long = np.flatnonzero(corpus.lengths > length)
        if len(long):
            document = next(islice(self._readable(shards, []), int(long[0]), None))
            refuse_long(document, int(corpus.lengths[long[0]]), length)

    def _tokenize(self, shards: tuple[Shard, ...], most: int | None) -> Corpus:
        faults: list[str] = []
        texts = (document.text for document in self._readable(shards, faults))
        with tqdm(
            desc="tokenizing", unit=" characters", unit_scale=True, delay=PATIENCE_S, leave=False
        ) as bar:
            encoded = encode_documents(texts, self.tokenizer, frame=self.frame, show=bar.update)
            tokens, lengths = [np.empty(0, self.tokenizer.dtype)], [np.empty(0, np.int64)]
            for group in batched(_up_to(most, encoded), GROUP):
                tokens.append(np.concatenate(group))
                lengths.append(np.array([len(ids) for ids in group]))
        return Corpus(
            tokens=np.concatenate(tokens),
            ends=np.concatenate(lengths).cumsum(),
            left_out=tuple(faults[:MOST_TOLD]),
            left_out_count=len(faults),
        )

    def _readable(self, shards: tuple[Shard, ...], faults: list[str]) -> Iterator[Document]:
        for document in read_all(shards):
            if self.on_error == "raise":
                document.check()
            if document.fault:
                faults.append(document.complaint)
            else:
                yield document


def _up_to(most: int | None, documents: Iterator[Ids]) -> Iterator[Ids]:
    """Yield documents until they have so many tokens, and the rest of the last one."""
    before = 0
    for ids in documents:
        yield ids
        before += len(ids)
        if most is not None and before >= most:
            return


def refuse_long(document: Document, tokens: int, length: int) -> None:
    """Raise ValueError for a document longer than a row."""
    raise ValueError(
        f"{document.place}: the document has {tokens} tokens, and a row has {length}; raise "
        "data.length, or let data.long_documents be 'continue'"
    )
