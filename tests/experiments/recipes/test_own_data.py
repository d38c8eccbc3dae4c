"""Settings that are inferred from the user's data, and predictions for files and folders."""

import csv
import json
import random
import re

import numpy as np
import pytest
from PIL import Image, ImageDraw
from tiny_tokenizers import WORDS, word_tokenizer

from onescan.cli import main
from onescan.configs import replace
from onescan.experiments.data import ArrayDatasetConfig, Example
from onescan.experiments.recipes import find_recipe
from onescan.experiments.recipes.own_data import for_path, infer, infer_vocabulary, patches
from onescan.experiments.training.folder import read_manifest

SHAPES = ("circle", "square", "triangle")


def draw(name, rng):
    """Draw one shape of random place, size and colors, 64 pixels wide and 48 high."""
    dark, bright = (tuple(rng.randint(*range_) for _ in "rgb") for range_ in ((0, 100), (150, 255)))
    image = Image.new("RGB", (64, 48), dark)
    r = rng.randint(8, 16)
    x, y = rng.randint(r, 63 - r), rng.randint(r, 47 - r)
    shape = ImageDraw.Draw(image)
    if name == "circle":
        shape.ellipse((x - r, y - r, x + r, y + r), fill=bright)
    elif name == "square":
        shape.rectangle((x - r, y - r, x + r, y + r), fill=bright)
    else:
        shape.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=bright)
    return image


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """Return a folder with 40 images of each of three shapes."""
    rng, root = random.Random(0), tmp_path_factory.mktemp("shapes")
    for name in SHAPES:
        (root / name).mkdir()
        for number in range(40):
            draw(name, rng).save(root / name / f"{number}.png")
    return root


def inferred(name, path, given=()):
    """Return what `infer` returns for a recipe with a path and given values."""
    run = replace(for_path(find_recipe(name)(), str(path)), dict(given))
    return infer(run, dict(given))


def test_image_settings_are_inferred(shapes):
    run, lines = inferred("image_classifier", shapes)
    assert lines[0] == (
        "data: 102 training and 18 test images in 3 classes (circle, square, triangle), "
        "24 x 32 pixels, 3 channels"
    )
    assert run.data.image_size == run.model.image_size == (24, 32)
    assert (run.model.num_classes, run.model.channels, run.model.patch_size) == (3, 3, (4, 4))
    assert len(run.data.mean) == 3
    assert all(0 < value < 1 for value in (*run.data.mean, *run.data.std))
    assert run.training.batch_size <= 102 / 4


def test_given_settings_are_kept(shapes):
    given = {"data.image_size": (36, 48), "training.batch_size": 7, "model.width": 48}
    run, _ = inferred("image_classifier", shapes, given)
    assert run.data.image_size == run.model.image_size == (36, 48)
    assert (run.training.batch_size, run.model.width) == (7, 48)
    run.model.build()


def test_grayscale_and_large_images(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(8):
            Image.new("L", (400, 100), 9 * number).save(tmp_path / name / f"{number}.png")
    run, _ = inferred("image_classifier", tmp_path)
    assert (run.model.channels, run.data.channels, run.data.image_size) == (1, 1, (8, 32))


@pytest.mark.parametrize("shape", [(40,), (10, 12), (4, 8, 8)])
def test_arrays_of_any_axes(tmp_path, shape):
    x = np.random.default_rng(0).normal(size=(20, *shape, 2))
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(20) % 2)
    run, lines = inferred("image_classifier", tmp_path / "data.npz")
    assert isinstance(run.data, ArrayDatasetConfig)
    assert (run.data.axes, run.model.image_size, run.model.channels) == (len(shape), shape, 2)
    assert " x ".join(map(str, shape)) in lines[0]
    run.model.build()


