"""Kernels of decayed attention, interpreted where there is no GPU: the definition, the contract."""

from functools import partial
from inspect import unwrap
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from kernel_calls import assert_near, narrowed, outputs_and_gradients, rounded, tensors_of
from kernel_device import (
    BRAIN,
    DEVICE,
    DTYPES,
    GPU,
    HALF,
    LONGEST,
    MARKS,
    SINGLE,
    assert_a_graph_repeats,
    assert_errors_like_torch,
    drawn,
    on_device,
    over_dtypes,
    over_seeds,
)
from op_checks import call_of
from pairwise import pairwise

pytest.importorskip("triton")

from onescan.ops.backend import WIDEST_HEAD, use_backend
from onescan.ops.decay_attention import (
    DECAY_ATTENTION,
    DecayState,
    DecayStates,
    decay_attention,
    reference,
)
from onescan.ops.decay_attention.op import Inputs, Options

pytestmark = MARKS
TOLERANCES = {SINGLE: 2e-5, HALF: 4e-3, BRAIN: 3e-2}  # of the largest
DECAYS = ["fixed", "scalar", "diagonal"]

in_kernels = partial(decay_attention, form="chunk", backend="triton")
over_decays = pytest.mark.parametrize("decay", DECAYS)
QUICK = [(True, "scalar"), (False, "diagonal")]
over_calls = pytest.mark.parametrize(
    ("causal", "decay"),
    [
        pytest.param(*call, marks=[] if call in QUICK else pytest.mark.slow)
        for call in product([True, False], DECAYS)
    ],
)
over_directions = pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])


def inputs(
    tokens, *, causal, decay="scalar", keep=False, enters="", widths=(5, 6), batch=1, heads=1
):
    """Arguments in float64 that are `rounded`; `enters` names sides, "left right"."""
    g = torch.Generator().manual_seed(tokens)

    def normal(*shape):
        return rounded(torch.randn(*shape, generator=g, dtype=torch.float64))

    width = widths[0]
    shapes = {
        "fixed": (heads,),
        "scalar": (batch, tokens, heads),
        "diagonal": (batch, tokens, heads, width),
    }
    named = {name: normal(batch, tokens, heads, width).abs() for name in ("q", "k")}
    named["v"] = normal(batch, tokens, heads, widths[1])
    if decay != "none":
        named["log_decay"] = rounded(F.logsigmoid(2 + 2 * normal(*shapes[decay])))
    if keep:
        named["keep"] = torch.rand(batch, tokens, generator=g) < 0.7
    sides = [
        DecayState(normal(batch, heads, *widths), normal(batch, heads, width).abs())
        if side in enters
        else None
        for side in ("left", "right")
    ]
    named["state"] = sides[0] if causal else DecayStates(*sides)
    return named


def assert_matches_reference(named, *dtypes, **options):
    """Outputs, states and gradients of kernels against the definition in float64."""
    want = outputs_and_gradients(partial(reference.forward, **options), named)
    for dtype in dtypes:
        got = outputs_and_gradients(partial(in_kernels, **options), narrowed(named, dtype))
        assert got[0][0].dtype == dtype
        assert_near(got[0] + got[1], want[0] + want[1], TOLERANCES[dtype])


def assert_steps_match_reference(named, *dtypes, normalize):
    """Outputs and states of tokens one after the other."""
    options = {"causal": True, "normalize": normalize}
    o, state = reference.forward(**named, **options, decay_at="target")
    for dtype in dtypes:
        small = narrowed(named, dtype)
        got, last = decay_attention(**small, **options, form="recurrent", backend="triton")
        assert got.dtype == dtype
        assert_near([got], [o], TOLERANCES[dtype])
        assert_near(last, state, 2e-5)


