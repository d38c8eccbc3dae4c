"""Count what a training step does on a GPU, without one: launches, bytes, waits for the device.

python benchmarks/gpu_counts.py                                     all models
python benchmarks/gpu_counts.py --models ldn_base --operators 10    with its largest operators
python benchmarks/gpu_counts.py --budget > tests/kernels/gpu_counts.md  update the tests' budget

Nothing is computed: tensors have a shape, a dtype and a device, but no values (`FakeTensorMode`).
Their device is one that this script registers with torch, with the autocast rules of CUDA. The
counted step is a forward pass and the cross-entropy of its outputs, under bfloat16 autocast, and a
backward pass. Rows marked "decoding" count one token of each sequence, with a state and bfloat16
weights. These are counts, not measurements:

- forward, backward: operators that are not views. An operator in Triton counts as one launch,
  although it may launch several kernels.
- GB: bytes of the arguments and results of these operators. Elements of a broadcast argument count
  once. Nothing is fused.
- float64 GB: the part of it in float64 and complex128.
- kept GB: bytes that the forward pass keeps for the backward pass, without the weights.
- waits: operators for which the host waits for the device. If the shape of a result depends on
  values, counting stops, and the row names the operator.

Softmax attention counts as one operator per pass (flash attention), or, in rows marked "unfused",
as separate operators.
"""

import argparse
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # Triton then loads without a driver; no kernel runs

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import onescan
from onescan import checks
from onescan.kernels.chips import WIDEST_HEAD
from onescan.ops import backend as backends
from onescan.ops.cross_entropy import cross_entropy

DEVICE = "fake_gpu"
MULTIPROCESSORS = 132  # of an H100, which determines how kernels split their work
GB = 1e9
DOCUMENTS = 9  # in each row of packed models
HEADING = ("model", "backend", "forward", "backward", "GB", "float64 GB", "kept GB", "waits")

# fmt: off
NO_LAUNCH = {  # operators that launch nothing
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "diagonal", "empty",
    "empty_like", "empty_strided", "expand", "is_same_size", "lift_fresh", "narrow", "new_empty",
    "new_empty_strided", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unfold", "unsqueeze", "view", "view_as_complex", "view_as_real",
}
HOST_WAITS = {
    "_local_scalar_dense", "_unique2", "equal", "is_nonzero", "item", "masked_select", "nonzero",
    "unique_consecutive", "unique_dim",
}
# CUDA has a kernel for each of these operators, which torch composes of others elsewhere.
FUSED_ON_CUDA = ("_fused_rms_norm", "_fused_rms_norm_backward", "mish_backward", "silu_backward")
# Autocast on CUDA runs operators in LOW_PRECISION in its own dtype, those in WIDEST_DTYPE in the
# widest dtype of their arguments, and all others that it has a rule for in float32.
LOW_PRECISION = {
    "_convolution", "_scaled_dot_product_flash_attention", "addbmm", "addmm", "addmv", "addr",
    "baddbmm", "bmm", "chain_matmul", "conv1d", "conv2d", "conv3d", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution", "einsum",
    "linalg_multi_dot", "linalg_vecdot", "linear", "matmul", "mm", "mv", "prelu",
    "scaled_dot_product_attention",
}
WIDEST_DTYPE = {
    "addcdiv", "addcmul", "atan2", "bilinear", "cat", "cross", "dot", "grid_sampler", "index_put",
    "scatter_add", "stack", "tensordot", "vdot",
}
# fmt: on


class Model(NamedTuple):
    """A preset and its input: images, or rows of tokens."""

    preset: str
    batch_size: int
    tokens: int = 0
    packed: bool = False
    unfused: bool = False
    decoding: bool = False

    @property
    def is_softmax(self) -> bool:
        return self.preset.startswith(("deit", "gpt2"))

    @property
    def label(self) -> str:
        size = f"{self.batch_size} x {self.tokens}" if self.tokens else f"{self.batch_size}"
        flags = {name: getattr(self, name) for name in ("packed", "unfused", "decoding")}
        return ", ".join([self.preset, size, *(name for name, flag in flags.items() if flag)])


MODELS = (
    Model("lightnet_tiny", 256),
    Model("lion_s_tiny", 256),
    Model("deit_tiny", 256),
    Model("deit_tiny", 256, unfused=True),
    Model("lion_s_base", 128),
    Model("lion_lit_base", 128),
    Model("ldn_base", 128),
    Model("deit_base", 128),
    Model("deit_base", 128, unfused=True),
    Model("lightnet_lm_45m", 8, 4096),
    Model("lightnet_lm_45m", 8, 4096, packed=True),
    Model("gpt2_small", 8, 1024),
    Model("gpt2_small", 8, 1024, unfused=True),
    Model("lightnet_lm_45m", 8, 1, decoding=True),
    Model("lion_s_lm_124m", 8, 1, decoding=True),
)
# The budget of tests/kernels/test_budget.py
BUDGET_DEPTH = 2  # except for decoding
BUDGET_MODELS = ("lightnet_tiny", "lion_s_tiny", "ldn_base", "lightnet_lm_45m", "lion_s_lm_124m")


