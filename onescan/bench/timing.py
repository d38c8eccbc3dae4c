"""Time and memory of one function, each measured in a process of its own."""

import ctypes
import math
import multiprocessing
import os
import resource
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

BUDGET_S = 1.0  # at least this long, and at least MIN_RUNS runs, unless one run takes longer
MIN_RUNS = 3
QUIET, NEW_MIB = 2, 4.0  # so many calls in a row that add less to resident memory
CONTAINER = Path("/sys/fs/cgroup/memory.max")  # bytes, or "max"
LINUX = sys.platform == "linux"


class Measurement(NamedTuple):
    """What one call costs.

    Attributes:
        median_ms: of the runs once they take no new memory, or after `BUDGET_S`.
        peak_mib: the most memory held during a call beyond what was held before it: of the
            process on a CPU, of torch's allocator on a GPU.
    """

    median_ms: float
    peak_mib: float


def measure(prepare: Callable[..., Callable[[], object]], *arguments: object) -> Measurement:
    """Measure `prepare(*arguments)()` in a fresh process; both must be picklable by name.

    Raises:
        RuntimeError: the process died, as it does when memory runs out.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_here, args=(sender, prepare, arguments))
    process.start()
    sender.close()
    try:
        return Measurement(*receiver.recv())
    except EOFError:
        process.join()
        raise RuntimeError(f"measuring {arguments} ended with {process.exitcode}") from None
    finally:
        process.join()


def exponent(lengths: Sequence[int], times: Sequence[float]) -> float:
    """The power of the length that the time grows with: a least-squares line through logarithms.

    >>> round(exponent([1, 2, 4], [3.0, 12.0, 48.0]), 6)
    2.0
    """
    slope, _ = statistics.linear_regression(
        list(map(math.log, lengths)), list(map(math.log, times))
    )
    return slope


def _measure_here(sender, prepare, arguments) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001
    call = prepare(*arguments)
    before = held_mib()  # and forget the peak that importing had
    start = perf_counter()
    call()
    wait()
    once_ms, peak = 1000 * (perf_counter() - start), peak_mib() - before
    settle(call, once_ms, BUDGET_S)
    wait()
    times: list[float] = []
    while len(times) < MIN_RUNS or sum(times) < BUDGET_S:
        start = perf_counter()
        call()
        wait()
        times.append(perf_counter() - start)
        if times[0] > BUDGET_S:
            break
    sender.send((1000 * statistics.median(times), peak))


def wait() -> None:
    """Wait for what the GPU has been told to do, if this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def settle(call: Callable[[], object], once_ms: float, most_s: float) -> None:
    """Call until calls take no new memory, or time is up.

    On a CPU some calls pass before what was freed has gaps for all tensors of a call. Torch manages
    a GPU's memory itself, and the first call takes all of it.

    Args:
        call: what to do.
        once_ms: about how long it takes.
        most_s: how long to go on at most; no call on a CPU is begun that would end later.
    """
    if torch.cuda.is_initialized():
        call()
        return
    begin, quiet = perf_counter(), 0
    while quiet < QUIET and perf_counter() - begin + once_ms / 1000 < most_s:
        before = resident_mib()
        call()
        quiet = quiet + 1 if resident_mib() < before + NEW_MIB else 0


def hand_back(share: float = 0.0) -> bool:
    """Give memory that is held and not used to the other processes.

    Args:
        share: of a CPU's memory, what this process may hold and keep. Of a GPU nothing is kept.

    Returns:
        Whether calls are to take memory anew.
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        return True
    before = resident_mib()
    if before < share * total_mib():
        return False
    release_memory()
    return resident_mib() < before - NEW_MIB


def resident_mib() -> float:
    """Memory that this process has, with what was freed and is kept; 0 where there is no Linux."""
    return _proc_status_mib("VmRSS") if LINUX else 0.0


def total_mib() -> float:
    """Memory that the machine has, or the container, where it may take less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = CONTAINER.read_text(encoding="utf-8") if CONTAINER.exists() else ""
    return (min(total, int(most)) if most.strip().isdecimal() else total) / 2**20


def held_mib() -> float:
    """Memory held now; the peak starts anew from here."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    if not LINUX:
        return peak_mib()
    release_memory()  # memory kept by the allocator would hide a call's own
    Path("/proc/self/clear_refs").write_text("5")
    return resident_mib()


def peak_mib() -> float:
    """The most memory held since `held_mib`: of torch's allocator on a GPU, else of the process."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    if LINUX:
        return _proc_status_mib("VmHWM")
    unit = 1 if sys.platform == "darwin" else 2**10  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def release_memory() -> None:
    """Return freed memory to the system, if the C library is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if LINUX else None
    if trim is not None:
        trim(0)


def _proc_status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 2**10 for line in lines if line.startswith(name))
