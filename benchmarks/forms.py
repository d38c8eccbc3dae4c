"""Time and memory of the forms of a model's mixer, over image sizes and chunk sizes.

python benchmarks/forms.py lion_d_base
python benchmarks/forms.py lion_d_base --candidates full chunk-64

Candidates are the forms that the model supports; the chunk form with each of --chunk-sizes.
"""

import math
from dataclasses import dataclass
from typing import Annotated, get_args, get_type_hints

import harness
import torch
import tyro
from candidates import noise, place
from harness import INFERENCE, Case, run_benchmark
from results import Benchmark

from onescan import configs
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.models.presets import preset


@dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    """Options of the benchmark."""

    preset: Annotated[str, tyro.conf.Positional]
    """Image classifier with several forms, such as lion_d_base; see onescan models."""
    image_size: tuple[int, ...] = (224, 320, 448, 640, 896, 1248)
    """Sides of the square images, in pixels."""
    chunk_sizes: tuple[int, ...] = (16, 64, 256)
    """Tokens per chunk; the chunk form is measured with each."""


def config_of(options: Options, candidate: str, image_size: int) -> ImageClassifierConfig:
    """Return the model with the mixer in one form, such as "full" or "chunk-64"."""
    form, _, chunk_size = candidate.partition("-")
    changes = {"image_size": (image_size, image_size), "mixer.form": form}
    if chunk_size:
        changes["mixer.chunk_size"] = int(chunk_size)
    return configs.replace(preset(options.preset), changes)


def supported(options: Options) -> tuple[str, ...]:
    """Return the forms that the model supports; raise ValueError if it has none."""
    model = preset(options.preset)
    if not isinstance(model, ImageClassifierConfig) or not hasattr(model.mixer, "form"):
        raise ValueError(
            f"preset is {options.preset!r}, expected an image classifier whose mixer has forms"
        )
    forms = get_args(get_type_hints(type(model.mixer))["form"])[1:]  # the first is "auto"
    names = [f"chunk-{n}" for n in options.chunk_sizes] if "chunk" in forms else []
    return tuple(
        name for name in (*(f for f in forms if f != "chunk"), *names) if runs(options, name)
    )


def runs(options: Options, candidate: str) -> bool:
    """Return whether the model runs in a form, tried on an image of a few patches, without data."""
    try:
        with torch.device("meta"), torch.no_grad():
            patch = preset(options.preset).patch_size
            config = config_of(options, candidate, math.lcm(*patch))
            config.build().eval()(torch.zeros(1, config.channels, *config.image_size))
    except ValueError:
        return False
    return True


def prepare(name: str, mode: str, image_size: int, options: Options) -> Case:
    config = config_of(options, name, image_size)
    model = place(config.build, options).eval()
    images = noise(options, options.batch_size, config.channels, image_size, image_size)
    return Case(torch.no_grad()(lambda: model(images)), items=options.batch_size)


def run(options: Options) -> None:
    benchmark = Benchmark(
        name="forms",
        candidates=supported(options),
        modes=(INFERENCE,),
        sizes=options.image_size,
        axis="image side",
        items="images",
        tokens=lambda side: side**2,
    )
    run_benchmark(benchmark, prepare, options)


if __name__ == "__main__":
    harness.main(Options, run, __doc__)
