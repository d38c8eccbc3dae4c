"""Measure candidates side by side: the harness of the benchmarks in this folder.

A case is one candidate in one mode at one size. Each case runs in a process of its own, so that
memory peaks and allocators are separate. All candidates of a mode and size are timed in interleaved
rounds, in reverse order every other round, so that other load on the machine affects all of them.
A round is a block of calls timed by `torch.utils.benchmark.Timer`, which begins with untimed calls.

Results are printed as a table and written to NAME.json and NAME.png.
"""

import ctypes
import dataclasses
import multiprocessing
import os
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from results import Benchmark, Row, environment, format_rows, plot_rows, quartiles, write
from torch.utils.benchmark import Timer

from onescan.checks import check_choice, check_positive, in_a_line
from onescan.ops.backend import use_backend
from onescan.progress import progress_bar

Dtype = Literal["float32", "bfloat16", "float16"]
FORWARD, BACKWARD = "forward", "forward + backward"  # modes of an op
INFERENCE, TRAINING = "inference", "training"  # modes of a model

BLOCK_S = 0.02  # minimum duration of the timed calls of a round
REST_S = 0.03  # OpenMP threads spin for about 10 ms after a call, on cores that others need
# A step may take START_S seconds for imports and compilation, and TIME_LIMITS times `time_limit_s`.
START_S, TIME_LIMITS = 600.0, 20
LINUX = sys.platform == "linux"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of all benchmarks."""

    batch_size: int = 1
    """Sequences or images per call."""
    dtype: Dtype = "float32"
    """Data type of inputs and weights."""
    device: str = "auto"
    """Device: cpu, cuda, ...; auto uses a GPU if there is one."""
    backend: Literal["auto", "torch", "triton"] = "auto"
    """Backend of onescan's ops."""
    compile: bool = False
    """Compile every candidate with torch.compile, separately for each size."""
    rounds: int = 5
    """Minimum number of rounds; each round times every candidate once."""
    seconds: float = 2.0
    """Minimum total time of the rounds, in seconds."""
    time_limit_s: float = 60.0
    """Skip larger sizes for a candidate whose call takes longer than this, in seconds."""
    threads: int | None = None
    """CPU threads per candidate; by default as many as torch chooses."""
    candidates: tuple[str, ...] = ()
    """Candidates to measure; ratios are relative to the first. By default all."""
    out: Path | None = None
    """Folder for the results; by default bench/NAME."""


class Case(NamedTuple):
    """One candidate in one mode at one size.

    Attributes:
        call: Does the work once. On a GPU it need not wait for the result.
        items: Tokens or images per call.
        parameters: Parameters of a model.
        state_mib: Memory of the state that is carried from call to call, in MiB.
        flops: FLOPs of one head by a paper's formula; 0 if there is none.
    """

    call: Callable[[], object]
    items: int = 0
    parameters: int = 0
    state_mib: float = 0.0
    flops: int = 0


# From candidate, mode, size and options; runs in the case's process, and is picklable by name.
Prepare = Callable[[str, str, int, Any], Case]


class CaseError(Exception):
    """Why a case could not be measured, and whether to skip the candidate at larger sizes."""

    def __init__(self, reason: str, skip_larger: bool = False) -> None:
        super().__init__(reason, skip_larger)  # all arguments, so that it can be pickled
        self.reason, self.skip_larger = reason, skip_larger


def main(kind: type[Any], run: Callable[[Any], object], description: str | None) -> None:
    """Parse the command line of a script and run it; print invalid options as one line."""
    import tyro  # the processes of cases do not need it

    options = tyro.cli(kind, description=description)
    try:
        run(options)
    except ValueError as error:
        sys.exit(f"error: {error}")


