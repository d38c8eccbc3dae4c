"""The study: its queue, its verdicts, repeated and interrupted runs, and the results page."""

import dataclasses
import itertools
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import study
import study_page
import study_queue
import study_run
from study_queue import Claim, Result, Suite, Variant, verdict_of

from onescan import configs
from onescan.experiments.recipes import find_recipe
from onescan.experiments.training import TrainingConfig
from onescan.experiments.training.optim import Plan

ROOT = Path(__file__).parents[2]
COMMIT = "0" * 40


def tiny_suite(**changes):
    """Return a suite of two models that train in a second; "plain" has no rotations."""
    run = find_recipe("digits")()
    training = TrainingConfig(steps=6, batch_size=32, evaluate_every=0.05)
    model = configs.replace(run.model, {"width": 16, "depth": 1, "mixer.num_heads": 2})
    runs = {
        "full": dataclasses.replace(run, name="study", model=model, training=training),
        "plain": dataclasses.replace(
            run,
            name="study",
            model=configs.replace(model, {"mixer.lrpe": False}),
            training=training,
        ),
    }
    variants = {
        name: Variant(title=f"Model {name}", family="tiny", run=run) for name, run in runs.items()
    }
    fields = {
        "title": "Digits",
        "description": "Six steps.",
        "metric": "accuracy",
        "learning_rates": (1e-3, 2e-3),
        "sweep": {"training.steps": 3},
        "variants": variants,
        "order": (("full", "plain"),),
    }
    return Suite(**{**fields, **changes})


@pytest.fixture
def tiny(monkeypatch):
    """Replace the study with one suite of two models and one claim."""
    suite = tiny_suite()
    monkeypatch.setattr(study_queue, "SUITES", {"digits": lambda: suite})
    monkeypatch.setattr(study_queue, "ORDER", (("digits", 0),))
    claim = Claim("Positions help", "90 vs. 80", "digits", "full", "plain")
    monkeypatch.setattr(study_queue, "CLAIMS", (claim,))
    monkeypatch.setattr(study_queue, "MAX_EXTENSIONS", 0)
    monkeypatch.setattr(study_run, "clean_commit", lambda: COMMIT)
    return claim


def result(name, *, value=0.5, metric="accuracy", **changes):
    """Return a result of the tiny suite with made-up numbers."""
    suite, *middle, last = name.split("-")
    is_sweep = middle[0] == "sweep"
    variant, seed = ("full", 100) if is_sweep else (middle[0], int(last))
    rate = float(last) if is_sweep else 2e-3
    settings = {"training.seed": seed, "training.learning_rate": rate}
    settings |= {"training.steps": 3} if is_sweep else {}
    config = configs.replace(tiny_suite().variants[variant].run, settings)
    fields = {
        "name": name,
        "suite": suite,
        "variant": variant,
        "family": "tiny",
        "seed": seed,
        "is_sweep": is_sweep,
        "learning_rate": rate,
        "parameters": study_queue.parameters(config.model),
        "steps": config.training.steps,
        "evaluations": [{"step": 6, "epoch": 1.0, "seconds": 60.0, metric: value}],
        "perplexities": {},
        "wall_seconds": 130.0,
        "cpu_seconds": 120.0,
        "commit": COMMIT,
        "config": configs.to_dict(config),
        "data": {},
        "environment": {"cpu": "a CPU"},
    }
    return Result(**{**fields, **changes})


def diverged(name):
    return result(name, error="the loss is not finite", evaluations=[], steps=0)


def results(**values):
    """Return results by name, from values such as full_0=0.5."""
    names = {name.replace("_", "-"): value for name, value in values.items()}
    found = [result(f"digits-{name}", value=value) for name, value in names.items()]
    return {each.name: each for each in found}


SWEEP = {f"digits-sweep-tiny-{rate:g}": 10 * rate for rate in (1e-3, 2e-3)}


def swept():
    return {name: result(name, value=value) for name, value in SWEEP.items()}


# Verdicts and the queue


