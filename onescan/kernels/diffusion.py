"""LDN's explicit step of diffusion along a sequence, and its gradients.

    y_t = (1 - sum_s K_ts) x_t + sum_s K_ts x_s        K_ts = rates[R + t - s], 0 beyond R tokens
    dx_s = (1 - sum_r K_sr) dy_s + sum_t K_ts dy_t     the same step with K transposed
    drates_r = sum_t dy_t . (x_{t-r} - x_t)

K_ts is 0 between different sequences and for masked tokens. It is never stored: each program builds
a tile of it from the rates for every tile of tokens within R of its own. x has `tokens` tokens. The
last `length` of them are moved; those before them are read only.

Rates are dt K in float32, [H, 2R+1], and 0 for lag 0. x and dy are read in tiles as they are, and
masked tokens are not read, because they may hold NaN.

Source: LDN, arXiv:2502.12381, Sec. 3.3.
"""

import triton.language as tl

from onescan.kernels.common import Blocks, Case, Example, jit, kernel, power_of_two, product

EXAMPLES = (Example(1, 768), Example(1, 64))


def step_blocks(case: Case) -> Blocks:
    """Return the blocks of the step, with square tiles of K; fp32 needs more registers."""
    widest = power_of_two(case.value_width)
    if case.data == "fp32":
        return Blocks(tokens=32, keys=1, values=min(widest, 64), warps=4, stages=2)
    stages = 1 if case.chip.startswith("sm_8") else 2  # loading ahead would spill registers
    return Blocks(tokens=64, keys=1, values=min(widest, 128), warps=8, stages=stages)


def gradient_blocks(case: Case) -> Blocks:
    """Return the blocks of the gradient of rates, which holds two tiles of pairs of tokens."""
    blocks = step_blocks(case)
    return blocks._replace(values=min(blocks.values, 64 if case.data == "bf16" else 32))


@jit
def real_tokens(keep, sample, t, tokens, HAS_KEEP: tl.constexpr):
    """Return which tokens exist and are real; t may be negative."""
    real = (t >= 0) & (t < tokens)
    if HAS_KEEP:
        real &= tl.load(keep + sample * tokens + t, mask=real, other=0) != 0
    return real


@jit
def connected(
    sequence, sample, t, s, t_real, s_real, tokens, HAS_SEQUENCE: tl.constexpr
):  # fmt: skip
    """Return which pairs of real tokens belong to the same sequence, [T, S]."""
    pairs = t_real[:, None] & s_real[None, :]
    if HAS_SEQUENCE:
        of_t = tl.load(sequence + sample * tokens + t, mask=t_real, other=0)
        of_s = tl.load(sequence + sample * tokens + s, mask=s_real, other=0)
        pairs &= of_t[:, None] == of_s[None, :]
    return pairs


