"""What runs an op: plain torch, anywhere, or kernels in Triton, where there is a GPU for them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onescan.checks import check_choice
from onescan.kernels.chips import WIDEST_HEAD

Backend = Literal["auto", "torch", "triton"]

BACKENDS = ("auto", "torch", "triton")

# GPUs, as torch.cuda.get_device_name has them, on which `make gpu` has passed. On others "auto" is
# torch: compilers have turned right kernels into wrong ones on a chip of their own before.
PROVEN: frozenset[str] = frozenset()

_preferred = "auto"


@contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Let "auto" mean one backend, in all ops and so in whole models.

    "triton" is taken by every call that it can run, also on a GPU where "auto" would not; the
    others run on torch. For the whole process, not one thread alone. What is computed again in
    the backward (activation checkpointing) is to be inside too.

    Raises:
        ValueError: there is no such backend.

    >>> with use_backend("torch"):
    ...     preferred_backend()
    'torch'
    """
    global _preferred
    check_choice("backend", backend, BACKENDS)
    before, _preferred = _preferred, backend
    try:
        yield
    finally:
        _preferred = before


def preferred_backend() -> str:
    """What "auto" means at present; "auto" itself where `use_backend` was not called."""
    return _preferred


def resolved_backend(
    backend: str, has_kernel: bool, *tensors: Tensor | None, widest: int | None = WIDEST_HEAD
) -> str:
    """The backend of a call, "torch" or "triton".

    Args:
        backend: what was asked for.
        has_kernel: whether there is a kernel of the form in question.
        tensors: what it would run on.
        widest: channels that their last axis may have at most; None is any.

    Raises:
        ValueError: there is no such backend, or a kernel was asked for that cannot run.
    """
    check_choice("backend", backend, BACKENDS)
    if backend == "triton":
        obstacle = why_no_kernel(*tensors, widest=widest)
        if obstacle and has_kernel:  # where there is no kernel, the table of forms says so
            raise ValueError(f"backend is 'triton', but {obstacle}")
        return backend
    if backend == "torch" or _preferred == "torch" or not has_kernel:
        return "torch"
    if _preferred == "auto" and not _is_proven(tensors):
        return "torch"
    return "torch" if why_no_kernel(*tensors, widest=widest) else "triton"


def why_no_kernel(*tensors: Tensor | None, widest: int | None = WIDEST_HEAD) -> str | None:
    """What keeps kernels from running on these tensors; None where nothing does."""
    given = [x for x in tensors if x is not None]
    if find_spec("triton") is None:
        return "triton is not installed: pip install 'onescan[gpu]'"
    if _is_transformed(given):
        return "kernels have gradients alone: no torch.func, and no derivatives forward"
    for x in given:
        if is_interpreted() and x.dtype is torch.bfloat16:
            return "interpreted kernels take float32 or float16, and got torch.bfloat16"
        if x.device.type != "cuda" and not is_interpreted():
            return f"tensors are on {x.device}, expected a GPU"
        if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"kernels take float32, bfloat16 or float16, and got {x.dtype}"
        if widest is not None and x.shape[-1] > widest:
            return f"a head has {x.shape[-1]} channels, expected at most {widest}"
    return None


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether any of these is to have a gradient."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _is_transformed(tensors: list[Tensor]) -> bool:
    """Whether anything but plain gradients may be asked for."""
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or any(
        torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors
    )


def is_interpreted() -> bool:
    """Whether Triton runs kernels in Python, on any tensors: TRITON_INTERPRET=1, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _is_proven(tensors: tuple[Tensor | None, ...]) -> bool:
    devices = {x.device for x in tensors if x is not None}
    # of properties and not by get_device_name, which no compiler can trace
    return all(
        x.type == "cuda" and torch.cuda.get_device_properties(x).name in PROVEN for x in devices
    )
