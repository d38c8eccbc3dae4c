"""All that additive decay remembers of the tokens it has seen: a log-normalizer and a matrix.

log_normalizer = log sum_s exp(k_s)                     (K,)    per key channel
kv             = sum_s exp(k_s - log_normalizer) v_s^T  (F, V)  already divided by the normalizer
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onescan.checks import check_devices, check_floating, check_no_nan, check_shapes
from onescan.ops.numerics import LOG_ZERO, accumulation_dtype, logaddexp
from onescan.shapes import KeyValue, LogNormalizer


class AdditiveDecayState(NamedTuple):
    """The weighted mean of all values seen, per key channel, and the logarithm of the weights' sum.

    Attributes:
        log_normalizer: log of the sum of exp(k) over tokens, float64: next to a logit of 1e4
            float32 has steps of 1e-3. No tokens at all is -inf or `LOG_ZERO`.
        kv: the mean of v weighted by exp(k), [B, H, K, V], or [B, H, 2K, V] under LRPE (cosine
            half, then sine half); float32, or float64 for float64 inputs.
    """

    log_normalizer: LogNormalizer
    kv: KeyValue


def merge_states(a: AdditiveDecayState, b: AdditiveDecayState) -> AdditiveDecayState:
    """The state of both sets of tokens together, in whatever order and place they were seen.

    The merge is associative and commutative, so a sequence split over devices costs one small
    all-reduce.

    Raises:
        ValueError: the states' shapes differ, or, on a CPU, one holds NaN.

    >>> import torch
    >>> one = AdditiveDecayState(torch.zeros(1, 1, 1), torch.full((1, 1, 1, 1), 2.0))
    >>> two = AdditiveDecayState(torch.zeros(1, 1, 1), torch.full((1, 1, 1, 1), 4.0))
    >>> merge_states(one, two).kv.item()
    3.0
    """
    for name, state in (("a", a), ("b", b)):
        check_state_type(name, state)
    named = {**tensors_of("a", a), **tensors_of("b", b)}
    check_floating(**named)
    check_devices(**named)
    sizes = check_shapes(
        **{name: (x, "B H F V" if name.endswith("kv") else "B H K") for name, x in named.items()}
    )
    if sizes["F"] not in (sizes["K"], 2 * sizes["K"]):
        raise ValueError(f"F is {sizes['F']}, expected K={sizes['K']} or 2K, of keys under LRPE")
    dtype = torch.promote_types(accumulation_dtype(a.kv.dtype), b.kv.dtype)
    together = merged(canonical(a, dtype), canonical(b, dtype))
    check_no_nan(together.kv.detach().sum(), **named)
    return together


def check_state_type(name: str, state: Any) -> None:
    """Raise ValueError for what is no state: a plain tuple has no names to check."""
    if not isinstance(state, AdditiveDecayState):
        raise ValueError(f"{name} is a {type(state).__name__}, expected an AdditiveDecayState")


def tensors_of(name: str, state: AdditiveDecayState | None) -> dict[str, Tensor]:
    """A state's tensors by the names that messages give them: state.kv."""
    return {} if state is None else {f"{name}.{part}": x for part, x in state._asdict().items()}


def merged(a: AdditiveDecayState, b: AdditiveDecayState) -> AdditiveDecayState:
    """`merge_states` of two canonical states, unchecked."""
    z = logaddexp(a.log_normalizer, b.log_normalizer)
    return AdditiveDecayState(
        z,
        a.kv * per_feature(share(a.log_normalizer, z, a.kv), a.kv)
        + b.kv * per_feature(share(b.log_normalizer, z, b.kv), b.kv),
    )


def canonical(state: AdditiveDecayState, dtype: torch.dtype) -> AdditiveDecayState:
    """The state with a float64, finite log-normalizer and a kv of this dtype."""
    return AdditiveDecayState(state.log_normalizer.double().clamp(min=LOG_ZERO), state.kv.to(dtype))


def share(part: Tensor, whole: Tensor, like: Tensor) -> Tensor:
    """exp(part - whole): which share of the whole sum the part holds, in `like`'s dtype."""
    return (part - whole).to(like.dtype).exp()


def per_key(x: Tensor, k: Tensor) -> Tensor:
    """Sums over values and over both halves, [B, H, F, V] to [B, H, K], for keys k [.., K]."""
    return x.sum(-1).unflatten(-1, (-1, k.shape[-1])).sum(-2)


def per_feature(weight: Tensor, kv: Tensor) -> Tensor:
    """A weight per key channel, [.., K], made to scale kv, [.., F, V]: both halves share it."""
    halves = kv.shape[-2] // weight.shape[-1]
    return (weight if halves == 1 else torch.cat([weight, weight], dim=-1)).unsqueeze(-1)
