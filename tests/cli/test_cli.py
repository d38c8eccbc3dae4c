"""The command line: what it prints, what it writes, and how it fails."""

import contextlib
import dataclasses
import io
import json
import logging
import math
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tqdm
from PIL import Image
from tiny_run import assert_same

import onescan
from onescan.cli import COMMANDS, main
from onescan.cli.evaluate import COMMON as EVALUATE_COMMON
from onescan.cli.options import parse
from onescan.cli.train import COMMON as TRAIN_COMMON
from onescan.configs import differences
from onescan.experiments.recipes import RECIPES, find_recipe
from onescan.experiments.training.folder import read_result
from onescan.experiments.training.logging import duration
from onescan.layers.position import AbsolutePositionConfig
from onescan.models.presets import LDN_ABLATIONS, LIGHTNET_ABLATIONS, PRESETS, preset
from onescan.models.size import model_size

SMALL = ["--training.steps", "3", "--model.depth", "1", "--model.width", "16"]
SMALL += ["--model.mixer.num-heads", "2", "--model.mixer.gate-rank", "4"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of a very short run, trained with the command line."""
    out = tmp_path_factory.mktemp("cli") / "digits"
    assert main(["train", "digits", *SMALL, "--seeds", "0", "1", "--out", str(out)]) == 0
    return out


@pytest.fixture
def _no_report(monkeypatch):
    monkeypatch.setattr("onescan.experiments.report.write_report", lambda *_: None)


def assert_fails(capsys, argv, message, code=2):
    """Check the exit code, and the message without line breaks and boxes."""
    try:
        found = main([str(argument) for argument in argv])
    except SystemExit as error:  # raised by tyro
        found = error.code
    assert found == code
    captured = capsys.readouterr()
    assert message in " ".join(captured.err.replace("│", " ").split())
    assert "Traceback" not in captured.err + captured.out


def poor_console(monkeypatch, encoding):
    """Replace the console by one that has few characters; return a function of what it shows."""
    streams = {
        name: io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
        for name in ("stdout", "stderr")
    }
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    return lambda name: streams[name].buffer.getvalue().decode(encoding)


over_encodings = pytest.mark.parametrize("encoding", ["cp1252", "ascii"])


@pytest.mark.slow
@over_encodings
def test_help_and_errors_are_escaped_for_the_console(monkeypatch, encoding):
    console = poor_console(monkeypatch, encoding)
    with pytest.raises(SystemExit) as left:
        main(["train", "digits", "--help"])
    assert left.value.code == 0
    assert "onescan train digits --seeds 0 1 2" in console("stdout")
    with pytest.raises(SystemExit) as left:
        main(["train", "digits", "--model.width", "猫"])
    assert left.value.code == 2
    assert main(["predict", "→", "x.png"]) == 2
    assert r"\u732b" in console("stderr")
    assert r"\u2192" in console("stderr")
    assert r"\u25" not in console("stdout") + console("stderr")  # tyro draws no boxes


@over_encodings
def test_texts_and_progress_are_escaped_for_the_console(monkeypatch, encoding):
    console = poor_console(monkeypatch, encoding)
    argv = ["zoo/shakespeare_lightnet", "--prompt", "→ é", "--max-new-tokens", "2"]
    assert main(["generate", *argv]) == 0
    assert console("stdout").startswith(r"\u2192 ")
    with tqdm.tqdm(total=2, desc="猫 →") as bar:
        bar.update()
    logging.StreamHandler().emit(logging.makeLogRecord({"msg": "ж"}))
    assert r"\u732b" in console("stderr")
    assert r"\u0436" in console("stderr")


@pytest.mark.slow
def test_a_prompt_on_standard_input_in_another_encoding(monkeypatch, capsys):
    argv = ["generate", "zoo/shakespeare_lightnet", "--max-new-tokens", "2", "--prompt", "-"]

    def read(content, encoding, errors="strict"):
        stream = io.TextIOWrapper(io.BytesIO(content), encoding=encoding, errors=errors)
        monkeypatch.setattr(sys, "stdin", stream)
        code = main(argv)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    assert read("naïve".encode("cp1252"), "cp1252")[1].startswith("naïve")
    assert read("\ufeffnaïve".encode(), "utf-8")[1].startswith("naïve")
    code, _, message = read(b"ab\xff", "utf-8")
    assert (code, "is not valid utf-8 at byte 2" in message) == (2, True)
    code, _, message = read(b"ab\xff", "utf-8", "surrogateescape")
    assert (code, "expected Unicode text without lone surrogates" in message) == (2, True)
    assert read("ab".encode("utf-16-le"), "utf-16-le")[1].startswith("ab")
    code, _, message = read("ab".encode("utf-16-le"), "utf-8")
    assert (code, "standard input contains NUL characters if read as utf-8" in message) == (2, True)
    monkeypatch.setattr(sys, "stdin", None)
    assert main(argv) == 2
    assert "standard input is closed" in capsys.readouterr().err


# Help


def test_overview_lists_all_commands(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    assert main([]) == 2
    for flag in ("-V", "--version"):
        capsys.readouterr()
        assert main([flag]) == 0
        assert capsys.readouterr().out == f"onescan {onescan.__version__}\n"


@pytest.mark.parametrize("flag", ["--help", "--help-all"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, flag, capsys):
    with contextlib.suppress(SystemExit):
        assert main([command, flag]) == 0
    assert "usage: onescan" in capsys.readouterr().out


def help_text(capsys, *argv):
    """Return the help text of a command."""
    with pytest.raises(SystemExit) as left:
        main([*argv])
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_help_shows_common_options_and_help_all_every_option(capsys):
    shown = {flag: help_text(capsys, "train", "digits", flag) for flag in ("--help", "--help-all")}
    common = ("--out PATH", "--seeds INT", "--training.batch-size INT", "--machine.device STR")
    assert all(option in text for option in common for text in shown.values())
    assert "--training.eps" in shown["--help-all"]
    assert "--training.eps" not in shown["--help"]
    assert "model.mixer options" not in shown["--help"]  # none of them is common
    assert shown["--help"].endswith("Use --help-all to show all options.\n")
    shown = help_text(capsys, "evaluate", "--help", "--samples", "x")
    assert "CHECKPOINT" in shown
    assert "--import" not in shown


@pytest.mark.slow
def test_every_common_option_exists(capsys):
    recipes = ("image_classifier", "digits_denoiser", "segmenter", "forecaster")
    for commands, common in (
        ([["train", recipe] for recipe in recipes], TRAIN_COMMON),
        ([["evaluate"]], EVALUATE_COMMON),
    ):
        text = "".join(help_text(capsys, *command, "--help-all") for command in commands)
        flags = {flag.rpartition(".")[2] for flag in re.findall(r"--([a-z][\w.-]+)", text)}
        assert {name.replace("_", "-") for name in common} <= flags


@pytest.mark.sampled
@pytest.mark.parametrize("columns", [80, 160])
def test_descriptions_are_wrapped_at_the_width_of_the_terminal(columns, monkeypatch):
    """And not where docstrings have line breaks; at 160, tyro shows two columns of boxes."""
    monkeypatch.setenv("COLUMNS", str(columns))
    console = poor_console(monkeypatch, "utf-8")
    with pytest.raises(SystemExit):
        main(["evaluate", "--help-all"] if columns == 80 else ["train", "digits", "--help-all"])
    shown = console("stdout")
    boxes = [line for line in shown.splitlines() if line[:1] in set("╭│╰")]
    assert {len(line) for line in boxes} == {columns}
    if columns == 80:
        words = " ".join(re.sub("[│╭╰╮╯─]", "", shown).split())
        end = "also a diffusers pipeline, or images in an .npz file or a folder. (required)"
        assert end in words
        assert not re.search(r"only by +│", shown)  # where the docstring has a line break
        assert "(default: auto)" in words
        assert "by default the run's test text. --" in words  # without (default: None)
        assert "model's. (default: )" not in words


def test_control_characters_are_escaped_in_help_and_errors(capsys):
    @dataclasses.dataclass(frozen=True)
    class Options:
        path: str = "\x1b[2J"
        """A path."""

    for argv in (["--help"], ["--path", "a", "\x1b[2J"], ["--pth", "\x1b[2J"]):
        with pytest.raises(SystemExit):
            parse(Options, main, argv, description="A \x1b[2J description.", prog="\x1b[2J")
        shown = "".join(capsys.readouterr())
        assert "\x1b" not in shown
        assert "\\x1b[2J" in shown


def test_errors_of_configs_are_raised_as_they_are():
    @dataclasses.dataclass(frozen=True)
    class Part:
        width: int = 1

        def __post_init__(self):
            raise ValueError(f"part.width is {self.width}")

    @dataclasses.dataclass(frozen=True)
    class Options:
        part: Part

    with pytest.raises(ValueError, match=r"^part.width is 2$") as failure:
        parse(Options, main, ["--part.width", "2"])
    assert failure.traceback[-1].name == "__post_init__"


@pytest.mark.slow
def test_help_of_a_recipe_describes_it_and_the_settings_that_it_infers(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    texts = {
        recipe: help_text(capsys, "train", recipe, "--help")
        for recipe in ("image_classifier", "digits")
    }
    shown = {recipe: text.partition("usage:")[0] for recipe, text in texts.items()}
    assert "FOLDER contains CLASS/IMAGE" in shown["image_classifier"]
    assert ".npy files" in shown["image_classifier"]
    paragraph = shown["image_classifier"].split("\n\n")[2].splitlines()
    assert max(map(len, paragraph)) <= 80
    assert min(map(len, paragraph[:-1])) > 65
    options = " ".join(texts["image_classifier"].replace("│", " ").split())
    assert "Features per token. (default: inferred from the data)" in options
    assert "Random seed for initial weights" in options
    assert "(default: 224 224)" not in options
    assert shown["digits"].startswith("LightNet on scikit-learn's 1,797 handwritten digits")
    assert "inferred" not in texts["digits"]


# Lists


@pytest.mark.parametrize(
    ("word", "headings"), [("ldn_", {"Image", "Masked"}), ("lightnet_s", {"Image", "without_tpe"})]
)
def test_models_are_listed_beside_the_papers_numbers(word, headings, capsys):
    """For a part of the presets; tests/project/test_papers.py has the whole list."""
    assert main(["models", word, "--ablations"]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    shown = {row.split()[0]: row for row in rows if row}
    listed = {name for name in PRESETS if word in name}
    assert shown.keys() & PRESETS.keys() == listed
    assert headings <= shown.keys()
    for name in listed:
        has_both = PRESETS[name].printed_gmacs is not None
        assert len(shown[name]) == (len(heading) if has_both else heading.index("GMACs") + 5)
    if word == "ldn_":
        expected = "51,056,920 52.0M -1.81% 10.42 10.6 -1.73%"
        assert " ".join(shown["ldn_base"].split()[1:]) == expected


@pytest.mark.parametrize(
    ("argv", "first", "count"),
    [
        (["models", "DIT_S"], "Image generation", 8),
        (["recipes", "imagenet_deit"], "Image classification", 3),
        (["recipes", "recall"], "Associative recall", 10),
    ],
)
def test_lists_are_filtered_by_a_word(argv, first, count, capsys):
    assert main(argv) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert first in lines
    assert sum(argv[1].lower() in line for line in lines if line != first) == count


def test_the_name_of_a_preset_shows_its_details(capsys):
    """And not the list of all presets whose names contain it, such as lightnet_dit_s_2."""
    assert main(["models", "dit_s_2"]) == 0
    out = capsys.readouterr().out
    assert "lightnet_dit_s_2" not in out
    assert "DiT, arXiv:2212.09748, Table 4" in out
    assert "inputs of shape [1, 4, 32, 32], [1], [1]." in out
    assert main(["models", "lightnet_tiny"]) == 0
    size, parts, config = (
        text.splitlines() for text in re.split("\n\n[A-Z].*\n\n", capsys.readouterr().out)[1:]
    )
    rows = {row.split()[0]: row.split()[1:] for row in size[1:]}
    assert rows["model"] == ["6,009,832", "6.0M", "0.16%", "1.19"]
    assert rows["full_rank_gate"][:3] == ["6,157,288", "6.16M", "-0.04%"]
    assert rows.keys() == {"model", *LIGHTNET_ABLATIONS}
    counts = {row.split()[0]: int(row.split()[1].replace(",", "")) for row in parts}
    assert counts["head"] == 1000 * 193
    assert counts["blocks.mlp"] == 12 * 3 * 192 * 512
    assert sum(counts.values()) == 6_009_832
    assert {"width = 192", "  gate_rank = 64"} <= {*config}


@pytest.mark.slow
def test_the_name_of_a_recipe_shows_its_model(capsys):
    assert main(["models", "cifar100_lion_s/diagonal_decay"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "Ablation: diagonal_decay." in shown[1]
    rows = {row.split()[0]: row.split()[1:] for row in shown if row}
    model = preset("lion_s_tiny", num_classes=100, **{"mixer.decay.diagonal": True})
    assert rows["model"][0] == f"{model_size(model).parameters:,}"
    assert "diagonal_decay" not in rows  # it would change nothing
    assert "forward" in rows


def test_recipes_and_show(capsys):
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in RECIPES)
    assert main(["show", "digits/without_tpe"]) == 0
    shown = capsys.readouterr().out
    assert "Ablation: without_tpe." in shown
    assert "position = None" in shown
    assert "num_heads = " in shown


# Training and using runs


def test_training_writes_runs_and_a_report(runs, capsys):
    assert {p.name for p in runs.iterdir()} == {"seed-0", "seed-1", "report.html"}
    assert main(["train", "digits", *SMALL, "--seeds", "0", "1", "--out", str(runs)]) == 0
    shown = capsys.readouterr().out
    for text in ("test accuracy", "over 2 seeds", "already finished", str(runs / "report.html")):
        assert text in shown


@pytest.mark.slow
@pytest.mark.usefixtures("_no_report")
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # matplotlib's
def test_the_picture_of_the_readme_can_be_drawn(tmp_path, monkeypatch):
    """On a run deep enough to have a second block."""
    argv = [*SMALL, "--model.depth", "2", "--training.steps", "1", "--out", str(tmp_path / "runs")]
    assert main(["train", "digits", *argv]) == 0
    script = str(Path(__file__).parents[2] / "docs" / "pictures.py")
    picture = tmp_path / "picture.png"
    monkeypatch.setattr(sys, "argv", [script, str(tmp_path / "runs" / "seed-0"), str(picture)])
    runpy.run_path(script, run_name="__main__")
    with Image.open(picture) as drawn:
        assert drawn.width == 1000


def test_evaluate_repeats_the_evaluation_of_training(runs, capsys):
    assert main(["evaluate", str(runs / "seed-0")]) == 0
    accuracy = float(capsys.readouterr().out.split()[1].removesuffix("%")) / 100
    stored = json.loads((runs / "seed-0" / "result.json").read_text())["metrics"]["accuracy"]
    assert accuracy == pytest.approx(stored, abs=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("_no_report")
def test_a_run_is_repeated_from_its_config(runs, tmp_path, capsys, monkeypatch):
    for given in (runs / "seed-1", runs / "seed-1" / "config.json"):
        assert main(["train", "--config", str(given), "--out", str(tmp_path / "again")]) == 0
    assert_same(*(read_result(folder / "seed-1") for folder in (runs, tmp_path / "again")))
    monkeypatch.chdir(runs)
    for argv in ([], ["nowhere"], ["report.html"]):
        assert_fails(capsys, ["train", "--config", *argv], "expected a run's config.json")


@pytest.mark.slow
@pytest.mark.usefixtures("_no_report")
def test_runs_are_compared(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config", str(runs / "seed-0"), "--model.width", "24"]) == 0
    capsys.readouterr()
    assert main(["compare", str(runs), "runs/digits/seed-0", "--out", "page.html"]) == 0
    shown = capsys.readouterr().out
    assert "accuracy" in shown
    assert "width 24" in shown
    assert Path("page.html").stat().st_size > 10_000
    assert_fails(capsys, ["compare", "nowhere"], "nowhere")


def test_predict_names_classes(runs, tmp_path, capsys):
    paths = [tmp_path / "gray.png", tmp_path / "color.jpg"]
    Image.new("L", (8, 8), 255).save(paths[0])
    Image.new("RGB", (40, 30), "red").save(paths[1])
    assert main(["predict", str(runs / "seed-0"), *map(str, paths), "--top-k", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [str(path) for path in paths]
    assert all(line.count("%") == 2 for line in lines)


@pytest.mark.slow
def test_a_folder_with_one_run_is_that_run(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("L", (8, 8), 255).save("a.png")
    shutil.copytree(runs / "seed-0", "one/seed-0")
    assert onescan.load("one").folder == Path("one/seed-0")
    assert main(["predict", "one", "a.png"]) == 0
    assert main(["evaluate", "one"]) == 0
    assert main(["convert", "one", "--to", "transformers", "--out", "theirs"]) == 0
    assert_fails(capsys, ["convert", "one", "--out", "native"], "source is 'one', which is a run")
    more = ["--init-from", "one", "--out", "more"]
    assert main(["train", "--config", "one", *more]) == 0
    assert_fails(capsys, ["predict", runs, "a.png"], "name one of the runs in it: seed-0, seed-1")


def test_invalid_checkpoints_and_images_are_rejected(runs, tmp_path, capsys):
    text = tmp_path / "text.png"
    text.write_text("no image")
    run = runs / "seed-0"
    assert_fails(capsys, ["evaluate", tmp_path / "none"], f"{tmp_path / 'none'}")
    assert_fails(capsys, ["evaluate", tmp_path], "no run")
    assert_fails(capsys, ["predict", run], "inputs is empty")
    assert_fails(capsys, ["predict", run, tmp_path / "no.png"], "no.png")
    assert_fails(capsys, ["predict", run, text], "text.png is not an image")
    os.mkfifo(tmp_path / "pipe")
    assert_fails(capsys, ["predict", run, tmp_path / "pipe"], "pipe is not an image file")
    (tmp_path / "empty").mkdir()
    assert_fails(capsys, ["predict", run, tmp_path / "empty"], f"image in {tmp_path / 'empty'}")
    assert_fails(capsys, ["predict", run, tmp_path], f"there is no readable image in {tmp_path}: ")
    assert_fails(capsys, ["predict", run, text, "--top-k", "0"], "--top-k is 0")


def test_a_checkpoint_of_another_model_is_rejected(runs, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    for file in (runs / "seed-0").iterdir():
        if file.is_file():
            (run / file.name).write_bytes(file.read_bytes())
    config = run / "config.json"
    config.write_text(config.read_text().replace('"width": 16', '"width": 32'))
    assert_fails(capsys, ["evaluate", run], "model.safetensors")


# Files of a user


RECIPE = "from onescan.experiments.recipes.digits import digits\nimport dataclasses\n"


def test_a_recipe_in_a_file(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(f'{RECIPE}def small():\n    """Mine."""\n    return digits()\n')
    assert main(["show", f"{file}:small"]) == 0
    assert "Mine." in capsys.readouterr().out
    assert_fails(capsys, ["show", f"{file}:smal"], "'smal' is unknown (perhaps you meant 'small')")
    assert_fails(capsys, ["show", f"{tmp_path}/none.py:small"], "none.py")
    assert_fails(capsys, ["show", f"{file}:nothing"], "'nothing' is unknown; available: small")
    file.write_text("from onescan.configs import replace")
    assert_fails(capsys, ["show", f"{file}:small"], "'small' is unknown; available: none")
    assert_fails(capsys, ["train", "a/mine.py"], "expected a function in it: a/mine.py:NAME")


def test_a_recipe_imports_modules_beside_its_file(tmp_path, capsys, monkeypatch):
    (tmp_path / "beside_at_import.py").write_text("WIDTH = 48\n")
    (tmp_path / "beside_in_call.py").write_text("NAME = 'from beside'\n")
    (tmp_path / "mine.py").write_text(
        f"{RECIPE}from beside_at_import import WIDTH\n\n\ndef small():\n"
        "    from beside_in_call import NAME\n\n"
        "    run = digits()\n"
        "    model = dataclasses.replace(run.model, width=WIDTH)\n"
        "    return dataclasses.replace(run, name=NAME, model=model)\n"
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    before = list(sys.path)
    assert main(["show", "../mine.py:small"]) == 0
    assert sys.path == before
    shown = capsys.readouterr().out
    assert "from beside" in shown
    assert "48" in shown


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def small(:", "mine.py cannot be imported: SyntaxError: "),
        (b"x = '\xff'", "mine.py cannot be imported: SyntaxError: (unicode error) 'utf-8'"),
        ("raise RuntimeError('no\\nluck')", "mine.py cannot be imported: RuntimeError: no"),
        ("import sys; sys.exit()", "mine.py cannot be imported: SystemExit"),
        ("import torhc", "mine.py cannot be imported: ModuleNotFoundError: No module named"),
        ("def small(): return {}['a']", "mine.py:small fails: KeyError: 'a'"),
        ("def small(): raise SystemExit(3)", "mine.py:small fails: SystemExit: 3"),
        ("def small(width): ...", "mine.py:small takes arguments"),
        ("def small(): ...", "mine.py:small returned a NoneType, expected a RunConfig"),
        *(
            (
                f"{RECIPE}def small(): return dataclasses.replace(digits(), name={name!r})",
                repr(name),
            )
            for name in ("../../evil", "/dev/null/evil", "")
        ),
    ],
)
def test_errors_of_a_users_recipe_name_it(code, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_bytes(code if isinstance(code, bytes) else code.encode())
    assert_fails(capsys, ["train", "mine.py:small", *SMALL], message)
    assert [path.name for path in tmp_path.rglob("*.*") if path.suffix != ".pyc"] == ["mine.py"]


def test_traceback_shows_where_a_recipe_fails(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def small():\n    return 1 / 0\n")
    with pytest.raises(ValueError, match=r"mine\.py:small fails") as failure:
        main(["show", f"{file}:small", "--traceback"])
    assert isinstance(failure.value.__cause__, ZeroDivisionError)


def test_errors_of_a_users_mixer_are_raised(tmp_path):
    file = tmp_path / "mine.py"
    (tmp_path / "mixers.py").write_text(
        "from dataclasses import dataclass\n\n"
        "from onescan.layers.mixers import LightNetMixerConfig\n\n\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class WrongConfig(LightNetMixerConfig):\n"
        "    def build(self, *, width, axes):\n"
        "        raise ValueError('of the user')\n"
    )
    file.write_text(
        f"{RECIPE}from mixers import WrongConfig\n\n\ndef small():\n"
        "    run = digits()\n"
        "    model = dataclasses.replace(run.model, mixer=WrongConfig())\n"
        "    return dataclasses.replace(run, model=model)\n"
    )
    with pytest.raises(ValueError, match="of the user"):
        main(["train", f"{file}:small", "--out", str(tmp_path / "out")])


def test_errors_of_python_in_the_package_are_raised(monkeypatch):
    monkeypatch.setitem(COMMANDS, "models", lambda _: duration(math.nan))
    with pytest.raises(ValueError, match="cannot convert float NaN to integer"):
        main(["models"])


@pytest.mark.slow
def test_classes_of_a_user_are_imported_with_a_flag(tmp_path):
    """Each command in its own process, because a class stays defined."""
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass, replace\n"
        "from onescan.layers.mixers import LightNetMixerConfig\n"
        "from onescan.experiments.recipes.digits import digits\n\n\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class MineConfig(LightNetMixerConfig):\n"
        "    extra: int = 1\n\n\n"
        "def small():\n"
        "    run = digits()\n"
        "    mixer = MineConfig(num_heads=2, gate_rank=4)\n"
        "    return replace(run, model=replace(run.model, mixer=mixer, depth=1, width=16))\n"
    )
    Image.new("L", (8, 8), 255).save(tmp_path / "a.png")

    def onescan(*argv):
        done = subprocess.run(
            [sys.executable, "-m", "onescan", *argv],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        return done.returncode, done.stderr

    assert onescan("train", "mine.py:small", "--training.steps", "2", "--out", "out")[0] == 0
    code, error = onescan("evaluate", "out/seed-0")
    assert code == 2
    assert "'MineConfig' is not an imported class" in error
    assert "--import FILE.py" in error
    assert onescan("evaluate", "--import", "mine.py", "out/seed-0")[0] == 0
    assert onescan("predict", "out/seed-0", "a.png", "--import", "mine.py")[0] == 0


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "digits", "--training.steps", "2", "--import", "none.py"],
        ["train", "digits", "--import", "none.py", "--model.mixer", "x"],
        ["train", "--import=none.py", "digits"],
        ["train", "--config", "zoo/digits_lightnet", "--out", "a", "--import", "none.py"],
        ["evaluate", "a"],
        ["compare", "a"],
        ["predict", "a", "b.png"],
        ["embed", "b.png", "--model", "a", "--out", "c.npz"],
        ["sample", "a"],
        ["generate", "a"],
        ["fill", "a", "b [MASK]"],
        ["glue", "a"],
        ["needle", "a"],
        ["convert", "a", "--out", "b"],
    ],
    ids=" ".join,
)
def test_every_command_that_loads_a_run_imports_files_first(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if not any("--import" in word for word in argv):
        argv = [*argv, "--import", "none.py"]
    assert_fails(capsys, argv, "onescan: error: there is no file none.py")


def test_import_needs_a_file(capsys):
    message = "onescan: error: --import has no value, expected a Python file"
    assert_fails(capsys, ["train", "digits", "--import"], message)
    assert_fails(capsys, ["train", "digits", "--import=", "--out", "a"], message)


@pytest.mark.parametrize("file", ["none.py", "."])
def test_a_file_that_cannot_be_imported(file, runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert_fails(capsys, ["evaluate", runs / "seed-0", "--import", file], file)


# Mistakes


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_report_of_others_is_rejected_before_training(kind, tmp_path, capsys):
    report = tmp_path / "report.html"
    report.write_text("mine") if kind == "file" else report.mkdir()
    assert_fails(capsys, ["train", "digits", *SMALL, "--out", tmp_path], str(report))
    assert list(tmp_path.iterdir()) == [report]


@pytest.mark.slow
def test_another_run_in_the_folder_is_not_overwritten(runs, capsys):
    argv = ["train", "digits", *SMALL, "--training.batch-size", "16", "--out", runs]
    before = (runs / "seed-0" / "model.safetensors").read_bytes()
    assert_fails(capsys, argv, "training.batch-size is 32 in the folder and 16 in this run")
    assert_fails(capsys, argv, "choose another folder, or pass --overwrite to remove the run in it")
    assert (runs / "seed-0" / "model.safetensors").read_bytes() == before


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["show", "digits", "foo"], "'digits foo'"),
        (["recipes", "nothing"], "'nothing'"),
        (["models", "nothing"], "'nothing'"),
        (["models", "lightnte_tiny"], "perhaps you meant 'lightnet_tiny'"),
        (["trian"], "command 'trian' is unknown (perhaps you meant 'train')"),
        (["bench"], "command 'bench' is unknown"),
        (["train", "digit"], "recipe 'digit' is unknown (perhaps you meant 'digits"),
        (["train", "digits/without_tp"], "perhaps you meant 'without_tpe'"),
        (["train", "digits/without_hippo"], "ablation 'without_hippo' does not fit"),
        (["show", "x"], "recipe 'x' is unknown; `onescan recipes` lists all recipes"),
        (["train"], "RECIPE is missing usage: onescan train RECIPE"),
        (["evaluate"], "CHECKPOINT"),
        (
            ["train", "wikitext2_mlm_ldn", "--task.supervised-blocks", "9"],
            "--task.supervised-blocks is 9, expected 1 to 8, the depth of the model",
        ),
        (["generate", "x", "--top-p", "2"], "--top-p is 2.0, expected"),
        (["evaluate", "zoo/digits_lightnet", "--samples", "9"], "--samples is 9, expected"),
        (
            ["evaluate", "zoo/digits_lightnet", "--samples", "99"],
            "features is '', expected",
        ),
    ],
)
def test_mistakes_are_reported_in_one_line(argv, message, capsys):
    assert_fails(capsys, argv, message)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--out", ""], "--out is empty"),
        (["--seeds"], "--seeds is empty"),
        (["--seeds", "1", "1"], "--seeds contains 1 more than once"),
        (["--seeds", "0", "-1"], "--seeds is -1, expected 0 to"),
        (["--seeds", "9" * 30], "--seeds is 999"),
        (
            ["--training.batch-size", "9999"],
            "--training.batch-size is 9999, but there are 1,437 training images: pass a smaller "
            "one, such as --training.batch-size 64",
        ),
        (["--training.batch-size", "0"], "--training.batch-size is 0"),
        (["--training.batch_size", "0"], "--training.batch-size is 0"),
        (["--training.learning-rate", "nan"], "--training.learning-rate is nan"),
        (["--data.test-fraction=2"], "--data.test-fraction is 2.0"),
        (["--model.patch-size", "0", "3"], "patch"),
        (["--model.mixer.num-heads", "7"], "--model.mixer.num-heads 7"),
        (["--model.width", "0"], "--model.width is 0, expected"),
        (["--model.num-classes", "3"], "model.num_classes"),
        (
            ["--model.width", "32", "--model.mixer.num-heads", "6"],
            "--model.width 32 is not a multiple of --model.mixer.num-heads 6",
        ),
        (["--model.image-size", "9"], "expected 1, as in --model.image-size (9,)"),
        (
            ["--model.mixer", "softmax", "--model.mixer.decay-logits", "offset"],
            "--model.mixer.decay-logits is 'offset', but the model's mixer has no such setting; "
            "mixers that have it: lightnet",
        ),
        (["--training.steps", "ten"], "--training.steps: got 'ten', expected None or INT"),
        (["--model.channels", "3"], "1 channels"),
        (["--model.widht", "64"], "--model.width"),
        (["--model.width", "wide"], "wide"),
        (["--training.schedule", "cosin"], "cosin"),
    ],
)
def test_mistakes_are_reported_before_training(argv, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert_fails(capsys, ["train", "digits", *argv], message)
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", ["image_classifier", "wikitext2_mlm_lightnet"])
def test_a_hub_name_without_a_network_fails_at_once(recipe, tmp_path, monkeypatch, capsys):
    pytest.importorskip("datasets")

    def unknown(*_):
        raise socket.gaierror("Name or service not known")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.getaddrinfo", unknown)
    monkeypatch.setattr("onescan.checkpoint.hub.getproxies", dict)
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("waits for another try"))
    assert_fails(capsys, ["train", recipe, "--data.path", "owner/name"], "no connection")


@pytest.mark.sampled
@pytest.mark.parametrize("path", ["nothing.txt", "nothing/here/at/all"])
def test_a_mistyped_path_of_text_is_named(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = ["train", "wikitext2_mlm_lightnet", "--data.path", path]
    assert_fails(capsys, argv, f"--data.path is '{path}': there is no such file or folder")


@pytest.mark.slow
@pytest.mark.parametrize("wraps", [ImportError, SystemError, None])
def test_interrupts_say_how_to_resume_if_there_is_a_run(wraps, tmp_path, monkeypatch, capsys):
    def interrupted(run, folder, **_):
        if (tmp_path / "begun") in folder.parents:
            folder.mkdir(parents=True)
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as interrupt:
            if wraps is None:
                raise
            raise wraps("initialization failed") from interrupt  # as imports of C extensions do

    monkeypatch.setattr("onescan.experiments.training.train", interrupted)
    for name in ("early", "begun"):
        assert main(["train", "digits", "--out", str(tmp_path / name)]) == 130
        resume = "; run the same command again to resume" * (name == "begun" and wraps is None)
        assert capsys.readouterr().err == f"onescan: interrupted{resume}\n"


def test_missing_memory_is_reported_in_one_line(monkeypatch, capsys):
    def fails(_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")

    monkeypatch.setitem(COMMANDS, "recipes", fails)
    assert_fails(capsys, ["recipes"], "not enough memory: DefaultCPUAllocator: can't allocate")


def test_the_console_command_and_the_module_are_one():
    for command in ([sys.executable, "-m", "onescan"], [Path(sys.executable).parent / "onescan"]):
        done = subprocess.run([*command, "trian"], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith("onescan: error: command 'trian' is unknown")


# Recipes


@pytest.mark.parametrize(
    ("name", "ablations"),
    [
        *((name, LIGHTNET_ABLATIONS) for name in RECIPES if "lightnet" in name),
        *((name, LDN_ABLATIONS) for name in RECIPES if "ldn" in name),
    ],
)
def test_every_ablation_of_the_papers_is_a_recipe(name, ablations):
    run = find_recipe(name)()
    for ablation, changes in ablations.items():
        variant = find_recipe(f"{name}/{ablation}")()
        assert variant.name == f"{name}/{ablation}"
        assert [path for path, *_ in differences(run, variant) if path != "name"] == [
            f"model.{path}" for path in changes
        ]


NO_MAP, NO_POSITIONS = {"mixer.feature_map": "identity"}, {"position": None}
MAP, POSITIONS = {"mixer.feature_map": "shifted_silu"}, {"position": AbsolutePositionConfig()}
CIFAR100_ROWS = {  # LION, Tables 13, 14 and 16: recipe -> preset, and what differs from it
    "cifar100_lion_s/fixed_decay": ("lion_d_tiny", {}),
    "cifar100_lion_s/diagonal_decay": ("lion_s_tiny", {"mixer.decay.diagonal": True}),
    "cifar100_lion_s": ("lion_s_tiny", {}),
    "cifar100_vit/with_feature_map": ("deit_tiny", {**POSITIONS, **MAP}),
    "cifar100_vit": ("deit_tiny", {**POSITIONS, **NO_MAP}),
    "cifar100_vit/with_feature_map/without_positions": ("deit_tiny", {**MAP, **NO_POSITIONS}),
    "cifar100_vit/without_positions": ("deit_tiny", NO_POSITIONS),
    "cifar100_lion_lit": ("lion_lit_tiny", {**POSITIONS, **MAP}),
    "cifar100_lion_lit/without_feature_map": ("lion_lit_tiny", NO_MAP),
    "cifar100_lion_lit/without_positions": ("lion_lit_tiny", NO_POSITIONS),
    "cifar100_lion_lit/without_feature_map/without_positions": (
        *("lion_lit_tiny", {**NO_MAP, **NO_POSITIONS}),
    ),
    **{
        f"cifar100_lion_s/{direction}": ("lion_s_tiny", {"mixer.direction": direction})
        for direction in ("forward", "backward", "alternating")
    },
    **{
        f"cifar100_lion_s_natural/{direction}": (
            *("lion_s_natural_tiny", {"mixer.direction": direction}),
        )
        for direction in ("forward", "backward")
    },
    "cifar100_lion_s_natural": ("lion_s_natural_tiny", {"mixer.scan": "natural"}),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CIFAR100_ROWS)
def test_every_row_of_lion_on_cifar100_is_a_recipe(name):
    base, changes = CIFAR100_ROWS[name]
    run = find_recipe(name)()
    assert run.name == name
    assert run.model == preset(base, num_classes=100, **changes)
    assert (run.model.image_size, run.data.image_size) == ((224, 224), (224, 224))
    assert 5.4e6 < model_size(run.model).parameters < 6.2e6  # ViT-T's size


def test_a_distilled_lion_differs_from_lion_in_its_token_and_its_teacher():
    changed = differences(
        RECIPES["imagenet_lion_s_tiny"](), RECIPES["imagenet_lion_s_tiny_distilled"]()
    )
    assert {path: new for path, _, new in changed} == {
        "name": "imagenet_lion_s_tiny_distilled",
        "model.distillation_token": True,
        "task.teacher": "timm/regnety_160.deit_in1k",
    }


def test_recipes_on_openwebtext_differ_only_in_their_attention():
    names = [f"openwebtext_{name}" for name in ("gpt2", "linear_attention", "lion_s")]
    gpt2, linear, selective = (RECIPES[name]() for name in names)
    changed = [path for path, *_ in differences(gpt2, linear)]
    assert changed == ["name", "model.mixer.type"]
    changed = [path for path, *_ in differences(linear, selective)]
    assert changed == [
        "name",
        "model.mixer.feature_map",
        "model.mixer.decay.type",
        "model.position",
    ]


def test_recipes_on_cifar10_have_equal_sizes():
    names = [name for name in RECIPES if name.startswith("cifar10_") and "denoiser" not in name]
    sizes = {name: model_size(RECIPES[name]().model) for name in names}
    ldn, vit = sizes.pop("cifar10_ldn"), sizes.pop("cifar10_vit")
    assert vit.parameters == pytest.approx(ldn.parameters, rel=0.01)
    assert vit.macs == pytest.approx(ldn.macs, rel=0.04)
    lightnet = sizes["cifar10_lightnet"]
    assert len(sizes) == len(LION_KINDS) + 4
    for size in sizes.values():
        assert size.parameters == pytest.approx(lightnet.parameters, rel=0.02)
    assert sizes["cifar10_deit"].macs == pytest.approx(lightnet.macs, rel=0.02)
    denoisers = [
        model_size(RECIPES[f"cifar10_denoiser_{name}"]().model).parameters
        for name in ("lightnet", "dit")
    ]
    assert denoisers[0] == pytest.approx(denoisers[1], rel=0.01)


LION_KINDS = ("lit", "d", "s", "d_natural", "s_natural")
PRESET_NAMES = [f"lion_{kind}_{size}" for kind in LION_KINDS for size in ("tiny", "small", "base")]
PRESET_NAMES += [f"{kind}_{size}" for kind in ("vit", "ldn") for size in ("base", "large", "huge")]


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_imagenet_recipes_train_the_presets(name):
    run = find_recipe(f"imagenet_{name}")()
    assert run.model == preset(name)
    assert run.name == f"imagenet_{name}"
    assert run.training.ema_decay == (0.99996 if "lion" in name else None)
    assert run.training.reported_weights == ("raw" if "lion" in name else "ema")


def test_recipes_of_one_comparison_differ_only_in_their_blocks():
    changed = differences(RECIPES["cifar10_ldn"](), RECIPES["cifar10_vit"]())
    assert [path for path, *_ in changed] == ["name", "model.mixer.type", "model.mlp"]
    for kind in LION_KINDS:
        small, large = RECIPES[f"cifar10_lion_{kind}"]().model, preset(f"lion_{kind}_tiny")
        assert (small.mixer, small.position) == (large.mixer, large.position)


def test_recipes_on_shakespeare_have_equal_sizes():
    names = ("lion_s", "gated_deltanet", "kda")
    sizes = [model_size(RECIPES[f"shakespeare_{name}"]().model).parameters for name in names]
    assert max(sizes) < 1.02 * min(sizes)


def test_recipes_state_their_name_and_command():
    for name, recipe in RECIPES.items():
        assert recipe.name == name == recipe().name
        assert f"onescan train {name}" in recipe.description
