"""Decayed attention: all forms against the definition, that against its masks, and the contract."""

import copy
import math
from functools import partial
from inspect import unwrap
from itertools import combinations, product

import pytest
import torch
import torch.nn.functional as F
from harness import measure_peak_mib
from hypothesis import given
from hypothesis import strategies as st
from op_checks import assert_at_most_twice_the_error, key_of, multiply_in_bfloat16
from pairwise import pairwise
from torch.utils._pytree import tree_map

from onescan.ops.decay_attention import (
    DECAY_ATTENTION,
    DecayState,
    DecayStates,
    decay_attention,
    reference,
    tiled,
)
from onescan.ops.decay_attention.op import Inputs, Options, cheapest
from onescan.ops.feature_maps import shifted_silu

B, H, K, V = 2, 3, 4, 5
KEYS = [key for key in DECAY_ATTENTION.implementations if key.form != "one_scan"]
FORMS = list(dict.fromkeys((key.direction == "causal", key.form) for key in KEYS))
NAMES = sorted({form for _, form in FORMS})
DECAYS = ["none", "fixed", "scalar", "diagonal"]
CAUSAL_CONVENTIONS = ["source", "target"]
CONVENTIONS = [*CAUSAL_CONVENTIONS, "symmetric"]
CALLS = [*product([True], CAUSAL_CONVENTIONS), *product([False], CONVENTIONS)]
NORMALIZERS = ["none", "sum", "max_one"]
TENSORS = ("q", "k", "v", "log_decay")

over_forms = pytest.mark.parametrize(("causal", "form"), FORMS, ids=lambda x: str(x))
over_names = pytest.mark.parametrize("form", NAMES)
over_decays = pytest.mark.parametrize("decay", DECAYS)
over_directions = pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
over_calls = pytest.mark.parametrize(("causal", "decay_at"), CALLS)


def default_decay_at(causal, decay):
    """The meaning of decay_at="auto"."""
    return "target" if causal or decay == "diagonal" else "source"


def inputs(
    tokens,
    *,
    causal,
    decay="scalar",
    keep=False,
    state=False,
    dtype=torch.float64,
    seed=0,
    batch=B,
    heads=H,
    width=K,
    positive=False,
):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def features(*shape):
        return normal(*shape).abs() if positive else normal(*shape)

    named = {
        "q": features(batch, tokens, heads, width),
        "k": features(batch, tokens, heads, width),
        "v": normal(batch, tokens, heads, V),
    }
    shape = {"fixed": (heads,), "scalar": named["v"].shape[:3], "diagonal": named["k"].shape}
    if decay != "none":
        named["log_decay"] = F.logsigmoid(3 + 2 * normal(*shape[decay]))
    named = {name: x.to(dtype) for name, x in named.items()}
    if keep:
        named["keep"] = torch.rand(batch, tokens, generator=g) < 0.6
    if state:
        kv, k_sum = normal(2, batch, heads, width, V), features(2, batch, heads, width)
        left, right = map(DecayState, kv.to(dtype), k_sum.to(dtype))
        named["state"] = left if causal else DecayStates(left, right)
    return named


def tensors_of(state):
    """The tensors of a state, of either kind."""
    return [*state] if isinstance(state, DecayState) else [x for side in state for x in side]


def state_of(tensors):
    """The state of two tensors, or of four."""
    left, *right = map(DecayState, tensors[::2], tensors[1::2])
    return DecayStates(left, *right) if right else left


def leaves(named):
    """The same arguments with gradients wanted, and the list of what has one."""
    names = [name for name in TENSORS if name in named]
    tensors = [named[name].clone().requires_grad_() for name in names]
    named = dict(named, **dict(zip(names, tensors, strict=True)))
    if "state" in named:
        carried = [x.clone().requires_grad_() for x in tensors_of(named["state"])]
        named["state"] = state_of(carried)
        tensors += carried
    return named, tensors


def outputs_and_gradients(function, named):
    named, tensors = leaves(named)
    o, state = function(**named)
    outputs = (o, *tensors_of(state))
    g = torch.Generator().manual_seed(7)
    loss = sum(
        (x * torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype)).sum()
        for x in outputs
    )
    # not every input reaches every loss: one token between two states meets no decay
    return outputs, torch.autograd.grad(loss, tensors, materialize_grads=True)


def assert_same(got, want, *, tolerance=1e-9):
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.to(y.dtype), y, atol=tolerance, rtol=tolerance)


def assert_finite(tensors):
    assert all(torch.isfinite(x).all() for x in tensors)


def assert_no_less_exact_than_plain_torch(function, plain, named):
    """The error against float64 is at most twice what the definition makes in the same dtype."""
    exact = {n: x.double() for n, x in named.items()}
    runs = [(function, named), (plain, named), (plain, exact)]
    results = (outputs_and_gradients(*run) for run in runs)
    assert_at_most_twice_the_error(*(outputs[:1] + slopes for outputs, slopes in results))


# Any two values of different columns meet in a row, any decay, direction and convention too,
# except that causal calls are not symmetric.
COLUMNS = "tokens, decay, causal, decay_at, normalize, shape, keep, state"
TABLE = [
    (1, "diagonal", True, "source", "sum", (2, 1), False, True),
    (1, "fixed", False, "target", "max_one", (2, 3), False, False),
    (1, "none", False, "target", "sum", (1, 3), True, False),
    (1, "scalar", True, "target", "none", (1, 3), False, True),
    (2, "diagonal", False, "target", "none", (2, 1), True, False),
    (1, "scalar", False, "symmetric", "sum", (2, 3), True, True),
    (2, "fixed", False, "source", "sum", (2, 3), False, False),
    (2, "none", True, "source", "max_one", (1, 3), False, True),
    (2, "scalar", False, "source", "none", (1, 3), True, True),
    (2, "diagonal", False, "symmetric", "max_one", (1, 3), False, False),
    (63, "diagonal", False, "source", "none", (2, 3), True, False),
    (63, "fixed", True, "target", "sum", (2, 1), False, False),
    (63, "none", True, "target", "max_one", (2, 1), False, True),
    (63, "scalar", False, "source", "sum", (1, 3), False, True),
    (63, "fixed", False, "symmetric", "none", (2, 1), True, False),
    (64, "diagonal", False, "target", "sum", (2, 1), False, False),
    (64, "fixed", True, "target", "sum", (1, 3), False, False),
    (64, "none", False, "source", "sum", (2, 3), True, True),
    (64, "scalar", True, "source", "max_one", (1, 3), True, False),
    (64, "scalar", True, "target", "none", (2, 3), False, True),
    (64, "none", False, "symmetric", "sum", (1, 3), False, True),
    (65, "diagonal", False, "source", "max_one", (2, 3), False, False),
    (65, "diagonal", False, "symmetric", "sum", (2, 1), True, True),
    (65, "fixed", False, "source", "none", (1, 3), False, False),
    (65, "fixed", True, "target", "sum", (2, 1), True, True),
    (65, "none", False, "source", "max_one", (2, 3), True, True),
    (65, "scalar", True, "target", "max_one", (2, 1), True, False),
    (197, "diagonal", True, "target", "sum", (1, 3), False, False),
    (197, "fixed", True, "source", "max_one", (2, 3), True, True),
    (197, "none", True, "target", "none", (1, 3), True, False),
    (197, "scalar", False, "symmetric", "none", (2, 3), False, False),
    (197, "scalar", False, "target", "max_one", (2, 1), False, False),
]


