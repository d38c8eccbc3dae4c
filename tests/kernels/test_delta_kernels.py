"""Kernels of the delta rule, interpreted where there is no GPU: the definition, the contract."""

from functools import partial
from inspect import unwrap

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

pytest.importorskip("triton")

from onescan.ops.backend import WIDEST_HEAD, use_backend
from onescan.ops.delta_rule import DeltaState, DeltaStates, delta_rule, reference

pytestmark = MARKS
TOLERANCES = {SINGLE: 2e-5, HALF: 4e-3, BRAIN: 3e-2}  # of the largest
TENSORS = ("q", "k", "v", "beta", "log_decay")

in_kernels = partial(delta_rule, backend="triton")
over_directions = pytest.mark.parametrize(
    "causal", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["causal", "both"]
)


def inputs(tokens, *, causal, decay=True, keep=False, enters="", widths=(5, 6), batch=1, heads=1):
    """Arguments in float64 that are `rounded`; `enters` names sides, "left right"."""
    g = torch.Generator().manual_seed(tokens)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    named = {
        "q": normal(batch, tokens, heads, widths[0]),
        "k": F.normalize(normal(batch, tokens, heads, widths[0]), dim=-1),
        "v": normal(batch, tokens, heads, widths[1]),
        "beta": 2 * normal(batch, tokens, heads).sigmoid(),
    }
    if decay:
        named["log_decay"] = F.logsigmoid(2 + 2 * normal(batch, tokens, heads))
    named = {name: rounded(x) for name, x in named.items()}
    if keep:
        named["keep"] = torch.rand(batch, tokens, generator=g) < 0.7
    sides = [
        DeltaState(rounded(normal(batch, heads, *widths))) if side in enters else None
        for side in ("left", "right")
    ]
    named["state"] = sides[0] if causal else DeltaStates(*sides)
    return named


def assert_matches_reference(named, *dtypes, causal):
    """Outputs, states and gradients of kernels against the definition in float64."""
    want = outputs_and_gradients(partial(reference.forward, causal=causal), named)
    for dtype in dtypes:
        got = outputs_and_gradients(partial(in_kernels, causal=causal), narrowed(named, dtype))
        assert got[0][0].dtype == dtype
        assert_near(got[0] + got[1], want[0] + want[1], TOLERANCES[dtype])


COLUMNS = "tokens, causal, decay, keep, enters, widths"
NARROW = (2,)  # tokens of which narrow types are tried in the interpreter too
TABLE = [
    (1, True, False, False, "left", (5, 6)),
    (1, False, True, False, "", (1, 1)),
    (2, True, False, False, "left", (6, 5)),
    (33, True, True, True, "left", (5, 6)),
    (33, False, True, False, "left right", (5, 6)),
    (64, True, False, False, "", (8, 8)),
    *(
        pytest.param(*row, marks=pytest.mark.slow)
        for row in [
            (2, False, False, False, "right", (6, 5)),
            (33, False, True, False, "left right", (5, 40)),  # values in two parts
            (65, False, False, True, "left", (40, 6)),  # keys in two parts
            (65, False, True, True, "left right", (5, 6)),
            (130, True, True, True, "left", (5, 6)),
        ]
    ),
]


def test_an_axis_of_one_update_runs_in_kernels():
    named = narrowed(inputs(5, causal=True), SINGLE)
    updates = {name: named[name].unsqueeze(2) for name in ("k", "v", "beta")}
    want, _ = in_kernels(**named, causal=True)
    torch.testing.assert_close(in_kernels(**named | updates, causal=True)[0], want, atol=0, rtol=0)


@pytest.mark.sampled
@pytest.mark.parametrize(COLUMNS, TABLE)
def test_kernels_match_the_reference(tokens, causal, decay, keep, enters, widths):
    dtypes = DTYPES if GPU or tokens in NARROW else [SINGLE]
    named = inputs(tokens, causal=causal, decay=decay, keep=keep, enters=enters, widths=widths)
    assert_matches_reference(named, *dtypes, causal=causal)


# few heads and widths of keys and values, as kernels are compiled anew for each
BUILDS = [
    (True, False, 2, (1, 1)),
    (False, True, 1, (1, 33)),
    (False, False, 3, (16, 33)),
    (True, True, 2, (33, 16)),
    (True, True, 1, (64, 64)),
    (False, False, 1, (64, 96)),
    (False, True, 1, (96, 64)),
    (True, False, 1, (128, 1)),
    (True, True, 2, (64, 128)),
    (False, True, 1, (128, 128)),
]


