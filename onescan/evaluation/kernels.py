"""Check the kernels of the ops on this machine's GPU: errors against float64, and speed.

Values, states and gradients of each op are compared with its reference, for single tokens and odd
lengths, in bfloat16, float16 and float32. An op passes if no error is larger than the tolerance of
the dtype, as a fraction of the largest value of the tensor. The results are recorded in the user's
cache; see `onescan.ops.kernel_record`.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize
from torch.utils.benchmark import Timer

from onescan.checkpoint.files import check_regular, write_atomically
from onescan.checks import in_a_line
from onescan.ops import (
    additive_decay,
    decay_attention,
    delta_rule,
    linear_diffusion,
    lrpe,
    lrpe_angles,
    stable_step,
    toeplitz_position,
    use_backend,
)
from onescan.ops.additive_decay import AdditiveDecayState
from onescan.ops.additive_decay import reference as additive_reference
from onescan.ops.backend import KERNEL_OPS
from onescan.ops.cross_entropy import cross_entropy
from onescan.ops.decay_attention import DecayState, DecayStates
from onescan.ops.decay_attention import reference as decay_reference
from onescan.ops.delta_rule import DeltaState, DeltaStates
from onescan.ops.delta_rule import reference as delta_reference
from onescan.ops.feature_maps import shifted_silu
from onescan.ops.gating import gated
from onescan.ops.kernel_record import read_results, record_path
from onescan.ops.linear_diffusion import DiffusionState
from onescan.ops.linear_diffusion import reference as diffusion_reference
from onescan.ops.lrpe import RotaryPositions

TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 2e-5}
SMALLEST = 0.1  # errors of smaller tensors are fractions of this
# dtypes of the inputs that are not in the dtype of the call
DTYPES = {
    **dict.fromkeys(
        ("angles", "theta", "log_decay", "weight", "weights", "dt", "kv", "k_sum"), torch.float32
    ),
    "log_normalizer": torch.float64,
}
DIFFUSION_RADIUS = 35  # tokens
COPIED_BYTES = 1 << 28  # of the measured copy

Inputs = dict[str, Tensor]
Draw = Callable[..., Tensor]
Run = Callable[[Inputs, Any], Sequence[Tensor]]


class Size(NamedTuple):
    """The size of a call."""

    batch: int
    tokens: int
    heads: int
    width: int


class Call(NamedTuple):
    """A call of an op.

    Attributes:
        run: Returns the outputs for inputs and a backend; those of the reference for None.
        inputs: Draws the inputs of a size; its last argument draws normal numbers of a shape.
        has_gradients: Whether the kernels have gradients.
        fla: Module and name of flash-linear-attention's function for the same call.
    """

    run: Run
    inputs: Callable[[Size, Draw], Inputs]
    has_gradients: bool = True
    fla: tuple[str, str] | None = None


class Speed(NamedTuple):
    """Milliseconds per call; None for what cannot run here.

    Attributes:
        kernels: Of the kernels.
        torch: Of plain torch.
        fla: Of flash-linear-attention, where installed.
        bandwidth: Bytes of all inputs, outputs and gradients per second of the kernels, as a
            fraction of the bandwidth of a copy.
    """

    kernels: float
    torch: float | None
    fla: float | None
    bandwidth: float


@dataclass(kw_only=True)
class KernelCheck:
    """The results of an op."""

    op: str
    errors: dict[torch.dtype, float] = field(default_factory=dict)
    """Largest errors of the kernels."""
    torch_errors: dict[torch.dtype, float] = field(default_factory=dict)
    """Largest errors of plain torch."""
    speeds: dict[str, Speed] = field(default_factory=dict)
    """Speed of the forward pass, and of the forward and backward pass."""
    failure: str = ""
    """Why the op has failed; empty if it has passed."""


SIZES = (Size(2, 1, 2, 64), Size(2, 77, 2, 64), Size(1, 300, 2, 64))
TIMED = Size(4, 4096, 8, 64)
STEP_BATCH = 64  # of a timed step, which has a single token


def check_kernels(
    device: torch.device,
    *,
    sizes: Sequence[Size] = SIZES,
    timed: Size = TIMED,
    dtypes: Sequence[torch.dtype] = tuple(TOLERANCES),
    seconds: float = 0.2,
) -> Iterator[KernelCheck]:
    """Check the kernels of each op of `KERNEL_OPS`.

    Args:
        device: The device to run on.
        sizes: Sizes of the calls that are compared with the reference.
        timed: Size of the calls that are timed, in the first dtype.
        dtypes: Data types of the calls.
        seconds: Minimum duration of each measurement.
    """
    copied = copy_bandwidth(device, seconds)
    for op in KERNEL_OPS:
        check = KernelCheck(op=op)
        try:
            for call in CALLS[op]:
                compare(call, check, device, sizes, dtypes)
            if not check.failure:
                check.speeds = time_call(CALLS[op][0], device, timed, dtypes[0], copied, seconds)
        except Exception as error:  # of any kind: a kernel that does not run has failed
            check.failure = f"{type(error).__name__}: {in_a_line(error)}"
        yield check


def compare(
    call: Call,
    check: KernelCheck,
    device: torch.device,
    sizes: Iterable[Size],
    dtypes: Iterable[torch.dtype],
) -> None:
    """Add the errors of a call to a check; set its failure if one is too large."""
    for size in sizes:
        exact_inputs = draw_inputs(call, size)
        exact = results(call, exact_inputs, None)
        for dtype in dtypes:
            inputs = {
                name: x.to(device, DTYPES.get(name, dtype)) for name, x in exact_inputs.items()
            }
            for backend, errors in (("triton", check.errors), ("torch", check.torch_errors)):
                error = largest_error(results(call, inputs, backend), exact)
                errors[dtype] = max(error, errors.get(dtype, 0.0))
            if check.errors[dtype] > TOLERANCES[dtype]:
                check.failure = (
                    f"the error in {str(dtype).removeprefix('torch.')} is "
                    f"{check.errors[dtype]:.2g}, expected at most {TOLERANCES[dtype]:.2g}"
                )


def draw_inputs(call: Call, size: Size) -> Inputs:
    """Draw inputs in float64, with values that float16 and bfloat16 represent exactly."""
    generator = torch.Generator().manual_seed(size.tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {name: rounded(x) for name, x in call.inputs(size, draw).items()}


def rounded(x: Tensor) -> Tensor:
    """Round numbers to float64 ones that float16 and bfloat16 represent exactly."""
    return x.bfloat16().half().double()


def results(call: Call, inputs: Inputs, backend: Any) -> list[Tensor]:
    """Return the outputs of a call, and the gradients of a random loss with respect to inputs."""
    if not call.has_gradients:
        with torch.no_grad():
            return [*call.run(inputs, backend)]
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    outputs = call.run(leaves, backend)
    generator = torch.Generator().manual_seed(0)
    slopes = [rounded(torch.randn(x.shape, generator=generator)).to(x) for x in outputs]
    gradients = torch.autograd.grad(outputs, [*leaves.values()], slopes, materialize_grads=True)
    return [*outputs, *gradients]


def largest_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest error as a fraction of the largest value of its tensor.

    >>> largest_error([torch.tensor([1.0, 4.0])], [torch.tensor([2.0, 4.0])])
    0.25
    >>> largest_error([torch.tensor(torch.nan)], [torch.tensor(1.0)])
    inf
    """
    errors = []
    for x, expected in zip(found, exact, strict=True):
        largest = expected.detach().abs().max().clamp(min=SMALLEST)
        error = (x.detach().to(expected) - expected.detach()).abs().max() / largest
        errors.append(error.nan_to_num(nan=torch.inf).item())
    return max(errors)


