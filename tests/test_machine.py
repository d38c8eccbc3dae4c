"""How a run is carried out: memory, precision, readers, and the numbers they leave as they are."""

import dataclasses
import logging
import math
import multiprocessing
import os
import signal
from itertools import islice

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import (
    StripesConfig,
    TinyModelConfig,
    assert_same,
    press_ctrl_c_at,
    tiny_run,
    untimed,
)
from two_processes import lightnet_run

from onescan import configs
from onescan.data import Example, ImageSplits, ImageTensors, LoadedBatch
from onescan.layers.mixers.lightnet import LightNetMixer
from onescan.tasks import BatchPlan, ImageClassification
from onescan.training import evaluate, load, loader, loop, read_metrics, train
from onescan.training.ema import WeightMean
from onescan.training.loader import Loader
from onescan.training.precision import LossScale
from onescan.training.state import TrainingState


def short_run(drop_path=0.0, **machine):
    run = lightnet_run(**machine)
    return configs.replace(run, {"training.steps": 6, "model.drop_path": drop_path})


def losses(folder):
    lines = [line for line in read_metrics(folder) if line["split"] == "train"]
    return torch.tensor([line["loss"] for line in lines])


# Numbers that stay


def test_parts_of_a_batch_add_up_to_it(tmp_path):
    whole = train(short_run(), tmp_path / "whole").folder
    parts = train(short_run(gradient_accumulation_steps=4), tmp_path / "parts").folder
    torch.testing.assert_close(losses(parts), losses(whole), atol=1e-5, rtol=0)
    norms = [[line["gradient_norm"] for line in read_metrics(f)[:-1]] for f in (parts, whole)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.parametrize("machine", [{"gradient_checkpointing": True}, {"workers": 2}])
def test_memory_and_readers_do_not_touch_a_bit(tmp_path, machine):
    whole = train(short_run(drop_path=0.5), tmp_path / "whole")
    assert_same(train(short_run(drop_path=0.5, **machine), tmp_path / "other"), whole)


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


def test_a_run_in_float16_goes_on_with_its_scale(tmp_path, monkeypatch):
    # so high that the first updates are passed over, and would be again with a fresh scale
    monkeypatch.setattr(loop, "LossScale", lambda: LossScale(scale=2.0**22))
    run = tiny_run(precision="float16")
    whole = train(run, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path / "run", progress=press_ctrl_c_at(5))
    assert_same(train(run, tmp_path / "run"), whole)


def test_blocks_are_computed_again_only_when_asked(tmp_path, monkeypatch):
    calls, forward = [], LightNetMixer.forward

    def counting(self, *args, **kwargs):
        calls.append(self.training)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LightNetMixer, "forward", counting)
    for recompute, times in ((False, 1), (True, 2)):
        calls.clear()
        train(short_run(gradient_checkpointing=recompute), tmp_path / str(recompute))
        assert sum(calls) == times * 6 * 2  # updates, blocks


def test_what_cannot_be_cut_evenly_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"training\.batch_size is 32, expected a multiple of 5: "):
        train(short_run(gradient_accumulation_steps=5), tmp_path)


def test_recomputing_needs_blocks(tmp_path):
    run = configs.replace(tiny_run(), {"machine.gradient_checkpointing": True})
    with pytest.raises(ValueError, match=r"machine\.gradient_checkpointing is True"):
        train(run, tmp_path)


@pytest.mark.compile
def test_compiled_blocks_train(tmp_path):
    whole = train(short_run(), tmp_path / "whole").folder
    compiled = train(short_run(compile=True), tmp_path / "compiled").folder
    torch.testing.assert_close(losses(compiled), losses(whole), atol=1e-4, rtol=0)
    assert load(compiled).metrics == load(compiled / "best.safetensors").metrics


# The running mean, the best, and patience


def test_the_running_mean_is_the_sum_it_says():
    model = torch.nn.BatchNorm1d(1)
    weights = [0.0, 3.0, -2.0, 5.0]
    model.weight.data.fill_(weights[0])
    mean, want = WeightMean(model, 0.3), weights[0]
    for step, weight in enumerate(weights[1:], start=1):
        model.weight.data.fill_(weight)
        model.num_batches_tracked.fill_(step)
        mean.update(model, step)
        keep = min(0.3, (1 + step) / (10 + step))
        want = keep * want + (1 - keep) * weight
    assert mean.tensors["weight"].item() == pytest.approx(want)
    assert mean.tensors["num_batches_tracked"] == 3
    with mean.worn_by(model):
        assert model.weight.item() == pytest.approx(want)
    assert model.weight.item() == 5.0


