"""Additive decay, LightNet's attention: the front door, and nothing else.

z_t  = log sum_{s <= t} exp(k_s)                                      normalizer (K,)
KV_t = sum_{s <= t} R_s(exp(k_s - z_t)) v_s^T                         state      (F, V)
o_t  = KV_t^T R_t(q_t)        causal; KV_T where it is not            output     (V,)

with R_t(x) = [x cos(a_t), x sin(a_t)] and F = 2K under LRPE, R_t(x) = x and F = K without.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch

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
from onescan.ops.additive_decay import chunk, full, one_scan, recurrent
from onescan.ops.additive_decay.state import (
    AdditiveDecayState,
    canonical,
    check_state_type,
    merge_states,
    tensors_of,
)
from onescan.ops.numerics import full_precision, widened
from onescan.shapes import Angles, Keep, Keys, Queries, Values

__all__ = ["IMPLEMENTATIONS", "AdditiveDecayState", "additive_decay", "choose", "merge_states"]

Form = Literal["auto", "one_scan", "full", "chunk", "recurrent"]
Backend = Literal["auto", "torch", "triton"]
Forward = Callable[..., tuple[Values, AdditiveDecayState]]

# (causal, form, backend): every implementation there is. A missing one is an error.
IMPLEMENTATIONS: dict[tuple[bool, str, str], Forward] = {
    (False, "one_scan", "torch"): one_scan.forward,
    (False, "full", "torch"): full.forward,
    (True, "chunk", "torch"): chunk.forward,
    (True, "full", "torch"): full.causal_forward,
    (True, "recurrent", "torch"): recurrent.forward,
}


def additive_decay(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    angles: Angles | None = None,
    causal: bool = False,
    keep: Keep | None = None,
    state: AdditiveDecayState | None = None,
    form: Form = "auto",
    backend: Backend = "auto",
    chunk_size: int = 64,
) -> tuple[Values, AdditiveDecayState]:
    """Attend to the mean of all values, weighted per channel by the exponentials of the keys.

    Source: LightNet, arXiv:2405.21022, Eq. 13 (causal), Eq. 14 (not causal); LRPE inside as in
    App. A.2: the decay comes from the keys before rotation and is shared by both halves.

    Args:
        q: queries, already through their feature map (SiLU in the paper).
        k: key logits, raw; -inf gives a token no weight.
        v: values.
        angles: LRPE's angles, from `lrpe_angles`; None leaves position out.
        causal: whether a token reads only itself and those before it.
        keep: True for real tokens. The others give zero output, and the real ones come out as if
            they were not there. None keeps all.
        state: what came before (causal), or the tokens that live elsewhere (not causal: another
            device's part of the sequence, the context of cross-attention). None is nothing.
        form: how the same sum is evaluated. Not causal: "one_scan" is O(T), "full" O(T^2).
            Causal: "chunk" is O(T), "full" O(T^2), "recurrent" one token at a time.
        backend: "torch" runs anywhere.
        chunk_size: tokens per chunk; read by the chunk form only.

    Returns:
        The outputs, in v's dtype, and the state of all tokens, the incoming state's included.

    Raises:
        ValueError: shapes, types or devices disagree, there is no such form or backend,
            chunk_size < 1, or, on a CPU, an argument holds NaN, or a +inf that becomes one.

    >>> q = k = torch.zeros(1, 3, 1, 1)
    >>> v = torch.tensor([3.0, 5.0, 10.0]).reshape(1, 3, 1, 1)
    >>> additive_decay(q + 1, k, v)[0].flatten().tolist()  # equal keys: the mean
    [6.0, 6.0, 6.0]
    >>> additive_decay(q + 1, k, v, causal=True)[0].flatten().round(decimals=3).tolist()  # so far
    [3.0, 4.0, 6.0]
    """
    _check(q, k, v, angles, causal, keep, state, chunk_size)
    implementation = IMPLEMENTATIONS[choose(form, backend, causal=causal, tokens=q.shape[1])]
    with full_precision(q):
        wide_q, wide_k, wide_v = widened(q, k, v)
        if keep is not None:
            wide_k = wide_k.masked_fill(~keep[:, :, None, None], -torch.inf)
            wide_v = wide_v.masked_fill(~keep[:, :, None, None], 0)
        incoming = None if state is None else canonical(state, wide_v.dtype)
        o, outgoing = implementation(
            wide_q, wide_k, wide_v, angles, incoming, chunk_size=chunk_size
        )
        if keep is not None:
            o = o.masked_fill(~keep[:, :, None, None], 0)
    if can_look_at_values(o):
        named = {"q": q, "k": k, "v": v, "angles": angles, **tensors_of("state", state)}
        check_no_nan(fingerprint(o, outgoing.kv), **named)
    return o.to(v.dtype), outgoing


def choose(form: Form, backend: Backend, *, causal: bool, tokens: int) -> tuple[bool, str, str]:
    """Name the implementation a call would run: the whole policy is these lines."""
    if form == "auto":
        form = ("recurrent" if tokens == 1 else "chunk") if causal else "one_scan"
    if backend == "auto":
        backend = "torch"
    direction = "causal" if causal else "not causal"
    known = [f"{f}/{b}" for is_causal, f, b in IMPLEMENTATIONS if is_causal == causal]
    check_choice(f"form/backend ({direction})", f"{form}/{backend}", known)
    return causal, form, backend


def _check(
    q: Any, k: Any, v: Any, angles: Any, causal: Any, keep: Any, state: Any, chunk_size: Any
) -> None:  # Any: these are what a user passed
    check_sequence_options(causal=causal, keep=keep, chunk_size=chunk_size)
    if state is not None:
        check_state_type("state", state)
    carried = tensors_of("state", state)
    given = {} if angles is None else {"angles": angles}
    check_floating(q=q, k=k, v=v, **given, **carried)
    check_devices(q=q, k=k, v=v, keep=keep, **given, **carried)
    features = k.shape[-1] * (1 if angles is None else 2)
    patterns = {"log_normalizer": "B H K", "kv": f"B H {features} V"}
    sizes = check_shapes(
        q=(q, "B T H K"),
        k=(k, "B T H K"),
        v=(v, "B T H V"),
        angles=(angles, "T H K"),
        keep=(keep, "B T"),
        **{name: (x, patterns[name.removeprefix("state.")]) for name, x in carried.items()},
    )
    check_positive(**{letter: sizes[letter] for letter in "THKV"})
