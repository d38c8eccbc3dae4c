"""Causal grids in several calls: row by row, or frame by frame, with a state."""

import pytest
import torch

from onescan.layers.mixers import (
    DeltaRuleMixerConfig,
    HGRNMixerConfig,
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
    LionMixerConfig,
    MambaMixerConfig,
    RWKV6MixerConfig,
    SoftmaxMixerConfig,
)
from onescan.ops.lrpe import lrpe_angles
from onescan.shapes import Grid

WIDTH = 24
SHAPES = [(5, 3), (3, 1), (4, 3, 2)]
CAUSAL = {
    "lightnet": LightNetMixerConfig(num_heads=3, causal=True),
    "lightnet, separate decay": LightNetMixerConfig(
        num_heads=3, causal=True, decay_logits="independent"
    ),
    "lightnet, no decay": LightNetMixerConfig(num_heads=3, causal=True, decay=False),
    "lion": LionMixerConfig(direction="forward"),
    "lion, no normalization": LionMixerConfig(direction="forward", normalize="none"),
    "delta rule": DeltaRuleMixerConfig(direction="forward"),
    "hgrn": HGRNMixerConfig(direction="forward"),
    "mamba": MambaMixerConfig(direction="forward"),
    "rwkv6": RWKV6MixerConfig(direction="forward"),
    "linear diffusion": LinearDiffusionMixerConfig(causal=True, separable=False),
    "softmax": SoftmaxMixerConfig(causal=True),
}
over_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
over_causal = pytest.mark.parametrize("config", CAUSAL.values(), ids=CAUSAL)


def tokens(*shape):
    return torch.randn(*shape, WIDTH, dtype=torch.float64)


def trained(config, axes):
    mixer = config.build(width=WIDTH, axes=axes).double()
    for parameter in mixer.parameters():
        with torch.no_grad():
            parameter += 0.1 * torch.randn_like(parameter)
    return mixer


def in_two_calls(mixer, x, shape, cut, prefix):
    end = prefix + Grid((cut, *shape[1:])).tokens
    first, state = mixer(x[:, :end], Grid((cut, *shape[1:]), prefix=prefix))
    rest, _ = mixer(x[:, end:], Grid((shape[0] - cut, *shape[1:])), state=state)
    return torch.cat([first, rest], dim=1)


@over_causal
@over_shapes
@pytest.mark.parametrize("prefix", [0, 1])
def test_a_causal_mixer_continues_a_grid_at_every_cut(config, shape, prefix):
    mixer = trained(config, axes=len(shape))
    x = tokens(2, Grid(shape, prefix=prefix).tokens).requires_grad_()
    leaves = [x, *mixer.parameters()]
    want, _ = mixer(x, Grid(shape, prefix=prefix))
    direction = torch.randn_like(want)
    gradients = torch.autograd.grad((want * direction).sum(), leaves)
    for cut in range(1, shape[0]):
        y = in_two_calls(mixer, x, shape, cut, prefix)
        torch.testing.assert_close(y, want)
        ours = torch.autograd.grad((y * direction).sum(), leaves)
        torch.testing.assert_close(ours, gradients)


@over_shapes
def test_angles_continue_along_the_first_axis(shape):
    theta = torch.randn(2, 6, dtype=torch.float64)
    whole = lrpe_angles(shape, theta).unflatten(0, shape)
    for cut in range(shape[0]):
        rest = lrpe_angles((shape[0] - cut, *shape[1:]), theta, start=cut)
        torch.testing.assert_close(rest.unflatten(0, (-1, *shape[1:])), whole[cut:])


@pytest.mark.parametrize("name", ["lightnet", "lion", "delta rule", "hgrn", "mamba", "rwkv6"])
def test_a_prefix_comes_first(name):
    mixer = trained(CAUSAL[name], axes=2)
    _, state = mixer(tokens(1, 6), Grid((2, 3)))
    with pytest.raises(ValueError, match=r"state was given with Grid\(.*expected no prefix"):
        mixer(tokens(1, 7), Grid((2, 3), prefix=1), state=state)


def test_a_state_continues_whole_rows():
    mixer = trained(LightNetMixerConfig(num_heads=3, causal=True), axes=2)
    _, state = mixer(tokens(1, 6), Grid((2, 3)))
    with pytest.raises(ValueError, match=r"state.position is 6 .* expected a multiple of 4"):
        mixer(tokens(1, 4), Grid((1, 4)), state=state)
