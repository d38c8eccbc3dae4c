"""Additive decay in plain torch: one scan, full attention and the recurrence.

If not causal (Eq. 14), one scan over all tokens computes the context that every token reads:

    O = R(Q) [R(softmax(K))^T V]        softmax over tokens, per channel

`tiled_causal.py` implements the chunk form of the causal sum (Eq. 13). Its transforms and second
derivatives use `recursive_halving`, which is slower and consists of plain operations.

Source: LightNet, arXiv:2405.21022, Eq. 13, Eq. 14 and App. A.2.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onescan.ops.additive_decay import tiled
from onescan.ops.additive_decay.ranks import merged_over_ranks, merged_sequences
from onescan.ops.additive_decay.state import (
    AdditiveDecayState,
    AdditiveInputs,
    empty_state,
    merged,
    per_feature,
    share,
)
from onescan.ops.chunks import (
    join_chunks,
    length_of_chunks,
    linear_scan,
    number_of_chunks,
    split_chunks,
)
from onescan.ops.lrpe import rotary_table, rotary_tables, rotate
from onescan.ops.numerics import LOG_ZERO, logaddexp, logcumsumexp
from onescan.ops.packing import Chunks, Packing, PackingShard
from onescan.ops.parallel import SequenceGroup
from onescan.shapes import Angles as Table  # of cosines or sines
from onescan.shapes import Keys, KeyValue, LogNormalizer, Queries, Values

# q, k, v, table, z_in, kv_in and begins, as in `halve_chunks`.
ChunkInputs = tuple[Tensor, Tensor, Tensor, Tensor | None, LogNormalizer, KeyValue, Tensor | None]


def one_scan(inputs: AdditiveInputs) -> tuple[Values, AdditiveDecayState]:
    """Sum over all tokens, then read the sum with every query: O(T).

    Products of bfloat16 inputs are bfloat16; weights, their sums and the state are float32.
    """
    q, k, v, angles, state, *_ = inputs
    packing, ranks = inputs.packing, inputs.ranks
    tables = rotary_tables(angles, k.dtype)
    if packing is not None:
        return _scan_sequences(q, k, v, tables, packing, ranks)
    if ranks is not None and not ranks.is_first:
        state = None  # which the first rank counts
    context = context_of(k, v, tables, state)
    if ranks is not None:
        context = merged_over_ranks(ranks, context)
    return tiled.read(q, context.kv, *tables), context


def full(inputs: AdditiveInputs) -> tuple[Values, AdditiveDecayState]:
    """Compute attention between all pairs of tokens: O(T^2)."""
    q, k, v, angles, state, *_ = inputs
    tables = rotary_tables(angles, k.dtype)
    context = context_of(k, v, tables, state)
    z = context.log_normalizer.unsqueeze(1)  # B 1 H K
    q, weight = rotate(q, *tables), rotate(share(k.double(), z, k), *tables)
    o = torch.einsum("bthf,bshf,bshv->bthv", q, weight, v)
    if state is not None:
        before = per_feature(share(state.log_normalizer, context.log_normalizer, q), state.kv)
        o = o + torch.einsum("bthf,bhfv->bthv", q, state.kv * before)
    return o, context


def causal_full(inputs: AdditiveInputs) -> tuple[Values, AdditiveDecayState]:
    """Compute causal attention between all pairs of tokens: O(T^2)."""
    return recursive_halving(inputs._replace(chunk_size=inputs.k.shape[1]))


def recurrent(inputs: AdditiveInputs) -> tuple[Values, AdditiveDecayState]:
    """Visit one token at a time: constant memory, for decoding."""
    q, k, v, angles, state, *_ = inputs
    tables = rotary_tables(angles, v.dtype)
    log_k = k.double().clamp(min=LOG_ZERO)
    # The state of a single token is its value, with the normalizer exp(k).
    unit = rotate((k > -torch.inf).to(v.dtype), *tables)
    outputs = []
    parts = (rotate(q, *tables).unsqueeze(-2), log_k, unit.unsqueeze(-1), v.unsqueeze(-2))
    for query, log_key, key, value in zip(*(x.unbind(1) for x in parts), strict=True):
        token = AdditiveDecayState(log_key, key * value)
        state = token if state is None else merged(state, token)
        outputs.append((query @ state.kv).squeeze(-2))
    assert state is not None
    return torch.stack(outputs, dim=1), state


def recursive_halving(inputs: AdditiveInputs) -> tuple[Values, AdditiveDecayState]:
    """Compute the causal sum of each chunk by recursive halving, and carry a state between chunks.

    A query in the right half of a block reads a key in the left half with the weight

        exp(k_s - z_t) = exp(k_s - z_m) exp(z_m - z_t),     m the last token of the left half,

    where no exponent is above 0. The halves are split again, down to single tokens. Normalizers are
    float64 and only their differences are converted to float32, because float32 has a spacing of
    1e-3 near a logit of 1e4.
    """
    tensors, chunks = chunked_inputs(inputs)
    size = inputs.chunk_size if chunks else length_of_chunks(inputs.chunk_size, inputs.k.shape[1])
    o, *after = halve_chunks(*tensors, size=size)
    return o if chunks is None else chunks.to_tokens(o), AdditiveDecayState(*after)


def chunked_inputs(inputs: AdditiveInputs) -> tuple[ChunkInputs, Chunks | None]:
    """Return the tensors of `halve_chunks`, and the chunks of packed sequences."""
    q, k, v, angles, state, *_ = inputs
    packing, table, size = inputs.packing, inputs.table, inputs.chunk_size
    state = empty_state(k, v, angles) if state is None else state
    chunks = begins = None
    if packing is not None:
        chunks = packing.chunks(size)
        q, v = chunks.from_tokens(q), chunks.from_tokens(v)
        k = chunks.from_tokens(k, fill=-torch.inf)
        begins = chunks.begins[:, None, :, None]
    table = rotary_table(angles, v.dtype) if table is None else table
    if table is not None:
        table = table.unsqueeze(0) if chunks is None else chunks.from_row(table)
    return (q, k, v, table, *state, begins), chunks


def halve_chunks(
    q: Queries,
    k: Keys,
    v: Values,
    table: Tensor | None,
    z_in: LogNormalizer,
    kv_in: KeyValue,
    begins: Tensor | None,
    *,
    size: int,
) -> tuple[Values, LogNormalizer, KeyValue]:
    """Compute chunks of `size` tokens by recursive halving, with plain operations.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        table: Cosines and sines, [1 or B, T, H, 2, K]; None without LRPE.
        z_in: Log-normalizer before the first token.
        kv_in: State before the first token.
        begins: Chunks that begin a packed sequence, [B, 1, N, 1]; None if there are none.
        size: Tokens per chunk.
    """
    tokens = k.shape[1]
    count = number_of_chunks(tokens, size)
    cos = sin = None
    if table is not None:
        cos, sin = (_power_of_two(x, count, size) for x in table.unbind(-2))  # . H N C K
    q, v = _power_of_two(q, count, size), _power_of_two(v, count, size)  # B H N C .
    k = _power_of_two(k.double(), count, size, fill=-torch.inf)

    # 1. States before each chunk, and log-normalizers within each chunk and up to each token.
    z_inside = logcumsumexp(k.clamp(min=LOG_ZERO))
    z_chunk = z_inside[..., -1, :]  # B H N K
    kv_chunk = rotate(share(k, z_chunk.unsqueeze(-2), q), cos, sin).mT @ v  # B H N F V
    carried = carry_states(z_chunk, kv_chunk, z_in, kv_in, begins)
    z_before = carried.z_before.unsqueeze(-2)
    z = logaddexp(z_before, z_inside)

    # 2. Each token reads the state before its chunk.
    o = rotate(q * share(z_before, z, q), cos, sin) @ carried.kv_before

    # 3. Within each chunk: first the token itself, then pairs of halves.
    o = o + (q * share(k, z, q)).sum(-1, keepdim=True) * v
    half = 1
    while half < q.shape[-2]:
        (_, q_right), (k_left, _), (z_left, z_right), (v_left, _) = (
            x.unflatten(-2, (-1, 2, half)).unbind(-3) for x in (q, k, z, v)
        )
        middle = z_left[..., -1:, :]
        left, right = share(k_left, middle, q), q_right * share(middle, z_right, q)
        if cos is not None and sin is not None:
            halves = (x.unflatten(-2, (-1, 2, half)).unbind(-3) for x in (cos, sin))
            of_left, of_right = zip(*halves, strict=True)
            left, right = rotate(left, *of_left), rotate(right, *of_right)
        crossing = (right @ left.mT) @ v_left
        o = o + F.pad(crossing, (0, 0, half, 0)).flatten(-3, -2)
        half *= 2
    return join_chunks(o[..., :size, :], tokens), carried.z_after[:, :, -1], carried.kv_out


class Carried(NamedTuple):
    """States before and after each chunk, each including all earlier chunks.

    Attributes:
        z_before: Log-normalizer before each chunk, [B, H, N, K].
        z_after: Log-normalizer after each chunk, [B, H, N, K].
        kv_before: State before each chunk, [B, H, N, F, V].
        kv_out: State after the last chunk, [B, H, F, V].
        decay: Factor of `kv_before` in the state after each chunk, [B, H, N, F, 1].
        added: Contribution of each chunk to the state after it, [B, H, N, F, V].
    """

    z_before: Tensor
    z_after: Tensor
    kv_before: Tensor
    kv_out: KeyValue
    decay: Tensor
    added: Tensor


def carry_states(
    z_chunk: Tensor, kv_chunk: Tensor, z_in: Tensor, kv_in: KeyValue, begins: Tensor | None
) -> Carried:
    """Carry a state from chunk to chunk.

    Args:
        z_chunk: Log-normalizer of each chunk alone, [B, H, N, K].
        kv_chunk: State of each chunk alone, [B, H, N, F, V].
        z_in: Log-normalizer before the first chunk, [B, H, K].
        kv_in: State before the first chunk, [B, H, F, V].
        begins: True for chunks that begin a packed sequence, [B, 1, N, 1]; None if there are none.
    """
    z_after = torch.cat([z_in.unsqueeze(2), z_chunk], dim=2)
    z_after = logcumsumexp(z_after) if begins is None else sum_by_sequence(z_after, begins)
    z_before, z_after = z_after[:, :, :-1], z_after[:, :, 1:]
    if begins is not None:
        z_before = z_before.masked_fill(begins, LOG_ZERO)
    added = kv_chunk * per_feature(share(z_chunk, z_after, kv_chunk), kv_chunk)
    decay = per_feature(share(z_before, z_after, kv_chunk), kv_chunk)
    passed_on = added, decay
    if begins is not None:
        is_last = F.pad(begins[:, :, 1:], (0, 0, 0, 1)).unsqueeze(-1)
        passed_on = added.masked_fill(is_last, 0), decay.masked_fill(is_last, 0)
    kv_before, kv_out = linear_scan(kv_in, *passed_on)
    return Carried(z_before, z_after, kv_before, kv_out, decay, added)


def sum_by_sequence(z: Tensor, begins: Tensor) -> Tensor:
    """Compute log sum exp over the chunks of a sequence so far, in a logarithmic number of steps.

    Args:
        z: State before the first chunk, then log-normalizers of the chunks, [B, H, N + 1, K].
        begins: Chunks that begin a sequence, [B, 1, N, 1].
    """
    reaches_start, step = F.pad(begins, (0, 0, 1, 0), value=True), 1
    while step < z.shape[2]:
        earlier = F.pad(z[:, :, :-step], (0, 0, step, 0), value=LOG_ZERO)
        z = logaddexp(z, earlier.masked_fill(reaches_start, LOG_ZERO))
        reaches_start = reaches_start | F.pad(
            reaches_start[:, :, :-step], (0, 0, step, 0), value=True
        )
        step *= 2
    return z


def _power_of_two(x: Tensor, count: int, size: int, *, fill: float = 0.0) -> Tensor:
    """Split [B, T, H, X] into chunks of `size` tokens, each padded to a power of two."""
    x = split_chunks(x, count, size, fill=fill)
    return F.pad(x, (0, 0, 0, (1 << (size - 1).bit_length()) - size), value=fill).contiguous()


def _scan_sequences(
    q: Queries,
    k: Keys,
    v: Values,
    tables: tuple[Table | None, Table | None],
    packing: Packing,
    ranks: SequenceGroup | None,
) -> tuple[Values, AdditiveDecayState]:
    """Compute one scan for each packed sequence: sums of chunks, added up by sequence.

    Over several ranks, sums of the first and the last sequence of a row include other ranks.
    """
    length = packing.chunk_size()
    chunks = packing.chunks(length)
    sequence, size = chunks.sequence.flatten(), (packing.sequences,)

    def rows(x: Tensor) -> Tensor:  # B T . . to chunks C . .
        return x.unflatten(1, (-1, length)).flatten(0, 1)

    q, v = rows(chunks.from_tokens(q)), rows(chunks.from_tokens(v))
    k = rows(chunks.from_tokens(k, fill=-torch.inf))
    cos, sin = (None if x is None else rows(chunks.from_row(x)) for x in tables)

    peak = k.detach().amax(dim=1).clamp(min=LOG_ZERO)  # chunks H K
    lowest = peak.new_full(size + peak.shape[1:], LOG_ZERO)
    peak = lowest.scatter_reduce(0, sequence[:, None, None].expand_as(peak), peak, "amax")
    weight = (k - peak[sequence].unsqueeze(1)).exp()
    total = torch.zeros_like(peak).index_add(0, sequence, weight.sum(dim=1))  # S H K
    total = torch.where(total > 0, total, 1)
    kv = torch.einsum("nchf,nchv->nhfv", rotate(weight, cos, sin), v)
    kv = kv.new_zeros(size + kv.shape[1:]).index_add(0, sequence, kv)
    kv = kv / per_feature(total, kv)
    states = AdditiveDecayState(peak.double() + total.double().log(), kv)
    if ranks is not None and isinstance(packing, PackingShard):
        ends = merged_sequences(ranks, states, packing)
        kv = torch.cat([kv, *(state.kv for state in ends)])
        of_head = len(states.kv) + torch.arange(packing.batch, device=kv.device).unsqueeze(1)
        of_tail = of_head + packing.batch
        first, last = packing.sequence[:, :1], packing.sequence[:, -1:]
        index = torch.where(chunks.sequence == last, of_tail, chunks.sequence)
        sequence = torch.where(chunks.sequence == first, of_head, index).flatten()

    o = torch.einsum("nchf,nhfv->nchv", rotate(q, cos, sin), kv.index_select(0, sequence))
    o = chunks.to_tokens(o.unflatten(0, chunks.sequence.shape).flatten(1, 2))
    return o, states


def context_of(
    k: Keys,
    v: Values,
    tables: tuple[Table | None, Table | None],
    state: AdditiveDecayState | None,
    *,
    low_memory: bool = False,
) -> AdditiveDecayState:
    """Return the state of these tokens, merged with the incoming state; see `tiled.write`."""
    tokens_state = AdditiveDecayState(*tiled.write(k, v, *tables, low_memory=low_memory))
    return tokens_state if state is None else merged(state, tokens_state)
