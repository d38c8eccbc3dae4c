"""Volumes such as CT and MR scans with a mask each: NIfTI files in the folders images and masks."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from random import Random

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from onescan.checks import check_distinct
from onescan.experiments.data.array_maps import IGNORED, MAX_CLASSES, count_classes
from onescan.experiments.data.arrays import ArraySplits
from onescan.experiments.data.base import DataConfig, Example, LoadedBatch
from onescan.experiments.data.images import ImageSet
from onescan.experiments.data.pairs import Pair, split_pairs
from onescan.experiments.data.ragged import Sizes
from onescan.experiments.data.statistics import divisors, mean_and_std
from onescan.inputs.images import check_constants
from onescan.inputs.padding import pad_images
from onescan.inputs.targets import Target
from onescan.inputs.volumes import (
    Box,
    Volume,
    VolumeFormat,
    check_channels,
    check_same_geometry,
    open_volume,
    read_values,
    volume_stem,
)

Mask = Int[Tensor, "_ _ _"]


@dataclass(frozen=True, kw_only=True)
class NiftiFolderConfig(DataConfig):
    """Volumes, and masks with the class of each voxel: a folder with subfolders images and masks.

    All files are NIfTI (.nii.gz or .nii). A mask has the same name, size and affine as its image;
    its voxel values are class indices from 0. The folder of masks may also be called labels, and
    the subfolders may be in train and val (or test) folders. Volumes may have different sizes, and
    the last axis of 4-D files holds the channels. Volumes are reoriented so that their axes point
    to the right, to the front and up (RAS). Files are read when a batch needs them, and training
    with task.window keeps only a random window of each.
    """

    path: str
    """A folder with images/NAME.nii.gz and masks/NAME.nii.gz, for example."""
    spacing: tuple[float, float, float] | None = None
    """Distance in mm between neighboring voxels from left to right, back to front and bottom to
    top, to which all volumes are resampled; None keeps their voxels."""
    clip: tuple[float, float] | None = None
    """Lowest and highest intensity, such as -160 and 240 for soft tissue in CT; values outside
    this range are clipped."""
    class_names: tuple[str, ...] = ()
    """Names of the classes in order; () numbers the classes in the masks, which are all read."""
    ignore_index: int | None = None
    """Value of masks at voxels without a class, such as 255. They are ignored in the loss and all
    scores."""
    test_fraction: float = 0.15
    """Fraction of the volumes held out if there is no val or test folder."""
    split_seed: int = 0
    """Random seed of the train-test split."""
    mean: tuple[float, ...] | None = None
    """Mean of each channel, subtracted; None computes it from the training volumes."""
    std: tuple[float, ...] | None = None
    """Standard deviation of each channel, divided by; None computes it from the training
    volumes."""

    def build(self) -> ArraySplits:
        """Find the files and check their headers; read those that classes and statistics need.

        Raises:
            ValueError: If a field is out of range, a folder or a mask is missing, a file cannot be
                read, a mask has another size or affine than its image, or a mask has values that
                are not classes; names the file.
            ImportError: If nibabel is not installed.
        """
        self._check()
        train, test, notes = split_pairs(
            self.path, volume_stem, ".nii.gz", fraction=self.test_fraction, seed=self.split_seed
        )
        headers = [self._open(pair) for pair in chain(train, test)]
        sizes = np.array([volume.resampled_sides(self.spacing) for volume in headers])
        names = self.class_names or tuple(map(str, range(self._count_classes(train, test))))
        check_distinct(**{"data.class_names": names})
        channels = headers[0].channels
        for volume in headers:
            check_channels(volume, channels)
        neutral = (0.0,) * channels, (1.0,) * channels
        format = VolumeFormat(
            channels=channels,
            shape=tuple(sizes.max(axis=0).tolist()),
            mean=neutral[0],
            std=neutral[1],
            is_bytes=False,
            is_ragged=True,
            spacing=self.spacing,
            clip=self.clip,
        )
        sets = [
            VolumeSet(
                format=format,
                pairs=tuple(pairs),
                sizes=part,
                classes=len(names),
                ignore_index=self.ignore_index,
            )
            for pairs, part in ((train, sizes[: len(train)]), (test, sizes[len(train) :]))
        ]
        mean, std = self.mean, self.std
        if mean is None or std is None:
            computed = sets[0].statistics()
            mean, std = mean or computed[0], std or computed[1]
        check_constants(channels, **{"data.mean": mean, "data.std": std})
        return ArraySplits(
            train=sets[0],
            test=sets[1],
            class_names=names,
            format=replace(format, mean=mean, std=std),
            target=Target(kind="class_map"),
            notes=(*notes, spacing_note(np.array([volume.spacing for volume in headers]))),
        )

    def _check(self) -> None:
        """Raise ValueError if spacing or clip is out of range."""
        if self.spacing is not None and not all(0 < mm < math.inf for mm in self.spacing):
            raise ValueError(f"data.spacing is {self.spacing}, expected numbers above 0, in mm")
        if self.clip is not None and not -math.inf < self.clip[0] < self.clip[1] < math.inf:
            raise ValueError(
                f"data.clip is {self.clip}, expected two finite numbers, the smaller first"
            )

    def _open(self, pair: Pair) -> Volume:
        """Open an image, and check that its mask has the same geometry."""
        image, mask = open_volume(pair.image), open_volume(pair.mask)
        check_same_geometry(image, mask)
        check_channels(mask, 1)
        return image

    def _count_classes(self, train: Iterable[Pair], test: Iterable[Pair]) -> int:
        """Return the number of classes in masks: the largest class plus one."""
        training, testing = (
            {
                value
                for pair in pairs
                for value in read_mask(open_volume(pair.mask), self.ignore_index).unique().tolist()
                if value != IGNORED
            }
            for pairs in (train, test)
        )
        tests = {f"a test mask in {self.path}": testing}
        return count_classes(f"the masks in {self.path}", training, tests)


@dataclass(frozen=True, kw_only=True)
class VolumeSet(ImageSet):
    """Volumes of one split with their masks, which are read when a batch needs them.

    A batch is (volumes [B, C, *largest], classes [B, *largest], real voxels [B, *largest]). In the
    padding, the volumes are 0 and the classes -100.

    Attributes:
        format: Channels and spacing of the volumes.
        pairs: The files.
        sizes: Size of each volume after resampling.
        classes: Number of classes.
        ignore_index: Value of masks at voxels without a class.
        window: Size along each axis of a random window, which is read instead of the whole volume
            if an example has a seed; () reads whole volumes.
    """

    format: VolumeFormat
    pairs: tuple[Pair, ...]
    sizes: Sizes
    classes: int
    ignore_index: int | None
    window: tuple[int, ...] = ()
    decodes = True

    def __len__(self) -> int:
        return len(self.pairs)

    def windowed(self, window: tuple[int, ...]) -> "VolumeSet":
        return replace(self, window=window)

    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        """Read a batch.

        Raises:
            ValueError: If a file cannot be read, or a class is out of range; names the file.
        """
        volumes, masks = zip(*map(self._read, examples), strict=True)
        padded, keep = pad_images(volumes)
        classes = torch.full(keep.shape, IGNORED)
        classes[keep] = torch.cat([mask.flatten() for mask in masks])
        return LoadedBatch((padded, classes, keep))

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and standard deviation of each channel over all voxels, after clipping.

        The standard deviation of a constant channel is 1.
        """
        volumes = (read_values(open_volume(pair.image), self.format) for pair in self.pairs)
        # The format neither shifts nor scales yet.
        mean, std = mean_and_std(self.format.model_input(x).flatten(1) for x in volumes)
        return tuple(mean.tolist()), tuple(divisors(mean, std).tolist())

    def _read(self, example: Example) -> tuple[Float[Tensor, "C _ _ _"], Mask]:
        pair, sides = self.pairs[example.source], tuple(self.sizes[example.source].tolist())
        box = self._box(sides, example.seed)
        mask = open_volume(pair.mask)
        classes = read_mask(mask, self.ignore_index, sides, box)
        if bool((classes >= self.classes).any()):
            raise ValueError(
                f"{mask.file} has class {int(classes.max())}, expected 0 to {self.classes - 1}"
            )
        return read_values(open_volume(pair.image), self.format, box), classes

    def _box(self, sides: tuple[int, ...], seed: int | None) -> Box | None:
        """Return a random window of a volume, which depends on the seed alone."""
        if seed is None or not self.window:
            return None
        random, box = Random(seed), []
        for side, size in zip(sides, self.window, strict=True):
            first = random.randint(0, max(side - size, 0))
            box.append(slice(first, min(first + size, side)))
        return tuple(box)


