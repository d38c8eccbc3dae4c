"""Arrays from .npz and .npy files: shapes, types, labels, standardization and training."""

import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_run import tiny_run

from onescan import configs
from onescan.data import (
    ArrayDatasetConfig,
    ArrayFormat,
    Example,
    ImageFormat,
    ImageSplits,
    derive_seed,
)
from onescan.layers.mixers import SoftmaxMixerConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.tasks import ImageClassificationConfig, ImageGenerationConfig
from onescan.training import load, read_metrics, train

RNG = np.random.default_rng(0)
COUNT = 12
Y = np.arange(COUNT) % 3


def values(*shape, dtype=np.float32):
    return (RNG.random(shape) * 200).astype(dtype)


def save(path, kind="npz", **arrays):
    """Write arrays as one file, compressed or not, or as a folder of files."""
    if kind == "folder":
        path.mkdir(exist_ok=True)
        for name, array in arrays.items():
            np.save(path / f"{name}.npy", array)
        return str(path)
    write = np.savez if kind == "npz" else np.savez_compressed
    write(path.with_suffix(".npz"), **arrays)
    return str(path.with_suffix(".npz"))


def build(path, **options):
    return ArrayDatasetConfig(path=path, **options).build()


def read(data, places=None, seed=None):
    places = range(len(data)) if places is None else places
    return data.read([Example(place, seed) for place in places]).batch


@pytest.mark.parametrize("kind", ["npz", "compressed", "folder"])
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("channels", [None, 2])
def test_any_number_of_axes(tmp_path, kind, axes, channels):
    shape = (5, 4, 3)[:axes]
    x = values(2 * COUNT, *shape, *([channels] if channels else []))
    train, test = x[:COUNT], x[COUNT:]
    arrays = {"x_train": train, "y_train": Y, "x_test": test, "y_test": Y[::-1]}
    splits = build(save(tmp_path / "a", kind, **arrays), axes=axes)
    assert splits.class_names == ("0", "1", "2")
    assert (splits.format.channels, splits.format.shape) == (channels or 1, shape)
    for data, expected, labels in ((splits.train, train, Y), (splits.test, test, Y[::-1])):
        batch, got = read(data, [7, 2])
        channels_last = expected if channels else expected[..., None]
        assert np.array_equal(batch.movedim(1, -1), channels_last[[7, 2]])
        assert (batch.dtype, got.dtype) == (torch.float32, torch.int64)
        assert got.tolist() == labels[[7, 2]].tolist()
    whole = splits.format.model_input(read(splits.train)[0]).transpose(0, 1).flatten(1)
    torch.testing.assert_close(whole.mean(dim=1), torch.zeros(channels or 1), atol=1e-5, rtol=0)
    torch.testing.assert_close(whole.std(dim=1, correction=0), torch.ones(channels or 1))


def test_uncompressed_files_are_mapped_into_memory(tmp_path):
    x = np.asfortranarray(values(COUNT, 4, 3))
    for kind in ("npz", "folder"):
        splits = build(save(tmp_path / "a", kind, x=x, y=Y), test_fraction=0.25)
        assert isinstance(splits.train.x, np.memmap)
        assert np.array_equal(splits.train.x, x)
    assert not isinstance(
        build(save(tmp_path / "b", "compressed", x=x, y=Y), test_fraction=0.25).train.x, np.memmap
    )


def test_a_fraction_is_held_out_by_class(tmp_path):
    path = save(tmp_path / "a", x=np.arange(40.0)[:, None], y=np.arange(40) % 2)
    options = {"axes": 1, "test_fraction": 0.25}
    splits, again = build(path, **options), build(path, **options)
    other = build(path, split_seed=1, **options)
    assert read(splits.test)[1].bincount().tolist() == [5, 5]
    assert torch.equal(read(splits.test)[0], read(again.test)[0])
    assert not torch.equal(read(splits.test)[0], read(other.test)[0])
    train, test = (read(data)[0].flatten() for data in (splits.train, splits.test))
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(40))
    assert splits.format.mean == pytest.approx((train.mean().item(),))  # of training data only


def test_bytes_are_images(tmp_path):
    x = RNG.integers(0, 256, (COUNT, 6, 5, 3), dtype=np.uint8)
    splits = build(save(tmp_path / "a", x=x, y=Y), test_fraction=0.25)
    assert isinstance(splits, ImageSplits)
    assert isinstance(splits.format, ImageFormat)
    batch, _ = read(splits.train)
    assert (batch.dtype, batch.shape[1:]) == (torch.uint8, (3, 6, 5))
    unit = batch.double() / 255
    assert splits.format.mean == pytest.approx(unit.mean(dim=(0, 2, 3)).tolist())
    assert splits.format.std == pytest.approx(unit.std(dim=(0, 2, 3), correction=0).tolist())
    grey = build(save(tmp_path / "b", x=x[..., 0], y=Y), test_fraction=0.25)
    assert (grey.format.channels, grey.format.height, grey.format.width) == (1, 6, 5)
    for shape in ((COUNT, 6, 5, 2), (COUNT, 6, 5, 4, 3)):
        x = RNG.integers(0, 256, shape, dtype=np.uint8)
        splits = build(save(tmp_path / "c", x=x, y=Y), axes=len(shape) - 2, test_fraction=0.25)
        assert isinstance(splits.format, ArrayFormat)
        assert splits.format.model_input(read(splits.train)[0]).abs().max() < 3


