"""Declare kernels, and multiply matrices in the precision of the data.

A kernel is a function decorated with `@kernel(blocks)`. Everything else that the compiler needs is
derived from the names of its parameters, so that a launch and `make check-kernels` compile the same
program:

- Lower case: a pointer or a length. Its type is `type_of(name)`; lengths are not specialized.
- HAS_X: whether the optional pointer `x` is given.
- Other upper case: a constant that `CONSTANTS` derives from the `Case` and the kernel's `Blocks`,
  or else a flag that the caller passes.
"""

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG_ZERO = tl.constexpr(-1e30)  # as in onescan.ops.numerics

# Arguments that differ from call to call. Kernels are not recompiled for other values.
LENGTHS = (
    *("batch", "tokens", "split", "parts", "chunks", "lines", "length", "groups", "stride"),
    *("radius", "prefix", "origin", "size", "feature", "features", "classes", "ignored"),
    *("position", "q_stride", "k_stride", "v_stride"),
)

# Types of pointers by name; all others are float32.
DATA = (
    *("q", "k", "v", "o", "do", "dq", "dk", "dv", "dangles", "x", "y", "dx", "dy", "theta"),
    *("gate", "dgate", "logits", "dlogits"),
)
OPERANDS = (
    *("before", "after", "kv_rounded", "dkv_rounded"),
    *("w", "errors", "derrors", "inverse", "pairs", "key_pairs"),
)
OTHERS = {
    "keep": "i1", "sequence": "i64", "start": "i64", "labels": "i64", "spans": "i32",
    "firsts": "i32", "z_in": "fp64", "z": "fp64", "theta_sums": "fp64",
}  # fmt: skip


class Case(NamedTuple):
    """Compile-time parameters of kernels.

    Attributes:
        data: Dtype of the inputs, "bf16", "fp16" or "fp32".
        chip: Architecture, such as "sm_90" or "gfx942".
        heads: Number of heads.
        key_width: Channels per key; for Toeplitz kernels, the number of exponentials.
        value_width: Channels per value; for Toeplitz kernels, the number of channels.
        lrpe: Whether queries and keys are rotated.
        diagonal: Whether there is one decay per key channel, rather than one per head.
        chunk_size: Maximum number of tokens per chunk of a causal scan.
    """

    data: str
    chip: str
    heads: int = 1
    key_width: int = 1
    value_width: int = 1
    lrpe: bool = False
    diagonal: bool = False
    chunk_size: int = 64


class Blocks(NamedTuple):
    """Block sizes of one program of a kernel.

    Attributes:
        tokens: Tokens per tile.
        keys: Key channels per tile.
        values: Value channels per tile.
        warps: Number of warps, of 32 threads, or 64 on AMD.
        stages: Number of pipeline stages, for loading tiles ahead.
    """

    tokens: int
    keys: int
    values: int
    warps: int
    stages: int

    def holds(self, case: Case) -> bool:
        """Return whether a key-value matrix stays in registers from tile to tile."""
        return self.keys >= case.key_width and width_at_once(self.values, case.data) == self.values


# Constants that follow from the case and the blocks.
CONSTANTS: dict[str, Callable[[Case, Blocks], Any]] = {
    "H": lambda case, blocks: case.heads,
    "K": lambda case, blocks: case.key_width,
    "V": lambda case, blocks: case.value_width,
    "E": lambda case, blocks: case.key_width,
    "D": lambda case, blocks: case.value_width,
    "F": lambda case, blocks: case.key_width * (2 if case.lrpe else 1),
    "DIAGONAL": lambda case, blocks: case.diagonal,
    "LRPE": lambda case, blocks: case.lrpe,
    "HOLDS": lambda case, blocks: blocks.holds(case),
    "CHUNK": lambda case, blocks: blocks.tokens,
    "REFRESH": lambda case, blocks: blocks.tokens,
    "LEVELS": lambda case, blocks: blocks.tokens.bit_length() - 1,
    "BLOCK": lambda case, blocks: blocks.keys,
    "BLOCK_T": lambda case, blocks: blocks.tokens,
    "BLOCK_K": lambda case, blocks: blocks.keys,
    "BLOCK_E": lambda case, blocks: blocks.keys,
    "BLOCK_F": lambda case, blocks: blocks.keys,
    "BLOCK_V": lambda case, blocks: blocks.values,
    "BLOCK_D": lambda case, blocks: blocks.values,
    "BLOCK_W": lambda case, blocks: width_at_once(blocks.values, case.data),
    "OPERAND": lambda case, blocks: multiplication(case.data, case.chip)[0],
    "PRECISION": lambda case, blocks: multiplication(case.data, case.chip)[1],
    "FLOAT_PRECISION": lambda case, blocks: float_precision(case.data, case.chip),
    "EXACT": lambda case, blocks: multiplication("fp32", case.chip)[1],
}