@pytest.mark.parametrize(
    ("differences", "outcome"),
    [
        ([0.01, 0.012, 0.008], "confirmed"),
        ([-0.01, -0.012, -0.008], "refuted"),
        ([0.01, 0.012], "undecided"),  # two seeds
        ([0.01, 0.05, 0.001], "undecided"),  # 0.0203 +- 0.0151
        ([0.01, 0.012, 0.008, -0.02], "undecided"),
        ([0.02, 0.02, 0.02], "confirmed"),
        ([0.0, 0.0, 0.0], "undecided"),
        ([], "undecided"),
    ],
)
def test_a_verdict_needs_three_seeds_and_twice_the_standard_error(differences, outcome):
    verdict = verdict_of(differences)
    assert verdict.outcome == outcome
    assert verdict.seeds == len(differences)
    if len(differences) == 3:
        mean = sum(differences) / 3
        variance = sum((x - mean) ** 2 for x in differences) / 2
        assert verdict.mean == pytest.approx(mean)
        assert verdict.error == pytest.approx((variance / 3) ** 0.5)


def test_a_third_seed_cannot_decide_if_the_first_two_signs_differ():
    generator = random.Random(0)
    for _ in range(20_000):
        pair = generator.random(), -generator.random()
        assert verdict_of([*pair, generator.uniform(-3, 3)]).outcome == "undecided"


def test_comparisons_are_fair_and_run_names_are_unique():
    study_queue.check_fairness()
    runs = study_queue.planned_runs({})
    names = [run.name for run in runs]
    assert len(set(names)) == len(names)
    for suite, index in study_queue.ORDER:
        for name in study_queue.find_suite(suite).order[index]:
            family = study_queue.find_suite(suite).variants[name].family
            first = names.index(f"{suite}-{name}-0")
            assert names.index(f"{suite}-{name}-1") > first
            for rate in study_queue.find_suite(suite).learning_rates:
                assert names.index(f"{suite}-sweep-{family}-{rate:g}") < first
            assert f"{suite}-{name}-2" not in names
    for claim in study_queue.CLAIMS:
        assert {claim.better, claim.worse} <= set(study_queue.find_suite(claim.suite).variants)
    assert set(study_queue.SUITES) == {suite for suite, _ in study_queue.ORDER}


@pytest.mark.parametrize("name", list(study_queue.SUITES))
def test_each_variant_is_in_the_training_order_once(name):
    suite = study_queue.find_suite(name)
    assert sorted(itertools.chain(*suite.order)) == sorted(suite.variants)


@pytest.mark.parametrize(
    ("changes", "tolerance", "message"),
    [
        (
            {"model.position": None},
            0.03,
            "full has .* parameters, but plain has .*, expected a difference of at most 3%",
        ),
        ({"training.steps": 7}, 1, "training.steps is 6 for full, but 7 for plain, expected equal"),
        ({"task.label_smoothing": 0.2}, 1, "task.label_smoothing is 0.1 for full, but 0.2 for"),
    ],
)
def test_unfair_comparisons_raise_an_error(tiny, changes, tolerance, message, monkeypatch):
    suite = tiny_suite()
    plain = suite.variants["plain"]
    variants = {
        **suite.variants,
        "plain": dataclasses.replace(plain, run=configs.replace(plain.run, changes)),
    }
    unfair = dataclasses.replace(suite, variants=variants)
    monkeypatch.setattr(study_queue, "SUITES", {"digits": lambda: unfair})
    monkeypatch.setattr(study_queue, "TOLERANCE", tolerance)
    with pytest.raises(ValueError, match=message):
        study_queue.check_fairness()


def test_the_sweep_chooses_the_learning_rate(tiny):
    names = [run.name for run in study_queue.planned_runs({})]
    assert names == [*SWEEP, "digits-full-0", "digits-plain-0", "digits-full-1", "digits-plain-1"]
    assert [run.rate_is_known for run in study_queue.planned_runs({})] == [True] * 2 + [False] * 4
    runs = study_queue.planned_runs(swept())
    assert all(run.rate_is_known for run in runs)
    assert {run.config.training.learning_rate for run in runs[2:]} == {2e-3}
    assert [run.config.training.seed for run in runs] == [100, 100, 0, 0, 1, 1]
    assert [run.config.training.steps for run in runs] == [3, 3, 6, 6, 6, 6]
    diverged = swept() | {
        "digits-sweep-tiny-0.002": result(
            "digits-sweep-tiny-0.002", error="the loss is nan", evaluations=[]
        )
    }
    assert study_queue.planned_runs(diverged)[2].config.training.learning_rate == 1e-3


