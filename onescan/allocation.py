"""Building a model only where it fits: counted on the meta device, before anything is allocated."""

import os

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from onescan.configs import ModelConfig

MOST_TENSORS = 20_000  # of a model: more are a mistake, and take minutes to build
GIB = 1 << 30


def build_model(config: ModelConfig) -> nn.Module:
    """Build a model, if it fits into this machine's memory.

    Raises:
        ValueError: it does not, with both sizes; or the config is refused.
    """
    build_on_meta(config)
    return build_here(config)


def build_here(config: ModelConfig) -> nn.Module:
    """Build a model whose size is known.

    Raises:
        ValueError: the config is refused, or torch has no tensors of such sizes.
    """
    try:
        model: nn.Module = config.build()
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:
        raise ValueError(f"the model cannot be built: {_first_line(error)}") from error
    return model


def build_on_meta(config: ModelConfig, *, most_tensors: int | None = None) -> nn.Module | None:
    """Build a model without allocating its weights.

    Args:
        config: the model's.
        most_tensors: how many parameters and buffers it may have; None is `MOST_TENSORS`.

    Returns:
        The model, or None for a model that the meta device cannot build.

    Raises:
        ValueError: it has more tensors, or needs more than this machine's memory.
    """
    most = MOST_TENSORS if most_tensors is None else most_tensors
    count = size = 0

    def add(_module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal count, size
        if tensor is None or not tensor.is_meta:
            return
        count, size = count + 1, size + tensor.numel() * tensor.element_size()
        if count > most:
            raise ValueError(f"the model has more than {most:,} tensors, as {name}, expected fewer")
        if size > memory_bytes():
            raise ValueError(
                f"the model needs more than {size / GIB:,.1f} GiB, and this machine has "
                f"{memory_bytes() / GIB:,.1f} GiB of memory"
            )

    hooks = [
        register_module_parameter_registration_hook(add),
        register_module_buffer_registration_hook(add),
    ]
    try:
        with torch.device("meta"):
            model: nn.Module = config.build()
    except (RuntimeError, OverflowError, TypeError):  # such as reading a tensor's values
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return model


def memory_bytes() -> int:
    """The machine's memory; without a limit where the system does not say."""
    if not hasattr(os, "sysconf"):
        return 1 << 62
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]
