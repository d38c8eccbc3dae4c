"""Image datasets from folders, parquet files and the hub: sources, classes, errors, decoding."""

import logging
import os
import sys
from copy import deepcopy
from dataclasses import replace
from random import Random

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet
from tiny_images import damage, encoded, serve_hub, write_folders, write_parquet

from onescan.experiments.data import Example, ImageDatasetConfig, RandomCropConfig
from onescan.experiments.recipes import RECIPES

pytestmark = pytest.mark.usefixtures("offline")

SMALL = {"image_size": (4, 4), "test_crop": None, "train_crop": None}
GRAY = {**SMALL, "channels": 1, "mean": (0.5,), "std": (0.5,)}
IMAGES = [{"bytes": encoded(50), "path": None}] * 4


def cifar_like(root, train=(0, 1, 2, 0, 1, 2), test=(2, 1, 0)):
    write_parquet(root / "train.parquet", list(train))
    write_parquet(root / "test.parquet", list(test), first=100)
    return str(root)


def cifar_columns(root, **columns):
    return write_parquet(root / "train.parquet", [0, 1, 0, 1], **columns)


def build(path, **options):
    return ImageDatasetConfig(path=str(path), **{**SMALL, **options}).build()


def read(images, places=None, seed=None):
    places = range(len(images)) if places is None else places
    return images.read([Example(place, seed) for place in places])


def seen(images, **options):
    """The brightness and the label of each image."""
    pixels, labels = read(images, **options).batch
    return pixels[:, 0, 0, 0].tolist(), labels.tolist()


# Sources


def test_class_folders_in_splits(tmp_path):
    write_folders(tmp_path, "train/cat", "val/dog")
    path = write_folders(tmp_path, "train/dog", "val/cat", count=1)
    splits = build(path)
    assert splits.class_names == ("cat", "dog")
    assert seen(splits.train) == ([0, 1, 0], [0, 0, 1])
    assert seen(splits.test) == ([0, 0, 1], [0, 1, 1])
    assert splits.train.decodes
    pixels, labels = read(splits.train).batch
    assert pixels.shape == (3, 3, 4, 4)
    assert (pixels.dtype, labels.dtype) == (torch.uint8, torch.int64)


def test_names_of_split_folders_may_be_capitalized(tmp_path):
    write_folders(tmp_path, "Train/cat", "Train/dog", "TEST/cat", count=1)
    splits = build(str(tmp_path))
    assert (splits.class_names, len(splits.train), len(splits.test)) == (("cat", "dog"), 2, 1)
    write_folders(tmp_path, "train/cat", count=1)
    with pytest.raises(ValueError, match="has two folders for the split train: Train and train"):
        build(str(tmp_path))


def test_class_folders_without_splits(tmp_path):
    write_folders(tmp_path / "a [b]*", "cat", count=10)
    path = write_folders(tmp_path / "a [b]*", "dog", count=20)
    splits, again = (build(path, test_fraction=0.2) for _ in range(2))
    assert (len(splits.train), len(splits.test)) == (24, 6)
    assert torch.equal(read(splits.test).batch[1].bincount(), torch.tensor([2, 4]))
    assert seen(splits.test) == seen(again.test)
    parts = (zip(*seen(part), strict=True) for part in (splits.train, splits.test))
    every = sorted(pair for part in parts for pair in part)
    assert every == [(i, c) for i in range(20) for c in (0, 1) if c or i < 10]


def test_the_class_is_the_first_folder_below_the_split(tmp_path):
    places = [f"{c}/{place}" for c in ("cat", "dog") for place in ("indoor", "outdoor/at night")]
    path = write_folders(
        tmp_path / "split", *(f"{s}/{p}" for s in ("train", "val") for p in places)
    )
    splits = build(path)
    assert splits.class_names == ("cat", "dog")
    for images in (splits.train, splits.test):
        assert seen(images) == ([0, 1] * 4, [0] * 4 + [1] * 4)
    splits = build(write_folders(tmp_path / "whole", *places), test_fraction=0.5)
    assert splits.train.labels.tolist() == [0] * 4 + [1] * 4


