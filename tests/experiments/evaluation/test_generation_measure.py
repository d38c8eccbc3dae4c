"""Evaluation of generated images: scores, resuming, rejected settings, and the command."""

import json
import re
import signal
from dataclasses import replace
from inspect import unwrap
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from tiny_denoiser import BarsConfig, denoiser_run
from tiny_generation import (
    CPU,
    Scripted,
    Tuple,
    adm_file,
    images_of,
    samples_config,
    saved_classifier,
    saved_denoiser,
    saved_run,
    scripted,
    write_npz,
    write_pngs,
)

from onescan.cli import main
from onescan.experiments.evaluation import config as config_module
from onescan.experiments.evaluation import generation, image_scores
from onescan.experiments.evaluation.config import SamplesConfig
from onescan.experiments.evaluation.features import open_features
from onescan.experiments.evaluation.generation import first_images, folder_name, measure_generation
from onescan.experiments.evaluation.image_scores import (
    Accumulator,
    InceptionScore,
    precision_recall,
)
from onescan.experiments.evaluation.images import (
    DenoiserSource,
    Source,
    open_samples,
    round_to_bytes,
)
from onescan.experiments.tasks.feature_distance import feature_distance
from onescan.models.denoiser import SamplerName


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONESCAN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def classifier(tmp_path):
    return saved_classifier(tmp_path)


@pytest.fixture
def denoiser(tmp_path):
    return saved_denoiser(tmp_path)


@pytest.fixture
def pictures(tmp_path):
    return write_pngs(tmp_path / "pictures", images_of(12))


def measure(path, config, out):
    return measure_generation(path, config, out, device="cpu")


def test_generated_images_depend_on_seed_and_index(classifier, denoiser):
    features, config = open_features(classifier, CPU), samples_config(classifier)
    source = open_samples(denoiser, config, features, CPU).at(1.0, ())
    images, labels = source.images(2, 7)
    assert (labels.tolist(), source.size) == ([2, 0, 1, 2, 0], (4, 4))
    torch.testing.assert_close(source.images(4, 6)[0], images[2:4])
    other = open_samples(denoiser, replace(config, seed=1), features, CPU).at(1.0, ())
    assert (other.images(2, 7)[0] - images).abs().max() > 1e-3


def test_classes_may_have_the_frequencies_of_the_reference(tmp_path, classifier, denoiser):
    config = samples_config(classifier, class_distribution="reference")
    samples = open_samples(denoiser, config, open_features(classifier, CPU), CPU)
    source = samples.at(1.0, (1, 0, 3))
    labels = [source._label(i) for i in range(2000)]
    assert set(labels) == {0, 2}
    assert labels.count(2) / 2000 == pytest.approx(0.75, abs=0.03)
    for name in ("cat", "dog"):
        write_pngs(tmp_path / "x" / name, images_of(6))
    with pytest.raises(ValueError, match="2 known classes and the model has 3"):
        measure(denoiser, replace(config, reference=str(tmp_path / "x")), tmp_path / "out")


def test_the_reference_must_have_the_models_order_of_classes(tmp_path, classifier, denoiser):
    config = samples_config(
        classifier, class_distribution="reference", reference=str(tmp_path / "x")
    )
    names = open_samples(denoiser, config, open_features(classifier, CPU), CPU).class_names
    for name in (names[0], names[1], "other"):
        write_pngs(tmp_path / "x" / name, images_of(6))
    with pytest.raises(ValueError, match=r"is '.*' in the reference and '.*' in the model"):
        measure(denoiser, config, tmp_path / "out")


def test_kept_features_are_of_all_classes_also_if_classes_take_turns(tmp_path, classifier):
    features = open_features(classifier, CPU)
    source = Images(5000)
    order = Accumulator(source, 5000, features, 1000, tmp_path).order
    for classes in (10, 25):
        counts = (torch.arange(5000) % classes)[order < 1000].bincount(minlength=classes)
        assert counts.sum() == 1000
        assert (counts - 1000 / classes).abs().max() < 5 * (1000 / classes) ** 0.5


