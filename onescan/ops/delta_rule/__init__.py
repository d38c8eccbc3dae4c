"""The delta rule (DeltaNet), causal or bidirectional: arguments, states and choice of form.

S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T    state, and its mirror image S'  (K, V)
o_t = S_t^T q_t                                            output, causal                  (V,)
o_t = (S_t + S'_t - beta_t k_t v_t^T)^T q_t                output, bidirectional           (V,)
"""

from typing import Any, Literal, NamedTuple

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
    nan_probe,
    unpack_states,
)
from onescan.ops.delta_rule import forms
from onescan.ops.numerics import disable_autocast, to_accumulation_dtype
from onescan.ops.packing import Packing, packing_of
from onescan.shapes import Betas, Keep, Keys, KeyValue, Queries, Values

__all__ = ["IMPLEMENTATIONS", "DeltaState", "DeltaStates", "choose", "delta_rule"]

Form = Literal["auto", "chunk", "recurrent"]
IMPLEMENTATIONS = forms.FORMS


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
    k: Keys,
    v: Values,
    beta: Betas,
    *,
    causal: bool = False,
    keep: Keep | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    state: DeltaState | Sides | None = None,
    form: Form = "auto",
    chunk_size: int = 64,
) -> tuple[Values, DeltaState | DeltaStates | None]:
    """Compute linear attention in which each token overwrites the value stored under its key.

    Inputs have the layout ``[B, T, H, K]``, unlike torch's ``scaled_dot_product_attention``, which
    takes ``[B, H, T, K]``.

    Sources: DeltaNet, arXiv:2406.06484; both directions as in LION, arXiv:2502.16249, Table 1 and
    App. B.7. Each direction subtracts half of the token's own output; the half printed in the
    paper, q k v / 2, lacks beta.

    Args:
        q: Queries ``[B, T, H, K]``, after their feature map.
        k: Keys ``[B, T, H, K]``, after their feature map. Normalize them to length 1 so that
            beta is the fraction of the stored value that is replaced.
        v: Values ``[B, T, H, V]``.
        beta: Write strength ``[B, T, H]``, any finite number: 0 writes nothing, 1 replaces the
            stored value.
        causal: Whether a token attends only to itself and to those before it.
        keep: ``[B, T]``, True for real tokens, the opposite of ``key_padding_mask`` in PyTorch and
            `onescan.nn`. The outputs of other tokens are zero, and they do not affect the real
            tokens. None keeps all.
        cu_seqlens: Offsets of several sequences packed in one row, as in flash-attention: int32,
            ``[S + 1]``, from 0 to T, on the CPU or the device of q. With several rows, offsets
            count the tokens of all rows, up to B * T, and every row begins with a new sequence.
            Not with `state`.
        state: State returned by a previous call: a `DeltaState` if causal, otherwise
            `DeltaStates` or a pair, either of which may be None.
        form: Algorithm, O(T) in both cases: "chunk" uses matrix products, "recurrent" visits one
            token at a time. "auto" is "recurrent" for a single token.
        chunk_size: Tokens per chunk; used by the chunk form only. Precision decreases if it is
            many times the key width.

    Returns:
        The outputs ``[B, T, H, V]`` in the dtype of v, and the state: a `DeltaState` if causal,
        otherwise `DeltaStates`; None with cu_seqlens.

    Raises:
        ValueError: If shapes or devices do not match, a dtype is wrong, the form is unknown, the
            state is for the other value of `causal`, chunk_size is below 1, cu_seqlens is invalid
            or, on a CPU, an argument holds NaN or an infinity that causes NaN.

    >>> import torch
    >>> q = k = torch.ones(1, 3, 1, 1)
    >>> v = torch.tensor([8.0, 4.0, 2.0]).reshape(1, 3, 1, 1)
    >>> half = torch.full((1, 3, 1), 0.5)
    >>> delta_rule(q, k, v, half, causal=True)[0].flatten().tolist()  # half of the way to v
    [4.0, 4.0, 3.0]
    >>> delta_rule(q, k, v, half)[0].flatten().tolist()
    [5.25, 4.5, 3.0]
    """
    _check(q, k, v, beta, causal, keep, state, chunk_size)
    packing = None if cu_seqlens is None else packing_of(cu_seqlens, q, state=state)
    implementation = IMPLEMENTATIONS[choose(form, tokens=q.shape[1])]
    sides = unpack_states(state, DeltaState, causal=causal)
    incoming = [None if side is None else side.kv for side in sides[: 1 if causal else 2]]
    with disable_autocast(q):
        inputs = forms.Inputs(*to_accumulation_dtype(q, k, v, beta))
        if keep is not None:
            masked = ~keep[:, :, None]  # B T 1
            wide_q, wide_k, wide_v = (x.masked_fill(masked.unsqueeze(-1), 0) for x in inputs[:3])
            inputs = forms.Inputs(wide_q, wide_k, wide_v, inputs.beta.masked_fill(masked, 0))
        run = forms.causal if causal else forms.bidirectional
        starts = None if packing is None else packing.starts
        o, *outgoing = run(implementation, inputs, *incoming, chunk_size=chunk_size, starts=starts)
    if can_look_at_values(o):
        named = {"q": q, "k": k, "v": v, "beta": beta, **named_state_tensors(sides, causal=causal)}
        check_no_nan(nan_probe(o, *outgoing), **named)
    if packing is not None:
        return o.to(v.dtype), None
    states = [DeltaState(kv) for kv in outgoing]
    return o.to(v.dtype), states[0] if causal else DeltaStates(*states)


def choose(form: str, *, tokens: int) -> str:
    """Return the form that a call uses."""
    if form == "auto":
        form = "recurrent" if tokens == 1 else "chunk"
    check_choice("form", form, IMPLEMENTATIONS)
    return form


def _check(
    q: Any, k: Any, v: Any, beta: Any, causal: Any, keep: Any, state: Any, chunk_size: Any
) -> None:  # Any: the arguments are not checked yet
    check_sequence_options(causal=causal, keep=keep, chunk_size=chunk_size)
    carried = named_state_tensors(unpack_states(state, DeltaState, causal=causal), causal=causal)
    check_floating(q=q, k=k, v=v, beta=beta, **carried)
    check_devices(q=q, k=k, v=v, beta=beta, keep=keep, **carried)
    sizes = check_shapes(
        q=(q, "B T H K"),
        k=(k, "B T H K"),
        v=(v, "B T H V"),
        beta=(beta, "B T H"),
        keep=(keep, "B T"),
        **{name: (x, "B H K V") for name, x in carried.items()},
    )
    check_positive(**{letter: sizes[letter] for letter in "THKV"})
