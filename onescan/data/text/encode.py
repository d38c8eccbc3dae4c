"""Documents as ids, many at once, each with the end that belongs to it."""

import re
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from onescan.data.text.tokenizer import Frame, Ids, Tokenizer

PIECE = 1 << 16  # characters at least: longer texts are cut, to be encoded side by side
BETWEEN = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")  # a space is of the word after it
AT_ONCE = 1 << 20  # characters encoded in one call, which takes some hundred bytes for each


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
    document: list[Ids] = []
    for batch in _batches(texts):
        encoded = tokenizer.encode_many([piece for piece, _ in batch])
        for ids, (_, is_last) in zip(encoded, batch, strict=True):
            document.append(ids)
            if is_last:
                yield _join(document, tokenizer, frame)
                document = []
        if show:
            show(sum(len(piece) for piece, _ in batch))


def pieces(text: str, size: int) -> Iterator[str]:
    r"""Cut a text between words or lines, into pieces of at least `size` characters.

    >>> list(pieces("ab\ncd\n\nef gh", 3))
    ['ab\n', 'cd\n\nef', ' gh']
    """
    begin = 0
    while cut := BETWEEN.search(text, begin + size):
        yield text[begin : cut.start()]
        begin = cut.start()
    yield text[begin:]


def _batches(texts: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """Group the pieces of texts; each with whether its text ends there."""
    batch: list[tuple[str, bool]] = []
    held = 0
    for text in texts:
        cut = list(pieces(text, PIECE))
        for number, piece in enumerate(cut, start=1):
            batch.append((piece, number == len(cut)))
            held += len(piece)
            if held >= AT_ONCE:
                yield batch
                batch, held = [], 0
    if batch:
        yield batch


def _join(parts: list[Ids], tokenizer: Tokenizer, frame: Frame | None) -> Ids:
    begin, end = (None, tokenizer.end) if frame is None else frame
    before, after = (
        [] if token is None else [np.array([token], tokenizer.dtype)] for token in (begin, end)
    )
    return np.concatenate([*before, *parts, *after])
