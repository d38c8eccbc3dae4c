"""The delta rule: every form against the definition, and what the contract promises."""

import math
from functools import partial
from inspect import unwrap

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from op_checks import assert_at_most_twice_the_error, assert_same, key_of
from pairwise import pairwise

from onescan.ops.delta_rule import DELTA_RULE, DeltaState, DeltaStates, delta_rule, reference
from onescan.ops.delta_rule.forms import Inputs
from onescan.ops.delta_rule.op import Options

B, H, K, V = 2, 3, 4, 5
NAMES = list(dict.fromkeys(key.form for key in DELTA_RULE.implementations))
FORMS = [(causal, form) for causal in (True, False) for form in NAMES]
over_forms = pytest.mark.parametrize(("causal", "form"), FORMS, ids=lambda x: str(x))
KINDS = [(None, None), ("scalar", None), ("diagonal", 2)]
over_kinds = pytest.mark.parametrize(("decay", "updates"), KINDS)
over_cases = pytest.mark.parametrize(
    ("causal", "form", "decay", "updates"),
    [
        *((causal, form, None, None) for causal, form in FORMS if form != "full"),
        (False, "chunk", "scalar", 2),
        (False, "chunk", "diagonal", None),
        (True, "full", "scalar", None),
        (True, "recurrent", "diagonal", 2),
    ],
)
TENSORS = ("q", "k", "v", "beta")
DECAYS = [None, "scalar", "diagonal"]


def inputs(
    tokens,
    *,
    causal,
    keep=False,
    state=False,
    dtype=torch.float64,
    seed=0,
    scale=1.0,
    heads=H,
    width=K,
    decay=None,
    updates=None,
):
    each = () if updates is None else (updates,)
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    named = {
        "q": normal(B, tokens, heads, width),
        "k": F.normalize(normal(B, tokens, *each, heads, width), dim=-1),
        "v": normal(B, tokens, *each, heads, V) * scale,
        "beta": 2 * normal(B, tokens, *each, heads).sigmoid(),
    }
    if decay is not None:
        size = (B, tokens, heads, width)[: 3 if decay == "scalar" else 4]
        named["log_decay"] = -normal(*size).exp()
    named = {name: x.to(dtype) for name, x in named.items()}
    if keep:
        named["keep"] = torch.rand(B, tokens, generator=g) < 0.6
    if state:
        left, right = (DeltaState(normal(B, heads, width, V).to(dtype)) for _ in range(2))
        named["state"] = left if causal else DeltaStates(left, right)
    return named


def matrices(state):
    """The matrices of a state, of either kind."""
    return [state.kv] if isinstance(state, DeltaState) else [side.kv for side in state]


def state_of(matrices):
    """The state of one matrix, or of two."""
    states = [DeltaState(kv) for kv in matrices]
    return states[0] if len(states) == 1 else DeltaStates(*states)


def leaves(named):
    """The same arguments with gradients wanted, and the list of what has one."""
    names = [*TENSORS, *(["log_decay"] if "log_decay" in named else [])]
    tensors = [named[name].clone().requires_grad_() for name in names]
    named = dict(named, **dict(zip(names, tensors, strict=True)))
    if "state" in named:
        kv = [x.clone().requires_grad_() for x in matrices(named["state"])]
        named["state"] = state_of(kv)
        tensors += kv
    return named, tensors


def outputs_and_gradients(function, named):
    named, tensors = leaves(named)
    o, state = function(**named)
    outputs = (o, *matrices(state))
    g = torch.Generator().manual_seed(7)
    loss = sum(
        (x * torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype)).sum()
        for x in outputs
    )
    return outputs, torch.autograd.grad(loss, tensors)


def assert_matches_reference(named, *, causal, form, sizes=(64,)):
    want = outputs_and_gradients(partial(reference.forward, causal=causal), named)
    for size in sizes:
        ours = partial(delta_rule, causal=causal, form=form, chunk_size=size)
        got = outputs_and_gradients(ours, named)
        assert_same(got[0], want[0])
        assert_same(got[1], want[1])


