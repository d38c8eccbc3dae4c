"""The page of a run: right numbers, safe with any names, and self-contained in one file."""

import dataclasses
import io
import json
import math
import re
import shutil
import statistics
from importlib import import_module
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from html_page import Page, assert_loads_nothing, charts, table
from PIL import Image
from report_runs import HOSTILE, LDN, LIGHTNET, LION, PatternsConfig, model, run_config
from sklearn.metrics import confusion_matrix

from onescan import cli, configs
from onescan.experiments.data import AffineConfig, Example, ImageTensors, LoadedBatch, MixConfig
from onescan.experiments.recipes import RECIPES, find_recipe
from onescan.experiments.report import (
    check_report_path,
    decays,
    images,
    mixers,
    plots,
    write_report,
)
from onescan.experiments.report.format import large, percent
from onescan.experiments.report.page import COLORS
from onescan.experiments.report.run import (
    SECTIONS,
    page_of,
    page_title,
    repeat_command,
    speed,
    training,
)
from onescan.experiments.report.runs import read_run_group
from onescan.experiments.tasks import Evaluation, ImageClassificationConfig
from onescan.experiments.training import train
from onescan.experiments.training.folder import read_result
from onescan.layers.mixers import SoftmaxMixerConfig
from onescan.layers.position import AbsolutePositionConfig

KINDS = {
    "lightnet": LIGHTNET,
    "deit": model(mixer=SoftmaxMixerConfig(num_heads=2), position=AbsolutePositionConfig()),
    "lion": LION,
    "ldn": LDN,
}
SHOWN = {  # besides those that every image classifier has
    "lightnet": {mixers.KEYS, mixers.TOEPLITZ, mixers.LRPE},
    "deit": set(),
    "lion": {mixers.TOEPLITZ, decays.DECAYS},
    "ldn": {"Diffusion"},
}
MANY = {
    "model": model(num_classes=120),
    "class_names": tuple(f"class {i}" for i in range(120)),
    "test_examples": 400,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of finished runs; each is trained once."""
    trained = {}

    def folders(model=LIGHTNET, seeds=(0,), **data):
        runs = [run_config(model, seed, **data) for seed in seeds]
        for run in runs:
            if run not in trained:
                folder = tmp_path_factory.mktemp("run")
                train(run, folder)
                trained[run] = folder
        return [trained[run] for run in runs]

    return folders


@pytest.fixture(scope="module")
def html_of(folders, tmp_path_factory):
    """The page of finished runs; each is rendered once."""
    rendered = {}

    def html_of(model=LIGHTNET, seeds=(0,), **data):
        key = (model, seeds, *data.items())
        if key not in rendered:
            path = tmp_path_factory.mktemp("page") / "new" / "report.html"
            write_report(folders(model, seeds, **data), path)
            assert [p.name for p in path.parent.iterdir()] == ["report.html"]
            rendered[key] = path.read_text(encoding="utf-8")
        return rendered[key]

    return html_of


def render_page(group):
    return page_of(group).html()


def answered(folder, predictions, confidence=0.75):
    """The run's result with other predictions."""
    result = read_result(folder)
    arrays = result.evaluation.arrays
    confidence = torch.as_tensor(confidence).expand(len(predictions))
    arrays |= {"predictions": predictions, "confidence": confidence}
    accuracy = (predictions == arrays["labels"]).float().mean().item()
    evaluation = Evaluation(metrics={"accuracy": accuracy, "loss": 1.0}, arrays=arrays)
    return dataclasses.replace(result, evaluation=evaluation)


def recorded(folder, split="train", **numbers):
    """The group of a run, with other numbers recorded at every step."""
    group = read_run_group([folder])
    run = group.runs[0]
    lines = [line | (numbers if line["split"] == split else {}) for line in run.records]
    return dataclasses.replace(group, runs=(dataclasses.replace(run, records=lines),))


def with_config(group, config):
    runs = tuple(
        dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, run=seeded))
        for run in group.runs
        for seeded in [configs.replace(config, {"training.seed": run.seed})]
    )
    return dataclasses.replace(group, runs=runs)


