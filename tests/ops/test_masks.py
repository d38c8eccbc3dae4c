"""Values under a mask reach neither outputs nor gradients, in every op and form."""

from itertools import product

import pytest
import torch
from kernel_device import DEVICE, MARKS
from pairwise import pairwise_rows
from torch.utils._pytree import tree_leaves, tree_map_only

from onescan.ops import (
    additive_decay,
    decay_attention,
    delta_rule,
    linear_diffusion,
    lrpe_angles,
)
from onescan.ops.additive_decay import AdditiveDecayState
from onescan.ops.decay_attention import DecayState, DecayStates
from onescan.ops.delta_rule import DeltaState, DeltaStates
from onescan.ops.feature_maps import FEATURE_MAPS
from onescan.ops.linear_diffusion import DiffusionState, next_state
from onescan.ops.window_attention import window_attention

B, T, H, K, V = 2, 21, 2, 4, 3
KEEP = torch.ones(B, T, dtype=torch.bool)
KEEP[0, :2] = KEEP[0, 7:9] = KEEP[1, 0] = KEEP[1, 4] = KEEP[1, 15:] = False
VALUES = (torch.nan, torch.inf, -torch.inf, 1e38)


def draws(*shape):
    return torch.randn(B, *shape)


def queries_keys_values(tokens):
    return {"q": draws(tokens, H, K), "k": draws(tokens, H, K), "v": draws(tokens, H, V)}


def decays(kind, tokens):
    shape = {"head": (tokens, H), "channel": (tokens, H, K)}[kind]
    return -torch.rand(B, *shape)


def cases():
    """Name, op, tensors of tokens and further options of each call."""
    for causal in (False, True):
        for form in ("chunk", "full", "recurrent") if causal else ("one_scan", "full"):
            for name in FEATURE_MAPS if form in ("one_scan", "chunk") else ("identity", "silu"):
                options = {"causal": causal, "form": form, "feature_map": name, "chunk_size": 8}
                yield "additive", additive_decay, (), options
    for form in ("one_scan", "chunk", "full"):
        yield "additive", additive_decay, (), {"causal_block": 4, "form": form}
    yield "additive", additive_decay, (), {"lrpe": True, "form": "one_scan"}
    yield "additive", additive_decay, (), {"lrpe": True, "causal": True, "form": "chunk"}
    yield "additive", additive_decay, (), {"packed": True}
    for normalize in ("sum", "max_one"):
        options = {"feature_map": "shifted_silu", "normalize": normalize}
        yield "decay", decay_attention, ("head",), options
        yield "decay", decay_attention, (None,), options
    yield "decay", decay_attention, ("head",), {"causal_block": 4}
    yield "decay", decay_attention, ("head",), {"packed": True}
    yield "delta", delta_rule, ("head", 2), {}
    yield "delta", delta_rule, ("head",), {"causal_block": 4}
    yield "delta", delta_rule, (None,), {"packed": True}
    for form in ("dense", "banded", "fft"):
        yield "diffusion", linear_diffusion, (), {"form": form}
    for form in ("dense", "banded"):
        yield "diffusion", linear_diffusion, (), {"form": form, "scheme": "crank_nicolson"}
    yield "diffusion", linear_diffusion, (), {"packed": True}


def matrix(kind, op, **columns):
    """Calls with all combinations of options; those that add no pair of them are slow."""
    fast = pairwise_rows(*columns.values())
    for row in product(*columns.values()):
        options = {**dict(zip(columns, row, strict=True)), "chunk_size": 8}
        case = kind, op, (options.pop("decay"),), options
        marks = [] if list(row) in fast else [pytest.mark.slow]
        yield pytest.param(case, marks=marks)


