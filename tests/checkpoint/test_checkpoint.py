import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import threading
from hashlib import sha256
from pathlib import Path
from time import sleep

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from tiny_run import (
    STEPS,
    KilledError,
    StripesConfig,
    TinyModel,
    TinyModelConfig,
    assert_same,
    crash,
    interrupt,
    press_ctrl_c_at,
    raise_at,
    tiny_run,
)
from torch.distributed.checkpoint import HuggingFaceStorageWriter

import onescan
from onescan import __version__, allocation, configs
from onescan.checkpoint import files, weights
from onescan.experiments.tasks import Evaluation, ImageClassification
from onescan.experiments.training import distributed, evaluate, logging, read_metrics, train
from onescan.experiments.training.folder import (
    read_manifest,
    read_result,
    write_json,
    write_result,
)
from onescan.experiments.training.runs import build_task, run_config
from onescan.experiments.training.state import last_state
from onescan.inference.classification import classify
from onescan.inference.loading import load
from onescan.inputs import Format, read_image
from onescan.layers.mixers import LightNetMixerConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.models.presets import PRESETS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run."""
    return train(tiny_run(), tmp_path_factory.mktemp("whole") / "run")


# Interruption and exact resume


@pytest.mark.sampled
@pytest.mark.parametrize("step", [1, 2, 4, 7, 12])
def test_ctrl_c_saves_and_the_run_resumes_exactly(tmp_path, whole, step):
    interrupt(tiny_run(), tmp_path, step)
    assert (tmp_path / "state" / f"step_{step}").exists()
    seen = []
    assert_same(train(tiny_run(), tmp_path, progress=seen.append), whole)
    assert [now.step for now in seen] == list(range(step + 1, STEPS + 1))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["loss", "predict", "augment"])
@pytest.mark.parametrize("call", [1, 2])
def test_a_signal_at_any_moment_saves(tmp_path, whole, monkeypatch, number, where, call):
    calls, original = [], getattr(ImageClassification, where)

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            signal.raise_signal(number)
        return original(*args, **kwargs)

    monkeypatch.setattr(ImageClassification, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_run(), tmp_path)
    assert list((tmp_path / "state").glob("step_*"))
    assert_same(train(tiny_run(), tmp_path), whole)


def test_a_second_ctrl_c_ends_at_once(tmp_path, whole, monkeypatch):
    monkeypatch.setattr(distributed, "SAME_SIGNAL_S", 0.0)

    def insist(now):
        if now.step == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(tiny_run(), tmp_path, progress=insist)
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["step_2"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_same(train(tiny_run(), tmp_path), whole)


@pytest.mark.sampled
@pytest.mark.parametrize("step", [1, 3, 5, 12])
def test_a_crashed_run_resumes_from_the_last_checkpoint(tmp_path, whole, step):
    crash(tiny_run(), tmp_path, step)
    seen = []
    assert_same(train(tiny_run(), tmp_path, progress=seen.append), whole)
    last_saved = (step - 1) // 2 * 2  # every half epoch of 4 steps, before the step is shown
    assert seen[0].step == last_saved + 1


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_of_any_write_loses_nothing(tmp_path, monkeypatch, stride):
    run, original = tiny_run(steps=4), files._sync  # called before and after every rename
    whole = train(run, tmp_path / "whole")
    for death in itertools.count(1, stride):
        calls = []

        def sync(path, calls=calls, death=death):
            calls.append(path)
            if len(calls) == death:
                raise KilledError
            original(path)

        folder = tmp_path / str(death)
        with monkeypatch.context() as patch:
            patch.setattr(files, "_sync", sync)
            try:
                train(run, folder)
                break
            except KilledError:
                pass
        assert_same(train(run, folder), whole)
        assert not list(folder.rglob("*.partial"))
    assert death > 15


def test_a_kill_while_old_files_are_removed_loses_nothing(tmp_path, whole, monkeypatch):
    run, original = tiny_run(), shutil.rmtree

    def die(*_):
        raise KilledError

    for overwrite in (False, True):  # an old checkpoint; a whole run
        monkeypatch.setattr(shutil, "rmtree", die)
        with pytest.raises(KilledError):
            train(run, tmp_path / "run", overwrite=overwrite)
        assert list((tmp_path / "run").rglob("*.partial"))
        monkeypatch.setattr(shutil, "rmtree", original)
        assert_same(train(run, tmp_path / "run"), whole)
        assert not list((tmp_path / "run").rglob("*.partial"))


@pytest.mark.parametrize(
    ("kills", "epochs", "least"), [(2, 4, 0), pytest.param(10, 15, 6, marks=pytest.mark.slow)]
)
def test_sigkill_at_random_moments_loses_nothing(tmp_path, kills, epochs, least):
    """With workers, an EMA and repeated images; some kills hit while a state is written."""
    run = configs.replace(
        tiny_run(epochs=epochs, checkpoint_every=0.25, ema_decay=0.9),
        {"machine.workers": 1, "task.augment_repeats": 2},
    )
    whole = train(run, tmp_path / "whole")
    chance, fork, folder = random.Random(0), multiprocessing.get_context("fork"), tmp_path / "run"
    reached = []
    for _ in range(kills):
        updates = fork.Semaphore(0)
        show = lambda _, updates=updates: updates.release()
        process = fork.Process(target=train, args=(run, folder), kwargs={"progress": show})
        process.start()
        for _ in range(chance.randrange(7)):
            assert updates.acquire(timeout=60)
        sleep(chance.uniform(0, 0.03))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        reached.append(int(last.name[5:]) if (last := last_state(folder)) else 0)
    assert reached == sorted(reached)
    assert least <= reached[-1] < whole.steps
    assert_same(train(run, folder), whole)


@pytest.mark.slow
def test_two_processes_do_not_write_to_one_folder(tmp_path, whole):
    def start_another(now):
        if now.step == 3:
            code = (
                f"import onescan, tiny_run; onescan.train(tiny_run.tiny_run(), {str(tmp_path)!r})"
            )
            other = run_python(code)
            assert "ValueError: another process is using" in other.stderr

    assert_same(train(tiny_run(), tmp_path, progress=start_another), whole)


def run_python(code):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])
    environment = os.environ | {"PYTHONPATH": paths}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_an_unfinished_line_is_dropped(tmp_path, whole):
    interrupt(tiny_run(), tmp_path, 5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "epo')
    assert len(read_metrics(tmp_path)) == 6
    assert_same(train(tiny_run(), tmp_path), whole)


@pytest.mark.parametrize(
    ("owner", "method"), [(torch.optim.AdamW, "step"), (HuggingFaceStorageWriter, "finish")]
)
def test_ctrl_c_splits_neither_an_update_nor_a_checkpoint(
    tmp_path, whole, monkeypatch, owner, method
):
    original, calls = getattr(owner, method), []

    def interrupted(*args, **kwargs):
        result = original(*args, **kwargs)
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(tiny_run(), tmp_path)
    assert_same(train(tiny_run(), tmp_path), whole)


def test_a_run_may_be_in_another_thread(tmp_path, whole):
    results = []
    thread = threading.Thread(target=lambda: results.append(train(tiny_run(), tmp_path)))
    thread.start()
    thread.join()
    assert_same(results[0], whole)


# The run folder


def test_a_finished_run_is_not_trained_again(tmp_path):
    first = train(tiny_run(steps=3), tmp_path)
    files_before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = train(tiny_run(steps=3), tmp_path, progress=raise_at(1, AssertionError("trained")))
    assert again.reused
    assert (again.metrics, again.steps, again.folder) == (first.metrics, 3, tmp_path)
    for name, array in first.evaluation.arrays.items():
        assert torch.equal(again.evaluation.arrays[name], array)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files_before
    shutil.rmtree(tmp_path / "state")  # what only a run that goes on needs
    assert train(tiny_run(steps=3), tmp_path).reused


@pytest.mark.parametrize("name", ["model.safetensors", "result.json", "evaluation.safetensors"])
def test_missing_files_of_a_finished_run_are_written_again(tmp_path, name):
    train(tiny_run(steps=3), tmp_path)
    before = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    assert not train(tiny_run(steps=3), tmp_path, progress=raise_at(1, AssertionError)).reused
    assert (tmp_path / name).read_bytes() == before


def test_another_run_is_refused_with_the_differences(tmp_path):
    train(tiny_run(steps=2), tmp_path)
    other = configs.replace(
        tiny_run(steps=4), {"model.width": 5, "name": "b", "task.augment": None}
    )
    with pytest.raises(ValueError, match="holds another run") as caught:
        train(other, tmp_path)
    assert "name is 'tiny' in the folder and 'b' in this run" in str(caught.value)
    assert "model.width is 6 in the folder and 5 in this run" in str(caught.value)
    assert ", and 1 more; choose another folder, or pass overwrite=True to" in str(caught.value)
    assert train(tiny_run(steps=2), tmp_path).reused


def test_a_finished_run_with_more_epochs_is_continued_from_its_weights(tmp_path):
    train(tiny_run(steps=2), tmp_path)
    with pytest.raises(ValueError, match=r"training\.steps is 2 .* and 4 in this run") as caught:
        train(tiny_run(steps=4), tmp_path)
    hint = f"to continue from its weights, choose another folder and set init_from='{tmp_path}'"
    assert str(caught.value).endswith(hint)
    with pytest.raises(ValueError, match="holds another run") as caught:
        train(configs.replace(tiny_run(steps=4), {"model.width": 5}), tmp_path)
    assert "init_from" not in str(caught.value)


def test_a_run_that_cannot_be_trained_overwrites_nothing(tmp_path, monkeypatch):
    result = train(tiny_run(steps=2), tmp_path)
    for change, says in {
        "model.num_classes": (4, "expected model.num_classes 3"),
        "machine.gradient_accumulation_steps": (3, "expected a multiple of 3"),
        "machine.device": ("meta", "machine.device is 'meta', expected auto"),
    }.items():
        other = configs.replace(tiny_run(steps=3), {change: says[0]})
        with pytest.raises(ValueError, match=says[1]):
            train(other, tmp_path, overwrite=True)
    monkeypatch.setattr(logging, "find_spec", lambda _: None)
    tracked = configs.replace(tiny_run(steps=3), {"machine.trackers": ("wandb",)})
    with pytest.raises(ImportError, match=r"machine\.trackers .*wandb"):
        train(tracked, tmp_path, overwrite=True)
    again = train(tiny_run(steps=2), tmp_path)
    assert again.reused
    assert again.metrics == result.metrics


def test_a_run_does_not_resume_with_other_data(tmp_path, monkeypatch):
    interrupt(tiny_run(), tmp_path, 3)
    build = StripesConfig.build
    shorter = lambda self: build(dataclasses.replace(self, examples=24))
    monkeypatch.setattr(StripesConfig, "build", shorter)
    with pytest.raises(
        ValueError,
        match=r"the data has changed .*: there were 33 training examples, now there are 24",
    ):
        train(tiny_run(), tmp_path)


def test_the_best_weights_of_lost_steps_are_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(ImageClassification, "score", lambda *_: 0.0)  # the first is the best
    run, best = tiny_run(checkpoint_every=1.0), tmp_path / "best.safetensors"
    crash(run, tmp_path, 9)
    assert weights.read_notes(best)["step"] == 4
    weights.save_weights(best, {}, {"step": 10})  # as of an evaluation that may come out otherwise
    train(run, tmp_path)
    assert weights.read_notes(best)["step"] == 12


def test_a_resumed_run_keeps_the_metrics_of_its_checkpoint(tmp_path):
    known = []
    for _ in range(2):  # the second goes on from step 8, and gets no further
        crash(tiny_run(), tmp_path, 9)
        known.append(load(tmp_path).metrics)
    assert known[0] == known[1] != {}


def test_an_error_of_an_op_after_the_first_step_is_divergence(tmp_path, monkeypatch):
    original, calls = ImageClassification.loss, []

    def refuse(self, model, batch):
        calls.append(1)
        if len(calls) == 4:
            raise ValueError("log_decay ranges from -inf to 0")
        return original(self, model, batch)

    monkeypatch.setattr(ImageClassification, "loss", refuse)
    says = (
        r"training diverged at step 3: log_decay ranges from -inf to 0; "
        r"the last good checkpoint is .*step_2; try a smaller"
    )
    with pytest.raises(FloatingPointError, match=says):
        train(tiny_run(), tmp_path)


def test_weights_are_as_readable_as_other_files(whole):
    modes = {(whole.folder / name).stat().st_mode for name in ("model.safetensors", "config.json")}
    assert len(modes) == 1


def test_an_unreadable_state_is_not_called_damaged(tmp_path, monkeypatch):
    interrupt(tiny_run(), tmp_path, 3)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "_digest", refuse)
    with pytest.raises(OSError, match=r"cannot read .*step_3: Permission denied"):
        train(tiny_run(), tmp_path)


def test_overwrite_starts_from_scratch_and_keeps_other_files(tmp_path):
    train(tiny_run(steps=2), tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    result = train(tiny_run(steps=3), tmp_path, overwrite=True)
    assert (result.steps, result.reused) == (3, False)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 3]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not train(tiny_run(steps=3), tmp_path, overwrite=True).reused


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["notes.txt", "config.json", "model.safetensors"])
@pytest.mark.parametrize("text", ["{}", '{"onescan": 3}', '{"onescan": "0.1"}', "[]"])
def test_a_folder_that_holds_no_run_is_refused_and_kept(tmp_path, overwrite, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match="choose another folder"):
        train(tiny_run(), tmp_path, overwrite=overwrite)
    assert [path.read_text() for path in tmp_path.iterdir()] == [text]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_damaged_config_is_refused_and_kept(whole, tmp_path, overwrite):
    path = copy(whole.folder, tmp_path) / "config.json"
    for content in (path.read_bytes()[:-9], b"mine", b"", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"config\.json is damaged .*; choose another folder"):
            train(tiny_run(), path.parent, overwrite=overwrite)
        assert path.read_bytes() == content


def test_a_run_without_a_checkpoint_is_replaced(tmp_path, whole):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds no run"):
        train(tiny_run(), tmp_path)
    with pytest.raises(ValueError, match=r"notes\.txt is a file"):
        train(tiny_run(), tmp_path / "notes.txt")
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match="3 classes"):
        train(configs.replace(tiny_run(), {"model.num_classes": 4}), folder)
    (folder / "notes.txt").write_text("mine")
    assert_same(train(tiny_run(), folder), whole)
    assert run_config(folder) == tiny_run()
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("left", ["state", "model.safetensors"])
def test_a_run_with_any_checkpoint_is_not_replaced(whole, tmp_path, left):
    folder = copy(whole.folder, tmp_path)
    shutil.rmtree(folder / "state") if left != "state" else (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds another run"):
        train(tiny_run(seed=1), folder)


def test_a_refused_config_writes_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"size is 64, but .* 33 .*--training\.batch-size 4"):
        train(tiny_run(batch_size=64), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Loading


def test_image_files_are_classified(whole, tmp_path):
    checkpoint = load(whole.folder)
    paths = [tmp_path / "rows.png", tmp_path / "columns.png"]
    for path, values in zip(paths, ([0, 255] * 2, [0] * 4), strict=True):
        Image.fromarray(np.array([values] * 4, dtype=np.uint8)).save(path)
    probabilities = classify(checkpoint.model, paths, checkpoint.format)
    images = torch.stack([read_image(path, checkpoint.format) for path in paths])
    torch.testing.assert_close(probabilities, checkpoint.model(images).softmax(dim=1).detach())
    with pytest.raises(FileNotFoundError, match=r"nowhere\.png"):
        classify(checkpoint.model, [paths[0], tmp_path / "nowhere.png"], checkpoint.format)
    with pytest.raises(ValueError, match=r"the model reads other data, not '.*rows\.png'"):
        classify(checkpoint.model, paths, Format())
    with pytest.raises(ValueError, match="paths is empty"):
        classify(checkpoint.model, [], checkpoint.format)


def test_a_trained_model_is_loaded(whole):
    for path in [whole.folder, str(whole.folder), whole.folder / "model.safetensors"]:
        checkpoint = load(path)
        assert run_config(path) == tiny_run()
        assert checkpoint.class_names == ("rows", "columns", "noise")
        assert checkpoint.metrics == whole.metrics
        assert checkpoint.folder == whole.folder
        assert not checkpoint.model.training
        task = build_task(checkpoint)
        assert checkpoint.format == task.format
        assert evaluate(checkpoint.model, task).metrics == whole.metrics


def test_an_unfinished_run_is_loaded_without_its_state(stopped, tmp_path):
    folder = copy(stopped, tmp_path)
    shutil.rmtree(folder / "state")
    assert load(folder).metrics == {}
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"run has no model\.safetensors"):
        load(folder)


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    run = configs.replace(tiny_run(steps=4, checkpoint_every=0.25), {"model.tied": True})
    want = train(run, tmp_path / "whole")
    crash(run, tmp_path / "run", 3)
    assert_same(train(run, tmp_path / "run"), want)
    model = load(tmp_path / "run").model
    assert model.outer.weight is model.inner.weight
    stored = safetensors.torch.load_file(tmp_path / "run" / "model.safetensors")
    assert "inner.weight" in stored
    assert "outer.weight" not in stored


def test_a_file_that_a_run_lacks_is_named_with_the_reason(stopped, tmp_path):
    folder = copy(stopped, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"run has no ema\.safetensors: only runs with"):
        load(folder / "ema.safetensors")
    (folder / "best.safetensors").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError, match=r"run has no best\.safetensors: training writes"):
        load(folder / "best.safetensors")
    with pytest.raises(
        FileNotFoundError, match=r"run has no other\.safetensors: its weights are in"
    ):
        load(folder / "other.safetensors")


def test_damaged_weights_can_be_written_again(stopped, tmp_path):
    folder = copy(stopped, tmp_path)
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="or remove it and run the command that wrote it again"):
        load(folder)


def test_a_path_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no run at .*nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no run: it has no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds no run"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        load(tmp_path)


def test_no_flipped_bit_is_read_silently(tmp_path, caplog):
    """Flip bits in every file of a finished run and of an interrupted one."""
    train(tiny_run(steps=2), tmp_path / "finished")
    interrupt(tiny_run(steps=2), tmp_path / "stopped", 1)
    chance = random.Random(0)
    for folder, use in {"finished": read_all, "stopped": resume}.items():
        for path in sorted((tmp_path / folder).rglob("*.*")):
            if folder == "finished" and "state" in path.parts:  # no longer read
                continue
            for _ in range(4):
                caplog.clear()
                content = bytearray(path.read_bytes())
                content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
                damaged = Path(shutil.copytree(tmp_path / folder, tmp_path / "damaged"))
                where = damaged / path.relative_to(tmp_path / folder)
                where.write_bytes(content)
                said = ""
                try:
                    use(damaged)
                except ValueError as error:
                    said = str(error)
                warned = path.name == "config.json" and "config.json has changed" in caplog.text
                assert where.name in said or warned
                shutil.rmtree(damaged)


def read_all(folder):
    read_metrics(folder)
    load(folder)
    load(folder / "best.safetensors")
    train(tiny_run(steps=2), folder)


def resume(folder):
    load(folder)
    train(tiny_run(steps=2), folder)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped after 3 steps."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    interrupt(tiny_run(), folder, 3)
    return folder


def test_a_state_is_tensors_and_json(stopped):
    names = sorted(path.name for path in (stopped / "state" / "step_3").iterdir())
    assert names == ["manifest.json", "shard-00001-model-00001-of-00001.safetensors"]
    manifest = json.loads((stopped / "state" / "step_3" / "manifest.json").read_text())
    assert manifest["files"].keys() == {names[1]}
    assert (manifest["step"], manifest["best"], manifest["evaluated_step"]) == (3, None, 0)


def truncate(shard):
    shard.write_bytes(shard.read_bytes()[:-9])


def move_and_link(shard):
    elsewhere = shard.parents[3] / "elsewhere"
    shard.rename(elsewhere)
    shard.symlink_to(elsewhere)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncate, "shard-00001.*is damaged"),
        (lambda shard: shard.unlink(), "step_3 is damaged .*shard-00001.*is missing"),
        (lambda shard: (shard.parent / ".metadata").write_bytes(b"N."), r"\.metadata is not in"),
        (lambda shard: (shard.parent / "b.safetensors").touch(), r"b\.safetensors is not in"),
        (move_and_link, "shard-00001.*is damaged"),
        (
            lambda shard: (shard.parent / "manifest.json").unlink(),
            r"step_3 .*no manifest\.json",
        ),
        (lambda shard: (shard.parent / "manifest.json").write_text("{}"), r"manifest\.json is dam"),
        (lambda shard: shard.parent.rename(shard.parents[1] / "step_4"), "it holds step 3"),
    ],
)
def test_a_damaged_state_is_refused(stopped, tmp_path, damage, says):
    folder = copy(stopped, tmp_path)
    damage(next(folder.rglob("shard-*")))
    with pytest.raises(ValueError, match=says):
        train(tiny_run(), folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.update(files={"/etc/passwd": "0"}), "manifest.json is damaged .*/etc/passwd"),
        (lambda m: m.update(files={"../x.safetensors": "0"}), r"damaged .*\.\./x\.safetensors"),
        (lambda m: m.update(files=[]), "manifest.json is damaged"),
        (lambda m: m.update(best=[1]), "manifest.json is damaged"),
        (lambda m: m.update(data_state=3), "manifest.json is damaged"),
        (lambda m: m.pop("evaluated_step"), "manifest.json is damaged"),
    ],
)
def test_a_hostile_manifest_is_refused(stopped, tmp_path, change, says):
    path = copy(stopped, tmp_path) / "state" / "step_3" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    change(manifest)
    path.write_text(files.to_json(manifest, indent=2))
    with pytest.raises(ValueError, match=says):
        train(tiny_run(), tmp_path / "run")


def test_foreign_files_in_the_state_folder_are_kept(tmp_path, whole):
    interrupt(tiny_run(), tmp_path / "run", 3)
    backups = [tmp_path / "run" / "state" / name for name in ("backup", "step_3_mine", "step_x")]
    for backup in backups:
        backup.mkdir()
        (backup / "thesis").write_text("mine")
    assert_same(train(tiny_run(), tmp_path / "run"), whole)
    train(tiny_run(steps=1), tmp_path / "run", overwrite=True)
    names = {path.name for path in (tmp_path / "run" / "state").iterdir()}
    assert names == {"step_1", *(backup.name for backup in backups)}
    assert all((backup / "thesis").read_text() == "mine" for backup in backups)


@pytest.mark.parametrize("name", ["state", "state/step_3"])
def test_a_linked_state_is_never_the_last_one(stopped, tmp_path, name):
    folder = copy(stopped, tmp_path)
    assert last_state(folder).name == "step_3"
    (folder / name).rename(tmp_path / "outside")
    (folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match=rf"{name} is a symbolic link, expected a folder"):
        last_state(folder)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["state", "pictures", "tensorboard", "metrics.jsonl", "lock"])
def test_symbolic_links_in_a_run_folder_are_refused(stopped, tmp_path, name, overwrite):
    folder, outside = copy(stopped, tmp_path), tmp_path / "outside"
    if name in ("metrics.jsonl", "lock"):
        outside.write_text("mine")
    else:
        (outside / "step_3").mkdir(parents=True)
        (outside / "step_3" / "thesis").write_text("mine")
    files.remove(folder / name)
    (folder / name).symlink_to(outside)
    before = {path: path.is_file() and path.read_text() for path in [outside, *outside.rglob("*")]}
    with pytest.raises(ValueError, match=f"{name} is a symbolic link"):
        train(tiny_run(), folder, overwrite=overwrite)
    after = {path: path.is_file() and path.read_text() for path in [outside, *outside.rglob("*")]}
    assert after == before


SMALL = ImageClassifierConfig(
    image_size=(8, 8),
    patch_size=(4, 4),
    width=8,
    depth=2,
    num_classes=3,
    mixer=LightNetMixerConfig(num_heads=2),
)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"depth": 10**9}, "does not match the model: the model has more than 1.. tensors"),
        ({"width": 10**6}, r"class_token is \(8,\) in the file and \(1000000,\) in the model"),
        (
            {"width": 10**8},
            r"the model needs [\d.,]+ GiB of memory for [\d,]+ parameters, but this machine",
        ),
        ({"width": 10**9}, "model cannot be built: .*overflow"),
        ({"width": 10**30}, "model cannot be built"),
        ({"num_classes": 10**15}, "the model needs .* GiB"),
        ({"channels": 10**25}, "model cannot be built"),
    ],
)
def test_sizes_are_compared_before_anything_is_allocated(tmp_path, monkeypatch, change, says):
    path = tmp_path / "model.safetensors"
    weights.save_weights(path, weights.whole_weights(SMALL.build()), {"step": 3})
    model, notes = weights.load_model(path, SMALL)
    assert (model.config, notes) == (SMALL, {"step": 3})
    monkeypatch.setattr(allocation, "memory_bytes", lambda: 1 << 50)
    allocated = torch.nn.init.trunc_normal_
    monkeypatch.setattr(
        torch.nn.init,
        "trunc_normal_",
        lambda x, **options: allocated(x, **options) if x.is_meta else pytest.fail("allocated"),
    )
    with pytest.raises(ValueError, match=says):
        weights.load_model(path, dataclasses.replace(SMALL, **change))


def test_a_model_that_does_not_fit_into_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(allocation, "MAX_TENSORS", 200)
    with pytest.raises(ValueError, match="the model has more than 200 tensors"):
        onescan.build("lightnet_tiny", depth=10**9)
    monkeypatch.setattr(allocation, "memory_bytes", lambda: 1 << 20)
    says = (
        r"the model needs 0\.0 GiB of memory for [\d,]+ parameters, but this machine has 0\.0 GiB"
    )
    with pytest.raises(ValueError, match=says):
        onescan.build("lightnet_tiny")
    wide = configs.replace(tiny_run(), {"model.width": 1000})
    with pytest.raises(ValueError, match=says):
        train(wide, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", [n for n in onescan.__all__ if n.endswith("Config")])
def test_every_kind_of_model_is_counted_on_the_meta_device(kind, monkeypatch):
    kind = getattr(onescan, kind)
    monkeypatch.setattr(allocation, "memory_bytes", lambda: 1 << 50)
    presets = [preset.config for preset in PRESETS.values() if type(preset.config) is kind]
    fields = {"vocab_size": 9} if kind is onescan.SequenceDecoderConfig else {}
    for config in presets[:3] or [kind(width=24, **fields)]:
        model = allocation.build_on_meta(config)
        assert model is not None
        assert all(x.is_meta for x in model.state_dict().values())


def test_removing_a_link_keeps_its_target(tmp_path):
    (tmp_path / "outside").mkdir()
    for name in ("link", "link.partial"):
        (tmp_path / name).symlink_to(tmp_path / "outside")
        files.remove(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]


@pytest.mark.parametrize(
    ("path", "folder", "message"),
    [
        ("new/a.csv", False, None),
        ("new/a", True, None),
        ("a", True, None),
        ("b", False, None),
        ("a", False, "out is 'a', which is a folder, expected a file"),
        ("b", True, "out is 'b', which is a file, expected a folder"),
        ("b/c/d", False, "out is 'b/c/d', but b is not a folder"),
        ("b/c/d", True, "out is 'b/c/d', but b is not a folder"),
    ],
)
def test_outputs_that_cannot_be_written_are_refused(tmp_path, monkeypatch, path, folder, message):
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    Path("b").touch()
    if message is not None:
        with pytest.raises(ValueError, match=rf"^{message}$"):
            files.check_writable("out", Path(path), folder=folder)
        return
    files.check_writable("out", Path(path), folder=folder)
    writable = "a" if path == "a" else "."
    monkeypatch.setattr("os.access", lambda folder, _: str(folder) != writable)
    with pytest.raises(ValueError, match=f"^out is '{path}', but nothing can be written to "):
        files.check_writable("out", Path(path), folder=folder)


DAMAGED = {
    "result.json": (
        read_result,
        [b"", b"{}", b"[1]", b"\xff", b'{"steps": 1, "metrics": {"a": "b"}}'],
    ),
    "metrics.jsonl": (read_metrics, [b'{"a":1}\n', b"5\n", b"\x00\x01", b"\xff\xfe\n", b"{\n5"]),
    "evaluation.safetensors": (read_result, [b"", b"x" * 100]),
    "model.safetensors": (load, [b"", b"x" * 100]),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named(whole, tmp_path, name):
    folder = copy(whole.folder, tmp_path)
    use, contents = DAMAGED[name]
    if name == "metrics.jsonl":
        (folder / "result.json").unlink()  # a finished run does not read its metrics
    else:
        contents = [*contents, (folder / name).read_bytes()[:-9]]
    for content in contents:
        (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}(, line \d+)? is damaged \("):
            use(folder)
        if use is not load:
            with pytest.raises(ValueError, match=name):
                train(tiny_run(), folder)
    (folder / name).unlink()
    (folder / "result.json").unlink(missing_ok=True)
    assert train(tiny_run(), folder).metrics == load(folder).metrics == whole.metrics


def strict(text):
    """Parse JSON like most other languages, which know no NaN."""

    def refuse(name):
        raise AssertionError(name)

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_are_null_in_json(whole, tmp_path):
    folder = copy(whole.folder, tmp_path)
    result, path = folder / "result.json", folder / "model.safetensors"
    metrics = {"loss": math.inf, "accuracy": 0.5}
    write_result(folder, Evaluation(metrics=metrics, arrays={}), 12)
    assert strict(result.read_text())["metrics"] == {"loss": None, "accuracy": 0.5}
    assert str(read_result(folder).metrics) == "{'loss': nan, 'accuracy': 0.5}"
    notes = {"step": 12, "metrics": {"loss": math.nan}}
    weights.save_weights(path, weights.read_weights(path)[0], notes)
    with safetensors.safe_open(path, framework="pt") as file:
        assert strict(file.metadata()["onescan"])["metrics"] == {"loss": None}
    assert str(load(folder).metrics) == "{'loss': nan}"
    write_json(result, {"loss": math.nan, "top": [1.0, -math.inf]})
    assert strict(result.read_text()) == {"loss": None, "top": [1.0, None]}
    text = '{"steps": 12, "metrics": {"loss": NaN}'  # as earlier versions wrote it
    checksum = sha256(f"{text}}}".encode()).hexdigest()[:16]
    result.write_text(f'{text}, "checksum": "{checksum}"}}\n')
    assert str(read_result(folder).metrics) == "{'loss': nan}"


@pytest.mark.parametrize("value", ["low", 10**400, [1.0], {}])
@pytest.mark.parametrize("name", ["result.json", "metrics.jsonl", "model.safetensors"])
def test_a_metric_that_is_no_number_is_refused_whatever_the_checksum(whole, tmp_path, name, value):
    folder = copy(whole.folder, tmp_path)
    path, metrics = folder / name, {"loss": value}
    if name == "model.safetensors":
        weights.save_weights(path, weights.read_weights(path)[0], {"step": 12, "metrics": metrics})
    elif name == "result.json":
        path.write_text(files.to_json({"steps": 12, "metrics": metrics}))
    else:
        path.write_text(files.to_json({"step": 1, "epoch": 0.1, "split": "train", **metrics}))
    use = {"model.safetensors": load, "result.json": read_result, "metrics.jsonl": read_metrics}[
        name
    ]
    with pytest.raises(ValueError, match=f"{name}.* is damaged"):
        use(folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("width", 5), r"embed\.weight is \(6, 16\) in the file and \(5, 16\) in the model"),
        (("tied", True), r"outer\.\w+ is \(6.*\) in the file and missing in the model"),
    ],
)
def test_weights_of_another_model_are_refused(whole, tmp_path, change, says):
    folder = copy(whole.folder, tmp_path)
    edit(folder, lambda data: data["run"]["model"].update([change]))
    with pytest.raises(ValueError, match=rf"model\.safetensors does not match the model: {says}"):
        load(folder)


def test_a_state_of_another_model_is_refused(tmp_path, monkeypatch):
    interrupt(tiny_run(), tmp_path, 3)
    wider = TinyModelConfig(width=7)  # as when the code has changed, and the config has not
    monkeypatch.setattr(TinyModelConfig, "build", lambda _: TinyModel(wider))
    with pytest.raises(ValueError, match=r"step_3 does not match the model: .* \(6, 16\) in the"):
        train(tiny_run(), tmp_path)


def test_a_missing_weight_is_named(whole, tmp_path):
    folder = copy(whole.folder, tmp_path)
    tensors, notes = weights.read_weights(folder / "model.safetensors")
    del tensors["outer.bias"]
    weights.save_weights(folder / "model.safetensors", tensors, notes)
    with pytest.raises(
        ValueError, match=r"outer\.bias is missing in the file and \(6,\) in the model"
    ):
        load(folder)


@pytest.mark.parametrize(
    ("read", "change", "says"),
    [
        (run_config, lambda run: run["training"].update(ema=0.9), r"run\.training\.ema is unknown"),
        (
            run_config,
            lambda run: run["model"].update(type="Nowhere"),
            r"run\.model\.type 'Nowhere'",
        ),
        (load, lambda run: run["model"].update(type="Nowhere"), r"run\.model\.type 'Nowhere'"),
        (load, lambda run: run.pop("model"), r"run\.model is missing"),
    ],
)
def test_a_config_with_unknown_parts_is_refused(whole, tmp_path, read, change, says):
    folder = copy(whole.folder, tmp_path)
    edit(folder, lambda data: change(data["run"]))
    with pytest.raises(ValueError, match=rf"config\.json: {says}.*written by onescan 0"):
        read(folder)


def test_a_model_is_loaded_whatever_its_data_was(whole, tmp_path):
    folder = copy(whole.folder, tmp_path)
    edit(folder, lambda data: data["run"]["data"].update(type="DataOfAnotherProject"))
    assert load(folder).run["data"]["type"] == "DataOfAnotherProject"


@pytest.mark.parametrize("version", ["0.8.0", "0.99.0", "9.0", "x"])
@pytest.mark.parametrize("use", [load, lambda folder: train(tiny_run(), folder)])
def test_a_folder_of_another_version_is_refused(whole, tmp_path, version, use):
    folder = copy(whole.folder, tmp_path)
    edit(folder, lambda data: data.update(onescan=version))
    with pytest.raises(ValueError, match=rf"written by onescan {version}.*use onescan {version}"):
        use(folder)


def test_an_edited_config_warns(whole, tmp_path, caplog):
    folder = copy(whole.folder, tmp_path)
    load(folder)
    assert not caplog.messages
    edit(folder, lambda data: data["run"]["training"].update(epochs=5))
    assert load(folder).run["training"]["epochs"] == 5
    (warning,) = caplog.messages
    assert "config.json has changed" in warning


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "result.json"])
@pytest.mark.parametrize("depth", [900, 100_000])
def test_deeply_nested_json_is_refused(whole, tmp_path, name, depth):
    folder = copy(whole.folder, tmp_path)
    content = {"onescan": __version__, "run": [1], "checksum": "0"}
    text = json.dumps(content).replace("[1]", "[" * depth + "]" * depth)
    (folder / name).write_text(text + "\n")
    use = {"config.json": load, "result.json": read_result, "metrics.jsonl": read_metrics}[name]
    with pytest.raises(ValueError, match=rf"{name}.*(is damaged|run is)"):
        use(folder)


def test_the_environment_is_recorded(whole):
    (environment,) = json.loads((whole.folder / "config.json").read_text())["environments"]
    assert environment["torch"] == torch.__version__
    assert environment["python"] == platform.python_version()
    assert environment["since_step"] == 0
    assert set(environment) == {
        *("since_step", "onescan", "python", "torch", "platform", "device", "processes"),
        *("commit", "backend", "kernels", "matmul_precision", "sequence_parallel", "type"),
    }


def test_a_run_may_resume_on_another_machine(tmp_path, whole, monkeypatch):
    interrupt(tiny_run(), tmp_path, 3)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_run(), tmp_path, progress=press_ctrl_c_at(5))  # the same: no new entry
    monkeypatch.setattr(platform, "platform", lambda: "where it crashed before any checkpoint")
    crash(tiny_run(), tmp_path, 6)
    monkeypatch.setattr(platform, "platform", lambda: "elsewhere")
    moved = configs.replace(tiny_run(), {"machine.workers": 1})
    assert_same(train(moved, tmp_path), whole)
    manifest = read_manifest(tmp_path)
    assert manifest.run == moved
    since = [(e.since_step, e.platform == "elsewhere") for e in manifest.environments]
    assert since == [(0, False), (5, True)]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(partial):
        partial.write_text("ne")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"cannot write to .*: No space left on device; files"):
        files.write_atomically(path, fail)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "old")]
    with pytest.raises(OSError, match=r"cannot write to .*: No space left on device$"):
        files.write_atomically(tmp_path / "new" / "file", fail)
    shutil.rmtree(tmp_path / "new")
    files.write_atomically(path, lambda partial: partial.write_text("new"))
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "new")]


def test_removing_a_folder_that_was_partly_removed_before(tmp_path):
    for name in ("state", "state.partial"):
        (tmp_path / name / "inner").mkdir(parents=True)
    files.remove(tmp_path / "state")
    assert list(tmp_path.iterdir()) == []
    files.remove(tmp_path / "state")


def copy(folder, place):
    return Path(shutil.copytree(folder, place / "run"))


def edit(folder, change):
    data = json.loads((folder / "config.json").read_text())
    change(data)
    (folder / "config.json").write_text(json.dumps(data))


def test_loading_keeps_the_random_state(whole):
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    load(whole.folder)
    assert torch.equal(torch.rand(3), want)