def plain(q, k, v, log_decay=None, *, causal, decay_at, normalize, state):
    """Every step in the type of q, k and v, as one would write it in torch; nothing enters."""
    assert not tensors_of(state)
    if log_decay is None:
        log_decay = q.new_zeros(q.shape[:3])
    decays = log_decay.float().reshape(*q.shape[:3], -1)  # the last axis is 1 or K
    through = decays.cumsum(1)
    before = through - decays
    below = before if decay_at == "source" else through
    above = before if decay_at == "target" else through
    later = torch.ones(2 * q.shape[1:2], dtype=torch.bool, device=q.device).triu(1)
    exponent = torch.where(
        later[..., None, None],
        above[:, None] - above[:, :, None],
        below[:, :, None] - below[:, None],
    )
    if causal:
        exponent = exponent.masked_fill(later[..., None, None], -torch.inf)
    mask = exponent.exp().to(q.dtype)  # b t s h k
    if log_decay.ndim == q.ndim:
        scores = torch.einsum("bthk,btshk->btsh", q, mask * k[:, None])
    else:
        scores = torch.einsum("bthk,bshk->btsh", q, k) * mask.squeeze(-1)
    if normalize != "none":
        row_sums = scores.sum(2, keepdim=True)
        scores = scores / (row_sums if normalize == "sum" else row_sums.clamp(min=1))
    return torch.einsum("btsh,bshv->bthv", scores, v), None


def assert_within_twice_plain(named, *dtypes, **options):
    """The kernels' errors of outputs and gradients, at most twice those of plain torch."""

    def alone(call):
        return lambda **given: (call(**given, **options)[0], None)

    def run(call, given):
        outputs, gradients = outputs_and_gradients(alone(call), given)
        return [x.double().cpu() for x in outputs + gradients]

    exact = run(reference.forward, named)
    for dtype in dtypes:
        small = narrowed(named, dtype)
        assert_errors_like_torch(run(in_kernels, small), run(plain, small), exact, dtype)


def test_bidirectional_diagonal_decays_are_those_of_the_reading_token():
    named = inputs(5, causal=False, decay="diagonal")
    want, _ = reference.forward(**named, causal=False, decay_at="target")
    got, _ = in_kernels(**narrowed(named, SINGLE), causal=False)
    assert_near([got], [want], TOLERANCES[SINGLE])


