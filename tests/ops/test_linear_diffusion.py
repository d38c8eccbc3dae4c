"""LDN's diffusion: every form against the definition, and what the contract promises."""

import math
from functools import cache, partial
from inspect import unwrap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_checks import assert_at_most_twice_the_error, assert_same, multiply_in_bfloat16
from pairwise import pairwise

from onescan.ops.linear_diffusion import (
    IMPLEMENTATIONS,
    SOLVERS,
    DiffusionState,
    choose,
    linear_diffusion,
    next_state,
    reference,
    stable_step,
)
from onescan.ops.linear_diffusion.forms import explicit

B, H, V = 2, 2, 3
CALLS = [("explicit", form) for form in IMPLEMENTATIONS] + [
    ("crank_nicolson", form) for form in SOLVERS
]
over_calls = pytest.mark.parametrize(("scheme", "form"), CALLS)
over_forms = pytest.mark.parametrize("form", IMPLEMENTATIONS)
TENSORS = ("x", "weights", "dt")


def inputs(
    tokens, radius, *, keep=False, state=False, causal=False, dtype=torch.float64, seed=0, heads=H
):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    named = {
        "x": normal(B, tokens, heads, V),
        "weights": normal(heads, 2 * radius + 1).abs(),
        "dt": normal(heads).abs(),
    }
    if causal:
        named["weights"][:, :radius] = 0
    if keep:
        named["keep"] = torch.rand(B, tokens, generator=g) < 0.6
    if state:
        seen = torch.rand(B, radius, generator=g) < 0.7
        named["state"] = DiffusionState(normal(B, radius, heads, V), seen)
    return named


def leaves(named):
    """The same arguments with gradients wanted, and the list of what has one."""
    tensors = [named[name].clone().requires_grad_() for name in TENSORS]
    named = dict(named, **dict(zip(TENSORS, tensors, strict=True)))
    if "state" in named:
        tensors.append(named["state"].x.clone().requires_grad_())
        named["state"] = named["state"]._replace(x=tensors[-1])
    return named, tensors


def output_and_gradients(function, named):
    named, tensors = leaves(named)
    y = function(**named)
    g = torch.Generator().manual_seed(7)
    loss = (y * torch.randn(y.shape, generator=g, dtype=torch.float64).to(y.dtype)).sum()
    gradients = torch.autograd.grad(loss, tensors, allow_unused=True)
    zeros = map(torch.zeros_like, tensors)
    return [y, *(z if x is None else x for x, z in zip(gradients, zeros, strict=True))]


def assert_matches_reference(named, *, scheme, form):
    want = output_and_gradients(partial(reference.forward, scheme=scheme), named)
    got = output_and_gradients(partial(linear_diffusion, scheme=scheme, form=form), named)
    assert_same(got, want)


@pytest.mark.sampled(24)
@pairwise(
    {
        "scheme, form": CALLS,
        "keep": [False, True],
        "tokens, radius": [(1, 0), (1, 3), (2, 1), (5, 0), (5, 2), (7, 9), (33, 4), (40, 39)],
    }
)
def test_every_form_matches_the_reference(scheme, form, keep, tokens, radius):
    assert_matches_reference(inputs(tokens, radius, keep=keep), scheme=scheme, form=form)


@over_calls
@pytest.mark.parametrize("tokens", [63, 64, 65, 129])
def test_lengths_around_a_block(scheme, form, tokens):
    named = inputs(tokens, 3, keep=True, heads=1)
    assert_matches_reference(named, scheme=scheme, form=form)


@pytest.mark.sampled
@over_calls
def test_a_radius_beyond_a_block(scheme, form):
    assert_matches_reference(inputs(150, 70, heads=1), scheme=scheme, form=form)


@pairwise(
    {
        "form": IMPLEMENTATIONS,
        "keep": [False, True],
        "tokens, radius": [(1, 0), (1, 3), (3, 5), (9, 2), (70, 4)],
    }
)
def test_tokens_of_a_state_are_read_but_not_returned(form, keep, tokens, radius):
    named = inputs(tokens, radius, keep=keep, state=True)
    assert_matches_reference(named, scheme="explicit", form=form)


@over_calls
def test_a_causal_kernel_reads_no_later_token(scheme, form):
    named = inputs(12, 4, causal=True)
    y = linear_diffusion(**named, scheme=scheme, form=form)
    named["x"][:, 7:] += 5
    other = linear_diffusion(**named, scheme=scheme, form=form)
    assert_same([other[:, :7]], [y[:, :7]])
    assert (other[:, 7:] - y[:, 7:]).abs().min() > 1e-6