def test_a_sweep_is_extended_while_the_best_rate_is_at_its_edge(tiny, monkeypatch):
    monkeypatch.setattr(study_queue, "MAX_EXTENSIONS", 2)

    def rates(*accuracies):
        found = {
            f"digits-sweep-tiny-{rate:g}": result(f"digits-sweep-tiny-{rate:g}", value=value)
            for rate, value in accuracies
        }
        study_queue.check_results(found)
        return (
            study_queue.swept_rates("digits", "tiny", found),
            study_queue.chosen_rate("digits", "tiny", found),
        )

    lowest = [(1e-3, 0.5), (2e-3, 0.4)]
    assert rates(*lowest[:1]) == ([1e-3, 2e-3], None)
    assert rates(*lowest) == ([5e-4, 1e-3, 2e-3], None)
    assert rates(*lowest, (5e-4, 0.3)) == ([5e-4, 1e-3, 2e-3], 1e-3)
    assert rates(*lowest, (5e-4, 0.6)) == ([2.5e-4, 5e-4, 1e-3, 2e-3], None)
    assert rates(*lowest, (5e-4, 0.6), (2.5e-4, 0.7))[1] == 2.5e-4
    highest = [(1e-3, 0.4), (2e-3, 0.5), (4e-3, 0.45)]
    assert rates(*highest) == ([1e-3, 2e-3, 4e-3], 2e-3)


def test_a_third_seed_is_trained_where_it_can_decide(tiny):
    def queued(**values):
        return [run.name for run in study_queue.planned_runs(swept() | results(**values))]

    third = ["digits-full-2", "digits-plain-2"]
    assert not set(third) & set(queued(full_0=0.6, plain_0=0.5, full_1=0.6))
    assert queued(full_0=0.6, plain_0=0.5, full_1=0.6, plain_1=0.5)[-2:] == third
    assert queued(full_0=0.4, plain_0=0.5, full_1=0.4, plain_1=0.5)[-2:] == third
    assert not set(third) & set(queued(full_0=0.6, plain_0=0.5, full_1=0.4, plain_1=0.5))


def test_lower_losses_support_a_claim(tiny, monkeypatch):
    suite = tiny_suite(metric="loss")
    monkeypatch.setattr(study_queue, "SUITES", {"digits": lambda: suite})
    found = {
        name: result(name, value=value, metric="loss")
        for name, value in (("digits-full-0", 1.5), ("digits-plain-0", 1.7))
    }
    assert study_queue.differences(tiny, found) == pytest.approx({0: 0.2})
    assert study_queue.differences(tiny._replace(margin=0.05), found) == pytest.approx({0: 0.25})


# Runs


def finish(name, folder, found=None):
    runs = {run.name: run for run in study_queue.planned_runs(found or {})}
    return study_run.finish(runs[name], folder, folder / "results", folder)


def numbers(found):
    return [{**line, "seconds": 0} for line in found.evaluations]


@pytest.mark.slow
def test_runs_with_equal_seeds_are_equal_and_others_differ(tiny, tmp_path):
    first, again = (finish("digits-full-0", tmp_path / name, swept()) for name in "ab")
    other = finish("digits-full-1", tmp_path, swept())
    assert numbers(first) == numbers(again) != numbers(other)
    assert [line["step"] for line in first.evaluations] == [2, 4, 6]
    assert first.evaluations[0]["seconds"] <= first.evaluations[1]["seconds"]
    assert first.steps == 6
    assert first.cpu_seconds > 0
    assert first.config["training"]["learning_rate"] == first.learning_rate == 2e-3
    assert first.parameters == study_queue.parameters(study_queue.planned_runs({})[0].config.model)
    assert len(first.commit) == 40


def interrupt(monkeypatch, step):
    """Send SIGINT to this process at the end of a step."""
    from onescan.experiments.training.loop import Loop

    update = Loop.update

    def interrupted(loop, batches):
        update(loop, batches)
        if loop.state.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Loop, "update", interrupted)


