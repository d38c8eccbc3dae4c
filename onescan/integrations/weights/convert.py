"""The table of supported architectures, and the conversion of one model."""

import torch
from torch import nn

from onescan.allocation import build_model, build_on_meta
from onescan.checkpoint.weights import distinct
from onescan.integrations.weights.denoisers import DENOISER_SOURCES
from onescan.integrations.weights.fla import FLA_SOURCES
from onescan.integrations.weights.lion import LION_SOURCES
from onescan.integrations.weights.source import Foreign, Source
from onescan.integrations.weights.text import TEXT_SOURCES
from onescan.integrations.weights.vision import VISION_SOURCES

# LION comes before vision, because its tensors are named as DeiT's
SOURCES: tuple[Source, ...] = (
    *LION_SOURCES,
    *VISION_SOURCES,
    *TEXT_SOURCES,
    *DENOISER_SOURCES,
    *FLA_SOURCES,
)
MAX_SHOWN = 5  # names of tensors


def convert_model(foreign: Foreign) -> nn.Module:
    """Return a native model with the weights of another library's model.

    The dtype is that of the source, and the model is in evaluation mode.

    Raises:
        ValueError: If the architecture or a setting is not supported, or a tensor is missing, not
            used, or of another shape; names it.
    """
    source, foreign = _find(foreign)
    config = source.config(foreign)
    weights = dict(source.weights(foreign))
    if unused := foreign.tensors.unused:
        more = f", and {len(unused) - MAX_SHOWN} more" * (len(unused) > MAX_SHOWN)
        raise ValueError(
            f"the source is read as {source.name}, which has no {', '.join(unused[:MAX_SHOWN])}"
            f"{more}"
        )
    empty = build_on_meta(config)
    expected = {} if empty is None else distinct(empty)
    for name in sorted(expected.keys() | weights.keys()):
        there, here = (
            tuple(tensors[name].shape) if name in tensors else "missing"
            for tensors in (weights, expected)
        )
        if there != here:
            raise ValueError(
                f"the source is read as {source.name}, but {name} is {there} in the source and "
                f"{here} in the model"
            )
    with torch.random.fork_rng(devices=[]):  # keep the caller's random state
        model = build_model(config)
    dtypes = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    if len(dtypes) == 1:
        model.to(dtypes.pop())
    model.load_state_dict(weights, strict=False)  # not strict: tied weights are given once
    return model.eval()


def _find(foreign: Foreign) -> tuple[Source, Foreign]:
    """Return the first source that matches, and the model with renamed tensors."""
    for source in SOURCES:
        renamed = Foreign(
            fields={**source.defaults, **foreign.fields},
            tensors=foreign.tensors.renamed(source.rename or {}),
        )
        if source.matches(renamed):
            return source, renamed
    kind = foreign.fields.get("model_type") or foreign.fields.get("_class_name")
    what = f"is a {kind!r}" if kind else f"has tensors such as {next(iter(foreign.tensors), None)}"
    known = ", ".join(source.name for source in SOURCES)
    raise ValueError(f"the source {what}, expected one of: {known}")
