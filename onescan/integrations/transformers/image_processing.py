"""An image processor with the interface of transformers."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import BaseImageProcessor, BatchFeature
from transformers.image_transforms import to_channel_dimension_format
from transformers.image_utils import ChannelDimension, make_flat_list_of_images

from onescan.inputs.image_files import Pixels
from onescan.inputs.images import ImageFormat, check_unit_range, native_type, unit_pixels

# What all images go through: bicubic interpolation, and pixels from 0 to 1.
STEPS = {"resample": float(Image.Resampling.BICUBIC), "rescale_factor": 1 / 255}


class OnescanImageProcessor(BaseImageProcessor):
    """Prepare images as `onescan predict` does: crop, resize and standardize them.

    Args:
        size: Height and width of the result.
        image_mean: Mean of each channel, for pixels from 0 to 1. One number selects grayscale.
        image_std: Standard deviation of each channel.
        crop_pct: Size of the center crop, which has the aspect ratio of `size`, as a fraction of
            the largest possible crop. None resizes the whole image.
        options: Further fields of preprocessor_config.json.

    Raises:
        ValueError: If a number is out of range, or an option turns off a step.

    >>> processor = OnescanImageProcessor(size={"height": 8, "width": 16}, crop_pct=1.0)
    >>> processor(torch.zeros(3, 20, 20, dtype=torch.uint8)).pixel_values.shape
    torch.Size([1, 3, 8, 16])
    """

    model_input_names = ["pixel_values"]  # noqa: RUF012

    def __init__(
        self,
        *,
        size: dict[str, int] | None = None,
        image_mean: Sequence[float] = (0.5, 0.5, 0.5),
        image_std: Sequence[float] = (0.5, 0.5, 0.5),
        crop_pct: float | None = None,
        **options: Any,
    ) -> None:
        for step in ("do_resize", "do_rescale", "do_normalize"):
            if not options.pop(step, True):
                raise ValueError(f"{step} is False, expected True: the model needs this step")
        for name, actual in STEPS.items():
            value = options.pop(name, None)
            if value is not None and not math.isclose(value, actual):
                raise ValueError(f"{name} is {value}, expected {actual:.8g}: it cannot be changed")
        super().__init__(**options)
        self.size = {"height": 224, "width": 224} if size is None else dict(size)
        if not {"height", "width"} <= set(self.size):
            raise ValueError(f"size is {self.size}, expected the keys 'height' and 'width'")
        self.image_mean = list(image_mean)
        self.image_std = list(image_std)
        self.crop_pct = crop_pct
        self.do_normalize = True
        self.to_onescan()  # checks the fields

    def to_dict(self) -> dict[str, Any]:
        """Return the fields to save, without the class, which the model's config names.

        If it were named here, pipelines would also look for a video processor of that class.
        """
        return {k: v for k, v in super().to_dict().items() if k != "image_processor_type"}

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoImageProcessor") -> None:
        """Do nothing, because the auto_map is complete without copying source code."""

    @classmethod
    def from_onescan(cls, image_format: ImageFormat) -> "OnescanImageProcessor":
        """Convert the format of a run's images."""
        return cls(
            size={"height": image_format.height, "width": image_format.width},
            image_mean=image_format.mean,
            image_std=image_format.std,
            crop_pct=image_format.crop,
        )

    def to_onescan(self) -> ImageFormat:
        """Convert to the format of a run's images."""
        return ImageFormat(
            channels=len(self.image_mean),
            height=self.size["height"],
            width=self.size["width"],
            mean=tuple(self.image_mean),
            std=tuple(self.image_std),
            crop=self.crop_pct,
        )

    def preprocess(self, images: Any, return_tensors: str | None = "pt") -> BatchFeature:
        """Prepare one image or several.

        Args:
            images: PIL images, or arrays or tensors [channels, height, width] or [height, width,
                channels]. The type determines the range: uint8 (0 to 255), uint16 (0 to 65535),
                bool, or floats from 0 to 1.
            return_tensors: "pt" for tensors, "np" for arrays.

        Returns:
            ``pixel_values`` of shape [B, channels, height, width].

        Raises:
            ValueError: If there is no image, an array has another type or no pixels, or floats are
                outside 0 to 1.
        """
        image_format = self.to_onescan()
        flat: Any = make_flat_list_of_images(images)
        if not flat:
            raise ValueError("images is empty, expected at least one image")
        pixels = [_prepare(image_format, image) for image in flat]
        return BatchFeature({"pixel_values": torch.stack(pixels)}, tensor_type=return_tensors)

    def post_process_semantic_segmentation(
        self, outputs: Any, target_sizes: Sequence[Sequence[int]] | None = None
    ) -> list[Tensor]:
        """Return the most probable class of each pixel, for each image.

        Args:
            outputs: Output of an `OnescanForSemanticSegmentation`.
            target_sizes: Height and width of each image before it was resized. None returns the
                size of the model's input.

        Returns:
            Classes, [height, width] each.

        Raises:
            ValueError: If there is not one size per image.
        """
        logits = outputs.logits
        if target_sizes is None:
            return list(logits.argmax(dim=1))
        if len(target_sizes) != len(logits):
            raise ValueError(
                f"target_sizes has {len(target_sizes)} sizes, but there are {len(logits)} images"
            )
        return [
            interpolate(each[None], size=tuple(size), mode="bilinear")[0].argmax(dim=0)
            for each, size in zip(logits, target_sizes, strict=True)
        ]


def _prepare(image_format: ImageFormat, image: Any) -> Pixels:
    """Convert an image, array or tensor to a model's input. Only bytes are resized as bytes."""
    if isinstance(image, Image.Image):
        return image_format.from_pil(image)
    if not isinstance(image, torch.Tensor):
        values = np.asarray(image)
        image = torch.from_numpy(values.astype(native_type(values.dtype)))
    image = image.detach().cpu()
    if not image.numel():
        raise ValueError(f"an image has shape {tuple(image.shape)}, expected no empty axis")
    unit = unit_pixels(image)
    check_unit_range(unit)
    is_bytes = image.dtype == torch.uint8
    values = (image if is_bytes else unit.float()).numpy()
    last: Any = to_channel_dimension_format(values, ChannelDimension.LAST)
    if is_bytes:
        stored = last.squeeze(-1) if last.shape[-1] == 1 else last
        return image_format.from_pil(Image.fromarray(stored))
    return image_format.from_pixels(torch.from_numpy(last).movedim(-1, 0))
