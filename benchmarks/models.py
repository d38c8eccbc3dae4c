"""Image classifiers in inference and training, with random weights on random images.

Candidates are the image classifiers that `onescan models` lists, and timm's timm/deit_tiny,
timm/deit_small and timm/deit_base.
"""

from dataclasses import dataclass, field
from functools import partial

import harness
import torch
from candidates import check_backend, import_package, model_case, noise, place
from harness import INFERENCE, TRAINING, Case, run_benchmark
from results import Benchmark
from torch import nn
from torch.nn.functional import cross_entropy

from onescan.layers.mixers import SoftmaxMixerConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.models.presets import PRESETS, preset

TIMM = {f"timm/deit_{size}": f"deit_{size}_patch16_224" for size in ("tiny", "small", "base")}
OURS = [name for name, p in PRESETS.items() if isinstance(p.config, ImageClassifierConfig)]
DEFAULT = ("lightnet_tiny", "lion_lit_tiny", "lion_d_tiny", "lion_s_tiny", "deit_tiny")


@dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    """Options of the benchmark."""

    image_size: tuple[int, ...] = (224,)
    """Sides of the square images, in pixels."""
    batch_size: int = 8
    """Images per call."""
    gradients: bool = True
    """Also measure training."""
    candidates: tuple[str, ...] = field(default=(*DEFAULT, "timm/deit_tiny"))
    """Models to measure; ratios are relative to the first."""


def prepare(name: str, mode: str, image_size: int, options: Options) -> Case:
    if name in TIMM:
        build = partial(timm_model, name, image_size)
    else:
        config = preset(name, image_size=image_size)
        if not isinstance(config.mixer, SoftmaxMixerConfig):
            check_backend(options)
        build = config.build
    model = place(build, options)
    images = noise(options, options.batch_size, 3, image_size, image_size)
    labels = torch.zeros(options.batch_size, dtype=torch.long, device=images.device)
    case = model_case(
        model, lambda: model(images), lambda: cross_entropy(model(images), labels), mode
    )
    return case._replace(items=options.batch_size)


def timm_model(name: str, image_size: int) -> nn.Module:
    timm = import_package("timm", "timm")
    return timm.create_model(TIMM[name], img_size=image_size, num_classes=1000)


def run(options: Options) -> None:
    benchmark = Benchmark(
        name="models",
        candidates=(*OURS, *TIMM),
        modes=(INFERENCE, TRAINING) if options.gradients else (INFERENCE,),
        sizes=options.image_size,
        axis="image side",
        items="images",
        tokens=lambda side: side**2,
    )
    run_benchmark(benchmark, prepare, options)


if __name__ == "__main__":
    harness.main(Options, run, __doc__)
