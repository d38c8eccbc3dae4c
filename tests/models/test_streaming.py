"""Causal grids in several calls: row by row, or frame by frame, with a state."""

from inspect import unwrap

import pytest
import torch
from pairwise import pairwise

from onescan.configs import replace
from onescan.layers.mixers import (
    DeltaRuleMixerConfig,
    HGRNMixerConfig,
    KDAMixerConfig,
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
    LionMixerConfig,
    Mamba2MixerConfig,
    MambaMixerConfig,
    RWKV6MixerConfig,
    SoftmaxMixerConfig,
)
from onescan.layers.position import AbsolutePositionConfig, ToeplitzPositionConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.nn import MDTPE, DeltaAttention, LightNetAttention, LionAttention
from onescan.ops.lrpe import lrpe_angles
from onescan.shapes import Grid

WIDTH = 24
SHAPES = [(5, 3), (3, 1), (4, 3, 2)]
CAUSAL = {
    "lightnet": LightNetMixerConfig(num_heads=3, direction="forward"),
    "lightnet, separate decay": LightNetMixerConfig(
        num_heads=3, direction="forward", decay_logits="independent"
    ),
    "lightnet, no decay": LightNetMixerConfig(num_heads=3, direction="forward", decay=False),
    "lion": LionMixerConfig(direction="forward"),
    "lion, no normalization": LionMixerConfig(direction="forward", normalize="none"),
    "delta rule": DeltaRuleMixerConfig(direction="forward"),
    "lion, convolution": LionMixerConfig(direction="forward", conv_size=4, gate="silu"),
    "delta rule, convolution": DeltaRuleMixerConfig(direction="forward", conv_size=4, gate="silu"),
    "kda": KDAMixerConfig(direction="forward", gate_rank=4),
    "lightnet, convolution": LightNetMixerConfig(num_heads=3, direction="forward", conv_size=4),
    "hgrn": HGRNMixerConfig(direction="forward"),
    "mamba": MambaMixerConfig(direction="forward"),
    "mamba2": Mamba2MixerConfig(direction="forward", key_width=4),
    "rwkv6": RWKV6MixerConfig(direction="forward"),
    "linear diffusion": LinearDiffusionMixerConfig(direction="forward", separable=False),
    "linear diffusion, free": LinearDiffusionMixerConfig(direction="forward", kernel="free"),
    "softmax": SoftmaxMixerConfig(direction="forward"),
}
over_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


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


@pytest.mark.sampled(10)
@pairwise({"name": CAUSAL, "shape": SHAPES, "prefix": [0, 1]}, rest_is_slow=True, ids=str)
def test_a_causal_mixer_continues_a_grid_at_every_cut(name, shape, prefix):
    mixer = trained(CAUSAL[name], axes=len(shape))
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
    mixer = trained(LightNetMixerConfig(num_heads=3, direction="forward"), axes=2)
    _, state = mixer(tokens(1, 6), Grid((2, 3)))
    with pytest.raises(ValueError, match=r"^shape is \(1, 4\), but the state .* \(3,\) after"):
        mixer(tokens(1, 4), Grid((1, 4)), state=state)


VIDEO = ImageClassifierConfig(
    image_size=(5, 4, 6),
    patch_size=(1, 2, 2),
    channels=2,
    num_classes=3,
    width=WIDTH,
    depth=2,
    pool="mean",
    mixer=LightNetMixerConfig(num_heads=2, direction="forward"),
    position=ToeplitzPositionConfig(hidden_states=4),
    drop_path=0.0,
    init_std=0.3,
)
BY_ROW = {"image_size": (5, 6), "patch_size": (1, 2)}
MODELS = {
    "lightnet": VIDEO,
    "signal": replace(VIDEO, {"image_size": (5,), "patch_size": (1,)}),
    "image, row by row": replace(VIDEO, BY_ROW),
    "no position": replace(VIDEO, {"position": None}),
    "lion": replace(VIDEO, {"mixer": CAUSAL["lion"]}),
    "delta rule": replace(VIDEO, {"mixer": CAUSAL["delta rule"]}),
    "hgrn, lower bounds": replace(VIDEO, {"mixer": CAUSAL["hgrn"], "position": None}),
    "linear diffusion": replace(VIDEO, {"mixer": CAUSAL["linear diffusion"], "mlp": None}),
}


