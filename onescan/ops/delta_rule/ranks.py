"""States of the delta rule over the ranks of a group; see `onescan.ops.parallel`.

The chunks of a rank update the incoming state S of one direction as S' = P S + U, where P is the
product of their transitions, a K x K matrix per head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from onescan.ops.chunks import chunk_scan
from onescan.ops.collectives import State, carry
from onescan.ops.parallel import SequenceGroup
from onescan.shapes import KeyValue


class EnteringStates:
    """Compute the states that enter a rank, given the updates of its chunks.

    Args:
        ranks: The ranks.
        batch: Samples per direction. The second direction, if any, is the backward one.

    Attributes:
        last: States of the whole sequence after a call, with directions along the batch axis.
    """

    last: KeyValue

    def __init__(self, ranks: SequenceGroup, batch: int) -> None:
        self.ranks, self.batch = ranks, batch

    def __call__(self, kv: KeyValue, transition: Tensor, added: Tensor) -> KeyValue:
        """Return the states that enter this rank.

        Args:
            kv: States before the first rank and after the last one, read there.
            transition: P of each chunk, [B, H, N, K, K].
            added: U of each chunk, [B, H, N, K, V].
        """
        width, ranks = kv.shape[-2], self.ranks
        identity = torch.eye(width, dtype=kv.dtype, device=kv.device).expand_as(transition[:, :, 0])
        _, both = chunk_scan(  # of P and U, side by side
            lambda kv, p, u: p @ kv + u,
            torch.cat([identity, torch.zeros_like(kv)], dim=-1),
            transition,
            F.pad(added, (width, 0)),
        )
        product, total = both.split([width, kv.shape[-1]], dim=-1)
        is_outermost = kv.new_tensor([ranks.is_first, ranks.is_last]).repeat_interleave(self.batch)
        kv = kv * is_outermost[: len(kv), None, None, None]
        updates = (total + product @ kv, product)
        directions = [
            tuple(x[start : start + self.batch] for x in updates)
            for start in range(0, len(kv), self.batch)
        ]
        empty = torch.zeros_like(kv[: self.batch])
        entering, final = zip(*carry(ranks, directions, (empty,), _step, _compose), strict=True)
        self.last = torch.cat([state for (state,) in final])
        return kv + torch.cat([state for (state,) in entering])


def _step(state: State, update: State) -> State:
    """Return S' = P S + U for an update (U, P)."""
    return (update[1] @ state[0] + update[0],)


def _compose(first: State, second: State) -> State:
    """Combine two consecutive updates (U, P) into one."""
    return *_step(first, second), second[1] @ first[1]
