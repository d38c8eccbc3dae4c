"""The command that checks the kernels on this machine's GPU: check-gpu."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from onescan.cli.options import Argv, echo, parse

if TYPE_CHECKING:
    import torch

    from onescan.evaluation.kernels import KernelCheck, Speed

OP_WIDTH, COLUMN = 26, 20  # characters


def check_gpu(argv: Argv) -> None:
    """Check the Triton kernels on this machine's GPU, and record which ops may use them.

    Compares values and gradients with float64 references, and times kernels, plain torch and, if
    installed, flash-linear-attention. Afterwards, the backend "auto" uses the kernels of the ops
    that passed, on GPUs of this name, until onescan, torch or Triton changes.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options:
        device: Annotated[str, tyro.conf.arg(help="GPU to check: cuda, cuda:1, ...")] = "cuda"

    options = parse(Options, check_gpu, argv, prog="check-gpu")
    device, name = _find_gpu(options.device)
    from onescan.evaluation.kernels import TOLERANCES, check_kernels, record_checks
    from onescan.ops.kernel_record import versions

    here = versions()
    if here is None:
        raise ImportError("triton is not installed: pip install 'onescan[gpu]'")
    echo(f"{name}, {', '.join(f'{package} {number}' for package, number in here.items())}\n")
    names = [str(dtype).removeprefix("torch.") for dtype in TOLERANCES]
    limits = [f"{limit:.0e}" for limit in TOLERANCES.values()]
    echo("Largest error as a fraction of the largest value; in brackets, that of plain torch")
    echo(_row("", names) + "\n" + _row("tolerance", limits))
    checks = []
    for check in check_kernels(device):
        errors = [
            f"{check.errors[dtype]:.1e} ({check.torch_errors[dtype]:.1e})"
            for dtype in TOLERANCES
            if dtype in check.torch_errors
        ]
        echo(_row(check.op, errors) + (f"  FAILED: {check.failure}" if check.failure else ""))
        checks.append(check)
    echo(f"\n{_speeds(checks)}\n\nrecorded in {record_checks(name, checks, here)}")
    if failed := [check.op for check in checks if check.failure]:
        raise ArithmeticError(f"{', '.join(failed)} failed and will run in plain torch")


def _find_gpu(device: str) -> "tuple[torch.device, str]":
    """Return the GPU to check and its name.

    Raises:
        OSError: If torch cannot use any GPU.
        ValueError: If this GPU does not exist, or Triton interprets kernels instead.
    """
    import torch

    if not torch.cuda.is_available():
        raise OSError("check-gpu requires a GPU, but torch finds none that it can use")
    from onescan.ops.backend import is_interpreted
    from onescan.training.distributed import Ranks, choose_device

    chosen = choose_device(device, Ranks())
    if chosen.type != "cuda":
        raise ValueError(f"device is {device!r}, expected a GPU: cuda, cuda:1, ...")
    if is_interpreted():
        raise ValueError("TRITON_INTERPRET is 1, expected 0: interpreted kernels run on the CPU")
    return chosen, torch.cuda.get_device_properties(chosen).name


def _speeds(checks: "list[KernelCheck]") -> str:
    """Format the times of all ops."""
    lines = [
        "Milliseconds per call in bfloat16, and the kernels' share of the bandwidth of a copy",
        _row("", ["kernels", "torch", "fla", "bandwidth"]),
    ]
    for check in checks:
        lines += [f"{check.op}"] if check.speeds else []
        lines += [_row(f"  {name}", _times(speed)) for name, speed in check.speeds.items()]
    return "\n".join(lines)


def _times(speed: "Speed") -> list[str]:
    times = speed.kernels, speed.torch, speed.fla
    return [*("-" if ms is None else f"{ms:.3g}" for ms in times), f"{speed.bandwidth:.0%}"]


def _row(first: str, cells: list[str]) -> str:
    return f"{first:<{OP_WIDTH}}{''.join(f'{cell:>{COLUMN}}' for cell in cells)}"
