"""Gated DeltaNet, KDA and DeltaProduct, written as loops over tokens from their equations."""

import pytest
import torch
from test_convolution import loop as convolve
from torch import nn
from torch.nn.functional import linear, logsigmoid

from onescan.configs import from_dict, replace, to_dict
from onescan.experiments.recipes import find_recipe
from onescan.experiments.recipes.mixers import with_mixer
from onescan.layers.decays import (
    DECAYS,
    FixedDecayConfig,
    GatedDeltaNetDecayConfig,
    KDADecayConfig,
    SelectiveDecayConfig,
)
from onescan.layers.mixers import (
    DeltaProductMixerConfig,
    DeltaRuleMixerConfig,
    GatedDeltaNetMixerConfig,
    KDAMixerConfig,
)
from onescan.layers.tokens import snake_orders
from onescan.models.causal_lm import CausalLMConfig
from onescan.nn import DeltaAttention
from onescan.ops.packing import Packing
from onescan.shapes import Grid

WIDTH, HEADS, TOKENS = 24, 3, 7
DIRECTIONS = ("forward", "backward", "both")
over_directions = pytest.mark.parametrize("direction", DIRECTIONS)


def tokens(*shape):
    return torch.randn(*shape, WIDTH, dtype=torch.float64, requires_grad=True)


def trained(config, axes=1):
    """The mixer with weights as training may leave them, in float64."""
    mixer = replace(config, {"num_heads": HEADS}).build(width=WIDTH, axes=axes).double()
    for parameter in mixer.parameters():
        with torch.no_grad():
            parameter += 0.3 * torch.randn_like(parameter)
    return mixer


def gradients(y, *inputs):
    return torch.autograd.grad((y * y.detach().cos()).sum(), inputs, allow_unused=True)


def silu(x):
    return x * torch.sigmoid(x)


def softplus(x):
    return -logsigmoid(-x)


