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
from onescan.kernels.chips import WIDEST_HEAD, widest_causal_head
from onescan.ops.additive_decay import chunk, full, one_scan, recurrent
from onescan.ops.additive_decay.state import (
    AdditiveDecayState,
    canonical,
    check_state_type,
    merge_states,
    tensors_of,
)
from onescan.ops.backend import (
    Backend,
    chip_of,
    data_type,
    name_of,
    resolved_backend,
    wants_gradient,
)
from onescan.ops.numerics import full_precision, widened
from onescan.shapes import Angles, Keep, Keys, Queries, Values

__all__ = ["IMPLEMENTATIONS", "AdditiveDecayState", "additive_decay", "choose", "merge_states"]

Form = Literal["auto", "one_scan", "full", "chunk", "recurrent"]
Forward = Callable[..., tuple[Values, AdditiveDecayState]]


def _one_scan_kernels(*tensors: Any, **options: Any) -> tuple[Values, AdditiveDecayState]:
    from onescan.ops.additive_decay import launch  # Triton, which few calls need

    return launch.one_scan(*tensors, **options)


def _chunk_kernels(*tensors: Any, **options: Any) -> tuple[Values, AdditiveDecayState]:
    from onescan.ops.additive_decay import launch

    return launch.chunk(*tensors, **options)


def _recurrent_kernels(*tensors: Any, **options: Any) -> tuple[Values, AdditiveDecayState]:
    from onescan.ops.additive_decay import launch

    return launch.recurrent(*tensors, **options)


# (causal, form, backend): every implementation there is. A missing one is an error.
IMPLEMENTATIONS: dict[tuple[bool, str, str], Forward] = {
    (False, "one_scan", "torch"): one_scan.forward,
    (False, "full", "torch"): full.forward,
    (True, "chunk", "torch"): chunk.forward,
    (True, "full", "torch"): full.causal_forward,
    (True, "recurrent", "torch"): recurrent.forward,
    (False, "one_scan", "triton"): _one_scan_kernels,
    (True, "chunk", "triton"): _chunk_kernels,
    (True, "recurrent", "triton"): _recurrent_kernels,
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
        backend: "torch" runs anywhere; "triton" is kernels for a GPU, of "one_scan", "chunk"
            and, without gradients, "recurrent", for heads of up to 128 channels and types of up
            to 32 bits. Their gradients have none. "auto" is as `use_backend` says.
        chunk_size: tokens per chunk; read by the chunk form only, and by its kernels as the power
            of two below, 16 to 64.

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
    choice = choose(form, backend, q, k, v, angles, *(state or ()), causal=causal)
    run = _by_kernels if choice[2] == "triton" else _by_torch
    with full_precision(q):
        o, outgoing = run(IMPLEMENTATIONS[choice], q, k, v, angles, keep, state, chunk_size)
    if can_look_at_values(o):
        named = {"q": q, "k": k, "v": v, "angles": angles, **tensors_of("state", state)}
        check_no_nan(fingerprint(o, outgoing.kv), **named)
    return o.to(v.dtype), outgoing


def choose(
    form: Form, backend: Backend, q: Queries, k: Keys, v: Values, *others: Any, causal: bool
) -> tuple[bool, str, str]:
    """Name the implementation a call would run: the whole policy is these lines."""
    chosen: str = form
    if form == "auto":
        chosen = ("recurrent" if q.shape[1] == 1 else "chunk") if causal else "one_scan"
    has_kernel = (causal, chosen, "triton") in IMPLEMENTATIONS
    widest = WIDEST_HEAD
    if causal:
        widest = widest_causal_head(name_of(data_type(q, k, v)), chip_of(q.device))
    runs_on = resolved_backend(backend, has_kernel, q, k, v, widest=widest)
    is_step = form == "auto" and (chosen, runs_on) == ("recurrent", "triton")
    if is_step and wants_gradient(q, k, v, *others):
        chosen = "chunk"  # the other kernel has no gradients
    direction = "causal" if causal else "not causal"
    known = [f"{f}/{b}" for is_causal, f, b in IMPLEMENTATIONS if is_causal == causal]
    check_choice(f"form/backend ({direction})", f"{chosen}/{runs_on}", known)
    return causal, chosen, runs_on


def _by_torch(
    forward: Forward,
    q: Queries,
    k: Keys,
    v: Values,
    angles: Angles | None,
    keep: Keep | None,
    state: AdditiveDecayState | None,
    chunk_size: int,
) -> tuple[Values, AdditiveDecayState]:
    """A form that sums what it is given, in one wide type and without tokens to leave out."""
    q, k, v = widened(q, k, v)
    if keep is not None:
        k = k.masked_fill(~keep[:, :, None, None], -torch.inf)
        v = v.masked_fill(~keep[:, :, None, None], 0)
    incoming = None if state is None else canonical(state, v.dtype)
    o, outgoing = forward(q, k, v, angles, incoming, chunk_size=chunk_size)
    return o if keep is None else o.masked_fill(~keep[:, :, None, None], 0), outgoing


def _by_kernels(
    forward: Forward,
    q: Queries,
    k: Keys,
    v: Values,
    angles: Angles | None,
    keep: Keep | None,
    state: AdditiveDecayState | None,
    chunk_size: int,
) -> tuple[Values, AdditiveDecayState]:
    """A form that widens and leaves out tokens itself."""
    incoming = None if state is None else canonical(state, torch.float32)
    return forward(q, k, v, angles, incoming, keep=keep, chunk_size=chunk_size)


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
