"""Labels and values as targets of arrays: inference, checks, losses, metrics, runs, predictions."""

import csv
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from html_page import Page
from sklearn.metrics import (
    average_precision_score,
    f1_score,
    mean_absolute_error,
    mean_squared_error,
    precision_score,
    r2_score,
    recall_score,
)
from tiny_run import assert_same, interrupt, tiny_run
from torch.nn.functional import binary_cross_entropy_with_logits, huber_loss, l1_loss, mse_loss

from onescan import configs
from onescan.cli import main
from onescan.experiments.data import AffineConfig, ArrayDatasetConfig, Example
from onescan.experiments.data.base import HeldOutError, random_split
from onescan.experiments.recipes import find_recipe
from onescan.experiments.recipes.infer import adapt, infer
from onescan.experiments.tasks import (
    ImageClassificationConfig,
    ImageGenerationConfig,
    MultilabelClassificationConfig,
    RegressionConfig,
)
from onescan.experiments.tasks.multilabel import label_scores
from onescan.experiments.tasks.regression import value_scores
from onescan.experiments.tasks.teacher import load_teacher
from onescan.experiments.training import read_metrics, train
from onescan.experiments.training.folder import check_same_data, read_manifest
from onescan.inference.loading import load
from onescan.inputs.targets import Target, value_target
from onescan.layers.mixers import SoftmaxMixerConfig
from onescan.models.image_classifier import ImageClassifierConfig

RNG = np.random.default_rng(0)
COUNT, SAMPLES = 40, 16
X = RNG.normal(size=(COUNT, SAMPLES)).astype(np.float32)
# a mean and a Unix time, which float32 would round to minutes
VALUES = np.stack([X.mean(1), 1_700_000_000 + 60 * X[:, 0].astype(np.float64)], 1)
LABELS = np.stack([X[:, 0] > 0, X[:, 1] > 1, X.mean(1) > 0], 1)
ONE_HOT = np.eye(3)[np.arange(COUNT) % 3]
MODEL = ImageClassifierConfig(
    image_size=(SAMPLES,),
    channels=1,
    patch_size=(4,),
    num_classes=2,
    width=8,
    depth=1,
    mixer=SoftmaxMixerConfig(num_heads=2),
    drop_path=0.0,
)


