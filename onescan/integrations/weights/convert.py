"""The tables of supported architectures, and the conversion of one model in both directions."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from onescan.allocation import build_model, build_on_meta
from onescan.checkpoint.weights import distinct, whole_weights
from onescan.integrations.weights.denoisers import DENOISER_SOURCES, DENOISER_TARGET
from onescan.integrations.weights.fla import FLA_SOURCES
from onescan.integrations.weights.lion import LION_SOURCES
from onescan.integrations.weights.maps import Target
from onescan.integrations.weights.source import Foreign, Source, renamed
from onescan.integrations.weights.text import TEXT_SOURCES, TEXT_TARGETS
from onescan.integrations.weights.vision import VISION_SOURCES, VISION_TARGET
from onescan.messages import missing_package, named_type

# LION comes first, because its tensors are named as those of DeiT and BERT
SOURCES: tuple[Source, ...] = (
    *LION_SOURCES,
    *VISION_SOURCES,
    *TEXT_SOURCES,
    *DENOISER_SOURCES,
    *FLA_SOURCES,
)
TARGETS: tuple[Target, ...] = (VISION_TARGET, *TEXT_TARGETS, DENOISER_TARGET)
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
            f"the source is read as {source.name}, but has unexpected tensors: "
            f"{', '.join(unused[:MAX_SHOWN])}{more}"
        )
    empty = build_on_meta(config)
    expected = {} if empty is None else distinct(empty)
    for name in sorted(expected.keys() | weights.keys()):
        source_shape, model_shape = (
            tuple(tensors[name].shape) if name in tensors else "missing"
            for tensors in (weights, expected)
        )
        if source_shape != model_shape:
            raise ValueError(
                f"the source is read as {source.name}, but {name} is {source_shape} in the source "
                f"and {model_shape} in the model"
            )
    with torch.random.fork_rng(devices=[]):  # keep the caller's random state
        model = build_model(config)
    dtypes = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    if len(dtypes) == 1:
        model.to(dtypes.pop())
    model.load_state_dict(weights, strict=False)  # not strict: tied weights are given once
    return model.eval()


def convert_back(model: nn.Module, library: str, **fields: Any) -> Any:
    """Return a model of another library with the weights of a native model with softmax attention.

    The model is in evaluation mode, and its dtype is that of the native model.

    Args:
        model: A native model.
        library: "transformers" or "diffusers".
        fields: Further fields of the library's config.

    Raises:
        ValueError: If the library has no such model, or a field of the native config has no
            counterpart (names it).
        ImportError: If the library is not installed.
    """
    config: Any = getattr(model, "config", None)
    target = next((target for target in TARGETS if type(config) is target.config), None)
    if target is None or target.library != library:
        supported = ", ".join(
            candidate.config.__name__.removesuffix("Config")
            for candidate in TARGETS
            if candidate.library == library
        )
        raise ValueError(
            f"the model is {named_type(model)}, which cannot be converted to {library}; expected "
            f"one of {supported}"
        )
    try:
        kind = getattr(import_module(library), target.model(config))
    except ModuleNotFoundError as error:
        extra = "text" if library == "transformers" else "generation"
        raise missing_package(f"converting to {library}", library, extra, error) from error
    settings = target.fields(config) | fields
    with torch.random.fork_rng(devices=[]):  # keep the caller's random state
        other = kind(**settings) if library == "diffusers" else kind(kind.config_class(**settings))
    native = whole_weights(model)
    tensors: dict[str, Tensor] = {}
    for rule in target.rules(config):
        tensors |= rule.write(native[rule.native])
    names = {name: renamed(name, target.rename) for name in other.state_dict()}
    nn.Module.to(other, next(model.parameters()).dtype)  # without warnings of diffusers
    other.load_state_dict({name: tensors[new] for name, new in names.items()})
    return other.eval()


def _find(foreign: Foreign) -> tuple[Source, Foreign]:
    """Return the first source that matches, and the model with renamed tensors."""
    for source in SOURCES:
        candidate = Foreign(
            fields={**source.defaults, **foreign.fields},
            tensors=foreign.tensors.renamed(source.rename),
        )
        if source.matches(candidate):
            return source, source.adapt(candidate)
    first = next(iter(foreign.tensors), None)
    kind = foreign.fields.get("model_type") or foreign.fields.get("_class_name")
    unnamed = f"has no config.json that names a model, and tensors such as {first}"
    problem = f"is a {kind!r}" if kind else unnamed
    supported = "; ".join(source.name for source in SOURCES)
    raise ValueError(f"the source {problem}, expected one of: {supported}")
