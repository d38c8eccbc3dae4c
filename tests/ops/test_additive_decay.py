"""Additive decay: every implementation against the definition, and what the contract promises."""

import math
from functools import partial
from inspect import unwrap

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from op_checks import assert_at_most_twice_the_error, key_of, multiply_in_bfloat16
from pairwise import pairwise

from onescan.ops.additive_decay import (
    ADDITIVE_DECAY,
    AdditiveDecayState,
    additive_decay,
    merge_states,
    reference,
    tiled,
    tiled_causal,
)
from onescan.ops.additive_decay.op import Inputs, Options
from onescan.ops.lrpe import RotaryPositions, lrpe_angles

B, H, K, V = 2, 3, 4, 5
FEW = (2, 1, 2, 1)  # where every number is changed in turn
KEYS = [
    key
    for key in ADDITIVE_DECAY.implementations
    if key.backend == "torch" and key.direction in ("both", "causal")
]
FORMS = [(key.direction == "causal", key.form) for key in KEYS]
CAUSAL = [form for causal, form in FORMS if causal]
VARIANTS = [*FORMS, (True, "tiles"), (True, "halving"), (False, "by_sample")]
over_forms = pytest.mark.parametrize(
    ("causal", "form"), VARIANTS, ids=lambda x: str(x), indirect=["form"]
)


@pytest.fixture
def form(request, monkeypatch):
    """Return a form by name.

    "tiles" is the chunk form in tiles of one chunk, "halving" the chunk form as transforms see it,
    and "by_sample" one scan as it is for large samples, in tiles of three tokens.
    """
    if request.param == "tiles":
        monkeypatch.setattr(tiled_causal, "TILE", 1)
        return "chunk"
    if request.param == "halving":
        monkeypatch.setattr(tiled_causal, "needs_plain_functions", lambda *tensors: True)
        return "chunk"
    if request.param == "by_sample":
        monkeypatch.setattr(tiled, "SMALL_SAMPLE", 0)
        monkeypatch.setattr(tiled, "LARGE_SAMPLE", 0)
        monkeypatch.setattr(tiled, "TILE", 3 * H * K)
        return "one_scan"
    return request.param


def inputs(
    tokens,
    *,
    angles=True,
    keep=False,
    state=False,
    dtype=torch.float64,
    seed=0,
    scale=2.0,
    sizes=(B, H, K, V),
):
    g = torch.Generator().manual_seed(seed)
    batch, heads, keys, values = sizes

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    named = {
        "q": normal(batch, tokens, heads, keys),
        "k": normal(batch, tokens, heads, keys) * scale,
        "v": normal(batch, tokens, heads, values),
    }
    if angles:
        named["angles"] = normal(tokens, heads, keys)
    if keep:
        named["keep"] = torch.rand(batch, tokens, generator=g) < 0.6
    if state:
        features = 2 * keys if angles else keys
        named["state"] = AdditiveDecayState(
            normal(batch, heads, keys), normal(batch, heads, features, values)
        )
    return named


def leaves(named):
    """The same arguments with gradients wanted, and the list of what has one."""
    named = dict(named)
    for name in ("q", "k", "v", "angles"):
        if name in named:
            named[name] = named[name].clone().requires_grad_()
    tensors = [named[n] for n in ("q", "k", "v", "angles") if n in named]
    if "state" in named:
        named["state"] = AdditiveDecayState(*(x.clone().requires_grad_() for x in named["state"]))
        tensors += list(named["state"])
    return named, tensors


def outputs_and_gradients(function, named):
    named, tensors = leaves(named)
    o, state = function(**named)
    g = torch.Generator().manual_seed(7)
    loss = sum(
        (x * torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype)).sum()
        for x in (o, state.log_normalizer.nan_to_num(neginf=0), state.kv)
    )
    return (o, *state), torch.autograd.grad(loss, tensors)


def assert_same(got, want, *, atol=1e-9):
    for x, y in zip(got, want, strict=True):
        y = y.clamp(min=-1e30)  # the definition writes the logarithm of nothing as -inf
        torch.testing.assert_close(x.to(y.dtype), y, atol=atol, rtol=1e-9)


