"""Files as evaluators of generated images read them: arrays of images, or their statistics."""

import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray

from onescan.checks import in_a_line
from onescan.data.images import unit_pixels
from onescan.evaluation.generation.source import Source
from onescan.evaluation.generation.stamp import stamp
from onescan.shapes import Images, Labels

DAMAGE = (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error)  # what is then raised


class NpzSource(Source):
    """Images as evaluators read them: arr_0 of bytes, `[images, height, width, channels]`.

    Labels are arr_1's, if that is there. The images are read piece by piece.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.name, self.stamp = file, file.name, stamp(file)
        self.content, self.shape = _open_array(file)
        self.begin, self.size = self.content.tell(), (self.shape[1], self.shape[2])
        labels = read_npz(file, "arr_1").get("arr_1")
        if labels is not None and (labels.shape != self.shape[:1] or labels.dtype.kind not in "iu"):
            raise ValueError(f"{file} holds arr_1 {labels.shape}, expected a label for each image")
        self.labels = None if labels is None else torch.from_numpy(labels.astype(np.int64))

    def __len__(self) -> int:
        return self.shape[0]

    def images(self, start: int, stop: int) -> tuple[Images, Labels | None]:
        count, each = min(stop, len(self)) - start, math.prod(self.shape[1:])
        try:
            if self.content.tell() != self.begin + start * each:
                self.content.seek(self.begin + start * each)
            piece = self.content.read(count * each)
        except DAMAGE as error:
            raise _damaged(self.file, error) from error
        if len(piece) < count * each:
            raise _damaged(self.file, "arr_0 ends early")
        flat = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
        pixels = rearrange(flat.view(count, *self.shape[1:]), "b h w c -> b c h w")
        return unit_pixels(pixels), None if self.labels is None else self.labels[start:stop]


def read_npz(file: Path, *names: str) -> dict[str, NDArray[Any]]:
    """Read some arrays of a file, those of them that are there; nothing is unpickled.

    Raises:
        ValueError: it is no npz file, or is damaged.
    """
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names if name in arrays}
    except (AttributeError, TypeError, *DAMAGE) as error:  # of what is no archive
        raise _damaged(file, error) from error


def npz_names(file: Path) -> list[str]:
    """List the arrays of a file.

    Raises:
        ValueError: it is no npz file, or is damaged.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except DAMAGE as error:
        raise _damaged(file, error) from error


def _open_array(file: Path) -> tuple[zipfile.ZipExtFile, tuple[int, int, int, int]]:
    """The bytes of arr_0, and its shape."""
    if "arr_0" not in npz_names(file):
        raise ValueError(f"{file} has no arr_0, expected images [images, height, width, channels]")
    try:
        content = zipfile.ZipFile(file).open("arr_0.npy")  # noqa: SIM115
        assert isinstance(content, zipfile.ZipExtFile)
        version = np.lib.format.read_magic(content)
        readers = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        shape, by_columns, dtype = readers[version](content)
    except (KeyError, *DAMAGE) as error:
        raise _damaged(file, error) from error
    match shape:
        case (count, height, width, 1 | 3 as channels) if dtype == np.uint8 and not by_columns:
            return content, (count, height, width, channels)
    raise ValueError(
        f"{file} holds arr_0 {shape} of {dtype}, expected bytes of [images, height, width, 3 or 1]"
    )


def _damaged(file: Path, why: Exception | str) -> ValueError:
    what = in_a_line(why) if isinstance(why, Exception) else why
    return ValueError(f"{file} is no npz file, or is damaged: {what}")