@pytest.mark.parametrize("dtype", [np.float16, ">f4", np.float64, np.int16, np.uint32, bool])
def test_other_types_become_float32(tmp_path, dtype):
    x = values(COUNT, 4).astype(dtype)
    splits = build(save(tmp_path / "a", x=x, y=Y.astype(np.uint8)), axes=1, test_fraction=0.25)
    batch, labels = read(splits.train)
    assert batch.dtype == torch.float32
    assert np.array_equal(batch[:, 0], x[splits.train.places].astype(np.float32))
    assert labels.dtype == torch.int64


def test_given_constants_are_used(tmp_path):
    path = save(tmp_path / "a", x=values(COUNT, 4, 2), y=Y)
    format = build(path, axes=1, mean=(1.0, 2.0), std=(3.0, 4.0), test_fraction=0.25).format
    assert format == ArrayFormat(channels=2, shape=(4,), mean=(1.0, 2.0), std=(3.0, 4.0))
    partly = build(path, axes=1, std=(3.0, 4.0), test_fraction=0.25).format
    assert partly.std == (3.0, 4.0)
    assert partly.mean != (1.0, 2.0)
    assert configs.from_dict(ArrayFormat, configs.to_dict(format)) == format


def test_a_constant_channel_is_not_scaled(tmp_path):
    x = values(COUNT, 4, 2)
    x[..., 1] = 7
    format = build(save(tmp_path / "a", x=x, y=Y), axes=1, test_fraction=0.25).format
    assert (format.mean[1], format.std[1]) == (7.0, 1.0)


def test_statistics_do_not_depend_on_the_chunks(tmp_path, monkeypatch):
    path = save(tmp_path / "a", x=values(COUNT, 4, 2), y=Y)
    whole = build(path, axes=1, test_fraction=0.25).format
    monkeypatch.setattr("onescan.data.arrays.CHUNK", 9)
    parts = build(path, axes=1, test_fraction=0.25).format
    assert parts.mean == pytest.approx(whole.mean)
    assert parts.std == pytest.approx(whole.std)


X = np.ones((COUNT, 4), np.float32)
NAN = np.where(np.arange(COUNT)[:, None] == 5, np.nan, X)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"x": X, "y": Y}, {"axes": 0}, "data.axes is 0, expected 1 to 8"),
        ({"x": X, "y": Y}, {"axes": 2}, r"x has shape \(12, 4\), expected \[N, .*data\.axes=2"),
        ({"x": X[..., None, None], "y": Y}, {}, r"x has shape \(12, 4, 1, 1\)"),
        ({"x": X[:0], "y": Y[:0]}, {}, r"x has shape \(0, 4\)"),
        ({"x": X[:, :0], "y": Y}, {}, r"x has shape \(12, 0\)"),
        ({"x": X.astype(complex), "y": Y}, {}, "x holds complex128"),
        ({"x": X.astype(str), "y": Y}, {}, "x holds <U32"),
        ({"x": X.astype(object), "y": Y}, {}, "x cannot be read"),
        ({"x": X, "y": Y.astype(object)}, {}, "y cannot be read"),
        ({"x": X, "y": Y.astype(float)}, {}, "y holds float64"),
        ({"x": X, "y": Y[:, None]}, {}, r"y has shape \(12, 1\), expected \(12,\)"),
        ({"x": X, "y": Y[:5]}, {}, r"y has shape \(5,\), expected \(12,\)"),
        ({"x": X, "y": Y - 1}, {}, r"y\[0\] is -1, expected 0 to"),
        ({"x": X, "y": Y * 10**6}, {}, r"y\[1\] is 1000000, expected 0 to 999999"),
        ({"x": X, "y": Y}, {"class_names": ("a", "b")}, r"y\[2\] is 2, expected 0 to 1"),
        ({"x": X, "y": Y * 0}, {}, "one class"),
        ({"x": X}, {}, "no array y, .* found: x"),
        ({"z": X, "y": Y}, {}, "no array x, .* found: y, z"),
        ({"x_train": X, "y_train": Y}, {}, "no array x_test"),
        (
            {"x_train": X, "y_train": Y, "x_test": X, "y_test": Y + 1},
            {},
            r"y_test\[2\] is 3, expected 0 to 2",
        ),
        (
            {"x_train": X, "y_train": Y, "x_test": X[:, :3], "y_test": Y},
            {},
            r"x_test .* \(1, 3\), expected \(1, 4\)",
        ),
        (
            {"x_train": NAN, "y_train": Y, "x_test": X, "y_test": Y},
            {},
            "example 5 of x .* not finite",
        ),
        ({"x": X, "y": Y}, {"mean": (0.0, 1.0)}, r"data.mean is \(0.0, 1.0\), expected 1 numbers"),
        ({"x": X, "y": Y}, {"std": (0.0,)}, "data.std is 0.0"),
        ({"x": X, "y": Y}, {"test_fraction": 1.0}, "data.test_fraction is 1.0"),
    ],
)
@pytest.mark.parametrize("kind", ["npz", "compressed", "folder"])
def test_unusable_arrays_are_refused(tmp_path, arrays, options, message, kind):
    path = save(tmp_path / "a", kind, **arrays)
    with pytest.raises(ValueError, match=message):
        build(path, **{"axes": 1, "test_fraction": 0.5, **options})