class Kernel:
    """A kernel, and how it is compiled.

    Attributes:
        code: The function returned by `triton.jit`.
        blocks: Function of a `Case` that returns its `Blocks`.
        variants: Sets of flags with which `make check-kernels` compiles it. Entries in lower case
            override the types of pointers.
        arguments: Names of pointers and lengths, in order.
        constants: Names of compile-time constants.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        blocks: Callable[[Case], Blocks],
        variants: tuple[dict[str, Any], ...],
    ) -> None:
        self.code = jit(function)
        self.blocks = blocks
        self.variants = variants
        names = inspect.signature(inspect.unwrap(function)).parameters
        self.arguments = [name for name in names if not name.isupper()]
        self.constants = [name for name in names if name.isupper()]

    @property
    def name(self) -> str:
        return str(self.code.fn.__name__)

    def settings(
        self, case: Case, given: tuple[bool, ...], flags: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the constants and compiler options of a launch, by name.

        Args:
            case: Compile-time parameters.
            given: Whether each argument is given rather than None.
            flags: Constants that neither the case nor the arguments determine.
        """
        has = {f"HAS_{name.upper()}": x for name, x in zip(self.arguments, given, strict=True)}
        known = flags | {name: x for name, x in has.items() if name in self.constants}
        constants, options = self.compile_time(case, known)
        return known | constants | options

    def compile_time(
        self, case: Case, flags: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the kernel's constants and its compiler options.

        On NVIDIA GPUs, the maximum number of registers is set to the hardware limit, because the
        assembler otherwise spills rather than use a few more registers.
        """
        blocks = self.blocks(case)
        constants = {
            name: CONSTANTS[name](case, blocks) if name in CONSTANTS else flags[name]
            for name in self.constants
        }
        options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
        if case.chip.startswith("sm_"):
            options["maxnreg"] = min(255, 2**16 // (32 * blocks.warps))
        return constants, options


def kernel(
    blocks: Callable[[Case], Blocks], *variants: dict[str, Any]
) -> Callable[[Callable[..., Any]], Kernel]:
    """Declare a kernel. See the module docstring for the naming of its parameters."""
    return lambda function: Kernel(function, blocks, variants or ({},))


def jit(function: Callable[..., Any]) -> Any:
    """Declare a device function.

    The function is unwrapped, because Triton compiles its source, not a type checker's wrapper.
    """
    inner = inspect.unwrap(function)
    lengths = [name for name in inspect.signature(inner).parameters if name in LENGTHS]
    return triton.jit(inner, do_not_specialize=lengths)


def type_of(name: str, data: str) -> str:
    """Return the type of an argument.

    >>> type_of("q", "fp16"), type_of("before", "fp16"), type_of("tokens", "fp16")
    ('*fp16', '*fp32', 'i32')
    """
    if name in LENGTHS:
        return "i32"
    if name in DATA:
        return f"*{data}"
    if name in OPERANDS:
        return "*bf16" if data == "bf16" else "*fp32"
    if name == "rotary":
        return "*fp32" if data == "fp32" else "*fp16"
    return "*" + OTHERS.get(name, "fp32")


class Example(NamedTuple):
    """Sizes and flags with which `make check-kernels` compiles the kernels of a file."""

    key_width: int
    value_width: int
    lrpe: bool = False
    diagonal: bool = False
    flags: dict[str, Any] = {}  # noqa: RUF012 (a default of a tuple that nobody changes)


class Build(NamedTuple):
    """One way to compile a kernel ahead of time."""

    name: str
    kernel: Kernel
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]


def kernels_of(file: ModuleType) -> list[Kernel]:
    """Return the kernels that a file declares, in order."""
    kernels = [x for x in vars(file).values() if isinstance(x, Kernel)]
    return [x for x in kernels if x.code.fn.__module__ == file.__name__]


def builds(file: ModuleType, data: str, chip: str) -> Iterator[Build]:
    """Yield each way in which the file's EXAMPLES compile its kernels."""
    seen = []
    for example in file.EXAMPLES:
        case = Case(data, chip, 8, *example[:4])
        if not getattr(file, "fits", bool)(case):
            continue
        for kernel in kernels_of(file):
            for variant in kernel.variants:
                flags = {**dict.fromkeys(kernel.constants, False), **example.flags, **variant}
                constants, options = kernel.compile_time(case, flags)
                types = {x: variant.get(x) or type_of(x, data) for x in kernel.arguments}
                given = [
                    x.removeprefix("HAS_").lower() for x in constants if flags[x] and x in flags
                ]
                name = " ".join([kernel.name, str(example.key_width), *given])
                build = Build(name, kernel, types, constants, options)
                if build not in seen:
                    seen.append(build)
                    yield build


def power_of_two(width: int, least: int = 16) -> int:
    """Return the next power of two; matrix units need at least 16.

    >>> power_of_two(5), power_of_two(65)
    (16, 128)
    """
    return max(least, 1 << (width - 1).bit_length())


def multiplication(data: str, chip: str) -> tuple[Any, str]:
    """Return the dtype and the input precision of matrix products.

    fp16 operands are multiplied in tf32, which has the same precision and a larger range, because
    sums over tokens, gradients and weights relative to a running maximum exceed the range of fp16.
    They are rounded to tf32 first. fp32 uses three tf32 products on chips whose matrix units do not
    support float32, which is equally accurate.
    """
    exact = "tf32x3" if chip.startswith("sm_") else "ieee"
    return {
        "bf16": (tl.bfloat16, "ieee"),
        "fp16": (tl.float32, "tf32"),
        "fp32": (tl.float32, exact),
    }[data]


def float_precision(data: str, chip: str) -> str:
    """Return the input precision of products of float32 values that are as exact as the data."""
    return multiplication("fp16" if data == "bf16" else data, chip)[1]


def width_at_once(values: int, data: str) -> int:
    """Return how many value channels to sum at once; fp32 needs more registers, for tf32 parts."""
    return min(values, 32 if values <= 64 else 16) if data == "fp32" else values


@jit
def nearest_tf32(x):
    """Round to tf32, because matrix units would truncate.

    The magnitude is limited first, because adding to the bits of a GPU's NaN, 0x7fffffff, would
    give -0. A comparison of x with itself would need more registers.
    """
    bits = x.to(tl.int32, bitcast=True)
    nearest = (tl.minimum(bits & 0x7FFFFFFF, 0x7FFFEFFF) + 0x1000) & -0x2000
    return (nearest | (bits & -0x80000000)).to(tl.float32, bitcast=True)


@jit
def product(a, b, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Compute the matrix product of a and b, summed in float32."""
    if PRECISION == "tf32":
        a, b = nearest_tf32(a.to(OPERAND)), nearest_tf32(b.to(OPERAND))
    return tl.dot(a.to(OPERAND), b.to(OPERAND), input_precision=PRECISION, out_dtype=tl.float32)


@jit
def valid_tokens(keep, sample, t, tokens, HAS_KEEP: tl.constexpr):
    """Return which tokens of a tile exist and are real."""
    valid = t < tokens
    if HAS_KEEP:
        valid &= tl.load(keep + sample * tokens + t, mask=valid, other=0) != 0
    return valid


@jit
def span_of(
    spans, sample, chunk, chunks, size, tokens, HAS_SPANS: tl.constexpr
):  # fmt: skip
    """Return a chunk's first token, the end of its tokens, whether a state enters, its sequence.

    spans: see `Packing.spans`. Without them, each sample is a sequence of chunks of `size` tokens.
    """
    start, stop = chunk * size, tl.minimum((chunk + 1) * size, tokens)
    continues, sequence = tl.full((), 1, tl.int1), sample
    if HAS_SPANS:
        spans += (sample * chunks + chunk) * 4
        start, stop = tl.load(spans), tl.load(spans + 1)
        continues, sequence = tl.load(spans + 2) != 0, tl.load(spans + 3).to(tl.int64)
    return start, stop, continues, sequence


@jit
def load_rotary(rotary, first, r, head, c, tokens, H: tl.constexpr, K: tl.constexpr):
    """Load cosines and sines for the tokens first + r, [R, 1], from a table [T, H, 2, K]."""
    pointers = rotary + (first * H + head) * (2 * K) + r * (2 * H * K) + c[None, :]
    mask = (first + r < tokens) & (c < K)[None, :]
    cos = tl.load(pointers, mask=mask, other=0).to(tl.float32)
    return cos, tl.load(pointers + K, mask=mask, other=0).to(tl.float32)


@jit
def load_halves(kv, c, e, K: tl.constexpr, V: tl.constexpr, LRPE: tl.constexpr):
    """Load a block of kv [F, V], cosine half and sine half; without LRPE both are the same."""
    pointers = kv + (c[:, None] * V + e[None, :])
    mask = (c < K)[:, None] & (e < V)[None, :]
    cos_half = tl.load(pointers, mask=mask, other=0)
    sin_half = cos_half
    if LRPE:
        sin_half = tl.load(pointers + K * V, mask=mask, other=0)
    return cos_half, sin_half


@jit
def store_halves(
    kv, c, e, cos_half, sin_half, K: tl.constexpr, V: tl.constexpr, LRPE: tl.constexpr
):  # fmt: skip
    """Store a block of kv [F, V]."""
    pointers = kv + (c[:, None] * V + e[None, :])
    mask = (c < K)[:, None] & (e < V)[None, :]
    tl.store(pointers, cos_half, mask=mask)
    if LRPE:
        tl.store(pointers + K * V, sin_half, mask=mask)


@jit
def rows_by_keys(
    x, row, matrix, r, c, valid,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute x_t . m_c, [R, C], for a tile of x [T, H, V] and the rows m_c of a matrix [K, V].

    Value channels are summed BLOCK_W at a time.
    """
    acc = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for left in range(0, V, BLOCK_W):
        e = left + tl.arange(0, BLOCK_W)
        pointers = x + row * V + r * (H * V) + e[None, :]
        tile = tl.load(pointers, mask=valid & (e < V)[None, :], other=0)
        pointers = matrix + c[None, :] * V + e[:, None]
        factor = tl.load(pointers, mask=(e < V)[:, None] & (c < K)[None, :], other=0)
        acc += product(tile, factor, OPERAND, PRECISION)
    return acc