@over_calls
def test_gradcheck(scheme, form):
    named, tensors = leaves(inputs(4, 2, keep=True, heads=1))

    def call(x, weights, dt):
        return linear_diffusion(x, weights, dt, keep=named["keep"], scheme=scheme, form=form)

    assert torch.autograd.gradcheck(call, tensors)
    assert torch.autograd.gradgradcheck(call, tensors)


@over_forms
@pytest.mark.parametrize("radius", [0, 2, 12])
def test_two_calls_equal_one_at_every_cut(form, radius):
    tokens = 9
    named = inputs(tokens, radius, causal=True, keep=True, state=True)
    weights, dt, keep = named["weights"], named["dt"], named["keep"]
    want = linear_diffusion(**named)
    last = next_state(named["state"], named["x"], keep, radius=radius)
    for cut in range(1, tokens):
        parts, state = [], named["state"]
        for start, stop in ((0, cut), (cut, tokens)):
            x, seen = named["x"][:, start:stop], keep[:, start:stop]
            parts.append(linear_diffusion(x, weights, dt, keep=seen, state=state, form=form))
            state = next_state(state, x, seen, radius=radius)
        assert_same([torch.cat(parts, dim=1), state.x], [want, last.x])
        assert torch.equal(state.keep, last.keep)


def test_the_first_state_holds_no_token():
    named = inputs(5, 3, causal=True)
    state = next_state(None, named["x"][:, :1], None, radius=3)
    assert state.keep.tolist() == [[False, False, True]] * B
    rest = dict(named, x=named["x"][:, 1:])
    got = linear_diffusion(**rest, state=state)
    assert_same([got], [linear_diffusion(**named)[:, 1:]])


@over_calls
def test_masked_tokens_do_not_change_outputs(scheme, form):
    named = inputs(10, 3)
    keep = torch.tensor([1, 0, 0, 1, 1, 0, 1, 1, 1, 0], dtype=torch.bool)
    call = partial(linear_diffusion, scheme=scheme, form=form, keep=keep.expand(B, -1))
    want = call(**named)
    named["x"][:, ~keep] = torch.nan
    got = output_and_gradients(call, named)
    assert (got[0][:, ~keep] == 0).all()
    assert_same([got[0]], [want])
    assert (got[1][:, ~keep] == 0).all()
    assert all(torch.isfinite(x).all() for x in got)


@over_calls
def test_padding_changes_nothing_on_either_side(scheme, form):
    named = inputs(11, 4)
    want = linear_diffusion(**named, scheme=scheme, form=form)
    for left, right in ((0, 6), (5, 0), (2, 3)):
        x = torch.nn.functional.pad(named["x"], (0, 0, 0, 0, left, right), value=9.0)
        keep = torch.zeros(B, x.shape[1], dtype=torch.bool)
        keep[:, left : left + 11] = True
        got = linear_diffusion(**dict(named, x=x), keep=keep, scheme=scheme, form=form)
        assert_same([got[:, left : left + 11]], [want])


@over_calls
def test_a_row_that_is_all_masked_is_zero(scheme, form):
    named = inputs(6, 2)
    keep = torch.tensor([[True] * 6, [False] * 6])
    got = output_and_gradients(
        partial(linear_diffusion, scheme=scheme, form=form, keep=keep), named
    )
    assert (got[0][1] == 0).all()
    assert all(torch.isfinite(x).all() for x in got)


@over_calls
def test_the_weight_of_a_token_on_itself_has_no_effect(scheme, form):
    named = inputs(8, 3)
    want = output_and_gradients(partial(linear_diffusion, scheme=scheme, form=form), named)
    named["weights"][:, 3] += 4
    got = output_and_gradients(partial(linear_diffusion, scheme=scheme, form=form), named)
    assert_same(got, want)
    assert (got[2][:, 3] == 0).all()


HALVES = (torch.bfloat16, torch.float16)  # torch inverts no matrix of them to compare with


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("scheme", "form", "dtype"),
    [(*call, torch.float32) for call in CALLS]
    + [("explicit", form, dtype) for form in IMPLEMENTATIONS for dtype in HALVES],
)
def test_no_less_exact_than_plain_torch(scheme, form, dtype):
    """The error against float64 is at most twice what the definition makes in the same dtype."""
    named, *expected = plain_and_exact(scheme, dtype)
    ours = output_and_gradients(partial(linear_diffusion, scheme=scheme, form=form), named)
    assert_at_most_twice_the_error(ours, *expected)