# Scores


def expected_scores(images, real, features):
    found, true = features(round_to_bytes(images)), features(round_to_bytes(real))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    score = InceptionScore(3)
    score.add(found.probabilities, ((order + 1) * 10 - 1) // len(images))
    return {
        "distance": feature_distance(found.pooled, true.pooled),
        "spatial_distance": feature_distance(found.spatial, true.spatial),
        "class_score": score.score().mean,
        "class_score_std": score.score().std,
        **precision_recall(true.pooled, found.pooled)._asdict(),
    }


def test_scores_of_a_run_equal_those_of_all_images_at_once(tmp_path, classifier, denoiser):
    config = samples_config(classifier, guidance_scale=(2.0, 1.0))
    found = measure(denoiser, config, tmp_path / "out")
    assert [score.guidance for score in found.scores] == [1.0, 2.0]
    features = open_features(classifier, CPU)
    samples = open_samples(denoiser, config, features, CPU)
    train = BarsConfig().build().train
    for score in found.scores:
        images, labels = samples.at(score.guidance, ()).images(0, 20)
        for name, expected in expected_scores(images, train.images, features).items():
            assert getattr(score, name) == pytest.approx(expected, rel=1e-3, abs=1e-4), name
        predicted = features(round_to_bytes(images)).probabilities.argmax(dim=1)
        confusion = torch.zeros(3, 3, dtype=torch.long)
        for pair in zip(labels, predicted, strict=True):
            confusion[pair] += 1
        assert confusion.tolist() == [list(row) for row in score.confusion]
        assert confusion.sum(dim=1).tolist() == list(score.requested)
        assert confusion.diagonal().tolist() == list(score.right)
        assert score.class_accuracy == pytest.approx(confusion.trace().item() / 20)
        shown = first_images(tmp_path / "out" / score.folder)
        assert torch.equal(shown.labels, labels)
        assert (shown.images / 255 - images).abs().max() < 1 / 255
    assert found.scores[0].distance != found.scores[1].distance
    assert (found.real.name, found.real.count) == ("train, Bars", 24)
    predicted = features(round_to_bytes(train.images)).probabilities.argmax(dim=1)
    accuracy = (predicted == train.labels).double().mean().item()
    assert found.real.class_accuracy == pytest.approx(accuracy)
    assert found.distance_name == "Frechet distance in features of runs/classifier"
    assert (found.sampler, found.steps, found.labels, found.seed) == ("ddim", 2, "uniform", 0)


@pytest.mark.slow
def test_samples_in_an_npz_file_have_the_scores_of_the_run(tmp_path, classifier, denoiser):
    out, pictures = tmp_path / "x.npz", tmp_path / "reference"
    argv = ["--num-images", "12", "--steps", "2", "--guidance-scale", "1.5", "--batch-size", "6"]
    assert main(["sample", str(denoiser), *argv, "--out", str(out)]) == 0
    write_pngs(pictures, BarsConfig().build().train.images.expand(-1, 3, -1, -1))
    config = samples_config(classifier, samples=12, guidance_scale=(1.5,))
    of_run = measure(denoiser, config, tmp_path / "a").scores[0]
    config = samples_config(classifier, samples=12, steps=None, reference=str(pictures))
    of_file = measure(out, config, tmp_path / "b").scores[0]
    assert of_file.confusion == of_run.confusion
    for name in (
        "distance",
        "spatial_distance",
        "class_score",
        "precision",
        "recall",
        "class_accuracy",
    ):
        expected = pytest.approx(getattr(of_run, name), rel=1e-4, abs=1e-5)
        assert getattr(of_file, name) == expected, name


def test_distance_to_the_same_images_is_zero(tmp_path, classifier):
    folder = write_pngs(tmp_path / "x", images_of(30))
    config = samples_config(classifier, samples=30, steps=None, reference=str(folder))
    score = measure(folder, config, tmp_path / "out").scores[0]
    assert score.distance == pytest.approx(0, abs=1e-6)
    assert score.spatial_distance == pytest.approx(0, abs=1e-5)
    assert (score.precision, score.recall) == (1.0, 1.0)
    assert (score.guidance, score.class_accuracy, score.confusion) == (None, None, ())


def test_only_distances_in_inception_features_are_called_fid(tmp_path, pictures):
    features = scripted(tmp_path / "inception.pt", Scripted())
    config = samples_config(features, samples=12, steps=None, reference=str(pictures))
    found = measure(pictures, config, tmp_path / "out")
    assert (found.distance_name, found.is_singular) == ("FID", True)
    assert found.scores[0].spatial_distance is None
    assert replace(found, samples=50_000).distance_name == "FID-50K"
    ours = replace(found, samples=50_000, is_inception=False)
    assert "FID" not in ours.distance_name + "".join(ours.short_names.values())


def test_statistics_without_images_have_no_precision(tmp_path, pictures):
    features = scripted(tmp_path / "tuple.pt", Tuple())
    adm = adm_file(tmp_path / "adm.npz", images_of(40), with_images=False)
    config = samples_config(features, samples=12, steps=None, reference=str(adm))
    score = measure(pictures, config, tmp_path / "out").scores[0]
    assert (score.precision, score.recall) == (None, None)
    assert min(score.distance, score.spatial_distance) > 0


def test_unconditional_models_are_measured_without_guidance(tmp_path, classifier, pictures):
    run = saved_run(tmp_path / "runs" / "free", denoiser_run(**{"model.num_classes": 0}))
    config = samples_config(classifier, samples=12, reference=str(pictures))
    scores = measure(run, config, tmp_path / "out")
    assert (scores.class_names, scores.labels) == ((), None)
    assert (scores.scores[0].guidance, scores.scores[0].class_accuracy) == (None, None)


def test_a_saved_pipeline_has_the_scores_of_its_run(tmp_path, classifier, denoiser, pictures):
    from onescan.experiments.training.sampling import load_pipeline

    load_pipeline(denoiser).save_pretrained(tmp_path / "pipe")
    changes = {"samples": 12, "sampler": "ddim", "guidance_scale": (1.0,)}
    config = samples_config(classifier, reference=str(pictures), **changes)
    of_run = measure(denoiser, config, tmp_path / "a")
    assert measure(tmp_path / "pipe", config, tmp_path / "b").scores == of_run.scores
    with pytest.raises(ValueError, match="reference is 'train', but there is no run"):
        measure(tmp_path / "pipe", replace(config, reference="train"), tmp_path / "c")


@pytest.mark.sampled
@pytest.mark.parametrize(("limit", "rows"), [(3, 3), (2, 0)])
def test_large_confusion_matrices_are_left_out(
    tmp_path, classifier, denoiser, monkeypatch, limit, rows
):
    monkeypatch.setattr(generation, "MOST_CONFUSED", limit)
    config = samples_config(classifier, guidance_scale=(1.0,))
    score = measure(denoiser, config, tmp_path / "out").scores[0]
    assert (len(score.confusion), len(score.requested)) == (rows, 3)


# Resuming


class KilledError(BaseException):
    """Stands in for SIGKILL."""


@pytest.mark.slow
@pytest.mark.parametrize("batches", [0, 2, 5])
def test_a_killed_evaluation_resumes_with_the_same_bits(
    tmp_path, classifier, denoiser, monkeypatch, batches
):
    config = samples_config(classifier, guidance_scale=(1.0, 3.0))
    whole = measure(denoiser, config, tmp_path / "whole")
    monkeypatch.setattr(image_scores, "SAVE_EVERY_S", 0.0)
    images, done = DenoiserSource.images, []

    def images_or_kill(source, start, stop):
        if len(done) == batches:
            raise KilledError
        done.append(start)
        return images(source, start, stop)

    monkeypatch.setattr(DenoiserSource, "images", images_or_kill)
    with pytest.raises(KilledError):
        measure(denoiser, config, tmp_path / "out")
    assert done == [0, 6, 12, 18, 0][:batches]
    monkeypatch.setattr(DenoiserSource, "images", images)
    assert measure(denoiser, config, tmp_path / "out") == whole
    for scale in ("guidance-1", "guidance-3"):
        ours, theirs = (tmp_path / name / scale for name in ("out", "whole"))
        for file in ("state.safetensors", "samples.png"):
            assert (ours / file).read_bytes() == (theirs / file).read_bytes(), file


def test_an_interrupt_saves_the_state(tmp_path, classifier, denoiser, monkeypatch):
    config = samples_config(classifier, guidance_scale=(1.0,))
    whole = measure(denoiser, config, tmp_path / "whole")
    images = DenoiserSource.images

    def images_and_interrupt(source, start, stop):
        signal.raise_signal(signal.SIGINT)
        return images(source, start, stop)

    monkeypatch.setattr(DenoiserSource, "images", images_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure(denoiser, config, tmp_path / "out")
    assert len(first_images(tmp_path / "out" / "guidance-1").images) == 6
    monkeypatch.setattr(DenoiserSource, "images", images)
    assert measure(denoiser, config, tmp_path / "out") == whole


def test_finished_images_are_not_generated_again(tmp_path, classifier, denoiser, monkeypatch):
    config = samples_config(classifier, guidance_scale=(1.0,))
    first = measure(denoiser, config, tmp_path / "out")
    monkeypatch.setattr(DenoiserSource, "images", None)
    assert measure(denoiser, config, tmp_path / "out") == first
    with pytest.raises(TypeError):
        measure(denoiser, replace(config, guidance_scale=(1.0, 2.0)), tmp_path / "out")


@pytest.mark.sampled
@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"samples": 21},
        {"steps": 3},
        {"sampler": "dpm"},
        {"class_distribution": "reference"},
        {"precision_recall_samples": 7},
    ],
)
def test_a_folder_with_other_settings_is_rejected(tmp_path, classifier, denoiser, change):
    config = samples_config(classifier, guidance_scale=(1.0,))
    measure(denoiser, config, tmp_path / "out")
    before = sorted(tmp_path.glob("out/**/*"))
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=rf"out holds images with {name} .*{value!r}"):
        measure(denoiser, replace(config, guidance_scale=(4.0,), **change), tmp_path / "out")
    assert sorted(tmp_path.glob("out/**/*")) == before


