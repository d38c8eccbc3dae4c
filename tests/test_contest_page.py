"""The page and the table of a benchmark hold its figures, and say who could not run."""

import dataclasses

import pytest
from fake_contestants import CONTEST, FakeOptions, FakeRival
from html_page import Page, assert_loads_nothing
from onescan.report.contest import pictures
from onescan.report.contest.figures import between, milliseconds
from onescan.report.contest.page import render_contest
from onescan.report.contest.titles import titled

from onescan.bench.contest import run
from onescan.bench.contest.outcome import Spread
from onescan.bench.contest.rival import TrialError
from onescan.bench.contest.run import run_contest
from onescan.bench.contests import CONTESTS, CausalOptions
from onescan.report import contest_table, write_contest

TIMES = "\N{MULTIPLICATION SIGN}"


@pytest.fixture
def results(monkeypatch, tmp_path):
    """Of three contestants: the first, one quadratic and slower, and one that fails."""
    monkeypatch.setattr(run, "Rival", FakeRival)
    monkeypatch.setattr(FakeRival, "said", [])
    times = {
        "first": lambda size, turn: 2.0 * size * [1.0, 1.1, 0.9][(turn - 1) % 3],
        "second": lambda size, turn: 3.0 * size**2,
        "third": TrialError("ValueError: <b> needs a GPU"),
    }
    monkeypatch.setattr(FakeRival, "times", times)

    def race(**changes):
        options = FakeOptions(rounds=3, seconds=0.0, **changes)
        return run_contest("fakes", options, tmp_path, contest=CONTEST)

    return race


def rows(page, work):
    """A table's cells, by contestant and size."""
    (table,) = [rows for rows in page.cells[-3:-1] if rows[0][1] == "tokens"][work : work + 1]
    filled, name = {}, ""
    for first, *cells in table[1:]:
        name = first or name
        filled[name, int(cells[0])] = dict(zip(table[0][2:], cells[1:], strict=True))
    return filled


