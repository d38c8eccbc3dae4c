"""A run has the same losses, metrics and weights however its batches are split.

All are means over the labels of a step, of which the parts of a batch have different numbers.
"""

from functools import partial
from itertools import islice, product

import pytest
import torch
from ranks import run_processes
from safetensors.torch import load_file
from test_sequence_training import (
    TEXT,
    TIMEOUT_S,
    image_run,
    masked_run,
    on,
    packed_run,
    recall_run,
    run_of,
    sequence_run,
    text_run,
    train_all,
    transfer_run,
)
from tiny_denoiser import denoiser_run
from tiny_glue import write_ruled
from tiny_run import interrupt, tiny_run, untimed
from torch import nn

from onescan import configs
from onescan.experiments.data import derive_seed
from onescan.experiments.data.glue import GlueDatasetConfig
from onescan.experiments.tasks import GlueConfig, ImageClassification, LanguageModelling, Task
from onescan.experiments.training import read_metrics, train
from onescan.experiments.training.loop import Loop
from onescan.layers.mixers import LionMixerConfig
from onescan.models.sequence_classifier import SequenceClassifierConfig

CLOSE = 1e-6  # relative difference in float32, from rounding
CLOSE_AT_THE_END = 3e-5  # of test metrics, which the rounding of all weights changes
CALM = {"training.learning_rate": 1e-3, "training.eps": 1e-3}  # rounding does not grow


def unmixed_run(folder):
    return configs.replace(image_run(folder), {"model.drop_path": 0.0, "task.mix": None})


def mixed_run(folder):
    """MixUp and CutMix, which mix images of the same process."""
    return configs.replace(image_run(folder), {"model.drop_path": 0.0})


def distilled_run(folder):
    """Soft distillation, with a token of its own, from a run in float32."""
    teacher = folder / "classifier"
    if not teacher.exists():
        train(tiny_run(steps=1, epochs=1), teacher)
    changes = {"model.distillation_token": True, "task.teacher": str(teacher)}
    changes |= {"task.distillation.kind": "soft"}
    return configs.replace(unmixed_run(folder), changes)


def denoiser(_):
    """Learned variances, without dropped labels."""
    changes = {"model.learn_sigma": True, "model.label_dropout": 0.0}
    changes |= {"task.noise.prediction": "noise", "task.samples_per_class": 0}
    run = denoiser_run(**changes)
    return run_of(run.model, run.data, run.task)


def words_run(folder):
    """Whole words, predicted by two blocks; some parts of a batch have none."""
    changes = {"task.whole_word_mask": True, "task.supervised_blocks": 2}
    changes |= {"task.evaluation_mask_rate": 0.5}
    return configs.replace(masked_run(folder), changes)


def glue_run(folder, task="cola"):
    title = {"cola": "CoLA", "stsb": "STS-B"}[task]
    path = write_ruled(folder / "glue", title)
    model = SequenceClassifierConfig(
        mixer=LionMixerConfig(num_heads=2), position=None, num_classes=1 + (task == "cola"), **TEXT
    )
    data = GlueDatasetConfig(task=task, path=str(path), length=32)
    return run_of(model, data, GlueConfig(segments=False))


def undropped_transfer_run(folder):
    return configs.replace(transfer_run(folder), {"model.drop_path": 0.0})


RUNS = {
    "packed": packed_run,
    "text": text_run,
    "masked": masked_run,
    "words": words_run,
    "images": unmixed_run,
    "mixed": mixed_run,
    "distilled": distilled_run,
    "denoiser": denoiser,
    "sequences": sequence_run,
    "classes": glue_run,
    "numbers": partial(glue_run, task="stsb"),
    "recall": recall_run,
    "transfer": undropped_transfer_run,
}
QUICK = ("packed", "masked")
PROCESSES = {  # of each layout
    "parts": (1, {"gradient_accumulation_steps": 4}),
    "ddp": (2, {}),
    "both": (2, {"gradient_accumulation_steps": 2}),
    "fsdp": (2, {"fsdp": True, "gradient_accumulation_steps": 2}),
    "shards": (2, {"sequence_parallel": 2, "gradient_accumulation_steps": 2}),
}


def start(names, folder, layout, *, then=None):
    """Train runs in a layout of processes, in a folder of its name."""
    runs = {name: configs.replace(RUNS[name](folder), CALM | (then or {})) for name in names}
    processes, machine = PROCESSES.get(layout, (1, {}))
    work = partial(train_all, runs, folder / layout, **machine)
    if processes == 1:
        return work()
    ranks = folder / f"{layout} ranks"
    return run_processes(processes, lambda _: work(), ranks, timeout=TIMEOUT_S)


def assert_equal_runs(folder, one):
    lines, expected = untimed(folder), untimed(one)
    for ours, theirs in zip(lines, expected, strict=True):
        for line in (ours, theirs):
            line.pop("gradient_norm", None)
        split = theirs.pop("split")
        assert ours.pop("split") == split
        close = CLOSE_AT_THE_END if split == "test" else CLOSE
        assert ours == pytest.approx(theirs, rel=close, abs=close)
    ours, theirs = (load_file(f / "model.safetensors") for f in (folder, one))
    differences = [(ours[name] - theirs[name]).norm() for name in theirs]
    norm = nn.utils.get_total_norm([*theirs.values()])
    assert nn.utils.get_total_norm(differences) < CLOSE * norm


