"""Launch the kernels of additive decay, forward and backward.

- `one_scan` (not causal; `onescan.kernels.one_scan`): keys, values and queries are read once, and
  outputs are written once. Sums over tokens are split into enough parts to keep the device busy,
  then merged with the incoming state.
- `chunk` (causal; `onescan.kernels.causal_scan`): states are carried from chunk to chunk first,
  then all chunks are read at once. The backward pass recomputes the states instead of storing them.
- `recurrent` (causal, without gradients; `onescan.kernels.additive_step`): one kernel processes all
  tokens of a call, for decoding.

Source: LightNet, arXiv:2405.21022, Eq. 13, Eq. 14 and App. A.2.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onescan.kernels import additive_step, causal_scan
from onescan.kernels import one_scan as scan
from onescan.kernels.common import Blocks, Case
from onescan.ops.additive_decay.state import AdditiveDecayState, canonical, per_feature, per_key
from onescan.ops.backend import (
    as_multiplied,
    case_of,
    data_type,
    launch,
    operand_of,
    packed_heads,
    target_programs,
    token_stride,
)
from onescan.ops.feature_maps import KERNEL_MAPS, FeatureMapName
from onescan.ops.lrpe import RotaryPositions
from onescan.ops.lrpe_launch import rotary_table
from onescan.ops.packing import Packing
from onescan.shapes import Angles, Keep, Keys, Queries, Values

MIN_SPLIT = 256  # tokens; the sums of a part take as much memory as 128 tokens with K = V = 64


def one_scan(
    q: Queries, k: Keys, v: Values, angles: Angles | None, state: AdditiveDecayState | None, *,
    keep: Keep | None, chunk_size: int, packing: Packing | None,
) -> tuple[Values, AdditiveDecayState]:  # fmt: skip
    """Compute outputs and the state of all tokens, or of each packed sequence."""
    q, k, v, keep, z_in, kv_in = _contiguous(q, k, v, keep, state)
    spans = firsts = None
    if packing is not None:
        case = case_of(k, v, lrpe=angles is not None)
        spans, firsts = packing.spans(_split(k, scan.sum_blocks(case))[0])
    o, z, kv, *_ = _one_scan(q, k, v, angles, keep, z_in, kv_in, spans, firsts)
    return o, AdditiveDecayState(z, kv)


def chunk(
    q: Queries, k: Keys, v: Values, angles: Angles | None, state: AdditiveDecayState | None, *,
    keep: Keep | None, chunk_size: int, packing: Packing | None,
) -> tuple[Values, AdditiveDecayState]:  # fmt: skip
    """Compute outputs and the state after the last token."""
    q, k, v, keep, z_in, kv_in = _contiguous(q, k, v, keep, state)
    spans = None
    if packing is not None:
        case = case_of(k, v, lrpe=angles is not None, chunk_size=chunk_size)
        spans, _ = packing.spans(causal_scan.chunk_length(case))
    o, z, kv = _causal_scan(q, k, v, angles, keep, z_in, kv_in, spans, chunk_size)
    return o, AdditiveDecayState(z, kv)


def recurrent(
    q: Queries, k: Keys, v: Values, angles: Angles | None, state: AdditiveDecayState | None, *,
    keep: Keep | None, positions: RotaryPositions | None = None,
    feature_map: FeatureMapName = "identity",
) -> tuple[Values, AdditiveDecayState]:  # fmt: skip
    """Compute outputs and the state after the last token, token by token, without gradients."""
    theta, begin = (None, 0) if positions is None else positions
    position, start = (0, begin.to(k.device)) if isinstance(begin, Tensor) else (begin, None)
    dtype = data_type(q, k, v)
    q, k, v = (packed_heads(x.to(dtype)) for x in (q, k, v))
    z_in, kv_in = (None, None) if state is None else (state[0].double(), state[1].float())
    angles = None if angles is None else angles.float()
    others = (angles, theta, start, keep, z_in, kv_in)
    given = [None if x is None else x.contiguous() for x in others]
    o, z, kv = _step(q, k, v, *given, position, feature_map)
    return o, AdditiveDecayState(z, kv)


def _contiguous(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, state: AdditiveDecayState | None
) -> tuple[Any, ...]:
    """Return q, k and v in one dtype, keep, and a canonical state's tensors, all contiguous."""
    dtype = data_type(q, k, v)
    q, k, v = (x.to(dtype).contiguous() for x in (q, k, v))
    others = (keep, *((None, None) if state is None else canonical(state, torch.float32)))
    return q, k, v, *(None if x is None else x.contiguous() for x in others)


