"""Finished runs of several recipes side by side: a table for the terminal, and a page."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Literal, NamedTuple

import numpy as np
from markupsafe import Markup

from onescan.checkpoint.run_folder import CONFIG
from onescan.experiments.report.format import (
    ACCURACY,
    HOUR,
    MINUTE,
    duration,
    large,
    memory,
    metric_name,
    metric_value,
    percent,
    plain_table,
)
from onescan.experiments.report.page import (
    Figure,
    Page,
    Section,
    best,
    check_report_path,
    fragment,
)
from onescan.experiments.report.plots import (
    SERIES,
    SMALLEST,
    Line,
    css_color,
    line_figure,
    seed_line,
    series,
    smoothed,
    thinned,
)
from onescan.experiments.report.runs import Column as Values
from onescan.experiments.report.runs import (
    FinishedRun,
    SeedValues,
    config_differences,
    has_training_accuracy,
    read_run,
)
from onescan.experiments.training.config import RunConfig
from onescan.experiments.training.folder import MACHINE
from onescan.experiments.training.logging import Split
from onescan.inference.loading import load
from onescan.messages import plural

NAME = "name"  # a recipe's name is not a setting
READING = frozenset(  # fields of data configs that change how images are read, not which
    {"channels", "image_size", "mean", "on_error", "shuffle_block", "std", "streaming"}
    | {"test_crop", "train_crop"}
)
INFERRED = frozenset(  # fields that usually follow from the data or from other settings
    {"channels", "fill", "image_size", "mean", "num_classes", "patch_size", "std", "vocab_size"}
)
ORDER = ("data", "training", "task", "init_from", "transfer", "model")  # of settings that differ
NAMED_BY = 3  # settings that distinguish recipes of the same name
ABSENT = "\N{EM DASH}"
STYLES = ("-", "--", ":")  # of lines, where colors repeat
FEW = 3  # use a smaller unit below this number of time units
LEAD = (
    "Finished runs side by side. Runs of a recipe that differ only in seed and machine share a row."
    " If a seed occurs twice, each machine has its own row."
)
NOTE = (
    "Seeds: their number and, in parentheses, their values. Test metrics are the mean and standard "
    "deviation over seeds; all other numbers are means over seeds. Examples/s is the throughput of "
    "the median training step. Training is the time of all training steps, without evaluations and "
    "checkpoints. Waiting is the share of this time spent waiting for data. Memory is the peak, of "
    "the GPU if there is one. Speed and memory are comparable only between equal machines. Bold "
    "marks the best value of a column if its lead exceeds the standard deviation over seeds; "
    "without a standard deviation, the lead must exceed 2%, for accuracies 2% of the error. "
    "Training time has a best value only if all runs took the same number of steps."
)
SETTINGS = (
    "Every setting in which any two recipes differ, by its path in the run's config.json. A dash "
    "means that a recipe has no such setting. Machine settings, devices and numbers of processes "
    "are listed only if they separate rows of one recipe."
)
RELEVANT = 0.02  # smaller differences, relative to the value, are not marked


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table: runs of one recipe with different seeds."""

    name: str
    index: int
    runs: tuple[FinishedRun, ...]
    parameters: int

    @property
    def config(self) -> RunConfig:
        """Config of the first run; the others differ from it only in their seed and machine."""
        return self.runs[0].manifest.run

    @property
    def folders(self) -> str:
        """The folders of the runs; the one that contains them if they are seeds in one folder."""
        folders = [run.result.folder for run in self.runs]
        parents = {folder.parent for folder in folders}
        are_seeds = all(folder.name.startswith("seed-") for folder in folders)
        if len(folders) > 1 and len(parents) == 1 and are_seeds:
            return str(*parents)
        return ", ".join(map(str, folders))

    @property
    def letter(self) -> str:
        """Label in charts: A to Z, then A2 and so on."""
        repetition, index = divmod(self.index, len(ascii_uppercase))
        return ascii_uppercase[index] + (str(repetition + 1) if repetition else "")

    @property
    def badge(self) -> Markup:
        """The letter on the color of the row's lines."""
        return Markup('<i class="badge" style="background:{}">{}</i>').format(
            css_color(series(self.index)), self.letter
        )