DECAY_FORMS = {
    "causal": (False, True),
    "decay": (None, "head", "channel"),
    "form": ("chunk", "full", "recurrent"),
}
CASES = [
    *cases(),
    *matrix("decay", decay_attention, **DECAY_FORMS, feature_map=tuple(FEATURE_MAPS)),
    *matrix("delta", delta_rule, **DECAY_FORMS),
]
IN_KERNELS = [
    *(("additive", additive_decay, (), {"feature_map": x}) for x in FEATURE_MAPS),
    ("additive", additive_decay, (), {"lrpe": True}),
    ("additive", additive_decay, (), {"lrpe": True, "causal": True, "feature_map": "silu"}),
    ("additive", additive_decay, (), {"causal": True}),
    ("decay", decay_attention, (None,), {"feature_map": "shifted_silu"}),
    ("decay", decay_attention, ("head",), {"feature_map": "elu_plus_one"}),
    ("decay", decay_attention, ("head",), {"causal": True, "normalize": "sum"}),
    ("decay", decay_attention, ("channel",), {"causal": True, "feature_map": "silu"}),
    ("decay", decay_attention, ("channel",), {}),
    ("delta", delta_rule, (None,), {"causal": True}),
    ("delta", delta_rule, ("head",), {}),
    ("diffusion", linear_diffusion, (), {"form": "banded"}),
]


def inputs_of(kind, details, tokens=T):
    """Tensors with a value per token, by name."""
    if kind == "diffusion":
        return {"x": draws(tokens, H, V)}
    named = queries_keys_values(tokens)
    if kind == "decay" and details[0] is not None:
        named["log_decay"] = decays(details[0], tokens)
    if kind == "delta":
        updates = details[1:]
        if updates:
            named["k"], named["v"] = draws(tokens, 2, H, K), draws(tokens, 2, H, V)
        named["beta"] = torch.rand(B, tokens, *updates, H)
        if details[0] is not None:
            named["log_decay"] = decays(details[0], tokens)
    return named


def states_of(kind, options, *, lrpe):
    """A state that enters the call, and its class."""
    if options.get("packed") or options.get("scheme") == "crank_nicolson":
        return {}
    one = options.get("causal") or options.get("causal_block")
    if kind == "additive":
        features = 2 * K if lrpe else K
        return {"state": AdditiveDecayState(draws(H, K).double(), draws(H, features, V))}
    if kind == "decay":
        sides = [DecayState(draws(H, K, V), torch.rand(B, H, K)) for _ in range(2)]
        return {"state": sides[0] if one else DecayStates(*sides)}
    if kind == "delta":
        sides = [DeltaState(draws(H, K, V)) for _ in range(2)]
        return {"state": sides[0] if one else DeltaStates(*sides)}
    return {}


def outcome(op, named, others, keep):
    """Outputs and states, and gradients of tensors of tokens and of states."""
    named = {name: x.clone().requires_grad_() for name, x in named.items()}
    entering = [x for x in tree_leaves(others.get("state")) if x is not None]
    entering = [x.requires_grad_() for x in entering if x.is_floating_point()]
    result = op(**named, **others, keep=keep)
    leaves = [x for x in tree_leaves(result) if x is not None]
    g = torch.Generator().manual_seed(5)
    loss = sum((x.double() * torch.randn(x.shape, generator=g).to(x.device)).sum() for x in leaves)
    learnt = [*named.values(), *entering]
    gradients = torch.autograd.grad(loss, learnt, materialize_grads=True)
    return [x.detach() for x in leaves], dict(zip([*named], gradients, strict=False)), gradients


def check(op, named, others, keep=KEEP, *, one_by_one=True):
    """Compare masked NaN, infinity or huge values with zeros, in all arguments or in one."""
    keep = keep.to(DEVICE)
    dropped = {x: ~keep.view(B, -1, *(1,) * (named[x].ndim - 2)) for x in named}
    clean = {name: x.masked_fill(dropped[name], 0) for name, x in named.items()}
    want, _, want_gradients = outcome(op, clean, others, keep)
    assert (want[0][~keep] == 0).all()
    arguments = [[*named], *([name] for name in named if one_by_one)]
    for value, changed in product(VALUES if one_by_one else VALUES[:2], arguments):
        dirty = clean | {x: clean[x].masked_fill(dropped[x], value) for x in changed}
        got, gradients, all_gradients = outcome(op, dirty, others, keep)
        for x, y in zip([*got, *all_gradients], [*want, *want_gradients], strict=True):
            assert torch.equal(x, y), (value, changed)
        for name, gradient in gradients.items():
            assert gradient.isfinite().all(), (value, changed, name)
            assert (gradient[~keep] == 0).all(), (value, changed, name)


