"""Tokenizers: bytes, which need no files, or those of transformers; and how a run stores them."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool
from numpy.typing import NDArray
from torch import Tensor

from onescan.checkpoint.files import (
    check_digests,
    damaged,
    digests,
    from_json,
    to_json,
    write_text_atomically,
)
from onescan.checkpoint.hub import without_retries
from onescan.checkpoint.run_folder import TOKENIZER
from onescan.checks import in_a_line
from onescan.inputs.format import Format
from onescan.inputs.sequences import check_texts, pad_tokens
from onescan.messages import missing_package, named_type
from onescan.shapes import Keep, Tokens

Ids = NDArray[np.unsignedinteger]  # of one text
BYTES = "bytes"
MAX_CHARACTER_BYTES = 4  # in UTF-8
REPLACEMENT_CHARACTER = "\ufffd"  # decoded from an incomplete character
CHECKSUMS = "checksums.json"  # of the other files in the folder
REMEDY = "restore the tokenizer from a backup"
SPACES = ("Ġ", "▁")  # a space in tokens of byte-level BPE and of SentencePiece
CONTINUATION = "##"  # prefix of WordPiece
ASCII = 128
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # one byte of a character without a token of its own
# Text up to a character that clean_up_tokenization of transformers never joins with later text.
CLEANED = re.compile(r".*(?:[^\s'nrv]|(?<=[^\s'])[nrv])", re.DOTALL)


class Frame(NamedTuple):
    """Ids added around a sequence: [CLS] and [SEP]."""

    begin: int
    end: int


class Tokenizer(ABC):
    """Converts text to token ids and back."""

    name: str
    """Argument of `load_tokenizer`."""
    size: int
    """Number of token ids."""
    end: int | None
    """Id between two texts, if there is one."""
    frame: Frame | None
    """Ids of [CLS] and [SEP], if it has both."""
    mask: int | None
    """Id of the mask token, if there is one."""
    mask_text: str
    """The mask token in a text."""
    special: frozenset[int] = frozenset()
    """Ids that have no text."""
    byte_ids: frozenset[int] = frozenset()
    """Ids of single bytes, which are decoded together with the bytes around them."""

    @abstractmethod
    def encode(self, text: str, *, framed: bool = False) -> list[int]:
        """Encode a text. With `framed`, parse mask tokens and add special tokens around it."""

    @abstractmethod
    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        """Encode texts without special tokens, as arrays of type `dtype`."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, without special tokens."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a string that differs for tokenizers that encode differently."""

    @abstractmethod
    def to_transformers(self) -> Any:
        """Return a tokenizer of transformers with the same ids."""

    def save(self, folder: Path) -> None:
        """Write the files from which `load_tokenizer` and transformers can load it."""
        self.to_transformers().save_pretrained(folder)

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The smallest type of at least 16 bits that holds every id."""
        return np.dtype(np.uint16 if self.size <= np.iinfo(np.uint16).max + 1 else np.uint32)

    def begin(self, prompt: str) -> list[int]:
        """Encode a prompt to continue. An empty one gives the token that precedes any text.

        Raises:
            ValueError: If it is empty, and there is no such token.
        """
        if prompt:
            return self.encode(prompt)
        if self.end is None:
            raise ValueError("prompt is empty, but the tokenizer has no beginning-of-text token")
        return [self.end]

    def format_token(self, token: int) -> str:
        """Return a printable form of a token, also of white space and incomplete characters."""
        text = self.decode([token])
        return text.strip() or repr(text)

    def count_bytes(self, ids: Sequence[int]) -> int:
        """Count the bytes of text in UTF-8 that ids stand for: the sum of `byte_lengths`."""
        return int(self.byte_lengths[np.asarray(ids, np.int64)].sum())

    @cached_property
    def byte_lengths(self) -> NDArray[np.int64]:
        """Bytes that each id adds to a text, whatever the ids around it. Shape [size].

        The number of bytes of a text therefore does not depend on where it is cut. It is exact for
        bytes and byte-level BPE, where an id may be part of a character. A byte-fallback token
        counts as 1 byte. Any other token counts as the bytes that it adds between two words,
        including a space that the decoder adds: "##ing" of WordPiece has 3, "cat" and
        SentencePiece's "▁cat" have 4. Special tokens have none.
        """
        ordinary = [i for i in range(self.size) if i not in self.special]
        decoded = ((i, self.decode([i])) for i in ordinary)
        words = list(islice((i for i, text in decoded if text.isascii() and text.isalnum()), 2))
        before, after = words[:1], words[1:]
        around = len(self.decode([*before, *after]).encode())
        lengths = np.zeros(self.size, np.int64)
        texts = self._decode_many([[*before, i, *after] for i in ordinary])
        lengths[ordinary] = [max(len(text.encode()) - around, 0) for text in texts]
        lengths[list(self.byte_ids)] = 1
        return lengths

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError if a model with this vocabulary size lacks some tokens."""
        if self.size > vocab_size:
            raise ValueError(
                f"tokenizer {self.name!r} has {self.size} tokens, but the model's "
                f"vocabulary has {vocab_size}: they do not match"
            )

    def stream(self, ids: Iterable[int], context: Sequence[int] = ()) -> Iterator[str]:
        """Decode ids one at a time, without splitting characters.

        The text of the context followed by the yielded pieces is what `decode` returns for all
        ids. The context must not end within a character.

        Args:
            ids: Ids to decode.
            context: Ids before them, such as those of a prompt. Their text is not yielded.

        >>> list(ByteTokenizer().stream("né!".encode()))
        ['n', 'é', '!']
        """
        return (piece for piece in self.pieces(ids, context) if piece)

    def pieces(self, ids: Iterable[int], context: Sequence[int] = ()) -> Iterator[str]:
        """Yield the text of each id as `stream` does, and finally what is left.

        The text of an id is empty if a later id may change it; it is then part of a later piece.
        """
        recent = self._recent([token for token in context if token not in self.special])
        shown = self._decode(recent)
        before = tail = self._split_clean(shown)[1]
        for token in ids:
            _check_ids([token], self)
            if token not in self.special:
                recent.append(token)
                if token not in self.byte_ids:
                    text = self._decode(recent)
                    # The last character may be incomplete.
                    end = max(len(text.removesuffix(REPLACEMENT_CHARACTER)), len(shown))
                    tail, hidden = tail + text[len(shown) : end], len(text) - end
                    recent = self._recent(recent)
                    text = self._decode(recent)
                    shown = text[: len(text) - hidden]
            ready, tail = self._split_clean(tail)
            yield self._after(before, ready)
            before = "" if ready else before
        yield self._after(before, tail + self._decode(recent)[len(shown) :])

    def _after(self, before: str, text: str) -> str:
        """Return the final form of a text, without its beginning `before`, which was shown."""
        full, shown = self._clean(text), self._clean(before)
        return full[len(shown) :] if full.startswith(shown) else text[len(before) :]

    def _recent(self, ids: list[int]) -> list[int]:
        """Return the last ids: the text of the next ids depends only on them.

        Decoders may treat the beginning of a text differently, so these ids have some text.
        """
        size = MAX_CHARACTER_BYTES
        while size < len(ids) and (ids[-size] in self.byte_ids or not self._decode(ids[-size:])):
            size *= 2
        return ids[-size:]

    def _decode(self, ids: Sequence[int]) -> str:
        """Decode ids without `_clean`."""
        return self.decode(ids)

    def _decode_many(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(row) for row in rows]

    def _clean(self, text: str) -> str:
        """Return the final form of a decoded text."""
        return text

    def _split_clean(self, text: str) -> tuple[str, str]:
        """Split a text into one that `_clean` may be applied to, and the rest."""
        return text, ""


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, 256 for the end of a text, and 257 for [MASK].

    >>> ByteTokenizer().encode("né")
    [110, 195, 169]
    """

    name, size, end, mask, mask_text = BYTES, 258, 256, 257, "[MASK]"
    frame, special = None, frozenset((256, 257))

    def encode(self, text: str, *, framed: bool = False) -> list[int]:
        if not framed:
            return list(text.encode())
        first, *rest = [list(part.encode()) for part in text.split(self.mask_text)]
        return sum(([self.mask, *part] for part in rest), first)

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), np.uint8).astype(self.dtype) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        _check_ids(ids, self)
        return bytes(i for i in ids if i < self.end).decode(errors="replace")

    def fingerprint(self) -> str:
        return BYTES

    def to_transformers(self) -> Any:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        # One letter for each byte; most bytes stand for themselves.
        letters = pre_tokenizers.ByteLevel.alphabet()
        moved = iter(sorted(letter for letter in letters if ord(letter) >= self.end))
        table = [chr(i) if chr(i) in letters else next(moved) for i in range(self.end)]
        tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(table)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        end, mask = (AddedToken(text, special=True) for text in ("<end>", self.mask_text))
        tokenizer.add_special_tokens([end, mask])
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A", pair=f"$A {end.content} $B:1", special_tokens=[(end.content, self.end)]
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token=end,
            eos_token=end,
            pad_token=end,
            mask_token=mask,
        )

    @cached_property
    def byte_lengths(self) -> NDArray[np.int64]:
        return np.array([1] * self.end + [0] * (self.size - self.end))


