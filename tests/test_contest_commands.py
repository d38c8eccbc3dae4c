"""onescan bench, as it is typed: small, real, and to the end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from forking import fork_from_one

from onescan import cli
from onescan.bench.contest import rival, run
from onescan.bench.contests import CONTESTS

ROOT = Path(__file__).parents[1]
QUICK = ["--rounds", "1", "--seconds", "0", "--device", "cpu"]
SMALL = ["--batch-size", "1", "--num-heads", "2", "--head-dim", "8"]


@pytest.fixture(autouse=True)
def _few_imports(monkeypatch):
    monkeypatch.setattr(rival.multiprocessing, "get_context", fork_from_one)


def bench(folder, capsys, *words):
    """What the file holds afterwards, and what was printed."""
    assert cli.main(["bench", *words, *QUICK, "--out", str(folder)]) == 0
    shown = capsys.readouterr()
    assert shown.out.endswith(f"report: {folder / 'report.html'}\n")
    assert (folder / "report.html").stat().st_size > 10_000
    return json.loads((folder / f"{words[0]}.json").read_text()), shown


def measured(held):
    return [(h["work"], h["size"], [o["name"] for o in h["outcomes"]]) for h in held["heats"]]


def test_one_scan(tmp_path, capsys):
    words = ["one-scan", *SMALL, "--tokens", "16", "--candidates", "one_scan", "softmax"]
    held, shown = bench(tmp_path, capsys, *words)
    names = ["one_scan", "softmax"]
    assert measured(held) == [("forward", 16, names), ("forward + backward", 16, names)]
    for heat in held["heats"]:
        assert all(outcome["time_ms"]["median"] > 0 for outcome in heat["outcomes"])
        assert heat["outcomes"][0]["ratio"]["median"] == 1
        assert 0 < heat["outcomes"][0]["copy_share"] < 10
    assert "softmax, forward, 16" in shown.err
    again, _ = bench(tmp_path, capsys, *words)
    assert again == held
    assert cli.main(["bench", *words, *QUICK, "--out", str(tmp_path), "--head-dim", "4"]) == 2
    assert "measured with options.head_dim 8, and not 4" in capsys.readouterr().err


def test_decay(tmp_path, capsys):
    names = ["auto", "full", "fla_two_calls"]
    words = [
        *SMALL,
        "--tokens",
        "16",
        "--candidates",
        *names,
        "--no-gradients",
        "--decay",
        "diagonal",
    ]
    held, shown = bench(tmp_path, capsys, "decay", *words)
    assert measured(held) == [("forward", 16, names[:2])]
    (missing,) = held["heats"][0]["missing"]
    assert missing["name"] == "fla_two_calls"
    assert f"  fla_two_calls, forward, at 16: {missing['why']}" in shown.out


def test_causal(tmp_path, capsys):
    names = ["lightnet", "softmax"]
    held, shown = bench(tmp_path, capsys, "causal", "--tokens", "16", "--candidates", *names)
    assert measured(held) == [("training", 16, names)]
    first = held["heats"][0]["outcomes"][0]
    assert first["per_second"] == pytest.approx(16_000 / first["time_ms"]["median"])
    assert 0 < first["matmul_share"] < 1
    assert "tokens/s" in shown.out


def test_decode(tmp_path, capsys):
    words = ["--tokens", "16", "--model-size", "small", "--candidates", "lightnet", "softmax"]
    held, _ = bench(tmp_path, capsys, "decode", *words)
    lightnet, softmax = held["heats"][0]["outcomes"]
    assert lightnet["state_mib"] > softmax["state_mib"] > 0


def test_models(tmp_path, capsys):
    words = ["--image-size", "32", "--batch-size", "1", "--no-gradients"]
    held, shown = bench(tmp_path, capsys, "models", *words, "--presets", "deit_tiny", "lion_s_tiny")
    assert measured(held) == [("inference", 32, ["deit_tiny", "lion_s_tiny"])]
    assert "images/s" in shown.out


def test_without_words_the_benchmarks_are_listed(capsys):
    assert cli.main(["bench"]) == 0
    shown = capsys.readouterr().out
    for name, contest in CONTESTS.items():
        assert f"  {name:<10}{contest.summary}\n" in shown
    assert "  forms " in shown


COMMON = (
    *(
        "--batch-size",
        "--dtype",
        "--device",
        "--backend",
        "--no-gradients",
        "--rounds",
        "--seconds",
    ),
    *("--threads", "--candidates", "--time-limit-s", "--out"),
)
HELP = """
import sys
from onescan.cli import main
try:
    main(["bench", sys.argv[1], "--help"])
finally:
    assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("name", CONTESTS)
def test_help_lists_the_options_and_waits_for_no_torch(name):
    command = [sys.executable, "-c", HELP, name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    size = "--image-size" if name == "models" else "--tokens"
    for option in (size, *COMMON):
        assert f"{option} " in done.stdout or f"{option}," in done.stdout, option


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["one-scna"], "benchmark 'one-scna' is unknown (perhaps you meant 'one-scan')"),
        (["one-scan", "--candidates", "two"], "name 'two' is unknown"),
        (["one-scan", "--tokens", "0"], "tokens has 0, expected numbers above 0"),
        (["one-scan", "--device", "gpu"], "error: device is 'gpu'"),
        (["models", "--presets", "deit"], "preset 'deit' is unknown"),
    ],
)
def test_what_cannot_be_is_told_in_a_sentence(words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_page_that_is_not_ours_is_not_replaced(tmp_path, capsys):
    (tmp_path / "report.html").write_text("mine")
    assert cli.main(["bench", "one-scan", "--out", str(tmp_path)]) == 2
    assert "was not written by onescan" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["one-scan"], ["forms", "lion_d_tiny"]])
def test_a_folder_without_a_name_is_refused(words, capsys):
    assert cli.main(["bench", *words, "--out", ""]) == 2
    assert "out is empty" in capsys.readouterr().err


def test_where_nothing_could_be_measured_there_is_no_page(tmp_path, capsys):
    words = ["decay", *SMALL, "--tokens", "16", "--candidates", "fla_two_calls", "--no-gradients"]
    assert cli.main(["bench", *words, *QUICK, "--out", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert "error: no measurement succeeded" in shown.err
    assert "fla_two_calls, forward, at 16: flash-linear-attention needs a GPU" in shown.err
    assert [path.name for path in tmp_path.iterdir()] == ["decay.json"]
    held = json.loads((tmp_path / "decay.json").read_text())
    assert held["heats"][0]["missing"][0]["why"] == "flash-linear-attention needs a GPU"


def test_an_interruption_while_a_class_is_made_is_one_too(tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

    monkeypatch.setattr(run, "run_contest", interrupted)
    assert cli.main(["bench", "decode", "--out", str(tmp_path)]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_an_interruption_says_that_the_command_goes_on(tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_contest", interrupted)
    assert cli.main(["bench", "decode", "--out", str(tmp_path)]) == 130
    assert "run the same command again to resume" in capsys.readouterr().err
