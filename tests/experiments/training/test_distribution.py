"""Runs of two processes give the numbers of one, whoever resumes them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from two_processes import STEPS, STOP, growing_run, lightnet_run, softmax_run, transfer_run

from onescan.experiments.training import read_metrics, train
from onescan.experiments.training.folder import read_manifest

ROOT = Path(__file__).parents[3]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SCRIPT = str(ROOT / "tests" / "helpers" / "two_processes.py")
NAMES = ("ddp", "fsdp", "ddp_stopped", "fsdp_stopped", "fsdp_resumed")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The run in one process."""
    return train(lightnet_run(), tmp_path_factory.mktemp("one") / "run").folder


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder of runs that two processes shared."""
    folder = tmp_path_factory.mktemp("two")
    torchrun(SCRIPT, str(folder), *NAMES)
    return folder


def torchrun(*arguments, code=0):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [*TORCHRUN, *arguments], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == code, done.stderr
    return done


def losses(folder, split="train"):
    return torch.tensor([line["loss"] for line in read_metrics(folder) if line["split"] == split])


def assert_equal_runs(folder, other):
    for split in ("train", "test"):
        torch.testing.assert_close(losses(folder, split), losses(other, split), atol=1e-5, rtol=0)
    for name in ("model.safetensors", "best.safetensors"):
        ours, theirs = load_file(folder / name), load_file(other / name)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_two_processes_share_a_run_that_one_resumes(one, tmp_path):
    """Interrupted by a signal to the second process alone: both stop at the same step."""
    torchrun(SCRIPT, str(tmp_path), "fsdp_stopped")
    folder = tmp_path / "fsdp_stopped"
    assert len(losses(folder)) == STOP + 1
    train(lightnet_run(), folder)
    assert_equal_runs(folder, one)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp_resumed"])
def test_two_processes_give_the_numbers_of_one(one, two, name):
    assert len(losses(one)) == STEPS
    assert losses(one)[-1] < losses(one)[0] - 0.1
    assert_equal_runs(two / name, one)
    rows, theirs = (load_file(folder / "evaluation.safetensors") for folder in (one, two / name))
    assert torch.equal(rows["labels"], theirs["labels"])
    torch.testing.assert_close(rows["losses"], theirs["losses"], atol=1e-3, rtol=1e-3)
    assert [e.processes for e in read_manifest(two / name).environments] == [2]


@pytest.mark.slow
def test_two_processes_transfer_attention_as_one_does(tmp_path):
    train(softmax_run(), tmp_path / "teacher")
    one = train(transfer_run(tmp_path / "teacher"), tmp_path / "one").folder
    torchrun(SCRIPT, "transfers", str(tmp_path))
    for split in ("transfer", "train", "test"):
        ours, theirs = losses(tmp_path / "two", split), losses(one, split)
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)
    assert len(losses(one, "transfer")) == STEPS // 2


@pytest.mark.slow
def test_two_processes_grow_their_batches_as_one_does(tmp_path):
    torchrun(SCRIPT, str(tmp_path), "growing", "growing_stopped")
    one = train(growing_run(), tmp_path / "one").folder
    assert_equal_runs(tmp_path / "growing", one)
    assert len(losses(tmp_path / "growing_stopped")) == STOP + 1 < len(losses(one))
    train(growing_run(), tmp_path / "growing_stopped")
    assert_equal_runs(tmp_path / "growing_stopped", one)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_one_process_resumes_a_run_of_two(one, two, name):
    folder = two / f"{name}_stopped"
    assert len(losses(folder)) == STOP + 1
    train(lightnet_run(), folder)
    assert_equal_runs(folder, one)
    environments = read_manifest(folder).environments
    assert [(e.since_step, e.processes) for e in environments] == [(0, 2), (STOP + 1, 1)]


@pytest.mark.slow
def test_killed_processes_are_restarted_and_resume(one, tmp_path):
    """Sharded, with workers, and checkpoints after evaluations that were not the best."""
    torchrun("--max-restarts=1", SCRIPT, "dies_once", str(tmp_path / "run"))
    assert [
        line["step"] for line in read_metrics(tmp_path / "run") if line["split"] == "train"
    ] == [*range(1, STEPS + 1)]
    torch.testing.assert_close(losses(tmp_path / "run"), losses(one), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_processes_without_a_common_disk_are_refused(tmp_path):
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from onescan.experiments.training import train\n"
        "from tiny_run import tiny_run\n"
        "train(tiny_run(), Path(sys.argv[1]) / os.environ['RANK'])\n"
    )
    (tmp_path / "apart.py").write_text(code)
    done = torchrun(str(tmp_path / "apart.py"), str(tmp_path), code=1)
    assert "is not on a disk that all processes share" in done.stderr
    assert not list(tmp_path.rglob("step_*"))


CLI = ["-m", "onescan", "train", "digits", "--training.steps", "2", "--model.depth", "1", "--out"]


@pytest.mark.slow
def test_only_rank_0_prints(tmp_path):
    done = torchrun(*CLI, str(tmp_path / "runs"))
    assert done.stdout.count("report: ") == done.stderr.count("folder: ") == 1
    assert done.stdout.count("test accuracy") == 1
    assert done.stderr.count("model: ImageClassifier, ") == 1
    assert done.stderr.count("batch size: 32, 2 processes") == 1


@pytest.mark.slow
def test_only_rank_0_prints_an_error(tmp_path):
    (tmp_path / "seed-0").mkdir()
    (tmp_path / "seed-0" / "notes.txt").touch()
    done = torchrun(*CLI, str(tmp_path), code=1)
    assert done.stderr.count("onescan: error: ") == 1
    assert "holds no run" in done.stderr
