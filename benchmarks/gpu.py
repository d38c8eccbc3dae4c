"""Check onescan's kernels on a GPU, compare their speed with other libraries, and write a report.

python benchmarks/gpu.py                             correctness and speed, about 10 minutes
python benchmarks/gpu.py quick                       what `make gpu` runs
python benchmarks/gpu.py correctness --everything    what `GPU_TESTS=all make gpu` runs
python benchmarks/gpu.py speed --limit 330           in at most 330 seconds
python benchmarks/gpu.py check edges                 only these stages
python benchmarks/gpu.py memcheck                    finds invalid addresses with compute-sanitizer
python benchmarks/gpu.py --dry-run                   everything at tiny sizes, interpreted on a CPU

Each stage runs in its own process with a time limit and writes each result immediately, so a crash
or a hang loses only the rest of one stage. OUT/report.md sums up OUT/results.jsonl. Needs
onescan's core dependencies, Triton and pytest, but no network. If flash-linear-attention is
installed, it is measured too. Exits with 1 if a check or a test failed, or a stage did not end.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from gpu_session import Session

ROOT = Path(__file__).parents[1]


class Stage(NamedTuple):
    """A part of a session: what it does, and how many seconds it may take."""

    seconds: float
    about: str


STAGES = {
    "environment": Stage(40, "versions, bandwidth of a copy, speed of matrix products"),
    "check": Stage(100, "errors of all ops in each dtype, forward and backward, against float64"),
    "edges": Stage(80, "NaN, large offsets, streams, AMP, graphs, determinism, compilation, DDP"),
    "tests": Stage(150, "the project's tests of kernels"),
    "compile": Stage(90, "compilation of all timed kernels, in parallel"),
    "ops": Stage(90, "time of ops compared with softmax attention and a copy"),
    "models": Stage(80, "time and memory of training steps of whole models"),
    "decode": Stage(40, "time per generated token"),
    "fla": Stage(80, "time of flash-linear-attention"),
    "memcheck": Stage(120, "search for invalid addresses"),
}
GROUPS = {
    "quick": ("environment", "check", "edges"),
    "correctness": ("environment", "check", "edges", "tests"),
    "speed": ("environment", "compile", "ops", "models", "decode", "fla"),
}
EVERYTHING_STAGE_S = 1500.0  # for each stage
WORKERS = min(12, os.cpu_count() or 1)  # processes of pytest
MIN_STAGE_S = 5.0  # for a stage to start


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*GROUPS, *STAGES]
    parser.add_argument("stages", nargs="*", default=["correctness", "speed"], metavar="STAGE",
                        help=f"any of {', '.join(names)}")  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path("bench/gpu"), help="folder for the results"
    )
    parser.add_argument("--limit", type=float, help="seconds that all stages may take together")
    parser.add_argument(
        "--everything", action="store_true", help="check all widths, and run all tests"
    )
    parser.add_argument("--dry-run", action="store_true", help="try out the script on a CPU")
    parser.add_argument("--run-one", choices=STAGES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := [name for name in options.stages if name not in names]:
        parser.error(f"stage {unknown[0]!r} is unknown, expected any of {', '.join(names)}")
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    if options.run_one:
        run_stage(options)
        return 0
    if problem := obstacle(options.dry_run):
        parser.exit(2, f"error: {problem}\n")
    return run_stages(options)


def obstacle(dry: bool) -> str:
    """Return why nothing can run here, or an empty string."""
    for package in ("torch", "triton"):
        if find_spec(package) is None:
            return f"{package} is not installed"
    import torch

    if dry:
        return ""
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        return "TRITON_INTERPRET is set, expected 0: interpreted kernels run on the CPU"
    return "" if torch.cuda.is_available() else "torch cannot find a usable GPU"


def session_of(options: argparse.Namespace) -> "Session":
    """Return the session that the options describe."""
    from gpu_session import Session

    return Session(options.out, dry=options.dry_run, everything=options.everything)


def run_stages(options: argparse.Namespace) -> int:
    """Run stages one after another, write the report, and return the exit code."""
    from gpu_report import problems, write_report
    from gpu_session import RESULTS

    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    (out / RESULTS).unlink(missing_ok=True)
    session, begin = session_of(options), time.monotonic()
    names = [stage for name in options.stages for stage in GROUPS.get(name, (name,))]
    for name in dict.fromkeys(names):
        seconds = STAGES[name].seconds
        if options.everything:
            seconds = EVERYTHING_STAGE_S
        if options.limit is not None:
            seconds = min(seconds, options.limit - (time.monotonic() - begin))
        if seconds < MIN_STAGE_S:
            session.add("stages", name=name, ended="no time left", seconds=0.0)
            continue
        print(f"{name}: {STAGES[name].about}", flush=True)
        start = time.monotonic()
        ended = run_process(name, seconds, options)
        elapsed = round(time.monotonic() - start, 1)
        session.add("stages", name=name, ended=ended, seconds=elapsed)
    report = write_report(session)
    print(f"\n{report.read_text(encoding='utf-8')}\nreport: {report}")
    return 1 if problems(session) else 0


def run_process(name: str, seconds: float, options: argparse.Namespace) -> str:
    """Run a stage in a process of its own; return how it ended."""
    flags = [*["--dry-run"] * options.dry_run, *["--everything"] * options.everything]
    command = [sys.executable, __file__, "--run-one", name, "--out", str(options.out), *flags]
    with (options.out / "log.txt").open("a", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
        finally:
            kill_group(process)
    return "" if code == 0 else f"ended with code {code}, see log.txt"


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_stage(options: argparse.Namespace) -> None:
    """Run one stage in this process."""
    import gpu_checks
    import gpu_times

    session, name = session_of(options), options.run_one
    runs: dict[str, Callable[[Session], None]] = {
        "check": gpu_checks.check,
        "edges": gpu_checks.edges,
        "memcheck": gpu_checks.memcheck,
        "compile": gpu_times.compile_kernels,
        "decode": gpu_times.decode,
    }
    if name == "environment":
        session.add("environment", **describe(), **gpu_times.measure_machine(session))
    elif name == "tests":
        if code := run_tests(options):
            sys.exit(code)
    elif name in runs:
        runs[name](session)
    else:
        gpu_times.time_stage(session, name)


def describe() -> dict[str, object]:
    """Return the versions, and the GPU if there is one."""
    import torch

    facts: dict[str, object] = {"python": sys.version.split()[0], "cpus": os.cpu_count()}
    for package in ("onescan", "torch", "triton", "flash-linear-attention"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["capability"] = "{}.{}".format(*torch.cuda.get_device_capability())
        facts["cuda"] = torch.version.cuda or torch.version.hip
    return facts


# Tests


def test_files() -> list[str]:
    """Return the test files that run kernels on a GPU."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marks = re.compile(r"\bMARKS\b|mark\.gpu\b")
    return [str(path) for path in files if marks.search(path.read_text(encoding="utf-8"))]


