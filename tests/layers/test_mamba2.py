"""Mamba-2's mixer against loops over tokens and the layer of transformers."""

from functools import partial

import pytest
import torch
from mixer_checks import gradients, silu
from mixer_checks import trained as trained_mixer
from pairwise import pairwise

from onescan.configs import replace
from onescan.layers.block import init_weights
from onescan.layers.mixers import Mamba2MixerConfig
from onescan.shapes import Grid

WIDTH = 6
BOTH = Mamba2MixerConfig(num_heads=2, key_width=3, chunk_size=4)
CONFIGS = {
    "mamba2": replace(BOTH, {"direction": "forward"}),
    "backward": replace(BOTH, {"direction": "backward"}),
    "both": BOTH,
    "narrow": replace(BOTH, {"direction": "forward", "num_heads": 6, "value_expansion": 1}),
    "wide": replace(BOTH, {"direction": "forward", "value_width": 5, "key_width": None}),
    "bare": replace(
        BOTH,
        {
            "direction": "forward",
            "gate": "none",
            "norm": "none",
            "skip": False,
            "conv_size": 1,
            "conv_bias": False,
        },
    ),
}
CAUSAL = {name: config for name, config in CONFIGS.items() if config.direction == "forward"}
over_configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)

trained = partial(trained_mixer, width=WIDTH)


def tokens(*shape):
    return torch.randn(*shape, WIDTH, dtype=torch.float64, requires_grad=True)


def convolved(mixer, inputs):
    """silu(conv(x)) for a list of inputs; centered with direction="both"."""
    conv = mixer.conv
    size, bias = conv.kernel_size[0], 0 if conv.bias is None else conv.bias
    ahead = size // 2 if mixer.config.direction == "both" else 0
    outputs = []
    for t in range(len(inputs)):
        total = bias + torch.zeros_like(inputs[0])
        for i in range(size):
            if 0 <= (source := t + i - (size - 1) + ahead) < len(inputs):
                total = total + conv.weight[:, 0, i] * inputs[source]
        outputs.append(silu(total))
    return outputs


def sums(mixer, xs, c, b, log_decays, dts):
    """C_t^T h_t for each token: Eq. 1 of Mamba-2, in the order of the lists."""
    h, outputs = 0, []
    for t in range(len(xs)):
        h = log_decays[t].exp()[:, None, None] * h + dts[t][:, None, None] * torch.einsum(
            "hk,hv->hkv", b[t], xs[t]
        )
        outputs.append(torch.einsum("hk,hkv->hv", c[t], h))
    return outputs


def mix(mixer, x):
    """One sequence of real tokens, [T, D]."""
    config, heads = mixer.config, mixer.config.num_heads
    keys = config.key_channels(WIDTH)
    values = heads * config.value_channels(WIDTH)
    projected = [mixer.in_proj.weight @ token for token in x]
    u = convolved(mixer, [y[: 2 * keys + values] for y in projected][:: _order(config)])
    u = u[:: _order(config)]
    c, b = ([y[i : i + keys].expand(heads, -1) for y in u] for i in (0, keys))
    xs = [y[2 * keys :].reshape(heads, -1) for y in u]
    dts = [(1 + (mixer.decay.proj.weight @ token + mixer.decay.dt_bias).exp()).log() for token in x]
    decays = [-mixer.decay.log_rate.exp() * dt for dt in dts]
    total = [0] * len(xs)
    if config.direction != "backward":
        total = sums(mixer, xs, c, b, decays, dts)
    if config.direction != "forward":
        reverse = [part[::-1] for part in (xs, c, b, decays, dts)]
        after = sums(mixer, *reverse)[::-1]
        total = [a + y for a, y in zip(total, after, strict=True)]
    if config.direction == "both":  # the token itself is in both sums
        own = [dt[:, None] * (p * q).sum(-1, keepdim=True) * y
               for dt, p, q, y in zip(dts, c, b, xs, strict=True)]  # fmt: skip
        total = [a - y for a, y in zip(total, own, strict=True)]
    outputs = []
    for o, y, whole in zip(total, xs, projected, strict=True):
        o = (o if mixer.skip is None else o + mixer.skip[:, None] * y).flatten()
        if config.gate == "silu":
            o = o * silu(whole[2 * keys + values :])
        if config.norm == "rms":
            o = o * (o.square().mean() + 1e-5).rsqrt() * mixer.norm.weight
        outputs.append(mixer.out_proj.weight @ o)
    return torch.stack(outputs)


def _order(config):
    return -1 if config.direction == "backward" else 1


def loop(mixer, x, keep=None):
    """All sequences, one at a time, over their real tokens only."""
    out = torch.zeros_like(x)
    for row in range(len(x)):
        real = torch.ones(x.shape[1], dtype=torch.bool) if keep is None else keep[row]
        if real.any():
            out[row, real] = mix(mixer, x[row, real])
    return out