def unit(x):
    return x / (x.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt()


def rms(x, weight):
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight


def in_heads(x):
    return x.unflatten(-1, (HEADS, -1))


def convolved(mixer, x):
    """Return the convolved channels of q, k and v, and the other outputs of in_proj."""
    direction = mixer.config.direction
    u = mixer.in_proj(x)
    channels = mixer.conv.in_channels
    u, rest = u[..., :channels], u[..., channels:]
    flip = (1,) if direction == "backward" else ()
    keep = torch.ones(x.shape[:2], dtype=torch.bool)
    y = convolve(mixer.conv, u.flip(flip), keep, causal=direction != "both").flip(flip)
    return y, rest


def visited(step, q, width, direction):
    """Return o_t = S_t^T q_t, with S_t = step(S_{t-1}, t), for one sequence of heads [T, H, K].

    In both directions, what a token writes to an empty state is in both states and counts once.
    """
    empty = q.new_zeros(*q.shape[1:], width)
    outputs = [0] * len(q)
    for order in (range(len(q)), reversed(range(len(q)))):
        forward = isinstance(order, range)
        if direction == ("backward" if forward else "forward"):
            continue
        state = empty
        for t in order:
            state = step(state, t)
            outputs[t] = outputs[t] + torch.einsum("hkv,hk->hv", state, q[t])
    if direction == "both":
        for t in range(len(q)):
            outputs[t] = outputs[t] - torch.einsum("hkv,hk->hv", step(empty, t), q[t])
    return torch.stack(outputs)


def erased(state, beta, k):
    """(I - beta k k^T) S"""
    return state - beta[:, None, None] * torch.einsum("hk,hj,hjv->hkv", k, k, state)


def written(beta, k, v):
    return beta[:, None, None] * torch.einsum("hk,hv->hkv", k, v)


def gated_deltanet(mixer, x, direction):
    """S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, arXiv:2412.06464."""
    u, z = convolved(mixer, x)
    q, k, v = map(in_heads, u.split([WIDTH, WIDTH, 2 * WIDTH], dim=-1))
    q, k, v = unit(silu(q)), unit(silu(k)), silu(v)
    beta = torch.sigmoid(linear(x, mixer.beta_proj.weight))
    dt = softplus(linear(x, mixer.decay.proj.weight) + mixer.decay.dt_bias)
    alpha = torch.exp(-mixer.decay.log_rate.exp() * dt)
    rows = []
    for b in range(len(x)):

        def step(state, t, b=b):
            forgotten = alpha[b, t][:, None, None] * state
            return erased(forgotten, beta[b, t], k[b, t]) + written(beta[b, t], k[b, t], v[b, t])

        rows.append(visited(step, q[b], v.shape[-1], direction))
    o = rms(torch.stack(rows), mixer.norm.weight) * silu(in_heads(z))
    return linear(o.flatten(2), mixer.out_proj.weight)


def kda(mixer, x, direction):
    """S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T, arXiv:2510.26692."""
    u, z = convolved(mixer, x)
    q, k, v = map(in_heads, u.split(WIDTH, dim=-1))
    q, k, v = unit(silu(q)), unit(silu(k)), silu(v)
    beta = torch.sigmoid(linear(x, mixer.beta_proj.weight))
    f = linear(linear(x, mixer.decay.down_proj.weight), mixer.decay.up_proj.weight)
    dt = in_heads(softplus(f + mixer.decay.dt_bias))
    alpha = torch.exp(-mixer.decay.log_rate.exp()[:, None] * dt)
    rows = []
    for b in range(len(x)):

        def step(state, t, b=b):
            forgotten = alpha[b, t][:, :, None] * state
            return erased(forgotten, beta[b, t], k[b, t]) + written(beta[b, t], k[b, t], v[b, t])

        rows.append(visited(step, q[b], v.shape[-1], direction))
    gate = torch.sigmoid(in_heads(linear(z, mixer.gate_proj.weight)))
    o = rms(torch.stack(rows), mixer.norm.weight) * gate
    return linear(o.flatten(2), mixer.out_proj.weight)


def delta_product(mixer, x, direction):
    """S_{t,r} = (I - beta_tr k_tr k_tr^T) S_{t,r-1} + beta_tr k_tr v_tr^T, arXiv:2502.10297."""
    count = mixer.config.updates
    u, gate = convolved(mixer, x)
    q, *kv = map(in_heads, u.split(WIDTH, dim=-1))
    q, keys, values = unit(silu(q)), kv[:count], kv[count:]
    keys, values = [unit(silu(k)) for k in keys], [silu(v) for v in values]
    betas = linear(x, mixer.beta_proj.weight).split(HEADS, dim=-1)
    betas = [2 * torch.sigmoid(z) for z in betas]
    alpha = torch.ones(*x.shape[:2], HEADS, dtype=x.dtype)
    if list(mixer.decay.parameters()):
        dt = softplus(linear(x, mixer.decay.proj.weight) + mixer.decay.dt_bias)
        alpha = torch.exp(-mixer.decay.log_rate.exp() * dt)
    rows = []
    for b in range(len(x)):

        def step(state, t, b=b):
            state = alpha[b, t][:, None, None] * state
            for beta, k, v in zip(betas, keys, values, strict=True):
                state = erased(state, beta[b, t], k[b, t]) + written(beta[b, t], k[b, t], v[b, t])
            return state

        rows.append(visited(step, q[b], values[0].shape[-1], direction))
    o = rms(torch.stack(rows), mixer.norm.weight).flatten(2)
    if mixer.config.gate != "none":
        o = o * silu(gate)
    return linear(o, mixer.out_proj.weight)


KDA = KDAMixerConfig(decay=KDADecayConfig(rank=4), gate_rank=5)
PUBLISHED = {
    "gated_deltanet": (GatedDeltaNetMixerConfig(), gated_deltanet),
    "kda": (KDA, kda),
    "delta_product": (DeltaProductMixerConfig(), delta_product),
    "delta_product, 3 updates": (DeltaProductMixerConfig(updates=3), delta_product),
    "gated_delta_product": (
        DeltaProductMixerConfig(decay=GatedDeltaNetDecayConfig(), gate="silu"),
        delta_product,
    ),
}
CONFIGS = {name: config for name, (config, _) in PUBLISHED.items()}
over_configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@over_directions
@pytest.mark.parametrize(("config", "loop"), PUBLISHED.values(), ids=PUBLISHED)
def test_values_and_gradients_are_those_of_the_published_recurrence(config, loop, direction):
    mixer = trained(replace(config, {"direction": direction, "chunk_size": 4}))
    x = tokens(2, TOKENS)
    y, expected = mixer(x, Grid((TOKENS,)))[0], loop(mixer, x, direction)
    torch.testing.assert_close(y, expected, atol=1e-9, rtol=1e-9)
    leaves = (x, *mixer.parameters())
    torch.testing.assert_close(
        gradients(y, *leaves), gradients(expected, *leaves), atol=1e-8, rtol=1e-8
    )


@over_directions
@over_configs
def test_natural_scans_are_averaged(config, direction):
    """Without a norm and gate, the output is the mean over scans of the mixer in their order."""
    fields = {"direction": direction, "norm": "none", "gate": "none", "gate_rank": None}
    flat, x = trained(replace(config, fields), axes=2), tokens(2, 13)
    natural = replace(flat.config, {"scan": "natural"}).build(width=WIDTH, axes=2).double()
    natural.load_state_dict(flat.state_dict())
    grid, keep = Grid((3, 4), prefix=1), torch.rand(2, 13) < 0.7
    expected = 0
    for order in snake_orders(grid, x.device):
        o, _ = flat(x[:, order.token], grid, keep=keep[:, order.token])
        expected = expected + o[:, order.step] / 2
    y, state = natural(x, grid, keep=keep)
    assert state is None
    assert natural.config.is_causal is False
    torch.testing.assert_close(y, expected)
    leaves = (x, flat.in_proj.weight)
    torch.testing.assert_close(
        gradients(y, x, natural.in_proj.weight), gradients(expected, *leaves)
    )


@over_configs
@pytest.mark.parametrize("direction", ["forward", "both"])
def test_packed_sequences_equal_each_alone(config, direction):
    mixer = trained(replace(config, {"direction": direction, "conv_size": None}))
    assert "cu_seqlens" in mixer.config.takes
    x, sizes = tokens(1, 9), [2, 1, 6]
    packing = Packing(torch.tensor([0, 2, 3, 9], dtype=torch.int32), batch=1, tokens=9)
    y, _ = mixer(x, Grid((9,)), cu_seqlens=packing)
    alone = [mixer(part, Grid((part.shape[1],)))[0] for part in x.split(sizes, dim=1)]
    torch.testing.assert_close(y, torch.cat(alone, dim=1))


@pytest.mark.parametrize("name", ["gated_deltanet", "kda", "selective", "fixed"])
def test_any_decay_of_the_key_channels_or_heads_is_applied(name):
    """One token after another: the state of the first token, decayed, is what the second reads."""
    config = DeltaRuleMixerConfig(decay=DECAYS[name](), direction="forward", norm="none")
    mixer, x = trained(config), tokens(1, 2)
    _, state = mixer(x[:, :1], Grid((1,)))
    q, k, v = mixer.qkv(mixer.in_proj(x).split(mixer.qkv_widths, dim=-1), None)
    log_decay = mixer.log_decay(x)[0, 1]
    decay = (log_decay if log_decay.ndim == 2 else log_decay[:, None]).exp()
    beta, k, v = mixer.beta(x)[0, 1, 0], k[0, 1, 0], v[0, 1, 0]
    kv = erased(decay[..., None] * state.attention.kv[0], beta, k) + written(beta, k, v)
    expected = mixer.out_proj(torch.einsum("hkv,hk->hv", kv, q[0, 1]).flatten())
    torch.testing.assert_close(mixer(x, Grid((2,)))[0][0, 1], expected)


@pytest.mark.parametrize("name", DECAYS)
def test_decays_that_change_keys_are_refused(name):
    config = DECAYS[name]()
    changes = config.build(width=WIDTH, num_heads=HEADS, head_width=8)(torch.randn(1, 2, WIDTH)).key
    assert config.changes_keys == (changes is not None or name == "hippo")
    mixer = DeltaRuleMixerConfig(num_heads=HEADS, decay=config)
    if config.changes_keys:
        with pytest.raises(ValueError, match=f"decay is {type(config).__name__}, which changes"):
            mixer.build(width=WIDTH, axes=1)
    else:
        assert mixer.build(width=WIDTH, axes=1)(torch.randn(1, 2, WIDTH), Grid((2,)))[0].any()
    coupled = SelectiveDecayConfig(couple_key=True)
    with pytest.raises(ValueError, match="SelectiveDecayConfig, which changes the keys"):
        replace(mixer, {"decay": coupled}).build(width=WIDTH, axes=1)


@over_configs
def test_configs_survive_json_under_their_own_name(config):
    model = CausalLMConfig(vocab_size=11, width=WIDTH, depth=1, mixer=config)
    plain = to_dict(model)
    assert plain["mixer"]["type"] == type(config).__name__
    assert from_dict(CausalLMConfig, plain) == model


def test_automatic_convolutions_read_three_neighbors_on_each_side_they_read():
    for direction, size in (("forward", 4), ("backward", 4), ("both", 7)):
        mixer = trained(GatedDeltaNetMixerConfig(direction=direction))
        assert mixer.conv.kernel_size == (size,)
    with pytest.raises(ValueError, match="conv_size is 4, expected an odd number"):
        trained(GatedDeltaNetMixerConfig(conv_size=4))


def test_widths_of_the_projections():
    mixer = trained(KDA)
    assert mixer.in_proj.out_features == 3 * WIDTH + 5
    gated = trained(GatedDeltaNetMixerConfig())
    assert gated.in_proj.out_features == 2 * WIDTH + 4 * WIDTH
    assert gated.norm.weight.shape == (2 * WIDTH // HEADS,)


@pytest.mark.parametrize("name", ["gated_deltanet", "kda", "delta_product"])
def test_named_mixers_replace_those_of_recipes(name):
    for recipe, direction in (("linearize_gpt2", "forward"), ("linearize_vit", "both")):
        mixer = with_mixer(find_recipe(recipe)(), name).model.mixer
        assert type(mixer) is type(CONFIGS[name])
        assert mixer.direction == direction
        mixer.build(width=768, axes=1)


@pytest.mark.parametrize("decay", ["gated_deltanet", "kda"])
def test_cross_attention_reads_the_decayed_memory(decay):
    layer, causal = (
        DeltaAttention(WIDTH, HEADS, decay=decay, causal=causal).double()
        for causal in (False, True)
    )
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    causal.load_state_dict(layer.state_dict())
    context = tokens(2, 7)
    expected = causal(context)[:, -1:]
    torch.testing.assert_close(layer(context[:, -1:], context=context), expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"updates": 0}, "updates is 0"),
        ({"gate_rank": 0}, "gate_rank is 0"),
        ({"value_expansion": 0}, "value_expansion is 0"),
        ({"decay": KDADecayConfig(rank=0)}, r"decay\.rank is 0"),
        ({"decay": FixedDecayConfig(), "updates": -1}, "updates is -1"),
    ],
)
def test_impossible_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DeltaRuleMixerConfig(num_heads=HEADS, **fields).build(width=WIDTH, axes=1)


@pytest.mark.parametrize("qk_norm", ["l2", "sum"])
def test_large_float16_keys_keep_their_norm(qk_norm):
    mixer = DeltaRuleMixerConfig(num_heads=1, qk_norm=qk_norm).build(width=8, axes=1).half()
    keys = mixer.normalized(torch.full((1, 1, 1, 8), 20_000.0, dtype=torch.float16))
    want = torch.full_like(keys, 8**-0.5 if qk_norm == "l2" else 1 / 8)
    torch.testing.assert_close(keys, want)
