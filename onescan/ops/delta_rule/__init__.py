"""The delta rule, causal or bidirectional: arguments, states and choice of form.

S_t = (I - beta_t k_t k_t^T) diag(exp(log_decay_t)) S_{t-1} + beta_t k_t v_t^T   state    (K, V)
o_t = S_t^T q_t                                              output, causal               (V,)
o_t = (S_t + S'_t - beta_t k_t v_t^T)^T q_t                  output, bidirectional        (V,)

where S' is the state of the backward direction. DeltaNet has no decay, Gated DeltaNet one decay per
head, KDA one per key channel, and DeltaProduct several updates (I - beta k k^T) S + beta k v^T per
token.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

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
    named_state_tensors,
    nan_probe,
    unpack_states,
)
from onescan.ops.backend import Backend, resolved_backend
from onescan.ops.blocks import block_ends, check_causal_block
from onescan.ops.delta_rule import forms
from onescan.ops.delta_rule.ranks import EnteringStates
from onescan.ops.numerics import disable_autocast, to_accumulation_dtype, zero_masked
from onescan.ops.packing import Packing
from onescan.ops.parallel import Group, is_empty, one_token, packing_over, sequence_group
from onescan.shapes import (
    Keep,
    KeyValue,
    Queries,
    UpdateBetas,
    UpdateKeys,
    UpdateValues,
    Values,
)

__all__ = ["IMPLEMENTATIONS", "DeltaState", "DeltaStates", "choose", "delta_rule"]

Form = Literal["auto", "full", "chunk", "recurrent"]
IMPLEMENTATIONS = forms.FORMS
OVER_RANKS = ("chunk", "full")  # forms that support a process group
PATTERNS = {3: "B T H", 4: "B T H K"}  # of log_decay, by rank


class DeltaState(NamedTuple):
    """The state of one direction: a matrix that maps keys to values.

    Attributes:
        kv: ``[B, H, K, V]``, in float32, or float64 for float64 inputs. Zeros before any token.
    """

    kv: KeyValue


class DeltaStates(NamedTuple):
    """The states of both directions.

    Attributes:
        forward: As an input, the state of the tokens to the left; as an output, the state after
            the last token. None is the empty state.
        backward: As an input, the state of the tokens to the right; as an output, the backward
            state before the first token. None is the empty state.
    """

    forward: DeltaState | None
    backward: DeltaState | None


Sides = tuple[DeltaState | None, DeltaState | None]  # DeltaStates, or a plain pair


def delta_rule(
    q: Queries,
    k: UpdateKeys,
    v: UpdateValues,
    beta: UpdateBetas,
    log_decay: Tensor | None = None,
    *,
    causal: bool = False,
    causal_block: int | None = None,
    keep: Keep | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    state: DeltaState | Sides | None = None,
    form: Form = "auto",
    backend: Backend = "auto",
    chunk_size: int = 64,
    group: Group | None = None,
) -> tuple[Values, DeltaState | DeltaStates | None]:
    """Compute linear attention in which each token overwrites the value stored under its key.

    Without `log_decay`, this is DeltaNet. With one decay per head, it is Gated DeltaNet; with one
    per key channel, Kimi Delta Attention (KDA). With an axis R in k, v and beta, each token applies
    R updates, as in DeltaProduct.

        S_{t,0} = diag(exp(log_decay_t)) S_{t-1}
        S_{t,r} = (I - beta_tr k_tr k_tr^T) S_{t,r-1} + beta_tr k_tr v_tr^T     r = 1, ..., R
        o_t     = S_t^T q_t, with S_t = S_{t,R}

    Bidirectional calls add the same recurrence from the last token to the first, and count the
    updates of each token once in its own output. Both directions apply the updates of a token in
    the order of the axis R. Reversing all inputs along T and swapping the states reverses the
    outputs.

    Inputs have the layout ``[B, T, H, K]``, unlike torch's ``scaled_dot_product_attention``, which
    takes ``[B, H, T, K]``.

    Sources: DeltaNet, arXiv:2406.06484; Gated DeltaNet, arXiv:2412.06464; KDA, arXiv:2510.26692;
    DeltaProduct, arXiv:2502.10297; both directions as in LION, arXiv:2502.16249, Table 1 and
    App. B.7. Each direction subtracts half of the token's own output; the half printed in LION,
    q k v / 2, lacks beta.

    Args:
        q: Queries ``[B, T, H, K]``, after their feature map.
        k: Keys ``[B, T, H, K]``, or ``[B, T, R, H, K]`` for R updates per token, after their
            feature map. Normalize them to length 1 so that beta is the fraction of the stored
            value that is replaced.
        v: Values ``[B, T, H, V]``, or ``[B, T, R, H, V]``.
        beta: Write strength ``[B, T, H]``, or ``[B, T, R, H]``, any finite number: 0 writes
            nothing, 1 replaces the stored value, 2 reflects it.
        log_decay: Log of the decay factor, at most 0; -inf empties the state. ``[B, T, H]`` for one
            decay per head, ``[B, T, H, K]`` for one per key channel. Applied once per token,
            before its first update. None for no decay.
        causal: Whether a token attends only to itself and to those before it.
        causal_block: Tokens per block of a blockwise causal call: each token attends to its own
            block in both directions, and to all earlier blocks. The backward recurrence starts from
            an empty state at the end of each block. The last block may be shorter. Masked tokens
            count as positions of a block. As in causal calls, there is only a forward state. A call
            with a state begins a new block. None for a single block.
        keep: ``[B, T]``, True for real tokens, the opposite of ``key_padding_mask`` in PyTorch and
            `onescan.nn`. Other tokens have zero output and neither update nor decay the state.
            None keeps all.
        cu_seqlens: Offsets of several sequences packed in one row, as in flash-attention: int32,
            ``[S + 1]``, from 0 to T, on the CPU or the device of q. With several rows, offsets
            count the tokens of all rows, up to B * T, and every row begins with a new sequence.
            Not with `state`.
        state: State returned by a previous call: a `DeltaState` if causal or with `causal_block`,
            otherwise `DeltaStates` or a pair, either of which may be None.
        form: Algorithm. "chunk" uses matrix products, O(T); "full" computes attention between all
            pairs of tokens, O(T^2); "recurrent" visits one token at a time, O(T). "auto" is
            "recurrent" for a single token in torch, otherwise "chunk".
        backend: "torch" runs on any device. "triton" requires a GPU and dtypes of at most 32 bits.
            It implements "chunk" with its own chunk size, for one update per token and at most one
            decay per head, without `group`, and has first derivatives only. "auto" chooses; see
            `use_backend`.
        chunk_size: Updates per chunk of the chunk form in torch: R per token. Rounded up to a power
            of two tokens for decays per key channel. Precision decreases if it is many times the
            key width.
        group: Process group across which the T axis is sharded in rank order; see
            `onescan.ops.parallel`. None uses that of `sequence_parallel`, if any. Supported by the
            forms "chunk" and "full" in torch. A block of `causal_block` may extend over several
            ranks. Does not support `causal_block` together with `cu_seqlens`.

    Returns:
        The outputs ``[B, T, H, V]`` in the dtype of v, and the state: a `DeltaState` if causal or
        with `causal_block`, otherwise `DeltaStates`; None with cu_seqlens.

    Raises:
        ValueError: If shapes or devices do not match, a dtype is wrong, the form or backend is
            unknown, the backend cannot run the call, the state is for the other value of `causal`,
            chunk_size or causal_block is below 1, causal_block is given with causal=True,
            cu_seqlens is invalid or, on a CPU, log_decay is positive, or an argument holds NaN or
            an infinity that causes NaN.

    >>> import torch
    >>> q = k = torch.ones(1, 3, 1, 1)
    >>> v = torch.tensor([8.0, 4.0, 2.0]).reshape(1, 3, 1, 1)
    >>> half = torch.full((1, 3, 1), 0.5)
    >>> delta_rule(q, k, v, half, causal=True)[0].flatten().tolist()  # half of the way to v
    [4.0, 4.0, 3.0]
    >>> delta_rule(q, k, v, half)[0].flatten().tolist()
    [5.25, 4.5, 3.0]
    >>> delta_rule(q, k, v, half, causal_block=2)[0].flatten().tolist()
    [5.0, 4.0, 3.0]
    >>> delta_rule(q, k, v, half, half.log(), causal=True)[0].flatten().tolist()
    [4.0, 3.0, 1.75]
    """
    ranks, own = sequence_group(group), q
    if causal_block is not None:
        check_causal_block(causal_block, causal=causal, cu_seqlens=cu_seqlens, ranks=ranks)
    has_one_state = causal or causal_block is not None
    if empty := is_empty(ranks, q):
        q, k, v, beta, log_decay = one_token(q, k, v, beta, log_decay)
        keep = q.new_zeros(q.shape[:2], dtype=torch.bool)
    check_sequence_options(causal=causal, keep=keep, chunk_size=chunk_size)
    sides = unpack_states(state, DeltaState, causal=has_one_state)
    carried = named_state_tensors(sides, causal=has_one_state)
    _check(q, k, v, beta, log_decay, keep, carried)
    if k.ndim > q.ndim and k.shape[2] == 1:  # as without the axis, for which there are kernels
        k, v, beta = k.squeeze(2), v.squeeze(2), beta.squeeze(2)
    packing = packing_over(ranks, cu_seqlens, own, state=state)
    runs_on = _backend(form, backend, q, k, v, log_decay, over_ranks=ranks is not None)
    incoming = [None if side is None else side.kv for side in sides[: 1 if causal else 2]]
    starts = ends = None  # where the forward and the backward direction restart
    if packing is not None:
        starts, ends = packing.starts, packing.ends
    if causal_block is not None:
        of_blocks = block_ends(causal_block, own, packing, ranks).expand(*q.shape[:2])
        ends = of_blocks if ends is None else ends | of_blocks
    with disable_autocast(q):
        if runs_on == "triton":
            from onescan.ops.delta_rule import launch

            o, *outgoing = launch.chunk(
                q, k, v, beta, log_decay, incoming, keep=keep, starts=starts, ends=ends
            )
        else:
            chosen = choose(form, tokens=q.shape[1], over_ranks=ranks is not None)
            inputs = _inputs(q, k, v, beta, log_decay, keep)
            if inputs.log_decay is not None:
                check_log_decay(inputs.log_decay)
            run = forms.causal if causal else partial(forms.bidirectional, ends=ends)
            options: dict[str, Any] = {"chunk_size": chunk_size, "starts": starts}
            entering = None
            if ranks is not None:
                entering = options["entering"] = EnteringStates(ranks, len(q))
            o, *outgoing = run(IMPLEMENTATIONS[chosen], inputs, *incoming, **options)
            if entering is not None:
                outgoing = list(entering.last.split(len(q)))
    if can_look_at_values(o):
        named = {"q": q, "k": k, "v": v, "beta": beta, **carried}
        check_no_nan(nan_probe(o, *outgoing), **named)
    o = o[:, :0] if empty else o
    if packing is not None:
        return o.to(v.dtype), None
    states = [DeltaState(kv) for kv in outgoing]
    return o.to(v.dtype), states[0] if has_one_state else DeltaStates(*states)


def _inputs(
    q: Queries,
    k: UpdateKeys,
    v: UpdateValues,
    beta: UpdateBetas,
    log_decay: Tensor | None,
    keep: Keep | None,
) -> forms.Inputs:
    """Return the inputs with an axis of updates, and zeros for masked tokens."""
    if k.ndim == q.ndim:
        k, v, beta = k.unsqueeze(2), v.unsqueeze(2), beta.unsqueeze(2)
    if log_decay is not None and log_decay.ndim < q.ndim:
        log_decay = log_decay.unsqueeze(-1)
    given = [x for x in (q, k, v, beta, log_decay) if x is not None]
    inputs = to_accumulation_dtype(*given)
    if keep is not None:
        inputs = zero_masked(keep, *inputs)
    return forms.Inputs(*inputs)


def _backend(
    form: str,
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    *,
    over_ranks: bool,
) -> str:
    """Return the backend of a call. Kernels implement only the form "chunk"."""
    reasons = {
        "with several updates per token, expected one": k.ndim > q.ndim,
        "with a decay per key channel, expected one per head": (
            log_decay is not None and log_decay.ndim == q.ndim
        ),
        "with group, which runs in torch only": over_ranks,
    }
    has_kernel = form in ("auto", "chunk") and not any(reasons.values())
    resolved = resolved_backend(backend, has_kernel, q, k, v, op="delta_rule")
    if resolved == "triton":
        check_choice("form/backend", f"{form}/triton", ["auto/triton", "chunk/triton"])
        for reason, applies in reasons.items():
            if applies:
                raise ValueError(f"backend is 'triton' {reason}")
    return resolved


def choose(form: str, *, tokens: int, over_ranks: bool = False) -> str:
    """Return the form that a call in torch uses."""
    if over_ranks:  # all ranks use the same form, whatever their number of tokens
        check_choice("form (group)", form, ["auto", *OVER_RANKS])
    if form == "auto":
        form = "recurrent" if tokens == 1 and not over_ranks else "chunk"
    check_choice("form", form, IMPLEMENTATIONS)
    return form


def _check(
    q: Any,
    k: Any,
    v: Any,
    beta: Any,
    log_decay: Any,
    keep: Any,
    carried: dict[str, Any],
) -> None:  # Any: the arguments are not checked yet
    given = {} if log_decay is None else {"log_decay": log_decay}
    check_floating(q=q, k=k, v=v, beta=beta, **given, **carried)
    check_devices(q=q, k=k, v=v, beta=beta, keep=keep, **given, **carried)
    if log_decay is not None and log_decay.ndim not in PATTERNS:
        raise ValueError(
            f"log_decay has shape {tuple(log_decay.shape)}, expected 'B T H' or 'B T H K'"
        )
    updates = "R " if k.ndim > q.ndim else ""
    sizes = check_shapes(
        q=(q, "B T H K"),
        k=(k, f"B T {updates}H K"),
        v=(v, f"B T {updates}H V"),
        beta=(beta, f"B T {updates}H"),
        log_decay=(log_decay, "" if log_decay is None else PATTERNS[log_decay.ndim]),
        keep=(keep, "B T"),
        **{name: (x, "B H K V") for name, x in carried.items()},
    )
    check_positive(**{letter: sizes[letter] for letter in f"T{updates}HKV" if letter != " "})