class PretrainedTokenizer(Tokenizer):
    """A tokenizer of transformers."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self.name, self.tokenizer = name, tokenizer
        if tokenizer.is_fast:  # saved settings would apply to direct calls of the backend
            tokenizer.backend_tokenizer.no_truncation()
            tokenizer.backend_tokenizer.no_padding()
        self.size = len(tokenizer)
        ends = (tokenizer.eos_token_id, tokenizer.sep_token_id)
        self.end = next((end for end in ends if end is not None), None)
        begin, end = tokenizer.cls_token_id, tokenizer.sep_token_id
        self.frame = None if begin is None or end is None else Frame(begin, end)
        self.mask, self.mask_text = tokenizer.mask_token_id, str(tokenizer.mask_token)
        self.tokens = list(tokenizer.convert_ids_to_tokens(list(range(self.size))))
        added = tokenizer.added_tokens_decoder
        special = {i for i, token in added.items() if token.special}
        self.special = frozenset(special if tokenizer.is_fast else tokenizer.all_special_ids)
        decoder = tokenizer.backend_tokenizer.decoder if tokenizer.is_fast else None
        kinds = b"" if decoder is None else decoder.__getstate__()
        self.is_byte_level = b'"ByteLevel"' in kinds
        if b'"ByteFallback"' in kinds or not tokenizer.is_fast:
            bytes_ = (i for i, token in enumerate(self.tokens) if BYTE_TOKEN.fullmatch(token or ""))
            self.byte_ids = frozenset(bytes_)
        is_bpe = tokenizer.is_fast and type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
        self.is_cleaned = tokenizer.clean_up_tokenization_spaces and not is_bpe

    def encode(self, text: str, *, framed: bool = False) -> list[int]:
        options = {"add_special_tokens": framed, "split_special_tokens": not framed}
        return list(self.tokenizer.encode(text, **options))

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        if not self.tokenizer.is_fast:
            return [np.array(self.encode(text), self.dtype) for text in texts]
        backend = self.tokenizer.backend_tokenizer
        backend.encode_special_tokens = True  # as ordinary text
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype) for encoding in encodings]

    def begin(self, prompt: str) -> list[int]:
        """Encode a prompt to continue, after the tokens that this tokenizer adds before a text."""
        ids = list(
            self.tokenizer.encode(prompt, add_special_tokens=True, split_special_tokens=True)
        )
        ends = {self.tokenizer.eos_token_id, self.tokenizer.sep_token_id}
        while ids and ids[-1] in ends:  # added after the text
            ids.pop()
        return ids or super().begin("")

    def format_token(self, token: int) -> str:
        text = self.decode([token])
        raw = str(self.tokenizer.convert_ids_to_tokens(token))
        if text.isspace() or raw in SPACES:
            return repr(text or " ")
        return text.strip() or raw

    def decode(self, ids: Sequence[int]) -> str:
        return self._clean(self._decode(ids))

    def _decode(self, ids: Sequence[int]) -> str:
        _check_ids(ids, self)
        if all(i in self.special for i in ids):  # some decoders fail for no tokens
            return ""
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(ids), **options))

    def _decode_many(self, rows: Sequence[Sequence[int]]) -> list[str]:
        if not self.tokenizer.is_fast:
            return super()._decode_many(rows)
        return [self._clean(text) for text in self.tokenizer.backend_tokenizer.decode_batch(rows)]

    def _clean(self, text: str) -> str:
        return str(self.tokenizer.clean_up_tokenization(text)) if self.is_cleaned else text

    def _split_clean(self, text: str) -> tuple[str, str]:
        if not self.is_cleaned:
            return text, ""
        match = CLEANED.match(text)
        end = match.end() if match else 0
        return text[:end], text[end:]

    @cached_property
    def byte_lengths(self) -> NDArray[np.int64]:
        if not self.is_byte_level:
            return super().byte_lengths
        added = self.tokenizer.added_tokens_decoder
        lengths = [
            0 if i in self.special else len(token.encode() if i in added else token)
            for i, token in enumerate(self.tokens)
        ]
        return np.array(lengths)

    def fingerprint(self) -> str:
        table = (
            self.tokenizer.backend_tokenizer.to_str()
            if self.tokenizer.is_fast
            else json.dumps(
                [type(self.tokenizer).__name__, sorted(self.tokenizer.get_vocab().items())]
            )
        )
        return blake2b(f"{self.end} {table}".encode(), digest_size=8).hexdigest()

    def to_transformers(self) -> Any:
        return self.tokenizer


def load_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer without running any code that comes with it.

    Args:
        name: "bytes", or a folder, a tokenizer.json or a Hugging Face Hub name, loaded with
            transformers.

    Raises:
        ValueError: If there is no tokenizer, or it cannot be loaded.
        ImportError: If transformers is required and not installed.
    """
    if name == BYTES:
        return ByteTokenizer()
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise missing_package(f"tokenizer {name!r}", "transformers", "text", error) from error
    path = Path(name)
    source = path.parent if path.name == "tokenizer.json" else path
    with nullcontext() if source.exists() else without_retries():
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
        except Exception as error:  # tokenizers raises plain Exception
            where = "" if source.exists() else " on disk or on the Hugging Face Hub"
            raise ValueError(
                f"cannot load a tokenizer from {name!r}{where}: {in_a_line(error)}"
            ) from error
    return PretrainedTokenizer(name, tokenizer)


