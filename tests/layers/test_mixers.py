"""What every mixer in the table promises, and what LightNet's own fields mean."""

import copy
import math
import pkgutil
from functools import partial
from importlib import import_module
from inspect import isabstract, unwrap

import pytest
import torch
from projections import parts_of

from onescan import configs
from onescan.experiments.training.optim import parameter_groups
from onescan.layers import mixers
from onescan.layers.decays import GatedDeltaNetDecayConfig
from onescan.layers.mixers import (
    MIXERS,
    DeltaProductMixerConfig,
    DeltaRuleMixerConfig,
    HybridMixerConfig,
    KDAMixerConfig,
    LightNetMixerConfig,
    LionMixerConfig,
    MixerConfig,
    lightnet,
)
from onescan.ops.additive_decay import reference
from onescan.ops.decay_attention import decay_attention
from onescan.ops.lrpe import lrpe_angles
from onescan.shapes import Grid

WIDTH, HEADS = 24, 3
GRID = Grid(shape=(3, 4), prefix=1)
CAUSAL = {
    "shared": {},
    "offset decay": {"decay_logits": "offset", "decay_rank": 5},
    "independent decay": {"decay_logits": "independent", "decay_rank": None},
    "no lrpe": {"lrpe": False},
    "no norm": {"norm": "none", "gate_rank": None},
    "no gate": {"gate": "none", "decay_logits": "offset"},
    "leak": {"leak": (1.0, 5.0)},
}
SEPARATE = {name: CAUSAL[name] for name in ("offset decay", "independent decay")}
over_separate = pytest.mark.parametrize("fields", SEPARATE.values(), ids=SEPARATE)
OPTIONS = {
    "lightnet, convolution": partial(LightNetMixerConfig, conv_size=3, conv_bias=True),
    "lion, convolution": partial(LionMixerConfig, conv_size=3, scan="natural", gate="silu"),
    "delta rule, convolution": partial(
        DeltaRuleMixerConfig, conv_size=3, key_width=5, value_width=6, gate="silu"
    ),
    "kda, natural": partial(KDAMixerConfig, scan="natural", gate_rank=4),
    "gated delta product": partial(
        DeltaProductMixerConfig, decay=GatedDeltaNetDecayConfig(), gate="silu", updates=3
    ),
    "delta rule, sum": partial(DeltaRuleMixerConfig, feature_map="relu", qk_norm="sum", beta=False),
}
CONFIGS = MIXERS | OPTIONS
over_mixers = pytest.mark.parametrize("config_class", CONFIGS.values(), ids=CONFIGS)


def tokens(*shape):
    return torch.randn(*shape, WIDTH, dtype=torch.float64)


def built(config, axes=2):
    return config.build(width=WIDTH, axes=axes).double()


def test_every_mixer_is_listed():
    modules = [
        import_module(f"{mixers.__name__}.{module.name}")
        for module in pkgutil.iter_modules(mixers.__path__)
    ]
    defined = {x for m in modules for x in vars(m).values() if isinstance(x, type)}
    configs = {x for x in defined if issubclass(x, MixerConfig) and not isabstract(x)}
    assert configs == {*MIXERS.values(), HybridMixerConfig}


@over_mixers
def test_shapes_gradients_and_repeatability(config_class):
    mixer = built(config_class(num_heads=HEADS))
    x = tokens(2, GRID.tokens).requires_grad_()
    y, state = mixer(x, GRID)
    assert y.shape == x.shape
    assert state is None
    assert torch.equal(y, mixer(x, GRID)[0])
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in mixer.parameters())


@over_mixers
def test_samples_do_not_mix_and_any_grid_will_do(config_class):
    mixer = built(config_class(num_heads=HEADS))
    for grid in (GRID, Grid((5, 2), prefix=0), Grid((1, 1), prefix=0)):
        x = tokens(3, grid.tokens)
        torch.testing.assert_close(mixer(x, grid)[0][1:2], mixer(x[1:2], grid)[0])


@over_mixers
def test_masked_tokens_give_and_get_nothing(config_class):
    mixer = built(config_class(num_heads=HEADS))
    for parameter in mixer.parameters():  # biases too, as after training
        torch.nn.init.normal_(parameter)
    x = tokens(2, GRID.tokens)
    keep = torch.rand(2, GRID.tokens) < 0.6
    y, _ = mixer(x, GRID, keep=keep)
    for anything in (tokens(2, GRID.tokens), torch.full_like(x, torch.nan)):
        other = torch.where(keep.unsqueeze(-1), x, anything)
        torch.testing.assert_close(mixer(other, GRID, keep=keep)[0], y)
    assert (y[~keep] == 0).all()
    torch.testing.assert_close(mixer(x, GRID, keep=torch.ones_like(keep))[0], mixer(x, GRID)[0])


@pytest.mark.sampled(11)
@over_mixers
@pytest.mark.parametrize("axes", [1, 2])
def test_values_of_masked_tokens_do_not_reach_gradients(config_class, axes):
    mixer = built(config_class(num_heads=HEADS), axes=axes)
    grid = GRID if axes == 2 else Grid((GRID.tokens,))
    keep = torch.arange(grid.tokens) < torch.tensor([[9], [0], [13]])
    clean = tokens(3, grid.tokens).masked_fill(~keep.unsqueeze(-1), 0)
    outcomes = []
    for value in (0, torch.nan, torch.inf, -torch.inf, 1e300):
        x = clean.masked_fill(~keep.unsqueeze(-1), value).requires_grad_()
        y, _ = mixer(x, grid, keep=keep)
        gradients = torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()])
        assert not gradients[0][~keep].any()
        outcomes.append([y, *gradients])
    for outcome in outcomes:
        for got, want in zip(outcome, outcomes[0], strict=True):
            assert want.isfinite().all()
            assert torch.equal(got, want)


@over_mixers
def test_a_call_without_tokens_is_an_error_or_empty(config_class):
    """Softmax attention returns an empty tensor, as torch's does."""
    mixer = built(config_class(num_heads=HEADS), axes=1)
    if config_class is MIXERS["softmax"]:
        assert mixer(tokens(2, 0), Grid((0,)))[0].shape == (2, 0, WIDTH)
        return
    with pytest.raises(ValueError, match=r"^(T is 0|shape is \(0,\)), expected"):
        mixer(tokens(2, 0), Grid((0,)))


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_causal_forms_of_lightnet_are_rejected_when_built_without_causal(form):
    with pytest.raises(ValueError, match=f"form is '{form}' with direction='both', expected"):
        built(LightNetMixerConfig(num_heads=HEADS, form=form))


@over_mixers
def test_a_grid_or_mask_of_other_tokens_is_refused(config_class):
    mixer = config_class(num_heads=HEADS).build(width=WIDTH, axes=1)
    x = torch.randn(2, 5, WIDTH)
    with pytest.raises(ValueError, match=r"x has 5 tokens, but Grid\(.* has 6"):
        mixer(x, Grid((6,)))
    for keep in (torch.ones(2, 4, dtype=torch.bool), torch.ones(1, 5, dtype=torch.bool)):
        with pytest.raises(
            ValueError, match=r"keep has shape .*, expected \(2, 5\) and torch.bool"
        ):
            unwrap(type(mixer).forward)(mixer, x, Grid((5,)), keep=keep)
    with pytest.raises(ValueError, match=r"keep has shape \(2, 5\) and dtype torch\.float32"):
        unwrap(type(mixer).forward)(mixer, x, Grid((5,)), keep=torch.ones(2, 5))


@over_mixers
def test_heads_must_divide_the_width(config_class):
    widths = getattr(config_class, "keywords", {})
    if {"key_width", "value_width"} <= widths.keys():  # then heads have widths of their own
        config_class(num_heads=5).build(width=WIDTH, axes=2)
        return
    with pytest.raises(ValueError, match="width 24 is not a multiple of num_heads 5"):
        config_class(num_heads=5).build(width=WIDTH, axes=2)


@over_mixers
def test_a_state_is_refused_where_there_is_no_direction(config_class):
    mixer = built(config_class(num_heads=HEADS))
    with pytest.raises(ValueError, match="not causal"):
        unwrap(type(mixer).forward)(mixer, tokens(1, 13), GRID, state=0)


@pytest.mark.parametrize("fields", CAUSAL.values(), ids=CAUSAL)
def test_causal_lightnet_in_two_calls_equals_one_at_every_cut(fields):
    mixer = built(
        LightNetMixerConfig(num_heads=HEADS, direction="forward", chunk_size=4, **fields), axes=1
    )
    x = tokens(2, 7)
    keep = torch.rand(2, 7) < 0.8
    want, whole = mixer(x, Grid((7,)), keep=keep)
    for cut in range(1, 7):
        first, state = mixer(x[:, :cut], Grid((cut,)), keep=keep[:, :cut])
        rest, state = mixer(x[:, cut:], Grid((7 - cut,)), keep=keep[:, cut:], state=state)
        torch.testing.assert_close(torch.cat([first, rest], dim=1), want)
        assert state.position == whole.position
        assert state.position == (7 if mixer.config.lrpe else None)
        torch.testing.assert_close(state.attention, whole.attention)


@pytest.mark.parametrize("fields", [{}, {"decay": False}, *SEPARATE.values()], ids=str)
@pytest.mark.parametrize("form", ["chunk", "full", "recurrent"])
def test_causal_lightnet_depends_only_on_relative_positions(form, fields):
    config = LightNetMixerConfig(num_heads=HEADS, direction="forward", form=form, **fields)
    mixer, x = config.build(width=WIDTH, axes=1), tokens(2, 70).float()
    _, empty = mixer(x[:, :1], Grid((1,)), keep=torch.zeros(2, 1, dtype=torch.bool))
    near, _ = mixer(x, Grid((70,)), state=empty._replace(position=0))
    for position in (100_000_000, torch.tensor(100_000_000)):
        far, state = mixer(x, Grid((70,)), state=empty._replace(position=position))
        assert (far - near).norm() <= 2e-6 * near.norm()
        assert state.position == 100_000_070


def test_initial_half_lives_are_spaced_geometrically():
    mixer = LightNetMixerConfig(num_heads=3, direction="forward", leak=(16.0, 4096.0)).build(
        width=WIDTH, axes=1
    )
    half_lives = math.log(2) / mixer.log_leak.exp()
    torch.testing.assert_close(half_lives, torch.tensor([16.0, 256.0, 4096.0]))
    exempt = parameter_groups(mixer, 0.1)[1]
    assert exempt["weight_decay"] == 0
    assert any(x is mixer.log_leak for x in exempt["params"])


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_leak_halves_weights(direction):
    fields = {"num_heads": 1, "lrpe": False, "norm": "none", "gate": "none", "direction": direction}
    mixer = LightNetMixerConfig(**fields, leak=(3.0, 3.0)).build(width=2, axes=1).double()
    with torch.no_grad():  # v = x, and k = 0
        mixer.in_proj.weight.copy_(torch.cat([torch.eye(2), torch.zeros(2, 2), torch.eye(2)]))
        mixer.out_proj.weight.copy_(torch.eye(2))
    x = torch.zeros(1, 7, 2, dtype=torch.float64)
    x[:, 0 if direction == "forward" else -1, 1] = 1.0  # the value that is read from afar
    x[:, :, 0] = 1.0
    with torch.no_grad():
        mixer.in_proj.weight[:2] = torch.tensor([[1.0, 0.0], [1.0, 0.0]])  # equal queries
    y, _ = mixer(x, Grid((7,)))
    read = y[0, :, 1] if direction == "forward" else y[0, :, 1].flip(0)
    distance = torch.arange(7)
    weight = 0.5 ** (distance / 3)
    torch.testing.assert_close(read / y[0, 0, 0], weight.double() / weight.cumsum(0))


def test_configs_without_a_leak_have_no_new_parameter():
    before = LightNetMixerConfig(num_heads=HEADS, direction="forward")
    fields = configs.to_dict(before)
    assert fields.pop("leak") is None
    assert configs.from_dict(LightNetMixerConfig, fields) == before
    names = {name for name, _ in before.build(width=WIDTH, axes=1).named_parameters()}
    leaky = configs.from_dict(LightNetMixerConfig, fields | {"leak": [16, 4096]})
    assert leaky.leak == (16.0, 4096.0)
    added = {name for name, _ in leaky.build(width=WIDTH, axes=1).named_parameters()} - names
    assert added == {"log_leak"}


@pytest.mark.parametrize("axis", [0, 1])
def test_lrpe_scores_do_not_change_if_an_axis_is_reversed(axis):
    mixer = LightNetMixerConfig(num_heads=2).build(width=16, axes=2).double()
    grid = Grid((3, 4))
    x = torch.randn(2, *grid.shape, 16, dtype=torch.float64)

    def mixed(x):
        return mixer(x.flatten(1, 2), grid)[0].unflatten(1, grid.shape)

    torch.testing.assert_close(mixed(x.flip(1 + axis)), mixed(x).flip(1 + axis))


@pytest.mark.parametrize("causal", [False, True])
def test_lightnet_is_the_papers_equation(causal):
    """Eq. 13 to 15 with App. A.2, written out."""
    config = LightNetMixerConfig(
        num_heads=HEADS, direction="forward" if causal else "both", gate_rank=4
    )
    mixer, grid = built(config, axes=1), Grid((6,))
    x = tokens(2, 6)

    def heads(y):
        return y.reshape(2, 6, HEADS, -1)

    to_q, to_k, to_v, gate = parts_of(mixer)
    q = heads(x @ to_q.weight.T)
    q = q * torch.sigmoid(q)
    k, v = heads(x @ to_k.weight.T), heads(x @ to_v.weight.T)
    angles = lrpe_angles(grid.shape, mixer.theta)
    o, _ = reference.forward(q, k, v, angles=angles, causal=causal)
    o = o.reshape(2, 6, WIDTH)
    o = (o - o.mean(-1, keepdim=True)) / (o.var(-1, keepdim=True, correction=0) + 1e-6).sqrt()
    u = x @ gate.weight.T @ mixer.gate_proj.weight.T
    want = (o * torch.sigmoid(u)) @ mixer.out_proj.weight.T
    torch.testing.assert_close(mixer(x, grid)[0], want)


@pytest.mark.parametrize("fields", [{}, {"decay_logits": "independent", "decay_rank": 4}], ids=str)
def test_without_a_gate_lightnet_is_the_gated_mixer_with_its_gate_fully_open(fields):
    gated = built(LightNetMixerConfig(num_heads=HEADS, gate_rank=4, **fields))
    mixer = built(LightNetMixerConfig(num_heads=HEADS, gate="none", **fields))
    torch.nn.init.zeros_(gated.gate_proj.weight)  # sigmoid(0) is 1/2 for every channel
    weights = gated.state_dict()
    del weights["gate_proj.weight"]
    gate = slice(3 * WIDTH, 3 * WIDTH + 4)
    rows = weights["in_proj.weight"]
    weights["in_proj.weight"] = torch.cat([rows[: gate.start], rows[gate.stop :]])
    mixer.load_state_dict(weights)
    x = tokens(2, GRID.tokens)
    torch.testing.assert_close(mixer(x, GRID)[0], 2 * gated(x, GRID)[0])


def loop(mixer, x, *, causal):
    """Eq. 13 and 14 with s_t summed over the decay's logits, one token at a time in float64.

    The norm cancels a factor common to the channels of a token, except for its epsilon: where the
    largest ratio of sum exp(k) to s_t leaves exp(-4) to exp(4), it is scaled to that range.
    """
    config = mixer.config
    _, tokens, _ = x.shape
    angles = lrpe_angles((tokens,), mixer.theta)

    def heads(y):
        return y.unflatten(-1, (HEADS, -1)).unbind(1)

    def rotate(y, t):
        return torch.cat([y * angles[t].cos(), y * angles[t].sin()], dim=-1)

    *qkv, gate, decay = (f(x) for f in parts_of(mixer))
    q, k, v = map(heads, qkv)
    d = heads(mixer.decay_proj(decay) + (qkv[1] if config.decay_logits == "offset" else 0))
    s_k, s_d, kv, states = 0, 0, 0, []
    for t in range(tokens):
        before, s_d, s_k = s_d, s_d + d[t].exp(), s_k + k[t].exp()
        decay = torch.cat([before / s_d] * 2, dim=-1)
        kv = decay.unsqueeze(-1) * kv
        kv = kv + rotate(k[t].exp() / s_d, t).unsqueeze(-1) * v[t].unsqueeze(-2)
        log_gain = (s_k / s_d).log().amax(dim=(1, 2))[:, None, None]
        states.append((kv, (log_gain - log_gain.clamp(-4, 4)).exp()))
    outputs = []
    for t in range(tokens):
        kv, scale = states[t if causal else -1]
        o = (kv.mT @ rotate(torch.nn.functional.silu(q[t]), t).unsqueeze(-1)).squeeze(-1)
        outputs.append((o if config.norm == "none" else o / scale).flatten(1))
    return mixer.out_proj(mixer.norm(torch.stack(outputs, dim=1)) * mixer.gate_proj(gate).sigmoid())


