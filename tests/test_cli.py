"""The command line as a person uses it: what it prints, what it leaves, how it fails."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from onescan.cli import COMMANDS, main
from onescan.models.presets import PRESETS
from onescan.recipes import RECIPES, find_recipe

SMALL = ["--training.steps", "3", "--model.depth", "1", "--model.width", "16"]
SMALL += ["--model.mixer.num-heads", "2", "--model.mixer.gate-rank", "4"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of a very short run, trained through the command line."""
    out = tmp_path_factory.mktemp("cli") / "digits"
    assert main(["train", "digits", *SMALL, "--seeds", "0", "1", "--out", str(out)]) == 0
    return out


def fails(capsys, words, message, code=2):
    assert main([str(word) for word in words]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err + captured.out


def exits(capsys, words, message):
    """What tyro refuses, it refuses by leaving."""
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code != 0
    captured = capsys.readouterr()
    assert message in " ".join((captured.err + captured.out).split())


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    assert main([]) == 2
    assert main(["--version"]) == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with contextlib.suppress(SystemExit):
        assert main([command, "--help"]) == 0
    assert "usage: onescan" in capsys.readouterr().out


def test_models_prints_every_preset_beside_the_paper(capsys):
    assert main(["models", "--ablations"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in PRESETS)
    assert "6,009,832" in shown
    assert "22.64M" in shown
    assert "93,635,560" in shown


def test_recipes_and_show(capsys):
    assert main(["recipes"]) == 0
    assert all(name in capsys.readouterr().out for name in RECIPES)
    assert main(["show", "digits/without_tpe"]) == 0
    shown = capsys.readouterr().out
    assert "position = None" in shown
    assert "num_heads = " in shown


def test_training_leaves_runs_and_a_report(runs, capsys):
    assert {p.name for p in runs.iterdir()} == {"seed-0", "seed-1", "report.html"}
    assert main(["train", "digits", *SMALL, "--seeds", "0", "1", "--out", str(runs)]) == 0
    shown = capsys.readouterr().out
    assert "test accuracy" in shown
    assert "over 2 seeds" in shown
    assert "finished before" in shown
    assert str(runs / "report.html") in shown


def test_evaluate_repeats_what_training_found(runs, capsys):
    assert main(["evaluate", str(runs / "seed-0")]) == 0
    accuracy = float(capsys.readouterr().out.split()[1])
    stored = json.loads((runs / "seed-0" / "result.json").read_text())["metrics"]["accuracy"]
    assert accuracy == pytest.approx(stored, abs=1e-4)


def test_predict_names_classes(runs, tmp_path, capsys):
    paths = [tmp_path / "grey.png", tmp_path / "colour.jpg"]
    Image.new("L", (8, 8), 255).save(paths[0])
    Image.new("RGB", (40, 30), "red").save(paths[1])
    assert main(["predict", str(runs / "seed-0"), *map(str, paths), "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [str(path) for path in paths]
    assert all(line.count("%") == 2 for line in lines)


def test_a_recipe_in_a_file_of_ones_own(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "from onescan.recipes.digits import digits\n\n\n"
        'def small():\n    """Mine."""\n    return digits()\n'
    )
    assert main(["show", f"{file}:small"]) == 0
    assert "Mine." in capsys.readouterr().out
    fails(capsys, ["show", f"{file}:smal"], "'smal' is unknown (perhaps you meant 'small')")
    fails(capsys, ["show", f"{tmp_path}/none.py:small"], "there is no file")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "command 'trian' is unknown (perhaps you meant 'train')"),
        (["train", "digit"], "recipe 'digit' is unknown (perhaps you meant 'digits')"),
        (["train", "digits/without_tp"], "perhaps you meant 'without_tpe'"),
        (["show", "x"], "recipe 'x' is unknown; there are: digits"),
        (["train", "digits", "--training.batch-size", "9999"], "there are 1437 images"),
        (["train", "digits", "--model.patch-size", "3", "3"], "8 x 8 cannot be cut into patches"),
        (["train", "digits", "--model.mixer.num-heads", "7"], "not a multiple of num_heads 7"),
        (["train", "digits", "--model.num-classes", "3"], "is model.num_classes right?"),
        (["train", "digits", "--model.channels", "3"], "1 channels"),
        (["train", "digits", "--data.test-fraction", "2"], "data.test_fraction is 2.0"),
    ],
)
def test_what_a_user_got_wrong_is_said_in_a_sentence(words, message, tmp_path, capsys):
    out = tmp_path / "out"
    fails(capsys, [*words, "--out", out] if words[1:2] == ["digits"] else words, message)
    assert not out.exists() or not list(out.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "digits", "--model.widht", "64"], "--model.width"),
        (["train", "digits", "--model.width", "wide"], "wide"),
        (["train", "digits", "--training.schedule", "cosin"], "cosin"),
        (["evaluate"], "CHECKPOINT"),
        (["train", "digits", "--training.learning-rate", "nan"], "training.learning_rate is nan"),
        (["train", "digits", "--training.batch-size", "0"], "training.batch_size is 0"),
    ],
)
def test_flags_that_cannot_be_are_explained(words, message, capsys):
    exits(capsys, words, message)


def test_what_is_no_checkpoint_or_image(runs, tmp_path, capsys):
    text = tmp_path / "text.png"
    text.write_text("no image")
    run = runs / "seed-0"
    fails(capsys, ["evaluate", tmp_path / "none"], f"there is no run at {tmp_path / 'none'}", 1)
    fails(capsys, ["evaluate", tmp_path], "holds no run")
    fails(capsys, ["predict", run], "at least one image")
    fails(capsys, ["predict", run, tmp_path / "no.png"], "there is no image file", 1)
    fails(capsys, ["predict", run, text], "text.png is not an image")
    fails(capsys, ["predict", run, text, "--top", "0"], "top is 0")


def test_a_checkpoint_of_another_model_is_refused(runs, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    for file in (runs / "seed-0").iterdir():
        if file.is_file():
            (run / file.name).write_bytes(file.read_bytes())
    config = run / "config.json"
    config.write_text(config.read_text().replace('"width": 16', '"width": 32'))
    fails(capsys, ["evaluate", run], "model.safetensors")


def test_another_run_in_the_folder_is_never_overwritten_unasked(runs, capsys):
    words = ["train", "digits", *SMALL, "--training.batch-size", "16", "--out", runs]
    before = (runs / "seed-0" / "model.safetensors").read_bytes()
    fails(capsys, words, "training.batch_size is ")
    assert (runs / "seed-0" / "model.safetensors").read_bytes() == before


def test_the_console_command_and_the_module_are_one():
    for command in ([sys.executable, "-m", "onescan"], [Path(sys.executable).parent / "onescan"]):
        done = subprocess.run([*command, "trian"], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith("onescan: error: command 'trian' is unknown")


def test_a_recipe_states_its_command():
    for name in RECIPES:
        assert f"onescan train {name}" in (find_recipe(name).__doc__ or "")