def test_a_folder_of_other_weights_is_rejected(tmp_path, classifier, denoiser):
    measure(denoiser, samples_config(classifier), tmp_path / "out")
    saved_run(denoiser, denoiser_run(), seed=8)
    with pytest.raises(ValueError, match="holds images with images"):
        measure(denoiser, samples_config(classifier), tmp_path / "out")


@pytest.mark.sampled
@pytest.mark.parametrize("file", ["guidance-1/state.safetensors", "plan.json"])
@pytest.mark.parametrize("change", [lambda x: x[:-5], lambda x: b"\x01" + x[1:]])
def test_damaged_files_are_rejected(tmp_path, classifier, denoiser, file, change):
    config = samples_config(classifier, guidance_scale=(1.0,))
    measure(denoiser, config, tmp_path / "out")
    path = tmp_path / "out" / file
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=f"{file} is damaged.*remove"):
        measure(denoiser, config, tmp_path / "out")


def test_each_guidance_scale_has_its_own_folder():
    scales = (1.2345671, 1.2345679, 1_000_000.0, 1_000_001.0)
    assert len({folder_name(scale) for scale in scales}) == 4


# Rejected settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("samples", 9),
        ("features", ""),
        ("guidance_scale", (1.0, 1.0)),
        ("guidance_scale", (-1.0,)),
        ("batch_size", 0),
        ("steps", 0),
        ("precision_recall_samples", 3),
        ("reference", ""),
    ],
)
def test_settings_out_of_range_are_rejected(name, value):
    shown = value[0] if isinstance(value, tuple) else value
    with pytest.raises(ValueError, match=f"{name} .*{re.escape(str(shown))}"):
        replace(SamplesConfig(samples=20, features="x"), **{name: value}).check()


