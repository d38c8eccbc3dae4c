"""Time and memory of models and of the forms of their mixers, over image or text sizes.

python benchmarks/forms.py lion_d_base

python benchmarks/forms.py lion_d_base --candidates full chunk-64

python benchmarks/forms.py lion_d_base/recurrent deit_base

python benchmarks/forms.py lion_s_mlm_large bert_large --tokens 128 512 2048

Candidates are the forms that a model supports, the chunk form with each of --chunk-sizes, or the
one form given after a slash. A model without forms is one candidate. The first command is LION's
Fig. 1 and 4 (arXiv:2502.16249); the others are for its Fig. 3, 9 and 10. "FLOPs of a head" are
those of the formulas of its App. C.12, for softmax attention and for LION-s as a recurrence.
"""

import math
from dataclasses import dataclass
from typing import Annotated, get_args, get_type_hints

import harness
import torch
import tyro
from benchmark_cases import Network, axis_of, find_network, network_case, resized
from harness import INFERENCE, Case, run_benchmark
from results import Benchmark

from onescan import configs
from onescan.checks import check_choice
from onescan.layers.decays import SelectiveDecayConfig
from onescan.layers.mixers import LionMixerConfig, SoftmaxMixerConfig
from onescan.models.image_classifier import WITH_CLASS_TOKEN, ImageClassifierConfig
from onescan.models.presets import PRESETS
from onescan.models.size import attention_flops, recurrence_flops


@dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    """Options of the benchmark."""

    presets: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Image classifiers or masked language models, such as lion_d_base, or one form of them, such
    as lion_d_base/recurrent or lion_d_base/chunk-64; see onescan models."""
    image_size: tuple[int, ...] = (224, 320, 448, 640, 896, 1248)
    """Sides of the square images, in pixels."""
    tokens: tuple[int, ...] = (128, 512, 1024, 2048, 4096)
    """Lengths of the texts of masked language models."""
    chunk_sizes: tuple[int, ...] = (16, 64, 256)
    """Tokens per chunk; the chunk form is measured with each."""


def config_of(options: Options, candidate: str) -> Network:
    """Return the config of a candidate: a model, "model/form", or a form of the only model.

    Raises:
        ValueError: If the model is unknown, or its mixer has no such form.
    """
    name, _, form = candidate.partition("/")
    if name not in PRESETS and candidate not in options.presets:
        name, form = options.presets[0], candidate
    config = find_network(name)
    if not form:
        return config
    if not hasattr(config.mixer, "form"):
        raise ValueError(f"preset is {candidate!r}, but the mixer has no forms")
    form, _, chunk_size = form.partition("-")
    check_choice(f"form of {name}", form, forms_of(config)[1:])
    changes: dict[str, object] = {"mixer.form": form}
    if chunk_size:
        if not chunk_size.isdecimal():
            raise ValueError(f"preset is {candidate!r}, expected a number after 'chunk-'")
        changes["mixer.chunk_size"] = int(chunk_size)
    return configs.replace(config, changes)


def forms_of(config: Network) -> tuple[str, ...]:
    """Return the forms of a mixer that has forms; the first is "auto"."""
    forms: tuple[str, ...] = get_args(get_type_hints(type(config.mixer))["form"])
    return forms


def supported(options: Options) -> tuple[str, ...]:
    """Return the candidates: each model, or each of its forms that it supports.

    Raises:
        ValueError: If there are no models, or one is unknown, or does not run in its given form.
    """
    if not options.presets:
        raise ValueError("presets is empty, expected at least one model")
    names: list[str] = []
    for candidate in options.presets:
        mixer = config_of(options, candidate).mixer
        if "/" in candidate:
            dry_run(options, candidate)
            names.append(candidate)
        elif not hasattr(mixer, "form"):
            names.append(candidate)
        else:
            forms = forms_of(config_of(options, candidate))[1:]  # the first is "auto"
            chunks = [f"chunk-{n}" for n in options.chunk_sizes] if "chunk" in forms else []
            prefix = f"{candidate}/" if len(options.presets) > 1 else ""
            possible = (*(f for f in forms if f != "chunk"), *chunks)
            names += [prefix + form for form in possible if runs(options, prefix + form)]
    return tuple(names)


def runs(options: Options, candidate: str) -> bool:
    """Return whether a candidate runs."""
    try:
        dry_run(options, candidate)
    except ValueError:
        return False
    return True


def dry_run(options: Options, candidate: str) -> None:
    """Run a candidate on a small example, without data."""
    config = config_of(options, candidate)
    is_image = isinstance(config, ImageClassifierConfig)
    config = resized(config, math.lcm(*config.patch_size) if is_image else 8)
    with torch.device("meta"), torch.no_grad():
        config.build().eval()(*config.example_inputs())


def prepare(name: str, mode: str, size: int, options: Options) -> Case:
    config = config_of(options, name)
    case = network_case(config, mode, size, options)
    return case._replace(flops=head_flops(config, size))


def head_flops(config: Network, size: int) -> int:
    """Return the FLOPs of one head by the formulas of LION's App. C.12; 0 for other mixers."""
    tokens, mixer = size, config.mixer
    if isinstance(config, ImageClassifierConfig):
        prefix = (config.pool in WITH_CLASS_TOKEN) + config.distillation_token
        tokens = math.prod(size // p for p in config.patch_size) + prefix
    if isinstance(mixer, SoftmaxMixerConfig):
        return attention_flops(tokens, config.width // mixer.num_heads)
    if (
        isinstance(mixer, LionMixerConfig)
        and isinstance(mixer.decay, SelectiveDecayConfig)
        and mixer.form == "recurrent"
    ):
        return recurrence_flops(tokens, config.width // mixer.num_heads)
    return 0


def run(options: Options) -> None:
    candidates = supported(options)
    networks = [config_of(options, name) for name in candidates]
    benchmark = Benchmark(
        name="forms",
        candidates=candidates,
        modes=(INFERENCE,),
        **axis_of("presets", options.presets, networks, options),
    )
    run_benchmark(benchmark, prepare, options)


if __name__ == "__main__":
    harness.main(Options, run, __doc__)