COLUMNS = "tokens, decay, causal, decay_at, normalize, keep, enters, widths"
NARROW = (2, 33, 63)  # tokens of which narrow types are tried in the interpreter too
TABLE = [
    (1, "none", False, "source", "none", False, "left", (5, 6)),
    (1, "scalar", True, "source", "none", False, "left", (5, 6)),
    (1, "diagonal", False, "target", "sum", False, "", (5, 6)),
    (2, "fixed", False, "source", "max_one", False, "right", (1, 1)),
    (2, "diagonal", True, "target", "max_one", False, "left", (6, 5)),
    (33, "diagonal", False, "source", "none", True, "left right", (5, 40)),
    (34, "diagonal", False, "source", "sum", False, "left", (5, 70)),  # values in two parts
    (63, "scalar", False, "target", "sum", False, "left right", (5, 6)),
    (63, "scalar", False, "symmetric", "sum", True, "right", (5, 6)),
    (2, "none", False, "source", "max_one", False, "", (6, 5)),
    (33, "none", False, "source", "none", True, "left right", (5, 40)),
    (63, "none", False, "source", "sum", True, "right", (40, 6)),
    (64, "none", True, "source", "sum", True, "left", (8, 8)),
    (257, "none", False, "source", "sum", False, "left right", (5, 6)),  # sums in two parts
    (64, "scalar", True, "target", "max_one", True, "", (5, 6)),
    (65, "fixed", True, "target", "sum", False, "left", (5, 6)),
    (65, "scalar", False, "source", "max_one", True, "left", (40, 6)),
    (65, "diagonal", True, "source", "none", False, "", (40, 6)),
    (65, "diagonal", False, "symmetric", "none", False, "left right", (5, 6)),
    (130, "scalar", False, "source", "none", False, "", (5, 6)),
    (130, "fixed", False, "target", "none", True, "right", (5, 6)),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(COLUMNS, TABLE)
def test_kernels_match_the_reference(
    tokens, decay, causal, decay_at, normalize, keep, enters, widths
):
    # one token alone, divided by its row sum, has gradients of 0, and no other type's digits do
    is_void = (tokens, normalize) == (1, "sum")
    dtypes = DTYPES if (GPU and not is_void) or tokens in NARROW else [SINGLE]
    named = inputs(tokens, causal=causal, decay=decay, keep=keep, enters=enters, widths=widths)
    options = {"causal": causal, "decay_at": decay_at, "normalize": normalize}
    assert_matches_reference(named, *dtypes, **options)


# few heads and widths of keys and values, as kernels are compiled anew for each
BUILDS = [
    ("scalar", True, "none", 2, (1, 1)),
    ("diagonal", False, "none", 1, (1, 33)),
    ("scalar", False, "sum", 3, (16, 33)),
    ("diagonal", True, "sum", 2, (33, 16)),
    ("scalar", True, "max_one", 1, (64, 64)),
    ("diagonal", False, "max_one", 1, (64, 96)),
    ("scalar", False, "none", 1, (96, 64)),
    ("diagonal", True, "none", 1, (128, 1)),
    ("scalar", True, "sum", 2, (64, 128)),
    ("diagonal", False, "sum", 1, (16, 128)),
    ("scalar", False, "max_one", 1, (128, 128)),
    ("diagonal", True, "max_one", 1, (128, 128)),
    ("none", False, "sum", 2, (64, 16)),
    ("none", False, "max_one", 1, (128, 33)),
    ("none", False, "none", 1, (1, 128)),
]


@pytest.mark.slow
@over_seeds
def test_random_shapes(seed):
    batch, tokens = drawn(seed, 3, LONGEST)
    decay, causal, normalize, heads, widths = BUILDS[seed % len(BUILDS)]
    decay_at = ("target", "source")[seed // len(BUILDS) % 2]
    sizes = {"batch": batch, "heads": heads, "widths": widths, "decay": decay, "causal": causal}
    options = {"causal": causal, "decay_at": decay_at, "normalize": normalize}
    # one token alone divided by its row sum has no gradients, and in plain torch exactly
    assert_within_twice_plain(inputs(tokens + 1, **sizes), *DTYPES, **options)
    named = inputs(tokens, **sizes, keep=True, enters="left right")
    assert_matches_reference(named, *DTYPES, **options)


@pytest.mark.sampled
@over_seeds
def test_random_shapes_of_steps(seed):
    batch, tokens = drawn(seed, 5, 9)
    decay, _, normalize, heads, widths = BUILDS[seed % len(BUILDS)]
    sizes = {"batch": batch, "heads": heads, "widths": widths, "decay": decay}
    named = inputs(tokens, **sizes, causal=True, keep=tokens > 1, enters="left")
    assert_steps_match_reference(named, *DTYPES, normalize=normalize)


@pytest.mark.sampled
@pairwise(
    {"causal": [True, False], "decay_at": ["source", "target"], "decay": DECAYS},
    rest_is_slow=True,
)
def test_decays_of_zero_and_one_and_almost(causal, decay_at, decay):
    heads = 4 if decay == "fixed" else 1  # each has one of the levels then
    named = inputs(40, causal=causal, decay=decay, enters="left right", heads=heads)
    levels = torch.tensor([0.0, -1e-6, -50.0, -torch.inf], dtype=torch.float64)
    shape = named["log_decay"].shape
    named["log_decay"] = levels[torch.randperm(shape.numel()).reshape(shape) % 4]
    assert_matches_reference(named, SINGLE, causal=causal, decay_at=decay_at)


@pytest.mark.sampled
@over_directions
@pytest.mark.parametrize("decay", ["scalar", "diagonal"])
def test_nothing_flows_back_to_a_decay_that_forgets_all(causal, decay):
    named = narrowed(inputs(40, causal=causal, decay=decay), SINGLE)
    named["log_decay"][:, 20] = -torch.inf
    _, (*_, gradient) = outputs_and_gradients(partial(in_kernels, causal=causal), named)
    assert (gradient[:, 20] == 0).all()
    assert (gradient[:, 10] != 0).all()


over_calls_and_none = pytest.mark.parametrize(
    over_calls.args[0], [*over_calls.args[1], (False, "none")]
)


@pytest.mark.sampled
@over_calls_and_none
def test_samples_and_heads_do_not_meet(causal, decay):
    named = inputs(34, causal=causal, decay=decay, enters="left", batch=2, heads=2)
    o, _ = in_kernels(**narrowed(named, SINGLE), causal=causal)
    fixed = decay == "fixed"
    for sample in range(2):
        one = {n: x[sample : sample + 1] for n, x in named.items() if n in ("q", "k", "v")}
        if decay != "none":
            one["log_decay"] = named["log_decay"] if fixed else named["log_decay"][sample, None]
        side = named["state"] if causal else named["state"].forward
        side = DecayState(*(x[sample, None] for x in side))
        one["state"] = side if causal else DecayStates(side, None)
        alone, _ = in_kernels(**narrowed(one, SINGLE), causal=causal)
        assert torch.equal(alone[0], o[sample])


def cut(named, start, stop, state):
    """Some of the tokens, after a state."""
    part = {n: x[:, start:stop] for n, x in named.items() if n not in ("state", "log_decay")}
    whole = named["log_decay"]
    part["log_decay"] = whole if whole.ndim == 1 else whole[:, start:stop]
    return dict(part, state=state)


@pytest.mark.sampled
@over_decays
@pytest.mark.parametrize("first", ["chunk", "recurrent"])
def test_two_calls_equal_one(decay, first):
    named = narrowed(inputs(40, causal=True, decay=decay, keep=True, enters="left"), SINGLE)
    call = partial(decay_attention, causal=True, normalize="sum", backend="triton")
    want, last = call(**named, form="chunk")
    for place in (1, 32):
        o1, state = call(**cut(named, 0, place, named["state"]), form=first)
        o2, state = call(**cut(named, place, 40, state), form="chunk")
        got = [torch.cat([o1, o2], 1), *state]
        assert_near(got, [x.double().cpu() for x in (want, *last)], 2e-5)


@pytest.mark.sampled(11)
@over_dtypes
@pytest.mark.parametrize("decay", ["none", *DECAYS])
@pytest.mark.parametrize(("tokens", "normalize"), [(1, "none"), (5, "sum"), (3, "max_one")])
def test_steps_match_the_reference(decay, normalize, tokens, dtype):
    named = inputs(tokens, causal=True, decay=decay, keep=tokens > 1, enters="left", widths=(5, 40))
    assert_steps_match_reference(named, dtype, normalize=normalize)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("decay", "causal", "form"),
    [
        ("none", False, "chunk"),
        ("scalar", False, "chunk"),
        ("scalar", True, "chunk"),
        ("diagonal", False, "chunk"),
        ("diagonal", True, "recurrent"),
    ],
)
def test_a_cuda_graph_repeats_a_call(decay, causal, form):
    named = inputs(20, causal=causal, decay=decay, enters="left", widths=(64, 64))
    call = partial(decay_attention, causal=causal, form=form, backend="triton")
    named = narrowed(named, BRAIN)
    assert_a_graph_repeats(lambda: call(**named)[0])


@pytest.mark.sampled
@over_calls_and_none
def test_masked_tokens_may_hold_anything(causal, decay):
    named = narrowed(inputs(40, causal=causal, decay=decay, keep=True), SINGLE)
    call = partial(in_kernels, causal=causal, normalize="max_one")
    want = outputs_and_gradients(call, named)
    for name in ("q", "k", "v"):
        named[name] = named[name].masked_fill(~named["keep"][:, :, None, None], torch.nan)
    got = outputs_and_gradients(call, named)
    assert all(map(torch.equal, got[0], want[0]))
    assert all(map(torch.equal, got[1], want[1]))
    assert all((x[~named["keep"]] == 0).all() for x in (got[0][0], *got[1][:3]))


def test_a_state_alone_has_a_gradient():
    named = inputs(9, causal=True, enters="left")
    want = outputs_and_gradients(partial(reference.forward, causal=True, decay_at="target"), named)
    small = narrowed(named, SINGLE)
    small["state"] = DecayState(*(x.requires_grad_() for x in small["state"]))
    o, state = in_kernels(**small, causal=True)
    assert o.requires_grad
    gradient = torch.autograd.grad(state.kv.sum(), small["state"].kv)[0]
    decays = named["log_decay"].sum(1).exp()[:, :, None, None]
    assert_near([gradient], [decays.expand(gradient.shape)], 2e-5)
    assert_near([o], want[0][:1], 2e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float64}, "backend is 'triton', but kernels take float32, bfloat16 or"),
        ({"widths": (5, WIDEST_HEAD + 1)}, f"channels, expected at most {WIDEST_HEAD}"),
        ({"form": "full"}, "backend is 'triton', .* form 'full' with .*chunk/triton"),
        (
            {"form": "recurrent", "causal": False},
            "backend is 'triton', .* form 'recurrent' with .*chunk/triton",
        ),
        ({"backend": "cuda"}, "backend 'cuda' is unknown"),
        ({"form": "recurrent", "learns": True}, "which has no gradients, expected form 'chunk'"),
    ],
)
def test_unsupported_calls_are_refused(change, message):
    options = {"causal": True, "form": "chunk", "backend": "triton", **change}
    decay, widths = options.pop("decay", "scalar"), options.pop("widths", (5, 6))
    dtype, learns = options.pop("dtype", SINGLE), options.pop("learns", False)
    named = narrowed(inputs(4, causal=options["causal"], decay=decay, widths=widths), dtype)
    named["v"].requires_grad_(learns)
    with pytest.raises(ValueError, match=message):
        unwrap(decay_attention)(**named, **options)


