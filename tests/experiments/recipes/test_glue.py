"""GLUE fine-tuning: metrics, recipes, and the command from tables to a summary over seeds."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from html_page import Page, assert_loads_nothing, table
from tiny_glue import TINY_MLM, pretraining, write_ruled, write_table
from torch import nn

import onescan
from onescan.cli import main
from onescan.experiments.data.glue import PROBLEMS, GlueDatasetConfig
from onescan.experiments.recipes.glue import (
    BATCH_SIZES,
    FROM_MNLI,
    GLUE,
    ORDER,
    GlueRunsConfig,
    classifier,
    plan_glue,
)
from onescan.experiments.recipes.language import RECIPES as LANGUAGE
from onescan.experiments.report.glue import GlueOutcome, best_rate, table_rows
from onescan.experiments.report.runs import FinishedRun
from onescan.experiments.tasks import Evaluation, GlueConfig
from onescan.experiments.tasks.glue import compute_metric
from onescan.experiments.training import RunResult, TrainingConfig, evaluate
from onescan.experiments.training.folder import Manifest, read_manifest
from onescan.experiments.training.optim import build_optimizer, learning_rate
from onescan.inputs.tokenizer import BYTES, TextFormat, load_tokenizer

# Metrics

LABELS = torch.tensor([1, 1, 1, 0, 0, 0, 0, 1])
PREDICTED = torch.tensor([1, 1, 0, 0, 0, 1, 0, 0])  # 2 of 4 found, 1 of 3 wrong


def test_metrics_of_classes():
    accuracy, recall, precision, true = 5 / 8, 2 / 4, 2 / 3, 3
    assert compute_metric("accuracy", LABELS, PREDICTED) == accuracy
    assert compute_metric("f1", LABELS, PREDICTED) == pytest.approx(
        2 * recall * precision / (recall + precision)
    )
    cells = 2 * true - 1 * 2
    assert compute_metric("matthews_correlation", LABELS, PREDICTED) == pytest.approx(
        cells / math.sqrt(3 * 4 * 4 * 5)
    )


def test_constant_predictions_score_zero():
    always = torch.zeros_like(LABELS)
    assert compute_metric("f1", LABELS, always) == 0.0
    assert compute_metric("f1", always, always) == 0.0
    assert compute_metric("matthews_correlation", LABELS, always) == 0.0


def test_metrics_of_numbers():
    scores, estimates = torch.tensor([0.0, 1.0, 2.0, 5.0]), torch.tensor([0.0, 3.0, 2.0, 40.0])
    x, y = scores - scores.mean(), estimates - estimates.mean()
    assert compute_metric("pearson", scores, estimates) == pytest.approx(
        float(x @ y / (x.norm() * y.norm())), rel=1e-5
    )
    swapped = 2  # squared differences of ranks: two of 1
    assert compute_metric("spearman", scores, estimates) == pytest.approx(
        1 - 6 * swapped / (4 * 15)
    )


@pytest.mark.parametrize("metric", ["pearson", "spearman"])
def test_a_constant_has_no_correlation(metric):
    assert compute_metric(metric, torch.arange(3.0), torch.ones(3)) == 0.0
    assert compute_metric(metric, torch.ones(3), torch.arange(3.0)) == 0.0


def build_task(folder, title, task):
    write_ruled(folder, title, train=8, dev=4)
    data = GlueDatasetConfig(task=task, path=str(folder), length=32).build()
    return GlueConfig().build(data)


def test_matched_and_mismatched_are_evaluated_separately(tmp_path):
    task = build_task(tmp_path, "MNLI", "mnli")
    labels = torch.tensor([0, 1, 2, 0, 0, 1, 2, 0])
    predicted = torch.tensor([0, 1, 2, 1, 1, 2, 2, 1])
    evaluation = task.evaluate(
        {"labels": labels, "predictions": predicted, "losses": torch.ones(8)}
    )
    assert evaluation.metrics == {
        "matched_accuracy": 0.75,
        "mismatched_accuracy": 0.25,
        "loss": 1.0,
    }
    assert task.score(evaluation.metrics) == 0.5


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
def test_every_task_has_the_metrics_of_the_benchmark(title, names, tmp_path):
    name = next(task for task, problem in PROBLEMS.items() if problem.title == title)
    task = build_task(tmp_path, title, name)
    classes = len(task.class_names) or 1
    evaluation = evaluate(classifier(TINY_MLM, classes, "mean").build(), task)
    assert list(evaluation.metrics) == [*names, "loss"]
    rows = evaluation.arrays["labels"], evaluation.arrays["predictions"]
    assert evaluation.metrics[names[-1]] == compute_metric(names[-1], *rows)


# Recipes


@pytest.mark.parametrize("name", GLUE)
def test_a_recipe_has_a_number_for_every_task(name):
    recipe = GLUE[name]
    columns = recipe.learning_rates, recipe.weight_decays, recipe.epochs, BATCH_SIZES
    assert {len(column) for column in columns} == {len(ORDER)} == {len(PROBLEMS)}
    assert recipe.length == (256 if name in ("bert24", "hydra") else 128)
    assert set(FROM_MNLI) == {"rte", "stsb", "mrpc"}


@pytest.mark.sampled(3)
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
        ("lightnet", "mnli", 5e-5, 0.0, 5, 16, False),
        ("lightnet", "stsb", 5e-5, 0.0, 5, 16, False),
    ],
)
def test_recipes_have_the_settings_of_the_paper(
    name, task, rate, decay, epochs, batch_size, decoupled
):
    training = GLUE[name].training(task)
    assert (training.learning_rate, training.weight_decay) == (rate, decay)
    assert (training.epochs, training.batch_size) == (epochs, batch_size)
    assert training.decoupled_weight_decay is decoupled
    assert learning_rate(9 if name == "lightnet" else 5, 100, training) == rate  # after the warm-up
    assert learning_rate(100, 100, training) == 0


def test_lightnet_tries_four_rates_with_the_dropout_of_cramming():
    recipe = GLUE["lightnet"]
    assert recipe.rates_to_try == (5e-5, 4e-5, 3e-5, 2e-5)
    assert (recipe.dropout, recipe.from_mnli) == (0.1, False)
    training = recipe.training("cola")
    assert (training.schedule, training.warmup, training.betas) == ("cosine", 0.1, (0.9, 0.98))
    assert not any(GLUE[name].rates_to_try for name in GLUE if name != "lightnet")


def result_of(*accuracies):
    return [
        RunResult(folder=Path(), evaluation=Evaluation(metrics={"accuracy": a}, arrays={}), steps=1)
        for a in accuracies
    ]


def test_the_best_rate_has_the_highest_mean_over_seeds():
    assert best_rate({5e-5: result_of(0.9, 0.1), 4e-5: result_of(0.6, 0.6)}) == 4e-5
    assert best_rate({5e-5: result_of(0.5), 4e-5: result_of(0.5)}) == 5e-5


# The papers' rows, in the order of ORDER: LightNet's Table 2 prints one number for each column, and
# LION's Table 10 the mean of a task's metrics.
LIGHTNET_ROW = {
    "mnli": {"matched_accuracy": 83.3, "mismatched_accuracy": 83.5},
    "qnli": {"accuracy": 89.1},
    "qqp": {"accuracy": 0.0, "f1": 87.7},
    "rte": {"accuracy": 55.6},
    "sst2": {"accuracy": 92.9},
    "mrpc": {"accuracy": 0.0, "f1": 88.5},
    "cola": {"matthews_correlation": 52.6},
    "stsb": {"pearson": 86.3, "spearman": 0.0},
}
LION_ROW = {
    "mnli": {"matched_accuracy": 84.0, "mismatched_accuracy": 85.26},
    "qnli": {"accuracy": 89.80},
    "qqp": {"accuracy": 91.0, "f1": 88.98},
    "rte": {"accuracy": 64.33},
    "sst2": {"accuracy": 92.51},
    "mrpc": {"accuracy": 88.0, "f1": 91.24},
    "cola": {"matthews_correlation": 60.42},
    "stsb": {"pearson": 86.0, "spearman": 87.38},
}


MANIFEST = Manifest(
    onescan="",
    run=LANGUAGE["wikitext2_mlm_lion_s"](),
    format=TextFormat.of(load_tokenizer(BYTES)),
    class_names=(),
    examples=1,
    environments=(),
)


def outcome_of(recipe, row):
    """Return the outcome of one seed with metrics that are given in percent."""
    runs = {}
    for task, metrics in row.items():
        numbers = {name: value / 100 for name, value in metrics.items()} | {"loss": 1.0}
        result = RunResult(
            folder=Path(), evaluation=Evaluation(metrics=numbers, arrays={}), steps=1
        )
        runs[task] = (FinishedRun(manifest=MANIFEST, result=result, records=[]),)
    return GlueOutcome(checkpoint="mlm", recipe=recipe, runs=runs)


@pytest.mark.parametrize(
    ("recipe", "row", "average", "averaged"),
    [
        ("lightnet", LIGHTNET_ROW, 79.9, "9 columns"),
        ("m2_base", LION_ROW, 82.25, "8 tasks"),
    ],
)
def test_an_average_is_that_of_the_papers_table(recipe, row, average, averaged):
    outcome = outcome_of(recipe, row)
    digits = 1 if recipe == "lightnet" else 2
    assert round(100 * outcome.average().mean, digits) == average
    assert outcome.averaged == outcome.to_dict()["averaged"] == averaged


def test_each_column_of_lightnets_table_is_in_the_row_of_its_metric():
    rows = table_rows(outcome_of("lightnet", LIGHTNET_ROW))
    scores = [(task, score) for task, _, _, score in rows]
    assert scores[:2] == [("MNLI", "83.30"), ("", "83.50")]
    assert scores[3:5] == [("QQP", ""), ("", "87.70")]
    assert scores[-1] == ("average of 9 columns", "79.94")


def test_decoupled_decay_is_scaled_only_by_the_schedule():
    config = TrainingConfig(learning_rate=0.2, weight_decay=0.3, decoupled_weight_decay=True)
    model = nn.Linear(2, 2, bias=False)
    before = model.weight.detach().clone()
    optimizer = build_optimizer(model, config)
    optimizer.param_groups[0]["lr"] = 0.05  # a quarter of the highest
    gradient = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    model.weight.grad = gradient.clone()
    optimizer.step()
    first_step = gradient / (gradient.abs() + config.eps)  # of both corrected means
    expected = before - 0.25 * 0.3 * before - 0.05 * first_step
    torch.testing.assert_close(model.weight.detach(), expected)


def test_the_papers_pretraining_decays_decoupled():
    recipes = [name for name in LANGUAGE if name.startswith("c4_")]
    assert len(recipes) == 10
    assert all(LANGUAGE[name]().training.decoupled_weight_decay for name in recipes)
    assert not any(LANGUAGE[name]().data.packing for name in recipes)


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
    onescan.experiments.training.train(pretraining(folder), folder / "mlm")
    write_ruled(folder / "tables", "CoLA", "MNLI", "STS-B")
    return folder


def command(folder, *words):
    tables, out = str(folder / "tables"), str(folder / "out")
    return ["glue", str(folder / "mlm"), "--path", tables, "--out", out, *QUICK, *words]


@pytest.fixture(scope="module")
def trained(folder):
    """The output folder of two seeds of two tasks, one of which starts from a third."""
    assert main(command(folder, "--tasks", "cola,stsb", *SEEDS)) == 0
    return folder / "out"


@pytest.mark.slow
def test_the_command_learns_tables_and_writes_a_summary(trained, folder):
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["seeds"] == [0, 1]
    assert summary["recipe"] == "modified"
    assert summary["from_scratch"] is False
    assert list(summary["tasks"]) == ["cola", "stsb"]
    correlations = summary["tasks"]["cola"]["matthews_correlation"]["values"]
    assert min(correlations) > 0.5  # chance is 0
    assert min(summary["tasks"]["stsb"]["spearman"]["values"]) > 0.5
    stored = onescan.load(trained / "cola/seed-1").metrics["matthews_correlation"]
    assert correlations[1] == stored
    stsb = summary["tasks"]["stsb"]
    both = (stsb["pearson"]["values"][0] + stsb["spearman"]["values"][0]) / 2
    assert stsb["score"]["values"][0] == pytest.approx(both)
    assert summary["average"]["values"][0] == pytest.approx((correlations[0] + both) / 2)
    low, high = sorted(correlations)
    spread = summary["tasks"]["cola"]["matthews_correlation"]["spread"]
    assert spread == pytest.approx((high - low) / math.sqrt(2))


@pytest.mark.slow
def test_some_tasks_start_from_the_mnli_model(trained, folder):
    starts = {
        task: read_manifest(trained / task / "seed-1").run.init_from for task in ("cola", "stsb")
    }
    assert starts == {"cola": str(folder / "mlm"), "stsb": str(trained / "mnli/seed-1")}
    sizes = {
        task: onescan.load(trained / task / "seed-0").model.config for task in ("mnli", "stsb")
    }
    assert {task: config.num_classes for task, config in sizes.items()} == {"mnli": 3, "stsb": 1}
    assert sizes["stsb"].segment_types == 2


@pytest.mark.slow
def test_a_model_without_segments_learns_pairs(folder, tmp_path):
    onescan.experiments.training.train(pretraining(tmp_path, segment_types=0), tmp_path / "mlm")
    words = ["--tasks", "stsb", "--no-from-mnli", *QUICK, "--out", str(tmp_path / "out")]
    tables = ["--path", str(folder / "tables")]
    assert main(["glue", str(tmp_path / "mlm"), *tables, *words]) == 0
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert min(summary["tasks"]["stsb"]["spearman"]["values"]) > 0.5
    assert main(["evaluate", str(tmp_path / "out/stsb/seed-0")]) == 0


@pytest.mark.slow
def test_finished_runs_are_not_trained_again(trained, folder, capsys):
    assert main(command(folder, "--tasks", "stsb", "cola", *SEEDS)) == 0
    out = capsys.readouterr().out
    assert out.count("already finished") == 6
    assert "training on mnli first" in out
    lines = out[out.index("task  ") :].splitlines()
    assert lines[0].split() == ["task", "metric", "value", "score"]
    assert [line.split()[0] for line in lines[1:5]] == ["CoLA", "STS-B", "spearman", "average"]
    assert "\u00b1" in lines[1]


@pytest.mark.slow
def test_a_fine_tuned_run_is_evaluated_again(trained, capsys):
    assert main(["evaluate", str(trained / "stsb/seed-0")]) == 0
    out = capsys.readouterr().out
    expected = onescan.load(trained / "stsb/seed-0").metrics
    assert f"pearson   {expected['pearson']:.4f}" in out


@pytest.mark.slow
def test_pages_have_scores_settings_and_errors(trained):
    html = (trained / "report.html").read_text()
    assert_loads_nothing(html)
    page = Page(html)
    rows = table(page, "task")
    assert [row[0] for row in rows] == ["task", "CoLA", "STS-B", "", "average of 2 tasks"]
    assert "recipe Modified" in page.text
    average = json.loads((trained / "summary.json").read_text())["average"]
    assert rows[-1][-1] == f"{100 * average['mean']:.2f} \u00b1 {100 * average['spread']:.2f}"
    assert html.count("<svg") == 2
    settings = next(rows for rows in page.cells if "learning rate" in rows[0])
    assert settings[2][0] == "STS-B"
    assert settings[2][1].endswith("mnli/seed-0")
    about = Page((trained / "stsb/report.html").read_text())
    assert "Test spearman" in about.text
    mistakes = table(about, "texts")
    assert len(mistakes) == 13
    assert all(cells[0].startswith("of it \u2014 ") for cells in mistakes[1:])
    assert "Largest errors" in Page((trained / "cola/report.html").read_text()).text


@pytest.mark.slow
def test_the_best_of_several_rates_is_reported_as_chosen_on_the_dev_set(folder, tmp_path, capsys):
    words = ["glue", str(folder / "mlm"), "--path", str(folder / "tables"), "--tasks", "stsb"]
    words += ["--recipe", "lightnet", "--epochs", "1", "--length", "32", "--precision", "float32"]
    assert main([*words, "--machine.trackers", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "best of 4 learning rates (5e-05, 4e-05, 3e-05, 2e-05)" in out
    assert "optimistic" in out
    assert {run.name for run in (tmp_path / "stsb").iterdir() if run.is_dir()} == {
        *("lr-5e-05", "lr-4e-05", "lr-3e-05", "lr-2e-05")
    }
    summary = json.loads((tmp_path / "summary.json").read_text())
    rates = summary["learning_rates"]["stsb"]
    scores = {rate: score["mean"] for rate, score in rates["scores"].items()}
    chosen = f"{rates['chosen_on_dev_set']:g}"
    assert scores[chosen] == max(scores.values()) == summary["tasks"]["stsb"]["score"]["mean"]
    run = read_manifest(tmp_path / f"stsb/lr-{chosen}/seed-0").run
    assert run.training.learning_rate == rates["chosen_on_dev_set"]
    assert run.init_from == str(folder / "mlm")  # not from MNLI
    assert run.model.dropout == 0.1
    page = Page((tmp_path / "report.html").read_text())
    assert "LightNet (Sec. 6.1 of its paper)" in page.text
    assert "optimistic" in page.text
    by_rate = next(rows for rows in page.cells if rows[0][0] == "task" and "5e-05" in rows[0])
    assert [cells[0] for cells in by_rate[1:]] == ["STS-B"]


@pytest.mark.slow
def test_without_mnli_all_tasks_start_from_the_checkpoint(folder, tmp_path, capsys):
    write_ruled(tmp_path, "RTE", train=8, dev=4)
    words = ["glue", str(folder / "mlm"), "--path", str(tmp_path), "--out", str(tmp_path / "out")]
    words += [*QUICK, "--tasks", "rte"]
    assert main([*words, "--epochs", "1", "--recipe", "hydra"]) == 0
    assert "no MNLI data" in capsys.readouterr().out
    run = read_manifest(tmp_path / "out/rte/seed-0").run
    assert run.init_from == str(folder / "mlm")
    assert run.training.decoupled_weight_decay is False
    assert run.training.weight_decay == GLUE["hydra"].training("rte").weight_decay
    assert not (tmp_path / "out/mnli").exists()


def test_from_scratch_uses_only_the_shape_of_the_checkpoint(folder, tmp_path):
    options = GlueRunsConfig(tasks=("rte", "cola"), from_scratch=True, path=str(folder / "tables"))
    runs = plan_glue(options, str(folder / "mlm"), tmp_path)
    assert [(run.task, run.config.init_from) for run in runs] == [("rte", None), ("cola", None)]
    given = plan_glue(replace(options, from_scratch=False), str(folder / "mlm"), tmp_path)
    assert [run.task for run in given] == ["mnli", "rte", "cola"]
    assert runs[-1].config.model == given[-1].config.model
    assert runs[-1].config.data.tokenizer == given[-1].config.data.tokenizer


def test_from_scratch_does_not_read_weights(folder, tmp_path):
    shutil.copytree(folder / "mlm", tmp_path / "mlm")
    (tmp_path / "mlm/model.safetensors").write_bytes(b"damaged")
    options = GlueRunsConfig(tasks=("cola",), from_scratch=True, path=str(folder / "tables"))
    (run,) = plan_glue(options, str(tmp_path / "mlm"), tmp_path / "out")
    assert run.config.model.width == TINY_MLM.width


@pytest.mark.slow
def test_results_from_scratch_say_so(folder, tmp_path):
    words = ["glue", str(folder / "mlm"), "--path", str(folder / "tables"), "--out", str(tmp_path)]
    assert main([*words, *QUICK, "--tasks", "cola", "--epochs", "1", "--from-scratch"]) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["from_scratch"] is True
    page = Page((tmp_path / "report.html").read_text())
    assert "mlm without pre-training on 1 task" in page.text
    assert "fine-tuned" not in page.text
    assert "and random weights, trained on 1 task of GLUE" in page.text
    settings = next(rows for rows in page.cells if "initial weights" in rows[0])
    assert settings[1][1] == "random"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "colla"], "task 'colla' is unknown (perhaps you meant 'cola')"),
        (["--recipe", "modifed"], "recipe 'modifed' is unknown (perhaps you meant 'modified')"),
        (["--tasks", "cola,cola"], "tasks contains 'cola' more than once"),
        (["--tasks", ","], "tasks is empty"),
        (["--tasks", "cola", "--seeds", "1", "1"], "seeds contains 1 more than once"),
        (["--tasks", "cola", "--length", "2"], "data.length is 2, expected 3 or more"),
        (["--tasks", "cola", "--epochs", "0"], "training.epochs is 0"),
        (["--tasks", "qqp"], "has no tables of QQP"),
    ],
)
def test_mistakes_are_reported_in_one_line(words, message, folder, tmp_path, capsys):
    assert main([*command(folder, *words), "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


def test_a_broken_table_is_reported_before_training(folder, tmp_path, capsys):
    tables = write_ruled(tmp_path / "tables", "CoLA", "STS-B", train=8, dev=4)
    write_table(tables / "STS-B/dev.tsv", "STS-B", [["short"]])
    words = command(folder, "--tasks", "cola,stsb", "--no-from-mnli", "--path", str(tables))
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    assert "STS-B/dev.tsv, line 2: 1 cell separated by tabs" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_another_run_in_a_later_folder_is_reported_before_training(
    trained, folder, tmp_path, capsys
):
    words = [*command(folder, "--tasks", "cola"), "--out", str(tmp_path), "--seeds", "5", "0"]
    shutil.copytree(trained / "cola/seed-0", tmp_path / "cola/seed-0")
    assert main([*words, "--learning-rate", "0.1"]) == 2
    error = capsys.readouterr().err
    assert (
        "holds another run: training.learning_rate is 0.01 in the folder and 0.1 in this run"
        in error
    )
    assert not (tmp_path / "cola/seed-5").exists()


@pytest.mark.slow
def test_models_that_are_not_masked_language_models_are_rejected(trained, folder, tmp_path, capsys):
    words = ["--tasks", "cola", "--path", str(folder / "tables")]
    assert main(["glue", str(trained / "cola/seed-0"), *words]) == 2
    assert "SequenceClassifier, expected" in capsys.readouterr().err
    assert main(["glue", str(tmp_path / "nothing"), *words]) == 2
    assert "there is no run at" in capsys.readouterr().err
