"""Hydra's mixer against loops over tokens: values, gradients, masks and counts."""

from functools import partial

import pytest
import torch
from mixer_checks import silu
from mixer_checks import trained as trained_mixer
from pairwise import pairwise

from onescan.configs import replace
from onescan.layers.block import init_weights
from onescan.layers.mixers import HydraMixerConfig
from onescan.models.presets import preset
from onescan.models.size import model_size
from onescan.shapes import Grid

WIDTH = 6
HYDRA = HydraMixerConfig(num_heads=3, state_size=2, chunk_size=4)
CONFIGS = {
    "hydra": HYDRA,
    "shared keys": replace(HYDRA, {"shared_keys": True}),
    "small": replace(HYDRA, {"num_heads": 1, "expand": 1, "conv_size": 1, "state_size": 1}),
}
over_configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)

trained = partial(trained_mixer, width=WIDTH)


def tokens(*shape):
    return torch.randn(*shape, WIDTH, dtype=torch.float64, requires_grad=True)


def shifted_ssm(us, bs, cs, dts, a):
    """shift(SS(u)): each output is Mamba-2's output at the token before, and 0 at the first."""
    h = torch.zeros(*us[0].shape, len(bs[0]), dtype=torch.float64)  # H P N
    outputs, last = [], torch.zeros_like(us[0])
    for u, b, c, dt in zip(us, bs, cs, dts, strict=True):
        outputs.append(last)
        h = (dt * a).exp()[:, None, None] * h + dt[:, None, None] * u.unsqueeze(-1) * b
        last = h @ c
    return outputs


