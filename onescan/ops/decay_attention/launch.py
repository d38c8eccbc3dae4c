"""Launch the kernels of linear attention with decay.

- `chunk` (`onescan.kernels.decay_states` and `decay_scalar` or `decay_diagonal`): the scores of a
  chunk are computed once for both directions. The backward pass recomputes the states between
  chunks.
- `one_scan` (bidirectional, without decay; `linear_attention`): one sum over tokens serves all
  queries.
- `recurrent` (causal, without gradients; `decay_states.step`): one kernel processes all tokens of a
  call, for decoding.

Source: LION, arXiv:2502.16249, Eq. 5 and Sec. 3.3; states carried in both directions are not in
the paper.
"""

from typing import Any

import torch
from torch import Tensor

from onescan.kernels import decay_diagonal, decay_scalar, decay_states, linear_attention
from onescan.kernels.common import Case, Kernel
from onescan.kernels.decay_states import NORMALIZERS
from onescan.ops.backend import (
    case_of,
    data_type,
    launch,
    operand_of,
    packed_heads,
    target_programs,
    token_stride,
    wants_gradient,
)
from onescan.ops.decay_attention.forms import Directions
from onescan.ops.decay_attention.op import DecayState
from onescan.ops.feature_maps import KERNEL_MAPS, FeatureMapName
from onescan.shapes import Keep, Keys, Queries, Values

PerDirection = tuple[DecayState | None, DecayState | None]

MIN_SPLIT = 256  # tokens; the sums of a part take as much memory as 128 tokens with K = V = 64


def chunk(
    q: Queries, k: Keys, v: Values, decays: Directions, states_in: PerDirection, *,
    keep: Keep | None, normalizer: str,
) -> tuple[Values, PerDirection]:  # fmt: skip
    """Compute the outputs, normalized according to `normalizer`, and the outgoing states."""
    q, k, v, keep = _contiguous(q, k, v, keep)
    log_decays = [x for x in decays if x is not None]
    logs = torch.stack([_per_token(x, k) for x in log_decays])
    kv, k_sum = _stacked(states_in, k, v, len(log_decays))
    is_learning = wants_gradient(q, k, v, logs, kv, k_sum)
    o, kv, k_sum, *_ = _decay_chunks(q, k, v, logs, keep, kv, k_sum, normalizer, is_learning)
    states_out = [DecayState(*state) for state in zip(kv.unbind(), k_sum.unbind(), strict=True)]
    return o, (states_out[0], states_out[1] if len(states_out) > 1 else None)


def one_scan(
    q: Queries, k: Keys, v: Values, decays: Directions, states_in: PerDirection, *,
    keep: Keep | None, normalizer: str,
) -> tuple[Values, PerDirection]:  # fmt: skip
    """Compute the outputs and the outgoing states of both directions, without decay."""
    q, k, v, keep = _contiguous(q, k, v, keep)
    float32_states = [
        None if state is None else DecayState(*(x.float() for x in state)) for state in states_in
    ]
    entering = _added(*float32_states)
    o, *sums = _linear_attention(q, k, v, keep, *(entering or (None, None)), normalizer)
    added = DecayState(*sums)
    return o, (_added(added, float32_states[0]), _added(added, float32_states[1]))


def _added(one: DecayState | None, other: DecayState | None) -> DecayState | None:
    """Add two states; None is 0."""
    if one is None or other is None:
        return one or other
    return DecayState(one.kv + other.kv, one.k_sum + other.k_sum)


def recurrent(
    q: Queries, k: Keys, v: Values, decays: Directions, states_in: PerDirection, *,
    keep: Keep | None, normalizer: str, feature_map: FeatureMapName = "identity",
) -> tuple[Values, PerDirection]:  # fmt: skip
    """Compute the normalized outputs and the outgoing state, token by token.

    The feature map is that of queries and keys.
    """
    kv, k_sum = (None, None) if states_in[0] is None else states_in[0]
    dtype = data_type(q, k, v)
    q, k, v = (packed_heads(x.to(dtype)) for x in (q, k, v))
    keep = None if keep is None else keep.contiguous()
    if kv is not None and k_sum is not None:
        kv, k_sum = (x.float().contiguous() for x in (kv, k_sum))
    logs = _per_token(decays.forward, k).contiguous()
    o, kv, k_sum = _decay_step(q, k, v, logs, keep, kv, k_sum, normalizer, feature_map)
    return o, (DecayState(kv, k_sum), None)


