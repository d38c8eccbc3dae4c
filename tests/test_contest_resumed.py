"""A benchmark that goes on: who is tried again, and what the file may not hold."""

import dataclasses
import json

import pytest
from fake_contestants import CONTEST, NAMES, WORKS, FakeOptions, FakeRival

from onescan.bench.contest import run
from onescan.bench.contest.rival import KilledError, RefusedError, TrialError
from onescan.bench.contest.run import run_contest

ASKED = FakeOptions(rounds=3, seconds=0.0)


@pytest.fixture
def said(monkeypatch):
    """What the contestants say from now on, which are in no process."""
    monkeypatch.setattr(run, "Rival", FakeRival)
    monkeypatch.setattr(FakeRival, "said", [])
    monkeypatch.setattr(FakeRival, "times", {})
    return FakeRival.said


def race(folder, **changes):
    options = dataclasses.replace(ASKED, gradients=False, **changes)
    return run_contest("fakes", options, folder, contest=CONTEST)


def sizes(said):
    return sorted({word[2] for word in said if word[0] == "turn"})


def test_who_failed_is_tried_again_and_all_take_turns_together(said, tmp_path):
    FakeRival.times["second"] = lambda size, turn: 1.0
    race(tmp_path, tokens=(1,))
    FakeRival.times["second"] = TrialError("RuntimeError: out of memory")
    race(tmp_path, tokens=(1, 2))
    FakeRival.times.clear()
    said.clear()
    results = race(tmp_path, tokens=(1, 2))
    assert sizes(said) == [2]
    assert [o.name for o in results.heat("forward", 2).outcomes] == list(NAMES)
    assert [(heat.work, heat.size) for heat in results.heats] == [("forward", 1), ("forward", 2)]
    said.clear()
    race(tmp_path, tokens=(1, 2))
    assert not said


def test_all_works_of_a_size_are_measured_again(said, tmp_path):
    FakeRival.times["second"] = TrialError("gone")
    race(tmp_path, tokens=(1,))
    FakeRival.times.clear()
    options = dataclasses.replace(ASKED, tokens=(1,))
    said.clear()
    run_contest("fakes", options, tmp_path, contest=CONTEST)
    assert [word[3] for word in said if word[:2] == ("prepares", "second")] == list(WORKS)


def test_who_was_killed_is_tried_again_at_larger_sizes_too(said, tmp_path):
    FakeRival.times["second"] = KilledError("its process was killed")
    race(tmp_path, tokens=(1, 2, 3))
    FakeRival.times.clear()
    results = race(tmp_path, tokens=(1, 2, 3))
    assert list(results.of("second", "forward")) == [1, 2, 3]


def test_who_is_killed_again_does_not_cost_the_larger_sizes_again(said, tmp_path):
    FakeRival.times["second"] = KilledError("its process was killed")
    race(tmp_path, tokens=(1, 2))
    said.clear()
    race(tmp_path, tokens=(1, 2))
    assert sizes(said) == [1]


def test_who_is_refused_is_not_tried_again(said, tmp_path):
    FakeRival.times["second"] = RefusedError("it needs a GPU")
    before = race(tmp_path)
    said.clear()
    assert race(tmp_path) == before
    assert not said


def test_what_was_left_out_for_the_budget_stays_so(said, tmp_path):
    FakeRival.times["third"] = lambda size, turn: 6000.0
    before = race(tmp_path, time_limit_s=1.0)
    FakeRival.times.clear()
    said.clear()
    assert race(tmp_path, time_limit_s=1.0) == before
    assert not said


def first_outcome(held):
    return held["heats"][0]["outcomes"][0]


def median(value):
    return lambda held: first_outcome(held)["time_ms"].update(median=value)


UNSOUND = {
    "NaN": median(float("nan")),
    "zero": median(0.0),
    "negative": median(-1.0),
    "infinity": median(float("inf")),
    "beyond all floats": median(10**400),
    "no rounds": lambda held: first_outcome(held).update(rounds_ms=[]),
    "a round of none": lambda held: first_outcome(held).update(rounds_ms=[1.0, 0.0]),
    "a ratio below none": lambda held: first_outcome(held)["ratio"].update(low=-2.0),
    "memory below none": lambda held: first_outcome(held).update(peak_mib=-1.0),
    "no such contestant": lambda held: first_outcome(held).update(name="fourth"),
    "one twice": lambda held: held["heats"][0]["outcomes"].append(first_outcome(held)),
    "a heat twice": lambda held: held["heats"].append(held["heats"][0]),
    "no such size": lambda held: held["heats"][0].update(size=0),
    "a yardstick of NaN": lambda held: held["heats"][0]["yardsticks"].update(
        copy_gb_per_s=float("nan")
    ),
    "growth of nobody": lambda held: held["growth"][0].update(name="fourth"),
    "growth of NaN": lambda held: held["growth"][0].update(time_exponent=float("nan")),
}


@pytest.mark.parametrize("change", UNSOUND.values(), ids=UNSOUND)
def test_a_file_that_no_measurement_gives_is_called_damaged(said, tmp_path, change):
    race(tmp_path)
    path = tmp_path / "fakes.json"
    held = json.loads(path.read_text())
    change(held)
    path.write_text(json.dumps(held))
    with pytest.raises(ValueError, match=r"fakes\.json is damaged \(.*\): remove it"):
        race(tmp_path)


def test_a_file_of_endless_brackets_is_called_damaged(said, tmp_path):
    (tmp_path / "fakes.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match=r"fakes\.json is damaged"):
        race(tmp_path)
