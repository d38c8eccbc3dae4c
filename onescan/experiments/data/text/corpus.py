"""Tokenized documents, in memory or cached on disk and mapped into memory."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from onescan.cache import CACHE, cache_root
from onescan.checkpoint.files import remove, write_atomically
from onescan.experiments.data.base import OnError
from onescan.experiments.data.order import batched
from onescan.experiments.data.text.lines import Document
from onescan.experiments.data.text.source import Shard, read_documents
from onescan.inputs.tokenizer import Frame, Ids, Tokenizer
from onescan.progress import progress_bar

LongDocuments = Literal["continue", "raise"]

PIECE = 1 << 16  # minimum characters of a piece; longer texts are split and encoded in parallel
BOUNDARY = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")  # a space belongs to the word after it
CHARACTERS_PER_CALL = 1 << 20  # each needs some hundred bytes of memory while it is encoded
DOCUMENTS_PER_ARRAY = 4096  # concatenated at once, because small arrays take much memory
MAX_MESSAGES = 10  # documents that cannot be read
PROGRESS_DELAY_S = 2  # before a progress bar appears

VERSION = 2  # of the cache
MIN_CACHED_BYTES = 1 << 22  # smaller texts are tokenized in seconds and not cached
TOKENS, ENDS, NOTES = "tokens.npy", "ends.npy", "notes.json"


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Tokenized documents.

    Attributes:
        tokens: Ids of all documents, one after the other.
        ends: Where each document ends in them.
        left_out: Messages for the first documents that could not be read.
        left_out_count: How many could not be read.
        blank_count: How many were empty or white space, and are left out.
    """

    tokens: Ids
    ends: NDArray[np.int64]
    left_out: tuple[str, ...] = ()
    left_out_count: int = 0
    blank_count: int = 0

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each document."""
        return np.diff(self.ends, prepend=0)

    def part(self, begin: int, end: int) -> "Corpus":
        """Return the tokens from `begin` up to `end`, and the documents they belong to."""
        first = int(np.searchsorted(self.ends, begin, side="right"))
        last = int(np.searchsorted(self.ends, end, side="left"))
        ends = np.minimum(self.ends[first : last + 1], end) - begin
        return replace(self, tokens=self.tokens[begin:end], ends=ends)

    def with_end(self, end: int) -> "Corpus":
        """Append the token `end` to the last document, unless it already ends with it."""
        if self.tokens[-1] == end:
            return self
        ends = self.ends.copy()
        ends[-1] += 1
        return replace(self, tokens=np.append(self.tokens, self.tokens.dtype.type(end)), ends=ends)


# Encoding


def encode_documents(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    *,
    frame: Frame | None = None,
    show: Callable[[int], object] | None = None,
) -> Iterator[Ids]:
    """Yield the ids of each text, followed by the tokenizer's end or surrounded by a frame.

    Long texts are split between words, which does not change the ids of most tokenizers; those that
    prepend a space to every text also prepend one to each piece.

    Args:
        texts: Texts to encode.
        tokenizer: Tokenizer to use.
        frame: Ids to add before and after each text. None adds only `tokenizer.end` after it.
        show: Called with the number of characters encoded since the last call.
    """
    begin, end = (None, tokenizer.end) if frame is None else frame
    before, after = (
        [] if token is None else [np.array([token], tokenizer.dtype)] for token in (begin, end)
    )
    document: list[Ids] = []
    for batch in _batches(texts):
        encoded = tokenizer.encode_many([piece for piece, _ in batch])
        for ids, (_, is_last) in zip(encoded, batch, strict=True):
            document.append(ids)
            if is_last:
                yield np.concatenate([*before, *document, *after])
                document = []
        if show:
            show(sum(len(piece) for piece, _ in batch))


def split_text(text: str, size: int) -> Iterator[str]:
    r"""Split a text between words or lines, into pieces of at least `size` characters.

    >>> list(split_text("ab\ncd\n\nef gh", 3))
    ['ab\n', 'cd\n\nef', ' gh']
    """
    begin = 0
    while cut := BOUNDARY.search(text, begin + size):
        yield text[begin : cut.start()]
        begin = cut.start()
    yield text[begin:]


def _batches(texts: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """Group the pieces of texts, each with whether it is the last of its text."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for text in texts:
        pieces = list(split_text(text, PIECE))
        for number, piece in enumerate(pieces, start=1):
            batch.append((piece, number == len(pieces)))
            size += len(piece)
            if size >= CHARACTERS_PER_CALL:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def character_bar(description: str) -> "tqdm[Any]":
    """Return a progress bar over characters that appears only for slow work."""
    return progress_bar(
        None,
        desc=description,
        unit=" characters",
        unit_scale=True,
        delay=PROGRESS_DELAY_S,
        leave=False,
    )


# Reading