def test_values_that_are_not_finite_are_found_when_read(tmp_path):
    arrays = {"x_train": X, "y_train": Y, "x_test": NAN, "y_test": Y}
    splits = build(save(tmp_path / "a", **arrays), axes=1)
    with pytest.raises(ValueError, match="example 5"):
        read(splits.test, [6, 5, 4])


def test_missing_and_damaged_files(tmp_path):
    with pytest.raises(ValueError, match=r"data\.path is .*nowhere.*no such file"):
        build(str(tmp_path / "nowhere"))
    (tmp_path / "a.npy").touch()
    with pytest.raises(ValueError, match=r"a\.npy', expected a \.npz file or a folder"):
        build(str(tmp_path / "a.npy"))
    for kind in ("npz", "compressed"):
        path = tmp_path / "b.npz"
        save(path, kind, x=values(COUNT, 50, 40), y=Y)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(ValueError, match=r"data\.path is .*b\.npz', which cannot be read"):
            build(str(path))
        path.write_bytes(content[:200] + bytes(2000) + content[2200:])
        if kind == "compressed":
            with pytest.raises(ValueError, match="x cannot be read"):
                build(str(path))
    save(tmp_path / "folder", "folder", x=values(COUNT, 50, 40), y=Y)
    file = tmp_path / "folder" / "x.npy"
    for content in (file.read_bytes()[:1000], b"", b"not an array"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="x cannot be read"):
            build(str(tmp_path / "folder"))


def test_a_stored_member_is_found_behind_other_members(tmp_path):
    path = save(tmp_path / "a", x=values(COUNT, 5), y=Y)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("notes.txt", "of another kind")
        archive.writestr("folder/x.npy", b"not read")
    assert read(build(path, axes=1, test_fraction=0.25).train)[0].shape[1:] == (1, 5)


def test_examples_are_ordered_and_resumed_by_index(tmp_path):
    data = build(save(tmp_path / "a", x=values(COUNT, 4), y=Y), axes=1, test_fraction=0.25).train
    whole = list(data.examples(seed=3, epoch=1))
    assert sorted(example.source for example, _ in whole) == list(range(len(data)))
    assert whole[0][0].seed == derive_seed(3, "example", 1, 0)
    assert list(data.examples(seed=3, epoch=1, start=4)) == whole[4:]


@pytest.mark.parametrize("channels", [3, 5])
def test_arrays_train_and_load(tmp_path, channels):
    """Bright left halves against bright right halves."""
    y = np.arange(64) % 2
    x = RNG.integers(0, 60, (64, 4, 6, channels))
    x[y == 0, :, :3] += 150
    x[y == 1, :, 3:] += 150
    dtype = np.uint8 if channels == 3 else np.float32
    path = save(tmp_path / "a", x=x.astype(dtype), y=y)
    model = ImageClassifierConfig(
        image_size=(4, 6),
        channels=channels,
        patch_size=(2, 2),
        num_classes=2,
        width=16,
        depth=1,
        mixer=SoftmaxMixerConfig(num_heads=2),
    )
    run = replace(
        tiny_run(),
        data=ArrayDatasetConfig(path=path, test_fraction=0.25),
        model=model,
        task=ImageClassificationConfig(augment=None),
    )
    run = replace(run, training=replace(run.training, steps=60, batch_size=16, learning_rate=3e-3))
    train(run, tmp_path / "run")
    assert read_metrics(tmp_path / "run")[-1]["accuracy"] > 0.9
    checkpoint = load(tmp_path / "run")
    assert checkpoint.format.channels == channels
    assert configs.from_dict(type(checkpoint.config), configs.to_dict(checkpoint.config)) == run


def test_other_tasks_need_images(tmp_path):
    splits = build(save(tmp_path / "a", x=values(COUNT, 4), y=Y), axes=1, test_fraction=0.25)
    with pytest.raises(ValueError, match=r"data has shape \(1, 4\) and type float32"):
        ImageGenerationConfig().build(splits)
    with pytest.raises(ValueError, match=r"task\.teacher is 'some/model'"):
        ImageClassificationConfig(teacher="some/model").build(splits)
