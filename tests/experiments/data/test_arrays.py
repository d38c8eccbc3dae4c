"""Arrays from .npz and .npy files: shapes, types, labels, standardization and training."""

import csv
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_run import tiny_run

from onescan import configs
from onescan.cli import main
from onescan.experiments.data import ArrayDatasetConfig, Example, ImageSplits
from onescan.experiments.data.arrays import read_inputs
from onescan.experiments.data.share import Share
from onescan.experiments.tasks import ImageClassificationConfig, ImageGenerationConfig
from onescan.experiments.tasks.image_classification import read_arrays
from onescan.experiments.training import read_metrics, train
from onescan.inference.loading import load
from onescan.inputs import ArrayFormat, ImageFormat
from onescan.layers.mixers import SoftmaxMixerConfig
from onescan.models.image_classifier import ImageClassifierConfig

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


def test_channels_first_are_read_as_channels_last(tmp_path):
    last = RNG.integers(0, 256, (COUNT, 6, 5, 3), dtype=np.uint8)
    first = np.moveaxis(last, -1, 1)
    options = {"test_fraction": 0.25}
    expected = build(save(tmp_path / "a", x=last, y=Y), **options)
    splits = build(save(tmp_path / "b", x=first, y=Y), channels_first=True, **options)
    assert splits.format == expected.format
    assert torch.equal(read(splits.test)[0], read(expected.test)[0])


def test_configs_without_the_field_are_channels_last():
    saved = configs.to_dict(ArrayDatasetConfig(path="a.npz", axes=1))
    del saved["channels_first"]
    assert not configs.from_dict(ArrayDatasetConfig, saved).channels_first


@pytest.mark.parametrize("kind", ["npz", "folder", "compressed"])
def test_uncompressed_files_are_mapped_into_memory(tmp_path, kind):
    x = np.asfortranarray(values(COUNT, 4, 3))
    path = save(tmp_path / "a", kind, x=x, y=Y)
    if kind == "npz":
        with zipfile.ZipFile(path, "a") as archive:  # is found among other members
            archive.writestr("notes.txt", "of another kind")
            archive.writestr("folder/x.npy", b"not read")
    splits = build(path, test_fraction=0.25)
    assert isinstance(splits.train.x, np.memmap) == (kind != "compressed")
    assert np.array_equal(splits.train.x, x)


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
    gray = build(save(tmp_path / "b", x=x[..., 0], y=Y), test_fraction=0.25)
    assert (gray.format.channels, gray.format.height, gray.format.width) == (1, 6, 5)
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
    assert np.array_equal(batch[:, 0], x[splits.train.indices].astype(np.float32))
    assert labels.dtype == torch.int64


def test_given_constants_are_used_and_a_constant_channel_is_not_scaled(tmp_path):
    x = values(COUNT, 4, 2)
    x[..., 1] = 7
    path = save(tmp_path / "a", x=x, y=Y)
    format = build(path, axes=1, mean=(1.0, 2.0), std=(3.0, 4.0), test_fraction=0.25).format
    assert format == ArrayFormat(channels=2, shape=(4,), mean=(1.0, 2.0), std=(3.0, 4.0))
    partly = build(path, axes=1, std=(3.0, 4.0), test_fraction=0.25).format
    assert partly.std == (3.0, 4.0)
    assert partly.mean != (1.0, 2.0)
    assert configs.from_dict(ArrayFormat, configs.to_dict(format)) == format
    own = build(path, axes=1, test_fraction=0.25).format
    assert (own.mean[1], own.std[1]) == (7.0, 1.0)


def test_statistics_do_not_depend_on_the_chunks(tmp_path, monkeypatch):
    path = save(tmp_path / "a", x=values(COUNT, 4, 2), y=Y)
    whole = build(path, axes=1, test_fraction=0.25).format
    monkeypatch.setattr("onescan.experiments.data.arrays.CHUNK", 9)
    parts = build(path, axes=1, test_fraction=0.25).format
    assert parts.mean == pytest.approx(whole.mean)
    assert parts.std == pytest.approx(whole.std)


