"""Volumes such as CT and MR scans: NIfTI files, their geometry, and how a model reads them."""

import gzip
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

from onescan.inputs.arrays import ArrayFormat
from onescan.inputs.images import AnyGrid
from onescan.messages import missing_package, plural

Values = Real[Tensor, "channels _ _ _"]
Box = tuple[slice, ...]

AXES = 3
MM3_PER_ML = 1000
SUFFIXES = (".nii.gz", ".nii")
SPATIAL = 7  # bits of a header's units that are those of space
TO_MM = {1: 1000.0, 3: 0.001}  # for meters and microns; other units are taken to be mm
MAX_SHIFT = 0.1  # voxels by which the corners of an image and its mask may differ
MAX_COMPRESSION = 1032  # largest factor by which gzip shortens data
BYTE = 256
DAMAGE = (OSError, EOFError, ValueError, OverflowError, MemoryError, zlib.error)


@dataclass(frozen=True, kw_only=True)
class VolumeFormat(ArrayFormat):
    """The volumes a model was trained on.

    Their axes point to the right, to the front (anterior) and up (superior), as in nibabel's
    closest canonical orientation. `model_input` clips intensities before it standardizes them.
    """

    spacing: tuple[float, float, float] | None = None
    """Distance in mm between neighboring voxels along each axis, to which volumes are resampled;
    None keeps their voxels."""
    clip: tuple[float, float] | None = None
    """Lowest and highest intensity; values outside this range are clipped."""

    def in_training_range(self, values: AnyGrid) -> AnyGrid:
        return values if self.clip is None else values.clamp(*self.clip)


@dataclass(frozen=True, kw_only=True)
class Volume:
    """A NIfTI file, of which parts are read when they are needed.

    Axes are ordered and directed as in `VolumeFormat`, whatever their order in the file.
    """

    file: Path
    stored: Any
    """The `Nifti1Image` or `Nifti2Image` of nibabel, with axes in the file's order."""
    orientation: Int[np.ndarray, "3 2"]
    """For each axis of the file, its index among the axes here, and 1, or -1 if it is reversed."""

    @property
    def channels(self) -> int:
        return math.prod(self.stored.shape[AXES:])

    @property
    def sides(self) -> tuple[int, ...]:
        """Number of voxels along each axis."""
        return tuple(np.take(self.stored.shape, np.argsort(self.orientation[:, 0])).tolist())

    @cached_property
    def affine(self) -> Float[np.ndarray, "4 4"]:
        """Map from the indices of a voxel to its coordinates in mm."""
        from nibabel.orientations import inv_ornt_aff

        shape = self.stored.shape[:AXES]
        affine = self.stored.affine @ inv_ornt_aff(self.orientation, shape)
        unit = TO_MM.get(_units(self.stored), 1.0)
        return np.diag([unit] * AXES + [1.0]) @ affine

    @property
    def spacing(self) -> tuple[float, ...]:
        """Distance in mm between neighboring voxels along each axis."""
        return tuple(np.linalg.norm(self.affine[:AXES, :AXES], axis=0).tolist())

    @property
    def voxel_ml(self) -> float:
        """Volume of a voxel in milliliters."""
        return float(abs(np.linalg.det(self.affine[:AXES, :AXES]))) / MM3_PER_ML

    def corners(self) -> Float[np.ndarray, "8 3"]:
        """Return the coordinates of the outermost voxels in mm."""
        ends = np.array(list(product(*((0, n - 1) for n in self.sides))))
        return ends @ self.affine[:AXES, :AXES].T + self.affine[:AXES, AXES]

    def resampled_sides(self, spacing: Sequence[float] | None) -> tuple[int, ...]:
        """Return the size after resampling to a spacing in mm; None keeps the voxels."""
        if spacing is None:
            return self.sides
        pairs = zip(self.sides, self.spacing, spacing, strict=True)
        return tuple(max(1, round(n * old / new)) for n, old, new in pairs)

    def read(
        self, sides: Sequence[int] | None = None, box: Box | None = None, *, nearest: bool = False
    ) -> Values:
        """Read the volume, or a box of it, resampled to a size.

        Args:
            sides: Size to which the whole volume is resampled; None keeps the voxels.
            box: Slices of the resampled volume to return; None is all of it.
            nearest: Whether a resampled voxel is the nearest one, instead of linear interpolation.

        Returns:
            Values of shape [channels, *sides]: float32, or float64 if `nearest`.

        Raises:
            ValueError: If the file is damaged or truncated; names it.
        """
        sides = sides or self.sides
        box = box or tuple(map(slice, sides))
        lines = [_line(*axis, nearest=nearest) for axis in zip(self.sides, sides, box, strict=True)]
        try:
            values = self._read(tuple(line.needed for line in lines))
        except DAMAGE as error:
            raise ValueError(f"{self.file} cannot be read: {_first_line(error)}") from error
        tensor = torch.from_numpy(values.astype(np.float64 if nearest else np.float32))
        return _interpolated(tensor, lines)

    def to_stored(self, classes: Int[Tensor, "_ _ _"]) -> Int[np.ndarray, "_ _ _"]:
        """Return classes with the order of axes of the file."""
        import nibabel

        model_orientation = nibabel.orientations.axcodes2ornt("RAS")
        transform = nibabel.orientations.ornt_transform(model_orientation, self.orientation)
        return nibabel.orientations.apply_orientation(classes.numpy(), transform)

    def _read(self, box: Box) -> Real[np.ndarray, "channels _ _ _"]:
        import nibabel

        slices = []
        for n, (axis, sign) in zip(self.stored.shape, self.orientation, strict=False):
            axis_slice = box[int(axis)]
            slices.append(
                axis_slice if sign > 0 else slice(n - axis_slice.stop, n - axis_slice.start)
            )
        values = np.asarray(self.stored.dataobj[tuple(slices)])
        values = nibabel.orientations.apply_orientation(values, self.orientation)
        return np.moveaxis(values.reshape(*values.shape[:AXES], self.channels), -1, 0)


