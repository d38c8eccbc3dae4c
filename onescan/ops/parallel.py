"""Sequence parallelism: models and ops whose tokens are sharded across a process group.

Shards are in rank order. They may have different lengths, and a shard may be empty (T = 0). Each
rank passes its own tokens to an op with ``group=`` and receives their outputs, which equal those of
a single process.
Ranks exchange states and neighboring tokens, whose size does not depend on the number of tokens.
Only `toeplitz_position` exchanges all tokens, and only if they take less memory than the states. In
the forward pass, and again in the backward pass, a rank receives from W ranks with T tokens in
total::

    additive_decay          all-reduce    B H (2 K + F V)
    additive_decay, causal  all-gather    W B H (K + F V)
    decay_attention         all-gather    W B H (K V + 2 K)      per direction
    delta_rule              all-gather    W B H (K K + K V)      per direction
    linear_diffusion        all-to-all    2 B R H V              of radius R
    toeplitz_position       all-gather    W (B L + 1) D E        per direction, for L lines
                            all-to-all    2 B T D / W            if that is less
    lrpe_angles             all-gather    W                      in the forward pass only

A recurrence is linear in the state that enters a shard, S' = P S + U. Ranks gather P and U of all
shards, combine those before their own (after it in the backward direction), and run the op from the
resulting state. With many ranks, `SequenceGroup(group, nodes=...)` gathers them within nodes of N
ranks and then between nodes, which replaces W by N + W / N; bidirectional `additive_decay` moves
one state in any case. Forms that need all tokens at once are not available: FFTs, and
Crank-Nicolson, which solves a system over all tokens.

In a block of `sequence_parallel`, each rank passes its part of an input to a model. The first axis
is sharded: rows of images or frames of video, in whole patches, or tokens of text. In addition to
the above, ranks exchange their numbers of tokens once per call, the samples that drop path drops,
and the input of a pooling head:

- Class logits, the logits of ``last_only`` and the states of causal models are the same on every
  rank. Other outputs are those of the rank's own tokens. Class tokens and other tokens that are not
  part of the input are on the first rank only.
- Every rank receives the labels, timesteps and states of all samples, and `keep`, segments and
  `positions` of its own tokens.
- Causal models read a prompt over all ranks. Each rank then generates by itself, without
  collectives; samples are the same if all generators have the same seed.
- The encoder's tokens of a `SequenceDecoder` are sharded. The decoder's tokens are not.
- Layers that need all tokens in one process raise an error on every rank: joint MD-TPE kernels, and
  packed documents in layers without `cu_seqlens`.

Rules:

- All ranks must make the same calls in the same order with the same options, and their inputs must
  have the same sizes except for T. An optional argument is passed on all ranks or on none, except
  for `keep` in the recurrences.
- `cu_seqlens` contains the offsets of all tokens, and is the same on every rank. A packed sequence
  may extend over several ranks.
- Every rank returns the outputs of its own tokens, and the state of the whole sequence. An incoming
  state precedes the whole sequence and is read on the first rank only; a state of later tokens is
  read on the last rank only.
- Gradients are those of the sum of all ranks' losses. The gradient of a tensor that all ranks have,
  such as a parameter, is only the rank's part: sum it over the ranks. If every rank computes the
  same loss, from outputs that are the same on every rank, take the mean instead.
- Every rank that runs the forward pass must also run the backward pass, from a loss that depends on
  its outputs; a rank without a loss multiplies its outputs by 0. All ranks then run the same
  collectives in the same order: each collective is one node of the graph, on which the outputs of
  every rank depend, and autograd visits nodes in the reverse order of the forward pass. Only first
  derivatives are supported.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from onescan.messages import named_type
from onescan.ops.packing import Packing, PackingShard, packing_of


class SequenceGroup:
    """A process group across which the token axis of a sequence is sharded, in rank order.

    Ops accept it in place of a process group. If `lengths` are given, ops that need them do not
    have to exchange them.

    Args:
        group: A process group of this process, or a device mesh with one dimension.
        lengths: Number of tokens on each rank. If None, ranks exchange them when an op needs them.
        prefix: Number of tokens on the first rank that are not part of the grid, such as a class
            token. Included in `lengths`.
        nodes: Two process groups, for a `group` that spans several nodes: the ranks of this node,
            and the ranks with the same place in every node. Ranks then merge states within nodes
            before they exchange them between nodes. Both are the groups of a two-dimensional
            `DeviceMesh`, ``(mesh.get_group(1), mesh.get_group(0))``. None gathers the states of all
            ranks at once.

    Raises:
        ValueError: If group is not a process group of this process, lengths is not one
            non-negative integer per rank, or the nodes are not consecutive parts of group.
    """

    def __init__(
        self,
        group: Any,
        lengths: Sequence[int] | None = None,
        *,
        prefix: int = 0,
        nodes: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
    ) -> None:
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(
                    f"group is a mesh with {group.ndim} dimensions, expected one of them, such as "
                    "mesh['sequence']"
                )
            group = group.get_group()
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(
                f"group is {named_type(group)}, expected a process group of this process"
            )
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self._lengths = None if lengths is None else self._checked(lengths)
        self.prefix = prefix
        self.is_reversed = False  # whether ranks are in reverse order
        self._nodes = None
        if nodes is not None:
            within, between = self._nodes = [SequenceGroup(level) for level in nodes]
            place = between.rank * within.size + within.rank
            if (place, between.size * within.size) != (self.rank, self.size):
                raise ValueError(
                    f"nodes have {within.size} ranks in each of {between.size} nodes, with this "
                    f"rank at {place}, expected rank {self.rank} of {self.size}"
                )

    def _checked(self, lengths: Sequence[int]) -> list[int]:
        are_whole = all(isinstance(n, int) and n >= 0 for n in lengths)
        if len(lengths) != self.size or not are_whole:
            raise ValueError(
                f"lengths is {lengths!r}, expected a whole number for each of {self.size} ranks"
            )
        return list(lengths)

    def reversed(self) -> "SequenceGroup":
        """Return the group in reverse order, for tokens that each rank has flipped."""
        group = copy.copy(self)
        group.rank, group.is_reversed = self.size - 1 - self.rank, not self.is_reversed
        group._lengths = None if self._lengths is None else self._lengths[::-1]
        group._nodes = None if self._nodes is None else [x.reversed() for x in self._nodes]
        return group

    def ordered(self, of_ranks: Iterable[Any]) -> list[Any]:
        """Return items of the process group's ranks in this order, or items in this order back."""
        return list(of_ranks)[:: -1 if self.is_reversed else 1]

    @property
    def levels(self) -> "list[SequenceGroup]":
        """The groups in which ranks exchange states, one after the other."""
        return self._nodes or [self]

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first tokens."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last tokens."""
        return self.rank == self.size - 1

    def lengths(self, x: Tensor) -> list[int]:
        """Return the number of tokens of each rank, given those of this rank, [B, T, ...].

        Raises:
            ValueError: If the number of tokens differs from the length given for this rank.
        """
        tokens = x.shape[1]
        if self._lengths is None:
            return self.gather_number(tokens, x.device).tolist()
        if self._lengths[self.rank] != tokens:
            raise ValueError(
                f"group has lengths {self._lengths}, but rank {self.rank} has {tokens} tokens"
            )
        return list(self._lengths)

    def with_lengths(self, lengths: Sequence[int] | None, *, prefix: int = 0) -> "SequenceGroup":
        """Return the same ranks with other lengths; see the arguments of the class."""
        group = copy.copy(self)
        group._lengths = None if lengths is None else self._checked(lengths)
        group.prefix = prefix
        return group

    def without_prefix(self) -> "SequenceGroup":
        """Return the group of the tokens of the grid."""
        if self._lengths is None or not self.prefix:
            return self
        return self.with_lengths([self._lengths[0] - self.prefix, *self._lengths[1:]])

    def first_position(self, shape: tuple[int, ...], device: torch.device) -> int | Tensor:
        """Return the position of this rank's first token along the first axis of a grid.

        Does not wait for the device.

        Args:
            shape: The part of the grid on this rank, possibly empty.
            device: Device of the result, unless the lengths are known.
        """
        if self._lengths is None:
            return self.gather_number(shape[0], device)[: self.rank].sum()
        before = sum(self._lengths[: self.rank]) - (0 if self.is_first else self.prefix)
        return before // math.prod(shape[1:])

    def gather_number(self, number: int, device: torch.device) -> Tensor:
        """Gather a number from each rank, [W], without waiting for the device."""
        own = torch.tensor([number], device=device)
        numbers = own.new_empty(self.size, 1)
        dist.all_gather(self.ordered(numbers), own, group=self.group)
        return numbers.squeeze(1)


