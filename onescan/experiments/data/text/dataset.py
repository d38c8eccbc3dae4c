"""The text dataset of language models: find the text, and hold out a part of it."""

import logging
from dataclasses import dataclass

from onescan.checks import check_positive
from onescan.experiments.data.base import DataConfig, DataSet, OnError, Splits, listed
from onescan.experiments.data.text.corpus import Corpus, CorpusReader, LongDocuments
from onescan.experiments.data.text.files import SampleBy
from onescan.experiments.data.text.packing import (
    PackedText,
    TextRows,
    TextStream,
    TruncatedText,
    padding_id,
    text_length,
)
from onescan.experiments.data.text.source import Query, TextSource, find_source
from onescan.inputs.tokenizer import BYTES, Frame, TextFormat, Tokenizer, load_tokenizer
from onescan.messages import plural

log = logging.getLogger("onescan")


@dataclass(frozen=True, kw_only=True)
class TextSplits(Splits):
    """Training and test rows, and how text is converted to them."""

    train: DataSet
    test: DataSet
    tokenizer: Tokenizer
    format: TextFormat
    is_framed: bool = False


@dataclass(frozen=True, kw_only=True)
class TextDatasetConfig(DataConfig):
    """Text from files or the Hugging Face Hub, tokenized and packed or truncated into sequences.

    Files may be parquet, .jsonl, .json, .csv or .tsv; all others are read as plain text in UTF-8.
    All but parquet may be compressed as .gz. Lines end in line feeds, carriage returns, or both. In
    a folder, the files of the first of these types that occurs are read in the order of their
    names, and others are left out; so are images and archives in a folder of plain text. If a file
    or its folder is called train, as in wiki.train.txt, files are assigned to splits by name. A
    folder saved by the datasets library is read as such.

    Tokenized text is cached in $ONESCAN_CACHE, or ~/.cache/onescan, and tokenized again when the
    text or the tokenizer changes. Empty documents and byte order marks are left out.
    """

    path: str
    """File, folder, or name of a dataset on the Hugging Face Hub."""
    name: str | None = None
    """Configuration of a hub dataset."""
    train_split: str = "train"
    """Split to train on."""
    test_split: str | None = None
    """Split to evaluate on; None uses validation or test, or else holds out a part of
    train_split."""
    test_path: str | None = None
    """Path of the test text, if it differs from path."""
    test_fraction: float = 0.1
    """Fraction held out if there is no test split: the last documents, or the last tokens of a
    single document."""
    text_column: str = "text"
    """Column of the text, in tables and JSON objects."""
    sample_by: SampleBy = "file"
    """What counts as one document of plain text: a file, a paragraph (ended by an empty line) or a
    line."""
    tokenizer: str = BYTES
    """bytes, or a tokenizer: a folder, a tokenizer.json, or a name on the Hugging Face Hub."""
    length: int = 256
    """Tokens per sequence."""
    add_special_tokens: bool = False
    """Add [CLS] before and [SEP] after each document, as in BERT fine-tuning. A document split
    across sequences gets them around each part. For masked language models only."""
    packing: bool = True
    """Pack documents into sequences without padding, so that every token is used. Otherwise, each
    sequence contains only the first tokens of one document, padded."""
    long_documents: LongDocuments = "continue"
    """If a document is longer than a sequence, continue it in the next one (continue) or end the
    run (raise). Without packing, continue truncates it."""
    on_error: OnError = "raise"
    """On an unreadable document, end the run (raise), or skip and count it (skip)."""
    cache: bool = True
    """Cache tokenized text on disk, unless it is small."""
    streaming: bool = False
    """Tokenize during training, shuffled in blocks, for text too large to store.

    With several processes, each tokenizes all of it. The test text is not streamed.
    """
    train_rows: int | None = None
    """Sequences per epoch of a stream, which restarts when it ends."""
    test_rows: int | None = None
    """Maximum number of test sequences; None uses all."""
    shuffle_block: int = 1024
    """Consecutive sequences of a stream that are shuffled together, held in memory."""

    @property
    def max_tokens(self) -> int:
        return self.length

    def build(self) -> TextSplits:
        """Find and tokenize the text.

        Raises:
            ImportError: If the datasets library or transformers is required and not installed.
            ValueError: If a field is out of range; the text is missing or empty, cannot be read or
                streamed, or lacks a split or column; or there is no such tokenizer, or it has no
                [CLS] and [SEP] with add_special_tokens.
        """
        self._check()
        tokenizer = load_tokenizer(self.tokenizer)
        if self.add_special_tokens and tokenizer.frame is None:
            raise ValueError(
                f"data.add_special_tokens is True, but data.tokenizer {self.tokenizer!r} has "
                "no [CLS] and [SEP] tokens"
            )
        builder = _Builder(self, tokenizer)
        train, test = builder.stream() if self.streaming else builder.pack()
        return TextSplits(
            train=train,
            test=test,
            tokenizer=tokenizer,
            format=TextFormat.of(tokenizer),
            is_framed=self.add_special_tokens,
            notes=tuple(dict.fromkeys(builder.notes)),
        )

    def query(self, *, streaming: bool = False) -> Query:
        """Return the query for `path`."""
        return Query(
            column=self.text_column,
            sample_by=self.sample_by,
            name=self.name,
            streaming=streaming,
        )

    def _check(self) -> None:
        check_positive(**{"data.length": self.length, "data.shuffle_block": self.shuffle_block})
        if self.add_special_tokens and self.length <= len(Frame._fields):
            raise ValueError(
                f"data.length is {self.length}, expected more than {len(Frame._fields)} with "
                "data.add_special_tokens"
            )
        for name in ("train_rows", "test_rows"):
            if getattr(self, name) is not None:
                check_positive(**{f"data.{name}": getattr(self, name)})
        if not 0 < self.test_fraction < 1:
            raise ValueError(
                f"data.test_fraction is {self.test_fraction}, expected between 0 and 1"
            )
        if self.train_rows is not None and not self.streaming:
            raise ValueError("data.train_rows is for streams, but data.streaming is off")
        if self.streaming and self.train_rows is None:
            raise ValueError(
                "data.train_rows is None, expected a number, because the length of a stream is "
                "unknown"
            )


