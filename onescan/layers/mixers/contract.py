"""The interface of mixers, which makes them interchangeable in a block."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import get_annotations
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from onescan.checks import check_choice, check_whole
from onescan.configs import CheckedConfig
from onescan.layers.mixers.projections import Projections
from onescan.messages import named_type
from onescan.ops.packing import Packing
from onescan.ops.parallel import scan_group, sequence_group
from onescan.shapes import Grid, Hidden, Keep

Direction = Literal["both", "forward", "backward", "alternating"]
ScanName = Literal["flat", "natural"]

PAIR = 2  # outputs and state, which mixers return


@dataclass(frozen=True, kw_only=True)
class MixerConfig(CheckedConfig, ABC):
    """Config of the layer that mixes information between tokens."""

    num_heads: int = 6
    """Number of heads; must divide the width."""

    @abstractmethod
    def build(self, *, width: int, axes: int) -> "Mixer":
        """Build the module for tokens of this width on a grid with this number of axes.

        Raises:
            ValueError: If fields are incompatible with each other, or with width or axes.
        """

    def for_layer(self, index: int) -> "MixerConfig":
        """Return the config for block `index` of a model, counted from 0; by default self."""
        return self

    def init_for_layer(self, mixer: "Mixer", index: int, depth: int) -> None:
        """Prepare a mixer whose initial weights depend on its block. Does nothing by default.

        Args:
            mixer: The mixer of block `index`, built from `for_layer(index)`.
            index: Index of the block, counted from 0.
            depth: Number of blocks.
        """

    def for_grid(self, grid: Grid) -> "MixerConfig":
        """Return the config for a model whose tokens usually lie on `grid`; by default the same."""
        return self

    @property
    def fits_any_grid(self) -> bool:
        """Whether a mixer's weights fit grids of other sizes than the one given to `for_grid`."""
        return True

    @property
    def state_block(self) -> int | None:
        """Number of tokens per block. A call can continue from the state at the end of any block.

        1 for causal mixers, which have a state after each token; None if there is no state.
        """
        return None

    @property
    def is_causal(self) -> bool:
        """Whether each token reads only itself and earlier tokens."""
        return self.state_block == 1

    @property
    def state_grows(self) -> bool:
        """Whether the state of a causal mixer grows with every token, as a cache of keys does."""
        return False

    @property
    def takes(self) -> frozenset[str]:
        """Names of additional arguments of the mixer's forward.

        "embedding": The tokens before the first block.
        "lower_bound": The smallest decay of each channel, which models learn for each block.
        "cu_seqlens": The offsets of packed sequences. If a mixer does not take them, blocks put
        each sequence into a separate row.
        """
        return frozenset()

    @property
    def prefix_reads_grid(self) -> bool:
        """Whether prefix tokens, such as a class token, read any other tokens."""
        return self.state_block is None

    @property
    def normalizes_input(self) -> bool:
        """Whether the mixer normalizes its input itself, so that its block needs no norm for it."""
        return False

    @property
    def output_is_bounded(self) -> bool:
        """Whether tokens stay bounded when the mixer's output is added to them.

        Blocks then do not scale the output up for stochastic depth, or apply dropout to it.
        """
        return False

    @property
    def skips_padding(self) -> bool:
        """Whether real tokens are mixed as if masked tokens did not exist, wherever they are.

        In other mixers, masked tokens occupy positions, so text networks first move the real tokens
        of each row together.
        """
        return False

    def check_padding(self, grid: Grid) -> None:
        """Raise ValueError if padding a grid would change how its real tokens are mixed.

        Only the number of axes and the prefix of `grid` matter.
        """

    def head_width(self, width: int) -> int:
        """Return the width of one head.

        Raises:
            ValueError: If the number of heads does not divide the width.
        """
        if self.num_heads < 1 or width % self.num_heads:
            raise ValueError(f"width {width} is not a multiple of num_heads {self.num_heads}")
        return width // self.num_heads


