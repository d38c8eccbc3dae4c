"""Image streams: order, exact resume, lengths and errors."""

import json
from dataclasses import replace

import datasets
import pyarrow as pa
import pytest
import torch
from datasets.packaged_modules.parquet.parquet import Parquet
from pyarrow import parquet
from tiny_images import damage, encoded, serve_hub, write_folders, write_parquet

from onescan.experiments.data import ImageDatasetConfig
from onescan.experiments.data.image_dataset import Classes
from onescan.experiments.data.order import BlockStart, read_blocks

pytestmark = pytest.mark.usefixtures("offline")

CLASSES = ("a", "b", "c")
SIZES = [5, 1, 7, 4, 6]  # rows of each file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of 5, 1, 7, 4 and 6 rows; an image's brightness is its index in all of them."""
    root = tmp_path_factory.mktemp("stream")
    for shard, size in enumerate(SIZES):
        write(root / f"train-{shard}.parquet", sum(SIZES[:shard]), size)
    return write(root / "test.parquet", 100, 7).parent


def write(path, first, count, label=lambda row: row % 3):
    labels = [label(row) for row in range(first, first + count)]
    write_parquet(path, labels, first=first)
    return path


def build(root, **options):
    fields = {"class_names": CLASSES, "shuffle_block": 4, "train_crop": None, **options}
    return ImageDatasetConfig(
        path=str(root), streaming=True, image_size=(2, 2), test_crop=None, **fields
    ).build()


def brightness(images, pairs):
    return images.read([example for example, _ in pairs]).batch[0][:, 0, 0, 0].tolist()


def epoch_of(images, **options):
    return list(images.examples(**options))


def examples_of(pairs):
    return [example for example, _ in pairs]


def test_length_classes_and_tensors(folder):
    splits = build(folder)
    assert (len(splits.train), len(splits.test)) == (23, 7)
    assert splits.class_names == CLASSES
    assert splits.train.decodes
    examples = examples_of(splits.test.examples(seed=None))
    assert all(example.seed is None for example in examples)
    pixels, labels = splits.test.read(examples).batch
    assert pixels.shape == (7, 3, 2, 2)
    assert (pixels.dtype, labels.dtype) == (torch.uint8, torch.int64)
    assert pixels[:, 0, 0, 0].tolist() == list(range(100, 107))
    assert labels.tolist() == [row % 3 for row in range(100, 107)]