@pytest.mark.sampled(13)
@pairwise(
    {
        "causal, form": FORMS,
        "tokens": [1, 2, 17, 64],
        "keep, state": [(False, False), (True, False), (True, True)],
        "decay": DECAYS,
        "updates": [None, 1, 2, 3],
    }
)
def test_every_form_matches_the_reference(causal, form, tokens, keep, state, decay, updates):
    named = inputs(tokens, causal=causal, keep=keep, state=state, decay=decay, updates=updates)
    sizes = {1, 7, 16, 64, tokens + 1} if form == "chunk" else {64}
    assert_matches_reference(named, causal=causal, form=form, sizes=sizes)


@pytest.mark.sampled(6)
@over_forms
@pytest.mark.parametrize(("tokens", "decay"), [(63, "scalar"), (65, "diagonal"), (197, None)])
def test_one_head_and_lengths_around_a_chunk_and_of_an_image(causal, form, tokens, decay):
    named = inputs(tokens, causal=causal, keep=True, state=True, heads=1, decay=decay)
    assert_matches_reference(named, causal=causal, form=form)


@pytest.mark.sampled(6)
@pairwise({"causal, form": FORMS, "decay": DECAYS[1:], "updates": [None, 2]}, rest_is_slow=True)
def test_decays_from_one_to_zero(causal, form, decay, updates):
    named = inputs(70, causal=causal, state=True, decay=decay, updates=updates)
    named["log_decay"] = extreme(named["log_decay"])
    assert_matches_reference(named, causal=causal, form=form)


def extreme(log_decay):
    """Replace some log-decays by 0, small and large ones, the lowest number, and -inf."""
    g = torch.Generator().manual_seed(3)
    choices = torch.tensor([0, -1e-6, -60, -800, torch.finfo(torch.float64).min, -torch.inf])
    choices = torch.cat([choices.double(), torch.full((6,), torch.nan, dtype=torch.float64)])
    picked = choices[torch.randint(len(choices), log_decay.shape, generator=g)]
    return torch.where(picked.isnan(), log_decay, picked)


@over_forms
@pytest.mark.parametrize("decay", DECAYS[1:])
def test_a_decay_of_zero_empties_the_state(causal, form, decay):
    named = inputs(9, causal=causal, state=True, decay=decay)
    named["log_decay"][:, 5] = -torch.inf
    o, state = delta_rule(**named, causal=causal, form=form, chunk_size=4)
    rest = {n: x for n, x in named.items() if n != "state"}
    if causal:
        want, last = delta_rule(**part(rest, 5, 9), causal=True)
        assert_same((o[:, 5:], state.kv), (want, last.kv))
        return
    right = named["state"].backward
    want, ends = delta_rule(**part(rest, 5, 9), state=(None, right))
    assert_same((o[:, 6:], state.forward.kv), (want[:, 1:], ends.forward.kv))
    want, ends = delta_rule(**part(rest, 0, 6), state=(named["state"].forward, None))
    assert_same((o[:, :5], state.backward.kv), (want[:, :5], ends.backward.kv))


@over_forms
def test_equal_decays_of_channels_are_a_decay_of_the_head(causal, form):
    named = inputs(20, causal=causal, state=True, decay="scalar", updates=2)
    want, ends = delta_rule(**named, causal=causal, form=form)
    named["log_decay"] = named["log_decay"].unsqueeze(-1).expand(-1, -1, -1, K)
    got, state = delta_rule(**named, causal=causal, form=form)
    assert_same((got, *matrices(state)), (want, *matrices(ends)))