def comparison_table(runs: Sequence[str | Path]) -> str:
    """Format finished runs as a plain-text table with one row for each recipe.

    A last line warns if the recipes were trained on different data.

    Args:
        runs: Folders of finished runs, or folders that contain ``seed-*`` folders of such runs.
            Runs that differ only in their seed and machine share a row. If a seed occurs twice,
            each machine has its own row.

    Raises:
        ValueError: If a folder holds no run, a run is not finished, two runs are the same on the
            same machine, or the runs are of different tasks.
    """
    rows = read_rows(runs)
    columns = table_columns(rows)
    cells = [["", "seeds", *(column.head for column in columns)]]
    cells += [
        [row.name, str(len(row.runs)), *(column.format(row) for column in columns)] for row in rows
    ]
    numbers, folders = plain_table(cells).splitlines(), ["folder", *(row.folders for row in rows)]
    lines = [f"{line}  {folder}" for line, folder in zip(numbers, folders, strict=True)]
    warning = data_warning([row.config for row in rows])
    return "\n".join(filter(None, [*lines, warning]))


def write_comparison(runs: Sequence[str | Path], path: str | Path) -> Path:
    """Write a self-contained page with the table, curves and the settings that differ.

    Args:
        runs: See `comparison_table`.
        path: HTML file. An existing page of onescan is replaced.

    Returns:
        The path.

    Raises:
        ValueError: See `comparison_table`; also if another file exists at the path.
        OSError: If the page cannot be written. An existing page stays intact.
    """
    path = Path(path)
    check_report_path(path)
    rows = read_rows(runs)
    count = plural(sum(len(row.runs) for row in rows), "run")
    page = Page(
        kind="comparison",
        title=f"{count} in {plural(len(rows), 'row')}",
        lead=f"{LEAD} {data_warning([row.config for row in rows])}".strip(),
        table=fragment("table", _marked_table(rows), "numbers lined"),
        note=NOTE,
        facts=[
            (row.badge + row.name, ", ".join(str(run.result.folder) for run in row.runs))
            for row in rows
        ],
        sections=[_over_epochs(rows), _over_time(rows), _settings(rows)],
    )
    return page.write(path)


# Runs and the rows they belong to


def read_rows(paths: Sequence[str | Path]) -> list[Row]:
    """Read finished runs and group them by recipe, in the order of their first appearance.

    Raises:
        ValueError: See `comparison_table`.
    """
    if not paths:
        raise ValueError("runs is empty, expected at least one finished run")
    runs = [read_run(folder) for path in paths for folder in _run_folders(Path(path))]
    groups = []
    for recipe in _grouped(runs, _is_same_recipe):
        seeds_differ = len({run.seed for run in recipe}) == len(recipe)
        groups += [recipe] if seeds_differ else _grouped(recipe, _is_same_machine)
    for group in groups:
        _check_distinct(group)
        _check_task(groups[0][0], group[0])
    names = _names([group[0] for group in groups])
    return [
        Row(
            name=name,
            index=index,
            runs=tuple(sorted(group, key=lambda run: run.seed)),
            parameters=sum(p.numel() for p in load(group[0].result.folder).model.parameters()),
        )
        for index, (name, group) in enumerate(zip(names, groups, strict=True))
    ]


def _run_folders(path: Path) -> list[Path]:
    if (path / CONFIG).is_file():
        return [path]
    seeds = sorted(folder for folder in path.glob("seed-*") if folder.is_dir())
    if not seeds:
        raise ValueError(f"{path} holds no run: it has neither {CONFIG} nor folders seed-*")
    return seeds


