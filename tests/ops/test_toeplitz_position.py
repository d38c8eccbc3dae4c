"""MD-TPE: every form against the definition, and what the contract promises."""

import functools
import itertools
import math
from inspect import unwrap
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_checks import assert_same
from pairwise import pairwise

from onescan.ops.toeplitz_position import (
    IMPLEMENTATIONS,
    ToeplitzState,
    choose,
    forms,
    reference,
    toeplitz_position,
)

B, D, E = 2, 3, 4
over_forms = pytest.mark.parametrize("form", IMPLEMENTATIONS)
GRIDS = [(1, 1), (2, 3), (5, 1), (7, 4), (3, 4, 2), (2, 1, 3, 2)]


def chunks_of(size):
    """The scan in small chunks, so that short sequences have several."""
    return patch.dict(IMPLEMENTATIONS, scan=functools.partial(forms.scan, chunk_size=size))


def inputs(
    shape,
    *,
    bidirectional=False,
    joint=False,
    state=False,
    dtype=torch.float64,
    seed=0,
    sizes=(B, D, E),
):
    batch, channels, states = sizes
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    coefficients = (len(shape), *([2] if bidirectional else []), channels, states)
    directions = [2] * len(shape) if bidirectional else []
    weights = (*directions, channels, states) if joint else coefficients
    return {
        "x": normal(batch, math.prod(shape), channels),
        "log_decay": -normal(*coefficients).exp(),
        "weight": normal(*weights),
        "shape": shape,
        "bidirectional": bidirectional,
        "joint": joint,
        "state": ToeplitzState(normal(*sizes)) if state else None,
    }


def leaves(named):
    """The same arguments with gradients wanted, and the list of what has one."""
    tensors = [named[n].clone().requires_grad_() for n in ("x", "log_decay", "weight")]
    named = dict(named, **dict(zip(("x", "log_decay", "weight"), tensors, strict=True)))
    if named["state"] is not None:
        tensors.append(named["state"].hidden.clone().requires_grad_())
        named["state"] = ToeplitzState(tensors[-1])
    return named, tensors


def outputs_and_gradients(function, named):
    named, tensors = leaves(named)
    y, state = function(**named)
    outputs = (y,) if state is None else (y, state.hidden)
    g = torch.Generator().manual_seed(7)
    loss = sum(
        (x * torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype)).sum()
        for x in outputs
    )
    return outputs, torch.autograd.grad(loss, tensors)


def assert_match_reference(forms, named):
    want = outputs_and_gradients(reference.forward, named)
    for form in forms:
        got = outputs_and_gradients(functools.partial(toeplitz_position, form=form), named)
        assert_same(got[0], want[0])
        assert_same(got[1], want[1])


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 7, 8, 9, 16, 31])
@pytest.mark.parametrize(("bidirectional", "state"), [(False, False), (False, True), (True, False)])
def test_every_form_matches_the_reference_of_a_sequence(tokens, bidirectional, state):
    named = inputs((tokens,), bidirectional=bidirectional, state=state)
    with chunks_of(4):
        assert_match_reference(IMPLEMENTATIONS, named)


@pairwise(
    {"shape": GRIDS, "bidirectional": [False, True], "joint": [False, True]},
    rest_is_slow=True,
    ids=str,
)
def test_every_form_matches_the_reference_of_a_grid(shape, bidirectional, joint):
    named = inputs(shape, bidirectional=bidirectional, joint=joint)
    with chunks_of(2):
        assert_match_reference(["fft", "auto"] if joint else IMPLEMENTATIONS, named)


@pytest.mark.parametrize("shape", GRIDS, ids=str)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_joint_kernel_of_one_exponential_is_one_kernel_per_axis_in_turn(shape, bidirectional):
    named = inputs(shape, bidirectional=bidirectional, joint=True, sizes=(B, D, 1))
    named["weight"] = torch.ones_like(named["weight"])
    y = named["x"]
    for axis in range(len(shape)):
        only = torch.zeros_like(named["log_decay"])
        only[axis] = 1
        y, _ = toeplitz_position(**dict(named, x=y, weight=only, joint=False))
    assert_same(toeplitz_position(**named)[:1], [y])


