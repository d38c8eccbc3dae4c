"""Build the blocks of a model, and apply them one after another."""

from collections.abc import Collection, Sequence, Sized
from typing import Any, NamedTuple

from torch import nn

from onescan.layers.block import Block
from onescan.layers.mixers import LowerBounds, MixerConfig, build_lower_bounds
from onescan.layers.tokens import Documents
from onescan.shapes import Grid, Hidden, Keep, LowerBound, Pooled


class StackOutput(NamedTuple):
    """Return value of `apply_blocks`.

    Attributes:
        x: Tokens after the last block, ``[B, T, D]``.
        states: State of each block's mixer after the last token; empty without incoming states.
        selected: Tokens after each selected block, in the order of the blocks.
    """

    x: Hidden
    states: tuple[Any, ...]
    selected: list[Hidden]


def build_blocks(
    depth: int,
    width: int,
    *,
    mixer: MixerConfig,
    kind: type[Block] = Block,
    drop_path: float = 0.0,
    **options: Any,
) -> tuple[nn.ModuleList, LowerBounds | None]:
    """Return the blocks of a model, and the lower bounds of their decays if its mixers read them.

    Args:
        depth: Number of blocks.
        width: Features per token.
        mixer: Mixer of the model; block i has ``mixer.for_layer(i)``.
        kind: Class of the blocks.
        drop_path: Drop rate of the last block; it increases linearly from 0.
        options: Other arguments of each block.
    """
    last = max(depth - 1, 1)
    blocks = nn.ModuleList(  # lazily, because the depth in a damaged file may be huge
        kind(width, mixer=mixer.for_layer(i), drop_path=drop_path * i / last, **options)
        for i in range(depth)
    )
    block: Any
    for i, block in enumerate(blocks):
        mixer.init_for_layer(block.mixer, i, depth)
    return blocks, build_lower_bounds(mixer, depth=depth, width=width)


def lower_bound_of_each(
    blocks: Sized, lower_bounds: LowerBounds | None
) -> Sequence[LowerBound | None]:
    """Return the lower bound that each block's mixer reads; None for mixers that read none."""
    return [None] * len(blocks) if lower_bounds is None else lower_bounds()[: len(blocks)].unbind()


def apply_blocks(
    blocks: nn.ModuleList,
    lower_bounds: LowerBounds | None,
    x: Hidden,
    grid: Grid,
    *,
    condition: Pooled | None = None,
    keep: Keep | None = None,
    documents: Documents | None = None,
    states: Sequence[Any] | None = None,
    selected: Collection[int] = (),
) -> StackOutput:
    """Apply blocks one after another.

    Args:
        blocks: The blocks.
        lower_bounds: The lower bounds of their decays, if their mixers read them.
        x: Tokens before the first block, ``[B, T, D]``.
        grid: Layout of the tokens.
        condition: Condition of a `ConditionedBlock`, ``[B, D]``.
        keep: True for real tokens, ``[B, T]``.
        documents: Packed documents, which are mixed separately.
        states: State of each block's mixer before the first token, or None for each block at the
            beginning. If omitted, no states are returned.
        selected: Indices of blocks whose outputs to return.
    """
    embedding = x
    after: list[Any] = []
    outputs: list[Hidden] = []
    bounds = lower_bound_of_each(blocks, lower_bounds)
    before = [None] * len(blocks) if states is None else states
    for i, (block, bound, state) in enumerate(zip(blocks, bounds, before, strict=True)):
        x, state = block(
            x, grid, condition=condition, embedding=embedding, keep=keep, documents=documents,
            state=state, lower_bound=bound,
        )  # fmt: skip
        if states is not None:
            after.append(state)
        if i in selected:
            outputs.append(x)
    return StackOutput(x, tuple(after), outputs)
