"""MD-TPE's kernels, run by Triton in Python or on a GPU: values, states and all gradients."""

import functools
import itertools
import math
from inspect import unwrap
from unittest.mock import patch

import pytest
import torch
from kernel_device import (
    BRAIN,
    DEVICE,
    LONGEST,
    MARKS,
    SINGLE,
    assert_a_graph_repeats,
    drawn,
    over_dtypes,
    over_seeds,
)

from onescan.ops import packing as packings
from onescan.ops.backend import use_backend
from onescan.ops.packing import Packing
from onescan.ops.toeplitz_position import ToeplitzState, reference, toeplitz_position

pytest.importorskip("triton")
launch = pytest.importorskip("onescan.ops.toeplitz_position.launch")

run = functools.partial(toeplitz_position, form="scan", backend="triton")
pytestmark = MARKS


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch):
    """Short lines have several parts, and few programs, each with several of them."""
    monkeypatch.setattr(launch, "MIN_SPLIT", 8)
    monkeypatch.setattr(launch, "WARPS", 1)
    monkeypatch.setattr(launch, "target_programs", lambda _: 4)


def inputs(
    shape, *, batch=2, channels=3, width=5, bidirectional=False, state=False, dtype=SINGLE
):  # fmt: skip
    """Tables are float32 and x of the type in question, as under autocast."""

    def normal(*sizes):
        return torch.randn(*sizes).to(DEVICE)

    sizes = (len(shape), *([2] if bidirectional else []), channels, width)
    return {
        "x": normal(batch, math.prod(shape), channels).to(dtype),
        "log_decay": -normal(*sizes).exp(),
        "weight": normal(*sizes),
        "shape": shape,
        "bidirectional": bidirectional,
        "state": ToeplitzState(normal(batch, channels, width)) if state else None,
    }


def doubled(named):
    """The same in float64, on a CPU."""
    wide = {n: x.double().cpu() if isinstance(x, torch.Tensor) else x for n, x in named.items()}
    if named["state"] is not None:
        wide["state"] = ToeplitzState(named["state"].hidden.double().cpu())
    return wide


def outputs_and_gradients(function, named):
    """Outputs, then the gradients of x, log_decay, weight and of the state before."""
    tensors = [named[n].detach().clone().requires_grad_() for n in ("x", "log_decay", "weight")]
    changed = dict(named, **dict(zip(("x", "log_decay", "weight"), tensors, strict=True)))
    if named["state"] is not None:
        tensors.append(named["state"].hidden.detach().clone().requires_grad_())
        changed["state"] = ToeplitzState(tensors[-1])
    y, after = function(**changed)
    outputs = [y] if after is None else [y, after.hidden]
    generator = torch.Generator().manual_seed(3)
    # slopes that float16 and bfloat16 have exactly
    slopes = [torch.randint(-8, 9, x.shape, generator=generator).to(x) / 8 for x in outputs]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, tensors, slopes)]


def errors(got, want):
    pairs = zip(got, want, strict=True)
    return torch.tensor([(x.double().cpu() - y).norm() / (1e-9 + y.norm()) for x, y in pairs])


def assert_no_less_exact_than_torch(named, definition=reference.forward):
    want = outputs_and_gradients(definition, doubled(named))
    plain = outputs_and_gradients(functools.partial(toeplitz_position, backend="torch"), named)
    ours = errors(outputs_and_gradients(run, named), want)
    few_roundings = 4 * torch.finfo(torch.float32).eps  # short sums are exact now and then
    assert (ours <= 2 * errors(plain, want) + few_roundings).all(), (ours, errors(plain, want))


@pytest.mark.sampled(2)
@over_dtypes
@pytest.mark.parametrize("tokens", [1, 8, 21])
@pytest.mark.parametrize(("bidirectional", "state"), [(False, False), (False, True), (True, False)])
def test_kernels_match_the_reference_of_a_sequence(tokens, bidirectional, state, dtype):
    options = {"bidirectional": bidirectional, "state": state, "dtype": dtype}
    assert_no_less_exact_than_torch(inputs((tokens,), **options))