def test_any_two_values_meet_in_the_table():
    def pairs(row):
        return set(combinations(enumerate(row), 2))

    met = set().union(*map(pairs, TABLE))
    rows = product(*map(set, zip(*TABLE, strict=True)))
    assert met == set().union(*(pairs(row) for row in rows if row[2:4] in CALLS))
    assert len({row[1:4] for row in TABLE}) == len(DECAYS) * len(CALLS)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(COLUMNS, TABLE)
def test_every_form_matches_the_reference(
    tokens, decay, causal, decay_at, normalize, shape, keep, state
):
    batch, heads = shape
    positive = normalize == "sum"  # else a sum near 0 magnifies rounding
    named = inputs(
        tokens,
        causal=causal,
        decay=decay,
        keep=keep,
        state=state,
        batch=batch,
        heads=heads,
        positive=positive,
    )
    same = {"causal": causal, "decay_at": decay_at, "normalize": normalize}
    want = outputs_and_gradients(partial(reference.forward, **same), named)
    for form in NAMES:
        for size in {1, 7, 16, 64, tokens + 1} if form == "chunk" else {64}:
            ours = partial(decay_attention, **same, form=form, chunk_size=size)
            got = outputs_and_gradients(ours, named)
            assert_same(got[0], want[0])
            assert_same(got[1], want[1])


def masked_attention(q, k, v, log_decay, *, causal, decay_at, normalize):
    """(Q K^T * M) V with the products of M written out, a mask for each key channel."""
    tokens = range(q.shape[1])
    decay = (log_decay if log_decay.ndim == k.ndim else log_decay.unsqueeze(-1)).exp().expand_as(k)
    scores = q.new_zeros(len(q), len(tokens), len(tokens), q.shape[2])
    for i, j in product(tokens, tokens):
        between = {
            "source": slice(j, i) if i >= j else slice(i + 1, j + 1),
            "target": slice(j + 1, i + 1) if i >= j else slice(i, j),
            "symmetric": slice(min(i, j) + 1, max(i, j) + 1),
        }[decay_at]
        if i >= j or not causal:
            scores[:, i, j] = (q[:, i] * decay[:, between].prod(1) * k[:, j]).sum(-1)
    row_sum = scores.sum(2).unsqueeze(-1)
    divisor = {
        "none": torch.ones_like(row_sum),
        "sum": row_sum,
        "max_one": (row_sum.abs() if causal else row_sum).clamp(min=1),
    }
    return torch.einsum("bijh,bjhv->bihv", scores, v) / divisor[normalize]


@pairwise(
    {"causal, decay_at": CALLS, "decay": DECAYS[1:], "normalize": NORMALIZERS}, rest_is_slow=True
)
def test_the_definition_is_attention_under_products(causal, decay_at, decay, normalize):
    named = inputs(7, causal=causal, decay=decay, positive=normalize == "sum")
    same = {"causal": causal, "decay_at": decay_at, "normalize": normalize}
    assert_same([reference.forward(**named, **same)[0]], [masked_attention(**named, **same)])


@over_names
@over_directions
@pytest.mark.parametrize("decay", ["scalar", "diagonal"])
def test_auto_decay_at_depends_on_direction_and_decay(form, causal, decay):
    """Eq. 14 for bidirectional scalar decays, Eq. 5 and Theorem B.1 for all others."""
    named = inputs(9, causal=causal, decay=decay)
    convention = default_decay_at(causal, decay)
    other = "source" if convention == "target" else "target"
    o, state = decay_attention(**named, causal=causal, form=form, chunk_size=4)
    want, ends = reference.forward(**named, causal=causal, decay_at=convention)
    assert_same((o, *tensors_of(state)), (want, *tensors_of(ends)))
    assert not torch.allclose(o, reference.forward(**named, causal=causal, decay_at=other)[0])


@over_forms
def test_a_constant_decay_fades_with_distance_in_every_convention(causal, form):
    tokens, decay = 20, 0.9
    one = torch.ones(1, tokens, 1, 1, dtype=torch.float64)
    v = torch.eye(tokens, dtype=torch.float64).reshape(1, tokens, 1, tokens)
    place = torch.arange(tokens, dtype=torch.float64)
    want = decay ** (place[:, None] - place).abs()
    want = want.tril() if causal else want
    log_decay = torch.tensor([decay], dtype=torch.float64).log()
    conventions = CAUSAL_CONVENTIONS if causal else CONVENTIONS
    for decay_at, each in product(conventions, [log_decay, log_decay.expand(1, tokens, 1)]):
        o, _ = decay_attention(
            one, one, v, each, causal=causal, decay_at=decay_at, form=form, chunk_size=8
        )
        assert_same([o[0, :, 0]], [want])


@pytest.mark.sampled(5)
@over_calls
@pytest.mark.parametrize("decay", DECAYS[1:])
def test_decays_of_zero_and_one_and_almost(causal, decay_at, decay):
    named = inputs(40, causal=causal, decay=decay, state=True, heads=4)
    levels = torch.tensor([0.0, -1e-6, -50.0, -torch.inf], dtype=torch.float64)
    shape = named["log_decay"].shape
    named["log_decay"] = levels[torch.randperm(shape.numel()).reshape(shape) % 4]
    same = {"causal": causal, "decay_at": decay_at}
    want = outputs_and_gradients(partial(reference.forward, **same), named)
    assert_finite(want[0] + want[1])
    narrow = {n: x.float() for n, x in named.items() if n != "state"}
    narrow["state"] = state_of([x.float() for x in tensors_of(named["state"])])
    for form in NAMES:
        ours = partial(decay_attention, **same, form=form, chunk_size=32)
        for given_, tolerance in ((named, 1e-9), (narrow, 2e-4)):
            got = outputs_and_gradients(ours, given_)
            assert_same(got[0], want[0], tolerance=tolerance)
            assert_same(got[1], want[1], tolerance=tolerance)


