import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from onescan.data import (
    AffineConfig,
    DigitsConfig,
    ImageFormat,
    derive_seed,
    epoch_order,
    read_image,
)
from onescan.data.augment import affine_matrices

GREY = ImageFormat(channels=1, height=6, width=5, mean=(0.0,), std=(1.0,))
COLOUR = ImageFormat(channels=3, height=6, width=5, mean=(0.0,) * 3, std=(1.0,) * 3)


def test_digits_are_split_by_class_and_standardized():
    splits = DigitsConfig().build()
    assert (len(splits.train), len(splits.test)) == (1437, 360)
    assert splits.class_names == tuple("0123456789")
    assert splits.train.images.shape[1:] == (1, 8, 8)
    assert splits.train.labels.dtype == torch.int64
    assert splits.test.labels.bincount().min() >= 34  # of 36
    torch.testing.assert_close(splits.train.images.mean(), torch.tensor(0.0), atol=0.01, rtol=0)
    torch.testing.assert_close(splits.train.images.std(), torch.tensor(1.0), atol=0.01, rtol=0)
    pixels = splits.format.to_pixels(splits.train.images)
    torch.testing.assert_close(pixels.aminmax(), (torch.tensor(0.0), torch.tensor(1.0)))


def test_the_split_depends_on_its_seed_alone():
    first, again, other = (DigitsConfig(split_seed=seed).build() for seed in (0, 0, 1))
    torch.testing.assert_close(first.test.images, again.test.images, rtol=0, atol=0)
    assert not torch.equal(first.test.labels, other.test.labels)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, math.nan])
def test_digits_refuse_a_bad_split(fraction):
    with pytest.raises(ValueError, match=r"data\.test_fraction is .* expected between 0 and 1"):
        DigitsConfig(test_fraction=fraction).build()


@pytest.mark.parametrize(("fraction", "held"), [(0.00001, 1), (0.999, 1796)])
def test_digits_refuse_a_side_with_fewer_images_than_classes(fraction, held):
    says = rf"data\.test_fraction is {fraction}, which holds out {held} of 1797 .* 10 to 1787"
    with pytest.raises(ValueError, match=says):
        DigitsConfig(test_fraction=fraction).build()


def test_digits_refuse_a_bad_spread():
    with pytest.raises(ValueError, match=r"data\.std is 0"):
        DigitsConfig(std=0.0).build()


@given(count=st.integers(1, 50), seed=st.integers(0, 2**62), epoch=st.integers(0, 1000))
def test_the_order_of_an_epoch_is_a_function_of_seed_and_epoch(count, seed, epoch):
    order = epoch_order(count, seed=seed, epoch=epoch).clone()
    assert sorted(order.tolist()) == list(range(count))
    epoch_order.cache_clear()
    assert torch.equal(order, epoch_order(count, seed=seed, epoch=epoch))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(epoch_order(40, seed=s, epoch=e).tolist()) for s in range(3) for e in range(3)}
    assert len(orders) == 9


def test_derived_seeds_are_kept_across_versions():
    assert derive_seed(0, "step", 7) == 11425006106245048527
    assert len({derive_seed(s, name, i) for s in (0, 1) for name in "ab" for i in (0, 1)}) == 8


# Image files


def save(folder, array, mode=None, name="image.png", **options):
    image = array if isinstance(array, Image.Image) else Image.fromarray(array, mode)
    image.save(folder / name, **options)
    return folder / name


def grey_values():
    return np.arange(30, dtype=np.uint8).reshape(6, 5) * 8


def test_grey_is_read_exactly(tmp_path):
    path = save(tmp_path, grey_values())
    want = torch.from_numpy(grey_values() / 255).float()
    torch.testing.assert_close(read_image(path, GREY), want[None])
    torch.testing.assert_close(read_image(str(path), COLOUR), want.expand(3, 6, 5))


def test_an_image_is_standardized(tmp_path):
    path = save(tmp_path, np.full((6, 5), 255, dtype=np.uint8))
    format = ImageFormat(channels=1, height=6, width=5, mean=(0.5,), std=(0.25,))
    torch.testing.assert_close(read_image(path, format), torch.full((1, 6, 5), 2.0))


def test_colour_keeps_its_channels_in_order(tmp_path):
    colours = np.zeros((6, 5, 3), dtype=np.uint8)
    colours[..., 0], colours[..., 2] = 255, 51
    pixels = read_image(save(tmp_path, colours), COLOUR)
    torch.testing.assert_close(pixels[:, 0, 0], torch.tensor([1.0, 0.0, 0.2]))


def test_sixteen_bits_are_not_clipped_to_eight(tmp_path):
    values = np.linspace(0, 65535, 30).round().astype(np.uint16).reshape(6, 5)
    path = save(tmp_path, values)
    want = torch.from_numpy(values.astype(np.float32) / 65535)
    torch.testing.assert_close(read_image(path, GREY)[0], want)
    torch.testing.assert_close(read_image(path, COLOUR), want.expand(3, 6, 5))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
@pytest.mark.parametrize("format", [GREY, COLOUR])
def test_transparent_parts_become_black(tmp_path, mode, format):
    image = Image.new("LA", (5, 6), (255, 255)).convert(mode)
    alpha = Image.fromarray(np.repeat([[0, 51, 102, 255, 255]], 6, axis=0).astype(np.uint8))
    image.putalpha(alpha)
    pixels = read_image(save(tmp_path, image), format)
    want = torch.tensor([0.0, 0.2, 0.4, 1.0, 1.0]).expand(format.channels, 6, 5)
    torch.testing.assert_close(pixels, want)


