"""Machine settings, precision, EMA and data loading, and that they keep the numbers of a run."""

import dataclasses
import logging
import math
import multiprocessing
import os
import shutil
import signal
from itertools import islice

import pytest
import torch
from safetensors.torch import load_file
from tiny_denoiser import TINY
from tiny_images import write_folders
from tiny_run import (
    StripesConfig,
    TinyModelConfig,
    assert_same,
    interrupt,
    tiny_run,
    untimed,
)
from two_processes import lightnet_run

from onescan import configs
from onescan.cli import main
from onescan.experiments.data import (
    Example,
    ImageDatasetConfig,
    ImageTensors,
    LoadedBatch,
    PixelImageConfig,
)
from onescan.experiments.tasks import (
    BatchPlan,
    ImageClassification,
    ImageClassificationConfig,
    ImageGenerationConfig,
    SequenceClassificationConfig,
)
from onescan.experiments.training import MachineConfig, data, evaluate, loop, read_metrics, train
from onescan.experiments.training.data import Loader
from onescan.experiments.training.folder import read_manifest
from onescan.experiments.training.optim import EMA, build_scaler, underflowed
from onescan.experiments.training.state import TrainingState
from onescan.inference.loading import load
from onescan.layers.basic import GLUConfig
from onescan.layers.mixers import LightNetMixerConfig
from onescan.layers.mixers.lightnet import LightNetMixer
from onescan.models.sequence_classifier import SequenceClassifierConfig
from onescan.ops.backend import preferred_backend


def short_run(drop_path=0.0, **machine):
    run = lightnet_run(**machine)
    return configs.replace(run, {"training.steps": 6, "model.drop_path": drop_path})


def losses(folder):
    lines = [line for line in read_metrics(folder) if line["split"] == "train"]
    return torch.tensor([line["loss"] for line in lines])


# Settings that keep the numbers


@pytest.mark.slow
def test_accumulated_gradients_equal_those_of_the_whole_batch(tmp_path):
    whole = train(short_run(), tmp_path / "whole").folder
    parts = train(short_run(gradient_accumulation_steps=4), tmp_path / "parts").folder
    torch.testing.assert_close(losses(parts), losses(whole), atol=1e-5, rtol=0)
    norms = [[line["gradient_norm"] for line in read_metrics(f)[:-1]] for f in (parts, whole)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.slow
def test_recomputation_and_workers_keep_every_bit(tmp_path, monkeypatch):
    calls, forward = [], LightNetMixer.forward

    def counting(self, *args, **kwargs):
        calls.append(self.training)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LightNetMixer, "forward", counting)
    whole = train(short_run(drop_path=0.5), tmp_path / "whole")
    assert sum(calls) == 6 * 2  # steps, blocks
    calls.clear()
    machine = {"gradient_checkpointing": True, "workers": 2}
    assert_same(train(short_run(drop_path=0.5, **machine), tmp_path / "other"), whole)
    assert sum(calls) == 2 * 6 * 2


@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_learns_as_well(tmp_path, precision):
    whole = train(short_run(), tmp_path / "whole").folder
    run = configs.replace(short_run(), {"training.precision": precision})
    half = train(run, tmp_path / "half").folder
    difference = (losses(half) - losses(whole)).abs()
    assert 0 < difference.max() < 0.05
    norms = [read_metrics(folder)[3]["gradient_norm"] for folder in (half, whole)]
    assert norms[0] == pytest.approx(norms[1], rel=0.1)
    weights = load_file(half / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("name", "value"), [("gradient_accumulation_steps", 3), ("gradient_checkpointing", True)]
)
def test_impossible_settings_are_refused(tmp_path, name, value):
    run = configs.replace(tiny_run(), {f"machine.{name}": value})  # a model without blocks
    with pytest.raises(ValueError, match=rf"machine\.{name}.* {value}"):
        train(run, tmp_path)


# Backend and precision


@pytest.fixture
def settings_seen(monkeypatch):
    """The backend and the precision of matrix products at each call of a LightNet mixer."""
    seen, forward = set(), LightNetMixer.forward

    def spying(self, *args, **kwargs):
        seen.add((preferred_backend(), torch.get_float32_matmul_precision()))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LightNetMixer, "forward", spying)
    return seen


def test_backend_and_matmul_precision_hold_in_training_and_evaluation(tmp_path, settings_seen):
    run = short_run(backend="torch", matmul_precision="high")
    train(run, tmp_path)
    assert settings_seen == {("torch", "high")}
    assert (preferred_backend(), torch.get_float32_matmul_precision()) == ("auto", "highest")
    (environment,) = read_manifest(tmp_path).environments
    assert (environment.backend, environment.matmul_precision) == ("torch", "high")
    assert environment.kernels == ()


