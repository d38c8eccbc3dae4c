"""The VAE of latents, loaded from where diffusers saved it."""

import re
from logging import CRITICAL
from pathlib import Path
from typing import Any

from onescan.checks import in_a_line
from onescan.data.sources import HUB_NAME

KIND = "AutoencoderKL"


def load_vae(name: str) -> Any:
    """Load diffusers' AutoencoderKL from a folder or a hub, on the CPU, in evaluation mode.

    Raises:
        ImportError: diffusers is not installed.
        ValueError: it is not there, or cannot be read; a weight is missing.
    """
    try:
        from diffusers import AutoencoderKL
        from diffusers.utils import logging
    except ImportError as error:
        raise ImportError(
            "latents are made by a VAE, which needs diffusers: pip install 'onescan[generation]'"
        ) from error
    place = Path(name).expanduser()
    if not place.is_dir() and not re.fullmatch(HUB_NAME, name):
        raise ValueError(f"vae is {name!r}: there is no such folder")
    told = logging.get_verbosity()
    logging.set_verbosity(CRITICAL)  # of weights that do not fit, which are told below
    try:
        vae, found = AutoencoderKL.from_pretrained(
            str(place) if place.is_dir() else name, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"vae is {name!r}, which diffusers cannot load as an {KIND}: {in_a_line(error)}"
        ) from error
    finally:
        logging.set_verbosity(told)
    if missing := found["missing_keys"]:
        raise ValueError(
            f"vae is {name!r}, which is no {KIND}: its weights lack {min(missing)} and "
            f"{len(missing) - 1} more"
        )
    return vae.eval().requires_grad_(False)