def test_the_mean_is_what_is_judged_and_saved(tmp_path):
    plain = train(tiny_run(), tmp_path / "plain")
    mean = train(tiny_run(ema_decay=0.99), tmp_path / "mean")
    checkpoint = load(mean.folder)
    task = tiny_run().task.build(StripesConfig().build())
    assert evaluate(checkpoint.model, task).metrics == checkpoint.metrics == mean.metrics
    trained = [
        [line for line in untimed(run.folder) if line["split"] == "train"] for run in (plain, mean)
    ]
    assert trained[0] == trained[1]  # it watches, and changes nothing
    assert mean.metrics != plain.metrics


def test_the_best_weights_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(ImageClassification, "score", lambda _, metrics: metrics["loss"])  # worst
    result = train(tiny_run(), tmp_path)
    judged = [line for line in read_metrics(tmp_path) if line["split"] == "test"]
    best = max(judged, key=lambda line: line["loss"])
    assert best["loss"] > result.metrics["loss"]
    kept = load(tmp_path / "best.safetensors")
    assert kept.metrics == {name: best[name] for name in ("accuracy", "loss")}
    assert load(tmp_path).metrics == result.metrics


def test_only_what_is_better_is_best():
    model = TinyModelConfig().build()
    state = TrainingState(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    told = []
    for step, score in enumerate([0.5, 0.5, 0.4, 0.6], start=1):
        state.step = step
        told.append((state.judge(score), state.evaluations_without_improvement, state.judged))
    assert told == [(True, 0, 1), (False, 1, 2), (False, 2, 3), (True, 0, 4)]


def test_patience_ends_a_run_that_no_longer_improves(tmp_path):
    run = tiny_run(epochs=50, learning_rate=1e-9, patience=3)
    result = train(run, tmp_path / "whole")
    assert result.steps == 4 * 4  # the first is the best; then three evaluations every four steps
    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path / "run", progress=press_ctrl_c_at(10))
    assert_same(train(run, tmp_path / "run"), result)


# Float16's scale


def test_the_loss_scale_falls_at_once_and_rises_slowly():
    scale = LossScale()
    for finite in [True, False, False, *[True] * 1999]:
        scale.update(finite=finite)
    assert (scale.scale, scale.good) == (65536 / 4, 1999)
    scale.update(finite=True)
    assert (scale.scale, scale.good) == (65536 / 2, 0)
    scale.scale = 1.5
    assert not scale.is_spent
    scale.update(finite=False)
    assert scale.is_spent


def test_what_overflows_at_any_scale_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(loop.Loop, "clip", lambda _: torch.tensor(torch.inf))
    says = "overflows float16 whatever the loss is scaled by at step 16; the last good checkpoint"
    with pytest.raises(FloatingPointError, match=says):
        train(tiny_run(precision="float16", epochs=9), tmp_path)


def test_an_overflow_is_passed_over_and_recorded(tmp_path):
    train(tiny_run(precision="float16", steps=40), tmp_path)
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()  # which JSON does not know
    norms = [line["gradient_norm"] for line in read_metrics(tmp_path) if line["split"] == "train"]
    assert not math.isfinite(norms[0])
    assert math.isfinite(norms[-1])


# Data whose places cannot be looked up


@dataclasses.dataclass(frozen=True, kw_only=True)
class WalkedConfig(StripesConfig):
    """A stream: to begin in mid-pass takes the data_state that came with what is before."""

    def build(self):
        splits = super().build()
        train = Walked(splits.train.images, splits.train.labels)
        return dataclasses.replace(splits, train=train)


class Walked(ImageTensors):
    def __init__(self, images, labels):
        super().__init__(images=images, labels=labels)

    def examples(self, *, start=0, data_state=None, **order):
        assert (data_state or {"turn": 0})["turn"] == start
        walk = enumerate(super().examples(start=start, **order), start=start + 1)
        for turn, (example, _) in walk:
            yield example, {"turn": turn}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("step", [1, 3, 4, 7])
def test_a_stream_goes_on_where_its_bookmark_lies(tmp_path, step, workers):
    run = dataclasses.replace(tiny_run(), data=WalkedConfig())
    run = configs.replace(run, {"machine.workers": workers})
    whole = train(run, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path / "run", progress=press_ctrl_c_at(step))
    assert_same(train(run, tmp_path / "run"), whole)


# Examples that cannot be read


