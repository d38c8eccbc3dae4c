"""Encoders of transformers with softmax attention, and after `onescan.nn.replace_attention`.

python benchmarks/encoders.py
python benchmarks/encoders.py --candidates vit/softmax vit/lightnet vit/lion vit/delta

Models have random weights, 4 layers, a width of 96 and 4 heads by default. BERT reads tokens. ViT
reads patches of 4 x 4 pixels of an image that is a square, or two squares side by side. Ratios are
times relative to the first candidate, by default BERT with softmax attention (SDPA).
"""

import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import harness
import torch
from harness import INFERENCE, TRAINING, Case, run_benchmark
from results import Benchmark
from torch import nn

from onescan.nn import replace_attention

KINDS = ("softmax", "lightnet", "lion", "delta")
MODELS = ("bert", "vit")
PATCH, VOCABULARY = 4, 256


@dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    """Options of the benchmark."""

    tokens: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    """Tokens per text, or patches per image."""
    width: int = 96
    """Width of the models."""
    depth: int = 4
    """Number of layers."""
    heads: int = 4
    """Number of heads."""
    gradients: bool = True
    """Also measure training."""
    candidates: tuple[str, ...] = field(
        default=("bert/softmax", "bert/lightnet", "bert/lion", "bert/delta")
    )
    """Models to measure, as MODEL/ATTENTION."""


def prepare(name: str, mode: str, tokens: int, options: Options) -> Case:
    kind, _, attention = name.partition("/")
    torch.manual_seed(0)
    model, x, shape, prefix = build(kind, tokens, options)
    if attention != "softmax":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            replace_attention(model, attention, shape=shape, prefix=prefix)
    device, dtype = harness.find_device(options.device), getattr(torch, options.dtype)
    model.to(device, dtype).requires_grad_(mode == TRAINING).train(mode == TRAINING)
    x = {k: t.to(device, dtype) if t.is_floating_point() else t.to(device) for k, t in x.items()}

    def call() -> object:
        with torch.set_grad_enabled(mode == TRAINING):
            output = model(**x).last_hidden_state
            if mode == TRAINING:
                model.zero_grad(set_to_none=True)
                output.float().square().mean().backward()
        return output

    parameters = sum(p.numel() for p in model.parameters())
    return Case(call, items=options.batch_size * tokens, parameters=parameters)


def build(
    kind: str, tokens: int, options: Options
) -> tuple[nn.Module, dict[str, torch.Tensor], tuple[int, ...] | None, int]:
    """Return a model with softmax attention, an input, and its grid and tokens before the grid."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": options.width,
        "num_hidden_layers": options.depth,
        "num_attention_heads": options.heads,
        "intermediate_size": 4 * options.width,
        "attention_probs_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0,
        "attn_implementation": "sdpa",
    }
    if kind == "bert":
        config = transformers.BertConfig(
            vocab_size=VOCABULARY, max_position_embeddings=tokens, **sizes
        )
        ids = torch.randint(VOCABULARY, (options.batch_size, tokens))
        return transformers.BertModel(config), {"input_ids": ids}, None, 0
    side = math.isqrt(tokens)
    shape = (side, side) if side**2 == tokens else (math.isqrt(tokens // 2), math.isqrt(2 * tokens))
    if math.prod(shape) != tokens:
        raise ValueError(f"tokens is {tokens}, expected a square or twice a square")
    image: Any = tuple(PATCH * n for n in shape)
    vit = transformers.ViTConfig(image_size=image, patch_size=PATCH, **sizes)
    pixels = torch.randn(options.batch_size, 3, *image)
    return transformers.ViTModel(vit), {"pixel_values": pixels}, shape, 1


def run(options: Options) -> None:
    benchmark = Benchmark(
        name="encoders",
        candidates=tuple(f"{model}/{kind}" for model in MODELS for kind in KINDS),
        axis="tokens",
        sizes=options.tokens,
        modes=(INFERENCE, TRAINING) if options.gradients else (INFERENCE,),
    )
    run_benchmark(benchmark, prepare, options)


if __name__ == "__main__":
    harness.main(Options, run, __doc__)
