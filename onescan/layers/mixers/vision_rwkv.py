"""Vision-RWKV: bidirectional attention with a decay per channel, and channel mixing.

A layer of the paper is two blocks here, one for each kind of mixing. The file contains the config,
both mixers, then the attention (Bi-WKV) and the token shift (Q-Shift).

Source: Vision-RWKV, arXiv:2403.02308, Sec. 3.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from onescan.checks import check_choice, check_positive
from onescan.layers.mixers.contract import (
    Mixer,
    MixerConfig,
    both_directions,
    check_tokens,
    masked,
)
from onescan.layers.mixers.rwkv6 import read_before_write
from onescan.ops.collectives import carry_tokens, gather
from onescan.ops.decay_attention import Form
from onescan.ops.numerics import safe_divide, to_accumulation_dtype
from onescan.ops.parallel import SequenceGroup, sequence_group
from onescan.shapes import Grid, Hidden, Keep

MAX_GROWTH = 40.0  # largest growth of weights with distance, as a log; exp(89) overflows

Part = Literal["spatial", "channel", "alternating"]
Channels = Float[Tensor, " D"]


@dataclass(frozen=True, kw_only=True)
class VisionRWKVMixerConfig(MixerConfig):
    """Vision-RWKV's mixing, for models without an MLP. `num_heads` only has to divide the width."""

    part: Part = "spatial"
    """Mix all tokens ("spatial"), or the channels of each token and its neighbors ("channel").
    "alternating" switches between them from block to block, beginning with spatial."""
    ratio: float = 4.0
    """Hidden width of channel mixing divided by the width."""
    form: Form = "auto"
    """Algorithm of the op; see `decay_attention`."""
    chunk_size: int = 8
    """Tokens per chunk of the chunk form."""

    @property
    def prefix_reads_grid(self) -> bool:
        return self.part != "channel"

    def for_layer(self, index: int) -> "VisionRWKVMixerConfig":
        if self.part != "alternating":
            return self
        return replace(self, part="channel" if index % 2 else "spatial")

    def init_for_layer(self, mixer: Mixer, index: int, depth: int) -> None:
        assert isinstance(mixer, _ShiftMixer)
        blocks = 2 if self.part == "alternating" else 1  # per layer
        mixer.layer, mixer.layers = index // blocks, max(depth // blocks, 1)

    def build(self, *, width: int, axes: int) -> Mixer:
        check_choice("part", self.part, get_args(Part))
        if self.part == "alternating":
            raise ValueError(
                "part is 'alternating', which describes a whole model: build each mixer from "
                "for_layer(index)"
            )
        check_choice("form", self.form, get_args(Form))
        check_positive(ratio=self.ratio, chunk_size=self.chunk_size)
        self.head_width(width)  # raises if num_heads does not divide the width
        if self.part == "channel":
            return ChannelMixer(self, width)
        return SpatialMixer(self, width)


