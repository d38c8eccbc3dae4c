"""Every kernel is declared, compiled ahead of time, and its parameters mean one thing each."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("triton")

import onescan.kernels
from onescan.kernels.common import CONSTANTS, LENGTHS, Kernel, builds, kernels_of, type_of

FILES = {name: import_module(f"onescan.kernels.{name}") for name in onescan.kernels.FILES}
KERNELS = [(name, kernel) for name, file in FILES.items() for kernel in kernels_of(file)]

# Flags with one value in all builds of some kernel.
FIXED = {"FIRST_E", "NORMALIZER", "HAS_ENTERING", "BELOW", "HAS_KV_IN", "DERIVATIVE"}

over_kernels = pytest.mark.parametrize(
    ("file", "kernel"), KERNELS, ids=[f"{name}.{kernel.name}" for name, kernel in KERNELS]
)


def test_every_file_with_kernels_is_listed():
    folder = Path(onescan.kernels.__file__).parent
    names = {path.stem for path in folder.glob("*.py") if "@kernel(" in path.read_text()}
    assert names - {"common"} == set(FILES)


@over_kernels
def test_every_kernel_is_built_and_each_of_its_flags_varies(file, kernel):
    made = [x for x in builds(FILES[file], "bf16", "sm_90") if x.kernel is kernel]
    assert made
    flags = [x for x in kernel.constants if x not in CONSTANTS and x not in FIXED]
    for flag in flags:
        assert len({build.constants[flag] for build in made}) > 1, flag


@over_kernels
def test_parameters_follow_the_conventions(file, kernel: Kernel):
    parameters = inspect.signature(inspect.unwrap(kernel.code.fn)).parameters
    assert list(parameters) == kernel.arguments + kernel.constants
    for name in kernel.constants:
        assert "constexpr" in str(parameters[name].annotation), name
        if name.startswith("HAS_"):
            assert name.removeprefix("HAS_").lower() in kernel.arguments, name
    for name in kernel.arguments:
        assert (type_of(name, "bf16") == "i32") == (name in LENGTHS)
