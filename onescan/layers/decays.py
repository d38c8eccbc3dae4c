"""Decays of linear attention: how fast the state forgets, as a function of each token.

Each decay has a config, a module that computes it, and an entry in `DECAYS` at the end. Constant
decays come first, then input-dependent decays per head, then decays per key channel.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from onescan.checks import check_choice, check_positive
from onescan.ops.numerics import disable_autocast, to_accumulation_dtype
from onescan.shapes import Hidden, LowerBound

# exp(-exp(5)) is already 0 in float32, and exp of a much larger number would be infinite
MAX_LOG_RATE = 5.0
MIN_RATE = 1e-30  # zero-order hold divides by the rate
GLA_TEMPERATURE = 16
XLSTM_INPUT_CAP = 15.0
HALF = 0.5  # log(lambda) is computed from 1 - lambda if that is smaller
HIPPO_STD = 0.1  # standard deviation of initial weights; LION, App. C.2

LogDecay = Float[Tensor, " H"] | Float[Tensor, "B T H"] | Float[Tensor, "B T H K"]
Weight = Float[Tensor, "_ D"]


class DecayOutput(NamedTuple):
    """Output of a decay module.

    Attributes:
        log_decay: Log of the decay factor, as in `decay_attention`: at most 0, one per head, per
            token and head, or per token and key channel. None disables decay.
        key: Factor of the keys, [B, T, H, 1 or K], or the keys themselves if the decay
            `provides_keys`. None for a factor of 1.
    """

    log_decay: LogDecay | None
    key: Float[Tensor, "B T H _"] | None = None


@dataclass(frozen=True, kw_only=True)
class DecayConfig(ABC):
    """Base class of the configs of decays."""

    provides_keys: ClassVar[bool] = False
    """Whether the decay computes the keys, in place of the mixer's projection."""

    @property
    def reads_lower_bound(self) -> bool:
        """Whether the decay's forward takes `lower_bound`, which models learn for each block."""
        return False

    @property
    def changes_keys(self) -> bool:
        """Whether the decay computes, multiplies or initializes keys, which delta rules forbid."""
        return self.provides_keys

    @abstractmethod
    def build(self, *, width: int, num_heads: int, head_width: int) -> "Decay":
        """Build the module for tokens of this width and heads of `head_width` key channels.

        Raises:
            ValueError: If a field is out of range.
        """


class Decay(nn.Module, ABC):
    """Compute the decay of each token, from that token only, in float32 or wider.

    Call projections as modules, so that LoRA, quantization and offloading work. A replaced
    projection may return bfloat16, so convert its output to float32 before use.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    @abstractmethod
    def forward(self, x: Hidden) -> DecayOutput:
        """Compute the decay of each token, and a factor or replacement of its key."""

    def init_weights(self, q: Weight, k: Weight | None, v: Weight) -> None:
        """Initialize weights for which the model's default initialization is unsuitable.

        Args:
            q: Rows of the mixer's projection that compute queries, a view to modify in place.
            k: Rows that compute keys; None if the decay `provides_keys`.
            v: Rows that compute values.
        """

    def _heads(self, x: Hidden) -> Float[Tensor, "B T H _"]:
        return x.unflatten(-1, (self.num_heads, -1))


class FP32Linear(nn.Linear):
    """Linear layer that computes in float32 or wider, even under autocast or with bfloat16 weights.

    Decays are multiplied over all tokens, so rounding errors in their logits grow with the length.
    """

    def forward(self, x: Hidden) -> Float[Tensor, "B T _"]:
        with disable_autocast(x):
            x, weight = to_accumulation_dtype(x, self.weight)
            return F.linear(x, weight, None if self.bias is None else self.bias.to(x.dtype))


def small_linear(width: int, out: int, *, bias: bool, std: float = 0.02) -> FP32Linear:
    """Build a layer with small random weights, as in LION's gates, and zero bias."""
    linear = FP32Linear(width, out, bias=bias)
    nn.init.trunc_normal_(linear.weight, std=std)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


