"""Telling diffusers of the pipeline; called once its own pipelines can be imported."""

import warnings
from importlib import import_module

OLDEST = (0, 42)  # older versions import modules that a folder names


def add_pipeline() -> None:
    """Import the pipeline, which makes itself known to `DiffusionPipeline.from_pretrained`.

    It does so at its end, as it may be what is imported already, and imports diffusers.
    """
    from diffusers import __version__

    if tuple(int(part) for part in __version__.split(".")[:2]) >= OLDEST:
        import_module("onescan.integrations.diffusers.pipeline")
        return
    oldest = ".".join(map(str, OLDEST))
    warnings.warn(
        f"onescan's pipeline is not known to diffusers {__version__}: that needs {oldest}",
        stacklevel=2,
    )