@pytest.mark.parametrize(
    ("shape", "given", "expected", "line"),
    [
        ((2, 200), {}, (1, True, (200,), 2), "200 values, 2 channels, channels first"),
        ((3, 8, 16, 16), {}, (3, True, (8, 16, 16), 3), "channels first"),
        ((3, 3), {}, (1, False, (3,), 3), "channels last"),
        ((200, 2), {"data.channels_first": True}, (1, True, (2,), 200), "channels first"),
        ((2, 200), {"data.channels_first": False}, (2, False, (2, 200), 1), "2 x 200 pixels"),
        ((2, 200), {"data.axes": 1}, (1, True, (200,), 2), "channels first"),
        ((2, 200), {"data.axes": 2}, (2, True, (2, 200), 1), "no axis of channels"),
        ((100, 6), {}, (2, False, (100, 6), 1), "if the last axis holds channels, pass --data.ax"),
        ((6, 100), {}, (2, False, (6, 100), 1), "first axis .* --data.axes 1 --data.channels-fi"),
        ((32, 32), {}, (2, False, (32, 32), 1), "no axis of channels$"),
    ],
)
def test_layout_of_arrays(tmp_path, shape, given, expected, line):
    x = np.random.default_rng(0).normal(size=(20, *shape))
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(20) % 2)
    run, lines = inferred("signal_classifier", tmp_path / "data.npz", given)
    data, model = run.data, run.model
    assert (data.axes, data.channels_first, model.image_size, model.channels) == expected
    assert re.search(line, lines[0])
    assert run.data.build().format.channels == model.channels


def test_flag_of_channels_last_is_kept(tmp_path):
    np.savez(tmp_path / "data.npz", x=np.ones((20, 2, 200)), y=np.arange(20) % 2)
    run = for_path(find_recipe("signal_classifier")(), str(tmp_path / "data.npz"))
    assert infer(run, {"data.no_channels_first"})[0].model.image_size == (2, 200)


def test_patches_divide_sizes():
    assert patches((48, 64)) == (4, 4)
    assert patches((8, 8)) == (2, 2)
    assert patches((1000,)) == (4,)
    for shape in [(31,), (6, 9), (5, 32, 32), (97, 101)]:
        sizes = patches(shape)
        assert all(size % patch == 0 for size, patch in zip(shape, sizes, strict=True))


def onescan(*argv):
    return main([str(argument) for argument in argv])