@pytest.mark.sampled(19)
@pairwise(
    {
        "causal, form": VARIANTS,
        "tokens": [1, 2, 3, 7, 16, 37],
        "angles": [False, True],
        "keep, state": [(False, False), (True, False), (True, True)],
    },
    indirect=["form"],
)
def test_every_form_matches_the_reference(causal, form, tokens, angles, keep, state):
    named = inputs(tokens, angles=angles, keep=keep, state=state)
    want = outputs_and_gradients(lambda **n: reference.forward(**n, causal=causal), named)
    sizes = {1, 3, 16, tokens + 1} if form == "chunk" else {64}
    for size in sizes:
        ours = partial(additive_decay, causal=causal, form=form, chunk_size=size)
        got = outputs_and_gradients(ours, named)
        assert_same(got[0], want[0])
        assert_same(got[1], want[1])


@pytest.mark.parametrize("tokens", [63, 64, 65, 129])
def test_default_chunks_match_the_reference(tokens):
    named = inputs(tokens, keep=True, state=True)
    want = outputs_and_gradients(lambda **n: reference.forward(**n, causal=True), named)
    got = outputs_and_gradients(lambda **n: additive_decay(**n, causal=True, form="chunk"), named)
    assert_same(got[0], want[0])
    assert_same(got[1], want[1])


