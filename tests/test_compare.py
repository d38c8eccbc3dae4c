"""Runs side by side: the right numbers in the right rows, and refusals of what does not compare."""

import dataclasses
import json
import re
import shutil
import statistics
from dataclasses import dataclass

import numpy as np
import pytest
from drawn_charts import limits_drawn
from html_page import Page, assert_loads_nothing, table
from tiny_run import STEPS, TinyModelConfig, tiny_run

from onescan.checkpoint.files import to_json
from onescan.data import ImageDatasetConfig, RandomCropConfig
from onescan.report import comparison_table, write_comparison
from onescan.report.comparison import curves
from onescan.report.comparison.groups import read_groups
from onescan.report.comparison.page import render_comparison
from onescan.report.comparison.settings import caution, differing, spell
from onescan.report.comparison.table import measures
from onescan.tasks import ImageClassificationConfig
from onescan.training import read_metrics, train
from onescan.training.folder import read_result

WIDE = "a <b> & wide"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of one recipe below a folder, and one run of another, as a user names them."""
    root = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        train(tiny_run(seed=seed, learning_rate=0.005), root / "tiny" / f"seed-{seed}")
    wide = dataclasses.replace(
        tiny_run(learning_rate=0.005), name=WIDE, model=TinyModelConfig(width=8)
    )
    train(wide, root / "wide")
    return [root / "tiny", root / "wide"]


def copied(folder, to, change):
    """A copy of a run, with its config.json changed."""
    shutil.copytree(folder, to)
    data = json.loads((to / "config.json").read_text())
    change(data)
    (to / "config.json").write_text(json.dumps(data))
    return to


def cells(line):
    return re.split(r"\s{2,}", line.strip())


# The table


def test_the_table_holds_mean_and_spread_over_seeds(runs):
    head, tiny, wide = comparison_table(runs).splitlines()
    assert cells(head)[:3] == ["seeds", "test accuracy", "test loss"]
    results = [read_result(runs[0] / f"seed-{seed}") for seed in (0, 1)]
    for place, (name, spelt) in enumerate([("accuracy", "{:.2%}"), ("loss", "{:.3f}")], start=2):
        values = [result.metrics[name] for result in results]
        mean, spread = statistics.mean(values), statistics.stdev(values)
        assert cells(tiny)[place] == f"{spelt.format(mean)} \u00b1 {spelt.format(spread)}"
        alone = spelt.format(read_result(runs[1]).metrics[name])
        assert cells(wide)[place] == alone
    assert [cells(tiny)[0], cells(tiny)[1]] == ["tiny", "2"]
    assert [cells(wide)[0], cells(wide)[1]] == [WIDE, "1"]


def test_the_table_holds_what_it_took(runs, tmp_path):
    folder = shutil.copytree(runs[1], tmp_path / "run")
    measured = {"seconds": 0.5, "waiting_seconds": 0.05, "memory_mib": 3072.0}
    lines = [line | (measured if line["split"] == "train" else {}) for line in read_metrics(folder)]
    (folder / "metrics.jsonl").write_text("".join(map(to_json, lines)))
    head, row = comparison_table([folder]).splitlines()
    shown = dict(zip(cells(head), cells(row)[1:], strict=True))
    assert shown["examples/s"] == "16"  # batches of 8 in half a second
    assert shown["training"] == "6.0 s"  # 12 of them
    lines[0]["seconds"] = 60.0  # to warm up
    (folder / "metrics.jsonl").write_text("".join(map(to_json, lines)))
    head, row = comparison_table([folder]).splitlines()
    assert dict(zip(cells(head), cells(row)[1:], strict=True))["examples/s"] == "16"
    assert shown["waiting"] == "10.0%"
    assert shown["memory"] == "3 GiB"
    parameters = sum(p.numel() for p in TinyModelConfig(width=8).build().parameters())
    assert shown["parameters"] == str(parameters)


def test_columns_of_text_line_up(runs):
    lines = comparison_table(runs).splitlines()
    assert len({len(line) for line in lines}) == 1
    ends = [[match.end() for match in re.finditer(r"\S(?=\s{2,}|$)", line)] for line in lines[1:]]
    assert ends[0][1:] == ends[1][1:]


# Groups


def test_seeds_on_different_machines_are_one_group(runs, tmp_path):
    moved = copied(
        runs[0] / "seed-1", tmp_path / "moved", lambda c: c["run"]["machine"].update(workers=3)
    )
    (group,) = read_groups([moved, runs[0] / "seed-0"])
    assert [run.seed for run in group.runs] == [0, 1]


def test_a_seed_on_two_machines_is_two_rows(runs, tmp_path):
    def cut(config):
        config["run"]["machine"]["gradient_accumulation_steps"] = 4

    def spread_out(config):
        config["environments"][0]["processes"] = 2

    one = runs[0] / "seed-0"
    parts = copied(one, tmp_path / "parts", cut)
    two = copied(one, tmp_path / "two", spread_out)
    groups = read_groups([runs[0], parts, two])
    assert [group.name for group in groups] == [
        "tiny (machine.gradient_accumulation_steps 1, processes 1)",
        "tiny (machine.gradient_accumulation_steps 4, processes 1)",
        "tiny (machine.gradient_accumulation_steps 1, processes 2)",
    ]
    assert [[run.seed for run in group.runs] for group in groups] == [[0, 1], [0], [0]]
    settings = Page(render_comparison(groups)).cells[-1]
    assert settings[1:] == [
        ["machine.gradient_accumulation_steps", "1", "4", "1"],
        ["processes", "1", "1", "2"],
    ]
    with pytest.raises(ValueError, match="seed 0, with equal settings on equal machines"):
        read_groups([runs[0], parts, copied(parts, tmp_path / "again", lambda _: None)])


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("evaluations", [1, 3])
def test_an_accuracy_that_stays_the_same_is_drawn(runs, tmp_path, monkeypatch, share, evaluations):
    limits = limits_drawn(monkeypatch)
    folder = shutil.copytree(runs[1], tmp_path / "run")
    lines = read_metrics(folder)
    tests = [line | {"accuracy": share} for line in lines if line["split"] == "test"]
    lines = [line for line in lines if line["split"] == "train"] + tests[-evaluations:]
    (folder / "metrics.jsonl").write_text("".join(map(to_json, lines)))
    render_comparison(read_groups([folder]))
    low, high = limits["test accuracy"]
    assert 0 <= low <= share <= high <= 1
    assert low < high


def test_different_data_is_said(runs, tmp_path):
    said = "These runs learnt from different data (data.examples), so their accuracies do not"
    other = copied(runs[1], tmp_path / "other", lambda c: c["run"]["data"].update(examples=36))
    assert comparison_table([runs[0], other]).splitlines()[-1].startswith(said)
    assert said in Page(render_comparison(read_groups([runs[0], other]))).text
    assert "different data" not in comparison_table(runs)
    assert "different data" not in render_comparison(read_groups(runs))


def test_how_data_is_read_makes_no_different_data():
    data = ImageDatasetConfig(path="pets")
    streamed = dataclasses.replace(data, streaming=True, on_error="skip", train_crop=None)
    cropped = dataclasses.replace(data, train_crop=RandomCropConfig(scale=(0.5, 1.0)))
    recipes = [dataclasses.replace(tiny_run(), data=each) for each in (data, streamed, cropped)]
    assert caution(recipes) == ""
    held_out = dataclasses.replace(data, split_seed=1)
    assert "(data.split_seed)" in caution(
        [*recipes, dataclasses.replace(recipes[0], data=held_out)]
    )


def test_recipes_of_one_name_are_told_apart(runs, tmp_path):
    wide = copied(runs[1], tmp_path / "wide", lambda config: config["run"].update(name="tiny"))
    names = [group.name for group in read_groups([runs[0], wide])]
    assert names == ["tiny (model.width 6)", "tiny (model.width 8)"]
    assert [group.name for group in read_groups(runs)] == ["tiny", WIDE]


def test_settings_that_differ_are_listed_for_every_recipe():
    tiny = tiny_run()
    plain = dataclasses.replace(tiny, name="x", task=ImageClassificationConfig(augment=None))
    slow = dataclasses.replace(
        tiny, training=dataclasses.replace(tiny.training, learning_rate=0.01, seed=7)
    )
    recipes = [tiny, plain, slow]
    paths = differing(recipes)
    assert set(paths) == {"task.augment", "task.label_smoothing", "training.learning_rate"}
    assert [spell(recipe, "task.augment") for recipe in recipes] == ["Affine", "none", "Affine"]
    assert [spell(r, "training.learning_rate") for r in recipes] == ["0.03", "0.03", "0.01"]
    assert spell(tiny, "model.type") == "TinyModel"
    assert spell(tiny, "model.mixer.num_heads") == "\u2014"


# The page


def test_the_page_holds_the_table_and_the_settings(runs, tmp_path):
    path = write_comparison(runs, tmp_path / "new" / "compare.html")
    html = path.read_text(encoding="utf-8")
    assert_loads_nothing(html)
    page = Page(html)
    head, tiny, wide = table(page, "")
    plain = [cells(line) for line in comparison_table(runs).splitlines()]
    assert head[1:] == plain[0]
    assert [tiny[0], tiny[1]] == ["Atiny", "2 (0, 1)"]
    assert [wide[0], wide[1]] == [f"B{WIDE}", "1 (0)"]
    assert [tiny[2:], wide[2:]] == [plain[1][2:], plain[2][2:]]
    settings = next(t for t in page.cells if ["model.width", "6", "8"] in t)
    assert settings == [["", "Atiny", f"B{WIDE}"], ["model.width", "6", "8"]]
    assert "<b> & wide" not in html
    for folder in (runs[0] / "seed-0", runs[0] / "seed-1", runs[1]):
        assert str(folder) in page.text


def test_the_best_of_a_column_is_bold(runs, tmp_path):
    def worse(folder, to):
        copied(folder, to, lambda config: config["run"].update(name="worse"))
        result = json.loads((to / "result.json").read_text())
        result["metrics"] = {"accuracy": 0.01, "loss": 99.0}
        del result["checksum"]
        (to / "result.json").write_text(to_json(result))
        return to

    html = render_comparison(read_groups([runs[1], worse(runs[1], tmp_path / "worse")]))
    best, rest = (row.split("</tr>")[0] for row in html.split('class="badge"')[1:3])
    assert len(re.findall(r'<td class="best">', best)) == 2
    assert 'class="best"' not in rest  # all else is equal
    assert 'class="best"' not in render_comparison(read_groups(runs[1:]))


@pytest.mark.parametrize("steps", [12, 24])
def test_the_shortest_training_is_best_only_of_equally_many_updates(runs, tmp_path, steps):
    slow = copied(runs[1], tmp_path / "slow", lambda config: config["run"].update(name="slow"))
    result = json.loads((slow / "result.json").read_text())
    del result["checksum"]
    (slow / "result.json").write_text(to_json(result | {"steps": steps}))
    lines = [line | {"seconds": 60} if "seconds" in line else line for line in read_metrics(slow)]
    (slow / "metrics.jsonl").write_text("".join(map(to_json, lines)))
    groups = read_groups([runs[1], slow])
    (training,) = [measure for measure in measures(groups) if measure.head == "training"]
    assert f'class="best"><b>{training.spell(groups[1])}<' not in render_comparison(groups)
    best = f'class="best"><b>{training.spell(groups[0])}<' in render_comparison(groups)
    assert best == (steps == STEPS)


def test_curves_are_the_mean_and_the_range_over_seeds(runs, monkeypatch):
    drawn = {}
    monkeypatch.setattr(
        curves, "line_chart", lambda lines, *, x, y, finish: drawn.update({(x, y): lines}) or ""
    )
    groups = read_groups(runs)
    curves.over_epochs(groups)
    curves.over_time(groups)
    assert set(drawn) == {
        (x, y)
        for x in ("epoch", "seconds")
        for y in ("test accuracy", "test loss", "training loss")
    }
    seeds = [read_metrics(runs[0] / f"seed-{seed}") for seed in (0, 1)]
    tests = [[line for line in records if line["split"] == "test"] for records in seeds]
    values = np.array([[line["accuracy"] for line in lines] for lines in tests])
    tiny, wide = drawn["epoch", "test accuracy"]
    np.testing.assert_allclose(tiny.y, values.mean(axis=0))
    np.testing.assert_allclose(tiny.band, [values.min(axis=0), values.max(axis=0)])
    np.testing.assert_allclose(tiny.x, [line["epoch"] for line in tests[0]])
    assert wide.band is None
    spent = [
        [
            sum(r["seconds"] for r in records if r["split"] == "train" and r["step"] <= t["step"])
            for t in lines
        ]
        for records, lines in zip(seeds, tests, strict=True)
    ]
    np.testing.assert_allclose(
        drawn["seconds", "test accuracy"][0].x, np.mean(spent, axis=0), rtol=1e-6
    )


# Refusals


def assert_refused(paths, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        comparison_table(paths)
    with pytest.raises(ValueError, match=message):
        write_comparison(paths, tmp_path / "compare.html")
    assert not (tmp_path / "compare.html").exists()


def test_what_is_no_finished_run_is_refused(runs, tmp_path):
    assert_refused([], "runs is empty", tmp_path)
    assert_refused([tmp_path], "neither config.json nor folders seed-", tmp_path)
    assert_refused([*runs, runs[0] / "seed-1"], "hold the same run, seed 1", tmp_path)
    stopped = shutil.copytree(runs[0] / "seed-1", tmp_path / "tiny" / "seed-1")
    (stopped / "result.json").unlink()
    message = "seed-1 holds a run that is not finished: train it to its end first"
    assert_refused([runs[1], tmp_path / "tiny"], message, tmp_path)


@dataclass(frozen=True, kw_only=True)
class OtherTaskConfig(ImageClassificationConfig):
    """Another task, which has no report."""


def test_runs_of_different_tasks_are_refused(runs, tmp_path):
    def another_task(config):
        config["run"]["task"]["type"] = "OtherTaskConfig"

    def other_classes(config):
        config["class_names"][0] = "dogs"

    other = copied(runs[1], tmp_path / "task", another_task)
    message = "different tasks, ImageClassificationConfig and OtherTaskConfig"
    assert_refused([runs[0], other], message, tmp_path)
    other = copied(runs[1], tmp_path / "classes", other_classes)
    assert_refused([runs[0], other], "they tell other classes apart", tmp_path)


def test_only_a_page_of_ours_is_replaced(runs, tmp_path):
    path = tmp_path / "compare.html"
    path.write_text("notes")
    with pytest.raises(ValueError, match=r"compare\.html was not written by onescan"):
        write_comparison(runs, path)
    assert path.read_text() == "notes"
    path.unlink()
    write_comparison(runs, path)
    assert write_comparison(runs[1:], path) == path


def test_recipes_that_differ_in_their_name_alone_have_a_page(runs, tmp_path):
    twin = copied(runs[1], tmp_path / "twin", lambda config: config["run"].update(name="twin"))
    page = Page(render_comparison(read_groups([runs[1], twin])))
    assert "What is different. Nothing: no setting but the name." in page.text