@pairwise({"causal, decay_at": CALLS, "form": NAMES, "decay": DECAYS[2:]})
def test_gates_that_saturate(causal, form, decay_at, decay):
    named = inputs(40, causal=causal, decay=decay, dtype=torch.float32)
    logits = 200 * torch.randint(-1, 2, named["log_decay"].shape).float()
    logits.requires_grad_()
    decays = F.logsigmoid(logits).exp()
    assert {0, 0.5, 1} == set(decays.flatten().tolist())
    named["log_decay"] = F.logsigmoid(logits)
    exact = {n: x.double() for n, x in named.items()}
    want, _ = reference.forward(**exact, causal=causal, decay_at=decay_at)
    want_gradient = torch.autograd.grad(want.square().sum(), logits, retain_graph=True)
    got, _ = decay_attention(**named, causal=causal, decay_at=decay_at, form=form, chunk_size=16)
    gradient = torch.autograd.grad(got.square().sum(), logits)
    assert_finite([got, *gradient])
    assert_same([got, *gradient], [want.float(), *want_gradient], tolerance=1e-4)


@pytest.mark.sampled(7)
@over_forms
@pytest.mark.parametrize("decay", ["scalar", "diagonal"])
def test_decays_beyond_the_range_of_exp(causal, form, decay):
    named = inputs(70, causal=causal, decay=decay, dtype=torch.float32)
    named["log_decay"][..., ::2] = -5.0
    named["log_decay"][:, 20:30] = -1e-3
    assert_no_less_exact_than_plain_torch(
        partial(decay_attention, causal=causal, form=form),
        partial(reference.forward, causal=causal, decay_at=default_decay_at(causal, decay)),
        named,
    )


@over_directions
@pytest.mark.parametrize("form", ["full", "chunk"])
def test_little_decay_after_much_is_exact_and_so_is_its_gradient(causal, form):
    """Sums of log-decays grow by hundreds, and differ by hundredths, where tokens are near."""
    named = inputs(60, causal=causal, decay="scalar", dtype=torch.float32)
    log_decay = named["log_decay"] = torch.full_like(named["log_decay"], -0.01)
    log_decay[:, 7::9] = -150.0
    named["v"] = named["v"] * torch.logspace(0, 6, 60).reshape(1, 60, 1, 1)  # far apart in size

    def call(function, dtype):
        given = {n: x.to(dtype).requires_grad_() for n, x in named.items() if x is not None}
        o, *_ = function(**given, causal=causal, decay_at="target")
        return o, *torch.autograd.grad(o.sum(), given["log_decay"])

    want = call(reference.forward, torch.float64)
    got = call(partial(decay_attention, form=form), torch.float32)
    for x, y in zip(got, want, strict=True):
        of_token = y.abs().amax(dim=[*range(2, y.ndim)], keepdim=True).expand_as(y)
        seen = of_token > 1e-20  # else float32 has nothing of it
        assert ((x - y).abs() / of_token)[seen].max() < 2e-5  # of each token's own size


