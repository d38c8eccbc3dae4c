"""The scan in Triton, forward and backward: all axes of [B, T, D] as it lies in memory.

Each axis, direction and block of E is a pass that adds to those before it, in float32. A pass has
three kernels where an axis is long and lines are few, else one; all of them are in
`onescan.kernels.toeplitz`.

Source: LightNet, arXiv:2405.21022, Eq. 17.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onescan.kernels import toeplitz as kernels
from onescan.ops.launch import launch, programs_wanted
from onescan.shapes import Hidden, HiddenStates, ToeplitzCoefficients

LEAST_SPLIT = 256  # tokens; a part leaves E numbers for each channel
WARPS = 4  # times the programs that are wanted elsewhere, as here they have one warp


def forward(
    x: Hidden,
    log_decay: ToeplitzCoefficients,
    weight: ToeplitzCoefficients,
    shape: tuple[int, ...],
    hidden: HiddenStates | None,
    *,
    bidirectional: bool,
) -> tuple[Hidden, HiddenStates | None]:
    """The sum over axes and what is left of a single one, with gradients once."""
    tables = (table.float() for table in (log_decay, weight))
    log_decay, weight = (x if bidirectional else x.unsqueeze(1) for x in tables)
    hidden = None if hidden is None else hidden.float().contiguous()
    given = (x.contiguous(), log_decay.contiguous(), weight.contiguous(), hidden)
    y, last = _toeplitz(*given, list(shape))
    return y, last if _is_carried(log_decay) else None


@torch.library.custom_op("onescan::toeplitz", mutates_args=())
def _toeplitz(
    x: Tensor, log_decay: Tensor, weight: Tensor, hidden: Tensor | None, shape: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Outputs and, of one axis read forward, the sums after the last token, [B, D, E]."""
    return _passes(x, log_decay, weight, hidden, shape)


@_toeplitz.register_fake
def _(
    x: Tensor, log_decay: Tensor, weight: Tensor, hidden: Tensor | None, shape: Sequence[int]
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), _new_last(x, log_decay)


