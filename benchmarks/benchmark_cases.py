"""Shared by benchmarks: inputs, calls of ops and models, and imports of other libraries."""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import BACKWARD, TRAINING, Case, Options, find_device
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from onescan.layers.mixers import SoftmaxMixerConfig
from onescan.layers.position import TokenPositionConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.models.masked_lm import MaskedLMConfig
from onescan.models.presets import preset
from onescan.ops.backend import why_no_kernel

Network = ImageClassifierConfig | MaskedLMConfig
MASKED, PERIOD = 3, 10  # masked tokens; 30% in LION's pre-training, arXiv:2502.16249, App. C.5


def noise(options: Options, *size: int) -> Tensor:
    """Draw normal noise in the data type and on the device of the options."""
    dtype = getattr(torch, options.dtype)
    return torch.randn(*size, device=find_device(options.device), dtype=dtype)


def op_case(
    op: Callable[..., Tensor], inputs: Sequence[Tensor], mode: str, options: Options
) -> Case:
    """Make the case of an op whose output has the shape of its third input, the values.

    With gradients, it computes those of all inputs, given a random one of the output.
    """
    op = torch.compile(op) if options.compile else op
    if mode == BACKWARD:
        leaves = [x.requires_grad_() for x in inputs]
        gradient = torch.randn_like(inputs[2])
        return Case(lambda: torch.autograd.grad(op(*leaves), leaves, gradient))
    return Case(torch.no_grad()(lambda: op(*inputs)))


def copy_case(inputs: Sequence[Tensor], mode: str) -> Case:
    """Copy as many bytes as an op must read and write at least; its output is like values.

    The forward pass reads the inputs and writes the output. The backward pass reads the inputs and
    the gradient of the output, and writes those of the inputs.
    """
    size = sum(x.numel() * x.element_size() for x in inputs)
    output = inputs[2].numel() * inputs[2].element_size()
    moved = 3 * size + 2 * output if mode == BACKWARD else size + output
    source = torch.ones(moved // 2, dtype=torch.uint8, device=inputs[0].device)
    target = torch.empty_like(source)
    return Case(lambda: target.copy_(source))


def model_case(
    model: nn.Module, predict: Callable[[], object], loss: Callable[[], Tensor], mode: str
) -> Case:
    """Make the case of a model: a prediction, or the gradient of the loss for each weight."""
    model.train(mode == TRAINING)
    weights = [p for p in model.parameters() if p.requires_grad]

    def train() -> object:
        return torch.autograd.grad(loss(), weights, allow_unused=True)

    return Case(
        train if mode == TRAINING else torch.no_grad()(predict),
        parameters=sum(p.numel() for p in weights),
    )


def find_network(name: str) -> Network:
    """Return the config of a preset; raise ValueError if it is another kind of model."""
    config = preset(name)
    if not isinstance(config, ImageClassifierConfig | MaskedLMConfig):
        raise ValueError(
            f"preset is {name!r}, expected an image classifier or a masked language model"
        )
    return config


def axis_of(
    name: str, values: Sequence[str], networks: Sequence[Network], options: Any
) -> dict[str, Any]:
    """Return the sizes to measure, from the options, and what they count: image sides or tokens.

    Raises:
        ValueError: If some networks classify images and others are language models; `name` and
            `values` are the option that lists them.
    """
    kinds = {isinstance(network, ImageClassifierConfig) for network in networks}
    if len(kinds) != 1:
        raise ValueError(
            f"{name} are {tuple(values)}, expected only image classifiers or only masked language "
            "models"
        )
    if kinds == {True}:
        image: dict[str, Any] = {"axis": "image side", "items": "images"}
        return {**image, "sizes": options.image_size, "tokens": lambda side: side**2}
    return {"axis": "tokens", "items": "tokens", "sizes": options.tokens}


def resized(config: Network, size: int) -> Network:
    """Return the config of the same model for images of this side or at least this many tokens."""
    if isinstance(config, ImageClassifierConfig):
        return dataclasses.replace(config, image_size=(size, size))
    position = config.position
    if isinstance(position, TokenPositionConfig) and position.max_tokens < size:
        return dataclasses.replace(config, position=TokenPositionConfig(max_tokens=size))
    return config


def network_case(config: Network, mode: str, size: int, options: Options) -> Case:
    """Make the case of an image classifier or a masked language model.

    A masked language model computes logits of the masked tokens, `MASKED` out of every `PERIOD`.
    """
    if not isinstance(config.mixer, SoftmaxMixerConfig):
        check_backend(options)
    model = build_on_device(resized(config, size).build, options)
    if isinstance(config, ImageClassifierConfig):
        return image_case(model, mode, (config.channels, size, size), options)
    shape, device = (options.batch_size, size), find_device(options.device)
    tokens = torch.randint(config.vocab_size, shape, device=device)
    masks = (torch.arange(size, device=device) % PERIOD < MASKED).expand(shape)
    labels = tokens[masks]

    def predict() -> Tensor:
        return model(tokens, positions=masks)[0]

    case = model_case(model, predict, lambda: cross_entropy(predict(), labels), mode)
    return case._replace(items=tokens.numel())


def image_case(model: nn.Module, mode: str, size: Sequence[int], options: Options) -> Case:
    """Make the case of an image classifier; size is (channels, height, width)."""
    images = noise(options, options.batch_size, *size)
    labels = torch.zeros(options.batch_size, dtype=torch.long, device=images.device)
    case = model_case(
        model, lambda: model(images), lambda: cross_entropy(model(images), labels), mode
    )
    return case._replace(items=options.batch_size)


def build_on_device(build: Callable[[], nn.Module], options: Options) -> nn.Module:
    """Build a model on the device, in the data type, and compiled if requested."""
    device = find_device(options.device)
    with device:  # drawing a billion weights on a CPU takes long
        model = build()
    model = model.to(device, getattr(torch, options.dtype))
    if options.compile:
        model.compile()
    return model


def check_backend(options: Options) -> None:
    """Raise ValueError if kernels are requested but cannot run; models would not use them."""
    dtype, device = getattr(torch, options.dtype), find_device(options.device)
    reason = why_no_kernel(torch.empty(1, 1, device=device, dtype=dtype))
    if options.backend == "triton" and reason is not None:
        raise ValueError(f"backend is 'triton', but {reason}")


def softmax(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """Compute torch's attention, [B, T, H, K] as ours."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def import_fla(module: str, options: Options) -> Any:
    """Import a module of flash-linear-attention; raise ValueError if it cannot run here."""
    if find_device(options.device).type != "cuda":
        raise ValueError("flash-linear-attention needs a GPU")
    return import_package(module, "flash-linear-attention")


def import_package(module: str, package: str) -> Any:
    """Import a module of another package; raise ValueError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # a dependency of the package
        raise ValueError(f"{package} is not installed: pip install {package}") from error