@pytest.mark.sampled(3)
@over_forms
@over_decays
def test_gradcheck(causal, form, decay):
    named, tensors = leaves(
        inputs(3, causal=causal, decay=decay, keep=True, state=True, batch=1, heads=1, width=2)
    )
    names = [name for name in TENSORS if name in named]

    def call(*x):
        changed = dict(named, **dict(zip(names, x, strict=False)), state=state_of(x[len(names) :]))
        o, state = decay_attention(
            **changed, causal=causal, form=form, chunk_size=2, normalize="max_one"
        )
        return o, *tensors_of(state)

    assert torch.autograd.gradcheck(call, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


def part(named, start, stop):
    whole = [name for name, x in named.items() if name == "state" or x.ndim == 1]
    return {n: x if n in whole else x[:, start:stop] for n, x in named.items()}


@pairwise(
    {"decay_at": CAUSAL_CONVENTIONS, "decay": DECAYS, "first": NAMES, "second": NAMES},
    rest_is_slow=True,
)
def test_two_calls_equal_one_at_every_cut(decay_at, decay, first, second):
    tokens = 6
    named = inputs(tokens, causal=True, decay=decay, keep=True, state=True)
    call = partial(decay_attention, causal=True, decay_at=decay_at, chunk_size=4)
    want, last = call(**named)
    for cut in range(1, tokens):
        o1, state = call(**part(named, 0, cut), form=first)
        o2, state = call(**dict(part(named, cut, tokens), state=state), form=second)
        assert_same((torch.cat([o1, o2], dim=1), *state), (want, *last))


@pytest.mark.sampled(7)
@pairwise({"decay_at": CONVENTIONS, "decay": DECAYS, "form": NAMES}, rest_is_slow=True)
def test_two_bidirectional_calls_equal_one_at_every_cut(decay_at, decay, form):
    tokens = 9
    named = inputs(tokens, causal=False, decay=decay, keep=True, state=True)
    left, right = named["state"]
    call = partial(decay_attention, decay_at=decay_at, form=form, chunk_size=4)
    want, ends = call(**named)
    for cut in range(1, tokens):
        before, after = part(named, 0, cut), part(named, cut, tokens)
        passed_on = call(**dict(before, state=DecayStates(left, None)))[1].forward
        o2, (last, passed_back) = call(**dict(after, state=DecayStates(passed_on, right)))
        o1, (_, first) = call(**dict(before, state=DecayStates(left, passed_back)))
        got = torch.cat([o1, o2], dim=1), *last, *first
        assert_same(got, (want, *tensors_of(ends)))


@over_names
@pytest.mark.parametrize("tokens", [3, 9])
@pytest.mark.parametrize("wanted", [True, False])
def test_nothing_on_one_side_is_a_state_of_zeros(wanted, tokens, form):
    named = inputs(tokens, causal=False, state=True)
    call = partial(decay_attention, form=form, chunk_size=4, return_state=wanted)
    sides = named.pop("state")
    empty = DecayState(*map(torch.zeros_like, sides[0]))
    for alone, both in (
        (DecayStates(sides[0], None), DecayStates(sides[0], empty)),
        (DecayStates(None, sides[1]), DecayStates(empty, sides[1])),
    ):
        (o, ends), (want, of_both) = (call(**named, state=state) for state in (alone, both))
        assert_same([o], [want])
        if wanted:
            assert_same(tensors_of(ends), tensors_of(of_both))


@over_names
@over_decays
def test_the_symmetric_mask_is_its_own_transpose(decay, form):
    """With M = M^T, the gradient of v is the output of exchanged queries and keys."""
    named = inputs(9, causal=False, decay=decay, keep=True)
    call = partial(decay_attention, decay_at="symmetric", form=form, chunk_size=4)
    (gradient,) = torch.autograd.grad(
        call(**dict(named, v=named["v"].requires_grad_()))[0], named["v"], slope := named["v"].cos()
    )
    assert_same([call(**dict(named, q=named["k"], k=named["q"], v=slope))[0]], [gradient])


@pairwise({"decay_at": CAUSAL_CONVENTIONS, "decay": DECAYS, "form": NAMES})
def test_reversed_inputs_give_reversed_outputs(decay_at, decay, form):
    named = inputs(13, causal=False, decay=decay, keep=True, state=True)
    mirrored = {n: x if x.ndim == 1 else x.flip(1) for n, x in named.items() if n != "state"}
    mirrored["state"] = DecayStates(*named["state"][::-1])
    call = partial(decay_attention, decay_at=decay_at, normalize="max_one", form=form, chunk_size=4)
    o, ends = call(**named)
    got, mirrored_ends = call(**mirrored)
    assert_same((got.flip(1), *tensors_of(mirrored_ends[::-1])), (o, *tensors_of(ends)))


@pairwise({"causal, decay_at": CALLS, "form": NAMES, "decay": DECAYS})
def test_masked_tokens_do_not_change_outputs(causal, form, decay_at, decay):
    named = inputs(10, causal=causal, decay=decay, state=True)
    keep = torch.tensor([1, 0, 0, 1, 1, 0, 1, 1, 1, 0], dtype=torch.bool)
    call = partial(decay_attention, causal=causal, decay_at=decay_at, form=form, chunk_size=4)
    short = {n: x if n == "state" or x.ndim == 1 else x[:, keep] for n, x in named.items()}
    want = outputs_and_gradients(lambda **n: spread(call(**n), keep), short)
    for name in ("q", "k", "v"):
        named[name][:, ~keep] = torch.nan
    call = partial(call, keep=keep.expand(B, -1))
    got = outputs_and_gradients(call, named)
    assert (got[0][0][:, ~keep] == 0).all()
    assert_same(got[0], want[0])
    assert_same([call(**named, return_state=False)[0]], want[0][:1])
    for ours, theirs in zip(got[1], want[1], strict=True):
        longer = ours.shape != theirs.shape
        assert_same([ours[:, keep] if longer else ours], [theirs])
        assert not longer or (ours[:, ~keep] == 0).all()


def spread(result, keep):
    """The outputs at the tokens that are kept, and zeros between them; the state."""
    o, state = result
    places = torch.zeros(o.shape[0], len(keep), *o.shape[2:], dtype=o.dtype)
    return places.index_copy(1, keep.nonzero().flatten(), o), state


@over_forms
def test_fully_masked_rows_are_zero_and_leave_the_state_alone(causal, form):
    named = inputs(9, causal=causal, state=True)
    named["keep"] = torch.tensor([[True] * 9, [False] * 9])
    call = partial(decay_attention, causal=causal, form=form, chunk_size=4, normalize="sum")
    (o, *state), gradients = outputs_and_gradients(call, named)
    assert (o[1] == 0).all()
    assert_finite(gradients)
    assert_same([x[1] for x in state], [x[1] for x in tensors_of(named["state"])])


@over_directions
def test_order_does_not_matter_without_decay(causal):
    """Of the tokens before where causal, of all where not."""
    named = inputs(12, causal=causal, decay="none")
    order = torch.cat([torch.randperm(11), torch.tensor([11])])
    shuffled = {n: x[:, order] for n, x in named.items()}
    got, want = decay_attention(**shuffled, causal=causal), decay_attention(**named, causal=causal)
    last = got[0][:, -1:], want[0][:, -1:]
    assert_same([last[0], *tensors_of(got[1])], [last[1], *tensors_of(want[1])])
    assert causal or torch.allclose(got[0], want[0][:, order])


@pytest.mark.sampled(13)
@pairwise({"causal, form": FORMS, "decay": DECAYS, "normalize": ["none", "max_one"]})
def test_without_the_state_the_rest_is_the_same(causal, form, decay, normalize):
    """Values need no column of ones then, if nothing is divided by row sums either."""
    named = inputs(20, causal=causal, decay=decay, keep=True, state=True)
    call = partial(decay_attention, causal=causal, form=form, chunk_size=8, normalize=normalize)

    def outputs(named, *, return_state):
        named, tensors = leaves(named)
        o, state = call(**named, return_state=return_state)
        assert (state is not None) == return_state
        slopes = torch.autograd.grad(o.square().sum(), tensors, materialize_grads=True)
        return o, *slopes

    for given_ in (named, {n: x for n, x in named.items() if n != "state"}):
        assert_same(outputs(given_, return_state=False), outputs(given_, return_state=True))


@pytest.mark.sampled(6)
@over_forms
@over_decays
def test_outputs_alone_have_gradients_of_gradients(causal, form, decay):
    named, tensors = leaves(inputs(3, causal=causal, decay=decay, batch=1, heads=1, width=2))
    names = [name for name in TENSORS if name in named]

    def call(*x):
        changed = dict(named, **dict(zip(names, x, strict=True)))
        options = {"causal": causal, "form": form, "chunk_size": 2, "return_state": False}
        return decay_attention(**changed, **options)[0]

    assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


@pairwise(
    {
        "causal, form": FORMS,
        "decay": DECAYS,
        "normalize": NORMALIZERS,
        "mode": [torch.no_grad, torch.enable_grad, torch.inference_mode],
    }
)
def test_no_argument_is_changed(causal, form, decay, normalize, mode):
    """Whatever is done in place is done to what nobody else has."""
    named = inputs(8, causal=causal, decay=decay, state=True)
    before = copy.deepcopy(named)
    with mode():
        o, _ = decay_attention(**named, causal=causal, form=form, normalize=normalize, chunk_size=8)
        o.zero_()
    for x, y in zip(flat([*named.values()]), flat([*before.values()]), strict=True):
        assert torch.equal(x, y)


@pytest.mark.sampled(8)
@pairwise(
    {
        "causal, form": FORMS,
        "decay": DECAYS[1:],
        "dtype": [torch.float32, torch.bfloat16, torch.float16],
    }
)
def test_no_less_exact_than_plain_torch(causal, form, decay, dtype):
    assert_no_less_exact_than_plain_torch(
        partial(decay_attention, causal=causal, form=form, chunk_size=32),
        partial(reference.forward, causal=causal, decay_at=default_decay_at(causal, decay)),
        inputs(48, causal=causal, decay=decay, dtype=dtype, width=16),
    )


@pairwise(
    {
        "causal": [True, False],
        "form": ["chunk", "full"],
        "decay": DECAYS,
        "normalize": NORMALIZERS,
        "state": [True, False],
    }
)
def test_bfloat16_products_are_no_less_exact_than_plain_torch(
    causal, form, decay, normalize, state, monkeypatch
):
    """On a GPU, products are bfloat16; states are float32."""
    multiply_in_bfloat16(monkeypatch, "decay_attention")
    named = inputs(
        48, causal=causal, decay=decay, dtype=torch.bfloat16, width=16, positive=True, state=state
    )
    ours = partial(decay_attention, causal=causal, normalize=normalize, form=form, chunk_size=16)
    decay_at = default_decay_at(causal, decay)
    plain = partial(reference.forward, causal=causal, decay_at=decay_at, normalize=normalize)
    exact = tree_map(torch.Tensor.double, named)
    runs = [(ours, named), (plain, named), (plain, exact)]
    results = (outputs_and_gradients(*run) for run in runs)
    assert_at_most_twice_the_error(*(outputs[:1] + slopes for outputs, slopes in results))
    o, after = ours(**named)
    assert o.dtype == torch.bfloat16
    assert {x.dtype for x in tensors_of(after)} == {torch.float32}


@over_directions
@pytest.mark.parametrize("decay", ["scalar", "diagonal"])
def test_second_derivatives_of_bfloat16_products(causal, decay, monkeypatch):
    multiply_in_bfloat16(monkeypatch, "decay_attention")
    named, tensors = leaves(inputs(20, causal=causal, decay=decay, dtype=torch.bfloat16, batch=1))
    o, _ = decay_attention(**named, causal=causal, form="chunk", chunk_size=8)
    once = torch.autograd.grad(o.sum(), tensors, create_graph=True)
    assert [x.dtype for x in once] == [torch.bfloat16] * len(tensors)
    assert_finite(torch.autograd.grad(sum(x.square().sum() for x in once), tensors))


@pytest.mark.parametrize("tokens", [70, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_canceling_row_sums_are_as_exact_as_in_plain_torch(tokens, dtype):
    """With scores of both signs, row sums near 1 are small differences of large numbers."""

    def plain(q, k, v):
        scores = torch.einsum("bihk,bjhk->bijh", q, k)
        row_sum = scores.sum(dim=2).clamp(min=1).unsqueeze(-1)
        return torch.einsum("bijh,bjhv->bihv", scores, v) / row_sum

    for seed in range(8):
        named = inputs(tokens, causal=False, decay="none", dtype=torch.float32, width=16, seed=seed)
        q, k, v = (named[name].to(dtype) for name in "qkv")
        q, k = 30 * q, (30 * k if seed % 2 else k)
        want = plain(*(x.double() for x in (q, k, v)))
        o, _ = decay_attention(q, k, v, normalize="max_one")
        error, allowed = ((x.double() - want).abs().max() for x in (o, plain(q, k, v)))
        assert error <= 2 * allowed


@over_directions
@pytest.mark.parametrize("decay", ["fixed", "scalar", "diagonal"])
def test_ten_thousand_tokens(causal, decay):
    named = inputs(10_000, causal=causal, decay=decay, dtype=torch.float32, batch=1)
    exact = {n: x.double() for n, x in named.items()}
    got, state = decay_attention(**named, causal=causal, form="chunk")
    want, ends = decay_attention(**exact, causal=causal, form="chunk", chunk_size=100)
    assert_same((got, *tensors_of(state)), (want.float(), *tensors_of(ends)), tolerance=1e-4)


@pytest.mark.slow
def test_a_hundred_thousand_tokens_fit_in_two_gigabytes():
    def call():
        q, k, v = torch.rand(3, 1, 100_000, 4, 64)
        log_decay = F.logsigmoid(torch.randn(1, 100_000, 4))
        return decay_attention(q, k, v, log_decay, normalize="sum")

    assert measure_peak_mib(call) < 2048


@over_forms
def test_the_state_is_wide_and_the_output_is_of_the_values_type(causal, form):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        named = inputs(3, causal=causal, state=True, dtype=dtype)
        o, state = decay_attention(**named, causal=causal, form=form)
        assert o.dtype == dtype
        assert {x.dtype for x in tensors_of(state)} == {torch.promote_types(dtype, torch.float32)}


@over_forms
def test_autocast_does_not_narrow_the_sums(causal, form):
    named = inputs(20, causal=causal, state=True, dtype=torch.float32)
    call = partial(decay_attention, **named, causal=causal, form=form, chunk_size=8)
    want, ends = call()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, state = call()
    assert all(map(torch.equal, (got, *tensors_of(state)), (want, *tensors_of(ends))))


@pairwise(
    {
        "causal": [True, False],
        "decay": DECAYS,
        "form": ["chunk", "full"],
        "normalize": NORMALIZERS,
    }
)
def test_a_backward_may_run_in_autocast(causal, decay, form, normalize):
    """Gradients of scalar decays stay as wide as without it."""
    named = inputs(20, causal=causal, decay=decay, state=False, dtype=torch.float32, batch=1)
    given = {name: x.detach().requires_grad_() for name, x in named.items() if x is not None}
    call = partial(decay_attention, causal=causal, form=form, chunk_size=8, normalize=normalize)
    o, _ = call(**given)
    slope = torch.randn(o.shape)
    slopes = partial(torch.autograd.grad, o, list(given.values()), slope, retain_graph=True)
    want = slopes()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = slopes()
    tolerance = 1e-5 if decay in ("fixed", "scalar") else 0.02
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * float(y.abs().max()))


@given(
    tokens=st.integers(1, 40),
    size=st.integers(1, 45),
    cut=st.floats(0, 1),
    seed=st.integers(0, 99),
    decay=st.sampled_from(DECAYS),
    decay_at=st.sampled_from(CAUSAL_CONVENTIONS),
)
def test_any_length_cut_and_mask(tokens, size, cut, seed, decay, decay_at):
    named = inputs(tokens, causal=True, decay=decay, keep=True, state=True, seed=seed)
    want, want_state = reference.forward(**named, causal=True, decay_at=decay_at)
    cut = 1 + math.floor(cut * (tokens - 1))
    call = partial(decay_attention, causal=True, decay_at=decay_at, form="chunk", chunk_size=size)
    o, state = call(**part(named, 0, cut))
    if cut < tokens:
        rest, state = call(**dict(part(named, cut, tokens), state=state))
        o = torch.cat([o, rest], dim=1)
    assert_same((o, *state), (want, *want_state))


@given(
    tokens=st.integers(1, 40),
    size=st.integers(1, 45),
    seed=st.integers(0, 99),
    decay=st.sampled_from(DECAYS),
    decay_at=st.sampled_from(CONVENTIONS),
)
def test_any_length_and_mask_in_both_directions(tokens, size, seed, decay, decay_at):
    named = inputs(tokens, causal=False, decay=decay, keep=True, state=True, seed=seed)
    o, state = decay_attention(**named, decay_at=decay_at, form="chunk", chunk_size=size)
    want, ends = reference.forward(**named, decay_at=decay_at)
    assert_same((o, *tensors_of(state)), (want, *tensors_of(ends)))


ONE = DecayState(torch.ones(B, H, K, V), torch.ones(B, H, K))
PAIR = DecayStates(ONE, None)
NAN = DecayState(ONE.kv * torch.nan, ONE.k_sum)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": torch.ones(B, 3, H, V)}, r"v has shape \(2, 3, 3, 5\)"),
        ({"q": torch.ones(B, 4, H)}, r"q has shape \(2, 4, 3\)"),
        ({"k": torch.ones(B, 4, H, 1)}, r"k has shape \(2, 4, 3, 1\)"),
        ({"q": None}, "q is a NoneType"),
        ({"v": torch.ones(B, 4, H, V).long()}, "v has dtype torch.int64"),
        ({"log_decay": -0.5}, "log_decay is a float"),
        ({"log_decay": torch.zeros(B, 4)}, r"log_decay has shape \(2, 4\)"),
        ({"log_decay": torch.tensor(-1.0)}, r"log_decay has shape \(\)"),
        ({"log_decay": torch.zeros(K)}, r"log_decay has shape \(4,\)"),
        ({"log_decay": torch.zeros(B, 4, 1)}, r"log_decay has shape \(2, 4, 1\)"),
        ({"log_decay": torch.zeros(B, 4, H, V)}, r"log_decay has shape \(2, 4, 3, 5\)"),
        ({"log_decay": torch.zeros(H).long()}, "log_decay has dtype torch.int64"),
        ({"log_decay": torch.tensor([-1, 0.25, 0])}, "log_decay reaches 0.25"),
        ({"log_decay": torch.tensor([1.0, torch.nan, 0])}, "log_decay holds 1 NaN"),
        ({"keep": torch.ones(B, 4)}, "keep has dtype torch.float32"),
        ({"keep": torch.ones(B, 3) > 0}, r"keep has shape \(2, 3\)"),
        ({"causal": "no"}, "causal is 'no'"),
        ({"decay_at": "sources"}, "decay_at 'sources' .*auto, source, target, symmetric"),
        ({"decay_at": "symmetric"}, "decay_at is 'symmetric' with causal=True, expected 'auto'"),
        ({"normalize": "max"}, "normalize 'max' .*none, sum, max_one"),
        ({"form": "full", "backend": "triton"}, "'triton', .* form 'full' .*chunk/triton"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"chunk_size": 2.5}, "chunk_size is 2.5"),
        ({"v": torch.ones(B, 4, H, 0)}, "V is 0"),
        ({"k": torch.ones(B, 4, H, K, device="meta")}, "k is on meta and q on cpu"),
        ({"log_decay": torch.zeros(H, device="meta")}, "log_decay is on meta and q on cpu"),
        ({"state": PAIR}, "state is a DecayStates"),
        ({"state": ONE, "causal": False}, "state is a DecayState,"),
        ({"state": (ONE, 2), "causal": False}, "state is a tuple"),
        ({"state": (ONE, ONE, ONE), "causal": False}, "state is a tuple"),
        ({"state": ONE.kv}, "state is a Tensor"),
        ({"state": DecayState(ONE.kv.mT, ONE.k_sum)}, r"state.kv has shape \(2, 3, 5, 4\)"),
        (
            {"state": (None, DecayState(ONE.kv, ONE.k_sum[0])), "causal": False},
            r"state.backward.k_sum has shape \(3, 4\)",
        ),
        ({"state": DecayState(ONE.kv, ONE.k_sum.long())}, "state.k_sum has dtype torch.int64"),
        ({"state": NAN}, "state.kv holds 120 NaN"),
        ({"state": (None, NAN), "causal": False}, "state.backward.kv holds 120 NaN"),
        ({"q": torch.full((B, 4, H, K), torch.nan)}, "q holds 96 NaN"),
        ({"k": torch.full((B, 4, H, K), torch.inf)}, r"k holds 96 \+inf values out of 96"),
    ],
)
def test_errors_name_the_argument(change, message):
    named = dict(inputs(4, causal=True, dtype=torch.float32), causal=True)
    with pytest.raises(ValueError, match=message):
        unwrap(decay_attention)(**dict(named, **change))  # without the shape hook, as users call it