def test_links_are_followed_but_not_in_circles(tmp_path):
    far, path = tmp_path / "far", tmp_path / "near"
    write_folders(far, "cat", "dog")
    (path / "train").mkdir(parents=True)
    (path / "train" / "cat").symlink_to(far / "cat")
    (path / "train" / "dog").mkdir()
    (path / "train" / "dog" / "link.png").symlink_to(far / "dog" / "1.png")
    (path / "train" / "dog" / "up").symlink_to(tmp_path)
    (path / "train" / "dog" / "around").symlink_to(path / "train" / "dog")
    (path / "test").symlink_to(path / "train")
    splits = build(path)
    assert seen(splits.train) == seen(splits.test) == ([0, 1, 1], [0, 0, 1])
    cifar_like(tmp_path / "far parquet")
    (tmp_path / "near parquet").mkdir()
    (tmp_path / "near parquet" / "link").symlink_to(tmp_path / "far parquet")
    assert len(build(tmp_path / "near parquet").train) == 6


@pytest.mark.parametrize("target", ["nowhere", "lost.png"])
def test_a_broken_link_is_an_unreadable_image(tmp_path, target):
    path = write_folders(tmp_path, "train/cat", "train/dog", "test/cat", "test/dog")
    (tmp_path / "train" / "cat" / "lost.png").symlink_to(target)
    with pytest.raises(ValueError, match=r"row 2 of train \(.*cat/lost\.png\)"):
        read(build(path).train)


def test_hidden_and_empty_folders(tmp_path, caplog):
    path = write_folders(tmp_path, "cat", "dog", ".checkpoints", "__MACOSX")
    (tmp_path / "cat" / "._0.png").write_text("left by another system")
    (tmp_path / "eel").mkdir()
    with caplog.at_level(logging.WARNING, "onescan"):
        splits = build(path, test_fraction=0.5)
    assert splits.class_names == ("cat", "dog")
    assert len(splits.train) + len(splits.test) == 4
    assert sorted(caplog.messages) == sorted(
        [
            f"1 of 3 files in '{path}/cat' is left out: 1 hidden",
            f"2 of 2 files in '{path}/.checkpoints' are left out: 2 hidden",
            f"2 of 2 files in '{path}/__MACOSX' are left out: 2 hidden",
            f"'{path}/eel' contains no images and is left out",
        ]
    )
    assert set(caplog.messages) <= set(splits.notes)


def test_the_recipe_on_cifar100_reads_the_fine_labels_of_local_files(tmp_path):
    fine, coarse = (
        datasets.ClassLabel(names=[f"{kind} {i}" for i in range(count)])
        for kind, count in (("fine", 100), ("coarse", 20))
    )
    features = {"img": datasets.Image(), "fine_label": fine, "coarse_label": coarse}
    labels = [99, 0, 1, 98]
    rows = {"img": IMAGES, "fine_label": labels, "coarse_label": [0, 1, 0, 1]}
    table = datasets.Dataset.from_dict(rows, datasets.Features(features))
    for split in ("train", "test"):
        table.to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    data = RECIPES["cifar100_lion_s"]().data
    splits = replace(data, path=str(tmp_path), image_size=(4, 4)).build()
    assert splits.train.labels.tolist() == splits.test.labels.tolist() == labels
    assert splits.class_names == tuple(fine.names)
    with pytest.raises(ValueError, match="label_column is None, found fine_label and coarse_label"):
        replace(data, path=str(tmp_path), label_column=None).build()


def test_parquet_files(tmp_path):
    (tmp_path / "notes.txt").write_text("of another kind")
    splits = build(cifar_like(tmp_path), **GRAY)
    assert splits.class_names == ("0", "1", "2")
    assert seen(splits.train) == ([0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2])
    assert seen(splits.test, places=[2, 0]) == ([102, 100], [0, 2])
    assert read(splits.train).batch[0].shape == (6, 1, 4, 4)
    one = build(write_parquet(tmp_path / "all-test.parquet", [0, 1] * 10))
    assert (len(one.train), len(one.test)) == (18, 2)