@over_forms
@pytest.mark.parametrize(("bidirectional", "state"), [(False, True), (True, False)])
def test_along_one_axis_a_joint_kernel_is_the_same(form, bidirectional, state):
    named = inputs((9,), bidirectional=bidirectional, state=state)
    joint = dict(named, joint=True, weight=named["weight"][0])
    with chunks_of(4):
        want, got = (toeplitz_position(**given, form=form)[0] for given in (named, joint))
        assert_match_reference([form], joint)
    assert torch.equal(got, want)


@pytest.mark.sampled
@pytest.mark.parametrize("tokens", [64, 65, 129])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_default_chunks_match_the_reference(tokens, bidirectional):
    named = inputs((tokens,), bidirectional=bidirectional, state=not bidirectional)
    assert_match_reference(["scan", "auto"], named)


@pairwise(
    {
        "form": IMPLEMENTATIONS,
        "decay": [0.0, -1e-6, -50.0, -1e4],
        "bidirectional": [False, True],
    }
)
def test_extreme_decays_match_the_reference(form, decay, bidirectional):
    named = inputs((23,), bidirectional=bidirectional, state=not bidirectional)
    named["log_decay"][..., 1:] = decay
    with chunks_of(5):
        assert_match_reference([form], named)
        low = {n: v.float() if isinstance(v, torch.Tensor) else v for n, v in named.items()}
        outputs, gradients = outputs_and_gradients(
            functools.partial(toeplitz_position, form=form), low
        )
    assert all(torch.isfinite(x).all() for x in (*outputs, *gradients))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("form", "shape", "bidirectional", "joint"),
    [
        *(
            (form, shape, bidirectional, False)
            for form in IMPLEMENTATIONS
            for shape, bidirectional in (
                ((5,), False),
                ((1,), False),
                ((5,), True),
                ((2, 3), False),
            )
        ),
        ("fft", (2, 3), False, True),
        ("fft", (2, 1, 3), True, True),
    ],
)
def test_gradcheck(form, shape, bidirectional, joint):
    state = len(shape) == 1 and not bidirectional
    named, tensors = leaves(
        inputs(shape, bidirectional=bidirectional, joint=joint, state=state, sizes=(1, 2, 3))
    )

    def call(x, log_decay, weight, *hidden):
        changed = dict(named, x=x, log_decay=log_decay, weight=weight)
        changed["state"] = ToeplitzState(*hidden) if hidden else None
        y, after = toeplitz_position(**changed, form=form)
        return y if after is None else (y, after.hidden)

    with chunks_of(2):
        assert torch.autograd.gradcheck(call, tensors, check_forward_ad=True)


def continued(named, cuts, form):
    """One call per piece, each from the state of the one before."""
    outputs, state = [], named["state"]
    for start, stop in itertools.pairwise([0, *cuts, named["x"].shape[1]]):
        piece = dict(named, x=named["x"][:, start:stop], shape=(stop - start,), state=state)
        y, state = toeplitz_position(**piece, form=form)
        outputs.append(y)
    return torch.cat(outputs, dim=1), *state


@over_forms
def test_two_calls_equal_one_at_every_cut(form):
    named = inputs((11,), state=True)
    y, state = reference.forward(**named)
    with chunks_of(3):
        for cut in range(1, 11):
            assert_same(continued(named, [cut], form), (y, *state))
        assert_same(continued(named, range(1, 11), form), (y, *state))


@over_forms
def test_gradients_flow_through_the_state_between_calls(form):
    named, tensors = leaves(inputs((9,), state=True))
    with chunks_of(2):
        parts = torch.autograd.grad(continued(named, [4], form)[0].square().sum(), tensors)
    whole = torch.autograd.grad(reference.forward(**named)[0].square().sum(), tensors)
    assert_same(parts, whole)


@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    bidirectional=st.booleans(),
    form=st.sampled_from([*IMPLEMENTATIONS, "auto"]),
    chunk=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_any_grid_and_chunk(sizes, bidirectional, form, chunk, seed):
    named = inputs(tuple(sizes), bidirectional=bidirectional, seed=seed)
    with chunks_of(chunk):
        assert_same(toeplitz_position(**named, form=form)[:1], reference.forward(**named)[:1])


