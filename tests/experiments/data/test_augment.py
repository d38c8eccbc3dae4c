import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from onescan.experiments.data.augment import (
    AffineConfig,
    DeitAugmentConfig,
    MixConfig,
    RandAugment,
    affine_matrices,
    operation_table,
)

OFF = {"pad": 0, "flip": 0.0, "num_ops": 0, "color_jitter": 0.0, "random_erasing": 0.0}
EVERYTHING = DeitAugmentConfig(pad=2, color_jitter=0.3, random_erasing=0.5)


def only(**on):
    return DeitAugmentConfig(**(OFF | on)).build()


def some_images(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


# Every augmentation


@pytest.mark.parametrize("config", [AffineConfig(), EVERYTHING])
def test_augmentation_is_a_function_of_the_seed_and_independent_for_each_image(config):
    images, augment = some_images(16, 3, 8, 8), config.build()
    before, state = images.clone(), torch.get_rng_state()
    first = augment(images, 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(images, before)
    torch.manual_seed(7)
    assert torch.equal(augment(images, 0), first)
    assert not torch.equal(augment(images, 1), first)
    augment(images, 2**64 - 1)  # the largest derived seed
    equal = augment(images[:1].repeat(12, 1, 1, 1), 0)
    assert len({tuple(image.flatten().tolist()) for image in equal}) > 6


@pytest.mark.parametrize(
    ("shape", "channels", "dtype"),
    [
        ((1, 1), 1, torch.float32),
        ((1, 1), 3, torch.bfloat16),
        ((2, 2), 3, torch.float64),
        ((33, 17), 3, torch.float32),
        ((33, 17), 1, torch.bfloat16),
        ((5, 40), 1, torch.float64),
    ],
)
@pytest.mark.parametrize("config", [AffineConfig(), DeitAugmentConfig(), EVERYTHING])
def test_size_type_and_range_are_kept(config, shape, channels, dtype):
    images = some_images(40, channels, *shape).to(dtype)
    augmented = config.build()(images, 3)
    assert (augmented.shape, augmented.dtype) == (images.shape, dtype)
    assert augmented.isfinite().all()
    assert augmented.min() >= 0
    assert augmented.max() <= 1
    wide = config.build()(images.float(), 3)
    assert torch.equal(augmented, wide.to(dtype))  # computed in float32


@pytest.mark.gpu
@pytest.mark.parametrize("config", [AffineConfig(), replace(EVERYTHING, random_erasing=0.0)])
def test_cpu_and_gpu_agree_except_for_noise(config):
    images, state = some_images(32, 3, 16, 16), torch.cuda.get_rng_state()
    got = config.build()(images.cuda(), 5)
    EVERYTHING.build()(images.cuda(), 5)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    torch.testing.assert_close(got.cpu(), config.build()(images, 5), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("kind", "name", "value", "expected"),
    [
        (AffineConfig, "degrees", -1.0, "0 or more"),
        (AffineConfig, "translate", math.nan, ""),
        (AffineConfig, "translate", math.inf, ""),
        (AffineConfig, "scale", 1.0, "less than 1"),
        (AffineConfig, "fill", 2.0, "0 to 1"),
        (DeitAugmentConfig, "random_erasing", 1.5, "0 to 1"),
        (DeitAugmentConfig, "flip", -0.1, ""),
        (DeitAugmentConfig, "pad", -1, ""),
        (DeitAugmentConfig, "num_ops", -1, ""),
        (DeitAugmentConfig, "magnitude", 11.0, "0 to 10"),
        (DeitAugmentConfig, "magnitude_std", math.nan, ""),
        (DeitAugmentConfig, "color_jitter", 2.0, ""),
        (MixConfig, "mixup_alpha", -1.0, ""),
        (MixConfig, "cutmix_alpha", math.inf, ""),
        (MixConfig, "probability", 1.1, "0 to 1"),
        (MixConfig, "switch_probability", 2.0, ""),
    ],
)
def test_fields_out_of_range(kind, name, value, expected):
    with pytest.raises(ValueError, match=rf"task\.\w+\.{name} is {value}, expected {expected}"):
        kind(**{name: value}).build()


def test_mixing_needs_an_alpha_and_augmentation_known_channels():
    with pytest.raises(ValueError, match=r"task\.mix\.mixup_alpha and .* are 0"):
        MixConfig(mixup_alpha=0.0, cutmix_alpha=0.0).build()
    with pytest.raises(ValueError, match=r"1 or 3 channels.* 4"):
        EVERYTHING.build()(torch.zeros(1, 4, 8, 8), 0)


# Affine


def test_the_outside_is_filled():
    white = torch.ones(20, 1, 8, 8)
    assert AffineConfig(translate=0.9, fill=0.25).build()(white, 0).min() == 0.25
    torch.testing.assert_close(AffineConfig(translate=0.9, fill=1.0).build()(white, 0), white)


def matrices(**changes):
    plain = {"angle": 0.0, "zoom": 1.0, "shift_x": 0.0, "shift_y": 0.0}
    values = {name: torch.tensor([value]) for name, value in (plain | changes).items()}
    return affine_matrices(**values, aspect=9 / 5)


def warped(**changes):
    """Move an image of 5 x 9 with one white pixel, two to the right of the center."""
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
def test_a_point_moves_as_expected(changes, place):
    assert warped(**changes)[place] == pytest.approx(1.0, abs=1e-5)


# DeiT


def test_disabled_steps_and_zero_strengths_change_nothing():
    images, none = some_images(2, 3, 9, 9), torch.zeros(2)
    assert torch.equal(only()(images, 0), images)
    still = AffineConfig(degrees=0.0, translate=0.0, scale=0.0).build()
    torch.testing.assert_close(still(images, 0), images)
    for name, operation in operation_table().items():
        if name not in ("auto_contrast", "equalize", "invert", "posterize"):
            torch.testing.assert_close(operation(images, none), images, msg=name)
    gray, flat = some_images(2, 1, 4, 4), torch.full((1, 3, 4, 4), 0.7)
    assert torch.equal(operation_table()["color"](gray, torch.ones(2)), gray)
    torch.testing.assert_close(operation_table()["auto_contrast"](flat, torch.ones(1)), flat)


def test_flips_have_their_probability():
    images = some_images(2000, 1, 2, 3)
    flipped = only(flip=0.3)(images, 0)
    is_flipped = (flipped == images.flip(-1)).all(dim=(1, 2, 3))
    is_same = (flipped == images).all(dim=(1, 2, 3))
    assert (is_flipped ^ is_same).all()
    assert is_flipped.float().mean().item() == pytest.approx(0.3, abs=0.04)  # four deviations


def test_padding_shifts_uniformly_over_black():
    images = torch.zeros(3000, 1, 5, 7)
    images[:, :, 2, 3] = 1.0
    places = only(pad=2)(images, 0).flatten(1).argmax(dim=1)
    rows, columns = places // 7 - 2, places % 7 - 3
    counts = torch.bincount((rows + 2) * 5 + columns + 2, minlength=25)
    assert ((counts - 120).abs() < 50).all()  # 25 shifts, 120 expected of each
    assert (only(pad=40)(torch.ones(9, 3, 4, 4), 0) == 0).any()


def test_color_jitter_stays_within_its_range():
    gray = torch.full((500, 1, 2, 2), 0.5)  # flat, so contrast changes nothing
    values = only(color_jitter=0.4)(gray, 0)[:, 0, 0, 0]
    assert values.min() == pytest.approx(0.3, abs=0.01)
    assert values.max() == pytest.approx(0.7, abs=0.01)


def test_erased_rectangles_have_their_probability_and_area_and_are_noise():
    images = torch.full((3000, 3, 32, 32), -1.0)  # noise is never -1
    values = only(random_erasing=0.25)(images, 0)
    erased = values != -1.0
    assert torch.equal(erased.any(dim=1), erased.all(dim=1))
    share = erased[:, 0].float().mean(dim=(1, 2))
    touched = share > 0
    assert touched.float().mean().item() == pytest.approx(0.25, abs=0.032)
    assert share[touched].mean().item() == pytest.approx((0.02 + 1 / 3) / 2, abs=0.014)
    heights, widths = (erased[:, 0].any(dim=axis).sum(dim=1) for axis in (2, 1))
    assert torch.equal(heights * widths, erased[:, 0].sum(dim=(1, 2)))
    noise = values[erased]
    assert noise.mean().item() == pytest.approx(0.5, abs=0.01)
    assert noise.std().item() == pytest.approx(0.24, abs=0.01)  # 0.25, cut at 0 and 1
    assert len(noise[:9999].unique()) > 0.8 * 9999


@pytest.mark.parametrize(
    ("name", "value"), [("num_ops", 1), ("color_jitter", 0.1), ("random_erasing", 0.1)]
)
def test_a_missing_kornia_is_named(monkeypatch, name, value):
    monkeypatch.setitem(sys.modules, "kornia", None)
    with pytest.raises(
        ImportError, match=rf"{name} is {value}, which needs kornia.*onescan\[vision\]"
    ):
        only(**{name: value})


@pytest.mark.parametrize(("count", "pad", "flip"), [(1, 0, 0.5), (5, 4, 1.0), (70, 2, 0.3)])
def test_flips_and_crops_equal_those_of_kornia_without_it(monkeypatch, count, pad, flip):
    from kornia.augmentation import RandomCrop, RandomHorizontalFlip

    images = some_images(count, 3, 6, 9)
    torch.manual_seed(3)
    expected = RandomCrop((6, 9), padding=pad)(images) if pad else images
    expected = RandomHorizontalFlip(p=flip)(expected)
    for name in [name for name in sys.modules if name.partition(".")[0] == "kornia"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert torch.equal(only(pad=pad, flip=flip)(images, 3), expected)


# RandAugment, against pillow


def fill_in(image, matrix):
    """Move an image: pixel x of the result is pixel `matrix` x, counted from the top left one."""
    a, b, c, d, e, f = matrix  # pillow's origin is the corner of that pixel, not its center
    moved = (a, b, c - (a + b - 1) / 2, d, e, f - (d + e - 1) / 2)
    bilinear = Image.Resampling.BILINEAR
    return image.transform(
        image.size, Image.Transform.AFFINE, moved, bilinear, fillcolor=(128,) * 3
    )


def posterize(image, bits):
    """Zero bits give black, which Pillow 13 refuses."""
    return ImageOps.posterize(image, bits) if bits else Image.new(image.mode, image.size)


PILLOW = {
    "auto_contrast": lambda image, s: ImageOps.autocontrast(image),
    "equalize": lambda image, s: ImageOps.equalize(image),
    "invert": lambda image, s: ImageOps.invert(image),
    "rotate": lambda image, s: image.rotate(
        30 * s, Image.Resampling.BILINEAR, fillcolor=(128, 128, 128)
    ),
    "posterize": lambda image, s: posterize(image, 4 - int(4 * abs(s))),
    "solarize": lambda image, s: ImageOps.solarize(image, 256 - int(256 * abs(s))),
    "solarize_add": lambda image, s: image.point(
        [min(255, v + int(110 * abs(s))) if v < 128 else v for v in range(256)] * 3
    ),
    "color": lambda image, s: ImageEnhance.Color(image).enhance(1 + 0.9 * s),
    "contrast": lambda image, s: ImageEnhance.Contrast(image).enhance(1 + 0.9 * s),
    "brightness": lambda image, s: ImageEnhance.Brightness(image).enhance(1 + 0.9 * s),
    "sharpness": lambda image, s: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * s),
    "shear_x": lambda image, s: fill_in(image, (1, -0.3 * s, 0, 0, 1, 0)),
    "shear_y": lambda image, s: fill_in(image, (1, 0, 0, -0.3 * s, 1, 0)),
    "translate_x": lambda image, s: fill_in(image, (1, 0, -0.45 * s * 24, 0, 1, 0)),
    "translate_y": lambda image, s: fill_in(image, (1, 0, 0, 0, 1, -0.45 * s * 16)),
}


@pytest.mark.parametrize("name", PILLOW)
@pytest.mark.parametrize("strength", [0.3, -0.3, 0.9, -0.9, 1.0])
def test_operations_agree_with_pillow(name, strength):
    assert list(operation_table()) == list(PILLOW)
    values = torch.nn.functional.interpolate(some_images(2, 3, 4, 6), (16, 24), mode="bilinear")
    values = (20 + 220 * values).round().byte()
    got = operation_table()[name](values.float() / 255, torch.tensor([strength, 0.5]))
    image = Image.fromarray(values[0].permute(1, 2, 0).numpy())
    want = torch.from_numpy(np.array(PILLOW[name](image, strength))).permute(2, 0, 1)
    difference = (got[0] * 255 - want).abs()
    is_moved = name.startswith(("rotate", "shear", "translate"))
    # Pillow does not interpolate with the outside, so edges of moved images may differ
    assert (difference <= 2.0).float().mean() >= (0.9 if is_moved else 1.0)


def test_operations_stay_within_0_to_1():
    images = torch.cat([torch.full((100, 3, 32, 32), value) for value in (0.0, 1.0)])
    strengths = torch.linspace(-1, 1, 100).repeat(2)
    for name, operation in operation_table().items():
        changed = operation(images, strengths)
        assert changed.min() >= 0, name
        assert changed.max() <= 1, name


def test_operations_are_applied_with_probability_one_half():
    images = some_images(1, 3, 8, 8).repeat(3000, 1, 1, 1)
    for operations in (1, 3):
        same = (only(num_ops=operations)(images, 0) == images).all(dim=(1, 2, 3))
        assert same.float().mean().item() == pytest.approx(0.5**operations, abs=0.037)


def test_operations_are_drawn_uniformly():
    seen = []
    augment = RandAugment(1, 9.0, 0.5)
    augment.table = [
        lambda x, s, place=place: seen.extend([place] * len(s)) or x for place in range(15)
    ]
    images = torch.arange(6000.0)[:, None, None, None] / 6000
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert torch.equal(augment(images), images)  # each image keeps its row
    counts = torch.bincount(torch.tensor(seen), minlength=15)
    assert ((counts - 200).abs() < 60).all()


def test_strengths_have_their_mean_and_deviation():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        strengths = RandAugment(2, 9.0, 0.5)._strengths(4000)
        fixed = RandAugment(2, 9.0, 0.0)._strengths(4000)
    assert strengths.abs().max() == 1.0
    assert strengths.abs().mean().item() == pytest.approx(0.9, abs=0.005)
    assert strengths.abs().std().item() == pytest.approx(0.05, abs=0.004)
    assert (strengths > 0).float().mean().item() == pytest.approx(0.5, abs=0.035)
    torch.testing.assert_close(fixed.abs(), torch.full((4000,), 0.9))


# MixUp and CutMix


def mixed(images, seed=0, **changes):
    labels = torch.eye(len(images))
    return MixConfig(**changes).build()(images, labels, seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 3, 8, 8), (5, 1, 1, 1), (2, 3, 33, 17)])
