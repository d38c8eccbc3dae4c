"""Contestants take turns, and what is known of them is measured once and kept."""

import dataclasses
import json

import pytest
import torch
from fake_contestants import CONTEST, NAMES, WORKS, FakeOptions, FakeRival

from onescan import configs
from onescan.bench.contest import machine, run
from onescan.bench.contest.figures import forecast_mib, growth, ratio, spread
from onescan.bench.contest.outcome import Results, Spread
from onescan.bench.contest.rival import KilledError, TrialError
from onescan.bench.contest.run import run_contest
from onescan.bench.contests import CONTESTS

ASKED = FakeOptions(rounds=3, seconds=0.0)


@pytest.fixture
def said(monkeypatch):
    """What the contestants say from now on, which are in no process."""
    monkeypatch.setattr(run, "Rival", FakeRival)
    monkeypatch.setattr(FakeRival, "said", [])
    monkeypatch.setattr(FakeRival, "times", {})
    monkeypatch.setattr(FakeRival, "refused", ())
    monkeypatch.setattr(FakeRival, "shares", [])
    return FakeRival.said


def race(folder, *, after=None, **changes):
    options = dataclasses.replace(ASKED, **changes)
    return run_contest("fakes", options, folder, contest=CONTEST, after=after)


def turns(said, size, work):
    return [word[1] for word in said if word[0] == "turn" and word[2] == size and work in word[3:]]


def test_contestants_are_called_in_turn_and_backwards_every_other_round(said, tmp_path):
    race(tmp_path)
    assert turns(said, 1, "forward") == [*NAMES, *reversed(NAMES), *NAMES]


def test_the_yardsticks_take_turns_with_the_contestants(said, tmp_path):
    race(tmp_path, tokens=(1,), gradients=False)
    order = [word[1:] for word in said if word[0] == "turn"]
    one = [*((name, 1, "forward") for name in NAMES)]
    measures = [("yardsticks", 1, "copy"), ("yardsticks", 1, "matmul")]
    assert order[:10] == [*one, *measures, *reversed(measures), *reversed(one)]


def test_all_contestants_of_a_size_are_alive_together_and_those_of_another_are_not(said, tmp_path):
    race(tmp_path)
    lives = [word[:3] for word in said if word[0] in ("starts", "ends")]
    everybody = (*NAMES, "yardsticks")
    for i, size in enumerate((1, 2)):
        of_size = lives[8 * i : 8 * i + 8]
        assert of_size[:4] == [("starts", name, size) for name in everybody]
        assert sorted(of_size[4:]) == sorted(("ends", name, size) for name in everybody)


def test_contestants_that_are_ready_share_memory_and_yardsticks_take_none(said, tmp_path):
    race(tmp_path, tokens=(1,), gradients=False, rounds=1)
    assert set(FakeRival.shares) == {len(NAMES)}
    FakeRival.shares.clear()
    FakeRival.refused = NAMES[1:]
    race(tmp_path / "other", tokens=(1,), gradients=False, rounds=1)
    assert set(FakeRival.shares) == {1}


def test_rounds_go_on_for_as_long_as_is_asked(said, tmp_path, monkeypatch):
    seconds = iter(range(100))
    monkeypatch.setattr(run, "perf_counter", lambda: next(seconds))
    race(tmp_path, tokens=(1,), gradients=False, rounds=1, seconds=4.0)
    assert len(turns(said, 1, "forward")) == 4 * len(NAMES)


def test_figures_follow_from_the_times(said, tmp_path):
    FakeRival.times.update(
        first=lambda size, turn: size * [2.0, 4.0, 2.0][(turn - 1) % 3],
        second=lambda size, turn: size**2 * [8.0, 8.0, 12.0][(turn - 1) % 3],
    )
    results = race(tmp_path, tokens=(1, 2), gradients=False)
    first, second = (results.of(name, "forward")[2] for name in NAMES[:2])
    assert first.rounds_ms == (4.0, 8.0, 4.0)
    assert first.time_ms == Spread(low=4.0, median=4.0, high=6.0)
    assert second.ratio == Spread(low=6.0, median=8.0, high=10.0)  # rounds: 8, 4, 12
    assert second.peak_mib == 2.0
    assert second.per_second == 4 / 0.032
    assert second.copy_share == pytest.approx(
        1 / 32
    )  # as many bytes as the copy's, which took 1 ms
    assert second.matmul_share == pytest.approx(1 / 32)
    grown = {each.name: each.time_exponent for each in results.growth}
    assert grown == {"first": pytest.approx(1), "second": pytest.approx(2), "third": 0.0}
    assert results.heats[0].yardsticks.copy_gb_per_s == 2.0


