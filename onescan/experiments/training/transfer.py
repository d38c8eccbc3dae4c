"""Attention transfer: train new mixers to reproduce those of a teacher, layer by layer.

L = mean over layers of sum_t |m'(x_t) - m(x_t)|^2 / sum_t |m(x_t)|^2

m and m' are the mixers of teacher and student in one layer, and x is the input of the teacher's
mixer, so layers learn independently of each other. The sums are over all real tokens of a batch,
even if it is split over processes or gradient accumulation steps. A student that outputs zeros has
a loss of 1.

Source: the first stage of LoLCATs, arXiv:2410.10254, which trains only feature maps and does not
normalize the loss. Hedgehog, arXiv:2402.04347, matches attention weights instead, which mixers with
an output norm or gate do not have.
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from onescan.experiments.tasks import Batch, Task
from onescan.experiments.training.config import RunConfig, TransferConfig
from onescan.inference.loading import PretrainedModel, load_pretrained_model
from onescan.inputs import GridFormat
from onescan.layers.block import Block
from onescan.layers.mixers import LowerBounds
from onescan.layers.stack import lower_bound_of_each
from onescan.layers.tokens import Documents
from onescan.ops.collectives import sum_over_ranks
from onescan.ops.parallel import sequence_group

STANDARDIZATION = ("channels", "mean", "std")

PerLayer = Float[Tensor, " layers"]
Average = Callable[[PerLayer], PerLayer]


def average_over_ranks(x: PerLayer) -> PerLayer:
    """Average over the ranks of `sequence_parallel`, if any."""
    (total,) = sum_over_ranks(x)
    group = sequence_group(None)
    return total if group is None else total / group.size


class _FinishedError(Exception):
    """Ends the teacher's forward pass after its last block."""


class AttentionTransfer:
    """The loss of attention transfer from a teacher, which is loaded by the first call."""

    def __init__(self, config: TransferConfig, teacher: str) -> None:
        self.config, self.name = config, teacher
        self.teacher: nn.Module | None = None

    @classmethod
    def of(cls, run: RunConfig) -> "AttentionTransfer | None":
        """Return the loss of a run; None if it has no attention transfer."""
        if run.transfer is None:
            return None
        if not run.init_from:
            raise ValueError(f"init_from is {run.init_from!r}, expected a teacher for transfer")
        return cls(run.transfer, run.init_from)

    def loss(
        self,
        student: nn.Module,
        task: Task,
        batch: Batch,
        average: Average = average_over_ranks,
    ) -> Float[Tensor, ""]:
        """Return the loss of a batch of the task. Only mixers receive a gradient.

        The teacher reads the batch in evaluation mode, up to its last block, and each mixer of the
        student runs right after the teacher's. Only activations inside the student's mixers are
        stored for the backward pass.

        Args:
            student: Model to train.
            task: Task of the batch.
            batch: Batch, or this process's part of it.
            average: Function of the `norms` of this part that returns the divisors of the errors:
                if a batch has several parts, the sum of the norms of all parts, averaged over the
                processes, because losses are averaged over them too.

        Raises:
            ValueError: If the teacher cannot be read, has other blocks than the student, or reads
                images of another standardization; or if the student's mixers cannot be trained
                separately.
        """
        teacher, student_blocks = self._matched(student, task)
        module = next((m for m in student.modules() if isinstance(m, LowerBounds)), None)
        bounds = lower_bound_of_each(student_blocks, module)
        errors, norms = _zeros(student_blocks), _zeros(student_blocks)

        def compare(i: int, output: Tensor, *inputs: Any, **options: Any) -> None:
            target, block = output.float(), student_blocks[i]
            with torch.enable_grad():
                y, _ = block.recomputed(block.mix, *inputs, lower_bound=bounds[i], **options)
                errors[i] = errors[i] + (y.float() - target).square().sum()
            norms[i] = norms[i] + target.square().sum()

        _run(teacher, task, batch, compare)
        divisors = average(torch.stack(norms)).clamp(min=torch.finfo(torch.float32).tiny)
        return torch.stack(errors).div(divisors).mean()

    def norms(self, student: nn.Module, task: Task, batch: Batch) -> PerLayer:
        """Return the squared norm of the output of each of the teacher's mixers.

        Raises:
            ValueError: See `loss`.
        """
        teacher, student_blocks = self._matched(student, task)
        norms = _zeros(student_blocks)

        def measure(i: int, output: Tensor, *_: Any, **__: Any) -> None:
            norms[i] = norms[i] + output.float().square().sum()

        _run(teacher, task, batch, measure)
        return torch.stack(norms)

    def load(self, task: Task, device: torch.device) -> nn.Module:
        """Load the teacher, if it is not loaded yet.

        Raises:
            FileNotFoundError, ImportError: See `load_pretrained_model`.
            ValueError: If it cannot be read, or reads images of another standardization.
        """
        if self.teacher is None:
            with torch.random.fork_rng(devices=[]):  # keep the random state of this step
                loaded = load_pretrained_model(self.name)
            _check_format(loaded, task)
            self.teacher = loaded.model.requires_grad_(False).to(device)
        return self.teacher

    def release(self) -> None:
        """Free the teacher's memory."""
        self.teacher = None

    def _matched(self, student: nn.Module, task: Task) -> tuple[nn.Module, list[Block]]:
        """Return the teacher, and the student's blocks, which correspond to the teacher's."""
        teacher = self.load(task, next(student.parameters()).device)
        teacher_blocks, student_blocks = _blocks(teacher), _blocks(student)
        if not teacher_blocks or len(teacher_blocks) != len(student_blocks):
            raise ValueError(
                f"init_from is {self.name!r}, which has {len(teacher_blocks)} blocks, but the "
                f"model has {len(student_blocks)}, expected the same number, at least one"
            )
        if any("embedding" in block.takes for block in student_blocks):
            raise ValueError(
                "transfer is set, but model.mixer reads the embedding, which differs between "
                "teacher and student; expected another mixer or transfer None"
            )
        return teacher, student_blocks


