"""Causal additive decay in chunks: linear time, for key logits of any size.

Unrolled, Eq. 13 is a causal sum over tokens, divided by a running normalizer:

    o_t = R_t(q_t / n_t)^T sum_{s <= t} R_s(exp(k_s)) v_s^T,    n_t = sum_{s <= t} exp(k_s)

exp(k_s) may overflow, so each weight is computed relative to a reference that rises with the
logits. The weight of token s for token t is then a product of a factor of s and a factor of t, and
the sum over s is a matrix product. A chunk has up to 8 blocks of 8 tokens:

- Within a block, the reference of token t is the running maximum m_t. The factors f_t with
  f_t / f_{t-1} = exp(m_t - m_{t-1}) convert between references of tokens.
- Within a chunk, the reference r_j of block j is an upper bound of the log-normalizer before the
  block. The factors g_j with g_j / g_{j-1} = exp(r_j - r_{j-1}) convert between blocks.
- The state passed between chunks is relative to the log-normalizer of all earlier tokens.

The ratios f_t / f_{t-1} and g_j / g_{j-1} are clamped to exp(CLIMB), so that f and g stay within
the range of float32. Where logits rise by more, earlier tokens keep a relative weight of
exp(-CLIMB), which is below the resolution of float32 near 1. The form is therefore exact for any
logits, without branches on values and without float64 copies of q, k or v.

References are constants. They cancel from the result, so no gradient flows through them.

With packed sequences, each chunk holds tokens of one sequence, and no state enters the first chunk
of a sequence.

Source: LightNet, arXiv:2405.21022, Eq. 13 and App. A.2.
"""

import itertools
import math
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onescan.checks import is_known
from onescan.ops.additive_decay.forms import (
    chunked_inputs,
    halve_chunks,
    recursive_halving,
    sum_by_sequence,
)
from onescan.ops.additive_decay.state import (
    AdditiveDecayState,
    AdditiveInputs,
    per_feature,
    per_key,
)
from onescan.ops.backend import wants_gradient
from onescan.ops.chunks import (
    join_chunks,
    linear_scan,
    needs_plain_functions,
    number_of_chunks,
    split_chunks,
)
from onescan.ops.lrpe import rotate_by
from onescan.ops.numerics import LOG_ZERO, differentiable_gradients, disable_autocast
from onescan.shapes import Values

BLOCK = 8  # tokens per block
MAX_BLOCKS = 8  # per chunk: eight steps of exp(CLIMB), half of them below 1, fit in float32
# Largest step between references of blocks and of tokens. The mass relative to the reference of a
# token is up to 9, hence the larger step.
CLIMB = {torch.float32: (17.0, 19.0), torch.float64: (40.0, 42.0)}
TILE = 1 << 20  # elements of k that a CPU scans at a time, so that intermediates fit its caches
MIN_EXPONENT = -87.0  # exp is many times slower if its result is subnormal


