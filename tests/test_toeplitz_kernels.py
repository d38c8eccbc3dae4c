"""MD-TPE's kernels, run by Triton in Python or on a GPU: values, states and all gradients."""

import functools
import math
from inspect import unwrap
from unittest.mock import patch

import pytest
import torch

from onescan.ops.backend import use_backend
from onescan.ops.toeplitz_position import ToeplitzState, reference, toeplitz_position

pytest.importorskip("triton")
triton_scan = pytest.importorskip("onescan.ops.toeplitz_position.triton_scan")

run = functools.partial(toeplitz_position, form="scan", backend="triton")
on_every_device = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        ("cpu", torch.float16),
        *(
            pytest.param("cuda", dtype, marks=pytest.mark.gpu)
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
        ),
    ],
)


@pytest.fixture(autouse=True)
def _interpreted_or_on_a_gpu(request):
    is_gpu = request.node.get_closest_marker("gpu") is not None
    if is_gpu != torch.cuda.is_available():
        pytest.skip("kernels are interpreted where there is no GPU")


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch):
    """Short lines have several parts, and few programs, each with several of them."""
    monkeypatch.setattr(triton_scan, "LEAST_SPLIT", 8)
    monkeypatch.setattr(triton_scan, "WARPS", 1)


def inputs(
    shape, *, batch=2, channels=3, width=5, bidirectional=False, state=False, dtype=torch.float32,
    device="cpu",
):  # fmt: skip
    """Tables are float32 and x of the type in question, as under autocast."""

    def normal(*sizes):
        return torch.randn(*sizes, device=device)

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
    wide = {n: x.double() if isinstance(x, torch.Tensor) else x for n, x in named.items()}
    if named["state"] is not None:
        wide["state"] = ToeplitzState(named["state"].hidden.double())
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
    return torch.tensor([(x.double() - y).norm() / (1e-9 + y.norm()) for x, y in pairs])


def assert_no_less_exact_than_torch(named):
    want = outputs_and_gradients(reference.forward, doubled(named))
    plain = outputs_and_gradients(functools.partial(toeplitz_position, backend="torch"), named)
    ours = errors(outputs_and_gradients(run, named), want)
    few_roundings = 4 * torch.finfo(torch.float32).eps  # short sums are exact now and then
    assert (ours <= 2 * errors(plain, want) + few_roundings).all(), (ours, errors(plain, want))


@on_every_device
@pytest.mark.parametrize("tokens", [1, 8, 21])
@pytest.mark.parametrize(("bidirectional", "state"), [(False, False), (False, True), (True, False)])
def test_kernels_are_the_definition_of_a_sequence(tokens, bidirectional, state, device, dtype):
    options = {"bidirectional": bidirectional, "state": state, "dtype": dtype, "device": device}
    assert_no_less_exact_than_torch(inputs((tokens,), **options))


@on_every_device
@pytest.mark.parametrize("shape", [(3, 4), (1, 9), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_kernels_are_the_definition_of_a_grid(shape, bidirectional, device, dtype):
    options = {"bidirectional": bidirectional, "dtype": dtype, "device": device}
    assert_no_less_exact_than_torch(inputs(shape, batch=1, **options))


@pytest.mark.parametrize(("channels", "width"), [(1, 1), (17, 3), (2, 70)])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_any_number_of_channels_and_exponentials(channels, width, bidirectional):
    named = inputs((9,), batch=1, channels=channels, width=width, bidirectional=bidirectional)
    assert_no_less_exact_than_torch(named)


@pytest.mark.parametrize("decay", [0.0, -1e-6, -50.0, -1e4])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_extreme_decays_are_the_definition(decay, bidirectional):
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
    with patch.object(triton_scan, "LEAST_SPLIT", tokens):
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
    named = dict(inputs((5,)), x=torch.ones(0, 5, 3))
    y, state = run(**named)
    assert y.shape == (0, 5, 3)
    assert state.hidden.shape == (0, 3, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"form": "fft"}, "form/backend 'fft/triton' is unknown .* there are: auto/triton, scan"),
        ({"x": torch.ones(2, 6, 3, dtype=torch.float64)}, "backend is 'triton', but kernels take"),
        ({"backend": "tritn"}, "backend 'tritn' is unknown"),
    ],
)
def test_what_has_no_kernel_is_refused(change, message):
    named = {**inputs((6,)), "form": "scan", "backend": "triton", **change}
    with pytest.raises(ValueError, match=message):
        unwrap(toeplitz_position)(**named)


@pytest.mark.parametrize(("bidirectional", "state"), [(False, False), (False, True), (True, False)])
def test_the_op_is_declared_rightly(bidirectional, state):
    named = inputs((9,), bidirectional=bidirectional)
    tables = (named[n] if bidirectional else named[n].unsqueeze(1) for n in ("log_decay", "weight"))
    hidden = torch.randn(2, 3, 5) if state else None
    tensors = (named["x"], *tables, hidden)
    given = (None if x is None else x.clone().requires_grad_() for x in tensors)
    torch.library.opcheck(torch.ops.onescan.toeplitz.default, (*given, [9]))


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
