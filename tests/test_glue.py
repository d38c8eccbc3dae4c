"""GLUE fine-tuning: measures, recipes, and the command from tables to a summary over seeds."""

import json
import math
import shutil

import pytest
import torch
from html_page import Page, assert_loads_nothing, table
from tiny_glue import TINY_MLM, pretraining, write_ruled, write_table
from torch import nn

import onescan
from onescan.cli import main
from onescan.data.glue import PROBLEMS, GlueDatasetConfig
from onescan.recipes.glue import BATCH_SIZES, FROM_MNLI, GLUE, ORDER
from onescan.recipes.glue_runs import classifier
from onescan.recipes.language import LANGUAGE
from onescan.tasks import GlueConfig
from onescan.tasks.glue_metrics import measure
from onescan.training import TrainingConfig, evaluate
from onescan.training.folder import read_manifest
from onescan.training.optim import build_optimizer, learning_rate

# Measures

LABELS = torch.tensor([1, 1, 1, 0, 0, 0, 0, 1])
SAID = torch.tensor([1, 1, 0, 0, 0, 1, 0, 0])  # 2 of 4 found, 1 of 3 wrongly said


def test_classes_are_measured():
    right, found, said, true = 5 / 8, 2 / 4, 2 / 3, 3
    assert measure("accuracy", LABELS, SAID) == right
    assert measure("f1", LABELS, SAID) == pytest.approx(2 * found * said / (found + said))
    cells = 2 * true - 1 * 2
    assert measure("matthews_correlation", LABELS, SAID) == pytest.approx(
        cells / math.sqrt(3 * 4 * 4 * 5)
    )


def test_what_is_always_said_tells_nothing():
    always = torch.zeros_like(LABELS)
    assert measure("f1", LABELS, always) == 0.0
    assert measure("f1", always, always) == 0.0
    assert measure("matthews_correlation", LABELS, always) == 0.0


def test_numbers_are_measured():
    scores, estimates = torch.tensor([0.0, 1.0, 2.0, 5.0]), torch.tensor([0.0, 3.0, 2.0, 40.0])
    x, y = scores - scores.mean(), estimates - estimates.mean()
    assert measure("pearson", scores, estimates) == pytest.approx(
        float(x @ y / (x.norm() * y.norm())), rel=1e-5
    )
    swapped = 2  # squared differences of ranks: two of 1
    assert measure("spearman", scores, estimates) == pytest.approx(1 - 6 * swapped / (4 * 15))


@pytest.mark.parametrize("metric", ["pearson", "spearman"])
def test_a_constant_has_no_correlation(metric):
    assert measure(metric, torch.arange(3.0), torch.ones(3)) == 0.0
    assert measure(metric, torch.ones(3), torch.arange(3.0)) == 0.0


def posed(folder, title, task):
    write_ruled(folder, title, train=8, dev=4)
    data = GlueDatasetConfig(task=task, path=str(folder), length=32).build()
    return GlueConfig().build(data)


def test_matched_and_mismatched_are_judged_one_by_one(tmp_path):
    task = posed(tmp_path, "MNLI", "mnli")
    labels = torch.tensor([0, 1, 2, 0, 0, 1, 2, 0])
    said = torch.tensor([0, 1, 2, 1, 1, 2, 2, 1])
    judged = task.judge({"labels": labels, "predictions": said, "losses": torch.ones(8)})
    assert judged.metrics == {"matched_accuracy": 0.75, "mismatched_accuracy": 0.25, "loss": 1.0}
    assert task.score(judged.metrics) == 0.5


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("CoLA", ["matthews_correlation"]),
        ("SST-2", ["accuracy"]),
        ("MRPC", ["accuracy", "f1"]),
        ("QQP", ["accuracy", "f1"]),
        ("QNLI", ["accuracy"]),
        ("RTE", ["accuracy"]),
        ("STS-B", ["pearson", "spearman"]),
    ],
)
def test_every_task_has_the_benchmarks_measures(title, names, tmp_path):
    name = next(task for task, problem in PROBLEMS.items() if problem.title == title)
    task = posed(tmp_path, title, name)
    classes = len(task.class_names) or 1
    judged = evaluate(classifier(TINY_MLM, classes, "mean").build(), task)
    assert list(judged.metrics) == [*names, "loss"]
    rows = judged.arrays["labels"], judged.arrays["predictions"]
    assert judged.metrics[names[-1]] == measure(names[-1], *rows)