@pytest.mark.sampled(2)
@over_forms
@pytest.mark.parametrize("angles", [False, True])
def test_gradcheck(causal, form, angles):
    named, tensors = leaves(inputs(5, angles=angles, keep=True, state=True, sizes=FEW))
    names = ["q", "k", "v"] + ["angles"] * angles

    def call(*x):
        changed = dict(named, **dict(zip(names, x, strict=False)))
        changed["state"] = AdditiveDecayState(*x[len(names) :])
        o, state = additive_decay(**changed, causal=causal, form=form, chunk_size=2)
        return o, *state

    assert torch.autograd.gradcheck(call, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


@pytest.mark.parametrize("first", CAUSAL)
@pytest.mark.parametrize("second", CAUSAL)
def test_two_calls_equal_one_at_every_cut(first, second):
    tokens = 9
    named = inputs(tokens, keep=True, state=True)
    want_o, want_state = additive_decay(**named, causal=True, form="full")
    for cut in range(1, tokens):
        named["state"] = inputs(tokens, keep=True, state=True)["state"]
        o1, state = additive_decay(**part(named, 0, cut), causal=True, form=first, chunk_size=4)
        named["state"] = state
        o2, state = additive_decay(
            **part(named, cut, tokens), causal=True, form=second, chunk_size=4
        )
        assert_same((torch.cat([o1, o2], dim=1), *state), (want_o, *want_state))


def part(named, start, stop):
    cut = {n: x[:, start:stop] for n, x in named.items() if n in ("q", "k", "v", "keep")}
    return dict(named, **cut, angles=named["angles"][start:stop])


@pytest.mark.parametrize("form", ["one_scan", "full"])
def test_the_state_of_tokens_elsewhere_joins_before_the_read_out(form):
    named = inputs(11)
    want, want_state = additive_decay(**named)
    here, there = part(named, 0, 4), part(named, 4, 11)
    _, state = additive_decay(**there, form=form)
    got, merged = additive_decay(**here, state=state, form=form)
    assert_same((got, *merged), (want[:, :4], *want_state))
    _, alone = additive_decay(**here)
    assert_same(merge_states(alone, state), want_state)


def test_merging_is_associative_and_nothing_is_its_unit():
    a, b, c = (additive_decay(**inputs(3, seed=seed))[1] for seed in range(3))
    assert_same(merge_states(merge_states(a, b), c), merge_states(a, merge_states(c, b)))
    nothing = AdditiveDecayState(torch.full_like(a.log_normalizer, -torch.inf), 0 * a.kv)
    assert_same(merge_states(nothing, a), a)


def test_merging_keeps_the_wider_type():
    narrow = AdditiveDecayState(torch.zeros(1, 1, 1), torch.ones(1, 1, 1, 1))
    wide = AdditiveDecayState(*(x.double() for x in narrow))
    for pair in ((narrow, wide), (wide, narrow)):
        assert merge_states(*pair).kv.dtype == torch.float64
    assert merge_states(narrow, narrow).kv.dtype == torch.float32


def test_the_last_causal_output_equals_the_bidirectional_one():
    named = inputs(13)
    causal, last = additive_decay(**named, causal=True)
    one_scan, whole = additive_decay(**named)
    assert_same((causal[:, -1], *last), (one_scan[:, -1], *whole))


def test_order_does_not_matter_without_positions():
    named = inputs(12, angles=False)
    order = torch.randperm(12)
    shuffled = {n: x[:, order] for n, x in named.items()}
    assert_same((additive_decay(**shuffled)[0],), (additive_decay(**named)[0][:, order],))


@over_forms
def test_masked_tokens_do_not_change_outputs(causal, form):
    named = inputs(10)
    keep = torch.tensor([1, 0, 0, 1, 1, 0, 1, 1, 1, 0], dtype=torch.bool).expand(B, -1)
    short = {n: x[:, keep[0]] for n, x in named.items() if n != "angles"}
    want = additive_decay(**short, angles=named["angles"][keep[0]], causal=causal, form=form)
    for name in ("q", "k", "v"):
        named[name] = named[name].masked_fill(~keep[:, :, None, None], torch.nan)
    o, state = additive_decay(**named, keep=keep, causal=causal, form=form)
    assert_same((o[:, keep[0]], *state), (want[0], *want[1]))
    assert (o[:, ~keep[0]] == 0).all()


@over_forms
def test_fully_masked_rows_are_zero_with_finite_gradients(causal, form):
    named = inputs(9)
    named["keep"] = torch.tensor([[True] * 9, [False] * 9])
    outputs, gradients = outputs_and_gradients(
        lambda **n: additive_decay(**n, causal=causal, form=form, chunk_size=4), named
    )
    assert (outputs[0][1] == 0).all()
    assert (outputs[2][1] == 0).all()
    assert all(torch.isfinite(x).all() for x in (*outputs, *gradients))


@pytest.mark.parametrize("form", CAUSAL)
def test_padding_read_in_pieces_leaves_an_empty_state(form):
    named, state = inputs(4, dtype=torch.float32), None
    named["keep"] = torch.tensor([[True] * 4, [False] * 4])
    for _ in range(3):
        o, state = additive_decay(**named, state=state, causal=True, form=form)
        assert torch.isfinite(o).all()
        assert (state.kv[1] == 0).all()
        assert state.log_normalizer[1].exp().max() == 0
    whole, _ = additive_decay(**named, causal=True, form=form)
    turned = {n: x.flip(0) if n != "angles" else x for n, x in named.items()}
    o, _ = additive_decay(**turned, state=state, causal=True, form=form)
    torch.testing.assert_close(o[1], whole.flip(0)[1])


@over_forms
@pytest.mark.parametrize("climb", [0, 300])
def test_a_state_of_minus_infinity_is_empty(causal, form, climb):
    named = inputs(9, scale=1.0)
    named["k"] += climb * torch.arange(9)[:, None, None]
    call = partial(additive_decay, causal=causal, form=form)
    want = outputs_and_gradients(call, named)
    log_normalizer = torch.full((B, H, K), -torch.inf).double()
    named["state"] = AdditiveDecayState(log_normalizer, torch.zeros(B, H, 2 * K, V).double())
    values, gradients = outputs_and_gradients(call, named)
    assert_same(values, want[0])
    assert_same(gradients[:4], want[1])
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("form", CAUSAL)
def test_a_token_without_weight_reads_the_state_before_a_climb(form):
    one = torch.ones(1, 2, 1, 1)
    k = torch.tensor([-torch.inf, 45.0]).reshape(1, 2, 1, 1)
    seen = AdditiveDecayState(torch.zeros(1, 1, 1).double(), torch.full((1, 1, 1, 1), 2.0))
    o, _ = additive_decay(one, k, 5 * one, state=seen, causal=True, form=form)
    torch.testing.assert_close(o.flatten(), torch.tensor([2.0, 5.0]))


@pytest.mark.parametrize("run", [additive_decay, reference.forward])
def test_leading_tokens_without_weight_give_zero(run):
    k = torch.tensor([-torch.inf, -torch.inf, 0.0]).double().reshape(1, 3, 1, 1)
    one = torch.ones_like(k)
    o, state = run(one, k, 5 * one, causal=True)
    assert o.flatten().tolist() == [0, 0, 5]
    assert state.kv.item() == 5


@pytest.mark.parametrize(("causal", "form"), FORMS)
def test_a_batch_may_be_empty(causal, form):
    x = torch.zeros(0, 5, H, K)
    o, state = additive_decay(x, x, x, causal=causal, form=form)
    assert o.shape == (0, 5, H, K)
    assert state.kv.shape == (0, H, K, K)


@pytest.mark.sampled(17)
@pairwise(
    {
        "causal, form": VARIANTS,
        "dtype": [torch.float64, torch.float32],
        "kind": [
            "spans",
            "climbs",
            "climbs a little",
            "falls",
            "huge",
            "offset",
            "one spike",
            "-inf",
        ],
    },
    indirect=["form"],
)
def test_extreme_logits(causal, form, dtype, kind):
    tokens = 70
    named = inputs(tokens, scale=1.0)
    k = named["k"]
    rise = torch.linspace(0, 1, tokens, dtype=torch.float64)[:, None]
    if kind == "spans":
        k[:, ::3, 0] += 200
        k[:, ::5, 1] -= 200
    elif kind == "climbs":
        k += 1000 * rise[:, None]
    elif kind == "climbs a little":
        k *= 0.1
        k += 39 * rise[:, None]
    elif kind == "falls":
        k -= 1000 * rise[:, None]
    elif kind == "huge":
        k *= 1e4
    elif kind == "offset":
        k += 1e4 * torch.tensor([1.0, -1.0, 1.0, -1.0])
    elif kind == "one spike":
        k[:, 40, :, 0] = 1e4
        k[:, 20, :, 1] = -1e4
    else:
        k[:, :3] = -torch.inf
        k[0] = -torch.inf
    low = {n: x.to(dtype) for n, x in named.items()}
    exact = {n: x.double() for n, x in low.items()}
    exact["k"] = exact["k"].clamp(min=-1e300)  # where the definition would meet inf - inf
    want = reference.forward(**exact, causal=causal)[0]
    if kind == "-inf":  # where no token has weight the mean is 0
        want[:, :3] *= not causal
        want[0] = 0
    got, gradients = outputs_and_gradients(
        lambda **n: additive_decay(**n, causal=causal, form=form), low
    )
    assert all(torch.isfinite(x).all() for x in (*got, *gradients))
    tolerance = 1e-9 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(got[0].double(), want, atol=tolerance, rtol=tolerance)


def test_ten_thousand_tokens_of_extreme_logits_stay_exact_in_float32():
    tokens = 10_000
    noise, ramp = torch.randn(tokens).clamp(-3, 3) / 3, torch.linspace(-1, 1, tokens)
    shapes = torch.stack([noise, ramp, -ramp])
    k = torch.cat([80 * shapes, 1e4 * shapes])[:, :, None, None]
    k = k + torch.randn(1, tokens, 1, 2)  # B T H K
    q, v = torch.randn(2, len(k), tokens, 1, 2)
    exact, state = reference.forward(q.double(), k.double(), v.double(), causal=True)
    both = torch.einsum("bthk,bhkv->bthv", q.double(), state.kv)
    for causal, want in ((True, exact), (False, both)):
        errors = [
            (additive_decay(*x, causal=causal)[0] - y).abs().max() / y.abs().max()
            for *x, y in zip(*(x.split(1) for x in (q, k, v, want)), strict=True)
        ]
        assert max(errors) <= 2e-6


STEPS = torch.arange(150, dtype=torch.float64)
HOSTILE = {
    "17 a token": 17 * STEPS,
    "19 a token": 19 * STEPS,
    "down 30 a token": -30 * STEPS,
    "17 a block": 17 * (STEPS // 8),
    "90 a chunk": 90 * (STEPS // 64),
    "steep in each chunk": 20 * (STEPS % 64),
    "alternating": 1e4 * (-1) ** STEPS,
    "constant": 1e4 * torch.ones_like(STEPS),
    "spike": torch.where(STEPS == 100, 1e4, 0.0),
    "empty start": torch.where(STEPS < 70, -torch.inf, STEPS),
    "from end to end": torch.linspace(-1e4, 1e4, len(STEPS), dtype=torch.float64),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("form", ["chunk", "tiles"], indirect=True)
def test_hostile_logits_are_exact_in_float32(form, kind):
    named = inputs(
        len(STEPS), dtype=torch.float32, keep=kind == "17 a token", state=True, scale=0.5
    )
    named["k"][:, :, 0] = 0  # without noise
    named["k"] += HOSTILE[kind][:, None, None].float()
    exact = {n: x if n in ("keep", "state") else x.double() for n, x in named.items()}
    exact["state"] = AdditiveDecayState(*(x.double() for x in named["state"]))
    want = outputs_and_gradients(lambda **n: reference.forward(**n, causal=True), exact)
    got = outputs_and_gradients(lambda **n: additive_decay(**n, causal=True, form=form), named)
    for x, y in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        assert (x.double() - y).abs().max() <= 3e-5 * y.abs().max().clamp(min=1)


@pytest.mark.parametrize("climb", [30, 300])
def test_the_gradient_of_a_climb_is_the_definitions(climb):
    named = inputs(40, scale=1.0, keep=True, state=True)
    named["k"][:, :, 0] += torch.linspace(0, climb, 40)[:, None]
    want = outputs_and_gradients(lambda **n: reference.forward(**n, causal=True), named)
    got = outputs_and_gradients(lambda **n: additive_decay(**n, causal=True, form="chunk"), named)
    assert_same(got[1], want[1])


@pytest.mark.parametrize("climb", [38, 68])
def test_second_derivatives_of_a_climb_are_finite_in_float32(climb):
    q, k, v = (inputs(5, dtype=torch.float32)[name] for name in "qkv")
    k = (k * 0.1 + torch.linspace(0, climb, 5)[:, None, None]).requires_grad_()
    (first,) = torch.autograd.grad(
        additive_decay(q, k, v, causal=True)[0].sin().sum(), k, create_graph=True
    )
    (second,) = torch.autograd.grad(first.square().sum(), k)
    assert torch.isfinite(second).all()
    assert second.abs().max() > 0


def test_a_hundred_thousand_tokens():
    tokens = 100_000
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, tokens, 1, 4, generator=g) for _ in range(3))
    exact = [x.double() for x in (q, k, v)]
    for causal in (False, True):
        got, state = additive_decay(q, k, v, causal=causal)
        want, want_state = additive_decay(*exact, causal=causal, chunk_size=256)
        assert (got - want).abs().max() < 2e-6
        torch.testing.assert_close(
            state.log_normalizer, want_state.log_normalizer, atol=1e-6, rtol=0
        )
    cumulative = exact[1].logcumsumexp(dim=1)
    torch.testing.assert_close(
        additive_decay(q, k, v, causal=True)[1].log_normalizer, cumulative[:, -1], atol=1e-6, rtol=0
    )


@pytest.mark.sampled(4)
@over_forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_less_exact_than_plain_torch(causal, form, dtype):
    """The error against float64 is at most twice what the definition makes in the same dtype."""
    named = inputs(48, dtype=dtype)
    exact = {n: x.double() for n, x in named.items()}

    plain = partial(reference.forward, causal=causal)
    ours = partial(additive_decay, causal=causal, form=form)
    runs = [(ours, named), (plain, named), (plain, exact)]
    results = (outputs_and_gradients(*run) for run in runs)
    assert_at_most_twice_the_error(*(outputs[:1] + slopes for outputs, slopes in results))


@pytest.mark.parametrize("scale", [2.0, 20.0])
@pytest.mark.parametrize("state", [True, False])
def test_bfloat16_products_are_no_less_exact_than_plain_torch(state, scale, monkeypatch):
    """On a GPU, products of one scan are bfloat16, and its state is float32."""
    multiply_in_bfloat16(monkeypatch, "additive_decay")
    named = inputs(48, dtype=torch.bfloat16, state=state, scale=scale)
    exact = {
        n: AdditiveDecayState(*(y.double() for y in x)) if n == "state" else x.double()
        for n, x in named.items()
    }
    plain = partial(reference.forward, causal=False)
    runs = [(additive_decay, named), (plain, named), (plain, exact)]
    results = (outputs_and_gradients(*run) for run in runs)
    assert_at_most_twice_the_error(*(outputs[:1] + slopes for outputs, slopes in results))
    o, after = additive_decay(**named)
    assert o.dtype == torch.bfloat16
    assert after.kv.dtype == torch.float32


@pytest.mark.parametrize("causal", [False, True])
def test_the_state_is_wide_and_the_output_is_of_the_values_type(causal):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        o, state = additive_decay(**inputs(3, dtype=dtype), causal=causal)
        assert o.dtype == dtype
        assert state.log_normalizer.dtype == torch.float64
        assert state.kv.dtype == torch.promote_types(dtype, torch.float32)


def test_autocast_does_not_narrow_the_sums():
    named = inputs(20, dtype=torch.float32)
    want = additive_decay(**named)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(additive_decay(**named)[0], want)


def test_a_causal_backward_runs_under_autocast():
    def gradient() -> torch.Tensor:
        k = named["k"].clone().requires_grad_()
        additive_decay(**named | {"k": k}, causal=True)[0].square().sum().backward()
        return k.grad

    named = inputs(20, dtype=torch.float32)
    want = gradient()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(gradient(), want)


@given(
    tokens=st.integers(1, 40),
    size=st.integers(1, 45),
    cut=st.floats(0, 1),
    seed=st.integers(0, 99),
    scale=st.sampled_from([0.1, 3.0, 100.0]),
)
def test_any_length_cut_and_mask(tokens, size, cut, seed, scale):
    named = inputs(tokens, keep=True, state=True, seed=seed, scale=scale)
    want = reference.forward(**named, causal=True)
    cut = 1 + math.floor(cut * (tokens - 1))
    o1, state = additive_decay(**part(named, 0, cut), causal=True, form="chunk", chunk_size=size)
    o2 = o1[:, :0]
    if cut < tokens:
        named["state"] = state
        o2, state = additive_decay(
            **part(named, cut, tokens), causal=True, form="chunk", chunk_size=size
        )
    assert_same((torch.cat([o1, o2], dim=1), *state), (want[0], *want[1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": torch.ones(B, 3, H, V)}, r"v has shape \(2, 3, 3, 5\)"),
        ({"q": torch.ones(B, 4, H)}, r"q has shape \(2, 4, 3\)"),
        ({"q": None, "k": None, "v": None}, "q is a NoneType"),
        ({"v": torch.ones(B, 4, H, V, dtype=torch.int64)}, "v has dtype torch.int64"),
        ({"angles": torch.ones(5, H, K)}, r"angles has shape \(5, 3, 4\)"),
        ({"keep": torch.ones(B, 4)}, "keep has dtype torch.float32"),
        ({"state": (1, 2)}, "state is a tuple"),
        (
            {"state": AdditiveDecayState(torch.ones(B, H, K), torch.ones(B, H, K, V))},
            r"state.kv has shape \(2, 3, 4, 5\).*'B H 8 V'",
        ),
        ({"form": "foo"}, "'foo' .*auto, one_scan, full$"),
        (
            {"form": "chunk"},
            "form is 'chunk', which does not support causal=False; available: auto, one_scan, full",
        ),
        (
            {"form": "one_scan", "causal": True},
            "form is 'one_scan', which does not support causal=True; available: auto, chunk,",
        ),
        ({"form": "chunks"}, "form 'chunks' is unknown; available: auto, one_scan, full"),
        (
            {"form": "full", "backend": "triton"},
            "backend is 'triton', which does not support form 'full' with causal=False; available: "
            "one_scan/torch, one_scan/triton, full/torch",
        ),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"chunk_size": 2.5}, "chunk_size is 2.5"),
        ({"chunk_size": "64"}, "chunk_size is '64'"),
        ({"causal": "no"}, "causal is 'no'"),
        ({"v": torch.ones(B, 4, H, 0)}, "V is 0"),
        ({"k": torch.ones(B, 4, H, K, device="meta")}, "k is on meta and q on cpu"),
        ({"angles": torch.full((4, H, K), torch.nan)}, "angles holds 48 NaN values out of 48"),
        ({"angles": RotaryPositions(torch.ones(H, K + 1))}, r"angles\.theta has shape"),
        ({"angles": RotaryPositions(torch.ones(H, K), -1)}, r"angles\.start is -1"),
        (
            {"angles": RotaryPositions(torch.ones(H, K), torch.tensor(2.5))},
            r"angles\.start has shape \(\) and dtype torch.float32, expected a single integer",
        ),
        (
            {"angles": RotaryPositions(torch.ones(H, K), torch.tensor([1, 2]))},
            r"angles\.start has shape \(2,\) and dtype torch.int64, expected a single integer",
        ),
        ({"feature_map": "exp"}, "feature_map 'exp' is unknown.*identity, silu"),
        ({"k": torch.full((B, 4, H, K), torch.inf)}, r"k holds 96 \+inf values out of 96"),
        (
            {
                "state": AdditiveDecayState(
                    torch.ones(B, H, K), torch.ones(B, H, 2 * K, V).to(torch.complex64)
                )
            },
            "state.kv has dtype torch.complex64",
        ),
        ({"q": torch.full((B, 4, H, K), torch.nan)}, "q holds 96 NaN"),
        ({"k": torch.full((B, 4, H, K), torch.nan)}, "k holds 96 NaN"),
        ({"v": torch.full((B, 4, H, V), torch.nan)}, "v holds 120 NaN"),
    ],
)
def test_errors_name_the_argument(change, message):
    named = dict(inputs(4, dtype=torch.float32), **change)
    with pytest.raises(ValueError, match=message):
        unwrap(additive_decay)(**named)  # without the shape hook, as users call it


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            AdditiveDecayState(torch.ones(1, 1, 3), torch.ones(1, 1, 1, 1)),
            "a.kv has 1 features",
        ),
        (
            AdditiveDecayState(torch.ones(1, 2, 3), torch.ones(1, 1, 3, 1)),
            "b.log_normalizer has shape",
        ),
        ((1, 2), "b is a tuple"),
        (AdditiveDecayState(torch.ones(1, 1, 3).long(), torch.ones(1, 1, 3, 1)), "int64"),
        (
            AdditiveDecayState(torch.full((1, 1, 3), torch.nan), torch.ones(1, 1, 3, 1)),
            "3 NaN values out of 3",
        ),
    ],
)
def test_states_that_cannot_be_merged(other, message):
    if message.startswith("a.kv"):
        state = other
    else:
        state = AdditiveDecayState(torch.ones(1, 1, 3), torch.ones(1, 1, 3, 1))
    with pytest.raises(ValueError, match=message):
        unwrap(merge_states)(state, other)