def test_splits_by_the_names_of_files_and_folders(tmp_path):
    write_parquet(tmp_path / "train-and-test" / "train-00000-of-00002.parquet", [0, 1])
    write_parquet(tmp_path / "train-and-test" / "train-00001-of-00002.parquet", [1, 0], first=2)
    write_parquet(tmp_path / "train-and-test" / "valid" / "0.parquet", [1, 0], first=100)
    write_parquet(tmp_path / "train-and-test" / "test" / "0.parquet", [0, 1], first=200)
    splits = build(tmp_path)
    assert seen(splits.train) == ([0, 1, 2, 3], [0, 1, 1, 0])
    assert seen(splits.test)[0] == [100, 101]  # test may have no labels
    assert seen(build(tmp_path, test_split="test").test)[0] == [200, 201]


def test_a_hub_dataset(monkeypatch):
    features = datasets.Features(
        {
            "img": datasets.Image(),
            "label": datasets.Value("string"),
            "kind": datasets.ClassLabel(names=["a", "b"]),
        }
    )
    rows = {"img": IMAGES[:2], "label": ["x", "y"], "kind": [0, 1]}
    data = datasets.Dataset.from_dict(rows, features=features)
    calls = serve_hub(monkeypatch, data, "train", "validation")
    splits = build("some/thing", name="plain")
    assert calls == [("some/thing", "plain", s, False) for s in ("train", "validation")]
    assert splits.class_names == ("a", "b")
    assert seen(splits.test) == ([50, 50], [0, 1])


def test_nothing_is_printed_and_the_librarys_settings_stay(tmp_path, capfd):
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity_info()
    build(cifar_like(tmp_path))
    assert capfd.readouterr() == ("", "")
    assert datasets.logging.get_verbosity() == logging.INFO
    assert not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(level)


def test_a_batch_reads_its_rows_alone_in_any_process(tmp_path, monkeypatch):
    images = build(cifar_like(tmp_path)).train
    assert seen(deepcopy(images)) == seen(images)  # copied as for a worker process
    rows = []
    look_up = datasets.Dataset.__getitem__
    monkeypatch.setattr(
        datasets.Dataset, "__getitem__", lambda self, key: rows.append(key) or look_up(self, key)
    )
    read(images, places=[4, 1])
    assert rows == [[4, 1]]


# Columns and classes


def test_labels_may_be_strings_or_get_names(tmp_path):
    path = cifar_like(tmp_path / "text", ["dog", "cat", "eel", "ant"], ["cat", "dog"])
    splits = build(path)
    assert splits.class_names == ("ant", "cat", "dog", "eel")
    assert seen(splits.train)[1] == [2, 1, 3, 0]
    named = build(path, class_names=("dog", "cat", "ant", "eel"))
    assert seen(named.train)[1] == [0, 1, 3, 2]
    names = ("plane", "car", "bird", "none so far")
    assert build(cifar_like(tmp_path / "numbers"), class_names=names).class_names == names


def test_columns_can_be_chosen(tmp_path):
    path = cifar_columns(tmp_path, other=IMAGES, kind=[1, 1, 0, 0])
    splits = build(path, image_column="other", label_column="kind", test_fraction=0.5)
    assert splits.train.labels.tolist() == [1, 1, 0, 0]
    assert seen(splits.train)[0] == [50, 50]


