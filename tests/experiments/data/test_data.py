"""Digits, the order of examples, and image files of every kind."""

import io
import itertools
import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from onescan.configs import from_dict, to_dict
from onescan.experiments.data import DigitsConfig, ImageTensors, derive_seed, epoch_order
from onescan.experiments.tasks import ImageClassificationConfig
from onescan.inputs import ImageFormat, image_files, read_image

GRAY = ImageFormat(channels=1, height=6, width=5, mean=(0.0,), std=(1.0,))
COLOR = ImageFormat(channels=3, height=6, width=5, mean=(0.0,) * 3, std=(1.0,) * 3)


def test_digits():
    splits = DigitsConfig().build()
    assert (len(splits.train), len(splits.test)) == (1437, 360)
    assert splits.class_names == tuple("0123456789")
    assert splits.train.images.shape[1:] == (1, 8, 8)
    assert splits.train.labels.dtype == torch.int64
    assert splits.test.labels.bincount().min() >= 34  # of 36
    unit = (torch.tensor(0.0), torch.tensor(1.0))
    torch.testing.assert_close(splits.train.images.aminmax(), unit)
    pixels = splits.format.model_input(splits.train.images)
    torch.testing.assert_close(pixels.mean(), unit[0], atol=0.01, rtol=0)
    torch.testing.assert_close(pixels.std(), unit[1], atol=0.01, rtol=0)
    again, other = (DigitsConfig(split_seed=seed).build() for seed in (0, 1))
    assert torch.equal(splits.test.images, again.test.images)
    assert not torch.equal(splits.test.labels, other.test.labels)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({"test_fraction": x}, rf"test_fraction is {x}") for x in (0.0, 1.0, -0.1, math.nan)),
        ({"test_fraction": 0.00001}, "test_fraction is 1e-05, .* 1 of 1797 .* 10 to 1787"),
        ({"test_fraction": 0.999}, "test_fraction is 0.999, .* 1796 of 1797 .* 10 to 1787"),
        ({"std": 0.0}, "std is 0.0"),
    ],
)
def test_digits_fields_out_of_range(fields, message):
    with pytest.raises(ValueError, match=rf"data\.{message}"):
        DigitsConfig(**fields).build()


def test_seeds_and_orders_differ_and_are_stable_across_versions():
    orders = {tuple(epoch_order(40, seed=s, epoch=e).tolist()) for s in range(3) for e in range(3)}
    assert len(orders) == 9
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert tuple(epoch_order(40, seed=1, epoch=2).tolist()) in orders
    assert derive_seed(0, "step", 7) == 11425006106245048527
    assert len({derive_seed(s, name, i) for s in (0, 1) for name in "ab" for i in (0, 1)}) == 8


def test_an_epoch_shorter_than_its_length_is_refused():
    class Short(ImageTensors):
        def examples(self, **options):
            return itertools.islice(super().examples(**options), self.shown)

    splits = DigitsConfig().build()
    for shown in (0, 5, 8):
        short = Short(images=splits.train.images[:12], labels=splits.train.labels[:12])
        object.__setattr__(short, "shown", shown)
        task = ImageClassificationConfig().build(replace(splits, train=short))
        with pytest.raises(ValueError, match=r"epoch 1 .* 12 images"):
            list(itertools.islice(task.batches(step=3, batch_size=4, seed=0), 3))


@pytest.mark.parametrize("repeats", [1, 3])
def test_batches_resume_from_any_step_across_epochs(repeats):
    task = ImageClassificationConfig(augment_repeats=repeats).build(DigitsConfig().build())
    whole = list(itertools.islice(task.batches(step=0, batch_size=400, seed=5), 8))
    assert task.steps_per_epoch(400) == 3  # of 1437, so 237 are left over
    for step in range(8):
        rest = task.batches(step=step, batch_size=400, seed=5)
        assert list(itertools.islice(rest, 8 - step)) == whole[step:]
    for epoch in (whole[:3], whole[3:6]):
        shown = [example.source for batch in epoch for example in batch.examples]
        assert len(set(shown)) == 1200 // repeats
    assert len({example.seed for batch in whole for example in batch.examples}) == 8 * 400


