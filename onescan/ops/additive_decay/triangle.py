"""The causal sum inside one stretch of tokens, safe for any logits.

    o_t = sum_{s <= t} <R(q_t), R(exp(k_s - z_t))> v_s

The exponent is at most 0, but it couples s and t per channel, so it must be split to become a
matrix product. No single reference r serves exp(k_s - r) exp(r - z_t): where logits climb by more
than 88 one factor overflows float32. Halving does it: for s in the left half and t in the right
half of a block, r = z at the last token of the left half lies between, so both exponents are at
most 0. The halves are halved again, down to LEAF tokens, which are summed pair by pair.
"""

import torch
from einops import rearrange
from torch import Tensor

from onescan.ops.additive_decay.state import share

LEAF = 4

Turn = tuple[Tensor, ...]  # cos, sin


def causal_sum(q: Tensor, k: Tensor, z: Tensor, v: Tensor, turn: Turn | None) -> Tensor:
    """Sum over the tokens up to t.

    Args:
        q: queries, [B, H, N, C, K]; N stretches of C tokens, C a power of two, at least LEAF.
        k: key logits in float64, [B, H, N, C, K].
        z: running log-normalizers in float64, at least every k up to their token, [B, H, N, C, K].
        v: values, [B, H, N, C, V].
        turn: (cos, sin) of the angles, each [H, N, C, K], or None.
    """
    tokens = k.shape[-2]
    o = _leaves(q, k, z, v, turn)  # B H N blocks LEAF V
    half = LEAF
    while half < tokens:
        (q_right,) = _halves(half, 1, q)
        k_left, v_left = _halves(half, 0, k, v)
        z_left, z_right = _halves(half, 0, z) + _halves(half, 1, z)
        middle = z_left[..., -1:, :]
        left = share(k_left, middle, q)
        right = q_right * share(middle, z_right, q)
        if turn is not None:
            left = rotated(left, _halves(half, 0, *turn))
            right = rotated(right, _halves(half, 1, *turn))
        crossing = (right @ left.mT) @ v_left
        o = rearrange(o, "b h n (block two) half v -> two b h n block half v", two=2)
        o = torch.cat([o[0], o[1] + crossing], dim=-2)
        half *= 2
    return o.squeeze(-3)


def rotated(x: Tensor, turn: Turn | None) -> Tensor:
    """[x cos, x sin], where turn is (cos, sin); x itself where it is None."""
    return x if turn is None else torch.cat([x * turn[0], x * turn[1]], dim=-1)


def _halves(half: int, side: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The left (0) or right (1) half of every block of 2 * half tokens."""
    return tuple(
        rearrange(x, "... (block two half) k -> two ... block half k", two=2, half=half)[side]
        for x in tensors
    )


def _leaves(q: Tensor, k: Tensor, z: Tensor, v: Tensor, turn: Turn | None) -> Tensor:
    q, k, z, v = (rearrange(x, "... (block t) k -> ... block t k", t=LEAF) for x in (q, k, z, v))
    exponent = (k.unsqueeze(-3) - z.unsqueeze(-2)).to(q.dtype)  # .. t s K
    later = torch.ones(LEAF, LEAF, dtype=torch.bool, device=q.device).triu(1)
    # masked before exp: exp of a later key can overflow, and 0 * inf is NaN
    weight = exponent.masked_fill(later.unsqueeze(-1), -torch.inf).exp()
    if turn is not None:
        cos, sin = (rearrange(x, "... (block t) k -> ... block t k", t=LEAF) for x in turn)
        # the cosine of the difference of two angles
        weight = weight * (
            cos.unsqueeze(-2) * cos.unsqueeze(-3) + sin.unsqueeze(-2) * sin.unsqueeze(-3)
        )
    scores = (weight @ q.unsqueeze(-1)).squeeze(-1)  # .. t s
    return scores @ v
