"""Choose the backend of an op, and launch kernels.

An op runs in plain torch on any device, or in Triton kernels on a GPU. Kernels are not autotuned,
because lengths change from call to call, and tuning would delay the first call of each length.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onescan.checks import check_choice
from onescan.kernels.chips import WIDEST_HEAD, shared_memory_kib

if TYPE_CHECKING:
    from onescan.kernels.common import Case, Kernel

Backend = Literal["auto", "torch", "triton"]

BACKENDS = ("auto", "torch", "triton")

# Parts of the ops that have kernels of their own.
KERNEL_OPS = (
    *("additive_decay.one_scan", "additive_decay.chunk", "additive_decay.recurrent"),
    *("decay_attention.scalar", "decay_attention.diagonal", "decay_attention.no_decay"),
    *("toeplitz_position", "lrpe", "shifted_silu", "gated", "cross_entropy", "linear_diffusion"),
    "delta_rule",
)

# GPUs, by torch.cuda.get_device_name, on which `make gpu` has passed. Without any, "auto" means
# torch, because compilers have miscompiled correct kernels before.
VALIDATED_GPUS: tuple[str, ...] = ()
CAPABILITY = (8, 0)  # of the oldest NVIDIA GPUs on which "auto" uses kernels

# Kernels that were launched, by what they depend on, with their constants. Triton would find them
# too, but takes longer.
_compiled: dict[Any, tuple[Any, list[Any]]] = {}

_preferred = "auto"


@contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Set what "auto" means inside a `with` block, in all ops and therefore in whole models.

    With "triton", every call that kernels support uses them, on any GPU; all other calls run in
    torch. The setting applies to the whole process, not to one thread. With activation
    checkpointing, the backward pass must run inside the context too.

    Raises:
        ValueError: If the backend is unknown.

    >>> with use_backend("torch"):
    ...     preferred_backend()
    'torch'
    """
    global _preferred
    check_choice("backend", backend, BACKENDS)
    previous, _preferred = _preferred, backend
    try:
        yield
    finally:
        _preferred = previous


def preferred_backend() -> str:
    """Return the current meaning of "auto"; "auto" itself outside of `use_backend`."""
    return _preferred


def resolved_backend(
    backend: str,
    has_kernel: bool,
    *tensors: Tensor | None,
    widest: int | None = WIDEST_HEAD,
) -> str:
    """Return the backend of a call, "torch" or "triton".

    Args:
        backend: The requested backend.
        has_kernel: Whether the form in question has a kernel.
        tensors: Inputs of the call.
        widest: Maximum size of their last axis; None for no limit.

    Raises:
        ValueError: If the backend is unknown, or "triton" is requested and cannot run.
    """
    check_choice("backend", backend, BACKENDS)
    if backend == "triton":
        obstacle = why_no_kernel(*tensors, widest=widest)
        if obstacle and has_kernel:  # without a kernel, the table of forms raises
            raise ValueError(f"backend is 'triton', but {obstacle}")
        return backend
    if backend == "torch" or _preferred == "torch" or not has_kernel:
        return "torch"
    if _preferred == "auto" and not _uses_kernels(tensors):
        return "torch"
    return "torch" if why_no_kernel(*tensors, widest=widest) else "triton"


def why_no_kernel(*tensors: Tensor | None, widest: int | None = WIDEST_HEAD) -> str | None:
    """Return why kernels cannot run on these tensors, or None if they can."""
    given = [x for x in tensors if x is not None]
    if find_spec("triton") is None:
        return "triton is not installed: pip install 'onescan[gpu]'"
    if is_transformed(given):
        return "kernels support neither torch.func nor forward-mode derivatives"
    for x in given:
        if is_interpreted() and x.dtype is torch.bfloat16:
            return "interpreted kernels take float32 or float16, but got torch.bfloat16"
        if x.device.type != "cuda" and not is_interpreted():
            return f"tensors are on {x.device}, expected a GPU"
        if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"kernels take float32, bfloat16 or float16, but got {x.dtype}"
        if widest is not None and x.shape[-1] > widest:
            return f"a head has {x.shape[-1]} channels, expected at most {widest}"
    return None


