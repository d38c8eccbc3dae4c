"""Causal additive decay token by token, for decoding: forward only.

    z_t  = log(exp(z_{t-1}) + exp(k_t))
    KV_t = exp(z_{t-1} - z_t) KV_{t-1} + R_t(exp(k_t - z_t)) v_t^T,   o_t = KV_t^T R_t(f(q_t))

q, k and v are read where a projection wrote them, among other channels of the same token. f is a
feature map. The angles of R_t are given, or (position + t) theta.

Each program processes a block of values of one head of one sample, and keeps its state in registers
from the first token to the last. z is float64, because float32 has a spacing of 1e-3 near 1e4.

Source: LightNet, arXiv:2405.21022, Eq. 13 and App. A.2.
"""

import triton.language as tl

from onescan.kernels.common import (
    LOG_ZERO,
    Blocks,
    Case,
    Example,
    kernel,
    load_halves,
    power_of_two,
    store_halves,
)
from onescan.kernels.feature_maps import features
from onescan.kernels.lrpe import cosine_and_sine

EXAMPLES = (
    Example(64, 64, lrpe=True, flags={"HAS_KV_IN": True, "HAS_THETA": True, "MAP": 1}),
    Example(
        *(128, 128, True),
        flags={"HAS_KV_IN": True, "HAS_THETA": True, "HAS_START": True, "HAS_KEEP": True, "MAP": 1},
    ),
    Example(128, 128, flags={"HAS_KV_IN": True}),
    Example(256, 256, lrpe=True, flags={"HAS_KV_IN": True}),
)


def step_blocks(case: Case) -> Blocks:
    """Return blocks of all keys and few values, so that a single sample has many programs."""
    values = 32 if case.key_width <= 64 else 16
    return Blocks(1, power_of_two(case.key_width), values, warps=4, stages=1)


@kernel(step_blocks)
def step(
    q, k, v, angles, theta, start, keep, z_in, kv_in,
    o, z, kv,
    tokens, position, q_stride, k_stride, v_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LRPE: tl.constexpr, MAP: tl.constexpr,
    HAS_THETA: tl.constexpr, HAS_START: tl.constexpr,
    HAS_KEEP: tl.constexpr, HAS_KV_IN: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute outputs and the state after the last token: z [B, H, K], kv [B, H, F, V].

    q_stride, k_stride and v_stride are the distances between tokens. `start` points to an offset
    that is added to `position`.
    """
    program = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head_of_all, first = program // blocks, program % blocks * BLOCK_V
    sample, head = head_of_all // H, head_of_all % H
    c, e = tl.arange(0, BLOCK_K), first + tl.arange(0, BLOCK_V)
    key_mask, value_mask = c < K, e < V
    width: tl.constexpr = K * V * (2 if LRPE else 1)
    log_z = tl.full([BLOCK_K], LOG_ZERO, tl.float64)
    cos_half = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)  # kv for cosines; the only one without LRPE
    sin_half = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)  # kv for sines
    if HAS_KV_IN:
        log_z = tl.load(z_in + head_of_all * K + c, mask=key_mask, other=0)
        log_z = tl.where(log_z < LOG_ZERO, LOG_ZERO, log_z)
        cos_half, sin_half = load_halves(kv_in + head_of_all * width, c, e, K, V, LRPE)
    if HAS_THETA:
        radians = tl.load(theta + head * K + c, mask=key_mask, other=0).to(tl.float64)
        if HAS_START:
            position += tl.load(start)
    for t in range(tokens):
        token = sample * tokens + t
        is_real = True
        if HAS_KEEP:
            is_real = tl.load(keep + token) != 0
        queries = tl.load(q + token * q_stride + head * K + c, mask=key_mask & is_real, other=0)
        queries = features(queries.to(tl.float32), key_mask & is_real, MAP)
        logits = tl.load(
            k + token * k_stride + head * K + c, mask=key_mask & is_real, other=float("-inf")
        ).to(tl.float64)
        values = tl.load(v + token * v_stride + head * V + e, mask=value_mask & is_real, other=0)
        values = values.to(tl.float32)
        has_weight = logits != float("-inf")  # also true for NaN, which then shows in the outputs
        logits = tl.where(logits < LOG_ZERO, LOG_ZERO, logits)
        reference = tl.where(log_z < logits, logits, log_z)
        new_log_z = reference + tl.log(tl.exp(log_z - reference) + tl.exp(logits - reference))
        decay = tl.exp((log_z - new_log_z).to(tl.float32))
        w = tl.where(has_weight, tl.exp((logits - new_log_z).to(tl.float32)), 0.0)
        log_z = tl.where(has_weight, new_log_z, log_z)
        decay = tl.where(has_weight, decay, 1.0)
        if LRPE:
            if HAS_THETA:
                angle = radians * (position + t)
            else:
                angle = tl.load(angles + (t * H + head) * K + c, mask=key_mask, other=0)
            cos, sin = cosine_and_sine(angle)
            sin_half = sin_half * decay[:, None] + (w * sin)[:, None] * values[None, :]
            out = tl.sum((queries * sin)[:, None] * sin_half, 0)
            w, queries = w * cos, queries * cos
        cos_half = cos_half * decay[:, None] + w[:, None] * values[None, :]
        result = tl.sum(queries[:, None] * cos_half, 0)
        if LRPE:
            result += out
        tl.store(o + (token * H + head) * V + e, result, mask=value_mask)
    store_halves(kv + head_of_all * width, c, e, cos_half, sin_half, K, V, LRPE)
    if first == 0:
        tl.store(z + head_of_all * K + c, log_z, mask=key_mask)
