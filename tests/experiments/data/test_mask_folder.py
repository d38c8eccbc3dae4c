"""Images with masks: folders, sizes, classes, splits, and the recipe that reads them."""

import logging
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from onescan import configs
from onescan.cli import main
from onescan.experiments.data import Example, MaskFolderConfig
from onescan.experiments.recipes import find_recipe
from onescan.experiments.recipes.infer import adapt, infer
from onescan.experiments.tasks import BatchPlan, SegmentationConfig
from onescan.experiments.training.data import Loader
from onescan.inference.loading import load

RNG = np.random.default_rng(0)
SIZE = (10, 12)


def add(folder, name, mask=None, size=SIZE, mode="RGB", mask_mode="L"):
    """Write an image and its mask, which is 1 where the image is bright."""
    for each in ("images", "masks"):
        (folder / each).mkdir(parents=True, exist_ok=True)
    pixels = RNG.integers(0, 256, size, dtype=np.uint8)
    mask = (pixels > 127).astype(np.uint8) if mask is None else mask
    Image.fromarray(pixels).convert(mode).save(folder / "images" / f"{name}.jpg", quality=100)
    Image.fromarray(mask).convert(mask_mode).save(folder / "masks" / f"{name}.png")
    return mask


@pytest.fixture
def folder(tmp_path):
    masks = {name: add(tmp_path, name) for name in ("a", "b", "c", "d")}
    (tmp_path / "masks" / "notes.txt").write_text("")
    return tmp_path, masks


def config_of(folder, **options):
    return MaskFolderConfig(path=str(folder), image_size=SIZE, test_fraction=0.25, **options)


def batch_of(data):
    return data.read([Example(place) for place in range(len(data))]).batch


def test_masks_belong_to_their_images(folder):
    path, masks = folder
    splits = config_of(path).build()
    assert splits.class_names == ("0", "1")
    assert splits.target.kind == "class_map"
    assert (len(splits.train), len(splits.test)) == (3, 1)
    for part in (splits.train, splits.test):
        images, classes = batch_of(part)
        assert (images.dtype, images.shape[1:]) == (torch.uint8, (3, *SIZE))
        for pair, mask, image in zip(part.pairs, classes, images, strict=True):
            assert np.array_equal(mask.numpy(), masks[pair.image.stem])
            assert ((image.float().mean(0) > 127) == mask.bool()).float().mean() > 0.9
    assert any("25" in note or "1 of 4" in note for note in splits.notes)


def test_images_and_masks_are_resized_together(folder):
    path, masks = folder
    images, classes = batch_of(replace(config_of(path), image_size=(20, 24)).build().train)
    assert images.shape[2:] == (20, 24)
    first = config_of(path).build().train.pairs[0].image.stem
    assert np.array_equal(classes[0].numpy(), np.kron(masks[first], np.ones((2, 2))))


def test_splits_in_folders_are_used(tmp_path):
    add(tmp_path / "train", "a")
    for name in ("a", "b"):
        add(tmp_path / "val", name)
    splits = config_of(tmp_path).build()
    assert (len(splits.train), len(splits.test)) == (1, 2)
    assert splits.train.pairs[0].image == tmp_path / "train" / "images" / "a.jpg"


def test_names_of_folders_may_be_capitalized(tmp_path):
    for split in ("Train", "VAL"):
        add(tmp_path / split, "a")
        for name in ("images", "masks"):
            (tmp_path / split / name).rename(tmp_path / split / name.capitalize())
    splits = config_of(tmp_path).build()
    assert splits.test.pairs[0].mask == tmp_path / "VAL" / "Masks" / "a.png"
    assert splits.notes == ("the test images are those in VAL",)
    assert isinstance(
        adapt(find_recipe("segmenter")(), {"data.path": str(tmp_path)}).data, MaskFolderConfig
    )


