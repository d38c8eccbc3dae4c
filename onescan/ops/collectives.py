"""Collectives with gradients over the ranks of a sequence; see `onescan.ops.parallel`."""

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from onescan.ops.parallel import SequenceGroup, explain_failure, sequence_group

State = tuple[Tensor, ...]


def gather(group: SequenceGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Gather tensors that have the same shape on all W ranks. Returns [W, ...] for each."""
    return _Gather.apply(group, None, *tensors)


class PendingGather:
    """Start to `gather` tensors. Local work until `wait` overlaps with the exchange."""

    def __init__(self, group: SequenceGroup, *tensors: Tensor) -> None:
        self.group, self.tensors = group, tensors
        self.local = _as_bytes([x.detach().unsqueeze(0) for x in tensors])
        self.gathered = self.local.new_empty(group.size, self.local.shape[1])
        ranks = group.ordered(self.gathered)
        with explain_failure(group):
            self.work = dist.all_gather(ranks, self.local[0], group=group.group, async_op=True)

    def wait(self) -> tuple[Tensor, ...]:
        """Return the results of `gather`."""
        return _Gather.apply(self.group, self, *self.tensors)


def sum_over_ranks(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Sum tensors over the ranks of `sequence_parallel`, if any."""
    group = sequence_group(None)
    return tensors if group is None else tuple(x.sum(0) for x in gather(group, *tensors))


def from_first_rank(x: Tensor) -> Tensor:
    """Broadcast the first rank's tensor in `sequence_parallel`; all ranks pass the same shape."""
    group = sequence_group(None)
    return x if group is None else gather(group, x)[0][0]


def select_rank(
    group: SequenceGroup, x: Tensor, is_candidate: Tensor, *, last: bool = False
) -> Tensor:
    """Return each sample of x, [B, ...], from the first or last rank on which it is a candidate.

    Args:
        group: The ranks.
        x: The samples.
        is_candidate: Whether this rank has the sample, [B]. A sample without any candidate comes
            from the first or last rank.
        last: Select the last candidate instead of the first.
    """
    samples, candidates = gather(group, x, is_candidate)
    if last:
        samples, candidates = samples.flip(0), candidates.flip(0)
    return samples[candidates.int().argmax(dim=0), torch.arange(len(x), device=x.device)]


def last_token(group: SequenceGroup, x: Tensor) -> Tensor:
    """Return the last token of the whole sequence, [B, 1, D], given those of this rank."""
    has_tokens = x.new_full((len(x),), x.shape[1] > 0, dtype=torch.bool)
    return select_rank(group, F.pad(x, (0, 0, 1, 0))[:, -1:], has_tokens, last=True)


def exchange(
    group: SequenceGroup, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
) -> list[Tensor]:
    """Send one tensor to each rank, and receive one from each.

    Args:
        group: The ranks.
        parts: The tensor to send to each rank, all of one dtype.
        shapes: The shape of the tensor to receive from each rank.
    """
    parts, shapes = group.ordered(parts), group.ordered(shapes)
    send, receive = [x.numel() for x in parts], [torch.Size(shape).numel() for shape in shapes]
    flat = torch.cat([x.reshape(-1) for x in parts])
    received = _Exchange.apply(group, flat, send, receive).split(receive)
    return group.ordered(x.view(shape) for x, shape in zip(received, shapes, strict=True))


def carry(
    group: SequenceGroup,
    updates: Sequence[State],
    empty: State,
    step: Callable[[State, State], State],
    compose: Callable[[State, State], State],
    *,
    pending: PendingGather | None = None,
) -> list[tuple[State, State]]:
    """Carry a state from rank to rank, updated by the tokens of each rank.

    With nodes, ranks gather and compose the updates of their node, then gather those of all nodes.

    Args:
        group: The ranks.
        updates: The update of this rank for the forward and, if any, the backward direction, as
            tensors of the same shapes on every rank.
        empty: The state before the first rank visited.
        step: Function that applies an update to a state, and returns the next state.
        compose: Function that combines an earlier and a later update into one.
        pending: The first exchange, if `start_carry` has started it.

    Returns:
        For each direction, the state that enters this rank, and the state after the last rank
        visited.
    """
    levels: list[tuple[SequenceGroup, list[list[State]]]] = []
    for level in group.levels:
        tensors = [x for update in updates for x in update]
        gathered = iter(gather(level, *tensors) if pending is None else pending.wait())
        pending = None
        parts = [[*zip(*(next(gathered) for _ in update), strict=True)] for update in updates]
        visited = [ranks[::-1] if backward else ranks for backward, ranks in enumerate(parts)]
        levels.append((level, visited))
        if level is not group.levels[-1]:
            updates = [reduce(compose, ranks) for ranks in visited]
    carried = []
    for backward in range(len(updates)):
        entering, last = empty, None
        for level, visited in reversed(levels):
            states = [*accumulate(visited[backward], step, initial=entering)]
            # let each rank's state depend on all ranks, so that each backward pass runs the gather
            index = level.size - 1 - level.rank if backward else level.rank
            entering = tuple(torch.stack(x)[index] for x in zip(*states[:-1], strict=True))
            last = states[-1] if last is None else last
        assert last is not None
        carried.append((entering, last))
    return carried


def start_carry(group: SequenceGroup, updates: Sequence[State]) -> PendingGather:
    """Start the first exchange of `carry`."""
    return PendingGather(group.levels[0], *(x for update in updates for x in update))


def linear_step(state: State, update: State) -> State:
    """Return S' = P S + U for an update (U, P), where P is an elementwise factor."""
    return (torch.addcmul(update[0], update[1], state[0]),)


def linear_compose(first: State, second: State) -> State:
    """Combine two consecutive updates (U, P) into one."""
    return *linear_step(first, second), first[1] * second[1]


def last_tokens(x: Tensor, keep: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """Return the last `count` real tokens of x, [B, T, D], zero-padded on the left.

    Returns:
        The tokens, [B, count, D], and which of them are real, [B, count].
    """
    if keep is None:
        x = x[:, max(x.shape[1] - count, 0) :]
    missing = max(count - x.shape[1], 0)
    keep = x.new_ones(x.shape[:2], dtype=torch.bool) if keep is None else keep
    x, keep = F.pad(x, (0, 0, missing, 0)), F.pad(keep, (missing, 0))
    index = keep.byte().argsort(dim=1, stable=True)[:, keep.shape[1] - count :]
    real = keep.gather(1, index)
    tokens = x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[2]))
    return tokens.masked_fill(~real.unsqueeze(-1), 0), real