def is_volume_name(name: str) -> bool:
    """Return whether a file name is that of a NIfTI file.

    >>> is_volume_name("a/B.NII.gz"), is_volume_name("a.nii"), is_volume_name("a.gz")
    (True, True, False)
    """
    return volume_stem(name) is not None


def volume_stem(name: str) -> str | None:
    """Return the name of a NIfTI file without its suffix; None for other files.

    >>> volume_stem("scan.1.nii.gz"), volume_stem("scan.png")
    ('scan.1', None)
    """
    lower = name.lower()
    return next((name[: -len(end)] for end in SUFFIXES if lower.endswith(end)), None)


def open_volume(path: str | Path) -> Volume:
    """Open a NIfTI file (.nii or .nii.gz) without reading its voxels.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no NIfTI file, is damaged, or does not hold real numbers with three
            axes, or four with one for channels; names the file.
        ImportError: If nibabel is not installed.
    """
    try:
        import nibabel
        from nibabel.orientations import io_orientation
        from nibabel.spatialimages import HeaderDataError
    except ImportError as error:
        raise missing_package("reading NIfTI files", "nibabel", "medical", error) from error
    file = Path(path)
    if not file.exists():
        raise FileNotFoundError(f"there is no file {file}")
    if not (file.is_file() and is_volume_name(file.name)):
        raise ValueError(f"{file} is not a NIfTI file, expected a name ending in .nii or .nii.gz")
    try:  # other formats that nibabel knows are not opened
        kinds = (nibabel.Nifti1Image, nibabel.Nifti2Image)
        matching = (kind for kind in kinds if kind.path_maybe_image(str(file))[0])
        if (kind := next(matching, None)) is None:
            raise ValueError("it has no NIfTI header")
        stored: Any = kind.from_filename(str(file))
        shape, dtype, affine = stored.shape, stored.get_data_dtype(), stored.affine
        expected_bytes = math.prod(shape) * dtype.itemsize + stored.dataobj.offset
    except (*DAMAGE, nibabel.filebasedimages.ImageFileError, HeaderDataError) as error:
        raise ValueError(f"{file} cannot be read: {_first_line(error)}") from error
    if len(shape) not in (AXES, AXES + 1) or min(shape) < 1:
        raise ValueError(
            f"{file} has shape {shape}, expected three axes, or four with the channels last"
        )
    if dtype.kind not in "iuf":
        raise ValueError(f"{file} holds {dtype}, expected real numbers")
    if expected_bytes > file.stat().st_size * (
        MAX_COMPRESSION if file.suffix.lower() == ".gz" else 1
    ):
        raise ValueError(f"{file} is truncated: its header states {expected_bytes:,} bytes")
    orientation = io_orientation(affine) if np.isfinite(affine).all() else np.full(1, np.nan)
    if np.isnan(orientation).any():  # such as of an axis without a direction
        raise ValueError(f"{file} has an invalid affine: {affine.tolist()}")
    return Volume(file=file, stored=stored, orientation=orientation.astype(int))


