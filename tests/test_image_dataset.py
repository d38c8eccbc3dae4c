import io
import logging
import os
import socket
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

from onescan.data import Example, ImageDatasetConfig, RandomCropConfig

SMALL = {"image_size": (4, 4), "test_crop": None, "train_crop": None}
GREY = {**SMALL, "channels": 1, "mean": (0.5,), "std": (0.5,)}


@pytest.fixture(autouse=True)
def _on_its_own(tmp_path_factory, monkeypatch):
    """Keep the cache out of the home, and every call off the network."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(cache))
    monkeypatch.setattr("datasets.config.DOWNLOADED_DATASETS_PATH", str(cache / "downloads"))

    def refuse(*_):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def encoded(brightness, size=(4, 4), kind="PNG", mode="L"):
    """The bytes of an image of one brightness, by which a test knows it again."""
    file = io.BytesIO()
    Image.new("L", size, brightness).convert(mode).save(file, kind)
    return file.getvalue()


def folder_of(root, counts):
    """Folders of images, one for each class: {"train/cat": 3}. Brightness tells the place."""
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for place in range(count):
            (root / name / f"{place}.png").write_bytes(encoded(place))
    return str(root)


def write(path, label, *, first=0, **columns):
    """A parquet file; the first image's brightness is `first`, the next one's one more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": encoded(first + row), "path": None} for row in range(len(label))]
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    label = pa.array(label, None if label else pa.int64())
    rows = {"image": pa.array(images, kind), "label": label, **columns}
    parquet.write_table(pa.table(rows), path)
    return path


def cifar_like(root, train=(0, 1, 2, 0, 1, 2), test=(2, 1, 0)):
    write(root / "train.parquet", list(train))
    write(root / "test.parquet", list(test), first=100)
    return str(root)


def read(images, places=None, seed=None):
    places = range(len(images)) if places is None else places
    return images.read([Example(place, seed) for place in places])


def seen(images, **options):
    """The brightness and the label of each image."""
    pixels, labels = read(images, **options).batch
    return pixels[:, 0, 0, 0].tolist(), labels.tolist()


# Where the data is


def test_a_folder_of_classes_in_splits(tmp_path):
    path = folder_of(tmp_path, {"train/cat": 2, "train/dog": 1, "val/cat": 1, "val/dog": 2})
    splits = ImageDatasetConfig(path=path, **SMALL).build()
    assert splits.class_names == ("cat", "dog")
    assert seen(splits.train) == ([0, 1, 0], [0, 0, 1])
    assert seen(splits.test) == ([0, 0, 1], [0, 1, 1])
    assert splits.train.decodes
    pixels, labels = read(splits.train).batch
    assert pixels.shape == (3, 3, 4, 4)
    assert (pixels.dtype, labels.dtype) == (torch.uint8, torch.int64)


def test_a_folder_of_classes_alone_is_split_by_class(tmp_path):
    path = folder_of(tmp_path / "a [b]*", {"cat": 10, "dog": 20})
    config = ImageDatasetConfig(path=path, test_fraction=0.2, **SMALL)
    splits, again = config.build(), config.build()
    assert (len(splits.train), len(splits.test)) == (24, 6)
    assert torch.equal(read(splits.test).batch[1].bincount(), torch.tensor([2, 4]))
    assert seen(splits.test) == seen(again.test)
    whole = sorted(zip(*seen(splits.train), strict=True)) + list(
        zip(*seen(splits.test), strict=True)
    )
    assert sorted(whole) == [(i, c) for i in range(20) for c in (0, 1) if c or i < 10]


def folders_of(root, *names):
    return folder_of(root, dict.fromkeys(names, 2))


def test_the_class_is_the_first_folder_below_the_split(tmp_path):
    places = [f"{c}/{place}" for c in ("cat", "dog") for place in ("indoor", "outdoor/at night")]
    path = folders_of(tmp_path / "split", *(f"{s}/{p}" for s in ("train", "val") for p in places))
    splits = ImageDatasetConfig(path=path, **SMALL).build()
    assert splits.class_names == ("cat", "dog")
    for images in (splits.train, splits.test):
        assert seen(images) == ([0, 1] * 4, [0] * 4 + [1] * 4)
    whole = ImageDatasetConfig(path=folders_of(tmp_path / "whole", *places), **SMALL)
    splits = replace(whole, test_fraction=0.5).build()
    assert splits.class_names == ("cat", "dog")
    assert splits.train.labels.tolist() == [0] * 4 + [1] * 4


