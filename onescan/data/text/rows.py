"""Rows of tokens, in which documents are kept apart by number."""

from collections.abc import Sequence

import numpy as np
import torch

from onescan.data.text.tokenizer import Frame, Ids, Tokenizer
from onescan.shapes import Tokens

PADDING = -1  # the number of no document


def padding_id(tokenizer: Tokenizer) -> int:
    """What stands where a row is over."""
    return 0 if tokenizer.end is None else tokenizer.end


def text_length(length: int, frame: Frame | None) -> int:
    """Return how many tokens of documents fit into a row: two fewer if it may need a frame."""
    return length if frame is None else length - len(frame)


def stack_rows(
    rows: Sequence[Sequence[Ids]], *, length: int, padding: int, frame: Frame | None = None
) -> tuple[Tokens, Tokens]:
    """Stack rows, each given as parts of documents, and pad them.

    Args:
        rows: Parts of documents; with a frame, at most `text_length(length, frame)` tokens per row.
        length: Tokens per row.
        padding: Id of padding.
        frame: Ids to add before and after each part, unless it already starts or ends with them.

    Returns:
        Ids [B, T], and document numbers [B, T], counted from 0 in each row; -1 for padding.
    """
    tokens = np.full((len(rows), length), padding, np.int64)
    documents = np.full((len(rows), length), PADDING, np.int64)
    for i, parts in enumerate(rows):
        if frame is not None:
            parts = [_framed(part, frame) for part in parts]
        ends = np.cumsum([len(part) for part in parts])
        tokens[i, : ends[-1]] = np.concatenate(parts)
        documents[i, : ends[-1]] = np.repeat(np.arange(len(parts)), np.diff(ends, prepend=0))
    return torch.from_numpy(tokens), torch.from_numpy(documents)


def _framed(part: Ids, frame: Frame) -> Ids:
    before = [] if part[0] == frame.begin else [frame.begin]
    after = [] if part[-1] == frame.end else [frame.end]
    return np.concatenate([np.array(before, part.dtype), part, np.array(after, part.dtype)])
