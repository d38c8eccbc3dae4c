"""Decayed attention in chunks, in Triton: scores of a chunk once, for both directions.

What is kept for the backward is the inputs and the outputs; the states between chunks are summed
up again. A gradient has no gradient of its own. Kernels are in `onescan.kernels.decay_scalar` and
`decay_diagonal`.

Source: LION, arXiv:2502.16249, Sec. 3.4. States carried both ways are not in the paper.
"""

from typing import Any

import torch
from torch import Tensor

from onescan.kernels import decay_diagonal, decay_scalar
from onescan.ops.decay_attention import DecayState
from onescan.ops.decay_attention.forms import Directions
from onescan.ops.launch import chip_of, data_type, launch, name_of
from onescan.shapes import Keep, Keys, Queries, Values

_SCALAR = 4  # axes of [D, B, T, H]; a decay for each key channel has one more

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
    """Outputs, divided by their row sums as `normalizer` says, and the states that leave."""
    dtype = data_type(q, k, v)
    q, k, v = (x.to(dtype).contiguous() for x in (q, k, v))
    keep = None if keep is None else keep.contiguous()
    given = [x for x in decays if x is not None]
    logs = torch.stack([_of_all(x.float(), k) for x in given])
    kv, k_sum = _stacked(enters, k, v, len(given))
    o, _, kv, k_sum = _decay_chunks(q, k, v, logs, keep, kv, k_sum, normalizer)
    leaves = [DecayState(*side) for side in zip(kv.unbind(), k_sum.unbind(), strict=True)]
    return o.to(dtype), (leaves[0], leaves[1] if len(leaves) > 1 else None)


def _of_all(log_decay: Tensor, k: Tensor) -> Tensor:
    """A log-decay of each token and head, and of each key channel where they differ."""
    is_diagonal = log_decay.shape[-1] > 1
    return log_decay.expand(k.shape) if is_diagonal else log_decay.squeeze(-1).expand(k.shape[:3])


def _stacked(
    enters: Sides, k: Tensor, v: Tensor, directions: int
) -> tuple[Tensor | None, Tensor | None]:
    """Both sides' states as one, [D, B, H, K, V] and [D, B, H, K]; None where none enters."""
    sides = enters[:directions]
    if all(side is None for side in sides):
        return None, None
    nothing = k.new_zeros(k.shape[0], *k.shape[2:], dtype=torch.float32)
    empty = DecayState(nothing.unsqueeze(-1).expand(*nothing.shape, v.shape[-1]), nothing)
    parts = [empty if side is None else side for side in sides]
    kv, k_sum = (torch.stack([x.float() for x in part]) for part in zip(*parts, strict=True))
    return kv, k_sum


