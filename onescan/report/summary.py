"""The head of the page: what was trained, how well it does, and what it took."""

import statistics
from html import escape

from onescan.report.cards import big_numbers
from onescan.report.command import repeat_command
from onescan.report.runs import RunGroup
from onescan.report.words import TIMES, duration, large, metric_name, metric_value
from onescan.training.folder import Environment


def summary(study: RunGroup) -> str:
    """Big numbers, one line per seed, and what it takes to do it again."""
    return f'{_big_numbers(study)}\n<div class="facts">\n{_seeds(study)}\n{_facts(study)}\n</div>'


def spread(values: list[float]) -> float | None:
    """Standard deviation over seeds, of the sample; one seed has none."""
    return statistics.stdev(values) if len(values) > 1 else None


def _big_numbers(study: RunGroup) -> str:
    seeds, unit = len(study.runs), study.task.unit
    name = next(iter(study.runs[0].result.metrics))  # a task names its most telling metric first
    values = study.metric(name)
    deviation = spread(values)
    about = (
        f" <small>&plusmn; {metric_value(name, deviation)}</small>" if deviation is not None else ""
    )
    over = f"mean and standard deviation of {seeds} seeds" if seeds > 1 else "one seed"
    seconds = statistics.mean(run.seconds for run in study.runs)
    throughput = statistics.mean(run.throughput for run in study.runs)
    device = study.runs[0].manifest.environments[0].device
    cards = [
        (
            f"{metric_value(name, statistics.mean(values))}{about}",
            f"test {metric_name(name)}",
            over,
        ),
        (large(_parameters(study)), "parameters", f"{_parameters(study):,} learnt numbers"),
        (duration(seconds), "training", "per seed, without evaluation"),
        (large(throughput), f"{unit} per second", f"of the median update, on {device}"),
    ]
    return big_numbers(cards)


def _seeds(study: RunGroup) -> str:
    names = list(study.runs[0].result.metrics)
    heads = [
        "seed",
        *(f"test {metric_name(name)}" for name in names),
        "training",
        f"{study.task.unit}/s",
    ]
    rows = ["".join(f"<th>{escape(head)}</th>" for head in heads)]
    for run in study.runs:
        cells = [str(run.seed), *(metric_value(name, run.result.metrics[name]) for name in names)]
        cells += [duration(run.seconds), large(run.throughput)]
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="scroll"><table class="seeds">{body}</table></div>'


def _facts(study: RunGroup) -> str:
    manifest = study.runs[0].manifest
    first, *later = manifest.environments
    facts = [
        ("Device", _device(first)),
        ("Versions", _versions(first)),
    ]
    if first.commit:
        facts.append(("Commit", first.commit))
    for place in later:
        commit = f", commit {place.commit}" if place.commit else ""
        moved = f"{_device(place)}, {_versions(place)}{commit}"
        facts.append((f"From step {place.since_step:,}", moved))
    facts.append(("Runs", ", ".join(str(run.result.folder) for run in study.runs)))
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in facts)
    return f"<dl>{listed}<dt>Again</dt><dd>{_again(study)}</dd></dl>"


def _device(place: Environment) -> str:
    several = f"{place.processes} {TIMES} " if place.processes > 1 else ""
    return f"{several}{place.device}, {place.platform}"


def _versions(place: Environment) -> str:
    return f"onescan {place.onescan}, torch {place.torch}, Python {place.python}"


def _again(study: RunGroup) -> str:
    command = repeat_command(study)
    if command is None:
        return "every setting is in each run's config.json"
    return f"<code>{' '.join(f'<span>{escape(word)}</span>' for word in command)}</code>"


def _parameters(study: RunGroup) -> int:
    return sum(parameter.numel() for parameter in study.model.parameters())