def test_links_are_followed_but_not_in_circles(tmp_path):
    far = tmp_path / "far"
    folders_of(far, "cat", "dog")
    path = tmp_path / "near"
    (path / "train").mkdir(parents=True)
    (path / "train" / "cat").symlink_to(far / "cat")
    (path / "train" / "dog").mkdir()
    (path / "train" / "dog" / "link.png").symlink_to(far / "dog" / "1.png")
    (path / "train" / "dog" / "up").symlink_to(tmp_path)
    (path / "train" / "dog" / "around").symlink_to(path / "train" / "dog")
    (path / "test").symlink_to(path / "train")
    splits = ImageDatasetConfig(path=str(path), **SMALL).build()
    assert seen(splits.train) == seen(splits.test) == ([0, 1, 1], [0, 0, 1])


@pytest.mark.parametrize("target", ["nowhere", "lost.png"])
def test_a_link_to_nowhere_or_itself_is_an_unreadable_image(tmp_path, target):
    path = folders_of(tmp_path, "train/cat", "train/dog", "test/cat", "test/dog")
    (tmp_path / "train" / "cat" / "lost.png").symlink_to(target)
    images = ImageDatasetConfig(path=path, **SMALL).build().train
    with pytest.raises(ValueError, match=r"row 2 of train \(.*cat/lost\.png\) cannot be read as"):
        read(images)


def test_what_is_hidden_is_no_class_and_no_image(tmp_path):
    path = folders_of(tmp_path, "cat", "dog", ".checkpoints", "__MACOSX")
    (tmp_path / "cat" / "._0.png").write_text("left by another system")
    splits = ImageDatasetConfig(path=path, test_fraction=0.5, **SMALL).build()
    assert splits.class_names == ("cat", "dog")
    assert len(splits.train) + len(splits.test) == 4


def test_parquet_files_behind_a_link(tmp_path):
    cifar_like(tmp_path / "far")
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "link").symlink_to(tmp_path / "far")
    splits = ImageDatasetConfig(path=str(tmp_path / "near"), **SMALL).build()
    assert (len(splits.train), len(splits.test)) == (6, 3)


def test_parquet_files_beside_others(tmp_path):
    (tmp_path / "notes.txt").write_text("of another kind")
    splits = ImageDatasetConfig(path=cifar_like(tmp_path), **GREY).build()
    assert splits.class_names == ("0", "1", "2")
    assert seen(splits.train) == ([0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2])
    assert seen(splits.test, places=[2, 0]) == ([102, 100], [0, 2])
    assert read(splits.train).batch[0].shape == (6, 1, 4, 4)


def test_splits_are_told_by_the_names_of_files_and_folders(tmp_path):
    write(tmp_path / "train-and-test" / "train-00000-of-00002.parquet", [0, 1])
    write(tmp_path / "train-and-test" / "train-00001-of-00002.parquet", [1, 0], first=2)
    write(tmp_path / "train-and-test" / "valid" / "0.parquet", [1, 0], first=100)
    write(tmp_path / "train-and-test" / "test" / "0.parquet", [0, 1], first=200)
    config = {"path": str(tmp_path), **SMALL}
    splits = ImageDatasetConfig(**config).build()
    assert seen(splits.train) == ([0, 1, 2, 3], [0, 1, 1, 0])
    assert seen(splits.test)[0] == [100, 101]  # before test, whose labels a hub may keep back
    assert seen(ImageDatasetConfig(**config, test_split="test").build().test)[0] == [200, 201]


def test_one_parquet_file_is_split(tmp_path):
    path = write(tmp_path / "all-test.parquet", [0, 1] * 10)
    splits = ImageDatasetConfig(path=str(path), **SMALL).build()
    assert (len(splits.train), len(splits.test)) == (18, 2)