def test_a_resumed_run_gives_the_same_results(tiny, tmp_path, monkeypatch):
    whole = finish("digits-full-0", tmp_path / "whole", swept())
    with monkeypatch.context() as patch:
        interrupt(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            finish("digits-full-0", tmp_path, swept())
    file = tmp_path / "digits-full-0.progress.json"
    saved = json.loads(file.read_text())
    assert saved["wall_seconds"] >= saved["cpu_seconds"] * 0.5 > 0
    file.write_text(json.dumps(saved | {"wall_seconds": 1000.0, "cpu_seconds": 900.0}))
    continued = finish("digits-full-0", tmp_path, swept())
    assert numbers(continued) == numbers(whole)
    assert continued.wall_seconds > 1000
    assert 900 < continued.cpu_seconds < 1000
    assert not file.exists()
    assert not (tmp_path / "digits-full-0").exists()


@pytest.mark.sampled
@pytest.mark.parametrize("reason", ["killed", "commit", "data"])
def test_a_run_starts_over_if_it_was_killed_or_its_commit_or_data_changed(
    tiny, tmp_path, monkeypatch, reason
):
    with monkeypatch.context() as patch:
        interrupt(patch, 4)
        with pytest.raises(KeyboardInterrupt):
            finish("digits-full-0", tmp_path, swept())
    file = tmp_path / "digits-full-0.progress.json"
    if reason == "killed":
        file.unlink()
    else:
        other = {"commit": "f" * 40} if reason == "commit" else {"data": {"text": "other"}}
        file.write_text(json.dumps(json.loads(file.read_text()) | other))
    trained = []
    with monkeypatch.context() as patch:
        from onescan.experiments.training.loop import Loop

        update = Loop.update
        patch.setattr(
            Loop, "update", lambda loop, batches: (trained.append(1), update(loop, batches))
        )
        finish("digits-full-0", tmp_path, swept())
    assert len(trained) == 6


def test_a_diverged_run_has_a_result(tiny, tmp_path, monkeypatch):
    suite = tiny_suite(learning_rates=(1e30, 2e-3))
    monkeypatch.setattr(study_queue, "SUITES", {"digits": lambda: suite})
    found = finish("digits-sweep-tiny-1e+30", tmp_path)
    assert "training diverged at step 1" in found.error
    assert found.evaluations == []
    assert study_page.format_metric("accuracy", [found]) == "diverged"


def test_models_are_trained_for_as_many_steps_as_fit_in_the_time():
    seconds = json.loads(study_queue.STEP_TIMES.read_text(encoding="utf-8"))["seconds"]
    variants = study_queue.find_suite("time").variants
    assert len(variants) == len(seconds) * len(study_queue.MINUTES)
    for name, variant in variants.items():
        model, minutes = name.rsplit("_", 1)
        steps = variant.run.training.steps
        # Evaluations are evenly spaced, so the number of steps is a multiple of five.
        assert steps * seconds[model] == pytest.approx(
            60 * int(minutes.removesuffix("min")), abs=3 * seconds[model]
        )
        assert steps % study_queue.EVALUATIONS == 0


def test_timed_runs_have_evenly_spaced_evaluations():
    variant = study_queue._timed_variant("lightnet", 64, minutes=0.1, step_seconds=0.4)
    task = variant.run.build_task()
    per_epoch = task.steps_per_epoch(variant.run.training.batch_size)
    assert per_epoch == study_queue.STEPS_PER_EPOCH
    assert variant.run.training.steps == 15
    plan = Plan.of(variant.run.training, per_epoch)
    assert [step for step in range(1, 16) if plan.evaluates(step)] == [3, 6, 9, 12, 15]


@pytest.mark.slow
def test_steps_are_timed_for_all_models_in_turn(tmp_path, monkeypatch):
    lightnet = study_queue.canvas_models()["lightnet"]
    monkeypatch.setattr(study_queue, "canvas_models", lambda: {"lightnet": lightnet})
    monkeypatch.setattr(study_queue, "SIDES", (32, 48))
    file = tmp_path / "times.json"
    study.measure(rounds=2, steps=3, file=file)
    seconds = json.loads(file.read_text(encoding="utf-8"))["seconds"]
    assert list(seconds) == ["lightnet_32", "lightnet_48"]
    assert all(0 < value < 60 for value in seconds.values())


def test_a_result_that_cannot_be_written_does_not_lose_the_run(tiny, tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(study_run, "write_result", full)
        with pytest.raises(OSError, match="no space left"):
            finish("digits-full-0", tmp_path, swept())
    from onescan.experiments.training.loop import Loop

    monkeypatch.setattr(Loop, "update", full)  # nothing is trained again
    found = finish("digits-full-0", tmp_path, swept())
    assert found.steps == 6
    assert study_run.read_results(tmp_path / "results") == {"digits-full-0": found}


def test_code_that_changes_during_a_run_gives_no_result(tiny, tmp_path, monkeypatch):
    commits = iter((COMMIT, "f" * 40))
    monkeypatch.setattr(study_run, "clean_commit", lambda: next(commits))
    with pytest.raises(ValueError, match="was changed while digits-full-0 was trained"):
        finish("digits-full-0", tmp_path, swept())
    assert not study_run.read_results(tmp_path / "results")


def test_one_process_trains_in_a_folder(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "nice", lambda _: None)
    run = study_queue.planned_runs({})[0]

    def taken(folder):
        raise ValueError(f"{folder} is in use")

    monkeypatch.setattr(study_run, "locked", taken)
    with pytest.raises(SystemExit) as stopped:
        study_run.train_run(run, tmp_path, tmp_path / "results", tmp_path)
    assert stopped.value.code == study_run.BUSY
    assert "in use" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_found_before_training(children, tmp_path):
    (tmp_path / "results").write_text("a file")
    with pytest.raises(OSError, match="File exists"):
        study.run(tmp_path, results=tmp_path / "results", folder=tmp_path, suites=("digits",))


class FakeChild:
    """A process that ends with a code, and writes no result."""

    def __init__(self, code, wait=lambda: None):
        self.code, self.waits, self.signals = code, wait, []

    def wait(self):
        self.waits()
        return self.code

    def send_signal(self, number):
        self.signals.append(number)


@pytest.fixture
def children(tiny, monkeypatch):
    """Replace the processes of runs; the list of those that were started."""
    started = []

    def start(name, *_):
        started.append(name)
        return children.next()

    def children():
        return None

    children.started = started
    monkeypatch.setattr(study, "start", start)
    monkeypatch.setattr(study, "clean_commit", lambda: COMMIT)
    monkeypatch.setattr(
        signal, "signal", lambda number, handler: handlers.update({number: handler})
    )
    handlers = children.handlers = {}
    return children


def run_all(folder):
    study.run(folder, results=folder / "results", folder=folder, suites=("digits",))


@pytest.mark.parametrize("code", [130, -signal.SIGINT, -signal.SIGTERM])
def test_run_ends_when_its_child_was_interrupted(children, tmp_path, code):
    children.next = lambda: FakeChild(code)
    with pytest.raises(SystemExit, match="interrupted: call `run` again"):
        run_all(tmp_path)
    assert len(children.started) == 1


def test_run_forwards_signals_and_starts_nothing_afterwards(children, tmp_path):
    child = FakeChild(0, wait=lambda: children.handlers[signal.SIGTERM]())
    children.next = lambda: child
    with pytest.raises(SystemExit, match="interrupted"):
        run_all(tmp_path)
    assert child.signals == [signal.SIGINT]
    assert len(children.started) == 1


def test_run_goes_on_after_a_failed_run_but_not_beside_another_process(children, tmp_path):
    children.next = lambda: FakeChild(1)
    with pytest.raises(SystemExit, match=r"these runs failed: digits-sweep-tiny-0\.001, digits-"):
        run_all(tmp_path)
    assert children.started == list(SWEEP)
    children.next = lambda: FakeChild(study_run.BUSY)
    with pytest.raises(SystemExit, match="another process trains in"):
        run_all(tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("digits-other-0", {"variant": "full"}, "digits-other-0 has a result, but it is not a run"),
        ("digits-full-0", {"variant": "plain"}, r"other settings than the queue \(variant\)"),
        ("digits-full-0", {"seed": 1}, r"\(seed\)"),
        ("digits-full-0", {"parameters": 7}, r"\(parameters\)"),
        ("digits-full-0", {"training.steps": 7}, r"\(training.steps\)"),
        ("digits-full-0", {"training.learning_rate": 1e-3}, r"\(training.learning_rate\)"),
        ("digits-full-0", {"model.depth": 2}, r"\(model.depth\)"),
    ],
)
def test_results_of_other_settings_raise_an_error(tiny, name, changes, message):
    if "." in next(iter(changes)):
        run = study_queue._run("digits", "full", 0, swept())
        found = result(name, config=configs.to_dict(configs.replace(run.config, changes)))
    else:
        found = dataclasses.replace(result("digits-full-0"), name=name, **changes)
    study_queue.check_results(swept() | results(full_0=0.5))
    with pytest.raises(ValueError, match=message):
        study_queue.check_results(swept() | {name: found})
    with pytest.raises(ValueError, match="the sweep of its learning rate has no result"):
        study_queue.check_results(results(full_0=0.5))


def test_errors_name_damaged_and_misnamed_result_files(tmp_path):
    study_run.write_result(result("digits-full-0"), tmp_path)
    assert study_run.read_results(tmp_path) == {"digits-full-0": result("digits-full-0")}
    file = tmp_path / "digits-full-0.json"
    file.rename(tmp_path / "digits-full-1.json")
    with pytest.raises(ValueError, match=r"full-1.json contains the result of digits-full-0"):
        study_run.read_results(tmp_path)
    (tmp_path / "digits-full-1.json").write_text('{"name": "digits-full-1"}')
    with pytest.raises(ValueError, match=r"full-1.json is not a result of the study"):
        study_run.read_results(tmp_path)


def test_status_estimates_cpu_time_from_finished_runs(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(study_queue, "check_fairness", lambda: None)
    found = swept() | {"digits-full-0": result("digits-full-0", cpu_seconds=1800.0)}
    for each in found.values():
        study_run.write_result(each, tmp_path)
    study.status(tmp_path, hours=0.8)
    shown = capsys.readouterr().out
    assert "3 of 6 runs are finished" in shown
    assert "2 of the 3 remaining runs fit in 0.8 CPU hours" in shown
    # The finished run of "full" took 1800 s. All runs of its family took 120, 120 and 1800 s.
    lines = [line.split() for line in shown.splitlines()]
    assert ["digits:", "tiny", "(sweep)", "2", "0", "2.0"] in lines
    assert ["digits:", "full", "1", "1", "30.0"] in lines
    assert ["digits-plain-0", "13", "0.2"] in lines
    assert ["digits-full-1", "30", "0.7"] in lines


def test_errors_name_missing_data_files(tmp_path):
    run = study_queue.planned_runs({})[0]
    with pytest.raises(ValueError, match=r"which does not contain cifar10-train.parquet"):
        study_run.with_data(run.config, tmp_path, tmp_path)


def test_sweeps_do_not_read_the_test_data(tmp_path):
    text = b"to be or not to be, that is the question\n" * 50
    (tmp_path / "tinyshakespeare.txt").write_bytes(text)
    runs = {run.name: run for run in study_queue.planned_runs({})}
    for name, part in (("text-sweep-lightnet-0.003", 0.9), ("text-lightnet-0", 1.0)):
        config, digests = study_run.with_data(runs[name].config, tmp_path, tmp_path / "runs")
        assert Path(config.data.path).read_bytes() == text[: round(part * len(text))]
        assert list(digests) == ["tinyshakespeare.txt"]
    images = runs["images-sweep-lightnet-0.001"].config.data
    assert (images.path, runs["images-lightnet-0"].config.data.path) == (
        "cifar10-train.parquet",
        "cifar10",
    )


@pytest.mark.slow
def test_a_process_trains_one_run_on_cifar10_files(tmp_path):
    from tiny_images import write_parquet

    for split in ("train", "test"):
        write_parquet(tmp_path / f"cifar10-{split}.parquet", [n % 10 for n in range(160)])
    name = "images-sweep-lightnet-0.001"
    words = ["--data", tmp_path, "--results", tmp_path / "results", "--folder", tmp_path / "runs"]
    # The tests may run on code that is not committed.
    code = "import study, study_run; study_run.clean_commit = lambda: '0' * 40; study.main()"
    command = [sys.executable, "-c", code, "train", name, *map(str, words)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path})
    found = study_run.read_results(tmp_path / "results")[name]
    assert found.steps == 2
    assert sorted(found.data) == ["cifar10-test.parquet", "cifar10-train.parquet"]
    assert found.environment["threads"] == 1
    assert str(tmp_path) not in (tmp_path / "results" / f"{name}.json").read_text()
    assert not (tmp_path / "runs" / name).exists()


# The page


OVERVIEW = f"# Results\n\n{study_page.BEGIN}\nold\n{study_page.END}\n\nThe rest.\n"


@pytest.fixture(autouse=True)
def _overview(tmp_path):
    """The overview of all results, in which the table of claims is replaced."""
    (tmp_path / "results.md").write_text(OVERVIEW)


def page_of(found, folder):
    study_page.write_page(found, folder)
    return (folder / "study.md").read_text()


def test_the_page_and_its_figures_depend_only_on_the_results(tiny, tmp_path):
    values = {"full_0": 0.6, "full_1": 0.61, "full_2": 0.62}
    values |= {"plain_0": 0.5, "plain_1": 0.52, "plain_2": 0.51}
    for each in (swept() | results(**values)).values():
        study_run.write_result(each, tmp_path / "study")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "study_old.svg").write_text("older")
    study.table(tmp_path / "study", tmp_path)
    page = (tmp_path / "study.md").read_text()
    figure = (tmp_path / "images" / "study_digits.svg").read_bytes()
    row = "| Positions help | 90 vs. 80 | 61.00% ± 1.00 vs. 51.00% ± 1.00 | +10.00 ± 0.58 |"
    assert f"{row} 3 | **confirmed** |" in page
    assert "| Model full | 61.00% ± 1.00 | 60.00, 61.00, 62.00 | " in page
    assert " | 0.002 | 2.0 |" in page
    assert "| Model full | 1.00% | **2.00%** |" in page
    assert "Finished runs: 8 of 8, not counting third seeds" in page
    assert "Missing runs" not in page
    assert "](images/study_digits.svg)" in page
    assert not (tmp_path / "images" / "study_old.svg").exists()
    overview = (tmp_path / "results.md").read_text()
    assert f"{row} 3 | **confirmed** |" in overview
    assert "old" not in overview
    assert overview.startswith("# Results\n\n")
    assert overview.endswith(f"\n\n{study_page.END}\n\nThe rest.\n")
    study.table(tmp_path / "study", tmp_path)
    assert (tmp_path / "results.md").read_text() == overview
    assert (tmp_path / "study.md").read_text() == page
    assert (tmp_path / "images" / "study_digits.svg").read_bytes() == figure


