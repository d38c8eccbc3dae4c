"""The delta rule (DeltaNet), causal or in both directions: the front door, and nothing else.

S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T      state, and its mirror image   (K, V)
o_t = S_t^T q_t             causal                                                output   (V,)
o_t = (S_t + S'_t - beta_t k_t v_t^T)^T q_t      not causal, S' from the last token to the first
"""

from typing import Any, Literal

from onescan.checks import (
    can_look_at_values,
    check_choice,
    check_devices,
    check_floating,
    check_no_nan,
    check_positive,
    check_sequence_options,
    check_shapes,
    fingerprint,
)
from onescan.ops.delta_rule import chunk, recurrent
from onescan.ops.delta_rule.directions import Forward, from_both_ends, from_left
from onescan.ops.delta_rule.state import (
    DeltaState,
    DeltaStates,
    Sides,
)
from onescan.ops.numerics import full_precision, widened
from onescan.ops.sides import sides_of, tensors_of
from onescan.shapes import Betas, Keep, Keys, Queries, Values

__all__ = ["IMPLEMENTATIONS", "DeltaState", "DeltaStates", "choose", "delta_rule"]

Form = Literal["auto", "chunk", "recurrent"]

# Every form there is, from the first token to the last.
IMPLEMENTATIONS: dict[str, Forward] = {
    "chunk": chunk.forward,
    "recurrent": recurrent.forward,
}


def delta_rule(
    q: Queries,
    k: Keys,
    v: Values,
    beta: Betas,
    *,
    causal: bool = False,
    keep: Keep | None = None,
    state: DeltaState | Sides | None = None,
    form: Form = "auto",
    chunk_size: int = 64,
) -> tuple[Values, DeltaState | DeltaStates]:
    """Attend to a memory in which each token overwrites what was stored under its key.

    Source: LION, arXiv:2502.16249, Table 1 and App. B.7. Each direction leaves out half of the
    token's own part; the paper's half, q k v / 2, lacks beta.

    Args:
        q: queries, already through their feature map.
        k: keys, likewise; of length 1 where a token should move the memory by beta of what is
            missing.
        v: values.
        beta: how much of what is stored under a key its value replaces, any finite number: 0
            writes nothing, 1 replaces all.
        causal: whether a token reads only itself and those before it.
        keep: True for real tokens. The others give zero output, and the real ones come out as if
            they were not there. None keeps all.
        state: causal, what came before; else a pair of the states that enter from the left and
            from the right, either of which may be None.
        form: how the same memory is evaluated, both O(T): "chunk" in matrix products,
            "recurrent" one token at a time.
        chunk_size: tokens per chunk; read by the chunk form only. Many times the width of a key
            costs digits.

    Returns:
        The outputs, in v's dtype, and the state after the last token; not causal, that and the
        backward one, before the first.

    Raises:
        ValueError: shapes, types or devices disagree, there is no such form, a state of the other
            direction, chunk_size < 1, or, on a CPU, an argument holds NaN, or an infinity that
            becomes one.

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
    implementation = IMPLEMENTATIONS[choose(form, tokens=q.shape[1])]
    sides = sides_of(state, DeltaState, causal=causal)
    with full_precision(q):
        wide_q, wide_k, wide_v, wide_beta = widened(q, k, v, beta)
        if keep is not None:
            gone = ~keep.unsqueeze(-1)  # B T 1
            wide_q, wide_k, wide_v = (
                x.masked_fill(gone.unsqueeze(-1), 0) for x in (wide_q, wide_k, wide_v)
            )
            wide_beta = wide_beta.masked_fill(gone, 0)
        o, outgoing = (from_left if causal else from_both_ends)(
            implementation,
            wide_q,
            wide_k,
            wide_v,
            wide_beta,
            sides,
            chunk_size=chunk_size,
        )
    if can_look_at_values(o):
        left = tensors_of(sides_of(outgoing, DeltaState, causal=causal), causal=causal)
        named = {"q": q, "k": k, "v": v, "beta": beta, **tensors_of(sides, causal=causal)}
        check_no_nan(fingerprint(o, *left.values()), **named)
    return o.to(v.dtype), outgoing


def choose(form: str, *, tokens: int) -> str:
    """Name the implementation a call would run: the whole policy is these lines."""
    if form == "auto":
        form = "recurrent" if tokens == 1 else "chunk"
    check_choice("form", form, IMPLEMENTATIONS)
    return form


def _check(
    q: Any, k: Any, v: Any, beta: Any, causal: Any, keep: Any, state: Any, chunk_size: Any
) -> None:  # Any: these are what a user passed
    check_sequence_options(causal=causal, keep=keep, chunk_size=chunk_size)
    carried = tensors_of(sides_of(state, DeltaState, causal=causal), causal=causal)
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
