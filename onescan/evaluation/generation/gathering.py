"""Looking at images one batch after the other, so that a kill at any moment costs a minute's work.

A folder holds state.safetensors, which is replaced as a whole, and features.bin: pooled features of
some images, to which rows are added. Rows beyond those that the state knows of are not counted.
"""

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor

from onescan.checkpoint.files import damaged, writing
from onescan.checkpoint.weights import read_weights, save_weights
from onescan.evaluation.generation.features import Features
from onescan.evaluation.generation.scores import Points, chosen_by_lot
from onescan.evaluation.generation.source import Source, in_steps
from onescan.evaluation.generation.tally import Shown, Tally
from onescan.training.distributed import Interrupts

STATE, ROWS = "state.safetensors", "features.bin"
SAVE_EVERY_S = 60.0
WIDTH = 4  # bytes of a feature


class RowFile:
    """Features of some images, a row each, in a file that grows."""

    def __init__(self, path: Path, rows: int, features: int, checksum: int) -> None:
        self.path, self.rows, self.features, self.checksum = path, rows, features, checksum

    def add(self, features: Float[Tensor, "B F"]) -> None:
        """Write rows behind those that are there."""
        self.features = features.shape[1]
        content = features.detach().cpu().contiguous().numpy().tobytes()
        with writing(self.path.parent), self.path.open("r+b" if self.path.exists() else "w+b") as f:
            f.seek(self.rows * self.features * WIDTH)
            f.truncate()
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        self.checksum = zlib.crc32(content, self.checksum)
        self.rows += len(features)

    def is_whole(self) -> bool:
        """Whether the file holds the rows that were written."""
        if not self.rows:
            return True
        size = self.rows * self.features * WIDTH
        checksum = 0
        try:
            with self.path.open("rb") as content:
                while size and (piece := content.read(min(size, 1 << 20))):
                    checksum, size = zlib.crc32(piece, checksum), size - len(piece)
        except OSError:
            return False
        return not size and checksum == self.checksum

    def open(self) -> Points:
        """Map the rows into memory."""
        shape = (self.rows, self.features)
        # copy-on-write, as torch warns of arrays that cannot be written
        return torch.from_numpy(np.memmap(self.path, dtype=np.float32, mode="c", shape=shape))


class Gathered:
    """What a folder holds of images that were looked at."""

    def __init__(self, tally: Tally, rows: RowFile) -> None:
        self.tally, self.rows = tally, rows

    @property
    def is_done(self) -> bool:
        """Whether all images were looked at."""
        return self.tally.place == self.tally.total

    def save(self, folder: Path) -> None:
        """Keep it: what was kept before stays until this is whole."""
        rows = self.rows
        notes = {"rows": rows.rows, "features": rows.features, "checksum": rows.checksum}
        save_weights(folder / STATE, self.tally.tensors(), notes)


def gather(
    source: Source,
    features: Features,
    folder: Path,
    known: Gathered,
    *,
    rows: int,
    batch: int,
    device: torch.device,
    show: Callable[[int], object],
) -> Gathered:
    """Look at the images that `known` has not, and keep what is found in the folder.

    Args:
        source: where the images are from.
        features: what looks at them.
        folder: as `known` was opened from.
        known: what there is; it is changed.
        rows: images whose features are kept, drawn by lot among all.
        batch: images at once.
        device: of the features.
        show: called with the number of images after each batch.

    Raises:
        KeyboardInterrupt: it was asked for, and all that was found is saved.
        ValueError: an image cannot be read, or features are not finite.
        OSError: nothing can be written to the folder.
    """
    tally, saved = known.tally, monotonic()
    with Interrupts("stopping after this batch, with what was found") as interrupts:
        while not known.is_done:
            stop = min(tally.place + batch, tally.total)
            images, labels = source.images(tally.place, stop)
            if not bool(torch.isfinite(images).all()):
                raise ValueError(
                    f"{source.name}: images {tally.place} to {stop} hold NaN or infinity"
                )
            images = in_steps(images).to(device)
            found = features(images)
            chosen = _chosen(tally, len(images), rows)
            tally.add(images, labels, found)
            if bool(chosen.any()):
                known.rows.add(found.pooled[chosen.to(found.pooled.device)])
            show(stop - tally.place)
            tally.place = stop
            if known.is_done or interrupts.requested or monotonic() - saved >= SAVE_EVERY_S:
                known.save(folder)
                saved = monotonic()
            if interrupts.requested and not known.is_done:
                raise KeyboardInterrupt
    return known


def open_gathered(folder: Path, *, total: int, num_classes: int) -> Gathered:
    """Open what was found before; nothing, where the folder has no state.

    Raises:
        ValueError: a file is damaged; says which, and what to do.
    """
    path = folder / STATE
    if not path.exists():
        return Gathered(Tally(total, num_classes), RowFile(folder / ROWS, 0, 0, 0))
    remedy = f"remove {folder} to measure anew"
    try:
        tensors, notes = read_weights(path, remedy)
        tally = Tally.restore(tensors)
        rows = RowFile(folder / ROWS, notes["rows"], notes["features"], notes["checksum"])
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise damaged(path, error, remedy) from error
    if not rows.is_whole():
        raise damaged(rows.path, ValueError(f"it has not the {rows.rows} rows it had"), remedy)
    return Gathered(tally, rows)


def first_images(folder: Path) -> Shown | None:
    """The first images that were looked at."""
    return open_gathered(folder, total=0, num_classes=0).tally.first


def _chosen(tally: Tally, images: int, rows: int) -> Tensor:
    places = torch.arange(tally.count, tally.count + images)
    return chosen_by_lot(places, tally.total, min(rows, tally.total))
