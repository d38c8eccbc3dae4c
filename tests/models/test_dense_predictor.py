"""Dense prediction: any size and number of axes, padding that changes nothing, both decoders."""

import pytest
import torch

from onescan import configs
from onescan.inputs import pad_images
from onescan.layers.mixers import (
    GatedDeltaNetMixerConfig,
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
    LionMixerConfig,
    SoftmaxMixerConfig,
)
from onescan.layers.position import AbsolutePositionConfig
from onescan.layers.pyramid import PyramidDecoder, upsampling_steps
from onescan.models.dense_predictor import DensePredictorConfig
from onescan.models.image_classifier import ImageClassifierConfig

SMALL = {"width": 12, "depth": 2, "drop_path": 0.0, "init_std": 0.3, "channels": 2}
MIXERS = {
    "lightnet": LightNetMixerConfig(num_heads=2),
    "lion, natural": LionMixerConfig(num_heads=2, scan="natural"),
    "delta": GatedDeltaNetMixerConfig(num_heads=2),
    "softmax": SoftmaxMixerConfig(num_heads=2),
}
GRIDS = {  # patch size, and sizes of a batch of grids
    "signals": ((10,), ((34,), (7,), (40,), (1,))),
    "images": ((4, 2), ((9, 7), (4, 4), (3, 1), (12, 8))),
    "pixels": ((1, 1), ((3, 4), (2, 2))),
    "volumes": ((2, 1, 3), ((5, 2, 7), (2, 3, 3), (4, 1, 4))),
}
over_decoders = pytest.mark.parametrize("decoder", ["pyramid", "linear"])


def built(patch_size, **changes):
    config = DensePredictorConfig(
        **{
            **SMALL,
            "patch_size": patch_size,
            "image_size": tuple(3 * p for p in patch_size),
            "out_channels": 3,
            "mixer": MIXERS["lightnet"],
            **changes,
        }
    )
    return config.build().double().eval()


@over_decoders
@pytest.mark.parametrize("grids", GRIDS)
@pytest.mark.parametrize(
    "mixer", [pytest.param(m, marks=() if m == "lightnet" else pytest.mark.slow) for m in MIXERS]
)
def test_padding_changes_neither_outputs_nor_gradients(mixer, grids, decoder):
    patch_size, sizes = GRIDS[grids]
    model = built(patch_size, mixer=MIXERS[mixer], decoder=decoder)
    images = [torch.randn(2, *size, dtype=torch.float64) for size in sizes]
    weights = [torch.randn(3, *size, dtype=torch.float64) for size in sizes]
    batch, keep = pad_images(images)
    batch = batch.masked_fill(~keep.unsqueeze(1), torch.nan)
    together = model(batch, keep)
    assert together.shape == (len(sizes), 3, *batch.shape[2:])
    assert not together.movedim(1, -1)[~keep].any()
    losses = torch.zeros(2, dtype=torch.float64)
    for image, weight, y, size in zip(images, weights, together, sizes, strict=True):
        (alone,) = model(image.unsqueeze(0))
        own = y[(slice(None), *map(slice, size))]
        assert alone.shape == weight.shape
        torch.testing.assert_close(own, alone, rtol=1e-9, atol=1e-9)
        losses = losses + torch.stack([(alone * weight).sum(), (own * weight).sum()])
    names, parameters = zip(*model.named_parameters(), strict=True)
    expected, found = (torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses)
    for name, a, b in zip(names, expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-8, msg=name)
        assert a.any(), name


@over_decoders
def test_zeros_complete_the_last_patches(decoder):
    model = built((4, 4), decoder=decoder)
    images = torch.randn(2, 2, 7, 9, dtype=torch.float64)
    whole = torch.zeros(2, 2, 8, 12, dtype=torch.float64)
    whole[:, :, :7, :9] = images
    torch.testing.assert_close(model(images), model(whole)[:, :, :7, :9])


def test_a_linear_decoder_maps_each_token_to_its_patch():
    model = built((2, 3), decoder="linear")
    seen = []
    model.norm.register_forward_hook(lambda *given: seen.append(given[-1]))
    y = model(torch.randn(1, 2, 4, 9, dtype=torch.float64))
    (tokens,) = seen
    for row in range(2):
        for column in range(3):
            patch = model.decoder.proj(tokens[0, 3 * row + column]).view(3, 2, 3)
            found = y[0, :, 2 * row : 2 * row + 2, 3 * column : 3 * column + 3]
            torch.testing.assert_close(found, patch)