@pairwise({"causal, form": FORMS, "return_state": [True, False], "name": TENSORS})
def test_one_nan_anywhere_is_found(causal, form, return_state, name):
    named = inputs(7, causal=causal, decay="diagonal")
    named[name][1, 3, 2, 3] = torch.nan
    call = partial(decay_attention, causal=causal, form=form, return_state=return_state)
    with pytest.raises(ValueError, match=f"{name} holds 1 NaN"):
        call(**named, chunk_size=4)


@pairwise(
    {
        "form": NAMES,
        "return_state": [True, False],
        "name": ["kv", "k_sum"],
        "side": [None, "forward", "backward"],  # None: a causal call has one state
    }
)
def test_one_nan_in_a_state_is_found(form, return_state, name, side):
    causal = side is None
    named = inputs(7, causal=causal, state=True)
    state = named["state"] if causal else getattr(named["state"], side)
    getattr(state, name)[1, 2, 3, ...].view(-1)[-1] = torch.nan
    call = partial(decay_attention, causal=causal, form=form, return_state=return_state)
    message = f"state.{name} holds 1 NaN" if causal else f"state.{side}.{name} holds 1 NaN"
    with pytest.raises(ValueError, match=message):
        call(**named, chunk_size=4)


def test_no_tokens_is_an_error():
    with pytest.raises(ValueError, match="T is 0"):
        decay_attention(*(torch.ones(1, 0, 1, 1) for _ in range(3)))


