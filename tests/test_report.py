"""The report holds the right numbers, in one file that loads nothing and trusts no name."""

import dataclasses
import io
import json
import math
import re
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
import torch
from drawn_charts import limits_drawn
from html_page import Page, assert_loads_nothing, table
from matplotlib.figure import Figure
from PIL import Image
from projections import parts_of
from sklearn.metrics import confusion_matrix

from onescan import cli, configs
from onescan.data import DataConfig, Example, ImageFormat, ImageSplits, ImageTensors, LoadedBatch
from onescan.layers.basic import MLPConfig
from onescan.layers.mixers import LightNetMixerConfig, SoftmaxMixerConfig
from onescan.layers.position import AbsolutePositionConfig, ToeplitzPosition, ToeplitzPositionConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.recipes import RECIPES, find_recipe
from onescan.report import check_report_path, lines, scales, write_report
from onescan.report.command import repeat_command
from onescan.report.lightnet import key_shares
from onescan.report.page import render_page
from onescan.report.pictures import held_out_pixels
from onescan.report.sections import (
    class_accuracy,
    confusion,
    curves,
    diffusion_kernels,
    frequencies,
    key_importance,
    learnt_decays,
    position_kernels,
    predictions,
    speed,
)
from onescan.report.study import read_study
from onescan.report.words import large, percent
from onescan.shapes import Grid
from onescan.tasks import Evaluation, ImageClassificationConfig
from onescan.training import MachineConfig, RunConfig, TrainingConfig, train
from onescan.training.folder import read_result

HOSTILE = ("<script>alert(1)</script>", "a & b", "$x^2$", '"quoted" \x01', "\u6570\u5b57")


@dataclass(frozen=True, kw_only=True)
class PatternsConfig(DataConfig):
    """Images of 4 x 8 with one bright column, which is the class."""

    class_names: tuple[str, ...] = HOSTILE
    channels: int = 1
    seed: int = 0
    test_examples: int = 40

    def build(self):
        generator = torch.Generator().manual_seed(self.seed)
        train, test = (self.split(n, generator) for n in (48, self.test_examples))
        c = self.channels
        format = ImageFormat(channels=c, height=4, width=8, mean=(0.5,) * c, std=(0.25,) * c)
        return ImageSplits(train=train, test=test, class_names=self.class_names, format=format)

    def split(self, examples, generator):
        labels = torch.randint(len(self.class_names), (examples,), generator=generator)
        images = torch.randn(examples, self.channels, 4, 8, generator=generator) / 4 + 0.5
        images[torch.arange(examples), :, :, labels % 8] += 0.75
        return ImageTensors(images=images.clamp(0, 1), labels=labels)


LIGHTNET = ImageClassifierConfig(
    image_size=(4, 8),
    channels=1,
    patch_size=(2, 2),
    num_classes=len(HOSTILE),
    width=16,
    depth=2,
    mixer=LightNetMixerConfig(num_heads=2, gate_rank=4),
    position=ToeplitzPositionConfig(hidden_states=4),
)


def model(**changes):
    return dataclasses.replace(LIGHTNET, **changes)


def mixer(**changes):
    return model(mixer=dataclasses.replace(LIGHTNET.mixer, **changes))


MODELS = {
    "lightnet": LIGHTNET,
    "deit": model(
        mixer=SoftmaxMixerConfig(num_heads=2), mlp=MLPConfig(), position=AbsolutePositionConfig()
    ),
    "without_tpe": model(position=None),
    "without_lrpe": mixer(lrpe=False),
    "without_decay": mixer(decay=False),
    "bidirectional": model(position=ToeplitzPositionConfig(hidden_states=4, bidirectional=True)),
    "mean_pool": model(pool="mean"),
}

LEFT_OUT = {
    "lightnet": set(),
    "deit": {key_importance.TITLE, position_kernels.TITLE, frequencies.TITLE},
    "without_tpe": {position_kernels.TITLE},
    "without_lrpe": {frequencies.TITLE},
    "without_decay": {key_importance.TITLE},
    "bidirectional": set(),
    "mean_pool": set(),
}
LEFT_OUT = {
    kind: titles | {learnt_decays.TITLE, diffusion_kernels.TITLE}
    for kind, titles in LEFT_OUT.items()
}