@cache
def plain_and_exact(scheme, dtype):
    """Return inputs, and the definition's output and gradients in this dtype and in float64."""
    torch.manual_seed(0)
    named = inputs(96, 12, dtype=dtype, keep=True, heads=8)
    exact = {n: x.double() if x.is_floating_point() else x for n, x in named.items()}
    plain = partial(reference.forward, scheme=scheme)
    return named, output_and_gradients(plain, named), output_and_gradients(plain, exact)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", IMPLEMENTATIONS)
def test_bfloat16_products_are_no_less_exact_than_plain_torch(form, dtype, monkeypatch):
    """On a GPU, an explicit step multiplies bfloat16 tokens in bfloat16, whatever K is."""
    multiply_in_bfloat16(monkeypatch, "linear_diffusion")
    named = inputs(96, 12, dtype=torch.bfloat16, keep=True, heads=8)
    exact = {n: x.double() if x.is_floating_point() else x for n, x in named.items()}
    mixed = {n: x.to(dtype) if n in ("weights", "dt") else x for n, x in named.items()}
    plain = partial(reference.forward, scheme="explicit")
    runs = [(partial(linear_diffusion, form=form), mixed), (plain, named), (plain, exact)]
    assert_at_most_twice_the_error(*(output_and_gradients(*run) for run in runs))


@pytest.mark.parametrize("form", IMPLEMENTATIONS)
def test_row_sums_are_those_of_rounded_weights(form):
    """One neighbor, whose weight is no bfloat16, and constant tokens, which do not change."""
    x = torch.ones(1, 9, 1, 2, dtype=torch.bfloat16, requires_grad=True)
    y = explicit(IMPLEMENTATIONS[form], x, torch.tensor([[0.3, 0.0, 0.0]]), None, 9)
    assert y.dtype == torch.float32
    assert (y == 1).all()


@over_calls
def test_the_output_has_the_type_of_x(scheme, form):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        named = inputs(3, 2, dtype=dtype)
        assert linear_diffusion(**named, scheme=scheme, form=form).dtype == dtype


@over_calls
def test_autocast_does_not_narrow_the_sums(scheme, form):
    named = inputs(70, 5, dtype=torch.float32)
    want = linear_diffusion(**named, scheme=scheme, form=form)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(linear_diffusion(**named, scheme=scheme, form=form), want)


@pytest.mark.parametrize("keep", [True, False])
def test_the_backward_pass_of_crank_nicolson_reuses_the_factors(keep, monkeypatch):
    """Blocks of 32 tokens are factored once, for all heads together."""
    factored = []
    factor = torch.linalg.lu_factor_ex
    monkeypatch.setattr(
        torch.linalg, "lu_factor_ex", lambda x: (factored.append(x.shape), factor(x))[1]
    )
    named, tensors = leaves(inputs(100, 8, keep=keep))
    y = linear_diffusion(**named, scheme="crank_nicolson", form="banded")
    y.square().sum().backward()
    assert factored == [(H, B if keep else 1, 32, 32)] * 4
    assert all(x.grad is not None for x in tensors)


@over_forms
def test_a_large_token_does_not_drown_what_it_does_not_reach(form):
    """In float32 a spectrum of 1e6 among ones would cost all six digits of the others."""
    named = inputs(300, 2, dtype=torch.float32)
    named["x"][:, 0] = 1e6
    want = linear_diffusion(**{n: x.double() for n, x in named.items()}, form="dense")
    got = linear_diffusion(**named, form=form)
    torch.testing.assert_close(got[:, 3:].double(), want[:, 3:], atol=1e-5, rtol=1e-5)


@given(
    tokens=st.integers(1, 90),
    radius=st.integers(0, 95),
    cut=st.floats(0, 1),
    call=st.sampled_from(CALLS),
    seed=st.integers(0, 99),
)
def test_any_length_radius_mask_and_cut(tokens, radius, cut, call, seed):
    scheme, form = call
    named = inputs(tokens, radius, keep=True, causal=True, seed=seed)
    want = linear_diffusion(**named, scheme=scheme, form="dense")
    got = linear_diffusion(**named, scheme=scheme, form=form)
    assert_same([got], [want])
    cut = math.floor(cut * tokens)
    if scheme == "explicit" and cut:
        first, last = (
            dict(named, x=named["x"][:, part], keep=named["keep"][:, part])
            for part in (slice(cut), slice(cut, None))
        )
        state = next_state(None, first["x"], first["keep"], radius=radius)
        parts = [linear_diffusion(**first, form=form)]
        if cut < tokens:
            parts.append(linear_diffusion(**last, state=state, form=form))
        assert_same([torch.cat(parts, dim=1)], [want])