# Recipes


@pytest.mark.parametrize("name", GLUE)
def test_a_recipe_has_a_number_for_every_task(name):
    recipe = GLUE[name]
    columns = recipe.learning_rates, recipe.weight_decays, recipe.epochs, BATCH_SIZES
    assert {len(column) for column in columns} == {len(ORDER)} == {len(PROBLEMS)}
    assert recipe.length == (256 if name in ("bert24", "hydra") else 128)
    assert set(FROM_MNLI) == {"rte", "stsb", "mrpc"}


@pytest.mark.parametrize(
    ("name", "task", "rate", "decay", "epochs", "batch_size", "decoupled"),
    [  # cells of Table 8 that no other recipe has
        ("bert24", "qnli", 1e-5, 1e-5, 10, 16, True),
        ("bert24", "stsb", 3e-5, 3e-6, 10, 32, True),
        ("m2_base", "cola", 8e-5, 5e-6, 10, 32, True),
        ("m2_base", "stsb", 8e-5, 3e-6, 10, 32, False),
        ("m2_large", "rte", 5e-5, 1e-6, 2, 16, False),
        ("m2_large", "stsb", 8e-5, 3e-5, 8, 32, True),
        ("hydra", "mnli", 1e-4, 5e-6, 2, 48, True),
        ("hydra", "qnli", 5e-5, 1e-6, 7, 16, True),
        ("hydra", "cola", 1e-4, 8e-6, 10, 32, True),
        ("modified", "mrpc", 1e-5, 8e-6, 10, 32, True),
        ("modified", "rte", 1e-5, 1e-6, 2, 16, False),
    ],
)
def test_recipes_are_the_papers(name, task, rate, decay, epochs, batch_size, decoupled):
    training = GLUE[name].training(task)
    assert (training.learning_rate, training.weight_decay) == (rate, decay)
    assert (training.epochs, training.batch_size) == (epochs, batch_size)
    assert training.decoupled_weight_decay is decoupled
    assert learning_rate(5, 100, training) == rate  # after a warm-up of 6%
    assert learning_rate(100, 100, training) == 0


def test_a_decoupled_decay_is_scaled_by_the_schedule_alone():
    config = TrainingConfig(learning_rate=0.2, weight_decay=0.3, decoupled_weight_decay=True)
    model = nn.Linear(2, 2, bias=False)
    before = model.weight.detach().clone()
    optimizer = build_optimizer(model, config)
    optimizer.param_groups[0]["lr"] = 0.05  # a quarter of the highest
    gradient = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    model.weight.grad = gradient.clone()
    optimizer.step()
    first_step = gradient / (gradient.abs() + config.eps)  # of both corrected means
    wanted = before - 0.25 * 0.3 * before - 0.05 * first_step
    torch.testing.assert_close(model.weight.detach(), wanted)


def test_the_papers_pretraining_decays_decoupled():
    recipes = [name for name in LANGUAGE if name.startswith("c4_")]
    assert len(recipes) == 8
    assert all(LANGUAGE[name]().training.decoupled_weight_decay for name in recipes)


# The command

