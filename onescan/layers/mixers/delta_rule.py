"""The delta rule: each token overwrites the value stored under its key, in one or both directions.

The configs at the end are Gated DeltaNet, Kimi Delta Attention (KDA) and DeltaProduct.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

from onescan.checks import check_choice, check_positive
from onescan.layers.basic import EPS as NORM_EPS
from onescan.layers.basic import Gate, NormName, build_norm
from onescan.layers.convolution import ShortConvolution, Window
from onescan.layers.decays import (
    DecayConfig,
    GatedDeltaNetDecayConfig,
    KDADecayConfig,
    LogDecay,
    NoDecayConfig,
)
from onescan.layers.mixers.contract import (
    DirectedMixerConfig,
    Mixer,
    ScanName,
    check_blocks,
    flipped,
    masked,
)
from onescan.layers.mixers.projections import Projections, merged_projections
from onescan.layers.scans import SnakeScans
from onescan.ops.delta_rule import DeltaState, Form, delta_rule
from onescan.ops.feature_maps import FEATURE_MAPS, FeatureMapName
from onescan.ops.gating import gated
from onescan.ops.numerics import safe_divide
from onescan.ops.packing import Packing
from onescan.ops.parallel import scan_group
from onescan.shapes import (
    Grid,
    Hidden,
    Keep,
    Keys,
    Queries,
    UpdateBetas,
    UpdateKeys,
    UpdateValues,
)

# Vectors shorter than this are treated as zero. The queries and keys of a blank patch have length
# 0, so gradients of their normalization would explode.
EPS = 1e-6

# Sizes of the convolution "auto", which reads 3 neighbors on one side, or on both as in Hydra
CAUSAL_CONV, CENTERED_CONV = 4, 7

KeyNorm = Literal["l2", "sum"]
ConvSize = int | Literal["auto"] | None


@dataclass(frozen=True, kw_only=True)
class DeltaRuleMixerConfig(DirectedMixerConfig):
    """DeltaNet: a memory in which each token overwrites the value stored under its key."""

    key_width: int | None = None
    """Query and key channels per head. None for width / num_heads."""
    value_width: int | None = None
    """Value channels per head. None for value_expansion * width / num_heads."""
    value_expansion: int = 1
    """Value channels divided by the width, if value_width is None."""
    updates: int = 1
    """Updates per token, each with its own key, value and beta, as in DeltaProduct."""
    decay: DecayConfig = field(default_factory=NoDecayConfig)
    """Decay of the state before a token's updates, per head or per key channel. Decays that change
    keys are not supported: the delta rule requires normalized keys."""
    scan: ScanName = "flat"
    """Scan tokens in row-major order ("flat"), or average one snake scan along each axis
    ("natural"). All scans have the same parameters."""
    causal_block: int | None = None
    """Tokens per block of a blockwise causal mixer: each token reads its own block in both
    directions, and all earlier blocks. For images and video that are generated block by block, such
    as by rows or frames. There is a state after each block, and the convolution is causal. Requires
    direction="both", scan="flat" and a grid without a prefix."""
    conv_size: ConvSize = None
    """Kernel size of a short convolution of queries, keys and values, before their activations. It
    reads the current token and those before it in the mixer's direction. With direction="both", it
    is centered and requires an odd size. None omits it; "auto" is the 4 of DeltaNet, or 7 with
    direction="both"."""
    conv_bias: bool = False
    """Add a bias to the convolution."""
    feature_map: FeatureMapName = "silu"
    """Activation of queries and keys."""
    qk_norm: KeyNorm = "l2"
    """Divide queries and keys by their L2 norm, or by the sum of their channels, which requires a
    feature map without negative values."""
    value_map: FeatureMapName = "identity"
    """Activation of values; "silu" in flash-linear-attention."""
    beta: bool = True
    """Compute a write strength beta from 0 to 1 per token and head; False sets it to 1."""
    negative_eigenvalues: bool = False
    """Double beta, so that the eigenvalue 1 - beta of an update ranges from -1 to 1, as in
    arXiv:2411.12537."""
    norm: NormName = "rms"
    """Norm of the output, computed over all heads together."""
    norm_heads: bool = False
    """Compute the norm over each head separately, with weights that all heads share."""
    norm_eps: float = NORM_EPS
    """Epsilon of the norm of the output."""
    gate: Gate = "none"
    """Activation of an output gate, which multiplies the normalized output."""
    gate_rank: int | None = None
    """Rank of the gate's projection; None is full rank."""
    bias: bool = False
    """Add biases to the projections."""
    form: Form = "auto"
    """Algorithm of the op; see `delta_rule`."""
    chunk_size: int = 64
    """Updates per chunk of the chunk form."""

    @property
    def is_causal(self) -> bool:
        return self.direction == "forward" and self.scan == "flat"

    @property
    def state_block(self) -> int | None:
        return 1 if self.is_causal else self.causal_block

    @property
    def skips_padding(self) -> bool:
        return self.causal_block is None

    @property
    def takes_cu_seqlens(self) -> bool:
        takes_scan = self.scan == "flat" and self.direction in ("both", "forward")
        return takes_scan and self.conv_size is None

    @property
    def prefix_reads_grid(self) -> bool:
        return self.direction != "forward" and self.causal_block is None

    def build(self, *, width: int, axes: int) -> "DeltaRuleMixer":
        self.check_direction()
        if self.causal_block is not None:
            self.check_causal_block(self.causal_block, self.scan)
        check_choice("form", self.form, get_args(Form))
        check_choice("feature_map", self.feature_map, FEATURE_MAPS)
        check_choice("value_map", self.value_map, FEATURE_MAPS)
        check_choice("qk_norm", self.qk_norm, get_args(KeyNorm))
        check_choice("gate", self.gate, get_args(Gate))
        check_choice("scan", self.scan, get_args(ScanName))
        check_positive(chunk_size=self.chunk_size, norm_eps=self.norm_eps, updates=self.updates)
        check_positive(value_expansion=self.value_expansion)
        for name in ("key_width", "value_width", "gate_rank"):
            if (size := getattr(self, name)) is not None:
                check_positive(**{name: size})
        if self.decay.changes_keys:
            raise ValueError(
                f"decay is {type(self.decay).__name__}, which changes the keys, expected a decay "
                "that does not, such as GatedDeltaNetDecayConfig"
            )
        return DeltaRuleMixer(self, width)