Group = SequenceGroup | dist.ProcessGroup | DeviceMesh
State = tuple[Tensor, ...]

_current: SequenceGroup | None = None


@contextmanager
def sequence_parallel(group: Group | None) -> Iterator[None]:
    """Shard the tokens of all models and ops in a `with` block across a process group.

    A model receives this rank's part of its input along the first axis. Sets the default of the
    ops' ``group`` argument, for the whole process rather than one thread. The backward pass may run
    outside of the block, also with activation checkpointing.

    Args:
        group: A process group, a device mesh with one dimension, or a `SequenceGroup`. None
            disables sharding.

    Raises:
        ValueError: If group is not a process group of this process.
    """
    global _current
    before, _current = _current, None if group is None else _as_sequence_group(group)
    try:
        yield
    finally:
        _current = before


def sequence_group(group: Group | None) -> SequenceGroup | None:
    """Return the group of a call: its argument, or that of `sequence_parallel`.

    None if all tokens are on this process, including in groups of a single process.
    """
    found = _current if group is None else _as_sequence_group(group)
    return None if found is None or found.size == 1 else found


def _as_sequence_group(group: Any) -> SequenceGroup:
    return group if isinstance(group, SequenceGroup) else SequenceGroup(group)


def refuse_group(group: SequenceGroup, what: str, reason: str) -> None:
    """Raise ValueError for a call that cannot run over several ranks."""
    raise ValueError(f"group has {group.size} ranks, but {what} runs on one: {reason}")


