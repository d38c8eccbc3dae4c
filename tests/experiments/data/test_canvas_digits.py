"""Digits on textured images: positions, textures, splits and the recipe."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from onescan import configs
from onescan.experiments.data import CanvasDigitsConfig, DigitsConfig, Example
from onescan.experiments.data.canvas_digits import DigitImages
from onescan.experiments.recipes import find_recipe

CONFIG = CanvasDigitsConfig()
SMALL = CanvasDigitsConfig(size=24, scale=2)
SEEDED = [Example(source, seed) for source, seed in ((3, 11), (700, 12), (3, 13), (1436, 14))]


@pytest.fixture(scope="module")
def splits():
    return SMALL.build()


def images_of(data, examples):
    return data.read(examples).batch[0]


@pytest.mark.parametrize(
    "config",
    [CONFIG, replace(CONFIG, size=64, scale=4), replace(SMALL, scale=3, texture_contrast=0.0)],
)
def test_digits_are_drawn_only_at_their_positions(config):
    train = config.build().train
    images, labels = train.read(SEEDED).batch
    assert images.shape == (4, 1, config.size, config.size)
    assert images.dtype == torch.uint8
    texture, top, left = train.backgrounds(SEEDED)
    strokes = images[:, 0].int() - texture
    side = config.digit_size
    assert side == 8 * config.scale
    digits = DigitsConfig().build().train  # the same split
    for stroke, row, column, example, label in zip(strokes, top, left, SEEDED, labels, strict=True):
        inside = stroke[row : row + side, column : column + side].clone()
        stroke[row : row + side, column : column + side] = 0
        assert not stroke.any()
        assert inside.shape == (side, side)
        brightest = 255 - round(255 * config.texture_contrast)
        small = inside[:: config.scale, :: config.scale]
        expected = (digits.images[example.source, 0] * brightest).floor().int()
        assert torch.equal(small, expected)
        assert torch.equal(inside, small.kron(torch.ones(config.scale, config.scale).int()))
        assert label == digits.labels[example.source]


def test_positions_cover_the_image(splits):
    _, top, left = splits.train.backgrounds([Example(0, seed) for seed in range(200)])
    for corner in (top, left):
        assert corner.unique().tolist() == list(range(24 - 16 + 1))
    full = replace(SMALL, size=16).build().train.backgrounds(SEEDED)
    assert not full.top.any()
    assert not full.left.any()


def test_textures_fill_their_range_differ_and_have_similar_means():
    train = CONFIG.build().train
    examples = [Example(i, i) for i in range(64)]
    texture = train.backgrounds(examples).texture.float() / 255
    low, high = texture.aminmax()
    assert low >= 0
    assert 0.6 * CONFIG.texture_contrast < high - low <= high <= CONFIG.texture_contrast
    spread = texture.std((1, 2))
    assert spread.min() > 0.1 * CONFIG.texture_contrast
    images = images_of(train, examples)
    mean = images.float().mean((1, 2, 3)) / 255
    assert mean.std() < 0.1 * spread.mean()
    correlation = torch.corrcoef(texture.flatten(1))
    assert (correlation - torch.eye(64)).abs().max() < 0.5  # no two textures are similar
    neighbors = torch.stack([texture[:, :, 1:].flatten(), texture[:, :, :-1].flatten()])
    assert torch.corrcoef(neighbors)[0, 1] > 0.4  # waves, not only noise


def test_default_mean_and_std_are_those_of_the_images():
    splits = CONFIG.build()
    images = images_of(splits.train, [Example(i, i) for i in range(500)])
    pixels = splits.format.model_input(images)
    torch.testing.assert_close(pixels.mean(), torch.tensor(0.0), atol=0.05, rtol=0)
    torch.testing.assert_close(pixels.std(), torch.tensor(1.0), atol=0.05, rtol=0)
    assert (splits.format.height, splits.format.width) == (128, 128)


def test_images_do_not_depend_on_the_batch(splits):
    together = images_of(splits.train, SEEDED)
    for examples in (SEEDED[::-1], SEEDED[1:3], SEEDED[2:]):
        expected = together[[SEEDED.index(example) for example in examples]]
        assert torch.equal(images_of(splits.train, examples), expected)


@pytest.mark.slow
def test_images_are_the_same_in_another_process(splits):
    code = (
        "import hashlib, torch; from onescan.experiments.data import CanvasDigitsConfig, Example; "
        "torch.set_num_threads(2); splits = CanvasDigitsConfig(size=24, scale=2).build(); "
        "parts = [splits.train.read([Example(5, 9)]), splits.test.read([Example(5)])]; "
        "print([int(part.batch[0].int().flatten() @ torch.arange(576).int()) for part in parts])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    sums = [
        int(images_of(data, [example]).int().flatten() @ torch.arange(576).int())
        for data, example in ((splits.train, Example(5, 9)), (splits.test, Example(5)))
    ]
    assert done.stdout.strip() == str(sums)


def test_training_images_are_new_in_every_epoch(splits):
    shown = {}
    for epoch in range(2):
        for example, _ in splits.train.examples(seed=0, epoch=epoch):
            if example.source in (7, 8):
                shown[example.source, epoch] = example
    images = images_of(splits.train, list(shown.values()))
    background = splits.train.backgrounds(list(shown.values()))
    assert len(images) == 4
    assert len({tuple(image.flatten().tolist()) for image in images}) == 4
    assert len({tuple(texture.flatten().tolist()) for texture in background.texture}) == 4


def test_test_images_stay_the_same(splits):
    examples = [example for example, _ in splits.test.examples(seed=None)]
    assert len(examples) == 360
    assert all(example.seed is None for example in examples)
    images = images_of(splits.test, examples[:20])
    again, other = (
        images_of(replace(SMALL, background_seed=seed).build().test, examples[:20])
        for seed in (0, 1)
    )
    assert torch.equal(images, again)
    assert not (images == other).flatten(1).all(1).any()
    background = splits.test.backgrounds(examples)
    positions = set(zip(background.top.tolist(), background.left.tolist(), strict=True))
    assert len(positions) > 70  # of 81


def test_training_and_test_digits_are_disjoint(splits):
    assert isinstance(splits.train, DigitImages)
    train, test = (set(part.digits.tolist()) for part in (splits.train, splits.test))
    assert (len(train), len(test)) == (len(splits.train), len(splits.test)) == (1437, 360)
    assert not train & test
    assert train | test == set(range(1797))
    assert splits.class_names == tuple("0123456789")
    other = replace(SMALL, split_seed=1).build()
    assert set(other.test.digits.tolist()) != test


def test_validation_leaves_out_the_test_digits(splits):
    other = replace(SMALL, validate=True).build()
    train, test = (set(part.digits.tolist()) for part in (other.train, other.test))
    assert not train & test
    assert train | test == set(splits.train.digits.tolist())
    assert len(test) == pytest.approx(0.2 * len(splits.train), abs=5)
    assert set(other.test.labels.tolist()) == set(range(10))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 0}, "size is 0, expected a whole number of at least 1"),
        ({"size": 31, "scale": 4}, "size is 31, expected at least 32 .* a data.scale of 4"),
        ({"scale": 0}, "scale is 0, expected a whole number of at least 1"),
        ({"texture_contrast": 1.0}, "texture_contrast is 1.0, expected at least 0 and less than 1"),
        ({"texture_contrast": -0.1}, "texture_contrast is -0.1, expected at least 0"),
        ({"texture_contrast": float("nan")}, "texture_contrast is nan, expected at least 0"),
        ({"test_fraction": 1.5}, "test_fraction is 1.5, expected between 0 and 1"),
        ({"split_seed": -1}, "split_seed is -1, expected a whole number of at least 0"),
        ({"background_seed": -1}, "background_seed is -1, expected a whole number of at least 0"),
        ({"std": 0.0}, "std is 0.0, expected a number above 0"),
    ],
)
def test_fields_are_checked(fields, message):
    with pytest.raises(ValueError, match=rf"data\.{message}"):
        CanvasDigitsConfig(**fields).build()


def test_mean_must_be_finite():
    with pytest.raises(ValueError, match=r"mean is \(nan,\), expected finite numbers"):
        CanvasDigitsConfig(mean=float("nan")).build()


SMALLER = {"data.size": 64, "data.scale": 4, "model.image_size": (64, 64)}


@pytest.mark.parametrize(("changes", "side"), [({}, 128), (SMALLER, 64)], ids=["default", "small"])
def test_the_model_of_the_recipe_fits_its_images(changes, side):
    run = configs.replace(find_recipe("canvas_digits")(), changes)
    splits = run.data.build()
    task = run.task.build(splits)
    batch = next(iter(task.batches(step=0, batch_size=2, seed=0)))
    images, labels = splits.train.read(batch.examples).batch
    torch.manual_seed(0)
    model = run.model.build()
    assert run.model.image_size == tuple(images.shape[2:]) == (side, side)
    assert model.patchify.grid_shape((1, side, side)) == (side // 2, side // 2)
    loss, _ = task.loss(model, (splits.format.model_input(images), labels))
    assert 1.5 < loss < 4


def test_masks_mark_the_strokes():
    config = replace(SMALL, masks=True)
    splits = config.build()
    assert (splits.class_names, splits.target.kind) == (("background", "stroke"), "class_map")
    images, masks = splits.train.read(SEEDED).batch
    plain = SMALL.build().train
    assert torch.equal(images, images_of(plain, SEEDED))
    ink = plain.ink[[example.source for example in SEEDED]]
    _, top, left = plain.backgrounds(SEEDED)
    for mask, digit, row, column in zip(masks, ink, top, left, strict=True):
        inside = mask[row : row + 16, column : column + 16]
        assert torch.equal(inside, (digit >= 8).long().kron(torch.ones(2, 2).long()))
        assert mask.sum() == inside.sum()


def test_brightness_does_not_show_the_strokes_of_the_recipe():
    data = find_recipe("canvas_segmentation")().build_task().test
    images, masks = data.read([Example(place) for place in range(100)]).batch
    strokes = masks.bool()
    scores = []
    for threshold in range(256):
        found = images[:, 0] >= threshold
        scores.append((found & strokes).sum() / (found | strokes).sum())
    assert max(scores) < 0.5
    standardized = find_recipe("canvas_segmentation")().build_task().format.model_input(images)
    assert abs(standardized.mean()) < 0.1
    assert abs(standardized.std() - 1) < 0.1
