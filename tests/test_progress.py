"""Progress bars on a terminal, and lines in a log file."""

import io

import pytest

from onescan.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Replace tqdm's clock by a list with the seconds."""
    seconds = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: seconds[0])
    return seconds


def shown(monkeypatch, clock, stream, *, leave=True, seconds=70):
    """Return what a bar of one update per second writes."""
    monkeypatch.setattr("sys.stderr", stream)
    with progress_bar(100, leave=leave, desc="testing", unit=" images") as bar:
        for _ in range(seconds):
            clock[0] += 1
            bar.set_postfix({"loss": 1.5}, refresh=False)
            bar.update()
    return stream.getvalue()


def test_a_log_file_gets_a_line_every_30_seconds(monkeypatch, clock):
    text = shown(monkeypatch, clock, io.StringIO())
    assert "\r" not in text
    assert "\x1b" not in text
    assert [line[: line.index("[") + 6] for line in text.splitlines()] == [
        "testing:   0% 0/100 [00:00",
        "testing:  30% 30/100 [00:30",
        "testing:  60% 60/100 [01:00",
        "testing:  70% 70/100 [01:10",
    ]
    assert text.endswith("[01:10<00:30,  1.00 images/s, loss=1.5]\n")


def test_a_bar_that_does_not_stay_is_not_in_the_log_before_30_seconds(monkeypatch, clock):
    assert shown(monkeypatch, clock, io.StringIO(), leave=False, seconds=29) == ""
    text = shown(monkeypatch, clock, io.StringIO(), leave=False, seconds=59)
    assert [line.split()[2] for line in text.splitlines()] == ["30/100"]


def test_bars_inside_bars_are_lines(monkeypatch, clock):
    monkeypatch.setattr("sys.stderr", stream := io.StringIO())
    with progress_bar(2, desc="training") as outer:
        shown(monkeypatch, clock, stream, leave=False)
        outer.update()
    lines = stream.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == [
        "training:",
        *["testing:"] * 2,
        *["training:"] * 2,
    ]
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_a_bar(monkeypatch, clock):
    text = shown(monkeypatch, clock, Terminal())
    assert text.count("\r") > 60
    assert "70/100" in text
    assert "\u2588" in text or "#" in text
