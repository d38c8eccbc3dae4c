"""Latents of a VAE as a denoiser's input."""

import math
import re
from dataclasses import dataclass
from logging import CRITICAL
from pathlib import Path
from typing import Any

from onescan.checks import HUB_NAME, check_positive, in_a_line
from onescan.inputs.format import Format
from onescan.messages import missing_package
from onescan.shapes import Images


@dataclass(frozen=True, kw_only=True)
class LatentFormat(Format):
    """The latents a model was trained on, and the VAE that decodes them."""

    channels: int
    height: int
    """Height of the latent, which is smaller than its image."""
    width: int
    scale: float
    """Factor of latents; the VAE's scaling_factor."""
    shift: float = 0.0
    """Subtracted before scaling; the VAE's shift_factor."""
    vae: str
    """Folder or hub name of a diffusers AutoencoderKL."""

    def __post_init__(self) -> None:
        sizes = ("channels", "height", "width", "scale")
        check_positive(**{name: getattr(self, name) for name in sizes})
        if not math.isfinite(self.shift):
            raise ValueError(f"shift is {self.shift}, expected a finite number")

    def scaled(self, latents: Images) -> Images:
        """Convert the VAE's latents to the model's input.

        >>> import torch
        >>> format = LatentFormat(channels=1, height=1, width=1, scale=2.0, shift=3.0, vae="vae")
        >>> format.scaled(torch.full((1, 1, 1, 1), 4.0)).item()
        2.0
        """
        return (latents - self.shift) * self.scale

    def unscaled(self, latents: Images) -> Images:
        """Convert what the model generates to what the VAE decodes."""
        return latents / self.scale + self.shift

    def model_input(self, latents: Images) -> Images:
        """Return a dataset's latents, which are already scaled."""
        return latents


def load_vae(name: str) -> Any:
    """Load a diffusers AutoencoderKL from a folder or a hub, on the CPU, in evaluation mode.

    Raises:
        ImportError: If diffusers is not installed.
        ValueError: If it does not exist, cannot be read, or lacks a weight.
    """
    try:
        from diffusers import AutoencoderKL
        from diffusers.utils import logging
    except ImportError as error:
        raise missing_package("the VAE of latents", "diffusers", "generation", error) from error
    path = Path(name).expanduser()
    if not path.is_dir() and not re.fullmatch(HUB_NAME, name):
        raise ValueError(f"vae is {name!r}: there is no such folder")
    level = logging.get_verbosity()
    logging.set_verbosity(CRITICAL)  # missing weights are reported below
    try:
        vae, info = AutoencoderKL.from_pretrained(
            str(path) if path.is_dir() else name, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"vae is {name!r}, which diffusers cannot load as an AutoencoderKL: {in_a_line(error)}"
        ) from error
    finally:
        logging.set_verbosity(level)
    if missing := info["missing_keys"]:
        raise ValueError(
            f"vae is {name!r}, which is not an AutoencoderKL: it has {len(missing)} missing "
            f"weights, such as {min(missing)}"
        )
    return vae.eval().requires_grad_(False)
