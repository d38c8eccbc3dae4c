"""A contestant's process, and what is asked of it."""

import multiprocessing
import os
import signal
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from multiprocessing.connection import Connection
from time import perf_counter, process_time, sleep
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from onescan.bench.contest.trial import Prepare, RefusalError, Trial
from onescan.bench.contests import ContestOptions
from onescan.bench.timing import hand_back, held_mib, peak_mib, settle, wait
from onescan.checks import in_a_line
from onescan.ops.backend import use_backend
from onescan.training.distributed import Ranks, choose_device

WARM_UPS, WARM_UP_S = 3, 1.0  # so many calls, or so long
TURN_MS, MOST_CALLS = 20.0, 50  # a turn repeats short calls, and their median counts
AWAKE_MS = 100.0  # shorter calls are made once before, as threads that rested take time to wake
SETTLING = 1 / 4  # of a budget, for calls without a clock before a turn
KEPT = 1 / 2  # of the machine's memory, by all contestants together
LONGEST = 10  # budgets: who has not answered by then is stopped
REST_S, MOST_RESTS = 0.005, 200  # looks at whether threads go on, at most so many
START_S = 600.0  # beyond that: imports, weights, and what compiles itself
KILLED = "its process was killed, as happens where memory runs out"


class TrialError(Exception):
    """Why a contestant is out, in a line."""


class KilledError(TrialError):
    """Its process ended, and said nothing."""


class RefusedError(TrialError):
    """It cannot run here, and could not if it were tried again."""


class Ready(NamedTuple):
    """What is known once a contestant is warm.

    Attributes:
        once_ms: of the last warm-up call.
        peak_mib: the most memory that it held beyond what was held before.
        known: the trial, without its call.
    """

    once_ms: float
    peak_mib: float
    known: dict[str, Any]