def _grouped(
    runs: Iterable[FinishedRun], belong: Callable[[FinishedRun, FinishedRun], bool]
) -> list[list[FinishedRun]]:
    groups: list[list[FinishedRun]] = []
    for run in runs:
        group = next((group for group in groups if belong(group[0], run)), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    return groups


def _is_same_recipe(a: FinishedRun, b: FinishedRun) -> bool:
    return not config_differences(a.manifest.run, b.manifest.run)


def _is_same_machine(a: FinishedRun, b: FinishedRun) -> bool:
    return machine(a) == machine(b)


def _check_distinct(runs: list[FinishedRun]) -> None:
    for a, b in combinations(runs, 2):
        if a.seed == b.seed:
            raise ValueError(
                f"{a.result.folder} and {b.result.folder} hold the same run, seed {a.seed}, with "
                "equal settings on equal machines: pass only one of them"
            )


def _check_task(a: FinishedRun, b: FinishedRun) -> None:
    folders = f"{a.result.folder} and {b.result.folder}"
    one, other = a.manifest.run, b.manifest.run
    if type(one.task).__name__ != type(other.task).__name__:
        raise ValueError(f"{folders} are runs of different tasks: {one.name} and {other.name}")
    if a.manifest.class_names != b.manifest.class_names:
        raise ValueError(f"{folders} are runs of different tasks: their classes differ")


def _names(runs: list[FinishedRun]) -> list[str]:
    """Return each recipe's name, with the settings that distinguish equal names."""
    names = []
    for run in runs:
        config = run.manifest.run
        namesakes = [other.manifest.run for other in runs if other.manifest.run.name == config.name]
        differing = differing_settings(namesakes)
        chosen = [path for path in differing if not _is_inferred(path)] or differing
        shown = dict(zip(chosen, _short(chosen), strict=True))
        settings = [f"{shown[path]} {format_setting(config, path)}" for path in chosen[:NAMED_BY]]
        same_recipe = [other for other in runs if _is_same_recipe(run, other)]
        settings += [
            f"{name.removeprefix(MACHINE)} {machine(run)[name]}"
            for name in differing_machines(same_recipe)[:NAMED_BY]
        ]
        names.append(f"{config.name} ({', '.join(settings)})" if settings else config.name)
    return names


def _short(paths: list[str]) -> list[str]:
    """Return the last names of dotted paths where these are unique, else whole paths.

    >>> _short(["model.mixer.type", "data.channels", "model.channels"])
    ['mixer', 'data.channels', 'model.channels']
    """
    names = [path.removesuffix(".type").rpartition(".")[2] for path in paths]
    pairs = zip(names, paths, strict=True)
    return [name if names.count(name) == 1 else path for name, path in pairs]


# Settings


def differing_settings(configs: Sequence[RunConfig]) -> list[str]:
    """List the dotted paths in which any two recipes differ, except for their names.

    Settings that people choose come first, and those that follow from the data last.
    """
    differing = {
        path: None for a, b in combinations(configs, 2) for path, *_ in config_differences(a, b)
    }
    paths = [path for path in differing if path != NAME]
    return sorted(paths, key=lambda path: (_is_inferred(path), ORDER.index(path.partition(".")[0])))


def _is_inferred(path: str) -> bool:
    return path.rpartition(".")[2] in INFERRED


def differing_machines(runs: Sequence[FinishedRun]) -> list[str]:
    """List the keys of `machine` in which any two runs of the same recipe differ."""
    differing = {
        name: None
        for a, b in combinations(runs, 2)
        if _is_same_recipe(a, b)
        for name, value in machine(a).items()
        if value != machine(b)[name]
    }
    return list(differing)


def machine(run: FinishedRun) -> dict[str, str]:
    """Return a run's machine settings, devices and numbers of processes, as text."""
    config, environments = run.manifest.run, run.manifest.environments
    paths = [MACHINE + field.name for field in dataclasses.fields(config.machine)]
    return {
        **{path: format_setting(config, path) for path in paths},
        "device": ", ".join(dict.fromkeys(environment.device for environment in environments)),
        "processes": ", ".join(
            dict.fromkeys(str(environment.processes) for environment in environments)
        ),
    }


def data_warning(configs: Sequence[RunConfig]) -> str:
    """Warn if recipes use different data; otherwise return an empty string."""
    paths = [path.split(".") for path in differing_settings(configs)]
    data_settings = [
        ".".join(path) for path in paths if path[0] == "data" and path[1] not in READING
    ]
    if not data_settings:
        return ""
    return (
        f"These runs were trained on different data ({', '.join(data_settings)}), so their "
        "accuracies are not comparable."
    )


def format_setting(config: RunConfig, path: str) -> str:
    """Format one setting; a dash if the recipe has no such field."""
    value: Any = config
    for name in path.removesuffix(".type").split("."):
        value = getattr(value, name, ABSENT)
    if dataclasses.is_dataclass(value):
        return type(value).__name__.removesuffix("Config")
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "none" if value is None else str(value)


def _settings(rows: Sequence[Row]) -> Section:
    """List every setting in which rows differ."""
    title = "Differing settings"
    configs, runs = [row.config for row in rows], [row.runs[0] for row in rows]
    table: list[list[str]] = [
        [path, *(format_setting(config, path) for config in configs)]
        for path in differing_settings(configs)
    ]
    table += [[name, *(machine(run)[name] for run in runs)] for name in differing_machines(runs)]
    if not table:
        return Section(title, lead="None, except for the name.")
    heads = ["", *(row.badge + row.name for row in rows)]
    body = [[Markup("<code>{}</code>").format(path), *values] for path, *values in table]
    html = fragment("table", [heads, *body], "settings lined")
    return Section(title, [Figure("Settings", html, SETTINGS, columns=3)])


# Numbers


class Column(NamedTuple):
    """One column of the table.

    Attributes:
        head: Title.
        values: Returns one number for each run of a row; none for runs without this metric.
        text: Formats a number.
        better: Which of two numbers is better, if either.
        min_lead: Returns the smallest difference from a number that is worth marking.
        is_metric: Whether the standard deviation over seeds is shown.
    """

    head: str
    values: Callable[[Row], Sequence[float]]
    text: Callable[[float], str]
    better: Literal["higher", "lower"] | None = None
    min_lead: Callable[[float], float] = lambda value: RELEVANT * abs(value)
    is_metric: bool = False

    def format(self, row: Row) -> str:
        """Format the mean over seeds, and the standard deviation of metrics; "" without values."""
        number = SeedValues(tuple(self.values(row)))
        if not number.values:
            return ""
        if not self.is_metric or number.std is None:
            return self.text(number.mean)
        return f"{self.text(number.mean)} \u00b1 {self.text(number.std)}"

    def leader(self, values: Sequence[Sequence[float]]) -> int | None:
        """Return the index of the best row, unless its lead is noise or too small to matter.

        Args:
            values: Numbers of the runs, for each row.
        """
        numbers = {i: SeedValues(tuple(each)) for i, each in enumerate(values) if each}
        known = [i for i, number in numbers.items() if not math.isnan(number.mean)]
        known.sort(key=lambda i: numbers[i].mean, reverse=self.better == "higher")
        if self.better is None or len(known) <= 1:
            return None
        first, second = numbers[known[0]], numbers[known[1]]
        noise = max(first.std or 0.0, second.std or 0.0)
        is_replicated = first.std is not None and second.std is not None
        min_lead = noise
        if not (self.is_metric and is_replicated):
            min_lead = max(noise, self.min_lead(second.mean))
        return known[0] if abs(first.mean - second.mean) > min_lead else None


def table_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns that follow the names and seeds."""
    steps = {run.result.steps for row in rows for run in row.runs}
    return [
        *map(_metric_column, _metrics(rows)),
        Column("parameters", lambda row: [float(row.parameters)], large),
        Column("examples/s", _of_runs(lambda run: run.throughput), large, "higher"),
        Column(
            "training",
            _of_runs(lambda run: run.seconds),
            duration,
            "lower" if len(steps) == 1 else None,  # fewer steps are not faster
        ),
        Column(
            "waiting", _of_runs(lambda run: run.waiting), percent, "lower", lambda share: RELEVANT
        ),
        Column("memory", _of_runs(lambda run: run.memory_mib), memory, "lower"),
    ]


def _of_runs(number: Callable[[FinishedRun], float]) -> Callable[[Row], Sequence[float]]:
    return lambda row: [number(run) for run in row.runs]


def _metrics(rows: Sequence[Row]) -> list[str]:
    """List the metrics of all runs; some runs may lack some, such as those of an EMA."""
    return list(
        dict.fromkeys(name for row in rows for run in row.runs for name in run.result.metrics)
    )


def _runs_with(row: Row, name: str) -> list[FinishedRun]:
    """Return the runs of a row that have a metric."""
    return [run for run in row.runs if name in run.result.metrics]


def _metric_column(name: str) -> Column:
    is_accuracy = name.endswith(ACCURACY)
    return Column(
        f"test {metric_name(name)}",
        lambda row: [run.result.metrics[name] for run in _runs_with(row, name)],
        lambda value: metric_value(name, value),
        "higher" if is_accuracy else "lower" if name.endswith("loss") else None,
        # of an accuracy, compare the errors
        lambda value: RELEVANT * abs(1 - value if is_accuracy else value),
        is_metric=True,
    )


def _marked_table(rows: Sequence[Row]) -> list[list[str]]:
    """Return the cells of the page's table, with the best of each column marked."""
    columns = table_columns(rows)
    leaders = [column.leader([column.values(row) for row in rows]) for column in columns]
    table = [["", "seeds", *(column.head for column in columns)]]
    for row in rows:
        seeds = f"{len(row.runs)} ({', '.join(str(run.seed) for run in row.runs)})"
        cells = [
            best(text) if leader == row.index else text
            for leader, text in zip(leaders, (each.format(row) for each in columns), strict=True)
        ]
        table.append([row.badge + row.name, seeds, *cells])
    return table


# Curves


class Axis(NamedTuple):
    """A horizontal axis: its label, and the position of each of a run's records."""

    label: str
    positions: Callable[[FinishedRun], Values]


def _over_epochs(rows: Sequence[Row]) -> Section:
    def epochs(run: FinishedRun) -> Values:
        return np.array([line["epoch"] for line in run.records], float)

    lead = f"{_legend(rows)} An epoch is one pass over the training data."
    return Section("Over epochs", _figures(rows, Axis("epoch", epochs)), lead)


def _over_time(rows: Sequence[Row]) -> Section:
    longest = max(run.seconds for row in rows for run in row.runs)
    size, unit = next(
        (size, unit)
        for size, unit in ((HOUR, "hours"), (MINUTE, "minutes"), (1, "seconds"))
        if longest > FEW * size or size == 1
    )

    def elapsed(run: FinishedRun) -> Values:
        seconds = [line["seconds"] if line["split"] != "test" else 0 for line in run.records]
        return np.cumsum(seconds) / size

    lead = (
        f"{_legend(rows)} Time is that of training steps, without evaluations and checkpoints. It "
        f"is comparable only between equal machines: {_devices(rows)}."
    )
    return Section("Over training time", _figures(rows, Axis(unit, elapsed)), lead)


def _legend(rows: Sequence[Row]) -> str:
    names = ", ".join(f"{row.letter} is {row.name}" for row in rows)
    several = any(len(row.runs) > 1 for row in rows)
    return f"{names}." + " Line: mean over seeds; band: lowest to highest seed." * several


def _devices(rows: Sequence[Row]) -> str:
    devices = {
        row.letter: ", ".join(
            dict.fromkeys(e.device for run in row.runs for e in run.manifest.environments)
        )
        for row in rows
    }
    if len(set(devices.values())) == 1:
        return f"all ran on {devices[rows[0].letter]}"
    return "; ".join(f"{letter} ran on {names}" for letter, names in devices.items())


def _figures(rows: Sequence[Row], axis: Axis) -> list[Figure]:
    figure, figures = partial(line_figure, x=axis.label), []
    for name in _metrics(rows):
        lines = [metric_curve(row, axis, name) for row in rows if _runs_with(row, name)]
        is_share = name.endswith(ACCURACY)
        caption = "At each evaluation on the test set" + "; higher is better" * is_share + "."
        scale = "share" if is_share else "log"
        figures.append(figure(lines, caption, y=f"test {metric_name(name)}", scale=scale))
    if all(has_training_accuracy(row.config) for row in rows):
        lines = [training_curve(row, axis, "accuracy") for row in rows]
        caption = "Running mean over batches, of augmented images if the recipe augments them."
        figures.append(figure(lines, caption, y="training accuracy", scale="share"))
    lines = [training_curve(row, axis) for row in rows]
    caption = (
        "Running mean over batches. It is comparable only between recipes with equal labels and "
        "augmentation."
    )
    return [*figures, figure(lines, caption, y="training loss", scale="log")]


def metric_curve(row: Row, axis: Axis, name: str) -> Line:
    """Return a metric at each evaluation."""
    runs = _runs_with(row, name)
    curves = [(_positions(axis, run, "test"), run.column("test", name)) for run in runs]
    return _line(row, curves, lambda value: metric_value(name, value))


def training_curve(row: Row, axis: Axis, name: str = "loss") -> Line:
    """Return the running mean of a metric of the training batches, the loss by default."""
    curves = []
    for run in row.runs:
        values = np.maximum(run.column("train", name), SMALLEST)
        indices = thinned(len(values))
        curves.append((_positions(axis, run, "train")[indices], smoothed(values, indices)))
    return _line(row, curves, percent if name == ACCURACY else "{:.3f}".format)


def _line(
    row: Row, curves: Sequence[tuple[Values, Values]], format: Callable[[float], str]
) -> Line:
    style = STYLES[row.index // len(SERIES) % len(STYLES)]
    return seed_line(row.letter, series(row.index), curves, format, style)


def _positions(axis: Axis, run: FinishedRun, split: Split) -> Values:
    return axis.positions(run)[[line["split"] == split for line in run.records]]
