"""HGRN: an element-wise, complex-valued recurrence with forget gates that are bounded below."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from onescan.checks import check_choice, check_positive
from onescan.layers.basic import EPS, normalized
from onescan.layers.decays import bounded_decay, small_linear
from onescan.layers.mixers.contract import (
    DirectedMixerConfig,
    Mixer,
    MixerConfig,
    check_tokens,
    flipped,
    masked,
)
from onescan.ops.collectives import gather
from onescan.ops.decay_attention import DecayState, Form, decay_attention
from onescan.ops.gating import gated
from onescan.ops.lrpe import lrpe_angles, lrpe_frequencies
from onescan.ops.numerics import to_accumulation_dtype, to_float64, wrap_angle
from onescan.ops.parallel import SequenceGroup, scan_group, sequence_parallel
from onescan.shapes import FrequencyRow, Grid, Hidden, Keep, LowerBound

Complex = Float[Tensor, "B T D 2"]  # real and imaginary parts
ChannelDecays = Float[Tensor, "B T D"]
TokenAngles = Float[Tensor, "T D"] | Float[Tensor, "B T D"]


@dataclass(frozen=True, kw_only=True)
class HGRNMixerConfig(DirectedMixerConfig):
    """HGRN's recurrence. It is element-wise, so `num_heads` has no effect on it."""

    form: Form = "auto"
    """Algorithm of the op; see `decay_attention`."""
    chunk_size: int = 64
    """Tokens per chunk of the chunk form."""

    @property
    def takes(self) -> frozenset[str]:
        return frozenset({"lower_bound"})

    @property
    def skips_padding(self) -> bool:
        return True

    def build(self, *, width: int, axes: int) -> "HGRNMixer":
        self.check_direction()
        self.head_width(width)  # raises if num_heads does not divide the width
        check_choice("form", self.form, get_args(Form))
        check_positive(chunk_size=self.chunk_size)
        return HGRNMixer(self, width)