@pairwise(
    {"name": CONFIGS, "count": [1, 2, 9], "form": ["auto", "chunk", "recurrent"]},
    rest_is_slow=True,
)
def test_the_mixer_is_the_papers_recurrence(name, count, form):
    mixer, x = trained(replace(CONFIGS[name], {"form": form})), tokens(2, count)
    y, want = mixer(x, Grid((count,)))[0], loop(mixer, x)
    torch.testing.assert_close(y, want, atol=1e-9, rtol=1e-9)
    found, expected = gradients(y, x, mixer), gradients(want, x, mixer)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


@over_configs
def test_masked_tokens_are_skipped_everywhere(config):
    mixer, x = trained(config), tokens(2, 11)
    keep = torch.rand(2, 11) < 0.6
    y, want = mixer(x, Grid((11,)), keep=keep)[0], loop(mixer, x, keep)
    torch.testing.assert_close(y, want, atol=1e-9, rtol=1e-9)
    found, expected = gradients(y, x, mixer), gradients(want, x, mixer)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("cut", [1, 2, 5, 6])
def test_two_calls_equal_one(name, cut):
    mixer, x = trained(CAUSAL[name]), tokens(2, 7)
    keep = torch.rand(2, 7) < 0.7
    want, whole = mixer(x, Grid((7,)), keep=keep)
    outputs, state = [], None
    for part in (slice(cut), slice(cut, None)):
        piece = x[:, part]
        y, state = mixer(piece, Grid((piece.shape[1],)), keep=keep[:, part], state=state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, dim=1), want)
    torch.testing.assert_close(state, whole)


def test_the_mixer_is_that_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.Mamba2Config(
        vocab_size=7, hidden_size=WIDTH, num_hidden_layers=1, state_size=3, num_heads=2, head_dim=6,
        n_groups=1, chunk_size=4,
    )  # fmt: skip
    theirs = transformers.Mamba2Model(config).layers[0].mixer.double()
    ours = trained(CONFIGS["mamba2"])
    with torch.no_grad():
        z, u, dt = theirs.in_proj.weight.split([12, 18, 2])
        for source in (u, theirs.conv1d.weight, theirs.conv1d.bias, theirs.A_log, theirs.dt_bias):
            source += 0.3 * torch.randn_like(source)
        theirs.D.normal_()
        merged = [_queries_first(y) for y in (u, theirs.conv1d.weight, theirs.conv1d.bias)]
        ours.load_state_dict(
            {
                "in_proj.weight": torch.cat([merged[0], z]),
                "conv.weight": merged[1],
                "conv.bias": merged[2],
                "decay.proj.weight": dt,
                "decay.dt_bias": theirs.dt_bias,
                "decay.log_rate": theirs.A_log,
                "skip": theirs.D,
                "norm.weight": theirs.norm.weight,
                "out_proj.weight": theirs.out_proj.weight,
            }
        )
        x = tokens(2, 9)
        torch.testing.assert_close(  # theirs computes in float32
            ours(x, Grid((9,)))[0], theirs(x).double(), atol=1e-5, rtol=1e-5
        )


def _queries_first(x):
    """Reorder x, B and C to C, B and x."""
    values, b, c = x.split([12, 3, 3])
    return torch.cat([c, b, values])


@pytest.mark.parametrize("autocasts", [False, True])
@pytest.mark.parametrize("fields", [{}, {"norm": "simple_rms"}, {"norm_heads": True}])
def test_outputs_before_the_norm_may_outgrow_float16(autocasts, fields):
    config = Mamba2MixerConfig(num_heads=8, direction="forward", **fields)
    mixer = config.build(width=256, axes=1)
    x = 10 * torch.randn(1, 64, 256)
    want, _ = mixer(x, Grid((64,)))
    with torch.autocast("cpu", torch.float16, enabled=autocasts):
        if not autocasts:
            mixer, x = mixer.half(), x.half()
        got, _ = mixer(x, Grid((64,)))
    assert got.dtype == torch.float16
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=5e-3)


def test_initial_values_are_mamba2s():
    mixer = Mamba2MixerConfig(num_heads=8).build(width=64, axes=1)
    mixer.apply(partial(init_weights, std=0.02))  # as models do
    assert mixer.in_proj.weight.shape == (128 + 128 + 128 + 128, 64)
    rates = mixer.decay.log_rate.exp()
    assert rates.min() >= 1
    assert rates.max() <= 16
    dt = torch.nn.functional.softplus(mixer.decay.dt_bias)
    assert dt.min() >= 0.000999
    assert dt.max() <= 0.1001
    assert (mixer.skip == 1).all()
    assert mixer.conv.bias is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 4}, "width 6 is not a multiple of num_heads 4"),
        ({"value_expansion": 0}, "value_expansion is 0"),
        ({"key_width": 0}, "key_width is 0"),
        ({"form": "fast"}, "form is 'fast'"),
        ({"direction": "alternating"}, "direction is 'alternating'"),
    ],
)
def test_impossible_fields_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(BOTH, changes).build(width=WIDTH, axes=1)