def test_mixing_is_a_function_of_the_seed(shape, dtype):
    images = some_images(*shape).to(dtype)
    before, state = images.clone(), torch.get_rng_state()
    for seed in range(20):
        got, labels = mixed(images, seed)
        again = mixed(images, seed)
        assert torch.equal(got, again[0])
        assert torch.equal(labels, again[1])
        assert (got.shape, got.dtype) == (shape, dtype)
        assert got.min() >= 0
        assert got.max() <= 1
        torch.testing.assert_close(labels.sum(dim=1), torch.ones(len(images)))
    assert torch.equal(images, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert len({mixed(some_images(6, 3, 8, 8), seed)[1][0, 0].item() for seed in range(9)}) > 6


def test_mixup_is_a_weighted_mean():
    images = some_images(4, 3, 5, 5)
    got, labels = mixed(images, cutmix_alpha=0.0)
    part = labels[0, 0]
    assert 0 < part < 1
    torch.testing.assert_close(got, part * images + (1 - part) * images.flip(0))
    torch.testing.assert_close(labels, part * torch.eye(4) + (1 - part) * torch.eye(4).flip(0))


@pytest.mark.parametrize("seed", range(12))
def test_cutmix_labels_are_the_visible_areas(seed):
    images = torch.linspace(0, 1, 4)[:, None, None, None].expand(4, 3, 33, 17)
    got, labels = mixed(images, seed, mixup_alpha=0.0)
    for row, partner in enumerate(reversed(range(4))):
        pasted = (got[row, 0] == images[partner, 0]).float().mean()
        assert ((got[row] == images[row]) | (got[row] == images[partner])).all()
        torch.testing.assert_close(labels[row, partner], pasted)
        torch.testing.assert_close(labels[row, row], 1 - pasted)


def test_cutmix_areas_have_their_mean():
    images = torch.zeros(2, 1, 256, 256)
    parts = [1 - mixed(images, s, mixup_alpha=0.0)[1][0, 0].item() for s in range(1000)]
    # of a side r = sqrt(u) around an even center r - r^2 / 4 is inside, squared, over even u
    assert np.mean(parts) == pytest.approx(1 / 2 - 1 / 5 + 1 / 48, abs=0.03)


@pytest.mark.parametrize("alpha", [0.4, 2.0])
def test_mixup_draws_from_its_beta_distribution(alpha):
    images = torch.zeros(2, 1, 1, 1)
    parts = [mixed(images, s, mixup_alpha=alpha, cutmix_alpha=0.0)[1][0, 0] for s in range(2000)]
    parts = torch.stack(parts)
    assert parts.mean().item() == pytest.approx(0.5, abs=0.04)
    assert parts.var().item() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.1)


