"""Results of benchmarks: statistics over rounds, the environment, tables, JSON files and plots."""

import itertools
import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import onescan
from onescan.ops.backend import is_interpreted

MIN_MIB = 0.5  # smaller peaks are left out of exponents
PACKAGES = ("torch", "triton", "flash-linear-attention", "timm")
ALLOCATOR_VARIABLES = (  # read by torch, glibc and the dynamic linker
    "THP_MEM_ALLOC_ENABLE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Results of one candidate in one mode at one size; `error` says why there are none."""

    candidate: str
    mode: str
    size: int
    error: str = ""
    rounds_ms: tuple[float, ...] = ()
    """Milliseconds per call, one value per round."""
    quartiles_ms: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Lower quartile, median and upper quartile over rounds."""
    ratio: float | None = None
    """Median time divided by that of the first candidate."""
    peak_mib: float = 0.0
    """Maximum memory during a call beyond what was in use before it."""
    state_mib: float = 0.0
    """Memory of the state that is carried from call to call."""
    items_per_s: float = 0.0
    parameters: int = 0
    flops: int = 0
    """FLOPs of one head by a paper's formula; 0 if there is none."""

    @property
    def median_ms(self) -> float:
        """The median time per call."""
        return self.quartiles_ms[1]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Settings of a benchmark, and the results so far."""

    name: str
    """Name of the result files."""
    candidates: tuple[str, ...]
    """Ratios are relative to the first."""
    modes: tuple[str, ...]
    """What is measured of each candidate, such as "forward"."""
    sizes: tuple[int, ...]
    axis: str = "tokens"
    """Meaning of the sizes, such as "tokens"."""
    items: str = ""
    """What a call processes, as in "tokens per second"; empty if nothing is counted."""
    tokens: Callable[[int], int] = int
    """Maps a size to a multiple of the number of tokens, which exponents refer to."""
    rows: list[Row] = field(default_factory=list)

    def rows_of(self, candidate: str, mode: str) -> list[Row]:
        """Return the rows of a candidate and mode that have results."""
        key = (candidate, mode, "")
        return [row for row in self.rows if (row.candidate, row.mode, row.error) == key]

    def growth(self) -> list[dict[str, Any]]:
        """Return the exponents of time and memory over tokens, for each candidate and mode."""
        exponents = []
        for mode, name in itertools.product(self.modes, self.candidates):
            rows = [row for row in self.rows_of(name, mode) if row.median_ms]
            time = exponent([(self.tokens(row.size), row.median_ms) for row in rows])
            peaks = [(self.tokens(row.size), row.peak_mib) for row in rows]
            memory = exponent([(size, peak) for size, peak in peaks if peak >= MIN_MIB])
            exponents.append({"candidate": name, "mode": mode, "time": time, "memory": memory})
        return exponents


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the power of x that y grows with, fitted to logarithms; None for a single point."""
    if len(points) < 2:  # noqa: PLR2004
        return None
    x, y = zip(*[(math.log(a), math.log(b)) for a, b in points], strict=True)
    return statistics.linear_regression(x, y).slope


def environment(device: torch.device, threads: int | None = None) -> dict[str, Any]:
    """Describe the machine, the versions, and variables that affect memory allocation."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    cpus = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": cpus[0] if cpus else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads or torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "onescan": onescan.__version__,  # of the code that runs, which need not be installed
        **{name: package_version(name) for name in PACKAGES},
        "triton_interpreted": is_interpreted(),
        "allocator": {name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ},
    }


def package_version(name: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def format_rows(benchmark: Benchmark) -> str:
    """Format one table per mode, followed by errors and the exponents of growth."""
    columns: dict[str, Callable[[Row], str]] = {
        benchmark.axis: lambda row: f"{row.size}",
        "ms": lambda row: f"{row.median_ms:.4g}",
        "quartiles": lambda row: f"{row.quartiles_ms[0]:.4g} - {row.quartiles_ms[2]:.4g}",
        "ratio": lambda row: "" if row.ratio is None else f"{row.ratio:.3g}",
        "peak MiB": lambda row: f"{row.peak_mib:.4g}",
        "state MiB": lambda row: f"{row.state_mib:.4g}" if row.state_mib else "",
        f"{benchmark.items}/s": lambda row: f"{row.items_per_s:.4g}" if benchmark.items else "",
        "parameters": lambda row: f"{row.parameters:,}" if row.parameters else "",
        "FLOPs of a head": lambda row: f"{row.flops:,}" if row.flops else "",
    }
    columns = {
        title: format_cell
        for title, format_cell in columns.items()
        if any(map(format_cell, benchmark.rows))
    }
    growth, lines = benchmark.growth(), []
    for mode in benchmark.modes:
        cells = [[mode, *columns]]
        for name in benchmark.candidates:
            for row in benchmark.rows_of(name, mode):
                cells.append([name, *(format_cell(row) for format_cell in columns.values())])
        lines += ["", *aligned(cells)]
        for row in benchmark.rows:
            if row.mode == mode and row.error:
                lines.append(f"{row.candidate}, {benchmark.axis} {row.size}: {row.error}")
        for exponents in growth:
            if exponents["mode"] == mode and exponents["time"] is not None:
                memory = (
                    ""
                    if exponents["memory"] is None
                    else f", memory as T^{exponents['memory']:.2f}"
                )
                lines.append(
                    f"{exponents['candidate']}: time grows as T^{exponents['time']:.2f}{memory}"
                )
    return "\n".join(lines[1:])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format a table: the first column is aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells]))
    return lines


def write(folder: Path, name: str, figure: Any = None, **data: Any) -> None:
    """Write data to NAME.json, atomically, and a figure to NAME.png; create the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{name}.json.part"
    part.write_text(json.dumps(data, indent=1, default=to_json) + "\n", encoding="utf-8")
    part.replace(folder / f"{name}.json")
    if figure is not None:
        figure.savefig(folder / f"{name}.png", dpi=150)


def to_json(value: object) -> object:
    """Return a dataclass as a dict, and other objects as strings."""
    return asdict(value) if is_dataclass(value) else str(value)


def plot_rows(benchmark: Benchmark) -> Any:
    """Plot time and memory over sizes, or as bars if there is one size."""
    from matplotlib.figure import Figure  # the processes of cases do not need it

    figure = Figure(figsize=(10, 4 * len(benchmark.modes)), layout="constrained")
    grid = figure.subplots(len(benchmark.modes), 2, squeeze=False)
    measures = {
        "milliseconds per call": lambda row: row.median_ms,
        "peak MiB": lambda row: max(row.peak_mib, 0.01),  # logarithms have no 0
    }
    for mode, axes in zip(benchmark.modes, grid, strict=True):
        for axis, (title, measure) in zip(axes, measures.items(), strict=True):
            axis.set_title(mode)
            for i, name in enumerate(benchmark.candidates):
                rows = benchmark.rows_of(name, mode)
                x, y = [row.size for row in rows], [measure(row) for row in rows]
                if len(benchmark.sizes) == 1:
                    axis.barh([name] * len(y), y, color=f"C{i}")
                elif rows:
                    axis.plot(x, y, color=f"C{i}", marker="o", label=name)
            if len(benchmark.sizes) == 1:
                axis.invert_yaxis()
                axis.set_xlabel(f"{title}, {benchmark.axis} {benchmark.sizes[0]}")
            elif axis.lines:
                axis.set(xscale="log", yscale="log", xlabel=benchmark.axis, ylabel=title)
                axis.set_xticks(benchmark.sizes, list(map(str, benchmark.sizes)))
                axis.minorticks_off()
    handles, names = grid[0, 0].get_legend_handles_labels()
    if handles and len(benchmark.sizes) > 1:
        figure.legend(handles, names, loc="outside upper center", ncols=min(len(names), 5))
    return figure