@given(
    tokens=st.integers(1, 30),
    cuts=st.sets(st.integers(1, 29), max_size=4),
    form=st.sampled_from([*IMPLEMENTATIONS]),
    chunk=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_any_length_and_cuts(tokens, cuts, form, chunk, seed):
    named = inputs((tokens,), state=True, seed=seed)
    y, state = reference.forward(**named)
    with chunks_of(chunk):
        got = continued(named, sorted(c for c in cuts if c < tokens), form)
    assert_same(got, (y, *state))


def errors(function, named, seeds=4):
    """How far each output and gradient is from the definition in float64, over several draws."""
    squares = []
    for seed in range(seeds):
        low = inputs(**named, seed=seed)
        exact = {n: v.double() if isinstance(v, torch.Tensor) else v for n, v in low.items()}
        if low["state"] is not None:
            exact["state"] = ToeplitzState(low["state"].hidden.double())
        got = outputs_and_gradients(function, low)
        want = outputs_and_gradients(reference.forward, exact)
        pairs = zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True)
        squares.append([(x.double() - y).square().mean().item() for x, y in pairs])
    return torch.tensor(squares).mean(0).sqrt()


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "bidirectional", "joint"),
    [((17,), False, False), ((17,), True, False), ((6, 5), False, False), ((6, 5), True, True)],
)
def test_no_less_exact_than_plain_torch(dtype, shape, bidirectional, joint):
    """The error against float64 is at most twice what the definition makes in the same dtype."""
    named = {"shape": shape, "bidirectional": bidirectional, "joint": joint, "dtype": dtype}
    named["state"] = len(shape) == 1 and not bidirectional
    plain = errors(reference.forward, named)
    with chunks_of(8):
        for form in ["fft"] if joint else IMPLEMENTATIONS:
            ours = errors(functools.partial(toeplitz_position, form=form), named)
            assert (ours <= 2 * plain).all(), (form, ours, plain)


@pytest.mark.sampled(3)
@over_forms
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_loud_token_does_not_drown_the_quiet_ones(form, bidirectional):
    named = inputs((70,), bidirectional=bidirectional, dtype=torch.float32)
    named["log_decay"] -= 1
    named["x"][:, 35] = 1e8
    exact = {n: v.double() if isinstance(v, torch.Tensor) else v for n, v in named.items()}
    want, _ = reference.forward(**exact)
    plain = (reference.forward(**named)[0] - want).abs()
    with chunks_of(16):
        ours = (toeplitz_position(**named, form=form)[0] - want).abs()
    for quiet in (slice(0, 5), slice(65, 70)):
        assert ours[:, quiet].norm() <= 2 * plain[:, quiet].norm()


def recurrence(x, log_decay, weight):
    hidden, decay, states = torch.zeros(E, dtype=x.dtype), log_decay.exp(), []
    for x_t in x.flatten():
        hidden = hidden * decay + x_t
        states.append(hidden)
    return (weight * torch.stack(states)).sum(-1)


def test_a_hundred_thousand_tokens():
    """In float32 the scan errs at most twice as much as the recurrence, token by token, does."""
    tokens = 100_000
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(1, tokens, 1, generator=g), torch.rand(1, 1, E, generator=g)
    log_decay = torch.tensor([0.0, -1e-6, -1e-3, -1.0]).reshape(1, 1, E)
    exact = [v.double() for v in (x, log_decay, weight)]
    want, _ = toeplitz_position(*exact, (tokens,), form="scan")
    got, _ = toeplitz_position(x, log_decay, weight, (tokens,), form="scan")
    plain = recurrence(x, log_decay[0, 0], weight[0, 0])
    assert (got - want).norm() <= 2 * (plain - want.flatten()).norm()
    assert_same(recurrence(*exact[:1], *(v[0, 0] for v in exact[1:]))[-9:], want[0, -9:, 0])


def saved_bytes(tokens):
    sizes = []
    named, _ = leaves(inputs((tokens,), dtype=torch.float32))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: sizes.append(x.untyped_storage().nbytes()) or x, lambda x: x
    ):
        toeplitz_position(**named, form="scan")
    return sum(sizes)


def test_what_the_scan_keeps_for_its_gradient_is_linear_in_the_tokens():
    assert saved_bytes(16384) <= 2.05 * saved_bytes(8192)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_state_is_wide_and_the_output_is_of_the_inputs_type(dtype):
    y, state = toeplitz_position(**inputs((3,), dtype=dtype))
    assert y.dtype == dtype
    assert state.hidden.dtype == torch.promote_types(dtype, torch.float32)
    y, state = toeplitz_position(**inputs((3,), dtype=dtype, bidirectional=True))
    assert y.dtype == dtype
    assert state is None
    assert toeplitz_position(**inputs((3, 2), dtype=dtype))[1] is None