@dataclass(frozen=True, kw_only=True)
class DirectedMixerConfig(MixerConfig, ABC):
    """Config of a mixer that reads tokens in one direction or in both."""

    direction: Direction = "both"
    """Tokens to read: all ("both"), earlier tokens ("forward") or later tokens ("backward").
    "alternating" switches between forward and backward from block to block, beginning with forward.
    """

    directions: ClassVar[tuple[Direction, ...]] = get_args(Direction)

    @property
    def state_block(self) -> int | None:
        return 1 if self.direction == "forward" else None

    @property
    def prefix_reads_grid(self) -> bool:
        return self.direction != "forward" and self.state_block is None

    def for_layer(self, index: int) -> "DirectedMixerConfig":
        if self.direction != "alternating":
            return self
        return replace(self, direction="backward" if index % 2 else "forward")

    @property
    def is_backward(self) -> tuple[bool, ...]:
        """Whether each scan of a mixer with one scan per direction is backward."""
        return {"forward": (False,), "backward": (True,)}.get(self.direction, (False, True))

    def check_direction(self) -> None:
        """Raise ValueError for a direction that does not apply to a single mixer."""
        check_choice("direction", self.direction, self.directions)
        if self.direction == "alternating":
            raise ValueError(
                "direction is 'alternating', which describes a whole model: build each mixer from "
                "for_layer(index)"
            )

    def check_causal_block(self, causal_block: Any, scan: str) -> None:
        """Raise ValueError if the block size is invalid, or scan or direction do not support it."""
        check_whole(1, causal_block=causal_block)
        if self.direction != "both" or scan != "flat":
            raise ValueError(
                f"causal_block is {causal_block} with direction={self.direction!r} and "
                f"scan={scan!r}, expected 'both' and 'flat'"
            )

    def check_state(self, state: Any, grid: Grid) -> None:
        """Raise ValueError if a call on this grid cannot continue from the state."""
        if self.state_block is None:
            raise ValueError("state was given to a mixer that is not causal")
        check_continued(grid)


class Mixer(nn.Module, ABC):
    """Layer that mixes information between tokens.

    Projections of the same input are computed by a single linear layer, `in_proj`, and split,
    because one large matrix product is faster than several small ones. Call `in_proj` as a module,
    so that LoRA, quantization, offloading and autocast apply.
    """

    @abstractmethod
    def forward(
        self, x: Hidden, grid: Grid, *, keep: Keep | None = None, state: Any = None
    ) -> tuple[Hidden, Any]:
        """Mix the tokens.

        Args:
            x: Tokens, already normalized unless the mixer `normalizes_input`.
            grid: Layout of the tokens. Later calls of a causal mixer continue the first one along
                the first axis, with all other sizes the same and without a prefix.
            keep: True for real tokens. Other tokens have zero output, are not read and may be NaN.
                They keep their positions on the grid, unless the mixer `skips_padding`.
            state: State returned by a previous call, for causal mixers only. None at the beginning.

        Returns:
            The mixed tokens, and the state after the last token (None if there is none).

        Inside `sequence_parallel`, tokens, grid and mask are those of this rank, whose shard of the
        first axis may be empty; only the first rank has a prefix. Pass a mask or a state on all
        ranks or on none. Only the first rank reads the incoming state. The returned state is that
        of the whole sequence.
        """

    @property
    def projections(self) -> Projections:
        """The mixer's projections of queries, keys, values and outputs; none by default.

        A mixer lists those that have the same meaning as in softmax attention, so that it can be
        initialized with the projections of another mixer.
        """
        return {}

    def check_state(self, state: Any, kind: type, *, causal: bool) -> None:
        """Raise ValueError if a mixer cannot continue from a state."""
        if not causal:
            raise ValueError("state was given to a mixer that is not causal")
        if not isinstance(state, kind):
            raise ValueError(f"state is {named_type(state)}, expected a {kind.__name__}")

    def after_masked(self, before: Any, after: Any, keep: Keep) -> Any:
        """Return the state after one token, without counting a masked token as a position.

        Text networks call this for causal mixers that do not skip padding. By default, rows with
        a masked token keep the state before it; mixers whose state counts positions override this.

        Args:
            before: State before the token.
            after: State that `forward` returned for the token and its mask.
            keep: True for a real token, [B, 1].
        """
        return rows_where(keep, after, before)

    def init_weights(self) -> None:
        """Initialize weights for which the model's default is unsuitable; models call this last."""


def check_is_config(config: Any) -> None:
    """Raise ValueError unless this is an instance of a config dataclass of a mixer."""
    if isinstance(config, type):
        raise ValueError(f"config is the class {config.__name__}, expected an instance of it")
    if not isinstance(config, MixerConfig):
        raise ValueError(f"config is {named_type(config)}, expected a MixerConfig")
    kind = type(config)
    if get_annotations(kind) and "__dataclass_fields__" not in vars(kind):
        raise ValueError(
            f"{kind.__name__} declares options, but is not a dataclass: put "
            "@dataclass(frozen=True, kw_only=True) before it"
        )