def test_a_hub_data_set(monkeypatch):
    features = datasets.Features(
        {
            "img": datasets.Image(),
            "label": datasets.Value("string"),
            "kind": datasets.ClassLabel(names=["a", "b"]),
        }
    )
    images = [{"bytes": encoded(7), "path": None}] * 2
    rows = {"img": images, "label": ["x", "y"], "kind": [0, 1]}
    data = datasets.Dataset.from_dict(rows, features=features)
    asked = []

    def load(path, name, *, split, streaming):
        asked.append((path, name, split, streaming))
        return data

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *_: ["train", "validation"])
    monkeypatch.setattr(datasets, "load_dataset", load)
    splits = ImageDatasetConfig(path="some/thing", name="plain", **SMALL).build()
    assert asked == [("some/thing", "plain", s, False) for s in ("train", "validation")]
    assert splits.class_names == ("a", "b")
    assert seen(splits.test) == ([7, 7], [0, 1])


def test_nothing_is_said_and_the_library_is_left_as_it_was(tmp_path, capfd):
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity_info()
    ImageDatasetConfig(path=cifar_like(tmp_path), **SMALL).build()
    assert capfd.readouterr() == ("", "")
    assert datasets.logging.get_verbosity() == logging.INFO
    assert not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(level)


def test_a_data_set_goes_to_other_processes(tmp_path):
    splits = ImageDatasetConfig(path=cifar_like(tmp_path), **SMALL).build()
    assert seen(deepcopy(splits.train)) == seen(splits.train)  # copied as a process would


def test_only_the_rows_asked_for_are_read(tmp_path, monkeypatch):
    splits = ImageDatasetConfig(path=cifar_like(tmp_path), **SMALL).build()
    looked_up = []
    look_up = datasets.Dataset.__getitem__
    monkeypatch.setattr(
        datasets.Dataset,
        "__getitem__",
        lambda self, key: looked_up.append(key) or look_up(self, key),
    )
    read(splits.train, places=[4, 1])
    assert looked_up == [[4, 1]]


# Columns and classes


def test_labels_may_be_text(tmp_path):
    path = write(tmp_path / "train.parquet", ["dog", "cat", "eel", "ant"])
    write(tmp_path / "test.parquet", ["cat", "dog"])
    splits = ImageDatasetConfig(path=str(path.parent), **SMALL).build()
    assert splits.class_names == ("ant", "cat", "dog", "eel")
    assert seen(splits.train)[1] == [2, 1, 3, 0]
    names = ("dog", "cat", "ant", "eel")
    named = ImageDatasetConfig(path=str(path.parent), class_names=names, **SMALL).build()
    assert seen(named.train)[1] == [0, 1, 3, 2]


def test_numbers_get_the_names_given(tmp_path):
    names = ("plane", "car", "bird", "none so far")
    splits = ImageDatasetConfig(path=cifar_like(tmp_path), class_names=names, **SMALL).build()
    assert splits.class_names == names


def test_the_columns_asked_for_are_read(tmp_path):
    extra = {"other": [{"bytes": encoded(50), "path": None}] * 4, "kind": [1, 1, 0, 0]}
    path = write(tmp_path / "train.parquet", [0, 1, 0, 1], **extra)
    config = {"path": str(path), "test_fraction": 0.5, **SMALL}
    with pytest.raises(ValueError, match=r"data\.image_column is None, found image and other"):
        ImageDatasetConfig(**config).build()
    splits = ImageDatasetConfig(image_column="other", label_column="kind", **config).build()
    assert splits.train.labels.tolist() == [1, 1, 0, 0]
    assert seen(splits.train)[0] == [50, 50]


def test_images_may_be_bytes_alone(tmp_path):
    rows = pa.table({"picture": [encoded(row) for row in range(4)], "class": [0, 1, 0, 1]})
    parquet.write_table(rows, tmp_path / "train.parquet")
    parquet.write_table(rows, tmp_path / "test.parquet")
    splits = ImageDatasetConfig(path=str(tmp_path), **SMALL).build()
    assert seen(splits.train) == ([0, 1, 2, 3], [0, 1, 0, 1])


@pytest.mark.parametrize(
    ("options", "columns", "says"),
    [
        (
            {"label_column": "kind"},
            {},
            "data.label_column is 'kind', expected one of: image, label",
        ),
        ({"image_column": "label"}, {}, "data.image_column is 'label', which holds no images"),
        ({"label_column": "x"}, {"x": [0.5] * 4}, "data.label_column is 'x', which holds float64"),
        ({"label_column": "image"}, {}, "data.label_column is 'image', which holds dict"),
        ({}, {"labels": [0, 1, 0, 1]}, "data.label_column is None, found label and labels"),
    ],
)
def test_columns_that_will_not_do(tmp_path, options, columns, says):
    path = write(tmp_path / "train.parquet", [0, 1, 0, 1], **columns)
    with pytest.raises(ValueError, match=says):
        ImageDatasetConfig(path=str(path), **options, **SMALL).build()