@over_forms
def test_autocast_does_not_narrow_the_sums(form):
    named = inputs((20,), dtype=torch.float32)
    want, want_state = toeplitz_position(**named, form=form)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, state = toeplitz_position(**named, form=form)
    assert torch.equal(got, want)
    assert torch.equal(state.hidden, want_state.hidden)


@pytest.mark.parametrize(
    ("form", "joint"), [*itertools.product(IMPLEMENTATIONS, [False]), ("fft", True)]
)
def test_maps_over_a_further_axis(form, joint):
    named = inputs((3, 3) if joint else (9,), joint=joint)
    x = torch.stack([named["x"], 2 * named["x"]])
    with chunks_of(4):
        got = torch.func.vmap(
            lambda x: toeplitz_position(**dict(named, x=x), form=form)[0], randomness="error"
        )(x)
    assert_same(got, (y := reference.forward(**named)[0], 2 * y))


@pytest.mark.parametrize(
    ("form", "shape", "joint"),
    [*itertools.product(IMPLEMENTATIONS, [(5,), (3, 2)], [False]), ("fft", (3, 2), True)],
)
def test_no_sequences_give_no_outputs(form, shape, joint):
    named, tensors = leaves(dict(inputs(shape, joint=joint, sizes=(0, D, E))))
    with chunks_of(2):
        y, state = toeplitz_position(**named, form=form)
    assert y.shape == (0, math.prod(shape), D)
    assert state is None or state.hidden.shape == (0, D, E)
    gradients = torch.autograd.grad(y.sum(), tensors)
    assert all((gradient == 0).all() for gradient in gradients)


def nan(*shape):
    return torch.full(shape, torch.nan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(B, 6)}, r"x has shape \(2, 6\)"),
        ({"x": torch.ones(B, 6, D, dtype=torch.int64)}, "x has dtype torch.int64"),
        ({"x": nan(B, 6, D)}, "x holds 36 NaN values out of 36"),
        ({"weight": torch.ones(1, D)}, r"weight has shape \(1, 3\)"),
        ({"weight": nan(1, D, E)}, "weight holds 12 NaN"),
        ({"log_decay": -torch.ones(2, D, E)}, r"log_decay has shape \(2, 3, 4\)"),
        (
            {"log_decay": torch.full((1, D, E), 0.5)},
            "log_decay ranges from 0.5 to 0.5, expected finite",
        ),
        ({"log_decay": torch.full((1, D, E), -torch.inf)}, "log_decay ranges from -inf to -inf"),
        ({"log_decay": nan(1, D, E)}, "log_decay ranges from nan to nan"),
        ({"bidirectional": None}, "bidirectional is None"),
        ({"bidirectional": True}, r"log_decay has shape \(1, 3, 4\)"),
        ({"shape": (5,)}, r"shape is \(5,\), expected sizes whose product is T=6"),
        ({"shape": (3, 2)}, r"log_decay has shape \(1, 3, 4\)"),
        (
            {"x": torch.ones(B, 0, D), "shape": (0,)},
            r"shape is \(0,\)",
        ),
        ({"state": torch.ones(B, D, E)}, "state is a Tensor"),
        ({"state": ToeplitzState(torch.ones(B, D, 5))}, r"state.hidden has shape \(2, 3, 5\)"),
        ({"state": ToeplitzState(nan(B, D, E))}, "state.hidden holds 24 NaN"),
        ({"form": "scans"}, "form 'scans' is unknown .* available: dense, scan, fft"),
        ({"joint": 1}, "joint is 1, expected True or False"),
        ({"joint": True}, r"weight has shape \(1, 3, 4\), expected 'D E'"),
    ],
)
def test_errors_name_the_argument(change, message):
    named = dict(inputs((6,), dtype=torch.float32), **change)
    with pytest.raises(ValueError, match=message):
        unwrap(toeplitz_position)(**named)  # without the shape hook, as users call it


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
@pytest.mark.parametrize("named", [{"bidirectional": True}, {"joint": True}], ids=str)
def test_only_sums_read_forward_have_a_state(shape, named):
    if len(shape) == 1 and "joint" in named:
        return  # the same as without `joint`
    given = inputs(shape, **named)
    for name, value in (("state", ToeplitzState(torch.ones(B, 3, D, E))), ("return_state", True)):
        with pytest.raises(ValueError, match=f"{name} .* expected both False"):
            toeplitz_position(**dict(given, **{name: value}))


