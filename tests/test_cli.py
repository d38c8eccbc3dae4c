"""The command line as a person uses it: what it prints, what it leaves, how it fails."""

import contextlib
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from tiny_run import assert_same

from onescan.cli import COMMANDS, main
from onescan.configs import differences
from onescan.models.presets import LDN_ABLATIONS, LIGHTNET_ABLATIONS, PRESETS, preset
from onescan.models.size import model_size
from onescan.recipes import RECIPES, find_recipe
from onescan.training.folder import read_result

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
    out = capsys.readouterr().out
    assert "6,009,832" in out
    assert "22.64M" in out
    assert "93,635,560" in out
    heading, *rows = out.splitlines()
    shown = {row.split()[0]: row for row in rows}
    assert " ".join(shown["ldn_base"].split()[1:]) == "51,056,920 52.0M -1.81% 10.42 10.6 -1.73%"
    assert len(heading) <= 100
    until_gmacs = heading.index("GMACs") + len("GMACs")
    for name, known in PRESETS.items():
        has_both = known.printed_gmacs is not None
        assert len(shown[name]) == (len(heading) if has_both else until_gmacs)


def test_recipes_and_show(capsys):
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in RECIPES)
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
    assert "already finished" in shown
    assert str(runs / "report.html") in shown


@pytest.fixture
def _no_page(monkeypatch):
    monkeypatch.setattr("onescan.report.write_report", lambda *_: None)


@pytest.mark.usefixtures("_no_page")
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # matplotlib's
def test_the_picture_of_the_readme_can_be_drawn(tmp_path, monkeypatch):
    """On a run deep enough to have a second block."""
    words = [*SMALL, "--model.depth", "2", "--training.steps", "1", "--out", str(tmp_path / "runs")]
    assert main(["train", "digits", *words]) == 0
    script = Path(__file__).parents[1] / "docs" / "pictures.py"
    picture = tmp_path / "picture.png"
    words = [str(script), str(tmp_path / "runs" / "seed-0"), str(picture)]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(words[0], run_name="__main__")
    with Image.open(picture) as drawn:
        assert drawn.width == 1000


def test_evaluate_repeats_what_training_found(runs, capsys):
    assert main(["evaluate", str(runs / "seed-0")]) == 0
    accuracy = float(capsys.readouterr().out.split()[1])
    stored = json.loads((runs / "seed-0" / "result.json").read_text())["metrics"]["accuracy"]
    assert accuracy == pytest.approx(stored, abs=1e-4)


@pytest.mark.usefixtures("_no_page")
def test_a_run_is_repeated_from_its_config(runs, tmp_path, capsys):
    for given in (runs / "seed-1", runs / "seed-1" / "config.json"):
        assert main(["train", "--config", str(given), "--out", str(tmp_path / "again")]) == 0
    assert_same(*(read_result(folder / "seed-1") for folder in (runs, tmp_path / "again")))
    words = [
        "--config",
        str(runs / "seed-1"),
        "--training.steps",
        "1",
        "--out",
        str(tmp_path / "b"),
    ]
    assert main(["train", *words]) == 0
    assert read_result(tmp_path / "b" / "seed-1").steps == 1


@pytest.mark.parametrize("words", [[], ["nowhere"], ["report.html"]])
def test_what_is_no_config(words, runs, capsys, monkeypatch):
    monkeypatch.chdir(runs)
    fails(capsys, ["train", "--config", *words], "expected a run's config.json or folder")


