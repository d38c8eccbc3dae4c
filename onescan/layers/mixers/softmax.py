"""Softmax attention, the baseline: ViT's and DeiT's."""

from dataclasses import dataclass

import torch.nn.functional as F
from einops import rearrange
from torch import nn

from onescan.layers.mixers.contract import Mixer, MixerConfig
from onescan.shapes import Grid, Hidden, Keep


@dataclass(frozen=True, kw_only=True)
class SoftmaxMixerConfig(MixerConfig):
    """Multi-head softmax attention with biases; O(T^2)."""

    def build(self, *, width: int, axes: int) -> "SoftmaxMixer":
        self.head_width(width)  # raises where heads do not divide the width
        return SoftmaxMixer(width, self.num_heads)


class SoftmaxMixer(Mixer):
    """softmax(Q K^T / sqrt(K)) V, then W_o."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_qkv = nn.Linear(width, 3 * width)
        self.to_out = nn.Linear(width, width)

    def forward(
        self, x: Hidden, grid: Grid, *, keep: Keep | None = None, state: None = None
    ) -> tuple[Hidden, None]:
        if state is not None:
            raise ValueError("state was given to a mixer that is not causal")
        q, k, v = rearrange(
            self.to_qkv(x), "b t (three h k) -> three b h t k", three=3, h=self.num_heads
        )
        if keep is None:
            o = F.scaled_dot_product_attention(q, k, v)
        else:  # a token that is masked sees itself, so that no row is empty
            mask = keep[:, None, None, :] | ~keep[:, None, :, None]
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        o = self.to_out(rearrange(o, "b h t v -> b t (h v)"))
        return o if keep is None else o * keep.unsqueeze(-1), None