class _Builder:
    """Finds and tokenizes the text of a config."""

    def __init__(self, config: TextDatasetConfig, tokenizer: Tokenizer) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.frame = tokenizer.frame if config.add_special_tokens else None
        self.source = find_source(config.path, config.query(streaming=config.streaming))
        self.source.check_split("data.train_split", config.train_split)
        self.notes = list(self.source.notes)
        self.reader = CorpusReader(
            tokenizer=tokenizer, on_error=config.on_error, cache=config.cache, frame=self.frame
        )

    def pack(self) -> tuple[DataSet, DataSet]:
        """Tokenize training and test text, or hold out a part of the training text."""
        config = self.config
        train = self._corpus(self.source, config.train_split)
        found = self._find_test()
        if found is not None:
            return self._rows(train, "training"), self._test_rows(*found)
        cut = _split_point(train, config.test_fraction, config.path)
        held_out = len(train.tokens) - cut
        self.notes.append(
            f"the last {held_out:,} of {len(train.tokens):,} tokens are held out, because there is "
            "no test split"
        )
        train, test = train.part(0, cut), train.part(cut, len(train.tokens))
        if self.frame is not None and config.packing:
            train = train.with_end(self.frame.end)  # shuffled rows wrap around
        most = self._max_test_tokens, self._max_test_documents
        return self._rows(train, "training"), self._rows(test, "test", *most)

    def stream(self) -> tuple[DataSet, DataSet]:
        """Open a stream, and tokenize the test text."""
        config, found = self.config, self._find_test()
        if found is None:
            raise ValueError(
                f"data.streaming is on, but {config.path} has no test split: set data.test_path or "
                "data.test_split, because nothing can be held out of a stream"
            )
        train = TextStream(
            shards=self.source.open(config.train_split),
            tokenizer=self.tokenizer,
            length=config.length,
            count=config.train_rows or 0,
            block=config.shuffle_block,
            on_error=config.on_error,
            long_documents=config.long_documents,
            frame=self.frame,
            packing=config.packing,
        )
        if not config.packing and config.long_documents == "continue":
            self.notes.append(
                f"documents of the stream that are longer than {config.length:,} tokens are "
                "truncated; they are not counted"
            )
        return train, self._test_rows(*found)

    @property
    def _max_test_tokens(self) -> int | None:
        rows = self.config.test_rows
        if rows is None or not self.config.packing:
            return None
        return rows * text_length(self.config.length, self.frame)

    @property
    def _max_test_documents(self) -> int | None:
        return None if self.config.packing else self.config.test_rows

    def _find_test(self) -> tuple[TextSource, str] | None:
        """Find the test text and its split; None if it is to be held out."""
        config, source, split = self.config, self.source, self.config.test_split
        if config.test_path is not None:
            query = config.query(streaming=config.streaming)
            source = find_source(config.test_path, query, field="data.test_path")
            split = split or source.held_out("train") or next(iter(source.splits))
            self.notes += source.notes
        elif split == config.train_split:
            raise ValueError(
                f"data.test_split is {split!r}, expected a different split than data.train_split"
            )
        else:
            split = split or source.held_out(config.train_split)
            chosen = (config.train_split, split)
            if unused := [name for name in source.splits if name not in chosen]:
                self.notes.append(f"splits not used: {listed(unused)}")
        if split is None:
            return None
        source.check_split("data.test_split", split)
        return source, split

    def _test_rows(self, source: TextSource, split: str) -> TextRows:
        most = self._max_test_tokens, self._max_test_documents
        return self._rows(self._corpus(source, split, *most), "test", *most)

    def _corpus(
        self,
        source: TextSource,
        split: str,
        max_tokens: int | None = None,
        max_documents: int | None = None,
    ) -> Corpus:
        config, shards = self.config, source.open(split)
        names = source.location, config.name or "", split, config.text_column, config.sample_by
        most = {"max_tokens": max_tokens, "max_documents": max_documents}
        corpus = self.reader.read(shards, *names, **most)
        if not len(corpus.tokens):
            raise ValueError(f"{source.field} is {source.path!r}, where {split} holds no text")
        for message in corpus.left_out:
            log.warning("%s", message)
        if count := corpus.left_out_count:
            total = count + len(corpus.ends)
            log.warning("skipped %d of %d documents of %s", count, total, source.path)
            self.notes.append(
                f"left out {count} of {total} documents of {source.path} (split {split}), which "
                "cannot be read"
            )
        if count := corpus.blank_count:
            noun = "document" if count == 1 else "documents"
            self.notes.append(f"left out {count} empty {noun} of {source.path} (split {split})")
        if config.long_documents == "raise":
            self.reader.check_lengths(corpus, shards, config.length)
        return corpus

    def _rows(
        self,
        corpus: Corpus,
        name: str,
        max_tokens: int | None = None,
        max_documents: int | None = None,
    ) -> TextRows:
        """Return the rows of a corpus; `name` is that of its split in notes."""
        if max_documents is not None and max_documents < len(corpus.ends):
            max_tokens = int(corpus.ends[max_documents - 1])
        if max_tokens is not None:
            corpus = corpus.part(0, min(max_tokens, len(corpus.tokens)))
        padding, length = padding_id(self.tokenizer), self.config.length
        kind = PackedText if self.config.packing else TruncatedText
        rows = kind(corpus=corpus, length=length, padding=padding, frame=self.frame)
        if isinstance(rows, TruncatedText) and (count := rows.truncated[0]):
            are = "is" if count == 1 else "are"
            self.notes.append(
                f"{count:,} of {plural(len(rows), f'{name} document')} {are} longer than "
                f"{length:,} tokens and {are} truncated: {rows.truncated[1]:,} of "
                f"{plural(len(corpus.tokens), 'token')} are left out"
            )
        return rows


def _split_point(corpus: Corpus, fraction: float, path: str) -> int:
    """Return the first held-out token: of the last documents, or within a single one."""
    if len(corpus.ends) > 1:
        held_out = min(max(1, round(fraction * len(corpus.ends))), len(corpus.ends) - 1)
        return int(corpus.ends[-1 - held_out])
    cut = round((1 - fraction) * len(corpus.tokens))
    if not 0 < cut < len(corpus.tokens):
        raise ValueError(
            f"data.path is {path!r}, which has {len(corpus.tokens)} tokens: too few to hold out "
            f"{fraction:.0%} of them"
        )
    return cut