def _check_ids(ids: Sequence[int], tokenizer: Tokenizer) -> None:
    lowest, highest = min(ids, default=0), max(ids, default=0)
    if lowest < 0:
        raise ValueError(f"token is {lowest}, expected 0 to {tokenizer.size - 1}")
    if highest >= tokenizer.size:
        raise ValueError(
            f"token {highest} is unknown to tokenizer {tokenizer.name!r}, which has "
            f"{tokenizer.size} tokens: was the model trained with another tokenizer?"
        )


@dataclass(frozen=True, kw_only=True)
class TextFormat(Format):
    """The tokens a model was trained on. The tokenizer is saved in the run's folder."""

    tokenizer: str
    """Name of the tokenizer, as the user wrote it."""
    vocab_size: int
    """Number of token ids."""
    fingerprint: str
    """Fingerprint of the tokenizer."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "TextFormat":
        """Describe a tokenizer."""
        return cls(
            tokenizer=tokenizer.name,
            vocab_size=tokenizer.size,
            fingerprint=tokenizer.fingerprint(),
        )

    def model_input(self, inputs: Sequence[str]) -> tuple[Tokens, Keep]:
        """Convert texts to tokens, without special tokens around them.

        Returns:
            The tokens, padded on the right, and a mask that is False for padding, both [B, T].

        Raises:
            ValueError: If there are no texts, one is not a string, or one has no tokens.
            ImportError: If transformers is needed and not installed.
        """
        sequences = self._opened.encode_many(check_texts(inputs))
        for index, tokens in enumerate(sequences):
            if not len(tokens):
                raise ValueError(f"inputs[{index}] is {inputs[index]!r}, which has no tokens")
        return pad_tokens(sequences)

    def save(self, folder: Path) -> None:
        if self.tokenizer == BYTES:
            return
        tokenizer_folder = folder / TOKENIZER
        self._opened.save(tokenizer_folder)
        (tokenizer_folder / CHECKSUMS).unlink(missing_ok=True)
        checksums = to_json(digests(tokenizer_folder))
        write_text_atomically(tokenizer_folder / CHECKSUMS, checksums)

    def open(self, folder: Path) -> Tokenizer:
        """Load the tokenizer saved in a run's folder.

        Raises:
            ValueError: If it is missing or damaged. The message names the file.
            ImportError: If transformers is required and not installed.
        """
        if self.tokenizer == BYTES:
            return load_tokenizer(BYTES)
        tokenizer_folder = folder / TOKENIZER
        if not (tokenizer_folder / CHECKSUMS).is_file():
            raise damaged(tokenizer_folder, ValueError(f"it has no {CHECKSUMS}"), REMEDY)
        files = from_json(
            (tokenizer_folder / CHECKSUMS).read_bytes(), tokenizer_folder / CHECKSUMS, REMEDY
        )
        check_digests(tokenizer_folder, files, REMEDY, but=CHECKSUMS, links=True)
        return load_tokenizer(str(tokenizer_folder))

    @cached_property
    def _opened(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer) if self._folder is None else self.open(self._folder)


class WordBoundaries(NamedTuple):
    """Where words begin among a tokenizer's ids.

    Attributes:
        before: Whether a word always begins at an id.
        after: Whether a word always begins after an id.
    """

    before: Bool[Tensor, " vocabulary"]
    after: Bool[Tensor, " vocabulary"]

    def word_starts(self, tokens: Tokens) -> Bool[Tensor, "B T"]:
        """Return whether each token is the first of a word.

        >>> boundaries = word_boundaries(ByteTokenizer())
        >>> boundaries.word_starts(torch.tensor([list(b"a cat")])).int().tolist()
        [[1, 1, 1, 0, 0]]
        """
        before, after = (table.to(tokens.device)[tokens] for table in self)
        starts = torch.ones_like(before)
        starts[:, 1:] = after[:, :-1]
        return before | starts


def word_boundaries(tokenizer: Tokenizer) -> WordBoundaries:
    """Find the word boundaries of a tokenizer: words are letters and digits without spaces."""
    if isinstance(tokenizer, ByteTokenizer):
        separates = [i < ASCII and not chr(i).isalnum() for i in range(256)]
        separates += [True] * (tokenizer.size - 256)
        return WordBoundaries(torch.tensor(separates), torch.tensor(separates))
    if not isinstance(tokenizer, PretrainedTokenizer):
        raise ValueError(
            f"tokenizer is {named_type(tokenizer)}, expected a ByteTokenizer or PretrainedTokenizer"
        )
    tokens = tokenizer.tokenizer.convert_ids_to_tokens(list(range(tokenizer.size)))
    if any(token.startswith(SPACES) for token in tokens):
        before = [not token[:1].isalnum() or token.startswith(SPACES) for token in tokens]
        after = [not token[-1:].isalnum() or token in SPACES for token in tokens]
    else:
        before = [not token.startswith(CONTINUATION) for token in tokens]
        after = [False] * len(tokens)
    return WordBoundaries(torch.tensor(before), torch.tensor(after))
