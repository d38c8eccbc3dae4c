"""Write the page of the study, its figures and the table of claims, using only the result files."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import study_queue as queue
from matplotlib.figure import Figure
from study_queue import MINUTE, Claim, Result, Results, Suite, verdict_of

PAGE, IMAGES, PREFIX = "study.md", "images", "study_"
OVERVIEW = "results.md"  # also shows the table of claims, between two comments
BEGIN, END = "<!-- claims: written by `benchmarks/study.py table` -->", "<!-- end of claims -->"
METRICS = {"accuracy": "accuracy", "loss": "loss in nats per byte"}
INTRODUCTION = """\
# Study of the papers' claims

Do the papers' claims hold for small models trained on a CPU? Each claim compares two models that
are trained on the same data, with the same batch size and the same number of steps. Their
parameter counts differ by at most {tolerance:.0%}. Each family of models uses the best of three
or more learning rates, chosen by runs that have a separate seed and are evaluated on held-out
training data. As long as the best rate is the lowest or the highest, another rate is tried beyond
it, at most twice. The rate is chosen for the full model, and its ablations use the same rate. In
addition, some models are compared at equal training time.

Results are given as mean ± standard deviation over seeds, and differences as mean ± standard error,
in percentage points of accuracy or in nats per byte. Differences are paired by seed, and positive
differences support the claim. A claim is **confirmed** if the mean difference is positive and more
than twice its standard error over three seeds, **refuted** if it is negative by more than that,
and **undecided** otherwise. The third seed is trained only if the first two differences have the
same sign, because otherwise it cannot decide the claim. If a claim says that one model is as good
as another, one percentage point is added to the differences before the verdict, but not in the
table. If two models are in fact equally good, this rule still confirms or refutes the claim with a
probability of about 18%.

The papers' accuracies are in percent, on ImageNet unless another data set is named. The figures
of this study in the table of claims are over the seeds that both models of a claim were trained
with.

The first command below trains the runs and writes one result file for each to `docs/study`. The
second writes this page and its figures from these files.

    PYTHONPATH=. python benchmarks/study.py run --data FOLDER
    PYTHONPATH=. python benchmarks/study.py table