class DeltaRuleState(NamedTuple):
    """State of a causal mixer with a convolution; otherwise a `DeltaState`.

    Attributes:
        attention: State of the op.
        window: The last inputs of the convolution, [B, conv_size - 1, channels].
    """

    attention: DeltaState
    window: Window


class DeltaRuleMixer(Mixer):
    """The delta rule on q, k = unit(silu(W x)) and beta = sigmoid(W x), then a norm and W_o.

    Optionally, a convolution precedes the activations, the state decays before each token, a token
    has several keys, values and betas, and a gate silu(W x) follows the norm.

    Source: DeltaNet, arXiv:2406.06484; in both directions, LION, arXiv:2502.16249, App. B.7. The
    originals divide queries by the square root of the key width; the norm cancels this factor,
    except for its epsilon.
    """

    def __init__(self, config: DeltaRuleMixerConfig, width: int) -> None:
        super().__init__()
        self.config = config
        key_width = config.key_width or config.head_width(width)
        value_width = config.value_width or config.value_expansion * config.head_width(width)
        keys, values = config.num_heads * key_width, config.num_heads * value_width
        self.qkv_widths = [keys, config.updates * keys, config.updates * values]
        # in_proj computes q, k and v; then the gate, or at low rank the input of gate_proj
        gates = [] if config.gate == "none" else [config.gate_rank or values]
        self.in_widths = self.qkv_widths + gates
        self.in_proj = nn.Linear(width, sum(self.in_widths), bias=config.bias)
        self.conv, size = None, config.conv_size
        causal = config.direction != "both" or config.causal_block is not None
        if size is not None:
            size = (CAUSAL_CONV if causal else CENTERED_CONV) if size == "auto" else size
            self.conv = ShortConvolution(
                sum(self.qkv_widths), size, causal=causal, bias=config.conv_bias
            )
        self.beta_proj = None
        if config.beta:
            betas = config.updates * config.num_heads
            self.beta_proj = nn.Linear(width, betas, bias=config.bias)
        self.decay = config.decay.build(
            width=width, num_heads=config.num_heads, head_width=key_width
        )
        self.feature_map = FEATURE_MAPS[config.feature_map]
        self.value_map = FEATURE_MAPS[config.value_map]
        norm_width = values // config.num_heads if config.norm_heads else values
        self.norm = build_norm(config.norm, norm_width, eps=config.norm_eps)
        self.gate_proj = None
        if config.gate != "none" and config.gate_rank is not None:
            self.gate_proj = nn.Linear(config.gate_rank, values, bias=config.bias)
        self.out_proj = nn.Linear(values, width, bias=config.bias)
        self.init_weights()

    def init_weights(self) -> None:
        q, k, v = self.in_proj.weight.split(self.in_widths)[:3]
        self.decay.init_weights(q, k, v)

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
        state: DeltaState | DeltaRuleState | None = None,
    ) -> tuple[Hidden, DeltaState | DeltaRuleState | None]:
        config, backward = self.config, self.config.direction == "backward"
        if config.causal_block is not None:
            check_blocks(config.causal_block, grid)
        attention, window = self._unpacked(state, grid)
        x = masked(x, keep)
        u, gate = self.in_proj(x), None
        if config.gate != "none":
            u, gate = u.split([sum(self.qkv_widths), self.in_widths[-1]], dim=-1)
        inputs: Any = (u, self.beta(x), self.log_decay(x), keep)
        scans = SnakeScans(grid, x) if config.scan == "natural" else None
        if scans is not None:
            inputs = scans.visit([inputs] * len(scans.orders))
        u, beta, log_decay, real = map(flipped, inputs) if backward else inputs
        group = scan_group(backward=backward)
        if self.conv is not None:
            u, window = self.conv(u, keep=real, state=window, group=group)
        q, k, v = self.heads(u)
        new_state: Any
        o, new_state = delta_rule(
            q, k, v, beta, log_decay,
            causal=config.direction != "both", causal_block=config.causal_block, keep=real,
            cu_seqlens=cu_seqlens, state=attention, form=config.form, chunk_size=config.chunk_size,
            group=group,
        )  # fmt: skip
        o = flipped(o) if backward else o
        if scans is not None:
            o = scans.mean(o)
        o = self.norm(o).flatten(-2) if config.norm_heads else self.norm(o.flatten(-2))
        if gate is not None:
            gate = gate if self.gate_proj is None else self.gate_proj(gate)
            o = gated(o, gate, config.gate)
        o = masked(self.out_proj(o), keep)
        if config.state_block is None:
            return o, None
        return o, new_state if window is None else DeltaRuleState(new_state, window)

    def _unpacked(self, state: Any, grid: Grid) -> tuple[DeltaState | None, Window | None]:
        """Return the state of the op and the window of a state."""
        if state is None:
            return None, None
        self.config.check_state(state, grid)
        if self.conv is None:
            self.check_state(state, DeltaState, causal=True)
            return state, None
        self.check_state(state, DeltaRuleState, causal=True)
        return state.attention, state.window

    def heads(self, u: Hidden) -> tuple[Queries, UpdateKeys, UpdateValues]:
        """Return queries, keys and values after their activations and norms."""
        config = self.config
        q, k, v = u.split(self.qkv_widths, dim=-1)
        q = q.unflatten(-1, (config.num_heads, -1))
        k, v = (y.unflatten(-1, (config.updates * config.num_heads, -1)) for y in (k, v))
        k, v = self.normalized(k), self.value_map(v)
        k, v = (y.unflatten(2, (config.updates, config.num_heads)) for y in (k, v))
        return self.normalized(q), k, v

    def beta(self, x: Hidden) -> UpdateBetas:
        """Compute the write strength of each update."""
        config = self.config
        if self.beta_proj is None:
            beta = x.new_ones(*x.shape[:2], config.updates, config.num_heads)
        else:
            beta = self.beta_proj(x).sigmoid().unflatten(-1, (config.updates, -1))
        return 2 * beta if config.negative_eigenvalues else beta

    def log_decay(self, x: Hidden) -> LogDecay | None:
        """Compute the log of the decay before each token; None without decay."""
        log_decay = self.decay(x).log_decay
        if log_decay is None or log_decay.ndim > 1:
            return log_decay
        return log_decay.expand(*x.shape[:2], -1)

    def normalized(self, x: Keys) -> Keys:
        """Apply the activation of queries and keys, and normalize each vector. Keeps the dtype."""
        y = self.feature_map(x)
        if self.config.qk_norm == "sum":
            y = safe_divide(y, y.sum(dim=-1, keepdim=True))
        else:  # under autocast, the sum is in float32
            y = y * torch.rsqrt(y.square().sum(dim=-1, keepdim=True) + EPS)
        return y.to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetMixerConfig(DeltaRuleMixerConfig):
    """Gated DeltaNet: the delta rule with a decay per head and an output gate.

        S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
        g_t = -exp(log_rate) softplus(W_g x_t + b),  beta_t = sigmoid(W_beta x_t)
        y_t = W_o [RMSNorm(S_t^T q_t) * silu(W_z x_t)]

    Queries and keys are L2-normalized. They and the values first pass through a convolution and
    SiLU. The norm is per head, with weights that all heads share.

    Source: arXiv:2412.06464. In its models, all keys together have 0.75 times the model's width, in
    6 heads of 256 at a width of 2048, and all values twice as many channels. Here, they have 1 and
    2 times the width, unless `key_width` and `value_width` are set.
    """

    value_expansion: int = 2
    decay: DecayConfig = field(default_factory=GatedDeltaNetDecayConfig)
    conv_size: ConvSize = "auto"
    value_map: FeatureMapName = "silu"
    norm_heads: bool = True
    gate: Gate = "silu"