def why_no_kernels() -> str | None:
    """Return why no kernel can run on this machine, or None if some can."""
    if not torch.cuda.is_available() and not is_interpreted():
        return "torch finds no GPU that it can use"
    return why_no_kernel()


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Return whether any of the tensors requires a gradient."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def is_interpreted() -> bool:
    """Return whether Triton interprets kernels, on any device (TRITON_INTERPRET=1, for tests)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def is_transformed(tensors: list[Tensor]) -> bool:
    """Return whether derivatives other than plain gradients may be requested."""
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or any(
        torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors
    )


def default_kernels(device: torch.device) -> tuple[str, ...]:
    """Return which of `KERNEL_OPS` the backend "auto" runs as kernels on a device: all or none."""
    return () if not VALIDATED_GPUS or why_not_by_default(device) else KERNEL_OPS


def why_not_by_default(device: torch.device) -> str | None:
    """Return why "auto" uses no kernels on a device even if they are validated; None if it does."""
    if device.type != "cuda":
        return f"the device is {device.type}, expected an NVIDIA GPU"
    gpu = torch.cuda.get_device_properties(device)  # torch.compile can trace this
    if torch.version.hip:
        return f"{gpu.name} is not an NVIDIA GPU"
    if (gpu.major, gpu.minor) < CAPABILITY:
        needed = ".".join(map(str, CAPABILITY))
        return (
            f"{gpu.name} has compute capability {gpu.major}.{gpu.minor}, expected {needed} or above"
        )
    kib = getattr(gpu, "shared_memory_per_block_optin", 0) // 1024  # unknown to older torch
    needed_kib = shared_memory_kib(chip_of(device))
    if 0 < kib < needed_kib:
        return f"{gpu.name} has {kib} KiB of shared memory per block, expected {needed_kib} or more"
    return None


_warned: set[str] = set()


def _uses_kernels(tensors: tuple[Tensor | None, ...]) -> bool:
    """Return whether "auto" may use kernels; warn once for a GPU on which it may not."""
    if not VALIDATED_GPUS:
        return False
    for device in {x.device for x in tensors if x is not None}:
        if reason := why_not_by_default(device):
            is_gpu = device.type == "cuda"
            if is_gpu and not torch.compiler.is_compiling() and reason not in _warned:
                _warned.add(reason)
                warnings.warn(
                    f"ops run in plain PyTorch: {reason}; use_backend('triton') uses "
                    "kernels anyway",
                    stacklevel=2,
                )
            return False
    return True


def data_type(*tensors: Tensor) -> torch.dtype:
    """Return the dtype in which kernels read several tensors: the widest of their dtypes."""
    dtype = tensors[0].dtype
    for x in tensors[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype in kernels, or torch's name if kernels do not support it.

    >>> name_of(torch.bfloat16), name_of(torch.float64)
    ('bf16', 'torch.float64')
    """
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    return names.get(dtype, str(dtype))


def operand_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which kernels multiply (`onescan.kernels.common.multiplication`)."""
    return torch.bfloat16 if dtype is torch.bfloat16 else torch.float32


def as_multiplied(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a float32 matrix as kernels do before multiplying it with data of this dtype."""
    if dtype is torch.bfloat16:
        return x.to(dtype)
    if dtype is torch.float16:  # as onescan.kernels.common.nearest_tf32
        nearest = ((x.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
        return torch.where(x == x, nearest, x)
    return x


def chip_of(device: torch.device) -> str:
    """Return a device's architecture, "sm_90" or "gfx942"; "sm_90" for interpreted kernels."""
    if device.type != "cuda":
        return "sm_90"
    properties = torch.cuda.get_device_properties(device)  # torch.compile can trace this
    if torch.version.hip:
        return properties.gcnArchName.partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def target_programs(device: torch.device) -> int:
    """Return how many programs keep a device busy: four per multiprocessor."""
    if device.type != "cuda":
        return 4
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


def case_of(k: Tensor, v: Tensor, **options: Any) -> "Case":
    """Return the compile-time parameters for keys [B, T, H, K] and values [B, T, H, V]."""
    from onescan.kernels.common import Case

    heads, key_width = k.shape[2:]
    return Case(name_of(k.dtype), chip_of(k.device), heads, key_width, v.shape[-1], **options)


def packed_heads(x: Tensor) -> Tensor:
    """Return x [B, T, H, K], or a copy unless it is a range of channels of contiguous tokens."""
    batch, tokens, heads, width = x.shape
    row = token_stride(x)
    is_packed = x.stride()[2:] == (width, 1) and (batch == 1 or x.stride(0) == tokens * row)
    return x if is_packed and row >= heads * width else x.contiguous()


def token_stride(x: Tensor) -> int:
    """Return the distance between tokens of x, [B, T, ...], or between samples if T = 1."""
    return x.stride(0 if x.shape[1] == 1 else 1)


def launch(
    kernel: "Kernel", case: "Case", grid: tuple[int, ...], *arguments: Any, **flags: Any
) -> None:
    """Run a kernel on the device of its first tensor.

    Args:
        kernel: The kernel.
        case: Its compile-time parameters.
        grid: Number of programs along each axis.
        arguments: Pointers and lengths in the kernel's order. None for an optional pointer sets
            its HAS_ flag to False, and another tensor is passed in its place, which is not read.
        flags: Constants that neither the case nor the arguments determine.
    """
    first = next(x for x in arguments if isinstance(x, Tensor))
    filled = [first if x is None else x for x in arguments]
    key = kernel, case, first.device, tuple(map(_kind, arguments)), tuple(flags.items())
    with _on_device(first.device):
        if (cached := _compiled.get(key)) is not None:
            compiled, constants = cached
            compiled[(*grid, 1, 1)[:3]](*filled, *constants)
            return
        settings = kernel.settings(case, tuple(x is not None for x in arguments), flags)
        compiled = kernel.code[grid](*filled, **settings)
        if compiled is not None:  # as for interpreted kernels
            _compiled[key] = compiled, [settings[name] for name in kernel.constants]


def _kind(argument: Any) -> Any:
    """Return what a compiled kernel depends on: a dtype and alignment, or the size of an int."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return argument is not None and -(2**31) <= argument < 2**31


def _on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one, on which Triton launches."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