def time_call(
    call: Call,
    device: torch.device,
    size: Size,
    dtype: torch.dtype,
    copied: float,
    seconds: float,
) -> dict[str, Speed]:
    """Time the forward pass of a call and, if the kernels have gradients, both passes together.

    Args:
        call: The call.
        device: The device to run on.
        size: Size of the call; a step has a single token.
        dtype: Data type of the call.
        copied: Bytes per second of a copy.
        seconds: Minimum duration of each measurement.
    """
    if not call.has_gradients:
        size = size._replace(batch=STEP_BATCH, tokens=1)
    drawn = draw_inputs(call, size)
    inputs = {name: x.to(device, DTYPES.get(name, dtype)) for name, x in drawn.items()}
    outputs = call.run(inputs, "triton")
    read, written = (sum(x.nbytes for x in each) for each in (inputs.values(), outputs))
    passes: dict[str, tuple[Callable[..., object], int]] = {
        "forward": (without_gradients, read + written)
    }
    if call.has_gradients:
        passes["forward + backward"] = (results, 3 * read + 2 * written)
    speeds = {}
    for name, (run, moved) in passes.items():
        kernels = milliseconds(partial(run, call, inputs, "triton"), seconds)
        try:
            plain = milliseconds(partial(run, call, inputs, "torch"), seconds)
        except torch.OutOfMemoryError:
            plain = None
        other = fla_call(call, device)
        fla = other and milliseconds(partial(run, other, inputs, None), seconds)
        speeds[name] = Speed(kernels, plain, fla, moved / (kernels / 1000) / copied)
    return speeds


