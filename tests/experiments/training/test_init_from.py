"""Weights of another model to start from: which are loaded, and which must match."""

import dataclasses

import pytest
import torch
from tiny_glue import TINY_MLM, pretraining, write_ruled
from tiny_run import interrupt, tiny_run

import onescan
from onescan.checkpoint.weights import read_weights, save_weights
from onescan.experiments.data.glue import GlueDatasetConfig
from onescan.experiments.recipes.glue import classifier
from onescan.experiments.tasks import GlueConfig
from onescan.experiments.training import MachineConfig, RunConfig, TrainingConfig, train
from onescan.experiments.training.folder import CONFIG, read_manifest
from onescan.experiments.training.initialization import init_from
from onescan.integrations.transformers import to_transformers
from onescan.models.sequence_classifier import SequenceClassifierConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A masked language model's run, and two tasks."""
    folder = tmp_path_factory.mktemp("start")
    train(pretraining(folder), folder / "mlm")
    write_ruled(folder / "glue", "CoLA", "MNLI", train=8, dev=4)
    return folder


def fine_tuning(folder, task, classes, start, **training):
    return RunConfig(
        name=task,
        model=classifier(TINY_MLM, classes, "mean"),
        data=GlueDatasetConfig(task=task, path=str(folder / "glue"), length=32),
        task=GlueConfig(),
        init_from=None if start is None else str(start),
        training=TrainingConfig(**{"steps": 2, "batch_size": 4} | training),
        machine=MachineConfig(trackers=()),
    )


def fresh(classes):
    torch.manual_seed(7)
    return classifier(TINY_MLM, classes, "mean").build()


def test_all_weights_but_the_head_are_loaded(folder):
    model, untouched = fresh(2), fresh(2)
    init_from(str(folder / "mlm"), model)
    learnt = onescan.load(folder / "mlm").model
    assert "head.transform.weight" in learnt.state_dict()  # of a head of another class
    for name, weight in model.state_dict().items():
        source = untouched if name.startswith("head.") else learnt
        assert torch.equal(weight, source.state_dict()[name]), name


def test_matching_weights_of_a_head_of_the_same_class_are_loaded(folder, tmp_path):
    run = train(fine_tuning(folder, "mnli", 3, folder / "mlm"), tmp_path / "mnli")
    model, untouched = fresh(2), fresh(2)
    init_from(str(run.folder), model)
    learnt = onescan.load(run.folder).model.state_dict()
    for name, weight in model.state_dict().items():
        source = untouched.state_dict() if name.startswith("head.scores.") else learnt
        assert torch.equal(weight, source[name]), name


def test_a_run_may_start_from_the_best_weights(tmp_path):
    done = train(tiny_run(), tmp_path / "run")
    weights, notes = read_weights(done.folder / "model.safetensors")
    changed = {name: weight + 1 for name, weight in weights.items()}
    save_weights(done.folder / "best.safetensors", changed, notes)
    model = tiny_run().model.build()
    init_from(str(done.folder / "best.safetensors"), model)
    assert torch.equal(model.embed.weight, changed["embed.weight"])


def test_a_run_may_start_from_a_model_of_transformers(folder, tmp_path):
    learnt = onescan.load(folder / "mlm").model
    to_transformers(learnt).save_pretrained(tmp_path / "saved")
    model = fresh(2)
    init_from(str(tmp_path / "saved"), model)
    for name, weight in model.network.state_dict().items():
        assert torch.equal(weight, learnt.network.state_dict()[name]), name


def test_a_run_starts_from_the_weights_with_the_same_randomness(folder, tmp_path):
    started = fine_tuning(folder, "cola", 2, folder / "mlm", learning_rate=1e-12)
    result = train(started, tmp_path / "started")
    weights = onescan.load(result.folder).model.state_dict()
    learnt = onescan.load(folder / "mlm").model.state_dict()
    torch.testing.assert_close(weights["network.norm.weight"], learnt["network.norm.weight"])
    torch.testing.assert_close(
        weights["network.embedding.weight"], learnt["network.embedding.weight"]
    )
    plain = train(dataclasses.replace(started, init_from=None), tmp_path / "plain")
    heads = (onescan.load(each.folder).model.head.scores.weight for each in (result, plain))
    torch.testing.assert_close(*heads, atol=1e-6, rtol=0)


def test_a_resumed_run_no_longer_needs_the_weights(folder, tmp_path):
    start = tmp_path / "start"
    train(pretraining(tmp_path), start)
    run = fine_tuning(folder, "cola", 2, start, steps=6)
    whole = train(run, tmp_path / "whole")
    interrupt(run, tmp_path / "stopped", 3)
    for file in start.glob("*.safetensors"):
        file.unlink()
    again = train(run, tmp_path / "stopped")
    ours, theirs = (onescan.load(each.folder).model.state_dict() for each in (again, whole))
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        train(run, tmp_path / "stopped", overwrite=True)
    assert read_manifest(tmp_path / "stopped").run == run  # and is still there


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"width": 8},
            r"network\.embedding\.weight is \(258, 16\) in the file and \(258, 8\) in the model.*",
        ),
        (
            {"depth": 2},
            r"network\.blocks\.1\..* is missing in the file and .* in the model, .* and \d+ more",
        ),
        (
            {"segment_types": 0},
            r"segment_embedding\.weight is \(2, 16\) in the file .* missing in the model$",
        ),
    ],
)
def test_weights_of_another_model_are_refused(changes, says, folder):
    config = dataclasses.replace(classifier(TINY_MLM, 2, "mean"), **changes)
    assert isinstance(config, SequenceClassifierConfig)
    with pytest.raises(ValueError, match=rf"init_from is .*mlm'.*{says}"):
        init_from(str(folder / "mlm"), config.build())


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        init_from(str(tmp_path), fresh(2))


def test_older_configs_without_init_from_are_read(tmp_path):
    result = train(tiny_run(steps=1), tmp_path / "run")
    config = result.folder / CONFIG
    lines = config.read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"init_from"' not in line and '"decoupled_' not in line]
    assert len(kept) == len(lines) - 2
    config.write_text("".join(kept))
    assert read_manifest(result.folder).run == tiny_run(steps=1)
