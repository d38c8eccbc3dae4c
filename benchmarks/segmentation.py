"""Compare dense predictors with U-Nets of the same size, trained with the same recipe.

python benchmarks/segmentation.py --recipes canvas_segmentation solids --seeds 0 1

The U-Net has three levels of two convolutions each, with group norms, max pooling, transposed
convolutions and skip connections. It has the largest width with at most as many parameters as the
recipe's model; data, loss, steps, batch size, optimizer and learning rate are those of the recipe.
Finished runs in the folder are kept.
"""

import statistics
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn

from onescan.configs import ModelConfig
from onescan.experiments.recipes import find_recipe
from onescan.experiments.report.format import plain_table
from onescan.experiments.report.runs import read_run
from onescan.experiments.training import RunConfig, train
from onescan.models.dense_predictor import DensePredictorConfig
from onescan.shapes import GridOutputs, Grids

LEVELS = 3
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
POOLS = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
GROUPS = 4


@dataclass(frozen=True, kw_only=True)
class UNetConfig(ModelConfig):
    """A U-Net for grids whose sides are multiples of 4."""

    axes: int
    channels: int
    out_channels: int
    width: int
    """Channels at full resolution, doubled at each level; a multiple of 4."""

    def build(self) -> "UNet":
        return UNet(self)

    def example_inputs(self) -> tuple[Grids]:
        return (torch.zeros(1, self.channels, *(8,) * self.axes),)


class UNet(nn.Module):
    """Encoder and decoder with skip connections."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        axes, widths = config.axes, [config.width * 2**level for level in range(LEVELS)]
        channels = [config.channels, *widths]
        self.down = nn.ModuleList(map(_convolutions, [axes] * LEVELS, channels, widths))
        self.pool = POOLS[axes](2)
        pairs = list(pairwise(widths))
        self.enlarge = nn.ModuleList(
            TRANSPOSED[axes](high, low, 2, stride=2) for low, high in pairs
        )
        self.up = nn.ModuleList(_convolutions(axes, 2 * low, low) for low, _ in pairs)
        self.head = CONVOLUTIONS[axes](config.width, config.out_channels, 1)

    def forward(self, x: Grids) -> GridOutputs:
        skips: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else self.pool(x))
            skips.append(x)
        for block, enlarge, skip in zip(
            reversed(self.up), reversed(self.enlarge), reversed(skips[:-1]), strict=True
        ):
            x = block(torch.cat([enlarge(x), skip], dim=1))
        return self.head(x)


def _convolutions(axes: int, in_channels: int, out_channels: int) -> nn.Module:
    convolution = CONVOLUTIONS[axes]
    return nn.Sequential(
        *(
            convolution(in_channels, out_channels, 3, padding=1),
            nn.GroupNorm(GROUPS, out_channels),
            nn.ReLU(),
        ),
        *(
            convolution(out_channels, out_channels, 3, padding=1),
            nn.GroupNorm(GROUPS, out_channels),
            nn.ReLU(),
        ),
    )


def count(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def unet_of_equal_size(config: DensePredictorConfig) -> UNetConfig:
    """Return the widest U-Net with at most as many parameters as a dense predictor."""
    max_parameters, largest = count(config.build()), None
    for width in range(GROUPS, 256, GROUPS):
        unet = UNetConfig(
            axes=len(config.image_size),
            channels=config.channels,
            out_channels=config.out_channels,
            width=width,
        )
        if count(unet.build()) > max_parameters:
            break
        largest = unet
    if largest is None:
        raise ValueError(f"a U-Net of width {GROUPS} has more than {max_parameters:,} parameters")
    return largest


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the benchmark."""

    recipes: tuple[str, ...] = ("canvas_segmentation", "solids")
    """Segmentation recipes."""
    seeds: tuple[int, ...] = (0, 1)
    """Random seeds."""
    steps: int | None = None
    """Training steps; None for those of the recipe."""
    out: Path = Path("benchmarks/results/segmentation")
    """Folder for the runs."""


def main(options: Options) -> list[list[str]]:
    """Train all runs, and return the rows of the table."""
    rows = [["recipe", "model", "parameters", "mean IoU", "mean Dice", "training time, s"]]
    for name in options.recipes:
        recipe = find_recipe(name)()
        assert isinstance(recipe.model, DensePredictorConfig)
        models = {"LightNet": recipe.model, "U-Net": unet_of_equal_size(recipe.model)}
        for label, model in models.items():
            folders = [options.out / name / label / f"seed-{seed}" for seed in options.seeds]
            results = [
                train(_run(recipe, model, seed, options), folder)
                for seed, folder in zip(options.seeds, folders, strict=True)
            ]
            rows.append(
                [
                    *(name, label, f"{count(model.build()):,}"),
                    *(
                        _over_seeds([result.metrics[key] for result in results])
                        for key in ("mean_iou", "mean_dice")
                    ),
                    f"{statistics.mean(read_run(folder).seconds for folder in folders):.0f}",
                ]
            )
    print(plain_table(rows, left=2))
    return rows


def _run(recipe: RunConfig, model: ModelConfig, seed: int, options: Options) -> RunConfig:
    changes = {"seed": seed}
    if options.steps is not None:
        changes["steps"] = options.steps
    machine = replace(recipe.machine, trackers=())
    return replace(
        recipe, model=model, training=replace(recipe.training, **changes), machine=machine
    )


def _over_seeds(values: list[float]) -> str:
    spread = f" \N{PLUS-MINUS SIGN} {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
