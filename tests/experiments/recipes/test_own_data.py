"""Settings that are inferred from the user's data, and predictions for files and folders."""

import csv
import json
import math
import random
import re
import shutil

import numpy as np
import pytest
from html_page import Page
from pages import python_block
from PIL import Image, ImageDraw
from tiny_images import write_parquet
from tiny_tokenizers import WORDS, word_tokenizer

from onescan.cli import main
from onescan.configs import replace
from onescan.experiments.data import ArrayDatasetConfig, Example
from onescan.experiments.recipes import find_recipe
from onescan.experiments.recipes.infer import (
    MAX_TOKENS,
    for_path,
    infer,
    infer_vocabulary,
    patches,
)
from onescan.experiments.tasks import ImageClassificationConfig
from onescan.experiments.training.folder import read_manifest
from onescan.zoo import path as zoo_path

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
        "24 x 32 pixels (whole images, resized), 3 channels"
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


def test_a_run_from_trained_weights_has_their_sizes(shapes, tmp_path):
    given = {"model.depth": 2, "model.width": 48, "model.patch_size": (8, 8)}
    run, _ = inferred("image_classifier", shapes, given)
    run.model.build().save_pretrained(tmp_path / "saved")
    start = {"init_from": str(tmp_path / "saved")}
    again, lines = inferred("image_classifier", shapes, start)
    assert again.model == run.model
    assert lines[1] == "model: LightNet, 2 blocks of width 48, patches of 8 x 8"
    assert inferred("image_classifier", shapes, start | {"model.depth": 3})[0].model.depth == 3
    zoo, _ = inferred("image_classifier", shapes, {"init_from": "zoo/cifar10_lightnet"})
    known = read_manifest(zoo_path("cifar10_lightnet")).run.model
    assert (zoo.model.width, zoo.model.depth) == (known.width, known.depth)
    assert zoo.model.mixer.num_heads == known.mixer.num_heads


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
        ((6, 300), {}, (1, True, (300,), 6), "300 values, 6 channels, channels first .the shorter"),
        ((300, 12), {}, (1, False, (300,), 12), "if this is wrong, pass --data.channels-first"),
        ((300, 12), {"data.axes": 1}, (1, False, (300,), 12), "channels last"),
        ((6, 300), {"data.axes": 2}, (2, False, (6, 300), 1), "no axis of channels"),
        ((6, 300), {"data.channels_first": False}, (1, False, (6,), 300), "channels last$"),
        ((16, 16), {}, (1, False, (16,), 16), "channels last"),
        ((2, 8, 8), {}, (2, True, (8, 8), 2), "8 x 8 pixels, 2 channels, channels first"),
        ((200, 2), {"data.channels_first": True}, (1, True, (2,), 200), "channels first"),
        ((2, 200), {"data.channels_first": False}, (1, False, (2,), 200), "2 values"),
        ((2, 200), {"data.axes": 1}, (1, True, (200,), 2), "channels first"),
        ((2, 200), {"data.axes": 2}, (2, True, (2, 200), 1), "no axis of channels"),
    ],
)
def test_layout_of_signals(tmp_path, shape, given, expected, line):
    x = np.random.default_rng(0).normal(size=(20, *shape))
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(20) % 2)
    run, lines = inferred("signal_classifier", tmp_path / "data.npz", given)
    data, model = run.data, run.model
    assert (data.axes, data.channels_first, model.image_size, model.channels) == expected
    assert re.search(line, lines[0])
    assert run.data.build().format.channels == model.channels


@pytest.mark.parametrize(
    ("shape", "line"),
    [
        ((100, 6), "if the last axis holds channels, pass --data.axes 1"),
        ((6, 100), "first axis .* --data.axes 1 --data.channels-first"),
        ((32, 32), "no axis of channels$"),
    ],
)
def test_two_axes_are_images_for_the_other_recipe(tmp_path, shape, line):
    x = np.random.default_rng(0).normal(size=(20, *shape))
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(20) % 2)
    run, lines = inferred("image_classifier", tmp_path / "data.npz")
    assert (run.data.axes, run.model.image_size, run.model.channels) == (2, shape, 1)
    assert "training and 3 test images" in lines[0]
    assert re.search(line, lines[0])


