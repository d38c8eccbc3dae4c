"""Linear attention with decay, causal or bidirectional: argument checks, state, choice of form.

    S_t = diag(exp(a_t)) S_{t-1} + k_t v_t^T     state of one direction                      (K, V)
    o_t = S_t^T q_t                              summed over directions, own token counted once (V,)

    as attention:   O = (Q K^T * M) V,   M_ij = exp(sum of a between j and i)

Source: LION, arXiv:2502.16249.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from onescan.checks import (
    can_look_at_values,
    check_choice,
    check_devices,
    check_floating,
    check_log_decay,
    check_no_nan,
    check_positive,
    check_sequence_options,
    check_shapes,
    is_known,
    named_state_tensors,
    unpack_states,
)
from onescan.ops.backend import Backend, resolved_backend, wants_gradient
from onescan.ops.blocks import block_ends, check_causal_block
from onescan.ops.decay_attention import forms
from onescan.ops.decay_attention.forms import Directions, directed, separated
from onescan.ops.decay_attention.ranks import carried_states
from onescan.ops.decay_factors import padded
from onescan.ops.feature_maps import FEATURE_MAPS, KERNEL_MAPS, FeatureMapName
from onescan.ops.numerics import (
    accumulation_dtype,
    disable_autocast,
    product_dtype,
    to_accumulation_dtype,
    zero_masked,
)
from onescan.ops.packing import Packing
from onescan.ops.parallel import (
    Group,
    SequenceGroup,
    is_empty,
    one_token,
    packing_over,
    sequence_group,
)
from onescan.shapes import DecayedKeys, DecayedKeyValue, Keep, Keys, LogDecays, Queries, Values

__all__ = [
    "IMPLEMENTATIONS",
    "Call",
    "Choice",
    "DecayState",
    "DecayStates",
    "choose",
    "decay_attention",
]

PATTERNS = {1: "H", 3: "B T H", 4: "B T H K"}  # of log_decay, by rank


class DecayState(NamedTuple):
    """Decayed sums over all keys and values on one side of a token.

    Attributes:
        kv: Sum of decay * k v^T, [B, H, K, V]; float32, or float64 for float64 inputs.
        k_sum: Sum of decay * k, [B, H, K], used to compute the row sums for `normalize`.
    """

    kv: DecayedKeyValue
    k_sum: DecayedKeys


class DecayStates(NamedTuple):
    """The states of a bidirectional call, one per direction.

    Attributes:
        forward: As an input, the state of the tokens to the left. As an output, the state after
            the last token.
        backward: As an input, the state of the tokens to the right. As an output, the state before
            the first token.
    """

    forward: DecayState | None
    backward: DecayState | None


Form = Literal["auto", "full", "chunk", "recurrent"]
DecayAt = Literal["auto", "source", "target", "symmetric"]
Sides = tuple[DecayState | None, DecayState | None]
State = DecayState | DecayStates | Sides


def _chunks_in_triton(*arguments: Any, **options: Any) -> tuple[Values, Sides]:
    from onescan.ops.decay_attention.launch import chunk

    return chunk(*arguments, **options)


def _one_scan_in_triton(*arguments: Any, **options: Any) -> tuple[Values, Sides]:
    from onescan.ops.decay_attention.launch import one_scan

    return one_scan(*arguments, **options)


def _steps_in_triton(*arguments: Any, **options: Any) -> tuple[Values, Sides]:
    from onescan.ops.decay_attention.launch import recurrent

    return recurrent(*arguments, **options)


# All implementations by (kind, form, backend). Requesting a missing one is an error.
IMPLEMENTATIONS: dict[tuple[str, str, str], Callable[..., Any]] = {
    ("causal", "chunk", "torch"): forms.chunk,
    ("causal", "full", "torch"): forms.full,
    ("causal", "recurrent", "torch"): forms.recurrent,
    ("both", "chunk", "torch"): forms.chunk,
    ("both", "full", "torch"): forms.full,
    ("both", "recurrent", "torch"): forms.recurrent,
    ("both, no decay", "chunk", "torch"): forms.one_scan,
    ("both, no decay", "full", "torch"): forms.full,
    ("both, no decay", "recurrent", "torch"): forms.recurrent,
    ("causal", "chunk", "triton"): _chunks_in_triton,
    ("causal", "recurrent", "triton"): _steps_in_triton,
    ("both", "chunk", "triton"): _chunks_in_triton,
    ("both, no decay", "chunk", "triton"): _one_scan_in_triton,
}


def decay_attention(
    q: Queries,
    k: Keys,
    v: Values,
    log_decay: Tensor | None = None,
    *,
    feature_map: FeatureMapName = "identity",
    causal: bool = False,
    causal_block: int | None = None,
    decay_at: DecayAt = "auto",
    normalize: Literal["none", "sum", "max_one"] = "none",
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
        causal_block: Tokens per block of a blockwise causal call: each token reads its own block in
            both directions, and all earlier blocks as in a causal call. The last block may be
            shorter. Masked tokens count as positions of a block. Other options are as in
            bidirectional calls, for example decay_at="auto", except that there is only a forward
            state, as in causal calls. A call with a state begins a new block. None for a single
            block.
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
            O(T); "recurrent" visits one token at a time. "auto" chooses the cheapest; see `choose`.
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
            feature map does not exist, the state is for the other value of `causal`, a causal call
            asks for decay_at="symmetric" or a causal_block, chunk_size or causal_block is below 1,
            cu_seqlens is invalid or, on a CPU, log_decay is positive or an argument holds NaN.

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
    ranks, own = sequence_group(group), q
    if causal_block is not None:
        check_causal_block(causal_block, causal=causal, cu_seqlens=cu_seqlens, ranks=ranks)
    has_one_state = causal or causal_block is not None
    if empty := is_empty(ranks, q):
        q, k, v = one_token(q, k, v)
        keep = q.new_zeros(q.shape[:2], dtype=torch.bool)
        if log_decay is not None and log_decay.ndim > 1:
            (log_decay,) = one_token(log_decay)
    check_sequence_options(causal=causal, keep=keep, chunk_size=chunk_size)
    sides = unpack_states(state, DecayState, causal=has_one_state)
    carried = named_state_tensors(sides, causal=has_one_state)
    _check(q, k, v, log_decay, keep, carried)
    check_choice("decay_at", decay_at, get_args(DecayAt))
    if causal and decay_at == "symmetric":
        raise ValueError(
            "decay_at is 'symmetric' with causal=True, expected 'auto', 'source' or 'target'"
        )
    check_choice("normalize", normalize, ["none", "sum", "max_one"])
    check_choice("feature_map", feature_map, FEATURE_MAPS)
    packing = packing_over(ranks, cu_seqlens, own, state=state)
    return_state = return_state and packing is None
    call = Call(
        tokens=q.shape[1],
        key_width=q.shape[3],
        value_width=v.shape[3],
        directions=1 if causal else 2,
        chunk_size=chunk_size,
        is_diagonal=log_decay is not None and PATTERNS[log_decay.ndim] == "B T H K",
        is_learning=wants_gradient(q, k, v, log_decay, *carried.values()),
    )
    decays = any(x is not None for x in (log_decay, packing, causal_block))
    has_kernel = _has_kernel(form, causal=causal, decays=decays, call=call)
    kernels = "scalar" if causal or decays else "no_decay"
    op = f"decay_attention.{'diagonal' if call.is_diagonal else kernels}"
    runs_on: Any = resolved_backend(backend, has_kernel, q, k, v, op=op)
    choice = choose(form, runs_on, causal=causal, decays=decays, call=call)
    if not decays:
        decay_at = "target"  # which shifts nothing
    elif decay_at == "auto":
        decay_at = "target" if causal or call.is_diagonal else "source"
    in_kernels = choice.backend == "triton"
    if not (in_kernels and choice.form == "recurrent" and feature_map in KERNEL_MAPS):
        if keep is not None and feature_map != "identity":
            q, k = zero_masked(keep, q, k)
        q, k = FEATURE_MAPS[feature_map](q), FEATURE_MAPS[feature_map](k)
        feature_map = "identity"
    with disable_autocast(q):
        if in_kernels:
            wide_q, wide_k, wide_v = q, k, v
        elif choice.form == "recurrent":
            wide_q, wide_k, wide_v = to_accumulation_dtype(q, k, v)
        else:
            wide_q, wide_k, wide_v = (x.to(product_dtype(q, k, v)) for x in (q, k, v))
        wide_decay = _broadcast(log_decay, accumulation_dtype(wide_k.dtype), k)
        if keep is not None:
            wide_decay = wide_decay.masked_fill(~keep[:, :, None, None], 0)
        if log_decay is not None:
            check_log_decay(log_decay if log_decay.ndim == 1 else wide_decay)
        shifted, ends = directed(wide_decay, decay_at, causal=causal)
        if packing is not None:
            shifted = separated(shifted, packing.starts, packing.ends)
        if causal_block is not None:
            shifted = separated(shifted, None, block_ends(causal_block, own, packing, ranks))
        last = None
        if ranks is not None:
            sides, last = _carried(ranks, wide_k, wide_v, shifted, sides, ends, keep)
        run = partial(_run_kernels, feature_map=feature_map) if in_kernels else _run_torch
        o, outgoing = run(
            choice,
            wide_q,
            wide_k,
            wide_v,
            shifted,
            sides,
            ends,
            normalize=normalize,
            keep=keep,
            chunk_size=chunk_size,
            return_state=return_state and ranks is None,
        )
        if return_state and last is not None:
            outgoing = last
    if can_look_at_values(o):
        seen = sum(x.detach().sum() for x in carried.values())
        check_no_nan(o.detach().sum() + seen, q=q, k=k, v=v, **carried)
    o = o[:, :0] if empty else o
    return o.to(v.dtype), outgoing.forward if has_one_state and outgoing else outgoing


def _carried(
    ranks: SequenceGroup,
    k: Keys,
    v: Values,
    decays: Directions,
    sides: Sides,
    ends: tuple[Tensor | None, Tensor | None],
    keep: Keep | None,
) -> tuple[Sides, DecayStates]:
    """Return the states that enter this rank from both sides, and those of the whole sequence."""
    k, v = to_accumulation_dtype(k, v)
    if keep is not None:
        k, v = zero_masked(keep, k, v)
    matrices = _joined(sides[0], k.dtype), _joined(sides[1], k.dtype)
    entering, leaving = carried_states(ranks, k, v, decays, ends, matrices)
    forward, backward = (_split(x, None) for x in entering)
    return (forward, backward), DecayStates(*(_split(x, None) for x in leaving))


def _run_torch(
    choice: "Choice",
    q: Queries,
    k: Keys,
    v: Values,
    decays: Directions,
    sides: Sides,
    ends: tuple[Tensor | None, Tensor | None],
    *,
    normalize: str,
    keep: Keep | None,
    chunk_size: int,
    return_state: bool,
) -> tuple[Values, DecayStates | None]:
    """Return the outputs, and the states after the final decays `ends`, if given."""
    if keep is not None:
        q, k, v = zero_masked(keep, q, k, v)
    o, leaves = IMPLEMENTATIONS[choice[:3]](
        q,
        k,
        v,
        decays,
        tuple(_joined(side, accumulation_dtype(v.dtype)) for side in sides),
        forms.Options(normalize, chunk_size, return_state),
    )
    return o, DecayStates(*map(_split, leaves, ends)) if return_state else None


def _joined(state: DecayState | None, dtype: torch.dtype) -> Tensor | None:
    """Concatenate both parts of a state into one matrix, [B, H, K, V + 1]."""
    if state is None:
        return None
    return torch.cat([state.kv.to(dtype), state.k_sum.to(dtype).unsqueeze(-1)], dim=-1)


def _split(matrix: Tensor | None, log_decay: Tensor | None) -> DecayState | None:
    """Split such a matrix into a state, and apply a final decay if given."""
    if matrix is None:
        return None
    return _after(DecayState(matrix[..., :-1], matrix[..., -1]), log_decay)


def _run_kernels(
    choice: "Choice",
    q: Queries,
    k: Keys,
    v: Values,
    decays: Directions,
    sides: Sides,
    ends: tuple[Tensor | None, Tensor | None],
    *,
    normalize: str,
    keep: Keep | None,
    chunk_size: int,
    return_state: bool,
    feature_map: FeatureMapName,
) -> tuple[Values, DecayStates | None]:
    """Do the same with kernels, which apply `keep`, normalize and choose their own chunk length."""
    absolute = normalize == "max_one" and choice.kind == "causal"
    options = {} if feature_map == "identity" else {"feature_map": feature_map}
    o, leaving = IMPLEMENTATIONS[choice[:3]](
        q,
        k,
        v,
        decays,
        sides,
        keep=keep,
        normalizer="absolute_max_one" if absolute else normalize,
        **options,
    )
    return o, DecayStates(*map(_after, leaving, ends)) if return_state else None


def _after(state: DecayState | None, log_decay: Tensor | None) -> DecayState | None:
    """Apply one more decay, [., H or 1, K or 1], to a state, if given."""
    if state is None or log_decay is None:
        return state
    decay = log_decay.exp()
    return DecayState(state.kv * decay.unsqueeze(-1), state.k_sum * decay)


class Choice(NamedTuple):
    """The implementation that a call runs, and why.

    Attributes:
        kind: "causal", "both" (bidirectional), or "both, no decay".
        form: As in `decay_attention`, never "auto".
        backend: As in `decay_attention`, never "auto".
        why: Short explanation of the choice.
    """

    kind: str
    form: str
    backend: str
    why: str


class Call(NamedTuple):
    """Properties of a call on which the choice of the form depends.

    Attributes:
        tokens: Number of tokens T.
        key_width: Key channels per head, K.
        value_width: Value channels per head, V.
        directions: Number of directions D: 1 if causal, otherwise 2.
        chunk_size: Tokens per chunk, C.
        is_diagonal: Whether each key channel has its own decay.
        is_learning: Whether gradients are needed.
    """

    tokens: int
    key_width: int
    value_width: int
    directions: int
    chunk_size: int
    is_diagonal: bool
    is_learning: bool = False


def choose(form: Form, backend: Backend, *, causal: bool, decays: bool, call: Call) -> Choice:
    """Return the implementation that a call runs; `cheapest` resolves "auto"."""
    kind = _kind_of(causal=causal, decays=decays)
    chosen: str = form
    why = "requested"
    if form == "auto" and kind == "both, no decay":
        chosen, why = "chunk", "one sum serves all tokens"
    elif form == "auto":
        chosen, why = (cheapest_kernel if backend == "triton" else cheapest)(call)
    if backend == "auto":
        backend = "torch"
    known = [f"{f}/{b}" for of, f, b in IMPLEMENTATIONS if of == kind]
    check_choice(f"form/backend ({kind})", f"{chosen}/{backend}", known)
    return Choice(kind, chosen, backend, why)


def cheapest(call: Call) -> tuple[str, str]:
    """Return the form with the fewest multiplications per token and head, and why.

        full:   T (K + V)                  attention to all tokens
        chunk:  C (K + V) + (3 + D) K V    attention within the chunk, and D states

    where T and C are padded if the decay is diagonal. Two of the K V terms are products with a
    state. The others account for the remaining cost of states. They were fitted to the lengths at
    which the forward pass of both forms took equal time on a CPU, for selective decay,
    K = V = 32, 64 and 128, and C = 64.

    >>> image = Call(
    ...     tokens=197,
    ...     key_width=64,
    ...     value_width=64,
    ...     directions=2,
    ...     chunk_size=64,
    ...     is_diagonal=False,
    ... )
    >>> cheapest(image)
    ('full', '25216 multiplications per token and head, 28672 in chunks')
    >>> cheapest(image._replace(tokens=512))
    ('chunk', '28672 multiplications per token and head, 65536 in full')
    """
    if not is_known(call.tokens):
        return "chunk", "fits any length"
    if call.tokens == 1:
        return "recurrent", "one token"
    all_tokens, chunk_tokens = (
        padded(tokens) if call.is_diagonal else tokens
        for tokens in (call.tokens, min(call.chunk_size, call.tokens))
    )
    states = (3 + call.directions) * call.key_width * call.value_width
    full = all_tokens * (call.key_width + call.value_width)
    chunk = chunk_tokens * (call.key_width + call.value_width) + states
    chosen = "full" if full <= chunk else "chunk"
    if torch.compiler.is_compiling():  # which would compile again for each length in a text
        return chosen, "fewest multiplications"
    if chosen == "full":
        return chosen, f"{full} multiplications per token and head, {chunk} in chunks"
    return chosen, f"{chunk} multiplications per token and head, {full} in full"


def cheapest_kernel(call: Call) -> tuple[str, str]:
    """Choose among kernels, which have no full form, and no gradients in the recurrent form."""
    if is_known(call.tokens) and call.tokens == 1 and call.directions == 1 and not call.is_learning:
        return "recurrent", "one token"
    return "chunk", "one launch fits any length"


def _kind_of(*, causal: bool, decays: bool) -> str:
    return "causal" if causal else "both" if decays else "both, no decay"


def _has_kernel(form: str, *, causal: bool, decays: bool, call: Call) -> bool:
    """Return whether the form that a call runs has a kernel, with gradients if they are needed."""
    kind = _kind_of(causal=causal, decays=decays)
    if form == "auto":
        form, _ = cheapest_kernel(call)
    steps_back = form == "recurrent" and call.is_learning
    return not steps_back and (kind, form, "triton") in IMPLEMENTATIONS


def _broadcast(log_decay: Tensor | None, dtype: torch.dtype, k: Keys) -> LogDecays:
    """Reshape log-decays to [1 or B, T, 1 or H, 1 or K]."""
    tokens = k.shape[1]
    if log_decay is None:
        return k.new_zeros(1, tokens, 1, 1, dtype=dtype)
    wide = log_decay.to(dtype)
    if PATTERNS[wide.ndim] == "H":
        return wide[:, None].expand(1, tokens, -1, 1)
    return wide if PATTERNS[wide.ndim] == "B T H K" else wide.unsqueeze(-1)


def _check(
    q: Any, k: Any, v: Any, log_decay: Any, keep: Any, carried: dict[str, Any]
) -> None:  # Any: the arguments are not checked yet
    given = {} if log_decay is None else {"log_decay": log_decay}
    check_floating(q=q, k=k, v=v, **given, **carried)
    check_devices(q=q, k=k, v=v, keep=keep, **given, **carried)
    if log_decay is not None and log_decay.ndim not in PATTERNS:
        raise ValueError(
            f"log_decay has shape {tuple(log_decay.shape)}, expected 'H', 'B T H' or 'B T H K'"
        )
    sizes = check_shapes(
        q=(q, "B T H K"),
        k=(k, "B T H K"),
        v=(v, "B T H V"),
        log_decay=(log_decay, "" if log_decay is None else PATTERNS[log_decay.ndim]),
        keep=(keep, "B T"),
        **{name: (x, "B H K V" if name.endswith("kv") else "B H K") for name, x in carried.items()},
    )
    check_positive(**{letter: sizes[letter] for letter in "THKV"})
