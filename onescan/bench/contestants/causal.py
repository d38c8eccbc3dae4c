"""Causal language models in training, or the ops that mix their tokens."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from onescan.bench.contest.machine import device_of
from onescan.bench.contest.trial import INFERENCE, TRAINING, Field, Trial
from onescan.bench.contestants.language_models import (
    FLA,
    LIGHTNET,
    LION_S,
    SHAPES,
    SOFTMAX,
    check_backend,
    our_config,
    parameters,
    placed,
    their_model,
)
from onescan.bench.contestants.one_scan import angles_of
from onescan.bench.contestants.ops import noise, softmax, theirs, trial, works
from onescan.bench.contests import CausalOptions
from onescan.layers.mixers import SoftmaxMixerConfig
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.size import count_macs
from onescan.ops.additive_decay import additive_decay
from onescan.ops.decay_attention import decay_attention

TIMES_IN_TRAINING = 3  # a backward has two products for each of the forward's
LOGIT = 2.0  # of the mean decay, sigmoid(2) = 0.88
OUR_OPS = ("additive_decay", "additive_decay_lrpe", "decay_attention")
THEIR_OPS = ("fla_chunk_lightnet", "fla_chunk_gla", "fla_chunk_simple_gla")


def contestants(options: CausalOptions) -> Field:
    """Name them."""
    if options.level == "op":
        return Field((*OUR_OPS, SOFTMAX, *THEIR_OPS), works(options), prepare_op)
    work = TRAINING if options.gradients else INFERENCE
    return Field((LIGHTNET, LION_S, SOFTMAX, *FLA), (work,), prepare)


def prepare(name: str, work: str, size: int, options: CausalOptions) -> Trial:
    """Random tokens through a model; in training to the gradient of each weight."""
    is_theirs, macs = name in FLA, 0
    build: Callable[[], nn.Module]
    if is_theirs:
        build = partial(their_model, name, options.model_size, options)
    else:
        config = our_config(name, options.model_size, max_tokens=size)
        check_backend(config.mixer, options)
        build = config.build
        macs = options.batch_size * _macs(config, size)
    model = placed(build, options).train(work == TRAINING)
    vocabulary = SHAPES[options.model_size].vocab_size
    tokens = torch.randint(vocabulary, (options.batch_size, size), device=device_of(options))
    loss_of = _their_loss if is_theirs else _our_loss
    if work == TRAINING:
        macs *= TIMES_IN_TRAINING
    call = _training(model, tokens, loss_of) if work == TRAINING else _inference(model, tokens)
    return Trial(call, macs=macs, items=tokens.numel(), parameters=parameters(model))


def _macs(config: CausalLMConfig, size: int) -> int:
    """Multiply-accumulates of a forward; of softmax's products without those of later tokens.

    It has two of T x T, of which T (T - 1) / 2 places each are masked.
    """
    counted = count_macs(config, torch.zeros(1, size, dtype=torch.long))
    is_masked = isinstance(config.mixer, SoftmaxMixerConfig)
    return counted - is_masked * config.depth * config.width * size * (size - 1)


def prepare_op(name: str, work: str, size: int, options: CausalOptions) -> Trial:
    """Noise through an op, with the heads of a model of that size."""
    shape = SHAPES[options.model_size]
    width = shape.width // shape.num_heads
    q, k, v = (noise(options, options.batch_size, size, shape.num_heads, width) for _ in range(3))
    inputs = [q, k, v]
    if name in ("decay_attention", "fla_chunk_simple_gla"):
        inputs.append(logsigmoid(noise(options, *v.shape[:-1]) + LOGIT))
    if name == "fla_chunk_gla":
        inputs.append(logsigmoid(noise(options, *v.shape) + LOGIT))
    op = _their_op(name, options) if name in THEIR_OPS else _our_op(name, options)
    return trial(op, inputs, work, options)


def _our_op(name: str, options: CausalOptions) -> Callable[..., Tensor]:
    backend = options.backend

    def with_lrpe(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return additive_decay(q, k, v, angles=angles_of(q), causal=True, backend=backend)[0]

    def without(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return additive_decay(q, k, v, causal=True, backend=backend)[0]

    def decayed(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        return decay_attention(
            q, k, v, log_decay, causal=True, backend=backend, return_state=False
        )[0]

    ops: dict[str, Callable[..., Tensor]] = {
        "additive_decay": without,
        "additive_decay_lrpe": with_lrpe,
        "decay_attention": decayed,
    }
    return ops.get(name, partial(softmax, causal=True))


def _their_op(name: str, options: CausalOptions) -> Callable[..., Tensor]:
    """flash-linear-attention's.

    Raises:
        RefusalError: it is not installed, or a GPU is not asked for.
    """
    kernel_name = name.removeprefix("fla_")
    module = theirs(f"fla.ops.{kernel_name.removeprefix('chunk_')}", options)
    kernel = getattr(module, kernel_name)
    return lambda *inputs: kernel(*inputs, scale=1.0)[0]


def _training(
    model: nn.Module, tokens: Tensor, loss_of: Callable[[nn.Module, Tensor], Tensor]
) -> Callable[[], object]:
    weights = [p for p in model.parameters() if p.requires_grad]

    def call() -> object:
        return torch.autograd.grad(loss_of(model, tokens), weights, allow_unused=True)

    return call


def _inference(model: nn.Module, tokens: Tensor) -> Callable[[], object]:
    @torch.no_grad()
    def call() -> object:
        return model(tokens)[0]

    return call


def _our_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits, _ = model(tokens)
    told = rearrange(logits[:, :-1], "b t v -> (b t) v")
    return F.cross_entropy(told, rearrange(tokens[:, 1:], "b t -> (b t)"))


def _their_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """With the fused loss that comes with their models."""
    return model(input_ids=tokens, labels=tokens).loss
