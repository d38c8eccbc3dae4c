"""Base classes of linear attention mixers: project, convolve, map, scan, norm, gate, project.

A mixer defines its queries, keys, values and decays, and the op that scans them. `LinearAttention`
does the rest: directions, snake scans, convolutions, masks, packed sequences, states,
cross-attention, the norm, the gate and both projections.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor, nn

from onescan.checks import check_choice, check_positive
from onescan.layers.basic import EPS, Gate, NormName, build_norm, normalized
from onescan.layers.convolution import ShortConvolution, Window
from onescan.layers.mixers.contract import (
    DirectedMixerConfig,
    Mixer,
    ScanName,
    check_blocks,
    check_packing,
    check_tokens,
    flipped,
    masked,
)
from onescan.layers.mixers.projections import Projections, merged_projections
from onescan.layers.scans import SnakeScans
from onescan.ops.gating import gated
from onescan.ops.numerics import is_autocast_enabled, to_autocast_dtype
from onescan.ops.packing import Packing
from onescan.ops.parallel import SequenceGroup, scan_group, sequence_group
from onescan.shapes import (
    Grid,
    Hidden,
    Keep,
    LowerBound,
    Memory,
    MemoryMask,
    Position,
    Queries,
    Values,
)

ConvSize = int | Literal["auto"] | None

# Kernel sizes for conv_size="auto": 3 neighbors on one side, or on both sides as in Hydra
CAUSAL_CONV, CENTERED_CONV = 4, 7


@dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig(DirectedMixerConfig, ABC):
    """Fields of all linear attention mixers."""

    key_width: int | None = None
    """Query and key channels per head. None for width / num_heads."""
    value_width: int | None = None
    """Value channels per head. None for width / num_heads."""
    scan: ScanName = "flat"
    """Scan tokens in row-major order ("flat"), or average one snake scan along each axis
    ("natural")."""
    causal_block: int | None = None
    """Tokens per block of a blockwise causal mixer: each token reads its own block in both
    directions, and all earlier blocks. Useful to generate images or video block by block, such as
    by rows or frames. There is a state after each block, and the convolution is causal. Requires
    direction="both", scan="flat" and a grid without a prefix."""
    conv_size: ConvSize = None
    """Kernel size of a short convolution of queries, keys and values along each scan, before their
    activations. It reads the current token and those before it in the mixer's direction. With
    direction="both", it is centered and requires an odd size. None omits it; "auto" is 4, as in
    DeltaNet and flash-linear-attention, or 7 if centered."""
    conv_bias: bool = False
    """Add a bias to the convolution."""
    norm: NormName = "none"
    """Norm of the output, computed over all heads together."""
    norm_heads: bool = False
    """Compute the norm over each head separately, with weights that all heads share."""
    norm_eps: float = EPS
    """Epsilon of the norm of the output."""
    gate: Gate = "none"
    """Activation of an output gate, which multiplies the normalized output; "none" omits the gate
    and its parameters."""
    gate_rank: int | None = None
    """Rank of the gate's projection; None is full rank."""
    bias: bool = False
    """Add biases to the projections."""
    chunk_size: int = 64
    """Tokens per chunk of the chunk form."""

    @property
    def reads_one_side(self) -> bool:
        """Whether each scan reads only the tokens before a token, in the order of the scan."""
        return self.direction != "both"

    @property
    def state_block(self) -> int | None:
        if self.scan == "natural":
            return None
        return 1 if self.direction == "forward" else self.causal_block

    @property
    def skips_padding(self) -> bool:
        return self.causal_block is None

    @property
    def takes_packing(self) -> bool:
        """Whether the op can separate packed sequences: in a flat scan without a convolution."""
        takes_scan = self.scan == "flat" and self.direction in ("both", "forward")
        return takes_scan and self.conv_size is None

    @property
    def takes(self) -> frozenset[str]:
        return frozenset({"cu_seqlens"} if self.takes_packing else ())

    def key_channels(self, width: int) -> int:
        """Return the query and key channels per head."""
        return self.key_width or self.head_width(width)

    def value_channels(self, width: int) -> int:
        """Return the value channels per head."""
        return self.value_width or self.head_width(width)

    def check_shared_fields(self) -> None:
        """Raise ValueError if a field of this class is invalid."""
        self.check_direction()
        check_choice("scan", self.scan, get_args(ScanName))
        check_choice("gate", self.gate, get_args(Gate))
        check_positive(chunk_size=self.chunk_size, norm_eps=self.norm_eps)
        if self.causal_block is not None:
            self.check_causal_block(self.causal_block, self.scan)
        for name in ("key_width", "value_width", "gate_rank"):
            if (size := getattr(self, name)) is not None:
                check_positive(**{name: size})
        # where gates are the default, gate="none" alone disables them, whatever their rank
        if type(self).gate == self.gate == "none" and self.gate_rank is not None:
            raise ValueError(
                f"gate_rank is {self.gate_rank} with gate='none', expected gate='sigmoid' or "
                "'silu': without a gate, there is no projection for it"
            )


