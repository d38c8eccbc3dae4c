"""Blockwise causal calls: each token reads its own block of tokens and all earlier blocks.

The forward recurrence visits all tokens, and the backward recurrence restarts with an empty state
at the end of each block, so the state after a block contains all tokens so far. With one token per
block, the call is causal; with a single block, it is bidirectional.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from onescan.checks import check_whole
from onescan.ops.packing import Packing
from onescan.ops.parallel import SequenceGroup, is_empty, refuse_group


def check_causal_block(
    causal_block: Any, *, causal: Any, cu_seqlens: Any = None, ranks: SequenceGroup | None = None
) -> None:
    """Raise ValueError if the block size is invalid, or does not support the other options.

    >>> check_causal_block(4, causal=True)
    Traceback (most recent call last):
    ValueError: causal_block is 4 with causal=True, expected causal=False
    """
    check_whole(1, causal_block=causal_block)
    if causal is not False:
        raise ValueError(
            f"causal_block is {causal_block} with causal={causal}, expected causal=False"
        )
    if ranks is not None and cu_seqlens is not None:
        refuse_group(
            ranks,
            "causal_block with cu_seqlens",
            "blocks are counted from the beginning of a sequence, which may be on another rank",
        )


def check_whole_blocks(causal_block: int, lengths: Sequence[int]) -> None:
    """Raise ValueError if a rank ends within a block, unless the sequence ends there.

    >>> check_whole_blocks(4, [8, 0, 7])
    >>> check_whole_blocks(4, [7, 8])
    Traceback (most recent call last):
    ValueError: group has 7 tokens on rank 0 with causal_block=4, expected whole blocks
    """
    *others, last = list(accumulate(lengths))
    for rank, end in enumerate(others):
        if end % causal_block and end != last:
            raise ValueError(
                f"group has {lengths[rank]} tokens on rank {rank} with "
                f"causal_block={causal_block}, expected whole blocks"
            )


def block_ends(
    causal_block: int, x: Tensor, packing: Packing | None, ranks: SequenceGroup | None
) -> Bool[Tensor, "1 T"] | Bool[Tensor, "B T"]:
    """Return whether each token of x, [B, T, ...], is the last token of its block.

    If the last block of a sequence is shorter, its end is not marked. Blocks are counted from the
    beginning of each packed sequence, or from the first token of all ranks. A rank without tokens
    has one masked token, which does not end a block.

    >>> block_ends(2, torch.ones(1, 5, 3), None, None).tolist()
    [[False, True, False, True, False]]
    """
    if packing is not None:
        return (packing.place + 1) % causal_block == 0
    before = 0 if ranks is None else sum(ranks.lengths(x)[: ranks.rank])
    if is_empty(ranks, x):
        return torch.zeros(1, 1, dtype=torch.bool, device=x.device)
    place = before + torch.arange(x.shape[1], device=x.device)
    return ((place + 1) % causal_block == 0).unsqueeze(0)
