"""Contestants in processes of their own: who fails, dies or hangs leaves the others be."""

import os
import signal
import time
from collections import defaultdict

import pytest
import torch
from fake_contestants import CALL_S, CONTEST, SPIN_S, FakeOptions, prepare
from forking import fork_from_one

from onescan.bench import timing
from onescan.bench.contest import rival
from onescan.bench.contest.rival import KilledError, Rival
from onescan.bench.contest.run import run_contest
from onescan.bench.contest.trial import Trial

GOOD, SIZES = ("good", "better"), (1, 2)
NAMES = (*GOOD, "refusing", "dying", "leaving", "hanging", "slow")


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("contest") / "log"


@pytest.fixture(scope="module")
def results(log):
    asked = FakeOptions(
        tokens=SIZES, log=str(log), known=NAMES, gradients=False, rounds=2, seconds=0.0,
        time_limit_s=0.1,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rival.multiprocessing, "get_context", fork_from_one)
        return run_contest("fakes", asked, log.parent, contest=CONTEST)


def why(results, size, name):
    return next(m.why for m in results.heat("forward", size).missing if m.name == name)


def test_each_contestant_has_a_process_of_its_own_for_each_size(results, log):
    processes = defaultdict(set)
    for line in log.read_text().splitlines():
        name, process, _, size = line.rsplit(" ", 3)
        processes[name, size].add(process)
    assert all(len(each) == 1 for each in processes.values())
    assert len(set.union(*processes.values())) == len(processes)
    assert str(os.getpid()) not in set.union(*processes.values())


def test_turns_in_processes_are_interleaved(results, log):
    calls = [line.split()[0] for line in log.read_text().splitlines() if line.endswith(" 2")]
    calls = [name for name in calls if name in GOOD]
    rounds = [name for name in ("good", "better", "better", "good") for _ in range(2)]
    assert calls == [*["good"] * 3, *["better"] * 3, *rounds]  # short calls are made once before


def test_times_and_what_is_known_come_from_the_process(results):
    for size in SIZES:
        for name in GOOD:
            outcome = results.of(name, "forward")[size]
            assert len(outcome.rounds_ms) == 2
            assert all(1000 * CALL_S <= ms < 1000 for ms in outcome.rounds_ms)
            assert (outcome.parameters, outcome.state_mib, outcome.floor_bytes) == (7, 0.5, 10**6)


def test_what_a_contestant_raises_is_told_in_a_line(results):
    assert why(results, 1, "refusing") == "ImportError: No module named 'nothing'"
    assert why(results, 2, "refusing") == "ImportError: No module named 'nothing'"


def test_a_killed_process_is_told_and_not_tried_again(results):
    killed = "its process was killed, as happens where memory runs out"
    assert why(results, 1, "dying") == killed
    assert why(results, 2, "dying") == f"left out, as {killed}"
    assert why(results, 1, "leaving") == "its process ended with 3"


def test_a_call_that_does_not_end_is_given_up(results):
    assert why(results, 1, "hanging") == "it did not answer for 3 s"


def test_a_slow_contestant_is_measured_once_and_not_at_larger_sizes(results):
    assert list(results.of("slow", "forward")) == [1]
    assert why(results, 2, "slow").startswith("left out, as at 1 a call took 0.2")


def test_the_yardsticks_are_measured_in_every_heat(results):
    for heat in results.heats:
        assert heat.yardsticks.copy_gb_per_s > 0.01
        assert heat.yardsticks.matmul_tflop_per_s > 1e-5
        assert heat.yardsticks.matmul_dtype == "float32"


def test_the_next_turn_waits_for_threads_that_go_on_after_a_call(log):
    with Rival("spinning", 1, prepare, FakeOptions(log=str(log), time_limit_s=1.0)) as one:
        one.prepare("forward")

        def waited():
            begin = time.perf_counter()
            assert one.turn("forward") < 1000 * SPIN_S  # nobody's time is the longer for it
            return time.perf_counter() - begin > SPIN_S

        assert any(waited() for _ in range(5))  # a busy machine may keep a thread from spinning


def test_a_contestant_that_is_left_is_ended(log):
    with Rival("good", 1, prepare, FakeOptions(log=str(log), time_limit_s=1.0)) as one:
        one.arrive()
        process = one._process
        assert process.is_alive()
    assert not process.is_alive()
    with pytest.raises(KilledError):
        one.turn("forward")


def test_an_interrupt_of_all_processes_leaves_a_contestant_silent(log, capfd):
    with Rival("good", 1, prepare, FakeOptions(log=str(log), time_limit_s=1.0)) as one:
        for wait_s in (0.0, 0.05, 0.5):
            time.sleep(wait_s)  # its Python has begun, or imports
            os.kill(one._process.pid, signal.SIGINT)
        one.arrive()
        os.kill(one._process.pid, signal.SIGINT)
        one.forget()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not capfd.readouterr().err