def test_mixing_methods_have_their_probability():
    images = torch.tensor([0.0, 1.0])[:, None, None, None].expand(2, 1, 64, 64)
    probabilities = {"probability": 0.6, "switch_probability": 0.25}
    kinds = {"none": 0, "cutmix": 0, "mixup": 0}
    for seed in range(1500):
        got, labels = mixed(images, seed, mixup_alpha=2.0, cutmix_alpha=2.0, **probabilities)
        if torch.equal(labels, torch.eye(2)):
            kinds["none"] += 1
        else:
            kinds["cutmix" if ((got == 0) | (got == 1)).all() else "mixup"] += 1
    assert kinds["none"] / 1500 == pytest.approx(0.4, abs=0.05)
    assert kinds["cutmix"] / 1500 == pytest.approx(0.15, abs=0.037)


def test_a_single_image_is_its_own_partner():
    image = some_images(1, 3, 8, 8)
    for seed in range(20):
        got, labels = MixConfig().build()(image, torch.tensor([[0.0, 1.0]]), seed)
        torch.testing.assert_close(got, image, rtol=0, atol=0)
        torch.testing.assert_close(labels, torch.tensor([[0.0, 1.0]]), rtol=0, atol=0)


@pytest.mark.parametrize("sides", [(33,), (9, 17), (5, 8, 6)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_cutmix_cuts_along_all_axes_and_no_channels(sides, seed):
    images = torch.linspace(0, 1, 4).view(4, 1, *(1,) * len(sides)).expand(4, 2, *sides)
    got, labels = mixed(images, seed, mixup_alpha=0.0)
    assert torch.equal(got[:, 0], got[:, 1])
    for row, partner in enumerate(reversed(range(4))):
        pasted = (got[row, 0] == images[partner, 0]).float().mean()
        torch.testing.assert_close(labels[row, partner], pasted)


@pytest.mark.parametrize("sides", [(9,), (4, 4, 4)], ids=str)
def test_augmentations_of_images_refuse_other_axes(sides):
    data = torch.rand(2, 3, *sides)
    with pytest.raises(ValueError, match=f"which have 2 axes, but the data has {len(sides)}"):
        AffineConfig().build()(data, 0)