class Operators(TorchDispatchMode):
    """Count launches, bytes and waits of the operators that run inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.bytes, self.float64_bytes, self.waits = 0, 0, 0, 0
        self.bytes_by_name: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        out = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        on_gpu = [x for x in tensors if x.device.type == DEVICE]
        if namespace == "prim" or not on_gpu:  # prim::device reads a property
            return out
        is_copy_between_devices = name in ("_to_copy", "copy_") and len(on_gpu) < len(tensors)
        is_mask_index = name == "index" and any(x.dtype is torch.bool for x in tensors[1:])
        self.waits += name in HOST_WAITS or is_copy_between_devices or is_mask_index
        if name not in NO_LAUNCH:
            wide = (torch.float64, torch.complex128)
            moved_bytes = sum(map(bytes_in_memory, on_gpu))
            self.launches += 1
            self.bytes += moved_bytes
            self.float64_bytes += sum(bytes_in_memory(x) for x in on_gpu if x.dtype in wide)
            self.bytes_by_name[func._schema.name] += moved_bytes
        return out


def bytes_in_memory(x: Tensor) -> int:
    """Return the bytes of a tensor, without the axes along which it is broadcast."""
    sizes = zip(x.shape, x.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) * x.itemsize


@dataclass
class Counts:
    """What a training step does."""

    forward: Operators = field(default_factory=Operators)
    backward: Operators = field(default_factory=Operators)
    kept_bytes: int = 0
    stopped_by: str = ""
    """The operator whose result depends on values, if any."""

    def row(self) -> list[str]:
        """Return the numbers of the table."""
        if self.stopped_by:
            return [f"stops at {self.stopped_by}", *[""] * (len(HEADING) - 3)]
        passes = self.forward, self.backward
        total_bytes, float64_bytes = (
            sum(x.bytes for x in passes),
            sum(x.float64_bytes for x in passes),
        )
        return [
            *(str(x.launches) for x in passes),
            *(f"{size / GB:.3f}" for size in (total_bytes, float64_bytes, self.kept_bytes)),
            str(sum(x.waits for x in passes)),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = list(dict.fromkeys(model.preset for model in MODELS))
    parser.add_argument("--models", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--operators", type=int, default=0, help="list the largest operators")
    parser.add_argument("--depth", type=int, help="number of blocks; by default all")
    parser.add_argument("--budget", action="store_true", help="print tests/kernels/gpu_counts.md")
    args = parser.parse_args()
    if args.budget:
        args.models, args.depth = BUDGET_MODELS, BUDGET_DEPTH
    register_device()
    replace_functions()
    for cells in (HEADING, ["---"] * len(HEADING)):
        print_row(cells)
    for model in (model for model in MODELS if model.preset in args.models):
        for backend in ("torch",) if model.is_softmax else ("torch", "triton"):
            depth = None if args.budget and model.decoding else args.depth
            counts = count(model, backend=backend, depth=depth)
            print_row((model.label, backend, *counts.row()))
            bytes_by_name = counts.forward.bytes_by_name + counts.backward.bytes_by_name
            for name, size in bytes_by_name.most_common(args.operators):
                print(f"    {size / GB:12.3f} GB  {name}")


def print_row(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |".replace("  ", " "), flush=True)


def count(model: Model, *, backend: Any, depth: int | None = None) -> Counts:
    """Count one training step of a model, or one decoding step."""
    config: Any = onescan.preset(model.preset, **({} if depth is None else {"depth": depth}))
    attention = F.scaled_dot_product_attention if model.unfused else flash_attention
    counts = Counts()
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: Tensor) -> Tensor:
        if not isinstance(x, nn.Parameter):
            kept[id(x.untyped_storage())] = x.untyped_storage()  # the value keeps the id unique
        return x

    with (
        FakeTensorMode(),
        onescan.use_backend(backend),
        patch.object(F, "scaled_dot_product_attention", attention),
    ):
        with torch.device(DEVICE), weights_in(torch.bfloat16 if model.decoding else torch.float32):
            built = config.build()
            inputs, options = example(model, config)
            labels = torch.empty(model.batch_size * max(model.tokens, 1), dtype=torch.long)
        if model.decoding:
            with torch.no_grad():
                state = built(*inputs)[1]
                with counts.forward:
                    built(*inputs, state)
            return counts
        saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
        try:
            with counts.forward, torch.autocast(DEVICE, dtype=torch.bfloat16), saved:
                out = built(*inputs, **options)
                logits = (out[0] if isinstance(out, tuple) else out).flatten(0, -2)
                loss = cross_entropy(logits, labels)
            with counts.backward:
                loss.backward()
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            counts.stopped_by = str(error.func)
    counts.kept_bytes = sum(storage.nbytes() for storage in kept.values())
    return counts


@contextmanager
def weights_in(dtype: torch.dtype) -> Iterator[None]:
    """Build models with weights in a dtype; fake tensors cannot be converted by `Module.to`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def example(model: Model, config: Any) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return inputs of a model on the current device."""
    if not model.tokens:
        shape = config.example_inputs()[0].shape
        return (torch.empty(model.batch_size, *shape[1:]),), {}
    tokens = torch.empty(model.batch_size, model.tokens, dtype=torch.long)
    offsets = torch.empty(model.batch_size * DOCUMENTS + 1, dtype=torch.int32)
    return (tokens,), {"cu_seqlens": offsets} if model.packed else {}


# The device


def register_device() -> None:
    """Register the device with torch, for the whole process, with the autocast rules of CUDA.

    It runs the operators of `FUSED_ON_CUDA` as one, because they have a kernel, which never runs.
    """

    class Module(backend_registration._DummyBackendModule):
        def is_available(self) -> bool:
            return False  # otherwise fake tensors would try to copy numbers to it

        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float16]

    backend_registration._setup_privateuseone_for_python_backend(DEVICE, backend_module=Module())
    fallback, rules = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    LIBRARIES.extend((fallback, rules))
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in FUSED_ON_CUDA:
        rules.impl(name, never, "PrivateUse1")
    for full_name in torch._C._dispatch_get_all_op_names():
        if torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "AutocastCUDA"):
            name, _, overload = full_name.removeprefix("aten::").partition(".")
            operator = getattr(getattr(torch.ops.aten, name), overload or "default")
            rules.impl(operator._name, autocast_rule(name, operator), "AutocastPrivateUse1")


def never(*_: Any, **__: Any) -> Any:
    """A kernel that is registered but not run, because tensors have no values."""
    raise AssertionError


LIBRARIES: list[torch.library.Library] = []  # rules exist as long as their library


def autocast_rule(name: str, operator: Any) -> Callable[..., Any]:
    """Return an operator that casts its arguments as autocast on CUDA does."""
    has_dtype_argument = "dtype" in [argument.name for argument in operator._schema.arguments]

    def cast(dtype: torch.dtype, values: Any) -> Any:
        def is_cast(x: Tensor) -> bool:
            return x.is_floating_point() and x.dtype != torch.float64 and x.device.type == DEVICE

        return tree_map_only(Tensor, lambda x: x.to(dtype) if is_cast(x) else x, values)

    def rule(*args: Any, **kwargs: Any) -> Any:
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            if name in LOW_PRECISION:
                args, kwargs = cast(torch.get_autocast_dtype(DEVICE), (args, kwargs))
            elif name in WIDEST_DTYPE:
                tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
                if any(x.dtype is torch.float32 for x in tensors):
                    args, kwargs = cast(torch.float32, (args, kwargs))
            elif not has_dtype_argument:
                args, kwargs = cast(torch.float32, (args, kwargs))
            elif kwargs.get("dtype") is None and args[0].dtype in (torch.bfloat16, torch.float16):
                kwargs = {**kwargs, "dtype": torch.float32}
            return operator(*args, **kwargs)

    return rule


# What depends on the device


def replace_functions() -> None:
    """Replace functions that look at the device or at values, for the whole process."""
    modules = [module for name, module in sys.modules.items() if name.startswith("onescan")]
    for old, new in (
        (checks.is_plain, is_plain),
        (backends.why_no_kernel, why_no_kernel),
        (backends.target_programs, target_programs),
    ):
        for module in modules:  # modules imported later take it from these
            if getattr(module, new.__name__, None) is old:
                setattr(module, new.__name__, new)
    nn.init.trunc_normal_ = lambda x, *_, **__: x


def is_plain(x: Tensor) -> bool:
    """Fake tensors stand for plain ones."""
    return isinstance(x, FakeTensor | nn.Parameter)


def why_no_kernel(*tensors: Tensor | None, widest: int | None = WIDEST_HEAD) -> str | None:
    """The device has kernels."""
    present = [x for x in tensors if x is not None]
    if any(x.dtype is torch.float64 for x in present):
        return "kernels do not take float64"
    if widest is not None and any(x.shape[-1] > widest for x in present):
        return "a head is too wide"
    return None


def target_programs(device: torch.device) -> int:
    """The device is an H100."""
    return 4 * MULTIPROCESSORS


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: None = None, dropout_p: float = 0.0,
    is_causal: bool = False,
) -> Tensor:  # fmt: skip
    """Softmax attention is one operator, as on CUDA."""
    assert attn_mask is None
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return flash(q, k, v, dropout_p, is_causal)[0]


if __name__ == "__main__":
    main()