def test_a_contestant_that_nobody_asks_any_longer_ends_in_silence(log, capfd):
    with Rival("good", 1, prepare, FakeOptions(log=str(log), time_limit_s=1.0)) as one:
        one.arrive()
        one._pipe.send(("prepare", "forward"))  # and nobody reads the answer
        one._pipe.close()
        one._process.join(60)
        assert one._process.exitcode == 0
    assert not capfd.readouterr().err


def test_a_turn_repeats_short_calls_and_makes_long_ones_once():
    calls = []
    assert 1 < len(rival._timed(lambda: time.sleep(0.001), 1.0)) <= 20
    assert len(rival._timed(lambda: calls.append(1), 1e-6)) == rival.MOST_CALLS == len(calls)
    assert len(rival._timed(lambda: time.sleep(0.03), 30.0)) == 1


@pytest.mark.parametrize(("once_ms", "before"), [(rival.AWAKE_MS - 1, 1), (rival.AWAKE_MS, 0)])
def test_short_calls_are_timed_once_threads_are_awake(once_ms, before):
    calls = []
    trial = Trial(call=lambda: calls.append(time.sleep(0.05 if len(calls) < before else 0.001)))
    server = rival._Server("one", 1, prepare, FakeOptions(log="", known=()))
    server.trials["forward"], server.settled = (trial, once_ms), {"forward"}
    assert server.turn("forward", 1) < 40
    assert len(calls) == before + 1


@pytest.mark.parametrize(("contestants", "before"), [(10**6, 2), (1, 0)])
def test_more_than_a_share_of_memory_is_handed_back_and_taken_without_a_clock(
    contestants, before, monkeypatch
):
    kept, clocked = [], []
    monkeypatch.setattr(timing, "resident_mib", lambda: 100.0 + 50.0 * len(kept))
    monkeypatch.setattr(timing, "release_memory", kept.clear)
    monkeypatch.setattr(rival, "_timed", lambda call, once_ms: [clocked.append(len(calls)) or 1.0])
    calls = []
    server = rival._Server("one", 1, prepare, FakeOptions(log="", known=()))
    server.trials["forward"] = Trial(call=lambda: calls.append(1)), rival.AWAKE_MS
    server.turn("forward", contestants)
    calls.clear()
    kept.append(1)
    server.turn("forward", contestants)
    assert server.settled == ({"forward"} if contestants == 1 else set())
    calls.clear()
    server.turn("forward", contestants)
    assert clocked[-1] == before


def test_each_work_settles_in_its_first_turn():
    calls = []
    server = rival._Server("one", 1, prepare, FakeOptions(log="", known=()))
    for work in ("copy", "matmul"):
        server.trials[work] = Trial(call=lambda: calls.append(1)), 2 * rival.TURN_MS
        server.turn(work, 1)
        first = len(calls)
        server.turn(work, 1)
        again = len(calls) - first
        assert first >= again + timing.QUIET
        calls.clear()


def test_memory_in_use_that_cannot_be_handed_back_leaves_a_contestant_settled(monkeypatch):
    monkeypatch.setattr(timing, "resident_mib", lambda: 100.0)
    assert not timing.hand_back()


@pytest.mark.parametrize(
    ("grows", "once_ms", "calls"),
    [
        ([], 1.0, 2),
        ([0], 1.0, 3),
        ([0, 2], 1.0, 5),  # one call without is not enough
        (range(9), 1.0, 11),
        (range(9), 60_000.0, 0),
    ],
)
def test_calls_go_on_without_a_clock_until_they_take_no_new_memory(
    grows, once_ms, calls, monkeypatch
):
    made, held = [], [100.0]
    monkeypatch.setattr(timing, "resident_mib", lambda: sum(held))

    def call():
        held.append(timing.NEW_MIB * (2 if len(made) in grows else 0.5))
        made.append(1)

    timing.settle(call, once_ms, 60.0)
    assert len(made) == calls


def test_a_contestant_that_is_ready_is_yet_to_settle(log):
    server = rival._Server("good", 1, prepare, FakeOptions(log=str(log)))
    server.settled = {"forward", "both"}
    server.prepare("forward")
    assert not server.settled


def test_memory_and_time_are_of_calls_after_the_first():

    held = []
    first = [torch.ones(40 * 2**18)]  # 40 MiB, which the first call alone takes again

    def call():
        if not held:
            held.append(first[0].clone())
        return torch.ones(10 * 2**18).sum()

    _, peak = rival._warmed(call, compiles=False)
    assert 8 < peak < 20


@pytest.mark.parametrize("compiles", [True, False])
def test_a_first_call_that_compiles_for_long_is_not_the_one_that_counts(compiles, monkeypatch):
    monkeypatch.setattr(rival, "WARM_UP_S", 0.01)
    waits = iter([0.05, 0.0, 0.0])
    once_ms, _ = rival._warmed(lambda: time.sleep(next(waits)), compiles=compiles)
    assert (once_ms < 40) == compiles
