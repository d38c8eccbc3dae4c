"""Decoding in Triton: one kernel for a few tokens, forward only; `onescan.kernels.additive_step`.

Source: LightNet, arXiv:2405.21022, Eq. 13 and App. A.2.
"""

import torch
from torch import Tensor

from onescan.kernels import additive_step as kernels
from onescan.ops.additive_decay.state import AdditiveDecayState
from onescan.ops.backend import wants_gradient
from onescan.ops.launch import data_type, launch
from onescan.shapes import Angles, Keep, Keys, Queries, Values


def forward(
    q: Queries,
    k: Keys,
    v: Values,
    angles: Angles | None,
    state: AdditiveDecayState | None,
    *,
    keep: Keep | None,
    chunk_size: int,
) -> tuple[Values, AdditiveDecayState]:
    """Outputs and the state after the last token.

    Raises:
        ValueError: gradients are wanted.
    """
    z_in, kv_in = (None, None) if state is None else (state.log_normalizer, state.kv)
    if wants_gradient(q, k, v, angles, z_in, kv_in):
        raise ValueError(
            "form/backend is 'recurrent/triton', which has no gradients, and an input wants one: "
            "expected form 'chunk', or torch.no_grad()"
        )
    dtype = data_type(q, k, v)
    q, k, v = (x.to(dtype).contiguous() for x in (q, k, v))
    angles, kv_in = (None if x is None else x.float().contiguous() for x in (angles, kv_in))
    z_in = None if z_in is None else z_in.contiguous()
    keep = None if keep is None else keep.contiguous()
    o, z, kv = _step(q, k, v, angles, keep, z_in, kv_in)
    return o, AdditiveDecayState(z, kv)


@torch.library.custom_op("onescan::additive_step", mutates_args=())
def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Tensor | None,
    keep: Tensor | None,
    z_in: Tensor | None,
    kv_in: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    o, z, kv = _made(k, v, angles)
    batch, tokens, heads, key_width = k.shape
    blocks = kernels.blocks_of(key_width)
    launch(
        kernels.step,
        (batch * heads * -(-v.shape[-1] // blocks.values),),
        blocks, q, k, v, angles, keep, z_in, kv_in, o, z, kv, tokens,
        **kernels.constants_of(
            heads, key_width, v.shape[-1],
            lrpe=angles is not None, keep=keep is not None, state=kv_in is not None,
        ),
    )  # fmt: skip
    return o, z, kv


@_step.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Tensor | None,
    keep: Tensor | None,
    z_in: Tensor | None,
    kv_in: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _made(k, v, angles)


def _made(k: Tensor, v: Tensor, angles: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the outputs and the state."""
    batch, _, heads, key_width = k.shape
    features = key_width * (1 if angles is None else 2)
    z = k.new_empty(batch, heads, key_width, dtype=torch.float64)
    kv = k.new_empty(batch, heads, features, v.shape[-1], dtype=torch.float32)
    return torch.empty_like(v), z, kv
