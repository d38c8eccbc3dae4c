"""LDN's local update: what each token learns from itself and from what it was at the beginning."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onescan.shapes import Hidden

ActivationName = Literal["gelu", "silu", "tanh"]
ACTIVATIONS: dict[ActivationName, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


class LocalUpdate(nn.Module):
    """F(x, h) = sigmoid(W_g [x; h]) * act(W_u [x; h]).

    Source: LDN, arXiv:2502.12381, Sec. 3.3, which says of F no more than "gating or residual
    module": these are the 4 D^2 weights that the parameters of its Table 1 leave for it.
    """

    def __init__(self, width: int, activation: ActivationName) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.to_gate_and_update = nn.Linear(2 * width, 2 * width, bias=False)

    def forward(self, x: Hidden, h: Hidden) -> Hidden:
        gate, update = self.to_gate_and_update(torch.cat([x, h], dim=-1)).chunk(2, dim=-1)
        return torch.sigmoid(gate) * self.activation(update)