@torch.library.custom_op("onescan::toeplitz_backward", mutates_args=())
def _toeplitz_backward(
    dy: Tensor,
    dlast: Tensor,
    x: Tensor,
    log_decay: Tensor,
    weight: Tensor,
    hidden: Tensor | None,
    shape: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x and both tables, and that of the state before the first token."""
    carried = _is_carried(log_decay)
    after = dlast if carried else None
    dx, first = _passes(dy, log_decay, weight, after, shape, mirrored=True, weighed=carried)
    dlog_decay, dweight = torch.empty_like(log_decay), torch.empty_like(weight)
    for line in _lines(x, log_decay, shape):
        parts = _coefficients(line, x, dy, log_decay, weight, hidden, after)
        for whole, part in zip((dlog_decay, dweight), parts, strict=True):
            whole[line.axis, line.direction] = part.sum(0)
    return dx, dlog_decay, dweight, log_decay[0, 0].exp() * first if carried else first


@_toeplitz_backward.register_fake
def _(
    dy: Tensor,
    dlast: Tensor,
    x: Tensor,
    log_decay: Tensor,
    weight: Tensor,
    hidden: Tensor | None,
    shape: Sequence[int],
) -> tuple[Tensor, ...]:
    return *(torch.empty_like(t) for t in (x, log_decay, weight)), torch.empty_like(dlast)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.shape = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dy: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
    hidden = ctx.saved_tensors[3]
    *gradients, dhidden = _toeplitz_backward(
        dy.contiguous(), dlast.contiguous(), *ctx.saved_tensors, ctx.shape
    )
    return *gradients, None if hidden is None else dhidden, None


_toeplitz.register_autograd(_backward, setup_context=_keep_for_backward)


class _Line(NamedTuple):
    """The lines along one axis of a grid, and the way to go along them.

    Attributes:
        axis: which one.
        direction: 0 from the first token on, 1 from the last.
        lines: how many there are.
        length: tokens of a line.
        stride: tokens from one of a line to the next.
    """

    axis: int
    direction: int
    lines: int
    length: int
    stride: int

    def sizes(self, split: "_Split") -> tuple[int, ...]:
        """The numbers that kernels take, in their order."""
        return self.lines, self.length, split.tokens, split.parts, split.groups, self.stride


class _Split(NamedTuple):
    """Tokens of a part, parts of a line, and groups that the parts of all lines are dealt to."""

    tokens: int
    parts: int
    groups: int


def _lines(x: Tensor, log_decay: Tensor, shape: Sequence[int]) -> Iterator[_Line]:
    tokens = x.shape[0] * x.shape[1]
    for axis, direction in product(range(len(shape)), range(log_decay.shape[1])):
        stride = math.prod(shape[axis + 1 :])
        yield _Line(axis, direction, tokens // shape[axis], shape[axis], stride)


def _is_carried(log_decay: Tensor) -> bool:
    return log_decay.shape[:2] == (1, 1)


def _new_last(x: Tensor, log_decay: Tensor) -> Tensor:
    *_, channels, width = log_decay.shape
    return log_decay.new_empty((x.shape[0], channels, width) if _is_carried(log_decay) else (0,))


def _passes(
    x: Tensor,
    log_decay: Tensor,
    weight: Tensor,
    state: Tensor | None,
    shape: Sequence[int],
    *,
    mirrored: bool = False,
    weighed: bool = False,
) -> tuple[Tensor, Tensor]:
    """The sum over axes and directions, mirrored for the gradient of x, and the last sums."""
    y, last = torch.empty_like(x), _new_last(x, log_decay)
    channels, width = log_decay.shape[2:]
    blocks = kernels.blocks_of(width)
    across = -(-channels // blocks.values)
    steps = list(product(_lines(x, log_decay, shape), range(0, width, blocks.keys)))
    sums = (
        y
        if len(steps) == 1 or x.dtype is torch.float32
        else torch.empty_like(y, dtype=torch.float32)
    )
    for place, (line, first_e) in enumerate(steps):
        tables = log_decay[line.axis, line.direction], weight[line.axis, line.direction]
        split = _split(line, across, x.device)
        backward = bool(line.direction) != mirrored
        constants = kernels.constants_of(channels, width, backward=backward)
        constants["WEIGHED"] = weighed
        if first_e == 0:
            entering = _entering(line, split, x, tables, state, constants, aged=False)
        launch(
            kernels.outputs,
            (split.groups * across,),
            blocks, x, sums, *tables, entering, y if place == len(steps) - 1 else sums, last,
            *line.sizes(split), **constants, LAG=line.direction, FIRST_E=first_e,
            START=entering is not None, ADD=place > 0, LAST=_is_carried(log_decay),
        )  # fmt: skip
    return y, last


def _entering(
    line: _Line,
    split: _Split,
    x: Tensor,
    tables: tuple[Tensor, Tensor],
    state: Tensor | None,
    constants: dict[str, Any],
    *,
    aged: bool,
) -> Tensor | None:
    """What enters each part, [1 + aged, parts, lines, D, E]; of a single one the state alone."""
    if split.parts == 1:
        return state
    channels, width = tables[0].shape
    blocks = kernels.blocks_of(width)
    left = tables[0].new_empty(1 + aged, split.parts, line.lines, channels, width)
    across = -(-channels // blocks.values) * -(-width // blocks.keys)
    launch(
        kernels.leave,
        (split.groups * across,),
        blocks, x, *tables, left, *line.sizes(split), **constants, AGED=aged,
    )  # fmt: skip
    launch(
        kernels.carry,
        (-(-line.lines * channels * width // kernels.CARRIES),),
        kernels.CARRY_BLOCKS, left, state, tables[0], line.lines, split.tokens, split.parts,
        D=channels, E=width, STATE=state is not None, WEIGHED=constants["WEIGHED"], AGED=aged,
        BLOCK=kernels.CARRIES,
    )  # fmt: skip
    return left


def _coefficients(
    line: _Line,
    x: Tensor,
    dy: Tensor,
    log_decay: Tensor,
    weight: Tensor,
    hidden: Tensor | None,
    dlast: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of one axis and direction's log_decay and weight, by groups, [groups, D, E]."""
    tables = log_decay[line.axis, line.direction], weight[line.axis, line.direction]
    channels, width = tables[0].shape
    blocks = kernels.blocks_of(width, gradients=True)
    across = -(-channels // blocks.values) * -(-width // blocks.keys)
    split = _split(line, across, x.device)
    backward = bool(line.direction)
    constants = {**kernels.constants_of(channels, width, backward=backward), "WEIGHED": False}
    entering = _entering(line, split, x, tables, hidden, constants, aged=True)
    dlog_decay = tables[0].new_empty(split.groups, channels, width)
    dweight = torch.empty_like(dlog_decay)
    launch(
        kernels.coefficients,
        (split.groups * across,),
        blocks, x, dy, *tables, entering, dlast, dlog_decay, dweight, *line.sizes(split),
        **kernels.constants_of(channels, width, backward=backward, gradients=True),
        LAG=line.direction, START=entering is not None, AGED=split.parts > 1,
        LAST=dlast is not None,
    )  # fmt: skip
    return dlog_decay, dweight


def _split(line: _Line, across: int, device: torch.device) -> _Split:
    """Parts only where lines are too few for the device, across blocks of channels each."""
    wanted = -(-WARPS * programs_wanted(device) // across)
    parts = -(-wanted // max(line.lines, 1))
    tokens = max(LEAST_SPLIT, -(-line.length // parts))
    tokens = -(-tokens // kernels.REFRESH) * kernels.REFRESH
    parts = -(-line.length // tokens)
    strips = max(line.lines * parts, 1)
    return _Split(tokens, parts, -(-strips // -(-strips // wanted)))
