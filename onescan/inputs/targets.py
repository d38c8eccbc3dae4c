"""What the outputs of a model mean: scores of classes or labels, or standardized values.

There is one target per example, or one per position of an example.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor

from onescan.inputs.images import check_constants

TargetKind = Literal["class", "multilabel", "value", "class_map", "value_map"]
"""One of several classes, any number of labels, or real numbers; or, in a map, one of several
classes or real numbers at each position."""
MapKind = Literal["class_map", "value_map"]

Outputs = Float[Tensor, "B outputs *sides"]
VALUES = ("value", "value_map")
EPSILON = 2.0**-52  # of float64


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a model predicts; saved with the model.

    Attributes:
        kind: Kind of the target.
        mean: Mean of each value in the training examples; () for classes and labels.
        std: Standard deviation of each value in the training examples; () for classes and labels.
    """

    kind: TargetKind = "class"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind in VALUES:
            check_constants(len(self.mean), mean=self.mean, std=self.std)

    @property
    def is_map(self) -> bool:
        """Whether each position of an example has a target."""
        return self.kind in get_args(MapKind)

    def standardize(self, values: Outputs) -> Outputs:
        """Standardize values in float64, and round them to float32.

        >>> import torch
        >>> target = Target(kind="value", mean=(1e9,), std=(2.0,))
        >>> target.standardize(torch.tensor([[1e9 + 1]], dtype=torch.float64)).tolist()
        [[0.5]]
        """
        wide = values.double()
        mean, std = self._constants(wide)
        return ((wide - mean) / std).float()

    def predictions(self, scores: Outputs) -> Outputs:
        """Convert a model's outputs to what they mean.

        Args:
            scores: Outputs of the model.

        Returns:
            For classes, the probability of each one; their sum is 1. For labels, the probability of
            each one. For values, the values in their original units, in float64.

        >>> import torch
        >>> target = Target(kind="value", mean=(1e9,), std=(2.0,))
        >>> target.predictions(torch.tensor([[0.5]])).tolist()
        [[1000000001.0]]
        >>> Target(kind="multilabel").predictions(torch.tensor([[0.0, 0.0]])).tolist()
        [[0.5, 0.5]]
        """
        if self.kind in ("class", "class_map"):
            return scores.float().softmax(dim=1)
        if self.kind == "multilabel":
            return scores.double().sigmoid()  # float32 would round probabilities near 1 to 1
        wide = scores.double()
        mean, std = self._constants(wide)
        return wide * std + mean

    def _constants(self, like: Outputs) -> tuple[Tensor, Tensor]:
        shape = (-1, *[1] * (like.ndim - 2))
        return like.new_tensor(self.mean).view(shape), like.new_tensor(self.std).view(shape)


CLASSES = Target()


def value_target(values: Float[Tensor, "B outputs"]) -> Target:
    """Return the target that standardizes the given values; constant ones are only centered.

    Sums are exact, so that the result does not depend on the machine.

    Raises:
        ValueError: If the values are too large for float64.
    """
    columns = [_mean_and_std(column) for column in values.double().T.tolist()]
    mean, std = zip(*columns, strict=True)
    return Target(kind="value", mean=mean, std=std)


def _mean_and_std(column: list[float]) -> tuple[float, float]:
    try:
        mean = math.fsum(column) / len(column)
    except OverflowError as error:
        raise ValueError(
            f"y holds values up to {max(map(abs, column)):.3g}, whose sum is too large for "
            "float64: divide y by a constant"
        ) from error
    furthest = max(abs(x - mean) for x in column)
    if furthest <= EPSILON * abs(mean):
        return mean, 1.0
    # Divide before squaring, because squares of very large or small values are out of range.
    scaled = [(x - mean) / furthest for x in column]
    return mean, furthest * math.sqrt(math.fsum(x * x for x in scaled) / len(column))