# The file


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_model_has_a_self_contained_page(html_of, kind):
    html = html_of(KINDS[kind])
    assert_loads_nothing(html)
    page = Page(html)
    shown = set(re.findall(r"<h2>(.*?)</h2>", html))
    always = {"Training", "Speed and memory", "Confusions", "Test images"}
    assert shown == always | SHOWN[kind]
    assert html.count("Not shown: ") == 5 - len(SHOWN[kind])
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    references = [a.get("href") or a.get("xlink:href") or "" for _, a in page.tags]
    assert {name[1:] for name in references if name.startswith("#")} <= set(ids)
    assert all(a.get("alt") for tag, a in page.tags if tag == "img")
    assert all(charts(page))
    tags = [tag for tag, _ in page.tags]
    assert tags.count("figure") == tags.count("figcaption") > 5


def test_light_and_dark_mode(html_of):
    html = html_of()
    light, dark = html.split("prefers-color-scheme: dark", 1)
    for name, (in_light, in_dark) in COLORS.items():
        assert f"--{name}: {in_light};" in light
        assert f"--{name}: {in_dark};" in dark
        assert html.count(in_light) == 1 + (in_light == in_dark)  # charts use the variables


def test_hostile_names_are_escaped(html_of):
    html = html_of()
    assert "alert(1)</script>" not in html
    assert "\x01" not in html
    page = Page(html)
    assert "a <b>recipe</b> & more" in page.text
    shown = [name.replace("\x01", "\N{REPLACEMENT CHARACTER}") for name in HOSTILE]
    assert table(page, "true \\ predicted")[0][1:] == shown
    assert "<script>alert(1)</script"[:23] + "\N{HORIZONTAL ELLIPSIS}" in page.texts  # in charts
    assert "$x^2$" in page.texts


def test_only_pages_of_onescan_are_replaced(folders, html_of, tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("<!doctype html><title>notes</title>")
    with pytest.raises(ValueError, match=re.escape(str(path))):
        write_report(folders(), path)
    assert "notes" in path.read_text()
    for folder in (tmp_path, path / "report.html"):
        with pytest.raises(ValueError, match=re.escape(str(folder))):
            check_report_path(folder)
    path.write_text(old := html_of())
    check_report_path(path)
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda path, mode: False)
        with pytest.raises(ValueError, match="nothing can be written"):
            check_report_path(path)
    others = folders(KINDS["deit"])

    def fail(self, content):
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="No space left"):
        write_report(others, path)
    assert path.read_text() == old


@pytest.mark.slow
def test_pages_are_reproducible_and_independent_of_the_users_style(folders, html_of):
    with matplotlib.rc_context({"axes.facecolor": "black", "xtick.labelsize": 30}):
        settings = dict(matplotlib.rcParams)
        assert render_page(read_run_group(folders())) == html_of()
        assert dict(matplotlib.rcParams) == settings


# The numbers


@pytest.mark.sampled
@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
def test_results_of_all_seeds(folders, html_of, seeds):
    group = read_run_group(folders(seeds=seeds))
    accuracies = group.metric("accuracy")
    page = Page(html_of(seeds=seeds))
    rows = [(row[0], row[1]) for row in table(page, "seed")[1:]]
    assert rows == [(str(s), f"{a:.2%}") for s, a in zip(seeds, accuracies, strict=True)]
    assert f"<strong>{statistics.mean(accuracies):.2%}" in html_of(seeds=seeds)
    assert ("\u00b1" in page.text) == (len(seeds) > 1)
    if len(seeds) > 1:
        assert f"\u00b1 {statistics.stdev(accuracies):.2%}" in page.text
    throughput = statistics.mean(run.throughput for run in group.runs)
    assert f"{large(throughput)} images per second at the median step" in page.text
    assert f"{sum(p.numel() for p in LIGHTNET.build().parameters()):,} in total" in page.text
    predictions = group.array("predictions")
    labels = group.array("labels")
    wanted = confusion_matrix(labels.flatten(), predictions.flatten(), labels=range(len(HOSTILE)))
    matrix = table(page, "true \\ predicted")
    assert [[int(cell) for cell in row[1:]] for row in matrix[1:]] == wanted.tolist()


