"""Draw the figure in README.md from a run trained by `make demo`.

python docs/pictures.py runs/digits/seed-0 [PICTURE.png]
"""

import argparse
from pathlib import Path

from matplotlib.figure import Figure

import onescan
from onescan.experiments.data import Example
from onescan.experiments.report.mixers import key_shares
from onescan.experiments.training import build_task

PICTURE = Path(__file__).parent / "images" / "key_importance.png"
BLOCK = 1  # the second block, the first one whose heads differ clearly


def key_importance(run: Path) -> Figure:
    """Draw one test digit of each class, and below it the key importance in each head."""
    checkpoint = onescan.load(run)
    test = build_task(checkpoint).test
    chosen = [Example(int((test.labels == label).int().argmax())) for label in range(10)]
    pixels, _ = test.read(chosen).batch
    images = checkpoint.format.model_input(pixels)
    shares = key_shares(checkpoint.model, images)[BLOCK][:, :, 1:]  # without the class token
    times = shares * (shares.shape[-1] + 1)  # relative to uniform weights
    heads = shares.shape[1]
    figure = Figure(figsize=(10, 1.04 * (1 + heads)), layout="constrained", dpi=100)
    axes = figure.subplots(1 + heads, 10)
    for column, image in enumerate(pixels):
        axes[0, column].imshow(image[0], cmap="gray_r")
        for head in range(heads):
            patches = times[column, head].reshape(4, 4).log2()
            drawn = axes[1 + head, column].imshow(patches, cmap="PuOr_r", vmin=-2, vmax=2)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    for head in range(heads):
        axes[1 + head, 0].set_ylabel(f"head {1 + head}")
    bar = figure.colorbar(drawn, ax=axes, shrink=0.6, aspect=30, ticks=[-2, -1, 0, 1, 2])
    bar.set_ticklabels(["1/4", "1/2", "1", "2", "4"])
    bar.set_label("weight of a patch, x the uniform share")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the figure in README.md from a run.")
    parser.add_argument("run", type=Path, help="folder of a digits run, such as runs/digits/seed-0")
    parser.add_argument(
        "picture", type=Path, nargs="?", default=PICTURE, help="output file (default: README's)"
    )
    arguments = parser.parse_args()
    key_importance(arguments.run).savefig(arguments.picture)


if __name__ == "__main__":
    main()
