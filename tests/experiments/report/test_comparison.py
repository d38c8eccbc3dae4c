"""Comparison of runs: numbers in the table, marks, curves, and errors."""

import dataclasses
import json
import math
import re
import shutil
import statistics

import numpy as np
import pytest
from html_page import Page, assert_loads_nothing, table
from tiny_run import STEPS, TinyModelConfig, tiny_run

from onescan.checkpoint.files import to_json
from onescan.configs import to_dict
from onescan.experiments.data import ImageDatasetConfig, MixConfig, RandomCropConfig
from onescan.experiments.report import (
    comparison,
    comparison_table,
    write_comparison,
    write_report,
)
from onescan.experiments.report.comparison import (
    Axis,
    data_warning,
    differing_settings,
    format_setting,
    read_rows,
    table_columns,
)
from onescan.experiments.tasks import ImageClassificationConfig
from onescan.experiments.training import read_metrics, train
from onescan.experiments.training.folder import read_result

WIDE = "a <b> & wide"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherTaskConfig(ImageClassificationConfig):
    """Another task, which has no report."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with two seeds of one recipe, and a run of another recipe."""
    root = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        train(tiny_run(seed=seed, learning_rate=0.005), root / "tiny" / f"seed-{seed}")
    model = TinyModelConfig(width=8)
    train(dataclasses.replace(tiny_run(learning_rate=0.005), name=WIDE, model=model), root / "wide")
    return [root / "tiny", root / "wide"]