@pytest.mark.slow
def test_the_best_evaluation_is_named_beside_the_last(folders):
    (folder,) = folders()
    group = read_run_group([folder])
    run = group.runs[0]
    evaluations = [line for line in run.records if line["split"] == "test"]
    changed = [
        {**evaluations[0], "epoch": epoch, "accuracy": accuracy}
        for epoch, accuracy in ((0.5, 0.25), (1.0, 0.875), (1.5, 0.875), (2.0, math.nan))
    ]
    records = [line for line in run.records if line["split"] != "test"] + changed
    runs = (dataclasses.replace(run, records=records),)
    page = Page(render_page(dataclasses.replace(group, runs=runs)))
    assert table(page, "seed")[0][3] == "best accuracy"
    assert table(page, "seed")[1][3] == "87.50%, epoch 1"
    assert "after the last step; best: 87.50%, epoch 1" in page.text
    assert "best.safetensors those of the best evaluation" in page.text


def test_sections_about_layers_are_folded(html_of):
    html = html_of()
    folded = re.findall(r"<details><summary><h2>(.*?)</h2>", html)
    assert folded == [mixers.KEYS, mixers.TOEPLITZ, mixers.LRPE]
    assert html.count("</details>") == len(folded)
    # A link opens a folded section only if its target is inside.
    assert re.search(r'</summary>\s*<div id="key-importance">', html)


@pytest.mark.slow
def test_mistakes_come_first_with_their_probability(folders):
    (folder,) = folders()
    labels = PatternsConfig().build().test.labels
    said = labels.clone()
    said[[3, 7]] = (labels[[3, 7]] + 1) % len(HOSTILE)
    confidence = torch.full((40,), 0.9)
    confidence[3], confidence[7] = 0.62, 0.81
    page = Page(render_page(read_run_group([answered(folder, said, confidence)])))
    alts = [a["alt"] for tag, a in page.tags if tag == "img"]
    shown = [int(re.match(r"Test image (\d+) of class", alt)[1]) for alt in alts]
    assert shown[:2] == [7, 3]
    assert len(shown) == 2 + 38 // 2
    assert page.text.index("81%") < page.text.index("62%")
    for png, row in zip(page.pictures("png"), shown, strict=True):
        pixels = np.asarray(Image.open(io.BytesIO(png)))[..., 0]
        image = PatternsConfig().build().test.images[row, 0]
        np.testing.assert_array_equal(pixels, (image * 255).round().byte().numpy())


@pytest.mark.slow
@pytest.mark.parametrize(("shift", "mistakes"), [(0, 0), (1, 40)])
def test_perfect_and_useless_models_have_pages(folders, shift, mistakes):
    labels = PatternsConfig().build().test.labels
    result = answered(folders()[0], (labels + shift) % len(HOSTILE))
    html = render_page(read_run_group([result]))
    assert f"<strong>{percent(1.0 - shift, 2)}" in html
    assert ("<h3>Correct predictions</h3>" in html) == (not mistakes)
    assert (f"<h3>{mistakes} mistakes</h3>" in html) == bool(mistakes)


@pytest.mark.slow
def test_many_classes(folders, html_of):
    group = read_run_group(folders(**MANY))
    page, names = Page(html_of(**MANY)), MANY["class_names"]
    labels, predictions = group.array("labels")[0], group.array("predictions")[0]
    counts = confusion_matrix(labels, predictions, labels=range(120))
    listed = table(page, "true")[1:]
    assert [int(row[2]) for row in listed] == sorted((int(row[2]) for row in listed), reverse=True)
    for true, said, count, share in listed:
        row = counts[names.index(true)]
        assert int(count) == row[names.index(said)] > 0
        assert share == percent(int(count) / row.sum())
        assert true != said
    assert int(listed[0][2]) == (counts - np.diag(counts.diagonal())).max()
    accuracies = images.accuracy_by_class(group)[0]
    known = counts.sum(axis=1) > 0
    np.testing.assert_array_equal(np.isnan(accuracies), ~known)
    np.testing.assert_allclose(accuracies[known], counts.diagonal()[known] / counts[known].sum(1))
    order = np.argsort(np.where(known, accuracies, 2), kind="stable")
    hardest = ", ".join(f"class {i} {percent(accuracies[i])}" for i in order[:15])
    assert f"Dot chart of accuracy: {hardest}" in charts(page)
    assert table(page, "seed")[1][2] == f"{group.metric('top5_accuracy')[0]:.2%}"
    assert "Test top-5 accuracy" in page.texts