def test_commands_compute_as_requested(settings_seen):
    flags = ["--backend", "torch", "--matmul-precision", "medium", "--workers", "0"]
    assert main(["evaluate", "zoo/digits_lightnet", *flags]) == 0
    assert settings_seen == {("torch", "medium")}
    assert (preferred_backend(), torch.get_float32_matmul_precision()) == ("auto", "highest")


def test_the_triton_backend_needs_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="backend is 'triton', but torch finds no GPU"):
        train(short_run(backend="triton", device="cpu"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert main(["evaluate", "zoo/digits_lightnet", "--backend", "triton"]) == 2
    assert "is 'triton', but torch finds no GPU" in capsys.readouterr().err


def test_a_resumed_run_shows_what_has_changed(tmp_path, capsys):
    interrupt(short_run(), tmp_path, 3)
    capsys.readouterr()
    run = short_run(backend="torch", matmul_precision="high")
    train(run, tmp_path, progress=True)
    changes = [line for line in capsys.readouterr().err.splitlines() if "changed: " in line]
    assert changes == [
        "changed: backend was auto and is now torch",
        "changed: matmul_precision was highest and is now high",
    ]
    assert [e.since_step for e in read_manifest(tmp_path).environments] == [0, 3]


@pytest.mark.parametrize(
    ("setting", "value", "known"),
    [("backend", "cuda", "auto, torch, triton"), ("matmul_precision", "tf32", "highest, high")],
)
def test_unknown_machine_settings_are_refused(setting, value, known):
    machine = MachineConfig()
    object.__setattr__(machine, setting, value)  # past the type checks of tests
    with pytest.raises(ValueError, match=rf"machine\.{setting} '{value}' is unknown.*{known}"):
        machine.__post_init__()


@pytest.mark.compile
def test_compiled_blocks_train(tmp_path):
    whole = train(short_run(), tmp_path / "whole").folder
    compiled = train(short_run(compile=True), tmp_path / "compiled").folder
    torch.testing.assert_close(losses(compiled), losses(whole), atol=1e-4, rtol=0)
    assert load(compiled).metrics == load(compiled / "best.safetensors").metrics


# Averaged weights, the best weights, and patience


def test_the_ema_follows_its_formula():
    model = torch.nn.BatchNorm1d(1)
    weights = [0.0, 3.0, -2.0, 5.0]
    model.weight.data.fill_(weights[0])
    ema, want = EMA(model, 0.3), weights[0]
    for step, weight in enumerate(weights[1:], start=1):
        model.weight.data.fill_(weight)
        model.num_batches_tracked.fill_(step)
        ema.update(model, step)
        keep = min(0.3, (1 + step) / (10 + step))
        want = keep * want + (1 - keep) * weight
    assert ema.tensors["weight"].item() == pytest.approx(want)
    assert ema.tensors["num_batches_tracked"] == 3
    with ema.swapped_into(model):
        assert model.weight.item() == pytest.approx(want)
    assert model.weight.item() == 5.0


def test_the_ema_is_evaluated_and_saved(tmp_path):
    plain = train(tiny_run(), tmp_path / "plain")
    average = train(tiny_run(ema_decay=0.99), tmp_path / "average")
    checkpoint = load(average.folder)
    task = tiny_run().task.build(StripesConfig().build())
    assert evaluate(checkpoint.model, task).metrics == checkpoint.metrics == average.metrics
    trained = [
        [line for line in untimed(run.folder) if line["split"] == "train"]
        for run in (plain, average)
    ]
    assert trained[0] == trained[1]  # the EMA does not change the training
    assert average.metrics != plain.metrics


def test_weights_as_trained_are_reported_beside_the_ema(tmp_path, monkeypatch):
    scored = []
    monkeypatch.setattr(
        ImageClassification, "score", lambda _, metrics: scored.append(metrics) or metrics["loss"]
    )
    plain = train(tiny_run(), tmp_path / "plain").metrics
    average = train(tiny_run(ema_decay=0.99), tmp_path / "average").metrics
    scored.clear()
    run = tiny_run(ema_decay=0.99, reported_weights="raw")
    result = train(run, tmp_path / "both")
    assert result.metrics == plain | {f"ema_{name}": value for name, value in average.items()}
    assert scored[-1] == plain  # the best evaluation is that of the weights as trained
    task = tiny_run().task.build(StripesConfig().build())
    for path, metrics in (("", plain), ("ema.safetensors", average)):
        checkpoint = load(tmp_path / "both" / path)
        assert evaluate(checkpoint.model, task).metrics == checkpoint.metrics == metrics
    assert load(tmp_path / "both/best.safetensors").metrics.keys() == plain.keys()
    interrupt(run, tmp_path / "resumed", 7)
    assert_same(train(run, tmp_path / "resumed"), result)
    (tmp_path / "both/ema.safetensors").unlink()
    recreated = train(run, tmp_path / "both")
    assert_same(recreated, result)
    assert not recreated.reused
    assert load(tmp_path / "both/ema.safetensors").metrics == average
    (tmp_path / "both/ema.safetensors").unlink()
    shutil.rmtree(tmp_path / "both/state")
    assert train(run, tmp_path / "both").reused  # instead of training from scratch


@pytest.mark.parametrize("reported", ["raw", "ema"])
def test_a_class_may_be_called_ema(tmp_path, monkeypatch, reported):
    evaluated = ImageClassification.evaluate

    def with_classes(self, rows):
        evaluation = evaluated(self, rows)
        loss = evaluation.metrics["loss"]
        by_class = {"ema_iou": loss / 2, "ema_cat_iou": loss / 3, "ema_loss": loss / 4}
        return dataclasses.replace(evaluation, metrics=evaluation.metrics | by_class)

    monkeypatch.setattr(ImageClassification, "evaluate", with_classes)
    run = tiny_run(ema_decay=0.99, reported_weights=reported)
    result = train(run, tmp_path)
    assert train(run, tmp_path).reused
    task = tiny_run().task.build(StripesConfig().build())
    checkpoint = load(tmp_path)
    assert checkpoint.metrics == evaluate(checkpoint.model, task).metrics
    assert checkpoint.metrics.items() <= result.metrics.items()
    if reported == "raw":
        average = load(tmp_path / "ema.safetensors")
        expected = evaluate(average.model, task).metrics
        del expected["loss"]  # whose name is that of the loss of the class
        assert average.metrics == expected


def test_weights_as_trained_are_not_reported_beside_no_ema():
    with pytest.raises(ValueError, match=r"is raw, which requires training\.ema_decay"):
        tiny_run(reported_weights="raw")


def test_the_best_weights_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(ImageClassification, "score", lambda _, metrics: metrics["loss"])  # worst
    result = train(tiny_run(), tmp_path)
    evaluations = [line for line in read_metrics(tmp_path) if line["split"] == "test"]
    best = max(evaluations, key=lambda line: line["loss"])
    assert best["loss"] > result.metrics["loss"]
    kept = load(tmp_path / "best.safetensors")
    assert kept.metrics == {name: best[name] for name in ("accuracy", "loss")}
    assert load(tmp_path).metrics == result.metrics


def test_a_score_counts_as_best_only_if_it_is_higher():
    model = TinyModelConfig().build()
    state = TrainingState(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    seen = []
    for step, score in enumerate([math.nan, 0.5, 0.5, 0.4, 0.6], start=1):
        state.step = step
        seen.append((state.add_score(score), state.evaluations_without_improvement))
        assert state.evaluated_step == step
    assert seen == [(True, 0), (True, 0), (False, 1), (False, 2), (True, 0)]


def test_patience_ends_a_run_that_no_longer_improves(tmp_path):
    run = tiny_run(epochs=50, learning_rate=1e-9, patience=3)
    result = train(run, tmp_path / "whole")
    assert result.steps == 4 * 4  # the first is the best; then three evaluations every four steps
    interrupt(run, tmp_path / "run", 10)
    assert_same(train(run, tmp_path / "run"), result)


# The gradient scale of float16


def scaler(**settings):
    return lambda *_: torch.amp.GradScaler("cpu", **settings)


def test_the_scale_underflows_below_one():
    halved = build_scaler("float16", torch.device("cpu"))
    assert halved.get_scale() == 65536
    halved.load_state_dict(halved.state_dict() | {"scale": 1.0})
    assert not underflowed(halved)
    for scale in (0.5, math.nan):
        halved.load_state_dict(halved.state_dict() | {"scale": scale})
        assert underflowed(halved)
    assert build_scaler("bfloat16", torch.device("cpu")) is None


def test_a_float16_run_resumes_with_its_scale(tmp_path, monkeypatch):
    # so large that the first steps are skipped, and so are two steps after each growth
    monkeypatch.setattr(loop, "build_scaler", scaler(init_scale=2.0**22, growth_interval=3))
    run = tiny_run(precision="float16")
    whole = train(run, tmp_path / "whole")
    interrupt(run, tmp_path / "run", 5)
    assert_same(train(run, tmp_path / "run"), whole)


def test_a_gradient_that_overflows_at_any_scale_ends_the_run(tmp_path, monkeypatch):
    original = ImageClassification.loss

    def overflow(self, model, batch):
        loss, metrics = original(self, model, batch)
        model.head.weight.register_hook(lambda gradient: gradient * math.inf)
        return loss, metrics

    monkeypatch.setattr(ImageClassification, "loss", overflow)
    with pytest.raises(FloatingPointError, match=r"at step 16: .* float16 .*step_16"):
        train(tiny_run(precision="float16", epochs=9), tmp_path)


def test_an_overflow_is_skipped_and_recorded(tmp_path):
    train(tiny_run(precision="float16", steps=40), tmp_path)
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()  # which is no JSON
    norms = [line["gradient_norm"] for line in read_metrics(tmp_path) if line["split"] == "train"]
    assert not math.isfinite(norms[0])
    assert math.isfinite(norms[-1])


# Data without random access


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamConfig(StripesConfig):
    """A stream: an epoch can only be continued from the data state of the batch before."""

    def build(self):
        splits = super().build()
        return dataclasses.replace(
            splits, train=Stream(images=splits.train.images, labels=splits.train.labels)
        )


class Stream(ImageTensors):
    def examples(self, *, start=0, data_state=None, **order):
        assert (data_state or {"next": 0})["next"] == start
        for number, (example, _) in enumerate(
            super().examples(start=start, **order), start=start + 1
        ):
            yield example, {"next": number}


@pytest.fixture(scope="module")
def streamed(tmp_path_factory):
    """A run on the stream that is not interrupted, without readers."""
    run = dataclasses.replace(tiny_run(), data=StreamConfig())
    return train(configs.replace(run, {"machine.workers": 0}), tmp_path_factory.mktemp("streamed"))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("step", "workers"), [(1, 0), (3, 0), (4, 0), (7, 0), (3, 1), (4, 1), (7, 1)]
)
def test_a_stream_resumes_from_its_data_state(streamed, tmp_path, step, workers):
    run = dataclasses.replace(tiny_run(), data=StreamConfig())
    run = configs.replace(run, {"machine.workers": workers})
    interrupt(run, tmp_path, step)
    assert_same(train(run, tmp_path), streamed)


# Unreadable examples, killed workers, signals


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnreadableConfig(StripesConfig):
    """Every seventh example is unreadable."""

    def build(self):
        splits = super().build()
        return dataclasses.replace(
            splits, train=Unreadable(images=splits.train.images, labels=splits.train.labels)
        )


class Unreadable(ImageTensors):
    def read(self, examples):
        replaced = [example if example.source % 7 else Example(1) for example in examples]
        failures = tuple(f"image {e.source} is damaged" for e in examples if e.source % 7 == 0)
        return LoadedBatch(super().read(replaced).batch, failures)


@pytest.mark.sampled
@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_examples_are_counted_and_warned_of_once(tmp_path, caplog, workers):
    run = dataclasses.replace(tiny_run(epochs=4), data=UnreadableConfig())
    run = configs.replace(run, {"machine.workers": workers})
    with caplog.at_level(logging.WARNING, "onescan"):
        train(run, tmp_path)
    counted = [line.get("unreadable", 0) for line in read_metrics(tmp_path)]
    plan = tiny_run().task.build(StripesConfig().build()).batches(step=0, batch_size=8, seed=0)
    sources = [example.source for batch in islice(plan, 16) for example in batch.examples]
    assert sum(counted) == sum(source % 7 == 0 for source in sources) > 10
    warnings = [record.message for record in caplog.records if record.name == "onescan"]
    assert sorted(warnings) == [f"image {place} is damaged" for place in (0, 14, 21, 28, 7)]


def test_only_a_few_unreadable_examples_are_warned_of(monkeypatch, caplog):
    monkeypatch.setattr(data, "MAX_WARNINGS", 3)
    plan = iter([BatchPlan([Example(place) for place in range(33)], None)])
    with caplog.at_level(logging.WARNING, "onescan"):
        batches = Loader(UnreadableConfig().build().train, plan, workers=0)
        next(batches)
    assert batches.unreadable == 5
    warnings = [record.message for record in caplog.records]
    assert warnings[:3] == [f"image {place} is damaged" for place in (0, 7, 14)]
    assert len(warnings) == 4


def test_unreadable_test_examples_are_counted(tmp_path, monkeypatch):
    read = ImageTensors.read

    def some(self, examples):
        is_test = examples[0].seed is None
        return read(self, [e for e in examples if e.source % 7] if is_test else examples)

    monkeypatch.setattr(ImageTensors, "read", some)
    result = train(tiny_run(), tmp_path)
    assert result.evaluation.left_out == 5
    assert len(result.evaluation.arrays["labels"]) == 33 - 5
    assert read_metrics(tmp_path)[-1]["unreadable"] == 5
    assert set(result.metrics) == {"accuracy", "loss"}


BYTES = {"vocab_size": 257, "width": 8, "depth": 1, "position": None, "mlp": GLUConfig()}
IMAGE_TASKS = {
    "classes": (ImageDatasetConfig, ImageClassificationConfig, TinyModelConfig(num_classes=2)),
    "noise": (ImageDatasetConfig, ImageGenerationConfig, configs.replace(TINY, {"num_classes": 2})),
    "pixels": (
        PixelImageConfig,
        SequenceClassificationConfig,
        SequenceClassifierConfig(mixer=LightNetMixerConfig(num_heads=2), num_classes=2, **BYTES),
    ),
}


@pytest.mark.parametrize("name", IMAGE_TASKS)
def test_no_image_of_an_evaluation_batch_may_be_readable(tmp_path, name):
    data, task, model = IMAGE_TASKS[name]
    path = write_folders(tmp_path, "train/cat", "train/dog", "test/cat", "test/dog", count=2)
    for image in ("0.png", "1.png"):
        (tmp_path / "test" / "cat" / image).write_bytes(b"no image")
    gray = {"channels": 1, "mean": (0.5,), "std": (0.5,)} if data is ImageDatasetConfig else {}
    splits = data(path=path, image_size=(4, 4), on_error="skip", **gray).build()
    torch.manual_seed(0)
    model = model.build().eval()
    found, expected = (
        evaluate(model, task(evaluation_batch_size=size).build(splits)) for size in (2, 4)
    )
    assert found.left_out == expected.left_out == 2
    assert found.metrics == pytest.approx(expected.metrics)
    assert found.metrics["loss"] > 0
    for image in ("0.png", "1.png"):
        (tmp_path / "test" / "dog" / image).write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"none of the 4 held-out (images|sequences) can be read"):
        evaluate(model, task(evaluation_batch_size=2).build(splits))


def test_errors_of_workers_are_raised_in_one_sentence(tmp_path, monkeypatch):
    def fail(self, examples):
        raise ValueError("cat.png is no image")

    def die(self, examples):
        os.kill(os.getpid(), signal.SIGKILL)

    run = configs.replace(tiny_run(), {"machine.workers": 1})
    monkeypatch.setattr(ImageTensors, "read", fail)
    with pytest.raises(ValueError, match=r"^cat\.png is no image$"):
        train(run, tmp_path / "fail")
    monkeypatch.setattr(ImageTensors, "read", die)
    with pytest.raises(OSError, match=r"killed, .*machine\.workers$"):
        train(run, tmp_path / "die")


@pytest.mark.slow
def test_a_signal_to_the_workers_too_saves_a_checkpoint(tmp_path):
    """Launchers and schedulers signal a whole group of processes."""
    run = configs.replace(tiny_run(), {"machine.workers": 1})
    whole = train(run, tmp_path / "whole")

    def end_all(now):
        if now.step == 1:
            for child in multiprocessing.active_children():
                os.kill(child.pid, signal.SIGTERM)
        if now.step == 7:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt) as caught:
        train(run, tmp_path / "run", progress=end_all)
    assert not multiprocessing.active_children()  # although the traceback holds everything
    del caught
    assert [path.name for path in (tmp_path / "run" / "state").iterdir()] == ["step_7"]
    assert_same(train(run, tmp_path / "run"), whole)


def test_waiting_is_measured():
    task = tiny_run().task.build(StripesConfig().build())
    batches = Loader(task.train, task.batches(step=0, batch_size=8, seed=0), workers=0)
    images, labels = next(batches)
    assert images.shape == (8, 1, 4, 4)
    assert len(labels) == 8
    assert 0 < batches.waiting_s < 5


def test_saved_weights_have_the_names_of_the_model(tmp_path):
    train(tiny_run(steps=2), tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(
        TinyModelConfig().build().state_dict()
    )