def copied(folder, to, **run):
    """A copy of a run with other values at the top of its config."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    for path, value in run.items():
        *parents, name = path.split("__")
        place = config["run"]
        for parent in parents:
            place = place[parent]
        place[name] = value
    (to / "config.json").write_text(json.dumps(config))
    return to


def with_records(folder, change):
    lines = [change(line) for line in read_metrics(folder)]
    (folder / "metrics.jsonl").write_text("".join(to_json(line) for line in lines if line))
    return folder


def cells(line):
    return re.split(r"\s{2,}", line.strip())


def page_of(runs, folder):
    html = write_comparison(runs, folder / "page" / "compare.html").read_text(encoding="utf-8")
    assert_loads_nothing(html)
    return html


def test_table_has_mean_and_std_over_seeds(runs):
    lines = comparison_table(runs).splitlines()
    head, tiny, wide = map(cells, lines)
    folders = ["folder", str(runs[0]), str(runs[1])]
    assert [line[-1] for line in (head, tiny, wide)] == folders
    assert len({line.index(f) for line, f in zip(lines, folders, strict=True)}) == 1
    assert head[:3] == ["seeds", "test accuracy", "test loss"]
    assert (tiny[:2], wide[:2]) == (["tiny", "2"], [WIDE, "1"])
    results = [read_result(runs[0] / f"seed-{seed}").metrics for seed in (0, 1)]
    for i, (name, text) in enumerate([("accuracy", "{:.2%}"), ("loss", "{:.3f}")], start=2):
        values = [metrics[name] for metrics in results]
        mean, std = statistics.mean(values), statistics.stdev(values)
        assert tiny[i] == f"{text.format(mean)} \u00b1 {text.format(std)}"
        assert wide[i] == text.format(read_result(runs[1]).metrics[name])


@pytest.mark.parametrize("position", [0, 1])
def test_metrics_of_only_some_runs_are_shown_for_those(runs, tmp_path, position):
    settings = {"training__ema_decay": 0.5, "training__reported_weights": "raw"}
    raw = with_records(
        copied(runs[1], tmp_path / "raw", **settings),
        lambda line: line | ({"ema_loss": 0.25} if line["split"] == "test" else {}),
    )
    result = json.loads((raw / "result.json").read_text())
    metrics = result["metrics"] | {"ema_loss": 0.25}
    (raw / "result.json").write_text(to_json({"steps": STEPS, "metrics": metrics}))
    folders = [runs[1]]
    folders.insert(position, raw)
    head, *lines = comparison_table(folders).splitlines()
    assert cells(head)[1:4] == ["test accuracy", "test loss", "test EMA loss"]
    end = head.index("test EMA loss") + len("test EMA loss")
    shown = [line[end - len("test EMA loss") : end].strip() for line in lines]
    assert shown[position] == "0.250"
    assert shown[1 - position] == ""
    html = page_of(folders, tmp_path)
    assert html.count(f">{'AB'[position]} 0.250<") == 2  # over epochs and over time


def test_table_has_costs(runs, tmp_path):
    costs = {"seconds": 0.5, "waiting_seconds": 0.05, "memory_mib": 3072.0}
    slow_start = {1: {"seconds": 60.0}}

    def change(line):
        return line | (costs | slow_start.get(line["step"], {}) if line["split"] == "train" else {})

    folder = with_records(shutil.copytree(runs[1], tmp_path / "run"), change)
    head, row = map(cells, comparison_table([folder]).splitlines())
    shown = dict(zip(head, row[1:], strict=True))
    assert shown["examples/s"] == "16"  # batches of 8 in half a second
    assert shown["training"] == "1 min 6 s"
    assert shown["waiting"] == "0.9%"
    assert shown["memory"] == "3 GiB"
    parameters = sum(p.numel() for p in TinyModelConfig(width=8).build().parameters())
    assert shown["parameters"] == str(parameters)


def test_same_seed_on_two_machines_is_two_rows(runs, tmp_path):
    seed_0, seed_1 = runs[0] / "seed-0", runs[0] / "seed-1"
    (row,) = read_rows([copied(seed_1, tmp_path / "moved", machine__workers=3), seed_0])
    assert [run.seed for run in row.runs] == [0, 1]
    parts = copied(seed_0, tmp_path / "parts", machine__gradient_accumulation_steps=4)
    rows = read_rows([runs[0], parts])
    assert [row.name for row in rows] == [
        "tiny (gradient_accumulation_steps 1)",
        "tiny (gradient_accumulation_steps 4)",
    ]
    assert [[run.seed for run in row.runs] for row in rows] == [[0, 1], [0]]
    assert Page(page_of([runs[0], parts], tmp_path)).cells[-1][1:] == [
        ["machine.gradient_accumulation_steps", "1", "4"]
    ]


def test_settings_tell_recipes_apart(runs, tmp_path):
    wide = copied(runs[1], tmp_path / "wide", name="tiny")
    assert [row.name for row in read_rows([runs[0], wide])] == [
        "tiny (width 6)",
        "tiny (width 8)",
    ]
    tiny = tiny_run()
    plain = dataclasses.replace(tiny, task=ImageClassificationConfig(augment=None))
    slow = dataclasses.replace(tiny_run(learning_rate=0.01, seed=7), name="slow")
    configs = [tiny, plain, slow]
    paths = ["task.augment", "task.label_smoothing", "training.learning_rate"]
    assert sorted(differing_settings(configs)) == paths
    augment = [format_setting(each, "task.augment") for each in configs]
    assert augment == ["Affine", "none", "Affine"]
    assert format_setting(tiny, "model.type") == "TinyModel"
    assert format_setting(tiny, "model.mixer.num_heads") == "\u2014"
    assert format_setting(tiny, "model.width.type") == str(tiny.model.width)  # a config in others


def test_chosen_settings_come_before_inferred_ones(runs, tmp_path):
    data = ImageDatasetConfig(path="pets", mean=(0.5,), std=(0.25,), channels=1)
    other = dataclasses.replace(data, mean=(0.4,), std=(0.2,), image_size=(8, 8))
    a = dataclasses.replace(tiny_run(), data=data)
    b = dataclasses.replace(tiny_run(epochs=5), data=other, model=TinyModelConfig(width=8))
    first, second, *inferred = differing_settings([a, b])
    assert (first, second) == ("training.epochs", "model.width")
    assert inferred == ["data.image_size", "data.mean", "data.std"]
    gray = copied(runs[1], tmp_path / "gray", task__augment__fill=0.5)
    longer = copied(runs[1], tmp_path / "longer", task__augment__fill=0.25, training__epochs=5)
    names = [row.name for row in read_rows([runs[1], gray])]
    assert names == [f"{WIDE} (fill 0.0)", f"{WIDE} (fill 0.5)"]  # nothing else differs
    names = [row.name for row in read_rows([runs[1], longer])]
    assert names == [f"{WIDE} (epochs 3)", f"{WIDE} (epochs 5)"]


def test_warns_of_different_data(runs, tmp_path):
    other = copied(runs[1], tmp_path / "other", data__examples=36)
    assert "different data (data.examples)" in comparison_table([runs[0], other]).splitlines()[-1]
    assert "different data (data.examples)" in Page(page_of([runs[0], other], tmp_path)).text
    assert "different data" not in comparison_table(runs)
    data = ImageDatasetConfig(path="pets")
    read_otherwise = dataclasses.replace(
        data, streaming=True, on_error="skip", train_crop=RandomCropConfig(scale=(0.5, 1.0))
    )
    split_otherwise = dataclasses.replace(data, split_seed=1)
    configs = [
        dataclasses.replace(tiny_run(), data=each)
        for each in (data, read_otherwise, split_otherwise)
    ]
    assert data_warning(configs[:2]) == ""
    assert "(data.split_seed)" in data_warning(configs)


def test_page_has_table_and_settings(runs, tmp_path):
    html = page_of(runs, tmp_path)
    page = Page(html)
    head, tiny, wide = table(page, "")
    plain = [cells(line) for line in comparison_table(runs).splitlines()]
    assert head[1:] == plain[0][:-1]
    assert tiny == ["Atiny", "2 (0, 1)", *plain[1][2:-1]]
    assert wide == [f"B{WIDE}", "1 (0)", *plain[2][2:-1]]
    assert page.cells[-1] == [["", "Atiny", f"B{WIDE}"], ["model.width", "6", "8"]]
    assert "<b> & wide" not in html
    assert html.count("<svg") == 8  # 4 charts over epochs, 4 over time
    for folder in (runs[0] / "seed-0", runs[0] / "seed-1", runs[1]):
        assert str(folder) in page.text


def test_paths_may_be_strings(runs, tmp_path):
    page, folders = str(tmp_path / "compare.html"), [str(run) for run in runs]
    assert write_comparison(folders, page) == tmp_path / "compare.html"
    assert comparison_table(folders) == comparison_table(runs)
    assert write_report([str(runs[0] / "seed-1")], str(tmp_path / "report.html")).exists()


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("head", "values", "leader"),
    [
        ("memory", ([632.0], [638.0]), None),  # 1% less
        ("memory", ([600.0], [638.0]), 0),
        ("memory", ([600.0, 700.0], [720.0, 730.0]), 0),
        ("memory", ([600.0, 700.0], [680.0, 730.0]), None),  # less than the standard deviation
        ("memory", ([math.nan], [638.0]), None),
        ("waiting", ([0.0], [0.01]), None),  # 1% of the training time
        ("waiting", ([0.0], [0.1]), 0),
        ("examples/s", ([10.0], [20.0]), 1),
        ("parameters", ([10.0], [20.0]), None),
        ("test accuracy", ([0.90, 0.92], [0.93, 0.94]), 1),
        ("test accuracy", ([0.90, 0.92], [0.91, 0.93]), None),
        ("test accuracy", ([0.990], [0.991]), 1),  # a tenth fewer errors
        ("test accuracy", ([0.100], [0.110]), None),  # a hundredth
        ("test loss", ([1.0], [1.0]), None),
    ],
)
def test_best_is_marked_if_its_lead_matters(runs, head, values, leader):
    (column,) = (each for each in table_columns(read_rows(runs)) if each.head == head)
    assert column.leader(values) == leader


@pytest.mark.slow
def test_training_time_is_marked_only_for_equal_steps(runs, tmp_path):
    for name, seconds in (("fast", 1.0), ("slow", 60.0)):
        costs = {"seconds": seconds, "waiting_seconds": 0.0, "memory_mib": 1.0}
        with_records(
            copied(runs[1], tmp_path / name, name=name),
            lambda line, costs=costs: line | (costs if line["split"] == "train" else {}),
        )
    slow, fast = tmp_path / "slow", tmp_path / "fast"
    assert page_of([slow, fast], tmp_path).count('class="best"') == 2  # examples/s and training
    result = json.loads((slow / "result.json").read_text()) | {"steps": 2 * STEPS}
    del result["checksum"]
    (slow / "result.json").write_text(to_json(result))
    html = page_of([slow, fast], tmp_path)
    assert html.count('class="best"') == 1
    assert "Differing settings. None, except for the name." in Page(html).text


def test_curves_are_means_and_ranges_over_seeds(runs):
    tiny, wide = read_rows(runs)
    axis = Axis("step", lambda run: np.array([line["step"] for line in run.records], float))
    values = np.stack([run.column("test", "accuracy") for run in tiny.runs])
    line = comparison.metric_curve(tiny, axis, "accuracy")
    np.testing.assert_allclose(line.x, [4, 8, 12])
    np.testing.assert_allclose(line.y, values.mean(axis=0))
    np.testing.assert_allclose(line.band, [values.min(axis=0), values.max(axis=0)])
    assert line.name == f"A {values[:, -1].mean():.2%}"
    assert comparison.training_curve(wide, axis).band is None
    assert len(comparison.training_curve(wide, axis).y) == STEPS
    values = np.stack([run.column("train", "accuracy") for run in tiny.runs])
    line = comparison.training_curve(tiny, axis, "accuracy")
    np.testing.assert_allclose(line.y.mean(), values.mean(), atol=0.05)
    assert line.name.endswith("%")


@pytest.mark.slow
def test_training_accuracy_is_drawn_unless_labels_are_mixed(runs, tmp_path):
    mixed = copied(runs[1], tmp_path / "mixed", task__mix=to_dict(MixConfig()))
    for folders, count in ((runs, 2), ([*runs, mixed], 0)):  # over epochs and over time
        text = Page(page_of(folders, tmp_path)).text
        assert text.count("Running mean over batches, of augmented") == count


@pytest.mark.sampled
@pytest.mark.parametrize("evaluations", [1, 3])
@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_single_evaluations_and_extreme_accuracies_are_drawn(runs, tmp_path, accuracy, evaluations):
    def change(line):
        if line["split"] == "test":
            return line | {"accuracy": accuracy} if line["step"] > STEPS - 4 * evaluations else None
        return line | {"accuracy": 0.5}

    folder = with_records(shutil.copytree(runs[1], tmp_path / "run"), change)
    name = "A 100%" if accuracy else "A 0.00%"
    assert page_of([folder], tmp_path).count(f">{name}<") == 2  # over epochs and over time


def test_rejects_runs_that_do_not_compare(runs, tmp_path):
    task = copied(runs[1], tmp_path / "task", task__type="OtherTaskConfig")
    for paths, message in (
        ([], "runs is empty"),
        ([tmp_path], "neither config.json nor folders seed-"),
        ([*runs, runs[0] / "seed-1"], "hold the same run, seed 1"),
        ([runs[0], task], "different tasks: tiny and a <b> & wide"),
    ):
        with pytest.raises(ValueError, match=message):
            comparison_table(paths)
        with pytest.raises(ValueError, match=message):
            write_comparison(paths, tmp_path / "compare.html")
    assert not (tmp_path / "compare.html").exists()


def test_rejects_unfinished_runs_other_classes_and_foreign_files(runs, tmp_path):
    stopped = shutil.copytree(runs[0] / "seed-1", tmp_path / "tiny" / "seed-1")
    (stopped / "result.json").unlink()
    with pytest.raises(ValueError, match=r"seed-1 holds a run that is not finished"):
        comparison_table([runs[1], tmp_path / "tiny"])
    other = copied(runs[1], tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"class_names": ["a", "b", "c"]}))
    with pytest.raises(ValueError, match="their classes differ"):
        comparison_table([runs[0], other])
    page = tmp_path / "compare.html"
    page.write_text("notes")
    with pytest.raises(ValueError, match=r"compare\.html was not written by onescan"):
        write_comparison(runs, page)
    assert page.read_text() == "notes"
