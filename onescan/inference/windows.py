"""Sliding-window prediction for grids that are too large for memory."""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from onescan.checks import check_floating, check_positive
from onescan.messages import plural
from onescan.progress import progress_bar
from onescan.shapes import GridOutputs, Grids

SPREAD = 8  # standard deviations of the weights per window side
LEAST_WEIGHT = 1e-3  # of the largest weight, so that corners of the grid have weights


@torch.no_grad()
def predict_windows(
    model: Callable[[Grids], GridOutputs],
    images: Grids,
    window: int | Sequence[int],
    *,
    overlap: float = 0.5,
    batch_size: int = 4,
    progress: bool = False,
) -> GridOutputs:
    """Predict each position of a grid as the weighted mean over all windows that contain it.

    Weights decrease from the center of a window as a Gaussian, since predictions at its border lack
    context. Apart from the input and the output, memory depends only on `window` and `batch_size`.

    Args:
        model: Maps grids [B, channels, *window] to outputs [B, out_channels, *window], such as a
            `DensePredictor` in evaluation mode.
        images: Grids of any size, of shape [B, channels, *sides].
        window: Size of the window along each axis, or one number for all axes. It is cut to the
            size of the grid.
        overlap: Overlap of neighboring windows, as a fraction of the window size, at least 0 and
            below 1.
        batch_size: Windows per call of the model.
        progress: Show a progress bar.

    Returns:
        Outputs of shape [B, out_channels, *sides] on the device of the images.

    Raises:
        ValueError: If an argument is out of range, or the model's outputs do not have the size of
            the window.

    >>> images = torch.randn(1, 2, 50, 40)
    >>> torch.allclose(predict_windows(lambda x: 2 * x, images, 16), 2 * images, atol=1e-6)
    True
    """
    check_floating(images=images)
    sides = tuple(images.shape[2:])
    check_positive(batch_size=batch_size)
    check_positive(**{f"images.shape[{axis}]": size for axis, size in enumerate(images.shape)})
    sizes = (window,) * len(sides) if isinstance(window, int) else tuple(window)
    if len(sizes) != len(sides):
        raise ValueError(
            f"window has {plural(len(sizes), 'size')}, but images have {len(sides)} axes"
        )
    check_positive(**{f"window[{axis}]": size for axis, size in enumerate(sizes)})
    if not 0 <= overlap < 1:
        raise ValueError(f"overlap is {overlap}, expected 0 or more and less than 1")
    sizes = tuple(map(min, sizes, sides))
    lines = (_slices(*pair, overlap) for pair in zip(sides, sizes, strict=True))
    boxes: list[Any] = [(..., *box) for box in product(*lines)]
    weights, weight = _gaussian(sizes, images), images.new_zeros(sides)
    total: Tensor | None = None
    for box in boxes:
        weight[box] += weights
    windows = list(product(range(len(images)), boxes))
    with progress_bar(len(windows), desc="windows", disable=not progress) as bar:
        for first in range(0, len(windows), batch_size):
            group = windows[first : first + batch_size]
            outputs = model(torch.stack([images[sample][box] for sample, box in group]))
            if tuple(outputs.shape[2:]) != sizes:
                raise ValueError(
                    f"the model returned outputs of size {tuple(outputs.shape[2:])} for a window "
                    f"of size {sizes}, expected the same size"
                )
            if total is None:
                total = outputs.new_zeros(len(images), outputs.shape[1], *sides)
            for (sample, box), output in zip(group, outputs, strict=True):
                total[sample][box] += output * weights.to(output.dtype)
            bar.update(len(group))
    assert total is not None, "there is at least one window per grid"
    return total / weight.to(total.dtype)


def predict_large(
    model: Callable[[Grids], GridOutputs],
    images: Grids,
    window: Sequence[int],
    overlap: float,
    *,
    batch_size: int = 4,
) -> GridOutputs:
    """Apply a model to grids, window by window if they are larger than a window.

    Args:
        model: As for `predict_windows`.
        images: Grids of any size, of shape [B, channels, *sides].
        window: Size of the window along each axis; () applies the model to whole grids.
        overlap: As for `predict_windows`.
        batch_size: As for `predict_windows`.
    """
    sides = images.shape[2:]
    if not window or all(side <= size for side, size in zip(sides, window, strict=True)):
        return model(images)
    return predict_windows(model, images, window, overlap=overlap, batch_size=batch_size)


def _slices(side: int, size: int, overlap: float) -> list[slice]:
    """Return the slices of windows that cover a side, evenly spaced.

    >>> [x.start for x in _slices(10, 4, 0.5)], _slices(4, 4, 0.5)
    ([0, 2, 4, 6], [slice(0, 4, None)])
    """
    stride = max(int(size * (1 - overlap)), 1)
    count = math.ceil((side - size) / stride) + 1
    starts = (round(i * (side - size) / max(count - 1, 1)) for i in range(count))
    return [slice(start, start + size) for start in starts]


def _gaussian(sizes: tuple[int, ...], like: Tensor) -> Tensor:
    """Return the weight of each position of a window, the largest one 1."""
    weights = like.new_ones(())
    for size in sizes:
        offsets = torch.arange(size, dtype=like.dtype, device=like.device) - (size - 1) / 2
        line = (-0.5 * (SPREAD * offsets / size).square()).exp()
        weights = weights.unsqueeze(-1) * line
    return (weights / weights.max()).clamp(min=LEAST_WEIGHT)
