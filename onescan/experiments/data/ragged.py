"""Sizes of examples that are padded to one size."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int, Shaped

Sizes = Int[np.ndarray, "_ _"]  # of examples, along each axis


def read_sizes(
    where: str,
    name: str,
    lengths: Shaped[np.ndarray, "..."],
    count: int,
    shape: Sequence[int],
) -> Sizes:
    """Check the lengths of examples, and return the size of each along each axis.

    Args:
        where: Beginning of error messages.
        name: Name of the lengths.
        lengths: Sizes along all axes, of shape [N, axes], or along the first one, of shape [N].
        count: Number of examples.
        shape: Size of the padded examples along each axis.

    Raises:
        ValueError: If lengths have another shape or type, or one is out of range; names its row.

    >>> read_sizes("in a.npz,", "lengths", np.array([3, 5]), 2, (4, 8))
    Traceback (most recent call last):
    ValueError: in a.npz, lengths[1] is 5, expected 1 to 4, the size of x along axis 0
    """
    if lengths.dtype.kind not in "iu":
        raise ValueError(f"{where} {name} holds {lengths.dtype}, expected integers")
    if lengths.shape not in ((count,), (count, len(shape))):
        raise ValueError(
            f"{where} {name} has shape {lengths.shape}, expected ({count},) or "
            f"({count}, {len(shape)}): the size of each example along the first axis, or along "
            "each axis"
        )
    table = lengths.reshape(count, -1)
    wrong = np.argwhere((table < 1) | (table > np.array(shape[: table.shape[1]])))
    if len(wrong):
        row, axis = wrong[0].tolist()
        index = f"{row}" if lengths.ndim == 1 else f"{row}, {axis}"
        raise ValueError(
            f"{where} {name}[{index}] is {table[row, axis]}, expected 1 to {shape[axis]}, the size "
            f"of x along axis {axis}"
        )
    sizes = np.tile(np.array(shape, dtype=np.int64), (count, 1))
    sizes[:, : table.shape[1]] = table
    return sizes


def real_positions(sizes: Sizes) -> Bool[np.ndarray, "N *largest"]:
    """Return which positions belong to the examples, within the largest size along each axis.

    >>> real_positions(np.array([[3], [1]])).astype(int).tolist()
    [[1, 1, 1], [1, 0, 0]]
    """
    positions = np.indices(sizes.max(axis=0), sparse=True)
    real = np.ones((len(sizes), *[1] * len(positions)), dtype=bool)
    for position, size in zip(positions, sizes.T, strict=True):
        real = real & (position < size.reshape(-1, *[1] * position.ndim))
    return real


def size_range(sizes: Sizes) -> str:
    """Describe the sizes of examples: the smallest and the largest along each axis.

    >>> size_range(np.array([[800, 2], [1234, 2]]))
    '800 to 1,234 x 2'
    """
    pairs = zip(sizes.min(axis=0), sizes.max(axis=0), strict=True)
    return " x ".join(f"{low:,} to {high:,}" if low < high else f"{low:,}" for low, high in pairs)