QUICK = [
    *("--epochs", "8", "--batch-size", "8", "--learning-rate", "0.01", "--length", "32"),
    *("--precision", "float32", "--machine.trackers"),
]
SEEDS = ["--seeds", "0", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A masked language model, and some of the tasks' tables."""
    folder = tmp_path_factory.mktemp("glue")
    onescan.training.train(pretraining(folder), folder / "mlm")
    write_ruled(folder / "tables", "CoLA", "MNLI", "STS-B")
    return folder


def command(folder, *words):
    tables, out = str(folder / "tables"), str(folder / "out")
    return ["glue", str(folder / "mlm"), "--path", tables, "--out", out, *QUICK, *words]


@pytest.fixture(scope="module")
def trained(folder):
    """What two seeds of two tasks left, one of which begins with a third's weights."""
    assert main(command(folder, "--tasks", "cola,stsb", *SEEDS)) == 0
    return folder / "out"


def test_tables_are_learnt_and_summed_up(trained, folder):
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["seeds"] == [0, 1]
    assert summary["recipe"] == "modified"
    assert list(summary["tasks"]) == ["cola", "stsb"]
    correlations = summary["tasks"]["cola"]["matthews_correlation"]["values"]
    assert min(correlations) > 0.5  # chance is 0
    assert min(summary["tasks"]["stsb"]["spearman"]["values"]) > 0.5
    told = onescan.load(trained / "cola/seed-1").metrics["matthews_correlation"]
    assert correlations[1] == told
    stsb = summary["tasks"]["stsb"]
    both = (stsb["pearson"]["values"][0] + stsb["spearman"]["values"][0]) / 2
    assert stsb["score"]["values"][0] == pytest.approx(both)
    assert summary["average"]["values"][0] == pytest.approx((correlations[0] + both) / 2)
    low, high = sorted(correlations)
    spread = summary["tasks"]["cola"]["matthews_correlation"]["spread"]
    assert spread == pytest.approx((high - low) / math.sqrt(2))


def test_some_tasks_begin_with_the_weights_of_mnli(trained, folder):
    starts = {
        task: read_manifest(trained / task / "seed-1").run.init_from for task in ("cola", "stsb")
    }
    assert starts == {"cola": str(folder / "mlm"), "stsb": str(trained / "mnli/seed-1")}
    sizes = {
        task: onescan.load(trained / task / "seed-0").model.config for task in ("mnli", "stsb")
    }
    assert {task: config.num_classes for task, config in sizes.items()} == {"mnli": 3, "stsb": 1}
    assert sizes["stsb"].segment_types == 2


def test_a_model_that_tells_no_segments_apart_learns_pairs(folder, tmp_path):
    onescan.training.train(pretraining(tmp_path, segment_types=0), tmp_path / "mlm")
    words = ["--tasks", "stsb", "--no-from-mnli", *QUICK, "--out", str(tmp_path / "out")]
    tables = ["--path", str(folder / "tables")]
    assert main(["glue", str(tmp_path / "mlm"), *tables, *words]) == 0
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert min(summary["tasks"]["stsb"]["spearman"]["values"]) > 0.5
    assert main(["evaluate", str(tmp_path / "out/stsb/seed-0")]) == 0


def test_what_is_finished_is_not_trained_again(trained, folder, capsys):
    assert main(command(folder, "--tasks", "stsb", "cola", *SEEDS)) == 0
    out = capsys.readouterr().out
    assert out.count("already finished") == 6
    assert "training on mnli first" in out
    lines = out[out.index("task  ") :].splitlines()
    assert lines[0].split() == ["task", "measure", "value", "score"]
    assert [line.split()[0] for line in lines[1:5]] == ["CoLA", "STS-B", "spearman", "average"]
    assert "\u00b1" in lines[1]


def test_a_fine_tuned_run_is_evaluated_again(trained, capsys):
    assert main(["evaluate", str(trained / "stsb/seed-0")]) == 0
    out = capsys.readouterr().out
    wanted = onescan.load(trained / "stsb/seed-0").metrics
    assert f"pearson   {wanted['pearson']:.4f}" in out


def test_the_pages_say_what_came_out(trained):
    html = (trained / "report.html").read_text()
    assert_loads_nothing(html)
    page = Page(html)
    rows = table(page, "task")
    assert [row[0] for row in rows] == ["task", "CoLA", "STS-B", "", "average of 2 tasks"]
    assert "recipe Modified" in page.text
    assert len(page.pictures("svg+xml")) == 2
    settings = next(rows for rows in page.cells if "learning rate" in rows[0])
    assert settings[2][0] == "STS-B"
    assert settings[2][1].endswith("mnli/seed-0")
    about = Page((trained / "stsb/report.html").read_text())
    assert "Test spearman" in about.text
    assert "Squared error of the training batches" in about.text
    mistakes = table(about, "texts")
    assert len(mistakes) == 13
    assert all(cells[0].startswith("of it \u2014 ") for cells in mistakes[1:])
    assert "Where it errs most" in Page((trained / "cola/report.html").read_text()).text


def test_without_mnli_all_begin_with_the_checkpoint(folder, tmp_path, capsys):
    write_ruled(tmp_path, "RTE", train=8, dev=4)
    words = ["glue", str(folder / "mlm"), "--path", str(tmp_path), "--out", str(tmp_path / "out")]
    words += [*QUICK, "--tasks", "rte"]
    assert main(words) == 2
    seen = capsys.readouterr()
    assert "has no tables of MNLI" in seen.err
    assert "--no-from-mnli" in seen.out
    assert main([*words, "--no-from-mnli", "--epochs", "1", "--recipe", "hydra"]) == 0
    run = read_manifest(tmp_path / "out/rte/seed-0").run
    assert run.init_from == str(folder / "mlm")
    assert run.training.decoupled_weight_decay is False
    assert run.training.weight_decay == GLUE["hydra"].training("rte").weight_decay
    assert not (tmp_path / "out/mnli").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tasks", "colla"], "task 'colla' is unknown (perhaps you meant 'cola')"),
        (["--recipe", "modifed"], "recipe 'modifed' is unknown (perhaps you meant 'modified')"),
        (["--tasks", "cola,cola"], "tasks is 'cola, cola', expected each once"),
        (["--tasks", ","], "tasks is '', expected each once"),
        (["--tasks", "cola", "--seeds", "1", "1"], "seeds is '1, 1', expected each once"),
        (["--tasks", "cola", "--length", "2"], "data.length is 2, expected 3 or more"),
        (["--tasks", "cola", "--epochs", "0"], "training.epochs is 0, expected a number above 0"),
        (["--tasks", "qqp"], "has no tables of QQP"),
    ],
)
def test_what_a_user_got_wrong_is_said_in_a_sentence(words, says, folder, tmp_path, capsys):
    assert main([*command(folder, *words), "--out", str(tmp_path / "out")]) == 2
    assert says in capsys.readouterr().err