def chosen(form="auto", backend="auto", *, tokens=9, causal=False, decays=True):
    q = torch.empty(1, tokens, 1, 64, device="meta")
    tensors = Inputs(q, q, q, q[..., 0] if decays else None)
    options = Options("identity", "auto", "none", chunk_size=64)
    return key_of(DECAY_ATTENTION, tensors, options, form, backend, causal=causal)


@pairwise({"causal": [True, False], "decays": [True, False], "tokens": [1, 2, 16, 197, 4096]})
def test_the_chosen_form_exists(causal, decays, tokens):
    key = partial(chosen, causal=causal, decays=decays, tokens=tokens)
    assert key() in DECAY_ATTENTION.implementations
    one = "chunk" if causal or decays else "one_scan"
    assert [key(form, "torch").form for form in NAMES] == [one, "full", "recurrent"]


@pytest.mark.parametrize(
    ("change", "form"),
    [
        ({"tokens": 1}, "recurrent"),
        ({"tokens": 224}, "full"),  # 64 (K + V) + 5 K V = 28672 in chunks, 128 a token in full
        ({"tokens": 225}, "chunk"),
        ({"tokens": 225, "key_width": 128, "value_width": 128}, "full"),
        ({"tokens": 225, "chunk_size": 128}, "full"),
        ({"tokens": 192, "directions": 1}, "full"),
        ({"tokens": 193, "directions": 1}, "chunk"),
        ({"tokens": 128, "is_diagonal": True}, "full"),
        ({"tokens": 129, "is_diagonal": True}, "chunk"),  # filled up to 256
    ],
)
def test_the_cheapest_form_is_chosen(change, form):
    assert cheapest(**{"tokens": 9, "key_width": 64, "value_width": 64} | change) == form


