"""The folder of all caches.

This module does not import torch, so that the command line can use it without the delay.
"""

import os
from pathlib import Path

CACHE = "ONESCAN_CACHE"  # environment variable


def cache_root() -> Path:
    """Return the folder of all caches: $ONESCAN_CACHE, or ~/.cache/onescan."""
    return Path(os.environ.get(CACHE) or "~/.cache/onescan").expanduser()
