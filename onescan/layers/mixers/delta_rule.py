"""DeltaNet: each token overwrites what was stored under its key, in one direction or both."""

from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from onescan.checks import check_choice, check_positive
from onescan.layers.mixers.contract import Mixer
from onescan.layers.mixers.directed import DirectedMixerConfig, turned
from onescan.layers.norm import NormName, build_norm
from onescan.ops.delta_rule import DeltaState, Form, delta_rule
from onescan.shapes import Grid, Hidden, Keep, Keys

# the length below which a vector counts as zero: a blank patch has queries and keys of length 0,
# and without this a gradient that no step survives
EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class DeltaRuleMixerConfig(DirectedMixerConfig):
    """DeltaNet: a memory in which each token overwrites what was stored under its key."""

    norm: NormName = "rms"
    """Norm of the output, over all heads together."""
    bias: bool = False
    """Of the projections."""
    form: Form = "auto"
    """How the op evaluates its memory; see `delta_rule`."""
    chunk_size: int = 64
    """Tokens per chunk of the chunk form."""

    def build(self, *, width: int, axes: int) -> "DeltaRuleMixer":
        self.check_direction()
        check_choice("form", self.form, get_args(Form))
        check_positive(chunk_size=self.chunk_size)
        self.head_width(width)  # raises where heads do not divide the width
        return DeltaRuleMixer(self, width)


class DeltaRuleMixer(Mixer):
    """The delta rule on q, k = unit(silu(W x)) and beta = sigmoid(W x), then a norm and W_o.

    Source: DeltaNet, arXiv:2406.06484, without its convolutions; in both directions, LION,
    arXiv:2502.16249, App. B.7.
    """

    def __init__(self, config: DeltaRuleMixerConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.to_q, self.to_k, self.to_v = (
            nn.Linear(width, width, bias=config.bias) for _ in range(3)
        )
        self.to_beta = nn.Linear(width, config.num_heads, bias=config.bias)
        self.norm = build_norm(config.norm, width)
        self.to_out = nn.Linear(width, width, bias=config.bias)

    def forward(
        self, x: Hidden, grid: Grid, *, keep: Keep | None = None, state: DeltaState | None = None
    ) -> tuple[Hidden, DeltaState | None]:
        config, backward = self.config, self.config.direction == "backward"
        config.check_state(state, grid)
        q, k = _unit(self._heads(self.to_q(x))), _unit(self._heads(self.to_k(x)))
        read = (q, k, self._heads(self.to_v(x)), torch.sigmoid(self.to_beta(x)), keep)
        q, k, v, beta, seen = map(turned, read) if backward else read
        leaving: Any
        o, leaving = delta_rule(
            q, k, v, beta, causal=config.direction != "both", keep=seen, state=state,
            form=config.form, chunk_size=config.chunk_size,
        )  # fmt: skip
        o = rearrange(turned(o) if backward else o, "b t h v -> b t (h v)")
        o = self.to_out(self.norm(o))
        o = o if keep is None else o * keep.unsqueeze(-1)
        return o, leaving if config.is_causal else None

    def _heads(self, x: Hidden) -> Keys:
        return rearrange(x, "b t (h k) -> b t h k", h=self.config.num_heads)


def _unit(x: Keys) -> Keys:
    x = F.silu(x)
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + EPS)
