"""Causal language models of equal width and depth on random tokens, or their ops alone.

As in LightNet, arXiv:2405.21022, Table 4. Embeddings and heads are not tied. The models of
flash-linear-attention have its default options; Mamba-2 has twice as many blocks, because they have
no MLP. Their loss is fused with the output layer. Ours is `onescan.ops.cross_entropy`, which reads
the logits once in each pass on a GPU, but needs the memory of all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import harness
import torch
from benchmark_cases import (
    build_on_device,
    check_backend,
    import_fla,
    model_case,
    noise,
    op_case,
    softmax,
)
from harness import BACKWARD, FORWARD, INFERENCE, TRAINING, Case, find_device, run_benchmark
from one_scan import angles_of
from results import Benchmark
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from onescan.layers.basic import GLUConfig, MLPConfig
from onescan.layers.mixers import LightNetMixerConfig, LionMixerConfig, SoftmaxMixerConfig
from onescan.layers.position import ToeplitzPositionConfig, TokenPositionConfig
from onescan.models.causal_lm import CausalLMConfig
from onescan.ops import additive_decay, decay_attention
from onescan.ops.cross_entropy import cross_entropy

OURS = ("lightnet", "lion_s", "softmax")
FLA = ("fla_gla", "fla_hgrn2", "fla_mamba2")
OUR_OPS = ("additive_decay", "additive_decay_lrpe", "decay_attention", "softmax")
FLA_OPS = ("fla_chunk_lightnet", "fla_chunk_gla", "fla_chunk_simple_gla")
LOGIT = 2.0  # of the mean decay factor, sigmoid(2) = 0.88


class Shape(NamedTuple):
    """Shape of a language model; `multiple_of` rounds up the hidden width of LightNet's GLU."""

    width: int
    depth: int
    num_heads: int
    gate_rank: int
    vocab_size: int
    multiple_of: int = 1


# LightNet, arXiv:2405.21022: WikiText-103's, v1's Table 10, and Table 4's; LION's is GPT-2's, 124m;
# small is for CPUs
SHAPES = {
    "small": Shape(256, 4, 4, 64, 8192),
    "45m": Shape(512, 6, 8, 64, 50265),
    "124m": Shape(768, 12, 12, 64, 50257),
    "150m": Shape(768, 15, 12, 128, 50272),
    "380m": Shape(1024, 26, 8, 128, 50272),
    "1.45b": Shape(2048, 24, 16, 128, 50272, 256),
}
ModelSize = Literal["small", "45m", "124m", "150m", "380m", "1.45b"]


@dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    """Options of the benchmark."""

    tokens: tuple[int, ...] = (512, 1024, 2048, 4096)
    """Sequence lengths."""
    gradients: bool = True
    """For models, measure training instead of inference; for ops, also measure forward and
    backward."""
    model_size: ModelSize = "small"
    """Width and depth of the models."""
    level: Literal["model", "op"] = "model"
    """Whole models, or only their token-mixing ops."""


def our_config(name: str, model_size: str, max_tokens: int) -> CausalLMConfig:
    """Return the config of LightNet, causal LION-s, or a model like GPT-2."""
    shape = SHAPES[model_size]
    heads = shape.num_heads
    mixers = {
        "lightnet": LightNetMixerConfig(
            num_heads=heads, direction="forward", gate_rank=shape.gate_rank
        ),
        "lion_s": LionMixerConfig(num_heads=heads, direction="forward"),
        "softmax": SoftmaxMixerConfig(num_heads=heads, direction="forward"),
    }
    positions = {
        "lightnet": ToeplitzPositionConfig(),
        "softmax": TokenPositionConfig(max_tokens=max_tokens),
    }
    is_lightnet = name == "lightnet"
    return CausalLMConfig(
        vocab_size=shape.vocab_size,
        width=shape.width,
        depth=shape.depth,
        mixer=mixers[name],
        mlp=GLUConfig(multiple_of=shape.multiple_of) if is_lightnet else MLPConfig(),
        position=positions.get(name),
        norm="simple_rms" if is_lightnet else "layer",
        tie_embeddings=False,
    )


def fla_model(name: str, model_size: str, options: harness.Options) -> nn.Module:
    models, shape = import_fla("fla.models", options), SHAPES[model_size]
    kind = {"fla_gla": "GLA", "fla_hgrn2": "HGRN2", "fla_mamba2": "Mamba2"}[name]
    config = getattr(models, f"{kind}Config")(
        hidden_size=shape.width,
        vocab_size=shape.vocab_size,
        num_hidden_layers=shape.depth * (2 if kind == "Mamba2" else 1),
    )
    return getattr(models, f"{kind}ForCausalLM")(config)


def prepare(name: str, mode: str, tokens: int, options: Options) -> Case:
    size = (options.batch_size, tokens)
    vocab_size = SHAPES[options.model_size].vocab_size
    ids = torch.randint(vocab_size, size, device=find_device(options.device))
    if name in FLA:
        model = build_on_device(partial(fla_model, name, options.model_size, options), options)
        loss = partial(fused_loss, model, ids)
    else:
        if name != "softmax":
            check_backend(options)
        model = build_on_device(our_config(name, options.model_size, tokens).build, options)
        loss = partial(next_token_loss, model, ids)
    case = model_case(model, lambda: model(ids), loss, mode)
    return case._replace(items=ids.numel())


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits, _ = model(ids)
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def fused_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of flash-linear-attention's models, which is fused with the head."""
    return model(input_ids=ids, labels=ids).loss


def prepare_op(name: str, mode: str, tokens: int, options: Options) -> Case:
    shape = SHAPES[options.model_size]
    size = (options.batch_size, tokens, shape.num_heads, shape.width // shape.num_heads)
    inputs = [noise(options, *size) for _ in range(3)]
    if name in ("decay_attention", "fla_chunk_simple_gla"):
        inputs.append(logsigmoid(noise(options, *size[:-1]) + LOGIT))
    if name == "fla_chunk_gla":
        inputs.append(logsigmoid(noise(options, *size) + LOGIT))
    op = fla_op(name, options) if name in FLA_OPS else our_op(name)
    return op_case(op, inputs, mode, options)._replace(items=options.batch_size * tokens)


def our_op(name: str) -> Callable[..., Tensor]:
    ops: dict[str, Callable[..., Tensor]] = {
        "additive_decay": lambda *x: additive_decay(*x, causal=True)[0],
        "additive_decay_lrpe": lambda *x: additive_decay(*x, angles=angles_of(x[0]), causal=True)[
            0
        ],
        "decay_attention": lambda *x: decay_attention(*x, causal=True, return_state=False)[0],
        "softmax": partial(softmax, causal=True),
    }
    return ops[name]


def fla_op(name: str, options: Options) -> Callable[..., Tensor]:
    kernel_name = name.removeprefix("fla_")
    module = import_fla(f"fla.ops.{kernel_name.removeprefix('chunk_')}", options)
    return lambda *inputs: getattr(module, kernel_name)(*inputs, scale=1.0)[0]


def run(options: Options) -> None:
    if options.level == "op":
        candidates, modes = (*OUR_OPS, *FLA_OPS), (FORWARD, BACKWARD)[: 1 + options.gradients]
    else:
        candidates, modes = (*OURS, *FLA), (TRAINING if options.gradients else INFERENCE,)
    benchmark = Benchmark(
        name="causal",
        candidates=candidates,
        modes=modes,
        sizes=options.tokens,
        items="tokens",
    )
    run_benchmark(benchmark, prepare_op if options.level == "op" else prepare, options)


if __name__ == "__main__":
    harness.main(Options, run, __doc__)
