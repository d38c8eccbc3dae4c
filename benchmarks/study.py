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

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import study_page
import study_queue as queue
import torch
import tyro
from results import aligned, environment
from study_queue import Result, Results, StudyRun

import onescan
from onescan import configs
from onescan.checkpoint.files import write_atomically
from onescan.checks import check_choice
from onescan.evaluation.config import LengthsConfig
from onescan.evaluation.lengths import measure_lengths
from onescan.tasks import Task
from onescan.training import RunConfig, read_metrics, train

ROOT = Path(__file__).parents[1]
RESULTS, FOLDER = ROOT / "docs" / "study", ROOT / "runs" / "study"
SPENT = "spent.json"  # suffix of the file that holds the time spent on an interrupted run
FILES = {
    "cifar10-train.parquet": "images",
    "cifar10-test.parquet": "images",
    queue.SHAKESPEARE: "text",
}
HELD_OUT = 0.1  # fraction of the text used for testing, as in the recipes
NICE = 19
MINUTE, HOUR = 60.0, 3600.0
CALIBRATION = 24  # timed steps; the first third is warm-up
MAX_DEVIATION = 0.1  # relative difference between actual and planned training time
TIMED_EVALUATIONS = 8

SUMMARY = (__doc__ or "").partition("\n")[0]

Suites = tuple[str, ...]


def main() -> None:
    commands = {"run": run, "status": status, "table": table, "repeat": repeat, "train": train_one}
    try:
        tyro.extras.subcommand_cli_from_dict(commands, description=SUMMARY)
    except ValueError as error:
        sys.exit(f"error: {error}")


