"""Blockwise causal additive decay: each token reads the state after the last token of its block.

    o_t = KV_e^T R_t(q_t),   where e is the last token of the block of t

This is Eq. 13 of LightNet, arXiv:2405.21022, with e instead of t in its sums.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from onescan.ops.additive_decay.forms import carry_states, chunked_inputs
from onescan.ops.additive_decay.state import AdditiveDecayState, AdditiveInputs, per_feature
from onescan.ops.chunks import join_chunks, length_of_chunks, number_of_chunks, split_chunks
from onescan.ops.lrpe import rotate
from onescan.ops.numerics import LOG_ZERO
from onescan.shapes import Values

Forward = Callable[[AdditiveInputs], tuple[Values, AdditiveDecayState]]


def one_scan(inputs: AdditiveInputs) -> tuple[Values, AdditiveDecayState]:
    """Sum each block, carry a state from block to block, and read it with the queries, in O(T).

    Every block has a state in memory, so small blocks need much memory.
    """
    size = _block_length(inputs)
    tensors, chunks = chunked_inputs(inputs._replace(chunk_size=size))
    q, k, v, table, z_in, kv_in, begins = tensors
    tokens = k.shape[1]
    count = number_of_chunks(tokens, size)
    cos = sin = None
    if table is not None:
        cos, sin = (split_chunks(x, count, size) for x in table.unbind(-2))  # . H N C K
    q, v = split_chunks(q, count, size), split_chunks(v, count, size)  # B H N C .
    k = split_chunks(k, count, size, fill=-torch.inf)

    # The result does not depend on the maximum, so no gradient flows through it.
    peak = k.detach().amax(dim=-2).clamp(min=LOG_ZERO)  # B H N K
    weight = (k - peak.unsqueeze(-2)).exp()
    total = weight.sum(dim=-2)
    total = torch.where(total > 0, total, 1)  # if all logits are -inf, the mean is 0
    kv = rotate(weight, cos, sin).mT @ v  # B H N F V
    z = peak.double() + total.double().log()
    carried = carry_states(z, kv / per_feature(total, kv), z_in, kv_in, begins)
    kv_after = torch.addcmul(carried.added, carried.decay, carried.kv_before)
    o = rotate(q, cos, sin) @ kv_after
    o = join_chunks(o, tokens)
    after = AdditiveDecayState(carried.z_after[:, :, -1], carried.kv_out)
    return o if chunks is None else chunks.to_tokens(o), after


def _block_length(inputs: AdditiveInputs) -> int:
    """Return the number of tokens per block, at most the sequence length if that is known."""
    assert inputs.causal_block is not None
    return length_of_chunks(inputs.causal_block, inputs.k.shape[1])


def in_causal_form(run: Forward) -> Forward:
    """Return a form for blocks that runs a causal form on 2T tokens.

    Each block is followed by its queries: the first copy of each block provides keys and values,
    and its outputs are dropped. The second copy provides queries, and its key logits are -inf.
    """
    return partial(_in_causal_form, run)


def _in_causal_form(run: Forward, inputs: AdditiveInputs) -> tuple[Values, AdditiveDecayState]:
    if inputs.bounds is not None:
        return _uneven(run, inputs, *inputs.bounds)
    tokens, size = inputs.k.shape[1], _block_length(inputs)
    if size == 1:
        return run(inputs)
    count = number_of_chunks(tokens, size)

    def twice(x: Tensor, dim: int = 1, fill: float = 0.0) -> Tensor:
        """Split the token axis into blocks and repeat each block: [..., 2 N C, ...]."""
        x = F.pad(x, (0, 0) * (x.ndim - dim - 1) + (0, count * size - tokens), value=fill)
        x = x.unflatten(dim, (count, 1, size))
        return torch.cat([x, x], dim=dim + 1).flatten(dim, dim + 2)

    is_query = torch.arange(2 * count * size, device=inputs.k.device) % (2 * size) >= size
    o, state = _run_twice(run, inputs, twice, is_query)
    o = o.unflatten(1, (count, 2, size))[:, :, 1].flatten(1, 2)
    return o.narrow(1, 0, tokens), state


def _uneven(
    run: Forward, inputs: AdditiveInputs, begins: Tensor, ends: Tensor
) -> tuple[Values, AdditiveDecayState]:
    """Do so for blocks of several sizes, given where the block of each token begins and ends."""
    index = torch.arange(len(begins), device=begins.device)
    as_key, as_query = index + begins, index + ends
    source = index.new_empty(2 * len(index))
    source[as_key], source[as_query] = index, index
    is_query = torch.zeros_like(source, dtype=torch.bool)
    is_query[as_query] = True

    def twice(x: Tensor, dim: int = 1, fill: float = 0.0) -> Tensor:
        return x.index_select(dim, source)

    o, state = _run_twice(run, inputs, twice, is_query)
    return o.index_select(1, as_query), state


def _run_twice(
    run: Forward, inputs: AdditiveInputs, twice: Callable[..., Tensor], is_query: Tensor
) -> tuple[Values, AdditiveDecayState]:
    """Run a causal form on the two copies of each block, given which tokens are queries."""
    angles, keep = inputs.angles, inputs.keep
    k = twice(inputs.k, fill=-torch.inf).masked_fill(is_query[:, None, None], -torch.inf)
    return run(
        inputs._replace(
            q=twice(inputs.q),
            k=k,
            v=twice(inputs.v),
            angles=None if angles is None else twice(angles, dim=0),
            keep=None if keep is None else twice(keep),
            table=None,
        )
    )