def test_the_samplers_of_the_command_are_those_of_denoisers():
    assert get_args(config_module.Sampler) == get_args(SamplerName)


@pytest.mark.parametrize(
    "change",
    [
        {"guidance_scale": (2.0,)},
        {"sampler": "ddim"},
        {"seed": 1},
        {"steps": 3},
        {"class_distribution": "reference"},
        {"samples": 13},
    ],
)
def test_settings_of_generation_are_rejected_for_existing_images(
    tmp_path, classifier, pictures, change
):
    settings = {"samples": 12, "steps": None, "reference": str(pictures)} | change
    with pytest.raises(ValueError, match=next(iter(change))):
        measure(pictures, samples_config(classifier, **settings), tmp_path / "out")


def test_an_npz_file_in_a_runs_folder_is_not_the_run(classifier, denoiser):
    path = write_npz(denoiser / "x.npz", images_of(12))
    config = samples_config(classifier, samples=12, steps=None)
    samples = open_samples(path, config, open_features(classifier, CPU), CPU)
    assert samples.name == "x.npz"


def test_paths_without_images_are_rejected(tmp_path, classifier, denoiser):
    config = samples_config(classifier)
    with pytest.raises(ValueError, match="is a run of an ImageClassifier, which"):
        measure(classifier, config, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="no such"):
        measure(tmp_path / "no such", config, tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"reference is '.*empty', which cannot be read"):
        measure(denoiser, replace(config, reference=str(tmp_path / "empty")), tmp_path / "out")
    assert not list((tmp_path / "out").glob("guidance-*"))


