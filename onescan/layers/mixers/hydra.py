"""Hydra: a quasiseparable matrix mixer made of two state space models, one per direction."""

from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onescan.checks import check_choice, check_positive
from onescan.layers.basic import build_norm, normalized
from onescan.layers.convolution import RealFirst, ShortConvolution
from onescan.layers.decays import Mamba2Decay
from onescan.layers.mixers.contract import (
    Mixer,
    MixerConfig,
    both_directions,
    check_tokens,
    masked,
)
from onescan.layers.mixers.rwkv6 import previous_tokens
from onescan.ops.decay_attention import Form, decay_attention
from onescan.ops.numerics import to_accumulation_dtype
from onescan.ops.parallel import SequenceGroup, sequence_group
from onescan.shapes import Grid, Hidden, Keep, Values

EPS = 1e-5  # of the output's norm


@dataclass(frozen=True, kw_only=True)
class HydraMixerConfig(MixerConfig):
    """Hydra's bidirectional mixer; in Hydra each of the `num_heads` heads has 64 inner channels."""

    state_size: int = 64
    """State channels of each inner channel, N."""
    expand: int = 2
    """Inner width divided by model width."""
    conv_size: int = 7
    """Tokens that the convolution reads, half of them on each side; must be odd."""
    shared_keys: bool = False
    """Use the same B and C in both directions, as in the pseudocode of Fig. 5. Otherwise each
    direction has its own, as in Eq. 3."""
    form: Form = "auto"
    """Algorithm of the op; see `decay_attention`."""
    chunk_size: int = 64
    """Tokens per chunk of the chunk form."""

    @property
    def skips_padding(self) -> bool:
        return True

    def build(self, *, width: int, axes: int) -> "HydraMixer":
        check_choice("form", self.form, get_args(Form))
        check_positive(state_size=self.state_size, expand=self.expand, chunk_size=self.chunk_size)
        self.head_width(width)  # raises if num_heads does not divide the width
        return HydraMixer(self, width)


class HydraMixer(Mixer):
    """W_out [norm(QS(u)) * silu(W_z x)], where u, B and C are silu(conv(W x)) and dt = W_dt x.

        QS(u) = shift(SS(u)) + flip(shift(SS(flip(u)))) + diag(W_d u + d) u

    SS is Mamba-2's state space model: h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t, y_t = C_t h_t, with
    one decay per head. shift moves outputs to the next token, so that neither direction reads the
    token itself, and the diagonal of the mixer matrix is free.

    Source: Hydra, arXiv:2407.09941, Proposition 3.7 and Fig. 4. A, the bias of dt and the
    convolution are shared by both directions.
    """

    def __init__(self, config: HydraMixerConfig, width: int) -> None:
        super().__init__()
        self.config = config
        inner = config.expand * width
        self.key_widths = [config.state_size] * (
            2 if config.shared_keys else 4
        )  # B, C per direction
        self.in_widths = [inner, inner + sum(self.key_widths)]  # z; u, B and C
        self.in_proj = nn.Linear(width, sum(self.in_widths), bias=False)
        self.conv = ShortConvolution(self.in_widths[1], config.conv_size, causal=False)
        self.decay = Mamba2Decay(width, config.num_heads, directions=2)
        self.diagonal_proj = nn.Linear(inner, config.num_heads)
        self.norm = build_norm("rms", inner, eps=EPS)
        self.out_proj = nn.Linear(inner, width, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Set A = -1 and d = 1."""
        self.decay.log_rate.zero_()
        self.diagonal_proj.bias.fill_(1.0)

    def forward(
        self, x: Hidden, grid: Grid, *, keep: Keep | None = None, state: Any = None
    ) -> tuple[Hidden, None]:
        check_tokens(x, grid, keep)
        if state is not None:
            self.check_state(state, object, causal=False)
        if keep is None:
            return self._mix(x, None), None
        # The convolution and the shift read neighbors, so the real tokens are moved together.
        order = RealFirst.of(keep)
        real = torch.arange(x.shape[1], device=x.device) < keep.sum(dim=1, keepdim=True)
        x = order.collect(masked(x, keep))
        return masked(order.restore(self._mix(x, real)), keep), None

    def _mix(self, x: Hidden, real: Keep | None) -> Hidden:
        """Mix tokens whose first ones are real (`real` is True), and whose others are zero."""
        z, u = self.in_proj(x).split(self.in_widths, dim=-1)
        # On a single process, the zeros after the real tokens act as the convolution's padding.
        keep = None if sequence_group(None) is None else real
        u = F.silu(self.conv(u, keep=keep)[0])
        u, *keys = u.split([self.in_widths[0], *self.key_widths], dim=-1)
        diagonal = self.diagonal_proj(u)
        # Sums may overflow float16.
        (v,) = to_accumulation_dtype(u.unflatten(-1, (self.config.num_heads, -1)))
        y = self._strictly_before_and_after(x, keys, v, real) + diagonal.unsqueeze(-1) * v
        y = normalized(self.norm, y.flatten(-2)) * F.silu(z)
        return self.out_proj(y.to(x.dtype))

    def _strictly_before_and_after(
        self, x: Hidden, keys: list[Tensor], v: Values, real: Keep | None
    ) -> Values:
        """Compute shift(SS(u)) in both directions, and add them."""
        forward, backward = zip(*map(_halves, self.decay(x)), strict=True)
        before, after = both_directions(
            self._before, (*keys[:2], *forward, v, real), (*keys[-2:], *backward, v, real)
        )
        return before + after

    def _before(
        self,
        k: Tensor,
        q: Tensor,
        log_decay: Tensor,
        dt: Tensor,
        v: Values,
        real: Keep | None,
        *,
        group: SequenceGroup | None,
    ) -> Values:
        """Compute shift(SS(u)), which reads the tokens before each token."""
        config = self.config
        k, q = (y.unsqueeze(2).expand(-1, -1, config.num_heads, -1) for y in (k, q))
        o, _ = decay_attention(
            q, k * dt, v, log_decay, causal=True, keep=real, form=config.form,
            chunk_size=config.chunk_size, return_state=False, group=group,
        )  # fmt: skip
        if group is None:
            return F.pad(o, (0, 0, 0, 0, 1, -1))  # shift
        flat = o.flatten(2)
        first = flat.new_zeros(len(flat), flat.shape[2])
        return previous_tokens(flat, real, first, group)[0].view_as(o)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split the heads of both directions."""
    forward, backward = x.chunk(2, dim=2)
    return forward, backward
