"""Weights in the package: their digests, loading by name, the measured accuracy, and shipping."""

import dataclasses
import re
import shutil
from pathlib import Path

import add_to_zoo
import pytest
import torch

import onescan
from onescan import zoo
from onescan.checkpoint.weights import WEIGHTS, read_weights
from onescan.cli import main
from onescan.experiments.evaluation.config import SamplesConfig
from onescan.experiments.evaluation.features import open_features
from onescan.experiments.evaluation.images import open_samples
from onescan.experiments.recipes.digits import digits
from onescan.experiments.training.evaluation import evaluate
from onescan.experiments.training.initialization import init_from
from onescan.experiments.training.runs import run_config
from onescan.experiments.training.sampling import default_sampler

DIGITS = "zoo/digits_lightnet"
MAX_BYTES = 12_000_000
WITH_DATA = (
    "digits_lightnet",
    "digits_denoiser",
    "moving_digits_lightnet",
)  # whose data comes with scikit-learn


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """A run of two steps, and the folder made from it."""
    folder, run = tmp_path_factory.mktemp("zoo"), digits()
    run = dataclasses.replace(run, training=dataclasses.replace(run.training, steps=2, warmup=0.0))
    onescan.train(run, folder / "run")
    card = add_to_zoo.add_to_zoo(
        folder / "run", "digits_lightnet", folder / "zoo" / "digits_lightnet"
    )
    return folder, card


@pytest.fixture
def model_zoo(shipped, monkeypatch, tmp_path):
    """A zoo of this one model, and an empty working directory."""
    monkeypatch.setattr(zoo, "FOLDER", shipped[0] / "zoo")
    monkeypatch.chdir(tmp_path)
    return zoo.FOLDER


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def checked_metrics(checkpoint):
    run = run_config(checkpoint.folder)
    return evaluate(checkpoint.model, run.task.build(run.data.build())).metrics


def test_all_models_together_are_small():
    files = [path for path in zoo.FOLDER.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sum(path.stat().st_size for path in files) < MAX_BYTES


@pytest.mark.parametrize("name", zoo.names())
def test_each_model_loads_in_float32_from_float16(name):
    loaded = onescan.load(f"zoo/{name}")
    assert not loaded.model.training
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.float32}
    assert sum(weight.numel() for weight in loaded.model.parameters()) == zoo.card(name).parameters
    stored, _ = read_weights(zoo.FOLDER / name / WEIGHTS)
    assert torch.float32 not in {weight.dtype for weight in stored.values()}
    assert loaded.metrics == zoo.card(name).metrics


@pytest.mark.parametrize("name", zoo.names())
def test_each_card_states_data_license_command_and_metrics(name):
    card, text = zoo.card(name), (zoo.FOLDER / name / zoo.README).read_text()
    for part in ("**Data**", "License of the weights", "onescan train", "seed", "**Limits**"):
        assert part in text
    assert f"{card.parameters:,}" in text
    assert all(f"{value:.4g}" in text for value in card.metrics.values())
    assert '": "/' not in (zoo.FOLDER / name / "config.json").read_text()  # absolute paths


@pytest.mark.parametrize("name", zoo.names())
def test_digests_match(name):
    zoo.check(zoo.FOLDER / name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("file", ["config.json", WEIGHTS, zoo.README, zoo.CARD])
def test_damage_is_noticed(file, model_zoo, tmp_path):
    folder = tmp_path / "digits_lightnet"
    shutil.copytree(model_zoo / "digits_lightnet", folder)
    zoo.check(folder)
    flip_a_byte(folder / file)
    with pytest.raises(ValueError, match=f"{file} is damaged"):
        zoo.check(folder)


@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for name in zoo.names() if name in WITH_DATA])
def test_accuracy_is_the_one_on_the_card(name):
    measured = checked_metrics(onescan.load(f"zoo/{name}"))
    assert measured == pytest.approx(zoo.card(name).metrics, abs=1e-4)