X = np.ones((COUNT, 4), np.float32)
NAN = np.where(np.arange(COUNT)[:, None] == 5, np.nan, X)
NAMES = np.array(["up", "down", "flat"])[Y]
FOUR = {"x_train": X, "y_train": Y, "x_test": X, "y_test": Y}


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"axes": 0}, "data.axes is 0, expected 1 to 8"),
        ({}, {"axes": 2}, r"x has shape \(12, 4\), expected \[N, .*data\.axes=2"),
        ({"x": X[..., None, None]}, {}, r"x has shape \(12, 4, 1, 1\)"),
        ({"x": X[:0], "y": Y[:0]}, {}, r"x has shape \(0, 4\)"),
        ({"x": X[:, :0]}, {}, r"x has shape \(12, 0\)"),
        ({"x": X.astype(complex)}, {}, "x holds complex128"),
        ({"x": X.astype(str)}, {}, "x holds <U32"),
        ({"x": X.astype(object)}, {}, "x cannot be read"),
        ({"y": Y.astype(object)}, {}, "y cannot be read"),
        (
            {"y": Y.astype(float)},
            {"target": "class"},
            "y holds float64, expected integers or strings",
        ),
        ({"y": Y[:, None]}, {}, r"y has shape \(12, 1\), expected \(12,\)"),
        ({"y": Y[:5]}, {}, r"y has shape \(5,\), expected \(12,\)"),
        ({"y": Y - 1}, {}, r"y\[0\] is -1, expected 0 to"),
        ({"y": Y * 10**6}, {}, r"y\[1\] is 1000000, expected 0 to 999999"),
        ({}, {"class_names": ("a", "b")}, r"y\[2\] is 2, expected 0 to 1, .* 2 names, starting"),
        ({"y": Y * 0}, {}, "one class"),
        ({"y": None}, {}, "no array y, .* found: x"),
        ({"x": None, "z": X}, {}, "no array x, .* found: y, z"),
        ({**FOUR, "x_test": None, "y_test": None}, {}, "no array x_test"),
        ({**FOUR, "y_test": Y + 1}, {}, r"y_test\[2\] is 3, expected 0 to 2"),
        ({**FOUR, "x_test": X[:, :3]}, {}, r"x_test .* \(1, 3\), expected \(1, 4\)"),
        ({"y": Y + 1}, {}, r"the lowest label is 1, but .*, or name all classes, fr"),
        ({**FOUR, "y_train": Y + 2, "y_test": Y + 3}, {}, "lowest label is 2, but .* y - 2"),
        ({**FOUR, "x_train": NAN}, {}, "path is .* where example 5 of x_train .* not finite"),
        ({**FOUR, "x_test": NAN}, {}, "path is .* where example 5 of x_test .* not finite"),
        ({"y": NAMES, "x": NAN}, {}, "not finite .*: replace them, or remove the example"),
        ({"y": np.char.encode(NAMES)}, {}, r"y holds \|S4, expected integers or strings"),
        ({"y": np.where(Y == 2, "", NAMES)}, {}, r"y\[2\] is '', expected the name of a class"),
        ({"y": np.full(COUNT, "up")}, {}, "one class"),
        ({"y": NAMES}, {"class_names": ("up", "down")}, r"y\[2\] is 'flat', expected one of 'up'"),
        ({**FOUR, "y_train": NAMES}, {}, "y_test holds int64, expected strings as in y_train"),
        ({**FOUR, "y_test": NAMES}, {}, "y_test holds strings, expected integers as in y_train"),
        ({}, {"mean": (0.0, 1.0)}, r"data.mean is \(0.0, 1.0\), expected 1 number: one per"),
        ({}, {"std": (0.0,)}, r"data.std is \(0.0,\)"),
        ({}, {"test_fraction": 1.0}, "data.test_fraction is 1.0"),
    ],
)
@pytest.mark.parametrize("kind", ["npz", "compressed", "folder"])
def test_unusable_arrays_are_refused(tmp_path, change, options, message, kind):
    arrays = change if "x_train" in change else {"x": X, "y": Y, **change}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    path = save(tmp_path / "a", kind, **arrays)
    with pytest.raises(ValueError, match=message):
        build(path, **{"axes": 1, "test_fraction": 0.5, **options})


