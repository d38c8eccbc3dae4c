"""Decayed attention one token at a time, from state to state, for decoding.

    S = exp(a_t) S + k_t v_t^T        o_t = S^T q_t, divided by its row sum

A program holds all keys of a head and some of its values. Decay is a head's, or a key channel's.

Source: LION, arXiv:2502.16249, Eq. 5.
"""

from collections.abc import Iterator
from typing import Any

import triton.language as tl

from onescan.kernels.common import Blocks, Build, jit, power_of_two
from onescan.kernels.decay_scalar import BUILT, share_of


def blocks_of(key_width: int, value_width: int) -> Blocks:
    """Few values, as one token has few programs, and a state that stays in registers."""
    keys = power_of_two(key_width)
    return Blocks(1, keys, min(power_of_two(value_width), max(16, 2048 // keys)), warps=4, stages=1)


def constants_of(
    heads: int, key_width: int, value_width: int, *, diagonal: bool, keep: bool
) -> dict[str, Any]:
    """What `step` is compiled for; it wants ENTERS and NORMALIZER too."""
    blocks = blocks_of(key_width, value_width)
    return {
        "H": heads,
        "K": key_width,
        "V": value_width,
        "DIAGONAL": diagonal,
        "KEEP": keep,
        "BLOCK_K": blocks.keys,
        "BLOCK_V": blocks.values,
    }


def builds(data: str, chip: str) -> Iterator[Build]:
    """What `make check-kernels` compiles."""
    types = "data data data fp32 i1 fp32 fp32 data fp32 fp32 i32"
    for widths in BUILT:
        for diagonal in (False, True):
            constants = constants_of(8, *widths, diagonal=diagonal, keep=diagonal)
            name = "{} {}".format(*widths) + (" diagonal" if diagonal else "")
            given = {**constants, "ENTERS": True, "NORMALIZER": int(diagonal)}
            yield Build(name, step, types, given, blocks_of(*widths))


@jit
def step(
    q, k, v, decays, keep, enter, enter_sum,
    o, last, last_sum,
    tokens,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    DIAGONAL: tl.constexpr, ENTERS: tl.constexpr, NORMALIZER: tl.constexpr, KEEP: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Outputs of all tokens, and the state and the sum of keys after the last."""
    program = tl.program_id(0)
    head, sample, line = program % H, (program // H).to(tl.int64), program.to(tl.int64)
    start = tl.program_id(1) * BLOCK_V
    c = tl.arange(0, BLOCK_K)
    e = start + tl.arange(0, BLOCK_V)
    inside = (c < K)[:, None] & (e < V)[None, :]
    place = line * (K * V) + c[:, None] * V + e[None, :]
    kv = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    z = tl.zeros([BLOCK_K], tl.float32)
    if ENTERS:
        kv += tl.load(enter + place, mask=inside, other=0)
        z += tl.load(enter_sum + line * K + c, mask=c < K, other=0)
    for t in range(tokens):
        row = (sample * tokens + t) * H + head
        keys_there, values_there = c < K, e < V
        if KEEP:
            known = tl.load(keep + sample * tokens + t) != 0
            keys_there &= known
            values_there &= known
        query = tl.load(q + row * K + c, mask=keys_there, other=0).to(tl.float32)
        key = tl.load(k + row * K + c, mask=keys_there, other=0).to(tl.float32)
        value = tl.load(v + row * V + e, mask=values_there, other=0).to(tl.float32)
        if DIAGONAL:
            decay = tl.exp(tl.load(decays + row * K + c, mask=c < K, other=0))
            kv *= decay[:, None]
        else:
            decay = tl.exp(tl.load(decays + row))
            kv *= decay
        z = z * decay + key
        kv += key[:, None] * value[None, :]
        output = tl.sum(kv * query[:, None], 0)
        if NORMALIZER:
            factor, _ = share_of(tl.sum(z * query, 0), NORMALIZER)
            output *= factor
        tl.store(o + row * V + e, output, mask=e < V)
    tl.store(last + place, kv, mask=inside)
    tl.store(last_sum + line * K + c, z, mask=(c < K) & (start == 0))
