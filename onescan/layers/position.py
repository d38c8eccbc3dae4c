"""Position encodings, applied once, directly after the embedding."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from onescan.checks import can_look_at_values, check_positive, check_whole
from onescan.ops.collectives import gather
from onescan.ops.numerics import accumulation_dtype, to_float64, wrap_angle
from onescan.ops.packing import Packing, PackingShard
from onescan.ops.parallel import SequenceGroup, sequence_group
from onescan.ops.toeplitz_position import ToeplitzState, toeplitz_position
from onescan.shapes import Grid, Hidden, Keep, Places

INTERPOLATION = {1: "linear", 2: "bicubic", 3: "trilinear"}


@dataclass(frozen=True, kw_only=True)
class PositionConfig(ABC):
    """How the model encodes the positions of tokens."""

    @abstractmethod
    def build(self, *, width: int, grid: Grid) -> nn.Module:
        """Build the module for tokens that usually lie on `grid`.

        Its forward takes (x, grid, state, keep) and returns (x, state).
        """


@dataclass(frozen=True, kw_only=True)
class ToeplitzPositionConfig(PositionConfig):
    """MD-TPE: a learned decaying kernel along each axis, or over all axes, for any grid size."""

    hidden_states: int = 64
    """Number of exponentials per channel, axis and direction."""
    bidirectional: bool = False
    """Read both directions along each axis; the paper's Eq. 17 reads only earlier positions."""
    joint: bool = False
    """Use one kernel over all axes (Eq. 16) instead of a sum of one per axis (Eq. 17). Both are
    the same for one axis, as in text."""
    init_length: int | None = None
    """Longest initial half-life in tokens, at least 2. None uses the length of each axis of the
    grid. Text models have no grid, so their half-lives start at 0.5 to 2 tokens unless this is set.
    Half-lives are learned."""

    def build(self, *, width: int, grid: Grid) -> nn.Module:
        check_positive(**{"position.hidden_states": self.hidden_states})
        shape = grid.shape
        if self.init_length is not None:
            check_whole(2, **{"position.init_length": self.init_length})
            shape = (self.init_length,) * len(shape)
        return ToeplitzPosition(width, shape, self.hidden_states, self.bidirectional, self.joint)


@dataclass(frozen=True, kw_only=True)
class AbsolutePositionConfig(PositionConfig):
    """A learned vector per position, as in ViT, interpolated for other grid sizes."""

    def build(self, *, width: int, grid: Grid) -> nn.Module:
        return AbsolutePosition(width, grid)


def sinusoidal_positions(
    positions: Float[Tensor, " T"] | Int[Tensor, " T"], width: int, *, inclusive: bool = False
) -> Float[Tensor, "T D"]:
    """Compute the sine and cosine of n / 10000^(2i / D), i = 0 ... D/2 - 1.

    With `inclusive`, of n / 10000^(2i / (D - 2)), whose last frequency is 1/10000, as in DDPM.

    Angles are computed and reduced in float64, so they are accurate for large positions, except on
    MPS, which does not support float64.

    Source: Transformer, arXiv:1706.03762, Sec. 3.5, but all sines come before all cosines.

    Returns:
        Tensor in float32, or in float64 for float64 positions.

    >>> sinusoidal_positions(torch.tensor([0]), width=4).tolist()
    [[0.0, 0.0, 1.0, 1.0]]
    """
    exponents = to_float64(torch.arange(0, width, 2, device=positions.device))
    exponents = exponents / (width - 2 * inclusive)
    angles = wrap_angle(positions.unsqueeze(1) * 10_000.0**-exponents)
    angles = angles.to(accumulation_dtype(positions.dtype))
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width]


@dataclass(frozen=True, kw_only=True)
class SinusoidalPositionConfig(PositionConfig):
    """Sines and cosines of the position along each axis, as in DiT, for any grid size."""

    def build(self, *, width: int, grid: Grid) -> nn.Module:
        return SinusoidalPosition(width, len(grid.shape))


@dataclass(frozen=True, kw_only=True)
class TokenPositionConfig(PositionConfig):
    """A learned vector per position of a text, as in GPT-2 and BERT; masked tokens have none."""

    max_tokens: int = 1024
    """Number of positions, which is the maximum sequence length."""
    learned: bool = True
    """Learn the vectors; False uses sines and cosines, as in the Transformer."""

    def build(self, *, width: int, grid: Grid) -> nn.Module:
        check_positive(**{"position.max_tokens": self.max_tokens})
        return TokenPosition(width, self.max_tokens, learned=self.learned)


