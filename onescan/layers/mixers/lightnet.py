"""LightNet attention (LNA): additive decay with projections, a norm and a low-rank gate."""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onescan.checks import can_look_at_values, check_choice, check_positive
from onescan.layers.basic import EPS, NormName, build_norm
from onescan.layers.convolution import ShortConvolution, Window
from onescan.layers.mixers.contract import Mixer, MixerConfig, check_blocks, check_continued, masked
from onescan.layers.mixers.projections import Projections, merged_projections
from onescan.ops.additive_decay import AdditiveDecayState, Form, additive_decay
from onescan.ops.blocks import check_causal_block
from onescan.ops.collectives import gather, sum_over_ranks
from onescan.ops.decay_attention import DecayState, decay_attention
from onescan.ops.gating import gated
from onescan.ops.lrpe import (
    RotaryPositions,
    check_axes_have_features,
    lrpe,
    lrpe_angles,
    lrpe_frequencies,
)
from onescan.ops.numerics import (
    LOG_ZERO,
    accumulation_dtype,
    logaddexp,
    logcumsumexp,
    to_accumulation_dtype,
    to_autocast_dtype,
)
from onescan.ops.packing import Packing
from onescan.ops.parallel import SequenceGroup, sequence_group
from onescan.shapes import (
    Angles,
    Grid,
    Hidden,
    Keep,
    Keys,
    LogNormalizer,
    Position,
    Queries,
    Values,
)

GateActivation = Literal["sigmoid", "silu"]

MAX_LOG_GAIN = 4.0  # up to this gain, the norm's epsilon has the intended effect, even in float16


@dataclass(frozen=True, kw_only=True)
class LightNetMixerConfig(MixerConfig):
    """LightNet attention; each ablation of the paper is one field."""

    key_width: int | None = None
    """Query and key channels per head. None for width / num_heads, which values always have."""
    causal: bool = False
    """Read only earlier tokens (Eq. 13) instead of all tokens (Eq. 14)."""
    causal_block: int | None = None
    """Tokens per block of a blockwise causal mixer: each token reads its own block and all earlier
    blocks. For images and video that are generated block by block, such as by rows or frames. There
    is a state after each block, and the convolution is causal. Requires causal=False and a grid
    without a prefix."""
    conv_size: int | None = None
    """Kernel size of a short convolution of queries, keys and values, in row-major order. If
    causal, it reads the current token and those before it; otherwise, it is centered and requires
    an odd size. None omits it, as in the paper."""
    conv_bias: bool = False
    """Add a bias to the convolution."""
    lrpe: bool = True
    """Rotate queries and keys by their position (MD-LRPE)."""
    decay: bool = True
    """Weight keys by their softmax over tokens (additive decay); False applies SiLU instead."""
    decay_logits: Literal["shared", "offset", "independent"] = "shared"
    """Logits of the decay: "shared", the keys; "offset", the keys plus a separate projection;
    "independent", the separate projection alone ("no share" in Table 6)."""
    decay_rank: int | None = 128
    """Rank of the separate projection; None is full rank. The 385M parameters of Table 6 match
    rank 128: full rank would add 27M to the 379M of "shared"."""
    norm: NormName = "layer"
    """Norm of the output, before the gate, computed over all heads together."""
    norm_eps: float = EPS
    """Epsilon of the norm of the output."""
    gate: bool = True
    """Multiply the output by sigmoid(U), Eq. 15; False omits the gate and its parameters."""
    gate_activation: GateActivation = "sigmoid"
    """Activation of the output gate; "silu" in flash-linear-attention."""
    gate_rank: int | None = 64
    """Rank of the output gate; None is full rank."""
    bias: bool = False
    """Add biases to in_proj and out_proj, for weights of models that have them."""
    form: Form = "auto"
    """Algorithm of the op; see `additive_decay`."""
    chunk_size: int = 64
    """Tokens per chunk of the causal form."""

    @property
    def is_causal(self) -> bool:
        return self.causal

    @property
    def state_block(self) -> int | None:
        return 1 if self.causal else self.causal_block

    @property
    def prefix_reads_grid(self) -> bool:
        return self.state_block is None

    @property
    def skips_padding(self) -> bool:
        return not self.lrpe and self.causal_block is None

    @property
    def takes_cu_seqlens(self) -> bool:
        takes_form = self.form in ("auto", "one_scan", "chunk")
        is_shared = self.decay and self.decay_logits == "shared"
        return takes_form and is_shared and self.conv_size is None

    def build(self, *, width: int, axes: int) -> "LightNetMixer":
        head_width = self.head_width(width)
        if self.key_width is not None:
            check_positive(key_width=self.key_width)
            head_width = self.key_width
        if self.lrpe:
            described = f"head width {head_width} (width {width}, num_heads {self.num_heads})"
            check_axes_have_features(head_width, axes, described=described)
        check_positive(norm_eps=self.norm_eps)
        check_choice("gate_activation", self.gate_activation, get_args(GateActivation))
        check_choice("form", self.form, get_args(Form))
        if self.causal_block is not None:
            check_causal_block(self.causal_block, causal=self.causal)
        by_blocks = self.causal_block is not None and self.form == "chunk"
        if not self.causal and self.form in ("chunk", "recurrent") and not by_blocks:
            raise ValueError(f"form is {self.form!r}, but requires a causal mixer")
        check_positive(chunk_size=self.chunk_size)
        check_choice("decay_logits", self.decay_logits, ["shared", "offset", "independent"])
        if not self.decay and self.decay_logits != "shared":
            raise ValueError(
                f"decay_logits is {self.decay_logits!r} with decay=False, expected 'shared'"
            )
        for name in ("gate_rank", "decay_rank"):
            rank = getattr(self, name)
            if rank is not None:
                check_positive(**{name: rank})
        return LightNetMixer(self, width, head_width, axes)