@pytest.mark.parametrize(
    ("train", "test", "says"),
    [
        ([0, 1, 2], [0, 3], r"row 1 of test has the label 3, expected 0 to 2"),
        ([0, 1, 2], [-1, -1], r"row 0 of test has the label -1, expected 0 to 2"),
        ([0, -1, 2], [0, 1], r"row 1 of train has the label -1, expected 0 to 2"),
        ([0, 1, None], [0, 1], r"row 2 of train has no label"),
        (["a", "b"], ["a", "c"], r"row 1 of test has the label 'c', expected one of a, b"),
        ([1, 1, 1], [1, 0], "the training images are all of one class"),
        (
            [1, 10**12],
            [1, 1],
            "labels up to 1000000000000, expected less than 1000000: is data.lab",
        ),
        (["a", "a"], ["a", "a"], "the training images are all of one class"),
    ],
)
def test_labels_that_will_not_do(tmp_path, train, test, says):
    with pytest.raises(ValueError, match=says):
        ImageDatasetConfig(path=cifar_like(tmp_path, train, test), **SMALL).build()


def test_a_folder_of_one_class_is_refused(tmp_path):
    path = folder_of(tmp_path, {"train/cat": 3, "test/cat": 1})
    with pytest.raises(ValueError, match=f"data.path is '{path}', where .* are all of one class"):
        ImageDatasetConfig(path=path, **SMALL).build()


@pytest.mark.parametrize("place", [".", "train"])
def test_images_without_class_folders_are_refused(tmp_path, place):
    path = folders_of(tmp_path / "a", place)
    says = rf"^data\.path is '{path}', where {path}/\S*0\.png is in no class folder, expected FOLD"
    with pytest.raises(ValueError, match=says):
        ImageDatasetConfig(path=path, **SMALL).build()


def test_a_class_that_was_not_learnt_cannot_be_judged(tmp_path):
    path = folders_of(tmp_path, "train/cat", "train/dog", "val/images")
    says = r"where .*val has a folder of the class 'images', and .*train has none"
    with pytest.raises(ValueError, match=says):
        ImageDatasetConfig(path=path, **SMALL).build()


def test_a_class_called_as_a_split_is_hinted_at(tmp_path):
    path = folders_of(tmp_path, "cat", "dog", "test")
    says = "has: cat, dog, test; the folder called 'test' makes those beside it splits"
    with pytest.raises(ValueError, match=says):
        ImageDatasetConfig(path=path, **SMALL).build()
    path = folders_of(tmp_path / "plain", "train/cat", "test/cat")
    with pytest.raises(ValueError, match=r"has: test, train$"):
        ImageDatasetConfig(path=path, train_split="dev", **SMALL).build()


def test_an_empty_class_folder_is_told(tmp_path, caplog):
    path = folder_of(tmp_path, {"cat": 2, "dog": 2, "eel": 0})
    with caplog.at_level(logging.WARNING, "onescan"):
        splits = ImageDatasetConfig(path=path, test_fraction=0.5, **SMALL).build()
    assert splits.class_names == ("cat", "dog")
    assert caplog.messages == [f"'{path}/eel' holds no images, and is left out"]


@pytest.mark.parametrize("name", [b"cat/\xff.png", b"\xff/0.png"])
def test_a_name_that_is_no_text_is_refused(tmp_path, name):
    path = folders_of(tmp_path, "cat", "dog")
    odd = tmp_path / os.fsdecode(name)
    odd.parent.mkdir(exist_ok=True)
    odd.write_bytes(encoded(0))
    with pytest.raises(ValueError, match=r"the name of '.*\\udcff.*' is not UTF-8"):
        ImageDatasetConfig(path=path, **SMALL).build()


def test_classes_are_not_named_twice(tmp_path):
    path = folder_of(tmp_path, {"cat": 3, "dog": 3})
    with pytest.raises(ValueError, match=r"data\.class_names is \('a', 'b'\), but the data calls"):
        ImageDatasetConfig(path=path, class_names=("a", "b"), **SMALL).build()


