"""Causal additive decay in Triton, in chunks: all kernels are in `onescan.kernels.causal_scan`.

States are carried from chunk to chunk first, then all chunks are read at once. The backward carries
them a second time rather than keep one for each chunk in between.

Source: LightNet, arXiv:2405.21022, Eq. 13 and App. A.2.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onescan.kernels import causal_scan as kernels
from onescan.kernels.common import Blocks
from onescan.ops.additive_decay.state import AdditiveDecayState, per_key
from onescan.ops.launch import chip_of, data_type, launch, name_of, operand_of, turn_table
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
    dtype = data_type(q, k, v)
    q, k, v = (x.to(dtype).contiguous() for x in (q, k, v))
    keep = None if keep is None else keep.contiguous()
    z_in, kv_in = (None, None) if state is None else (x.contiguous() for x in state)
    o, z, kv = _causal_scan(q, k, v, angles, keep, z_in, kv_in, chunk_size)
    return o, AdditiveDecayState(z, kv)


class _Plan(NamedTuple):
    """How a call is cut.

    Attributes:
        turn: cosines and sines, [T, H, 2, K].
        chunks: how many.
        carry: blocks of kernels that carry a state.
        of_carry: their constants.
        own: blocks of kernels whose programs have a chunk each.
        of_own: their constants.
        reference: to be filled, [B, N + 1, H, K]; with `mass` the normalizers before each chunk.
        mass: likewise.
        before: to be filled, the states before each chunk, [B, N, H, F, V].
    """

    turn: Tensor | None
    chunks: int
    carry: Blocks
    of_carry: dict[str, Any]
    own: Blocks
    of_own: dict[str, Any]
    reference: Tensor
    mass: Tensor
    before: Tensor


def _plan(
    k: Tensor, v: Tensor, angles: Tensor | None, keep: Tensor | None, chunk_size: int
) -> _Plan:
    batch, tokens, heads, key_width = k.shape
    data, chip = name_of(k.dtype), chip_of(k.device)
    # the largest power of two that was allowed for, and that the chip holds
    chunk = min(1 << (chunk_size.bit_length() - 1), kernels.longest_chunk(data, chip))
    widths = (key_width, v.shape[3], data, chip)
    carry, own = (
        f(*widths, max(chunk, kernels.SHORTEST_CHUNK))
        for f in (kernels.carry_blocks, kernels.chunk_blocks)
    )
    of_carry, of_own = (
        kernels.constants_of(heads, *widths, blocks, lrpe=angles is not None, keep=keep is not None)
        for blocks in (carry, own)
    )
    chunks = -(-tokens // own.tokens)
    features = key_width * (1 if angles is None else 2)
    reference = k.new_empty(batch, chunks + 1, heads, key_width, dtype=torch.float32)
    shape = (batch, chunks, heads, features, v.shape[3])
    return _Plan(
        turn=None if angles is None else turn_table(angles, k.dtype),
        chunks=chunks,
        carry=carry,
        of_carry=of_carry,
        own=own,
        of_own=of_own,
        reference=reference,
        mass=torch.empty_like(reference),
        before=k.new_empty(shape, dtype=operand_of(k.dtype)),
    )


def _carry(
    plan: _Plan,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    z_in: Tensor | None,
    kv_in: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Fill in the states before each chunk, and return the one after the last."""
    batch, tokens, heads, key_width = k.shape
    z = k.new_empty(batch, heads, key_width, dtype=torch.float64)
    kv = k.new_empty(batch, heads, *plan.before.shape[3:], dtype=torch.float32)
    launch(
        kernels.carry_forward,
        (batch * heads, -(-key_width // plan.carry.keys)),
        plan.carry, k, v, plan.turn, keep, z_in, kv_in,
        plan.reference, plan.mass, plan.before, z, kv, tokens, plan.chunks,
        **plan.of_carry, STATE=z_in is not None,
    )  # fmt: skip
    return z, kv


@torch.library.custom_op("onescan::causal_scan", mutates_args=())
def _causal_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Tensor | None,
    keep: Tensor | None,
    z_in: Tensor | None,
    kv_in: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, and the state after the last token."""
    batch, tokens, heads, _ = k.shape
    plan = _plan(k, v, angles, keep, chunk_size)
    z, kv = _carry(plan, k, v, keep, z_in, kv_in)
    o = torch.empty_like(v)
    launch(
        kernels.read_chunks,
        (batch * heads * plan.chunks,),
        plan.own, q, k, v, plan.turn, keep, plan.reference, plan.mass, plan.before, o,
        tokens, plan.chunks, **plan.of_own,
    )  # fmt: skip
    return o, z, kv


@_causal_scan.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Tensor | None,
    keep: Tensor | None,
    z_in: Tensor | None,
    kv_in: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, ...]:
    batch, _, heads, key_width = k.shape
    features = key_width * (1 if angles is None else 2)
    z = k.new_empty(batch, heads, key_width, dtype=torch.float64)
    kv = k.new_empty(batch, heads, features, v.shape[-1], dtype=torch.float32)
    return torch.empty_like(v), z, kv


@torch.library.custom_op("onescan::causal_scan_backward", mutates_args=())
def _causal_scan_backward(
    do: Tensor,
    dz: Tensor,
    dkv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Tensor | None,
    keep: Tensor | None,
    z_in: Tensor | None,
    kv_in: Tensor | None,
    chunk_size: int,
    turns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and angles, and of z and kv before the first token."""
    batch, tokens, heads, key_width = k.shape
    plan = _plan(k, v, angles, keep, chunk_size)
    _, kv = _carry(plan, k, v, keep, z_in, kv_in)
    scale = (plan.reference, plan.mass)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    dangles = k.new_empty(k.shape if turns else (0,), dtype=torch.float32)
    own_grid = (batch * heads * plan.chunks,)
    of_slopes = kernels.with_slopes(plan.of_own, plan.own, name_of(k.dtype))
    launch(
        kernels.query_gradients,
        own_grid,
        plan.own, q, k, v, plan.turn, keep, *scale, plan.before, do, dq, dangles,
        tokens, plan.chunks, **of_slopes, ANGLES=turns,
    )  # fmt: skip
    after = torch.empty_like(plan.before)
    dmass = torch.empty_like(plan.reference[:, 1:], memory_format=torch.contiguous_format)
    dz_out = (dz - per_key(kv * dkv, k)).float()
    dz_in, dkv_in = torch.empty_like(dz_out), torch.empty_like(kv)
    launch(
        kernels.carry_backward,
        (batch * heads, -(-key_width // plan.carry.keys)),
        plan.carry, q, k, plan.turn, keep, *scale, do, dq, dz_out, dkv.contiguous(),
        after, dmass, dz_in, dkv_in, tokens, plan.chunks, **plan.of_carry,
    )  # fmt: skip
    launch(
        kernels.key_gradients,
        own_grid,
        plan.own, q, k, v, plan.turn, keep, *scale, after, dmass, do, dq, dk, dangles,
        tokens, plan.chunks, **of_slopes, ANGLES=turns,
    )  # fmt: skip
    launch(
        kernels.value_gradients,
        own_grid,
        plan.own, q, k, plan.turn, keep, *scale, after, do, dv, tokens, plan.chunks, **plan.of_own,
    )  # fmt: skip
    if kv_in is not None:
        dz_in = dz_in + per_key(kv_in * dkv_in, k)
    return dq, dk, dv, dangles.sum(0), dz_in, dkv_in


@_causal_scan_backward.register_fake
def _(
    do: Tensor,
    dz: Tensor,
    dkv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Tensor | None,
    keep: Tensor | None,
    z_in: Tensor | None,
    kv_in: Tensor | None,
    chunk_size: int,
    turns: bool,
) -> tuple[Tensor, ...]:
    dangles = k.new_empty(k.shape[1:] if turns else (), dtype=torch.float32)
    made = (torch.empty_like(x) for x in (q, k, v))
    return *made, dangles, torch.empty_like(dz, dtype=torch.float32), torch.empty_like(dkv)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, do: Tensor, dz: Tensor, dkv: Tensor) -> tuple[Tensor | None, ...]:
    angles, z_in = ctx.saved_tensors[3], ctx.saved_tensors[5]
    turns = angles is not None and ctx.needs_input_grad[3]
    dq, dk, dv, dangles, dz_in, dkv_in = _causal_scan_backward(
        do.contiguous(), dz, dkv, *ctx.saved_tensors, ctx.chunk_size, turns
    )
    of_angles = dangles.to(angles.dtype) if turns else None
    of_state = (None, None) if z_in is None else (dz_in.to(z_in.dtype), dkv_in)
    return dq, dk, dv, of_angles, None, *of_state, None


_causal_scan.register_autograd(_backward, setup_context=_keep_for_backward)