def test_the_page_shows_claims_that_are_not_confirmed(tiny, tmp_path):
    assert "| Positions help | 90 vs. 80 |  |  | 0 | not run yet |" in page_of({}, tmp_path)
    two = results(full_0=0.6, plain_0=0.5, full_1=0.61, plain_1=0.5)
    assert "+10.50 ± 0.50 | 2 | **undecided** |" in page_of(two, tmp_path)
    reverse = {name: dataclasses.replace(each) for name, each in two.items()}
    reverse |= results(full_2=0.4, plain_2=0.5)
    assert "3 | **undecided** |" in page_of(reverse, tmp_path)
    refuted = results(full_0=0.4, plain_0=0.5, full_1=0.4, plain_1=0.5, full_2=0.41, plain_2=0.5)
    assert "-9.67 ± 0.33 | 3 | **refuted** |" in page_of(refuted, tmp_path)


def test_the_page_lists_missing_runs(tiny, tmp_path):
    page = page_of(results(full_0=0.6), tmp_path)
    assert "## Missing runs" in page
    assert "- Digits, runs: Model full (1); Model plain (2)\n" in page
    assert "- Digits, runs of learning rate sweeps: Model full (2)\n" in page


@pytest.mark.parametrize("field", ["steps", "data"])
def test_unequal_results_are_not_compared(tiny, tmp_path, field):
    found = results(full_0=0.6, plain_0=0.5)
    changed = {"steps": 7, "data": {"file": "other"}}[field]
    name = "digits-plain-0"
    found[name] = dataclasses.replace(found[name], **{field: changed})
    with pytest.raises(ValueError, match="differ in steps or data, so they cannot"):
        study_page.write_page(found, tmp_path)


