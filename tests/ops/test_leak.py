"""Leak of additive decay: every form against the definition, and what the contract promises."""

import itertools
from functools import partial
from inspect import unwrap

import pytest
import torch
from pairwise import pairwise
from ranks import assert_same_over_ranks, run_ranks, split

from onescan.ops.additive_decay import (
    AdditiveDecayState,
    additive_decay,
    reference,
    tiled_causal,
)

B, H, K, V = 2, 3, 4, 5
FORMS = ["chunk", "full", "recurrent"]
RATES = torch.tensor([0.0, 0.04, 3.0], dtype=torch.float64)  # of heads
PER_CHANNEL = RATES.unsqueeze(-1) * torch.linspace(0.5, 1.5, K, dtype=torch.float64)
causal_decay = partial(additive_decay, causal=True)
over_forms = pytest.mark.parametrize("form", FORMS)


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def inputs(tokens, *, angles=True, keep=False, state=False, per_channel=False):
    torch.manual_seed(tokens)
    named = {"q": rand(B, tokens, H, K), "k": 2 * rand(B, tokens, H, K), "v": rand(B, tokens, H, V)}
    named["leak"] = PER_CHANNEL if per_channel else RATES
    if angles:
        named["angles"] = rand(tokens, H, K)
    if keep:
        named["keep"] = torch.rand(B, tokens) < 0.6
    if state:
        features = 2 * K if angles else K
        named["state"] = AdditiveDecayState(rand(B, H, K), rand(B, H, features, V))
    return named


def outputs_and_gradients(function, named):
    """Return outputs, the state, and the gradients of all tensors, of the leak last."""
    tensors = [n for n in ("q", "k", "v", "angles", "leak") if n in named]
    named = named | {n: named[n].clone().requires_grad_() for n in tensors}
    needed = [named[n] for n in tensors[:-1]]
    if "state" in named:
        named["state"] = AdditiveDecayState(*(x.clone().requires_grad_() for x in named["state"]))
        needed += named["state"]
    o, state = function(**named)
    torch.manual_seed(7)
    results = o, state.log_normalizer.nan_to_num(neginf=0), state.kv
    loss = sum((x * rand(*x.shape).to(x.dtype)).sum() for x in results)
    return (o, *state), torch.autograd.grad(loss, [*needed, named["leak"]])


def assert_same(got, want, tolerance=1e-9):
    for x, y in zip(got, want, strict=True):
        y = y.clamp(min=-1e30)  # the definition writes the logarithm of nothing as -inf
        torch.testing.assert_close(x.to(y.dtype), y, atol=tolerance, rtol=tolerance)


def part(named, start, stop):
    cut = {n: named[n][:, start:stop] for n in ("q", "k", "v", "keep") if n in named}
    return named | cut | {"angles": named["angles"][start:stop]}


