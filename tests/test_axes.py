"""Models, data and commands with one, two and three axes."""

from itertools import pairwise

import pytest
import torch

import onescan
from onescan.data import MovingDigitsConfig
from onescan.models.denoiser import DenoiserConfig
from onescan.models.image_classifier import ImageClassifierConfig

SIGNAL = {"image_size": (40,), "patch_size": (10,)}
VIDEO = {"image_size": (4, 8, 8), "patch_size": (2, 4, 4)}
SIZES = [SIGNAL, VIDEO, {"image_size": (2, 4, 4, 6), "patch_size": (1, 2, 2, 3)}]


@pytest.mark.parametrize("sizes", SIZES, ids=["signal", "video", "four axes"])
@pytest.mark.parametrize("name", ["lightnet_tiny", "lion_s_natural_tiny", "lightnet_dit_s_8"])
def test_presets_build_with_any_axes(name, sizes):
    model = onescan.build(name, **sizes, num_classes=3, width=48, depth=2)
    inputs = model.config.example_inputs()
    assert inputs[0].shape == (1, model.config.channels, *sizes["image_size"])
    output = model.eval()(*inputs)
    assert output.shape in {(1, 3), (1, 8, *sizes["image_size"])}


def test_one_number_stands_for_all_axes():
    assert onescan.preset("lightnet_tiny", image_size=32).image_size == (32, 32)
    config = onescan.preset("lightnet_tiny", image_size=(8, 32, 32), patch_size=8)
    assert config.patch_size == (8, 8, 8)


@pytest.mark.parametrize("config", [ImageClassifierConfig, DenoiserConfig])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"image_size": (8, 8, 8), "patch_size": (2, 2)}, "has 2 axes, expected 3"),
        ({"image_size": (), "patch_size": ()}, r"image_size is \(\), expected one number per axis"),
        ({"image_size": (8, 0), "patch_size": (2, 2)}, r"image_size\[1\] is 0"),
        ({"image_size": (8,), "patch_size": (-2,)}, r"patch_size\[0\] is -2"),
    ],
)
def test_sizes_are_checked(config, sizes, message):
    with pytest.raises(ValueError, match=message):
        config(**sizes).build()


def test_moving_digits():
    splits, again = (MovingDigitsConfig().build() for _ in range(2))
    assert torch.equal(torch.from_numpy(splits.train.x), torch.from_numpy(again.train.x))
    assert len(splits.train) + len(splits.test) == 4 * 1797
    assert splits.class_names[:4] == ("0 left", "0 right", "0 up", "0 down")
    assert not {p // 4 for p in splits.train.places.tolist()} & {
        p // 4 for p in splits.test.places.tolist()
    }
    for direction, (row, column) in enumerate([(0, -1), (0, 1), (-1, 0), (1, 0)]):
        video = torch.from_numpy(splits.train.x[direction])  # the first digit's videos
        assert video.shape == (8, 16, 16)
        for frame, after in pairwise(video):
            assert torch.equal(after, frame.roll((row, column), dims=(0, 1)))
            assert after.sum() == frame.sum() > 0
    other = MovingDigitsConfig(position_seed=1).build()
    assert not torch.equal(torch.from_numpy(splits.train.x), torch.from_numpy(other.train.x))


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"frames": 1}, "frames is 1, expected 2"), ({"size": 14}, "size is 14, expected 15")],
)
def test_moving_digits_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        MovingDigitsConfig(**fields).build()