def _wide(x: Tensor) -> Tensor:
    (x,) = to_accumulation_dtype(x)
    return x


def _rates(log_rate: Tensor) -> Tensor:
    return log_rate.clamp(max=MAX_LOG_RATE).exp()


def _dt_bias(count: int) -> nn.Parameter:
    """Return biases whose softplus is log-uniform between 0.001 and 0.1, as in Mamba."""
    dt = torch.empty(count).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    return nn.Parameter(dt.expm1().log())


@dataclass(frozen=True, kw_only=True)
class NoDecayConfig(DecayConfig):
    """No decay: linear attention (LION-lit)."""

    def build(self, *, width: int, num_heads: int, head_width: int) -> "NoDecay":
        return NoDecay(num_heads)


class NoDecay(Decay):
    """lambda = 1."""

    def forward(self, x: Hidden) -> DecayOutput:
        return DecayOutput(None)


def retnet_logits(num_heads: int) -> Float[Tensor, " H"]:
    """Return the logits of RetNet's decays, 1 - 2^(-5 - head), in float64."""
    return (2.0 ** (5 + torch.arange(num_heads, dtype=torch.float64)) - 1).log()


FixedInit = Literal["normal", "retnet"]


@dataclass(frozen=True, kw_only=True)
class FixedDecayConfig(DecayConfig):
    """One decay per head, the same for every token (LION-d, RetNet)."""

    init: FixedInit = "normal"
    """Initial values: sigmoid of a normal draw (LION-d), or 1 - 2^(-5 - head) (RetNet)."""
    learnable: bool = True
    """Train the decay; False keeps the initial values."""

    def build(self, *, width: int, num_heads: int, head_width: int) -> "FixedDecay":
        check_choice("decay.init", self.init, get_args(FixedInit))
        return FixedDecay(self, num_heads)


class FixedDecay(Decay):
    """lambda = sigmoid(a), with one a per head.

    Source: LION, arXiv:2502.16249, Sec. 3.2; RetNet, arXiv:2307.08621.
    """

    logit: Tensor

    def __init__(self, config: FixedDecayConfig, num_heads: int) -> None:
        super().__init__(num_heads)
        logit = torch.randn(num_heads)
        if config.init == "retnet":
            logit = retnet_logits(num_heads).float()
        if config.learnable:
            self.logit = nn.Parameter(logit)
        else:
            self.register_buffer("logit", logit)

    def forward(self, x: Hidden) -> DecayOutput:
        return DecayOutput(F.logsigmoid(_wide(self.logit)))


@dataclass(frozen=True, kw_only=True)
class SelectiveDecayConfig(DecayConfig):
    """An input-dependent decay (LION-s, gated RFA)."""

    diagonal: bool = False
    """One decay per key channel, instead of one per head."""
    couple_key: bool = False
    """Multiply the key by 1 - decay, so that new inputs replace forgotten ones."""
    initial_decay: float = 0.5
    """Decay at initialization, between 0 and 1, for an input of zero. With LION's 0.5, a token
    initially reads few others; close to 1, it reads all of them, as in softmax attention."""

    @property
    def changes_keys(self) -> bool:
        return self.couple_key

    def build(self, *, width: int, num_heads: int, head_width: int) -> "SelectiveDecay":
        if not 0 < self.initial_decay < 1:
            raise ValueError(
                f"decay.initial_decay is {self.initial_decay}, expected between 0 and 1"
            )
        return SelectiveDecay(self, width, num_heads, head_width)