@over_forms
def test_updates_are_steps_of_which_the_last_one_is_read(causal, form):
    """One direction equals a call with one update per token, and a decay at each token's first."""
    tokens, updates = 9, 3
    named = inputs(tokens, causal=causal, state=True, decay="diagonal", updates=updates)

    def steps(order):
        one_each = {n: named[n][:, order].flatten(1, 2) for n in TENSORS[1:]}
        last = {"q": named["q"], "log_decay": named["log_decay"]}
        q, log_decay = (torch.zeros(B, tokens, updates, H, K).double() for _ in last)
        q[:, :, -1], log_decay[:, :, 0] = named["q"][:, order], named["log_decay"][:, order]
        return dict(one_each, q=q.flatten(1, 2), log_decay=log_decay.flatten(1, 2))

    states = [named["state"]] if causal else named["state"]
    got, ends = delta_rule(**named, causal=causal, form=form, chunk_size=4)
    want, forward_order = 0, torch.arange(tokens)
    for order, state, end in zip(
        (forward_order, forward_order.flip(0)), states, matrices(ends), strict=False
    ):
        o, last = delta_rule(**steps(order), state=state, causal=True)
        want = want + o[:, updates - 1 :: updates][:, order]
        assert_same([end], [last.kv])
    if not causal:
        for t in range(tokens):
            token = part({n: x for n, x in named.items() if n != "state"}, t, t + 1)
            want[:, t : t + 1] -= delta_rule(**token, causal=True)[0]
    assert_same([got], [want])


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_both_directions_are_products_of_householder_matrices(tokens):
    """S_t = sum over s of (I - beta k k^T)_t ... (I - beta k k^T)_{s+1} beta_s k_s v_s^T."""
    named = inputs(tokens, causal=False, state=True)
    q, k, v, beta = (named[name] for name in TENSORS)
    steps = torch.eye(K) - torch.einsum("bth,bthk,bthl->tbhkl", beta, k, k).double()
    writes = torch.einsum("bth,bthk,bthv->tbhkv", beta, k, v)

    def product(indices):
        result = torch.eye(K, dtype=torch.float64).expand(B, H, K, K)
        for t in indices:
            result = steps[t] @ result
        return result

    left, right = matrices(named["state"])
    outputs = []
    for t in range(tokens):
        read = product(range(t + 1)) @ left + product(reversed(range(t, tokens))) @ right
        for s in range(tokens):
            between = range(s + 1, t + 1) if s <= t else range(s - 1, t - 1, -1)
            read = read + product(between) @ writes[s]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], read))
    assert_same([delta_rule(**named)[0]], [torch.stack(outputs, dim=1)])
    assert_same([reference.forward(**named)[0]], [torch.stack(outputs, dim=1)])


@pytest.mark.sampled
@over_cases
def test_gradcheck(causal, form, decay, updates):
    made = inputs(3, causal=causal, keep=True, state=True, heads=1, decay=decay, updates=updates)
    named, tensors = leaves(made)
    named = {name: x for name, x in named.items() if name == "keep"}
    if decay is None:
        tensors.insert(4, None)

    def call(q, k, v, beta, log_decay, *kv):
        o, state = delta_rule(
            q,
            k,
            v,
            beta,
            log_decay,
            **named,
            causal=causal,
            state=state_of(kv),
            form=form,
            chunk_size=2,
        )
        return o, *matrices(state)

    assert torch.autograd.gradcheck(call, tensors)
    assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


@pairwise(
    {"decay, updates": KINDS, "first": NAMES, "second": NAMES},
    rest_is_slow=True,
)
def test_two_calls_equal_one_at_every_cut(first, second, decay, updates):
    tokens = 9
    named = inputs(tokens, causal=True, keep=True, state=True, decay=decay, updates=updates)
    want, last = delta_rule(**named, causal=True)
    for cut in range(1, tokens):
        o1, state = delta_rule(**part(named, 0, cut), causal=True, form=first, chunk_size=4)
        rest = dict(part(named, cut, tokens), state=state)
        o2, state = delta_rule(**rest, causal=True, form=second, chunk_size=4)
        assert_same((torch.cat([o1, o2], dim=1), state.kv), (want, last.kv))


@over_kinds
@pytest.mark.parametrize("form", NAMES)
def test_two_bidirectional_calls_equal_one_at_every_cut(form, decay, updates):
    tokens = 9
    named = inputs(tokens, causal=False, keep=True, state=True, decay=decay, updates=updates)
    left, right = named["state"]
    want, ends = delta_rule(**named)
    call = partial(delta_rule, form=form, chunk_size=4)
    for cut in range(1, tokens):
        before, after = part(named, 0, cut), part(named, cut, tokens)
        passed_on = call(**dict(before, state=(left, None)))[1].forward
        o2, (last, passed_back) = call(**dict(after, state=(passed_on, right)))
        o1, (_, first) = call(**dict(before, state=DeltaStates(left, passed_back)))
        got = torch.cat([o1, o2], dim=1), last.kv, first.kv
        assert_same(got, (want, ends.forward.kv, ends.backward.kv))


def part(named, start, stop):
    return {n: x if n == "state" else x[:, start:stop] for n, x in named.items()}