@dataclasses.dataclass(frozen=True, kw_only=True)
class TornConfig(StripesConfig):
    """Every place that seven divides cannot be read."""

    def build(self):
        splits = super().build()
        return ImageSplits(
            train=Torn(splits.train),
            test=splits.test,
            class_names=splits.class_names,
            format=splits.format,
        )


class Torn(ImageTensors):
    def __init__(self, images):
        super().__init__(images=images.images, labels=images.labels)

    def read(self, examples):
        whole = [example if example.source % 7 else Example(1) for example in examples]
        torn = tuple(f"image {e.source} is torn" for e in examples if e.source % 7 == 0)
        return LoadedBatch(super().read(whole).batch, torn)


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_examples_are_counted_and_told_a_few_times(tmp_path, caplog, workers):
    run = dataclasses.replace(tiny_run(epochs=4), data=TornConfig())
    run = configs.replace(run, {"machine.workers": workers})
    with caplog.at_level(logging.WARNING, "onescan"):
        train(run, tmp_path)
    counted = [line.get("unreadable", 0) for line in read_metrics(tmp_path)]
    plan = tiny_run().task.build(StripesConfig().build()).batches(step=0, batch_size=8, seed=0)
    sources = [example.source for batch in islice(plan, 16) for example in batch.examples]
    assert sum(counted) == sum(source % 7 == 0 for source in sources) > 10
    told = [record.message for record in caplog.records if record.name == "onescan"]
    assert sorted(told) == [f"image {place} is torn" for place in (0, 14, 21, 28, 7)]  # each once


def test_only_a_few_unreadable_examples_are_told(monkeypatch, caplog):
    monkeypatch.setattr(loader, "MOST_TOLD", 3)
    torn = TornConfig().build().train
    planned = iter([BatchPlan([Example(place) for place in range(33)], None)])
    with caplog.at_level(logging.WARNING, "onescan"):
        batches = Loader(torn, planned, workers=0)
        next(batches)
    assert batches.failures == 5
    told = [record.message for record in caplog.records]
    assert told[:3] == [f"image {place} is torn" for place in (0, 7, 14)]
    assert told[3:] == ["further examples that cannot be read are only counted"]


def test_a_reader_that_is_killed_is_one_sentence(tmp_path, monkeypatch):
    def die(self, examples):
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(ImageTensors, "read", die)
    run = configs.replace(tiny_run(), {"machine.workers": 1})
    with pytest.raises(OSError, match="a process that read data has been killed, perhaps for want"):
        train(run, tmp_path)


def test_a_signal_to_readers_too_saves_all_the_same(tmp_path):
    """As launchers and schedulers send it, to a whole group of processes."""
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
    assert not multiprocessing.active_children()  # though the traceback holds everything
    del caught
    assert [path.name for path in (tmp_path / "run" / "state").iterdir()] == ["step_7"]
    assert_same(train(run, tmp_path / "run"), whole)


def test_held_out_examples_that_are_left_out_are_counted(tmp_path, monkeypatch):
    read = ImageTensors.read

    def some(self, examples):
        judged = examples[0].seed is None
        return read(self, [e for e in examples if e.source % 7] if judged else examples)

    monkeypatch.setattr(ImageTensors, "read", some)
    result = train(tiny_run(), tmp_path)
    assert result.evaluation.left_out == 5
    assert len(result.evaluation.arrays["labels"]) == 33 - 5
    assert read_metrics(tmp_path)[-1]["unreadable"] == 5
    assert set(result.metrics) == {"accuracy", "loss"}


def test_what_goes_wrong_in_a_reader_is_one_sentence(tmp_path, monkeypatch):
    def fail(self, examples):
        raise ValueError("cat.png is no image")

    monkeypatch.setattr(type(StripesConfig().build().train), "read", fail)
    for workers in (0, 1):
        run = configs.replace(tiny_run(), {"machine.workers": workers})
        with pytest.raises(ValueError, match=r"^cat\.png is no image$"):
            train(run, tmp_path / str(workers))


def test_waiting_is_measured():
    task = tiny_run().task.build(StripesConfig().build())
    loader = Loader(task.train, task.batches(step=0, batch_size=8, seed=0), workers=0)
    images, labels = next(loader)
    assert images.shape == (8, 1, 4, 4)
    assert len(labels) == 8
    assert 0 < loader.waiting_s < 5


def test_a_model_knows_nothing_of_how_it_was_trained(tmp_path):
    train(tiny_run(steps=2), tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(
        TinyModelConfig().build().state_dict()
    )
