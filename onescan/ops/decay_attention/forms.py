"""Linear attention with decay in plain PyTorch: in chunks, recurrent, and without decay.

    S_t = diag(exp(a_t)) S_{t-1} + k_t v_t^T     state of one direction     (K, V)
    o_t = sum over directions of S_t^T q_t       the token itself is counted once

A column of ones is appended to the values. The extra output column is then the row sum, which is
needed for normalization, and the extra column of the state is the sum of keys.

Source: LION, arXiv:2502.16249, Eq. 4 to 6 and 14, Theorem B.1 (diagonal decay), Sec. 3.3 (chunks).
Carrying states from chunk to chunk in both directions is not in the paper, where each chunk attends
to all others (Eq. 81).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onescan.checks import is_known
from onescan.ops.chunks import (
    join_chunks,
    length_of_chunks,
    linear_scan,
    number_of_chunks,
    split_chunks,
)
from onescan.ops.decay_factors import decay_factors, decayed_scores, padded
from onescan.ops.numerics import (
    MIN_DIVISOR,
    accumulation_dtype,
    broadcast_divide,
    to_float64,
)
from onescan.shapes import Keys, LogDecays, Queries, Starts, Values

Chunkwise = Callable[..., Sequence[Tensor]]  # of tensors [B, H, N, C, .]
PerDirection = tuple[
    Tensor | None, Tensor | None
]  # a state, [B, H, K, V + 1], or decay per direction


class Directions(NamedTuple):
    """Log-decays as the recurrences apply them.

        forward:   S_t = exp(forward_t) S_{t-1} + k_t v_t^T,   o_t reads S_t
        backward:  S_t = exp(backward_t) S_{t+1} + k_t v_t^T,  o_t reads exp(backward_t) S_{t+1}

    Attributes:
        forward: Log-decays of the forward direction.
        backward: Log-decays of the backward direction; None for causal calls.
    """

    forward: LogDecays
    backward: LogDecays | None

    @property
    def is_diagonal(self) -> bool:
        """Whether each key channel has its own decay."""
        return self.forward.shape[-1] > 1


def directed(
    log_decay: LogDecays, decay_at: Literal["source", "target", "symmetric"], *, causal: bool
) -> tuple[Directions, PerDirection]:
    """Shift the decays to the tokens at which the recurrences apply them.

    At each token, "target" applies its own decay (Eq. 5) and "source" the decay of the token
    visited before it (Eq. 14). "symmetric" is "target" forward and "source" backward (Table 1).

    Returns:
        The shifted decays, and for each direction the decay of the last token visited, which
        "source" applies to the outgoing state; otherwise None.
    """
    forward = backward = log_decay
    last = first = None
    if decay_at == "source":
        forward, last = F.pad(log_decay, (0, 0, 0, 0, 1, -1)), log_decay[:, -1]
    if decay_at != "target":
        backward, first = F.pad(log_decay, (0, 0, 0, 0, -1, 1)), log_decay[:, 0]
    return Directions(forward, None if causal else backward), (last, first)


def separated(decays: Directions, starts: Starts | None, ends: Starts | None) -> Directions:
    """Reset the state at some tokens with log-decays of -inf.

    Args:
        decays: The log-decays.
        starts: True where the forward direction restarts, [B, T]; None if it never does.
        ends: True where the backward direction restarts, [B, T]; None if it never does.
    """
    forward, backward = decays
    if starts is not None:
        forward = forward.masked_fill(starts[:, :, None, None], -torch.inf)
    if backward is not None and ends is not None:
        backward = backward.masked_fill(ends[:, :, None, None], -torch.inf)
    return Directions(forward, backward)


class Options(NamedTuple):
    """Options of every form, as in `decay_attention`.

    Each form returns the normalized outputs and the outgoing states of the forward and the
    backward direction.
    """

    normalize: str
    chunk_size: int
    return_state: bool


def recurrent(
    q: Queries, k: Keys, v: Values, decays: Directions, states_in: PerDirection, options: Options
) -> tuple[Values, PerDirection]:
    """Visit one token at a time (Eq. 5, Theorem B.2), in constant memory besides the outputs."""
    v = F.pad(v, (0, 1), value=1.0)
    outputs: list[Tensor] = []
    states_out: list[Tensor | None] = [None, None]
    for backward, (log_decay, state) in enumerate(zip(decays, states_in, strict=True)):
        if log_decay is None:
            continue
        if state is None:
            state = v.new_zeros(k.shape[0], *k.shape[2:], v.shape[-1])
        o, states_out[backward] = _visit(q, k, v, log_decay, state, backward=bool(backward))
        outputs.append(o)
    o = sum(outputs[1:], start=outputs[0])
    return _divided(o, options.normalize, causal=len(outputs) == 1), (states_out[0], states_out[1])


def _visit(
    q: Queries, k: Keys, v: Values, log_decay: LogDecays, kv: Tensor, *, backward: bool
) -> tuple[Values, Tensor]:
    """Visit all tokens in one direction. Backward, each token reads the state without itself."""
    rows, columns = (x.unsqueeze(-2) for x in (q, v))
    parts = (x.unbind(1) for x in (rows, k.unsqueeze(-1), columns, log_decay.exp().unsqueeze(-1)))
    order = -1 if backward else 1
    outputs = []
    for query, key, value, decay in list(zip(*parts, strict=True))[::order]:
        decayed = decay * kv
        kv = decayed + key * value
        outputs.append(query @ (decayed if backward else kv))  # B H 1 V
    return torch.cat(outputs[::order], dim=-2).transpose(1, 2), kv


def one_scan(
    q: Queries, k: Keys, v: Values, decays: Directions, states_in: PerDirection, options: Options
) -> tuple[Values, PerDirection]:
    """Compute Q (K^T V) without decay, in both directions at once (LION-lit, Eq. 181 to 183).

    Products of bfloat16 inputs are bfloat16; states and row sums are float32.
    """
    total_kv = total(k, v)
    forward, backward = (total_kv if state is None else total_kv + state for state in states_in)
    all_kv = forward if states_in[1] is None else forward + states_in[1]
    if backward is forward and options.return_state:
        backward = forward.clone()  # a caller may change a state in place
    normalize = options.normalize
    if normalize != "max_one" and all_kv.dtype == q.dtype:
        o = torch.einsum("bthk,bhkv->bthv", q, all_kv)
        return _divided(o, normalize, causal=False), (forward, backward)
    o = torch.einsum("bthk,bhkv->bthv", q, all_kv[..., :-1].to(q.dtype))
    if normalize == "none":
        return o, (forward, backward)
    k_sum, wide_q = all_kv[..., -1], q.to(all_kv.dtype)
    if normalize == "max_one":
        # float64, because terms of opposite sign may cancel to a row sum near 1
        k_sum = to_float64(k).sum(dim=1) + sum(
            state[..., -1] for state in states_in if state is not None
        )
        wide_q = to_float64(q)
    row_sum = torch.einsum("bthk,bhk->bth", wide_q, k_sum).to(all_kv.dtype).unsqueeze(-1)
    divisor, _ = row_divisor(row_sum, normalize, causal=False)
    return broadcast_divide(o, divisor.to(o.dtype), overwrite=True), (forward, backward)


def total(k: Keys, v: Values) -> Tensor:
    """Sum k v^T, and k in an additional column, over all tokens: [B, H, K, V + 1]."""
    wide = accumulation_dtype(k.dtype)
    if k.dtype == wide:
        return torch.einsum("bthk,bthv->bhkv", k, F.pad(v, (0, 1), value=1.0))
    kv, k_sum = torch.einsum("bthk,bthv->bhkv", k, v), k.sum(dim=1, dtype=wide)
    return torch.cat([kv.to(wide), k_sum.unsqueeze(-1)], dim=-1)


def _divided(o: Tensor, normalize: str, *, causal: bool) -> Tensor:
    """Normalize the outputs by their last column, which is the row sum."""
    if normalize == "none":
        return o[..., :-1]
    o, row_sum = o.split([o.shape[-1] - 1, 1], dim=-1)  # the gradient of a split is one tensor
    return broadcast_divide(o, row_divisor(row_sum, normalize, causal=causal)[0], overwrite=True)


def row_divisor(row_sum: Tensor, normalize: str, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the divisor of the outputs and its derivative with respect to the row sum."""
    if normalize == "sum":
        is_zero = row_sum.abs() < MIN_DIVISOR
        return torch.where(is_zero, 1, row_sum), (~is_zero).to(row_sum.dtype)
    size = row_sum.abs() if causal else row_sum
    derivative = row_sum.sign() if causal else torch.ones_like(row_sum)
    return size.clamp(min=1), derivative * (size >= 1)


