"""RWKV-6 (Finch): token shift, decay per channel, a bonus for the current token and a gate.

The file contains the mixer's config, state and module, then the recurrence and the token shift.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onescan.checks import check_choice, check_positive
from onescan.layers.basic import normalized
from onescan.layers.decays import RWKV6DecayConfig
from onescan.layers.mixers.contract import (
    DirectedMixerConfig,
    Mixer,
    both_directions,
    check_tokens,
    flipped,
    masked,
)
from onescan.layers.mixers.projections import Projection, Projections
from onescan.ops.collectives import carry_tokens
from onescan.ops.decay_attention import DecayState, Form, decay_attention
from onescan.ops.gating import gated
from onescan.ops.numerics import to_accumulation_dtype
from onescan.ops.parallel import Group, scan_group, sequence_group
from onescan.shapes import Grid, Hidden, Keep, Keys, Pooled, Queries, Values

PARTS = 5  # inputs of the token shift: r, k, v, w (decay) and g (gate)
LORA_BOUND = 1e-4  # initial weights of low-rank projections are uniform within this bound
GROUP_NORM_EPS = 64e-5  # 1e-5 for outputs divided by 8


@dataclass(frozen=True, kw_only=True)
class RWKV6MixerConfig(DirectedMixerConfig):
    """The time mixing of RWKV-6, causal with direction="forward", or in both directions."""

    shift_rank: int = 32
    """Rank of the projections that weight the neighbors in the token shift."""
    decay_rank: int = 64
    """Rank of the projection to decays."""
    form: Form = "auto"
    """Algorithm of the op; see `decay_attention`."""
    chunk_size: int = 64
    """Tokens per chunk of the chunk form."""

    @property
    def skips_padding(self) -> bool:
        return True

    def build(self, *, width: int, axes: int) -> "RWKV6Mixer":
        self.check_direction()
        check_choice("form", self.form, get_args(Form))
        check_positive(
            shift_rank=self.shift_rank, decay_rank=self.decay_rank, chunk_size=self.chunk_size
        )
        return RWKV6Mixer(self, width)


class RWKV6State(NamedTuple):
    """State of the causal mixer, of constant size.

    Attributes:
        attention: S_t, the decayed sum of k v^T.
        last_token: The last real token, which the next one is mixed with; zeros at the beginning.
    """

    attention: DecayState
    last_token: Pooled


class RWKV6Mixer(Mixer):
    """o_t = GroupNorm(r_t (S_{t-1} + diag(u) k_t v_t^T)) * silu(g_t), then W_o, per head.

        S_t = diag(w_t) S_{t-1} + k_t v_t^T,   w_t = exp(-exp(w + W_2 tanh(W_1 x_t)))

    The input of each of r, k, v, w and g is x_t, mixed with its neighbor by the token shift. u is
    the bonus. Time mixing only: the MLP of a block takes the place of RWKV's channel mixing.

    In both directions, LION's rule (arXiv:2502.16249, Sec. 3.1) applied to this recurrence gives

        o_t = r_t (S_{t-1} + diag(u) k_t v_t^T + S'_{t+1}),   S'_t = diag(w_t) S'_{t+1} + k_t v_t^T

    where each direction contributes half of the bonus. As attention, the mask M_ij is the product
    of the decays of the tokens strictly between i and j, and u on the diagonal, so it is symmetric.
    LION's own row omits the token shift, the bonus and the gate, and reads S_t. The neighbor is the
    previous token (direction="forward"), the next one ("backward") or the mean of both ("both").

    Initial values are those of the original's first block, in every block.

    Source: Eagle and Finch, arXiv:2404.05892, Sec. 4.
    """

    no_weight_decay = frozenset({"shift_base", "shift_mix", "shift_up", "bonus"})

    def __init__(self, config: RWKV6MixerConfig, width: int) -> None:
        super().__init__()
        self.config = config
        head_width, heads = config.head_width(width), config.num_heads
        self.shift_base = nn.Parameter(torch.empty(width))
        self.shift_mix = nn.Parameter(torch.empty(PARTS, width))
        self.shift_down = nn.Linear(width, PARTS * config.shift_rank, bias=False)
        self.shift_up = nn.Parameter(torch.empty(PARTS, config.shift_rank, width))
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.gate_proj = nn.Linear(width, width, bias=False)
        self.decay = RWKV6DecayConfig(rank=config.decay_rank).build(
            width=width, num_heads=heads, head_width=head_width
        )
        self.bonus = nn.Parameter(torch.empty(heads, head_width))
        self.norm = nn.GroupNorm(heads, width, eps=GROUP_NORM_EPS)
        self.out_proj = nn.Linear(width, width, bias=False)
        self.init_weights()

    @property
    def projections(self) -> Projections:
        width, heads = self.out_proj.out_features, self.config.num_heads
        return {
            "query": Projection("q_proj", 0, width, heads),
            "key": Projection("k_proj", 0, width, heads),
            "value": Projection("v_proj", 0, width),
            "output": Projection("out_proj", 0, width),
        }

    @torch.no_grad()
    def init_weights(self) -> None:
        width = len(self.shift_base)
        channel = torch.arange(width, device="cpu")  # even where parameters are on the meta device
        self.shift_base.copy_(1 - channel / width)
        powers = torch.tensor([0.5, 1, 1, 1, 0.5], device="cpu")  # r, k, v, w, g
        self.shift_mix.copy_(1 - (channel / width) ** powers.unsqueeze(-1))
        share = channel / max(width - 1, 1)
        self.decay.log_rate.copy_((5 * share**0.7 - 6).view_as(self.decay.log_rate))
        self.bonus.copy_((0.1 * ((channel + 1) % 3 - 1)).view_as(self.bonus))
        for weight in (
            self.shift_down.weight,
            self.shift_up,
            self.decay.down_proj.weight,
            self.decay.up_proj.weight,
        ):
            nn.init.uniform_(weight, -LORA_BOUND, LORA_BOUND)

    def forward(
        self, x: Hidden, grid: Grid, *, keep: Keep | None = None, state: RWKV6State | None = None
    ) -> tuple[Hidden, RWKV6State | None]:
        config = self.config
        check_tokens(x, grid, keep)
        if state is not None:
            config.check_state(state, grid)
            self.check_state(state, RWKV6State, causal=config.is_causal)
        if sequence_group(None) is None:
            check_positive(T=x.shape[1])
        x = masked(x, keep)
        backward = config.direction == "backward"
        if backward:
            x, keep = flipped(x), flipped(keep)
        neighbor, last_token = self._neighbor(x, keep, state)
        r, k, v, w, g = self._shift(x, neighbor)
        heads = (config.num_heads, -1)
        q = self.q_proj(r).unflatten(-1, heads)
        k = self.k_proj(k).unflatten(-1, heads)
        v = self.v_proj(v).unflatten(-1, heads)
        log_decay, _ = self.decay(w)
        if keep is not None:
            k, v, log_decay = (y.masked_fill(~keep[:, :, None, None], 0) for y in (k, v, log_decay))
        # Sums may overflow float16.
        (v,) = to_accumulation_dtype(v)
        o, attention = self._attend(q, k, v, log_decay, None if state is None else state.attention)
        o = o.flatten(-2)
        o = normalized(self.norm, o.flatten(0, 1)).view(o.shape)
        y = self.out_proj(gated(o, self.gate_proj(g), "silu"))
        y = masked(y, keep)
        if attention is None:
            return flipped(y) if backward else y, None
        return y, RWKV6State(attention, last_token)

    def _neighbor(
        self, x: Hidden, keep: Keep | None, state: RWKV6State | None
    ) -> tuple[Hidden, Pooled]:
        """Return the token that each token is mixed with, and the last real token."""
        first = x.new_zeros(x.shape[0], x.shape[-1]) if state is None else state.last_token
        group = scan_group(backward=self.config.direction == "backward")
        before, last = previous_tokens(x, keep, first.to(x.dtype), group)
        if self.config.direction != "both":
            return before, last
        group = scan_group(backward=True)
        after, _ = previous_tokens(flipped(x), flipped(keep), first, group)
        return (before + flipped(after)) / 2, last

    def _shift(self, x: Hidden, neighbor: Hidden) -> tuple[Hidden, ...]:
        """Return the inputs of r, k, v, w and g, each mixed with weights that depend on x (ddlerp).

        a + (b - a) * (mu + tanh((a + (b - a) * mu_x) A) B) for a token a and its neighbor b.
        """
        change = neighbor - x
        hidden = torch.tanh(self.shift_down(x + change * self.shift_base))
        offsets = torch.einsum(
            "btpr,prd->pbtd", hidden.unflatten(-1, (PARTS, -1)), self.shift_up.to(hidden.dtype)
        )
        return tuple(
            x + change * (mix + offset).to(x.dtype)
            for mix, offset in zip(self.shift_mix, offsets, strict=True)
        )

    def _attend(
        self, q: Queries, k: Keys, v: Values, log_decay: Tensor, state: DecayState | None
    ) -> tuple[Values, DecayState | None]:
        """Return r_t (S_{t-1} + diag(u) k_t v_t^T), also of the other direction, and the state."""
        wide_q, wide_k = to_accumulation_dtype(q, k)
        self_output = (wide_q * self.bonus * wide_k).sum(dim=-1, keepdim=True) * v
        scan = partial(read_before_write, form=self.config.form, chunk_size=self.config.chunk_size)
        inputs = (q, k, v, log_decay)
        if self.config.direction != "both":
            group = scan_group(backward=self.config.direction == "backward")
            o, state = scan(*inputs, state, return_state=self.config.is_causal, group=group)
            return o + self_output, state
        past, future = both_directions(
            lambda *args, group: scan(*args, return_state=False, group=group)[0], inputs, inputs
        )
        return past + future + self_output, None


def read_before_write(
    q: Queries,
    k: Keys,
    v: Values,
    log_decay: Tensor,
    state: DecayState | None = None,
    *,
    form: Form = "auto",
    chunk_size: int = 64,
    return_state: bool = True,
    group: Group | None = None,
) -> tuple[Values, DecayState | None]:
    """Return o_t = S_{t-1}^T q_t and S_T, where S_t = diag(exp(a_t)) S_{t-1} + k_t v_t^T.

    The state that is read, P_t = S_{t-1}, follows the recurrence of causal `decay_attention`,

        P_t = diag(exp(a_{t-1})) P_{t-1} + k_{t-1} v_{t-1}^T,   o_t = P_t^T q_t

    with the keys, values and decays of the previous token.

    Args:
        q: Queries, [B, T, H, K].
        k: Keys, [B, T, H, K].
        v: Values, [B, T, H, V].
        log_decay: a_t, the log of the decay of each token, [B, T, H], or also of each key channel,
            [B, T, H, K].
        state: S_0, the state returned by a previous call.
        form: As in `decay_attention`.
        chunk_size: As in `decay_attention`.
        return_state: If False, return None instead of the state.
        group: As in `decay_attention`.
    """
    # Over several ranks, append a token that reads the state after the last one.
    last = 0 if sequence_group(group) is None else 1
    keys, values, decays = (_padded(x, 1, last - 1) for x in (k, v, log_decay))
    q = _padded(q, 0, last) if last else q
    before: Any
    o, before = decay_attention(
        q, keys, values, decays, causal=True, state=state,
        form=form, chunk_size=chunk_size, return_state=return_state, group=group,
    )  # fmt: skip
    if last:
        return o[:, :-1], before
    if not return_state:
        return o, None
    key, value, log = to_accumulation_dtype(k[:, -1], v[:, -1], log_decay[:, -1])
    decay = log.exp() if log_decay.ndim == k.ndim else log.exp().unsqueeze(-1)
    kv = decay.unsqueeze(-1) * before.kv + key.unsqueeze(-1) * value.unsqueeze(-2)
    return o, DecayState(kv, decay * before.k_sum + key)


def _padded(x: Tensor, before: int, after: int) -> Tensor:
    """Add tokens of zeros before and after those of x; negative numbers drop tokens."""
    return F.pad(x, [0, 0] * (x.ndim - 2) + [before, after])


def previous_tokens(
    x: Hidden, keep: Keep | None, first: Pooled, group: Group | None = None
) -> tuple[Hidden, Pooled]:
    """Return the last real token before each token, and the last real token of all.

    Args:
        x: Tokens.
        keep: True for real tokens; None if all are.
        first: The last real token before x.
        group: Process group across which the tokens are sharded, as in the ops.
    """
    if (ranks := sequence_group(group)) is not None:
        ((before, last),) = carry_tokens(ranks, [(x, keep)], 1, before=first.unsqueeze(1))
        keep = None if keep is None else F.pad(keep, (1, 0), value=True)
        x = torch.cat([before, x], dim=1)
        return _previous(x, keep, first)[0][:, 1:], last[:, 0]
    return _previous(x, keep, first)


def _previous(x: Hidden, keep: Keep | None, first: Pooled) -> tuple[Hidden, Pooled]:
    """Compute `previous_tokens` for tokens that are all on this process."""
    if keep is None:
        return torch.cat([first.unsqueeze(1), x[:, :-1]], dim=1), x[:, -1].clone()
    position = torch.arange(1, x.shape[1] + 1, device=x.device)
    latest = F.pad((position * keep).cummax(dim=1).values, (1, 0))  # 0 is `first`
    tokens = torch.cat([first.unsqueeze(1), x], dim=1)
    latest_tokens = tokens.gather(1, latest.unsqueeze(-1).expand_as(tokens))
    return latest_tokens[:, :-1], latest_tokens[:, -1].clone()