def check_same_geometry(image: Volume, mask: Volume) -> None:
    """Check that a mask has the size and position of its image, up to the order of axes.

    Raises:
        ValueError: If it does not; names both files.
    """
    if image.sides != mask.sides:
        raise ValueError(
            f"{mask.file} has {_times(mask.sides)} voxels, but {image.file} has "
            f"{_times(image.sides)}"
        )
    shift = np.linalg.norm(image.corners() - mask.corners(), axis=1).max() / min(image.spacing)
    if not shift <= MAX_SHIFT:
        raise ValueError(
            f"{mask.file} and {image.file} have different affines: their corners are up to "
            f"{shift:.3g} voxels apart, expected at most {MAX_SHIFT}"
        )


def check_channels(volume: Volume, channels: int) -> None:
    """Raise ValueError if a volume has another number of channels than expected; names its file."""
    if volume.channels != channels:
        channel_count = plural(volume.channels, "channel")
        raise ValueError(f"{volume.file} has {channel_count}, expected {channels}")


def read_volume(path: str | Path, format: VolumeFormat) -> Float[Tensor, "channels _ _ _"]:
    """Read a NIfTI file as a model's input: oriented, resampled, clipped, standardized.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no NIfTI file, is damaged, has other channels than the training data,
            or holds values that are not finite; names the file.
        ImportError: If nibabel is not installed.
    """
    return format.model_input(read_values(open_volume(path), format))


def read_values(
    volume: Volume, format: VolumeFormat, box: Box | None = None
) -> Float[Tensor, "channels _ _ _"]:
    """Read a volume, or a box of it, resampled to the spacing of a format, but not clipped.

    Raises:
        ValueError: As `read_volume`.
    """
    check_channels(volume, format.channels)
    values = volume.read(volume.resampled_sides(format.spacing), box)
    if not values.isfinite().all():
        raise ValueError(
            f"{volume.file} has values that are not finite (NaN or infinite): replace them, or "
            "remove the file"
        )
    return values


def resample(values: Values, sides: Sequence[int]) -> Values:
    """Resample values [channels, *sides] to a size by linear interpolation.

    The outer faces of the first and the last voxels stay in place, as with torch's `interpolate`.
    """
    pairs = zip(values.shape[1:], sides, strict=True)
    lines = [_line(old, new, slice(new), nearest=False) for old, new in pairs]
    return _interpolated(values[(slice(None), *(line.needed for line in lines))], lines)


def volume_bytes(volume: Volume, classes: Int[Tensor, "_ _ _"]) -> bytes:
    """Return the .nii.gz file of a map of classes in the geometry of a volume.

    Args:
        volume: The volume, of which the file gets the affine and the order of axes.
        classes: The class of each voxel, with the size and orientation of the volume.
    """
    small = np.uint8 if int(classes.max()) < BYTE else np.uint16
    stored = volume.stored
    image = type(stored)(volume.to_stored(classes).astype(small), stored.affine)
    header = stored.header
    code = int(header["sform_code"]) or int(header["qform_code"]) or 1
    image.set_sform(stored.affine, code)
    image.set_qform(stored.affine, code)
    image.header["xyzt_units"] = _units(stored)
    return gzip.compress(image.to_bytes(), compresslevel=6, mtime=0)


def _units(image: Any) -> int:
    return int(image.header["xyzt_units"]) & SPATIAL


class _Line(NamedTuple):
    """How resampled values along an axis are computed from the values that are needed."""

    needed: slice
    low: Int[np.ndarray, " size"]
    high: Int[np.ndarray, " size"]
    weight: Float[np.ndarray, " size"]  # of the higher one


def _line(old: int, new: int, part: slice, *, nearest: bool) -> _Line:
    """Return how a part of an axis is resampled from `old` to `new` values.

    >>> _line(4, 2, slice(2), nearest=False).low.tolist()
    [0, 2]
    """
    centers = (np.arange(*part.indices(new)) + 0.5) * old / new
    if nearest:
        low = high = np.floor(centers).astype(int).clip(max=old - 1)
        weight = np.zeros(len(low))
    else:
        position = (centers - 0.5).clip(0, old - 1)
        low, high = np.floor(position).astype(int), np.ceil(position).astype(int)
        weight = position - low
    first = int(low[0])
    return _Line(slice(first, int(high[-1]) + 1), low - first, high - first, weight)


def _interpolated(values: Values, lines: Sequence[_Line]) -> Values:
    for axis, line in enumerate(lines, start=1):
        if line.weight.any():
            weight = values.new_tensor(line.weight).reshape(-1, *[1] * (len(lines) - axis))
            low, high = (
                values.index_select(axis, torch.from_numpy(indices))
                for indices in (line.low, line.high)
            )
            values = low.lerp(high, weight)
        elif len(line.low) != values.shape[axis]:
            values = values.index_select(axis, torch.from_numpy(line.low))
    return values


def _times(sides: Sequence[int]) -> str:
    return " x ".join(map(str, sides))


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type."""
    return (str(error).splitlines() or [type(error).__name__])[0]
