"""The projections that mixers have in common: of queries, keys, values and outputs.

A mixer declares in `Mixer.projections` which rows of which layer compute them, so that it can be
initialized with the projections of a mixer of another class.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

Role = Literal["query", "key", "value", "output"]


class Projection(NamedTuple):
    """Consecutive rows of a linear layer.

    Attributes:
        layer: Name of the layer in the mixer.
        start: First row.
        stop: Row after the last one.
        heads: Number of heads of queries and keys, which must match because scores are computed
            within heads; 1 for values and outputs.
    """

    layer: str
    start: int
    stop: int
    heads: int = 1


Projections = Mapping[Role, Projection]


def merged_projections(
    widths: Sequence[int], out_proj: nn.Linear, *, heads: int
) -> dict[Role, Projection]:
    """Return the projections of mixers whose in_proj begins with q, k and v, and their out_proj.

    Args:
        widths: Rows of in_proj that compute queries, keys and values; only two for q and v.
        out_proj: The layer after the heads.
        heads: Number of heads.

    >>> merged_projections([4, 6], nn.Linear(6, 6), heads=2)["value"]
    Projection(layer='in_proj', start=4, stop=10, heads=1)
    """
    roles: list[Role] = ["query", "key", "value"]
    if len(widths) < len(roles):
        roles.remove("key")
    merged = {
        role: Projection("in_proj", stop - width, stop, 1 if role == "value" else heads)
        for role, width, stop in zip(roles, widths, accumulate(widths), strict=True)
    }
    return merged | {"output": Projection("out_proj", 0, out_proj.out_features)}


class ProjectionWeights(NamedTuple):
    """The weights of a projection.

    Attributes:
        weight: Of shape [rows, D], a view of the layer's weight.
        bias: Of shape [rows], a view of the layer's bias; None if it has none.
        heads: Number of heads, as in `Projection`.
    """

    weight: Tensor
    bias: Tensor | None
    heads: int

    def corresponds_to(self, other: "ProjectionWeights") -> bool:
        """Return whether both have the same shape and number of heads."""
        return self.weight.shape == other.weight.shape and self.heads == other.heads


def projection_weights(mixer: nn.Module, projection: Projection) -> ProjectionWeights:
    """Return the weights of a mixer's projection, as views to read or to modify in place."""
    layer: Any = mixer.get_submodule(projection.layer)
    rows = slice(projection.start, projection.stop)
    bias = None if layer.bias is None else layer.bias.detach()[rows]
    return ProjectionWeights(layer.weight.detach()[rows], bias, projection.heads)


@torch.no_grad()
def copy_projection(source: ProjectionWeights, target: ProjectionWeights) -> None:
    """Copy a projection; a bias that the source lacks is set to zero."""
    target.weight.copy_(source.weight)
    if target.bias is not None:
        target.bias.copy_(torch.zeros_like(target.bias) if source.bias is None else source.bias)
