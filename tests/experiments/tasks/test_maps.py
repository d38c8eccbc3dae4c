"""A class or values at each position: data, losses, scores, windows, runs, predictions."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from html_page import Page
from pages import python_block
from PIL import Image
from sklearn.metrics import jaccard_score, mean_absolute_error, mean_squared_error, r2_score
from tiny_run import assert_same, interrupt, tiny_run
from torch.nn.functional import cross_entropy, mse_loss

from onescan import configs
from onescan.cli import main
from onescan.experiments.data import ArrayDatasetConfig, Example
from onescan.experiments.recipes import find_recipe
from onescan.experiments.recipes.infer import adapt, infer
from onescan.experiments.tasks import (
    DenseRegressionConfig,
    ImageClassificationConfig,
    RegressionConfig,
    SegmentationConfig,
)
from onescan.experiments.tasks.segmentation import dice_loss
from onescan.experiments.training import evaluate, read_metrics, train
from onescan.inference.loading import load
from onescan.layers.mixers import LightNetMixerConfig
from onescan.models.dense_predictor import DensePredictorConfig
from onescan.models.image_classifier import ImageClassifierConfig

RNG = np.random.default_rng(0)
COUNT, SIDES = 20, (7, 10)
X = RNG.normal(size=(COUNT, *SIDES)).astype(np.float32)
CLASSES = ((X > 0).astype(np.uint8) + (X > 1)).astype(np.uint8)
VALUES = np.stack([1e6 + 10 * X, X**2], -1).astype(float)
IGNORED = -100


def save(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


def onescan(*argv):
    return main([str(argument) for argument in argv])


def build(path, **options):
    return ArrayDatasetConfig(path=path, **{"test_fraction": 0.25, **options}).build()


def splits(tmp_path, y, **options):
    return build(save(tmp_path / "a.npz", x=X, y=y), **options)


def tiny(path, kind="class_map", task=None, data=None, **training):
    model = DensePredictorConfig(
        image_size=SIDES,
        channels=1,
        out_channels=3 if kind == "class_map" else 2,
        patch_size=(2, 3),
        width=8,
        depth=1,
        mixer=LightNetMixerConfig(num_heads=2),
        drop_path=0.0,
    )
    tasks = {"class_map": SegmentationConfig, "value_map": DenseRegressionConfig}
    return replace(
        tiny_run(**training),
        data=ArrayDatasetConfig(path=path, test_fraction=0.25, **(data or {})),
        task=tasks[kind](**(task or {})),
        model=model,
    )


def batch_of(data, count):
    return data.read([Example(place) for place in range(count)]).batch


class Constant(torch.nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs

    def forward(self, _):
        return self.outputs


def with_unknown(y, at):
    """Return a copy of classes or values that are unknown at some positions."""
    y = y.astype(np.int16 if y.dtype.kind in "iu" else float)
    y[at] = 255 if y.dtype.kind == "i" else np.nan
    return y


# Data


@pytest.mark.parametrize(
    ("y", "kind", "names", "note"),
    [
        (CLASSES, "class_map", ("0", "1", "2"), "one of 3 classes at each position$"),
        (CLASSES[..., None], "class_map", ("0", "1", "2"), "one of 3 classes"),
        (CLASSES[:, None] > 0, "class_map", ("0", "1"), "one of 2 classes"),
        (VALUES, "value_map", ("value_0", "value_1"), "2 real values at each position$"),
        (VALUES[..., 0], "value_map", ("value",), "1 real value at each position$"),
        (np.moveaxis(VALUES, -1, 1), "value_map", ("value_0", "value_1"), "2 real values"),
        (CLASSES.astype(float), "value_map", ("value",), r"whole numbers; .* y\.astype\(int\)"),
    ],
)
def test_maps_are_inferred_from_the_shape_of_y(tmp_path, y, kind, names, note):
    data = splits(tmp_path, y)
    assert (data.target.kind, data.class_names) == (kind, names)
    assert re.search(note, next(line for line in data.notes if line.startswith("y is read")))
    assert ArrayDatasetConfig(path=str(tmp_path / "a.npz")).infer_target() == kind
    maps = batch_of(data.train, 4)[1]
    rows = y[data.train.indices.numpy()[:4]]
    expected = rows.reshape(4, *SIDES) if kind == "class_map" else rows
    if kind == "value_map":
        expected = rows[:, None] if rows.ndim == 3 else rows
        expected = expected if expected.shape[1] < 3 else np.moveaxis(expected, -1, 1)
    assert np.array_equal(maps.numpy(), expected)
    assert maps.dtype == (torch.int64 if kind == "class_map" else torch.float64)


def test_signals_and_volumes_have_maps(tmp_path):
    for shape in ((20, 9), (20, 4, 5, 6)):
        x = RNG.normal(size=shape).astype(np.float32)
        for layout in (x, x[..., None], x[:, None]):
            path = save(tmp_path / "a.npz", x=layout, y=(x > 0).astype(int))
            config, _ = ArrayDatasetConfig(path=path).infer_layout()
            data = config.build()
            assert data.target.kind == "class_map"
            assert batch_of(data.train, 2)[1].shape == (2, *shape[1:])
    # a table of as many labels as samples could be either, so that a note says how to change it
    path = save(tmp_path / "a.npz", x=X[:, 0], y=CLASSES[:, 0] > 0)
    data = build(path, axes=1)
    assert data.target.kind == "class_map"
    assert any("pass --data.target multilabel" in line for line in data.notes)
    assert build(path, axes=1, target="multilabel").target.kind == "multilabel"


@pytest.mark.parametrize(
    ("y", "options", "message"),
    [
        (CLASSES[:, :5], {}, r"y has shape \(20, 5, 10\), expected a target .* \(20, 7, 10\)"),
        (CLASSES[:, :5], {"target": "class_map"}, r"shape \(20, 5, 10\), expected \(20, 7, 10\)"),
        (VALUES.astype(int), {}, r"shape \(20, 7, 10, 2\), expected \(20, 7, 10\), one class"),
        (VALUES, {"target": "class_map"}, "y holds float64, expected integers"),
        (CLASSES.astype(str), {"target": "value_map"}, "y holds <U.*, expected numbers"),
        (CLASSES.astype(int) - 1, {}, r"y\[0, \d, \d\] is -1, expected classes from 0"),
        (CLASSES * 0, {}, r"a\.npz', where all positions of y have class 0"),
        (
            (CLASSES > 0) * np.uint8(255),
            {},
            "where the classes of y are 0, 255, .* save y // 255",
        ),
        (CLASSES * 0 + 255, {"ignore_index": 255}, "where no position of y has a class"),
        (VALUES, {"ignore_index": 2}, "as integers; it holds float64"),
        (CLASSES.astype(float), {"target": "class_map"}, r"expected integers .* y\.astype\(int\)"),
        (CLASSES[:, 0, 0], {"ignore_index": 2}, "data.ignore_index is 2, expected None"),
        (CLASSES, {"class_names": ("a", "b")}, "where y has class 2, expected 0 to 1, because"),
        (VALUES, {"class_names": ("a",)}, r"has 1 name \(a\), but y has 2 values"),
        (VALUES, {"class_names": ("a", "a")}, "contains 'a' more than once"),
        (with_unknown(VALUES, np.s_[:]), {}, "y holds only NaN"),
        (np.where(X[3, 2, 2] == X, np.inf, X), {}, r"y\[3\] has infinite values"),
    ],
)
def test_unusable_maps_are_refused(tmp_path, y, options, message):
    with pytest.raises(ValueError, match=message):
        splits(tmp_path, y, **options)


def test_training_and_test_maps_agree(tmp_path):
    arrays = {"x_train": X, "x_test": X, "y_train": VALUES, "y_test": VALUES[..., :1]}
    with pytest.raises(ValueError, match="per position differs: 2 in y_train and 1 in y_test"):
        build(save(tmp_path / "a.npz", **arrays))
    arrays |= {"y_train": np.minimum(CLASSES, 1), "y_test": CLASSES}
    with pytest.raises(ValueError, match="where y_test has class 2, expected 0 to 1"):
        build(save(tmp_path / "b.npz", **arrays))
    arrays |= {"y_train": CLASSES, "y_test": CLASSES * 0 + 255}
    with pytest.raises(ValueError, match="no position of the test examples has a class"):
        build(save(tmp_path / "b.npz", **arrays), ignore_index=255)
    arrays |= {"y_train": CLASSES, "y_test": np.minimum(CLASSES, 1)}
    assert "classes without test positions: 2" in build(save(tmp_path / "c.npz", **arrays)).notes


def test_unknown_positions_are_marked_and_counted(tmp_path):
    at = np.s_[:, :, 3:5]
    data = splits(tmp_path, with_unknown(CLASSES, at), ignore_index=255)
    assert (batch_of(data.train, 5)[1][at] == IGNORED).all()
    assert "training positions without a class: 20.0%" in data.notes
    data = splits(tmp_path, with_unknown(VALUES, at))
    assert batch_of(data.train, 5)[1][:, :, :, 3:5].isnan().all()
    assert "test positions without a value: 20.0%" in data.notes


def test_statistics_are_those_of_known_training_values(tmp_path):
    y = with_unknown(VALUES, np.s_[::2, 1])
    data = splits(tmp_path, y)
    rows = y[data.train.indices.numpy()].reshape(-1, 2)
    np.testing.assert_allclose(data.target.mean, np.nanmean(rows, 0), rtol=1e-12)
    np.testing.assert_allclose(data.target.std, np.nanstd(rows, 0), rtol=1e-9)
    maps = batch_of(data.train, 5)[1]
    standardized = data.target.standardize(maps)
    assert standardized[~maps.isnan()].abs().max() < 10
    back = data.target.predictions(standardized)
    torch.testing.assert_close(back, maps, rtol=1e-7, atol=1e-5, equal_nan=True)


# Losses and scores


def test_loss_is_a_mean_over_known_positions(tmp_path):
    y = with_unknown(CLASSES, np.s_[::3, 2:])
    data = splits(tmp_path, y, ignore_index=255)
    task = SegmentationConfig(dice_weight=0.0).build(data)
    maps = batch_of(data.train, 6)[1]
    scores = torch.randn(6, 3, *SIDES, generator=torch.Generator().manual_seed(0))
    loss, _ = task.loss(Constant(scores), (torch.zeros(6, 1, *SIDES), maps))
    torch.testing.assert_close(loss, cross_entropy(scores, maps, ignore_index=IGNORED))
    assert task.count_labels((scores, maps)) == (maps != IGNORED).sum()
    nothing, _ = task.loss(Constant(scores), (torch.zeros(6, 1, *SIDES), maps * 0 + IGNORED))
    assert nothing == 0

    data = splits(tmp_path, with_unknown(VALUES, np.s_[::3, 2:]))
    task = DenseRegressionConfig().build(data)
    maps = batch_of(data.train, 6)[1]
    loss, _ = task.loss(Constant(scores[:, :2]), (torch.zeros(6, 1, *SIDES), maps))
    known = ~maps.isnan()
    expected = mse_loss(scores[:, :2][known], task.target.standardize(maps)[known])
    torch.testing.assert_close(loss, expected)


def test_dice_loss_equals_its_definition():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 3, 5, 6, generator=generator, dtype=torch.float64)
    maps = torch.randint(0, 3, (4, 5, 6), generator=generator)
    maps[:, 0] = IGNORED
    maps[1][maps[1] == 2] = 0  # class 2 does not occur in this example
    losses = dice_loss(scores, maps)
    for example in range(4):
        p, y = scores[example].softmax(0)[:, 1:], maps[example, 1:]
        occurs = [c for c in range(3) if (y == c).any()]
        dice = [2 * p[c][y == c].sum() / (p[c].sum() + (y == c).sum()) for c in occurs]
        assert losses[example].item() == pytest.approx(1 - sum(dice).item() / len(dice), abs=1e-6)
    perfect = torch.nn.functional.one_hot(maps.clamp(min=0), 3).movedim(-1, 1) * 100.0
    assert dice_loss(perfect, maps).abs().max() < 1e-6


@pytest.mark.parametrize("weights", ["balanced", (0.0, 1.0, 3.0)])
def test_class_weights_have_a_mean_of_one(tmp_path, weights):
    data = splits(tmp_path, CLASSES)
    task = SegmentationConfig(class_weights=weights).build(data)
    shares = np.bincount(CLASSES[data.train.indices.numpy()].flatten()) / (15 * 70)
    assert (task.weights.numpy() * shares).sum() == pytest.approx(1)
    expected = 1 / shares if weights == "balanced" else np.array(weights)
    assert np.allclose(task.weights / task.weights[2], expected / expected[2])


def test_scores_equal_those_of_scikit_learn(tmp_path):
    y = with_unknown(CLASSES, np.s_[1::2, :2])
    run = tiny(save(tmp_path / "a.npz", x=X, y=y), data={"ignore_index": 255})
    task, model = run.build_task(), run.model.build().eval()
    evaluation = evaluate(model, task)
    batch = batch_of(task.test, 5)
    with torch.no_grad():
        maps, predicted = batch[1], task.predicted_maps(model, batch)
    known = maps != IGNORED
    iou = jaccard_score(maps[known], predicted[known], average=None, labels=range(3))
    assert [evaluation.metrics[f"{i}_iou"] for i in range(3)] == pytest.approx(iou)
    assert evaluation.metrics["mean_iou"] == pytest.approx(iou.mean())
    dice = 2 * iou / (1 + iou)
    assert evaluation.metrics["mean_dice"] == pytest.approx(dice.mean())
    correct = (maps == predicted)[known].double().mean().item()
    assert evaluation.metrics["accuracy"] == pytest.approx(correct)
    assert task.score(evaluation.metrics) == evaluation.metrics["mean_iou"]


def test_errors_equal_those_of_scikit_learn(tmp_path):
    run = tiny(save(tmp_path / "a.npz", x=X, y=with_unknown(VALUES, np.s_[::2, 1])), "value_map")
    task, model = run.build_task(), run.model.build().eval()
    metrics = evaluate(model, task).metrics
    batch = batch_of(task.test, 5)
    with torch.no_grad():
        maps, predicted = batch[1], task.predicted_maps(model, batch)
    for i in range(2):
        known = ~maps[:, i].isnan()
        pair = maps[:, i][known], predicted[:, i][known]
        assert metrics[f"value_{i}_r2"] == pytest.approx(r2_score(*pair), abs=1e-5)
        assert metrics[f"value_{i}_mae"] == pytest.approx(mean_absolute_error(*pair), rel=1e-5)
        rmse = math.sqrt(mean_squared_error(*pair))
        assert metrics[f"value_{i}_rmse"] == pytest.approx(rmse, rel=1e-5)
    assert task.score(metrics) == metrics["r2"]


def test_test_examples_need_a_known_position(tmp_path):
    arrays = {"x_train": X, "y_train": VALUES, "x_test": X, "y_test": VALUES}
    run = tiny(save(tmp_path / "a.npz", **arrays), "value_map")
    task = run.build_task()
    unknown = torch.full((2, 2, *SIDES), torch.nan, dtype=torch.float64)
    rows = task.predict(run.model.build().eval(), (torch.zeros(2, 1, *SIDES), unknown))
    with pytest.raises(ValueError, match="no position of the test examples has a target"):
        task.evaluate(rows)


# Windows and mirrors


def test_training_windows_and_mirrors_keep_targets_in_place(tmp_path):
    x = np.arange(COUNT * 70, dtype=np.float32).reshape(COUNT, *SIDES)
    for y in (x.astype(int) % 3, np.stack([x, -x], -1).astype(float)):
        data = build(save(tmp_path / "a.npz", x=x, y=y))
        config = SegmentationConfig if y.dtype == int else DenseRegressionConfig
        task = config(flip_axes=(0, 1), window=(4, 99)).build(data)
        grids, maps = task.augment(batch_of(data.train, 15), 3)
        assert grids.shape == (15, 1, 4, 10)
        expected = grids[:, 0].long() % 3 if y.dtype == int else torch.cat([grids, -grids], 1)
        assert torch.equal(maps, expected.to(maps.dtype))
        corners = {(int(g[0, 0, 0] - g[0, 1, 0]), int(g[0, 0, 0] - g[0, 0, 1])) for g in grids}
        assert corners == {(10, 1), (10, -1), (-10, 1), (-10, -1)}
        assert torch.equal(task.augment(batch_of(data.train, 15), 3)[0], grids)
        assert not torch.equal(task.augment(batch_of(data.train, 15), 4)[0], grids)


def test_evaluation_goes_window_by_window(tmp_path):
    run = tiny(save(tmp_path / "a.npz", x=X, y=CLASSES), task={"window": (4, 5)})
    task, model = run.build_task(), run.model.build().eval()
    seen = []
    model.register_forward_hook(lambda _, inputs, __: seen.append(tuple(inputs[0].shape[2:])))
    windowed = evaluate(model, task).metrics
    assert set(seen) == {(4, 5)}
    whole = evaluate(model, configs.replace(run, {"task.window": ()}).build_task()).metrics
    assert windowed != whole
    large = evaluate(model, configs.replace(run, {"task.window": (9, 12)}).build_task()).metrics
    assert large == whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flip_axes": (2,)}, r"task.flip_axes is \(2,\), expected axes 0 to 1"),
        ({"window": (4,)}, r"task.window is \(4,\), expected 2 sizes, or \(\)"),
        ({"window": (4, 0)}, r"task.window\[1\] is 0"),
        ({"window_overlap": 1.0}, "task.window_overlap is 1.0"),
        ({"dice_weight": -1.0}, "task.dice_weight is -1.0"),
        ({"class_weights": (1.0, 2.0)}, r"\(1.0, 2.0\), expected one number .* of 3 classes"),
        ({"class_weights": (0.0, 0.0, 0.0)}, "0 for all classes"),
        ({"evaluation_batch_size": 0}, "task.evaluation_batch_size is 0"),
    ],
)
def test_settings_out_of_range_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        SegmentationConfig(**options).build(splits(tmp_path, CLASSES))


def test_tasks_and_models_of_other_targets_are_refused(tmp_path):
    data = splits(tmp_path, CLASSES)
    with pytest.raises(ValueError, match="is a class at each position, expected SegmentationConf"):
        RegressionConfig().build(data)
    with pytest.raises(ValueError, match="the target of each example is real values at each pos"):
        SegmentationConfig().build(splits(tmp_path, VALUES))
    with pytest.raises(ValueError, match="expected a DensePredictorConfig"):
        SegmentationConfig().check_model(ImageClassifierConfig())
    task = SegmentationConfig().build(data)
    batch = torch.zeros(2, 1, *SIDES), torch.zeros(2, *SIDES).long()
    with pytest.raises(ValueError, match=r"with 3 classes; expected model\.out_channels 3"):
        task.loss(Constant(torch.zeros(2, 1, *SIDES)), batch)


# Examples of different sizes


@pytest.mark.parametrize("kind", ["class_map", "value_map"])
def test_examples_of_different_sizes_are_read_without_their_padding(tmp_path, kind):
    sizes = np.stack([RNG.integers(3, 8, COUNT), RNG.integers(4, 11, COUNT)], 1)
    results, y = [], CLASSES if kind == "class_map" else VALUES
    for name, padding in (("a", 0), ("b", 7)):
        x, maps = X.copy(), y.copy()
        for row, (height, width) in enumerate(sizes):
            x[row, height:], x[row, :, width:] = padding, padding
            maps[row, height:], maps[row, :, width:] = padding, padding
        path = save(tmp_path / f"{name}.npz", x=x, y=maps, lengths=sizes)
        run = tiny(path, kind, {"flip_axes": (0, 1), "window": (4, 5)}, epochs=1)
        assert len(run.build_task().class_names) == (3 if kind == "class_map" else 2)
        results.append(train(run, tmp_path / name))
    assert_same(*results)
    task, checkpoint = run.build_task(), load(tmp_path / "b")
    metrics = evaluate(checkpoint.model, task).metrics
    batch = batch_of(task.test, 5)
    assert len(batch) == 3
    assert task.count_labels(batch) == batch[2].sum() * (1 if kind == "class_map" else 2)
    with torch.no_grad():
        together = task.predicted_maps(checkpoint.model, batch)
    for row, keep in enumerate(batch[2]):
        inside = np.s_[row : row + 1, ..., : keep.any(1).sum(), : keep.any(0).sum()]
        alone = task.predicted_maps(checkpoint.model, tuple(part[inside] for part in batch))
        torch.testing.assert_close(together[inside], alone)
    assert metrics == pytest.approx(results[1].metrics)


def test_signals_of_different_sizes_are_predicted_alone(tmp_path, capsys):
    x, lengths = RNG.normal(size=(COUNT, 20)).astype(np.float32), RNG.integers(6, 21, COUNT)
    x[np.arange(20) >= lengths[:, None]] = np.nan
    path = save(tmp_path / "a.npz", x=x, y=(x > 0).astype(int), lengths=lengths)
    run = tiny(path, data={"axes": 1}, task={"flip_axes": (0,)}, epochs=1)
    model = replace(run.model, image_size=(20,), patch_size=(3,), out_channels=2)
    train(replace(run, model=model), tmp_path / "run")
    out = tmp_path / "b.npz"
    assert onescan("predict", tmp_path / "run", path, "--out", out) == 0
    classes = np.load(out)["classes"]
    assert classes.shape == (COUNT, lengths.max())
    checkpoint = load(tmp_path / "run")
    for row, length in enumerate(lengths):
        signal = checkpoint.format.model_input(x[row : row + 1, None, :length])
        with torch.no_grad():
            alone = checkpoint.model(signal).argmax(1)[0]
        assert np.array_equal(classes[row, :length], alone)
        assert not classes[row, length:].any()
    capsys.readouterr()


def test_windows_of_different_sizes_keep_targets_in_place(tmp_path):
    sizes = np.stack([RNG.integers(2, 8, COUNT), RNG.integers(2, 11, COUNT)], 1)
    x = 1 + np.arange(COUNT * 70, dtype=np.float32).reshape(COUNT, *SIDES)
    path = save(tmp_path / "a.npz", x=x, y=x.astype(int) % 3, lengths=sizes)
    task = SegmentationConfig(flip_axes=(0, 1), window=(4, 99)).build(build(path))
    grids, maps, keep = task.augment(batch_of(task.train, 15), 3)
    assert torch.equal(keep, grids[:, 0] > 0)
    assert torch.equal(maps, torch.where(keep, grids[:, 0].long() % 3, IGNORED))
    heights = np.minimum(sizes[task.train.indices], [4, 99])
    assert keep.any(2).sum(1).tolist() == heights[:, 0].tolist()
    assert keep.any(1).sum(1).tolist() == heights[:, 1].tolist()
    assert keep[:, 0, 0].all()


# Runs


@pytest.mark.parametrize("kind", ["class_map", "value_map"])
def test_a_resumed_run_equals_a_whole_one(tmp_path, kind):
    path = save(tmp_path / "a.npz", x=X, y=CLASSES if kind == "class_map" else VALUES)
    run = tiny(path, kind, {"flip_axes": (1,), "window": (6, 8)}, batch_size=4)
    whole = train(run, tmp_path / "whole")
    interrupt(run, tmp_path / "parts", step=5)
    assert_same(train(run, tmp_path / "parts"), whole)
    checkpoint = load(tmp_path / "whole")
    assert checkpoint.target == run.build_task().target
    assert checkpoint.metrics == whole.metrics


@pytest.mark.parametrize("kind", ["class_map", "value_map"])
def test_accumulation_equals_one_batch(tmp_path, kind):
    y = with_unknown(CLASSES if kind == "class_map" else VALUES, np.s_[::3, 2:])
    data = {"ignore_index": 255} if kind == "class_map" else {}
    run = tiny(save(tmp_path / "a.npz", x=X, y=y), kind, data=data, epochs=1)
    parts = configs.replace(run, {"machine.gradient_accumulation_steps": 4})
    results = [train(run, tmp_path / "whole"), train(parts, tmp_path / "parts")]
    lines = [read_metrics(result.folder) for result in results]
    for name in ("loss", "gradient_norm"):
        whole, split = ([x[name] for x in each if x["split"] == "train"] for each in lines)
        assert split == pytest.approx(whole, rel=1e-4)


def test_what_unknown_positions_hold_changes_nothing(tmp_path):
    results = []
    for name, marker in (("a", 255), ("b", 77)):
        y = np.where(X > 1.5, marker, CLASSES)
        path = save(tmp_path / f"{name}.npz", x=X, y=y)
        run = tiny(path, data={"ignore_index": marker}, epochs=1)
        results.append(train(run, tmp_path / name))
    assert_same(*results)


# Commands


def adapted(name, path, **given):
    options = {"data.path": str(path), **given}
    run = adapt(find_recipe(name)(), options)
    return infer(configs.replace(run, {"data.axes": 2} if given else {}), options)


@pytest.mark.parametrize("name", ["segmenter", "image_classifier", "signal_classifier"])
def test_recipes_adapt_to_maps(tmp_path, name):
    run, lines = adapted(name, save(tmp_path / "a.npz", x=X, y=CLASSES))
    assert isinstance(run.task, SegmentationConfig)
    assert (run.model.image_size, run.model.out_channels) == (SIDES, 3)
    assert "images with one of 3 classes at each position (0, 1, 2), 7 x 10 pixels" in lines[0]
    run.build_task()
    given = {"data.axes": "2"} if name == "signal_classifier" else {}
    path = save(tmp_path / "a.npz", x=X, y=VALUES)
    run, lines = adapted(name, path, **given)
    assert isinstance(run.task, DenseRegressionConfig)
    assert run.model.out_channels == 2
    assert "images with 2 values at each position (value_0, value_1)" in lines[0]
    run, _ = adapted(name, save(tmp_path / "a.npz", x=X, y=np.arange(COUNT) % 2))
    if name != "segmenter":
        assert isinstance(run.task, ImageClassificationConfig)
        return
    with pytest.raises(ValueError, match="is a class, expected ImageClassificationConfig"):
        run.build_task()


def test_the_example_of_own_data_is_read_as_documented(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(python_block("own_maps.md", "balls.npz"), {})  # noqa: S102
    options = {"data.path": "balls.npz", "data.ignore_index": "255"}
    run = adapt(find_recipe("segmenter")(), options)
    run, lines = infer(configs.replace(run, {"data.ignore_index": 255}), options)
    assert "volumes" in lines[0] or "examples with one of 2 classes at each position" in lines[0]
    assert "16 x 18 x 20 values, 1 channel" in lines[0]
    assert "training positions without a class: 6.2%" in run.build_task().notes


@pytest.mark.slow
def test_classes_are_trained_and_predicted(tmp_path, capsys):
    x = RNG.normal(size=(12, 6, 7, 8)).astype(np.float32)
    path = save(tmp_path / "a.npz", x=x, y=(x > 0).astype(int))
    out = tmp_path / "out"
    small = ("--model.depth", 1, "--model.width", 48, "--training.epochs", 2, "--machine.trackers")
    names = ("--data.class-names", "low", "high", "--task.window", 4, 4, 4)
    assert onescan("train", "segmenter", "--data.path", path, "--out", out, *names, *small) == 0
    assert "test mean iou " in capsys.readouterr().out
    text = Page((out / "report.html").read_text()).text
    assert "was trained on 10 examples with one of 2 classes at each position" in text
    assert "Scores of each class" in text
    assert "Slices of a volume are arranged row by row" in text
    new = save(tmp_path / "new.npz", x=RNG.normal(size=(2, 5, 9, 4)).astype(np.float32))  # any size
    run = out / "seed-0"
    for name, size in (("b.npz", 4), ("b.npy", 1)):
        argv = ("predict", run, new, "--out", tmp_path / name, "--batch-size", size)
        assert onescan(*argv) == 0
    assert re.search(r"new\.npz\[1\]: (low|high) [\d.]+%", capsys.readouterr().out)
    classes = np.load(tmp_path / "b.npz")["classes"]
    assert (classes.shape, classes.dtype) == ((2, 5, 9, 4), np.uint8)
    assert np.array_equal(classes, np.load(tmp_path / "b.npy"))
    for given, message in (
        ((new, "--out", tmp_path / "b.csv"), "a name ending in .npz or .npy"),
        ((new, new, "--out", tmp_path / "b.npz"), "inputs has 2 files, expected one"),
        ((new, "--out", new), "which is the input"),
        (("a.png",), "the model reads arrays"),
        ((new, "a.png"), "images and arrays, expected only one kind"),
    ):
        assert onescan("predict", run, *given) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_classes_of_images_are_saved_as_pictures(tmp_path, capsys):
    pixels = RNG.integers(0, 256, (12, 12, 16), dtype=np.uint8)
    path = save(tmp_path / "a.npz", x=pixels, y=pixels > 127)
    out = tmp_path / "out"
    small = ("--model.depth", 1, "--model.width", 16, "--training.epochs", 30, "--machine.trackers")
    assert onescan("train", "segmenter", "--data.path", path, "--out", out, *small) == 0
    Image.fromarray(pixels[0]).resize((32, 24), Image.Resampling.NEAREST).save(tmp_path / "a.png")
    assert onescan("predict", out / "seed-0", tmp_path / "a.png", "--out", tmp_path / "maps") == 0
    with Image.open(tmp_path / "maps" / "a.png") as picture:
        assert (picture.mode, picture.size) == ("P", (32, 24))
        classes = np.asarray(picture)
    expected = np.kron(pixels[0] > 127, np.ones((2, 2)))
    assert (classes == expected).mean() > 0.8
    (tmp_path / "file").write_text("")
    assert onescan("predict", out / "seed-0", tmp_path / "a.png", "--out", tmp_path / "file") == 2
    assert "which is a file, expected a folder" in capsys.readouterr().err


@pytest.mark.slow
def test_values_are_trained_and_predicted(tmp_path, capsys):
    path = save(tmp_path / "a.npz", x=X, y=with_unknown(VALUES, np.s_[::2, 1]))
    out = tmp_path / "out"
    small = ("--model.depth", 1, "--model.width", 16, "--training.epochs", 2, "--machine.trackers")
    names = ("--data.class-names", "big", "small", "--task.loss", "l1")
    assert onescan("train", "segmenter", "--data.path", path, "--out", out, *names, *small) == 0
    assert "test small mae " in capsys.readouterr().out
    text = Page((out / "report.html").read_text()).text
    assert "with 2 values at each position" in text
    assert "Absolute error of standardized values" in text
    assert onescan("predict", out / "seed-0", path, "--out", tmp_path / "b.npz") == 0
    assert re.search(r"big [\d.]+ to [\d.]+, mean", capsys.readouterr().out)
    values = np.load(tmp_path / "b.npz")["values"]
    assert values.shape == (COUNT, *SIDES, 2)
    assert abs(values[..., 0].mean() - 1e6) < 100
    assert onescan("evaluate", out / "seed-0") == 0
    assert "big r2" in capsys.readouterr().out


def test_a_class_called_mean_does_not_replace_the_mean(tmp_path):
    path, scores = save(tmp_path / "a.npz", x=X, y=CLASSES), []
    for names in (("mean", "b", "c"), ("a", "b", "c")):
        run = tiny(path, data={"class_names": names})
        model = run.model.build().eval() if not scores else model
        scores.append(evaluate(model, run.build_task()).metrics["mean_iou"])
    assert scores[0] == scores[1]