def without_gradients(call: Call, inputs: Inputs, backend: Any) -> None:
    """Compute the outputs of a call without gradients."""
    with torch.no_grad():
        call.run(inputs, backend)


def milliseconds(call: Callable[[], object], seconds: float) -> float:
    """Return the median time of a call; on a GPU, the timer waits for its result."""
    timer = Timer("call()", globals={"call": call})
    return 1000 * timer.blocked_autorange(min_run_time=seconds).median


def copy_bandwidth(device: torch.device, seconds: float) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / (milliseconds(lambda: target.copy_(source), seconds) / 1000)


def fla_call(call: Call, device: torch.device) -> Call | None:
    """Return the same call in flash-linear-attention; None if there is none, or it cannot run."""
    if call.fla is None or device.type != "cuda" or find_spec("fla") is None:
        return None
    kernel = getattr(import_module(call.fla[0]), call.fla[1])

    def run(x: Inputs, _: None) -> Sequence[Tensor]:
        fourth = x["beta"] if "beta" in x else x["log_decay"]
        return (kernel(x["q"], x["k"], x["v"], fourth, scale=1.0)[0],)

    return call._replace(run=run)


def record_checks(gpu: str, checks: Sequence[KernelCheck], here: dict[str, str]) -> Path:
    """Record which ops have passed on a GPU, atomically, and return the file.

    Args:
        gpu: Name of the GPU.
        checks: The results.
        here: The versions they are for, from `onescan.ops.kernel_record.versions`.

    Raises:
        ValueError: If the file is a symbolic link.
        OSError: If the cache cannot be written to.
    """
    path = record_path(here)
    check_regular(path)
    gpus = read_results() | {gpu: {check.op: not check.failure for check in checks}}
    text = json.dumps({**here, "gpus": gpus}, indent=2) + "\n"
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))
    return path


# The calls of each op; the first one is timed.


def _additive(form: Any, *, causal: bool, lrpe: bool, state: bool) -> Call:
    def inputs(size: Size, draw: Draw) -> Inputs:
        features = size.width * (2 if lrpe else 1)
        drawn = {"q": draw(*size), "k": 2 * draw(*size), "v": draw(*size)}
        if lrpe:
            drawn["angles"] = 3 * draw(*size[1:])
        if state:
            drawn["log_normalizer"] = 3 * draw(size.batch, size.heads, size.width)
            drawn["kv"] = draw(size.batch, size.heads, features, size.width)
        return drawn

    def run(x: Inputs, backend: Any) -> Sequence[Tensor]:
        before = AdditiveDecayState(x["log_normalizer"], x["kv"]) if state else None
        op: Any = partial(additive_decay, form=form, backend=backend)
        op = additive_reference.forward if backend is None else op
        o, after = op(x["q"], x["k"], x["v"], angles=x.get("angles"), causal=causal, state=before)
        return o, *after

    return Call(run, inputs, has_gradients=form != "recurrent")


def _additive_step() -> Call:
    """Decode as models do: the kernel applies a feature map and computes angles from positions."""

    def inputs(size: Size, draw: Draw) -> Inputs:
        features = size.heads, size.width
        drawn = {"q": draw(*size), "k": 2 * draw(*size), "v": draw(*size), "theta": draw(*features)}
        drawn["log_normalizer"] = 3 * draw(size.batch, *features)
        return drawn | {"kv": draw(size.batch, size.heads, 2 * size.width, size.width)}

    def run(x: Inputs, backend: Any) -> Sequence[Tensor]:
        o, after = additive_decay(
            *(x[name] for name in ("q", "k", "v")),
            angles=RotaryPositions(x["theta"], 1000),
            feature_map="silu",
            causal=True,
            state=AdditiveDecayState(x["log_normalizer"], x["kv"]),
            form="recurrent",
            backend=backend or "torch",
        )
        assert after is not None
        return o, *after

    return Call(run, inputs, has_gradients=False)


