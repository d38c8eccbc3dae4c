"""Which position encodings learn relative positions on grids with one to four axes?

In each example, two marked tokens lie in a grid of random symbols. Along each axis, they are
equally likely to be neighbors or further apart, and either may come first. For each axis, the model
predicts which of the two comes first (order), and whether they are neighbors (distance), so chance
is 50% for any number of axes. The model is a small bidirectional LightNet with both position
encodings, with one of them, and with neither.

MD-LRPE alone cannot learn the order: its scores contain the cosine of the difference between two
positions (LightNet, App. A.2), which does not change if an axis is reversed.
"""

import math
import statistics
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
import tyro
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from results import aligned, environment, write
from torch import Tensor, nn

from onescan.layers.basic import GLUConfig
from onescan.layers.block import Block, init_weights
from onescan.layers.mixers import LightNetMixerConfig
from onescan.layers.position import ToeplitzPositionConfig
from onescan.shapes import Grid

SHAPES = {1: (64,), 2: (8, 8), 3: (4, 4, 4), 4: (3, 3, 3, 3)}
SYMBOLS = 8  # other tokens; the two marks are tokens 8 and 9
Encoding = Literal["both", "MD-TPE", "MD-LRPE", "none"]
ENCODINGS: dict[Encoding, tuple[bool, bool]] = {  # whether MD-TPE and MD-LRPE are used
    "both": (True, True),
    "MD-TPE": (True, False),
    "MD-LRPE": (False, True),
    "none": (False, False),
}
TARGETS = ("order", "distance")
TEST_EXAMPLES = 2048

Targets = Float[Tensor, "B axes targets"]
Accuracies = dict[str, float]  # by target


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the experiment."""

    axes: tuple[Literal[1, 2, 3, 4], ...] = (1, 2, 3, 4)
    """Numbers of axes."""
    encodings: tuple[Encoding, ...] = ("both", "MD-TPE", "MD-LRPE", "none")
    """Position encodings."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Random seeds."""
    steps: int = 400
    """Optimizer steps, with new examples in each."""
    batch_size: int = 64
    """Examples per step."""
    out: Path = Path("bench/axes")
    """Folder for the results."""


class Classifier(nn.Module):
    """Predict order and distance of the marks along each axis, from the mean over all tokens."""

    def __init__(self, shape: tuple[int, ...], *, tpe: bool, lrpe: bool) -> None:
        super().__init__()
        width, mixer = 64, LightNetMixerConfig(num_heads=4, gate_rank=16, lrpe=lrpe)
        self.grid = Grid(shape)
        self.embedding = nn.Embedding(SYMBOLS + 2, width)
        position = ToeplitzPositionConfig(hidden_states=16, bidirectional=True)
        self.position = position.build(width=width, grid=self.grid) if tpe else None
        self.blocks = nn.ModuleList(
            Block(width, axes=len(shape), mixer=mixer, mlp=GLUConfig(), norm="layer")
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(shape) * len(TARGETS))
        self.apply(lambda module: init_weights(module, std=0.1))

    def forward(self, tokens: Int[Tensor, "B T"]) -> Targets:
        x = self.embedding(tokens)
        if self.position is not None:
            x, _ = self.position(x, self.grid)
        for block in self.blocks:
            x, _ = block(x, self.grid)
        return self.head(self.norm(x).mean(dim=1)).unflatten(-1, (-1, len(TARGETS)))


def examples(
    shape: tuple[int, ...], count: int, rng: torch.Generator
) -> tuple[Int[Tensor, "B T"], Targets]:
    """Draw grids. The targets of an axis: is the first mark before the second, are they neighbors?

    Args:
        shape: Sides of the grid, each at least 3.
        count: Number of grids.
        rng: Source of randomness.
    """
    tokens = torch.randint(SYMBOLS, (count, math.prod(shape)), generator=rng)
    index = torch.zeros(2, count, dtype=torch.long)  # of the two marks, in row-major order
    targets = torch.empty(count, len(shape), len(TARGETS))
    for axis, size in enumerate(shape):
        is_first, is_near = torch.randint(2, (2, count), generator=rng).bool()
        far = torch.randint(2, size, (count,), generator=rng)
        distance = torch.where(is_near, 1, far)
        low = (torch.rand(count, generator=rng) * (size - distance)).long()
        low_high = torch.stack([low, low + distance])
        index = index * size + torch.where(is_first, low_high, low_high.flip(0))
        targets[:, axis] = torch.stack([is_first, is_near], dim=-1).float()
    for mark in (0, 1):
        tokens[torch.arange(count), index[mark]] = SYMBOLS + mark
    return tokens, targets


def accuracies(
    shape: tuple[int, ...], encoding: Encoding, seed: int, options: Options
) -> Accuracies:
    """Train a model and return the accuracy of each target on new examples, averaged over axes."""
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    tpe, lrpe = ENCODINGS[encoding]
    model = Classifier(shape, tpe=tpe, lrpe=lrpe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=3e-3, total_steps=options.steps, pct_start=0.1
    )
    for _ in range(options.steps):
        tokens, targets = examples(shape, options.batch_size, rng)
        loss = F.binary_cross_entropy_with_logits(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    tokens, targets = examples(shape, TEST_EXAMPLES, torch.Generator().manual_seed(2**31 + seed))
    with torch.no_grad():
        is_right = ((model(tokens) > 0) == (targets > 0)).float()
    return dict(zip(TARGETS, is_right.mean(dim=(0, 1)).tolist(), strict=True))


def main(options: Options) -> None:
    results: dict[str, list[Accuracies]] = {}
    table = [["axes", "encoding", *TARGETS]]
    for axes, encoding in product(options.axes, options.encodings):
        runs = [accuracies(SHAPES[axes], encoding, seed, options) for seed in options.seeds]
        results[f"{axes}, {encoding}"] = runs
        row = [mean_and_deviation([run[target] for run in runs]) for target in TARGETS]
        table.append([f"{axes}", encoding, *row])
        print("  ".join(table[-1]), flush=True)
    print("\n".join(aligned(table)))
    figure = Figure(figsize=(8, 4), layout="constrained")
    for plot, target in zip(figure.subplots(1, len(TARGETS), sharey=True), TARGETS, strict=True):
        for encoding in options.encodings:
            runs_by_axes = [results[f"{axes}, {encoding}"] for axes in options.axes]
            means = [statistics.mean(run[target] for run in runs) for runs in runs_by_axes]
            plot.plot(options.axes, means, marker="o", label=encoding)
        plot.set(title=target, xlabel="axes", ylabel="test accuracy", xticks=options.axes)
    plot.legend()
    machine = environment(torch.device("cpu"))
    write(options.out, "axes", figure, options=options, environment=machine, results=results)


def mean_and_deviation(values: list[float]) -> str:
    """Format the mean and, for several seeds, the standard deviation."""
    if len(values) == 1:
        return f"{values[0]:.1%}"
    return f"{statistics.mean(values):.1%} ± {statistics.stdev(values):.1%}"


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