def test_a_broken_table_is_told_before_anything_is_trained(folder, tmp_path, capsys):
    tables = write_ruled(tmp_path / "tables", "CoLA", "STS-B", train=8, dev=4)
    write_table(tables / "STS-B/dev.tsv", "STS-B", [["short"]])
    words = command(folder, "--tasks", "cola,stsb", "--no-from-mnli", "--path", str(tables))
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    assert "STS-B/dev.tsv, line 2: 1 cells between tabs" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_another_run_in_a_later_folder_is_told_before_anything_is_trained(
    trained, folder, tmp_path, capsys
):
    words = [*command(folder, "--tasks", "cola"), "--out", str(tmp_path), "--seeds", "5", "0"]
    shutil.copytree(trained / "cola/seed-0", tmp_path / "cola/seed-0")
    assert main([*words, "--learning-rate", "0.1"]) == 2
    error = capsys.readouterr().err
    assert "holds another run: training.learning_rate is 0.01 there and 0.1 here" in error
    assert not (tmp_path / "cola/seed-5").exists()


def test_what_is_no_masked_language_model_is_refused(trained, folder, tmp_path, capsys):
    words = ["--tasks", "cola", "--path", str(folder / "tables")]
    assert main(["glue", str(trained / "cola/seed-0"), *words]) == 2
    assert "model of class SequenceClassifier, expected" in capsys.readouterr().err
    assert main(["glue", str(tmp_path / "nothing"), *words]) == 2
    assert "there is no run at" in capsys.readouterr().err
