"""Launch the kernels of MD-TPE's scan along all axes of [B, T, D], without transposing it.

Each axis, direction and block of E is a pass that adds to the previous ones, in float32. A pass
launches three kernels if the axis is long and has few lines, otherwise one
(`onescan.kernels.toeplitz`).

Source: LightNet, arXiv:2405.21022, Eq. 17.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onescan.kernels import toeplitz as kernels
from onescan.kernels.common import Blocks, Case
from onescan.ops.backend import chip_of, launch, name_of, target_programs
from onescan.ops.packing import Packing
from onescan.shapes import Hidden, HiddenStates, ToeplitzCoefficients

MIN_SPLIT = 256  # tokens; a part adds E numbers per channel
WARPS = 4  # other kernels have 4 warps per program, these kernels have 1


def scan(
    x: Hidden, log_decay: ToeplitzCoefficients, weight: ToeplitzCoefficients,
    shape: tuple[int, ...], hidden: HiddenStates | None, *, bidirectional: bool,
    packing: Packing | None,
) -> tuple[Hidden, HiddenStates | None]:  # fmt: skip
    """Compute the sum over axes and, for a single forward axis, the state after the last token.

    Has first derivatives only. Packed sequences have no state.
    """
    tables = (table.float() for table in (log_decay, weight))
    log_decay, weight = (x if bidirectional else x.unsqueeze(1) for x in tables)
    hidden = None if hidden is None else hidden.float().contiguous()
    tensors = (x.contiguous(), log_decay.contiguous(), weight.contiguous(), hidden)
    spans, size = None, 0
    if packing is not None:
        line = next(_lines(x, log_decay, shape))
        size = _split(line, _tiles(_case(x, log_decay), kernels.scan_blocks), x.device).tokens
        spans, _ = packing.spans(size)
    y, last = _toeplitz(*tensors, list(shape), spans, size)
    return y, last if _is_carried(log_decay, spans) else None


@torch.library.custom_op("onescan::toeplitz", mutates_args=())
def _toeplitz(
    x: Tensor, log_decay: Tensor, weight: Tensor, hidden: Tensor | None, shape: Sequence[int],
    spans: Tensor | None, size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return outputs and, for a single forward axis, the sums after the last token, [B, D, E].

    spans: Parts of packed sequences, of up to `size` tokens; see `Packing.spans`.
    """
    return _passes(x, log_decay, weight, hidden, shape, spans, size)


