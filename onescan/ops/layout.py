"""Layout of the tokens of a call: direction, blocks, masks, packed sequences and ranks.

Ops take these as separate arguments. `layout_of` checks them and collects them in a `Layout`.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from onescan.checks import check_floating, check_shapes
from onescan.ops.blocks import (
    Blocks,
    block_bounds,
    block_ends,
    check_block_offsets,
    check_causal_block,
)
from onescan.ops.packing import Packing
from onescan.ops.parallel import Group, SequenceGroup, one_token, packing_over, sequence_group
from onescan.shapes import Keep


class Layout(NamedTuple):
    """Layout of the tokens of a call.

    Attributes:
        causal: Whether each token reads only itself and earlier tokens.
        causal_block: Tokens per block of a blockwise causal call, or offsets of its blocks; None
            for a single block.
        keep: True for real tokens; None if all are real.
        packing: The sequences that share a row; None if each row is one sequence.
        ranks: The ranks across which the token axis is sharded; None for one process.
        lengths: Number of tokens of each rank, if there are blocks and ranks.
        tokens: Number of tokens of this rank.
        device: Device of the tokens.
    """

    causal: bool
    causal_block: Blocks | None
    keep: Keep | None
    packing: Packing | None
    ranks: SequenceGroup | None
    lengths: list[int] | None
    tokens: int
    device: torch.device

    @property
    def is_empty(self) -> bool:
        """Whether this rank has no tokens.

        It then processes one masked token, so that it takes part in the same collectives as others.
        """
        return self.ranks is not None and self.tokens == 0

    @property
    def limits(self) -> str:
        """The options that limit the choice of implementations, for errors."""
        given = {
            "causal_block": self.causal_block,
            "cu_seqlens": self.packing,
            "group": self.ranks,
        }
        names = [f"causal={self.causal}", *(name for name, x in given.items() if x is not None)]
        return ", ".join([*names[:-2], " and ".join(names[-2:])])

    @property
    def block_size(self) -> int | None:
        """Tokens per block, if all blocks have the same number."""
        block = self.causal_block
        return None if isinstance(block, Tensor) else block  # a SymInt during export

    @property
    def continues(self) -> bool:
        """Whether the call returns a single state, from which later tokens continue."""
        return self.causal or self.causal_block is not None

    @property
    def restarts(self) -> bool:
        """Whether a direction restarts from an empty state somewhere."""
        return self.packing is not None or self.causal_block is not None

    @property
    def starts(self) -> Bool[Tensor, "_ T"] | None:
        """True where the forward direction restarts from an empty state; None if it never does."""
        return None if self.packing is None else self.packing.starts

    @property
    def ends(self) -> Bool[Tensor, "_ T"] | None:
        """True where the backward direction restarts from an empty state; None if it never does."""
        if self.causal:
            return None
        ends = None if self.packing is None else self.packing.ends
        if self.causal_block is None:
            return ends
        if self.is_empty:  # the masked token ends no block
            return torch.zeros(1, 1, dtype=torch.bool, device=self.device)
        of_blocks = block_ends(self.causal_block, self._positions, self.packing)
        return of_blocks if ends is None else ends | of_blocks

    @property
    def bounds(self) -> tuple[Tensor, Tensor] | None:
        """Where the block of each token begins and ends; None without offsets of blocks."""
        if not isinstance(self.causal_block, Tensor):
            return None
        if self.is_empty:  # the masked token is a block
            return torch.tensor([0], device=self.device), torch.tensor([1], device=self.device)
        return block_bounds(self.causal_block, self._positions)

    @property
    def _positions(self) -> Tensor:
        """Number of tokens before each token, counted over all ranks."""
        before = 0
        if self.ranks is not None and self.lengths is not None:
            before = sum(self.lengths[: self.ranks.rank])
        return before + torch.arange(self.tokens, device=self.device)

    def pad_if_empty(self, *tensors: Any, dim: int = 1) -> tuple[Any, ...]:
        """Return tensors, [B, T, ...], with one token of zeros if this rank has none.

        Other arguments are returned unchanged; the op rejects them later.
        """
        return one_token(*tensors, dim=dim) if self.is_empty else tensors

    def unpad_if_empty(self, o: Tensor) -> Tensor:
        """Return outputs, [B, T, ...], without the token that `pad_if_empty` added."""
        return o[:, :0] if self.is_empty else o


def layout_of(
    q: Any,
    pattern: str = "B T H K",
    *,
    name: str = "q",
    causal: Any = False,
    causal_block: Any = None,
    keep: Any = None,
    cu_seqlens: Any = None,
    state: Any = None,
    group: Group | None = None,
) -> Layout:
    """Return the layout of a call with tokens q, called `name`, from the arguments of an op.

    Raises:
        ValueError: If q or an argument is invalid, or two arguments cannot be combined.

    >>> layout = layout_of(torch.ones(1, 5, 1, 1), causal_block=2)
    >>> layout.continues, layout.ends.tolist()
    (True, [[False, True, False, True, False]])
    """
    ranks = sequence_group(group)
    if not isinstance(causal, bool):
        raise ValueError(f"causal is {causal!r}, expected True or False")
    if causal_block is not None:
        check_causal_block(causal_block, causal=causal, cu_seqlens=cu_seqlens, ranks=ranks)
    if isinstance(keep, Tensor) and keep.dtype != torch.bool:
        raise ValueError(f"keep has dtype {keep.dtype}, expected torch.bool, True for real tokens")
    check_floating(**{name: q})
    check_shapes(**{name: (q, pattern)})
    lengths = None
    if ranks is not None and causal_block is not None:
        lengths = ranks.lengths(q)  # exchange them only once
    if isinstance(causal_block, Tensor):
        check_block_offsets(causal_block, q, q.shape[1] if lengths is None else sum(lengths))
    packing = packing_over(ranks, cu_seqlens, q, state=state)
    layout = Layout(causal, causal_block, keep, packing, ranks, lengths, q.shape[1], q.device)
    if layout.is_empty:
        return layout._replace(keep=q.new_zeros(q.shape[0], 1, dtype=torch.bool))
    return layout
