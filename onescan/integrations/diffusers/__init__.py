"""Denoisers as diffusers' own: schedulers, sampling, a model and a pipeline.

`import onescan` is enough for `DiffusionPipeline.from_pretrained` to know the pipeline.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

if find_spec("diffusers") is None:
    raise ImportError("making images needs diffusers: pip install 'onescan[generation]'")

_HOMES = {
    "DenoiserModel": "model",
    "DenoiserPipeline": "pipeline",
    "build_scheduler": "schedulers",
    "draw": "sampling",
    "to_diffusers": "convert",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