def updates_of(
    k: Keys, v: Values, decays: Directions, ends: PerDirection
) -> Sequence[tuple[Tensor, Tensor]]:
    """Return how tokens update a state, S' = P S + U, in each direction.

    Returns:
        U, [B, H, K, V + 1], and P, [B, H, 1 or K, 1].
    """
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    updates = []
    for backward, (logs, end) in enumerate(zip(decays, ends, strict=True)):
        if logs is None:
            continue
        _, leave, through = decay_factors(logs.transpose(1, 2), k.dtype, backward=bool(backward))
        k_out, transition = k * leave, through.mT
        added = torch.cat([k_out.mT @ v, k_out.sum(-2).unsqueeze(-1)], dim=-1)
        if end is not None:
            decay = end.exp().unsqueeze(-1)
            added, transition = added * decay, transition * decay
        updates.append((added, transition.expand(*added.shape[:2], -1, 1)))
    return updates


def chunk_inputs(
    q: Queries, k: Keys, v: Values, decays: Directions, states_in: PerDirection, options: Options
) -> "tuple[ChunkInputs, int]":
    """Return the tensors of the chunk form, and the number of tokens per chunk."""
    size = length_of_chunks(options.chunk_size, k.shape[1])
    if decays.is_diagonal:
        size = padded(size)
    heads = k.shape[0], -1, k.shape[2], -1
    forward = decays.forward.expand(heads)
    backward = None if decays.backward is None else decays.backward.expand(heads)
    state = None
    if states_in != (None, None):
        shape = k.shape[0], k.shape[2], v.shape[-1] + 1, k.shape[-1]
        empty = v.new_zeros(shape, dtype=accumulation_dtype(v.dtype))
        states = states_in[:1] if backward is None else states_in
        state = torch.stack([empty if x is None else x.mT for x in states], dim=2)
    return ChunkInputs(q, k, v, forward, backward, state), size