def test_images_may_be_bytes_alone_and_cells_empty(tmp_path):
    rows = pa.table({"picture": [encoded(row) for row in range(4)], "class": [0, 1, 0, 1]})
    for split in ("train", "test"):
        parquet.write_table(rows, tmp_path / f"{split}.parquet")
    assert seen(build(tmp_path).train) == ([0, 1, 2, 3], [0, 1, 0, 1])
    rows = pa.table({"image": [None, IMAGES[0]] * 2, "label": [0, 1, 0, 1]})
    parquet.write_table(rows, tmp_path / "train.parquet")
    with pytest.raises(ValueError, match=r"row \d of train holds no image"):
        read(build(tmp_path / "train.parquet", test_fraction=0.5).train)


def one_class_of_one(root):
    write_folders(root, "cat", count=20)
    return write_folders(root, "dog", count=1)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        *(
            (lambda root, t=train, u=test: cifar_like(root, t, u), {}, message)
            for train, test, message in (
                ([0, 1, 2], [0, 3], r"row 1 of test .* 3, expected 0 to 2"),
                ([0, -1, 2], [0, 1], r"row 1 of train .* -1, expected 0 to 2"),
                ([0, 1, None], [0, 1], "row 2 of train has no label"),
                (["a", "b"], ["a", "c"], r"row 1 of test .* 'c', expected one of a, b"),
                ([1, 1, 1], [1, 0], r"data\.path is .*one class"),
                (["a", "a"], ["a", "a"], r"data\.path is .*one class"),
                ([1, 10**12], [1, 1], r"1000000000000, .* 1000000: .*label_column"),
                ([], [0, 1], r"data\.path is .*train is empty"),
                ([0, 1], [], r"data\.path is .*test is empty"),
            )
        ),
        *(
            (lambda root, c=columns: cifar_columns(root, **c), options, message)
            for options, columns, message in (
                ({"label_column": "kind"}, {}, "label_column is 'kind', .*: image, label"),
                ({"image_column": "label"}, {}, "image_column is 'label'"),
                ({"label_column": "x"}, {"x": [0.5] * 4}, "label_column is 'x', .* float64"),
                ({"label_column": "image"}, {}, "label_column is 'image', .* dict"),
                ({}, {"labels": [0, 1, 0, 1]}, "label_column is None, .* label and labels"),
                ({}, {"other": IMAGES}, "image_column is None, .* image and other"),
            )
        ),
        *(
            (lambda root, n=names: write_folders(root, *n), options, rf"data\.\w+ is .*{message}")
            for names, options, message in (
                (["."], {}, r"0\.png is in no class folder"),
                (["train"], {}, r"0\.png is in no class folder"),
                (["images", "masks"], {}, "use the recipe segmenter for segmentation"),
                (["train/cat", "test/cat"], {}, "one class"),
                (["train/cat", "train/dog", "val/images"], {}, "class 'images'"),
                (["cat", "dog", "test"], {}, "cat, dog, test; .* 'test'"),
                (["train/cat", "test/cat"], {"train_split": "dev"}, "'dev', but .* test, train$"),
                (["cat", "dog"], {"class_names": ("a", "b")}, r"\('a', 'b'\), but"),
            )
        ),
        *(
            (cifar_like, options, rf"data\.{message}")
            for options, message in (
                ({"train_split": "dev"}, "train_split is 'dev', .* test, train"),
                ({"test_split": "dev"}, "test_split is 'dev', .* test, train"),
                ({"test_split": "train"}, "test_split is 'train'"),
                ({"name": "plain"}, "name is 'plain', expected None"),
            )
        ),
        (one_class_of_one, {}, "class 'dog' has one example"),
        (cifar_like, {"train_split": "test", "test_fraction": 0.5}, "class '0' has one example"),
    ],
)
def test_unusable_data(tmp_path, make, options, message):
    path = make(tmp_path)
    with pytest.raises(ValueError, match=message):
        build(path, **options)


@pytest.mark.parametrize("name", [b"cat/\xff.png", b"\xff/0.png"])
def test_a_name_that_is_not_utf8_is_refused(tmp_path, name):
    path = write_folders(tmp_path, "cat", "dog")
    odd = tmp_path / os.fsdecode(name)
    odd.parent.mkdir(exist_ok=True)
    odd.write_bytes(encoded(0))
    with pytest.raises(ValueError, match=r"'.*\\udcff.*' is not UTF-8"):
        build(path)


