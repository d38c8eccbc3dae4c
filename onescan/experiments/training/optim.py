"""Optimization: AdamW, learning rate schedule, mixed precision, and an EMA of the weights."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import AdamW, Optimizer

from onescan.experiments.training.config import (
    MatmulPrecision,
    Precision,
    TrainingConfig,
    TransferConfig,
)
from onescan.ops.backend import Backend, use_backend, why_no_kernels

MIN_LOSS_SCALE = 1.0  # a smaller scale cannot keep gradients from vanishing


def build_optimizer(model: nn.Module, config: TrainingConfig) -> Optimizer:
    """Build the optimizer. The training loop sets its learning rate at every step.

    AdamW multiplies the weight decay by the learning rate, so decoupled weight decay is divided by
    the peak learning rate.
    """
    scale = config.learning_rate if config.decoupled_weight_decay else 1.0
    groups = parameter_groups(model, config.weight_decay / scale)
    return AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters into a group with weight decay and one without.

    A parameter has no weight decay if it has at most one axis (norms, biases), or if the module
    that owns it lists it in its class attribute `no_weight_decay: frozenset[str]`.
    """
    exempt = {
        parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim <= 1 or name in getattr(module, "no_weight_decay", ())
    }
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trainable if p not in exempt], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p in exempt], "weight_decay": 0.0},
    ]


class Plan(NamedTuple):
    """The length of a run, and the interval of its evaluations and checkpoints, in micro-batches.

    A step reads one micro-batch, the batch itself, unless the batch size grows: then it
    reads all micro-batches of the initial size that its batch consists of.
    """

    micro_batches: int
    per_epoch: int
    evaluate_every: int
    save_every: int
    ends: tuple[int, ...] | None = None
    """Micro-batches after each number of steps, from 0 on; None if each step reads one."""
    transfer: int = 0
    """Micro-batches of attention transfer, the first phase."""

    @classmethod
    def of(
        cls, config: TrainingConfig, per_epoch: int, transfer: TransferConfig | None = None
    ) -> "Plan":
        """Convert epochs to micro-batches, and micro-batches to steps.

        Raises:
            ValueError: If attention transfer leaves no steps to train on the task.
        """
        total = config.steps or config.epochs * per_epoch
        length = 0.0 if transfer is None else transfer.steps
        phase = round(length * total if length < 1 else length)
        if phase >= total:
            raise ValueError(
                f"transfer.steps is {length:g}, expected fewer than the {total} steps of the run, "
                "or a fraction of them"
            )
        return cls(
            transfer=phase,
            micro_batches=total,
            per_epoch=per_epoch,
            evaluate_every=max(1, round(config.evaluate_every * per_epoch)),
            save_every=max(1, round(config.checkpoint_every * per_epoch)),
            ends=_ramp(config, total),
        )

    def is_transfer(self, step: int) -> bool:
        """Return whether step `step`, counted from 0, belongs to attention transfer."""
        return self.read(step) < self.transfer

    def learning_rate(
        self, step: int, config: TrainingConfig, transfer: TransferConfig | None
    ) -> float:
        """Return the learning rate of step `step`. Each phase goes through the schedule once."""
        progress = self.read(step)
        if transfer is None or progress >= self.transfer:
            return learning_rate(
                progress - self.transfer, self.micro_batches - self.transfer, config
            )
        peak = transfer.learning_rate or config.learning_rate
        return learning_rate(progress, self.transfer, replace(config, learning_rate=peak))

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""
        return self.micro_batches if self.ends is None else len(self.ends) - 1

    def read(self, step: int) -> int:
        """Return the number of micro-batches in the first `step` steps."""
        return step if self.ends is None else self.ends[step]

    def evaluates(self, step: int) -> bool:
        """Return whether the model is evaluated after `step` steps."""
        return step == self.steps or self._passes(step, self.evaluate_every)

    def saves(self, step: int) -> bool:
        """Return whether a checkpoint is saved after `step` steps."""
        return step == self.steps or self._passes(step, self.save_every)

    def _passes(self, step: int, every: int) -> bool:
        return step > 0 and self.read(step) // every > self.read(step - 1) // every


