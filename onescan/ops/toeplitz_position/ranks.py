"""Toeplitz position encoding over the ranks of a group; see `onescan.ops.parallel`.

The first axis is sharded; along the others, each rank has whole lines. There are two algorithms:

- `carried`: ranks gather the E sums of each channel and each line along the first axis, and add
  what their tokens read from the sums of earlier and later ranks.
- `by_channels`: ranks exchange tokens, so that each rank has all tokens of some channels, and then
  exchange the outputs.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from onescan.ops.collectives import carry, exchange, linear_compose, linear_step, start_carry
from onescan.ops.packing import Packing
from onescan.ops.parallel import SequenceGroup
from onescan.ops.toeplitz_position import forms
from onescan.shapes import Hidden, LineStates

Mix = Callable[[Tensor, Tensor, Tensor, tuple[int, ...]], Tensor]


def moves_less_by_channels(
    ranks: SequenceGroup, lengths: Sequence[int], lines: int, log_decay: Tensor
) -> bool:
    """Return whether exchanging tokens moves less data than gathering sums.

    Args:
        ranks: The ranks.
        lengths: Number of tokens of each rank.
        lines: Number of lines along the first axis, per sample.
        log_decay: As in `toeplitz_position`, [axes, ..., D, E].
    """
    channels = log_decay.shape[-2]
    sums = ranks.size * lines * log_decay[0].numel() // channels
    return channels >= ranks.size and 2 * sum(lengths) // ranks.size < sums


def carried(
    local: Callable[[], Hidden],
    ranks: SequenceGroup,
    x: Hidden,
    log_decay: Tensor,
    weight: Tensor,
    shape: tuple[int, ...],
    hidden: LineStates,
    *,
    length: int,
    packing: Packing | None = None,
) -> tuple[Hidden, LineStates]:
    """Return the outputs, and the state after the last rank.

    Args:
        local: Function that returns what the tokens read from this rank, while ranks exchange sums.
        ranks: The ranks.
        x: Tokens in the dtype of sums.
        log_decay: Log-decays of the first axis, [directions, D, E].
        weight: Weights of the first axis, [directions, D, E].
        shape: The part of the grid on this rank.
        hidden: State before the first rank, read there.
        length: Number of positions along the first axis; 0 if x stands for an empty shard.
        packing: Packed sequences on this rank, for one axis.
    """
    lines = forms.channels_first(x, shape).movedim(2, -1)
    flat = lines.flatten(1, -2)  # D lines positions
    initial_states = [
        hidden if ranks.is_first else torch.zeros_like(hidden),
        torch.zeros_like(hidden),
    ]
    updates = []
    for backward, (a, initial) in enumerate(zip(log_decay, initial_states, strict=False)):
        visible, decay = flat, (length * a).exp().unsqueeze(1)
        if packing is not None:  # only the last sequence visited continues
            edge = packing.sequence[:, :1] if backward else packing.sequence[:, -1:]
            visible = flat * (packing.sequence == edge)
            begins = packing.ends if backward else packing.starts
            decay = decay * ~begins.any(dim=1)[:, None]
        update = forms.advance(initial, visible.flip(-1) if backward else visible, a, length)
        updates.append((update, decay))
    pending, empty = start_carry(ranks, updates), (torch.zeros_like(hidden),)
    local_outputs = local()
    states = carry(ranks, updates, empty, linear_step, linear_compose, pending=pending)
    y = torch.zeros_like(flat)
    for backward, (((before,), _), initial) in enumerate(zip(states, initial_states, strict=False)):
        first = weight[backward].unsqueeze(1) * (before + initial)
        read = forms.sample(first, log_decay[backward], flat.shape[-1] + 1)[..., 1:]
        read = read.flip(-1) if backward else read
        if packing is not None:  # only the first sequence visited continues
            begins = packing.ends.flip(1) if backward else packing.starts
            is_continued = begins.cumsum(dim=1) == 0
            read = read * (is_continued.flip(1) if backward else is_continued)
        y = y + read
    y = forms.channels_last(y.view(lines.shape).movedim(-1, 2))
    return local_outputs + y, states[0][1][0]


def by_channels(
    mix: Mix,
    ranks: SequenceGroup,
    x: Hidden,
    log_decay: Tensor,
    weight: Tensor,
    shape: tuple[int, ...],
    lengths: Sequence[int],
) -> Hidden:
    """Mix all tokens of some of the channels on each rank.

    Args:
        mix: Function of tokens, log-decays, weights and the shape of the grid.
        ranks: The ranks.
        x: Tokens of this rank, possibly none.
        log_decay: As in `toeplitz_position`.
        weight: As in `toeplitz_position`.
        shape: The part of the grid on this rank; its first size is not read.
        lengths: Number of tokens of each rank.
    """
    batch, tokens, channels = x.shape
    bounds = [channels * rank // ranks.size for rank in range(ranks.size + 1)]
    widths = [end - start for start, end in pairwise(bounds)]
    local, width = slice(*bounds[ranks.rank : ranks.rank + 2]), widths[ranks.rank]
    shapes = [(batch, length, width) for length in lengths]
    gathered = torch.cat(exchange(ranks, x.split(widths, dim=-1), shapes), dim=1)
    shape = (gathered.shape[1] // torch.Size(shape[1:]).numel(), *shape[1:])
    y = mix(gathered, log_decay[..., local, :], weight[..., local, :], shape)
    shapes = [(batch, tokens, width) for width in widths]
    return torch.cat(exchange(ranks, y.split(lengths, dim=1), shapes), dim=-1)
