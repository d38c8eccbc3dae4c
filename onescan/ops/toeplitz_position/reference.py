"""Toeplitz position encoding as defined, term by term: the reference for the tests.

Source: LightNet, arXiv:2405.21022, Eq. 17, with a weight for each decay (the paper prints none)
and, if bidirectional, a second sum over m > n:

    y_n = sum_{m <= n} sum_e weight_0e exp((n - m) log_decay_0e) x_m
        + sum_{m > n}  sum_e weight_1e exp((m - n) log_decay_1e) x_m        summed over the axes

If joint, Eq. 16, where n, m and d have an entry per axis, and d_s is 0 for m_s <= n_s, otherwise 1:

    y_n = sum_m sum_e weight_de exp(sum over axes s of |n_s - m_s| log_decay_{s,d_s,e}) x_m
"""

from itertools import product

import torch
from torch import Tensor

from onescan.ops.toeplitz_position import ToeplitzState
from onescan.shapes import Hidden, JointWeights, ToeplitzCoefficients


def forward(
    x: Hidden,
    log_decay: ToeplitzCoefficients,
    weight: ToeplitzCoefficients | JointWeights,
    shape: tuple[int, ...],
    *,
    bidirectional: bool = False,
    joint: bool = False,
    state: ToeplitzState | None = None,
) -> tuple[Hidden, ToeplitzState | None]:
    if joint and len(shape) == 1:
        weight = weight.unsqueeze(0)
    elif joint:
        return _joint_sum(x, log_decay, weight, shape, bidirectional=bidirectional), None
    if not bidirectional:
        log_decay, weight = log_decay.unsqueeze(1), weight.unsqueeze(1)
    grid = x.unflatten(1, shape)
    y = torch.zeros_like(x)
    for axis in range(len(shape)):
        lines = grid.movedim(1 + axis, 0)
        sums = [_sum(lines, n, log_decay[axis], weight[axis]) for n in range(len(lines))]
        y = y + torch.stack(sums).movedim(0, 1 + axis).flatten(1, len(shape))
    if len(shape) > 1 or bidirectional:
        return y, None
    decay, weight = log_decay[0, 0], weight[0, 0]
    hidden = torch.zeros_like(x[:, 0, :, None] * weight) if state is None else state.hidden
    tokens = x.shape[1]
    reads = [(weight * ((t + 1) * decay).exp() * hidden).sum(-1) for t in range(tokens)]
    hidden = (tokens * decay).exp() * hidden
    for t in range(tokens):
        hidden = hidden + ((tokens - 1 - t) * decay).exp() * x[:, t, :, None]
    return y + torch.stack(reads, dim=1), ToeplitzState(hidden)


def _sum(lines: Tensor, n: int, log_decay: Tensor, weight: Tensor) -> Tensor:
    """Compute y_n along the first axis of lines, `positions B ... D`."""
    y = torch.zeros_like(lines[n])
    for m in range(len(lines) if len(weight) > 1 else n + 1):
        direction = int(m > n)
        terms = weight[direction] * (abs(n - m) * log_decay[direction]).exp()
        y = y + terms.sum(-1) * lines[m]
    return y


def _joint_sum(
    x: Tensor, log_decay: Tensor, weight: Tensor, shape: tuple[int, ...], *, bidirectional: bool
) -> Tensor:
    if not bidirectional:
        log_decay, weight = log_decay.unsqueeze(1), weight[(None,) * len(shape)]
    tokens = list(product(*map(range, shape)))
    outputs = []
    for n in tokens:
        y = torch.zeros_like(x[:, 0])
        for t, m in enumerate(tokens):
            lags = [a - b for a, b in zip(n, m, strict=True)]
            directions = tuple(int(lag < 0) for lag in lags)
            if bidirectional or not any(directions):
                exponents = [
                    abs(lag) * log_decay[s, d]
                    for s, (lag, d) in enumerate(zip(lags, directions, strict=True))
                ]
                y = y + (weight[directions] * torch.stack(exponents).sum(0).exp()).sum(-1) * x[:, t]
        outputs.append(y)
    return torch.stack(outputs, dim=1)
