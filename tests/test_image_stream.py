import io
import itertools
import json
from dataclasses import replace

import datasets
import pyarrow as pa
import pytest
import torch
from datasets.packaged_modules.parquet.parquet import Parquet
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet

from onescan.data import ImageDatasetConfig
from onescan.data.image_dataset import Classes

CLASSES = ("a", "b", "c")
SIZES = [5, 1, 7, 4, 6]  # rows of each file


def encoded(brightness):
    file = io.BytesIO()
    Image.new("L", (2, 2), brightness).save(file, "PNG")
    return file.getvalue()


def write(path, first, count, label=lambda row: row % 3):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = range(first, first + count)
    images = [{"bytes": encoded(row), "path": None} for row in rows]
    labels = [label(row) for row in rows]
    parquet.write_table(pa.table({"image": images, "label": labels}), path, row_group_size=3)
    return str(path)


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of 5, 1, 7, 4 and 6 rows; an image's brightness is its place in all of them."""
    root = tmp_path_factory.mktemp("stream")
    for shard, size in enumerate(SIZES):
        write(root / f"train-{shard}.parquet", sum(SIZES[:shard]), size)
    write(root / "test.parquet", 100, 7)
    return root


def config(root, **options):
    fields = {"class_names": CLASSES, "shuffle_block": 4, "train_crop": None, **options}
    return ImageDatasetConfig(
        path=str(root), streaming=True, image_size=(2, 2), test_crop=None, **fields
    )


def opened(root, **options):
    return config(root, **options).build()


def brightness(images, examples):
    return images.read(examples).batch[0][:, 0, 0, 0].tolist()


def whole_pass(images, **options):
    return list(images.examples(**options))


def test_a_stream_has_its_length_classes_and_tensors(folder):
    splits = opened(folder)
    assert (len(splits.train), len(splits.test)) == (23, 7)
    assert splits.class_names == CLASSES
    assert splits.train.decodes
    examples = [example for example, _ in splits.test.examples(seed=None)]
    assert all(example.seed is None for example in examples)
    pixels, labels = splits.test.read(examples).batch
    assert pixels.shape == (7, 3, 2, 2)
    assert (pixels.dtype, labels.dtype) == (torch.uint8, torch.int64)
    assert pixels[:, 0, 0, 0].tolist() == list(range(100, 107))
    assert labels.tolist() == [row % 3 for row in range(100, 107)]


def test_a_pass_has_every_image_once_in_an_order_of_its_own(folder):
    images = opened(folder).train
    orders = {
        tuple(brightness(images, [e for e, _ in images.examples(seed=seed, epoch=epoch)]))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 4
    assert all(sorted(order) == list(range(23)) for order in orders)


def test_blocks_of_neighbours_are_shuffled(folder):
    images = opened(folder, shuffle_block=8).train
    order = brightness(images, [example for example, _ in images.examples(seed=3)])
    files = list(itertools.chain.from_iterable([f] * size for f, size in enumerate(SIZES)))
    # shards are read one after the other, so a block holds few of them
    assert all(len({files[row] for row in order[start : start + 8]}) <= 3 for start in (0, 8, 16))
    assert any(block != sorted(block) for block in (order[:8], order[8:16], order[16:]))


def test_every_block_has_an_order_of_its_own(tmp_path):
    write(tmp_path / "train.parquet", 0, 40)
    write(tmp_path / "test.parquet", 0, 1)
    images = opened(tmp_path, shuffle_block=10).train
    order = brightness(images, [example for example, _ in images.examples(seed=0)])
    blocks = {
        tuple(row - 10 * (turn // 10) for turn, row in enumerate(order))[i : i + 10]
        for i in (0, 10, 20, 30)
    }
    assert len(blocks) == 4
    assert all(sorted(block) == list(range(10)) for block in blocks)


def rest_of(images, cut, passed, **options):
    """What comes after a cut, with the data_state as a file keeps it."""
    data_state = json.loads(json.dumps(passed[-1][1]))
    return whole_pass(images, start=cut, data_state=data_state, **options)


@pytest.mark.parametrize(
    "change",
    [
        *({name: value} for name in ("block", "turn", "row") for value in (None, -1, 1.5, 10**30)),
        *({"state": state} for state in (3, [], {"evil": 1}, {"examples_iterable": 3})),
        {"evil": 1},
    ],
)
def test_a_damaged_bookmark_is_refused(folder, change):
    images = opened(folder, shuffle_block=8).train
    data_state = whole_pass(images, seed=0)[12][1]
    with pytest.raises(ValueError, match=r"data_state is .*, expected|cannot be read"):
        whole_pass(images, seed=0, start=13, data_state={**data_state, **change})


def examples_of(passed):
    return [example for example, _ in passed]


@pytest.mark.parametrize("group", [1, 2, 3, 64])
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("block", [1, 4, 23, 100])
def test_resuming_at_any_cut_gives_the_rest_of_the_pass(folder, monkeypatch, seed, block, group):
    monkeypatch.setattr("onescan.data.image_dataset.GROUP", group)
    images, options = opened(folder, shuffle_block=block).train, {"seed": seed, "epoch": 2}
    whole = whole_pass(images, **options)
    for cut in range(1, len(whole) + 1):
        rest = rest_of(images, cut, whole[:cut], **options)
        assert examples_of(rest) == examples_of(whole[cut:])


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**62),
    epoch=st.integers(0, 9),
    block=st.integers(1, 30),
    repeats=st.integers(1, 3),
    data=st.data(),
)
def test_resuming_twice_is_exact(folder, seed, epoch, block, repeats, data):
    images = opened(folder, shuffle_block=block).train
    options = {"seed": seed, "epoch": epoch, "repeats": repeats}
    whole = whole_pass(images, **options)
    assert len(whole) == len(images)
    first = data.draw(st.integers(1, len(whole) - 1))
    second = data.draw(st.integers(first + 1, len(whole)))
    once = rest_of(images, first, whole[:first], **options)
    twice = rest_of(images, second, once[: second - first], **options)
    assert examples_of(once) == examples_of(whole[first:])
    assert examples_of(twice) == examples_of(whole[second:])
    assert examples_of(whole_pass(images, start=first, **options)) == examples_of(whole[first:])


def test_resuming_reads_nothing_from_before_its_shard_and_block(folder, monkeypatch):
    images = opened(folder).train
    whole = whole_pass(images, seed=0)
    read, encoded_rows = [], []
    cast, place = Parquet._cast_table, Classes.place
    monkeypatch.setattr(Parquet, "_cast_table", lambda *a: read.append(len(a[1])) or cast(*a))
    monkeypatch.setattr(Classes, "place", lambda *a: encoded_rows.append(a[2]) or place(*a))
    for cut in range(1, 24):
        read.clear()
        encoded_rows.clear()
        rest_of(images, cut, whole[:cut], seed=0)
        assert len(encoded_rows) < 23 - cut + images.block
        assert sum(read) < 23 - cut + images.block + max(SIZES)
    read.clear()
    whole_pass(images, seed=0, start=22)
    assert sum(read) == 23


def test_an_example_is_repeated_in_a_row_with_chance_of_its_own(folder):
    images = opened(folder).train
    once = [example for example, _ in images.examples(seed=0)]
    thrice = [example for example, _ in images.examples(seed=0, repeats=3)]
    assert len(thrice) == 23
    assert [example.source for example in thrice] == [
        example.source for example in once[:8] for _ in range(3)
    ][:23]
    assert len({example.seed for example in thrice}) == 23


def test_train_examples_shortens_a_pass_and_must_not_be_too_many(folder):
    images = opened(folder, train_examples=9).train
    assert len(images) == len(whole_pass(images, seed=0)) == 9
    images = opened(folder, train_examples=24).train
    with pytest.raises(ValueError, match="the stream train ended after 23 images, expected 24"):
        whole_pass(images, seed=0)


@pytest.mark.parametrize("told", [9, 23, 30])
def test_what_is_judged_is_read_to_its_end_whatever_was_told(folder, told):
    images = replace(opened(folder).train, count=told)
    assert len(whole_pass(images, seed=None)) == 23


def hub_stream(rows, *, count=None):
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))}
    )
    stream = datasets.Dataset.from_dict(
        {
            "image": [{"bytes": encoded(row), "path": None} for row in range(rows)],
            "label": [row % 3 for row in range(rows)],
        },
        features=features,
    ).to_iterable_dataset(num_shards=3)
    told = {"train": datasets.SplitInfo("train", num_examples=count)} if count else None
    stream.info.splits = told and datasets.SplitDict(told)
    return stream


def open_hub(monkeypatch, **options):
    stream = hub_stream(10, **options.pop("stream", {}))
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *_: ["train", "test"])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stream)
    return opened("some/thing", class_names=(), **options)