def known_lengths(x: Tensor) -> AbstractContextManager[None]:
    """Exchange the number of tokens x, [B, T, ...], of each rank once, for a `with` block.

    Raises:
        ValueError: If no rank of the context's group has tokens.
    """
    group = sequence_group(None)
    if group is None:
        return nullcontext()
    lengths = group.lengths(x)
    if not any(lengths):
        raise ValueError("T is 0 on every rank, expected at least one token in the sequence")
    return sequence_parallel(group.with_lengths(lengths))


def without_group() -> AbstractContextManager[None]:
    """Run the ops of a `with` block on this rank alone."""
    return nullcontext() if sequence_group(None) is None else sequence_parallel(None)


def in_current_group(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs later in the group of the context of this call, if any.

    For activation checkpointing, which calls it again in the backward pass.
    """
    group = sequence_group(None)
    if group is None:
        return function

    def run(*arguments: Any, **options: Any) -> Any:
        with sequence_parallel(group):
            return function(*arguments, **options)

    return run


def is_first_rank() -> bool:
    """Return whether this rank has the first tokens of a sequence, and any prefix tokens."""
    group = sequence_group(None)
    return group is None or group.is_first


def is_empty(group: SequenceGroup | None, x: Any) -> bool:
    """Return whether this rank of a group has no tokens x, [B, T, ...]."""
    return group is not None and isinstance(x, Tensor) and x.shape[1:2] == (0,)


def is_empty_grid(group: SequenceGroup | None, shape: Any) -> bool:
    """Return whether the part of a grid on this rank of a group has no positions."""
    return group is not None and isinstance(shape, list | tuple) and [*shape[:1]] == [0]


def one_token(*tensors: Tensor | None, dim: int = 1) -> tuple[Any, ...]:
    """Append a token of zeros to each tensor of an empty shard, for the op to mask.

    A rank without tokens thus has the same graph as the others.
    """
    return tuple(
        None if x is None else F.pad(x, (0, 0) * (x.ndim - dim - 1) + (0, 1)) for x in tensors
    )


def packing_over(
    group: SequenceGroup | None, cu_seqlens: Any, x: Tensor, *, state: Any = None
) -> Packing | PackingShard | None:
    """Return the packing of this rank's tokens x, [B, T, ...], from an op's argument, if given.

    Raises:
        ValueError: As `packing_of`.
    """
    if cu_seqlens is None:
        return None
    if group is None:
        return packing_of(cu_seqlens, x, state=state)
    if isinstance(cu_seqlens, PackingShard):
        return packing_of(cu_seqlens, x, state=state, tokens=max(x.shape[1], 1))
    lengths = group.lengths(x)
    whole = packing_of(cu_seqlens, x, state=state, tokens=sum(lengths))
    return PackingShard(whole, lengths, group.rank)


# Collectives with gradients.


def gather(group: SequenceGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Gather tensors that have the same shapes on every rank: [W, ...] for each."""
    return _Gather.apply(group, *tensors)


def sum_over_ranks(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Sum tensors over the ranks of the context's group, if any."""
    group = sequence_group(None)
    return tensors if group is None else tuple(x.sum(0) for x in gather(group, *tensors))


def from_first_rank(x: Tensor) -> Tensor:
    """Return the first rank's tensor in the context's group, if any; all have the same shape."""
    group = sequence_group(None)
    return x if group is None else gather(group, x)[0][0]


def select_rank(
    group: SequenceGroup, x: Tensor, is_candidate: Tensor, *, last: bool = False
) -> Tensor:
    """Return each sample of x, [B, ...], from the first or last rank where it is a candidate.

    Args:
        group: The ranks.
        x: The samples.
        is_candidate: Whether this rank has the sample, [B]. Samples without any candidate are
            those of the first or last rank.
        last: Select the last candidate instead of the first.
    """
    samples, candidates = gather(group, x, is_candidate)
    if last:
        samples, candidates = samples.flip(0), candidates.flip(0)
    return samples[candidates.int().argmax(dim=0), torch.arange(len(x), device=x.device)]


def last_token(x: Tensor) -> Tensor:
    """Return the last token of the whole sequence, [B, 1, D], given those of this rank."""
    group = sequence_group(None)
    if group is None:
        return x[:, -1:]
    has_tokens = x.new_full((len(x),), x.shape[1] > 0, dtype=torch.bool)
    return select_rank(group, F.pad(x, (0, 0, 1, 0))[:, -1:], has_tokens, last=True)


def exchange(
    group: SequenceGroup, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
) -> list[Tensor]:
    """Send one tensor to each rank, and receive one from each.

    Args:
        group: The ranks.
        parts: The tensor for each rank, in one dtype.
        shapes: The shape of the tensor from each rank.
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
) -> list[tuple[State, State]]:
    """Carry states from rank to rank, where the tokens of each rank update the state.

    With nodes, ranks gather the updates of their node, compose them, and gather those of all nodes.

    Args:
        group: The ranks.
        updates: The update of this rank for the forward and, if any, the backward direction, as
            tensors of the same shapes on every rank.
        empty: The state before the first rank visited.
        step: Function of a state and an update that returns the next state.
        compose: Function of an earlier and a later update that returns the update of both.

    Returns:
        For each direction, the state that enters this rank, and the state after the last rank
        visited.
    """
    levels: list[tuple[SequenceGroup, list[list[State]]]] = []
    for level in group.levels:
        gathered = iter(gather(level, *(x for update in updates for x in update)))
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
            # every rank's state depends on all ranks, so that every backward pass visits the gather
            own = level.size - 1 - level.rank if backward else level.rank
            entering = tuple(torch.stack(x)[own] for x in zip(*states[:-1], strict=True))
            last = states[-1] if last is None else last
        assert last is not None
        carried.append((entering, last))
    return carried


def linear_step(state: State, update: State) -> State:
    """Return S' = P S + U for an update (U, P) with an elementwise factor P."""
    return (torch.addcmul(update[0], update[1], state[0]),)


def linear_compose(first: State, second: State) -> State:
    """Return the update of two updates (U, P), one after the other."""
    return *linear_step(first, second), first[1] * second[1]


def last_tokens(x: Tensor, keep: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """Return the last `count` real tokens of x, [B, T, D], after zeros if there are fewer.

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
    sides: Sequence[tuple[Tensor, Tensor | None]],
    count: int,
    *,
    before: Tensor | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Carry the last real tokens of each rank to the ranks after it.

    Args:
        group: The ranks.
        sides: The tokens of this rank, [B, T, D], and which of them are real (None for all), for
            the forward and, if any, the backward direction, in which they are flipped.
        count: Number of tokens to carry.
        before: The last tokens before the first rank in the forward direction, [B, count, D], read
            there; None for zeros.

    Returns:
        For each direction, the last `count` tokens before those of this rank, and the last ones of
        all ranks, after zeros if there are fewer.
    """
    ends = [last_tokens(x, keep, count) for x, keep in sides]
    enters = before if group.is_first else None
    if enters is not None:
        tokens, real = ends[0]
        enters = enters.to(tokens.dtype)
        tokens, real = torch.cat([enters, tokens], dim=1), F.pad(real, (count, 0), value=True)
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
    if enters is not None:
        carried[0] = carried[0][0] + enters, carried[0][1]
    return carried


class Permutation:
    """A permutation of the tokens of all ranks, after which each rank has as many as before.

    Args:
        order: The token at each place, [T] for the tokens of all ranks, on the CPU.
        lengths: Number of tokens on each rank.
        rank: This rank.
        device: Device of the tokens.
    """

    def __init__(
        self, order: Tensor, lengths: Sequence[int], rank: int, device: torch.device
    ) -> None:
        ends = torch.tensor([*accumulate(lengths)])
        own = slice(int(ends[rank]) - lengths[rank], int(ends[rank]))
        tokens = torch.arange(len(order))
        source, target = (torch.bucketize(x, ends, right=True) for x in (order, tokens))
        self.is_local = torch.equal(source, target)  # the same on every rank
        leaving = order[source == rank] - own.start
        arriving = source[own].argsort(stable=True).argsort()
        self.sent, self.received = (
            x.bincount(minlength=len(lengths)).tolist()
            for x in (target[source == rank], source[own])
        )
        self.leaving, self.arriving = (x.to(device, non_blocking=True) for x in (leaving, arriving))

    def __call__(self, group: SequenceGroup, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tokens at the places of this rank, given its part of each tensor, [B, T, ...].

        Tensors of one dtype are exchanged together, and masks with those of the first one. If all
        tokens stay on their ranks, nothing is exchanged.
        """
        if self.is_local:
            return [x.index_select(1, self.leaving) for x in tensors]
        dtypes = [tensors[0].dtype if x.dtype == torch.bool else x.dtype for x in tensors]
        permuted = list(tensors)
        for dtype in dict.fromkeys(dtypes):
            some = [i for i, other in enumerate(dtypes) if other == dtype]
            flat = [tensors[i].unsqueeze(-1).flatten(2).to(dtype) for i in some]
            widths = [x.shape[2] for x in flat]
            parts = torch.cat(flat, dim=2).index_select(1, self.leaving).split(self.sent, dim=1)
            shapes = [(len(flat[0]), count, sum(widths)) for count in self.received]
            arrived = torch.cat(exchange(group, parts, shapes), dim=1)
            moved = arrived.index_select(1, self.arriving).split(widths, dim=2)
            for i, x in zip(some, moved, strict=True):
                permuted[i] = x.reshape(tensors[i].shape).to(tensors[i].dtype)
        return permuted


def gather_tokens(group: SequenceGroup, x: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the tokens of all ranks, [B, T, ...], given those of this rank and their numbers."""
    shapes = [(x.shape[0], length, *x.shape[2:]) for length in lengths]
    return torch.cat(exchange(group, [x] * group.size, shapes), dim=1)


def halo(group: SequenceGroup, x: Tensor, lengths: Sequence[int], radius: int) -> list[Tensor]:
    """Return up to `radius` tokens before and after those of this rank, [B, ., ...].

    They may come from several ranks with few tokens. A rank without tokens receives none.
    """
    ends = list(accumulate(lengths))
    starts = [end - length for end, length in zip(ends, lengths, strict=True)]

    def sent(source: int, target: int) -> tuple[int, int]:
        """Return the tokens that the target reads from the source, as offsets in the source."""
        if source == target or not lengths[target]:
            return 0, 0
        if source < target:
            first = max(starts[source], starts[target] - radius)
            return min(first, ends[source]) - starts[source], lengths[source]
        return 0, max(min(ends[source], ends[target] + radius) - starts[source], 0)

    rank, ranks = group.rank, range(group.size)
    parts = [x[:, slice(*sent(rank, target))] for target in ranks]
    counts = [end - start for start, end in (sent(source, rank) for source in ranks)]
    shapes = [(x.shape[0], count, *x.shape[2:]) for count in counts]
    received = exchange(group, parts, shapes)
    return [torch.cat(side, dim=1) for side in (received[: rank + 1], received[rank:])]


class _Gather(torch.autograd.Function):
    """Gather tensors of all ranks. The backward pass sums the gradients of each rank's tensors."""

    @staticmethod
    def forward(ctx: Any, group: SequenceGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        own = _as_bytes([x.unsqueeze(0) for x in tensors])
        together = own.new_empty(group.size, own.shape[1])
        dist.all_gather(group.ordered(together), own[0], group=group.group)
        return _from_bytes(together, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sent = _as_bytes(gradients)
        received = torch.empty_like(sent)
        sent = sent.flip(0) if ctx.group.is_reversed else sent
        dist.all_to_all_single(received, sent, group=ctx.group.group)
        parts = _from_bytes(received, [x[0] for x in gradients])
        return None, *(x.sum(0) for x in parts)


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
        dist.all_to_all_single(received, x, receive, send, group=group.group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sent = gradient.new_empty(sum(ctx.send))
        dist.all_to_all_single(
            sent, gradient.contiguous(), ctx.send, ctx.receive, group=ctx.group.group
        )
        return None, sent, None, None
