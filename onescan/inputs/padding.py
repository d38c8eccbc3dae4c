"""Images of mixed sizes in one batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from onescan.checks import check_positive
from onescan.messages import plural
from onescan.shapes import GridKeep, Grids


def pad_images(
    images: Sequence[Tensor], multiple: int | Sequence[int] = 1
) -> tuple[Grids, GridKeep]:
    """Pad images to the largest size along each axis, with zeros after their last pixels.

    Classifiers read the result as `model(batch, keep=keep)`.

    Args:
        images: Images of any number of axes, each of shape [channels, *sides].
        multiple: Round the size up to a multiple of this number, or of one number per axis. The
            model's patch size is not needed here: it divides the sides of each image.

    Returns:
        The batch, [B, channels, *sides], and a mask that is True for real pixels, [B, *sides].

    Raises:
        ValueError: If there are no images, or their channels or numbers of axes differ.

    >>> batch, keep = pad_images([torch.ones(3, 32, 48), torch.ones(3, 64, 16)])
    >>> batch.shape, keep.sum(dim=(1, 2)).tolist()
    (torch.Size([2, 3, 64, 48]), [1536, 1024])
    """
    if isinstance(images, Tensor):
        raise ValueError("images is a tensor, expected a list of images [channels, *sides]")
    if not images:
        raise ValueError("images is empty, expected at least one")
    channels, axes = images[0].shape[0], images[0].ndim - 1
    for i, image in enumerate(images):
        if image.ndim - 1 != axes or image.shape[0] != channels:
            raise ValueError(
                f"images[{i}] has {image.ndim - 1} axes and {image.shape[0]} channels, expected "
                f"{axes} axes and {channels} channels, like images[0]"
            )
    multiples = (multiple,) * axes if isinstance(multiple, int) else tuple(multiple)
    if len(multiples) != axes:
        raise ValueError(f"multiple has {plural(len(multiples), 'number')}, expected {axes}")
    check_positive(**{f"multiple[{axis}]": count for axis, count in enumerate(multiples)})
    largest = [max(sides) for sides in zip(*(image.shape[1:] for image in images), strict=True)]
    size = [-(-side // count) * count for side, count in zip(largest, multiples, strict=True)]
    batch = images[0].new_zeros(len(images), channels, *size)
    keep = torch.zeros(len(images), *size, dtype=torch.bool, device=batch.device)
    for i, image in enumerate(images):
        inside = tuple(slice(side) for side in image.shape[1:])
        batch[i][(slice(None), *inside)] = image
        keep[i][inside] = True
    return batch, keep