@over_kinds
@pytest.mark.parametrize("form", NAMES)
def test_reversed_inputs_give_reversed_outputs(form, decay, updates):
    named = inputs(13, causal=False, keep=True, state=True, decay=decay, updates=updates)
    o, state = delta_rule(**named, form=form, chunk_size=4)
    mirrored = {n: DeltaStates(*x[::-1]) if n == "state" else x.flip(1) for n, x in named.items()}
    got, ends = delta_rule(**mirrored, form=form, chunk_size=4)
    assert_same((got.flip(1), *matrices(ends)[::-1]), (o, *matrices(state)))


@pytest.mark.sampled(4)
@over_forms
@over_kinds
def test_masked_tokens_do_not_change_outputs(causal, form, decay, updates):
    named = inputs(10, causal=causal, state=True, decay=decay, updates=updates)
    keep = torch.tensor([1, 0, 0, 1, 1, 0, 1, 1, 1, 0], dtype=torch.bool)
    call = partial(delta_rule, causal=causal, form=form, chunk_size=4)
    short = {n: x if n == "state" else x[:, keep] for n, x in named.items()}
    want, ends = call(**short)
    for name in [*TENSORS, "log_decay"][: 4 if decay is None else 5]:
        named[name][:, ~keep] = torch.nan
    got = outputs_and_gradients(partial(call, keep=keep.expand(B, -1)), named)
    assert (got[0][0][:, ~keep] == 0).all()
    assert_same((got[0][0][:, keep], *got[0][1:]), (want, *matrices(ends)))
    assert all((x[:, ~keep] == 0).all() for x in got[1][: 4 if decay is None else 5])
    assert all(torch.isfinite(x).all() for x in got[1])


@over_forms
def test_fully_masked_rows_are_zero_and_leave_the_state_alone(causal, form):
    named = inputs(9, causal=causal, state=True)
    named["keep"] = torch.tensor([[True] * 9, [False] * 9])
    o, state = delta_rule(**named, causal=causal, form=form, chunk_size=4)
    assert (o[1] == 0).all()
    for got, entered in zip(matrices(state), matrices(named["state"]), strict=True):
        assert torch.equal(got[1], entered[1])


@over_forms
def test_a_whole_step_stores_the_value_under_its_key(causal, form):
    named = inputs(6, causal=causal)
    named["beta"] = torch.ones_like(named["beta"])
    states = matrices(delta_rule(**named, causal=causal, form=form)[1])
    for kv, t in zip(states, [-1] if causal else [-1, 0], strict=True):
        assert_same([torch.einsum("bhk,bhkv->bhv", named["k"][:, t], kv)], [named["v"][:, t]])


@over_forms
def test_any_finite_beta_is_taken(causal, form):
    named = inputs(12, causal=causal, state=True)
    named["beta"] = torch.linspace(-3, 4, 12, dtype=torch.float64)[:, None].expand(B, -1, H)
    assert_matches_reference(named, causal=causal, form=form, sizes=(5,))


@pytest.mark.sampled(3)
@pairwise(
    {
        "causal, form": FORMS,
        "decay, updates": KINDS,
        "dtype": [torch.float32, torch.bfloat16, torch.float16],
    },
    rest_is_slow=True,
)
def test_no_less_exact_than_plain_torch(causal, form, dtype, decay, updates):
    """The error against float64 is at most twice what the definition makes in the same dtype."""
    named = inputs(96, causal=causal, dtype=dtype, width=32, decay=decay, updates=updates)
    exact = {n: x.double() for n, x in named.items()}
    plain = partial(reference.forward, causal=causal)
    ours = partial(delta_rule, causal=causal, form=form)
    runs = [(ours, named), (plain, named), (plain, exact)]
    results = (outputs_and_gradients(*run) for run in runs)
    assert_at_most_twice_the_error(*(outputs + gradients for outputs, gradients in results))


@pytest.mark.sampled
@pytest.mark.parametrize("causal", [False, True])
def test_ten_thousand_tokens(causal):
    named = inputs(10_000, causal=causal, dtype=torch.float32, width=16)
    got, state = delta_rule(**named, causal=causal)
    exact = {n: x.double() for n, x in named.items()}
    want, want_state = delta_rule(**exact, causal=causal, chunk_size=256)
    for x, y in zip((got, *matrices(state)), (want, *matrices(want_state)), strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=0)