class LightNetState(NamedTuple):
    """State of the causal mixer.

    Attributes:
        attention: State of the op; a `DecayState` if decay=False.
        log_decay_normalizer: Log-normalizer of separate decay logits, float64; None for "shared".
        position: Number of tokens seen, without the prefix; an integer tensor in exported programs.
        window: The last inputs of the convolution, [B, conv_size - 1, channels]; None without one.
    """

    attention: AdditiveDecayState | DecayState
    log_decay_normalizer: LogNormalizer | None
    position: Position
    window: Window | None = None


class LightNetMixer(Mixer):
    """Additive-decay attention: O = Norm[phi(Q) (f(K)^T V)] * sigmoid(U), then W_o.

    With separate decay logits d, the s_t of Eq. 13 and 14 is a sum over d instead of k:

        KV_t = diag(s_{t-1} / s_t) KV_{t-1} + R_t(exp(k_t) / s_t) v_t^T,   s_t = sum_{r<=t} exp(d_r)

    This equals the shared form with each query channel multiplied by g_t = sum exp(k_r) / s_t. This
    gain is unbounded, but apart from its epsilon, the norm is invariant to any factor common to the
    channels of a token. If the largest channel of g_t is outside of exp(-4) to exp(4), g_t is
    therefore scaled into that range, so that outputs can neither overflow nor vanish. With
    norm="none", the scaling is undone afterwards, and outputs may overflow.

    Source: LightNet, arXiv:2405.21022, Eq. 13 to 15. The paper does not mention W_o, but its
    parameter counts imply it.
    """

    no_weight_decay = frozenset({"theta"})

    def __init__(self, config: LightNetMixerConfig, width: int, key_width: int, axes: int) -> None:
        super().__init__()
        self.config = config
        keys = config.num_heads * key_width
        # in_proj computes q, k, v, and the low-rank inputs of gate_proj and decay_proj, or at full
        # rank the gate and the decay logits themselves.
        self.qkv_widths = [keys, keys, width]
        self.in_widths = self.qkv_widths + [config.gate_rank or width] * config.gate
        if config.decay_logits != "shared":
            self.in_widths.append(config.decay_rank or keys)
        self.in_proj = nn.Linear(width, sum(self.in_widths), bias=config.bias)
        self.conv = None
        if config.conv_size is not None:
            self.conv = ShortConvolution(
                sum(self.qkv_widths), config.conv_size,
                causal=config.state_block is not None, bias=config.conv_bias,
            )  # fmt: skip
        if config.gate:
            self.gate_proj = _expand(config.gate_rank, width)
        if config.decay_logits != "shared":
            self.decay_proj = _expand(config.decay_rank, keys)
        self.norm = build_norm(config.norm, width, eps=config.norm_eps)
        self.out_proj = nn.Linear(width, width, bias=config.bias)
        if config.lrpe:
            frequencies = lrpe_frequencies(key_width, axes)
            self.theta = nn.Parameter(frequencies.repeat(config.num_heads, 1))  # H K

    @property
    def projections(self) -> Projections:
        return merged_projections(self.qkv_widths, self.out_proj, heads=self.config.num_heads)

    def forward(
        self,
        x: Hidden,
        grid: Grid,
        *,
        keep: Keep | None = None,
        cu_seqlens: Packing | None = None,
        state: LightNetState | None = None,
    ) -> tuple[Hidden, LightNetState | None]:
        if self.config.causal_block is not None:
            check_blocks(self.config.causal_block, grid)
        if state is not None:
            has_state = self.config.state_block is not None
            self.check_state(state, LightNetState, causal=has_state)
            check_continued(grid)
        x = x if keep is None else masked(x, keep)
        q, k, v, low_rank, window = self._project(x, keep, None if state is None else state.window)
        gate, decay = (low_rank[0], low_rank[1:]) if self.config.gate else (None, low_rank)
        logits = None
        if decay:
            logits = self._heads(self.decay_proj(decay[0]))
            logits = k + logits if self.config.decay_logits == "offset" else logits
        o, state = self._attend(q, k, v, logits, grid, keep, cu_seqlens, state)
        o = self.norm(o.flatten(-2))  # B T D
        if gate is not None:
            gate = self.gate_proj(gate)
            o = to_autocast_dtype(o)  # as out_proj would, because norms return float32
            o = gated(o, gate, self.config.gate_activation)
        o = self.out_proj(o)
        o = o if keep is None else masked(o, keep)
        return o, state if state is None else state._replace(window=window)

    def _project(
        self, x: Hidden, keep: Keep | None, window: Window | None
    ) -> tuple[Queries, Keys, Values, tuple[Tensor, ...], Window | None]:
        """Return q, k and v, the inputs of gate_proj and decay_proj, and the next window."""
        if self.conv is None:  # a single split, as the gradient of each is a copy
            q, k, v, *low_rank = self.in_proj(x).split(self.in_widths, dim=-1)
        else:
            widths = [sum(self.qkv_widths), *self.in_widths[len(self.qkv_widths) :]]
            u, *low_rank = self.in_proj(x).split(widths, dim=-1)
            u, window = self.conv(u, keep=keep, state=window)
            q, k, v = u.split(self.qkv_widths, dim=-1)
        q, k, v = (self._heads(y) for y in (q, k, v))
        return q, k, v, tuple(low_rank), window

    def _attend(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        decay_logits: Keys | None,
        grid: Grid,
        keep: Keep | None,
        cu_seqlens: Packing | None,
        state: LightNetState | None,
    ) -> tuple[Values, LightNetState | None]:
        config = self.config
        position = 0 if state is None else state.position
        seen = position + (q.shape[1] - grid.prefix)
        group = sequence_group(None)
        if group is not None and config.state_block is not None:
            seen = position + sum(group.without_prefix().lengths(q[:, grid.prefix :]))
        angles: Angles | RotaryPositions | None = None
        if config.lrpe and len(grid.shape) == 1 and not grid.prefix and group is None:
            angles = RotaryPositions(self.theta, position)
        elif config.lrpe:
            start = _first_axis_position(position, grid)
            angles = lrpe_angles(grid.shape, self.theta, prefix=grid.prefix, start=start)
        attention: Any = None if state is None else state.attention
        if not config.decay:
            o, attention = self._attend_undecayed(q, k, v, angles, keep, attention)
            return o, self._state(attention, seen)
        decay_normalizer = log_scale = None
        if decay_logits is not None:
            before = None
            if state is not None:
                before = (attention.log_normalizer, state.log_decay_normalizer)
            log_gain, decay_normalizer = _log_gain(
                k, decay_logits, keep, before, block=config.state_block
            )
            peak = log_gain.amax(dim=(2, 3), keepdim=True)
            log_scale = peak - peak.clamp(-MAX_LOG_GAIN, MAX_LOG_GAIN)
            gain = (log_gain - log_scale).to(accumulation_dtype(q.dtype)).exp()
            q = (F.silu(q) * gain).to(q.dtype)
        o, attention = additive_decay(
            q, k, v, angles=angles, feature_map="silu" if log_scale is None else "identity",
            causal=config.causal, causal_block=config.causal_block, keep=keep,
            cu_seqlens=cu_seqlens, state=attention, form=config.form, chunk_size=config.chunk_size,
        )  # fmt: skip
        if log_scale is not None and config.norm == "none":
            o = _scaled(o, log_scale)
        return o, self._state(attention, seen, decay_normalizer)

    def _attend_undecayed(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        angles: Angles | RotaryPositions | None,
        keep: Keep | None,
        state: Any,
    ) -> tuple[Values, Any]:
        """Compute the paper's "w/o Decay", Sec. 6.3, with SiLU instead of the softmax."""
        config, q, k = self.config, F.silu(q), F.silu(k)
        form: Any = config.form
        if isinstance(angles, RotaryPositions):
            angles = angles.angles(q.shape[1])
        if angles is not None:
            q, k = lrpe(q, angles), lrpe(k, angles)
        if config.state_block is not None:
            return decay_attention(
                q, k, v, causal=config.causal, causal_block=config.causal_block, keep=keep,
                state=state, form=form, chunk_size=config.chunk_size,
            )  # fmt: skip
        if keep is not None:
            k = k * keep[:, :, None, None]
        (kv,) = sum_over_ranks(torch.einsum("bthf,bthv->bhfv", k, v))
        return torch.einsum("bthf,bhfv->bthv", q, kv), None

    def _state(
        self,
        attention: AdditiveDecayState | DecayState | None,
        position: Position,
        decay_normalizer: LogNormalizer | None = None,
    ) -> LightNetState | None:
        if self.config.state_block is None or attention is None:
            return None
        return LightNetState(attention, decay_normalizer, position)

    def after_masked(self, before: LightNetState, after: LightNetState, keep: Keep) -> Any:
        """Turn the keys of rows with a masked token by one position; see `Mixer.after_masked`."""
        if not self.config.lrpe:
            return after
        (theta,) = to_accumulation_dtype(self.theta)
        cos, sin = theta.cos().unsqueeze(-1), theta.sin().unsqueeze(-1)

        def turned(keys: Tensor) -> Tensor:  # B H 2K .
            a, b = keys.chunk(2, dim=2)
            moved = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=2)
            return keys.where(keep[:, :, None, None], moved.to(keys.dtype))

        attention = after.attention._replace(kv=turned(after.attention.kv))
        if isinstance(attention, DecayState):
            k_sum = turned(attention.k_sum.unsqueeze(-1)).squeeze(-1)
            attention = attention._replace(k_sum=k_sum)
        return after._replace(attention=attention)

    @torch.no_grad()
    def key_importance(self, x: Hidden) -> Tensor:
        """Return each token's weight in a head's context, [B, H, T].

        It is the softmax of keys over tokens, averaged over key channels. If all keys were equal,
        it would be 1 / T.
        """
        _, k, *_ = self._project(x, None, None)
        return k.softmax(dim=1).mean(dim=-1).mT

    def _heads(self, x: Hidden) -> Keys:
        return x.unflatten(-1, (self.config.num_heads, -1))


