"""Measure the communication and memory of sequence parallelism, as Markdown tables.

measured: bytes that a rank receives from other ranks in one layer, counted in gloo processes on
this machine, for one float32 sequence of several lengths.

calculated: the same by formula for many GPUs, compared with ring attention (arXiv:2310.01889),
Ulysses (arXiv:2309.14509) and an all-gather of keys and values (Llama 3, arXiv:2407.21783,
Sec. 3.3.2).

memory: peak memory of a training step of a small causal language model, with one sequence over
several processes, and with one shard of the sequence in a single process. Requires Linux.
"""

import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from communication import BASELINES, LAYERS, Sizes, count
from harness import release_memory, status_mib
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from onescan.layers.mixers import LightNetMixerConfig, LionMixerConfig
from onescan.layers.position import ToeplitzPositionConfig
from onescan.models.causal_lm import CausalLM, CausalLMConfig
from onescan.models.presets import preset
from onescan.ops.cross_entropy import cross_entropy
from onescan.ops.parallel import sequence_parallel
from onescan.shapes import Tokens

TIMEOUT = timedelta(minutes=10)
CHUNK = 2048  # tokens whose logits are in memory at a time
WARM_UP = 256  # tokens of the step that loads libraries
BFLOAT16, FLOAT32 = 2, 4  # bytes
UNITS = ("B", "kB", "MB", "GB", "TB")

# 36,352 and 33,476 parameters
LIGHTNET = CausalLMConfig(
    vocab_size=258,
    width=32,
    depth=2,
    mixer=LightNetMixerConfig(num_heads=2, direction="forward", gate_rank=16),
    position=ToeplitzPositionConfig(hidden_states=16),
)
LION_S = replace(LIGHTNET, mixer=LionMixerConfig(num_heads=2, direction="forward"), position=None)
MODELS = {"lightnet": LIGHTNET, "lion_s": LION_S}

Rows = list[list[str]]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Count the bytes that a rank receives in one layer."""

    processes: tuple[int, ...] = (2, 4, 8)
    """Numbers of processes."""
    tokens: tuple[int, ...] = (1024, 4096)
    """Lengths of the whole sequence."""
    width: int = 512
    """Features per token."""
    num_heads: int = 8
    """Heads of each layer."""

    def table(self) -> Rows:
        """Return one row per layer, with the bytes of the forward and the backward pass."""
        cases = [(ranks, tokens) for ranks in self.processes for tokens in self.tokens]
        rows = [["layer", *(f"{ranks} processes, T = {tokens:,}" for ranks, tokens in cases)]]
        rows += [[name] for name in LAYERS]
        for ranks, tokens in cases:
            sizes = Sizes(ranks, tokens, self.width, self.num_heads)
            of_ranks = over_processes(ranks, partial(count_layers, sizes))
            for row, *counts in zip(rows[1:], *of_ranks, strict=True):
                row.append(
                    " / ".join(in_units(max(passes)) for passes in zip(*counts, strict=True))
                )
        return rows


def count_layers(sizes: Sizes, group: Any) -> list[tuple[int, int]]:
    return [count(layer, sizes, group) for layer in LAYERS.values()]


@dataclass(frozen=True, kw_only=True)
class Calculated:
    """Calculate the bytes that a GPU receives in one layer, forward and backward."""

    model: str = "lightnet_lm_1450m"
    """Preset that provides the width and number of heads of all layers."""
    tokens: int = 2**20
    """Length of the sequence."""
    gpus: tuple[int, ...] = (8, 16, 64, 256, 1024)
    """Numbers of GPUs."""
    node: int = 8
    """GPUs per node."""

    def table(self) -> Rows:
        """Return one row per layer, and one per alternative method for softmax attention.

        Ulysses supports at most one GPU per head.
        """
        config: Any = preset(self.model)
        rows = [["layer", *(f"{gpus:,} GPUs" for gpus in self.gpus)]]
        received = {name: layer.received for name, layer in LAYERS.items()} | BASELINES
        for name, formula in received.items():
            row = [name]
            for gpus in self.gpus:
                shape = config.width, config.mixer.num_heads
                sizes = Sizes(gpus, self.tokens, *shape, FLOAT32, BFLOAT16, self.node)
                passes = formula(sizes)
                row.append("not possible" if passes is None else in_units(sum(passes)))
            rows.append(row)
        return rows


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Measure the peak memory of a training step."""

    model: Literal["lightnet", "lion_s"] = "lightnet"
    """Model, with two blocks of width 32."""
    processes: int = 4
    """Number of processes."""
    tokens: int = 1_000_000
    """Length of the sequence."""

    def table(self) -> Rows:
        """Return one row for a single process, and one per rank."""
        shard_tokens = self.tokens // self.processes
        peak = partial(peak_mib, MODELS[self.model], shard_tokens)
        (single_process_mib,) = over_processes(1, peak)
        rows = [["process", "tokens", "peak, MiB", "relative"]]
        rows.append(["single process", f"{shard_tokens:,}", f"{single_process_mib:.0f}", "1"])
        for rank, mib in enumerate(over_processes(self.processes, peak)):
            row = [f"rank {rank} of {self.processes}", f"{shard_tokens:,}", f"{mib:.0f}"]
            rows.append([*row, f"{mib / single_process_mib:.3f}"])
        return rows