def carry_tokens(
    group: SequenceGroup,
    shards: Sequence[tuple[Tensor, Tensor | None]],
    count: int,
    *,
    before: Tensor | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Carry the last real tokens of each rank to the ranks after it.

    Args:
        group: The ranks.
        shards: The tokens of this rank, [B, T, D], and which of them are real (None for all), for
            the forward and, if any, the backward direction, in which they are flipped.
        count: Number of tokens to carry.
        before: The last tokens before the first rank in the forward direction, [B, count, D], read
            there; None for zeros.

    Returns:
        For each direction, the last `count` real tokens before those of this rank, and the last
        `count` real tokens of all ranks, both [B, count, D] and zero-padded on the left.
    """
    ends = [last_tokens(x, keep, count) for x, keep in shards]
    initial = before if group.is_first else None
    if initial is not None:
        tokens, real = ends[0]
        initial = initial.to(tokens.dtype)
        tokens, real = torch.cat([initial, tokens], dim=1), F.pad(real, (count, 0), value=True)
        ends[0] = last_tokens(tokens, real, count)
    marked = (torch.cat([x, real.unsqueeze(-1)], dim=-1) for x, real in ends)
    carried = []
    for backward, gathered in enumerate(gather(group, *marked)):
        visited = (gathered.flip(0) if backward else gathered).transpose(0, 1).flatten(1, 2)
        tokens, real = visited[..., :-1], visited[..., -1] > 0  # B W * count
        rank = group.size - 1 - group.rank if backward else group.rank
        is_earlier = torch.arange(group.size * count, device=real.device) < rank * count
        entering, last = (last_tokens(tokens, y, count)[0] for y in (real & is_earlier, real))
        carried.append((entering, last))
    if initial is not None:
        carried[0] = carried[0][0] + initial, carried[0][1]
    return carried


class Permutation:
    """A permutation of the tokens of all ranks that keeps the number of tokens on each rank.

    Args:
        order: Index of the token to move to each position, [T] for the tokens of all ranks, on
            the CPU.
        lengths: Number of tokens on each rank.
        rank: This rank.
        device: Device of the tokens.
    """

    def __init__(
        self, order: Tensor, lengths: Sequence[int], rank: int, device: torch.device
    ) -> None:
        ends = torch.tensor([*accumulate(lengths)])
        local = slice(int(ends[rank]) - lengths[rank], int(ends[rank]))
        tokens = torch.arange(len(order))
        source, target = (torch.bucketize(x, ends, right=True) for x in (order, tokens))
        self.is_local = torch.equal(source, target)  # the same on every rank
        send_index = order[source == rank] - local.start
        receive_index = source[local].argsort(stable=True).argsort()
        self.send_counts, self.receive_counts = (
            x.bincount(minlength=len(lengths)).tolist()
            for x in (target[source == rank], source[local])
        )
        self.send_index, self.receive_index = (
            x.to(device, non_blocking=True) for x in (send_index, receive_index)
        )

    def __call__(self, group: SequenceGroup, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Permute tensors, given this rank's shard of each, [B, T, ...].

        Tensors of one dtype are exchanged together; masks are converted to the dtype of the first
        tensor. If all tokens stay on their ranks, nothing is exchanged.
        """
        if self.is_local:
            return [x.index_select(1, self.send_index) for x in tensors]
        dtypes = [tensors[0].dtype if x.dtype == torch.bool else x.dtype for x in tensors]
        permuted = list(tensors)
        for dtype in dict.fromkeys(dtypes):
            members = [i for i, other in enumerate(dtypes) if other == dtype]
            flat = [tensors[i].unsqueeze(-1).flatten(2).to(dtype) for i in members]
            widths = [x.shape[2] for x in flat]
            parts = (
                torch.cat(flat, dim=2)
                .index_select(1, self.send_index)
                .split(self.send_counts, dim=1)
            )
            shapes = [(len(flat[0]), count, sum(widths)) for count in self.receive_counts]
            received = torch.cat(exchange(group, parts, shapes), dim=1)
            split = received.index_select(1, self.receive_index).split(widths, dim=2)
            for i, x in zip(members, split, strict=True):
                permuted[i] = x.reshape(tensors[i].shape).to(tensors[i].dtype)
        return permuted


def gather_tokens(group: SequenceGroup, x: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
    """Return the tokens of all ranks, [B, T, ...], given this rank's tokens and all lengths."""
    lengths = group.lengths(x) if lengths is None else lengths
    shapes = [(x.shape[0], length, *x.shape[2:]) for length in lengths]
    return torch.cat(exchange(group, [x] * group.size, shapes), dim=1)


def halo(group: SequenceGroup, x: Tensor, lengths: Sequence[int], radius: int) -> list[Tensor]:
    """Return up to `radius` tokens before and after those of this rank, [B, ., ...].

    They may come from several ranks with few tokens. A rank without tokens receives none.
    """
    ends = list(accumulate(lengths))
    starts = [end - length for end, length in zip(ends, lengths, strict=True)]

    def span(source: int, target: int) -> tuple[int, int]:
        """Return the tokens that the target reads from the source, as offsets in the source."""
        if source == target or not lengths[target]:
            return 0, 0
        if source < target:
            first = max(starts[source], starts[target] - radius)
            return min(first, ends[source]) - starts[source], lengths[source]
        return 0, max(min(ends[source], ends[target] + radius) - starts[source], 0)

    rank, ranks = group.rank, range(group.size)
    parts = [x[:, slice(*span(rank, target))] for target in ranks]
    counts = [end - start for start, end in (span(source, rank) for source in ranks)]
    shapes = [(x.shape[0], count, *x.shape[2:]) for count in counts]
    received = exchange(group, parts, shapes)
    return [torch.cat(tokens, dim=1) for tokens in (received[: rank + 1], received[rank:])]


class _Gather(torch.autograd.Function):
    """Gather tensors of all ranks. The backward pass sums the gradients of each rank's tensors."""

    @staticmethod
    def forward(
        ctx: Any, group: SequenceGroup, pending: PendingGather | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group = group
        if pending is not None:
            with explain_failure(group):
                pending.work.wait()
            return _from_bytes(pending.gathered, tensors)
        local = _as_bytes([x.unsqueeze(0) for x in tensors])
        gathered = local.new_empty(group.size, local.shape[1])
        with explain_failure(group):
            dist.all_gather(group.ordered(gathered), local[0], group=group.group)
        return _from_bytes(gathered, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sent = _as_bytes(gradients)
        received = torch.empty_like(sent)
        sent = sent.flip(0) if ctx.group.is_reversed else sent
        with explain_failure(ctx.group):
            dist.all_to_all_single(received, sent, group=ctx.group.group)
        parts = _from_bytes(received, [x[0] for x in gradients])
        return None, None, *(x.sum(0) for x in parts)


def _as_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Pack tensors of several dtypes, [W, ...], into bytes [W, .], for a single collective."""
    return torch.cat([x.flatten(1).contiguous().view(torch.uint8) for x in tensors], dim=1)


def _from_bytes(packed: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors in packed bytes, [W, ...]."""
    parts = packed.split([x.numel() * x.element_size() for x in like], dim=1)
    copies = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    pairs = zip(copies, like, strict=True)
    return tuple(part.view(x.dtype).view(len(packed), *x.shape) for part, x in pairs)


class _Exchange(torch.autograd.Function):
    """Exchange the parts of a flat tensor. The backward pass sends the gradients back."""

    @staticmethod
    def forward(
        ctx: Any, group: SequenceGroup, x: Tensor, send: list[int], receive: list[int]
    ) -> Tensor:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        received = x.new_empty(sum(receive))
        with explain_failure(group):
            dist.all_to_all_single(received, x, receive, send, group=group.group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sent = gradient.new_empty(sum(ctx.send))
        with explain_failure(ctx.group):
            dist.all_to_all_single(
                sent, gradient.contiguous(), ctx.send, ctx.receive, group=ctx.group.group
            )
        return None, sent, None, None