class ToeplitzPosition(nn.Module):
    """MD-TPE: y = sum over axes of a Toeplitz product along that axis; prefix tokens are unchanged.

    Source: LightNet, arXiv:2405.21022, Eq. 17, with a weight for each decay:
    t_n = sum_e weight_e exp(-n exp(log_rate_e)), per channel and axis. Half-lives are initialized
    between half a token and the number in `shape`, but at least 2 tokens. The paper gives no
    initialization. Initial outputs have the scale of x.

    If joint, one Toeplitz product over all axes, Eq. 16. The paper does not parametrize it; here
    each exponential decays along all axes: t_n = sum_e weight_e exp(-sum_s n_s exp(log_rate_se)).
    The axes share weights, so there are (axes + 1) D E parameters in one direction, and
    (2 axes + 2^axes) D E in both, with one kernel for each combination of directions.
    """

    no_weight_decay = frozenset({"log_rate", "weight"})

    def __init__(
        self,
        width: int,
        shape: tuple[int, ...],
        hidden_states: int,
        bidirectional: bool,
        joint: bool = False,
    ) -> None:
        super().__init__()
        axes = len(shape)
        self.bidirectional, self.joint = bidirectional, joint and axes > 1
        half_lives = torch.stack(
            [torch.logspace(-1, math.log2(max(n, 2)), hidden_states, base=2) for n in shape]
        )
        rate = math.log(2) / half_lives  # axes E
        weight = -torch.expm1(-rate) / (hidden_states * axes)
        directions = (2,) if bidirectional else ()
        size = (axes, *directions, width, hidden_states)
        ones = (1,) * (len(size) - 2)
        self_weight = weight.sum(0)  # of a token on itself, the same if joint
        rate, weight = (x.reshape(axes, *ones, -1).expand(size) for x in (rate, weight))
        if self.joint:
            weight = self_weight.expand(*directions * axes, width, hidden_states)
        self.log_rate = nn.Parameter(rate.log())
        self.weight = nn.Parameter(weight * (1 + 0.1 * torch.randn(weight.shape)))

    @property
    def has_state(self) -> bool:
        """Whether a call can continue the previous one along the first axis."""
        return not self.bidirectional and not self.joint

    @property
    def log_decay(self) -> Tensor:
        """-exp(log_rate), which is always at most 0."""
        return -self.log_rate.exp()

    def forward(
        self,
        x: Hidden,
        grid: Grid,
        state: ToeplitzState | None = None,
        keep: Keep | None = None,
        *,
        cu_seqlens: Packing | None = None,
        return_state: bool = False,
    ) -> tuple[Hidden, ToeplitzState | None]:
        """Add positions; for `cu_seqlens` and `return_state`, see `toeplitz_position`."""
        if keep is not None:
            x = x.masked_fill(~keep.unsqueeze(-1), 0)
        tokens = x[:, grid.prefix :] if grid.prefix else x  # the gradient of a slice is a copy
        group = sequence_group(None)
        y, state = toeplitz_position(
            tokens, self.log_decay, self.weight, grid.shape,
            bidirectional=self.bidirectional, joint=self.joint, cu_seqlens=cu_seqlens,
            state=state, return_state=return_state,
            group=None if group is None else group.without_prefix(),
        )  # fmt: skip
        return torch.cat([x[:, : grid.prefix], y], dim=1) if grid.prefix else y, state

    def kernels(self, lags: int) -> Tensor:
        """Return the current kernels, [axes, (2,) D, lags], for lags 0, 1, ...

        A joint kernel is returned along each axis, for lag 0 along the others.
        """
        lag = torch.arange(lags, device=self.log_rate.device)
        powers = (self.log_decay.unsqueeze(-1) * lag).exp()  # .. E lags
        weight: Tensor = self.weight
        if self.joint and self.bidirectional:
            axes = len(self.log_rate)
            per_axis = [weight.movedim(axis, 0).flatten(1, axes - 1)[:, 0] for axis in range(axes)]
            weight = torch.stack(per_axis)  # axes 2 D E
        return torch.einsum("...e,...el->...l", weight.expand_as(self.log_rate), powers)


class AbsolutePosition(nn.Module):
    """Add a learned table, with one row per token, prefix included."""

    no_weight_decay = frozenset({"table"})

    def __init__(self, width: int, grid: Grid) -> None:
        super().__init__()
        if len(grid.shape) not in INTERPOLATION:
            raise ValueError(
                f"grid has {len(grid.shape)} axes, expected 1 to 3 for absolute positions"
            )
        self.grid = grid
        self.table = nn.Parameter(nn.init.trunc_normal_(torch.empty(grid.tokens, width), std=0.02))

    def forward(
        self, x: Hidden, grid: Grid, state: None = None, keep: Keep | None = None
    ) -> tuple[Hidden, None]:
        if (group := sequence_group(None)) is not None:
            return x + self._rank_rows(group, x, grid), None
        table = self.table if grid == self.grid else self._resized(grid)
        return x + table, None

    def _rank_rows(self, group: SequenceGroup, x: Hidden, grid: Grid) -> Tensor:
        """Return the rows of this rank's tokens in the table of the whole grid."""
        lengths = group.lengths(x)
        rows = (sum(lengths) - self.grid.prefix) // math.prod(grid.shape[1:])
        full_grid = Grid((rows, *grid.shape[1:]), self.grid.prefix)
        table = self.table if full_grid == self.grid else self._resized(full_grid)
        return table.split(lengths)[group.rank]

    def _resized(self, grid: Grid) -> Tensor:
        prefix, table = self.table[: self.grid.prefix], self.table[self.grid.prefix :]
        table = table.mT.reshape(1, -1, *self.grid.shape)
        mode = INTERPOLATION[len(grid.shape)]
        table = F.interpolate(table, size=grid.shape, mode=mode, align_corners=False)
        return torch.cat([prefix, rearrange(table, "1 d ... -> (...) d")])


