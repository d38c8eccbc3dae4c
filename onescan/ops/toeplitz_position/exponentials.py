"""Sums of decaying exponentials, t_n = sum_e weight_e exp(n log_decay_e), for n >= 0.

exp((i S + j) a) = exp(i S a) exp(j a), so N samples are a matrix product of two tables of
S = sqrt(N) exponentials each. No exponent is above 0.
"""

import math

import torch
import torch.nn.functional as F

from onescan.shapes import Decays, DirectedDecays, Kernels, LineStates, Powers, Samples


def powers(log_decay: Decays, stop: int, *, step: int = 1) -> Powers:
    """exp(n log_decay) for n = 0, step, 2 step, ... below stop."""
    n = torch.arange(0, stop, step, dtype=log_decay.dtype, device=log_decay.device)
    return (n.unsqueeze(-1) * log_decay.unsqueeze(1)).exp()


def tables(log_decay: Decays, length: int) -> tuple[Powers, Powers]:
    """The powers 0, S, 2 S, ... and 0, 1, ..., S - 1, whose products are all below length."""
    step = math.ceil(math.sqrt(length))
    return powers(log_decay, length, step=step), powers(log_decay, step)


def sample(weight: LineStates, log_decay: Decays, length: int) -> Samples:
    """sum_e weight_e exp(n log_decay_e), n = 0 .. length - 1, for several weights per channel."""
    coarse, fine = tables(log_decay, length)
    scaled = weight.unsqueeze(2) * coarse.unsqueeze(1)  # D lines N/S E
    samples = scaled.flatten(1, 2) @ fine.mT
    return samples.view(*weight.shape[:2], coarse.shape[1] * fine.shape[1])[..., :length]


def kernel(log_decay: DirectedDecays, weight: DirectedDecays, length: int) -> Kernels:
    """t_n for the lags n = 1 - length .. length - 1; without a backward half t_n = 0 below 0."""
    past, *future = (
        sample(w.unsqueeze(1), a, length).squeeze(1) for a, w in zip(log_decay, weight, strict=True)
    )
    if not future:
        return F.pad(past, (length - 1, 0))
    return torch.cat([future[0][:, 1:].flip(-1), past], dim=-1)
