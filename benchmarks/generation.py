"""Train LightNet, two of its ablations and a DiT of equal size on CIFAR-10, and compare samples.

python benchmarks/generation.py FOLDER                     small models, for a CPU
python benchmarks/generation.py FOLDER --scaling           LightNet alone, in 6 sizes
python benchmarks/generation.py FOLDER --full --steps 0    the recipes unchanged, for a GPU

FOLDER contains CIFAR-10 as parquet files. First a classifier is trained, whose features give the
Frechet distance between generated and test images; it is not FID. Then each candidate is trained
with each seed for equally many steps, and evaluated several times. Finished runs are not repeated
and interrupted ones are resumed.
"""

import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from matplotlib.figure import Figure
from results import aligned, environment, write

from onescan import configs
from onescan.experiments.recipes import find_recipe
from onescan.experiments.report import write_comparison
from onescan.experiments.training import RunConfig, RunResult, read_metrics, train

LIGHTNET, DIT = "cifar10_denoiser_lightnet", "cifar10_denoiser_dit"
CANDIDATES = (LIGHTNET, f"{LIGHTNET}/without_tpe", f"{LIGHTNET}/without_lrpe", DIT)
CLASSIFIER = "cifar10_lightnet"
# LightNet and DiT are of equal size within a percent; images have 8 x 8 patches.
SMALL = {"width": 96, "depth": 4, "patch_size": (4, 4), "init_std": 0.1}
SMALL_DIT = SMALL | {"depth": 3}
# as in LightNet's Figure 4, which has four sizes of models and three of patches
SCALING = {
    f"{LIGHTNET}/width-{width}-patch-{patch}": {
        "width": width,
        "mixer.num_heads": width // 32,
        "patch_size": (patch, patch),
    }
    for width in (32, 64, 128)
    for patch in (8, 4)
}
SMALL_CLASSIFIER = {"width": 96, "depth": 4, "drop_path": 0.0, "init_std": 0.1}
TRAINING_IMAGES = 50_000


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the benchmark."""

    path: Annotated[str, tyro.conf.Positional]
    """Folder with CIFAR-10 as parquet files."""
    out: Path = Path("runs/cifar10_generation")
    """Folder for the runs, the report and the results."""
    steps: int = 1000
    """Training steps of each candidate; 0 trains as long as its recipe."""
    evaluations: int = 4
    """Number of evaluations of each candidate."""
    seeds: tuple[int, ...] = (0, 1)
    """Random seeds; trains one run per seed."""
    scaling: bool = False
    """Train LightNet alone, in three widths and with two sizes of patches."""
    full: bool = False
    """Use the recipes' own model and batch sizes."""
    images: int = 512
    """Generated images per evaluation, and test images that they are compared with."""
    guidance_scale: float = 1.0
    """Scale of classifier-free guidance; 1 disables it."""
    sampler_steps: int = 25
    """Euler steps per image."""
    classifier_epochs: int = 5
    """Epochs of the small classifier."""
    learning_rate: float = 1e-3
    """Learning rate of small models."""


def train_classifier(options: Options) -> RunResult:
    run = configs.replace(find_recipe(CLASSIFIER)(), {"data.path": options.path})
    if not options.full:
        changes = {f"model.{name}": value for name, value in SMALL_CLASSIFIER.items()} | {
            "training.epochs": options.classifier_epochs,
            "training.learning_rate": 2e-3,
            "task.augment.num_ops": 0,
        }
        run = configs.replace(run, changes)
    result = train(run, options.out / "classifier" / "seed-0", progress=True)
    print(f"the classifier has a test accuracy of {result.metrics['accuracy']:.1%}")
    return result


def prepare(name: str, options: Options, classifier: Path) -> RunConfig:
    changes: dict[str, Any] = {
        "data.path": options.path,
        "task.classifier": str(classifier),
        "task.evaluation_images": options.images,
        "task.sampler.guidance_scale": options.guidance_scale,
        "task.sampler.steps": options.sampler_steps,
    }
    if not options.full:
        sizes = SMALL_DIT if name == DIT else SMALL | SCALING.get(name, {})
        changes |= {f"model.{field}": value for field, value in sizes.items()}
        changes |= {
            "training.batch_size": 32,
            "training.precision": "float32",
            "training.learning_rate": options.learning_rate,
            "training.ema_decay": 0.995,
        }
    if options.steps:
        changes["training.steps"] = options.steps
    recipe = find_recipe(LIGHTNET if name in SCALING else name)
    run = configs.replace(recipe(), changes)
    per_epoch = TRAINING_IMAGES // run.training.batch_size
    epochs = options.steps / per_epoch if options.steps else run.training.epochs
    return configs.replace(run, {"training.evaluate_every": epochs / options.evaluations})


def distances(results: list[RunResult]) -> dict[int, list[float]]:
    """Return the feature distances of all seeds at each evaluation, by step."""
    by_step: dict[int, list[float]] = {}
    for result in results:
        for line in read_metrics(result.folder):
            if line["split"] == "test":
                by_step.setdefault(line["step"], []).append(line["feature_distance"])
    return by_step


def deviation(values: list[float]) -> float:
    """Return the standard deviation over seeds; 0 for one seed."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def main(options: Options) -> None:
    if options.scaling and options.full:
        raise SystemExit("--scaling trains small models, and --full those of the recipes")
    classifier = train_classifier(options)
    names = tuple(SCALING) if options.scaling else CANDIDATES
    runs = {name: prepare(name, options, classifier.folder) for name in names}
    results: dict[str, list[RunResult]] = {name: [] for name in runs}
    for seed in options.seeds:  # all candidates first, so that one seed is a comparison too
        for name, run in runs.items():
            training = replace(run.training, seed=seed)
            folder = options.out / name.replace("/", "_") / f"seed-{seed}"
            results[name].append(train(replace(run, training=training), folder, progress=True))
    distances_by_name = {name: distances(seeds) for name, seeds in results.items()}
    steps = list(distances_by_name[names[0]])
    rows = [["feature distance", *(f"step {step}" for step in steps), "classified as requested"]]
    figure = Figure(figsize=(7, 5), layout="constrained")
    axis = figure.subplots()
    for name, by_step in distances_by_name.items():
        means = [statistics.mean(by_step[step]) for step in steps]
        spreads = [deviation(by_step[step]) for step in steps]
        accuracy = statistics.mean(run.metrics["label_accuracy"] for run in results[name])
        cells = [f"{a:.2f} +- {b:.2f}" for a, b in zip(means, spreads, strict=True)]
        rows.append([name, *cells, f"{accuracy:.1%}"])
        axis.errorbar(steps, means, spreads, marker="o", label=name)
    print("\n".join(aligned(rows)))
    axis.set(xlabel="training steps", ylabel="Frechet distance in the classifier's features")
    axis.legend()
    machine = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    write(
        options.out,
        "generation",
        figure,
        options=options,
        environment=machine,
        distances=distances_by_name,
    )
    folders = [result.folder for seeds in results.values() for result in seeds]
    print(f"report: {write_comparison(folders, options.out / 'compare.html')}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