class SelectiveDecay(Decay):
    """lambda = sigmoid(W x + b); coupled keys are multiplied by 1 - lambda = sigmoid(-W x - b).

    With coupled keys and decay_at="target", LION-s is the zero-order hold of the continuous system
    S' = -S + k v^T, whose input is constant during a time step of -log lambda:

        S_i = lambda_i S_{i-1} + (1 - lambda_i) k_i v_i^T

    Source: LION, arXiv:2502.16249, Sec. 3.2; with coupled keys, App. B.11 and, for gated RFA,
    Eq. 199. App. B.11 prints A = I and a time step of log lambda, which is negative, so the factor
    of its Eq. 243 and 244 is lambda - 1; the sign cancels in the quotient of LION-s. The factor is
    missing in Eq. 5 and 79. The signs of Eq. 232 to 234 are misprints.
    """

    def __init__(
        self, config: SelectiveDecayConfig, width: int, num_heads: int, head_width: int
    ) -> None:
        super().__init__(num_heads)
        self.config = config
        self.proj = small_linear(
            width, num_heads * (head_width if config.diagonal else 1), bias=True
        )

    @torch.no_grad()
    def init_weights(self, q: Weight, k: Weight | None, v: Weight) -> None:
        del q, k, v
        decay = self.config.initial_decay
        nn.init.constant_(self.proj.bias, math.log(decay / (1 - decay)))

    def forward(self, x: Hidden) -> DecayOutput:
        z = self._heads(_wide(self.proj(x)))
        log_decay = F.logsigmoid(z)
        # sigmoid(-z) is more accurate than 1 - sigmoid(z)
        key = torch.sigmoid(-z) if self.config.couple_key else None
        return DecayOutput(log_decay if self.config.diagonal else log_decay.squeeze(-1), key)


@dataclass(frozen=True, kw_only=True)
class Mamba2DecayConfig(DecayConfig):
    """An input-dependent step size times a rate per head (Mamba-2)."""

    @property
    def changes_keys(self) -> bool:
        return True

    def build(self, *, width: int, num_heads: int, head_width: int) -> "Mamba2Decay":
        return Mamba2Decay(width, num_heads)


class Mamba2Decay(Decay):
    """dt = softplus(W x + b), lambda = exp(-exp(log_rate) dt); dt multiplies the key.

    Source: Mamba-2, arXiv:2405.21060, with its initial values: dt from 0.001 to 0.1, rates from 1
    to 16. LION prints lambda = softplus(W x), which is a misprint, as it exceeds 1.

    With several directions, as in Hydra, each has its own W and shares the other parameters; the
    heads of all directions are concatenated.
    """

    def __init__(self, width: int, num_heads: int, *, directions: int = 1) -> None:
        super().__init__(num_heads)
        dt_bias = _dt_bias(num_heads)
        self.proj = small_linear(width, directions * num_heads, bias=False)
        self.dt_bias = dt_bias
        self.log_rate = nn.Parameter(torch.empty(num_heads).uniform_(1, 16).log())

    def forward(self, x: Hidden) -> DecayOutput:
        z = _wide(self.proj(x)).unflatten(-1, (-1, self.num_heads))  # B T directions H
        dt = F.softplus(z + self.dt_bias.to(z.dtype))
        log_decay = -_rates(self.log_rate.to(z.dtype)) * dt
        return DecayOutput(log_decay.flatten(2), dt.flatten(2).unsqueeze(-1))


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetDecayConfig(DecayConfig):
    """The decay of Mamba-2, which does not multiply the key (Gated DeltaNet)."""

    def build(self, *, width: int, num_heads: int, head_width: int) -> "GatedDeltaNetDecay":
        return GatedDeltaNetDecay(width, num_heads)


class GatedDeltaNetDecay(Mamba2Decay):
    """lambda = exp(-exp(log_rate) softplus(W x + b)), with Mamba-2's initial values.

    Source: Gated DeltaNet, arXiv:2412.06464. A separate beta scales the update instead of the key.
    flash-linear-attention draws initial rates from 0 to 16 instead of 1 to 16.
    """

    def forward(self, x: Hidden) -> DecayOutput:
        return DecayOutput(super().forward(x).log_decay)


