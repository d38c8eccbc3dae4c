"""Read a folder of images as the image processor of a transformers model does."""

from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onescan.checks import LOAD_ERRORS, in_a_line
from onescan.experiments.data import DataSet, Example, ImageDatasetConfig
from onescan.experiments.linearize_config import LinearizeConfig
from onescan.inputs.image_files import AnyPixels, BytePixels, Crop, decode, read_header
from onescan.inputs.images import ImageFormat, processor_constants, to_bytes

SURVEYED = 1_000  # images that are read before training, to find unreadable ones


@dataclass(frozen=True, kw_only=True)
class _ProcessedFormat(ImageFormat):
    """Images that the image processor of a transformers model resizes and crops."""

    processor: Any

    def decode(self, file: Path | BytesIO, crop: Crop | None = None) -> AnyPixels:
        """Read an image file as the image processor does, but without standardizing it."""
        assert crop is None
        header = read_header(file)
        pixels = decode(
            file,
            channels=self.channels,
            height=header.height,
            width=header.width,
            crop=lambda width, height: (0.0, 0.0, float(width), float(height)),
        )
        resized = _resized(self.processor, to_bytes(pixels))
        if resized.shape != (self.channels, self.height, self.width):
            raise ValueError(
                f"becomes {tuple(resized.shape)} in the image processor, expected "
                f"{(self.channels, self.height, self.width)}"
            )
        return resized


def _processed(processor: Any, pixels: BytePixels, **options: Any) -> Tensor:
    """Apply an image processor to one image."""
    images: Tensor = processor(
        pixels.numpy(), input_data_format="channels_first", return_tensors="pt", **options
    )["pixel_values"]
    if images.ndim != 4 or len(images) != 1:  # noqa: PLR2004
        raise ValueError(
            f"it returns pixel_values of shape {tuple(images.shape)}, expected one image"
        )
    return images[0]


def _resized(processor: Any, pixels: BytePixels) -> Tensor:
    """Resize and crop an image as an image processor does."""
    image = _processed(processor, pixels, do_rescale=False, do_normalize=False)
    return image.float().round().clamp(0, 255).byte()


def image_format(model: Any, processor: Any) -> _ProcessedFormat:
    """Return the format of the images that an image processor makes.

    Raises:
        ValueError: If the processor does more than resizing, cropping, scaling and standardizing.
    """
    vision = getattr(model.config, "vision_config", model.config)
    size, channels = getattr(vision, "image_size", None), getattr(vision, "num_channels", 3)
    height, width = pair(size or 224)
    noise = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (channels, height, width), dtype=torch.uint8, generator=noise)
    try:
        resized, expected = _resized(processor, pixels), _processed(processor, pixels)
        mean, std = processor_constants(processor, channels)
    except LOAD_ERRORS as error:
        raise ValueError(
            f"the model's image processor cannot be used: {in_a_line(error)}"
        ) from error
    format = _ProcessedFormat(
        channels=channels, height=resized.shape[1], width=resized.shape[2], mean=mean, std=std,
        processor=processor,
    )  # fmt: skip
    actual = format.model_input(resized)
    if not torch.allclose(actual, expected.float(), rtol=1e-3, atol=1e-3 / min(std)):
        raise ValueError(
            f"the model's image processor is {type(processor).__name__}, expected one that only "
            "resizes, crops, rescales and normalizes images"
        )
    return format


def open_images(path: str, format: _ProcessedFormat, config: LinearizeConfig) -> Any:
    """Open a folder of images in this format.

    Raises:
        ValueError: If it cannot be read, or an image in it; names the file.
    """
    splits: Any = ImageDatasetConfig(
        path=path,
        label_column=config.label_column,
        test_fraction=config.test_fraction,
        on_error=config.on_error,
        image_size=(format.height, format.width),
        channels=format.channels,  # type: ignore[arg-type]  # which `ImageFormat` has checked
        mean=format.mean,
        std=format.std,
        train_crop=None,
        test_crop=None,
    ).build()
    train, test = (
        replace(part, reader=replace(part.reader, format=format))
        for part in (splits.train, splits.test)
    )
    if config.on_error == "raise":
        _check_readable(train)
    # Notes on crops and stretching are about the format that was replaced.
    notes = tuple(note for note in splits.notes if not note.startswith("images are "))
    return replace(splits, train=train, test=test, format=format, notes=notes)


def _check_readable(images: DataSet) -> None:
    """Read some of the images, so that an unreadable one is found before training.

    Raises:
        ValueError: If one cannot be read; names the file.
    """
    for index in range(0, len(images), -(-len(images) // SURVEYED)):
        images.read([Example(index)])


def pair(size: Any) -> tuple[int, int]:
    """Return height and width of a size in a config, which may be one number."""
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(height), int(width)
