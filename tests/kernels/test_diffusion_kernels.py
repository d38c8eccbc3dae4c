"""LDN's explicit step in kernels, run by Triton in Python or on a GPU: values and gradients."""

from functools import partial
from inspect import unwrap

import pytest
import torch
from kernel_device import (
    BRAIN,
    DEVICE,
    LONGEST,
    MARKS,
    SINGLE,
    assert_a_graph_repeats,
    assert_errors_like_torch,
    drawn,
    over_dtypes,
    over_seeds,
)

from onescan.ops.backend import use_backend
from onescan.ops.linear_diffusion import DiffusionState, linear_diffusion, next_state, reference

pytest.importorskip("triton")
launch = pytest.importorskip("onescan.ops.linear_diffusion.launch")

run = partial(linear_diffusion, backend="triton")
plain = partial(linear_diffusion, form="banded", backend="torch")
pytestmark = MARKS


def inputs(
    tokens, radius, *, batch=2, heads=2, width=3, keep=False, state=False, causal=False,
    dtype=SINGLE,
):  # fmt: skip
    """Weights and step sizes are float32 and tokens of the dtype in question, as under autocast."""

    def normal(*sizes):
        return torch.randn(*sizes).to(DEVICE)

    weights = normal(heads, 2 * radius + 1).abs()
    if causal:
        weights[:, :radius] = 0
    named = {
        "x": normal(batch, tokens, heads, width).to(dtype),
        "weights": weights,
        "dt": torch.rand(heads).to(DEVICE) / weights.sum(1),
    }
    if keep:
        named["keep"] = (torch.rand(batch, tokens) < 0.6).to(DEVICE)
    if state:
        seen = (torch.rand(batch, radius) < 0.7).to(DEVICE)
        named["state"] = DiffusionState(normal(batch, radius, heads, width).to(dtype), seen)
    return named


def doubled(named):
    """The same in float64, on a CPU."""

    def wide(x):
        return x.double().cpu() if x.is_floating_point() else x.cpu()

    return {n: type(x)(*map(wide, x)) if n == "state" else wide(x) for n, x in named.items()}


def outputs_and_gradients(function, named):
    """Outputs, then the gradients of x, weights, dt and the state's tokens, in float64."""
    tensors = {n: named[n].detach().clone().requires_grad_() for n in ("x", "weights", "dt")}
    given = named | tensors
    if "state" in named:
        tensors["state"] = named["state"].x.detach().clone().requires_grad_()
        given["state"] = named["state"]._replace(x=tensors["state"])
    y = function(**given)
    generator = torch.Generator().manual_seed(3)
    # slopes that float16 and bfloat16 have exactly
    slope = torch.randint(-8, 9, y.shape, generator=generator).to(y) / 8
    found = torch.autograd.grad(y, [*tensors.values()], slope, materialize_grads=True)
    return [x.detach().double().cpu() for x in (y, *found)]


def assert_no_less_exact_than_torch(named, definition=reference.forward):
    exact = outputs_and_gradients(definition, doubled(named))
    usual = outputs_and_gradients(plain, named)
    found = outputs_and_gradients(run, named)
    assert_errors_like_torch(found, usual, exact, named["x"].dtype)


@pytest.mark.sampled(2)
@over_dtypes
@pytest.mark.parametrize(("tokens", "radius"), [(1, 3), (21, 4), (5, 40)])
@pytest.mark.parametrize(("keep", "state"), [(False, False), (True, False), (True, True)])
def test_kernels_match_the_reference(tokens, radius, keep, state, dtype):
    assert_no_less_exact_than_torch(inputs(tokens, radius, keep=keep, state=state, dtype=dtype))


@pytest.mark.sampled(2)
@over_dtypes
@pytest.mark.parametrize(("tokens", "radius"), [(64, 3), (131, 70)])
def test_kernels_match_torch_over_several_blocks(tokens, radius, dtype):
    named = inputs(tokens, radius, batch=1, heads=1, keep=True, dtype=dtype)
    assert_no_less_exact_than_torch(named, partial(plain, form="dense"))


@pytest.mark.parametrize(("radius", "width"), [(0, 3), (2, 1), (2, 17), (2, 129)])
def test_any_radius_and_number_of_channels(radius, width):
    assert_no_less_exact_than_torch(inputs(5, radius, batch=1, width=width))


@pytest.mark.sampled(2)
@over_dtypes
@over_seeds
def test_random_sizes(seed, dtype):
    batch, heads, width, radius, tokens = drawn(seed, 3, 3, 40, LONGEST, 4 * LONGEST)
    named = inputs(tokens, radius, batch=batch, heads=heads, width=width, dtype=dtype)
    assert_no_less_exact_than_torch(named, partial(plain, form="dense"))


@pytest.mark.sampled
@over_dtypes
@pytest.mark.parametrize("keep", [False, True])
def test_packed_sequences_do_not_mix(keep, dtype):
    named = inputs(35, 6, batch=2, keep=keep, dtype=dtype)
    named["cu_seqlens"] = torch.tensor([0, 1, 4, 35, 68, 70], dtype=torch.int32, device=DEVICE)
    assert_no_less_exact_than_torch(named, plain)
    whole = run(**named).flatten(0, 1)
    for first, stop in [(1, 4), (4, 35), (35, 68)]:
        parts = {n: named[n].flatten(0, 1)[None, first:stop] for n in ("x", "keep") if n in named}
        alone = run(**{**named, **parts, "cu_seqlens": None})
        torch.testing.assert_close(whole[first:stop], alone[0])