@pytest.mark.parametrize(("causal", "form"), FORMS)
def test_positions_and_feature_maps_are_applied_first(causal, form):
    named = inputs(5, dtype=torch.float64) | {"causal": causal, "form": form}
    theta = torch.rand(H, K, dtype=torch.float64)
    fused = named | {"angles": RotaryPositions(theta, 3), "feature_map": "silu"}
    apart = named | {"angles": lrpe_angles((5,), theta, start=3), "q": F.silu(named["q"])}
    torch.testing.assert_close(additive_decay(**fused), additive_decay(**apart), rtol=0, atol=0)


def test_no_tokens_is_an_error():
    with pytest.raises(ValueError, match="T is 0"):
        additive_decay(*(torch.ones(1, 0, 1, 1) for _ in range(3)))


def test_the_choice_of_form():
    def chosen(tokens, **layout):
        x = torch.ones(1, tokens, 1, 1)
        return key_of(ADDITIVE_DECAY, Inputs(x, x, x, None), Options("identity", 64), **layout)

    assert chosen(9) == ("both", "one_scan", "torch")
    assert chosen(9, causal=True) == ("causal", "chunk", "torch")
    assert chosen(1, causal=True) == ("causal", "recurrent", "torch")
    assert chosen(9, causal_block=2) == ("blocks", "one_scan", "torch")


