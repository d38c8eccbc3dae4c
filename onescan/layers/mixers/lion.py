"""LION: linear attention with any decay, in one or both directions, along one or several scans.

`LINEAR_TRANSFORMERS` at the end lists the models of LION's Table 1 as configs of this mixer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from onescan.checks import check_choice, check_positive
from onescan.layers.decays import (
    Decay,
    DecayConfig,
    DecayOutput,
    FixedDecayConfig,
    GLADecayConfig,
    HGRN2DecayConfig,
    HippoDecayConfig,
    LogDecay,
    Mamba2DecayConfig,
    MambaDecayConfig,
    NoDecayConfig,
    RWKV6DecayConfig,
    SelectiveDecayConfig,
    XLSTMDecayConfig,
)
from onescan.layers.mixers.contract import DirectedMixerConfig, rows_where
from onescan.layers.mixers.delta_rule import DeltaRuleMixerConfig
from onescan.layers.mixers.linear_attention import (
    LinearAttention,
    LinearAttentionConfig,
    LinearAttentionState,
    ScanOptions,
)
from onescan.layers.rotary import RotaryAngles, check_rotary, rotary_angles, rotated
from onescan.ops.collectives import sum_over_ranks
from onescan.ops.decay_attention import (
    DecayAt,
    DecayState,
    Form,
    decay_attention,
    read,
    write,
)
from onescan.ops.feature_maps import FEATURE_MAPS, FeatureMapName
from onescan.ops.numerics import disable_autocast, safe_divide, to_accumulation_dtype
from onescan.shapes import Grid, Hidden, Keep, Keys, LowerBound, Position, Queries, Values

MeanDecays = Float[Tensor, "scans H"] | Float[Tensor, "scans H K"]
Normalize = Literal["none", "sum", "max_one", "sum_before_mask"]


@dataclass(frozen=True, kw_only=True)
class LionMixerConfig(LinearAttentionConfig):
    """LION-s by default; other values of the fields give other linear attentions with decay."""

    state_size: int | None = None
    """Make each channel a separate head with this many key channels, as in Mamba. The channels of
    each of the `num_heads` groups share queries and keys. None for heads of width / num_heads."""
    rotary: bool = False
    """Rotate queries and keys by their position (RoPE), as in RetNet. Requires one axis and
    normalize="none", as rotated scores may be negative."""
    feature_map: FeatureMapName = "shifted_silu"
    """Feature map of queries and keys."""
    value_map: FeatureMapName = "identity"
    """Activation of values; "silu" in HGRN2."""
    decay: DecayConfig = field(default_factory=SelectiveDecayConfig)
    """Decay of the state."""
    normalize: Normalize = "sum"
    """Divisor of the outputs; see `decay_attention`. "sum_before_mask" divides by the row sum of
    the scores before decay; it requires direction="both"."""
    decay_at: DecayAt = "auto"
    """Which of two neighboring tokens provides the decay between them; see `decay_attention`.
    "symmetric" requires direction="both"."""
    bias: bool = True
    form: Form = "auto"
    """Algorithm of the op; see `decay_attention`."""

    @property
    def skips_padding(self) -> bool:
        return not self.rotary and super().skips_padding

    @property
    def takes_packing(self) -> bool:
        return self.normalize != "sum_before_mask" and super().takes_packing

    @property
    def takes(self) -> frozenset[str]:
        return super().takes | ({"lower_bound"} if self.decay.reads_lower_bound else frozenset())

    def build(self, *, width: int, axes: int) -> "LionMixer":
        self.check_shared_fields()
        check_choice("feature_map", self.feature_map, FEATURE_MAPS)
        check_choice("value_map", self.value_map, FEATURE_MAPS)
        check_choice("normalize", self.normalize, get_args(Normalize))
        check_choice("decay_at", self.decay_at, get_args(DecayAt))
        check_choice("form", self.form, get_args(Form))
        if self.scan == "natural" and self.normalize not in ("none", "sum"):
            raise ValueError(
                f"normalize is '{self.normalize}' with scan='natural', expected 'none' or 'sum'"
            )
        if self.normalize == "sum_before_mask" and self.direction != "both":
            raise ValueError(
                f"normalize is 'sum_before_mask' with direction='{self.direction}', expected 'both'"
            )
        if self.normalize == "sum_before_mask" and self.causal_block is not None:
            raise ValueError(
                f"normalize is 'sum_before_mask' with causal_block={self.causal_block}, expected "
                "'none', 'sum' or 'max_one'"
            )
        if self.decay_at == "symmetric" and self.direction != "both":
            raise ValueError(
                f"decay_at is 'symmetric' with direction='{self.direction}', expected 'both'"
            )
        if self.rotary:
            check_rotary(axes, self.state_size or self.key_width or self.head_width(width))
            if self.normalize != "none":
                raise ValueError(
                    f"normalize is {self.normalize!r} with rotary=True, expected 'none'"
                )
        if self.state_size is not None:
            check_positive(state_size=self.state_size)
        for name in ("state_size", "key_width", "value_width"):
            size = getattr(self, name)
            if size is not None and isinstance(self.decay, HippoDecayConfig):
                raise ValueError(
                    f"{name} is {size} with decay=HippoDecayConfig, expected None: "
                    "its initialization needs one key channel per value channel"
                )
        if self.state_size is not None and (
            self.key_width is not None or self.value_width is not None or self.norm_heads
        ):
            raise ValueError(
                f"state_size is {self.state_size} with key_width={self.key_width}, "
                f"value_width={self.value_width} and norm_heads={self.norm_heads}, but it requires "
                "key_width=None, value_width=None and norm_heads=False"
            )
        return LionMixer(self, width, axes)


class LionMixer(LinearAttention):
    """O = Norm[Scale(phi(Q) phi(K)^T * M) V], then W_o; the mask M is computed from the decay.

    Source: LION, arXiv:2502.16249, Sec. 3.1 and 3.2; directions, App. C.15; natural scans, C.14,
    where masks are averaged before the normalization of Sec. 3.1.
    """

    def __init__(self, config: LionMixerConfig, width: int, axes: int) -> None:
        key_width, num_heads = config.key_channels(width), config.num_heads
        if config.state_size is not None:
            key_width, num_heads = config.state_size, width
        keys = config.num_heads * key_width
        values = config.num_heads * config.value_channels(width)
        projected = 1 if config.decay.provides_keys else 2  # q, or q and k
        super().__init__(config, width, values=values, qkv_widths=[keys] * projected + [values])
        self.key_width, self.num_heads = key_width, num_heads
        self.feature_map = FEATURE_MAPS[config.feature_map]
        self.value_map = FEATURE_MAPS[config.value_map]
        scans = axes if config.scan == "natural" else 1
        sizes = {"width": width, "num_heads": num_heads, "head_width": key_width}
        self.decays = nn.ModuleList(config.decay.build(**sizes) for _ in range(scans))
        self.build_output(width, gate_bias=config.bias)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        q, *k, v = self.in_proj.weight.split(self.in_widths)[: len(self.qkv_widths)]
        for decay in self.decays:
            assert isinstance(decay, Decay)
            decay.init_weights(q, k[0] if k else None, v)

    def angles(self, u: Tensor, grid: Grid, start: Position) -> RotaryAngles | None:
        if not self.config.rotary:
            return None
        return rotary_angles(grid, self.key_width, start=start, dtype=u.dtype, device=u.device)

    def qkv(
        self, parts: Sequence[Tensor], angles: RotaryAngles | None
    ) -> tuple[Queries, Keys | None, Values]:
        """Return queries, keys (None if the decay provides them) and values."""
        q, *projected, v = parts
        q = self._features(q, angles)
        if not self._divides_by_row_sum:  # dividing by the row sum would cancel this factor
            q = q * self.key_width**-0.5
        k = self._features(projected[0], angles) if projected else None
        v = self.value_map(v.unflatten(-1, (self.num_heads, -1)))
        if v.dtype == torch.float16 and not self._divides_by_row_sum:
            (v,) = to_accumulation_dtype(v)  # sums may overflow float16
        return q, k, v

    def decays_of(
        self,
        x: Hidden,
        extra: Sequence[Tensor],
        grid: Grid,
        lower_bound: LowerBound | None,
    ) -> list[Sequence[Tensor | None]]:
        """Return the log-decay and the factor of the keys (or the keys) of each scan."""
        outputs = [_without_prefix(d, grid.prefix) for d in self._decay_outputs(x, lower_bound)]
        if self.config.scan == "natural":
            if len(grid.shape) != len(outputs):
                raise ValueError(
                    f"{grid} has {len(grid.shape)} axes, but the mixer was built for {len(outputs)}"
                )
            return [(_per_token(d.log_decay, x), d.key) for d in outputs]
        return [(d.log_decay, d.key) for d in outputs]

    def scan(
        self,
        q: Queries,
        k: Keys | None,
        v: Values,
        decays: Sequence[Any],
        options: ScanOptions,
    ) -> tuple[Tensor, Any]:
        config = self.config
        log_decay, key = decays
        k = _keys(k, key).to(q.dtype)
        normalize = config.normalize
        if config.scan == "natural":
            if normalize == "sum":  # a value of 1 outputs the row sum, not rounded
                (v,) = to_accumulation_dtype(v)
                v = F.pad(v, (0, 1), value=1.0)
            normalize = "none"
        if normalize == "sum_before_mask":
            q, normalize = _divided_by_row_sum(q, k, options.keep), "none"
        return decay_attention(
            q, k, v, log_decay, feature_map=config.feature_map if self._maps_in_op else "identity",
            causal=config.reads_one_side, causal_block=config.causal_block,
            decay_at=config.decay_at, normalize=normalize, keep=options.keep,
            cu_seqlens=options.cu_seqlens, state=options.state, form=config.form,
            chunk_size=config.chunk_size, return_state=config.state_block is not None,
            group=options.group,
        )  # fmt: skip

    def finished(self, o: Tensor) -> Tensor:
        if self.config.scan == "flat" or self.config.normalize != "sum":
            return o
        return safe_divide(o[..., :-1], o[..., -1:])

    def write(
        self, k: Keys | None, v: Values, decays: Sequence[Any], options: ScanOptions
    ) -> DecayState:
        return write(self._mapped(_keys(k, decays[1])), v, keep=options.keep)

    def read(self, q: Queries, state: DecayState, angles: Any) -> Values:
        return read(self._mapped(q), state, normalize=self.config.normalize)

    def after_masked(
        self, before: LinearAttentionState, after: LinearAttentionState, keep: Keep
    ) -> LinearAttentionState:
        """Rotate keys in rows with a masked token by one position; see `Mixer.after_masked`."""
        if not self.config.rotary:
            return after
        kv, k_sum = after.attention
        angles = rotary_angles(
            Grid((2,)), self.key_width, start=0, dtype=kv.dtype, device=kv.device
        )[1]
        rotated_state = DecayState(rotated(kv.mT, angles).mT, rotated(k_sum, angles))
        return after._replace(attention=rows_where(keep, after.attention, rotated_state))

    def _decay_outputs(self, x: Hidden, lower_bound: LowerBound | None) -> list[DecayOutput]:
        """Return the decays of each scan; `lower_bound` is for decays that read it."""
        bound = () if lower_bound is None else (lower_bound,)
        return [decay(x, *bound) for decay in self.decays]

    @property
    def _maps_in_op(self) -> bool:
        """Whether the op applies the feature map, because it is the last step before the op."""
        config = self.config
        is_plain = not config.rotary and config.state_size is None
        return is_plain and not config.decay.changes_keys and self._divides_by_row_sum

    @property
    def _divides_by_row_sum(self) -> bool:
        """Whether the op divides its outputs by row sums, which makes them means of values."""
        return self.config.normalize == "sum" and self.config.scan == "flat"

    @torch.no_grad()
    def mean_decays(
        self,
        x: Hidden,
        grid: Grid,
        *,
        keep: Keep | None = None,
        lower_bound: LowerBound | None = None,
    ) -> MeanDecays:
        """Return the mean decay factor of each head for each scan; 1 means no decay.

        Input-dependent decays are multiplied along the sequence, so they are averaged geometrically
        over all real tokens of the batch except the prefix.
        """
        real = x.new_ones(x.shape[:2], dtype=torch.bool) if keep is None else keep.clone()
        real[:, : grid.prefix] = False
        outputs = self._decay_outputs(x, lower_bound)
        return torch.stack([self._mean(output.log_decay, x, real) for output in outputs])

    def _mean(self, log_decay: LogDecay | None, x: Hidden, real: Keep) -> Tensor:
        if log_decay is None:
            return x.new_ones(self.num_heads)
        if log_decay.ndim > 1:
            log_decay = log_decay[real].mean(dim=0)
        return log_decay.exp()

    def _features(self, x: Hidden, angles: RotaryAngles | None) -> Keys:
        """Apply the feature map and the rotation, and repeat a group for each of its heads."""
        x = x.unflatten(-1, (self.config.num_heads, -1))
        x = x if self._maps_in_op else self.feature_map(x)
        if angles is not None:  # by the distance in the mixer's direction
            x = rotated(x, -angles if self.config.direction == "backward" else angles)
        if self.config.state_size is None:
            return x
        return x.repeat_interleave(self.num_heads // self.config.num_heads, dim=2)

    def _mapped(self, x: Keys) -> Keys:
        """Apply the feature map that the op would apply."""
        return self.feature_map(x) if self._maps_in_op else x


def _without_prefix(decay: DecayOutput, prefix: int) -> DecayOutput:
    """Disable input-dependent decays for the prefix.

    A fixed decay per head also applies to the prefix: lambda^|i - j| between any two tokens.
    """
    log_decay = decay.log_decay
    if not prefix or log_decay is None or log_decay.ndim == 1:
        return decay
    before = (0, 0) * (log_decay.ndim - 2) + (prefix, 0)
    return decay._replace(log_decay=F.pad(log_decay[:, prefix:], before))


def _keys(k: Keys | None, key: Tensor | None) -> Keys:
    """Apply the decay's factor to the keys, or return the keys that it provides."""
    if k is None:
        assert key is not None, "a decay that provides keys returned none"
        return key
    return k if key is None else k * key


