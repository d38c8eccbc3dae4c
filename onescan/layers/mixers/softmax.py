"""Softmax attention, the baseline: ViT's and BERT's, and GPT-2's with its cache."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from onescan.layers.mixers.contract import Mixer, MixerConfig
from onescan.shapes import CachedKeep, CachedKeys, Grid, Hidden, Keep


@dataclass(frozen=True, kw_only=True)
class SoftmaxMixerConfig(MixerConfig):
    """Multi-head softmax attention with biases; O(T^2)."""

    causal: bool = False
    """Read the past only; the state then grows by every token."""
    dropout: float = 0.0
    """Dropout probability of the attention weights in training; 0.1 in BERT."""

    @property
    def is_causal(self) -> bool:
        return self.causal

    def build(self, *, width: int, axes: int) -> "SoftmaxMixer":
        self.head_width(width)  # raises where heads do not divide the width
        if not 0 <= self.dropout < 1:
            raise ValueError(f"mixer.dropout is {self.dropout}, expected from 0 to below 1")
        return SoftmaxMixer(width, self.num_heads, causal=self.causal, dropout=self.dropout)


class SoftmaxState(NamedTuple):
    """The keys and values of all S tokens so far: what linear attention does without.

    Attributes:
        k: [B, H, S, K].
        v: [B, H, S, K].
        keep: [B, S], True for real tokens.
    """

    k: CachedKeys
    v: CachedKeys
    keep: CachedKeep


class SoftmaxMixer(Mixer):
    """softmax(Q K^T / sqrt(K)) V, then W_o, with dropout on the attention weights."""

    def __init__(
        self, width: int, num_heads: int, *, causal: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.causal = causal
        self.dropout = dropout
        self.to_qkv = nn.Linear(width, 3 * width)
        self.to_out = nn.Linear(width, width)

    def forward(
        self, x: Hidden, grid: Grid, *, keep: Keep | None = None, state: SoftmaxState | None = None
    ) -> tuple[Hidden, SoftmaxState | None]:
        self.check_state(state, SoftmaxState, causal=self.causal)
        q, k, v = rearrange(
            self.to_qkv(x), "b t (three h k) -> three b h t k", three=3, h=self.num_heads
        )
        seen = keep
        if self.causal:
            seen = x.new_ones(x.shape[:2], dtype=torch.bool) if keep is None else keep
        if state is not None and seen is not None:
            k, v = torch.cat([state.k, k], dim=2), torch.cat([state.v, v], dim=2)
            seen = torch.cat([state.keep, seen], dim=1)
        whole = keep is None and state is None  # and fused kernels need no mask
        mask = None if whole else self._mask(seen, x.shape[1])
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=self.causal and whole,
            dropout_p=self.dropout if self.training else 0.0,
        )  # fmt: skip
        o = self.to_out(rearrange(o, "b h t v -> b t (h v)"))
        o = o if keep is None else o * keep.unsqueeze(-1)
        return o, SoftmaxState(k, v, seen) if self.causal and seen is not None else None

    def _mask(self, seen: Tensor | None, rows: int) -> Tensor | None:
        """Which tokens the last rows see, [B, 1, rows, S]; a masked one itself: no row is empty."""
        if seen is None:
            return None
        columns = seen.shape[1]
        own = seen[:, columns - rows :]
        mask = seen[:, None, None, :] | ~own[:, None, :, None]
        if not self.causal:
            return mask
        t = torch.arange(columns - rows, columns, device=seen.device)
        s = torch.arange(columns, device=seen.device)
        past = t.unsqueeze(1) >= s
        return (mask & past) | (t.unsqueeze(1) == s)
