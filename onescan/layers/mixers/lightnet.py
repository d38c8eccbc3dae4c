"""LightNet attention (LNA): additive decay behind projections, a norm and a low-rank gate."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from onescan.checks import check_positive
from onescan.layers.mixers.contract import Mixer, MixerConfig
from onescan.layers.norm import NormName, build_norm
from onescan.ops.additive_decay import AdditiveDecayState, Form, additive_decay
from onescan.ops.decay_attention import DecayState, decay_attention
from onescan.ops.lrpe import lrpe, lrpe_angles, lrpe_frequencies
from onescan.ops.numerics import LOG_ZERO, logaddexp, running_logsumexp
from onescan.shapes import Angles, Grid, Hidden, Keep, Keys, LogNormalizer, Queries, Values


@dataclass(frozen=True, kw_only=True)
class LightNetMixerConfig(MixerConfig):
    """LightNet attention; each ablation of the paper is one field."""

    causal: bool = False
    """Read the past only (Eq. 13), instead of all tokens (Eq. 14)."""
    lrpe: bool = True
    """Turn queries and keys by their position (MD-LRPE)."""
    decay: bool = True
    """Additive decay; False weighs keys by SiLU instead of their softmax over tokens, of all or of
    those so far."""
    separate_decay_rank: int = 0
    """Rank of the decay's own projection, added to the shared one; 0 shares key and decay."""
    norm: NormName = "layer"
    """Norm of the output, over all heads together, before the gate."""
    gate_rank: int | None = 64
    """Rank of the output gate; None is full rank."""
    form: Form = "auto"
    """How the op evaluates its sum; see `additive_decay`."""
    chunk_size: int = 64
    """Tokens per chunk of the causal form."""

    @property
    def is_causal(self) -> bool:
        return self.causal

    def build(self, *, width: int, axes: int) -> "LightNetMixer":
        head_width = self.head_width(width)
        if self.lrpe and -(-head_width // axes) * (axes - 1) >= head_width:
            raise ValueError(
                f"head width {head_width} (width {width}, num_heads {self.num_heads}) leaves an "
                f"axis of {axes} without features for lrpe"
            )
        if not self.decay and self.separate_decay_rank:
            raise ValueError("decay=False goes with separate_decay_rank=0 only")
        if self.separate_decay_rank < 0:
            raise ValueError(
                f"separate_decay_rank is {self.separate_decay_rank}, expected 0 or more"
            )
        if self.gate_rank is not None:
            check_positive(gate_rank=self.gate_rank)
        return LightNetMixer(self, width, axes)


class LightNetState(NamedTuple):
    """What the causal mixer carries from call to call.

    Attributes:
        attention: the op's state; a `DecayState` without decay.
        log_decay_normalizer: of the decay's own logits; None where they are the keys.
        position: tokens seen.
    """

    attention: AdditiveDecayState | DecayState
    log_decay_normalizer: LogNormalizer | None
    position: int


class LightNetMixer(Mixer):
    """O = Norm[phi(Q) (f(K)^T V)] * sigmoid(U), then W_o.

    Source: LightNet, arXiv:2405.21022, Eq. 13 to 15; W_o is not printed there, but the paper's
    parameter counts have room for it.
    """

    no_weight_decay = frozenset({"theta"})

    def __init__(self, config: LightNetMixerConfig, width: int, axes: int) -> None:
        super().__init__()
        self.config = config
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k = nn.Linear(width, width, bias=False)
        self.to_v = nn.Linear(width, width, bias=False)
        self.to_gate = _low_rank(width, config.gate_rank)
        self.norm = build_norm(config.norm, width)
        self.to_out = nn.Linear(width, width, bias=False)
        if config.separate_decay_rank:
            self.to_own_decay = _low_rank(width, config.separate_decay_rank)
        if config.lrpe:
            frequencies = lrpe_frequencies(width // config.num_heads, axes)
            self.theta = nn.Parameter(frequencies.repeat(config.num_heads, 1))  # H K

    def forward(
        self,
        x: Hidden,
        grid: Grid,
        *,
        keep: Keep | None = None,
        state: LightNetState | None = None,
    ) -> tuple[Hidden, LightNetState | None]:
        self.check_state(state, LightNetState, causal=self.config.causal)
        q = F.silu(self._heads(self.to_q(x)))  # B T H K
        k = self._heads(self.to_k(x))
        v = self._heads(self.to_v(x))
        o, state = self._attend(x, q, k, v, grid, keep, state)
        o = self.norm(rearrange(o, "b t h v -> b t (h v)"))  # B T D
        o = self.to_out(o * torch.sigmoid(self.to_gate(x)))
        return o if keep is None else o * keep.unsqueeze(-1), state

    def _attend(
        self,
        x: Hidden,
        q: Queries,
        k: Keys,
        v: Values,
        grid: Grid,
        keep: Keep | None,
        state: LightNetState | None,
    ) -> tuple[Values, LightNetState | None]:
        config = self.config
        position = 0 if state is None else state.position
        angles = None
        if config.lrpe:
            angles = lrpe_angles(grid.shape, self.theta, prefix=grid.prefix, start=position)
        attention: Any = None if state is None else state.attention
        if not config.decay:
            o, attention = self._attend_undecayed(q, k, v, angles, keep, attention)
            return o, self._after(x, position, attention)
        own = None
        if config.separate_decay_rank:
            before = None
            if state is not None:
                before = (attention.log_normalizer, state.log_decay_normalizer)
            logits = k + self._heads(self.to_own_decay(x))
            gain, own = _own_decay_gain(k, logits, keep, before, causal=config.causal)
            q = q * gain
        o, attention = additive_decay(
            q, k, v, angles=angles, causal=config.causal, keep=keep,
            state=attention, form=config.form, chunk_size=config.chunk_size,
        )  # fmt: skip
        return o, self._after(x, position, attention, own)

    def _attend_undecayed(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        angles: Angles | None,
        keep: Keep | None,
        state: Any,
    ) -> tuple[Values, Any]:
        """The paper's "w/o Decay", Sec. 6.3: SiLU in the softmax's place."""
        config, k = self.config, F.silu(k)
        form: Any = config.form
        if angles is not None:
            q, k = lrpe(q, angles), lrpe(k, angles)
        if config.causal:
            return decay_attention(
                q, k, v, causal=True, keep=keep, state=state,
                form=form, chunk_size=config.chunk_size,
            )  # fmt: skip
        if keep is not None:
            k = k * keep[:, :, None, None]
        return torch.einsum("bthf,bhfv->bthv", q, torch.einsum("bthf,bthv->bhfv", k, v)), None

    def _after(
        self,
        x: Hidden,
        position: int,
        attention: AdditiveDecayState | DecayState | None,
        own: LogNormalizer | None = None,
    ) -> LightNetState | None:
        if not self.config.causal or attention is None:
            return None
        return LightNetState(attention, own, position + x.shape[1])

    @torch.no_grad()
    def key_importance(self, x: Hidden) -> Tensor:
        """Each token's share of a head's context, [B, H, T]: its softmax weight, mean over K.

        A share of 1/T is what every token would have if all keys were equal.
        """
        return self._heads(self.to_k(x)).softmax(dim=1).mean(dim=-1).mT

    def _heads(self, x: Hidden) -> Keys:
        return rearrange(x, "b t (h k) -> b t h k", h=self.config.num_heads)


def _low_rank(width: int, rank: int | None) -> nn.Module:
    if rank is None:
        return nn.Linear(width, width, bias=False)
    return nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False))


def _own_decay_gain(
    k: Keys,
    decay_logits: Keys,
    keep: Keep | None,
    before: tuple[LogNormalizer, LogNormalizer | None] | None,
    *,
    causal: bool,
) -> tuple[Keys, LogNormalizer]:
    """What turns the keys' normalizer into the decay's own: sum exp(k) / sum exp(decay logits).

    Eq. 13 with s_t taken over logits of the decay's own differs from the shared form by this
    factor per channel, which the query can carry.
    """
    both = torch.stack([k, decay_logits]).double()
    if keep is not None:
        both = both.masked_fill(~keep[:, :, None, None], LOG_ZERO)
    if not causal:
        z = both.logsumexp(dim=2, keepdim=True)
    else:
        z = running_logsumexp(both.flatten(-2)).view_as(both)
        if before is not None and before[1] is not None:
            z = logaddexp(z, torch.stack([before[0], before[1]]).unsqueeze(2))
    return (z[0] - z[1]).to(k.dtype).exp().expand_as(k), z[1, :, -1]
