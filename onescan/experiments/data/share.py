"""The part of each sequence or batch that one of several processes handles."""

from typing import NamedTuple

from torch import Tensor


class Share(NamedTuple):
    """A shard of a sequence (consecutive positions along axis 0 of a grid), or rows of a batch.

    Shards are as equal as possible. If there are fewer patches than ranks, some shards are empty.

    Attributes:
        rank: Rank of this process in the group across which each sequence or batch is sharded.
        size: Number of ranks in the group.
        patch: Patch size along the axis. Shards consist of whole patches.

    >>> [Share(rank, 3, patch=2).slice(10) for rank in range(3)]
    [slice(0, 2, None), slice(2, 6, None), slice(6, 10, None)]
    """

    rank: int = 0
    size: int = 1
    patch: int = 1

    def slice(self, length: int) -> slice:
        """Return the range of this rank's positions in a sequence of `length` positions.

        Raises:
            ValueError: If there are several ranks, and patches do not divide the length.
        """
        if self.size == 1:
            return slice(0, length)
        if length % self.patch:
            raise ValueError(
                f"an input of {length} positions along axis 0 cannot be cut into patches of "
                f"{self.patch}, expected a multiple of {self.patch}"
            )
        begin, end = (
            rank * (length // self.patch) // self.size * self.patch
            for rank in (self.rank, self.rank + 1)
        )
        return slice(begin, end)

    def cut(self, x: Tensor, axis: int) -> Tensor:
        """Return this rank's shard of a tensor along an axis."""
        if self.size == 1:
            return x
        shard = self.slice(x.shape[axis])
        return x.narrow(axis, shard.start, shard.stop - shard.start)


WHOLE = Share()
