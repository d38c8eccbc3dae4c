"""Launch the kernels of the delta rule in chunks (`onescan.kernels.delta_rule`).

Only the inputs are kept for the backward pass, which recomputes the states and errors of chunks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onescan.kernels import delta_rule as kernels
from onescan.ops.backend import case_of, data_type, launch, operand_of
from onescan.ops.delta_rule.forms import Inputs
from onescan.shapes import Keep, KeyValue


def chunk(
    inputs: Inputs, states_in: Sequence[KeyValue | None], *, keep: Keep | None
) -> tuple[Tensor, ...]:
    """Compute the outputs, and the outgoing state of each direction.

    Args:
        inputs: The inputs, with one update per token and at most one decay per head.
        states_in: Incoming state of each direction, one if causal; None for zeros.
        keep: True for real tokens.
    """
    q, *updates, beta, forward, backward = inputs
    k, v, beta = (x.squeeze(2) for x in (*updates, beta))
    dtype = data_type(q, k, v)
    q, k, v = (x.to(dtype).contiguous() for x in (q, k, v))
    decays = kv_in = None
    if forward is not None and backward is not None:
        logs = (forward, backward)[: len(states_in)]
        decays = torch.stack([x.squeeze(3).float().expand_as(beta) for x in logs])
    if any(kv is not None for kv in states_in):
        empty = beta.new_zeros(())
        shape = k.shape[0], *k.shape[2:], v.shape[-1]
        kv_in = torch.stack(
            [(empty if kv is None else kv).float().expand(shape) for kv in states_in]
        )
    mask = None if keep is None else keep.contiguous()
    o, kv = _delta_chunks(
        q, k, v, beta.float().contiguous(), decays, kv_in, mask, len(states_in) == 1
    )
    return o, *kv.unbind()


@torch.library.custom_op("onescan::delta_chunks", mutates_args=())
def _delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decays: Tensor | None, kv_in: Tensor | None,
    keep: Tensor | None, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the outputs and the outgoing states."""
    o, kv = _new_outputs(k, v, causal)
    token_inputs = k, v, beta, decays, keep
    w, errors, *_ = _solve(*token_inputs, causal)
    before = _states(k, w, beta, decays, keep, kv_in, None, None, errors, kv)
    case, grid, lengths = _chunks(k, v, kernels.read_blocks)
    launch(
        kernels.read, case, grid,
        q, *token_inputs, errors, before, o, *lengths, BOTH=not causal,
    )  # fmt: skip
    return o, kv


@_delta_chunks.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _new_outputs(k, v, others[-1])


