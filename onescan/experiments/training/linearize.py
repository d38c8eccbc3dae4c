"""Turn softmax models from other libraries into linear ones: attention transfer, then training.

First, each layer of linear attention learns on its own to reproduce the softmax attention that it
replaces, on the inputs that this attention receives in the original model. The loss of a layer is

    sum_t |o'_t - o_t|^2 / sum_t |o_t|^2

over the real tokens t of a batch, where o and o' are the outputs of softmax and linear attention.
Layers are trained in one pass through the original model, one after another, so only the
activations of one layer are stored at a time. Then the linear layers take the place of the softmax
layers, and all weights are trained on the task.

Source: the first stage of LoLCATs, arXiv:2410.10254; see `onescan.experiments.training.transfer`,
which does the same for onescan's own models.
"""

import copy
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer

from onescan.checks import NotFiniteError, check_positive, check_whole
from onescan.experiments.training import optim
from onescan.experiments.training.config import TrainingConfig
from onescan.messages import named_type
from onescan.nn.replace import (
    Replacement,
    build_replacements,
    install_replacements,
    real_tokens,
)

Loss = Callable[[nn.Module, Any], Tensor]
Report = Callable[[str, int, float], None]

BETAS, WARM_UP = (0.9, 0.999), 0.1  # fraction of each phase
FAR_ABOVE = 10  # a transfer loss that ends this much above its start, and above 1, has diverged


