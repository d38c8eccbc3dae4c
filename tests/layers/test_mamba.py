"""Vim's mixer and Mamba against loops over tokens: values, gradients, masks, states and counts."""

from functools import partial

import pytest
import torch
from mixer_checks import gradients, silu
from mixer_checks import trained as trained_mixer
from pairwise import pairwise

from onescan.configs import replace
from onescan.layers.block import init_weights
from onescan.layers.mixers import MambaMixerConfig
from onescan.models.presets import preset
from onescan.models.size import model_size
from onescan.ops.decay_attention import decay_attention as op
from onescan.shapes import Grid

WIDTH = 6
BOTH = MambaMixerConfig(state_size=3, chunk_size=4)
CONFIGS = {
    "vim": BOTH,
    "mamba": replace(BOTH, {"direction": "forward"}),
    "backward": replace(BOTH, {"direction": "backward"}),
    "groups": replace(BOTH, {"num_heads": 3, "expand": 1, "conv_size": 2, "step_rank": 2}),
    "bare": replace(BOTH, {"gate": "none", "skip": False, "conv_size": 1}),
}
over_configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)

trained = partial(trained_mixer, width=WIDTH)


def tokens(*shape):
    return torch.randn(*shape, WIDTH, dtype=torch.float64, requires_grad=True)


def scan(ssm, xs):
    """Algorithm 2 of Mamba with the convolution of Fig. 3, for a list of inputs of one sequence."""
    size, groups, states = ssm.conv.kernel_size[0], ssm.config.num_heads, ssm.config.state_size
    inner = ssm.conv.out_channels
    a = -ssm.decay.log_rate.exp()
    h, outputs = torch.zeros(inner, states, dtype=torch.float64), []
    for t in range(len(xs)):
        u = ssm.conv.bias
        for lag in range(min(size, t + 1)):
            u = u + ssm.conv.weight[:, 0, size - 1 - lag] * xs[t - lag]
        u = silu(u)
        b, c = (ssm.key_query_proj.weight @ u).reshape(2, groups, states)
        b, c = (y.repeat_interleave(inner // groups, dim=0) for y in (b, c))
        z = ssm.decay.up_proj.weight @ (ssm.decay.down_proj.weight @ u) + ssm.decay.dt_bias
        dt = (1 + z.exp()).log().unsqueeze(-1)
        h = (dt * a).exp() * h + dt * b * u.unsqueeze(-1)
        y = (c * h).sum(-1)
        outputs.append(y if ssm.skip is None else y + ssm.skip * u)
    return outputs


def loop(mixer, x, keep=None):
    """Vim's Algorithm 1, one sequence at a time, over the real tokens only."""
    config, out = mixer.config, torch.zeros_like(x)
    for row in range(len(x)):
        real = [t for t in range(x.shape[1]) if keep is None or keep[row, t]]
        projected = [mixer.in_proj.weight @ x[row, t] for t in real]
        inner = mixer.out_proj.in_features
        inputs = [y[:inner] for y in projected]
        total = [0] * len(real)
        for ssm, backward in zip(mixer.scans, mixer.config.is_backward, strict=True):
            order = -1 if backward else 1
            outputs = scan(ssm, inputs[::order])[::order]
            total = [a + b for a, b in zip(total, outputs, strict=True)]
        for t, y, both in zip(real, total, projected, strict=True):
            gated = y * silu(both[inner:]) if config.gate == "silu" else y
            out[row, t] = mixer.out_proj.weight @ gated
    return out


@pairwise(
    {"name": CONFIGS, "count": [1, 2, 9], "form": ["auto", "chunk", "recurrent"]},
    rest_is_slow=True,
)
def test_the_mixer_is_the_papers_algorithm(name, count, form):
    mixer, x = trained(replace(CONFIGS[name], {"form": form})), tokens(2, count)
    y, want = mixer(x, Grid((count,)))[0], loop(mixer, x)
    torch.testing.assert_close(y, want, atol=1e-9, rtol=1e-9)
    found, expected = gradients(y, x, mixer), gradients(want, x, mixer)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


@over_configs
@pytest.mark.parametrize("chunk_size", [1, 4, 64])
def test_masked_tokens_are_skipped_everywhere(config, chunk_size):
    mixer, x = trained(replace(config, {"chunk_size": chunk_size})), tokens(2, 11)
    keep = torch.rand(2, 11) < 0.6
    y, want = mixer(x, Grid((11,)), keep=keep)[0], loop(mixer, x, keep)
    torch.testing.assert_close(y, want, atol=1e-9, rtol=1e-9)
    found, expected = gradients(y, x, mixer), gradients(want, x, mixer)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


@over_configs
def test_padding_on_the_left_changes_nothing(config):
    mixer, x = trained(config), tokens(2, 7)
    want, state = mixer(x, Grid((7,)))
    padded = torch.cat([tokens(2, 3), x], dim=1)
    keep = torch.arange(10).expand(2, -1) >= 3
    y, padded_state = mixer(padded, Grid((10,)), keep=keep)
    torch.testing.assert_close(y[:, 3:], want)
    torch.testing.assert_close(padded_state, state)


@pytest.mark.parametrize("cut", range(1, 7))
@pytest.mark.parametrize("masked", [False, True])
def test_two_calls_equal_one_at_every_cut(cut, masked):
    mixer, x = trained(CONFIGS["mamba"]), tokens(2, 7)
    keep = torch.rand(2, 7) < 0.7 if masked else None
    want, whole = mixer(x, Grid((7,)), keep=keep)
    outputs, state = [], None
    for part in (slice(cut), slice(cut, None)):
        piece, seen = x[:, part], None if keep is None else keep[:, part]
        y, state = mixer(piece, Grid((piece.shape[1],)), keep=seen, state=state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, dim=1), want)
    torch.testing.assert_close(state, whole)


@pytest.mark.parametrize("direction", ["both", "forward"])
@pytest.mark.parametrize("shape", [(3, 2), (1, 1), (5, 1)])
def test_prefix_tokens_may_be_read_in_the_middle(direction, shape):
    config = replace(BOTH, {"direction": direction, "prefix_position": "middle"})
    mixer, grid = trained(config, axes=2), Grid(shape, prefix=2)
    x, half = tokens(2, grid.tokens), shape[0] * shape[1] // 2
    keep = torch.rand(2, grid.tokens) < 0.8
    order = [*range(2, 2 + half), 0, 1, *range(2 + half, grid.tokens)]
    want = torch.zeros_like(x)
    want[:, order] = loop(mixer, x[:, order], keep[:, order])
    torch.testing.assert_close(mixer(x, grid, keep=keep)[0], want)


def test_a_class_token_in_the_middle_reads_half_of_the_grid_forward():
    config = MambaMixerConfig(direction="forward", prefix_position="middle")
    assert config.prefix_reads_grid
    assert not replace(config, {"prefix_position": "start"}).prefix_reads_grid
    mixer, grid = trained(config, axes=2), Grid((2, 4), prefix=1)
    x = tokens(1, 9)
    (gradient,) = torch.autograd.grad(mixer(x, grid)[0][0, 0].sum(), x)
    assert gradient[0].any(dim=-1).tolist() == [True] * 5 + [False] * 4


@pytest.mark.parametrize(("form", "runs"), [("auto", "recurrent"), ("chunk", "chunk")])
def test_a_cpu_visits_one_token_at_a_time_by_default(form, runs, monkeypatch):
    forms = []
    monkeypatch.setattr(
        "onescan.layers.mixers.mamba.decay_attention",
        lambda *args, **options: (forms.append(options["form"]), op(*args, **options))[1],
    )
    trained(replace(BOTH, {"form": form}))(tokens(1, 5), Grid((5,)))
    assert forms == [runs, runs]


def test_initial_values_are_mambas():
    mixer = MambaMixerConfig().build(width=64, axes=1)
    mixer.apply(partial(init_weights, std=0.02))  # as models do
    for ssm in mixer.scans:
        rates = ssm.decay.log_rate.exp()
        torch.testing.assert_close(rates, torch.arange(1.0, 17).expand(128, -1))
        dt = torch.nn.functional.softplus(ssm.decay.dt_bias)
        assert dt.min() >= 0.000999
        assert dt.max() <= 0.1001
        assert (ssm.skip == 1).all()
        weight = ssm.decay.up_proj.weight
        assert weight.shape == (128, 4)
        assert 0.4 < weight.abs().max() <= 4**-0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_size": 0}, "state_size is 0"),
        ({"expand": 0}, "expand is 0"),
        ({"conv_size": 0}, "conv_size is 0"),
        ({"step_rank": 0}, "step_rank is 0"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"direction": "alternating"}, "direction is 'alternating'"),
    ],
)
def test_impossible_fields_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        MambaMixerConfig(**changes).build(width=WIDTH, axes=1)