def prepared(kind, details, options, tokens=T):
    """Tensors of tokens, and the further arguments of a call."""
    torch.manual_seed(0)
    options = dict(options)
    named = inputs_of(kind, details, tokens)
    lrpe, packed = options.pop("lrpe", False), options.pop("packed", False)
    others = {**options, **states_of(kind, {**options, "packed": packed}, lrpe=lrpe)}
    if lrpe:
        others["angles"] = lrpe_angles((tokens,), torch.rand(H, K))
    if packed:
        others["cu_seqlens"] = torch.tensor([0, 5, T, T + 9, 2 * T], dtype=torch.int32)
    if kind == "diffusion":
        others["weights"], others["dt"] = torch.rand(H, 7), torch.full((H,), 0.05)
        if "state" not in others and options.get("scheme") is None and not packed:
            others["state"] = DiffusionState(draws(3, H, V), torch.rand(B, 3) < 0.5)
    return named, others


def described(case):
    kind, _, details, options = case
    words = (f"{name}={value}" for name, value in options.items())
    return " ".join([kind, *map(str, details), *words])


@pytest.mark.sampled(9)
@pytest.mark.parametrize("case", CASES, ids=described)
def test_masked_values_reach_neither_outputs_nor_gradients(case):
    kind, op, details, options = case
    named, others = prepared(kind, details, options)
    check(op, named, others)


@pytest.mark.sampled
@pytest.mark.parametrize("case", IN_KERNELS, ids=described)
@pytest.mark.parametrize("_", [pytest.param(0, marks=MARKS, id="kernel")])
def test_masked_values_reach_nothing_in_kernels(case, _):
    pytest.importorskip("triton")
    kind, op, details, options = case
    named, others = prepared(kind, details, {**options, "backend": "triton"}, tokens=9)
    others = tree_map_only(torch.Tensor, lambda x: x.to(DEVICE), others)
    check(
        op, {name: x.to(DEVICE) for name, x in named.items()}, others, KEEP[:, :9], one_by_one=False
    )


def test_angles_of_tokens_that_are_masked_in_every_row_may_be_nan():
    named, others = prepared("additive", (), {"lrpe": True})
    keep = torch.arange(T).expand(B, -1) < 9
    want, _ = additive_decay(**named, **others, keep=keep)
    others["angles"][9:] = torch.nan
    assert torch.equal(additive_decay(**named, **others, keep=keep)[0], want)


def test_masked_values_do_not_enter_the_state_of_a_diffusion():
    x = draws(4, H, V).masked_fill(~KEEP[:, :4, None, None], torch.nan)
    state = next_state(None, x, KEEP[:, :4], radius=4)
    assert torch.equal(state.x, x.nan_to_num(0))


@pytest.mark.parametrize("tokens", [9, 70])
@pytest.mark.parametrize("causal", [False, True])
def test_masked_values_reach_nothing_in_windows(tokens, causal):
    keep = torch.rand(B, tokens) < 0.7
    named = {name: draws(H, tokens, K) for name in "qkv"}
    outcomes = []
    for value in (0.0, *VALUES):
        inputs = [
            x.masked_fill(~keep[:, None, :, None], value).requires_grad_() for x in named.values()
        ]
        o = window_attention(*inputs, window=2, causal=causal, keep=keep)
        real = o.transpose(1, 2)[keep]
        outcomes.append([real, *torch.autograd.grad(real.square().sum(), inputs)])
    for outcome in outcomes:
        for x, want in zip(outcome, outcomes[0], strict=True):
            assert torch.equal(x, want)
        assert all((x.transpose(1, 2)[~keep] == 0).all() for x in outcome[1:])


@pytest.mark.parametrize("op", [additive_decay, decay_attention])
def test_a_masked_nan_is_not_blamed_for_an_overflow(op):
    q, v = torch.full((2, 1, 4, 1, 2), 3e38)
    q[..., 1] *= -1
    k, keep = torch.ones_like(q), torch.tensor([[True, False, True, True]])
    k[:, 1] = torch.nan
    assert op(q, k, v, keep=keep)[0].isnan().any()  # inf - inf
    q[:, 2] = torch.inf
    with pytest.raises(ValueError, match=r"q holds 2 \+inf values out of 8"):
        op(q, k, v, keep=keep)