@pytest.mark.sampled
@over_dtypes
@pytest.mark.parametrize("shape", [(3, 4), (1, 9), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_kernels_match_the_reference_of_a_grid(shape, bidirectional, dtype):
    options = {"bidirectional": bidirectional, "dtype": dtype}
    assert_no_less_exact_than_torch(inputs(shape, batch=1, **options))


# axes, channels, width, both directions: few, as kernels are compiled anew for each
BUILDS = [(1, 33, 1, False), (2, 3, 5, True), (1, 40, 16, True), (1, 17, 70, False)]


@pytest.mark.sampled
@over_dtypes
@over_seeds
def test_random_shapes(seed, dtype, monkeypatch):
    axes, channels, width, bidirectional = BUILDS[seed % len(BUILDS)]
    longest = LONGEST if axes == 1 else LONGEST // 8
    batch, *shape = drawn(seed, 4, *[longest] * axes)
    options = {"channels": channels, "width": width, "bidirectional": bidirectional}
    state = axes == 1 and not bidirectional
    named = inputs(tuple(shape), batch=batch, state=state, dtype=dtype, **options)
    if seed // len(BUILDS) % 2:
        monkeypatch.undo()  # parts as they are cut for a GPU
    dense = functools.partial(toeplitz_position, form="dense", backend="torch")
    assert_no_less_exact_than_torch(named, dense)


@pytest.mark.gpu
def test_a_cuda_graph_repeats_a_call():
    named = inputs((30,), channels=40, width=16, dtype=BRAIN)
    assert_a_graph_repeats(lambda: run(**named)[0])


@pytest.mark.sampled
@pytest.mark.parametrize(("channels", "width"), [(1, 1), (17, 3), (2, 70)])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_any_number_of_channels_and_exponentials(channels, width, bidirectional):
    named = inputs((9,), batch=1, channels=channels, width=width, bidirectional=bidirectional)
    assert_no_less_exact_than_torch(named)


@pytest.mark.sampled
@pytest.mark.parametrize("decay", [0.0, -1e-6, -50.0, -1e4])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_extreme_decays_match_the_reference(decay, bidirectional):
    named = inputs((17,), batch=1, bidirectional=bidirectional, state=not bidirectional)
    named["log_decay"][..., 1:] = decay
    assert_no_less_exact_than_torch(named)


def test_rounded_decays_do_not_drift():
    """What is left of a token is wrong by a few roundings, not by one a step."""
    tokens, channels = 400, 16
    named = inputs((tokens,), batch=1, channels=channels, width=1)
    named["x"] = (torch.arange(tokens) == 0).float().view(1, tokens, 1).repeat(1, 1, channels)
    named["log_decay"] = -torch.logspace(-4, -3, channels).view(1, channels, 1)
    named["weight"] = torch.ones(1, channels, 1)
    named = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in named.items()}
    with patch.object(launch, "MIN_SPLIT", tokens):
        y, _ = run(**named)
    want = (named["log_decay"].double() * (tokens - 1)).exp().view(channels)
    # a rounding at each step, of either sign, and no sum of the same one
    roundings = 2 * tokens**0.5 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(y[0, -1].double(), want, rtol=roundings, atol=0)


def test_two_calls_equal_one_wherever_it_is_cut():
    named = inputs((11,), state=True)
    y, after = run(**named)
    for cut in (1, 4, 8, 10):
        first, state = run(**dict(named, x=named["x"][:, :cut], shape=(cut,)))
        rest = dict(named, x=named["x"][:, cut:], shape=(11 - cut,), state=state)
        second, last = run(**rest)
        torch.testing.assert_close(torch.cat([first, second], dim=1), y)
        torch.testing.assert_close(last.hidden, after.hidden)


@pytest.mark.parametrize("read", [0, 1], ids=["outputs", "state"])
def test_a_loss_may_depend_on_outputs_or_the_state_alone(read):
    named = inputs((20,), batch=1, state=True)

    def gradients(function):
        leaves = [named[n].clone().requires_grad_() for n in ("x", "log_decay", "weight")]
        hidden = named["state"].hidden.clone().requires_grad_()
        named_leaves = dict(zip(("x", "log_decay", "weight"), leaves, strict=True))
        y, after = function(**{**named, **named_leaves, "state": ToeplitzState(hidden)})
        total = (y, after.hidden)[read].square().sum()
        return torch.autograd.grad(total, [*leaves, hidden], materialize_grads=True)

    plain = functools.partial(toeplitz_position, form="scan", backend="torch")
    torch.testing.assert_close(gradients(run), gradients(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("form", ["auto", "scan"])
def test_the_preferred_backend_is_taken(form):
    named = inputs((5,), channels=300, width=2)  # wider than a head may be
    want, _ = run(**named)
    with use_backend("triton"):
        got, _ = toeplitz_position(**named, form=form)
        other, _ = toeplitz_position(**named, form="dense")  # in torch, as there is no kernel
    assert torch.equal(got, want)
    torch.testing.assert_close(other, want)


def test_no_sequences_give_no_outputs():
    named = dict(inputs((5,)), x=torch.ones(0, 5, 3, device=DEVICE))
    y, state = run(**named)
    assert y.shape == (0, 5, 3)
    assert state.hidden.shape == (0, 3, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"form": "fft"},
            "backend is 'triton', which does not support form 'fft'; available: auto/tri",
        ),
        ({"dtype": torch.float64}, "backend is 'triton', but kernels take"),
        ({"backend": "tritn"}, "backend 'tritn' is unknown"),
    ],
)
def test_unsupported_calls_are_refused(change, message):
    options = {"form": "scan", "backend": "triton", **change}
    named = inputs((6,), dtype=options.pop("dtype", SINGLE)) | options
    with pytest.raises(ValueError, match=message):
        unwrap(toeplitz_position)(**named)