def test_figures_show_perplexity_over_length_or_accuracy_over_time(tiny, tmp_path, monkeypatch):
    lines = [{"step": n, "epoch": n, "seconds": 60.0 * n, "accuracy": n / 10} for n in (1, 2)]
    perplexities = {"32": 5.0, "128": 4.0}
    one = result("digits-full-0", perplexities=perplexities, evaluations=lines)
    one.config["data"]["size"] = 64
    found = {"digits-full-0": one}
    variants = {
        name: dataclasses.replace(variant, step_seconds=60.0)
        for name, variant in tiny_suite().variants.items()
    }
    timed = tiny_suite(variants=variants)
    for suite in (tiny_suite(lengths=(32, 128, 512)), timed):
        monkeypatch.setattr(study_queue, "SUITES", {"digits": lambda suite=suite: suite})
        figure = study_page.plot("digits", list(found.values()))
        axes = figure.axes[-1]
        points = list(zip(*axes.lines[0].get_data(), strict=True))
        expected = [(32, 5.0), (128, 4.0)] if suite.lengths else [(1.0, 10.0), (2.0, 20.0)]
        assert [x for point in points for x in point] == pytest.approx(sum(expected, ()))
        if suite.lengths:
            assert "| 5.00 | 4.00 |  |" in page_of(found, tmp_path)