# Commands


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
    check_tree()
    queue.check_fairness()
    interrupted = False

    def stop(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        child.send_signal(signal.SIGINT)

    # Shells make background jobs ignore SIGINT, and child processes would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    failed: list[str] = []
    done = 0
    while limit is None or done < limit:
        left = [each for each in unfinished(read_results(results), suites) if each.rate_is_known]
        left = [each for each in left if each.name not in failed]
        if not left:
            break
        print(left[0].name, flush=True)
        child = start(left[0].name, data, results, folder)
        signal.signal(signal.SIGTERM, stop)
        try:
            code = child.wait()
        except KeyboardInterrupt:  # Ctrl-C also reaches the child
            interrupted = True
            code = child.wait()
        if interrupted:
            sys.exit(f"interrupted: call `run` again to resume {left[0].name}")
        failed += [left[0].name] * (code != 0)
        done += 1
    if failed:
        sys.exit(f"error: these runs failed: {', '.join(failed)}")


def status(results: Path = RESULTS, hours: float = 10) -> None:
    """Print how many runs are finished and left, their CPU time, and which come next.

    Args:
        results: Folder of the result files.
        hours: CPU time to plan for, in hours.
    """
    queue.check_fairness()
    found = read_results(results)
    runs = queue.queue(found)
    left = [each for each in runs if each.name not in found]
    print(f"{len(runs) - len(left)} of {len(runs)} runs are finished; third seeds may be added\n")
    rows = [["runs", "done", "left", "CPU minutes per run"]]
    groups: dict[tuple[str, str], list[StudyRun]] = defaultdict(list)
    for each in runs:
        groups[each.suite, f"{each.family} (sweep)" if each.is_sweep else each.variant].append(each)
    for (suite, name), members in groups.items():
        done = [found[each.name].cpu_seconds / MINUTE for each in members if each.name in found]
        spent = f"{statistics.fmean(done):.1f}" if done else ""
        rows.append([f"{suite}: {name}", *map(str, (len(done), len(members) - len(done))), spent])
    print("\n".join(aligned(rows)))
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


def table(results: Path = RESULTS, docs: Path = ROOT / "docs") -> None:
    """Write the results page and its figures from the result files.

    Args:
        results: Folder of the result files.
        docs: Folder in which to write the page.
    """
    study_page.write_page(read_results(results), docs)


def repeat(name: Annotated[str, tyro.conf.Positional], data: Path, results: Path = RESULTS) -> None:
    """Train a finished run again, and check that all evaluations are the same.

    Args:
        name: Name of the run.
        data: Folder that contains the data sets.
        results: Folder of the result files.
    """
    before = find_result(read_results(results), name)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        for file in results.glob("*-sweep-*.json"):  # they determine the learning rate
            if file.stem != name:
                (place / file.name).write_bytes(file.read_bytes())
        if start(name, data, place, place / "runs").wait():
            sys.exit(f"error: {name} failed")
        after = read_results(place)[name]
    timings = ("seconds",)
    a, b = (
        [{key: x for key, x in line.items() if key not in timings} for line in each.evaluations]
        for each in (before, after)
    )
    if a != b or before.perplexities != after.perplexities:
        sys.exit(f"{name} differs from its result at commit {before.commit[:7]}:\n{a}\n{b}")
    print(f"{name} reproduces its result at commit {before.commit[:7]}")


# One run


def train_one(
    name: Annotated[str, tyro.conf.Positional], data: Path, results: Path, folder: Path
) -> None:
    """Train one run in this process and write its result.

    Args:
        name: Name of the run.
        data: Folder that contains the data sets.
        results: Folder of the result files.
        folder: Folder of unfinished runs.
    """
    found = read_results(results)
    runs = {each.name: each for each in queue.queue(found)}
    check_choice("run", name, runs)
    chosen = runs[name]
    if not chosen.rate_is_known:
        raise ValueError(f"the learning rate of {name} is not known yet: train its sweep first")
    torch.set_num_threads(1)
    if chosen.suite not in queue.TIMED:
        os.nice(NICE)
    try:
        result = finish(chosen, data, folder)
    except KeyboardInterrupt:
        sys.exit(130)
    write_result(result, results)
    shutil.rmtree(folder / name)


def finish(chosen: StudyRun, data: Path, folder: Path) -> Result:
    """Train a run to the end. Resume it if it was interrupted at the same commit.

    Raises:
        KeyboardInterrupt: If training is interrupted. The run can be resumed later.
        ValueError: If data files are missing, or if a run with a given training time took longer or
            shorter than planned.
    """
    begin, cpu = time.perf_counter(), time.process_time()
    spent_file, place = folder / f"{chosen.name}.{SPENT}", folder / chosen.name
    commit = current_commit()
    spent = read_spent(spent_file, commit)
    if spent is None and place.exists():
        shutil.rmtree(place)
    wall_before, cpu_before, steps = spent or (0.0, 0.0, None)
    spent_file.unlink(missing_ok=True)  # if this process is killed, the run starts over
    config, digests = with_data(chosen.config, data, folder)
    if chosen.minutes is not None:
        steps = steps or measured_steps(config, chosen.minutes, folder / f"{chosen.name}.timing")
        config = with_steps(config, steps)
    error, perplexities = "", {}
    try:
        train(config, place)
        if not chosen.is_sweep:
            perplexities = by_length(place, queue.find_suite(chosen.suite).lengths)
    except FloatingPointError as reason:
        error = str(reason)
    except KeyboardInterrupt:
        now = (wall_before + time.perf_counter() - begin, cpu_before + time.process_time() - cpu)
        spent_file.write_text(json.dumps([commit, *now, steps]), encoding="utf-8")
        raise
    lines = [] if error else read_metrics(place)
    evaluations = evaluations_of(lines)
    if evaluations and chosen.minutes is not None:
        check_time(evaluations[-1]["seconds"], chosen.minutes)
    return Result(
        name=chosen.name,
        suite=chosen.suite,
        variant=chosen.variant,
        family=chosen.family,
        seed=chosen.seed,
        is_sweep=chosen.is_sweep,
        learning_rate=config.training.learning_rate,
        parameters=queue.parameters(config.model),
        steps=max((line["step"] for line in lines), default=0),
        evaluations=evaluations,
        error=error,
        minutes=chosen.minutes,
        perplexities=perplexities,
        wall_seconds=round(wall_before + time.perf_counter() - begin, 1),
        cpu_seconds=round(cpu_before + time.process_time() - cpu, 1),
        commit=commit,
        config=configs.to_dict(chosen.config),
        data=digests,
        environment=environment(torch.device("cpu")),
    )


def evaluations_of(lines: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Return the evaluations of a run, each with the training time so far in seconds."""
    found, seconds = [], 0.0
    for line in lines:
        if line["split"] == "train":
            seconds += line["seconds"]
        elif line["split"] == "test":
            numbers = {name: x for name, x in line.items() if name != "split"}
            found.append(numbers | {"seconds": round(seconds, 1)})
    return found


def by_length(place: Path, lengths: tuple[int, ...]) -> dict[str, float]:
    """Return the perplexity of a language model at each context length that it supports."""
    if not lengths:
        return {}
    text = measure_lengths(str(place), LengthsConfig(lengths=lengths, max_tokens=2**16 + 1))
    return {str(score.length): score.perplexity for score in text.scores}


# Equal time


def measured_steps(config: RunConfig, minutes: float, folder: Path) -> int:
    """Return how many steps fit into the given time, judging by the median of a few steps."""
    train(with_steps(config, CALIBRATION, evaluations=1), folder, overwrite=True)
    lines = [line for line in read_metrics(folder) if line["split"] == "train"]
    shutil.rmtree(folder)
    median = statistics.median(line["seconds"] for line in lines[CALIBRATION // 3 :])
    return TIMED_EVALUATIONS * max(1, round(minutes * MINUTE / median / TIMED_EVALUATIONS))


def with_steps(config: RunConfig, steps: int, *, evaluations: int = TIMED_EVALUATIONS) -> RunConfig:
    """Return the run with another number of steps and evenly spaced evaluations."""
    task: Task = config.build_task()
    every = steps / evaluations / task.steps_per_epoch(config.training.batch_size)
    changes = {"steps": steps, "evaluate_every": every, "checkpoint_every": every}
    return replace(config, training=replace(config.training, **changes))


def check_time(seconds: float, minutes: float) -> None:
    """Raise ValueError if training took longer or shorter than planned."""
    if abs(seconds - minutes * MINUTE) > MAX_DEVIATION * minutes * MINUTE:
        raise ValueError(
            f"training took {seconds:.0f} s, expected {minutes * MINUTE:.0f} s to within "
            f"{MAX_DEVIATION:.0%}: are other programs running on this machine?"
        )


# Data


def with_data(config: RunConfig, data: Path, folder: Path) -> tuple[RunConfig, dict[str, str]]:
    """Return the run with the actual path of its data, and the SHA-256 hash of each file.

    Raises:
        ValueError: If a file is missing. The message names it.
    """
    path = getattr(config.data, "path", None)
    if path is None:  # generated data
        return config, {}
    kind = "text" if path in (queue.SHAKESPEARE, queue.SHAKESPEARE_TRAIN) else "images"
    names = [name for name, of in FILES.items() if of == kind]
    for name in names:
        if not (data / name).is_file():
            raise ValueError(f"data is '{data}', which does not contain {name}")
    digests = {name: sha256((data / name).read_bytes()).hexdigest() for name in names}
    place = folder.absolute() / "data"
    (place / queue.CIFAR10).mkdir(parents=True, exist_ok=True)
    for name in names:
        for link in (place / name, *[place / queue.CIFAR10 / name] * (kind == "images")):
            link.unlink(missing_ok=True)
            link.symlink_to((data / name).absolute())
    if kind == "text":
        text = (data / queue.SHAKESPEARE).read_bytes()
        (place / queue.SHAKESPEARE_TRAIN).write_bytes(text[: round(len(text) * (1 - HELD_OUT))])
    return configs.replace(config, {"data.path": str(place / path)}), digests


# Results and processes


def read_results(folder: Path) -> dict[str, Result]:
    """Read all results in a folder, by name.

    Raises:
        ValueError: If a file is not a result. The message names it.
    """
    found = {}
    for file in sorted(folder.glob("*.json")):
        try:
            result = Result(**json.loads(file.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file} is not a result of the study: {error}") from error
        if result.name != file.stem:
            raise ValueError(f"{file} contains the result {result.name!r}, expected {file.stem!r}")
        found[result.name] = result
    return found


def write_result(result: Result, folder: Path) -> None:
    """Write a result file atomically. Create the folder if necessary."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(result), indent=1) + "\n"
    write_atomically(folder / f"{result.name}.json", lambda path: path.write_text(text, "utf-8"))


def find_result(results: Results, name: str) -> Result:
    """Return the result of a run. Raise ValueError if there is none."""
    check_choice("run", name, results)
    return results[name]


def unfinished(results: Results, suites: Suites) -> list[StudyRun]:
    """Return the runs of the given suites that have no result yet, in order."""
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


def check_tree() -> None:
    """Check that the imported code is committed.

    Raises:
        ValueError: If onescan is imported from another folder, or if there are uncommitted changes.
    """
    package = Path(onescan.__file__).parents[1]
    if package != ROOT:
        raise ValueError(f"onescan is imported from {package}, expected {ROOT}: set PYTHONPATH=.")
    changes = git("status", "--porcelain", "--", "onescan", "benchmarks")
    if changes:
        raise ValueError(
            f"{ROOT} has uncommitted changes in onescan or benchmarks: commit them, or use a git "
            "worktree"
        )


def current_commit() -> str:
    """Return the hash of the commit that is checked out."""
    return git("rev-parse", "HEAD")


def git(*words: str) -> str:
    """Return the output of a git command in this working tree."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def read_spent(file: Path, commit: str) -> tuple[float, float, int | None] | None:
    """Return wall seconds, CPU seconds and steps of an interrupted run if it can be resumed."""
    if not file.exists():
        return None
    before, wall, cpu, steps = json.loads(file.read_text(encoding="utf-8"))
    return (wall, cpu, steps) if before == commit else None


def start(name: str, data: Path, results: Path, folder: Path) -> "subprocess.Popen[bytes]":
    """Start a process that trains one run with one thread."""
    words = ["--data", data, "--results", results, "--folder", folder]
    command = [sys.executable, __file__, "train", name, *map(str, words)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return subprocess.Popen(command, env=os.environ | threads | {"PYTHONPATH": str(ROOT)})


if __name__ == "__main__":
    main()