def _ramp(config: TrainingConfig, total: int) -> tuple[int, ...] | None:
    """Return the micro-batches after each number of steps; None if the batch size is constant.

    The batch size grows linearly with the examples seen, as in Cramming, arXiv:2212.14034, where it
    grows with time.

    >>> config = TrainingConfig(batch_size=32, initial_batch_size=8, batch_size_ramp=0.5)
    >>> _ramp(config, 32)  # batches of 1, 1, 1, 1, 2, 2, 3, 3, 4, 4 ... times 8
    (0, 1, 2, 3, 4, 6, 8, 11, 14, 18, 22, 26, 30, 32)
    """
    if config.initial_batch_size is None:
        return None
    largest, ends = config.batch_size // config.initial_batch_size, [0]
    while ends[-1] < total:
        count = math.floor(ends[-1] * largest / (config.batch_size_ramp * total)) + 1
        ends.append(min(ends[-1] + min(count, largest), total))
    return tuple(ends)


def learning_rate(step: int, steps: int, config: TrainingConfig) -> float:
    """Return the learning rate of step `step`, counted from 0, out of `steps`.

    If the batch size grows, both are counted in micro-batches.

    >>> config = TrainingConfig(learning_rate=8.0, warmup=4.0, final_lr_ratio=0.5)
    >>> [learning_rate(step, 8, config) for step in (0, 1, 2, 3, 4, 6)]
    [2.0, 4.0, 6.0, 8.0, 8.0, 6.0]
    """
    warmup = round(config.warmup * steps if config.warmup < 1 else config.warmup)
    if step < warmup:
        warmed_up = config.learning_rate * (step + 1) / warmup
        return warmed_up + config.initial_lr_ratio * (config.learning_rate - warmed_up)
    if config.schedule == "inverse_sqrt":
        return config.learning_rate * math.sqrt(max(warmup, 1) / (step + 1))
    progress = (step - warmup) / max(steps - warmup, 1)
    decay = {
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "linear": 1 - progress,
        "constant": 1.0,
    }
    share = config.final_lr_ratio + (1 - config.final_lr_ratio) * decay[config.schedule]
    return config.learning_rate * share


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which torch computes matrix products in the given precision."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision))


@contextmanager
def compute_settings(backend: Backend, matmul_precision: MatmulPrecision) -> Iterator[None]:
    """Set the backend of the ops and the precision of float32 matrix products inside the context.

    Raises:
        ValueError: If the backend is unknown, or is "triton" and Triton or a GPU is missing.
    """
    if backend == "triton" and (obstacle := why_no_kernels()):
        raise ValueError(f"backend is 'triton', but {obstacle}")
    previous = torch.get_float32_matmul_precision()
    with use_backend(backend):
        torch.set_float32_matmul_precision(matmul_precision)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(previous)


def build_scaler(precision: Precision, device: torch.device) -> GradScaler | None:
    """Build the gradient scaler that float16 needs, or return ``None``."""
    return GradScaler(device.type) if precision == "float16" else None


def lower_scale(scaler: GradScaler) -> None:
    """Lower the scale after a gradient of infinite norm, even if each of its values is finite."""
    before = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() >= before:
        scaler.update(before * scaler.get_backoff_factor())


def underflowed(scaler: GradScaler) -> bool:
    """Return whether gradients overflow even at a scale that no longer prevents underflow."""
    return not scaler.get_scale() >= MIN_LOSS_SCALE


class EMA:
    """An exponential moving average (EMA) of the weights.

    ema = d * ema + (1 - d) * weights after every step, where d rises from (1 + step) / (10 + step)
    to `decay`, so that the random initial weights are forgotten quickly.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors = {name: t.detach().clone() for name, t in model.state_dict().items()}

    def update(self, model: nn.Module, step: int) -> None:
        """Update the averages with the weights after `step` steps. Integer buffers are copied."""
        decay = min(self.decay, (1 + step) / (10 + step))
        pairs = [
            (local_part(self.tensors[k]), local_part(t)) for k, t in model.state_dict().items()
        ]
        averages = [average for average, _ in pairs if average.is_floating_point()]
        weights = [weight for average, weight in pairs if average.is_floating_point()]
        torch._foreach_lerp_(averages, weights, 1 - decay)
        for average, value in pairs:
            if not average.is_floating_point():
                average.copy_(value)

    @contextmanager
    def swapped_into(self, model: nn.Module) -> Iterator[None]:
        """Give the model the averaged weights inside the context."""
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(self.tensors)
        try:
            yield
        finally:
            model.load_state_dict(weights)


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor that may be sharded."""
    to_local = getattr(tensor, "to_local", None)  # avoids importing DTensor, which is slow
    return to_local() if to_local else tensor


def gathered(norm: Tensor) -> Tensor:
    """Return a norm as an ordinary tensor, gathered if the weights are sharded."""
    gather = getattr(norm, "full_tensor", None)  # avoids importing DTensor, which is slow
    return gather() if gather else norm
