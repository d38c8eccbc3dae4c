"""Causal additive decay, a few tokens one after the other: what decoding takes, forward only.

    z_t  = log(exp(z_{t-1}) + exp(k_t))
    KV_t = exp(z_{t-1} - z_t) KV_{t-1} + R_t(exp(k_t - z_t)) v_t^T,   o_t = KV_t^T R_t(q_t)

A program has some values of one head of one sample, and its state in registers from the first
token to the last. z is float64: next to a logit of 1e4 float32 has steps of 1e-3.

Source: LightNet, arXiv:2405.21022, Eq. 13 and App. A.2.
"""

from collections.abc import Iterator
from typing import Any

import triton.language as tl

from onescan.kernels.common import LOG_ZERO, Blocks, Build, jit, power_of_two
from onescan.kernels.lrpe import cosine_and_sine

NARROW = 64  # key channels


def blocks_of(key_width: int) -> Blocks:
    """All keys of a head by few of its values, so that one sample keeps many programs busy."""
    return Blocks(1, power_of_two(key_width), 32 if key_width <= NARROW else 16, warps=4, stages=1)


def constants_of(
    heads: int, key_width: int, value_width: int, *, lrpe: bool, keep: bool, state: bool
) -> dict[str, Any]:
    """What the kernel is compiled for."""
    blocks = blocks_of(key_width)
    return {
        "H": heads,
        "K": key_width,
        "V": value_width,
        "LRPE": lrpe,
        "KEEP": keep,
        "STATE": state,
        "BLOCK_K": blocks.keys,
        "BLOCK_V": blocks.values,
    }


def builds(data: str, chip: str) -> Iterator[Build]:
    """What `make check-kernels` compiles."""
    kinds = ((64, True, False), (128, True, True), (128, False, False), (256, True, False))
    for width, lrpe, keep in kinds:
        constants = constants_of(8, width, width, lrpe=lrpe, keep=keep, state=True)
        name = f"{width}{' lrpe' if lrpe else ''}{' keep' if keep else ''}"
        types = "data data data fp32 i1 fp64 fp32 data fp64 fp32 i32"
        yield Build(name, step, types, constants, blocks_of(width))


@jit
def step(
    q, k, v, angles, keep, z_in, kv_in,
    o, z_out, kv_out,
    tokens,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LRPE: tl.constexpr, KEEP: tl.constexpr, STATE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Outputs, and the state after the last token: z [B, H, K], kv [B, H, F, V]."""
    program = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head_of_all, first = program // blocks, program % blocks * BLOCK_V
    sample, head = head_of_all // H, head_of_all % H
    c, e = tl.arange(0, BLOCK_K), first + tl.arange(0, BLOCK_V)
    here, there = c < K, e < V
    inside = here[:, None] & there[None, :]
    half: tl.constexpr = K * V
    place = head_of_all * (half * (2 if LRPE else 1)) + c[:, None] * V + e[None, :]
    z = tl.full([BLOCK_K], LOG_ZERO, tl.float64)
    straight = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)  # of cosines, where there is LRPE
    across = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)  # of sines
    if STATE:
        z = tl.load(z_in + head_of_all * K + c, mask=here, other=0)
        straight = tl.load(kv_in + place, mask=inside, other=0)
        if LRPE:
            across = tl.load(kv_in + half + place, mask=inside, other=0)
    for t in range(tokens):
        row = (sample * tokens + t) * H + head
        live = True
        if KEEP:
            live = tl.load(keep + sample * tokens + t) != 0
        queries = tl.load(q + row * K + c, mask=here & live, other=0).to(tl.float32)
        logits = tl.load(k + row * K + c, mask=here & live, other=float("-inf")).to(tl.float64)
        values = tl.load(v + row * V + e, mask=there & live, other=0).to(tl.float32)
        weighs = logits != float("-inf")  # NaN weighs, and is seen
        logits = tl.where(logits < LOG_ZERO, LOG_ZERO, logits)
        highest = tl.where(z < logits, logits, z)
        together = highest + tl.log(tl.exp(z - highest) + tl.exp(logits - highest))
        kept = tl.exp((z - together).to(tl.float32))
        w = tl.where(weighs, tl.exp((logits - together).to(tl.float32)), 0.0)
        z = tl.where(weighs, together, z)
        kept = tl.where(weighs, kept, 1.0)
        if LRPE:
            turn = (t * H + head) * K + c
            cos, sin = cosine_and_sine(tl.load(angles + turn, mask=here, other=0))
            across = across * kept[:, None] + (w * sin)[:, None] * values[None, :]
            out = tl.sum((queries * sin)[:, None] * across, 0)
            w, queries = w * cos, queries * cos
        straight = straight * kept[:, None] + w[:, None] * values[None, :]
        result = tl.sum(queries[:, None] * straight, 0)
        if LRPE:
            result += out
        tl.store(o + row * V + e, result, mask=there)
    tl.store(kv_out + place, straight, mask=inside)
    if LRPE:
        tl.store(kv_out + half + place, across, mask=inside)
    if first == 0:
        tl.store(z_out + head_of_all * K + c, z, mask=here)