@pytest.mark.usefixtures("_no_page")
def test_runs_are_compared(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config", str(runs / "seed-0"), "--model.width", "24"]) == 0
    capsys.readouterr()
    assert main(["compare", str(runs), "runs/digits/seed-0", "--out", "page.html"]) == 0
    shown = capsys.readouterr().out
    assert "accuracy" in shown
    assert "width 24" in shown
    assert Path("page.html").stat().st_size > 10_000
    fails(capsys, ["compare"], "expected")
    fails(capsys, ["compare", "nowhere"], "nowhere")


def test_predict_names_classes(runs, tmp_path, capsys):
    paths = [tmp_path / "grey.png", tmp_path / "colour.jpg"]
    Image.new("L", (8, 8), 255).save(paths[0])
    Image.new("RGB", (40, 30), "red").save(paths[1])
    assert main(["predict", str(runs / "seed-0"), *map(str, paths), "--top-k", "2"]) == 0
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


RECIPE = "from onescan.recipes.digits import digits\nimport dataclasses\n"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def small(:", "mine.py cannot be imported: SyntaxError: "),
        (b"x = '\xff'", "mine.py cannot be imported: SyntaxError: (unicode error) 'utf-8'"),
        ("raise RuntimeError('no\\nluck')", "mine.py cannot be imported: RuntimeError: no\n"),
        ("import sys; sys.exit()", "mine.py cannot be imported: SystemExit\n"),
        (
            "import torhc",
            "mine.py cannot be imported: ModuleNotFoundError: No module named 'torhc'",
        ),
        ("def small(): return {}['a']", "mine.py:small fails: KeyError: 'a'"),
        ("def small(): return 1 / 0", "mine.py:small fails: ZeroDivisionError: division by zero"),
        ("def small(): raise SystemExit(3)", "mine.py:small fails: SystemExit: 3"),
        ("def small(width): ...", "mine.py:small takes arguments, expected a function without"),
        ("def small(): ...", "mine.py:small returned a NoneType, expected a RunConfig"),
        *(
            (f"{RECIPE}def small(): return dataclasses.replace(digits(), name={name!r})", message)
            for name, message in {
                "../../evil": "mine.py:small fails: ValueError: the run's name is '../../evil'",
                "/dev/null/evil": "the run's name is '/dev/null/evil', expected a folder's",
                "": "the run's name is ''",
            }.items()
        ),
        (
            f"{RECIPE}def small():\n    run = digits()\n"
            "    object.__setattr__(run, 'name', 3)\n"
            "    run.__post_init__()\n",
            "the run's name is 3, expected a folder's",
        ),
    ],
)
@pytest.mark.parametrize("command", ["show", "train"])
def test_a_recipe_that_fails_is_named(command, code, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_bytes(code if isinstance(code, bytes) else code.encode())
    small = SMALL if command == "train" else []
    fails(capsys, [command, "mine.py:small", *small], message)
    assert [path.name for path in tmp_path.rglob("*.*") if path.suffix != ".pyc"] == ["mine.py"]


def test_traceback_shows_where_a_recipe_fails(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def small():\n    return 1 / 0\n")
    with pytest.raises(ValueError, match=r"mine\.py:small fails") as failure:
        main(["show", f"{file}:small", "--traceback"])
    assert isinstance(failure.value.__cause__, ZeroDivisionError)


def test_classes_of_ones_own_are_imported_when_asked(tmp_path, monkeypatch, capfd):
    """In a process of its own each time, as a class once defined stays known."""
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass, replace\n"
        "from onescan.layers.mixers import LightNetMixerConfig\n"
        "from onescan.recipes.digits import digits\n\n\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class MineConfig(LightNetMixerConfig):\n"
        "    extra: int = 1\n\n\n"
        "def small():\n"
        "    run = digits()\n"
        "    mixer = MineConfig(num_heads=2, gate_rank=4)\n"
        "    return replace(run, model=replace(run.model, mixer=mixer, depth=1, width=16))\n"
    )
    Image.new("L", (8, 8), 255).save(tmp_path / "a.png")

    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "onescan", "train", "mine.py:small", "--training.steps", "2"]
    done = subprocess.run([*command, "--out", "out"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    def onescan(*words):
        fork = multiprocessing.get_context("fork")
        process = fork.Process(target=lambda: sys.exit(main(words)))
        process.start()
        process.join()
        return process.exitcode, "".join(capfd.readouterr())

    code, said = onescan("evaluate", "out/seed-0")
    assert code == 2
    assert "'MineConfig' is not an imported class: import the file" in said
    assert "--import FILE.py" in said
    for words in (["evaluate", "--import", "mine.py", "out/seed-0"], ["predict", "out/seed-0"]):
        images = ["a.png", "--import", "mine.py"] if words[0] == "predict" else []
        code, said = onescan(*words, *images)
        assert code == 0, said


@pytest.mark.parametrize(
    ("file", "message"), [("none.py", "there is no file none.py"), (".", ". is no Python file")]
)
def test_what_cannot_be_imported(file, message, runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fails(capsys, ["evaluate", runs / "seed-0", "--import", file], message)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_report_of_others_is_refused_before_training(kind, tmp_path, capsys):
    report = tmp_path / "report.html"
    report.write_text("mine") if kind == "file" else report.mkdir()
    fails(capsys, ["train", "digits", *SMALL, "--out", tmp_path], f"{report} was not written by")
    assert list(tmp_path.iterdir()) == [report]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", ""], "out is empty"),
        (["--seeds", "1", "1"], "seeds is (1, 1), expected no duplicates"),
        (["--seeds", "0", "-1"], "training.seed is -1"),
    ],
)
def test_what_cannot_be_trained_is_refused_before(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fails(capsys, ["train", "digits", *SMALL, *words], message)
    assert not list(tmp_path.iterdir())


def test_seeds_without_any_is_the_seed_of_the_recipe(tmp_path):
    words = ["train", "digits", *SMALL, "--training.seed", "5", "--out", str(tmp_path), "--seeds"]
    assert main(words) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"seed-5", "report.html"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "digits", "foo"], "show takes one recipe, got 'digits foo"),
        (["recipes", "foo"], "recipes takes no arguments, got 'foo'"),
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
    fails(capsys, ["evaluate", tmp_path / "none"], f"there is no run at {tmp_path / 'none'}")
    fails(capsys, ["evaluate", tmp_path], "holds no run")
    fails(capsys, ["predict", run], "at least one image")
    fails(capsys, ["predict", run, tmp_path / "no.png"], "there is no image file")
    fails(capsys, ["predict", run, text], "text.png is not an image")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        fails(capsys, ["predict", run, path], f"{path} is not an image file")
    fails(capsys, ["predict", run, text, "--top-k", "0"], "top_k is 0")


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


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        *((name, LIGHTNET_ABLATIONS) for name in RECIPES if "lightnet" in name),
        *((name, LDN_ABLATIONS) for name in RECIPES if "ldn" in name),
    ],
)
def test_every_row_of_the_ablation_tables_is_a_recipe(name, rows):
    whole = find_recipe(name)()
    for row in rows:
        variant = find_recipe(f"{name}/{row}")()
        assert variant.name == f"{name}/{row}"
        assert [path for path, *_ in differences(whole, variant) if path != "name"] == [
            f"model.{path}" for path in rows[row]
        ]