def _contiguous(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> tuple[Any, ...]:
    """Return q, k and v in one dtype, and keep, all contiguous."""
    dtype = data_type(q, k, v)
    q, k, v = (x.to(dtype).contiguous() for x in (q, k, v))
    return q, k, v, None if keep is None else keep.contiguous()


def _per_token(log_decay: Tensor, k: Tensor) -> Tensor:
    """Expand a log-decay to all tokens and heads, and to all key channels if it is diagonal."""
    log_decay, is_diagonal = log_decay.float(), log_decay.shape[-1] > 1
    return log_decay.expand(k.shape) if is_diagonal else log_decay.squeeze(-1).expand(k.shape[:3])


def _stacked(
    states_in: PerDirection, k: Tensor, v: Tensor, directions: int
) -> tuple[Tensor | None, Tensor | None]:
    """Stack the states of both sides, [D, B, H, K, V] and [D, B, H, K]; None if there are none."""
    states = states_in[:directions]
    if all(state is None for state in states):
        return None, None
    zeros = k.new_zeros(k.shape[0], *k.shape[2:], dtype=torch.float32)
    empty = DecayState(zeros.unsqueeze(-1).expand(*zeros.shape, v.shape[-1]), zeros)
    parts = [empty if state is None else state for state in states]
    kv, k_sum = (torch.stack([x.float() for x in part]) for part in zip(*parts, strict=True))
    return kv, k_sum


@torch.library.custom_op("onescan::decay_chunks", mutates_args=())
def _decay_chunks(
    q: Tensor, k: Tensor, v: Tensor, decays: Tensor, keep: Tensor | None, kv_in: Tensor | None,
    sum_in: Tensor | None, normalizer: str, is_learning: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the outputs, the outgoing states, the row sums and the outputs in float32.

    Row sums are empty without normalization. Outputs in float32 are empty unless the backward pass
    needs them: the gradient of a row sum is a small difference of values computed from normalized
    outputs.
    """
    o, kv, k_sum, c, wide_o = outputs = _new_outputs(k, v, decays, normalizer, is_learning)
    before, before_sum = _states(k, v, None, None, decays, keep, kv_in, sum_in, kv, k_sum)
    _read(
        q, k, v, None, decays, keep, before, before_sum, o, wide_o if wide_o.numel() else None, c,
        normalizer=normalizer,
    )  # fmt: skip
    return outputs


@_decay_chunks.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, decays: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return _new_outputs(k, v, decays, *others[-2:])


def _new_outputs(
    k: Tensor, v: Tensor, decays: Tensor, normalizer: str, is_learning: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocate what `_decay_chunks` returns."""
    divides = normalizer != "none"
    widens = divides and is_learning and v.dtype != torch.float32
    c = v.new_empty(k.shape[:3] if divides else (0,), dtype=torch.float32)
    k_sum = c.new_empty(len(decays), k.shape[0], *k.shape[2:])
    kv = k_sum.new_empty(*k_sum.shape, v.shape[-1])
    return torch.empty_like(v), kv, k_sum, c, c.new_empty(v.shape if widens else (0,))


@torch.library.custom_op("onescan::decay_chunks_backward", mutates_args=())
def _decay_chunks_backward(
    do: Tensor, dkv: Tensor | None, dsum: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    decays: Tensor, keep: Tensor | None, kv_in: Tensor | None, sum_in: Tensor | None, o: Tensor,
    c: Tensor, normalizer: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, decays and the incoming states."""
    dq, dk, dv, ddecays, dkv_in, dsum_in = _new_gradients(q, k, v, decays)
    scale, dc = _scales(o, do, c, normalizer)
    kv, k_sum = torch.empty_like(dkv_in), torch.empty_like(dsum_in)
    before = _states(k, v, None, None, decays, keep, kv_in, sum_in, kv, k_sum)
    after = _states(
        q, do, scale, dc, decays, keep, dkv, dsum, dkv_in, dsum_in, gradient=True
    )  # fmt: skip
    _read(
        k, q, do, scale, decays, keep, *after, dv, None, None, normalizer=normalizer,
        transposed=True,
    )  # fmt: skip
    batch, tokens, heads, key_width = k.shape
    case = _case(k, v, decays)
    kernels: Any = decay_diagonal if case.diagonal else decay_scalar
    blocks = kernels.gradient_blocks(case)
    chunks = -(-tokens // blocks.tokens)
    lines, both = batch * heads * chunks, len(decays) > 1
    tensors, lengths = (k, q, v, do, scale, dc, decays, keep), (batch, tokens, chunks)
    if case.diagonal:
        grid, gradients = (lines, -(-key_width // blocks.keys)), (dq, dk, ddecays)
        launch(
            kernels.gradients,
            case,
            grid,
            *tensors,
            *before,
            *after,
            *gradients,
            *lengths,
            ABOVE=both,
        )
    else:
        query_outputs = (dq, ddecays)
        kernel = kernels.query_gradients
        launch(
            kernel, case, (lines,), *tensors, *before, *after, *query_outputs, *lengths, ABOVE=both
        )
        key_outputs = (dk, ddecays)  # added to the output of the first kernel
        launch(
            kernels.key_gradients,
            case,
            (lines,),
            *tensors,
            *after,
            *key_outputs,
            *lengths,
            ABOVE=both,
        )
    return dq, dk, dv, ddecays, dkv_in, dsum_in


@_decay_chunks_backward.register_fake
def _(
    do: Tensor, dkv: Tensor | None, dsum: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    decays: Tensor, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _new_gradients(q, k, v, decays)


def _new_gradients(
    q: Tensor, k: Tensor, v: Tensor, decays: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocate what `_decay_chunks_backward` returns."""
    dsum = decays.new_empty(len(decays), k.shape[0], *k.shape[2:])
    dkv = dsum.new_empty(*dsum.shape, v.shape[-1])
    dq, dk, dv, ddecays = (torch.empty_like(x) for x in (q, k, v, decays))
    return dq, dk, dv, ddecays, dkv, dsum


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.normalizer, _ = inputs
    o, _, _, c, wide_o = output
    ctx.save_for_backward(*tensors, wide_o if wide_o.numel() else o, c)
    ctx.set_materialize_grads(False)  # zeros for states, row sums and wide outputs


def _backward(
    ctx: Any, do: Tensor | None, dkv: Tensor | None, dsum: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    q, k, v, decays, keep, kv_in, sum_in, o, c = ctx.saved_tensors
    do = torch.zeros_like(v) if do is None else do.contiguous()
    if dkv is not None or dsum is not None:
        shape = len(decays), k.shape[0], *k.shape[2:]
        dsum = decays.new_zeros(shape) if dsum is None else dsum.contiguous()
        dkv = decays.new_zeros(*shape, v.shape[-1]) if dkv is None else dkv.contiguous()
    *gradients, dkv_in, dsum_in = _decay_chunks_backward(
        do, dkv, dsum, q, k, v, decays, keep, kv_in, sum_in, o, c, ctx.normalizer
    )
    dstates_in = (None, None) if kv_in is None else (dkv_in, dsum_in)
    return *gradients, None, *dstates_in, None, None


_decay_chunks.register_autograd(_backward, setup_context=_save_for_backward)


@torch.library.custom_op("onescan::linear_attention", mutates_args=())
def _linear_attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, kv_in: Tensor | None,
    sum_in: Tensor | None, normalizer: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the outputs, and the sums of k v^T and k over the tokens of the call.

    kv_in and sum_in: the sum of the states that enter from both sides.
    """
    o = torch.empty_like(v)
    kv, k_sum = _sums(k, v, None, None, keep)
    total, total_sum = kv, k_sum
    if kv_in is not None and sum_in is not None:
        total, total_sum = kv + kv_in, k_sum + sum_in
    kernel = linear_attention.read
    _launch_tiles(kernel, k, v, q, total, total_sum, keep, o, NORMALIZER=NORMALIZERS[normalizer])
    return o, kv, k_sum


@_linear_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    k_sum = k.new_empty(k.shape[0], *k.shape[2:], dtype=torch.float32)
    return torch.empty_like(v), k_sum.new_empty(*k_sum.shape, v.shape[-1]), k_sum


@torch.library.custom_op("onescan::linear_attention_backward", mutates_args=())
def _linear_attention_backward(
    do: Tensor, dkv: Tensor | None, dsum: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    keep: Tensor | None, kv: Tensor, k_sum: Tensor, normalizer: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v and the incoming states, given the sums of all tokens."""
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    scale = dc = None
    if normalizer != "none":
        scale, dc = k_sum.new_empty(2, *k.shape[:3])
    code = NORMALIZERS[normalizer]
    kernel = linear_attention.gradients
    _launch_tiles(
        kernel, k, v, q, do, kv, k_sum, keep, dq, scale, dc, NORMALIZER=code, KEYS=False
    )  # fmt: skip
    dkv_in, dsum_in = _sums(q, do, scale, dc, keep)
    if normalizer == "none":
        dsum_in.zero_()
    dkv = dkv_in if dkv is None else dkv_in + dkv
    dsum = dsum_in if dsum is None else dsum_in + dsum
    _launch_tiles(
        kernel, k, v, k, v, dkv, dsum, keep, dk, None, None, NORMALIZER=0, KEYS=True
    )  # fmt: skip
    _launch_tiles(linear_attention.read, k, v, k, dkv, dsum, keep, dv, NORMALIZER=0)
    return dq, dk, dv, dkv_in, dsum_in


@_linear_attention_backward.register_fake
def _(
    do: Tensor, dkv: Tensor | None, dsum: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    keep: Tensor | None, kv: Tensor, k_sum: Tensor, normalizer: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(torch.empty_like(x) for x in (q, k, v, kv, k_sum))


def _save_for_one_scan(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.normalizer = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)  # zeros for states


def _backward_of_one_scan(
    ctx: Any, do: Tensor | None, dkv: Tensor | None, dsum: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, keep, kv_in, sum_in, kv, k_sum = ctx.saved_tensors
    do = torch.zeros_like(v) if do is None else do.contiguous()
    if kv_in is not None:
        kv, k_sum = kv + kv_in, k_sum + sum_in
    dq, dk, dv, *dstates_in = _linear_attention_backward(
        do, dkv, dsum, q, k, v, keep, kv, k_sum, ctx.normalizer
    )
    return dq, dk, dv, None, *((None, None) if kv_in is None else dstates_in), None


_linear_attention.register_autograd(_backward_of_one_scan, setup_context=_save_for_one_scan)


def _sums(
    k: Tensor, v: Tensor, scale: Tensor | None, dc: Tensor | None, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Sum k v^T and k over tokens, in parts if samples and heads do not keep the device busy."""
    batch, tokens, heads, key_width = k.shape
    case = case_of(k, v)
    blocks = linear_attention.sum_blocks(case)
    keys, values = -(-key_width // blocks.keys), -(-v.shape[-1] // blocks.values)
    parts = -(-target_programs(k.device) // max(1, batch * heads * keys * values))
    split = max(MIN_SPLIT, -(-tokens // parts))
    split = -(-split // blocks.tokens) * blocks.tokens
    parts = -(-tokens // split)
    k_sum = k.new_empty(parts, batch, heads, key_width, dtype=torch.float32)
    kv = k_sum.new_empty(*k_sum.shape, v.shape[-1])
    launch(
        linear_attention.sums, case, (parts * batch * heads, keys, values),
        k, v, scale, dc, keep, kv, k_sum, batch, tokens, split,
    )  # fmt: skip
    return (kv[0], k_sum[0]) if parts == 1 else (kv.sum(0), k_sum.sum(0))


def _launch_tiles(kernel: Kernel, k: Tensor, v: Tensor, *arguments: Any, **flags: Any) -> None:
    """Launch a kernel with one program per tile of tokens."""
    batch, tokens, heads, _ = k.shape
    case = case_of(k, v)
    grid = (batch * heads * -(-tokens // kernel.blocks(case).tokens),)
    launch(kernel, case, grid, *arguments, batch, tokens, **flags)


@torch.library.custom_op("onescan::decay_step", mutates_args=())
def _decay_step(
    q: Tensor, k: Tensor, v: Tensor, decays: Tensor, keep: Tensor | None, kv_in: Tensor | None,
    sum_in: Tensor | None, normalizer: str, feature_map: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the outputs and the outgoing state; decays are [B, T, H] or [B, T, H, K]."""
    batch, tokens, heads, _ = k.shape
    case = case_of(k, v, diagonal=decays.ndim == k.ndim)
    o, kv, k_sum = _new_step(k, v)
    launch(
        decay_states.step, case,
        (batch * heads, -(-v.shape[-1] // decay_states.step_blocks(case).values)),
        q, k, v, decays, keep, kv_in, sum_in, o, kv, k_sum,
        tokens, *map(token_stride, (q, k, v)),
        NORMALIZER=NORMALIZERS[normalizer], MAP=KERNEL_MAPS[feature_map],
    )  # fmt: skip
    return o, kv, k_sum


@_decay_step.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return _new_step(k, v)


def _new_step(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate outputs and the outgoing state."""
    k_sum = k.new_empty(k.shape[0], *k.shape[2:], dtype=torch.float32)
    return v.new_empty(v.shape), k_sum.new_empty(*k_sum.shape, v.shape[-1]), k_sum


def _case(k: Tensor, v: Tensor, decays: Tensor) -> Case:
    """Return the compile-time parameters; decays are [D, B, T, H] or [D, B, T, H, K]."""
    return case_of(k, v, diagonal=decays.ndim > k.ndim)


def _states(
    k: Tensor, v: Tensor, scale: Tensor | None, dc: Tensor | None, decays: Tensor,
    keep: Tensor | None, kv_in: Tensor | None, sum_in: Tensor | None, kv_out: Tensor,
    sum_out: Tensor, *, gradient: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the states before each chunk, [D, B, H, N, K, V] and [D, B, H, N, K]."""
    batch, tokens, _, key_width = k.shape
    case = _case(k, v, decays)
    blocks = decay_states.state_blocks(case)
    chunks = -(-tokens // blocks.tokens)
    before_sum = sum_out.new_empty(*sum_out.shape[:3], chunks, key_width)
    before = kv_out.new_empty(*before_sum.shape, v.shape[-1], dtype=operand_of(k.dtype))
    lines = sum_out.shape[:3].numel()
    launch(
        decay_states.states, case,
        (lines, -(-key_width // blocks.keys), -(-v.shape[-1] // blocks.values)),
        k, v, scale, dc, decays, keep, kv_in, sum_in,
        before, before_sum, kv_out, sum_out, batch, tokens, chunks, GRADIENT=gradient,
    )  # fmt: skip
    return before, before_sum


def _read(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor | None, decays: Tensor, keep: Tensor | None,
    before: Tensor, before_sum: Tensor, o: Tensor, wide_o: Tensor | None, c: Tensor | None, *,
    normalizer: str, transposed: bool = False,
) -> None:  # fmt: skip
    """Write outputs and row sums, or gradients of values if `transposed`."""
    batch, tokens, heads, _ = k.shape
    case = _case(k, v, decays)
    kernels: Any = decay_diagonal if case.diagonal else decay_scalar
    blocks = kernels.read_blocks(case)
    chunks = -(-tokens // blocks.tokens)
    both = len(decays) > 1
    # the scalar kernel loops over values
    programs = -(-v.shape[-1] // blocks.values) if case.diagonal else 1
    launch(
        kernels.read, case, (batch * heads * chunks, programs),
        q, k, v, scale, decays, keep, before, before_sum, o, wide_o, c, batch, tokens, chunks,
        BELOW=both or not transposed, ABOVE=both or transposed, TRANSPOSED=transposed,
        NORMALIZER=NORMALIZERS[normalizer],
    )  # fmt: skip


def _scales(
    o: Tensor, do: Tensor, c: Tensor, normalizer: str
) -> tuple[Tensor | None, Tensor | None]:
    """Return the reciprocal divisors of outputs and the gradients of row sums, both [B, T, H]."""
    if normalizer == "none":
        return None, None
    scale, dc = torch.empty_like(c), torch.empty_like(c)
    case = case_of(do, o)
    grid = (-(-c.numel() // decay_states.scale_blocks(case).tokens),)
    launch(
        decay_states.scales, case, grid,
        o, do, c, scale, dc, c.numel(), NORMALIZER=NORMALIZERS[normalizer],
    )  # fmt: skip
    return scale, dc
