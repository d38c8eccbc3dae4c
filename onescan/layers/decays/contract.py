"""What every decay promises, so that a mixer can hold any of them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from onescan.ops.numerics import full_precision, widened
from onescan.shapes import Hidden

# exp(-exp(5)) is 0 in float32 already, and exp of much more would be infinite
MOST_LOG_RATE = 5.0

LogDecay = Float[Tensor, " H"] | Float[Tensor, "B T H"] | Float[Tensor, "B T H K"]


class Gates(NamedTuple):
    """What a decay makes of tokens.

    Attributes:
        log_decay: logarithm of what a state keeps, as `decay_attention` takes it: at most 0, one
            per head, per token and head, or per token and key channel; None does not decay.
        key: what multiplies the keys, [B, T, H, 1 or K], or the keys themselves where the decay
            `gives_keys`; None is 1.
    """

    log_decay: LogDecay | None
    key: Float[Tensor, "B T H _"] | None = None


@dataclass(frozen=True, kw_only=True)
class DecayConfig(ABC):
    """How fast what was read is forgotten."""

    gives_keys: ClassVar[bool] = False
    """Whether the decay makes the keys, in the place of a projection."""

    @abstractmethod
    def build(self, *, width: int, num_heads: int, head_width: int) -> "Decay":
        """The module for tokens of this width, and heads of that many key channels.

        Raises:
            ValueError: a field out of its range.
        """


class Decay(nn.Module, ABC):
    """Compute the gates of each token from the token alone, in float32 or wider.

    Call projections as modules, so that LoRA, quantization and offloading work. A replaced
    projection may return bfloat16, so convert its output to float32 before use.
    """

    @abstractmethod
    def forward(self, x: Hidden) -> Gates:
        """Say how much each token lets a state keep."""

    def init_weights(self, to_q: nn.Linear, to_k: nn.Linear | None, to_v: nn.Linear) -> None:
        """Give the mixer's projections, and its own, the first weights that it needs: here, none.

        It comes after a model's usual ones. to_k is None where the decay `gives_keys`.
        """


class FP32Linear(nn.Linear):
    """Linear layer that computes in float32 or wider, even under autocast or with bfloat16 weights.

    Decays are multiplied over all tokens, so rounding errors of their logits grow with the length.
    """

    def forward(self, x: Hidden) -> Float[Tensor, "B T _"]:
        with full_precision(x):
            x, weight = widened(x, self.weight)
            return F.linear(x, weight, None if self.bias is None else self.bias.to(x.dtype))


def small_linear(width: int, out: int, *, bias: bool, std: float = 0.02) -> FP32Linear:
    """Build a layer with small random weights, as in LION's gates, and zero bias."""
    linear = FP32Linear(width, out, bias=bias)
    nn.init.trunc_normal_(linear.weight, std=std)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear
