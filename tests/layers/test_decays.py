"""What every decay in the table promises, what each one's formula is, and the feature maps."""

import inspect
import math
from typing import get_args

import pytest
import torch

from onescan.layers import decays
from onescan.layers.decays import (
    DECAYS,
    DecayConfig,
    FixedDecayConfig,
    GLADecayConfig,
    HGRN2DecayConfig,
    HippoDecayConfig,
    RWKV6DecayConfig,
    SelectiveDecayConfig,
)
from onescan.ops.feature_maps import FEATURE_MAPS, FeatureMapName, shifted_silu

WIDTH, HEADS, HEAD_WIDTH = 24, 3, 8
CONFIGS = {name: config() for name, config in DECAYS.items()} | {
    "retnet": FixedDecayConfig(init="retnet", learnable=False),
    "selective, diagonal": SelectiveDecayConfig(diagonal=True),
    "gated rfa": SelectiveDecayConfig(couple_key=True),
    "hgrn2, bounded": HGRN2DecayConfig(lower_bound=0.05),  # rounded up to above 1
    "hippo, fixed": HippoDecayConfig(selective=False),
    "hippo, held": HippoDecayConfig(zero_order_hold=True),
}
over_decays = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def built(config, dtype=torch.float64):
    return config.build(width=WIDTH, num_heads=HEADS, head_width=HEAD_WIDTH).to(dtype)


def tokens(*shape, dtype=torch.float64):
    return torch.randn(*shape, WIDTH, dtype=dtype)


def given(gates):
    return [x for x in gates if x is not None]


def test_every_decay_is_listed():
    classes = {x for x in vars(decays).values() if inspect.isclass(x)}
    configs = {x for x in classes if issubclass(x, DecayConfig) and not inspect.isabstract(x)}
    assert configs == set(DECAYS.values())


@over_decays
def test_shapes_bounds_and_gradients(config):
    decay, x = built(config), tokens(2, 5)
    log_decay, key = decay(x)
    if log_decay is not None:
        assert log_decay.shape in [(HEADS,), (2, 5, HEADS), (2, 5, HEADS, HEAD_WIDTH)]
        assert (log_decay <= 0).all()
        assert (log_decay > -20).all()
    assert key is None or key.shape in [(2, 5, HEADS, 1), (2, 5, HEADS, HEAD_WIDTH)]
    assert not config.provides_keys or key.shape == (2, 5, HEADS, HEAD_WIDTH)
    if given([log_decay, key]) and any(x.requires_grad for x in given([log_decay, key])):
        sum((y * torch.randn_like(y)).sum() for y in given([log_decay, key])).backward()
    assert all(p.grad is not None and p.grad.any() for p in decay.parameters())


@over_decays
def test_a_token_chooses_for_itself(config):
    decay, x = built(config), tokens(2, 5)
    other = x.clone()
    other[1, 3] += 1
    for one, two in zip(given(decay(x)), given(decay(other)), strict=True):
        if one.ndim > 1:
            assert torch.equal(one[0], two[0])
            assert torch.equal(one[1, :3], two[1, :3])
            assert torch.equal(one[1, 4], two[1, 4])


@over_decays
def test_saturated_gates_are_finite_and_so_are_their_gradients(config):
    decay = built(config, torch.float32)
    for parameter in decay.parameters():
        if parameter.ndim > 1 and parameter.shape[-1] in (WIDTH, 16, 64):  # what meets the token
            torch.nn.init.normal_(parameter, std=10)
    for scale in (-1e4, 1e4):
        x = torch.full((1, 2, WIDTH), scale).requires_grad_()
        outcome = given(decay(x))
        assert all(y.isfinite().all() and (y is not outcome[0] or (y <= 0).all()) for y in outcome)
        if any(y.requires_grad for y in outcome):
            gradients = torch.autograd.grad(
                sum(y.sum() for y in outcome), [x, *decay.parameters()], allow_unused=True
            )
            assert all(g.isfinite().all() for g in gradients if g is not None)


@over_decays
def test_half_precision_costs_no_digits_of_a_decay(config):
    decay = built(config, torch.float32)
    x = tokens(2, 5, dtype=torch.float32).bfloat16()
    want = given(decay(x.float()))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = given(decay(x))
    for got, exact in zip(mixed, want, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, exact)
    assert all(y.dtype == torch.float32 for y in given(built(config, torch.bfloat16)(x)))


def test_fixed_starts_where_the_papers_do():
    (log_decay,) = given(built(FixedDecayConfig(init="retnet", learnable=False))(tokens(1, 1)))
    want = torch.tensor([1 - 2**-5, 1 - 2**-6, 1 - 2**-7], dtype=torch.float64)
    torch.testing.assert_close(log_decay.exp(), want, rtol=1e-6, atol=0)
    assert not list(built(FixedDecayConfig(init="retnet", learnable=False)).parameters())
    many = FixedDecayConfig().build(width=1, num_heads=20_000, head_width=1)
    logits = torch.special.logit(many(torch.zeros(1, 1, 1)).log_decay.exp())
    assert logits.mean().item() == pytest.approx(0, abs=0.05)
    assert logits.std().item() == pytest.approx(1, abs=0.05)


def test_selective_starts_at_a_half_and_its_key_makes_up_for_what_is_forgotten():
    decay, x = built(SelectiveDecayConfig(couple_key=True)), tokens(2, 5)
    log_decay, key = decay(x)
    z = x @ decay.proj.weight.T + decay.proj.bias
    torch.testing.assert_close(log_decay, torch.log(1 / (1 + torch.exp(-z))))
    torch.testing.assert_close(key.squeeze(-1), 1 - log_decay.exp())
    assert (log_decay.exp() - 0.5).abs().max() < 0.15


def test_mamba2_starts_with_the_steps_and_rates_of_the_paper():
    decay = DECAYS["mamba2"]().build(width=1, num_heads=1000, head_width=1)
    log_decay, dt = decay(torch.zeros(1, 1, 1))
    rate = -log_decay / dt.squeeze(-1)
    assert 0.00099 < dt.min() < 0.0012
    assert 0.097 < dt.max() < 0.101
    assert 0.99 < rate.min() < 1.2
    assert 15.5 < rate.max() < 16.01


def test_mamba_starts_with_the_steps_and_rates_of_the_paper():
    decay = DECAYS["mamba"]().build(width=40, num_heads=1000, head_width=4)
    assert decay.down_proj.weight.shape == (3, 40)
    decay.init_weights(*[torch.ones(1, 1)] * 3)
    assert 0.57 < decay.up_proj.weight.abs().max() <= 3**-0.5
    log_decay, dt = decay(torch.zeros(1, 1, 40))
    torch.testing.assert_close(log_decay, -dt * torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert 0.00099 < dt.min() < 0.0012
    assert 0.097 < dt.max() < 0.101


def test_xlstm_bounds_the_exponential_gate():
    decay, x = built(DECAYS["xlstm"]()), tokens(2, 5)
    enter = x @ decay.input_proj.weight.T + decay.input_proj.bias
    torch.testing.assert_close(decay(x).key.squeeze(-1).log(), 15 * torch.tanh(enter / 15))
    assert decay(1e6 * x).key.max() <= math.exp(15) * 1.001
    torch.testing.assert_close(
        torch.special.logit(built(DECAYS["xlstm"]())(0 * x).log_decay.exp())[0, 0],
        torch.tensor([3, 4.5, 6], dtype=torch.float64),
    )


def test_low_rank_decays_are_their_formulas():
    x = tokens(2, 5)
    gla, rwkv = built(GLADecayConfig(rank=4)), built(RWKV6DecayConfig(rank=4))
    z = (x @ gla.down_proj.weight.T @ gla.up_proj.weight.T + gla.up_proj.bias).reshape(
        2, 5, HEADS, HEAD_WIDTH
    )
    torch.testing.assert_close(gla(x).log_decay.exp(), torch.sigmoid(z) ** (1 / 16))
    z = torch.tanh(x @ rwkv.down_proj.weight.T) @ rwkv.up_proj.weight.T
    rate = (z.reshape(2, 5, HEADS, HEAD_WIDTH) + rwkv.log_rate).exp()
    torch.testing.assert_close(rwkv(x).log_decay, -rate)


def test_decays_of_delta_rules_start_with_the_steps_and_rates_of_mamba2():
    for name in ("gated_deltanet", "kda"):
        decay = DECAYS[name]().build(width=1, num_heads=1000, head_width=2)
        log_decay = decay(torch.zeros(1, 1, 1)).log_decay.reshape(1000, -1)
        dt = -log_decay / decay.log_rate.exp()[:, None]
        assert 0.00099 < dt.min() < 0.0012
        assert 0.097 < dt.max() < 0.101
        assert 0.99 < decay.log_rate.exp().min() < 1.2
        assert 15.5 < decay.log_rate.exp().max() < 16.01


@pytest.mark.parametrize("bound", [0.0, 0.4])
def test_hgrn2_keeps_what_its_key_leaves(bound):
    decay, x = built(HGRN2DecayConfig(lower_bound=bound)), 3 * tokens(2, 5)
    log_decay, key = decay(x)
    z = (x @ decay.proj.weight.T).reshape(2, 5, HEADS, HEAD_WIDTH)
    torch.testing.assert_close(log_decay.exp(), bound + (1 - bound) * torch.sigmoid(z))
    torch.testing.assert_close(key, 1 - log_decay.exp())


@pytest.mark.parametrize(
    "config",
    [
        HippoDecayConfig(selective=False),
        HippoDecayConfig(),
        HippoDecayConfig(activation="softplus"),
    ],
)
def test_hippo_starts_as_its_diagonal(config):
    decay = built(config)
    log_decay = decay(torch.zeros(1, 1, WIDTH, dtype=torch.float64)).log_decay[0, 0]  # H K
    dt = -log_decay[:, 0]
    assert ((dt >= 0.00099) & (dt <= 0.101)).all()
    channels = torch.arange(1, HEAD_WIDTH + 1, dtype=torch.float64)
    torch.testing.assert_close(log_decay, -torch.outer(dt, channels))
    with torch.no_grad():
        decay.log_rate += 1
    assert (decay(100 * tokens(1, 9)).log_decay <= 0).all()


@pytest.mark.parametrize(
    ("activation", "scale"),
    [("sigmoid", lambda z: 2 / (1 + (-z).exp())), ("softplus", lambda z: (1 + z.exp()).log2())],
)
def test_how_a_token_scales_hippos_exponent(activation, scale):
    decay, x = built(HippoDecayConfig(activation=activation)), 3 * tokens(2, 5)
    z = (x @ decay.proj.weight.T).reshape(2, 5, HEADS, HEAD_WIDTH)
    torch.testing.assert_close(decay(x).log_decay, -scale(z) * decay.log_rate.exp())


def held(rate, step):
    """Solve h' = -rate h + x for one step of constant x: h = decay * h + factor * x."""
    system = torch.zeros(*step.shape, 2, 2, dtype=step.dtype)
    system[..., 0, 0], system[..., 0, 1] = -rate * step, step
    solution = torch.linalg.matrix_exp(system)
    return solution[..., 0, 0], solution[..., 0, 1]


@pytest.mark.parametrize("selective", [True, False])
def test_zero_order_hold_solves_hippos_system(selective):
    """LION, Eq. 236: input-dependent steps of a system with one rate per channel."""
    decay, x = built(HippoDecayConfig(selective=selective, zero_order_hold=True)), tokens(2, 5)
    step = torch.ones(2, 5, HEADS, HEAD_WIDTH, dtype=x.dtype)
    if selective:
        step = 2 * torch.sigmoid((x @ decay.proj.weight.T).reshape(step.shape))
    log_decay, key = decay(x)
    want_decay, want_key = held(decay.log_rate.exp(), step)
    torch.testing.assert_close(log_decay.exp(), want_decay)
    torch.testing.assert_close(key, want_key)
    with torch.no_grad():  # no rate at all: the sum of the inputs
        decay.log_rate.fill_(-1000)
    torch.testing.assert_close(decay(x).key, step)


def test_coupled_keys_are_the_zero_order_hold_of_a_selective_step():
    """LION, App. B.11: h' = -h + x over a step of -log lambda."""
    log_decay, key = built(SelectiveDecayConfig(couple_key=True))(3 * tokens(2, 5))
    want_decay, want_key = held(1, -log_decay)
    torch.testing.assert_close(log_decay.exp(), want_decay)
    torch.testing.assert_close(key.squeeze(-1), want_key)


def test_hippos_steps_are_of_the_range_asked_for():
    decay = HippoDecayConfig(min_step=1e-5, max_step=2e-5).build(
        width=512, num_heads=256, head_width=2
    )
    steps = decay.log_rate[:, 0].exp()
    assert 1e-5 <= steps.min() < 1.1e-5
    assert 1.9e-5 < steps.max() <= 2e-5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (HippoDecayConfig(min_step=0.0), "decay.min_step is 0.0"),
        (HippoDecayConfig(min_step=1.0), "decay.min_step is 1.0, expected at most max_step=0.1"),
        (GLADecayConfig(rank=0), "decay.rank is 0"),
        (RWKV6DecayConfig(rank=-1), "decay.rank is -1"),
        (HGRN2DecayConfig(lower_bound=1.0), "decay.lower_bound is 1.0, expected .* less than 1"),
    ],
)
def test_impossible_fields_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        built(config)


