"""Compare the training speed of recipes over equal numbers of steps, interleaved in rounds.

python benchmarks/training.py --data FOLDER
python benchmarks/training.py --candidates digits digits/without_tpe --steps 40

Each candidate is a real run, interrupted and resumed in each round, so that other load on the
machine affects all of them. Images per second include reading, augmentation, forward, backward and
the optimizer, but neither evaluations and checkpoints nor the first steps after each start.
"""

import contextlib
import signal
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from harness import find_device
from matplotlib.figure import Figure
from results import aligned, environment, write

from onescan import configs
from onescan.experiments.recipes import find_recipe
from onescan.experiments.training import Progress, RunConfig, read_metrics, train
from onescan.experiments.training.logging import waiting_share

WARM_UP_STEPS = 3  # after each start


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the benchmark."""

    candidates: tuple[str, ...] = ("cifar10_lightnet", "cifar10_deit")
    """Recipes to train; ratios are relative to the first."""
    data: str | None = None
    """Value of --data.path for all recipes."""
    steps: int = 200
    """Steps of each recipe."""
    rounds: int = 4
    """Number of rounds that the steps are divided into."""
    device: str = "auto"
    """Device: cpu, cuda, ...; auto uses a GPU if there is one."""
    out: Path = Path("bench/training")
    """Folder for the results."""


def prepare(name: str, options: Options) -> RunConfig:
    changes: dict[str, Any] = {
        "training.steps": options.steps,
        "machine.trackers": (),
        "machine.device": options.device,
    }
    if options.data is not None:
        changes["data.path"] = options.data
    return configs.replace(find_recipe(name)(), changes)


def interrupt_at(step: int) -> Callable[[Progress], None]:
    def interrupt(now: Progress) -> None:
        if now.step == step < now.steps:
            signal.raise_signal(signal.SIGINT)

    return interrupt


def summarize(run: RunConfig, folder: Path, starts: list[int]) -> dict[str, float]:
    lines = [line for line in read_metrics(folder) if line["split"] == "train"]
    warm = [
        line for line in lines if not any(0 < line["step"] - s <= WARM_UP_STEPS for s in starts)
    ]
    tenth = max(1, len(lines) // 10)
    losses = [line["loss"] for line in lines]
    return {
        "images/s": run.training.batch_size / statistics.median(line["seconds"] for line in warm),
        "waiting for data": waiting_share(warm),
        "first losses": statistics.mean(losses[:tenth]),
        "last losses": statistics.mean(losses[-tenth:]),
        "memory, MiB": max(line["memory_mib"] for line in lines),
    }


def main(options: Options) -> None:
    runs = {name: prepare(name, options) for name in options.candidates}
    length = -(-options.steps // options.rounds)
    starts = range(0, options.steps, length)
    with tempfile.TemporaryDirectory() as folder:
        for start in starts:
            for name, run in runs.items():
                print(f"{name}, step {start}", flush=True)
                with contextlib.suppress(KeyboardInterrupt):
                    train(run, Path(folder) / name, progress=interrupt_at(start + length))
        results = {
            name: summarize(run, Path(folder) / name, [*starts]) for name, run in runs.items()
        }
    first = results[options.candidates[0]]["images/s"]
    for row in results.values():
        row["times as fast"] = row["images/s"] / first
    table = [["", *results[options.candidates[0]]]]
    table += [[name, *(f"{value:.4g}" for value in row.values())] for name, row in results.items()]
    print("\n".join(aligned(table)))
    figure = Figure(figsize=(6, 1 + 0.5 * len(results)), layout="constrained")
    figure.subplots().barh(list(results), [row["images/s"] for row in results.values()])
    figure.axes[0].set_xlabel("images per second")
    machine = environment(find_device(options.device))
    write(options.out, "training", figure, options=options, environment=machine, results=results)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
