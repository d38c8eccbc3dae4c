"""One scan in Triton: keys and values are read once, queries once, and outputs written once.

Sums over tokens are taken in as many parts as keep the device busy. Their merge, and what state
comes in, is a kernel of its own over few numbers. All kernels are in `onescan.kernels.one_scan`.

Source: LightNet, arXiv:2405.21022, Eq. 14 and App. A.2.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onescan.kernels import one_scan as kernels
from onescan.kernels.common import Blocks, width_at_once
from onescan.ops.additive_decay.state import AdditiveDecayState, per_feature, per_key
from onescan.ops.launch import (
    as_multiplied,
    chip_of,
    data_type,
    launch,
    name_of,
    programs_wanted,
    turn_table,
)
from onescan.shapes import Angles, Keep, Keys, Queries, Values

LEAST_SPLIT = 256  # tokens; a part's sums are as many bytes as 128 tokens of a head of 64


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
    o, z, kv, *_ = _one_scan(q, k, v, angles, keep, z_in, kv_in)
    return o, AdditiveDecayState(z, kv)


@torch.library.custom_op("onescan::one_scan", mutates_args=())
def _one_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Tensor | None,
    keep: Tensor | None,
    z_in: Tensor | None,
    kv_in: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs, the state (z and kv), and z again as a reference and what is summed under it."""
    batch, tokens, heads, key_width = k.shape
    value_width = v.shape[-1]
    features = key_width * (1 if angles is None else 2)
    sum_blocks, of_sums = _blocks(kernels.sum_blocks, k, v, angles, keep)
    read_blocks, of_reads = _blocks(kernels.read_blocks, k, v, angles, keep)
    turn = None if angles is None else turn_table(angles, k.dtype)
    split, parts = _split(batch * heads, key_width, tokens, sum_blocks, k.device)
    peak, mass = k.new_empty(2, parts, batch, heads, key_width, dtype=torch.float32)
    sums = peak.new_empty(parts, batch, heads, features, value_width)
    launch(
        kernels.summarize,
        (batch * heads * parts, -(-key_width // sum_blocks.keys)),
        sum_blocks, k, v, turn, keep, peak, mass, sums, batch, tokens, split, **of_sums,
    )  # fmt: skip
    scale = peak.new_empty(2, batch, heads, key_width)
    z = peak.new_empty(batch, heads, key_width, dtype=torch.float64)
    kv = peak.new_empty(batch, heads, features, value_width)
    launch(
        kernels.merge,
        (batch * heads, -(-features // sum_blocks.keys)),
        sum_blocks, peak, mass, sums, z_in, kv_in, *scale, z, kv, batch, parts,
        H=heads, K=key_width, V=value_width, F=features, STATE=z_in is not None,
        BLOCK_F=sum_blocks.keys, BLOCK_V=sum_blocks.values,
    )  # fmt: skip
    o = torch.empty_like(v)
    split, parts, holds = _tiles(
        batch * heads, key_width, tokens, read_blocks, name_of(k.dtype), k.device
    )
    launch(
        kernels.read_out,
        (batch * heads * parts,),
        read_blocks, q, turn, keep, as_multiplied(kv, k.dtype), o, batch, tokens, split,
        **of_reads, **holds,
    )  # fmt: skip
    return o, z, kv, scale


@_one_scan.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Tensor | None,
    keep: Tensor | None,
    z_in: Tensor | None,
    kv_in: Tensor | None,
) -> tuple[Tensor, ...]:
    batch, _, heads, key_width = k.shape
    features = key_width * (1 if angles is None else 2)
    per_key = k.new_empty(batch, heads, key_width, dtype=torch.float32)
    kv = per_key.new_empty(batch, heads, features, v.shape[-1])
    scale = per_key.new_empty(2, *per_key.shape)
    return torch.empty_like(v), per_key.double(), kv, scale


@torch.library.custom_op("onescan::one_scan_backward", mutates_args=())
def _one_scan_backward(
    do: Tensor,
    dz: Tensor,
    dkv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Tensor | None,
    keep: Tensor | None,
    kv: Tensor,
    scale: Tensor,
    turns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and angles, of kv as a whole, and <kv, its gradient> - dz."""
    batch, tokens, heads, key_width = k.shape
    sum_blocks, of_sums = _blocks(kernels.sum_blocks, k, v, angles, keep)
    collect_blocks, of_collects = _blocks(kernels.collect_blocks, k, v, angles, keep)
    turn = None if angles is None else turn_table(angles, k.dtype)
    split, parts = _split(batch * heads, key_width, tokens, sum_blocks, k.device)
    slopes = {"ANGLES": turns, "BLOCK_W": width_at_once(sum_blocks.values, name_of(k.dtype))}
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    dangles = k.new_empty(k.shape if turns else (0,), dtype=torch.float32)
    sums = torch.empty_like(kv.expand(parts, *kv.shape), memory_format=torch.contiguous_format)
    launch(
        kernels.spread,
        (batch * heads * parts, -(-key_width // sum_blocks.keys)),
        sum_blocks, q, do, turn, keep, as_multiplied(kv, k.dtype), dq, dangles, sums,
        batch, tokens, split, **of_sums, **slopes,
    )  # fmt: skip
    whole = sums.sum(0) + dkv.contiguous()
    rounded = as_multiplied(whole, k.dtype)  # so that what all values share cancels
    offset = (per_key(kv * rounded, k) - dz).float()
    split, parts, holds = _tiles(
        batch * heads, key_width, tokens, collect_blocks, name_of(k.dtype), k.device
    )
    launch(
        kernels.collect,
        (batch * heads * parts,),
        collect_blocks, k, v, turn, keep, *scale, rounded, offset, dk, dv, dangles,
        batch, tokens, split, **of_collects, **slopes, **holds,
    )  # fmt: skip
    return dq, dk, dv, dangles.sum(0), whole, offset


@_one_scan_backward.register_fake
def _(
    do: Tensor,
    dz: Tensor,
    dkv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Tensor | None,
    keep: Tensor | None,
    kv: Tensor,
    scale: Tensor,
    turns: bool,
) -> tuple[Tensor, ...]:
    dangles = k.new_empty(k.shape[1:] if turns else (), dtype=torch.float32)
    made = (torch.empty_like(x) for x in (q, k, v))
    return *made, dangles, torch.empty_like(kv), torch.empty_like(scale[0])


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, z, kv, scale = output
    ctx.save_for_backward(*inputs, z, kv, scale)


def _backward(ctx: Any, do: Tensor, dz: Tensor, dkv: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    q, k, v, angles, keep, z_in, kv_in, z, kv, scale = ctx.saved_tensors
    turns = angles is not None and ctx.needs_input_grad[3]
    dq, dk, dv, dangles, whole, offset = _one_scan_backward(
        do.contiguous(), dz, dkv, q, k, v, angles, keep, kv, scale, turns
    )
    dz_in = dkv_in = None
    if z_in is not None:
        share = (z_in - z).float().exp()
        dkv_in = whole * per_feature(share, whole)
        inner = per_key(kv_in * whole, k)
        dz_in = (share * (inner - offset)).to(z_in.dtype)
    return dq, dk, dv, dangles.to(angles.dtype) if turns else None, None, dz_in, dkv_in


_one_scan.register_autograd(_backward, setup_context=_keep_for_backward)


def _blocks(
    blocks_of: Callable[..., Blocks],
    k: Tensor,
    v: Tensor,
    angles: Tensor | None,
    keep: Tensor | None,
) -> tuple[Blocks, dict[str, Any]]:
    """Blocks of a kernel, and its constants."""
    widths = (k.shape[3], v.shape[3], name_of(k.dtype), chip_of(k.device))
    blocks = blocks_of(*widths, lrpe=angles is not None)
    constants = kernels.constants_of(
        k.shape[2], *widths, blocks, lrpe=angles is not None, keep=keep is not None
    )
    return blocks, constants


def _split(
    heads: int, key_width: int, tokens: int, blocks: Blocks, device: torch.device
) -> tuple[int, int]:
    """Tokens of a part, and how many parts."""
    programs = max(1, heads * -(-key_width // blocks.keys))  # a batch may be empty
    wanted = -(-programs_wanted(device) // programs)
    split = max(LEAST_SPLIT, -(-tokens // wanted))
    split = -(-split // blocks.tokens) * blocks.tokens
    return split, -(-tokens // split)


def _tiles(
    heads: int, key_width: int, tokens: int, blocks: Blocks, data: str, device: torch.device
) -> tuple[int, int, dict[str, bool]]:
    """The same of kernels that visit tiles, one a part unless kv is held; and whether it is."""
    if kernels.holds(blocks, key_width, data):
        return *_split(heads, key_width, tokens, blocks, device), {"HOLDS": True}
    return blocks.tokens, -(-tokens // blocks.tokens), {"HOLDS": False}