def test_without_decay_one_sum_is_chosen():
    assert chosen(decays=False).form == chosen("one_scan", decays=False).form == "one_scan"
    with pytest.raises(ValueError, match="form is 'one_scan', which does not support decay"):
        chosen("one_scan")


@pytest.mark.sampled(9)
@pairwise({"block": [1, 40, 100, 400], "causal": [True, False], "decay": DECAYS})
def test_blocks_of_samples_and_heads_do_not_change_results(causal, decay, block, monkeypatch):
    named = inputs(9, causal=causal, decay=decay, state=True, batch=5)
    call = partial(decay_attention, causal=causal, chunk_size=4, form="chunk", normalize="max_one")
    want = outputs_and_gradients(call, named)
    monkeypatch.setattr(tiled, "BLOCK", block)
    got = outputs_and_gradients(call, named)
    for found, expected in zip(flat(got), flat(want), strict=True):
        torch.testing.assert_close(found, expected)


@pairwise(
    {
        "causal": [True, False],
        "normalize": NORMALIZERS,
        "form": NAMES,
        "batch": [20, tiled.BATCH],
    }
)
def test_outputs_and_states_may_be_changed_in_place(causal, normalize, form, batch, monkeypatch):
    monkeypatch.setattr(tiled, "BATCH", batch)
    named = inputs(5, causal=causal, decay="scalar", state=True)
    named["k"].requires_grad_()
    call = partial(decay_attention, causal=causal, normalize=normalize, form=form, chunk_size=2)

    def slopes(*, in_place):
        o, state = call(**named)
        matrix = state.kv if causal else state.forward.kv
        o, matrix = (x.mul_(3) if in_place else 3 * x for x in (o, matrix))
        return torch.autograd.grad(o.square().sum() + matrix.square().sum(), named["k"])

    assert_same(slopes(in_place=True), slopes(in_place=False))


@over_directions
@over_decays
def test_batches_of_chunks_do_not_change_results(causal, decay, monkeypatch):
    """On a CPU so many chunks are taken at a time as caches hold."""
    named = inputs(9, causal=causal, decay=decay, state=True)
    call = partial(decay_attention, causal=causal, chunk_size=2, form="chunk")
    want = outputs_and_gradients(call, named)
    monkeypatch.setattr(tiled, "BATCH", 20)
    for x, y in zip(outputs_and_gradients(call, named), want, strict=True):
        assert_same(x, y)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("block", "batch"), [(1, tiled.BATCH), (30, 20)])
@over_decays
def test_gradients_in_blocks_and_batches_have_gradients(decay, block, batch, monkeypatch):
    monkeypatch.setattr(tiled, "BLOCK", block)
    monkeypatch.setattr(tiled, "BATCH", batch)
    named = inputs(3, causal=False, decay=decay, state=False, batch=2)
    named = {name: x.detach().requires_grad_() for name, x in named.items() if x is not None}

    def call(*tensors):
        given = dict(zip(named, tensors, strict=True))
        return decay_attention(**given, form="chunk", chunk_size=2)[0]

    assert torch.autograd.gradgradcheck(call, tuple(named.values()), fast_mode=True)


def flat(results):
    """All tensors in tuples of tuples."""
    if results is None:
        return []
    return [results] if isinstance(results, torch.Tensor) else [x for r in results for x in flat(r)]


def test_blocks_cover_all_once_and_hold_no_more_than_they_may(monkeypatch):
    v = torch.zeros(4, 10, 3, 8)
    for most, size, count in ((500, 4, 2), (500, 20, 8), (500, 60, 12), (1, 4, 12), (960, 4, 1)):
        monkeypatch.setattr(tiled, "BLOCK", most)
        blocks = list(tiled._blocks(v, size))
        assert len(blocks) == count
        touched = torch.zeros(4, 10, 3)
        for at, (samples, heads) in blocks:
            touched[at] += 1
            assert at == (samples, slice(None), heads)
        assert (touched == 1).all()