def test_the_margin_changes_the_verdict_but_not_the_difference(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(study_queue, "CLAIMS", (tiny._replace(margin=0.01),))
    values = {f"full_{seed}": 0.6 for seed in range(3)}
    values |= {f"plain_{seed}": 0.605 + seed / 1000 for seed in range(3)}
    assert "-0.60 ± 0.06 | 3 | **confirmed** |" in page_of(results(**values), tmp_path)


def test_a_diverged_run_is_shown_as_such(tiny, tmp_path):
    found = results(full_0=0.6, full_1=0.6, plain_0=0.5) | {
        "digits-plain-1": diverged("digits-plain-1")
    }
    page = page_of(swept() | found, tmp_path)
    assert "| 60.00% ± 0.00 vs. diverged |  | 2 | **undecided** |" in page
    assert "These runs diverged, and are not in the figure: digits-plain-1." in page
    assert verdict_of([0.1, float("nan"), 0.1]).outcome == "undecided"
    only = {"digits-full-0": diverged("digits-full-0")}
    assert "study_digits.svg" not in page_of(only, tmp_path)
    assert not list((tmp_path / "images").iterdir())


def test_a_page_that_fails_leaves_the_old_one(tiny, tmp_path):
    page = page_of(results(full_0=0.6, plain_0=0.5), tmp_path)
    found = results(full_0=0.6, plain_0=0.5)
    found["digits-plain-0"] = dataclasses.replace(found["digits-plain-0"], data={"file": "other"})
    with pytest.raises(ValueError, match="differ in"):
        study_page.write_page(found, tmp_path)
    assert (tmp_path / "study.md").read_text() == page
    assert (tmp_path / "images" / "study_digits.svg").exists()


def test_a_family_whose_sweep_diverged_does_not_stop_the_others(tiny, tmp_path):
    found = {name: diverged(name) for name in SWEEP}
    assert not any(run.rate_is_known for run in study_queue.planned_runs(found)[2:])
    study_queue.check_results(found)
    assert "| Model full | diverged | diverged |" in page_of(found, tmp_path)


def test_sweeps_of_generated_images_do_not_read_the_test_digits():
    runs = {run.name: run for run in study_queue.planned_runs({})}
    sweep, final = (
        runs[name].config.data.build()
        for name in ("time-sweep-lightnet-0.001", "time-lightnet_64_5min-0")
    )
    seen = {digit for part in (sweep.train, sweep.test) for digit in part.digits.tolist()}
    assert not seen & set(final.test.digits.tolist())
    assert seen == set(final.train.digits.tolist())


@pytest.mark.slow
def test_the_page_in_docs_is_up_to_date(tmp_path):
    overview = (ROOT / "docs" / "results.md").read_text()
    (tmp_path / "results.md").write_text(overview)
    page = page_of(study_run.read_results(ROOT / "docs" / "study"), tmp_path)
    assert page == (ROOT / "docs" / "study.md").read_text()
    assert overview == (tmp_path / "results.md").read_text()
    names = {path.name for path in (tmp_path / "images").iterdir()}
    assert names == {path.name for path in (ROOT / "docs" / "images").glob("study_*.svg")}


def test_the_readme_counts_the_verdicts():
    page = (study.ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    _, _, claims = page.partition("<!-- claims")
    claims, _, _ = claims.partition("<!-- end of claims")
    verdicts = [line.split("|")[-2].strip(" *") for line in claims.splitlines() if "|" in line][2:]
    words = [
        "none",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
    ]
    counts = [
        words[verdicts.count(name)] for name in ("confirmed", "refuted", "undecided", "not run yet")
    ]
    readme = " ".join((study.ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"tests {len(verdicts)} of their claims with small models" in readme
    assert "So far, {} are confirmed, {} refuted and {} undecided".format(*counts) in readme
    assert f"{counts[-1]} have not been run yet" in readme