def clips(config, frames=None):
    frames = config.image_size[0] if frames is None else frames
    return torch.randn(2, config.channels, frames, *config.image_size[1:], dtype=torch.float64)


def bytes_of(state):
    if isinstance(state, torch.Tensor):
        return state.nbytes
    return sum(map(bytes_of, state)) if isinstance(state, tuple) else 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_a_model_reads_video_frame_by_frame(config):
    model, images = config.build().double(), clips(config).requires_grad_()
    leaves = [images, *model.blocks.parameters(), *model.patchify.parameters()]
    want = model.forward_features(images)
    direction = torch.randn_like(want)
    gradients = torch.autograd.grad((want * direction).sum(), leaves)
    for sizes in ((1, 1, 1, 1, 1), (2, 3), (5,)):
        state, parts, memory = None, [], set()
        for part in images.split(sizes, dim=2):
            y, state = model.stream(part, state)
            parts.append(y)
            memory.add(bytes_of(state))
        y = torch.cat(parts, dim=1)
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(torch.autograd.grad((y * direction).sum(), leaves), gradients)
        assert len(memory) == 1
    torch.testing.assert_close(model.forward_head(y), model(images))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mixer": LightNetMixerConfig(num_heads=2)}, "a mixer that is not causal"),
        ({"mixer": LionMixerConfig(direction="alternating")}, "a mixer that is not causal"),
        ({"mixer": CAUSAL["softmax"]}, "SoftmaxMixerConfig, whose state grows"),
        ({"pool": "mean_with_class_token"}, "1 prefix tokens, expected none"),
        ({"position": AbsolutePositionConfig()}, "position AbsolutePosition"),
        ({"position": ToeplitzPositionConfig(bidirectional=True)}, "bidirectional=True"),
        ({"position": ToeplitzPositionConfig(joint=True)}, "joint=True"),
    ],
)
def test_models_that_cannot_stream_say_why(change, message):
    config = replace(VIDEO, change)
    with pytest.raises(ValueError, match=message):
        config.build().double().stream(clips(config))


def test_a_stream_keeps_the_size_of_its_frames():
    model = VIDEO.build().double()
    _, state = model.stream(clips(VIDEO))
    with pytest.raises(
        ValueError, match=r"images have \(3, 2\) patches per step, expected \(2, 3\)"
    ):
        model.stream(clips(VIDEO).mT, state)
    deeper = replace(VIDEO, {"depth": VIDEO.depth + 1}).build().double()
    with pytest.raises(
        ValueError, match=rf"state is from a model with {VIDEO.depth} blocks, expected"
    ):
        deeper.stream(clips(VIDEO), state)
    with pytest.raises(ValueError, match="state is an int, expected a StreamState"):
        unwrap(type(model).stream)(model, clips(VIDEO), 0)


@pytest.mark.parametrize(
    "layer",
    [
        LightNetAttention(WIDTH, 3, axes=3, causal=True),
        LionAttention(WIDTH, 3, axes=3, causal=True),
        DeltaAttention(WIDTH, 3, axes=3, causal=True),
        MDTPE(WIDTH, axes=3, causal=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_continue_a_grid(layer):
    layer, x = layer.double(), tokens(2, 24)
    whole, _ = layer(x, (4, 3, 2), return_state=True)
    first, state = layer(x[:, :6], (1, 3, 2), return_state=True)
    rest = layer(x[:, 6:], (3, 3, 2), state=state)
    torch.testing.assert_close(torch.cat([first, rest], dim=1), whole)


def test_positions_in_both_directions_have_no_state():
    layer, x = MDTPE(WIDTH, axes=2).double(), tokens(2, 6)
    with pytest.raises(ValueError, match="return_state is True"):
        layer(x, (2, 3), return_state=True)
    _, state = MDTPE(WIDTH, axes=2, causal=True).double()(x, (2, 3), return_state=True)
    with pytest.raises(ValueError, match="state was given, expected a layer with causal=True"):
        layer(x, (2, 3), state=state)