def _decay(
    form: Any, *, causal: bool, diagonal: bool = False, decays: bool = True, state: bool = False
) -> Call:
    def inputs(size: Size, draw: Draw) -> Inputs:
        drawn = {"q": draw(*size).abs(), "k": draw(*size).abs(), "v": draw(*size)}
        if decays:
            drawn["log_decay"] = logsigmoid(2 + 2 * draw(*(size if diagonal else size[:3])))
        if state:
            shape = size.batch, size.heads, size.width
            drawn["kv"], drawn["k_sum"] = draw(*shape, size.width), draw(*shape).abs()
        return drawn

    def run(x: Inputs, backend: Any) -> Sequence[Tensor]:
        before: Any = DecayState(x["kv"], x["k_sum"]) if state else None
        op: Any = partial(decay_attention, form=form, backend=backend)
        op = decay_reference.forward if backend is None else op
        o, after = op(
            *(x.get(name) for name in ("q", "k", "v", "log_decay")),
            causal=causal,
            decay_at="target" if causal else "source",
            normalize="none" if causal else "sum",
            state=before if causal else DecayStates(before, None),
        )
        return (o, *after) if causal else (o, *after[0], *after[1])

    module = "gla" if diagonal else "simple_gla"
    fla = (f"fla.ops.{module}", f"chunk_{module}") if causal and not state else None
    return Call(run, inputs, has_gradients=form != "recurrent", fla=fla)


def _toeplitz(*, bidirectional: bool) -> Call:
    def inputs(size: Size, draw: Draw) -> Inputs:
        channels = size.heads * size.width
        tables = (1, *((2,) if bidirectional else ()), channels, min(size.width, 16))
        x = draw(size.batch, size.tokens, channels)
        return {"x": x, "log_decay": -draw(*tables).exp(), "weight": draw(*tables)}

    def run(x: Inputs, backend: Any) -> Sequence[Tensor]:
        o, after = toeplitz_position(
            x["x"],
            x["log_decay"],
            x["weight"],
            (x["x"].shape[1],),
            bidirectional=bidirectional,
            form="dense" if backend is None else "scan",
            backend=backend or "torch",
        )
        return (o,) if after is None else (o, *after)

    return Call(run, inputs)


def _lrpe() -> Call:
    def inputs(size: Size, draw: Draw) -> Inputs:
        return {"x": draw(*size), "angles": 10 * draw(*size[1:])}

    def run(x: Inputs, backend: Any) -> Sequence[Tensor]:
        return (lrpe(x["x"], x["angles"], backend=backend or "torch"),)

    return Call(run, inputs)


def _lrpe_angles() -> Call:
    def inputs(size: Size, draw: Draw) -> Inputs:
        return {"x": draw(*size), "theta": draw(*size[2:])}

    def run(x: Inputs, backend: Any) -> Sequence[Tensor]:
        with use_backend(backend or "torch"):
            return (lrpe(x["x"], lrpe_angles((x["x"].shape[1],), x["theta"])),)

    return Call(run, inputs)


def _shifted_silu() -> Call:
    def inputs(size: Size, draw: Draw) -> Inputs:
        return {"x": 2 * draw(*size)}

    def run(x: Inputs, backend: Any) -> Sequence[Tensor]:
        return (shifted_silu(x["x"], backend=backend or "torch"),)

    return Call(run, inputs)


def _gated(activation: str) -> Call:
    def inputs(size: Size, draw: Draw) -> Inputs:
        return {"x": draw(*size), "gate": 2 * draw(*size)}

    def run(x: Inputs, backend: Any) -> Sequence[Tensor]:
        return (gated(x["x"], x["gate"], activation, backend=backend or "torch"),)

    return Call(run, inputs)


