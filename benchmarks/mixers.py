"""Small models that differ in their mixer, trained alike on CIFAR-10: test accuracy and its spread.

python benchmarks/mixers.py --data FOLDER                the table of docs/results.md
python benchmarks/mixers.py --data FOLDER --table ldn    LDN, LDN without its parts, and ViT
python benchmarks/mixers.py --data FOLDER --seeds 0      one seed each

FOLDER holds CIFAR-10 as parquet files. A run that is finished is not repeated, and one that was
stopped goes on, so that several calls may share the work: give each some of the names.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from onescan import configs
from onescan.models.size import model_size
from onescan.recipes import find_recipe
from onescan.training import RunConfig, train

TABLES = {
    "mixers": (
        "cifar10_lightnet",
        "cifar10_lion_lit",
        "cifar10_lion_d",
        "cifar10_lion_s",
        "cifar10_lion_d_natural",
        "cifar10_lion_s_natural",
        "cifar10_deit",
    ),
    "ldn": (
        "cifar10_ldn",
        "cifar10_ldn/without_diffusion",
        "cifar10_ldn/without_local_update",
        "cifar10_ldn/without_linear_attention",
        "cifar10_ldn/separable_diffusion",
        "cifar10_vit",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to train, and for how long."""

    data: str
    """Folder of CIFAR-10's parquet files."""
    out: Path = Path("runs/mixers")
    """Where the runs go."""
    table: Literal["mixers", "ldn"] = "mixers"
    names: tuple[str, ...] = ()
    """Recipes, in place of the table's."""
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 400
    """Updates."""
    batch_size: int = 64
    width: int = 96
    depth: int = 3


def small(name: str, seed: int, options: Options) -> RunConfig:
    changes = {
        "data.path": options.data,
        "model.width": options.width,
        "model.depth": options.depth,
        "training.steps": options.steps,
        "training.batch_size": options.batch_size,
        "training.seed": seed,
        "machine.trackers": (),
    }
    return configs.replace(find_recipe(name)(), changes)


def accuracy(name: str, seed: int, options: Options) -> float:
    folder = options.out / name / f"seed-{seed}"
    result = train(small(name, seed, options), folder, progress=True)
    return result.evaluation.metrics["accuracy"]


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    print(f"{options.steps} updates of {options.batch_size} images, "
          f"{options.depth} blocks of width {options.width}")  # fmt: skip
    names = options.names or TABLES[options.table]
    widest = max(map(len, names))
    for name in names:
        millions = model_size(small(name, 0, options).model).parameters / 1e6
        scores = [100 * accuracy(name, seed, options) for seed in options.seeds]
        spread = f" +- {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
        each = ", ".join(f"{score:.2f}" for score in scores)
        mean = statistics.mean(scores)
        print(f"{name:<{widest}}  {millions:.2f} M  {mean:5.2f}%{spread}  ({each})", flush=True)


if __name__ == "__main__":
    main()