Finished runs: {count} of {total}, not counting third seeds that may be added later. The finished
runs took {hours:.1f} CPU hours, each on one CPU thread ({machines}).
"""

MISSING = "These runs have no result yet. The number of runs is in parentheses:"


def write_page(results: Results, docs: Path) -> None:
    """Write the page and its figures into the documentation folder, and remove old figures.

    The table of claims in the overview of all results is replaced.
    """
    mpl.rcParams.update({"svg.hashsalt": "onescan", "svg.fonttype": "path", "font.size": 10})
    table = claims(results)
    parts, figures = [introduction(results), "## Claims", "", *table, ""], {}
    before, after = (docs / OVERVIEW).read_text(encoding="utf-8").split(BEGIN)
    overview = [before + BEGIN, "", *table, "", END + after.split(END)[1]]
    for name in queue.SUITES:
        runs = [result for result in results.values() if result.suite == name]
        trained = [result for result in runs if not result.is_sweep]
        if trained:
            parts += section(name, trained)
        if any(not result.error for result in trained):
            figures[f"{PREFIX}{name}.svg"] = plot(name, trained)
            title = queue.find_suite(name).title
            parts += [f"![{title}: results of all models]({IMAGES}/{PREFIX}{name}.svg)", ""]
        if diverged := [result.name for result in trained if result.error]:
            parts += [f"These runs diverged, and are not in the figure: {', '.join(diverged)}.", ""]
        parts += sweeps(name, runs)
    parts += missing(results)
    images = docs / IMAGES
    images.mkdir(parents=True, exist_ok=True)
    for file in images.glob(f"{PREFIX}*.svg"):
        file.unlink()
    for file_name, figure in figures.items():
        figure.savefig(images / file_name, metadata={"Date": None}, facecolor="white")
    (docs / PAGE).write_text("\n".join(parts), encoding="utf-8")
    (docs / OVERVIEW).write_text("\n".join(overview), encoding="utf-8")


def introduction(results: Results) -> str:
    """Return the introduction of the page."""
    names = {result.environment["cpu"] for result in results.values()}
    machines = sorted(name.replace("(R)", "").removesuffix(" Processor") for name in names)
    return INTRODUCTION.format(
        tolerance=queue.TOLERANCE,
        count=len(results),
        total=len(queue.planned_runs(results)),
        hours=sum(result.cpu_seconds for result in results.values()) / 3600,
        machines=" or ".join(machines) or "no machine yet",
    )


def claims(results: Results) -> list[str]:
    """Return the lines of the table of all claims and their verdicts, those not run yet last."""
    rows = [["claim", "paper", "this study", "difference", "seeds", "verdict"]]
    not_run = []
    for claim in queue.CLAIMS:
        differences = queue.differences(claim, results)
        if not differences:
            not_run.append([claim.text, claim.reported, "", "", "0", "not run yet"])
            continue
        verdict = verdict_of(list(differences.values()))
        results_of_both = [
            [results[f"{claim.suite}-{name}-{seed}"] for seed in differences]
            for name in (claim.better, claim.worse)
        ]
        check_equal(claim, *results_of_both)
        metric = queue.find_suite(claim.suite).metric
        measured = " vs. ".join(format_metric(metric, runs) for runs in results_of_both)
        formatted = format_difference(metric, verdict.mean - claim.margin, verdict.error)
        seeds = str(verdict.seeds)
        rows.append(
            [claim.text, claim.reported, measured, formatted, seeds, f"**{verdict.outcome}**"]
        )
    return markdown(rows + not_run)


def check_equal(claim: Claim, better: Sequence[Result], worse: Sequence[Result]) -> None:
    """Check that compared runs have equal steps and read the same data.

    Raises:
        ValueError: If they do not. The message names both runs.
    """
    for a, b in zip(better, worse, strict=True):
        if a.data != b.data or not (a.steps == b.steps or a.error or b.error):
            raise ValueError(
                f"{a.name} and {b.name} differ in steps or data, so they cannot be compared for "
                f"the claim {claim.text!r}: train them again"
            )


def section(name: str, runs: Sequence[Result]) -> list[str]:
    """Return the section of a suite: its description and a table of all models."""
    suite = queue.find_suite(name)
    header = [
        "model",
        f"test {METRICS[suite.metric]}",
        "by seed",
        "parameters",
        "learning rate",
        "training steps" if suite.equal_time else "CPU minutes per run",
    ]
    lengths = [str(length) for length in suite.lengths]
    rows = [[*header, *(f"perplexity at T = {length}" for length in lengths)]]
    for title, members in by_title(suite, runs):
        minutes = statistics.fmean(result.cpu_seconds for result in members) / MINUTE
        cost = f"{members[0].steps:,}" if suite.equal_time else f"{minutes:.1f}"
        by_seed = ", ".join(format_metric(suite.metric, [result], unit="") for result in members)
        cells = [title, format_metric(suite.metric, members), by_seed, f"{members[0].parameters:,}"]
        cells += [f"{members[0].learning_rate:g}", cost]
        for length in lengths:
            perplexities = [
                result.perplexities[length] for result in members if length in result.perplexities
            ]
            cells.append(f"{statistics.fmean(perplexities):.2f}" if perplexities else "")
        rows.append(cells)
    return [f"## {suite.title}", "", suite.description, "", *markdown(rows), ""]


def sweeps(name: str, runs: Sequence[Result]) -> list[str]:
    """Return the table of the runs that chose the learning rates of a suite."""
    suite = queue.find_suite(name)
    by_family: dict[str, dict[float, Result]] = defaultdict(dict)
    for result in runs:
        if result.is_sweep:
            by_family[result.family][result.learning_rate] = result
    if not by_family:
        return []
    rates = sorted({rate for by_rate in by_family.values() for rate in by_rate})
    rows = [["model", *(f"{rate:g}" for rate in rates)]]
    for family, by_rate in by_family.items():
        title = suite.variants[next(iter(by_rate.values())).variant].title
        best = queue.chosen_rate(name, family, {result.name: result for result in runs})
        cells = [
            format_metric(suite.metric, [by_rate[rate]]) if rate in by_rate else ""
            for rate in rates
        ]
        rows.append(
            [
                title,
                *(
                    f"**{cell}**" if rate == best else cell
                    for rate, cell in zip(rates, cells, strict=True)
                ),
            ]
        )
    caption = f"{METRICS[suite.metric].capitalize()} on held-out training data, by learning rate:"
    return [f"### {suite.title}: learning rate sweeps", "", caption, "", *markdown(rows), ""]


def missing(results: Results) -> list[str]:
    """Return the section that lists the runs without a result."""
    lines = []
    for name in queue.SUITES:
        runs = queue.planned_runs(results)
        left = [run for run in runs if run.suite == name and run.name not in results]
        counts = Counter((run.is_sweep, run.variant) for run in left)
        variants = queue.find_suite(name).variants
        for is_sweep, what in ((False, "runs"), (True, "runs of learning rate sweeps")):
            models = [
                f"{variant.title} ({counts[is_sweep, key]})"
                for key, variant in variants.items()
                if counts[is_sweep, key]
            ]
            if models:
                lines.append(f"- {queue.find_suite(name).title}, {what}: {'; '.join(models)}")
    return ["## Missing runs", "", MISSING, "", *lines, ""] if lines else []


def by_title(suite: Suite, runs: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    """Yield the title of each model of a suite that has results, and its results by seed."""
    for name, variant in suite.variants.items():
        members = [result for result in runs if result.variant == name and not result.is_sweep]
        if members:
            yield variant.title, sorted(members, key=lambda result: result.seed)


def format_metric(metric: str, runs: Sequence[Result], unit: str = "%") -> str:
    """Format the mean and standard deviation of a metric over runs; accuracies in percent."""
    if any(result.error for result in runs):
        return "diverged"
    percent = metric == "accuracy"
    scale, digits, unit = (100, 2, unit) if percent else (1, 3, "")
    values = [scale * result.final(metric) for result in runs]
    mean = f"{statistics.fmean(values):.{digits}f}"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean}{unit}{spread}"


def format_difference(metric: str, mean: float, error: float) -> str:
    """Format a mean difference and its standard error; accuracies in percentage points."""
    scale, digits = (100, 2) if metric == "accuracy" else (1, 3)
    if not math.isfinite(mean):
        return ""
    spread = "" if math.isnan(error) else f" ± {scale * error:.{digits}f}"  # NaN for one seed
    return f"{scale * mean:+.{digits}f}{spread}"


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format a table in Markdown. The first row is the header."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


# Figures


def plot(name: str, runs: Sequence[Result]) -> Figure:
    """Plot the metric of each model, and perplexity over context length if it was measured.

    For suites that compare models at equal time, plot accuracy over time instead.
    """
    suite = queue.find_suite(name)
    finished = [result for result in runs if not result.error]
    if suite.equal_time:
        return plot_time(suite, finished)
    models = list(by_title(suite, finished))
    columns = 2 if suite.lengths else 1
    figure = Figure(figsize=(6 * columns, 1.2 + 0.35 * len(models)), layout="constrained")
    first, *others = figure.subplots(1, columns, squeeze=False)[0]
    plot_models(first, suite, models)
    for axes in others:
        plot_lengths(axes, models)
    return figure


def plot_models(axes: Any, suite: Suite, models: Sequence[tuple[str, list[Result]]]) -> None:
    """Draw one row per model, with a dot for each seed and a line for the mean."""
    scale = 100 if suite.metric == "accuracy" else 1
    for row, (_, members) in enumerate(models):
        values = [scale * result.final(suite.metric) for result in members]
        axes.plot(values, [row] * len(values), "o", color="C0", alpha=0.6)
        axes.plot([statistics.fmean(values)] * 2, [row - 0.3, row + 0.3], color="C0")
    axes.set_yticks(range(len(models)), [title for title, _ in models])
    axes.invert_yaxis()
    axes.set_xlabel("test accuracy (%)" if scale > 1 else "test loss (nats per byte)")
    axes.grid(alpha=0.3, axis="x")


def plot_lengths(axes: Any, models: Sequence[tuple[str, list[Result]]]) -> None:
    """Draw the mean perplexity of each model over context length."""
    for title, members in models:
        lengths = sorted(
            map(int, set.intersection(*(set(result.perplexities) for result in members)))
        )
        means = [
            statistics.fmean(result.perplexities[str(length)] for result in members)
            for length in lengths
        ]
        if means:
            axes.plot(lengths, means, "o-", label=title)
            axes.set(xscale="log", yscale="log")
    axes.set(xlabel="context length (bytes)", ylabel="perplexity")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)


def plot_time(suite: Suite, runs: Sequence[Result]) -> Figure:
    """Draw accuracy over training time, with one panel per image size and one line per run."""
    sides = sorted({result.config["data"]["size"] for result in runs})
    figure = Figure(figsize=(5 * len(sides), 3.6), layout="constrained")
    grid = figure.subplots(1, len(sides), squeeze=False, sharey=True)[0]
    colors = {
        family: f"C{i}" for i, family in enumerate(sorted({result.family for result in runs}))
    }
    for axes, side in zip(grid, sides, strict=True):
        of_this_size = [result for result in runs if result.config["data"]["size"] == side]
        for result in of_this_size:
            variant = suite.variants[result.variant]
            seconds = variant.step_seconds or math.nan
            minutes = [line["step"] * seconds / MINUTE for line in result.evaluations]
            accuracies = [100 * line["accuracy"] for line in result.evaluations]
            model, *_ = variant.title.split(",")
            axes.plot(
                minutes, accuracies, "o-", color=colors[result.family], label=model, markersize=3
            )
        handles, labels = axes.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        axes.legend(unique.values(), unique.keys(), frameon=False)
        axes.set(xlabel="training time (minutes)", title=f"{side} x {side} pixels")
        axes.grid(alpha=0.3)
    grid[0].set_ylabel("test accuracy (%)")
    return figure
