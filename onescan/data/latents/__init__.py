"""Images that a VAE has encoded once, to be learnt from as latents."""

from onescan.data.latents.dataset import LatentsConfig, LatentSet, LatentSplits
from onescan.data.latents.format import LatentFormat

__all__ = ["LatentFormat", "LatentSet", "LatentSplits", "LatentsConfig"]
