"""Contestants that do nothing but take time, and say so: for tests of how they take turns."""

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from onescan.bench.contest.rival import KilledError, Ready, RefusedError, Rival, TrialError
from onescan.bench.contest.trial import Field, Trial
from onescan.bench.contests import Contest, ContestOptions

WORKS = ("forward", "forward + backward")
NAMES = ("first", "second", "third")
CALL_S = 0.03  # longer than a turn, so that each turn is one call
SPIN_S = 0.3


@dataclass(frozen=True, kw_only=True)
class FakeOptions(ContestOptions):
    """What the fakes are asked."""

    tokens: tuple[int, ...] = (1, 2)
    log: str = ""
    """where each call is noted"""
    known: tuple[str, ...] = NAMES

    @property
    def sizes(self):
        return self.tokens


CONTEST = Contest(
    title="Fakes",
    summary="fakes",
    lead="Nothing is done.",
    options=FakeOptions,
    module="fake_contestants",
    axis="tokens",
    items="tokens",
)


def contestants(options):
    return Field(options.known, WORKS if options.gradients else WORKS[:1], prepare)


def prepare(name, work, size, options):
    """A call that notes who called it; some names misbehave."""
    if name == "refusing":
        raise ImportError("No module\n named 'nothing'")
    if name == "dying":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "leaving":
        os._exit(3)
    calls = []

    def call():
        calls.append(name)
        with Path(options.log).open("a") as log:
            log.write(f"{name} {os.getpid()} {work} {size}\n")
        if name == "hanging" and len(calls) > 4:
            time.sleep(600)
        if name == "spinning":
            threading.Thread(target=_spin).start()
        time.sleep(0.2 if name == "slow" else CALL_S)

    return Trial(call, floor_bytes=10**6, macs=10**6, items=4, parameters=7, state_mib=0.5)


def _spin():
    """Go on after the call, as threads of OpenMP do."""
    end = time.perf_counter() + SPIN_S
    while time.perf_counter() < end:
        pass


class FakeRival(Rival):
    """A contestant in no process: `times` says how long its turns take, by name and size.

    A time that is an error is raised in its place, from the second turn on.
    """

    said: ClassVar = []
    times: ClassVar = {}
    refused: ClassVar = ()
    shares: ClassVar = []

    def __init__(self, name, size, prepare, options):
        self.name, self.size, self.turns = name, size, 0
        self.said.append(("starts", name, size))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.said.append(("ends", self.name, self.size))

    def arrive(self):
        pass

    def forget(self):
        pass

    def prepare(self, work):
        self.said.append(("prepares", self.name, self.size, work))
        if self.name in self.refused:
            raise RefusedError("it cannot")
        known = Trial(lambda: None, floor_bytes=2 * 10**6, macs=10**6, items=4)._asdict()
        return Ready(1.0, float(self.size), known)

    def turn(self, work, contestants):
        self.turns += 1
        self.shares.append(contestants)
        self.said.append(("turn", self.name, self.size, work))
        time_ms = self.times.get(self.name, 1.0)
        if isinstance(time_ms, TrialError | KilledError):
            if self.turns > 1:
                raise time_ms
            return 1.0
        return time_ms(self.size, self.turns) if callable(time_ms) else time_ms
