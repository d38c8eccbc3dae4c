"""What a denoiser works on, pixels or latents: from data to its input, and from what it makes."""

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from onescan.data import ImageFormat
from onescan.data.images import AnyPixels
from onescan.data.latents import LatentFormat, load_vae
from onescan.models.denoiser import max_pixel
from onescan.shapes import Images

AT_ONCE = 8  # latents that are decoded together

Decoded = Float[Tensor, "B _ _ _"]  # pixels, of other sides and channels than latents


class Canvas(ABC):
    """Either kind."""

    size: tuple[int, int]
    """Height and width of what is denoised."""
    clip: float | None
    """How far from 0 it reaches; None where nobody knows."""

    @abstractmethod
    def model_input(self, images: AnyPixels) -> Images:
        """Turn a data set's images into what the model reads."""

    @abstractmethod
    def pixels(self, made: Images) -> Decoded:
        """Turn what the model makes into pixels from 0 to 1."""


class PixelCanvas(Canvas):
    """Pixels, standardized."""

    def __init__(self, format: ImageFormat) -> None:
        self.format, self.size = format, (format.height, format.width)
        self.clip = max_pixel(format.mean, format.std)

    def model_input(self, images: AnyPixels) -> Images:
        return self.format.model_input(images)

    def pixels(self, made: Images) -> Decoded:
        return self.format.pixels(made)


class LatentCanvas(Canvas):
    """Latents, which a VAE decodes; it is loaded when it is first needed."""

    def __init__(self, format: LatentFormat) -> None:
        self.format, self.size, self.clip = format, (format.height, format.width), None

    @cached_property
    def vae(self) -> Any:
        """What decodes.

        Raises:
            ValueError: there is no such VAE.
            ImportError: diffusers is not installed.
        """
        return load_vae(self.format.vae)

    def model_input(self, images: AnyPixels) -> Images:
        return images.float()

    def pixels(self, made: Images) -> Decoded:
        vae = self.vae.to(made.device)
        with torch.autocast(made.device.type, enabled=False):  # float16 has too small a range
            latents = self.format.unscaled(made.float())
            parts = [vae.decode(part).sample for part in latents.split(AT_ONCE)]
        return (torch.cat(parts) / 2 + 0.5).clamp(0, 1)