class HGRNMixer(Mixer):
    """h_t = lambda_t e^(i theta) h_(t-1) + (1 - lambda_t) c_t; y = W_o (Norm([Re h, Im h]) * g).

    Here lambda_t = l + (1 - l) sigmoid(W x_t + b), with the lower bound l of the block, and c_t and
    g_t are SiLU of projections of x_t. In terms of z_t = e^(-i theta t) h_t, the recurrence has
    real decays, so it is causal linear attention with a head of one key channel for each channel.

    With direction="both", the states of a forward and a backward scan are added. They share all
    parameters except theta, and each contains the token itself. Grids are scanned in row-major
    order. The state is h after the last token, as pairs of real and imaginary parts.

    Source: HGRN, arXiv:2311.04823, Sec. 3.
    """

    no_weight_decay = frozenset({"theta"})

    def __init__(self, config: HGRNMixerConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.in_widths = [2 * width, 2 * width]
        self.in_proj = nn.Linear(width, sum(self.in_widths))  # c and the output gate
        self.decay_proj = small_linear(width, width, bias=True)
        theta = lrpe_frequencies(width, axes=1).repeat(len(config.is_backward), 1)
        self.theta = nn.Parameter(theta)  # scans D
        self.norm = nn.LayerNorm(2 * width, eps=EPS)
        self.out_proj = nn.Linear(2 * width, width)

    def forward(
        self,
        x: Hidden,
        grid: Grid,
        *,
        keep: Keep | None = None,
        state: DecayState | None = None,
        lower_bound: LowerBound | None = None,
    ) -> tuple[Hidden, DecayState | None]:
        """Mix the tokens; see `Mixer.forward`. Without `lower_bound`, the bound is 0."""
        check_tokens(x, grid, keep)
        if state is not None:
            self.config.check_state(state, grid)
        x = masked(x, keep)
        c, gate = self.in_proj(x).split(self.in_widths, dim=-1)
        c, z = to_accumulation_dtype(F.silu(c), self.decay_proj(x))
        c = c.unflatten(-1, (2, -1)).mT  # B T D 2
        bound = z.new_zeros(()) if lower_bound is None else lower_bound
        log_decay, complement = bounded_decay(z, bound)
        inputs = (c, complement, log_decay, keep)
        states: list[Complex] = []
        new_state: Any = None
        for theta, backward in zip(self.theta, self.config.is_backward, strict=True):
            c, complement, log_decay, real = map(flipped, inputs) if backward else inputs
            group = scan_group(backward=backward)
            h, new_state = self._scan(c, complement, log_decay, theta, real, state, group)
            states.append(flipped(h) if backward else h)
        h = sum(states[1:], start=states[0])
        o = normalized(self.norm, h.mT.flatten(-2))
        o = self.out_proj(gated(o, gate, "silu"))
        return masked(o, keep), new_state

    def _scan(
        self,
        c: Complex,
        complement: ChannelDecays,
        log_decay: ChannelDecays,
        theta: FrequencyRow,
        keep: Keep | None,
        state: DecayState | None,
        group: SequenceGroup | None,
    ) -> tuple[Complex, DecayState | None]:
        """Return h of every token and, if the mixer is causal, the state after the last one."""
        angles, last = self._angles(theta, c.shape[1], keep, group)
        v = rotated_complex(c, -angles)
        k = complement.unsqueeze(-1)
        new_state: Any
        o, new_state = decay_attention(
            torch.ones_like(k), k, v, log_decay, causal=True, keep=keep, state=state,
            form=self.config.form, chunk_size=self.config.chunk_size,
            return_state=self.config.is_causal, group=group,
        )  # fmt: skip
        if new_state is not None:
            kv = rotated_complex(new_state.kv.transpose(1, 2), last).transpose(1, 2)  # B D 1 2
            new_state = new_state._replace(kv=kv)
        return rotated_complex(o, angles), new_state

    def _angles(
        self, theta: FrequencyRow, tokens: int, keep: Keep | None, group: SequenceGroup | None
    ) -> tuple[TokenAngles, Tensor]:
        """Return theta times the number of real tokens up to each token, and in total.

        The angles are [T, D] and [1, D], or [B, T, D] and [B, 1, D] with `keep`.
        """
        with nullcontext() if group is None else sequence_parallel(None):
            angles = lrpe_angles((tokens + 1,), theta.unsqueeze(0)).squeeze(1)  # from 0 on
        angles = angles[1:] if keep is None else angles[keep.cumsum(dim=1)]
        if group is None:
            return angles, angles[..., -1:, :]
        real = theta.new_tensor([[tokens]]) if keep is None else keep.sum(dim=1)[:, None, None]
        (numbers,) = gather(group, real.long())
        before, total = (
            wrap_angle(to_float64(n) * theta).to(angles.dtype)
            for n in (numbers[: group.rank].sum(dim=0), numbers.sum(dim=0))
        )
        return before + angles, total


def rotated_complex(x: Complex, angles: TokenAngles) -> Complex:
    """Multiply by e^(i angles)."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    real, imaginary = x.unbind(-1)
    return torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)


class LowerBounds(nn.Module):
    """Lower bounds of forget gates, which increase from block to block.

    With p = softmax(logits) over blocks, block k (counted from 1) has p_2 + ... + p_k: 0 in the
    first block, and below 1 in the last. Initially, all p are equal.

    Source: HGRN, arXiv:2311.04823, Sec. 3.
    """

    no_weight_decay = frozenset({"logits"})

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(depth, width))

    def forward(self) -> Float[Tensor, "depth D"]:
        """Return the bound of each block and channel, in float32 or wider."""
        (logits,) = to_accumulation_dtype(self.logits)
        increments = logits.softmax(dim=0)
        return increments.cumsum(dim=0) - increments[0]


def build_lower_bounds(mixer: MixerConfig, *, depth: int, width: int) -> LowerBounds | None:
    """Build the lower bounds of a model's blocks; None if its mixers read none."""
    return LowerBounds(depth, width) if "lower_bound" in mixer.takes else None
