"""Sequence operations as functions of tensors, without parameters.

Queries and keys have the layout ``[B, T, H, K]`` and values ``[B, T, H, V]``, as in flash-attn;
PyTorch's ``scaled_dot_product_attention`` takes ``[B, H, T, K]`` instead.

Each function has a subpackage or module of its name, which is imported by its full name:
``from onescan.ops.additive_decay import read, write``.
"""

from onescan.ops.additive_decay import AdditiveDecayState, additive_decay, merge_states
from onescan.ops.backend import use_backend
from onescan.ops.decay_attention import DecayState, DecayStates, decay_attention
from onescan.ops.delta_rule import DeltaState, DeltaStates, delta_rule
from onescan.ops.linear_diffusion import (
    DiffusionState,
    gaussian_kernel,
    linear_diffusion,
    next_state,
    stable_step,
)
from onescan.ops.lrpe import RotaryPositions, lrpe, lrpe_angles, lrpe_frequencies
from onescan.ops.parallel import SequenceGroup, sequence_parallel
from onescan.ops.toeplitz_position import ToeplitzState, toeplitz_position

__all__ = [
    "AdditiveDecayState",
    "DecayState",
    "DecayStates",
    "DeltaState",
    "DeltaStates",
    "DiffusionState",
    "RotaryPositions",
    "SequenceGroup",
    "ToeplitzState",
    "additive_decay",
    "decay_attention",
    "delta_rule",
    "gaussian_kernel",
    "linear_diffusion",
    "lrpe",
    "lrpe_angles",
    "lrpe_frequencies",
    "merge_states",
    "next_state",
    "sequence_parallel",
    "stable_step",
    "toeplitz_position",
    "use_backend",
]
