"""Mamba and Vim: a selective state space model with a short convolution and an output gate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onescan.checks import check_choice, check_positive
from onescan.layers.basic import Gate
from onescan.layers.convolution import ShortConvolution, Window
from onescan.layers.decays import MambaDecayConfig
from onescan.layers.mixers.contract import (
    DirectedMixerConfig,
    Mixer,
    check_tokens,
    flipped,
    masked,
)
from onescan.layers.scans import whole_grid
from onescan.ops.collectives import Permutation
from onescan.ops.decay_attention import DecayState, Form, decay_attention
from onescan.ops.gating import ACTIVATIONS as GATES
from onescan.ops.numerics import to_accumulation_dtype
from onescan.ops.parallel import Group, scan_group, sequence_group
from onescan.shapes import Grid, Hidden, Keep, Keys

PrefixPosition = Literal["start", "middle"]


@dataclass(frozen=True, kw_only=True)
class MambaMixerConfig(DirectedMixerConfig):
    """Vim's mixer, with separate parameters per direction; Mamba with direction="forward"."""

    num_heads: int = 1
    """Groups of channels that share B and C, 1 in Mamba and Vim; must divide the width."""
    state_size: int = 16
    """State channels of each channel, N."""
    expand: int = 2
    """Inner width divided by model width."""
    conv_size: int = 4
    """Tokens that the convolution reads, the current one included."""
    step_rank: int | None = None
    """Rank of the projection to step sizes. None for width / 16, rounded up."""
    gate: Gate = "silu"
    """Activation of the output gate W_z x, which multiplies the output; "none" omits it."""
    skip: bool = True
    """Add the skip connection D x to the output of the state space model."""
    prefix_position: PrefixPosition = "start"
    """Where scans read prefix tokens, such as a class token: before the grid ("start"), or between
    the halves of its tokens ("middle"), as in Vim."""
    form: Form = "auto"
    """Algorithm of the op; see `decay_attention`. On a CPU, "auto" visits one token at a time, as
    this is fastest for heads with a single value channel."""
    chunk_size: int = 64
    """Tokens per chunk of the chunk form."""

    @property
    def prefix_reads_grid(self) -> bool:
        return super().prefix_reads_grid or self.prefix_position == "middle"

    def check_padding(self, grid: Grid) -> None:
        if grid.prefix and self.prefix_position == "middle":
            raise ValueError(
                "keep was given with prefix_position='middle', which depends on the number of "
                "tokens; expected prefix_position='start' or no class token"
            )

    @property
    def skips_padding(self) -> bool:
        return True

    def build(self, *, width: int, axes: int) -> "MambaMixer":
        self.check_direction()
        check_choice("gate", self.gate, get_args(Gate))
        check_choice("prefix_position", self.prefix_position, get_args(PrefixPosition))
        check_choice("form", self.form, get_args(Form))
        check_positive(state_size=self.state_size, expand=self.expand, chunk_size=self.chunk_size)
        if self.step_rank is not None:
            check_positive(step_rank=self.step_rank)
        self.head_width(width)  # raises if num_heads does not divide the width
        return MambaMixer(self, width)


class MambaState(NamedTuple):
    """State of a causal mixer.

    Attributes:
        window: The last inputs of the convolution, [B, conv_size - 1, expand * D].
        attention: State of the state space model, with one head per channel.
    """

    window: Window
    attention: DecayState


