"""Pathfinder in files: folders of images as the Long Range Arena publishes them.

A folder, as `pathfinder32/curv_contour_length_14`, holds `imgs/<n>/sample_<i>.png` and, as text
despite their names, `metadata/<n>.npy`: a line for each image, in it with a space between the
image's folder, its name, its number, its label, and measures, which are not read.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from onescan.data.images import DAMAGE, open_image
from onescan.data.long_range.scenes import GreyImage

READ = 4  # cells of a line: folder, name, number, label
LABELS = {"0": 0, "1": 1}

log = logging.getLogger("onescan")


class PathfinderFolder:
    """Published images and whether their discs are joined, in the order of the metadata.

    Empty image files are left out, with a warning: the published sets hold some.

    Args:
        folder: with `imgs` and `metadata` in it.

    Raises:
        FileNotFoundError: there is no metadata, or an image is missing.
        ValueError: a line of the metadata is malformed; says the file and the line.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        files = sorted(self.folder.glob("metadata/*.npy"), key=lambda file: (len(file.name), file))
        if not files:
            raise FileNotFoundError(f"there is no metadata/*.npy in {self.folder}")
        self.listed = [row for file in files for row in self._rows(file)]

    def __len__(self) -> int:
        return len(self.listed)

    def example(self, index: int) -> tuple[GreyImage, int]:
        """Read one example.

        Returns:
            The image, and 1 if its discs are joined, else 0.

        Raises:
            ValueError: the file is not an image, is damaged, or not square.
        """
        path, label = self.listed[index]
        try:
            with open_image(path) as image:
                pixels = np.asarray(image.convert("L"))
        except DAMAGE as error:
            raise ValueError(f"{path} cannot be read as an image: {error}") from error
        if pixels.shape[0] != pixels.shape[1]:
            raise ValueError(
                f"{path} has {pixels.shape[1]} x {pixels.shape[0]} pixels, expected a square"
            )
        return pixels, label

    def _rows(self, file: Path) -> Iterator[tuple[Path, int]]:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            raise ValueError(f"{file} is not text, expected lines as published") from None
        for number, line in enumerate(lines, start=1):
            cells = line.split(" ")
            if len(cells) < READ or cells[READ - 1] not in LABELS:
                raise ValueError(
                    f"{file}, line {number}: {line!r}, expected a folder, a name, a number, and "
                    "0 or 1, with a space between"
                )
            image = self.folder / cells[0] / cells[1]
            if image.stat().st_size:
                yield image, LABELS[cells[READ - 1]]
            else:
                log.warning("%s is empty, and is left out", image)