@pytest.mark.slow
def test_parts_of_a_batch_have_their_share_of_the_labels(tmp_path):
    """20 steps."""
    for layout in ("one", "parts", "ddp"):
        start(QUICK, tmp_path, layout)
    for layout, name in product(("parts", "ddp"), QUICK):
        assert_equal_runs(tmp_path / layout / name, tmp_path / "one" / name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # states, which are views
def test_every_task_gives_the_same_numbers_in_every_layout(tmp_path):
    start(RUNS, tmp_path, "one")
    for layout in PROCESSES.keys() - {"ddp"}:  # a part of "both"; tested alone above
        names = set(RUNS)
        if layout != "parts":
            names -= {"mixed"}  # images of one process
        if layout == "fsdp":
            names -= {"transfer"}  # does not support it
        start(names, tmp_path, layout)
        for name in names:
            assert_equal_runs(tmp_path / layout / name, tmp_path / "one" / name)


# Growing batches

GROWING = {
    "training.initial_batch_size": 4, "training.batch_size": 12, "training.batch_size_ramp": 1e-9,
    "training.steps": None, "training.epochs": 2,
}  # fmt: skip


@pytest.mark.slow
def test_micro_batches_may_be_split(tmp_path):
    for layout in ("one", "both"):
        start(["masked"], tmp_path, layout, then=GROWING)
    assert_equal_runs(tmp_path / "both" / "masked", tmp_path / "one" / "masked")


def test_a_grown_batch_has_the_mean_loss_of_its_labels(tmp_path):
    """The second step reads the micro-batches 1 to 3, by weights that hardly differ from before."""
    changes = GROWING | {"training.epochs": 1, "training.learning_rate": 1e-20}
    run = configs.replace(packed_run(tmp_path), changes)
    task = run.task.build(run.data.build())
    torch.manual_seed(derive_seed(run.training.seed, "model"))
    model = run.model.build().train()
    plans = islice(task.batches(step=1, batch_size=4, seed=run.training.seed), 3)
    batches = [task.train.read(plan.examples).batch for plan in plans]
    assert len({task.count_labels(batch) for batch in batches}) > 1
    whole = tuple(map(torch.cat, zip(*batches, strict=True)))
    loss, metrics = task.loss(model, whole)
    loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    interrupt(run, tmp_path / "run", 2)
    line = read_metrics(tmp_path / "run")[1]
    assert line["batch_size"] == 12
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert line["accuracy"] == pytest.approx(metrics["accuracy"].item(), rel=1e-6)
    assert line["gradient_norm"] == pytest.approx(norm.item(), rel=1e-5)


# Batches that lack labels


def leave_labels(monkeypatch, *counts):
    """Leave so many labels in each row of the training batches, after the dry run."""
    left = iter(counts)

    def fewer(_, batch, seed):
        tokens, documents = batch
        numbers = torch.arange(documents.shape[1]).repeat(len(documents), 1)
        for row, count in zip(numbers, next(left) if seed else (0, 0), strict=True):
            row[: count + 1] = 0
        return tokens, numbers

    monkeypatch.setattr(LanguageModelling, "augment", fewer)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_step_without_labels_changes_nothing(tmp_path, monkeypatch, precision):
    run = configs.replace(packed_run(tmp_path), {"training.steps": 3, "training.batch_size": 4})
    run = configs.replace(run, {"training.ema_decay": None, "training.precision": precision})
    run = on(run, gradient_accumulation_steps=2)
    weights = []
    update = Loop.update

    def watched(self, batches):
        update(self, batches)
        weights.append([p.detach().clone() for p in self.state.model.parameters()])

    monkeypatch.setattr(Loop, "update", watched)
    leave_labels(monkeypatch, (0, 0, 3, 1), (0, 0, 0, 0), (2, 0, 1, 1))  # parts have two rows
    folder = train(run, tmp_path / "run").folder
    lines = [line for line in read_metrics(folder) if line["split"] == "train"]
    assert [line["loss"] > 1 for line in lines] == [True, False, True]
    assert (lines[1]["loss"], lines[1]["gradient_norm"], lines[1]["labels"]) == (0, 0, 0)
    assert "labels" not in lines[0]
    assert all(map(torch.equal, weights[0], weights[1]))
    assert not all(map(torch.equal, weights[1], weights[2]))


@pytest.mark.slow
def test_fewer_rows_than_parts(tmp_path, monkeypatch):
    """Rows that a task drops make parts fewer or smaller."""
    keep = {"training.batch_size": 4, "training.ema_decay": None}
    run = configs.replace(unmixed_run(tmp_path), CALM | keep)
    monkeypatch.setattr(
        ImageClassification, "augment", lambda self, batch, seed: tuple(x[:3] for x in batch)
    )
    for name, parts in (("one", 1), ("parts", 4), ("halves", 2)):
        train(on(run, gradient_accumulation_steps=parts), tmp_path / name)
    for name in ("parts", "halves"):
        assert_equal_runs(tmp_path / name, tmp_path / "one")


def test_losses_of_tasks_that_do_not_count_labels_are_means_over_examples():
    batch = torch.zeros(3, 7), torch.zeros(3)
    assert Task.count_labels(None, batch) == 3
