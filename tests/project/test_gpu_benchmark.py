"""benchmarks/gpu.py without a GPU: its calls, its stages in the interpreter, and its report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_device import interpreted

pytest.importorskip("triton")

import gpu
import gpu_calls
import gpu_report
import gpu_session
from gpu_calls import CALLS, TOLERANCES, Size, draw_inputs, largest_error, results
from gpu_session import Session

from onescan.ops.backend import KERNEL_OPS

pytestmark = interpreted
BENCHMARKS = Path(gpu.__file__).parent

ALL_CALLS = [(op, name) for op, calls in CALLS.items() for name in calls]


def errors_of(op, name, size, dtype):
    call = CALLS[op][name]
    drawn = draw_inputs(call, size)
    exact = results(call, drawn, None)
    inputs = {n: x.to(gpu_calls.DTYPES.get(n, dtype)) for n, x in drawn.items()}
    return [largest_error(results(call, inputs, by), exact) for by in ("triton", "torch")]


def test_every_op_has_calls():
    assert tuple(CALLS) == KERNEL_OPS


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("op", "name"), ALL_CALLS)
def test_calls_agree_with_their_references(op, name):
    assert max(errors_of(op, name, Size(2, 5, 1, 4), torch.float32)) < TOLERANCES[torch.float32]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "name"), ALL_CALLS)
def test_calls_agree_in_half_precision(op, name):
    # Narrow heads have small normalizers, by which gradients of single tokens are divided.
    for size in (Size(2, 1, 1, 16), Size(1, 37, 2, 5)):
        assert max(errors_of(op, name, size, torch.float16)) < TOLERANCES[torch.float16]


def test_errors_are_fractions_of_the_largest_value():
    exact = [torch.tensor([1.0, -8.0]), torch.tensor([1e-3])]
    assert largest_error([torch.tensor([2.0, -8.0]), torch.tensor([1e-3])], exact) == 0.125
    assert largest_error([exact[0], torch.tensor([2e-3])], exact) == pytest.approx(0.01)
    assert largest_error([exact[0], torch.tensor([torch.nan])], exact) == torch.inf


def dry_run(out, *stages):
    return subprocess.run(
        [sys.executable, BENCHMARKS / "gpu.py", *stages, "--dry-run", "--out", out],
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_a_dry_run_checks_and_times_and_writes_a_report(tmp_path):
    done = dry_run(tmp_path, "environment", "check", "edges")
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "report.md").read_text()
    assert "Everything that ran passed." in report
    assert "| lrpe | given angles |  |  | " in report
    assert "| unaligned views | passed |" in report
    stages = Session(tmp_path, dry=True).rows("stages")
    assert [row["ended"] for row in stages] == ["", "", ""]


@pytest.mark.slow
def test_a_dry_run_of_all_stages(tmp_path):
    done = dry_run(tmp_path)
    assert done.returncode == 0, done.stdout
    for title in ("Errors", "Edge cases", "Tests", "Ops", "Training steps", "Decoding", "Stages"):
        assert f"\n## {title}\n" in done.stdout


@pytest.mark.slow
def test_without_a_gpu_nothing_is_claimed():
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "gpu.py"],
        env={**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (2, "error: torch cannot find a usable GPU\n")


def test_an_unknown_stage_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "chek"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert (
        "stage 'chek' is unknown, expected any of quick, correctness, speed"
        in capsys.readouterr().err
    )


# What can go wrong


def fail_at_two(_session, task):
    if task == 2:
        raise ValueError("two")
    if task == 3:
        sys.exit(7)
    return {"task": task}


@pytest.mark.slow
def test_a_task_that_fails_or_ends_its_process_costs_only_itself(tmp_path):
    found = dict(gpu_session.run_tasks(fail_at_two, [1, 2, 3, 4], Session(tmp_path, dry=True), 1))
    assert found[2]["error"] == "ValueError: two"
    assert found[3]["error"] == "the process ended with code 7"
    assert (found[1]["task"], found[4]["task"]) == (1, 4)


def test_a_task_without_end_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_session, "TASK_S", 0.0)
    (found,) = gpu_session.run_tasks(fail_at_two, [1], Session(tmp_path, dry=True), 1)
    assert found == (1, {"error": "no result after 0 s"})


def test_the_report_names_each_failure(tmp_path):
    session = Session(tmp_path)
    good = {"op": "lrpe", "call": "", "dtype": "float32", "ok": True, "errors": [1e-7]}
    session.add("check", **good, torch_error=1e-7, repeats=True)
    bad = good | {"dtype": "float16", "ok": False, "errors": [1e-7, 0.5]}
    session.add("check", **bad, torch_error=1e-4, repeats=True)
    session.add("check", **good | {"dtype": "bfloat16", "ok": False}, torch_error=0, repeats=False)
    session.add("check", op="gated", call="silu", dtype="float32", ok=False, error="CUDA error: x")
    session.add("edges", name="another stream", ok=False, problem="differs")
    session.add("tests", ok=False, name="FAILED tests/test_x.py::test_y")
    session.add("ops", name="one scan", peer="softmax", mode="both", size="1", error="OutOfMemory")
    session.add("stages", name="fla", ended="stopped after 80 s", seconds=80.0)
    assert gpu_report.problems(session) == [
        "check: lrpe, plain, float16: error 0.5, 0.0001 in torch",
        "check: lrpe, plain, bfloat16: two equal calls differ",
        "check: gated, silu, float32: CUDA error: x",
        "edges: another stream: differs",
        "tests: FAILED tests/test_x.py::test_y",
        "ops: one scan: OutOfMemory",
        "stage fla: stopped after 80 s",
    ]
    report = gpu_report.write_report(session).read_text()
    assert "## 7 failures" in report
    assert "5.0e-01 (1.0e-04) **failed**" in report


def test_the_report_compares_with_peers_and_a_copy(tmp_path):
    session = Session(tmp_path)
    session.add("environment", gpu="X", copy_gb_s=1000)
    about = {"mode": "both", "size": "8 x 8", "eager_ms": 4.0, "peak_mib": 7}
    session.add("ops", name="softmax", peer="softmax", ms=3.0, **about)
    session.add("ops", name="one scan", peer="softmax", ms=1.5, gb_s=800, **about)
    session.add("ops", name="other size", peer="softmax", ms=1.0, **about | {"size": "9"})
    report = gpu_report.write_report(session).read_text()
    assert "| one scan | both | 8 x 8 | 1.5 | 4 | 0.50 x softmax | 80% | 7 |" in report
    assert "| other size | both | 9 | 1 | 4 |  |  | 7 |" in report


def test_files_with_kernel_tests_are_found():
    names = [Path(path).name for path in gpu.test_files()]
    assert {"test_launch.py", "test_decay_kernels.py", "test_cross_entropy.py"} <= set(names)


def test_rows_are_json_lines(tmp_path):
    Session(tmp_path).add("check", value=torch.float32)
    (line,) = (tmp_path / gpu_session.RESULTS).read_text().splitlines()
    assert json.loads(line) == {"stage": "check", "value": "torch.float32"}
