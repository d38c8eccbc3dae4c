"""LightNet's denoiser compared with DiT over sides of latents: time and memory of a step.

python benchmarks/denoisers.py                                      small models
python benchmarks/denoisers.py --model-size b --batch-size 8        larger ones
python benchmarks/denoisers.py --mode inference                     forward only
python benchmarks/denoisers.py --same-depth                         equal numbers of blocks

A latent of side S has S/2 x S/2 tokens. A training step is forward, backward and an update by
AdamW; an inference step is forward. LightNet has 1.5 times as many blocks as DiT, as in the papers,
where models of the same size have about as many parameters. On a CPU, DiT has 2 blocks by default:
the time of a step is linear in them. Weights are in float32; --dtype is that of matrix products.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import harness
import torch
from harness import INFERENCE, TRAINING, Case, Dtype, find_device, run_benchmark
from results import Benchmark
from torch.nn.functional import mse_loss

from onescan import configs
from onescan.models.denoiser import STEPS, DenoiserConfig
from onescan.models.presets import preset

CANDIDATES = {"DiT": "dit_{}_2", "LightNet": "lightnet_dit_{}_2"}
CPU_DEPTH = 2  # of DiT
DEPTH_RATIO = 3 / 2  # of LightNet to DiT, in the papers' tables


@dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    """Options of the benchmark."""

    model_size: Literal["s", "b"] = "s"
    """Size of the models, as in the papers' tables."""
    sides: tuple[int, ...] = (32, 64, 128, 256)
    """Sides of the latents; images are 8 times as large."""
    depth: int | None = None
    """Blocks of DiT; by default the paper's on a GPU and 2 on a CPU."""
    same_depth: bool = False
    """Give LightNet as many blocks as DiT instead of 1.5 times as many."""
    mode: Literal["training", "inference", "both"] = "both"
    """What to measure."""
    dtype: Dtype | None = None
    """Data type of matrix products; by default bfloat16 on a GPU and float32 on a CPU."""


def config_of(name: str, side: int, options: Options) -> DenoiserConfig:
    device = find_device(options.device)
    paper_depth = preset(CANDIDATES["DiT"].format(options.model_size)).depth
    depth = options.depth or (paper_depth if device.type == "cuda" else CPU_DEPTH)
    if name != "DiT" and not options.same_depth:
        depth = math.ceil(DEPTH_RATIO * depth)
    changes = {"depth": depth, "image_size": (side, side)}
    return configs.replace(preset(CANDIDATES[name].format(options.model_size)), changes)


def prepare(name: str, mode: str, side: int, options: Options) -> Case:
    config, device = config_of(name, side, options), find_device(options.device)
    dtype = getattr(torch, options.dtype)
    model = config.build().to(device)
    if options.compile:
        model.compile()
    size = (options.batch_size, config.channels, side, side)
    noisy = torch.randn(size, device=device)
    timesteps = STEPS * torch.rand(options.batch_size, device=device)
    labels = torch.randint(config.num_classes, (options.batch_size,), device=device)
    target = torch.randn(options.batch_size, model.out_channels, side, side, device=device)

    def predict() -> torch.Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            return model(noisy, timesteps, labels)

    parameters = sum(p.numel() for p in model.parameters())
    if mode == INFERENCE:
        model.eval()
        return Case(torch.no_grad()(predict), options.batch_size, parameters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # allocates the moments, so that they do not count as memory of a step

    def update() -> None:
        optimizer.zero_grad(set_to_none=False)
        mse_loss(predict().float(), target).backward()
        optimizer.step()

    return Case(update, options.batch_size, parameters)


def run(options: Options) -> None:
    if options.dtype is None:
        on_gpu = find_device(options.device).type == "cuda"
        options = replace(options, dtype="bfloat16" if on_gpu else "float32")
    benchmark = Benchmark(
        name="denoisers",
        candidates=tuple(CANDIDATES),
        modes=(TRAINING, INFERENCE) if options.mode == "both" else (options.mode,),
        sizes=options.sides,
        axis="latent side",
        items="images",
        tokens=lambda side: side**2,
    )
    run_benchmark(benchmark, prepare, options)


if __name__ == "__main__":
    harness.main(Options, run, __doc__)
