"""check-gpu: the checks, run by Triton in Python, their record, and what "auto" makes of it."""

import json
from types import SimpleNamespace

import pytest
import torch
from kernel_device import interpreted
from torch._subclasses.fake_tensor import FakeTensorMode

from onescan.cli import main
from onescan.ops import backend, kernel_record
from onescan.ops.additive_decay import choose
from onescan.ops.kernel_record import read_record, record_path, versions

pytest.importorskip("triton")

from onescan.evaluation import kernels
from onescan.evaluation.kernels import KernelCheck, Size, largest_error, record_checks
from onescan.ops import lrpe_launch
from onescan.ops.toeplitz_position import launch as toeplitz_launch

pytestmark = interpreted
CPU, GPU = torch.device("cpu"), "NVIDIA H100 80GB HBM3"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONESCAN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def _small(monkeypatch):
    """Check two ops at small sizes on the CPU, as if it were a GPU."""
    ops = ("toeplitz_position", "lrpe")
    options = {"sizes": [Size(1, 2, 1, 4)], "timed": Size(1, 2, 1, 4), "seconds": 1e-6}

    def small(device):
        return kernels_check(device, dtypes=[torch.float32, torch.float16], **options)

    kernels_check = kernels.check_kernels
    monkeypatch.setattr(kernels, "check_kernels", small)
    monkeypatch.setattr(kernels, "KERNEL_OPS", ops)
    monkeypatch.setattr(kernels, "COPIED_BYTES", 1024)
    monkeypatch.setattr("onescan.cli.gpu._find_gpu", lambda _: (CPU, GPU))


@pytest.mark.parametrize("op", backend.KERNEL_OPS)
def test_kernels_pass_their_checks(op):
    check = KernelCheck(op=op)
    for call in kernels.CALLS[op]:
        kernels.compare(call, check, CPU, [Size(1, 2, 1, 4)], [torch.float32])
    assert not check.failure
    assert 0 < check.errors[torch.float32] <= kernels.TOLERANCES[torch.float32]
    assert check.torch_errors.keys() == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("op", backend.KERNEL_OPS)
def test_kernels_pass_their_checks_in_half_precision(op, monkeypatch):
    monkeypatch.setattr(kernels, "KERNEL_OPS", (op,))
    monkeypatch.setattr(kernels, "COPIED_BYTES", 1024)
    monkeypatch.setattr(kernels, "STEP_BATCH", 1)
    (check,) = kernels.check_kernels(
        CPU,
        sizes=[Size(2, 1, 1, 4), Size(1, 37, 2, 5)],
        timed=Size(1, 3, 1, 4),
        dtypes=[torch.float32, torch.float16],
        seconds=1e-6,
    )
    assert not check.failure
    assert check.errors.keys() == {torch.float32, torch.float16}
    assert all(speed.kernels > 0 and speed.torch > 0 for speed in check.speeds.values())


def test_every_op_has_calls():
    assert tuple(kernels.CALLS) == backend.KERNEL_OPS


def test_errors_are_fractions_of_the_largest_value():
    exact = [torch.tensor([1.0, -8.0]), torch.tensor([1e-3])]
    assert largest_error([torch.tensor([2.0, -8.0]), torch.tensor([1e-3])], exact) == 0.125
    assert largest_error([exact[0], torch.tensor([2e-3])], exact) == pytest.approx(0.01)
    assert largest_error([exact[0], torch.tensor([torch.nan])], exact) == torch.inf


@pytest.mark.usefixtures("_small")
def test_the_command_records_what_passed_and_what_failed(monkeypatch, capsys):
    rotate = lrpe_launch.forward
    monkeypatch.setattr(lrpe_launch, "forward", lambda x, angles: 1.01 * rotate(x, angles))
    assert main(["check-gpu"]) == 1
    shown = capsys.readouterr()
    assert "lrpe failed and will run in plain torch" in shown.err
    assert "FAILED: the error in float" in shown.out
    assert shown.out.count("forward + backward") == 1  # an op that failed is not timed
    here = versions()
    results = {"toeplitz_position": True, "lrpe": False}
    assert json.loads(record_path(here).read_text()) == {**here, "gpus": {GPU: results}}
    assert read_record() == {(GPU, "toeplitz_position")}


@pytest.mark.usefixtures("_small")
def test_a_kernel_that_does_not_run_has_failed(monkeypatch, capsys):
    def fails(*_, **__):
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(toeplitz_launch, "scan", fails)
    assert main(["check-gpu"]) == 1
    assert "FAILED: RuntimeError: out of resource: shared memory" in capsys.readouterr().out
    assert read_record() == {(GPU, "lrpe")}


@pytest.mark.usefixtures("_small")
def test_the_command_succeeds_when_all_ops_pass(capsys):
    assert main(["check-gpu"]) == 0
    assert f"recorded in {record_path(versions())}" in capsys.readouterr().out
    assert read_record() == {(GPU, "toeplitz_position"), (GPU, "lrpe")}


