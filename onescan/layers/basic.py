"""The parts of a block that process each token separately: norms and MLPs."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from onescan.checks import check_choice, check_positive
from onescan.ops.gating import gated
from onescan.ops.numerics import to_autocast_dtype
from onescan.shapes import Hidden

NormName = Literal["layer", "rms", "simple_rms", "none"]
NormPosition = Literal["pre", "post"]
Gate = Literal["none", "sigmoid", "silu"]  # activation of a mixer's output gate

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]
ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
        "relu": F.relu,
        "silu": F.silu,
    }
)

# smaller than the variance of a mean over 100,000 tokens
EPS = 1e-6


def build_norm(name: NormName, width: int, *, affine: bool = True, eps: float = EPS) -> nn.Module:
    """Build a LayerNorm, an RMSNorm, an RMSNorm without parameters ("simple_rms"), or an identity.

    With affine=False, for conditioned norms, no norm has parameters.
    """
    check_choice("norm", name, get_args(NormName))
    if name == "layer":
        return nn.LayerNorm(width, eps=eps, elementwise_affine=affine)
    if name == "none":
        return nn.Identity()
    return nn.RMSNorm(width, eps=eps, elementwise_affine=affine and name == "rms")


def normalized(norm: Any, x: Tensor) -> Tensor:
    """Apply a norm with weights to x, and return the result in the dtype of the weights.

    x is converted first, except to float16: wide sums over tokens may exceed its range.
    """
    dtype = norm.weight.dtype
    if dtype != torch.float16 or x.dtype == dtype:
        return norm(x.to(dtype))
    wide = {name: weight.to(x.dtype) for name, weight in norm.named_parameters()}
    return functional_call(norm, wide, (x,)).to(dtype)


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Two layers with GELU and biases, as in ViT and DeiT."""

    ratio: float = 4.0
    """Hidden width divided by model width."""
    multiple_of: int = 1
    """Round the hidden width up to a multiple of this."""
    activation: Activation = "gelu"
    """Activation function; gelu_tanh is the approximation of GPT-2 and DiT."""

    def build(self, *, width: int) -> nn.Module:
        check_choice("mlp.activation", self.activation, get_args(Activation))
        return MLP(width, self.hidden_width(width), activation=self.activation)

    def hidden_width(self, width: int) -> int:
        """Return the hidden width for a model width.

        >>> MLPConfig(ratio=8 / 3).hidden_width(1024), MLPConfig(ratio=0.29).hidden_width(100)
        (2730, 29)
        """
        check_positive(**{"mlp.ratio": self.ratio, "mlp.multiple_of": self.multiple_of})
        hidden = math.floor(width * self.ratio + 1e-6)  # 0.29 * 100 is slightly less than 29
        return math.ceil(hidden / self.multiple_of) * self.multiple_of


@dataclass(frozen=True, kw_only=True)
class GLUConfig(MLPConfig):
    """A gated linear unit with SiLU, and without biases as in LightNet."""

    ratio: float = 8 / 3
    activation: Activation = "silu"
    bias: bool = False
    """Add biases to the projections, as in HGRN."""

    def build(self, *, width: int) -> nn.Module:
        check_choice("mlp.activation", self.activation, get_args(Activation))
        hidden = self.hidden_width(width)
        return GLU(width, hidden, bias=self.bias, activation=self.activation)


class MLP(nn.Module):
    """Compute W_2 gelu(W_1 x), or with another activation."""

    def __init__(self, width: int, hidden: int, *, activation: Activation = "gelu") -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.up_proj = nn.Linear(width, hidden)
        self.down_proj = nn.Linear(hidden, width)

    def forward(self, x: Hidden) -> Hidden:
        return self.down_proj(self.activation(self.up_proj(x)))


class GLU(nn.Module):
    """Compute W_3 (silu(W_1 x) * W_2 x), or with another activation."""

    def __init__(
        self, width: int, hidden: int, *, bias: bool = False, activation: Activation = "silu"
    ) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate_proj = nn.Linear(width, hidden, bias=bias)
        self.up_proj = nn.Linear(width, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Hidden) -> Hidden:
        x = to_autocast_dtype(x)  # once for both projections
        up, gate = self.up_proj(x), self.gate_proj(x)
        if self.activation is F.silu:
            return self.down_proj(gated(up, gate, "silu"))
        return self.down_proj(self.activation(gate) * up)