def test_the_page_shows_variables_of_the_allocator(results, tmp_path, monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")
    page = write_contest(results(), CONTEST, tmp_path / "report.html").read_text(encoding="utf-8")
    assert ", with MALLOC_MMAP_MAX_=0" in page


def test_the_page_holds_the_numbers(results, tmp_path):
    path = write_contest(results(tokens=(1, 4)), CONTEST, tmp_path / "report.html")
    html = path.read_text(encoding="utf-8")
    assert_loads_nothing(html)
    page = Page(html)
    forward = rows(page, 0)
    assert list(forward) == [("first", 1), ("first", 4), ("second", 1), ("second", 4)]
    assert forward["first", 4]["time"] == "8 ms"
    assert forward["first", 4]["quartiles"] == "7.6 to 8.4 ms"
    assert forward["first", 4]["time grows as"] == "T^1.00"
    assert forward["second", 4]["time"] == "48 ms"
    assert forward["second", 4]["ratio"] == f"6 {TIMES}"
    assert forward["second", 4]["time grows as"] == "T^2.00"
    assert forward["second", 4]["memory"] == "4 MiB"
    assert forward["second", 1]["tokens/s"] == "1.33 k"
    assert html.count('class="best"') == 4
    assert f"<strong>6 {TIMES}</strong><b>as long: second</b><span>forward, at 4 tokens" in html


def test_the_page_tells_the_machine_the_options_and_who_is_missing(results):
    measured = results(tokens=(1, 4), batch_size=3, threads=1)
    page = Page(render_contest(measured, CONTEST))
    assert f"torch {measured.machine.torch}" in page.text
    assert "flash-linear-attention" in page.text
    assert "1 thread of" in page.text
    assert "tokens 1 4" in page.text
    assert (
        "batch size 3, dtype float32, device auto, backend auto, compile no, gradients yes"
        in page.text
    )
    assert "time limit s 60, threads 1" in page.text
    assert "at least 3 rounds and 0 s" in page.text
    assert "third, forward, at 1, 4: ValueError: <b> needs a GPU" in page.text


def test_time_memory_and_ratio_are_drawn_for_each_work(results):
    page = Page(render_contest(results(tokens=(1, 4)), CONTEST))
    drawn = [svg.decode() for svg in page.pictures("svg+xml")]
    assert len(drawn) == 6
    for svg in drawn:
        assert ">first<" in svg
        assert ">second<" in svg
        assert ">third<" not in svg


def test_a_single_size_is_drawn_in_bars(results):
    page = Page(render_contest(results(tokens=(1,), gradients=False), CONTEST))
    speed, memory = (svg.decode() for svg in page.pictures("svg+xml"))
    assert ">tokens a second<" in speed
    assert "> 2 k<" in speed  # four tokens in 2 ms
    assert ">MiB<" in memory
    timed = dataclasses.replace(CONTEST, items="")
    for contest in (CONTEST, timed):  # bars of speed, and of time
        text = Page(render_contest(results(tokens=(1,), gradients=False), contest)).text
        assert " band is from" not in text
    assert "grows as" not in page.text
    assert "Forward: at 1 tokens" in page.text


def test_the_lead_of_both_works_calls_neither_the_only_one(results):
    both = Page(render_contest(results(tokens=(2,)), CONTEST)).text
    assert "Forward only" not in both


def test_the_lead_of_a_forward_without_gradients_says_so(results):
    text = Page(render_contest(results(tokens=(1, 4), gradients=False), CONTEST)).text
    assert "Nothing is done. Forward only, without gradients." in text
    assert "gradients no" in text


def test_ops_are_not_called_models(results):
    measured = results(tokens=(1, 4))
    assert titled(measured, CONTEST).title == "Fakes"
    of_ops = dataclasses.replace(measured, options=CausalOptions(level="op"))
    assert titled(of_ops, CONTESTS["causal"]).title == "Causal ops"
    assert "random tokens" not in titled(of_ops, CONTESTS["causal"]).lead


def test_shares_are_explained_where_they_stand(results):
    measured = results(tokens=(1, 4))
    heats = [
        dataclasses.replace(
            heat,
            outcomes=tuple(dataclasses.replace(o, matmul_share=None) for o in heat.outcomes),
        )
        for heat in measured.heats
    ]
    copied = dataclasses.replace(measured, heats=tuple(heats))
    assert "Of matmul:" in Page(render_contest(measured, CONTEST)).text
    text = Page(render_contest(copied, CONTEST)).text
    assert "Of copying:" in text
    assert "Of matmul:" not in text


def test_powers_and_places_of_images_are_of_their_sides(results):
    measured = results(tokens=(32, 64))
    text = Page(render_contest(measured, CONTESTS["models"])).text
    assert "S^2.00" in text
    assert "S is the side of the image" in text
    assert "for images of side 64" in text
    assert "third, forward, for images of side 32, 64: ValueError" in text


def test_who_ends_early_is_marked(results, monkeypatch):
    late = FakeRival.times | {"second": lambda size, turn: 2000.0 * size}
    monkeypatch.setattr(FakeRival, "times", late)
    measured = results(tokens=(1024, 2048), time_limit_s=10.0, gradients=False)
    drawn = Page(render_contest(measured, CONTEST)).pictures("svg+xml")
    assert b">second (to 1k)<" in drawn[0]
    table = contest_table(measured, CONTEST)
    assert "second, forward, at 2048: left out, as at 1024 a call took 2048 s" in table


def test_a_page_where_nobody_could_run_says_so(results, monkeypatch):
    gone = dict.fromkeys(("first", "second", "third"), TrialError("no such library"))
    monkeypatch.setattr(FakeRival, "times", gone)
    measured = results(tokens=(1,), gradients=False)
    assert "No contestant could run" in Page(render_contest(measured, CONTEST)).text
    assert "first, forward, at 1: no such library" in contest_table(measured, CONTEST)


def test_the_table_holds_the_numbers(results):
    measured = results(tokens=(1, 4), gradients=False)
    table = contest_table(measured, CONTEST)
    assert table.isascii()
    lines = table.splitlines()
    begin = lines.index("Fakes, forward")
    assert lines[begin + 1].split() == [
        "tokens", "time", "quartiles", "ratio", "its", "quartiles", "memory", "tokens/s",
        "of", "copying", "of", "matmul",
    ]  # fmt: skip
    assert lines[begin + 3].split()[:4] == ["first", "4", "8", "ms"]
    assert lines[begin + 5].split()[:4] == ["second", "4", "48", "ms"]
    assert "second, forward: time grows as the size's power 2.00, memory as its power 1.00" in lines
    assert "  third, forward, at 1, 4: ValueError: <b> needs a GPU" in lines


def test_the_band_of_a_line_is_between_the_quartiles(results):
    measured = results(tokens=(1, 4), gradients=False)
    low, high = pictures._band(measured, "forward", "first", pictures.TIME)
    assert low == pytest.approx([1.9, 7.6])
    assert high == pytest.approx([2.1, 8.4])
    low, high = pictures._band(measured, "forward", "first", pictures.MEMORY)
    assert low == high == [1.0, 4.0]


def test_quartiles_share_their_unit_where_they_have_one():
    assert between(Spread(low=1.0, median=2.0, high=3.0), milliseconds) == "1 to 3 ms"
    across = Spread(low=900.0, median=1000.0, high=2000.0)
    assert between(across, milliseconds) == "900 ms to 2 s"