def mix(mixer, x):
    """Proposition 3.7 and Fig. 4 for the tokens of one sequence, [T, D]."""
    config, decay = mixer.config, mixer.decay
    inner, n, size = mixer.out_proj.in_features, config.state_size, config.conv_size
    projected = x @ mixer.in_proj.weight.T
    z, y = projected[:, :inner], projected[:, inner:]
    convolved = []
    for t in range(len(x)):
        total = mixer.conv.bias
        for i in range(size):
            if 0 <= t + i - size // 2 < len(x):
                total = total + mixer.conv.weight[:, 0, i] * y[t + i - size // 2]
        convolved.append(silu(total))
    flat = [y[:inner] for y in convolved]
    us = [u.reshape(config.num_heads, -1) for u in flat]
    starts = (0, 0) if config.shared_keys else (0, 2 * n)
    both = []
    for direction, start in enumerate(starts):
        at = inner + start
        bs, cs = ([y[i : i + n] for y in convolved] for i in (at, at + n))
        heads = slice(direction * config.num_heads, (direction + 1) * config.num_heads)
        dts = [(1 + (decay.proj.weight[heads] @ token + decay.dt_bias).exp()).log() for token in x]
        order = -1 if direction else 1
        arguments = (part[::order] for part in (us, bs, cs, dts))
        both.append(shifted_ssm(*arguments, -decay.log_rate.exp())[::order])
    outputs = []
    for t, (before, after) in enumerate(zip(*both, strict=True)):
        diagonal = mixer.diagonal_proj.weight @ flat[t] + mixer.diagonal_proj.bias
        o = (before + after + diagonal.unsqueeze(-1) * us[t]).flatten()
        o = o / (o.square().mean() + 1e-5).sqrt() * mixer.norm.weight * silu(z[t])
        outputs.append(mixer.out_proj.weight @ o)
    return torch.stack(outputs)


def loop(mixer, x, keep=None):
    """Each sequence separately, over the real tokens only."""
    out = torch.zeros_like(x)
    for row in range(len(x)):
        real = torch.arange(x.shape[1]) if keep is None else keep[row].nonzero()[:, 0]
        if len(real):
            out[row, real] = mix(mixer, x[row, real])
    return out


def assert_same(mixer, x, keep=None):
    y, want = mixer(x, Grid(x.shape[1:2]), keep=keep)[0], loop(mixer, x, keep)
    torch.testing.assert_close(y, want, atol=1e-9, rtol=1e-9)
    found, expected = (
        torch.autograd.grad(
            (o * want.detach().cos()).sum(), [x, *mixer.parameters()], allow_unused=True
        )
        for o in (y, want)
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, atol=1e-9, rtol=1e-9)


@pairwise(
    {"name": CONFIGS, "count": [1, 2, 9], "form": ["auto", "chunk", "full", "recurrent"]},
    rest_is_slow=True,
)
def test_the_mixer_is_the_papers_proposition(name, count, form):
    assert_same(trained(replace(CONFIGS[name], {"form": form})), tokens(2, count))


@over_configs
@pytest.mark.parametrize("chunk_size", [1, 4, 64])
def test_masked_tokens_are_skipped_everywhere(config, chunk_size):
    keep = torch.rand(2, 11) < 0.6
    assert_same(trained(replace(config, {"chunk_size": chunk_size})), tokens(2, 11), keep)


@over_configs
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(config, side):
    mixer, x = trained(config), tokens(2, 7)
    want, _ = mixer(x, Grid((7,)))
    parts = [tokens(2, 3), x] if side == "left" else [x, tokens(2, 3)]
    real = slice(3, None) if side == "left" else slice(7)
    keep = torch.zeros(2, 10, dtype=torch.bool)
    keep[:, real] = True
    y, _ = mixer(torch.cat(parts, dim=1), Grid((10,)), keep=keep)
    torch.testing.assert_close(y[:, real], want)


def test_the_diagonal_is_free_of_both_directions():
    """Without convolution, gate and norm in the way, SS never reads the token itself."""
    config = replace(HYDRA, {"conv_size": 1})
    mixer, x = trained(config), tokens(1, 5)
    keys = [torch.randn(1, 5, 2, dtype=torch.float64) for _ in range(4)]
    v = torch.randn(1, 5, 3, 4, dtype=torch.float64, requires_grad=True)
    y = mixer._strictly_before_and_after(x, keys, v, None)
    for t in range(5):
        (gradient,) = torch.autograd.grad(y[0, t].sum(), v, retain_graph=True)
        assert gradient[0].flatten(1).any(dim=1).tolist() == [s != t for s in range(5)]


def test_initial_values_are_hydras():
    mixer = HydraMixerConfig(num_heads=4).build(width=128, axes=1)
    mixer.apply(partial(init_weights, std=0.02))  # as models do
    assert (mixer.decay.log_rate == 0).all()
    assert (mixer.diagonal_proj.bias == 1).all()
    dt = torch.nn.functional.softplus(mixer.decay.dt_bias)
    assert dt.min() >= 0.000999
    assert dt.max() <= 0.1001


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_size": 0}, "state_size is 0"),
        ({"expand": 0}, "expand is 0"),
        ({"conv_size": 4}, "conv_size is 4, expected an odd number"),
        ({"chunk_size": 0}, "chunk_size is 0"),
    ],
)
def test_impossible_fields_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        HydraMixerConfig(**changes).build(width=WIDTH, axes=1)


def parameters_of_mixer(d, *, key_sets=2):
    """Of z, u, B and C, dt, the convolution, A and the bias of dt, the diagonal, norm and W_out."""
    e, n = 2 * d, 64
    heads, convolved = e // 64, e + 2 * key_sets * n
    in_proj = d * (e + convolved + 2 * heads)
    return in_proj + convolved * (7 + 1) + 2 * heads + heads * (e + 1) + e + e * d


@pytest.mark.parametrize(("size", "d", "depth"), [("small", 384, 22), ("base", 768, 24)])
def test_hydra_has_exactly_the_parameters_of_its_equations(size, d, depth):
    blocks = depth * (parameters_of_mixer(d, key_sets=1) + 2 * d)
    want = (3 * 16**2 + 1) * d + d + blocks + 2 * d + 1000 * (d + 1)  # no positions
    assert model_size(preset(f"hydra_{size}")).parameters == want


@pytest.mark.parametrize(("size", "d", "depth"), [("base", 768, 23), ("large", 1024, 45)])
def test_hydras_masked_language_models_have_the_printed_parameters(size, d, depth):
    vocabulary = 30522
    head = d * d + d + 2 * d + vocabulary
    want = (vocabulary + 2) * d + 2 * d + depth * (parameters_of_mixer(d) + 2 * d) + head
    counted = model_size(preset(f"hydra_mlm_{size}")).parameters
    assert counted == want
    assert round(counted / 1e6) == {"base": 112, "large": 334}[size]