def _new_outputs(k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    batch, _, heads, key_width = k.shape
    shape = 1 if causal else 2, batch, heads, key_width, v.shape[-1]
    return torch.empty_like(v), v.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("onescan::delta_chunks_backward", mutates_args=())
def _delta_chunks_backward(
    do: Tensor, dkv: Tensor | None, q: Tensor, k: Tensor, v: Tensor, beta: Tensor,
    decays: Tensor | None, kv_in: Tensor | None, keep: Tensor | None, causal: bool,
    wants_ddecays: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, beta, the log-decays if needed, and the incoming states."""
    dq, dk, dv, dbeta, ddecays, dkv_in = _new_gradients(
        q, k, v, beta, decays, causal, wants_ddecays
    )
    dlog_decays = ddecays if wants_ddecays else None
    update_inputs = beta, decays, keep
    w, errors, inverse, derrors = _solve(k, v, *update_inputs, causal, q, do)
    before = _states(k, w, *update_inputs, kv_in, None, None, errors, torch.empty_like(dkv_in))
    after = _states(k, w, *update_inputs, dkv, q, do, derrors, dkv_in)
    pairs, key_pairs = torch.empty_like(inverse), torch.empty_like(inverse)
    dbetas = beta.new_empty(len(w), *beta.shape)
    case, grid, lengths = _chunks(k, v, kernels.pair_blocks)
    launch(
        kernels.pair_gradients, case, (*grid, len(w)),
        q, k, *update_inputs, do, errors, inverse, derrors, dbetas, dlog_decays, pairs, key_pairs,
        *lengths,
    )  # fmt: skip
    if causal:
        dv, dbeta = derrors[0].to(v.dtype), dbetas[0]
    launch(
        kernels.gradients, case, grid,
        q, k, v, *update_inputs, do, errors, derrors, before, after, pairs, key_pairs, dbetas,
        dq, dk, dv, dbeta, dlog_decays, *lengths, BOTH=not causal,
    )  # fmt: skip
    return dq, dk, dv, dbeta, ddecays, dkv_in


@_delta_chunks_backward.register_fake
def _(
    do: Tensor, dkv: Tensor | None, q: Tensor, k: Tensor, v: Tensor, beta: Tensor,
    decays: Tensor | None, kv_in: Tensor | None, keep: Tensor | None, *flags: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _new_gradients(q, k, v, beta, decays, *flags)


def _new_gradients(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decays: Tensor | None, causal: bool,
    wants_ddecays: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv, dbeta = (torch.empty_like(x) for x in (q, k, v, beta))
    ddecays = beta.new_empty(decays.shape if wants_ddecays and decays is not None else (0,))
    return dq, dk, dv, dbeta, ddecays, _new_outputs(k, v, causal)[1]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.causal = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)  # zeros for states


def _backward(ctx: Any, do: Tensor | None, dkv: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, beta, decays, kv_in, keep = ctx.saved_tensors
    do = torch.zeros_like(v) if do is None else do.contiguous()
    dkv = None if dkv is None else dkv.contiguous()
    wants_ddecays = ctx.needs_input_grad[4]
    *gradients, ddecays, dkv_in = _delta_chunks_backward(
        do, dkv, q, k, v, beta, decays, kv_in, keep, ctx.causal, wants_ddecays
    )
    return (
        *gradients,
        ddecays if wants_ddecays else None,
        None if kv_in is None else dkv_in,
        None,
        None,
    )


_delta_chunks.register_autograd(_backward, setup_context=_save_for_backward)


def _solve(
    k: Tensor, v: Tensor, beta: Tensor, decays: Tensor | None, keep: Tensor | None, causal: bool,
    q: Tensor | None = None, do: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return W and U and, given q and the gradient of outputs, the inverses and a part of dN."""
    case, grid, lengths = _chunks(k, v, kernels.solve_blocks)
    directions, gradient = 1 if causal else 2, do is not None
    operand = k.new_empty(0, dtype=operand_of(k.dtype))
    w = operand.new_empty(directions, *k.shape)
    errors = operand.new_empty(directions, *v.shape)
    size = kernels.solve_blocks(case).tokens
    inverse = operand.new_empty(directions, *k.shape[:3], size) if gradient else operand
    derrors = torch.empty_like(errors) if gradient else operand
    launch(
        kernels.solve, case, (*grid, directions),
        k, v, beta, decays, keep, q, do, w, errors, inverse, derrors, *lengths, GRADIENT=gradient,
    )  # fmt: skip
    return w, errors, inverse, derrors


def _states(
    k: Tensor, w: Tensor, beta: Tensor, decays: Tensor | None, keep: Tensor | None,
    kv_in: Tensor | None, q: Tensor | None, do: Tensor | None, errors: Tensor, kv_out: Tensor,
) -> Tensor:  # fmt: skip
    """Return the states before each chunk, [D, B, H, N, K, V], and complete `errors` in place.

    Given q and the gradient of outputs, return the gradients of the states after each chunk.
    """
    case, _, (batch, tokens, chunks) = _chunks(k, errors, kernels.state_blocks)
    values = kernels.state_blocks(case).values
    before = w.new_empty(*kv_out.shape[:3], chunks, *kv_out.shape[3:])
    launch(
        kernels.states, case, (kv_out.shape[:3].numel(), -(-kv_out.shape[-1] // values)),
        k, w, beta, decays, keep, kv_in, q, do, errors, before, kv_out, batch, tokens, chunks,
        GRADIENT=do is not None,
    )  # fmt: skip
    return before


def _chunks(k: Tensor, v: Tensor, blocks: Any) -> tuple[Any, tuple[int], tuple[int, int, int]]:
    """Return the compile-time parameters, and the grid and lengths of a program per chunk."""
    batch, tokens, heads, _ = k.shape
    case = case_of(k, v)
    chunks = -(-tokens // blocks(case).tokens)
    return case, (batch * heads * chunks,), (batch, tokens, chunks)