def plain(q, k, v, beta, log_decay=None, *, causal, state):
    """Every step in the type of q, k and v, as one would write it in torch; nothing enters."""
    assert not tensors_of(state)

    def visit(order):
        kv, found = torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None]), {}
        for t in order:
            if log_decay is not None:
                kv = kv * log_decay[:, t, :, None, None].exp().to(kv.dtype)
            key = k[:, t].unsqueeze(-1)
            new = beta[:, t].unsqueeze(-1) * (v[:, t] - (key.mT @ kv).squeeze(-2))
            kv = kv + key @ new.unsqueeze(-2)
            found[t] = (q[:, t].unsqueeze(-2) @ kv).squeeze(-2)
        return torch.stack([found[t] for t in sorted(found)], dim=1)

    tokens = range(q.shape[1])
    o = visit(tokens)
    if not causal:
        own = beta.unsqueeze(-1) * (q * k).sum(-1, keepdim=True) * v
        o = o + visit(reversed(tokens)) - own
    return o, None


def assert_within_twice_plain(named, *dtypes, causal):
    """The kernels' errors of outputs and gradients, at most twice those of plain torch."""

    def run(call, given):
        alone = lambda **x: (call(**x, causal=causal)[0], None)
        outputs, gradients = outputs_and_gradients(alone, given)
        return [x.double().cpu() for x in outputs + gradients]

    exact = run(reference.forward, named)
    for dtype in dtypes:
        small = narrowed(named, dtype)
        assert_errors_like_torch(run(in_kernels, small), run(plain, small), exact, dtype)


@over_directions
def test_errors_are_at_most_twice_those_of_plain_torch(causal):
    named = inputs(20, causal=causal, widths=(16, 8))
    assert_within_twice_plain(named, *DTYPES, causal=causal)


@pytest.mark.slow
@over_seeds
def test_random_shapes(seed):
    batch, tokens = drawn(seed, 3, LONGEST)
    causal, decay, heads, widths = BUILDS[seed % len(BUILDS)]
    sizes = {"batch": batch, "heads": heads, "widths": widths, "decay": decay, "causal": causal}
    assert_within_twice_plain(inputs(tokens + 1, **sizes), *DTYPES, causal=causal)
    named = inputs(tokens, **sizes, keep=True, enters="left right")
    assert_matches_reference(named, *DTYPES, causal=causal)


@over_directions
def test_decays_of_zero_and_one_and_almost(causal):
    named = inputs(40, causal=causal, enters="left right")
    levels = torch.tensor([0.0, -1e-6, -50.0, -torch.inf], dtype=torch.float64)
    shape = named["log_decay"].shape
    g = torch.Generator().manual_seed(0)
    named["log_decay"] = levels[torch.randperm(shape.numel(), generator=g).reshape(shape) % 4]
    assert_matches_reference(named, SINGLE, causal=causal)


@over_directions
def test_nothing_flows_back_to_a_decay_that_forgets_all(causal):
    named = narrowed(inputs(20, causal=causal), SINGLE)
    named["log_decay"][:, 10] = -torch.inf
    _, (*_, gradient) = outputs_and_gradients(partial(in_kernels, causal=causal), named)
    assert (gradient[:, 10] == 0).all()
    assert (gradient[:, 5] != 0).all()


@over_directions
def test_equal_keys_do_not_lose_digits(causal):
    """Powers of A would reach 1e18 in a chunk of equal keys, but its inverse at most 2."""
    named = inputs(64, causal=causal, decay=False, widths=(4, 6))
    named["k"] = torch.full_like(named["k"], 0.5)
    named["beta"] = torch.ones_like(named["beta"])
    assert_matches_reference(named, SINGLE, causal=causal)


@pytest.mark.slow
def test_samples_and_heads_do_not_meet():
    named = inputs(34, causal=True, enters="left", batch=2, heads=2)
    o, _ = in_kernels(**narrowed(named, SINGLE), causal=True)
    for sample in range(2):
        one = {name: named[name][sample, None] for name in TENSORS}
        one["state"] = DeltaState(named["state"].kv[sample, None])
        alone, _ = in_kernels(**narrowed(one, SINGLE), causal=True)
        assert torch.equal(alone[0], o[sample])


