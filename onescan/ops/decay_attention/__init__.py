"""Decayed linear attention, causal or in both directions: the front door, and nothing else.

S_t = diag(exp(a_t)) S_{t-1} + k_t v_t^T     state, and its mirror image from the right    (K, V)
o_t = S_t^T q_t                              output; both directions added, own part once  (V,)

as attention:   O = (Q K^T * M) V,   M_ij = exp(sum of a between j and i)
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from onescan.checks import (
    can_look_at_values,
    check_choice,
    check_devices,
    check_floating,
    check_no_nan,
    check_positive,
    check_sequence_options,
    check_shapes,
    named_state_tensors,
    unpack_states,
)
from onescan.ops.backend import Backend, resolved_backend, wants_gradient
from onescan.ops.decay_attention import chunk, full, one_scan, recurrent
from onescan.ops.decay_attention.choice import Call, cheapest, cheapest_kernel
from onescan.ops.decay_attention.directions import Directions, Divide, Matrices, directed
from onescan.ops.decay_attention.state import (
    DecayState,
    DecayStates,
    joined,
    split,
)
from onescan.ops.numerics import divided, full_precision, quotient, widened
from onescan.shapes import Keep, Keys, LogDecays, Queries, Values

__all__ = [
    "IMPLEMENTATIONS",
    "Call",
    "Choice",
    "DecayState",
    "DecayStates",
    "choose",
    "decay_attention",
]

Form = Literal["auto", "full", "chunk", "recurrent"]
Sides = tuple[DecayState | None, DecayState | None]
State = DecayState | DecayStates | Sides

PATTERNS = {1: "H", 3: "B T H", 4: "B T H K"}  # of log_decay, by rank


def _chunks_in_triton(*arguments: Any, **options: Any) -> tuple[Values, Sides]:
    from onescan.ops.decay_attention.triton_chunk import forward

    return forward(*arguments, **options)


def _steps_in_triton(*arguments: Any, **options: Any) -> tuple[Values, Sides]:
    from onescan.ops.decay_attention.triton_recurrent import forward

    return forward(*arguments, **options)


# (kind, form, backend): every implementation there is. A missing one is an error.
IMPLEMENTATIONS: dict[tuple[str, str, str], Callable[..., Any]] = {
    ("causal", "chunk", "torch"): chunk.forward,
    ("causal", "full", "torch"): full.forward,
    ("causal", "recurrent", "torch"): recurrent.forward,
    ("both", "chunk", "torch"): chunk.forward,
    ("both", "full", "torch"): full.forward,
    ("both", "recurrent", "torch"): recurrent.forward,
    ("both, no decay", "chunk", "torch"): one_scan.forward,
    ("both, no decay", "full", "torch"): full.forward,
    ("both, no decay", "recurrent", "torch"): recurrent.forward,
    ("causal", "chunk", "triton"): _chunks_in_triton,
    ("causal", "recurrent", "triton"): _steps_in_triton,
    ("both", "chunk", "triton"): _chunks_in_triton,
}


def decay_attention(
    q: Queries,
    k: Keys,
    v: Values,
    log_decay: Tensor | None = None,
    *,
    causal: bool = False,
    decay_at: Literal["auto", "source", "target"] = "auto",
    normalize: Literal["none", "sum", "max_one"] = "none",
    keep: Keep | None = None,
    state: State | None = None,
    form: Form = "auto",
    backend: Backend = "auto",
    chunk_size: int = 64,
    return_state: bool = True,
) -> tuple[Values, State | None]:
    """Attend to the past, or to both sides, less to what decay lies in between.

    Source: LION, arXiv:2502.16249, Eq. 4 to 6 and 14, Eq. 79, Theorem B.1 (diagonal decay).

    Args:
        q: queries, already through their feature map.
        k: keys, likewise.
        v: values.
        log_decay: logarithm of what a state keeps from one token to the next, at most 0; -inf
            forgets all. None does not decay; [H] is fixed; [B, T, H] selective; [B, T, H, K]
            diagonal, one for each key channel. Where it is not, "full" and "chunk" in torch forget
            what decayed to less than 1e-30, but in float64.
        causal: whether a token reads only itself and those before it.
        decay_at: which of two neighboring tokens provides the decay between them: "source", the
            first one visited (Eq. 14), or "target", the second (Eq. 5, Theorem B.1). "auto" is
            "target" if causal or if the decay is diagonal, otherwise "source".
        normalize: what outputs are divided by: "none"; "sum", the row sum after decay; "max_one",
            max(row sum, 1), of its absolute value where causal (xLSTM). A row sum closer to 0 than
            1e-30 counts as 1.
        keep: True for real tokens. The others give zero output, and the real ones come out as if
            they were not there: they neither add nor decay. None keeps all.
        state: causal, what came before; else the states that enter from the left and from the
            right, either of which may be None.
        form: how the same sum is evaluated: "full" is attention, O(T^2); "chunk" O(T);
            "recurrent" one token at a time. "auto" is the cheapest; `choose` tells which, and why.
        backend: "torch" runs anywhere; "triton" needs a GPU, takes the forms "chunk" and, causal,
            "recurrent", and float32 or narrower. Its chunks have a length of
            their own, its steps no gradient, and its gradients no gradient themselves.
        chunk_size: tokens per chunk; read by the chunk form only.
        return_state: False saves what only the state needs, and returns None in its place.

    Returns:
        The outputs, in v's dtype, and the state after the last token; not causal, that and the
        backward one, before the first. Under "source" a state has decayed by its last token.

    Raises:
        ValueError: shapes, types or devices disagree, there is no such form or backend, a state
            of the other direction, chunk_size < 1, or, on a CPU, a log_decay above 0 or an
            argument that holds NaN.

    >>> q = k = torch.ones(1, 3, 1, 1)
    >>> v = torch.tensor([8.0, 4.0, 2.0]).reshape(1, 3, 1, 1)
    >>> half = torch.tensor([0.5]).log()
    >>> decay_attention(q, k, v, half, causal=True)[0].flatten().tolist()
    [8.0, 8.0, 6.0]
    >>> decay_attention(q, k, v, half)[0].flatten().tolist()
    [10.5, 9.0, 6.0]
    """
    _check(q, k, v, log_decay, causal, keep, state, chunk_size)
    check_choice("decay_at", decay_at, ["auto", "source", "target"])
    check_choice("normalize", normalize, ["none", "sum", "max_one"])
    sides = unpack_states(state, DecayState, causal=causal)
    carried = named_state_tensors(sides, causal=causal)
    call = Call(
        tokens=q.shape[1],
        key_width=q.shape[3],
        value_width=v.shape[3],
        directions=1 if causal else 2,
        chunk_size=chunk_size,
        is_diagonal=log_decay is not None and PATTERNS[log_decay.ndim] == "B T H K",
        is_learning=wants_gradient(q, k, v, log_decay, *carried.values()),
    )
    decays = log_decay is not None
    has_kernel = _has_kernel(form, causal=causal, decays=decays, call=call)
    runs_on: Any = resolved_backend(backend, has_kernel, q, k, v)
    choice = choose(form, runs_on, causal=causal, decays=decays, call=call)
    if decay_at == "auto":
        decay_at = "target" if causal or call.is_diagonal else "source"
    in_kernels = choice.backend == "triton"
    with full_precision(q):
        wide_q, wide_k, wide_v = (q, k, v) if in_kernels else widened(q, k, v)
        wide_decay = _broadcast(log_decay, torch.float32 if in_kernels else wide_k.dtype, k)
        if keep is not None:
            wide_decay = wide_decay.masked_fill(~keep[:, :, None, None], 0)
        if log_decay is not None:
            _check_decay(log_decay if log_decay.ndim == 1 else wide_decay)
        ends = (wide_decay[:, -1], wide_decay[:, 0]) if decay_at == "source" else (None, None)
        o, outgoing = (_run_kernels if in_kernels else _run_torch)(
            choice,
            wide_q,
            wide_k,
            wide_v,
            directed(wide_decay, decay_at, causal=causal),
            sides,
            ends,
            normalize=normalize,
            keep=keep,
            chunk_size=chunk_size,
            return_state=return_state,
        )
    if can_look_at_values(o):
        seen = sum(x.detach().sum() for x in carried.values())
        check_no_nan(o.detach().sum() + seen, q=q, k=k, v=v, **carried)
    return o.to(v.dtype), outgoing.forward if causal and outgoing else outgoing


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
    """Outputs, and what leaves after a last decay, `ends`, where there is one."""
    if keep is not None:
        q, k, v = (x.masked_fill(~keep[:, :, None, None], 0) for x in (q, k, v))
    o, leaving = IMPLEMENTATIONS[choice[:3]](
        q,
        k,
        v,
        decays,
        Matrices(*(joined(side, v.dtype) for side in sides)),
        chunk_size=chunk_size,
        return_state=return_state,
        divide=_divide(normalize, causal=choice.kind == "causal"),
    )
    return o, DecayStates(*map(split, leaving, ends)) if return_state else None


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
) -> tuple[Values, DecayStates | None]:
    """The same where kernels mask, divide and know their own length of chunks."""
    absolute = normalize == "max_one" and choice.kind == "causal"
    o, leaving = IMPLEMENTATIONS[choice[:3]](
        q,
        k,
        v,
        decays,
        sides,
        keep=keep,
        normalizer="absolute_max_one" if absolute else normalize,
    )
    return o, DecayStates(*map(_after, leaving, ends)) if return_state else None


def _after(state: DecayState | None, log_decay: Tensor | None) -> DecayState | None:
    """A state after one more decay, [., H or 1, K or 1], if there is one."""
    if state is None or log_decay is None:
        return state
    decay = log_decay.exp()
    return DecayState(state.kv * decay.unsqueeze(-1), state.k_sum * decay)


class Choice(NamedTuple):
    """Which implementation a call runs, and why.

    Attributes:
        kind: "causal", "both" directions, or "both, no decay".
        form: as in `decay_attention`, never "auto".
        backend: likewise.
        why: the reason in a few words.
    """

    kind: str
    form: str
    backend: str
    why: str


def choose(form: Form, backend: Backend, *, causal: bool, decays: bool, call: Call) -> Choice:
    """Name the implementation a call would run: the whole policy is these lines and `cheapest`."""
    kind = _kind_of(causal=causal, decays=decays)
    chosen: str = form
    why = "asked for"
    if form == "auto" and kind == "both, no decay":
        chosen, why = "chunk", "one sum serves all tokens"
    elif form == "auto":
        chosen, why = (cheapest_kernel if backend == "triton" else cheapest)(call)
    if backend == "auto":
        backend = "torch"
    known = [f"{f}/{b}" for of, f, b in IMPLEMENTATIONS if of == kind]
    check_choice(f"form/backend ({kind})", f"{chosen}/{backend}", known)
    return Choice(kind, chosen, backend, why)


def _kind_of(*, causal: bool, decays: bool) -> str:
    return "causal" if causal else "both" if decays else "both, no decay"


def _has_kernel(form: str, *, causal: bool, decays: bool, call: Call) -> bool:
    """Whether a form, or of "auto" one of them, has a kernel with all that is wanted of it."""
    kind = _kind_of(causal=causal, decays=decays)
    if form == "auto":
        form, _ = cheapest_kernel(call)
    steps_back = form == "recurrent" and call.is_learning
    return not steps_back and (kind, form, "triton") in IMPLEMENTATIONS


def _broadcast(log_decay: Tensor | None, dtype: torch.dtype, k: Keys) -> LogDecays:
    """One log-decay for every token: [1 or B, T, 1 or H, 1 or K]."""
    tokens = k.shape[1]
    if log_decay is None:
        return k.new_zeros(1, tokens, 1, 1, dtype=dtype)
    wide = log_decay.to(dtype)
    if PATTERNS[wide.ndim] == "H":
        return wide[:, None].expand(1, tokens, -1, 1)
    return wide if PATTERNS[wide.ndim] == "B T H K" else wide.unsqueeze(-1)


def _divide(normalize: str, *, causal: bool) -> Divide | None:
    """How outputs are divided by their row sums, if they are."""
    ways: dict[str, Divide | None] = {
        "none": None,
        "sum": Divide(partial(divided, owned=True)),
        "max_one": Divide(partial(_divided_by_one, absolute=causal), cancels=True),
    }
    return ways[normalize]


def _divided_by_one(o: Tensor, row_sum: Tensor, *, absolute: bool) -> Tensor:
    """Divide by the row sum, or its absolute value, where that is more than 1."""
    return quotient(o, (row_sum.abs() if absolute else row_sum).clamp(min=1), owned=True)


def _check(
    q: Any, k: Any, v: Any, log_decay: Any, causal: Any, keep: Any, state: Any, chunk_size: Any
) -> None:  # Any: these are what a user passed
    check_sequence_options(causal=causal, keep=keep, chunk_size=chunk_size)
    carried = named_state_tensors(unpack_states(state, DecayState, causal=causal), causal=causal)
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


def _check_decay(log_decay: Tensor) -> None:
    """Raise ValueError for NaN, or a state that would grow, where values may be looked at."""
    if not can_look_at_values(log_decay) or not log_decay.numel():
        return
    highest = log_decay.detach().amax().item()
    if highest != highest:
        check_no_nan(log_decay, log_decay=log_decay)
    if highest > 0:
        raise ValueError(f"log_decay reaches {highest:.6g}, expected at most 0, a decay of 1")