def test_without_a_gpu_the_command_fails(capsys):
    assert main(["check-gpu"]) == 1
    message = "onescan: error: check-gpu requires a GPU, but torch finds none that it can use\n"
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("device", "message"),
    [("cpu", "device is 'cpu', expected a GPU"), ("cuda", "TRITON_INTERPRET is 1, expected 0")],
)
def test_only_a_gpu_is_checked(device, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        "onescan.training.distributed.choose_device", lambda name, _: torch.device(name)
    )
    assert main(["check-gpu", "--device", device]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("_small")
def test_without_triton_the_command_fails(monkeypatch, capsys):
    monkeypatch.setattr(kernel_record, "versions", lambda: None)
    assert main(["check-gpu"]) == 1
    assert "triton is not installed: pip install 'onescan[gpu]'" in capsys.readouterr().err


# The record


def passed(*ops):
    return [KernelCheck(op=op) for op in ops]


def test_a_record_keeps_the_results_of_other_gpus():
    record_checks("A", passed("lrpe"), versions())
    record_checks("B", [*passed("lrpe"), KernelCheck(op="x", failure="no")], versions())
    assert read_record() == {("A", "lrpe"), ("B", "lrpe")}
    record_checks("A", [KernelCheck(op="lrpe", failure="no")], versions())
    assert read_record() == {("B", "lrpe")}


def test_a_record_is_for_its_versions_only(monkeypatch):
    record_checks(GPU, passed("lrpe"), versions())
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert read_record() == frozenset()


DAMAGED = [
    "",
    "{",
    "[]",
    "[" * 100_000,
    '{"gpus": {}}',
    '{"onescan": "0", "torch": "0", "triton": "0", "gpus": {"A": {"lrpe": true}}}',
    "VERSIONS, 'gpus': {'A': {'lrpe': 1}}",
    "VERSIONS, 'gpus': {'A': ['lrpe']}",
    "VERSIONS, 'gpus': {'A': {'lrpe': true}}, 'more': 1",
]


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_or_foreign_record_is_ignored_with_a_warning(text):
    path = record_path(versions())
    path.parent.mkdir(parents=True)
    given = json.dumps(versions())[:-1]
    if text.startswith("VERSIONS"):
        text = text.replace("VERSIONS", given).replace("'", '"') + "}"
    path.write_text(text)
    with pytest.warns(UserWarning, match="ignored"):
        assert read_record() == frozenset()
    with pytest.warns(UserWarning, match="ignored"):
        record_checks("A", passed("lrpe"), versions())
    assert read_record() == {("A", "lrpe")}


def test_an_unreadable_cache_is_ignored_with_a_warning(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(kernel_record, "cache_root", no_home)
    with pytest.warns(UserWarning, match="ignored .* home directory"):
        assert read_record() == frozenset()


def test_a_record_does_not_follow_symbolic_links(tmp_path):
    path = record_path(versions())
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a symbolic link"):
        record_checks("A", passed("lrpe"), versions())


# The backend "auto"


@pytest.fixture
def _gpu(monkeypatch):
    properties = SimpleNamespace(name=GPU, major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


@pytest.mark.usefixtures("_gpu")
def test_auto_takes_the_kernels_of_ops_that_passed(monkeypatch):
    record_checks(GPU, passed("additive_decay.one_scan"), versions())
    monkeypatch.setattr(backend, "CHECKED_KERNELS", read_record())
    assert backend.validated_ops(torch.device("cuda")) == ("additive_decay.one_scan",)
    assert backend.validated_ops(CPU) == ()
    with FakeTensorMode():
        x = torch.empty(1, 4, 1, 4, device="cuda")
    assert choose("auto", "auto", x, x, x, causal=False)[2] == "triton"
    assert choose("auto", "auto", x, x, x, causal=True)[2] == "torch"
    with backend.use_backend("torch"):
        assert choose("auto", "auto", x, x, x, causal=False)[2] == "torch"


@pytest.mark.usefixtures("_gpu")
def test_auto_takes_all_kernels_on_a_gpu_that_the_project_validated(monkeypatch):
    assert backend.validated_ops(torch.device("cuda")) == ()
    monkeypatch.setattr(backend, "VALIDATED_GPUS", frozenset({GPU}))
    assert backend.validated_ops(torch.device("cuda")) == backend.KERNEL_OPS


@pytest.mark.compile
def test_the_record_does_not_break_compiled_programs(monkeypatch):
    monkeypatch.setattr(backend, "CHECKED_KERNELS", frozenset({(GPU, "lrpe")}))

    def run(x):
        return x + sum(backend.is_validated(op, GPU) for op in backend.KERNEL_OPS)

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(2)).tolist() == [1.0, 1.0]