def test_speed_waiting_and_memory(folders):
    (folder,) = folders()
    group = recorded(folder, seconds=0.5, waiting_seconds=0.125, memory_mib=2048.0)
    figures = speed(group).figures
    ends = [charts(Page(figure.body))[0].rpartition(": ")[2] for figure in figures]
    assert ends == ["32", "25%", "2 GiB"]  # 16 images in 0.5 s
    assert "25.0% of the time, 0.8 s of 3.0 s" in figures[1].caption
    unknown = recorded(folder, memory_mib=math.nan)
    assert len(speed(unknown).figures) == 2


@pytest.mark.slow
def test_captions_match_the_charts(folders):
    """A running mean is only mentioned where it is drawn, and a log axis only where it is one."""
    (folder,) = folders()
    short = training(read_run_group([folder])).figures[0]
    assert "running mean" not in short.caption
    assert "opacity: 0.3" not in short.body
    group = recorded(folder)
    run = group.runs[0]
    lines = [line for line in run.records if line["split"] == "train"] * 20
    losses = np.geomspace(1, 0.01, len(lines))
    records = [line | {"loss": loss} for line, loss in zip(lines, losses, strict=True)]
    records += [line for line in run.records if line["split"] == "test"]
    group = dataclasses.replace(group, runs=(dataclasses.replace(run, records=records),))
    long = training(group).figures[0]
    assert "running mean" in long.caption
    assert "opacity: 0.3" in long.body
    assert "(log scale)" in long.body
    assert "(log scale)" not in short.body
    smoothing = ImageClassificationConfig(augment=None, label_smoothing=0.1)
    smoothed = with_config(group, dataclasses.replace(group.config, task=smoothing))
    assert "smoothed by 0.1" in training(smoothed).figures[0].caption


def test_training_accuracy_is_that_of_the_batches_unless_labels_are_mixed(folders):
    group = read_run_group(folders())
    figures = {figure.title: figure for figure in training(group).figures}
    assert [*figures][:4] == ["Training loss", "Test accuracy", "Training accuracy", "Test loss"]
    accuracies = group.runs[0].column("train", "accuracy")
    figure = figures["Training accuracy"]
    assert f"seed 0: {percent(accuracies[-1])}" in Page(figure.body).text
    assert "augmented" not in figure.caption
    task = group.config.task
    augmented = dataclasses.replace(task, augment=AffineConfig())
    figures = training(with_config(group, dataclasses.replace(group.config, task=augmented)))
    assert "used in training only" in figures.figures[2].caption
    mixed = dataclasses.replace(task, mix=MixConfig())
    mixed = with_config(group, dataclasses.replace(group.config, task=mixed))
    assert "Training accuracy" not in {figure.title for figure in training(mixed).figures}


@pytest.mark.parametrize("share", [0.0, 0.5, 0.93, 0.9999, 1.0])
def test_accuracy_axes_contain_the_values_and_name_their_scale(share):
    line = plots.Line("end", plots.BLUE, np.array([1.0, 2.0]), np.array([share, share]))
    svg = plots.line_chart([line], x="epoch", y="accuracy", scale="share")
    assert ("(log scale of the error)" in svg) == (share > 0.9)
    (height,) = re.findall(
        r'<path d="M [\d.]+ ([\d.]+) \n?L [\d.]+ \1[^"]*"[^>]*var\(--blue\)', svg
    )
    top, bottom = 0.0, 202.5  # of the view box
    assert top <= float(height) <= bottom


def test_whole_epochs_have_whole_ticks():
    whole = plots.Line("", plots.BLUE, np.arange(1.0, 5.0), np.arange(4.0))
    svg = plots.line_chart([whole], x="epoch", y="loss", limits=(10, 20))
    assert re.findall(r">([\d.]+)</text>", svg)[:5] == ["0", "1", "2", "3", "4"]