class LinearAttentionState(NamedTuple):
    """State after some tokens.

    Attributes:
        attention: State of the op.
        window: The last inputs of the convolution, [B, conv_size - 1, channels]; None without one.
        position: Number of tokens seen, without the prefix; an integer tensor in exported programs.
            None if positions are not rotary.
        slice_shape: Sizes of the grid along all axes but the first, which later calls must repeat;
            None with one axis, or if positions are not rotary.
    """

    attention: Any
    window: Window | None = None
    position: Position | None = None
    slice_shape: tuple[int, ...] | None = None


class ScanOptions(NamedTuple):
    """Arguments of an op besides queries, keys, values and decays.

    Attributes:
        angles: Rotary angles, in the order of the tokens; None if positions are not rotary.
        keep: True for real tokens.
        cu_seqlens: Offsets of packed sequences.
        state: State of the op.
        group: Process group in the order of the scan.
    """

    angles: Any
    keep: Keep | None = None
    cu_seqlens: Packing | None = None
    state: Any = None
    group: SequenceGroup | None = None


class LinearAttention(Mixer, ABC):
    """Base class: o = scan of q, k, v and decays, then W_o [Norm(o) * activation(gate)].

    A subclass calls this constructor, builds its own parts, and then calls `build_output`.

    Args:
        config: Config of the mixer.
        width: Width of the tokens.
        values: Value channels of all heads together, which the gate multiplies.
        qkv_widths: Channels of the queries, keys and values, or only of queries and values if the
            decay provides the keys.
        extra_widths: Channels of additional projections, which `decays_of` receives.
    """

    def __init__(
        self,
        config: LinearAttentionConfig,
        width: int,
        *,
        values: int,
        qkv_widths: Sequence[int],
        extra_widths: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.config: Any = config
        self.values = values
        self.qkv_widths = list(qkv_widths)
        # in_proj computes q, k and v, then the gate, or at low rank the input of gate_proj
        self.gate_widths = [] if config.gate == "none" else [config.gate_rank or values]
        self.in_widths = [*self.qkv_widths, *self.gate_widths, *extra_widths]
        self.in_proj = nn.Linear(width, sum(self.in_widths), bias=config.bias)
        self.conv = None
        if (size := config.conv_size) is not None:
            causal = config.reads_one_side or config.causal_block is not None
            if size == "auto":
                size = CAUSAL_CONV if causal else CENTERED_CONV
            channels = sum(self.qkv_widths)
            self.conv = ShortConvolution(channels, size, causal=causal, bias=config.conv_bias)

    def build_output(self, width: int, *, gate_bias: bool) -> None:
        """Build the norm, the gate's second projection and the output projection.

        Args:
            width: Width of the tokens.
            gate_bias: Whether the gate's second projection has a bias.
        """
        config, values = self.config, self.values
        norm_width = values // config.num_heads if config.norm_heads else values
        self.norm = build_norm(config.norm, norm_width, eps=config.norm_eps)
        self.gate_proj = None
        if self.gate_widths and config.gate_rank is not None:
            self.gate_proj = nn.Linear(config.gate_rank, values, bias=gate_bias)
        self.out_proj = nn.Linear(values, width, bias=config.bias)

    @property
    def projections(self) -> Projections:
        return merged_projections(self.qkv_widths, self.out_proj, heads=self.config.num_heads)

    # Methods that subclasses define

    @abstractmethod
    def qkv(self, parts: Sequence[Tensor], angles: Any) -> tuple[Queries, Any, Values]:
        """Compute queries, keys and values, [B, T, H, .], from their parts of `in_proj`.

        Args:
            parts: One tensor [B, T, channels] for each of `qkv_widths`.
            angles: Return value of `angles`.
        """

    @abstractmethod
    def scan(
        self, q: Queries, k: Any, v: Values, decays: Sequence[Any], options: ScanOptions
    ) -> tuple[Tensor, Any]:
        """Scan tokens with the op; return its outputs [B, T, H, V] and its state.

        Args:
            q: Queries.
            k: Keys, as `qkv` returned them.
            v: Values.
            decays: Return value of `decays_of` for this scan.
            options: The other arguments of the op.
        """

    def decays_of(
        self,
        x: Hidden,
        extra: Sequence[Tensor],
        grid: Grid,
        lower_bound: LowerBound | None,
    ) -> list[Sequence[Tensor | None]]:
        """Return decays and other inputs of the op, [B, T, ...] or None.

        The list has one entry per scan, or a single entry that all scans share.

        Args:
            x: Tokens.
            extra: One tensor for each of `extra_widths`.
            grid: Layout of the tokens.
            lower_bound: As in `forward`, for mixers that take it.
        """
        return [()]

    def angles(self, u: Tensor, grid: Grid, start: Position) -> Any:
        """Return the rotary angles of tokens from position `start` on; None if not rotary."""
        return None

    def write(self, k: Any, v: Values, decays: Sequence[Any], options: ScanOptions) -> Any:
        """Return the state of the op after the tokens of a context."""
        raise NotImplementedError

    def read(self, q: Queries, state: Any, angles: Any) -> Values:
        """Return the outputs of queries that read a state returned by `write`."""
        raise NotImplementedError

    def finished(self, o: Tensor) -> Tensor:
        """Transform the outputs of the op, averaged over all scans."""
        return o

    # Methods that all mixers share

    def forward(
        self,
        x: Hidden,
        grid: Grid,
        *,
        keep: Keep | None = None,
        cu_seqlens: Packing | None = None,
        state: LinearAttentionState | None = None,
        lower_bound: LowerBound | None = None,
    ) -> tuple[Hidden, LinearAttentionState | None]:
        config = self.config
        check_tokens(x, grid, keep)
        check_packing(cu_seqlens, config)
        if config.causal_block is not None:
            check_blocks(config.causal_block, grid)
        if state is not None:
            config.check_state(state, grid)
            self.check_state(state, LinearAttentionState, causal=True)
        previous = LinearAttentionState(None) if state is None else state
        x = masked(x, keep)
        parts, gate, extra = self._projected(x)
        start = 0 if previous.position is None else previous.position
        slice_shape = grid.shape[1:] or None
        if previous.slice_shape not in (None, slice_shape):
            raise ValueError(
                f"shape is {grid.shape}, but the state continues a grid with sizes "
                f"{previous.slice_shape} after the first axis: grids of successive calls may "
                "differ only along the first axis"
            )
        angles = self.angles(parts[0], grid, start)
        if state is not None:
            _check_parts(state, window=self.conv is not None, position=angles is not None)
            rows, window = x.shape[0], state.window  # len() would fix them in exported programs
            if window is not None and window.shape[0] != rows:
                raise ValueError(
                    f"state.window has {window.shape[0]} rows, but x has {rows}: expected one for "
                    "each sequence"
                )
        scans = SnakeScans(grid, x) if config.scan == "natural" else None
        decays = self.decays_of(x, extra, grid, lower_bound)
        options = ScanOptions(angles, keep, cu_seqlens, previous.attention)
        o, attention, window = self._scanned(parts, decays, options, previous.window, scans)
        o = masked(self._output(x, o, gate), keep)
        if config.state_block is None or attention is None:
            return o, None
        if angles is None:
            return o, LinearAttentionState(attention, window)
        return o, LinearAttentionState(attention, window, start + _length(x, grid), slice_shape)

    def read_context(
        self,
        x: Hidden,
        context: Memory,
        *,
        grids: tuple[Grid, Grid] | None = None,
        keep: MemoryMask | None = None,
    ) -> Hidden:
        """Mix the tokens of a context into each token of x (cross-attention).

        Args:
            x: Tokens, which provide queries and the gate.
            context: Tokens of the same width, [B, S, D].
            grids: Layouts of x and of the context in the same coordinates, for rotary positions;
                None for no positions.
            keep: True for the real tokens of the context.
        """
        if self.conv is not None:
            raise ValueError(
                "context was given to a mixer with a convolution, expected conv_size=None"
            )
        context = masked(context, keep)
        queries, gate, _ = self._projected(x)
        keys, _, extra = self._projected(context)
        x_angles = context_angles = None
        if grids is not None:
            x_angles, context_angles = (self.angles(queries[0], grid, 0) for grid in grids)
        q, _, _ = self.qkv(queries, None)
        _, k, v = self.qkv(keys, None)
        (decays,) = self.decays_of(context, extra, Grid((context.shape[1],)), None)
        state = self.write(k, v, decays, ScanOptions(angles=context_angles, keep=keep))
        return self._output(x, self.read(q, state, x_angles), gate)

    def _projected(self, x: Hidden) -> tuple[Sequence[Tensor], Tensor | None, Sequence[Tensor]]:
        """Return the inputs of `qkv` (or of the convolution), of the gate and of `decays_of`."""
        if self.conv is None:  # split once, because the gradient of each split is a copy
            parts = self.in_proj(x).split(self.in_widths, dim=-1)
            count = len(self.qkv_widths)
        else:
            widths = [sum(self.qkv_widths), *self.in_widths[len(self.qkv_widths) :]]
            parts, count = self.in_proj(x).split(widths, dim=-1), 1
        gate = parts[count] if self.gate_widths else None
        return parts[:count], gate, parts[count + len(self.gate_widths) :]

    def _scanned(
        self,
        parts: Sequence[Tensor],
        decays: list[Sequence[Tensor | None]],
        options: ScanOptions,
        window: Any,
        scans: SnakeScans | None,
    ) -> tuple[Tensor, Any, Any]:
        """Scan in the mixer's order; return outputs in token order, the op's state and window."""
        backward, keep, angles = self.config.direction == "backward", options.keep, options.angles
        group = scan_group(backward=backward)
        inputs: Any
        maps_first = self.conv is None and (scans is None or scans.group is None)
        inputs = self.qkv(parts, angles) if maps_first else parts
        count = len(inputs)
        if scans is not None:
            decays_per_scan = decays if len(decays) > 1 else decays * len(scans.orders)
            inputs = scans.visit([(*inputs, *scan_decays, keep) for scan_decays in decays_per_scan])
        else:
            inputs = (*inputs, *decays[0], keep)
        if backward:
            inputs = [flipped(y) for y in inputs]
            angles = angles.flip(0) if isinstance(angles, Tensor) else angles
        *inputs, keep = inputs
        tokens, op_decays = inputs[:count], inputs[count:]
        if not maps_first:
            if self.conv is not None:
                u, window = self.conv(tokens[0], keep=keep, state=window, group=group)
                tokens = u.split(self.qkv_widths, dim=-1)
            tokens = self.qkv(tokens, angles)
        q, k, v = tokens
        options = options._replace(angles=angles, keep=keep, group=group)
        o, state = self.scan(q, k, v, op_decays, options)
        o = flipped(o) if backward else o
        return self.finished(o if scans is None else scans.mean(o)), state, window

    def _output(self, x: Hidden, o: Tensor, gate: Tensor | None) -> Hidden:
        """Apply the norm, the gate and the output projection."""
        norm_heads = self.config.norm_heads
        o = o if norm_heads else o.flatten(-2)
        o = self._normalized(x, o)
        o = o.flatten(-2) if norm_heads else o
        if gate is not None:
            o = self._gated(o, gate)
        return self.out_proj(o)

    def _gated(self, o: Tensor, gate: Tensor) -> Tensor:
        """Multiply outputs by the activation of the gate, after its second projection if any."""
        gate = gate if self.gate_proj is None else self.gate_proj(gate)
        return gated(to_autocast_dtype(o), gate, self.config.gate)  # norms return float32

    def _normalized(self, x: Hidden, o: Tensor) -> Tensor:
        """Apply the norm; return the dtype of its weights, or else one for `out_proj`."""
        if getattr(self.norm, "weight", None) is not None:
            return normalized(self.norm, o)
        return self.norm(o).to(o.dtype if is_autocast_enabled(x) else x.dtype)


def _check_parts(state: LinearAttentionState, **expected: bool) -> None:
    """Raise ValueError if a state belongs to a mixer with other parts."""
    for name, is_expected in expected.items():
        part = getattr(state, name)
        if (part is not None) != is_expected:
            described = "None" if part is None else "not None"
            has = "has" if is_expected else "has no"
            raise ValueError(
                f"state.{name} is {described}, but this mixer {has} {NEEDED_BY[name]}: the state "
                "belongs to another mixer"
            )


NEEDED_BY = {"window": "short convolutions", "position": "rotary positions"}


def _length(x: Hidden, grid: Grid) -> Position:
    """Return the number of tokens without the prefix, summed over all ranks."""
    group = sequence_group(None)
    if group is None:
        return x.shape[1] - grid.prefix
    return sum(group.without_prefix().lengths(x[:, grid.prefix :]))