def test_files_that_are_left_out_are_counted_by_folder_and_suffix(tmp_path, caplog, monkeypatch):
    for split in ("train", "val", "test"):
        add(tmp_path / split, "a")
    add(tmp_path / "train" / "images", "b")
    images, masks = (tmp_path / "train" / name for name in ("images", "masks"))
    Image.new("L", SIZE).save(masks / "c.png")
    for file in (images / "d.HEIC", images / ".e.jpg", images / ".f", masks / "notes.txt"):
        file.touch()
    (images / "g.png").mkdir()
    (tmp_path / "README.md").touch()
    with caplog.at_level(logging.WARNING, "onescan"):
        splits = config_of(tmp_path).build()
    assert len(splits.train) == len(splits.test) == 1
    assert {*splits.notes} == {
        f"1 of 1 file in '{images}/images' is left out: 1 .jpg",
        f"1 of 1 file in '{images}/masks' is left out: 1 .png",
        f"1 of 1 file in '{tmp_path}' is left out: 1 .md",
        f"1 of 1 file in '{tmp_path}/test/images' is left out: 1 .jpg",
        f"1 of 1 file in '{tmp_path}/test/masks' is left out: 1 .png",
        f"2 of 3 files in '{images}' are left out: 1 hidden, 1 .heic",
        f"2 of 3 files in '{masks}' are left out: 1 .png, 1 .txt",
        f"masks without an image: {masks}/c.png",
        "the test images are those in val",
    }
    assert {*caplog.messages} < {*splits.notes}
    monkeypatch.chdir(tmp_path)
    assert len(config_of(".").build().notes) == len(splits.notes)


def test_palette_indices_ignored_and_binary_values(tmp_path):
    mask = np.zeros(SIZE, np.uint8)
    mask[0], mask[1], mask[2] = 1, 2, 255
    for name in ("a", "b"):
        add(tmp_path, name, mask)
    palette = Image.fromarray(mask, mode="P")
    palette.putpalette(RNG.integers(0, 256, 768).tolist())
    palette.save(tmp_path / "masks" / "a.png")
    with pytest.raises(ValueError, match=r"are 0, 1, 2, 255, .* if 255 marks .* --data.binary"):
        config_of(tmp_path).build()
    splits = config_of(tmp_path, ignore_index=255).build()
    assert splits.class_names == ("0", "1", "2")
    classes = torch.cat([batch_of(splits.train)[1], batch_of(splits.test)[1]])
    assert classes[:, :4, 0].tolist() == [[1, 2, -100, 0]] * 2
    binary = batch_of(config_of(tmp_path, binary=True).build().train)[1]
    assert binary[0, :4, 0].tolist() == [1, 1, 1, 0]


def test_workers_read_masks(folder):
    path, _ = folder
    train = config_of(path).build().train
    plan = [BatchPlan([Example(2), Example(0)], None)]
    expected = train.read(plan[0].examples).batch
    loader = Loader(train, iter(plan), workers=1, pin=False)
    try:
        assert all(map(torch.equal, next(iter(loader)), expected))
    finally:
        loader.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: (p / "masks" / "b.png").unlink(), r"b\.jpg has no mask .*masks.b\.png"),
        (lambda p: add(p, "b", np.ones((5, 5), np.uint8)), r"b\.png has 5 x 5 pixels, but .* 12 x"),
        (lambda p: add(p, "b", mask_mode="RGB"), r"b\.png has mode RGB, expected one class"),
        (lambda p: (p / "masks" / "b.png").write_text("no"), r"b\.png cannot be read"),
        (lambda p: (p / "images" / "b.jpg").write_text("no"), r"b\.jpg "),
        (lambda p: add(p, "b", np.full(SIZE, 7, np.uint8)), r"b\.png has class 7, expected 0 to 1"),
        (lambda p: (p / "masks" / "b.gif").touch(), "differ only in the suffix"),
        (lambda p: (p / "masks").rename(p / "others"), "there is no folder .*masks"),
    ],
)
def test_what_is_wrong_is_named(folder, change, message):
    path, _ = folder
    change(path)
    config = config_of(path, class_names=("dark", "bright"))
    with pytest.raises(ValueError, match=message):
        list(map(batch_of, (config.build().train, config.build().test)))


def test_masks_are_checked_before_training(tmp_path):
    for name in "ab":
        add(tmp_path / "train", name)
    mask = add(tmp_path / "val", "c", np.full(SIZE, 2, np.uint8))
    with pytest.raises(ValueError, match=r"a test mask in .* has class 2, expected 0 to 1"):
        config_of(tmp_path).build()
    Image.fromarray(mask).save(tmp_path / "val" / "masks" / "c.png", format="JPEG")
    with pytest.raises(ValueError, match=r"c\.png is a JPEG file, whose compression changes pix"):
        config_of(tmp_path, class_names=("a", "b", "c")).build()
    add(tmp_path / "val", "c", np.zeros((9, 12), np.uint8))
    with pytest.raises(ValueError, match=r"c\.png has 12 x 9 pixels, but .*c\.jpg has 12 x 10"):
        config_of(tmp_path, class_names=("a", "b")).build()


