"""The parts of a merged projection, each as if it were a linear layer of its own."""

from typing import Any, NamedTuple

from torch import Tensor, nn


class Rows(NamedTuple):
    """Rows of a linear layer, as views."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def parts(linear: nn.Linear, widths: list[int]) -> list[Rows]:
    """Split a layer's outputs into parts of these widths."""
    weights = linear.weight.split(widths)
    no_biases: Any = [None] * len(widths)
    biases = no_biases if linear.bias is None else linear.bias.split(widths)
    return [Rows(*pair) for pair in zip(weights, biases, strict=True)]


def equal_parts(linear: nn.Linear, count: int = 3) -> list[Rows]:
    """Split a layer's outputs into parts of equal width."""
    return parts(linear, [linear.out_features // count] * count)


def parts_of(mixer: Any) -> list[Rows]:
    """Split `in_proj` of LightNet's, LION's or the delta rule's mixer."""
    if hasattr(mixer, "in_widths"):
        return parts(mixer.in_proj, mixer.in_widths)
    return equal_parts(mixer.in_proj)