def test_the_recipes_on_cifar10_are_of_one_size():
    painters = [f"cifar10_denoiser_{name}" for name in ("lightnet", "dit")]
    names = [name for name in RECIPES if name.startswith("cifar10_") and name not in painters]
    sizes = {name: model_size(RECIPES[name]().model) for name in names}
    ldn, vit = sizes.pop("cifar10_ldn"), sizes.pop("cifar10_vit")
    assert vit.parameters == pytest.approx(ldn.parameters, rel=0.01)
    assert vit.macs == pytest.approx(ldn.macs, rel=0.04)
    wanted = sizes["cifar10_lightnet"]
    assert len(sizes) == len(DECAYS_AND_SCANS) + 2
    for size in sizes.values():
        assert size.parameters == pytest.approx(wanted.parameters, rel=0.02)
    assert sizes["cifar10_deit"].macs == pytest.approx(wanted.macs, rel=0.02)
    lightnet, dit = (model_size(RECIPES[name]().model).parameters for name in painters)
    assert lightnet == pytest.approx(dit, rel=0.01)


DECAYS_AND_SCANS = ("lit", "d", "s", "d_natural", "s_natural")


@pytest.mark.parametrize("kind", DECAYS_AND_SCANS)
def test_the_recipes_of_lion_are_its_presets(kind):
    for size in ("tiny", "small", "base"):
        run = find_recipe(f"imagenet_lion_{kind}_{size}")()
        assert run.model == preset(f"lion_{kind}_{size}")
        assert run.name == f"imagenet_lion_{kind}_{size}"
        assert run.training.ema_decay == pytest.approx(0.99996)
    small, large = RECIPES[f"cifar10_lion_{kind}"]().model, preset(f"lion_{kind}_tiny")
    assert small.mixer == large.mixer
    assert small.position == large.position


@pytest.mark.parametrize("size", ["base", "large", "huge"])
def test_the_recipes_of_ldn_are_its_presets(size):
    run = find_recipe(f"imagenet_ldn_{size}")()
    assert run.model == preset(f"ldn_{size}")
    assert run.name == f"imagenet_ldn_{size}"


def test_vit_is_ldn_in_all_but_its_blocks():
    changed = differences(RECIPES["cifar10_ldn"](), RECIPES["cifar10_vit"]())
    assert [path for path, *_ in changed] == ["name", "model.mixer.type", "model.mlp"]


def test_a_recipe_states_its_command():
    for name in RECIPES:
        assert f"onescan train {name}" in (find_recipe(name).__doc__ or "")