def test_negative_values_are_no_classes(tmp_path):
    for name in "ab":
        add(tmp_path, name)
        (tmp_path / "masks" / f"{name}.png").unlink()
        mask = np.full(SIZE, -1, np.int32)
        mask[:3] = 1
        Image.fromarray(mask).save(tmp_path / "masks" / f"{name}.tiff")
    config = config_of(tmp_path, class_names=("dark", "bright"))
    with pytest.raises(ValueError, match=r"\.tiff has class -1, expected 0 to 1"):
        batch_of(config.build().train)
    classes = batch_of(config_of(tmp_path, ignore_index=-1).build().train)[1]
    assert classes[:, :4, 0].tolist() == [[1, 1, 1, -100]]


def test_masks_of_one_class_are_refused(tmp_path):
    add(tmp_path, "a", np.zeros(SIZE, np.uint8))
    add(tmp_path, "b", np.zeros(SIZE, np.uint8))
    with pytest.raises(ValueError, match=r"all positions of the masks in .* have class 0"):
        config_of(tmp_path).build()


def adapted(path):
    options = {"data.path": str(path)}
    return infer(adapt(find_recipe("segmenter")(), options), options)


def test_the_recipe_reads_masks(tmp_path):
    for i in range(8):
        mask = np.zeros(SIZE, np.uint8)
        mask[:4, i % 3 :] = 255
        add(tmp_path, f"{i}", mask, mode="L")
    run, lines = adapted(tmp_path)
    assert isinstance(run.data, MaskFolderConfig)
    assert isinstance(run.task, SegmentationConfig)
    assert (run.data.binary, run.data.class_names, run.data.channels) == (True, ("0", "1"), 1)
    assert run.data.image_size == run.model.image_size == (8, 12)
    assert "images with one of 2 classes at each position (0, 1), 8 x 12 pixels" in lines[0]
    assert lines[-1].startswith("masks: 255 is class 1; if it marks")
    options = {"data.path": str(tmp_path), "data.binary": ""}
    with pytest.raises(
        ValueError, match=r"the classes of the masks .* are 0, 255, expected 0 to 1"
    ):
        infer(adapt(find_recipe("segmenter")(), {"data.path": str(tmp_path)}), options)
    images = batch_of(configs.replace(run.data, {"test_fraction": 0.5}).build().train)[0]
    assert 0.2 < run.data.mean[0] < 0.8
    assert images.shape[1] == 1
    run.build_task()


@pytest.mark.slow
def test_masks_are_trained_and_predicted(tmp_path, capsys):
    data, out = tmp_path / "data", tmp_path / "out"
    for i in range(12):
        add(data, f"{i}")
    small = ("--model.depth", "1", "--model.width", "16", "--training.epochs", "2")
    command = ["train", "segmenter", "--data.path", str(data), "--out", str(out), *small]
    assert main([*command, "--machine.trackers"]) == 0
    assert "test mean iou" in capsys.readouterr().out
    assert load(out / "seed-0").class_names == ("0", "1")
    images, run = data / "images", str(out / "seed-0")
    (images / "bad.jpg").write_text("no")
    assert main(["predict", run, str(images), "--out", str(tmp_path / "maps")]) == 0
    assert "skipped: " in (shown := capsys.readouterr().out)
    assert re.search(r"3\.jpg: (0|1) [\d.]+%", shown)
    (images / "bad.jpg").unlink()
    assert sorted(file.stem for file in (tmp_path / "maps").iterdir()) == sorted(
        map(str, range(12))
    )
    with Image.open(tmp_path / "maps" / "3.png") as picture:
        assert picture.size == (SIZE[1], SIZE[0])
    (images / "a").mkdir()
    (images / "3.jpg").rename(images / "a" / "2.jpg")
    assert main(["predict", run, str(images), "--out", str(tmp_path / "others")]) == 2
    assert "would both be written to" in capsys.readouterr().err
    assert not (tmp_path / "others").exists()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "x.png").write_text("no")
    assert main(["predict", run, str(tmp_path / "empty")]) == 2
    assert "there is no readable file" in capsys.readouterr().err