# Image files


def save(folder, array, mode=None, name="image.png", **options):
    image = array if isinstance(array, Image.Image) else Image.fromarray(array, mode)
    image.save(folder / name, **options)
    return folder / name


def gray_values():
    return np.arange(30, dtype=np.uint8).reshape(6, 5) * 8


def oriented(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def noise(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def test_gray_and_color_are_read_exactly(tmp_path):
    deep = np.linspace(0, 65535, 30).round().astype(np.uint16).reshape(6, 5)
    large = np.full((40, 30), 102, dtype=np.uint8)
    for values, want in (
        (gray_values(), gray_values() / 255),
        (deep, deep / 65535),  # not clipped to eight bits
        (large, np.full((6, 5), 0.4)),
    ):
        path, want = save(tmp_path, values), torch.from_numpy(want).float()
        torch.testing.assert_close(read_image(path, GRAY), want[None])
        torch.testing.assert_close(read_image(str(path), COLOR), want.expand(3, 6, 5))
        format = replace(GRAY, mean=(0.5,), std=(0.25,))
        torch.testing.assert_close(read_image(path, format)[0], (want - 0.5) / 0.25)
    colors = np.zeros((6, 5, 3), dtype=np.uint8)
    colors[..., 0], colors[..., 2] = 255, 51
    pixels = read_image(save(tmp_path, colors), COLOR)
    torch.testing.assert_close(pixels[:, 0, 0], torch.tensor([1.0, 0.0, 0.2]))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
@pytest.mark.parametrize("format", [GRAY, COLOR])
def test_transparent_parts_become_black(tmp_path, mode, format):
    image = Image.new("LA", (5, 6), (255, 255)).convert(mode)
    alpha = Image.fromarray(np.repeat([[0, 51, 102, 255, 255]], 6, axis=0).astype(np.uint8))
    image.putalpha(alpha)
    pixels = read_image(save(tmp_path, image), format)
    want = torch.tensor([0.0, 0.2, 0.4, 1.0, 1.0]).expand(format.channels, 6, 5)
    torch.testing.assert_close(pixels, want)


def test_palettes_cmyk_and_bilevel(tmp_path):
    image = Image.new("P", (5, 6), 1)
    image.putpalette([0, 0, 0, 255, 0, 51, 9, 9, 9])
    pixels = read_image(save(tmp_path, image), COLOR)
    torch.testing.assert_close(pixels[:, 0, 0], torch.tensor([1.0, 0.0, 0.2]))
    path = save(tmp_path, image, name="transparent.png", transparency=1)
    torch.testing.assert_close(read_image(path, COLOR), torch.zeros(3, 6, 5))
    ink = Image.new("CMYK", (5, 6), (0, 255, 255, 0))
    pixels = read_image(save(tmp_path, ink, name="ink.tiff"), COLOR)
    torch.testing.assert_close(pixels[:, 0, 0], torch.tensor([1.0, 0.0, 0.0]))
    white = read_image(save(tmp_path, Image.new("1", (5, 6), 1)), GRAY)
    torch.testing.assert_close(white, torch.ones(1, 6, 5))


@pytest.mark.parametrize(("size", "left", "upper"), [((48, 40), 14, 8), ((20, 48), 0, 12)])
def test_the_center_of_an_image_is_read(tmp_path, size, left, upper):
    values = noise(size[1], size[0])
    part = 24 / min(size[1], size[0] * 24 / 20)
    pixels = read_image(save(tmp_path, values), replace(GRAY, height=24, width=20, crop=part))
    want = torch.from_numpy(values[upper : upper + 24, left : left + 20] / 255).float()
    torch.testing.assert_close(pixels[0], want, atol=1 / 255, rtol=0)


def test_a_saved_format_without_a_crop_is_read_as_before():
    saved = {name: value for name, value in to_dict(GRAY).items() if name != "crop"}
    assert from_dict(ImageFormat, saved) == GRAY
    assert GRAY.box(30, 40) == (0, 0, 30, 40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"height": 10**9}, r"\(1000000000, 5\)"),
        ({"height": 10**5, "width": 10**5}, r"\(100000, 100000\)"),
        ({"width": 0}, r"\(6, 0\)"),
        ({"channels": 10**9}, "channels is 1000000000, expected 1 or 3"),
        ({"mean": (0.0, 1.0)}, r"mean is \(0\.0, 1\.0\), expected 1"),
        ({"std": ()}, r"std is \(\), expected 1"),
        ({"std": (0.0,)}, r"std is \(0\.0,\)"),
        ({"crop": 0.0}, r"crop is 0\.0"),
    ],
)
def test_an_impossible_format_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(GRAY, **change)


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_large_jpeg_is_decoded_smaller_and_looks_the_same(tmp_path, monkeypatch, orientation):
    sizes = []
    convert = image_files._convert
    monkeypatch.setattr(
        image_files,
        "_convert",
        lambda image, mode: sizes.append(image.size) or convert(image, mode),
    )
    across, down = np.meshgrid(np.linspace(0, 127, 800), np.linspace(0, 127, 400))
    format = replace(GRAY, height=24, width=20, crop=0.5)
    values = (across + down).astype(np.uint8)
    large, small = (
        read_image(save(tmp_path, values, name=name, exif=oriented(orientation)), format)
        for name in ("large.png", "large.jpg")
    )
    torch.testing.assert_close(small, large, atol=2 / 255, rtol=0)
    assert sizes == ([(800, 400), (200, 100)] if orientation == 1 else [(400, 800), (100, 200)])