def by_direction(states_out: Tensor) -> PerDirection:
    """Return the outgoing states of both directions, [B, H, K, V + 1], from those of `chunk`."""
    if states_out.ndim == 1:  # not requested
        return None, None
    return states_out[:, :, 0].mT, states_out[:, :, 1].mT if states_out.shape[2] > 1 else None


class ChunkInputs(NamedTuple):
    """Tensor inputs of the chunk form.

    Attributes:
        q: Queries.
        k: Keys.
        v: Values.
        forward: Log-decays of the forward direction, [B, T, H, 1 or K].
        backward: Log-decays of the backward direction; None for causal calls.
        states_in: Incoming state of each direction, [B, H, D, V + 1, K]; None for zeros.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    forward: Tensor
    backward: Tensor | None
    states_in: Tensor | None

    def block(self, index: Any, state_index: Any) -> "ChunkInputs":
        """Select a block of samples and heads."""
        q, k, v, forward = (x[index] for x in self[:4])
        backward = None if self.backward is None else self.backward[index]
        states_in = None if self.states_in is None else self.states_in[state_index]
        return ChunkInputs(q, k, v, forward, backward, states_in)

    def chunks(self, size: int) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Split q, k, v with appended ones, and all log-decays into chunks [B, H, N, C, .]."""
        count = number_of_chunks(self.k.shape[1], size)
        q, k, v = (split_chunks(x, count, size) for x in self[:3])
        logs = [split_chunks(x, count, size) for x in self[3:5] if x is not None]
        return q.contiguous(), k.contiguous(), F.pad(v, (0, 1), value=1.0), logs


def _at_once(function: Chunkwise, *groups: Sequence[Tensor]) -> Sequence[Tensor]:
    return function(*groups)


