"""LION: linear attention with any decay, in one direction or both, along one scan or several."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from onescan.checks import check_choice, check_positive
from onescan.layers.decays import (
    Decay,
    DecayConfig,
    Gates,
    HippoDecayConfig,
    LogDecay,
    SelectiveDecayConfig,
)
from onescan.layers.mixers.contract import Mixer
from onescan.layers.mixers.directed import DirectedMixerConfig, turned
from onescan.layers.norm import NormName, build_norm
from onescan.layers.scan_order import Order, snake_orders
from onescan.ops.decay_attention import DecayState, Form, decay_attention
from onescan.ops.feature_maps import FEATURE_MAPS, FeatureMapName
from onescan.ops.numerics import (
    accumulation_dtype,
    divided,
    full_precision,
    is_autocast,
    widened,
)
from onescan.shapes import Grid, Hidden, Keep, Keys, Queries, Values

MeanDecays = Float[Tensor, "scans H"] | Float[Tensor, "scans H K"]
ScanName = Literal["flat", "natural"]
Normalize = Literal["none", "sum", "max_one", "sum_before_mask"]
DecayAt = Literal["auto", "source", "target"]


@dataclass(frozen=True, kw_only=True)
class LionMixerConfig(DirectedMixerConfig):
    """LION-s; by changing fields, every linear attention with a decay."""

    state_size: int | None = None
    """Make each channel a separate head with this many key channels, as in Mamba. The channels of
    each of the `num_heads` groups share queries and keys. None: heads of width / num_heads."""
    feature_map: FeatureMapName = "shifted_silu"
    """What queries and keys pass through."""
    decay: DecayConfig = field(default_factory=SelectiveDecayConfig)
    """How fast what was read is forgotten."""
    normalize: Normalize = "sum"
    """What outputs are divided by; see `decay_attention`. sum_before_mask divides by the row sum of
    the scores before they decay, in both directions."""
    decay_at: DecayAt = "auto"
    """Which of two neighboring tokens provides the decay between them; see `decay_attention`."""
    scan: ScanName = "flat"
    """Visit tokens as they lie; or, natural, in a snake along each axis in turn, and average."""
    norm: NormName = "none"
    """Norm of the output, over all heads together."""
    bias: bool = True
    """Of the projections."""
    form: Form = "auto"
    """How the op evaluates its sum; see `decay_attention`."""
    chunk_size: int = 64
    """Tokens per chunk of the chunk form."""

    @property
    def is_causal(self) -> bool:
        return self.direction == "forward" and self.scan == "flat"

    @property
    def prefix_reads_grid(self) -> bool:
        return self.direction != "forward"

    def build(self, *, width: int, axes: int) -> "LionMixer":
        self.check_direction()
        check_choice("feature_map", self.feature_map, FEATURE_MAPS)
        check_choice("normalize", self.normalize, get_args(Normalize))
        check_choice("decay_at", self.decay_at, get_args(DecayAt))
        check_choice("scan", self.scan, get_args(ScanName))
        check_choice("form", self.form, get_args(Form))
        check_positive(chunk_size=self.chunk_size)
        if self.scan == "natural" and self.normalize not in ("none", "sum"):
            raise ValueError(
                f"normalize is '{self.normalize}' with scan='natural', expected 'none' or 'sum'"
            )
        if self.normalize == "sum_before_mask" and self.direction != "both":
            raise ValueError(
                f"normalize is 'sum_before_mask' with direction='{self.direction}', expected 'both'"
            )
        if self.state_size is not None:
            check_positive(state_size=self.state_size)
            if isinstance(self.decay, HippoDecayConfig):
                raise ValueError(
                    f"state_size is {self.state_size} with decay=HippoDecayConfig, expected None: "
                    "its initialization needs one key channel per value channel"
                )
        return LionMixer(self, width, axes)


class Scan(NamedTuple):
    """What one scan reads of the tokens.

    Attributes:
        k: keys, multiplied by their gate.
        log_decay: of each token or each head; None does not decay.
    """

    k: Keys
    log_decay: LogDecay | None


class LionMixer(Mixer):
    """O = Norm[Scale(phi(Q) phi(K)^T * M) V], then W_o; the mask M comes from the decay.

    Source: LION, arXiv:2502.16249, Sec. 3.1 and 3.2; directions, App. C.15; natural scans, C.14,
    with the average taken of masks, before the one normalization that Sec. 3.1 has.
    """

    def __init__(self, config: LionMixerConfig, width: int, axes: int) -> None:
        super().__init__()
        self.config = config
        head_width = config.head_width(width)
        self.key_width, self.num_heads = head_width, config.num_heads
        if config.state_size is not None:
            self.key_width, self.num_heads = config.state_size, width
        keys = config.num_heads * self.key_width
        self.feature_map = FEATURE_MAPS[config.feature_map]
        self.to_q = nn.Linear(width, keys, bias=config.bias)
        self.to_k = None
        if not config.decay.gives_keys:
            self.to_k = nn.Linear(width, keys, bias=config.bias)
        self.to_v = nn.Linear(width, width, bias=config.bias)
        scans = axes if config.scan == "natural" else 1
        sizes = {"width": width, "num_heads": self.num_heads, "head_width": self.key_width}
        self.decays = nn.ModuleList(config.decay.build(**sizes) for _ in range(scans))
        self.norm = build_norm(config.norm, width)
        self.to_out = nn.Linear(width, width, bias=config.bias)
        self.init_weights()

    def init_weights(self) -> None:
        for decay in self.decays:
            assert isinstance(decay, Decay)
            decay.init_weights(self.to_q, self.to_k, self.to_v)

    def forward(
        self, x: Hidden, grid: Grid, *, keep: Keep | None = None, state: DecayState | None = None
    ) -> tuple[Hidden, DecayState | None]:
        self.config.check_state(state, grid)
        q = self._keys(self.to_q(x)) * self.key_width**-0.5
        k = None if self.to_k is None else self._keys(self.to_k(x))
        v = rearrange(self.to_v(x), "b t (h v) -> b t h v", h=self.num_heads)
        (v,) = widened(v)  # sums that nothing divides outgrow float16
        scans = [_scan(k, decay(x), grid.prefix) for decay in self.decays]
        if self.config.scan == "flat":
            o, state = self._attend(q, *scans[0], v, keep, state, self.config.normalize)
        else:
            o = self._attend_naturally(q, scans, v, grid, keep)
        o = rearrange(o, "b t h v -> b t (h v)").to(self._norm_dtype(x))
        o = self.to_out(self.norm(o))
        return o if keep is None else o * keep.unsqueeze(-1), state

    def _norm_dtype(self, x: Hidden) -> torch.dtype:
        """Return the dtype of the norm's input: as wide as its parameters and autocast allow."""
        scale = getattr(self.norm, "weight", None)
        if scale is not None:
            return scale.dtype
        return accumulation_dtype(x.dtype) if is_autocast(x) else x.dtype

    @torch.no_grad()
    def mean_decays(self, x: Hidden, grid: Grid) -> MeanDecays:
        """What each head keeps from one token to the next, scan by scan: 1 keeps all.

        The decay itself, where it is one per head or channel; where tokens choose it, its geometric
        mean over all tokens of the batch but the prefix: decays are multiplied.
        """
        return torch.stack(
            [self._mean(decay(x).log_decay, x, grid.prefix) for decay in self.decays]
        )

    def _mean(self, log_decay: LogDecay | None, x: Hidden, prefix: int) -> Tensor:
        if log_decay is None:
            return x.new_ones(self.num_heads)
        if log_decay.ndim > 1:
            log_decay = log_decay[:, prefix:].mean(dim=(0, 1))
        return log_decay.exp()

    def _attend(
        self,
        q: Queries,
        k: Keys,
        log_decay: LogDecay | None,
        v: Values,
        keep: Keep | None,
        state: DecayState | None,
        normalize: Normalize,
    ) -> tuple[Values, DecayState | None]:
        """Attend in this mixer's direction to tokens in the order in which they come."""
        config = self.config
        if normalize == "sum_before_mask":
            q, normalize = _divided_by_row_sum(q, k, keep), "none"
        backward = config.direction == "backward"
        if backward:
            q, k, log_decay, v, keep = map(turned, (q, k, log_decay, v, keep))
        leaving: Any
        o, leaving = decay_attention(
            q, k, v, log_decay, causal=config.direction != "both", decay_at=config.decay_at,
            normalize=normalize, keep=keep, state=state,
            form=config.form, chunk_size=config.chunk_size, return_state=config.is_causal,
        )  # fmt: skip
        return turned(o) if backward else o, leaving

    def _attend_naturally(
        self, q: Queries, scans: Sequence[Scan], v: Values, grid: Grid, keep: Keep | None
    ) -> Values:
        """Attend along all scans in one call, side by side in the batch; then average."""
        if grid.tokens != q.shape[1] or len(grid.shape) != len(scans):
            raise ValueError(
                f"x has {q.shape[1]} tokens and {grid} {grid.tokens} on {len(grid.shape)} axes, "
                f"expected as many, on {len(scans)} axes"
            )
        orders = snake_orders(grid, q.device)
        weigh = self.config.normalize == "sum"
        if weigh:  # values of 1 become the row sums
            v = F.pad(v, (0, 1), value=1.0)
        o, _ = self._attend(
            _visited([q] * len(scans), orders),
            _visited([scan.k for scan in scans], orders),
            _visited([_of_tokens(scan.log_decay, q) for scan in scans], orders),
            _visited([v] * len(scans), orders),
            _visited([keep] * len(scans), orders),
            state=None,
            normalize="none",
        )
        each = zip(o.unflatten(0, (len(scans), q.shape[0])).unbind(), orders, strict=True)
        o = torch.stack([x.index_select(1, order.step) for x, order in each]).mean(dim=0)
        if weigh:
            o = divided(o[..., :-1], o[..., -1:])
        return o

    def _keys(self, x: Hidden) -> Keys:
        """Apply the feature map per head or group, and repeat a group for each of its heads."""
        x = self.feature_map(rearrange(x, "b t (g k) -> b t g k", g=self.config.num_heads))
        if self.config.state_size is None:
            return x
        return x.repeat_interleave(self.num_heads // self.config.num_heads, dim=2)


def _scan(k: Keys | None, gates: Gates, prefix: int) -> Scan:
    """Apply the gates. Where tokens choose, one of the prefix lets nothing be forgotten.

    A fixed decay stays as it is there too, lambda^|i - j| between any two tokens.
    """
    log_decay, key = gates
    if k is None:
        assert key is not None, "a decay that gives keys gave none"
        k = key
    elif key is not None:
        k = k * key
    if prefix and log_decay is not None and log_decay.ndim > 1:
        log_decay = torch.cat([torch.zeros_like(log_decay[:, :prefix]), log_decay[:, prefix:]], 1)
    return Scan(k, log_decay)


def _divided_by_row_sum(q: Queries, k: Keys, keep: Keep | None) -> Queries:
    """Scale before the mask: q / sum_j q . k_j, for Y = (Scale(Q K^T) * M) V of Table 6's row 5."""
    q, k = widened(q, k)
    with full_precision(q):
        k_sum = k.sum(dim=1) if keep is None else torch.einsum("bthk,bt->bhk", k, keep.to(k.dtype))
        return divided(q, torch.einsum("bthk,bhk->bth", q, k_sum).unsqueeze(-1))


def _of_tokens(log_decay: LogDecay | None, q: Queries) -> LogDecay | None:
    if log_decay is None or log_decay.ndim > 1:
        return log_decay
    return log_decay.expand(q.shape[:3])


def _visited(each: Sequence[Tensor | None], orders: Sequence[Order]) -> Any:
    """What each scan reads, in its order, all scans one after another in the batch."""
    given = [(x, order) for x, order in zip(each, orders, strict=True) if x is not None]
    return torch.cat([x.index_select(1, order.token) for x, order in given]) if given else None