@_toeplitz.register_fake
def _(
    x: Tensor, log_decay: Tensor, weight: Tensor, hidden: Tensor | None, shape: Sequence[int],
    spans: Tensor | None, size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(x), _new_last(x, log_decay, spans)


@torch.library.custom_op("onescan::toeplitz_backward", mutates_args=())
def _toeplitz_backward(
    dy: Tensor, dlast: Tensor | None, x: Tensor, log_decay: Tensor, weight: Tensor,
    hidden: Tensor | None, shape: Sequence[int], spans: Tensor | None, size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x, both tables and the state before the first token."""
    carried = _is_carried(log_decay, spans)
    after = dlast if carried else None
    dx, first = _passes(
        dy, log_decay, weight, after, shape, spans, size, mirrored=True, weighed=carried
    )
    dlog_decay, dweight = torch.empty_like(log_decay), torch.empty_like(weight)
    for line in _lines(x, log_decay, shape):
        parts = _coefficients(line, x, dy, log_decay, weight, hidden, after, spans, size)
        for gradient, contributions in zip((dlog_decay, dweight), parts, strict=True):
            gradient[line.axis, line.direction] = contributions.sum(0)
    return dx, dlog_decay, dweight, log_decay[0, 0].exp() * first if carried else first


@_toeplitz_backward.register_fake
def _(
    dy: Tensor, dlast: Tensor | None, x: Tensor, log_decay: Tensor, weight: Tensor,
    hidden: Tensor | None, shape: Sequence[int], spans: Tensor | None, size: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    last = _new_last(x, log_decay, spans)
    return *(torch.empty_like(t) for t in (x, log_decay, weight)), last


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.shape, spans, ctx.size = inputs
    ctx.save_for_backward(*tensors, spans)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, hidden, spans = ctx.saved_tensors
    dy = torch.zeros_like(tensors[0]) if dy is None else dy.contiguous()
    dlast = None if dlast is None else dlast.contiguous()
    *gradients, dhidden = _toeplitz_backward(
        dy, dlast, *tensors, hidden, ctx.shape, spans, ctx.size
    )
    return *gradients, None if hidden is None else dhidden, None, None, None


_toeplitz.register_autograd(_backward, setup_context=_save_for_backward)


class _Line(NamedTuple):
    """The lines along one axis of a grid, and the direction to read them in.

    Attributes:
        axis: Index of the axis.
        direction: 0 for forward, 1 for backward.
        lines: Number of lines.
        length: Number of tokens per line.
        stride: Distance between neighboring tokens of a line.
    """

    axis: int
    direction: int
    lines: int
    length: int
    stride: int

    def sizes(self, split: "_Split") -> tuple[int, ...]:
        """Return the length arguments of kernels, in order."""
        return self.lines, self.length, split.tokens, split.parts, split.groups, self.stride


class _Split(NamedTuple):
    """Tokens per part, parts per line, and number of groups of the parts of all lines."""

    tokens: int
    parts: int
    groups: int


def _lines(x: Tensor, log_decay: Tensor, shape: Sequence[int]) -> Iterator[_Line]:
    tokens = x.shape[0] * x.shape[1]
    for axis, direction in product(range(len(shape)), range(log_decay.shape[1])):
        stride = math.prod(shape[axis + 1 :])
        yield _Line(axis, direction, tokens // shape[axis], shape[axis], stride)


def _is_carried(log_decay: Tensor, spans: Tensor | None) -> bool:
    return spans is None and log_decay.shape[:2] == (1, 1)


def _new_last(x: Tensor, log_decay: Tensor, spans: Tensor | None) -> Tensor:
    carried = _is_carried(log_decay, spans)
    return log_decay.new_empty((x.shape[0], *log_decay.shape[2:]) if carried else (0,))


def _passes(
    x: Tensor, log_decay: Tensor, weight: Tensor, state: Tensor | None, shape: Sequence[int],
    spans: Tensor | None, size: int, *, mirrored: bool = False, weighed: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the sum over axes and directions, reversed if `mirrored`, and the last sums.

    The gradient of x is the mirrored sum of the gradient of y.
    """
    y, last = torch.empty_like(x), _new_last(x, log_decay, spans)
    width = log_decay.shape[3]
    case = _case(x, log_decay)
    blocks = kernels.scan_blocks(case)
    across = -(-case.value_width // blocks.values)
    steps = list(product(_lines(x, log_decay, shape), range(0, width, blocks.keys)))
    sums = (
        y
        if len(steps) == 1 or x.dtype is torch.float32
        else torch.empty_like(y, dtype=torch.float32)
    )
    for step, (line, first_e) in enumerate(steps):
        tables = log_decay[line.axis, line.direction], weight[line.axis, line.direction]
        split = _split(line, across, x.device, spans, size)
        flags = {"BACKWARD": bool(line.direction) != mirrored, "WEIGHED": weighed}
        if first_e == 0:
            entering = _entering(line, split, x, tables, state, spans, derivative=False, **flags)
        launch(
            kernels.outputs, case, (split.groups * across,),
            x, sums if step > 0 else None, *tables, entering,
            y if step == len(steps) - 1 else sums, last if last.ndim > 1 else None,
            spans, *line.sizes(split), **flags, LAG=line.direction, FIRST_E=first_e,
        )  # fmt: skip
    return y, last


def _entering(
    line: _Line, split: _Split, x: Tensor, tables: tuple[Tensor, Tensor], state: Tensor | None,
    spans: Tensor | None, *, derivative: bool, **flags: bool,
) -> Tensor | None:  # fmt: skip
    """Return the sums before each part, [1 + derivative, parts, lines, D, E], or `state`."""
    if split.parts == 1:
        return state
    case = _case(x, tables[0])
    entering = tables[0].new_empty(1 + derivative, split.parts, line.lines, *tables[0].shape)
    grid = (split.groups * _tiles(case, kernels.scan_blocks),)
    flags = {**flags, "DERIVATIVE": derivative}
    launch(kernels.leave, case, grid, x, *tables, entering, spans, *line.sizes(split), **flags)
    grid = (-(-line.lines * tables[0].numel() // kernels.carry_blocks(case).keys),)
    lengths = (line.lines, split.tokens, split.parts)
    launch(kernels.carry, case, grid, entering, state, tables[0], spans, *lengths, **flags)
    return entering


def _coefficients(
    line: _Line, x: Tensor, dy: Tensor, log_decay: Tensor, weight: Tensor, hidden: Tensor | None,
    dlast: Tensor | None, spans: Tensor | None, size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of log_decay and weight for one axis and direction, [groups, D, E]."""
    tables = log_decay[line.axis, line.direction], weight[line.axis, line.direction]
    case = _case(x, tables[0])
    across = _tiles(case, kernels.gradient_blocks)
    split = _split(line, across, x.device, spans, size)
    flags = {"BACKWARD": bool(line.direction), "WEIGHED": False}
    entering = _entering(line, split, x, tables, hidden, spans, derivative=True, **flags)
    dlog_decay = tables[0].new_empty(split.groups, *tables[0].shape)
    dweight = torch.empty_like(dlog_decay)
    launch(
        kernels.coefficients, case, (split.groups * across,),
        x, dy, *tables, entering, dlast, dlog_decay, dweight, spans, *line.sizes(split),
        BACKWARD=flags["BACKWARD"], LAG=line.direction, DERIVATIVE=split.parts > 1,
    )  # fmt: skip
    return dlog_decay, dweight


def _case(x: Tensor, log_decay: Tensor) -> Case:
    """Return the compile-time parameters; the last axes of log_decay are D and E."""
    channels, width = log_decay.shape[-2:]
    return Case(name_of(x.dtype), chip_of(x.device), key_width=width, value_width=channels)


def _tiles(case: Case, blocks_of: Callable[[Case], Blocks]) -> int:
    """Return the number of programs that share a table [D, E]."""
    blocks = blocks_of(case)
    return -(-case.value_width // blocks.values) * -(-case.key_width // blocks.keys)


def _split(
    line: _Line, across: int, device: torch.device, spans: Tensor | None = None, size: int = 0
) -> _Split:
    """Divide lines into parts if there are too few lines to occupy the device.

    Args:
        line: The lines.
        across: Programs per part.
        device: Device of the kernels.
        spans: Parts of packed sequences, which are already divided.
        size: Tokens per part of packed sequences.
    """
    target = -(-WARPS * target_programs(device) // across)
    if spans is None:
        parts = -(-target // max(line.lines, 1))
        tokens = max(MIN_SPLIT, -(-line.length // parts))
        tokens = -(-tokens // kernels.REFRESH) * kernels.REFRESH
        parts = -(-line.length // tokens)
    else:
        tokens, parts = size, spans.shape[1]
    strips = max(line.lines * parts, 1)
    return _Split(tokens, parts, -(-strips // -(-strips // target)))
