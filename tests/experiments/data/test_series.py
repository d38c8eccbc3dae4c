"""Time series from tables and arrays, and their times."""

import json
from math import isnan

import numpy as np
import pytest
import torch

from onescan.experiments.data.series import EMBEDDED, read_series
from onescan.experiments.data.times import read_times


def write(path, text):
    path.write_text(text)
    return str(path)


def times_of(*cells):
    return read_times(cells, [f"f.csv, line {i}" for i, _ in enumerate(cells, start=2)])


def rows(values):
    """Return nested lists with None for missing values."""
    return [[None if isnan(x) else x for x in channel] for channel in values.flatten(0, 1).tolist()]


# Times


@pytest.mark.parametrize(
    ("cells", "following", "every", "seasonality"),
    [
        (("2020-01-30", "2020-01-31"), ["2020-02-01", "2020-02-02"], "1 day", 7),
        (("2001-12-22", "2001-12-29"), ["2002-01-05", "2002-01-12"], "7 days", 52),
        (("2020-01-31", "2020-02-29"), ["2020-03-31", "2020-04-30"], "1 month", 12),
        (("2020-01-30", "2020-03-30"), ["2020-05-30", "2020-07-30"], "2 months", 6),
        (("2020-11", "2020-12"), ["2021-01", "2021-02"], "1 month", 12),
        (("2000-07-01", "2001-07-01"), ["2002-07-01", "2003-07-01"], "12 months", 1),
        (("20200227", "20200228"), ["20200229", "20200301"], "1 day", 7),
        (("2020/02/27", "2020/02/28"), ["2020/02/29", "2020/03/01"], "1 day", 7),
        (
            ("2020-01-01 22:00", "2020-01-01 23:00"),
            ["2020-01-02 00:00", "2020-01-02 01:00"],
            "1 hour",
            24,
        ),
        (
            ("2020-01-01T00:00:00Z", "2020-01-01T00:15:00Z"),
            ["2020-01-01T00:30:00Z", "2020-01-01T00:45:00Z"],
            "15 minutes",
            96,
        ),
        (("1700", "1701"), ["1702", "1703"], "1", 1),
        (("0.1", "0.2"), ["0.3", "0.4"], "0.1", 1),
    ],
)
def test_times_are_continued(cells, following, every, seasonality):
    times, steps = times_of(*cells)
    assert steps == [0, 1]
    assert [times.text(i) for i in range(4)] == [*cells, *following]
    assert (times.every, times.seasonality) == (every, seasonality)


def test_gaps_are_steps_that_are_left_out():
    times, steps = times_of("2020-01-01", "2020-01-02", "2020-01-03", "2020-01-06", "2020-01-07")
    assert steps == [0, 1, 2, 5, 6]
    assert times.text(4) == "2020-01-05"


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (
            ("31.12.2020", "01.01.2021"),
            r"line 2: the time is '31\.12\.2020', expected a number, or",
        ),
        (
            ("2020-01-01", "2020-1-32"),
            r"line 3: .* '2020-1-32', expected a date such as 1970-01-01",
        ),
        (("2020-01-02", "2020-01-02"), r"line 3: .* is not after '2020-01-02' in the previous row"),
        (("3", "2"), "line 3: the time '2' is not after '3'"),
        (("1", "3", "5", "6"), "line 5: .* expected regular steps: most times are 2 apart"),
        (("2020-01-01", "2020-01-08", "2020-01-15", "2020-01-16"), "line 5: .* are 7 days apart"),
    ],
)
def test_times_that_are_not_regular_are_refused(cells, message):
    with pytest.raises(ValueError, match=message):
        times_of(*cells)


# Tables


def test_a_table_has_a_column_per_channel(tmp_path):
    path = write(tmp_path / "a.csv", "date,a,b\n2020-01-01,1,2\n2020-01-02,,NaN\n2020-01-03,3,4\n")
    table = read_series(path)
    assert table.names == (("a", "b"),)
    assert rows(table.values) == [[1, None, 3], [2, None, 4]]
    assert table.notes == (
        "times are read from column 'date', with a step of 1 day",
        "2 of 6 values are missing (33.3%)",
    )
    assert table.times.text(3) == "2020-01-04"
    separate = table.separate()
    assert (separate.values.shape, separate.names) == ((2, 1, 3), (("a",), ("b",)))
    assert rows(table.select(("b",)).values) == [[2, None, 4]]
    with pytest.raises(ValueError, match=r"there is no column 'c'; available: a, b"):
        table.select(("a", "c"))


def test_gaps_in_time_are_filled_with_missing_values(tmp_path):
    path = write(tmp_path / "a.csv", "month,a\n2020-01,1\n2020-02,2\n2020-05,5\n")
    table = read_series(path)
    assert rows(table.values) == [[1, 2, None, None, 5]]
    assert "filled gaps in time with 2 missing steps" in table.notes
    assert table.times.text(5) == "2020-06"