STATE = DiffusionState(torch.ones(B, 2, H, V), torch.ones(B, 2, dtype=torch.bool))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(B, 4, V)}, r"x has shape \(2, 4, 3\)"),
        ({"x": None}, "x is a NoneType"),
        ({"x": torch.ones(B, 4, H, V).long()}, "x has dtype torch.int64"),
        ({"x": torch.ones(B, 0, H, V)}, "T is 0"),
        ({"x": torch.ones(B, 4, 0, V), "weights": torch.ones(0, 5), "dt": torch.ones(0)}, "H is 0"),
        ({"x": torch.ones(B, 4, H, 0)}, "V is 0"),
        ({"weights": torch.ones(5)}, r"weights has shape \(5,\)"),
        ({"weights": torch.ones(3, 5)}, r"weights has shape \(3, 5\)"),
        ({"weights": torch.ones(H, 4)}, r"\(2, 4\), expected 'H 2R\+1', an odd number of lags"),
        ({"weights": torch.ones(H, 0)}, r"\(2, 0\), expected 'H 2R\+1', an odd number of lags"),
        ({"weights": torch.full((H, 5), -0.1)}, "weights has minimum -0.1"),
        ({"weights": -torch.ones(H, 5)}, "weights has minimum -1"),
        ({"weights": torch.ones(H, 5, device="meta")}, "weights is on meta and x on cpu"),
        ({"dt": 0.5}, "dt is a float"),
        ({"dt": torch.ones(1)}, r"dt has shape \(1,\)"),
        ({"dt": -torch.ones(H)}, "dt has minimum -1"),
        ({"keep": torch.ones(B, 4)}, "keep has dtype torch.float32"),
        ({"keep": torch.ones(B, 5).bool()}, r"keep has shape \(2, 5\)"),
        ({"keep": [True]}, "keep is a list"),
        ({"scheme": "euler"}, "scheme 'euler' .*explicit, crank_nicolson"),
        ({"form": "full"}, "form .*'full' .*dense, banded, fft"),
        (
            {"form": "fft", "scheme": "crank_nicolson"},
            "form is 'fft', .* scheme 'crank_nicolson'; available: dense, banded",
        ),
        ({"state": STATE.x}, "state is a Tensor"),
        (
            {"state": STATE, "scheme": "crank_nicolson"},
            "state was given with scheme='crank_nicolson'",
        ),
        (
            {"state": STATE._replace(x=torch.ones(B, 3, H, V))},
            r"state.x has shape \(2, 3, 2, 3\)",
        ),
        (
            {"state": STATE._replace(keep=torch.ones(B, 3).bool())},
            r"state.keep has shape \(2, 3\)",
        ),
        ({"state": STATE._replace(keep=None)}, "state.keep is a NoneType"),
        ({"state": STATE._replace(keep=torch.ones(B, 2))}, "state.keep has dtype torch.float32"),
        ({"state": STATE._replace(x=STATE.x.long())}, "state.x has dtype torch.int64"),
        ({"x": torch.full((B, 4, H, V), torch.nan)}, "x holds 48 NaN"),
        ({"weights": torch.full((H, 5), torch.nan)}, "weights holds 10 NaN"),
        ({"dt": torch.full((H,), torch.nan)}, "dt holds 2 NaN"),
        ({"x": torch.full((B, 4, H, V), torch.inf)}, r"x holds 48 \+inf values out of 48"),
        ({"state": STATE._replace(x=STATE.x * torch.nan)}, "state.x holds 24 NaN"),
    ],
)
def test_errors_name_the_argument(change, message):
    named = dict(inputs(4, 2, dtype=torch.float32), **change)
    with pytest.raises(ValueError, match=message):
        unwrap(linear_diffusion)(**named)  # without the shape hook, as users call it


@over_calls
@pytest.mark.parametrize("name", TENSORS)
def test_one_nan_anywhere_is_found(scheme, form, name):
    named = inputs(7, 2)
    named[name].view(-1)[-1] = torch.nan
    with pytest.raises(ValueError, match=f"{name} holds 1 NaN"):
        linear_diffusion(**named, scheme=scheme, form=form)