def _divided_by_row_sum(q: Queries, k: Keys, keep: Keep | None) -> Queries:
    """Return q / sum_j q . k_j, for Y = (Scale(Q K^T) * M) V in row 5 of Table 6."""
    q, k = to_accumulation_dtype(q, k)
    with disable_autocast(q):
        k_sum = k.sum(dim=1) if keep is None else torch.einsum("bthk,bt->bhk", k, keep.to(k.dtype))
        (k_sum,) = sum_over_ranks(k_sum)
        return safe_divide(q, torch.einsum("bthk,bhk->bth", q, k_sum).unsqueeze(-1))


def _per_token(log_decay: LogDecay | None, x: Hidden) -> LogDecay | None:
    if log_decay is None or log_decay.ndim > 1:
        return log_decay
    return log_decay.expand(*x.shape[:2], -1)


RETNET = FixedDecayConfig(init="retnet", learnable=False)

# The linear transformers of LION's Table 1.
# They are bidirectional; direction="forward" gives the causal recurrences, the only form in the
# table. Feature maps are those of the original models, except for the random features of gated RFA.
# Convolutions, output gates and RetNet's rotation are omitted; `conv_size`, `gate` and `rotary` add
# them. Token shifts, RWKV-6's bonus and Mamba's skip connection D x are omitted too. The original
# RWKV-6, which reads the state before decaying it, is `RWKV6MixerConfig`; complete layers of Mamba
# and Mamba-2 are `MambaMixerConfig` and `Mamba2MixerConfig`. Outputs without scaling
# grow with the number of tokens, so they need a norm. All original models apply the decay of the
# reading token ("target"), which is the default for diagonal decays.
LINEAR_TRANSFORMERS: Mapping[str, DirectedMixerConfig] = MappingProxyType(
    {
        "linear_attention": LionMixerConfig(
            feature_map="elu_plus_one", decay=NoDecayConfig(), normalize="none", norm="rms"
        ),
        "linear_attention_scaled": LionMixerConfig(
            feature_map="elu_plus_one", decay=NoDecayConfig()
        ),
        "retnet": LionMixerConfig(
            feature_map="identity", decay=RETNET, normalize="none", norm="rms"
        ),
        "retnet_scaled": LionMixerConfig(decay=RETNET),  # scaling requires positive features
        "gated_rfa": LionMixerConfig(
            feature_map="elu_plus_one",
            decay=SelectiveDecayConfig(couple_key=True),
            decay_at="target",
        ),
        "mamba2": LionMixerConfig(
            feature_map="silu",
            decay=Mamba2DecayConfig(),
            normalize="none",
            decay_at="target",
            norm="rms",
        ),
        "rwkv6": LionMixerConfig(
            feature_map="identity", decay=RWKV6DecayConfig(), normalize="none", norm="rms"
        ),
        "mamba": LionMixerConfig(
            num_heads=1,
            state_size=16,
            feature_map="identity",
            decay=MambaDecayConfig(),
            normalize="none",
            norm="rms",
        ),
        "gla": LionMixerConfig(
            feature_map="identity", decay=GLADecayConfig(), normalize="none", norm="rms"
        ),
        "hgrn2": LionMixerConfig(
            feature_map="silu",
            decay=HGRN2DecayConfig(),
            normalize="none",
            decay_at="target",
            norm="rms",
        ),
        "xlstm": LionMixerConfig(
            feature_map="identity",
            decay=XLSTMDecayConfig(),
            normalize="max_one",
            decay_at="target",
        ),
        "deltanet": DeltaRuleMixerConfig(),
    }
)