# offsets of two rows of 30 tokens: sequences of one token, of no token, and of several parts
CU_SEQLENS = torch.tensor([0, 1, 1, 12, 30, 30, 55, 60], dtype=torch.int32)


def separately(x, *, state, shape, **others):
    """The reference, for each packed sequence on its own."""
    parts = [
        x.flatten(0, 1)[a:b][None] for a, b in itertools.pairwise(CU_SEQLENS.tolist()) if b > a
    ]
    mixed = [reference.forward(y, shape=y.shape[1:2], state=state, **others)[0] for y in parts]
    return torch.cat(mixed, dim=1).view_as(x), None


@pytest.mark.sampled
@over_dtypes
@pytest.mark.parametrize(
    ("bidirectional", "width", "looks"), [(False, 5, True), (True, 5, False), (False, 70, False)]
)
def test_packed_sequences_do_not_mix(bidirectional, width, looks, dtype):
    """Without a look at the offsets, there are as many parts as ever needed, some of them empty."""
    named = inputs((30,), width=width, bidirectional=bidirectional, dtype=dtype)
    want = outputs_and_gradients(separately, doubled(named))
    results = []
    for backend in ("triton", "torch"):
        packing = Packing(CU_SEQLENS, batch=2, tokens=30, device=torch.device(DEVICE))
        call = functools.partial(toeplitz_position, backend=backend, cu_seqlens=packing)
        with patch.object(packings, "can_look_at_values", lambda _: looks):
            results.append(errors(outputs_and_gradients(call, named), want))
    few_roundings = 4 * torch.finfo(torch.float32).eps
    assert (results[0] <= 2 * results[1] + few_roundings).all(), results


@pytest.mark.sampled
@pytest.mark.parametrize(("bidirectional", "state"), [(False, False), (False, True), (True, False)])
def test_the_op_is_declared_rightly(bidirectional, state):
    named = inputs((9,), bidirectional=bidirectional)
    tables = (named[n] if bidirectional else named[n].unsqueeze(1) for n in ("log_decay", "weight"))
    hidden = torch.randn(2, 3, 5).to(DEVICE) if state else None
    tensors = (named["x"], *tables, hidden)
    given = (None if x is None else x.clone().requires_grad_() for x in tensors)
    packing = Packing(torch.tensor([0, 3, 9, 18]), batch=2, tokens=9)
    spans = packing.spans(4)[0].to(DEVICE) if bidirectional else None
    torch.library.opcheck(torch.ops.onescan.toeplitz.default, (*given, [9], spans, 4))


@pytest.mark.compile
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    ("shape", "options"),
    [((9,), {"state": True}), ((3, 4), {"bidirectional": True})],
    ids=["sequence", "grid"],
)
def test_compiles_without_a_graph_break(shape, options, dynamic):
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    named = inputs(shape, **options)
    got, want = (outputs_and_gradients(function, named) for function in (compiled, run))
    torch.testing.assert_close(got, want)