def run_benchmark(benchmark: Benchmark, prepare: Prepare, options: Options) -> Benchmark:
    """Measure all cases, print a table, and write the results as JSON and as a plot.

    A case that fails is reported in its row, and the others continue. After an interrupt, what was
    measured is printed and written.

    Raises:
        ValueError: If an option is out of range or a candidate is unknown.
        SystemExit: After an interrupt, or if no case could be measured.
    """
    check_options(benchmark, options)
    benchmark = dataclasses.replace(
        benchmark,
        candidates=options.candidates or benchmark.candidates,
        sizes=tuple(sorted(benchmark.sizes)),
    )
    name, folder = benchmark.name, options.out or Path("bench", benchmark.name)
    machine = environment(find_device(options.device), options.threads)

    def save(figure: Any = None) -> None:
        growth, rows = benchmark.growth(), benchmark.rows
        results = {"options": options, "environment": machine, "rows": rows, "growth": growth}
        write(folder, name, figure, **results)

    save()  # fails before the first measurement
    skipped: dict[tuple[str, str], str] = {}  # by candidate and mode: why larger sizes are skipped
    interrupted = False
    groups = [(size, mode) for size in benchmark.sizes for mode in benchmark.modes]
    try:
        with progress_bar(len(groups), desc=name, unit=" groups") as bar:
            for size, mode in groups:
                measure_group(benchmark, prepare, mode, size, options, skipped)
                save()
                bar.update()
    except KeyboardInterrupt:
        interrupted = True
    save(plot_rows(benchmark))
    print(
        f"{machine['device']}, {machine['cpu']}, {machine['threads']} threads, "
        f"torch {machine['torch']}, {options.dtype}, batch size {options.batch_size}\n"
    )
    print(format_rows(benchmark))
    print(f"\nresults: {folder / name}.json, {folder / name}.png")
    if interrupted:
        sys.exit(130)
    if all(row.error for row in benchmark.rows):
        sys.exit("error: no case could be measured")
    return benchmark


def check_options(benchmark: Benchmark, options: Options) -> None:
    """Raise ValueError for numbers out of range, unknown candidates and repeated values."""
    for name in ("batch_size", "rounds", "time_limit_s"):
        check_positive(**{name: getattr(options, name)})
    check_positive(threads=options.threads or 1)
    for name in options.candidates:
        check_choice("candidate", name, benchmark.candidates)
    for name, values in (("candidates", options.candidates), (benchmark.axis, benchmark.sizes)):
        if len(set(values)) < len(values):
            raise ValueError(f"{name} contains duplicates: {values}")
    if min(benchmark.sizes, default=0) < 1:
        raise ValueError(f"{benchmark.axis} is {benchmark.sizes}, expected numbers above 0")