class Images(Source):
    """Images of one value."""

    name, size = "constant", (4, 4)

    def __init__(self, count, value=0.0):
        self.count, self.value = count, value

    def __len__(self):
        return self.count

    def images(self, start, stop):
        return torch.full((stop - start, 1, 4, 4), self.value), None


def test_images_that_are_not_finite_are_rejected(tmp_path, classifier):
    source = Images(10, torch.nan)
    accumulator = Accumulator(source, 10, open_features(classifier, CPU), 10, tmp_path)
    with pytest.raises(ValueError, match="constant: images 0 to 5 contain NaN"):
        accumulator.read(source, batch_size=5, name="", progress=False)


# The command


def test_the_command_writes_scores_and_a_page(tmp_path, classifier, denoiser, capsys):
    out = tmp_path / "out"
    argv = ["evaluate", str(denoiser), "--samples", "20", "--features", str(classifier)]
    argv += ["--guidance-scale", "1", "2", "--steps", "2", "--batch-size", "8", "--out", str(out)]
    assert main([*argv, "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "Frechet distance in features of runs/classifier, 20 images" in printed
    assert f"report: {out / 'report.html'}" in printed
    data = json.loads((out / "generation.json").read_text())
    assert [score["guidance"] for score in data["scores"]] == [1.0, 2.0]
    assert (out / "guidance-2" / "samples.png").exists()


@pytest.mark.parametrize(
    "argv", [["--samples", "20", "--lengths", "8"], ["--guidance-scale", "2"], ["--samples", "20"]]
)
def test_the_command_rejects_options_that_exclude_each_other(capsys, argv):
    assert main(["evaluate", "x", *argv]) == 2
    assert capsys.readouterr().err.startswith("onescan: ")


def test_classes_are_the_same_if_they_have_the_same_names():
    same = unwrap(generation._has_same_classes)
    cats, dogs, nameless = (
        SimpleNamespace(class_names=names) for names in (("a", "b"), ("b",), ())
    )
    assert same(cats, cats)
    assert not same(cats, dogs)
    assert not same(nameless, nameless)