@pytest.mark.parametrize("form", ["by_sample"], indirect=True)
def test_gradients_by_sample_have_gradients(form):
    named, tensors = leaves(inputs(3, keep=True, sizes=FEW))
    names = ["q", "k", "v", "angles"]

    def call(*x):
        changed = dict(named, **dict(zip(names, x, strict=True)))
        o, state = additive_decay(**changed, form=form)
        return o, *state

    assert torch.autograd.gradgradcheck(call, tensors)


@pytest.mark.parametrize("form", ["by_sample"], indirect=True)
@pytest.mark.parametrize("wanted", ["v", "angles", "k"])
def test_some_gradients_by_sample_have_gradients(form, wanted):
    named = inputs(3)
    x = named[wanted].requires_grad_()
    slope = torch.autograd.grad(additive_decay(**named)[0].square().sum(), x, create_graph=True)[0]
    (twice,) = torch.autograd.grad(slope.square().sum(), x)
    assert twice.isfinite().all()
    assert twice.any()


@pytest.mark.parametrize("form", ["by_sample"], indirect=True)
def test_large_samples_leave_transforms_to_plain_torch(form):
    named = inputs(3, angles=False)
    want = additive_decay(**named)[0]
    over = {name: named.pop(name) for name in ["v"]}
    got = torch.vmap(lambda v: additive_decay(**named, v=v)[0], in_dims=0)(over["v"].unsqueeze(0))
    assert_same(got[0], want)


