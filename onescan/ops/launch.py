"""How kernels are launched: on what chip, in what type, and with what in an argument's place.

Nothing is tuned while a program runs: lengths change from call to call, and a kernel must not
wait for another length to be tried.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from onescan.kernels.common import Blocks


def data_type(*tensors: Tensor) -> torch.dtype:
    """The one type in which kernels read several tensors: the widest of theirs."""
    dtype = tensors[0].dtype
    for x in tensors[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """What kernels call a type; its own name where they have none.

    >>> name_of(torch.bfloat16), name_of(torch.float64)
    ('bf16', 'torch.float64')
    """
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    return names.get(dtype, str(dtype))


def operand_of(dtype: torch.dtype) -> torch.dtype:
    """The type in which kernels multiply, as `onescan.kernels.common.multiplication` has it."""
    return torch.bfloat16 if dtype is torch.bfloat16 else torch.float32


def as_multiplied(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 matrix as kernels for data of a type multiply by it."""
    if dtype is torch.bfloat16:
        return x.to(dtype)
    if dtype is torch.float16:  # as onescan.kernels.common.nearest_tf32
        return ((x.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    return x


def chip_of(device: torch.device) -> str:
    """What blocks are chosen for: "sm_90", "gfx942"; where kernels are interpreted, the first."""
    if device.type != "cuda":
        return "sm_90"
    properties = torch.cuda.get_device_properties(device)  # which compilers know without a call
    if torch.version.hip:
        return properties.gcnArchName.partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def programs_wanted(device: torch.device) -> int:
    """How many programs keep a device busy: four for each of its processors."""
    if device.type != "cuda":
        return 4
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it that of a tensor."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def launch(
    kernel: Any, grid: tuple[int, ...], blocks: "Blocks", *tensors: Any, **options: Any
) -> None:
    """Run a kernel; None among its tensors becomes one of the others, which it does not look at."""
    from onescan.kernels.common import compile_options

    first = next(x for x in tensors if isinstance(x, Tensor))
    filled = (first if x is None else x for x in tensors)
    with on_device(first):
        kernel[grid](*filled, **options, **compile_options(blocks, chip_of(first.device)))


def turn_table(angles: Tensor, dtype: torch.dtype) -> Tensor:
    """Cosines and sines, [T, H, 2, K], in half the bytes where the data has no more digits."""
    from onescan.kernels import lrpe as kernels

    tokens, heads, width = angles.shape
    narrow = torch.float32 if dtype is torch.float32 else torch.float16
    table = angles.new_empty(tokens, heads, 2, width, dtype=narrow)
    blocks, length = kernels.BLOCKS, angles.numel()
    launch(
        kernels.tabulate,
        (-(-length // blocks.keys),),
        blocks, angles.contiguous(), table, length, K=width, BLOCK=blocks.keys,
    )  # fmt: skip
    return table
