"""Calls of each op that has kernels, with float64 references: what benchmarks/gpu.py checks.

Values, states and gradients of each call are compared with the reference of its op, for single
tokens, odd lengths and several widths of heads, with and without masks, states and packed
sequences. A call passes if no error is larger than the tolerance of its dtype, as a fraction of the
largest value of the tensor.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

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
from onescan.ops.cross_entropy import cross_entropy
from onescan.ops.decay_attention import DecayState, DecayStates
from onescan.ops.decay_attention import reference as decay_reference
from onescan.ops.delta_rule import DeltaState, DeltaStates
from onescan.ops.delta_rule import reference as delta_reference
from onescan.ops.feature_maps import shifted_silu
from onescan.ops.gating import gated
from onescan.ops.linear_diffusion import DiffusionState
from onescan.ops.linear_diffusion import reference as diffusion_reference
from onescan.ops.lrpe import RotaryPositions

# In float32, GPUs compute exponentials and quotients less accurately than torch on a CPU.
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

Inputs = dict[str, Tensor]
Draw = Callable[..., Tensor]
Run = Callable[[Inputs, Any], Sequence[Tensor]]


class Size(NamedTuple):
    """The size of a call."""

    batch: int
    tokens: int
    heads: int
    width: int


# Heads and their width are constants of kernels, which are compiled anew for each other pair.
SIZES = (Size(2, 1, 2, 64), Size(2, 77, 2, 64), Size(1, 300, 2, 64))
WIDE_SIZES = (Size(1, 257, 2, 128),)
ODD_SIZES = (Size(2, 65, 2, 96),)


class Call(NamedTuple):
    """A call of an op.

    Attributes:
        run: Returns the outputs for inputs and a backend; those of the reference for None.
        inputs: Draws the inputs of a size; its last argument draws normal numbers of a shape.
        has_gradients: Whether the kernels have gradients.
    """

    run: Run
    inputs: Callable[[Size, Draw], Inputs]
    has_gradients: bool = True


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
    output_gradients = [rounded(torch.randn(x.shape, generator=generator)).to(x) for x in outputs]
    gradients = torch.autograd.grad(
        outputs, [*leaves.values()], output_gradients, materialize_grads=True
    )
    return [*outputs, *gradients]


def largest_error(outputs: Sequence[Tensor], references: Sequence[Tensor]) -> float:
    """Return the largest error as a fraction of the largest value of its tensor.

    >>> largest_error([torch.tensor([1.0, 4.0])], [torch.tensor([2.0, 4.0])])
    0.25
    >>> largest_error([torch.tensor(torch.nan)], [torch.tensor(1.0)])
    inf
    """
    errors = []
    for x, expected in zip(outputs, references, strict=True):
        largest = expected.detach().abs().max().clamp(min=SMALLEST)
        error = (x.detach().to(expected) - expected.detach()).abs().max() / largest
        errors.append(error.nan_to_num(nan=torch.inf).item())
    return max(errors)


# Masks and packed sequences


def keep_of(x: Tensor) -> Tensor:
    """Return a mask of tokens [B, T] for x [B, T, ...]: every fifth token is padding."""
    batch, tokens = x.shape[:2]
    return (torch.arange(1, batch * tokens + 1, device=x.device) % 5 > 0).view(batch, tokens)


def offsets_of(tokens: int) -> list[int]:
    """Return where the sequences of a row begin and end: one is a single token."""
    return sorted({0, tokens // 3, tokens // 3 + 1, tokens})


def packed_offsets(x: Tensor) -> Tensor:
    """Return the offsets of the sequences of all rows of x [B, T, ...], on the CPU."""
    batch, tokens = x.shape[:2]
    starts = [row * tokens + at for row in range(batch) for at in offsets_of(tokens)[:-1]]
    return torch.tensor([*starts, batch * tokens], dtype=torch.int32)


def over_sequences(op: Callable[..., tuple[Tensor, Any]], *tensors: Tensor) -> Tensor:
    """Apply a reference to each sequence of a batch of packed rows, [B, T, ...]."""
    rows = []
    for row in range(len(tensors[0])):
        parts = [
            op(*(x[row : row + 1, start:stop] for x in tensors))[0]
            for start, stop in pairwise(offsets_of(tensors[0].shape[1]))
        ]
        rows.append(torch.cat(parts, dim=1))
    return torch.cat(rows)


# The calls of each op


def _additive(
    form: Any,
    *,
    causal: bool,
    lrpe: bool = False,
    state: bool = False,
    keep: bool = False,
    packed: bool = False,
) -> Call:
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
        tokens = x["q"], x["k"], x["v"]
        if packed and backend is None:
            return (over_sequences(partial(additive_reference.forward, causal=causal), *tokens),)
        op: Any = partial(additive_decay, form=form, backend=backend)
        op = additive_reference.forward if backend is None else op
        options: dict[str, Any] = {"keep": keep_of(x["q"])} if keep else {}
        options |= {"cu_seqlens": packed_offsets(x["q"])} if packed else {"state": before}
        o, after = op(*tokens, angles=x.get("angles"), causal=causal, **options)
        return (o,) if packed else (o, *after)

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
    form: Any,
    *,
    causal: bool,
    diagonal: bool = False,
    decays: bool = True,
    state: bool = False,
    keep: bool = False,
    packed: bool = False,
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
        tokens = [x[name] for name in ("q", "k", "v", "log_decay") if name in x]
        options: dict[str, Any] = {
            "causal": causal,
            "decay_at": "target" if causal else "source",
            "normalize": "none" if causal else "sum",
        }
        if packed and backend is None:
            return (over_sequences(partial(decay_reference.forward, **options), *tokens),)
        options |= {"keep": keep_of(x["q"])} if keep else {}
        if packed:
            options["cu_seqlens"] = packed_offsets(x["q"])
        else:
            options["state"] = before if causal else DecayStates(before, None)
        op: Any = partial(decay_attention, form=form, backend=backend)
        op = decay_reference.forward if backend is None else op
        o, after = op(*tokens, **options)
        if packed:
            return (o,)
        return (o, *after) if causal else (o, *after[0], *after[1])

    return Call(run, inputs, has_gradients=form != "recurrent")


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


def _delta_rule(
    *, causal: bool, decay: bool = False, keep: bool = False, packed: bool = False
) -> Call:
    def inputs(size: Size, draw: Draw) -> Inputs:
        drawn = {"q": draw(*size), "k": normalize(draw(*size), dim=-1), "v": draw(*size)}
        drawn["beta"] = draw(*size[:3]).sigmoid()
        if decay:
            drawn["log_decay"] = logsigmoid(2 + 2 * draw(*size[:3]))
        if decay and not packed:
            drawn["kv"] = draw(size.batch, size.heads, size.width, size.width)
        return drawn

    def run(x: Inputs, backend: Any) -> Sequence[Tensor]:
        before: Any = DeltaState(x["kv"]) if "kv" in x else None
        tokens = [x[name] for name in ("q", "k", "v", "beta", "log_decay") if name in x]
        if packed and backend is None:
            return (over_sequences(partial(delta_reference.forward, causal=causal), *tokens),)
        options: dict[str, Any] = {"keep": keep_of(x["q"])} if keep else {}
        if packed:
            options["cu_seqlens"] = packed_offsets(x["q"])
        else:
            options["state"] = before if causal else DeltaStates(before, None)
        op: Any = partial(delta_rule, form="chunk", backend=backend)
        op = delta_reference.forward if backend is None else op
        o, after = op(*tokens, causal=causal, **options)
        if packed:
            return (o,)
        return (o, *after) if causal else (o, *after[0], *after[1])

    return Call(run, inputs)


CALLS: dict[str, dict[str, Call]] = {
    "additive_decay.one_scan": {
        "lrpe": _additive("one_scan", causal=False, lrpe=True),
        "state": _additive("one_scan", causal=False, state=True),
        "keep": _additive("one_scan", causal=False, lrpe=True, keep=True),
        "packed": _additive("one_scan", causal=False, packed=True),
    },
    "additive_decay.chunk": {
        "lrpe": _additive("chunk", causal=True, lrpe=True),
        "state": _additive("chunk", causal=True, state=True),
        "keep": _additive("chunk", causal=True, lrpe=True, keep=True),
        "packed": _additive("chunk", causal=True, packed=True),
    },
    "additive_decay.recurrent": {
        "step": _additive_step(),
        "lrpe, state": _additive("recurrent", causal=True, lrpe=True, state=True),
        "plain": _additive("recurrent", causal=True),
    },
    "decay_attention.scalar": {
        "causal": _decay("chunk", causal=True),
        "both, state": _decay("chunk", causal=False, state=True),
        "both, keep": _decay("chunk", causal=False, keep=True),
        "both, packed": _decay("chunk", causal=False, packed=True),
        "step": _decay("recurrent", causal=True, state=True),
    },
    "decay_attention.diagonal": {
        "causal": _decay("chunk", diagonal=True, causal=True),
        "both, state": _decay("chunk", diagonal=True, causal=False, state=True),
        "both, keep": _decay("chunk", diagonal=True, causal=False, keep=True),
        "both, packed": _decay("chunk", diagonal=True, causal=False, packed=True),
        "step": _decay("recurrent", diagonal=True, causal=True, state=True),
    },
    "decay_attention.no_decay": {
        "both": _decay("chunk", causal=False, decays=False),
        "both, state": _decay("chunk", causal=False, decays=False, state=True),
    },
    "toeplitz_position": {
        "causal": _toeplitz(bidirectional=False),
        "both": _toeplitz(bidirectional=True),
    },
    "lrpe": {"given angles": _lrpe(), "computed angles": _lrpe_angles()},
    "shifted_silu": {"": _shifted_silu()},
    "gated": {"silu": _gated("silu"), "sigmoid": _gated("sigmoid")},
    "cross_entropy": {"": _cross_entropy()},
    "linear_diffusion": {
        "": _linear_diffusion(state=False),
        "state": _linear_diffusion(state=True),
    },
    "delta_rule": {
        "causal": _delta_rule(causal=True),
        "causal, decay, state": _delta_rule(causal=True, decay=True),
        "both, decay, state": _delta_rule(causal=False, decay=True),
        "both, keep": _delta_rule(causal=False, keep=True),
        "causal, packed": _delta_rule(causal=True, packed=True),
    },
}