@dataclass(frozen=True, kw_only=True)
class Linearized:
    """What `linearize` did.

    Attributes:
        replaced: Names of the modules with linear attention.
        kept: Names of the modules that keep their softmax attention.
        transfer_losses: For each replaced module, the loss of attention transfer at each step: the
            squared error divided by the squared norm of the softmax attention's output.
        losses: Training loss at each step of the second phase.
    """

    replaced: tuple[str, ...]
    kept: tuple[str, ...] = ()
    transfer_losses: Mapping[str, list[float]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Phase:
    """A phase of training, and its learning rate, which errors name."""

    name: str
    option: str
    rate: float

    def finite(self, number: float, what: str, step: int) -> float:
        """Return a number, or raise FloatingPointError if it is not finite."""
        if math.isfinite(number):
            return number
        if step == 0:  # nothing is trained before, so the learning rate is not the cause
            raise FloatingPointError(
                f"the {what} is {number} at step 1; check the inputs and labels of the data"
            )
        raise self.divergence(step + 1, f"the {what} is {number}")

    def check_weights(self, model: nn.Module, steps: int) -> None:
        """Raise FloatingPointError if weights are not finite after the last step."""
        norm = nn.utils.get_total_norm(model.parameters()).item()
        if not math.isfinite(norm):
            raise self.divergence(steps, f"the norm of the weights is {norm}")

    def divergence(self, step: int, reason: str) -> FloatingPointError:
        """Return the error for a phase that diverges."""
        return FloatingPointError(
            f"{self.name} diverged at step {step}: {reason}; try a smaller {self.option} (now "
            f"{self.rate})"
        )

    @contextmanager
    def reporting(self, step: int) -> Iterator[None]:
        """After the first step, report arguments of an op that are not finite as divergence."""
        try:
            yield
        except NotFiniteError as error:
            if step == 0:
                raise
            raise self.divergence(step + 1, str(error)) from error


def linearize(
    model: nn.Module,
    data: Iterable[Any],
    kind: str = "lightnet",
    *,
    shape: tuple[int, ...] | None = None,
    prefix: int = 0,
    exclude: Collection[str] = (),
    softmax_every: int | None = None,
    transfer_steps: int = 300,
    transfer_learning_rate: float = 1e-3,
    steps: int = 1000,
    learning_rate: float = 2e-4,
    weight_decay: float = 0.01,
    max_gradient_norm: float = 1.0,
    loss: Loss | None = None,
    report: Report | None = None,
    **options: Any,
) -> Linearized:
    """Replace the softmax attention of a trained encoder with linear attention, and train it.

    The model is changed in place; see `onescan.nn.replace_attention` for the supported models, and
    for what is lost. Each phase has its own learning rate schedule: linear warm-up in the first
    tenth of its steps, then cosine decay to 0.

    Args:
        model: Trained model, on the device to train it on.
        data: Batches, such as a `torch.utils.data.DataLoader`, which are read again from the start
            when they run out. A batch is a mapping of the model's arguments, with labels from which
            a transformers model computes its loss, or a pair (inputs, classes), for cross-entropy.
            Batches are moved to the device of the model.
        kind: "lightnet", "lion" or "delta".
        shape: Size of each axis of the tokens' grid; see `replace_attention`.
        prefix: Number of tokens before the grid; see `replace_attention`.
        exclude: Names of modules to leave as they are.
        softmax_every: Keep the softmax attention of every n-th layer, beginning with the n-th. None
            replaces all layers.
        transfer_steps: Steps of attention transfer; 0 skips it.
        transfer_learning_rate: Peak learning rate of attention transfer.
        steps: Steps of training on the task; 0 skips it.
        learning_rate: Peak learning rate of training on the task.
        weight_decay: Weight decay of AdamW, except for norms and biases.
        max_gradient_norm: Maximum norm of the gradient, in both phases.
        loss: Function of the model and a batch that returns the loss, for other batches or tasks.
        report: Called after each step with the phase ("transfer" or "train"), the number of steps
            done in it, and the loss, which is averaged over layers in attention transfer.
        options: Options of the layer, such as ``decay="fixed"``.

    Returns:
        The names of the replaced modules and the losses of both phases.

    Raises:
        ValueError: If the attention cannot be replaced, a number is out of range, the data has no
            batches or the model returns no loss. The model is then unchanged, unless the error
            occurs in the second phase.
        FloatingPointError: If a loss is not finite, or attention transfer ends with a loss far
            above its start.
    """
    check_whole(0, prefix=prefix, transfer_steps=transfer_steps, steps=steps)
    check_positive(
        transfer_learning_rate=transfer_learning_rate,
        learning_rate=learning_rate,
        max_gradient_norm=max_gradient_norm,
    )
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay is {weight_decay}, expected at least 0")
    if isinstance(data, Mapping | str):
        raise ValueError(
            f"data is {named_type(data)}, expected batches: a DataLoader, or a list such as [batch]"
        )
    arguments = Replacement(kind=kind, shape=shape, prefix=prefix, options=options)
    new = build_replacements(model, arguments, exclude=exclude)
    kept = _kept(new, softmax_every)
    new = {name: module for name, module in new.items() if name not in kept}
    # copy the output projections, because the originals still compute the targets
    copies = {module: copy.deepcopy(module) for module in new.values()}
    new = {name: copies[module] for name, module in new.items()}
    transferring = _Phase("attention transfer", "transfer_learning_rate", transfer_learning_rate)
    training = _Phase("training", "learning_rate", learning_rate)
    device = next(model.parameters()).device
    batches = _on_device(_repeated(data), device)
    was_training = model.training
    try:
        if steps and transfer_steps:  # a mistake in the loss should not be found after transfer
            batches = _after_check(model, batches, loss or _default_loss, training)
        transfer = _transfer(
            model, new, batches, loss or _default_output, transfer_steps,
            phase=transferring, max_gradient_norm=max_gradient_norm, report=report,
        )  # fmt: skip
        install_replacements(model, new)
        losses = _train(
            model, batches, loss or _default_loss, steps, phase=training,
            weight_decay=weight_decay, max_gradient_norm=max_gradient_norm, report=report,
        )  # fmt: skip
    finally:
        model.train(was_training)
    return Linearized(
        replaced=tuple(new), kept=tuple(kept), transfer_losses=transfer, losses=losses
    )


def _kept(new: Mapping[str, nn.Module], every: int | None) -> list[str]:
    """Return the names of every n-th layer; a layer with several names counts once."""
    if every is None:
        return []
    check_whole(2, softmax_every=every)
    kept = list(dict.fromkeys(new.values()))[every - 1 :: every]
    return [name for name, module in new.items() if module in kept]


@torch.no_grad()
def _after_check(
    model: nn.Module, batches: Iterator[Any], loss_of: Loss, phase: _Phase
) -> Iterator[Any]:
    """Check the loss of the first batch, and return the batches, beginning with this one."""
    first = next(batches)
    model.eval()
    phase.finite(_checked_loss(loss_of, model, first).item(), "training loss", 0)
    return itertools.chain([first], batches)


def _transfer(
    model: nn.Module,
    students: Mapping[str, nn.Module],
    batches: Iterator[Any],
    run: Callable[[nn.Module, Any], Any],
    steps: int,
    *,
    phase: _Phase,
    max_gradient_norm: float,
    report: Report | None,
) -> dict[str, list[float]]:
    """Train each student to reproduce the module of the same name; return the losses."""
    losses: dict[str, list[float]] = {name: [] for name in students}
    if not steps:
        return losses
    # a module with several names is one teacher, which may be called several times
    teachers = {model.get_submodule(name): name for name in reversed(list(students))}
    layers = nn.ModuleList(dict.fromkeys(students.values())).train()
    optimizer = AdamW(optim.parameter_groups(layers, 0.0), lr=phase.rate, betas=BETAS)
    model.eval()
    for step in range(steps):
        _set_rate(optimizer, phase.rate, step, steps)
        optimizer.zero_grad()
        batch = next(batches)
        with phase.reporting(step):
            step_losses = _compare(model, teachers, students, batch, run)
        for name, student in students.items():
            losses[name].append(phase.finite(step_losses[student], "transfer loss", step))
        for layer in layers:
            norm = nn.utils.clip_grad_norm_(layer.parameters(), max_gradient_norm)
            phase.finite(norm.item(), "gradient of the transfer loss", step)
        optimizer.step()
        if report is not None:
            report("transfer", step + 1, math.fsum(step_losses.values()) / len(step_losses))
    optimizer.zero_grad()
    for name, (first, *_, last) in losses.items() if steps > 1 else ():
        if last > FAR_ABOVE * max(first, 1):  # zeros have a loss of 1
            reason = f"the transfer loss of {name} is {last:.3g}, but was {first:.3g} at step 1"
            raise phase.divergence(steps, reason)
    phase.check_weights(layers, steps)
    return losses


class _FinishedError(Exception):
    """Ends the forward pass of the original model after its last attention module."""


def _compare(
    model: nn.Module,
    teachers: Mapping[nn.Module, str],
    students: Mapping[str, nn.Module],
    batch: Any,
    run: Callable[[nn.Module, Any], Any],
) -> dict[nn.Module, float]:
    """Compute the losses of all students on a batch, and accumulate their gradients."""
    losses: dict[nn.Module, list[float]] = {students[name]: [] for name in teachers.values()}

    def hook_of(student: nn.Module) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            target = _tensor(output)
            real = real_tokens(student, args, kwargs)
            with torch.enable_grad():
                error = _tensor(student(*args, **kwargs)).float() - target.float()
                norm = target.float()
                if real is not None:
                    error, norm = error[real], norm[real]
                least = torch.finfo(torch.float32).tiny
                loss = error.square().sum() / norm.square().sum().clamp(min=least)
                loss.backward()
            losses[student].append(loss.item())
            # a module with several names is called again
            if len(losses) == len(students) and all(losses.values()):
                raise _FinishedError

        return hook

    with ExitStack() as hooks, torch.no_grad():
        for teacher, name in teachers.items():
            handle = teacher.register_forward_hook(hook_of(students[name]), with_kwargs=True)
            hooks.callback(handle.remove)
        with suppress(_FinishedError):
            run(model, batch)
    if missing := [name for name in teachers.values() if not losses[students[name]]]:
        raise ValueError(
            f"the model did not use {min(missing)} on a batch of data; pass its name in exclude"
        )
    return {student: math.fsum(values) / len(values) for student, values in losses.items()}


def _train(
    model: nn.Module,
    batches: Iterator[Any],
    loss_of: Loss,
    steps: int,
    *,
    phase: _Phase,
    weight_decay: float,
    max_gradient_norm: float,
    report: Report | None,
) -> list[float]:
    """Train all weights on the task; return the losses."""
    losses: list[float] = []
    if not steps:
        return losses
    optimizer = AdamW(optim.parameter_groups(model, weight_decay), lr=phase.rate, betas=BETAS)
    model.train()
    for step in range(steps):
        _set_rate(optimizer, phase.rate, step, steps)
        batch = next(batches)
        with torch.enable_grad(), phase.reporting(step):
            loss = _checked_loss(loss_of, model, batch)
        if not loss.requires_grad:
            raise ValueError("loss returned a tensor that does not depend on the model's weights")
        losses.append(phase.finite(loss.item(), "training loss", step))
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_gradient_norm)
        phase.finite(norm.item(), "gradient of the training loss", step)
        optimizer.step()
        if report is not None:
            report("train", step + 1, losses[-1])
    optimizer.zero_grad()
    phase.check_weights(model, steps)
    return losses