MANY = {
    "model": model(num_classes=120),
    "class_names": tuple(f"class {i}" for i in range(120)),
    "test_examples": 400,
}


def run_config(model=LIGHTNET, seed=0, **data):
    return RunConfig(
        name="a <b>recipe</b> & more",
        model=model,
        data=PatternsConfig(**data),
        task=ImageClassificationConfig(augment=None),
        training=TrainingConfig(epochs=2, batch_size=16, seed=seed),
        machine=MachineConfig(device="cpu", trackers=()),
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of finished runs; each is trained once."""
    made = {}

    def folders(model=LIGHTNET, seeds=(0,), **data):
        runs = [run_config(model, seed, **data) for seed in seeds]
        for run in runs:
            if run not in made:
                made[run] = tmp_path_factory.mktemp("run")
                train(run, made[run])
        return [made[run] for run in runs]

    return folders


@pytest.fixture(scope="module")
def written(folders, tmp_path_factory):
    """The page of finished runs, as a file; each is drawn once."""
    made = {}

    def written(model=LIGHTNET, seeds=(0,), **data):
        key = (model, seeds, *data.items())
        if key not in made:
            path = tmp_path_factory.mktemp("page") / "new" / "report.html"
            made[key] = write_report(folders(model, seeds, **data), path)
        return made[key]

    return written


@pytest.fixture(scope="module")
def html_of(written):
    return lambda *runs, **more: written(*runs, **more).read_text(encoding="utf-8")


def page_of(runs):
    return Page(render_page(read_study(runs)))


# The file


@pytest.mark.parametrize("kind", MODELS)
def test_page_loads_nothing(written, kind):
    path = written(MODELS[kind])
    assert_loads_nothing(path.read_text(encoding="utf-8"))
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


@pytest.mark.parametrize("kind", MODELS)
def test_sections_that_do_not_apply_are_one_line(html_of, kind):
    html = html_of(MODELS[kind])
    said = set(re.findall(r'<p class="absent"><b>(.*?)\.</b> Not shown: ', html))
    assert said == LEFT_OUT[kind]
    shown = set(re.findall(r"<h2>(.*?)</h2>", html))
    assert shown == {title for titles in LEFT_OUT.values() for title in titles} - said | {
        "Training", "Speed and memory", "What is taken for what", "Test images"
    }  # fmt: skip


def test_links_pictures_and_figures_are_complete(html_of):
    page = Page(html_of(seeds=(0, 1, 2)))
    ids = {attributes.get("id") for _, attributes in page.tags}
    assert {a["href"].removeprefix("#") for tag, a in page.tags if tag == "a"} <= ids
    assert all(a.get("alt") for tag, a in page.tags if tag == "img")
    tags = [tag for tag, _ in page.tags]
    assert tags.count("figure") == tags.count("figcaption") > 5


def test_class_names_are_text_everywhere(html_of):
    html = html_of()
    page = Page(html)
    assert "alert(1)</script>" not in html
    assert table(page, "shown \\ said")[0][1:] == list(HOSTILE)
    assert "a <b>recipe</b> & more" in page.text
    drawn = {e.text for svg in page.pictures("svg+xml") for e in ElementTree.fromstring(svg).iter()}
    assert {"<script>alert(1)</script"[:23] + "\N{HORIZONTAL ELLIPSIS}", *HOSTILE[1:3]} <= drawn
    assert {'"quoted"  ', HOSTILE[-1]} <= drawn


def test_a_failed_write_leaves_the_old_page(folders, written, tmp_path, monkeypatch):
    path = shutil.copyfile(written(), tmp_path / "report.html")
    old = path.read_text(encoding="utf-8")

    def half(self, text, **options):
        self.write_bytes(text[: len(text) // 2].encode())
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="No space left"):
        write_report(folders(MODELS["deit"]), path)
    assert path.read_text(encoding="utf-8") == old


def test_only_a_page_of_ours_is_replaced(folders, written, tmp_path):
    path = tmp_path / "report.html"
    check_report_path(path)
    path.write_text("<!doctype html><title>notes</title>")
    with pytest.raises(ValueError, match=r"html was not written by onescan: choose another name"):
        write_report(folders(), path)
    assert "notes" in path.read_text()
    check_report_path(written())
    with pytest.raises(ValueError, match="by onescan: it is a folder, expected a file's name"):
        check_report_path(tmp_path)


def test_smoothed_labels_are_said_beside_the_training_loss(folders, html_of):
    study = read_study(folders())
    assert "smoothed" not in html_of()
    run = study.runs[0]
    task = ImageClassificationConfig(augment=None, label_smoothing=0.1)
    config = dataclasses.replace(run.manifest.run, task=task)
    smoothed = dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, run=config))
    caption = curves.section(dataclasses.replace(study, runs=(smoothed,))).figures[0].caption
    assert "smoothed by 0.1, in training only" in caption


def test_equal_runs_give_equal_pages_whatever_the_users_style(folders, html_of):
    before = html_of()
    torch.manual_seed(2)
    with matplotlib.rc_context({"axes.facecolor": "black", "xtick.labelsize": 30}):
        settings = dict(matplotlib.rcParams)
        assert render_page(read_study(folders())) == before
        assert dict(matplotlib.rcParams) == settings


# The numbers


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
def test_accuracy_and_its_spread(folders, html_of, seeds):
    runs = folders(seeds=seeds)
    accuracies = [json.loads((r / "result.json").read_text())["metrics"]["accuracy"] for r in runs]
    html = html_of(seeds=seeds)
    page = Page(html)
    assert len(set(accuracies)) == len(seeds)
    assert f"<strong>{statistics.mean(accuracies):.2%}" in html
    shown = [(row[0], row[1]) for row in table(page, "seed")[1:]]
    assert shown == [(str(s), f"{a:.2%}") for s, a in zip(seeds, accuracies, strict=True)]
    if len(seeds) > 1:
        assert f"\u00b1 {statistics.stdev(accuracies):.2%}" in page.text
        assert "mean and standard deviation of 3 seeds" in page.text
    else:
        assert "\u00b1" not in page.text


def test_time_throughput_and_parameters(folders, html_of):
    (folder,) = folders()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["seconds"] for line in lines if line["split"] == "train"]
    study = read_study([folder])
    assert study.runs[0].seconds == pytest.approx(sum(seconds))
    assert study.runs[0].throughput == pytest.approx(16 / statistics.median(seconds))
    text = Page(html_of()).text
    assert f"{large(16 / statistics.median(seconds))} images per second of the median" in text
    assert f"{sum(p.numel() for p in LIGHTNET.build().parameters()):,} learnt" in text


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
def test_confusion_matrix_counts_every_seed(folders, html_of, seeds):
    study = read_study(folders(seeds=seeds))
    arrays = [run.result.evaluation.arrays for run in study.runs]
    wanted = sum(
        confusion_matrix(a["labels"], a["predictions"], labels=range(len(HOSTILE))) for a in arrays
    )
    rows = table(Page(html_of(seeds=seeds)), "shown \\ said")
    assert [[int(cell) for cell in row[1:]] for row in rows[1:]] == wanted.tolist()


def answered(folder, predictions, confidence=0.75):
    """The run's result, if it had said this."""
    result = read_result(folder)
    arrays = result.evaluation.arrays
    confidence = torch.as_tensor(confidence).expand(len(predictions))
    arrays |= {"predictions": predictions, "confidence": confidence}
    accuracy = (predictions == arrays["labels"]).float().mean().item()
    evaluation = Evaluation(metrics={"accuracy": accuracy, "loss": 1.0}, arrays=arrays)
    return dataclasses.replace(result, evaluation=evaluation)


def test_mistakes_come_first_and_with_their_probability(folders):
    (folder,) = folders()
    labels = PatternsConfig().build().test.labels
    said = labels.clone()
    said[[3, 7]] = (labels[[3, 7]] + 1) % len(HOSTILE)
    confidence = torch.full((40,), 0.9)
    confidence[3], confidence[7] = 0.62, 0.81
    page = page_of([answered(folder, said, confidence)])
    assert "95.00%" in page.text
    alts = [a["alt"] for tag, a in page.tags if tag == "img" and a["alt"].startswith("Test image")]
    for alt, image in zip(alts, (7, 3), strict=False):
        truth, guess = HOSTILE[labels[image]], HOSTILE[said[image]]
        assert alt == f"Test image {image}, which shows {truth}, predicted as {guess}"
    assert len(alts) == 2 + 38 // 2
    assert "2 mistakes" in page.text
    assert page.text.index("81%") < page.text.index("62%")


def test_a_perfect_and_a_hopeless_model_have_pages(folders):
    (folder,) = folders()
    labels = PatternsConfig().build().test.labels
    perfect = render_page(read_study([answered(folder, labels)]))
    assert "<strong>100%</strong>" in perfect
    assert "<h3>Right answers</h3>" in perfect
    assert not re.search("<h3>.*mistake", perfect)
    hopeless = render_page(read_study([answered(folder, (labels + 1) % len(HOSTILE))]))
    assert "<strong>0.00%</strong>" in hopeless
    assert "<h3>40 mistakes</h3>" in hopeless
    assert "<h3>Right answers</h3>" not in hopeless


def test_shown_pixels_are_the_images(html_of):
    pictures = Page(html_of(MODELS["deit"])).pictures("png")
    assert pictures
    sizes = {Image.open(io.BytesIO(png)).size for png in pictures}
    assert sizes == {(8, 4)}
    image = PatternsConfig().build().test.images
    pixels = (image * 255).round().byte()
    shown = {np.asarray(Image.open(io.BytesIO(png)))[..., 0].tobytes() for png in pictures}
    assert shown <= {one[0].numpy().tobytes() for one in pixels}


def test_many_classes_are_listed_by_confusion(folders):
    names = tuple(f"class {i}" for i in range(35))
    (folder,) = folders(model(num_classes=35), class_names=names, test_examples=60)
    study = read_study([folder])
    arrays = study.runs[0].result.evaluation.arrays
    wanted = confusion_matrix(arrays["labels"], arrays["predictions"], labels=range(35))
    rows = table(Page(render_page(study)), "shown")[1:]
    assert len(rows) == confusion.MOST_PAIRS
    for shown, said, times, _ in rows:
        assert int(times) == wanted[names.index(shown), names.index(said)] > 0
        assert shown != said
    assert int(rows[0][2]) == (wanted - np.diag(wanted.diagonal())).max() > 1
    assert [int(row[2]) for row in rows] == sorted((int(row[2]) for row in rows), reverse=True)


def test_a_long_run_s_curve_is_thinned_to_its_end():
    places = lines.thinned(12_345)
    assert len(places) <= lines.MOST_POINTS
    assert places[-1] == 12_344


def test_accuracy_class_by_class_of_many(folders, html_of):
    study = read_study(folders(**MANY))
    arrays = study.runs[0].result.evaluation.arrays
    counts = confusion_matrix(arrays["labels"], arrays["predictions"], labels=range(120))
    shown = counts.sum(axis=1)
    accuracies = class_accuracy.accuracy_by_class(study)[0]
    np.testing.assert_array_equal(np.isnan(accuracies), shown == 0)
    known = shown > 0
    np.testing.assert_allclose(accuracies[known], counts.diagonal()[known] / shown[known])
    page = Page(html_of(**MANY))
    assert f"All {(shown > 0).sum()} classes in the order of their accuracy" in page.text
    order = np.argsort(np.where(shown > 0, accuracies, 2), kind="stable")
    alts = " ".join(a["alt"] for tag, a in page.tags if tag == "img")
    hardest = ", ".join(f"class {i} {percent(accuracies[i])}" for i in order[:15])
    assert f"hardest classes: {hardest}" in alts


def test_many_classes_have_top_5_accuracy(folders, html_of):
    (folder,) = folders(**MANY)
    top = read_result(folder).metrics["top5_accuracy"]
    page = Page(html_of(**MANY))
    assert table(page, "seed")[0][2] == "test top-5 accuracy"
    assert table(page, "seed")[1][2] == f"{top:.2%}"
    assert any("Test top-5 accuracy" in text for text in page.texts)
    assert "top-5" not in Page(html_of()).text


@pytest.mark.parametrize(("share", "evaluations"), [(0.0, 1), (0.7, 2), (1.0, 1)])
def test_an_accuracy_that_stays_the_same_is_drawn(folders, monkeypatch, share, evaluations):
    limits = limits_drawn(monkeypatch)
    study = read_study(folders())
    run = study.runs[0]
    tests = [line | {"accuracy": share} for line in run.records if line["split"] == "test"]
    records = [line for line in run.records if line["split"] == "train"] + tests[-evaluations:]
    curves.section(dataclasses.replace(study, runs=(dataclasses.replace(run, records=records),)))
    low, high = limits["test accuracy"]
    assert 0 <= low <= share <= high <= 1
    assert low < high


@pytest.mark.parametrize("images", [1, 2, 3, 40, 50_000])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_an_axis_of_shares_has_two_ends(images, share):
    axes = Figure().add_subplot()
    scales.share_scale(axes, share, share, least=0.5 / images)
    low, high = axes.get_ylim()
    assert low <= share <= high
    assert low < high


# What it took


def recorded(folder, **numbers):
    """The study of a run, if these had been recorded at every update."""
    study = read_study([folder])
    run = study.runs[0]
    lines = [line | (numbers if line["split"] == "train" else {}) for line in run.records]
    return dataclasses.replace(study, runs=(dataclasses.replace(run, records=lines),))


def test_speed_waiting_and_memory_are_told(folders):
    (folder,) = folders()
    study = recorded(folder, seconds=0.5, waiting_seconds=0.125, memory_mib=2048.0)
    figures = speed.section(study).figures
    alts = [dict(Page(figure.html).tags[0][1])["alt"] for figure in figures]
    assert [alt.rpartition(": ")[2] for alt in alts] == ["32", "25%", "2 GiB"]  # 16 images / 0.5 s
    assert "In all 25.0% of the time, 0.8 s of 3.0 s;" in figures[1].caption
    assert "At most 2 GiB" in figures[2].caption
    assert "the computer's memory" in figures[2].caption


def test_memory_that_no_system_tells_is_left_out(folders):
    study = recorded(folders()[0], memory_mib=math.nan)
    titles = [figure.title for figure in speed.section(study).figures]
    assert titles == ["Images per second", "Waiting for data"]


def test_smoothing_is_a_statistic_of_a_window():
    y = np.random.default_rng(0).normal(size=400)
    places = np.array([0, 200, 399])
    wanted = [np.median(y[:6]), np.median(y[195:206]), np.median(y[394:])]
    np.testing.assert_allclose(lines.smoothed(y, places, np.median), wanted)


def edited(folder, to, **parts):
    """A copy of a run's folder, with parts of its config.json changed."""
    shutil.copytree(folder, to)
    data = json.loads((to / "config.json").read_text())
    for name, change in parts.items():
        data[name] = change(data[name])
    (to / "config.json").write_text(json.dumps(data))
    return to


def test_every_machine_a_run_was_on_is_named(folders, tmp_path):
    def moved(environments):
        later = {"since_step": 1234, "device": "H<1>00", "processes": 8, "commit": "feed"}
        return [*environments, environments[0] | later]

    page = page_of([edited(folders()[0], tmp_path / "run", environments=moved)])
    assert "From step 1,234 8 \u00d7 H<1>00, " in page.text
    assert ", commit feed" in page.text
    assert "those of the first process" in page.text


def test_runs_on_different_machines_are_seeds_of_one_recipe(folders, tmp_path):
    def elsewhere(run):
        return run | {"machine": run["machine"] | {"workers": 3, "gradient_accumulation_steps": 2}}

    first, second = folders(seeds=(0, 1))
    second = edited(second, tmp_path / "run", run=elsewhere)
    assert len(read_study([first, second]).runs) == 2
    with pytest.raises(ValueError, match="the same run, seed 0"):
        read_study([first, edited(first, tmp_path / "again", run=elsewhere)])


# The held-out images


class Stream(ImageTensors):
    """Images that come one after the other and cannot be looked up."""

    def examples(self, **_):
        for place in range(len(self)):
            self.walked.append(place)
            yield Example((self.images[place], self.labels[place])), None

    def read(self, examples):
        pixels, labels = zip(*(example.source for example in examples), strict=True)
        return LoadedBatch((torch.stack(pixels), torch.stack(labels)))


def test_a_stream_is_walked_no_further_than_needed(folders):
    study = read_study(folders())
    data, places = study.task.test, torch.tensor([7, 2, 11])
    images = (data.images * 255).round().byte()
    study.task.test = Stream(images=images, labels=data.labels)
    object.__setattr__(study.task.test, "walked", walked := [])
    torch.testing.assert_close(held_out_pixels(study, places), images[places] / 255)
    assert walked == list(range(12))


def test_fewer_held_out_images_than_judged_are_refused(folders):
    study = read_study(folders())
    data = study.task.test
    study.task.test = ImageTensors(images=data.images[:10], labels=data.labels[:10])
    with pytest.raises(ValueError, match="held-out images have changed"):
        held_out_pixels(study, torch.tensor([20, 12]))


def test_rows_that_tell_no_images_show_none(folders):
    study = read_study(folders())
    data = study.task.test
    study.task.test = ImageTensors(
        images=torch.cat([data.images, data.images[:2]]),
        labels=torch.cat([data.labels, data.labels[:2]]),
    )
    for part in (predictions, key_importance):
        section = part.section(study)
        assert not section.figures
        assert f"Only {len(data)} of {len(data) + 2} held-out images could be read" in section.lead


# What was learnt


def test_key_shares_are_the_softmax_of_keys(folders):
    study = read_study(folders())
    data = PatternsConfig().build()
    images = data.format.model_input(data.test.images[:5])
    shares = key_shares(study.model, images)
    assert [tuple(layer.shape) for layer in shares] == [(5, 2, 9)] * 2
    torch.testing.assert_close(torch.stack(shares).sum(-1), torch.ones(2, 5, 2))
    assert not any(m._forward_pre_hooks for m in study.model.modules())
    # the first block by hand
    with torch.no_grad():
        x, shape = study.model.patchify(images)
        x = torch.cat([study.model.class_token.expand(5, 1, -1), x], dim=1)
        x, _ = study.model.position(x, Grid(shape, prefix=1))
        block = study.model.blocks[0]
        to_k = parts_of(block.mixer)[1]
        keys = to_k(block.mixer_norm(x)).unflatten(-1, (2, 8))  # B T H K
    wanted = keys.softmax(dim=1).mean(dim=-1).transpose(1, 2)
    torch.testing.assert_close(shares[0], wanted)


@pytest.mark.parametrize("kind", ["lightnet", "mean_pool"])
def test_shown_shares_sum_to_one(folders, monkeypatch, kind):
    drawn = []
    tiles = key_importance.tiles
    monkeypatch.setattr(
        key_importance, "tiles", lambda rows, **words: drawn.append(rows) or tiles(rows, **words)
    )
    study = read_study(folders(MODELS[kind]))
    html = key_importance.section(study).figures[0].html
    tokens = 8 + study.model.prefix
    assert [[row.name for row in rows] for rows in drawn] == [
        [*HOSTILE], [*HOSTILE], ["block 1", "block 2"]
    ]  # fmt: skip
    for row in [row for rows in drawn for row in rows]:
        total = row.maps.flatten(1).sum(dim=1)
        total = total + (0 if row.numbers is None else row.numbers)
        torch.testing.assert_close(total / tokens, torch.ones(2))
    first = Page(html).pictures("svg+xml")[0].decode()
    if kind == "lightnet":
        for number in torch.stack([row.numbers for row in drawn[0]]).flatten().tolist():
            assert f">{number:.1f}</text>" in first


def test_examples_show_their_class(folders):
    study = read_study(folders())
    looks = key_importance._examples(study, study.model)
    data, format = PatternsConfig().build().test, PatternsConfig().build().format
    for look, name in zip(looks, HOSTILE, strict=True):
        lightness = (data.images[:, 0] * 255).round() / 255
        match = (lightness - look.image.mean(dim=-1)).abs().flatten(1).amax(dim=1) < 1e-5
        assert {HOSTILE[i] for i in data.labels[match]} == {look.name} == {name}
        for shown, wanted in zip(
            look.shares,
            key_shares(study.model, format.model_input(data.images[match])),
            strict=True,
        ):
            torch.testing.assert_close(shown, wanted[0])


@pytest.mark.parametrize("bidirectional", [False, True])
def test_kernels_are_what_the_layer_does_to_an_impulse(bidirectional):
    shape = (5, 4)
    position = ToeplitzPosition(3, shape, 2, bidirectional)
    down, right = position_kernels.axis_kernels(position, shape)
    impulse = torch.zeros(1, 5, 4, 3)
    impulse[0, 2, 1] = 1
    with torch.no_grad():
        y, _ = position(impulse.flatten(1, 2), Grid(shape))
    y = y.unflatten(1, shape)[0]
    zero = (len(down[0]) - 1) // 2 if bidirectional else 0
    for row in range(5):
        lag = row - 2  # the impulse lies so many patches above
        wanted = down[:, zero + lag] if lag > 0 or bidirectional else 0 * down[:, 0]
        zero_right = (len(right[0]) - 1) // 2 if bidirectional else 0
        wanted = wanted + (right[:, zero_right] if lag == 0 else 0)
        wanted = wanted + (down[:, zero] if lag == 0 and not bidirectional else 0)
        torch.testing.assert_close(y[row, 1], torch.as_tensor(wanted))


# The command


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"training.epochs": 3, "model.mixer.lrpe": False, "training.steps": 7},
        {"model.patch_size": (4, 4), "training.max_grad_norm": None, "model.pool": "mean"},
    ],
)
@pytest.mark.parametrize("recipe", ["digits", "digits/without_norm"])
def test_the_command_repeats_the_runs(folders, tmp_path, monkeypatch, recipe, changes):
    study = read_study(folders(seeds=(2, 0)))
    wanted = configs.replace(find_recipe(recipe)(), changes)
    study = with_config(study, wanted)
    started = []
    monkeypatch.setattr("onescan.training.train", lambda run, *_, **__: started.append(run))
    monkeypatch.setattr("onescan.report.write_report", lambda *_: None)
    monkeypatch.setattr(cli, "_results", lambda _: "")
    monkeypatch.chdir(tmp_path)
    command = repeat_command(study)
    assert command[:6] == ["onescan", "train", recipe, "--seeds", "2", "0"]
    assert "--training.seed" not in command
    assert cli.main([word.strip("'") for word in command[1:]]) == 0
    assert [run.training.seed for run in started] == [2, 0]
    for run in started:
        assert {path for path, *_ in configs.differences(run, wanted)} <= {"training.seed"}