@pytest.mark.parametrize("per_channel", [False, True])
def test_the_reference_is_the_double_sum(per_channel):
    named = inputs(9, angles=False, keep=True, per_channel=per_channel)
    q, k, v, leak, keep = (named[n] for n in ("q", "k", "v", "leak", "keep"))
    o, state = reference.forward(**named, causal=True)
    rate = leak if per_channel else leak.unsqueeze(-1)
    for b in range(B):
        for t in range(9):
            logits = torch.full((t + 1, H, K), -torch.inf, dtype=torch.float64)
            for s in range(t + 1):
                if keep[b, s]:
                    logits[s] = k[b, s] - rate * keep[b, s + 1 : t + 1].sum()
            weight = logits.softmax(dim=0).nan_to_num()
            kv = torch.einsum("shk,shv->hkv", weight, v[b, : t + 1])
            want = torch.einsum("hk,hkv->hv", q[b, t], kv) * keep[b, t]
            torch.testing.assert_close(o[b, t], want, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(state.kv[b], kv, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(state.log_normalizer[b], logits.logsumexp(0))


@pairwise(
    {
        "form": [*FORMS, "tiles", "halving"],
        "tokens": [1, 2, 7, 37, 70],
        "angles": [False, True],
        "keep, state": [(False, False), (True, False), (True, True)],
        "per_channel": [False, True],
    }
)
def test_every_form_matches_the_reference(
    form, tokens, angles, keep, state, per_channel, monkeypatch
):
    if form == "tiles":
        monkeypatch.setattr(tiled_causal, "TILE", 1)
    if form == "halving":
        monkeypatch.setattr(tiled_causal, "needs_plain_functions", lambda *tensors: True)
    name = form if form in FORMS else "chunk"
    named = inputs(tokens, angles=angles, keep=keep, state=state, per_channel=per_channel)
    want = outputs_and_gradients(partial(reference.forward, causal=True), named)
    got = outputs_and_gradients(partial(causal_decay, form=name, chunk_size=16), named)
    assert_same(got[0], want[0])
    assert_same(got[1], want[1])


STEPS = torch.arange(150, dtype=torch.float32)
HOSTILE = {
    "moderate": torch.zeros_like(STEPS),
    "offset": 1e4 * torch.ones_like(STEPS),
    "17 a token": 17 * STEPS,
    "down 30 a token": -30 * STEPS,
    "alternating": 1e4 * (-1) ** STEPS,
    "empty start": torch.where(STEPS < 70, -torch.inf, STEPS),
    "empty middle": torch.where((STEPS > 10) & (STEPS < 140), -torch.inf, 0),
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("tile", [1, tiled_causal.TILE])
def test_float32_is_exact_up_to_rounding(kind, tile, monkeypatch):
    monkeypatch.setattr(tiled_causal, "TILE", tile)
    named = inputs(len(STEPS), angles=False, state=True, keep=kind == "17 a token")
    named |= {n: named[n].float() for n in "qkv"}
    named["k"] = named["k"] + HOSTILE[kind][:, None, None]
    exact = named | {n: named[n].double() for n in "qkv"}
    want = outputs_and_gradients(partial(reference.forward, causal=True), exact)
    named["state"] = named["state"]._replace(kv=named["state"].kv.float())
    got = outputs_and_gradients(causal_decay, named)
    for x, y in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        assert (x.double() - y).abs().max() <= 2e-7 * y.abs().max().clamp(min=1)


def test_a_hundred_thousand_tokens():
    tokens = 100_000
    q, k, v = (rand(1, tokens, 3, 4).float() for _ in range(3))
    leak = torch.log(torch.tensor([2.0])) / torch.tensor([16.0, 4096.0, 1e9])
    got, state = causal_decay(q, k, v, leak=leak)
    want, exact = causal_decay(q.double(), k.double(), v.double(), leak=leak, chunk_size=48)
    assert ((got - want).abs().amax((0, 1, 3)) / want.abs().amax((0, 1, 3))).max() < 2e-6
    torch.testing.assert_close(state.log_normalizer, exact.log_normalizer, atol=1e-6, rtol=0)


@over_forms
def test_a_leak_of_zero_is_bit_equal_to_none(form):
    named = inputs(130)
    leak = torch.zeros_like(named.pop("leak"))
    o, state = causal_decay(**named, form=form)
    got, after = causal_decay(**named, form=form, leak=leak)
    assert all(map(torch.equal, (got, *after), (o, *state)))


@over_forms
@pytest.mark.parametrize("leak", [1e5, 1e9, 1e16, 1e29, 3e38, 1.7e308])
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_with_a_large_leak_tokens_read_only_themselves(form, leak, scale):
    q, k, v = (rand(1, 300, H, K) for _ in range(3))
    named = {"q": q, "k": scale * k, "v": v, "leak": torch.full((H,), leak, dtype=torch.float64)}
    for dtype in (torch.float64, torch.float32):
        if leak > torch.finfo(dtype).max:
            continue
        named = {n: x.to(dtype) for n, x in named.items()}
        (o, *state), gradients = outputs_and_gradients(partial(causal_decay, form=form), named)
        torch.testing.assert_close(o, named["q"].sum(-1, keepdim=True) * named["v"])
        torch.testing.assert_close(state[0], named["k"][:, -1].double(), atol=1e-6, rtol=0)
        assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
def test_two_calls_equal_one_at_every_cut(first, second):
    tokens = 9
    named = inputs(tokens, keep=True, state=True)
    want_o, want_state = causal_decay(**named, form="full")
    for cut in range(1, tokens):
        o1, state = causal_decay(**part(named, 0, cut), form=first, chunk_size=4)
        later = part(named, cut, tokens) | {"state": state}
        o2, state = causal_decay(**later, form=second, chunk_size=4)
        assert_same((torch.cat([o1, o2], dim=1), *state), (want_o, *want_state))


@over_forms
def test_masked_tokens_do_not_count(form):
    named = inputs(10)
    keep = torch.tensor([1, 0, 0, 1, 1, 0, 1, 1, 1, 0], dtype=torch.bool).expand(B, -1)
    short = {n: named[n][:, keep[0]] for n in "qkv"}
    angles = named["angles"][keep[0]]
    want, last = causal_decay(**short, angles=angles, leak=RATES, form=form)
    for name in "qkv":
        named[name] = named[name].masked_fill(~keep[:, :, None, None], torch.nan)
    o, state = causal_decay(**named, keep=keep, form=form)
    assert_same((o[:, keep[0]], *state), (want, *last))


def test_packed_sequences_are_separate():
    offsets = [0, 1, 1, 4, 50, 52]
    named = inputs(offsets[-1])
    packed = {"cu_seqlens": torch.tensor(2 * offsets).int() + 52 * (torch.arange(12) > 5).int()}
    packed["cu_seqlens"] = packed["cu_seqlens"].unique_consecutive()
    o, state = causal_decay(**named, **packed, chunk_size=8)
    assert state is None
    for start, stop in itertools.pairwise(offsets):
        if stop > start:
            want, _ = causal_decay(**part(named, start, stop))
            torch.testing.assert_close(o[:, start:stop], want, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("packed", [False, True])
def test_ranks_equal_one_process(packed, tmp_path):
    tokens = 13
    offsets = torch.tensor([0, 1, 8, tokens, tokens + 6, 2 * tokens], dtype=torch.int32)

    def op(q, k, v, leak, group, keep=None, z=None, kv=None):
        state = None if z is None else AdditiveDecayState(z, kv)
        cu_seqlens = offsets if packed else None
        o, after = causal_decay(
            q, k, v, leak=leak.abs(), keep=keep, state=state, group=group, cu_seqlens=cu_seqlens
        )
        return o, after or ()

    def check(group):
        lengths, leak = split(tokens, group.size()), {"leak": RATES + 0.1}
        named = {n: rand(B, tokens, H, K) for n in "qkv"}
        assert_same_over_ranks(op, named, leak, lengths, group)
        named["k"] *= 300  # weights that differ by more than any float holds
        named["keep"] = torch.rand(B, tokens) > 0.3
        leak["leak"] = PER_CHANNEL + 0.1
        state = {} if packed else {"z": rand(B, H, K), "kv": rand(B, H, K, K)}
        assert_same_over_ranks(op, named, leak | state, lengths, group)

    run_ranks(4, check, tmp_path)


def test_ranks_equal_one_process_in_float32(tmp_path):
    def check(group):
        q, k, v = (rand(1, 400, H, K).float() for _ in range(3))
        at = slice(0, 150) if group.rank() == 0 else slice(150, 400)
        o, state = causal_decay(q[:, at], k[:, at], v[:, at], leak=RATES, group=group)
        want, last = causal_decay(q, k, v, leak=RATES)
        assert state.kv.dtype == torch.float32
        torch.testing.assert_close(o, want[:, at], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(tuple(state), tuple(last), atol=1e-5, rtol=1e-5)

    run_ranks(2, check, tmp_path)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_gradcheck(form):
    named = inputs(5, state=True)
    tensors = [named[n] for n in ("q", "k", "v", "angles")] + [RATES + 0.1, *named["state"]]
    tensors = [x.requires_grad_() for x in tensors]

    def call(q, k, v, angles, leak, *state):
        state = AdditiveDecayState(*state)
        options = {"angles": angles, "leak": leak, "state": state}
        o, after = causal_decay(q, k, v, **options, form=form, chunk_size=2)
        return o, *after

    assert torch.autograd.gradcheck(call, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_transforms_take_leaks(form):
    named = inputs(11, angles=False)
    leaks = torch.stack([RATES, RATES.flip(0)])

    def call(leak):
        return causal_decay(**named | {"leak": leak}, form=form, chunk_size=8)[0]

    each = torch.stack([call(leak) for leak in leaks])
    torch.testing.assert_close(torch.func.vmap(call)(leaks), each)
    _, slope = torch.func.jvp(call, (RATES,), (torch.ones_like(RATES),))
    leak = (RATES + 1e-6).requires_grad_()
    (gradient,) = torch.autograd.grad(call(leak).sum(), leak)
    torch.testing.assert_close(slope.sum(), gradient.sum(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_inputs_and_autocast(dtype):
    named = {n: x.to(dtype) for n, x in inputs(40, angles=False).items()}
    o, state = causal_decay(**named)
    assert (o.dtype, *(x.dtype for x in state)) == (dtype, torch.float64, torch.float32)
    want, _ = causal_decay(**{n: x.double() for n, x in named.items()})
    assert (o - want).abs().max() <= 2 * torch.finfo(dtype).eps * want.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(causal_decay(**named)[0], o)


@pytest.mark.compile
@over_forms
def test_compiled_calls_equal_eager_ones(form):
    named = {n: x.float() for n, x in inputs(20).items()}
    call = partial(causal_decay, form=form)
    want = outputs_and_gradients(call, named)
    got = outputs_and_gradients(torch.compile(call, fullgraph=True, backend="aot_eager"), named)
    assert_same((*got[0], *got[1]), (*want[0], *want[1]), 1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": False}, "leak requires causal=True: with causal=False"),
        ({"causal": False, "causal_block": 2}, "leak was given with causal_block, expected"),
        ({"backend": "triton"}, "backend is 'triton' with leak, expected backend 'torch'"),
        ({"leak": -RATES}, "leak ranges from -3 to -0, expected finite rates of at least 0"),
        ({"leak": RATES / 0}, "leak ranges from nan to nan, expected finite rates"),
        ({"leak": RATES[1:] / 0}, r"leak has shape \(2,\), expected 'H' with H=3"),
        ({"leak": torch.ones(H, K + 1)}, r"leak has shape \(3, 5\), expected 'H K'"),
        ({"leak": torch.tensor(0.1)}, r"leak has shape \(\), expected 'H' or 'H K'"),
        ({"leak": 0.1}, "leak is a float, expected a tensor"),
        ({"leak": torch.ones(H).int()}, "leak has dtype torch.int32"),
        ({"leak": torch.ones(H, device="meta")}, "leak is on meta and k on cpu"),
    ],
)
def test_errors_name_the_leak(change, message):
    named = inputs(4) | {"causal": True} | change
    with pytest.raises(ValueError, match=message):
        unwrap(additive_decay)(**named)  # without the shape hook, as users call it