class Rival:
    """One contestant at one size, in a process of its own; to be used as a context.

    Args:
        name: of the contestant.
        size: how many tokens, or the like.
        prepare: makes its trials, over there.
        options: what is asked.
    """

    def __init__(self, name: str, size: int, prepare: Prepare, options: ContestOptions) -> None:
        self.name = name
        self.timeout_s = LONGEST * options.time_limit_s
        context = multiprocessing.get_context("spawn")
        self._pipe, over_there = context.Pipe()
        server = _Server(name, size, prepare, options)
        self._process = context.Process(target=_serve, args=(over_there, server), daemon=True)
        with _deaf_to_interrupts():  # from its first instant on: the first process ends this one
            self._process.start()
        over_there.close()

    def __enter__(self) -> "Rival":
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join()

    def arrive(self) -> None:
        """Wait until it has imported what it needs.

        Raises:
            TrialError: it cannot.
        """
        self._ask(("arrive",), START_S)

    def prepare(self, work: str) -> Ready:
        """Let it get ready, and warm.

        Raises:
            TrialError: it cannot; says why.
        """
        ready: Ready = self._ask(("prepare", work), START_S + (1 + WARM_UPS) * self.timeout_s)
        return ready

    def turn(self, work: str, contestants: int = 1) -> float:
        """Let it do its work, and return the milliseconds that it took, the median of some calls.

        Args:
            work: what it is ready for.
            contestants: how many share the machine's memory, this one counted.

        Raises:
            TrialError: it did not; says why.
        """
        timeout_s = MOST_CALLS * TURN_MS / 1000 + 2 * self.timeout_s  # one call may take memory
        taken: float = self._ask(("turn", work, contestants), timeout_s)
        return taken

    def forget(self) -> None:
        """Let it hold nothing of its works any longer.

        Raises:
            TrialError: it has ended.
        """
        self._ask(("forget",), START_S)

    def _ask(self, request: tuple[str | int, ...], timeout_s: float) -> Any:
        try:
            self._pipe.send(request)
            if not self._pipe.poll(timeout_s):
                self._process.kill()
                raise KilledError(f"it did not answer for {timeout_s:.3g} s")
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise KilledError(self._end()) from None
        if isinstance(answer, TrialError):
            raise answer
        return answer

    def _end(self) -> str:
        self._process.join()
        code = self._process.exitcode or 0
        return KILLED if code == -signal.SIGKILL else f"its process ended with {code}"


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Let processes that are started here inherit that Ctrl-C is none of their business."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets no other thread say so, and _serve says it again
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(pipe: Connection, server: "_Server") -> None:
    """Answer what is asked, until nobody is there any longer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tqdm.set_lock(threading.RLock())  # torch's bars want one of processes, and this one is killed
    with suppress(EOFError, ConnectionError):  # the first process is gone
        while True:
            answer = _answer(server, *pipe.recv())
            _rest()
            pipe.send(answer)


def _answer(server: "_Server", request: str, *arguments: str | int) -> Any:
    """What a request gives, or the error that tells why it gives nothing."""
    try:
        return getattr(server, request)(*arguments)
    except RefusalError as error:
        return RefusedError(in_a_line(error))
    except Exception as error:
        return TrialError(f"{type(error).__name__}: {in_a_line(error)}")


def _rest() -> None:
    """Wait until this process's threads do.

    OpenMP's wait for more work by spinning, some 10 ms long, on the cores of who has the next turn.
    """
    for _ in range(MOST_RESTS):
        before = process_time()
        sleep(REST_S)
        if process_time() - before < REST_S / 5:
            return


class _Server:
    """What answers, over there."""

    def __init__(self, name: str, size: int, prepare: Prepare, options: ContestOptions) -> None:
        self.name, self.size, self.make, self.options = name, size, prepare, options
        self.trials: dict[str, tuple[Trial, float]] = {}
        self.settled: set[str] = set()  # works whose calls take no new memory

    def arrive(self) -> None:
        return None

    def prepare(self, work: str) -> Ready:
        if self.options.threads is not None:
            torch.set_num_threads(self.options.threads)
        choose_device(self.options.device, Ranks())  # torch's current one, then
        torch.manual_seed(0)
        # processes that compile would go on beside what is measured
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        with use_backend(self.options.backend):
            trial = self.make(self.name, work, self.size, self.options)
            compiles = self.options.compile or torch.cuda.is_initialized()
            once_ms, peak = _warmed(trial.call, compiles=compiles)
        self.trials[work] = trial, once_ms
        hand_back()
        self.settled.clear()
        known = trial._asdict()
        del known["call"]
        return Ready(once_ms, peak, known)

    def forget(self) -> None:
        self.trials.clear()

    def turn(self, work: str, contestants: int) -> float:
        trial, once_ms = self.trials[work]
        with use_backend(self.options.backend):
            if work not in self.settled:
                settle(trial.call, once_ms, SETTLING * self.options.time_limit_s)
            if once_ms < AWAKE_MS:
                trial.call()
            taken = statistics.median(_timed(trial.call, once_ms))
        self.settled.add(work)
        if hand_back(KEPT / contestants):
            self.settled.clear()
        return taken


def _warmed(call: Callable[[], object], *, compiles: bool) -> tuple[float, float]:
    """Milliseconds and peak memory of the last of some calls.

    Args:
        call: what to do.
        compiles: whether the first ones may compile, and so take much longer than others.
    """
    begin, once_ms, peak = perf_counter(), 0.0, 0.0
    for _ in range(WARM_UPS):
        before = held_mib()
        (once_ms,) = _timed(call, TURN_MS)
        peak = max(0.0, peak_mib() - before)
        if perf_counter() - begin > WARM_UP_S and not compiles:
            break
    return once_ms, peak


def _timed(call: Callable[[], object], once_ms: float) -> list[float]:
    """Milliseconds of each call of a turn; on a GPU, of what the calls had it do.

    Args:
        call: what to do.
        once_ms: about how long it takes; a turn's length for a single call.
    """
    if torch.cuda.is_initialized():
        return _timed_on_gpu(call, int(TURN_MS / max(once_ms, TURN_MS / MOST_CALLS)))
    times: list[float] = []
    while not times or (sum(times) + once_ms <= TURN_MS and len(times) < MOST_CALLS):
        begin = perf_counter()
        call()
        times.append(1000 * (perf_counter() - begin))
    return times


def _timed_on_gpu(call: Callable[[], object], calls: int) -> list[float]:
    """One call is told to it after the other, as in use; it is waited for at the end."""
    wait()
    marks = [_mark()]
    for _ in range(max(1, calls)):
        call()
        marks.append(_mark())
    wait()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