def call_mixer(mixer: nn.Module, x: Hidden, grid: Grid, **options: Any) -> tuple[Hidden, Any]:
    """Call a mixer, and raise ValueError if it does not return outputs and state."""
    mixed = mixer(x, grid, **options)
    if not (isinstance(mixed, tuple) and len(mixed) == PAIR):
        returned = named_type(mixed)
        if isinstance(mixed, tuple):
            returned += f" of length {len(mixed)}"
        raise ValueError(
            f"{type(mixer).__name__}.forward returned {returned}, expected a pair of outputs and "
            "state, such as (x, None)"
        )
    return mixed


def check_tokens(x: Hidden, grid: Grid, keep: Any) -> None:
    """Raise ValueError unless a grid and a mask are those of x.

    >>> check_tokens(torch.ones(1, 5, 8), Grid((2, 3)), None)
    Traceback (most recent call last):
    ValueError: x has 5 tokens, but Grid(shape=(2, 3), prefix=0) has 6
    """
    if grid.tokens != x.shape[1]:
        raise ValueError(f"x has {x.shape[1]} tokens, but {grid} has {grid.tokens}")
    if keep is not None and (keep.shape != x.shape[:2] or keep.dtype != torch.bool):
        raise ValueError(
            f"keep has shape {tuple(keep.shape)} and dtype {keep.dtype}, expected "
            f"{tuple(x.shape[:2])} and torch.bool: True for each real token of x"
        )


def check_packing(cu_seqlens: Packing | None, config: MixerConfig) -> None:
    """Raise ValueError if packed sequences are given to a mixer that cannot separate them."""
    if cu_seqlens is not None and "cu_seqlens" not in config.takes:
        raise ValueError(
            "cu_seqlens was given to a mixer that cannot separate packed sequences: put each "
            "sequence into a separate row, with keep for the padding"
        )


def check_blocks(causal_block: int, grid: Grid) -> None:
    """Raise ValueError for a grid with a prefix, because blocks begin at the first token.

    >>> check_blocks(4, Grid((2, 4), prefix=1))
    Traceback (most recent call last):
    ValueError: causal_block is 4 with Grid(shape=(2, 4), prefix=1), expected no prefix
    """
    if grid.prefix:
        raise ValueError(f"causal_block is {causal_block} with {grid}, expected no prefix")


def check_continued(grid: Grid) -> None:
    """Raise ValueError if a call on this grid cannot continue another one."""
    if grid.prefix:
        raise ValueError(f"state was given with {grid}, expected no prefix")


def masked(x: Hidden, keep: Keep | None) -> Hidden:
    """Set masked tokens to zero, even if they are NaN."""
    return x if keep is None else x.masked_fill(~keep.unsqueeze(-1), 0)


def rows_where(keep: Keep, state: Any, other: Any) -> Any:
    """Select rows of `state` where keep, [B, 1], is True, and rows of `other` elsewhere.

    Numbers have no rows and are taken from `state`.
    """
    if isinstance(state, tuple):
        parts = [rows_where(keep, a, b) for a, b in zip(state, other, strict=True)]
        return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
    if not isinstance(state, Tensor) or not state.ndim:
        return state
    return torch.where(keep.view(-1, *(1,) * (state.ndim - 1)), state, other)


def flipped(x: Tensor | None) -> Any:
    """Reverse the order of tokens; None and tensors per head, [H], are returned unchanged."""
    return x if x is None or x.ndim == 1 else x.flip(1)


def both_directions(
    scan: Callable[..., Tensor],
    forward: Sequence[Tensor | None],
    backward: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor]:
    """Run a causal scan forward and backward over the tokens.

    In a single process, both directions run in one call, concatenated along the batch. On several
    ranks, they run in two calls.

    Args:
        scan: Causal function of the inputs, [B, T, ...], and of `group`, as in the ops.
        forward: Inputs of the forward scan.
        backward: Inputs of the backward scan, in the order of the tokens.

    Returns:
        The outputs of the forward and the backward scan, both in the order of the tokens.
    """
    if sequence_group(None) is None:
        pairs = zip(forward, map(flipped, backward), strict=True)
        inputs = (None if a is None else torch.cat([a, b]) for a, b in pairs)
        past, future = scan(*inputs, group=None).unflatten(0, (2, -1)).unbind()
    else:
        past = scan(*forward, group=scan_group(backward=False))
        future = scan(*map(flipped, backward), group=scan_group(backward=True))
    return past, flipped(future)
