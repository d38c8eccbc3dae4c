"""Linear attention without decay and without a projection after it, as LDN has it."""

import torch
from einops import rearrange
from torch import nn

from onescan.ops.decay_attention import DecayState, decay_attention
from onescan.ops.feature_maps import FEATURE_MAPS, FeatureMapName
from onescan.ops.numerics import divided, full_precision, widened
from onescan.shapes import Hidden, Keep, Keys, Memory, MemoryMask


class LinearAttention(nn.Module):
    """phi(Q) (phi(K)^T V) / (phi(Q) (phi(K)^T 1)), in heads.

    Source: LDN, arXiv:2502.12381, Sec. 3.3. Where phi leaves nothing of a query, or of all keys,
    the paper's quotient is 0 / 0; here it is 0, with finite gradients.
    """

    def __init__(self, width: int, num_heads: int, feature_map: FeatureMapName) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.feature_map = FEATURE_MAPS[feature_map]
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(
        self,
        x: Hidden,
        *,
        causal: bool = False,
        keep: Keep | None = None,
        state: DecayState | None = None,
    ) -> tuple[Hidden, DecayState | None]:
        """Attend to all tokens, or those before; the state is that of a causal call."""
        q, k = (self.feature_map(self._heads(layer(x))) for layer in (self.to_q, self.to_k))
        o, leaving = decay_attention(
            q, k, self._heads(self.to_v(x)), causal=causal, normalize="sum", keep=keep,
            state=state, return_state=causal,
        )  # fmt: skip
        assert leaving is None or isinstance(leaving, DecayState)
        return rearrange(o, "b t h v -> b t (h v)"), leaving

    def remember(self, memory: Memory, keep: MemoryMask | None = None) -> DecayState:
        """phi(K)^T V and phi(K)^T 1 of another sequence: all that `read` needs of it."""
        k = self.feature_map(self._heads(self.to_k(memory)))
        v = self._heads(self.to_v(memory))
        with full_precision(memory):
            k, v = widened(k, v)
            if keep is not None:
                k, v = (x.masked_fill(~keep[:, :, None, None], 0) for x in (k, v))
            return DecayState(torch.einsum("bshk,bshv->bhkv", k, v), k.sum(dim=1))

    def read(self, x: Hidden, remembered: DecayState) -> Hidden:
        """Attend to the sequence that was remembered."""
        q = self.feature_map(self._heads(self.to_q(x)))
        with full_precision(x):
            (wide_q,) = widened(q)
            sums = torch.einsum("bthk,bhkv->bthv", wide_q, remembered.kv)
            weight = torch.einsum("bthk,bhk->bth", wide_q, remembered.k_sum)
            o = divided(sums, weight.unsqueeze(-1)).to(q.dtype)
        return rearrange(o, "b t h v -> b t (h v)")

    def _heads(self, x: Hidden) -> Keys:
        return rearrange(x, "b t (h k) -> b t h k", h=self.num_heads)