def read_mask(
    mask: Volume,
    ignore_index: int | None,
    sides: tuple[int, ...] | None = None,
    box: Box | None = None,
) -> Mask:
    """Read the class of each voxel of a mask, or of a box of it, with nearest-neighbor resampling.

    Args:
        mask: The mask.
        ignore_index: Value of voxels without a class, which become -100.
        sides: Size to which the whole mask is resampled; None keeps the voxels.
        box: Slices of the resampled mask to return; None is all of it.

    Raises:
        ValueError: If it cannot be read or has values that are not classes; names the file.
    """
    (values,) = mask.read(sides, box, nearest=True)
    is_ignored = values == (math.nan if ignore_index is None else ignore_index)
    is_class = (values >= 0) & (values < MAX_CLASSES) & (values == values.floor())
    if not (is_class | is_ignored).all():
        wrong = values[~(is_class | is_ignored)][0].item()
        raise ValueError(
            f"{mask.file} has a voxel with value {wrong:g}, expected classes, which are integers "
            f"from 0 to {MAX_CLASSES - 1}; --data.ignore-index sets the value of voxels without a "
            "class"
        )
    return torch.where(is_ignored, IGNORED, values).long()


def spacing_note(spacings: Float[np.ndarray, "N 3"]) -> str:
    """Describe the spacing of voxels in files, and how to resample them if it differs.

    >>> spacing_note(np.array([[0.8, 0.7, 2.5], [0.8, 0.7, 5.0], [0.8, 0.7, 5.0]]))
    'the spacing of voxels is 0.8 x 0.7 x 2.5 to 5 mm; --data.spacing resamples all volumes'
    """
    low, high = ([f"{mm:.3g}" for mm in row] for row in (spacings.min(0), spacings.max(0)))
    ranges = [a if a == b else f"{a} to {b}" for a, b in zip(low, high, strict=True)]
    more = "; --data.spacing resamples all volumes" * (low != high)
    return f"the spacing of voxels is {' x '.join(ranges)} mm{more}"