def _first_axis_position(position: Any, grid: Grid) -> Any:
    """Return the position along the first axis that follows this number of tokens of a grid."""
    if len(grid.shape) == 1:
        return position
    tokens = math.prod(grid.shape[1:])
    if isinstance(position, int) and position % tokens:
        raise ValueError(
            f"state.position is {position} with {grid}, expected a multiple of {tokens}: a state "
            "continues grids of the same sizes, except along the first axis"
        )
    return position // tokens


def _expand(rank: int | None, width: int) -> nn.Module:
    """Build the second layer of a low-rank projection, an identity for full rank (None)."""
    return nn.Identity() if rank is None else nn.Linear(rank, width, bias=False)


def _log_gain(
    k: Keys,
    decay_logits: Keys,
    keep: Keep | None,
    before: tuple[LogNormalizer, LogNormalizer | None] | None,
    *,
    block: int | None,
) -> tuple[Tensor, LogNormalizer]:
    """Return log(sum exp(k) / sum exp(decay_logits)) and the log-normalizer of the decay logits.

    Both are float64. With blocks, the first has shape [B, T, H, K], and its sums end with the block
    of each token. Without blocks, it has shape [B, 1, H, K].
    """
    both = torch.stack([k, decay_logits]).double()
    if keep is not None:
        both = both.masked_fill(~keep[:, :, None, None], LOG_ZERO)
    if (group := sequence_group(None)) is not None:
        return _log_gain_over_ranks(group, both, before, block=block)
    if block is None:
        z = both.logsumexp(dim=2, keepdim=True)
    else:
        z = logcumsumexp(both.flatten(-2)).view_as(both)
        if before is not None and before[1] is not None:
            z = logaddexp(z, torch.stack([before[0], before[1]]).unsqueeze(2))
    return _at_block_ends(z[0] - z[1], block), z[1, :, -1]