class _ShiftMixer(Mixer):
    """Base class of both mixers: inputs are weighted means of a token and its neighbors.

    Initial weights depend on the layer l of L, as in RWKV-4, arXiv:2305.13048, App. E, on which
    Vision-RWKV is based. Outside a model, a mixer is initialized like the first of several layers.
    """

    no_weight_decay = frozenset({"shift_mix"})
    powers: tuple[float, ...]  # initial weights of x for each input: share of the channel ** power
    offsets: tuple[float, ...]  # added to these weights in the last layer
    layer, layers = 0, 1  # index of the layer, and number of layers, each of two blocks

    def __init__(self, config: VisionRWKVMixerConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.shift_mix = nn.Parameter(torch.empty(len(self.powers), width))

    @torch.no_grad()
    def init_weights(self) -> None:
        """Set mu = (channel / D) ** (power (1 - l / L)) + offset l / (L - 1) for each input."""
        channel = torch.arange(self.shift_mix.shape[1], device="cpu")  # not on the meta device
        share, remaining = channel / len(channel), 1 - self.layer / self.layers
        mixes = [
            share ** (power * remaining) + offset * self.passed
            for power, offset in zip(self.powers, self.offsets, strict=True)
        ]
        self.shift_mix.copy_(torch.stack(mixes))

    @property
    def passed(self) -> float:
        """Fraction of the layers before this one: 0 in the first layer, 1 in the last."""
        return self.layer / max(self.layers - 1, 1)

    def _shifted(self, x: Hidden, grid: Grid, keep: Keep | None) -> list[Hidden]:
        """Return x mu + Q-Shift(x) (1 - mu) for each input."""
        if sequence_group(None) is None:
            check_positive(T=x.shape[1])
        x = masked(x, keep)  # masked tokens are outside the grid
        shifted = quad_shift(x, grid)
        return [shifted + (x - shifted) * mix for mix in self.shift_mix]


class SpatialMixer(_ShiftMixer):
    """(sigmoid(R) * Bi-WKV(K, V)) W_o, where R, K and V are projections of shifted tokens.

    Each channel has its own decay w and bonus u.

    Source: Vision-RWKV, arXiv:2403.02308, Sec. 3.
    """

    powers, offsets = (0.5, 1, 1), (0, 0, 0.3)  # r, k, v

    def __init__(self, config: VisionRWKVMixerConfig, width: int) -> None:
        super().__init__(config, width)
        self.gate_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.decay = nn.Parameter(torch.empty(width))
        self.bonus = nn.Parameter(torch.empty(width))
        self.out_proj = nn.Linear(width, width, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        super().init_weights()
        channel = torch.arange(len(self.decay), device="cpu")
        share = channel / max(len(channel) - 1, 1)
        self.decay.copy_(8 * share ** (0.7 + 1.3 * self.passed) - 5)
        self.bonus.copy_(0.5 * ((channel + 1) % 3 - 1) + math.log(0.3))

    def forward(
        self, x: Hidden, grid: Grid, *, keep: Keep | None = None, state: Any = None
    ) -> tuple[Hidden, None]:
        check_tokens(x, grid, keep)
        if state is not None:
            raise ValueError("state was given to a mixer that is not causal")
        r, k, v = self._shifted(x, grid, keep)
        gate = torch.sigmoid(self.gate_proj(r))
        o = bi_wkv(
            self.k_proj(k), self.v_proj(v), self.decay, self.bonus, keep=keep,
            form=self.config.form, chunk_size=self.config.chunk_size,
        )  # fmt: skip
        y = self.out_proj(gate * o.to(gate.dtype))
        return masked(y, keep), None


class ChannelMixer(_ShiftMixer):
    """sigmoid(R) * (relu(K)^2 W_v), where R and K are projections of shifted tokens.

    Source: Vision-RWKV, arXiv:2403.02308, Sec. 3. With no further output projection, the number of
    parameters matches the published one.
    """

    powers, offsets = (1, 1), (0, 0)  # r, k

    def __init__(self, config: VisionRWKVMixerConfig, width: int) -> None:
        super().__init__(config, width)
        hidden = int(width * config.ratio)
        self.gate_proj = nn.Linear(width, width, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)
        self.init_weights()

    def forward(
        self, x: Hidden, grid: Grid, *, keep: Keep | None = None, state: Any = None
    ) -> tuple[Hidden, None]:
        check_tokens(x, grid, keep)
        if state is not None:
            raise ValueError("state was given to a mixer that is not causal")
        r, k = self._shifted(x, grid, keep)
        hidden = F.relu(self.up_proj(k)).square()
        y = torch.sigmoid(self.gate_proj(r)) * self.down_proj(hidden)
        return masked(y, keep), None


def bi_wkv(
    k: Hidden,
    v: Hidden,
    decay: Channels,
    bonus: Channels,
    *,
    keep: Keep | None = None,
    form: Form = "auto",
    chunk_size: int = 8,
) -> Hidden:
    """Return means of the values of all tokens, weighted in each channel by exp(k) and distance.

        o_t = sum_i a_ti v_i / sum_i a_ti,
        a_ti = exp(k_i - (|t - i| - 1) w / T),  a_tt = exp(k_t + u)

    Computed as linear attention with keys exp(k), where each channel is a head with one key channel
    and the values v and 1. A negative w lets weights grow with the distance, by exp(40) at most.

    Source: Vision-RWKV, arXiv:2403.02308, Sec. 3 (Bi-WKV). The released code also divides u by T.

    Args:
        k: Logits of the weights.
        v: Values.
        decay: w, of any sign.
        bonus: u.
        keep: True for real tokens; others are not read, and not counted in T or in distances.
        form: As in `decay_attention`.
        chunk_size: As in `decay_attention`.

    Returns:
        The means, in float32 or wider.
    """
    k, v, decay, bonus = to_accumulation_dtype(k, v, decay, bonus)
    real = torch.ones_like(k[..., 0], dtype=torch.bool) if keep is None else keep
    # Subtract the maximum over tokens so that exp cannot overflow.
    k = k.masked_fill(~real.unsqueeze(-1), -torch.inf)
    top, total = k.detach(), real.sum(dim=1, keepdim=True)  # B 1
    before = after = torch.zeros_like(total)
    if (group := sequence_group(None)) is not None:
        local_top = F.pad(top, (0, 0, 0, 1), value=-torch.inf).amax(dim=1)
        tops, totals = gather(group, local_top, total)
        top, total = tops.transpose(0, 1), totals.sum(dim=0)
        before, after = totals[: group.rank].sum(dim=0), totals[group.rank + 1 :].sum(dim=0)
    top = top.amax(dim=1, keepdim=True).clamp(min=torch.finfo(k.dtype).min)
    weight = (k - top).exp()
    values = torch.stack([v, torch.ones_like(v)], dim=-1)  # B T D 2
    self_term = (weight * bonus.exp()).unsqueeze(-1) * values
    rate = decay.clamp(min=-MAX_GROWTH) / total.clamp(min=1).unsqueeze(-1)  # B 1 D

    def scan(
        weight: Tensor, values: Tensor, real: Tensor, rate: Tensor, before: Tensor, *, group: Any
    ) -> Tensor:
        # Decays are at most 1: growth over t - 1 - i steps is a factor of the query and of the key.
        growth = (-rate).clamp(min=0)
        position = (before + real.cumsum(dim=1)).unsqueeze(-1) - 1  # B T 1
        log_decay = -rate.clamp(min=0) * real.unsqueeze(-1)
        o, _ = read_before_write(
            (growth * (position - 1)).exp().unsqueeze(-1),
            (weight * (-growth * position).exp()).unsqueeze(-1),
            values,
            log_decay,
            form=form,
            chunk_size=chunk_size,
            return_state=False,
            group=group,
        )
        return o

    inputs = (weight, values, real, rate)
    past, future = both_directions(scan, (*inputs, before), (*inputs, after))
    sums = past + future + self_term
    return safe_divide(sums[..., 0], sums[..., 1])


def quad_shift(x: Hidden, grid: Grid) -> Hidden:
    """Replace equal groups of channels by those of the two neighbors along each axis (Q-Shift).

    Groups come from the previous and the next token along the last axis, then along the axis
    before it; neighbors outside the grid are zero. Remaining channels and prefix tokens are
    unchanged.

    Source: Vision-RWKV, arXiv:2403.02308, Sec. 3.

    Raises:
        ValueError: If x and the grid have different numbers of tokens.
    """
    if grid.tokens != x.shape[1]:
        raise ValueError(f"x has {x.shape[1]} tokens, but {grid} has {grid.tokens}")
    axes = len(grid.shape)
    group = x.shape[-1] // (2 * axes)
    inside = x[:, grid.prefix :].unflatten(1, grid.shape)
    *groups, unshifted = inside.split([group] * 2 * axes + [x.shape[-1] - 2 * axes * group], dim=-1)
    shifted, ranks = [], sequence_group(None)
    for i, part in enumerate(groups if ranks is None else groups[:-2]):
        step = -1 if i % 2 else 1
        padding = [0, 0] * (i // 2 + 1) + [step, -step]  # of the channels, then the last axes
        shifted.append(F.pad(part, padding))
    if ranks is not None:
        shifted += _neighboring_rows(ranks, *groups[-2:])
    grid_tokens = torch.cat([*shifted, unshifted], dim=-1).flatten(1, axes)
    return torch.cat([x[:, : grid.prefix], grid_tokens], dim=1)


def _neighboring_rows(ranks: SequenceGroup, previous: Tensor, following: Tensor) -> list[Tensor]:
    """Return the previous row of one tensor, [B, rows, ...], and the next row of the other."""
    shards = [(previous.flatten(2), None), (following.flatten(2).flip(1), None)]
    (before, _), (after, _) = carry_tokens(ranks, shards, 1)
    return [
        torch.cat([before.unflatten(2, previous.shape[2:]), previous], dim=1)[:, :-1],
        torch.cat([following, after.unflatten(2, following.shape[2:])], dim=1)[:, 1:],
    ]
