"""Sequence parallelism: models and ops whose tokens are sharded across a process group.

Shards are in rank order. They may have different lengths, and a shard may be empty (T = 0). Each
rank passes its own tokens to an op with ``group=`` and receives their outputs, which equal those of
a single process. Ranks exchange states and neighboring tokens, whose size does not depend on the
number of tokens. Only `toeplitz_position` exchanges all tokens, and only if they take less memory
than the states. If each of W ranks has T / W tokens, it receives from the others, in the forward
pass and again in the backward pass::

    additive_decay          all-reduce    B H (2 K + F V)             backward: B H (K + F V)
    additive_decay, causal  all-gather    (W - 1) B H (K + F V)
    decay_attention         all-gather    (W - 1) B H (K V + 2 K)     per direction
    delta_rule              all-gather    (W - 1) B H (K K + K V)     per direction
    linear_diffusion        all-to-all    2 B R H V                   of radius R
    toeplitz_position       all-gather    (W - 1) (B L + 1) D E       per direction, for L lines
                            all-to-all    2 (W - 1) B T D / W^2       if that is less
    lrpe_angles             all-gather    W - 1                       forward, unknown lengths

The table counts elements. States are in the dtype of sums, which is float32 for bfloat16 inputs;
tokens are in their own dtype. A scalar decay has one factor per head instead of K.

A recurrence is linear in the state that enters a shard, S' = P S + U. Ranks gather P and U of all
shards, combine those before their own (after it in the backward direction), and run the op from the
resulting state. With many ranks, `SequenceGroup(group, nodes=...)` gathers P and U within nodes of
N ranks and then between nodes, which replaces W - 1 by N + W / N - 2; bidirectional
`additive_decay` moves one state in any case. `toeplitz_position` mixes the tokens of the rank
during the exchange; the other ops start from its result. Forms that need all tokens at once are not
available: FFTs, and Crank-Nicolson, which solves a system over all tokens.

Inside a `with` block of `sequence_parallel`, each rank passes its shard of the input to a model.
The first axis is sharded: rows of images or frames of video, in whole patches, or tokens of text.
In addition to the above, ranks exchange their numbers of tokens once per call, which samples drop
path drops, and the input of a pooling head:

- Class logits, the logits of ``last_only=True`` and the states of causal models are the same on
  every rank. Other outputs are those of the rank's own tokens. Class tokens and other tokens that
  are not part of the input are on the first rank only.
- Pass the labels, timesteps and states of all samples on every rank, but `keep`, segments and
  `positions` of the rank's own tokens only.
- Causal models read a prompt that is sharded across all ranks. Each rank then generates on its own,
  without collectives; samples are the same if all generators have the same seed.
- The encoder's tokens of a `SequenceDecoder` are sharded. The decoder's tokens are not.
- Layers that need all tokens on a single process raise an error on every rank: joint MD-TPE
  kernels, and packed documents in layers without `cu_seqlens`.

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
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from onescan.messages import named_type
from onescan.ops.packing import Packing, PackingShard, packing_of


class SequenceGroup:
    """A process group across which the token axis of a sequence is sharded, in rank order.

    Ops accept it in place of a process group. If `lengths` are given, ops that need them do not
    have to exchange them.

    Args:
        group: A process group that contains this process, or a device mesh with one dimension.
        lengths: Number of tokens on each rank. If None, ranks exchange them when an op needs them.
        prefix: Number of tokens on the first rank that are not part of the grid, such as a class
            token. Included in `lengths`.
        nodes: Two process groups, for a `group` that spans several nodes: the ranks of this node,
            and the ranks with the same local rank on all nodes. Ranks then merge states within each
            node before nodes exchange them. With a two-dimensional `DeviceMesh`, these groups are
            ``(mesh.get_group(1), mesh.get_group(0))``. None gathers the states of all ranks at
            once.

    Raises:
        ValueError: If group is not a process group with this process or is a mesh with several
            dimensions, lengths is not one non-negative integer per rank, or the ranks of a node are
            not consecutive in group.
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
                    f"group is a mesh with {group.ndim} dimensions, expected one dimension, such "
                    "as mesh['sequence']"
                )
            group = group.get_group()
        if not isinstance(group, dist.ProcessGroup):
            outside = group is dist.GroupMember.NON_GROUP_MEMBER
            described = "a group without this process" if outside else named_type(group)
            raise ValueError(f"group is {described}, expected a process group with this process")
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self._lengths = None if lengths is None else self._checked(lengths)
        self.prefix = prefix
        self.is_reversed = False  # whether ranks are in reverse order
        self._nodes = None
        if nodes is not None:
            if not isinstance(nodes, tuple) or len(nodes) != 2:  # noqa: PLR2004 - within, between
                raise ValueError(f"nodes is {nodes!r}, expected a tuple of two process groups")
            within, between = self._nodes = [SequenceGroup(level) for level in nodes]
            node_rank = between.rank * within.size + within.rank
            if (node_rank, between.size * within.size) != (self.rank, self.size):
                raise ValueError(
                    f"nodes describe {between.size} nodes of {within.size} ranks, in which this is "
                    f"rank {node_rank}, expected rank {self.rank} of {self.size}, as in group"
                )

    def _checked(self, lengths: Sequence[int]) -> list[int]:
        is_list = isinstance(lengths, Sequence) and len(lengths) == self.size
        if not is_list or not all(type(n) is int and n >= 0 for n in lengths):
            raise ValueError(
                f"lengths is {lengths!r}, expected a non-negative integer for each of {self.size} "
                "ranks"
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
        """Convert one item per rank from the process group's order to this order, or back."""
        return list(of_ranks)[:: -1 if self.is_reversed else 1]

    @property
    def levels(self) -> "list[SequenceGroup]":
        """The groups in which ranks exchange states, in order: within nodes, then between nodes."""
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
        """Return a group of the same ranks with other lengths; see the arguments of the class."""
        group = copy.copy(self)
        group._lengths = None if lengths is None else self._checked(lengths)
        group.prefix = prefix
        return group

    def without_prefix(self) -> "SequenceGroup":
        """Return a group whose lengths do not include the prefix."""
        if self._lengths is None or not self.prefix:
            return self
        return self.with_lengths([self._lengths[0] - self.prefix, *self._lengths[1:]])

    def first_position(self, shape: tuple[int, ...], device: torch.device) -> int | Tensor:
        """Return the position of this rank's first token along the first axis of a grid.

        Does not wait for the device.

        Args:
            shape: Shape of this rank's shard of the grid, possibly empty.
            device: Device of the result, unless the lengths are known.
        """
        if self._lengths is None:
            return self.gather_number(shape[0], device)[: self.rank].sum()
        return sum(self.positions(shape, device)[: self.rank])

    def positions(self, shape: tuple[int, ...], device: torch.device) -> list[int]:
        """Return the number of positions of each rank along the first axis of a grid.

        Arguments are those of `first_position`.
        """
        lengths = self.without_prefix()._lengths
        if lengths is None:
            return self.gather_number(shape[0], device).tolist()
        return [length // math.prod(shape[1:]) for length in lengths]

    def gather_number(self, number: int, device: torch.device) -> Tensor:
        """Gather a number from each rank, [W], without waiting for the device."""
        local = torch.tensor([number], device=device)
        numbers = local.new_empty(self.size, 1)
        with explain_failure(self):
            dist.all_gather(self.ordered(numbers), local, group=self.group)
        return numbers.squeeze(1)


Group = SequenceGroup | dist.ProcessGroup | DeviceMesh

_current: SequenceGroup | None = None


@contextmanager
def sequence_parallel(group: Group | None) -> Iterator[None]:
    """Shard the tokens of all models and ops in a `with` block across a process group.

    Models receive this rank's shard of their input along the first axis. For ops, this sets the
    default of the ``group`` argument, in all threads of the process. The backward pass may run
    outside of the block, even if blocks of models recompute their activations. With
    `torch.utils.checkpoint` around calls of your own, the backward pass must run in the block:
    outside, recomputed ops read only the tokens of this rank, and gradients are wrong.

    Args:
        group: A process group, a device mesh with one dimension, or a `SequenceGroup`. None
            disables sharding.

    Raises:
        ValueError: If group is not a process group that contains this process.
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
    resolved = _current if group is None else _as_sequence_group(group)
    return None if resolved is None or resolved.size == 1 else resolved


def scan_group(*, backward: bool) -> SequenceGroup | None:
    """Return the group of `sequence_parallel`, if any, in the order in which a scan visits ranks.

    A backward scan flips the tokens of each rank and reverses the ranks.
    """
    group = sequence_group(None)
    return group.reversed() if backward and group is not None else group


def _as_sequence_group(group: Any) -> SequenceGroup:
    return group if isinstance(group, SequenceGroup) else SequenceGroup(group)


def refuse_group(group: SequenceGroup, what: str, reason: str) -> None:
    """Raise ValueError for a call that cannot run over several ranks."""
    raise ValueError(f"group has {group.size} ranks, but {what} supports only one: {reason}")


def known_lengths(x: Tensor) -> AbstractContextManager[None]:
    """Exchange the number of tokens x, [B, T, ...], on each rank once, for a `with` block.

    Raises:
        ValueError: If no rank has tokens.
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
    """Bind a function to the current group of `sequence_parallel`, if any.

    For activation checkpointing, which calls the function again in the backward pass.
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


def is_empty_grid(group: SequenceGroup | None, shape: Any) -> bool:
    """Return whether the part of a grid on this rank of a group has no positions."""
    return group is not None and isinstance(shape, list | tuple) and [*shape[:1]] == [0]


def one_token(*tensors: Any, dim: int = 1) -> tuple[Any, ...]:
    """Append a token of zeros to each tensor of an empty shard, for the op to mask.

    A rank without tokens thus has the same graph as the others. Other arguments, which the op
    refuses later, are returned as they are.
    """
    return tuple(
        F.pad(x, (0, 0) * (x.ndim - dim - 1) + (0, 1)) if isinstance(x, Tensor) else x
        for x in tensors
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


@contextmanager
def explain_failure(group: SequenceGroup) -> Iterator[None]:
    """Explain likely causes if a collective in a `with` block fails.

    Raises:
        DistError: If the collective fails, for example because another rank has exited.
    """
    try:
        yield
    except RuntimeError as error:
        raise dist.DistError(
            f"rank {group.rank} of {group.size} could not exchange data with the other ranks: one "
            "of them has ended or does not respond, or their calls differ in order, options or "
            "sizes. With TORCH_DISTRIBUTED_DEBUG=DETAIL, PyTorch reports the calls that differ"
        ) from error