def test_every_epoch_has_an_order_of_its_own_and_repeats_have_their_own_seeds(folder):
    images = build(folder).train
    orders = {
        tuple(brightness(images, images.examples(seed=seed, epoch=epoch)))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 4
    assert all(sorted(order) == list(range(23)) for order in orders)
    once, thrice = (examples_of(images.examples(seed=0, repeats=n)) for n in (1, 3))
    sources = [example.source for example in thrice]
    assert sources == [example.source for example in once[:8] for _ in range(3)][:23]
    assert len({example.seed for example in thrice}) == 23


def test_blocks_are_shuffled_independently():
    def read(index, mark):
        return ((row + 10 * index, {"row": row + 1}) for row in range(mark.get("row", 0), 10))

    options = {"shards": 4, "size": 8, "seed": 3, "epoch": 1}
    blocks = list(read_blocks(read, start=BlockStart(), **options))
    assert sorted(item for block in blocks for item in block.items) == list(range(40))
    assert [len(block.items) for block in blocks] == [8] * 5
    assert all(len({item // 10 for item in block.items}) <= 2 for block in blocks)
    places = [[sorted(block.items).index(item) for item in block.items] for block in blocks]
    assert len({tuple(order) for order in places}) == 5
    for index, block in enumerate(blocks):
        assert list(read_blocks(read, start=block.start, **options)) == blocks[index:]
        assert list(read_blocks(read, start=block.end, **options)) == blocks[index + 1 :]
    again = list(read_blocks(read, start=BlockStart(), **options, round=1))
    assert [block.items for block in again] != [block.items for block in blocks]
    stored = read_blocks(read, start=BlockStart(), **{**options, "seed": None})
    assert [item for block in stored for item in block.items] == list(range(40))


def resume(images, cut, pairs, **options):
    """The rest of an epoch, from the state after its first examples, as a file keeps it."""
    state = json.loads(json.dumps(pairs[-1][1]))
    return epoch_of(images, start=cut, data_state=state, **options)


@pytest.mark.parametrize(
    "change",
    [
        *({name: value} for name in ("block", "turn", "row") for value in (None, -1, 1.5, 10**30)),
        *({"state": state} for state in (3, [], {"evil": 1}, {"examples_iterable": 3})),
        {"evil": 1},
    ],
)
def test_a_damaged_state_is_refused(folder, change):
    images = build(folder, shuffle_block=8).train
    state = epoch_of(images, seed=0)[12][1]
    with pytest.raises(ValueError, match=r"data_state is .*, but .* must be|cannot be read"):
        epoch_of(images, seed=0, start=13, data_state={**state, **change})


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("seed", "block", "group", "repeats"),
    [
        *((None, block, group, 1) for block, group in ((1, 1), (4, 2), (23, 3), (100, 64))),
        *((7, block, group, 1) for block, group in ((1, 64), (4, 1), (4, 3), (23, 2), (100, 1))),
        *((7, block, 2, repeats) for block in (4, 9) for repeats in (2, 3)),
    ],
)
def test_resuming_at_any_example_is_exact(folder, monkeypatch, seed, block, group, repeats):
    for module in ("image_dataset", "sources"):
        monkeypatch.setattr(f"onescan.experiments.data.{module}.GROUP", group)
    images = build(folder, shuffle_block=block).train
    options = {"seed": seed, "epoch": 2, "repeats": repeats}
    whole = epoch_of(images, **options)
    assert len(whole) == 23 * (repeats if seed is None else 1)
    for cut in range(1, len(whole) + 1):
        rest = resume(images, cut, whole[:cut], **options)
        assert examples_of(rest) == examples_of(whole[cut:])
        if more := len(rest) // 2:
            again = resume(images, cut + more, rest[:more], **options)
            assert examples_of(again) == examples_of(rest[more:])
    assert examples_of(epoch_of(images, start=9, **options)) == examples_of(whole[9:])


def test_resuming_reads_nothing_before_its_shard_and_block(folder, monkeypatch):
    images = build(folder).train
    whole = epoch_of(images, seed=0)
    read, encoded_rows = [], []
    cast, index = Parquet._cast_table, Classes.index
    monkeypatch.setattr(Parquet, "_cast_table", lambda *a: read.append(len(a[1])) or cast(*a))
    monkeypatch.setattr(Classes, "index", lambda *a: encoded_rows.append(a[2]) or index(*a))
    for cut in range(1, 24):
        read.clear()
        encoded_rows.clear()
        resume(images, cut, whole[:cut], seed=0)
        assert len(encoded_rows) < 23 - cut + images.block
        assert sum(read) < 23 - cut + images.block + max(SIZES)


def test_train_examples_limits_an_epoch(folder):
    images = build(folder, train_examples=9).train
    assert len(images) == len(epoch_of(images, seed=0)) == 9
    images = build(folder, train_examples=24).train
    with pytest.raises(ValueError, match=r"23 images, expected 24: .*data\.train_examples"):
        epoch_of(images, seed=0)
    for count in (9, 23, 30):  # an evaluation reads the stream to its end
        assert len(epoch_of(replace(images, count=count), seed=None)) == 23


def build_hub(monkeypatch, *, recorded=None, **options):
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))}
    )
    rows = {
        "image": [{"bytes": encoded(row), "path": None} for row in range(10)],
        "label": [row % 3 for row in range(10)],
    }
    stream = datasets.Dataset.from_dict(rows, features=features).to_iterable_dataset(num_shards=3)
    infos = {"train": datasets.SplitInfo("train", num_examples=recorded)} if recorded else None
    stream.info.splits = infos and datasets.SplitDict(infos)
    serve_hub(monkeypatch, stream, "train", "test")
    return build("some/thing", class_names=(), **options)