@over_forms
@pytest.mark.parametrize("shape", [(5, 3), (4, 1), (4, 3, 2)], ids=str)
def test_a_grid_continues_along_its_first_axis(form, shape):
    named = inputs(shape)
    leaves = [named[name].requires_grad_() for name in ("x", "log_decay", "weight")]
    want, none = toeplitz_position(**named, form=form)
    assert none is None
    assert_same([want], reference.forward(**named)[:1])
    gradients = torch.autograd.grad(want.square().sum(), leaves)
    row = math.prod(shape[1:])
    for cut in range(1, shape[0]):
        state, parts = None, []
        with chunks_of(2):
            for start, stop in ((0, cut), (cut, shape[0])):
                piece = dict(named, x=named["x"][:, start * row : stop * row])
                piece["shape"] = (stop - start, *shape[1:])
                piece.update(state=state, return_state=True)
                y, state = toeplitz_position(**piece, form=form)
                parts.append(y)
        assert state.hidden.shape == (B, *shape[1:], D, E)
        y = torch.cat(parts, dim=1)
        assert_same([y], [want])
        assert_same(torch.autograd.grad(y.square().sum(), leaves), gradients)


def test_errors_of_a_state_of_several_axes():
    named = dict(inputs((2, 3)), state=ToeplitzState(torch.ones(B, 4, D, E)))
    with pytest.raises(ValueError, match=r"state.hidden has shape \(2, 4, 3, 4\), expected 'B 3 D"):
        unwrap(toeplitz_position)(**named)
    with pytest.raises(ValueError, match=r"backend is 'triton', .* a state of several axes; avail"):
        toeplitz_position(**inputs((2, 3)), return_state=True, backend="triton")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(2, D, E)}, r"weight has shape \(2, 3, 4\), expected '2 2 D E'"),
        (
            {"form": "scan"},
            "form is 'scan', which does not support joint=True; available: auto, fft",
        ),
        (
            {"backend": "triton"},
            "backend is 'triton', which does not support joint=True; .*: auto, torch",
        ),
    ],
)
def test_joint_kernels_have_one_form(change, message):
    named = inputs((2, 3), bidirectional=True, joint=True, dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        unwrap(toeplitz_position)(**dict(named, **change))


def test_negative_sizes_are_refused_even_where_the_product_is_right():
    named = dict(inputs((2, 3)), shape=(-2, -3))
    with pytest.raises(ValueError, match=r"shape is \(-2, -3\)"):
        unwrap(toeplitz_position)(**named)


def test_the_choice_of_form():
    assert choose("auto", positions=1) == "dense"
    assert choose("auto", positions=128) == "dense"
    assert choose("auto", positions=129) == "scan"
    assert choose("fft", positions=1) == "fft"


def assert_compiles(named, form, **options):
    torch.compiler.reset()  # the tests share one budget of recompilations
    compiled = torch.compile(toeplitz_position, fullgraph=True, **options)
    want = outputs_and_gradients(functools.partial(toeplitz_position, form=form), named)
    got = outputs_and_gradients(functools.partial(compiled, form=form), named)
    assert_same(got[0], want[0])
    assert_same(got[1], want[1])


@pytest.mark.compile
@over_forms
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_without_a_graph_break(form, dynamic):
    named = inputs((70,), state=True)
    assert_compiles(named, form, dynamic=dynamic, backend="aot_eager")
    named = inputs((3, 66), bidirectional=True)
    assert_compiles(named, form, dynamic=dynamic, backend="aot_eager")


@pytest.mark.compile
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_joint_kernels_compile_without_a_graph_break(dynamic, bidirectional):
    named = inputs((3, 10), bidirectional=bidirectional, joint=True)
    assert_compiles(named, "fft", dynamic=dynamic, backend="aot_eager")


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@over_forms
def test_compiled_code_gives_the_same_numbers(form):
    assert_compiles(inputs((70,), state=True), form)
    if form == "fft":
        assert_compiles(inputs((3, 10), bidirectional=True, joint=True), form)