def test_sums_over_several_parts_of_the_blocks(monkeypatch):
    monkeypatch.setattr(launch, "target_programs", lambda _: 8)
    assert_no_less_exact_than_torch(inputs(70, 3, batch=3, heads=1), partial(plain, form="dense"))


def test_masked_tokens_are_not_read():
    named = inputs(20, 5, keep=True, state=True)
    want = outputs_and_gradients(run, named)
    dirty = named["x"].masked_fill(~named["keep"][..., None, None], torch.nan)
    before, seen = named["state"]
    state = DiffusionState(before.masked_fill(~seen[..., None, None], torch.nan), seen)
    got = outputs_and_gradients(run, named | {"x": dirty, "state": state})
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_causal_kernel_reads_no_later_token():
    named = inputs(12, 4, causal=True)
    y = run(**named)
    named["x"][:, 7:] += 5
    other = run(**named)
    torch.testing.assert_close(other[:, :7], y[:, :7])
    assert (other[:, 7:] - y[:, 7:]).abs().min() > 1e-6


def test_two_calls_equal_one_wherever_it_is_cut():
    named = inputs(11, 3, keep=True, causal=True)
    y = run(**named)
    for cut in (1, 4, 10):
        parts = [{n: named[n][:, i] for n in ("x", "keep")} for i in (slice(cut), slice(cut, None))]
        state = next_state(None, **parts[0], radius=3)
        pair = run(**{**named, **parts[0]}), run(**{**named, **parts[1]}, state=state)
        torch.testing.assert_close(torch.cat(pair, dim=1), y)


@pytest.mark.parametrize("wanted", ["x", "weights"])
def test_only_the_gradients_that_are_needed_are_computed(wanted):
    named = inputs(9, 2)
    every = dict(zip(("y", "x", "weights", "dt"), outputs_and_gradients(run, named), strict=True))
    named[wanted].requires_grad_()
    y = run(**named)
    generator = torch.Generator().manual_seed(3)
    slope = torch.randint(-8, 9, y.shape, generator=generator).to(y) / 8
    (found,) = torch.autograd.grad(y, named[wanted], slope)
    torch.testing.assert_close(found.double().cpu(), every[wanted], rtol=0, atol=0)


@pytest.mark.gpu
def test_a_cuda_graph_repeats_a_call():
    named = inputs(200, 40, width=70, dtype=BRAIN)
    assert_a_graph_repeats(lambda: run(**named))


def test_the_preferred_backend_is_taken():
    named = inputs(9, 2)
    want = run(**named)
    with use_backend("triton"):
        assert torch.equal(linear_diffusion(**named), want)
        assert torch.equal(linear_diffusion(**named, form="banded"), want)
        for form in ("dense", "fft"):  # in torch, as there is no kernel
            torch.testing.assert_close(linear_diffusion(**named, form=form), want)
        implicit = linear_diffusion(**named, scheme="crank_nicolson")
    torch.testing.assert_close(implicit, linear_diffusion(**named, scheme="crank_nicolson"))


def test_no_sequences_give_no_outputs():
    named = inputs(5, 2)
    named["x"] = torch.ones(0, 5, 2, 3, device=DEVICE)
    y, *gradients = outputs_and_gradients(run, named)
    assert y.shape == gradients[0].shape == (0, 5, 2, 3)
    assert not gradients[1].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"form": "fft"},
            "backend is 'triton', which does not support scheme 'explicit' with form 'fft'",
        ),
        (
            {"scheme": "crank_nicolson"},
            "backend is 'triton', .* 'crank_nicolson' with form 'auto'; .* explicit/auto",
        ),
        ({"dtype": torch.float64}, "backend is 'triton', but kernels take"),
        ({"backend": "tritn"}, "backend 'tritn' is unknown"),
    ],
)
def test_unsupported_calls_are_refused(change, message):
    options = {"backend": "triton", **change}
    named = inputs(6, 2, dtype=options.pop("dtype", SINGLE)) | options
    with pytest.raises(ValueError, match=message):
        unwrap(linear_diffusion)(**named)


@pytest.mark.sampled
@pytest.mark.parametrize(("keep", "packed"), [(False, False), (True, True)])
def test_the_op_is_declared_rightly(keep, packed):
    named = inputs(9, 2, keep=keep)
    x, rates = (named[n].clone().requires_grad_() for n in ("x", "weights"))
    sequence = (torch.arange(9, device=DEVICE) // 4).expand(2, -1).contiguous() if packed else None
    given = (x, rates, named.get("keep"), sequence, 6)
    torch.library.opcheck(torch.ops.onescan.diffusion.default, given)


@pytest.mark.compile
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("options", [{}, {"keep": True, "state": True}], ids=["plain", "state"])
def test_compiles_without_a_graph_break(options, dynamic):
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    named = inputs(9, 2, **options)
    got, want = (outputs_and_gradients(function, named) for function in (compiled, run))
    torch.testing.assert_close(got, want)
