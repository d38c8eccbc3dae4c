"""Compile every kernel ahead of time for GPUs that need not be here, and say what each takes.

python benchmarks/check_kernels.py                         all chips, all types
python benchmarks/check_kernels.py --targets sm_90         one of them
python benchmarks/check_kernels.py --kernels one_scan      one file of onescan/kernels

Registers are per thread, shared memory per program in KiB, "matrix" the unit that multiplies. A
spill, or more shared memory than a chip has, ends in failure. It needs Triton, and no torch.
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
from onescan.kernels.common import Build, builds

# chip: its target, the shared memory a program may have (KiB), instructions of its matrix unit
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163, ("mma.sync",)),
    "sm_90": (GPUTarget("cuda", 90, 32), 227, ("wgmma", "mma.sync")),
    "sm_100": (GPUTarget("cuda", 100, 32), 227, ("tcgen05.mma", "mma.sync")),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64, ("mfma",)),
}
DATA = ("bf16", "fp16", "fp32")


class Planned(NamedTuple):
    """One build, by what finds it: kernels themselves do not travel between processes."""

    file: str
    place: int
    data: str
    chip: str

    @property
    def build(self) -> Build:
        return builds_of(self.file, self.data, self.chip)[self.place]

    @property
    def name(self) -> str:
        return f"{self.file}.{self.build.name}"


class Compiled(NamedTuple):
    """What one build takes on one chip, or why it cannot be had."""

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
        "--jobs", type=positive, default=None, help="processes; all cores without it"
    )
    asked = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") != "0":  # kernels are Python functions then
        parser.exit(2, "TRITON_INTERPRET is set, expected not to be: unset it to compile kernels\n")
    print(f"triton {version('triton')}")
    heading = f"{'registers':>10}{'spills':>8}{'shared':>8}  matrix"
    print(f"{'kernel':<48}{'type':<6}{'chip':<8}{heading}", flush=True)
    plan = [
        Planned(file, place, data, chip)
        for file in dict.fromkeys(asked.kernels)
        for data in dict.fromkeys(asked.data)
        for chip in dict.fromkeys(asked.targets)
        for place, _ in enumerate(builds_of(file, data, chip))
    ]
    failed = 0
    with ProcessPoolExecutor(asked.jobs) as pool:
        for build, found in zip(plan, pool.map(compiled, plan), strict=True):
            wrong = found.error or complaint(found, build.chip)
            failed += bool(wrong)
            took = f"{found.registers:>10}{found.spills:>8}{found.shared_kib:>8.1f}  {found.matrix}"
            row = f"{build.name:<48}{build.data:<6}{build.chip:<8}{took} {wrong}"
            print(row.rstrip(), flush=True)
    print(f"{len(plan)} builds, {failed} failed")
    sys.exit(bool(failed))


def positive(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is no number above 0")
    return int(word)


def builds_of(file: str, data: str, chip: str) -> list[Build]:
    return list(builds(import_module(f"onescan.kernels.{file}"), data, chip))


def complaint(found: Compiled, chip: str) -> str:
    most = TARGETS[chip][1]
    if found.spills:
        return "SPILLS"
    return f"MORE THAN {most} KiB OF SHARED MEMORY" if found.shared_kib > most else ""


def compiled(planned: Planned) -> Compiled:
    build, chip = planned.build, planned.chip
    target, _, units = TARGETS[chip]
    try:
        made = triton.compile(source_of(build), target=target, options=build.options)
    except Exception as error:  # whatever a compiler says, the other builds are tried
        return Compiled(error=" ".join(str(error).split())[:300] or type(error).__name__)
    text = made.asm["ptx"] if chip.startswith("sm") else made.asm["amdgcn"]
    registers, spills = usage(made.asm, text, chip)
    unit = next((unit for unit in units if unit in text), "-")
    return Compiled(registers, spills, made.metadata.shared / 1024, unit)


def source_of(build: Build) -> ASTSource:
    signature = build.types | dict.fromkeys(build.constants, "constexpr")
    # what a launch would find out: every pointer torch gives is a multiple of 16 bytes
    names = build.kernel.code.arg_names
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in build.types.items()
        if kind.startswith("*")
    }
    return ASTSource(build.kernel.code, signature, build.constants, attributes)


def usage(assembly: dict[str, Any], text: str, chip: str) -> tuple[int, int]:
    """Registers of a thread, and bytes (NVIDIA) or registers (AMD) that are spilt."""
    if not chip.startswith("sm"):
        return number(text, r"\.vgpr_count:\s+(\d+)"), number(text, r"\.vgpr_spill_count:\s+(\d+)")
    said = ran("cuobjdump", "-res-usage", assembly["cubin"], "kernel.cubin")
    stack = number(said, r"STACK:(\d+)")
    if stack:  # some of it may be no spill: the assembler knows, and takes its time
        program = "ptxas-blackwell" if chip.startswith("sm_1") else "ptxas"
        with tempfile.NamedTemporaryFile() as out:
            target = re.search(r"\.target\s+(\w+)", text)
            assert target is not None
            words = ["-v", f"--gpu-name={target[1]}", "-o", out.name]
            stack = number(
                ran(program, *words, text.encode(), "kernel.ptx"), r"(\d+) bytes spill stores"
            )
    return number(said, r"REG:(\d+)"), stack


def ran(program: str, *arguments: str | bytes) -> str:
    """What one of the assembler's programs says of a file: its bytes and its name come last."""
    *words, content, name = arguments
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, str(name))
        path.write_bytes(content)
        command = [folder / program, *words, path]
        made = subprocess.run(command, check=True, capture_output=True, text=True)
    return made.stdout + made.stderr


def number(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise LookupError(f"nothing like {pattern} in what the compiler says")
    return int(found[1])


if __name__ == "__main__":
    main()