@pytest.mark.sampled(2)
@over_separate
@pytest.mark.parametrize("norm", ["none", "layer"])
@pytest.mark.parametrize("causal", [False, True])
def test_separate_decay_logits_match_the_recurrence(causal, norm, fields):
    config = LightNetMixerConfig(
        num_heads=HEADS, direction="forward" if causal else "both", norm=norm, **fields
    )
    mixer, x = built(config, axes=1), tokens(2, 6)
    torch.testing.assert_close(mixer(x, Grid((6,)))[0], loop(mixer, x, causal=causal))


@pytest.mark.sampled(3)
@over_separate
@pytest.mark.parametrize("spread", [20, 30, 60])
@pytest.mark.parametrize("causal", [False, True])
def test_decay_logits_far_from_the_keys_stay_exact_in_float32(causal, spread, fields):
    config = LightNetMixerConfig(
        num_heads=HEADS, direction="forward" if causal else "both", chunk_size=4, **fields
    )
    for seed in range(10):
        torch.manual_seed(seed)
        exact, x = built(config, axes=1), tokens(2, 12).requires_grad_()
        with torch.no_grad():
            hidden = parts_of(exact)[-1]
            (last,) = [*exact.decay_proj.parameters()] or [hidden.weight]
            last.mul_(spread / exact.decay_proj(hidden(x)).std())
        mixer = copy.deepcopy(exact).float()
        narrow = x.detach().float().requires_grad_()
        found, _ = mixer(narrow, Grid((12,)))
        expected = loop(exact, x, causal=causal)
        slope = torch.randn_like(expected)
        found.backward(slope.float())
        expected.backward(slope)
        gradients = [
            torch.cat([t.grad.flatten() for t in (inputs, *module.parameters())])
            for inputs, module in ((narrow, mixer), (x, exact))
        ]
        for a, b in [(found, expected), gradients]:
            assert (a - b).norm() <= 2e-4 * b.norm()


@over_separate
@pytest.mark.parametrize("cut", [1, 4, 7])
def test_decay_logits_far_from_the_keys_resume_from_a_state(cut, fields):
    mixer = LightNetMixerConfig(num_heads=HEADS, direction="forward", **fields).build(
        width=WIDTH, axes=1
    )
    with torch.no_grad():
        for parameter in (parts_of(mixer)[-1].weight, *mixer.decay_proj.parameters()):
            parameter.mul_(30)
    x, keep = tokens(2, 8).float(), torch.rand(2, 8) < 0.8
    want, _ = mixer(x, Grid((8,)), keep=keep)
    first, state = mixer(x[:, :cut], Grid((cut,)), keep=keep[:, :cut])
    rest, _ = mixer(x[:, cut:], Grid((8 - cut,)), keep=keep[:, cut:], state=state)
    torch.testing.assert_close(torch.cat([first, rest], dim=1), want, atol=1e-5, rtol=1e-4)


