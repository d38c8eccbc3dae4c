"""Decayed attention one token at a time, in Triton: for decoding, without a gradient.

All tokens of a call are one launch. The kernel is in `onescan.kernels.decay_step`.

Source: LION, arXiv:2502.16249, Eq. 5.
"""

import torch
from torch import Tensor

from onescan.kernels import decay_step as kernels
from onescan.kernels.decay_scalar import NORMALIZERS
from onescan.ops.backend import wants_gradient
from onescan.ops.decay_attention import DecayState
from onescan.ops.decay_attention.forms import Directions
from onescan.ops.launch import data_type, launch
from onescan.shapes import Keep, Keys, Queries, Values

Sides = tuple[DecayState | None, DecayState | None]


def forward(
    q: Queries,
    k: Keys,
    v: Values,
    decays: Directions,
    enters: Sides,
    *,
    keep: Keep | None,
    normalizer: str,
) -> tuple[Values, Sides]:
    """Outputs, divided by their row sums as `normalizer` says, and the state that leaves.

    Raises:
        ValueError: a gradient is wanted, and is not to be had here.
    """
    kv, k_sum = (None, None) if enters[0] is None else enters[0]
    if wants_gradient(q, k, v, decays.forward, kv, k_sum):
        raise ValueError("form 'recurrent' has no gradient in Triton, expected form 'chunk'")
    dtype = data_type(q, k, v)
    q, k, v = (x.to(dtype).contiguous() for x in (q, k, v))
    keep = None if keep is None else keep.contiguous()
    logs = decays.forward.float()
    logs = logs.expand(k.shape) if decays.is_diagonal else logs.squeeze(-1).expand(k.shape[:3])
    if kv is not None and k_sum is not None:
        kv, k_sum = (x.float().contiguous() for x in (kv, k_sum))
    o, kv, k_sum = _decay_step(q, k, v, logs.contiguous(), keep, kv, k_sum, normalizer)
    return o, (DecayState(kv, k_sum), None)


@torch.library.custom_op("onescan::decay_step", mutates_args=())
def _decay_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decays: Tensor,
    keep: Tensor | None,
    kv_in: Tensor | None,
    sum_in: Tensor | None,
    normalizer: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, and the state that leaves; decays [B, T, H] or [B, T, H, K]."""
    batch, tokens, heads, key_width = k.shape
    value_width = v.shape[-1]
    blocks = kernels.blocks_of(key_width, value_width)
    of_call = {"diagonal": decays.ndim == k.ndim, "keep": keep is not None}
    o = torch.empty_like(v)
    k_sum = k.new_empty(batch, heads, key_width, dtype=torch.float32)
    kv = k_sum.new_empty(*k_sum.shape, value_width)
    launch(
        kernels.step,
        (batch * heads, -(-value_width // blocks.values)),
        blocks, q, k, v, decays, keep, kv_in, sum_in, o, kv, k_sum, tokens,
        **kernels.constants_of(heads, key_width, value_width, **of_call),
        ENTERS=kv_in is not None, NORMALIZER=NORMALIZERS[normalizer],
    )  # fmt: skip
    return o, kv, k_sum


@_decay_step.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decays: Tensor,
    keep: Tensor | None,
    kv_in: Tensor | None,
    sum_in: Tensor | None,
    normalizer: str,
) -> tuple[Tensor, ...]:
    batch, _, heads, key_width = k.shape
    k_sum = k.new_empty(batch, heads, key_width, dtype=torch.float32)
    return torch.empty_like(v), k_sum.new_empty(*k_sum.shape, v.shape[-1]), k_sum
