"""Blockwise causal calls: each token reads its own block of tokens and all earlier blocks.

The forward recurrence visits all tokens, and the backward recurrence restarts with an empty state
at the end of each block, so the state after a block contains all tokens so far. With one token per
block, the call is causal; with a single block, it is bidirectional. Blocks of several sizes are
given by offsets, as packed sequences are: a prompt that is read in both directions, followed by
blocks of one token, is a prefix language model.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from onescan.checks import can_look_at_values, check_whole
from onescan.ops.packing import Packing, check_offsets, check_offsets_type
from onescan.ops.parallel import SequenceGroup, refuse_group

Blocks = int | Int[Tensor, " offsets"]  # tokens per block, or offsets of blocks of several sizes


def check_causal_block(
    causal_block: Any, *, causal: Any, cu_seqlens: Any = None, ranks: SequenceGroup | None = None
) -> None:
    """Raise ValueError if blocks are invalid, or do not support the other options.

    >>> check_causal_block(4, causal=True)
    Traceback (most recent call last):
    ValueError: causal_block is 4 with causal=True, expected causal=False
    """
    is_uneven = isinstance(causal_block, Tensor)
    if is_uneven:
        check_offsets_type("causal_block", causal_block, "offsets [N + 1] of N blocks")
        if cu_seqlens is not None:
            raise ValueError(
                "causal_block holds offsets with cu_seqlens, expected the number of tokens per "
                "block, or no cu_seqlens"
            )
    else:
        check_whole(1, causal_block=causal_block)
    if causal is not False:
        described = "holds offsets" if is_uneven else f"is {causal_block}"
        raise ValueError(f"causal_block {described} with causal={causal}, expected causal=False")
    if ranks is not None and cu_seqlens is not None:
        refuse_group(
            ranks,
            "causal_block with cu_seqlens",
            "blocks are counted from the beginning of a sequence, which may be on another rank",
        )


def check_block_offsets(offsets: Tensor, x: Tensor, tokens: int) -> None:
    """Raise ValueError unless offsets of blocks of x run from 0 to the number of tokens.

    Values are only read on a CPU.

    >>> check_block_offsets(torch.tensor([0, 2]), torch.ones(1, 3, 1), 3)
    Traceback (most recent call last):
    ValueError: causal_block ends at 2, expected 3, the number of tokens
    """
    if offsets.device not in (x.device, torch.device("cpu")):
        raise ValueError(f"causal_block is on {offsets.device}, expected cpu or {x.device}")
    if can_look_at_values(offsets):
        check_offsets("causal_block", offsets, tokens)


def check_whole_blocks(causal_block: Blocks, lengths: Sequence[int]) -> None:
    """Raise ValueError if a rank ends within a block, unless the sequence ends there.

    >>> check_whole_blocks(4, [8, 0, 7])
    >>> check_whole_blocks(4, [7, 8])
    Traceback (most recent call last):
    ValueError: group has 7 tokens on rank 0 with causal_block=4, expected whole blocks
    """
    *others, last = list(accumulate(lengths))
    if isinstance(causal_block, Tensor):
        if not can_look_at_values(causal_block):
            return
        ends, described = set(causal_block.tolist()), "offsets"
    else:
        ends, described = {*range(0, last + causal_block, causal_block)}, str(causal_block)
    for rank, end in enumerate(others):
        if end not in ends and end != last:
            raise ValueError(
                f"group has {lengths[rank]} tokens on rank {rank} with causal_block={described}, "
                "expected whole blocks"
            )


def block_ends(
    causal_block: Blocks, positions: Int[Tensor, " T"], packing: Packing | None
) -> Bool[Tensor, "_ T"]:
    """Return whether each token is the last token of its block.

    If the last block of a sequence is shorter, its end is not marked. Blocks are counted from the
    beginning of each packed sequence, or from the first token of all ranks.

    Args:
        causal_block: Tokens per block, or offsets of blocks.
        positions: Number of tokens before each token, on all ranks.
        packing: The packed sequences, if any; not with offsets.

    >>> block_ends(2, torch.arange(5), None).tolist()
    [[False, True, False, True, False]]
    >>> block_ends(torch.tensor([0, 3, 4, 5]), torch.arange(5), None).tolist()
    [[False, False, True, True, True]]
    """
    if isinstance(causal_block, Tensor):
        return torch.isin(positions + 1, causal_block.to(positions.device)).unsqueeze(0)
    token_positions = positions.unsqueeze(0) if packing is None else packing.position
    return (token_positions + 1) % causal_block == 0


def block_bounds(
    offsets: Int[Tensor, " offsets"], positions: Int[Tensor, " T"]
) -> tuple[Int[Tensor, " T"], Int[Tensor, " T"]]:
    """Return where the block of each token begins and ends, counted from the first of the tokens.

    >>> block_bounds(torch.tensor([0, 3, 4]), torch.arange(4))
    (tensor([0, 0, 0, 3]), tensor([3, 3, 3, 4]))
    """
    offsets = offsets.to(positions.device).long()
    block = torch.searchsorted(offsets[1:], positions, right=True).clamp(max=len(offsets) - 2)
    return offsets[block] - positions[:1], offsets[block + 1] - positions[:1]


def block_ranges(causal_block: Blocks | None, tokens: int) -> Iterator[range]:
    """Yield the tokens of each block; None is a single block.

    >>> list(block_ranges(2, 3)), list(block_ranges(torch.tensor([0, 1, 3]), 3))
    ([range(0, 2), range(2, 3)], [range(0, 1), range(1, 3)])
    """
    if isinstance(causal_block, Tensor):
        offsets = causal_block.tolist()
    else:
        offsets = [*range(0, tokens, causal_block or tokens), tokens]
    return (range(start, stop) for start, stop in pairwise(offsets) if start < stop)