def test_spreads_ratios_and_powers():
    assert spread([3.0]) == Spread(low=3.0, median=3.0, high=3.0)
    assert ratio([4.0, 9.0], [2.0, 3.0]) == Spread(low=2.25, median=2.6, high=2.75)


def test_memory_is_foretold_from_the_last_two_sizes(said, tmp_path):
    outcomes = race(tmp_path, gradients=False).of("first", "forward")
    quadratic = {
        size: dataclasses.replace(outcomes[1], peak_mib=float(size**2)) for size in (2, 4, 8)
    }
    assert forecast_mib(quadratic, 16) == pytest.approx(256)
    assert forecast_mib({8: quadratic[8]}, 16) == 0  # one size tells nothing
    assert growth("first", "forward", quadratic).memory_exponent == pytest.approx(2)
    assert growth("first", "forward", {8: quadratic[8]}) is None


def test_what_would_not_fit_into_memory_is_not_tried(said, tmp_path, monkeypatch):
    machine = dataclasses.replace(run.find_machine(ASKED), memory_mib=3.0)
    monkeypatch.setattr(run, "find_machine", lambda _: machine)
    results = race(tmp_path, tokens=(1, 2, 4), gradients=False)
    missing = {m.name: m.why for m in results.heat("forward", 4).missing}
    assert list(missing) == list(NAMES)
    assert missing["first"].startswith(
        "left out, as a call would take about 0.00391 GiB, of 0.00293"
    )
    assert ("starts", "first", 4) not in said


def test_a_contestant_that_fails_is_listed_and_the_others_go_on(said, tmp_path):
    FakeRival.times["second"] = TrialError("ValueError: no more")
    results = race(tmp_path, gradients=False)
    for size in (1, 2):  # an error may be one of the size, so it is tried again
        heat = results.heat("forward", size)
        assert [(m.name, m.why) for m in heat.missing] == [("second", "ValueError: no more")]
        assert [(o.name, len(o.rounds_ms)) for o in heat.outcomes] == [("first", 3), ("third", 3)]


def test_without_the_first_contestant_there_are_no_ratios(said, tmp_path):
    FakeRival.times["first"] = TrialError("gone")
    (heat,) = race(tmp_path, tokens=(1,), gradients=False).heats
    assert [outcome.ratio for outcome in heat.outcomes] == [None, None]


def test_a_contestant_whose_process_was_killed_is_not_tried_at_larger_sizes(said, tmp_path):
    FakeRival.times["second"] = KilledError("its process was killed")
    results = race(tmp_path, tokens=(1, 2, 3), gradients=False)
    whys = [results.heat("forward", size).missing[0].why for size in (1, 2, 3)]
    later = "left out, as its process was killed"
    assert whys == ["its process was killed", later, later]
    assert ("starts", "second", 2) not in said


def test_what_takes_longer_than_its_budget_is_not_tried_at_larger_sizes(said, tmp_path):
    FakeRival.times["third"] = lambda size, turn: 600.0 * size
    results = race(tmp_path, tokens=(1, 2, 3), time_limit_s=1.0, gradients=False)
    assert list(results.of("third", "forward")) == [1, 2]
    (missing,) = results.heat("forward", 3).missing
    assert missing.why == "left out, as at 2 a call took 1.2 s"
    assert ("starts", "third", 3) not in said


def test_what_the_file_holds_is_not_measured_again(said, tmp_path):
    before = race(tmp_path)
    said.clear()
    assert race(tmp_path) == before
    assert not said
    more = race(tmp_path, tokens=(1, 2, 4))
    assert {word[2] for word in said} == {4}
    assert more.heats[:-2] == before.heats


def test_gradients_may_be_asked_for_later(said, tmp_path):
    race(tmp_path, gradients=False)
    said.clear()
    assert race(tmp_path).works == list(WORKS)
    assert {word[3] for word in said if word[0] == "turn" and word[1] == "first"} == {WORKS[1]}


def test_an_interrupted_benchmark_goes_on_where_it_was(said, tmp_path):
    def interrupt(results):
        if len(results.heats) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        race(tmp_path, after=interrupt)
    assert [word[0] for word in said].count("ends") == 8  # nobody is left alone
    said.clear()
    results = race(tmp_path)
    assert [(heat.size, heat.work) for heat in results.heats] == [
        (size, work) for size in (1, 2) for work in WORKS
    ]
    assert [word[2:] for word in said if word[:2] == ("prepares", "first")] == [(2, WORKS[1])]


