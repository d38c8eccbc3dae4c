"""DeltaNet: each token overwrites the value stored under its key, in one direction or both."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

from onescan.checks import check_choice, check_positive
from onescan.layers.basic import EPS as NORM_EPS
from onescan.layers.basic import Gate, NormName, build_norm
from onescan.layers.convolution import ShortConvolution, Window
from onescan.layers.mixers.contract import DirectedMixerConfig, Mixer, flipped, masked
from onescan.layers.mixers.projections import Projections, merged_projections
from onescan.ops.delta_rule import DeltaState, Form, delta_rule
from onescan.ops.feature_maps import FEATURE_MAPS, FeatureMapName
from onescan.ops.gating import gated
from onescan.ops.numerics import safe_divide
from onescan.ops.packing import Packing
from onescan.shapes import Betas, Grid, Hidden, Keep, Keys

# Vectors shorter than this are treated as zero. The queries and keys of a blank patch have length
# 0, so gradients of their normalization would explode.
EPS = 1e-6

KeyNorm = Literal["l2", "sum"]


@dataclass(frozen=True, kw_only=True)
class DeltaRuleMixerConfig(DirectedMixerConfig):
    """DeltaNet: a memory in which each token overwrites the value stored under its key."""

    key_width: int | None = None
    """Query and key channels per head. None for width / num_heads."""
    value_width: int | None = None
    """Value channels per head. None for width / num_heads."""
    conv_size: int | None = None
    """Kernel size of a short convolution of queries, keys and values, before their activations. It
    reads the current token and those before it in the mixer's direction. With direction="both", it
    is centered and requires an odd size. None omits it; DeltaNet uses 4."""
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
    """Double beta, so that the eigenvalue 1 - beta of the transition ranges from -1 to 1, as in
    arXiv:2411.12537."""
    norm: NormName = "rms"
    """Norm of the output, computed over all heads together."""
    norm_heads: bool = False
    """Compute the norm over each head separately, with weights that all heads share."""
    norm_eps: float = NORM_EPS
    """Epsilon of the norm of the output."""
    gate: Gate = "none"
    """Activation of an output gate, which multiplies the normalized output."""
    bias: bool = False
    """Add biases to the projections."""
    form: Form = "auto"
    """Algorithm of the op; see `delta_rule`."""
    chunk_size: int = 64
    """Tokens per chunk of the chunk form."""

    @property
    def takes_cu_seqlens(self) -> bool:
        return self.conv_size is None and self.direction in ("both", "forward")

    def build(self, *, width: int, axes: int) -> "DeltaRuleMixer":
        self.check_direction()
        check_choice("form", self.form, get_args(Form))
        check_choice("feature_map", self.feature_map, FEATURE_MAPS)
        check_choice("value_map", self.value_map, FEATURE_MAPS)
        check_choice("qk_norm", self.qk_norm, get_args(KeyNorm))
        check_choice("gate", self.gate, get_args(Gate))
        check_positive(chunk_size=self.chunk_size, norm_eps=self.norm_eps)
        for name in ("key_width", "value_width"):
            if (size := getattr(self, name)) is not None:
                check_positive(**{name: size})
        self.head_width(width)  # raises if num_heads does not divide the width
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

    Optionally, a convolution precedes the activations, and a gate silu(W x) follows the norm.

    Source: DeltaNet, arXiv:2406.06484; in both directions, LION, arXiv:2502.16249, App. B.7.
    """

    def __init__(self, config: DeltaRuleMixerConfig, width: int) -> None:
        super().__init__()
        self.config = config
        head_width = config.head_width(width)
        keys, values = (
            config.num_heads * (size or head_width)
            for size in (config.key_width, config.value_width)
        )
        self.qkv_widths = [keys, keys, values]
        self.in_widths = self.qkv_widths + [values] * (config.gate != "none")
        self.in_proj = nn.Linear(width, sum(self.in_widths), bias=config.bias)
        self.conv = None
        if config.conv_size is not None:
            self.conv = ShortConvolution(
                sum(self.qkv_widths), config.conv_size,
                causal=config.direction != "both", bias=config.conv_bias,
            )  # fmt: skip
        self.beta_proj = None
        if config.beta:
            self.beta_proj = nn.Linear(width, config.num_heads, bias=config.bias)
        self.feature_map = FEATURE_MAPS[config.feature_map]
        self.value_map = FEATURE_MAPS[config.value_map]
        norm_width = values // config.num_heads if config.norm_heads else values
        self.norm = build_norm(config.norm, norm_width, eps=config.norm_eps)
        self.out_proj = nn.Linear(values, width, bias=config.bias)

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
        attention, window = self._unpacked(state, grid)
        x = masked(x, keep)
        u, gate = self.in_proj(x), None
        if config.gate != "none":
            u, gate = u.split([sum(self.qkv_widths), self.in_widths[-1]], dim=-1)
        inputs = (u, self.beta(x), keep)
        u, beta, real = map(flipped, inputs) if backward else inputs
        if self.conv is not None:
            u, window = self.conv(u, keep=real, state=window)
        q, k, v = (
            y.unflatten(-1, (config.num_heads, -1)) for y in u.split(self.qkv_widths, dim=-1)
        )
        new_state: Any
        o, new_state = delta_rule(
            self.normalized(q), self.normalized(k), self.value_map(v), beta,
            causal=config.direction != "both", keep=real, cu_seqlens=cu_seqlens,
            state=attention, form=config.form, chunk_size=config.chunk_size,
        )  # fmt: skip
        o = flipped(o) if backward else o
        o = self.norm(o).flatten(-2) if config.norm_heads else self.norm(o.flatten(-2))
        if gate is not None:
            o = gated(o, gate, config.gate)
        o = masked(self.out_proj(o), keep)
        if not config.is_causal:
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

    def beta(self, x: Hidden) -> Betas:
        """Compute the write strength of each token."""
        config = self.config
        if self.beta_proj is None:
            beta = x.new_ones(*x.shape[:2], config.num_heads)
        else:
            beta = torch.sigmoid(self.beta_proj(x))
        return 2 * beta if config.negative_eigenvalues else beta

    def normalized(self, x: Keys) -> Keys:
        """Apply the activation of queries and keys, and normalize each vector. Keeps the dtype."""
        y = self.feature_map(x)
        if self.config.qk_norm == "sum":
            y = safe_divide(y, y.sum(dim=-1, keepdim=True))
        else:  # under autocast, the sum is in float32
            y = y * torch.rsqrt(y.square().sum(dim=-1, keepdim=True) + EPS)
        return y.to(x.dtype)