@pytest.mark.parametrize("name", ["k", "v"])
def test_a_nan_is_blamed_on_its_argument(name):
    named = inputs(4, causal=True)
    named[name][0, 1, 0, 2] = torch.nan
    named = narrowed(named, SINGLE)
    if GPU:
        assert in_kernels(**named, causal=True)[0].isnan().any()
        return
    with pytest.raises(ValueError, match=f"{name} holds 1 NaN value out of"):
        in_kernels(**named, causal=True)


@pytest.mark.parametrize(
    ("tokens", "causal", "is_learning", "form"),
    [
        (1, True, False, "recurrent"),
        (1, True, True, "chunk"),
        (1, False, False, "chunk"),
        (2, True, False, "chunk"),
        (100_000, False, True, "chunk"),
    ],
)
def test_the_form_that_kernels_take(tokens, causal, is_learning, form):
    q = torch.empty(1, tokens, 1, 64, device="meta", requires_grad=is_learning)
    tensors = Inputs(q, q, q, q[..., 0])
    options = Options("identity", "auto", "none", chunk_size=64)
    call = call_of(tensors, options, causal=causal)
    assert DECAY_ATTENTION.form_of(call, "auto", "triton") == form


def test_where_kernels_are_preferred_the_rest_runs_on_torch():
    named = narrowed(inputs(4, causal=True), SINGLE)
    named["v"].requires_grad_()
    want, _ = decay_attention(**named, causal=True, backend="torch")
    with use_backend("triton"):
        for form in ("auto", "full", "recurrent"):
            o, _ = decay_attention(**named, causal=True, form=form)
            torch.testing.assert_close(o, want, rtol=1e-5, atol=1e-5)
            assert torch.autograd.grad(o.sum(), named["v"])[0].isfinite().all()