@pytest.mark.slow
def test_reports_speak_of_signals(tmp_path, capsys):
    x = np.random.default_rng(0).normal(size=(60, 6, 40)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(60) % 3)
    out = tmp_path / "out"
    command = ("train", "signal_classifier", "--data.path", tmp_path / "data.npz", "--out", out)
    assert onescan(*command, "--training.steps", 2, "--model.depth", 1, "--machine.trackers") == 0
    shown = capsys.readouterr()
    assert "data: 51 training and 9 test signals in 3 classes (0, 1, 2), 40 values" in shown.out
    assert "data: 51 training and 9 test signals, input shape [6, 40]" in shown.err
    text = Page((out / "report.html").read_text()).text
    assert "This signal classifier was trained on 51 signals of 3 classes" in text
    assert "splits each signal of 40 into 10 patches of 4" in text
    assert "Test signals" in text
    assert re.search(r"\d+ signals that the model (mis)?classifies", text)
    assert re.search(r"test images?|This image|an image of|images that", text) is None


def test_flag_of_channels_last_is_kept(tmp_path):
    np.savez(tmp_path / "data.npz", x=np.ones((20, 2, 200)), y=np.arange(20) % 2)
    run = for_path(find_recipe("signal_classifier")(), str(tmp_path / "data.npz"))
    assert infer(run, {"data.channels_first"})[0].model.image_size == (2,)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((48, 64), (4, 4)),
        ((8, 8), (2, 2)),
        ((1000,), (4,)),
        ((1234,), (8,)),  # 2 x 617: divided only by patches that are too small or too large
        ((1237,), (8,)),  # prime
        ((30, 30), (4, 4)),
        ((97, 101), (8, 8)),
        ((6, 9), (2, 2)),
        ((5, 32, 32), (1, 8, 4)),  # the first axis is too short for patches of 4
        ((4, 32), (4, 4)),
    ],
)
def test_patches_are_chosen_by_size(shape, expected):
    assert patches(shape) == expected
    counts = [-(-size // patch) for size, patch in zip(shape, expected, strict=True)]
    assert math.prod(counts) <= MAX_TOKENS


def onescan(*argv):
    return main([str(argument) for argument in argv])


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_run_whose_data_have_changed_says_so(shapes, tmp_path, capsys):
    shutil.copytree(shapes, tmp_path / "data")
    command = ("train", "image_classifier", "--data.path", tmp_path / "data", "--training.steps", 1)
    small = ("--model.depth", 1, "--model.width", 32, "--out", tmp_path / "out")
    assert onescan(*command, *small) == 0
    Image.new("RGB", (64, 48), "white").save(tmp_path / "data" / "circle" / "new.png")
    assert onescan(*command, *small) == 2
    error = capsys.readouterr().err
    assert re.search(r"infers .*data\.mean, .*, so the options or the data have ch", error)
    assert onescan(*command, *small, "--data.mean", 0.5, 0.5, 0.5, "--data.std", 1, 1, 1) == 2
    assert "data.mean, " not in capsys.readouterr().err


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
    with pytest.raises(ValueError, match=r"for example with 0\."):
        inferred("signal_classifier", tmp_path / "data.npz", {"data.test_fraction": 0.01})


@pytest.mark.slow
def test_signals_in_a_table_are_converted_as_documented(tmp_path, monkeypatch, capsys):
    lines = ["label,a,b,c,d,e,f,g,h"]
    for number in range(24):
        name, sign = (("up", 1), ("down", -1))[number % 2]
        lines.append(",".join([name, *(str(sign * i + number / 30) for i in range(8))]))
    (tmp_path / "signals.csv").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    exec(python_block("own_arrays.md", "signals.csv"), {})  # noqa: S102
    small = ("--model.width", 16, "--model.depth", 1, "--training.epochs", 10)
    assert onescan("train", "signal_classifier", "--data.path", "data.npz", *small) == 0
    assert "in 2 classes (down, up), 8 values, 1 channel" in capsys.readouterr().out
    np.save("new.npy", np.array([np.arange(8), -np.arange(8)], np.float32))
    run = "runs/signal_classifier/seed-0"
    assert onescan("predict", run, "new.npy", "--top-k", 1) == 0
    assert re.findall(r"new.npy\[\d\]: (\w+)", capsys.readouterr().out) == ["up", "down"]


@pytest.mark.parametrize(
    ("page", "name", "path", "line"),
    [
        ("own_arrays.md", "regressor", "values.npz", "test signals with 2 values each"),
        ("own_arrays.md", "signal_classifier", "labels.npz", "test signals with 2 labels each"),
        ("own_series.md", "forecaster", "sales.csv", "data: 2 series, "),
    ],
)
def test_examples_of_the_guides_are_read(page, name, path, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(python_block(page, path), {})  # noqa: S102
    recipe, given = find_recipe(name), {"data.path": path}
    run = recipe.adapt(recipe(), given) if recipe.adapt else recipe()
    _, lines = recipe.infer(replace(run, given), given)
    assert line in lines[0]


def test_labels_with_gaps_are_warned_of(tmp_path):
    np.savez(tmp_path / "data.npz", x=np.ones((30, 40)), y=np.arange(30) % 3 * 2)
    _, lines = inferred("signal_classifier", tmp_path / "data.npz")
    assert lines[-1] == "warning: no training examples of class 1, 3; labels start at 0"


def test_labels_that_start_at_one_are_refused(tmp_path, capsys):
    np.savez(tmp_path / "data.npz", x=np.ones((30, 40)), y=np.arange(30) % 3 + 1)
    argv = ("train", "signal_classifier", "--data.path", tmp_path / "data.npz")
    assert onescan(*argv) == 2
    assert "the lowest label is 1, but labels start at 0: save y - 1" in capsys.readouterr().err


def test_corrupt_images_say_how_to_skip_them(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(8):
            (tmp_path / name / f"{number}.png").write_text("no image")
    with pytest.raises(ValueError, match=r"--data\.on-error skip"):
        inferred("image_classifier", tmp_path)
    skip = {"data.on_error": "skip"}
    for given in (skip, skip | {"data.image_size": (8, 8), "data.channels": 3}):
        with pytest.raises(ValueError, match="none of 13 sampled images can be read"):
            inferred("image_classifier", tmp_path, given)


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
    from onescan.cli.readers import images_at

    for name in ("a.png", "b.heic", "c"):
        (tmp_path / name).touch()
    assert [file.name for file, _ in images_at([tmp_path])] == ["a.png"]
    assert "2 of 3 files in " in caplog.text
    assert "1 .heic, 1 without a suffix" in caplog.text


# Whole images


def corner_images(folder, sizes):
    """Write white images with a dark bar at their left or right edge, as two classes."""
    for number, (width, height) in enumerate(sizes):
        for name, x in (("left", 0), ("right", width - 6)):
            (folder / name).mkdir(exist_ok=True)
            image = Image.new("L", (width, height), 255)
            ImageDraw.Draw(image).rectangle((x, 0, x + 5, height), fill=0)
            image.save(folder / name / f"{number}.png")


def test_whole_images_are_read_and_it_is_said(tmp_path):
    corner_images(tmp_path, [(32, 32)] * 6 + [(96, 32)] * 4)
    run, lines = inferred("image_classifier", tmp_path)
    assert "32 x 32 pixels (whole images, resized), 1 channel" in lines[0]
    splits = run.data.build()
    for data in (splits.train, splits.test):
        images, labels = data.read([Example(i) for i in range(len(data))]).batch
        left, right = (
            images[:, 0, :, 0].float().mean(dim=1),
            images[:, 0, :, -1].float().mean(dim=1),
        )
        assert ((left < 128) == (labels == 0)).all()
        assert ((right < 128) == (labels == 1)).all()
    assert any(
        "another aspect ratio, by a factor of up to 3.00; --data.test-crop 1 crops" in note
        for note in splits.notes
    )
    run, lines = inferred("image_classifier", tmp_path, {"data.test_crop": 1.0})
    assert "32 x 32 pixels (cropped to the center), 1 channel" in lines[0]
    assert any("cropped to the center: up to 67%" in note for note in run.data.build().notes)


def test_the_papers_recipes_keep_their_crop():
    for name in ("imagenet_lightnet_tiny", "cifar100_vit", "linearize_vit"):
        assert find_recipe(name)().data.test_crop == 0.875


# Denoisers of images


def test_a_denoiser_of_classes(shapes):
    run, lines = inferred("image_denoiser", shapes)
    assert lines[0] == (
        "data: 108 training and 12 test images in 3 classes (circle, square, triangle), "
        "24 x 32 pixels (whole images, resized), 3 channels"
    )
    model, settings = run.model, run.training
    assert (model.image_size, model.patch_size, model.channels) == ((24, 32), (2, 2), 3)
    assert (model.num_classes, run.task.sampler.guidance_scale) == (3, 2.0)
    assert run.data.mean == run.data.std == (0.5, 0.5, 0.5)
    assert settings.batch_size == 16
    assert settings.evaluate_every == settings.epochs / 10
    run.build_task()
    run.model.build()


@pytest.mark.parametrize("layout", ["flat", "one class", "splits"])
def test_a_denoiser_without_classes(tmp_path, layout):
    rng = random.Random(0)
    folders = {"flat": [""], "one class": ["cats"], "splits": ["train", "val/deeper"]}[layout]
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for number in range(20):
            draw("circle", rng).convert("L").save(tmp_path / folder / f"{number}.png")
    run, lines = inferred("image_denoiser", tmp_path)
    counts = "20 training and 20 test" if layout == "splits" else "18 training and 2 test"
    assert lines[0].startswith(f"data: {counts} images, 24 x 32 pixels")
    assert (run.data.labeled, run.model.num_classes, run.model.channels) == (False, 0, 1)
    assert run.task.sampler.guidance_scale == 1.0
    assert run.data.mean == (0.5,)
    task = run.build_task()
    batch = task.train.read([Example(0), Example(1)]).batch
    task.loss(run.model.build(), task.corrupt(task.augment(batch, 0), 0))
    with pytest.raises(ValueError, match="the data has one class, expected at least two"):
        replace(run, {"task": ImageClassificationConfig()}).build_task()


def test_unlabeled_data_are_folders_of_images(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"")
    write_parquet(tmp_path / "a.parquet", [0, 1, 0, 1])
    run, given = find_recipe("image_denoiser")(), {"data.labeled": False}
    run = replace(run, {"data.path": str(tmp_path), **given})
    with pytest.raises(ValueError, match=r"data\.labeled is False, but .* not a folder of image"):
        infer(run, given)


@pytest.mark.slow
def test_one_command_trains_a_denoiser_and_another_samples(tmp_path, capsys):
    rng = random.Random(0)
    for number in range(20):
        draw("circle", rng).save(tmp_path / f"{number}.png")
    out = tmp_path / "out"
    small = (
        "--training.steps", 2, "--model.depth", 1, "--model.width", 32, "--machine.trackers",
        "--task.samples-per-class", 1, "--task.sampler.steps", 2, "--task.augment.flip", 0.5,
    )  # fmt: skip
    assert onescan("train", "image_denoiser", "--data.path", tmp_path, "--out", out, *small) == 0
    assert "patches of 2 x 2" in capsys.readouterr().out
    made = tmp_path / "made.png"
    assert onescan("sample", out / "seed-0", "--num-images", 2, "--steps", 2, "--out", made) == 0
    assert made.exists()


# Language models


@pytest.mark.parametrize(
    ("size", "length", "width", "epochs"),
    [(1_500, 16, 64, 20), (5_000, 64, 64, 20), (40_000, 128, 64, 20), (300_000, 128, 128, 19)],
)
@pytest.mark.parametrize("name", ["language_model", "masked_language_model"])
def test_settings_of_a_language_model(tmp_path, name, size, length, width, epochs):
    file = tmp_path / "text.txt"
    file.write_text(("the quick brown fox " * (size // 20))[:size])
    run, lines = inferred(name, file)
    rows = len(run.data.build().train)
    assert lines[0].startswith(f"data: {rows:,} training and ")
    assert lines[0].endswith(f" test rows of {length} bytes")
    assert run.data.length == length
    assert rows >= 64
    assert (run.model.width, run.model.vocab_size) == (width, 258)
    settings = run.training
    assert (settings.steps, settings.epochs) == (None, epochs)
    assert settings.batch_size <= min(16, rows / 6)
    assert settings.evaluate_every == epochs / 10
    run.build_task()
    run.model.build()


def test_given_settings_of_a_language_model(tmp_path):
    (tmp_path / "text.txt").write_text("a mat and a cat sat " * 100)
    word_tokenizer().save_pretrained(tmp_path / "tokenizer")
    given = {"data.tokenizer": str(tmp_path / "tokenizer"), "data.length": 24, "model.depth": 2}
    run, lines = inferred("language_model", tmp_path / "text.txt", given)
    assert (run.data.length, run.model.depth, run.model.vocab_size) == (24, 2, len(WORDS))
    assert lines[0].endswith("rows of 24 tokens")


@pytest.mark.slow
def test_commands_for_own_text(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("a mat and a cat sat " * 100)
    small = ("--data.path", tmp_path / "text.txt", "--training.steps", 2, "--machine.trackers")
    for name, then in (
        ("language_model", ("generate", "--prompt", "a cat", "--max-new-tokens", 4)),
        ("masked_language_model", ("fill", "a [MASK] sat")),
    ):
        out = tmp_path / name
        assert onescan("train", name, *small, "--out", out) == 0
        assert "model: LightNet, 4 blocks of width 64" in capsys.readouterr().out
        command, *rest = then
        assert onescan(command, out / "seed-0", *rest) == 0
