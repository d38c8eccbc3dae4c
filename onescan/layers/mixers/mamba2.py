"""Mamba-2: a state space model with one decay per head, a short convolution and a gated norm."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onescan.checks import check_choice, check_positive
from onescan.layers.basic import Gate, NormName
from onescan.layers.decays import Mamba2Decay
from onescan.layers.mixers.linear_attention import (
    ConvSize,
    LinearAttention,
    LinearAttentionConfig,
    ScanOptions,
)
from onescan.layers.mixers.projections import Projections, merged_projections
from onescan.ops.decay_attention import Form, decay_attention
from onescan.ops.gating import gated
from onescan.ops.numerics import to_accumulation_dtype
from onescan.shapes import Grid, Hidden, Keys, LowerBound, Queries, Values


@dataclass(frozen=True, kw_only=True)
class Mamba2MixerConfig(LinearAttentionConfig):
    """Mamba-2's mixer; in its paper, each of the `num_heads` heads has 64 value channels.

    In both directions, all parameters are shared, as in LION. `HydraMixerConfig` is a bidirectional
    Mamba-2 with separate step sizes.
    """

    key_width: int | None = 128
    """Channels of B and C, the state size N. None for width / num_heads."""
    value_width: int | None = None
    """Value channels per head. None for value_expansion * width / num_heads."""
    value_expansion: int = 2
    """Ratio of all value channels to the width, if value_width is None."""
    skip: bool = True
    """Add the skip connection D x to the output of the state space model, with one D per head."""
    conv_size: ConvSize = "auto"
    conv_bias: bool = True
    norm: NormName = "rms"
    norm_eps: float = 1e-5
    gate: Gate = "silu"
    """Activation of an output gate W_z x, which multiplies the output before its norm; "none" omits
    the gate and its parameters."""
    form: Form = "auto"
    """Algorithm of the op; see `decay_attention`."""

    def value_channels(self, width: int) -> int:
        return self.value_width or self.value_expansion * self.head_width(width)

    def build(self, *, width: int, axes: int) -> "Mamba2Mixer":
        self.check_shared_fields()
        check_choice("form", self.form, get_args(Form))
        check_positive(value_expansion=self.value_expansion)
        self.head_width(width)  # raises if num_heads does not divide the width
        return Mamba2Mixer(self, width)


class Mamba2Mixer(LinearAttention):
    """W_out norm(SSD(x) * silu(W_z u)), where x, B and C are silu(conv(W u)) and dt = W_dt u.

        h_t = exp(-exp(a) dt_t) h_{t-1} + dt_t B_t x_t^T,   SSD(x)_t = C_t^T h_t + D x_t

    with a, dt and D per head, and the same B and C in all heads. In terms of `decay_attention`,
    queries are C, keys dt B and values x. Initial values are those of `Mamba2Decay`, and D = 1.

    Source: Mamba-2, arXiv:2405.21060, Eq. 1 and Sec. 7 (parallel projections, extra normalization).
    """

    def __init__(self, config: Mamba2MixerConfig, width: int) -> None:
        keys = config.key_channels(width)
        values = config.num_heads * config.value_channels(width)
        super().__init__(config, width, values=values, qkv_widths=[keys, keys, values])
        self.decay = Mamba2Decay(width, config.num_heads)
        self.skip = nn.Parameter(torch.ones(config.num_heads)) if config.skip else None
        self.build_output(width, gate_bias=config.bias)

    @property
    def projections(self) -> Projections:
        return merged_projections(self.qkv_widths, self.out_proj, heads=1)

    def qkv(self, parts: Sequence[Tensor], angles: Any) -> tuple[Queries, Keys, Values]:
        """Return C, B and x per head, after their activations."""
        q, k, v = map(F.silu, parts)
        heads = self.config.num_heads
        q, k = (y.unsqueeze(2).expand(-1, -1, heads, -1) for y in (q, k))
        (v,) = to_accumulation_dtype(v.unflatten(-1, (heads, -1)))  # sums may overflow float16
        return q, k, v

    def decays_of(
        self,
        x: Hidden,
        extra: Sequence[Tensor],
        grid: Grid,
        lower_bound: LowerBound | None,
    ) -> list[Sequence[Tensor | None]]:
        """Return the log-decays and dt, which all scans share."""
        return [tuple(self.decay(x))]

    def scan(
        self, q: Queries, k: Keys, v: Values, decays: Sequence[Any], options: ScanOptions
    ) -> tuple[Values, Any]:
        config = self.config
        log_decay, dt = decays
        o, state = decay_attention(
            q, k * dt, v, log_decay, causal=config.reads_one_side, decay_at="target",
            causal_block=config.causal_block, keep=options.keep, cu_seqlens=options.cu_seqlens,
            state=options.state, form=config.form, chunk_size=config.chunk_size,
            return_state=config.state_block is not None, group=options.group,
        )  # fmt: skip
        return o if self.skip is None else o + self.skip.unsqueeze(-1) * v, state

    def _output(self, x: Hidden, o: Tensor, gate: Tensor | None) -> Hidden:
        """Apply the gate before the norm, without rounding o, which may exceed float16."""
        if gate is not None:
            gate = gate if self.gate_proj is None else self.gate_proj(gate)
            o = gated(o.flatten(-2), gate, self.config.gate).view_as(o)
        return super()._output(x, o, None)