def test_a_palette_is_resolved_and_its_transparent_colour_black(tmp_path):
    image = Image.new("P", (5, 6), 1)
    image.putpalette([0, 0, 0, 255, 0, 51, 9, 9, 9])
    torch.testing.assert_close(
        read_image(save(tmp_path, image), COLOUR)[:, 0, 0], torch.tensor([1.0, 0.0, 0.2])
    )
    path = save(tmp_path, image, name="transparent.png", transparency=1)
    torch.testing.assert_close(read_image(path, COLOUR), torch.zeros(3, 6, 5))


def test_cmyk_and_bilevel_are_converted(tmp_path):
    ink = Image.new("CMYK", (5, 6), (0, 255, 255, 0))
    pixels = read_image(save(tmp_path, ink, name="ink.tiff"), COLOUR)
    torch.testing.assert_close(pixels[:, 0, 0], torch.tensor([1.0, 0.0, 0.0]))
    white = read_image(save(tmp_path, Image.new("1", (5, 6), 1)), GREY)
    torch.testing.assert_close(white, torch.ones(1, 6, 5))


def test_another_size_is_resized_and_a_turned_photograph_is_upright(tmp_path):
    large = read_image(save(tmp_path, np.full((40, 30), 102, dtype=np.uint8)), GREY)
    torch.testing.assert_close(large, torch.full((1, 6, 5), 0.4))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    path = save(tmp_path, grey_values(), name="turned.png", exif=exif)
    want = torch.from_numpy(grey_values() / 255).float().flip(0, 1)
    torch.testing.assert_close(read_image(path, GREY)[0], want)


def test_what_is_no_image_is_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no image file .*nowhere\.png"):
        read_image(tmp_path / "nowhere.png", GREY)
    text = tmp_path / "text.png"
    text.write_text("not an image")
    with pytest.raises(ValueError, match=r"text\.png is not an image"):
        read_image(text, GREY)
    with pytest.raises(ValueError, match="is not an image file, nor any file"):
        read_image(tmp_path, GREY)
    floats = save(tmp_path, np.ones((6, 5), dtype=np.float32), name="floats.tiff")
    with pytest.raises(ValueError, match=r"floats\.tiff cannot be read as an image: its pixels"):
        read_image(floats, GREY)


@pytest.mark.parametrize("name", ["image.png", "image.jpg", "image.gif", "image.tiff", "image.bmp"])
@pytest.mark.parametrize("part", [0.3, 0.6, 0.9])
def test_a_truncated_image_is_refused_by_name(tmp_path, name, part):
    noise = np.random.default_rng(0).integers(0, 256, (40, 40), dtype=np.uint8)
    path = save(tmp_path, noise, name=name)
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    with pytest.raises(ValueError, match=f"{path.name} "):
        read_image(path, GREY)


# Augmentation


def augmented(images, config, seed=0):
    channels, height, width = images.shape[1:]
    format = ImageFormat(
        channels=channels, height=height, width=width, mean=(0.5,) * channels, std=(2.0,) * channels
    )
    return config.build(format)(images, torch.Generator().manual_seed(seed))


def test_no_range_changes_nothing():
    images = torch.randn(3, 2, 7, 5)
    config = AffineConfig(degrees=0.0, shift=0.0, scale=0.0)
    torch.testing.assert_close(augmented(images, config), images)


def test_every_image_has_its_own_chance_and_equal_seeds_agree():
    images = torch.randn(1, 1, 8, 8).repeat(3, 1, 1, 1)
    first, again, other = (augmented(images, AffineConfig(), seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])


def test_what_comes_in_is_the_fill():
    images = torch.full((20, 1, 8, 8), 0.25)  # pixels of 1 at mean 0.5, std 2
    moved = augmented(images, AffineConfig(shift=0.9, fill=0.0))
    assert moved.min() == -0.25
    torch.testing.assert_close(augmented(images, AffineConfig(shift=0.9, fill=1.0)), images)


def matrices(**changes):
    plain = {"angle": 0.0, "zoom": 1.0, "shift_x": 0.0, "shift_y": 0.0}
    values = {name: torch.tensor([value]) for name, value in (plain | changes).items()}
    return affine_matrices(**values, aspect=9 / 5)


def warped(**changes):
    """A picture of 5 x 9 with one white pixel, two to the right of the centre."""
    image = torch.zeros(1, 1, 5, 9)
    image[0, 0, 2, 6] = 1.0
    grid = torch.nn.functional.affine_grid(matrices(**changes), [1, 1, 5, 9], align_corners=False)
    return torch.nn.functional.grid_sample(image, grid, align_corners=False)[0, 0]


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({}, (2, 6)),
        ({"angle": math.pi / 2}, (0, 4)),  # rotated, not sheared, though the sides differ
        ({"angle": math.pi}, (2, 2)),
        ({"shift_x": 1 / 9}, (2, 7)),
        ({"shift_y": 1 / 5}, (3, 6)),
        ({"zoom": 2.0}, (2, 8)),
    ],
)
def test_a_point_goes_where_it_should(changes, place):
    assert warped(**changes)[place] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (AffineConfig(degrees=-1.0), r"augment\.degrees is -1"),
        (AffineConfig(shift=math.nan), r"augment\.shift is nan"),
        (AffineConfig(scale=1.0), r"augment\.scale is 1.0, expected less than 1"),
    ],
)
def test_augmentation_refuses_bad_ranges(config, says):
    with pytest.raises(ValueError, match=says):
        config.build(GREY)