def test_a_class_of_one_image_cannot_be_split(tmp_path):
    path = folder_of(tmp_path, {"cat": 20, "dog": 1})
    with pytest.raises(ValueError, match="class 1 has one example, expected 2"):
        ImageDatasetConfig(path=path, **SMALL).build()


# What is not there, or damaged


class LogTo(logging.Handler):
    def __init__(self, said):
        super().__init__()
        self.emit = said.append


def test_what_is_not_there(tmp_path):
    for path, says in (
        (tmp_path / "nowhere", "there is no such file or folder"),
        (tmp_path, "a folder without images or parquet files"),
    ):
        with pytest.raises(ValueError, match=f"data.path is .*{path.name}.*{says}"):
            ImageDatasetConfig(path=str(path), **SMALL).build()
    (tmp_path / "train").mkdir()
    text = tmp_path / "train" / "notes.txt"
    text.write_text("no image")
    with pytest.raises(ValueError, match="a folder without images"):
        ImageDatasetConfig(path=str(tmp_path), **SMALL).build()
    with pytest.raises(ValueError, match=r"notes\.txt', expected a folder or a parquet file"):
        ImageDatasetConfig(path=str(text), **SMALL).build()


def test_a_name_that_the_hub_does_not_know(monkeypatch):
    def refuse(*_):
        raise ConnectionError("Couldn't reach 'some/thing'\nfor many reasons")

    monkeypatch.setattr(datasets, "get_dataset_split_names", refuse)
    with pytest.raises(ValueError, match=r"'some/thing', which is not on disk, nor on .*/thing'$"):
        ImageDatasetConfig(path="some/thing", **SMALL).build()


def test_a_missing_split_lists_those_that_exist(tmp_path):
    path = cifar_like(tmp_path)
    for field in ("train_split", "test_split"):
        with pytest.raises(ValueError, match=rf"data\.{field} is 'dev', but .* has: test, train"):
            ImageDatasetConfig(path=path, **{field: "dev"}, **SMALL).build()


def test_one_split_cannot_play_both_roles(tmp_path):
    path = cifar_like(tmp_path)
    with pytest.raises(ValueError, match=r"data\.test_split is 'train', expected another"):
        ImageDatasetConfig(path=path, test_split="train", **SMALL).build()
    splits = ImageDatasetConfig(path=path, train_split="test", test_fraction=0.5, **SMALL)
    with pytest.raises(ValueError, match=r"data\.test_fraction is 0\.5, which holds out 2 of 3"):
        splits.build()


@pytest.mark.parametrize(("train", "test", "empty"), [([], [0, 1], "train"), ([0, 1], [], "test")])
def test_an_empty_split_is_refused(tmp_path, train, test, empty):
    with pytest.raises(ValueError, match=f"data.path is .*, whose split {empty} is empty"):
        ImageDatasetConfig(path=cifar_like(tmp_path, train, test), **SMALL).build()


def test_a_file_without_a_split_among_others_is_refused(tmp_path):
    cifar_like(tmp_path)
    write(tmp_path / "extra.parquet", [0, 1])
    with pytest.raises(ValueError, match=r"extra\.parquet names no split and others do"):
        ImageDatasetConfig(path=str(tmp_path), **SMALL).build()


def test_a_configuration_is_for_hubs(tmp_path):
    with pytest.raises(ValueError, match=r"data\.name is 'plain', expected none"):
        ImageDatasetConfig(path=cifar_like(tmp_path), name="plain", **SMALL).build()