def _cross_entropy() -> Call:
    def inputs(size: Size, draw: Draw) -> Inputs:
        return {"logits": 2 * draw(size.batch * size.tokens, size.heads * size.width)}

    def run(x: Inputs, backend: Any) -> Sequence[Tensor]:
        rows, classes = x["logits"].shape
        labels = torch.arange(rows, device=x["logits"].device) % classes
        return (cross_entropy(x["logits"], labels, backend=backend or "torch"),)

    return Call(run, inputs)


def _linear_diffusion(*, state: bool) -> Call:
    def inputs(size: Size, draw: Draw) -> Inputs:
        weights = draw(size.heads, 2 * DIFFUSION_RADIUS + 1).abs()
        drawn = {"x": draw(*size), "weights": weights, "dt": 0.9 * stable_step(weights)}
        if state:
            drawn["before"] = draw(size.batch, DIFFUSION_RADIUS, size.heads, size.width)
        return drawn

    def run(x: Inputs, backend: Any) -> Sequence[Tensor]:
        before = None
        if state:
            seen = x["before"].new_ones(x["before"].shape[:2], dtype=torch.bool)
            before = DiffusionState(x["before"], seen)
        op: Any = partial(linear_diffusion, form="banded", backend=backend)
        op = diffusion_reference.forward if backend is None else op
        return (op(x["x"], x["weights"], x["dt"], state=before),)

    return Call(run, inputs)


def _delta_rule(*, causal: bool, decay: bool) -> Call:
    def inputs(size: Size, draw: Draw) -> Inputs:
        drawn = {"q": draw(*size), "k": normalize(draw(*size), dim=-1), "v": draw(*size)}
        drawn["beta"] = draw(*size[:3]).sigmoid()
        if decay:
            drawn["log_decay"] = logsigmoid(2 + 2 * draw(*size[:3]))
            drawn["kv"] = draw(size.batch, size.heads, size.width, size.width)
        return drawn

    def run(x: Inputs, backend: Any) -> Sequence[Tensor]:
        before: Any = DeltaState(x["kv"]) if decay else None
        op: Any = partial(delta_rule, form="chunk", backend=backend)
        op = delta_reference.forward if backend is None else op
        o, after = op(
            *(x[name] for name in ("q", "k", "v", "beta")),
            x.get("log_decay"),
            causal=causal,
            state=before if causal else DeltaStates(before, None),
        )
        return (o, *after) if causal else (o, *after[0], *after[1])

    fla = ("fla.ops.delta_rule", "chunk_delta_rule") if causal and not decay else None
    return Call(run, inputs, fla=fla)


CALLS: dict[str, tuple[Call, ...]] = {
    "additive_decay.one_scan": (
        _additive("one_scan", causal=False, lrpe=True, state=False),
        _additive("one_scan", causal=False, lrpe=False, state=True),
    ),
    "additive_decay.chunk": (
        _additive("chunk", causal=True, lrpe=True, state=False),
        _additive("chunk", causal=True, lrpe=False, state=True),
    ),
    "additive_decay.recurrent": (
        _additive_step(),
        _additive("recurrent", causal=True, lrpe=True, state=True),
        _additive("recurrent", causal=True, lrpe=False, state=False),
    ),
    "decay_attention.scalar": (
        _decay("chunk", causal=True),
        _decay("chunk", causal=False, state=True),
        _decay("recurrent", causal=True, state=True),
    ),
    "decay_attention.diagonal": (
        _decay("chunk", diagonal=True, causal=True),
        _decay("chunk", diagonal=True, causal=False, state=True),
        _decay("recurrent", diagonal=True, causal=True, state=True),
    ),
    "decay_attention.no_decay": (
        _decay("chunk", causal=False, decays=False),
        _decay("chunk", causal=False, decays=False, state=True),
    ),
    "toeplitz_position": (_toeplitz(bidirectional=False), _toeplitz(bidirectional=True)),
    "lrpe": (_lrpe(), _lrpe_angles()),
    "shifted_silu": (_shifted_silu(),),
    "gated": (_gated("silu"), _gated("sigmoid")),
    "cross_entropy": (_cross_entropy(),),
    "linear_diffusion": (_linear_diffusion(state=False), _linear_diffusion(state=True)),
    "delta_rule": (
        _delta_rule(causal=True, decay=False),
        _delta_rule(causal=True, decay=True),
        _delta_rule(causal=False, decay=True),
    ),
}