@over_forms
def test_the_state_is_wide_and_the_output_is_of_the_values_type(causal, form):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        named = inputs(3, causal=causal, state=True, dtype=dtype)
        o, state = delta_rule(**named, causal=causal, form=form)
        assert o.dtype == dtype
        wide = torch.promote_types(dtype, torch.float32)
        assert [kv.dtype for kv in matrices(state)] == [wide] * (1 if causal else 2)


@over_forms
def test_autocast_does_not_narrow_the_sums(causal, form):
    named = inputs(20, causal=causal, dtype=torch.float32)
    want = delta_rule(**named, causal=causal, form=form)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(delta_rule(**named, causal=causal, form=form)[0], want)


@given(
    tokens=st.integers(1, 40),
    size=st.integers(1, 45),
    cut=st.floats(0, 1),
    seed=st.integers(0, 99),
    scale=st.sampled_from([0.1, 3.0, 100.0]),
)
def test_any_length_cut_and_mask(tokens, size, cut, seed, scale):
    named = inputs(tokens, causal=True, keep=True, state=True, seed=seed, scale=scale)
    want, want_state = reference.forward(**named, causal=True)
    cut = 1 + math.floor(cut * (tokens - 1))
    call = partial(delta_rule, causal=True, form="chunk", chunk_size=size)
    o, state = call(**part(named, 0, cut))
    if cut < tokens:
        rest, state = call(**dict(part(named, cut, tokens), state=state))
        o = torch.cat([o, rest], dim=1)
    assert_same((o, state.kv), (want, want_state.kv))


ONE = DeltaState(torch.ones(B, H, K, V))
PAIR = DeltaStates(ONE, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": torch.ones(B, 3, H, V)}, r"v has shape \(2, 3, 3, 5\)"),
        ({"q": torch.ones(B, 4, H)}, r"q has shape \(2, 4, 3\)"),
        ({"q": None}, "q is a NoneType"),
        ({"v": torch.ones(B, 4, H, V).long()}, "v has dtype torch.int64"),
        ({"beta": torch.ones(B, 4)}, r"beta has shape \(2, 4\)"),
        ({"beta": 1.0}, "beta is a float"),
        ({"v": torch.ones(B, 4, 2, H, V)}, r"v has shape \(2, 4, 2, 3, 5\), expected 'B T H V'"),
        ({"k": torch.ones(B, 4, 2, H, K)}, r"v has shape \(2, 4, 3, 5\), expected 'B T R H V'"),
        (
            {"k": torch.ones(B, 4, 0, H, K), "v": torch.ones(B, 4, 0, H, V)}
            | {"beta": torch.ones(B, 4, 0, H)},
            "R is 0",
        ),
        ({"log_decay": 0.5}, "log_decay is a float"),
        (
            {"log_decay": -torch.ones(H)},
            r"log_decay has shape \(3,\), expected 'B T H' or 'B T H K'",
        ),
        ({"log_decay": -torch.ones(B, 4, V)}, r"log_decay has shape \(2, 4, 5\), expected 'B T H'"),
        ({"log_decay": -torch.ones(B, 4, H, 1)}, r"log_decay has shape \(2, 4, 3, 1\)"),
        ({"log_decay": torch.ones(B, 4, H)}, "log_decay reaches 1, expected at most 0"),
        ({"log_decay": torch.full((B, 4, H, K), torch.nan)}, "log_decay holds 96 NaN"),
        ({"keep": torch.ones(B, 4)}, "keep has dtype torch.float32"),
        ({"causal": "no"}, "causal is 'no'"),
        ({"form": "dense"}, "form 'dense' is .*: auto, full, chunk, recurrent$"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"chunk_size": 2.5}, "chunk_size is 2.5"),
        ({"v": torch.ones(B, 4, H, 0)}, "V is 0"),
        ({"k": torch.ones(B, 4, H, K, device="meta")}, "k is on meta and q on cpu"),
        ({"state": ONE}, "state is a DeltaState,"),
        ({"state": PAIR, "causal": True}, "state is a DeltaStates"),
        ({"state": (ONE, 2)}, "state is a tuple"),
        ({"state": (ONE, ONE, ONE)}, "state is a tuple"),
        ({"state": ONE.kv}, "state is a Tensor"),
        ({"state": ONE.kv, "causal": True}, "state is a Tensor"),
        (
            {"state": (None, DeltaState(torch.ones(B, H, V, K)))},
            r"state.backward.kv has shape \(2, 3, 5, 4\)",
        ),
        (
            {"state": (DeltaState(torch.ones(B, H, K, V).long()), None)},
            "state.forward.kv has dtype torch.int64",
        ),
        ({"q": torch.full((B, 4, H, K), torch.nan)}, "q holds 96 NaN"),
        ({"k": torch.full((B, 4, H, K), torch.nan)}, "k holds 96 NaN"),
        ({"v": torch.full((B, 4, H, V), torch.nan)}, "v holds 120 NaN"),
        ({"beta": torch.full((B, 4, H), torch.nan)}, "beta holds 24 NaN"),
        ({"k": torch.full((B, 4, H, K), torch.inf)}, r"k holds 96 \+inf values out of 96"),
        (
            {"state": DeltaState(torch.full((B, H, K, V), torch.nan)), "causal": True},
            "state.kv holds 120 NaN",
        ),
        (
            {"state": (None, DeltaState(torch.full((B, H, K, V), torch.nan)))},
            "state.backward.kv holds 120 NaN",
        ),
    ],
)
def test_errors_name_the_argument(change, message):
    named = dict(inputs(4, causal=True, dtype=torch.float32), **change)
    with pytest.raises(ValueError, match=message):
        unwrap(delta_rule)(**named)  # without the shape hook, as users call it


