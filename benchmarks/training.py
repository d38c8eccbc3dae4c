"""Training speed of recipes side by side: the same steps, a few of each in turn.

    python benchmarks/training.py --data FOLDER
    python benchmarks/training.py --recipes digits digits/without_tpe --steps 40

Each recipe is a real run, stopped and continued, so that a change in what else the machine does
meets all of them. Images per second are over the whole of an update: reading, augmentation,
forward, backward and the optimizer; evaluations and checkpoints are not in it, nor the first
updates after every start.
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

from onescan import configs
from onescan.recipes import find_recipe
from onescan.training import Progress, RunConfig, read_metrics, train
from onescan.training.logging import waiting_share

SETTLING = 3  # updates after a start


@dataclass(frozen=True, kw_only=True)
class Options:
    """Training speed of recipes side by side."""

    recipes: tuple[str, ...] = ("cifar10_lightnet", "cifar10_deit")
    """what to train; the first is what the others are compared with"""
    data: str | None = None
    """data.path of all of them"""
    steps: int = 200
    """updates of each"""
    turns: int = 4
    """how often each is stopped, so that the others have their turn"""


def main() -> None:
    options = tyro.cli(Options)
    runs = {name: prepared(name, options) for name in options.recipes}
    turn = -(-options.steps // options.turns)
    with tempfile.TemporaryDirectory() as folder:
        starts: dict[str, list[int]] = {name: [] for name in runs}
        for end in range(turn, options.steps + turn, turn):
            for name, run in runs.items():
                starts[name].append(end - turn)
                with contextlib.suppress(KeyboardInterrupt):
                    train(run, Path(folder) / name, progress=stopping_at(min(end, options.steps)))
        rows = {name: row(run, Path(folder) / name, starts[name]) for name, run in runs.items()}
    print_table(rows)


def prepared(name: str, options: Options) -> RunConfig:
    changes: dict[str, Any] = {"training.steps": options.steps, "machine.trackers": ()}
    if options.data is not None:
        changes["data.path"] = options.data
    return configs.replace(find_recipe(name)(), changes)


def stopping_at(step: int) -> Callable[[Progress], None]:
    def show(now: Progress) -> None:
        print(f"\r{now.step}/{now.steps}", end="", flush=True)
        if now.step == step < now.steps:
            signal.raise_signal(signal.SIGINT)

    return show


def row(run: RunConfig, folder: Path, starts: list[int]) -> dict[str, str]:
    lines = [line for line in read_metrics(folder) if line["split"] == "train"]
    settled = [line for line in lines if all(not 0 < line["step"] - s <= SETTLING for s in starts)]
    tenth = max(1, len(lines) // 10)
    losses = [line["loss"] for line in lines]
    speed = run.training.batch_size / statistics.median(line["seconds"] for line in settled)
    return {
        "images/s": f"{speed:.0f}",
        "waiting": f"{waiting_share(settled):.2%}",
        "first losses": f"{statistics.mean(losses[:tenth]):.3f}",
        "last losses": f"{statistics.mean(losses[-tenth:]):.3f}",
        "memory, MiB": f"{max(line['memory_mib'] for line in lines):.0f}",
    }


def print_table(rows: dict[str, dict[str, str]]) -> None:
    base = float(next(iter(rows.values()))["images/s"])
    columns = next(iter(rows.values()))
    print("\r" + f"{'':<24}" + "".join(f"{name:>14}" for name in columns) + f"{'times':>8}")
    for name, cells in rows.items():
        times = float(cells["images/s"]) / base
        print(f"{name:<24}" + "".join(f"{cell:>14}" for cell in cells.values()) + f"{times:>8.2f}")


if __name__ == "__main__":
    main()