def test_an_unknown_initialization_is_refused():
    config = FixedDecayConfig()
    object.__setattr__(config, "init", "retnt")  # past the tests' own check of types
    with pytest.raises(ValueError, match=r"decay.init 'retnt' is unknown .*'retnet'"):
        built(config)


def test_feature_maps():
    assert tuple(FEATURE_MAPS) == get_args(FeatureMapName)
    x = torch.linspace(-4, 4, 12).reshape(1, 1, 2, 6)
    wants = {
        "identity": x,
        "silu": x / (1 + torch.exp(-x)),
        "relu": torch.where(x > 0, x, 0),
        "elu_plus_one": torch.where(x > 0, x + 1, x.exp()),
        "sigmoid": 1 / (1 + torch.exp(-x)),
    }
    shifted = wants["silu"] + 0.5
    wants["shifted_silu"] = shifted / shifted.square().sum(dim=-1, keepdim=True).sqrt()
    for name, want in wants.items():
        torch.testing.assert_close(FEATURE_MAPS[name](x), want)


def test_shifted_silu_never_has_length_zero():
    x = torch.linspace(-100, 100, 10_001).reshape(1, -1, 1, 1).requires_grad_()
    y = shifted_silu(x)
    torch.testing.assert_close(y, torch.ones_like(y))  # one channel: positive, of length 1
    y.sum().backward()
    assert x.grad.isfinite().all()