def peak_mib(config: CausalLMConfig, tokens: int, group: Any) -> float:
    """Return the peak memory of a training step beyond model and libraries, in MiB."""
    model = config.build()
    for block in model.network.blocks:
        block.recompute = True
    ids = torch.randint(config.vocab_size, (1, tokens + 1))
    backward(model, ids[:, : WARM_UP + 1], group)
    release_memory()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    before = status_mib("VmRSS")
    backward(model, ids, group)
    return status_mib("VmHWM") - before


def backward(model: CausalLM, ids: Tokens, group: Any) -> None:
    """Compute the gradients of the next-token loss of this rank's tokens.

    Logits are computed in chunks, and recomputed in the backward pass.
    """

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(model.head(x).flatten(0, 1), labels.flatten(), reduction="sum")

    with sequence_parallel(group):
        x, _ = model.network(ids[:, :-1])
        chunks = zip(x.split(CHUNK, dim=1), ids[:, 1:].split(CHUNK, dim=1), strict=True)
        losses = [checkpoint(loss, *chunk, use_reentrant=False) for chunk in chunks]
        torch.stack(losses).sum().backward()


def over_processes(size: int, function: Callable[[Any], Any]) -> list[Any]:
    """Return the results of function(group) in new processes; the group of one process is None."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(size, mp_context=get_context("spawn")) as pool,
    ):
        store = str(Path(folder, "store"))
        calls = [pool.submit(run_rank, rank, size, store, function) for rank in range(size)]
        return [call.result() for call in calls]


def run_rank(rank: int, size: int, store: str, function: Callable[[Any], Any]) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if size == 1:
        return function(None)
    options = {"store": dist.FileStore(store, size), "rank": rank, "world_size": size}
    dist.init_process_group("gloo", timeout=TIMEOUT, **options)
    try:
        return function(dist.group.WORLD)
    finally:
        dist.destroy_process_group()  # so that the others stop waiting for this rank


def in_units(size: float) -> str:
    """Format a number of bytes with a suitable unit.

    >>> in_units(0), in_units(1536), in_units(2_500_000)
    ('0 B', '1.54 kB', '2.5 MB')
    """
    for unit in UNITS:
        if size < 1000 or unit == UNITS[-1]:  # noqa: PLR2004
            return f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError


def markdown(rows: Rows) -> str:
    """Format a table whose first row is the header."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


Options = Measured | Calculated | Memory

if __name__ == "__main__":
    print(markdown(tyro.cli(Options, description=__doc__).table()))