def test_a_masked_token_may_hold_any_decay():
    named = inputs(4, causal=True, decay="scalar")
    keep = torch.tensor([[True, True, False, True]]).expand(len(named["q"]), -1)
    want, _ = decay_attention(**named, causal=True, keep=keep)
    named["log_decay"] = named["log_decay"].detach().clone()
    named["log_decay"][:, 2] = torch.nan
    torch.testing.assert_close(decay_attention(**named, causal=True, keep=keep)[0], want)


@over_directions
@pytest.mark.parametrize(
    ("form", "backend", "message"),
    [
        ("chunks", "torch", "'chunks' is unknown .*'chunk'.*: auto, full, chunk, recurrent"),
        ("full", "cuda", "backend 'cuda' is unknown"),
    ],
)
def test_unknown_forms_are_refused(causal, form, backend, message):
    with pytest.raises(ValueError, match=message):
        chosen(form, backend, causal=causal)


@over_forms
def test_meta_tensors_give_shapes(causal, form):
    named = inputs(9, causal=causal, state=True)
    want, ends = decay_attention(**named, causal=causal, form=form, chunk_size=4)
    meta = {n: x.to("meta") for n, x in named.items() if n != "state"}
    meta["state"] = state_of([x.to("meta") for x in tensors_of(named["state"])])
    o, state = decay_attention(**meta, causal=causal, form=form, chunk_size=4)
    for got, expected in zip((o, *tensors_of(state)), (want, *tensors_of(ends)), strict=True):
        assert got.device.type == "meta"
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)


@over_names
def test_tiny_keys_leave_gradients_finite(form):
    q = torch.ones(1, 3, 1, 2, requires_grad=True)
    k = torch.full((1, 3, 1, 2), 1e-42, requires_grad=True)
    o, _ = decay_attention(q, k, torch.ones(1, 3, 1, 1), normalize="sum", form=form)
    for gradient in torch.autograd.grad(o.sum(), (q, k)):
        assert gradient.isfinite().all()


@pytest.mark.compile
@over_forms
@over_decays
def test_compiles_without_a_graph_break(causal, form, decay):
    torch.compiler.reset()  # one function may be compiled eight times
    compiled = torch.compile(decay_attention, fullgraph=True, backend="aot_eager")
    named = inputs(9, causal=causal, decay=decay, keep=True, state=True)
    arguments = {"causal": causal, "form": form, "chunk_size": 4, "normalize": "max_one"}
    want = outputs_and_gradients(partial(decay_attention, **arguments), named)
    got = outputs_and_gradients(partial(compiled, **arguments), named)
    assert_same(got[0], want[0])
    assert_same(got[1], want[1])


@pytest.mark.compile
@over_directions
@over_decays
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_compiles_where_nothing_needs_a_gradient(causal, decay, mode):
    torch.compiler.reset()
    compiled = torch.compile(decay_attention, fullgraph=True, backend="aot_eager")
    named = inputs(9, causal=causal, decay=decay)
    arguments = {"causal": causal, "form": "chunk", "chunk_size": 4}
    with mode():
        for return_state in (True, False):
            want, _ = decay_attention(**named, **arguments, return_state=return_state)
            got, _ = compiled(**named, **arguments, return_state=return_state)
            torch.testing.assert_close(got, want)


@pytest.mark.compile
@over_directions
@over_decays
def test_compiles_where_only_outputs_are_wanted(causal, decay):
    torch.compiler.reset()
    compiled = torch.compile(decay_attention, fullgraph=True, backend="aot_eager")
    named, tensors = leaves(inputs(9, causal=causal, decay=decay))
    arguments = {"causal": causal, "form": "chunk", "chunk_size": 4, "return_state": False}
    want, got = (call(**named, **arguments)[0] for call in (decay_attention, compiled))
    assert_same([got], [want])
    slopes = (torch.autograd.grad(o.square().sum(), tensors) for o in (got, want))
    assert_same(*slopes)


@pytest.mark.compile
@over_directions
@pytest.mark.parametrize("form", ["full", "chunk"])
def test_compiled_masks_of_many_tokens_are_as_exact(causal, form):
    """A compiled program has longer first stretches, whose masks are differences of sums."""
    torch.compiler.reset()
    compiled = torch.compile(decay_attention, fullgraph=True, backend="aot_eager")
    named = inputs(150, causal=causal)
    several = named["log_decay"]
    several[:, 20:40] = -1e8 * torch.rand(20, 1, dtype=torch.float64)
    several[:, 60:70] = -1e-12
    arguments = {"causal": causal, "chunk_size": 100}
    plain = partial(decay_attention, **arguments, form="recurrent" if causal else "full")
    want = outputs_and_gradients(plain, named)
    got = outputs_and_gradients(partial(compiled, **arguments, form=form), named)
    assert_same(got[0], want[0])
    assert_same(got[1], want[1])


@over_names
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_no_samples_give_no_samples(form, mode):
    with mode():
        o, state = decay_attention(**inputs(9, causal=False, batch=0), form=form)
    assert o.shape == (0, 9, H, V)
    assert state.forward.kv.shape == (0, H, K, V)


@over_forms
@pytest.mark.parametrize("names", [*[[name] for name in TENSORS], ["state"], [*TENSORS, "state"]])
def test_vmap(causal, form, names):
    rows = [inputs(6, causal=causal, state=True, seed=seed) for seed in range(3)]

    def call(*changed):
        named = dict(rows[0], **dict(zip(names, changed, strict=True)))
        return decay_attention(**named, causal=causal, form=form, chunk_size=4)[0]

    columns = [[row[name] for row in rows] for name in names]
    stacked = [tree_map(lambda *x: torch.stack(x), *column) for column in columns]
    want = [call(*changed) for changed in zip(*columns, strict=True)]
    assert_same(torch.func.vmap(call)(*stacked), want)


def test_states_without_decay_have_memory_of_their_own():
    q, k, v = torch.rand(3, B, 4, H, K)
    _, states = decay_attention(q, k, v)
    backward = states.backward.kv.clone()
    states.forward.kv.zero_()
    assert torch.equal(states.backward.kv, backward)


def test_shifted_silu_of_large_float16_values_has_norm_one():
    x = torch.full((1, 1, 1, 64), 9000.0, dtype=torch.float16)
    torch.testing.assert_close(shifted_silu(x), torch.full_like(x, 0.125))
