"""A VAE that turns images into latents."""

from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onescan.data import ImageFormat
from onescan.data.images import AnyPixels, unit_pixels
from onescan.data.latents import LatentFormat
from onescan.training.config import Precision
from onescan.training.optim import autocast


def latent_format(vae: Any, name: str, images: ImageFormat) -> LatentFormat:
    """Say what a VAE makes of images, a folder by its absolute path.

    Raises:
        ValueError: it takes images of other channels, or its strides do not divide them.
    """
    channels, stride = vae.config.in_channels, 2 ** (len(vae.config.block_out_channels) - 1)
    if images.channels != channels:
        raise ValueError(
            f"data.channels is {images.channels}, expected {channels}: that is what {name} reads"
        )
    if images.height % stride or images.width % stride:
        raise ValueError(
            f"data.image_size is {(images.height, images.width)}, expected multiples of {stride}: "
            f"one place of a latent of {name} is a square of that side"
        )
    place = Path(name).expanduser()
    return LatentFormat(
        channels=vae.config.latent_channels,
        height=images.height // stride,
        width=images.width // stride,
        scale=float(vae.config.scaling_factor),
        shift=float(vae.config.shift_factor or 0),
        vae=str(place.absolute()) if place.is_dir() else name,
    )


def digest(vae: Any) -> str:
    """Tell VAEs apart by their weights."""
    total = blake2b(digest_size=16)
    for name, weight in sorted(vae.state_dict().items()):
        total.update(name.encode())
        total.update(weight.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


class Encoder:
    """A VAE on its device: images in, mean and spread of what it says of each out, in float32."""

    def __init__(self, vae: Any, precision: Precision, device: torch.device) -> None:
        self.vae = vae.to(device)
        self.precision = precision
        self.device = device

    @torch.no_grad()
    def __call__(self, images: AnyPixels) -> tuple[Tensor, Tensor]:
        """Encode a batch of bytes, or of floats from 0 to 1.

        Raises:
            ValueError: what comes out is not finite.
        """
        pixels = 2 * unit_pixels(images.to(self.device, non_blocking=True)) - 1
        with autocast(self.precision, self.device):
            posterior = self.vae.encode(pixels).latent_dist
        mean, std = posterior.mean.float(), (posterior.logvar.float() / 2).exp()
        if not (mean.isfinite().all() and std.isfinite().all()):
            raise ValueError(
                f"precision is {self.precision}, in which the latents are not finite, expected "
                "one of larger range" + (": try float32" if self.precision != "float32" else "")
            )
        return mean, std