def _at_block_ends(x: Tensor, block: int | None) -> Tensor:
    """Replace each token, [B, T, ...], by the last token of its block."""
    if block is None or block == 1:
        return x
    place = torch.arange(x.shape[1], device=x.device)
    return x.index_select(1, (place - place % block + block - 1).clamp(max=x.shape[1] - 1))


def _log_gain_over_ranks(
    group: SequenceGroup,
    both: Tensor,
    before: tuple[LogNormalizer, LogNormalizer | None] | None,
    *,
    block: int | None,
) -> tuple[Tensor, LogNormalizer]:
    """Compute `_log_gain` from this rank's keys and decay logits, [2, B, T, H, K]."""
    # Prepend a token without weight, because a rank may have no tokens.
    both = F.pad(both, (0, 0, 0, 0, 1, 0), value=LOG_ZERO)
    z = logcumsumexp(both.flatten(-2)).view_as(both)
    (ends,) = gather(group, z[:, :, -1])  # W 2 B H K
    if before is not None and before[1] is not None:
        ends = torch.cat([torch.stack([before[0], before[1]]).to(ends).unsqueeze(0), ends])
    total = ends.logsumexp(dim=0)
    if block is None:
        z = total.unsqueeze(2)
    else:
        count = len(ends) - group.size + group.rank  # of earlier ranks, and the state
        earlier = F.pad(ends[:count], (0, 0) * 4 + (1, 0), value=LOG_ZERO).logsumexp(dim=0)
        z = logaddexp(z[:, :, 1:], earlier.unsqueeze(2))
    return _at_block_ends(z[0] - z[1], block), total[1]


def _scaled(o: Values, log_scale: Tensor) -> Values:
    """Multiply by exp(log_scale), of shape [B, T or 1, 1, 1].

    Raises:
        ValueError: If a product exceeds the range of its dtype. Checked on CPU only.
    """
    wide = o.to(accumulation_dtype(o.dtype))
    # Multiply by the square root twice, because exp(log_scale) may overflow even if the product
    # does not.
    limit = math.log(torch.finfo(wide.dtype).max)
    root = (log_scale / 2).clamp(max=limit).to(wide.dtype).exp()
    scaled = (wide * root * root).to(o.dtype)
    if can_look_at_values(scaled) and not scaled.detach().isfinite().all():
        raise ValueError(
            f"norm is 'none' and the decay logits scale outputs by up to "
            f"exp({log_scale.max().item():.0f}), beyond the range of {o.dtype}; expected a norm"
        )
    return scaled