def test_overflow_without_a_norm_is_an_error():
    fields = {
        "decay_logits": "independent",
        "decay_rank": None,
        "norm": "none",
        "direction": "forward",
    }
    mixer = LightNetMixerConfig(num_heads=HEADS, **fields).build(width=WIDTH, axes=1)
    x = torch.randn(1, 5, WIDTH)
    with torch.no_grad():
        parts_of(mixer)[-1].weight.mul_(200)
    with pytest.raises(ValueError, match=r"norm is 'none' and the decay logits scale outputs"):
        mixer(x, Grid((5,)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", ["auto", "full"])
def test_without_decay_keys_pass_through_silu(causal, form):
    config = LightNetMixerConfig(
        num_heads=HEADS,
        decay=False,
        lrpe=False,
        norm="none",
        direction="forward" if causal else "both",
        form=form,
    )
    mixer = built(config)
    x = tokens(1, 13)
    q, k, v, gate = (f(x) for f in parts_of(mixer))
    q, k = (torch.nn.functional.silu(y).reshape(13, HEADS, -1) for y in (q, k))
    scores = torch.einsum("thk,shk->ths", q, k)
    scores = scores * torch.ones(13, 13).tril()[:, None] if causal else scores
    o = torch.einsum("ths,shv->thv", scores, v.reshape(13, HEADS, -1))
    want = mixer.out_proj(o.reshape(1, 13, WIDTH) * torch.sigmoid(mixer.gate_proj(gate)))
    torch.testing.assert_close(mixer(x, Grid((13,)))[0], want)


@pytest.mark.parametrize("direction", ["both", "forward"])
def test_without_decay_the_form_is_that_of_the_config(direction, monkeypatch):
    forms = []

    def run(*inputs, form, **options):
        forms.append(form)
        return decay_attention(*inputs, form=form, **options)

    monkeypatch.setattr(lightnet, "decay_attention", run)
    config = LightNetMixerConfig(num_heads=HEADS, decay=False, direction=direction, form="full")
    built(config)(tokens(1, 5), Grid((5,)))
    assert forms == ["full"]


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_without_decay_two_calls_equal_one(cut):
    mixer = built(LightNetMixerConfig(num_heads=HEADS, decay=False, direction="forward"))
    x, keep = tokens(2, 9), torch.rand(2, 9) < 0.7
    want, _ = mixer(x, Grid((9,)), keep=keep)
    first, state = mixer(x[:, :cut], Grid((cut,)), keep=keep[:, :cut])
    second, _ = mixer(x[:, cut:], Grid((9 - cut,)), keep=keep[:, cut:], state=state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), want)


def test_key_importance_is_a_share():
    mixer = built(LightNetMixerConfig(num_heads=HEADS))
    shares = mixer.key_importance(tokens(2, 13))
    assert shares.shape == (2, HEADS, 13)
    torch.testing.assert_close(shares.sum(dim=-1), torch.ones(2, HEADS, dtype=torch.float64))


def test_key_importance_of_a_backward_mixer_is_that_of_its_convolved_keys():
    forward, backward = (
        built(LightNetMixerConfig(num_heads=HEADS, conv_size=3, direction=direction))
        for direction in ("forward", "backward")
    )
    backward.load_state_dict(forward.state_dict())
    x = tokens(2, 13)
    torch.testing.assert_close(
        backward.key_importance(x), forward.key_importance(x.flip(1)).flip(-1)
    )


@pytest.mark.parametrize(
    ("fields", "axes", "message"),
    [
        ({"num_heads": 12}, 4, "head width 2 .* leaves the last of 4 axes without features"),
        (
            {"decay": False, "decay_logits": "offset"},
            1,
            "'offset' with decay=False, expected 'shared'",
        ),
        ({"gate_rank": 0}, 1, "gate_rank is 0"),
        ({"decay_rank": 0}, 1, "decay_rank is 0"),
        ({"chunk_size": 0}, 1, "chunk_size is 0"),
        ({"leak": (16.0, 4.0)}, 1, r"leak is \(16.0, 4.0\), expected the shortest and the longest"),
        ({"leak": (0.0, 4.0)}, 1, r"leak is \(0.0, 4.0\), expected the shortest and the longest"),
        ({"leak": (1e-45, 1.0)}, 1, r"such as \(16, 4096\), from 1e-05 to 1e\+30"),
        ({"leak": (1.0, 1e39)}, 1, r"such as \(16, 4096\), from 1e-05 to 1e\+30"),
        (
            {"leak": (16.0, 4096.0)},
            1,
            "leak is .* with direction='both', expected 'forward' or 'backward'",
        ),
        (
            {"leak": (16.0, 4096.0), "direction": "forward", "decay": False},
            1,
            "leak is .* with decay=False and decay_logits='shared', but it requires decay=True",
        ),
        (
            {"leak": (16.0, 4096.0), "direction": "forward", "decay_logits": "offset"},
            1,
            "leak is .* with decay=True and decay_logits='offset', but it requires decay=True",
        ),
    ],
)
def test_impossible_fields_are_refused(fields, axes, message):
    with pytest.raises(ValueError, match=message):
        LightNetMixerConfig(**{"num_heads": 3, **fields}).build(width=WIDTH, axes=axes)


def test_unknown_forms_are_refused():
    config = LightNetMixerConfig(num_heads=HEADS)
    object.__setattr__(config, "form", "fast")  # past the type checks of the tests
    with pytest.raises(ValueError, match="form 'fast' is unknown; available: auto, one_scan"):
        config.build(width=WIDTH, axes=1)
