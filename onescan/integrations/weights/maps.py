"""Parts that several sources share: activations, linear layers, merged maps, patch embeddings."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onescan.checks import check_choice
from onescan.integrations.weights.source import Foreign, Tensors
from onescan.layers.basic import Activation

# names of activations in transformers and diffusers -> names in `MLPConfig`
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu-approximate": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
NUM_HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1152: 16, 1280: 16}  # by width, as published


class LinearNames(NamedTuple):
    """Names of a linear layer or norm, native and in the source."""

    native: str
    source: str


def activation(foreign: Foreign, name: str) -> Activation:
    """Return the activation that a field of the source's config names; ValueError if unknown."""
    given = foreign.need(name)
    check_choice(name, given, ACTIVATIONS)
    return ACTIVATIONS[given]


def copied(tensors: Tensors, names: list[LinearNames]) -> dict[str, Tensor]:
    """Return weights and biases under native names."""
    return {
        f"{native}.{part}": tensors.take(f"{source}.{part}")
        for native, source in names
        for part in ("weight", "bias")
    }


def merged(tensors: Tensors, prefix: str, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the merged map of queries, keys and values; zeros for biases that are missing."""
    weights = [tensors.take(f"{prefix}.{name}.weight") for name in names]
    biases = [
        tensors.take(f"{prefix}.{name}.bias")
        if f"{prefix}.{name}.bias" in tensors
        else weight.new_zeros(len(weight))
        for name, weight in zip(names, weights, strict=True)
    ]
    return {"in_proj.weight": torch.cat(weights), "in_proj.bias": torch.cat(biases)}


def patch_embedding(tensors: Tensors, name: str) -> dict[str, Tensor]:
    """Return a convolution whose stride is its size as a linear map of flattened patches."""
    return {
        "patchify.proj.weight": tensors.take(f"{name}.weight").flatten(1),
        "patchify.proj.bias": tensors.take(f"{name}.bias"),
    }


def num_heads(foreign: Foreign, width: int) -> int:
    """Return the number of heads: as given, or that of the published model of this width.

    Raises:
        ValueError: If it is neither given nor known.
    """
    heads = foreign.fields.get("num_heads", NUM_HEADS.get(width))
    if heads is None:
        raise ValueError(f"the source of width {width} has no config; num_heads is required")
    return int(heads)


def pair(size: Any) -> tuple[int, int]:
    """Return (height, width) of one number or two."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width
