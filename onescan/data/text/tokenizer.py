"""Tokenizers: bytes, which need nothing, or one of transformers by its folder or name."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onescan.checks import in_a_line

Ids = NDArray[np.unsignedinteger]  # of one text

BYTES = "bytes"
MOST_BYTES = 4  # of a character, in UTF-8
UNKNOWN_CHARACTER = "\ufffd"  # what decoding writes for half a character


class Frame(NamedTuple):
    """Ids added around a sequence: [CLS] and [SEP]."""

    begin: int
    end: int


class Tokenizer(ABC):
    """Text to ids and back."""

    name: str
    """What `load_tokenizer` finds it by."""
    size: int
    """All ids are below it."""
    end: int | None
    """The id between two texts, if there is one."""
    frame: Frame | None
    """The ids of [CLS] and [SEP], if it has both."""
    mask: int | None
    """The id of a token that is to be told, if there is one."""
    mask_text: str
    """How a mask is spelt in a text."""

    @abstractmethod
    def encode(self, text: str, *, framed: bool = False) -> list[int]:
        """The ids of a text; framed, with masks, and what is put before and after a whole one."""

    @abstractmethod
    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of texts to learn from, in which nothing is special, in the type of `dtype`."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without those that stand for no text."""

    @abstractmethod
    def fingerprint(self) -> str:
        """What another tokenizer, which encodes otherwise, has another of."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write it to where `load_tokenizer` finds it again, if it is in need of a place."""

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The smallest type of at least 16 bits that holds every id."""
        return np.dtype(np.uint16 if self.size <= np.iinfo(np.uint16).max + 1 else np.uint32)

    def begin(self, prompt: str) -> list[int]:
        """The ids of a text that is to go on; where it is empty, of the token before any text.

        Raises:
            ValueError: it is empty, and there is no such token.
        """
        if prompt:
            return self.encode(prompt)
        if self.end is None:
            raise ValueError("prompt is '', and the tokenizer has no token to begin a text with")
        return [self.end]

    def spell(self, token: int) -> str:
        """What a token looks like, for a reader: of a space or half a character too."""
        text = self.decode([token])
        return text.strip() or repr(text)

    def count_bytes(self, ids: Sequence[int]) -> int:
        """The length of the text of ids, in bytes of UTF-8."""
        return len(self.decode(ids).encode())

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError where a model of so many tokens lacks some of these."""
        if self.size > vocab_size:
            raise ValueError(
                f"tokenizer {self.name!r} has {self.size} tokens, but the model's vocabulary "
                f"{vocab_size}: they do not belong together"
            )

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """The text of ids as they come; no character is split.

        >>> list(ByteTokenizer().stream("né!".encode()))
        ['n', 'é', '!']
        """
        known: list[int] = []  # the last ids, from where a word begins
        shown = ""
        for token in ids:
            known.append(token)
            text = self.decode(known)
            # the rest of a character may be to come; of more tokens than it has bytes none is
            if text.endswith(UNKNOWN_CHARACTER) and len(known) <= 2 * MOST_BYTES:
                continue
            if len(text) > len(shown):
                yield text[len(shown) :]
            # what a token looks like may depend on the one before it, and on no other
            known, shown = known[-1:], self.decode(known[-1:])
        rest = self.decode(known)[len(shown) :]
        if rest:
            yield rest


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, then 256 for the end of a text and 257 for [MASK].

    >>> ByteTokenizer().encode("né")
    [110, 195, 169]
    """

    name, size, end, mask, mask_text = BYTES, 258, 256, 257, "[MASK]"
    frame = None

    def encode(self, text: str, *, framed: bool = False) -> list[int]:
        if not framed:  # a text to learn from, in which nothing is special
            return list(text.encode())
        first, *rest = [list(part.encode()) for part in text.split(self.mask_text)]
        return sum(([self.mask, *part] for part in rest), first)

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), np.uint8).astype(self.dtype) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        _check_known(ids, self)
        return bytes(i for i in ids if i < self.end).decode(errors="replace")

    def fingerprint(self) -> str:
        return BYTES

    def save(self, folder: Path) -> None:
        pass

    def count_bytes(self, ids: Sequence[int]) -> int:
        return sum(i < self.end for i in ids)


class PretrainedTokenizer(Tokenizer):
    """A tokenizer of transformers."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self.name, self.tokenizer = name, tokenizer
        if tokenizer.is_fast:  # what is saved with it holds for calls of its own
            tokenizer.backend_tokenizer.no_truncation()
            tokenizer.backend_tokenizer.no_padding()
        self.size = len(tokenizer)
        ends = (tokenizer.eos_token_id, tokenizer.sep_token_id)
        self.end = next((end for end in ends if end is not None), None)
        begin, end = tokenizer.cls_token_id, tokenizer.sep_token_id
        self.frame = None if begin is None or end is None else Frame(begin, end)
        self.mask, self.mask_text = tokenizer.mask_token_id, str(tokenizer.mask_token)

    def encode(self, text: str, *, framed: bool = False) -> list[int]:
        options = {"add_special_tokens": framed, "split_special_tokens": not framed}
        return list(self.tokenizer.encode(text, **options))

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        return [np.array(ids, self.dtype) for ids in self._encode_many(list(texts))]

    def begin(self, prompt: str) -> list[int]:
        """As of any tokenizer, behind what this one puts before a text."""
        ids = list(
            self.tokenizer.encode(prompt, add_special_tokens=True, split_special_tokens=True)
        )
        ends = {self.tokenizer.eos_token_id, self.tokenizer.sep_token_id}
        while ids and ids[-1] in ends:  # what it puts behind one
            ids.pop()
        return ids or super().begin("")

    def spell(self, token: int) -> str:
        return self.decode([token]).strip() or str(self.tokenizer.convert_ids_to_tokens(token))

    def decode(self, ids: Sequence[int]) -> str:
        _check_known(ids, self)
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def fingerprint(self) -> str:
        known = self.tokenizer
        table = (
            known.backend_tokenizer.to_str()
            if known.is_fast
            else json.dumps([type(known).__name__, sorted(known.get_vocab().items())])
        )
        return blake2b(f"{self.end} {table}".encode(), digest_size=8).hexdigest()

    def save(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)

    def _encode_many(self, texts: list[str]) -> Iterable[list[int]]:
        if not self.tokenizer.is_fast:
            return (self.encode(text) for text in texts)
        backend = self.tokenizer.backend_tokenizer
        backend.encode_special_tokens = True  # which is, as text
        coded = backend.encode_batch_fast(texts, add_special_tokens=False)
        return (encoding.ids for encoding in coded)


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
        raise ImportError(
            f"tokenizer {name!r} needs transformers, which is missing: pip install 'onescan[text]'"
        ) from error
    path = Path(name)
    place = path.parent if path.name == "tokenizer.json" else path
    try:
        found = AutoTokenizer.from_pretrained(str(place), trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"cannot load a tokenizer from {name!r}: {in_a_line(error)}") from error
    return PretrainedTokenizer(name, found)


def _check_known(ids: Sequence[int], tokenizer: Tokenizer) -> None:
    highest = max(ids, default=0)
    if highest >= tokenizer.size:
        raise ValueError(
            f"token {highest} is unknown to tokenizer {tokenizer.name!r}, which has "
            f"{tokenizer.size}: was the model trained with another one?"
        )
