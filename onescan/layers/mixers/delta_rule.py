"""The delta rule: each token overwrites the value stored under its key, in one or both directions.

The configs at the end are Gated DeltaNet, Kimi Delta Attention (KDA) and DeltaProduct.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from onescan.checks import check_choice, check_positive
from onescan.layers.basic import Gate, NormName
from onescan.layers.decays import (
    DecayConfig,
    GatedDeltaNetDecayConfig,
    KDADecayConfig,
    LogDecay,
    NoDecayConfig,
)
from onescan.layers.mixers.linear_attention import (
    ConvSize,
    LinearAttention,
    LinearAttentionConfig,
    ScanOptions,
)
from onescan.ops.delta_rule import DeltaState, Form, delta_rule, read, write
from onescan.ops.feature_maps import FEATURE_MAPS, FeatureMapName
from onescan.ops.numerics import safe_divide, to_accumulation_dtype
from onescan.shapes import (
    Grid,
    Hidden,
    Keys,
    LowerBound,
    Queries,
    UpdateBetas,
    UpdateKeys,
    UpdateValues,
    Values,
)

# Added to the squared norm of queries and keys, which is 0 for a blank patch. Without it, gradients
# of the normalization would explode.
EPS = 1e-6

KeyNorm = Literal["l2", "sum"]


@dataclass(frozen=True, kw_only=True)
class DeltaRuleMixerConfig(LinearAttentionConfig):
    """DeltaNet: a memory in which each token overwrites the value stored under its key.

    All scans share their parameters.
    """

    value_width: int | None = None
    """Value channels per head. None for value_expansion * width / num_heads."""
    value_expansion: int = 1
    """Ratio of all value channels to the width, if value_width is None."""
    updates: int = 1
    """Updates per token, each with its own key, value and beta, as in DeltaProduct."""
    decay: DecayConfig = field(default_factory=NoDecayConfig)
    """Decay of the state before a token's updates, per head or per key channel. Decays that change
    keys are not supported: the delta rule requires normalized keys."""
    feature_map: FeatureMapName = "silu"
    """Activation of queries and keys."""
    qk_norm: KeyNorm = "l2"
    """Divide queries and keys by their L2 norm, or by the sum of their channels, which requires a
    non-negative feature map."""
    value_map: FeatureMapName = "identity"
    """Activation of values; "silu" in flash-linear-attention."""
    beta: bool = True
    """Compute a write strength beta from 0 to 1 per token and head; False sets it to 1."""
    negative_eigenvalues: bool = False
    """Double beta, so that the eigenvalue 1 - beta of an update ranges from -1 to 1, as in
    arXiv:2411.12537."""
    norm: NormName = "rms"
    form: Form = "auto"
    """Algorithm of the op; see `delta_rule`."""
    chunk_size: int = 64
    """Updates per chunk of the chunk form."""

    def value_channels(self, width: int) -> int:
        return self.value_width or self.value_expansion * self.head_width(width)

    def build(self, *, width: int, axes: int) -> "DeltaRuleMixer":
        self.check_shared_fields()
        check_choice("form", self.form, get_args(Form))
        check_choice("feature_map", self.feature_map, FEATURE_MAPS)
        check_choice("value_map", self.value_map, FEATURE_MAPS)
        check_choice("qk_norm", self.qk_norm, get_args(KeyNorm))
        check_positive(updates=self.updates, value_expansion=self.value_expansion)
        if self.decay.changes_keys:
            raise ValueError(
                f"decay is {type(self.decay).__name__}, which changes the keys, expected a decay "
                "that does not, such as GatedDeltaNetDecayConfig"
            )
        return DeltaRuleMixer(self, width)


class DeltaRuleMixer(LinearAttention):
    """The delta rule on q, k = unit(silu(W x)) and beta = sigmoid(W x), then a norm and W_o.

    Optionally, a convolution precedes the activations, the state decays before each token, a token
    has several keys, values and betas, and a gate silu(W x) follows the norm.

    Source: DeltaNet, arXiv:2406.06484; in both directions, LION, arXiv:2502.16249, App. B.7. The
    originals divide queries by the square root of the key width; the norm cancels this factor,
    except for its epsilon.
    """

    def __init__(self, config: DeltaRuleMixerConfig, width: int) -> None:
        key_width, updates = config.key_channels(width), config.updates
        keys, values = (config.num_heads * x for x in (key_width, config.value_channels(width)))
        super().__init__(
            config, width, values=values, qkv_widths=[keys, updates * keys, updates * values]
        )
        self.beta_proj = None
        if config.beta:
            self.beta_proj = nn.Linear(width, updates * config.num_heads, bias=config.bias)
        self.decay = config.decay.build(
            width=width, num_heads=config.num_heads, head_width=key_width
        )
        self.feature_map = FEATURE_MAPS[config.feature_map]
        self.value_map = FEATURE_MAPS[config.value_map]
        self.build_output(width, gate_bias=config.bias)
        self.init_weights()

    def init_weights(self) -> None:
        q, k, v = self.in_proj.weight.split(self.in_widths)[:3]
        self.decay.init_weights(q, k, v)

    def qkv(self, parts: Sequence[Tensor], angles: Any) -> tuple[Queries, UpdateKeys, UpdateValues]:
        """Return queries, keys and values after their activations and norms."""
        heads, updates = self.config.num_heads, self.config.updates
        q, k, v = parts
        q = q.unflatten(-1, (heads, -1))
        k, v = (y.unflatten(-1, (updates * heads, -1)) for y in (k, v))
        k, v = self.normalized(k), self.value_map(v)
        k, v = (y.unflatten(2, (updates, heads)) for y in (k, v))
        return self.normalized(q), k, v

    def decays_of(
        self,
        x: Hidden,
        extra: Sequence[Tensor],
        grid: Grid,
        lower_bound: LowerBound | None,
    ) -> list[Sequence[Tensor | None]]:
        """Return the write strengths and the log-decays, which all scans share."""
        return [(self.beta(x), self.log_decay(x))]

    def scan(
        self,
        q: Queries,
        k: UpdateKeys,
        v: UpdateValues,
        decays: Sequence[Any],
        options: ScanOptions,
    ) -> tuple[Values, Any]:
        config = self.config
        return delta_rule(
            q, k, v, *decays, causal=config.reads_one_side, causal_block=config.causal_block,
            keep=options.keep, cu_seqlens=options.cu_seqlens, state=options.state,
            form=config.form, chunk_size=config.chunk_size, group=options.group,
        )  # fmt: skip

    def write(
        self, k: UpdateKeys, v: UpdateValues, decays: Sequence[Any], options: ScanOptions
    ) -> DeltaState:
        return write(k, v, *decays, keep=options.keep)

    def read(self, q: Queries, state: DeltaState, angles: Any) -> Values:
        return read(q, state)

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
        (y,) = to_accumulation_dtype(self.feature_map(x))  # squares may overflow float16
        if self.config.qk_norm == "sum":
            y = safe_divide(y, y.sum(dim=-1, keepdim=True))
        else:
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

    Source: arXiv:2412.06464. In the paper's models, the keys of all heads have 0.75 times the
    model's width, in 6 heads of 256 at a width of 2048, and the values twice as many channels.
    Here, they have 1 and 2 times the width, unless `key_width` and `value_width` are set.
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

    Source: Kimi Linear, arXiv:2510.26692. Its ranks equal the width of its heads, 128. The
    projections have no biases; in flash-linear-attention, the gate has one.
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

    Each update has its own projections and convolutions of keys and values. For Gated DeltaProduct,
    which decays once per token, set ``decay=GatedDeltaNetDecayConfig()`` and ``gate="silu"``.

    Source: arXiv:2502.10297, with its range of eigenvalues from -1 to 1. The layers of
    flash-linear-attention have the widths of Gated DeltaNet.
    """

    updates: int = 2
    conv_size: ConvSize = "auto"
    value_map: FeatureMapName = "silu"
    negative_eigenvalues: bool = True
    norm_heads: bool = True