@pytest.mark.parametrize("place", [1, pytest.param(32, marks=pytest.mark.slow)])
def test_two_calls_equal_one(place):
    named = narrowed(inputs(40, causal=True, keep=True, enters="left"), SINGLE)
    want, last = in_kernels(**named, causal=True)
    state, outputs = named.pop("state"), []
    for start, stop in ((0, place), (place, 40)):
        part = {name: x[:, start:stop] for name, x in named.items()}
        o, state = in_kernels(**part, causal=True, state=state)
        outputs.append(o)
    got = [torch.cat(outputs, 1), state.kv]
    assert_near(got, [x.double().cpu() for x in (want, last.kv)], 2e-5)


@pytest.mark.sampled
@over_dtypes
@pytest.mark.parametrize(("causal", "decay"), [(True, False), (False, True)])
def test_packed_sequences(causal, decay, dtype):
    """A packed call equals the reference for each sequence, values and gradients."""
    cu_seqlens = torch.tensor([0, 1, 9, 9, 30, 40], dtype=torch.int32)
    named = inputs(40, causal=causal, decay=decay, keep=True)
    keep = named["keep"]
    tensors = {name: named[name] for name in TENSORS if name in named}
    slope = rounded(torch.randn(named["v"].shape, generator=torch.Generator().manual_seed(1)))

    def found(call, dtype):
        leaves = {name: x.to(DEVICE, dtype).requires_grad_() for name, x in tensors.items()}
        o = call(**leaves)
        gradients = torch.autograd.grad(o, list(leaves.values()), slope.to(o))
        return [x.double().cpu() for x in (o, *gradients)]

    def separate(**leaves):
        spans = zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)
        rows = [
            reference.forward(
                **{name: x[:, a:b].cpu() for name, x in leaves.items()},
                keep=keep[:, a:b], causal=causal,
            )[0]
            for a, b in spans if a < b
        ]  # fmt: skip
        return torch.cat(rows, dim=1).to(DEVICE)

    def packed(**leaves):
        masks = {"keep": keep.to(DEVICE), "cu_seqlens": cu_seqlens}
        return in_kernels(**leaves, **masks, causal=causal)[0]

    assert_near(found(packed, dtype), found(separate, torch.float64), TOLERANCES[dtype])


@over_directions
def test_masked_tokens_may_hold_anything(causal):
    named = narrowed(inputs(9, causal=causal, keep=True), SINGLE)
    call = partial(in_kernels, causal=causal)
    want = outputs_and_gradients(call, named)
    for name in ("q", "k", "v", "beta"):
        mask = ~named["keep"].view(1, 9, *(1,) * (named[name].ndim - 2))
        named[name] = named[name].masked_fill(mask, torch.nan)
    got = outputs_and_gradients(call, named)
    assert all(map(torch.equal, got[0] + got[1], want[0] + want[1]))
    assert all((x[~named["keep"]] == 0).all() for x in (got[0][0], *got[1]))


def test_a_state_alone_has_a_gradient():
    named = inputs(9, causal=True, enters="left")
    leaf = named["state"].kv.clone().requires_grad_()
    want = reference.forward(**dict(named, state=DeltaState(leaf)), causal=True)[1].kv.sum()
    expected = torch.autograd.grad(want, leaf)
    small = narrowed(named, SINGLE)
    leaf = small["state"].kv.requires_grad_()
    o, state = in_kernels(**small, causal=True)
    assert o.requires_grad
    assert_near(torch.autograd.grad(state.kv.sum(), leaf), expected, 2e-5)


