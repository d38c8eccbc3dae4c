"""Causal language models of equal width and depth: ours, and flash-linear-attention's."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onescan.bench.contest.machine import device_of
from onescan.bench.contest.trial import RefusalError
from onescan.bench.contestants.ops import theirs
from onescan.bench.contests import ContestOptions
from onescan.layers.basic import GLUConfig, MLPConfig
from onescan.layers.mixers import (
    LightNetMixerConfig,
    LionMixerConfig,
    MixerConfig,
    SoftmaxMixerConfig,
)
from onescan.layers.position import (
    PositionConfig,
    ToeplitzPositionConfig,
    TokenPositionConfig,
)
from onescan.models.causal_lm import CausalLMConfig
from onescan.ops.backend import why_no_kernel


class Shape(NamedTuple):
    """Of a language model; embedding and head are not tied."""

    width: int
    depth: int
    num_heads: int
    gate_rank: int
    vocab_size: int
    multiple_of: int = 1
    """The hidden width of LightNet's gated linear units is rounded up to it."""


# LightNet, arXiv:2405.21022: WikiText-103's, v1's Table 10, and Table 4's; small is ours, for CPUs
SHAPES = {
    "small": Shape(256, 4, 4, 64, 8192),
    "45m": Shape(512, 6, 8, 64, 50265),
    "150m": Shape(768, 15, 12, 128, 50272),
    "380m": Shape(1024, 26, 8, 128, 50272),
    "1.45b": Shape(2048, 24, 16, 128, 50272, 256),
}
LIGHTNET, LION_S, SOFTMAX = "lightnet", "lion_s", "softmax"
FLA = ("fla_gla", "fla_hgrn2", "fla_mamba2")


def our_config(name: str, size: str, *, max_tokens: int) -> CausalLMConfig:
    """LightNet, LION-s that looks back, or a model like GPT-2.

    Args:
        name: of the three.
        size: a key of `SHAPES`.
        max_tokens: places that the last one learns.
    """
    shape = SHAPES[size]
    heads = shape.num_heads
    lightnet = LightNetMixerConfig(num_heads=heads, causal=True, gate_rank=shape.gate_rank)
    parts: dict[str, tuple[MixerConfig, PositionConfig | None]] = {
        LIGHTNET: (lightnet, ToeplitzPositionConfig()),
        LION_S: (LionMixerConfig(num_heads=heads, direction="forward"), None),
        SOFTMAX: (
            SoftmaxMixerConfig(num_heads=heads, causal=True),
            TokenPositionConfig(max_tokens=max_tokens),
        ),
    }
    mixer, position = parts[name]
    is_lightnet = name == LIGHTNET
    return CausalLMConfig(
        vocab_size=shape.vocab_size,
        width=shape.width,
        depth=shape.depth,
        mixer=mixer,
        mlp=GLUConfig(multiple_of=shape.multiple_of) if is_lightnet else MLPConfig(),
        position=position,
        norm="simple_rms" if is_lightnet else "layer",
        tie_embeddings=False,
    )


def their_model(name: str, size: str, options: ContestOptions) -> nn.Module:
    """flash-linear-attention's, as it configures them by default.

    Raises:
        RefusalError: it is not installed, or a GPU is not asked for.
    """
    models = theirs("fla.models", options)
    shape = SHAPES[size]
    common = {"hidden_size": shape.width, "vocab_size": shape.vocab_size}
    if name == "fla_gla":
        config = models.GLAConfig(num_hidden_layers=shape.depth, **common)
        return models.GLAForCausalLM(config)
    if name == "fla_hgrn2":
        config = models.HGRN2Config(num_hidden_layers=shape.depth, **common)
        return models.HGRN2ForCausalLM(config)
    # it has no MLP, and so twice as many blocks have about as many parameters
    config = models.Mamba2Config(num_hidden_layers=2 * shape.depth, **common)
    return models.Mamba2ForCausalLM(config)


def check_backend(mixer: MixerConfig, options: ContestOptions) -> None:
    """Refuse kernels where they cannot run; models run on torch there without a word.

    Raises:
        RefusalError: the backend is Triton, and something keeps the mixer's kernels from running.
    """
    if options.backend != "triton" or isinstance(mixer, SoftmaxMixerConfig):
        return
    dtype = getattr(torch, options.dtype)
    reason = why_no_kernel(torch.empty(1, 1, device=device_of(options), dtype=dtype))
    if reason is not None:
        raise RefusalError(f"backend is 'triton', but {reason}")


def placed(build: Callable[[], nn.Module], options: ContestOptions) -> nn.Module:
    """A model whose weights are of the type that is asked for; compiled, if so asked.

    They are drawn on the device itself, as a CPU takes its time for a billion numbers.
    """
    with device_of(options):
        model = build()
    model = model.to(device_of(options), getattr(torch, options.dtype))
    if options.compile:
        model.compile()
    return model


def parameters(model: nn.Module) -> int:
    """How many numbers are learnt."""
    return sum(p.numel() for p in model.parameters())


def state_mib(state: Any) -> float:
    """What a tree of tensors takes; numbers in it do not count."""
    return sum(x.numel() * x.element_size() for x in _tensors(state) if x.ndim) / 2**20


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for part in tree.values():
            yield from _tensors(part)
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from _tensors(part)
    elif hasattr(tree, "layers"):  # transformers' caches
        yield from _tensors([getattr(layer, "state", None) for layer in tree.layers])