@over_forms
@pytest.mark.parametrize("name", TENSORS)
def test_one_nan_anywhere_is_found(causal, form, name):
    named = inputs(7, causal=causal)
    named[name][1, 3, 2].view(-1)[-1] = torch.nan
    with pytest.raises(ValueError, match=f"{name} holds 1 NaN"):
        delta_rule(**named, causal=causal, form=form, chunk_size=4)


@over_forms
def test_one_nan_in_a_state_is_found(causal, form):
    named = inputs(7, causal=causal, state=True)
    for kv, name in zip(matrices(named["state"]), ["forward.", "backward."], strict=False):
        kept = kv[1, 2, 3, 4].clone()
        kv[1, 2, 3, 4] = torch.nan
        with pytest.raises(ValueError, match=f"state.{'' if causal else name}kv holds 1 NaN"):
            delta_rule(**named, causal=causal, form=form, chunk_size=4)
        kv[1, 2, 3, 4] = kept


def test_no_tokens_is_an_error():
    with pytest.raises(ValueError, match="T is 0"):
        delta_rule(*(torch.ones(1, 0, 1, 1) for _ in range(3)), torch.ones(1, 0, 1))


@pytest.mark.parametrize(
    ("form", "tokens", "want"),
    [("auto", 9, "chunk"), ("auto", 1, "recurrent"), ("full", 1, "full")],
)
def test_the_choice_of_form(form, tokens, want):
    named = inputs(tokens, causal=True)
    tensors = Inputs(*(named[name] for name in TENSORS))
    key = key_of(DELTA_RULE, tensors, Options(64), form, causal=True)
    assert key == ("causal", want, "torch")


@pytest.mark.compile
@over_cases
def test_compiles_without_a_graph_break(causal, form, decay, updates):
    torch.compiler.reset()  # all cases together have more programs than dynamo keeps of a function
    compiled = torch.compile(delta_rule, fullgraph=True, backend="aot_eager")
    named = inputs(9, causal=causal, keep=True, state=True, decay=decay, updates=updates)
    arguments = {"causal": causal, "form": form, "chunk_size": 4}
    want = outputs_and_gradients(partial(delta_rule, **arguments), named)
    got = outputs_and_gradients(partial(compiled, **arguments), named)
    assert_same(got[0], want[0])
    assert_same(got[1], want[1])


@over_forms
def test_vmap(causal, form):
    q, k, v = torch.randn(3, 4, B, 6, H, K)
    beta = torch.rand(4, B, 6, H)
    call = partial(delta_rule, causal=causal, form=form, chunk_size=4)
    got, _ = torch.func.vmap(call)(q, F.normalize(k, dim=-1), v, beta)
    rows = zip(q, F.normalize(k, dim=-1), v, beta, strict=True)
    torch.testing.assert_close(got, torch.stack([call(*row)[0] for row in rows]))
