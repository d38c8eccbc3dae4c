"""Time and memory of models in inference and training, on random images or tokens.

python benchmarks/models.py

python benchmarks/models.py --candidates deit_base lion_lit_base lion_d_base lion_s_base

python benchmarks/models.py --candidates bert_large lion_d_mlm_large lion_s_mlm_large

Candidates are the image classifiers that `onescan models` lists and timm's timm/deit_tiny,
timm/deit_small and timm/deit_base, or the masked language models. Ratios are times relative to the
first candidate, as in LION, arXiv:2502.16249, Tables 2, 3 and 12.
"""

from dataclasses import dataclass, field
from functools import partial

import harness
from benchmark_cases import (
    Network,
    axis_of,
    build_on_device,
    find_network,
    image_case,
    import_package,
    network_case,
)
from harness import INFERENCE, TRAINING, Case, run_benchmark
from results import Benchmark
from torch import nn

from onescan.models.presets import PRESETS

TIMM = {f"timm/deit_{size}": f"deit_{size}_patch16_224" for size in ("tiny", "small", "base")}
OURS = [name for name, p in PRESETS.items() if isinstance(p.config, Network)]
DEFAULT = ("lightnet_tiny", "lion_lit_tiny", "lion_d_tiny", "lion_s_tiny", "deit_tiny")


@dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    """Options of the benchmark."""

    image_size: tuple[int, ...] = (224,)
    """Sides of the square images, in pixels."""
    tokens: tuple[int, ...] = (128,)
    """Lengths of the texts of masked language models."""
    batch_size: int = 8
    """Images or texts per call."""
    gradients: bool = True
    """Also measure training."""
    candidates: tuple[str, ...] = field(default=(*DEFAULT, "timm/deit_tiny"))
    """Models to measure; ratios are relative to the first."""


def prepare(name: str, mode: str, size: int, options: Options) -> Case:
    if name not in TIMM:
        return network_case(find_network(name), mode, size, options)
    model = build_on_device(partial(timm_model, name, size), options)
    return image_case(model, mode, (3, size, size), options)


def timm_model(name: str, image_size: int) -> nn.Module:
    timm = import_package("timm", "timm")
    return timm.create_model(TIMM[name], img_size=image_size, num_classes=1000)


def run(options: Options) -> None:
    networks = [find_network(name.removeprefix("timm/")) for name in options.candidates]
    benchmark = Benchmark(
        name="models",
        candidates=(*OURS, *TIMM),
        modes=(INFERENCE, TRAINING) if options.gradients else (INFERENCE,),
        **axis_of("candidates", options.candidates, networks, options),
    )
    run_benchmark(benchmark, prepare, options)


if __name__ == "__main__":
    harness.main(Options, run, __doc__)