@pytest.mark.sampled(2)
@over_dtypes
@pytest.mark.parametrize(("feature_map", "decay"), [("shifted_silu", "scalar"), ("silu", "fixed")])
def test_steps_apply_feature_maps(feature_map, decay, dtype):
    named = inputs(3, causal=True, decay=decay, keep=True, enters="left", batch=2, heads=2)
    named["q"], named["k"] = named["q"] - 1, named["k"] - 1
    named["keep"][:, 1] = False
    small = narrowed(named, dtype)
    u = torch.cat([small[x].flatten(2) for x in "qkv"], dim=-1)  # as a projection returns them
    parts = zip("qkv", u.split([small[x][0, 0].numel() for x in "qkv"], dim=-1), strict=True)
    small |= {x: part.unflatten(-1, (2, -1)) for x, part in parts}
    options = {"causal": True, "normalize": "sum", "feature_map": feature_map}
    got, usual = (
        decay_attention(**small, **options, form="recurrent", backend=backend)
        for backend in ("triton", "torch")
    )
    exact = decay_attention(**named, **options, form="full")
    found, plain, wanted = ([x.double().cpu() for x in (o, *s)] for o, s in (got, usual, exact))
    assert_errors_like_torch(found, plain, wanted, dtype)
    assert (found[0][:, 1] == 0).all()