@kernel(
    step_blocks,
    {"TRANSPOSED": False, "HAS_KEEP": False, "HAS_SEQUENCE": False},
    {"TRANSPOSED": True, "HAS_KEEP": False, "HAS_SEQUENCE": False},
    {"TRANSPOSED": False, "HAS_KEEP": True, "HAS_SEQUENCE": True},
    {"TRANSPOSED": True, "HAS_KEEP": True, "HAS_SEQUENCE": True},
)
def step(
    x, rates, keep, sequence,
    y,
    tokens, length, radius,
    H: tl.constexpr, V: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_SEQUENCE: tl.constexpr,
    TRANSPOSED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write y [B, length, H, V] for x [B, tokens, H, V].

    TRANSPOSED: x has the last `length` tokens, zeros before them, and y has all of them.
    """
    program = tl.program_id(0).to(tl.int64)
    across: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    before = tokens - length
    x_first = before if TRANSPOSED else 0
    y_first = 0 if TRANSPOSED else before
    blocks = tl.cdiv(tokens - y_first, BLOCK_T)
    e = (program % across * BLOCK_V).to(tl.int32) + tl.arange(0, BLOCK_V)
    head = program // across % H
    sample = program // (across * H) // blocks
    first = y_first + (program // (across * H) % blocks * BLOCK_T).to(tl.int32)
    i = tl.arange(0, BLOCK_T)
    t = first + i
    x_row = sample * (tokens - x_first) - x_first  # of token 0
    y_row = sample * (tokens - y_first) - y_first
    tile_offsets = i[:, None] * (H * V) + e[None, :]  # in a tile
    lag_0 = rates + head * (2 * radius + 1) + radius
    t_real = real_tokens(keep, sample, t, tokens, HAS_KEEP)
    mixed = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    row_sums = tl.zeros([BLOCK_T], tl.float32)
    stop = tl.minimum(first + BLOCK_T + radius, tokens)
    for left in range(tl.maximum(first - radius, 0), stop, BLOCK_T):
        s = left + i
        s_real = real_tokens(keep, sample, s, tokens, HAS_KEEP)
        lag = t[:, None] - s[None, :]
        pairs = connected(sequence, sample, t, s, t_real, s_real, tokens, HAS_SEQUENCE)
        pairs &= (lag <= radius) & (lag >= -radius)
        factors = tl.load(lag_0 + lag, mask=pairs, other=0)
        row_sums += tl.sum(factors, 1)
        if TRANSPOSED:
            factors = tl.load(lag_0 - lag, mask=pairs, other=0)
        mask = (s_real & (s >= x_first))[:, None] & (e < V)[None, :]
        tile = tl.load(x + ((x_row + left) * H + head) * V + tile_offsets, mask=mask, other=0)
        mixed += product(factors, tile, OPERAND, PRECISION)
    mask = (t_real & (t >= x_first))[:, None] & (e < V)[None, :]
    own_tile = tl.load(x + ((x_row + first) * H + head) * V + tile_offsets, mask=mask, other=0).to(
        tl.float32
    )
    moved = mixed + (1 - row_sums)[:, None] * own_tile  # zero for masked tokens
    inside = (t < tokens)[:, None] & (e < V)[None, :]
    tl.store(y + ((y_row + first) * H + head) * V + tile_offsets, moved, mask=inside)


@kernel(
    gradient_blocks,
    {"HAS_KEEP": False, "HAS_SEQUENCE": False},
    {"HAS_KEEP": True, "HAS_SEQUENCE": True},
)
def rates_gradient(
    dy, x, keep, sequence,
    drates,
    batch, tokens, length, radius, parts,
    H: tl.constexpr, V: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_SEQUENCE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write terms of drates, [parts, H, BLOCK_T, 2R+1], to be summed over parts and BLOCK_T.

    A part consists of every `parts`-th block of tokens t. Each program processes one of the tiles
    of s that the windows from t - R to t + R are divided into, so that its lags do not change.
    """
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(BLOCK_T + 2 * radius, BLOCK_T)
    head = program // tiles % H
    part = program // tiles // H
    before = tokens - length
    blocks = tl.cdiv(length, BLOCK_T)
    i = tl.arange(0, BLOCK_T)
    offset = (program % tiles * BLOCK_T).to(tl.int32) - radius  # of the tile of s from that of t
    terms = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    for block in range(part, batch * blocks, parts):
        sample = block // blocks
        first = before + (block % blocks * BLOCK_T).to(tl.int32)
        if (first + offset + BLOCK_T > 0) & (first + offset < tokens):
            t, s = first + i, first + offset + i
            t_real = real_tokens(keep, sample, t, tokens, HAS_KEEP)
            s_real = real_tokens(keep, sample, s, tokens, HAS_KEEP)
            at_dy = dy + ((sample * length + first - before) * H + head) * V
            at_t = x + ((sample * tokens + first) * H + head) * V
            at_s = at_t + offset * (H * V)
            outer = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
            dots = tl.zeros([BLOCK_T], tl.float32)
            for left in range(0, V, BLOCK_V):
                e = left + tl.arange(0, BLOCK_V)
                mask = t_real[:, None] & (e < V)[None, :]
                tile_offsets = i[:, None] * (H * V) + e[None, :]
                dy_tile = tl.load(at_dy + tile_offsets, mask=mask, other=0)
                x_tile = tl.load(at_t + tile_offsets, mask=mask, other=0)
                mask = s_real[:, None] & (e < V)[None, :]
                s_tile = tl.load(at_s + tile_offsets, mask=mask, other=0)
                outer += product(dy_tile, tl.trans(s_tile), OPERAND, PRECISION)
                dots += tl.sum(dy_tile.to(tl.float32) * x_tile.to(tl.float32), 1)
            pairs = connected(sequence, sample, t, s, t_real, s_real, tokens, HAS_SEQUENCE)
            terms += tl.where(pairs, outer - dots[:, None], 0)
    lag = i[:, None] - i[None, :] - offset
    row = (part * H + head) * BLOCK_T + i
    pointers = drates + row[:, None] * (2 * radius + 1) + radius + lag
    tl.store(pointers, terms, mask=(lag <= radius) & (lag >= -radius))
