"""The Long Range Arena's recipes: their settings, and a run from the command line."""

from dataclasses import replace

import pytest
from tiny_run import KilledError, assert_same, raise_at

from onescan import configs
from onescan.cli import main
from onescan.configs import differences
from onescan.experiments.recipes import find_recipe
from onescan.experiments.recipes.long_range import PROBLEMS
from onescan.experiments.recipes.long_range import RECIPES as LONG_RANGE
from onescan.experiments.training import train
from onescan.experiments.training.folder import read_result
from onescan.inputs.sequences import PixelFormat
from onescan.layers.decays import HippoDecayConfig, NoDecayConfig
from onescan.layers.position import TokenPositionConfig
from onescan.models.presets import LONG_RANGE_ABLATIONS

KINDS = {
    "lit": NoDecayConfig(),
    "d": HippoDecayConfig(selective=False),
    "s": HippoDecayConfig(),
}
# width, depth, batch size, epochs, weight decay, dropout and warm-up epochs of S5's scripts
S5 = {
    "listops": (128, 8, 50, 40, 0.04, 0.0, 1),
    "pixels": (512, 6, 50, 250, 0.07, 0.1, 1),
    "pathfinder": (192, 6, 64, 200, 0.03, 0.05, 1),
    "pathx": (128, 6, 32, 75, 0.06, 0.0, 1),
    "imdb": (256, 6, 50, 35, 0.07, 0.1, 0),
    "aan": (128, 6, 32, 20, 0.05, 0.0, 1),
}
LENGTHS = {"pixels": 32 * 32, "pathfinder": 32 * 32, "pathx": 128**2, "imdb": 4096, "aan": 8001}
TINY = {
    "model.width": 8,
    "model.depth": 1,
    "data.expressions.min_length": 4,
    "data.expressions.max_length": 20,
    "data.expressions.max_depth": 3,
    "data.train_examples": 40,
    "data.test_examples": 24,
    "training.steps": 12,
    "training.batch_size": 8,
    "training.evaluate_every": 1.0,
    "training.checkpoint_every": 0.5,
    "machine.trackers": (),
    "machine.workers": 0,
}


@pytest.mark.parametrize("problem", S5)
def test_recipes_have_the_settings_of_the_paper(problem):
    width, depth, batch, epochs, weight_decay, dropout, warmup = S5[problem]
    for kind, decay in KINDS.items():
        run = LONG_RANGE[f"{problem}_lion_{kind}"]()
        model, training = run.model, run.training
        assert (model.width, model.depth, model.dropout) == (width, depth, dropout)
        assert (training.batch_size, training.epochs) == (batch, epochs)
        assert (training.learning_rate, training.schedule) == (5e-4, "cosine")
        assert training.weight_decay == weight_decay
        assert round(training.warmup * epochs) == warmup
        if isinstance(decay, HippoDecayConfig):
            decay = replace(decay, min_step=0.0001 if problem == "pathx" else 0.001)
        assert model.mixer.decay == decay


def test_only_lit_has_positions_for_every_token():
    for problem, settings in PROBLEMS.items():
        run, *others = (LONG_RANGE[f"{problem}_lion_{kind}"]() for kind in KINDS)
        expected = run.model.position if settings.all_have_positions else None
        assert all(other.model.position == expected for other in others)
        longest = LENGTHS.get(problem) or run.data.expressions.max_length
        assert isinstance(run.model.position, TokenPositionConfig)
        assert longest <= run.model.position.max_tokens <= longest + 1


def test_the_small_recipes_differ_only_in_their_decays():
    lit, d, s = (LONG_RANGE[f"listops_small_lion_{kind}"]() for kind in KINDS)
    for other in (d, s):
        different = [path for path, *_ in differences(lit, other)]
        assert different == ["name", "model.mixer.decay.type"]


@pytest.mark.parametrize("problem", ["listops", "listops_small", "pathfinder", "pathx"])
def test_models_match_their_generated_data(problem):
    run = LONG_RANGE[f"{problem}_lion_s"]()
    data = run.data.build()
    assert run.model.vocab_size == data.format.vocab_size
    assert run.model.num_classes == len(data.class_names)
    assert (len(data.train), len(data.test)) == (run.data.train_examples, run.data.test_examples)
    tokens = data.train.example(0).tokens
    assert len(tokens) <= LONG_RANGE[f"{problem}_lion_lit"]().model.position.max_tokens
    if isinstance(data.format, PixelFormat):
        assert len(tokens) == LENGTHS[problem]


@pytest.mark.parametrize("row", LONG_RANGE_ABLATIONS)
def test_every_ablation_is_a_recipe(row):
    whole = find_recipe("listops_lion_s")()
    variant = find_recipe(f"listops_lion_s/{row}")()
    different = {path.removesuffix(".type") for path, *_ in differences(whole, variant)}
    assert different == {"name", *(f"model.{path}" for path in LONG_RANGE_ABLATIONS[row])}
    configs.replace(variant, TINY).model.build()


def tiny(name="listops_small_lion_s", **changes):
    return configs.replace(find_recipe(name)(), TINY | changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run."""
    return train(tiny(), tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.slow
def test_a_run_stopped_within_an_epoch_resumes_exactly(tmp_path, whole):
    with pytest.raises(KilledError):
        train(tiny(), tmp_path / "run", progress=raise_at(8, KilledError()))
    assert [path.name for path in (tmp_path / "run/state").iterdir()] == ["step_6"]  # 5 an epoch
    result = train(tiny(), tmp_path / "run")
    assert not result.reused
    assert_same(result, whole)
    assert whole.metrics["loss"] < 3.0


@pytest.mark.slow
def test_workers_do_not_change_results(tmp_path, whole):
    assert_same(train(tiny(**{"machine.workers": 2}), tmp_path / "run"), whole)


def test_a_recipe_is_trained_and_evaluated_from_the_command_line(tmp_path, capsys):
    argv = ["train", "listops_small_lion_d", "--out", str(tmp_path)]
    for name, value in (TINY | {"training.steps": 3}).items():
        argv += ["--" + name.replace("_", "-"), *([] if value == () else [str(value)])]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    result = read_result(tmp_path / "seed-0")
    assert f"test accuracy {result.metrics['accuracy']:.1%}" in shown
    assert (tmp_path / "report.html").is_file()
    assert main(["evaluate", str(tmp_path / "seed-0"), "--workers", "0"]) == 0
    assert f"{result.metrics['loss']:#.4g}" in capsys.readouterr().out
