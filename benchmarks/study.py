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

`run --suites time` compares models at equal training time, and needs an otherwise idle machine.
`repeat NAME` trains a finished run again and checks that the results are the same.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import study_page
import study_queue as queue
import tyro
from results import aligned
from study_queue import MINUTE, Result, Results, StudyRun
from study_run import (
    BUSY,
    INTERRUPTED,
    KINDS,
    ROOT,
    check_data,
    check_writable,
    clean_commit,
    read_results,
    train_run,
)

from onescan import configs
from onescan.checks import check_choice, check_positive

RESULTS, FOLDER = ROOT / "docs" / "study", ROOT / "runs" / "study"
HOUR = 3600.0
SUMMARY = (__doc__ or "").partition("\n")[0]

Suites = tuple[str, ...]


def main() -> None:
    commands = {"run": run, "status": status, "table": table, "repeat": repeat, "train": train}
    try:
        tyro.extras.subcommand_cli_from_dict(commands, description=SUMMARY)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def run(
    data: Path,
    results: Path = RESULTS,
    folder: Path = FOLDER,
    suites: Suites = tuple(name for name in queue.SUITES if name not in queue.TIMED),
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
    for path in {getattr(each.config.data, "path", None) for each in queue.queue({})}:
        if path is not None:
            check_data(data, KINDS[path])
    interrupted = False
    child: subprocess.Popen[bytes] | None = None

    def stop(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        if child is not None:
            child.send_signal(signal.SIGINT)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    failed: set[str] = set()
    trained = 0
    while not interrupted and (limit is None or trained < limit):
        left = [
            each
            for each in unfinished(checked_results(results), suites)
            if each.rate_is_known and each.name not in failed
        ]
        if not left:
            break
        name = left[0].name
        print(name, flush=True)
        child = start(name, data, results, folder)
        if interrupted:
            child.send_signal(signal.SIGINT)
        code = child.wait()
        if code == BUSY:
            sys.exit(f"error: another process trains in {folder}")
        interrupted |= code in (INTERRUPTED, -signal.SIGINT, -signal.SIGTERM)
        if code:
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
    found = checked_results(results)
    runs = queue.queue(found)
    left = [each for each in runs if each.name not in found]
    print(f"{len(runs) - len(left)} of {len(runs)} runs are finished\n")
    rows = [["runs", "done", "left", "CPU minutes per run"]]
    groups: dict[tuple[str, str], list[StudyRun]] = defaultdict(list)
    for each in runs:
        groups[each.suite, f"{each.family} (sweep)" if each.is_sweep else each.variant].append(each)
    for (suite, name), members in groups.items():
        done = [found[each.name].cpu_seconds / MINUTE for each in members if each.name in found]
        spent = f"{statistics.fmean(done):.1f}" if done else ""
        rows.append([f"{suite}: {name}", *map(str, (len(done), len(members) - len(done))), spent])
    print("\n".join(aligned(rows)))
    timed = [each for each in left if each.suite in queue.TIMED]
    minutes = sum(each.minutes or 0.0 for each in timed)
    left = [each for each in left if each not in timed]
    rows, total, unknown = [["next runs", "CPU minutes", "cumulative hours"]], 0.0, 0
    for each in left:
        seconds = estimate(each, found)
        if total + (seconds or 0.0) > hours * HOUR:
            break
        total += seconds or 0.0
        unknown += seconds is None
        known = f"{seconds / MINUTE:.0f}" if seconds else "unknown"
        rows.append([each.name, known, f"{total / HOUR:.1f}"])
    print(f"\n{len(rows) - 1} of the {len(left)} remaining runs fit in {hours:g} CPU hours", end="")
    print(f" ({unknown} of unknown duration):\n" if unknown else ":\n")
    print("\n".join(aligned(rows)))
    print(
        f"\n{len(timed)} other runs need {minutes / MINUTE:.1f} hours of an otherwise idle machine"
    )


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
    found = checked_results(results)
    check_choice("run", name, found)
    before = found[name]
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        for file in results.glob("*-sweep-*.json"):  # they determine the learning rate
            if file.stem != name:
                (place / file.name).write_bytes(file.read_bytes())
        child = start(name, data, place, place / "runs")
        try:
            code = child.wait()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            child.wait()
            raise
        if code:
            sys.exit(f"error: {name} failed")
        after = read_results(place)[name]
    first, second = (numbers(each) for each in (before, after))
    if first != second:
        sys.exit(
            f"{name} differs from its result at commit {before.commit[:7]}:\n{first}\n{second}"
        )
    print(f"{name} reproduces its result at commit {before.commit[:7]}")


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
    runs = {each.name: each for each in queue.queue(checked_results(results))}
    check_choice("run", name, runs)
    if not runs[name].rate_is_known:
        raise ValueError(f"the learning rate of {name} is not known yet: train its sweep first")
    train_run(runs[name], data, results, folder)


def numbers(result: Result) -> list[Any]:
    """Return all numbers of a result that do not depend on the speed of the machine."""
    evaluations = [
        {name: x for name, x in line.items() if name != "seconds"} for line in result.evaluations
    ]
    return [evaluations, result.perplexities, result.error]


def checked_results(folder: Path) -> dict[str, Result]:
    """Read all results of a folder, and check that they are those of runs in the queue."""
    found = read_results(folder)
    queue.check_results(found)
    return found


def unfinished(results: Results, suites: Suites) -> list[StudyRun]:
    """Return the runs of some suites that have no result yet, in order."""
    runs = queue.queue(results)
    return [each for each in runs if each.suite in suites and each.name not in results]


def estimate(chosen: StudyRun, results: Results) -> float | None:
    """Estimate the CPU seconds of a run from finished runs of its model, family or suite."""
    if chosen.minutes is not None:
        return chosen.minutes * MINUTE
    suite = [each for each in results.values() if each.suite == chosen.suite and not each.error]
    family = [each for each in suite if each.family == chosen.family]
    variant = [each for each in family if each.variant == chosen.variant and not each.is_sweep]
    if alike := variant or family or suite:
        cost = statistics.fmean(each.cpu_seconds / length_of(each.config) for each in alike)
        return cost * length_of(configs.to_dict(chosen.config))
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
    words = ["--data", data, "--results", results, "--folder", folder]
    command = [sys.executable, __file__, "train", name, *map(str, words)]
    variables = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    variables["PYTHONPATH"] = str(ROOT)
    return subprocess.Popen(command, env=os.environ | variables, start_new_session=True)


if __name__ == "__main__":
    main()