@pytest.mark.gpu
@over_directions
def test_a_cuda_graph_repeats_a_call(causal):
    named = narrowed(inputs(100, causal=causal, enters="left", widths=(64, 64)), BRAIN)
    assert_a_graph_repeats(lambda: in_kernels(**named, causal=causal)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float64}, "backend is 'triton', but kernels take float32, bfloat16 or"),
        ({"widths": (5, WIDEST_HEAD + 1)}, f"channels, expected at most {WIDEST_HEAD}"),
        (
            {"form": "recurrent"},
            "backend is 'triton', .* form 'recurrent' with .*chunk/triton",
        ),
        ({"form": "full"}, "backend is 'triton', .* form 'full' with .*chunk/triton"),
        ({"backend": "cuda"}, "backend 'cuda' is unknown"),
        ({"updates": 2}, "'triton' with several updates per token, expected one"),
        ({"diagonal": True}, "'triton' with a decay per key channel, expected one per head"),
    ],
)
def test_unsupported_calls_are_refused(change, message):
    options = {"backend": "triton", **change}
    widths, dtype = options.pop("widths", (5, 6)), options.pop("dtype", SINGLE)
    named = narrowed(inputs(4, causal=True, widths=widths), dtype)
    if updates := options.pop("updates", None):
        for name in ("k", "v", "beta"):
            named[name] = torch.stack([named[name]] * updates, dim=2)
    if options.pop("diagonal", False):
        named["log_decay"] = named["log_decay"].unsqueeze(-1).expand_as(named["k"])
    with pytest.raises(ValueError, match=message):
        unwrap(delta_rule)(**named, causal=True, **options)


@pytest.mark.parametrize("name", ["k", "v", "beta"])
def test_a_nan_is_blamed_on_its_argument(name):
    named = narrowed(inputs(4, causal=True), SINGLE)
    named[name][0, 1, 0] = torch.nan
    if GPU:
        assert in_kernels(**named, causal=True)[0].isnan().any()
        return
    with pytest.raises(ValueError, match=f"{name} holds . NaN values? out of"):
        in_kernels(**named, causal=True)


def test_where_kernels_are_preferred_the_rest_runs_on_torch(monkeypatch):
    launch = pytest.importorskip("onescan.ops.delta_rule.launch")
    calls, chunk = [], launch.chunk
    monkeypatch.setattr(launch, "chunk", lambda *a, **b: calls.append(1) or chunk(*a, **b))
    named = narrowed(inputs(4, causal=True), SINGLE)
    want, _ = delta_rule(**named, causal=True, backend="torch")
    diagonal = named["log_decay"].unsqueeze(-1).expand_as(named["k"])
    with use_backend("triton"):
        for change, count in (
            ({}, 1), ({"form": "chunk"}, 2), ({"form": "recurrent"}, 2),
            ({"log_decay": diagonal}, 2),
        ):  # fmt: skip
            o, _ = delta_rule(**named | change, causal=True)
            torch.testing.assert_close(o, want, rtol=1e-5, atol=1e-5)
            assert len(calls) == count


@over_directions
def test_operators_are_as_torch_wants_them(causal):
    named = narrowed(inputs(3, causal=causal, keep=True), SINGLE)
    q, k, v, beta = (named[name].requires_grad_() for name in TENSORS[:4])
    optional = [None] * 3
    if causal:
        decays = named["log_decay"][None].requires_grad_()
        kv_in = torch.rand(1, 1, 1, 5, 6, device=DEVICE, requires_grad=True)
        optional = [decays, kv_in, named["keep"]]
    torch.library.opcheck(torch.ops.onescan.delta_chunks, (q, k, v, beta, *optional, causal))


@pytest.mark.compile
@over_directions
def test_compiles_without_a_graph_break(causal):
    torch.compiler.reset()
    compiled = torch.compile(delta_rule, fullgraph=True, backend="aot_eager")
    named = narrowed(inputs(5, causal=causal, keep=True, enters="left"), SINGLE)
    options = {"causal": causal, "backend": "triton"}
    want = outputs_and_gradients(partial(delta_rule, **options), named)
    got = outputs_and_gradients(partial(compiled, **options), named)
    for x, y in zip(got[0] + got[1], want[0] + want[1], strict=True):
        torch.testing.assert_close(x, y)


def test_a_mask_with_gaps_and_strided_inputs_are_taken():
    q, k, v = on_device(*torch.randn(3, 2, 1, 20, 5))
    q, k, v = (F.normalize(x, dim=-1).transpose(1, 2) for x in (q, k, v))
    beta, keep = on_device(torch.rand(2, 1, 20).mT, (torch.rand(20, 2) > 0.4).mT)
    for causal in (False, True):
        call = partial(delta_rule, q, k, v, beta, causal=causal, keep=keep)
        torch.testing.assert_close(
            call(backend="triton")[0], call(backend="torch")[0], rtol=1e-4, atol=1e-5
        )