# Missing or damaged data


def test_missing_data(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"data\.path is .*nowhere"):
        build(tmp_path / "nowhere")
    (tmp_path / "train").mkdir()
    text = tmp_path / "train" / "notes.txt"
    text.write_text("no image")
    with pytest.raises(ValueError, match=r"data\.path is .*without images or parquet files"):
        build(tmp_path)
    with pytest.raises(ValueError, match=r"data\.path is .*notes\.txt', expected a folder or a"):
        build(text)

    def refuse(*_):
        raise ConnectionError("Couldn't reach 'some/thing'\nfor many reasons")

    monkeypatch.setattr(datasets, "get_dataset_split_names", refuse)
    with pytest.raises(ValueError, match=r"data\.path is 'some/thing'.*reach 'some/thing'$"):
        build("some/thing")
    monkeypatch.chdir(tmp_path)
    for mistyped in ("train/nots", "images.parquet"):  # without the network
        with pytest.raises(ValueError, match="there is no such file or folder"):
            build(mistyped)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"onescan\[vision\]"):
        build(cifar_like(tmp_path))


@pytest.mark.parametrize("how", ["cut", "garbled"])
def test_a_damaged_parquet_file_is_named(tmp_path, monkeypatch, how):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    monkeypatch.setattr(logging.getLogger("datasets"), "handlers", [handler])
    path, file = cifar_like(tmp_path), tmp_path / "more-train.parquet"
    write_parquet(file, [0, 1] * 50)
    damage(file, how)
    with pytest.raises(ValueError, match=r"more-train\.parquet is not a complete parquet file"):
        build(path)
    assert records == []


@pytest.mark.parametrize("streaming", [False, True])
def test_parquet_files_that_differ_are_named(tmp_path, streaming):
    cifar_like(tmp_path)
    first, more = tmp_path / "train.parquet", tmp_path / "train2.parquet"
    write_parquet(more, [0, 1], first=50, color=[1, 2], kind=[3, 4])
    with pytest.raises(ValueError, match=f"{more} has columns that {first} lacks: color, kind"):
        build(tmp_path, streaming=streaming, class_names=("a", "b", "c"))
    write_parquet(more, ["of another", "type"])
    if not streaming:
        with pytest.raises(
            ValueError, match=f"label holds string in {more}, but int64 in {first}$"
        ):
            build(tmp_path)
    write_parquet(tmp_path / "extra.parquet", [0, 1])
    with pytest.raises(ValueError, match=r"extra\.parquet names no split"):
        build(tmp_path, streaming=streaming)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": (0, 4)}, "image_size is 0"),
        ({"std": (1.0, 0.0, 1.0)}, r"std is \(1.0, 0.0, 1.0\)"),
        ({"std": ()}, r"std is \(\), expected 3"),
        ({"channels": 1}, "mean is .* expected 1"),
        ({"test_crop": 1.5}, "test_crop is 1.5, expected above 0 and at most 1"),
        ({"train_examples": 3}, "train_examples"),
        ({"shuffle_block": 0}, "shuffle_block is 0"),
        ({"train_crop": RandomCropConfig(scale=(0.5, 1.5))}, r"train_crop.scale is \(0.5, 1.5\)"),
        ({"train_crop": RandomCropConfig(ratio=(2.0, 1.0))}, r"train_crop.ratio is \(2.0, 1.0\)"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_fields_are_checked_before_data_is_opened(
    tmp_path, monkeypatch, options, message, streaming
):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("it was opened"))
    if streaming and "train_examples" in options:
        options, message = {"train_examples": 0}, "train_examples is 0"
    with pytest.raises(ValueError, match=rf"data\.{message}"):
        build(cifar_like(tmp_path), streaming=streaming, **options)


# Decoding and cropping