def with_config(study, config):
    runs = tuple(
        dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, run=seeded))
        for run in study.runs
        for seeded in [
            dataclasses.replace(
                config, training=dataclasses.replace(config.training, seed=run.seed)
            )
        ]
    )
    return dataclasses.replace(study, runs=runs)


def test_no_command_is_better_than_a_wrong_one(folders):
    study = read_study(folders())
    assert repeat_command(study) is None
    digits = RECIPES["digits"]()
    for other in (SoftmaxMixerConfig(num_heads=4), None):
        field = "mixer" if other else "position"
        changed = dataclasses.replace(
            digits, model=dataclasses.replace(digits.model, **{field: other})
        )
        assert repeat_command(with_config(study, changed)) is None


# Refusals


def assert_refused(runs, path, message):
    with pytest.raises(ValueError, match=message):
        write_report(runs, path)
    assert not path.exists()


def test_refusals(folders, tmp_path):
    path = tmp_path / "report.html"
    (run,), (deit,) = folders(), folders(MODELS["deit"])
    assert_refused([], path, "runs is empty")
    assert_refused([run, deit], path, r"different recipes, which differ in model\.mixer")
    assert_refused([run, run], path, "hold the same run, seed 0")
    assert_refused([tmp_path / "nowhere"], path, "holds no run")