class MambaMixer(Mixer):
    """W_out [silu(W_z x) * sum over directions of SSM(silu(conv(W_x x)))].

    Source: Vim, arXiv:2401.09417, Algorithm 1; in one direction Mamba, arXiv:2312.00752, Sec. 3.4.
    Vim's released code halves the sum of both directions, which W_out may absorb.
    """

    def __init__(self, config: MambaMixerConfig, width: int) -> None:
        super().__init__()
        self.config = config
        inner = config.expand * width
        self.in_widths = [inner] * (1 if config.gate == "none" else 2)  # x and z
        self.in_proj = nn.Linear(width, sum(self.in_widths), bias=False)
        rank = math.ceil(width / 16) if config.step_rank is None else config.step_rank
        self.scans = nn.ModuleList(SelectiveSSM(config, inner, rank) for _ in config.is_backward)
        self.out_proj = nn.Linear(inner, width, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        for scan in self.scans:
            assert isinstance(scan, SelectiveSSM)
            k, q = scan.key_query_proj.weight.chunk(2)
            scan.decay.init_weights(q, k, v=k[:0])  # values have no projection

    def forward(
        self, x: Hidden, grid: Grid, *, keep: Keep | None = None, state: MambaState | None = None
    ) -> tuple[Hidden, MambaState | None]:
        config = self.config
        check_tokens(x, grid, keep)
        if state is not None:
            config.check_state(state, grid)
            self.check_state(state, MambaState, causal=config.is_causal)
        moves = config.prefix_position == "middle"
        x, real = masked(x, keep), keep
        if moves:
            x, real = _move_prefix([x, real], grid)
        u, *gates = self.in_proj(x).split(self.in_widths, dim=-1)
        outputs: list[Tensor] = []
        new_state: Any = None
        for scan, backward in zip(self.scans, config.is_backward, strict=True):
            inputs = (u, real)
            v, scan_keep = map(flipped, inputs) if backward else inputs
            y, new_state = scan(v, keep=scan_keep, state=state, group=scan_group(backward=backward))
            outputs.append(flipped(y) if backward else y)
        y = sum(outputs[1:], start=outputs[0])
        for z in gates:
            y = y * GATES[config.gate](z)
        o = self.out_proj(y.to(x.dtype))
        if moves:
            (o,) = _move_prefix([o], grid, back=True)
        return masked(o, keep), new_state if config.is_causal else None


class SelectiveSSM(nn.Module):
    """h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t, y_t = C_t h_t + D u_t with u = silu(conv(x)).

    Each channel has its own state h of N channels, with decays A. B, C and dt are functions of u.
    In terms of `decay_attention`, each channel is a head with queries C, keys dt B and values u of
    one channel.

    Source: Mamba, arXiv:2312.00752, Algorithm 2 and Sec. 3.6 (initial values).
    """

    def __init__(self, config: MambaMixerConfig, inner: int, rank: int) -> None:
        super().__init__()
        self.config = config
        self.conv = ShortConvolution(inner, config.conv_size)
        groups = config.num_heads
        self.key_query_proj = nn.Linear(inner, 2 * groups * config.state_size, bias=False)  # B, C
        self.decay = MambaDecayConfig(rank=rank).build(
            width=inner, num_heads=inner, head_width=config.state_size
        )
        self.skip = nn.Parameter(torch.ones(inner)) if config.skip else None

    def forward(
        self,
        x: Hidden,
        *,
        keep: Keep | None = None,
        state: MambaState | None = None,
        group: Group | None = None,
    ) -> tuple[Hidden, MambaState]:
        """Read tokens forward; see `Mixer.forward` and the ops for the arguments."""
        config = self.config
        window, attention = (None, None) if state is None else state
        u, window = self.conv(x, keep=keep, state=window, group=group)
        u = F.silu(u)
        k, q = map(self._channels, self.key_query_proj(u).chunk(2, dim=-1))
        log_decay, dt = self.decay(u)
        # Sums may overflow float16.
        (u,) = to_accumulation_dtype(u)
        new_state: Any
        o, new_state = decay_attention(
            q, k * dt, u.unsqueeze(-1), log_decay, causal=True, keep=keep, state=attention,
            form=self._form(x), chunk_size=config.chunk_size, return_state=config.is_causal,
            group=group,
        )  # fmt: skip
        o = o.squeeze(-1)
        o = o if self.skip is None else o + self.skip * u
        return o, MambaState(window, new_state)

    def _form(self, x: Hidden) -> Form:
        # Compilers unroll the loop over tokens.
        is_slow = x.is_cuda or torch.compiler.is_compiling()
        return "recurrent" if self.config.form == "auto" and not is_slow else self.config.form

    def _channels(self, x: Hidden) -> Keys:
        """Repeat the state channels of each group for the channels of the group."""
        groups = self.config.num_heads
        x = x.unflatten(-1, (groups, 1, -1))
        return x.expand(-1, -1, -1, self.conv.out_channels // groups, -1).flatten(2, 3)


def _move_prefix(tensors: Sequence[Tensor | None], grid: Grid, *, back: bool = False) -> list[Any]:
    """Move the prefix to the middle of the grid's tokens, or back; masks may be None."""
    x, group = tensors[0], sequence_group(None)
    assert x is not None, "tokens come before masks"
    full_grid = grid
    if group is not None:
        full_grid, lengths = whole_grid(group, grid, x)
    sizes = full_grid.prefix, (full_grid.tokens - full_grid.prefix) // 2
    first, second = sizes[::-1] if back else sizes
    if group is None:
        return [_swapped(y, first, second) for y in tensors]
    order = _swapped(torch.arange(full_grid.tokens).unsqueeze(0), first, second)[0]
    permutation = Permutation(order, lengths, group.rank, x.device)
    permuted = iter(permutation(group, [y for y in tensors if y is not None]))
    return [None if y is None else next(permuted) for y in tensors]


def _swapped(x: Tensor | None, first: int, second: int) -> Any:
    """Swap the first `first` tokens with the next `second` ones; x may be None."""
    if x is None or not first or not second:
        return x
    a, b, rest = x.split([first, second, x.shape[1] - first - second], dim=1)
    return torch.cat([b, a, rest], dim=1)