@pytest.mark.parametrize("damage", ["cut", "garbled"])
def test_a_damaged_parquet_file_is_named(tmp_path, monkeypatch, damage):
    said = []
    monkeypatch.setattr(logging.getLogger("datasets"), "handlers", [LogTo(said)])
    path = cifar_like(tmp_path)
    write(tmp_path / "more-train.parquet", [0, 1] * 50)
    whole = bytearray((tmp_path / "more-train.parquet").read_bytes())
    if damage == "cut":
        del whole[len(whole) // 2 :]
    else:
        whole[4:2000] = bytes(1996)
    (tmp_path / "more-train.parquet").write_bytes(whole)
    with pytest.raises(ValueError, match=r"more-train\.parquet is not a complete parquet file: "):
        ImageDatasetConfig(path=path, **SMALL).build()
    assert said == []


@pytest.mark.parametrize("streaming", [False, True])
def test_parquet_files_of_different_columns_are_named(tmp_path, streaming):
    path = cifar_like(tmp_path)
    write(tmp_path / "train2.parquet", [0, 1], first=50, colour=[1, 2], kind=[3, 4])
    names = ("a", "b", "c")
    config = ImageDatasetConfig(path=path, streaming=streaming, class_names=names, **SMALL)
    with pytest.raises(ValueError, match=r"\.parquet has columns") as error:
        config.build()
    first, more = tmp_path / "train.parquet", tmp_path / "train2.parquet"
    assert str(error.value) == (
        f"data.path is {path!r}, where {more} has columns that {first} has not: colour, kind"
    )


def test_parquet_files_of_different_types_are_named(tmp_path):
    path = cifar_like(tmp_path)
    write(tmp_path / "train2.parquet", ["of another", "type"])
    first, more = tmp_path / "train.parquet", tmp_path / "train2.parquet"
    says = f"cannot be read: the column label of {more} holds string, of {first} int64$"
    with pytest.raises(ValueError, match=says):
        ImageDatasetConfig(path=path, **SMALL).build()


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"need datasets: pip install 'onescan\[vision\]'"):
        ImageDatasetConfig(path=cifar_like(tmp_path), **SMALL).build()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"image_size": (0, 4)}, "data.image_size is 0"),
        ({"std": (1.0, 0.0, 1.0)}, "data.std is 0"),
        ({"std": ()}, r"data.std is \(\), expected 3 numbers"),
        ({"channels": 1}, r"data.mean is .* expected 1 numbers: data.channels is 1"),
        ({"test_crop": 1.5}, "data.test_crop is 1.5, expected above 0 and at most 1"),
        ({"train_examples": 3}, "data.train_examples is for streams"),
        ({"shuffle_block": 0}, "data.shuffle_block is 0"),
        (
            {"train_crop": RandomCropConfig(scale=(0.5, 1.5))},
            "data.train_crop.scale is .* at most 1",
        ),
        ({"train_crop": RandomCropConfig(ratio=(2.0, 1.0))}, "data.train_crop.ratio is"),
        ({"test_fraction": 1.0}, "data.test_fraction is 1.0, expected between 0 and 1"),
    ],
)
def test_fields_out_of_range_are_refused(tmp_path, options, says):
    path = str(write(tmp_path / "train.parquet", [0, 1] * 5))
    with pytest.raises(ValueError, match=says):
        ImageDatasetConfig(**{"path": path, **SMALL, **options}).build()


@pytest.mark.parametrize("streaming", [False, True])
def test_a_crop_out_of_range_is_refused_before_anything_is_opened(tmp_path, monkeypatch, streaming):
    config = ImageDatasetConfig(
        path=cifar_like(tmp_path),
        streaming=streaming,
        train_crop=RandomCropConfig(scale=(0.5, 1.5)),
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("it was opened"))
    with pytest.raises(ValueError, match=r"data\.train_crop\.scale is .* at most 1"):
        config.build()


# Decoding


def test_every_mode_becomes_bytes(tmp_path):
    deep = Image.fromarray(np.full((4, 4), 0x8040, dtype=np.uint16))
    for name, image in {
        "grey": Image.new("L", (4, 4), 128),
        "clear": Image.new("LA", (4, 4), (255, 128)),
        "colour": Image.new("RGB", (4, 4), (128, 128, 128)),
        "glass": Image.new("RGBA", (4, 4), (255, 255, 255, 128)),
        "palette": Image.new("RGB", (4, 4), (128, 128, 128)).convert(
            "P", palette=Image.Palette.ADAPTIVE
        ),
        "deep": deep,
    }.items():
        (tmp_path / name).mkdir()
        for place in range(2):
            image.save(tmp_path / name / f"{place}.png")
    ink = tmp_path / "ink"
    ink.mkdir()
    for place in range(2):
        Image.new("CMYK", (4, 4), (127, 127, 127, 0)).save(ink / f"{place}.tiff")
    for options in (SMALL, GREY):
        config = ImageDatasetConfig(path=str(tmp_path), test_fraction=0.5, **options)
        pixels = read(config.build().train).batch[0]
        assert torch.equal(pixels, torch.full_like(pixels, 128))


def spoil(tmp_path, places, count=4):
    """A folder of two classes, some of whose images are cut short."""
    path = folder_of(
        tmp_path, {"train/cat": count, "train/dog": count, "test/cat": count, "test/dog": count}
    )
    for split in ("train", "test"):
        for place in places:
            file = tmp_path / split / "cat" / f"{place}.png"
            file.write_bytes(file.read_bytes()[:50])
    return path