def _new_outputs(
    k: Tensor, v: Tensor, angles: Tensor | None, firsts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate o, and z and kv of each sample or packed sequence."""
    batch, _, heads, key_width = k.shape
    if firsts is not None:
        batch = firsts.shape[0] - 1
    features = key_width * (1 if angles is None else 2)
    z = k.new_empty(batch, heads, key_width, dtype=torch.float64)
    kv = k.new_empty(batch, heads, features, v.shape[-1], dtype=torch.float32)
    return v.new_empty(v.shape), z, kv


def _new_gradients(
    q: Tensor, k: Tensor, v: Tensor, wants_dangles: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Allocate the gradients of q, k, v and, for each sample, of angles, in their dtype."""
    dangles = torch.empty_like(k) if wants_dangles else None
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dangles


def _summed(dangles: Tensor | None, k: Tensor) -> Tensor:
    """Sum the gradients of angles over samples. Without gradients, return an empty tensor."""
    if dangles is None:
        return k.new_empty((), dtype=torch.float32)
    return dangles.sum(0, dtype=torch.float32)


@torch.library.custom_op("onescan::one_scan", mutates_args=())
def _one_scan(
    q: Tensor, k: Tensor, v: Tensor, angles: Tensor | None, keep: Tensor | None,
    z_in: Tensor | None, kv_in: Tensor | None, spans: Tensor | None, firsts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return o, z, kv, and z split into a reference and a sum relative to it, called `scale`."""
    batch, tokens, heads, key_width = k.shape
    case = case_of(k, v, lrpe=angles is not None)
    o, z, kv = _new_outputs(k, v, angles, firsts)
    rotary = None if angles is None else rotary_table(angles, k.dtype)
    split, parts, keys = _split(k, scan.sum_blocks(case), spans)
    peak, mass = k.new_empty(2, batch, parts, heads, key_width, dtype=torch.float32)
    sums = kv.new_empty(batch, parts, *kv.shape[1:])
    launch(
        scan.summarize, case, (batch * heads * parts, keys),
        k, v, rotary, keep, peak, mass, sums, spans, batch, tokens, split, parts,
    )  # fmt: skip
    scale = kv.new_empty(2, *z.shape)
    grid = (len(kv) * heads, -(-kv.shape[2] // scan.sum_blocks(case).keys))
    launch(scan.merge, case, grid, peak, mass, sums, z_in, kv_in, *scale, z, kv, firsts, parts)
    split, parts = _tiles(k, case, scan.read_blocks(case), spans)
    launch(
        scan.read_out, case, (batch * heads * parts,),
        q, rotary, keep, as_multiplied(kv, k.dtype), o, spans, batch, tokens, split, parts,
    )  # fmt: skip
    return o, z, kv, scale


@_one_scan.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, angles: Tensor | None, *others: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    o, z, kv = _new_outputs(k, v, angles, others[-1])
    return o, z, kv, kv.new_empty(2, *z.shape)


@torch.library.custom_op("onescan::one_scan_backward", mutates_args=())
def _one_scan_backward(
    do: Tensor, dz: Tensor | None, dkv: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    angles: Tensor | None, keep: Tensor | None, spans: Tensor | None, firsts: Tensor | None,
    kv: Tensor, scale: Tensor, wants_dangles: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v and angles, the total gradient of kv, and <kv, dkv> - dz."""
    batch, tokens, heads, _ = k.shape
    case = case_of(k, v, lrpe=angles is not None)
    dq, dk, dv, dangles = _new_gradients(q, k, v, wants_dangles)
    rotary = None if angles is None else rotary_table(angles, k.dtype)
    split, parts, keys = _split(k, scan.sum_blocks(case), spans)
    sums = kv.new_empty(batch, parts, *kv.shape[1:])
    launch(
        scan.spread, case, (batch * heads * parts, keys),
        q, do, rotary, keep, as_multiplied(kv, k.dtype), dq, dangles, sums,
        spans, batch, tokens, split, parts,
    )  # fmt: skip
    if firsts is None:
        dkv_total = sums.sum(1)
    else:
        dkv_total = torch.segment_reduce(sums.flatten(0, 1), "sum", offsets=firsts, unsafe=True)
    if dkv is not None:
        dkv_total = dkv_total + dkv.contiguous()
    rounded = as_multiplied(dkv_total, k.dtype)  # so that components common to all values cancel
    offset = per_key(kv * rounded, k)
    offset = offset if dz is None else (offset - dz).float()
    blocks = scan.collect_blocks(case)
    tiles = 1 if spans is None or blocks.holds(case) else -(-split // blocks.tokens)
    split, parts = _tiles(k, case, blocks, spans)
    launch(
        scan.collect, case, (batch * heads * parts, tiles),
        k, v, rotary, keep, *scale, rounded, offset, dk, dv, dangles,
        spans, batch, tokens, split, parts,
    )  # fmt: skip
    return dq, dk, dv, _summed(dangles, k), dkv_total, offset


@_one_scan_backward.register_fake
def _(
    do: Tensor, dz: Tensor | None, dkv: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    angles: Tensor | None, keep: Tensor | None, spans: Tensor | None, firsts: Tensor | None,
    kv: Tensor, scale: Tensor, wants_dangles: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    *gradients, dangles = _new_gradients(q, k, v, wants_dangles)
    return *gradients, _summed(dangles, k), torch.empty_like(kv), torch.empty_like(scale[0])


def _save_for_one_scan(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output[1:])
    ctx.set_materialize_grads(False)  # zeros for states that nobody reads


def _backward_of_one_scan(
    ctx: Any, do: Tensor | None, dz: Tensor | None, dkv: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    q, k, v, angles, keep, z_in, kv_in, spans, firsts, z, kv, scale = ctx.saved_tensors
    wants_dangles = angles is not None and ctx.needs_input_grad[3]
    do = torch.zeros_like(v) if do is None else do.contiguous()
    dq, dk, dv, dangles, dkv_total, offset = _one_scan_backward(
        do, dz, dkv, q, k, v, angles, keep, spans, firsts, kv, scale, wants_dangles
    )
    dz_in = dkv_in = None
    if z_in is not None:
        share = (z_in - z).float().exp()
        dkv_in = dkv_total * per_feature(share, dkv_total)
        inner = per_key(kv_in * dkv_total, k)
        dz_in = (share * (inner - offset)).to(z_in.dtype)
    dangles = dangles.to(angles.dtype) if wants_dangles else None
    return dq, dk, dv, dangles, None, dz_in, dkv_in, None, None


_one_scan.register_autograd(_backward_of_one_scan, setup_context=_save_for_one_scan)


def _split(k: Tensor, blocks: Blocks, spans: Tensor | None = None) -> tuple[int, int, int]:
    """Return tokens per part, the number of parts, and the number of blocks of keys."""
    batch, tokens, heads, key_width = k.shape
    keys = -(-key_width // blocks.keys)
    target = -(-target_programs(k.device) // max(1, batch * heads * keys))  # a batch may be empty
    split = max(MIN_SPLIT, -(-tokens // target))
    split = -(-split // blocks.tokens) * blocks.tokens
    return split, -(-tokens // split) if spans is None else spans.shape[1], keys


def _tiles(k: Tensor, case: Case, blocks: Blocks, spans: Tensor | None) -> tuple[int, int]:
    """Return the tokens per part and the number of parts: one tile per part unless kv is held.

    With packed sequences, parts are those of `spans`.
    """
    if blocks.holds(case) or spans is not None:
        return _split(k, blocks, spans)[:2]
    return blocks.tokens, -(-k.shape[1] // blocks.tokens)


class _Chunks(NamedTuple):
    """How a causal call is divided into chunks, and the states between them.

    Attributes:
        case: Compile-time parameters of the kernels.
        rotary: Cosines and sines, [T, H, 2, K].
        number: Number of chunks.
        carry_grid: Grid of the kernels that carry a state.
        reference: Together with `mass`, the normalizers before each chunk, [B, N + 1, H, K].
        mass: See `reference`.
        before: States before each chunk, [B, N, H, F, V].
    """

    case: Case
    rotary: Tensor | None
    number: int
    carry_grid: tuple[int, int]
    reference: Tensor
    mass: Tensor
    before: Tensor


def _carry(
    k: Tensor, v: Tensor, angles: Tensor | None, keep: Tensor | None, z_in: Tensor | None,
    kv_in: Tensor | None, spans: Tensor | None, z: Tensor, kv: Tensor, chunk_size: int,
) -> _Chunks:  # fmt: skip
    """Compute the states before each chunk, and write the state after the last one to z and kv."""
    batch, tokens, heads, key_width = k.shape
    case = case_of(k, v, lrpe=angles is not None, chunk_size=chunk_size)
    blocks = causal_scan.carry_blocks(case)
    count = -(-tokens // blocks.tokens) if spans is None else spans.shape[1]
    reference = k.new_empty(batch, count + 1, heads, key_width, dtype=torch.float32)
    chunks = _Chunks(
        case=case,
        rotary=None if angles is None else rotary_table(angles, k.dtype),
        number=count,
        carry_grid=(batch * heads, -(-key_width // blocks.keys)),
        reference=reference,
        mass=torch.empty_like(reference),
        before=k.new_empty(batch, count, *kv.shape[1:], dtype=operand_of(k.dtype)),
    )
    launch(
        causal_scan.carry_forward, case, chunks.carry_grid,
        k, v, chunks.rotary, keep, z_in, kv_in, *chunks[-3:], z, kv, spans, tokens, count,
    )  # fmt: skip
    return chunks


@torch.library.custom_op("onescan::causal_scan", mutates_args=())
def _causal_scan(
    q: Tensor, k: Tensor, v: Tensor, angles: Tensor | None, keep: Tensor | None,
    z_in: Tensor | None, kv_in: Tensor | None, spans: Tensor | None, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return o, and z and kv after the last token."""
    batch, tokens, heads, _ = k.shape
    o, z, kv = _new_outputs(k, v, angles)
    chunks = _carry(k, v, angles, keep, z_in, kv_in, spans, z, kv, chunk_size)
    launch(
        causal_scan.read_chunks, chunks.case, (batch * heads * chunks.number,),
        q, k, v, chunks.rotary, keep, *chunks[-3:], o, spans, tokens, chunks.number,
        TRANSPOSED=False,
    )  # fmt: skip
    return o, z, kv


@_causal_scan.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, angles: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    return _new_outputs(k, v, angles)


@torch.library.custom_op("onescan::causal_scan_backward", mutates_args=())
def _causal_scan_backward(
    do: Tensor, dz: Tensor | None, dkv: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    angles: Tensor | None, keep: Tensor | None, z_in: Tensor | None, kv_in: Tensor | None,
    spans: Tensor | None, chunk_size: int, wants_dangles: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v and angles, and of z and kv before the first token."""
    batch, tokens, heads, _ = k.shape
    _, z, kv = _new_outputs(k, v, angles)
    chunks = _carry(k, v, angles, keep, z_in, kv_in, spans, z, kv, chunk_size)
    case, rotary, count, scale = chunks.case, chunks.rotary, chunks.number, chunks[-3:-1]
    dq, dk, dv, dangles = _new_gradients(q, k, v, wants_dangles)
    grid = (batch * heads * count,)
    launch(
        causal_scan.query_gradients, case, grid,
        q, k, v, rotary, keep, *scale, chunks.before, do, dq, dangles, spans, tokens, count,
    )  # fmt: skip
    after = torch.empty_like(chunks.before)
    dmass = chunks.mass.new_empty(batch, count, *k.shape[2:])
    dz_out = dz if dkv is None else (0 if dz is None else dz) - per_key(kv * dkv, k)
    if dz_out is not None:
        dz_out, dkv = dz_out.float(), torch.zeros_like(kv) if dkv is None else dkv.contiguous()
    dz_in, dkv_in = torch.empty_like(z, dtype=torch.float32), torch.empty_like(kv)
    launch(
        causal_scan.carry_backward, case, chunks.carry_grid,
        q, k, rotary, keep, *scale, do, dq, dz_out, dkv,
        after, dmass, dz_in, dkv_in, spans, tokens, count,
    )  # fmt: skip
    launch(
        causal_scan.key_gradients, case, grid,
        q, k, v, rotary, keep, *scale, after, dmass, do, dq, dk, dangles, spans, tokens, count,
    )  # fmt: skip
    launch(
        causal_scan.read_chunks, case, grid,
        q, k, do, rotary, keep, *scale, after, dv, spans, tokens, count, TRANSPOSED=True,
    )  # fmt: skip
    if kv_in is not None:
        dz_in = dz_in + per_key(kv_in * dkv_in, k)
    return dq, dk, dv, _summed(dangles, k), dz_in, dkv_in


@_causal_scan_backward.register_fake
def _(
    do: Tensor, dz: Tensor | None, dkv: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    angles: Tensor | None, *others: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    *gradients, dangles = _new_gradients(q, k, v, others[-1])
    _, z, kv = _new_outputs(k, v, angles)
    return *gradients, _summed(dangles, k), torch.empty_like(z, dtype=torch.float32), kv


def _save_for_chunks(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward_of_chunks(
    ctx: Any, do: Tensor | None, dz: Tensor | None, dkv: Tensor | None
) -> tuple[Tensor | None, ...]:
    v, angles, z_in = (ctx.saved_tensors[i] for i in (2, 3, 5))
    wants_dangles = angles is not None and ctx.needs_input_grad[3]
    do = torch.zeros_like(v) if do is None else do.contiguous()
    dq, dk, dv, dangles, dz_in, dkv_in = _causal_scan_backward(
        do, dz, dkv, *ctx.saved_tensors, ctx.chunk_size, wants_dangles
    )
    dangles = dangles.to(angles.dtype) if wants_dangles else None
    dstate = (None, None) if z_in is None else (dz_in.to(z_in.dtype), dkv_in)
    return dq, dk, dv, dangles, None, *dstate, None, None


_causal_scan.register_autograd(_backward_of_chunks, setup_context=_save_for_chunks)


@torch.library.custom_op("onescan::additive_step", mutates_args=())
def _step(
    q: Tensor, k: Tensor, v: Tensor, angles: Tensor | None, theta: Tensor | None,
    start: Tensor | None, keep: Tensor | None, z_in: Tensor | None, kv_in: Tensor | None,
    position: int, feature_map: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return o, and z and kv after the last token."""
    rotary = theta if angles is None else angles
    o, z, kv = _new_outputs(k, v, rotary)
    batch, tokens, heads, _ = k.shape
    case = case_of(k, v, lrpe=rotary is not None)
    launch(
        additive_step.step, case,
        (batch * heads * -(-v.shape[-1] // additive_step.step_blocks(case).values),),
        q, k, v, angles, theta, start, keep, z_in, kv_in, o, z, kv,
        tokens, position, *map(token_stride, (q, k, v)), MAP=KERNEL_MAPS[feature_map],
    )  # fmt: skip
    return o, z, kv


@_step.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, angles: Tensor | None, theta: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    return _new_outputs(k, v, theta if angles is None else angles)
