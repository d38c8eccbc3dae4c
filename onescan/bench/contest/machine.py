"""On what is measured: names and versions, and two yardsticks that take turns with contestants."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from onescan import __version__
from onescan.bench.contest.outcome import Machine
from onescan.bench.contest.trial import Trial
from onescan.bench.contests import ContestOptions
from onescan.bench.timing import total_mib
from onescan.ops.backend import is_interpreted
from onescan.training.distributed import Ranks, choose_device

COPY, MATMUL = "copy", "matmul"
YARDSTICKS = "yardsticks"
CPU_COPY, GPU_COPY = 2**26, 2**29  # bytes, beyond what processors keep at hand
CPU_SIDE, GPU_SIDE = 1024, 8192  # of the square matrices that are multiplied
CPUINFO = Path("/proc/cpuinfo")
ALLOCATOR = (  # read by torch, glibc and the dynamic linker
    "THP_MEM_ALLOC_ENABLE",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
)


def device_of(options: ContestOptions) -> torch.device:
    """The device that is asked for.

    Raises:
        ValueError: there is none such.
    """
    try:
        return choose_device(options.device, Ranks())
    except ValueError as error:
        raise ValueError(str(error).removeprefix("machine.")) from error


def find_machine(options: ContestOptions) -> Machine:
    """Ask the system, and packages for their versions."""
    device = device_of(options)
    return Machine(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        cpu=_cpu(),
        cores=os.cpu_count() or 1,
        threads=options.threads or torch.get_num_threads(),
        memory_mib=_memory_mib(device),
        allocator=_allocator() if device.type == "cpu" else "",
        platform=platform.platform(),
        python=platform.python_version(),
        onescan=__version__,
        torch=str(torch.__version__),
        triton=_triton(),
        fla=_version("flash-linear-attention"),
        timm=_version("timm"),
    )


def _allocator() -> str:
    """Return the environment variables that are set and affect how memory is allocated."""
    return " ".join(f"{name}={os.environ[name]}" for name in ALLOCATOR if name in os.environ)


def prepare_yardstick(name: str, work: str, size: int, options: ContestOptions) -> Trial:
    """A large copy, or a product of large matrices: bfloat16 on a GPU, float32 on a CPU."""
    device = device_of(options)
    is_gpu = device.type == "cuda"
    if work == COPY:
        source = torch.ones(GPU_COPY if is_gpu else CPU_COPY, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return Trial(lambda: target.copy_(source), floor_bytes=2 * source.numel())
    side = GPU_SIDE if is_gpu else CPU_SIDE
    a, b = torch.randn(2, side, side, device=device, dtype=matmul_dtype(device))
    return Trial(lambda: a @ b, macs=side**3)


def matmul_dtype(device: torch.device) -> torch.dtype:
    """What matrices are multiplied in, to see how fast that is at best."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _memory_mib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 2**20
    return total_mib()


def _cpu() -> str:
    if CPUINFO.exists():
        for line in CPUINFO.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _triton() -> str | None:
    """Its version; interpreted, its kernels take thousands of times as long."""
    found = _version("triton")
    return f"{found}, interpreted" if found and is_interpreted() else found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
