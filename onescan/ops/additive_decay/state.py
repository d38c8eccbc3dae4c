"""All that additive decay remembers of the tokens it has seen: a log-normalizer and a matrix.

log_normalizer = log sum_s exp(k_s)                     (K,)    per key channel
kv             = sum_s exp(k_s - log_normalizer) v_s^T  (F, V)  already divided by the normalizer
"""

from typing import NamedTuple

import torch
from torch import Tensor

from onescan.checks import check_shapes
from onescan.ops.numerics import LOG_ZERO, accumulation_dtype
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
        ValueError: the states' shapes differ.

    >>> import torch
    >>> one = AdditiveDecayState(torch.zeros(1, 1, 1), torch.full((1, 1, 1, 1), 2.0))
    >>> two = AdditiveDecayState(torch.zeros(1, 1, 1), torch.full((1, 1, 1, 1), 4.0))
    >>> merge_states(one, two).kv.item()
    3.0
    """
    check_shapes(
        **{"a.log_normalizer": (a.log_normalizer, "B H K"), "a.kv": (a.kv, "B H F V")},
        **{"b.log_normalizer": (b.log_normalizer, "B H K"), "b.kv": (b.kv, "B H F V")},
    )
    dtype = torch.promote_types(accumulation_dtype(a.kv.dtype), b.kv.dtype)
    return merged(canonical(a, dtype), canonical(b, dtype))


def merged(a: AdditiveDecayState, b: AdditiveDecayState) -> AdditiveDecayState:
    """`merge_states` of two canonical states, unchecked."""
    z = torch.logaddexp(a.log_normalizer, b.log_normalizer)
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


def per_feature(weight: Tensor, kv: Tensor) -> Tensor:
    """A weight per key channel, [.., K], made to scale kv, [.., F, V]: both halves share it."""
    halves = kv.shape[-2] // weight.shape[-1]
    return (weight if halves == 1 else torch.cat([weight, weight], dim=-1)).unsqueeze(-1)