def test_values_that_are_not_finite_are_found_when_read(tmp_path):
    constants = {"mean": (0.0,), "std": (1.0,)}
    splits = build(save(tmp_path / "a", **{**FOUR, "x_train": NAN}), axes=1, **constants)
    with pytest.raises(ValueError, match="example 5 of x_train has"):
        read(splits.train, [6, 5, 4])


@pytest.mark.parametrize("names", [(), ("up", "flat", "down", "other")])
def test_strings_name_the_classes(tmp_path, names):
    test = np.array(["flat", "down"])
    arrays = {**FOUR, "y_train": NAMES, "x_test": X[:2], "y_test": test}
    splits = build(save(tmp_path / "a", **arrays), axes=1, class_names=names)
    assert splits.class_names == (names or ("down", "flat", "up"))
    for part, labels in ((splits.train, NAMES), (splits.test, test)):
        assert [splits.class_names[i] for i in part.labels] == labels.tolist()
    assert (
        build(
            save(tmp_path / "b", x=X, y=np.where(Y == 1, "Up", NAMES)), axes=1, test_fraction=0.5
        ).notes[0]
        == "separate classes have similar names: 'Up' and 'up'"
    )


def test_labels_may_start_above_zero_if_classes_are_named_or_tested(tmp_path):
    path = save(tmp_path / "a", x=X, y=Y + 1)
    assert len(build(path, axes=1, class_names=tuple("abcd"), test_fraction=0.5).class_names) == 4
    path = save(tmp_path / "b", **{**FOUR, "y_train": Y + 1})
    assert "classes without training examples: 0" in build(path, axes=1).notes


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("npz", lambda content: content[: len(content) // 2], r"path is .*b\.npz', .* read"),
        ("compressed", lambda content: content[: len(content) // 2], r"path is .*b\.npz', .* read"),
        ("compressed", lambda c: c[:200] + bytes(2000) + c[2200:], "x cannot be read"),
        ("folder", lambda content: content[:1000], "x cannot be read"),
        ("folder", lambda content: b"", "x cannot be read"),
        ("folder", lambda content: b"not an array", "x cannot be read"),
    ],
)
def test_damaged_files_are_named(tmp_path, kind, change, message):
    path = tmp_path / ("b" if kind == "folder" else "b.npz")
    save(path, kind, x=values(COUNT, 50, 40), y=Y)
    file = path / "x.npy" if kind == "folder" else path
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=message):
        build(str(path))


def test_missing_files_are_named(tmp_path):
    (tmp_path / "a.npy").touch()
    for name, message in (
        ("nowhere", "no such file"),
        ("a.npy", r"expected a \.npz file or a .*own_arrays\.md shows how to convert CSV files"),
    ):
        with pytest.raises(ValueError, match=rf"data\.path is .*{name}.*{message}"):
            build(str(tmp_path / name))


@pytest.fixture(scope="module")
def signals(tmp_path_factory):
    """Return the folder of a run on signals with 2 channels, channels first."""
    root = tmp_path_factory.mktemp("signals")
    x = values(40, 2, 40) + 300 * (np.arange(40) % 2)[:, None, None]
    path = save(root / "a", x=x, y=np.arange(40) % 2)
    argv = ["train", "signal_classifier", "--data.path", path, "--out", str(root / "out")]
    argv += ["--model.depth", "1", "--model.width", "16", "--training.epochs", "8"]
    assert main(argv) == 0
    return root / "out" / "seed-0"


@pytest.mark.slow
def test_arrays_are_predicted(signals, tmp_path, capsys):
    y = np.array([1, 0, 0, 1, 1])
    x = (values(5, 2, 40) + 300 * y[:, None, None]).astype(np.float32)
    table = tmp_path / "p.csv"
    np.save(tmp_path / "x.npy", x)
    last = np.moveaxis(x, 1, -1)
    paths = [save(tmp_path / "a", x=x, y=y), save(tmp_path / "b", other=last)]
    for path in [*paths, str(tmp_path / "x.npy")]:
        assert main(["predict", str(signals), path, "--out", str(table), "--top-k", "1"]) == 0
        with table.open() as file:
            rows = list(csv.DictReader(file))
        assert [row["path"] for row in rows] == [f"{path}[{row}]" for row in range(5)]
        assert [int(row["class"]) for row in rows] == y.tolist()
    capsys.readouterr()


def test_folders_are_named_where_arrays_are_missing(tmp_path):
    for name in ("images", "annotations"):
        (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=r"found: the folder annotations, the folder images\. A"):
        ArrayDatasetConfig(path=str(tmp_path)).infer_layout()


@pytest.mark.slow
def test_arrays_that_cannot_be_predicted_are_named(signals, tmp_path, capsys):
    x = np.ones((3, 2, 40))
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "a.csv").write_text("0,1")
    for path, message in [
        (save(tmp_path / "a", x=x[:, :, :30]), "expected [N, 2, 40] or [N, 40, 2]"),
        (save(tmp_path / "b", u=x, v=x), "has no array x; found: u, v"),
        (
            save(tmp_path / "c", x=np.where(x, np.nan, x)),
            "c.npz: example 0 of x has values that are not finite (NaN",
        ),
        (save(tmp_path / "d", x=x.astype(str)), "d.npz: x holds"),
        (save(tmp_path / "e", x=x.astype(object)), "e.npz: x cannot be read"),
        (tmp_path / "none.npz", "there is no file"),
        (tmp_path / "a.png", f"arrays (.npz or .npy files), not '{tmp_path / 'a.png'}'"),
        (tmp_path / "a.csv", f"arrays (.npz or .npy files), not '{tmp_path / 'a.csv'}'"),
        (tmp_path, f"the model reads arrays (.npz or .npy files), not '{tmp_path}'"),
    ]:
        assert main(["predict", str(signals), str(path)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.sampled
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
    changes = {"steps": 60, "batch_size": 16, "learning_rate": 3e-3, "checkpoint_every": 20.0}
    run = replace(run, training=replace(run.training, evaluate_every=20.0, **changes))
    train(run, tmp_path / "run")
    assert read_metrics(tmp_path / "run")[-1]["accuracy"] > 0.9
    checkpoint = load(tmp_path / "run")
    assert checkpoint.format.channels == channels
    assert configs.from_dict(type(run), checkpoint.run) == run


def test_other_tasks_need_images(tmp_path):
    splits = build(save(tmp_path / "a", x=values(COUNT, 4), y=Y), axes=1, test_fraction=0.25)
    with pytest.raises(ValueError, match=r"data has numbers of shape \(1, 4\), expected images"):
        ImageGenerationConfig().build(splits)
    with pytest.raises(ValueError, match=r"task\.teacher is 'some/model'"):
        ImageClassificationConfig(teacher="some/model").build(splits)


# Large offsets, other ranges, and notes

OFFSETS = {
    "Unix times": 1_700_000_000 + RNG.integers(0, 60, (COUNT, 16)),
    "unsigned": (4_000_000_000 + RNG.integers(0, 60, (COUNT, 16))).astype(np.uint32),
    "nanoseconds": 1_700_000_000_000_000_000 + RNG.integers(0, 10**12, (COUNT, 16)),
    "large uint64": (2**63 + RNG.integers(0, 2**50, (COUNT, 16)).astype(np.uint64)),
    "pressures": 101_325 + RNG.normal(0, 0.5, (COUNT, 16)),
    "big-endian": (-1e9 + RNG.normal(0, 1, (COUNT, 16))).astype(">f8"),
    "tiny": RNG.normal(0, 1e-42, (COUNT, 16)),
    "huge": RNG.normal(0, 1e40, (COUNT, 16)),
    "tiny squares": RNG.normal(0, 1e-200, (COUNT, 16)),
    "huge squares": RNG.normal(1e201, 1e200, (COUNT, 16)),
    "half": RNG.normal(60_000, 100, (COUNT, 16)).astype(np.float16),
    "moderate": 40 + RNG.normal(0, 1, (COUNT, 16)),
}


def standardized(x):
    """Standardize in the widest type, as a reference."""
    wide = x.astype(np.longdouble)
    return (wide - wide.mean()) / wide.std()


@pytest.mark.parametrize("name", OFFSETS)
def test_large_offsets_survive_standardization(tmp_path, name):
    x = OFFSETS[name]
    both = {"x_train": x, "y_train": Y, "x_test": x[:4], "y_test": Y[:4]}
    splits = build(save(tmp_path / "a", **both), axes=1)
    want = torch.from_numpy(standardized(x).astype(np.float32))[:, None]
    made = splits.format.model_input(read(splits.train)[0])
    assert made.dtype == torch.float32
    torch.testing.assert_close(made, want, atol=2e-5, rtol=1e-5)
    for given in (read(splits.test)[0], x[:4, None]):  # an array of the user
        torch.testing.assert_close(splits.format.model_input(given), want[:4], atol=2e-5, rtol=1e-5)
    task = ImageClassificationConfig(augment=None).build(splits)
    moved, _ = task.to_device(read(splits.train), torch.device("cpu"))
    assert moved.dtype == torch.float32  # also on a GPU
    torch.testing.assert_close(task._model_input(moved), want, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(task._model_input(read(splits.train)[0]), want, atol=2e-5, rtol=1e-5)
    restored = configs.from_dict(ArrayFormat, configs.to_dict(splits.format))
    assert (restored.mean, restored.std) == (splits.format.mean, splits.format.std)
    data = read_inputs(save(tmp_path / "b", x=x), restored)
    torch.testing.assert_close(restored.model_input(read(data)[0]), want, atol=2e-5, rtol=1e-5)


def test_shards_of_large_offsets(tmp_path):
    x = OFFSETS["Unix times"]
    splits = build(save(tmp_path / "a", x=x, y=Y), axes=1, test_fraction=0.25)
    parts = [splits.train.shared(Share(rank, 2, patch=2)) for rank in range(2)]
    whole = torch.cat([read(part)[0] for part in parts], dim=2)
    assert torch.equal(whole, read(splits.train)[0])


def test_one_channel_with_an_offset_keeps_the_others(tmp_path):
    x = np.stack([OFFSETS["Unix times"].astype(float), RNG.normal(0, 1, (COUNT, 16))], axis=1)
    path = save(tmp_path / "a", x=x, y=Y)
    splits = build(path, axes=1, channels_first=True, test_fraction=0.25)
    made = splits.format.model_input(read(splits.train)[0])
    assert made.std(dim=(0, 2), correction=0).tolist() == pytest.approx([1, 1], abs=1e-5)
    assert any("float64" in note for note in splits.notes)


def test_a_constant_channel_is_only_centered(tmp_path):
    x = np.full((COUNT, 16), 1.7e9 + 0.1)
    splits = build(save(tmp_path / "a", x=x, y=Y), axes=1, test_fraction=0.25)
    assert splits.format.std == (1.0,)
    assert splits.format.model_input(read(splits.train)[0]).abs().max() < 1e-6


def test_integers_that_float64_cannot_tell_apart_are_refused(tmp_path):
    x = 1_700_000_000_000_000_000 + RNG.integers(0, 60, (COUNT, 16))
    with pytest.raises(ValueError, match=r"integers near 1\.7e\+18 .* subtract a constant"):
        build(save(tmp_path / "a", x=x, y=Y), axes=1, test_fraction=0.25)


def test_training_and_test_bytes_have_one_type(tmp_path):
    x = RNG.integers(0, 256, (COUNT, 16))
    labels = {"y_train": Y, "y_test": Y}
    for kinds in ((np.uint8, np.int64), (np.float32, np.uint8)):
        first, second = (x.astype(kind) for kind in kinds)
        path = save(tmp_path / "a", x_train=first, x_test=second, **labels)
        with pytest.raises(
            ValueError, match=r"x_test holds .*, but x_train holds .* uint8 in both"
        ):
            build(path, axes=1)
    path = save(tmp_path / "a", x_train=x, x_test=x.astype(float), **labels)
    splits = build(path, axes=1)
    assert torch.equal(read(splits.train)[0], read(splits.test)[0])


def test_the_training_type_determines_the_range_of_later_arrays(tmp_path):
    x = RNG.integers(0, 256, (COUNT, 16))
    of_ints, of_bytes = (
        build(save(tmp_path / "a", x=x.astype(kind), y=Y), axes=1, test_fraction=0.25)
        for kind in (np.int64, np.uint8)
    )
    want = of_ints.format.model_input(x[:, None])
    torch.testing.assert_close(of_ints.format.model_input(x[:, None].astype(np.uint8)), want)
    bytes_ = torch.from_numpy(x[:, None].astype(np.uint8))
    want = of_bytes.format.model_input(bytes_)
    torch.testing.assert_close(of_bytes.format.model_input(bytes_ / 255), want)
    with pytest.raises(ValueError, match=r"pixels have type torch\.int64, expected uint8"):
        of_bytes.format.model_input(x[:, None])
    older = configs.to_dict(of_bytes.format)
    del older["is_bytes"]  # as saved by version 0.17
    torch.testing.assert_close(configs.from_dict(ArrayFormat, older).model_input(bytes_), want)


class Mean(torch.nn.Module):
    """Scores by the sign of the mean."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        mean = x.flatten(1).mean(dim=1, keepdim=True) * self.weight
        return torch.cat([mean, -mean], dim=1)


def test_images_are_predicted_from_arrays_by_their_type(tmp_path):
    format = ImageFormat(channels=1, height=4, width=5, mean=(0.5,), std=(0.5,))
    x = RNG.integers(0, 256, (3, 4, 5), dtype=np.uint8)

    def scores(values):
        path = save(tmp_path / "x", x=values)
        batches = read_arrays(read_inputs(path, format), format)
        return torch.cat([Mean()(values) for values, _ in batches])

    want = scores(x)
    for same in (x / 255, (x / 255).astype(">f4"), x.astype(np.uint16) * 257):
        torch.testing.assert_close(scores(same), want)
    torch.testing.assert_close(scores(x > 100), scores((x > 100) * np.uint8(255)))
    torch.testing.assert_close(scores(np.ones((3, 4, 5), np.float16)), scores(x * 0 + 255))
    for wrong, message in (
        (x.astype(np.int64), "int64"),
        (x.astype(np.float32), r"floats from .* expected floats from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            scores(wrong)


def test_notes_on_arrays(tmp_path):
    x, y = values(COUNT, 4), Y * 2
    notes = build(save(tmp_path / "a", x=x, y=y), axes=1, test_fraction=0.25).notes
    assert notes == (
        "3 of 12 examples are held out, because there is no test split",
        "classes without training examples: 1, 3",
        "classes without test examples: 1, 3",
    )
    both = {"x_train": x, "y_train": Y > 0, "x_test": x, "y_test": Y > 0}
    path = save(tmp_path / "b", "folder", **both, x_val=x, y_val=Y)
    (tmp_path / "b" / "readme.txt").touch()
    assert build(path, axes=1).notes == (
        "arrays not used: x_val, y_val",
        "files not used: readme.txt",
        "labels are booleans: False is class 0, and True is class 1",
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("field", ["mean", "std"])
def test_constants_of_arrays_are_finite(tmp_path, field, bad):
    path = save(tmp_path / "a", x=X, y=Y)
    with pytest.raises(ValueError, match=rf"data\.{field} is \({bad},\), expected finite numbers"):
        build(path, axes=1, test_fraction=0.5, **{field: (bad,)})
    constants = {"mean": (0.0,), "std": (1.0,)}
    with pytest.raises(ValueError, match="expected finite numbers"):
        ArrayFormat(channels=1, shape=(4,), **{**constants, field: (bad,)})


def test_classes_without_test_examples_are_noted(tmp_path):
    x, y = np.zeros((4, 8), np.float32), np.array([0, 1, 0, 1])
    path = save(tmp_path / "a", x_train=x, y_train=y, x_test=x[:1], y_test=y[:1])
    assert "classes without test examples: 1" in build(path, axes=1).notes


def test_large_integers_that_float64_cannot_tell_apart_are_refused(tmp_path):
    steps = RNG.integers(0, 2, (COUNT, 40))
    path = save(tmp_path / "close", x=2**60 + 2**10 * steps, y=Y)
    with pytest.raises(ValueError, match=r"x holds integers near 1.153e\+18 that are too close"):
        build(path, axes=1, test_fraction=0.25)
    path = save(tmp_path / "apart", x=2**60 + 2**30 * steps, y=Y)
    apart = build(path, axes=1, test_fraction=0.25)
    assert apart.format.std[0] == pytest.approx(2**29, rel=0.1)