def test_the_page_on_trained_weights_lists_every_model():
    page = Path(__file__).parents[2] / "docs" / "howto" / "trained_weights.md"
    rows = re.findall(
        r"^\| `zoo/(\w+)` \|.*\| ([\d,]+) \| ([\d.]+) MB \|.*\| (.*) \|$", page.read_text(), re.M
    )
    assert sorted(row[0] for row in rows) == zoo.names()
    for name, parameters, size, scores in rows:
        card = zoo.card(name)
        assert parameters == f"{card.parameters:,}"
        assert size == f"{(zoo.path(name) / WEIGHTS).stat().st_size / 1e6:.1f}"
        for metric, value in re.findall(r"(loss|accuracy) ([\d.]+%?)", scores):
            measured = card.metrics[metric]
            assert value == (f"{measured:.1%}" if "%" in value else f"{measured:.3f}")


def test_unknown_names_list_the_known_ones(model_zoo):
    with pytest.raises(ValueError, match=r"zoo/digit' is unknown.*meant 'zoo/digits_lightnet'"):
        onescan.load("zoo/digit")
    with pytest.raises(ValueError, match=r"available: .*zoo/digits_lightnet"):
        zoo.path("nothing")


def test_local_folder_has_priority(model_zoo, tmp_path):
    shutil.copytree(zoo.FOLDER / "digits_lightnet", DIGITS)
    assert zoo.resolve(DIGITS) == DIGITS
    assert onescan.load(DIGITS).folder.resolve() == tmp_path / DIGITS
    assert zoo.path(DIGITS) == zoo.FOLDER / "digits_lightnet"


def test_initializes_another_model(model_zoo):
    trained = onescan.load(DIGITS)
    model = dataclasses.replace(trained.model.config, num_classes=3).build()
    init_from(DIGITS, model)
    assert torch.equal(model.patchify.proj.weight, trained.model.patchify.proj.weight)


def test_commands_accept_names(model_zoo, capsys):
    from PIL import Image

    Image.new("L", (8, 8)).save("digit.png")
    assert main(["zoo"]) == 0
    assert DIGITS in capsys.readouterr().out
    assert main(["predict", DIGITS, "digit.png"]) == 0
    assert "digit.png: " in capsys.readouterr().out
    assert main(["evaluate", DIGITS]) == 0
    accuracy = zoo.card("digits_lightnet").metrics["accuracy"]
    assert f"{accuracy:.1%}" in capsys.readouterr().out
    for argv in (["predict", "zoo/cat", "digit.png"], ["generate", "zoo/cat"]):
        assert main(argv) == 2
        assert "available: " in capsys.readouterr().err
    assert main(["generate", DIGITS]) == 2
    assert f"'{DIGITS}' holds an ImageClassifier" in capsys.readouterr().err


def test_evaluations_accept_names(model_zoo):
    features = open_features(DIGITS, torch.device("cpu"))
    assert features.class_names == onescan.load(DIGITS).class_names
    assert run_config(DIGITS).model == onescan.load(DIGITS).model.config
    with pytest.raises(ValueError, match="an ImageClassifier, which does not generate"):
        default_sampler(DIGITS)
    with pytest.raises(ValueError, match="zoo/digits_lightnet' is a run of"):
        open_samples(DIGITS, SamplesConfig(), features, torch.device("cpu"))


def test_converts_to_transformers(model_zoo, tmp_path):
    transformers = pytest.importorskip("transformers")
    from onescan.integrations.transformers import to_transformers

    trained = onescan.load(DIGITS)
    to_transformers(trained.model).save_pretrained(tmp_path)
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path)
    images = torch.linspace(-1, 1, 2 * 8 * 8).sin().reshape(2, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(loaded(images).logits, trained.model(images))


def test_shipped_folder_loads_with_rounded_weights(shipped):
    folder, card = shipped
    ours, run = (onescan.load(folder / name) for name in ("zoo/digits_lightnet", "run"))
    assert ours.model.config == run.model.config
    assert ours.class_names == run.class_names
    for ours_each, run_each in zip(ours.model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(ours_each, run_each.half().float())
    assert card.metrics == pytest.approx(checked_metrics(ours))
    assert "--training.steps 2" in (folder / "zoo/digits_lightnet" / zoo.README).read_text()


def test_another_recipe_is_refused(shipped):
    folder, _ = shipped
    with pytest.raises(ValueError, match="is a run of 'digits', expected 'cifar10_lightnet'"):
        add_to_zoo.add_to_zoo(folder / "run", "cifar10_lightnet", folder / "other")


def test_infinite_weights_are_refused():
    with pytest.raises(ValueError, match="head does not fit into float16: 7e\\+04"):
        add_to_zoo._half("head", torch.tensor([7e4]))