def test_one_command_trains_resumes_and_predicts(shapes, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    command = ("train", "image_classifier", "--data.path", shapes, "--out", out)
    small = ("--training.epochs", 1, "--model.depth", 1, "--model.width", 32)
    assert onescan(*command, *small) == 0
    text = capsys.readouterr().out
    assert text.startswith("data: 102 training and 18 test images in 3 classes")
    assert onescan(*command, *small) == 0
    assert "already finished" in capsys.readouterr().out
    run = read_manifest(out / "seed-0").run
    assert (run.model.num_classes, run.model.depth, run.training.epochs) == (3, 1, 1)
    monkeypatch.setattr("onescan.experiments.report.write_report", lambda *_: None)
    again = ("train", "--config", out / "seed-0", "--out", tmp_path / "again")
    assert onescan(*again) == 0
    capsys.readouterr()
    (tmp_path / "images" / "deeper").mkdir(parents=True)
    draw("circle", random.Random(1)).save(tmp_path / "images" / "deeper" / "a.png")
    (tmp_path / "images" / "broken.png").write_text("no image")
    for file in (tmp_path / "table.csv", tmp_path / "table.json"):
        argv = ("predict", out / "seed-0", tmp_path / "images", "--out", file, "--top-k", 2)
        assert onescan(*argv) == 0
        shown = capsys.readouterr()
        assert "broken.png" in shown.err
        assert "a.png: " in shown.out
    (row,) = json.loads((tmp_path / "table.json").read_text())
    assert row["class"] in SHAPES
    assert list(row) == ["path", "class", "confidence", "class_2", "confidence_2"]
    with (tmp_path / "table.csv").open() as stream:
        (same,) = csv.DictReader(stream)
    assert same == {name: str(value) for name, value in row.items()}
    assert onescan("predict", out / "seed-0", tmp_path / "missing.png") == 2
    assert onescan("predict", out / "seed-0", tmp_path, "--out", "table.txt") == 2


def test_a_tokenizer_sets_the_vocabulary(tmp_path):
    word_tokenizer().save_pretrained(tmp_path)
    run = replace(find_recipe("shakespeare_lightnet")(), {"data.tokenizer": str(tmp_path)})
    assert infer_vocabulary(run, {"data.tokenizer"}).model.vocab_size == len(WORDS)
    assert infer_vocabulary(run, {"data.tokenizer", "model.vocab_size"}) == run


def test_unknown_options_are_reported_before_a_missing_path(capsys):
    with pytest.raises(SystemExit):
        onescan("train", "image_classifier", "--data.pth", "one")
    shown = capsys.readouterr().err
    assert "--data.pth" in shown
    assert "--data.path" in shown
    assert "missing" not in shown


@pytest.mark.parametrize(("count", "classes"), [(12, 3), (4, 2), (14, 7)])
def test_more_are_held_out_of_small_data(tmp_path, count, classes):
    np.savez(tmp_path / "data.npz", x=np.eye(count, 20), y=np.arange(count) % classes)
    run, lines = inferred("signal_classifier", tmp_path / "data.npz")
    assert len(run.data.build().test) == classes
    assert lines[-1].startswith("held out: ")
    with pytest.raises(ValueError, match=r"as with 0\."):
        inferred("signal_classifier", tmp_path / "data.npz", {"data.test_fraction": 0.01})


def test_labels_that_start_at_one_are_warned_of(tmp_path):
    np.savez(tmp_path / "data.npz", x=np.ones((30, 40)), y=np.arange(30) % 3 + 1)
    _, lines = inferred("signal_classifier", tmp_path / "data.npz")
    assert lines[-1] == "warning: no training examples of class 0; labels count from 0"


def test_corrupt_images_say_how_to_skip_them(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(8):
            (tmp_path / name / f"{number}.png").write_text("no image")
    with pytest.raises(ValueError, match=r"--data\.on-error skip"):
        inferred("image_classifier", tmp_path)


def test_missing_path_says_what_to_give(capsys):
    assert onescan("train", "image_classifier") == 2
    assert "--data.path" in capsys.readouterr().err


def test_other_recipes_suggest_image_classifier(shapes, tmp_path, capsys):
    argv = ("train", "cifar10_lightnet", "--data.path", shapes, "--out", tmp_path / "out")
    assert onescan(*argv) == 2
    assert "onescan train image_classifier" in capsys.readouterr().err


@pytest.mark.slow
def test_shapes_reach_ninety_percent(shapes, tmp_path):
    out = tmp_path / "out"
    assert onescan("train", "image_classifier", "--data.path", shapes, "--out", out) == 0
    result = json.loads((out / "seed-0" / "result.json").read_text())
    assert result["metrics"]["accuracy"] >= 0.9


@pytest.mark.parametrize("kind", ["jpg", "png", "tiff"])
def test_the_image_size_is_that_of_upright_images(tmp_path, kind):
    exif, rng = Image.Exif(), np.random.default_rng(0)
    exif[0x0112] = 6  # a phone held upright
    for number in range(12):
        (tmp_path / "ab"[number % 2]).mkdir(exist_ok=True)
        image = Image.fromarray(rng.integers(0, 255, (60, 120, 3), dtype=np.uint8))
        image.save(tmp_path / "ab"[number % 2] / f"{number}.{kind}", exif=exif)
    run, _ = inferred("image_classifier", tmp_path)
    assert run.data.image_size == (32, 16)
    assert not any("of a side" in note for note in run.data.build().notes)


def test_the_statistics_of_large_offsets_reach_the_run(tmp_path):
    x = 1_700_000_000 + np.random.default_rng(0).integers(0, 60, (40, 24))
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(40) % 2)
    run, _ = inferred("signal_classifier", tmp_path / "a.npz")
    splits = run.data.build()
    batch = splits.train.read([Example(i) for i in range(len(splits.train))]).batch[0]
    made = splits.format.model_input(batch)
    assert made.std().item() == pytest.approx(1, abs=0.01)
    assert len(made.unique()) == 60


def test_images_that_predict_leaves_out_are_counted(shapes, tmp_path, caplog):
    from onescan.cli.predict import _images_at

    for name in ("a.png", "b.heic", "c"):
        (tmp_path / name).touch()
    assert [file.name for file, _ in _images_at([tmp_path])] == ["a.png"]
    assert "2 of 3 files in " in caplog.text
    assert "1 .heic, 1 without a suffix" in caplog.text
