"""A batch of encoded images read into tensors, and what becomes of those that cannot be read."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import UInt8
from torch import Tensor

from onescan.data.base import LoadedBatch
from onescan.data.crop import RandomCrop
from onescan.data.decode import to_bytes
from onescan.data.images import ImageFormat

OnError = Literal["raise", "skip"]


class EncodedImage(NamedTuple):
    """One image before it is decoded.

    Attributes:
        content: its bytes, or the path of its file; None where the data has neither.
        label: its class.
        name: where it is, to tell a user.
    """

    content: bytes | str | None
    label: int
    name: str

    @classmethod
    def of(cls, image: dict[str, Any] | None, label: int, row: str) -> "EncodedImage":
        """Take what the datasets library holds of an image that it has not decoded."""
        content, path = (image or {}).get("bytes"), (image or {}).get("path")
        return cls(path if content is None else content, label, f"{row} ({path})" if path else row)


@dataclass(frozen=True, kw_only=True)
class ImageReader:
    """Decodes images; a random part of those that come with a seed, if there is a crop."""

    format: ImageFormat
    crop: RandomCrop | None
    on_error: OnError

    def read(self, images: Sequence[EncodedImage], seeds: Sequence[int | None]) -> LoadedBatch:
        """Read a batch: pixels as bytes, and labels.

        Where unreadable images are skipped, the next readable one of the batch stands in, so that a
        training batch keeps its size; those without a seed are left out.

        Raises:
            ValueError: an image cannot be read and none may be skipped, or none of all can be.
        """
        pixels: dict[int, UInt8[Tensor, "channels height width"]] = {}
        failures = []
        for place, (image, seed) in enumerate(zip(images, seeds, strict=True)):
            try:
                pixels[place] = self._decode(image, seed)
            except ValueError as error:
                if self.on_error == "raise":
                    raise
                failures.append(str(error))
        if not pixels:
            raise ValueError(f"none of a batch's {len(images)} images can be read: {failures[0]}")
        shown = [
            place if place in pixels else _next(place, list(pixels))
            for place, seed in enumerate(seeds)
            if place in pixels or seed is not None
        ]
        labels = torch.tensor([images[place].label for place in shown])
        return LoadedBatch(
            (torch.stack([pixels[place] for place in shown]), labels), tuple(failures)
        )

    def _decode(
        self, image: EncodedImage, seed: int | None
    ) -> UInt8[Tensor, "channels height width"]:
        crop = None if self.crop is None or seed is None else partial(self.crop, seed=seed)
        try:
            return to_bytes(self.format.decode(_open(image.content), crop))
        except (OSError, ValueError) as error:
            raise ValueError(f"{image.name} {error}") from error


def _open(content: bytes | str | None) -> BytesIO | Path:
    if content is None:
        raise ValueError("holds no image")
    if isinstance(content, bytes):
        return BytesIO(content)
    if "://" not in content:
        return Path(content)
    import fsspec  # comes with torch; of use for hubs alone

    with fsspec.open(content, "rb") as file:
        return BytesIO(file.read())


def _next(place: int, readable: list[int]) -> int:
    return next((other for other in readable if other > place), readable[0])
