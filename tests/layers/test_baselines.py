"""Baselines of LightNet's tables: HGRN, HGRN2 and TransNormerLLM as their papers' token loops."""

import dataclasses
import math

import pytest
import torch
from pairwise import pairwise
from projections import parts_of

from onescan.layers.decays import HGRN2DecayConfig, NoDecayConfig, bounded_decay
from onescan.layers.mixers import (
    HGRNMixerConfig,
    LionMixerConfig,
    LowerBounds,
    SoftmaxMixerConfig,
)
from onescan.layers.position import TokenPositionConfig
from onescan.models.presets import preset
from onescan.models.token_network import flatten_state, unflatten_state
from onescan.shapes import Grid

WIDTH, HEADS, K = 12, 3, 4
DIRECTIONS = ("both", "forward", "backward")
FORMS = ("full", "chunk", "recurrent")
TNL, HGRN2 = preset("tnl_tiny").mixer, preset("hgrn2_tiny").mixer
over_directions = pytest.mark.parametrize("direction", DIRECTIONS)
over_lengths = pytest.mark.parametrize("length", [1, 7])


def tokens(*shape):
    return torch.randn(*shape, WIDTH, dtype=torch.float64)


def trained(config):
    """The mixer with weights as training may leave them, in float64."""
    mixer = dataclasses.replace(config, num_heads=HEADS).build(width=WIDTH, axes=1).double()
    for parameter in mixer.parameters():
        with torch.no_grad():
            parameter += 0.5 * torch.randn_like(parameter)
    return mixer


def silu(x):
    return x * torch.sigmoid(x)


