"""Fine-tuning on GLUE tasks: a table for the terminal, summary.json, and a page."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from onescan.experiments.data.glue import PROBLEMS, GlueTask
from onescan.experiments.evaluation.config import short_name
from onescan.experiments.recipes.glue import GLUE
from onescan.experiments.report.format import duration, metric_name, plain_table
from onescan.experiments.report.page import (
    Card,
    Figure,
    Page,
    Section,
    best,
    check_report_path,
    fragment,
)
from onescan.experiments.report.plots import Line, dot_chart, line_chart, seed_line, series
from onescan.experiments.report.runs import Column, FinishedRun, SeedValues, check_seeds, read_run
from onescan.experiments.tasks.glue import LOSS, Scoring, glue_columns
from onescan.experiments.training.config import RunResult
from onescan.experiments.training.folder import write_json
from onescan.messages import plural

SUMMARY, PAGE = "summary.json", "report.html"
HEADS = ("task", "metric", "value", "score")
NOTE = "Scores on the published dev sets, after the last training step, times 100."
SPREAD = "The standard deviation over seeds follows \N{PLUS-MINUS SIGN}."
NOTES: Mapping[Scoring, str] = MappingProxyType(
    {
        "tasks": "A score is the mean of a task's metrics, and the average is the mean of the "
        "scores.",
        "columns": "Scores are the columns of LightNet's Table 2: both accuracies of MNLI, F1 for "
        "QQP and MRPC, and Pearson's correlation for STS-B. The average is their mean.",
    }
)
SETTING_HEADS = (
    *("task", "initial weights", "examples", "learning rate", "weight decay", "kind of decay"),
    *("epochs", "batch size", "max. tokens"),
)


@dataclass(frozen=True, kw_only=True)
class GlueOutcome:
    """Finished runs of several tasks, all with the same seeds."""

    checkpoint: str
    """Pretrained model, or only its shape if the runs start from scratch. Some tasks start from its
    MNLI fine-tuning."""
    recipe: str
    runs: Mapping[GlueTask, tuple[FinishedRun, ...]]
    """One run for each seed, by task; with the best learning rate, if several were tried."""
    tried: Mapping[GlueTask, Mapping[float, SeedValues]] = field(default_factory=dict)
    """Scores with each learning rate, by task; empty if only one was tried."""

    @property
    def seeds(self) -> list[int]:
        """Seeds, in the order of all values."""
        return [run.seed for run in next(iter(self.runs.values()))]

    @property
    def from_scratch(self) -> bool:
        """Whether all tasks start from random weights."""
        return all(
            run.manifest.run.init_from is None for runs in self.runs.values() for run in runs
        )

    def metrics(self, task: GlueTask) -> dict[str, SeedValues]:
        """Return a task's metrics, without the loss."""
        results = [run.result.metrics for run in self.runs[task]]
        names = [name for name in results[0] if name != LOSS]
        return {name: SeedValues(tuple(each[name] for each in results)) for name in names}

    @property
    def scoring(self) -> Scoring:
        """What the average is the mean of."""
        return GLUE[self.recipe].scoring

    def columns(self, task: GlueTask) -> dict[str, SeedValues]:
        """Return what a task contributes to the average, by the metric in whose row it is shown."""
        seeds = [glue_columns(run.result.metrics, self.scoring) for run in self.runs[task]]
        return {name: SeedValues(tuple(each[name] for each in seeds)) for name in seeds[0]}

    def score(self, task: GlueTask) -> SeedValues:
        """Return the score of a task: the mean of its columns."""
        return scores_of((run.result for run in self.runs[task]), self.scoring)

    def average(self) -> SeedValues:
        """Return the mean of all columns, for each seed."""
        columns = (each.values for task in self.runs for each in self.columns(task).values())
        return SeedValues(tuple(map(statistics.mean, zip(*columns, strict=True))))

    @property
    def averaged(self) -> str:
        """What the average is over, such as "8 tasks" or "9 columns"."""
        number = sum(len(self.columns(task)) for task in self.runs)
        return plural(number, self.scoring.removesuffix("s"))

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers as JSON types."""
        tasks = {
            task: {name: _to_dict(each) for name, each in self.metrics(task).items()}
            | {"score": _to_dict(self.score(task))}
            for task in self.runs
        }
        return {
            "checkpoint": self.checkpoint,
            "from_scratch": self.from_scratch,
            "recipe": self.recipe,
            "seeds": self.seeds,
            "tasks": tasks,
            "average": _to_dict(self.average()),
            "averaged": self.averaged,
        } | ({"learning_rates": self._rates_to_dict()} if self.tried else {})

    def _rates_to_dict(self) -> dict[str, Any]:
        return {
            task: {
                "chosen_on_dev_set": self.runs[task][0].manifest.run.training.learning_rate,
                "scores": {f"{rate:g}": _to_dict(score) for rate, score in scores.items()},
            }
            for task, scores in self.tried.items()
        }


def _to_dict(number: SeedValues) -> dict[str, Any]:
    return {"mean": number.mean, "spread": number.std, "values": list(number.values)}


def scores_of(results: Iterable[RunResult], scoring: Scoring) -> SeedValues:
    """Return a task's score for each seed."""
    return SeedValues(tuple(_score(result.metrics, scoring) for result in results))


