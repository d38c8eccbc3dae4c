"""Decoding in kernels, run by Triton in Python or on a GPU: tokens one after the other."""

import functools

import pytest
import torch
from kernel_device import (
    BRAIN,
    DEVICE,
    MARKS,
    SINGLE,
    assert_a_graph_repeats,
    drawn,
    on_device,
    over_dtypes,
    over_seeds,
)

from onescan.ops.additive_decay import AdditiveDecayState, additive_decay, forms, reference
from onescan.ops.additive_decay.state import AdditiveInputs
from onescan.ops.feature_maps import FEATURE_MAPS
from onescan.ops.lrpe import RotaryPositions

pytest.importorskip("triton")
launch = pytest.importorskip("onescan.ops.additive_decay.launch")

pytestmark = MARKS


def step(q, k, v, angles=None, state=None, keep=None):
    return launch.recurrent(q, k, v, angles, state, keep=keep)


def inputs(
    tokens, *, batch=2, heads=2, key=5, value=7, lrpe=True, state=True, keep=False, scale=1.0,
    dtype=SINGLE,
):  # fmt: skip
    """Logits, and the normalizer before them, of about the scale."""
    q, k = torch.randn(2, batch, tokens, heads, key)
    v = torch.randn(batch, tokens, heads, value)
    z = (scale * torch.randn(batch, heads, key)).double()
    kv = torch.randn(batch, heads, 2 * key if lrpe else key, value)
    angles = 3 * torch.randn(tokens, heads, key)
    kept = torch.rand(batch, tokens) > 0.4
    kept[:, 0] = True
    q, k, v = (x.to(DEVICE, dtype) for x in (q, scale * k, v))
    return {
        "q": q,
        "k": k,
        "v": v,
        "angles": angles.to(DEVICE) if lrpe else None,
        "state": AdditiveDecayState(*on_device(z, kv)) if state else None,
        "keep": kept.to(DEVICE) if keep else None,
    }


def definition(named):
    q, k, v, angles, state, keep = named.values()
    q, k, v, angles = (None if x is None else x.double().cpu() for x in (q, k, v, angles))
    state = state and AdditiveDecayState(*(x.double().cpu() for x in state))
    keep = None if keep is None else keep.cpu()
    return reference.forward(q, k, v, angles=angles, causal=True, keep=keep, state=state)


def plain(named):
    """The recurrent form in torch, as its front door calls it."""
    q, k, v, angles, state, keep = named.values()
    wide_q, wide_k, wide_v = (x.float() for x in (q, k, v))
    if keep is not None:
        gone = ~keep[:, :, None, None]
        wide_k, wide_v = wide_k.masked_fill(gone, -torch.inf), wide_v.masked_fill(gone, 0)
    inputs = AdditiveInputs(wide_q, wide_k, wide_v, angles, state, None, 64)
    o, after = forms.recurrent(inputs)
    return (o if keep is None else o.masked_fill(gone, 0)).to(v.dtype), after


def errors(got, want):
    pairs = zip((got[0], *got[1]), (want[0], *want[1]), strict=True)
    return torch.tensor([(x.double().cpu() - y).norm() / (1e-9 + y.norm()) for x, y in pairs])


def assert_no_less_exact_than_torch(named):
    want = definition(named)
    ours, theirs = errors(step(**named), want), errors(plain(named), want)
    few_roundings = 2 * torch.finfo(torch.float32).eps
    assert (ours <= 2 * theirs + few_roundings).all(), (ours, theirs)


@pytest.mark.sampled(9)
@over_dtypes
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("lrpe", [False, True])
@pytest.mark.parametrize(("state", "keep"), [(False, False), (True, False), (True, True)])
def test_steps_match_the_reference(tokens, lrpe, state, keep, dtype):
    options = {"lrpe": lrpe, "state": state, "keep": keep, "dtype": dtype}
    assert_no_less_exact_than_torch(inputs(tokens, **options))


def projected(*parts):
    """The same numbers as ranges of channels of one tensor."""
    u = torch.cat([x.flatten(2) for x in parts], dim=-1)
    widths = [x.shape[2] * x.shape[3] for x in parts]
    pieces = zip(u.split(widths, dim=-1), parts, strict=True)
    return [x.unflatten(-1, like.shape[2:]) for x, like in pieces]


@pytest.mark.sampled(3)
@over_dtypes
@pytest.mark.parametrize("feature_map", ["identity", "silu", "shifted_silu", "relu"])
@pytest.mark.parametrize("start", [0, 2**20 + 1, torch.tensor(2**20 + 1)], ids=str)
def test_kernels_compute_feature_maps_and_angles(start, feature_map, dtype):
    q, k, v, _, state, keep = inputs(3, keep=True, dtype=dtype).values()
    theta = torch.rand(2, 5, device=DEVICE)
    begin = start.to(DEVICE) if isinstance(start, torch.Tensor) else start
    options = {"causal": True, "keep": keep, "state": state, "form": "recurrent"}
    options |= {"angles": RotaryPositions(theta, begin), "feature_map": feature_map}
    in_kernel, in_torch = (
        additive_decay(*projected(q, k, v), **options, backend=backend)
        for backend in ("triton", "torch")
    )
    q, k, v, theta, *state = (x.double().cpu() for x in (q, k, v, theta, *state))
    angles = (int(start) + torch.arange(3))[:, None, None] * theta
    want = reference.forward(
        FEATURE_MAPS[feature_map](q), k, v, angles=angles, causal=True, keep=keep.cpu(),
        state=AdditiveDecayState(*state),
    )  # fmt: skip
    few_roundings = 4 * torch.finfo(torch.float32).eps
    assert (errors(in_kernel, want) <= 2 * errors(in_torch, want) + few_roundings).all()