@pytest.mark.parametrize("form", ["by_sample"], indirect=True)
def test_large_samples_leave_forward_derivatives_to_plain_torch(form):
    named = inputs(3, angles=False)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(named["q"], torch.ones_like(named["q"]))
        o, _ = additive_decay(dual, named["k"], named["v"], form=form)
        slope = torch.autograd.forward_ad.unpack_dual(o).tangent
    ones = torch.ones_like(named["q"])
    assert_same(slope, additive_decay(ones, named["k"], named["v"])[0])


@over_forms
@pytest.mark.parametrize("tokens", [1, 70])
def test_forward_mode_agrees_with_backward_mode(causal, form, tokens):
    named = inputs(tokens, state=True, dtype=torch.float64)
    state = named.pop("state")
    names = [name for name in named if name != "keep"]

    def call(*values):
        return additive_decay(
            **dict(zip(names, values, strict=True)), state=state, causal=causal, form=form
        )[0]

    primals = tuple(named[name] for name in names)
    tangents = tuple(torch.randn_like(x) for x in primals)
    o, ahead = torch.func.jvp(call, primals, tangents)
    direction = torch.randn_like(o)
    back = torch.func.vjp(call, *primals)[1](direction)
    want = sum((g * t).sum() for g, t in zip(back, tangents, strict=True))
    torch.testing.assert_close((ahead * direction).sum(), want)