def test_a_stream_from_a_hub(monkeypatch):
    splits = open_hub(monkeypatch, stream={"count": 10})
    assert len(splits.train) == 10
    assert splits.class_names == CLASSES
    whole = whole_pass(splits.train, seed=0)
    assert sorted(brightness(splits.train, [e for e, _ in whole])) == list(range(10))
    rest = whole_pass(splits.train, seed=0, start=6, data_state=whole[5][1])
    assert rest == whole[6:]
    assert whole[0][0].source.name.startswith("row ")
    assert "shard" in whole[0][0].source.name


def test_a_stream_of_unknown_length_needs_one(monkeypatch):
    with pytest.raises(ValueError, match=r"data\.train_examples is None, expected a number"):
        open_hub(monkeypatch)
    splits = open_hub(monkeypatch, train_examples=9)
    assert len(splits.train) == 9
    assert len(splits.test) == 10  # which is counted
    assert len(whole_pass(splits.test, seed=None)) == 10


@pytest.mark.parametrize(
    ("label", "options", "says"),
    [
        (lambda row: 3, {}, r"row 0 of .*train\.parquet has the label 3, expected 0 to 2"),
        (lambda row: row - 5, {}, r"row 0 of .*train\.parquet has the label -5, expected 0 to 2"),
        (lambda row: None if row else 1, {}, r"row 1 of .*train\.parquet has no label"),
        (lambda row: "abd"[row % 3], {}, r"row 2 of .* has the label 'd', expected one of a, b, c"),
        (lambda row: 1, {"class_names": ()}, r"data\.class_names is \(\), expected names"),
        (lambda row: 1, {"class_names": ("a",)}, "all of one class"),
    ],
)
def test_labels_that_will_not_do_are_found_when_they_are_read(tmp_path, label, options, says):
    write(tmp_path / "train.parquet", 0, 6, label)
    write(tmp_path / "test.parquet", 0, 6)
    with pytest.raises(ValueError, match=says):
        whole_pass(opened(tmp_path, **options).train, seed=0)


def test_what_cannot_be_streamed(tmp_path):
    write(tmp_path / "train.parquet", 0, 6)
    with pytest.raises(
        ValueError, match=r"data\.streaming is on, but .* has no split to evaluate on"
    ):
        opened(tmp_path)
    for name in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / "files" / name).mkdir(parents=True)
        (tmp_path / "files" / name / "0.png").write_bytes(encoded(0))
    with pytest.raises(
        ValueError, match=r"data\.streaming is on, but .* is a folder of image files"
    ):
        opened(tmp_path / "files")


@pytest.mark.parametrize("damage", ["cut", "garbled"])
def test_a_damaged_file_is_named(tmp_path, damage):
    path = tmp_path / "train.parquet"
    write(path, 0, 100)
    write(tmp_path / "test.parquet", 0, 6)
    whole = bytearray(path.read_bytes())
    if damage == "cut":
        del whole[len(whole) // 2 :]
    else:
        whole[4:2000] = bytes(1996)
    path.write_bytes(whole)
    with pytest.raises(
        ValueError, match=r"train\.parquet (cannot be read|is not a complete parquet file)"
    ):
        whole_pass(opened(tmp_path).train, seed=0)


def test_of_what_the_library_says_the_first_line_is_told(folder, tmp_path):
    write(tmp_path / "train.parquet", 0, 6)
    write(tmp_path / "test.parquet", 0, 6)
    parquet.write_table(
        pa.table({"image": [{"other": 1}], "label": [0]}), tmp_path / "train2.parquet"
    )
    with pytest.raises(ValueError, match=r"train2\.parquet cannot be read: [^\n]+\Z"):
        whole_pass(opened(tmp_path).train, seed=0)


def test_an_unreadable_image_is_named(folder, tmp_path):
    rows = {"image": [{"bytes": b"not an image", "path": "cat.png"}], "label": [0]}
    parquet.write_table(pa.table(rows), tmp_path / "train.parquet")
    write(tmp_path / "test.parquet", 0, 6)
    images = opened(tmp_path).train
    with pytest.raises(ValueError, match=r"row 0 of .*train\.parquet \(cat\.png\) is not an image"):
        images.read([example for example, _ in images.examples(seed=0)])


def test_an_image_may_be_behind_an_address(folder, tmp_path):
    (tmp_path / "far.png").write_bytes(encoded(77))
    rows = {"image": [{"bytes": None, "path": f"file://{tmp_path}/far.png"}], "label": [0]}
    parquet.write_table(pa.table(rows), tmp_path / "train.parquet")
    write(tmp_path / "test.parquet", 0, 6)
    images = opened(tmp_path).train
    assert brightness(images, [e for e, _ in images.examples(seed=0)]) == [77]
