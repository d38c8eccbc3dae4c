"""Denoisers as diffusers models and pipelines: sampling, schedulers, saving and loading."""

from importlib.util import find_spec

from onescan.messages import missing_package

if find_spec("diffusers") is None:
    raise missing_package("generating images", "diffusers", "generation")

from onescan.integrations.diffusers.loading import load_pretrained
from onescan.integrations.diffusers.pipeline import (
    DenoiserModel,
    DenoiserPipeline,
    find_labels,
    parse_label,
    to_diffusers,
)
from onescan.integrations.diffusers.sampling import build_scheduler, sample

__all__ = [
    "DenoiserModel",
    "DenoiserPipeline",
    "build_scheduler",
    "find_labels",
    "load_pretrained",
    "parse_label",
    "sample",
    "to_diffusers",
]
