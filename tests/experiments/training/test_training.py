import math
import re
import resource
import subprocess
import sys
from itertools import islice, pairwise

import pytest
import torch
import tqdm
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import (
    STEPS,
    StripesConfig,
    TinyModelConfig,
    assert_same,
    crash,
    interrupt,
    tiny_run,
    untimed,
)
from torch import nn
from two_processes import lightnet_run

from onescan import configs
from onescan.experiments.data import derive_seed
from onescan.experiments.tasks import ImageClassification, ImageClassificationConfig
from onescan.experiments.training import (
    MachineConfig,
    Progress,
    TrainingConfig,
    evaluate,
    learning_rate,
    parameter_groups,
    read_metrics,
    train,
)
from onescan.experiments.training.optim import Plan, build_scaler, lower_scale


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run."""
    return train(tiny_run(), tmp_path_factory.mktemp("whole") / "run")


# What a run does


def test_a_run_learns_and_records_its_metrics(whole):
    lines = untimed(whole.folder)
    trained = [line for line in lines if line["split"] == "train"]
    assert [line["step"] for line in trained] == list(range(1, STEPS + 1))
    assert set(trained[0]) == {
        *("step", "epoch", "split", "loss", "accuracy", "learning_rate", "gradient_norm")
    }
    evaluations = [line for line in lines if line["split"] == "test"]
    assert [(line["step"], line["epoch"]) for line in evaluations] == [
        (4, 1.0),
        (8, 2.0),
        (12, 3.0),
    ]
    assert evaluations[-1]["accuracy"] == whole.metrics["accuracy"] > 0.5
    assert evaluations[-1]["loss"] < evaluations[0]["loss"]
    assert whole.steps == STEPS


def test_equal_runs_give_equal_numbers(tmp_path, whole):
    torch.manual_seed(123)  # earlier random numbers must not matter
    before = torch.get_rng_state()
    again = train(tiny_run(), tmp_path / "again")
    assert not again.reused
    assert_same(again, whole)
    assert torch.equal(torch.get_rng_state(), before)  # the caller's random state is kept


def test_the_seed_changes_the_run(tmp_path, whole):
    other = train(tiny_run(seed=1), tmp_path / "other")
    assert untimed(other.folder)[0] != untimed(whole.folder)[0]


def test_steps_override_epochs(tmp_path):
    result = train(tiny_run(steps=5, evaluate_every=100.0), tmp_path / "run")
    assert result.steps == 5
    assert [line["step"] for line in read_metrics(result.folder)] == [1, 2, 3, 4, 5, 5]


GROWING = {"batch_size": 12, "initial_batch_size": 4, "batch_size_ramp": 0.5}


def test_batches_grow(tmp_path):
    """33 examples are 8 micro-batches per epoch, of which 3 epochs have 24."""
    result = train(tiny_run(**GROWING, checkpoint_every=1.0), tmp_path / "run", progress=True)
    lines = untimed(result.folder)
    trained = [line for line in lines if line["split"] == "train"]
    sizes = [line["batch_size"] for line in trained]
    assert sizes == [4, 4, 4, 4, 8, 8, 12, 12, 12, 12, 12, 4]
    assert sum(sizes) == 3 * 32
    assert trained[-1]["epoch"] == 3
    assert [(line["step"], line["epoch"]) for line in lines if line["split"] == "test"] == [
        (6, 1.0),
        (9, 2.125),  # the first step to end after the second epoch
        (12, 3.0),
    ]
    assert result.steps == 12


def test_a_grown_batch_has_the_gradient_of_all_its_examples(tmp_path):
    """The second step reads the micro-batches 1 to 3, by weights that hardly differ from before."""
    changes = {"batch_size": 24, "initial_batch_size": 8, "batch_size_ramp": 1e-9}
    changes |= {"steps": None, "epochs": 1, "learning_rate": 1e-20, "evaluate_every": 9.0}
    run = lightnet_run()
    run = configs.replace(run, {f"training.{name}": value for name, value in changes.items()})
    task = run.task.build(run.data.build())
    torch.manual_seed(derive_seed(run.training.seed, "model"))
    model = run.model.build().train()
    plans = islice(task.batches(step=1, batch_size=8, seed=run.training.seed), 3)
    examples = [example for plan in plans for example in plan.examples]
    loss, _ = task.loss(model, task.train.read(examples).batch)
    loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    interrupt(run, tmp_path / "run", 2)
    line = read_metrics(tmp_path / "run")[1]
    assert (line["batch_size"], line["step"]) == (24, 2)
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert line["gradient_norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.sampled
@pytest.mark.parametrize("step", [1, 4, 5, 6, 7, 9, 11])
def test_a_run_resumes_exactly_while_its_batches_grow(tmp_path, step):
    run = tiny_run(**GROWING, evaluate_every=0.3)
    whole = train(run, tmp_path / "whole")
    interrupt(run, tmp_path / "stopped", step)
    assert_same(train(run, tmp_path / "stopped"), whole)
    crash(run, tmp_path / "crashed", step)
    assert_same(train(run, tmp_path / "crashed"), whole)


def test_gradients_are_clipped(tmp_path):
    free, clipped = (
        read_metrics(train(tiny_run(steps=2, max_grad_norm=norm), tmp_path / str(norm)).folder)
        for norm in (None, 1e-9)  # far below AdamW's eps, so that the weights hardly move
    )
    assert clipped[0]["gradient_norm"] == free[0]["gradient_norm"] > 0.1  # before clipping
    assert clipped[1]["loss"] != free[1]["loss"]


def test_progress_is_called_after_every_step(tmp_path):
    seen = []
    train(tiny_run(), tmp_path / "run", progress=seen.append)
    assert [now.step for now in seen] == list(range(1, STEPS + 1))
    assert all(isinstance(now, Progress) for now in seen)
    assert seen[0].steps == STEPS
    assert set(seen[0].metrics) == {"loss", "accuracy"}
    assert set(seen[4].metrics) == {"loss", "accuracy", "test_loss", "test_accuracy"}


def test_progress_shows_a_summary_an_estimate_and_a_bar(tmp_path, capfd):
    train(tiny_run(), tmp_path / "quiet")
    assert capfd.readouterr() == ("", "")
    run = configs.replace(tiny_run(), {"machine.gradient_accumulation_steps": 2})
    result = train(run, tmp_path / "bar", progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    summary, _, bar = err.partition("estimated time: ")
    parameters = sum(p.numel() for p in TinyModelConfig().build().parameters())
    for part in (
        f"model: TinyModel, {parameters} parameters\n",
        "data: 33 training and 33 test images, input shape [1, 4, 4]\n",
        "device: cpu, float32\n",
        "batch size: 8, 2 accumulation steps\n",
        "steps: 12 (3.0 epochs of 4)\n",
    ):
        assert part in summary
    assert bar.startswith("less than 1 s for 6 more steps")
    for part in ("96/96", "images/s", "accuracy="):
        assert part in bar
    *_, last = re.findall(r"test_loss=([^,]+)", bar)
    assert last == tqdm.tqdm.format_num(result.metrics["loss"])


def test_only_one_checkpoint_is_kept(whole):
    assert [path.name for path in (whole.folder / "state").iterdir()] == ["step_12"]
    assert {path.name for path in whole.folder.iterdir()} == {
        *("config.json", "evaluation.safetensors", "metrics.jsonl", "model.safetensors"),
        *("best.safetensors", "lock", "result.json", "state"),
    }


# The task


def tiny_task(**task):
    return ImageClassificationConfig(augment=None, **task).build(StripesConfig().build())


def test_label_smoothing_is_part_of_the_loss():
    model = TinyModelConfig().build().eval()
    plan = next(tiny_task().batches(step=0, batch_size=8, seed=0))
    batch = tiny_task().train.read(plan.examples).batch
    logits, labels = model(batch[0]), batch[1]
    loss, metrics = tiny_task(label_smoothing=0.3).loss(model, batch)
    aims = torch.nn.functional.one_hot(labels, 3) * 0.7 + 0.1
    torch.testing.assert_close(loss, -(aims * logits.log_softmax(dim=1)).sum(dim=1).mean())
    torch.testing.assert_close(metrics["accuracy"], (logits.argmax(1) == labels).float().mean())


def test_the_evaluation_batch_size_does_not_matter():
    model = TinyModelConfig().build()
    tasks = [tiny_task(evaluation_batch_size=size) for size in (64, 5)]
    whole, parts = (evaluate(model, task) for task in tasks)
    torch.testing.assert_close(whole.arrays, parts.arrays)
    assert whole.metrics == pytest.approx(parts.metrics)
    assert len(parts.arrays["confidence"]) == 33
    assert model.training


def test_an_epoch_visits_every_image_once():
    task = tiny_task()
    assert (task.steps_per_epoch(11), task.steps_per_epoch(8)) == (3, 4)
    plan = task.batches(step=3, batch_size=11, seed=0)  # from the second epoch on
    seen = [example.source for batch in islice(plan, 3) for example in batch.examples]
    assert sorted(seen) == list(range(33))
    assert seen != sorted(seen)


@pytest.mark.parametrize("step", [1, 4, 5, 9])
def test_batches_from_any_step_equal_those_of_the_whole_run(step):
    task = tiny_task(augment_repeats=3)
    whole = list(islice(task.batches(step=0, batch_size=8, seed=3), 12))
    assert list(islice(task.batches(step=step, batch_size=8, seed=3), 12 - step)) == whole[step:]
    assert len({example.seed for batch in whole for example in batch.examples}) == 96


def test_repeated_augmentation_shows_each_image_several_times_in_a_row():
    task = tiny_task(augment_repeats=3)
    seen = [e.source for b in islice(task.batches(step=0, batch_size=6, seed=0), 5) for e in b[0]]
    assert seen[::3] == seen[1::3] == seen[2::3]
    assert len(set(seen)) == 10


@pytest.mark.parametrize(
    "task", [{"label_smoothing": 1.0}, {"evaluation_batch_size": 0}, {"augment_repeats": 0}]
)
def test_task_settings_out_of_range_are_refused(task):
    with pytest.raises(ValueError, match=rf"task\.{next(iter(task))} is "):
        tiny_task(**task)


# What goes wrong


@pytest.mark.parametrize(("every", "name"), [(1.0, "loss"), (0.25, "weight_norm")])
def test_a_run_that_diverges_stops_without_a_checkpoint(tmp_path, every, name):
    run = tiny_run(learning_rate=1e30, warmup=0.0, max_grad_norm=None, checkpoint_every=every)
    with pytest.raises(
        FloatingPointError, match=rf"^training diverged at step 1: {name} is (nan|inf); "
    ) as caught:
        train(run, tmp_path)
    assert "training.learning_rate (now 1e+30)" in str(caught.value)
    assert "training.max_grad_norm (now None)" in str(caught.value)
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("where", ["loss", "gradient_norm"])
def test_the_last_good_checkpoint_is_named_and_good(tmp_path, where, monkeypatch):
    original = ImageClassification.loss
    calls = []

    def broken(self, model, batch):
        calls.append(1)
        loss, metrics = original(self, model, batch)
        if len(calls) < 6:
            return loss, metrics
        endless = sum((p * 0).sum() for p in model.parameters()).sqrt()  # gradient 0 / 0
        return loss + (endless if where == "gradient_norm" else math.inf), metrics

    monkeypatch.setattr(ImageClassification, "loss", broken)
    with pytest.raises(FloatingPointError, match=f"at step 5: {where} is (nan|inf)") as caught:
        train(tiny_run(), tmp_path)
    assert f"the last good checkpoint is {tmp_path / 'state' / 'step_4'}" in str(caught.value)
    assert (tmp_path / "state" / "step_4").exists()


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, whole):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(now):
        if now.step == 5:
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))

    try:
        with pytest.raises(OSError, match=r"cannot write to .* intact$"):
            train(tiny_run(), tmp_path, progress=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "state" / "step_4").exists()
    assert_same(train(tiny_run(), tmp_path), whole)


def test_an_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match=r"cannot write to .*file/run: Not a directory$"):
        train(tiny_run(), tmp_path / "file" / "run")


@pytest.mark.parametrize("device", ["gpu", "cuda:x"])
def test_an_unknown_device_is_refused(tmp_path, device):
    with pytest.raises(ValueError, match=f"machine.device is '{device}', expected auto, cpu"):
        train(configs.replace(tiny_run(), {"machine.device": device}), tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("steps", 0),
        ("batch_size", -1),
        ("learning_rate", math.nan),
        ("learning_rate", -1.0),
        ("learning_rate", math.inf),
        ("weight_decay", -0.1),
        ("weight_decay", math.nan),
        ("betas", (0.9, 1.0)),
        ("eps", 0.0),
        ("warmup", -0.1),
        ("initial_lr_ratio", -0.1),
        ("initial_batch_size", 0),
        ("initial_batch_size", 6),
        ("batch_size_ramp", math.nan),
        ("batch_size_ramp", 1.5),
        ("final_lr_ratio", 1.1),
        ("max_grad_norm", 0.0),
        ("seed", -1),
        ("evaluate_every", 0.0),
        ("checkpoint_every", math.nan),
        ("ema_decay", 1.0),
        ("ema_decay", math.nan),
        ("patience", 0),
    ],
)
def test_training_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"training\.{name} is .*{re.escape(str(value))}"):
        TrainingConfig(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("steps", 9), ("batch_size_ramp", 0.0)])
def test_settings_that_do_not_fit_a_growing_batch_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"training\.{name} is {value}, expected"):
        TrainingConfig(initial_batch_size=8, **{name: value})


def test_a_ramp_without_an_initial_batch_size_is_rejected():
    with pytest.raises(
        ValueError, match=r"ramp is 0\.25, which requires training.initial_batch_size"
    ):
        TrainingConfig(batch_size_ramp=0.25)


@pytest.mark.parametrize("name", ["precision", "schedule"])
def test_unknown_choices_are_refused(name):
    config = TrainingConfig()
    object.__setattr__(config, name, "float31")  # not possible otherwise with type checks
    with pytest.raises(ValueError, match=rf"training\.{name} 'float31'"):
        config.__post_init__()


@pytest.mark.parametrize(("name", "value"), [("gradient_accumulation_steps", 0), ("workers", -1)])
def test_machine_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"machine\.{name} is {value}"):
        MachineConfig(**{name: value})


# The parts


def test_only_matrices_have_weight_decay():
    class Layer(nn.Module):
        no_weight_decay = frozenset({"theta"})

        def __init__(self):
            super().__init__()
            self.theta = nn.Parameter(torch.ones(2, 3))
            self.weight = nn.Parameter(torch.ones(2, 3))
            self.frozen = nn.Parameter(torch.ones(2, 3), requires_grad=False)

    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), Layer())
    model.append(model[0])  # a tied layer counts once
    decayed, rest = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert [names[p] for p in decayed["params"]] == ["0.weight", "2.weight"]
    assert {names[p] for p in rest["params"]} == {"0.bias", "1.weight", "1.bias", "2.theta"}


@given(
    steps=st.integers(1, 60),
    warmup=st.sampled_from([0.0, 0.1, 0.999, 1.0, 7.0, 100.0]),
    schedule=st.sampled_from(["cosine", "linear", "constant", "inverse_sqrt"]),
    final=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_the_learning_rate_rises_then_falls(steps, warmup, schedule, final):
    config = TrainingConfig(
        learning_rate=2.0, warmup=warmup, schedule=schedule, final_lr_ratio=final
    )
    rates = [learning_rate(step, steps, config) for step in range(steps)]
    assert all(0 <= rate <= 2.0 for rate in rates)
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] >= 2.0 * final or len(rates) <= warmup or schedule == "inverse_sqrt"


@pytest.mark.parametrize(("schedule", "half"), [("cosine", 1.1), ("linear", 1.1), ("constant", 2)])
def test_schedules_have_their_shapes(schedule, half):
    config = TrainingConfig(learning_rate=2.0, warmup=0.0, schedule=schedule, final_lr_ratio=0.1)
    assert learning_rate(0, 100, config) == 2.0
    assert learning_rate(50, 100, config) == pytest.approx(half)
    assert learning_rate(100, 100, config) == pytest.approx(2.0 if schedule == "constant" else 0.2)


def test_inverse_sqrt_halves_when_the_step_quadruples():
    config = TrainingConfig(learning_rate=2.0, warmup=25.0, schedule="inverse_sqrt")
    rates = [learning_rate(step, 1000, config) for step in (24, 99, 399)]
    assert rates == pytest.approx([2.0, 1.0, 0.5])


def test_the_rate_of_cramming_rises_from_a_quarter_and_falls_to_zero():
    """The triangle of arXiv:2212.14034: the peak is at 75% of the budget."""
    config = TrainingConfig(
        learning_rate=2.0, warmup=0.75, initial_lr_ratio=0.25, schedule="linear", final_lr_ratio=0.0
    )
    steps = 1000
    for step in range(steps + 1):
        done = step / steps
        triangle = min(0.25 + done * 0.75 / 0.75, 4 - 4 * done)
        # the warm-up reaches its last step one step earlier
        assert learning_rate(step, steps, config) == pytest.approx(2 * triangle, abs=3 / steps)
    assert max(learning_rate(step, steps, config) for step in range(steps)) == 2.0


@given(
    total=st.integers(1, 3000),
    first=st.integers(1, 8),
    times=st.integers(1, 64),
    ramp=st.floats(0.01, 1.0),
)
def test_the_batch_size_grows_linearly_with_the_examples(total, first, times, ramp):
    config = TrainingConfig(
        batch_size=first * times, initial_batch_size=first, batch_size_ramp=ramp, epochs=1
    )
    plan = Plan.of(config, total)
    ends = [plan.read(step) for step in range(plan.steps + 1)]
    assert (ends[0], ends[-1]) == (0, total)
    for before, after in pairwise(ends[:-1]):  # the last batch may be smaller
        line = first * times * before / (ramp * total)  # reaches batch_size at the ramp's end
        size = first * (after - before)
        assert size <= first * times
        assert size == first * times or line < size <= line + first * (1 + 1e-9)
        assert size == first * times or before < ramp * total


def test_a_plan_turns_epochs_into_steps():
    plan = Plan.of(TrainingConfig(epochs=2, evaluate_every=0.5, checkpoint_every=1.5), 10)
    assert plan.steps == 20
    assert [step for step in range(21) if plan.evaluates(step)] == [5, 10, 15, 20]
    assert [step for step in range(21) if plan.saves(step)] == [15, 20]


@pytest.mark.slow
def test_slow_imports_wait_until_they_are_needed():
    code = (
        "import sys, onescan.experiments.training\n"
        "slow = {'sklearn', 'tyro', 'matplotlib', 'torch.distributed.checkpoint.filesystem'}\n"
        "print(*slow & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("value", [1e30, float("inf")])
def test_a_gradient_of_infinite_norm_halves_the_loss_scale(value):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight]), build_scaler("float16", weight.device)
    scaler.scale(weight.sum()).backward()
    before, weight.grad = scaler.get_scale(), torch.full((2,), value) * scaler.get_scale()
    scaler.unscale_(optimizer)
    lower_scale(scaler)
    assert scaler.get_scale() == before / 2
