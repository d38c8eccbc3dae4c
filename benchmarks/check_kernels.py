"""Compile every kernel ahead of time for several GPUs, and report its use of resources.

python benchmarks/check_kernels.py                         all GPUs, all data types
python benchmarks/check_kernels.py --targets sm_90         one GPU
python benchmarks/check_kernels.py --kernels one_scan      one file of onescan/kernels

Registers are per thread and shared memory is per program, in KiB. "matrix" is the instruction that
multiplies matrices. The script fails if a kernel spills more than 96 bytes per thread or exceeds a
GPU's shared memory. It needs Triton, but neither a GPU nor torch.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from onescan.kernels import FILES
from onescan.kernels.chips import shared_memory_kib
from onescan.kernels.common import Build, builds

# chip -> compiler target, matrix instructions
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), ("mma.sync",)),
    "sm_86": (GPUTarget("cuda", 86, 32), ("mma.sync",)),
    "sm_89": (GPUTarget("cuda", 89, 32), ("mma.sync",)),
    "sm_90": (GPUTarget("cuda", 90, 32), ("wgmma", "mma.sync")),
    "sm_100": (GPUTarget("cuda", 100, 32), ("tcgen05.mma", "mma.sync")),
    "sm_120": (GPUTarget("cuda", 120, 32), ("mma.sync",)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), ("mfma",)),
}
DATA = ("bf16", "fp16", "fp32")
SPILLED = 96  # bytes per thread that a kernel may spill; a few cost little


class Job(NamedTuple):
    """One build, identified by names and an index, because kernels cannot be pickled."""

    file: str
    index: int
    data: str
    chip: str

    @property
    def build(self) -> Build:
        return builds_of(self.file, self.data, self.chip)[self.index]

    @property
    def name(self) -> str:
        return f"{self.file}.{self.build.name}"


class Compiled(NamedTuple):
    """Resources of one build on one chip, or the error."""

    registers: int = 0
    spills: int = 0
    shared_kib: float = 0
    matrix: str = ""
    error: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--data", nargs="+", default=list(DATA), choices=DATA)
    parser.add_argument("--kernels", nargs="+", default=list(FILES), choices=FILES)
    parser.add_argument(
        "--jobs", type=positive, default=None, help="number of processes; by default one per core"
    )
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        parser.exit(
            2,
            "error: TRITON_INTERPRET is set: unset it, because the interpreter does not compile\n",
        )
    print(f"triton {version('triton')}")
    heading = f"{'registers':>10}{'spills':>8}{'shared':>8}  matrix"
    print(f"{'kernel':<48}{'type':<6}{'chip':<8}{heading}", flush=True)
    jobs = [
        Job(file, index, data, chip)
        for file in dict.fromkeys(args.kernels)
        for data in dict.fromkeys(args.data)
        for chip in dict.fromkeys(args.targets)
        for index, _ in enumerate(builds_of(file, data, chip))
    ]
    failed = 0
    with ProcessPoolExecutor(args.jobs) as pool:
        for job, compiled in zip(jobs, pool.map(compile_job, jobs), strict=True):
            error = compiled.error or problem(compiled, job.chip)
            failed += bool(error)
            resources = f"{compiled.registers:>10}{compiled.spills:>8}{compiled.shared_kib:>8.1f}"
            row = f"{job.name:<48}{job.data:<6}{job.chip:<8}{resources}  {compiled.matrix} {error}"
            print(row.rstrip(), flush=True)
    print(f"{len(jobs)} builds, {failed} failed")
    sys.exit(bool(failed))


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a number above 0")
    return int(text)


def builds_of(file: str, data: str, chip: str) -> list[Build]:
    return list(builds(import_module(f"onescan.kernels.{file}"), data, chip))


def problem(compiled: Compiled, chip: str) -> str:
    limit = shared_memory_kib(chip)
    if compiled.spills > SPILLED:
        return "SPILLS"
    return f"MORE THAN {limit} KiB OF SHARED MEMORY" if compiled.shared_kib > limit else ""


def compile_job(job: Job) -> Compiled:
    build, chip = job.build, job.chip
    target, units = TARGETS[chip]
    try:
        binary = triton.compile(source_of(build), target=target, options=build.options)
    except Exception as error:  # continue with the other builds
        return Compiled(error=" ".join(str(error).split())[:300] or type(error).__name__)
    text = binary.asm["ptx"] if chip.startswith("sm") else binary.asm["amdgcn"]
    registers, spills = usage(binary.asm, text, chip)
    unit = next((unit for unit in units if unit in text), "-")
    return Compiled(registers, spills, binary.metadata.shared / 1024, unit)


def source_of(build: Build) -> ASTSource:
    signature = build.types | dict.fromkeys(build.constants, "constexpr")
    # A launch would specialize on this: torch aligns every pointer to 16 bytes.
    names = build.kernel.code.arg_names
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in build.types.items()
        if kind.startswith("*")
    }
    return ASTSource(build.kernel.code, signature, build.constants, attributes)


def usage(assembly: dict[str, Any], text: str, chip: str) -> tuple[int, int]:
    """Return the registers per thread, and the spilled bytes (NVIDIA) or registers (AMD)."""
    if not chip.startswith("sm"):
        return number(text, r"\.vgpr_count:\s+(\d+)"), number(text, r"\.vgpr_spill_count:\s+(\d+)")
    output = run_tool("cuobjdump", "-res-usage", assembly["cubin"], "kernel.cubin")
    stack = number(output, r"STACK:(\d+)")
    if stack:  # may include more than spills, which only the slow assembler reports
        program = "ptxas-blackwell" if chip.startswith("sm_1") else "ptxas"
        with tempfile.NamedTemporaryFile() as out:
            target = re.search(r"\.target\s+(\w+)", text)
            assert target is not None
            flags = ["-v", f"--gpu-name={target[1]}", "-o", out.name]
            stack = number(
                run_tool(program, *flags, text.encode(), "kernel.ptx"), r"(\d+) bytes spill stores"
            )
    return number(output, r"REG:(\d+)"), stack


def run_tool(program: str, *arguments: str | bytes) -> str:
    """Return the output of a tool of Triton for a file; the last arguments are content and name."""
    *flags, content, name = arguments
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, str(name))
        path.write_bytes(content)
        command = [folder / program, *flags, path]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
    return result.stdout + result.stderr


def number(text: str, pattern: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise LookupError(f"the compiler's output has no match for {pattern}")
    return int(match[1])


if __name__ == "__main__":
    main()