@pytest.mark.parametrize("orientation", [*range(10), 200])  # of which 1 to 8 are valid
@pytest.mark.parametrize("kind", ["png", "webp"])
def test_every_orientation_is_turned_upright_before_the_crop(tmp_path, orientation, kind):
    exif = oriented(orientation)
    path = save(tmp_path, noise(6, 5, 3), name=f"a.{kind}", exif=exif, lossless=True)
    with Image.open(path) as image:
        upright = np.array(ImageOps.exif_transpose(image))
    format = replace(COLOR, height=upright.shape[0], width=upright.shape[1])
    want = torch.from_numpy(upright / 255).float().permute(2, 0, 1)
    torch.testing.assert_close(read_image(path, format), want)
    sizes = []
    format.decode(path, lambda width, height: sizes.append((height, width)) or (1, 1, 3, 3))
    assert sizes == [upright.shape[:2]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Pillow's, about damaged metadata
@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "PNG"])
def test_a_garbled_file_is_read_or_refused(kind):
    exif, file = oriented(6), io.BytesIO()
    exif[0x010E], exif[0x8769] = "a note", {0x9003: "a date"}
    Image.fromarray(noise(24, 20, 3)).save(file, kind, exif=exif)
    content, rng, refused = file.getvalue(), Random(0), 0
    for _ in range(1500):
        garbled = bytearray(content)
        for _ in range(rng.choice([1, 5, 20])):
            garbled[rng.randrange(200)] = rng.choice([0, 1, 255, rng.randrange(256)])
        try:
            COLOR.decode(io.BytesIO(garbled))
        except ValueError:
            refused += 1
    assert 0 < refused < 1500


def test_what_is_no_image_is_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.png"):
        read_image(tmp_path / "nowhere.png", GRAY)
    text = tmp_path / "text.png"
    text.write_text("not an image")
    floats = save(tmp_path, np.ones((6, 5), dtype=np.float32), name="floats.tiff")
    for path in (text, floats, tmp_path):
        with pytest.raises(ValueError, match=f"{path} (is not|cannot be read as) an image"):
            read_image(path, GRAY)
    for name in ("image.png", "image.jpg", "image.gif", "image.tiff", "image.bmp"):
        path = save(tmp_path, noise(40, 40), name=name)
        content = path.read_bytes()
        for part in (0.3, 0.6, 0.9):  # cut off
            path.write_bytes(content[: int(part * len(content))])
            with pytest.raises(ValueError, match=f"{path.name} "):
                read_image(path, GRAY)