@pytest.mark.parametrize(
    ("decay", "normalizer"),
    [pytest.param("scalar", "sum", marks=pytest.mark.slow), ("diagonal", "none")],
)
def test_operators_are_as_torch_wants_them(decay, normalizer):
    named = narrowed(inputs(3, causal=True, decay=decay, keep=True), SINGLE)
    q, k, v, log_decay = (named[n].requires_grad_() for n in ("q", "k", "v", "log_decay"))
    side = on_device(torch.rand(1, 1, 5, 6), torch.rand(1, 1, 5))
    enters = [x[None].requires_grad_() for x in side]
    arguments = (q, k, v, log_decay[None], named["keep"], *enters, normalizer, True)
    torch.library.opcheck(torch.ops.onescan.decay_chunks, arguments)
    with torch.no_grad():
        steps = (q, k, v, log_decay, named["keep"], *side, normalizer, "identity")
        steps = [x.detach() if isinstance(x, torch.Tensor) else x for x in steps]
        torch.library.opcheck(torch.ops.onescan.decay_step, steps)


@pytest.mark.sampled
@pytest.mark.parametrize(("normalizer", "enters"), [("sum", True), ("none", False)])
def test_operators_without_decay_are_as_torch_wants_them(normalizer, enters):
    q, k, v = (torch.rand(1, 3, 2, n).to(DEVICE).requires_grad_() for n in (5, 5, 6))
    keep, kv, k_sum = on_device(torch.rand(1, 3) < 0.5, torch.rand(1, 2, 5, 6), torch.rand(1, 2, 5))
    others = (keep, kv.requires_grad_(), k_sum.requires_grad_()) if enters else (None, None, None)
    torch.library.opcheck(torch.ops.onescan.linear_attention, (q, k, v, *others, normalizer))


@pytest.mark.sampled
@pytest.mark.parametrize(("normalize", "widths"), [("none", (6, 5)), ("sum", (5, 6))])
def test_errors_without_decay_are_within_twice_those_of_plain_torch(normalize, widths):
    named = inputs(70, causal=False, decay="none", widths=widths)
    options = {"causal": False, "decay_at": "target", "normalize": normalize}
    assert_within_twice_plain(named, *DTYPES, **options)


@pytest.mark.compile
@pytest.mark.parametrize(("causal", "decay"), [*product([True, False], DECAYS), (False, "none")])
def test_compiles_without_a_graph_break(causal, decay):
    torch.compiler.reset()
    compiled = torch.compile(decay_attention, fullgraph=True, backend="aot_eager")
    named = narrowed(inputs(5, causal=causal, decay=decay, keep=True, enters="left"), SINGLE)
    options = {"causal": causal, "normalize": "max_one", "form": "chunk", "backend": "triton"}
    want = outputs_and_gradients(partial(decay_attention, **options), named)
    got = outputs_and_gradients(partial(compiled, **options), named)
    for x, y in zip(got[0] + got[1], want[0] + want[1], strict=True):
        torch.testing.assert_close(x, y)


