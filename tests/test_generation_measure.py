"""Generated images judged: the measurement, going on with one, refusals, the command."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_denoiser import TINY, BarsConfig, denoiser_run
from tiny_generation import (
    CPU,
    Scripted,
    Tuple,
    adm_file,
    asking,
    images_of,
    saved_classifier,
    saved_denoiser,
    saved_run,
    scripted,
    write_npz,
    write_pngs,
)

from onescan.cli import main
from onescan.evaluation import config as asked_module
from onescan.evaluation import generation
from onescan.evaluation.config import SamplesConfig
from onescan.evaluation.features import open_features
from onescan.evaluation.generation import (
    folder_name,
    gather,
    measure_generation,
    open_gathered,
)
from onescan.evaluation.image_scores import chosen_by_lot, inception_score, precision_recall
from onescan.evaluation.images import Source, in_steps, open_samples
from onescan.models.denoiser import SamplerName
from onescan.tasks.feature_distance import FeatureStatistics, frechet_distance


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONESCAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "generation"


@pytest.fixture
def classifier(tmp_path, cache):
    return saved_classifier(tmp_path)


@pytest.fixture
def denoiser(tmp_path, cache):
    return saved_denoiser(tmp_path)


def test_a_models_images_come_of_seed_and_place_alone(classifier, denoiser):
    features = open_features(classifier, CPU)
    asked = asking(classifier)
    source = open_samples(denoiser, asked, features, CPU).at(1.0, None)
    images, labels = source.images(2, 7)
    assert labels.tolist() == [2, 0, 1, 2, 0]
    assert source.size == (4, 4)
    torch.testing.assert_close(source.images(4, 6)[0], images[2:4])
    other = open_samples(denoiser, replace(asked, seed=1), features, CPU).at(1.0, None)
    assert (other.images(2, 7)[0] - images).abs().max() > 1e-3


def test_classes_may_follow_the_reference(classifier, denoiser):
    asked = asking(classifier, class_distribution="reference")
    samples = open_samples(denoiser, asked, open_features(classifier, CPU), CPU)
    source = samples.at(1.0, (1, 0, 3))
    labels = [source._label(i) for i in range(2000)]
    assert set(labels) == {0, 2}
    assert labels.count(2) / 2000 == pytest.approx(0.75, abs=0.03)


# measuring


def plainly(images, real, features):
    """All at once, by the functions that have tests of their own."""
    found, true = features(in_steps(images)), features(in_steps(real))

    def distance(a, b):
        both = [FeatureStatistics.empty(a.shape[1]) for _ in range(2)]
        for statistics, each in zip(both, (a, b), strict=True):
            statistics.add(each)
        return frechet_distance(*(statistics.gaussian() for statistics in both)).distance

    return {
        "distance": distance(found.pooled, true.pooled),
        "spatial_distance": distance(found.spatial, true.spatial),
        "class_score": inception_score(found.probabilities).mean,
        "class_score_spread": inception_score(found.probabilities).spread,
        **precision_recall(true.pooled, found.pooled)._asdict(),
    }


def test_a_run_is_measured_as_plainly(tmp_path, classifier, denoiser):
    asked = asking(classifier, guidance_scale=(2.0, 1.0))
    found = measure_generation(denoiser, asked, tmp_path / "out", device="cpu")
    assert [score.guidance for score in found.scores] == [1.0, 2.0]
    features = open_features(classifier, CPU)
    samples = open_samples(denoiser, asked, features, CPU)
    real = BarsConfig().build().train.images
    for score in found.scores:
        images, labels = samples.at(score.guidance, None).images(0, 20)
        for name, expected in plainly(images, real, features).items():
            assert getattr(score, name) == pytest.approx(expected, rel=1e-3, abs=1e-4), name
        told = features(in_steps(images)).probabilities.argmax(dim=1)
        assert score.as_asked == pytest.approx((told == labels).double().mean().item())
        confusion = torch.zeros(3, 3, dtype=torch.long)
        for pair in zip(labels, told, strict=True):
            confusion[pair] += 1
        assert confusion.tolist() == [list(row) for row in score.confusion]
        assert confusion.sum(dim=1).tolist() == list(score.asked)
        assert confusion.diagonal().tolist() == list(score.right)
    assert found.scores[0].distance != found.scores[1].distance
    assert (found.real.name, found.real.count) == ("train, Bars", 24)
    told = features(in_steps(real)).probabilities.argmax(dim=1)
    right = (told == BarsConfig().build().train.labels).double().mean().item()
    assert found.real.as_labelled == pytest.approx(right)
    assert found.distance_name == "Frechet distance in features of runs/judge"
    assert (found.sampler, found.steps, found.labels, found.seed) == ("ddim", 2, "uniform", 0)


def test_samples_in_a_file_have_the_scores_of_the_run(tmp_path, classifier, denoiser):
    asked = asking(classifier, samples=12, guidance_scale=(1.5,))
    out = tmp_path / "x.npz"
    words = ["--num-images", "12", "--steps", "2", "--guidance-scale", "1.5"]
    assert main(["sample", str(denoiser), *words, "--batch-size", "6", "--out", str(out)]) == 0
    ran = measure_generation(denoiser, asked, tmp_path / "a", device="cpu").scores[0]
    pictures = tmp_path / "reference"
    write_pngs(pictures, BarsConfig().build().train.images.expand(-1, 3, -1, -1))
    told = asking(classifier, samples=12, steps=None, reference=str(pictures))
    read = measure_generation(out, told, tmp_path / "b", device="cpu").scores[0]
    assert read.confusion == ran.confusion
    for name in ("distance", "spatial_distance", "class_score", "precision", "recall", "as_asked"):
        assert getattr(read, name) == pytest.approx(getattr(ran, name), rel=1e-4, abs=1e-5), name


def test_the_same_images_have_no_distance(tmp_path, classifier):
    folder = write_pngs(tmp_path / "x", images_of(30))
    asked = asking(classifier, samples=30, steps=None, reference=str(folder))
    score = measure_generation(folder, asked, tmp_path / "out", device="cpu").scores[0]
    assert score.distance == pytest.approx(0, abs=1e-6)
    assert score.spatial_distance == pytest.approx(0, abs=1e-5)
    assert (score.precision, score.recall) == (1.0, 1.0)
    assert (score.guidance, score.as_asked, score.confusion) == (None, None, ())


def test_only_fifty_thousand_images_of_inception_are_fid_50k(tmp_path, classifier):
    folder = write_pngs(tmp_path / "x", images_of(12))
    features = scripted(tmp_path / "inception.pt", Scripted())
    asked = asking(features, samples=12, steps=None, reference=str(folder))
    found = measure_generation(folder, asked, tmp_path / "out", device="cpu")
    assert found.distance_name == "FID"
    assert found.scores[0].spatial_distance is None
    assert replace(found, samples=50_000).distance_name == "FID-50K"
    ours = replace(found, samples=50_000, is_inception=False)
    assert "FID" not in ours.distance_name + "".join(ours.short_names.values())
    assert found.is_singular


def run_once(denoiser, asked, out):
    return measure_generation(denoiser, asked, out, device="cpu")


class StoppedError(BaseException):
    """Stands in for SIGKILL."""


@pytest.mark.parametrize("batches", [0, 2])
def test_a_killed_measurement_goes_on_to_the_same_bits(
    tmp_path, classifier, denoiser, monkeypatch, batches
):
    asked = asking(classifier, guidance_scale=(1.0, 3.0))
    whole = run_once(denoiser, asked, tmp_path / "whole")
    monkeypatch.setattr(generation, "SAVE_EVERY_S", 0.0)
    add, done = generation.RowFile.add, []

    def add_or_die(rows, features):
        add(rows, features)
        if len(done) == batches:
            raise StoppedError  # when rows are written, and the state is not
        done.append(1)

    monkeypatch.setattr(generation.RowFile, "add", add_or_die)
    with pytest.raises(StoppedError):
        run_once(denoiser, asked, tmp_path / "out")
    monkeypatch.setattr(generation.RowFile, "add", add)
    assert run_once(denoiser, asked, tmp_path / "out") == whole
    for scale in ("guidance-1", "guidance-3"):
        ours, theirs = (tmp_path / name / scale for name in ("out", "whole"))
        for file in ("state.safetensors", "features.bin", "samples.png"):
            assert (ours / file).read_bytes() == (theirs / file).read_bytes(), file


def test_ctrl_c_saves_and_ends(tmp_path, classifier, denoiser, monkeypatch):
    asked = asking(classifier, guidance_scale=(1.0,))
    whole = run_once(denoiser, asked, tmp_path / "whole")
    add = generation.RowFile.add

    def interrupted(rows, features):
        add(rows, features)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(generation.RowFile, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_once(denoiser, asked, tmp_path / "out")
    state = open_gathered(tmp_path / "out" / "guidance-1", total=20, num_classes=3)
    assert (state.tally.place, state.rows.rows) == (6, 6)
    monkeypatch.setattr(generation.RowFile, "add", add)
    assert run_once(denoiser, asked, tmp_path / "out") == whole


def test_what_is_measured_is_not_measured_again(tmp_path, classifier, denoiser, monkeypatch):
    asked = asking(classifier, guidance_scale=(1.0,))
    first = run_once(denoiser, asked, tmp_path / "out")
    monkeypatch.setattr(Source, "images", None)
    monkeypatch.setattr("onescan.evaluation.images._Drawn.images", None)
    assert run_once(denoiser, asked, tmp_path / "out") == first
    with pytest.raises(TypeError):
        run_once(denoiser, replace(asked, guidance_scale=(1.0, 2.0)), tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"samples": 21}, "samples is 20 there and 21 here"),
        ({"steps": 3}, "steps is 2 there and 3 here"),
        ({"sampler": "dpm"}, "sampler is 'ddim' there and 'dpm' here"),
        (
            {"class_distribution": "reference"},
            "class_distribution is 'uniform' there and 'reference' here",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_measurement_in_the_folder_is_refused(
    tmp_path, classifier, denoiser, change, message
):
    asked = asking(classifier, guidance_scale=(1.0,))
    run_once(denoiser, asked, tmp_path / "out")
    before = sorted(tmp_path.glob("out/**/*"))
    with pytest.raises(ValueError, match=message):
        run_once(denoiser, replace(asked, guidance_scale=(4.0,), **change), tmp_path / "out")
    assert sorted(tmp_path.glob("out/**/*")) == before


def test_other_weights_in_the_folder_are_refused(tmp_path, classifier, denoiser):
    asked = asking(classifier)
    run_once(denoiser, asked, tmp_path / "out")
    saved_run(denoiser, denoiser_run(), seed=8)
    with pytest.raises(ValueError, match="out holds another measurement: images is"):
        run_once(denoiser, asked, tmp_path / "out")


@pytest.mark.parametrize("file", ["state.safetensors", "features.bin"])
def test_damaged_results_are_not_gone_on_with(tmp_path, classifier, denoiser, file):
    asked = asking(classifier, guidance_scale=(1.0,))
    run_once(denoiser, asked, tmp_path / "out")
    path = tmp_path / "out" / "guidance-1" / file
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=f"{file} is damaged.*remove .* to measure anew"):
        run_once(denoiser, asked, tmp_path / "out")


def test_features_that_changed_on_the_disk_are_noticed(tmp_path, classifier, denoiser):
    asked = asking(classifier, guidance_scale=(1.0,))
    run_once(denoiser, asked, tmp_path / "out")
    path = tmp_path / "out" / "guidance-1" / "features.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ValueError, match=r"features.bin is damaged"):
        run_once(denoiser, asked, tmp_path / "out")


def test_features_are_kept_of_as_many_images_as_are_compared(tmp_path, classifier, denoiser):
    asked = asking(classifier, guidance_scale=(1.0,), precision_recall_samples=7)
    run_once(denoiser, asked, tmp_path / "out")
    known = open_gathered(tmp_path / "out" / "guidance-1", total=20, num_classes=3)
    assert known.rows.open().shape == (7, 8)
    places = chosen_by_lot(torch.arange(20), 20, 7)
    source = open_samples(denoiser, asked, open_features(classifier, CPU), CPU).at(1.0, None)
    pooled = open_features(classifier, CPU)(in_steps(source.images(0, 20)[0])).pooled
    torch.testing.assert_close(known.rows.open(), pooled[places], rtol=1e-3, atol=1e-3)


def test_what_was_begun_by_mistake_and_measured_nothing_gives_way(tmp_path, classifier, denoiser):
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"reference is '.*empty', which cannot be read"):
        run_once(denoiser, asking(classifier, reference=str(empty)), tmp_path / "out")
    run_once(denoiser, asking(classifier, steps=4, samples=10), tmp_path / "out")


def test_each_guidance_scale_has_a_folder_of_its_own():
    scales = (1.2345671, 1.2345679, 1_000_000.0, 1_000_001.0)
    assert len({folder_name(scale) for scale in scales}) == 4


@pytest.mark.parametrize("count", [1, 3])
def test_a_reference_of_too_few_images_is_refused_before_any_is_made(
    tmp_path, classifier, denoiser, count
):
    images = np.zeros((count, 4, 4, 3), np.uint8)
    np.savez(tmp_path / "few.npz", arr_0=images)
    asked = asking(classifier, reference=str(tmp_path / "few.npz"))
    with pytest.raises(ValueError, match="expected more than 3" if count > 1 else "expected"):
        run_once(denoiser, asked, tmp_path / "out")
    assert not list((tmp_path / "out").glob("guidance-*"))


def test_a_model_without_classes_is_measured_without_guidance(tmp_path, classifier):
    run = denoiser_run(**{"model.num_classes": 0})
    folder = saved_run(tmp_path / "runs" / "free", run)
    scores = run_once(folder, asking(classifier), tmp_path / "out")
    assert [score.guidance for score in scores.scores] == [None]
    assert scores.scores[0].as_asked is None


def test_images_that_are_not_finite_end_the_measurement(tmp_path, classifier):
    class Broken(Source):
        name = "broken"
        size = (4, 4)

        def __len__(self):
            return 10

        def images(self, start, stop):
            return torch.full((stop - start, 1, 4, 4), torch.nan), None

    features = open_features(classifier, CPU)
    known = open_gathered(tmp_path, total=10, num_classes=0)
    words = {"rows": 10, "batch": 5, "device": CPU, "show": lambda _: None}
    with pytest.raises(ValueError, match="broken: images 0 to 5 hold NaN or infinity"):
        gather(Broken(), features, tmp_path, known, **words)


def test_statistics_without_images_leave_precision_out(tmp_path, cache):
    features = scripted(tmp_path / "tuple.pt", Tuple())
    adm = adm_file(tmp_path / "adm.npz", images_of(40), pixels_too=False)
    folder = write_pngs(tmp_path / "x", images_of(12))
    asked = asking(features, samples=12, steps=None, reference=str(adm))
    score = measure_generation(folder, asked, tmp_path / "out", device="cpu").scores[0]
    assert (score.precision, score.recall) == (None, None)
    assert score.distance > 0
    assert score.spatial_distance > 0


# what may be asked


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 9}, "samples is 9, expected 10 at least"),
        ({"features": ""}, "features is '', expected a classifier's run"),
        ({"guidance_scale": (1.0, 1.0)}, "expected each scale once"),
        ({"guidance_scale": (-1.0,)}, "guidance_scale has -1.0, expected 0 or more"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"precision_recall_samples": 3}, "precision_recall_samples is 3, expected at least 4"),
        ({"reference": ""}, "reference is ''"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_is_out_of_range_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SamplesConfig(samples=20, features="x"), **change).check()


def test_the_samplers_that_can_be_asked_for_are_those_there_are():
    assert get_args(asked_module.Sampler) == get_args(SamplerName)


@pytest.mark.parametrize(
    "change",
    [
        {"guidance_scale": (2.0,)},
        {"sampler": "ddim"},
        {"seed": 1},
        {"class_distribution": "reference"},
    ],
)
def test_images_that_are_there_are_not_made_otherwise(tmp_path, classifier, change):
    folder = write_pngs(tmp_path / "x", images_of(12))
    asked = asking(classifier, samples=12, reference=str(folder), **{"steps": None} | change)
    with pytest.raises(ValueError, match=r"the images of .*x are there already"):
        measure_generation(folder, asked, tmp_path / "out", device="cpu")


def test_more_images_than_there_are_cannot_be_judged(tmp_path, classifier):
    folder = write_pngs(tmp_path / "x", images_of(12))
    asked = asking(classifier, samples=13, steps=None, reference=str(folder))
    with pytest.raises(ValueError, match=r"samples is 13, but .*x has 12 images"):
        measure_generation(folder, asked, tmp_path / "out", device="cpu")


def test_an_npz_beside_a_run_is_not_the_run(classifier, denoiser):
    path = write_npz(denoiser / "x.npz", images_of(12))
    asked = asking(classifier, samples=12, steps=None)
    samples = open_samples(path, asked, open_features(classifier, CPU), CPU)
    assert (samples.name, samples.guidances, samples.data) == ("x.npz", (None,), None)


@pytest.mark.parametrize(("classes", "rows"), [(20, 20), (21, 0)])
def test_confusions_of_many_classes_are_not_written_out(classes, rows):
    assert len(generation._of_few(torch.ones(classes, classes, dtype=torch.int64))) == rows


def test_classes_of_another_reference_cannot_be_followed(tmp_path, classifier, denoiser):
    write_pngs(tmp_path / "x" / "cat", images_of(6))
    write_pngs(tmp_path / "x" / "dog", images_of(6, seed=1))
    asked = asking(classifier, class_distribution="reference", reference=str(tmp_path / "x"))
    with pytest.raises(ValueError, match="the model has 3 classes and the reference 2"):
        run_once(denoiser, asked, tmp_path / "out")


def test_a_classifiers_run_makes_no_images(tmp_path, classifier):
    with pytest.raises(ValueError, match="which makes no images"):
        run_once(classifier, asking(classifier), tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="there is nothing at"):
        run_once(tmp_path / "no", asking(classifier), tmp_path / "out")


def test_a_model_without_classes_is_asked_for_none(tmp_path, classifier):
    from onescan.integrations.diffusers import to_diffusers

    to_diffusers(replace(TINY, num_classes=0).build()).save_pretrained(tmp_path / "free")
    pictures = write_pngs(tmp_path / "x", images_of(12))
    asked = asking(classifier, samples=12, reference=str(pictures))
    found = run_once(tmp_path / "free", asked, tmp_path / "out")
    assert (found.class_names, found.labels, found.scores[0].as_asked) == ((), None, None)


def test_a_saved_pipeline_is_measured_as_its_run(tmp_path, classifier, denoiser):
    from onescan.training.sampling import load_pipeline

    load_pipeline(denoiser).save_pretrained(tmp_path / "pipe")
    pictures = write_pngs(tmp_path / "x", images_of(12))
    asked = asking(
        classifier, samples=12, sampler="ddim", guidance_scale=(1.0,), reference=str(pictures)
    )
    ran, loaded = (
        run_once(path, asked, tmp_path / path.name / "out")
        for path in (denoiser, tmp_path / "pipe")
    )
    assert loaded.scores == ran.scores
    with pytest.raises(ValueError, match="reference is 'train', but the images are no run's"):
        run_once(tmp_path / "pipe", replace(asked, reference="train"), tmp_path / "other")


# the command


def test_the_command_writes_numbers_and_a_page(tmp_path, classifier, denoiser, capsys):
    out = tmp_path / "out"
    words = ["evaluate", str(denoiser), "--samples", "20", "--features", str(classifier)]
    words += ["--guidance-scale", "1", "2", "--steps", "2", "--batch-size", "8", "--out", str(out)]
    assert main([*words, "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "Frechet distance in features of runs/judge, 20 images" in printed
    assert f"report: {out / 'report.html'}" in printed
    data = json.loads((out / "generation.json").read_text())
    assert [score["guidance"] for score in data["scores"]] == [1.0, 2.0]
    assert (out / "guidance-2" / "samples.png").exists()
    with Image.open(out / "guidance-1" / "samples.png") as grid:
        assert grid.width == 10 * 66 - 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--samples", "20", "--lengths", "8"], "lengths and samples exclude each other"),
        (["--guidance-scale", "2"], "guidance_scale is '(2.0,)', but requires --samples"),
        (["--samples", "20"], "features is ''"),
        (
            ["--samples", "20", "--workers", "2"],
            "workers is 2, but is not supported with --samples",
        ),
    ],
    ids=["two", "none", "features", "workers"],
)
def test_the_command_refuses_what_does_not_go_together(capsys, words, message):
    assert main(["evaluate", "x", *words]) == 2
    assert message in capsys.readouterr().err


HELP = """
import contextlib, io, sys
from onescan.cli import main
with contextlib.suppress(SystemExit):
    main(["evaluate", "--help"])
assert "torch" not in sys.modules
"""


def test_help_of_the_command_is_light():
    env = os.environ | {"COLUMNS": "100"}
    run = subprocess.run(
        [sys.executable, "-c", HELP],
        capture_output=True,
        text=True,
        env=env,
        cwd=Path(__file__).parents[1],
    )
    assert run.returncode == 0, run.stderr
    assert "--guidance-scale" in run.stdout