def test_the_choice_of_form():
    explicit = partial(choose, "auto", scheme="explicit")
    assert explicit(tokens=196, radius=138) == "dense"
    assert explicit(tokens=4096, radius=138) == "banded"
    assert explicit(tokens=65536, radius=65535) == "fft"
    implicit = partial(choose, "auto", scheme="crank_nicolson")
    assert implicit(tokens=64, radius=60) == "dense"
    assert implicit(tokens=8 * 60, radius=60) == "dense"
    assert implicit(tokens=8 * 60 + 1, radius=60) == "banded"
    assert implicit(tokens=65536, radius=138) == "banded"
    assert choose("fft", scheme="explicit", tokens=1, radius=1) == "fft"


def test_the_band_takes_memory_linear_in_the_length():
    """A matrix of T x T alone would hold 64 million numbers."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            each = [x for x in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(x)]
            sizes = [x.untyped_storage().nbytes() // x.element_size() for x in each]
            largest = max([largest, *sizes])
            return out

    named = inputs(8192, 16, dtype=torch.float32, heads=1)
    with Watch():
        output_and_gradients(partial(linear_diffusion, form="banded"), named)
        output_and_gradients(
            partial(linear_diffusion, form="banded", scheme="crank_nicolson"), named
        )
    assert largest < 8192 * 256


@over_calls
def test_no_sequences_give_none(scheme, form):
    x, weights = torch.ones(0, 5, H, V), torch.ones(H, 3)
    moved = linear_diffusion(x, weights, stable_step(weights), scheme=scheme, form=form)
    assert moved.shape == x.shape


@pytest.mark.parametrize("tokens", [1, 3, 1000])
def test_a_state_holds_no_more_than_it_says(tokens):
    x = torch.randn(B, tokens, H, V)
    state = next_state(next_state(None, x, None, radius=3), x, None, radius=3)
    for part in state:
        assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


@over_forms
def test_forward_mode_agrees_with_backward_mode(form):
    named = inputs(70, 3)
    keep = torch.rand(B, 70) < 0.8
    primals = tuple(named[name] for name in TENSORS)
    tangents = tuple(torch.randn_like(x) for x in primals)
    step = partial(linear_diffusion, keep=keep, form=form)
    _, ahead = torch.func.jvp(step, primals, tangents)
    y, back = torch.func.vjp(step, *primals)
    direction = torch.randn_like(y)
    want = sum((g * t).sum() for g, t in zip(back(direction), tangents, strict=True))
    torch.testing.assert_close((ahead * direction).sum(), want)

    with torch.autograd.forward_ad.dual_level():
        pairs = zip(primals, tangents, strict=True)
        dual = step(*(torch.autograd.forward_ad.make_dual(*pair) for pair in pairs))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, ahead)


@pytest.mark.compile
@pytest.mark.parametrize("form", ["auto", *IMPLEMENTATIONS])
def test_one_compilation_takes_every_length(form):
    torch.compiler.reset()
    step = partial(linear_diffusion, form=form)
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    weights = torch.rand(H, 7)
    dt = stable_step(weights)
    for tokens in range(70, 95):  # more than may be compiled anew
        x = torch.randn(B, tokens, H, V)
        torch.testing.assert_close(compiled(x, weights, dt), step(x, weights, dt))


@pytest.mark.compile
@pytest.mark.parametrize(
    ("scheme", "form", "state"),
    [(*call, False) for call in CALLS] + [("explicit", form, True) for form in IMPLEMENTATIONS],
)
def test_compiles_without_a_graph_break(scheme, form, state):
    torch.compiler.reset()
    compiled = torch.compile(linear_diffusion, fullgraph=True, backend="aot_eager")
    named = inputs(9, 2, keep=True, state=state)
    want = output_and_gradients(partial(linear_diffusion, scheme=scheme, form=form), named)
    got = output_and_gradients(partial(compiled, scheme=scheme, form=form), named)
    assert_same(got, want)


@over_calls
def test_vmap(scheme, form):
    x, weights, dt = torch.randn(4, B, 6, H, V), torch.rand(H, 5), torch.rand(H)
    call = partial(linear_diffusion, weights=weights, dt=dt, scheme=scheme, form=form)
    got = torch.func.vmap(call)(x)
    torch.testing.assert_close(got, torch.stack([call(each) for each in x]))
