"""LION: linear attention with any decay, in one or both directions, along one or several scans.

`LINEAR_TRANSFORMERS` at the end lists the models of LION's Table 1 as configs of this mixer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from onescan.checks import check_choice, check_positive
from onescan.layers.basic import EPS, Gate, NormName, build_norm
from onescan.layers.convolution import ShortConvolution, Window
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
from onescan.layers.mixers.contract import (
    DirectedMixerConfig,
    Mixer,
    ScanName,
    check_blocks,
    flipped,
    masked,
    rows_where,
)
from onescan.layers.mixers.delta_rule import DeltaRuleMixerConfig
from onescan.layers.mixers.projections import Projections, merged_projections
from onescan.layers.rotary import RotaryAngles, check_rotary, rotary_angles, rotated
from onescan.layers.scans import SnakeScans
from onescan.ops.collectives import sum_over_ranks
from onescan.ops.decay_attention import DecayAt, DecayState, Form, decay_attention
from onescan.ops.feature_maps import FEATURE_MAPS, FeatureMapName
from onescan.ops.gating import gated
from onescan.ops.numerics import (
    disable_autocast,
    is_autocast_enabled,
    safe_divide,
    to_accumulation_dtype,
    to_autocast_dtype,
)
from onescan.ops.packing import Packing
from onescan.ops.parallel import scan_group, sequence_group
from onescan.shapes import Grid, Hidden, Keep, Keys, LowerBound, Position, Queries, Values

MeanDecays = Float[Tensor, "scans H"] | Float[Tensor, "scans H K"]
Normalize = Literal["none", "sum", "max_one", "sum_before_mask"]


@dataclass(frozen=True, kw_only=True)
class LionMixerConfig(DirectedMixerConfig):
    """LION-s by default; other linear attentions with decay by changing fields."""

    state_size: int | None = None
    """Make each channel a separate head with this many key channels, as in Mamba. The channels of
    each of the `num_heads` groups share queries and keys. None for heads of width / num_heads."""
    key_width: int | None = None
    """Query and key channels per head. None for width / num_heads."""
    value_width: int | None = None
    """Value channels per head. None for width / num_heads."""
    causal_block: int | None = None
    """Tokens per block of a blockwise causal mixer: each token reads its own block in both
    directions, and all earlier blocks. For images and video that are generated block by block, such
    as by rows or frames. There is a state after each block, and the convolution is causal. Requires
    direction="both", scan="flat" and a grid without a prefix."""
    conv_size: int | None = None
    """Kernel size of a short convolution of queries, keys and values along each scan, before their
    activations. It reads the current token and those before it. With direction="both", it is
    centered and requires an odd size. None omits it; flash-linear-attention uses 4."""
    conv_bias: bool = False
    """Add a bias to the convolution."""
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
    scan: ScanName = "flat"
    """Scan tokens in row-major order ("flat"), or average one snake scan along each axis
    ("natural")."""
    norm: NormName = "none"
    """Norm of the output, computed over all heads together."""
    norm_heads: bool = False
    """Compute the norm over each head separately, with weights that all heads share."""
    norm_eps: float = EPS
    """Epsilon of the norm of the output."""
    gate: Gate = "none"
    """Activation of an output gate, which multiplies the normalized output."""
    gate_rank: int | None = None
    """Rank of the gate's projection; None is full rank."""
    bias: bool = True
    """Add biases to the projections."""
    form: Form = "auto"
    """Algorithm of the op; see `decay_attention`."""
    chunk_size: int = 64
    """Tokens per chunk of the chunk form."""

    @property
    def is_causal(self) -> bool:
        return self.direction == "forward" and self.scan == "flat"

    @property
    def state_block(self) -> int | None:
        return 1 if self.is_causal else self.causal_block

    @property
    def skips_padding(self) -> bool:
        return not self.rotary and self.causal_block is None

    @property
    def takes_cu_seqlens(self) -> bool:
        takes_scan = self.scan == "flat" and self.direction in ("both", "forward")
        return takes_scan and self.conv_size is None and self.normalize != "sum_before_mask"

    @property
    def prefix_reads_grid(self) -> bool:
        return self.direction != "forward" and self.causal_block is None

    @property
    def reads_lower_bound(self) -> bool:
        return self.decay.reads_lower_bound

    def build(self, *, width: int, axes: int) -> "LionMixer":
        self.check_direction()
        if self.causal_block is not None:
            self.check_causal_block(self.causal_block, self.scan)
        check_choice("feature_map", self.feature_map, FEATURE_MAPS)
        check_choice("value_map", self.value_map, FEATURE_MAPS)
        check_choice("gate", self.gate, get_args(Gate))
        if self.gate_rank is not None:
            check_positive(gate_rank=self.gate_rank)
        check_choice("normalize", self.normalize, get_args(Normalize))
        check_choice("decay_at", self.decay_at, get_args(DecayAt))
        check_choice("scan", self.scan, get_args(ScanName))
        check_choice("form", self.form, get_args(Form))
        check_positive(chunk_size=self.chunk_size, norm_eps=self.norm_eps)
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
        for name in ("state_size", "key_width", "value_width"):
            size = getattr(self, name)
            if size is None:
                continue
            check_positive(**{name: size})
            if isinstance(self.decay, HippoDecayConfig):
                raise ValueError(
                    f"{name} is {size} with decay=HippoDecayConfig, expected None: "
                    "its initialization needs one key channel per value channel"
                )
        if self.state_size is not None and (
            self.key_width is not None or self.value_width is not None or self.norm_heads
        ):
            raise ValueError(
                f"state_size is {self.state_size} with key_width={self.key_width}, "
                f"value_width={self.value_width} and norm_heads={self.norm_heads}, expected None, "
                "None and False"
            )
        return LionMixer(self, width, axes)


