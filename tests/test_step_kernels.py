"""Decoding in kernels, run by Triton in Python or on a GPU: tokens one after the other."""

import functools

import pytest
import torch

from onescan.ops.additive_decay import AdditiveDecayState, recurrent, reference

pytest.importorskip("triton")
triton_recurrent = pytest.importorskip("onescan.ops.additive_decay.triton_recurrent")

on_every_device = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        ("cpu", torch.float16),
        *(
            pytest.param("cuda", dtype, marks=pytest.mark.gpu)
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
        ),
    ],
)


@pytest.fixture(autouse=True)
def _interpreted_or_on_a_gpu(request):
    is_gpu = request.node.get_closest_marker("gpu") is not None
    if is_gpu != torch.cuda.is_available():
        pytest.skip("kernels are interpreted where there is no GPU")


def step(q, k, v, angles=None, state=None, keep=None):
    return triton_recurrent.forward(q, k, v, angles, state, keep=keep, chunk_size=64)


def inputs(
    tokens, *, batch=2, heads=2, key=5, value=7, lrpe=True, state=True, keep=False, scale=1.0,
    dtype=torch.float32, device="cpu",
):  # fmt: skip
    """Logits, and the normalizer before them, of about the scale."""

    def normal(*sizes):
        return torch.randn(*sizes, device=device)

    q, v = (
        normal(batch, tokens, heads, key).to(dtype),
        normal(batch, tokens, heads, value).to(dtype),
    )
    z = (scale * normal(batch, heads, key)).double()
    kv = normal(batch, heads, 2 * key if lrpe else key, value)
    kept = torch.rand(batch, tokens, device=device) > 0.4
    kept[:, 0] = True
    return {
        "q": q,
        "k": (scale * normal(batch, tokens, heads, key)).to(dtype),
        "v": v,
        "angles": 3 * normal(tokens, heads, key) if lrpe else None,
        "state": AdditiveDecayState(z, kv) if state else None,
        "keep": kept if keep else None,
    }


def definition(named):
    state = named["state"]
    wide = {n: x.double() if n in "qkv" else x for n, x in named.items()}
    wide["angles"] = None if named["angles"] is None else named["angles"].double()
    wide["state"] = state and AdditiveDecayState(*(x.double() for x in state))
    return reference.forward(**wide, causal=True)


def plain(named):
    """The recurrent form in torch, as its front door calls it."""
    q, k, v, angles, state, keep = named.values()
    wide_q, wide_k, wide_v = (x.float() for x in (q, k, v))
    if keep is not None:
        gone = ~keep[:, :, None, None]
        wide_k, wide_v = wide_k.masked_fill(gone, -torch.inf), wide_v.masked_fill(gone, 0)
    o, after = recurrent.forward(wide_q, wide_k, wide_v, angles, state, chunk_size=64)
    return (o if keep is None else o.masked_fill(gone, 0)).to(v.dtype), after


def errors(got, want):
    pairs = zip((got[0], *got[1]), (want[0], *want[1]), strict=True)
    return torch.tensor([(x.double() - y).norm() / (1e-9 + y.norm()) for x, y in pairs])


def assert_no_less_exact_than_torch(named):
    want = definition(named)
    ours, theirs = errors(step(**named), want), errors(plain(named), want)
    few_roundings = 2 * torch.finfo(torch.float32).eps
    assert (ours <= 2 * theirs + few_roundings).all(), (ours, theirs)


@on_every_device
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("lrpe", [False, True])
@pytest.mark.parametrize(("state", "keep"), [(False, False), (True, False), (True, True)])
def test_steps_are_the_definition(tokens, lrpe, state, keep, device, dtype):
    options = {"lrpe": lrpe, "state": state, "keep": keep, "dtype": dtype, "device": device}
    assert_no_less_exact_than_torch(inputs(tokens, **options))


@on_every_device
@pytest.mark.parametrize(("key", "value"), [(1, 1), (70, 20), (16, 33), (256, 5)])
def test_any_width_of_a_head(key, value, device, dtype):
    named = inputs(2, batch=1, heads=1, key=key, value=value, dtype=dtype, device=device)
    assert_no_less_exact_than_torch(named)


@on_every_device
def test_logits_of_ten_thousand_keep_their_digits(device, dtype):
    named = inputs(4, scale=1e4, dtype=dtype, device=device)
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
    with pytest.raises(ValueError, match=r"'recurrent/triton', which has no gradients.*'chunk'"):
        step(**named)
    with torch.no_grad():
        assert step(**named)[0].isfinite().all()


@pytest.mark.parametrize("lrpe", [False, True])
def test_the_op_is_declared_rightly(lrpe):
    q, k, v, angles, state, keep = inputs(2, lrpe=lrpe, keep=lrpe).values()
    torch.library.opcheck(torch.ops.onescan.additive_step.default, (q, k, v, angles, keep, *state))


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