def test_a_pyramid_reads_evenly_spaced_blocks():
    model = built((16, 16), depth=12)
    assert model.decoder.levels == 4
    assert model._blocks_read == [8, 5, 2]
    assert built((1, 1))._blocks_read == []
    assert built((16, 4), depth=1)._blocks_read == [0, 0, 0]


@pytest.mark.parametrize("patch_size", [(1,), (12,), (7, 2), (4, 16), (2, 3, 30)])
def test_upsampling_steps_multiply_to_the_patch(patch_size):
    steps = upsampling_steps(patch_size)
    product = torch.tensor([[1] * len(patch_size), *steps]).prod(dim=0)
    assert product.tolist() == list(patch_size)
    assert all(max(step) > 1 for step in steps) or steps == ((1,) * len(patch_size),)


def test_a_pyramid_is_what_its_docstring_says():
    decoder = PyramidDecoder(8, 2, 3, (2, 6)).double()
    features = [torch.randn(1, 8, 2, 1, dtype=torch.float64) for _ in range(decoder.levels)]
    images = torch.randn(1, 2, 4, 6, dtype=torch.float64)
    assert decoder.steps == ((1, 3), (2, 2))

    def norm(x, layer):
        x = x - x.mean(dim=1, keepdim=True)
        x = x * (x.square().mean(dim=1, keepdim=True) + layer.eps).rsqrt()
        return x * layer.weight.view(1, -1, 1, 1) + layer.bias.view(1, -1, 1, 1)

    def merge(block, *parts):
        x = torch.cat(parts, dim=1)
        y = torch.nn.functional.gelu(norm(block.first(x), block.first_norm))
        y = norm(block.second(y), block.second_norm)
        return torch.nn.functional.gelu(y + block.around(x))

    x = merge(decoder.merge[0], decoder.upsample[0](features[0]), decoder.skips[0](features[1]))
    assert x.shape == (1, 8, 2, 3)  # no fewer channels than the width, if it is below 16
    x = merge(decoder.merge[1], decoder.upsample[1](x), decoder.stem(images))
    torch.testing.assert_close(decoder(features, images, None), decoder.head(x))


def test_weights_of_a_classifier_fit():
    fields = {"patch_size": (4, 4), "image_size": (12, 12), "mixer": MIXERS["lightnet"]}
    classifier = ImageClassifierConfig(
        **{**SMALL, **fields}, pool="mean", position=DensePredictorConfig().position
    ).build()
    model = built((4, 4))
    result = model.load_state_dict(classifier.state_dict(), strict=False)
    assert set(result.unexpected_keys) == {"head.weight", "head.bias"}
    assert all(key.startswith("decoder.") for key in result.missing_keys)


def test_the_config_survives_a_file():
    config = built((2, 2), decoder="linear").config
    stored = configs.to_dict(config)
    assert configs.from_dict(DensePredictorConfig, stored) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out_channels": 0}, "out_channels is 0"),
        ({"drop_path": 1.0}, "drop_path is 1.0"),
        ({"image_size": (8,)}, r"patch_size is \(4, 4\), which has 2 axes, expected 1"),
        (
            {"patch_size": (2,) * 4, "image_size": (4,) * 4, "mixer": MIXERS["softmax"]},
            "decoder is 'pyramid' with 4 axes, but convolutions support at most 3",
        ),
    ],
)
def test_impossible_fields_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        built(changes.pop("patch_size", (4, 4)), **changes)


def test_what_padding_would_change_is_refused():
    images, keep = pad_images([torch.randn(2, 4, 4).double(), torch.randn(2, 8, 8).double()])
    with pytest.raises(ValueError, match="keep was given with absolute positions"):
        built((4, 4), position=AbsolutePositionConfig())(images, keep)
    flat = built((4, 4), mixer=LinearDiffusionMixerConfig(num_heads=2))
    with pytest.raises(ValueError, match="keep was given with separable=False"):
        flat(images, keep)
    with pytest.raises(ValueError, match="keep has shape"):
        built((4, 4))(images, keep[:, :4])
    four = built((2,) * 4, image_size=(4,) * 4, decoder="linear", mixer=MIXERS["softmax"])
    assert four(torch.randn(1, 2, 3, 4, 5, 2, dtype=torch.float64)).shape == (1, 3, 3, 4, 5, 2)