@dataclass(frozen=True, kw_only=True)
class XLSTMDecayConfig(DecayConfig):
    """An input-dependent forget gate and exponential input gate (xLSTM)."""

    @property
    def changes_keys(self) -> bool:
        return True

    def build(self, *, width: int, num_heads: int, head_width: int) -> "XLSTMDecay":
        return XLSTMDecay(width, num_heads)


class XLSTMDecay(Decay):
    """lambda = sigmoid(W_f x + b_f); exp(cap(W_i x + b_i)) multiplies the key.

    Source: xLSTM, arXiv:2405.04517. cap(z) = 15 tanh(z / 15), as in xLSTM 7B, arXiv:2503.13427, so
    that the exponential cannot overflow and needs no running maximum. The biases of forget gates
    are initialized from 3 to 6 over the heads.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(num_heads)
        self.forget_proj = small_linear(width, num_heads, bias=False)
        self.input_proj = small_linear(width, num_heads, bias=True)
        self.forget_bias = nn.Parameter(torch.linspace(3, 6, num_heads))

    def forward(self, x: Hidden) -> DecayOutput:
        forget, input_gate = to_accumulation_dtype(self.forget_proj(x), self.input_proj(x))
        input_gate = XLSTM_INPUT_CAP * torch.tanh(input_gate / XLSTM_INPUT_CAP)
        log_decay = F.logsigmoid(forget + self.forget_bias.to(forget.dtype))
        return DecayOutput(log_decay, input_gate.exp().unsqueeze(-1))


@dataclass(frozen=True, kw_only=True)
class MambaDecayConfig(DecayConfig):
    """Mamba's decay: an input-dependent step size per head times a rate per key channel.

    For Mamba itself, make each channel a separate head with `LionMixerConfig.state_size`.
    """

    rank: int | None = None
    """Rank of the projection to step sizes. None for width / 16, rounded up."""

    @property
    def changes_keys(self) -> bool:
        return True

    def build(self, *, width: int, num_heads: int, head_width: int) -> "MambaDecay":
        rank = math.ceil(width / 16) if self.rank is None else self.rank
        check_positive(**{"decay.rank": rank})
        return MambaDecay(width, num_heads, head_width, rank)


class MambaDecay(Decay):
    """dt = softplus(W_2 W_1 x + b), lambda = exp(-exp(log_rate) dt); dt multiplies the key.

    Source: Mamba, arXiv:2312.00752, Sec. 3.2 and Algorithm 2. As in Mamba, A is discretized by
    zero-order hold and B by Euler's rule. Rates are initialized from 1 to N over the key channels
    (A = -rate), and step sizes between 0.001 and 0.1, uniformly in their logarithm.
    """

    no_weight_decay = frozenset({"log_rate"})

    def __init__(self, width: int, num_heads: int, head_width: int, rank: int) -> None:
        super().__init__(num_heads)
        self.down_proj = FP32Linear(width, rank, bias=False)
        self.up_proj = small_linear(rank, num_heads, bias=False)
        self.dt_bias = _dt_bias(num_heads)
        rates = torch.arange(1, head_width + 1).log()
        self.log_rate = nn.Parameter(rates.repeat(num_heads, 1))  # H K

    def forward(self, x: Hidden) -> DecayOutput:
        z = _wide(self.up_proj(self.down_proj(x)))
        dt = F.softplus(z + self.dt_bias.to(z.dtype)).unsqueeze(-1)  # B T H 1
        return DecayOutput(-_rates(self.log_rate.to(z.dtype)) * dt, dt)

    def init_weights(self, q: Weight, k: Weight | None, v: Weight) -> None:
        """Draw W_2 from a uniform distribution within rank^-0.5."""
        bound = self.up_proj.in_features**-0.5
        nn.init.uniform_(self.up_proj.weight, -bound, bound)


@dataclass(frozen=True, kw_only=True)
class GLADecayConfig(DecayConfig):
    """An input-dependent decay per key channel, with a low-rank projection (GLA)."""

    rank: int = 16
    """Rank of the projection to decays."""

    def build(self, *, width: int, num_heads: int, head_width: int) -> "GLADecay":
        check_positive(**{"decay.rank": self.rank})
        return GLADecay(width, num_heads, head_width, self.rank)


class GLADecay(Decay):
    """lambda = sigmoid(W_2 W_1 x + b)^(1/16).

    Source: GLA, arXiv:2312.06635.
    """

    def __init__(self, width: int, num_heads: int, head_width: int, rank: int) -> None:
        super().__init__(num_heads)
        self.down_proj = FP32Linear(width, rank, bias=False)
        self.up_proj = small_linear(rank, num_heads * head_width, bias=True)

    def forward(self, x: Hidden) -> DecayOutput:
        z = _wide(self.up_proj(self.down_proj(x)))
        return DecayOutput(self._heads(F.logsigmoid(z) / GLA_TEMPERATURE))


@dataclass(frozen=True, kw_only=True)
class KDADecayConfig(DecayConfig):
    """An input-dependent step size per key channel times a rate per head (KDA)."""

    rank: int = 128
    """Rank of the projection to step sizes. Kimi Linear uses the width of its heads, 128."""

    def build(self, *, width: int, num_heads: int, head_width: int) -> "KDADecay":
        check_positive(**{"decay.rank": self.rank})
        return KDADecay(width, num_heads, head_width, self.rank)


class KDADecay(Decay):
    """lambda = exp(-exp(log_rate) softplus(W_2 W_1 x + b)), with Mamba-2's initial values.

    Source: Kimi Delta Attention, arXiv:2510.26692. The step sizes, with their biases b, are per key
    channel; the rate is per head.
    """

    def __init__(self, width: int, num_heads: int, head_width: int, rank: int) -> None:
        super().__init__(num_heads)
        self.down_proj = FP32Linear(width, rank, bias=False)
        self.up_proj = small_linear(rank, num_heads * head_width, bias=False)
        self.dt_bias = _dt_bias(num_heads * head_width)
        self.log_rate = nn.Parameter(torch.empty(num_heads).uniform_(1, 16).log())

    def forward(self, x: Hidden) -> DecayOutput:
        z = _wide(self.up_proj(self.down_proj(x)))
        dt = self._heads(F.softplus(z + self.dt_bias.to(z.dtype)))  # B T H K
        return DecayOutput(-_rates(self.log_rate.to(z.dtype)).unsqueeze(-1) * dt)


@dataclass(frozen=True, kw_only=True)
class RWKV6DecayConfig(DecayConfig):
    """A rate per key channel plus an input-dependent low-rank term (RWKV-6)."""

    rank: int = 64
    """Rank of the projection to rates."""

    def build(self, *, width: int, num_heads: int, head_width: int) -> "RWKV6Decay":
        check_positive(**{"decay.rank": self.rank})
        return RWKV6Decay(width, num_heads, head_width, self.rank)


class RWKV6Decay(Decay):
    """lambda = exp(-exp(w + W_2 tanh(W_1 x))); w is initialized from -6 to -1 over the channels.

    Source: RWKV-6, arXiv:2404.05892, without its token shift.
    """

    no_weight_decay = frozenset({"log_rate"})

    def __init__(self, width: int, num_heads: int, head_width: int, rank: int) -> None:
        super().__init__(num_heads)
        self.down_proj = FP32Linear(width, rank, bias=False)
        self.up_proj = small_linear(rank, num_heads * head_width, bias=False)
        self.log_rate = nn.Parameter(torch.linspace(-6, -1, head_width).repeat(num_heads, 1))  # H K

    def forward(self, x: Hidden) -> DecayOutput:
        z = self._heads(_wide(self.up_proj(torch.tanh(self.down_proj(x)))))
        return DecayOutput(-_rates(z + self.log_rate.to(z.dtype)))


@dataclass(frozen=True, kw_only=True)
class HGRN2DecayConfig(DecayConfig):
    """An input-dependent decay per key channel, with keys 1 - decay (HGRN2)."""

    provides_keys: ClassVar[bool] = True

    lower_bound: float = 0.0
    """Smallest decay factor, at least 0 and less than 1."""
    learned_lower_bound: bool = False
    """Learn the smallest decay factor of each block and channel, which increases from 0 in the
    first block. Requires lower_bound=0."""

    @property
    def reads_lower_bound(self) -> bool:
        return self.learned_lower_bound

    def build(self, *, width: int, num_heads: int, head_width: int) -> "HGRN2Decay":
        if self.learned_lower_bound and self.lower_bound:
            raise ValueError(
                f"decay.lower_bound is {self.lower_bound} with learned_lower_bound=True, expected 0"
            )
        if not 0 <= self.lower_bound < 1:
            raise ValueError(
                f"decay.lower_bound is {self.lower_bound}, expected 0 or more and less than 1"
            )
        return HGRN2Decay(width, num_heads, head_width, self.lower_bound)


class HGRN2Decay(Decay):
    """lambda = l + (1 - l) sigmoid(W x + b), k = 1 - lambda = (1 - l) sigmoid(-W x - b).

    Source: HGRN2, arXiv:2404.07904. The lower bound l is a constant, unless `learned_lower_bound`:
    then the model learns it for each block, see `LowerBounds`.
    """

    def __init__(self, width: int, num_heads: int, head_width: int, lower_bound: float) -> None:
        super().__init__(num_heads)
        self.lower_bound = lower_bound
        self.proj = small_linear(width, num_heads * head_width, bias=True)

    def forward(self, x: Hidden, lower_bound: LowerBound | None = None) -> DecayOutput:
        z = self._heads(_wide(self.proj(x)))
        if lower_bound is not None:
            return DecayOutput(*bounded_decay(z, lower_bound.unflatten(-1, z.shape[2:])))
        bound, key = self.lower_bound, (1 - self.lower_bound) * torch.sigmoid(-z)
        log_decay = F.logsigmoid(z)
        if bound > 0:
            log_decay = math.log1p(-bound) + log_decay
            log_decay = torch.logaddexp(torch.full_like(z, math.log(bound)), log_decay)
        return DecayOutput(log_decay.clamp(max=0), key)  # rounding may exceed 0


def bounded_decay(z: Tensor, lower_bound: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log of lambda = l + (1 - l) sigmoid(z), and 1 - lambda = (1 - l) sigmoid(-z).

    Both are accurate for lambda near 0 and near 1, and gradients are finite for l = 0.

    Args:
        z: Logits in float32 or wider.
        lower_bound: l, at least 0 and less than 1; broadcasts with z.
    """
    lower_bound = lower_bound.to(z.dtype)
    complement = (1 - lower_bound) * torch.sigmoid(-z)
    decay = lower_bound + (1 - lower_bound) * torch.sigmoid(z)
    low = decay.clamp(min=torch.finfo(z.dtype).tiny).log()
    return torch.where(complement < HALF, torch.log1p(-complement.clamp(max=HALF)), low), complement


