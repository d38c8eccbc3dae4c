"""DeltaNet: each token overwrites the value stored under its key, in one direction or both."""

from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import nn

from onescan.checks import check_choice, check_positive
from onescan.layers.basic import EPS as NORM_EPS
from onescan.layers.basic import NormName, build_norm
from onescan.layers.mixers.contract import DirectedMixerConfig, Mixer, flipped, masked
from onescan.ops.delta_rule import DeltaState, Form, delta_rule
from onescan.ops.feature_maps import FEATURE_MAPS, FeatureMapName
from onescan.shapes import Grid, Hidden, Keep, Keys

# Vectors shorter than this are treated as zero. The queries and keys of a blank patch have length
# 0, so gradients of their normalization would explode.
EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class DeltaRuleMixerConfig(DirectedMixerConfig):
    """DeltaNet: a memory in which each token overwrites the value stored under its key."""

    value_map: FeatureMapName = "identity"
    """Activation of values; "silu" in flash-linear-attention."""
    norm: NormName = "rms"
    """Norm of the output, computed over all heads together."""
    norm_heads: bool = False
    """Compute the norm over each head separately, with weights that all heads share."""
    norm_eps: float = NORM_EPS
    """Epsilon of the norm of the output."""
    bias: bool = False
    """Add biases to the projections."""
    form: Form = "auto"
    """Algorithm of the op; see `delta_rule`."""
    chunk_size: int = 64
    """Tokens per chunk of the chunk form."""

    def build(self, *, width: int, axes: int) -> "DeltaRuleMixer":
        self.check_direction()
        check_choice("form", self.form, get_args(Form))
        check_choice("value_map", self.value_map, FEATURE_MAPS)
        check_positive(chunk_size=self.chunk_size, norm_eps=self.norm_eps)
        self.head_width(width)  # raises if num_heads does not divide the width
        return DeltaRuleMixer(self, width)


class DeltaRuleMixer(Mixer):
    """The delta rule on q, k = unit(silu(W x)) and beta = sigmoid(W x), then a norm and W_o.

    Source: DeltaNet, arXiv:2406.06484, without its convolutions; in both directions, LION,
    arXiv:2502.16249, App. B.7.
    """

    def __init__(self, config: DeltaRuleMixerConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.in_proj = nn.Linear(width, 3 * width, bias=config.bias)  # q, k, v
        self.beta_proj = nn.Linear(width, config.num_heads, bias=config.bias)
        self.value_map = FEATURE_MAPS[config.value_map]
        norm_width = config.head_width(width) if config.norm_heads else width
        self.norm = build_norm(config.norm, norm_width, eps=config.norm_eps)
        self.out_proj = nn.Linear(width, width, bias=config.bias)

    def forward(
        self, x: Hidden, grid: Grid, *, keep: Keep | None = None, state: DeltaState | None = None
    ) -> tuple[Hidden, DeltaState | None]:
        config, backward = self.config, self.config.direction == "backward"
        if state is not None:
            config.check_state(state, grid)
        x = x if keep is None else masked(x, keep)
        q, k, v = (
            y.unflatten(-1, (config.num_heads, -1)) for y in self.in_proj(x).chunk(3, dim=-1)
        )
        q, k = normalized_silu(q), normalized_silu(k)
        v = self.value_map(v)
        inputs = (q, k, v, torch.sigmoid(self.beta_proj(x)), keep)
        q, k, v, beta, real = map(flipped, inputs) if backward else inputs
        new_state: Any
        o, new_state = delta_rule(
            q, k, v, beta, causal=config.direction != "both", keep=real, state=state,
            form=config.form, chunk_size=config.chunk_size,
        )  # fmt: skip
        o = flipped(o) if backward else o
        o = self.norm(o).flatten(-2) if config.norm_heads else self.norm(o.flatten(-2))
        o = self.out_proj(o)
        o = masked(o, keep)
        return o, new_state if config.is_causal else None


def normalized_silu(x: Keys) -> Keys:
    """Apply SiLU and divide by the L2 norm, as DeltaNet does with queries and keys."""
    x = F.silu(x)
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + EPS)
