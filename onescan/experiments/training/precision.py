"""The precision of a run on its device: bfloat16 only where the hardware computes in it."""

from collections.abc import Mapping
from typing import Any

import torch

from onescan.experiments.training.config import AUTO, Precision, RunPrecision

# Names in torch.cpu.get_capabilities(), of x86 and of ARM. With one thread of an EPYC 9004, some
# products of matrices take 16 ms in float32, and in bfloat16 6 ms with AVX512-BF16, 32 ms with
# other AVX-512 instructions, and 320 ms with AVX2.
CPU_INSTRUCTIONS = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "fp16_arith"),
}


def has_instructions(precision: Precision, device: torch.device) -> bool:
    """Return whether a device has instructions for a precision, without which it is slow."""
    if precision == "float32":
        return True
    if device.type == "cuda":
        return precision == "float16" or torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return True
    # missing in older versions of torch
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    has_cpu_instructions = any(capabilities.get(name) for name in CPU_INSTRUCTIONS[precision])
    return has_cpu_instructions and torch.backends.mkldnn.is_available()  # which uses them


def choose_precision(requested: RunPrecision, device: torch.device) -> Precision:
    """Return the precision for a device; "auto" is bfloat16 if it has instructions for it."""
    if requested != AUTO:
        return requested
    return "bfloat16" if has_instructions("bfloat16", device) else "float32"


def precision_note(requested: RunPrecision, precision: Precision, device: torch.device) -> str:
    """Explain a precision that is slow on the device, or that "auto" chose; empty for others.

    Args:
        requested: Precision in the config of the run.
        precision: Precision of the run, which it keeps when it is resumed on another device.
        device: Device of the run.
    """
    unit = "CPU" if device.type == "cpu" else "GPU"
    if not has_instructions(precision, device):
        return f"{precision} is slow on this {unit}, which has no instructions for it"
    if requested != AUTO or precision != "float32":
        return ""
    if has_instructions("bfloat16", device):
        return "the run began in float32, on a device without bfloat16 instructions, and keeps it"
    return (
        f"float32 instead of bfloat16, because this {unit} has no bfloat16 instructions; "
        "--training.precision bfloat16 uses it anyway"
    )