def test_the_file_holds_everything(said, tmp_path):
    FakeRival.times["second"] = TrialError("gone")
    results = race(tmp_path, batch_size=3)
    held = json.loads((tmp_path / "fakes.json").read_text())
    assert configs.from_dict(Results, held) == results
    assert held["machine"]["torch"] == torch.__version__
    assert held["options"]["batch_size"] == 3
    assert held["heats"][0]["missing"][0]["why"] == "gone"
    assert held["heats"][0]["outcomes"][0]["rounds_ms"] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"batch_size": 2},
            r"measured with options\.batch_size 4, and not 2: choose another folder",
        ),
        ({"rounds": 4}, r"with options\.rounds 3, and not 4"),
        ({"dtype": "bfloat16"}, r"with options\.dtype 'float32', and not 'bfloat16'"),
        ({"candidates": ("second", "first")}, r"fakes.json holds what was measured with names"),
        ({"threads": 77}, r"with options\.threads None, and not 77"),
    ],
)
def test_other_options_are_refused(said, tmp_path, changes, message):
    race(tmp_path)
    before = (tmp_path / "fakes.json").read_bytes()
    with pytest.raises(ValueError, match=message):
        race(tmp_path, **changes)
    assert (tmp_path / "fakes.json").read_bytes() == before


def test_another_machine_is_refused(said, tmp_path, monkeypatch):
    race(tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    with pytest.raises(ValueError, match=r"with machine\.threads \d+, and not 77"):
        race(tmp_path)


def test_interpreted_kernels_are_another_machine(said, tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(machine, "_version", lambda _: "3.7.1")
    race(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=r"with machine\.triton '3.7.1', and not '3.7.1, interp"):
        race(tmp_path)


@pytest.mark.parametrize("text", ["[", "[]", '{"benchmark": "fakes"}'])
def test_a_damaged_file_says_so(said, tmp_path, text):
    (tmp_path / "fakes.json").write_text(text)
    with pytest.raises(ValueError, match=r"fakes\.json is damaged .*: remove it"):
        race(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": ()}, r"tokens is \(\), expected at least one, and each once"),
        ({"tokens": (4, 4)}, r"tokens is \(4, 4\), expected at least one, and each once"),
        ({"tokens": (4, 0)}, "tokens has 0, expected numbers above 0"),
        ({"batch_size": 0}, "batch_size is 0, expected a number above 0"),
        ({"rounds": 0}, "rounds is 0"),
        ({"batch_size": 2**31}, "batch_size is 2147483648, expected at most 2147483647"),
        ({"threads": 2**31}, "threads is 2147483648, expected at most 2147483647"),
        ({"tokens": (1, 2**31)}, "tokens has 2147483648, expected at most 2147483647"),
        ({"seconds": -1.0}, "seconds is -1.0, expected 0 or more"),
        ({"time_limit_s": float("nan")}, "time_limit_s is nan"),
        ({"time_limit_s": 1e5}, "time_limit_s is 100000.0, expected at most 50000"),
        ({"threads": 0}, "threads is 0"),
        ({"candidates": ("first", "first")}, "expected each once"),
        ({"candidates": ("frist",)}, r"name 'frist' is unknown \(perhaps you meant 'first'\)"),
        ({"dtype": "float64"}, "dtype 'float64' is unknown"),
        ({"backend": "cuda"}, "backend 'cuda' is unknown"),
        ({"device": "gpu"}, "^device is 'gpu', expected auto, cpu, cuda"),
    ],
)
def test_refusals_come_before_the_first_measurement(said, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        race(tmp_path, **changes)
    assert not said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("benchmark", "changes", "message"),
    [
        ("one-scan", {"num_heads": 0}, "num_heads is 0"),
        ("one-scan", {"head_dim": 2**31}, "head_dim is 2147483648, expected at most"),
        ("decay", {"chunk_size": 0}, "chunk_size is 0"),
        ("decay", {"decay": "fixed"}, "decay 'fixed' is unknown"),
        ("decay", {"normalize": "max_one"}, "normalize 'max_one' is unknown"),
        ("causal", {"model_size": "2b"}, "model_size '2b' is unknown"),
        ("causal", {"level": "layer"}, "level 'layer' is unknown"),
        ("decode", {"gradients": True}, "gradients is True, expected False"),
        ("models", {"presets": ()}, r"presets is \(\), expected at least one"),
        ("models", {"presets": ("gpt2_small",)}, "preset 'gpt2_small' is unknown"),
        (
            "models",
            {"image_size": (30,)},
            "image_size has 30, expected a multiple of .*16 x 16",
        ),
    ],
)
def test_each_benchmark_refuses_what_it_cannot_do(said, tmp_path, benchmark, changes, message):
    options = CONTESTS[benchmark].options()
    for name, value in changes.items():  # as without the tests' own look at types
        object.__setattr__(options, name, value)
    with pytest.raises(ValueError, match=message):
        run_contest(benchmark, options, tmp_path)
    assert not said
