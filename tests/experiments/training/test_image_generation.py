"""Image generation: losses, evaluation, pictures, and runs."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tiny_denoiser import TINY, BarsConfig, denoiser_run
from tiny_run import KilledError, assert_same, raise_at, tiny_run

import onescan
from onescan import configs
from onescan.experiments.data import ImageSplits
from onescan.experiments.data.share import Share
from onescan.experiments.recipes import RECIPES, find_recipe
from onescan.experiments.report import write_report
from onescan.experiments.tasks import ImageClassificationConfig, ImageGenerationConfig
from onescan.experiments.tasks.feature_distance import SampleClassifier
from onescan.experiments.tasks.noising import Noising
from onescan.experiments.training import read_metrics, train
from onescan.experiments.training.evaluation import evaluate
from onescan.experiments.training.logging import read_pictures
from onescan.experiments.training.runs import run_config
from onescan.experiments.training.sampling import load_pipeline
from onescan.inference.classification import classify
from onescan.inputs import ImageFormat
from onescan.models.denoiser import NoiseConfig, SamplerConfig
from onescan.models.image_classifier import ImageClassifierConfig

ROOT = Path(__file__).parents[3]
PREDICTIONS = ("noise", "v", "flow")


class Oracle(torch.nn.Module):
    """Predicts the exact target, because it knows the only image."""

    def __init__(self, x0, config, outputs=1):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.x0, self.noising, self.outputs = x0, Noising(config), outputs
        self.config = dataclasses.replace(TINY, learn_sigma=outputs == 2)

    def forward(self, noisy, timesteps, labels):
        a, s = self.noising._coefficients(timesteps, noisy)
        noise = (noisy - a * self.x0) / s
        target = self.noising.target(self.x0.expand_as(noisy), noise, timesteps)
        return torch.cat([target] + [torch.full_like(target, 1.0)] * (self.outputs - 1), dim=1)


def one_image():
    """A batch of one image, many times."""
    data = BarsConfig(examples=3).build()
    return data.train.images[:1].expand(64, -1, -1, -1), torch.zeros(64, dtype=torch.long)


def task_of(**changes):
    config = configs.replace(ImageGenerationConfig(samples_per_class=0), changes)
    return config.build(BarsConfig().build())


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_an_exact_prediction_has_no_loss(prediction):
    config = NoiseConfig(prediction=prediction)
    task = task_of(**{"noise.prediction": prediction})
    batch = task.corrupt(one_image(), seed=0)
    x0 = task.format.model_input(batch[0])
    loss, metrics = task.loss(Oracle(x0[:1], config), batch)
    assert loss < 1e-4
    assert metrics == {}
    wrong, _ = task.loss(Oracle(x0[:1] + 0.5, config), batch)
    assert wrong > 1e-3


def test_the_loss_is_the_mean_squared_error():
    task, model = task_of(), TINY.build()  # predicts 0
    batch = *_, noise = task.corrupt(one_image(), seed=3)
    loss, _ = task.loss(model, batch)
    torch.testing.assert_close(loss, (noise**2).mean())


def test_noise_does_not_depend_on_the_number_of_processes():
    task, (images, labels) = task_of(), one_image()
    torch.manual_seed(3)
    whole = task.corrupt((images, labels), seed=3)
    for rank in range(4):
        rows = Share(rank, 4)
        torch.manual_seed(3)
        own = task.corrupt(tuple(rows.cut(x, axis=0) for x in (images, labels)), 3, rows)
        torch.testing.assert_close(own, tuple(rows.cut(x, axis=0) for x in whole), atol=0, rtol=0)
    assert len(whole[2].unique()) > 50
    assert whole[3].std().item() == pytest.approx(1, abs=0.1)


def test_learned_variances_add_to_the_loss():
    task = task_of()
    batch = task.corrupt(one_image(), seed=0)
    x0 = task.format.model_input(batch[0])
    loss, metrics = task.loss(Oracle(x0[:1], NoiseConfig(), outputs=2), batch)
    torch.testing.assert_close(loss, metrics["error"] + metrics["variance_bits"])
    assert metrics["error"] < 1e-4
    assert 1e-5 < metrics["variance_bits"] < 1  # the greatest variance where the least is right


def test_the_model_receives_labels_if_it_has_classes():
    seen = []

    class Model(Oracle):
        def forward(self, noisy, timesteps, labels):
            seen.append(labels)
            return torch.zeros_like(noisy)

    task = task_of()
    batch = images, labels, *_ = task.corrupt(one_image(), seed=0)
    model = Model(task.format.model_input(images)[:1], NoiseConfig())
    task.loss(model, batch)
    model.config = dataclasses.replace(TINY, num_classes=0)
    task.loss(model, batch)
    assert torch.equal(seen[0], labels)
    assert seen[1] is None


def test_the_evaluation_of_an_image_does_not_depend_on_its_batch():
    torch.manual_seed(0)
    model = TINY.build()
    torch.nn.init.normal_(model.unpatchify.proj.weight)
    rows = [evaluate(model, task_of(evaluation_batch_size=size)).arrays for size in (24, 7)]
    torch.testing.assert_close(rows[0], rows[1])
    steps = rows[0]["timesteps"]
    assert steps.shape == (24, 4)
    quarters = torch.tensor([0, 250, 500, 750])
    assert ((steps >= quarters) & (steps < quarters + 250)).all()
    assert len(steps.unique()) > 80


def test_a_subset_of_test_images_is_evenly_spaced():
    task = task_of(evaluation_images=5)
    labels = evaluate(TINY.build(), task).arrays["labels"]
    whole = BarsConfig().build().test.labels
    assert torch.equal(labels, whole[[0, 4, 9, 14, 19]])


def classifier_run():
    """A run that classifies bars."""
    return dataclasses.replace(
        denoiser_run(),
        name="classifier",
        model=ImageClassifierConfig(
            image_size=(4, 4), channels=1, patch_size=(2, 2), num_classes=3, width=16, depth=1,
            mixer=TINY.mixer, position=TINY.position, drop_path=0.0, init_std=0.2,
        ),
        task=ImageClassificationConfig(augment=None),
    )  # fmt: skip


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    run = configs.replace(classifier_run(), {"training.epochs": 20})
    result = train(run, tmp_path_factory.mktemp("classifier") / "seed-0")
    assert result.metrics["accuracy"] == 1
    return str(result.folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, classifier):
    """A denoiser trained on bars and evaluated by the classifier."""
    run = denoiser_run(**{
        "training.epochs": 90, "training.evaluate_every": 30.0, "task.classifier": classifier,
        "task.sampler.steps": 20, "training.checkpoint_every": 30.0,
    })  # fmt: skip
    return train(run, tmp_path_factory.mktemp("trained") / "seed-0")


@pytest.mark.slow
def test_a_denoiser_learns_to_generate_requested_classes(trained):
    tests = [line for line in read_metrics(trained.folder) if line["split"] == "test"]
    assert tests[-1]["loss"] < tests[0]["loss"]
    assert trained.metrics["label_accuracy"] >= 0.9
    assert tests[-1]["feature_distance"] < 0.3 * evaluate_fresh(trained).metrics["feature_distance"]


def evaluate_fresh(trained):
    run = run_config(trained.folder)
    return evaluate(run.model.build(), run.task.build(run.data.build()))


@pytest.mark.slow
def test_the_best_weights_have_the_least_distance(trained):
    tests = [line for line in read_metrics(trained.folder) if line["split"] == "test"]
    best = onescan.load(trained.folder / "best.safetensors").metrics
    assert best["feature_distance"] == min(line["feature_distance"] for line in tests)


@pytest.mark.slow
def test_each_evaluation_saves_a_picture(trained):
    pictures = read_pictures(trained.folder)
    assert list(pictures) == [90, 180, 270]
    image = read_gray(pictures[270])
    width = image.shape[1] // 3
    left, right, none = (image[:, i * width : (i + 1) * width] for i in range(3))
    half = width // 2
    assert left[:, :half].mean() > left[:, half:].mean() + 40
    assert right[:, half:].mean() > right[:, :half].mean() + 40
    assert none.mean() < min(left.mean(), right.mean())


def read_gray(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("L"), float)


@pytest.mark.slow
def test_the_report_shows_pictures_and_errors_over_timesteps(trained, tmp_path):
    page = write_report([trained], tmp_path / "report.html").read_text()
    for words in (
        "turns noise into images", "After 270 steps", "After 90 steps", "<span>left</span>",
        "Error over timesteps", "Test label accuracy", "Test feature distance",
        "Position kernels", "Rotation frequencies",
    ):  # fmt: skip
        assert words in page
    assert "data:image/png;base64," in page


@pytest.mark.slow
def test_a_resumed_run_has_the_same_pictures(tmp_path):
    whole = train(denoiser_run(), tmp_path / "whole")
    with pytest.raises(KilledError):
        train(denoiser_run(), tmp_path / "killed", progress=raise_at(5, KilledError()))
    resumed = train(denoiser_run(), tmp_path / "killed")
    assert_same(resumed, whole)
    ours, theirs = (read_pictures(result.folder) for result in (resumed, whole))
    assert list(ours) == list(theirs) == [3, 6, 9]
    assert all(ours[step].read_bytes() == theirs[step].read_bytes() for step in ours)


@pytest.mark.slow
def test_pictures_of_an_overwritten_run_are_removed(tmp_path):
    train(denoiser_run(), tmp_path / "run")
    run = denoiser_run(**{"training.epochs": 1, "task.samples_per_class": 0})
    train(run, tmp_path / "run", overwrite=True)
    assert read_pictures(tmp_path / "run") == {}
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    assert "task.samples_per_class is 0" in page


def test_tensorboard_gets_the_pictures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = denoiser_run(**{"training.epochs": 1})
    machine = dataclasses.replace(run.machine, trackers=("tensorboard",))
    result = train(dataclasses.replace(run, machine=machine), tmp_path / "run")
    events = EventAccumulator(str(result.folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Images("picture")] == [3]


@pytest.mark.slow
def test_unconditional_models_train_and_sample(tmp_path):
    run = denoiser_run(**{"model.num_classes": 0, "training.epochs": 1})
    result = train(run, tmp_path / "run")
    assert list(read_pictures(result.folder)) == [3]
    generated = load_pipeline(result.folder)(batch_size=2, num_inference_steps=5, output_type="pt")
    assert generated.images.shape == (2, 1, 4, 4)
    page = write_report([result], tmp_path / "report.html").read_text()
    assert "Unselected samples" in page
    assert "one column per class" not in page


def test_unconditional_models_have_no_label_accuracy(classifier):
    task = task_of(classifier=classifier, **{"sampler.steps": 2})
    model = dataclasses.replace(TINY, num_classes=0).build()
    assert set(evaluate(model, task).metrics) == {"loss", "feature_distance"}


def test_classifiers_with_a_distillation_head_average_both():
    torch.manual_seed(0)
    config = dataclasses.replace(classifier_run().model, distillation_token=True)
    model = config.build().eval()
    format = BarsConfig().build().format
    pixels = (torch.rand(9, 1, 4, 4) * 255).round() / 255
    seen = SampleClassifier(model=model, format=format)(pixels)
    torch.testing.assert_close(seen.probabilities, model(format.standardize(pixels)).softmax(1))
    assert seen.pooled.shape == (9, 2 * config.width)


def test_classifiers_ignore_autocast(classifier):
    classify_samples = task_of(classifier=classifier).sample_classifier
    pixels = torch.rand(9, 1, 4, 4)
    whole = classify_samples(pixels).pooled
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(classify_samples(pixels).pooled, whole)


@pytest.mark.sampled
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_every_prediction_target_trains_and_samples(prediction, tmp_path):
    sigma = {"model.learn_sigma": True} if prediction == "noise" else {}
    run = denoiser_run(**{"task.noise.prediction": prediction, "training.epochs": 1}, **sigma)
    assert np.isfinite(train(run, tmp_path / "run").metrics["loss"])


@pytest.mark.slow
def test_two_processes_train_one_denoiser_with_ddp_and_fsdp(tmp_path):
    """Each process draws its own noise, so that DDP and FSDP are compared."""
    script = str(ROOT / "tests" / "helpers" / "two_denoisers.py")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         script, str(tmp_path)],
        capture_output=True, text=True, timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    copied, split = (load_file(tmp_path / name / "model.safetensors") for name in ("ddp", "fsdp"))
    torch.testing.assert_close(copied, split, atol=1e-4, rtol=0)
    pictures = [read_pictures(tmp_path / name) for name in ("ddp", "fsdp")]
    assert list(pictures[0]) == list(pictures[1]) == [3]
    a, b = (read_gray(each[3]) for each in pictures)
    assert np.abs(a - b).max() <= 1  # of 255


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise.prediction": "flow", "sampler.sampler": "ddim"}, "sampler is 'ddim'"),
        ({"sampler.steps": 0}, "steps is 0"),
        ({"samples_per_class": -1}, "task.samples_per_class is -1"),
        ({"evaluation_images": 0}, "task.evaluation_images is 0"),
        ({"evaluation_batch_size": 0}, "task.evaluation_batch_size is 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_invalid_settings_are_rejected(changes, message):
    with pytest.raises(ValueError, match=message):
        task_of(**changes)


def test_invalid_classifiers_are_rejected(tmp_path, classifier):
    other = tiny_run(epochs=1)
    folder = train(other, tmp_path / "other").folder
    with pytest.raises(
        ValueError, match=r"task.classifier '.*' calls class 0 'rows', but the data"
    ):
        load_classifier(str(folder))
    with pytest.raises(FileNotFoundError, match=r"task.classifier is 'no/such/run'"):
        load_classifier("no/such/run")
    denoiser = train(denoiser_run(**{"training.epochs": 1}), tmp_path / "denoiser").folder
    with pytest.raises(ValueError, match="its model is a Denoiser, expected an image classifier"):
        load_classifier(str(denoiser))
    load_classifier(classifier)


def load_classifier(name):
    """Load the classifier, as the first step does."""
    torch.manual_seed(0)
    task = task_of(classifier=name)
    task.loss(TINY.build(), next_batch(task))


def next_batch(task):
    walk = task.train.examples(seed=0)
    return task.corrupt(task.train.read([next(walk)[0] for _ in range(4)]).batch, seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.num_classes": 4}, "model.num_classes is 4, but the data has 3 classes"),
        (
            {"model.learn_sigma": True, "task.noise.prediction": "flow"},
            "model.learn_sigma is True, but task.noise.prediction is 'flow'",
        ),
        (
            {"model.num_classes": 0, "task.sampler.guidance_scale": 2.0},
            "task.sampler.guidance_scale is 2.0, but model.num_classes is 0",
        ),
        (
            {"model.label_dropout": 0.0, "task.sampler.guidance_scale": 2.0},
            "task.sampler.guidance_scale is 2.0, but model.label_dropout is 0",
        ),
    ],
    ids=["classes", "variances", "no-classes", "no-dropout"],
)
def test_models_that_do_not_fit_are_rejected_before_the_first_step(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(denoiser_run(**changes), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()


def test_other_tasks_have_no_pictures(tmp_path):
    result = train(tiny_run(epochs=1), tmp_path / "run")
    assert read_pictures(result.folder) == {}


def test_recipes_have_the_settings_of_the_paper():
    """Table 12, column IG; Table 3 trains its own model longer."""
    names = [name for name in RECIPES if name.startswith("imagenet_lightnet_dit")]
    names.remove("imagenet_lightnet_dit_xl_672m")
    assert len(names) == 12
    for name in names:
        run = find_recipe(name)()
        t = run.training
        assert (t.steps, t.batch_size, t.learning_rate) == (400_000, 256, 1e-4)
        assert (t.betas, t.weight_decay, t.warmup, t.schedule) == ((0.9, 0.98), 0, 0, "constant")
        assert run.task.noise == NoiseConfig()
        assert run.model == onescan.preset(run.name.removeprefix("imagenet_"))


def test_pixels_invert_the_models_input():
    format = ImageFormat(channels=1, height=2, width=2, mean=(0.3,), std=(0.2,))
    pixels = torch.rand(3, 1, 2, 2)
    torch.testing.assert_close(format.pixels(format.model_input(pixels)), pixels)
    assert format.pixels(torch.tensor([[[9.0, -9.0]]])).tolist() == [[[1.0, 0.0]]]


def test_the_default_sampler_depends_on_the_noise():
    assert SamplerConfig().resolved(NoiseConfig(prediction="flow")) == "euler"
    assert isinstance(BarsConfig().build(), ImageSplits)


@pytest.mark.slow
def test_denoisers_do_not_classify(trained, tmp_path):
    checkpoint = onescan.load(trained.folder)
    with pytest.raises(ValueError, match="the model is a Denoiser, which generates images"):
        classify(checkpoint.model, [tmp_path / "x.png"], checkpoint.format)