def check_masked_position(position: PositionConfig | None) -> None:
    """Raise ValueError if images of mixed sizes cannot share a batch with these positions."""
    if isinstance(position, AbsolutePositionConfig):
        raise ValueError(
            "keep was given with absolute positions, which are resized to one size per batch; "
            "expected another position encoding"
        )


class SinusoidalPosition(nn.Module):
    """Add sines and cosines, with the same number of channels per axis, except to prefix tokens.

    Source: DiT, arXiv:2212.09748, which adopts them from ViT.
    """

    def __init__(self, width: int, axes: int) -> None:
        super().__init__()
        if width % (2 * axes):
            raise ValueError(
                f"width is {width}, expected a multiple of {2 * axes}: sines and cosines for each "
                f"of {axes} axes"
            )
        self.width = width

    def forward(
        self, x: Hidden, grid: Grid, state: None = None, keep: Keep | None = None
    ) -> tuple[Hidden, None]:
        width = self.width // len(grid.shape)
        positions = [torch.arange(n, device=x.device) for n in grid.shape]
        if (group := sequence_group(None)) is not None:
            positions[0] = positions[0] + group.first_position(grid.shape, x.device)
        waves_per_axis = [sinusoidal_positions(coordinates, width) for coordinates in positions]
        per_axis = [
            waves.reshape(*(n if i == j else 1 for j, n in enumerate(grid.shape)), width).expand(
                *grid.shape, width
            )
            for i, waves in enumerate(waves_per_axis)
        ]
        table = torch.cat(per_axis, dim=-1).flatten(0, -2).to(x.dtype)
        return x + F.pad(table, (0, 0, grid.prefix, 0)), None


class TokenPosition(nn.Module):
    """Add a table with one row per position; the state is the number of tokens so far.

    If it is not learned, it contains sines and cosines divided by sqrt(width). The Transformer,
    arXiv:1706.03762, Sec. 3.4, multiplies the token embeddings by sqrt(width) instead.
    """

    no_weight_decay = frozenset({"table"})
    table: Tensor

    def __init__(self, width: int, max_tokens: int, *, learned: bool = True) -> None:
        super().__init__()
        if learned:
            table = nn.init.trunc_normal_(torch.empty(max_tokens, width), std=0.02)
            self.table = nn.Parameter(table)
        else:
            waves = sinusoidal_positions(torch.arange(max_tokens), width)
            self.register_buffer("table", waves * width**-0.5)

    def forward(
        self,
        x: Hidden,
        grid: Grid,
        state: Places | None = None,
        keep: Keep | None = None,
        *,
        cu_seqlens: Packing | None = None,
    ) -> tuple[Hidden, Places]:
        real = x.new_ones(x.shape[:2], dtype=torch.long) if keep is None else keep.long()
        count, after = _counts(real, cu_seqlens)
        if state is not None:
            count, after = count + state.unsqueeze(1), after + state
        needed = after if cu_seqlens is None else count
        if can_look_at_values(needed) and needed.numel() and needed.max() > len(self.table):
            raise ValueError(
                f"a sequence has {int(needed.max())} tokens, expected at most {len(self.table)}, "
                "the number of positions of the model"
            )
        return x + self.table[(count - 1).clamp(min=0)], after


def _counts(real: Tensor, packing: Packing | None) -> tuple[Tensor, Places]:
    """Return how many real tokens each sequence has up to each token, and in total.

    Args:
        real: 1 for the real tokens of this rank, [B, T], and 0 for others.
        packing: Packed sequences; the total is that of the last sequence of each row.
    """
    group = sequence_group(None)
    tokens = real.shape[1]
    if group is not None:
        real = F.pad(real, (0, 1 if tokens == 0 else 0))
    count = real.cumsum(dim=1)
    if packing is not None:
        count = count - (count - real).where(packing.starts, 0).cummax(dim=1).values
    if group is None:
        return count, count[:, -1]
    (totals,) = gather(group, count[:, -1])  # W B
    before = totals[: group.rank]
    if isinstance(packing, PackingShard):  # only the first sequence continues
        is_same = packing.tails[: group.rank] == packing.heads[group.rank]
        is_continued = packing.starts.cumsum(dim=1) == 0
        count = count + (before * is_same).sum(dim=0).unsqueeze(1) * is_continued
    else:
        count = count + before.sum(dim=0).unsqueeze(1)
    return count[:, :tokens], totals.sum(dim=0)