def test_labels_stand_where_lines_end():
    long = plots.Line("long", plots.BLUE, np.arange(5.0), np.arange(5.0))
    short = plots.Line("short", plots.VERMILION, np.arange(3.0), np.arange(3.0))
    svg = plots.line_chart([long, short], x="epoch", y="loss")
    x = {
        name: float(re.search(rf'x="([\d.]+)"[^>]*>{name}<', svg)[1]) for name in ("long", "short")
    }
    assert 0.3 < x["short"] / x["long"] < 0.7


def test_curves_of_long_runs_are_thinned_and_smoothed():
    indices = plots.thinned(12_345)
    assert len(indices) <= plots.MAX_POINTS
    assert indices[-1] == 12_344
    y = np.random.default_rng(0).normal(size=400)
    wanted = [np.median(y[:6]), np.median(y[195:206]), np.median(y[394:])]
    np.testing.assert_allclose(plots.smoothed(y, np.array([0, 200, 399]), np.median), wanted)


def test_a_heat_map_of_zeros_is_visible():
    axis = plots.Axis("depth", ["0%", "100%"])
    table = plots.heat_map(np.zeros((2, 2)), rows=axis, columns=axis, format="{:.0f}".format)
    assert table.count(">0</td>") == 4
    assert 'class="legend"' in table


# Runs and machines


def edited(folder, to, **parts):
    """A copy of a run's folder, with parts of its config.json changed."""
    shutil.copytree(folder, to)
    data = json.loads((to / "config.json").read_text())
    for name, change in parts.items():
        data[name] = change(data[name])
    (to / "config.json").write_text(json.dumps(data))
    return to


@pytest.mark.slow
def test_every_machine_of_a_run_is_named(folders, tmp_path):
    def moved(environments):
        later = {"since_step": 1234, "device": "H<1>00", "processes": 8, "commit": "feed"}
        return [*environments, environments[0] | later]

    folder = edited(folders()[0], tmp_path / "run", environments=moved)
    page = Page(render_page(read_run_group([folder])))
    assert "From step 1,234 8 \u00d7 H<1>00, " in page.text
    assert ", commit feed" in page.text
    assert "first process" in page.text


def test_machines_may_differ_between_seeds(folders, tmp_path):
    def elsewhere(run):
        return run | {"machine": run["machine"] | {"workers": 3, "gradient_accumulation_steps": 2}}

    first, second = folders(seeds=(0, 1))
    second = edited(second, tmp_path / "run", run=elsewhere)
    assert len(read_run_group([first, second]).runs) == 2
    with pytest.raises(ValueError, match="seed 0"):
        read_run_group([first, edited(first, tmp_path / "again", run=elsewhere)])


@pytest.mark.parametrize(
    ("path", "title"),
    [("here/my photos", "cifar10_lightnet on my photos"), (None, "cifar10_lightnet")],
)
def test_own_data_are_in_the_title(folders, path, title):
    recipe = find_recipe("cifar10_lightnet")()
    config = configs.replace(recipe, {"data.path": path}) if path else recipe
    assert page_title(with_config(read_run_group(folders()), config)) == title


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"training.epochs": 3, "model.mixer.lrpe": False, "training.steps": 7},
        {"model.patch_size": (4, 4), "training.max_grad_norm": None, "model.pool": "mean"},
    ],
)
@pytest.mark.parametrize(
    "recipe", ["digits", "digits/without_norm", "digits/without_norm/without_lrpe"]
)
def test_the_command_repeats_the_runs(folders, tmp_path, monkeypatch, recipe, changes):
    wanted = configs.replace(find_recipe(recipe)(), changes)
    group = with_config(read_run_group(folders(seeds=(2, 0))), wanted)
    started = []
    monkeypatch.setattr(
        "onescan.experiments.training.train", lambda run, *_, **__: started.append(run)
    )
    monkeypatch.setattr("onescan.experiments.report.write_report", lambda *_: None)
    monkeypatch.setattr(import_module("onescan.cli.train"), "_results", lambda _: "")
    monkeypatch.chdir(tmp_path)
    command = repeat_command(group)
    assert command[:6] == ["onescan", "train", recipe, "--seeds", "2", "0"]
    assert cli.main([word.strip("'") for word in command[1:]]) == 0
    assert [run.training.seed for run in started] == [2, 0]
    for run in started:
        assert {path for path, *_ in configs.differences(run, wanted)} <= {"training.seed"}


