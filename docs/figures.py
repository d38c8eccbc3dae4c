"""Draw the figures of the documentation site: `python docs/figures.py`.

The picture of the landing page reads its numbers from a table in performance.md; those of the
concept pages are computed by the ops.
"""

import re
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

from onescan.ops import (
    additive_decay,
    decay_attention,
    gaussian_kernel,
    linear_diffusion,
    lrpe_frequencies,
)

DOCS = Path(__file__).parent
NUMBER = r"\d+(?:\.\d+)?"
LABELS = {  # of the rows in the speed figure
    "softmax": "softmax attention",
    "one scan with LRPE": "LightNet with rotary positions",
    "one scan": "LightNet without positions",
}


def table(page, heading):
    """Return the rows of the table whose header contains `heading`, as lists of cells."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|") and heading in line)
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [rows[0], *rows[2:]]


def speed():
    """Time by sequence length, from the first table of 'One scan on a CPU'."""
    header, *rows = table("performance.md", "forward, T =")
    tokens = [int(re.search(r"\d+", cell)[0]) for cell in header[1:-1]]
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, *cells in rows:
        if name in LABELS:
            times = [float(re.match(NUMBER, cell)[0]) for cell in cells[:-1]]
            axes.loglog(tokens, times, marker="o", label=LABELS[name])
    axes.set(xlabel="tokens", ylabel="milliseconds", xticks=tokens, xticklabels=tokens)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def additive_weights():
    """Weight of each token (column) in each output (row), causal and bidirectional."""
    torch.manual_seed(0)
    size = 24
    q, k = torch.ones(1, size, 1, 1), torch.randn(1, size, 1, 1)
    values = torch.eye(size).reshape(1, size, 1, size)
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    for axes, causal in zip(figure.subplots(1, 2), (True, False), strict=True):
        axes.imshow(additive_decay(q, k, values, causal=causal)[0][0, :, 0], cmap="Blues")
        axes.set(title="causal" if causal else "bidirectional", xlabel="token s", ylabel="output t")
    return figure


def lion_weights():
    """Attention weights of equal queries and keys under three decays."""
    torch.manual_seed(0)
    size = 24
    q = k = torch.ones(1, size, 1, 1)
    values = torch.eye(size).reshape(1, size, 1, size)
    decays = {
        "LION-lit: none": None,
        "LION-d: one per head": torch.full((1,), 0.8).log(),
        "LION-s: one per token": torch.nn.functional.logsigmoid(2 * torch.randn(1, size, 1) + 1.5),
    }
    figure = Figure(figsize=(8, 3), layout="constrained")
    for axes, (name, decay) in zip(figure.subplots(1, 3), decays.items(), strict=True):
        weights = decay_attention(q, k, values, decay)[0][0, :, 0]
        axes.imshow(weights, cmap="Blues", vmin=0, vmax=1)
        axes.set(title=name, xlabel="token j", ylabel="output i")
    return figure


def rotations():
    """Similarity by distance of single channels, for the initial theta of a head of width 16."""
    distance, theta = torch.arange(0, 65), lrpe_frequencies(16, axes=1)
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for j in range(4):
        axes.plot(distance, (distance * theta[j]).cos(), label=f"$j = {j}$")
    axes.set(xlabel="distance $n - m$", ylabel=r"$\cos((n - m)\,\theta_j)$")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.15))
    return figure


def diffusion():
    """An impulse after 1, 10 and 100 explicit diffusion steps."""
    one, sigma = torch.ones(1), torch.tensor([1.5])
    kernel = gaussian_kernel(past=one, future=one, sigma=sigma, radius=5)
    x = torch.zeros(1, 65, 1, 1)
    x[:, 32] = 1
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for step in range(1, 101):
        x = linear_diffusion(x, kernel, torch.tensor([0.1]))
        if step in (1, 10, 100):
            axes.plot(x.flatten(), label=f"{step} step{'s' * (step > 1)}")
    axes.set(xlabel="token", ylabel="value", yscale="log", ylim=(1e-5, 1))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


FIGURES = (speed, additive_weights, lion_weights, rotations, diffusion)


def main():
    mpl.rcParams.update({"svg.hashsalt": "onescan", "svg.fonttype": "path", "font.size": 10})
    for draw in FIGURES:
        path = DOCS / "images" / f"{draw.__name__}.svg"
        draw().savefig(path, metadata={"Date": None}, facecolor="white")
        print(path)


if __name__ == "__main__":
    main()
