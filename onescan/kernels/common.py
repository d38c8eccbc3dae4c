"""What kernels share: how they are declared, how they multiply, and what they are built as."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG_ZERO = tl.constexpr(-1e30)  # as onescan.ops.numerics has it


def jit(function: Callable[..., Any]) -> Any:
    """Declare a kernel, or a part of one; lengths are not specialized on.

    Unwrapped, as Triton reads the source and not what a type checker put around it.
    """
    inner = inspect.unwrap(function)
    lengths = [name for name in inspect.signature(inner).parameters if name in LENGTHS]
    return triton.jit(inner, do_not_specialize=lengths)


# What differs from call to call: a kernel is not compiled anew for another value.
LENGTHS = ("batch", "tokens", "split", "parts", "chunks", "lines", "length", "groups", "stride")


class Blocks(NamedTuple):
    """What one program of a kernel holds.

    Attributes:
        tokens: of a tile.
        keys: channels of a key at once.
        values: channels of a value, all of them.
        warps: of 32 threads, 64 on AMD.
        stages: tiles that are loaded ahead.
    """

    tokens: int
    keys: int
    values: int
    warps: int
    stages: int


class Build(NamedTuple):
    """One way to compile a kernel, for `make check-kernels`.

    Attributes:
        name: what tells it from the others of its file.
        kernel: what `jit` returned.
        types: of the arguments that are no constants, in order, as in "data data fp32 i32": a
            pointer, to "data" where it is of q's type, or a whole number, i32.
        constants: those in capitals.
        blocks: as when it is launched.
    """

    name: str
    kernel: Any
    types: str
    constants: dict[str, Any]
    blocks: Blocks


def compile_options(blocks: Blocks, chip: str) -> dict[str, int]:
    """What a kernel is compiled with besides its constants.

    NVIDIA's assembler would rather spill a little than use a few registers more: it is told that it
    may use all.
    """
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    if not chip.startswith("sm_"):
        return options
    return {**options, "maxnreg": min(255, 2**16 // (32 * blocks.warps))}


def power_of_two(width: int, least: int = 16) -> int:
    """The next power of two; matrix units want 16 at least.

    >>> power_of_two(5), power_of_two(65)
    (16, 128)
    """
    return max(least, 1 << (width - 1).bit_length())


def multiplication(data: str, chip: str) -> dict[str, Any]:
    """The constants that say how matrices of "bf16", "fp16" or "fp32" are multiplied.

    fp16 multiplies as tf32, which has as many digits: sums over tokens, gradients and weights
    under a running maximum leave fp16's range. Operands are rounded to it first. fp32 takes three
    products of tf32 where a chip's matrix unit has no float32, which is as exact.
    """
    exact = "tf32x3" if chip.startswith("sm_") else "ieee"
    operand, precision = {
        "bf16": (tl.bfloat16, "ieee"),
        "fp16": (tl.float32, "tf32"),
        "fp32": (tl.float32, exact),
    }[data]
    return {"OPERAND": operand, "PRECISION": precision}


def width_at_once(values: int, data: str) -> int:
    """Value channels that are summed over at once: fp32 is multiplied in pieces, all held."""
    return min(values, 32 if values <= 64 else 16) if data == "fp32" else values


@jit
def nearest_tf32(x):
    """The nearest number of tf32's digits: matrix units would cut the others off."""
    bits = x.to(tl.int32, bitcast=True) + 0x1000
    return (bits & -0x2000).to(tl.float32, bitcast=True)


@jit
def product(a, b, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """The matrix product of a and b, summed in float32."""
    if PRECISION == "tf32":
        a, b = nearest_tf32(a.to(OPERAND)), nearest_tf32(b.to(OPERAND))
    return tl.dot(a.to(OPERAND), b.to(OPERAND), input_precision=PRECISION, out_dtype=tl.float32)


@jit
def live_tokens(keep, sample, t, tokens, KEEP: tl.constexpr):
    """Which tokens of a tile there are, and are kept."""
    live = t < tokens
    if KEEP:
        live &= tl.load(keep + sample * tokens + t, mask=live, other=0) != 0
    return live


@jit
def turn_of(turn, first, r, head, c, tokens, H: tl.constexpr, K: tl.constexpr):
    """Cosines and sines of the tokens first + r, [R, 1], from a table [T, H, 2, K]."""
    place = turn + (first * H + head) * (2 * K) + r * (2 * H * K) + c[None, :]
    there = (first + r < tokens) & (c < K)[None, :]
    cos = tl.load(place, mask=there, other=0).to(tl.float32)
    return cos, tl.load(place + K, mask=there, other=0).to(tl.float32)


@jit
def slopes_of(
    x, row, matrix, r, c, live,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x_t . m_c, [R, C], of a tile of x [T, H, V] and rows m_c of a matrix [K, V].

    Value channels are summed over some at once.
    """
    acc = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for left in range(0, V, BLOCK_W):
        e = left + tl.arange(0, BLOCK_W)
        place = x + row * V + r * (H * V) + e[None, :]
        tile = tl.load(place, mask=live & (e < V)[None, :], other=0)
        place = matrix + c[None, :] * V + e[:, None]
        factor = tl.load(place, mask=(e < V)[:, None] & (c < K)[None, :], other=0)
        acc += product(tile, factor, OPERAND, PRECISION)
    return acc
