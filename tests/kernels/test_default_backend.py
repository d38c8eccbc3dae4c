"""What backend="auto" means on GPUs, which a stub describes."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from kernel_device import interpreted
from op_checks import key_of
from torch._subclasses.fake_tensor import FakeTensorMode

from onescan.ops import backend
from onescan.ops.additive_decay import ADDITIVE_DECAY
from onescan.ops.additive_decay.op import Inputs, Options

pytest.importorskip("triton")
pytestmark = interpreted

GPU = torch.device("cuda", 0)


def describe_gpu(monkeypatch, name="NVIDIA H100", capability=(9, 0), kib=227, validated=True):
    major, minor = capability
    described = SimpleNamespace(
        name=name,
        major=major,
        minor=minor,
        multi_processor_count=132,
        shared_memory_per_block_optin=1024 * kib,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: described)
    monkeypatch.setattr(backend, "VALIDATED_GPUS", ("NVIDIA H100",) if validated else ())
    monkeypatch.setattr(backend, "_warned", set())


def chosen_backend(device=GPU):
    with FakeTensorMode():
        x = torch.empty(1, 4, 1, 4, device=device)
    return key_of(ADDITIVE_DECAY, Inputs(x, x, x, None), Options("identity", 64)).backend


@pytest.mark.parametrize(
    "gpu",
    [
        {},
        {"name": "NVIDIA A100", "capability": (8, 0), "kib": 163},
        {"name": "NVIDIA GeForce RTX 4090", "capability": (8, 9), "kib": 99},
        {"name": "NVIDIA GeForce RTX 5090", "capability": (12, 0), "kib": 99},
    ],
)
def test_one_validated_gpu_makes_kernels_the_default_on_gpus_that_hold_them(monkeypatch, gpu):
    describe_gpu(monkeypatch, **gpu, validated=False)
    assert (chosen_backend(), backend.default_kernels(GPU)) == ("torch", ())
    describe_gpu(monkeypatch, **gpu)
    assert (chosen_backend(), backend.default_kernels(GPU)) == ("triton", backend.KERNEL_OPS)
    with backend.use_backend("torch"):
        assert chosen_backend() == "torch"


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        ({"name": "Tesla T4", "capability": (7, 5)}, "T4 has compute capability 7.5, expected 8.0"),
        ({"name": "X", "capability": (9, 5), "kib": 99}, "99 KiB of shared memory.* expected 227"),
    ],
)
def test_other_gpus_fall_back_with_one_warning(monkeypatch, gpu, reason):
    describe_gpu(monkeypatch, **gpu)
    with pytest.warns(UserWarning, match=f"ops run in plain PyTorch: .*{reason}"):
        assert chosen_backend() == "torch"
    with warnings.catch_warnings(action="error"):
        assert chosen_backend() == "torch"
    assert backend.default_kernels(GPU) == ()


def test_a_cpu_is_no_reason_for_a_warning(monkeypatch):
    describe_gpu(monkeypatch)
    with warnings.catch_warnings(action="error"):
        assert chosen_backend("cpu") == "torch"
    assert backend.default_kernels(torch.device("cpu")) == ()


@pytest.mark.compile
def test_the_choice_does_not_break_compiled_programs(monkeypatch):
    describe_gpu(monkeypatch, capability=(7, 5))

    def run(x):
        return x + (backend.why_not_by_default(GPU) is None)

    assert torch.compile(run, fullgraph=True, backend="eager")(torch.zeros(2)).tolist() == [0, 0]