@torch.no_grad()
def _run(teacher: nn.Module, task: Task, batch: Batch, callback: Callable[..., None]) -> None:
    """Apply the teacher up to its last block; after mixer i, call callback(i, output, x, ...)."""

    def hook_of(i: int) -> Callable[..., Any]:
        def hook(_: nn.Module, inputs: Any, options: dict[str, Any], output: Any) -> Any:
            packing = options.get("cu_seqlens")
            documents = None if packing is None else Documents(packing)
            callback(i, output[0], *inputs, keep=options.get("keep"), documents=documents)
            return output[0], None  # drop the teacher's state, such as a cache of keys

        return hook

    with ExitStack() as hooks:
        blocks = _blocks(teacher)
        for i, block in enumerate(blocks):
            hook = block.mixer.register_forward_hook(hook_of(i), with_kwargs=True)
            hooks.callback(hook.remove)
        hooks.callback(blocks[-1].register_forward_hook(_finish).remove)
        with suppress(_FinishedError):
            task.loss(teacher, batch)


def _blocks(model: nn.Module) -> list[Block]:
    return [module for module in model.modules() if isinstance(module, Block)]


def _zeros(blocks: list[Block]) -> list[Tensor]:
    """Return a zero for each block, on its device."""
    device = next(blocks[0].parameters()).device
    return [torch.zeros((), device=device) for _ in blocks]


def _finish(*_: Any) -> None:
    raise _FinishedError


def _check_format(teacher: PretrainedModel, task: Task) -> None:
    """Raise ValueError if images are standardized differently for teacher and student."""
    if not (isinstance(teacher.format, GridFormat) and isinstance(task.format, GridFormat)):
        return
    for name in STANDARDIZATION:
        actual, expected = getattr(teacher.format, name), getattr(task.format, name)
        if actual != expected:
            raise ValueError(
                f"data.{name} is {expected}, expected {actual}, as in the training of init_from "
                f"{teacher.name!r}"
            )