def layer_norm(norm, x):
    centered = x - x.mean(dim=-1, keepdim=True)
    scaled = centered / (centered.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
    return scaled * norm.weight + norm.bias


def hgrn(mixer, x, bound, directions):
    """Sec. 3 of HGRN with complex numbers, one token at a time; both scans contain the token."""
    c, gate = (silu(part(x)) for part in parts_of(mixer))
    c = torch.complex(c[..., :WIDTH], c[..., WIDTH:])
    decay = bound + (1 - bound) * torch.sigmoid(mixer.decay_proj(x))
    total = torch.zeros_like(c)
    for theta, order in zip(mixer.theta, directions, strict=True):
        h = torch.zeros_like(c[:, 0])
        for t in range(x.shape[1])[::order]:
            h = decay[:, t] * torch.exp(1j * theta) * h + (1 - decay[:, t]) * c[:, t]
            total[:, t] += h
    o = layer_norm(mixer.norm, torch.cat([total.real, total.imag], dim=-1))
    return mixer.out_proj(o * gate)


@pairwise({"form": FORMS, "direction": DIRECTIONS, "length": [1, 7]}, rest_is_slow=True)
def test_hgrn_is_its_complex_recurrence(form, direction, length):
    mixer = trained(HGRNMixerConfig(direction=direction, form=form, chunk_size=4))
    x, bound = tokens(2, length), torch.rand(WIDTH, dtype=torch.float64)
    want = hgrn(mixer, x, bound, {"both": (1, -1), "forward": (1,), "backward": (-1,)}[direction])
    y, _ = mixer(x, Grid((length,)), lower_bound=bound)
    torch.testing.assert_close(y, want)
    grid = Grid((length,))
    for mine, theirs in zip(
        torch.autograd.grad(y.square().sum(), [*mixer.parameters()]),
        torch.autograd.grad(want.square().sum(), [*mixer.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)
    unbounded, _ = mixer(x, grid)
    torch.testing.assert_close(unbounded, mixer(x, grid, lower_bound=torch.zeros_like(bound))[0])


@over_directions
def test_masked_tokens_of_hgrn_equal_removed_ones(direction):
    mixer, x = trained(HGRNMixerConfig(direction=direction)), tokens(2, 7)
    keep = torch.tensor([[True, False, True, True, False, False, True], [False] * 3 + [True] * 4])
    y, _ = mixer(x, Grid((7,)), keep=keep)
    for row, real, out in zip(x, keep, y, strict=True):
        torch.testing.assert_close(out[real][None], mixer(row[real][None], Grid((4,)))[0])


CAUSAL = {"hgrn": HGRNMixerConfig(), "hgrn2": HGRN2, "tnl": TNL}


@pytest.mark.parametrize("config", CAUSAL.values(), ids=CAUSAL)
def test_causal_baselines_in_two_calls_equal_one_at_every_cut(config):
    mixer = trained(dataclasses.replace(config, direction="forward", chunk_size=4))
    x, keep = tokens(2, 7), torch.rand(2, 7) < 0.8
    bound = {}
    if "lower_bound" in config.takes:
        bound = {"lower_bound": torch.rand(WIDTH, dtype=torch.float64)}
    want, whole = mixer(x, Grid((7,)), keep=keep, **bound)
    for cut in range(1, 7):
        first, state = mixer(x[:, :cut], Grid((cut,)), keep=keep[:, :cut], **bound)
        rest, state = mixer(x[:, cut:], Grid((7 - cut,)), keep=keep[:, cut:], state=state, **bound)
        torch.testing.assert_close(torch.cat([first, rest], dim=1), want)
        torch.testing.assert_close(state, whole)


def linear_attention(q, k, v, decay, order):
    """o_t = q_t . S_t with S_t = diag(decay_t) S_(t-1) + k_t v_t^T, and with no own part of S_t."""
    state = torch.zeros(*k[:, 0].shape, v.shape[-1], dtype=v.dtype)
    outputs, without_own = torch.zeros_like(v), torch.zeros_like(v)
    for t in range(q.shape[1])[::order]:
        state = decay[:, t].unsqueeze(-1) * state
        without_own[:, t] = (q[:, t].unsqueeze(-2) @ state).squeeze(-2)
        state = state + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        outputs[:, t] = (q[:, t].unsqueeze(-2) @ state).squeeze(-2)
    return outputs, without_own


def in_direction(q, k, v, decay, direction):
    """Both scans added, where a token's own part counts once."""
    forward, backward = (linear_attention(q, k, v, decay, order) for order in (1, -1))
    o = {"forward": forward[0], "backward": backward[0], "both": forward[0] + backward[1]}
    return (o[direction] / K**0.5).flatten(-2)


def heads(x):
    return x.unflatten(-1, (HEADS, -1))


@over_lengths
@over_directions
def test_hgrn2_is_its_recurrence(direction, length):
    mixer = trained(dataclasses.replace(HGRN2, direction=direction))
    x, bound = tokens(2, length), torch.rand(WIDTH, dtype=torch.float64)
    to_q, to_v = parts_of(mixer)
    decay = bound + (1 - bound) * torch.sigmoid(mixer.decays[0].proj(x))
    q, v = torch.sigmoid(to_q(x)), silu(to_v(x))
    o = in_direction(heads(q), heads(1 - decay), heads(v), heads(decay), direction)
    want = mixer.out_proj(layer_norm(mixer.norm, o))
    torch.testing.assert_close(mixer(x, Grid((length,)), lower_bound=bound)[0], want)


@pairwise(
    {
        "rank": [None, 5],
        "gate": ["sigmoid", "silu"],
        "direction": DIRECTIONS,
        "length": [1, 7],
    },
    rest_is_slow=True,
)
def test_transnormer_is_its_recurrence(rank, gate, direction, length):
    mixer = trained(dataclasses.replace(TNL, direction=direction, gate=gate, gate_rank=rank))
    x = tokens(2, length)
    to_q, to_k, to_v, to_gate = parts_of(mixer)
    q, k, v = heads(silu(to_q(x))), heads(silu(to_k(x))), heads(to_v(x))
    decay = (1 - 2.0 ** (-5 - torch.arange(HEADS)))[:, None].expand_as(k)
    o = layer_norm(mixer.norm, in_direction(q, k, v, decay, direction))
    u = to_gate(x) if rank is None else to_gate(x) @ mixer.gate_proj.weight.T
    u = torch.sigmoid(u) if gate == "sigmoid" else silu(u)
    torch.testing.assert_close(mixer(x, Grid((length,)))[0], mixer.out_proj(o * u))


def test_lower_bounds_are_a_sum_of_a_softmax_over_blocks():
    module = LowerBounds(4, WIDTH).double()
    torch.testing.assert_close(module()[:, 0], torch.arange(4, dtype=torch.float64) / 4)
    torch.nn.init.normal_(module.logits)
    increments = module.logits.exp() / module.logits.exp().sum(dim=0)
    want = [torch.zeros(WIDTH, dtype=torch.float64)]
    for i in range(1, 4):
        want.append(want[-1] + increments[i])
    torch.testing.assert_close(module(), torch.stack(want))


@pytest.mark.parametrize("bound", [0.0, 0.3, 0.999])
def test_bounded_decays_are_accurate_in_float32_and_their_gradients_finite(bound):
    z = torch.cat([torch.linspace(-60, 30, 181), torch.tensor([-1000.0, 1000.0])]).requires_grad_()
    low = torch.tensor(bound, requires_grad=True)
    log_decay, rest = bounded_decay(z, low)
    wide, bound = z.detach().double(), torch.tensor(bound, dtype=torch.float32).double()
    decay, gate = bound + (1 - bound) * torch.sigmoid(wide), torch.sigmoid(-wide)
    exact = torch.where(decay < 0.5, decay.log(), torch.log1p(-(1 - bound) * gate))
    exact = exact.clamp(min=math.log(torch.finfo(torch.float32).tiny))
    torch.testing.assert_close(log_decay.double(), exact, rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(rest.double(), (1 - bound) * gate, rtol=1e-5, atol=1e-30)
    assert all(x.isfinite().all() for x in torch.autograd.grad(log_decay.sum(), [z, low]))
    assert (log_decay <= 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_rotary_attention_is_a_rotation_of_complex_pairs(causal):
    mixer = trained(
        SoftmaxMixerConfig(direction="forward" if causal else "both", bias=False, rotary=True)
    )
    assert mixer.in_proj.bias is None
    x = tokens(2, 7)
    q, k, v = map(heads, mixer.in_proj(x).chunk(3, dim=-1))
    q, k = (torch.complex(y[..., : K // 2], y[..., K // 2 :]) for y in (q, k))
    theta = torch.tensor([1.0, 10_000 ** (-2 / K)], dtype=torch.float64)
    o = torch.zeros_like(v)
    for t in range(7):
        read = range(t + 1) if causal else range(7)
        turned = [(q[:, t] * k[:, s].conj() * torch.exp(1j * (t - s) * theta)).real for s in read]
        weights = (torch.stack(turned).sum(dim=-1) / K**0.5).softmax(dim=0)
        o[:, t] = sum(w.unsqueeze(-1) * v[:, s] for w, s in zip(weights, read, strict=True))
    torch.testing.assert_close(mixer(x, Grid((7,)))[0], mixer.out_proj(o.flatten(-2)))


def test_fixed_token_positions_are_scaled_sines_and_cosines():
    position = TokenPositionConfig(max_tokens=9, learned=False).build(width=4, grid=Grid((1,)))
    assert not list(position.parameters())
    y, state = position(torch.zeros(1, 3, 4), Grid((3,)))
    more, _ = position(torch.zeros(1, 2, 4), Grid((2,)), state)
    n = torch.arange(5.0)[:, None]
    want = torch.cat([n.sin(), (n / 100).sin(), n.cos(), (n / 100).cos()], dim=1) / 2
    torch.testing.assert_close(torch.cat([y, more], dim=1)[0], want)


LANGUAGE = (
    "transformer_lm_45m", "linear_lm_45m", "hgrn_lm_46m", "tnl_lm_379m", "llama_385m",
)  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LANGUAGE)
def test_causal_language_models_continue_from_a_state(name):
    changes = {"mixer.num_heads": HEADS, "vocab_size": 11, "width": 24, "depth": 3}
    model = preset(name, **changes).build().double().eval()
    if model.network.lower_bounds is not None:
        torch.nn.init.normal_(model.network.lower_bounds.logits)
    ids = torch.randint(11, (2, 7))
    want, _ = model(ids)
    for cut in range(1, 7):
        first, state = model(ids[:, :cut])
        state = unflatten_state(state, flatten_state(state))
        rest, _ = model(ids[:, cut:], state)
        torch.testing.assert_close(torch.cat([first, rest], dim=1), want)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2]])
    packed, _ = model(ids, documents=documents)
    torch.testing.assert_close(packed[:1, 3:], model(ids[:1, 3:])[0])
    torch.testing.assert_close(packed[1:, 1:5], model(ids[1:, 1:5])[0])


def small(mixer):
    return preset(
        "hgrn_tiny", width=WIDTH, depth=3, image_size=28, num_classes=5, mixer=mixer
    ).build()


@pytest.mark.parametrize("mixer", [HGRNMixerConfig(num_heads=HEADS), HGRN2], ids=["hgrn", "hgrn2"])
def test_models_learn_lower_bounds_and_pass_them_to_their_blocks(mixer):
    model = small(dataclasses.replace(mixer, num_heads=HEADS))
    assert [name for name, _ in model.named_parameters() if "bounds" in name] == [
        "lower_bounds.logits"
    ]
    with torch.no_grad():
        model.lower_bounds.logits.normal_()
    images = torch.randn(2, 3, 28, 42)
    x, grid = model.embed(images)
    for block, bound in zip(model.blocks, model.lower_bounds(), strict=True):
        x = x + block.mixer(block.mixer_norm(x), grid, lower_bound=bound)[0]
        x = x + block.mlp(block.mlp_norm(x))
    torch.testing.assert_close(model.eval()(images), model.forward_head(model.norm(x)))
    model(images).square().sum().backward()
    assert model.lower_bounds.logits.grad.abs().sum() > 0


@pytest.mark.parametrize("condition", ["tokens", "adaln_zero"])
def test_two_scan_denoisers_learn_lower_bounds_with_and_without_recomputation(condition):
    model = preset(
        "hgrn2_dit_s_8", width=24, depth=3, condition=condition, **{"mixer.num_heads": HEADS}
    ).build()
    for parameter in model.parameters():  # adaLN-Zero's outputs would be zero
        torch.nn.init.normal_(parameter, std=0.3)
    gradients = []
    for recompute in (False, True):
        for block in model.blocks:
            block.recompute = recompute
        torch.manual_seed(0)
        model.zero_grad()
        noisy, labels = torch.randn(2, 4, 16, 24), torch.tensor([3, 7])
        model(noisy, torch.tensor([10, 999]), labels).square().sum().backward()
        gradients.append(model.lower_bounds.logits.grad)
    assert gradients[0].abs().sum() > 0
    torch.testing.assert_close(*gradients)


def test_models_without_bounded_decays_have_no_lower_bounds():
    config = LionMixerConfig(num_heads=HEADS, decay=HGRN2DecayConfig(lower_bound=0.5))
    assert small(config).lower_bounds is None
    assert small(dataclasses.replace(config, decay=NoDecayConfig())).lower_bounds is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LionMixerConfig(gate="silu", gate_rank=0), "gate_rank is 0"),
        (HGRNMixerConfig(chunk_size=0), "chunk_size is 0"),
        (SoftmaxMixerConfig(rotary=True), "rotary is True with 2 axes"),
        (
            LionMixerConfig(decay=HGRN2DecayConfig(lower_bound=0.1, learned_lower_bound=True)),
            "decay.lower_bound is 0.1 with learned_lower_bound=True, expected 0",
        ),
    ],
)
def test_configs_that_do_not_fit_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        config.build(width=24, axes=2)