Activation = Literal["sigmoid", "softplus"]


@dataclass(frozen=True, kw_only=True)
class HippoDecayConfig(DecayConfig):
    """A decay per key channel with HiPPO initialization, for long sequences."""

    selective: bool = True
    """Scale the exponent by an input-dependent factor; False makes the decay constant."""
    activation: Activation = "sigmoid"
    """Range of the factor: 0 to 2 (sigmoid) or 0 to infinity (softplus). Both are 1 if W x is 0."""
    min_step: float = 0.001
    """Shortest initial step dt: channel n remembers about 1 / (dt (n + 1)) tokens."""
    max_step: float = 0.1
    """Longest initial step."""
    zero_order_hold: bool = False
    """Multiply the key by the input factor of zero-order hold. False only initializes the values
    with this factor."""

    @property
    def changes_keys(self) -> bool:
        return True

    def build(self, *, width: int, num_heads: int, head_width: int) -> "HippoDecay":
        check_choice("decay.activation", self.activation, get_args(Activation))
        check_positive(**{"decay.min_step": self.min_step, "decay.max_step": self.max_step})
        if self.min_step > self.max_step:
            raise ValueError(
                f"decay.min_step is {self.min_step}, expected at most max_step={self.max_step}"
            )
        return HippoDecay(self, width, num_heads, head_width)