def find_device(name: str) -> torch.device:
    """Return the device; raise ValueError if there is no such device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device is {name!r}: {in_a_line(error)}") from error


def measure_group(
    benchmark: Benchmark,
    prepare: Prepare,
    mode: str,
    size: int,
    options: Options,
    skipped: dict[tuple[str, str], str],
) -> None:
    """Measure all candidates in one mode at one size, and append a row for each.

    A candidate that is too slow or runs out of memory is added to `skipped`, with the reason.
    """
    workers: dict[str, Worker] = {}
    cases: dict[str, tuple[float, Case]] = {}
    times: dict[str, list[float]] = {}
    errors: dict[str, str] = {}

    def step(name: str) -> Any:
        try:
            return workers[name].step()
        except CaseError as error:
            workers[name].close()  # a busy process would disturb the others
            errors[name] = error.reason
            times.pop(name, None)
            if error.skip_larger:
                skipped[name, mode] = f"skipped: {error.reason} at {size}"
            return None

    try:
        for name in benchmark.candidates:
            if (name, mode) in skipped:
                errors[name] = skipped[name, mode]
            else:
                workers[name] = Worker(prepare, name, mode, size, options)
        for name in workers:  # they import in parallel, but prepare one after another
            ready = step(name)
            if ready is not None:
                cases[name], times[name] = ready, []
        interleave(times, step, options)
    finally:  # also after an interrupt
        for worker in workers.values():
            worker.close()
        reference = times.get(benchmark.candidates[0])
        for name in benchmark.candidates:
            if name in errors:
                row = Row(candidate=name, mode=mode, size=size, error=errors[name])
                benchmark.rows.append(row)
            elif times.get(name):
                low, median, high = quartiles(times[name])
                peak_mib, case = cases[name]
                row = Row(
                    candidate=name,
                    mode=mode,
                    size=size,
                    rounds_ms=tuple(times[name]),
                    quartiles_ms=(low, median, high),
                    ratio=median / statistics.median(reference) if reference else None,
                    peak_mib=peak_mib,
                    state_mib=case.state_mib,
                    items_per_s=1000 * case.items / median,
                    parameters=case.parameters,
                    flops=case.flops,
                )
                benchmark.rows.append(row)
                if median > 1000 * options.time_limit_s:
                    took = f"a call took {median / 1000:.3g} s at {size}"
                    skipped[name, mode] = f"skipped: {took}, longer than --time-limit-s"


def interleave(
    times: dict[str, list[float]], step: Callable[[str], float | None], options: Options
) -> None:
    """Time all candidates round by round, in reverse order every other round.

    Args:
        times: Times of each candidate in milliseconds, to which each round adds one.
        step: Times one block of a candidate's calls; removes a candidate that fails.
        options: Minimum number of rounds and of seconds.
    """
    start, rounds = time.perf_counter(), 0
    while times and (rounds < options.rounds or time.perf_counter() - start < options.seconds):
        for name in list(times) if rounds % 2 == 0 else list(reversed(times)):
            taken = step(name)
            if taken is not None:
                times[name].append(taken)
        rounds += 1


class Worker:
    """A process that prepares one case in its first step, and times a block in each further one.

    Args:
        prepare: Makes the case.
        case: Candidate, mode and size.
        options: Options of the benchmark.
    """

    def __init__(self, prepare: Prepare, *case: Any) -> None:
        self.timeout_s = START_S + TIME_LIMITS * case[-1].time_limit_s
        context = multiprocessing.get_context("spawn")
        self.connection, remote = context.Pipe()
        self.process = context.Process(target=serve, args=(remote, prepare, *case), daemon=True)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process inherits this
        try:
            self.process.start()
        finally:
            signal.signal(signal.SIGINT, before)
        remote.close()

    def step(self) -> Any:
        """Return peak memory and the case without its call; later, milliseconds per call.

        Raises:
            CaseError: If the case fails, its process ends, or it does not answer in time.
        """
        try:
            self.connection.send(None)
            if not self.connection.poll(self.timeout_s):
                raise CaseError(f"no answer for {self.timeout_s:.0f} s", True)
            answer = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            killed = "its process was killed, probably because memory ran out"
            reason = killed if code == -signal.SIGKILL else f"its process ended with code {code}"
            raise CaseError(reason, True) from None
        if isinstance(answer, CaseError):
            raise answer
        return answer

    def close(self) -> None:
        """End the process; kill it if it is busy."""
        self.connection.close()
        self.process.join(timeout=2.0)
        self.process.kill()
        self.process.join()


def serve(
    connection: Connection, prepare: Prepare, name: str, mode: str, size: int, options: Options
) -> None:
    """Answer the steps of a worker, in its process, until the connection is closed."""
    # Processes of torch.compile would compete with what is measured.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    try:
        connection.recv()
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        torch.manual_seed(0)
        with use_backend(options.backend):
            case = prepare(name, mode, size, options)
            peak_mib = measure_peak_mib(case.call)
            connection.send((peak_mib, case._replace(call=None)))
            threads = torch.get_num_threads()
            timer = Timer("call()", globals={"call": case.call}, num_threads=threads)
            while True:
                connection.recv()
                seconds = timer.blocked_autorange(min_run_time=BLOCK_S).median
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()  # other candidates need the memory
                time.sleep(REST_S)
                connection.send(1000 * seconds)
    except (EOFError, ConnectionError):
        return
    except Exception as error:
        out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        out_of_memory |= "can't allocate memory" in str(error)
        reason = f"{type(error).__name__}: {in_a_line(error)}"
        connection.send(CaseError(reason, out_of_memory))


def measure_peak_mib(call: Callable[[], object]) -> float:
    """Call twice, and return the memory in MiB that the second call needed at most.

    It is the peak beyond the memory in use before the call: of torch's allocator on a GPU, and of
    the process on a CPU. Without Linux, it is the peak of the process since it started.
    """
    call()  # compiles, and loads libraries
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20
        call()
        return torch.cuda.max_memory_allocated() / 2**20 - before
    if not LINUX:
        call()
        unit = 1 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    release_memory()  # freed memory that the allocator keeps would hide what the call needs
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    before = status_mib("VmRSS")
    call()
    return max(0.0, status_mib("VmHWM") - before)


def release_memory() -> None:
    """Return freed memory to the system, if the C library is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def status_mib(name: str) -> float:
    """Return a line of /proc/self/status in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 2**10 for line in lines if line.startswith(name))