def pytest_command(marks: str, options: Sequence[str]) -> list[str]:
    """Return the command that runs tests: without plugins that may be missing, or shape checks.

    A warning of another version of torch must not hide the results.
    """
    command = [sys.executable, "-m", "pytest", "-o", "addopts=--strict-markers", "-W", "default"]
    command += ["-p", "no:cacheprovider", "-q", "--tb=short", "-rfE", "-m", marks, *options]
    if find_spec("xdist"):
        command += ["-n", str(WORKERS), "--dist", "worksteal"]
    if find_spec("pytest_timeout"):
        command += ["--timeout", "60", "--timeout-method", "thread"]
    return command


def run_tests(options: argparse.Namespace) -> int:
    """Run the tests of kernels; record their number and each failure."""
    session, files = session_of(options), test_files()
    runs = [("gpu and not compile", [] if options.everything else ["-k", "not random"])]
    if options.everything:
        runs.append(("gpu and compile", []))
    if options.dry_run:
        runs = [("not compile and not slow", ["-k", "rounding"])]
        files = [name for name in files if name.endswith("test_launch.py")]
    first_failure = 0
    for index, (marks, selected) in enumerate(runs):
        log = options.out / f"tests-{index}.txt"
        with log.open("w", encoding="utf-8") as file:
            command = [*pytest_command(marks, selected), *files]
            code = subprocess.run(
                command, cwd=ROOT, stdout=file, stderr=file, check=False
            ).returncode
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines:
            if line.startswith(("FAILED ", "ERROR ")):
                session.add("tests", ok=False, name=line[:300])
        session.add("tests", ok=code == 0, summary=lines[-1] if lines else "", marks=marks)
        first_failure = first_failure or code
    return first_failure


if __name__ == "__main__":
    sys.exit(main())