def test_a_stream_from_a_hub(monkeypatch):
    splits = build_hub(monkeypatch, recorded=10)
    assert len(splits.train) == 10
    assert splits.class_names == CLASSES
    whole = epoch_of(splits.train, seed=0)
    assert sorted(brightness(splits.train, whole)) == list(range(10))
    assert epoch_of(splits.train, seed=0, start=6, data_state=whole[5][1]) == whole[6:]
    assert whole[0][0].source.name.startswith("row ")
    assert "shard" in whole[0][0].source.name
    with pytest.raises(ValueError, match=r"data\.train_examples is None"):
        build_hub(monkeypatch)
    splits = build_hub(monkeypatch, train_examples=9)
    assert (len(splits.train), len(splits.test)) == (9, 10)  # the test split is counted


@pytest.mark.parametrize(
    ("label", "options", "message"),
    [
        (lambda row: row - 5, {}, r"row 0 of .*train\.parquet .* -5, expected 0 to 2"),
        (lambda row: None if row else 1, {}, r"row 1 of .*train\.parquet has no label"),
        (lambda row: "abd"[row % 3], {}, r"row 2 of .* 'd', expected one of a, b, c"),
        (lambda row: 1, {"class_names": ()}, r"data\.class_names is \(\)"),
        (lambda row: 1, {"class_names": ("a",)}, r"data\.path is .* one class"),
    ],
)
def test_unusable_labels(tmp_path, label, options, message):
    write(tmp_path / "train.parquet", 0, 6, label)
    write(tmp_path / "test.parquet", 0, 6)
    with pytest.raises(ValueError, match=message):
        epoch_of(build(tmp_path, **options).train, seed=0)


def test_what_cannot_be_streamed(tmp_path):
    write(tmp_path / "train.parquet", 0, 6)
    with pytest.raises(ValueError, match=r"data\.streaming is on, .* data\.test_split"):
        build(tmp_path)
    path = write_folders(tmp_path / "files", "train/a", "train/b", "test/a", "test/b")
    with pytest.raises(ValueError, match=r"data\.streaming is on, .* folder of image files"):
        build(path)


@pytest.mark.parametrize("how", ["cut", "garbled", "columns"])
def test_a_damaged_file_is_named_in_one_line(tmp_path, how):
    path = write(tmp_path / "train.parquet", 0, 100)
    write(tmp_path / "test.parquet", 0, 6)
    if how == "columns":
        path = tmp_path / "train2.parquet"
        parquet.write_table(pa.table({"image": [{"other": 1}], "label": [0]}), path)
    else:
        damage(path, how)
    with pytest.raises(ValueError, match=rf"{path.name} (cannot be read|is not)[^\n]+\Z"):
        epoch_of(build(tmp_path).train, seed=0)


def test_unreadable_and_remote_images(tmp_path):
    (tmp_path / "far.png").write_bytes(encoded(77))
    images = [
        {"bytes": b"not an image", "path": "cat.png"},
        {"bytes": None, "path": f"file://{tmp_path}/far.png"},
    ]
    rows = {"image": images, "label": [0, 1]}
    parquet.write_table(pa.table(rows), tmp_path / "train.parquet")
    write(tmp_path / "test.parquet", 0, 6)
    images = build(tmp_path).train
    pairs = epoch_of(images, seed=None)
    with pytest.raises(ValueError, match=r"row 0 of .*train\.parquet \(cat\.png\) is not an image"):
        brightness(images, pairs)
    assert brightness(images, pairs[1:]) == [77]