@pytest.mark.compile
@pytest.mark.parametrize(("causal", "form"), FORMS)
def test_compiles_without_a_graph_break(causal, form):
    compiled = torch.compile(additive_decay, fullgraph=True, backend="aot_eager")
    named = inputs(9, keep=True, state=True)
    want = outputs_and_gradients(
        lambda **n: additive_decay(**n, causal=causal, form=form, chunk_size=4), named
    )
    got = outputs_and_gradients(
        lambda **n: compiled(**n, causal=causal, form=form, chunk_size=4), named
    )
    assert_same(got[0], want[0])
    assert_same(got[1], want[1])


@pytest.mark.parametrize("causal", [False, True])
def test_vmap(causal):
    q, k, v = torch.randn(3, 4, B, 6, H, K)
    got, _ = torch.func.vmap(partial(additive_decay, causal=causal))(q, k, v)
    want = [additive_decay(*one, causal=causal)[0] for one in zip(q, k, v, strict=True)]
    torch.testing.assert_close(got, torch.stack(want))


@pytest.mark.parametrize("options", [{"causal": True}, {}, {"causal_block": 3}])
@pytest.mark.parametrize("offsets", [None, [0]])
def test_no_samples_have_gradients(options, offsets):
    tensors = [torch.randn(0, 8, H, K, requires_grad=True) for _ in range(3)]
    packed = {} if offsets is None else {"cu_seqlens": torch.tensor(offsets)}
    o, _ = additive_decay(*tensors, **options, **packed)
    assert [g.shape for g in torch.autograd.grad(o.sum(), tensors)] == [(0, 8, H, K)] * 3


@pytest.mark.parametrize(("causal", "tokens"), [(True, 9), (False, 4096)])
def test_vmap_over_another_tensor(causal, tokens):
    q, k, v = (torch.randn(1, tokens, 6, 64, requires_grad=True) for _ in range(3))
    o, _ = additive_decay(q, k, v, causal=causal)
    got = torch.vmap(lambda y: (additive_decay(q, k, v, causal=causal)[0] * y).mean())(
        torch.tensor([1.0, 2.0])
    )
    torch.testing.assert_close(got, torch.stack([o.mean(), 2 * o.mean()]))
