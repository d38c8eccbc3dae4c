"""Small models that differ in their mixer, trained alike on CIFAR-10: test accuracy and its spread.

python benchmarks/mixers.py --data FOLDER                the table of docs/results.md
python benchmarks/mixers.py --data FOLDER --seeds 0      one seed each

FOLDER holds CIFAR-10 as parquet files. A run that is finished is not repeated, and one that was
stopped goes on, so that several calls may share the work: give each some of the names.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path

import tyro

from onescan import configs
from onescan.recipes import find_recipe
from onescan.training import train

NAMES = (
    "cifar10_lightnet",
    "cifar10_lion_lit",
    "cifar10_lion_d",
    "cifar10_lion_s",
    "cifar10_lion_d_natural",
    "cifar10_lion_s_natural",
    "cifar10_deit",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to train, and for how long."""

    data: str
    """Folder of CIFAR-10's parquet files."""
    out: Path = Path("runs/mixers")
    """Where the runs go."""
    names: tuple[str, ...] = NAMES
    """Recipes."""
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 400
    """Updates."""
    batch_size: int = 64
    width: int = 96
    depth: int = 3


def accuracy(name: str, seed: int, options: Options) -> float:
    changes = {
        "data.path": options.data,
        "model.width": options.width,
        "model.depth": options.depth,
        "training.steps": options.steps,
        "training.batch_size": options.batch_size,
        "training.seed": seed,
        "machine.trackers": (),
    }
    run = configs.replace(find_recipe(name)(), changes)
    result = train(run, options.out / name / f"seed-{seed}", progress=True)
    return result.evaluation.metrics["accuracy"]


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    print(f"{options.steps} updates of {options.batch_size} images, "
          f"{options.depth} blocks of width {options.width}")  # fmt: skip
    for name in options.names:
        scores = [100 * accuracy(name, seed, options) for seed in options.seeds]
        spread = f" +- {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
        each = ", ".join(f"{score:.2f}" for score in scores)
        print(f"{name:<24}{statistics.mean(scores):6.2f}%{spread}  ({each})", flush=True)


if __name__ == "__main__":
    main()