@pytest.mark.parametrize("options", [SMALL, GRAY])
def test_eight_and_sixteen_bits_become_bytes(tmp_path, options):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.new("L", (4, 4), 128).save(tmp_path / name / "gray.png")
        Image.fromarray(np.full((4, 4), 0x8040, np.uint16)).save(tmp_path / name / "deep.png")
    pixels = read(build(tmp_path, test_fraction=0.5, **options).train).batch[0]
    assert torch.equal(pixels, torch.full_like(pixels, 128))


def damaged(tmp_path, places):
    """Two classes of four images, some of which are truncated."""
    names = [f"{split}/{name}" for split in ("train", "test") for name in ("cat", "dog")]
    path = write_folders(tmp_path, *names, count=4)
    for split in ("train", "test"):
        for place in places:
            file = tmp_path / split / "cat" / f"{place}.png"
            file.write_bytes(file.read_bytes()[:50])
    return path


def test_an_unreadable_image_raises_or_is_left_out_of_an_evaluation(tmp_path):
    path = damaged(tmp_path, [1])
    images = build(path).train
    with pytest.raises(ValueError, match=r"row 1 of train \(.*train/cat/1\.png\)"):
        read(images)
    read(images, places=[0, 2])
    loaded = read(build(path, on_error="skip").test, places=[0, 1, 4])
    assert loaded.batch[1].tolist() == [0, 1]
    assert len(loaded.failures) == 1


def test_no_image_of_an_evaluation_batch_may_be_readable(tmp_path):
    images = build(damaged(tmp_path, [1, 2]), on_error="skip").test
    loaded = read(images, places=[1, 2])
    assert [(x.shape, x.dtype) for x in loaded.batch] == [
        ((0, 3, 4, 4), torch.uint8),
        ((0,), torch.int64),
    ]
    assert len(loaded.failures) == 2


def test_the_next_readable_image_replaces_one_in_training(tmp_path):
    images = build(damaged(tmp_path, [2, 3]), on_error="skip").train
    loaded = read(images, places=[3, 1, 2, 3, 7], seed=5)
    assert loaded.batch[0][:, 0, 0, 0].tolist() == [1, 1, 3, 3, 3]
    assert loaded.batch[1].tolist() == [0, 0, 1, 1, 1]
    rows = [failure.split(" (")[0] for failure in loaded.failures]
    assert rows == [f"row {row} of train" for row in (3, 2, 3)]
    last = read(images, places=[0, 1, 2], seed=5)
    assert last.batch[0][:, 0, 0, 0].tolist() == [0, 1, 0]
    with pytest.raises(ValueError, match=r"none of a batch's 2 images .*row 2 of train"):
        read(images, places=[2, 3], seed=0)


def test_a_random_crop_is_a_function_of_the_seed(tmp_path):
    noise = Image.frombytes("L", (32, 32), Random(0).randbytes(32 * 32))
    path = write_folders(tmp_path, "train/cat", "train/dog", "test/cat", "test/dog", count=1)
    for file in tmp_path.rglob("*.png"):
        noise.save(file)
    splits = build(path, train_crop=RandomCropConfig())
    first, again, other = (read(splits.train, seed=seed).batch[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert torch.equal(first[0], first[1])  # the seed alone decides
    assert not torch.equal(first, other)
    assert torch.equal(read(splits.train).batch[0], read(splits.test).batch[0])


def test_the_test_crop_belongs_to_the_format(tmp_path):
    splits = build(cifar_like(tmp_path), image_size=(2, 4), test_crop=0.5)
    assert splits.format.box(8, 8) == (2, 3, 6, 5)
    assert read(splits.test).batch[0].shape == (3, 3, 2, 4)


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(0, 2**64))
def test_a_random_crop_has_an_allowed_area_and_aspect(width, height, seed):
    left, upper, right, lower = RandomCropConfig().build()(width, height, seed)
    slack = 1e-9 * (width + height)
    assert -slack <= left < right <= width + slack
    assert -slack <= upper < lower <= height + slack
    assert 3 / 4 - 1e-9 <= (right - left) / (lower - upper) <= 4 / 3 + 1e-9
    share = (right - left) * (lower - upper) / (width * height)
    assert share <= 1 + 1e-9
    if 3 / 4 <= width / height <= 4 / 3:
        assert share >= 0.08 - 1e-9


def test_random_crops_differ_in_area_and_place():
    boxes = torch.tensor([RandomCropConfig().build()(300, 300, seed) for seed in range(500)])
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) / 300**2
    # areas that do not fit are drawn again, so large ones are a little rarer
    assert 0.4 < area.mean() < 0.54
    assert (area.min(), area.max()) < (0.1, 1.0)
    center = (boxes[:, :2] + boxes[:, 2:]).mean(dim=0) / 2
    torch.testing.assert_close(center, torch.full((2,), 150.0), atol=8, rtol=0)