def _set_rate(optimizer: Optimizer, peak: float, step: int, steps: int) -> None:
    rate = optim.learning_rate(step, steps, TrainingConfig(learning_rate=peak, warmup=WARM_UP))
    for group in optimizer.param_groups:
        group["lr"] = rate


def _checked_loss(loss_of: Loss, model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a batch, after checking that it is a scalar."""
    loss: Any = loss_of(model, batch)
    if not torch.is_tensor(loss) or loss.ndim:
        given = f"shape {tuple(loss.shape)}" if torch.is_tensor(loss) else named_type(loss)
        raise ValueError(f"loss returned {given}, expected a scalar tensor")
    return loss


def _tensor(output: Any) -> Tensor:
    """Return the output of an attention module, which may be the first of a tuple."""
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first


def _repeated(data: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches again and again."""
    for epoch in itertools.count():
        count = 0
        for batch in data:
            count += 1
            yield batch
        if not count:
            reason = (
                "data can be read only once, expected a DataLoader or a list of batches, or more "
                "batches"
            )
            raise ValueError(reason if epoch else "data has no batches")


def _on_device(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield the batches, with their tensors on the device."""

    def move(x: Any) -> Any:
        if torch.is_tensor(x):
            return x.to(device, non_blocking=True)
        if isinstance(x, Mapping):
            return {name: move(value) for name, value in x.items()}
        return type(x)(map(move, x)) if type(x) in (tuple, list) else x

    return map(move, batches)


def _default_output(model: nn.Module, batch: Any) -> Any:
    """Apply the model to a batch."""
    if isinstance(batch, Mapping):
        return model(**batch)
    inputs = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if not torch.is_tensor(inputs):
        raise _unknown_batch(batch)
    return model(inputs)


def _default_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a transformers model for a mapping, and cross-entropy for a pair."""
    output = _default_output(model, batch)
    if isinstance(batch, Mapping):
        loss = getattr(output, "loss", None)
        if loss is None:
            raise ValueError(
                "the model returned no loss; add labels to the batches, pass loss, or set steps=0"
            )
        return loss
    if not isinstance(batch, tuple | list) or len(batch) != 2:  # noqa: PLR2004
        raise _unknown_batch(batch)
    logits = getattr(output, "logits", output)
    return cross_entropy(logits, batch[1])


def _unknown_batch(batch: Any) -> ValueError:
    return ValueError(
        f"data has batches of type {type(batch).__name__}, expected mappings or pairs (inputs, "
        "classes); for other batches, pass loss"
    )