@dataclass(frozen=True, kw_only=True)
class KDAMixerConfig(DeltaRuleMixerConfig):
    """Kimi Delta Attention (KDA): the delta rule with a decay per key channel and an output gate.

        S_t = (I - beta_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T
        g_t = -exp(log_rate) softplus(W_2 W_1 x_t + b),  beta_t = sigmoid(W_beta x_t)
        y_t = W_o [RMSNorm(S_t^T q_t) * sigmoid(W_4 W_3 x_t)]

    Other parts are as in `GatedDeltaNetMixerConfig`.

    Source: Kimi Linear, arXiv:2510.26692. Its ranks equal the width of its heads, 128. All
    projections are without biases; in flash-linear-attention, the gate has one.
    """

    decay: DecayConfig = field(default_factory=KDADecayConfig)
    conv_size: ConvSize = "auto"
    value_map: FeatureMapName = "silu"
    norm_heads: bool = True
    gate: Gate = "sigmoid"
    gate_rank: int | None = 128


@dataclass(frozen=True, kw_only=True)
class DeltaProductMixerConfig(DeltaRuleMixerConfig):
    """DeltaProduct: DeltaNet with several updates per token.

        S_{t,r} = (I - beta_tr k_tr k_tr^T) S_{t,r-1} + beta_tr k_tr v_tr^T,  r = 1, ..., updates
        beta_tr = 2 sigmoid(W_r x_t)

    Each update has its own projections and convolutions of keys and values. Gated DeltaProduct is
    this with ``decay=GatedDeltaNetDecayConfig()`` and ``gate="silu"``; it decays once per token.

    Source: arXiv:2502.10297, with its range of eigenvalues from -1 to 1. The layers of
    flash-linear-attention have the widths of Gated DeltaNet.
    """

    updates: int = 2
    conv_size: ConvSize = "auto"
    value_map: FeatureMapName = "silu"
    negative_eigenvalues: bool = True
    norm_heads: bool = True
