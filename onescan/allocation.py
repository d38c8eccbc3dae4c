"""Build models after checking that they fit into memory.

The check builds the model on the meta device, so nothing is allocated.
"""

import os

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from onescan.configs import ModelConfig

MAX_TENSORS = 20_000  # parameters and buffers; building more takes minutes
GIB = 1 << 30


def build_model(config: ModelConfig) -> nn.Module:
    """Build a model after checking that it fits into memory.

    Raises:
        ValueError: If it does not fit (states both sizes), or the config is invalid.
    """
    build_on_meta(config)
    return build_unchecked(config)


def build_unchecked(config: ModelConfig) -> nn.Module:
    """Build a model without checking its size.

    Raises:
        ValueError: If the config is invalid, or torch cannot allocate a tensor.
    """
    try:
        model: nn.Module = config.build()
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:
        raise ValueError(f"the model cannot be built: {_first_line(error)}") from error
    return model


def build_on_meta(config: ModelConfig, *, max_tensors: int | None = None) -> nn.Module | None:
    """Build a model on the meta device, without allocating its weights.

    Args:
        config: Config of the model.
        max_tensors: Maximum number of parameters and buffers. ``None`` is `MAX_TENSORS`.

    Returns:
        The model, or ``None`` if it cannot be built on the meta device.

    Raises:
        ValueError: If it has more tensors, or does not fit into memory, or the size of a tensor in
            bytes exceeds 64 bits.
    """
    limit = MAX_TENSORS if max_tensors is None else max_tensors
    count = size = parameters = 0

    def add(_module: nn.Module, _name: str, tensor: Tensor | None) -> None:
        nonlocal count, size, parameters
        if tensor is None or not tensor.is_meta:
            return
        count, size = count + 1, size + tensor.numel() * tensor.element_size()
        if count > limit:
            raise ValueError(f"the model has more than {limit:,} tensors, the maximum")
        parameters += tensor.numel() * isinstance(tensor, nn.Parameter)

    hooks = [
        register_module_parameter_registration_hook(add),
        register_module_buffer_registration_hook(add),
    ]
    try:
        with torch.device("meta"):
            model: nn.Module | None = config.build()
    except (RuntimeError, OverflowError, TypeError) as error:
        if "overflow" in str(error).lower():  # of the size of one tensor
            raise ValueError(f"the model cannot be built: {_first_line(error)}") from error
        model = None  # for example, because code reads values
    finally:
        for hook in hooks:
            hook.remove()
    if size > memory_bytes():
        raise ValueError(
            f"the model needs {size / GIB:,.1f} GiB of memory for {parameters:,} parameters, but "
            f"this machine has {memory_bytes() / GIB:,.1f} GiB; use a smaller width or depth"
        )
    return model


def memory_bytes() -> int:
    """Return the machine's physical memory in bytes; 2**62 if the system does not report it."""
    if not hasattr(os, "sysconf"):
        return 1 << 62
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]