def test_a_mask_with_gaps_is_taken():
    q, k, v = torch.randn(3, 2, 20, 1, 5).to(DEVICE)
    log_decay, keep = on_device(-torch.rand(2, 20, 1), (torch.rand(20, 2) > 0.4).mT)
    for causal, form in ((False, "chunk"), (True, "chunk"), (True, "recurrent")):
        named = {"causal": causal, "keep": keep}
        found, _ = decay_attention(q, k, v, log_decay, **named, form=form, backend="triton")
        expected, _ = decay_attention(q, k, v, log_decay, **named, backend="torch")
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize(("causal", "decays"), [(False, True), (True, True), (False, False)])
def test_what_all_values_share_leaves_no_gradient_of_a_row_sum(causal, decays):
    q, k = torch.rand(2, 1, 40, 1, 8).half()
    v = (torch.rand(1, 40, 1, 8) + 30).half()
    log_decay, slope = -torch.rand(1, 40, 1), torch.randn(1, 40, 1, 8).half()
    inputs = (q, k, v, log_decay) if decays else (q, k, v)

    def gradients(dtype, device, **options):
        given = [x.to(device, dtype).requires_grad_() for x in inputs]
        o, _ = decay_attention(*given, causal=causal, normalize="sum", **options)
        return [x.double().cpu() for x in torch.autograd.grad(o, given, slope.to(o))]

    rounding = torch.finfo(HALF).eps * v.max()  # of one value, which all share
    kernel = gradients(HALF, DEVICE, backend="triton", form="chunk")
    for found, expected in zip(kernel, gradients(torch.float64, "cpu"), strict=True):
        assert (found - expected).abs().max() <= rounding


@pytest.mark.sampled
@over_dtypes
@pytest.mark.parametrize(
    ("causal", "decay"), [(True, "scalar"), (False, "diagonal"), (False, "none")]
)
def test_packed_sequences(causal, decay, dtype):
    """A packed call equals the reference for each sequence, values and gradients."""
    cu_seqlens = torch.tensor([0, 1, 9, 9, 30, 40], dtype=torch.int32)
    named = inputs(40, causal=causal, decay=decay)
    del named["state"]
    slope = rounded(torch.randn(named["v"].shape, generator=torch.Generator().manual_seed(1)))

    def found(call, dtype):
        leaves = {name: x.to(DEVICE, dtype).requires_grad_() for name, x in named.items()}
        o = call(**leaves)
        grads = torch.autograd.grad(o, list(leaves.values()), slope.to(o))
        return [x.double() for x in (o, *grads)]

    def separate(**leaves):
        spans = zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)
        rows = [
            decay_attention(
                **{name: x[:, a:b] for name, x in leaves.items()}, causal=causal, form="full",
                normalize="sum", decay_at="target", backend="torch",
            )[0]
            for a, b in spans if a < b
        ]  # fmt: skip
        return torch.cat(rows, dim=1)

    def packed(**leaves):
        options = {"normalize": "sum", "decay_at": "target", "cu_seqlens": cu_seqlens}
        return in_kernels(**leaves, causal=causal, **options)[0]

    for x, y in zip(found(packed, dtype), found(separate, torch.float64), strict=True):
        assert (x - y).abs().max() <= TOLERANCES[dtype] * y.abs().max()


@pytest.mark.parametrize("tokens", [1, 4])
def test_torch_func_over_a_decay_is_left_to_torch_or_refused(tokens):
    named = narrowed(inputs(tokens, causal=True), SINGLE)
    log_decay = named.pop("log_decay")

    def loss(log_decay, backend="auto"):
        o, _ = decay_attention(**named, log_decay=log_decay, causal=True, backend=backend)
        return o.sum()

    want = torch.func.grad(loss)(log_decay)
    with use_backend("triton"):
        torch.testing.assert_close(torch.func.grad(loss)(log_decay), want)
    with pytest.raises(ValueError, match=r"'triton' under torch\.func or forward-mode"):
        torch.func.grad(lambda x: loss(x, "triton"))(log_decay)