def test_a_run_that_is_not_finished_is_refused(folders, tmp_path):
    folder = shutil.copytree(folders()[0], tmp_path / "run")
    (folder / "result.json").unlink()
    assert_refused([folder], tmp_path / "report.html", "not finished")


def test_changed_data_is_refused(folders, tmp_path):
    result = answered(folders()[0], torch.zeros(40, dtype=torch.long))
    result.evaluation.arrays["labels"] = (result.evaluation.arrays["labels"] + 1) % len(HOSTILE)
    assert_refused([result], tmp_path / "report.html", "held-out images have changed")


def test_runs_judged_on_different_images_are_refused(folders, tmp_path):
    first, second = (answered(f, torch.zeros(40, dtype=torch.long)) for f in folders(seeds=(0, 1)))
    second.evaluation.arrays["labels"] = second.evaluation.arrays["labels"].flip(0)
    assert_refused([first, second], tmp_path / "report.html", "judged on different images")


def test_a_task_without_sections_is_refused(folders):
    @dataclass(frozen=True, kw_only=True)
    class OtherConfig(ImageClassificationConfig):
        pass

    study = read_study(folders())
    other = dataclasses.replace(study.config, task=OtherConfig())
    with pytest.raises(ValueError, match="no report for task OtherConfig; there are: Image"):
        render_page(with_config(study, other))