class LionState(NamedTuple):
    """State of a causal mixer with a convolution or rotary positions; otherwise a `DecayState`.

    Attributes:
        attention: State of the op.
        window: The last inputs of the convolution, [B, conv_size - 1, channels]; None without one.
        position: Number of tokens seen, without the prefix; None without rotary positions.
    """

    attention: DecayState
    window: Window | None
    position: Position | None


class Scan(NamedTuple):
    """Inputs of one scan.

    Attributes:
        q: Queries.
        k: Keys, multiplied by the decay's factor.
        log_decay: Log of the decay of each token or each head; None disables decay.
        v: Values.
    """

    q: Queries
    k: Keys
    log_decay: LogDecay | None
    v: Values


class LionMixer(Mixer):
    """O = Norm[Scale(phi(Q) phi(K)^T * M) V], then W_o; the mask M is computed from the decay.

    Source: LION, arXiv:2502.16249, Sec. 3.1 and 3.2; directions, App. C.15; natural scans, C.14,
    where masks are averaged before the normalization of Sec. 3.1.
    """

    def __init__(self, config: LionMixerConfig, width: int, axes: int) -> None:
        super().__init__()
        self.config = config
        head_width = config.head_width(width)
        self.key_width, self.num_heads = config.key_width or head_width, config.num_heads
        if config.state_size is not None:
            self.key_width, self.num_heads = config.state_size, width
        keys = config.num_heads * self.key_width
        values = config.num_heads * (config.value_width or head_width)
        self.feature_map = FEATURE_MAPS[config.feature_map]
        self.value_map = FEATURE_MAPS[config.value_map]
        # in_proj computes q, k and v, or q and v if the decay provides keys; then the gate, or at
        # low rank the input of gate_proj
        self.qkv_widths = [keys] * (1 if config.decay.provides_keys else 2) + [values]
        gates = [] if config.gate == "none" else [config.gate_rank or values]
        self.in_widths = self.qkv_widths + gates
        self.in_proj = nn.Linear(width, sum(self.in_widths), bias=config.bias)
        self.conv = None
        if config.conv_size is not None:
            self.conv = ShortConvolution(
                sum(self.qkv_widths), config.conv_size,
                causal=config.direction != "both" or config.causal_block is not None,
                bias=config.conv_bias,
            )  # fmt: skip
        scans = axes if config.scan == "natural" else 1
        sizes = {"width": width, "num_heads": self.num_heads, "head_width": self.key_width}
        self.decays = nn.ModuleList(config.decay.build(**sizes) for _ in range(scans))
        norm_width = values // config.num_heads if config.norm_heads else values
        self.norm = build_norm(config.norm, norm_width, eps=config.norm_eps)
        self.gate_proj = None
        if config.gate != "none" and config.gate_rank is not None:
            self.gate_proj = nn.Linear(config.gate_rank, values, bias=config.bias)
        self.out_proj = nn.Linear(values, width, bias=config.bias)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        q, *k, v = self.in_proj.weight.split(self.in_widths)[: len(self.qkv_widths)]
        for decay in self.decays:
            assert isinstance(decay, Decay)
            decay.init_weights(q, k[0] if k else None, v)

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
        state: DecayState | LionState | None = None,
        lower_bound: LowerBound | None = None,
    ) -> tuple[Hidden, DecayState | LionState | None]:
        if self.config.causal_block is not None:
            check_blocks(self.config.causal_block, grid)
        attention, window, position = self._unpacked(state, grid)
        x = x if keep is None else masked(x, keep)
        u, gate = self.in_proj(x), None
        if self.config.gate != "none":
            u, gate = u.split([sum(self.qkv_widths), self.in_widths[-1]], dim=-1)
        angles = self._angles(u, grid, position)
        decays = [_without_prefix(d, grid.prefix) for d in self._decay_outputs(x, lower_bound)]
        if self.config.scan == "flat":
            u, window = self._convolved(u, keep, window)
            in_op = self._op_maps_features(decays[0])
            scan = _scan(self._qkv(u, angles, mapped=not in_op), decays[0])
            normalize, name = self.config.normalize, self.config.feature_map
            feature_map: FeatureMapName = name if in_op else "identity"
            o, attention = self._attend(scan, keep, attention, normalize, cu_seqlens, feature_map)
        else:
            o = self._attend_naturally(u, angles, decays, grid, keep)
        o = o if self.config.norm_heads else o.flatten(-2)
        o = self.norm(o.to(self._norm_dtype(x, o)))
        o = o.flatten(-2) if self.config.norm_heads else o
        if gate is not None:
            gate = gate if self.gate_proj is None else self.gate_proj(gate)
            o = gated(to_autocast_dtype(o), gate, self.config.gate)  # norms return float32
        o = self.out_proj(o)
        o = o if keep is None else masked(o, keep)
        if attention is None or (self.conv is None and angles is None):
            return o, attention
        seen = None if angles is None else position + self._length(x, grid)
        return o, LionState(attention, window, seen)

    def after_masked(self, before: Any, after: Any, keep: Keep) -> Any:
        """Turn the keys of rows with a masked token by one position; see `Mixer.after_masked`."""
        if not self.config.rotary:
            return after
        kv, k_sum = after.attention
        angles = rotary_angles(
            Grid((2,)), self.key_width, start=0, dtype=kv.dtype, device=kv.device
        )[1]
        moved = DecayState(rotated(kv.mT, angles).mT, rotated(k_sum, angles))
        return after._replace(attention=rows_where(keep, after.attention, moved))

    def _unpacked(
        self, state: Any, grid: Grid
    ) -> tuple[DecayState | None, Window | None, Position]:
        """Return the state of the op, the window and the position of a state."""
        if state is None:
            return None, None, 0
        self.config.check_state(state, grid)
        if self.conv is None and not self.config.rotary:
            self.check_state(state, DecayState, causal=True)
            return state, None, 0
        self.check_state(state, LionState, causal=True)
        position = 0 if state.position is None else state.position  # a tensor in exported programs
        return state.attention, state.window, position

    def _length(self, x: Hidden, grid: Grid) -> Position:
        """Return the number of tokens without the prefix, summed over all ranks."""
        group = sequence_group(None)
        if group is None:
            return x.shape[1] - grid.prefix
        return sum(group.without_prefix().lengths(x[:, grid.prefix :]))

    def _angles(self, u: Hidden, grid: Grid, start: Position) -> RotaryAngles | None:
        if not self.config.rotary:
            return None
        return rotary_angles(grid, self.key_width, start=start, dtype=u.dtype, device=u.device)

    def _convolved(
        self, u: Hidden, keep: Keep | None, window: Window | None = None
    ) -> tuple[Hidden, Window | None]:
        """Convolve queries, keys and values in this mixer's direction along the order of tokens."""
        if self.conv is None:
            return u, None
        if self.config.direction == "backward":
            group = scan_group(backward=True)
            return flipped(self.conv(flipped(u), keep=flipped(keep), group=group)[0]), None
        return self.conv(u, keep=keep, state=window)

    def _op_maps_features(self, decay: DecayOutput) -> bool:
        """Whether the op can apply the feature map, because it is the last step before the op."""
        is_plain = not self.config.rotary and self.config.state_size is None and decay.key is None
        return is_plain and self._divides_by_row_sum

    def _qkv(
        self, u: Hidden, angles: RotaryAngles | None, *, mapped: bool = True
    ) -> tuple[Queries, Keys | None, Values]:
        """Return queries, keys (None if the decay provides them) and values."""
        q, *projected, v = u.split(self.qkv_widths, dim=-1)
        q = self._features(q, angles, mapped=mapped)
        if not self._divides_by_row_sum:  # a division cancels factors of queries
            q = q * self.key_width**-0.5
        k = self._features(projected[0], angles, mapped=mapped) if projected else None
        v = self.value_map(v.unflatten(-1, (self.num_heads, -1)))
        if v.dtype == torch.float16 and not self._divides_by_row_sum:
            (v,) = to_accumulation_dtype(v)  # sums may overflow float16
        return q, k, v

    def _decay_outputs(self, x: Hidden, lower_bound: LowerBound | None) -> list[DecayOutput]:
        """Return the decays of each scan; `lower_bound` is for decays that read it."""
        bound = () if lower_bound is None else (lower_bound,)
        return [decay(x, *bound) for decay in self.decays]

    @property
    def _divides_by_row_sum(self) -> bool:
        """Whether the op divides its outputs by row sums, which makes them means of values."""
        return self.config.normalize == "sum" and self.config.scan == "flat"

    def _norm_dtype(self, x: Hidden, o: Tensor) -> torch.dtype:
        """Return the dtype of the norm's input: that of its weights, or one for `out_proj`."""
        scale = getattr(self.norm, "weight", None)
        if scale is not None:
            return scale.dtype
        return o.dtype if is_autocast_enabled(x) else x.dtype

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
        return torch.stack([self._mean(each.log_decay, x, real) for each in outputs])

    def _mean(self, log_decay: LogDecay | None, x: Hidden, real: Keep) -> Tensor:
        if log_decay is None:
            return x.new_ones(self.num_heads)
        if log_decay.ndim > 1:
            log_decay = log_decay[real].mean(dim=0)
        return log_decay.exp()

    def _attend(
        self,
        scan: Scan,
        keep: Keep | None,
        state: DecayState | None,
        normalize: Normalize,
        cu_seqlens: Packing | None = None,
        feature_map: FeatureMapName = "identity",
    ) -> tuple[Values, DecayState | None]:
        """Attend in this mixer's direction along the order of the tokens."""
        config = self.config
        q, k, log_decay, v = scan
        if normalize == "sum_before_mask":
            q, normalize = _divided_by_row_sum(q, k, keep), "none"
        backward = config.direction == "backward"
        if backward:
            q, k, log_decay, v, keep = map(flipped, (q, k, log_decay, v, keep))
        new_state: Any
        o, new_state = decay_attention(
            q, k, v, log_decay, feature_map=feature_map, causal=config.direction != "both",
            causal_block=config.causal_block, decay_at=config.decay_at, normalize=normalize,
            keep=keep, cu_seqlens=cu_seqlens, state=state, form=config.form,
            chunk_size=config.chunk_size, return_state=config.state_block is not None,
            group=scan_group(backward=backward),
        )  # fmt: skip
        return flipped(o) if backward else o, new_state

    def _attend_naturally(
        self,
        u: Hidden,
        angles: RotaryAngles | None,
        decays: Sequence[DecayOutput],
        grid: Grid,
        keep: Keep | None,
    ) -> Values:
        """Attend along all scans, concatenated along the batch, and average the outputs."""
        if grid.tokens != u.shape[1] or len(grid.shape) != len(decays):
            raise ValueError(
                f"x has {u.shape[1]} tokens and {grid} {grid.tokens} on {len(grid.shape)} axes, "
                f"expected as many, on {len(decays)} axes"
            )
        scans = SnakeScans(grid, u)
        inputs = [(_per_token(d.log_decay, u), d.key, keep) for d in decays]
        if self.conv is None and scans.group is None:  # project once for all scans
            qkv = self._qkv(u, angles)
            q, k, v, log_decay, key, keep = scans.visit([(*qkv, *each) for each in inputs])
            qkv = q, k, v
        else:
            u, log_decay, key, keep = scans.visit([(u, *each) for each in inputs])
            qkv = self._qkv(self._convolved(u, keep)[0], angles)
        q, k, log_decay, v = _scan(qkv, DecayOutput(log_decay, key))
        normalizes = self.config.normalize == "sum"
        if normalizes:  # outputs for values of 1 are the row sums, which are not rounded
            (v,) = to_accumulation_dtype(v)
            v = F.pad(v, (0, 1), value=1.0)
        o, _ = self._attend(Scan(q, k, log_decay, v), keep, state=None, normalize="none")
        o = scans.mean(o)
        if normalizes:
            o = safe_divide(o[..., :-1], o[..., -1:])
        return o

    def _features(self, x: Hidden, angles: RotaryAngles | None, *, mapped: bool) -> Keys:
        """Apply the feature map and the rotation, and repeat a group for each of its heads."""
        x = x.unflatten(-1, (self.config.num_heads, -1))
        x = self.feature_map(x) if mapped else x
        if angles is not None:  # of the distance in this mixer's direction
            x = rotated(x, -angles if self.config.direction == "backward" else angles)
        if self.config.state_size is None:
            return x
        return x.repeat_interleave(self.num_heads // self.config.num_heads, dim=2)


def _without_prefix(decay: DecayOutput, prefix: int) -> DecayOutput:
    """Disable input-dependent decays for the prefix.

    A fixed decay per head also applies to the prefix: lambda^|i - j| between any two tokens.
    """
    log_decay = decay.log_decay
    if not prefix or log_decay is None or log_decay.ndim == 1:
        return decay
    before = (0, 0) * (log_decay.ndim - 2) + (prefix, 0)
    return decay._replace(log_decay=F.pad(log_decay[:, prefix:], before))


def _scan(qkv: tuple[Queries, Keys | None, Values], decay: DecayOutput) -> Scan:
    """Apply the decay's factor to the keys, and convert them to the dtype of the queries."""
    (q, k, v), (log_decay, key) = qkv, decay
    if k is None:
        assert key is not None, "a decay that provides keys returned none"
        k = key
    elif key is not None:
        k = k * key
    return Scan(q, k.to(q.dtype), log_decay, v)


def _divided_by_row_sum(q: Queries, k: Keys, keep: Keep | None) -> Queries:
    """Return q / sum_j q . k_j, for Y = (Scale(Q K^T) * M) V of Table 6's row 5."""
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
# They are bidirectional; direction="forward" gives the causal recurrences, which are the only ones
# in the table. Feature maps are those of the original models, except for the random features of
# gated RFA. Convolutions, output gates and RetNet's rotation are omitted; `conv_size`, `gate` and
# `rotary` add them. Also omitted are token shifts, RWKV-6's bonus and Mamba's skip connection D x.
# The original RWKV-6 reads the state before decaying it; it is `RWKV6MixerConfig`. Outputs without
# scaling grow with the number of tokens, hence the norm. All original models apply the decay of the
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
