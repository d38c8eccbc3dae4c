"""Chance as a pure function: the order of an epoch and the seed of a step, from nothing but names.

A run that stops and goes on reads the same batches and draws the same noise as one that did
not stop, without replaying what came before.
"""

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import islice
from typing import TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

ItemT = TypeVar("ItemT")


def derive_seed(*parts: int | str) -> int:
    """Derive the seed of one purpose: what is drawn for step 7 shares nothing with step 8.

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