def test_an_unreadable_image_ends_the_run_by_name(tmp_path):
    splits = ImageDatasetConfig(path=spoil(tmp_path, [1]), **SMALL).build()
    says = r"row 1 of train \(.*train/cat/1\.png\) (cannot be read as|is not) an image"
    with pytest.raises(ValueError, match=says):
        read(splits.train)
    read(splits.train, places=[0, 2])


def test_the_next_readable_image_stands_in_for_one_that_is_not(tmp_path):
    config = ImageDatasetConfig(path=spoil(tmp_path, [2, 3]), on_error="skip", **SMALL)
    splits = config.build()
    loaded = read(splits.train, places=[3, 1, 2, 3, 7], seed=5)
    assert loaded.batch[0][:, 0, 0, 0].tolist() == [1, 1, 3, 3, 3]
    assert loaded.batch[1].tolist() == [0, 0, 1, 1, 1]
    assert [failure.split(" (")[0] for failure in loaded.failures] == [
        "row 3 of train",
        "row 2 of train",
        "row 3 of train",
    ]
    last = read(splits.train, places=[0, 1, 2], seed=5)
    assert last.batch[0][:, 0, 0, 0].tolist() == [0, 1, 0]


def test_an_unreadable_image_is_left_out_of_an_evaluation(tmp_path):
    config = ImageDatasetConfig(path=spoil(tmp_path, [1]), on_error="skip", **SMALL)
    loaded = read(config.build().test, places=[0, 1, 4])
    assert loaded.batch[1].tolist() == [0, 1]
    assert len(loaded.failures) == 1


def test_a_batch_without_a_readable_image_is_refused(tmp_path):
    config = ImageDatasetConfig(path=spoil(tmp_path, [1, 2]), on_error="skip", **SMALL)
    with pytest.raises(ValueError, match="none of a batch's 2 images can be read: row 1 of train"):
        read(config.build().train, places=[1, 2], seed=0)


def test_an_empty_cell_is_an_unreadable_image(tmp_path):
    rows = pa.table(
        {"image": [None, {"bytes": encoded(1), "path": None}] * 2, "label": [0, 1, 0, 1]}
    )
    parquet.write_table(rows, tmp_path / "train.parquet")
    config = ImageDatasetConfig(path=str(tmp_path), test_fraction=0.5, **SMALL)
    with pytest.raises(ValueError, match=r"row \d of train holds no image"):
        read(config.build().train)


# Cropping


def test_a_random_crop_is_a_function_of_the_seed(tmp_path):
    noise = Random(0).randbytes(32 * 32)
    for name in ("cat", "dog"):
        for split in ("train", "test"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.frombytes("L", (32, 32), noise).save(tmp_path / split / name / "0.png")
    splits = ImageDatasetConfig(
        path=str(tmp_path), **{**SMALL, "train_crop": RandomCropConfig()}
    ).build()
    first, again, other = (read(splits.train, seed=seed).batch[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert torch.equal(first[0], first[1])  # the seed alone
    assert not torch.equal(first, other)
    # without chance, all of it
    assert torch.equal(read(splits.train).batch[0], read(splits.test).batch[0])


def test_the_test_crop_is_the_formats(tmp_path):
    path = cifar_like(tmp_path)
    splits = ImageDatasetConfig(path=path, image_size=(2, 4), test_crop=0.5).build()
    assert splits.format.box(8, 8) == (2, 3, 6, 5)
    assert read(splits.test).batch[0].shape == (3, 3, 2, 4)


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(0, 2**64))
def test_a_random_crop_is_inside_and_of_the_area_and_aspect_asked_for(width, height, seed):
    left, upper, right, lower = RandomCropConfig().build()(width, height, seed)
    slack = 1e-9 * (width + height)
    assert -slack <= left < right <= width + slack
    assert -slack <= upper < lower <= height + slack
    aspect = (right - left) / (lower - upper)
    assert 3 / 4 - 1e-9 <= aspect <= 4 / 3 + 1e-9
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
    middle = (boxes[:, :2] + boxes[:, 2:]).mean(dim=0) / 2
    torch.testing.assert_close(middle, torch.full((2,), 150.0), atol=8, rtol=0)