def _score(metrics: dict[str, float], scoring: Scoring) -> float:
    return statistics.mean(glue_columns(metrics, scoring).values())


def best_rate(results: Mapping[float, Sequence[RunResult]], scoring: Scoring = "tasks") -> float:
    """Return the learning rate with the highest mean score; the first of several equal ones."""
    return max(results, key=lambda rate: scores_of(results[rate], scoring).mean)


def read_glue(
    results: Mapping[GlueTask, Iterable[RunResult]],
    *,
    checkpoint: str,
    recipe: str,
    tried: Mapping[GlueTask, Mapping[float, Sequence[RunResult]]] = MappingProxyType({}),
) -> GlueOutcome:
    """Read finished runs from their folders.

    Args:
        results: One result for each seed, by task.
        checkpoint: Pretrained model that was fine-tuned, or whose shape was used.
        recipe: Name in `onescan.experiments.recipes.glue.GLUE`.
        tried: Results with each learning rate, by task, if several were tried.

    Raises:
        ValueError: If the runs of a task are not different seeds of one recipe.
    """
    runs = {task: tuple(map(read_run, results[task])) for task in PROBLEMS if task in results}
    for each in runs.values():
        check_seeds(each)
    scoring = GLUE[recipe].scoring
    scores = {
        task: {rate: scores_of(each, scoring) for rate, each in tried[task].items()}
        for task in PROBLEMS
        if task in tried
    }
    return GlueOutcome(checkpoint=checkpoint, recipe=recipe, runs=runs, tried=scores)


def glue_table(outcome: GlueOutcome) -> str:
    """Format every task's metrics and score, and their average, as plain text."""
    table = plain_table([HEADS, *table_rows(outcome)], left=2)
    return f"{table}\n{chosen_note(outcome)}" if outcome.tried else table


def chosen_note(outcome: GlueOutcome) -> str:
    """Describe how the learning rates were chosen, and how this affects the scores."""
    rates = sorted({rate for scores in outcome.tried.values() for rate in scores}, reverse=True)
    return (
        f"Scores are the best of {len(rates)} learning rates "
        f"({', '.join(f'{rate:g}' for rate in rates)}), chosen for each task on the dev set. "
        "The same set is scored, so the scores are optimistic."
    )


def table_rows(outcome: GlueOutcome) -> list[tuple[str, str, str, str]]:
    """Return a row for each metric, and the average last.

    The first row of a task contains its name. Its score is in the first row too, or, if the average
    is over columns, each score is in the row of its metric.
    """
    rows = []
    for task in outcome.runs:
        title, columns = PROBLEMS[task].title, outcome.columns(task)
        for name, value in outcome.metrics(task).items():
            score = columns[name].format(2, scale=100) if name in columns else ""
            rows.append((title, metric_name(name), value.format(4), score))
            title = ""
    average = outcome.average().format(2, scale=100)
    return [*rows, (f"average of {outcome.averaged}", "", "", average)]


def write_glue(outcome: GlueOutcome, folder: Path) -> Path:
    """Write summary.json and a self-contained page.

    Returns:
        The page's path.

    Raises:
        ValueError: If another file exists at the page's path.
        OSError: If a file cannot be written. Existing files stay intact.
    """
    tasks, seeds = plural(len(outcome.runs), "task"), plural(len(outcome.seeds), "seed")
    *rows, (*average, score) = table_rows(outcome)
    scratch, trained = "", "A masked language model, fine-tuned"
    if outcome.from_scratch:
        scratch = " without pre-training"
        trained = f"A model with the shape of {outcome.checkpoint} and random weights, trained"
    check_report_path(folder / PAGE)
    write_json(folder / SUMMARY, outcome.to_dict())
    page = Page(
        kind="GLUE",
        title=f"{short_name(outcome.checkpoint)}{scratch} on {tasks}",
        lead=f"{trained} on {tasks} of GLUE with {seeds}, by the recipe "
        f"{GLUE[outcome.recipe].title} ({GLUE[outcome.recipe].source})."
        + (f" {chosen_note(outcome)}" if outcome.tried else ""),
        cards=_cards(outcome),
        table=fragment("table", [HEADS, *rows, [*average, best(score)]]),
        note=f"{NOTE} {NOTES[outcome.scoring]} {SPREAD}",
        sections=[_scores(outcome), _settings(outcome)],
    )
    return page.write(folder / PAGE)


