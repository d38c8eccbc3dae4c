"""State of additive decay: a log-normalizer and a matrix that summarize any number of tokens.

log_normalizer = log sum_s exp(k_s)                     (K,)    per key channel
kv             = sum_s exp(k_s - log_normalizer) v_s^T  (F, V)  already divided by the normalizer
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onescan.checks import check_devices, check_floating, check_no_nan, check_shapes
from onescan.messages import named_type
from onescan.ops.numerics import LOG_ZERO, accumulation_dtype, logaddexp
from onescan.ops.packing import Packing
from onescan.ops.parallel import SequenceGroup
from onescan.shapes import Angles, Keep, Keys, KeyValue, LogNormalizer, Queries, Values
from onescan.shapes import Angles as Table  # of cosines or sines


class AdditiveDecayState(NamedTuple):
    """Weighted mean of all values seen, per key channel, and the log of the sum of the weights.

    Attributes:
        log_normalizer: Log of the sum of exp(k) over tokens, in float64, because float32 has a
            spacing of 1e-3 near a logit of 1e4. -inf or `LOG_ZERO` if there were no tokens.
        kv: Mean of v weighted by exp(k), [B, H, K, V], or [B, H, 2K, V] with LRPE (cosine half,
            then sine half). float32, or float64 for float64 inputs.
    """

    log_normalizer: LogNormalizer
    kv: KeyValue


class AdditiveInputs(NamedTuple):
    """Validated inputs of every form; see `additive_decay` for the fields.

    Blocks are of one size, or have `bounds`, the begin and end of the block of each token. Forms in
    plain torch receive them in one dtype, with `keep` and the leak already applied. Only
    bidirectional calls read `ranks`; others receive the state of earlier ranks, and the `table` of
    cosines and sines, [T, H, 2, K], if it was computed for that state.
    """

    q: Queries
    k: Keys
    v: Values
    angles: Angles | None
    state: AdditiveDecayState | None
    keep: Keep | None
    chunk_size: int
    causal_block: int | None = None
    bounds: tuple[Tensor, Tensor] | None = None
    packing: Packing | None = None
    ranks: SequenceGroup | None = None
    table: Tensor | None = None


def merge_states(a: AdditiveDecayState, b: AdditiveDecayState) -> AdditiveDecayState:
    """Merge two states into the state of all their tokens.

    The merge is associative and commutative, so a sequence that is split over devices needs one
    small all-reduce. States of calls with a leak cannot be merged, because the earlier one decays
    with the number of later tokens. This is not checked: pass the earlier one as `state` instead.

    Raises:
        ValueError: If the shapes of the states differ, or, on a CPU, if one contains NaN.

    >>> import torch
    >>> one = AdditiveDecayState(torch.zeros(1, 1, 1), torch.full((1, 1, 1, 1), 2.0))
    >>> two = AdditiveDecayState(torch.zeros(1, 1, 1), torch.full((1, 1, 1, 1), 4.0))
    >>> merge_states(one, two).kv.item()
    3.0
    """
    for name, state in (("a", a), ("b", b)):
        check_state_type(name, state)
    tensors = {
        f"{name}.{part}": x
        for name, state in (("a", a), ("b", b))
        for part, x in state._asdict().items()
    }
    check_floating(**tensors)
    check_devices(**tensors)
    sizes = check_shapes(
        **{name: (x, "B H F V" if name.endswith("kv") else "B H K") for name, x in tensors.items()}
    )
    if sizes["F"] not in (sizes["K"], 2 * sizes["K"]):
        raise ValueError(
            f"a.kv has {sizes['F']} features, expected {sizes['K']}, or {2 * sizes['K']} with LRPE"
        )
    dtype = torch.promote_types(accumulation_dtype(a.kv.dtype), b.kv.dtype)
    result = merged(canonical(a, dtype), canonical(b, dtype))
    check_no_nan(result.kv, **tensors)
    return result


def check_state_type(name: str, state: Any) -> None:
    """Raise ValueError if this is not a state. Plain tuples are rejected, as they have no names."""
    if not isinstance(state, AdditiveDecayState):
        raise ValueError(f"{name} is {named_type(state)}, expected an AdditiveDecayState")


def merged(a: AdditiveDecayState, b: AdditiveDecayState) -> AdditiveDecayState:
    """Merge two canonical states, without checks."""
    z = logaddexp(a.log_normalizer, b.log_normalizer)
    return AdditiveDecayState(
        z,
        a.kv * per_feature(share(a.log_normalizer, z, a.kv), a.kv)
        + b.kv * per_feature(share(b.log_normalizer, z, b.kv), b.kv),
    )


def canonical(state: AdditiveDecayState, dtype: torch.dtype) -> AdditiveDecayState:
    """Return the state with a finite float64 log-normalizer and kv in this dtype."""
    return AdditiveDecayState(state.log_normalizer.double().clamp(min=LOG_ZERO), state.kv.to(dtype))


def empty_state(k: Keys, v: Values, angles: Angles | None) -> AdditiveDecayState:
    """Return the canonical state of no tokens."""
    batch, _, heads, width = k.shape
    features = width if angles is None else 2 * width
    z = k.new_full((batch, heads, width), LOG_ZERO, dtype=torch.float64)
    return AdditiveDecayState(z, v.new_zeros(batch, heads, features, v.shape[-1]))


def share(part: Tensor, whole: Tensor, like: Tensor) -> Tensor:
    """Return exp(part - whole), the fraction of the whole sum, in the dtype of `like`."""
    return (part - whole).to(like.dtype).exp()


def per_key(x: Tensor, k: Tensor) -> Tensor:
    """Sum over values and over both halves: [B, H, F, V] to [B, H, K], for keys k [.., K]."""
    return x.sum(-1).unflatten(-1, (-1, k.shape[-1])).sum(-2)


def per_feature(weight: Tensor, kv: Tensor) -> Tensor:
    """Repeat a weight per key channel, [.., K], for both halves of kv, [.., F, V]: [.., F, 1]."""
    halves = kv.shape[-2] // weight.shape[-1]
    return (weight if halves == 1 else torch.cat([weight, weight], dim=-1)).unsqueeze(-1)


def write(
    k: Keys, v: Values, cos: Table | None, sin: Table | None
) -> tuple[LogNormalizer, KeyValue]:
    """Return the log-normalizer and kv of tokens, from the empty state."""
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # B H T K, because products are by head
    # The result does not depend on the maximum, so no gradient flows through it.
    peak = k.detach().amax(dim=2).clamp(min=LOG_ZERO).to(accumulation_dtype(k.dtype))  # B H K
    weight = (k - peak.unsqueeze(2)).exp_()
    total = weight.sum(dim=2)  # B H K
    total = torch.where(total > 0, total, 1)  # if all logits are -inf, the mean is 0
    kv = (_rotated(weight.to(v.dtype), cos, sin).mT @ v).to(total.dtype)  # B H F V
    return peak.double() + total.double().log(), kv / per_feature(total, kv)


def read(q: Queries, kv: KeyValue, cos: Table | None, sin: Table | None) -> Values:
    """Return what queries read from a state, kv^T R(q)."""
    return (_rotated(q.transpose(1, 2), cos, sin) @ kv.to(q.dtype)).transpose(1, 2)


def _rotated(x: Tensor, cos: Table | None, sin: Table | None) -> Tensor:
    """Return R(x) of x [B, H, T, K], contiguous with LRPE, as products need it.

    `lrpe.rotate` takes fewer kernels, but its result is not contiguous, and a copy costs more.
    """
    if cos is None or sin is None:
        return x
    return torch.cat([x * cos.transpose(0, 1), x * sin.transpose(0, 1)], dim=-1)
