"""Train the models that test the papers' claims, and write the results page.

git worktree add --detach ../study && cd ../study
PYTHONPATH=. python benchmarks/study.py run --data FOLDER
PYTHONPATH=. python benchmarks/study.py status
PYTHONPATH=. python benchmarks/study.py table

`run` trains all runs that have no result yet, one after another. Each runs in its own process, with
one thread and low priority. After an interruption, the next `run` resumes the unfinished run. Code
is imported from the working tree of this file, which must not have uncommitted changes, so that
every result belongs to a commit. Results are files in docs/study, to be committed together with the
page. FOLDER contains cifar10-train.parquet, cifar10-test.parquet and tinyshakespeare.txt.

`measure` times the training steps of the models that are compared at equal training time. It needs
an otherwise idle machine. Its result determines the number of steps and must be committed first.
`repeat NAME` trains a finished run again and checks that the results are the same.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import study_page
import study_queue as queue
import torch
import tyro
from results import aligned, environment
from study_queue import MINUTE, Result, Results, StudyRun
from study_run import (
    BUSY,
    DATA_KINDS,
    INTERRUPTED,
    ROOT,
    check_data,
    check_writable,
    clean_commit,
    read_results,
    step_seconds,
    train_run,
)

from onescan import configs
from onescan.checkpoint.files import write_atomically
from onescan.checks import check_choice, check_positive

RESULTS, FOLDER = ROOT / "docs" / "study", ROOT / "runs" / "study"
HOUR = 3600.0
SUMMARY = (__doc__ or "").partition("\n")[0]

Suites = tuple[str, ...]


def main() -> None:
    commands: dict[str, Callable[..., None]] = {
        "run": run,
        "status": status,
        "table": table,
        "repeat": repeat,
        "train": train,
        "measure": measure,
    }
    try:
        tyro.extras.subcommand_cli_from_dict(commands, description=SUMMARY)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def run(
    data: Path,
    results: Path = RESULTS,
    folder: Path = FOLDER,
    suites: Suites = tuple(queue.SUITES),
    limit: int | None = None,
) -> None:
    """Train the runs that have no result yet, in order.

    Args:
        data: Folder that contains the data sets.
        results: Folder of the result files, one per run.
        folder: Folder of unfinished runs.
        suites: Suites to train.
        limit: Maximum number of runs to train. By default, all runs are trained.
    """
    check_suites(suites)
    if limit is not None:
        check_positive(limit=limit)
    clean_commit()
    queue.check_fairness()
    check_writable(results)
    for path in {getattr(run.config.data, "path", None) for run in queue.planned_runs({})}:
        if path is not None:
            check_data(data, DATA_KINDS[path])
    interrupted = False
    child: subprocess.Popen[bytes] | None = None

    def stop(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        if child is not None:
            child.send_signal(signal.SIGINT)

    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, stop)
    failed: set[str] = set()
    trained = 0
    while not interrupted and (limit is None or trained < limit):
        remaining = [
            run
            for run in unfinished(checked_results(results), suites)
            if run.rate_is_known and run.name not in failed
        ]
        if not remaining:
            break
        name = remaining[0].name
        print(name, flush=True)
        child = start(name, data, results, folder)
        if interrupted:
            child.send_signal(signal.SIGINT)
        exit_code = child.wait()
        if exit_code == BUSY:
            sys.exit(f"error: another process trains in {folder}")
        interrupted |= exit_code in (INTERRUPTED, -signal.SIGINT, -signal.SIGTERM)
        if exit_code:
            failed.add(name)
        trained += 1
    if interrupted:
        sys.exit("interrupted: call `run` again to continue")
    if failed:
        sys.exit(f"error: these runs failed: {', '.join(sorted(failed))}")


def status(results: Path = RESULTS, hours: float = 10) -> None:
    """Print how many runs are finished and left, their CPU time, and which come next.

    Args:
        results: Folder of the result files.
        hours: CPU time to plan for, in hours.
    """
    queue.check_fairness()
    finished = checked_results(results)
    runs = queue.planned_runs(finished)
    remaining = [run for run in runs if run.name not in finished]
    print(f"{len(runs) - len(remaining)} of {len(runs)} runs are finished\n")
    rows = [["runs", "done", "left", "CPU minutes per run"]]
    runs_by_model: dict[tuple[str, str], list[StudyRun]] = defaultdict(list)
    for run in runs:
        runs_by_model[run.suite, f"{run.family} (sweep)" if run.is_sweep else run.variant].append(
            run
        )
    for (suite, name), group in runs_by_model.items():
        cpu_minutes = [
            finished[run.name].cpu_seconds / MINUTE for run in group if run.name in finished
        ]
        mean_minutes = f"{statistics.fmean(cpu_minutes):.1f}" if cpu_minutes else ""
        rows.append(
            [
                f"{suite}: {name}",
                *map(str, (len(cpu_minutes), len(group) - len(cpu_minutes))),
                mean_minutes,
            ]
        )
    print("\n".join(aligned(rows)))
    rows, total, unknown = [["next runs", "CPU minutes", "cumulative hours"]], 0.0, 0
    for run in remaining:
        seconds = estimate(run, finished)
        if total + (seconds or 0.0) > hours * HOUR:
            break
        total += seconds or 0.0
        unknown += seconds is None
        minutes_text = f"{seconds / MINUTE:.0f}" if seconds else "unknown"
        rows.append([run.name, minutes_text, f"{total / HOUR:.1f}"])
    print(
        f"\n{len(rows) - 1} of the {len(remaining)} remaining runs fit in {hours:g} CPU hours",
        end="",
    )
    print(f" ({unknown} of unknown duration):\n" if unknown else ":\n")
    print("\n".join(aligned(rows)))


def table(results: Path = RESULTS, docs: Path = ROOT / "docs") -> None:
    """Write the results page and its figures.

    Args:
        results: Folder of the result files.
        docs: Folder of the page.
    """
    study_page.write_page(checked_results(results), docs)


def repeat(name: Annotated[str, tyro.conf.Positional], data: Path, results: Path = RESULTS) -> None:
    """Train a finished run again and compare all its evaluations.

    Args:
        name: Name of the run.
        data: Folder that contains the data sets.
        results: Folder of the result files.
    """
    finished = checked_results(results)
    check_choice("run", name, finished)
    original = finished[name]
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        for file in results.glob("*-sweep-*.json"):  # they determine the learning rate
            if file.stem != name:
                (scratch / file.name).write_bytes(file.read_bytes())
        child = start(name, data, scratch, scratch / "runs")
        try:
            exit_code = child.wait()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            child.wait()
            raise
        if exit_code:
            sys.exit(f"error: {name} failed")
        repeated = read_results(scratch)[name]
    first, second = (reproducible_numbers(result) for result in (original, repeated))
    if first != second:
        sys.exit(
            f"{name} differs from its result at commit {original.commit[:7]}:\n{first}\n{second}"
        )
    print(f"{name} reproduces its result at commit {original.commit[:7]}")


def train(
    name: Annotated[str, tyro.conf.Positional], data: Path, results: Path, folder: Path
) -> None:
    """Train one run in this process and write its result.

    Args:
        name: Name of the run.
        data: Folder that contains the data sets.
        results: Folder of the result files.
        folder: Folder of unfinished runs.
    """
    runs = {run.name: run for run in queue.planned_runs(checked_results(results))}
    check_choice("run", name, runs)
    if not runs[name].rate_is_known:
        raise ValueError(f"the learning rate of {name} is not known yet: train its sweep first")
    train_run(runs[name], data, results, folder)


def measure(rounds: int = 3, steps: int = 9, file: Path = queue.STEP_TIMES) -> None:
    """Time the training steps of the models that are compared at equal time, in turn.

    Args:
        rounds: How many times each model is timed. The median of all steps is written.
        steps: Number of steps per round.
        file: File to write.
    """
    check_positive(rounds=rounds, steps=steps)
    torch.set_num_threads(1)
    times: dict[str, list[float]] = defaultdict(list)
    for number in range(1, rounds + 1):
        print(f"round {number} of {rounds}", flush=True)
        for side in queue.SIDES:
            for name in queue.canvas_models():
                with tempfile.TemporaryDirectory() as folder:
                    run = queue.canvas_run(name, side)
                    times[f"{name}_{side}"] += step_seconds(run, steps, Path(folder) / "run")
    seconds = {name: round(statistics.median(values), 4) for name, values in times.items()}
    values = {"seconds": seconds, "environment": environment(torch.device("cpu"))}
    text = json.dumps(values, indent=1) + "\n"
    write_atomically(file, lambda path: path.write_text(text, encoding="utf-8"))


def reproducible_numbers(result: Result) -> list[Any]:
    """Return all numbers of a result that do not depend on the speed of the machine."""
    evaluations = [
        {name: value for name, value in line.items() if name != "seconds"}
        for line in result.evaluations
    ]
    return [evaluations, result.perplexities, result.error]


def checked_results(folder: Path) -> dict[str, Result]:
    """Read all results of a folder, and check that they are those of runs in the queue."""
    results = read_results(folder)
    queue.check_results(results)
    return results


def unfinished(results: Results, suites: Suites) -> list[StudyRun]:
    """Return the runs of some suites that have no result yet, in order."""
    runs = queue.planned_runs(results)
    return [run for run in runs if run.suite in suites and run.name not in results]


def estimate(run: StudyRun, results: Results) -> float | None:
    """Estimate the CPU seconds of a run from finished runs of its model, family or suite."""
    seconds = queue.find_suite(run.suite).variants[run.variant].step_seconds
    if seconds is not None:
        return seconds * length_of(configs.to_dict(run.config))
    same_suite = [
        result for result in results.values() if result.suite == run.suite and not result.error
    ]
    same_family = [result for result in same_suite if result.family == run.family]
    same_variant = [
        result for result in same_family if result.variant == run.variant and not result.is_sweep
    ]
    if similar := same_variant or same_family or same_suite:
        cost = statistics.fmean(result.cpu_seconds / length_of(result.config) for result in similar)
        return cost * length_of(configs.to_dict(run.config))
    return None


def length_of(config: dict[str, Any]) -> float:
    """Return the length of a run in steps, or in epochs if the number of steps is not given."""
    return float(config["training"]["steps"] or config["training"]["epochs"])


def check_suites(suites: Suites) -> None:
    """Raise ValueError if a suite is unknown."""
    for name in suites:
        check_choice("suites", name, queue.SUITES)


def start(name: str, data: Path, results: Path, folder: Path) -> "subprocess.Popen[bytes]":
    """Start a process that trains one run with one thread, and receives no Ctrl-C itself."""
    arguments = ["--data", data, "--results", results, "--folder", folder]
    command = [sys.executable, __file__, "train", name, *map(str, arguments)]
    variables = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    variables["PYTHONPATH"] = str(ROOT)
    return subprocess.Popen(command, env=os.environ | variables, start_new_session=True)


if __name__ == "__main__":
    main()
