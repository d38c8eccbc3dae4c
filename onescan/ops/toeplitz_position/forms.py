"""Toeplitz position encoding in plain torch: three forms along one axis, and one over all axes.

Source: LightNet, arXiv:2405.21022, Eq. 17. A kernel is a sum of decaying exponentials,

    t_n = sum_e weight_e exp(n log_decay_e),  n >= 0,

so the tokens read so far are summarized in E numbers per channel:

    h_t = exp(log_decay) h_{t-1} + x_t                              (E,)    per channel
    y_t = sum_e weight_e h_t,e                                      ()      Eq. 17 as a recurrence

Tensors are channels first, [D, lines, positions], with all lines along the axis in one batch.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onescan.checks import is_known
from onescan.ops.chunks import linear_scan, number_of_chunks
from onescan.shapes import (
    ChannelsFirst,
    ChunkStarts,
    Decays,
    DirectedDecays,
    Hidden,
    JointKernels,
    JointWeights,
    Kernels,
    Lines,
    LineStates,
    Powers,
    Samples,
    Toeplitz,
)

CHUNK = 64
COMPILED_STEP = 16  # of power tables in compiled code

Form = Callable[
    [Lines, DirectedDecays, DirectedDecays, LineStates | None], tuple[Lines, LineStates | None]
]


# The forms. Each returns the outputs and the state after them; None keeps no state.


def dense(
    x: Lines, log_decay: DirectedDecays, weight: DirectedDecays, hidden: LineStates | None
) -> tuple[Lines, LineStates | None]:
    """Multiply by one Toeplitz matrix per channel, y_n = sum_m t_{n-m} x_m, in O(N^2)."""
    if hidden is not None and x.shape[-1] == 1:  # one step of the recurrence, for decoding
        hidden = torch.addcmul(x, log_decay[0].exp().unsqueeze(1), hidden)
        return (weight[0].unsqueeze(1) * hidden).sum(-1, keepdim=True), hidden
    y = x @ _matrix(log_decay, weight, x.shape[-1])
    return _with_state(y, x, log_decay, weight, hidden)


def fft(
    x: Lines, log_decay: DirectedDecays, weight: DirectedDecays, hidden: LineStates | None
) -> tuple[Lines, LineStates | None]:
    """Multiply the spectra of kernel and tokens, in O(N log N)."""
    length = x.shape[-1]
    period = _period(length)
    t = torch.fft.rfft(_kernel(log_decay, weight, length).double(), n=period).unsqueeze(1)
    # float64: each frequency mixes all tokens, so rounding errors of large tokens affect small
    # ones; flat, because compiled gradients read the strides of more axes wrongly (pytorch issue
    # 106623)
    lines = x if x.shape[1] else F.pad(x, (0, 0, 0, 1))  # MKL does not accept an empty batch
    spectrum = torch.fft.rfft(lines.double().flatten(0, 1), n=period).unflatten(0, lines.shape[:2])
    y = torch.fft.irfft(spectrum * t, n=period)[:, : x.shape[1], length - 1 : 2 * length - 1]
    return _with_state(y.to(x.dtype), x, log_decay, weight, hidden)


def _period(length: int) -> int:
    """Return the length of a transform in which no lag wraps around; powers of two are fast."""
    return 1 << (2 * length - 1).bit_length() if is_known(length) else 2 * length


def scan(
    x: Lines,
    log_decay: DirectedDecays,
    weight: DirectedDecays,
    hidden: LineStates | None,
    *,
    chunk_size: int = CHUNK,
    begins: ChunkStarts | None = None,
) -> tuple[Lines, LineStates | None]:
    """Multiply by a Toeplitz matrix within chunks and carry E sums between them, in O(N E).

    If sequences are packed, each chunk is part of one sequence, and `begins` marks the first chunk
    of each, [B, N]. Sums are not carried between sequences.
    """
    channels, lines, length = x.shape
    if is_known(length) and length <= chunk_size:
        return dense(x, log_decay, weight, hidden)
    count = number_of_chunks(length, chunk_size)
    chunks = F.pad(x, (0, count * chunk_size - length)).reshape(channels, lines * count, chunk_size)
    y = chunks @ _matrix(log_decay, weight, chunk_size)
    for backward, (a, w) in enumerate(zip(log_decay, weight, strict=True)):
        decays = _powers(a, chunk_size + 1)  # D 1+C E
        to_end, from_start = decays[:, :-1], w.unsqueeze(1) * decays[:, 1:]
        if backward:
            from_start = from_start.flip(1)
        else:
            to_end = to_end.flip(1)
        added = (chunks @ to_end).unflatten(1, (lines, count))  # D lines chunks E
        first = torch.zeros_like(added[:, :, 0]) if hidden is None else hidden
        passes = None
        if begins is not None:
            ends = F.pad(begins[:, 1:], (0, 1), value=True)
            passes = (~(begins if backward else ends)).to(x.dtype)[None, :, :, None]
            added = added * passes
        before = _states_before(added, chunk_size * a, first, passes, backward=bool(backward))
        y = torch.baddbmm(y, before.flatten(1, 2), from_start.mT)
    y = y.view(channels, lines, count * chunk_size).narrow(-1, 0, length)
    if hidden is None:
        return y, None
    start = (count - 1) * chunk_size
    last = x.narrow(-1, start, length - start)
    if not is_known(length):  # zeros in front add nothing to the state
        last = F.pad(last, (chunk_size - last.shape[-1], 0))
    return y, advance(before[:, :, -1], last, log_decay[0], length - start)


def _states_before(
    added: Tensor,
    log_decay: Decays,
    first: LineStates,
    passes: Tensor | None = None,
    *,
    backward: bool,
) -> Tensor:
    """Compute the state before each chunk from the contribution of each chunk, `D lines chunks E`.

    Chunks are combined in pairs, recursively: work is linear in their number, and rounding errors
    grow with its logarithm. `passes`, [1, lines, chunks, 1], is 0 for chunks after which the state
    is zero, whose contributions are zero, and otherwise 1; None for ones.
    """
    count = added.shape[2]
    decay = log_decay.exp()[:, None, None]
    if not is_known(count):
        factor = decay if passes is None else decay * passes
        return linear_scan(first, added, factor, backward=backward)[0]
    if count == 1:
        return first.unsqueeze(2)
    earlier, later = _pairs(added, backward=backward)
    decay_earlier = decay_later = decay
    if passes is not None:
        passes_earlier, passes_later = _pairs(passes, backward=backward)
        decay_earlier, decay_later, passes = (
            decay * passes_earlier,
            decay * passes_later,
            passes_earlier * passes_later,
        )
    both = torch.addcmul(later, decay_later, earlier)
    pairs = _states_before(both, 2 * log_decay, first, passes, backward=backward)
    inside = torch.addcmul(earlier, decay_earlier, pairs)
    states = torch.stack([inside, pairs] if backward else [pairs, inside], dim=3)
    return states.flatten(2, 3)[:, :, :count]


def _pairs(x: Tensor, *, backward: bool) -> tuple[Tensor, Tensor]:
    """Split neighboring chunks into those visited first and second."""
    if x.shape[2] % 2:
        x = F.pad(x, (0, 0, 0, 1))
    left, right = x.unflatten(2, (-1, 2)).unbind(3)
    return (right, left) if backward else (left, right)


FORMS: dict[str, Form] = {"dense": dense, "scan": scan, "fft": fft}


def joint_fft(x: ChannelsFirst, log_decay: Tensor, weight: JointWeights) -> ChannelsFirst:
    """Convolve over several axes at once (Eq. 16), in O(N log N) for N tokens, as in `fft`.

    Args:
        x: Tokens.
        log_decay: Log-decays of each axis and direction, [axes, directions, D, E].
        weight: Weights of each combination of directions, [directions, ..., directions, D, E].
    """
    shape = x.shape[2:]
    periods = [_period(n) for n in shape]
    t = _joint_kernel(log_decay, weight, shape)
    # flat and never empty, as in `fft`
    grids = x if x.shape[1] else F.pad(x, (0, 0) * len(shape) + (0, 1))
    spectrum = torch.fft.rfftn(grids.double().flatten(0, 1), periods).unflatten(0, grids.shape[:2])
    y = torch.fft.irfftn(spectrum * torch.fft.rfftn(t.double(), periods).unsqueeze(1), periods)
    y = y[:, : x.shape[1]]
    for axis, length in enumerate(shape):
        y = y.narrow(axis + 2, t.shape[axis + 1] - length, length)  # from lag 0 on
    return y.to(x.dtype)


def _joint_kernel(log_decay: Tensor, weight: JointWeights, shape: Sequence[int]) -> JointKernels:
    """Return t_n for the lags `_lag_powers` of every axis; axes are contracted one at a time."""
    *tables, last = map(_lag_powers, log_decay, shape)  # directions D lags E
    terms = weight.unsqueeze(-2)  # directions of the remaining axes, D, lags so far, E
    for table in tables:
        pairs = zip(terms, table, strict=True)
        terms = sum(w.unsqueeze(-2) * powers.unsqueeze(-3) for w, powers in pairs).flatten(-3, -2)
    t = sum(w @ powers.mT for w, powers in zip(terms, last, strict=True))
    return t.unflatten(1, [table.shape[2] for table in tables])


def _lag_powers(log_decay: DirectedDecays, length: int) -> Tensor:
    """Return exp(|n| log_decay), [directions, D, lags, E], where n has the direction, otherwise 0.

    Lags start at -length, or at 0 if one-directional.
    """
    past, *future = (_powers(a, length + 1) for a in log_decay)
    past = past[:, :-1]
    if not future:
        return past.unsqueeze(0)
    ahead = F.pad(future[0][:, 1:].flip(1), (0, 0, 0, length))
    return torch.stack([F.pad(past, (0, 0, length, 0)), ahead])


# The kernel and its exponentials. No exponent is above 0.


def _matrix(log_decay: DirectedDecays, weight: DirectedDecays, length: int) -> Toeplitz:
    """Return t_{n-m} in row m, column n, to multiply from the right."""
    kernel = _kernel(log_decay, weight, length)
    if torch.compiler.is_compiling():  # which would compile unfold again for each length
        n = torch.arange(length, device=kernel.device)
        return kernel[..., n - n.unsqueeze(1) + length - 1]
    return kernel.unfold(-1, length, 1).flip(1)


def _kernel(log_decay: DirectedDecays, weight: DirectedDecays, length: int) -> Kernels:
    """Return t_n for the lags 1 - length .. length - 1; negative ones are 0 if one-directional."""
    past, *future = (
        sample(w.unsqueeze(1), a, length).squeeze(1) for a, w in zip(log_decay, weight, strict=True)
    )
    if not future:
        return F.pad(past, (length - 1, 0))
    return torch.cat([future[0][:, 1:].flip(-1), past], dim=-1)


def sample(weight: LineStates, log_decay: Decays, length: int) -> Samples:
    """Compute sum_e weight_e exp(n log_decay_e), n = 0 .. length - 1, for lines of weights.

    exp((i S + j) a) = exp(i S a) exp(j a), so the samples are a matrix product of two tables of
    S = sqrt(length) exponentials each.
    """
    coarse, fine = _power_tables(log_decay, length)
    scaled = weight.unsqueeze(2) * coarse.unsqueeze(1)  # D lines N/S E
    samples = scaled.flatten(1, 2) @ fine.mT
    return samples.view(*weight.shape[:2], coarse.shape[1] * fine.shape[1])[..., :length]


def _power_tables(log_decay: Decays, length: int) -> tuple[Powers, Powers]:
    """Return the powers 0, S, 2 S, ... below length and the powers 0, 1, ..., S - 1."""
    # torch.compile would compile again for each length if it traced the root
    step = COMPILED_STEP if torch.compiler.is_compiling() else math.ceil(math.sqrt(length))
    return _powers(log_decay, length, step=step), _powers(log_decay, step)


def _powers(log_decay: Decays, stop: int, *, step: int = 1) -> Powers:
    """Compute exp(n log_decay) for n = 0, step, 2 step, ... below stop."""
    n = torch.arange(0, stop, step, dtype=log_decay.dtype, device=log_decay.device)
    return (n.unsqueeze(-1) * log_decay.unsqueeze(1)).exp()


# The state.


def _with_state(
    y: Lines,
    x: Lines,
    log_decay: DirectedDecays,
    weight: DirectedDecays,
    hidden: LineStates | None,
) -> tuple[Lines, LineStates | None]:
    """Add the outputs of the tokens before x to y, and return the state after x."""
    if hidden is None:
        return y, None
    before = sample(weight[0].unsqueeze(1) * hidden, log_decay[0], x.shape[-1] + 1)[..., 1:]
    return y + before, advance(hidden, x, log_decay[0])


def advance(
    hidden: LineStates, x: Lines, log_decay: Decays, length: int | None = None
) -> LineStates:
    """Return the state after the last `length` tokens of x, given the state before them.

    Other tokens of x must be zero.
    """
    positions = x.shape[-1]
    length = positions if length is None else length
    coarse, fine = _power_tables(log_decay, positions)
    x = F.pad(x, (-positions % fine.shape[1], 0)).unflatten(-1, (-1, fine.shape[1]))
    partial = (x.flatten(1, 2) @ fine.flip(1)).view(*x.shape[:3], fine.shape[2])
    added = (partial * coarse.flip(1).unsqueeze(1)).sum(2)
    return torch.addcmul(added, (length * log_decay).exp().unsqueeze(1), hidden)


# The layout: tokens first outside, channels first inside.


def channels_first(x: Hidden, shape: tuple[int, ...]) -> ChannelsFirst:
    """Transpose [B, T, D] to [D, B, *shape]."""
    return _transpose(x.flatten(0, 1)).view(x.shape[2], x.shape[0], *shape)


def channels_last(x: ChannelsFirst) -> Hidden:
    """Transpose [D, B, *shape] to [B, T, D]."""
    return _transpose(x.flatten(1)).view(x.shape[1], math.prod(x.shape[2:]), x.shape[0])


def _transpose(x: Tensor) -> Tensor:
    # compilers plan the memory of gradients themselves, and cannot trace a function with a jvp
    return x.mT.contiguous() if torch.compiler.is_compiling() else _Transpose.apply(x)


class _Transpose(torch.autograd.Function):
    """Copy x.mT into contiguous memory, forward and backward.

    The gradient of `x.mT.contiguous()` is a strided view, for which batched products run one matrix
    at a time.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.mT.contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _Transpose.apply(gradient)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return _Transpose.apply(tangent)