class HippoDecay(Decay):
    """log lambda = 2 sigmoid(W x) B, or B alone; B starts at -dt (n + 1) for channel n.

    This is the diagonal of HiPPO-LegS, as in S4D-Real (arXiv:2206.11893), with log-uniform steps dt
    per head. The parameter is log(-B), so B stays negative. With zero-order hold, keys are
    multiplied by (lambda - 1) / B, the input factor of Eq. 236 for a state matrix of B and a time
    step of 2 sigmoid(W x).

    Source: LION, arXiv:2502.16249, App. B.11 and C.2. The paper's
    lambda = exp(sigmoid(A) + B) may exceed 1. This version cannot, and it equals HiPPO's if W x is
    0. Row 7 of Table 6 uses softplus instead of sigmoid.
    """

    no_weight_decay = frozenset({"log_rate"})

    def __init__(
        self, config: HippoDecayConfig, width: int, num_heads: int, head_width: int
    ) -> None:
        super().__init__(num_heads)
        self.config = config
        low, high = math.log(config.min_step), math.log(config.max_step)
        log_dt = torch.empty(num_heads, 1).uniform_(low, high)
        self.log_rate = nn.Parameter(log_dt + torch.arange(1, head_width + 1).log())  # H K
        self.proj = None
        if config.selective:
            self.proj = small_linear(width, num_heads * head_width, bias=False, std=HIPPO_STD)

    def forward(self, x: Hidden) -> DecayOutput:
        rate = _rates(_wide(self.log_rate)).clamp(min=MIN_RATE)  # H K
        log_decay = (-rate).expand(*x.shape[:2], -1, -1)
        if self.proj is not None:
            z = self._heads(_wide(self.proj(x)))
            is_sigmoid = self.config.activation == "sigmoid"
            scale = 2 * torch.sigmoid(z) if is_sigmoid else F.softplus(z) / math.log(2)
            log_decay = scale * log_decay
        key_factor = -torch.expm1(log_decay) / rate if self.config.zero_order_hold else None
        return DecayOutput(log_decay, key_factor)

    @torch.no_grad()
    def init_weights(self, q: Weight, k: Weight | None, v: Weight) -> None:
        """Draw W, q and k with a standard deviation of 0.1, and set v by zero-order hold.

        The initial v is the diagonal matrix (lambda - 1) / log lambda (Eq. 236), unless keys are
        already multiplied by this factor. The Lambda^-1 (Lambda - I) of App. C.2 has the opposite
        sign.
        """
        for weight in (q, k, None if self.proj is None else self.proj.weight):
            if weight is not None:
                nn.init.normal_(weight, std=HIPPO_STD)
        if self.config.zero_order_hold:
            return
        log_decay = -self.log_rate.exp().flatten()
        v.copy_(torch.diag(log_decay.expm1() / log_decay))


DECAYS: Mapping[str, type[DecayConfig]] = MappingProxyType(
    {
        "none": NoDecayConfig,
        "fixed": FixedDecayConfig,
        "selective": SelectiveDecayConfig,
        "mamba": MambaDecayConfig,
        "mamba2": Mamba2DecayConfig,
        "gated_deltanet": GatedDeltaNetDecayConfig,
        "xlstm": XLSTMDecayConfig,
        "gla": GLADecayConfig,
        "kda": KDADecayConfig,
        "rwkv6": RWKV6DecayConfig,
        "hgrn2": HGRN2DecayConfig,
        "hippo": HippoDecayConfig,
    }
)