def test_the_command_names_the_folder_unless_it_is_the_default(folders):
    group = with_config(read_run_group(folders(seeds=(2, 0))), find_recipe("digits")())

    def command(*folders):
        runs = tuple(
            dataclasses.replace(run, result=dataclasses.replace(run.result, folder=Path(folder)))
            for run, folder in zip(group.runs, folders, strict=True)
        )
        return repeat_command(dataclasses.replace(group, runs=runs))

    plain = ["onescan", "train", "digits", "--seeds", "2", "0"]
    assert command("my runs/seed-2", "my runs/seed-0") == [*plain, "--out", "'my runs'"]
    assert command("runs/digits/seed-2", "runs/digits/seed-0") == plain
    assert command("a/seed-2", "b/seed-0") == command("a/seed-0", "a/run") == plain


def test_there_is_no_command_for_other_components(folders):
    group = read_run_group(folders())
    assert repeat_command(group) is None
    digits = RECIPES["digits"]()
    for change in ({"mixer": SoftmaxMixerConfig(num_heads=4)}, {"position": None}):
        changed = dataclasses.replace(digits, model=dataclasses.replace(digits.model, **change))
        assert repeat_command(with_config(group, changed)) is None


# Held-out images


class Stream(ImageTensors):
    """Images without random access."""

    def examples(self, **_):
        for row in range(len(self)):
            self.read_rows.append(row)
            yield Example((self.images[row], self.labels[row])), None

    def read(self, examples):
        pixels, labels = zip(*(example.source for example in examples), strict=True)
        return LoadedBatch((torch.stack(pixels), torch.stack(labels)))


def test_streams_are_read_no_further_than_needed(folders):
    group = read_run_group(folders())
    data, rows = group.task.test, torch.tensor([7, 2, 11])
    pixels = (data.images * 255).round().byte()
    group.task.test = Stream(images=pixels, labels=data.labels)
    object.__setattr__(group.task.test, "read_rows", read := [])
    torch.testing.assert_close(images.held_out_pixels(group, rows), pixels[rows] / 255)
    assert read == list(range(12))


def test_unreadable_images_leave_out_figures_by_row(folders):
    group = read_run_group(folders())
    data = group.task.test
    more = {"images": data.images[:2], "labels": data.labels[:2]}
    group.task.test = ImageTensors(
        **{name: torch.cat([getattr(data, name), value]) for name, value in more.items()}
    )
    for section in (images.predictions(group), mixers.key_importance(group)):
        assert not section.figures
        assert f"{len(data)} of {len(data) + 2}" in section.lead


# Errors


def test_errors(folders, tmp_path):
    path = tmp_path / "report.html"
    (run,), (deit,) = folders(), folders(KINDS["deit"])
    unfinished = shutil.copytree(run, tmp_path / "unfinished")
    (unfinished / "result.json").unlink()
    predictions = torch.zeros(40, dtype=torch.long)
    changed = answered(run, predictions)
    changed.evaluation.arrays["labels"] = (changed.evaluation.arrays["labels"] + 1) % len(HOSTILE)
    first, second = (answered(f, predictions) for f in folders(seeds=(0, 1)))
    second.evaluation.arrays["labels"] = second.evaluation.arrays["labels"].flip(0)
    for runs, message in (
        ([], "runs is empty"),
        ([run, deit], r"model\.mixer"),
        ([run, run], "seed 0"),
        ([tmp_path / "nowhere"], "nowhere"),
        ([unfinished], "unfinished"),
        ([changed], "held-out images have changed"),
        ([first, second], "different images"),
    ):
        with pytest.raises(ValueError, match=message):
            write_report(runs, path)
        assert not path.exists()


def test_fewer_held_out_images_than_evaluated(folders):
    group = read_run_group(folders())
    data = group.task.test
    group.task.test = ImageTensors(images=data.images[:10], labels=data.labels[:10])
    with pytest.raises(ValueError, match="held-out images have changed"):
        images.held_out_pixels(group, torch.tensor([20, 12]))


def test_tasks_without_report(folders, monkeypatch):
    monkeypatch.delitem(SECTIONS, ImageClassificationConfig)
    with pytest.raises(ValueError, match="ImageClassificationConfig; available: ImageGeneration"):
        render_page(read_run_group(folders()))