@torch.library.custom_op("onescan::decay_chunks", mutates_args=())
def _decay_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decays: Tensor,
    keep: Tensor | None,
    kv_in: Tensor | None,
    sum_in: Tensor | None,
    normalizer: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs, their row sums (nothing where not divided by them) and the states that leave."""
    o = torch.empty_like(v, dtype=_output_type(v, normalizer))
    c = v.new_empty(q.shape[:3] if normalizer != "none" else (0,), dtype=torch.float32)
    before, before_sum, kv, k_sum = _states(k, v, None, None, decays, keep, kv_in, sum_in)
    _read(q, k, v, None, decays, keep, before, before_sum, o, c, normalizer=normalizer)
    return o, c, kv, k_sum


@_decay_chunks.register_fake
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
    c = v.new_empty(q.shape[:3] if normalizer != "none" else (0,), dtype=torch.float32)
    batch, _, heads, width = k.shape
    k_sum = c.new_empty(len(decays), batch, heads, width)
    o = torch.empty_like(v, dtype=_output_type(v, normalizer))
    return o, c, k_sum.new_empty(*k_sum.shape, v.shape[-1]), k_sum


def _output_type(v: Tensor, normalizer: str) -> torch.dtype:
    """Wide where a row sum divides: its gradient is a small difference of what outputs hold."""
    return v.dtype if normalizer == "none" else torch.float32


@torch.library.custom_op("onescan::decay_chunks_backward", mutates_args=())
def _decay_chunks_backward(
    do: Tensor,
    dkv: Tensor,
    dsum: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decays: Tensor,
    keep: Tensor | None,
    kv_in: Tensor | None,
    sum_in: Tensor | None,
    o: Tensor,
    c: Tensor,
    normalizer: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, decays and the states that enter."""
    dq, dk, dv, ddecays = (torch.empty_like(x) for x in (q, k, v, decays))
    share, dc = _shares(o, do, c, normalizer)
    before, before_sum, *_ = _states(k, v, None, None, decays, keep, kv_in, sum_in)
    after, after_sum, dkv_in, dsum_in = _states(
        q, do, share, dc, decays, keep, dkv, dsum, gradient=True
    )
    _read(k, q, do, share, decays, keep, after, None, dv, None, normalizer=normalizer, turned=True)
    batch, tokens, heads, key_width = k.shape
    kernels, blocks, constants = _compiled(k, v, decays, keep, "slope_blocks")
    chunks = -(-tokens // blocks.tokens)
    given = (k, q, v, do, share, dc, decays, keep)
    enters, leaves = (before, before_sum), (after, after_sum)
    lengths = (batch, tokens, chunks)
    sides = {**constants, "ABOVE": len(decays) > 1, "ROWS": share is not None}
    lines = batch * heads * chunks
    if decays.ndim > _SCALAR:
        grid = (lines, -(-key_width // blocks.keys))
        made = (dq, dk, ddecays)
        launch(kernels.slopes, grid, blocks, *given, *enters, *leaves, *made, *lengths, **sides)
    else:
        kernel = kernels.slopes_of_queries
        states = (*enters, *leaves)
        launch(kernel, (lines,), blocks, *given, *states, dq, ddecays, *lengths, **sides)
        kernel = kernels.slopes_of_keys  # adds to what the other has written
        launch(kernel, (lines,), blocks, *given, *leaves, dk, ddecays, *lengths, **sides)
    return dq, dk, dv, ddecays, dkv_in, dsum_in


@_decay_chunks_backward.register_fake
def _(
    do: Tensor,
    dkv: Tensor,
    dsum: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decays: Tensor,
    keep: Tensor | None,
    kv_in: Tensor | None,
    sum_in: Tensor | None,
    o: Tensor,
    c: Tensor,
    normalizer: str,
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in (q, k, v, decays, dkv, dsum))


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.normalizer = inputs
    ctx.save_for_backward(*tensors, *output[:2])


def _backward(
    ctx: Any, do: Tensor, _: Tensor, dkv: Tensor, dsum: Tensor
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    slopes = (x.contiguous() for x in (do.to(saved[0].dtype), dkv, dsum))
    *made, dkv_in, dsum_in = _decay_chunks_backward(*slopes, *saved, ctx.normalizer)
    enters = (None, None) if saved[5] is None else (dkv_in, dsum_in)
    return *made, None, *enters, None


_decay_chunks.register_autograd(_backward, setup_context=_keep_for_backward)


def _compiled(
    k: Tensor, v: Tensor, decays: Tensor, keep: Tensor | None, blocks_of: str
) -> tuple[Any, Any, dict[str, Any]]:
    """The kernels of a call, the blocks of some, and what they are compiled for."""
    kernels: Any = decay_diagonal if decays.ndim > _SCALAR else decay_scalar
    of_call = (k.shape[3], v.shape[3], name_of(k.dtype), chip_of(k.device))
    blocks = getattr(kernels, blocks_of)(*of_call)
    constants = kernels.constants_of(k.shape[2], *of_call, blocks, keep=keep is not None)
    return kernels, blocks, constants


def _states(
    k: Tensor,
    v: Tensor,
    share: Tensor | None,
    dc: Tensor | None,
    decays: Tensor,
    keep: Tensor | None,
    enter: Tensor | None,
    enter_sum: Tensor | None,
    *,
    gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States before each chunk [D, B, H, N, K, V], their sums, and both after the last one."""
    batch, tokens, heads, key_width = k.shape
    kernels, blocks, constants = _compiled(k, v, decays, keep, "blocks_of")
    chunks = -(-tokens // blocks.tokens)
    last_sum = k.new_empty(len(decays), batch, heads, key_width, dtype=torch.float32)
    last = last_sum.new_empty(*last_sum.shape, v.shape[-1])
    before_sum = last_sum.new_empty(*last_sum.shape[:3], chunks, key_width)
    carried = torch.bfloat16 if k.dtype is torch.bfloat16 else torch.float32
    before = last.new_empty(*before_sum.shape, v.shape[-1], dtype=carried)
    launch(
        kernels.states,
        (last.shape[:3].numel(), -(-key_width // blocks.keys), -(-v.shape[-1] // blocks.values)),
        blocks, k, v, share, dc, decays, keep, enter, enter_sum,
        before, before_sum, last, last_sum, batch, tokens, chunks,
        **constants, ENTERS=enter is not None, GRADIENT=gradient, ROWS=share is not None,
    )  # fmt: skip
    return before, before_sum, last, last_sum


def _read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    share: Tensor | None,
    decays: Tensor,
    keep: Tensor | None,
    state: Tensor,
    state_sum: Tensor | None,
    o: Tensor,
    c: Tensor | None,
    *,
    normalizer: str,
    turned: bool = False,
) -> None:
    """Write outputs and row sums; turned, gradients of values."""
    batch, tokens, heads, _ = k.shape
    kernels, blocks, constants = _compiled(k, v, decays, keep, "read_blocks")
    chunks = -(-tokens // blocks.tokens)
    both = len(decays) > 1
    at_once = blocks.values if decays.ndim > _SCALAR else v.shape[-1]  # the other loops over them
    launch(
        kernels.read,
        (batch * heads * chunks, -(-v.shape[-1] // at_once)),
        blocks, q, k, v, share, decays, keep, state, state_sum, o, c, batch, tokens, chunks,
        **constants, BELOW=both or not turned, ABOVE=both or turned, TURNED=turned,
        NORMALIZER=decay_scalar.NORMALIZERS[normalizer],
    )  # fmt: skip


def _shares(
    o: Tensor, do: Tensor, c: Tensor, normalizer: str
) -> tuple[Tensor | None, Tensor | None]:
    """What outputs were multiplied by, and the gradients of row sums, both [B, T, H]."""
    if normalizer == "none":
        return None, None
    share, dc = torch.empty_like(c), torch.empty_like(c)
    lines, value_width = c.numel(), o.shape[-1]
    blocks = decay_scalar.share_blocks(value_width)
    launch(
        decay_scalar.shares,
        (-(-lines // blocks.tokens),),
        blocks, o, do, c, share, dc, lines,
        V=value_width, NORMALIZER=decay_scalar.NORMALIZERS[normalizer],
        BLOCK_T=blocks.tokens, BLOCK_V=blocks.values,
    )  # fmt: skip
    return share, dc