def save(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


def build(path, **options):
    return ArrayDatasetConfig(path=path, axes=1, **{"test_fraction": 0.25, **options}).build()


def splits(tmp_path, y, **options):
    return build(save(tmp_path / "a.npz", x=X[: len(y)], y=y), **options)


def batch_of(data, places=None):
    places = range(len(data)) if places is None else places
    return data.read([Example(place) for place in places]).batch


def tiny(path, kind="value", **training):
    task = RegressionConfig() if kind == "value" else MultilabelClassificationConfig()
    return replace(
        tiny_run(**training),
        data=ArrayDatasetConfig(path=path, axes=1, test_fraction=0.25),
        task=task,
        model=replace(MODEL, num_classes=2 if kind == "value" else 3),
    )


def onescan(*argv):
    return main([str(argument) for argument in argv])


# Inference from y


@pytest.mark.parametrize(
    ("y", "kind", "names", "note"),
    [
        (np.arange(COUNT) % 3, "class", ("0", "1", "2"), None),
        (LABELS[:, 0], "class", ("0", "1"), None),
        (LABELS, "multilabel", ("label_0", "label_1", "label_2"), "3 binary labels per example"),
        (LABELS.astype(np.uint8), "multilabel", ("label_0", "label_1", "label_2"), "3 binary"),
        (VALUES, "value", ("value_0", "value_1"), "2 real values .* --data.target class or multi"),
        (VALUES[:, 0], "value", ("value",), "1 real value per example$"),
        (VALUES[:, :1], "value", ("value",), "1 real value per example$"),
        (VALUES[:, 0].astype(np.float16), "value", ("value",), "1 real value per example$"),
        (LABELS.astype(float), "value", ("value_0", "value_1", "value_2"), "target multilabel"),
        (ONE_HOT, "value", ("value_0", "value_1", "value_2"), r"a single 1; .* y\.argmax\(1\)$"),
        (ONE_HOT > 0, "multilabel", ("label_0", "label_1", "label_2"), r"save y\.argmax\(1\)$"),
        (np.arange(COUNT) % 3.0, "value", ("value",), r"whole numbers; .* y\.astype\(int\)"),
    ],
)
def test_the_target_is_inferred_from_y(tmp_path, y, kind, names, note):
    data = splits(tmp_path, y)
    assert (data.target.kind, data.class_names) == (kind, names)
    notes = [line for line in data.notes if line.startswith("y is read as")]
    assert len(notes) == (note is not None)
    assert note is None or re.search(note, notes[0])
    config = ArrayDatasetConfig(path=str(tmp_path / "a.npz"))
    assert config.infer_target() == kind
    labels = batch_of(data.train)[1]
    rows = y[data.train.indices.numpy()]
    assert np.array_equal(labels.numpy(), rows if kind == "class" else rows.reshape(30, -1))


def test_a_given_target_is_used_without_a_note(tmp_path):
    y = np.arange(COUNT) % 2
    for target, changed in (("value", y), ("multilabel", y[:, None]), ("value", LABELS)):
        data = splits(tmp_path, changed, target=target)
        assert data.target.kind == target
        assert not any(line.startswith("y is read as") for line in data.notes)
    floats = splits(tmp_path, LABELS.astype(float), target="multilabel", class_names=tuple("abc"))
    assert floats.class_names == ("a", "b", "c")


WITH_NAN = np.where(np.arange(COUNT)[:, None] == 7, [[0, np.nan]], VALUES)


@pytest.mark.parametrize(
    ("y", "options", "message"),
    [
        (VALUES[:9], {}, r"y has shape \(9, 2\), expected \(40, 2\)"),
        (
            VALUES[..., None],
            {},
            r"y has shape \(40, 2, 1\), expected a target for each example",
        ),
        (
            VALUES[..., None],
            {"target": "value"},
            r"\(40, 2, 1\), expected \(40,\) or \(40, values\)",
        ),
        (WITH_NAN, {}, r"path is '.*a\.npz', where y\[7, 1\] is nan, expected a finite"),
        (np.full(COUNT, -np.inf), {}, r"where y\[0\] is -inf"),
        (LABELS * 2, {}, r"shape \(40, 3\), and y\[\d+, \d\] is 2; expected one class per example"),
        (LABELS * 2, {"target": "multilabel"}, r"y\[\d+, \d\] is 2, expected 0 or 1"),
        (LABELS[:, 0], {"target": "multilabel"}, r"shape \(40,\), expected \(40, labels\)"),
        (VALUES, {"target": "class"}, "y holds float64, expected integers or strings"),
        (LABELS, {"target": "class"}, r"y has shape \(40, 3\), expected \(40,\)"),
        (X.astype(str)[:, 0], {"target": "value"}, "y holds <U32, expected numbers"),
        (VALUES, {"class_names": ("a",)}, r"has 1 name \(a\), but y has 2 values"),
        (VALUES, {"class_names": ("a", "a")}, "data.class_names contains 'a' more than once"),
        (VALUES, {"class_names": ("a", "path")}, "contains 'path', but files of predictions"),
        (np.full(COUNT, 1.7e308), {}, r"y holds values up to 1\.7e\+308, whose sum"),
        (VALUES, {"test_fraction": 0.0}, r"data\.test_fraction is 0\.0, expected between 0 and 1"),
    ],
)
def test_unusable_targets_are_refused(tmp_path, y, options, message):
    path = save(tmp_path / "a.npz", x=X, y=y)
    with pytest.raises(ValueError, match=message):
        build(path, **options)


def test_training_and_test_targets_have_equal_columns(tmp_path):
    arrays = {"x_train": X, "y_train": VALUES, "x_test": X, "y_test": VALUES[:, :1]}
    path = save(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=r"y_test has shape \(40, 1\), but y_train has \(40, 2\)"):
        build(path)
    path = save(tmp_path / "b.npz", **{**arrays, "y_test": np.arange(80).reshape(40, 2)})
    assert batch_of(build(path).test, [1])[1].tolist() == [[2.0, 3.0]]


def test_targets_that_are_missing_or_constant_are_noted(tmp_path):
    y = np.stack([VALUES[:, 0], np.full(COUNT, 5.0)], 1)
    notes = splits(tmp_path, y, class_names=("a", "b")).notes
    assert "values that are the same in all training examples: b" in notes
    y = np.stack([LABELS[:, 0], np.zeros(COUNT, bool)], 1)
    assert "labels without test examples: label_1" in splits(tmp_path, y).notes


def test_a_random_part_is_held_out():
    train_rows, test_rows = random_split(10, fraction=0.25, seed=0)
    assert len(test_rows) == 3
    assert sorted([*train_rows.tolist(), *test_rows.tolist()]) == list(range(10))
    assert test_rows.tolist() == random_split(10, fraction=0.25, seed=0)[1].tolist()
    assert test_rows.tolist() != random_split(10, fraction=0.25, seed=1)[1].tolist()
    with pytest.raises(HeldOutError, match="holds out all 2 examples") as error:
        random_split(2, fraction=0.9, seed=0)
    assert len(random_split(2, fraction=error.value.fraction, seed=0)[1]) == 1
    with pytest.raises(ValueError, match=r"expected at least 2 examples, .* got 1"):
        random_split(1, fraction=0.5, seed=0)


# Standardization


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_standardization_is_reversible(scale):
    values = torch.from_numpy(VALUES) * scale
    target = value_target(values)
    standard = (values - values.mean(0)) / values.std(0, correction=0) if scale == 1 else None
    made = target.standardize(values)
    assert made.dtype == torch.float32
    torch.testing.assert_close(made.mean(0), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(made.std(0, correction=0), torch.ones(2), atol=1e-5, rtol=0)
    if standard is not None:
        torch.testing.assert_close(made, standard.float())
    back = target.predictions(made)
    assert back.dtype == torch.float64
    error = (back - values).abs() / torch.tensor(target.std, dtype=torch.float64)
    assert error.max() < 1e-6  # of a standard deviation: seconds of the Unix time survive


def test_statistics_are_those_of_training_examples_and_saved_exactly(tmp_path):
    data = splits(tmp_path, VALUES)
    rows = VALUES[data.train.indices.numpy()]
    assert data.target.mean == pytest.approx(tuple(rows.mean(0)), rel=1e-15)
    assert data.target.std == pytest.approx(tuple(rows.std(0)), rel=1e-9)
    saved = json.loads(json.dumps(configs.to_dict(data.target)))
    assert configs.from_dict(Target, saved) == data.target


def test_a_constant_value_is_only_centered():
    target = value_target(torch.full((7, 1), 0.1, dtype=torch.float64))
    assert (target.mean, target.std) == ((0.1,), (1.0,))


# Losses and metrics


@pytest.mark.parametrize(
    ("name", "loss"), [("l2", mse_loss), ("l1", l1_loss), ("huber", huber_loss)]
)
def test_losses_of_values(tmp_path, name, loss):
    data = splits(tmp_path, VALUES)
    task, model = RegressionConfig(loss=name).build(data), MODEL.build()
    batch = batch_of(data.train)
    expected = loss(model(data.format.model_input(batch[0])), data.target.standardize(batch[1]))
    assert task.loss(model, batch)[0].item() == pytest.approx(expected.item())
    rows = task.predict(model, batch)
    assert rows["losses"].mean().item() == pytest.approx(expected.item(), rel=1e-5)
    assert task.count_labels(batch) == 60


@pytest.mark.parametrize("weight", ["none", "balanced"])
def test_losses_of_labels(tmp_path, weight):
    data = splits(tmp_path, LABELS)
    task = MultilabelClassificationConfig(positive_weight=weight).build(data)
    model, batch = replace(MODEL, num_classes=3).build(), batch_of(data.train)
    have = batch[1].sum(0)
    ratio = ((30 - have) / have).float() if weight == "balanced" else None
    scores = model(data.format.model_input(batch[0]))
    expected = binary_cross_entropy_with_logits(scores, batch[1].float(), pos_weight=ratio)
    assert task.loss(model, batch)[0].item() == pytest.approx(expected.item())
    assert task.count_labels(batch) == 90


def test_metrics_of_values_equal_scikit_learn():
    rng = np.random.default_rng(1)
    true = VALUES + 0
    predicted = true + rng.normal(size=true.shape) * [0.1, 30]
    scores = value_scores(torch.from_numpy(true), torch.from_numpy(predicted))
    for i, score in enumerate(scores):
        pair = true[:, i], predicted[:, i]
        assert score.mae == pytest.approx(mean_absolute_error(*pair))
        assert score.rmse == pytest.approx(mean_squared_error(*pair) ** 0.5)
        assert score.r2 == pytest.approx(r2_score(*pair))


def test_metrics_of_labels_equal_scikit_learn():
    probability = np.random.default_rng(1).uniform(size=LABELS.shape) * 0.6 + 0.4 * LABELS
    by_label, total = label_scores(torch.from_numpy(LABELS), torch.from_numpy(probability))
    predicted = probability > 0.5
    for i, score in enumerate(by_label):
        pair = LABELS[:, i], predicted[:, i]
        assert score.support == LABELS[:, i].sum()
        assert score.f1 == pytest.approx(f1_score(*pair))
        assert score.precision == pytest.approx(precision_score(*pair))
        assert score.recall == pytest.approx(recall_score(*pair))
        expected = average_precision_score(LABELS[:, i], probability[:, i])
        assert score.average_precision == pytest.approx(expected)
    assert total.f1 == pytest.approx(f1_score(LABELS, predicted, average="micro"))


def test_scores_of_evaluations(tmp_path):
    data = splits(tmp_path, VALUES, class_names=("a", "b"))
    task = RegressionConfig().build(data)
    true, losses = data.test.labels[:8], torch.zeros(8)
    rows = {"labels": true, "predictions": true + 1, "losses": losses}
    metrics = task.evaluate(rows).metrics
    assert list(metrics)[:5] == ["r2", "rmse", "mae", "a_r2", "a_rmse"]
    assert metrics["r2"] == pytest.approx((metrics["a_r2"] + metrics["b_r2"]) / 2)
    assert task.score(metrics) == metrics["r2"]
    assert metrics["rmse"] == metrics["b_mae"] == pytest.approx(1)
    constant = task.evaluate({**rows, "labels": true[:1].expand(8, 2)}).metrics
    assert not any("r2" in name for name in constant)
    assert task.score(constant) == -constant["rmse"]
    data = splits(tmp_path, LABELS)
    task = MultilabelClassificationConfig().build(data)
    true = data.test.labels[:8]
    metrics = task.evaluate({"labels": true, "predictions": true, "losses": losses}).metrics
    assert metrics == {"mean_average_precision": 1, "macro_f1": 1, "micro_f1": 1, "loss": 0}
    missing = torch.tensor([[1.0, 0.0, 1.0]] * 8)  # the second label is ignored in the mAP only
    rows = {"labels": missing, "predictions": missing.double(), "losses": losses}
    metrics = task.evaluate(rows).metrics
    assert task.score(metrics) == metrics["mean_average_precision"] == 1
    assert metrics["macro_f1"] == pytest.approx(2 / 3)


def test_tasks_refuse_targets_of_another_kind(tmp_path):
    values, labels = (splits(tmp_path, y) for y in (VALUES, LABELS))
    for config, data, message in (
        (ImageClassificationConfig(augment=None), values, "is real values, expected Regression"),
        (RegressionConfig(), labels, "is several labels, expected MultilabelClassificationConfig"),
        (MultilabelClassificationConfig(), values, "expected RegressionConfig; data.target sets"),
        (RegressionConfig(evaluation_batch_size=0), values, "task.evaluation_batch_size"),
    ):
        with pytest.raises(ValueError, match=message):
            config.build(data)
    task, model = RegressionConfig().build(values), replace(MODEL, num_classes=5).build()
    with pytest.raises(ValueError, match=r"of 2 values; expected model\.num_classes 2"):
        task.loss(model, batch_of(values.train))
    images = RNG.integers(0, 255, (COUNT, 4, 4, 3), dtype=np.uint8)
    path = save(tmp_path / "b.npz", x=images, y=VALUES)
    with pytest.raises(ValueError, match=r"data\.target is value, expected class, which a den"):
        ImageGenerationConfig().build(ArrayDatasetConfig(path=path).build())


# Runs


@pytest.mark.parametrize("kind", ["value", "multilabel"])
def test_a_resumed_run_equals_a_whole_one(tmp_path, kind):
    path = save(tmp_path / "a.npz", x=X, y=VALUES if kind == "value" else LABELS)
    run = tiny(path, kind)
    whole = train(run, tmp_path / "whole")
    interrupt(run, tmp_path / "parts", step=5)
    assert_same(train(run, tmp_path / "parts"), whole)
    checkpoint = load(tmp_path / "whole")
    assert checkpoint.target == run.build_task().target
    assert checkpoint.metrics == whole.metrics


@pytest.mark.parametrize("kind", ["value", "multilabel"])
def test_accumulation_equals_one_batch(tmp_path, kind):
    path = save(tmp_path / "a.npz", x=X, y=VALUES if kind == "value" else LABELS)
    run = tiny(path, kind, epochs=1)
    parts = configs.replace(run, {"machine.gradient_accumulation_steps": 4})
    results = [train(run, tmp_path / "whole"), train(parts, tmp_path / "parts")]
    lines = [read_metrics(result.folder) for result in results]
    for name in ("loss", "gradient_norm"):
        whole, split = ([x[name] for x in each if x["split"] == "train"] for each in lines)
        assert split == pytest.approx(whole, rel=1e-4)
    assert results[1].metrics == pytest.approx(results[0].metrics, rel=1e-3)


def test_changed_targets_are_found(tmp_path):
    path = save(tmp_path / "a.npz", x=X, y=VALUES)
    run = tiny(path, epochs=1)
    train(run, tmp_path / "run")
    manifest = read_manifest(tmp_path / "run")
    check_same_data(manifest, run.build_task(), tmp_path / "run", resume=True)
    save(tmp_path / "a.npz", x=X, y=VALUES + 1)
    with pytest.raises(ValueError, match=r"the data has changed .* target was Target"):
        check_same_data(manifest, run.build_task(), tmp_path / "run")
    with pytest.raises(ValueError, match="it predicts targets of kind value, expected classes"):
        load_teacher(str(tmp_path / "run"))


def test_runs_without_a_target_predict_classes(tmp_path):
    train(tiny_run(epochs=1), tmp_path / "run")
    file = tmp_path / "run" / "config.json"
    assert load(tmp_path / "run").target == Target()
    assert json.loads(file.read_text())["target"]["kind"] == "class"


# Commands


def adapted(name, path, **given):
    options = {"data.path": str(path), **given}
    run = adapt(find_recipe(name)(), options)
    changes = {key: value for key, value in options.items() if key != "data.path"}
    return infer(configs.replace(run, changes), options)


@pytest.mark.parametrize("name", ["image_classifier", "signal_classifier", "regressor"])
def test_recipes_adapt_to_the_target(tmp_path, name):
    path = save(tmp_path / "a.npz", x=X, y=VALUES)
    run, lines = adapted(name, path)
    assert isinstance(run.task, RegressionConfig)
    assert (run.task.augment, run.model.num_classes) == (None, 2)
    assert lines[0].startswith(
        "data: 34 training and 6 test signals with 2 values each (value_0, value_1), 16 values"
    )
    run.build_task()
    if name == "regressor":
        save(tmp_path / "a.npz", x=X, y=np.arange(COUNT))
        assert isinstance(adapted(name, path)[0].build_task().config, RegressionConfig)
        return
    save(tmp_path / "a.npz", x=X, y=LABELS)
    run, lines = adapted(name, path)
    assert isinstance(run.task, MultilabelClassificationConfig)
    assert " with 3 labels each (label_0, label_1, label_2)" in lines[0]
    run, _ = adapted(name, path, **{"data.target": "value"})
    assert isinstance(run.task, RegressionConfig)
    save(tmp_path / "a.npz", x=X, y=np.arange(COUNT) % 2)
    assert isinstance(adapted(name, path)[0].task, ImageClassificationConfig)


def test_images_keep_their_augmentation_for_labels_only(tmp_path):
    images = RNG.integers(0, 255, (COUNT, 8, 8), dtype=np.uint8)
    path = save(tmp_path / "a.npz", x=images, y=LABELS)
    run, _ = adapted("image_classifier", path)
    assert isinstance(run.task.augment, AffineConfig)
    task = run.build_task()
    batch = batch_of(task.train, range(4))
    changed = task.augment(batch, 0)
    assert torch.equal(changed[1], batch[1])
    assert not torch.equal(changed[0], batch[0].float() / 255)
    save(tmp_path / "a.npz", x=images, y=VALUES)
    run, lines = adapted("image_classifier", path)
    assert run.task.augment is None
    assert lines[-1] == "augmentation: none, because moving an image could change its values"


@pytest.mark.slow
def test_values_are_trained_and_predicted(tmp_path, capsys):
    path = save(tmp_path / "a.npz", x=X, y=VALUES)
    out = tmp_path / "out"
    small = ("--model.depth", 1, "--model.width", 16, "--training.epochs", 2, "--machine.trackers")
    names = ("--data.class-names", "mean", "time", "--task.loss", "l1")
    assert onescan("train", "regressor", "--data.path", path, "--out", out, *names, *small) == 0
    shown = capsys.readouterr()
    assert "test r2 " in shown.out
    assert "test time mae " in shown.out
    text = Page((out / "report.html").read_text()).text
    assert "This signal regression model was trained on 34 signals with 2 values each" in text
    assert "Absolute error of standardized values" in text
    assert "Errors of each value" in text
    new = save(tmp_path / "new.npz", x=X[:3])
    for name in ("a.csv", "a.json"):
        assert onescan("predict", out / "seed-0", new, "--out", tmp_path / name) == 0
    assert re.search(r"new\.npz\[0\]: mean -?[\d.]+, time 1\d{9}", capsys.readouterr().out)
    with (tmp_path / "a.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == ["path", "mean", "time"]
    trained = load(out / "seed-0")
    with torch.no_grad():
        scores = trained.model(trained.format.model_input(X[:3, None]))
    values = trained.target.predictions(scores)
    got = torch.tensor([[float(row[name]) for name in trained.class_names] for row in rows])
    torch.testing.assert_close(got.double(), values, rtol=1e-6, atol=1e-5)
    assert json.loads((tmp_path / "a.json").read_text())[0]["time"] == float(rows[0]["time"])
    convert = ("convert", out / "seed-0", "--out", tmp_path / "other")
    assert onescan(*convert, "--to", "transformers") == 2
    assert "predicts targets of kind value" in capsys.readouterr().err


@pytest.mark.slow
def test_labels_are_trained_and_predicted(tmp_path, capsys):
    path = save(tmp_path / "a.npz", x=X, y=LABELS)
    out = tmp_path / "out"
    small = ("--model.depth", 1, "--model.width", 16, "--training.epochs", 2, "--machine.trackers")
    command = ("train", "signal_classifier", "--data.path", path, "--out", out)
    assert onescan(*command, "--task.positive-weight", "balanced", *small) == 0
    shown = capsys.readouterr()
    assert (
        "y is read as 3 binary labels per example; if this is wrong, pass" in shown.err + shown.out
    )
    assert "test mean average precision " in shown.out
    text = Page((out / "report.html").read_text()).text
    assert "This signal classifier was trained on 34 signals with 3 labels each" in text
    assert "Binary cross-entropy" in text
    assert "Scores of each label" in text
    new = save(tmp_path / "new.npz", x=X[:6])
    file = tmp_path / "a.csv"
    assert onescan("predict", out / "seed-0", new, "--out", file) == 0
    with file.open() as stream:
        rows = list(csv.DictReader(stream))
    names = ["label_0", "label_1", "label_2"]
    assert list(rows[0]) == ["path", "labels", *names]
    for row in rows:
        chosen = [name for name in names if float(row[name]) > 0.5]
        assert row["labels"] == ";".join(chosen)