def forward(inputs: AdditiveInputs) -> tuple[Values, AdditiveDecayState]:
    """Compute causal additive decay in chunks."""
    size = inputs.chunk_size
    if inputs.packing is not None:
        size = inputs.packing.chunk_size(size)
    blocks = min(max(size // BLOCK, 1), MAX_BLOCKS)
    if inputs.packing is None and is_known(tokens := inputs.k.shape[1]):
        blocks = min(blocks, -(-tokens // BLOCK))
    inputs = inputs._replace(chunk_size=blocks * BLOCK)
    if not torch.compiler.is_compiling() and needs_plain_functions(
        inputs.q, inputs.k, inputs.v, inputs.angles, *(inputs.state or ())
    ):
        return recursive_halving(inputs)
    tensors, chunks = chunked_inputs(inputs)
    if wants_gradient(*tensors) and not torch.compiler.is_exporting():
        o, *after = _CausalScan.apply(*tensors, blocks)
    else:
        o, *after = _scan_tiles(*tensors, blocks)[0]
    return o if chunks is None else chunks.to_tokens(o), AdditiveDecayState(*after)


class _Factors(NamedTuple):
    """Results of the forward pass for the backward pass. F is 2K with LRPE, otherwise K.

    Attributes:
        v: Values, [B, H, N, C, V].
        table: Cosines and sines, [1 or B, H, N, C, 2, K]; None without LRPE.
        p: q_t / n_t relative to the references of tokens, [B, H, N, C, K].
        reciprocal: 1 / n_t relative to the same references, [B, H, N, J, 8, K].
        w_token: Weights of keys relative to the references of tokens, [B, H, N, C, K].
        w_block: Weights of keys relative to the references of blocks, [B, H, N, C, K].
        to_block: Factor from the reference of a block's first token to that of the block,
            [B, H, N, J, K], times f.
        to_chunk: 1 / g_j, [B, H, N, J, K]. Multiply p by `to_block` first and by `to_chunk` second,
            and gradients of p in the opposite order. Other orders may underflow.
        enter: g_0, [B, H, N, K], which converts the state before a chunk.
        leave: 1 / g_J, [B, H, N, K], which converts the state after a chunk.
        decay: Factor of the state from chunk to chunk, [B, H, N, K].
        mass_in: Normalizer before the first chunk, relative to its reference, [B, H, K].
        mass_out: Normalizer after the last chunk, relative to its reference, [B, H, K].
        kv_in: Incoming state, [B, H, F, V].
        kv_out: Outgoing state, [B, H, F, V].
        kv: States before each chunk, times g_0, [B, H, N, F, V].
        scores: Weights of values, [B, H, N, C, C].
        begins: Chunks that begin a packed sequence, [B, 1, N, 1]; None if there are none.
    """

    v: Tensor
    table: Tensor | None
    p: Tensor
    reciprocal: Tensor
    w_token: Tensor
    w_block: Tensor
    to_block: Tensor
    to_chunk: Tensor
    enter: Tensor
    leave: Tensor
    decay: Tensor
    mass_in: Tensor
    mass_out: Tensor
    kv_in: Tensor
    kv_out: Tensor
    kv: Tensor
    scores: Tensor
    begins: Tensor | None


def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    z_in: Tensor,
    kv_in: Tensor,
    begins: Tensor | None,
    blocks: int,
) -> tuple[tuple[Tensor, Tensor, Tensor], _Factors]:
    """Return the outputs, the outgoing log-normalizer and state, and data for the backward pass."""
    tokens, size = k.shape[1], blocks * BLOCK
    chunks = number_of_chunks(tokens, size)
    dtype = q.dtype
    block_climb, token_climb = CLIMB[dtype]
    q, v = (split_chunks(x, chunks, size).contiguous() for x in (q, v))  # B H N C .
    k = split_chunks(k, chunks, size, fill=-torch.inf).contiguous()
    k = k.unflatten(3, (blocks, BLOCK))  # B H N J 8 K
    if table is not None:
        table = split_chunks(table, chunks, size).contiguous()  # . H N C 2 K

    # 1. Masses of blocks relative to their maxima, and log-normalizers between chunks.
    peak = k.amax(-2).clamp_(min=LOG_ZERO)  # B H N J K
    weight = _exp_(k - peak.unsqueeze(-2))
    mass = weight.sum(-2)
    top = peak.amax(-2)
    z_chunk = (mass * _exp_(peak - top.unsqueeze(-2))).sum(-2).double().log() + top.double()
    z = torch.cat([z_in.unsqueeze(2), z_chunk.clamp_(min=LOG_ZERO)], 2)
    z = z.logcumsumexp(2) if begins is None else sum_by_sequence(z, begins)  # B H N+1 K
    boundary = z.to(dtype)
    # Mass relative to the rounded reference. LOG_ZERO changes when rounded to float32: without
    # tokens, set the mass to 1.
    chunk_mass = torch.where(z > LOG_ZERO, z - boundary, 0).exp().to(dtype)
    before, after = boundary[:, :, :-1], boundary[:, :, 1:]
    mass_before, mass_out = chunk_mass[:, :, :-1], chunk_mass[:, :, -1]
    if begins is not None:
        before, mass_before = (
            before.masked_fill(begins, LOG_ZERO),
            mass_before.masked_fill(begins, 1),
        )
    decay = _exp_(before - after)

    # 2. Factors of blocks. Before block j there are 8 j tokens, and the state with a mass of 1.
    references, top = [before], before
    for j in range(1, blocks):
        top = torch.maximum(top, peak.select(-2, j - 1))
        references.append(top + math.log(1 + j * BLOCK))
    reference = torch.stack([*references, after], 3)  # B H N J+1 K
    climb = reference.diff(dim=-2).clamp_(max=block_climb)
    g = torch.cat([climb.sum(-2, keepdim=True).mul_(-0.5), climb], -2).exp_().cumprod(-2)
    enter, leave = g.select(-2, 0), g.select(-2, -1).reciprocal()
    to_chunk = g.narrow(-2, 0, blocks).reciprocal()
    reference, scale = (
        reference[..., :-1, :],
        _exp_(peak - reference[..., 1:, :]).mul_(g[..., 1:, :]),
    )
    mass = mass * scale
    mass = torch.cat([(mass_before * enter).unsqueeze(-2), mass[..., :-1, :]], -2)
    mass = mass.cumsum(-2)
    w_block = weight.mul_(scale.unsqueeze(-2)).flatten(3, 4)

    # 3. Factors of tokens.
    first = torch.maximum(reference, k.select(-2, 0))
    w_token, normalizer = torch.empty_like(k), torch.empty_like(k)
    top, total = first, torch.zeros_like(first)
    for i in range(BLOCK):
        key = k.select(-2, i)
        higher = torch.maximum(top, key)
        step = (higher - top).clamp_(max=token_climb)
        w_token.select(-2, i).copy_(key - higher)
        normalizer.select(-2, i).copy_(step)
        total += step
        top = higher
    _exp_(w_token)
    normalizer.exp_()
    f = total.mul_(-0.5).exp_()
    to_block = _exp_(reference - first).mul_(f)
    running = (mass * to_chunk).mul_(to_block)
    for i in range(BLOCK):
        f = f * normalizer.select(-2, i)
        key = w_token.select(-2, i).mul_(f)
        running = running + key
        normalizer.select(-2, i).copy_(running)
    reciprocal = normalizer.reciprocal_()
    p = q.view_as(k) * reciprocal
    p_block = (p * to_block.unsqueeze(-2)).mul_(to_chunk.unsqueeze(-2)).flatten(3, 4)
    p, w_token = p.flatten(3, 4), w_token.flatten(3, 4)

    # 4. Products.
    p_far, w_far = rotate_by(p_block, table), rotate_by(w_block, table)
    scores = _scores(p_far @ w_far.mT, rotate_by(p, table), rotate_by(w_token, table))
    added = w_far.mT @ v
    added.mul_(per_feature(leave, added))
    mass_in = mass_before[:, :, 0]
    if begins is not None:
        is_last = F.pad(begins[:, :, 1:], (0, 0, 0, 1))  # states end with their sequence
        decay = decay.masked_fill(is_last, 0)
        added.masked_fill_(is_last.unsqueeze(-1), 0)
        mass_in = mass_in.masked_fill(begins[:, :, 0], 0)
    kv, last = linear_scan(kv_in * per_feature(mass_in, kv_in), added, per_feature(decay, added))
    kv = kv * per_feature(enter, kv)
    o = scores @ v
    _add_product_(o, p_far, kv)
    kv_out = last / per_feature(mass_out, last)
    return (join_chunks(o, tokens), z[:, :, -1], kv_out), _Factors(
        v, table, p, reciprocal, w_token, w_block, to_block, to_chunk,
        enter, leave, decay, mass_in, mass_out, kv_in, kv_out, kv, scores, begins,
    )  # fmt: skip


def _scan_gradients(
    saved: _Factors, do: Tensor, dz: Tensor, dkv: Tensor, *, wants_dtable: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Return gradients of q, k, v, the table, z_in and kv_in.

    The gradient of n_t is -h_t with h_t = q_t dq_t / n_t per channel. The logit of a key receives
    the sum of -h_t over the tokens that read the key, times the weight of the key.
    """
    (v, table, p, reciprocal, w_token, w_block, to_block, to_chunk,
     enter, leave, decay, mass_in, mass_out, kv_in, kv_out, kv, scores, begins) = saved  # fmt: skip
    tokens, blocks = do.shape[1], to_chunk.shape[3]
    in_blocks = reciprocal.shape
    do = split_chunks(do, v.shape[2], v.shape[3]).contiguous()
    p_token = rotate_by(p, table)
    p_far = _scaled(p_token, to_block, to_chunk)
    w_far = rotate_by(w_block, table)
    dv = scores.mT @ do
    dscores = do @ v.mT
    dscores_within = _diagonal(dscores, blocks).tril()
    _mask_blocks_(dscores)

    # 1. Queries.
    dp = dscores @ w_far
    _add_product_(dp, do, kv.mT)
    dp = _scaled(dp, to_chunk, to_block)
    _add_product_(_in_blocks(dp), dscores_within, _in_blocks(rotate_by(w_token, table)))
    dq = _rotate_back(dp, table)
    dq = dq.view(in_blocks).mul_(reciprocal)

    # 2. Normalizers, and states, from the last chunk to the first.
    h = p.view(in_blocks) * dq
    later = torch.empty_like(h)  # sums of h over this and later tokens of a block
    running = torch.zeros_like(to_block)
    for i in reversed(range(BLOCK)):
        running = running + h.select(-2, i)
        later.select(-2, i).copy_(running)
    of_blocks = (running * to_block).mul_(to_chunk).flip(-2).cumsum(-2).flip(-2)
    # The gradient of the last normalizer, since z = log(mass) + constant and kv = sum / mass.
    dkv = dkv / per_feature(mass_out, dkv)
    y = per_key(kv_out * dkv, mass_out) - (dz / mass_out).to(dkv.dtype)
    of_state = of_blocks.select(-2, 0) * enter
    if begins is not None:
        of_state = of_state.masked_fill(begins, 0)
    y, y_in = linear_scan(y, of_state, decay, backward=True)
    x = F.pad(of_blocks[..., 1:, :], (0, 0, 0, 1)) + (leave * y).unsqueeze(-2)
    added = p_far.mT @ do
    added.mul_(per_feature(enter, added))
    if begins is not None:
        added.masked_fill_(begins.unsqueeze(-1), 0)
    dkv, dkv_in = linear_scan(dkv, added, per_feature(decay, added), backward=True)
    dkv = dkv * per_feature(leave, dkv)
    dz_in = mass_in * (per_key(kv_in * dkv_in, mass_in) - y_in)
    dkv_in = dkv_in * per_feature(mass_in, dkv_in)

    # 3. Keys and values.
    dw_far = dscores.mT @ p_far
    _add_product_(dw_far, v, dkv.mT)
    dw_token = (dscores_within.mT @ _in_blocks(p_token)).view_as(dw_far)
    _add_product_(dv, w_far, dkv)
    dtable = None
    if wants_dtable and table is not None:
        terms = dp.unflatten(-1, (2, -1)) * p.unsqueeze(-2)
        for dw, weight in ((dw_far, w_block), (dw_token, w_token)):
            terms.addcmul_(dw.unflatten(-1, (2, -1)), weight.unsqueeze(-2))
        dtable = join_chunks(terms.sum_to_size(table.shape), tokens)
    dk = _rotate_back(dw_far, table).view(in_blocks).sub_(x.unsqueeze(-2))
    dk.mul_(w_block.view(in_blocks))
    dw = _rotate_back(dw_token, table).view(in_blocks).sub_(later)
    dk.addcmul_(dw, w_token.view(in_blocks))
    dq, dk, dv = (join_chunks(g.reshape(*v.shape[:4], g.shape[-1]), tokens) for g in (dq, dk, dv))
    return dq, dk, dv, dtable, dz_in, dkv_in


class _CausalScan(torch.autograd.Function):
    """Chunk form with a custom gradient in which references are constants."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        outputs, tiles = _scan_tiles(*inputs)
        ctx.blocks = inputs[-1]
        ctx.save_for_backward(*inputs[:-1], *itertools.chain(*tiles))
        return outputs

    @staticmethod
    def backward(ctx: Any, do: Tensor, dz: Tensor, dkv: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, table, z_in, kv_in, begins, *rest = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            inputs = (q, k, v, table, z_in, kv_in, begins)
            size = ctx.blocks * BLOCK
            function = partial(halve_chunks, size=size)
            return *differentiable_gradients(function, inputs, (do, dz, dkv)), None
        tiles = [
            _Factors(*part) for part in zip(*[iter(rest)] * len(_Factors._fields), strict=True)
        ]
        lengths = _tile_lengths(k, ctx.blocks)
        parts = []
        with disable_autocast(q):  # a backward pass may run under autocast
            for saved, do_tile in zip(tiles[::-1], do.split(lengths, dim=1)[::-1], strict=True):
                *tile_gradients, dz, dkv = _scan_gradients(
                    saved, do_tile, dz, dkv, wants_dtable=ctx.needs_input_grad[3]
                )
                parts.append(tile_gradients)
        *gradients, dtables = zip(*parts[::-1], strict=True)
        dq, dk, dv = (torch.cat(x, dim=1) for x in gradients)
        dtable = None if dtables[0] is None else torch.cat(dtables, dim=1)
        return dq, dk, dv, dtable, dz.to(z_in.dtype), dkv, None, None


def _scan_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    z: Tensor,
    kv: Tensor,
    begins: Tensor | None,
    blocks: int,
) -> tuple[tuple[Tensor, Tensor, Tensor], list[_Factors]]:
    """Scan one tile after another, so that the data of a tile fits the caches of a CPU."""
    lengths, size = _tile_lengths(k, blocks), blocks * BLOCK
    if len(lengths) == 1:
        outputs, saved = _scan(q, k, v, table, z, kv, begins, blocks)
        return outputs, [saved]
    o, tiles, start = torch.empty_like(v), [], 0
    for length in lengths:
        index = slice(None), slice(start, start + length)
        part_table = None if table is None else table[index]
        part_begins = (
            None if begins is None else begins[:, :, start // size : (start + length) // size]
        )
        (o[index], z, kv), saved = _scan(
            q[index], k[index], v[index], part_table, z, kv, part_begins, blocks
        )
        tiles.append(saved)
        start += length
    return (o, z, kv), tiles


def _tile_lengths(k: Tensor, blocks: int) -> list[int]:
    """Return the number of tokens per tile; compiled and exported programs use a single tile."""
    if torch.compiler.is_compiling() or k.device.type != "cpu":
        return [k.shape[1]]
    size = blocks * BLOCK
    length = max(1, TILE // max(1, k[:, :size].numel())) * size
    full, rest = divmod(k.shape[1], length)
    return [length] * full + [rest] * (rest > 0)


def _exp_(x: Tensor) -> Tensor:
    """Compute exp in place, with 0 where the result would be nearly subnormal."""
    x = x.clamp_(min=MIN_EXPONENT).exp_()
    return F.threshold(x, 2 * math.exp(MIN_EXPONENT), 0.0, inplace=True)


def _rotate_back(x: Tensor, table: Tensor | None) -> Tensor:
    """Apply the transpose of `rotate_by`."""
    if table is None:
        return x
    cos, sin = table.unbind(-2)
    of_cos, of_sin = x.chunk(2, -1)
    return (of_cos * cos).addcmul_(of_sin, sin)


def _scaled(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Multiply [B, H, N, C, F] by two factors of blocks, [B, H, N, J, K], one after the other."""
    blocks, width = first.shape[-2:]
    halves = x.view(*x.shape[:3], blocks, BLOCK, x.shape[-1] // width, width)
    return (halves * first[..., None, None, :]).mul_(second[..., None, None, :]).view_as(x)


def _in_blocks(x: Tensor) -> Tensor:
    return x.unflatten(3, (-1, BLOCK))


def _add_product_(out: Tensor, x: Tensor, y: Tensor) -> None:
    """Add x @ y to contiguous matrices in place."""
    out.view(-1, *out.shape[-2:]).baddbmm_(x.flatten(0, -3), y.flatten(0, -3))


def _scores(far: Tensor, p: Tensor, w: Tensor) -> Tensor:
    """Combine the scores between blocks with the scores within blocks."""
    _mask_blocks_(far)
    near = (_in_blocks(p) @ _in_blocks(w).mT).tril_()
    if torch.compiler.is_exporting():  # ONNX has no writing to a view of the diagonal
        within_blocks = torch.diag_embed(near.permute(0, 1, 2, 4, 5, 3), dim1=3, dim2=5)
        return far + within_blocks.flatten(5).flatten(3, 4)
    _diagonal(far, near.shape[3]).copy_(near)
    return far


def _mask_blocks_(scores: Tensor) -> None:
    """Zero scores [.., C, C] unless the key's block is before the query's block."""
    block = torch.arange(scores.shape[-1], device=scores.device) // BLOCK
    scores.masked_fill_(block.unsqueeze(1) <= block, 0)


def _diagonal(scores: Tensor, blocks: int) -> Tensor:
    """View the scores within blocks, [B, H, N, J, 8, 8]."""
    cut = scores.view(*scores.shape[:3], blocks, BLOCK, blocks, BLOCK)
    return cut.diagonal(dim1=3, dim2=5).permute(0, 1, 2, 5, 3, 4)
