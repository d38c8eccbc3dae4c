"""Linear attention with decay, causal or bidirectional: argument checks, state, choice of form.

    S_t = diag(exp(a_t)) S_{t-1} + k_t v_t^T     state of one direction                      (K, V)
    o_t = S_t^T q_t                              summed over directions, own token counted once (V,)

    as attention:   O = (Q K^T * M) V,   M_ij = exp(sum of a between j and i)

Source: LION, arXiv:2502.16249.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from onescan.checks import check_choice, check_no_nan
from onescan.ops import recurrence
from onescan.ops.backend import Backend
from onescan.ops.blocks import Blocks
from onescan.ops.decay_attention.forms import row_divisor
from onescan.ops.decay_attention.op import (
    DecayAt,
    DecayAttention,
    DecayState,
    DecayStates,
    Inputs,
    Normalize,
    Options,
)
from onescan.ops.feature_maps import FEATURE_MAPS, FeatureMapName
from onescan.ops.layout import layout_of
from onescan.ops.numerics import broadcast_divide, disable_autocast, to_accumulation_dtype
from onescan.ops.packing import Packing
from onescan.ops.parallel import Group
from onescan.shapes import Keep, Keys, Queries, Values

__all__ = [
    "DECAY_ATTENTION",
    "DecayAt",
    "DecayState",
    "DecayStates",
    "Form",
    "decay_attention",
    "read",
    "write",
]

Form = Literal["auto", "full", "chunk", "recurrent"]
State = DecayState | DecayStates | tuple[DecayState | None, DecayState | None]

DECAY_ATTENTION = DecayAttention()


def decay_attention(
    q: Queries,
    k: Keys,
    v: Values,
    log_decay: Tensor | None = None,
    *,
    feature_map: FeatureMapName = "identity",
    causal: bool = False,
    causal_block: Blocks | None = None,
    decay_at: DecayAt = "auto",
    normalize: Normalize = "none",
    keep: Keep | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    state: State | None = None,
    form: Form = "auto",
    backend: Backend = "auto",
    chunk_size: int = 64,
    return_state: bool = True,
    group: Group | None = None,
) -> tuple[Values, State | None]:
    """Compute linear attention with decay, causal or bidirectional, in linear time.

    Inputs have the layout ``[B, T, H, K]``, unlike torch's ``scaled_dot_product_attention``, which
    takes ``[B, H, T, K]``.

    Source: LION, arXiv:2502.16249, Eq. 4 to 6 and 14, Eq. 79, Theorem B.1 (diagonal decay).

    Args:
        q: Queries, [B, T, H, K].
        k: Keys, [B, T, H, K].
        v: Values, [B, T, H, V].
        log_decay: Log of the factor by which the state is multiplied from one token to the next, at
            most 0; -inf resets the state. Shape [H] for a fixed decay per head, [B, T, H] for a
            selective decay per token, or [B, T, H, K] for a diagonal decay, one per key channel.
            None disables decay. In PyTorch, the full and chunk forms treat products of decays below
            1e-30 as 0, except in float64.
        feature_map: Feature map to apply to queries and keys; "identity" if it has already been
            applied.
        causal: Whether each token reads only itself and earlier tokens.
        causal_block: Tokens per block of a blockwise causal call, or the offsets of blocks of
            several sizes, int32, [N + 1], from 0 to T: each token reads its own block in both
            directions, and all earlier blocks as in a causal call. The last block may be shorter.
            Masked tokens count as positions of a block. Other options are as in bidirectional
            calls, for example decay_at="auto", except that there is only a forward state, as in
            causal calls. A call with a state begins a new block. Offsets do not support cu_seqlens.
            None for a single block.
        decay_at: Which of two neighboring tokens provides the decay between them: "source", the
            first one visited (Eq. 14), "target", the second one (Eq. 5, Theorem B.1), or, in
            bidirectional calls, "symmetric", the later one in both directions, which gives the
            symmetric mask of Table 1. "auto" is "target" if the call is causal or the decay is
            diagonal, otherwise "source".
        normalize: Divisor of the outputs: "none"; "sum", the row sum after decay; or "max_one",
            max(row sum, 1), with the absolute value of the row sum in causal calls (xLSTM). With
            "sum", a row sum below 1e-30 in absolute value is replaced by 1.
        keep: True for real tokens, [B, T], the opposite of ``key_padding_mask`` in PyTorch and
            `onescan.nn`. Other tokens have zero output and neither update nor decay the
            state. None keeps all tokens.
        cu_seqlens: Offsets of several sequences packed in one row, as in flash-attention: int32,
            [S + 1], from 0 to T, on the CPU or the device of q. With several rows, offsets count
            the tokens of all rows, up to B * T, and every row begins with a new sequence. Sequences
            are separated by a log-decay of -inf. Not with `state`.
        state: For causal calls and those with `causal_block`, the state returned by a previous
            call. For bidirectional calls, the states of the tokens to the left and to the right,
            either of which may be None.
        form: Algorithm. "full" computes attention between all pairs of tokens, O(T^2); "chunk" is
            O(T); "recurrent" visits one token at a time. "auto" chooses the cheapest.
            Without decay in both directions, "chunk" is one sum over all tokens.
        backend: "torch" runs on any device. "triton" requires a GPU and dtypes of at most 32 bits.
            It implements "chunk", which ignores `chunk_size` and has first derivatives only, and,
            for causal calls, "recurrent", which has no gradients and also applies the feature map.
        chunk_size: Number of tokens per chunk for the chunk form; rounded up to a power of two for
            diagonal decay.
        return_state: If False, return None instead of the state and skip the work for it.
        group: Process group across which the T axis is sharded in rank order; see
            `onescan.ops.parallel`. None uses that of `sequence_parallel`, if any. A block of
            `causal_block` may extend over several ranks. Does not support `causal_block` together
            with `cu_seqlens`.

    Returns:
        The outputs in the dtype of v, and the state after the last token; for bidirectional calls,
        the states of both directions. The decay of the last token visited is already applied to
        a returned state with decay_at="source", and to the backward one with "symmetric". With
        cu_seqlens, the state is None.

    Raises:
        ValueError: If shapes or devices do not match, a dtype is wrong, the form, backend or
            feature map does not exist, the state does not match `causal`, a causal call
            asks for decay_at="symmetric" or a causal_block, chunk_size or causal_block is below 1,
            cu_seqlens is invalid or, on a CPU, log_decay is positive or an argument contains NaN.

    >>> import torch
    >>> q = k = torch.ones(1, 3, 1, 1)
    >>> v = torch.tensor([8.0, 4.0, 2.0]).reshape(1, 3, 1, 1)
    >>> half = torch.tensor([0.5]).log()
    >>> decay_attention(q, k, v, half, causal=True)[0].flatten().tolist()
    [8.0, 8.0, 6.0]
    >>> decay_attention(q, k, v, half)[0].flatten().tolist()
    [10.5, 9.0, 6.0]
    >>> decay_attention(q, k, v, half, causal_block=2)[0].flatten().tolist()
    [10.0, 8.0, 6.0]
    """
    layout = layout_of(
        q, causal=causal, causal_block=causal_block, keep=keep, cu_seqlens=cu_seqlens, state=state,
        group=group,
    )  # fmt: skip
    if getattr(log_decay, "ndim", 1) > 1:
        (log_decay,) = layout.pad_if_empty(log_decay)
    q, k, v = layout.pad_if_empty(q, k, v)
    options = Options(feature_map, decay_at, normalize, chunk_size)
    inputs = Inputs(q, k, v, log_decay)
    return recurrence.run(
        DECAY_ATTENTION, inputs, layout, state, options, form=form, backend=backend,
        return_state=return_state,
    )  # fmt: skip


def write(
    k: Keys,
    v: Values,
    log_decay: Tensor | None = None,
    *,
    feature_map: FeatureMapName = "identity",
    decay_at: DecayAt = "auto",
    keep: Keep | None = None,
    state: DecayState | None = None,
) -> DecayState:
    """Return the state of tokens without queries, such as the context of cross-attention.

    Runs in plain torch. `read` reads the state. Arguments and errors are those of a causal
    `decay_attention`.

    >>> import torch
    >>> k, v = torch.ones(1, 2, 1, 1), torch.tensor([8.0, 4.0]).reshape(1, 2, 1, 1)
    >>> read(torch.ones(1, 1, 1, 1), write(k, v), normalize="sum").item()
    6.0
    """
    layout = layout_of(k, name="k", causal=True, keep=keep)
    if getattr(log_decay, "ndim", 1) > 1:
        (log_decay,) = layout.pad_if_empty(log_decay)
    k, v = layout.pad_if_empty(k, v)
    inputs = Inputs(k, k, v, log_decay)
    options = Options(feature_map, decay_at, "none", chunk_size=64)
    return recurrence.write(DECAY_ATTENTION, inputs, layout, state, options, form="recurrent")


def read(
    q: Queries,
    state: DecayState,
    *,
    feature_map: FeatureMapName = "identity",
    normalize: Normalize = "none",
) -> Values:
    """Return what queries read from a state, S^T q, [B, T, H, V] in the dtype of q.

    Args:
        q: Queries, [B, T, H, K].
        state: State of all tokens that the queries read, from `write` or `decay_attention`.
        feature_map: Feature map to apply to the queries.
        normalize: As in a causal `decay_attention`.

    Raises:
        ValueError: If shapes or devices do not match, a dtype is wrong, the feature map does not
            exist or, on a CPU, an argument contains NaN.
    """
    check_choice("feature_map", feature_map, FEATURE_MAPS)
    check_choice("normalize", normalize, get_args(Normalize))
    recurrence.check_read(q, state, DecayState, {"kv": "B H K V", "k_sum": "B H K"})
    with disable_autocast(q):
        wide_q, kv, k_sum = to_accumulation_dtype(FEATURE_MAPS[feature_map](q), *state)
        o = torch.einsum("bthk,bhkv->bthv", wide_q, kv)
        if normalize != "none":
            row_sum = torch.einsum("bthk,bhk->bth", wide_q, k_sum).unsqueeze(-1)
            o = broadcast_divide(o, row_divisor(row_sum, normalize, causal=True)[0])
    check_no_nan(o, q=q, **{f"state.{name}": x for name, x in state._asdict().items()})
    return o.to(q.dtype)
