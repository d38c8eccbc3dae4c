"""Arrays of different sizes: masks, statistics, checks, and results of each example alone."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pages import python_block
from tiny_run import assert_same, tiny_run

from onescan import configs
from onescan.cli import main
from onescan.experiments.data import AffineConfig, ArrayDatasetConfig, Example, MixConfig
from onescan.experiments.data.arrays import read_inputs
from onescan.experiments.data.share import Share
from onescan.experiments.recipes import find_recipe
from onescan.experiments.recipes.infer import for_path, infer
from onescan.experiments.tasks import (
    ImageClassificationConfig,
    MultilabelClassificationConfig,
    RegressionConfig,
)
from onescan.experiments.tasks.image_classification import read_arrays
from onescan.experiments.training import train
from onescan.inference.loading import load
from onescan.inputs import ArrayFormat, pad_images
from onescan.layers.mixers import (
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
    SoftmaxMixerConfig,
)
from onescan.layers.position import AbsolutePositionConfig
from onescan.models.image_classifier import ImageClassifierConfig

RNG = np.random.default_rng(0)
COUNT = 24
Y = np.arange(COUNT) % 3
TARGETS = {
    "class": (Y, ImageClassificationConfig(augment=None)),
    "multilabel": (np.stack([Y > 0, Y > 1], 1), MultilabelClassificationConfig()),
    "value": (RNG.normal(size=(COUNT, 2)), RegressionConfig()),
}
LARGEST = (23, 9, 7)  # size of x along up to three axes
AFTER = (2, 1, 0)  # padding after the longest example
MIXERS = {
    "lightnet": LightNetMixerConfig(num_heads=2),
    "softmax": SoftmaxMixerConfig(num_heads=2),
    "ldn": LinearDiffusionMixerConfig(num_heads=2, separable=True),
}


def sizes_of(axes, count=COUNT):
    low, high = np.array(LARGEST[:axes]) // 3, np.array(LARGEST[:axes]) - AFTER[:axes]
    return RNG.integers(low, high + 1, (count, axes))


def ragged(axes, channels=2, dtype=np.float32):
    """Return examples of different sizes, channels first."""
    sizes = sizes_of(axes)
    sizes[:3] = np.array(LARGEST[:axes]) - AFTER[:axes]
    values = RNG.normal(3 + Y.mean(), 2, (COUNT, channels, *LARGEST[:axes]))
    cuts = [(..., *map(slice, size)) for size in sizes]
    return [x[cut].astype(dtype) for x, cut in zip(values, cuts, strict=True)]


def padded(examples, fill=0, size=None):
    size = LARGEST[: examples[0].ndim - 1] if size is None else size
    x = np.full((len(examples), len(examples[0]), *size), fill, examples[0].dtype)
    for row, example in zip(x, examples, strict=True):
        row[tuple(map(slice, example.shape))] = example
    return x, np.array([example.shape[1:] for example in examples])


def save(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


def saved(path, examples, y=Y, fill=0):
    x, lengths = padded(examples, fill)
    return save(path, x=x, y=y, lengths=lengths)


def config(path, axes=1, **options):
    options = {"test_fraction": 0.25, "channels_first": True, **options}
    return ArrayDatasetConfig(path=path, axes=axes, **options)


def read(data, places=None):
    places = range(len(data)) if places is None else places
    return data.read([Example(place) for place in places]).batch


def model_config(axes, outputs=3, mixer=MIXERS["softmax"], **options):
    return ImageClassifierConfig(
        image_size=LARGEST[:axes],
        patch_size=(4, 2, 2)[:axes],
        channels=2,
        num_classes=outputs,
        width=12,
        depth=2,
        mixer=mixer,
        drop_path=0.0,
        **options,
    )


class Double(torch.nn.Module):
    """A model in float64."""

    def __init__(self, model):
        super().__init__()
        self.model = model.double()

    def forward(self, x, keep=None):
        return self.model(x.double(), keep=keep)


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("layout", ["first", "last", "none"])
def test_batches_are_cut_to_their_largest_size_and_masked(tmp_path, axes, layout):
    examples = ragged(axes, channels=1 if layout == "none" else 2)
    x, lengths = padded(examples, np.nan)
    x = {"first": x, "last": np.moveaxis(x, 1, -1), "none": x[:, 0]}[layout]
    path = save(tmp_path / "a.npz", x=x, y=Y, lengths=lengths)
    data = config(path, axes, channels_first=layout == "first").build().train
    places = data.indices.tolist()
    for rows in ([5, 2, 9], [7], range(len(places))):
        values, labels, keep = read(data, rows)
        chosen = [examples[places[row]] for row in rows]
        want, mask = pad_images([torch.from_numpy(example) for example in chosen])
        assert torch.equal(values, want)
        assert torch.equal(keep, mask)
        assert labels.tolist() == [Y[places[row]] for row in rows]


@pytest.mark.parametrize("dtype", [np.float32, ">f8", np.int16, np.uint8])
@pytest.mark.parametrize("chunk", [1 << 24, 60])
def test_statistics_are_of_real_positions(tmp_path, monkeypatch, dtype, chunk):
    monkeypatch.setattr("onescan.experiments.data.arrays.CHUNK", chunk)
    examples = [np.abs(x * 10).astype(dtype) for x in ragged(2, dtype=np.float64)]
    splits = config(saved(tmp_path / "a.npz", examples, fill=99), axes=2).build()
    chosen = [examples[place].reshape(2, -1) for place in splits.train.indices.tolist()]
    values = np.concatenate(chosen, axis=1) / (255 if dtype == np.uint8 else 1)
    assert splits.format.mean == pytest.approx(values.mean(axis=1, dtype=np.float64))
    assert splits.format.std == pytest.approx(values.std(axis=1, dtype=np.float64))


def test_the_format_is_ragged_and_its_shape_the_largest(tmp_path):
    examples = [np.abs(x).astype(np.uint8) for x in ragged(2, channels=3)]
    x, lengths = padded(examples)
    format = config(save(tmp_path / "a.npz", x=x, y=Y, lengths=lengths), axes=2).build().format
    assert isinstance(format, ArrayFormat)  # images of one size are resized to it
    assert (format.is_ragged, format.is_bytes) == (True, True)
    assert format.shape == tuple(lengths.max(axis=0)) == (21, 8)
    assert configs.from_dict(ArrayFormat, configs.to_dict(format)) == format
    of_one_size = config(save(tmp_path / "b.npz", x=x, y=Y), axes=2).build().format
    assert not of_one_size.is_ragged


def test_lengths_of_one_column_are_along_the_first_axis(tmp_path):
    volumes = RNG.normal(size=(COUNT, 1, *LARGEST))
    slices = sizes_of(1)[:, 0]
    path = save(tmp_path / "a.npz", x=volumes, y=Y, lengths=slices.astype(np.uint8))
    splits = config(path, axes=3).build()
    assert splits.format.shape == (slices.max(), *LARGEST[1:])
    keep = read(splits.train)[2]
    assert keep.shape[2:] == LARGEST[1:]
    assert (keep == keep[:, :, :1, :1]).all()
    assert keep[:, :, 0, 0].sum(dim=1).tolist() == slices[splits.train.indices].tolist()


def test_training_and_test_arrays_may_be_padded_to_different_sizes(tmp_path):
    examples = ragged(1)
    (first, some), (second, others) = padded(examples[3:], size=(40,)), padded(examples[:3])
    arrays = {"x_train": first, "y_train": Y[3:], "x_test": second, "y_test": Y[:3]}
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, array in (arrays | {"lengths_train": some, "lengths_test": others}).items():
        np.save(folder / f"{name}.npy", array)
    splits = config(str(folder)).build()
    assert splits.format.shape == (max(some.max(), others.max()),)
    assert read(splits.test)[2].sum(dim=1).tolist() == others[:, 0].tolist()
    with pytest.raises(
        ValueError, match="lengths_train and lengths_test, but there is lengths_train"
    ):
        config(save(tmp_path / "a.npz", **arrays, lengths_train=some)).build()


SIGNALS, SIZES = padded(ragged(1))


def changed(row, size):
    sizes = SIZES.copy()
    sizes[row] = size
    return sizes


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"lengths": changed(4, 0)}, r"lengths\[4, 0\] is 0, expected 1 to 23, the size of x"),
        ({"lengths": changed(4, 24)[:, 0]}, r"lengths\[4\] is 24, expected 1 to 23"),
        ({"lengths": changed(2, -1)}, r"lengths\[2, 0\] is -1, expected 1 to 23"),
        ({"lengths": SIZES[1:]}, r"shape \(23, 1\), expected \(24,\) or \(24, 1\): the size of"),
        ({"lengths": SIZES[:, [0, 0]]}, r"lengths has shape \(24, 2\)"),
        ({"lengths": SIZES / 1}, "lengths holds float64, expected integers"),
        (
            {"lengths_train": SIZES},
            "the sizes of the examples in x must be in lengths, but there is lengths_train",
        ),
        ({"lengths": SIZES, "x": None}, "no array x"),
    ],
)
def test_unusable_lengths_are_refused(tmp_path, arrays, message):
    arrays = {"x": SIGNALS, "y": Y, **arrays}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    path = save(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        config(path).build()


def test_real_values_must_be_finite(tmp_path):
    x = np.where(np.arange(23) == 2, np.nan, SIGNALS)
    with pytest.raises(ValueError, match=r"example \d+ of x has values that are not finite"):
        config(save(tmp_path / "a.npz", x=x, y=Y, lengths=SIZES)).build()


@pytest.mark.parametrize(("axes", "kind"), [(1, "class"), (2, "multilabel"), (3, "value")])
@pytest.mark.parametrize("mixer", MIXERS)
def test_losses_and_predictions_are_those_of_each_example_alone(tmp_path, axes, kind, mixer):
    (y, task), examples = TARGETS[kind], ragged(axes)
    splits = config(saved(tmp_path / "a.npz", examples, y, np.nan), axes).build()
    task = task.build(splits)
    torch.manual_seed(0)
    config_of_model = model_config(axes, len(splits.class_names), MIXERS[mixer])
    model = Double(config_of_model.build()).eval()
    batch, losses = read(splits.train), []
    outputs, rows = task._apply(model, batch), task.predict(model, batch)
    for row, place in enumerate(splits.train.indices.tolist()):
        alone = torch.from_numpy(examples[place])[None], splits.train.labels[[place]]
        want = model(task.format.model_input(alone[0]))
        torch.testing.assert_close(outputs[[row]], want, rtol=0, atol=1e-9)
        for name, value in task.predict(model, alone).items():
            torch.testing.assert_close(rows[name][[row]], value, rtol=0, atol=1e-6)
        losses.append(task.loss(model, alone)[0])
    loss = task.loss(model, batch)[0]
    torch.testing.assert_close(loss, torch.stack(losses).mean(), rtol=0, atol=1e-6)


def run_on(path, task=None, **options):
    training = {"epochs": 2, "checkpoint_every": 1.0, "evaluate_every": 1.0}
    return replace(
        tiny_run(**training),
        data=config(path),
        model=model_config(1, **options),
        task=task or TARGETS["class"][1],
    )


@pytest.mark.parametrize("fill", [np.nan, 1e30])
def test_padding_changes_no_result(tmp_path, fill, capsys):
    examples = ragged(1)
    results = [
        train(run_on(saved(tmp_path / f"{name}.npz", examples, fill=value)), tmp_path / name)
        for name, value in (("zeros", 0), ("other", fill))
    ]
    assert_same(*results)
    header = json.loads((tmp_path / "other" / "config.json").read_text())
    assert (header["format"]["is_ragged"], header["format"]["shape"]) == (True, [21])
    trained = load(tmp_path / "other")
    values = [trained.format.model_input(example[None])[0] for example in examples]
    images, keep = pad_images(values)
    with torch.no_grad():
        want = trained.target.predictions(trained.model(images, keep=keep))
        alone = [trained.target.predictions(trained.model(x[None])) for x in values]
    torch.testing.assert_close(torch.cat(alone), want)
    paths = [save(tmp_path / f"{row}.npz", x=x[None]) for row, x in enumerate(examples[:4])]
    table = tmp_path / "p.csv"
    for given in ([saved(tmp_path / "new.npz", examples[:4], fill=fill)], paths):
        assert main(["predict", str(tmp_path / "other"), *given, "--out", str(table)]) == 0
        with table.open() as file:
            rows = list(csv.DictReader(file))
        assert [int(row["class"]) for row in rows] == want[:4].argmax(dim=1).tolist()
        found = [float(row["confidence"]) for row in rows]
        assert found == pytest.approx(want[:4].amax(dim=1).tolist(), abs=2e-6)
    assert main(["evaluate", str(tmp_path / "other")]) == 0
    assert f"{results[0].metrics['loss']:.4g}" in capsys.readouterr().out


def test_predicted_files_have_lengths_beside_any_array(tmp_path):
    examples = ragged(1)
    format = config(saved(tmp_path / "a.npz", examples)).build().format
    x, lengths = padded(examples[:2], 1e30, size=(50,))
    for last in (False, True):
        other = np.moveaxis(x, 1, -1) if last else x
        path = save(tmp_path / "b.npz", other=other, lengths=lengths)
        values, _, keep = read(read_inputs(path, format))
        assert values.shape == (2, 2, lengths.max())
        assert keep.sum(dim=1).tolist() == lengths[:, 0].tolist()
    for arrays, message in (
        ({"lengths": lengths}, r"b\.npz has no array x; found: lengths"),
        ({"x": x, "lengths": lengths + 50}, r"b\.npz: lengths\[0, 0\] is \d+, expected 1 to 50"),
        ({"x": x[:, 0]}, r"shape \(2, 50\), expected \[N, 2, any size\] or \[N, any size, 2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            read_inputs(save(tmp_path / "b.npz", **arrays), format)


def test_models_of_one_size_also_read_lengths(tmp_path):
    format = ArrayFormat(channels=2, shape=(23,), mean=(3.0, 3.0), std=(2.0, 2.0))
    torch.manual_seed(0)
    model, examples = model_config(1).build().eval(), ragged(1)
    data = read_inputs(saved(tmp_path / "a.npz", examples), format)
    together = torch.cat([model(values, keep=keep) for values, keep in read_arrays(data, format)])
    inputs = [format.model_input(example[None]) for example in examples]
    alone = torch.cat([model(x) for x in inputs])
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"augment": AffineConfig()}, "task.augment is an AffineConfig, but the examples have "),
        (
            {"augment": None, "mix": MixConfig()},
            "task.mix is a MixConfig, but the examples have different",
        ),
    ],
)
def test_augmentation_is_refused(tmp_path, task, message):
    splits = config(saved(tmp_path / "a.npz", ragged(1))).build()
    with pytest.raises(ValueError, match=message):
        ImageClassificationConfig(**task).build(splits)


def test_split_sequences_are_refused(tmp_path):
    task = TARGETS["class"][1].build(config(saved(tmp_path / "a.npz", ragged(1))).build())
    with pytest.raises(ValueError, match="sequence_parallel is 2, but the examples have different"):
        task.shard(Share(0, 2, patch=4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position": AbsolutePositionConfig()}, "sizes, but keep was given with absolute pos"),
        ({"mixer": LinearDiffusionMixerConfig(num_heads=2, kernel="dense")}, "kernel='dense'"),
    ],
)
def test_models_that_cannot_read_padding_are_refused_early(tmp_path, options, message):
    run = run_on(saved(tmp_path / "a.npz", ragged(1)), **options)
    with pytest.raises(ValueError, match=message):
        run.build_task()
    with pytest.raises(ValueError, match=message):
        train(run, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_settings_are_inferred_and_the_range_of_sizes_is_printed(tmp_path):
    sizes = RNG.integers(800, 1235, COUNT)
    sizes[:2] = 800, 1234
    path = save(tmp_path / "a.npz", x=RNG.normal(size=(COUNT, 1300)), y=Y, lengths=sizes)
    run = for_path(find_recipe("signal_classifier")(), path)
    run, lines = infer(run, {"data.path"})
    assert "signals in 3 classes (0, 1, 2), ragged: 800 to 1,234 values, 1 channel" in lines[0]
    assert (run.model.image_size, run.model.patch_size) == ((1234,), (8,))
    images = RNG.integers(0, 256, (COUNT, 12, 16, 3), dtype=np.uint8)
    path = save(tmp_path / "b.npz", x=images, y=Y, lengths=np.arange(COUNT) % 12 + 1)
    run = for_path(find_recipe("image_classifier")(), path)
    run, lines = infer(run, {"data.path"})
    assert "ragged: 1 to 12 x 16 pixels, 3 channels" in lines[0]
    assert (run.model.image_size, run.task.augment) == ((12, 16), None)


@pytest.mark.slow
def test_the_page_on_own_data_trains_reports_and_predicts(tmp_path, monkeypatch, capsys):
    write, apply = (python_block("own_arrays.md", word) for word in ("ragged.npz", "pad_images"))
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(write, names)  # noqa: S102
    argv = ["train", "signal_classifier", "--data.path", "ragged.npz", "--training.epochs", "1"]
    argv += ["--out", "runs/ragged"]
    assert main([*argv, "--model.depth", "1", "--model.width", "16"]) == 0
    assert ", ragged: 8" in capsys.readouterr().out
    exec(apply, names)  # noqa: S102
    assert names["probabilities"].shape == (200, 2)
    report = Path("runs/ragged/report.html").read_text(encoding="utf-8")
    longest = names["lengths"].max()
    assert f"each signal of up to {longest} into up to {-(-longest // 8)} patches of 8" in report
    assert "Not shown: the signals have different sizes." in report