def test_an_empty_line_of_one_column_is_a_missing_value(tmp_path):
    assert rows(read_series(write(tmp_path / "a.csv", "a\n1\n\n3\n\n\n")).values) == [[1, None, 3]]
    two = write(tmp_path / "b.csv", "a,b\n1,2\n\n3,4\n")
    assert rows(read_series(two).values) == [[1, 3], [2, 4]]


@pytest.mark.parametrize(
    ("header", "time"), [("a,b", None), ("Year,b", "Year"), (",b", ""), ("time,b", "time")]
)
def test_the_first_column_may_hold_times(tmp_path, header, time):
    table = read_series(write(tmp_path / "a.csv", f"{header}\n1,5\n2,6\n"))
    assert (table.times is not None) == (time is not None)
    assert table.names == ((("b",),) if time is not None else (("a", "b"),))


def test_a_time_column_can_be_named(tmp_path):
    path = write(tmp_path / "a.csv", "a,when\n1,5\n2,6\n")
    assert read_series(path).times is None
    assert read_series(path, "when").names == (("a",),)
    with pytest.raises(ValueError, match=r"no column 'wen' of times \(perhaps you meant 'when'\)"):
        read_series(path, "wen")


def test_other_tables(tmp_path):
    lines = "\n".join(json.dumps(row) for row in ({"time": 0, "a": 1.5}, {"time": 1, "a": None}))
    assert rows(read_series(write(tmp_path / "a.jsonl", lines)).values) == [[1.5, None]]
    assert rows(read_series(write(tmp_path / "a.tsv", "time\ta\n0\t1\n1\t2\n")).values) == [[1, 2]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\n1\nx\n", r"a\.csv, line 3: the value in column 'a' is 'x', expected a number, or an"),
        ("a\n1\ninf\n", r"a\.csv, line 3: the value in column 'a' is 'inf'"),
        ("a\n1\n1e200\n", r"a\.csv, line 3: the value in column 'a' is '1e200'"),
        ("a,b\n1,2\n3\n", r"a\.csv, line 3: the row has 1 cell, expected 2"),
        ("a\n1\n", r"a\.csv has 1 row, expected at least 2 steps"),
        ("date\n2020\n2021\n", r"a\.csv has no column of values besides 'date'"),
        ("a\nNA\n-\n", r"line 3: the value in column 'a' is '-'"),
        ("a,b\nNA,null\nNA,null\n", r"a\.csv has no values: all are missing"),
        ("time,a\n1,1\n2,2\n3,3\n99,4\n", r"1 apart, but gaps between the 4 rows amount to 95"),
    ],
)
def test_unusable_tables_are_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_series(write(tmp_path / "a.csv", text))


# Arrays


@pytest.mark.parametrize(
    ("shape", "expected", "last"),
    [((7,), (1, 1, 7), "x"), ((7, 2), (1, 2, 7), "x[:, 1]"), ((3, 7, 2), (3, 2, 7), "x[2, :, 1]")],
)
def test_arrays(tmp_path, shape, expected, last):
    x = np.random.default_rng(0).normal(size=shape)
    np.savez(tmp_path / "a.npz", x=x, other=x)
    np.save(tmp_path / "a.npy", x.astype(np.float32))
    table = read_series(str(tmp_path / "a.npz"))
    assert (tuple(table.values.shape), table.names[-1][-1]) == (expected, last)
    assert np.array_equal(table.values.mT.reshape(shape).numpy(), x)
    same = read_series(str(tmp_path / "a.npy")).values
    torch.testing.assert_close(same, table.values, atol=1e-6, rtol=1e-6)


def test_unusable_arrays_are_refused(tmp_path):
    for arrays, message in (
        ({"x": np.zeros((2, 3, 4, 5))}, r"x holds float64 of shape \(2, 3, 4, 5\), expected real"),
        ({"x": np.array(["a"])}, "x holds <U1 of shape"),
        ({"x": np.array([[1.0, np.inf]])}, r"x\[0, 1\] is inf, expected a number up to 1e\+150"),
        ({"a": np.zeros(3), "b": np.zeros(3)}, "has no array x; found: a, b"),
    ):
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(ValueError, match=message):
            read_series(str(tmp_path / "a.npz"))
    with pytest.raises(ValueError, match=r"there is no file .*b\.npy"):
        read_series(str(tmp_path / "b.npy"))
    with pytest.raises(ValueError, match=r"there is no file .*b\.csv"):
        read_series(str(tmp_path / "b.csv"))
    with pytest.raises(ValueError, match=r"expected a table \(\.csv"):
        read_series(str(tmp_path))
    (tmp_path / "c.npz").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"c\.npz cannot be read"):
        read_series(str(tmp_path / "c.npz"))


def test_the_embedded_series(tmp_path, monkeypatch):
    table = read_series("co2")
    assert table.values.shape == (1, 1, 2284)
    assert table.notes[-1] == "59 of 2,284 values are missing (2.6%)"
    assert (table.times.text(0), table.times.text(2283)) == ("1958-03-29", "2001-12-29")
    assert EMBEDDED["co2"].stat().st_size < 50_000
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "co2", np.zeros(3))  # co2.npy is another name
    assert read_series("co2").values.shape == (1, 1, 2284)