def test_one_launch_reads_the_output_of_a_projection(monkeypatch):
    q, k, v, _, state, _ = inputs(1, batch=3).values()
    given = projected(q, k, v)
    launched, run = [], launch.launch
    monkeypatch.setattr(
        launch, "launch", lambda *x, **flags: launched.append(x) or run(*x, **flags)
    )
    positions = RotaryPositions(torch.rand(2, 5, device=DEVICE), 7)
    launch.recurrent(*given, None, state, keep=None, positions=positions, feature_map="silu")
    (arguments,) = launched
    assert [x.data_ptr() for x in arguments[3:6]] == [x.data_ptr() for x in given]


WIDTHS = [(1, 1), (70, 20), (16, 33), (256, 5)]  # of a key and of a value


@over_dtypes
@pytest.mark.parametrize(("key", "value"), WIDTHS)
def test_any_width_of_a_head(key, value, dtype):
    named = inputs(2, batch=1, heads=1, key=key, value=value, dtype=dtype)
    assert_no_less_exact_than_torch(named)


@pytest.mark.slow
@over_dtypes
@over_seeds
def test_random_shapes(seed, dtype):
    batch, tokens, heads = drawn(seed, 40, 20, 3)
    key, value = WIDTHS[seed % len(WIDTHS)]
    kind = {"lrpe": seed % 3 > 0, "keep": seed % 2 > 0}
    sizes = {"batch": batch, "heads": heads, "key": key, "value": value}
    assert_no_less_exact_than_torch(inputs(tokens, **sizes, **kind, dtype=dtype))


@pytest.mark.gpu
def test_a_cuda_graph_repeats_a_call():
    named = inputs(1, heads=4, key=64, value=64, dtype=BRAIN)
    assert_a_graph_repeats(lambda: step(**named)[0])


@over_dtypes
def test_logits_of_ten_thousand_keep_their_digits(dtype):
    named = inputs(4, scale=1e4, dtype=dtype)
    assert_no_less_exact_than_torch(named)
    assert step(**named)[1].log_normalizer.dtype == torch.float64
    # the smallest of differences next to a large logit, which float32 does not have
    named["state"] = AdditiveDecayState(named["k"][:, 0].double() + 1e-4, named["state"].kv)
    assert_no_less_exact_than_torch(named)


def test_two_calls_equal_one_wherever_it_is_cut():
    named = inputs(6, keep=True)
    o, after = step(**named)
    for cut in (1, 2, 5):
        state, pieces = named["state"], []
        for piece in (slice(0, cut), slice(cut, 6)):
            cuts = {n: named[n][:, piece] for n in ("q", "k", "v", "keep")}
            given = dict(cuts, angles=named["angles"][piece], state=state)
            part, state = step(**given)
            pieces.append(part)
        torch.testing.assert_close(torch.cat(pieces, dim=1), o)
        torch.testing.assert_close(state, after)


def test_tokens_without_weight_leave_the_state_as_it_was():
    named = inputs(3, keep=True)
    named["keep"][:] = False
    named["v"][:] = torch.nan
    named["k"][:, 1] = torch.inf
    o, after = step(**named)
    assert (o == 0).all()
    assert torch.equal(after.log_normalizer, named["state"].log_normalizer)
    assert torch.equal(after.kv, named["state"].kv)


def test_keys_of_minus_infinity_have_no_weight():
    named = inputs(2, state=False)
    named["k"][:, 0] = -torch.inf
    o, after = step(**named)
    assert (o[:, 0] == 0).all()
    later = {n: x[:, 1:] for n, x in named.items() if n in ("q", "k", "v")}
    want, alone = step(**later, angles=named["angles"][1:])
    torch.testing.assert_close(o[:, 1:], want)
    torch.testing.assert_close(after, alone)


@pytest.mark.parametrize("name", ["q", "k", "v", "angles"])
def test_gradients_are_refused_by_name_of_the_form_that_has_them(name):
    named = inputs(1)
    named[name].requires_grad_()
    call = functools.partial(additive_decay, causal=True, form="recurrent", backend="triton")
    message = "'triton' with form 'recurrent', which has no gradients, expected form 'chunk'"
    with pytest.raises(ValueError, match=message):
        call(**named)
    with torch.no_grad():
        assert call(**named)[0].isfinite().all()


@pytest.mark.sampled
@pytest.mark.parametrize("lrpe", [False, True])
def test_the_op_is_declared_rightly(lrpe):
    q, k, v, angles, state, keep = inputs(2, lrpe=lrpe, keep=lrpe).values()
    given = (q, k, v, angles, None, None, keep, *state, 0, "identity")
    torch.library.opcheck(torch.ops.onescan.additive_step.default, given)


@pytest.mark.compile
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_without_a_graph_break(dynamic):
    torch.compiler.reset()
    compiled = torch.compile(
        functools.partial(step), fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    for tokens in (1, 3):
        named = inputs(tokens)
        torch.testing.assert_close(compiled(**named), step(**named))
