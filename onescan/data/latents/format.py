"""The latents a model was trained on, and the VAE that turns them into images."""

from dataclasses import dataclass

from onescan.data.base import Format
from onescan.shapes import Images


@dataclass(frozen=True, kw_only=True)
class LatentFormat(Format):
    """What a VAE makes of an image: its size, and the constants that bring it near unit spread."""

    channels: int
    height: int
    """Of the latent, which is smaller than its image."""
    width: int
    scale: float
    """What latents are multiplied by; diffusers calls it scaling_factor."""
    shift: float = 0.0
    """What is taken off before that; diffusers calls it shift_factor."""
    vae: str
    """The folder or the name on a hub of diffusers' AutoencoderKL."""

    def scaled(self, latents: Images) -> Images:
        """Turn what the VAE encodes into what the model reads.

        >>> import torch
        >>> form = LatentFormat(channels=1, height=1, width=1, scale=2.0, shift=3.0, vae="vae")
        >>> form.scaled(torch.full((1, 1, 1, 1), 4.0)).item()
        2.0
        """
        return (latents - self.shift) * self.scale

    def unscaled(self, latents: Images) -> Images:
        """Turn what the model makes into what the VAE decodes."""
        return latents / self.scale + self.shift

    def model_input(self, latents: Images) -> Images:
        """Turn a data set's latents, scaled already, into what the model reads."""
        return latents