def chunk(
    inputs: ChunkInputs,
    normalize: str,
    size: int,
    return_state: bool,
    *,
    over_chunks: Callable[..., Sequence[Tensor]] = _at_once,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Compute attention within chunks of C tokens, and carry a state per direction between them.

        o_i = sum_j W_ij v_j + sum over directions d of S_d^T (enter_di q_i)
        W_ij = q_i . k_j exp(sum of forward over j < l <= i)      for j <= i
        W_ij = q_i . k_j exp(sum of backward over i <= l < j)     for j > i; 0 if causal
        S_d' = through_d S_d + sum_j (leave_dj k_j) v_j^T         from chunk to chunk

    Both directions together are O(T). The code stores states transposed, as [V + 1, K]: on a CPU,
    an extra column beyond a multiple of the vector width makes a product slow, and an extra row
    does not. For the same reason row sums are computed separately from the outputs.

    Products of bfloat16 inputs are bfloat16; states, row sums and gradients of log-decays are
    added up in float32.

    Args:
        inputs: The inputs of a call, or a block of them.
        normalize: As in `decay_attention`.
        size: Tokens per chunk.
        return_state: Whether to return the outgoing states.
        over_chunks: Applies a function to groups of tensors [B, H, N, C, .].

    Returns:
        The outputs, the row sums [B, T, H, 1] (empty without normalization), the outgoing states
        (empty if not requested), and the states before each chunk, as `chunk_states` returns them.
    """
    tokens = inputs.v.shape[1]
    q, k, v, logs = inputs.chunks(size)
    states_before, states_out = chunk_states(
        k, v, logs, inputs.states_in, return_states=return_state
    )
    read = partial(_read, normalize=normalize, causal=inputs.backward is None)
    parts = over_chunks(read, [q, k, v], logs, states_before)
    o, *row_sums = (join_chunks(x, tokens) for x in parts)
    return o, row_sums[0] if row_sums else o.new_empty(0), states_out, states_before


def chunk_states(
    k: Tensor,
    v: Tensor,
    logs: Sequence[Tensor],
    states_in: Tensor | None,
    *,
    return_states: bool = True,
    of_gradients: bool = False,
) -> tuple[list[Tensor], Tensor]:
    """Compute the states before each chunk, for each direction, and the outgoing states.

    Args:
        k: Keys, [B, H, N, C, K]; queries if `of_gradients`.
        v: Values with appended ones, [B, H, N, C, V + 1]; gradients of outputs and row sums if
            `of_gradients`.
        logs: Log-decays of each direction.
        states_in: Incoming state of each direction, [B, H, D, V + 1, K]; None for zeros.
        return_states: Whether to return the outgoing states.
        of_gradients: Whether to compute the gradients of states, which are carried in the opposite
            direction.

    Returns:
        For each direction, the states [B, H, N, V + 1, K] before each chunk, or an empty list if
        there is only one chunk and no incoming state; and the outgoing states [B, H, D, V + 1, K],
        empty if not `return_states`.
    """
    is_read = states_in is not None or not is_known(k.shape[2]) or k.shape[2] > 1
    if not is_read and not return_states:
        return [], v.new_empty(0)
    states_before, states_out = [], []
    for d, log_decay in enumerate(logs):
        enter, leave, through = decay_factors(log_decay, k.dtype, backward=bool(d))
        added = (v.mT @ (k * (enter if of_gradients else leave))).to(through.dtype)
        state = added.new_zeros(added[:, :, 0].shape) if states_in is None else states_in[:, :, d]
        before, last = linear_scan(state, added, through, backward=bool(d) != of_gradients)
        states_before.append(before)
        states_out.append(last)
    outgoing = torch.stack(states_out, dim=2) if return_states else v.new_empty(0)
    return states_before if is_read else [], outgoing


def _read(
    tokens: Sequence[Tensor],
    logs: Sequence[Tensor],
    states_before: Sequence[Tensor],
    *,
    normalize: str,
    causal: bool,
) -> list[Tensor]:
    """Compute outputs of chunks, from attention within them and from states, and their row sums.

    There are no row sums without normalization.
    """
    q, k, v = tokens
    weights, *_ = decayed_scores(q, k, logs)
    reads = [
        q * decay_factors(log_decay, q.dtype, backward=bool(d)).enter
        for d, log_decay in enumerate(logs[: len(states_before)])
    ]
    wide = accumulation_dtype(v.dtype)
    o = (weights @ v[..., :-1]).to(wide)
    for read, before in zip(reads, states_before, strict=True):
        o = o + read @ before[..., :-1, :].mT.to(v.dtype)
    if normalize == "none":
        return [o.to(v.dtype)]
    row_sum = weights.sum(-1, keepdim=True, dtype=wide)
    for read, before in zip(reads, states_before, strict=True):
        row_sum = row_sum + (before[..., -1:, :] @ read.mT.to(wide)).mT
    return [(o / row_divisor(row_sum, normalize, causal=causal)[0]).to(v.dtype), row_sum]