@pytest.mark.parametrize("field", ["direction", "prefix_position", "form"])
def test_unknown_names_are_errors(field):
    config = MambaMixerConfig()
    object.__setattr__(config, field, "sumn")  # past the tests' own check of types
    with pytest.raises(ValueError, match=f"{field} 'sumn' is unknown"):
        config.build(width=WIDTH, axes=1)


@pytest.mark.compile
def test_a_vim_classifier_compiles_and_exports_whole():
    model = preset("vim_tiny", width=24, depth=1, image_size=8, patch_size=2, num_classes=5)
    model, images = model.build().eval(), torch.randn(2, 3, 8, 8)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images), model(images))
    batch = torch.export.Dim("batch")
    exported = torch.export.export(model, (images,), dynamic_shapes=({0: batch},))
    more = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(exported.module()(more), model(more))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("size", "d", "depth"), [("tiny", 192, 24), ("small", 384, 24), ("base", 768, 24)]
)
def test_vim_has_exactly_the_parameters_of_its_equations(size, d, depth):
    e, n, rank = 2 * d, 16, d // 16
    direction = 4 * e + e + e * (rank + 2 * n) + rank * e + e + e * n + e
    block = d + d * 2 * e + 2 * direction + e * d
    patches, tokens = (3 * 16**2 + 1) * d, (14 * 14 + 1 + 1) * d  # class token and positions
    want = patches + tokens + depth * block + d + 1000 * (d + 1)
    assert model_size(preset(f"vim_{size}")).parameters == want


def test_mamba_has_exactly_the_parameters_of_its_equations():
    d, e, n, rank, depth, vocabulary = 1024, 2048, 16, 64, 50, 50272
    block = d + d * 2 * e + 4 * e + e + e * (rank + 2 * n) + rank * e + e + e * n + e + e * d
    want = vocabulary * d + depth * block + d
    assert model_size(preset("mamba_lm_385m")).parameters == want