# Notes on what is left out or converted


def test_files_that_are_left_out_are_counted_by_folder_and_suffix(tmp_path, caplog):
    path = write_folders(tmp_path, "a", "b", count=20)
    for place in range(0, 18, 2):
        (tmp_path / "a" / f"{place}.png").rename(tmp_path / "a" / f"{place}.HEIC")
        (tmp_path / "a" / f"{place + 1}.png").rename(tmp_path / "a" / f"IMG_{place}")
    (tmp_path / "b" / "deep").mkdir()
    for name in ("paper.pdf", "film.mpg", "0.jpg.bak", "deep/caption.txt", ".hidden"):
        (tmp_path / "b" / name).touch()
    (tmp_path / "labels.csv").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "x.heic").touch()
    with caplog.at_level(logging.WARNING, "onescan"):
        splits = build(path, test_fraction=0.5)
    left_out = (
        f"18 of 20 files in '{path}/a' are left out: 9 .heic, 9 without a suffix",
        f"4 of 24 files in '{path}/b' are left out: 1 .bak, 1 .txt, 1 .mpg, 1 .pdf",
        f"1 of 1 file in '{path}/empty' is left out: 1 .heic",
        f"1 of 1 file in '{path}' is left out: 1 .csv",
        f"'{path}/empty' contains no images and is left out",
    )
    assert len(splits.train) + len(splits.test) == 22
    sort = lambda notes: sorted("".join(sorted(note)) for note in notes)  # suffixes in any order
    assert sort(splits.notes[:5]) == sort(left_out)
    assert caplog.messages == list(splits.notes[:5])
    assert splits.notes[5] == "11 of 22 examples are held out, because there is no test split"


def test_many_folders_share_one_note(tmp_path):
    path = write_folders(tmp_path, *(f"class {i:02}" for i in range(13)))
    for folder in tmp_path.iterdir():
        (folder / "Thumbs.db").touch()
    notes = [note for note in build(path, test_fraction=0.5).notes if "left out" in note]
    assert len(notes) == 11
    assert notes[-1] == "3 files in 3 other folders are left out"


def test_splits_columns_and_files_that_are_not_used_are_named(tmp_path):
    path = write_folders(tmp_path / "a", "train/x", "train/y", "val/x", "val/y", "test/x", "test/y")
    (tmp_path / "a" / "old").mkdir()
    (tmp_path / "a" / "0.png").write_bytes(encoded(0))
    assert build(path).notes == (
        f"1 of 1 file in '{path}' is left out: 1 .png",
        f"'{path}/old' contains no images and is left out",
        "splits not used: test",
    )
    for name in ("train", "test"):
        write_parquet(tmp_path / "b" / f"{name}.parquet", [0, 1], caption=["a", "b"])
    (tmp_path / "b" / "0.png").write_bytes(encoded(0))
    folder = str(tmp_path / "b")
    shared = (f"1 of 3 files in '{folder}' is left out: 1 .png", "columns not used: caption")
    assert build(folder).notes == (
        *shared,
        "classes are numbered, because the labels have no names",
    )
    stream = build(folder, streaming=True, class_names=("a", "b"))
    assert stream.notes == shared


