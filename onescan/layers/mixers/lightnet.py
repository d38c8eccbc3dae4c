"""LightNet attention (LNA): additive decay with projections, a norm and a low-rank gate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onescan.checks import can_look_at_values, check_choice, check_positive
from onescan.layers.basic import Gate, NormName
from onescan.layers.mixers.linear_attention import (
    LinearAttention,
    LinearAttentionConfig,
    LinearAttentionState,
    ScanOptions,
)
from onescan.ops.additive_decay import (
    AdditiveDecayState,
    Form,
    additive_decay,
    read,
    write,
)
from onescan.ops.collectives import gather
from onescan.ops.decay_attention import DecayState, decay_attention
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
)
from onescan.ops.parallel import SequenceGroup, sequence_group
from onescan.shapes import (
    Angles,
    Grid,
    Hidden,
    Keep,
    Keys,
    LogNormalizer,
    LowerBound,
    Position,
    Queries,
    Values,
)

DecayLogits = Literal["shared", "offset", "independent"]

SHORTEST, LONGEST = 1e-5, 1e30  # half-lives in tokens whose rates are accurate in float32
MAX_LOG_GAIN = 4.0  # up to this gain, the norm's epsilon has the intended effect, even in float16


@dataclass(frozen=True, kw_only=True)
class LightNetMixerConfig(LinearAttentionConfig):
    """LightNet attention; each ablation of the paper is one field.

    With direction="both", each token reads all tokens in one scan (Eq. 14). Otherwise, it reads
    only earlier or only later ones (Eq. 13). `scan` must be "flat", because a sum over all tokens
    has no order.
    """

    lrpe: bool = True
    """Rotate queries and keys by their position (MD-LRPE)."""
    decay: bool = True
    """Weight keys by their softmax over tokens (additive decay); False applies SiLU instead."""
    decay_logits: DecayLogits = "shared"
    """Logits of the decay: "shared", the keys; "offset", the keys plus a separate projection;
    "independent", the separate projection alone ("no share" in Table 6)."""
    decay_rank: int | None = 128
    """Rank of the separate projection; None is full rank. The 385M parameters of Table 6 match
    rank 128: full rank would add 27M to the 379M of "shared"."""
    leak: tuple[float, float] | None = None
    """Shortest and longest initial half-life of the leak in tokens, such as (16, 4096); see
    `additive_decay`. Half-lives are spaced geometrically across heads, and each head learns its
    own. Requires direction="forward" or "backward". None disables the leak, as in the paper."""
    norm: NormName = "layer"
    gate: Gate = "sigmoid"
    """Activation of the output gate, sigmoid in Eq. 15 and silu in flash-linear-attention; "none"
    omits the gate and its parameters."""
    gate_rank: int | None = 64
    bias: bool = False
    """Add biases to in_proj and out_proj, for weights of models that have them."""
    form: Form = "auto"
    """Algorithm of the op; see `additive_decay`, or `decay_attention` for decay=False."""

    @property
    def skips_padding(self) -> bool:
        return not self.lrpe and super().skips_padding

    @property
    def takes_packing(self) -> bool:
        takes_form = self.form in ("auto", "one_scan", "chunk")
        is_shared = self.decay and self.decay_logits == "shared"
        return takes_form and is_shared and super().takes_packing

    def build(self, *, width: int, axes: int) -> "LightNetMixer":
        self.check_shared_fields()
        check_choice("scan", self.scan, ["flat"])
        key_width = self.key_channels(width)
        if self.lrpe:
            described = f"head width {key_width} (width {width}, num_heads {self.num_heads})"
            check_axes_have_features(key_width, axes, described=described)
        check_choice("form", self.form, get_args(Form))
        if self.reads_one_side and self.form == "one_scan":
            raise ValueError(
                f"form is 'one_scan' with direction={self.direction!r}, expected 'auto', 'chunk', "
                "'full' or 'recurrent'"
            )
        by_blocks = self.causal_block is not None and self.form == "chunk"
        if not self.reads_one_side and self.form in ("chunk", "recurrent") and not by_blocks:
            raise ValueError(
                f"form is {self.form!r} with direction='both', expected 'auto', 'one_scan' or "
                "'full', or a causal mixer"
            )
        if self.form == "one_scan" and self.causal_block is not None and not self.decay:
            raise ValueError(
                f"form is 'one_scan' with decay=False and causal_block={self.causal_block}, "
                "expected 'auto', 'chunk' or 'full'"
            )
        check_choice("decay_logits", self.decay_logits, get_args(DecayLogits))
        if not self.decay and self.decay_logits != "shared":
            raise ValueError(
                f"decay_logits is {self.decay_logits!r} with decay=False, expected 'shared'"
            )
        if self.decay_rank is not None:
            check_positive(decay_rank=self.decay_rank)
        if self.leak is not None:
            self._check_leak(*self.leak)
        return LightNetMixer(self, width, axes)

    def _check_leak(self, shortest: float, longest: float) -> None:
        if not SHORTEST <= shortest <= longest <= LONGEST:
            raise ValueError(
                f"leak is {self.leak}, expected the shortest and the longest half-life in tokens, "
                f"such as (16, 4096), from {SHORTEST:g} to {LONGEST:g}"
            )
        if not self.reads_one_side:
            raise ValueError(
                f"leak is {self.leak} with direction={self.direction!r}, expected 'forward' or "
                "'backward': only causal mixers support a leak"
            )
        if not self.decay or self.decay_logits != "shared":
            raise ValueError(
                f"leak is {self.leak} with decay={self.decay} and decay_logits="
                f"{self.decay_logits!r}, but it requires decay=True and decay_logits='shared'"
            )


class SeparateState(NamedTuple):
    """State of the op if the decay has separate logits.

    Attributes:
        keys: State of `additive_decay`, whose logits are the keys.
        log_decay_normalizer: Log-normalizer of the decay logits, float64.
    """

    keys: AdditiveDecayState
    log_decay_normalizer: LogNormalizer


class LightNetMixer(LinearAttention):
    """Additive-decay attention: O = Norm[phi(Q) (f(K)^T V)] * sigmoid(U), then W_o.

    With separate decay logits d, the s_t of Eq. 13 and 14 is a sum over d instead of k:

        KV_t = diag(s_{t-1} / s_t) KV_{t-1} + R_t(exp(k_t) / s_t) v_t^T,   s_t = sum_{r<=t} exp(d_r)

    This equals the shared form with each query channel multiplied by g_t = sum exp(k_r) / s_t. This
    gain is unbounded. Apart from its epsilon, however, the norm is invariant to any factor common
    to all channels of a token. If the largest channel of g_t is outside the range from exp(-4) to
    exp(4), g_t is therefore scaled into that range, so that outputs neither overflow nor vanish.
    With norm="none", the scaling is undone afterwards, and outputs may overflow.

    With `leak`, which is not in the paper, s_{t-1} is first multiplied by exp(-exp(log_leak)), so
    that each head forgets tokens at a learned rate.

    Source: LightNet, arXiv:2405.21022, Eq. 13 to 15. The paper does not mention W_o, but its
    parameter counts imply it.
    """

    no_weight_decay = frozenset({"theta", "log_leak"})

    def __init__(self, config: LightNetMixerConfig, width: int, axes: int) -> None:
        key_width = config.key_channels(width)
        keys, values = (config.num_heads * x for x in (key_width, config.value_channels(width)))
        is_separate = config.decay_logits != "shared"
        super().__init__(
            config, width, values=values, qkv_widths=[keys, keys, values],
            extra_widths=[config.decay_rank or keys] * is_separate,
        )  # fmt: skip
        if is_separate:
            self.decay_proj: nn.Module = nn.Identity()
            if config.decay_rank is not None:
                self.decay_proj = nn.Linear(config.decay_rank, keys, bias=False)
        self.build_output(width, gate_bias=False)
        if config.lrpe:
            frequencies = lrpe_frequencies(key_width, axes)
            self.theta = nn.Parameter(frequencies.repeat(config.num_heads, 1))  # H K
        if config.leak is not None:
            shortest, longest = map(math.log, config.leak)
            half_lives = torch.linspace(shortest, longest, config.num_heads).exp()
            self.log_leak = nn.Parameter((math.log(2) / half_lives).log())  # H

    def qkv(self, parts: Sequence[Tensor], angles: Any) -> tuple[Queries, Keys, Values]:
        q, k, v = (self._heads(x) for x in parts)
        return q, k, v

    def decays_of(
        self,
        x: Hidden,
        extra: Sequence[Tensor],
        grid: Grid,
        lower_bound: LowerBound | None,
    ) -> list[Sequence[Tensor | None]]:
        """Return the separate logits of the decay, if there are any."""
        return [[self._heads(self.decay_proj(y)) for y in extra]]

    def angles(self, u: Tensor, grid: Grid, start: Position) -> Angles | RotaryPositions | None:
        if not self.config.lrpe:
            return None
        if len(grid.shape) == 1 and not grid.prefix and sequence_group(None) is None:
            return RotaryPositions(self.theta, start)
        start = start // math.prod(grid.shape[1:])  # from tokens to positions of the first axis
        return lrpe_angles(grid.shape, self.theta, prefix=grid.prefix, start=start)

    def scan(
        self, q: Queries, k: Keys, v: Values, decays: Sequence[Any], options: ScanOptions
    ) -> tuple[Values, Any]:
        config = self.config
        if not config.decay:
            return self._scan_undecayed(q, k, v, options)
        state, log_scale, normalizer = options.state, None, None
        leak = None if config.leak is None else to_accumulation_dtype(self.log_leak)[0].exp()
        if decays:
            before = None
            if state is not None:
                before = torch.stack([state.keys.log_normalizer, state.log_decay_normalizer])
                state = state.keys
            logits = k + decays[0] if config.decay_logits == "offset" else decays[0]
            block = 1 if config.reads_one_side else config.causal_block
            log_gain, normalizer = _log_gain(
                k, logits, options.keep, before, block=block, group=options.group
            )
            peak = log_gain.amax(dim=(2, 3), keepdim=True)
            log_scale = peak - peak.clamp(-MAX_LOG_GAIN, MAX_LOG_GAIN)
            gain = (log_gain - log_scale).to(accumulation_dtype(q.dtype)).exp()
            q = (F.silu(q) * gain).to(q.dtype)
        o, state = additive_decay(
            q, k, v, angles=options.angles, feature_map="identity" if decays else "silu",
            causal=config.reads_one_side, causal_block=config.causal_block, keep=options.keep,
            cu_seqlens=options.cu_seqlens, state=state, leak=leak, form=config.form,
            chunk_size=config.chunk_size, group=options.group,
        )  # fmt: skip
        if log_scale is not None and config.norm == "none":
            o = _scaled(o, log_scale)
        if normalizer is None or state is None:
            return o, state
        return o, SeparateState(state, normalizer)

    def _scan_undecayed(
        self, q: Queries, k: Keys, v: Values, options: ScanOptions
    ) -> tuple[Values, Any]:
        """Compute the ablation "w/o Decay" of Sec. 6.3, with SiLU instead of the softmax."""
        config, angles, keep = self.config, options.angles, options.keep
        q, k = F.silu(q), F.silu(k)
        if v.dtype == torch.float16:
            (v,) = to_accumulation_dtype(v)  # sums may overflow float16
        table = _table(angles, q)
        if table is not None:
            q, k = lrpe(q, table), lrpe(k, table)
        has_state = config.reads_one_side or config.causal_block is not None
        return decay_attention(
            q, k, v, causal=config.reads_one_side, causal_block=config.causal_block, keep=keep,
            state=options.state, form=config.form, chunk_size=config.chunk_size,
            return_state=has_state, group=options.group,
        )  # fmt: skip

    def write(
        self, k: Keys, v: Values, decays: Sequence[Any], options: ScanOptions
    ) -> AdditiveDecayState:
        return write(k, v, angles=_table(options.angles, k), keep=options.keep)

    def read(self, q: Queries, state: AdditiveDecayState, angles: Any) -> Values:
        return read(q, state, angles=_table(angles, q), feature_map="silu")

    def after_masked(
        self, before: LinearAttentionState, after: LinearAttentionState, keep: Keep
    ) -> LinearAttentionState:
        """Rotate keys in rows with a masked token by one position; see `Mixer.after_masked`."""
        if not self.config.lrpe:
            return after
        (theta,) = to_accumulation_dtype(self.theta)
        cos, sin = theta.cos().unsqueeze(-1), theta.sin().unsqueeze(-1)

        def rotate_keys(keys: Tensor) -> Tensor:  # B H 2K .
            a, b = keys.chunk(2, dim=2)
            rotated_keys = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=2)
            return keys.where(keep[:, :, None, None], rotated_keys.to(keys.dtype))

        def rotate_state(state: Any) -> Any:
            if isinstance(state, SeparateState):
                return state._replace(keys=rotate_state(state.keys))
            if isinstance(state, DecayState):
                k_sum = rotate_keys(state.k_sum.unsqueeze(-1)).squeeze(-1)
                state = state._replace(k_sum=k_sum)
            return state._replace(kv=rotate_keys(state.kv))

        return after._replace(attention=rotate_state(after.attention))

    @torch.no_grad()
    def key_importance(self, x: Hidden) -> Tensor:
        """Return each token's weight in a head's context, [B, H, T].

        It is the softmax of keys over tokens, averaged over key channels. If all keys were equal,
        it would be 1 / T.
        """
        parts, *_ = self._projected(x)
        if self.conv is not None:
            backward = self.config.direction == "backward"
            u = parts[0].flip(1) if backward else parts[0]
            u = self.conv(u)[0]
            parts = (u.flip(1) if backward else u).split(self.qkv_widths, dim=-1)
        k = self._heads(parts[1])
        return k.softmax(dim=1).mean(dim=-1).mT

    def _heads(self, x: Hidden) -> Keys:
        return x.unflatten(-1, (self.config.num_heads, -1))


def _table(angles: Angles | RotaryPositions | None, x: Keys) -> Angles | None:
    """Return a table of angles, computed if they are given as `RotaryPositions`."""
    return angles.angles(x.shape[1]) if isinstance(angles, RotaryPositions) else angles


def _log_gain(
    k: Keys,
    decay_logits: Keys,
    keep: Keep | None,
    before: Tensor | None,
    *,
    block: int | None,
    group: SequenceGroup | None,
) -> tuple[Tensor, LogNormalizer]:
    """Return log(sum exp(k) / sum exp(decay_logits)) and the log-normalizer of the decay logits.

    Both are float64. With blocks, the first has shape [B, T, H, K], and its sums run up to the end
    of each token's block. Without blocks, it has shape [B, 1, H, K]. `before` contains the
    log-normalizers of keys and decay logits before the first token, [2, B, H, K].
    """
    logits = torch.stack([k, decay_logits]).double()
    if keep is not None:
        logits = logits.masked_fill(~keep[:, :, None, None], LOG_ZERO)
    if group is not None:
        return _log_gain_over_ranks(group, logits, before, block=block)
    if block is None:
        z = logits.logsumexp(dim=2, keepdim=True)
    else:
        z = logcumsumexp(logits.flatten(-2)).view_as(logits)
        if before is not None:
            z = logaddexp(z, before.unsqueeze(2))
    return _at_block_ends(z[0] - z[1], block), z[1, :, -1]


def _at_block_ends(x: Tensor, block: int | None) -> Tensor:
    """Replace each token, [B, T, ...], with the last token of its block."""
    if block is None or block == 1:
        return x
    position = torch.arange(x.shape[1], device=x.device)
    return x.index_select(1, (position - position % block + block - 1).clamp(max=x.shape[1] - 1))


def _log_gain_over_ranks(
    group: SequenceGroup,
    logits: Tensor,
    before: Tensor | None,
    *,
    block: int | None,
) -> tuple[Tensor, LogNormalizer]:
    """Compute `_log_gain` from this rank's keys and decay logits, [2, B, T, H, K]."""
    # Prepend a token without weight, because a rank may have no tokens.
    logits = F.pad(logits, (0, 0, 0, 0, 1, 0), value=LOG_ZERO)
    z = logcumsumexp(logits.flatten(-2)).view_as(logits)
    (ends,) = gather(group, z[:, :, -1])  # W 2 B H K
    if before is not None:
        ends = torch.cat([before.to(ends).unsqueeze(0), ends])
    total = ends.logsumexp(dim=0)
    if block is None:
        z = total.unsqueeze(2)
    else:
        count = len(ends) - group.size + group.rank  # earlier ranks, and the state if any
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
            f"exp({log_scale.max().item():.0f}), which exceeds the range of {o.dtype}; use a norm"
        )
    return scaled