@dataclass(frozen=True, kw_only=True)
class CorpusReader:
    """Tokenizes text, or reads it from the cache.

    Attributes:
        tokenizer: Tokenizer to use.
        on_error: Whether an unreadable document raises an error or is skipped.
        cache: Whether to cache tokenized text on disk, unless it is small.
        frame: Ids to add before and after each document, if any.
    """

    tokenizer: Tokenizer
    on_error: OnError = "raise"
    cache: bool = False
    frame: Frame | None = None

    def read(
        self,
        shards: Sequence[Shard],
        *names: str,
        max_tokens: int | None = None,
        max_documents: int | None = None,
    ) -> Corpus:
        """Tokenize shards, or read them from the cache.

        Args:
            shards: The text, in order.
            names: What distinguishes this text from others in the cache.
            max_tokens: Stop after the document in which this number is reached.
            max_documents: Stop after this number of documents.

        Raises:
            ValueError: If a document cannot be read, with `on_error` "raise".
            OSError: If the cache cannot be written.
        """
        sizes, keys = [shard.size for shard in shards], [shard.cache_key for shard in shards]
        is_small = None not in sizes and sum(size or 0 for size in sizes) < MIN_CACHED_BYTES
        if not self.cache or is_small or None in keys:
            return self._tokenize(shards, max_tokens, max_documents)
        tokenizer = self.tokenizer
        name = [*names, tokenizer.name, self.on_error, max_tokens, self.frame]
        name += [] if max_documents is None else [max_documents]
        folder = cache_folder() / _digest(name)
        key = _digest([VERSION, *name, keys, tokenizer.fingerprint(), tokenizer.end])
        with _locked(folder):
            cached = _load(folder, key)
            return cached or _save(folder, key, self._tokenize(shards, max_tokens, max_documents))

    def check_lengths(self, corpus: Corpus, shards: Sequence[Shard], length: int) -> None:
        """Raise ValueError if a document is longer than a row; the message names its location."""
        long = np.flatnonzero(corpus.lengths > length)
        if len(long):
            document = next(islice(self._readable(shards, [], []), int(long[0]), None))
            raise_long_document(document, int(corpus.lengths[long[0]]), length)

    def _tokenize(
        self, shards: Sequence[Shard], max_tokens: int | None, max_documents: int | None
    ) -> Corpus:
        faults: list[str] = []
        blank: list[str] = []
        tokens, lengths = [np.empty(0, self.tokenizer.dtype)], [np.empty(0, np.int64)]
        texts = (document.text for document in self._readable(shards, faults, blank))
        with character_bar("tokenizing") as bar:
            encoded = encode_documents(texts, self.tokenizer, frame=self.frame, show=bar.update)
            taken = islice(_take(encoded, max_tokens), max_documents)
            for group in batched(taken, DOCUMENTS_PER_ARRAY):
                tokens.append(np.concatenate(group))
                lengths.append(np.array([len(ids) for ids in group]))
        return Corpus(
            tokens=np.concatenate(tokens),
            ends=np.concatenate(lengths).cumsum(),
            left_out=tuple(faults[:MAX_MESSAGES]),
            left_out_count=len(faults),
            blank_count=len(blank),
        )

    def _readable(
        self, shards: Sequence[Shard], faults: list[str], blank: list[str]
    ) -> Iterator[Document]:
        """Yield documents; add messages on the unreadable ones and the locations of blank ones."""
        for document in read_documents(shards):
            if self.on_error == "raise":
                document.check()
            if document.fault:
                faults.append(document.message)
            elif document.is_blank:
                blank.append(document.location)
            else:
                yield document


def _take(documents: Iterator[Ids], max_tokens: int | None) -> Iterator[Ids]:
    """Yield documents until `max_tokens` is reached, including the one that reaches it."""
    total = 0
    for ids in documents:
        yield ids
        total += len(ids)
        if max_tokens is not None and total >= max_tokens:
            return


def raise_long_document(document: Document, tokens: int, length: int) -> None:
    """Raise ValueError for a document longer than a row."""
    raise ValueError(
        f"{document.location}: the document has {tokens} tokens, but a row has {length}; increase "
        "data.length, or set data.long_documents to 'continue'"
    )


# Cache


def cache_folder() -> Path:
    """Return the folder of tokenized text: in $ONESCAN_CACHE, or in the user's home."""
    return cache_root() / "text"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other process is reading or writing an entry, and lock it."""
    from filelock import FileLock

    with _writing(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_suffix(".lock"), fallback_to_soft=False).acquire()
    with lock:
        yield


def _load(folder: Path, key: str) -> Corpus | None:
    """Map an entry into memory; None if there is none, or it is damaged or has another key."""
    try:
        notes = json.loads((folder / NOTES).read_text(encoding="utf-8"))
        if notes["cache_key"] != key:
            return None
        tokens, ends = (
            np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in (TOKENS, ENDS)
        )
        if ends[-1] != len(tokens):
            return None
        return Corpus(
            tokens=tokens,
            ends=ends,
            left_out=tuple(notes["left_out"]),
            left_out_count=notes["left_out_count"],
            blank_count=notes["blank_count"],
        )
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _save(folder: Path, key: str, corpus: Corpus) -> Corpus:
    """Write an entry, replacing an older one, and map it into memory. Skips an empty corpus."""
    if not len(corpus.tokens):
        return corpus
    notes = {
        "cache_key": key,
        "left_out": corpus.left_out,
        "left_out_count": corpus.left_out_count,
        "blank_count": corpus.blank_count,
    }

    def write(partial: Path) -> None:
        partial.mkdir()
        np.save(partial / TOKENS, corpus.tokens, allow_pickle=False)
        np.save(partial / ENDS, corpus.ends, allow_pickle=False)
        (partial / NOTES).write_bytes(json.dumps(notes).encode())

    with _writing(folder.parent):
        remove(folder)
        write_atomically(folder, write)
    return _load(folder, key) or corpus


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(
            f"cannot cache tokenized text in {folder}: {error.strerror or error}; set {CACHE} to "
            "another folder, or data.cache to false"
        ) from error


def _digest(parts: list[Any]) -> str:
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
