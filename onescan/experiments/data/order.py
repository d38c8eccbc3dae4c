"""Randomness and order of data as pure functions of seeds, so that an interrupted run can resume.

A resumed run reads the same batches and draws the same noise as an uninterrupted one, without
replaying what came before.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

ItemT = TypeVar("ItemT")

Mark = dict[str, Any]  # position within a shard, in JSON types; {} is its beginning


def derive_seed(*parts: int | str) -> int:
    """Derive the seed of one purpose; other parts give an independent seed.

    >>> derive_seed(0, "step", 7) == derive_seed(0, "step", 7) != derive_seed(0, "step", 8)
    True
    """
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def epoch_order(count: int, *, seed: int, epoch: int) -> Int[Tensor, " count"]:
    """Shuffle 0 to count - 1 for one epoch.

    >>> sorted(epoch_order(4, seed=0, epoch=3).tolist())
    [0, 1, 2, 3]
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    return torch.randperm(count, generator=generator)


def batched(items: Iterable[ItemT], size: int) -> Iterator[list[ItemT]]:
    """Yield lists of `size` items; the last may be shorter.

    >>> list(batched("abcde", 2))
    [['a', 'b'], ['c', 'd'], ['e']]
    """
    iterator = iter(items)
    while group := list(islice(iterator, size)):
        yield group


@dataclass(frozen=True)
class BlockStart:
    """Where a block of a stream begins.

    Attributes:
        block: Number of blocks before it.
        shard: Position of its first item's shard in the shuffled order of shards.
        mark: Position of its first item within that shard.
    """

    block: int = 0
    shard: int = 0
    mark: Mark = field(default_factory=dict)


@dataclass(frozen=True)
class Block(Generic[ItemT]):
    """Consecutive items of a stream, shuffled with each other.

    Attributes:
        items: The items, shuffled.
        start: Where this block begins.
        end: Where the next block begins.
    """

    items: list[ItemT]
    start: BlockStart
    end: BlockStart


def read_blocks(
    read: Callable[[int, Mark], Iterator[tuple[ItemT, Mark]]],
    *,
    shards: int,
    size: int,
    start: BlockStart,
    seed: int | None,
    epoch: int,
    round: int | None = None,
) -> Iterator[Block[ItemT]]:
    """Read shards one after the other in random order and shuffle their items in blocks.

    A block may span shards. Because blocks are shuffled independently, resuming rereads at most
    one block.

    Args:
        read: Reads a shard, given its index and the mark to begin at. Yields each item with the
            mark after it.
        shards: Number of shards.
        size: Items per block; the last may be smaller.
        start: Where to begin: the default, or the `start` or `end` of an earlier block.
        seed: Random seed of the order. None keeps shards and items in their stored order.
        epoch: Index of the epoch, each of which has its own order.
        round: Index of the pass over the shards within an epoch. None if there is only one.
    """
    purpose = () if round is None else (round,)

    def order(count: int, *seed_parts: int | str) -> list[int]:
        if seed is None:
            return list(range(count))
        return epoch_order(count, seed=derive_seed(seed, *seed_parts), epoch=epoch).tolist()

    def block(end: BlockStart) -> Block[ItemT]:
        permutation = order(len(items), "block", *purpose, start.block)
        return Block([items[index] for index in permutation], start, end)

    shard_order = order(shards, "shards", *purpose)
    items: list[ItemT] = []
    mark = start.mark
    for position in range(start.shard, shards):
        for item, next_mark in read(shard_order[position], mark):
            items.append(item)
            if len(items) == size:
                end = BlockStart(start.block + 1, position, next_mark)
                yield block(end)
                items, start = [], end
        mark = {}
    if items:
        yield block(BlockStart(start.block + 1, shards))