def scores_over_training(run: FinishedRun, scoring: Scoring) -> Column:
    """Return the score of each evaluation, in the order of steps."""
    columns = {name: run.column("test", name) for name in run.result.metrics}
    evaluations = zip(*columns.values(), strict=True)
    metrics = (dict(zip(columns, each, strict=True)) for each in evaluations)
    return np.array([_score(each, scoring) for each in metrics])


def _cards(outcome: GlueOutcome) -> list[Card]:
    average, seeds = outcome.average(), outcome.seeds
    std = "" if average.std is None else f"{100 * average.std:.2f}"
    over = f"mean and standard deviation of {len(seeds)} seeds" if std else "one seed"
    titles = ", ".join(PROBLEMS[task].title for task in outcome.runs)
    seconds = sum(statistics.mean(run.seconds for run in runs) for runs in outcome.runs.values())
    return [
        Card(f"{100 * average.mean:.2f}", "average score", over, std),
        Card(str(len(outcome.runs)), "tasks", titles),
        Card(str(len(seeds)), "seeds", ", ".join(map(str, seeds))),
        Card(duration(seconds), "training", "of all tasks, per seed, without evaluation"),
    ]


def _scores(outcome: GlueOutcome) -> Section:
    titles = [PROBLEMS[task].title for task in outcome.runs]
    scores = 100 * np.array([outcome.score(task).values for task in outcome.runs]).T
    dots = dot_chart(
        titles, scores, x="score", format="{:.1f}".format, format_x="{:g}".format, end=100
    )
    curves = line_chart(
        [_line(outcome, task, series(i)) for i, task in enumerate(outcome.runs)],
        x="fraction of training",
        y="score",
        format_x="{:.0%}".format,
    )
    several = len(outcome.seeds) > 1
    which = "Small dots are single seeds, large dots their mean." if several else "One seed."
    band = " Line: mean over seeds; band: lowest to highest seed." * several
    return Section(
        "Scores",
        [
            Figure(
                "Score of each task",
                dots,
                f"Score of each task, times 100. {which} Guessing scores 0 on CoLA and "
                "STS-B, and more on the others. The axis does not start at 0.",
            ),
            Figure(
                "Score over training",
                curves,
                f"Score at each evaluation, over the fraction of the task's own training.{band} A "
                "curve that still rises at the end suggests training longer.",
            ),
        ],
    )


def _line(outcome: GlueOutcome, task: GlueTask, color: str) -> Line:
    epochs = outcome.runs[task][0].column("test", "epoch")
    curves = [
        (epochs / epochs[-1], 100 * scores_over_training(run, outcome.scoring))
        for run in outcome.runs[task]
    ]
    return seed_line(PROBLEMS[task].title, color, curves, "{:.1f}".format)


def _settings(outcome: GlueOutcome) -> Section:
    rows = [SETTING_HEADS]
    for task, (first, *_) in outcome.runs.items():
        training = first.manifest.run.training
        rows.append(
            (
                PROBLEMS[task].title,
                first.manifest.run.init_from or "random",
                f"{first.manifest.examples:,}",
                f"{training.learning_rate:g}",
                f"{training.weight_decay:g}",
                "decoupled" if training.decoupled_weight_decay else "AdamW",
                str(training.epochs),
                str(training.batch_size),
                str(getattr(first.manifest.format, "length", "")),
            )
        )
    caption = (
        "Settings of the first seed. The complete settings are in each run's config.json, and the "
        "folder of each task has its own report. Decoupled decay is not multiplied by the "
        "learning rate."
    )
    table = fragment("table", rows)
    figures = [Figure("Training of each task", table, caption, columns=3)]
    return Section("Settings", figures + _rates(outcome))


def _rates(outcome: GlueOutcome) -> list[Figure]:
    """Show the score with each learning rate, if several were tried."""
    if not outcome.tried:
        return []
    rates = list(next(iter(outcome.tried.values())))
    rows = [("task", *(f"{rate:g}" for rate in rates))]
    for task, scores in outcome.tried.items():
        rows.append((PROBLEMS[task].title, *(scores[r].format(2, scale=100) for r in rates)))
    table = fragment("table", rows)
    caption = "Score of each task by peak learning rate. The best of each row is reported above."
    return [Figure("Score by learning rate", table, caption, columns=3)]
