"""Launching kernels: what a launch passes on, and values that rounding must keep."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_device import DEVICE, MARKS

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from onescan.kernels.common import nearest_tf32  # noqa: E402
from onescan.ops.backend import as_multiplied  # noqa: E402

pytestmark = MARKS

ROOT = Path(__file__).parents[2]


@triton.jit
def round_kernel(x, y, N: tl.constexpr):  # noqa: N803
    at = tl.arange(0, N)
    tl.store(y + at, nearest_tf32(tl.load(x + at)))


def test_rounding_to_tf32_keeps_nan_and_infinity():
    # 0x7fffffff is the NaN that NVIDIA's GPUs compute; 0x7f7fffff is the largest number
    bits = [0x7FFFFFFF, -1, 0x7FC00000, -0x400000, 0x7F800000, 0x3F801001, 0x3F800FFF, 0x7F7FFFFF]
    x = torch.tensor(bits, dtype=torch.int32, device=DEVICE).view(torch.float32)
    nan, inf = torch.nan, torch.inf
    expected = torch.tensor([nan] * 4 + [inf, 1 + 2**-10, 1, inf], device=DEVICE)
    torch.testing.assert_close(
        as_multiplied(x, torch.float16), expected, rtol=0, atol=0, equal_nan=True
    )
    y = torch.empty_like(x)
    round_kernel[(1,)](x, y, len(bits))
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


# In a process without the interpreter; a stub stands in for the driver.
LAUNCHES = """
import torch, triton, triton.language as tl
from launch_overhead import StubDriver
from onescan.kernels.common import Blocks, Case, Kernel
from onescan.ops import backend

def copy(
    x, keep, y, tokens, split,
    H: tl.constexpr, BLOCK_T: tl.constexpr, HAS_KEEP: tl.constexpr, FLAG: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    tl.store(y + t, tl.load(x + t, mask=t < tokens, other=0), mask=t < split + FLAG)

driver = StubDriver()
triton.runtime.driver.set_active(driver)
kernel = Kernel(copy, lambda case: Blocks(32, 16, 16, 4, 2), ())
calls = []
run, kernel.code.run = kernel.code.run, lambda *a, **k: calls.append(1) or run(*a, **k)
case = Case("fp32", "sm_90", heads=3)

def launched(x, keep, y, *lengths, flag=True, grid=(2,)):
    driver.launched = []
    before = len(calls)
    backend.launch(kernel, case, grid, x, keep, y, *lengths, FLAG=flag)
    (call,) = driver.launched
    return len(calls) > before, call[:3], call[9:]

x, y, keep = torch.zeros(65), torch.zeros(64), torch.ones(64, dtype=torch.bool)
rest = (3, 32, False, True)
assert launched(x, None, y, 64, 64) == (True, (2, 1, 1), (x, x, y, 64, 64, *rest))
assert launched(x, None, y, 63, 1, grid=(5, 6)) == (False, (5, 6, 1), (x, x, y, 63, 1, *rest))
with_keep = (3, 32, True, True)
assert launched(x, keep, y, 64, 64) == (True, (2, 1, 1), (x, keep, y, 64, 64, *with_keep))
assert launched(x, None, y, 64, 64, flag=False)[0]  # another program
assert launched(x[1:], None, y, 64, 64)[0]  # pointers that are not aligned to 16 bytes
assert launched(x.double(), None, y, 64, 64)[0]
assert launched(x, None, y, 2**31, 64)[0]  # an integer of 64 bits
assert not launched(x, None, y, 5, 64)[0]
print("launched", len(calls))
"""


@pytest.mark.slow
def test_a_repeated_launch_passes_the_same_arguments(tmp_path):
    script = tmp_path / "launches.py"  # Triton reads the source of kernels from their file
    script.write_text(LAUNCHES)
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    done = subprocess.run(
        [sys.executable, script],
        env={
            **os.environ,
            "PYTHONPATH": path,
            "TRITON_INTERPRET": "0",
            "CUDA_VISIBLE_DEVICES": "-1",
        },
        capture_output=True,
        text=True,
    )
    assert done.stdout == "launched 6\n", done.stderr
