"""Models in torch, compiled by torch.compile, and as ONNX files in onnxruntime, on a CPU.

python benchmarks/runtimes.py --threads 1

python benchmarks/runtimes.py --threads 1 --step --candidates \
    lightnet_lm_45m lightnet_lm_45m/onnx transformer_lm_45m transformer_lm_45m/onnx

A candidate is a preset, or a preset with "/compiled" or "/onnx". Sizes are sides of images in
pixels. With `--step`, they are context lengths: each call reads one more token from the state after
a context. Peak memory includes the modules that each process has imported; that of ONNX was
measured in a process that has also exported the model.
"""

import tempfile
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from decode import lengthened, state_mib
from harness import Case, run_benchmark
from results import Benchmark
from torch import Tensor, nn

from onescan.allocation import build_model
from onescan.integrations.export import export_onnx, export_onnx_step
from onescan.models.presets import preset
from onescan.models.token_network import flatten_state, map_tensors

IMAGES = ("lightnet_tiny", "lion_s_tiny", "deit_tiny")
STEPS = ("lightnet_lm_45m", "lion_s_lm_124m", "transformer_lm_45m")
RUNTIMES = ("", "/compiled", "/onnx")


@dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    """Options of the benchmark."""

    step: bool = False
    """Measure one token of a causal language model, instead of an image."""
    sizes: tuple[int, ...] = ()
    """Sides of images, or context lengths. By default 224, or 1,000 and 10,000."""
    device: str = "cpu"
    """Device; only a CPU."""


@torch.no_grad()
def prepare(name: str, mode: str, size: int, options: Options) -> Case:
    kind, _, runtime = name.partition("/")
    if kind in STEPS:
        return step_case(kind, runtime, size, options)
    model = build_model(preset(kind, image_size=size)).eval()
    images = torch.randn(options.batch_size, 3, size, size)
    parameters = sum(p.numel() for p in model.parameters())
    if runtime == "onnx":
        session = onnx_session(partial(export_onnx, model), options)
        inputs = {"images": images.numpy()}
        return Case(partial(session.run, None, inputs), len(images), parameters)
    call = torch.compile(model) if runtime else model
    return Case(torch.no_grad()(partial(call, images)), len(images), parameters)


def step_case(kind: str, runtime: str, tokens: int, options: Options) -> Case:
    changes = {"position.max_tokens": tokens + 1} if kind.startswith("transformer") else {}
    model = build_model(preset(kind, **changes)).eval()
    token = torch.zeros(options.batch_size, 1, dtype=torch.long)
    state = model(token)[1]
    if kind.startswith("transformer"):
        blocks = map_tensors(partial(lengthened, tokens=tokens), state.blocks)
        position = torch.full_like(token[:, 0], tokens)
        state = state._replace(position=position, blocks=blocks)
    state_tensors, parameters = flatten_state(state), sum(p.numel() for p in model.parameters())
    if runtime == "onnx":
        session = onnx_session(partial(export_onnx_step, model), options)
        inputs = {"tokens": token.numpy(), **{key: numpy(x) for key, x in state_tensors.items()}}
        call: Any = partial(session.run, None, inputs)
    else:
        module: nn.Module | Any = torch.compile(model) if runtime else model
        call = torch.no_grad()(partial(module, token, state))
    return Case(call, len(token), parameters, state_mib(state_tensors))


def numpy(x: Tensor) -> np.ndarray[Any, Any]:
    return torch.as_tensor(x).numpy()


def onnx_session(export: Any, options: Options) -> Any:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    if options.threads is not None:
        settings.intra_op_num_threads = options.threads
    with tempfile.TemporaryDirectory() as folder:
        export(Path(folder) / "model.onnx")
        return onnxruntime.InferenceSession(Path(folder) / "model.onnx", settings)


@cache
def candidates(step: bool) -> tuple[str, ...]:
    return tuple(name + runtime for name in (STEPS if step else IMAGES) for runtime in RUNTIMES)


def run(options: Options) -> None:
    known = candidates(options.step)
    benchmark = Benchmark(
        name="runtimes_step" if options.step else "runtimes",
        candidates=known,
        modes=("decoding step" if options.step else "inference",),
        sizes=options.sizes or ((1_000, 10_000) if options.step else (224,)),
        axis="context length" if options.step else "image size",
        items="tokens" if options.step else "images",
    )
    run_benchmark(benchmark, prepare, options)


if __name__ == "__main__":
    harness.main(Options, run, __doc__)