@pytest.mark.parametrize("other", ["cat", "Cat ", "\uff23\uff21\uff34"])
def test_similar_class_names_are_noted(tmp_path, other):
    path = write_folders(tmp_path, "Cat", other, "dog", count=4)
    notes = build(path, test_fraction=0.5).notes
    assert any("similar names" in note for note in notes)
    write_parquet(tmp_path / "b" / "train.parquet", ["Cat", "cat", "dog"] * 4)
    notes = build(tmp_path / "b", test_fraction=0.5).notes
    assert "separate classes have similar names: 'Cat' and 'cat'" in notes


def test_classes_without_training_images_are_noted(tmp_path):
    write_parquet(tmp_path / "train.parquet", [1, 2, 1, 2])
    notes = build(tmp_path, test_fraction=0.5).notes
    assert "classes without training examples: 0" in notes


def test_conversions_are_counted(tmp_path):
    write_folders(tmp_path, "train/a", "train/b", "test/a", "test/b")
    folder, picture = tmp_path / "train" / "a", Image.new("RGB", (80, 40), (9, 99, 200))
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(folder / "turned.jpg", exif=exif)
    picture.convert("RGBA").save(folder / "alpha.png")
    picture.convert("CMYK").save(folder / "ink.jpg")
    picture.save(folder / "frames.gif", save_all=True, append_images=[Image.new("RGB", (80, 40))])
    picture.save(folder / "pages.tiff", save_all=True, append_images=[picture])
    Image.fromarray(np.full((40, 80), 999, np.uint16)).save(folder / "deep.png")
    (folder / "empty.png").touch()
    notes = build(tmp_path).notes
    assert set(notes) == {
        "1 of 11 training images can be transparent; transparent parts become black",
        "1 of 11 training images have 16 bits per channel, which are rounded to 8",
        "1 of 11 training images cannot be read",
        "2 of 11 training images have several frames or pages, of which the first is read",
        "1 of 11 training images are converted from CMYK to RGB",
        "1 of 11 training images are turned upright by their EXIF orientation",
        "images are stretched to another aspect ratio, by a factor of up to 2.00; "
        "--data.test-crop 1 crops them to the center instead",
    }
    gray = build(tmp_path, **{**GRAY, "test_crop": 1.0}).notes
    assert "5 of 11 training images are converted to grayscale" in gray
    assert "images are cropped to the center: up to 50% of a side is cut off" in gray


def test_a_large_folder_is_sampled(tmp_path, monkeypatch):
    monkeypatch.setattr("onescan.experiments.data.image_dataset.SURVEYED", 5)
    path = write_folders(tmp_path, "a", "b", count=20)
    for file in tmp_path.rglob("*.png"):
        Image.new("RGBA", (4, 4)).save(file)
    notes = build(path, test_fraction=0.5).notes
    assert any(
        note.startswith("5 of a sample of 5 training images can be transp") for note in notes
    )


def test_classes_without_test_images_are_noted(tmp_path):
    write_parquet(tmp_path / "train.parquet", [0, 1, 0, 1])
    write_parquet(tmp_path / "test.parquet", [0, 0])
    assert "classes without test examples: 1" in build(tmp_path).notes


@pytest.mark.parametrize("streaming", [False, True])
def test_parquet_files_with_other_stored_classes_are_refused(tmp_path, streaming):
    for split, names in (("train", ["cat", "dog"]), ("test", ["dog", "cat"])):
        features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
        rows = {"image": [Image.new("RGB", (4, 4))] * 4, "label": [0, 1, 0, 1]}
        data = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
        data.to_parquet(tmp_path / f"{split}.parquet")
    with pytest.raises(ValueError, match=r"label are dog, cat in .*, but cat, dog in .*train"):
        build(tmp_path, streaming=streaming)
