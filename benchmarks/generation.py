"""LightNet, its two ablations and the DiT of its size, painting CIFAR-10: how near they come.

python benchmarks/generation.py FOLDER                     small models, for a CPU
python benchmarks/generation.py FOLDER --full --steps 0    the recipes as they stand, for a GPU

FOLDER holds CIFAR-10 as parquet files. First a classifier is trained on it, in whose features the
distance between what is painted and what was held out is measured: it is no FID. Then each
contestant is trained with each seed, for equally many updates, and judged all along. What was
finished before is not trained again, and what was stopped goes on.
"""

import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from onescan import configs
from onescan.recipes import find_recipe
from onescan.report import write_comparison
from onescan.training import RunConfig, RunResult, read_metrics, train

LIGHTNET, DIT = "cifar10_denoiser_lightnet", "cifar10_denoiser_dit"
CONTESTANTS = (LIGHTNET, f"{LIGHTNET}/without_tpe", f"{LIGHTNET}/without_lrpe", DIT)
CLASSIFIER = "cifar10_lightnet"
# of equal size to a percent; 8 x 8 patches
SMALL = {"width": 96, "depth": 4, "patch_size": (4, 4), "init_std": 0.1}
SMALL_DIT = SMALL | {"depth": 3}
SMALL_CLASSIFIER = {"width": 96, "depth": 4, "drop_path": 0.0, "init_std": 0.1}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to train, and for how long."""

    path: Annotated[str, tyro.conf.Positional]
    """A folder of CIFAR-10 as parquet files."""
    out: Path = Path("runs/cifar10_generation")
    """Folder for the runs and the page."""
    steps: int = 1000
    """Updates of each contestant; 0 is as many as its recipe has."""
    evaluations: int = 4
    """How often each is judged."""
    seeds: tuple[int, ...] = (0, 1)
    full: bool = False
    """The recipes' own sizes and batches."""
    images: int = 512
    """Images painted at each evaluation, and held-out ones that they are compared with."""
    guidance: float = 1.0
    sampler_steps: int = 25
    """Of each image, by Euler's method."""
    classifier_epochs: int = 5
    """Of the classifier, where it is a small one."""
    learning_rate: float = 1e-3
    """Of small models."""


def main(options: Options) -> None:
    judge = train_classifier(options)
    runs = {name: contestant(name, options, judge) for name in CONTESTANTS}
    results: dict[str, list[RunResult]] = {name: [] for name in runs}
    for seed in options.seeds:  # all with one seed first, so that a part is a comparison too
        for name, run in runs.items():
            training = replace(run.training, seed=seed)
            folder = options.out / name.replace("/", "_") / f"seed-{seed}"
            results[name].append(train(replace(run, training=training), folder, progress=True))
    print_distances(results)
    folders = [result.folder for each in results.values() for result in each]
    print(f"page: {write_comparison(folders, options.out / 'compare.html')}")


def train_classifier(options: Options) -> RunResult:
    run = configs.replace(find_recipe(CLASSIFIER)(), {"data.path": options.path})
    if not options.full:
        run = configs.replace(
            run,
            {f"model.{name}": value for name, value in SMALL_CLASSIFIER.items()}
            | {"training.epochs": options.classifier_epochs, "task.augment.num_ops": 0}
            | {"training.learning_rate": 2e-3},
        )
    result = train(run, options.out / "classifier" / "seed-0", progress=True)
    print(f"the classifier is right in {result.metrics['accuracy']:.1%} of held-out images")
    return result


def contestant(name: str, options: Options, judge: RunResult) -> RunConfig:
    run = find_recipe(name)()
    changes: dict[str, object] = {
        "data.path": options.path,
        "task.classifier": str(judge.folder),
        "task.evaluation_images": options.images,
        "task.sampler.guidance_scale": options.guidance,
        "task.sampler.steps": options.sampler_steps,
    }
    if not options.full:
        sizes = SMALL_DIT if name == DIT else SMALL
        changes |= {f"model.{field}": value for field, value in sizes.items()}
        changes |= {
            "training.batch_size": 32,
            "training.precision": "float32",
            "training.learning_rate": options.learning_rate,
            "training.ema_decay": 0.995,
        }
    if options.steps:
        changes["training.steps"] = options.steps
    run = configs.replace(run, changes)
    per_epoch = 50_000 // run.training.batch_size
    steps = options.steps or run.training.epochs * per_epoch
    return configs.replace(
        run, {"training.evaluate_every": steps / options.evaluations / per_epoch}
    )


def print_distances(results: dict[str, list[RunResult]]) -> None:
    print("\nfeature distance over updates, mean +- spread over seeds")
    for name, runs in results.items():
        tests = [
            [line for line in read_metrics(run.folder) if line["split"] == "test"] for run in runs
        ]
        cells = []
        for lines in zip(*tests, strict=True):
            values = [line["feature_distance"] for line in lines]
            spread = f" +- {statistics.stdev(values):.2f}" if len(values) > 1 else ""
            cells.append(f"{lines[0]['step']}: {statistics.mean(values):.2f}{spread}")
        last = [run.metrics["label_accuracy"] for run in runs]
        print(f"{name:<38} {'   '.join(cells)}   labelled as asked {statistics.mean(last):.1%}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
