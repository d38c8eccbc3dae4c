"""The part of every sequence that one rank of a sequence-parallel run processes."""

from typing import NamedTuple

from torch import Tensor


class Share(NamedTuple):
    """Consecutive positions of a sequence, or of axis 0 of a grid.

    The shares of all ranks are as equal as possible. If there are fewer patches than ranks, some
    shares are empty.

    Attributes:
        rank: Rank in the group of processes that share a sequence.
        size: Number of processes in the group.
        patch: Positions that cannot be separated, such as rows of a patch.

    >>> [Share(rank, 3, patch=2).slice(10) for rank in range(3)]
    [slice(0, 2, None), slice(2, 6, None), slice(6, 10, None)]
    """

    rank: int = 0
    size: int = 1
    patch: int = 1

    def slice(self, length: int) -> slice:
        """Return the positions of this rank, out of `length`.

        Raises:
            ValueError: If several ranks share positions that cannot be split into patches.
        """
        if self.size == 1:
            return slice(0, length)
        if length % self.patch:
            raise ValueError(
                f"input of {length} positions along axis 0 cannot be cut into patches of "
                f"{self.patch}, expected a multiple"
            )
        begin, end = (
            rank * (length // self.patch) // self.size * self.patch
            for rank in (self.rank, self.rank + 1)
        )
        return slice(begin, end)

    def cut(self, x: Tensor, axis: int) -> Tensor:
        """Return this rank's positions of a tensor along an axis."""
        if self.size == 1:
            return x
        own = self.slice(x.shape[axis])
        return x.narrow(axis, own.start, own.stop - own.start)


WHOLE = Share()
